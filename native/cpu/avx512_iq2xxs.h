// Two superblocks of IQ2_XXS, 132 bytes, from indices to integers and scales, all in registers.
// A grid's eight elements take three values, hence two bits each of two bytes: one has the low bits of all eight, the
// other the high bits, and the tables of both, 256 bytes each, are looked up for two superblocks at a time. With the
// signs they make four bytes of which each element's value is a linear map over GF(2); eight such bytes, of two groups
// of eight elements, are an 8x8 bit matrix, transposed by one instruction, and another one maps to values.
#pragma once

#include "avx512_common.h"

#ifdef APU_AVX512

#include "../quant/codebooks.h"

namespace apu::cpu::avx512 {
namespace {

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

struct Iq2xxsPair {
  static constexpr int kOffset = 64; // of the integers

  // Of superblock and half: lane l has blocks 2 l and 2 l + 1, byte i of each the codes of elements i (high nibble) and
  // 8 + i (low) of the half.
  __m512i codes[2][2];
  // Lane l: scales of blocks 2 l, 2 l + 1 of the first superblock, then of the second.
  __m512 ws;

  APU_INLINE Iq2xxsPair(const uint8_t *p0, const uint8_t *p1) {
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
  APU_INLINE __m256 first_scales() const { // of the first superblock, in order
    static constexpr Table<int32_t> blocks{[](int i) { return i % 8 / 2 * 4 + i % 2; }};
    return _mm512_castps512_ps256(_mm512_permutexvar_ps(blocks, ws));
  }

private:
  // What the bits of a code add, modulo 2, to the plainest of the six values: chosen, high, sign, minus.
  static constexpr int kPlusEight = kOffset + 8;
  static constexpr uint8_t kAdd[4] = {kPlusEight ^ (kOffset + 25), kPlusEight ^ (kOffset + 43),
                                      kPlusEight ^ (kOffset - 8), (kOffset - 8) ^ (kOffset - 25)};
};

} // namespace
} // namespace apu::cpu::avx512

#endif
