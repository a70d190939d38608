// Memory as the CPU sees it: host addresses are device addresses, so registering a range is writing it down.
// Allocations are anonymous mappings that the kernel commits page by page when they are first touched, which is what
// lets a plan reserve KV pages for the longest context and pay for the one in use.
#include "cpu/device.h"

#include <cerrno>
#include <cstring>
#include <sys/mman.h>

namespace apu::cpu {
namespace {

// From here on huge pages are asked for: below it, one per state would commit most of a cache at its first token.
constexpr uint64_t kHugeFrom = 1u << 30;

struct InPlace final : apu_region {
  InPlace(uint64_t address, uint64_t bytes) {
    chunks.push_back({address, address, bytes});
    info.strategy = APU_MEMORY_DIRECT;
  }
};

struct Anonymous final : apu_region {
  ~Anonymous() override {
    if (!chunks.empty()) munmap(reinterpret_cast<void *>(chunks[0].host), chunks[0].bytes);
  }
};

} // namespace

apu_status Device::register_memory(const void *host, uint64_t bytes, uint32_t strategy, uint32_t,
                                   std::unique_ptr<apu_region> &out) {
  if (strategy == APU_MEMORY_REGISTERED || strategy == APU_MEMORY_STAGED)
    return fail(APU_E_UNSUPPORTED,
                "device cpu reads host pages in place: expected memory strategy auto or direct, found %s",
                strategy == APU_MEMORY_STAGED ? "staged" : "registered");
  out = std::make_unique<InPlace>(reinterpret_cast<uintptr_t>(host), bytes);
  return APU_OK;
}

apu_status Device::alloc_memory(uint64_t bytes, std::unique_ptr<apu_region> &out) {
  auto region = std::make_unique<Anonymous>();
  region->chunks.reserve(1);
  void *base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED)
    return fail(APU_E_MEMORY, "device cpu: cannot allocate %llu bytes: %s", static_cast<unsigned long long>(bytes),
                std::strerror(errno));
  if (bytes >= kHugeFrom) madvise(base, bytes, MADV_HUGEPAGE); // only advice: small pages work as well
  const uint64_t address = reinterpret_cast<uintptr_t>(base);
  region->chunks.push_back({address, address, bytes});
  region->info.device_bytes = bytes;
  out = std::move(region);
  return APU_OK;
}

apu_status Device::copy(uint64_t to, uint64_t from, uint64_t bytes, bool, bool) {
  std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes);
  return APU_OK;
}

apu_status Device::open_stager(uint64_t, std::unique_ptr<apu_stager> &) {
  return fail(APU_E_UNSUPPORTED, "device cpu reads host pages in place: there is no memory of its own to copy to");
}

} // namespace apu::cpu
