// E4M3 weights and their scales in scalar code: the law that every level's kernels follow.
//
// A byte is a sign, four bits of exponent and three of mantissa, value (1 + m / 8) * 2^(e - 7), or m * 2^-9 where e is
// 0; 0x7f and 0xff are NaN. Moved to where an F16 has them these bits are value / 256, its subnormals included. A
// weight is
//   w = (value / 256) * ws,  ws = 256 * scale
// in float32, which rounds once: value * scale, but for scales at the end of the range. Activations stay float.
// Source: OCP 8-bit floating point specification.
#ifndef APU_QUANT_FP8_H
#define APU_QUANT_FP8_H

#include "../include/apu.h"
#include "unpack.h"

namespace apu::quant {

inline constexpr float kE4M3Unit = 256; // value / 256 is what the bits are as F16

APU_QUANT_FUNCTION float e4m3_unit(uint8_t v) { // value / 256
  const uint32_t magnitude = v & 0x7fu;
  const uint32_t half = magnitude == 0x7f ? 0x7e00u : magnitude << 7;
  return f16_to_f32(static_cast<uint16_t>(half | (v & 0x80u) << 8));
}

APU_QUANT_FUNCTION float e4m3_to_f32(uint8_t v) {
  return kE4M3Unit * e4m3_unit(v);
}

APU_QUANT_FUNCTION float load_scale(uint32_t dtype, const uint8_t *scales, uint32_t i) {
  if (dtype == APU_F16) return load_f16(scales + 2 * size_t{i});
  if (dtype == APU_BF16) return bf16_to_f32(load16(scales + 2 * size_t{i}));
  float f;
  APU_QUANT_COPY_BYTES(&f, scales + 4 * size_t{i}, 4);
  return f;
}

// A row of values becomes one of weights, by its row of scales, one for `block` columns each; null: all are 1.
APU_QUANT_FUNCTION void scale_e4m3_row(uint32_t dtype, const uint8_t *scales, uint32_t block, uint32_t k, float *row) {
  if (!scales) return;
  for (uint32_t i = 0, b = 0; i < k; b++) {
    const float ws = kE4M3Unit * load_scale(dtype, scales, b);
    const uint32_t end = k - i > block ? i + block : k;
    for (; i < end; i++) row[i] = row[i] * (1 / kE4M3Unit) * ws; // the first product is exact
  }
}

} // namespace apu::quant

#endif // APU_QUANT_FP8_H
