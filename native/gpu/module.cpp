// Finds the file of kernels for a device.
#include "gpu/module.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <filesystem>

namespace apu::gpu {
namespace {

bool is_file(const std::string &path) {
  std::error_code ignored;
  return std::filesystem::is_regular_file(path, ignored);
}

// "gfx11-generic" for "gfx1151". Families before RDNA3 have none that all of them run.
std::string generic_name(const std::string &arch) {
  const std::string family = arch.substr(0, 5);
  return arch.size() == 7 && (family == "gfx11" || family == "gfx12") ? family + "-generic" : arch;
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

} // namespace apu::gpu
