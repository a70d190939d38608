// Opens the runtime of a kind once for the process, and its shared library.
#include "gpu/driver.h"

#include "gpu/driver_kinds.h"
#include "gpu/driver_library.h"

#include <cstdlib>
#include <cstring>
#include <dlfcn.h>
#include <link.h>
#include <map>
#include <memory>
#include <mutex>
#include <sys/stat.h>
#include <unistd.h>

namespace apu::gpu {

apu_status Driver::open(const char *kind, const char *runtime, Driver **out) {
  static std::mutex mutex;
  static auto &opened = *new std::map<std::string, Driver *>; // for the process's life: a runtime's threads outlast it
  const bool hip = std::strcmp(kind, "hip") == 0;
  if (!hip && std::strcmp(kind, "cuda") != 0)
    return fail(APU_E_UNSUPPORTED, "device kind \"%s\": expected \"hip\" or \"cuda\"", kind);
  const char *wanted = std::getenv("APU_HIP_LIBRARY");
  const char *named = !hip ? nullptr : wanted && *wanted ? wanted : runtime;
  std::lock_guard<std::mutex> lock(mutex);
  Driver *&driver = opened[std::string(kind) + (named ? named : "")];
  if (!driver) {
    std::unique_ptr<Driver> made;
    TRY(hip ? open_hip(named, made) : open_cuda(made));
    driver = made.release();
  }
  *out = driver;
  return APU_OK;
}

std::vector<std::string> Library::loaded(const char *stem) {
  struct Search {
    std::string stem;
    std::vector<std::string> found;
  } search{stem, {}};
  dl_iterate_phdr(
      [](dl_phdr_info *info, size_t, void *data) {
        auto &s = *static_cast<Search *>(data);
        const std::string path = info->dlpi_name ? info->dlpi_name : "";
        const size_t name = path.rfind('/') + 1;
        if (path.compare(name, s.stem.size(), s.stem) == 0) s.found.push_back(path);
        return 0;
      },
      &search);
  return search.found;
}

bool Library::same_file(const std::string &path, const std::string &name) {
  if (name.find('/') == std::string::npos) return path.substr(path.rfind('/') + 1) == name;
  struct stat a, b;
  if (stat(path.c_str(), &a) != 0 || stat(name.c_str(), &b) != 0) return path == name;
  return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

apu_status Library::open(const char *kind, const std::vector<std::string> &names) {
  for (const std::string &name : names) {
    handle_ = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle_) {
      path_ = name;
      return APU_OK;
    }
    // Of many names most are simply not there; one that is there but cannot be loaded ends the search.
    const char *error = dlerror();
    const std::string reason = error ? error : "unknown error";
    if (reason.rfind(name + ":", 0) != 0 || reason.find("No such file") == std::string::npos)
      return fail(APU_E_UNSUPPORTED, "device %s: %s cannot be loaded: %s", kind, name.c_str(), reason.c_str());
  }
  return fail(APU_E_UNSUPPORTED, "device %s: %s was not found; %s", kind,
              names.size() == 1 ? names[0].c_str() : names.back().substr(names.back().rfind('/') + 1).c_str(), advice_);
}

void *Library::symbol(const char *name, bool required) {
  void *address = dlsym(handle_, name);
  Dl_info info;
  if (address && dladdr(address, &info) && info.dli_fname) path_ = info.dli_fname;
  if (!address && required) missing_.push_back(name);
  return address;
}

void *Library::find(const char *name) const {
  return dlsym(handle_, name);
}

apu_status Library::complete(const char *kind) const {
  if (missing_.empty()) return APU_OK;
  std::string names;
  constexpr size_t kNamed = 4;
  for (size_t i = 0; i < missing_.size() && i < kNamed; ++i) names += (i ? ", " : "") + missing_[i];
  if (missing_.size() > kNamed) names += " and " + std::to_string(missing_.size() - kNamed) + " more functions";
  return fail(APU_E_UNSUPPORTED, "device %s: %s lacks %s; %s", kind, path_.c_str(), names.c_str(), advice_);
}

ForkCheck::ForkCheck() : pid_(getpid()) {}

apu_status ForkCheck::check(const char *kind) const {
  if (getpid() == pid_) return APU_OK;
  return fail(APU_E_DEVICE, "device %s: this process was forked after the device was opened: open one before fork()",
              kind);
}

} // namespace apu::gpu
