// A GPU as a device: its driver, its properties and the one module of kernels built for it.
//
// Kernels are looked up by name once and kept. One stream carries copies and fills; plans have streams of their own.
// Every thread that calls the driver calls `use` first.
#pragma once

#include "backend.h"
#include "gpu/driver.h"

#include <map>
#include <mutex>
#include <string>

namespace apu::gpu {

struct Kernel {
  Function function = nullptr;
  const char *name = ""; // lives as long as the device
};

class Device final : public apu_device {
public:
  Device(Driver *driver, uint32_t index) : driver_(driver), index_(index) {}
  ~Device() override;
  // Properties, module and stream. `kernels` names the folder of code objects.
  apu_status open(const char *kernels);

  const char *kind() const override { return driver_->kind(); }
  void props(apu_device_props &out) const override;
  apu_status memory(uint64_t &free, uint64_t &total) override;
  apu_status register_memory(const void *host, uint64_t bytes, uint32_t strategy, uint32_t way,
                             std::unique_ptr<apu_region> &out) override; // register.cpp
  apu_status alloc_memory(uint64_t bytes, std::unique_ptr<apu_region> &out) override;
  apu_status copy(uint64_t to, uint64_t from, uint64_t bytes, bool to_host, bool from_host) override;
  apu_status open_stager(uint64_t ring_bytes, std::unique_ptr<apu_stager> &out) override; // stager.cpp
  apu_status create_plan(const apu_plan_desc &desc, apu_plan **out) override;
  apu_status kernel_matmul(const KernelProduct &product, float *y) override; // kernel_api.cpp
  apu_status kernel_read(const void *in, uint64_t bytes, uint32_t repeats, double &gb_per_s) override;
  apu_status kernel_gather(const uint64_t *parts, uint32_t count, uint64_t bytes, uint32_t repeats,
                           double &gb_per_s) override;
  apu_status kernel_checksum(uint64_t address, uint64_t bytes, uint64_t &out) override;
  apu_status kernel_time(const KernelProduct &product, uint32_t count, uint32_t repeats, double &nanoseconds) override;

  apu_status use() { return driver_->use_device(index_); } // for the calling thread
  uint32_t index() const { return index_; }
  Driver &driver() const { return *driver_; }
  const DriverProps &driver_props() const { return props_; }
  Stream stream() const { return stream_; }
  // The kernel of that name, allowed `dynamic_lds` bytes; APU_E_UNSUPPORTED where the module lacks it.
  apu_status kernel(const std::string &name, uint32_t dynamic_lds, Kernel &out);

private:
  apu_status reach_memory(const void *host, uint64_t bytes, std::unique_ptr<apu_region> &out);
  apu_status stage_memory(const void *host, uint64_t bytes, std::unique_ptr<apu_region> &out); // memory.cpp

  struct Entry {
    Function function = nullptr;
    uint32_t dynamic_lds = 0; // allowed so far
  };

  Driver *driver_;
  const uint32_t index_;
  DriverProps props_;
  std::string module_path_;
  Module module_ = nullptr;
  Stream stream_ = nullptr;
  std::mutex mutex_; // entries_
  std::map<std::string, Entry> entries_;
};

// Null where the device is of another kind.
inline Device *as_gpu(apu_device *device) {
  return dynamic_cast<Device *>(device);
}

} // namespace apu::gpu
