// The quantised GGUF types as the AVX2 levels see them: one trait per type that loads a group of eight 32-blocks (a
// superblock of the K types) to the registers of avx2_sums.h, and adds its product with one row of activations to eight
// float lanes, lane b being block b of the group. Types that few files use are in avx2_codebooks.h.
// In an unnamed namespace: nothing here may be shared with files compiled without these flags.
#pragma once

#include "../include/apu.h"
#include "../quant/codebooks.h"
#include "avx2_sums.h"

namespace apu::cpu {
namespace {

// Where a group lies: blocks 0..3 from `low` on as far as low_count exist, blocks 4..7 from `high` on. These may belong
// to another row: where rows end in at most four blocks (K = 576, 640), the ends of two rows make one group.
// Superblocks are always whole, from `low` on.
struct Place {
  const uint8_t *low, *high;
  uint32_t low_count, high_count;

  APU_INLINE bool second_quad() const { return low_count > 2 || high_count > 2; }
};

struct Pair { // blocks i and i + 4: elements 0..15 of both, and 16..31
  __m256i first, second;
};

// Of pairs 2 j and 2 j + 1.
APU_INLINE Quad quad_of(Pair a, Pair b) {
  return {{{_mm256_unpacklo_epi64(a.first, b.first), _mm256_unpackhi_epi64(a.first, b.first)},
           {_mm256_unpacklo_epi64(a.second, b.second), _mm256_unpackhi_epi64(a.second, b.second)}}};
}

APU_INLINE __m128i load16(const uint8_t *p) {
  return _mm_loadu_si128(reinterpret_cast<const __m128i *>(p));
}

APU_INLINE uint32_t load_u32(const uint8_t *p) {
  uint32_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

APU_INLINE uint16_t load_u16(const uint8_t *p) {
  uint16_t v;
  std::memcpy(&v, p, sizeof v);
  return v;
}

APU_INLINE __m256 broadcast_f16(const uint8_t *p) {
  return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(load_u16(p))));
}

// Sixteen bytes each at p and `distance` on.
APU_INLINE __m256i load_pair(const uint8_t *p, size_t distance) {
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(p)), load16(p + distance), 1);
}

// Sixteen bytes from `at` on of blocks i and i + 4, as far as they exist.
template <uint32_t kBlockBytes> APU_INLINE __m256i load_pair(const Place &p, uint32_t i, uint32_t at) {
  const uint8_t *low = p.low + i * kBlockBytes + at, *high = p.high + i * kBlockBytes + at;
  if (i >= p.low_count && i >= p.high_count) return _mm256_setzero_si256();
  const __m128i first = i < p.low_count ? load16(low) : _mm_setzero_si128();
  if (i >= p.high_count) return _mm256_zextsi128_si256(first);
  return _mm256_inserti128_si256(_mm256_castsi128_si256(first), load16(high), 1);
}

// What avx2_gemm.cpp asks of a type; kBias as in dot_narrow.
struct FormatDefaults {
  static constexpr bool kSigned = false, kMinimum = false, kHalfScales = false, kHalfMinima = false;
  static constexpr bool kSuperblock = false; // a row is whole groups
  static constexpr int kBias = 0;
};

// ---- 32-element blocks

template <uint32_t kBytes> struct BlockFormat : FormatDefaults {
  static constexpr uint32_t kBlockBytes = kBytes, kGroupBytes = kGroup * kBytes;
};

// Where `count` blocks of a group lie one after the other.
template <class Format> APU_INLINE Place place(const uint8_t *p, uint32_t count = kGroup) {
  if constexpr (Format::kSuperblock) return {p, p, 4, 4};
  return {p, p + 4 * (Format::kGroupBytes / kGroup), count < 4 ? count : 4, count < 4 ? 0 : count - 4};
}

// The first and the second 16 bits of each block, in block order.
struct Headers {
  __m128i first, second;
};

template <uint32_t kBlockBytes> APU_INLINE Headers gather_headers(const Place &p) {
  const auto four = [=](const uint8_t *from, uint32_t count) __attribute__((always_inline)) {
    const auto block = [=](uint32_t b) __attribute__((always_inline)) {
      return b < count ? load16(from + b * kBlockBytes) : _mm_setzero_si128();
    };
    return _mm_unpacklo_epi32(_mm_unpacklo_epi16(block(0), block(1)), _mm_unpacklo_epi16(block(2), block(3)));
  };
  const __m128i low = four(p.low, p.low_count), high = four(p.high, p.high_count);
  return {_mm_unpacklo_epi64(low, high), _mm_unpackhi_epi64(low, high)};
}

