// Which code object of a folder a device runs.
#pragma once

#include "common.h"

#include <string>

namespace apu::gpu {

// The code object for `arch` in `folder`: the exact one, else the generic one of its family ("gfx11-generic"), or of a
// lower minor number ("sm_90" for "sm_92"). Where there is none, an error that says how to build it.
apu_status find_module(const char *kind, const std::string &arch, const std::string &folder, std::string &path);

} // namespace apu::gpu
