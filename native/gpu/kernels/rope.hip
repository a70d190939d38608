// rope_store: per-head norms and rotary embedding of q and k, and k and v into their pages.
//
// A block takes one row and one head of q, k or v for each of its waves; grid (rows, heads in groups of waves). The
// angles of the row are computed by every block: position times frequency in double, reduced to a quarter turn in
// double, then polynomials in float; that is cheaper than a table between kernels. Moves q twice, k and v once, and
// what the pages take.
//
// latent_store: the last elements of q's heads rotated in place, a wave for each, and the latent row, by one wave more.
#include "kv.h"
#include "rotate.h"

namespace apu::gpu {

// The head in LDS, normed and rotated, to `out`, which may be the same; by one wave. `square`: the sum of its squares.
APU_DEVICE void finish_head(const RopeStoreArgs &a, const float *x, float square, const float *norm, const float *cos,
                            const float *sin, float *out) {
  const u32 d = a.k_state.head_size, lane = lane_id();
  const float inverse = norm ? 1.0f / sqrt_f32(square / float(d) + a.eps) : 1.0f;
  for (u32 i = lane; i < a.pairs; i += kWaveSize) {
    const u32 first = a.halves ? i : 2 * i, second = a.halves ? i + a.pairs : 2 * i + 1;
    float u = x[first], v = x[second];
    if (norm) {
      u = u * inverse * norm[first];
      v = v * inverse * norm[second];
    }
    rotate_pair(u, v, cos[i], sin[i]);
    out[first] = u;
    out[second] = v;
  }
  for (u32 m = 2 * a.pairs + lane; m < d; m += kWaveSize) out[m] = norm ? x[m] * inverse * norm[m] : x[m];
}

APU_KERNEL(kRopeThreads) void rope_store(RopeStoreArgs a) {
  constexpr u32 waves = kRopeThreads / kWaveSize;
  const u32 t = block_id(), wave = wave_uniform(wave_id()), h = block_id_y() * waves + wave;
  const u32 d = a.k_state.head_size, dv = a.v_state.head_size, kv_heads = a.k_state.heads;
  const bool is_q = h < a.heads, is_k = !is_q && h < a.heads + kv_heads;
  const bool is_v = !is_q && !is_k && h < a.heads + 2 * kv_heads;
  const u32 kv = is_k ? h - a.heads : is_v ? h - a.heads - kv_heads : 0, size = is_v ? dv : d;
  float *cos = reinterpret_cast<float *>(dynamic_shared()), *sin = cos + a.pairs;
  float *head = sin + a.pairs + wave * (d > dv ? d : dv); // of this wave
  // The head is on its way while the step is read and the angles are made; rows behind the step's hold something, too.
  float *q = a.q + (u64(t) * a.heads + h) * d;
  const float *from = is_q ? q : is_k ? a.k + (u64(t) * kv_heads + kv) * d : a.v + (u64(t) * kv_heads + kv) * dv;
  float square = 0.0f;
  if (is_q || is_k || is_v) {
    for (u32 m = lane_id(); m < size; m += kWaveSize) {
      const float x = from[m];
      head[m] = x;
      square = fma_f32(x, x, square);
    }
  }
  if (t >= a.step.counts->rows) return;
  const Row row = a.step.rows[t];
  turn_pairs<kRopeThreads>(a, row.position, cos, sin);
  block_sync();
  if (is_q) {
    finish_head(a, head, a.q_norm ? wave_sum(square) : 0.0f, a.q_norm, cos, sin, q);
  } else if (is_k || is_v) {
    const u32 page = page_table(a.step, row.sequence, a.k_state.group)[row.position / kPageRows];
    if (is_k) {
      finish_head(a, head, a.k_norm ? wave_sum(square) : 0.0f, a.k_norm, cos, sin, head);
      wave_sync();
      store_position<false>(a.k_state, page_part(a.k_state, page, kv), row.position % kPageRows, head);
    } else {
      store_position<true>(a.v_state, page_part(a.v_state, page, kv), row.position % kPageRows, head);
    }
  }
}

APU_KERNEL(kRopeThreads) void latent_store(RowStoreArgs a) {
  constexpr u32 waves = kRopeThreads / kWaveSize;
  const u32 t = block_id(), lane = lane_id(), h = block_id_y() * waves + wave_uniform(wave_id());
  const u32 d = a.state.head_size, rank = d - 2 * a.pairs;
  const bool stores = h == a.heads;
  float *cos = reinterpret_cast<float *>(dynamic_shared()), *sin = cos + a.pairs, *latent = sin + a.pairs;
  float square = 0.0f;
  if (stores) {
    for (u32 m = lane; m < d; m += kWaveSize) {
      const float x = a.c[u64(t) * d + m];
      latent[m] = x;
      if (m < rank) square = fma_f32(x, x, square);
    }
  }
  if (t >= a.step.counts->rows) return;
  const Row row = a.step.rows[t];
  turn_pairs<kRopeThreads>(a, row.position, cos, sin);
  block_sync();
  if (h > a.heads) return;
  float *x = stores ? latent + rank : a.q + (u64(t) * a.heads + h + 1) * a.q_size - 2 * a.pairs;
  rotate_wave(x, cos, sin, a.pairs, a.halves);
  if (!stores) return;
  const float inverse = 1.0f / sqrt_f32(wave_sum(square) / float(rank) + a.eps);
  for (u32 m = lane; m < rank; m += kWaveSize) latent[m] = latent[m] * inverse * a.norm[m];
  wave_sync();
  const u32 page = page_table(a.step, row.sequence, a.state.group)[row.position / kPageRows];
  store_position<false>(a.state, page_part(a.state, page, 0), row.position % kPageRows, latent);
}

} // namespace apu::gpu
