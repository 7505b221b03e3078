// A linear map of few rows on a CPU, for PyTorch (ctypes) and JAX (XLA's foreign function interface):
// y = x W^T + b and the operation that follows, for weights in float32, bfloat16 or float16. x and all
// sums are in float32.
//
// For one row the time is that of reading W once, for several that of the products. Workers take
// ranges of outputs; a tile of outputs and rows sums its products in registers, so that a number of W
// is read, and widened, once for all rows of a tile.

#include "../cpu/floats.h"

enum { OUTPUTS = 4, ROWS = 4, MIN_WORK = 1 << 15 };

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

// Two vectors, each folded into half of the result.
INLINE Vector halves(Vector a, Vector b) {
  return SHUFFLE(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +
         SHUFFLE(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31);
}

// Sums of four vectors, in elements 0, 4, 8 and 12.
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

INLINE int64_t threads_for(int64_t threads, int64_t work) {
  const int64_t limit = work / MIN_WORK + 1;
  if (threads > limit) threads = limit;
  if (threads > MAX_THREADS) threads = MAX_THREADS;
  return threads < 1 ? 1 : threads;
}

// 32 consecutive numbers, split into even and odd places.
INLINE Pair parted(Vector a, Vector b) {
  return (Pair){SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
}

// Computes `outputs` outputs of `rows` rows.
INLINE void tile(const Share *s, int outputs, int rows, int64_t output, int64_t row, Type type) {
  const int64_t depth = s->shape->depth, ahead = row ? 0 : outputs * depth;
  Vector sums[OUTPUTS][ROWS];
  for (int o = 0; o < outputs; o++)
    for (int r = 0; r < rows; r++) sums[o][r] = (Vector){0};
  int64_t i = 0;
  for (; i + 2 * LANES <= depth; i += 2 * LANES) {
    Pair x[ROWS];
    for (int r = 0; r < rows; r++) {
      const float *from = s->x + (row + r) * depth + i;
      const Vector low = *(const Stored *)from, high = *(const Stored *)(from + LANES);
      x[r] = type == FLOAT32 ? (Pair){low, high} : parted(low, high);
    }
    for (int o = 0; o < outputs; o++) {
      const int64_t at = (output + o) * depth + i;
      const float *from = (const float *)s->weight + at;
      // Prefetch the next band: the processor does not detect that rows of W are contiguous.
      const char *line = (const char *)s->weight + (at + ahead) * (int64_t)bytes_of(type);
      if (ahead) __builtin_prefetch(line, 0, 2);
      if (ahead && type == FLOAT32) __builtin_prefetch(line + 64, 0, 2);
      const Pair w = type == FLOAT32 ? (Pair){*(const Stored *)from, *(const Stored *)(from + LANES)}
                                     : load_pair(s->weight, at, type);
      for (int r = 0; r < rows; r++) sums[o][r] += w.even * x[r].even;
      for (int r = 0; r < rows; r++) sums[o][r] += w.odd * x[r].odd;
    }
  }
  const Vector none = {0};
  for (int o = 0; o < outputs; o++) {
    const Vector y4 = sums_of(sums[o][0], rows > 1 ? sums[o][1] : none,
                              rows > 2 ? sums[o][2] : none, rows > 3 ? sums[o][3] : none);
    for (int r = 0; r < rows; r++) {
      float y = y4[4 * r];
      for (int64_t k = i; k < depth; k++)
        y += load_one(s->weight, (output + o) * depth + k, type) * s->x[(row + r) * depth + k];
      finish(s, row + r, output + o, y, type);
    }
  }
}

// Computes all rows of `outputs` outputs, whose weights stay in a cache.
INLINE void band(const Share *s, int outputs, int wide, int64_t output, Type type) {
  const int64_t rows = s->shape->rows;
  int64_t row = 0;
  if (wide)
    for (; row + ROWS <= rows; row += ROWS) tile(s, outputs, ROWS, output, row, type);
  for (; row + 2 <= rows; row += 2) tile(s, outputs, 2, output, row, type);
  for (; row < rows; row++) tile(s, outputs, 1, output, row, type);
}

INLINE void bands(const Share *s, int wide, Type type) {
  int64_t output = s->first;
  for (; output + OUTPUTS <= s->last; output += OUTPUTS) band(s, OUTPUTS, wide, output, type);
  for (; output < s->last; output++) band(s, 1, wide, output, type);
}

INLINE void share(const Share *s, int wide) {
  if (s->shape->type == FLOAT32) bands(s, wide, FLOAT32);
  else if (s->shape->type == BFLOAT16) bands(s, wide, BFLOAT16);
  else bands(s, wide, FLOAT16);
}

EVERY_CPU static void *work(void *argument) {
#if defined(__x86_64__)
  share(argument, __builtin_cpu_supports("avx512f") != 0);  // enough registers for larger tiles
#else
  share(argument, 0);
#endif
  return NULL;
}

static void run(const Shape *s, const float *x, const void *weight, const void *bias,
                const void *other, void *out, Pool team) {
  const int64_t threads = threads_for(s->threads, s->outputs * s->depth);
  Share shares[MAX_THREADS];
  const int64_t bands = (s->outputs + OUTPUTS - 1) / OUTPUTS;
  for (int64_t i = 0; i < threads; i++) {
    const int64_t last = bands * (i + 1) / threads * OUTPUTS;
    shares[i] = (Share){s, x, weight, bias, other, out, bands * i / threads * OUTPUTS,
                        last < s->outputs ? last : s->outputs};
  }
  parallel_for(&(Tasks){work, (char *)shares, sizeof *shares, threads, 0}, team);
}

EXPORT void griffin_linear(const int64_t *sizes, const float *x, const void *weight,
                           const void *bias, const void *other, void *out) {
  const Shape s = {sizes[0], sizes[1], sizes[2], (Type)sizes[3], (Type)sizes[4], (Then)sizes[5],
                   sizes[6]};
  run(&s, x, weight, bias, other, out, griffin_team);
}

// x [N, I] in float32 and W [O, I] -> x W^T in float32.
EXPORT void *griffin_xla_linear(CallFrame *frame) {
  if (is_metadata_query(frame)) return NULL;
  const Buffer *x = frame->in.values[0], *weight = frame->in.values[1];
  const Shape s = {x->dims[0], x->dims[1],      weight->dims[0], type_of(weight),
                   FLOAT32,    NOTHING,         griffin_threads};
  run(&s, x->data, weight->data, NULL, NULL, frame->out.values[0]->data, NULL);
  return NULL;
}
