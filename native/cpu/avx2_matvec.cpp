// Quantised matrices at the AVX2 levels: quantisation of activations, and products with few rows, which read a matrix
// once from memory, in order, group by group (avx2_formats.h), and are to be no slower than a plain read. Many rows
// are avx2_gemm.cpp's. Compiled once for each variant, see avx2.h.
#include "avx2.h"

#if defined(__AVX2__)

#include "../quant/activations.h"
#include "avx2_codebooks.h"
#include "avx2_formats.h"

namespace apu::cpu::APU_AVX2 {

namespace {

constexpr uint32_t kRows = 8; // activations that share one pass over a weight row

// One group of weights times kCount rows of activations, `stride` blocks apart.
template <class Format, uint32_t kCount>
APU_INLINE void add_rows(const Place &place, const ActGroup &a, size_t stride, __m256 (&acc)[kCount]) {
  if constexpr (kCount == 1) {
    acc[0] = add_group<Format>(place, a, acc[0]);
  } else {
    const Group<Format> group(place);
#pragma GCC unroll 2
    for (uint32_t t = 0; t < kCount; ++t) acc[t] = group.add(a.from(t * stride), acc[t]);
  }
}

// The whole groups of a row of weights.
template <class Format, uint32_t kCount>
APU_INLINE void add_groups(const uint8_t *row, uint32_t groups, ActGroup a, size_t stride, __m256 (&acc)[kCount]) {
  for (uint32_t t = 0; t < kCount; ++t) acc[t] = _mm256_setzero_ps();
  for (uint32_t g = 0; g < groups; ++g, row += Format::kGroupBytes, a.next())
    add_rows<Format>(place<Format>(row), a, stride, acc);
}

template <class Format, uint32_t kCount>
void dot_one(const uint8_t *row, uint32_t blocks, const ActGroup &a, size_t stride, float *y, size_t y_stride) {
  const uint32_t groups = blocks / kGroup, rest = blocks % kGroup;
  __m256 acc[kCount];
  add_groups<Format>(row, groups, a, stride, acc);
  if constexpr (!Format::kSuperblock)
    if (rest)
      add_rows<Format>(place<Format>(row + groups * Format::kGroupBytes, rest), a.from(groups * kGroup), stride, acc);
  for (uint32_t t = 0; t < kCount; ++t) y[t * y_stride] = sum8(acc[t]);
}

// A group of kCount rows of activations whose blocks 4..7 are its blocks 0..3 once more.
template <uint32_t kCount> struct Twice {
  alignas(32) int8_t q[kCount * 32 * kGroup];
  alignas(32) float d[kCount * 2 * kGroup], s16[kCount * 2 * kGroup], s[kCount * kGroup];
  alignas(32) int32_t sum16[kCount * 2 * kGroup];

  Twice(const ActGroup &a, size_t stride) {
    const auto copy = [](const auto *from, auto *to, size_t count) { // of one row
      for (size_t i = 0; i < count; i += 32 / sizeof *to) {
        const __m256i v = load32(from + i);
        store32(to + i, _mm256_permute2x128_si256(v, v, 0));
      }
    };
    for (uint32_t t = 0; t < kCount; ++t) {
      const ActGroup from = a.from(t * stride);
      copy(from.q, q + t * 32 * kGroup, 32 * kGroup);
      copy(from.d, d + t * 2 * kGroup, 2 * kGroup);
      copy(from.s16, s16 + t * 2 * kGroup, 2 * kGroup);
      copy(from.s, s + t * kGroup, kGroup);
      copy(from.sum16, sum16 + t * 2 * kGroup, 2 * kGroup);
    }
  }
  ActGroup group() const { return {q, d, s16, s, sum16}; }
};

// Two neighbouring rows of weights whose last groups have at most four blocks, which are multiplied together.
template <class Format, uint32_t kCount>
void dot_two(const uint8_t *row, size_t row_stride, uint32_t blocks, const ActGroup &a, size_t stride,
             const Twice<kCount> &twice, float *y, size_t y_stride) {
  const uint32_t groups = blocks / kGroup, rest = blocks % kGroup;
  const uint8_t *low = row + groups * Format::kGroupBytes, *high = low + row_stride;
  __m256 first[kCount], second[kCount], both[kCount];
  add_groups<Format>(row, groups, a, stride, first);
  add_groups<Format>(row + row_stride, groups, a, stride, second);
  for (uint32_t t = 0; t < kCount; ++t) both[t] = _mm256_permute2f128_ps(first[t], second[t], 0x20);
  const ActGroup ends = twice.group();
  if (rest == 2) // K = 576
    add_rows<Format>({low, high, 2, 2}, ends, kGroup, both);
  else if (rest == 4)
    add_rows<Format>({low, high, 4, 4}, ends, kGroup, both);
  else
    add_rows<Format>({low, high, rest, rest}, ends, kGroup, both);
  for (uint32_t t = 0; t < kCount; ++t) {
    y[t * y_stride] = sum8(_mm256_blend_ps(first[t], both[t], 0x0f));
    y[t * y_stride + 1] = sum8(_mm256_permute2f128_ps(both[t], second[t], 0x31));
  }
}

// Up to kRows rows of activations.
template <class Format>
void dot_some(const uint8_t *row, uint32_t blocks, const ActGroup &a, size_t stride, uint32_t rows, float *y,
              size_t y_stride) {
  const uint32_t groups = blocks / kGroup, rest = blocks % kGroup;
  __m256 acc[kRows];
  for (uint32_t t = 0; t < rows; ++t) acc[t] = _mm256_setzero_ps();
  const auto add = [&](const Place &place, const ActGroup &from) __attribute__((always_inline)) {
    const Group<Format> group(place);
    for (uint32_t t = 0; t < rows; ++t) acc[t] = group.add(from.from(t * stride), acc[t]);
  };
  for (uint32_t g = 0; g < groups; ++g, row += Format::kGroupBytes) add(place<Format>(row), a.from(g * kGroup));
  if constexpr (!Format::kSuperblock)
    if (rest) add(place<Format>(row, rest), a.from(groups * kGroup));
  for (uint32_t t = 0; t < rows; ++t) y[t * y_stride] = sum8(acc[t]);
}

struct MatmulRows {
  const Matrix &w;
  const ActBlocks &a;
  uint32_t rows, begin, end;
  float *y;
  size_t y_stride;

