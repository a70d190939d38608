// Every quantised GGUF type as integers: one trait per type that takes a row apart into 32-blocks, so that the types
// without kernels of their own, and the portable level, share one loop.
// A 32-block is 32 int8 values, a float scale, and integer scales of its halves (1 where the type has none); an
// element is d * scale[half] * q - m * min[half]. d * scale is exact in float32 for every type.
// In an unnamed namespace, because files with different instruction-set flags include it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../include/apu.h"
#include "half.h"

namespace apu::cpu {
namespace {

struct Block32 {
  int8_t *q; // (32)
  float d;
  float m;          // 0 for types without a minimum
  int32_t scale[2]; // of elements 0..15 and 16..31
  int32_t min[2];
};

enum class Minimum { none, block, half }; // one per 32 elements or per 16

// The 6-bit scale and minimum j of a Q4_K or Q5_K superblock, packed in 12 bytes.
inline void unpack_scale_min(const uint8_t *packed, uint32_t j, int32_t &scale, int32_t &min) {
  if (j < 4) {
    scale = packed[j] & 63;
    min = packed[j + 4] & 63;
  } else {
    scale = (packed[j + 4] & 15) | ((packed[j - 4] >> 6) << 4);
    min = (packed[j + 4] >> 4) | ((packed[j] >> 6) << 4);
  }
}

template <uint32_t Dtype> struct Unpack;

// block(row, b, out) fills 32-block b of a row.

template <> struct Unpack<APU_Q8_0> {
  static constexpr Minimum kMinimum = Minimum::none;
  static constexpr bool kHalfScales = false;
  static void block(const uint8_t *row, uint32_t b, Block32 &out) {
    const uint8_t *p = row + size_t{34} * b;
    out.d = load_f16(p);
    std::memcpy(out.q, p + 2, 32);
  }
};

template <> struct Unpack<APU_Q4_0> {
  static constexpr Minimum kMinimum = Minimum::none;
  static constexpr bool kHalfScales = false;
  static void block(const uint8_t *row, uint32_t b, Block32 &out) {
    const uint8_t *p = row + size_t{18} * b;
    out.d = load_f16(p);
    for (uint32_t j = 0; j < 16; ++j) {
      out.q[j] = static_cast<int8_t>((p[2 + j] & 15) - 8);
      out.q[j + 16] = static_cast<int8_t>((p[2 + j] >> 4) - 8);
    }
  }
};

template <> struct Unpack<APU_Q4_1> {
  static constexpr Minimum kMinimum = Minimum::block;
  static constexpr bool kHalfScales = false;
  static void block(const uint8_t *row, uint32_t b, Block32 &out) {
    const uint8_t *p = row + size_t{20} * b;
    out.d = load_f16(p);
    out.m = -load_f16(p + 2);
    out.min[0] = out.min[1] = 1;
    for (uint32_t j = 0; j < 16; ++j) {
      out.q[j] = static_cast<int8_t>(p[4 + j] & 15);
      out.q[j + 16] = static_cast<int8_t>(p[4 + j] >> 4);
    }
  }
};

template <> struct Unpack<APU_Q5_0> {
  static constexpr Minimum kMinimum = Minimum::none;
  static constexpr bool kHalfScales = false;
  static void block(const uint8_t *row, uint32_t b, Block32 &out) {
    const uint8_t *p = row + size_t{22} * b;
    out.d = load_f16(p);
    uint32_t high;
    std::memcpy(&high, p + 2, 4);
    for (uint32_t j = 0; j < 16; ++j) {
      out.q[j] = static_cast<int8_t>(((p[6 + j] & 15) | ((high >> j & 1) << 4)) - 16);
      out.q[j + 16] = static_cast<int8_t>(((p[6 + j] >> 4) | ((high >> (j + 16) & 1) << 4)) - 16);
    }
  }
};

template <> struct Unpack<APU_Q5_1> {
  static constexpr Minimum kMinimum = Minimum::block;
  static constexpr bool kHalfScales = false;
  static void block(const uint8_t *row, uint32_t b, Block32 &out) {
    const uint8_t *p = row + size_t{24} * b;
    out.d = load_f16(p);
    out.m = -load_f16(p + 2);
    out.min[0] = out.min[1] = 1;
    uint32_t high;
    std::memcpy(&high, p + 4, 4);
    for (uint32_t j = 0; j < 16; ++j) {
      out.q[j] = static_cast<int8_t>((p[8 + j] & 15) | ((high >> j & 1) << 4));
      out.q[j + 16] = static_cast<int8_t>((p[8 + j] >> 4) | ((high >> (j + 16) & 1) << 4));
    }
  }
};

template <> struct Unpack<APU_Q2_K> {
  static constexpr Minimum kMinimum = Minimum::half;
  static constexpr bool kHalfScales = true;
  static void block(const uint8_t *row, uint32_t b, Block32 &out) {
    const uint8_t *p = row + size_t{84} * (b / 8);
    const uint32_t j = b % 8, shift = 2 * (j % 4);
    const uint8_t *bits = p + 16 + 32 * (j / 4);
    out.d = load_f16(p + 80);
    out.m = load_f16(p + 82);
    for (uint32_t half = 0; half < 2; ++half) {
      out.scale[half] = p[2 * j + half] & 15;
      out.min[half] = p[2 * j + half] >> 4;
    }
    for (uint32_t i = 0; i < 32; ++i) out.q[i] = static_cast<int8_t>(bits[i] >> shift & 3);
  }
};

template <> struct Unpack<APU_Q3_K> {
  static constexpr Minimum kMinimum = Minimum::none;
  static constexpr bool kHalfScales = true;
  static void block(const uint8_t *row, uint32_t b, Block32 &out) {
    const uint8_t *p = row + size_t{110} * (b / 8);
    const uint32_t j = b % 8, shift = 2 * (j % 4);
    const uint8_t *high = p, *bits = p + 32 + 32 * (j / 4), *scales = p + 96;
    out.d = load_f16(p + 108);
    for (uint32_t half = 0; half < 2; ++half) {
      const uint32_t s = 2 * j + half;
      const int32_t low = s < 8 ? scales[s] & 15 : scales[s - 8] >> 4;
      out.scale[half] = (low | (scales[8 + s % 4] >> (2 * (s / 4)) & 3) << 4) - 32;
    }
    for (uint32_t i = 0; i < 32; ++i)
      out.q[i] = static_cast<int8_t>((bits[i] >> shift & 3) + 4 * (high[i] >> j & 1) - 4);
  }
};

template <> struct Unpack<APU_Q4_K> {
  static constexpr Minimum kMinimum = Minimum::block;
  static constexpr bool kHalfScales = false;
  static void block(const uint8_t *row, uint32_t b, Block32 &out) {
    const uint8_t *p = row + size_t{144} * (b / 8);
    const uint32_t j = b % 8, shift = 4 * (j % 2);
    const uint8_t *bits = p + 16 + 32 * (j / 2);
    out.d = load_f16(p);
    out.m = load_f16(p + 2);
    unpack_scale_min(p + 4, j, out.scale[0], out.min[0]);
    out.scale[1] = out.scale[0];
    out.min[1] = out.min[0];
    for (uint32_t i = 0; i < 32; ++i) out.q[i] = static_cast<int8_t>(bits[i] >> shift & 15);
  }
};

template <> struct Unpack<APU_Q5_K> {
  static constexpr Minimum kMinimum = Minimum::block;
  static constexpr bool kHalfScales = false;
  static void block(const uint8_t *row, uint32_t b, Block32 &out) {
    const uint8_t *p = row + size_t{176} * (b / 8);
    const uint32_t j = b % 8, shift = 4 * (j % 2);
    const uint8_t *high = p + 16, *bits = p + 48 + 32 * (j / 2);
    out.d = load_f16(p);
    out.m = load_f16(p + 2);
    unpack_scale_min(p + 4, j, out.scale[0], out.min[0]);
    out.scale[1] = out.scale[0];
    out.min[1] = out.min[0];
    for (uint32_t i = 0; i < 32; ++i) out.q[i] = static_cast<int8_t>((bits[i] >> shift & 15) | (high[i] >> j & 1) << 4);
  }
};

template <> struct Unpack<APU_Q6_K> {
  static constexpr Minimum kMinimum = Minimum::none;
  static constexpr bool kHalfScales = true;
  static void block(const uint8_t *row, uint32_t b, Block32 &out) {
    const uint8_t *p = row + size_t{210} * (b / 8);
    const uint32_t j = b % 8, quarter = j % 4;
    const uint8_t *low = p + 64 * (j / 4) + 32 * (quarter % 2), *high = p + 128 + 32 * (j / 4);
    const uint32_t shift = 4 * (quarter / 2), high_shift = 2 * quarter;
    out.d = load_f16(p + 208);
    for (uint32_t half = 0; half < 2; ++half) out.scale[half] = static_cast<int8_t>(p[192 + 2 * j + half]);
    for (uint32_t i = 0; i < 32; ++i)
      out.q[i] = static_cast<int8_t>(((low[i] >> shift & 15) | (high[i] >> high_shift & 3) << 4) - 32);
  }
};

// Calls use.template operator()<dtype>() for a quantised dtype.
template <class Use> inline void with_quantized(uint32_t dtype, Use use) {
  switch (dtype) {
  case APU_Q4_0: return use.template operator()<APU_Q4_0>();
  case APU_Q4_1: return use.template operator()<APU_Q4_1>();
  case APU_Q5_0: return use.template operator()<APU_Q5_0>();
  case APU_Q5_1: return use.template operator()<APU_Q5_1>();
  case APU_Q8_0: return use.template operator()<APU_Q8_0>();
  case APU_Q2_K: return use.template operator()<APU_Q2_K>();
  case APU_Q3_K: return use.template operator()<APU_Q3_K>();
  case APU_Q4_K: return use.template operator()<APU_Q4_K>();
  case APU_Q5_K: return use.template operator()<APU_Q5_K>();
  case APU_Q6_K: return use.template operator()<APU_Q6_K>();
  default: return;
  }
}

} // namespace
} // namespace apu::cpu
