// Code objects and launches. A "code object" is a text: the line "apu hip double", the architecture, then a line for
// each shared object that tests/gpu/shim.py compiled, and a NUL.
#include "state.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <dlfcn.h>
#include <sstream>

using namespace hip_double;

namespace {

void run_kernel(const Kernel &kernel, const uint32_t (&grid)[3], uint32_t threads, uint32_t lds,
                const std::vector<uint8_t> &argument) {
  // A kernel that never ends: the event behind it never passes and no call fails (ROCm/legacy-rocm-build#6530,
  // ROCm/TheRock#7989).
  if (fault("hang") == kernel.name) return hang("hang", kernel.name);
  // An address that is not mapped: hipErrorIllegalAddress from then on (ROCm/rocm-systems#10656).
  if (fault("fault") == kernel.name)
    return sticky_fault(hipErrorIllegalAddress, "memory access fault in " + kernel.name);
  // Any other exception of a wave: hipErrorLaunchFailure from then on (ROCm/TheRock#4214).
  if (fault("exception") == kernel.name) return sticky_fault(hipErrorLaunchFailure, "exception in " + kernel.name);
  // The host's mappings are no secret to kernels that the host runs, so addresses are looked at before.
  uint64_t range[2] = {}; // ReadArgs and ChecksumArgs begin with an address and bytes
  const bool reads = kernel.name == "plain_read" || kernel.name == "checksum";
  if (reads) std::memcpy(range, argument.data(), sizeof range);
  const auto *from = reinterpret_cast<const uint8_t *>(range[0]);
  if (reads && !on_device(from, range[1]) && fault("pageable").empty())
    return sticky_fault(hipErrorIllegalAddress, kernel.name + " reads memory that is not the device's");
  if (names_moved_memory(argument))
    return sticky_fault(hipErrorIllegalAddress,
                        kernel.name + " is given the host's address of what the device sees elsewhere");
  const bool reverse = !fault("reverse").empty();
  char error[2048] = "";
  std::lock_guard<std::mutex> lock(state().launching);
  // Plain reads take the time that is said, not the shim's: most of a large range is left unread.
  const uint32_t blocks[3] = {kernel.name == "plain_read" ? std::min(grid[0], 128u) : grid[0], grid[1], grid[2]};
  const int failed = kernel.launch(kernel.name.c_str(), blocks, threads, lds, argument.data(), argument.size(), reverse,
                                   error, sizeof error);
  if (kernel.name == "plain_read") take(read_ns(from, range[1]));
  if (!failed) return;
  sticky_fault(std::strstr(error, "memory fault") ? hipErrorIllegalAddress : hipErrorLaunchFailure, error);
}

} // namespace

// Bytes that are no code object, or one of another target (ROCm/hip#2269, ROCm/rocm-libraries#6085).
HIP_API int hipModuleLoadData(void **out, const void *image) {
  CHECK_STICKY();
  if (const int refused = refuse_while_capturing()) return refused;
  *out = nullptr;
  constexpr char kMagic[] = "apu hip double\n";
  if (std::strncmp(static_cast<const char *>(image), kMagic, sizeof kMagic - 1) != 0) return hipErrorInvalidImage;
  std::istringstream lines(static_cast<const char *>(image) + sizeof kMagic - 1);
  std::string line;
  std::getline(lines, line);
  const std::string arch = fault("arch").empty() ? "gfx1151" : fault("arch");
  const bool generic = line.size() > 8 && line.compare(line.size() - 8, 8, "-generic") == 0 &&
                       arch.compare(0, line.size() - 8, line, 0, line.size() - 8) == 0;
  if (line != arch && !generic) return hipErrorNoBinaryForGpu;
  auto module = std::make_unique<Module>();
  while (std::getline(lines, line)) {
    void *library = dlopen(line.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (!library) {
      std::fprintf(stderr, "hip double: %s\n", dlerror());
      return hipErrorInvalidImage;
    }
    module->libraries.push_back(library);
    const auto list =
        reinterpret_cast<int (*)(uint32_t, const char **, uint32_t *, uint64_t *)>(dlsym(library, "apu_shim_kernel"));
    Kernel kernel;
    kernel.launch = reinterpret_cast<decltype(kernel.launch)>(dlsym(library, "apu_shim_launch"));
    const char *name = nullptr;
    for (uint32_t i = 0; list(i, &name, &kernel.threads, &kernel.bytes); ++i) {
      kernel.name = name;
      module->kernels[name] = kernel;
    }
  }
  std::lock_guard<std::mutex> lock(state().mutex);
  *out = module.get();
  state().modules.insert(module.release());
  publish();
  return hipSuccess;
}

HIP_API int hipModuleUnload(void *handle) {
  CHECK_STICKY();
  drain_all();
  auto *module = static_cast<Module *>(handle);
  std::lock_guard<std::mutex> lock(state().mutex);
  if (!state().modules.erase(module)) return hipErrorInvalidHandle;
  publish();
  delete module; // libraries stay: loading them again is slow
  return hipSuccess;
}

HIP_API int hipModuleGetFunction(void **out, void *handle, const char *name) {
  CHECK_STICKY();
  auto &kernels = static_cast<Module *>(handle)->kernels;
  const auto it = kernels.find(name);
  *out = it == kernels.end() ? nullptr : &it->second;
  return *out ? hipSuccess : hipErrorNotFound;
}

HIP_API int hipModuleLaunchKernel(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                                  unsigned bz, unsigned lds, void *stream, void **arguments, void **) {
  CHECK_STICKY();
  const Kernel kernel = *static_cast<Kernel *>(function);
  // Grids of more than 65535 blocks in y or z are refused (iree-org/iree#20766), as are empty ones and more than
  // 2^32 - 1 work-items in a dimension (ROCm/hip#3047).
  if (!gx || !gy || !gz || gy > 65535 || gz > 65535) return hipErrorInvalidValue;
  if (uint64_t(gx) * bx > UINT32_MAX || by != 1 || bz != 1 || lds > 65536) return hipErrorInvalidValue;
  if (bx != kernel.threads) return hipErrorInvalidConfiguration;
  if (fault("launch") == kernel.name) return hipErrorLaunchFailure; // ROCm/tensorflow-upstream#1333: it does happen
  const auto *bytes = static_cast<const uint8_t *>(arguments[0]);
  std::vector<uint8_t> argument(bytes, bytes + kernel.bytes);
  return enqueue(static_cast<Stream *>(stream), [=] {
    const uint32_t grid[3] = {gx, gy, gz};
    run_kernel(kernel, grid, bx, lds, argument);
  });
}
