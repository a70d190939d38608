// Matrix tiles on the CPU: lanes hold what those of gfx12 (wave32) and gfx90a (wave64) hold, and exchange it to
// multiply.
#pragma once

namespace apu::gpu {

#if defined(APU_SHIM_STAGED)
constexpr bool kStagedTiles = true;
#else
constexpr bool kStagedTiles = false;
#endif

constexpr u32 kTileDepth = 256 / kWaveSize; // elements along K of a lane
constexpr u32 kTileRegisters = 256 / kWaveSize;

struct TileA {
  u16 v[kTileDepth];
};
struct TileB {
  u16 v[kTileDepth];
};
struct TileC {
  float v[kTileRegisters];
};

APU_DEVICE u32 shim_lane() {
  return thread_id() % kWaveSize;
}
APU_DEVICE void shim_load_line(u16 *v, const u16 *from, u32 stride) {
  const u16 *p = from + shim_lane() % 16 * stride + shim_lane() / 16 * kTileDepth;
  if (reinterpret_cast<u64>(p) % (2 * kTileDepth)) shim::fail("a tile's row is not aligned");
  std::memcpy(v, p, 2 * kTileDepth);
}
APU_DEVICE void tile_load_a(TileA &a, const u16 *from, u32 stride) {
  shim_load_line(a.v, from, stride);
}
APU_DEVICE void tile_load_b(TileB &b, const u16 *from, u32 stride) {
  shim_load_line(b.v, from, stride);
}
APU_DEVICE void tile_load_a_transposed(TileA &a, const u16 *from, u32 stride) {
  for (u32 i = 0; i < kTileDepth; ++i) a.v[i] = from[(shim_lane() / 16 * kTileDepth + i) * stride + shim_lane() % 16];
}
APU_DEVICE void tile_load_b_transposed(TileB &b, const u16 *from, u32 stride) {
  for (u32 i = 0; i < kTileDepth; ++i) b.v[i] = from[(shim_lane() / 16 * kTileDepth + i) * stride + shim_lane() % 16];
}

constexpr u32 kTileLines = 1;
struct TileLines {
  u32 v[kTileLines][kTileDepth];
};
APU_DEVICE u32 tile_line_row(u32) {
  return shim_lane() % 16;
}
APU_DEVICE u32 tile_line_begin() {
  return shim_lane() / 16 * 2 * kTileDepth;
}
APU_DEVICE void tile_lines_a(TileA (&a)[2], const TileLines &lines) {
  for (u32 i = 0; i < 2 * kTileDepth; ++i) a[i / kTileDepth].v[i % kTileDepth] = u16(lines.v[0][i / 2] >> i % 2 * 16);
}
APU_DEVICE void tile_lines_b(TileB (&b)[2], const TileLines &lines) {
  for (u32 i = 0; i < 2 * kTileDepth; ++i) b[i / kTileDepth].v[i % kTileDepth] = u16(lines.v[0][i / 2] >> i % 2 * 16);
}

APU_DEVICE u32 tile_column(u32) {
  return shim_lane() % 16;
}
APU_DEVICE u32 tile_line_index(u32 tile, u32 k) {
  return k / kTileDepth * 2 * kTileDepth + tile * kTileDepth + k % kTileDepth;
}
constexpr u32 kTileLoads = 32;
constexpr u32 kTileOwn = 1, kTileFew = 16, kTileFewOwn = 1, kTileFewRegisters = kTileRegisters;
APU_DEVICE u32 tile_own(u32) {
  return 0;
}
APU_DEVICE u32 tile_own_column(u32) {
  return shim_lane() % 16;
}
APU_DEVICE float tile_column_max(float v) {
  for (u32 mask = 16; mask < kWaveSize; mask *= 2) v = max_f32(v, wave_shuffle_xor(v, mask));
  return v;
}
APU_DEVICE float tile_column_sum(float v) {
  for (u32 mask = 16; mask < kWaveSize; mask *= 2) v += wave_shuffle_xor(v, mask);
  return v;
}
APU_DEVICE void tile_products_b(TileB &b, const TileC &c) {
  for (u32 i = 0; i < kTileDepth; ++i) b.v[i] = float_to_half(c.v[i]);
}

APU_DEVICE u32 tile_row(u32 i) {
  return shim_lane() / 16 * kTileRegisters + i;
}

struct ShimLines {
  float a[kTileDepth], b[kTileDepth];
};
template <typename Convert>
APU_DEVICE void shim_multiply(TileC &c, const TileA &a, const TileB &b, Convert convert, u32 line) {
  ShimLines own;
  for (u32 i = 0; i < kTileDepth; ++i) {
    own.a[i] = convert(a.v[i]);
    own.b[i] = convert(b.v[i]);
  }
  const auto lanes = shim::exchange("tile_multiply", line, own);
  float column[16];
  for (u32 part = 0; part < 16 / kTileDepth; ++part) {
    const ShimLines of = lanes[16 * part + tile_column(0)];
    for (u32 i = 0; i < kTileDepth; ++i) column[kTileDepth * part + i] = of.b[i];
  }
  for (u32 r = 0; r < kTileRegisters; ++r)
    for (u32 part = 0; part < 16 / kTileDepth; ++part) {
      const ShimLines of = lanes[16 * part + tile_row(r)];
      for (u32 i = 0; i < kTileDepth; ++i) c.v[r] += of.a[i] * column[kTileDepth * part + i];
    }
}
APU_DEVICE void tile_multiply(TileC &c, const TileA &a, const TileB &b, u32 line = __builtin_LINE()) {
  shim_multiply(c, a, b, [](u16 v) { return half_to_float(v); }, line);
}
APU_DEVICE void tile_multiply_few(TileC &c, const TileA &a, const TileB &b, u32 line = __builtin_LINE()) {
  tile_multiply(c, a, b, line);
}
APU_DEVICE void tile_multiply_bfloat16(TileC &c, const TileA &a, const TileB &b, u32 line = __builtin_LINE()) {
  shim_multiply(c, a, b, [](u16 v) { return bfloat16_to_float(v); }, line);
}

} // namespace apu::gpu
