// Matrices of float types, and of quantised types at "exact" precision: element k of a dot product goes to lane
// k mod 16 by fma, lanes are added by sum16, whatever the number of rows, so few and many rows agree bit for bit.
// Few rows read the weights where they lie, two weight rows together, or four where activations do not fit L1 (8%
// faster at K = 9,728). For many, weights are first converted to a tile of float32 in `work` (it stays in L2), 4 x 6
// outputs share their loads, and the sums of 16 x 6 outputs rest in L1 between stretches of K, so that six rows of
// activations stay there too.
#include "avx2.h"
#include "avx512.h"
#include "avx512_common.h"

#ifdef APU_AVX512

#include "../include/apu.h"
#include "../quant/fp8.h"
#include "avx512_fp8.h"

namespace apu::cpu::avx512 {
namespace {

constexpr uint32_t kTileRows = 16;
constexpr uint32_t kFewRows = 4;
constexpr uint32_t kActRows = 6;

template <uint32_t Dtype> constexpr size_t kElementBytes = Dtype == APU_F32 ? 4 : 2;

// Sixteen elements from the i-th of a row, or those in mask.
template <uint32_t Dtype> APU_INLINE __m512 load16(const uint8_t *row, size_t i) {
  const uint8_t *p = row + i * kElementBytes<Dtype>;
  if constexpr (Dtype == APU_F32) return _mm512_loadu_ps(p);
  if constexpr (Dtype == APU_F16) return _mm512_cvtph_ps(load256(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(load256(p)), 16));
}
template <uint32_t Dtype> APU_INLINE __m512 load16(const uint8_t *row, size_t i, __mmask16 mask) {
  const uint8_t *p = row + i * kElementBytes<Dtype>;
  if constexpr (Dtype == APU_F32) return _mm512_maskz_loadu_ps(mask, p);
  const __m256i halves = _mm256_maskz_loadu_epi16(mask, p);
  if constexpr (Dtype == APU_F16) return _mm512_cvtph_ps(halves);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

// acc (T, W) += x (T, k) times W rows, lane by lane.
template <uint32_t Dtype, int W, int T>
APU_INLINE void add_dots(const uint8_t *w, size_t w_stride, const float *x, size_t x_stride, uint32_t k,
                         __m512 (&acc)[T][W]) {
  uint32_t j = 0;
  __m512 weights[W];
#pragma GCC unroll 1
  for (; j + 16 <= k; j += 16) {
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) weights[i] = load16<Dtype>(w + i * w_stride, j);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const __m512 v = _mm512_loadu_ps(x + t * x_stride + j);
#pragma GCC unroll 8
      for (int i = 0; i < W; i++) acc[t][i] = _mm512_fmadd_ps(weights[i], v, acc[t][i]);
    }
  }
  if (j < k) {
    const auto mask = static_cast<__mmask16>(low_mask(static_cast<int>(k - j)));
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) weights[i] = load16<Dtype>(w + i * w_stride, j, mask);
#pragma GCC unroll 8
    for (int t = 0; t < T; t++) {
      const __m512 v = _mm512_maskz_loadu_ps(mask, x + t * x_stride + j);
#pragma GCC unroll 8
      for (int i = 0; i < W; i++) acc[t][i] = _mm512_mask3_fmadd_ps(weights[i], v, acc[t][i], mask);
    }
  }
}

// y (T, W) = x (T, k) times W rows, `apart` rows from each other; kAhead bytes of each are prefetched past the caches
// that they would only displace others from.
constexpr int kAhead = 1024;
template <uint32_t Dtype, int W, int T>
APU_INLINE void dots(const uint8_t *w, size_t w_stride, const float *x, size_t x_stride, uint32_t k, float *y,
                     size_t y_stride, uint32_t apart) {
  constexpr uint32_t kPart = 128 / kElementBytes<Dtype>; // elements of two lines
  __m512 acc[T][W];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) acc[t][i] = _mm512_setzero_ps();
  uint32_t j = 0;
  const size_t distance = apart * w_stride;
#pragma GCC unroll 1
  for (; j + kPart <= k; j += kPart) {
    const uint8_t *p = w + j * kElementBytes<Dtype>;
    for (int i = 0; i < W; i++)
      for (int line = 0; line < 2; line++)
        _mm_prefetch(reinterpret_cast<const char *>(p) + i * distance + kAhead + 64 * line, _MM_HINT_NTA);
#pragma GCC unroll 4
    for (uint32_t part = 0; part < kPart; part += 16)
      add_dots<Dtype, W, T>(p + part * kElementBytes<Dtype>, distance, x + j + part, x_stride, 16, acc);
  }
  add_dots<Dtype, W, T>(w + j * kElementBytes<Dtype>, distance, x + j, x_stride, k - j, acc);
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) y[t * y_stride + i * apart] = sum16(acc[t][i]);
}

