// Formats of the types whose values come from a table, for matvec.h: IQ4_NL, IQ4_XS and MXFP4 (sixteen values, byte
// permutes) and IQ2_XXS (a codebook). Items are two neighbouring blocks; products are those of native/quant/blocks.h.
//
// IQ2_XXS keeps two tables in LDS. Either an entry of the codebook is the selectors of a byte permute over its three
// values, and a group's signs the bit of a selector that picks their negatives: eight weights cost two look-ups, an or
// and two permutes, and half as much LDS. Or the entry is the values, and the signs select activations or their
// negatives: no or. Copies of the tables keep lanes that look up different entries out of each other's banks.
#pragma once

#include "formats_legacy.h"
#include "unpack.h"

namespace apu::gpu {

// Sums that began with kDotStart of a block's halves, with the halves' scales.
APU_DEVICE float join_halves(i32 first, i32 second, const float *d) {
  return fma_f32(dot_to_float(second), d[1], dot_to_float(first) * d[0]);
}
APU_DEVICE i32 dot16_start(const u32 *w, const u32 *q) {
  return dot4(w[3], q[3], dot4(w[2], q[2], dot4(w[1], q[1], dot4(w[0], q[0], kDotStart))));
}
// Products of a block of 32 whose values are v, scale ws.
template <u32 R, class X>
APU_DEVICE void add_block(const u32 (&v)[8], float ws, u32 b, const X (&x)[R], float (&sum)[R]) {
#pragma unroll
  for (u32 r = 0; r < R; ++r) {
    const u32 *q = x[r].q + 8 * b;
    sum[r] = fma_f32(ws, join_halves(dot16_start(v, q), dot16_start(v + 4, q + 4), x[r].d + 2 * b), sum[r]);
  }
}
// Items of two blocks of nibbles that a table gives values.
template <const i8 (&Values)[16]> struct NibbleItems {
  static constexpr bool kAligned = true;
  struct X : ItemX {
    NibbleTable table;
  };
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) {
    x.ItemX::load(row, item);
    arrange_nibbles(x.q);
    arrange_nibbles(x.q + 8);
    x.table = nibble_table(Values);
    keep(x.table.lower[0]); // a permute takes the other word as an immediate
    keep(x.table.upper[0]);
  }
  // Products of block b of the item, whose words are w and whose scale is ws.
  template <u32 R, class AnyX>
  static APU_METHOD void add(const u32 *w, float ws, u32 b, const AnyX (&x)[R], float (&sum)[R]) {
    const NibbleValues v = nibble_values(x[0].table, w);
#pragma unroll
    for (u32 r = 0; r < R; ++r) {
      const u32 *q = x[r].q + 8 * b;
      sum[r] = fma_f32(ws, join_halves(dot_low(v, q), dot_high(v, q + 4), x[r].d + 2 * b), sum[r]);
    }
  }
};

struct IQ4_NL : NibbleItems<q::kIq4Values> {
  static constexpr u32 kElements = 32, kBytes = 18;
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &row, u32 item, const X (&x)[R], float (&sum)[R], bool full) {
    const RowImage image = row.known<Aligned>();
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      if (!Aligned && b && !full) break;
      u32 w[5]; // two bytes of no use, d, nibbles
      image.words(2 * kBytes * item + kBytes * b - 2, w);
      add(w + 1, half_to_float(w[0] >> 16), b, x, sum);
    }
  }
};

struct IQ4_XS : NibbleItems<q::kIq4Values> {
  static constexpr u32 kElements = 256, kBytes = 136;
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool) {
    const u32 at = kBytes * (item / 4), j = item % 4;
    u32 head[2], w[8];
    image.plain_words_at<Aligned>(at, head);
    image.plain_words_at<Aligned>(at + 8 + 32 * j, w);
    const u32 low = head[1] >> 8 * j, high = head[0] >> (16 + 4 * j); // of the scales of two blocks
    const float d = half_to_float(head[0] & 0xffffu);
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      const u32 scale = (low >> 4 * b & 15) | (high >> 2 * b & 3) << 4;
      add(w + 4 * b, d * float(i32(scale) - 32), b, x, sum);
    }
  }
};

