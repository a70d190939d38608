// Sixteen weights of any quantised type: native/quant's table of types (blocks.h) for device code.
//
// A half is 16 consecutive elements, half h of a file block at p (any byte address). unpack_half gives them as integers
// in four words, ready for dot4, with the scales that blocks.h names. Types that models are commonly made of are
// unpacked word by word here; the others go through native/quant/unpack.h itself, compiled for the device. Blocks are
// read with load_unaligned: nothing outside of the aligned words that hold them.
#pragma once

#include "quant.h"

#include "../../quant/unpack.h"
#include "../../quant/visit.h"

namespace apu::gpu {

namespace q = apu::quant;

struct Half {
  u32 q[4]; // int8, the type's offset subtracted
  float ws; // of the 32-block
  float sc; // of this half, an integer (NVFP4: a multiple of 2^-10)
  float wm; // minimum of the 32-block, 0 where the type has none
  float m;  // factor of wm for this half, 1 but for Q2_K
};

APU_DEVICE u32 load_u16(const u8 *p) {
  return p[0] | u32(p[1]) << 8;
}
APU_DEVICE float load_half(const u8 *p) {
  return half_to_float(load_u16(p));
}
// Bits 0 to 3 to bit 0 of bytes 0 to 3.
APU_DEVICE u32 spread_bits(u32 bits) {
  return (bits & 15) * 0x00204081u & 0x01010101u;
}
// offset subtracted from each byte; bytes are below 128, the offset at most 128.
APU_DEVICE u32 subtract_bytes(u32 bytes, u32 offset) {
  return ((bytes | 0x80808080u) - offset * 0x01010101u) ^ 0x80808080u;
}
APU_DEVICE constexpr ByteTable pack_table(const i8 (&values)[16]) {
  ByteTable table{};
  for (u32 i = 0; i < 16; ++i) table.v[i / 4] |= u32(u8(values[i])) << 8 * (i % 4);
  return table;
}
APU_DEVICE constexpr NibbleTable nibble_table(const i8 (&values)[16]) {
  NibbleTable table{pack_table(values), {}, {}};
  const i32 repeated = values[0] < 0 ? -1 : 0; // what each part gives for the other's nibbles
  for (u32 i = 0; i < 8; ++i) {
    table.lower[i / 4] |= u32(u8(values[i] + repeated)) << 8 * (i % 4);
    table.upper[i / 4] |= u32(u8(repeated - values[8 + i])) << 8 * (i % 4);
  }
  return table;
}
// Bytes negated where their bit of `signs` is set; they are 1 to 127 there.
APU_DEVICE u32 negate_bytes(u32 bytes, u32 signs) {
  const u32 ones = spread_bits(signs);
  return (bytes ^ ones * 255u) + ones;
}

template <class B> struct BlockType {};

namespace unpacking {

// Bits [shift, shift + 2) or so of 16 bytes, moved to bit 0.
template <u32 Mask> APU_DEVICE void bit_fields(const u8 *p, u32 shift, u32 *out) {
  load_unaligned<4>(p, out);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) out[i] = out[i] >> shift & Mask * 0x01010101u;
}
APU_DEVICE void subtract(u32 offset, u32 *out) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) out[i] = subtract_bytes(out[i], offset);
}

