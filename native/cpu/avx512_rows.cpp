// Quantisation of activations (the bits of quant/activations.h) and row helpers of norms, attention and activation
// functions. The helpers are accurate to a few units in the last place but need not have the same bits at every level.
#include "avx512.h"
#include "avx512_common.h"

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

APU_INLINE __m512 load_f16(const uint16_t *p, __mmask16 mask) {
  return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(mask, p));
}

// e^x, relative error below 1e-7, for all floats: r = x - n ln 2, a polynomial for e^r, times 2^n by scalef, which
// rounds denormals and overflows correctly.
APU_INLINE __m512 exp16(__m512 x) {
  x = _mm512_min_ps(_mm512_set1_ps(100.0f), _mm512_max_ps(_mm512_set1_ps(-120.0f), x)); // a NaN passes
  const __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x); // exact: n has few bits
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  __m512 p = _mm512_set1_ps(0.0001990965974982828f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0013946457765996456f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.008333280682563782f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.04166626185178757f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.1666666716337204f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
  p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r);
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

template <class Activation>
APU_INLINE void activate(const float *gate, const float *up, float *out, uint32_t n, Activation f) {
  for_each_16(n, [=](uint32_t i, __mmask16 mask) {
    const __m512 g = _mm512_maskz_loadu_ps(mask, gate + i), u = _mm512_maskz_loadu_ps(mask, up + i);
    _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(f(g), u));
  });
}

} // namespace

void quantize(const float *x, size_t x_stride, uint32_t rows, uint32_t k, const ActBlocks &a) {
  const __m512i magnitude = _mm512_set1_epi32(0x7fffffff);
  for (uint32_t t = 0; t < rows; t++) {
    const float *row = x + t * x_stride;
    for (uint32_t b = 0; b < a.blocks; b++) {
      const size_t at = size_t{t} * a.blocks + b;
      const uint32_t first = b * quant::kBlock;
      if (first + quant::kBlock > k) { // the last block, and padding
        quant::quantize_block(row + first, first < k ? k - first : 0, a.q + at * quant::kBlock, a.d + at, a.s + at,
                              a.sum16 + 2 * at);
        continue;
      }
      const __m512 v0 = _mm512_loadu_ps(row + first), v1 = _mm512_loadu_ps(row + first + 16);
      const __m512i m0 = _mm512_and_si512(_mm512_castps_si512(v0), magnitude);
      const __m512i m1 = _mm512_and_si512(_mm512_castps_si512(v1), magnitude);
      const uint32_t amax_bits = _mm512_reduce_max_epu32(_mm512_max_epu32(m0, m1));
      float amax;
      memcpy(&amax, &amax_bits, 4);
      if (!(amax >= quant::kSmallestAmax && amax_bits < 0x7f800000u)) {
        quant::quantize_block(row + first, quant::kBlock, a.q + at * quant::kBlock, a.d + at, a.s + at,
                              a.sum16 + 2 * at);
        continue;
      }
      const float d = amax / 127.0f;
      const __m512 inverse = _mm512_set1_ps(1.0f / d);
      const __m512i q0 = _mm512_cvtps_epi32(_mm512_mul_ps(v0, inverse)),
                    q1 = _mm512_cvtps_epi32(_mm512_mul_ps(v1, inverse));
      auto *q = reinterpret_cast<__m128i *>(a.q + at * quant::kBlock);
      _mm_storeu_si128(q, _mm512_cvtepi32_epi8(q0));
      _mm_storeu_si128(q + 1, _mm512_cvtepi32_epi8(q1));
      const int32_t sum0 = _mm512_reduce_add_epi32(q0), sum1 = _mm512_reduce_add_epi32(q1);
      a.sum16[2 * at] = sum0;
      a.sum16[2 * at + 1] = sum1;
      a.d[at] = d;
      a.s[at] = d * static_cast<float>(sum0 + sum1);
    }
  }
}

float dot(const float *a, const float *b, uint32_t n) {
  __m512 acc[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for_each_64(n, [&](uint32_t i, __mmask16 mask, uint32_t j) {
    acc[j] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, a + i), _mm512_maskz_loadu_ps(mask, b + i), acc[j]);
  });
  return sum64(acc);
}

float dot_f16(const float *a, const uint16_t *b, uint32_t n) {
  __m512 acc[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for_each_64(n, [&](uint32_t i, __mmask16 mask, uint32_t j) {
    acc[j] = _mm512_fmadd_ps(_mm512_maskz_loadu_ps(mask, a + i), load_f16(b + i, mask), acc[j]);
  });
  return sum64(acc);
}

void axpy(float scale, const float *x, float *y, uint32_t n) {
  const __m512 s = _mm512_set1_ps(scale);
  for_each_16(n, [=](uint32_t i, __mmask16 mask) {
    const __m512 v = _mm512_fmadd_ps(s, _mm512_maskz_loadu_ps(mask, x + i), _mm512_maskz_loadu_ps(mask, y + i));
    _mm512_mask_storeu_ps(y + i, mask, v);
  });
}

void axpy_f16(float scale, const uint16_t *x, float *y, uint32_t n) {
  const __m512 s = _mm512_set1_ps(scale);
  for_each_16(n, [=](uint32_t i, __mmask16 mask) {
    _mm512_mask_storeu_ps(y + i, mask, _mm512_fmadd_ps(s, load_f16(x + i, mask), _mm512_maskz_loadu_ps(mask, y + i)));
  });
}

void scale(float scale, float *y, uint32_t n) {
  const __m512 s = _mm512_set1_ps(scale);
  for_each_16(n, [=](uint32_t i, __mmask16 mask) {
    _mm512_mask_storeu_ps(y + i, mask, _mm512_mul_ps(s, _mm512_maskz_loadu_ps(mask, y + i)));
  });
}

void f32_to_f16(const float *in, uint16_t *out, uint32_t n) {
  for_each_16(n, [=](uint32_t i, __mmask16 mask) {
    const __m256i halves = _mm512_cvtps_ph(_mm512_maskz_loadu_ps(mask, in + i), _MM_FROUND_TO_NEAREST_INT);
    _mm256_mask_storeu_epi16(out + i, mask, halves);
  });
}

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
