// Quantisation of activations (the bits of quant/activations.h) and row helpers of norms, attention and activation
// functions. The helpers are accurate to a few units in the last place but need not have the same bits at every level.
#include "avx512.h"
#include "avx512_group.h"

#ifdef APU_AVX512

#include "../quant/activations.h"

namespace apu::cpu::avx512 {
namespace {

APU_INLINE __mmask16 tail_mask(uint32_t n) {
  return static_cast<__mmask16>((1u << (n & 15)) - 1);
}

// Calls body(i, mask) for i = 0, 16, ... below n.
template <class Body> APU_INLINE void for_each_16(uint32_t n, Body body) {
  uint32_t i = 0;
  for (; i + 16 <= n; i += 16) body(i, static_cast<__mmask16>(0xffff));
  if (i < n) body(i, tail_mask(n));
}
// The same with four bodies in flight, for sums in four accumulators: body(i, mask, accumulator index).
template <class Body> APU_INLINE void for_each_64(uint32_t n, Body body) {
  uint32_t i = 0;
  for (; i + 64 <= n; i += 64) {
#pragma GCC unroll 4
    for (uint32_t j = 0; j < 4; j++) body(i + 16 * j, static_cast<__mmask16>(0xffff), j);
  }
  for (; i + 16 <= n; i += 16) body(i, static_cast<__mmask16>(0xffff), 0);
  if (i < n) body(i, tail_mask(n), 1);
}
APU_INLINE float sum64(const __m512 *acc) {
  return sum16(_mm512_add_ps(_mm512_add_ps(acc[0], acc[1]), _mm512_add_ps(acc[2], acc[3])));
}

// x = n ln 2 + r, |r| <= ln(2) / 2; returns e^r - 1, relative error below 1e-7 of e^r and of r.
APU_INLINE __m512 reduced_exp(__m512 x, __m512 &n) {
  n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x); // exact: n has few bits
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(0.0001990965974982828f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0013946457765996456f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.008333280682563782f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.04166626185178757f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.1666666716337204f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  return _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r);
}

// e^x, relative error below 1e-7, for all floats: times 2^n by scalef, which rounds denormals and overflows correctly.
APU_INLINE __m512 exp16(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(100.0f), _mm512_max_ps(_mm512_set1_ps(-120.0f), x)); // a NaN passes
  __m512 n;
  const __m512 p = reduced_exp(x, n);
  return _mm512_scalef_ps(_mm512_add_ps(p, _mm512_set1_ps(1.0f)), n);
}

// A float and the part that it lost.
struct Split {
  __m512 high, low;
};
// e^(high + low).
APU_INLINE __m512 exp16(Split x) {
  return _mm512_mul_ps(exp16(x.high), _mm512_add_ps(_mm512_set1_ps(1.0f), x.low)); // an infinity stays one
}
// Evaluates f on doubles and splits the result: exponents far from 0 need more than float's 24 bits.
template <class F> APU_INLINE Split in_double(__m512 x, F f) {
  __m256 high[2], low[2];
  const __m256 half[2] = {_mm512_castps512_ps256(x), _mm512_extractf32x8_ps(x, 1)};
  for (int i = 0; i < 2; i++) {
    const __m512d v = f(_mm512_cvtps_pd(half[i]));
    high[i] = _mm512_cvtpd_ps(v);
    low[i] = _mm512_cvtpd_ps(_mm512_sub_pd(v, _mm512_cvtps_pd(high[i])));
  }
  return {_mm512_insertf32x8(_mm512_castps256_ps512(high[0]), high[1], 1),
          _mm512_insertf32x8(_mm512_castps256_ps512(low[0]), low[1], 1)};
}

// erfc(z) e^(z z) (1 + 2 z) for z >= 0, a polynomial in t = (z - 2) / (z + 2) fitted by least squares at Chebyshev
// nodes up to z = 31; relative error below 1e-7.
APU_INLINE __m512 scaled_erfc(__m512 z) {
  constexpr float c[] = {1.2769783735275269f,      -0.09276380389928818f,   -0.16603054106235504f,
                         0.1640506237745285f,      -0.05421784892678261f,   -0.008027499541640282f,
                         0.0087110735476017f,      0.001242469996213913f,   -0.001429994823411107f,
                         -0.00038988314918242395f, 0.00018214913143310696f, 7.812922558514401e-05f,
                         -3.185167088304297e-06f};
  const __m512 two = _mm512_set1_ps(2.0f);
  const __m512 t = _mm512_div_ps(_mm512_sub_ps(z, two), _mm512_add_ps(z, two));
  __m512 p = _mm512_set1_ps(c[12]);
  for (int i = 11; i >= 0; i--) p = _mm512_fmadd_ps(p, t, _mm512_set1_ps(c[i]));
  return p;
}

