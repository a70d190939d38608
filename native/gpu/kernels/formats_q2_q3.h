// Formats of Q2_K and Q3_K for matvec.h.
//
// An item is 16 bytes of 2-bit fields: columns c, c + 32, c + 64 and c + 96 of a half superblock for 16 neighbouring c,
// so four halves that lie in four 32-blocks, each with a scale of its own. Fields are multiplied where they stand in
// their bytes, or at the byte's top; the activations' scale carries the inverse power of two, which changes no
// rounding. The products of the four halves are added before the superblock's scale; each half's is scaled as an
// integer and converted once.
#pragma once

#include "formats_legacy.h"

namespace apu::gpu {

struct StridedX {
  u32 q[16];
  float d[4];
  // The first of the item's columns; the others are 32, 64 and 96 further.
  static APU_METHOD u32 column(u32 item) { return 64 * (item & ~1u) + 16 * (item % 2); }
  APU_METHOD void load(const ActivationRow &row, u32 item) {
#pragma unroll
    for (u32 g = 0; g < 4; ++g) {
      load_q<4>(row, column(item) + 32 * g, q + 4 * g);
      d[g] = row.d[column(item) / 16 + 2 * g];
    }
  }
};
// Bytes odd, 2 + odd, 4 + odd and 6 + odd of two words: what belongs to an item's four halves.
APU_DEVICE u32 every_other_byte(u32 low, u32 high, bool odd) {
  return byte_permute(low, high, odd ? 0x07050301u : 0x06040200u);
}
APU_DEVICE i32 sum16(const u32 *q) {
  i32 sum = 0;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) sum = dot4(0x01010101u, q[i], sum);
  return sum;
}
struct Q2_K {
  static constexpr u32 kElements = 256, kBytes = 84;
  static constexpr bool kAligned = true;
  // d * sum of q, or where registers are short the sums themselves: what a kernel does not use costs it nothing.
  struct X : StridedX {
    float s[4];
    u32 sums[2]; // of halves 0 and 1, and 2 and 3, 16 bits each
    template <u32 R> APU_METHOD float s_of(u32 g) const {
      if constexpr (R < 8) return s[g];
      u32 pair = sums[g / 2];
      hide(pair); // else it would be computed once, and kept
      return d[g] * float(i32(i16(pair >> 16 * (g % 2))) * (1 << 2 * g));
    }
  };
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) {
    x.StridedX::load(row, item);
#pragma unroll
    for (u32 g = 0; g < 4; ++g) {
      x.s[g] = row.s16[X::column(item) / 16 + 2 * g];
      x.d[g] *= 1.0f / (1u << 2 * g);
    }
    x.sums[0] = (u32(sum16(x.q)) & 0xffffu) | u32(sum16(x.q + 4)) << 16;
    x.sums[1] = (u32(sum16(x.q + 8)) & 0xffffu) | u32(sum16(x.q + 12)) << 16;
  }
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool) {
    const u32 at = kBytes * (item / 4), j = item % 4;
    u32 w[4], scales[2], d[1];
    image.plain_words_at<Aligned>(at + 16 + 16 * j, w);
    image.plain_words_at<Aligned>(at + 8 * (j / 2), scales);
    image.plain_words_at<Aligned>(at + 80, d);
    const u32 both = every_other_byte(scales[0], scales[1], j % 2);
    const u32 scale = both & 0x0f0f0f0fu, minimum = both >> 4 & 0x0f0f0f0fu;
    const float ws = half_to_float(d[0] & 0xffffu), wm = -half_to_float(d[0] >> 16);
    float t[R];
#pragma unroll
    for (u32 r = 0; r < R; ++r) {
      float m = 0;
#pragma unroll
      for (u32 g = 0; g < 4; ++g) m = fma_f32(byte_to_float(minimum, g), x[r].template s_of<R>(g), m);
      sum[r] = fma_f32(wm, m, sum[r]);
      t[r] = 0;
    }
#pragma unroll
    for (u32 g = 0; g < 4; ++g) {
#pragma unroll
      for (u32 r = 0; r < R; ++r) {
        const u32 mask = 0x03030303u << 2 * g, *q = x[r].q + 4 * g;
        i32 dot = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) dot = g < 3 ? dot4(w[i] & mask, q[i], dot) : dot4_us(w[i] & mask, q[i], dot);
        const float scaled =
            g < 3 ? scaled_to_float(dot, scale, g, 0) : float(mul24(dot, i32(scale >> 24))); // 2^22 or more
        t[r] = fma_f32(scaled, x[r].d[g], t[r]);
      }
    }
