// The attention of sparse_attention.hip on matrix tiles, for rows of F16.
//
// A block takes a span of what one query row attends to for 32 of its heads. Batches of 32 rows are copied to LDS, each
// row once for all heads, the next one while this one is worked on where copies run in the background. Queries stay in
// registers: a wave has those of 16 heads and a share of the elements; scores of the shares meet in LDS, where eight
// lanes do the softmax of a head. Values: a wave has every eighth tile of the elements (fourth, with waves of 64), for
// all heads. Bytes: the rows, for each 32 heads, and 4 d for each head and span.
#include "sparse_items.h"
#include "tile.h"

namespace apu::gpu {

constexpr u32 kWaves = kSparseThreads / kWaveSize;
constexpr u32 kHeadTiles = kSparseTileHeads / 16, kRowTiles = kSparseTileRows / 16;
constexpr u32 kShares = kWaves / kHeadTiles;
constexpr u32 kSteps = kSparseTileMost / 16 / kShares;
constexpr u32 kValueTiles = kSparseTileMost / 16 / kWaves;
constexpr u32 kRowStride = kSparseTileMost + kSparseTilePad;
constexpr u32 kScoreStride = kSparseTileRows + kSparseScorePad;
constexpr u32 kWeightStride = kSparseTileRows + kSparseWeightPad;
constexpr u32 kBuffers = kStagedTiles ? 2 : 1;
constexpr u32 kLookUps = kSparseThreads / kSparseTileRows; // batches of which rows are looked up together
constexpr u32 kCopiers = kSparseThreads / kSparseTileRows; // threads of a row
static_assert(kSparseThreads / kSparseTileHeads * 4 == kSparseTileRows);

struct SparseTileLds {
  u16 *rows;     // (buffers, 32, 512 + pad)
  float *scores; // (shares, 32 heads, 32 rows + pad)
  u16 *weights;  // (32 heads, 32 rows + pad)
  u64 *address;  // (2, 256)
  float *shrink, *max;
  float *sum; // of the weights; at last the factor of the accumulator, where there is one span
  float *cos, *sin;
};

// Where the rows of the `c`-th kSparseThreads lie; the lowest bit is set of those that get no weight: behind the last
// one.
APU_DEVICE void look_up(const SparseAttentionArgs &a, const SparseItem &item, const SparseTileLds &lds, u32 c) {
  const u32 i = item.begin + c * kSparseThreads + thread_id();
  const bool real = i < item.end;
  bool seen;
  const u64 address = sparse_address(a, item, real ? i : item.end - 1, 2, 2, &seen);
  lds.address[c % 2 * kSparseThreads + thread_id()] = address | (real && seen ? 0 : 1);
}

APU_DEVICE const u64 *addresses(const SparseTileLds &lds, u32 batch) {
  return lds.address + batch % (2 * kLookUps) * kSparseTileRows;
}

APU_DEVICE void copy_rows(const SparseTileLds &lds, u32 batch, u32 d) {
  const u32 r = thread_id() / kCopiers, first = thread_id() % kCopiers;
  const u64 from = addresses(lds, batch)[r] & ~u64(1);
  u16 *to = lds.rows + (batch % kBuffers * kSparseTileRows + r) * kRowStride;
#pragma unroll 4
  for (u32 m = first * 8; m < d; m += kCopiers * 8) copy16_async(to + m, global_pointer<const u16>(from) + m);
  copy_commit();
}

// Softmax of 4 rows of a head, by eight lanes together.
APU_DEVICE void weigh(const SparseTileLds &lds, u32 batch, float &max, float &sum) {
  const u32 head = thread_id() / 8, r = thread_id() % 8 * 4;
  float s[4] = {};
#pragma unroll
  for (u32 share = 0; share < kShares; ++share) {
    const f32x4 x = *reinterpret_cast<const f32x4 *>(lds.scores + (share * kSparseTileHeads + head) * kScoreStride + r);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) s[i] += x[i];
  }
  float most = max;
  const u32 *words = reinterpret_cast<const u32 *>(addresses(lds, batch) + r);
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    if (words[2 * i] & 1) s[i] = kNothing;
    most = max_f32(most, s[i]);
  }
