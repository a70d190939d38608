// SHARED_STORE and COMPRESS: rows that all heads read as key and value, of one token and of several.
//
// shared_store: a wave for each head of q, normed and rotated in place, and one for the row that goes to its page.
// compress: a block for each row of the step. It stores what the row is made of; where the row ends its tokens it pools
// them, those of this step from the step's own rows and earlier ones from their pages: the same numbers, so that blocks
// do not wait for each other and a prefill makes what single steps make, bit for bit. Moves 16 C d bytes a row, and for
// each compressed one 8 d bytes of each of its C * tokens tokens.
#include "compress.h"
#include "kv.h"
#include "matrix.h"
#include "rotate.h"
#include "rounding.h"

namespace apu::gpu {

APU_KERNEL(kRopeThreads) void shared_store(RowStoreArgs a) {
  constexpr u32 waves = kRopeThreads / kWaveSize;
  const u32 t = block_id(), lane = lane_id(), wave = wave_uniform(wave_id()), h = block_id_y() * waves + wave;
  const u32 d = a.state.head_size;
  const bool stores = h == a.heads;
  float *cos = reinterpret_cast<float *>(dynamic_shared()), *sin = cos + a.pairs, *x = sin + a.pairs + wave * d;
  float *q = a.q + (u64(t) * a.heads + h) * d;
  const float *from = stores ? a.c + u64(t) * d : q;
  float square = 0.0f;
  if (h <= a.heads) { // on its way while the step is read; rows behind the step's hold something, too
    for (u32 m = lane; m < d; m += kWaveSize) {
      const float v = from[m];
      x[m] = v;
      square = fma_f32(v, v, square);
    }
  }
  if (t >= a.step.counts->rows) return;
  const Row row = a.step.rows[t];
  turn_pairs<kRopeThreads>(a, row.position, cos, sin);
  block_sync();
  if (h > a.heads) return;
  const float inverse = 1.0f / sqrt_f32(wave_sum(square) / float(d) + a.eps);
  for (u32 m = lane; m < d; m += kWaveSize) {
    const float v = x[m] * inverse;
    x[m] = stores ? v * a.norm[m] : v;
  }
  wave_sync();
  rotate_wave(x + d - 2 * a.pairs, cos, sin, a.pairs, a.halves);
  wave_sync();
  if (!stores) {
    for (u32 m = lane; m < d; m += kWaveSize) q[m] = x[m];
    return;
  }
  round_row(a.round, x, d, 2 * a.pairs, 0.0f);
  const u32 page = page_table(a.step, row.sequence, a.state.group)[row.position / kPageRows];
  store_position<false>(a.state, page_part(a.state, page, 0), row.position % kPageRows, x);
}

// Of the tokens of one sequence: their values and gates, wherever they are.
struct Tokens {
  const CompressArgs &a;
  const u32 *table; // pages of the open rows
  u32 step_begin;   // position of the sequence's first row in the step
  u32 step_row;     // which row that is
  u32 width;        // C*d
  u32 tokens;

