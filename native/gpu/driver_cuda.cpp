// NVIDIA's driver API, libcuda, behind the driver's calls: a stand-in for development, never chosen by itself.
//
// Names and numbers are cuda.h's; functions with a _v2 are what its macros make of the plain names. Primary contexts
// are retained at first use and kept. No CUDA header is needed to build.
#include "gpu/driver_kinds.h"
#include "gpu/driver_library.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <map>
#include <mutex>
#include <string>
#include <type_traits>

namespace apu::gpu {
namespace {

enum Result : int { kSuccess = 0, kOutOfMemory = 2, kNoDevice = 100, kUnknown = 999 };
constexpr int kNotReady = 600;
enum Attribute : int {
  kWarpSize = 10,
  kMultiprocessorCount = 16,
  kIntegrated = 18,
  kL2CacheSize = 38,
  kMaxThreadsPerMultiprocessor = 39,
  kComputeCapabilityMajor = 75,
  kComputeCapabilityMinor = 76,
  kMaxSharedMemoryPerMultiprocessor = 81,
  kPageableMemoryAccess = 88,
  kMaxSharedMemoryPerBlockOptin = 97,
  kPageableMemoryAccessUsesHostPageTables = 100,
};
constexpr int kMaxDynamicSharedSize = 8; // CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
constexpr unsigned kHostPortable = 0x1, kHostDeviceMap = 0x2;
constexpr unsigned kRegisterDeviceMap = 0x2, kRegisterReadOnly = 0x8;
constexpr unsigned kStreamNonBlocking = 0x1;
constexpr unsigned kEventDefault = 0x0, kEventDisableTiming = 0x2;
constexpr int kCaptureThreadLocal = 1;

using DevicePointer = unsigned long long;

// X(name, arguments of the function, which returns CUresult)
#define APU_CUDA_FUNCTIONS(X)                                                                                          \
  X(cuInit, (unsigned))                                                                                                \
  X(cuDriverGetVersion, (int *))                                                                                       \
  X(cuGetErrorName, (int, const char **))                                                                              \
  X(cuDeviceGetCount, (int *))                                                                                         \
  X(cuDeviceGet, (int *, int))                                                                                         \
  X(cuDeviceGetName, (char *, int, int))                                                                               \
  X(cuDeviceGetAttribute, (int *, int, int))                                                                           \
  X(cuDeviceTotalMem_v2, (size_t *, int))                                                                              \
  X(cuDevicePrimaryCtxRetain, (void **, int))                                                                          \
  X(cuCtxSetCurrent, (void *))                                                                                         \
  X(cuMemGetInfo_v2, (size_t *, size_t *))                                                                             \
  X(cuMemAlloc_v2, (DevicePointer *, size_t))                                                                          \
  X(cuMemFree_v2, (DevicePointer))                                                                                     \
  X(cuMemHostAlloc, (void **, size_t, unsigned))                                                                       \
  X(cuMemHostGetDevicePointer_v2, (DevicePointer *, void *, unsigned))                                                 \
  X(cuMemHostRegister_v2, (void *, size_t, unsigned))                                                                  \
  X(cuMemHostUnregister, (void *))                                                                                     \
  X(cuMemFreeHost, (void *))                                                                                           \
  X(cuMemcpyHtoDAsync_v2, (DevicePointer, const void *, size_t, void *))                                               \
  X(cuMemcpyDtoHAsync_v2, (void *, DevicePointer, size_t, void *))                                                     \
  X(cuMemcpyDtoDAsync_v2, (DevicePointer, DevicePointer, size_t, void *))                                              \
  X(cuMemsetD8Async, (DevicePointer, unsigned char, size_t, void *))                                                   \
  X(cuStreamCreate, (void **, unsigned))                                                                               \
  X(cuStreamDestroy_v2, (void *))                                                                                      \
  X(cuStreamSynchronize, (void *))                                                                                     \
  X(cuEventCreate, (void **, unsigned))                                                                                \
  X(cuEventDestroy_v2, (void *))                                                                                       \
  X(cuEventRecord, (void *, void *))                                                                                   \
  X(cuEventQuery, (void *))                                                                                            \
  X(cuEventSynchronize, (void *))                                                                                      \
  X(cuEventElapsedTime, (float *, void *, void *))                                                                     \
  X(cuModuleLoadData, (void **, const void *))                                                                         \
  X(cuModuleUnload, (void *))                                                                                          \
  X(cuModuleGetFunction, (void **, void *, const char *))                                                              \
  X(cuFuncSetAttribute, (void *, int, int))                                                                            \
  X(cuLaunchKernel,                                                                                                    \
    (void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **))          \
  X(cuStreamBeginCapture_v2, (void *, int))                                                                            \
  X(cuStreamEndCapture, (void *, void **))                                                                             \
  X(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long))                                                \
  X(cuGraphLaunch, (void *, void *))                                                                                   \
  X(cuGraphDestroy, (void *))                                                                                          \
  X(cuGraphExecDestroy, (void *))

struct Table {
#define APU_MEMBER(name, arguments) int(*name) arguments = nullptr;
  APU_CUDA_FUNCTIONS(APU_MEMBER)
#undef APU_MEMBER
};

class CudaDriver final : public Driver {
public:
  apu_status load() {
    TRY(library_.open("cuda", {"libcuda.so.1"}));
#define APU_LOAD(name, arguments) api_.name = reinterpret_cast<decltype(api_.name)>(library_.symbol(#name));
    APU_CUDA_FUNCTIONS(APU_LOAD)
#undef APU_LOAD
    TRY(library_.complete("cuda"));
    int count = 0;
    int rc = api_.cuInit(0);
    if (rc == kSuccess) rc = api_.cuDeviceGetCount(&count);
    if (rc == kSuccess && count > 0) return APU_OK;
    const char *name = nullptr;
    if (rc != kSuccess) api_.cuGetErrorName(rc, &name);
    return fail(APU_E_UNSUPPORTED, "device cuda: %s shows no usable device: %s (%d)", library_.path().c_str(),
                rc == kSuccess ? "0 devices"
                : name         ? name
                               : "unknown error",
                rc);
  }

