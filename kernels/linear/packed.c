// Products of few rows with weights in 4 or 8 bits, and those weights as floats, on a CPU, for PyTorch
// and JAX as cpu.c.
//
// Each row is blocks of 64 elements with a scale, or has one scale, as bitsandbytes and MLX store
// them. An element of 4 bits is one of 16 values, made once for a block. Values are those that the
// libraries give, rounded as there; but products in bfloat16 take elements of 8 bits as they are
// before they are rounded.

#include <stdlib.h>

#include "linear.h"

typedef enum { NF4, AFFINE4, AFFINE8, FP4, INT8 } Packing;  // of packed_torch.py
enum { BLOCK = 64, BLOCK_VECTORS = BLOCK / LANES, MOST_TILE_ROWS = 2 * ROWS };

static const float ONE_127TH = 7.874015718698502e-3f;

typedef uint8_t StoredBytes __attribute__((vector_size(16), aligned(1), may_alias));
typedef uint32_t WordsOfBytes __attribute__((vector_size(64), aligned(1), may_alias));
typedef uint64_t Longs __attribute__((vector_size(64)));
typedef int32_t Numbers __attribute__((vector_size(64)));
typedef uint16_t Halves __attribute__((vector_size(32)));
typedef uint16_t StoredHalves __attribute__((vector_size(32), aligned(2), may_alias));
typedef float Eight __attribute__((vector_size(32)));
typedef uint32_t EightWords __attribute__((vector_size(32)));

INLINE int in_8_bits(Packing packing) { return packing == AFFINE8 || packing == INT8; }

typedef struct {
  Packing packing;
  Type type, rounded_to;         // of affine scales and shifts; of the values
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

// The numbers that 4 bits of bitsandbytes mean.
INLINE Vector code_of(Packing packing) {
  const Vector nf4 = {
      -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
      -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
      0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
      0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
  const Vector fp4 = {0.0f, 0.0625f, 8, 12, 4, 6, 2, 3, -0.0f, -0.0625f, -8, -12, -4, -6, -2, -3};
  return packing == NF4 ? nf4 : fp4 / 12;
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
        values[i] = nearest_of(numbers * scale * ONE_127TH, p->rounded_to);
      } else {
        const Vector numbers = __builtin_convertvector((Numbers)words[i], Vector);
        values[i] = p->rounded_to == p->type ? scaled(numbers, scale, shift, p->type)
                                             : numbers * scale + shift;
      }
    }
    return;
  }
  Vector table;
  if (packing != AFFINE4) {
    table = nearest_of(code_of(packing) * load_one(p->scales, at, FLOAT32), p->rounded_to);
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
  const uint16_t *halves;    // [N, I], of `inputs_as_halves`
  const float *block_sums;   // [N, I / BLOCK], of the same
} PackedShare;

// What outputs need later: no processor guesses it from several short rows at a time.
INLINE void prefetch_block(const Packed *p, Packing packing, int64_t row, int64_t block) {
  const int64_t at = row * (p->depth / BLOCK) + block;
  __builtin_prefetch(p->elements + at * (in_8_bits(packing) ? BLOCK : BLOCK / 2));
}

