// F8_E4M3 at the AVX-512 level: rows as float32, and products of up to four rows of activations that read the weights
// where they lie, in the order of every float type (lane k mod 16). Sixteen bytes become halves by two shifts, an "and"
// and a blend for NaN (quant/fp8.h), then floats, then weights by one multiplication with their block's scale.
// Included by avx512_float.cpp alone.
#pragma once

#include "../quant/fp8.h"
#include "avx512.h"
#include "avx512_common.h"

namespace apu::cpu::avx512 {
namespace {

APU_INLINE __m512 e4m3_units(__m128i bytes) { // values / 256
  const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  const __m128i magnitude = _mm_and_si128(bytes, _mm_set1_epi8(0x7f));
  const __mmask16 nan = _mm_cmpeq_epi8_mask(magnitude, _mm_set1_epi8(0x7f));
  return _mm512_cvtph_ps(_mm256_mask_blend_epi16(nan, half, _mm256_set1_epi16(0x7e00)));
}

APU_INLINE __m512 block_scale(uint32_t dtype, const uint8_t *scales, uint32_t block) {
  return _mm512_set1_ps(quant::kE4M3Unit * (scales ? quant::load_scale(dtype, scales, block) : 1.0f));
}

// A row as weights; `scales` null: all are 1.
inline void convert_e4m3(const uint8_t *in, const uint8_t *scales, uint32_t dtype, uint32_t columns, uint32_t k,
                         float *out) {
  if (!scales) columns = k;
  for (uint32_t i = 0, b = 0; i < k; b++) {
    const __m512 scale = block_scale(dtype, scales, b);
    const uint32_t end = k - i > columns ? i + columns : k;
    for (; i + 16 <= end; i += 16) _mm512_storeu_ps(out + i, _mm512_mul_ps(e4m3_units(load128(in + i)), scale));
    if (i < end) {
      const auto mask = static_cast<__mmask16>(low_mask(static_cast<int>(end - i)));
      const __m512 v = e4m3_units(_mm_maskz_loadu_epi8(mask, in + i));
      _mm512_mask_storeu_ps(out + i, mask, _mm512_mul_ps(v, scale));
      i = end;
    }
  }
}

// Whether lanes keep their place from one block to the next.
inline bool has_whole_blocks(const Matrix &w) {
  return !w.scales.data || w.scales.block_columns % 16 == 0 || w.scales.block_columns >= w.k;
}

// y (T, W) = x (T, k) times rows n, n + apart, ... of the matrix.
template <int W, int T>
APU_INLINE void e4m3_dots(const Matrix &w, uint32_t n, uint32_t apart, const float *x, size_t x_stride, float *y,
                          size_t y_stride) {
  constexpr int kAhead = 1024; // bytes of each row to be prefetched, past the caches that they would only displace from
  const uint8_t *rows[W], *scales[W];
#pragma GCC unroll 8
  for (int i = 0; i < W; i++) {
    const uint32_t row = n + static_cast<uint32_t>(i) * apart;
    rows[i] = w.data + row * w.row_stride;
    scales[i] = w.scales.of_row(row);
  }
  const uint32_t k = w.k, columns = w.scales.data ? w.scales.block_columns : k;
  __m512 acc[T][W], scale[W];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) acc[t][i] = _mm512_setzero_ps();
  for (uint32_t j = 0, b = 0; j < k; b++) {
    const uint32_t end = k - j > columns ? j + columns : k;
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) scale[i] = block_scale(w.scales.dtype, scales[i], b);
#pragma GCC unroll 4
    for (; j + 16 <= end; j += 16) {
      if (j % 64 == 0)
        for (int i = 0; i < W; i++) _mm_prefetch(reinterpret_cast<const char *>(rows[i]) + j + kAhead, _MM_HINT_NTA);
      __m512 weights[W];
#pragma GCC unroll 8
      for (int i = 0; i < W; i++) weights[i] = _mm512_mul_ps(e4m3_units(load128(rows[i] + j)), scale[i]);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        const __m512 v = _mm512_loadu_ps(x + t * x_stride + j);
#pragma GCC unroll 8
        for (int i = 0; i < W; i++) acc[t][i] = _mm512_fmadd_ps(weights[i], v, acc[t][i]);
      }
    }
    if (j < end) { // the last of the row
      const auto mask = static_cast<__mmask16>(low_mask(static_cast<int>(end - j)));
      for (int i = 0; i < W; i++) {
        const __m512 weights = _mm512_mul_ps(e4m3_units(_mm_maskz_loadu_epi8(mask, rows[i] + j)), scale[i]);
        for (int t = 0; t < T; t++)
          acc[t][i] =
              _mm512_mask3_fmadd_ps(weights, _mm512_maskz_loadu_ps(mask, x + t * x_stride + j), acc[t][i], mask);
      }
      j = end;
    }
  }
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) y[t * y_stride + static_cast<uint32_t>(i) * apart] = sum16(acc[t][i]);
}

// Rows [begin, end) in two streams.
template <int T>
__attribute__((noinline)) void e4m3_rows(const Matrix &w, const float *x, size_t x_stride, uint32_t begin, uint32_t end,
                                         float *y, size_t y_stride) {
  const uint32_t each = (end - begin) / 2;
  for (uint32_t i = 0; i < each; i++) e4m3_dots<2, T>(w, begin + i, each, x, x_stride, y + i, y_stride);
  for (uint32_t i = 2 * each; i < end - begin; i++) e4m3_dots<1, T>(w, begin + i, 1, x, x_stride, y + i, y_stride);
}

inline void few_e4m3(const Matrix &w, const float *x, size_t x_stride, uint32_t rows, uint32_t begin, uint32_t end,
                     float *y, size_t y_stride) {
  switch (rows) {
  case 1: return e4m3_rows<1>(w, x, x_stride, begin, end, y, y_stride);
  case 2: return e4m3_rows<2>(w, x, x_stride, begin, end, y, y_stride);
  case 3: return e4m3_rows<3>(w, x, x_stride, begin, end, y, y_stride);
  default: return e4m3_rows<4>(w, x, x_stride, begin, end, y, y_stride);
  }
}

} // namespace
} // namespace apu::cpu::avx512
