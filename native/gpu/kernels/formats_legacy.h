// Formats of 32-element blocks for matvec.h: Q4_0, Q4_1, Q5_0, Q5_1, Q8_0. An item is two blocks.
//
// Stored integers become signed bytes without a subtraction of their offset: the fields are moved to a byte's top and
// their highest bit is flipped, which gives a power of two times the value; the scale of the activations carries its
// inverse. Such powers of two change no rounding, so the products are those of native/quant/blocks.h.
#pragma once

#include "matvec.h"

namespace apu::gpu {

// 64 neighbouring columns: q, and the scales of four halves.
struct ItemX {
  u32 q[16];
  float d[4];
  APU_METHOD void load(const ActivationRow &row, u32 item) {
    load_q<16>(row, 64 * item, q);
    load_4(row.d, 4 * item, d);
  }
  APU_METHOD void scale(float low, float high) { // of the first and second halves of both blocks
    d[0] *= low, d[1] *= high, d[2] *= low, d[3] *= high;
  }
};
struct ItemXS : ItemX { // and d * sum of q of both blocks, for types with a minimum
  float s[2];
  APU_METHOD void load(const ActivationRow &row, u32 item) {
    ItemX::load(row, item);
    float s16[4];
    load_4(row.s16, 4 * item, s16);
    s[0] = s16[0] + s16[1], s[1] = s16[2] + s16[3];
  }
};

// sum + the dot product of four words of weights and activations.
APU_DEVICE i32 dot16(const u32 *w, const u32 *q, i32 sum = 0) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) sum = dot4(w[i], q[i], sum);
  return sum;
}
APU_DEVICE i32 dot16_us(const u32 *w, const u32 *q, i32 sum = 0) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) sum = dot4_us(w[i], q[i], sum);
  return sum;
}
APU_DEVICE float add_halves(i32 i0, i32 i1, const float *d) {
  return fma_f32(float(i1), d[1], float(i0) * d[0]);
}

// Reads blocks of a header of two (d) or four bytes (d and m), then N words.
template <u32 Bytes, u32 Header> struct LegacyBlock {
  static constexpr u32 kElements = 32, kBytes = Bytes, kWords = (Bytes - Header) / 4;
  static constexpr bool kAligned = true, kHeld = true;
  static_assert(Header == 4 ? Bytes % 4 == 0 : Bytes % 4 == 2);

  // Block b of an item; d, and m where there is one, are the low and the high half of `header`.
  template <bool Aligned>
  static APU_METHOD void read(const RowImage &image, u32 item, u32 b, u32 &header, u32 (&data)[kWords]) {
    u32 w[kWords + 1];
    const u32 at = 2 * Bytes * item + Bytes * b;
    if constexpr (!Aligned) {
      image.words(Header == 2 ? at - 2 : at, w);
    } else {
      image.plain_words(Header == 2 && b ? at - 2 : at, w);
    }
    header = Header == 2 && (b || !Aligned) ? w[0] >> 16 : w[0];
#pragma unroll
    for (u32 i = 0; i < kWords; ++i)
      data[i] = Aligned && Header == 2 && !b ? funnel_shift_right(w[i], w[i + 1], 16) : w[i + 1];
  }
};

struct Q8_0 : LegacyBlock<34, 2> {
  using X = ItemX;
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) { x.load(row, item); }
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool full) {
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      if (!Aligned && b && !full) break;
      u32 header, w[8];
      read<Aligned>(image, item, b, header, w);
      const float d = half_to_float(header & 0xffffu);
#pragma unroll
      for (u32 r = 0; r < R; ++r) {
        const u32 *q = x[r].q + 8 * b;
        sum[r] = fma_f32(d, add_halves(dot16(w, q), dot16(w + 4, q + 4), x[r].d + 2 * b), sum[r]);
      }
    }
  }
};

// The offset of 8 is the start of the integer sums where there are registers for them, else part of the bytes.
struct Q4_0 : LegacyBlock<18, 2> {
  struct X : ItemX {
    i32 start[4]; // -8 times the sum of a half's q, 16 times that for the second half of a block
  };
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) {
    x.load(row, item);
    x.scale(1, 1.0f / 16);
#pragma unroll
    for (u32 h = 0; h < 4; ++h) {
      i32 sum = 0;
#pragma unroll
      for (u32 i = 0; i < 4; ++i) sum = dot4(0x01010101u, x.q[4 * h + i], sum);
      x.start[h] = sum * (h % 2 ? -128 : -8);
    }
  }
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool full) {
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      if (!Aligned && b && !full) break;
      u32 header, w[4], low[4], high[4];
      read<Aligned>(image, item, b, header, w);
      const float d = half_to_float(header & 0xffffu);
      constexpr bool kStart = R <= 4;
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const u32 v = kStart ? w[i] : w[i] ^ 0x88888888u;
        low[i] = kStart ? v & 0x0f0f0f0fu : v << 4 & 0xf0f0f0f0u; // nibble, or 16 * (nibble - 8)
        high[i] = v & 0xf0f0f0f0u;                                // 16 * nibble, or 16 * (nibble - 8)
      }