APU_DEVICE void half_of(BlockType<q::Q4_0>, const u8 *p, u32 h, Half &out) {
  bit_fields<15>(p + 2, 4 * h, out.q);
  subtract(8, out.q);
  out.ws = load_half(p);
}
APU_DEVICE void half_of(BlockType<q::Q4_1>, const u8 *p, u32 h, Half &out) {
  bit_fields<15>(p + 4, 4 * h, out.q);
  out.ws = load_half(p);
  out.wm = load_half(p + 2);
}
APU_DEVICE void fifth_bits(u32 bits, u32 *out) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) out[i] |= spread_bits(bits >> 4 * i) << 4;
}
APU_DEVICE void half_of(BlockType<q::Q5_0>, const u8 *p, u32 h, Half &out) {
  bit_fields<15>(p + 6, 4 * h, out.q);
  fifth_bits(load_u16(p + 2 + 2 * h), out.q);
  subtract(16, out.q);
  out.ws = load_half(p);
}
APU_DEVICE void half_of(BlockType<q::Q5_1>, const u8 *p, u32 h, Half &out) {
  bit_fields<15>(p + 8, 4 * h, out.q);
  fifth_bits(load_u16(p + 4 + 2 * h), out.q);
  out.ws = load_half(p);
  out.wm = load_half(p + 2);
}
APU_DEVICE void half_of(BlockType<q::Q8_0>, const u8 *p, u32 h, Half &out) {
  load_unaligned<4>(p + 2 + 16 * h, out.q);
  out.ws = load_half(p);
}

// Where 2-bit fields of half h lie: 128 elements are 32 bytes.
APU_DEVICE u32 crumbs_at(u32 h) {
  return 32 * (h / 8) + 16 * (h % 2);
}
APU_DEVICE void half_of(BlockType<q::Q2_K>, const u8 *p, u32 h, Half &out) {
  bit_fields<3>(p + 16 + crumbs_at(h), h & 6, out.q);
  out.sc = float(p[h] & 15);
  out.m = float(p[h] >> 4);
  out.ws = load_half(p + 80);
  out.wm = -load_half(p + 82);
}
APU_DEVICE void half_of(BlockType<q::Q3_K>, const u8 *p, u32 h, Half &out) {
  u32 high[4];
  bit_fields<1>(p + 16 * (h % 2), h / 2, high);
  bit_fields<3>(p + 32 + crumbs_at(h), h & 6, out.q);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) out.q[i] |= high[i] << 2;
  subtract(4, out.q);
  out.sc = float(q::scale_q3_k(p + 96, h));
  out.ws = load_half(p + 108);
}
APU_DEVICE void scale_min(const u8 *p, u32 b, Half &out) {
  i32 scale, minimum;
  q::scale_min_k4(p + 4, b, &scale, &minimum);
  out.ws = load_half(p) * float(scale);
  out.wm = -(load_half(p + 2) * float(minimum));
}
APU_DEVICE void half_of(BlockType<q::Q4_K>, const u8 *p, u32 h, Half &out) {
  bit_fields<15>(p + 16 + 32 * (h / 4) + 16 * (h % 2), 2 * (h & 2), out.q);
  scale_min(p, h / 2, out);
}
APU_DEVICE void half_of(BlockType<q::Q5_K>, const u8 *p, u32 h, Half &out) {
  u32 high[4];
  bit_fields<1>(p + 16 + 16 * (h % 2), h / 2, high);
  bit_fields<15>(p + 48 + 32 * (h / 4) + 16 * (h % 2), 2 * (h & 2), out.q);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) out.q[i] |= high[i] << 4;
  scale_min(p, h / 2, out);
}
APU_DEVICE void half_of(BlockType<q::Q6_K>, const u8 *p, u32 h, Half &out) {
  u32 high[4];
  bit_fields<3>(p + 128 + crumbs_at(h), h & 6, high);
  bit_fields<15>(p + 64 * (h / 8) + 32 * (h / 2 % 2) + 16 * (h % 2), h & 4, out.q);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) out.q[i] |= high[i] << 4;
  subtract(32, out.q);
  out.sc = float(i8(p[192 + h]));
  out.ws = load_half(p + 208);
}

