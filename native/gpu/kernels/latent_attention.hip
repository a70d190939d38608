// Latent attention on FMA: one row a position for all heads, key as a whole and value in its beginning. For float32
// caches, and for rows that latent tiles do not cover.
//
// A block takes one span of a chunk's queries, up to 8 vectors of (row, head), and for them reads each row once from
// memory, then again as value from the caches. Pages of 128 positions in order by online softmax: scores by one thread
// for a position and half of the vectors, 8 elements of the row at a time; softmax by one wave for a vector; values by
// one thread for two neighbouring elements and all vectors. Bytes: positions of the span times a row, for each chunk.
#include "attention_items.h"

namespace apu::gpu {

constexpr u32 kHalfVectors = kLatentVectors / 2;

struct Floats4 {
  float v[4];
};
APU_DEVICE Floats4 floats4(const float *shared) {
  const f32x4 x = *reinterpret_cast<const f32x4 *>(shared);
  return {{x[0], x[1], x[2], x[3]}};
}

// Elements m to m + 7 of position r; zero from d on. `Float`: float32, aligned rows of multiples of 8.
template <bool Float> APU_DEVICE void load8(u32 type, const u8 *part, u32 r, u32 m, u32 d, float *v) {
  if constexpr (Float) {
    const float *p = reinterpret_cast<const float *>(part) + r * d + m;
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const u32x4 x = load16(p + 4 * h);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) v[4 * h + i] = bits_to_float(x[i]);
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < 8; ++i) v[i] = m + i < d ? load_element<false>(type, part, r, m + i, d) : 0.0f;
  }
}

// Elements m and m + 1, m even; the second may be beyond those that count.
template <bool Float> APU_DEVICE void load2(u32 type, const u8 *part, u32 r, u32 m, u32 d, float *v) {
  if constexpr (Float) {
    const u32x2 x = *reinterpret_cast<const u32x2 *>(reinterpret_cast<const float *>(part) + r * d + m);
    v[0] = bits_to_float(x[0]);
    v[1] = bits_to_float(x[1]);
  } else {
    v[0] = load_element<false>(type, part, r, m, d);
    v[1] = m + 1 < d ? load_element<false>(type, part, r, m + 1, d) : 0.0f;
  }
}

struct LatentLds {
  u32 *flag;     // kLatentFront words
  float *scores; // (128, 8)
  float *q;      // (vectors, d) times the scale, 16-byte aligned; rows are too where d is a multiple of 4
  float *acc;    // (vectors, dv)
  float *max, *sum, *shrink;
};

// s[i] = q[i] . row r for the `count` vectors of a thread, and something for the others: one chain of FMA over the row.
template <bool Float>
APU_DEVICE void score_row(u32 type, const float *q, u32 count, const u8 *part, u32 r, u32 d, float *s) {
#pragma unroll 1
  for (u32 m = 0; m < d; m += 8) {
    float c[8];
    load8<Float>(type, part, r, m, d, c);
#pragma unroll
    for (u32 i = 0; i < kHalfVectors; ++i) {
      const float *x = q + (i < count ? i * d : 0) + m;
      if constexpr (!Float) {
        for (u32 e = 0; e < 8; ++e)
          if (m + e < d) s[i] = fma_f32(x[e], c[e], s[i]);
      } else {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
          const Floats4 four = floats4(x + 4 * h);
#pragma unroll
          for (u32 e = 0; e < 4; ++e) s[i] = fma_f32(four.v[e], c[4 * h + e], s[i]);
        }
      }
    }
  }
}

