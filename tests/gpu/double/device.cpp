// Initialisation, devices and their properties, names of errors, and what tests arrange.
#include "state.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sstream>
#include <sys/mman.h>
#include <unistd.h>

using namespace hip_double;

namespace hip_double {

static std::atomic<uint64_t> *counts() {
  static_assert(sizeof(std::atomic<uint64_t>) == 8);
  constexpr size_t kBytes = kCounts * sizeof(uint64_t);
  void *p = nullptr;
  if (const char *path = std::getenv("APU_HIP_DOUBLE_COUNTS")) {
    const int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0 && ftruncate(fd, kBytes) == 0) p = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    if (!p || p == MAP_FAILED) std::fprintf(stderr, "hip double: %s: %s\n", path, std::strerror(errno)), std::abort();
  } else {
    p = std::calloc(kCounts, sizeof(uint64_t));
  }
  return static_cast<std::atomic<uint64_t> *>(p);
}

State &state() {
  static State *s = [] {
    auto *made = new State; // outlives every thread
    made->counts = counts();
    return made;
  }();
  return *s;
}

void publish() {
  State &s = state();
  const auto pinned = uint64_t(
      std::count_if(s.allocations.begin(), s.allocations.end(), [](const auto &a) { return a.second.pinned; }));
  s.counts[kAllocations] = s.allocations.size() - pinned;
  s.counts[kPinned] = pinned;
  s.counts[kStreams] = s.streams.size();
  s.counts[kEvents] = s.events.size();
  s.counts[kModules] = s.modules.size();
  s.counts[kGraphs] = s.graphs.size();
  s.counts[kExecs] = s.execs.size();
  s.counts[kRegistrations] = s.registrations.size();
  uint64_t reached = 0;
  for (const auto &[begin, range] : s.ranges) reached += range.accessible ? uint64_t(range.end - begin) : 0;
  s.counts[kRangeBytes] = reached;
  s.counts[kMostDeviceBytes] = std::max(s.counts[kMostDeviceBytes].load(), s.allocated);
  s.counts[kMostPinnedBytes] = std::max(s.counts[kMostPinnedBytes].load(), s.pinned);
}

void hang(const char *key, const std::string &value) {
  State &s = state();
  std::unique_lock<std::mutex> lock(s.mutex);
  s.faults_changed.wait(lock, [&] {
    const auto it = s.faults.find(key);
    return it == s.faults.end() || it->second != value;
  });
}

static void read_faults(State &s, const char *text) {
  s.faults.clear();
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    const size_t at = word.find('=');
    s.faults[word.substr(0, at)] = at == std::string::npos ? "1" : word.substr(at + 1);
  }
}

std::string fault(const char *key) {
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto it = s.faults.find(key);
  return it == s.faults.end() ? "" : it->second;
}

uint64_t fault_number(const char *key, uint64_t otherwise) {
  const std::string text = fault(key);
  return text.empty() ? otherwise : std::strtoull(text.c_str(), nullptr, 0);
}

// A fault is printed as the HSA runtime prints it, for whoever reads a failed test.
void sticky_fault(int error, const std::string &text) {
  State &s = state();
  {
    std::lock_guard<std::mutex> lock(s.mutex);
    s.error = text;
  }
  std::fprintf(stderr, "hip double: %s\n", text.c_str());
  int none = hipSuccess;
  s.sticky.compare_exchange_strong(none, error);
}

static std::string arch() {
  const std::string named = fault("arch");
  return named.empty() ? "gfx1151" : named;
}

static bool initialized;
static thread_local int chosen_device;

int current_device() {
  return chosen_device;
}

// The runtime numbers what HIP_VISIBLE_DEVICES lists (HIP documentation, environment variables).
static int visible_devices() {
  const int all = int(fault_number("devices", 1));
  const char *list = std::getenv("HIP_VISIBLE_DEVICES");
  if (!list) return all;
  int count = 0;
  std::istringstream items(list);
  for (std::string item; std::getline(items, item, ',');) {
    const int index = std::atoi(item.c_str());
    if (item.empty() || index < 0 || index >= all) break; // the rest is not looked at
    ++count;
  }
  return count;
}

template <typename T> static void put(void *base, size_t offset, T value) {
  std::memcpy(static_cast<uint8_t *>(base) + offset, &value, sizeof value);
}

} // namespace hip_double

HIP_API void apu_double_set(const char *faults) {
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  read_faults(s, faults);
  s.mallocs = s.host_mallocs = s.copies = 0;
  for (uint32_t i = kLiveCounts; i < kCounts; ++i) s.counts[i] = 0;
  publish();
  s.error.clear();
  s.sticky = hipSuccess; // which no real runtime forgives
  s.faults_changed.notify_all();
}

HIP_API void apu_double_fail(const char *name) {
  sticky_fault(std::strcmp(name, "hipErrorLaunchFailure") ? hipErrorIllegalAddress : hipErrorLaunchFailure, name);
}

HIP_API const char *apu_double_error() {
  static thread_local std::string copy;
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  copy = s.error;
  return copy.c_str();
}