  const char *kind() const override { return "cuda"; }

  apu_status device_count(uint32_t &out) override {
    int count = 0;
    TRY(check(api_.cuDeviceGetCount(&count), "counting devices"));
    out = uint32_t(std::max(count, 0));
    return APU_OK;
  }

  apu_status device_props(uint32_t index, DriverProps &out) override {
    int device = 0, version = 0;
    TRY(check(api_.cuDriverGetVersion(&version), "asking for the driver's version"));
    TRY(check(api_.cuDeviceGet(&device, int(index)), "finding device %u", index));
    char name[256] = "";
    TRY(check(api_.cuDeviceGetName(name, sizeof(name), device), "asking for the name of device %u", index));
    size_t total = 0;
    TRY(check(api_.cuDeviceTotalMem_v2(&total, device), "asking for the memory of device %u", index));
    const auto ask = [&](Attribute which, uint32_t &value) {
      int found = 0;
      TRY(check(api_.cuDeviceGetAttribute(&found, which, device), "asking for attribute %d of device %u", which,
                index));
      value = uint32_t(found);
      return apu_status(APU_OK);
    };
    uint32_t major = 0, minor = 0, integrated = 0, l2 = 0, pageable = 0, host_tables = 0;
    TRY(ask(kComputeCapabilityMajor, major));
    TRY(ask(kComputeCapabilityMinor, minor));
    TRY(ask(kIntegrated, integrated));
    TRY(ask(kPageableMemoryAccess, pageable));
    TRY(ask(kPageableMemoryAccessUsesHostPageTables, host_tables));
    TRY(ask(kL2CacheSize, l2));
    TRY(ask(kWarpSize, out.wave_size));
    TRY(ask(kMultiprocessorCount, out.compute_units));
    TRY(ask(kMaxSharedMemoryPerBlockOptin, out.lds_bytes));
    TRY(ask(kMaxSharedMemoryPerMultiprocessor, out.lds_of_unit));
    TRY(ask(kMaxThreadsPerMultiprocessor, out.threads_of_unit));
    out.name = name;
    out.arch = "sm_" + std::to_string(major) + std::to_string(minor);
    out.integrated = integrated != 0;
    out.bulk_copies = true;
    out.pageable = pageable && host_tables;
    out.memory_bytes = total;
    out.l2_bytes = l2;
    out.driver_version = uint64_t(version);
    return APU_OK;
  }

  apu_status use_device(uint32_t index) override {
    TRY(fork_.check("cuda"));
    std::lock_guard<std::mutex> lock(mutex_);
    void *&context = contexts_[index];
    if (!context) {
      int device = 0;
      TRY(check(api_.cuDeviceGet(&device, int(index)), "finding device %u", index));
      TRY(check(api_.cuDevicePrimaryCtxRetain(&context, device), "retaining the context of device %u", index));
    }
    return check(api_.cuCtxSetCurrent(context), "choosing device %u", index);
  }