template <bool Float>
APU_DEVICE void attend_latents(const AttentionArgs &a, const Item &item, const LatentLds &lds, u32 base, u32 begin,
                               u32 end) {
  const u32 vectors = item.rows * item.heads, d = a.k_state.head_size, dv = a.v_state.head_size;
  const u32 type = a.k_state.dtype;
  const u32 page = wave_uniform(a.step.pages[item.pages + base / kPageRows]);
  const u8 *part = page_part(a.k_state, page, 0);

  const u32 r = thread_id() % kPageRows, first = thread_id() / kPageRows * kHalfVectors;
  const bool inside = base + r >= begin && base + r < end;
  float s[kHalfVectors] = {};
  if (inside && first < vectors) score_row<Float>(type, lds.q + first * d, vectors - first, part, r, d, s);
  f32x4 out;
#pragma unroll
  for (u32 i = 0; i < kHalfVectors; ++i) {
    const u32 vector = first + i;
    const u32 position = item.position + row_of(a, vector);
    const bool seen = inside && base + r <= position && base + r >= lowest_position(a, position);
    const float score = seen && a.cap != 0.0f ? soft_cap(s[i], a.cap) : s[i];
    out[i] = vector >= vectors ? 0.0f : seen ? score : kMinusInfinity;
  }
  *reinterpret_cast<f32x4 *>(lds.scores + r * kLatentVectors + first) = out;
  block_sync();
  for (u32 i = wave_id(); i < vectors; i += kFmaThreads / kWaveSize) {
    float *scores = lds.scores + i, most = kMinusInfinity, sum = 0.0f;
    for (u32 j = lane_id(); j < kPageRows; j += kWaveSize) most = max_f32(most, scores[j * kLatentVectors]);
    const float old = lds.max[i], max = max_f32(old, wave_max(most));
    const float base_max = max == kMinusInfinity ? 0.0f : max; // nothing seen yet: all exponentials are 0
    for (u32 j = lane_id(); j < kPageRows; j += kWaveSize) {
      const float e = exp_f32(scores[j * kLatentVectors] - base_max);
      scores[j * kLatentVectors] = e;
      sum += e;
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
  for (u32 m = 2 * thread_id(); m < dv; m += 2 * kFmaThreads) {
    float x[kLatentVectors][2] = {};
#pragma unroll
    for (u32 i = 0; i < kLatentVectors; ++i) {
      if (i >= vectors) continue;
      x[i][0] = lds.acc[i * dv + m] * lds.shrink[i];
      if (m + 1 < dv) x[i][1] = lds.acc[i * dv + m + 1] * lds.shrink[i];
    }
#pragma unroll 4
    for (u32 j = from; j < to; ++j) {
      float c[2];
      load2<Float>(type, part, j, m, d, c);
#pragma unroll
      for (u32 h = 0; h < 2; ++h) {
        const Floats4 p = floats4(lds.scores + j * kLatentVectors + h * kHalfVectors);
#pragma unroll
        for (u32 i = 0; i < kHalfVectors; ++i) {
          x[h * kHalfVectors + i][0] = fma_f32(p.v[i], c[0], x[h * kHalfVectors + i][0]);
          x[h * kHalfVectors + i][1] = fma_f32(p.v[i], c[1], x[h * kHalfVectors + i][1]);
        }
      }
    }
#pragma unroll
    for (u32 i = 0; i < kLatentVectors; ++i) {
      if (i >= vectors) continue;
      lds.acc[i * dv + m] = x[i][0];
      if (m + 1 < dv) lds.acc[i * dv + m + 1] = x[i][1];
    }
  }
  block_sync();
}

struct LatentResult {
  const LatentLds &lds;
  u32 dv;
  APU_METHOD SpanElements<1> of(u32 v, u32 m) const { return {lds.max[v], lds.sum[v], {{lds.acc[v * dv + m]}}}; }
};

template <bool Float> APU_DEVICE void latent_attention(const AttentionArgs &a) {
  const u32 d = a.k_state.head_size, dv = a.v_state.head_size, stride = a.chunk_rows * a.chunk_heads;
  LatentLds lds;
  lds.flag = reinterpret_cast<u32 *>(dynamic_shared());
  lds.scores = reinterpret_cast<float *>(lds.flag + kLatentFront);
  lds.q = lds.scores + kPageRows * kLatentVectors;
  lds.acc = lds.q + stride * d;
  lds.max = lds.acc + stride * dv;
  lds.sum = lds.max + stride;
  lds.shrink = lds.sum + stride;
  const SequenceItems sequences = sequence_items<kLatentSpan>(a, 0);
  const Survey survey = survey_step<kLatentSpan>(a, sequences);
  for (u32 i = block_id(); i < survey.items && block_id() < survey.stride; i += survey.stride) {
    Item item = find_item<kLatentSpan>(a, survey, sequences, i);
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
      span_range<kLatentSpan>(a, item, &begin, &end);
      for (u32 base = begin / kPageRows * kPageRows; base < end; base += kPageRows)
        attend_latents<Float>(a, item, lds, base, begin, end);
      finish_span<kFmaThreads, 1>(a, survey, item, dv, LatentResult{lds, dv}, lds.flag);
    }
  }
}

APU_KERNEL(kFmaThreads) void latent_attention_f32(AttentionArgs a) {
  latent_attention<true>(a);
}
APU_KERNEL(kFmaThreads) void latent_attention_any(AttentionArgs a) {
  latent_attention<false>(a);
}

} // namespace apu::gpu
