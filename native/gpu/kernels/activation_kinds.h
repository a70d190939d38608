// The values of APU_ACT_* (apu.h), which device code does not include; native/gpu/matvec.cpp asserts that they agree.
#pragma once

#include "common.h"

namespace apu::gpu {

enum ActivationKind : u32 { kActNone = 0, kActSilu = 1, kActGeluTanh = 2, kActGeluErf = 3, kActSwigluOai = 4 };

} // namespace apu::gpu