APU_INLINE __m256i low_nibbles(__m256i v) {
  return _mm256_and_si256(v, _mm256_set1_epi8(15));
}
APU_INLINE __m256i high_nibbles(__m256i v) {
  return _mm256_and_si256(_mm256_srli_epi16(v, 4), _mm256_set1_epi8(15));
}

// Byte kByte of both 64-bit parts of each 128-bit lane to eight bytes that are 16 where the bit is set.
template <int kByte> APU_INLINE __m256i fifth_bits(__m256i v) {
  const long long low = 0x0101010101010101 * kByte, high = low + 0x0808080808080808;
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  const __m256i bytes = _mm256_shuffle_epi8(v, _mm256_setr_epi64x(low, high, low, high));
  const __m256i set = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), bit);
  return _mm256_and_si256(set, _mm256_set1_epi8(16));
}

// Types with nibbles at kValues of a block and, when kWidth is 5, the fifth bits in the four bytes before.
template <uint32_t kBlockBytes, uint32_t kValues, int kWidth = 4>
APU_INLINE Quad nibble_quad(const Place &p, uint32_t j) {
  const __m256i a = load_pair<kBlockBytes>(p, 2 * j, kValues), b = load_pair<kBlockBytes>(p, 2 * j + 1, kValues);
  const __m256i low = _mm256_unpacklo_epi64(a, b), high = _mm256_unpackhi_epi64(a, b);
  Quad quad{{{low_nibbles(low), low_nibbles(high)}, {high_nibbles(low), high_nibbles(high)}}};
  if constexpr (kWidth == 5) {
    const __m256i bits = _mm256_unpacklo_epi64(load_pair<kBlockBytes>(p, 2 * j, kValues - 4),
                                               load_pair<kBlockBytes>(p, 2 * j + 1, kValues - 4));
    quad.half[0][0] = _mm256_or_si256(quad.half[0][0], fifth_bits<0>(bits));
    quad.half[0][1] = _mm256_or_si256(quad.half[0][1], fifth_bits<1>(bits));
    quad.half[1][0] = _mm256_or_si256(quad.half[1][0], fifth_bits<2>(bits));
    quad.half[1][1] = _mm256_or_si256(quad.half[1][1], fifth_bits<3>(bits));
  }
  return quad;
}

template <uint32_t kBytes, uint32_t kValues, int kWidth> struct SymmetricNibbles : BlockFormat<kBytes> { // Q4_0, Q5_0
  static constexpr int kBias = kWidth - 1;
  __m256 d;

  APU_INLINE explicit SymmetricNibbles(const Place &p) : d(_mm256_cvtph_ps(gather_headers<kBytes>(p).first)) {}
  static APU_INLINE Quad quad(const Place &p, uint32_t j) { return nibble_quad<kBytes, kValues, kWidth>(p, j); }

  template <class Weights> APU_INLINE __m256 add(const Weights &w, const ActGroup &a, __m256 acc) const {
    return fma_block(dot_narrow<kBias>(w, a), d, a.d, acc);
  }
};

template <uint32_t kBytes, uint32_t kValues, int kWidth> struct OffsetNibbles : BlockFormat<kBytes> { // Q4_1, Q5_1
  static constexpr bool kMinimum = true;
  __m256 d, m;

  APU_INLINE explicit OffsetNibbles(const Place &p) {
    const Headers headers = gather_headers<kBytes>(p);
    d = _mm256_cvtph_ps(headers.first);
    m = _mm256_cvtph_ps(headers.second);
  }
  static APU_INLINE Quad quad(const Place &p, uint32_t j) { return nibble_quad<kBytes, kValues, kWidth>(p, j); }

  APU_INLINE __m256 minimum() const { return m; }

  template <class Weights> APU_INLINE __m256 add(const Weights &w, const ActGroup &a, __m256 acc) const {
    acc = fma_block(dot_narrow<0>(w, a), d, a.d, acc);
    return _mm256_fmadd_ps(m, _mm256_loadu_ps(a.s), acc);
  }
};

struct SignedBytes : BlockFormat<34> { // Q8_0
  static constexpr bool kSigned = true;
  __m256 d;

  APU_INLINE explicit SignedBytes(const Place &p) : d(_mm256_cvtph_ps(gather_headers<34>(p).first)) {}

