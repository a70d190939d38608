// Host memory that the device reads in place: HIP's and HSA's calls for it, over one table of pages such as the kernel
// driver keeps.
//
// Where the kernel has SVM, the default, a page's address is the same for the device, and what was said of it lasts
// until it is unmapped: unregistering changes nothing (libhsakmt, fmm.c: SVM ranges are left to the kernel's notifier).
// "svm=absent" is a kernel without it: user pointers, which ask for write access and get an address of their own.
#include "state.h"

#include <algorithm>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <sys/mman.h>

using namespace hip_double;

namespace {

constexpr size_t kPage = 4096;
constexpr uint64_t kAgent = 0x6761, kHostAgent = 0x6863; // handles: of device i kAgent + i

enum Status : int { // hsa_status_t
  kSuccess = 0,
  kBreak = 1,
  kError = 0x1000,
  kInvalidArgument = 0x1001,
  kInvalidAgent = 0x1004,
  kOutOfResources = 0x1008,
  kNotInitialized = 0x100b,
};

uint8_t *page_of(const void *p) {
  return reinterpret_cast<uint8_t *>(reinterpret_cast<uintptr_t>(p) / kPage * kPage);
}
uint8_t *pages_end(const void *p, size_t bytes) {
  return page_of(static_cast<const uint8_t *>(p) + bytes + kPage - 1);
}

// A line of /proc/self/maps, or of smaps that begins a mapping.
struct Line {
  uint8_t *begin = nullptr, *end = nullptr;
  char mode[5] = "";
  bool read(const char *text) {
    uintptr_t low = 0, high = 0;
    if (std::sscanf(text, "%" SCNxPTR "-%" SCNxPTR " %4s", &low, &high, mode) != 3) return false;
    begin = reinterpret_cast<uint8_t *>(low), end = reinterpret_cast<uint8_t *>(high);
    return true;
  }
};

struct Mapped {
  bool whole = false, writable = false, only_writable = true, shared = true;
};

// What is mapped at [begin, end).
Mapped mapped(const uint8_t *begin, const uint8_t *end) {
  Mapped out;
  FILE *file = std::fopen("/proc/self/maps", "re");
  if (!file) return out;
  char text[1024];
  while (begin < end && std::fgets(text, sizeof text, file)) {
    Line line;
    if (!line.read(text) || line.end <= begin) continue;
    if (line.begin > begin || line.mode[0] != 'r') break;
    out.writable |= line.mode[1] == 'w';
    out.only_writable &= line.mode[1] == 'w';
    out.shared &= line.mode[3] == 's';
    begin = line.end;
  }
  std::fclose(file);
  out.whole = begin >= end;
  return out;
}

// Pages that the driver knows are marked by MADV_DONTDUMP, which has no other use here and which a new mapping at the
// same place has not. Neighbours are joined.
std::vector<std::pair<uint8_t *, uint8_t *>> marked() {
  std::vector<std::pair<uint8_t *, uint8_t *>> out;
  FILE *file = std::fopen("/proc/self/smaps", "re");
  if (!file) return out;
  char text[1024];
  Line line;
  while (std::fgets(text, sizeof text, file)) {
    if (Line next; next.read(text)) line = next;
    if (std::strncmp(text, "VmFlags:", 8) != 0 || !std::strstr(text, " dd")) continue;
    if (!out.empty() && out.back().second == line.begin)
      out.back().second = line.end;
    else
      out.emplace_back(line.begin, line.end);
  }
  std::fclose(file);
  return out;
}

// The functions below are called with the state's mutex.

std::string asked(const char *key) {
  const auto it = state().faults.find(key);
  return it == state().faults.end() ? "" : it->second;
}
uint64_t asked_number(const char *key, uint64_t otherwise) {
  const std::string text = asked(key);
  return text.empty() ? otherwise : std::strtoull(text.c_str(), nullptr, 0);
}
bool refused(const char *way) {
  return ("," + asked("refuse") + ",").find(std::string(",") + way + ",") != std::string::npos;
}

uint64_t charged() {
  uint64_t bytes = 0;
  for (const auto &[begin, range] : state().ranges) bytes += uint64_t(range.end - begin);
  return bytes;
}

void split_at(uint8_t *at) {
  auto &ranges = state().ranges;
  auto it = ranges.upper_bound(at);
  if (it == ranges.begin()) return;
  --it;
  if (it->first == at || it->second.end <= at) return;
  Range rest = it->second;
  it->second.end = at;
  ranges[at] = rest;
}

template <typename Change> void change_ranges(const char *way, uint8_t *begin, uint8_t *end, Change change) {
  auto &ranges = state().ranges;
  split_at(begin);
  split_at(end);
  for (uint8_t *at = begin; at < end;) {
    auto it = ranges.lower_bound(at);
    if (it == ranges.end() || it->first > at) {
      uint8_t *until = it == ranges.end() ? end : std::min(end, it->first);
      it = ranges.emplace(at, Range{until, false, false, way}).first;
    }
    change(it->second);
    at = it->second.end;
  }
  madvise(begin, size_t(end - begin), MADV_DONTDUMP);
}

template <typename Test> bool all_ranges(const uint8_t *begin, const uint8_t *end, Test test) {
  const auto &ranges = state().ranges;
  auto it = ranges.upper_bound(const_cast<uint8_t *>(begin));
  if (it == ranges.begin()) return false;
  for (--it; begin < end; ++it) {
    if (it == ranges.end() || it->first > begin || it->second.end <= begin || !test(it->second)) return false;
    begin = it->second.end;
  }
  return true;
}

// Whether the driver takes these pages. Ranges of host memory are charged against a limit of their own below the
// machine's memory (linux, kfd_svm.c: "SVM mapping failed, exceeds resident system memory limit"): "kfd_limit"; one
// call can fail for its size as well: "register_limit". User pointers are refused where an SVM range is left from an
// attempt before (linux, kfd_chardev.c, kfd_ioctl_alloc_memory_of_gpu): "stale=refused" refuses any way after any
// other.
bool taken(const char *way, const uint8_t *begin, const uint8_t *end) {
  forget_unmapped();
  if (refused(way)) return false;
  const uint64_t bytes = uint64_t(end - begin);
  if (!mapped(begin, end).whole || bytes > asked_number("register_limit", UINT64_MAX)) return false;
  uint64_t fresh = bytes;
  for (const auto &[from, range] : state().ranges) {
    const uint8_t *low = std::max<const uint8_t *>(from, begin), *high = std::min<const uint8_t *>(range.end, end);
    if (low >= high) continue;
    if (asked("stale") == "refused" && std::strcmp(range.way, way) != 0) return false;
    fresh -= uint64_t(high - low);
  }
  return charged() + fresh <= asked_number("kfd_limit", UINT64_MAX);
}

// The kernel asks for write access wherever the mapping allows it. On a private one that breaks copy-on-write, and the
// whole range becomes anonymous memory (ROCm/legacy-rocm-build#6523). "copied=n" costs n times the range on any
// mapping, until it is unmapped: so whoever watches memory is tested.
void fault_in(uint8_t *begin, uint8_t *end) {
  if (mapped(begin, end).only_writable)
    for (uint8_t *page = begin; page < end; page += kPage) {
      auto *byte = static_cast<volatile uint8_t *>(page);
      *byte = *byte;
    }
  const size_t bytes = size_t(end - begin) * asked_number("copied", 0);
  if (!bytes) return;
  void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
  if (p != MAP_FAILED) state().copied.emplace(begin, std::make_pair(p, bytes));
}

// Another address for the same pages, between inaccessible ones. "wrong" gives other pages, as a stale translation
// does: of no runtime is that known, but it is what a sum over the pages is for.
bool move(uint8_t *host, Registration &r) {
  r.map_bytes = r.bytes + 2 * kPage;
  void *map = mmap(nullptr, r.map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (map == MAP_FAILED) return false;
  r.map = static_cast<uint8_t *>(map);
  r.device = r.map + kPage;
  if (!asked("wrong").empty()) return mprotect(r.device, r.bytes, PROT_READ) == 0;
  // Of size 0: a second mapping of the same pages, which only shared ones can have.
  if (mremap(host, 0, r.bytes, MREMAP_MAYMOVE | MREMAP_FIXED, r.device) != MAP_FAILED) return true;
  munmap(r.map, r.map_bytes);
  return false;
}

void release(Registration &r) {
  if (r.map) munmap(r.map, r.map_bytes);
}

// hipHostRegister and hsa_amd_memory_lock of whole pages. Without SVM the driver asks for write access whenever it
// makes a user pointer, so that a mapping that may only be read is refused (libhsakmt, fmm.c:
// fmm_register_user_memory). "scattered" gives such addresses with SVM too: what a device sees need not be the host's
// address, nor adjoin where the host's pages do (HIP documentation, hipHostGetDevicePointer).
bool give(uint8_t *host, size_t bytes, bool coarse, bool locked) {
  State &s = state();
  const char *way = locked ? "lock" : "register";
  uint8_t *begin = page_of(host), *end = pages_end(host, bytes);
  const bool svm = asked("svm") != "absent";
  if (!taken(way, begin, end) || (!svm && !mapped(begin, end).writable)) return false;
  Registration r;
  r.bytes = size_t(end - begin);
  r.device = begin;
  r.locked = locked;
  if ((!svm || !asked("scattered").empty() || !asked("wrong").empty()) && mapped(begin, end).shared && !move(begin, r))
    return false;
  r.device += host - begin;
  if (const auto old = s.registrations.find(host); old != s.registrations.end()) release(old->second);
  s.registrations[host] = r;
  change_ranges(way, begin, end, [&](Range &range) {
    range.accessible = true;
    range.coarse = coarse; // whatever had been advised
  });
  fault_in(begin, end);
  return true;
}

bool forget(void *host, bool locked) {
  State &s = state();
  const auto it = s.registrations.find(static_cast<uint8_t *>(host));
  if (it == s.registrations.end() || it->second.locked != locked) return false;
  if (asked("unregister") == "nothing") return true;
  if (it->second.map) { // a user pointer
    uint8_t *begin = page_of(host), *end = begin + it->second.bytes;
    split_at(begin);
    split_at(end);
    s.ranges.erase(s.ranges.lower_bound(begin), s.ranges.lower_bound(end));
  }
  release(it->second);
  s.registrations.erase(it);
  return true;
}

bool agent_of(uint64_t handle) {
  return handle >= kAgent && handle < kAgent + asked_number("devices", 1);
}

} // namespace

namespace hip_double {

const std::pair<uint8_t *const, Registration> *registration_of(const void *host) {
  const auto &all = state().registrations;
  auto it = all.upper_bound(static_cast<uint8_t *>(const_cast<void *>(host)));
  if (it == all.begin()) return nullptr;
  --it;
  return static_cast<const uint8_t *>(host) < it->first + it->second.bytes ? &*it : nullptr;
}

bool registered(const void *p, size_t bytes, bool device) {
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto *at = static_cast<const uint8_t *>(p);
  for (const auto &[host, r] : s.registrations) {
    const uint8_t *begin = device ? r.device : host;
    if (at >= begin && at + bytes <= begin + r.bytes) return true;
  }
  return device && all_ranges(page_of(p), pages_end(p, bytes), [](const Range &r) { return r.accessible; });
}

bool names_moved_memory(const std::vector<uint8_t> &argument) {
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  for (size_t i = 0; i + sizeof(uint64_t) <= argument.size(); i += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, argument.data() + i, sizeof word);
    const auto *found = registration_of(reinterpret_cast<const void *>(word));
    if (found && found->second.map) return true;
  }
  return false;
}

// A mapping that ends takes with it what the driver knew of its pages (linux, svm_range_unmap_from_cpu). The runtime's
// own table would keep an entry, which is counted until somebody maps the place again.
void forget_unmapped() {
  State &s = state();
  if (s.ranges.empty()) return;
  const auto kept = marked();
  for (auto it = s.ranges.begin(); it != s.ranges.end();) {
    const auto begin = it->first;
    const Range range = it->second;
    it = s.ranges.erase(it);
    for (const auto &[low, high] : kept) {
      uint8_t *from = std::max(begin, low), *to = std::min(range.end, high);
      if (from < to) s.ranges[from] = Range{to, range.coarse, range.accessible, range.way};
    }
    it = s.ranges.lower_bound(range.end);
  }
  for (auto it = s.copied.begin(); it != s.copied.end();) {
    if (all_ranges(it->first, it->first + kPage, [](const Range &) { return true; })) {
      ++it;
      continue;
    }
    munmap(it->second.first, it->second.second);
    it = s.copied.erase(it);
  }
  for (auto it = s.registrations.begin(); it != s.registrations.end();) {
    const bool gone = !all_ranges(page_of(it->first), pages_end(it->first, 1), [](const Range &) { return true; });
    if (!gone) {
      ++it;
      continue;
    }
    release(it->second);
    it = s.registrations.erase(it);
  }
}

// Rates in MB/s. What users of gfx1151 measured: device memory and cached system pages at 204 to 221 GB/s, pages that
// the device does not cache at a small part of that (facts behind ROCm/rocm-systems#6278).
uint64_t read_ns(const void *from, uint64_t bytes) {
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  uint64_t rate = asked_number("rate_device", 210'000);
  const uint8_t *host = nullptr;
  const auto *at = static_cast<const uint8_t *>(from);
  for (const auto &[address, r] : s.registrations)
    if (at >= r.device && at < r.device + r.bytes) host = address + (at - r.device);
  if (!host && all_ranges(page_of(from), page_of(from) + kPage, [](const Range &) { return true; })) host = at;
  if (host)
    rate = all_ranges(page_of(host), pages_end(host, bytes), [](const Range &r) { return r.coarse; })
               ? asked_number("rate_coarse", 205'000)
               : asked_number("rate_fine", 21'000);
  return std::max<uint64_t>(bytes * 1000 / rate, 1);
}

} // namespace hip_double

// Before ROCm of mid-2026 hipHostRegister stores flag 0x8 and registers fine-grained whatever it says, and undoes an
// advice given before (ROCm/rocm-systems#6278): "fine". The flag was refused too (antirez/ds4#791):
// "read_only=refused". A failure is hipErrorInvalidValue, whatever its cause (clr, ihipHostRegister).
HIP_API int hipHostRegister(void *host, size_t bytes, unsigned flags) {
  CHECK_STICKY();
  if (const int refused_now = refuse_while_capturing()) return refused_now;
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  constexpr unsigned kKnown = 0x1 | 0x2 | 0x8 | 0x80000000; // portable, mapped, read-only, uncached
  if (!host || !bytes || flags & ~kKnown) return hipErrorInvalidValue;
  if (flags & 0x8 && asked("read_only") == "refused") return hipErrorInvalidValue;
  const bool coarse = flags & 0x8 && asked("fine").empty();
  const bool given = give(static_cast<uint8_t *>(host), bytes, coarse, false);
  publish();
  return given ? hipSuccess : hipErrorInvalidValue;
}

HIP_API int hipHostUnregister(void *host) {
  CHECK_STICKY();
  if (const int refused_now = refuse_while_capturing()) return refused_now;
  drain_all();
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const bool known = forget(host, false);
  publish();
  return known ? hipSuccess : hipErrorHostMemoryNotRegistered;
}

// Advice is taken for any mapped pages, registered or not. SetCoarseGrain is refused by some releases on APUs
// (ggml-org/llama.cpp#20536): "coarse=invalid"; "coarse=ignored" takes it and changes nothing.
HIP_API int hipMemAdvise(const void *p, size_t bytes, int advice, int device) {
  CHECK_STICKY();
  if (const int refused_now = refuse_while_capturing()) return refused_now;
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (!p || !bytes || device < 0 || uint64_t(device) >= asked_number("devices", 1)) return hipErrorInvalidValue;
  const bool grain = advice == 100 || advice == 101, access = advice == 5 || advice == 6;
  if (!grain && !access && (advice < 1 || advice > 4)) return hipErrorInvalidValue;
  uint8_t *begin = page_of(p), *end = pages_end(p, bytes);
  if (asked("svm") == "absent") return hipErrorInvalidValue;
  if (grain && asked("coarse") == "invalid") return hipErrorInvalidValue;
  forget_unmapped();
  const bool known = all_ranges(begin, end, [](const Range &) { return true; });
  if (!known && !taken("advise", begin, end)) return hipErrorInvalidValue;
  change_ranges("advise", begin, end, [&](Range &range) {
    if (grain && asked("coarse") != "ignored") range.coarse = advice == 100;
    if (access) range.accessible = advice == 5;
  });
  if (advice == 5) fault_in(begin, end);
  publish();
  return hipSuccess;
}

// Of pages that nothing was said of the answer is the kernel's default, fine-grained.
HIP_API int hipMemRangeGetAttribute(void *out, size_t size, int attribute, const void *p, size_t bytes) {
  CHECK_STICKY();
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (!out || !p || !bytes || size != 4 || attribute != 100 || asked("svm") == "absent") return hipErrorInvalidValue;
  const uint8_t *begin = page_of(p), *end = pages_end(p, bytes);
  uint32_t mode = 0; // fine
  if (all_ranges(begin, end, [](const Range &r) { return r.coarse; }))
    mode = 1;
  else
    for (const auto &[from, range] : s.ranges)
      if (from < end && range.end > begin && range.coarse) mode = 2; // some of it
  std::memcpy(out, &mode, sizeof mode);
  return hipSuccess;
}

// HSA, as ROCr offers it beside HIP in the same process.

struct Attribute {
  uint64_t key, value;
};
enum AttributeKey : uint64_t {
  kGlobalFlag = 0,
  kReadOnly = 1,
  kLastPlain = 7,
  kAccessible = 0x200,
  kInPlace,
  kNoAccess
};

HIP_API int hsa_init() {
  return kSuccess;
}
HIP_API int hsa_shut_down() {
  return kSuccess;
}

HIP_API int hsa_status_string(int status, const char **out) {
  switch (status) {
  case kSuccess: *out = "HSA_STATUS_SUCCESS: The function has been executed successfully."; break;
  case kError: *out = "HSA_STATUS_ERROR: A generic error has occurred."; break;
  case kInvalidArgument:
    *out = "HSA_STATUS_ERROR_INVALID_ARGUMENT: One of the actual arguments does not meet a precondition stated in the "
           "documentation of the corresponding formal argument.";
    break;
  case kInvalidAgent: *out = "HSA_STATUS_ERROR_INVALID_AGENT: The agent is invalid."; break;
  case kOutOfResources:
    *out = "HSA_STATUS_ERROR_OUT_OF_RESOURCES: The runtime failed to allocate the necessary resources.";
    break;
  default: return kInvalidArgument;
  }
  return kSuccess;
}

HIP_API int hsa_iterate_agents(int (*callback)(uint64_t agent, void *data), void *data) {
  int status = callback(kHostAgent, data);
  const uint64_t devices = fault_number("devices", 1);
  for (uint64_t i = 0; i < devices && status == kSuccess; ++i) status = callback(kAgent + i, data);
  return status;
}

HIP_API int hsa_agent_get_info(uint64_t agent, int attribute, void *out) {
  const bool host = agent == kHostAgent;
  if (!host && !agent_of(agent)) return kInvalidAgent;
  switch (attribute) {
  case 17: return *static_cast<int *>(out) = host ? 0 : 1, int(kSuccess); // device: CPU, GPU
  case 0: {                                                               // name
    const std::string arch = fault("arch");
    std::snprintf(static_cast<char *>(out), 64, "%s", host ? "host" : arch.empty() ? "gfx1151" : arch.c_str());
    return kSuccess;
  }
  case 0xa006: // AMD's: bus, device and function, bus 0xc5 + i as hipDeviceProp_t says
    return *static_cast<uint32_t *>(out) = host ? 0 : uint32_t(0xc5 + agent - kAgent) << 8, int(kSuccess);
  case 0xa00f: return *static_cast<uint32_t *>(out) = 0, int(kSuccess); // domain
  default: return kInvalidArgument;
  }
}

// What a buffer's address belongs to. Pages that are the device's by their attributes alone are no buffer.
struct PointerInfo {
  uint32_t size;
  int type; // 0 unknown, 1 allocated by the runtime, 2 locked
  void *agent_base, *host_base;
  size_t bytes;
  void *user_data;
  uint64_t owner;
  uint32_t global_flags; // 2 fine-grained, 4 coarse-grained
  bool registered;
};

HIP_API int hsa_amd_pointer_info(const void *p, PointerInfo *out, void *(*)(size_t), uint32_t *, uint64_t **) {
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const auto *at = static_cast<const uint8_t *>(p);
  PointerInfo found = {};
  found.size = sizeof found;
  for (const auto &[address, a] : s.allocations)
    if (at >= address && at < address + a.bytes)
      found = {sizeof found,
               1,
               address,
               a.pinned ? (a.second ? a.second : address) : nullptr,
               a.bytes,
               nullptr,
               kAgent + uint64_t(a.device),
               a.pinned ? 2u : 4u,
               a.pinned};
  for (const auto &[host, r] : s.registrations)
    if (at >= r.device && at < r.device + r.bytes) {
      const bool coarse =
          all_ranges(page_of(host), page_of(host) + r.bytes, [](const Range &range) { return range.coarse; });
      found = {sizeof found, 2, r.device, host, r.bytes, nullptr, kHostAgent, coarse ? 4u : 2u, true};
    }
  const uint32_t size = std::min<uint32_t>(out->size, sizeof found);
  std::memcpy(out, &found, size);
  out->size = size;
  return kSuccess;
}

HIP_API int hsa_amd_svm_attributes_set(void *p, size_t bytes, const Attribute *list, size_t count) {
  State &s = state();
  if (s.sticky.load()) return kError;
  std::lock_guard<std::mutex> lock(s.mutex);
  if (!p || !bytes) return kInvalidArgument;
  for (size_t i = 0; i < count; ++i) {
    const auto [key, value] = list[i];
    if (key >= kAccessible && key <= kNoAccess) {
      if (!agent_of(value)) return kInvalidAgent;
    } else if (key > kLastPlain || (key == kGlobalFlag && value > 1)) {
      return kInvalidArgument;
    }
  }
  uint8_t *begin = page_of(p), *end = pages_end(p, bytes);
  const bool gives = std::any_of(list, list + count, [](const Attribute &a) { return a.key != kNoAccess; });
  if (asked("svm") == "absent" || (gives && !taken("svm", begin, end))) return kError; // "hsaKmtSVMSetAttr failed."
  change_ranges("svm", begin, end, [&](Range &range) {
    for (size_t i = 0; i < count; ++i) {
      const auto [key, value] = list[i];
      if (key == kGlobalFlag && asked("coarse") != "ignored") range.coarse = value == 1;
      if (key == kAccessible || key == kInPlace) range.accessible = true;
      if (key == kNoAccess) range.accessible = false;
    }
  });
  if (gives) fault_in(begin, end);
  publish();
  return kSuccess;
}

HIP_API int hsa_amd_svm_attributes_get(void *p, size_t bytes, Attribute *list, size_t count) {
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  if (!p || !bytes) return kInvalidArgument;
  if (asked("svm") == "absent") return kError;
  const uint8_t *begin = page_of(p), *end = pages_end(p, bytes);
  for (size_t i = 0; i < count; ++i) {
    if (list[i].key != kGlobalFlag) return kInvalidArgument;
    bool some = false;
    for (const auto &[from, range] : s.ranges) some |= from < end && range.end > begin && range.coarse;
    list[i].value = all_ranges(begin, end, [](const Range &r) { return r.coarse; }) ? 1 : some ? 2 : 0;
  }
  return kSuccess;
}

// Coarse-grained unless a pool says otherwise (ROCr, hsa_amd_memory_lock).
HIP_API int hsa_amd_memory_lock(void *host, size_t bytes, const uint64_t *agents, int count, void **out) {
  State &s = state();
  if (s.sticky.load()) return kError;
  std::lock_guard<std::mutex> lock(s.mutex);
  *out = nullptr;
  if (!host || !bytes) return kInvalidArgument;
  for (int i = 0; i < count; ++i)
    if (!agent_of(agents[i])) return kInvalidAgent;
  const bool given = give(static_cast<uint8_t *>(host), bytes, asked("coarse") != "ignored", true);
  publish();
  if (!given) return kOutOfResources;
  *out = s.registrations[static_cast<uint8_t *>(host)].device;
  return kSuccess;
}

HIP_API int hsa_amd_memory_unlock(void *host) {
  State &s = state();
  std::lock_guard<std::mutex> lock(s.mutex);
  const bool known = forget(host, true);
  publish();
  return known ? kSuccess : kInvalidArgument;
}