// out = f(gate) * (up + offset)
template <class Activation>
APU_INLINE void activate(const float *gate, const float *up, float *out, uint32_t n, Activation f, float offset = 0) {
  for_each_16(n, [=](uint32_t i, __mmask16 mask) {
    const __m512 g = _mm512_maskz_loadu_ps(mask, gate + i), u = _mm512_maskz_loadu_ps(mask, up + i);
    _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(f(g), offset ? _mm512_add_ps(u, _mm512_set1_ps(offset)) : u));
  });
}

} // namespace

namespace {

// Sums of the sixteen halves of a group, in planes.
APU_INLINE __m512i half_sums(const int8_t *q) {
  const __m512i ones[4] = {_mm512_set1_epi8(1), _mm512_set1_epi8(1), _mm512_set1_epi8(1), _mm512_set1_epi8(1)};
  __m512i first, second;
  dot_registers(ones, q, first, second);
  return to_planes<Order::quads>(add_even_odd(first, second));
}

// One of 16 numbers from each of 16 vectors: the largest as unsigned integers.
APU_INLINE __m512i max_of_each(__m512i *v) {
#pragma GCC unroll 8
  for (int i = 0; i < 8; i++)
    v[i] =
        _mm512_max_epu32(_mm512_unpacklo_epi32(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi32(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
    v[i] =
        _mm512_max_epu32(_mm512_unpacklo_epi64(v[2 * i], v[2 * i + 1]), _mm512_unpackhi_epi64(v[2 * i], v[2 * i + 1]));
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++)
    v[i] = _mm512_max_epu32(_mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0x88),
                            _mm512_shuffle_i32x4(v[2 * i], v[2 * i + 1], 0xdd));
  return _mm512_max_epu32(_mm512_shuffle_i32x4(v[0], v[1], 0x88), _mm512_shuffle_i32x4(v[0], v[1], 0xdd));
}

// Eight blocks, `count` elements of them present; group g of one row's arrays, q in the order of quads. False when
// something is not finite.
template <bool Tail> APU_INLINE bool quantize_group(const float *x, int count, const ActBlocks &a, size_t g) {
  // Half i / 8 of block i mod 8, the order of the planes.
  const auto load = [=](int i) {
    const int at = 32 * (i % 8) + 16 * (i / 8);
    if constexpr (Tail) return _mm512_maskz_loadu_ps(static_cast<__mmask16>(low_mask(count - at)), x + at);
    return _mm512_loadu_ps(x + at);
  };
  __m512i v[16];
#pragma GCC unroll 16
  for (int i = 0; i < 16; i++) v[i] = _mm512_and_si512(_mm512_castps_si512(load(i)), _mm512_set1_epi32(0x7fffffff));
  const __m512i amax_bits = max_of_each(v);
  if (_mm512_cmpge_epu32_mask(amax_bits, _mm512_set1_epi32(0x7f800000))) return false;
  const __m512 amax = _mm512_castsi512_ps(amax_bits);
  const __mmask16 nonzero = _mm512_cmp_ps_mask(amax, _mm512_set1_ps(quant::kSmallestAmax), _CMP_GE_OQ);
  const __m512 d = _mm512_maskz_div_ps(nonzero, amax, _mm512_set1_ps(127.0f));
  alignas(64) float inverse[16];
  _mm512_store_ps(inverse, _mm512_maskz_div_ps(nonzero, _mm512_set1_ps(1.0f), d));
  const auto quantized = [&](int i) {
    return _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(load(i), _mm512_set1_ps(inverse[i]))));
  };
  auto *q = reinterpret_cast<__m128i *>(a.q + 256 * g);
#pragma GCC unroll 4
  for (int b = 0; b < 4; b++)
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const __m128i low = quantized(8 * h + b), high = quantized(8 * h + b + 4);
      _mm_storeu_si128(q + 2 * b + h, _mm_unpacklo_epi64(low, high));
      _mm_storeu_si128(q + 2 * b + h + 8, _mm_unpackhi_epi64(low, high));
    }
  const __m512i sums = half_sums(a.q + 256 * g);
  const __m512 s16 = _mm512_mul_ps(d, _mm512_cvtepi32_ps(sums));
  _mm512_storeu_ps(a.d + 16 * g, d);
  _mm512_storeu_si512(a.sum16 + 16 * g, sums);
  _mm512_storeu_ps(a.s16 + 16 * g, s16);
  _mm256_storeu_ps(a.s + 8 * g, _mm256_add_ps(_mm512_castps512_ps256(s16), _mm512_extractf32x8_ps(s16, 1)));
  return true;
}

