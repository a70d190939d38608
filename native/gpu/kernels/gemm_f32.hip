// GEMM in float32 for F32 matrices and precision "exact": weights of any type as float32, activations as they come,
// products summed by fma in the order of columns. No matrix units: exactness matters here, speed little.
//
// A block makes 64 rows by 64 columns of the result, a thread 4 by 4 of them, 16 columns of K at a time through LDS.
#include "gemm.h"

namespace apu::gpu {

constexpr u32 kFloatTile = 64, kFloatDepth = 16, kFloatThreads = 256;

APU_KERNEL(kFloatThreads) void gemm_f32(GemmArgs g) {
  constexpr u32 line = kFloatTile + 4;
  APU_SHARED float a[kFloatDepth * line];    // (depth, rows)
  APU_SHARED float b[2][kFloatDepth * line]; // (depth, columns); gate and up
  const u32 row_tile = block_id() % g.row_tiles, column_tile = block_id() / g.row_tiles;
  u32 begin = row_tile * kFloatTile, count = 0, expert = 0, side = 0;
  if (g.tiles) {
    if (row_tile >= *g.tile_count) return;
    const ExpertTile tile = g.tiles[row_tile];
    expert = tile.expert;
    begin = tile.begin;
    count = tile.count;
  } else {
    const u32 rows = g.output_rows ? g.counts->outputs : g.counts->rows;
    if (begin >= rows) return;
    count = rows - begin < kFloatTile ? rows - begin : kFloatTile;
    if (!g.pair)
      while (side + 1 < g.side_count && column_tile >= g.sides[side + 1].tile_begin) ++side;
  }
  const u32 n_begin = (column_tile - g.sides[side].tile_begin) * kFloatTile, n_count = g.sides[side].w.rows;
  const u32 matrices = g.pair ? 2 : 1;
  const u32 load = thread_id() % 64, group = thread_id() / 64; // its row of a tile, 4 columns of 16
  const u32 at = begin + (load < count ? load : count - 1), pair = g.tiles ? g.pairs[at] : at;
  const float *const x = g.x + u64(g.tiles ? pair / g.row_divisor : pair) * g.k;
  const u32 wanted = n_begin + load, n = wanted < n_count ? wanted : n_count - 1;
  const u32 ty = thread_id() / 16 * 4, tx = thread_id() % 16 * 4;
  float c[2][4][4] = {};
  for (u32 k = 0; k < g.k; k += kFloatDepth) {
    block_sync();
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 column = k + 4 * group + i;
      a[(4 * group + i) * line + load] = column < g.k ? x[column] : 0.0f;
    }
    if (group < matrices) { // a whole wave unpacks the same type
      const Matrix &w = g.sides[g.pair ? group : side].w;
      float v[16];
      dequantize_any16(w.type, matrix_row(w, u64(expert) * w.rows + n), g.k, k / 16, v);
#pragma unroll
      for (u32 i = 0; i < 16; ++i) b[group][i * line + load] = v[i];
    }
    block_sync();
    for (u32 i = 0; i < kFloatDepth; ++i) {
      float u[4], v[2][4];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        u[j] = a[i * line + ty + j];
        v[0][j] = b[0][i * line + tx + j];
        v[1][j] = b[1][i * line + tx + j];
      }
#pragma unroll
      for (u32 r = 0; r < 4; ++r)
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
          c[0][r][j] = fma_f32(u[r], v[0][j], c[0][r][j]);
          if (matrices == 2) c[1][r][j] = fma_f32(u[r], v[1][j], c[1][r][j]);
        }
    }
  }
#pragma unroll
  for (u32 r = 0; r < 4; ++r) {
    if (ty + r >= count) continue;
    const u32 row = g.tiles ? g.pairs[begin + ty + r] : begin + ty + r;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      const u32 column = n_begin + tx + j;
      if (column >= n_count) continue;
      if (g.pair)
        gemm_store_gated(g, expert, row, column, c[0][r][j], c[1][r][j]);
      else
        gemm_store(g, side, expert, row, column, c[0][r][j]);
    }
  }
}

} // namespace apu::gpu