  static APU_INLINE Pair pair(const Place &p, uint32_t i) {
    return {signed_weights(load_pair<34>(p, i, 2)), signed_weights(load_pair<34>(p, i, 18))};
  }
  static APU_INLINE Quad quad(const Place &p, uint32_t j) { return quad_of(pair(p, 2 * j), pair(p, 2 * j + 1)); }

  template <class Weights> APU_INLINE __m256 add(const Weights &w, const ActGroup &a, __m256 acc) const {
    return fma_block(dot_signed<false>(w, a), d, a.d, acc);
  }
};

// ---- tables of sixteen values

struct Bytes16 {
  alignas(16) uint8_t v[16];
};

// Nibbles to the values of a table plus kAdd.
template <const int8_t (&kValues)[16], int kAdd> APU_INLINE Quad look_up(Quad quad) {
  static constexpr Bytes16 kTable = [] {
    Bytes16 t{};
    for (uint32_t i = 0; i < 16; ++i) t.v[i] = static_cast<uint8_t>(kValues[i] + kAdd);
    return t;
  }();
  const __m256i table = _mm256_broadcastsi128_si256(load16(kTable.v));
#pragma GCC unroll 4
  for (uint32_t i = 0; i < 4; ++i) quad.half[i / 2][i % 2] = _mm256_shuffle_epi8(table, quad.half[i / 2][i % 2]);
  return quad;
}

constexpr int kTableBias = kVnni ? 128 : 0; // of signed_weights

struct TableNibbles : BlockFormat<18> { // IQ4_NL
  static constexpr bool kSigned = true;
  __m256 d;

  APU_INLINE explicit TableNibbles(const Place &p) : d(_mm256_cvtph_ps(gather_headers<18>(p).first)) {}
  static APU_INLINE Quad quad(const Place &p, uint32_t j) {
    return look_up<quant::kIq4Values, kTableBias>(nibble_quad<18, 2>(p, j));
  }

  template <class Weights> APU_INLINE __m256 add(const Weights &w, const ActGroup &a, __m256 acc) const {
    return fma_block(dot_signed<false>(w, a), d, a.d, acc);
  }
};

struct FloatNibbles : BlockFormat<17> { // MXFP4
  static constexpr int kBias = 4;
  __m256 d;

  APU_INLINE explicit FloatNibbles(const Place &p) { // 2^(e - 128); the first two are denormal
    const __m256i e = gather_exponents(p), one = _mm256_set1_epi32(1);
    const __m256i normal = _mm256_slli_epi32(_mm256_sub_epi32(e, one), 23);
    const __m256i denormal = _mm256_sllv_epi32(_mm256_set1_epi32(0x200000), _mm256_min_epi32(e, one));
    d = _mm256_castsi256_ps(_mm256_max_epi32(normal, denormal));
  }
  static APU_INLINE Quad quad(const Place &p, uint32_t j) {
    return look_up<quant::kE2m1Values, 1 << kBias>(nibble_quad<17, 1>(p, j));
  }

  template <class Weights> APU_INLINE __m256 add(const Weights &w, const ActGroup &a, __m256 acc) const {
    return fma_block(dot_narrow<kBias>(w, a), d, a.d, acc);
  }

private:
  static APU_INLINE __m256i gather_exponents(const Place &p) {
    const auto four = [](const uint8_t *from, uint32_t count) __attribute__((always_inline)) {
      const auto block = [=](uint32_t b) __attribute__((always_inline)) {
        return b < count ? load16(from + b * kBlockBytes) : _mm_setzero_si128();
      };
      return _mm_unpacklo_epi16(_mm_unpacklo_epi8(block(0), block(1)), _mm_unpacklo_epi8(block(2), block(3)));
    };
    return _mm256_cvtepu8_epi32(_mm_unpacklo_epi32(four(p.low, p.low_count), four(p.high, p.high_count)));
  }
};

// ---- superblocks of eight 32-blocks

APU_INLINE __m256 negative(__m256 v) {
  return _mm256_xor_ps(v, _mm256_set1_ps(-0.0f));
}

struct TwoScales {
  __m256 first, second;
};
APU_INLINE TwoScales broadcast_two_f16(const uint8_t *p) {
  const __m256 both = _mm256_cvtph_ps(_mm_set1_epi32(static_cast<int32_t>(load_u32(p))));
  return {_mm256_moveldup_ps(both), _mm256_movehdup_ps(both)};
}