// Blocks have an odd length, but items an even one. Where a permute takes the nibbles of a half-word as they are,
// nothing is shifted: a half-word has activations of its own for low and for high nibbles, zeros between them. Values
// are made positive by an offset, so that of two permutes, for nibbles below 8 and for the others, each gives zero for
// the other's.
struct MXFP4 : NibbleItems<q::kE2m1Values> {
  static constexpr u32 kElements = 32, kBytes = 17, kHalfWords = 17, kOffset = 12;
  struct X : NibbleItems::X {
    u32 low[kHalfWords], high[kHalfWords];
    i32 start[4]; // -kOffset times the sum of a half's q
    u32 lower[2], upper[2];
  };
  static APU_METHOD constexpr u32 values(u32 first) {
    u32 word = 0;
    for (u32 i = 0; i < 4; ++i) word |= u32(q::kE2m1Values[first + i] + i32(kOffset)) << 8 * i;
    return word;
  }
  // Bytes a and a + 1 of a half's four words, as far as there are such, as bytes 0 and 2, or above those.
  static APU_METHOD u32 pair(const u32 *q, i32 a, bool above) {
    const u32 shift = above ? 8 : 0;
    if (a > 0 && a < 15 && a % 4 == 3)
      return byte_permute(q[a / 4], q[a / 4 + 1], 0x00040003u << shift) & 0x00ff00ffu << shift;
    const u32 first = a < 0 ? 4 : a % 4, second = a > 14 ? 4 : (a + 1) % 4; // 4: zero
    return byte_permute(q[a < 0 ? 0 : a / 4], 0, (0x04000400u | second << 16 | first) << shift | shift / 2);
  }
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) {
    NibbleItems::load(x, row, item);
    if constexpr (kNibblesByHalves) {
      ItemX plain;
      plain.load(row, item);
#pragma unroll
      for (u32 i = 0; i < kHalfWords; ++i) {
        const u32 *from = plain.q + (i < 9 ? 0 : 8);
        const i32 first = i < 9 ? i32(2 * i) - 1 : i32(2 * i) - 18;
        x.low[i] = pair(from, first, false);
        x.high[i] = pair(from + 4, first, true);
      }
#pragma unroll
      for (u32 h = 0; h < 4; ++h) {
        i32 sum = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) sum = dot4(0x01010101u, plain.q[4 * h + i], sum);
        x.start[h] = kDotStart - i32(kOffset) * sum;
      }
#pragma unroll
      for (u32 i = 0; i < 2; ++i) x.lower[i] = values(4 * i), x.upper[i] = values(8 + 4 * i);
      keep(x.lower[0]);
      keep(x.upper[0]);
    }
  }
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply_halves(const RowImage &image, u32 item, const X (&x)[R], float (&sum)[R], bool full) {
    u32 w[kHalfWords]; // bits above 16 are undefined
    if constexpr (Aligned) {
#pragma unroll
      for (u32 i = 0; i < kHalfWords; ++i) w[i] = image.half_word(2 * kBytes * item + 2 * i);
    } else {
      u32 words[(kHalfWords + 1) / 2];
      image.words(2 * kBytes * item, words);
#pragma unroll
      for (u32 i = 0; i < kHalfWords; ++i) w[i] = words[i / 2] >> 16 * (i % 2);
    }
    i32 dots[R][4];
#pragma unroll
    for (u32 r = 0; r < R; ++r)
#pragma unroll
      for (u32 h = 0; h < 4; ++h) dots[r][h] = x[r].start[h];
#pragma unroll
    for (u32 i = 0; i < kHalfWords; ++i) {
      const u32 v = nibble_permute(x[0].lower[0], x[0].lower[1], w[i]) +
                    nibble_permute(x[0].upper[0], x[0].upper[1], w[i] ^ 0x8888u);
      const u32 h = i < 9 ? 0 : 2;
#pragma unroll
      for (u32 r = 0; r < R; ++r) {
        dots[r][h] = dot4(v, x[r].low[i], dots[r][h]);
        dots[r][h + 1] = dot4(v, x[r].high[i], dots[r][h + 1]);
      }
    }
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      if (!Aligned && b && !full) break;
      const float ws = q::half_e8m0(u8(b ? w[8] >> 8 : w[0]));
#pragma unroll
      for (u32 r = 0; r < R; ++r)
        sum[r] = fma_f32(ws, join_halves(dots[r][2 * b], dots[r][2 * b + 1], x[r].d + 2 * b), sum[r]);
    }
  }
  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &row, u32 item, const X (&x)[R], float (&sum)[R], bool full) {
    const RowImage image = row.known<Aligned>();
    if constexpr (kNibblesByHalves && R == 1) { // as far as registers go
      multiply_halves<Aligned>(image, item, x, sum, full);
      return;
    }
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      if (!Aligned && b && !full) break;
      u32 w[5]; // three bytes of no use, e, nibbles
      image.words(2 * kBytes * item + kBytes * b - 3, w);
      add(w + 1, q::half_e8m0(u8(w[0] >> 24)), b, x, sum);
    }
  }
};

// An entry of the codebook as its eight values, or as their selectors.
template <bool Values> struct GridEntryOf {
  using Type = ByteSelectors;
};
template <> struct GridEntryOf<true> {
  using Type = u64;
};

struct IQ2_XXS {
  static constexpr u32 kElements = 256, kBytes = 66;
  static constexpr bool kAligned = true;
  static constexpr u32 kGrid = 256, kSigns = 128; // entries
  static constexpr u32 kValues = q::kIq2Values[0] | q::kIq2Values[1] << 8 | q::kIq2Values[2] << 16;
  static constexpr u32 kNegatives =
      (256u - q::kIq2Values[0]) | (256u - q::kIq2Values[1]) << 8 | (256u - q::kIq2Values[2]) << 16;
  using GridEntry = GridEntryOf<kSignsOfActivations>::Type;
  struct Tables {
    GridEntry grid[kGrid * kGridCopies];
    ByteSelectors signs[kSigns * kSignCopies];
  };
  struct X : ItemX {
    u32 negative[16]; // of q; what a kernel does not use costs it nothing
    u32 values;
  };
  // Bytes of -127 to 127.
  static APU_METHOD u32 negate(u32 v) { return ((~v & 0x7f7f7f7fu) + 0x01010101u) ^ (~v & 0x80808080u); }
  static APU_METHOD void load(X &x, const ActivationRow &row, u32 item) {
    x.ItemX::load(row, item);
#pragma unroll
    for (u32 i = 0; i < 16; ++i) x.negative[i] = negate(x.q[i]);
    x.values = kValues;
    keep(x.values);
  }

