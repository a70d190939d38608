// What a GEMM needs besides its tiles: rows of activations as halves, splits added, pairs of (row, slot) sorted by
// expert, and experts' products added into rows. Each moves its input and output once and is small beside the GEMM.
#include "gemm.h"

namespace apu::gpu {

constexpr u32 kRowThreads = 256;

APU_DEVICE bool row_exists(const StepCounts *counts, u32 output_rows, u32 rows_each, u32 row) {
  return row < (output_rows ? counts->outputs : counts->rows) * rows_each;
}

// 2^e with the largest magnitude in [2^(e + 14), 2^(e + 15)), and e at least -112; of zero, infinity and NaN 1.
struct RowScale {
  float scale, inverse;
};
APU_DEVICE RowScale row_scale(float largest) {
  const u32 exponent = float_to_bits(largest) >> 23 & 255;
  if (largest == 0 || exponent == 255) return {1, 1};
  const u32 e = (exponent < 29 ? 29 : exponent) - 14; // biased
  return {bits_to_float(e << 23), bits_to_float((254 - e) << 23)};
}

// Rows of halves x 2^-e from int8 rows, or from float rows: half the bits of an int8 row are kept exactly, a float
// loses at most 2^-12 of itself, or 2^-40 of the row's largest. With two terms for a row (precision "fine") their sum
// is x, and a row holds x rounded, then what the rounding lost.
APU_KERNEL(kRowThreads) void gemm_rows(GemmRowsArgs g) {
  APU_SHARED float parts[kRowThreads / kWaveSize];
  const u32 row = block_id();
  if (!row_exists(g.counts, g.output_rows, g.rows_each, row)) return;
  const u32 from = g.pairs ? g.pairs[row] / g.row_divisor : row;
  const u64 first = u64(from) * g.passes;
  float most = 0;
  if (g.q) {
    for (u32 i = thread_id(); i < g.passes * (g.columns / 16); i += kRowThreads)
      most = max_f32(most, g.d[first * (g.columns / 16) + i] * 127.0f);
  } else {
    for (u32 i = thread_id(); i < g.k; i += kRowThreads) most = max_f32(most, fabs_f32(g.x[u64(from) * g.k + i]));
  }
  const RowScale scale = row_scale(block_max(most, parts, kRowThreads / kWaveSize));
  if (thread_id() == 0) g.a_scale[row] = scale.scale;
  for (u32 column = 8 * thread_id(); column < g.columns; column += 8 * kRowThreads) {
    float v[8] = {};
    if (g.q) {
      for (u32 pass = 0; pass < g.passes; ++pass) {
        const u64 at = (first + pass) * g.columns + column;
        const float d = g.d[at / 16];
        const u32x2 q = *reinterpret_cast<const u32x2 *>(g.q + at);
#pragma unroll
        for (u32 i = 0; i < 8; ++i) v[i] = fma_f32(float(i8((i < 4 ? q.x : q.y) >> 8 * (i % 4))), d, v[i]);
      }
    } else {
#pragma unroll
      for (u32 i = 0; i < 8; ++i)
        if (column + i < g.k) v[i] = g.x[u64(from) * g.k + column + i];
    }
    u16 *const to = g.a + u64(row) * g.passes * g.columns + column;
    for (u32 pass = 0; pass < g.passes; ++pass) {
      u32 words[4];
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        const float x = v[i] * scale.inverse;
        const u16 h = float_to_half(x);
        words[i / 2] = i % 2 ? words[i / 2] | u32(h) << 16 : h;
        v[i] = (x - half_to_float(h)) * scale.scale;
      }
      store16(to + pass * g.columns, u32x4{words[0], words[1], words[2], words[3]});
    }
  }
}

