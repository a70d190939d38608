// Memory of a GPU: plain device allocations, and copies.
//
// Host bytes that are staged (those that lie in no file; files: stager.cpp) are copied in pieces through two pinned
// buffers, so that reading them and sending the last piece overlap. Bytes keep their addresses' lowest 8 bits, hence
// the file's alignment, and have kWeightPadding readable bytes before and after them, zeroed.
#include "cpu/guard.h"
#include "gpu/device.h"
#include "gpu/kernels/common.h"

#include <algorithm>
#include <cstring>

namespace apu::gpu {
namespace {

constexpr uint64_t kPiece = 64 << 20; // of a staged copy
constexpr uint64_t kAlignment = 256;
static_assert(kWeightPadding <= kAlignment);

struct Allocation final : apu_region {
  explicit Allocation(Device &owner) : device(owner) {}
  ~Allocation() override {
    if (address && device.use() == APU_OK) device.driver().free(address);
  }
  apu_status alloc(uint64_t size) {
    TRY(device.use());
    TRY(device.driver().alloc(size, address));
    bytes = size;
    info.device_bytes = size;
    return APU_OK;
  }

  Device &device;
  uint64_t address = 0; // 0 until allocated
  uint64_t bytes = 0;
};

// Two pinned buffers that are filled in turn; a buffer is free again once its event has passed.
class Ring {
public:
  Ring(Driver &driver, Stream stream) : driver_(driver), stream_(stream) {}
  ~Ring() {
    driver_.stream_wait(stream_); // copies that failed half-way may still read the buffers
    for (Slot &s : slots_) {
      if (s.event) driver_.event_destroy(s.event);
      if (s.host) driver_.host_free(s.host);
    }
  }

  apu_status open(uint64_t bytes) {
    for (Slot &s : slots_) {
      uint64_t device = 0;
      TRY(driver_.host_alloc(bytes, s.host, device));
      TRY(driver_.event_create(s.event, false));
    }
    return APU_OK;
  }

  apu_status send(uint64_t to, const uint8_t *from, uint64_t bytes) {
    Slot &s = slots_[next_++ % 2];
    if (s.used) TRY(driver_.event_wait(s.event));
    std::memcpy(s.host, from, bytes);
    TRY(driver_.copy_to_device(to, s.host, bytes, stream_));
    s.used = true;
    return driver_.event_record(s.event, stream_);
  }

private:
  struct Slot {
    void *host = nullptr;
    Event event = nullptr;
    bool used = false;
  };
  Driver &driver_;
  Stream stream_;
  Slot slots_[2];
  uint32_t next_ = 0;
};

} // namespace

apu_status Device::stage_memory(const void *host, uint64_t bytes, std::unique_ptr<apu_region> &out) {
  const auto *from = static_cast<const uint8_t *>(host);
  const uint64_t before = kAlignment + reinterpret_cast<uintptr_t>(host) % kAlignment; // allocations are aligned
  auto region = std::make_unique<Allocation>(*this);
  if (bytes > UINT64_MAX - before - kAlignment)
    return fail(APU_E_INVALID, "apu_memory_register: %llu bytes are too many", static_cast<unsigned long long>(bytes));
  TRY(region->alloc(before + bytes + kAlignment));
  if (region->address % kAlignment)
    return fail(APU_E_DEVICE, "device %s: an allocation at %#llx, expected a multiple of %llu", kind(),
                static_cast<unsigned long long>(region->address), static_cast<unsigned long long>(kAlignment));
  region->info.strategy = APU_MEMORY_STAGED;
  const uint64_t to = region->address + before;
  region->chunks.push_back({reinterpret_cast<uintptr_t>(host), to, bytes});
  TRY(driver_->fill(region->address, 0, before, stream_));
  TRY(driver_->fill(to + bytes, 0, kAlignment, stream_));
  Ring ring(*driver_, stream_);
  TRY(ring.open(std::min(bytes, kPiece)));
  for (uint64_t at = 0; at < bytes; at += kPiece) TRY(ring.send(to + at, from + at, std::min(kPiece, bytes - at)));
  TRY(driver_->stream_wait(stream_));
  TRY(check_mappings());
  out = std::move(region);
  return APU_OK;
}

apu_status Device::alloc_memory(uint64_t bytes, std::unique_ptr<apu_region> &out) {
  auto region = std::make_unique<Allocation>(*this);
  TRY(region->alloc(bytes));
  region->chunks.push_back({0, region->address, bytes});
  TRY(driver_->fill(region->address, 0, bytes, stream_));
  TRY(driver_->stream_wait(stream_));
  out = std::move(region);
  return APU_OK;
}

apu_status Device::copy(uint64_t to, uint64_t from, uint64_t bytes, bool to_host, bool from_host) {
  auto *host_to = reinterpret_cast<void *>(to);
  const auto *host_from = reinterpret_cast<const void *>(from);
  if (to_host && from_host) {
    std::memmove(host_to, host_from, bytes);
    return APU_OK;
  }
  TRY(use());
  if (to_host)
    TRY(driver_->copy_to_host(host_to, from, bytes, stream_));
  else if (from_host)
    TRY(driver_->copy_to_device(to, host_from, bytes, stream_));
  else
    TRY(driver_->copy_on_device(to, from, bytes, stream_));
  return driver_->stream_wait(stream_);
}

} // namespace apu::gpu