  apu_status memory_info(uint64_t &free, uint64_t &total) override {
    size_t f = 0, t = 0;
    TRY(check(api_.cuMemGetInfo_v2(&f, &t), "asking for free memory"));
    free = f, total = t;
    return APU_OK;
  }

  apu_status alloc(uint64_t bytes, uint64_t &out) override {
    DevicePointer p = 0;
    TRY(check(api_.cuMemAlloc_v2(&p, bytes), "allocating %llu bytes of device memory", (unsigned long long)bytes));
    out = p;
    return APU_OK;
  }
  apu_status free(uint64_t address) override { return check(api_.cuMemFree_v2(address), "freeing device memory"); }

  apu_status host_alloc(uint64_t bytes, void *&host, uint64_t &device) override {
    void *p = nullptr;
    DevicePointer d = 0;
    TRY(check(api_.cuMemHostAlloc(&p, bytes, kHostPortable | kHostDeviceMap), "allocating %llu bytes of pinned memory",
              (unsigned long long)bytes));
    if (apu_status s = check(api_.cuMemHostGetDevicePointer_v2(&d, p, 0), "mapping pinned memory"); s != APU_OK) {
      api_.cuMemFreeHost(p);
      return s;
    }
    host = p;
    device = d;
    return APU_OK;
  }
  apu_status host_free(void *host) override { return check(api_.cuMemFreeHost(host), "freeing pinned memory"); }

  uint32_t ways() const override { return 1u << APU_WAY_REGISTER; }
  apu_status host_register(uint32_t, uint32_t, const HostRange &range, Registration &out) override {
    int rc = api_.cuMemHostRegister_v2(range.host, range.bytes, kRegisterDeviceMap | kRegisterReadOnly);
    if (rc != kSuccess && range.read_only) // devices that know no read-only registration
      rc = api_.cuMemHostRegister_v2(range.host, range.bytes, kRegisterDeviceMap);
    TRY(check_registration(rc, "registering", range));
    DevicePointer at = 0;
    if (const int found = api_.cuMemHostGetDevicePointer_v2(&at, range.host, 0); found != kSuccess) {
      api_.cuMemHostUnregister(range.host);
      return check_registration(found, "asking for the device's address of", range);
    }
    out = {at, APU_GRAIN_UNKNOWN};
    return APU_OK;
  }
  void host_unregister(uint32_t, uint32_t, const HostRange &range) override { api_.cuMemHostUnregister(range.host); }

  apu_status copy_to_device(uint64_t to, const void *from, uint64_t bytes, Stream stream) override {
    return check(api_.cuMemcpyHtoDAsync_v2(to, from, bytes, stream), "copying %llu bytes to the device",
                 (unsigned long long)bytes);
  }
  apu_status copy_to_host(void *to, uint64_t from, uint64_t bytes, Stream stream) override {
    return check(api_.cuMemcpyDtoHAsync_v2(to, from, bytes, stream), "copying %llu bytes from the device",
                 (unsigned long long)bytes);
  }
  apu_status copy_on_device(uint64_t to, uint64_t from, uint64_t bytes, Stream stream) override {
    return check(api_.cuMemcpyDtoDAsync_v2(to, from, bytes, stream), "copying %llu bytes on the device",
                 (unsigned long long)bytes);
  }
  apu_status fill(uint64_t to, uint8_t value, uint64_t bytes, Stream stream) override {
    return check(api_.cuMemsetD8Async(to, value, bytes, stream), "filling %llu bytes of device memory",
                 (unsigned long long)bytes);
  }

  apu_status stream_create(Stream &out) override {
    return check(api_.cuStreamCreate(&out, kStreamNonBlocking), "creating a stream");
  }
  apu_status stream_destroy(Stream stream) override {
    return check(api_.cuStreamDestroy_v2(stream), "destroying a stream");
  }
  apu_status stream_wait(Stream stream) override {
    return check(api_.cuStreamSynchronize(stream), "waiting for a stream");
  }

