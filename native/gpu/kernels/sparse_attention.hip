// Attention over the last tokens and over compressed rows, chosen or all; a row is key and value of all heads. FMA in
// float32.
//
// The rows that a query attends to are counted through: its window, then the compressed ones. A block takes one query
// row, up to 8 of its heads and a span of that count, whose length follows from the count; parts are added up in order
// by the block that ends last. With more rows in the step, a block takes all of a row's spans. Batches of 128 rows by
// online softmax: where they lie is looked up once; scores by one thread for a row and half of the heads, 8 elements at
// a time; values by one thread for two neighbouring elements and all heads. Bytes: the rows, for each chunk of heads.
#include "kv.h"
#include "rotate.h"
#include "sparse_attention.h"

namespace apu::gpu {

constexpr float kNothing = -__builtin_inff();
constexpr u32 kHalfVectors = kSparseVectors / 2;
constexpr u32 kAnyType = ~0u; // known at run time, or rows at odd addresses

struct SparseItem {
  u32 t, head, heads; // row of the step, first head, how many
  u32 position;
  u32 low, near;             // first position of the window, rows of it
  u32 seen;                  // compressed rows that may be chosen
  u32 rows;                  // to attend to
  const u32 *window, *pages; // page tables
};

struct SparseLds {
  u32 *flag;
  u64 *address;  // (128)
  float *scores; // (128, 8); of the parts: weights (8, spans)
  float *q;      // (vectors, d) times the scale
  float *acc;    // (vectors, d)
  float *max, *sum, *shrink;
  float *cos, *sin;
};

// Of a row that attends to so many: it follows from these alone.
APU_DEVICE u32 sparse_span(u32 rows) {
  return (rows + kSparseSpans * kSparseSpan - 1) / (kSparseSpans * kSparseSpan) * kSparseSpan;
}

template <u32 Type> APU_DEVICE u32 type_of(const SparseAttentionArgs &a, bool near) {
  if constexpr (Type != kAnyType) return Type;
  return near ? a.window.dtype : a.rows.dtype;
}

template <u32 Type>
APU_DEVICE u64 row_address(const SparseAttentionArgs &a, const SparseItem &item, u32 i, bool *seen) {
  const u32 d = a.window.head_size;
  bool near = i < item.near;
  u32 r = item.low + i;
  if (!near) {
    r = i - item.near;
    if (a.ids) r = u32(a.ids[u64(item.t) * a.chosen + r]);
  }
  *seen = near || r < item.seen;
  if (!*seen) near = true, r = item.position; // it gets no weight
  const PagedState &state = near ? a.window : a.rows;
  const u32 page = near ? item.window[r / kPageRows] : item.pages[r / a.rows.page_rows];
  const u32 within = near ? r % kPageRows : r % a.rows.page_rows;
  return u64(page_part(state, page, 0)) + u64(within * d) * (type_of<Type>(a, near) == kF16 ? 2 : 4);
}

APU_DEVICE void two_halves(u32 word, float *v) {
  v[0] = half_to_float(word & 0xffffu);
  v[1] = half_to_float(word >> 16);
}

APU_DEVICE float load_one(u32 type, u64 row, u32 m) {
  if (type == kF16) return half_to_float(global_pointer<const u16>(row)[m]);
  return global_pointer<const float>(row)[m];
}

// Elements m to m + 7; zero from d on.
template <u32 Type> APU_DEVICE void load8(u32 type, u64 row, u32 m, u32 d, float *v) {
  if constexpr (Type == kF32) {
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const u32x4 x = load16(global_pointer<const float>(row) + m + 4 * h);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) v[4 * h + i] = bits_to_float(x[i]);
    }
  } else if constexpr (Type == kF16) {
    const u32x4 x = load16(global_pointer<const u16>(row) + m);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) two_halves(x[i], v + 2 * i);
  } else {
#pragma unroll
    for (u32 i = 0; i < 8; ++i) v[i] = m + i < d ? load_one(type, row, m + i) : 0.0f;
  }
}

