// How attention's work is cut into items and how their parts become rows of the output; shared by its kernels.
//
// A block finds its items itself from the step: of every sequence that is this kernel's, chunks x spans x kv heads.
// Blocks stride over the items of a kv head (y), so that sequences of different lengths share the device evenly and a
// grid larger than the work costs little. A part's bits depend on its row and span alone, and parts are added up in the
// order of the spans by one formula: which block does what changes nothing. Where the parts do not fit (`slots`), a
// block does all spans of a chunk in turn with slots of its own.
#pragma once

#include "kv.h"

namespace apu::gpu {

constexpr float kMinusInfinity = -__builtin_inff();

struct SequenceItems { // of one sequence, kept by one lane
  u32 row_begin, row_count, position, first_span, last_span;
  u32 pages;  // first entry of its page table
  u32 chunks; // 0: not this kernel's
  APU_METHOD u32 items(bool whole) const { return whole ? chunks : chunks * (last_span - first_span + 1); }
};

struct Survey { // of the step, the same in all blocks
  u32 sequences;
  u32 items;  // spans of chunks, or chunks where `whole`
  u32 stride; // blocks that take part
  u32 spans;  // of the longest sequence
  bool whole;
};

struct Item {
  u32 row, rows;             // of the chunk, in the step
  u32 position;              // of its first row
  u32 pages;                 // first entry of the sequence's page table
  u32 head;                  // kv head
  u32 first_head, heads;     // query heads: vector i is row i / heads, head first_head + i % heads
  u32 span;                  // this one
  u32 first_span, last_span; // of the sequence
  u32 unit;                  // index of the chunk's counter
  u32 slot, slot_step;       // of the first span's part, and from one span's to the next one's
};

APU_DEVICE u32 lowest_position(const AttentionArgs &a, u32 position) {
  const u32 window = a.k_state.window;
  return window && position >= window ? position - window + 1 : 0;
}

// Of sequence `begin` + lane. What is there is read while the number of sequences is still on its way.
template <u32 Span = kSpan> APU_DEVICE SequenceItems sequence_items(const AttentionArgs &a, u32 begin) {
  const u32 sequence = begin + lane_id();
  SequenceItems s = {};
  if (sequence >= a.max_sequences) return s;
  const Sequence q = a.step.sequences[sequence];
  s.pages = a.step.slots[u64(sequence) * a.step.groups + a.k_state.group].page_begin;
  if (sequence >= a.step.counts->sequences) return s;
  s.row_begin = q.row_begin;
  s.row_count = q.row_count;
  s.position = a.step.rows[q.row_begin].position;
  s.first_span = lowest_position(a, s.position) / Span;
  s.last_span = (s.position + q.row_count - 1) / Span;
  if (q.row_count >= a.min_rows && q.row_count <= a.max_rows)
    s.chunks = a.chunk_rows == 1 ? q.row_count : (q.row_count + a.chunk_rows - 1) / a.chunk_rows;
  return s;
}

APU_DEVICE u32 item_heads(const AttentionArgs &a) { // the grid's y
  return a.k_state.heads * a.head_chunks;
}

APU_DEVICE u32 of_lane(u32 v, u32 lane) {
  return wave_uniform(wave_shuffle(v, lane));
}

// `first`: sequence_items(a, 0).
template <u32 Span = kSpan> APU_DEVICE Survey survey_step(const AttentionArgs &a, const SequenceItems &first) {
  Survey s = {};
  s.sequences = a.step.counts->sequences;
  s.stride = grid_size();
  u32 chunks = 0;
  for (u32 begin = 0; begin < s.sequences; begin += kWaveSize) {
    const SequenceItems q = begin ? sequence_items<Span>(a, begin) : first;
    const u32 spans = q.chunks ? q.last_span - q.first_span + 1 : 0;
    if (s.sequences == 1) { // nothing to add up
      s.items = of_lane(q.items(false), 0);
      chunks = of_lane(q.chunks, 0);
      s.spans = of_lane(spans, 0);
      break;
    }
    s.items += wave_uniform(wave_sum(q.items(false)));
    chunks += wave_uniform(wave_sum(q.chunks));
    const u32 most = wave_uniform(u32(wave_max(float(spans)))); // exact below 2^24
    s.spans = most > s.spans ? most : s.spans;
  }
  const u32 heads = item_heads(a);
  s.whole = s.items * heads > a.slots;
  if (s.whole) {
    s.items = chunks;
    const u32 blocks = a.slots / (s.spans * heads);
    s.stride = blocks < s.stride ? blocks : s.stride;
  }
  return s;
}

template <u32 Span = kSpan>
APU_DEVICE Item find_item(const AttentionArgs &a, const Survey &s, const SequenceItems &first, u32 index) {
  SequenceItems q = first;
  u32 rest = index, lane = 0;
  for (u32 begin = 0; s.sequences > 1;) {
    const u32 own = q.items(s.whole);
    u32 end = own; // of this lane's items, the earlier lanes' included
#pragma unroll
    for (u32 step = 1; step < kWaveSize; step *= 2) {
      const u32 before = wave_shuffle(end, lane_id() >= step ? lane_id() - step : 0);
      if (lane_id() >= step) end += before;
    }
    const u32 all = of_lane(end, kWaveSize - 1);
    if (rest < all) {
      lane = wave_uniform(wave_sum(end <= rest ? 1u : 0u));
      rest -= of_lane(end - own, lane);
      break;
    }
    rest -= all;
    begin += kWaveSize;
    q = sequence_items<Span>(a, begin);
  }
  Item out = {};
  out.first_span = of_lane(q.first_span, lane);
  out.last_span = of_lane(q.last_span, lane);
  out.pages = of_lane(q.pages, lane);
  u32 chunk = rest;
  out.span = out.first_span;
  if (!s.whole) {
    const u32 spans = out.last_span - out.first_span + 1;
    chunk = rest < spans ? 0 : rest / spans;
    out.span += rest - chunk * spans;
  }
  out.row = of_lane(q.row_begin, lane) + chunk * a.chunk_rows;
  const u32 rows = of_lane(q.row_count, lane) - chunk * a.chunk_rows;
  out.rows = rows < a.chunk_rows ? rows : a.chunk_rows;
  out.position = of_lane(q.position, lane) + chunk * a.chunk_rows;

  const u32 heads = item_heads(a), head = block_id_y();
  out.head = a.head_chunks == 1 ? head : head / a.head_chunks;
  const u32 in_group = (head - out.head * a.head_chunks) * a.chunk_heads;
  out.first_head = out.head * a.group + in_group;
  out.heads = a.group - in_group < a.chunk_heads ? a.group - in_group : a.chunk_heads;
  out.unit = out.row * heads + head;
  out.slot = s.whole ? (block_id() * heads + head) * s.spans : (index - (out.span - out.first_span)) * heads + head;
  out.slot_step = s.whole ? 1 : heads;
  return out;
}

// The row of the chunk that a vector is of, and its query head. Several rows have equally many heads.
APU_DEVICE u32 row_of(const AttentionArgs &a, u32 vector) {
  return vector * a.row_factor >> 16;
}
APU_DEVICE u32 head_of(const AttentionArgs &a, const Item &item, u32 vector) {
  return item.first_head + vector - row_of(a, vector) * item.heads;
}

// First and one behind the last position of `span` that any row of the chunk sees; begin >= end where none does.
template <u32 Span = kSpan> APU_DEVICE void span_range(const AttentionArgs &a, const Item &item, u32 *begin, u32 *end) {
  const u32 low = lowest_position(a, item.position), high = item.position + item.rows;
  *begin = low > item.span * Span ? low : item.span * Span;
  *end = high < (item.span + 1) * Span ? high : (item.span + 1) * Span;
}

APU_DEVICE float soft_cap(float s, float cap) { // cap * tanh(s / cap)
  const float e = exp_f32(-2.0f * fabs_f32(s) / cap), t = cap * (1.0f - e) / (1.0f + e);
  return s < 0.0f ? -t : t;
}

// What the maxima and sums of a vector's parts come to: the factor of its accumulator.
APU_DEVICE float final_factor(const AttentionArgs &a, u32 head, float max, float sum) {
  if (!a.sinks) return 1.0f / sum;
  const float sink = a.sinks[head], most = max_f32(max, sink); // a score without a value
  const float shrink = exp_f32(max - most);
  return shrink / fma_f32(sum, shrink, exp_f32(sink - most));
}

APU_DEVICE float *output_row(const AttentionArgs &a, const Item &item, u32 vector) {
  const u64 row = item.row + row_of(a, vector);
  return a.out + (row * a.heads + head_of(a, item, vector)) * a.v_state.head_size;
}

// thread_id() of which nothing is computed before the loop that it is asked in: items are worked on in phases, and
// what all of them need would take registers in each.
APU_DEVICE u32 thread_in_loop() {
  u32 thread = thread_id();
  hide(thread);
  return thread;
}

APU_DEVICE float *part_of(const AttentionArgs &a, const Item &item, u32 span) {
  return a.parts + u64(item.slot + (span - item.first_span) * item.slot_step) * a.slot_floats;
}

template <u32 Width> struct Floats {
  float v[Width];
};
template <u32 Width> APU_DEVICE Floats<Width> load_floats(const float *p) {
  Floats<Width> out;
  if constexpr (Width == 4) {
    const u32x4 v = load16(p);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) out.v[i] = bits_to_float(v[i]);
  } else {
    out.v[0] = *p;
  }
  return out;
}
template <u32 Width> APU_DEVICE void store_floats(float *p, const Floats<Width> &x) {
  if constexpr (Width == 4) {
    const u32x4 v = {float_to_bits(x.v[0]), float_to_bits(x.v[1]), float_to_bits(x.v[2]), float_to_bits(x.v[3])};
    store16(p, v);
  } else {
    *p = x.v[0];
  }
}

