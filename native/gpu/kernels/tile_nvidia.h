// Matrix tiles on NVIDIA: ldmatrix and two mma.sync m16n8k16, of columns 0 to 7 and 8 to 15 of B.
#pragma once

namespace apu::gpu {

constexpr bool kStagedTiles = true; // copies to LDS run in the background: gemm.h

constexpr u32 kTileRegisters = 8;

struct TileA {
  u32 v[4];
};
struct TileB {
  u32 v[4];
};
struct TileC {
  float v[kTileRegisters];
};

// Four 8x8 matrices, lane l giving the address of row l % 8 of matrix l / 8.
APU_DEVICE void nvidia_load_matrices(u32 *v, const u16 *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(u32(__cvta_generic_to_shared(row)))
               : "memory");
}
APU_DEVICE void tile_load_a(TileA &a, const u16 *from, u32 stride) {
  const u32 lane = threadIdx.x % 32;
  nvidia_load_matrices(a.v, from + lane % 16 * stride + lane / 16 * 8);
}
APU_DEVICE void tile_load_b(TileB &b, const u16 *from, u32 stride) {
  const u32 lane = threadIdx.x % 32;
  nvidia_load_matrices(b.v, from + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
}
APU_DEVICE void nvidia_load_transposed(u32 *v, const u16 *row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(v[0]), "=r"(v[1]), "=r"(v[2]), "=r"(v[3])
               : "r"(u32(__cvta_generic_to_shared(row)))
               : "memory");
}
APU_DEVICE void tile_load_a_transposed(TileA &a, const u16 *from, u32 stride) {
  const u32 lane = threadIdx.x % 32;
  nvidia_load_transposed(a.v, from + (lane % 8 + lane / 16 * 8) * stride + lane / 8 % 2 * 8);
}
APU_DEVICE void tile_load_b_transposed(TileB &b, const u16 *from, u32 stride) {
  const u32 lane = threadIdx.x % 32;
  nvidia_load_transposed(b.v, from + lane % 16 * stride + lane / 16 * 8);
}

APU_DEVICE void nvidia_multiply(float *c, const TileA &a, const u32 *b) { // 8 columns
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b[0]), "r"(b[1]));
}
APU_DEVICE void tile_multiply(TileC &c, const TileA &a, const TileB &b) {
  nvidia_multiply(c.v, a, b.v);
  nvidia_multiply(c.v + 4, a, b.v + 2);
}
APU_DEVICE void tile_multiply_bfloat16(TileC &c, const TileA &a, const TileB &b) {
#pragma unroll
  for (u32 h = 0; h < 2; ++h)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c.v[4 * h]), "+f"(c.v[4 * h + 1]), "+f"(c.v[4 * h + 2]), "+f"(c.v[4 * h + 3])
        : "r"(a.v[0]), "r"(a.v[1]), "r"(a.v[2]), "r"(a.v[3]), "r"(b.v[2 * h]), "r"(b.v[2 * h + 1]));
}

constexpr u32 kTileDepth = 4;
constexpr u32 kTileLines = 2;
struct TileLines {
  u32 v[kTileLines][kTileDepth];
};
APU_DEVICE u32 tile_line_row(u32 i) {
  return threadIdx.x % 32 / 4 + 8 * i;
}
APU_DEVICE u32 tile_line_begin() {
  return threadIdx.x % 4 * 8;
}
APU_DEVICE void tile_lines_a(TileA (&a)[2], const TileLines &lines) {
#pragma unroll
  for (u32 i = 0; i < 8; ++i) a[i / 4].v[i % 4] = lines.v[i % 2][i / 2];
}
APU_DEVICE void tile_lines_b(TileB (&b)[2], const TileLines &lines) {
#pragma unroll
  for (u32 i = 0; i < 8; ++i) b[i / 4].v[i % 4] = lines.v[i / 2 % 2][i / 4 * 2 + i % 2];
}

APU_DEVICE u32 tile_line_index(u32 tile, u32 k) {
  return k % 8 / 2 * 8 + 4 * tile + k / 8 * 2 + k % 2;
}
constexpr u32 kTileLoads = 64;
constexpr u32 kTileOwn = 4, kTileFew = 8, kTileFewOwn = 2, kTileFewRegisters = 4;
APU_DEVICE u32 tile_own(u32 i) {
  return i % 2 + i / 4 * 2;
}
APU_DEVICE u32 tile_own_column(u32 own) {
  return threadIdx.x % 4 * 2 + own % 2 + own / 2 * 8;
}
APU_DEVICE float tile_column_max(float v) {
#pragma unroll
  for (u32 mask = 4; mask < 32; mask *= 2) v = max_f32(v, wave_shuffle_xor(v, mask));
  return v;
}
APU_DEVICE float tile_column_sum(float v) {
#pragma unroll
  for (u32 mask = 4; mask < 32; mask *= 2) v += wave_shuffle_xor(v, mask);
  return v;
}
APU_DEVICE void tile_products_b(TileB &b, const TileC &c) {
#pragma unroll
  for (u32 i = 0; i < 4; ++i)
    asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;"
        : "=r"(b.v[i])
        : "r"(nvidia_bits(__floats2half2_rn(c.v[2 * i], c.v[2 * i + 1]))));
}
APU_DEVICE void tile_multiply_few(TileC &c, const TileA &a, const TileB &b) {
  nvidia_multiply(c.v, a, b.v);
}

APU_DEVICE u32 tile_row(u32 i) {
  return threadIdx.x % 32 / 4 + i / 2 % 2 * 8;
}
APU_DEVICE u32 tile_column(u32 i) {
  return threadIdx.x % 4 * 2 + i % 2 + i / 4 * 8;
}

} // namespace apu::gpu
