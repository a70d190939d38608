// How GEMM turns weights into halves: a thread makes 16 or 32 consecutive columns of one row at a time.
//
// A half is round(w * power) to 11 bits, w = ws * sc * q + wm * m with scale and minimum rounded to halves first.
// `power` is 2^s, one for a block's tile of weights: 1, unless the largest magnitude that a first pass saw (its bound)
// leaves [2^-10, 65504), where halves lose bits or overflow; gemm.h then makes the tile again with another s.
#pragma once

#include "dequantize.h"

namespace apu::gpu {

constexpr float kTileLow = 0x1p-10f, kTileHigh = 65504.0f;

APU_DEVICE u32 twice_half(float x) {
  return float_to_half(x) * 0x10001u;
}

// Sixteen int8 as halves times scale, plus add.
template <bool Minimum> APU_DEVICE void scale_bytes(const u32 *q, u32 scale, u32 add, u32 *out) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 bytes = q[i] ^ 0x80808080u; // + 128
#pragma unroll
    for (u32 j = 0; j < 2; ++j) { // 1024 + byte, minus 1152
      const u32 v = half2_add(byte_permute(bytes, 0x64646464u, j ? 0x04030402u : 0x04010400u), 0xe480e480u);
      out[2 * i + j] = Minimum ? half2_fma(v, scale, add) : half2_mul(v, scale);
    }
  }
}

// Types of blocks. A chunk is 256 columns.
template <class B> struct BlockWeights {
  static constexpr u32 elements = q::Traits<B>::elements;
  static constexpr u32 chunk_columns = 256;
  static constexpr u32 chunk_bytes = 256 / elements * sizeof(B);
  static constexpr bool can_stage = true;
  APU_METHOD static u32 row_bytes(u32 k) { return k / elements * u32(sizeof(B)); }
  // Columns from 16 g on, counted from p; none of them is beyond K. g is a multiple of `Halves`.
  template <u32 Halves>
  APU_METHOD static void unpack(u32, const u8 *p, u32 g, u32, float power, u32 *out, float &bound) {
    const u8 *block = p + g / (elements / 16) * u32(sizeof(B));
#pragma unroll
    for (u32 h = 0; h < Halves; ++h) {
      Half half;
      unpack_half<B>(block, g % (elements / 16) + h, half);
      const float scale = half.ws * half.sc * power, add = half.wm * half.m * power;
      bound = max_f32(bound, fma_f32(fabs_f32(scale), 128.0f, fabs_f32(add)));
      constexpr bool minimum = q::Traits<B>::minimum != q::Minimum::none;
      scale_bytes<minimum>(half.q, twice_half(scale), twice_half(add), out + 8 * h);
    }
  }
};

APU_DEVICE void halves_of_floats(const float *v, float power, u32 *out, float &bound) {
#pragma unroll
  for (u32 i = 0; i < 8; ++i) {
    const float x = v[2 * i] * power, y = v[2 * i + 1] * power;
    bound = max_f32(bound, max_f32(fabs_f32(x), fabs_f32(y)));
    out[i] = float_to_half(x) | u32(float_to_half(y)) << 16;
  }
}

// F16 and BF16. `k` is what remains of the row from p on.
template <class Row> struct FloatWeights {
  static constexpr u32 chunk_columns = 64;
  static constexpr u32 chunk_bytes = 128;
  static constexpr bool can_stage = true;
  APU_METHOD static u32 row_bytes(u32 k) { return 2 * k; }
  template <u32 Halves>
  APU_METHOD static void unpack(u32, const u8 *p, u32 g, u32 k, float power, u32 *out, float &bound) {
#pragma unroll
    for (u32 h = 0; h < Halves; ++h) {
      float v[16];
      if (16 * (g + h) < k)
        dequantize_row16<Row>(p, k, g + h, v);
      else
#pragma unroll
        for (u32 i = 0; i < 16; ++i) v[i] = 0;
      halves_of_floats(v, power, out + 8 * h, bound);
    }
  }
};
template <> struct FloatWeights<F16Row> {
  static constexpr u32 chunk_columns = 64;
  static constexpr u32 chunk_bytes = 128;
  static constexpr bool can_stage = true;
  APU_METHOD static u32 row_bytes(u32 k) { return 2 * k; }
  template <u32 Halves> APU_METHOD static void unpack(u32, const u8 *p, u32 g, u32 k, float, u32 *out, float &) {
#pragma unroll
    for (u32 h = 0; h < Halves; ++h) {
#pragma unroll
      for (u32 i = 0; i < 8; ++i) out[8 * h + i] = 0;
      if (16 * (g + h) < k) load_floats<8>(p, k, g + h, out + 8 * h);
    }
  }
};

// Every type, decided at run time: its one chunk is the row.
struct AnyWeights {
  static constexpr u32 chunk_columns = 1u << 30;
  static constexpr u32 chunk_bytes = 0;
  static constexpr bool can_stage = false;
  template <u32 Halves>
  APU_METHOD static void unpack(u32 type, const u8 *p, u32 g, u32 k, float power, u32 *out, float &bound) {
#pragma unroll
    for (u32 h = 0; h < Halves; ++h) {
      float v[16];
      dequantize_any16(type, p, k, g + h, v);
      halves_of_floats(v, power, out + 8 * h, bound);
    }
  }
};

} // namespace apu::gpu