constexpr u32 kPartsTogether = 8; // whose loads are under way at once

// The chunk's rows of the output: the parts of all spans, added up. Parts are taken in groups by their spans' numbers,
// and what is not there changes nothing: so a row's bits do not depend on the chunk's other rows.
template <u32 Threads, u32 Width> APU_DEVICE void combine_parts(const AttentionArgs &a, const Item &item, u32 dv) {
  const u32 vectors = item.rows * item.heads, stride = a.chunk_rows * a.chunk_heads;
  const u32 first = item.first_span, last = item.last_span;
  for (u32 i = Width * thread_in_loop(); i < vectors * dv; i += Width * Threads) {
    const u32 v = i / dv;
    float max = kMinusInfinity, sum = 0.0f;
    Floats<Width> total = {};
    for (u32 begin = first / kPartsTogether * kPartsTogether; begin <= last; begin += kPartsTogether) {
      float maxima[kPartsTogether], sums[kPartsTogether];
      Floats<Width> x[kPartsTogether];
#pragma unroll
      for (u32 j = 0; j < kPartsTogether; ++j) {
        const u32 s = begin + j;
        const bool real = s >= first && s <= last;
        const float *part = part_of(a, item, real ? s : last);
        maxima[j] = part[stride * dv + v];
        sums[j] = part[stride * dv + stride + v];
        x[j] = load_floats<Width>(part + i);
        if (!real) maxima[j] = kMinusInfinity;
      }
      float most = max;
#pragma unroll
      for (u32 j = 0; j < kPartsTogether; ++j) most = max_f32(most, maxima[j]);
      const float from = most == kMinusInfinity ? 0.0f : most, shrink = exp_f32(max - from);
      max = most;
      sum *= shrink;
#pragma unroll
      for (u32 e = 0; e < Width; ++e) total.v[e] *= shrink;
#pragma unroll
      for (u32 j = 0; j < kPartsTogether; ++j) {
        const float weight = exp_f32(maxima[j] - from);
        const bool some = weight != 0.0f; // an empty part has no accumulator
        sum = some ? fma_f32(weight, sums[j], sum) : sum;
#pragma unroll
        for (u32 e = 0; e < Width; ++e) total.v[e] = some ? fma_f32(weight, x[j].v[e], total.v[e]) : total.v[e];
      }
    }
    const float factor = final_factor(a, head_of(a, item, v), max, sum);
#pragma unroll
    for (u32 e = 0; e < Width; ++e) total.v[e] *= factor;
    store_floats<Width>(output_row(a, item, v) + i % dv, total);
  }
}