void quantize_group_slowly(const float *x, int count, const ActBlocks &a, size_t g) {
  for (int b = 0; b < 8; b++) {
    for (int h = 0; h < 2; h++) {
      const int at = 32 * b + 16 * h, left = count - at;
      const size_t i = 16 * g + 8 * h + b;
      int8_t half[16], *q = a.q + 256 * g + 32 * (b % 4) + 16 * h + 8 * (b / 4);
      a.d[i] = quant::quantize_half(x + at, left <= 0 ? 0 : left < 16 ? left : 16, half, a.sum16 + i);
      memcpy(q, half, 8);
      memcpy(q + 128, half + 8, 8);
      a.s16[i] = a.d[i] * static_cast<float>(a.sum16[i]);
    }
    a.s[8 * g + b] = a.s16[16 * g + b] + a.s16[16 * g + b + 8];
  }
}

} // namespace

void quantize(const float *x, size_t x_stride, uint32_t rows, uint32_t k, const ActBlocks &all) {
  for (uint32_t t = 0; t < rows; t++) {
    const ActBlocks a = all.from(t);
    const float *row = x + t * x_stride;
    const size_t full = k / 256;
    for (size_t g = 0; g < full; g++)
      if (!quantize_group<false>(row + 256 * g, 256, a, g)) quantize_group_slowly(row + 256 * g, 256, a, g);
    const int rest = static_cast<int>(k % 256);
    if (rest && !quantize_group<true>(row + 256 * full, rest, a, full))
      quantize_group_slowly(row + 256 * full, rest, a, full);
  }
}

void scale(float scale, float *y, uint32_t n) {
  const __m512 s = _mm512_set1_ps(scale);
  for_each_16(n, [=](uint32_t i, __mmask16 mask) {
    _mm512_mask_storeu_ps(y + i, mask, _mm512_mul_ps(s, _mm512_maskz_loadu_ps(mask, y + i)));
  });
}

namespace {

float dot(const float *a, const float *b, uint32_t n) {
  __m512 acc[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for_each_64(n, [&](uint32_t i, __mmask16 mask, uint32_t j) {
    acc[j] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, a + i), _mm512_maskz_loadu_ps(mask, b + i), acc[j]);
  });
  return sum64(acc);
}

} // namespace

void rms_norm(const float *x, const float *weight, const float *residual, float eps, float *out, uint32_t n) {
  const float mean = dot(x, x, n) / static_cast<float>(n);
  const __m512 inverse = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean + eps));
  for_each_16(n, [=](uint32_t i, __mmask16 mask) {
    __m512 v = _mm512_mul_ps(_mm512_maskz_loadu_ps(mask, x + i), inverse);
    if (weight) v = _mm512_mul_ps(v, _mm512_maskz_loadu_ps(mask, weight + i));
    if (residual) v = _mm512_add_ps(v, _mm512_maskz_loadu_ps(mask, residual + i));
    _mm512_mask_storeu_ps(out + i, mask, v);
  });
}

void silu_mul(const float *gate, const float *up, float *out, uint32_t n) {
  activate(gate, up, out, n, [](__m512 x) {
    const __m512 e = exp16(_mm512_sub_ps(_mm512_setzero_ps(), x));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
  });
}

void gelu_tanh_mul(const float *gate, const float *up, float *out, uint32_t n) {
  activate(gate, up, out, n, [](__m512 x) { // 0.5 x (1 + tanh(u)) = x / (1 + e^(-2 u))
    const Split exponent = in_double(x, [](__m512d v) {
      const __m512d cubic = _mm512_fmadd_pd(_mm512_mul_pd(v, v), _mm512_set1_pd(0.044715), _mm512_set1_pd(1.0));
      const __m512d u = _mm512_mul_pd(_mm512_mul_pd(v, cubic), _mm512_set1_pd(-1.5957691216057308)); // -2 sqrt(2 / pi)
      return _mm512_min_pd(_mm512_set1_pd(100.0), _mm512_max_pd(_mm512_set1_pd(-120.0), u));
    });
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), exp16(exponent)));
  });
}

