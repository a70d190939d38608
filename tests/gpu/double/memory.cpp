// Memory: device allocations between guard pages, pinned memory, copies and fills.
#include "state.h"

#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

using namespace hip_double;

namespace {

constexpr size_t kPage = 4096, kAlignment = 256;
constexpr size_t kPoisoned = size_t(256) << 20; // larger allocations are left to the kernel's lazy zero pages
constexpr int kPoison = 0xff;

size_t rounded(size_t bytes, size_t to) {
  return (bytes + to - 1) / to * to;
}

// Pages for `bytes` that end, rounded to the alignment, where the guard page begins.
Allocation map_guarded(size_t bytes, int fd) {
  Allocation a;
  const size_t pages = rounded(bytes, kPage);
  a.map_bytes = pages + 2 * kPage;
  void *all = mmap(nullptr, a.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (all == MAP_FAILED) return {};
  a.map = static_cast<uint8_t *>(all);
  const int flags = fd < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
  if (mmap(a.map + kPage, pages, PROT_READ | PROT_WRITE, flags | MAP_FIXED, fd, 0) == MAP_FAILED) {
    munmap(a.map, a.map_bytes);
    return {};
  }
  a.data = a.map + kPage + (pages - rounded(bytes, kAlignment));
  a.bytes = bytes;
  return a;
}

// "apart": device memory lies in a file without a name, so that it is none of the process's anonymous memory, as that
// of a GPU with memory of its own.
int apart_file(size_t bytes) {
  if (fault("apart").empty()) return -1;
  const char *folder = std::getenv("TMPDIR");
  std::string path = std::string(folder ? folder : "/tmp") + "/device-memory-XXXXXX";
  const int fd = mkostemp(path.data(), O_CLOEXEC);
  if (fd < 0) return -1;
  unlink(path.c_str());
  return ftruncate(fd, off_t(rounded(bytes, kPage))) ? (close(fd), -1) : fd;
}

void protect(const Allocation &a, int protection) {
  mprotect(a.map + kPage, a.map_bytes - 2 * kPage, protection);
}

// With the state's mutex: device memory is for the device alone.
bool reachable_by_host(const Allocation &a) {
  return a.pinned && !a.second;
}

} // namespace

namespace hip_double {

static const Allocation *find(const void *p, size_t bytes) {
  State &s = state();
  auto it = s.allocations.upper_bound(static_cast<uint8_t *>(const_cast<void *>(p)));
  if (it == s.allocations.begin()) return nullptr;
  const Allocation &a = std::prev(it)->second;
  const auto *address = static_cast<const uint8_t *>(p);
  return address + bytes <= a.data + a.bytes ? &a : nullptr;
}

bool on_device(const void *p, size_t bytes) {
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (find(p, bytes)) return true;
  }
  return registered(p, bytes, true);
}

bool pinned(const void *p, size_t bytes) {
  if (registered(p, bytes, false)) return true;
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto *address = static_cast<const uint8_t *>(p);
  for (const auto &[key, a] : s.allocations) {
    const uint8_t *host = a.second ? a.second : a.data;
    if (a.pinned && address >= host && address + bytes <= host + a.bytes) return true;
  }
  return false;
}

void open_memory() {
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (s.working++) return;
  for (const auto &[key, a] : s.allocations)
    if (!reachable_by_host(a)) protect(a, PROT_READ | PROT_WRITE);
}

void close_memory() {
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (--s.working) return;
  for (const auto &[key, a] : s.allocations)
    if (!reachable_by_host(a)) protect(a, PROT_NONE);
}

} // namespace hip_double

// hipMalloc fails with hipErrorOutOfMemory where the device's pool ends, which on an APU is often long before the
// machine's memory does (ROCm/TheRock#1054, ROCm/legacy-rocm-build#5444).
HIP_API int hipMalloc(void **out, size_t bytes) {
  CHECK_STICKY();
  if (const int refused = refuse_while_capturing()) return refused;
  *out = nullptr;
  const uint64_t limit = fault_number("memory", uint64_t(64) << 30), fails = fault_number("oom_at", 0);
  const int fd = apart_file(bytes);
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (++s.mallocs == fails || s.allocated + bytes > limit) {
    if (fd >= 0) close(fd);
    return hipErrorOutOfMemory;
  }
  Allocation a = map_guarded(bytes, fd);
  if (fd >= 0) close(fd);
  if (!a.map) return hipErrorOutOfMemory;
  if (bytes <= kPoisoned) std::memset(a.map + kPage, kPoison, a.map_bytes - 2 * kPage);
  if (!s.working) protect(a, PROT_NONE);
  a.device = current_device();
  s.allocated += bytes;
  s.allocations[a.data] = a;
  publish();
  *out = a.data;
  return hipSuccess;
}

// The figures are of no one's memory on some APUs: more free than there is (ROCm/legacy-rocm-build#6004: 120 of 62.47
// GiB), a sixth of it (ROCm/hip#3892), half of it (ROCm/TheRock#4645). "mem_free" and "mem_total" say them.
HIP_API int hipMemGetInfo(size_t *free, size_t *total) {
  CHECK_STICKY();
  const uint64_t limit = fault_number("memory", uint64_t(64) << 30);
  const uint64_t said_free = fault_number("mem_free", 0), said_total = fault_number("mem_total", 0);
  std::lock_guard<std::mutex> lock(state().mutex);
  *total = said_total ? said_total : limit;
  *free = said_free ? said_free : limit - state().allocated;
  return hipSuccess;
}

