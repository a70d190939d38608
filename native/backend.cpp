// The C functions of devices, memory and plan creation: arguments are checked here, once for every kind of device.
#include "backend.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <unistd.h>

using namespace apu;

namespace {

constexpr uint64_t kLeastRing = 64 << 10;

template <typename Call> apu_status guarded(const char *name, const Call &call) {
  try {
    return call();
  } catch (const std::exception &e) { // bad_alloc, length_error
    return fail(APU_E_MEMORY, "%s: out of memory: %s", name, e.what());
  }
}

} // namespace

apu_status apu_device_open(const char *kind, int32_t index, const apu_device_options *options, apu_device **out) {
  if (!kind || !out) return fail(APU_E_INVALID, "apu_device_open: kind and out must not be NULL");
  *out = nullptr;
  const apu_device_options o = options ? *options : apu_device_options{};
  return guarded("apu_device_open", [&] {
    std::unique_ptr<apu_device> device;
    if (std::strcmp(kind, "cpu") == 0) {
      if (index != 0) return fail(APU_E_INVALID, "device cpu: index %d does not exist, expected 0", index);
      TRY(cpu::open_device(o, device));
    } else if (std::strcmp(kind, "hip") == 0 || std::strcmp(kind, "cuda") == 0) {
      if (index < 0) return fail(APU_E_INVALID, "device %s: index is %d, expected 0 or more", kind, index);
      TRY(gpu::open_device(kind, uint32_t(index), o, device));
    } else {
      return fail(APU_E_UNSUPPORTED, "device kind \"%s\" is not in this build: expected \"cpu\", \"hip\" or \"cuda\"",
                  kind);
    }
    *out = device.release();
    return apu_status(APU_OK);
  });
}

apu_status apu_device_get_props(apu_device *device, apu_device_props *out) {
  if (!device || !out) return fail(APU_E_INVALID, "apu_device_get_props: device and out must not be NULL");
  std::memset(out, 0, sizeof(*out));
  device->props(*out);
  return APU_OK;
}

apu_status apu_device_memory(apu_device *device, uint64_t *free_bytes, uint64_t *total_bytes) {
  if (!device || !free_bytes || !total_bytes)
    return fail(APU_E_INVALID, "apu_device_memory: device, free_bytes and total_bytes must not be NULL");
  return device->memory(*free_bytes, *total_bytes);
}

void apu_device_close(apu_device *device) {
  delete device;
}

apu_status apu_memory_register(apu_device *device, const void *host, uint64_t bytes, uint32_t strategy, uint32_t way,
                               apu_region **out) {
  if (!device || !out) return fail(APU_E_INVALID, "apu_memory_register: device and out must not be NULL");
  *out = nullptr;
  if (!host || bytes == 0 || bytes > UINTPTR_MAX - reinterpret_cast<uintptr_t>(host))
    return fail(APU_E_INVALID, "apu_memory_register: %llu bytes at %p are no range",
                static_cast<unsigned long long>(bytes), host);
  if (strategy > APU_MEMORY_STAGED) return fail(APU_E_INVALID, "apu_memory_register: unknown strategy %u", strategy);
  if (way > APU_WAY_REGISTER) return fail(APU_E_INVALID, "apu_memory_register: unknown way %u", way);
  if ((strategy == APU_MEMORY_REGISTERED) != (way != APU_WAY_AUTO))
    return fail(APU_E_INVALID, "apu_memory_register: way %u with strategy %u: registered needs a way, nothing else has",
                way, strategy);
  const auto page = uint64_t(sysconf(_SC_PAGESIZE));
  if (strategy == APU_MEMORY_REGISTERED && (reinterpret_cast<uintptr_t>(host) % page || bytes % page))
    return fail(APU_E_INVALID, "apu_memory_register: %llu bytes at %p are not whole pages of %llu",
                static_cast<unsigned long long>(bytes), host, static_cast<unsigned long long>(page));
  return guarded("apu_memory_register", [&] {
    std::unique_ptr<apu_region> region;
    TRY(device->register_memory(host, bytes, strategy, way, region));
    *out = region.release();
    return apu_status(APU_OK);
  });
}

