// Which instruction-set level runs, and what the dtypes are: GGUF ids, block sizes and which of them have kernels.
// Compiled without any level's flags. A level counts as present when the build has it, the processor has every
// extension that its files are compiled with, and the operating system saves the registers.
#include "kernels.h"

#include "../include/apu.h"
#include "../quant/visit.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace apu::cpu {

namespace {

struct TypeInfo {
  uint32_t elements; // per block
  uint32_t bytes;    // per block
  bool quantized;
  bool matmul;
};

constexpr TypeInfo kUnknown{0, 0, false, false};

TypeInfo type_info(uint32_t dtype) {
  switch (dtype) {
  case APU_F32: return {1, 4, false, true};
  case APU_F16: return {1, 2, false, true};
  case APU_BF16: return {1, 2, false, true};
  case APU_F8_E4M3: return {1, 1, false, true};
  case APU_I32: return {1, 4, false, false};
  default: break;
  }
  TypeInfo info = kUnknown;
  quant::with_block_type(dtype, [&]<class B>() { info = {quant::Traits<B>::elements, sizeof(B), true, true}; });
  return info;
}

#if defined(__x86_64__)
bool has_avx2() {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  if (!__get_cpuid(1, &eax, &ebx, &ecx, &edx)) return false;
  const bool f16c = (ecx & bit_F16C) != 0; // clang before 17 does not know the name in __builtin_cpu_supports
  return f16c && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2");
}

bool has_avx2_vex() {
  uint32_t eax = 0, ebx = 0, ecx = 0, edx = 0;
  return has_avx2() && __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) && (eax & bit_AVXVNNI) != 0;
}

bool has_avx2_evex() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vnni");
}

bool has_avx512() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi") && __builtin_cpu_supports("gfni");
}
#endif

} // namespace

size_t row_bytes(uint32_t dtype, uint64_t k) {
  const TypeInfo info = type_info(dtype);
  if (info.elements == 0 || k % info.elements != 0) return 0;
  const uint64_t blocks = k / info.elements;
  if (blocks > SIZE_MAX / info.bytes) return 0;
  return static_cast<size_t>(blocks) * info.bytes;
}

bool is_quantized(uint32_t dtype) {
  return type_info(dtype).quantized;
}

bool has_quantized_rows(uint32_t dtype, int32_t precision) {
  return is_quantized(dtype) && precision != APU_PRECISION_EXACT;
}

bool has_matmul(uint32_t dtype) {
  return type_info(dtype).matmul;
}

const KernelTable *kernel_table(uint32_t isa) {
  switch (isa) {
  case APU_ISA_AUTO: return kernel_table(best_isa());
  case APU_ISA_PORTABLE: return portable_table();
#if defined(__x86_64__)
  case APU_ISA_AVX2: return has_avx2() ? avx2_table() : nullptr;
  case APU_ISA_AVX2_VNNI:
    return has_avx2_vex() ? avx2_vnni_table(false) : has_avx2_evex() ? avx2_vnni_table(true) : nullptr;
  case APU_ISA_AVX512: return has_avx512() ? avx512_table() : nullptr;
#endif
  default: return nullptr;
  }
}

uint32_t best_isa() {
  constexpr uint32_t levels[] = {APU_ISA_AVX512, APU_ISA_AVX2_VNNI, APU_ISA_AVX2};
  for (const uint32_t isa : levels)
    if (kernel_table(isa)) return isa;
  return APU_ISA_PORTABLE;
}

} // namespace apu::cpu
