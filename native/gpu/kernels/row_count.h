// How many rows a tensor has in the running step.
#pragma once

#include "gpu.h"
#include "rows.h"

#include "../../include/apu.h"

namespace apu::gpu {

APU_DEVICE u32 count_rows(const RowCount &count) {
  return count.kind == APU_ROWS_STEP     ? count.counts->rows
         : count.kind == APU_ROWS_OUTPUT ? count.counts->outputs
                                         : count.fixed;
}

} // namespace apu::gpu
