// Half-precision conversions in plain integer arithmetic, for code compiled without F16C: exact from F16 and BF16,
// rounded to nearest even into F16. Subnormals, infinities and NaN are kept. Static, because files with different
// instruction-set flags include it.
#pragma once

#include <cstdint>
#include <cstring>

namespace apu::cpu {

static inline float float_from_bits(uint32_t bits) {
  float f;
  std::memcpy(&f, &bits, sizeof f);
  return f;
}

static inline uint32_t bits_from_float(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  return bits;
}

static inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000u) << 16;
  const uint32_t magnitude = static_cast<uint32_t>(h & 0x7fffu) << 13;
  const uint32_t rebias = 112u << 23;
  uint32_t bits;
  if (magnitude >= 0x7c00u << 13)
    bits = magnitude + 2 * rebias;    // infinity or NaN
  else if (magnitude < 0x0400u << 13) // subnormal: the addition of 2^-14 normalises it
    bits = bits_from_float(float_from_bits(magnitude + rebias + (1u << 23)) - float_from_bits(rebias + (1u << 23)));
  else
    bits = magnitude + rebias;
  return float_from_bits(sign | bits);
}

static inline uint16_t f32_to_f16(float f) {
  const uint32_t bits = bits_from_float(f);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu); // quiet NaN
  } else if (magnitude >= 0x47800000u) {
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) { // below 2^-14: 0.5 has the ulp of F16's subnormals
    half = bits_from_float(float_from_bits(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    magnitude += 0xfffu + ((magnitude >> 13) & 1u);
    half = (magnitude - (112u << 23)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

static inline float bf16_to_f32(uint16_t h) {
  return float_from_bits(static_cast<uint32_t>(h) << 16);
}

static inline float load_f16(const uint8_t *p) { // any alignment
  uint16_t h;
  std::memcpy(&h, p, sizeof h);
  return f16_to_f32(h);
}

static inline float load_bf16(const uint8_t *p) {
  uint16_t h;
  std::memcpy(&h, p, sizeof h);
  return bf16_to_f32(h);
}

static inline float load_f32(const uint8_t *p) {
  float f;
  std::memcpy(&f, p, sizeof f);
  return f;
}

} // namespace apu::cpu
