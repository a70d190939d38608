// One position of a head's part of a page: stored from float, read as float. Layouts are described in attention_args.h.
#pragma once

#include "attention_args.h"
#include "gpu.h"

namespace apu::gpu {

APU_DEVICE u8 *page_part(const PagedState &state, u32 page, u32 head) {
  return state.address + u64(page) * state.page_bytes + u64(head) * state.head_bytes;
}

APU_DEVICE const u32 *page_table(const StepView &step, u32 sequence, u32 group) {
  return step.pages + step.slots[u64(sequence) * step.groups + group].page_begin;
}

// Element (r, m) of d of F16.
template <bool Values> APU_DEVICE u32 kv_index(u32 r, u32 m, u32 d) {
  if constexpr (Values) return (r / kValueTile * d + m) * kValueTile + r % kValueTile;
  return r * d + m;
}
// Bytes to a quant of Q8_0 and to the scale of block b: those of a tile lie behind its quants.
template <bool Values> APU_DEVICE u32 kv_quant_offset(u32 r, u32 m, u32 d) {
  return kv_index<Values>(r, m, d) + r / kValueTile * (d / kScaleBlock) * kValueTile * 2;
}
template <bool Values> APU_DEVICE u32 kv_scale_offset(u32 r, u32 b, u32 d) {
  return (r / kValueTile + 1) * kValueTile * d + kv_index<Values>(r, b, d / kScaleBlock) * 2;
}

// By one wave: x (d) in LDS or device memory becomes position r. Q8_0: d = amax / 127 in F16, at most its largest
// number; q = x / d rounded to even, at most 127; a block that is not finite gets scale NaN and q = 0.
template <bool Values> APU_DEVICE void store_position(const PagedState &state, u8 *part, u32 r, const float *x) {
  const u32 d = state.head_size, lane = lane_id();
  if (state.dtype == kF32) {
    for (u32 m = lane; m < d; m += kWaveSize) reinterpret_cast<float *>(part)[r * d + m] = x[m];
    return;
  }
  if (state.dtype == kF16) {
    u16 *to = reinterpret_cast<u16 *>(part);
    for (u32 m = lane; m < d; m += kWaveSize) to[kv_index<Values>(r, m, d)] = float_to_half(x[m]);
    return;
  }
  for (u32 begin = 0; begin < d; begin += kWaveSize) { // one block, or two in halves of a wave of 64
    const u32 m = begin + lane;
    const float v = m < d ? x[m] : 0.0f;
    u32 bits = float_to_bits(v) & 0x7fffffffu;
#pragma unroll
    for (u32 mask = 1; mask < kScaleBlock; mask *= 2) {
      const u32 other = wave_shuffle_xor(bits, mask);
      bits = bits > other ? bits : other;
    }
    const bool finite = bits < 0x7f800000u;
    const u16 half = finite ? float_to_half(min_f32(bits_to_float(bits) / 127.0f, 65504.0f)) : u16(0x7e00);
    const float scale = half_to_float(half), inverse = finite && scale != 0.0f ? 1.0f / scale : 0.0f;
    const float y = finite ? max_f32(min_f32(v * inverse, 127.0f), -127.0f) : 0.0f;
    if (m >= d) continue;
    part[kv_quant_offset<Values>(r, m, d)] = u8(i32(round_even_f32(y)) + 128);
    if (m % kScaleBlock == 0) *reinterpret_cast<u16 *>(part + kv_scale_offset<Values>(r, m / kScaleBlock, d)) = half;
  }
}

// One element of a row that lies as keys, in F32 or F16.
APU_DEVICE void store_key_element(const PagedState &state, u8 *part, u32 r, u32 m, float x) {
  const u32 at = kv_index<false>(r, m, state.head_size);
  if (state.dtype == kF32)
    reinterpret_cast<float *>(part)[at] = x;
  else
    reinterpret_cast<u16 *>(part)[at] = float_to_half(x);
}

template <bool Values> APU_DEVICE float load_element(u32 type, const u8 *part, u32 r, u32 m, u32 d) {
  if (type == kF32) return reinterpret_cast<const float *>(part)[r * d + m];
  if (type == kF16) return half_to_float(reinterpret_cast<const u16 *>(part)[kv_index<Values>(r, m, d)]);
  const u16 scale = *reinterpret_cast<const u16 *>(part + kv_scale_offset<Values>(r, m / kScaleBlock, d));
  return float(i32(part[kv_quant_offset<Values>(r, m, d)]) - 128) * half_to_float(scale);
}

} // namespace apu::gpu
