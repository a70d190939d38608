// The AVX-512 level's place until its kernels are in: weak, so that the real table replaces it.
#include "cpu/kernels.h"

namespace apu::cpu {

__attribute__((weak)) const KernelTable *avx512_table() {
  return nullptr;
}

} // namespace apu::cpu
