// LATENT_ATTENTION over F16 and Q8_0 caches on matrix tiles.
//
// Sequences with few rows in the step: each row's context is cut into spans, whose length follows from the row's
// position; a block takes a span for 16 or 64 heads and leaves a part, which latent_combine adds up. Others: a block
// takes 16 or 64 vectors, heads of several rows where there are fewer heads, and all that they see.
//
// Bytes: the latent rows once for each block that needs them, from memory or cache; parts of vectors x (value + 2)
// floats are written and read once. 2 x (key + value) operations for each row and vector. Measured on an H200: .37 of
// torch's bf16 product over 512 rows; docs/kernels.md has single rows.
#include "latent_tile.h"

namespace apu::gpu {

template <u32 Type> struct PagedRows {
  const AttentionArgs &a;
  const Item &item;
  APU_METHOD RowAddress row(u32 i) const {
    return latent_row<Type>(a.k_state, a.step.pages[item.pages + i / kPageRows], i % kPageRows);
  }
  APU_METHOD bool sees(u32 v, u32 i) const {
    const u32 position = item.position + row_of(a, v);
    return i <= position && i >= lowest_position(a, position);
  }
  APU_METHOD bool all(u32 begin, u32 end) const {
    return end <= item.position + 1 && begin >= lowest_position(a, item.position + item.rows - 1);
  }
};

// How what a row sees is cut: spans of `rows` from `begin` on.
struct LatentSpans {
  u32 begin, rows, count;
  static APU_METHOD LatentSpans of(const AttentionArgs &a, u32 position) {
    LatentSpans s;
    s.begin = lowest_position(a, position) / kLatentUnit * kLatentUnit;
    const u32 all = position + 1 - s.begin, least = (all + a.most_spans - 1) / a.most_spans;
    s.rows = least <= a.span_rows ? a.span_rows : (least + kLatentUnit - 1) / kLatentUnit * kLatentUnit;
    s.count = (all + s.rows - 1) / s.rows;
    return s;
  }
};

APU_DEVICE float *latent_part(const AttentionArgs &a, u32 index, u32 heads, u32 span) {
  return a.parts + u64(((index - a.first) * a.head_chunks + heads) * a.spans + span) * a.slot_floats;
}

template <u32 Type, u32 Vectors> APU_DEVICE void latent_tiles(const AttentionArgs &a) {
  using Tile = LatentTile<Type, Vectors>;
  const SequenceItems mine = sequence_items(a, 0);
  const Survey survey = survey_step(a, mine);
  const u32 place = a.spans ? a.first + block_id() / a.spans : block_id();
  if (place >= survey.items) return;
  const u32 index = a.spans ? place : survey.items - 1 - place; // the longest first
  const Item item = find_item(a, survey, mine, index);
  const u32 vectors = item.rows * item.heads;
  u32 begin = lowest_position(a, item.position), end = item.position + item.rows;
  float *part = nullptr;
  if (a.spans) {
    const LatentSpans spans = LatentSpans::of(a, item.position);
    const u32 span = block_id() - (place - a.first) * a.spans, from = spans.begin + span * spans.rows;
    if (span >= spans.count) return;
    if (spans.count > 1) part = latent_part(a, index, block_id_y(), span);
    begin = from > begin ? from : begin;
    end = from + spans.rows < end ? from + spans.rows : end;
  }
  const PagedRows<Type> source{a, item};
  Tile tile(a.k_state.head_size, a.v_state.head_size, a.cap);
  tile.attend(source, begin, end, [&] {
    tile.load_queries(a.scale, [&](u32 v) -> const float * {
      if (v >= vectors) return nullptr;
      return a.q + (u64(item.row + row_of(a, v)) * a.heads + head_of(a, item, v)) * a.k_state.head_size;
    });
  });
  const u32 dv = a.v_state.head_size;
  tile.finish([&](u32 v, float max, float sum, bool leads) -> typename Tile::Place {
    if (v >= vectors) return {nullptr, 0.0f};
    if (!part) return {output_row(a, item, v), final_factor(a, head_of(a, item, v), max, sum)};
    if (leads) {
      float *const ends = global_pointer<float>(u64(part + Vectors * dv + v));
      ends[0] = max;
      ends[Vectors] = sum;
    }
    return {part + v * dv, 1.0f};
  });
}

// A block adds up one head of one row: four elements a thread, a quarter of the spans for each quarter of the threads,
// some at once in their order; then the quarters.
struct Sums {
  float max, sum;
  Floats<4> values;
};
APU_KERNEL(kCombineThreads) void latent_combine(AttentionArgs a) {
  constexpr u32 together = 16, quarter = kLatentValue / 4;
  static_assert(kCombineThreads == 4 * quarter);
  APU_SHARED Sums quarters[4][quarter];
  const SequenceItems mine = sequence_items(a, 0);
  const Survey survey = survey_step(a, mine);
  const u32 index = a.first + block_id() / a.chunk_heads, dv = a.v_state.head_size;
  if (index >= survey.items) return;
  const Item item = find_item(a, survey, mine, index);
  const u32 v = block_id() % a.chunk_heads, head = item.first_head + v;
  const LatentSpans spans = LatentSpans::of(a, item.position);
  if (v >= item.heads || spans.count == 1) return;
  const u32 own = thread_id() / quarter, place = thread_id() % quarter, m = 4 * place;
  const u32 each = (spans.count + 3) / 4, end = (own + 1) * each < spans.count ? (own + 1) * each : spans.count;
  const float *part = latent_part(a, index, block_id_y(), 0);
  const float *values = part + v * dv + (m < dv ? m : 0), *ends = part + a.vectors * dv + v;
  Sums all = {kMinusInfinity, 0.0f, {}};
  for (u32 begin = own * each; begin < end; begin += together) {
    float maxima[together], sums[together];
    Floats<4> x[together];
#pragma unroll
    for (u32 j = 0; j < together; ++j) {
      const u64 at = u64(begin + j < end ? begin + j : begin) * a.slot_floats;
      maxima[j] = ends[at];
      sums[j] = ends[at + a.vectors];
      x[j] = load_floats<4>(values + at);
    }
    float most = all.max;
#pragma unroll
    for (u32 j = 0; j < together; ++j) most = max_f32(most, maxima[j]);
    const float shrink = exp_f32(all.max - most);
    all.max = most;
    all.sum *= shrink;
#pragma unroll
    for (u32 e = 0; e < 4; ++e) all.values.v[e] *= shrink;
#pragma unroll
    for (u32 j = 0; j < together; ++j) {
      if (begin + j >= end) continue;
      const float weight = exp_f32(maxima[j] - most);
      all.sum = fma_f32(weight, sums[j], all.sum);
#pragma unroll
      for (u32 e = 0; e < 4; ++e) all.values.v[e] = fma_f32(weight, x[j].v[e], all.values.v[e]);
    }
  }
  quarters[own][place] = all;
  block_sync();
  if (own > 0 || m >= dv) return;
  float most = all.max, sum = 0.0f;
  Floats<4> total = {};
#pragma unroll
  for (u32 w = 1; w < 4; ++w) most = max_f32(most, quarters[w][place].max);
#pragma unroll
  for (u32 w = 0; w < 4; ++w) {
    const Sums x = quarters[w][place];
    const float weight = exp_f32(x.max - most);
    sum = fma_f32(weight, x.sum, sum);
#pragma unroll
    for (u32 e = 0; e < 4; ++e) total.v[e] = fma_f32(weight, x.values.v[e], total.v[e]);
  }
  const float factor = final_factor(a, head, most, sum);
#pragma unroll
  for (u32 e = 0; e < 4; ++e) total.v[e] *= factor;
  store_floats<4>(a.out + (u64(item.row) * a.heads + head) * dv + m, total);
}

#define APU_LATENT_TILES(name, type, vectors)                                                                          \
  APU_KERNEL(kLatentWaves *kWaveSize) void latent_tiles_##name(AttentionArgs a) {                                      \
    if constexpr (vectors == 16 || kBulkCopy) latent_tiles<type, vectors>(a);                                          \
  }

// Of 64 vectors where LDS is large.
APU_LATENT_TILES(f16_16, kF16, 16)
APU_LATENT_TILES(f16_64, kF16, 64)
APU_LATENT_TILES(q8_0_16, kQ8, 16)
APU_LATENT_TILES(q8_0_64, kQ8, 64)

} // namespace apu::gpu
