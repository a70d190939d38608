// Matrices of quantised types times many rows, at the AVX2 level. Eight weight rows at a time are taken apart into a
// panel: a register holds four consecutive bytes of each of the eight rows, so that one broadcast of four activations
// meets all of them and integer sums need no shuffles. Four panels (32 rows) stay in L2 while all activations pass,
// four rows of them at a time. A lane of the canonical sum is block b mod 8, hence a panel keeps its blocks in that
// order and adds up one lane after the other: the same bits as avx2.cpp.
#if defined(__AVX2__)

#include "avx2.h"
#include "avx2_formats.h"

namespace apu::cpu::avx2 {

namespace {

constexpr uint32_t kPanelRows = 8;
constexpr uint32_t kRows = 4; // activations at a time
constexpr uint32_t kMaxPanels = 4;
constexpr size_t kPanelsBytes = 256 << 10;
constexpr size_t kBlockBytes = 256 + 4 * 32; // values, scales and three tables of a block of eight rows

uint32_t groups_of(uint32_t k) {
  return (k + 255) / 256;
}
size_t panel_bytes(uint32_t k) {
  return size_t{groups_of(k)} * kGroup * kBlockBytes;
}
uint32_t panels_of(uint32_t k) {
  const size_t fit = kPanelsBytes / panel_bytes(k);
  return fit < 1 ? 1 : fit < kMaxPanels ? static_cast<uint32_t>(fit) : kMaxPanels;
}

// Block b of a row is at position (b % 8) * groups + b / 8 of every table; (8) means a value for each of eight rows.
struct Panel {
  uint8_t *values; // (blocks, 8, 8, 4) four bytes of each row
  float *scale;    // (blocks, 8) ws
  uint8_t *first;  // (blocks, 8) wm, or the integer scales of both halves as int16
  uint8_t *second; // (blocks, 8) the integer minima of both halves as int16
  uint8_t *third;  // (blocks, 8) their scale

