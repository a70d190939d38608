// Which guarded mapping has faulted; apu_mapping_guard and its siblings are in apu.h.
#pragma once

#include "common.h"

namespace apu {

// APU_OK, or APU_E_MAPPING with a text that names the file.
apu_status check_mappings();

} // namespace apu
