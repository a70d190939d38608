// The quantised GGUF types as AVX2 sees them: one trait per type that loads a group of eight 32-blocks (a superblock of
// the K types) as eight registers of bytes and adds its product with one row of activations to eight float lanes, lane
// b being block b of the group, as kernels.h asks. Bytes are unsigned with a bias (maddubs wants one unsigned side), so
// small that 16-bit sums stay exact; only Q8_0 is signed and moves the signs to the activations. The bias is taken off
// the integer sum, never off the float. In an unnamed namespace: nothing here may be shared with files compiled without
// these flags.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../include/apu.h"
#include "kernels.h"

#define APU_INLINE inline __attribute__((always_inline))

namespace apu::cpu {
namespace {

constexpr uint32_t kGroup = 8; // blocks

// One row of activations from block b on, and its half-block sums as int16 pairs.
struct ActGroup {
  const int8_t *q;
  const float *d, *s;
  const int16_t *sums;
};

APU_INLINE __m256i load32(const void *p) {
  return _mm256_loadu_si256(static_cast<const __m256i *>(p));
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
  return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(load_u16(p))));
}

APU_INLINE float sum8(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

// ---- eight sums of 32 products, one a lane

// Sums the 4 and 4 int16 that two blocks have in each 128-bit lane: (a a, b b) as pairs still to be added.
APU_INLINE __m256i fold_pair(__m256i a, __m256i b) {
  return _mm256_add_epi16(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
}

APU_INLINE __m256i fold_halves(__m256i abcd, __m256i efgh) { // (a b c d) in both 128-bit lanes, to (a .. h)
  return _mm256_add_epi32(_mm256_permute2x128_si256(abcd, efgh, 0x20), _mm256_permute2x128_si256(abcd, efgh, 0x31));
}

// Weights at most 31: eight products of 31 * 127 fit int16.
APU_INLINE __m256i dot_narrow(const __m256i *w, const int8_t *q) {
  __m256i pair[4], four[2];
#pragma GCC unroll 4
  for (uint32_t i = 0; i < 4; ++i)
    pair[i] = fold_pair(_mm256_maddubs_epi16(w[2 * i], load32(q + 64 * i)),
                        _mm256_maddubs_epi16(w[2 * i + 1], load32(q + 64 * i + 32)));
#pragma GCC unroll 2
  for (uint32_t i = 0; i < 2; ++i) {
    const __m256 a = _mm256_castsi256_ps(pair[2 * i]), b = _mm256_castsi256_ps(pair[2 * i + 1]);
    const __m256i even = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0x88));
    const __m256i odd = _mm256_castps_si256(_mm256_shuffle_ps(a, b, 0xdd));
    four[i] = _mm256_madd_epi16(_mm256_add_epi16(even, odd), _mm256_set1_epi16(1));
  }
  return fold_halves(four[0], four[1]);
}

// Signed bytes: |w| <= 128 and |q| <= 127 keep maddubs' pair at 32512, below saturation.
APU_INLINE __m256i dot_signed(const __m256i *w, const int8_t *q) {
  __m256i one[8];
#pragma GCC unroll 8
  for (uint32_t i = 0; i < 8; ++i) {
    const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w[i]), _mm256_sign_epi8(load32(q + 32 * i), w[i]));
    one[i] = _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
  }
  const __m256i abcd = _mm256_hadd_epi32(_mm256_hadd_epi32(one[0], one[1]), _mm256_hadd_epi32(one[2], one[3]));
  const __m256i efgh = _mm256_hadd_epi32(_mm256_hadd_epi32(one[4], one[5]), _mm256_hadd_epi32(one[6], one[7]));
  return fold_halves(abcd, efgh);
}

// Weights at most 63, half-blocks with integer scales: scale[i] holds those of blocks 2i and 2i + 1, four times each,
// first halves in the low 128 bits.
APU_INLINE __m256i dot_halves(const __m256i *w, const __m256i *scale, const int8_t *q) {
  __m256i pair[4];
#pragma GCC unroll 4
  for (uint32_t i = 0; i < 4; ++i) {
    const __m256i sums = fold_pair(_mm256_maddubs_epi16(w[2 * i], load32(q + 64 * i)),
                                   _mm256_maddubs_epi16(w[2 * i + 1], load32(q + 64 * i + 32)));
    pair[i] = _mm256_madd_epi16(sums, scale[i]);
  }
  return fold_halves(_mm256_hadd_epi32(pair[0], pair[1]), _mm256_hadd_epi32(pair[2], pair[3]));
}

