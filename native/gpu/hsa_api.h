// The part of the HSA runtime's C API, below HIP's, that makes host pages readable in place: written down from hsa.h
// and hsa_ext_amd.h (ROCm 5.2 to 7.0). tests/gpu/test_hip_api.py compares it with the published headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace apu::gpu::hsa {

constexpr int kSuccess = 0;                            // HSA_STATUS_SUCCESS
constexpr int kAgentInfoDevice = 17, kDeviceIsGpu = 1; // HSA_AGENT_INFO_DEVICE, HSA_DEVICE_TYPE_GPU

struct Agent {
  uint64_t handle = 0;
};

enum SvmAttribute : uint64_t {
  kSvmGlobalFlag = 0,
  kSvmReadOnly = 1,
  kSvmAccessibleInPlace = 0x201,
  kSvmNoAccess = 0x202
};
enum SvmModel : uint64_t { kSvmFineGrained = 0, kSvmCoarseGrained = 1 };
struct SvmPair {
  uint64_t attribute, value;
};

enum PoolFlags : uint32_t { kPoolFineGrained = 2, kPoolCoarseGrained = 4 };
constexpr int kPointerUnknown = 0; // HSA_EXT_POINTER_TYPE_UNKNOWN

struct PointerInfo {
  uint32_t size; // of this struct; the runtime fills as much of it as it knows
  int type;
  void *agent_base;
  void *host_base;
  size_t bytes;
  void *user_data;
  Agent owner;
  uint32_t global_flags; // PoolFlags
  bool registered;       // of later releases, in what was padding
};
static_assert(sizeof(PointerInfo) == 56 && offsetof(PointerInfo, owner) == 40);

// X(name, arguments of the function, which returns hsa_status_t)
#define APU_HSA_FUNCTIONS(X)                                                                                           \
  X(hsa_status_string, (int, const char **))                                                                           \
  X(hsa_iterate_agents, (int (*)(Agent, void *), void *))                                                              \
  X(hsa_agent_get_info, (Agent, int, void *))                                                                          \
  X(hsa_amd_svm_attributes_set, (void *, size_t, SvmPair *, size_t))                                                   \
  X(hsa_amd_svm_attributes_get, (void *, size_t, SvmPair *, size_t))                                                   \
  X(hsa_amd_memory_lock, (void *, size_t, Agent *, int, void **))                                                      \
  X(hsa_amd_memory_unlock, (void *))                                                                                   \
  X(hsa_amd_pointer_info, (const void *, PointerInfo *, void *(*)(size_t), uint32_t *, Agent **))

struct Table { // null where the runtime lacks it
#define APU_MEMBER(name, arguments) int(*name) arguments = nullptr;
  APU_HSA_FUNCTIONS(APU_MEMBER)
#undef APU_MEMBER
};

} // namespace apu::gpu::hsa