// W rows of the matrix at a time, in streams of as many rows each.
template <uint32_t Dtype, int W, int T>
APU_INLINE void streams(const uint8_t *w, size_t w_stride, uint32_t n, const float *x, size_t x_stride, uint32_t k,
                        float *y, size_t y_stride) {
  const uint32_t each = n / W;
  for (uint32_t i = 0; i < each; i++)
    dots<Dtype, W, T>(w + i * w_stride, w_stride, x, x_stride, k, y + i, y_stride, each);
  for (uint32_t i = W * each; i < n; i++)
    dots<Dtype, 1, T>(w + i * w_stride, w_stride, x, x_stride, k, y + i, y_stride, 1);
}

constexpr uint32_t kL1Columns = 6144; // a row of more activations comes from L2, as many bytes as two rows of weights

template <uint32_t Dtype, int T>
__attribute__((noinline)) void few_rows(const uint8_t *w, size_t w_stride, uint32_t n, const float *x, size_t x_stride,
                                        uint32_t k, float *y, size_t y_stride) {
  if constexpr (T == 1 && Dtype != APU_F32)
    if (k > kL1Columns) return streams<Dtype, 4, T>(w, w_stride, n, x, x_stride, k, y, y_stride);
  streams<Dtype, 2, T>(w, w_stride, n, x, x_stride, k, y, y_stride);
}

constexpr uint32_t kCopyRows = 16; // from here on a tile of float32 weights is worth its copy
constexpr uint32_t kStretch = 512; // of K, 12 KB of six rows of activations

template <int W, int T>
APU_INLINE void add_stretch(const uint8_t *w, size_t w_stride, const float *x, size_t x_stride, uint32_t k, bool first,
                            float *sums) {
  __m512 acc[T][W];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) acc[t][i] = first ? _mm512_setzero_ps() : _mm512_load_ps(sums + (t * W + i) * 16);
  add_dots<APU_F32, W, T>(w, w_stride, x, x_stride, k, acc);
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) _mm512_store_ps(sums + (t * W + i) * 16, acc[t][i]);
}

// The same for all of K.
template <int W, int T>
APU_INLINE void whole_dots(const uint8_t *w, size_t w_stride, const float *x, size_t x_stride, uint32_t k, float *y,
                           size_t y_stride) {
  __m512 acc[T][W];
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) acc[t][i] = _mm512_setzero_ps();
  add_dots<APU_F32, W, T>(w, w_stride, x, x_stride, k, acc);
#pragma GCC unroll 8
  for (int t = 0; t < T; t++)
#pragma GCC unroll 8
    for (int i = 0; i < W; i++) y[t * y_stride + i] = sum16(acc[t][i]);
}

template <int T>
__attribute__((noinline)) void block_rows(const uint8_t *w, size_t w_stride, uint32_t n, const float *x,
                                          size_t x_stride, uint32_t k, float *y, size_t y_stride) {
  const uint32_t fours = n / 4;
  if (k <= kStretch) {
    for (uint32_t i = 0; i < fours; i++)
      whole_dots<4, T>(w + 4 * i * w_stride, w_stride, x, x_stride, k, y + 4 * i, y_stride);
    for (uint32_t i = 4 * fours; i < n; i++)
      whole_dots<1, T>(w + i * w_stride, w_stride, x, x_stride, k, y + i, y_stride);
    return;
  }
  alignas(64) float sums[kTileRows * T * 16]; // fours of matrix rows, then what is left, one by one
  for (uint32_t j = 0; j < k; j += kStretch) {
    const uint32_t count = k - j < kStretch ? k - j : kStretch;
    const uint8_t *part = w + size_t{j} * 4;
    for (uint32_t i = 0; i < fours; i++)
      add_stretch<4, T>(part + 4 * i * w_stride, w_stride, x + j, x_stride, count, j == 0, sums + i * 4 * T * 16);
    for (uint32_t i = 4 * fours; i < n; i++)
      add_stretch<1, T>(part + i * w_stride, w_stride, x + j, x_stride, count, j == 0, sums + i * T * 16);
  }
  for (uint32_t t = 0; t < T; t++)
    for (uint32_t i = 0; i < n; i++) {
      const uint32_t at = i < 4 * fours ? (i / 4 * T + t) * 4 + i % 4 : i * T + t;
      y[t * y_stride + i] = sum16(_mm512_load_ps(sums + at * 16));
    }
}

// All activations times n rows of float32, which stay in L2.
void tile_rows(const uint8_t *w, size_t w_stride, uint32_t n, const float *x, size_t x_stride, uint32_t rows,
               uint32_t k, float *y, size_t y_stride) {
  for (uint32_t t = 0; t < rows; t += kActRows, x += kActRows * x_stride, y += kActRows * y_stride) {
    switch (rows - t) {
    case 1: block_rows<1>(w, w_stride, n, x, x_stride, k, y, y_stride); break;
    case 2: block_rows<2>(w, w_stride, n, x, x_stride, k, y, y_stride); break;
    case 3: block_rows<3>(w, w_stride, n, x, x_stride, k, y, y_stride); break;
    case 4: block_rows<4>(w, w_stride, n, x, x_stride, k, y, y_stride); break;
    case 5: block_rows<5>(w, w_stride, n, x, x_stride, k, y, y_stride); break;
    default: block_rows<6>(w, w_stride, n, x, x_stride, k, y, y_stride); break;
    }
  }
}

