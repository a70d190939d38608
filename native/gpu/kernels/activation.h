// What is done to a product's result: gated activations and the soft cap, one definition for matvec, GEMM and experts.
// SiLU and GELU divide by 1 + exp(.), as on the CPU, which does not cancel for negative arguments.
#pragma once

#include "activation_kinds.h"
#include "gpu.h"

namespace apu::gpu {

// Complementary error function: t exp(-z^2 + p(t)) with t = 1 / (1 + |z| / 2), a Chebyshev fit whose relative error is
// 1.2e-7 (Press et al., Numerical Recipes, section 6.2).
APU_DEVICE float erfc_f32(float x) {
  const float z = fabs_f32(x), t = 1.0f / (1.0f + 0.5f * z);
  float p = 0.17087277f;
  p = fma_f32(p, t, -0.82215223f);
  p = fma_f32(p, t, 1.48851587f);
  p = fma_f32(p, t, -1.13520398f);
  p = fma_f32(p, t, 0.27886807f);
  p = fma_f32(p, t, -0.18628806f);
  p = fma_f32(p, t, 0.09678418f);
  p = fma_f32(p, t, 0.37409196f);
  p = fma_f32(p, t, 1.00002368f);
  p = fma_f32(p, t, -1.26551223f);
  const float y = t * exp_f32(fma_f32(-z, z, p));
  return x < 0 ? 2.0f - y : y;
}

// Small arguments by the series, where 1 - 2 / (1 + exp(2x)) would cancel.
APU_DEVICE float tanh_f32(float x) {
  const float a = fabs_f32(x);
  if (a < 0.3f) {
    const float s = x * x;
    float p = fma_f32(s, 0.021869488f, -0.053968254f); // 62/2835, -17/315
    p = fma_f32(p, s, 0.13333333f);
    p = fma_f32(p, s, -0.33333333f);
    return fma_f32(x * s, p, x);
  }
  const float y = 1.0f - 2.0f / (1.0f + exp_f32(2.0f * a));
  return x < 0 ? -y : y;
}

// limit 0: none; else of the gate from above, of up on both sides. What is no number stays so.
APU_DEVICE float gated_activation(u32 kind, float limit, float gate, float up) {
  if (limit != 0) {
    gate = gate > limit ? limit : gate;
    up = up > limit ? limit : up < -limit ? -limit : up;
  }
  if (kind == kActSilu) return gate / (1.0f + exp_f32(-gate)) * up;
  if (kind == kActGeluTanh) {
    const float u = 1.5957691216057308f * gate * (1.0f + 0.044715f * gate * gate); // 2 sqrt(2 / pi)
    return gate / (1.0f + exp_f32(-u)) * up;
  }
  if (kind == kActSwigluOai) return gate / (1.0f + exp_f32(-1.702f * gate)) * (up + 1.0f);
  return 0.5f * gate * erfc_f32(-0.70710678118654752f * gate) * up;
}

APU_DEVICE float soft_cap(float x, float cap) {
  return cap * tanh_f32(x / cap);
}

} // namespace apu::gpu