APU_INLINE __m256 fma_block(__m256i sum, __m256 scale, const float *d, __m256 acc) {
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum), _mm256_mul_ps(scale, _mm256_loadu_ps(d)), acc);
}

// ---- 32-element blocks. `count` blocks of a group exist; the others are zero.

APU_INLINE __m256 gather_f16(const uint8_t *p, size_t stride, uint32_t count) {
  alignas(16) uint16_t bits[kGroup] = {};
  if (count < kGroup) {
    for (uint32_t i = 0; i < count; ++i) bits[i] = load_u16(p + i * stride);
    return _mm256_cvtph_ps(_mm_load_si128(reinterpret_cast<const __m128i *>(bits)));
  }
  __m128i h = _mm_cvtsi32_si128(load_u16(p));
  h = _mm_insert_epi16(h, load_u16(p + stride), 1);
  h = _mm_insert_epi16(h, load_u16(p + 2 * stride), 2);
  h = _mm_insert_epi16(h, load_u16(p + 3 * stride), 3);
  __m128i g = _mm_cvtsi32_si128(load_u16(p + 4 * stride));
  g = _mm_insert_epi16(g, load_u16(p + 5 * stride), 1);
  g = _mm_insert_epi16(g, load_u16(p + 6 * stride), 2);
  g = _mm_insert_epi16(g, load_u16(p + 7 * stride), 3);
  return _mm256_cvtph_ps(_mm_unpacklo_epi64(h, g));
}

// Adjacent F16 scale and minimum of eight blocks.
APU_INLINE void gather_f16_pairs(const uint8_t *p, size_t stride, uint32_t count, __m256 &d, __m256 &m) {
  if (count < kGroup) {
    d = gather_f16(p, stride, count);
    m = gather_f16(p + 2, stride, count);
    return;
  }
  __m128i a = _mm_cvtsi32_si128(static_cast<int>(load_u32(p)));
  a = _mm_insert_epi32(a, static_cast<int>(load_u32(p + stride)), 1);
  a = _mm_insert_epi32(a, static_cast<int>(load_u32(p + 2 * stride)), 2);
  a = _mm_insert_epi32(a, static_cast<int>(load_u32(p + 3 * stride)), 3);
  __m128i b = _mm_cvtsi32_si128(static_cast<int>(load_u32(p + 4 * stride)));
  b = _mm_insert_epi32(b, static_cast<int>(load_u32(p + 5 * stride)), 1);
  b = _mm_insert_epi32(b, static_cast<int>(load_u32(p + 6 * stride)), 2);
  b = _mm_insert_epi32(b, static_cast<int>(load_u32(p + 7 * stride)), 3);
  const __m128i split = _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15);
  a = _mm_shuffle_epi8(a, split);
  b = _mm_shuffle_epi8(b, split);
  d = _mm256_cvtph_ps(_mm_unpacklo_epi64(a, b));
  m = _mm256_cvtph_ps(_mm_unpackhi_epi64(a, b));
}

// 16 bytes to 32 nibbles, low ones first.
APU_INLINE __m256i nibbles(const uint8_t *p) {
  const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  const __m256i shift = _mm256_setr_epi64x(0, 0, 4, 4);
  return _mm256_and_si256(_mm256_srlv_epi64(twice, shift), _mm256_set1_epi8(15));
}

// 32 bits to 32 bytes that are 16 where the bit is set.
APU_INLINE __m256i fifth_bits(const uint8_t *p) {
  const __m256i spread = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  const __m256i bytes = _mm256_shuffle_epi8(_mm256_set1_epi32(static_cast<int>(load_u32(p))), spread);
  const __m256i clear = _mm256_cmpeq_epi8(_mm256_and_si256(bytes, bit), _mm256_setzero_si256());
  return _mm256_andnot_si256(clear, _mm256_set1_epi8(16));
}

APU_INLINE __m256i block_sums(const ActGroup &a) { // (8) int32
  return _mm256_madd_epi16(load32(a.sums), _mm256_set1_epi16(1));
}

