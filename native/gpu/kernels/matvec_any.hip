// matvec of the types without a Format, and of every quantised type in precision "exact".
#include "matvec_any.h"

namespace apu::gpu {

APU_MATVEC_ROWS(any, UnpackedProduct<false>)
APU_MATVEC_ROWS(exact, UnpackedProduct<true>)

} // namespace apu::gpu