  template <class Format> void operator()() const {
    for (uint32_t t = 0; t < rows; t += kRows) {
      const uint32_t count = rows - t < kRows ? rows - t : kRows;
      float *out = y + t * y_stride;
      if (count == 1)
        few<Format, 1>(t, out);
      else if (count == 2) // the two terms of one input
        few<Format, 2>(t, out);
      else
        for (uint32_t n = begin; n < end; ++n)
          dot_some<Format>(w.data + n * w.row_stride, w.k / 32, ActGroup(a, size_t{t} * a.blocks), a.blocks, count,
                           out + (n - begin), y_stride);
    }
  }

  template <class Format, uint32_t kCount> void few(uint32_t t0, float *out) const {
    const uint32_t blocks = w.k / 32;
    const ActGroup first(a, size_t{t0} * a.blocks);
    uint32_t n = begin;
    if constexpr (!Format::kSuperblock)
      if (blocks % kGroup >= 1 && blocks % kGroup <= 4) {
        const Twice<kCount> twice(first.from(blocks / kGroup * kGroup), a.blocks);
        for (; n + 2 <= end; n += 2, out += 2)
          dot_two<Format, kCount>(w.data + n * w.row_stride, w.row_stride, blocks, first, a.blocks, twice, out,
                                  y_stride);
      }
    for (; n < end; ++n, ++out)
      dot_one<Format, kCount>(w.data + n * w.row_stride, blocks, first, a.blocks, out, y_stride);
  }
};

// The same for the types of avx2_codebooks.h.
struct MatmulCodes {
  const Matrix &w;
  const ActBlocks &a;
  uint32_t rows, begin, end;
  float *y;
  size_t y_stride;

