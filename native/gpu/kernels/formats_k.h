// Formats of 256-element blocks for matvec.h: Q4_K, Q5_K, Q6_K. Four items are a block.
//
// Q4_K and Q5_K are multiples of 16 bytes long, so an aligned row is read 16 bytes a lane. Six-bit values of Q6_K are
// signed bytes as in formats_legacy.h: shifted to the top of a byte, highest bit flipped.
#pragma once

#include "formats_legacy.h"

namespace apu::gpu {

// Scales (low half-word: of the item's two sub-blocks, a byte each) and minimums of sub-blocks 2 * quarter and
// 2 * quarter + 1, from words 1 to 3 of a block, which hold twelve bytes of packed six-bit fields.
APU_DEVICE void scales_k4(const u32 *header, u32 quarter, u32 &scales, u32 &minimums) {
  const u32 low = header[1], middle = header[2], high = header[3];
  const bool upper = quarter >= 2;
  scales = upper ? (high & 0x0f0f0f0fu) | (low >> 2 & 0x30303030u) : low & 0x3f3f3f3fu;
  minimums = upper ? (high >> 4 & 0x0f0f0f0fu) | (middle >> 2 & 0x30303030u) : middle & 0x3f3f3f3fu;
  const u32 shift = quarter % 2 * 16;
  scales >>= shift;
  minimums >>= shift;
}

// Columns [64 c, 64 c + 32) are the low nibbles of 32 bytes, the next 32 their high nibbles.
struct Q4_K {
  static constexpr u32 kElements = 256, kBytes = 144;
  static constexpr bool kAligned = true, kHeld = true;
  using X = ItemXS;
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) {
    x.load(row, item);
    x.d[2] *= 1.0f / 16, x.d[3] *= 1.0f / 16;
  }
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool) {
    const u32 at = item / 4 * kBytes, quarter = item % 4;
    u32 header[4], w[8], high[8], scales, minimums;
    image.words_at<Aligned>(at, header);
    image.words_at<Aligned>(at + 16 + 32 * quarter, w);
    scales_k4(header, quarter, scales, minimums);
    const float d = half_to_float(header[0] & 0xffffu), m = -half_to_float(header[0] >> 16);
    const float d0 = d * float(scales & 255), d1 = d * float(scales >> 8 & 255);
    const float m0 = m * float(minimums & 255), m1 = m * float(minimums >> 8 & 255);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      high[i] = w[i] & 0xf0f0f0f0u; // 16 * nibble
      w[i] &= 0x0f0f0f0fu;
    }
#pragma unroll
    for (u32 r = 0; r < R; ++r) {
      const u32 *q = x[r].q;
      sum[r] = fma_f32(d0, add_halves(dot16(w, q), dot16(w + 4, q + 4), x[r].d), sum[r]);
      sum[r] = fma_f32(m0, x[r].s[0], sum[r]);
      sum[r] = fma_f32(d1, add_halves(dot16_us(high, q + 8), dot16_us(high + 4, q + 12), x[r].d + 2), sum[r]);
      sum[r] = fma_f32(m1, x[r].s[1], sum[r]);
    }
  }
};

// As Q4_K, with fifth bits: bit b of byte l belongs to column 32 b + l.
struct Q5_K {
  static constexpr u32 kElements = 256, kBytes = 176;
  static constexpr bool kAligned = true, kHeld = true;
  using X = ItemXS;
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) { x.load(row, item); }
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool) {
    const u32 at = item / 4 * kBytes, quarter = item % 4;
    u32 header[4], fifth[8], w[8], high[8], scales, minimums;
    image.words_at<Aligned>(at, header);
    image.words_at<Aligned>(at + 16, fifth);
    image.words_at<Aligned>(at + 48 + 32 * quarter, w);
    scales_k4(header, quarter, scales, minimums);
    const float d = half_to_float(header[0] & 0xffffu), m = -half_to_float(header[0] >> 16);
    const float d0 = d * float(scales & 255), d1 = d * float(scales >> 8 & 255);
    const float m0 = m * float(minimums & 255), m1 = m * float(minimums >> 8 & 255);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) {
      const u32 bits = fifth[i] >> (2 * quarter);
      high[i] = (w[i] >> 4 & 0x0f0f0f0fu) | (bits << 3 & 0x10101010u);
      w[i] = (w[i] & 0x0f0f0f0fu) | (bits << 4 & 0x10101010u);
    }
#pragma unroll
    for (u32 r = 0; r < R; ++r) {
      const u32 *q = x[r].q;
      sum[r] = fma_f32(d0, add_halves(dot16(w, q), dot16(w + 4, q + 4), x[r].d), sum[r]);
      sum[r] = fma_f32(m0, x[r].s[0], sum[r]);
      sum[r] = fma_f32(d1, add_halves(dot16(high, q + 8), dot16(high + 4, q + 12), x[r].d + 2), sum[r]);
      sum[r] = fma_f32(m1, x[r].s[1], sum[r]);
    }
  }
};

// In each half of the block (128 columns, 64 bytes of low nibbles, 32 of high bits) 32 bytes of nibbles are groups j
// (low) and j + 2 (high) of 32 columns, j = 0 or 1; a byte of high bits belongs to all four groups. An item is those
// two groups: item % 4 = 2 * half + j.
struct Q6_K {
  static constexpr u32 kElements = 256, kBytes = 210;
  static constexpr bool kAligned = false;
  using X = ItemX; // both groups
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) {
    const u32 column = item / 4 * 256 + item % 4 / 2 * 128 + item % 2 * 32;
#pragma unroll
    for (u32 g = 0; g < 2; ++g) {
      load_q<8>(row, column + 64 * g, x.q + 8 * g);
#pragma unroll
      for (u32 h = 0; h < 2; ++h) x.d[2 * g + h] = row.d[column / 16 + 4 * g + h] * (1.0f / 4);
    }
  }
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool) {
    const u32 at = item / 4 * kBytes, half = item % 4 / 2, j = item % 2;
    u32 low[8], high[8], scales[2]; // scales: two bytes of a group, then those of the other from the second word on
    image.words(at + 64 * half + 32 * j, low);
    image.words(at + 128 + 32 * half, high);
    image.words(at + 192 + 8 * half + 2 * j, scales);
    const float d = half_to_float(image.half(at + 208) & 0xffffu);
#pragma unroll
    for (u32 i = 0; i < 8; ++i) { // 4 * (value - 32)
      const u32 bits = (high[i] ^ 0xaaaaaaaau) << (2 - 2 * j);
      high[i] = (low[i] >> 2 & 0x3c3c3c3cu) | (bits & 0xc0c0c0c0u);
      low[i] = (low[i] << 2 & 0x3c3c3c3cu) | (bits << 4 & 0xc0c0c0c0u);
    }
    const i32 scale[4] = {i32(scales[0] << 24) >> 24, i32(scales[0] << 16) >> 24, i32(scales[1] << 24) >> 24,
                          i32(scales[1] << 16) >> 24};
#pragma unroll
    for (u32 r = 0; r < R; ++r) {
      const u32 *q = x[r].q;
      const i32 i0 = mul24(dot16(low, q), scale[0]), i1 = mul24(dot16(low + 4, q + 4), scale[1]);
      const i32 i2 = mul24(dot16(high, q + 8), scale[2]), i3 = mul24(dot16(high + 4, q + 12), scale[3]);
      sum[r] = fma_f32(d, add_halves(i0, i1, x[r].d), sum[r]);
      sum[r] = fma_f32(d, add_halves(i2, i3, x[r].d + 2), sum[r]);
    }
  }
};

} // namespace apu::gpu