// Bits 0..3 of byte i are element i of blocks 0..3 of the low 128 bits, bits 4..7 of the high.
APU_INLINE __m256i block_bits(const uint8_t *p) {
  return _mm256_srlv_epi64(_mm256_broadcastsi128_si256(load16(p)), _mm256_setr_epi64x(0, 0, 4, 4));
}

template <int kWidth> struct ScaledNibbles : FormatDefaults { // Q4_K, Q5_K: 6-bit scale and minimum a block, packed
  static constexpr bool kMinimum = true, kSuperblock = true;
  static constexpr uint32_t kGroupBytes = kWidth == 5 ? 176 : 144;
  __m256 d, m;

  APU_INLINE explicit ScaledNibbles(const Place &place) {
    const uint8_t *p = place.low;
    const uint32_t x0 = load_u32(p + 4), x1 = load_u32(p + 8), x2 = load_u32(p + 12);
    const uint32_t low6 = 0x3f3f3f3f, low4 = 0x0f0f0f0f, top2 = 0x30303030;
    const uint64_t scales = (x0 & low6) | static_cast<uint64_t>((x2 & low4) | (x0 >> 2 & top2)) << 32;
    const uint64_t minima = (x1 & low6) | static_cast<uint64_t>((x2 >> 4 & low4) | (x1 >> 2 & top2)) << 32;
    const TwoScales both = broadcast_two_f16(p);
    d = _mm256_mul_ps(both.first, widen(scales));
    m = _mm256_mul_ps(both.second, widen(minima));
  }

  APU_INLINE __m256 minimum() const { return negative(m); }

  static APU_INLINE __m256 widen(uint64_t bytes) {
    return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(bytes))));
  }

  static APU_INLINE __m256i half(const uint8_t *p, uint32_t i, uint32_t offset) {
    const uint8_t *values = p + (kWidth == 5 ? 48 : 16) + offset; // 32 bytes are blocks 2 j, low nibbles, and 2 j + 1
    const __m256i bytes = load_pair(values + 32 * (i / 2), 64);
    const __m256i v = i % 2 ? high_nibbles(bytes) : low_nibbles(bytes);
    if constexpr (kWidth == 4) return v;
    const __m256i bit = _mm256_slli_epi16(block_bits(p + 16 + offset), static_cast<int>(4 - i));
    return _mm256_or_si256(v, _mm256_and_si256(bit, _mm256_set1_epi8(16)));
  }

  static APU_INLINE Pair pair(const uint8_t *p, uint32_t i) { return {half(p, i, 0), half(p, i, 16)}; }
  static APU_INLINE Quad quad(const Place &place, uint32_t j) {
    return quad_of(pair(place.low, 2 * j), pair(place.low, 2 * j + 1));
  }

  template <class Weights> APU_INLINE __m256 add(const Weights &w, const ActGroup &a, __m256 acc) const {
    acc = fma_block(dot_narrow<0>(w, a), d, a.d, acc);
    return _mm256_fnmadd_ps(m, _mm256_loadu_ps(a.s), acc);
  }
};

// (8, 2) int16, of both halves of each block, to a register for each half, every value twice.
APU_INLINE Halves split_halves(__m256i v) {
  const long long first = 0x0504050401000100, next = first + 0x0808080808080808, second = 0x0202020202020202;
  return {_mm256_shuffle_epi8(v, _mm256_setr_epi64x(first, next, first, next)),
          _mm256_shuffle_epi8(v, _mm256_setr_epi64x(first + second, next + second, first + second, next + second))};
}

// Types with a scale per 16 elements and no minimum; stored values are 2^kBias too large.
template <int kWidth> struct ScaledHalves : FormatDefaults {
  static constexpr bool kHalfScales = true, kSuperblock = true;
  static constexpr int kBias = kWidth - 1;
  __m256i scales; // (8, 2) int16
  __m256 d;

  APU_INLINE ScaledHalves(__m128i integer, const uint8_t *scale)
      : scales(_mm256_cvtepi8_epi16(integer)), d(broadcast_f16(scale)) {}

  template <class Weights> APU_INLINE __m256 add(const Weights &w, const ActGroup &a, __m256 acc) const {
    return fma_block(dot_narrow<kBias>(w, a, split_halves(scales)), d, a.d, acc);
  }
};

struct SixBits : ScaledHalves<6> { // Q6_K
  static constexpr uint32_t kGroupBytes = 210;

  APU_INLINE explicit SixBits(const Place &place) : ScaledHalves(load16(place.low + 192), place.low + 208) {}

