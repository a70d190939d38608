// The part of HIP's C API that the driver uses, written down from hip_runtime_api.h (ROCm 5.2 to 7.0) so that no ROCm
// header is needed to build. tests/gpu/test_hip_api.py compares it with the published headers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace apu::gpu::hip {

enum Error : int { kSuccess = 0, kOutOfMemory = 2, kNoDevice = 100, kNotReady = 600, kUnknown = 999 };
enum MemcpyKind : int { kHostToDevice = 1, kDeviceToHost = 2, kDeviceToDevice = 3 };
enum HostMallocFlags : unsigned { kHostPortable = 0x1, kHostMapped = 0x2, kHostCoherent = 0x40000000 };
enum RegisterFlags : unsigned { kRegisterMapped = 0x2, kRegisterReadOnly = 0x8 }; // 0x8 is also coarse-grained
enum MemoryAdvice : int { kSetAccessedBy = 5, kUnsetAccessedBy = 6, kSetCoarseGrain = 100 };
enum RangeAttribute : int { kCoherencyMode = 100 };
enum CoherencyMode : int { kFineGrain = 0, kCoarseGrain = 1 };
enum StreamFlags : unsigned { kStreamNonBlocking = 0x1 };
enum EventFlags : unsigned { kEventDefault = 0x0, kEventDisableTiming = 0x2 };
enum CaptureMode : int { kCaptureThreadLocal = 1 };

// hipDeviceProp_tR0600, what hipGetDevicePropertiesR0600 (ROCm 6.0 and later) fills.
struct PropsR0600 {
  char name[256];
  char uuid_luid[28];
  char pad0[4];
  size_t total_global_mem;
  size_t shared_mem_per_block;
  int regs_per_block;
  int warp_size;
  char pad1[388 - 312];
  int multi_processor_count;
  int kernel_exec_timeout_enabled;
  int integrated;
  char pad2[616 - 400];
  int l2_cache_size;
  int persisting_l2_cache_max_size;
  int max_threads_per_multi_processor;
  char pad3[640 - 628];
  size_t shared_mem_per_multiprocessor;
  char pad4[672 - 648];
  int pageable_memory_access;
  char pad5[704 - 676];
  int pageable_memory_access_uses_host_page_tables;
  char pad6[1160 - 708];
  char gcn_arch_name[256];
  size_t max_shared_memory_per_multi_processor;
  char rest[1472 - 1424];
};
static_assert(offsetof(PropsR0600, total_global_mem) == 288 && offsetof(PropsR0600, warp_size) == 308);
static_assert(offsetof(PropsR0600, multi_processor_count) == 388 && offsetof(PropsR0600, integrated) == 396);
static_assert(offsetof(PropsR0600, l2_cache_size) == 616);
static_assert(offsetof(PropsR0600, max_threads_per_multi_processor) == 624);
static_assert(offsetof(PropsR0600, shared_mem_per_multiprocessor) == 640);
static_assert(offsetof(PropsR0600, pageable_memory_access) == 672);
static_assert(offsetof(PropsR0600, pageable_memory_access_uses_host_page_tables) == 704);
static_assert(offsetof(PropsR0600, gcn_arch_name) == 1160);
static_assert(offsetof(PropsR0600, max_shared_memory_per_multi_processor) == 1416 && sizeof(PropsR0600) == 1472);

