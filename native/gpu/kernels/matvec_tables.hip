// matvec of Q2_K, Q3_K and the types whose values come from tables.
#include "formats_q2_q3.h"
#include "formats_tables.h"

namespace apu::gpu {

APU_MATVEC_KERNELS(q2_k, Q2_K)
APU_MATVEC_KERNELS(q3_k, Q3_K)
APU_MATVEC_KERNELS(iq4_nl, IQ4_NL)
APU_MATVEC_KERNELS(iq4_xs, IQ4_XS)
APU_MATVEC_KERNELS(mxfp4, MXFP4)
APU_MATVEC_KERNELS(iq2_xxs, IQ2_XXS)

} // namespace apu::gpu
