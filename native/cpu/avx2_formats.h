// The quantised GGUF types as AVX2 sees them: one trait per type that loads a group of eight 32-blocks (a superblock of
// the K types) and adds its product with one row of activations to eight float lanes, lane b being block b of the
// group. A register has 8 elements each of blocks b, b + 1, b + 4 and b + 5, so the two registers of a half add up
// without shuffles and two more reach block order in two; the quantiser stores activations likewise. Bytes are unsigned
// with a bias (maddubs wants one unsigned side), and all sums before the last step are int16 that may wrap: without its
// bias, half a half's sum fits, |w| * 127 * 8 < 2^15. Only Q8_0 is signed and moves its signs to the activations.
// With VNNI (vpdpbusd: four products to an int32) the sums are packed to those int16, and signed bytes get a bias too.
// In an unnamed namespace: nothing here may be shared with files compiled without these flags.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "../include/apu.h"
#include "avx2_math.h"
#include "kernels.h"

#define APU_INLINE inline __attribute__((always_inline))

namespace apu::cpu {
namespace {

constexpr uint32_t kGroup = 8; // blocks

struct Pair { // blocks i and i + 4: elements 0..15 of both, and 16..31
  __m256i first, second;
};

struct Quad { // blocks 2 j, 2 j + 1, 2 j + 4, 2 j + 5: elements 0..7 and 8..15 of each half
  __m256i half[2][2];
};

// Activations of one row and group. In q, element e of half h of block b is at quad_offset(b) + 64 h + 32 (e / 8)
// + e % 8. sum16 has for each half two int16 as dot_half gives them for weights 1, times 8.
struct ActGroup {
  const int8_t *q;
  const float *d, *s16, *s;
  const int32_t *sum16;

  // From block `at` on, counted over all rows.
  APU_INLINE ActGroup(const ActBlocks &a, size_t at)
      : q(a.q + 32 * at), d(a.d + 2 * at), s16(a.s16 + 2 * at), s(a.s + at), sum16(a.sum16 + 2 * at) {}

  APU_INLINE void next() {
    q += 32 * kGroup;
    d += 2 * kGroup;
    s16 += 2 * kGroup;
    s += kGroup;
    sum16 += 2 * kGroup;
  }
};

constexpr uint32_t kSumShift = 3; // of sum16

APU_INLINE uint32_t quad_offset(uint32_t b) {
  return 128 * (b % 4 / 2) + 16 * (b / 4) + 8 * (b % 2);
}

APU_INLINE __m256i load32(const void *p) {
  return _mm256_loadu_si256(static_cast<const __m256i *>(p));
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
  return _mm256_broadcastss_ps(_mm_cvtph_ps(_mm_cvtsi32_si128(load_u16(p))));
}

// 16 bytes of block `block` and of the one four blocks and `distance` bytes on, as far as `count` blocks exist.
APU_INLINE __m256i load_pair(const uint8_t *p, size_t distance, uint32_t block = 0, uint32_t count = kGroup) {
  if (block >= count) return _mm256_setzero_si256();
  if (block + 4 >= count) return _mm256_zextsi128_si256(load16(p));
  return _mm256_inserti128_si256(_mm256_castsi128_si256(load16(p)), load16(p + distance), 1);
}

// ---- the integer sums of both halves of eight blocks, one block a lane

struct Halves {
  __m256i first, second;
};

APU_INLINE __m256i even_dwords(__m256i a, __m256i b) {
  return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0x88));
}

APU_INLINE __m256i odd_dwords(__m256i a, __m256i b) {
  return _mm256_castps_si256(_mm256_shuffle_ps(_mm256_castsi256_ps(a), _mm256_castsi256_ps(b), 0xdd));
}