  apu_status event_create(Event &out, bool timing) override {
    return check(api_.cuEventCreate(&out, timing ? kEventDefault : kEventDisableTiming), "creating an event");
  }
  apu_status event_destroy(Event event) override { return check(api_.cuEventDestroy_v2(event), "destroying an event"); }
  apu_status event_record(Event event, Stream stream) override {
    return check(api_.cuEventRecord(event, stream), "recording an event");
  }
  apu_status event_query(Event event, bool &ended) override {
    const int rc = api_.cuEventQuery(event);
    ended = rc == kSuccess;
    return rc == kNotReady ? apu_status(APU_OK) : check(rc, "asking whether an event has passed");
  }
  apu_status event_wait(Event event) override { return check(api_.cuEventSynchronize(event), "waiting for an event"); }
  apu_status event_elapsed(Event begin, Event end, float &ms) override {
    return check(api_.cuEventElapsedTime(&ms, begin, end), "measuring time between events");
  }

  apu_status module_load(const void *image, size_t, Module &out) override {
    return check(api_.cuModuleLoadData(&out, image), "loading a cubin");
  }
  apu_status module_unload(Module module) override { return check(api_.cuModuleUnload(module), "unloading a cubin"); }
  apu_status module_function(Module module, const char *name, Function &out) override {
    return check(api_.cuModuleGetFunction(&out, module, name), "looking up kernel %s", name);
  }
  apu_status function_lds(Function function, uint32_t bytes) override { // needed above 48 KiB, harmless below
    return check(api_.cuFuncSetAttribute(function, kMaxDynamicSharedSize, int(bytes)), "allowing %u bytes of LDS",
                 bytes);
  }

  apu_status launch(Function function, Dim grid, uint32_t threads, uint32_t lds, Stream stream, const void *argument,
                    size_t) override {
    void *arguments[] = {const_cast<void *>(argument)}; // the driver copies as much as the cubin says
    return check(api_.cuLaunchKernel(function, grid.x, grid.y, grid.z, threads, 1, 1, lds, stream, arguments, nullptr),
                 "launching %u x %u x %u blocks of %u threads with %u bytes of LDS", grid.x, grid.y, grid.z, threads,
                 lds);
  }

  apu_status capture_begin(Stream stream) override {
    return check(api_.cuStreamBeginCapture_v2(stream, kCaptureThreadLocal), "beginning a capture");
  }
  apu_status capture_end(Stream stream, Graph &out) override {
    void *graph = nullptr;
    const int rc = api_.cuStreamEndCapture(stream, &graph);
    if (rc != kSuccess || !graph) {
      if (graph) api_.cuGraphDestroy(graph);
      return check(rc != kSuccess ? rc : int(kUnknown), "ending a capture");
    }
    const int made = api_.cuGraphInstantiateWithFlags(&out, graph, 0);
    api_.cuGraphDestroy(graph);
    return check(made, "instantiating a graph");
  }
  apu_status graph_launch(Graph graph, Stream stream) override {
    return check(api_.cuGraphLaunch(graph, stream), "launching a graph");
  }
  apu_status graph_destroy(Graph graph) override { return check(api_.cuGraphExecDestroy(graph), "destroying a graph"); }

private:
  // Whatever the reason, the range can be placed otherwise.
  apu_status check_registration(int rc, const char *doing, const HostRange &range) const {
    const apu_status s = check(rc, "%s %llu bytes at %p", doing, (unsigned long long)range.bytes, range.host);
    return s == APU_OK ? s : apu_status(APU_E_DEVICE);
  }
  [[gnu::format(printf, 3, 4)]] apu_status check(int rc, const char *doing, ...) const {
    if (rc == kSuccess) return APU_OK;
    char text[256];
    va_list args;
    va_start(args, doing);
    std::vsnprintf(text, sizeof(text), doing, args);
    va_end(args);
    const char *name = nullptr;
    api_.cuGetErrorName(rc, &name);
    const apu_status status = rc == kOutOfMemory ? APU_E_MEMORY : rc == kNoDevice ? APU_E_UNSUPPORTED : APU_E_DEVICE;
    return fail(status, "device cuda: %s (%d) %s", name ? name : "unknown error", rc, text);
  }

  Library library_{"install a driver for CUDA 12 or later"};
  ForkCheck fork_;
  Table api_;
  std::mutex mutex_; // contexts_
  std::map<uint32_t, void *> contexts_;
};

} // namespace

apu_status open_cuda(std::unique_ptr<Driver> &out) {
  auto driver = std::make_unique<CudaDriver>();
  TRY(driver->load());
  out = std::move(driver);
  return APU_OK;
}

} // namespace apu::gpu