  template <class B> void operator()() const {
    constexpr size_t kGroupBytes = kGroup / quant::Traits<B>::blocks32 * quant::Traits<B>::bytes;
    const uint32_t blocks = w.k / 32;
    for (uint32_t t0 = 0; t0 < rows; t0 += kRows) {
      const uint32_t count = rows - t0 < kRows ? rows - t0 : kRows;
      for (uint32_t n = begin; n < end; ++n) {
        const uint8_t *row = w.data + n * w.row_stride;
        __m256 acc[kRows];
        for (uint32_t t = 0; t < count; ++t) acc[t] = _mm256_setzero_ps();
        for (uint32_t b = 0; b < blocks; b += kGroup, row += kGroupBytes) {
          Unpacked group;
          Codes<B>::unpack(row, blocks - b < kGroup ? blocks - b : kGroup, group);
          for (uint32_t t = 0; t < count; ++t)
            acc[t] = add_unpacked<B>(group, ActGroup(a, size_t{t0 + t} * a.blocks + b), acc[t]);
        }
        for (uint32_t t = 0; t < count; ++t) y[(t0 + t) * y_stride + (n - begin)] = sum8(acc[t]);
      }
    }
  }
};

// Lane b is the maximum over all lanes of r[b].
APU_INLINE __m256i max_each(const __m256i *r) {
  const auto max = [](__m256i a, __m256i b) __attribute__((always_inline)) { return _mm256_max_epu32(a, b); };
  __m256i four[2];
#pragma GCC unroll 2
  for (uint32_t i = 0; i < 2; ++i) {
    const __m256i *v = r + 4 * i;
    const __m256i a = max(_mm256_unpacklo_epi32(v[0], v[1]), _mm256_unpackhi_epi32(v[0], v[1]));
    const __m256i b = max(_mm256_unpacklo_epi32(v[2], v[3]), _mm256_unpackhi_epi32(v[2], v[3]));
    four[i] = max(_mm256_unpacklo_epi64(a, b), _mm256_unpackhi_epi64(a, b));
  }
  return max(_mm256_permute2x128_si256(four[0], four[1], 0x20), _mm256_permute2x128_si256(four[0], four[1], 0x31));
}

struct HalfScales { // (8) of one half of a group's blocks
  alignas(32) float inverse[kGroup];
  alignas(32) uint32_t keep[kGroup]; // bits of an activation that count: none where a half is not finite
};

// The arithmetic of quant::quantize_half for one half of eight blocks, at x + 32 b: its scales d.
APU_INLINE __m256 half_scales(const float *x, HalfScales &out) {
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i top[kGroup];
#pragma GCC unroll 8
  for (uint32_t b = 0; b < kGroup; ++b)
    top[b] = _mm256_max_epu32(_mm256_and_si256(load32(x + 32 * b), magnitude),
                              _mm256_and_si256(load32(x + 32 * b + 8), magnitude));
  const __m256i bits = max_each(top);
  const __m256i odd = _mm256_cmpgt_epi32(bits, _mm256_set1_epi32(0x7f7fffff)); // infinite or NaN
  const __m256 amax = _mm256_castsi256_ps(bits);
  const __m256 some = _mm256_cmp_ps(amax, _mm256_set1_ps(quant::kSmallestAmax), _CMP_GE_OQ);
  const __m256 d = _mm256_and_ps(some, _mm256_div_ps(amax, _mm256_set1_ps(127.0f)));
  const __m256 inverse = _mm256_and_ps(some, _mm256_div_ps(_mm256_set1_ps(1.0f), d));
  _mm256_store_ps(out.inverse, inverse);
  _mm256_store_si256(reinterpret_cast<__m256i *>(out.keep), _mm256_xor_si256(odd, _mm256_set1_epi32(-1)));
  return _mm256_blendv_ps(d, _mm256_set1_ps(__builtin_nanf("")), _mm256_castsi256_ps(odd));
}

// 16 activations at x to integers, in two registers.
APU_INLINE void round_half(const float *x, const HalfScales &scales, uint32_t b, __m256i *n) {
  const __m256 inverse = _mm256_broadcast_ss(scales.inverse + b);
  const __m256i keep = _mm256_set1_epi32(static_cast<int32_t>(scales.keep[b]));
#pragma GCC unroll 2
  for (uint32_t i = 0; i < 2; ++i) { // ties to even
    const __m256 v = _mm256_castsi256_ps(_mm256_and_si256(load32(x + 8 * i), keep));
    n[i] = _mm256_cvtps_epi32(_mm256_mul_ps(v, inverse));
  }
}

// 256 activations to the group of blocks that begins with block `at`.
void quantize_group(const float *x, const ActBlocks &a, size_t at) {
  __m256 s16[2];
  for (uint32_t h = 0; h < 2; ++h) {
    HalfScales scales;
    const __m256 d = half_scales(x + 16 * h, scales);
    const auto pair = [&](uint32_t i) __attribute__((always_inline)) { // blocks i and i + 4
      __m256i n[4];
      round_half(x + 32 * i + 16 * h, scales, i, n);
      round_half(x + 32 * (i + 4) + 16 * h, scales, i + 4, n + 2);
      const __m256i q = _mm256_packs_epi16(_mm256_packs_epi32(n[0], n[1]), _mm256_packs_epi32(n[2], n[3]));
      return _mm256_permutevar8x32_epi32(q, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    };
    int8_t *q = a.q + 32 * at + 64 * h;
#pragma GCC unroll 2
    for (uint32_t j = 0; j < 2; ++j) {
      const __m256i u = pair(2 * j), v = pair(2 * j + 1);
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(q + 128 * j), _mm256_unpacklo_epi64(u, v));
      _mm256_storeu_si256(reinterpret_cast<__m256i *>(q + 128 * j + 32), _mm256_unpackhi_epi64(u, v));
    }
    const __m256i one = _mm256_set1_epi8(1), ones[2][2] = {{one, one}, {one, one}}, sum = dot_half<false>(ones, q);
    s16[h] = _mm256_mul_ps(d, _mm256_cvtepi32_ps(_mm256_madd_epi16(sum, _mm256_set1_epi16(1))));
    const size_t to = 2 * at + kGroup * h;
    _mm256_storeu_si256(reinterpret_cast<__m256i *>(a.sum16 + to), _mm256_slli_epi16(sum, kSumShift));
    _mm256_storeu_ps(a.d + to, d);
    _mm256_storeu_ps(a.s16 + to, s16[h]);
  }
  _mm256_storeu_ps(a.s + at, _mm256_add_ps(s16[0], s16[1]));
}

void quantize(const float *x, size_t x_stride, uint32_t rows, uint32_t k, const ActBlocks &a) {
  for (uint32_t t = 0; t < rows; ++t)
    for (uint32_t b = 0; b < a.blocks; b += kGroup) {
      const float *in = x + t * x_stride + 32 * b;
      const size_t at = size_t{t} * a.blocks + b;
      if (32 * (b + kGroup) <= k) {
        quantize_group(in, a, at);
      } else { // the last group, zero beyond k
        alignas(32) float part[32 * kGroup] = {};
        std::memcpy(part, in, (k - 32 * b) * sizeof(float));
        quantize_group(part, a, at);
      }
    }
}

size_t work_bytes(uint32_t k) { // panels, or a dequantised row
  const size_t panels = gemm_work_bytes(k), row = size_t{k} * sizeof(float);
  return panels > row ? panels : row;
}

// Few rows of activations, or few of weights.
void matvec(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y,
            size_t y_stride) {
  if (rows == 0 || begin == end) return;
  with_format(w.dtype, MatmulRows{w, a, rows, begin, end, y, y_stride});
  with_codes(w.dtype, MatmulCodes{w, a, rows, begin, end, y, y_stride});
}

void matmul(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
            void *work) {
  const uint32_t many = rows < kManyRows ? 0 : rows / kGemmRows * kGemmRows, few = rows - many;
  const uint32_t middle = begin + (end - begin) / kGemmColumns * kGemmColumns;
  if (many) {
    if (middle > begin) gemm(w, a, many, begin, middle, y, y_stride, work);
    matvec(w, a, many, middle, end, y + (middle - begin), y_stride);
  }
  matvec(w, a.from(many), few, begin, end, y + many * y_stride, y_stride);
}

} // namespace

constinit const Avx2Products products{quantize, matmul, work_bytes};

} // namespace apu::cpu::APU_AVX2

#endif