// Four int16 (int32: two) of each block of both quads to two (one), in block order.
APU_INLINE __m256i fold16(__m256i quad0, __m256i quad1) {
  return _mm256_add_epi16(even_dwords(quad0, quad1), odd_dwords(quad0, quad1));
}
APU_INLINE __m256i fold32(__m256i quad0, __m256i quad1) {
  return _mm256_add_epi32(even_dwords(quad0, quad1), odd_dwords(quad0, quad1));
}

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
constexpr bool kVnni = true;
APU_INLINE __m256i dpbusd(__m256i sum, __m256i w, __m256i q) {
  return _mm256_dpbusd_epi32(sum, w, q);
}
#elif defined(__AVXVNNI__)
constexpr bool kVnni = true;
APU_INLINE __m256i dpbusd(__m256i sum, __m256i w, __m256i q) {
  return _mm256_dpbusd_avx_epi32(sum, w, q);
}
#else
constexpr bool kVnni = false;
APU_INLINE __m256i dpbusd(__m256i sum, __m256i, __m256i) { // for code that kVnni discards
  return sum;
}
#endif

// What weights 2^kBias too large added to a half: from its sum16, as two int16 or as one negative int32.
template <int kBias> APU_INLINE __m256i bias16(__m256i sums) {
  constexpr int kShift = kBias - static_cast<int>(kSumShift);
  return kShift >= 0 ? _mm256_slli_epi16(sums, kShift) : _mm256_srai_epi16(sums, -kShift);
}
template <int kBias> APU_INLINE __m256i minus_bias32(__m256i sums) {
  constexpr int kShift = kBias - static_cast<int>(kSumShift);
  if constexpr (kShift < 0) sums = _mm256_srai_epi16(sums, -kShift);
  return _mm256_madd_epi16(sums, _mm256_set1_epi16(static_cast<int16_t>(kShift > 0 ? -(1 << kShift) : -1)));
}

// w[j][i]: unsigned weights of one half of quad j, below 64 with VNNI where kSixBits, else below 32; q: its
// activations. Two int16 a block, which may wrap.
template <bool kSixBits> APU_INLINE __m256i dot_half(const __m256i (&w)[2][2], const int8_t *q) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i sum[2], more[2];
#pragma GCC unroll 2
  for (uint32_t j = 0; j < 2; ++j) {
    const __m256i q0 = load32(q + 128 * j), q1 = load32(q + 128 * j + 32);
    if constexpr (!kVnni) {
      sum[j] = _mm256_add_epi16(_mm256_maddubs_epi16(w[j][0], q0), _mm256_maddubs_epi16(w[j][1], q1));
    } else if constexpr (kSixBits) { // a pack saturates: no more than four products
      sum[j] = dpbusd(zero, w[j][0], q0);
      more[j] = dpbusd(zero, w[j][1], q1);
    } else {
      sum[j] = dpbusd(dpbusd(zero, w[j][0], q0), w[j][1], q1);
    }
  }
  if constexpr (!kVnni) return fold16(sum[0], sum[1]);
  const __m256i packed = _mm256_packs_epi32(sum[0], sum[1]);
  return kSixBits ? _mm256_add_epi16(packed, _mm256_packs_epi32(more[0], more[1])) : packed;
}

// `w` gives the weights of quad j, either from memory as they are needed or from a Group taken apart before.

// Unsigned weights that are 2^kBias too large, or not when kBias is 0. `scale`: of the halves, an int16 twice a block.
template <int kBias, class Weights> APU_INLINE Halves dot_narrow(const Weights &w, const ActGroup &a, Halves scale) {
  const Quad quad0 = w(0), quad1 = w(1);
  const auto half = [&](uint32_t h) __attribute__((always_inline)) {
    const __m256i v[2][2] = {{quad0.half[h][0], quad0.half[h][1]}, {quad1.half[h][0], quad1.half[h][1]}};
    const __m256i sum = dot_half<kBias == 5>(v, a.q + 64 * h);
    return kBias == 0 ? sum : _mm256_sub_epi16(sum, bias16<kBias>(load32(a.sum16 + kGroup * h)));
  };
  return {_mm256_madd_epi16(half(0), scale.first), _mm256_madd_epi16(half(1), scale.second)};
}

