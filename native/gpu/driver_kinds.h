// The drivers there are.
#pragma once

#include "gpu/driver.h"

#include <memory>

namespace apu::gpu {

apu_status open_hip(const char *library, std::unique_ptr<Driver> &out); // null: the one that is loaded, else a soname's
apu_status open_cuda(std::unique_ptr<Driver> &out);

} // namespace apu::gpu
