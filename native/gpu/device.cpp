// Opens a GPU: driver, properties, the module of its architecture, one stream.
#include "gpu/device.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
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

bool is_file(const std::string &path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

// "gfx11-generic" for "gfx1151": the last two characters are minor number and stepping.
std::string generic_name(const std::string &arch) {
  return arch.size() > 5 ? arch.substr(0, arch.size() - 2) + "-generic" : arch;
}

// Of cubins with the same major number the newest that is not newer: "sm_90" or "sm_90a" reads as 90.
std::string lower_minor(const std::string &arch, const std::string &folder) {
  const auto number = [](const std::string &name) {
    return name.rfind("sm_", 0) == 0 ? std::atoi(name.c_str() + 3) : 0;
  };
  const int wanted = number(arch);
  int best = 0;
  std::string found;
  std::error_code ignored;
  for (const auto &entry : std::filesystem::directory_iterator(folder, ignored)) {
    if (entry.path().extension() != ".cubin") continue;
    const std::string stem = entry.path().stem().string();
    const bool plain = std::all_of(stem.begin() + std::min<size_t>(3, stem.size()), stem.end(),
                                   [](char c) { return c >= '0' && c <= '9'; }); // "sm_90a" runs on sm_90 alone
    const int n = number(stem);
    if (plain && n / 10 == wanted / 10 && n <= wanted && n > best) {
      best = n;
      found = entry.path().string();
    }
  }
  return found;
}

} // namespace

apu_status find_module(const char *kind, const std::string &arch, const std::string &folder, std::string &path) {
  const bool amd = std::strcmp(kind, "hip") == 0;
  const std::string base = folder + "/";
  path = base + arch + (amd ? ".co" : ".cubin");
  if (is_file(path)) return APU_OK;
  path = amd ? base + generic_name(arch) + ".co" : lower_minor(arch, folder);
  if (!path.empty() && is_file(path)) return APU_OK;
  return fail(APU_E_UNSUPPORTED, "device %s: no kernels for %s in %s; build them with ./build.sh --targets %s", kind,
              arch.c_str(), folder.c_str(), arch.c_str());
}

apu_status open_device(const char *kind, uint32_t index, const apu_device_options &options,
                       std::unique_ptr<apu_device> &out) {
  if (!options.kernels) return fail(APU_E_INVALID, "device %s: apu_device_options.kernels must name a folder", kind);
  Driver *driver = nullptr;
  TRY(Driver::open(kind, &driver));
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
  out.memory_bytes = props_.memory_bytes;
  out.driver_version = props_.driver_version;
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
