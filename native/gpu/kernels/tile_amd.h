// Matrix tiles on AMD: WMMA of gfx11 and gfx12 (wave32), MFMA of gfx90a (wave64).
//
// Lane l holds of A row l % 16, of B column l % 16, both along K: gfx11 all 16 of them (lanes 16 to 31 repeat the first
// half), gfx12 eight from 8 (l / 16) on, gfx90a four from 4 (l / 16) on. Of C it holds column l % 16 and rows
// 2 i + l / 16 (gfx11), 8 (l / 16) + i (gfx12) or 4 (l / 16) + i (gfx90a).
#pragma once

namespace apu::gpu {

constexpr bool kStagedTiles = false; // copies to LDS pass through registers

#if defined(__gfx90a__)
constexpr u32 kTileRegisters = 4;
constexpr u32 kTileDepth = 4; // elements along K that a lane holds
#elif defined(__GFX12__)
constexpr u32 kTileRegisters = 8;
constexpr u32 kTileDepth = 8;
#else
constexpr u32 kTileRegisters = 8;
constexpr u32 kTileDepth = 16;
#endif

typedef float tile_floats __attribute__((ext_vector_type(kTileRegisters)));
typedef _Float16 tile_halves __attribute__((ext_vector_type(kTileDepth)));
typedef i16 tile_shorts __attribute__((ext_vector_type(kTileDepth)));

struct TileA {
  tile_halves v;
};
struct TileB {
  tile_halves v;
};
struct TileC {
  tile_floats v;
};

APU_DEVICE u32 tile_depth_begin() {
  return kTileDepth == 16 ? 0 : amd_lane() / 16 * kTileDepth;
}
APU_DEVICE tile_halves tile_line(const u16 *row) { // of this lane, 8-byte aligned
  return *reinterpret_cast<const tile_halves *>(__builtin_assume_aligned(row, kTileDepth == 4 ? 8 : 16));
}
APU_DEVICE void tile_load_a(TileA &a, const u16 *from, u32 stride) {
  a.v = tile_line(from + amd_lane() % 16 * stride + tile_depth_begin());
}
APU_DEVICE void tile_load_b(TileB &b, const u16 *from, u32 stride) {
  b.v = tile_line(from + amd_lane() % 16 * stride + tile_depth_begin());
}
APU_DEVICE void tile_load_a_transposed(TileA &a, const u16 *from, u32 stride) {
  const u16 *p = from + tile_depth_begin() * stride + amd_lane() % 16;
#pragma unroll
  for (u32 i = 0; i < kTileDepth; ++i) a.v[i] = __builtin_bit_cast(_Float16, p[i * stride]);
}
APU_DEVICE void tile_load_b_transposed(TileB &b, const u16 *from, u32 stride) {
  const u16 *p = from + tile_depth_begin() * stride + amd_lane() % 16;
#pragma unroll
  for (u32 i = 0; i < kTileDepth; ++i) b.v[i] = __builtin_bit_cast(_Float16, p[i * stride]);
}

APU_DEVICE void tile_multiply(TileC &c, const TileA &a, const TileB &b) {
#if defined(__gfx90a__)
  c.v = __builtin_amdgcn_mfma_f32_16x16x16f16(a.v, b.v, c.v, 0, 0, 0);
#elif defined(__GFX12__)
  c.v = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32_gfx12(a.v, b.v, c.v);
#else
  c.v = __builtin_amdgcn_wmma_f32_16x16x16_f16_w32(a.v, b.v, c.v);
#endif
}
APU_DEVICE void tile_multiply_bfloat16(TileC &c, const TileA &a, const TileB &b) {
  const tile_shorts x = __builtin_bit_cast(tile_shorts, a.v), y = __builtin_bit_cast(tile_shorts, b.v);
#if defined(__gfx90a__)
  c.v = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(x, y, c.v, 0, 0, 0);
#elif defined(__GFX12__)
  c.v = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32_gfx12(x, y, c.v);
#else
  c.v = __builtin_amdgcn_wmma_f32_16x16x16_bf16_w32(x, y, c.v);
#endif
}

constexpr u32 kTileLines = 1;
struct TileLines {
  u32 v[kTileLines][kTileDepth];
};
typedef u32 tile_words __attribute__((ext_vector_type(kTileDepth / 2)));
APU_DEVICE u32 tile_line_row(u32) {
  return amd_lane() % 16;
}
APU_DEVICE u32 tile_line_begin() {
  return 2 * tile_depth_begin();
}
APU_DEVICE tile_halves tile_half_line(const TileLines &lines, u32 begin) {
  tile_words words;
#pragma unroll
  for (u32 i = 0; i < kTileDepth / 2; ++i) words[i] = lines.v[0][begin + i];
  return __builtin_bit_cast(tile_halves, words);
}
APU_DEVICE void tile_lines_a(TileA (&a)[2], const TileLines &lines) {
  a[0].v = tile_half_line(lines, 0);
  a[1].v = tile_half_line(lines, kTileDepth / 2);
}
APU_DEVICE void tile_lines_b(TileB (&b)[2], const TileLines &lines) {
  b[0].v = tile_half_line(lines, 0);
  b[1].v = tile_half_line(lines, kTileDepth / 2);
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
  return amd_lane() % 16;
}
APU_DEVICE float tile_column_max(float v) {
#pragma unroll
  for (u32 mask = 16; mask < kWaveSize; mask *= 2) v = max_f32(v, wave_shuffle_xor(v, mask));
  return v;
}
APU_DEVICE float tile_column_sum(float v) {
#pragma unroll
  for (u32 mask = 16; mask < kWaveSize; mask *= 2) v += wave_shuffle_xor(v, mask);
  return v;
}
APU_DEVICE void tile_products_b(TileB &b, const TileC &c) {
#if defined(__GFX11__)
  // Rows 4 i + h and 4 i + 2 + h are here, h = lane / 16, their neighbours in the other half of the wave.
  typedef u32 Words __attribute__((ext_vector_type(8)));
  Words words;
  const bool upper = amd_lane() >= 16;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 own = u32(float_to_half(c.v[2 * i])) | u32(float_to_half(c.v[2 * i + 1])) << 16;
    const u32 other = __builtin_amdgcn_permlanex16(0, own, 0x76543210u, 0xfedcba98u, false, false);
    const u32 even = upper ? other : own, odd = upper ? own : other;
    words[2 * i] = byte_permute(even, odd, 0x05040100u);
    words[2 * i + 1] = byte_permute(even, odd, 0x07060302u);
  }
  b.v = __builtin_bit_cast(tile_halves, words);
#else
#pragma unroll
  for (u32 i = 0; i < kTileDepth; ++i) b.v[i] = _Float16(c.v[i]);
#endif
}
APU_DEVICE void tile_multiply_few(TileC &c, const TileA &a, const TileB &b) {
  tile_multiply(c, a, b);
}

APU_DEVICE u32 tile_row(u32 i) {
#if defined(__GFX11__)
  return 2 * i + amd_lane() / 16;
#else
  return amd_lane() / 16 * kTileRegisters + i;
#endif
}
APU_DEVICE u32 tile_column(u32) {
  return amd_lane() % 16;
}

} // namespace apu::gpu
