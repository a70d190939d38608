// APU_ROUND_* of one row on the CPU, in place.
#pragma once

#include <cstdint>

namespace apu::cpu {

// x (d), of which the last `rotated` elements are; E4M3 leaves them alone.
void round_row(int32_t kind, float *x, uint32_t d, uint32_t rotated);

} // namespace apu::cpu
