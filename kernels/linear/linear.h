// What the products of floating-point weights (cpu.c) and of packed ones (packed.c) share.

#ifndef GRIFFIN_LINEAR_H
#define GRIFFIN_LINEAR_H

#include "../cpu/floats.h"

enum { OUTPUTS = 4, ROWS = 4, LEAST_WORK = 1 << 15 };

typedef enum { NOTHING, GELU, MUL } Then;

typedef struct {
  int64_t rows, depth, outputs;  // N, I, O
  Type type, out_type;           // of W, b and `other`; of the results
  Then then;
  int64_t threads;
} Shape;

typedef struct {
  const Shape *shape;
  const float *x;                     // [N, I]
  const void *weight, *bias, *other;  // [O, I]; [O] or NULL; [N, O] or NULL
  void *out;                          // [N, O]
  int64_t first, last;                // outputs
} Share;

#if defined(__clang__)
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (Words){__VA_ARGS__})
#endif

// Each vector folded into half of one.
INLINE Vector halves(Vector a, Vector b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// The sums of four vectors, in elements 0, 4, 8 and 12.
INLINE Vector sums_of(Vector a, Vector b, Vector c, Vector d) {
  const Vector ab = halves(a, b), cd = halves(c, d);
  Vector all = SHUFFLE(ab, cd, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +
               SHUFFLE(ab, cd, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31);
  all += SHUFFLE(all, all, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return all + SHUFFLE(all, all, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
}

INLINE float gelu(float x) {  // by tanh: x / (1 + exp(-2 u)), u = sqrt(2 / pi) (x + 0.044715 x^3)
  const float u = 1.5957691216057308f * (x + 0.044715f * x * x * x);
  if (u < -80.0f) return x * 0.0f;
  float scale, rest;
  split_exp(u > 80.0f ? -80.0f : -u, &scale, &rest);
  return x / ((1.0f + scale) + scale * rest);
}

INLINE float nearest(float value, Type type) {
  if (type == FLOAT32) return value;
  const uint16_t half = rounded(value, type);
  return load_one(&half, 0, type);
}

INLINE void finish(const Share *s, int64_t row, int64_t output, float y, Type type) {
  const Shape *shape = s->shape;
  const int64_t at = row * shape->outputs + output;
  if (s->bias) y += load_one(s->bias, output, type);
  if (shape->then != NOTHING) y = nearest(y, shape->out_type);
  if (shape->then == GELU) y = gelu(y);
  if (shape->then == MUL) y *= load_one(s->other, at, type);
  store_one(s->out, at, y, shape->out_type);
}

INLINE int64_t threads_for(int64_t wanted, int64_t work) {
  const int64_t most = work / LEAST_WORK + 1;
  if (wanted > most) wanted = most;
  if (wanted > MOST_THREADS) wanted = MOST_THREADS;
  return wanted < 1 ? 1 : wanted;
}

#endif