#pragma unroll
      for (u32 r = 0; r < R; ++r) {
        const u32 *q = x[r].q + 8 * b;
        const i32 i0 = kStart ? dot16(low, q, x[r].start[2 * b]) : dot16(low, q) >> 4;
        const i32 i1 = kStart ? dot16_us(high, q + 4, x[r].start[2 * b + 1]) : dot16(high, q + 4);
        sum[r] = fma_f32(d, add_halves(i0, i1, x[r].d + 2 * b), sum[r]);
      }
    }
  }
};

struct Q4_1 : LegacyBlock<20, 4> {
  using X = ItemXS;
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) {
    x.load(row, item);
    x.scale(1, 1.0f / 16);
  }
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool full) {
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      if (!Aligned && b && !full) break;
      u32 header, low[4], high[4];
      read<Aligned>(image, item, b, header, low);
      const float d = half_to_float(header & 0xffffu), m = half_to_float(header >> 16);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        high[i] = low[i] & 0xf0f0f0f0u; // 16 * nibble
        low[i] &= 0x0f0f0f0fu;
      }
#pragma unroll
      for (u32 r = 0; r < R; ++r) {
        const u32 *q = x[r].q + 8 * b;
        sum[r] = fma_f32(d, add_halves(dot16(low, q), dot16_us(high, q + 4), x[r].d + 2 * b), sum[r]);
        sum[r] = fma_f32(m, x[r].s[b], sum[r]);
      }
    }
  }
};

// Bits 0 to 15 of `bits`, each in the place of bit `To` of a byte of four words.
template <u32 To> APU_DEVICE void spread_16(u32 bits, u32 (&out)[4]) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) out[i] = ((bits >> (4 * i) & 15) * 0x00204081u & 0x01010101u) << To;
}

struct Q5_0 : LegacyBlock<22, 2> {
  using X = ItemX;
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) {
    x.load(row, item);
    x.scale(1.0f / 8, 1.0f / 8);
  }
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool full) {
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      if (!Aligned && b && !full) break;
      u32 header, w[5], low[4], high[4]; // w: fifth bits, nibbles
      read<Aligned>(image, item, b, header, w);
      const float d = half_to_float(header & 0xffffu);
      spread_16<7>(~w[0], low);
      spread_16<7>(~w[0] >> 16, high);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) { // 8 * (value - 16)
        low[i] |= w[i + 1] << 3 & 0x78787878u;
        high[i] |= w[i + 1] >> 1 & 0x78787878u;
      }
#pragma unroll
      for (u32 r = 0; r < R; ++r) {
        const u32 *q = x[r].q + 8 * b;
        sum[r] = fma_f32(d, add_halves(dot16(low, q), dot16(high, q + 4), x[r].d + 2 * b), sum[r]);
      }
    }
  }
};

struct Q5_1 : LegacyBlock<24, 4> {
  using X = ItemXS;
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) { x.load(row, item); }
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool full) {
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      if (!Aligned && b && !full) break;
      u32 header, w[5], low[4], high[4];
      read<Aligned>(image, item, b, header, w);
      const float d = half_to_float(header & 0xffffu), m = half_to_float(header >> 16);
      spread_16<4>(w[0], low);
      spread_16<4>(w[0] >> 16, high);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        low[i] |= w[i + 1] & 0x0f0f0f0fu;
        high[i] |= w[i + 1] >> 4 & 0x0f0f0f0fu;
      }
#pragma unroll
      for (u32 r = 0; r < R; ++r) {
        const u32 *q = x[r].q + 8 * b;
        sum[r] = fma_f32(d, add_halves(dot16(low, q), dot16(high, q + 4), x[r].d + 2 * b), sum[r]);
        sum[r] = fma_f32(m, x[r].s[b], sum[r]);
      }
    }
  }
};

} // namespace apu::gpu