template <uint32_t Dtype>
void few_rows_type(const uint8_t *w, size_t w_stride, uint32_t n, const float *x, size_t x_stride, uint32_t rows,
                   uint32_t k, float *y, size_t y_stride) {
  switch (rows) {
  case 1: return few_rows<Dtype, 1>(w, w_stride, n, x, x_stride, k, y, y_stride);
  case 2: return few_rows<Dtype, 2>(w, w_stride, n, x, x_stride, k, y, y_stride);
  case 3: return few_rows<Dtype, 3>(w, w_stride, n, x, x_stride, k, y, y_stride);
  default: return few_rows<Dtype, 4>(w, w_stride, n, x, x_stride, k, y, y_stride);
  }
}

template <uint32_t Dtype> void convert_row(const uint8_t *in, uint32_t k, float *out) {
  uint32_t i = 0;
  for (; i + 16 <= k; i += 16) _mm512_storeu_ps(out + i, load16<Dtype>(in, i));
  if (i < k) {
    const auto mask = static_cast<__mmask16>(low_mask(static_cast<int>(k - i)));
    _mm512_mask_storeu_ps(out + i, mask, load16<Dtype>(in, i, mask));
  }
}

} // namespace

void dequantize_row(uint32_t dtype, const uint8_t *in, uint32_t k, float *out) {
  switch (dtype) {
  case APU_F32: return convert_row<APU_F32>(in, k, out);
  case APU_F16: return convert_row<APU_F16>(in, k, out);
  case APU_BF16: return convert_row<APU_BF16>(in, k, out);
  case APU_F8_E4M3: return convert_e4m3(in, nullptr, 0, 0, k, out);
  default: return avx2::dequantize_row(dtype, in, k, out);
  }
}

size_t float_work_bytes(uint32_t k) {
  return (size_t{k} + 15) / 16 * 64 * kTileRows + 64 + 4096;
}

void matmul_float(const Matrix &w, const float *x, size_t x_stride, uint32_t rows, uint32_t begin, uint32_t end,
                  float *y, size_t y_stride, void *work) {
  const uint8_t *data = w.data + begin * w.row_stride;
  if (rows <= kFewRows) {
    switch (w.dtype) {
    case APU_F32: return few_rows_type<APU_F32>(data, w.row_stride, end - begin, x, x_stride, rows, w.k, y, y_stride);
    case APU_F16: return few_rows_type<APU_F16>(data, w.row_stride, end - begin, x, x_stride, rows, w.k, y, y_stride);
    case APU_BF16: return few_rows_type<APU_BF16>(data, w.row_stride, end - begin, x, x_stride, rows, w.k, y, y_stride);
    default: break;
    }
    if (w.dtype == APU_F8_E4M3 && has_whole_blocks(w)) return few_e4m3(w, x, x_stride, rows, begin, end, y, y_stride);
  }
  // Rows are often a multiple of 4096 bytes apart, so that the stretches of all of them share half of L1's sets: the
  // tile takes the other half than the activations.
  const uintptr_t from = (reinterpret_cast<uintptr_t>(work) + 63) & ~uintptr_t{63};
  const uintptr_t away = (reinterpret_cast<uintptr_t>(x) + 4 * kStretch - from) % 4096 & ~uintptr_t{63};
  auto *tile = reinterpret_cast<float *>(from + away);
  const size_t tile_stride = (size_t{w.k} + 15) / 16 * 16;
  for (uint32_t n = begin; n < end; n += kTileRows, data += kTileRows * w.row_stride, y += kTileRows) {
    const uint32_t count = end - n < kTileRows ? end - n : kTileRows;
    if (w.dtype == APU_F32 && rows < kCopyRows) {
      tile_rows(data, w.row_stride, count, x, x_stride, rows, w.k, y, y_stride);
      continue;
    }
    for (uint32_t i = 0; i < count; i++) {
      float *row = tile + i * tile_stride;
      if (w.dtype == APU_F8_E4M3)
        convert_e4m3(data + i * w.row_stride, w.scales.of_row(n + i), w.scales.dtype, w.scales.block_columns, w.k, row);
      else
        dequantize_row(w.dtype, data + i * w.row_stride, w.k, row);
    }
    tile_rows(reinterpret_cast<const uint8_t *>(tile), 4 * tile_stride, count, x, x_stride, rows, w.k, y, y_stride);
  }
}

} // namespace apu::cpu::avx512

#endif
