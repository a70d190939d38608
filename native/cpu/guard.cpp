// SIGBUS on a mapped model file: a file that shrinks under its mapping must end a request with an error, not the
// process.
//
// The handler replaces the rest of the mapping by zero pages (a shrunken file has lost all of it, and one mapping is
// cheaper than a fault a page), marks the entry, and returns to the load that faulted. It runs on whatever thread
// touched the page, so it uses a fixed table of atomics and raw system calls only.
#include "cpu/guard.h"

#include <atomic>
#include <cerrno>
#include <csignal>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>
#include <sys/mman.h>
#include <unistd.h>

namespace apu {
namespace {

constexpr size_t kEntries = 4096; // mappings guarded at once: shards of all models of a process

struct Entry {
  std::atomic<uintptr_t> begin{0}; // 0: free
  std::atomic<uintptr_t> end{0};
  std::atomic<uint32_t> faulted{0};
  char *path = nullptr; // written under the mutex before `begin`
};

Entry entries[kEntries];
std::atomic<size_t> used{0};            // entries ever used: how far the handler looks
std::atomic<uint32_t> faults{0};        // entries marked and not yet released
std::atomic<uintptr_t> foreign{0};      // address of the last fault that was not ours
std::atomic<uint32_t> foreign_count{0}; // faults there in a row
std::mutex mutex;
struct sigaction before;
bool installed = false;

void chain(int signal, siginfo_t *info, void *context) {
  // A handler that returns without curing the fault would loop here for ever.
  uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (foreign.exchange(address) != address) foreign_count.store(0);
  bool again = foreign_count.fetch_add(1) > 3;
  if (!again) {
    if (before.sa_flags & SA_SIGINFO) {
      before.sa_sigaction(signal, info, context);
      return;
    }
    if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
      before.sa_handler(signal);
      return;
    }
  }
  struct sigaction fallback = {};
  fallback.sa_handler = SIG_DFL;
  sigaction(signal, &fallback, nullptr);
  if (info->si_code <= 0) raise(signal); // sent by someone: returning would not repeat it
}

void handle(int signal, siginfo_t *info, void *context) {
  int saved = errno;
  uintptr_t address = reinterpret_cast<uintptr_t>(info->si_addr);
  if (info->si_code > 0) {
    size_t count = used.load(std::memory_order_acquire);
    for (size_t i = 0; i < count; ++i) {
      Entry &e = entries[i];
      uintptr_t begin = e.begin.load(std::memory_order_acquire), end = e.end.load(std::memory_order_relaxed);
      if (begin == 0 || address < begin || address >= end) continue;
      uintptr_t page = address & ~uintptr_t(sysconf(_SC_PAGESIZE) - 1);
      void *zero = mmap(reinterpret_cast<void *>(page), end - page, PROT_READ,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
      if (zero == MAP_FAILED) break;
      if (e.faulted.exchange(1) == 0) faults.fetch_add(1);
      errno = saved;
      return;
    }
  }
  chain(signal, info, context);
  errno = saved;
}

// Under the mutex: the first faulted entry's path, or NULL.
const char *faulted_path() {
  for (size_t i = 0; i < used.load(std::memory_order_relaxed); ++i)
    if (entries[i].begin.load(std::memory_order_relaxed) && entries[i].faulted.load()) return entries[i].path;
  return nullptr;
}

} // namespace

apu_status check_mappings() {
  if (faults.load(std::memory_order_acquire) == 0) return APU_OK;
  std::lock_guard<std::mutex> lock(mutex);
  const char *path = faulted_path();
  if (!path) return APU_OK;
  return fail(APU_E_MAPPING,
              "%s: the file was truncated or could not be read while it was mapped; expected it to keep its size: "
              "restore the file and load the model again",
              path);
}

} // namespace apu

using namespace apu;

apu_status apu_mapping_guard(const void *address, uint64_t bytes, const char *path) {
  uintptr_t begin = reinterpret_cast<uintptr_t>(address), page = uintptr_t(sysconf(_SC_PAGESIZE));
  if (!path) return fail(APU_E_INVALID, "apu_mapping_guard: path must not be NULL");
  if (begin == 0 || begin % page != 0)
    return fail(APU_E_INVALID, "%s: guarded address %p is not the start of a page", path, address);
  if (bytes == 0 || bytes > UINTPTR_MAX - begin - page)
    return fail(APU_E_INVALID, "%s: guarded range of %llu bytes is empty or wraps around", path,
                static_cast<unsigned long long>(bytes));
  uintptr_t end = (begin + bytes + page - 1) / page * page;
  std::lock_guard<std::mutex> lock(mutex);
  size_t count = used.load(std::memory_order_relaxed), slot = count;
  for (size_t i = 0; i < count; ++i) {
    uintptr_t b = entries[i].begin.load(std::memory_order_relaxed), e = entries[i].end.load(std::memory_order_relaxed);
    if (b == 0) {
      if (slot == count) slot = i;
    } else if (begin < e && b < end) {
      return fail(APU_E_INVALID, "%s: the range overlaps the guarded mapping of %s", path, entries[i].path);
    }
  }
  if (slot == kEntries)
    return fail(APU_E_MEMORY, "%s: %zu mappings are guarded already, the most there can be", path, kEntries);
  if (!installed) {
    struct sigaction action = {};
    action.sa_sigaction = handle;
    action.sa_flags = SA_SIGINFO | SA_RESTART | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, &action, &before) != 0)
      return fail(APU_E_DEVICE, "%s: cannot install the SIGBUS handler: %s", path, std::strerror(errno));
    installed = true;
  }
  char *copy = strdup(path);
  if (!copy) return fail(APU_E_MEMORY, "%s: out of memory", path);
  Entry &e = entries[slot];
  e.path = copy;
  e.faulted.store(0);
  e.end.store(end, std::memory_order_relaxed);
  e.begin.store(begin, std::memory_order_release);
  if (slot == count) used.store(count + 1, std::memory_order_release);
  return APU_OK;
}

apu_status apu_mapping_release(const void *address) {
  uintptr_t begin = reinterpret_cast<uintptr_t>(address);
  std::lock_guard<std::mutex> lock(mutex);
  for (size_t i = 0; i < used.load(std::memory_order_relaxed); ++i) {
    Entry &e = entries[i];
    if (begin == 0 || e.begin.load(std::memory_order_relaxed) != begin) continue;
    e.begin.store(0, std::memory_order_release);
    if (e.faulted.exchange(0)) faults.fetch_sub(1);
    std::free(e.path);
    e.path = nullptr;
    return APU_OK;
  }
  return fail(APU_E_INVALID, "apu_mapping_release: no mapping is guarded at %p", address);
}

const char *apu_mapping_fault(void) {
  static thread_local std::string text; // the entry may be released while the caller reads
  std::lock_guard<std::mutex> lock(mutex);
  const char *path = faulted_path();
  if (!path) return nullptr;
  text = path;
  return text.c_str();
}
