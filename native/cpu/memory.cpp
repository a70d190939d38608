// Memory as the CPU sees it: host addresses are device addresses, so registering a range is writing it down.
// Allocations are anonymous mappings that the kernel commits page by page when they are first touched, which is what
// lets a plan reserve KV pages for the longest context and pay for the one in use.
#include "common.h"
#include "cpu/device.h"

#include <cerrno>
#include <cstring>
#include <memory>
#include <new>
#include <sys/mman.h>

using namespace apu;

struct apu_region {
  apu_device *device;
  uint8_t *base;
  uint64_t bytes;
  bool owned;
};

namespace {

// From here on huge pages are asked for: below it, one per state would commit most of a cache at its first token.
constexpr uint64_t kHugeFrom = 1u << 30;

apu_status make_region(apu_device *device, void *base, uint64_t bytes, bool owned, apu_region **out) {
  *out = new (std::nothrow) apu_region{device, static_cast<uint8_t *>(base), bytes, owned};
  return *out ? APU_OK : fail(APU_E_MEMORY, "region: out of memory");
}

} // namespace

apu_status apu_memory_register(apu_device *device, const void *host, uint64_t bytes, uint32_t strategy,
                               apu_region **out) {
  if (!device || !out) return fail(APU_E_INVALID, "apu_memory_register: device and out must not be NULL");
  *out = nullptr;
  if (!host || bytes == 0 || bytes > UINTPTR_MAX - reinterpret_cast<uintptr_t>(host))
    return fail(APU_E_INVALID, "apu_memory_register: %llu bytes at %p are no range",
                static_cast<unsigned long long>(bytes), host);
  if (strategy == APU_MEMORY_REGISTERED || strategy == APU_MEMORY_STAGED)
    return fail(APU_E_UNSUPPORTED,
                "device cpu reads host pages in place: expected memory strategy auto or direct, found %s",
                strategy == APU_MEMORY_STAGED ? "staged" : "registered");
  if (strategy > APU_MEMORY_STAGED) return fail(APU_E_INVALID, "apu_memory_register: unknown strategy %u", strategy);
  return make_region(device, const_cast<void *>(host), bytes, false, out);
}

apu_status apu_memory_alloc(apu_device *device, uint64_t bytes, apu_region **out) {
  if (!device || !out) return fail(APU_E_INVALID, "apu_memory_alloc: device and out must not be NULL");
  *out = nullptr;
  if (bytes == 0) return fail(APU_E_INVALID, "apu_memory_alloc: 0 bytes asked for, expected at least 1");
  void *base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED)
    return fail(APU_E_MEMORY, "device cpu: cannot allocate %llu bytes: %s", static_cast<unsigned long long>(bytes),
                std::strerror(errno));
  if (bytes >= kHugeFrom) madvise(base, bytes, MADV_HUGEPAGE); // only advice: small pages work as well
  apu_status status = make_region(device, base, bytes, true, out);
  if (status != APU_OK) munmap(base, bytes);
  return status;
}

apu_status apu_region_chunks(apu_region *region, apu_chunk *out, uint32_t *count) {
  if (!region || !count) return fail(APU_E_INVALID, "apu_region_chunks: region and count must not be NULL");
  uint32_t capacity = *count;
  *count = 1;
  if (!out) return APU_OK; // asks for the number
  if (capacity < 1) return fail(APU_E_INVALID, "apu_region_chunks: room for 0 chunks, expected 1");
  uint64_t address = reinterpret_cast<uintptr_t>(region->base);
  *out = {address, address, region->bytes};
  return APU_OK;
}

apu_status apu_memory_copy(apu_device *device, uint64_t to, uint64_t from, uint64_t bytes, uint32_t, uint32_t) {
  if (!device) return fail(APU_E_INVALID, "apu_memory_copy: device must not be NULL");
  if (bytes && (!to || !from)) return fail(APU_E_INVALID, "apu_memory_copy: address 0");
  if (bytes) std::memmove(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), bytes);
  return APU_OK;
}

void apu_region_free(apu_region *region) {
  if (!region) return;
  if (region->owned) munmap(region->base, region->bytes);
  delete region;
}
