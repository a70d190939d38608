// Integer sums of a group of eight 32-blocks with one row of activations, at the AVX2 levels.
// A register has 8 elements each of blocks b, b + 1, b + 4 and b + 5, so the two registers of a half add up without
// shuffles and two more reach block order in two; the quantiser stores activations likewise. Weights are unsigned with
// a bias (maddubs wants one unsigned side), and all sums before the last step are int16 that may wrap: without its
// bias, half a half's sum fits, |w| * 127 * 8 < 2^15. Larger weights are signed and move their signs to the
// activations. With VNNI (vpdpbusd: four products to an int32) the sums are packed to those int16, and signed bytes get
// a bias too. In an unnamed namespace: nothing here may be shared with files compiled without these flags.
#pragma once

#include <immintrin.h>

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "avx2_math.h"
#include "kernels.h"

#define APU_INLINE inline __attribute__((always_inline))

namespace apu::cpu {
namespace {

constexpr uint32_t kGroup = 8; // blocks

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

  APU_INLINE ActGroup(const int8_t *q, const float *d, const float *s16, const float *s, const int32_t *sum16)
      : q(q), d(d), s16(s16), s(s), sum16(sum16) {}

  APU_INLINE ActGroup from(size_t blocks) const {
    return {q + 32 * blocks, d + 2 * blocks, s16 + 2 * blocks, s + blocks, sum16 + 2 * blocks};
  }
  APU_INLINE void next() { *this = from(kGroup); }
};

constexpr uint32_t kSumShift = 3; // of sum16

APU_INLINE uint32_t quad_offset(uint32_t b) {
  return 128 * (b % 4 / 2) + 16 * (b / 4) + 8 * (b % 2);
}

APU_INLINE __m256i load32(const void *p) {
  return _mm256_loadu_si256(static_cast<const __m256i *>(p));
}
APU_INLINE void store32(void *p, __m256i v) {
  _mm256_storeu_si256(static_cast<__m256i *>(p), v);
}

struct Halves { // of eight blocks, one a lane
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

// w[j][i]: unsigned weights of one half of quad j, below 64 where kSixBits, else (with VNNI) below 32; q: the half's
// activations. Two int16 a block, which may wrap. `second` is false when quad 1 is zero.
template <bool kSixBits> APU_INLINE __m256i dot_half(const __m256i (&w)[2][2], const int8_t *q, bool second = true) {
  const __m256i zero = _mm256_setzero_si256();
  __m256i sum[2] = {zero, zero}, more[2] = {zero, zero};
#pragma GCC unroll 2
  for (uint32_t j = 0; j < 2; ++j) {
    if (j == 1 && !second) continue;
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

// `w` gives the weights of quad j, either from memory as they are needed or from a Group taken apart before, and knows
// whether quad 1 has any.

// Unsigned weights that are 2^kBias too large, or not when kBias is 0. `scale`: of the halves, an int16 twice a block.
template <int kBias, class Weights> APU_INLINE Halves dot_narrow(const Weights &w, const ActGroup &a, Halves scale) {
  const Quad &quad0 = w(0), &quad1 = w(1); // no copies: compilers move structures by halves of a register
  const auto half = [&](uint32_t h) __attribute__((always_inline)) {
    const __m256i v[2][2] = {{quad0.half[h][0], quad0.half[h][1]}, {quad1.half[h][0], quad1.half[h][1]}};
    const __m256i sum = dot_half<kBias == 5>(v, a.q + 64 * h, w.second());
    return kBias == 0 ? sum : _mm256_sub_epi16(sum, bias16<kBias>(load32(a.sum16 + kGroup * h)));
  };
  return {_mm256_madd_epi16(half(0), scale.first), _mm256_madd_epi16(half(1), scale.second)};
}

template <int kBias, class Weights> APU_INLINE Halves dot_narrow(const Weights &w, const ActGroup &a) {
  const __m256i one = _mm256_set1_epi16(1);
  return dot_narrow<kBias>(w, a, {one, one});
}

// Signed weights as the products want them: with VNNI 128 too large and unsigned.
constexpr int kSignedBias = kVnni ? 7 : 0;
APU_INLINE __m256i signed_weights(__m256i w) {
  return kVnni ? _mm256_xor_si256(w, _mm256_set1_epi8(-128)) : w;
}

// Pairs of products: |w| <= 128 and |q| <= 127 keep them at 32512, below saturation.
APU_INLINE __m256i multiply_signed(__m256i w, __m256i q) {
  return _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(q, w));
}

// Of signed_weights; kSmall: |w| <= 64, four products fit int16.
template <bool kSmall, class Weights> APU_INLINE Halves dot_signed(const Weights &w, const ActGroup &a) {
  const __m256i zero = _mm256_setzero_si256(), one = _mm256_set1_epi16(1);
  __m256i sum[2][2] = {{zero, zero}, {zero, zero}};
#pragma GCC unroll 2
  for (uint32_t j = 0; j < 2; ++j) {
    if (j == 1 && !w.second()) continue;
    const Quad &v = w(j);
#pragma GCC unroll 2
    for (uint32_t h = 0; h < 2; ++h) {
      const __m256i q0 = load32(a.q + 128 * j + 64 * h), q1 = load32(a.q + 128 * j + 64 * h + 32);
      if constexpr (kVnni) {
        sum[h][j] = dpbusd(dpbusd(zero, v.half[h][0], q0), v.half[h][1], q1);
        continue;
      }
      const __m256i p0 = multiply_signed(v.half[h][0], q0), p1 = multiply_signed(v.half[h][1], q1);
      sum[h][j] = kSmall ? _mm256_madd_epi16(_mm256_add_epi16(p0, p1), one)
                         : _mm256_add_epi32(_mm256_madd_epi16(p0, one), _mm256_madd_epi16(p1, one));
    }
  }
  Halves total{fold32(sum[0][0], sum[0][1]), fold32(sum[1][0], sum[1][1])};
  if constexpr (kVnni) {
    total.first = _mm256_add_epi32(total.first, minus_bias32<kSignedBias>(load32(a.sum16)));
    total.second = _mm256_add_epi32(total.second, minus_bias32<kSignedBias>(load32(a.sum16 + kGroup)));
  }
  return total;
}

// first * d[0..8) + second * d[8..16)
APU_INLINE __m256 weigh(__m256 first, __m256 second, const float *d) {
  return _mm256_fmadd_ps(second, _mm256_loadu_ps(d + kGroup), _mm256_mul_ps(first, _mm256_loadu_ps(d)));
}
APU_INLINE __m256 weigh(Halves v, const float *d) {
  return weigh(_mm256_cvtepi32_ps(v.first), _mm256_cvtepi32_ps(v.second), d);
}

APU_INLINE __m256 fma_block(Halves sum, __m256 scale, const float *d, __m256 acc) {
  return _mm256_fmadd_ps(scale, weigh(sum, d), acc);
}

} // namespace
} // namespace apu::cpu
