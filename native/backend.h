// What every kind of device offers behind apu.h's devices, memory and plans. Each backend derives from apu_device;
// native/backend.cpp checks the arguments of the C functions once and dispatches. Methods may throw std::bad_alloc,
// which becomes APU_E_MEMORY there.
#pragma once

#include "common.h"

#include <memory>
#include <vector>

// Memory that a device can read. `chunks` are in host order, and adjoin in host addresses.
struct apu_region {
  virtual ~apu_region() = default;
  std::vector<apu_chunk> chunks;
  apu_region_info info = {};
};

struct apu_stager {
  virtual ~apu_stager() = default;
  // `bytes` is positive; offset + bytes does not overflow.
  virtual apu_status read(int fd, const char *path, uint64_t offset, uint64_t bytes, uint64_t to) = 0;
  virtual apu_status wait() = 0;
  virtual apu_stager_info info() const = 0;
};

namespace apu {
// The product of apu_kernel_matmul: sizes are positive and in range, the type has kernels.
struct KernelProduct {
  uint32_t dtype, precision;
  const void *w;       // (N, K), host
  uint64_t row_bytes;  // of w
  uint64_t row_stride; // of w
  const float *x;      // (T, K), host
  uint32_t rows, n, k; // T, N, K
};
} // namespace apu

struct apu_device {
  virtual ~apu_device() = default;
  virtual const char *kind() const = 0; // "cpu", "hip", "cuda"
  virtual void props(apu_device_props &out) const = 0;
  virtual apu_status memory(uint64_t &free, uint64_t &total) = 0;
  // `bytes` is positive, `strategy` one of APU_MEMORY_*. Registered: `way` is one of APU_WAY_* but AUTO, the range
  // whole pages; else `way` is AUTO.
  virtual apu_status register_memory(const void *host, uint64_t bytes, uint32_t strategy, uint32_t way,
                                     std::unique_ptr<apu_region> &out) = 0;
  virtual apu_status alloc_memory(uint64_t bytes, std::unique_ptr<apu_region> &out) = 0;
  // `bytes` is positive. A host side is a host address, else a device address. Ends when the bytes are there.
  virtual apu_status copy(uint64_t to, uint64_t from, uint64_t bytes, bool to_host, bool from_host) = 0;
  virtual apu_status open_stager(uint64_t ring_bytes, std::unique_ptr<apu_stager> &out) = 0;
  virtual apu_status create_plan(const apu_plan_desc &desc, apu_plan **out) = 0;
  // The kernels alone; see apu.h.
  virtual apu_status kernel_matmul(const apu::KernelProduct &product, float *y) = 0;
  virtual apu_status kernel_read(const void *in, uint64_t bytes, uint32_t repeats, double &gb_per_s) = 0;
  virtual apu_status kernel_gather(const uint64_t *parts, uint32_t count, uint64_t bytes, uint32_t repeats,
                                   double &gb_per_s) = 0;
  virtual apu_status kernel_checksum(uint64_t address, uint64_t bytes, uint64_t &out) = 0;
  virtual apu_status kernel_time(const apu::KernelProduct &product, uint32_t count, uint32_t repeats,
                                 double &nanoseconds) = 0;
};

namespace apu {

namespace cpu {
apu_status open_device(const apu_device_options &options, std::unique_ptr<apu_device> &out);
} // namespace cpu
namespace gpu {
apu_status open_device(const char *kind, uint32_t index, const apu_device_options &options,
                       std::unique_ptr<apu_device> &out);
} // namespace gpu

} // namespace apu