// Types that differ in bytes a block, where the values start and how wide they are.
template <uint32_t kBlockBytes, uint32_t kValues, bool kFifthBit> struct SymmetricNibbles {
  static constexpr uint32_t kGroupBytes = kGroup * kBlockBytes;
  static constexpr int kBiasShift = kFifthBit ? 4 : 3;
  __m256i w[kGroup];
  __m256 d;

  APU_INLINE void load(const uint8_t *p, uint32_t count) {
    d = gather_f16(p, kBlockBytes, count);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kGroup; ++i) {
      if (i >= count) {
        w[i] = _mm256_setzero_si256();
        continue;
      }
      const uint8_t *block = p + i * kBlockBytes;
      w[i] = nibbles(block + kValues);
      if constexpr (kFifthBit) w[i] = _mm256_or_si256(w[i], fifth_bits(block + kValues - 4));
    }
  }

  APU_INLINE __m256 add(const ActGroup &a, __m256 acc) const {
    const __m256i sum = _mm256_sub_epi32(dot_narrow(w, a.q), _mm256_slli_epi32(block_sums(a), kBiasShift));
    return fma_block(sum, d, a.d, acc);
  }
};

template <uint32_t kBlockBytes, uint32_t kValues, bool kFifthBit> struct OffsetNibbles {
  static constexpr uint32_t kGroupBytes = kGroup * kBlockBytes;
  __m256i w[kGroup];
  __m256 d, m;

  APU_INLINE void load(const uint8_t *p, uint32_t count) {
    gather_f16_pairs(p, kBlockBytes, count, d, m);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kGroup; ++i) {
      if (i >= count) {
        w[i] = _mm256_setzero_si256();
        continue;
      }
      const uint8_t *block = p + i * kBlockBytes;
      w[i] = nibbles(block + kValues);
      if constexpr (kFifthBit) w[i] = _mm256_or_si256(w[i], fifth_bits(block + kValues - 4));
    }
  }

  APU_INLINE __m256 add(const ActGroup &a, __m256 acc) const {
    acc = fma_block(dot_narrow(w, a.q), d, a.d, acc);
    return _mm256_fmadd_ps(m, _mm256_loadu_ps(a.s), acc);
  }
};

struct SignedBytes {
  static constexpr uint32_t kBlockBytes = 34, kGroupBytes = kGroup * kBlockBytes;
  __m256i w[kGroup];
  __m256 d;

  APU_INLINE void load(const uint8_t *p, uint32_t count) {
    d = gather_f16(p, kBlockBytes, count);
#pragma GCC unroll 8
    for (uint32_t i = 0; i < kGroup; ++i) w[i] = i < count ? load32(p + i * kBlockBytes + 2) : _mm256_setzero_si256();
  }

  APU_INLINE __m256 add(const ActGroup &a, __m256 acc) const { return fma_block(dot_signed(w, a.q), d, a.d, acc); }
};

// ---- superblocks of eight 32-blocks

// Q4_K and Q5_K: 6-bit scale and minimum a block, packed in 12 bytes.
template <bool kFifthBit> struct ScaledNibbles {
  static constexpr uint32_t kGroupBytes = kFifthBit ? 176 : 144;
  __m256i w[kGroup];
  __m256 d, m;

  APU_INLINE void load(const uint8_t *p, uint32_t) {
    const uint32_t x0 = load_u32(p + 4), x1 = load_u32(p + 8), x2 = load_u32(p + 12);
    const uint32_t low6 = 0x3f3f3f3f, low4 = 0x0f0f0f0f, top2 = 0x30303030;
    const uint64_t scales = (x0 & low6) | static_cast<uint64_t>((x2 & low4) | ((x0 >> 2) & top2)) << 32;
    const uint64_t minima = (x1 & low6) | static_cast<uint64_t>((x2 >> 4 & low4) | ((x1 >> 2) & top2)) << 32;
    const auto widen = [](uint64_t v) {
      return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<long long>(v))));
    };
    d = _mm256_mul_ps(broadcast_f16(p), widen(scales));
    m = _mm256_mul_ps(broadcast_f16(p + 2), widen(minima));
    const uint8_t *values = p + (kFifthBit ? 48 : 16);
    const __m256i high = kFifthBit ? load32(p + 16) : _mm256_setzero_si256();
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) {
      const __m256i bytes = load32(values + 32 * i), mask = _mm256_set1_epi8(15);
      w[2 * i] = _mm256_and_si256(bytes, mask);
      w[2 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), mask);
    }
    if constexpr (kFifthBit) { // bit j of byte i belongs to element i of block j
      const __m256i sixteen = _mm256_set1_epi8(16);
      w[0] = _mm256_or_si256(w[0], _mm256_and_si256(_mm256_slli_epi16(high, 4), sixteen));
      w[1] = _mm256_or_si256(w[1], _mm256_and_si256(_mm256_slli_epi16(high, 3), sixteen));
      w[2] = _mm256_or_si256(w[2], _mm256_and_si256(_mm256_slli_epi16(high, 2), sixteen));
      w[3] = _mm256_or_si256(w[3], _mm256_and_si256(_mm256_slli_epi16(high, 1), sixteen));
      w[4] = _mm256_or_si256(w[4], _mm256_and_si256(high, sixteen));
      w[5] = _mm256_or_si256(w[5], _mm256_and_si256(_mm256_srli_epi16(high, 1), sixteen));
      w[6] = _mm256_or_si256(w[6], _mm256_and_si256(_mm256_srli_epi16(high, 2), sixteen));
      w[7] = _mm256_or_si256(w[7], _mm256_and_si256(_mm256_srli_epi16(high, 3), sixteen));
    }
  }

  APU_INLINE __m256 add(const ActGroup &a, __m256 acc) const {
    acc = fma_block(dot_narrow(w, a.q), d, a.d, acc);
    return _mm256_fnmadd_ps(m, _mm256_loadu_ps(a.s), acc);
  }
};