#pragma unroll
  for (u32 mask = 1; mask < 8; mask *= 2) most = max_f32(most, wave_shuffle_xor(most, mask));
  const float from = most == kNothing ? 0.0f : most; // nothing seen yet: all exponentials are 0
  float all = 0.0f;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    s[i] = exp_f32(s[i] - from);
    all += s[i];
  }
#pragma unroll
  for (u32 mask = 1; mask < 8; mask *= 2) all += wave_shuffle_xor(all, mask);
  const float shrink = exp_f32(max - from);
  sum = fma_f32(sum, shrink, all);
  max = most;
  u32 *to = reinterpret_cast<u32 *>(lds.weights + head * kWeightStride + r);
  to[0] = floats_to_halves(s[0], s[1]);
  to[1] = floats_to_halves(s[2], s[3]);
  if (r == 0) lds.shrink[head] = shrink;
}

// Whole: rows have kSparseTileMost elements, so that no step of a loop is conditional.
template <bool Whole> APU_DEVICE void sparse_attention_tile(const SparseAttentionArgs &a) {
  SparseItem item;
  if (!find_sparse_item(a, Whole ? kSparseTileMost : a.window.head_size, item)) return;
  const u32 d = item.d, wave = wave_uniform(wave_id());
  SparseTileLds lds;
  lds.rows = reinterpret_cast<u16 *>(dynamic_shared());
  lds.scores = reinterpret_cast<float *>(lds.rows + kBuffers * kSparseTileRows * kRowStride);
  lds.weights = reinterpret_cast<u16 *>(lds.scores + kShares * kSparseTileHeads * kScoreStride);
  lds.address = reinterpret_cast<u64 *>(lds.weights + kSparseTileHeads * kWeightStride);
  lds.shrink = reinterpret_cast<float *>(lds.address + 2 * kSparseThreads);
  lds.max = lds.shrink + kSparseTileHeads;
  lds.sum = lds.max + kSparseTileHeads;
  lds.cos = lds.sum + kSparseTileHeads;
  lds.sin = lds.cos + a.pairs;

  look_up(a, item, lds, 0);
  if constexpr (kStagedTiles) {
    block_sync();
    copy_rows(lds, 0, d);
  }
  u16 *queries = lds.rows + (kBuffers - 1) * kSparseTileRows * kRowStride; // at first
  const u32 own_head = thread_id() / kCopiers;
  const float *from = a.q + (u64(item.t) * a.heads + item.head + own_head) * d;
#pragma unroll 4
  for (u32 m = thread_id() % kCopiers * 8; m < d; m += kCopiers * 8) {
    u32x4 halves = {0, 0, 0, 0};
    if (own_head < item.heads)
#pragma unroll
      for (u32 h = 0; h < 2; ++h) {
        const u32x4 x = load16(from + m + 4 * h);
#pragma unroll
        for (u32 i = 0; i < 2; ++i)
          halves[2 * h + i] =
              floats_to_halves(bits_to_float(x[2 * i]) * a.scale, bits_to_float(x[2 * i + 1]) * a.scale);
      }
    store16(queries + own_head * kRowStride + m, halves);
  }
  block_sync();
  const u32 head_tile = wave % kHeadTiles, share = wave / kHeadTiles;
  TileA q[kSteps];
#pragma unroll
  for (u32 i = 0; i < kSteps; ++i) {
    const u32 k = (i * kShares + share) * 16;
    if (Whole || k < d) tile_load_a(q[i], queries + head_tile * 16 * kRowStride + k, kRowStride);
  }
  block_sync();
  TileC acc[kValueTiles][kHeadTiles];
#pragma unroll
  for (u32 i = 0; i < kValueTiles; ++i)
#pragma unroll
    for (u32 h = 0; h < kHeadTiles; ++h) tile_zero(acc[i][h]);
  float max = kNothing, sum = 0.0f;
  const u32 batches = (item.end - item.begin + kSparseTileRows - 1) / kSparseTileRows;
  for (u32 batch = 0; batch < batches; ++batch) {
    if constexpr (!kStagedTiles) {
      if (batch) block_sync(); // the batch before has been read
      copy_rows(lds, batch, d);
    }
    copy_wait<0>();
    block_sync();
    if constexpr (kStagedTiles)
      if (batch + 1 < batches) copy_rows(lds, batch + 1, d);
    const u32 looked_up = batch / kLookUps + 1;
    if (batch % kLookUps == 1 && looked_up * kLookUps < batches) look_up(a, item, lds, looked_up);
    const u16 *rows = lds.rows + batch % kBuffers * kSparseTileRows * kRowStride;
    TileC c[kRowTiles];
#pragma unroll
    for (u32 r = 0; r < kRowTiles; ++r) tile_zero(c[r]);
#pragma unroll
    for (u32 i = 0; i < kSteps; ++i) {
      const u32 k = (i * kShares + share) * 16;
      if (!Whole && k >= d) continue;
#pragma unroll
      for (u32 r = 0; r < kRowTiles; ++r) {
        TileB b;
        tile_load_b(b, rows + r * 16 * kRowStride + k, kRowStride);
        tile_multiply(c[r], q[i], b);
      }
      if (i % 2) keep_order();
    }
    float *scores = lds.scores + (share * kSparseTileHeads + head_tile * 16) * kScoreStride;
#pragma unroll
    for (u32 r = 0; r < kRowTiles; ++r)
#pragma unroll
      for (u32 i = 0; i < kTileRegisters; ++i) scores[tile_row(i) * kScoreStride + r * 16 + tile_column(i)] = c[r].v[i];
    block_sync();
    weigh(lds, batch, max, sum);
    block_sync();
#pragma unroll
    for (u32 h = 0; h < kHeadTiles; ++h)
#pragma unroll
      for (u32 i = 0; i < kTileRegisters; ++i) {
        const float shrink = lds.shrink[h * 16 + tile_row(i)];
#pragma unroll
        for (u32 v = 0; v < kValueTiles; ++v) acc[v][h].v[i] *= shrink;
      }
#pragma unroll
    for (u32 r = 0; r < kRowTiles; ++r) {
      TileA weights[kHeadTiles];
#pragma unroll
      for (u32 h = 0; h < kHeadTiles; ++h)
        tile_load_a(weights[h], lds.weights + h * 16 * kWeightStride + r * 16, kWeightStride);
#pragma unroll
      for (u32 v = 0; v < kValueTiles; ++v) {
        const u32 m = (v * kWaves + wave) * 16;
        if (!Whole && m >= d) continue;
        TileB values;
        tile_load_b_transposed(values, rows + r * 16 * kRowStride + m, kRowStride);
#pragma unroll
        for (u32 h = 0; h < kHeadTiles; ++h) tile_multiply(acc[v][h], weights[h], values);
        keep_order();
      }
    }
  }

  if (thread_id() % 8 == 0) {
    const u32 v = thread_id() / 8;
    lds.max[v] = max;
    lds.sum[v] = item.spans == 1 && v < item.heads ? sparse_factor(a, item.head + v, max, sum) : sum;
  }
  if (item.spans == 1) turn_pairs<kSparseThreads>(a, item.position, lds.cos, lds.sin);
  float *out = reinterpret_cast<float *>(lds.rows); // (16 heads, d + 4), in the place of a batch
  const u32 out_stride = d + 4;
#pragma unroll
  for (u32 h = 0; h < kHeadTiles; ++h) {
    block_sync();
#pragma unroll
    for (u32 v = 0; v < kValueTiles; ++v) {
      const u32 m = (v * kWaves + wave) * 16;
      if (!Whole && m >= d) continue;
#pragma unroll
      for (u32 i = 0; i < kTileRegisters; ++i) out[tile_row(i) * out_stride + m + tile_column(i)] = acc[v][h].v[i];
    }
    block_sync();
    const u32 first = h * 16;
    if (first >= item.heads) break;
    const u32 heads = item.heads - first < 16 ? item.heads - first : 16;
    if (item.spans == 1)
      write_heads<kSparseThreads>(a, item, item.head + first, heads, out, out_stride, lds.sum + first, lds.cos,
                                  lds.sin);
    else
      write_parts<kSparseThreads>(a, item, item.head + first, heads, out, out_stride, lds.max + first, lds.sum + first);
  }
}

APU_KERNEL(kSparseThreads) void sparse_attention_tile_512(SparseAttentionArgs a) {
  sparse_attention_tile<true>(a);
}
APU_KERNEL_OF(kSparseThreads, 2) void sparse_attention_tile_to_512(SparseAttentionArgs a) {
  sparse_attention_tile<false>(a);
}

} // namespace apu::gpu
