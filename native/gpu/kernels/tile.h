// Matrix tiles: 16x16 products of halves or bfloat16 summed in float, the same on every target.
//
//   tile_load_a(a, from, stride)   A (16 rows, 16 of K), K contiguous, from LDS; `stride` in elements, rows 16-byte
//                                  aligned. For no bank conflicts let 2 * stride / 16 be odd.
//   tile_load_b(b, from, stride)   B (16 columns, 16 of K), K contiguous: a row of memory is a column of the product.
//   tile_load_b_transposed(...)    B (16 of K, 16 columns), columns contiguous.
//   tile_load_a_transposed(...)    A (16 of K, 16 rows), rows contiguous: a column of memory is a row of the product.
//   tile_multiply(c, a, b)         c += a b of halves; tile_multiply_bfloat16 of bfloat16. Sums of a product's 16 terms
//                                  are in the hardware's order, products along K in the order of the calls.
//   tile_row(i), tile_column(i)    where c.v[i] of this lane lies, i < kTileRegisters: they cover the tile once.
//   kStagedTiles                   copies to LDS run in the background, so that blocks are large and stage what they
//   read.
//   tile_lines_a(a, lines), tile_lines_b(b, lines)   two tiles of A or B (32 of K) from what this lane read itself, of
//                                  device memory too: of each line i < kTileLines, row tile_line_row(i), the
//                                  2 * kTileDepth neighbours along K from tile_line_begin() on, as words of two. They
//                                  cover 16 rows and 32 of K once (gfx11: twice); which of the two tiles has which is
//                                  the target's matter, the same for A and B.
//   kTileLoads                     how many words of lines a lane may well have on their way.
//   tile_line_index(t, k)          which of the 32 is K index k of tile t made so.
//   tile_products_b(b, c)          c as halves becomes B: its rows lie along K. Then c may not be used.
//   tile_own(i), kTileOwn          c.v[i] is in the tile_own(i)th of kTileOwn columns that this lane has elements of;
//                                  tile_own_column(own) says which column that is.
//   tile_column_max(v), tile_column_sum(v)   over the lanes that have elements of the same columns.
//   tile_multiply_few(c, a, b)     the product's columns below kTileFew alone, which are in registers below
//                                  kTileFewRegisters and own columns below kTileFewOwn; lines from 1 on of b are
//                                  unused.
// All lanes take part. Each element of c depends on its own row of A and column of B alone.
#pragma once

#include "gpu.h"

#if defined(APU_GPU_SHIM)
#include "tile_shim.h"
#elif defined(__CUDACC__) && !defined(__HIP__)
#include "tile_nvidia.h"
#else
#include "tile_amd.h"
#endif

namespace apu::gpu {

APU_DEVICE void tile_zero(TileC &c) {
#pragma unroll
  for (u32 i = 0; i < kTileRegisters; ++i) c.v[i] = 0;
}

} // namespace apu::gpu
