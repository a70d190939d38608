// AVX2 level: quantisation of activations, matrices of quantised types, and the level's table.
// Few rows read a matrix once from memory, in order, group by group (avx2_formats.h), and are to be no slower than a
// plain read; many rows are avx2_gemm.cpp's.
#include "kernels.h"

#if defined(__AVX2__)

#include "../quant/activations.h"
#include "avx2.h"
#include "avx2_formats.h"

namespace apu::cpu::avx2 {

namespace {

constexpr uint32_t kRows = 8;     // activations that share one pass over a weight row
constexpr uint32_t kGemmRows = 9; // from here on avx2_gemm.cpp is faster

// This level's layout of ActBlocks: in a group of 256 activations, block b's first half at 64 (b % 4) + 16 (b / 4) and
// its second half 32 further; sums as int16, two a block, at the start of the row's part of sum16.
ActGroup act_row(const ActBlocks &a, uint32_t t) {
  const size_t b = size_t{t} * a.blocks;
  return {a.q + 32 * b, a.d + b, a.s + b, reinterpret_cast<const int16_t *>(a.sum16 + 2 * b)};
}

template <class Format> float dot_one(const uint8_t *row, uint32_t blocks, const ActGroup &first) {
  ActGroup a = first;
  __m256 acc = _mm256_setzero_ps();
  for (; blocks >= kGroup; blocks -= kGroup) {
    acc = add_group<Format>(row, kGroup, a, acc);
    row += Format::kGroupBytes;
    a = {a.q + kGroup * 32, a.d + kGroup, a.s + kGroup, a.sums + 2 * kGroup};
  }
  if constexpr (!Format::kSuperblock) acc = add_rest<Format>(row, blocks, a, acc);
  return sum8(acc);
}

template <class Format>
void dot_some(const uint8_t *row, uint32_t blocks, const ActBlocks &a, uint32_t first, uint32_t rows, float *y,
              size_t y_stride) {
  __m256 acc[kRows];
  for (uint32_t t = 0; t < rows; ++t) acc[t] = _mm256_setzero_ps();
  for (uint32_t b = 0; b < blocks; b += kGroup, row += Format::kGroupBytes) {
    const Group<Format> group = blocks - b >= kGroup ? Group<Format>(row, kGroup) : Group<Format>(row, blocks - b);
    for (uint32_t t = 0; t < rows; ++t) {
      const ActGroup act = act_row(a, first + t);
      acc[t] = group.add({act.q + 32 * b, act.d + b, act.s + b, act.sums + 2 * b}, acc[t]);
    }
  }
  for (uint32_t t = 0; t < rows; ++t) y[t * y_stride] = sum8(acc[t]);
}

struct MatmulRows {
  const Matrix &w;
  const ActBlocks &a;
  uint32_t rows, begin, end;
  float *y;
  size_t y_stride;

  template <class Format> void operator()() const {
    const uint32_t blocks = w.k / 32;
    for (uint32_t t = 0; t < rows; t += kRows) {
      const uint32_t count = rows - t < kRows ? rows - t : kRows;
      for (uint32_t n = begin; n < end; ++n) {
        const uint8_t *row = w.data + n * w.row_stride;
        float *out = y + t * y_stride + (n - begin);
        if (count == 1)
          *out = dot_one<Format>(row, blocks, act_row(a, t));
        else
          dot_some<Format>(row, blocks, a, t, count, out, y_stride);
      }
    }
  }
};

// 32 activations, the arithmetic of quant::quantize_block in registers.
void quantize_block(const float *x, int8_t *q, float *d, float *s, int32_t *sum16) {
  __m256 v[4];
  __m256i bits[4];
#pragma GCC unroll 4
  for (uint32_t i = 0; i < 4; ++i) {
    v[i] = _mm256_loadu_ps(x + 8 * i);
    bits[i] = _mm256_and_si256(_mm256_castps_si256(v[i]), _mm256_set1_epi32(0x7fffffff));
  }
  const __m256i eight = _mm256_max_epu32(_mm256_max_epu32(bits[0], bits[1]), _mm256_max_epu32(bits[2], bits[3]));
  __m128i top = _mm_max_epu32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
  top = _mm_max_epu32(top, _mm_shuffle_epi32(top, 0x4e));
  top = _mm_max_epu32(top, _mm_shuffle_epi32(top, 0xb1));
  const float amax = _mm_cvtss_f32(_mm_castsi128_ps(top));
  if (!(amax >= quant::kSmallestAmax && amax <= __FLT_MAX__)) { // zero or not finite
    quant::quantize_block(x, 32, q, d, s, sum16);
    return;
  }
  const float scale = amax / 127.0f;
  const __m256 inverse = _mm256_set1_ps(1.0f / scale);
  __m256i n[4];
#pragma GCC unroll 4
  for (uint32_t i = 0; i < 4; ++i) n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse)); // ties to even
  const __m256i packed = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i *>(q), _mm256_permutevar8x32_epi32(packed, order));
  const __m256i halves = _mm256_hadd_epi32(_mm256_add_epi32(n[0], n[1]), _mm256_add_epi32(n[2], n[3]));
  __m128i pair = _mm_add_epi32(_mm256_castsi256_si128(halves), _mm256_extracti128_si256(halves, 1));
  pair = _mm_hadd_epi32(pair, pair);
  _mm_storel_epi64(reinterpret_cast<__m128i *>(sum16), pair);
  *d = scale;
  *s = scale * static_cast<float>(sum16[0] + sum16[1]);
}

} // namespace

