// AMD's runtime, libamdhip64, behind the driver's calls.
//
// Which file it is, is the caller's choice (apu_engine/runtime.py looks for all that are installed). Without one it is
// the copy that is loaded already, for instance by torch, else what the dynamic linker has under a versioned name. Two
// copies in one process would each have their own idea of the device: the second is refused.
// Which devices are visible is the runtime's business (HIP_VISIBLE_DEVICES, ROCR_VISIBLE_DEVICES).
#include "gpu/driver_hip_ways.h"
#include "gpu/driver_kinds.h"
#include "gpu/driver_library.h"
#include "gpu/hip_api.h"

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <string>
#include <type_traits>
#include <vector>

namespace apu::gpu {
namespace {

constexpr int kNewest = 12, kOldest = 5; // sonames that are tried

constexpr char kStem[] = "libamdhip64.so";

// The one library to open, or the sonames that the dynamic linker is asked for, newest first.
apu_status library_names(const char *named, std::vector<std::string> &out) {
  const std::vector<std::string> loaded = Library::loaded(kStem);
  for (const std::string &path : loaded) {
    const std::string other = named ? named : loaded.front();
    if (Library::same_file(path, other)) continue;
    const bool both = !named;
    return fail(APU_E_UNSUPPORTED,
                "device hip: %s is in this process already%s %s: two copies of the runtime do not work together; "
                "set APU_HIP_LIBRARY=%s, or do not import what loads the other one",
                path.c_str(), both ? ", and so is" : ", so it cannot load", other.c_str(), path.c_str());
  }
  if (named)
    out = {named};
  else if (!loaded.empty())
    out = {loaded.front()};
  else {
    for (int version = kNewest; version >= kOldest; --version)
      out.push_back(std::string(kStem) + "." + std::to_string(version));
    out.push_back(kStem);
  }
  return APU_OK;
}

class HipDriver final : public Driver {
public:
  apu_status load(const char *library) {
    std::vector<std::string> names;
    TRY(library_names(library, names));
    TRY(library_.open("hip", names));
    const auto fill = [&](auto *&function, const char *name, bool required = true) {
      function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(library_.symbol(name, required));
    };
#define APU_LOAD(name, arguments) fill(api_.name, #name);
    APU_HIP_FUNCTIONS(APU_LOAD)
#undef APU_LOAD
#define APU_LOAD(name, arguments) fill(api_.name, #name, false);
    APU_HIP_OPTIONAL(APU_LOAD)
#undef APU_LOAD
    fill(api_.hipGetErrorName, "hipGetErrorName");
    fill(api_.hipGetDevicePropertiesR0600, "hipGetDevicePropertiesR0600", false);
    fill(api_.hipGetDeviceProperties, "hipGetDeviceProperties", api_.hipGetDevicePropertiesR0600 == nullptr);
    TRY(library_.complete("hip"));
    ways_.load(library_);
    // Without a device the first calls fail, in one way or another from release to release: no error of the device.
    int count = 0;
    int rc = api_.hipInit(0);
    if (rc == hip::kSuccess) rc = api_.hipGetDeviceCount(&count);
    if (rc == hip::kSuccess && count > 0) return APU_OK;
    const char *name = rc == hip::kSuccess ? "0 devices" : api_.hipGetErrorName(rc);
    return fail(APU_E_UNSUPPORTED, "device hip: %s shows no usable device: %s (%d)", library_.path().c_str(),
                name ? name : "unknown error", rc);
  }

  const char *kind() const override { return "hip"; }

  apu_status device_count(uint32_t &out) override {
    int count = 0;
    TRY(check(api_.hipGetDeviceCount(&count), "counting the devices of %s", library_.path().c_str()));
    out = uint32_t(std::max(count, 0));
    return APU_OK;
  }

  apu_status device_props(uint32_t index, DriverProps &out) override {
    int version = 0;
    TRY(check(api_.hipRuntimeGetVersion(&version), "asking for the runtime's version"));
    if (api_.hipGetDevicePropertiesR0600) {
      hip::PropsR0600 p = {};
      TRY(check(api_.hipGetDevicePropertiesR0600(&p, int(index)), "asking for the properties of device %u", index));
      copy_props(p, out);
    } else {
      hip::PropsR0000 p = {};
      TRY(check(api_.hipGetDeviceProperties(&p, int(index)), "asking for the properties of device %u", index));
      copy_props(p, out);
    }
    out.driver_version = uint64_t(version);
    if (out.arch.rfind("gfx", 0) == 0 && (out.wave_size == 32 || out.wave_size == 64)) return APU_OK;
    return fail(APU_E_UNSUPPORTED, "device hip:%u: architecture \"%s\", wave size %u: expected gfx..., 32 or 64", index,
                out.arch.c_str(), out.wave_size);
  }

