// How kernels find a row of a weight matrix, which may lie in several segments (one for each expert, or shard).
#pragma once

#include "gpu.h"

namespace apu::gpu {

// Index of the segment that holds a row, counted through all experts; the row is meant to be uniform over the wave.
APU_DEVICE u32 matrix_segment(const Matrix &w, u64 row) {
  u32 low = 0, high = w.segment_count - 1; // the last segment that begins at or before the row
  while (low < high) {
    const u32 middle = (low + high + 1) / 2;
    if (w.segments[middle].row_begin <= row)
      low = middle;
    else
      high = middle - 1;
  }
  return low;
}

// Address of a row.
APU_DEVICE const u8 *matrix_row(const Matrix &w, u64 row) {
  if (w.segment_count <= 1) return w.data + row * w.row_stride;
  const Segment &s = w.segments[matrix_segment(w, row)];
  return reinterpret_cast<const u8 *>(s.address) + (row - s.row_begin) * s.row_stride;
}

// Rows [first, first + count), for access row by row. Where they lie in one segment, as nearly always, a row's address
// is a product.
struct MatrixRows {
  const u8 *data; // of row `first`
  u32 stride;
  bool whole; // lie in one segment
};

APU_DEVICE MatrixRows matrix_rows(const Matrix &w, u64 first, u32 count) {
  if (w.segment_count <= 1) return {w.data + first * w.row_stride, u32(w.row_stride), true};
  const u32 at = matrix_segment(w, first);
  const Segment &s = w.segments[at];
  return {matrix_row(w, first), u32(s.row_stride), first + count <= s.row_begin + s.row_count};
}
APU_DEVICE const u8 *row_of(const MatrixRows &rows, const Matrix &w, u64 first, u32 row) {
  return rows.whole ? rows.data + u64(row) * rows.stride : matrix_row(w, first + row);
}

} // namespace apu::gpu