template <int kBias, class Weights> APU_INLINE Halves dot_narrow(const Weights &w, const ActGroup &a) {
  const __m256i one = _mm256_set1_epi16(1);
  return dot_narrow<kBias>(w, a, {one, one});
}

// Signed weights of any size as the products want them: with VNNI 128 too large and unsigned.
constexpr int kSignedBias = kVnni ? 7 : 0;
APU_INLINE __m256i signed_weights(__m256i w) {
  return kVnni ? _mm256_xor_si256(w, _mm256_set1_epi8(-128)) : w;
}

// |w| <= 128 and |q| <= 127 keep maddubs' pair at 32512, below saturation.
APU_INLINE __m256i multiply_signed(__m256i w, const int8_t *q) {
  const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(load32(q), w));
  return _mm256_madd_epi16(pairs, _mm256_set1_epi16(1));
}

// Of signed_weights.
template <class Weights> APU_INLINE Halves dot_signed(const Weights &w, const ActGroup &a) {
  __m256i sum[2][2];
#pragma GCC unroll 2
  for (uint32_t j = 0; j < 2; ++j) {
    const Quad v = w(j);
#pragma GCC unroll 2
    for (uint32_t h = 0; h < 2; ++h) {
      const int8_t *q = a.q + 128 * j + 64 * h;
      if constexpr (kVnni)
        sum[h][j] = dpbusd(dpbusd(_mm256_setzero_si256(), v.half[h][0], load32(q)), v.half[h][1], load32(q + 32));
      else
        sum[h][j] = _mm256_add_epi32(multiply_signed(v.half[h][0], q), multiply_signed(v.half[h][1], q + 32));
    }
  }
  Halves total{fold32(sum[0][0], sum[0][1]), fold32(sum[1][0], sum[1][1])};
  if constexpr (kVnni) {
    total.first = _mm256_add_epi32(total.first, minus_bias32<kSignedBias>(load32(a.sum16)));
    total.second = _mm256_add_epi32(total.second, minus_bias32<kSignedBias>(load32(a.sum16 + kGroup)));
  }
  return total;
}

// Of pairs 2 j and 2 j + 1.
APU_INLINE Quad quad_of(Pair a, Pair b) {
  return {{{_mm256_unpacklo_epi64(a.first, b.first), _mm256_unpackhi_epi64(a.first, b.first)},
           {_mm256_unpacklo_epi64(a.second, b.second), _mm256_unpackhi_epi64(a.second, b.second)}}};
}

// What avx2_gemm.cpp asks of a type; kBias as in dot_narrow.
struct FormatDefaults {
  static constexpr bool kSigned = false, kMinimum = false, kHalfScales = false, kHalfMinima = false;
  static constexpr bool kSuperblock = false; // a row is whole groups
  static constexpr int kBias = 0;
};

// first * d[0..8) + second * d[8..16)
APU_INLINE __m256 weigh(Halves v, const float *d) {
  const __m256 t = _mm256_mul_ps(_mm256_cvtepi32_ps(v.first), _mm256_loadu_ps(d));
  return _mm256_fmadd_ps(_mm256_cvtepi32_ps(v.second), _mm256_loadu_ps(d + kGroup), t);
}

APU_INLINE __m256 fma_block(Halves sum, __m256 scale, const float *d, __m256 acc) {
  return _mm256_fmadd_ps(scale, weigh(sum, d), acc);
}

// ---- 32-element blocks: `count` of a group exist, the others are zero

// The first and the second 16 bits of each block as floats.
struct HeaderFloats {
  __m256 first, second;
};

