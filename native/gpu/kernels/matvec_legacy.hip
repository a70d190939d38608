// matvec of the types with blocks of 32.
#include "formats_legacy.h"

namespace apu::gpu {

APU_MATVEC_KERNELS(q8_0, Q8_0)
APU_MATVEC_KERNELS(q4_0, Q4_0)
APU_MATVEC_KERNELS(q4_1, Q4_1)
APU_MATVEC_KERNELS(q5_0, Q5_0)
APU_MATVEC_KERNELS(q5_1, Q5_1)

} // namespace apu::gpu