apu_status apu_memory_alloc(apu_device *device, uint64_t bytes, apu_region **out) {
  if (!device || !out) return fail(APU_E_INVALID, "apu_memory_alloc: device and out must not be NULL");
  *out = nullptr;
  if (bytes == 0) return fail(APU_E_INVALID, "apu_memory_alloc: 0 bytes asked for, expected at least 1");
  return guarded("apu_memory_alloc", [&] {
    std::unique_ptr<apu_region> region;
    TRY(device->alloc_memory(bytes, region));
    *out = region.release();
    return apu_status(APU_OK);
  });
}

apu_status apu_region_chunks(apu_region *region, apu_chunk *out, uint32_t *count) {
  if (!region || !count) return fail(APU_E_INVALID, "apu_region_chunks: region and count must not be NULL");
  const uint32_t capacity = *count;
  *count = uint32_t(region->chunks.size());
  if (!out) return APU_OK; // asks for the number
  if (capacity < *count)
    return fail(APU_E_INVALID, "apu_region_chunks: room for %u chunks, expected %u", capacity, *count);
  std::copy(region->chunks.begin(), region->chunks.end(), out);
  return APU_OK;
}

apu_status apu_region_get_info(apu_region *region, apu_region_info *out) {
  if (!region || !out) return fail(APU_E_INVALID, "apu_region_get_info: region and out must not be NULL");
  *out = region->info;
  return APU_OK;
}

apu_status apu_memory_copy(apu_device *device, uint64_t to, uint64_t from, uint64_t bytes, uint32_t to_host,
                           uint32_t from_host) {
  if (!device) return fail(APU_E_INVALID, "apu_memory_copy: device must not be NULL");
  if (bytes && (!to || !from)) return fail(APU_E_INVALID, "apu_memory_copy: address 0");
  return bytes ? device->copy(to, from, bytes, to_host != 0, from_host != 0) : apu_status(APU_OK);
}

void apu_region_free(apu_region *region) {
  delete region;
}

apu_status apu_stager_open(apu_device *device, uint64_t ring_bytes, apu_stager **out) {
  if (!device || !out) return fail(APU_E_INVALID, "apu_stager_open: device and out must not be NULL");
  *out = nullptr;
  if (ring_bytes < kLeastRing)
    return fail(APU_E_INVALID, "apu_stager_open: a ring of %llu bytes, expected at least %llu",
                static_cast<unsigned long long>(ring_bytes), static_cast<unsigned long long>(kLeastRing));
  return guarded("apu_stager_open", [&] {
    std::unique_ptr<apu_stager> stager;
    TRY(device->open_stager(ring_bytes, stager));
    *out = stager.release();
    return apu_status(APU_OK);
  });
}

apu_status apu_stager_read(apu_stager *stager, int32_t fd, const char *path, uint64_t offset, uint64_t bytes,
                           uint64_t to) {
  if (!stager || !path) return fail(APU_E_INVALID, "apu_stager_read: stager and path must not be NULL");
  if (bytes == 0) return APU_OK;
  if (!to || offset > uint64_t(INT64_MAX) || bytes > uint64_t(INT64_MAX) - offset)
    return fail(APU_E_INVALID, "apu_stager_read: %llu bytes from %llu of %s to %#llx are no range",
                static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(offset), path,
                static_cast<unsigned long long>(to));
  return guarded("apu_stager_read", [&] { return stager->read(fd, path, offset, bytes, to); });
}

apu_status apu_stager_wait(apu_stager *stager) {
  return stager ? stager->wait() : fail(APU_E_INVALID, "apu_stager_wait: stager must not be NULL");
}

apu_status apu_stager_bytes(apu_stager *stager, apu_stager_info *out) {
  if (!stager || !out) return fail(APU_E_INVALID, "apu_stager_bytes: stager and out must not be NULL");
  *out = stager->info();
  return APU_OK;
}

void apu_stager_close(apu_stager *stager) {
  delete stager;
}

apu_status apu_plan_create(apu_device *device, const apu_plan_desc *desc, apu_plan **out) {
  if (!device || !desc || !out) return fail(APU_E_INVALID, "apu_plan_create: device, desc and out must not be NULL");
  *out = nullptr;
  return guarded("plan", [&] { return device->create_plan(*desc, out); });
}
