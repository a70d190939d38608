// A tile product of one wave each, for test_tiles.py: rows of A and B from LDS, the product through the element map.
#include "tile.h"

namespace apu::gpu {

constexpr u32 kStride = 24; // halves: 16 and padding

struct TileArgs {
  const u16 *a;                         // (16, 16)
  const u16 *b;                         // (16 columns, 16)
  const u16 *at;                        // (16, 16 rows)
  const u16 *bt;                        // (16, 16 columns)
  float *halves, *transposed, *bfloats; // (16, 16)
};

APU_KERNEL(64) void tile_product(TileArgs g) {
  u16 *const lds = reinterpret_cast<u16 *>(dynamic_shared());
  for (u32 i = thread_id(); i < 256; i += 64) {
    const u32 at = i / 16 * kStride + i % 16;
    lds[at] = g.a[i];
    lds[16 * kStride + at] = g.b[i];
    lds[32 * kStride + at] = g.at[i];
    lds[48 * kStride + at] = g.bt[i];
  }
  block_sync();
  TileA a, at;
  TileB b, bt;
  TileC halves, transposed, bfloats;
  tile_zero(halves);
  tile_zero(transposed);
  tile_zero(bfloats);
  tile_load_a(a, lds, kStride);
  tile_load_b(b, lds + 16 * kStride, kStride);
  tile_load_a_transposed(at, lds + 32 * kStride, kStride);
  tile_load_b_transposed(bt, lds + 48 * kStride, kStride);
  tile_multiply(halves, a, b);
  tile_multiply(halves, a, b); // accumulates
  tile_multiply(transposed, at, bt);
  tile_multiply_bfloat16(bfloats, a, b);
  if (wave_id()) return;
  for (u32 i = 0; i < kTileRegisters; ++i) {
    const u32 at = tile_row(i) * 16 + tile_column(i);
    g.halves[at] = halves.v[i];
    g.transposed[at] = transposed.v[i];
    g.bfloats[at] = bfloats.v[i];
  }
}

} // namespace apu::gpu