  static APU_INLINE __m256i half(const uint8_t *p, uint32_t i, uint32_t offset) {
    const __m256i bytes = load_pair(p + 32 * (i % 2) + offset, 64), high = load_pair(p + 128 + offset, 32);
    const __m256i low4 = i < 2 ? low_nibbles(bytes) : high_nibbles(bytes);
    const __m256i moved = i == 3 ? _mm256_srli_epi16(high, 2) : i == 2 ? high : _mm256_slli_epi16(high, i == 0 ? 4 : 2);
    return _mm256_or_si256(low4, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
  }

  static APU_INLINE Pair pair(const uint8_t *p, uint32_t i) { return {half(p, i, 0), half(p, i, 16)}; }
  static APU_INLINE Quad quad(const Place &place, uint32_t j) {
    return quad_of(pair(place.low, 2 * j), pair(place.low, 2 * j + 1));
  }
};

APU_INLINE __m256i two_bits(const uint8_t *p, uint32_t i) {
  return _mm256_and_si256(_mm256_srli_epi16(load_pair(p, 32), static_cast<int>(2 * i)), _mm256_set1_epi8(3));
}

struct ThreeBits : ScaledHalves<3> { // Q3_K
  static constexpr uint32_t kGroupBytes = 110;

  APU_INLINE explicit ThreeBits(const Place &place) : ScaledHalves(unpack_scales(place.low + 96), place.low + 108) {}

  static APU_INLINE __m128i unpack_scales(const uint8_t *p) {
    const uint32_t x0 = load_u32(p), x1 = load_u32(p + 4), x2 = load_u32(p + 8);
    const uint32_t low4 = 0x0f0f0f0f, top2 = 0x30303030;
    const __m128i biased = _mm_setr_epi32(
        static_cast<int>((x0 & low4) | (x2 << 4 & top2)), static_cast<int>((x1 & low4) | (x2 << 2 & top2)),
        static_cast<int>((x0 >> 4 & low4) | (x2 & top2)), static_cast<int>((x1 >> 4 & low4) | (x2 >> 2 & top2)));
    return _mm_sub_epi8(biased, _mm_set1_epi8(32));
  }

  static APU_INLINE __m256i half(const uint8_t *p, uint32_t i, uint32_t offset) {
    const __m256i bits = block_bits(p + offset);
    const __m256i moved =
        i < 2 ? _mm256_slli_epi16(bits, static_cast<int>(2 - i)) : _mm256_srli_epi16(bits, static_cast<int>(i - 2));
    return _mm256_or_si256(two_bits(p + 32 + offset, i), _mm256_and_si256(moved, _mm256_set1_epi8(4)));
  }

  static APU_INLINE Pair pair(const uint8_t *p, uint32_t i) { return {half(p, i, 0), half(p, i, 16)}; }
  static APU_INLINE Quad quad(const Place &place, uint32_t j) {
    return quad_of(pair(place.low, 2 * j), pair(place.low, 2 * j + 1));
  }
};

APU_INLINE Halves widen_halves(__m256i v) { // (8, 2) values below 2^15 as int32, a register for each half
  return {_mm256_and_si256(v, _mm256_set1_epi32(0xffff)), _mm256_srli_epi32(v, 16)};
}

struct TwoBits : FormatDefaults { // Q2_K: 4-bit scale and minimum per 16 elements
  static constexpr bool kHalfScales = true, kHalfMinima = true, kSuperblock = true;
  static constexpr uint32_t kGroupBytes = 84;
  __m256i scales, minima; // (8, 2) int16
  __m256 d, m;

  APU_INLINE explicit TwoBits(const Place &place) {
    const uint8_t *p = place.low;
    const __m128i packed = load16(p), low4 = _mm_set1_epi8(15);
    scales = _mm256_cvtepi8_epi16(_mm_and_si128(packed, low4));
    minima = _mm256_cvtepi8_epi16(_mm_and_si128(_mm_srli_epi16(packed, 4), low4));
    const TwoScales both = broadcast_two_f16(p + 80);
    d = both.first;
    m = both.second;
  }

  APU_INLINE __m256 minimum() const { return negative(m); }

  static APU_INLINE Pair pair(const uint8_t *p, uint32_t i) { return {two_bits(p + 16, i), two_bits(p + 32, i)}; }
  static APU_INLINE Quad quad(const Place &place, uint32_t j) {
    return quad_of(pair(place.low, 2 * j), pair(place.low, 2 * j + 1));
  }