// hipDeviceProp_t before ROCm 6.0, which the plain symbol hipGetDeviceProperties still fills in later releases.
struct PropsR0000 {
  char name[256];
  size_t total_global_mem;
  size_t shared_mem_per_block;
  int regs_per_block;
  int warp_size;
  char pad0[336 - 280];
  int multi_processor_count;
  int l2_cache_size;
  int max_threads_per_multi_processor;
  char pad1[376 - 348];
  size_t max_shared_memory_per_multi_processor;
  char pad2[396 - 384];
  char gcn_arch_name[256];
  int integrated;
  char pad3[784 - 656];
  int pageable_memory_access;
  int pageable_memory_access_uses_host_page_tables;
  char rest[2048 - 792]; // ends at about 800, later than that in no release
};
static_assert(offsetof(PropsR0000, total_global_mem) == 256 && offsetof(PropsR0000, warp_size) == 276);
static_assert(offsetof(PropsR0000, multi_processor_count) == 336);
static_assert(offsetof(PropsR0000, max_threads_per_multi_processor) == 344);
static_assert(offsetof(PropsR0000, max_shared_memory_per_multi_processor) == 376);
static_assert(offsetof(PropsR0000, gcn_arch_name) == 396 && offsetof(PropsR0000, integrated) == 652);
static_assert(offsetof(PropsR0000, pageable_memory_access) == 784);

// X(name, arguments of the function, which returns hipError_t)
#define APU_HIP_FUNCTIONS(X)                                                                                           \
  X(hipInit, (unsigned))                                                                                               \
  X(hipGetDeviceCount, (int *))                                                                                        \
  X(hipSetDevice, (int))                                                                                               \
  X(hipRuntimeGetVersion, (int *))                                                                                     \
  X(hipMemGetInfo, (size_t *, size_t *))                                                                               \
  X(hipMalloc, (void **, size_t))                                                                                      \
  X(hipFree, (void *))                                                                                                 \
  X(hipHostMalloc, (void **, size_t, unsigned))                                                                        \
  X(hipHostGetDevicePointer, (void **, void *, unsigned))                                                              \
  X(hipHostFree, (void *))                                                                                             \
  X(hipMemcpyAsync, (void *, const void *, size_t, int, void *))                                                       \
  X(hipMemsetAsync, (void *, int, size_t, void *))                                                                     \
  X(hipStreamCreateWithFlags, (void **, unsigned))                                                                     \
  X(hipStreamDestroy, (void *))                                                                                        \
  X(hipStreamSynchronize, (void *))                                                                                    \
  X(hipEventCreateWithFlags, (void **, unsigned))                                                                      \
  X(hipEventDestroy, (void *))                                                                                         \
  X(hipEventRecord, (void *, void *))                                                                                  \
  X(hipEventQuery, (void *))                                                                                           \
  X(hipEventSynchronize, (void *))                                                                                     \
  X(hipEventElapsedTime, (float *, void *, void *))                                                                    \
  X(hipModuleLoadData, (void **, const void *))                                                                        \
  X(hipModuleUnload, (void *))                                                                                         \
  X(hipModuleGetFunction, (void **, void *, const char *))                                                             \
  X(hipModuleLaunchKernel,                                                                                             \
    (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))          \
  X(hipStreamBeginCapture, (void *, int))                                                                              \
  X(hipStreamEndCapture, (void *, void **))                                                                            \
  X(hipGraphInstantiate, (void **, void *, void **, char *, size_t))                                                   \
  X(hipGraphLaunch, (void *, void *))                                                                                  \
  X(hipGraphDestroy, (void *))                                                                                         \
  X(hipGraphExecDestroy, (void *))

// The same, of functions without which the runtime is still of use.
#define APU_HIP_OPTIONAL(X)                                                                                            \
  X(hipHostRegister, (void *, size_t, unsigned))                                                                       \
  X(hipHostUnregister, (void *))                                                                                       \
  X(hipMemAdvise, (const void *, size_t, int, int))                                                                    \
  X(hipMemRangeGetAttribute, (void *, size_t, int, const void *, size_t))

struct Table {
#define APU_MEMBER(name, arguments) int(*name) arguments = nullptr;
  APU_HIP_FUNCTIONS(APU_MEMBER)
  APU_HIP_OPTIONAL(APU_MEMBER)
#undef APU_MEMBER
  const char *(*hipGetErrorName)(int) = nullptr;
  int (*hipGetDevicePropertiesR0600)(PropsR0600 *, int) = nullptr; // one of the two
  int (*hipGetDeviceProperties)(PropsR0000 *, int) = nullptr;
};

} // namespace apu::gpu::hip
