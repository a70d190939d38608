// What the attention over a window and compressed rows does around its products: what a row attends to and where that
// lies, parts and results.
//
// The rows that a query attends to are counted through: its window, then the compressed ones. With few rows in the step
// this count is cut into spans, whose length follows from the count alone, and each gives a part (maximum, sum,
// accumulator of each head); sparse_attention_sum adds them up in order. So a row's bits do not depend on its company.
#pragma once

#include "kv.h"
#include "rotate.h"
#include "sparse_attention.h"

namespace apu::gpu {

constexpr float kNothing = -__builtin_inff();

struct SparseItem {
  u32 d; // elements of a row; a constant in some kernels
  u32 t; // row of the step
  u32 position;
  u32 low, near;        // first position of the window, rows of it
  u32 seen;             // compressed rows that may be chosen
  u32 rows;             // to attend to
  u32 spans;            // of them
  u32 begin, end, span; // the block's share, which of the spans it is
  u32 head, heads;      // first head of the block, how many
  u32 window, pages;    // first entries of the page tables
};

// What row `t` attends to; false where there is no such row.
APU_DEVICE bool find_sparse_row(const SparseAttentionArgs &a, u32 t, u32 d, SparseItem &item) {
  const Row row = a.step.rows[t]; // what is behind the last is read, too: nobody waits for the counts
  if (t >= a.step.counts->rows) return false;
  const u32 window = a.window.window;
  item.d = d;
  item.t = t;
  item.position = row.position;
  item.low = window && row.position >= window ? row.position - window + 1 : 0;
  item.near = row.position + 1 - item.low;
  item.seen = a.rows.page_rows ? (row.position + 1) / (kPageRows / a.rows.page_rows) : 0;
  item.rows = item.near + (a.ids && a.chosen < item.seen ? a.chosen : item.seen);
  const Slot *slots = a.step.slots + u64(row.sequence) * a.step.groups;
  item.window = slots[a.window.group].page_begin;
  item.pages = slots[a.rows.group].page_begin;
  return true;
}

APU_DEVICE u32 sparse_span(u32 rows) {
  return (rows + kSparseSpans * kSparseSpan - 1) / (kSparseSpans * kSparseSpan) * kSparseSpan;
}

// The block's item; false where there is none.
APU_DEVICE bool find_sparse_item(const SparseAttentionArgs &a, u32 d, SparseItem &item) {
  const u32 t = a.spans ? block_id() / a.spans : block_id();
  if (!find_sparse_row(a, t, d, item)) return false;
  item.head = block_id_y() * a.chunk_heads;
  item.heads = a.heads - item.head < a.chunk_heads ? a.heads - item.head : a.chunk_heads;
  item.begin = 0, item.end = item.rows, item.span = 0, item.spans = 1;
  if (!a.spans) return true;
  const u32 span = sparse_span(item.rows);
  item.spans = (item.rows + span - 1) / span;
  item.span = block_id() - t * a.spans;
  item.begin = item.span * span;
  if (item.begin + span < item.end) item.end = item.begin + span;
  return item.span < item.spans;
}

// Where the i-th row lies, of so many bytes an element. One that may not be seen (what a slice finds that runs before
// its INDEX) is answered with the newest of the window.
APU_DEVICE u64 sparse_address(const SparseAttentionArgs &a, const SparseItem &item, u32 i, u32 near_bytes,
                              u32 far_bytes, bool *seen) {
  bool near = i < item.near;
  u32 r = near ? item.low + i : i - item.near;
  if (!near && a.ids) r = u32(a.ids[u64(item.t) * a.chosen + r]);
  *seen = near || r < item.seen;
  if (!*seen) near = true, r = item.position;
  const u32 d = item.d;
  if (near)
    return u64(page_part(a.window, a.step.pages[item.window + r / kPageRows], 0)) + u64(r % kPageRows * d) * near_bytes;
  const u32 each = a.rows.page_rows;
  return u64(page_part(a.rows, a.step.pages[item.pages + r / each], 0)) + u64(r % each * d) * far_bytes;
}

// What maxima and sums come to: the factor of the accumulator.
APU_DEVICE float sparse_factor(const SparseAttentionArgs &a, u32 head, float max, float sum) {
  if (!a.sinks) return 1.0f / sum;
  const float sink = a.sinks[head], most = max_f32(max, sink); // a score without a value
  const float shrink = exp_f32(max - most);
  return shrink / fma_f32(sum, shrink, exp_f32(sink - most));
}

// By a block: to[v * to_stride + m] = from[v * from_stride + m], times factors[v] where it is Scaled; from LDS, m below
// `width`.
template <u32 Threads, bool Scaled>
APU_DEVICE void copy_heads(float *to, u32 to_stride, const float *from, u32 from_stride, u32 heads, u32 width,
                           const float *factors) {
  if ((to_stride | from_stride | width) % 4 == 0) {
    const u32 each = width / 4;
    for (u32 i = thread_id(); i < heads * each; i += Threads) {
      const u32 v = i / each, m = (i - v * each) * 4;
      f32x4 x = *reinterpret_cast<const f32x4 *>(from + v * from_stride + m);
      u32x4 words;
#pragma unroll
      for (u32 e = 0; e < 4; ++e) words[e] = float_to_bits(Scaled ? x[e] * factors[v] : x[e]);
      store16(to + v * to_stride + m, words);
    }
    return;
  }
  for (u32 i = thread_id(); i < heads * width; i += Threads) {
    const u32 v = i / width, m = i - v * width;
    const float x = from[v * from_stride + m];
    to[v * to_stride + m] = Scaled ? x * factors[v] : x;
  }
}

// `heads` heads of the row from `head` on, whose accumulators are `stride` apart in LDS, times their factors; the last
// elements rotated back. By a block.
template <u32 Threads>
APU_DEVICE void write_heads(const SparseAttentionArgs &a, const SparseItem &item, u32 head, u32 heads, const float *acc,
                            u32 stride, const float *factors, const float *cos, const float *sin) {
  const u32 d = item.d, plain = d - 2 * a.pairs;
  float *out = a.out + (u64(item.t) * a.heads + head) * d;
  copy_heads<Threads, true>(out, d, acc, stride, heads, plain, factors);
  for (u32 i = thread_id(); i < heads * a.pairs; i += Threads) {
    const u32 v = i / a.pairs, p = i - v * a.pairs;
    const u32 first = plain + (a.halves ? p : 2 * p), second = plain + (a.halves ? p + a.pairs : 2 * p + 1);
    float x = acc[v * stride + first] * factors[v], y = acc[v * stride + second] * factors[v];
    rotate_pair(x, y, cos[p], -sin[p]);
    out[v * d + first] = x;
    out[v * d + second] = y;
  }
}

template <u32 Threads>
APU_DEVICE void write_parts(const SparseAttentionArgs &a, const SparseItem &item, u32 head, u32 heads, const float *acc,
                            u32 stride, const float *max, const float *sum) {
  const u32 d = item.d;
  const u64 first = (u64(item.t) * a.heads + head) * a.spans + item.span;
  copy_heads<Threads, false>(a.parts + first * d, a.spans * d, acc, stride, heads, d, nullptr);
  for (u32 v = thread_id(); v < heads; v += Threads) {
    float *end = a.part_ends + (first + u64(v) * a.spans) * 2;
    end[0] = max[v];
    end[1] = sum[v];
  }
}

} // namespace apu::gpu