// Elements m and m + 1, m even; zero from d on.
template <u32 Type> APU_DEVICE void load2(u32 type, u64 row, u32 m, u32 d, float *v) {
  if constexpr (Type == kF32) {
    const u32x2 x = *global_pointer<const u32x2>(row + u64(m) * 4);
    v[0] = bits_to_float(x[0]);
    v[1] = bits_to_float(x[1]);
  } else if constexpr (Type == kF16) {
    two_halves(*global_pointer<const u32>(row + u64(m) * 2), v);
  } else {
    v[0] = load_one(type, row, m);
    v[1] = m + 1 < d ? load_one(type, row, m + 1) : 0.0f;
  }
}

// s[i] = q[i] . row for the `count` vectors of a thread, and something for the others: one chain of FMA over the row.
template <u32 Type> APU_DEVICE void score_row(u32 type, const float *q, u32 count, u64 row, u32 d, float *s) {
#pragma unroll 1
  for (u32 m = 0; m < d; m += 8) {
    float c[8];
    load8<Type>(type, row, m, d, c);
#pragma unroll
    for (u32 i = 0; i < kHalfVectors; ++i) {
      const float *x = q + (i < count ? i * d : 0) + m;
      if constexpr (Type == kAnyType) {
        for (u32 e = 0; e < 8; ++e)
          if (m + e < d) s[i] = fma_f32(x[e], c[e], s[i]);
      } else {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
          const f32x4 four = *reinterpret_cast<const f32x4 *>(x + 4 * h);
#pragma unroll
          for (u32 e = 0; e < 4; ++e) s[i] = fma_f32(four[e], c[4 * h + e], s[i]);
        }
      }
    }
  }
}

// Rows [begin, end), at most kSparseBatch.
template <u32 Type>
APU_DEVICE void attend_rows(const SparseAttentionArgs &a, const SparseItem &item, const SparseLds &lds, u32 begin,
                            u32 end) {
  const u32 d = a.window.head_size, count = end - begin;
  const u32 r = thread_id() % kSparseBatch, first = thread_id() / kSparseBatch * kHalfVectors;
  bool seen = false;
  float s[kHalfVectors] = {};
  if (r < count) {
    const u64 address = row_address<Type>(a, item, begin + r, &seen);
    if (first == 0) lds.address[r] = address;
    if (first < item.heads)
      score_row<Type>(type_of<Type>(a, begin + r < item.near), lds.q + first * d, item.heads - first, address, d, s);
  }
  f32x4 out;
#pragma unroll
  for (u32 i = 0; i < kHalfVectors; ++i) out[i] = first + i >= item.heads ? 0.0f : seen ? s[i] : kNothing;
  *reinterpret_cast<f32x4 *>(lds.scores + r * kSparseVectors + first) = out;
  block_sync();
  for (u32 i = wave_id(); i < item.heads; i += kSparseThreads / kWaveSize) {
    float *scores = lds.scores + i, most = kNothing, sum = 0.0f;
    for (u32 j = lane_id(); j < kSparseBatch; j += kWaveSize) most = max_f32(most, scores[j * kSparseVectors]);
    const float old = lds.max[i], max = max_f32(old, wave_max(most));
    const float from = max == kNothing ? 0.0f : max; // nothing seen yet: all exponentials are 0
    for (u32 j = lane_id(); j < kSparseBatch; j += kWaveSize) {
      const float e = exp_f32(scores[j * kSparseVectors] - from);
      scores[j * kSparseVectors] = e;
      sum += e;
    }
    sum = wave_sum(sum);
    const float shrink = exp_f32(old - from);
    wave_sync(); // all lanes have read what lane 0 writes
    if (lane_id() == 0) {
      lds.max[i] = max;
      lds.sum[i] = fma_f32(lds.sum[i], shrink, sum);
      lds.shrink[i] = shrink;
    }
  }
  block_sync();
  for (u32 m = 2 * thread_id(); m < d; m += 2 * kSparseThreads) {
    float x[kSparseVectors][2] = {};
#pragma unroll
    for (u32 i = 0; i < kSparseVectors; ++i) {
      if (i >= item.heads) continue;
      x[i][0] = lds.acc[i * d + m] * lds.shrink[i];
      if (m + 1 < d) x[i][1] = lds.acc[i * d + m + 1] * lds.shrink[i];
    }
#pragma unroll 4
    for (u32 j = 0; j < count; ++j) {
      float c[2];
      load2<Type>(type_of<Type>(a, begin + j < item.near), lds.address[j], m, d, c);
#pragma unroll
      for (u32 h = 0; h < 2; ++h) {
        const f32x4 p = *reinterpret_cast<const f32x4 *>(lds.scores + j * kSparseVectors + h * kHalfVectors);
#pragma unroll
        for (u32 i = 0; i < kHalfVectors; ++i) {
          x[h * kHalfVectors + i][0] = fma_f32(p[i], c[0], x[h * kHalfVectors + i][0]);
          x[h * kHalfVectors + i][1] = fma_f32(p[i], c[1], x[h * kHalfVectors + i][1]);
        }
      }
    }
#pragma unroll
    for (u32 i = 0; i < kSparseVectors; ++i) {
      if (i >= item.heads) continue;
      lds.acc[i * d + m] = x[i][0];
      if (m + 1 < d) lds.acc[i * d + m + 1] = x[i][1];
    }
  }
  block_sync();
}

