// File bytes into device memory: direct I/O into a ring of pinned slots, each copied on asynchronously.
//
// The file is opened a second time through /proc/self/fd, so that it is the caller's file whatever its name means now,
// with O_DIRECT; where the file system refuses that, at opening or at the first read, it is read plainly and the pages
// dropped behind. Direct reads begin and end on multiples of kBlock: what was asked for is cut from them in the copy.
// A slot is read into again when the event behind its copy has passed. The device never copies from a mapping.
#include "gpu/buffer.h"
#include "gpu/device.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>

namespace apu::gpu {
namespace {

constexpr uint64_t kBlock = 4096; // of direct I/O: no device asks for more
constexpr uint32_t kSlots = 4;
constexpr uint64_t kMostSlot = 64 << 20;

class Stager final : public apu_stager {
public:
  explicit Stager(Device &device) : device_(device), driver_(device.driver()) {}

  ~Stager() override {
    close_file();
    if (device_.use() != APU_OK) return;
    if (stream_) driver_.stream_wait(stream_); // copies may still read the slots
    for (Slot &s : slots_)
      if (s.event) driver_.event_destroy(s.event);
    if (stream_) driver_.stream_destroy(stream_);
  }

  apu_status open(uint64_t ring_bytes) {
    TRY(device_.use());
    ring_bytes = std::min(ring_bytes / kBlock * kBlock, kSlots * kMostSlot + kBlock);
    TRY(ring_.alloc(driver_, ring_bytes));
    const uint64_t skip = (kBlock - reinterpret_cast<uintptr_t>(ring_.host()) % kBlock) % kBlock;
    slot_bytes_ = (ring_bytes - skip) / kSlots / kBlock * kBlock;
    for (uint32_t i = 0; i < kSlots; ++i) {
      slots_[i].host = ring_.host(skip + i * slot_bytes_);
      TRY(driver_.event_create(slots_[i].event, false));
    }
    return driver_.stream_create(stream_);
  }

  apu_status read(int fd, const char *path, uint64_t offset, uint64_t bytes, uint64_t to) override {
    TRY(device_.use());
    TRY(open_file(fd, path));
    const uint64_t end = offset + bytes;
    for (uint64_t at = offset; at < end;) {
      Slot &s = slots_[next_ % kSlots];
      if (s.used) TRY(driver_.event_wait(s.event));
      s.used = false;
      const uint64_t head = at % kBlock;
      const uint64_t want = std::min(end - at, slot_bytes_ - head);
      TRY(fill(fd, path, s.host, at, head, want));
      TRY(driver_.copy_to_device(to + (at - offset), s.host + head, want, stream_));
      s.used = true;
      ++next_;
      TRY(driver_.event_record(s.event, stream_));
      at += want;
    }
    return APU_OK;
  }

  apu_status wait() override {
    TRY(device_.use());
    return driver_.stream_wait(stream_);
  }

  apu_stager_info info() const override { return {direct_bytes_, plain_bytes_, ring_.bytes()}; }

private:
  struct Slot {
    uint8_t *host = nullptr;
    Event event = nullptr;
    bool used = false; // a copy from it was queued
  };

  // The caller's file with direct I/O, kept until another one is read.
  apu_status open_file(int fd, const char *path) {
    struct stat found = {};
    if (fstat(fd, &found))
      return fail(APU_E_MAPPING, "%s: cannot be read while it is staged: %s", path, std::strerror(errno));
    if (known_ && found.st_dev == device_id_ && found.st_ino == inode_) return APU_OK;
    close_file();
    direct_ = ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDONLY | O_DIRECT | O_CLOEXEC);
    known_ = true, device_id_ = found.st_dev, inode_ = found.st_ino;
    return APU_OK;
  }
  void close_file() {
    if (direct_ >= 0) ::close(direct_);
    direct_ = -1, known_ = false;
  }

  // Bytes [at, at + want) of the file to slot + head; `head` is at % kBlock.
  apu_status fill(int fd, const char *path, uint8_t *slot, uint64_t at, uint64_t head, uint64_t want) {
    if (direct_ >= 0) {
      const uint64_t whole = (head + want + kBlock - 1) / kBlock * kBlock; // the file may end before
      uint64_t got = 0;
      int error = 0;
      read_some(direct_, slot, at - head, whole, head + want, got, error);
      if (got >= head + want) return direct_bytes_ += want, apu_status(APU_OK);
      if (!error) return fail_short(path, at, want, got > head ? got - head : 0);
      if (error != EINVAL && error != EOPNOTSUPP)
        return fail(APU_E_MAPPING, "%s: cannot be read at byte %llu: %s", path, (unsigned long long)(at - head + got),
                    std::strerror(error));
      ::close(direct_); // this file system opens so, but does not read so
      direct_ = -1;
    }
    uint64_t got = 0;
    int error = 0;
    read_some(fd, slot + head, at, want, want, got, error);
    // Pages that this read brought in would be a second copy.
    posix_fadvise(fd, off_t(at), off_t(want), POSIX_FADV_DONTNEED);
    if (got >= want) return plain_bytes_ += want, apu_status(APU_OK);
    if (error)
      return fail(APU_E_MAPPING, "%s: cannot be read at byte %llu: %s", path, (unsigned long long)(at + got),
                  std::strerror(error));
    return fail_short(path, at, want, got);
  }

  // Reads until `enough` bytes are there, at the end of the file, or at an error.
  static void read_some(int fd, uint8_t *to, uint64_t at, uint64_t bytes, uint64_t enough, uint64_t &got, int &error) {
    while (got < enough) {
      const uint64_t from = got / kBlock * kBlock; // direct reads that were cut short go on at a block
      const ssize_t n = pread(fd, to + from, bytes - from, off_t(at + from));
      if (n < 0 && errno == EINTR) continue;
      if (n < 0) return void(error = errno);
      if (from + uint64_t(n) <= got) return;
      got = from + uint64_t(n);
    }
  }

  static apu_status fail_short(const char *path, uint64_t at, uint64_t want, uint64_t got) {
    return fail(APU_E_MAPPING, "%s: ends at byte %llu, expected %llu bytes from byte %llu: it has shrunk", path,
                (unsigned long long)(at + got), (unsigned long long)want, (unsigned long long)at);
  }

  Device &device_;
  Driver &driver_;
  PinnedBuffer ring_;
  Stream stream_ = nullptr;
  Slot slots_[kSlots];
  uint64_t slot_bytes_ = 0; // a multiple of kBlock
  uint32_t next_ = 0;
  bool known_ = false; // the file of direct_, which is -1 where it is read plainly
  dev_t device_id_ = 0;
  ino_t inode_ = 0;
  int direct_ = -1;
  uint64_t direct_bytes_ = 0, plain_bytes_ = 0;
};

} // namespace

apu_status Device::open_stager(uint64_t ring_bytes, std::unique_ptr<apu_stager> &out) {
  auto stager = std::make_unique<Stager>(*this);
  TRY(stager->open(ring_bytes));
  out = std::move(stager);
  return APU_OK;
}

} // namespace apu::gpu
