// SHARED_STORE and COMPRESS: rows that all heads read as key and value, of one token and of several.
//
// shared_store: a wave for each head of q, normed and rotated in place, and a block for the row that goes to its page.
// compress: a block for each row of the step. It stores what the row is made of; where the row ends its tokens it pools
// them, those of this step from the step's own rows and earlier ones from their pages: the same numbers, so that blocks
// do not wait for each other and a prefill makes what single steps make, bit for bit. Moves 16 C d bytes a row, and for
// each compressed one 8 d bytes of each of its C * tokens tokens. With few rows all that counts is latency: what is
// known early is loaded early, and several loads are under way at a time.
#include "compress.h"
#include "kv.h"
#include "rotate.h"
#include "rounding.h"

namespace apu::gpu {

// By the block: x (d) in LDS, of which each thread has written its own elements and added up their squares, is normed,
// rotated, rounded and stored as row r of the part. The block has passed a barrier since cos and sin were written.
template <u32 Threads, class Args>
APU_DEVICE void finish_row(const Args &a, const PagedState &state, u8 *part, u32 r, float *x, float square,
                           float shrink, const float *cos, const float *sin) {
  constexpr u32 waves = Threads / kWaveSize;
  APU_SHARED float parts[waves];
  const u32 d = state.head_size, end = d - 2 * a.pairs;
  const float inverse = 1.0f / sqrt_f32(block_sum(square, parts, waves) / float(d) + a.eps);
  for (u32 i = thread_id(); i < d; i += Threads) x[i] = x[i] * inverse * a.norm[i];
  block_sync();
  if (wave_id() == waves - 1) {
    rotate_wave(x + end, cos, sin, a.pairs, a.halves);
    wave_sync();
    if (a.round == APU_ROUND_FP4) round_fp4(x, d, shrink);
  }
  if (a.round == APU_ROUND_E4M3) {
    for (u32 begin = wave_id() * quant::kE4M3Group; begin < end; begin += waves * quant::kE4M3Group) {
      const u32 stop = begin + quant::kE4M3Group;
      round_groups<quant::kE4M3Group, false, 1>(x, begin, stop < end ? stop : end);
    }
  }
  block_sync();
  for (u32 i = thread_id(); i < d; i += Threads) store_key_element(state, part, r, i, x[i]);
}

APU_KERNEL(kRopeThreads) void shared_store(RowStoreArgs a) {
  constexpr u32 waves = kRopeThreads / kWaveSize, items = 16;
  const u32 t = block_id(), lane = lane_id(), wave = wave_uniform(wave_id()), h = block_id_y() * waves + wave;
  const u32 d = a.state.head_size;
  const bool stores = block_id_y() == (a.heads + waves - 1) / waves;
  float *cos = reinterpret_cast<float *>(dynamic_shared()), *sin = cos + a.pairs, *x = sin + a.pairs;
  const Row row = a.step.rows[t]; // rows behind the step's hold something, too
  float square = 0.0f;
  if (stores) {
    for (u32 m = thread_id(); m < d; m += kRopeThreads) {
      x[m] = a.c[u64(t) * d + m];
      square = fma_f32(x[m], x[m], square);
    }
    if (t >= a.step.counts->rows) return;
    const u32 page = page_table(a.step, row.sequence, a.state.group)[row.position / kPageRows];
    turn_pairs<kRopeThreads>(a, row.position, cos, sin);
    finish_row<kRopeThreads>(a, a.state, page_part(a.state, page, 0), row.position % kPageRows, x, square, 0.0f, cos,
                             sin);
    return;
  }
  x += wave * d;
  float *q = a.q + (u64(t) * a.heads + h) * d;
  if (h < a.heads) {
    for (u32 begin = lane; begin < d; begin += items * kWaveSize) {
      float v[items];
#pragma unroll
      for (u32 i = 0; i < items; ++i) v[i] = begin + i * kWaveSize < d ? q[begin + i * kWaveSize] : 0.0f;
#pragma unroll
      for (u32 i = 0; i < items; ++i) {
        if (begin + i * kWaveSize < d) x[begin + i * kWaveSize] = v[i];
        square = fma_f32(v[i], v[i], square);
      }
    }
  }
  if (t >= a.step.counts->rows) return;
  turn_pairs<kRopeThreads>(a, row.position, cos, sin);
  block_sync();
  if (h >= a.heads) return;
  const float inverse = 1.0f / sqrt_f32(wave_sum(square) / float(d) + a.eps);
  const u32 end = d - 2 * a.pairs;
  for (u32 i = lane; i < a.pairs; i += kWaveSize) {
    const u32 first = end + (a.halves ? i : 2 * i), second = end + (a.halves ? i + a.pairs : 2 * i + 1);
    float u = x[first] * inverse, v = x[second] * inverse;
    rotate_pair(u, v, cos[i], sin[i]);
    q[first] = u;
    q[second] = v;
  }
#pragma unroll 4
  for (u32 m = lane; m < end; m += kWaveSize) q[m] = x[m] * inverse;
}

// Where the tokens of one sequence are.
struct Tokens {
  const CompressArgs &a;
  const float *last, *before; // open rows of the last token's page, and of the first token's
  u32 last_page;              // which page of the sequence that is
  u32 step_begin;             // position of the sequence's first row in the step
  u64 step_row;               // which row that is

