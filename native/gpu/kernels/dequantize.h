// Weights as float32, in any type that a matrix may have: bit for bit what native/quant's dequantize_row gives.
//
// How to use it, where B is a block type of native/quant/blocks.h, p a file block and T::elements its size:
//   dequantize16<B>(p, h, v)         v[0..16) = elements 16 h .. 16 h + 15 of the block; h < elements / 16. Two calls
//                                    with h and h + 1 (h even) share their loads once inlined.
//   dequantize_value<B>(p, i)        element i of the block; slow.
//   dequantize_any16(type, row, k, g, v)  v = elements 16 g .. 16 g + 15 of a row of k elements, zero beyond k, of a
//   type
//                                    known at run time (APU_*, float types too): for kernels that are not bound by
//                                    their instructions, such as EMBED. The branch should be uniform in a wave.
//   dequantize_row16<B>(row, k, g, v)  the same of a type known to the compiler; also F32Row, F16Row, BF16Row.
//   with_any_type(type, use)         use.template operator()<B>() with a block type or one of F32Row, F16Row, BF16Row.
// Values are (ws * sc) * q, then + wm * m, each step rounded: no kernel may be compiled with contraction of a product
// and a sum that the source keeps apart. Addresses may be any byte; up to 3 bytes before and 4 after a block are read.
#pragma once

#include "unpack.h"

namespace apu::gpu {

struct F32Row {};
struct F16Row {};
struct BF16Row {};

template <class B> APU_DEVICE void dequantize_half(const Half &half, float *v) {
  const float scale = half.ws * half.sc;
  constexpr auto minimum = q::Traits<B>::minimum;
  const float add = minimum == q::Minimum::per_half ? half.wm * half.m : half.wm;
#pragma unroll
  for (u32 i = 0; i < 16; ++i) {
    const float product = scale * float(i8(half.q[i / 4] >> 8 * (i % 4)));
    v[i] = minimum == q::Minimum::none ? product : product + add;
  }
}

template <class B> APU_DEVICE void dequantize16(const u8 *p, u32 h, float *v) {
  Half half;
  unpack_half<B>(p, h, half);
  dequantize_half<B>(half, v);
}

template <class B> APU_DEVICE float dequantize_value(const u8 *p, u32 i) {
  float v[16], out = 0;
  dequantize16<B>(p, i / 16, v);
#pragma unroll
  for (u32 k = 0; k < 16; ++k) out = i % 16 == k ? v[k] : out;
  return out;
}

template <class B> APU_DEVICE void row16_of(BlockType<B>, const u8 *row, u32, u32 g, float *v) {
  constexpr u32 halves = q::Traits<B>::elements / 16;
  dequantize16<B>(row + u64(g / halves) * sizeof(B), g % halves, v);
}
// Words of 16 elements of a float row of k, zero beyond it.
template <u32 Words> APU_DEVICE void load_floats(const u8 *row, u32 k, u32 g, u32 *words) {
  const u8 *p = row + u64(g) * 4 * Words;
  if (16 * g + 16 <= k) return load_unaligned<Words>(p, words);
  const u32 bytes = (k - 16 * g) * (Words / 4);
#pragma unroll
  for (u32 i = 0; i < Words; ++i) {
    words[i] = 4 * i < bytes ? load_u16(p + 4 * i) : 0;
    if (4 * i + 2 < bytes) words[i] |= load_u16(p + 4 * i + 2) << 16;
  }
}
APU_DEVICE void row16_of(BlockType<F32Row>, const u8 *row, u32 k, u32 g, float *v) {
  u32 words[16];
  load_floats<16>(row, k, g, words);
#pragma unroll
  for (u32 i = 0; i < 16; ++i) v[i] = bits_to_float(words[i]);
}
APU_DEVICE void row16_of(BlockType<F16Row>, const u8 *row, u32 k, u32 g, float *v) {
  u32 words[8];
  load_floats<8>(row, k, g, words);
#pragma unroll
  for (u32 i = 0; i < 16; ++i) v[i] = half_to_float(words[i / 2] >> 16 * (i % 2) & 0xffffu);
}
APU_DEVICE void row16_of(BlockType<BF16Row>, const u8 *row, u32 k, u32 g, float *v) {
  u32 words[8];
  load_floats<8>(row, k, g, words);
#pragma unroll
  for (u32 i = 0; i < 16; ++i) v[i] = bits_to_float(i % 2 ? words[i / 2] & 0xffff0000u : words[i / 2] << 16);
}
// Elements 16 g .. 16 g + 15 of a row of k, zero beyond k.
template <class B> APU_DEVICE void dequantize_row16(const u8 *row, u32 k, u32 g, float *v) {
  row16_of(BlockType<B>{}, row, k, g, v);
}

template <class Use> APU_DEVICE void with_any_type(u32 type, const Use &use) {
  switch (type) {
  case APU_F32: return use.template operator()<F32Row>();
  case APU_F16: return use.template operator()<F16Row>();
  case APU_BF16: return use.template operator()<BF16Row>();
  default: return q::with_block_type(type, use);
  }
}

struct DequantizeRow16 {
  const u8 *row;
  u32 k, g;
  float *v;
  template <class B> APU_METHOD void operator()() const { dequantize_row16<B>(row, k, g, v); }
};
APU_DEVICE void dequantize_any16(u32 type, const u8 *row, u32 k, u32 g, float *v) {
  with_any_type(type, DequantizeRow16{row, k, g, v});
}

} // namespace apu::gpu
