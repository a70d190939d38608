// How GEMM turns weights into halves: a thread makes 16 consecutive columns of one row at a time.
//
// A half is round(w * power) to 11 bits, w = ws * sc * q + wm * m with scale and minimum rounded to halves first.
// `power` is 2^s, one for a block's tile of weights: 1, unless the largest magnitude that a first pass saw (its bound)
// leaves [2^-10, 65504), where halves lose bits or overflow; gemm.h then makes the tile again with another s.
#pragma once

#include "dequantize.h"

namespace apu::gpu {

constexpr float kTileLow = 0x1p-10f, kTileHigh = 65504.0f;

APU_DEVICE u32 twice_half(float x) {
  return floats_to_halves(x, x);
}

// Sixteen bytes less `Offset` as halves times scale, plus add.
template <u32 Offset, bool Minimum> APU_DEVICE void scale_bytes(const u32 *q, u32 scale, u32 add, u32 *out) {
  constexpr u32 less = (0xe400u + Offset) * 0x10001u; // -(1024 + Offset)
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
#pragma unroll
    for (u32 j = 0; j < 2; ++j) { // 1024 + byte
      const u32 v = half2_add(byte_permute(q[i], 0x64646464u, j ? 0x04030402u : 0x04010400u), less);
      out[2 * i + j] = Minimum ? half2_fma(v, scale, add) : half2_mul(v, scale);
    }
}

// A half of a block as bytes that are not negative, and what is to be subtracted from them.
template <class B> struct ByteOffset {
  static constexpr bool minimum = q::Traits<B>::minimum != q::Minimum::none;
  static constexpr u32 value = minimum ? 0 : 128;
  APU_METHOD static void unpack(const u8 *p, u32 h, Half &half) {
    unpack_half<B>(p, h, half);
    if constexpr (!minimum) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) half.q[i] ^= 0x80808080u;
    }
  }
};
template <> struct ByteOffset<q::Q4_0> {
  static constexpr u32 value = 8;
  APU_METHOD static void unpack(const u8 *p, u32 h, Half &half) {
    u32 w;
    load_unaligned<1>(p, &w);
    load_unaligned<4>(p + 2, half.q);
    half.ws = half_to_float(w & 0xffffu);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) half.q[i] = half.q[i] >> 4 * h & 0x0f0f0f0fu;
    half.sc = 1;
  }
};
template <> struct ByteOffset<q::Q8_0> {
  static constexpr u32 value = 128;
  APU_METHOD static void unpack(const u8 *p, u32 h, Half &half) {
    u32 w;
    load_unaligned<1>(p, &w);
    load_unaligned<4>(p + 2 + 16 * h, half.q);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) half.q[i] ^= 0x80808080u;
    half.ws = half_to_float(w & 0xffffu);
    half.sc = 1;
  }
};
// Scale and minimum of 32 elements from the 16 bytes that Q4_K and Q5_K begin with.
APU_DEVICE void scale_min_words(const u8 *p, u32 b, Half &half) {
  u32 w[4];
  load_unaligned<4>(p, w);
  const u32 shift = 8 * (b % 4);
  const u32 low_scale = w[1] >> shift, low_min = w[2] >> shift, last = w[3] >> shift;
  const u32 scale = b < 4 ? low_scale & 63 : (last & 15) | (low_scale >> 2 & 48);
  const u32 minimum = b < 4 ? low_min & 63 : (last >> 4 & 15) | (low_min >> 2 & 48);
  half.ws = half_to_float(w[0] & 0xffffu) * float(scale);
  half.wm = -(half_to_float(w[0] >> 16) * float(minimum));
  half.sc = half.m = 1;
}
template <> struct ByteOffset<q::Q4_K> {
  static constexpr u32 value = 0;
  APU_METHOD static void unpack(const u8 *p, u32 h, Half &half) {
    unpacking::bit_fields<15>(p + 16 + 32 * (h / 4) + 16 * (h % 2), 2 * (h & 2), half.q);
    scale_min_words(p, h / 2, half);
  }
};
template <> struct ByteOffset<q::Q5_K> {
  static constexpr u32 value = 0;
  APU_METHOD static void unpack(const u8 *p, u32 h, Half &half) {
    u32 high[4];
    unpacking::bit_fields<1>(p + 16 + 16 * (h % 2), h / 2, high);
    unpacking::bit_fields<15>(p + 48 + 32 * (h / 4) + 16 * (h % 2), 2 * (h & 2), half.q);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) half.q[i] |= high[i] << 4;
    scale_min_words(p, h / 2, half);
  }
};
template <> struct ByteOffset<q::Q6_K> {
  static constexpr u32 value = 32;
  APU_METHOD static void unpack(const u8 *p, u32 h, Half &half) {
    u32 high[4];
    unpacking::bit_fields<3>(p + 128 + unpacking::crumbs_at(h), h & 6, high);
    unpacking::bit_fields<15>(p + 64 * (h / 8) + 32 * (h / 2 % 2) + 16 * (h % 2), h & 4, half.q);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) half.q[i] |= high[i] << 4;
    half.ws = load_half(p + 208);
    half.sc = float(i8(p[192 + h]));
  }
};