void gelu_erf_mul(const float *gate, const float *up, float *out, uint32_t n) {
  activate(gate, up, out, n, [](__m512 x) { // x / 2 erfc(-x / sqrt 2), as x - x / 2 erfc(x / sqrt 2) for x > 0
    const Split exponent = in_double(x, [](__m512d v) {
      return _mm512_max_pd(_mm512_set1_pd(-120.0), _mm512_mul_pd(_mm512_mul_pd(v, v), _mm512_set1_pd(-0.5)));
    });
    const __m512 z = _mm512_mul_ps(_mm512_abs_ps(x), _mm512_set1_ps(0.70710678f));
    const __m512 denominator = _mm512_fmadd_ps(_mm512_set1_ps(2.0f), z, _mm512_set1_ps(1.0f));
    const __m512 erfc = _mm512_div_ps(_mm512_mul_ps(scaled_erfc(z), exp16(exponent)), denominator);
    const __m512 lower = _mm512_mul_ps(_mm512_mul_ps(_mm512_set1_ps(0.5f), x), erfc);
    const __mmask16 positive = _mm512_cmp_ps_mask(x, _mm512_setzero_ps(), _CMP_GT_OQ);
    return _mm512_mask_sub_ps(lower, positive, x, lower);
  });
}

void swiglu_oai(const float *gate, const float *up, float *out, uint32_t n) {
  const auto swish = [](__m512 x) {
    const __m512 e = exp16(_mm512_mul_ps(x, _mm512_set1_ps(-1.702f)));
    return _mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e));
  };
  activate(gate, up, out, n, swish, 1.0f);
}

// tanh |u| = -m / (m + 2) of m = e^(-2 |u|) - 1, which keeps its digits near 0.
void soft_cap(float *x, float cap, uint32_t n) {
  const __m512 one = _mm512_set1_ps(1.0f), minus_two = _mm512_set1_ps(-2.0f), factor = _mm512_set1_ps(cap);
  for_each_16(n, [=](uint32_t i, __mmask16 mask) {
    const __m512 u = _mm512_div_ps(_mm512_maskz_loadu_ps(mask, x + i), factor);
    __m512 exponent;
    const __m512 p =
        reduced_exp(_mm512_max_ps(_mm512_set1_ps(-40.0f), _mm512_mul_ps(_mm512_abs_ps(u), minus_two)), exponent);
    const __m512 power = _mm512_scalef_ps(one, exponent);
    const __m512 m = _mm512_fmadd_ps(power, p, _mm512_sub_ps(power, one));
    const __m512 t = _mm512_div_ps(m, _mm512_sub_ps(minus_two, m));
    const __m512 sign = _mm512_and_ps(u, _mm512_set1_ps(-0.0f));
    _mm512_mask_storeu_ps(x + i, mask, _mm512_mul_ps(factor, _mm512_or_ps(t, sign)));
  });
}

float max(const float *x, uint32_t n) {
  const __m512 lowest = _mm512_set1_ps(-__builtin_inff());
  __m512 m = lowest;
  for_each_16(n, [&](uint32_t i, __mmask16 mask) { m = _mm512_max_ps(m, _mm512_mask_loadu_ps(lowest, mask, x + i)); });
  return _mm512_reduce_max_ps(m);
}

float exp_sum(float *x, float max, uint32_t n) {
  const __m512 top = _mm512_set1_ps(max);
  __m512d sum[2] = {_mm512_setzero_pd(), _mm512_setzero_pd()}; // n may be a vocabulary
  for_each_16(n, [&](uint32_t i, __mmask16 mask) {
    const __m512 e = exp16(_mm512_sub_ps(_mm512_maskz_loadu_ps(mask, x + i), top));
    _mm512_mask_storeu_ps(x + i, mask, e);
    const __m512 kept = _mm512_maskz_mov_ps(mask, e);
    sum[0] = _mm512_add_pd(sum[0], _mm512_cvtps_pd(_mm512_castps512_ps256(kept)));
    sum[1] = _mm512_add_pd(sum[1], _mm512_cvtps_pd(_mm512_extractf32x8_ps(kept, 1)));
  });
  return static_cast<float>(_mm512_reduce_add_pd(_mm512_add_pd(sum[0], sum[1])));
}

} // namespace apu::cpu::avx512

#endif
