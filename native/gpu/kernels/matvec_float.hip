// matvec of the float types.
#include "matvec_float.h"

namespace apu::gpu {

APU_MATVEC_ROWS(f32, FloatProduct<F32Weights>)
APU_MATVEC_ROWS(f16, FloatProduct<F16Weights>)
APU_MATVEC_ROWS(bf16, FloatProduct<BF16Weights>)

} // namespace apu::gpu
