// How activations are quantised and how a block's integer enters the accumulator: the only place, in scalar code.
// The portable level uses these functions; vector levels must give the same bits (tests/kernels compare them).
// Everything has internal linkage: the file is compiled into objects of different instruction sets.
#ifndef APU_QUANT_ACTIVATIONS_H
#define APU_QUANT_ACTIVATIONS_H

#include "blocks.h"

#include <math.h>
#include <stddef.h>
#include <string.h>

namespace apu::quant {

// A half whose largest magnitude is below this is zero: 1 / d must not overflow.
inline constexpr float kSmallestAmax = 0x1p-100f;

// Where half h of block b stands among a row's d, s16 and sum16: (blocks / 8, 2, 8).
static inline size_t half_index(size_t b, size_t h) {
  return b / 8 * 16 + 8 * h + b % 8;
}

// The bits of the largest |x[i]|: of non-negative floats they order as the values do, infinity and NaN last.
static inline uint32_t largest_magnitude(const float *x, uint32_t count) {
  uint32_t largest = 0;
  for (uint32_t k = 0; k < count; k++) {
    uint32_t bits;
    memcpy(&bits, x + k, 4);
    bits &= 0x7fffffffu;
    largest = bits > largest ? bits : largest;
  }
  return largest;
}

// Quantises x[0..count), count <= 16, to q[16] (zero beyond count); returns d, and the sum of q in *sum.
//   amax = max |x|;  d = amax / 127;  q = round_to_even(x * (1 / d))
// A half that holds an infinity or a NaN gets q = 0 and d = NaN, so that every product of the row becomes NaN.
static inline float quantize_half(const float *x, uint32_t count, int8_t *q, int32_t *sum) {
  const uint32_t amax_bits = largest_magnitude(x, count);
  float amax;
  memcpy(&amax, &amax_bits, 4);
  memset(q, 0, 16);
  *sum = 0;
  if (amax_bits >= 0x7f800000u) return __builtin_nanf("");
  if (amax < kSmallestAmax) return 0.0f;
  const float scale = amax / 127.0f;
  const float inverse = 1.0f / scale;
  for (uint32_t k = 0; k < count; k++) {
    const float shifted = x[k] * inverse + 12582912.0f; // 1.5 * 2^23: rounds to an integer, ties to even
    q[k] = static_cast<int8_t>(static_cast<int32_t>(shifted - 12582912.0f));
    *sum += q[k];
  }
  return scale;
}

// What quantisation loses, x - d * q rounded once: the second term's input where precision is "fine". In double the
// product is exact, and so is the difference: 7 and 24 bits, and q = 0 where x is far below d.
static inline void quantize_residual(const float *x, uint32_t k, float *out) {
  for (uint32_t i = 0; i < k; i += 16) {
    const uint32_t count = k - i < 16 ? k - i : 16;
    int8_t q[16];
    int32_t sum;
    const double d = static_cast<double>(quantize_half(x + i, count, q, &sum));
    for (uint32_t j = 0; j < count; j++) out[i + j] = static_cast<float>(static_cast<double>(x[i + j]) - d * q[j]);
  }
}

// d_0 * I_0 + d_1 * I_1, of a block's dot product and of its minimums (I = m, d = s16).
static inline float add_halves(float i0, float i1, float d0, float d1) {
  return fmaf(i1, d1, i0 * d0);
}

static inline float sum8(const float *v) {
  return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}
static inline float sum16(const float *v) { // lanes i and i + 8 first, then as sum8
  float h[8];
  for (uint32_t i = 0; i < 8; i++) h[i] = v[i] + v[i + 8];
  return sum8(h);
}

} // namespace apu::quant

#endif // APU_QUANT_ACTIVATIONS_H