APU_INLINE HeaderFloats gather_headers(const uint8_t *p, size_t stride, uint32_t count) {
  const auto four = [=](uint32_t i) __attribute__((always_inline)) { // first words of blocks i .. i + 3, then second
    const auto block = [=](uint32_t b) __attribute__((always_inline)) {
      return b < count ? load16(p + b * stride) : _mm_setzero_si128();
    };
    return _mm_unpacklo_epi32(_mm_unpacklo_epi16(block(i), block(i + 1)),
                              _mm_unpacklo_epi16(block(i + 2), block(i + 3)));
  };
  const __m128i low = four(0), high = four(4);
  return {_mm256_cvtph_ps(_mm_unpacklo_epi64(low, high)), _mm256_cvtph_ps(_mm_unpackhi_epi64(low, high))};
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

// Types with nibbles at kValues of a block and, when kBits is 5, the fifth bits in the four bytes before.
template <uint32_t kBlockBytes, uint32_t kValues, int kBits>
APU_INLINE Quad nibble_quad(const uint8_t *p, uint32_t count, uint32_t j) {
  const auto pair = [=](uint32_t i, uint32_t at) __attribute__((always_inline)) {
    return load_pair(p + i * kBlockBytes + at, 4 * kBlockBytes, i, count);
  };
  const __m256i a = pair(2 * j, kValues), b = pair(2 * j + 1, kValues);
  const __m256i low = _mm256_unpacklo_epi64(a, b), high = _mm256_unpackhi_epi64(a, b);
  Quad quad{{{low_nibbles(low), low_nibbles(high)}, {high_nibbles(low), high_nibbles(high)}}};
  if constexpr (kBits == 5) {
    const __m256i bits = _mm256_unpacklo_epi64(pair(2 * j, kValues - 4), pair(2 * j + 1, kValues - 4));
    quad.half[0][0] = _mm256_or_si256(quad.half[0][0], fifth_bits<0>(bits));
    quad.half[0][1] = _mm256_or_si256(quad.half[0][1], fifth_bits<1>(bits));
    quad.half[1][0] = _mm256_or_si256(quad.half[1][0], fifth_bits<2>(bits));
    quad.half[1][1] = _mm256_or_si256(quad.half[1][1], fifth_bits<3>(bits));
  }
  return quad;
}

template <uint32_t kBlockBytes, uint32_t kValues, int kWidth> struct SymmetricNibbles : FormatDefaults { // Q4_0, Q5_0
  static constexpr uint32_t kGroupBytes = kGroup * kBlockBytes;
  static constexpr int kBias = kWidth - 1;
  __m256 d;

  APU_INLINE SymmetricNibbles(const uint8_t *p, uint32_t count) : d(gather_headers(p, kBlockBytes, count).first) {}

  static APU_INLINE Quad quad(const uint8_t *p, uint32_t count, uint32_t j) {
    return nibble_quad<kBlockBytes, kValues, kWidth>(p, count, j);
  }

  template <class Weights> APU_INLINE __m256 add(const Weights &w, const ActGroup &a, __m256 acc) const {
    return fma_block(dot_narrow<kBias>(w, a), d, a.d, acc);
  }
};

template <uint32_t kBlockBytes, uint32_t kValues, int kWidth> struct OffsetNibbles : FormatDefaults { // Q4_1, Q5_1
  static constexpr uint32_t kGroupBytes = kGroup * kBlockBytes;
  static constexpr bool kMinimum = true;
  __m256 d, m;

  APU_INLINE OffsetNibbles(const uint8_t *p, uint32_t count) {
    const HeaderFloats header = gather_headers(p, kBlockBytes, count);
    d = header.first;
    m = header.second;
  }

  APU_INLINE __m256 minimum() const { return m; }

  static APU_INLINE Quad quad(const uint8_t *p, uint32_t count, uint32_t j) {
    return nibble_quad<kBlockBytes, kValues, kWidth>(p, count, j);
  }

  template <class Weights> APU_INLINE __m256 add(const Weights &w, const ActGroup &a, __m256 acc) const {
    acc = fma_block(dot_narrow<0>(w, a), d, a.d, acc);
    return _mm256_fmadd_ps(m, _mm256_loadu_ps(a.s), acc);
  }
};

struct SignedBytes : FormatDefaults { // Q8_0
  static constexpr bool kSigned = true;
  static constexpr uint32_t kBlockBytes = 34, kGroupBytes = kGroup * kBlockBytes;
  __m256 d;

  APU_INLINE SignedBytes(const uint8_t *p, uint32_t count) : d(gather_headers(p, kBlockBytes, count).first) {}

  static APU_INLINE Pair pair(const uint8_t *p, uint32_t count, uint32_t i) {
    const uint8_t *values = p + i * kBlockBytes + 2;
    return {signed_weights(load_pair(values, 4 * kBlockBytes, i, count)),
            signed_weights(load_pair(values + 16, 4 * kBlockBytes, i, count))};
  }
  static APU_INLINE Quad quad(const uint8_t *p, uint32_t count, uint32_t j) {
    return quad_of(pair(p, count, 2 * j), pair(p, count, 2 * j + 1));
  }

  template <class Weights> APU_INLINE __m256 add(const Weights &w, const ActGroup &a, __m256 acc) const {
    return fma_block(dot_signed(w, a), d, a.d, acc);
  }
};

// ---- superblocks of eight 32-blocks

APU_INLINE __m256 negative(__m256 v) {
  return _mm256_xor_ps(v, _mm256_set1_ps(-0.0f));
}

// Bits 0..3 of byte i are element i of blocks 0..3 of the low 128 bits, bits 4..7 of the high.
APU_INLINE __m256i block_bits(const uint8_t *p) {
  return _mm256_srlv_epi64(_mm256_broadcastsi128_si256(load16(p)), _mm256_setr_epi64x(0, 0, 4, 4));
}

template <int kWidth> struct ScaledNibbles : FormatDefaults { // Q4_K, Q5_K: 6-bit scale and minimum a block, packed
  static constexpr bool kMinimum = true, kSuperblock = true;
  static constexpr uint32_t kGroupBytes = kWidth == 5 ? 176 : 144;
  __m256 d, m;

  APU_INLINE ScaledNibbles(const uint8_t *p, uint32_t) {
    const uint32_t x0 = load_u32(p + 4), x1 = load_u32(p + 8), x2 = load_u32(p + 12);
    const uint32_t low6 = 0x3f3f3f3f, low4 = 0x0f0f0f0f, top2 = 0x30303030;
    const uint64_t scales = (x0 & low6) | static_cast<uint64_t>((x2 & low4) | (x0 >> 2 & top2)) << 32;
    const uint64_t minima = (x1 & low6) | static_cast<uint64_t>((x2 >> 4 & low4) | (x1 >> 2 & top2)) << 32;
    d = _mm256_mul_ps(broadcast_f16(p), widen(scales));
    m = _mm256_mul_ps(broadcast_f16(p + 2), widen(minima));
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
  static APU_INLINE Quad quad(const uint8_t *p, uint32_t, uint32_t j) {
    return quad_of(pair(p, 2 * j), pair(p, 2 * j + 1));
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

  APU_INLINE SixBits(const uint8_t *p, uint32_t) : ScaledHalves(load16(p + 192), p + 208) {}

  static APU_INLINE __m256i half(const uint8_t *p, uint32_t i, uint32_t offset) {
    const __m256i bytes = load_pair(p + 32 * (i % 2) + offset, 64), high = load_pair(p + 128 + offset, 32);
    const __m256i low4 = i < 2 ? low_nibbles(bytes) : high_nibbles(bytes);
    const __m256i moved = i == 3 ? _mm256_srli_epi16(high, 2) : i == 2 ? high : _mm256_slli_epi16(high, i == 0 ? 4 : 2);
    return _mm256_or_si256(low4, _mm256_and_si256(moved, _mm256_set1_epi8(0x30)));
  }

  static APU_INLINE Pair pair(const uint8_t *p, uint32_t i) { return {half(p, i, 0), half(p, i, 16)}; }
  static APU_INLINE Quad quad(const uint8_t *p, uint32_t, uint32_t j) {
    return quad_of(pair(p, 2 * j), pair(p, 2 * j + 1));
  }
};

APU_INLINE __m256i two_bits(const uint8_t *p, uint32_t i) {
  return _mm256_and_si256(_mm256_srli_epi16(load_pair(p, 32), static_cast<int>(2 * i)), _mm256_set1_epi8(3));
}

struct ThreeBits : ScaledHalves<3> { // Q3_K
  static constexpr uint32_t kGroupBytes = 110;

  APU_INLINE ThreeBits(const uint8_t *p, uint32_t) : ScaledHalves(unpack_scales(p + 96), p + 108) {}

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
  static APU_INLINE Quad quad(const uint8_t *p, uint32_t, uint32_t j) {
    return quad_of(pair(p, 2 * j), pair(p, 2 * j + 1));
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

  APU_INLINE TwoBits(const uint8_t *p, uint32_t) {
    const __m128i packed = load16(p), low4 = _mm_set1_epi8(15);
    scales = _mm256_cvtepi8_epi16(_mm_and_si128(packed, low4));
    minima = _mm256_cvtepi8_epi16(_mm_and_si128(_mm_srli_epi16(packed, 4), low4));
    d = broadcast_f16(p + 80);
    m = broadcast_f16(p + 82);
  }

  APU_INLINE __m256 minimum() const { return negative(m); }

  static APU_INLINE Pair pair(const uint8_t *p, uint32_t i) { return {two_bits(p + 16, i), two_bits(p + 32, i)}; }
  static APU_INLINE Quad quad(const uint8_t *p, uint32_t, uint32_t j) {
    return quad_of(pair(p, 2 * j), pair(p, 2 * j + 1));
  }

  template <class Weights> APU_INLINE __m256 add(const Weights &w, const ActGroup &a, __m256 acc) const {
    acc = fma_block(dot_narrow<0>(w, a, split_halves(scales)), d, a.d, acc);
    return _mm256_fnmadd_ps(m, weigh(widen_halves(minima), a.s16), acc);
  }
};

// A group taken apart once for several rows of activations.
template <class Format> struct Group {
  Format format;
  Quad quads[2];

  APU_INLINE Group(const uint8_t *p, uint32_t count)
      : format(p, count), quads{Format::quad(p, count, 0), Format::quad(p, count, 1)} {}
  APU_INLINE __m256 add(const ActGroup &a, __m256 acc) const {
    return format.add([this](uint32_t j) __attribute__((always_inline)) { return quads[j]; }, a, acc);
  }
};

// The same for one row, weights unpacked as they are needed: registers suffice.
template <class Format> APU_INLINE __m256 add_group(const uint8_t *p, uint32_t count, const ActGroup &a, __m256 acc) {
  const Format format(p, count);
  return format.add([=](uint32_t j) __attribute__((always_inline)) { return Format::quad(p, count, j); }, a, acc);
}

// The blocks beyond the last full group: one copy of the code per count, without branches or loads past the row.
template <class Format> APU_INLINE __m256 add_rest(const uint8_t *p, uint32_t count, const ActGroup &a, __m256 acc) {
  switch (count) {
  case 1: return add_group<Format>(p, 1, a, acc);
  case 2: return add_group<Format>(p, 2, a, acc);
  case 3: return add_group<Format>(p, 3, a, acc);
  case 4: return add_group<Format>(p, 4, a, acc);
  case 5: return add_group<Format>(p, 5, a, acc);
  case 6: return add_group<Format>(p, 6, a, acc);
  case 7: return add_group<Format>(p, 7, a, acc);
  default: return acc;
  }
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
