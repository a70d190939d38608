// Host memory that the device reads: in place by one of the runtime's ways, in place at the host's own addresses, or
// copied (memory.cpp).
//
// A registered range is exactly the whole pages named, in one call; what cuts files into ranges, and which way is
// taken, is decided above (apu_engine/memory). A private writable mapping is refused before the runtime sees it:
// drivers ask for write access wherever a mapping allows it, which breaks copy-on-write for every page, so that the
// whole file becomes anonymous memory, silently (ROCm 6523).
#include "gpu/device.h"

#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace apu::gpu {
namespace {

struct Registered final : apu_region {
  Registered(Device &owner, const HostRange &host_range) : device(owner), range(host_range) {}
  ~Registered() override {
    if (!added || device.use() != APU_OK) return;
    device.driver().stream_wait(device.stream()); // nothing of ours reads the range any more
    device.driver().host_unregister(info.way, device.index(), range);
  }

  Device &device;
  const HostRange range;
  bool added = false;
};

const char *way_name(uint32_t way) {
  switch (way) {
  case APU_WAY_SVM: return "svm";
  case APU_WAY_ADVISE: return "advise";
  case APU_WAY_LOCK: return "lock";
  case APU_WAY_REGISTER: return "register";
  default: return "?";
  }
}

struct FileCloser {
  void operator()(std::FILE *file) const { std::fclose(file); }
};

// That every page of the range is mapped and readable, none of it private and writable; whether nobody may write it.
apu_status inspect_mappings(HostRange &range) {
  const std::unique_ptr<std::FILE, FileCloser> maps(std::fopen("/proc/self/maps", "re"));
  if (!maps) return fail(APU_E_UNSUPPORTED, "/proc/self/maps: cannot be read: %s", std::strerror(errno));
  const uint64_t begin = reinterpret_cast<uintptr_t>(range.host), end = begin + range.bytes;
  uint64_t covered = begin;
  range.read_only = true;
  char *line = nullptr;
  size_t room = 0;
  apu_status status = APU_OK;
  while (status == APU_OK && covered < end && getline(&line, &room, maps.get()) > 0) {
    uint64_t from = 0, to = 0;
    char access[5] = "";
    int name_at = 0;
    if (std::sscanf(line, "%" SCNx64 "-%" SCNx64 " %4s %*s %*s %*s %n", &from, &to, access, &name_at) < 3) continue;
    if (to <= covered) continue;
    if (from > covered) break; // a hole
    line[std::strcspn(line, "\n")] = '\0';
    const char *name = line[name_at] ? line + name_at : "anonymous memory";
    if (access[0] != 'r')
      status = fail(APU_E_INVALID, "apu_memory_register: %s: its mapping at %#" PRIx64 " is not readable (%s)", name,
                    from, access);
    else if (access[1] == 'w' && access[3] == 'p')
      status = fail(APU_E_INVALID,
                    "apu_memory_register: %s: its mapping at %#" PRIx64 " is private and writable (%s): registering it "
                    "would copy every page; map it read-only",
                    name, from, access);
    if (access[1] == 'w') range.read_only = false;
    covered = to;
  }
  std::free(line);
  TRY(status);
  if (covered >= end) return APU_OK;
  return fail(APU_E_INVALID, "apu_memory_register: nothing is mapped at %#" PRIx64 ", in a range of %llu bytes at %p",
              covered, (unsigned long long)range.bytes, range.host);
}

} // namespace

apu_status Device::register_memory(const void *host, uint64_t bytes, uint32_t strategy, uint32_t way,
                                   std::unique_ptr<apu_region> &out) {
  if (strategy == APU_MEMORY_DIRECT) return reach_memory(host, bytes, out);
  if (strategy != APU_MEMORY_REGISTERED) return stage_memory(host, bytes, out);
  if (!(driver_->ways() >> way & 1))
    return fail(APU_E_UNSUPPORTED, "device %s: this runtime lacks the functions of way %s", kind(), way_name(way));
  HostRange range{const_cast<void *>(host), bytes, false};
  TRY(inspect_mappings(range));
  TRY(use());
  auto region = std::make_unique<Registered>(*this, range);
  region->chunks.reserve(1);
  Registration made;
  TRY(driver_->host_register(way, index_, range, made));
  region->info.strategy = APU_MEMORY_REGISTERED;
  region->info.way = way;
  region->info.grain = made.grain;
  region->info.pinned_bytes = bytes;
  region->added = true;
  region->chunks.push_back({reinterpret_cast<uintptr_t>(host), made.device, bytes});
  out = std::move(region);
  return APU_OK;
}

apu_status Device::reach_memory(const void *host, uint64_t bytes, std::unique_ptr<apu_region> &out) {
  if (!props_.pageable)
    return fail(APU_E_UNSUPPORTED,
                "device %s: %s does not read host memory through the host's page tables, which memory strategy direct "
                "needs: expected registered or staged",
                kind(), props_.name.c_str());
  const uint64_t address = reinterpret_cast<uintptr_t>(host);
  out = std::make_unique<apu_region>();
  out->info.strategy = APU_MEMORY_DIRECT;
  out->chunks.push_back({address, address, bytes});
  return APU_OK;
}

} // namespace apu::gpu
