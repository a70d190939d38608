// How AMD's runtime is asked to let a device read host pages in place: the ways of apu.h.
#pragma once

#include "gpu/driver.h"
#include "gpu/driver_library.h"
#include "gpu/hip_api.h"
#include "gpu/hsa_api.h"

#include <map>
#include <mutex>

namespace apu::gpu {

class HipWays {
public:
  explicit HipWays(const hip::Table &api) : hip_(api) {}
  void load(const Library &library); // what it lacks is left out
  uint32_t mask() const;             // 1 << APU_WAY_*
  // See Driver::host_register and host_unregister; the calling thread has chosen the device.
  apu_status add(uint32_t way, uint32_t device, const HostRange &range, Registration &out);
  void remove(uint32_t way, uint32_t device, const HostRange &range);

private:
  apu_status add_svm(uint32_t device, const HostRange &range);
  apu_status add_advise(uint32_t device, const HostRange &range);
  apu_status add_lock(uint32_t device, const HostRange &range, Registration &out);
  apu_status add_register(uint32_t device, const HostRange &range, Registration &out);
  uint32_t grain(const HostRange &range, uint64_t at) const;
  bool is_gpu(hsa::Agent agent) const;
  apu_status agent_of(uint32_t device, hsa::Agent &out);
  apu_status check_hip(int rc, const char *doing, const HostRange &range) const;
  apu_status check_hsa(int rc, const char *doing, const HostRange &range) const;

  const hip::Table &hip_;
  hsa::Table hsa_;
  std::mutex mutex_; // agents_
  std::map<uint32_t, hsa::Agent> agents_;
};

} // namespace apu::gpu