void quantize(const float *x, size_t x_stride, uint32_t rows, uint32_t k, const ActBlocks &a) {
  for (uint32_t t = 0; t < rows; ++t) {
    auto *sums = reinterpret_cast<int16_t *>(a.sum16 + size_t{2} * t * a.blocks);
    for (uint32_t b = 0; b < a.blocks; ++b) {
      const size_t i = size_t{t} * a.blocks + b;
      const uint32_t begin = 32 * b, count = begin >= k ? 0 : (k - begin < 32 ? k - begin : 32);
      const float *in = x + t * x_stride + (count ? begin : 0);
      alignas(16) int8_t q[32];
      int32_t sum16[2];
      if (count == 32)
        quantize_block(in, q, a.d + i, a.s + i, sum16);
      else
        quant::quantize_block(in, count, q, a.d + i, a.s + i, sum16);
      int8_t *pair = a.q + 32 * (i - b % kGroup) + 64 * (b % 4) + 16 * (b % kGroup / 4);
      std::memcpy(pair, q, 16);
      std::memcpy(pair + 32, q + 16, 16);
      sums[2 * b] = static_cast<int16_t>(sum16[0]);
      sums[2 * b + 1] = static_cast<int16_t>(sum16[1]);
    }
  }
}

size_t work_bytes(uint32_t k) { // panels, or a dequantised row
  const size_t panels = gemm_work_bytes(k), row = size_t{k} * sizeof(float);
  return panels > row ? panels : row;
}

void matmul(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
            void *work) {
  const uint32_t middle = rows < kGemmRows ? begin : begin + (end - begin) / 8 * 8;
  if (middle > begin) gemm(w, a, rows, begin, middle, y, y_stride, work);
  if (middle < end) with_format(w.dtype, MatmulRows{w, a, rows, middle, end, y + (middle - begin), y_stride});
}

} // namespace apu::cpu::avx2

namespace apu::cpu {

const KernelTable *avx2_table() {
  static const KernelTable table{
      .name = "avx2",
      .quantize = avx2::quantize,
      .matmul = avx2::matmul,
      .matmul_float = avx2::matmul_float,
      .work_bytes = avx2::work_bytes,
      .dequantize_row = avx2::dequantize_row,
      .dot = avx2::dot,
      .dot_f16 = avx2::dot_f16,
      .axpy = avx2::axpy,
      .axpy_f16 = avx2::axpy_f16,
      .scale = avx2::scale,
      .f32_to_f16 = avx2::f32_to_f16,
      .rms_norm = avx2::rms_norm,
      .silu_mul = avx2::silu_mul,
      .gelu_tanh_mul = avx2::gelu_tanh_mul,
      .gelu_erf_mul = avx2::gelu_erf_mul,
      .max = avx2::max,
      .exp_sum = avx2::exp_sum,
  };
  return &table;
}

} // namespace apu::cpu

#else

namespace apu::cpu {

const KernelTable *avx2_table() {
  return nullptr;
}

} // namespace apu::cpu

#endif
