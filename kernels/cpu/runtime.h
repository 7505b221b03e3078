// Shared code of the kernels for the CPU. Building them needs neither Python nor XLA.

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
typedef float Stored __attribute__((vector_size(64), aligned(4), may_alias));  // unaligned Vector
enum { LANES = 16, MAX_THREADS = 256 };

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

// `count` tasks, described by `size` bytes each, which threads take one after the other.
typedef struct {
  void *(*work)(void *);
  char *tasks;
  size_t size;
  int64_t count, next;
} Tasks;

// GOMP_parallel of the caller's OpenMP, if it has one: its threads exist already, and spin for a while
// after other work, which would slow down any other threads.
typedef void (*Pool)(void (*)(void *), void *, unsigned, unsigned);
HIDDEN extern Pool griffin_team;

// Runs the tasks on the threads of a pool or, for NULL, on the team of runtime.c, or on the caller
// alone while that team is in use.
HIDDEN void parallel_for(Tasks *tasks, Pool team);

// ---- XLA (xla.c) ----------------------------------------------------------------------------

// The needed part of XLA's stable C interface (xla/ffi/api/c_api.h, version 0.3).
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

HIDDEN extern int64_t griffin_threads;  // number of threads for calls from XLA

// Answers XLA's query of a handler's version; returns whether the call was such a query.
HIDDEN int is_metadata_query(CallFrame *frame);

#endif
