// How activations are quantised and how a block's integer enters the accumulator: the only place, in scalar code.
// The portable level uses these functions; vector levels must give the same bits (tests/kernels compare them).
// Everything has internal linkage: the file is compiled into objects of different instruction sets.
#ifndef APU_QUANT_ACTIVATIONS_H
#define APU_QUANT_ACTIVATIONS_H

#include "blocks.h"

#include <math.h>
#include <string.h>

namespace apu::quant {

// A block whose largest magnitude is below this is zero: 1 / d must not overflow.
inline constexpr float kSmallestAmax = 0x1p-100f;

// Quantises x[0..count), count <= 32, to q[32] (zero beyond count), d, s = d * sum(q), and the sums of both halves.
//   amax = max |x|;  d = amax / 127;  q = round_to_even(x * (1 / d))
// A block that holds an infinity or a NaN gets q = 0 and d = s = NaN, so that every product of the row becomes NaN.
static inline void quantize_block(const float *x, uint32_t count, int8_t *q, float *d, float *s, int32_t *sum16) {
  uint32_t amax_bits = 0; // of non-negative floats the bits order as the values do, NaN last
  for (uint32_t k = 0; k < count; k++) {
    uint32_t bits;
    memcpy(&bits, x + k, 4);
    bits &= 0x7fffffffu;
    amax_bits = bits > amax_bits ? bits : amax_bits;
  }
  float amax;
  memcpy(&amax, &amax_bits, 4);
  memset(q, 0, kBlock);
  sum16[0] = sum16[1] = 0;
  *d = *s = 0.0f;
  if (amax_bits >= 0x7f800000u) {
    *d = *s = __builtin_nanf("");
    return;
  }
  if (amax < kSmallestAmax) return;
  const float scale = amax / 127.0f;
  const float inverse = 1.0f / scale;
  for (uint32_t k = 0; k < count; k++) {
    const float shifted = x[k] * inverse + 12582912.0f; // 1.5 * 2^23: rounds to an integer, ties to even
    q[k] = static_cast<int8_t>(static_cast<int32_t>(shifted - 12582912.0f));
    sum16[k / 16] += q[k];
  }
  *d = scale;
  *s = scale * static_cast<float>(sum16[0] + sum16[1]);
}

// acc + I * ws * d, the canonical step of a block without its minimum.
static inline float block_step(float acc, int32_t integer, float ws, float d) {
  return fmaf(static_cast<float>(integer), ws * d, acc);
}
// The minimum of a 32-wide sub-block, and of two 16-wide ones (m = m0 * sum16[0] + m1 * sum16[1]).
static inline float block_step_minimum(float acc, float wm, float s) {
  return fmaf(wm, s, acc);
}
static inline float block_step_minimum16(float acc, int32_t m, float wm, float d) {
  return fmaf(static_cast<float>(m), wm * d, acc);
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