  template <class Weights> APU_INLINE __m256 add(const Weights &w, const ActGroup &a, __m256 acc) const {
    acc = fma_block(dot_narrow<0>(w, a, split_halves(scales)), d, a.d, acc);
    return _mm256_fnmadd_ps(m, weigh(widen_halves(minima), a.s16), acc);
  }
};

struct TableSuperblock : FormatDefaults { // IQ4_XS: 6-bit scale a block
  static constexpr bool kSigned = true, kSuperblock = true;
  static constexpr uint32_t kGroupBytes = 136;
  __m256 d;

  APU_INLINE explicit TableSuperblock(const Place &place) {
    const uint8_t *p = place.low;
    const __m256i order = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    const __m256i high2 = _mm256_srlv_epi32(_mm256_set1_epi32(load_u16(p + 2)), _mm256_slli_epi32(order, 1));
    const __m256i low4 =
        _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int32_t>(load_u32(p + 4))), _mm256_slli_epi32(order, 2));
    const __m256i scale = _mm256_or_si256(_mm256_and_si256(low4, _mm256_set1_epi32(15)),
                                          _mm256_and_si256(_mm256_slli_epi32(high2, 4), _mm256_set1_epi32(0x30)));
    d = _mm256_mul_ps(broadcast_f16(p), _mm256_cvtepi32_ps(_mm256_sub_epi32(scale, _mm256_set1_epi32(32))));
  }
  static APU_INLINE Quad quad(const Place &p, uint32_t j) {
    return look_up<quant::kIq4Values, kTableBias>(nibble_quad<16, 0>({p.low + 8, p.low + 8 + 64, 4, 4}, j));
  }

  template <class Weights> APU_INLINE __m256 add(const Weights &w, const ActGroup &a, __m256 acc) const {
    return fma_block(dot_signed<false>(w, a), d, a.d, acc);
  }
};

// ---- groups

// A group taken apart once for several rows of activations.
template <class Format> struct Group {
  Format format;
  Quad quads[2];
  bool has_second;

  APU_INLINE explicit Group(const Place &p)
      : format(p), quads{Format::quad(p, 0), Format::quad(p, 1)}, has_second(p.second_quad()) {}
  APU_INLINE const Quad &operator()(uint32_t j) const { return quads[j]; }
  APU_INLINE bool second() const { return has_second; }
  APU_INLINE __m256 add(const ActGroup &a, __m256 acc) const { return format.add(*this, a, acc); }
};

// The same for one row, weights unpacked as they are needed: registers suffice.
template <class Format> struct Lazy {
  Place place;

  APU_INLINE Quad operator()(uint32_t j) const { return Format::quad(place, j); }
  APU_INLINE bool second() const { return place.second_quad(); }
};
template <class Format> APU_INLINE __m256 add_group(const Place &p, const ActGroup &a, __m256 acc) {
  return Format(p).add(Lazy<Format>{p}, a, acc);
}

// Calls use.template operator()<Format>() for a quantised dtype.
template <class Use> APU_INLINE void with_format(uint32_t dtype, const Use &use) {
  switch (dtype) {
  case APU_Q4_0: return use.template operator()<SymmetricNibbles<18, 2, 4>>();
  case APU_Q4_1: return use.template operator()<OffsetNibbles<20, 4, 4>>();
  case APU_Q5_0: return use.template operator()<SymmetricNibbles<22, 6, 5>>();
  case APU_Q5_1: return use.template operator()<OffsetNibbles<24, 8, 5>>();
  case APU_Q8_0: return use.template operator()<SignedBytes>();
  case APU_Q2_K: return use.template operator()<TwoBits>();
  case APU_Q3_K: return use.template operator()<ThreeBits>();
  case APU_Q4_K: return use.template operator()<ScaledNibbles<4>>();
  case APU_Q5_K: return use.template operator()<ScaledNibbles<5>>();
  case APU_Q6_K: return use.template operator()<SixBits>();
  case APU_IQ4_NL: return use.template operator()<TableNibbles>();
  case APU_IQ4_XS: return use.template operator()<TableSuperblock>();
  case APU_MXFP4: return use.template operator()<FloatNibbles>();
  default: return;
  }
}

APU_INLINE bool has_format(uint32_t dtype) {
  bool found = false;
  with_format(dtype, [&]<class Format>() { found = true; });
  return found;
}

} // namespace
} // namespace apu::cpu
