// How kernels find a row of a weight matrix, which may lie in several segments (one for each expert, or shard).
#pragma once

#include "gpu.h"

namespace apu::gpu {

// Address of a row, counted through all experts. Meant to be called with a row that is uniform over the wave.
APU_DEVICE const u8 *matrix_row(const Matrix &w, u64 row) {
  if (w.segment_count <= 1) return w.data + row * w.row_stride;
  u32 low = 0, high = w.segment_count - 1; // the last segment that begins at or before the row
  while (low < high) {
    const u32 middle = (low + high + 1) / 2;
    if (w.segments[middle].row_begin <= row)
      low = middle;
    else
      high = middle - 1;
  }
  const Segment &s = w.segments[low];
  return global_pointer<const u8>(s.address) + (row - s.row_begin) * s.row_stride;
}

} // namespace apu::gpu
