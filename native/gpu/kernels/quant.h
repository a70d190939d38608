// How native/quant's headers are compiled for a device: what their macros (native/quant/target.h) mean here.
#pragma once

#include "gpu.h"

#define APU_QUANT_FUNCTION APU_DEVICE
#define APU_QUANT_TABLE APU_CONSTANT
#define APU_QUANT_COPY_BYTES __builtin_memcpy
#define APU_QUANT_HALF_TO_FLOAT ::apu::gpu::half_to_float
#define APU_QUANT_ABS ::apu::gpu::fabs_f32
#define APU_QUANT_ROUND_EVEN ::apu::gpu::round_even_f32
