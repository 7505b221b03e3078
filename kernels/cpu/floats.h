// 16-bit floats, which the kernels for the CPU read and write but compute with as float32.

#ifndef GRIFFIN_FLOATS_H
#define GRIFFIN_FLOATS_H

#include "runtime.h"

typedef enum { FLOAT32, BFLOAT16, FLOAT16 } Type;

typedef uint32_t Words __attribute__((vector_size(64)));
typedef int32_t Signed __attribute__((vector_size(64)));
typedef uint32_t StoredWords __attribute__((vector_size(64), aligned(2), may_alias));

INLINE size_t bytes_of(Type type) { return type == FLOAT32 ? 4 : 2; }

INLINE float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

// The numbers stored in the upper 16 bits of each word.
INLINE Vector upper(Words words, Type type) {
  if (type == BFLOAT16) return (Vector)(words & 0xffff0000);
  // The exponent of float16 is 112 too small. Raised by 224, so that infinities and NaN stay so, it is
  // 112 too large, which a multiplication corrects. (XLA's threads treat subnormal float32 as zero.) A
  // subnormal number m 2^-24 then reads as 2^97 + m 2^87 instead of m 2^88: below 2^98, the distance
  // to 2^98 is subtracted once more.
  const Words raised = (words >> 3 & 0x0fffe000) | 0x70000000;
  const Vector excess = (Vector)raised - as_float((98 + 127) << 23);
  const Vector less = (Vector)((Words)((Signed)excess >> 31) & (Words)excess);  // negative excess only
  const Vector magnitude = ((Vector)raised + less) * as_float((127 - 112) << 23);
  return (Vector)((Words)magnitude | (words & 0x80000000));
}

typedef struct {
  Vector even, odd;
} Pair;

// 32 numbers of 16 bits, at even and at odd places.
INLINE Pair load_pair(const void *array, int64_t i, Type type) {
  const Words words = *(const StoredWords *)((const uint16_t *)array + i);
  return (Pair){upper(words << 16, type), upper(words, type)};
}

INLINE float load_one(const void *array, int64_t i, Type type) {
  if (type == FLOAT32) return ((const float *)array)[i];
  const uint32_t half = ((const uint16_t *)array)[i];
  if (type == BFLOAT16) return as_float(half << 16);
  const uint32_t raised = (half & 0x7fff) << 13 | 0x70000000;  // as in `upper`
  const uint32_t doubled = bits_of(as_float(raised) * 2.0f - as_float((98 + 127) << 23));
  const float least = as_float(doubled < raised ? doubled : raised);  // both are positive
  return as_float(bits_of(least * as_float((127 - 112) << 23)) | (half & 0x8000) << 16);
}

// Rounds to the nearest number of a type, ties to even.
INLINE uint16_t rounded(float value, Type type) {
  const uint32_t bits = bits_of(value), magnitude = bits & 0x7fffffff;
  const uint32_t sign = bits >> 16 & 0x8000;
  if (type == BFLOAT16) {
    if (magnitude > 0x7f800000) return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  }
  if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (magnitude >= 0x477ff000) return (uint16_t)(sign | 0x7c00);  // from 65520 on
  if (magnitude < 0x38800000) {  // subnormal: adding 0.5 leaves units of 2^-24 in the last bits
    return (uint16_t)(sign | (bits_of(as_float(magnitude) + 0.5f) - bits_of(0.5f)));
  }
  return (uint16_t)(sign | (magnitude - 0x38000000 + 0xfff + (magnitude >> 13 & 1)) >> 13);
}

INLINE void store_one(void *array, int64_t i, float value, Type type) {
  if (type == FLOAT32) ((float *)array)[i] = value;
  else ((uint16_t *)array)[i] = rounded(value, type);
}

INLINE void widen(const void *array, int64_t first, int64_t count, float *out, Type type) {
  for (int64_t i = 0; i < count; i++) out[i] = load_one(array, first + i, type);
}

INLINE Type type_of(const Buffer *buffer) {
  enum { XLA_FLOAT16 = 10, XLA_BFLOAT16 = 16 };
  if (buffer->dtype == XLA_BFLOAT16) return BFLOAT16;
  return buffer->dtype == XLA_FLOAT16 ? FLOAT16 : FLOAT32;
}

#endif
