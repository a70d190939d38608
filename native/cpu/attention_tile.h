// The attention kernels over a vector type V of the level that includes this file; see attention_kernels.h.
//
// V: T, W lanes, zero(), set(x), load(const float *), load(const uint16_t *), store(), fma(a, b, c) = a * b + c, and
// reduce(acc): lane i of the result is the sum over the lanes of acc[i], by the same tree for every i.
// Scores: tiles of NQ vectors by NJ rows keep NQ * NJ accumulators in registers, reduced W at a time.
// Values: tiles of NQ vectors by NC register-wide columns walk down the rows.
// Everything has internal linkage: the file is compiled into objects of different instruction sets.
#pragma once

#include "attention_kernels.h"

#include <string.h>

namespace apu::cpu {
namespace {

template <class V, uint32_t NQ, uint32_t NJ, class E>
inline void score_tile(const float *q, const E *k, uint32_t d, float *scores) {
  typename V::T acc[NQ * NJ];
  for (uint32_t i = 0; i < NQ * NJ; ++i) acc[i] = V::zero();
  for (uint32_t m = 0; m < d; m += V::W) {
    typename V::T rows[NJ];
    for (uint32_t j = 0; j < NJ; ++j) rows[j] = V::load(k + j * d + m);
    for (uint32_t i = 0; i < NQ; ++i) {
      typename V::T x = V::load(q + i * d + m);
      for (uint32_t j = 0; j < NJ; ++j) acc[i * NJ + j] = V::fma(x, rows[j], acc[i * NJ + j]);
    }
  }
  for (uint32_t r = 0; r < NQ * NJ; r += V::W) {
    float sums[V::W];
    V::store(sums, V::reduce(acc + r));
    constexpr uint32_t run = NJ < V::W ? NJ : V::W;
    for (uint32_t l = 0; l < V::W; l += run)
      memcpy(scores + (r + l) / NJ * kAttentionRows + (r + l) % NJ, sums + l, run * sizeof(float));
  }
}

template <class V, class E>
void tiled_scores(const float *q, uint32_t n, const E *k, uint32_t d, uint32_t begin, uint32_t end, float *scores) {
  // Whole tiles of 16 rows: a page has them all, and what lies outside the range is not used.
  begin = begin / 16 * 16, end = (end + 15) / 16 * 16;
  for (uint32_t j = begin; j < end; j += 16) {
    const E *rows = k + j * d;
    float *to = scores + j;
    uint32_t i = 0;
    for (; i + (V::Q == 4 ? 3 : 2) <= n; i += V::Q) // of three the fourth is padding
      for (uint32_t s = 0; s < 16; s += 4)
        score_tile<V, V::Q, 4>(q + i * d, rows + s * d, d, to + i * kAttentionRows + s);
    if (i + 2 == n) {
      for (uint32_t s = 0; s < 16; s += 8) score_tile<V, 2, 8>(q + i * d, rows + s * d, d, to + i * kAttentionRows + s);
    } else if (i + 1 == n) {
      constexpr uint32_t step = V::W < 8 ? 8 : V::W;
      for (uint32_t s = 0; s < 16; s += step)
        score_tile<V, 1, step>(q + i * d, rows + s * d, d, to + i * kAttentionRows + s);
    }
  }
}

template <class V, uint32_t NQ, uint32_t NC, class E>
inline void value_tile(const float *p, const E *v, uint32_t d, uint32_t begin, uint32_t end, float *acc) {
  typename V::T sum[NQ * NC];
  for (uint32_t i = 0; i < NQ; ++i)
    for (uint32_t c = 0; c < NC; ++c) sum[i * NC + c] = V::load(acc + i * d + c * V::W);
  for (uint32_t j = begin; j < end; ++j) {
    typename V::T row[NC];
    for (uint32_t c = 0; c < NC; ++c) row[c] = V::load(v + j * d + c * V::W);
    for (uint32_t i = 0; i < NQ; ++i) {
      typename V::T x = V::set(p[i * kAttentionRows + j]);
      for (uint32_t c = 0; c < NC; ++c) sum[i * NC + c] = V::fma(x, row[c], sum[i * NC + c]);
    }
  }
  for (uint32_t i = 0; i < NQ; ++i)
    for (uint32_t c = 0; c < NC; ++c) V::store(acc + i * d + c * V::W, sum[i * NC + c]);
}

template <class V, uint32_t NQ, class E>
void value_rows(const float *p, const E *v, uint32_t d, uint32_t begin, uint32_t end, float *acc) {
  if (begin >= end) return;
  uint32_t c = 0;
  for (; c + 4 * V::W <= d; c += 4 * V::W) value_tile<V, NQ, 4>(p, v + c, d, begin, end, acc + c);
  for (; c < d; c += V::W) value_tile<V, NQ, 1>(p, v + c, d, begin, end, acc + c);
}

template <class V, uint32_t NQ, class E>
void value_group(const float *p, const E *v, uint32_t d, const uint32_t *begin, const uint32_t *end, float *acc) {
  uint32_t from = begin[0], to = end[0]; // the rows that all of the group see
  for (uint32_t i = 1; i < NQ; ++i) from = begin[i] > from ? begin[i] : from, to = end[i] < to ? end[i] : to;
  bool joint = from < to;
  for (uint32_t i = 0; i < NQ; ++i)
    value_rows<V, 1>(p + i * kAttentionRows, v, d, begin[i], joint ? from : end[i], acc + i * d);
  if (!joint) return;
  value_rows<V, NQ>(p, v, d, from, to, acc);
  for (uint32_t i = 0; i < NQ; ++i) value_rows<V, 1>(p + i * kAttentionRows, v, d, to, end[i], acc + i * d);
}

template <class V, class E>
void tiled_values(const float *p, uint32_t n, const E *v, uint32_t d, const uint32_t *begin, const uint32_t *end,
                  float *acc) {
  uint32_t i = 0;
  auto group = [&]<uint32_t NQ>() {
    value_group<V, NQ>(p + i * kAttentionRows, v, d, begin + i, end + i, acc + i * d);
    i += NQ;
  };
  if constexpr (V::Q == 4) {
    while (i + 4 <= n) group.template operator()<4>();
    if (i + 3 == n) group.template operator()<3>();
  }
  while (i + 2 <= n) group.template operator()<2>();
  if (i < n) group.template operator()<1>();
}

template <class V> constexpr AttentionKernels attention_table() {
  return {V::W, tiled_scores<V, float>, tiled_scores<V, uint16_t>, tiled_values<V, float>, tiled_values<V, uint16_t>};
}

} // namespace
} // namespace apu::cpu
