// matvec of the types with blocks of 256 whose integers are stored plainly.
#include "formats_k.h"

namespace apu::gpu {

APU_MATVEC_KERNELS(q4_k, Q4_K)
APU_MATVEC_KERNELS(q5_k, Q5_K)
APU_MATVEC_KERNELS(q6_k, Q6_K)

} // namespace apu::gpu
