// The attention kernels over a vector type V of the level that includes this file; see attention_kernels.h.
//
// V: T, W lanes, NQ vectors computed together, zero(), set(x), load(const float *), load(const uint16_t *) of F16,
// load(const int8_t *), store(), add, mul, max, exp (of x <= 0), fma(a, b, c) = a * b + c, to_f16(x); and for Q8_0 keys
// split_query() and dot_tile(), which choose the integers' layout.
// Scores: NQ vectors by NP registers of positions; a key is converted once for all of them, and where there are more
// vectors than NQ, into `work` first. Values: NQ vectors by NC registers of columns walk down the positions.
// Everything has internal linkage: the file is compiled into objects of different instruction sets.
#pragma once

#include "../quant/activations.h"
#include "attention_kernels.h"

#include <math.h>
#include <string.h>

namespace apu::cpu {
namespace {

#define APU_INLINE_TILE [[gnu::always_inline]] inline

constexpr uint32_t kBlock = 32;     // elements of a Q8_0 block
constexpr uint32_t kValueStep = 32; // rows of values that one pass takes where there are several
constexpr uint32_t kTile = kKeyTile;
constexpr uint32_t kTile8 = kKeyTileQ8;
constexpr uint32_t kValueTile8 = kValueTileQ8;

// `rows` positions of Q8_0: rows * d quants and then d/32 times rows scales of 2 bytes.
constexpr size_t q8_bytes(uint32_t rows, uint32_t d) {
  return size_t(rows) * d + d / kBlock * rows * 2;
}

// ---- stores ------------------------------------------------------------------------------------------------------

// d = amax / 127 rounded to F16, at most its largest number; q = round_to_even(x / d), at most 127. NaN and q = 0 for a
// block that is not finite.
template <class V> inline uint16_t quantize_block(const float *x, int8_t *q) {
  const uint32_t amax_bits = quant::largest_magnitude(x, kBlock);
  float amax;
  memcpy(&amax, &amax_bits, 4);
  memset(q, 0, kBlock);
  if (amax_bits >= 0x7f800000u) return 0x7e00;
  const float ideal = amax / 127.0f;
  const uint16_t half = V::to_f16(ideal < 65504.0f ? ideal : 65504.0f);
  const float d = V::from_f16(half);
  if (d == 0) return 0;
  const float inverse = 1.0f / d;
  for (uint32_t i = 0; i < kBlock; ++i) {
    float y = x[i] * inverse;
    y = y < 127.0f ? y : 127.0f;
    y = y > -127.0f ? y : -127.0f;
    const float shifted = y + 12582912.0f; // 1.5 * 2^23: rounds to an integer, ties to even
    q[i] = static_cast<int8_t>(static_cast<int32_t>(shifted - 12582912.0f));
  }
  return half;
}

inline void put(const float *x, uint32_t d, float *to, uint32_t stride) {
  for (uint32_t m = 0; m < d; ++m) to[size_t(m) * stride] = x[m];
}

template <class V> void store_k_f32(const float *x, uint32_t d, uint32_t row, uint8_t *page) {
  put(x, d, reinterpret_cast<float *>(page) + size_t(row / kTile) * d * kTile + row % kTile, kTile);
}

template <class V> void store_v_f32(const float *x, uint32_t d, uint32_t row, uint8_t *page) {
  memcpy(reinterpret_cast<float *>(page) + size_t(row) * d, x, d * sizeof(float));
}

template <class V> void store_k_f16(const float *x, uint32_t d, uint32_t row, uint8_t *page) {
  uint16_t *to = reinterpret_cast<uint16_t *>(page) + size_t(row / kTile) * d * kTile + row % kTile;
  for (uint32_t m = 0; m < d; m += 64) {
    uint16_t halves[64];
    const uint32_t n = d - m < 64 ? d - m : 64;
    V::to_f16(x + m, halves, n);
    for (uint32_t i = 0; i < n; ++i) to[size_t(m + i) * kTile] = halves[i];
  }
}

template <class V> void store_v_f16(const float *x, uint32_t d, uint32_t row, uint8_t *page) {
  V::to_f16(x, reinterpret_cast<uint16_t *>(page) + size_t(row) * d, d);
}

template <class V> void store_k_q8(const float *x, uint32_t d, uint32_t row, uint8_t *page) {
  uint8_t *tile = page + row / kTile8 * q8_bytes(kTile8, d);
  uint8_t *scales = tile + size_t(d) * kTile8;
  const uint32_t lane = row % kTile8;
  for (uint32_t b = 0; b < d / kBlock; ++b) {
    int8_t q[kBlock];
    const uint16_t half = quantize_block<V>(x + b * kBlock, q);
    for (uint32_t m = 0; m < kBlock; m += 4) memcpy(tile + (b * kBlock + m) * kTile8 + lane * 4, q + m, 4);
    memcpy(scales + (b * kTile8 + lane) * 2, &half, 2);
  }
}

template <class V> void store_v_q8(const float *x, uint32_t d, uint32_t row, uint8_t *page) {
  uint8_t *tile = page + row / kValueTile8 * q8_bytes(kValueTile8, d);
  uint8_t *scales = tile + size_t(d) * kValueTile8;
  const uint32_t lane = row % kValueTile8;
  for (uint32_t b = 0; b < d / kBlock; ++b) {
    const uint16_t half =
        quantize_block<V>(x + b * kBlock, reinterpret_cast<int8_t *>(tile) + size_t(lane) * d + b * kBlock);
    memcpy(scales + (b * kValueTile8 + lane) * 2, &half, 2);
  }
}

// ---- scores of float keys ----------------------------------------------------------------------------------------

// To the second cache level; p may be anything.
template <uint32_t Bytes> APU_INLINE_TILE void fetch(const void *p) {
  for (uint32_t line = 0; line < Bytes; line += 64) __builtin_prefetch(static_cast<const char *>(p) + line, 0, 2);
}

// acc[i, p] += left(i) * right(p), the shorter side held in registers.
template <class V, uint32_t NQ, uint32_t NP, class Left, class Right>
APU_INLINE_TILE void outer(Left left, Right right, typename V::T *acc) {
  typename V::T held[NQ < NP ? NQ : NP];
  if constexpr (NQ < NP) {
    for (uint32_t i = 0; i < NQ; ++i) held[i] = left(i);
    for (uint32_t p = 0; p < NP; ++p) {
      const typename V::T x = right(p);
      for (uint32_t i = 0; i < NQ; ++i) acc[i * NP + p] = V::fma(held[i], x, acc[i * NP + p]);
    }
  } else {
    for (uint32_t p = 0; p < NP; ++p) held[p] = right(p);
    for (uint32_t i = 0; i < NQ; ++i) {
      const typename V::T x = left(i);
      for (uint32_t p = 0; p < NP; ++p) acc[i * NP + p] = V::fma(x, held[p], acc[i * NP + p]);
    }
  }
}

template <class V, uint32_t NQ, uint32_t NP, class E>
APU_INLINE_TILE void score_tile(const float *q, const E *k, uint32_t d, const E *next, float *scores) {
  typename V::T acc[NQ * NP];
  for (uint32_t i = 0; i < NQ * NP; ++i) acc[i] = V::zero();
  for (uint32_t m = 0; m < d; ++m) {
    if (next) fetch<kTile * sizeof(E)>(next + size_t(m) * kTile);
    outer<V, NQ, NP>([&](uint32_t i) { return V::set(q[size_t(i) * d + m]); },
                     [&](uint32_t p) { return V::load(k + size_t(m) * kTile + p * V::W); }, acc);
  }
  for (uint32_t i = 0; i < NQ; ++i)
    for (uint32_t p = 0; p < NP; ++p) V::store(scores + i * kAttentionRows + p * V::W, acc[i * NP + p]);
}

// Calls f.operator()<N>(i) for groups of N <= Most vectors that cover [0, n).
template <uint32_t Most, class F> APU_INLINE_TILE void by_groups(uint32_t n, F f) {
  uint32_t i = 0;
  for (; i + Most <= n; i += Most) f.template operator()<Most>(i);
  switch (n - i) {
  case 1: f.template operator()<1>(i); break;
  case 2:
    if constexpr (Most > 2) f.template operator()<2>(i);
    break;
  case 3:
    if constexpr (Most > 3) f.template operator()<3>(i);
    break;
  case 4:
    if constexpr (Most > 4) f.template operator()<4>(i);
    break;
  case 5:
    if constexpr (Most > 5) f.template operator()<5>(i);
    break;
  default: break;
  }
}

template <class V, class E>
void tiled_scores(const void *query, uint32_t n, const uint8_t *page, uint32_t d, uint32_t begin, uint32_t end,
                  const uint8_t *next, float *scores, float *work) {
  const float *q = static_cast<const float *>(query);
  constexpr uint32_t whole = kTile / V::W; // registers
  for (uint32_t j = begin / kTile * kTile; j < end; j += kTile) {
    const E *k = reinterpret_cast<const E *>(page) + size_t(j) * d;
    auto run = [&](const auto *keys, const auto *ahead) {
      by_groups<V::NQ>(n, [&]<uint32_t N>(uint32_t i) {
        constexpr uint32_t most = V::registers >= 32 || N <= 3 ? 4 : 2, NP = whole < most ? whole : most;
        for (uint32_t p = 0; p < whole; p += NP) {
          score_tile<V, N, NP>(q + size_t(i) * d, keys + p * V::W, d, p ? nullptr : ahead,
                               scores + i * kAttentionRows + j + p * V::W);
        }
      });
    };
    if (n <= V::NQ) {
      run(k, next ? reinterpret_cast<const E *>(next) + size_t(j) * d : nullptr);
    } else {
      for (uint32_t m = 0; m < d * kTile; m += V::W) V::store(work + m, V::load(k + m));
      run(static_cast<const float *>(work), static_cast<const float *>(nullptr));
    }
  }
}

// ---- values ------------------------------------------------------------------------------------------------------

// Rows of a page, or of a part of it, as floats: (j, c) is element c of position j.
template <class V, class E> struct Rows {
  const E *data; // of position 0
  uint32_t d;
  const E *next; // likewise of the part that is fetched meanwhile, or null
  const E *row(uint32_t j) const { return data + size_t(j) * d; }
  const E *row_of_next(uint32_t j) const { return next + size_t(j) * d; }
  typename V::T load(const E *row, uint32_t c, uint32_t) const { return V::load(row + c); }
  float at(uint32_t j, uint32_t c) const {
    if constexpr (sizeof(E) == sizeof(float)) return data[size_t(j) * d + c];
    return V::from_f16(data[size_t(j) * d + c]);
  }
};

// The tile of Q8_0 that begins at position `first`; d is a multiple of the registers.
template <class V> struct RowsQ8 {
  const int8_t *data;
  uint32_t d, first;
  const float *scales; // (d/32, 32)
  const int8_t *next;  // the same tile of the part that is fetched meanwhile, or null
  const int8_t *row(uint32_t j) const { return data + size_t(j - first) * d; }
  const int8_t *row_of_next(uint32_t j) const { return next + size_t(j - first) * d; }
  typename V::T load(const int8_t *row, uint32_t c, uint32_t j) const {
    return V::mul(V::load(row + c), V::set(scales[c / kBlock * kValueTile8 + j - first]));
  }
};

template <class V, uint32_t NQ, uint32_t NC, class R>
APU_INLINE_TILE void value_tile(const float *p, const R &v, uint32_t column, uint32_t begin, uint32_t end, float *acc) {
  typename V::T sum[NQ * NC];
  for (uint32_t i = 0; i < NQ; ++i)
    for (uint32_t c = 0; c < NC; ++c) sum[i * NC + c] = V::load(acc + i * v.d + column + c * V::W);
  for (uint32_t j = begin; j < end; ++j) {
    const auto *row = v.row(j);
    if (v.next) fetch<NC * V::W * sizeof(*row)>(v.row_of_next(j) + column);
    outer<V, NQ, NC>([&](uint32_t i) { return V::set(p[i * kAttentionRows + j]); },
                     [&](uint32_t c) { return v.load(row, column + c * V::W, j); }, sum);
  }
  for (uint32_t i = 0; i < NQ; ++i)
    for (uint32_t c = 0; c < NC; ++c) V::store(acc + i * v.d + column + c * V::W, sum[i * NC + c]);
}

// Registers of columns that NQ vectors take at once: enough chains to hide the latency of fma.
template <class V> constexpr uint32_t value_columns(uint32_t n) {
  return V::registers >= 32 ? (n <= 3 ? 8 : 4) : n == 1 ? 8 : n <= 3 ? 4 : 2;
}

template <class V, uint32_t NQ, class R>
void value_rows(const float *p, const R &v, uint32_t begin, uint32_t end, float *acc) {
  if (begin >= end) return;
  constexpr uint32_t wide = value_columns<V>(NQ);
  uint32_t c = 0;
  for (; c + wide * V::W <= v.d; c += wide * V::W) value_tile<V, NQ, wide>(p, v, c, begin, end, acc);
  if constexpr (wide > 4)
    for (; c + 4 * V::W <= v.d; c += 4 * V::W) value_tile<V, NQ, 4>(p, v, c, begin, end, acc);
  if constexpr (wide > 2)
    for (; c + 2 * V::W <= v.d; c += 2 * V::W) value_tile<V, NQ, 2>(p, v, c, begin, end, acc);
  for (; c + V::W <= v.d; c += V::W) value_tile<V, NQ, 1>(p, v, c, begin, end, acc);
  if constexpr (requires { v.at(0, 0); })
    for (; c < v.d; ++c)
      for (uint32_t i = 0; i < NQ; ++i) {
        float sum = acc[i * v.d + c];
        for (uint32_t j = begin; j < end; ++j) sum = V::fma(p[i * kAttentionRows + j], v.at(j, c), sum);
        acc[i * v.d + c] = sum;
      }
}

inline uint32_t least(uint32_t a, uint32_t b) {
  return a < b ? a : b;
}
inline uint32_t most(uint32_t a, uint32_t b) {
  return a > b ? a : b;
}

// Positions [first, last) of the n vectors' ranges.
template <class V, class R>
void value_groups(const float *p, uint32_t n, const R &v, uint32_t first, uint32_t last, const uint32_t *begins,
                  const uint32_t *ends, float *acc) {
  by_groups<V::NQ>(n, [&]<uint32_t N>(uint32_t g) {
    const float *weights = p + size_t(g) * kAttentionRows;
    float *to = acc + size_t(g) * v.d;
    uint32_t begin[N], end[N], from = first, until = last; // the positions that all of the group see
    for (uint32_t i = 0; i < N; ++i) {
      begin[i] = most(begins[g + i], first), end[i] = least(ends[g + i], last);
      from = most(from, begin[i]), until = least(until, end[i]);
    }
    const bool joint = from < until;
    for (uint32_t i = 0; i < N; ++i)
      value_rows<V, 1>(weights + i * kAttentionRows, v, begin[i], joint ? from : end[i], to + i * v.d);
    if (!joint) return;
    value_rows<V, N>(weights, v, from, until, to);
    for (uint32_t i = 0; i < N; ++i) value_rows<V, 1>(weights + i * kAttentionRows, v, until, end[i], to + i * v.d);
  });
}

// The same from floats made of v's rows [first, last).
template <class V, class R>
void converted_values(const float *p, uint32_t n, const R &v, uint32_t first, uint32_t last, const uint32_t *begins,
                      const uint32_t *ends, float *acc, float *work) {
  for (uint32_t j = first; j < last; ++j) {
    const auto *row = v.row(j);
    float *to = work + size_t(j - first) * v.d;
    uint32_t c = 0;
    for (; c + V::W <= v.d; c += V::W) V::store(to + c, v.load(row, c, j));
    if constexpr (requires { v.at(0, 0); })
      for (; c < v.d; ++c) to[c] = v.at(j, c);
  }
  value_groups<V>(p, n, Rows<V, float>{work - size_t(first) * v.d, v.d, nullptr}, first, last, begins, ends, acc);
}

// Positions that any vector sees.
inline void extent(uint32_t n, const uint32_t *begins, const uint32_t *ends, uint32_t &first, uint32_t &last) {
  first = kAttentionRows, last = 0;
  for (uint32_t i = 0; i < n; ++i) {
    if (begins[i] >= ends[i]) continue;
    first = least(first, begins[i]), last = most(last, ends[i]);
  }
}

template <class V, class E>
void tiled_values(const float *p, uint32_t n, const uint8_t *page, uint32_t d, const uint32_t *begins,
                  const uint32_t *ends, const uint8_t *next, float *acc, float *work) {
  const Rows<V, E> rows{reinterpret_cast<const E *>(page), d, reinterpret_cast<const E *>(next)};
  uint32_t first, last;
  extent(n, begins, ends, first, last);
  // Few vectors: in one pass where a row fits into the registers. Many: half of the first cache level at a time.
  const bool direct = n <= V::NQ;
  const uint32_t step = !direct                           ? most(kValueStep, 4096 / d)
                        : d <= value_columns<V>(n) * V::W ? kAttentionRows
                                                          : kValueStep;
  for (uint32_t j = first; j < last; j += step)
    if (direct)
      value_groups<V>(p, n, rows, j, least(j + step, last), begins, ends, acc);
    else
      converted_values<V>(p, n, rows, j, least(j + step, last), begins, ends, acc, work);
}

template <class V>
void values_q8(const float *p, uint32_t n, const uint8_t *page, uint32_t d, const uint32_t *begins,
               const uint32_t *ends, const uint8_t *next, float *acc, float *work) {
  uint32_t first, last;
  extent(n, begins, ends, first, last);
  float *scales = work + size_t(d) * kValueTile8;
  for (uint32_t t = first / kValueTile8 * kValueTile8; t < last; t += kValueTile8) {
    const uint8_t *tile = page + t / kValueTile8 * q8_bytes(kValueTile8, d);
    const auto *halves = reinterpret_cast<const uint16_t *>(tile + size_t(d) * kValueTile8);
    for (uint32_t i = 0; i < d / kBlock * kValueTile8; i += V::W) V::store(scales + i, V::load(halves + i));
    const uint8_t *ahead = next ? next + (tile - page) : nullptr;
    if (ahead)
      for (uint32_t b = 0; b < d / kBlock; ++b) fetch<2 * kValueTile8>(ahead + d * kValueTile8 + 2 * b * kValueTile8);
    const RowsQ8<V> rows{reinterpret_cast<const int8_t *>(tile), d, t, scales, reinterpret_cast<const int8_t *>(ahead)};
    const uint32_t from = most(first, t), to = least(last, t + kValueTile8);
    if (n <= V::NQ)
      value_groups<V>(p, n, rows, from, to, begins, ends, acc);
    else
      converted_values<V>(p, n, rows, from, to, begins, ends, acc, work);
  }
}

// ---- scores of Q8_0 keys -----------------------------------------------------------------------------------------

template <class V> void prepare_float(const float *q, uint32_t n, uint32_t d, void *query) {
  memcpy(query, q, size_t(n) * d * sizeof(float));
}

// Query vector i: d numbers of 16 bits, as V likes them, at i * 2 d bytes; then, for all vectors, (n, d/32) scales and
// (n, d/32) sums of integers.
template <class V> struct QueryQ8 {
  const int16_t *numbers; // or two int8
  const float *scales;
  const int32_t *sums;
  QueryQ8(const void *query, uint32_t n, uint32_t d)
      : numbers(static_cast<const int16_t *>(query)), scales(reinterpret_cast<const float *>(numbers + size_t(n) * d)),
        sums(reinterpret_cast<const int32_t *>(scales + size_t(n) * (d / kBlock))) {}
};

// d = amax / 32258 and q = round_to_even(x / d), of 16 bits: 254 a + b, both in [-127, 127].
template <class V> void prepare_q8(const float *q, uint32_t n, uint32_t d, void *query) {
  int16_t *numbers = static_cast<int16_t *>(query);
  float *scales = reinterpret_cast<float *>(numbers + size_t(n) * d);
  int32_t *sums = reinterpret_cast<int32_t *>(scales + size_t(n) * (d / kBlock));
  for (uint32_t b = 0; b < n * (d / kBlock); ++b) {
    const float *x = q + size_t(b) * kBlock;
    const uint32_t amax_bits = quant::largest_magnitude(x, kBlock);
    float amax;
    memcpy(&amax, &amax_bits, 4);
    int16_t out[kBlock] = {};
    float scale = amax_bits >= 0x7f800000u ? __builtin_nanf("") : 0;
    if (amax >= 0x1p-100f && amax_bits < 0x7f800000u) {
      scale = amax / 32258.0f;
      const float inverse = 1.0f / scale;
      for (uint32_t i = 0; i < kBlock; ++i) {
        float y = x[i] * inverse;
        y = y < 32258.0f ? y : 32258.0f;
        y = y > -32258.0f ? y : -32258.0f;
        out[i] = static_cast<int16_t>(static_cast<int32_t>((y + 12582912.0f) - 12582912.0f));
      }
    }
    scales[b] = scale;
    sums[b] = V::split_query(out, numbers + size_t(b) * kBlock);
  }
}

template <class V>
void scores_q8(const void *query, uint32_t n, const uint8_t *page, uint32_t d, uint32_t begin, uint32_t end,
               const uint8_t *next, float *scores, float *) {
  const QueryQ8<V> q(query, n, d);
  const uint32_t blocks = d / kBlock;
  for (uint32_t j = begin / kTile8 * kTile8; j < end; j += kTile8) {
    const uint8_t *tile = page + j / kTile8 * q8_bytes(kTile8, d);
    const uint16_t *tile_scales = reinterpret_cast<const uint16_t *>(tile + size_t(d) * kTile8);
    by_groups<V::NI>(n, [&]<uint32_t N>(uint32_t i) {
      constexpr uint32_t parts = kTile8 / V::W;
      typename V::T acc[N * parts];
      for (uint32_t r = 0; r < N * parts; ++r) acc[r] = V::zero();
      for (uint32_t b = 0; b < blocks; ++b) {
        if (next && i == 0) fetch<34 * kTile8>(next + (tile - page) + size_t(b) * 34 * kTile8);
        typename V::T products[N * parts]; // integers, rounded
        V::template dot_tile<N>(tile + size_t(b) * kBlock * kTile8, q.numbers + (size_t(i) * blocks + b) * kBlock,
                                size_t(d), q.sums + size_t(i) * blocks + b, blocks, products);
        for (uint32_t l = 0; l < parts; ++l) {
          const typename V::T scale = V::load(tile_scales + b * kTile8 + l * V::W);
          for (uint32_t r = 0; r < N; ++r) {
            const typename V::T both = V::mul(scale, V::set(q.scales[(size_t(i) + r) * blocks + b]));
            acc[r * parts + l] = V::fma(products[r * parts + l], both, acc[r * parts + l]);
          }
        }
      }
      for (uint32_t r = 0; r < N; ++r)
        for (uint32_t l = 0; l < parts; ++l)
          V::store(scores + (i + r) * kAttentionRows + j + l * V::W, acc[r * parts + l]);
    });
  }
}

// ---- softmax -----------------------------------------------------------------------------------------------------

// Sums in 16 lanes, the last ones of a row through a padded buffer.
template <class V> float softmax(float *s, uint32_t n, float max, float *sum) {
  const float lowest = -__builtin_inff();
  constexpr uint32_t parts = 16 / V::W;
  typename V::T top[parts], total[parts];
  alignas(64) float rest[16];
  for (uint32_t l = 0; l < 16; ++l) rest[l] = lowest;
  const uint32_t whole = n / 16 * 16;
  memcpy(rest, s + whole, (n - whole) * sizeof(float));
  for (uint32_t l = 0; l < parts; ++l) top[l] = V::load(rest + l * V::W), total[l] = V::zero();
  for (uint32_t j = 0; j < whole; j += 16)
    for (uint32_t l = 0; l < parts; ++l) top[l] = V::max(V::load(s + j + l * V::W), top[l]);
  alignas(64) float lanes[16];
  for (uint32_t l = 0; l < parts; ++l) V::store(lanes + l * V::W, top[l]);
  for (uint32_t step = 8; step; step /= 2)
    for (uint32_t l = 0; l < step; ++l) lanes[l] = lanes[l] > lanes[l + step] ? lanes[l] : lanes[l + step];
  max = lanes[0] > max ? lanes[0] : max;
  const typename V::T shift = V::set(-max);
  for (uint32_t j = 0; j < whole; j += 16)
    for (uint32_t l = 0; l < parts; ++l) {
      const typename V::T e = V::exp(V::add(V::load(s + j + l * V::W), shift));
      V::store(s + j + l * V::W, e);
      total[l] = V::add(total[l], e);
    }
  if (whole < n) {
    for (uint32_t l = 0; l < parts; ++l) {
      const typename V::T e = V::exp(V::add(V::load(rest + l * V::W), shift)); // 0 where there is no score
      V::store(rest + l * V::W, e);
      total[l] = V::add(total[l], e);
    }
    memcpy(s + whole, rest, (n - whole) * sizeof(float));
  }
  for (uint32_t l = 0; l < parts; ++l) V::store(lanes + l * V::W, total[l]);
  for (uint32_t step = 8; step; step /= 2)
    for (uint32_t l = 0; l < step; ++l) lanes[l] += lanes[l + step];
  *sum = lanes[0];
  return max;
}

template <class V> constexpr AttentionKernels attention_table(const IndexKernels &index) {
  return {
      {store_k_f32<V>, store_v_f32<V>, prepare_float<V>, tiled_scores<V, float>, tiled_values<V, float>},
      {store_k_f16<V>, store_v_f16<V>, prepare_float<V>, tiled_scores<V, uint16_t>, tiled_values<V, uint16_t>},
      {store_k_q8<V>, store_v_q8<V>, prepare_q8<V>, scores_q8<V>, values_q8<V>},
      softmax<V>,
      index,
  };
}

} // namespace
} // namespace apu::cpu