INLINE void packed_tile(const PackedShare *s, Packing packing, int outputs, int rows,
                        int64_t output, int64_t row, int wide) {
  const int64_t depth = s->packed->depth;
  Vector sums[OUTPUTS][ROWS];
  for (int o = 0; o < outputs; o++)
    for (int r = 0; r < rows; r++) sums[o][r] = (Vector){0};
  for (int64_t block = 0; block < depth / BLOCK; block++) {
    for (int o = 0; o < outputs; o++) {
      prefetch_block(s->packed, packing, output + o + outputs, block);
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

// ---- in bfloat16, on processors that multiply it -------------------------------------------------
//
// There an instruction rounds 32 values, and another adds 32 products up in float32. Values below
// 1.2e-38 count as 0. Numbers of 8 bits are exact in bfloat16: they are multiplied as they are, and
// their sums scaled and shifted in float32, so that no element is rounded.

#if defined(__x86_64__) && __has_include(<avx512bf16intrin.h>)
#include <immintrin.h>
#define BFLOAT16_CPU __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi,avx512bf16,gfni")))
#define BFLOAT16_INLINE static inline __attribute__((always_inline)) BFLOAT16_CPU

EXPORT int griffin_multiplies_bfloat16(void) {
  return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("gfni");
}

BFLOAT16_INLINE __m256i rounded_halves(__m512 values) { return (__m256i)_mm512_cvtneps_pbh(values); }

BFLOAT16_INLINE __m512 widened(__m256i halves) {
  return (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16);
}

// The lower and the upper bytes of 1, 3, ... 255 in bfloat16.
typedef struct { __m512i lower[2], upper[2]; } Odd;

BFLOAT16_INLINE Odd odd_numbers(void) {
  uint8_t lower[128], upper[128];
  for (int i = 0; i < 128; i++) {
    const uint32_t bits = bits_of((float)(2 * i + 1));
    lower[i] = (uint8_t)(bits >> 16);
    upper[i] = (uint8_t)(bits >> 24);
  }
  Odd found;
  for (int i = 0; i < 2; i++) {
    found.lower[i] = _mm512_loadu_si512(lower + 64 * i);
    found.upper[i] = _mm512_loadu_si512(upper + 64 * i);
  }
  return found;
}

// A block of 4 bits as values, those of the lower bits first. One of 8 bits as odd numbers, 8 from
// each 16 bytes in the first vector: of INT8 twice the elements and 1, of AFFINE8 twice the elements
// less 255.
BFLOAT16_INLINE void block_halves(const Packed *p, Packing packing, const Odd *odd, int64_t row,
                                  int64_t block, __m512i *values) {
  const int64_t at = row * (p->depth / BLOCK) + block;
  if (in_8_bits(packing)) {
    const __m512i elements = _mm512_loadu_si512(p->elements + at * BLOCK);
    // In each byte bit 7 is spread over the others; of AFFINE8 all are turned around then. So bit 7
    // is the sign, and the others say which number it is.
    const __m512i spread = _mm512_set1_epi64((long long)0x8182848890a0c080);
    const __m512i which = packing == INT8 ? _mm512_gf2p8affine_epi64_epi8(elements, spread, 0)
                                          : _mm512_gf2p8affine_epi64_epi8(elements, spread, 0xff);
    const __m512i lower = _mm512_permutex2var_epi8(odd->lower[0], which, odd->lower[1]);
    __m512i upper = _mm512_permutex2var_epi8(odd->upper[0], which, odd->upper[1]);
    upper = _mm512_ternarylogic_epi64(upper, which, _mm512_set1_epi8((char)128), 0xf8);  // a | b & c
    values[0] = _mm512_unpacklo_epi8(lower, upper);
    values[1] = _mm512_unpackhi_epi8(lower, upper);
    return;
  }
  __m256i table;
  if (packing == AFFINE4) {
    const Vector numbers = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const __m512 scale = _mm512_set1_ps(load_one(p->scales, at, BFLOAT16));
    const __m512 shift = _mm512_set1_ps(load_one(p->shifts, at, BFLOAT16));
    const __m512 products = widened(rounded_halves(_mm512_mul_ps((__m512)numbers, scale)));
    table = rounded_halves(_mm512_add_ps(products, shift));
  } else {
    table = rounded_halves((__m512)code_of(packing) * load_one(p->scales, at, FLOAT32));
  }
  // Of an index 5 bits count: the table is there twice, so that the fifth may be anything.
  const __m512i twice = _mm512_broadcast_i64x4(table);
  const __m256i bytes = _mm256_loadu_si256((const __m256i *)(p->elements + at * (BLOCK / 2)));
  const __m512i words = _mm512_cvtepu8_epi16(bytes);
  values[0] = _mm512_permutexvar_epi16(words, twice);
  values[1] = _mm512_permutexvar_epi16(_mm512_srli_epi16(words, 4), twice);
}

// What is added to a product of AFFINE8: the shifts, and the 255 halves by which elements differ from
// half the numbers.
BFLOAT16_INLINE float shifted(const PackedShare *s, int64_t output, int64_t row) {
  const int64_t blocks = s->packed->depth / BLOCK;
  const uint16_t *scales = (const uint16_t *)s->packed->scales + output * blocks;
  const uint16_t *shifts = (const uint16_t *)s->packed->shifts + output * blocks;
  const float *sums = s->block_sums + row * blocks;
  __m512 all = _mm512_setzero_ps();
  for (int64_t block = 0; block < blocks; block += LANES) {
    const __mmask16 there = (__mmask16)(blocks - block < LANES ? (1 << (blocks - block)) - 1 : -1);
    const __m512 scale = widened(_mm256_maskz_loadu_epi16(there, scales + block));
    const __m512 shift = widened(_mm256_maskz_loadu_epi16(there, shifts + block));
    const __m512 middle = _mm512_fmadd_ps(scale, _mm512_set1_ps(127.5f), shift);
    all = _mm512_fmadd_ps(middle, _mm512_maskz_loadu_ps(there, sums + block), all);
  }
  return _mm512_reduce_add_ps(all);
}

INLINE float sum_of(const float *values, int64_t count) {
  float sum = 0;
  for (int64_t i = 0; i < count; i++) sum += values[i];
  return sum;
}

BFLOAT16_INLINE void halves_tile(const PackedShare *s, Packing packing, const Odd *odd,
                                 int outputs, int rows, int64_t output, int64_t row) {
  const int64_t depth = s->packed->depth, blocks = depth / BLOCK;
  __m512 sums[OUTPUTS][MOST_TILE_ROWS];
  for (int o = 0; o < outputs; o++)
    for (int r = 0; r < rows; r++) sums[o][r] = _mm512_setzero_ps();
  for (int64_t block = 0; block < blocks; block++) {
    __m512i w[OUTPUTS][2];
    __m512 scales[OUTPUTS];
    for (int o = 0; o < outputs; o++) {
      prefetch_block(s->packed, packing, output + o + outputs, block);
      block_halves(s->packed, packing, odd, output + o, block, w[o]);
      if (packing == AFFINE8)
        scales[o] =
            _mm512_set1_ps(load_one(s->packed->scales, (output + o) * blocks + block, BFLOAT16));
    }
    for (int r = 0; r < rows; r++) {
      const uint16_t *from = s->halves + (row + r) * depth + block * BLOCK;
      const __m512bh x[2] = {(__m512bh)_mm512_loadu_si512(from),
                             (__m512bh)_mm512_loadu_si512(from + 2 * LANES)};
      for (int o = 0; o < outputs; o++) {
        __m512 sum = packing == AFFINE8 ? _mm512_setzero_ps() : sums[o][r];
        for (int i = 0; i < 2; i++) sum = _mm512_dpbf16_ps(sum, (__m512bh)w[o][i], x[i]);
        sums[o][r] = packing == AFFINE8 ? _mm512_fmadd_ps(sum, scales[o], sums[o][r]) : sum;
      }
    }
  }
  for (int o = 0; o < outputs; o++)
    for (int r = 0; r < rows; r++) {
      float y = _mm512_reduce_add_ps(sums[o][r]);
      if (packing == AFFINE8) y = 0.5f * y + shifted(s, output + o, row + r);
      if (packing == INT8) {
        y = 0.5f * (y - sum_of(s->block_sums + (row + r) * blocks, blocks));
        y *= load_one(s->packed->scales, output + o, FLOAT32) * ONE_127TH;
      }
      finish(&s->share, row + r, output + o, y, s->share.shape->type);
    }
}

BFLOAT16_INLINE void halves_band(const PackedShare *s, Packing packing, const Odd *odd,
                                 int outputs, int64_t output) {
  const int64_t rows = s->share.shape->rows;
  int64_t row = 0;
  if (outputs <= 2)
    for (; row + 2 * ROWS <= rows; row += 2 * ROWS)
      halves_tile(s, packing, odd, outputs, 2 * ROWS, output, row);
  for (; row + ROWS <= rows; row += ROWS)
    halves_tile(s, packing, odd, outputs, ROWS, output, row);
  for (; row + 2 <= rows; row += 2) halves_tile(s, packing, odd, outputs, 2, output, row);
  for (; row < rows; row++) halves_tile(s, packing, odd, outputs, 1, output, row);
}

BFLOAT16_INLINE void halves_share(const PackedShare *s, Packing packing) {
  const Odd odd = odd_numbers();
  int64_t output = s->share.first;
  if (s->share.shape->rows < 2 * ROWS)
    for (; output + OUTPUTS <= s->share.last; output += OUTPUTS)
      halves_band(s, packing, &odd, OUTPUTS, output);
  for (; output + 2 <= s->share.last; output += 2) halves_band(s, packing, &odd, 2, output);
  for (; output < s->share.last; output++) halves_band(s, packing, &odd, 1, output);
}

BFLOAT16_CPU static void *halves_work(void *argument) {
  const PackedShare *s = argument;
  switch (s->packed->packing) {
    case NF4: halves_share(s, NF4); break;
    case AFFINE4: halves_share(s, AFFINE4); break;
    case AFFINE8: halves_share(s, AFFINE8); break;
    case FP4: halves_share(s, FP4); break;
    case INT8: halves_share(s, INT8); break;
  }
  return NULL;
}

// Inputs in bfloat16, in the order of `block_halves`, and behind them, for 8 bits, their sums over
// each block; NULL where they or the values have more bits than that, or the processor does not
// multiply it. The caller frees them.
static uint16_t *inputs_as_halves(const Shape *s, const Packed *packed, const float *x) {
  if (packed->type != BFLOAT16 || !griffin_multiplies_bfloat16()) return NULL;
  if (in_8_bits(packed->packing) && packed->rounded_to == BFLOAT16) return NULL;
  const int64_t count = s->rows * s->depth;
  uint32_t bits = 0;
  for (int64_t i = 0; i < count; i++) bits |= bits_of(x[i]);
  if (bits & 0xffff) return NULL;
  uint16_t *halves = malloc((size_t)count * sizeof *halves + (size_t)(count / BLOCK) * sizeof *x);
  if (!halves) return NULL;
  if (in_8_bits(packed->packing)) {
    for (int64_t i = 0; i < count; i++) {  // of 16 the first 8 come before 32 places of the others
      const int64_t part = i % BLOCK / 16, within = i % 16;
      const int64_t place = i / BLOCK * BLOCK + within / 8 * 32 + part * 8 + within % 8;
      halves[place] = (uint16_t)(bits_of(x[i]) >> 16);
    }
    float *sums = (float *)(halves + count);
    for (int64_t block = 0; block < count / BLOCK; block++)
      sums[block] = sum_of(x + block * BLOCK, BLOCK);
    return halves;
  }
  const int first = packed->packing != AFFINE4;  // element of a byte that has the lower bits
  for (int64_t block = 0; block < count; block += BLOCK)
    for (int i = 0; i < BLOCK / 2; i++) {
      halves[block + i] = (uint16_t)(bits_of(x[block + 2 * i + first]) >> 16);
      halves[block + BLOCK / 2 + i] = (uint16_t)(bits_of(x[block + 2 * i + 1 - first]) >> 16);
    }
  return halves;
}
#else
EXPORT int griffin_multiplies_bfloat16(void) { return 0; }
static void *halves_work(void *argument) { return argument; }
static uint16_t *inputs_as_halves(const Shape *s, const Packed *packed, const float *x) {
  return NULL;
}
#endif

// As griffin_linear. Where inputs are in bfloat16, elements of 8 bits are not rounded to it.
static void run_packed(const Shape *s, Packed stored, const float *x, const void *bias,
                       const void *other, void *out, Pool team) {
  if (in_8_bits(stored.packing) && s->type == BFLOAT16) stored.rounded_to = FLOAT32;
  const Packed *packed = &stored;
  const int64_t threads = threads_for(s->threads, s->outputs * s->depth);
  PackedShare shares[MOST_THREADS];
  uint16_t *halves = inputs_as_halves(s, packed, x);
  const float *sums = halves ? (const float *)(halves + s->rows * s->depth) : NULL;
  const int64_t bands = (s->outputs + OUTPUTS - 1) / OUTPUTS;
  for (int64_t i = 0; i < threads; i++) {
    const int64_t last = bands * (i + 1) / threads * OUTPUTS;
    shares[i] = (PackedShare){{s, x, NULL, bias, other, out, bands * i / threads * OUTPUTS,
                               last < s->outputs ? last : s->outputs},
                              packed, halves, sums};
  }
  void *(*work)(void *) = halves ? halves_work : packed_work;
  parallel_for(&(Tasks){work, (char *)shares, sizeof *shares, threads, 0}, team);
  free(halves);
}

EXPORT void griffin_packed(const int64_t *sizes, const float *x, const void *elements,
                           const void *scales, const void *shifts, const void *bias,
                           const void *other, void *out) {
  const Shape s = {sizes[0], sizes[1], sizes[2], (Type)sizes[3], (Type)sizes[4], (Then)sizes[5],
                   sizes[6]};
  const Packed packed = {(Packing)sizes[7], (Type)sizes[8], (Type)sizes[8], s.depth,
                         elements, scales, shifts};
  run_packed(&s, packed, x, bias, other, out, griffin_team);
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
  const Packed packed = {(Packing)sizes[3], (Type)sizes[4], (Type)sizes[4], sizes[1],
                         elements, scales, shifts};
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
  const Type type = type_of(shifts);
  return (Packed){packing, type, type, depth, elements->data, scales->data, shifts->data};
}

// x [N, I] in float32 or bfloat16 and a matrix -> x W^T in float32.
EXPORT void *griffin_xla_packed(CallFrame *frame) {
  if (is_metadata_query(frame)) return NULL;
  const Buffer *x = frame->in.values[0], *out = frame->out.values[0];
  const Packed packed = packed_of(frame->in.values + 1);
  const Shape s = {x->dims[0], packed.depth, out->dims[1],   type_of(x),
                   FLOAT32,    NOTHING,      griffin_threads};
  const float *inputs = x->data;
  float *wide = NULL;
  if (s.type != FLOAT32) {
    const int64_t count = s.rows * s.depth;
    inputs = wide = malloc((size_t)count * sizeof *wide);
    if (!wide) {  // so that nobody takes what lies there for a product
      memset(out->data, 0xff, (size_t)(s.rows * s.outputs) * sizeof *wide);  // NaN
      return NULL;
    }
    for (int64_t i = 0; i < count; i++) wide[i] = load_one(x->data, i, s.type);
  }
  run_packed(&s, packed, inputs, NULL, NULL, out->data, NULL);
  free(wide);
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