// 16 scales as int16: `natural` in block order, `spread` as dot_halves wants them.
APU_INLINE void spread_scales(__m128i bytes, __m256i &natural, __m256i *spread) {
  natural = _mm256_cvtepi8_epi16(bytes);
  const __m128i split = _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15);
  const __m256i halves = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, split));
#pragma GCC unroll 4
  for (uint32_t i = 0; i < 4; ++i) {
    const __m256i first = _mm256_set1_epi16(static_cast<short>(0x0100 + 0x0404 * i));
    const __m256i step = _mm256_setr_epi64x(0, 0x0202020202020202, 0, 0x0202020202020202);
    spread[i] = _mm256_shuffle_epi8(halves, _mm256_add_epi8(first, step));
  }
}

// Types with a scale per 16 elements: values biased by 1 << kBiasShift.
template <int kBiasShift> struct HalfScales {
  __m256i w[kGroup], natural, spread[4];
  __m256 d;

  APU_INLINE __m256 add(const ActGroup &a, __m256 acc) const {
    const __m256i bias = _mm256_slli_epi32(_mm256_madd_epi16(natural, load32(a.sums)), kBiasShift);
    return fma_block(_mm256_sub_epi32(dot_halves(w, spread, a.q), bias), d, a.d, acc);
  }
};

struct SixBits : HalfScales<5> { // Q6_K
  static constexpr uint32_t kGroupBytes = 210;

  APU_INLINE void load(const uint8_t *p, uint32_t) {
    d = broadcast_f16(p + 208);
    spread_scales(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p + 192)), natural, spread);
    const __m256i low4 = _mm256_set1_epi8(15), top2 = _mm256_set1_epi8(0x30);
#pragma GCC unroll 2
    for (uint32_t i = 0; i < 2; ++i) {
      const __m256i a = load32(p + 64 * i), b = load32(p + 64 * i + 32), high = load32(p + 128 + 32 * i);
      w[4 * i] = _mm256_or_si256(_mm256_and_si256(a, low4), _mm256_and_si256(_mm256_slli_epi16(high, 4), top2));
      w[4 * i + 1] = _mm256_or_si256(_mm256_and_si256(b, low4), _mm256_and_si256(_mm256_slli_epi16(high, 2), top2));
      w[4 * i + 2] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(a, 4), low4), _mm256_and_si256(high, top2));
      w[4 * i + 3] = _mm256_or_si256(_mm256_and_si256(_mm256_srli_epi16(b, 4), low4),
                                     _mm256_and_si256(_mm256_srli_epi16(high, 2), top2));
    }
  }
};

// 64 bytes of 2-bit values to eight blocks.
APU_INLINE void two_bits(const uint8_t *p, __m256i *w) {
  const __m256i low2 = _mm256_set1_epi8(3);
#pragma GCC unroll 2
  for (uint32_t i = 0; i < 2; ++i) {
    const __m256i bytes = load32(p + 32 * i);
    w[4 * i] = _mm256_and_si256(bytes, low2);
    w[4 * i + 1] = _mm256_and_si256(_mm256_srli_epi16(bytes, 2), low2);
    w[4 * i + 2] = _mm256_and_si256(_mm256_srli_epi16(bytes, 4), low2);
    w[4 * i + 3] = _mm256_and_si256(_mm256_srli_epi16(bytes, 6), low2);
  }
}