// The sums of `spans` parts, in order, in place of this block's own.
APU_DEVICE void add_parts(const SparseAttentionArgs &a, const SparseItem &item, const SparseLds &lds, const float *part,
                          u32 spans) {
  const u32 d = a.window.head_size, stride = a.chunk_heads;
  float *weights = lds.scores, *sums = weights + kSparseVectors * kSparseSpans; // (vectors, kSparseSpans)
  for (u32 i = thread_id(); i < item.heads * kSparseSpans; i += kSparseThreads) {
    const u32 v = i / kSparseSpans, s = i % kSparseSpans;
    const float *end = part + u64(s) * a.slot_floats + stride * d;
    weights[i] = s < spans ? end[v] : kNothing;
    sums[i] = s < spans ? end[stride + v] : 0.0f;
  }
  block_sync();
  if (thread_id() < item.heads) {
    const u32 v = thread_id();
    float *w = weights + v * kSparseSpans, most = kNothing, sum = 0.0f;
    for (u32 s = 0; s < spans; ++s) most = max_f32(most, w[s]);
    const float from = most == kNothing ? 0.0f : most;
    for (u32 s = 0; s < spans; ++s) {
      w[s] = exp_f32(w[s] - from);
      sum = fma_f32(w[s], sums[v * kSparseSpans + s], sum);
    }
    lds.max[v] = most;
    lds.sum[v] = sum;
  }
  block_sync();
  for (u32 i = thread_id(); i < item.heads * d; i += kSparseThreads) {
    const float *w = weights + i / d * kSparseSpans;
    float total = 0.0f;
#pragma unroll 4
    for (u32 s = 0; s < spans; ++s) total = fma_f32(w[s], part[u64(s) * a.slot_floats + i], total);
    lds.acc[i] = total;
  }
  block_sync();
}

// The heads of the row: divided by their sums, with the sinks; the last elements rotated back.
APU_DEVICE void write_heads(const SparseAttentionArgs &a, const SparseItem &item, const SparseLds &lds) {
  const u32 d = a.window.head_size, plain = d - 2 * a.pairs;
  turn_pairs<kSparseThreads>(a, item.position, lds.cos, lds.sin);
  if (thread_id() < item.heads) {
    const u32 v = thread_id();
    const float max = lds.max[v], sum = lds.sum[v];
    float factor = 1.0f / sum;
    if (a.sinks) { // a score without a value
      const float sink = a.sinks[item.head + v], most = max_f32(max, sink), shrink = exp_f32(max - most);
      factor = shrink / fma_f32(sum, shrink, exp_f32(sink - most));
    }
    lds.shrink[v] = factor;
  }
  block_sync();
  float *out = a.out + (u64(item.t) * a.heads + item.head) * d;
  for (u32 i = thread_id(); i < item.heads * d; i += kSparseThreads)
    if (i % d < plain) out[i] = lds.acc[i] * lds.shrink[i / d];
  for (u32 i = thread_id(); i < item.heads * a.pairs; i += kSparseThreads) {
    const u32 v = i / a.pairs, p = i % a.pairs, at = v * d + plain;
    const u32 first = at + (a.halves ? p : 2 * p), second = at + (a.halves ? p + a.pairs : 2 * p + 1);
    float x = lds.acc[first] * lds.shrink[v], y = lds.acc[second] * lds.shrink[v];
    rotate_pair(x, y, lds.cos[p], -lds.sin[p]);
    out[first] = x;
    out[second] = y;
  }
}

