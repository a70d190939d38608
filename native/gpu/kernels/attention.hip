// Attention on FMA for every type of cache and head size: float32 caches, and heads that matrix tiles do not cover.
//
// A block takes one span of a chunk's queries (8 vectors at most), pages of 128 positions in order by online softmax in
// float32: scores by one thread for a position and half of the vectors, softmax by one wave for a vector, values by one
// thread for an element and two vectors. An item reads its K and V once from memory, then from the caches.
#include "attention_items.h"

namespace apu::gpu {

constexpr u32 kVectors = 8;           // of a chunk, at most
constexpr u32 kScored = kVectors / 2; // by a thread
constexpr u32 kScoreStride = kPageRows;

// s[i] = q[i] . key for vectors i of a thread: one chain of FMA over the head.
template <bool Float>
APU_DEVICE void score_key(const float *q, u32 vectors, u32 type, const u8 *part, u32 r, u32 d, float *s) {
#pragma unroll
  for (u32 i = 0; i < kScored; ++i) s[i] = 0.0f;
  u32 m = 0;
  if (Float && d % 4 == 0) {
    const float *key = reinterpret_cast<const float *>(part) + r * d;
    for (; m < d; m += 4) {
      const u32x4 k = load16(key + m);
#pragma unroll
      for (u32 i = 0; i < kScored; ++i) {
        if (i >= vectors) continue;
        const float *x = q + i * d + m;
        s[i] = fma_f32(x[0], bits_to_float(k[0]), s[i]);
        s[i] = fma_f32(x[1], bits_to_float(k[1]), s[i]);
        s[i] = fma_f32(x[2], bits_to_float(k[2]), s[i]);
        s[i] = fma_f32(x[3], bits_to_float(k[3]), s[i]);
      }
    }
  }
  for (; m < d; ++m) {
    const float k = load_element<false>(type, part, r, m, d);
#pragma unroll
    for (u32 i = 0; i < kScored; ++i)
      if (i < vectors) s[i] = fma_f32(q[i * d + m], k, s[i]);
  }
}

struct FmaLds {
  float *q;      // (vectors, d) times the scale
  float *scores; // (vectors, 128)
  float *acc;    // (vectors, dv)
  float *max, *sum, *shrink;
  u32 *flag;
};

template <bool Float>
APU_DEVICE void attend_page(const AttentionArgs &a, const Item &item, const FmaLds &lds, u32 base, u32 begin, u32 end) {
  const u32 vectors = item.rows * item.heads, d = a.k_state.head_size, dv = a.v_state.head_size;
  const u32 page = wave_uniform(a.step.pages[item.pages + base / kPageRows]);
  const u8 *k = page_part(a.k_state, page, item.head), *v = page_part(a.v_state, page, item.head);

  const u32 r = thread_id() % kPageRows, first = thread_id() / kPageRows * kScored;
  if (first < vectors) {
    float s[kScored];
    const bool inside = base + r >= begin && base + r < end;
    if (inside) score_key<Float>(lds.q + first * d, vectors - first, Float ? kF32 : a.k_state.dtype, k, r, d, s);
#pragma unroll
    for (u32 i = 0; i < kScored; ++i) {
      const u32 vector = first + i;
      if (vector >= vectors) continue;
      const u32 position = item.position + row_of(a, vector);
      const bool seen = inside && base + r <= position && base + r >= lowest_position(a, position);
      const float score = seen && a.cap != 0.0f ? soft_cap(s[i], a.cap) : s[i];
      lds.scores[vector * kScoreStride + r] = seen ? score : kMinusInfinity;
    }
  }
  block_sync();
  for (u32 i = wave_id(); i < vectors; i += kFmaThreads / kWaveSize) {
    float *scores = lds.scores + i * kScoreStride, most = kMinusInfinity, sum = 0.0f;
    for (u32 j = lane_id(); j < kPageRows; j += kWaveSize) most = max_f32(most, scores[j]);
    const float old = lds.max[i], max = max_f32(old, wave_max(most));
    const float base_max = max == kMinusInfinity ? 0.0f : max; // nothing seen yet: all exponentials are 0
    for (u32 j = lane_id(); j < kPageRows; j += kWaveSize) {
      scores[j] = exp_f32(scores[j] - base_max);
      sum += scores[j];
    }
    sum = wave_sum(sum);
    const float shrink = exp_f32(old - base_max);
    wave_sync(); // all lanes have read what lane 0 writes
    if (lane_id() == 0) {
      lds.max[i] = max;
      lds.sum[i] = fma_f32(lds.sum[i], shrink, sum);
      lds.shrink[i] = shrink;
    }
  }
  block_sync();
  const u32 from = begin > base ? begin - base : 0, to = end - base < kPageRows ? end - base : kPageRows;
  for (u32 u = thread_id(); u < (vectors + 1) / 2 * dv; u += kFmaThreads) {
    const u32 m = u % dv, one = u / dv * 2, two = one + 1 < vectors ? one + 1 : one;
    const float *p = lds.scores + one * kScoreStride, *p2 = lds.scores + two * kScoreStride;
    float x = lds.acc[one * dv + m] * lds.shrink[one], x2 = lds.acc[two * dv + m] * lds.shrink[two];
    for (u32 j = from; j < to; ++j) {
      const float value = load_element<true>(Float ? kF32 : a.v_state.dtype, v, j, m, dv);
      x = fma_f32(p[j], value, x);
      x2 = fma_f32(p2[j], value, x2);
    }
    lds.acc[one * dv + m] = x;
    if (two != one) lds.acc[two * dv + m] = x2;
  }
  block_sync();
}

struct FmaResult {
  const FmaLds &lds;
  u32 dv;
  APU_METHOD SpanElements<1> of(u32 v, u32 m) const { return {lds.max[v], lds.sum[v], {{lds.acc[v * dv + m]}}}; }
};

template <bool Float> APU_DEVICE void attention_fma(const AttentionArgs &a) {
  const u32 d = a.k_state.head_size, dv = a.v_state.head_size, stride = a.chunk_rows * a.chunk_heads;
  FmaLds lds;
  lds.q = reinterpret_cast<float *>(dynamic_shared());
  lds.scores = lds.q + stride * d;
  lds.acc = lds.scores + stride * kScoreStride;
  lds.max = lds.acc + stride * dv;
  lds.sum = lds.max + stride;
  lds.shrink = lds.sum + stride;
  lds.flag = reinterpret_cast<u32 *>(lds.shrink + stride);
  const Survey survey = survey_step(a, sequence_items(a, 0));
  for (u32 i = block_id(); i < survey.items && block_id() < survey.stride; i += survey.stride) {
    Item item = find_item(a, survey, sequence_items(a, 0), i);
    const u32 vectors = item.rows * item.heads, last = survey.whole ? item.last_span : item.span;
    for (u32 u = thread_id(); u < vectors * d; u += kFmaThreads) {
      const u32 v = u / d;
      lds.q[u] = a.q[(u64(item.row + row_of(a, v)) * a.heads + head_of(a, item, v)) * d + u % d] * a.scale;
    }
    for (; item.span <= last; ++item.span) {
      for (u32 u = thread_id(); u < vectors * dv; u += kFmaThreads) lds.acc[u] = 0.0f;
      for (u32 v = thread_id(); v < vectors; v += kFmaThreads) {
        lds.max[v] = kMinusInfinity;
        lds.sum[v] = 0.0f;
      }
      block_sync();
      u32 begin, end;
      span_range(a, item, &begin, &end);
      for (u32 base = begin / kPageRows * kPageRows; base < end; base += kPageRows)
        attend_page<Float>(a, item, lds, base, begin, end);
      finish_span<kFmaThreads, 1>(a, survey, item, dv, FmaResult{lds, dv}, lds.flag);
    }
  }
}

APU_KERNEL(kFmaThreads)
void attention_f32(AttentionArgs a) { // keys and values in float32, parts of pages 16-byte aligned
  attention_fma<true>(a);
}
APU_KERNEL(kFmaThreads) void attention_any(AttentionArgs a) {
  attention_fma<false>(a);
}

} // namespace apu::gpu
