// Formats of the types whose values come from a table, for matvec.h: IQ4_NL, IQ4_XS and MXFP4 (sixteen values, byte
// permutes) and IQ2_XXS (a codebook). Items are two neighbouring blocks; products are those of native/quant/blocks.h.
//
// IQ2_XXS keeps two tables in LDS: an entry of the codebook as the selectors of a byte permute over its three values,
// and a group's signs as the bit of a selector that picks their negatives. So eight weights cost two look-ups, an or
// and two permutes. Copies of the tables keep lanes that look up different entries out of each other's banks.
#pragma once

#include "formats_legacy.h"
#include "unpack.h"

namespace apu::gpu {

// Products of a block of 32 whose values are v, scale ws.
template <u32 R, class X>
APU_DEVICE void add_block(const u32 (&v)[8], float ws, u32 b, const X (&x)[R], float (&sum)[R]) {
#pragma unroll
  for (u32 r = 0; r < R; ++r) {
    const u32 *q = x[r].q + 8 * b;
    sum[r] = fma_f32(ws, add_halves(dot16(v, q), dot16(v + 4, q + 4), x[r].d + 2 * b), sum[r]);
  }
}
APU_DEVICE void look_up_block(const ByteTable &table, const u32 *w, u32 (&v)[8]) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i) look_up_nibbles(table, w[i], v[i], v[4 + i]);
}

struct NeighbourItems {
  static constexpr bool kAligned = false;
  using X = ItemX;
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) { x.load(row, item); }
};

struct IQ4_NL : NeighbourItems {
  static constexpr u32 kElements = 32, kBytes = 18;
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool full) {
    constexpr ByteTable table = pack_table(q::kIq4Values);
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      if (b && !full) break;
      u32 w[5], v[8]; // two bytes of no use, d, nibbles
      image.words(2 * kBytes * item + kBytes * b - 2, w);
      look_up_block(table, w + 1, v);
      add_block(v, half_to_float(w[0] >> 16), b, x, sum);
    }
  }
};

struct IQ4_XS : NeighbourItems {
  static constexpr u32 kElements = 256, kBytes = 136;
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool) {
    constexpr ByteTable table = pack_table(q::kIq4Values);
    const u32 at = kBytes * (item / 4), j = item % 4;
    u32 head[2], w[8];
    image.words(at, head);
    image.words(at + 8 + 32 * j, w);
    const u32 low = head[1] >> 8 * j, high = head[0] >> (16 + 4 * j); // of the scales of two blocks
    const float d = half_to_float(head[0] & 0xffffu);
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      u32 v[8];
      look_up_block(table, w + 4 * b, v);
      const u32 scale = (low >> 4 * b & 15) | (high >> 2 * b & 3) << 4;
      add_block(v, d * float(i32(scale) - 32), b, x, sum);
    }
  }
};

struct MXFP4 : NeighbourItems {
  static constexpr u32 kElements = 32, kBytes = 17;
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool full) {
    constexpr ByteTable table = pack_table(q::kE2m1Values);
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      if (b && !full) break;
      u32 w[5], v[8]; // three bytes of no use, e, nibbles
      image.words(2 * kBytes * item + kBytes * b - 3, w);
      look_up_block(table, w + 1, v);
      add_block(v, q::half_e8m0(u8(w[0] >> 24)), b, x, sum);
    }
  }
};

struct IQ2_XXS : NeighbourItems {
  static constexpr u32 kElements = 256, kBytes = 66;
  static constexpr u32 kCopies = kTableCopies, kGrid = 256, kSigns = 128;
  static APU_METHOD ByteSelectors *tables() { // (kGrid + kSigns, kCopies)
    APU_SHARED ByteSelectors table[(kGrid + kSigns) * kCopies];
    return table;
  }
  // All threads of the block; a barrier follows.
  static APU_METHOD void prepare() {
    ByteSelectors *table = tables();
    for (u32 i = thread_id(); i < (kGrid + kSigns) * kCopies; i += kMatvecWaves * kWaveSize) {
      const u32 entry = i / kCopies;
      u32 nibbles; // 0, 1, 2 choose a value, 4 its negative
      if (entry < kGrid) {
        nibbles = q::kIq2xxs[entry];
        nibbles = (nibbles | nibbles << 8) & 0x00ff00ffu;
        nibbles = (nibbles | nibbles << 4) & 0x0f0f0f0fu;
        nibbles = (nibbles | nibbles << 2) & 0x33333333u;
      } else {
        const u32 signs = q::even_signs(entry - kGrid);
        nibbles = 0;
#pragma unroll
        for (u32 k = 0; k < 8; ++k) nibbles |= (signs >> k & 1) << (4 * k + 2);
      }
      table[i] = byte_selectors(nibbles);
    }
  }
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool) {
    constexpr u32 kValues = q::kIq2Values[0] | q::kIq2Values[1] << 8 | q::kIq2Values[2] << 16;
    constexpr u32 kNegatives =
        (256u - q::kIq2Values[0]) | (256u - q::kIq2Values[1]) << 8 | (256u - q::kIq2Values[2]) << 16;
    const u32 at = kBytes * (item / 4);
    const ByteSelectors *grid = tables() + lane_id() % kCopies, *signs = grid + kGrid * kCopies;
    u32 w[4], head[1];
    image.words(at + 2 + 16 * (item % 4), w);
    image.words(at, head);
    const float d = half_to_float(head[0] & 0xffffu) * 0.125f;
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      u32 v[8];
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const ByteSelectors s =
            grid[(w[2 * b] >> 8 * i & 255) * kCopies] | signs[(w[2 * b + 1] >> 7 * i & 127) * kCopies];
        select_bytes(kValues, kNegatives, s, v[2 * i], v[2 * i + 1]);
      }
      add_block(v, d * float(2 * (w[2 * b + 1] >> 28) + 1), b, x, sum);
    }
  }
};

} // namespace apu::gpu
