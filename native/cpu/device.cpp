// Opens and describes the CPU device.
#include "cpu/device.h"

#include <cstdio>
#include <exception>
#include <unistd.h>

namespace apu::cpu {
namespace {

constexpr uint32_t kMaxThreads = 512;

const char *isa_name(uint32_t isa) {
  switch (isa) {
  case APU_ISA_PORTABLE: return "portable";
  case APU_ISA_AVX2: return "avx2";
  case APU_ISA_AVX2_VNNI: return "avx2vnni";
  case APU_ISA_AVX512: return "avx512";
  default: return "?";
  }
}

uint64_t pages(int which) {
  return uint64_t(sysconf(which)) * uint64_t(sysconf(_SC_PAGESIZE));
}

} // namespace

apu_status open_device(const apu_device_options &o, std::unique_ptr<apu_device> &out) {
  if (o.threads > kMaxThreads)
    return fail(APU_E_INVALID, "device cpu: threads is %u, expected 0 (automatic) to %u", o.threads, kMaxThreads);
  if (o.isa > APU_ISA_AVX2_VNNI)
    return fail(APU_E_INVALID, "device cpu: isa is %u, expected 0 (automatic) to %u", o.isa,
                unsigned(APU_ISA_AVX2_VNNI));
  if (o.spin_us > 1000000) return fail(APU_E_INVALID, "device cpu: spin_us is %u, expected at most 1000000", o.spin_us);
  const uint32_t isa = o.isa == APU_ISA_AUTO ? best_isa() : o.isa;
  const KernelTable *kernels = kernel_table(isa);
  if (!kernels)
    return fail(APU_E_UNSUPPORTED, "device cpu: this processor or build lacks the level %s; the best it has is %s",
                isa_name(isa), isa_name(best_isa()));
  try {
    out = std::make_unique<Device>(isa, kernels, Pool::Options{o.threads, o.pin != 0, o.spin_us});
  } catch (const std::exception &e) {
    return fail(APU_E_MEMORY, "device cpu: cannot start the workers: %s", e.what());
  }
  return APU_OK;
}

void Device::props(apu_device_props &out) const {
  std::snprintf(out.kind, sizeof(out.kind), "%s", kind());
  std::snprintf(out.name, sizeof(out.name), "%s", processor_name().c_str());
  std::snprintf(out.arch, sizeof(out.arch), "%s", isa_name(isa));
  out.integrated = 1;
  out.threads = pool.size();
  out.isa = isa;
  out.pageable = 1;
  out.memory_bytes = pages(_SC_PHYS_PAGES);
}

apu_status Device::memory(uint64_t &free, uint64_t &total) {
  free = pages(_SC_AVPHYS_PAGES);
  total = pages(_SC_PHYS_PAGES);
  return APU_OK;
}

} // namespace apu::cpu
