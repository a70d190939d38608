// How attention's work is cut into items and how their parts become rows of the output; shared by its kernels.
//
// A block finds its items itself from the step: of every sequence that is this kernel's, chunks x spans x kv heads.
// Blocks stride over the items, so that sequences of different lengths share the device evenly and a grid larger than
// the work costs little. A part's bits depend on its row and span alone, and parts are added up in the order of the
// spans by one formula: which block does what changes nothing. Where the parts do not fit (`slots`), a block does all
// spans of a chunk in turn with slots of its own.
#pragma once

#include "kv.h"

namespace apu::gpu {

constexpr float kMinusInfinity = -__builtin_inff();

struct Survey { // of the step, the same in all blocks
  u32 items;    // spans of chunks, or chunks where `whole`
  u32 stride;   // blocks that take part
  u32 spans;    // of the longest sequence
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

struct SequenceItems { // of one sequence, kept by one lane
  u32 row_begin, row_count, position, first_span, last_span;
  u32 pages; // first entry of its page table
  u32 items; // without heads
};

APU_DEVICE SequenceItems sequence_items(const AttentionArgs &a, u32 sequence, u32 count, bool whole) {
  SequenceItems s = {};
  if (sequence >= a.max_sequences) return s; // what is there is read while `count` is still on its way
  const Sequence q = a.step.sequences[sequence];
  s.pages = a.step.slots[u64(sequence) * a.step.groups + a.k_state.group].page_begin;
  if (sequence >= count) return s;
  s.row_begin = q.row_begin;
  s.row_count = q.row_count;
  s.position = a.step.rows[q.row_begin].position;
  s.first_span = lowest_position(a, s.position) / kSpan;
  s.last_span = (s.position + q.row_count - 1) / kSpan;
  const u32 chunks = (q.row_count + a.chunk_rows - 1) / a.chunk_rows;
  if (q.row_count >= a.min_rows && q.row_count <= a.max_rows)
    s.items = whole ? chunks : chunks * (s.last_span - s.first_span + 1);
  return s;
}

APU_DEVICE u32 item_heads(const AttentionArgs &a) {
  return a.k_state.heads * a.head_chunks;
}

APU_DEVICE u32 of_lane(u32 v, u32 lane) {
  return wave_uniform(wave_shuffle(v, lane));
}

APU_DEVICE Survey survey_step(const AttentionArgs &a) {
  const u32 count = a.step.counts->sequences, heads = item_heads(a);
  Survey s = {0, grid_size(), 0, false};
  float longest = 0.0f;
  u32 chunks = 0;
  for (u32 begin = 0; begin < count; begin += kWaveSize) {
    const SequenceItems q = sequence_items(a, begin + lane_id(), count, false);
    const u32 spans = q.items ? q.last_span - q.first_span + 1 : 0;
    s.items += wave_uniform(wave_sum(q.items));
    chunks += wave_uniform(wave_sum(q.items ? (q.row_count + a.chunk_rows - 1) / a.chunk_rows : 0u));
    longest = max_f32(longest, wave_max(float(spans))); // exact below 2^24
  }
  s.items *= heads;
  s.spans = wave_uniform(u32(longest));
  s.whole = s.items > a.slots;
  if (s.whole) {
    s.items = chunks * heads;
    const u32 blocks = a.slots / s.spans;
    s.stride = blocks < s.stride ? blocks : s.stride;
  }
  return s;
}

APU_DEVICE Item find_item(const AttentionArgs &a, const Survey &s, u32 index) {
  const u32 count = a.step.counts->sequences, heads = item_heads(a), parts = a.head_chunks;
  u32 rest = index / heads;
  Item out = {};
  for (u32 begin = 0; begin < count; begin += kWaveSize) {
    const SequenceItems q = sequence_items(a, begin + lane_id(), count, s.whole);
    u32 end = q.items; // of this lane's items, the earlier lanes' included
#pragma unroll
    for (u32 step = 1; step < kWaveSize; step *= 2) {
      const u32 before = wave_shuffle(end, lane_id() >= step ? lane_id() - step : 0);
      if (lane_id() >= step) end += before;
    }
    const u32 all = wave_uniform(wave_shuffle(end, kWaveSize - 1));
    if (rest >= all) {
      rest -= all;
      continue;
    }
    const u32 lane = wave_uniform(wave_sum(end <= rest ? 1u : 0u));
    const u32 local = rest - of_lane(end - q.items, lane);
    const u32 row_begin = of_lane(q.row_begin, lane), row_count = of_lane(q.row_count, lane);
    const u32 position = of_lane(q.position, lane);
    out.first_span = of_lane(q.first_span, lane);
    out.last_span = of_lane(q.last_span, lane);
    const u32 spans = s.whole ? 1 : out.last_span - out.first_span + 1, chunk = local / spans;
    out.span = out.first_span + local % spans;
    out.row = row_begin + chunk * a.chunk_rows;
    out.rows = row_begin + row_count - out.row;
    out.rows = out.rows < a.chunk_rows ? out.rows : a.chunk_rows;
    out.position = position + chunk * a.chunk_rows;
    out.pages = of_lane(q.pages, lane);
    break;
  }
  const u32 head = index % heads;
  out.head = head / parts;
  const u32 in_group = head % parts * a.chunk_heads;
  out.first_head = out.head * a.group + in_group;
  out.heads = a.group - in_group < a.chunk_heads ? a.group - in_group : a.chunk_heads;
  out.unit = out.row * heads + head;
  out.slot = s.whole ? block_id() * s.spans : index - (out.span - out.first_span) * heads;
  out.slot_step = s.whole ? 1 : heads;
  return out;
}

// First and one behind the last position of `span` that any row of the chunk sees; begin >= end where none does.
APU_DEVICE void span_range(const AttentionArgs &a, const Item &item, u32 *begin, u32 *end) {
  const u32 low = lowest_position(a, item.position), high = item.position + item.rows;
  *begin = low > item.span * kSpan ? low : item.span * kSpan;
  *end = high < (item.span + 1) * kSpan ? high : (item.span + 1) * kSpan;
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
  const u32 row = item.row + vector / item.heads, head = item.first_head + vector % item.heads;
  return a.out + (u64(row) * a.heads + head) * a.v_state.head_size;
}

constexpr u32 kWeightedParts = 64; // whose weights are in LDS at once

APU_DEVICE float *part_of(const AttentionArgs &a, const Item &item, u32 span) {
  return a.parts + u64(item.slot + (span - item.first_span) * item.slot_step) * a.slot_floats;
}

// The chunk's rows of the output: the parts of all spans, added up. `lds`: stride * (kWeightedParts + 2) floats. A wave
// takes the maxima and sums of its vectors, the part of span s in lane s % wave, so that their order depends on the
// spans' numbers alone.
template <u32 Threads> APU_DEVICE void combine_parts(const AttentionArgs &a, const Item &item, float *lds) {
  const u32 vectors = item.rows * item.heads, dv = a.v_state.head_size, stride = a.chunk_rows * a.chunk_heads;
  float *weights = lds, *maxima = lds + stride * kWeightedParts, *factors = maxima + stride;
  const u32 aligned = item.first_span / kWaveSize * kWaveSize;
  for (u32 v = wave_id(); v < vectors; v += Threads / kWaveSize) {
    float max = kMinusInfinity, sum = 0.0f;
    for (u32 s = aligned + lane_id(); s <= item.last_span; s += kWaveSize)
      if (s >= item.first_span) max = max_f32(max, part_of(a, item, s)[v]);
    max = wave_max(max);
    for (u32 s = aligned + lane_id(); s <= item.last_span; s += kWaveSize) {
      if (s < item.first_span) continue;
      const float *part = part_of(a, item, s);
      sum = fma_f32(exp_f32(part[v] - max), part[stride + v], sum);
    }
    sum = wave_sum(sum);
    if (lane_id() == 0) {
      maxima[v] = max;
      factors[v] = final_factor(a, item.first_head + v % item.heads, max, sum);
    }
  }
  for (u32 begin = item.first_span; begin <= item.last_span; begin += kWeightedParts) {
    const u32 rest = item.last_span + 1 - begin, count = rest < kWeightedParts ? rest : kWeightedParts;
    block_sync();
    for (u32 i = thread_id(); i < count * vectors; i += Threads) {
      const u32 s = i / vectors, v = i % vectors;
      weights[s * stride + v] = exp_f32(part_of(a, item, begin + s)[v] - maxima[v]);
    }
    block_sync();
    for (u32 i = thread_id(); i < vectors * dv; i += Threads) {
      const u32 v = i / dv;
      float *out = output_row(a, item, v) + i % dv;
      float sum = begin == item.first_span ? 0.0f : *out;
      const float *part = part_of(a, item, begin) + 2 * stride + i;
      const u64 step = u64(item.slot_step) * a.slot_floats;
#pragma unroll 8
      for (u32 s = 0; s < count; ++s) {
        const float weight = weights[s * stride + v], x = part[s * step];
        sum = weight != 0.0f ? fma_f32(weight, x, sum) : sum; // an empty part has no accumulator
      }
      *out = begin + count > item.last_span ? sum * factors[v] : sum;
    }
  }
}

// Hands on what a block made of a span: max, sum (vectors) and acc (vectors, dv) in LDS, complete for all threads.
// `flag` and `lds` (as combine_parts wants it) are in LDS; `lds` may lie on acc. Ends in a state where all of them may
// be reused.
template <u32 Threads>
APU_DEVICE void finish_span(const AttentionArgs &a, const Survey &survey, const Item &item, const float *max,
                            const float *sum, const float *acc, u32 *flag, float *lds) {
  const u32 vectors = item.rows * item.heads, dv = a.v_state.head_size, stride = a.chunk_rows * a.chunk_heads;
  if (item.first_span == item.last_span) {
    for (u32 i = thread_id(); i < vectors * dv; i += Threads) {
      const u32 v = i / dv;
      const float factor = final_factor(a, item.first_head + v % item.heads, max[v], sum[v]);
      output_row(a, item, v)[i % dv] = acc[i] * factor;
    }
    block_sync();
    return;
  }
  float *part = part_of(a, item, item.span);
  for (u32 i = thread_id(); i < vectors * dv; i += Threads)
    if (max[i / dv] != kMinusInfinity) part[2 * stride + i] = acc[i];
  for (u32 v = thread_id(); v < vectors; v += Threads) {
    part[v] = max[v];
    part[stride + v] = sum[v];
  }
  device_fence();
  block_sync();
  if (!survey.whole) {
    if (thread_id() == 0) *flag = atomic_add(a.counters + item.unit, 1);
    block_sync();
    if (*flag != item.last_span - item.first_span) return;
    device_fence();
    if (thread_id() == 0) a.counters[item.unit] = 0;
  } else if (item.span != item.last_span) {
    return;
  }
  combine_parts<Threads>(a, item, lds);
  block_sync();
}

} // namespace apu::gpu