template <u32 Type> APU_DEVICE void sparse_attention(const SparseAttentionArgs &a) {
  const u32 d = a.window.head_size;
  SparseLds lds;
  lds.flag = reinterpret_cast<u32 *>(dynamic_shared());
  lds.address = reinterpret_cast<u64 *>(lds.flag + kSparseFront);
  lds.scores = reinterpret_cast<float *>(lds.address + kSparseBatch);
  lds.q = lds.scores + kSparseBatch * kSparseVectors;
  lds.acc = lds.q + a.chunk_heads * d;
  lds.max = lds.acc + a.chunk_heads * d;
  lds.sum = lds.max + a.chunk_heads;
  lds.shrink = lds.sum + a.chunk_heads;
  lds.cos = lds.shrink + a.chunk_heads;
  lds.sin = lds.cos + a.pairs;

  SparseItem item;
  item.t = a.spans ? block_id() / a.spans : block_id();
  if (item.t >= a.step.counts->rows) return;
  const Row row = a.step.rows[item.t];
  item.position = row.position;
  item.low = a.window.window && row.position >= a.window.window ? row.position - a.window.window + 1 : 0;
  item.near = row.position + 1 - item.low;
  item.seen = a.rows.page_rows ? (row.position + 1) / (kPageRows / a.rows.page_rows) : 0;
  item.rows = item.near + (a.ids && a.chosen < item.seen ? a.chosen : item.seen);
  u32 begin = 0, end = item.rows, spans = 1;
  const u32 index = a.spans ? block_id() - item.t * a.spans : 0;
  if (a.spans) {
    const u32 span = sparse_span(item.rows);
    spans = (item.rows + span - 1) / span;
    if (index >= spans) return;
    begin = index * span;
    end = begin + span < end ? begin + span : end;
  }
  item.window = page_table(a.step, row.sequence, a.window.group);
  item.pages = a.rows.page_rows ? page_table(a.step, row.sequence, a.rows.group) : item.window;
  item.head = block_id_y() * a.chunk_heads;
  item.heads = a.heads - item.head < a.chunk_heads ? a.heads - item.head : a.chunk_heads;

  const float *q = a.q + (u64(item.t) * a.heads + item.head) * d;
  for (u32 i = thread_id(); i < item.heads * d; i += kSparseThreads) {
    lds.q[i] = q[i] * a.scale;
    lds.acc[i] = 0.0f;
  }
  if (thread_id() < item.heads) {
    lds.max[thread_id()] = kNothing;
    lds.sum[thread_id()] = 0.0f;
  }
  block_sync();
  for (u32 i = begin; i < end; i += kSparseBatch)
    attend_rows<Type>(a, item, lds, i, i + kSparseBatch < end ? i + kSparseBatch : end);

  if (spans > 1) {
    const u32 chunks = (a.heads + a.chunk_heads - 1) / a.chunk_heads, unit = item.t * chunks + block_id_y();
    float *first = a.parts + u64(unit) * a.spans * a.slot_floats, *part = first + u64(index) * a.slot_floats;
    for (u32 i = thread_id(); i < item.heads * d; i += kSparseThreads) part[i] = lds.acc[i];
    if (thread_id() < item.heads) {
      part[a.chunk_heads * d + thread_id()] = lds.max[thread_id()];
      part[a.chunk_heads * (d + 1) + thread_id()] = lds.sum[thread_id()];
    }
    device_fence();
    block_sync();
    if (thread_id() == 0) *lds.flag = atomic_add(a.counters + unit, 1);
    block_sync();
    if (*lds.flag != spans - 1) return;
    device_fence();
    if (thread_id() == 0) a.counters[unit] = 0;
    add_parts(a, item, lds, first, spans);
  }
  write_heads(a, item, lds);
}

// Rows and pages 16-byte aligned, rows of multiples of 8 elements.
APU_KERNEL(kSparseThreads) void sparse_attention_f32(SparseAttentionArgs a) {
  sparse_attention<kF32>(a);
}
APU_KERNEL(kSparseThreads) void sparse_attention_f16(SparseAttentionArgs a) {
  sparse_attention<kF16>(a);
}
APU_KERNEL(kSparseThreads) void sparse_attention_any(SparseAttentionArgs a) {
  sparse_attention<kAnyType>(a);
}

} // namespace apu::gpu
