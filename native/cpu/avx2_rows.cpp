// Row helpers of norms, attention and activations at the AVX2 level. Sums run in 16 lanes, folded as in matrix
// products. What is left of a row beyond full registers passes through the same code in a padded buffer, so an
// element's result does not depend on where in the row it stands.
#if defined(__AVX2__)

#include <immintrin.h>

#include <cstring>

#include "avx2.h"
#include "avx2_math.h"

namespace apu::cpu::avx2 {

namespace {

// The first n < 8 elements, zero beyond.
__m256 load_part(const float *p, uint32_t n) {
  alignas(32) float v[8] = {};
  std::memcpy(v, p, n * sizeof(float));
  return _mm256_load_ps(v);
}

void store_part(float *p, __m256 x, uint32_t n) {
  alignas(32) float v[8];
  _mm256_store_ps(v, x);
  std::memcpy(p, v, n * sizeof(float));
}

__m256 load8(const float *p) {
  return _mm256_loadu_ps(p);
}
float dot(const float *a, const float *b, uint32_t n) {
  __m256 low = _mm256_setzero_ps(), high = low;
  uint32_t i = 0;
  for (; i + 16 <= n; i += 16) {
    low = _mm256_fmadd_ps(load8(a + i), load8(b + i), low);
    high = _mm256_fmadd_ps(load8(a + i + 8), load8(b + i + 8), high);
  }
  if (i + 8 <= n) {
    low = _mm256_fmadd_ps(load8(a + i), load8(b + i), low);
    if (i + 8 < n) high = _mm256_fmadd_ps(load_part(a + i + 8, n - i - 8), load_part(b + i + 8, n - i - 8), high);
  } else if (i < n) {
    low = _mm256_fmadd_ps(load_part(a + i, n - i), load_part(b + i, n - i), low);
  }
  return sum16(low, high);
}

// out = f(a, b) by elements
template <class F> void map2(const float *a, const float *b, float *out, uint32_t n, F f) {
  uint32_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, f(load8(a + i), load8(b + i)));
  if (i < n) store_part(out + i, f(load_part(a + i, n - i), load_part(b + i, n - i)), n - i);
}

__m256 logistic8(__m256 x) { // x / (1 + exp(-x)) is x times this
  const __m256 one = _mm256_set1_ps(1.0f);
  return _mm256_div_ps(one, _mm256_add_ps(one, exp8(_mm256_xor_ps(x, _mm256_set1_ps(-0.0f)))));
}

} // namespace

void scale(float scale, float *y, uint32_t n) {
  const __m256 factor = _mm256_set1_ps(scale);
  uint32_t i = 0;
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(y + i, _mm256_mul_ps(factor, load8(y + i)));
  for (; i < n; ++i) y[i] *= scale;
}

void rms_norm(const float *x, const float *weight, const float *residual, float eps, float *out, uint32_t n) {
  const float square = dot(x, x, n);
  const float inverse = 1.0f / __builtin_sqrtf(square / static_cast<float>(n) + eps);
  const __m256 factor = _mm256_set1_ps(inverse);
  uint32_t i = 0;
  for (; i + 8 <= n; i += 8) {
    __m256 v = _mm256_mul_ps(load8(x + i), factor);
    if (weight) v = _mm256_mul_ps(v, load8(weight + i));
    if (residual) v = _mm256_add_ps(v, load8(residual + i));
    _mm256_storeu_ps(out + i, v);
  }
  for (; i < n; ++i) {
    float v = x[i] * inverse;
    if (weight) v *= weight[i];
    if (residual) v += residual[i];
    out[i] = v;
  }
}

void silu_mul(const float *gate, const float *up, float *out, uint32_t n) {
  map2(gate, up, out, n, [](__m256 g, __m256 u) { return _mm256_mul_ps(_mm256_mul_ps(g, logistic8(g)), u); });
}

