// Row helpers of norms, attention and activations, at the portable level.
// Sums run in 16 lanes with separate multiply and add, a form that compilers turn into vectors on any architecture;
// only matrix products promise the same bits at every level. GELU and SiLU divide by 1 + exp(.) instead of using
// tanh or erf, which would cancel for negative arguments.
#include "portable.h"

#include <cmath>
#include <cstring>
#include <limits>

#include "../quant/activations.h"
#include "../quant/unpack.h"

namespace apu::cpu::portable {

namespace {

using quant::kFloatLanes;

// Rounded to nearest even; subnormals, infinities and NaN are kept.
uint16_t to_f16(float f) {
  uint32_t bits;
  std::memcpy(&bits, &f, sizeof bits);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u | ((magnitude >> 13) & 0x3ffu); // quiet NaN
  } else if (magnitude >= 0x47800000u) {
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) { // below 2^-14: a float of 0.5 has the ulp of F16's subnormals
    std::memcpy(&f, &magnitude, sizeof f);
    f += 0.5f;
    std::memcpy(&half, &f, sizeof half);
    half -= 0x3f000000u;
  } else {
    magnitude += 0xfffu + ((magnitude >> 13) & 1u);
    half = (magnitude - (112u << 23)) >> 13;
  }
  return static_cast<uint16_t>(sign | half);
}

// Sums term(i) for i in [0, n).
template <class Term> float sum_terms(uint32_t n, Term term) {
  float lane[kFloatLanes] = {};
  uint32_t i = 0;
  for (; i + kFloatLanes <= n; i += kFloatLanes)
    for (uint32_t j = 0; j < kFloatLanes; ++j) lane[j] += term(i + j);
  for (uint32_t j = 0; i + j < n; ++j) lane[j] += term(i + j);
  return quant::sum16(lane);
}

} // namespace

void scale(float scale, float *y, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) y[i] *= scale;
}

void f32_to_f16(const float *in, uint16_t *out, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) out[i] = to_f16(in[i]);
}

void rms_norm(const float *x, const float *weight, const float *residual, float eps, float *out, uint32_t n) {
  const float square = sum_terms(n, [=](uint32_t i) { return x[i] * x[i]; });
  const float inverse = 1.0f / std::sqrt(square / static_cast<float>(n) + eps);
  for (uint32_t i = 0; i < n; ++i) {
    float v = x[i] * inverse;
    if (weight) v *= weight[i];
    if (residual) v += residual[i];
    out[i] = v;
  }
}

void silu_mul(const float *gate, const float *up, float *out, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

void gelu_tanh_mul(const float *gate, const float *up, float *out, uint32_t n) {
  constexpr float kTwoRootTwoOverPi = 1.5957691216057308f;
  for (uint32_t i = 0; i < n; ++i) {
    const float x = gate[i];
    const float u = kTwoRootTwoOverPi * x * (1.0f + 0.044715f * x * x); // 0.5 (1 + tanh(u / 2)) = 1 / (1 + exp(-u))
    out[i] = x / (1.0f + std::exp(-u)) * up[i];
  }
}

void gelu_erf_mul(const float *gate, const float *up, float *out, uint32_t n) {
  constexpr float kRootHalf = 0.70710678118654752f;
  for (uint32_t i = 0; i < n; ++i) out[i] = 0.5f * gate[i] * std::erfc(-kRootHalf * gate[i]) * up[i];
}

void swiglu_oai(const float *gate, const float *up, float *out, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + std::exp(-1.702f * gate[i])) * (up[i] + 1.0f);
}

void soft_cap(float *x, float cap, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) x[i] = cap * std::tanh(x[i] / cap);
}

float max(const float *x, uint32_t n) {
  float m = -std::numeric_limits<float>::infinity();
  for (uint32_t i = 0; i < n; ++i) m = x[i] > m ? x[i] : m;
  return m;
}

float exp_sum(float *x, float max, uint32_t n) {
  for (uint32_t i = 0; i < n; ++i) x[i] = std::exp(x[i] - max);
  return sum_terms(n, [=](uint32_t i) { return x[i]; });
}

} // namespace apu::cpu::portable