  // Element c of a token's value and gate.
  APU_METHOD void load(u32 position, u32 c, float *value, float *gate) const {
    const bool own = position >= step_begin;
    const u64 row = (step_row + position - step_begin) * a.width + c;
    const float *page = (position / kPageRows == last_page ? last : before) + position % kPageRows * 2 * a.width + c;
    const float bias = own ? a.bias[(position & (a.tokens - 1)) * a.width + c] : 0.0f;
    *value = *(own ? a.in + row : page);
    *gate = *(own ? a.gate + row : page + a.width) + bias;
  }
};

// Element i of d: softmax of the gates over the tokens from `begin` to `position`; of those before `first` the first d
// elements count.
APU_DEVICE float pool(const Tokens &from, u32 begin, u32 first, u32 position, u32 i, u32 d) {
  constexpr u32 batch = 8; // tokens under way at a time
  const u32 own = from.a.width - d + i;
  float most = -__builtin_inff(), sum = 0.0f, out = 0.0f;
  for (; begin <= position; begin += batch) {
    float v[batch], g[batch], top = most;
#pragma unroll
    for (u32 j = 0; j < batch; ++j) {
      const u32 p = begin + j <= position ? begin + j : position;
      from.load(p, p < first ? i : own, v + j, g + j);
    }
#pragma unroll
    for (u32 j = 0; j < batch; ++j) top = max_f32(top, g[j]);
    const float base = top == -__builtin_inff() ? 0.0f : top, shrink = exp_f32(most - base);
    most = top;
    sum *= shrink;
    out *= shrink;
#pragma unroll
    for (u32 j = 0; j < batch; ++j) {
      const float e = exp_f32(g[j] - base);
      if (begin + j > position) continue;
      sum += e;
      out = fma_f32(e, v[j], out);
    }
  }
  return out / sum;
}

// Grid (rows).
APU_KERNEL(kCompressThreads) void compress(CompressArgs a) {
  const u32 t = block_id();
  const Row row = a.step.rows[t]; // rows behind the step's hold something, too
  if (t >= a.step.counts->rows) return;
  const u32 step_row = a.step.sequences[row.sequence].row_begin, page_index = row.position / kPageRows;
  const u32 *table = page_table(a.step, row.sequence, a.open.group);
  const u32 *row_table = page_table(a.step, row.sequence, a.rows.group);
  const bool ends = (row.position + 1) % a.tokens == 0;
  const u32 d = a.rows.head_size, width = a.width, first = row.position + 1 - a.tokens;
  const u32 begin = width > d && first > 0 ? first - a.tokens : first;
  const u32 page = table[page_index], before = ends ? table[begin / kPageRows] : page;
  const u32 row_page = row_table[page_index];
  float *held = reinterpret_cast<float *>(page_part(a.open, page, 0)) + row.position % kPageRows * 2 * width;
  for (u32 i = thread_id(); i < width; i += kCompressThreads) {
    const float value = a.in[u64(t) * width + i], gate = a.gate[u64(t) * width + i];
    held[i] = value;
    held[width + i] = gate + a.bias[(row.position & (a.tokens - 1)) * width + i];
  }
  if (!ends) return;

  float *cos = reinterpret_cast<float *>(dynamic_shared()), *sin = cos + a.pairs, *x = sin + a.pairs;
  const Tokens from = {a,
                       reinterpret_cast<const float *>(page_part(a.open, page, 0)),
                       reinterpret_cast<const float *>(page_part(a.open, before, 0)),
                       page_index,
                       row.position - (t - step_row),
                       step_row};
  turn_pairs<kCompressThreads>(a, first, cos, sin);
  float square = 0.0f;
  for (u32 i = thread_id(); i < d; i += kCompressThreads) {
    x[i] = pool(from, begin, first, row.position, i, d);
    square = fma_f32(x[i], x[i], square);
  }
  finish_row<kCompressThreads>(a, a.rows, page_part(a.rows, row_page, 0), row.position / a.tokens % a.rows.page_rows, x,
                               square, a.shrink, cos, sin);
}

} // namespace apu::gpu
