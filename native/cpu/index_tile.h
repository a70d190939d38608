// Scores of an indexer whose rows were rounded to FP4, over a vector type V; see attention_kernels.h.
//
// A group of 32 elements is small integers times a power of two, so a product of two groups is an exact sum of
// integers, which takes a quarter of the instructions that floats take or less. What is rounded is the sum over the
// groups, by fma in order, and then over the heads. V besides attention_tile.h's: NX heads computed together, and
// small_dots().
#pragma once

#include "attention_tile.h"

namespace apu::cpu {
namespace {

constexpr int32_t kShift = 16; // makes a row's numbers positive

// x (32) = numbers * scale with numbers of at most 15; false where there is no such scale.
inline bool small_numbers(const float *x, int32_t *numbers, float *scale) {
  const uint32_t amax = quant::largest_magnitude(x, kBlock);
  *scale = 0;
  memset(numbers, 0, kBlock * sizeof(*numbers));
  if (amax == 0) return true;
  const int32_t exponent = static_cast<int32_t>(amax >> 23) - 127;
  if (exponent < -100 || exponent > 100) return false; // not finite among them
  const uint32_t scale_bits = static_cast<uint32_t>(exponent - 3 + 127) << 23;
  const uint32_t inverse_bits = static_cast<uint32_t>(3 - exponent + 127) << 23;
  float inverse;
  memcpy(scale, &scale_bits, 4);
  memcpy(&inverse, &inverse_bits, 4);
  uint32_t inexact = 0;
  for (uint32_t i = 0; i < kBlock; ++i) {
    const float y = x[i] * inverse;
    numbers[i] = static_cast<int32_t>(y);
    inexact |= static_cast<float>(numbers[i]) != y;
  }
  return !inexact;
}

inline bool index_query(const float *x, uint32_t d, uint32_t head, int8_t *tile, float *scales, int32_t *offsets) {
  for (uint32_t g = 0; g < d / kBlock; ++g) {
    int32_t numbers[kBlock], sum = 0;
    if (!small_numbers(x + g * kBlock, numbers, scales + g * kIndexTile + head)) return false;
    int8_t *to = tile + size_t(g) * kBlock * kIndexTile + 4 * head;
    for (uint32_t i = 0; i < kBlock; ++i) {
      to[i / 4 * 4 * kIndexTile + i % 4] = static_cast<int8_t>(numbers[i]);
      sum += numbers[i];
    }
    offsets[g * kIndexTile + head] = -kShift * sum;
  }
  return true;
}

template <class V> bool index_row(const float *x, uint32_t d, uint8_t *numbers, float *scales) {
  uint32_t g = 0;
  if constexpr (requires { V::small_row(x, numbers, scales); }) // 128 elements
    for (; (g + 4) * kBlock <= d; g += 4)
      if (!V::small_row(x + g * kBlock, numbers + g * kBlock, scales + g)) return false;
  for (; g < d / kBlock; ++g) {
    int32_t of_group[kBlock];
    if (!small_numbers(x + g * kBlock, of_group, scales + g)) return false;
    for (uint32_t i = 0; i < kBlock; ++i) numbers[g * kBlock + i] = static_cast<uint8_t>(of_group[i] + kShift);
  }
  return true;
}

// The scores of NR rows.
template <class V, uint32_t NR>
APU_INLINE_TILE void score_rows(const IndexQuery &q, const IndexRows &rows, uint32_t row, uint32_t d, float *scores) {
  static_assert(kIndexTile == 16);
  constexpr uint32_t parts = kIndexTile / V::W;
  const uint32_t groups = d / kBlock;
  const uint8_t *numbers = rows.numbers + size_t(row) * d;
  const float *row_scales = rows.scales + size_t(row) * groups;
  typename V::T total[NR * parts];
  for (uint32_t i = 0; i < NR * parts; ++i) total[i] = V::zero();
  for (uint32_t t = 0; t < q.tiles; ++t) {
    const int8_t *tile = q.numbers + size_t(t) * kIndexTile * d;
    const float *scale = q.scales + size_t(t) * kIndexTile * groups;
    const int32_t *offsets = q.offsets + size_t(t) * kIndexTile * groups;
    typename V::T acc[NR * parts];
    for (uint32_t i = 0; i < NR * parts; ++i) acc[i] = V::zero();
    for (uint32_t g = 0; g < groups; ++g) {
      typename V::T products[NR * parts];
      V::template small_dots<NR>(tile + size_t(g) * kBlock * kIndexTile, offsets + g * kIndexTile, numbers + g * kBlock,
                                 d, products);
      for (uint32_t p = 0; p < parts; ++p) {
        const typename V::T of_heads = V::load(scale + g * kIndexTile + p * V::W);
        for (uint32_t i = 0; i < NR; ++i) {
          const typename V::T both = V::mul(of_heads, V::set(row_scales[i * groups + g]));
          acc[i * parts + p] = V::fma(products[i * parts + p], both, acc[i * parts + p]);
        }
      }
    }
    for (uint32_t p = 0; p < parts; ++p) {
      const typename V::T weight = V::load(q.weights + t * kIndexTile + p * V::W);
      for (uint32_t i = 0; i < NR; ++i)
        total[i * parts + p] = V::fma(weight, V::max(acc[i * parts + p], V::zero()), total[i * parts + p]);
    }
  }
  for (uint32_t i = 0; i < NR; ++i) {
    alignas(64) float lanes[kIndexTile];
    for (uint32_t p = 0; p < parts; ++p) V::store(lanes + p * V::W, total[i * parts + p]);
    for (uint32_t l = 0; l < 8; ++l) lanes[l] += lanes[l + 8];
    for (uint32_t l = 0; l < 4; ++l) lanes[l] += lanes[l + 4];
    scores[i] = (lanes[0] + lanes[2]) + (lanes[1] + lanes[3]);
  }
}

template <class V>
void index_scores(const IndexQuery &q, const IndexRows &rows, uint32_t count, uint32_t d, float *scores) {
  uint32_t i = 0;
  for (; i + V::NX <= count; i += V::NX) score_rows<V, V::NX>(q, rows, i, d, scores + i);
  for (; i < count; ++i) score_rows<V, 1>(q, rows, i, d, scores + i);
}

template <class V> constexpr IndexKernels index_table() {
  return {index_query, index_row<V>, index_scores<V>};
}

#undef APU_INLINE_TILE

} // namespace
} // namespace apu::cpu
