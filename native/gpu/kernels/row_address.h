// Places in matrices, and row counts: small device functions that kernels over rows share.
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

// Uniform in a wave where `row` is.
APU_DEVICE const u8 *row_address(const Matrix &w, u64 row) {
  if (w.segment_count <= 1) return w.data + row * w.row_stride;
  u32 low = 0, high = w.segment_count; // the last segment that begins at or before the row
  while (high - low > 1) {
    const u32 middle = (low + high) / 2;
    if (w.segments[middle].row_begin <= row)
      low = middle;
    else
      high = middle;
  }
  const Segment &s = w.segments[low];
  return reinterpret_cast<const u8 *>(s.address) + (row - s.row_begin) * s.row_stride;
}

APU_DEVICE bool is_aligned16(const void *p) {
  return reinterpret_cast<u64>(p) % 16 == 0;
}

} // namespace apu::gpu