// Types of blocks. A chunk is 256 columns.
template <class B> struct BlockWeights {
  static constexpr u32 halves = q::Traits<B>::elements / 16; // of a block
  static constexpr u32 chunk_columns = 256;
  static constexpr u32 chunk_bytes = 16 / halves * sizeof(B);
  static constexpr bool can_stage = true, shares_loads = true, any_k = false;
  APU_METHOD static u32 row_bytes(u32 k) { return k / (16 * halves) * u32(sizeof(B)); }
  // Columns 16 g to 16 g + 15, counted from p; they are not beyond K.
  template <bool Raw> APU_METHOD static void unpack(u32, const u8 *p, u32 g, u32, float power, u32 *out, float &bound) {
    constexpr bool minimum = q::Traits<B>::minimum != q::Minimum::none;
    Half half;
    ByteOffset<B>::unpack(p + g / halves * u32(sizeof(B)), g % halves, half);
    const float scale = half.ws * half.sc * power, add = minimum ? half.wm * half.m * power : 0.0f;
    bound = max_f32(bound, fma_f32(fabs_f32(scale), 128.0f, fabs_f32(add)));
    scale_bytes<ByteOffset<B>::value, minimum>(half.q, twice_half(scale), twice_half(add), out);
  }
};

APU_DEVICE void halves_of_floats(const float *v, float power, u32 *out, float &bound) {
#pragma unroll
  for (u32 i = 0; i < 8; ++i) {
    const float x = v[2 * i] * power, y = v[2 * i + 1] * power;
    bound = max_f32(bound, max_f32(fabs_f32(x), fabs_f32(y)));
    out[i] = floats_to_halves(x, y);
  }
}

// F16 and BF16. `k` is what remains of the row from p on; in LDS (`Raw`) it has no end.
template <class Row> struct FloatWeights {
  static constexpr u32 chunk_columns = 64;
  static constexpr u32 chunk_bytes = 128;
  static constexpr bool can_stage = true, shares_loads = false, any_k = true;
  APU_METHOD static u32 row_bytes(u32 k) { return 2 * k; }
  template <bool Raw>
  APU_METHOD static void unpack(u32, const u8 *p, u32 g, u32 k, float power, u32 *out, float &bound) {
    u32 words[8] = {};
    if constexpr (Raw) // zero beyond K
      load_unaligned<8>(p + 32 * g, words);
    else if (16 * g < k)
      load_floats<8>(p, k, g, words);
    if constexpr (__is_same(Row, F16Row)) {
#pragma unroll
      for (u32 i = 0; i < 8; ++i) out[i] = words[i];
    } else {
      u32 most = 0; // magnitudes, two in a word
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        const float low = bits_to_float(words[i] << 16), high = bits_to_float(words[i] & 0xffff0000u);
        out[i] = floats_to_halves(low * power, high * power);
        most = max_u16_pairs(most, words[i] & 0x7fff7fffu);
      }
      bound = max_f32(bound, bits_to_float((most << 16 > most ? most << 16 : most) & 0x7fff0000u) * power);
    }
  }
};

// Every type, decided at run time: its one chunk is the row.
struct AnyWeights {
  static constexpr u32 chunk_columns = 1u << 30;
  static constexpr u32 chunk_bytes = 0;
  static constexpr bool can_stage = false, shares_loads = false, any_k = false;
  template <bool Raw>
  APU_METHOD static void unpack(u32 type, const u8 *p, u32 g, u32 k, float power, u32 *out, float &bound) {
    float v[16];
    dequantize_any16(type, p, k, g, v);
    halves_of_floats(v, power, out, bound);
  }
};

} // namespace apu::gpu
