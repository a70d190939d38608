// Opens and describes the CPU device. Other kinds are refused here until their backends are built in.
#include "cpu/device.h"

#include "common.h"

#include <cstdio>
#include <cstring>
#include <exception>
#include <unistd.h>

using namespace apu;

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

} // namespace

apu_status apu_device_open(const char *kind, int32_t index, const apu_device_options *options, apu_device **out) {
  if (!kind || !out) return fail(APU_E_INVALID, "apu_device_open: kind and out must not be NULL");
  *out = nullptr;
  if (std::strcmp(kind, "cpu") != 0)
    return fail(APU_E_UNSUPPORTED, "device kind \"%s\" is not in this build: expected \"cpu\"", kind);
  if (index != 0) return fail(APU_E_INVALID, "device cpu: index %d does not exist, expected 0", index);
  apu_device_options o = options ? *options : apu_device_options{};
  if (o.threads > kMaxThreads)
    return fail(APU_E_INVALID, "device cpu: threads is %u, expected 0 (automatic) to %u", o.threads, kMaxThreads);
  if (o.isa > APU_ISA_AVX2_VNNI)
    return fail(APU_E_INVALID, "device cpu: isa is %u, expected 0 (automatic) to %u", o.isa,
                unsigned(APU_ISA_AVX2_VNNI));
  if (o.spin_us > 1000000) return fail(APU_E_INVALID, "device cpu: spin_us is %u, expected at most 1000000", o.spin_us);
  uint32_t isa = o.isa == APU_ISA_AUTO ? cpu::best_isa() : o.isa;
  const cpu::KernelTable *kernels = cpu::kernel_table(isa);
  if (!kernels)
    return fail(APU_E_UNSUPPORTED, "device cpu: this processor or build lacks the level %s; the best it has is %s",
                isa_name(isa), isa_name(cpu::best_isa()));
  try {
    *out = new apu_device{isa, kernels, cpu::Pool({o.threads, o.pin != 0, o.spin_us})};
  } catch (const std::exception &e) {
    return fail(APU_E_MEMORY, "device cpu: cannot start the workers: %s", e.what());
  }
  return APU_OK;
}

apu_status apu_device_get_props(apu_device *device, apu_device_props *out) {
  if (!device || !out) return fail(APU_E_INVALID, "apu_device_get_props: device and out must not be NULL");
  std::memset(out, 0, sizeof(*out));
  std::snprintf(out->kind, sizeof(out->kind), "cpu");
  std::snprintf(out->name, sizeof(out->name), "%s", cpu::processor_name().c_str());
  std::snprintf(out->arch, sizeof(out->arch), "%s", isa_name(device->isa));
  out->integrated = 1;
  out->threads = device->pool.size();
  out->isa = device->isa;
  out->memory_bytes = uint64_t(sysconf(_SC_PHYS_PAGES)) * uint64_t(sysconf(_SC_PAGESIZE));
  return APU_OK;
}

void apu_device_close(apu_device *device) {
  delete device;
}
