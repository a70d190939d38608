// Arguments, shapes and LDS of the GEMM kernels (gemm.h): what the host that launches them knows.
#pragma once

#include "common.h"

namespace apu::gpu {

constexpr u32 kGemmSides = 4;
constexpr u32 kGemmPad = 8; // halves after a row of a tile in LDS, so that rows lie in different banks

struct GemmSide {
  Matrix w;
  const float *bias; // (N), of experts (E, N), or null
  float *out;        // (T, N), of experts (T, k, N)
  u32 tile_begin;    // column tiles of the sides before it
  u32 column_begin;  // columns of the sides before it, in `partial`
};

struct ExpertTile { // rows [begin, begin + count) of the sorted pairs
  u32 expert, begin, count, reserved;
};

struct GemmArgs {
  const StepCounts *counts;
  const u16 *a;            // (rows, passes * columns) halves: x 2^-e; of experts a row for each sorted pair
  const float *a_scale;    // (rows) 2^e
  const float *x;          // (rows, K), of gemm_f32
  const float *gate;       // (T, N) results of the gate, where its matrix is of another type than up's, or null
  const float *residual;   // (T, N) or null
  float *partial;          // (splits, max_rows, columns of all sides) or null: then out is written
  const ExpertTile *tiles; // null where there are no experts
  const u32 *tile_count;
  const u32 *pairs; // row * k + slot, by expert
  GemmSide sides[kGemmSides];
  u32 side_count;
  u32 activation; // of sides 0 and 1 where they are a pair, else of `gate` and side 0
  u32 pair;       // sides 0 and 1 are gate and up: their tiles are interleaved, out is of side 0
  u32 output_rows;
  u32 row_tiles; // of the grid, which has row_tiles * column tiles blocks in x and splits in y
  u32 max_rows;  // of the bucket
  u32 all_columns;
  u32 k;
  u32 columns;     // of a pass: K rounded up to 256
  u32 passes;      // 2: rows hold two terms, one after the other, that meet the same weights
  u32 split_steps; // of the block tile's depth, in each split
  u32 row_divisor; // of experts: a pair's row of x is pair / row_divisor
  float soft_cap;
  float limit; // of gate and up, 0 for none
  // Of matrices of heads (H, N, K), whose heads are the grid's y: `a` is (heads, max_rows, columns).
  u32 heads;      // 0: none
  u32 head_begin; // of y 0
  u32 head_width; // of a head in a row of out
  u32 out_width;  // of a row of out
};

struct GemmHeadRowsArgs { // rows of halves of heads, and the elements that pass by
  const StepCounts *counts;
  const float *x; // (T, H, K + rest)
  float *out;     // (T, H, N + rest)
  u16 *a;         // (heads, max_rows, columns)
  float *a_scale; // (heads, max_rows)
  u32 all_heads, head_begin, heads, max_rows;
  u32 k, columns, n, rest, output_rows;
};

struct GemmRowsArgs { // rows of halves from an op's input
  const StepCounts *counts;
  const i8 *q;      // (rows * passes, columns) or null
  const float *d;   // (rows * passes, columns / 16)
  const float *x;   // (rows, K)
  u16 *a;           // (rows, passes * columns)
  float *a_scale;   // (rows)
  const u32 *pairs; // of experts: row i is that of pairs[i] / row_divisor, or null
  u32 columns, k, passes, rows_each, row_divisor, output_rows;
};

struct GemmReduceArgs { // splits added, and the epilogue
  GemmArgs gemm;
  u32 splits;
};

struct ExpertSortArgs {
  const StepCounts *counts;
  const i32 *ids; // (T, k)
  u32 *sizes;     // (E) pairs of each expert
  u32 *pairs;     // (T * k)
  ExpertTile *tiles;
  u32 *tile_count;
  u32 used, experts, tile_rows;
};

struct ExpertCombineArgs {
  const StepCounts *counts;
  const float *products; // (T, k, N)
  const float *weights;  // (T, k)
  const float *residual; // (T, N) or null
  float *out;            // (T, N)
  u32 n, used;
};

// A block's tile. Each thread unpacks `unit` weights of one row in a step of `depth` columns.
struct GemmShape {
  u32 rows, columns, depth, unit;
  constexpr u32 threads() const { return columns * depth / unit; }
  constexpr u32 stride() const { return depth + kGemmPad; } // halves
};
// Where copies to LDS run in the background (NVIDIA) blocks are large and weights are staged as they are in the file.
// Elsewhere 64 KiB of LDS hold the tiles alone, and threads read their weights themselves.
constexpr GemmShape kGemmSmall{64, 64, 64, 32}, kGemmLarge{256, 128, 64, 32};
constexpr GemmShape kGemmSmallDirect{64, 64, 64, 16}, kGemmLargeDirect{128, 128, 32, 16};
constexpr GemmShape kGemmAny{64, 64, 64, 16}; // of types that have no kernels of their own

// Rows after the last one of `a` that may be read.
constexpr u32 kGemmExtraRows = 257;

constexpr u32 gemm_a_stages(bool staged) {
  return staged ? 3 : 2;
}
// Staged weights: chunks of 256 columns where types have blocks, else of one step; each row's bytes from the multiple
// of 16 before them.
constexpr u32 gemm_chunk_stride(u32 chunk_bytes) {
  return (chunk_bytes + 15 + 15) / 32 * 32 + 16; // an odd number of 16 bytes: rows lie in different banks
}
constexpr u32 gemm_chunk_stages(u32 chunk_columns, u32 depth) {
  return chunk_columns == depth ? 3 : 2;
}

struct GemmLayout { // byte offsets in a block's LDS
  u32 addresses, rows, scales, bounds, a, b, raw, bytes;
};
// chunk_bytes is 0 where weights are not staged.
constexpr GemmLayout gemm_layout(GemmShape s, bool staged, u32 chunk_columns, u32 chunk_bytes) {
  GemmLayout l{};
  l.addresses = 0;
  l.rows = l.addresses + s.columns * 8;
  l.scales = l.rows + s.rows * 4;
  l.bounds = l.scales + s.rows * 4;
  l.a = l.bounds + 64;
  l.b = l.a + gemm_a_stages(staged) * s.rows * s.stride() * 2;
  l.raw = l.b + 2 * s.columns * s.stride() * 2;
  l.bytes = l.raw;
  if (chunk_bytes) l.bytes += gemm_chunk_stages(chunk_columns, s.depth) * s.columns * gemm_chunk_stride(chunk_bytes);
  return l;
}

} // namespace apu::gpu
