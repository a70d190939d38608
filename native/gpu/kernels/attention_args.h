// Arguments of rope_store and of the attention kernels, and where the elements of a page lie; host and device.
//
// A head's part of a page holds 128 positions. Keys lie in rows, so that a lane reads neighbouring elements of one
// position; F16 and Q8_0 values lie transposed in tiles of 32 positions, so that a lane reads neighbouring positions of
// one element: each is the contiguous side of an operand of a matrix tile, and a part is read once, in its order.
//   keys    F32, F16  (128, d)
//           Q8_0      (4): quants (32, d), then their scales (32, d/32) F16
//   values  F32       (128, d)
//           F16       (4, d, 32)
//           Q8_0      (4): quants (d, 32), then their scales (d/32, 32) F16
// Latent rows, of which the beginning is the value, lie as keys; so do rows that are key and value of all heads, and
// compressed rows, of which a page holds fewer.
// Quants are bytes of 128 + q, which become halves without a shift.
#pragma once

#include "common.h"

namespace apu::gpu {

constexpr u32 kF32 = 0, kF16 = 1, kQ8 = 8; // APU_F32, APU_F16, APU_Q8_0
constexpr u32 kValueTile = 32;             // positions; also of Q8_0 keys and their scales
constexpr u32 kScaleBlock = 32;            // elements of a Q8_0 block

constexpr u32 kRopeThreads = 256;
constexpr u32 kFmaThreads = 256;

struct RopeStoreArgs {
  StepView step;
  PagedState k_state, v_state;
  float *q;             // (T, H, d), rotated in place
  const float *k;       // (T, K, d)
  const float *v;       // (T, K, dv)
  const float *q_norm;  // (d) or null
  const float *k_norm;  // (d) or null
  const double *turns;  // (pairs) quarter turns for each position
  const float *factors; // (pairs) divide them, or null
  float eps, magnitude;
  u32 heads; // H
  u32 pairs;
  u32 halves; // 1: pair i is (i, i + pairs), 0: (2 i, 2 i + 1)
};

// One row of a token for all heads of q: latent_store, shared_store.
struct RowStoreArgs {
  StepView step;
  PagedState state;
  float *q;            // (T, H, q_size), the last 2 pairs of each head rotated in place
  const float *c;      // (T, head size of the state)
  const float *norm;   // (head size - 2 pairs) of latent_store, (head size) of shared_store
  const double *turns; // as in RopeStoreArgs
  const float *factors;
  float eps, magnitude;
  u32 heads, q_size; // H
  u32 pairs, halves;
  u32 round; // APU_ROUND_* of shared_store
};

// Queries of a kv head are handled in chunks: `chunk_rows` rows of one sequence times `chunk_heads` heads. Contexts are
// cut into spans at multiples of kSpan; a span of a chunk is an item of work and gives a part (maximum, sum,
// accumulator of each query vector), which the last block of the chunk adds up in order.
constexpr u32 kSpan = 1024;
constexpr u32 kLatentSpan = 256;  // of latent attention by FMA: one row for all heads makes few items
constexpr u32 kLatentVectors = 8; // of its chunks, at most
constexpr u32 kLatentFront = 4;   // words of LDS before the rest: a flag

struct AttentionArgs {
  StepView step;
  PagedState k_state, v_state; // of latent attention the same, the head size of v_state that of a value
  const float *q;              // (T, H, d)
  const float *sinks;          // (H) or null
  float *out;                  // (T, H, dv)
  float scale, cap;            // cap 0: none
  u32 heads;                   // H
  u32 group;                   // H / K
  u32 chunk_rows;
  u32 chunk_heads;
  u32 row_factor;    // vector * row_factor >> 16 is its row of the chunk: 65536 / chunk_heads + 1, 0 where there is one
                     // row
  u32 head_chunks;   // of a kv head: group / chunk_heads, rounded up
  u32 max_sequences; // of a step
  u32 min_rows, max_rows; // sequences with so many rows in the step are this kernel's
  float *parts;           // (slots, slot_floats)
  u32 slots;
  u32 slot_floats; // at least part_floats(chunk_rows * chunk_heads, dv)
  u32 *counters;   // (T, K, head chunks), zero
  // Of latent tiles; spans 0: chunks take all that they see.
  u32 first;      // of the rows that min_rows and max_rows leave, counted through, the first of this launch
  u32 spans;      // of a row, at most: the grid has so many blocks for each, and `parts` so many slots
  u32 vectors;    // of a block
  u32 span_rows;  // of a span, at least
  u32 most_spans; // spans become longer beyond so many
};

// Kernels on matrix tiles: up to 16 query vectors a wave, 32 positions at a time, head sizes up to `Most`.
constexpr u32 kTileVectors = 16;
constexpr u32 kTileKeys = 32;
constexpr u32 kSpanThreads = 128;
constexpr u32 kRowsThreads = 256;
constexpr u32 kAccPad = 4; // floats between accumulators in LDS
// Halves between queries in LDS: an odd multiple of 32, so that quads of lanes meet no bank twice.
template <u32 Most> constexpr u32 kQueryStride = Most / 32 % 2 ? Most : Most + 32;
// Values of heads above 128 are halved between two waves, which make the same scores.
template <u32 Most> constexpr u32 kWaveParts = Most > 128 ? 2 : 1;
template <u32 Most> constexpr u32 kWaveTiles = Most / 16 / kWaveParts<Most>;
// Where there are bulk copies a wave has a ring in LDS, of so many halves of tiles, keys and values in turn; 0: none.
template <u32 Type, u32 Most> constexpr u32 kRing = Type == kF16 ? (Most > 128 ? 0 : 3) : (Most == 64 ? 4 : 2);
template <u32 Type, u32 Most> constexpr u32 kHalfBytes = (Type == kF16 ? 64 : 34) * Most;
template <u32 Type, u32 Most, u32 Waves> constexpr u32 kRingsBytes = Waves * kRing<Type, Most> * kHalfBytes<Type, Most>;
// LDS of a span: rings, of which the accumulators of each wave's share of the positions take the place; queries; maxima
// and sums of the shares; a flag; barriers of the rings.
template <u32 Most, u32 Waves> constexpr u32 kSpanShares = Waves / kWaveParts<Most>;
template <u32 Most, u32 Waves>
constexpr u32 kSharesBytes = 4 * kTileVectors * kSpanShares<Most, Waves> * (Most + kAccPad);
template <u32 Type, u32 Most, u32 Waves, bool Rings>
constexpr u32 kSpanFront =
    Rings && kRingsBytes<Type, Most, Waves> > kSharesBytes<Most, Waves> ? kRingsBytes<Type, Most, Waves>
                                                                        : kSharesBytes<Most, Waves>;
template <u32 Type, u32 Most, u32 Waves, bool Rings>
constexpr u32 kSpanLds = kSpanFront<Type, Most, Waves, Rings> + 2 * kTileVectors * kQueryStride<Most> +
                         8 * kTileVectors * kSpanShares<Most, Waves> + 16 + (Rings ? 8 * Waves * kRing<Type, Most> : 0);
template <u32 Most, u32 Waves>
constexpr u32 kRowsLds = 2 * Waves / kWaveParts<Most> * kTileVectors * kQueryStride<Most>;

// Latent tiles: 16 or 64 query vectors (heads of a row; rows, too, where there are fewer heads) of a block over tiles
// of latent rows. LDS: queries, then one or two tiles, both of lines of kLatentStride halves; exponentials lie behind
// the values of a tile. Then parts of scores, addresses of a tile's rows, maxima and sums of the vectors, factors of
// the accumulators, barriers.
constexpr u32 kLatentWaves = 8;
constexpr u32 kLatentKey = 576, kLatentValue = 512; // elements, at most
constexpr u32 kLatentStride = kLatentKey + 8;
constexpr u32 kLatentUnit = 64;      // spans begin at multiples
constexpr u32 kCombineThreads = 512; // a thread adds up four elements, of a quarter of the spans

constexpr u32 latent_rows(u32 vectors) { // of a tile
  return vectors == 16 ? 32 : 64;
}
struct LatentLayout { // byte offsets
  u32 tiles, scores, addresses, maxima, factors, barriers, bytes;
};
constexpr LatentLayout latent_layout(u32 vectors, bool ring) {
  const u32 rows = latent_rows(vectors), score_tiles = rows / 16 * (vectors / 16);
  LatentLayout l{};
  l.tiles = vectors * kLatentStride * 2;
  l.scores = l.tiles + (ring ? 2 : 1) * rows * kLatentStride * 2;
  l.addresses = l.scores + (kLatentWaves > score_tiles ? kLatentWaves - score_tiles : 0) * 256 * 4;
  l.maxima = l.addresses + (ring ? 0 : rows * 16);
  l.factors = l.maxima + vectors * (rows / 16) * 4;
  l.barriers = l.factors + vectors * 4;
  l.bytes = l.barriers + (ring ? 16 : 0);
  return l;
}

// Of one part: accumulators (vectors, dv), maxima (vectors), sums (vectors); whole cache lines, because a line that two
// blocks share could be stale in one's cache.
constexpr u32 part_floats(u32 vectors, u32 dv) {
  return (vectors * (dv + 2) + 31) / 32 * 32;
}

} // namespace apu::gpu
