// What the kernels for the CPU share. Neither Python nor XLA is needed to build them.

#ifndef GRIFFIN_CPU_H
#define GRIFFIN_CPU_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#define HIDDEN __attribute__((visibility("hidden")))
#define INLINE static inline __attribute__((always_inline))
#define RESTRICT __restrict__
#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__clang__)
#define EVERY_CPU __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define EVERY_CPU
#endif

typedef float Vector __attribute__((vector_size(64)));
typedef float Stored __attribute__((vector_size(64), aligned(4), may_alias));  // 16 floats of an array
enum { LANES = 16, MOST_THREADS = 256 };

INLINE int64_t limit(int64_t value, int64_t low, int64_t high) {
  return value < low ? low : value > high ? high : value;
}

INLINE float power_of_two(int32_t n) {  // -126 <= n <= 127
  int32_t bits = (n + 127) << 23;
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

// exp(x) - 1 in parts: *scale * (1 + *rest) - 1, with *rest = exp(r) - 1 for |r| <= ln(2) / 2.
INLINE void split_exp(float x, float *scale, float *rest) {  // -87 <= x <= 88
  const float shift = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  float n = (x * 1.44269504088896341f + shift) - shift;
  float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  *rest = p * r * r + r;
  *scale = power_of_two((int32_t)n);
}

// ---- threads (runtime.c) --------------------------------------------------------------------

// Work on `count` tasks, described by `size` bytes each, which threads take one after the other.
typedef struct {
  void *(*work)(void *);
  char *tasks;
  size_t size;
  int64_t count, next;
} Tasks;

// GOMP_parallel of the OpenMP that the caller's other work runs on, if it has one: its threads are
// there already, and spin for a while after that work, in the way of any others.
typedef void (*Pool)(void (*)(void *), void *, unsigned, unsigned);
HIDDEN extern Pool griffin_team;

// Does the work, on the threads of a pool or, where it is NULL, on those of a team of its own, or on
// the caller alone while the team works for another.
HIDDEN void parallel_for(Tasks *tasks, Pool team);

// ---- XLA (xla.c) ----------------------------------------------------------------------------

// The part of XLA's stable C interface (xla/ffi/api/c_api.h, version 0.3) that is needed here.
typedef struct Extension {
  size_t struct_size;
  int type;
  struct Extension *next;
} Extension;

typedef struct {
  size_t struct_size;
  Extension *extension_start;
  int major_version, minor_version;
} Version;

typedef struct {
  size_t struct_size;
  Version api_version;
  uint32_t traits;
} Metadata;

typedef struct {
  Extension base;
  Metadata *metadata;
} MetadataExtension;

typedef struct {
  size_t struct_size;
  Extension *extension_start;
  int dtype;
  void *data;
  int64_t rank;
  int64_t *dims;
} Buffer;

typedef struct {
  size_t struct_size;
  Extension *extension_start;
  int64_t size;
  int *types;
  Buffer **values;
} Buffers;

typedef struct {
  size_t struct_size;
  Extension *extension_start;
  const void *api;
  void *context;
  int stage;
  Buffers in, out;
} CallFrame;

HIDDEN extern int64_t griffin_threads;  // of calls from XLA

// Whether XLA queries a handler's version instead of calling it; then the query is answered.
HIDDEN int is_metadata_query(CallFrame *frame);

#endif
