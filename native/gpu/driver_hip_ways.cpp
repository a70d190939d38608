// The four ways, in the order in which the driver's sources say they should be tried:
//
//   svm       one ioctl sets coarse grain, read-only and access in place for the range, below HIP;
//   advise    HIP's form of it: coarse grain first, then access, so that pages are mapped once;
//   lock      the HSA runtime's registration, from its coarse-grained pool;
//   register  HIP's. It was fine-grained whatever its flags until mid-2026 (rocm-systems 6278), which on gfx11 means
//             uncached, so coarse grain is advised behind it: in the other order registering undoes it.
//
// svm and advise keep host addresses; lock and register may answer with others, which are then the only ones to use.
// The HSA functions are those of the libhsa-runtime64 that libamdhip64 uses itself: another copy would have opened
// another /dev/kfd. What a runtime says about the grain is asked afterwards: it is not always what it was told.
#include "gpu/driver_hip_ways.h"

#include <dlfcn.h>
#include <string>
#include <type_traits>

namespace apu::gpu {
namespace {

constexpr const char *kHsaLibrary = "libhsa-runtime64.so.1";
constexpr size_t kProbeBytes = 4096;

uint64_t address_of(const HostRange &range) {
  return reinterpret_cast<uintptr_t>(range.host);
}

} // namespace

void HipWays::load(const Library &library) {
  // What libamdhip64 links is found through it; releases that open it at run time have it loaded, or beside them.
  void *other = nullptr;
  if (!library.find("hsa_status_string")) {
    other = dlopen(kHsaLibrary, RTLD_NOW | RTLD_NOLOAD);
    const size_t slash = library.path().rfind('/');
    if (!other && slash != std::string::npos)
      other = dlopen((library.path().substr(0, slash + 1) + kHsaLibrary).c_str(), RTLD_NOW | RTLD_LOCAL);
  }
  const auto fill = [&](auto *&function, const char *name) {
    void *found = other ? dlsym(other, name) : library.find(name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
#define APU_LOAD(name, arguments) fill(hsa_.name, #name);
  APU_HSA_FUNCTIONS(APU_LOAD)
#undef APU_LOAD
}

uint32_t HipWays::mask() const {
  uint32_t ways = 0;
  const bool agents = hsa_.hsa_amd_pointer_info && hsa_.hsa_iterate_agents && hsa_.hsa_agent_get_info;
  if (agents && hsa_.hsa_amd_svm_attributes_set) ways |= 1u << APU_WAY_SVM;
  if (hip_.hipMemAdvise) ways |= 1u << APU_WAY_ADVISE;
  if (agents && hsa_.hsa_amd_memory_lock && hsa_.hsa_amd_memory_unlock) ways |= 1u << APU_WAY_LOCK;
  if (hip_.hipHostRegister && hip_.hipHostUnregister) ways |= 1u << APU_WAY_REGISTER;
  return ways;
}

apu_status HipWays::add(uint32_t way, uint32_t device, const HostRange &range, Registration &out) {
  out.device = address_of(range);
  switch (way) {
  case APU_WAY_SVM: TRY(add_svm(device, range)); break;
  case APU_WAY_ADVISE: TRY(add_advise(device, range)); break;
  case APU_WAY_LOCK: TRY(add_lock(device, range, out)); break;
  default: TRY(add_register(device, range, out));
  }
  out.grain = grain(range, out.device);
  return APU_OK;
}

void HipWays::remove(uint32_t way, uint32_t device, const HostRange &range) {
  void *host = range.host;
  if (way == APU_WAY_LOCK) {
    hsa_.hsa_amd_memory_unlock(host);
  } else if (way == APU_WAY_REGISTER) {
    hip_.hipHostUnregister(host);
  } else if (hsa::Agent agent; mask() >> APU_WAY_SVM & 1 && agent_of(device, agent) == APU_OK) {
    // Advice can only exchange one access for another.
    hsa::SvmPair none = {hsa::kSvmNoAccess, agent.handle};
    hsa_.hsa_amd_svm_attributes_set(host, range.bytes, &none, 1);
  } else {
    hip_.hipMemAdvise(host, range.bytes, hip::kUnsetAccessedBy, int(device));
  }
}

apu_status HipWays::add_svm(uint32_t device, const HostRange &range) {
  hsa::Agent agent;
  TRY(agent_of(device, agent));
  hsa::SvmPair attributes[] = {{hsa::kSvmGlobalFlag, hsa::kSvmCoarseGrained},
                               {hsa::kSvmReadOnly, 1},
                               {hsa::kSvmAccessibleInPlace, agent.handle}};
  return check_hsa(hsa_.hsa_amd_svm_attributes_set(range.host, range.bytes, attributes, std::size(attributes)),
                   "setting the attributes of", range);
}

apu_status HipWays::add_advise(uint32_t device, const HostRange &range) {
  // A runtime may refuse this one (InvalidValue has been seen) and still map the range, if fine-grained: grain() says.
  hip_.hipMemAdvise(range.host, range.bytes, hip::kSetCoarseGrain, int(device));
  return check_hip(hip_.hipMemAdvise(range.host, range.bytes, hip::kSetAccessedBy, int(device)),
                   "advising that the device accesses", range);
}

apu_status HipWays::add_lock(uint32_t device, const HostRange &range, Registration &out) {
  hsa::Agent agent;
  TRY(agent_of(device, agent));
  void *at = nullptr;
  TRY(check_hsa(hsa_.hsa_amd_memory_lock(range.host, range.bytes, &agent, 1, &at), "locking", range));
  if (!at) {
    hsa_.hsa_amd_memory_unlock(range.host);
    return fail(APU_E_DEVICE, "device hip: hsa_amd_memory_lock gave no address for %llu bytes at %p",
                (unsigned long long)range.bytes, range.host);
  }
  out.device = reinterpret_cast<uintptr_t>(at);
  return APU_OK;
}

apu_status HipWays::add_register(uint32_t device, const HostRange &range, Registration &out) {
  int rc = hip_.hipHostRegister(range.host, range.bytes, hip::kRegisterMapped | hip::kRegisterReadOnly);
  // Runtimes that know no read-only registration: without it pages of a mapping that nobody can write stay the file's.
  if (rc != hip::kSuccess && range.read_only) rc = hip_.hipHostRegister(range.host, range.bytes, hip::kRegisterMapped);
  TRY(check_hip(rc, "registering", range));
  void *at = nullptr;
  const int found = hip_.hipHostGetDevicePointer(&at, range.host, 0);
  if (found != hip::kSuccess || !at) {
    hip_.hipHostUnregister(range.host);
    return check_hip(found != hip::kSuccess ? found : int(hip::kUnknown), "asking for the device's address of", range);
  }
  out.device = reinterpret_cast<uintptr_t>(at);
  if (hip_.hipMemAdvise)
    hip_.hipMemAdvise(range.host, range.bytes, hip::kSetCoarseGrain, int(device)); // see add_advise
  return APU_OK;
}

// Of a range at its own address the attribute of its pages; at another one it is a buffer, with flags of its own.
uint32_t HipWays::grain(const HostRange &range, uint64_t at) const {
  if (at != address_of(range)) {
    hsa::PointerInfo info = {};
    info.size = sizeof(info);
    if (!hsa_.hsa_amd_pointer_info ||
        hsa_.hsa_amd_pointer_info(reinterpret_cast<void *>(at), &info, nullptr, nullptr, nullptr) != hsa::kSuccess ||
        info.type == hsa::kPointerUnknown)
      return APU_GRAIN_UNKNOWN;
    return info.global_flags & hsa::kPoolCoarseGrained ? APU_GRAIN_COARSE
           : info.global_flags & hsa::kPoolFineGrained ? APU_GRAIN_FINE
                                                       : APU_GRAIN_UNKNOWN;
  }
  uint64_t model = UINT64_MAX;
  hsa::SvmPair pair = {hsa::kSvmGlobalFlag, 0};
  int mode = 0;
  if (hsa_.hsa_amd_svm_attributes_get &&
      hsa_.hsa_amd_svm_attributes_get(range.host, range.bytes, &pair, 1) == hsa::kSuccess)
    model = pair.value;
  else if (hip_.hipMemRangeGetAttribute && hip_.hipMemRangeGetAttribute(&mode, sizeof(mode), hip::kCoherencyMode,
                                                                        range.host, range.bytes) == hip::kSuccess)
    model = uint64_t(mode); // counted alike
  return model == hsa::kSvmCoarseGrained ? APU_GRAIN_COARSE
         : model == hsa::kSvmFineGrained ? APU_GRAIN_FINE
                                         : APU_GRAIN_UNKNOWN;
}

bool HipWays::is_gpu(hsa::Agent agent) const {
  int type = -1;
  return agent.handle && hsa_.hsa_agent_get_info(agent, hsa::kAgentInfoDevice, &type) == hsa::kSuccess &&
         type == hsa::kDeviceIsGpu;
}

// HIP's devices are some of HSA's agents in an order of its own: the owner of an allocation tells which. An APU's may
// belong to the processor, and then there is but one GPU: access given to the wrong agent would be a fault later.
apu_status HipWays::agent_of(uint32_t device, hsa::Agent &out) {
  std::lock_guard<std::mutex> lock(mutex_);
  if (const auto it = agents_.find(device); it != agents_.end()) return out = it->second, apu_status(APU_OK);
  void *memory = nullptr;
  const HostRange probe{nullptr, kProbeBytes, false};
  TRY(check_hip(hip_.hipMalloc(&memory, kProbeBytes), "finding the device's agent by", probe));
  hsa::PointerInfo info = {};
  info.size = sizeof(info);
  const int rc = hsa_.hsa_amd_pointer_info(memory, &info, nullptr, nullptr, nullptr);
  hip_.hipFree(memory);
  if (rc != hsa::kSuccess || !is_gpu(info.owner)) {
    struct Found {
      const HipWays *ways;
      hsa::Agent gpu;
      uint32_t count;
    } found = {this, {}, 0};
    const auto each = [](hsa::Agent agent, void *data) {
      auto *all = static_cast<Found *>(data);
      if (all->ways->is_gpu(agent)) all->gpu = agent, ++all->count;
      return hsa::kSuccess;
    };
    hsa_.hsa_iterate_agents(each, &found);
    if (found.count != 1)
      return fail(APU_E_DEVICE, "device hip: the HSA runtime does not tell which of its %u GPUs is device %u",
                  found.count, device);
    info.owner = found.gpu;
  }
  out = agents_[device] = info.owner;
  return APU_OK;
}

apu_status HipWays::check_hip(int rc, const char *doing, const HostRange &range) const {
  if (rc == hip::kSuccess) return APU_OK;
  const char *name = hip_.hipGetErrorName(rc);
  return fail(APU_E_DEVICE, "device hip: %s (%d) %s %llu bytes at %p", name ? name : "unknown error", rc, doing,
              (unsigned long long)range.bytes, range.host);
}

apu_status HipWays::check_hsa(int rc, const char *doing, const HostRange &range) const {
  if (rc == hsa::kSuccess) return APU_OK;
  const char *text = nullptr;
  if (hsa_.hsa_status_string) hsa_.hsa_status_string(rc, &text);
  const std::string name = text ? std::string(text) : "unknown HSA error"; // "HSA_STATUS_ERROR: what it means"
  return fail(APU_E_DEVICE, "device hip: %s (%#x) %s %llu bytes at %p", name.substr(0, name.find(':')).c_str(),
              unsigned(rc), doing, (unsigned long long)range.bytes, range.host);
}

} // namespace apu::gpu
