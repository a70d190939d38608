// Functions of the portable level, one group a file: rows (helpers of the other ops), matrices (portable.cpp).
#pragma once

#include "kernels.h"

namespace apu::cpu::portable {

#include "row_helpers.h"
void f32_to_f16(const float *in, uint16_t *out, uint32_t n);

} // namespace apu::cpu::portable
