// Float types and exact precision at the AVX2 level: two registers are the 16 lanes of kernels.h, four rows of
// activations share a pass over a weight row. The last k mod 16 elements are added lane by lane, which leaves the other
// lanes untouched as the canonical order asks. Quantised types are dequantised into `work` first, a row at a time.
#if defined(__AVX2__)

#include <immintrin.h>

#include <cstring>

#include "../include/apu.h"
#include "../quant/unpack.h"
#include "avx2.h"

namespace apu::cpu::avx2 {

namespace {

constexpr uint32_t kRows = 4;
constexpr uint32_t kLanes = quant::kFloatLanes;
constexpr size_t kTileBytes = 128 << 10; // weights that many rows pass over, within L2

struct F32 {
  static constexpr size_t kBytes = 4;
  static __m256 load8(const uint8_t *p) { return _mm256_loadu_ps(reinterpret_cast<const float *>(p)); }
  static float load1(const uint8_t *p) {
    float f;
    std::memcpy(&f, p, sizeof f);
    return f;
  }
};

struct F16 {
  static constexpr size_t kBytes = 2;
  static __m256 load8(const uint8_t *p) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
  }
  static float load1(const uint8_t *p) { return quant::load_f16(p); }
};

struct BF16 {
  static constexpr size_t kBytes = 2;
  static __m256 load8(const uint8_t *p) {
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p)));
    return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
  }
  static float load1(const uint8_t *p) { return quant::bf16_to_f32(quant::load16(p)); }
};

float sum16(__m256 low, __m256 high) {
  const __m256 v = _mm256_add_ps(low, high);
  const __m128 four = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)));
}

template <class W> float finish(const uint8_t *w, const float *x, uint32_t rest, __m256 low, __m256 high) {
  if (rest == 0) return sum16(low, high);
  alignas(32) float lane[kLanes];
  _mm256_store_ps(lane, low);
  _mm256_store_ps(lane + 8, high);
  for (uint32_t i = 0; i < rest; ++i) lane[i] = __builtin_fmaf(W::load1(w + i * W::kBytes), x[i], lane[i]);
  return sum16(_mm256_load_ps(lane), _mm256_load_ps(lane + 8));
}

// One weight row times kCount rows of activations.
template <class W, uint32_t kCount>
void dot_rows(const uint8_t *w, const float *x, size_t x_stride, uint32_t k, float *y, size_t y_stride) {
  __m256 low[kCount], high[kCount];
  for (uint32_t t = 0; t < kCount; ++t) low[t] = high[t] = _mm256_setzero_ps();
  const uint32_t full = k / kLanes * kLanes;
  for (uint32_t i = 0; i < full; i += kLanes) {
    const __m256 a = W::load8(w + i * W::kBytes), b = W::load8(w + (i + 8) * W::kBytes);
#pragma GCC unroll 4
    for (uint32_t t = 0; t < kCount; ++t) {
      low[t] = _mm256_fmadd_ps(a, _mm256_loadu_ps(x + t * x_stride + i), low[t]);
      high[t] = _mm256_fmadd_ps(b, _mm256_loadu_ps(x + t * x_stride + i + 8), high[t]);
    }
  }
#pragma GCC unroll 4
  for (uint32_t t = 0; t < kCount; ++t)
    y[t * y_stride] = finish<W>(w + full * W::kBytes, x + t * x_stride + full, k - full, low[t], high[t]);
}

template <class W>
void dot_any(const uint8_t *w, const float *x, size_t x_stride, uint32_t rows, uint32_t k, float *y, size_t y_stride) {
  uint32_t t = 0;
  for (; t + kRows <= rows; t += kRows)
    dot_rows<W, kRows>(w, x + t * x_stride, x_stride, k, y + t * y_stride, y_stride);
  for (; t < rows; ++t) dot_rows<W, 1>(w, x + t * x_stride, x_stride, k, y + t * y_stride, y_stride);
}

template <class W>
void matmul_plain(const Matrix &w, const float *x, size_t x_stride, uint32_t rows, uint32_t begin, uint32_t end,
                  float *y, size_t y_stride) {
  const size_t fit = kTileBytes / w.row_stride;
  const uint32_t tile = rows <= kRows || fit >= end - begin ? end - begin : static_cast<uint32_t>(fit ? fit : 1);
  for (uint32_t n0 = begin; n0 < end; n0 += tile) {
    const uint32_t n1 = end - n0 < tile ? end : n0 + tile;
    for (uint32_t t = 0; t < rows; t += kRows)
      for (uint32_t n = n0; n < n1; ++n)
        dot_any<W>(w.data + n * w.row_stride, x + t * x_stride, x_stride, rows - t < kRows ? rows - t : kRows, w.k,
                   y + t * y_stride + (n - begin), y_stride);
  }
}

} // namespace

void dequantize_row(uint32_t dtype, const uint8_t *in, uint32_t k, float *out) {
  switch (dtype) {
  case APU_F32: std::memcpy(out, in, size_t{k} * sizeof(float)); break;
  case APU_F16: {
    uint32_t i = 0;
    for (; i + 8 <= k; i += 8) _mm256_storeu_ps(out + i, F16::load8(in + 2 * size_t{i}));
    for (; i < k; ++i) out[i] = F16::load1(in + 2 * size_t{i});
    break;
  }
  case APU_BF16: {
    uint32_t i = 0;
    for (; i + 8 <= k; i += 8) _mm256_storeu_ps(out + i, BF16::load8(in + 2 * size_t{i}));
    for (; i < k; ++i) out[i] = BF16::load1(in + 2 * size_t{i});
    break;
  }
  case APU_Q4_0: quant::dequantize_row<quant::Q4_0>(in, k, out); break;
  case APU_Q4_1: quant::dequantize_row<quant::Q4_1>(in, k, out); break;
  case APU_Q5_0: quant::dequantize_row<quant::Q5_0>(in, k, out); break;
  case APU_Q5_1: quant::dequantize_row<quant::Q5_1>(in, k, out); break;
  case APU_Q8_0: quant::dequantize_row<quant::Q8_0>(in, k, out); break;
  case APU_Q2_K: quant::dequantize_row<quant::Q2_K>(in, k, out); break;
  case APU_Q3_K: quant::dequantize_row<quant::Q3_K>(in, k, out); break;
  case APU_Q4_K: quant::dequantize_row<quant::Q4_K>(in, k, out); break;
  case APU_Q5_K: quant::dequantize_row<quant::Q5_K>(in, k, out); break;
  case APU_Q6_K: quant::dequantize_row<quant::Q6_K>(in, k, out); break;
  default: break;
  }
}

void matmul_float(const Matrix &w, const float *x, size_t x_stride, uint32_t rows, uint32_t begin, uint32_t end,
                  float *y, size_t y_stride, void *work) {
  switch (w.dtype) {
  case APU_F32: return matmul_plain<F32>(w, x, x_stride, rows, begin, end, y, y_stride);
  case APU_F16: return matmul_plain<F16>(w, x, x_stride, rows, begin, end, y, y_stride);
  case APU_BF16: return matmul_plain<BF16>(w, x, x_stride, rows, begin, end, y, y_stride);
  default:
    for (uint32_t n = begin; n < end; ++n) {
      dequantize_row(w.dtype, w.data + n * w.row_stride, w.k, static_cast<float *>(work));
      dot_any<F32>(static_cast<const uint8_t *>(work), x, x_stride, rows, w.k, y + (n - begin), y_stride);
    }
  }
}

} // namespace apu::cpu::avx2

#endif
