// Opens a GPU: driver, properties, the module of its architecture, one stream.
#include "gpu/device.h"

#include "gpu/module.h"

#include <cstdio>
#include <fstream>
#include <vector>

namespace apu::gpu {
namespace {

apu_status read_file(const std::string &path, std::vector<char> &out) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return fail(APU_E_UNSUPPORTED, "%s: cannot be opened", path.c_str());
  out.resize(size_t(file.tellg()));
  file.seekg(0);
  if (out.empty() || !file.read(out.data(), std::streamsize(out.size())))
    return fail(APU_E_UNSUPPORTED, "%s: is empty or cannot be read", path.c_str());
  return APU_OK;
}

} // namespace

apu_status open_device(const char *kind, uint32_t index, const apu_device_options &options,
                       std::unique_ptr<apu_device> &out) {
  if (!options.kernels) return fail(APU_E_INVALID, "device %s: apu_device_options.kernels must name a folder", kind);
  Driver *driver = nullptr;
  TRY(Driver::open(kind, options.runtime, &driver));
  uint32_t count = 0;
  TRY(driver->device_count(count));
  if (index >= count)
    return fail(APU_E_UNSUPPORTED, "device %s:%u does not exist: the runtime shows %u device%s", kind, index, count,
                count == 1 ? "" : "s");
  auto device = std::make_unique<Device>(driver, index);
  TRY(device->open(options.kernels));
  out = std::move(device);
  return APU_OK;
}

apu_status Device::open(const char *kernels) {
  TRY(driver_->device_props(index_, props_));
  TRY(find_module(kind(), props_.arch, kernels, module_path_));
  std::vector<char> image;
  TRY(read_file(module_path_, image));
  TRY(use());
  if (apu_status s = driver_->module_load(image.data(), image.size(), module_); s != APU_OK) {
    const std::string reason = error_text();
    return fail(s, "%s for %s: %s", module_path_.c_str(), props_.arch.c_str(), reason.c_str());
  }
  return driver_->stream_create(stream_);
}

Device::~Device() {
  if (use() != APU_OK) return;
  if (stream_) driver_->stream_destroy(stream_);
  if (module_) driver_->module_unload(module_);
}

void Device::props(apu_device_props &out) const {
  std::snprintf(out.kind, sizeof(out.kind), "%s", kind());
  std::snprintf(out.name, sizeof(out.name), "%s", props_.name.c_str());
  std::snprintf(out.arch, sizeof(out.arch), "%s", props_.arch.c_str());
  out.integrated = props_.integrated;
  out.wave_size = props_.wave_size;
  out.pageable = props_.pageable;
  out.ways = driver_->ways();
  out.memory_bytes = props_.memory_bytes;
  out.driver_version = props_.driver_version;
}

apu_status Device::memory(uint64_t &free, uint64_t &total) {
  TRY(use());
  return driver_->memory_info(free, total);
}

apu_status Device::kernel(const std::string &name, uint32_t dynamic_lds, Kernel &out) {
  std::lock_guard<std::mutex> lock(mutex_);
  const auto [it, added] = entries_.try_emplace(name);
  Entry &entry = it->second;
  if (added) {
    if (apu_status s = driver_->module_function(module_, name.c_str(), entry.function); s != APU_OK) {
      entries_.erase(it);
      const std::string reason = error_text();
      return fail(s, "kernel %s in %s: %s", name.c_str(), module_path_.c_str(), reason.c_str());
    }
  }
  if (dynamic_lds > entry.dynamic_lds) {
    TRY(driver_->function_lds(entry.function, dynamic_lds));
    entry.dynamic_lds = dynamic_lds;
  }
  out = {entry.function, it->first.c_str()};
  return APU_OK;
}

} // namespace apu::gpu