APU_DEVICE void half_of(BlockType<q::IQ2_XXS>, const u8 *p, u32 h, Half &out) {
  u32 w[2]; // four indices; signs and scale
  load_unaligned<2>(p + 2 + 8 * (h / 2), w);
  const u32 indices = w[0] >> 16 * (h % 2), seven = w[1] >> 14 * (h % 2);
#pragma unroll
  for (u32 i = 0; i < 2; ++i) {
    const u64 grid = q::kIq2xxsGrid.v[indices >> 8 * i & 255];
    const u32 signs = q::even_signs(seven >> 7 * i & 127);
    out.q[2 * i] = negate_bytes(u32(grid), signs);
    out.q[2 * i + 1] = negate_bytes(u32(grid >> 32), signs >> 4);
  }
  out.ws = load_half(p) * float(2 * (w[1] >> 28) + 1) * 0.125f;
}

APU_DEVICE void table_values(const ByteTable &table, const u8 *p, u32 h, u32 *out) {
  load_unaligned<4>(p, out);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    u32 low, high;
    look_up_nibbles(table, out[i], low, high);
    out[i] = h ? high : low;
  }
}
APU_DEVICE void half_of(BlockType<q::IQ4_NL>, const u8 *p, u32 h, Half &out) {
  constexpr ByteTable table = pack_table(q::kIq4Values);
  table_values(table, p + 2, h, out.q);
  out.ws = load_half(p);
}
APU_DEVICE void half_of(BlockType<q::IQ4_XS>, const u8 *p, u32 h, Half &out) {
  constexpr ByteTable table = pack_table(q::kIq4Values);
  const u32 b = h / 2;
  table_values(table, p + 8 + 16 * b, h % 2, out.q);
  const i32 scale = i32((p[4 + b / 2] >> 4 * (b % 2) & 15) | (load_u16(p + 2) >> 2 * b & 3) << 4);
  out.ws = load_half(p) * float(scale - 32);
}
APU_DEVICE void half_of(BlockType<q::MXFP4>, const u8 *p, u32 h, Half &out) {
  constexpr ByteTable table = pack_table(q::kE2m1Values);
  table_values(table, p + 1, h, out.q);
  out.ws = q::half_e8m0(p[0]);
}
APU_DEVICE void half_of(BlockType<q::NVFP4>, const u8 *p, u32 h, Half &out) {
  constexpr ByteTable table = pack_table(q::kE2m1Values);
  u32 w[2];
  load_unaligned<2>(p + 4 + 8 * h, w);
#pragma unroll
  for (u32 i = 0; i < 2; ++i) look_up_nibbles(table, w[i], out.q[i], out.q[i + 2]);
  out.sc = q::half_e4m3(p[h]);
  out.ws = 1;
}
APU_DEVICE void half_of(BlockType<q::TQ2_0>, const u8 *p, u32 h, Half &out) {
  bit_fields<3>(p + crumbs_at(h), h & 6, out.q);
  subtract(1, out.q);
  out.ws = load_half(p + 64);
}

// Any other type: the 32-block as native/quant/unpack.h gives it, and of that one half.
template <class B> APU_DEVICE void half_of(BlockType<B>, const u8 *p, u32 h, Half &out) {
  q::Block32 block;
  q::unpack_block(*reinterpret_cast<const B *>(p), h / 2, block);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    u32 words[2];
#pragma unroll
    for (u32 k = 0; k < 2; ++k) {
      const i8 *from = block.q + 16 * k + 4 * i;
      words[k] = u8(from[0]) | u32(u8(from[1])) << 8 | u32(u8(from[2])) << 16 | u32(u8(from[3])) << 24;
    }
    out.q[i] = h % 2 ? words[1] : words[0];
  }
  out.ws = block.ws;
  out.sc = h % 2 ? block.sc[1] : block.sc[0];
}

} // namespace unpacking

// Half h (0 to elements / 16 - 1) of the file block at p.
template <class B> APU_DEVICE void unpack_half(const u8 *p, u32 h, Half &out) {
  out.sc = out.m = 1;
  out.wm = 0;
  unpacking::half_of(BlockType<B>{}, p, h, out);
}

} // namespace apu::gpu