// Freeing waits for the device (HIP documentation, hipFree: implicit synchronisation).
HIP_API int hipFree(void *p) {
  CHECK_STICKY();
  if (const int refused = refuse_while_capturing()) return refused;
  drain_all();
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto it = s.allocations.find(static_cast<uint8_t *>(p));
  if (it == s.allocations.end() || it->second.pinned) return hipErrorInvalidValue;
  s.allocated -= it->second.bytes;
  munmap(it->second.map, it->second.map_bytes);
  s.allocations.erase(it);
  publish();
  return hipSuccess;
}

// The device may see pinned memory at another address than the host (HIP documentation, hipHostGetDevicePointer; CUDA's
// says when): "moved" arranges that.
HIP_API int hipHostMalloc(void **out, size_t bytes, unsigned) {
  CHECK_STICKY();
  if (const int refused = refuse_while_capturing()) return refused;
  *out = nullptr;
  const bool moved = !fault("moved").empty();
  const uint64_t limit = fault_number("pinned_memory", UINT64_MAX), fails = fault_number("pinned_oom_at", 0);
  {
    std::lock_guard<std::mutex> lock(state().mutex);
    if (++state().host_mallocs == fails || state().pinned + bytes > limit) return hipErrorOutOfMemory;
  }
  const int fd = memfd_create("pinned", MFD_CLOEXEC);
  if (fd < 0 || ftruncate(fd, off_t(rounded(bytes, kPage)))) return hipErrorOutOfMemory;
  Allocation a = map_guarded(bytes, fd);
  const Allocation host = moved ? map_guarded(bytes, fd) : Allocation{};
  close(fd);
  if (!a.map || (moved && !host.map)) return hipErrorOutOfMemory;
  a.pinned = true;
  a.device = current_device();
  a.second = host.data;
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  std::memset(a.map + kPage, kPoison, a.map_bytes - 2 * kPage);
  if (!s.working && !reachable_by_host(a)) protect(a, PROT_NONE);
  s.pinned += bytes;
  s.allocations[a.data] = a;
  publish();
  *out = moved ? a.second : a.data;
  return hipSuccess;
}

HIP_API int hipHostGetDevicePointer(void **out, void *host, unsigned) {
  CHECK_STICKY();
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  for (const auto &[key, a] : s.allocations)
    if (a.pinned && (a.second ? a.second : a.data) == host) return *out = a.data, int(hipSuccess);
  if (const auto *r = registration_of(host); r && !r->second.locked)
    return *out = r->second.device + (static_cast<uint8_t *>(host) - r->first), int(hipSuccess);
  return hipErrorInvalidValue;
}

HIP_API int hipHostFree(void *host) {
  CHECK_STICKY();
  if (const int refused = refuse_while_capturing()) return refused;
  drain_all();
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  for (auto it = s.allocations.begin(); it != s.allocations.end(); ++it) {
    const Allocation &a = it->second;
    if (!a.pinned || (a.second ? a.second : a.data) != host) continue;
    if (a.second) munmap(a.second - (a.data - a.map), a.map_bytes);
    munmap(a.map, a.map_bytes);
    s.pinned -= a.bytes;
    s.allocations.erase(it);
    publish();
    return hipSuccess;
  }
  return hipErrorInvalidValue;
}

// Pageable memory is staged: it may be changed once the call has returned, pinned memory may not before the copy is
// done. Addresses that are no allocation are refused at the call. A copy that never ends, or only after minutes, was
// seen from mapped files of many GB (ROCm/legacy-rocm-build#6582, #6182, ggml-org/llama.cpp#15018): "copy_hang=k" is
// the k-th to the device, "copy_fail=k" one that is refused.
HIP_API int hipMemcpyAsync(void *to, const void *from, size_t bytes, int kind, void *handle) {
  CHECK_STICKY();
  auto *stream = static_cast<Stream *>(handle);
  const bool to_device = kind == 1 || kind == 3, from_device = kind == 2 || kind == 3;
  if ((to_device && !on_device(to, bytes)) || (from_device && !on_device(from, bytes))) return hipErrorInvalidValue;
  if (kind < 1 || kind > 3) return hipErrorInvalidValue;
  if (kind == 1) {
    State &s = state();
    const uint64_t number = ++s.copies;
    const bool pageable = !pinned(from, bytes);
    s.counts[kCopiedBytes] += bytes;
    if (pageable) s.counts[kPageableBytes] += bytes;
    if (number == fault_number("copy_fail", 0)) return hipErrorUnknown;
    if (number == fault_number("copy_hang", 0))
      if (const int refused = enqueue(stream, [hangs = fault("copy_hang")] { hang("copy_hang", hangs); }))
        return refused;
    if (pageable && !stream->capture) {
      const auto *now = static_cast<const uint8_t *>(from);
      auto staged = std::make_shared<std::vector<uint8_t>>(now, now + bytes);
      return enqueue(stream, [=] { std::memcpy(to, staged->data(), bytes); });
    }
  }
  return enqueue(stream, [=] { std::memmove(to, from, bytes); });
}

HIP_API int hipMemsetAsync(void *to, int value, size_t bytes, void *stream) {
  CHECK_STICKY();
  if (!on_device(to, bytes)) return hipErrorInvalidValue;
  return enqueue(static_cast<Stream *>(stream), [=] { std::memset(to, value, bytes); });
}
