// The argument of the attention over a window and compressed rows (sparse_attention.hip), for host and device.
#pragma once

#include "common.h"

namespace apu::gpu {

constexpr u32 kSparseThreads = 256;
constexpr u32 kSparseVectors = 8; // heads of a block, at most
constexpr u32 kSparseBatch = 128; // rows that a block takes at a time
constexpr u32 kSparseSpans = 16;  // of a row, at most
constexpr u32 kSparseSpan = 64;   // rows: spans are multiples of it
constexpr u32 kSparseFront = 4;   // words of LDS before the rest: a flag

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
  u32 spans;    // of a row, at most; 0: a block takes all of them, one after the other
  float *parts; // (rows, chunks, spans, slot_floats)
  u32 slot_floats;
  u32 *counters; // (rows, chunks), zero
};

// Of one part: accumulators (vectors, d), maxima (vectors), sums (vectors); whole cache lines.
constexpr u32 sparse_part_floats(u32 vectors, u32 d) {
  return (vectors * (d + 2) + 31) / 32 * 32;
}

// Bytes of LDS: flag; addresses and scores of a batch; queries, accumulators; maxima, sums, factors; cos and sin.
constexpr u32 sparse_lds(u32 vectors, u32 d, u32 pairs) {
  return 4 * (kSparseFront + kSparseBatch * (2 + kSparseVectors) + vectors * (2 * d + 3) + 2 * pairs);
}

} // namespace apu::gpu
