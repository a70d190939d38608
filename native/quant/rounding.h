// Rounding of activations to what a narrow float holds, and back: DeepSeek V4 was trained with its cached rows so.
//
// Elements that share a scale are divided by it, rounded to nearest even, and multiplied again. A scale is the smallest
// power of two with which none exceeds the type's largest number, 448 of E4M3 and 6 of E2M1. All of it is exact but for
// the rounding, so every backend has the same bits. Types: OCP 8-bit floating point and OCP Microscaling
// specifications.
#pragma once

#include "target.h"

#ifndef APU_QUANT_ROUND_EVEN // as in target.h
#include <math.h>
#include <stdint.h>
#define APU_QUANT_ABS fabsf
#define APU_QUANT_ROUND_EVEN rintf
#endif

namespace apu::quant {

inline constexpr uint32_t kE4M3Group = 64; // elements of a scale
inline constexpr uint32_t kFp4Group = 32;
inline constexpr float kE4M3Least = 1e-4f; // of a group's largest magnitude: below, the scale is as if it were this
inline constexpr float kFp4Least = 6 * 0x1p-126f;

APU_QUANT_FUNCTION int binary_exponent(float x) { // of a positive normal number
  uint32_t bits;
  APU_QUANT_COPY_BYTES(&bits, &x, 4);
  return int(bits >> 23) - 127;
}

APU_QUANT_FUNCTION float power_of_two(int exponent) { // of normal numbers
  const uint32_t bits = uint32_t(exponent + 127) << 23;
  float out;
  APU_QUANT_COPY_BYTES(&out, &bits, 4);
  return out;
}

// The smallest power of two that is at least x, which is positive and normal.
APU_QUANT_FUNCTION float power_above(float x) {
  const int exponent = binary_exponent(x);
  const float below = power_of_two(exponent);
  return below == x ? x : power_of_two(exponent + 1);
}

APU_QUANT_FUNCTION float e4m3_scale(float amax) {
  return power_above((amax > kE4M3Least ? amax : kE4M3Least) * (1.0f / 448));
}

APU_QUANT_FUNCTION float fp4_scale(float amax) {
  const float least = 0x1p-126f, scale = amax * (1.0f / 6);
  return power_above(amax > kFp4Least && scale > least ? scale : least);
}

// x, of at most 448, to E4M3's nearest: three bits behind the leading one, the smallest step 2^-9.
APU_QUANT_FUNCTION float round_e4m3(float x) {
  const float a = APU_QUANT_ABS(x);
  const int exponent = a < 0x1p-6f ? -6 : binary_exponent(a);
  return APU_QUANT_ROUND_EVEN(x * power_of_two(3 - exponent)) * power_of_two(exponent - 3);
}

// x, of at most 6, to E2M1's nearest: 0, 0.5, 1, 1.5, 2, 3, 4, 6.
APU_QUANT_FUNCTION float round_e2m1(float x) {
  const float a = APU_QUANT_ABS(x), step = a < 2 ? 0.5f : a < 4 ? 1.0f : 2.0f;
  return APU_QUANT_ROUND_EVEN(x / step) * step;
}

} // namespace apu::quant