  apu_status use_device(uint32_t index) override {
    TRY(fork_.check("hip"));
    return check(api_.hipSetDevice(int(index)), "choosing device %u", index);
  }

  apu_status memory_info(uint64_t &free, uint64_t &total) override {
    size_t f = 0, t = 0;
    TRY(check(api_.hipMemGetInfo(&f, &t), "asking for free memory"));
    free = f, total = t;
    return APU_OK;
  }

  apu_status alloc(uint64_t bytes, uint64_t &out) override {
    void *p = nullptr;
    TRY(check(api_.hipMalloc(&p, bytes), "allocating %llu bytes of device memory", (unsigned long long)bytes));
    out = reinterpret_cast<uint64_t>(p);
    return APU_OK;
  }

  apu_status free(uint64_t address) override {
    return check(api_.hipFree(reinterpret_cast<void *>(address)), "freeing device memory");
  }

  apu_status host_alloc(uint64_t bytes, void *&host, uint64_t &device) override {
    void *p = nullptr, *d = nullptr;
    TRY(check(api_.hipHostMalloc(&p, bytes, hip::kHostPortable | hip::kHostMapped | hip::kHostCoherent),
              "allocating %llu bytes of pinned memory", (unsigned long long)bytes));
    if (apu_status s = check(api_.hipHostGetDevicePointer(&d, p, 0), "mapping pinned memory"); s != APU_OK) {
      api_.hipHostFree(p);
      return s;
    }
    host = p;
    device = reinterpret_cast<uint64_t>(d);
    return APU_OK;
  }

  apu_status host_free(void *host) override { return check(api_.hipHostFree(host), "freeing pinned memory"); }

  uint32_t ways() const override { return ways_.mask(); }
  apu_status host_register(uint32_t way, uint32_t device, const HostRange &range, Registration &out) override {
    return ways_.add(way, device, range, out);
  }
  void host_unregister(uint32_t way, uint32_t device, const HostRange &range) override {
    ways_.remove(way, device, range);
  }

  apu_status copy_to_device(uint64_t to, const void *from, uint64_t bytes, Stream stream) override {
    return check(api_.hipMemcpyAsync(reinterpret_cast<void *>(to), from, bytes, hip::kHostToDevice, stream),
                 "copying %llu bytes to the device", (unsigned long long)bytes);
  }

  apu_status copy_to_host(void *to, uint64_t from, uint64_t bytes, Stream stream) override {
    return check(api_.hipMemcpyAsync(to, reinterpret_cast<const void *>(from), bytes, hip::kDeviceToHost, stream),
                 "copying %llu bytes from the device", (unsigned long long)bytes);
  }

  apu_status copy_on_device(uint64_t to, uint64_t from, uint64_t bytes, Stream stream) override {
    return check(api_.hipMemcpyAsync(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes,
                                     hip::kDeviceToDevice, stream),
                 "copying %llu bytes on the device", (unsigned long long)bytes);
  }

  apu_status fill(uint64_t to, uint8_t value, uint64_t bytes, Stream stream) override {
    return check(api_.hipMemsetAsync(reinterpret_cast<void *>(to), value, bytes, stream),
                 "filling %llu bytes of device memory", (unsigned long long)bytes);
  }

  apu_status stream_create(Stream &out) override {
    return check(api_.hipStreamCreateWithFlags(&out, hip::kStreamNonBlocking), "creating a stream");
  }
  apu_status stream_destroy(Stream stream) override {
    return check(api_.hipStreamDestroy(stream), "destroying a stream");
  }
  apu_status stream_wait(Stream stream) override {
    return check(api_.hipStreamSynchronize(stream), "waiting for a stream");
  }

  apu_status event_create(Event &out, bool timing) override {
    return check(api_.hipEventCreateWithFlags(&out, timing ? hip::kEventDefault : hip::kEventDisableTiming),
                 "creating an event");
  }
  apu_status event_destroy(Event event) override { return check(api_.hipEventDestroy(event), "destroying an event"); }
  apu_status event_record(Event event, Stream stream) override {
    return check(api_.hipEventRecord(event, stream), "recording an event");
  }
  apu_status event_query(Event event, bool &ended) override {
    const int rc = api_.hipEventQuery(event);
    ended = rc == hip::kSuccess;
    return rc == hip::kNotReady ? apu_status(APU_OK) : check(rc, "asking whether an event has passed");
  }
  apu_status event_wait(Event event) override { return check(api_.hipEventSynchronize(event), "waiting for an event"); }
  apu_status event_elapsed(Event begin, Event end, float &ms) override {
    return check(api_.hipEventElapsedTime(&ms, begin, end), "measuring time between events");
  }

