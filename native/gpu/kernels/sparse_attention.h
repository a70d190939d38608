// The argument of the attention over a window and compressed rows (sparse_attention*.hip), for host and device.
#pragma once

#include "common.h"

namespace apu::gpu {

constexpr u32 kSparseThreads = 256;
constexpr u32 kSparseSpans = 32; // of a row, at most: a wave adds them up
constexpr u32 kSparseSpan = 64;  // rows: spans are multiples of it
constexpr u32 kSparseSumThreads = 128;

struct SparseAttentionArgs {
  StepView step;
  PagedState window, rows; // rows.page_rows is 0 where there are none
  const float *q;          // (T, H, d)
  const i32 *ids;          // (T, chosen) or null: all
  const float *sinks;      // (H) or null
  float *out;              // (T, H, d)
  const double *turns;     // as rotate.h describes, and so factors, magnitude, pairs, halves
  const float *factors;
  float scale, magnitude;
  u32 heads;       // H
  u32 chunk_heads; // of a block; grid (rows x spans, chunks)
  u32 chosen;
  u32 pairs, halves;
  u32 spans;        // of a row, at most; 0: a block takes all of a row
  float *parts;     // (T, H, spans, d)
  float *part_ends; // (T, H, spans, 2): maximum, sum
};

// On FMA: batches of 128 rows for up to 8 heads. LDS: addresses and scores of a batch; queries, accumulators; maxima,
// sums, factors; cos and sin.
constexpr u32 kSparseVectors = 8;
constexpr u32 kSparseBatch = 128;
constexpr u32 sparse_lds(u32 vectors, u32 d, u32 pairs) {
  return 4 * (kSparseBatch * (2 + kSparseVectors) + vectors * (2 * d + 3) + 2 * pairs);
}

// On matrix tiles: batches of 32 rows for 32 heads of at most 512 elements. LDS: rows of a batch, or of two where
// copies run in the background; scores of each share of the elements; weights; addresses; maxima, sums, factors;
// cos and sin.
constexpr u32 kSparseTileHeads = 32;
constexpr u32 kSparseTileRows = 32;
constexpr u32 kSparseTileMost = 512;
constexpr u32 kSparseTilePad = 8;   // halves after a row
constexpr u32 kSparseScorePad = 4;  // floats
constexpr u32 kSparseWeightPad = 8; // halves
constexpr u32 sparse_tile_lds(u32 wave_size, bool staged, u32 pairs) {
  const u32 shares = kSparseThreads / wave_size / (kSparseTileHeads / 16);
  return (staged ? 2 : 1) * kSparseTileRows * (kSparseTileMost + kSparseTilePad) * 2 +
         shares * kSparseTileHeads * (kSparseTileRows + kSparseScorePad) * 4 +
         kSparseTileHeads * (kSparseTileRows + kSparseWeightPad) * 2 + 2 * kSparseThreads * 8 +
         4 * (3 * kSparseTileHeads + 2 * pairs);
}
constexpr u32 sparse_sum_lds(u32 d, u32 pairs) {
  return 4 * (d + kSparseSpans + 2 * pairs + 4);
}

} // namespace apu::gpu
