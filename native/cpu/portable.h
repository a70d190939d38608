// Functions of the portable level, one group a file: rows (helpers of the other ops), matrices (portable.cpp).
#pragma once

#include "kernels.h"

namespace apu::cpu::portable {

void scale(float scale, float *y, uint32_t n);
void f32_to_f16(const float *in, uint16_t *out, uint32_t n);
void rms_norm(const float *x, const float *weight, const float *residual, float eps, float *out, uint32_t n);
void silu_mul(const float *gate, const float *up, float *out, uint32_t n);
void gelu_tanh_mul(const float *gate, const float *up, float *out, uint32_t n);
void gelu_erf_mul(const float *gate, const float *up, float *out, uint32_t n);
void soft_cap(float *x, float cap, uint32_t n);
float max(const float *x, uint32_t n);
float exp_sum(float *x, float max, uint32_t n);

} // namespace apu::cpu::portable
