// Opens the runtime of a kind once for the process.
#include "gpu/driver.h"

namespace apu::gpu {

apu_status Driver::open(const char *kind, Driver **) {
  return fail(APU_E_UNSUPPORTED, "device %s: this build has no driver for it", kind);
}

} // namespace apu::gpu