HIP_API void apu_double_counts(uint64_t *out) {
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  forget_unmapped();
  publish();
  for (uint32_t i = 0; i < kCounts; ++i) out[i] = s.counts[i];
}

__attribute__((destructor)) static void at_exit() {
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  forget_unmapped();
  publish();
}

// Without a device ROCm 5 fails hipInit with hipErrorInvalidDevice (ROCm/hip#2700, and Debian's libamdhip64-5); later
// releases fail hipGetDeviceCount with hipErrorNoDevice (ROCm/hip#2157).
HIP_API int hipInit(unsigned) {
  if (const char *text = std::getenv("APU_HIP_DOUBLE"); text && !initialized) {
    std::lock_guard<std::mutex> lock(state().mutex);
    read_faults(state(), text);
  }
  initialized = true;
  return visible_devices() == 0 && fault("no_device") == "init" ? hipErrorInvalidDevice : hipSuccess;
}

HIP_API int hipGetDeviceCount(int *count) {
  CHECK_STICKY();
  *count = visible_devices();
  return *count ? hipSuccess : hipErrorNoDevice;
}

HIP_API int hipSetDevice(int device) {
  CHECK_STICKY();
  if (device < 0 || device >= visible_devices()) return hipErrorInvalidDevice;
  chosen_device = device;
  return hipSuccess;
}

HIP_API int hipRuntimeGetVersion(int *version) {
  *version = 60443484;
  return hipSuccess;
}

HIP_API int hipGetDevicePropertiesR0600(void *p, int device) { // offsets of hipDeviceProp_tR0600
  CHECK_STICKY();
  if (device < 0 || device >= visible_devices()) return hipErrorInvalidDevice;
  std::memset(p, 0, 1472);
  std::snprintf(static_cast<char *>(p), 256, "HIP double %d", device);
  put<size_t>(p, 288, size_t(64) << 30); // totalGlobalMem
  put<size_t>(p, 296, 65536);            // sharedMemPerBlock
  put<int>(p, 308, arch() == "gfx90a" ? 64 : 32);
  put<int>(p, 388, 4);                                // multiProcessorCount
  put<int>(p, 396, 1);                                // integrated
  put<int>(p, 584, 0xc5 + device);                    // pciBusID; domain and device are 0
  put<int>(p, 616, 2 << 20);                          // l2CacheSize
  put<int>(p, 624, 2048);                             // maxThreadsPerMultiProcessor
  put<int>(p, 672, int(fault_number("pageable", 0))); // pageableMemoryAccess
  put<int>(p, 704, int(fault_number("pageable", 0))); // pageableMemoryAccessUsesHostPageTables
  std::snprintf(static_cast<char *>(p) + 1160, 256, "%s%s", arch().c_str(),
                arch() == "gfx90a" ? ":sramecc+:xnack-" : "");
  put<size_t>(p, 1416, 65536); // maxSharedMemoryPerMultiProcessor
  return hipSuccess;
}

// The plain symbol still fills the structure of ROCm 5 (ROCm/clr#151, ROCm/legacy-rocm-build#2728).
HIP_API int hipGetDeviceProperties(void *p, int device) {
  CHECK_STICKY();
  if (device < 0 || device >= visible_devices()) return hipErrorInvalidDevice;
  std::memset(p, 0, 792);
  std::snprintf(static_cast<char *>(p), 256, "HIP double %d", device);
  put<size_t>(p, 256, size_t(64) << 30);
  put<size_t>(p, 264, 65536);
  put<int>(p, 276, arch() == "gfx90a" ? 64 : 32);
  put<int>(p, 336, 4);
  put<int>(p, 340, 2 << 20);
  put<int>(p, 344, 2048);
  put<size_t>(p, 376, 65536);
  std::snprintf(static_cast<char *>(p) + 396, 256, "%s", arch().c_str());
  put<int>(p, 652, 1);
  put<int>(p, 784, int(fault_number("pageable", 0)));
  put<int>(p, 788, int(fault_number("pageable", 0)));
  return hipSuccess;
}

HIP_API const char *hipGetErrorName(int error) {
  switch (error) {
#define NAME(name)                                                                                                     \
  case name: return #name
    NAME(hipSuccess);
    NAME(hipErrorInvalidValue);
    NAME(hipErrorOutOfMemory);
    NAME(hipErrorNotInitialized);
    NAME(hipErrorInvalidConfiguration);
    NAME(hipErrorNoDevice);
    NAME(hipErrorInvalidDevice);
    NAME(hipErrorInvalidImage);
    NAME(hipErrorNoBinaryForGpu);
    NAME(hipErrorInvalidHandle);
    NAME(hipErrorNotFound);
    NAME(hipErrorNotReady);
    NAME(hipErrorIllegalAddress);
    NAME(hipErrorHostMemoryNotRegistered);
    NAME(hipErrorLaunchFailure);
    NAME(hipErrorStreamCaptureUnsupported);
    NAME(hipErrorStreamCaptureInvalidated);
    NAME(hipErrorStreamCaptureUnmatched);
    NAME(hipErrorCapturedEvent);
    NAME(hipErrorStreamCaptureWrongThread);
#undef NAME
  default: return "hipErrorUnknown";
  }
}
