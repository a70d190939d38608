// AVX2 level: its table. Null on builds for other architectures.
#include "kernels.h"

namespace apu::cpu {

const KernelTable *avx2_table() { return nullptr; }

} // namespace apu::cpu
