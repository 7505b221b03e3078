// A linear map of few rows on a CPU, for PyTorch (ctypes) and JAX (XLA's foreign function interface):
// y = x W^T + b and what follows it, of weights in float32, bfloat16 or float16; x is in float32, and
// so are all sums.
//
// Of one row the time is that of reading W once, of some rows that of the products. Workers take
// ranges of outputs; a tile of outputs and rows adds its products up in registers, so that a number of
// W is read, and widened, once for the rows of a tile.

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

// 32 numbers in a row: those at even places, and those at odd ones.
INLINE Pair parted(Vector a, Vector b) {
  return (Pair){SHUFFLE(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                SHUFFLE(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
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

// `outputs` outputs of `rows` rows.
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
      // Of the next band: the processor does not see that the rows of W lie behind each other.
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

// All rows of `outputs` outputs, whose weights stay in a cache.
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
  share(argument, __builtin_cpu_supports("avx512f") != 0);  // it has registers for larger tiles
#else
  share(argument, 0);
#endif
  return NULL;
}

static int64_t threads_for(int64_t wanted, int64_t work) {
  const int64_t most = work / LEAST_WORK + 1;
  if (wanted > most) wanted = most;
  if (wanted > MOST_THREADS) wanted = MOST_THREADS;
  return wanted < 1 ? 1 : wanted;
}

static void run(const Shape *s, const float *x, const void *weight, const void *bias,
                const void *other, void *out, Pool team) {
  const int64_t threads = threads_for(s->threads, s->outputs * s->depth);
  Share shares[MOST_THREADS];
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

// ---- weights in 4 or 8 bits -------------------------------------------------------------------
//
// Each row is blocks of 64 elements with a scale, or has one scale, as bitsandbytes and MLX store
// them. An element of 4 bits is one of 16 values, made once for a block; all values are those that
// the libraries give.

typedef enum { NF4, AFFINE4, AFFINE8, FP4, INT8 } Packing;  // of packed_torch.py
enum { BLOCK = 64, BLOCK_VECTORS = BLOCK / LANES };

typedef uint8_t StoredBytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint32_t WordsOfBytes __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint64_t Longs __attribute__((vector_size(64)));
typedef int32_t Numbers __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint16_t StoredHalves __attribute__((vector_size(32), aligned(2), may_alias));
typedef float Eight __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));

typedef struct {
  Packing packing;
  Type type;                     // to which values are rounded; of affine scales and shifts
  int64_t depth;                 // a multiple of BLOCK
  const uint8_t *elements;       // [O, I / 2], or [O, I] of 8 bits
  const void *scales, *shifts;   // [O, I / BLOCK], [O] of INT8; others than affine have no shifts
} Packed;

// 16 values, of which a number of 4 bits is one.
INLINE Vector looked_up(Vector table, Words at, int wide) {
#if defined(__clang__)
  Vector found;
  for (int i = 0; i < LANES; i++) found[i] = table[at[i]];
  return found;
#else
  if (wide) return __builtin_shuffle(table, at);
  Eight low, high, halves[2];
  EightWords where[2];
  memcpy(&low, &table, sizeof low);
  memcpy(&high, (const char *)&table + sizeof low, sizeof high);
  memcpy(where, &at, sizeof where);
  for (int i = 0; i < 2; i++) halves[i] = __builtin_shuffle(low, high, where[i]);
  Vector found;
  memcpy(&found, halves, sizeof found);
  return found;
#endif
}

INLINE Vector nearest_of(Vector values, Type type) {
  if (type != BFLOAT16) return values;
  const Words words = (Words)values;
  return (Vector)((words + 0x7fff + (words >> 16 & 1)) & 0xffff0000);
}

INLINE Vector scaled(Vector numbers, float scale, float shift, Type type) {
  Vector product = nearest_of(numbers * scale, type);
  if (type != BFLOAT16) __asm__("" : "+m"(product));  // rounded by itself, not fused with the sum
  return nearest_of(product + shift, type);
}

INLINE uint64_t eight_bytes(const uint8_t *from) {
  uint64_t bytes;
  memcpy(&bytes, from, sizeof bytes);
  return bytes;
}

// The bytes of a block as numbers. GCC 12 turns a conversion of vectors into one of each byte.
INLINE void words_of(const uint8_t *from, int wide, Words *words) {
  if (!wide) {
    for (int i = 0; i < BLOCK_VECTORS; i++)
      words[i] = __builtin_convertvector(*(const StoredBytes *)(from + i * LANES), Words);
    return;
  }
  const Words all = *(const WordsOfBytes *)from;
  words[0] = SHUFFLE(all, all, 0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3);
  words[1] = SHUFFLE(all, all, 4, 4, 4, 4, 5, 5, 5, 5, 6, 6, 6, 6, 7, 7, 7, 7);
  words[2] = SHUFFLE(all, all, 8, 8, 8, 8, 9, 9, 9, 9, 10, 10, 10, 10, 11, 11, 11, 11);
  words[3] = SHUFFLE(all, all, 12, 12, 12, 12, 13, 13, 13, 13, 14, 14, 14, 14, 15, 15, 15, 15);
  const Words places = {0, 8, 16, 24, 0, 8, 16, 24, 0, 8, 16, 24, 0, 8, 16, 24};
  for (int i = 0; i < BLOCK_VECTORS; i++) words[i] = words[i] >> places & 255;
}

// The numbers of 4 bits of 8 bytes, in the last bits of words. Those at even places are the lower
// ones of the bytes, or the upper ones.
INLINE Words nibbles_of(const uint8_t *from, int upper_first) {
  const uint64_t low = 0x0f0f0f0f0f0f0f0f;
  uint64_t bytes = eight_bytes(from);
  if (upper_first) bytes = (bytes >> 4 & low) | (bytes & low) << 4;
  const Longs each = ((Longs){0} + bytes) >> (Longs){0, 8, 16, 24, 32, 40, 48, 56};
  return (Words)((each & 15) | each << 28) & 15;
}

// The values of a block.
INLINE void block_values(const Packed *p, Packing packing, int64_t row, int64_t block, int wide,
                         Vector *values) {
  const int64_t at = row * (p->depth / BLOCK) + block;
  if (packing == AFFINE8 || packing == INT8) {
    const uint8_t *from = p->elements + at * BLOCK;
    const int64_t of = packing == INT8 ? row : at;
    const float scale = load_one(p->scales, of, packing == INT8 ? FLOAT32 : p->type);
    const float shift = packing == INT8 ? 0 : load_one(p->shifts, at, p->type);
    Words words[BLOCK_VECTORS];
    words_of(from, wide, words);
    for (int i = 0; i < BLOCK_VECTORS; i++) {
      if (packing == INT8) {
        const Vector numbers = __builtin_convertvector((Numbers)(words[i] << 24) >> 24, Vector);
        values[i] = nearest_of(numbers * scale * 7.874015718698502e-3f, p->type);  // 1 / 127
      } else {
        const Vector numbers = __builtin_convertvector((Numbers)words[i], Vector);
        values[i] = scaled(numbers, scale, shift, p->type);
      }
    }
    return;
  }
  Vector table;
  if (packing == FP4) {
    const Vector code = {0.0f, 0.0625f, 8, 12, 4, 6, 2, 3, -0.0f, -0.0625f, -8, -12, -4, -6, -2, -3};
    table = nearest_of(code / 12 * load_one(p->scales, at, FLOAT32), p->type);
  } else if (packing == NF4) {
    const Vector code = {
        -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
        -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
        0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
        0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
    table = nearest_of(code * load_one(p->scales, at, FLOAT32), p->type);
  } else {
    const Vector numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    table = scaled(numbers, load_one(p->scales, at, p->type), load_one(p->shifts, at, p->type),
                   p->type);
  }
  const uint8_t *from = p->elements + at * (BLOCK / 2);
  for (int i = 0; i < BLOCK_VECTORS; i++)
    values[i] = looked_up(table, nibbles_of(from + i * (LANES / 2), packing != AFFINE4), wide);
}

typedef struct {
  Share share;  // whose weight is not there
  const Packed *packed;
} PackedShare;

INLINE void packed_tile(const PackedShare *s, Packing packing, int outputs, int rows,
                        int64_t output, int64_t row, int wide) {
  const int64_t depth = s->packed->depth;
  Vector sums[OUTPUTS][ROWS];
  for (int o = 0; o < outputs; o++)
    for (int r = 0; r < rows; r++) sums[o][r] = (Vector){0};
  for (int64_t block = 0; block < depth / BLOCK; block++) {
    for (int o = 0; o < outputs; o++) {
      Vector w[BLOCK_VECTORS];
      block_values(s->packed, packing, output + o, block, wide, w);
      for (int r = 0; r < rows; r++) {
        const float *from = s->share.x + (row + r) * depth + block * BLOCK;
        for (int i = 0; i < BLOCK_VECTORS; i++)
          sums[o][r] += w[i] * *(const Stored *)(from + i * LANES);
      }
    }
  }
  const Vector none = {0};
  for (int o = 0; o < outputs; o++) {
    const Vector y4 = sums_of(sums[o][0], rows > 1 ? sums[o][1] : none,
                              rows > 2 ? sums[o][2] : none, rows > 3 ? sums[o][3] : none);
    for (int r = 0; r < rows; r++)
      finish(&s->share, row + r, output + o, y4[4 * r], s->share.shape->type);
  }
}

INLINE void packed_share(const PackedShare *s, Packing packing, int wide) {
  const int64_t rows = s->share.shape->rows;
  int64_t output = s->share.first;
  for (; output + OUTPUTS <= s->share.last; output += OUTPUTS) {
    int64_t row = 0;
    for (; row + ROWS <= rows; row += ROWS) packed_tile(s, packing, OUTPUTS, ROWS, output, row, wide);
    for (; row + 2 <= rows; row += 2) packed_tile(s, packing, OUTPUTS, 2, output, row, wide);
    for (; row < rows; row++) packed_tile(s, packing, OUTPUTS, 1, output, row, wide);
  }
  for (; output < s->share.last; output++)
    for (int64_t row = 0; row < rows; row++) packed_tile(s, packing, 1, 1, output, row, wide);
}

INLINE void packed_shares(const PackedShare *s, int wide) {
  switch (s->packed->packing) {
    case NF4: packed_share(s, NF4, wide); break;
    case AFFINE4: packed_share(s, AFFINE4, wide); break;
    case AFFINE8: packed_share(s, AFFINE8, wide); break;
    case FP4: packed_share(s, FP4, wide); break;
    case INT8: packed_share(s, INT8, wide); break;
  }
}

INLINE int is_wide(void) {
#if defined(__x86_64__)
  return __builtin_cpu_supports("avx512f") != 0;
#else
  return 0;
#endif
}

EVERY_CPU static void *packed_work(void *argument) {
  packed_shares(argument, is_wide());
  return NULL;
}

typedef struct {
  const Packed *packed;
  Type out_type;  // FLOAT32 or BFLOAT16
  void *out;      // [O, I]
  int64_t first, last;
} Unpacking;

INLINE void unpack(const Unpacking *s, Packing packing, int wide) {
  const int64_t depth = s->packed->depth;
  for (int64_t row = s->first; row < s->last; row++) {
    for (int64_t block = 0; block < depth / BLOCK; block++) {
      Vector w[BLOCK_VECTORS];
      block_values(s->packed, packing, row, block, wide, w);
      for (int i = 0; i < BLOCK_VECTORS; i++) {
        const int64_t at = row * depth + block * BLOCK + i * LANES;
        if (s->out_type == FLOAT32) {
          *(Stored *)((float *)s->out + at) = w[i];
        } else {
          const Words words = (Words)nearest_of(w[i], BFLOAT16) >> 16;
          *(StoredHalves *)((uint16_t *)s->out + at) = __builtin_convertvector(words, Halves);
        }
      }
    }
  }
}

EVERY_CPU static void *unpack_work(void *argument) {
  const Unpacking *s = argument;
  const int wide = is_wide();
  switch (s->packed->packing) {
    case NF4: unpack(s, NF4, wide); break;
    case AFFINE4: unpack(s, AFFINE4, wide); break;
    case AFFINE8: unpack(s, AFFINE8, wide); break;
    case FP4: unpack(s, FP4, wide); break;
    case INT8: unpack(s, INT8, wide); break;
  }
  return NULL;
}

// As griffin_linear.
static void run_packed(const Shape *s, const Packed *packed, const float *x, const void *bias,
                       const void *other, void *out, Pool team) {
  const int64_t threads = threads_for(s->threads, s->outputs * s->depth);
  PackedShare shares[MOST_THREADS];
  const int64_t bands = (s->outputs + OUTPUTS - 1) / OUTPUTS;
  for (int64_t i = 0; i < threads; i++) {
    const int64_t last = bands * (i + 1) / threads * OUTPUTS;
    shares[i] = (PackedShare){{s, x, NULL, bias, other, out, bands * i / threads * OUTPUTS,
                               last < s->outputs ? last : s->outputs},
                              packed};
  }
  parallel_for(&(Tasks){packed_work, (char *)shares, sizeof *shares, threads, 0}, team);
}

EXPORT void griffin_packed(const int64_t *sizes, const float *x, const void *elements,
                           const void *scales, const void *shifts, const void *bias,
                           const void *other, void *out) {
  const Shape s = {sizes[0], sizes[1], sizes[2], (Type)sizes[3], (Type)sizes[4], (Then)sizes[5],
                   sizes[6]};
  const Packed packed = {(Packing)sizes[7], (Type)sizes[8], s.depth, elements, scales, shifts};
  run_packed(&s, &packed, x, bias, other, out, griffin_team);
}

static void run_unpack(const Packed *packed, int64_t rows, Type type, int64_t most_threads, void *out,
                       Pool team) {
  const int64_t threads = threads_for(most_threads, rows * packed->depth);
  Unpacking shares[MOST_THREADS];
  for (int64_t i = 0; i < threads; i++)
    shares[i] = (Unpacking){packed, type, out, rows * i / threads, rows * (i + 1) / threads};
  parallel_for(&(Tasks){unpack_work, (char *)shares, sizeof *shares, threads, 0}, team);
}

// Rows of a matrix in float32 or bfloat16.
EXPORT void griffin_unpack(const int64_t *sizes, const void *elements, const void *scales,
                           const void *shifts, void *out) {
  const Packed packed = {(Packing)sizes[3], (Type)sizes[4], sizes[1], elements, scales, shifts};
  run_unpack(&packed, sizes[0], (Type)sizes[2], sizes[5], out, griffin_team);
}

// Elements, scales and shifts, the arguments of a call from XLA. Where there are no shifts, they are
// as many numbers as `Packing` counts, in the dtype of the values.
INLINE Packed packed_of(Buffer **arguments) {
  const Buffer *elements = arguments[0], *scales = arguments[1], *shifts = arguments[2];
  const int64_t stored = elements->dims[1];
  const Packing packing = shifts->rank == 1                    ? (Packing)shifts->dims[0]
                          : stored == scales->dims[1] * BLOCK ? AFFINE8
                                                              : AFFINE4;
  const int64_t depth = packing == AFFINE8 || packing == INT8 ? stored : 2 * stored;
  return (Packed){packing, type_of(shifts), depth, elements->data, scales->data, shifts->data};
}

// x [N, I] in float32 and a matrix -> x W^T in float32.
EXPORT void *griffin_xla_packed(CallFrame *frame) {
  if (is_metadata_query(frame)) return NULL;
  const Buffer *x = frame->in.values[0], *out = frame->out.values[0];
  const Packed packed = packed_of(frame->in.values + 1);
  const Shape s = {x->dims[0], packed.depth, out->dims[1],   FLOAT32,
                   FLOAT32,    NOTHING,      griffin_threads};
  run_packed(&s, &packed, x->data, NULL, NULL, out->data, NULL);
  return NULL;
}

// A matrix -> its values in float32 or bfloat16.
EXPORT void *griffin_xla_unpack(CallFrame *frame) {
  if (is_metadata_query(frame)) return NULL;
  const Buffer *out = frame->out.values[0];
  const Packed packed = packed_of(frame->in.values);
  run_unpack(&packed, out->dims[0], type_of(out), griffin_threads, out->data, NULL);
  return NULL;
}