void gelu_tanh_mul(const float *gate, const float *up, float *out, uint32_t n) {
  map2(gate, up, out, n, [](__m256 g, __m256 u) { // 0.5 (1 + tanh(z / 2)) = 1 / (1 + exp(-z))
    const __m256 cubic = _mm256_fmadd_ps(_mm256_mul_ps(g, g), _mm256_set1_ps(0.044715f), _mm256_set1_ps(1.0f));
    const __m256 z = _mm256_mul_ps(_mm256_mul_ps(g, _mm256_set1_ps(1.59576912f)), cubic);
    return _mm256_mul_ps(_mm256_mul_ps(g, logistic8(z)), u);
  });
}

void gelu_erf_mul(const float *gate, const float *up, float *out, uint32_t n) {
  map2(gate, up, out, n, [](__m256 g, __m256 u) { return _mm256_mul_ps(_mm256_mul_ps(g, normal_cdf8(g)), u); });
}

void swiglu_oai(const float *gate, const float *up, float *out, uint32_t n) {
  map2(gate, up, out, n, [](__m256 g, __m256 u) {
    const __m256 logistic = logistic8(_mm256_mul_ps(g, _mm256_set1_ps(1.702f)));
    return _mm256_mul_ps(_mm256_mul_ps(g, logistic), _mm256_add_ps(u, _mm256_set1_ps(1.0f)));
  });
}

// tanh |u| = -m / (m + 2) of m = e^(-2 |u|) - 1, which keeps its digits near 0.
void soft_cap(float *x, float cap, uint32_t n) {
  const __m256 sign = _mm256_set1_ps(-0.0f), minus_two = _mm256_set1_ps(-2.0f), factor = _mm256_set1_ps(cap);
  map2(x, x, x, n, [=](__m256 v, __m256) {
    const __m256 u = _mm256_div_ps(v, factor);
    const __m256 m =
        expm1_8(_mm256_max_ps(_mm256_set1_ps(-40.0f), _mm256_mul_ps(_mm256_andnot_ps(sign, u), minus_two)));
    const __m256 t = _mm256_div_ps(m, _mm256_sub_ps(minus_two, m));
    return _mm256_mul_ps(factor, _mm256_or_ps(t, _mm256_and_ps(u, sign)));
  });
}

float max(const float *x, uint32_t n) {
  const float least = -__builtin_inff();
  __m256 low = _mm256_set1_ps(least), high = low;
  uint32_t i = 0;
  for (; i + 16 <= n; i += 16) {
    low = _mm256_max_ps(load8(x + i), low);
    high = _mm256_max_ps(load8(x + i + 8), high);
  }
  low = _mm256_max_ps(low, high);
  __m128 four = _mm_max_ps(_mm256_castps256_ps128(low), _mm256_extractf128_ps(low, 1));
  four = _mm_max_ps(four, _mm_movehl_ps(four, four));
  float m = _mm_cvtss_f32(_mm_max_ss(four, _mm_movehdup_ps(four)));
  for (; i < n; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

float exp_sum(float *x, float max, uint32_t n) {
  const __m256 top = _mm256_set1_ps(max);
  __m256 low = _mm256_setzero_ps(), high = low;
  uint32_t i = 0;
  for (; i + 16 <= n; i += 16) {
    const __m256 a = exp8(_mm256_sub_ps(load8(x + i), top)), b = exp8(_mm256_sub_ps(load8(x + i + 8), top));
    _mm256_storeu_ps(x + i, a);
    _mm256_storeu_ps(x + i + 8, b);
    low = _mm256_add_ps(low, a);
    high = _mm256_add_ps(high, b);
  }
  for (; i < n; i += 8) {
    const uint32_t count = n - i < 8 ? n - i : 8;
    store_part(x + i, exp8(_mm256_sub_ps(load_part(x + i, count), top)), count);
    low = _mm256_add_ps(low, load_part(x + i, count));
  }
  return sum16(low, high);
}

} // namespace apu::cpu::avx2

#endif