// The same of heads, from float rows: a wave takes one.
APU_KERNEL(kRowThreads) void gemm_head_rows(GemmHeadRowsArgs g) {
  const u32 at = block_id() * (kRowThreads / kWaveSize) + wave_uniform(wave_id()), row = at / g.heads, h = at % g.heads;
  if (!row_exists(g.counts, g.output_rows, 1, row)) return;
  const u64 place = u64(row) * g.all_heads + g.head_begin + h;
  const float *const x = g.x + place * (g.k + g.rest);
  float most = 0;
  for (u32 i = lane_id(); i < g.k; i += kWaveSize) most = max_f32(most, fabs_f32(x[i]));
  const RowScale scale = row_scale(wave_max(most));
  const u64 to = u64(h) * g.max_rows + row;
  if (lane_id() == 0) g.a_scale[to] = scale.scale;
  for (u32 column = 2 * lane_id(); column < g.columns; column += 2 * kWaveSize) {
    const float low = column < g.k ? x[column] : 0.0f, high = column + 1 < g.k ? x[column + 1] : 0.0f;
    *reinterpret_cast<u32 *>(g.a + to * g.columns + column) =
        floats_to_halves(low * scale.inverse, high * scale.inverse);
  }
  float *const out = g.out + place * (g.n + g.rest) + g.n;
  for (u32 i = lane_id(); i < g.rest; i += kWaveSize) out[i] = x[g.k + i];
}

APU_KERNEL(kRowThreads) void gemm_reduce(GemmReduceArgs g) {
  gemm_reduce_row(g, kRowThreads);
}

// Pairs of (row, slot) sorted by expert, ascending within one, in two kernels of a block for each expert: sizes, then
// places. No atomics: the order is the same in every run.
APU_DEVICE u32 expert_matches(const ExpertSortArgs &g, u32 pairs, u32 from) {
  const u32 at = from + thread_id();
  return at < pairs && g.ids[at] == i32(block_id());
}
APU_KERNEL(kRowThreads) void expert_sizes(ExpertSortArgs g) {
  APU_SHARED u32 parts[kRowThreads / kWaveSize];
  const u32 pairs = g.counts->rows * g.used;
  u32 own = 0;
  for (u32 from = 0; from < pairs; from += kRowThreads) own += expert_matches(g, pairs, from);
  const u32 sum = block_sum(own, parts, kRowThreads / kWaveSize);
  if (thread_id() == 0) g.sizes[block_id()] = sum;
}
APU_KERNEL(kRowThreads) void expert_places(ExpertSortArgs g) {
  constexpr u32 waves = kRowThreads / kWaveSize;
  APU_SHARED u32 parts[2][waves];
  const u32 pairs = g.counts->rows * g.used, expert = block_id();
  u32 begin = 0, tile = 0;
  for (u32 e = thread_id(); e < expert; e += kRowThreads) {
    begin += g.sizes[e];
    tile += (g.sizes[e] + g.tile_rows - 1) / g.tile_rows;
  }
  begin = block_sum(begin, parts[0], waves);
  tile = block_sum(tile, parts[1], waves);
  const u32 size = g.sizes[expert], tiles = (size + g.tile_rows - 1) / g.tile_rows;
  for (u32 t = thread_id(); t < tiles; t += kRowThreads) {
    const u32 at = t * g.tile_rows;
    g.tiles[tile + t] = {expert, begin + at, size - at < g.tile_rows ? size - at : g.tile_rows, 0};
  }
  if (expert + 1 == g.experts && thread_id() == 0) *g.tile_count = tile + tiles;
  for (u32 from = 0; from < pairs; from += kRowThreads) {
    const bool match = expert_matches(g, pairs, from);
    const u64 ballot = wave_ballot(match);
    u32 before = 0, all = 0;
    for (u32 lane = 0; lane < kWaveSize; ++lane) before += lane < lane_id() && (ballot >> lane & 1);
    for (u64 bits = ballot; bits; bits &= bits - 1) ++all;
    block_sync();
    if (lane_id() == 0) parts[0][wave_id()] = all;
    block_sync();
    for (u32 w = 0; w < waves; ++w) {
      if (w == wave_id() && match) g.pairs[begin + before] = from + thread_id();
      begin += parts[0][w];
    }
  }
}

// out = residual + weight * product of slot 0, + of slot 1, ...
APU_KERNEL(kRowThreads) void expert_combine(ExpertCombineArgs g) {
  const u32 row = block_id_y(), n = block_id() * kRowThreads + thread_id();
  if (row >= g.counts->rows || n >= g.n) return;
  float sum = g.residual ? g.residual[u64(row) * g.n + n] : 0.0f;
  for (u32 slot = 0; slot < g.used; ++slot) {
    const u64 pair = u64(row) * g.used + slot;
    sum = sum + g.weights[pair] * g.products[pair * g.n + n];
  }
  g.out[u64(row) * g.n + n] = sum;
}

} // namespace apu::gpu