  APU_METHOD const float *held(u32 position) const {
    const u8 *part = page_part(a.open, table[position / kPageRows], 0);
    return reinterpret_cast<const float *>(part) + u64(position % kPageRows) * 2 * width;
  }
  APU_METHOD float bias(u32 position, u32 i) const {
    const u8 *row = matrix_row(a.bias, position % tokens);
    const auto half = [row](u32 at) { return row[2 * at] | u32(row[2 * at + 1]) << 8; };
    if (a.bias.type == APU_F16) return half_to_float(half(i));
    return bits_to_float(half(2 * i) | half(2 * i + 1) << 16);
  }
  // In the step: row t of it.
  APU_METHOD float step_gate(u32 t, u32 position, u32 i) const {
    return a.gate[u64(t) * width + i] + bias(position, i);
  }
  APU_METHOD float gate(u32 position, u32 i) const {
    if (position < step_begin) return held(position)[width + i];
    return step_gate(step_row + position - step_begin, position, i);
  }
  APU_METHOD float value(u32 position, u32 i) const {
    if (position < step_begin) return held(position)[i];
    return a.in[u64(step_row + position - step_begin) * width + i];
  }
};

// Softmax of each element's gates over the tokens that end with `position`; of those before `first` the first d
// elements count.
APU_DEVICE float pool(const Tokens &from, u32 begin, u32 first, u32 position, u32 i, u32 d) {
  constexpr u32 batch = 8; // loads under way
  const u32 own = from.width - d + i;
  float most = -__builtin_inff(), sum = 0.0f, out = 0.0f;
  for (u32 p0 = begin; p0 <= position; p0 += batch) {
    float g[batch];
#pragma unroll
    for (u32 j = 0; j < batch; ++j) {
      const u32 p = p0 + j <= position ? p0 + j : position;
      g[j] = from.gate(p, p < first ? i : own);
    }
#pragma unroll
    for (u32 j = 0; j < batch; ++j) most = max_f32(most, g[j]);
  }
  for (u32 p0 = begin; p0 <= position; p0 += batch) {
    float g[batch], v[batch];
#pragma unroll
    for (u32 j = 0; j < batch; ++j) {
      const u32 p = p0 + j <= position ? p0 + j : position;
      g[j] = from.gate(p, p < first ? i : own);
      v[j] = from.value(p, p < first ? i : own);
    }
#pragma unroll
    for (u32 j = 0; j < batch; ++j) {
      if (p0 + j > position) continue;
      const float e = exp_f32(g[j] - most);
      sum += e;
      out = fma_f32(e, v[j], out);
    }
  }
  return out / sum;
}

// Grid (rows).
APU_KERNEL(kCompressThreads) void compress(CompressArgs a) {
  constexpr u32 waves = kCompressThreads / kWaveSize;
  APU_SHARED float parts[waves];
  const u32 t = block_id();
  if (t >= a.step.counts->rows) return;
  const Row row = a.step.rows[t];
  const Sequence sequence = a.step.sequences[row.sequence];
  const u32 d = a.rows.head_size, width = a.bias.k, tokens = a.bias.rows;
  const Tokens from = {a,
                       page_table(a.step, row.sequence, a.open.group),
                       row.position - (t - sequence.row_begin),
                       sequence.row_begin,
                       width,
                       tokens};
  float *held = const_cast<float *>(from.held(row.position));
  for (u32 i = thread_id(); i < width; i += kCompressThreads) {
    held[i] = a.in[u64(t) * width + i];
    held[width + i] = from.step_gate(t, row.position, i);
  }
  if ((row.position + 1) % tokens != 0) return;

  float *cos = reinterpret_cast<float *>(dynamic_shared()), *sin = cos + a.pairs, *x = sin + a.pairs;
  const u32 first = row.position + 1 - tokens, begin = width > d && first > 0 ? first - tokens : first;
  turn_pairs<kCompressThreads>(a, first, cos, sin);
  float square = 0.0f;
  for (u32 i = thread_id(); i < d; i += kCompressThreads) {
    const float v = pool(from, begin, first, row.position, i, d);
    x[i] = v;
    square = fma_f32(v, v, square);
  }
  const float inverse = 1.0f / sqrt_f32(block_sum(square, parts, waves) / float(d) + a.eps);
  for (u32 i = thread_id(); i < d; i += kCompressThreads) x[i] = x[i] * inverse * a.norm[i];
  block_sync();
  if (wave_id() != 0) return;
  rotate_wave(x + d - 2 * a.pairs, cos, sin, a.pairs, a.halves);
  round_row(a.round, x, d, 2 * a.pairs, a.shrink);
  const u32 page = page_table(a.step, row.sequence, a.rows.group)[row.position / kPageRows];
  store_position<false>(a.rows, page_part(a.rows, page, 0), row.position / tokens % a.rows.page_rows, x);
}

} // namespace apu::gpu
