// Float types and exact precision at the AVX2 level: two registers are the 16 lanes of kernels.h, four rows of
// activations share a pass over a weight row. The last k mod 16 elements are added lane by lane, which leaves the other
// lanes untouched as the canonical order asks. Quantised types and F8_E4M3 are dequantised into `work` first, a row at
// a time.
#if defined(__AVX2__)

#include <immintrin.h>

#include <cstring>

#include "../include/apu.h"
#include "../quant/fp8.h"
#include "../quant/unpack.h"
#include "../quant/visit.h"
#include "avx2.h"
#include "avx2_formats.h"

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

// Sixteen E4M3 bytes as F16, divided by 256; see quant/fp8.h.
__m256i e4m3_halves(__m128i bytes) {
  const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(bytes), 8);
  const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16(static_cast<short>(0xbf80)));
  const __m256i magnitude = _mm256_and_si256(half, _mm256_set1_epi16(0x3f80));
  return _mm256_or_si256(half, _mm256_cmpeq_epi16(magnitude, _mm256_set1_epi16(0x3f80))); // NaN
}

void dequantize_e4m3(const uint8_t *in, uint32_t k, float *out) {
  const __m256 unit = _mm256_set1_ps(quant::kE4M3Unit);
  uint32_t i = 0;
  for (; i + 16 <= k; i += 16) {
    const __m256i half = e4m3_halves(_mm_loadu_si128(reinterpret_cast<const __m128i *>(in + i)));
    _mm256_storeu_ps(out + i, _mm256_mul_ps(unit, _mm256_cvtph_ps(_mm256_castsi256_si128(half))));
    _mm256_storeu_ps(out + i + 8, _mm256_mul_ps(unit, _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1))));
  }
  for (; i < k; ++i) out[i] = quant::e4m3_to_f32(in[i]);
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

// `count` blocks of a group: (ws * sc) * q, then the minimum, each rounded, as quant::dequantize_row.
template <class Format> void dequantize_group(const uint8_t *p, uint32_t count, float *out) {
  const Place at = place<Format>(p, count);
  const Format format(at);
  alignas(32) float scale[2][kGroup], add[2][kGroup] = {}; // of first and second halves
  for (uint32_t h = 0; h < 2; ++h) {
    const auto half = [h](__m256i pairs) { // int16 pairs to the one of this half, as float
      return _mm256_cvtepi32_ps(_mm256_srai_epi32(h ? pairs : _mm256_slli_epi32(pairs, 16), 16));
    };
    __m256 s = format.d;
    if constexpr (Format::kHalfScales) s = _mm256_mul_ps(s, half(format.scales));
    _mm256_store_ps(scale[h], s);
    if constexpr (Format::kMinimum) _mm256_store_ps(add[h], format.minimum());
    if constexpr (Format::kHalfMinima) _mm256_store_ps(add[h], _mm256_mul_ps(format.minimum(), half(format.minima)));
  }
  alignas(32) uint8_t bytes[32 * kGroup]; // in the order of activations
#pragma GCC unroll 8
  for (uint32_t i = 0; i < 8; ++i) {
    const __m256i v = Format::quad(at, i / 4).half[i / 2 % 2][i % 2];
    _mm256_store_si256(reinterpret_cast<__m256i *>(bytes + 32 * i), v);
  }
  for (uint32_t b = 0; b < count; ++b)
    for (uint32_t i = 0; i < 4; ++i) { // eight elements each
      const __m128i eight = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(bytes + quad_offset(b) + 32 * i));
      const __m256i q = Format::kSigned ? _mm256_cvtepi8_epi32(eight) : _mm256_cvtepu8_epi32(eight);
      const __m256i value = _mm256_sub_epi32(q, _mm256_set1_epi32(Format::kBias ? 1 << Format::kBias : 0));
      __m256 v = _mm256_mul_ps(_mm256_set1_ps(scale[i / 2][b]), _mm256_cvtepi32_ps(value));
      if constexpr (Format::kMinimum || Format::kHalfMinima) v = _mm256_add_ps(v, _mm256_set1_ps(add[i / 2][b]));
      _mm256_storeu_ps(out + 32 * b + 8 * i, v);
    }
}

struct DequantizeRow {
  const uint8_t *in;
  uint32_t k;
  float *out;

  template <class Format> void operator()() const {
    const uint8_t *p = in;
    for (uint32_t b = 0; b < k / 32; b += kGroup, p += Format::kGroupBytes)
      dequantize_group<Format>(p, k / 32 - b < kGroup ? k / 32 - b : kGroup, out + 32 * b);
  }
};

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
  case APU_F8_E4M3: return dequantize_e4m3(in, k, out);
  default:
    if (has_format(dtype)) return with_format(dtype, DequantizeRow{in, k, out});
    quant::with_block_type(dtype, [=]<class B>() { quant::dequantize_row<B>(in, k, out); });
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
      auto *row = static_cast<float *>(work);
      dequantize_row(w.dtype, w.data + n * w.row_stride, w.k, row);
      quant::scale_e4m3_row(w.scales.dtype, w.scales.of_row(n), w.scales.block_columns, w.k, row);
      dot_any<F32>(static_cast<const uint8_t *>(work), x, x_stride, rows, w.k, y + (n - begin), y_stride);
    }
  }
}

} // namespace apu::cpu::avx2

#endif