  apu_status module_load(const void *image, size_t, Module &out) override {
    return check(api_.hipModuleLoadData(&out, image), "loading a code object");
  }
  apu_status module_unload(Module module) override {
    return check(api_.hipModuleUnload(module), "unloading a code object");
  }
  apu_status module_function(Module module, const char *name, Function &out) override {
    return check(api_.hipModuleGetFunction(&out, module, name), "looking up kernel %s", name);
  }
  // All of a block's LDS may be asked for at any launch.
  apu_status function_lds(Function, uint32_t) override { return APU_OK; }

  apu_status launch(Function function, Dim grid, uint32_t threads, uint32_t lds, Stream stream, const void *argument,
                    size_t) override {
    void *arguments[] = {const_cast<void *>(argument)}; // the runtime copies as much as the code object says
    return check(
        api_.hipModuleLaunchKernel(function, grid.x, grid.y, grid.z, threads, 1, 1, lds, stream, arguments, nullptr),
        "launching %u x %u x %u blocks of %u threads with %u bytes of LDS", grid.x, grid.y, grid.z, threads, lds);
  }

  apu_status capture_begin(Stream stream) override {
    return check(api_.hipStreamBeginCapture(stream, hip::kCaptureThreadLocal), "beginning a capture");
  }

  apu_status capture_end(Stream stream, Graph &out) override {
    void *graph = nullptr;
    const int rc = api_.hipStreamEndCapture(stream, &graph);
    if (rc != hip::kSuccess || !graph) {
      if (graph) api_.hipGraphDestroy(graph);
      return check(rc != hip::kSuccess ? rc : int(hip::kUnknown), "ending a capture");
    }
    const int made = api_.hipGraphInstantiate(&out, graph, nullptr, nullptr, 0);
    api_.hipGraphDestroy(graph);
    return check(made, "instantiating a graph");
  }
  apu_status graph_launch(Graph graph, Stream stream) override {
    return check(api_.hipGraphLaunch(graph, stream), "launching a graph");
  }
  apu_status graph_destroy(Graph graph) override {
    return check(api_.hipGraphExecDestroy(graph), "destroying a graph");
  }

private:
  template <typename Props> static void copy_props(const Props &p, DriverProps &out) {
    out.name.assign(p.name, strnlen(p.name, sizeof(p.name)));
    out.arch.assign(p.gcn_arch_name, strnlen(p.gcn_arch_name, sizeof(p.gcn_arch_name)));
    out.arch = out.arch.substr(0, out.arch.find(':')); // "gfx90a:sramecc+:xnack-"
    out.integrated = p.integrated != 0;
    out.pageable = p.pageable_memory_access && p.pageable_memory_access_uses_host_page_tables;
    out.wave_size = uint32_t(p.warp_size);
    out.compute_units = uint32_t(p.multi_processor_count);
    out.lds_bytes = uint32_t(p.shared_mem_per_block);
    out.lds_of_unit = uint32_t(p.max_shared_memory_per_multi_processor);
    out.threads_of_unit = uint32_t(p.max_threads_per_multi_processor);
    out.memory_bytes = p.total_global_mem;
    out.l2_bytes = uint64_t(p.l2_cache_size);
  }

  [[gnu::format(printf, 3, 4)]] apu_status check(int rc, const char *doing, ...) const {
    if (rc == hip::kSuccess) return APU_OK;
    char text[256];
    va_list args;
    va_start(args, doing);
    std::vsnprintf(text, sizeof(text), doing, args);
    va_end(args);
    const char *name = api_.hipGetErrorName(rc);
    const apu_status status = rc == hip::kOutOfMemory ? APU_E_MEMORY
                              : rc == hip::kNoDevice  ? APU_E_UNSUPPORTED
                                                      : APU_E_DEVICE;
    return fail(status, "device hip: %s (%d) %s", name ? name : "unknown error", rc, text);
  }

  Library library_{"install ROCm's HIP runtime, 5.2 or later"};
  ForkCheck fork_;
  hip::Table api_;
  HipWays ways_{api_};
};

} // namespace

apu_status open_hip(const char *library, std::unique_ptr<Driver> &out) {
  auto driver = std::make_unique<HipDriver>();
  TRY(driver->load(library));
  out = std::move(driver);
  return APU_OK;
}

} // namespace apu::gpu
