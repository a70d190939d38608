// The CPU as a device: the pool of workers and the kernel table of one instruction-set level.
#pragma once

#include "backend.h"
#include "cpu/kernels.h"
#include "cpu/pool.h"

namespace apu::cpu {

class Device final : public apu_device {
public:
  Device(uint32_t isa_level, const KernelTable *table, const Pool::Options &options)
      : isa(isa_level), kernels(table), pool(options) {}

  const char *kind() const override { return "cpu"; }
  void props(apu_device_props &out) const override;
  apu_status memory(uint64_t &free, uint64_t &total) override;
  apu_status register_memory(const void *host, uint64_t bytes, uint32_t strategy, uint32_t way,
                             std::unique_ptr<apu_region> &out) override;
  apu_status alloc_memory(uint64_t bytes, std::unique_ptr<apu_region> &out) override;
  apu_status copy(uint64_t to, uint64_t from, uint64_t bytes, bool to_host, bool from_host) override;
  apu_status open_stager(uint64_t ring_bytes, std::unique_ptr<apu_stager> &out) override;
  apu_status create_plan(const apu_plan_desc &desc, apu_plan **out) override; // plan_create.cpp
  apu_status kernel_matmul(const KernelProduct &product, float *y) override;  // kernel_api.cpp
  apu_status kernel_read(const void *in, uint64_t bytes, uint32_t repeats, double &gb_per_s) override;
  apu_status kernel_gather(const uint64_t *parts, uint32_t count, uint64_t bytes, uint32_t repeats,
                           double &gb_per_s) override;
  apu_status kernel_checksum(uint64_t address, uint64_t bytes, uint64_t &out) override;
  apu_status kernel_time(const KernelProduct &product, uint32_t count, uint32_t repeats, double &nanoseconds) override;

  const uint32_t isa; // APU_ISA_*
  const KernelTable *const kernels;
  Pool pool;
};

// Null where the device is of another kind.
inline Device *as_cpu(apu_device *device) {
  return dynamic_cast<Device *>(device);
}

} // namespace apu::cpu