template <u32 Width> struct SpanElements {
  float max, sum;
  Floats<Width> values;
};

// Hands on what a block made of a span. `result.of(vector, element)` gives the vector's maximum and sum and `Width`
// elements of its accumulator from LDS, complete for all threads. `flag` is in LDS. Ends in a state where all of them
// may be reused.
template <u32 Threads, u32 Width, class Result>
APU_DEVICE void finish_span(const AttentionArgs &a, const Survey &survey, const Item &item, u32 dv,
                            const Result &result, u32 *flag) {
  const u32 vectors = item.rows * item.heads, stride = a.chunk_rows * a.chunk_heads;
  const u32 thread = thread_in_loop();
  const bool single = item.first_span == item.last_span;
  float *part = part_of(a, item, item.span);
  for (u32 i = Width * thread; i < vectors * dv; i += Width * Threads) {
    const u32 v = i / dv, m = i % dv;
    SpanElements<Width> x = result.of(v, m);
    if (single) {
      const float factor = final_factor(a, head_of(a, item, v), x.max, x.sum);
#pragma unroll
      for (u32 e = 0; e < Width; ++e) x.values.v[e] *= factor;
      store_floats<Width>(output_row(a, item, v) + m, x.values);
    } else {
      if (x.max != kMinusInfinity) store_floats<Width>(part + i, x.values);
      if (m == 0) {
        part[stride * dv + v] = x.max;
        part[stride * dv + stride + v] = x.sum;
      }
    }
  }
  if (!single) device_fence();
  block_sync();
  if (single) return;
  if (!survey.whole) {
    if (thread == 0) *flag = atomic_add(a.counters + item.unit, 1);
    block_sync();
    if (*flag != item.last_span - item.first_span) return;
    device_fence();
    if (thread == 0) a.counters[item.unit] = 0;
  } else if (item.span != item.last_span) {
    return;
  }
  combine_parts<Threads, Width>(a, item, dv);
  block_sync();
}

} // namespace apu::gpu