#pragma unroll
    for (u32 r = 0; r < R; ++r) sum[r] = fma_f32(ws, t[r], sum[r]);
  }
};

struct Q3_K {
  static constexpr u32 kElements = 256, kBytes = 110;
  static constexpr bool kAligned = true;
  // Fields either stand in their bytes, 4 too large, and sums start with what that makes; or, where registers are
  // short, at the byte's top with the sign flipped.
  struct X : StridedX {
    i32 start[4]; // -4 times the sum of q; what a kernel does not use costs it nothing
  };
  static APU_METHOD u32 power(u32 g) { return 1u << (g < 3 ? 2 * g : 4); } // of fields that stand in their bytes
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) {
    x.StridedX::load(row, item);
#pragma unroll
    for (u32 g = 0; g < 4; ++g) {
      x.start[g] = -4 * i32(power(g)) * sum16(x.q + 4 * g);
      x.d[g] *= 1.0f / float(power(g));
    }
  }
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &row, u32 item, const X (&x)[R], float (&sum)[R], bool) {
    const u32 at = kBytes * (item / 4), j = item % 4, shift = 4 * (j / 2);
    const RowImage image = row.known<Aligned>();
    u32 w[4], high[4], scales[4]; // the last one: d
    image.words(at + 32 + 16 * j, w);
    image.words(at + 16 * (j % 2), high, shift);
    image.words(at + 96, scales);
    const u32 low4 = every_other_byte(scales[0], scales[1], j % 2) >> shift & 0x0f0f0f0fu;
    const u32 high2 = every_other_byte(scales[2], scales[2], j % 2) >> shift; // of g = 0, 1; two bits further of 2, 3
    const u32 scale = low4 | (high2 & 0x00000303u) << 4 | (high2 & 0x0c0c0000u) << 2;
    const float ws = half_to_float(scales[3] & 0xffffu);
    float t[R];
#pragma unroll
    for (u32 r = 0; r < R; ++r) t[r] = 0;
    constexpr bool kStart = R < 8;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) high[i] = kStart ? high[i] : ~high[i];
#pragma unroll
    for (u32 g = 0; g < 4; ++g) {
      u32 v[4];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        if constexpr (kStart) {
          const u32 low = g < 3 ? w[i] & 0x03030303u << 2 * g : w[i] >> 2 & 0x30303030u;
          v[i] = low | (high[i] << (g < 3 ? 2 + g : 3) & 0x04040404u << (g < 3 ? 2 * g : 4));
        } else {
          const u32 low = g < 3 ? w[i] << (5 - 2 * g) : w[i] >> 1;
          v[i] = (low & 0x60606060u) | (high[i] << (7 - g) & 0x80808080u);
        }
      }
      const float times = float(power(g)) / 32; // to what the scale of d is for
      const float sc = fma_f32(byte_to_float(scale, g), times, -32 * times);
#pragma unroll
      for (u32 r = 0; r < R; ++r) {
        i32 dot = kStart ? x[r].start[g] : kDotStart;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) dot = dot4(v[i], x[r].q[4 * g + i], dot);
        const float scaled = kStart ? scaled_to_float(dot, scale, g, 32) : dot_to_float(dot) * sc;
        t[r] = fma_f32(scaled, x[r].d[g], t[r]);
      }
    }
#pragma unroll
    for (u32 r = 0; r < R; ++r) sum[r] = fma_f32(ws, t[r], sum[r]);
  }
};

} // namespace apu::gpu