  Panel(void *memory, uint32_t groups) {
    const size_t blocks = size_t{groups} * kGroup;
    values = static_cast<uint8_t *>(memory);
    scale = reinterpret_cast<float *>(values + 256 * blocks);
    first = values + (256 + 32) * blocks;
    second = values + (256 + 64) * blocks;
    third = values + (256 + 96) * blocks;
  }
};

APU_INLINE void transpose(__m256i *r) { // 8 x 8 int32
  __m256i t[8], u[8];
#pragma GCC unroll 8
  for (uint32_t i = 0; i < 4; ++i) {
    t[2 * i] = _mm256_unpacklo_epi32(r[2 * i], r[2 * i + 1]);
    t[2 * i + 1] = _mm256_unpackhi_epi32(r[2 * i], r[2 * i + 1]);
  }
#pragma GCC unroll 2
  for (uint32_t i = 0; i < 8; i += 4) {
    u[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
    u[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
    u[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
    u[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
#pragma GCC unroll 8
  for (uint32_t i = 0; i < 4; ++i) {
    r[i] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x20);
    r[i + 4] = _mm256_permute2x128_si256(u[i], u[i + 4], 0x31);
  }
}

APU_INLINE void store32(void *p, __m256i v) {
  _mm256_storeu_si256(static_cast<__m256i *>(p), v);
}

// r: one register a row, a lane a block of the group; to a table with a register a block.
APU_INLINE void store_table(__m256i *r, uint8_t *table, uint32_t groups, uint32_t group) {
  transpose(r);
  for (uint32_t b = 0; b < kGroup; ++b) store32(table + 32 * (size_t{b} * groups + group), r[b]);
}

template <class Format> APU_INLINE void fill_group(const Matrix &w, uint32_t n, uint32_t group, const Panel &panel) {
  const uint32_t groups = groups_of(w.k), left = w.k / 32 - group * kGroup, count = left < kGroup ? left : kGroup;
  const uint8_t *p = w.data + n * w.row_stride + size_t{group} * Format::kGroupBytes;
  __m256i row[kPanelRows];
  const auto fill = [&](uint8_t *table, auto field) __attribute__((always_inline)) {
    for (uint32_t r = 0; r < kPanelRows; ++r) row[r] = field(Format(p + r * w.row_stride, count));
    store_table(row, table, groups, group);
  };
  fill(reinterpret_cast<uint8_t *>(panel.scale), [](const Format &f) { return _mm256_castps_si256(f.d); });
  if constexpr (Format::kMinimum) fill(panel.first, [](const Format &f) { return _mm256_castps_si256(f.minimum()); });
  if constexpr (Format::kHalfScales) fill(panel.first, [](const Format &f) { return f.scales; });
  if constexpr (Format::kHalfMinima) {
    fill(panel.second, [](const Format &f) { return f.minima; });
    fill(panel.third, [](const Format &f) { return _mm256_castps_si256(f.m); });
  }

  for (uint32_t i = 0; i < 4; ++i) {
    __m256i second[kPanelRows];
    for (uint32_t r = 0; r < kPanelRows; ++r) {
      const Pair pair = Format::pair(p + r * w.row_stride, count, i);
      row[r] = pair.first;
      second[r] = pair.second;
    }
    transpose(row);
    transpose(second);
    for (uint32_t j = 0; j < 8; ++j) { // the high 128 bits were those of block i + 4
      uint8_t *block = panel.values + 256 * (size_t{i + j / 4 * 4} * groups + group) + 32 * (j % 4);
      store32(block, row[j]);
      store32(block + 128, second[j]);
    }
  }
}

template <class Format> void fill_panel(const Matrix &w, uint32_t n, const Panel &panel) {
  for (uint32_t g = 0; g < groups_of(w.k); ++g) fill_group<Format>(w, n, g, panel);
}

// Keeps a sum or a pointer where it is: compilers otherwise regroup the additions and the address arithmetic of a whole
// block, run out of registers and double the time.
APU_INLINE void pin(__m256i &v) {
  __asm__("" : "+x"(v));
}
APU_INLINE void pin(const int8_t *&p) {
  __asm__("" : "+r"(p));
}

APU_INLINE __m256i broadcast4(const int8_t *q) {
  int32_t v;
  std::memcpy(&v, q, sizeof v);
  return _mm256_set1_epi32(v);
}

// Of the scales of both halves as int16, one of them twice.
APU_INLINE __m256i repeat_half(__m256i scales, uint32_t half) {
  if (half == 0)
    return _mm256_or_si256(_mm256_slli_epi32(scales, 16), _mm256_and_si256(scales, _mm256_set1_epi32(0xffff)));
  return _mm256_or_si256(_mm256_srli_epi32(scales, 16), _mm256_andnot_si256(_mm256_set1_epi32(0xffff), scales));
}

// Integer sums of one block of eight rows with kCount rows of activations, sub-block scales folded in. q: the block's
// first half in each row, its second half 32 bytes on.
template <class Format, uint32_t kCount>
APU_INLINE void block_sums(const uint8_t *w, __m256i scales, const int8_t *const *q, __m256i *out) {
  constexpr uint32_t kRun = Format::kBits == 6 ? 2 : Format::kBits == 5 || Format::kHalfScales ? 4 : 8;
  const __m256i one = _mm256_set1_epi16(1);
  __m256i narrow[kCount]; // int16 sums, widened after kRun products, before they could overflow
#pragma GCC unroll 8
  for (uint32_t i = 0; i < 8; ++i) {
    const __m256i v = load32(w + 32 * i);
    const uint32_t offset = 4 * (i % 4) + 32 * (i / 4);
    if constexpr (Format::kSigned) {
      const __m256i magnitude = _mm256_abs_epi8(v);
#pragma GCC unroll 8
      for (uint32_t t = 0; t < kCount; ++t) {
        const __m256i pairs = _mm256_maddubs_epi16(magnitude, _mm256_sign_epi8(broadcast4(q[t] + offset), v));
        const __m256i wide = _mm256_madd_epi16(pairs, one);
        out[t] = i == 0 ? wide : _mm256_add_epi32(out[t], wide);
        pin(out[t]);
      }
    } else {
#pragma GCC unroll 8
      for (uint32_t t = 0; t < kCount; ++t) {
        const __m256i pairs = _mm256_maddubs_epi16(v, broadcast4(q[t] + offset));
        narrow[t] = i % kRun == 0 ? pairs : _mm256_add_epi16(narrow[t], pairs);
        pin(narrow[t]);
      }
      if (i % kRun == kRun - 1) {
        const __m256i widen = Format::kHalfScales ? repeat_half(scales, i / 4) : one;
#pragma GCC unroll 8
        for (uint32_t t = 0; t < kCount; ++t) {
          const __m256i wide = _mm256_madd_epi16(narrow[t], widen);
          out[t] = i < kRun ? wide : _mm256_add_epi32(out[t], wide);
          pin(out[t]);
        }
      }
    }
  }
}

template <class Format, uint32_t kCount>
void multiply(const Panel &panel, uint32_t groups, uint32_t blocks, const ActBlocks &a, uint32_t t0, float *y,
              size_t y_stride) {
  __m256 lane[kGroup][kCount];
  const size_t row = size_t{t0} * a.blocks; // in blocks
  for (uint32_t l = 0; l < kGroup; ++l) {
    __m256 acc[kCount];
#pragma GCC unroll 8
    for (uint32_t t = 0; t < kCount; ++t) acc[t] = _mm256_setzero_ps();
    for (uint32_t b = l, g = 0; b < blocks; b += kGroup, ++g) {
      const size_t at = size_t{l} * groups + g;
      const int8_t *q[kCount];
#pragma GCC unroll 8
      for (uint32_t t = 0; t < kCount; ++t) {
        q[t] = a.q + 32 * (row + size_t{t} * a.blocks + b - l) + 64 * (l % 4) + 16 * (l / 4);
        pin(q[t]);
      }
      const __m256i scales = Format::kHalfScales ? load32(panel.first + 32 * at) : _mm256_setzero_si256();
      __m256i sum[kCount];
      block_sums<Format, kCount>(panel.values + 256 * at, scales, q, sum);
      const __m256 scale = _mm256_loadu_ps(panel.scale + 8 * at);
#pragma GCC unroll 8
      for (uint32_t t = 0; t < kCount; ++t) {
        const size_t i = row + size_t{t} * a.blocks + b;
        const __m256 d = _mm256_set1_ps(a.d[i]);
        if constexpr (Format::kBias != 0) {
          int32_t halves; // both int16 sums
          std::memcpy(&halves, reinterpret_cast<const int16_t *>(a.sum16 + 2 * (i - b)) + 2 * b, sizeof halves);
          const __m256i weight = Format::kHalfScales ? scales : _mm256_set1_epi16(1);
          const __m256i biased = _mm256_madd_epi16(_mm256_set1_epi32(halves), weight);
          sum[t] = _mm256_sub_epi32(sum[t], _mm256_slli_epi32(biased, Format::kBias));
        }
        acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(sum[t]), _mm256_mul_ps(scale, d), acc[t]);
        if constexpr (Format::kMinimum)
          acc[t] = _mm256_fmadd_ps(_mm256_castsi256_ps(load32(panel.first + 32 * at)), _mm256_set1_ps(a.s[i]), acc[t]);
        if constexpr (Format::kHalfMinima) {
          int32_t halves;
          std::memcpy(&halves, reinterpret_cast<const int16_t *>(a.sum16 + 2 * (i - b)) + 2 * b, sizeof halves);
          const __m256i least = _mm256_madd_epi16(_mm256_set1_epi32(halves), load32(panel.second + 32 * at));
          const __m256 m = _mm256_castsi256_ps(load32(panel.third + 32 * at));
          acc[t] = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(least), _mm256_mul_ps(m, d), acc[t]);
        }
      }
    }
#pragma GCC unroll 8
    for (uint32_t t = 0; t < kCount; ++t) lane[l][t] = acc[t];
  }
  for (uint32_t t = 0; t < kCount; ++t) {
    const __m256 even = _mm256_add_ps(_mm256_add_ps(lane[0][t], lane[4][t]), _mm256_add_ps(lane[2][t], lane[6][t]));
    const __m256 odd = _mm256_add_ps(_mm256_add_ps(lane[1][t], lane[5][t]), _mm256_add_ps(lane[3][t], lane[7][t]));
    _mm256_storeu_ps(y + t * y_stride, _mm256_add_ps(even, odd));
  }
}

struct Gemm {
  const Matrix &w;
  const ActBlocks &a;
  uint32_t rows, begin, end; // end - begin a multiple of kPanelRows
  float *y;
  size_t y_stride;
  void *work;

  template <class Format> void operator()() const {
    const uint32_t groups = groups_of(w.k), blocks = w.k / 32, panels = panels_of(w.k);
    const auto panel = [&](uint32_t i) { return Panel(static_cast<uint8_t *>(work) + i * panel_bytes(w.k), groups); };
    for (uint32_t n = begin; n < end; n += panels * kPanelRows) {
      const uint32_t left = (end - n) / kPanelRows, count = left < panels ? left : panels;
      for (uint32_t i = 0; i < count; ++i) fill_panel<Format>(w, n + i * kPanelRows, panel(i));
      uint32_t t = 0;
      float *out = y + (n - begin);
      for (; t + kRows <= rows; t += kRows)
        for (uint32_t i = 0; i < count; ++i)
          multiply<Format, kRows>(panel(i), groups, blocks, a, t, out + t * y_stride + i * kPanelRows, y_stride);
      for (; t < rows; ++t)
        for (uint32_t i = 0; i < count; ++i)
          multiply<Format, 1>(panel(i), groups, blocks, a, t, out + t * y_stride + i * kPanelRows, y_stride);
    }
  }
};

} // namespace

size_t gemm_work_bytes(uint32_t k) {
  return panels_of(k) * panel_bytes(k);
}

void gemm(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
          void *work) {
  with_format(w.dtype, Gemm{w, a, rows, begin, end, y, y_stride, work});
}

} // namespace apu::cpu::avx2

#endif
