// Memory of a plan: on the device, and pinned on the host. Freed with its owner, except in a process forked since,
// where the runtime's handles mean nothing.
#pragma once

#include "gpu/driver.h"

#include <algorithm>
#include <unistd.h>

namespace apu::gpu {

class DeviceBuffer {
public:
  DeviceBuffer() = default;
  DeviceBuffer(const DeviceBuffer &) = delete;
  DeviceBuffer &operator=(const DeviceBuffer &) = delete;
  DeviceBuffer(DeviceBuffer &&other) noexcept { *this = std::move(other); }
  DeviceBuffer &operator=(DeviceBuffer &&other) noexcept {
    std::swap(driver_, other.driver_), std::swap(process_, other.process_);
    std::swap(address_, other.address_), std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceBuffer() { release(); }

  apu_status alloc(Driver &driver, uint64_t bytes) {
    release();
    TRY(driver.alloc(bytes, address_));
    driver_ = &driver, process_ = getpid(), bytes_ = bytes;
    return APU_OK;
  }
  void release() {
    if (driver_ && process_ == getpid()) driver_->free(address_);
    driver_ = nullptr, address_ = bytes_ = 0;
  }
  uint64_t address() const { return address_; }
  uint64_t bytes() const { return bytes_; }

private:
  Driver *driver_ = nullptr;
  pid_t process_ = 0;
  uint64_t address_ = 0, bytes_ = 0;
};

class PinnedBuffer {
public:
  PinnedBuffer() = default;
  PinnedBuffer(const PinnedBuffer &) = delete;
  PinnedBuffer &operator=(const PinnedBuffer &) = delete;
  ~PinnedBuffer() { release(); }

  apu_status alloc(Driver &driver, uint64_t bytes) {
    release();
    TRY(driver.host_alloc(bytes, host_, device_));
    driver_ = &driver, process_ = getpid(), bytes_ = bytes;
    return APU_OK;
  }
  // At least `bytes`; what was there is lost when it has to grow. Nothing may use it.
  apu_status grow(Driver &driver, uint64_t bytes) {
    constexpr uint64_t kLeast = 4096;
    return bytes <= bytes_ ? apu_status(APU_OK) : alloc(driver, std::max({bytes, bytes_ * 2, kLeast}));
  }
  void release() {
    if (driver_ && process_ == getpid()) driver_->host_free(host_);
    driver_ = nullptr, host_ = nullptr, device_ = bytes_ = 0;
  }
  template <typename T = uint8_t> T *host(uint64_t offset = 0) const {
    return reinterpret_cast<T *>(static_cast<uint8_t *>(host_) + offset);
  }
  uint64_t device(uint64_t offset = 0) const { return device_ + offset; }
  uint64_t bytes() const { return bytes_; }

private:
  Driver *driver_ = nullptr;
  pid_t process_ = 0;
  void *host_ = nullptr;
  uint64_t device_ = 0, bytes_ = 0;
};

} // namespace apu::gpu
