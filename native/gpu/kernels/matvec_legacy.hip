// matvec of the types with blocks of 32.
#include "formats_legacy.h"

namespace apu::gpu {

APU_MATVEC_KERNELS(q8_0, Q8_0)
APU_MATVEC_KERNELS(q4_0, Q4_0)

} // namespace apu::gpu