  static APU_METHOD Tables &tables() {
    APU_SHARED Tables tables;
    return tables;
  }
  // All threads of the block; a barrier follows.
  static APU_METHOD void prepare() {
    Tables &to = tables();
    for (u32 i = thread_id(); i < kGrid * kGridCopies; i += kMatvecWaves * kWaveSize) {
      if constexpr (kSignsOfActivations) {
        to.grid[i] = q::kIq2xxsGrid.v[i / kGridCopies];
      } else {
        u32 codes = q::kIq2xxs[i / kGridCopies]; // two bits each, to four
        codes = (codes | codes << 8) & 0x00ff00ffu;
        codes = (codes | codes << 4) & 0x0f0f0f0fu;
        to.grid[i] = byte_selectors((codes | codes << 2) & 0x33333333u);
      }
    }
    // A lane works out one entry of its wave's part, then all write its copies.
    constexpr u32 kPart = kSigns / kMatvecWaves, kAtOnce = kWaveSize / kSignCopies;
    static_assert(kPart <= kWaveSize && kPart % kAtOnce == 0);
    const u32 first = wave_id() * kPart, lane = lane_id();
    const u32 signs = q::even_signs((first + lane) % kSigns);
    u32 mine = kSignsOfActivations ? 0x32103210u : 0;
#pragma unroll
    for (u32 k = 0; k < 8; ++k) mine |= (signs >> k & 1) << (4 * k + 2);
    for (u32 e = lane / kSignCopies; e < kPart; e += kAtOnce)
      to.signs[(first + e) * kSignCopies + lane % kSignCopies] = byte_selectors(wave_shuffle(mine, e));
  }

  // Entry `index` of one lane's copy, index being bits [shift, shift + Bits) of v.
  template <class Entry, u32 Bits, u32 Copies> static APU_METHOD Entry entry(const Entry *table, u32 v, u32 shift) {
    constexpr u32 kScale = sizeof(Entry) * Copies; // a power of two
    constexpr u32 kMask = ((1u << Bits) - 1) * kScale;
    constexpr u32 kLog = __builtin_ctz(kScale);
    const u32 at = shift >= kLog ? v >> (shift - kLog) : v << (kLog - shift);
    const u32 copy = lane_id() % Copies * u32(sizeof(Entry));
    return *reinterpret_cast<const Entry *>(reinterpret_cast<const u8 *>(table) + ((at & kMask) | copy));
  }

  template <bool Aligned, u32 R>
  static APU_METHOD void multiply(const RowImage &row, u32 item, const X (&x)[R], float (&sum)[R], bool) {
    const RowImage image = row.known<Aligned>();
    const Tables &from = tables();
    const u32 at = kBytes * (item / 4);
    u32 w[4], head[1];
    image.words(at + 2 + 16 * (item % 4), w);
    image.words(at, head);
    const float d = half_to_float(head[0] & 0xffffu) * 0.125f;
#pragma unroll
    for (u32 b = 0; b < 2; ++b) {
      u32 v[8];
      i32 dots[2] = {kDotStart, kDotStart};
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const GridEntry grid = entry<GridEntry, 8, kGridCopies>(from.grid, w[2 * b], 8 * i);
        const ByteSelectors signs = entry<ByteSelectors, 7, kSignCopies>(from.signs, w[2 * b + 1], 7 * i);
        if constexpr (!kSignsOfActivations) {
          select_bytes(x[0].values, kNegatives, grid | signs, v[2 * i], v[2 * i + 1]);
        } else if constexpr (R == 1) {
          const u32 *q = x[0].q + 8 * b + 2 * i, *negative = x[0].negative + 8 * b + 2 * i;
          u32 low, high, unused;
          select_bytes(q[0], negative[0], signs, low, unused);
          select_bytes(q[1], negative[1], signs, unused, high);
          dots[i / 2] = dot4(u32(grid >> 32), high, dot4(u32(grid), low, dots[i / 2]));
        } else {
          u32 unused;
          select_bytes(u32(grid), negate(u32(grid)), signs, v[2 * i], unused);
          select_bytes(u32(grid >> 32), negate(u32(grid >> 32)), signs, unused, v[2 * i + 1]);
        }
      }
      const float ws = d * float(w[2 * b + 1] >> 27 | 1);
      if constexpr (kSignsOfActivations && R == 1)
        sum[0] = fma_f32(ws, join_halves(dots[0], dots[1], x[0].d + 2 * b), sum[0]);
      else
        add_block(v, ws, b, x, sum);
    }
  }
};

} // namespace apu::gpu
