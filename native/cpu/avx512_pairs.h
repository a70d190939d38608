// A superblock of each of two rows in registers, of types that are bound by arithmetic: the sums of one half of all
// sixteen blocks fill a register, so that what follows them is done once for both. Sums and scales stand in lane l of
// four as blocks 2 l and 2 l + 1 of the first superblock, then of the second; unsigned values as in Order::blocks, a
// register for eight elements of each block.
#pragma once

#include "avx512_group.h"

#ifdef APU_AVX512

#include "../quant/codebooks.h"

namespace apu::cpu::avx512 {
namespace {

template <class B> struct Pair;
inline constexpr Table<int32_t> kPairRows{[](int i) { return i % 8 / 2 * 4 + i % 2 + i / 8 * 2; }}; // to one by one
template <class B> inline constexpr bool kByPairs = false; // whether few-row products go by pairs
template <> inline constexpr bool kByPairs<quant::IQ2_XXS> = true;
template <> inline constexpr bool kByPairs<quant::Q2_K> = true;

// ---- IQ2_XXS
//
// A grid's eight elements take three values, hence two bits each of two bytes: one has the low bits of all eight, the
// other the high bits, and the tables of both, 256 bytes each, are looked up for two superblocks at a time. With the
// signs they make four bytes of which each element's value is a linear map over GF(2); eight such bytes, of two groups
// of eight elements, are an 8x8 bit matrix, transposed by one instruction, and another one maps to values.

constexpr uint8_t iq2xxs_plane(uint16_t packed, int bit) { // of eight 2-bit codes
  uint32_t plane = 0;
  for (int i = 0; i < 8; i++) plane |= (static_cast<uint32_t>(packed) >> (2 * i + bit) & 1) << i;
  return static_cast<uint8_t>(plane);
}
template <int Bit, int Quarter>
inline constexpr Table<uint8_t> kIq2xxsPlane{[](int i) { return iq2xxs_plane(quant::kIq2xxs[64 * Quarter + i], Bit); }};

template <int Bit> APU_INLINE __m512i look_up_plane(__m512i index, __mmask64 upper) {
  const __m512i low = _mm512_permutex2var_epi8(kIq2xxsPlane<Bit, 0>, index, kIq2xxsPlane<Bit, 1>);
  const __m512i high = _mm512_permutex2var_epi8(kIq2xxsPlane<Bit, 2>, index, kIq2xxsPlane<Bit, 3>);
  return _mm512_mask_mov_epi8(low, upper, high);
}

template <> struct Pair<quant::IQ2_XXS> {
  static constexpr int kOffset = 64; // of the integers

  // Of superblock and half: lane l has blocks 2 l and 2 l + 1, byte i of each the codes of elements i (high nibble) and
  // 8 + i (low) of the half.
  __m512i codes[2][2];
  // Lane l: scales of blocks 2 l, 2 l + 1 of the first superblock, then of the second.
  __m512 ws;

  APU_INLINE Pair(const uint8_t *p0, const uint8_t *p1) {
    const __m512i a = loaded(load512(p0 + 2)), b = loaded(load512(p1 + 2));
    // Byte 8 s + 4 h + 2 i + e of lane l: eight e of half h of block 2 l + i of superblock s.
    static constexpr Table<uint16_t> indices{
        [](int i) { return 32 * (i / 4 % 2) + 4 * (i / 8 * 2 + i % 2) + i / 2 % 2; }};
    static constexpr Table<uint32_t> rest{[](int i) { return 16 * (i / 2 % 2) + 2 * (i / 4 * 2 + i % 2) + 1; }};
    static constexpr Table<uint8_t> sevens{[](int i) { return i / 2 % 2 * 32 + (i / 4 % 2 * 2 + i % 2) * 7; }};
    const __m512i index = _mm512_permutex2var_epi16(a, indices, b);
    const __m512i words = _mm512_permutex2var_epi32(a, rest, b);
    const __mmask64 upper = _mm512_movepi8_mask(index);
    const __m512i low = look_up_plane<0>(index, upper), high = look_up_plane<1>(index, upper);
    const __m512i parity = _mm512_set1_epi64(0x010204081020407f); // keeps seven bits, the eighth is their sum
    const __m512i sign = _mm512_gf2p8affine_epi64_epi8(_mm512_multishift_epi64_epi8(sevens, words), parity, 0);
    const __m512i chosen = _mm512_ternarylogic_epi64(sign, high, low, 0xca); // sign ? high : low
    const __m512i minus = _mm512_ternarylogic_epi64(sign, high, low, 0xe0);  // sign and (high or low)

    const __m512i transpose = _mm512_set1_epi64(static_cast<int64_t>(0x8040201008040201));
    const __m512i x[2] = {_mm512_unpacklo_epi8(chosen, high), _mm512_unpackhi_epi8(chosen, high)};
    const __m512i y[2] = {_mm512_unpacklo_epi8(sign, minus), _mm512_unpackhi_epi8(sign, minus)};
    for (int s = 0; s < 2; s++) {
      codes[s][0] = _mm512_gf2p8affine_epi64_epi8(transpose, _mm512_unpacklo_epi16(x[s], y[s]), 0);
      codes[s][1] = _mm512_gf2p8affine_epi64_epi8(transpose, _mm512_unpackhi_epi16(x[s], y[s]), 0);
    }

    static constexpr Table<float> scales{[](int i) { return (2 * i + 1) * 0.125f; }};
    uint16_t d0, d1;
    memcpy(&d0, p0, 2);
    memcpy(&d1, p1, 2);
    const __m256i first = _mm256_set1_epi16(static_cast<int16_t>(d0));
    const __m512 d = _mm512_cvtph_ps(_mm256_mask_set1_epi16(first, 0xcccc, static_cast<int16_t>(d1)));
    ws = _mm512_mul_ps(_mm512_permutexvar_ps(_mm512_srli_epi32(words, 28), _mm512_load_ps(scales.v)), d);
  }

  APU_INLINE __m512i value(int s, int h, int last) const {
    return last ? values<1>(codes[s][h]) : values<0>(codes[s][h]);
  }
  // Four products a dword of both superblocks to those of the blocks.
  APU_INLINE __m512i sum(const __m512i (&v)[2], int) const { return add_even_odd(v[0], v[1]); }
  APU_INLINE __m256 first_scales() const { // of the first superblock, in order
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(kPairRows, ws));
  }

private:
  // Elements 0..7 (Last = 0) or 8..15 of the half, 64 added. Affine maps and byte permutes have ports of their own.
  template <int Last> static APU_INLINE __m512i values(__m512i half) {
    static constexpr Table<uint64_t> map{[](int) {
      uint64_t m = 0;
      for (int bit = 0; bit < 8; bit++)
        for (int row = 0; row < 4; row++) m |= (kAdd[row] >> bit & 1ull) << (7 - row) << 8 * (7 - bit);
      return m;
    }};
    static constexpr Table<uint8_t> table{[](int i) { // a permute ignores what is above the index
      uint8_t v = kPlusEight;
      for (int row = 0; row < 4; row++) v ^= i >> (3 - row) & 1 ? kAdd[row] : 0;
      return v;
    }};
    return Last ? _mm512_permutexvar_epi8(half, table) : _mm512_gf2p8affine_epi64_epi8(half, map, kPlusEight);
  }
  // What the bits of a code add, modulo 2, to the plainest of the six values: chosen, high, sign, minus.
  static constexpr int kPlusEight = kOffset + 8;
  static constexpr uint8_t kAdd[4] = {kPlusEight ^ (kOffset + 25), kPlusEight ^ (kOffset + 43),
                                      kPlusEight ^ (kOffset - 8), (kOffset - 8) ^ (kOffset - 25)};
};

// ---- Q2_K

template <> struct Pair<quant::Q2_K> {
  static constexpr int kOffset = 0;

  __m512i bits[2];
  __m512i scales[2];  // of a half, int16 twice
  __m512 minimums[2]; // of a half
  __m512 ws, wm;      // wm is subtracted

  APU_INLINE Pair(const uint8_t *p0, const uint8_t *p1) {
    bits[0] = load512(p0 + 16);
    bits[1] = load512(p1 + 16);
    // Byte 2 of a block's dword too, so that a shift makes minimums of it.
    static constexpr Table<uint8_t> halves[2] = {
        Table<uint8_t>{[](int i) { return 16 * (i / 8 % 2) + 2 * (i / 16 * 2 + i / 4 % 2); }},
        Table<uint8_t>{[](int i) { return 16 * (i / 8 % 2) + 2 * (i / 16 * 2 + i / 4 % 2) + 1; }}};
    const __m512i both =
        _mm512_castsi256_si512(_mm256_inserti128_si256(_mm256_castsi128_si256(load128(p0)), load128(p1), 1));
    for (int h = 0; h < 2; h++) {
      const __m512i bytes = _mm512_maskz_permutexvar_epi8(0x5555555555555555, halves[h], both);
      scales[h] = _mm512_and_si512(bytes, _mm512_set1_epi16(15));
      minimums[h] = _mm512_cvtepi32_ps(_mm512_srli_epi32(bytes, 20));
    }
    int32_t d0, d1;
    memcpy(&d0, p0 + 80, 4);
    memcpy(&d1, p1 + 80, 4);
    const __m512 d = _mm512_castps128_ps512(_mm_cvtph_ps(_mm_insert_epi32(_mm_cvtsi32_si128(d0), d1, 1)));
    static constexpr Table<int32_t> order{[](int i) { return i / 2 % 2 * 2; }};
    static constexpr Table<int32_t> order_min{[](int i) { return i / 2 % 2 * 2 + 1; }};
    ws = _mm512_permutexvar_ps(order, d);
    wm = _mm512_permutexvar_ps(order_min, d);
  }

  APU_INLINE __m512i value(int s, int h, int last) const {
    static constexpr Table<uint64_t> twos{
        [](int n) { return bit_move(2 * (n % 4), 0) | bit_move(2 * (n % 4) + 1, 1); }};
    __m512i eights;
    switch (2 * h + last) { // of both 256-bit parts, four times
    case 0: eights = _mm512_permutex_epi64(bits[s], 0x00); break;
    case 1: eights = _mm512_permutex_epi64(bits[s], 0x55); break;
    case 2: eights = _mm512_permutex_epi64(bits[s], 0xaa); break;
    default: eights = _mm512_permutex_epi64(bits[s], 0xff); break;
    }
    return _mm512_gf2p8affine_epi64_epi8(eights, twos, 0);
  }
  APU_INLINE __m512i sum(const __m512i (&v)[2], int h) const { // 8 * 3 * 127 < 2^15
    return _mm512_madd_epi16(_mm512_packs_epi32(v[0], v[1]), scales[h]);
  }
};

} // namespace
} // namespace apu::cpu::avx512

#endif