struct ThreeBits : HalfScales<2> { // Q3_K
  static constexpr uint32_t kGroupBytes = 110;

  APU_INLINE void load(const uint8_t *p, uint32_t) {
    d = broadcast_f16(p + 108);
    const uint32_t x0 = load_u32(p + 96), x1 = load_u32(p + 100), x2 = load_u32(p + 104);
    const uint32_t low4 = 0x0f0f0f0f, top2 = 0x30303030;
    const __m128i scales = _mm_setr_epi32(
        static_cast<int>((x0 & low4) | (x2 << 4 & top2)), static_cast<int>((x1 & low4) | (x2 << 2 & top2)),
        static_cast<int>((x0 >> 4 & low4) | (x2 & top2)), static_cast<int>((x1 >> 4 & low4) | (x2 >> 2 & top2)));
    spread_scales(_mm_sub_epi8(scales, _mm_set1_epi8(32)), natural, spread);
    two_bits(p + 32, w);
    const __m256i high = load32(p), four = _mm256_set1_epi8(4);
    w[0] = _mm256_or_si256(w[0], _mm256_and_si256(_mm256_slli_epi16(high, 2), four));
    w[1] = _mm256_or_si256(w[1], _mm256_and_si256(_mm256_slli_epi16(high, 1), four));
    w[2] = _mm256_or_si256(w[2], _mm256_and_si256(high, four));
    w[3] = _mm256_or_si256(w[3], _mm256_and_si256(_mm256_srli_epi16(high, 1), four));
    w[4] = _mm256_or_si256(w[4], _mm256_and_si256(_mm256_srli_epi16(high, 2), four));
    w[5] = _mm256_or_si256(w[5], _mm256_and_si256(_mm256_srli_epi16(high, 3), four));
    w[6] = _mm256_or_si256(w[6], _mm256_and_si256(_mm256_srli_epi16(high, 4), four));
    w[7] = _mm256_or_si256(w[7], _mm256_and_si256(_mm256_srli_epi16(high, 5), four));
  }
};

struct TwoBits { // Q2_K: 4-bit scale and minimum per 16 elements
  static constexpr uint32_t kGroupBytes = 84;
  __m256i w[kGroup], spread[4], minima;
  __m256 d, m;

  APU_INLINE void load(const uint8_t *p, uint32_t) {
    d = broadcast_f16(p + 80);
    m = broadcast_f16(p + 82);
    const __m128i packed = _mm_loadu_si128(reinterpret_cast<const __m128i *>(p)), low4 = _mm_set1_epi8(15);
    __m256i natural;
    spread_scales(_mm_and_si128(packed, low4), natural, spread);
    minima = _mm256_cvtepi8_epi16(_mm_and_si128(_mm_srli_epi16(packed, 4), low4));
    two_bits(p + 16, w);
  }

  APU_INLINE __m256 add(const ActGroup &a, __m256 acc) const {
    const __m256 act = _mm256_loadu_ps(a.d);
    const __m256 sum = _mm256_cvtepi32_ps(dot_halves(w, spread, a.q));
    const __m256 least = _mm256_cvtepi32_ps(_mm256_madd_epi16(minima, load32(a.sums)));
    acc = _mm256_fmadd_ps(sum, _mm256_mul_ps(d, act), acc);
    return _mm256_fnmadd_ps(least, _mm256_mul_ps(m, act), acc);
  }
};

// Calls use.template operator()<Format>() for a quantised dtype.
template <class Use> APU_INLINE void with_format(uint32_t dtype, const Use &use) {
  switch (dtype) {
  case APU_Q4_0: return use.template operator()<SymmetricNibbles<18, 2, false>>();
  case APU_Q4_1: return use.template operator()<OffsetNibbles<20, 4, false>>();
  case APU_Q5_0: return use.template operator()<SymmetricNibbles<22, 6, true>>();
  case APU_Q5_1: return use.template operator()<OffsetNibbles<24, 8, true>>();
  case APU_Q8_0: return use.template operator()<SignedBytes>();
  case APU_Q2_K: return use.template operator()<TwoBits>();
  case APU_Q3_K: return use.template operator()<ThreeBits>();
  case APU_Q4_K: return use.template operator()<ScaledNibbles<false>>();
  case APU_Q5_K: return use.template operator()<ScaledNibbles<true>>();
  case APU_Q6_K: return use.template operator()<SixBits>();
  default: return;
  }
}

} // namespace
} // namespace apu::cpu
