// The canonical sums of lanes, and elementary functions on eight floats: exp and the normal distribution, by
// polynomials fitted for this file (least squares reweighted towards the smallest greatest relative error). Relative
// error below 3e-7 for exp, 1e-6 for the distribution. In an unnamed namespace: nothing here may be shared with files
// compiled without these flags.
#pragma once

#include <immintrin.h>

#include <cstdint>

namespace apu::cpu {
namespace {

// ((0+4)+(2+6)) + ((1+5)+(3+7)), see quant/activations.h
inline float sum8(__m256 v) {
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

inline float sum16(__m256 low, __m256 high) {
  return sum8(_mm256_add_ps(low, high));
}

template <int kCount> inline __m256 polynomial(const float (&c)[kCount], __m256 x) { // c[0] + c[1] x + ...
  __m256 v = _mm256_set1_ps(c[kCount - 1]);
#pragma GCC unroll 16
  for (int i = kCount - 2; i >= 0; --i) v = _mm256_fmadd_ps(v, x, _mm256_set1_ps(c[i]));
  return v;
}

// 2^n for n in [-126, 127]
inline __m256 power_of_two(__m256i n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}

inline constexpr float kExpTerms[] = {1.0f,          1.0f,           0.49999991f,   0.166664198f,
                                      0.0416682251f, 0.00837482419f, 0.00138368318f};

// r of x = n ln 2 + r, |r| <= ln(2) / 2.
inline __m256 reduce_exponent(__m256 x, __m256 &n) {
  n = _mm256_round_ps(_mm256_mul_ps(x, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  const __m256 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x); // ln 2 in two parts, the first exact
  return _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
}

// exp(x) = 2^n exp(r); subnormal, zero and infinite results included, NaN kept.
inline __m256 exp8(__m256 x) {
  x = _mm256_max_ps(_mm256_set1_ps(-105.0f), _mm256_min_ps(_mm256_set1_ps(89.5f), x)); // the second operand if NaN
  __m256 n;
  const __m256 r = reduce_exponent(x, n);
  const __m256i exponent = _mm256_cvtps_epi32(n);
  const __m256i half = _mm256_srai_epi32(exponent, 1); // in two steps: 2^n alone may be out of range
  const __m256 v = _mm256_mul_ps(polynomial(kExpTerms, r), power_of_two(half));
  return _mm256_mul_ps(v, power_of_two(_mm256_sub_epi32(exponent, half)));
}

// exp(x) - 1 for x in [-40, 0], relative error below 1e-6 near 0 too.
inline __m256 expm1_8(__m256 x) {
  __m256 n;
  const __m256 r = reduce_exponent(x, n);
  static constexpr float kTerms[] = {kExpTerms[1], kExpTerms[2], kExpTerms[3],
                                     kExpTerms[4], kExpTerms[5], kExpTerms[6]};
  const __m256 power = power_of_two(_mm256_cvtps_epi32(n));
  const __m256 less_one = _mm256_sub_ps(power, _mm256_set1_ps(1.0f));
  return _mm256_fmadd_ps(power, _mm256_mul_ps(r, polynomial(kTerms, r)), less_one);
}

// P(X <= x) of the normal distribution, 0.5 erfc(-x / sqrt 2): for u = |x| the tail is
// exp(-u^2 / 2) times a polynomial in 1 / (1 + 0.3 u).
inline __m256 normal_cdf8(__m256 x) {
  static constexpr float kTerms[] = {7.3731326e-06f, 0.11948419f, 0.12194537f,  0.09458541f, 0.14276642f,
                                     -0.07684143f,   0.2289534f,  -0.16930829f, 0.03840757f};
  const __m256 sign = _mm256_set1_ps(-0.0f), one = _mm256_set1_ps(1.0f);
  const __m256 u = _mm256_andnot_ps(sign, x);
  const __m256 t = _mm256_div_ps(one, _mm256_fmadd_ps(u, _mm256_set1_ps(0.3f), one));
  const __m256 half = _mm256_mul_ps(u, _mm256_set1_ps(0.5f));
  const __m256 square = _mm256_min_ps(_mm256_set1_ps(104.0f), _mm256_mul_ps(half, u));
  const __m256 lost = _mm256_fmsub_ps(half, u, square); // the square's rounding, which exp would magnify
  const __m256 e = exp8(_mm256_xor_ps(square, sign));
  const __m256 corrected = _mm256_fnmadd_ps(e, _mm256_min_ps(_mm256_set1_ps(1e-5f), lost), e);
  const __m256 tail = _mm256_mul_ps(corrected, polynomial(kTerms, t));
  return _mm256_blendv_ps(_mm256_sub_ps(one, tail), tail, x);
}

} // namespace
} // namespace apu::cpu
