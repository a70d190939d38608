// Matrices of quantised types times many rows, at the AVX2 level. Eight weight rows at a time are taken apart into a
// panel: a register holds four consecutive bytes of each of the eight rows, so that one broadcast of four activations
// meets all of them and integer sums need no shuffles. Four panels (32 rows) stay in L2 while all activations pass,
// four rows of them at a time. A lane of the canonical sum is block b mod 8, hence a panel keeps its blocks in that
// order and adds up one lane after the other: the same bits as avx2_matvec.cpp. Compiled once for each variant, see
// avx2.h.
#include "avx2.h"

#if defined(__AVX2__)

#include "avx2_codebooks.h"
#include "avx2_formats.h"

namespace apu::cpu::APU_AVX2 {

namespace {

constexpr uint32_t kPanelRows = kGemmColumns;
constexpr uint32_t kPanels = 2, kRows = kGemmRows; // panels and activations at a time: eight sums in registers
constexpr uint32_t kMaxPanels = 4;
constexpr size_t kPanelsBytes = 256 << 10;
constexpr size_t kBlockBytes = 256 + 5 * 32; // values and tables of a block of eight rows

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
  uint8_t *values;  // (blocks, 8, 8, 4) four bytes of each row
  float *scale;     // (blocks, 8) ws
  float *minimum;   // (blocks, 8) wm
  uint8_t *half[2]; // (blocks, 8) the scale of a half: an int16 twice (Scales::integers) or a float
  uint8_t *minima;  // (blocks, 8, 2) the integer minima of both halves, int16

  Panel() = default;
  Panel(void *memory, uint32_t groups) {
    const size_t blocks = size_t{groups} * kGroup;
    values = static_cast<uint8_t *>(memory);
    scale = reinterpret_cast<float *>(values + 256 * blocks);
    minimum = scale + 8 * blocks;
    half[0] = values + (256 + 2 * 32) * blocks;
    half[1] = values + (256 + 3 * 32) * blocks;
    minima = values + (256 + 4 * 32) * blocks;
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

// r: one register a row, a lane a block of the group; to a table with a register a block.
APU_INLINE void store_table(__m256i *r, void *table, uint32_t groups, uint32_t group) {
  transpose(r);
  auto *to = static_cast<uint8_t *>(table);
  for (uint32_t b = 0; b < kGroup; ++b) store32(to + 32 * (size_t{b} * groups + group), r[b]);
}

// Quad j of eight rows.
void store_values(__m256i (&rows)[4][kPanelRows], uint32_t j, const Panel &panel, uint32_t groups, uint32_t group) {
  for (uint32_t i = 0; i < 4; ++i) {
    transpose(rows[i]);
    for (uint32_t c = 0; c < 8; ++c) { // four elements of block
      const uint32_t b = 2 * j + c / 4 * 4 + c % 4 / 2, step = 2 * i + c % 2;
      store32(panel.values + 256 * (size_t{b} * groups + group) + 32 * step, rows[i][c]);
    }
  }
}

APU_INLINE __m256i half_scale(__m256i twice) {
  if constexpr (!kVnni) return twice;
  return _mm256_castps_si256(_mm256_cvtepi32_ps(_mm256_srai_epi32(twice, 16)));
}

template <class Format> void fill_group(const Matrix &w, uint32_t n, uint32_t group, const Panel &panel) {
  const uint32_t groups = groups_of(w.k), left = w.k / 32 - group * kGroup, count = left < kGroup ? left : kGroup;
  const uint8_t *p = w.data + n * w.row_stride + size_t{group} * Format::kGroupBytes;
  __m256i row[kPanelRows];
  const auto fill = [&](void *table, auto field) __attribute__((always_inline)) {
    for (uint32_t r = 0; r < kPanelRows; ++r) row[r] = field(Format(place<Format>(p + r * w.row_stride, count)));
    store_table(row, table, groups, group);
  };
  fill(panel.scale, [](const Format &f) { return _mm256_castps_si256(f.d); });
  if constexpr (Format::kMinimum || Format::kHalfMinima)
    fill(panel.minimum, [](const Format &f) { return _mm256_castps_si256(f.minimum()); });
  if constexpr (Format::kHalfScales) {
    fill(panel.half[0], [](const Format &f) { return half_scale(split_halves(f.scales).first); });
    fill(panel.half[1], [](const Format &f) { return half_scale(split_halves(f.scales).second); });
  }
  if constexpr (Format::kHalfMinima) fill(panel.minima, [](const Format &f) { return f.minima; });

  for (uint32_t j = 0; j < 2; ++j) {
    __m256i rows[4][kPanelRows]; // a half's elements 0..7, 8..15
    for (uint32_t r = 0; r < kPanelRows; ++r) {
      const Quad quad = Format::quad(place<Format>(p + r * w.row_stride, count), j);
#pragma GCC unroll 4
      for (uint32_t i = 0; i < 4; ++i) rows[i][r] = quad.half[i / 2][i % 2];
    }
    store_values(rows, j, panel, groups, group);
  }
}

// Eight rows of a type of avx2_codebooks.h.
void store_unpacked(const Unpacked (&rows)[kPanelRows], bool half_scales, const Panel &panel, uint32_t groups,
                    uint32_t group) {
  __m256i row[kPanelRows];
  const auto fill = [&](void *table, auto field) {
    for (uint32_t r = 0; r < kPanelRows; ++r) row[r] = _mm256_castps_si256(field(rows[r]));
    store_table(row, table, groups, group);
  };
  fill(panel.scale, [](const Unpacked &u) { return u.ws; });
  for (uint32_t h = 0; h < 2 && half_scales; ++h) fill(panel.half[h], [=](const Unpacked &u) { return u.half[h]; });
  for (uint32_t j = 0; j < 2; ++j) {
    __m256i values[4][kPanelRows];
    for (uint32_t r = 0; r < kPanelRows; ++r)
      for (uint32_t i = 0; i < 4; ++i) values[i][r] = load32(rows[r].q + 128 * j + 32 * i);
    store_values(values, j, panel, groups, group);
  }
}

template <class B> void fill_group_of_codes(const Matrix &w, uint32_t n, uint32_t group, const Panel &panel) {
  using Type = quant::Traits<B>;
  const uint32_t groups = groups_of(w.k), left = w.k / 32 - group * kGroup, count = left < kGroup ? left : kGroup;
  const uint8_t *p = w.data + n * w.row_stride + size_t{group} * (kGroup / Type::blocks32) * Type::bytes;
  Unpacked rows[kPanelRows];
  for (uint32_t r = 0; r < kPanelRows; ++r) Codes<B>::unpack(p + r * w.row_stride, count, rows[r]);
  store_unpacked(rows, Codes<B>::kHalfScales, panel, groups, group);
}

// Keeps a sum where it is: compilers otherwise regroup the additions of a whole block, run out of registers and double
// the time.
APU_INLINE void pin(__m256i &v) {
  __asm__("" : "+x"(v));
}

// Where kRows rows of activations stand, from the same block on. All lie a multiple of the row's floats apart, so the
// registers hold the multiples and the arrays' ends instead of a pointer per row and array.
struct Rows {
  const char *q, *d, *s16, *s, *sum16;
  size_t stride[kRows]; // bytes of s; the others have 8, 2, 2 and 2 times as many

  APU_INLINE Rows(const ActBlocks &a, uint32_t row) {
    const ActBlocks first = a.from(row);
    q = reinterpret_cast<const char *>(first.q);
    d = reinterpret_cast<const char *>(first.d);
    s16 = reinterpret_cast<const char *>(first.s16);
    s = reinterpret_cast<const char *>(first.s);
    sum16 = reinterpret_cast<const char *>(first.sum16);
#pragma GCC unroll 8
    for (uint32_t t = 0; t < kRows; ++t) stride[t] = size_t{t} * a.blocks * sizeof(float);
  }
  APU_INLINE void next(uint32_t lane, size_t group) { // blocks of a lane, then of the next groups
    q += quad_offset(lane) + 256 * group;
    d += 4 * lane + 64 * group;
    s16 += 4 * lane + 64 * group;
    s += 4 * lane + 32 * group;
    sum16 += 4 * lane + 64 * group;
  }
};

APU_INLINE __m256i broadcast4(const char *p) {
  int32_t v;
  std::memcpy(&v, p, sizeof v);
  return _mm256_set1_epi32(v);
}
APU_INLINE __m256 broadcast_float(const char *p) {
  return _mm256_castsi256_ps(broadcast4(p));
}

enum class Scales { none, integers, floats }; // of halves

// What the multiplication needs to know of a type: many have the same.
template <bool Signed, int Bias, bool Minimum, Scales Half, bool HalfMinima> struct Shape {
  static constexpr bool kSigned = Signed, kMinimum = Minimum, kHalfMinima = HalfMinima;
  static constexpr Scales kHalfScales = Half;
  static constexpr int kBias = Bias;
};
constexpr Scales scales_of(bool has, bool floats) {
  return !has ? Scales::none : floats ? Scales::floats : Scales::integers;
}
template <class F>
using ShapeOf = Shape<F::kSigned, F::kBias, F::kMinimum, scales_of(F::kHalfScales, kVnni), F::kHalfMinima>;
template <class F>
using ShapeOfCodes = Shape<F::kSigned, F::kSigned ? 0 : kCodeBias, false, scales_of(F::kHalfScales, true), false>;

// One half of block `at` of eight weight rows a panel, with kRows rows of activations: its integers, the half's scale
// folded in, as floats.
template <class S>
APU_INLINE void half_sums(const Panel (&panel)[kPanels], size_t at, uint32_t half, const Rows &a,
                          __m256 (&out)[kPanels][kRows]) {
  constexpr bool kSigned = S::kSigned && !kVnni;
  constexpr int kBias = S::kSigned ? kSignedBias : S::kBias;
  __m256i scale[kPanels], factor[kPanels], sum[kPanels][kRows]; // factor: as two int16
#pragma GCC unroll 2
  for (uint32_t p = 0; p < kPanels; ++p) {
    if constexpr (S::kHalfScales != Scales::none) scale[p] = load32(panel[p].half[half] + 32 * at);
    factor[p] = S::kHalfScales == Scales::integers ? scale[p] : _mm256_set1_epi16(1);
  }
  const auto sums16 = [&](uint32_t t)
                          __attribute__((always_inline)) { return broadcast4(a.sum16 + 2 * a.stride[t] + 32 * half); };
  if constexpr (kVnni) {
#pragma GCC unroll 8
    for (uint32_t t = 0; t < kRows; ++t) {
      const __m256i start = kBias ? minus_bias32<kBias>(sums16(t)) : _mm256_setzero_si256();
#pragma GCC unroll 2
      for (uint32_t p = 0; p < kPanels; ++p) sum[p][t] = start;
    }
  }
#pragma GCC unroll 4
  for (uint32_t i = 0; i < 4; ++i) {
    __m256i v[kPanels], magnitude[kPanels];
#pragma GCC unroll 2
    for (uint32_t p = 0; p < kPanels; ++p) {
      v[p] = load32(panel[p].values + 256 * at + 128 * half + 32 * i);
      magnitude[p] = kSigned ? _mm256_abs_epi8(v[p]) : v[p];
    }
#pragma GCC unroll 8
    for (uint32_t t = 0; t < kRows; ++t) {
      const __m256i q = broadcast4(a.q + 8 * a.stride[t] + 64 * half + 32 * (i / 2) + 4 * (i % 2));
#pragma GCC unroll 2
      for (uint32_t p = 0; p < kPanels; ++p) {
        __m256i &to = sum[p][t];
        if constexpr (kVnni) {
          to = dpbusd(to, v[p], q);
        } else if constexpr (kSigned) {
          const __m256i pairs = _mm256_maddubs_epi16(magnitude[p], _mm256_sign_epi8(q, v[p]));
          const __m256i wide = _mm256_madd_epi16(pairs, factor[p]);
          to = i == 0 ? wide : _mm256_add_epi32(to, wide);
        } else {
          const __m256i pairs = _mm256_maddubs_epi16(magnitude[p], q);
          to = i == 0 ? pairs : _mm256_add_epi16(to, pairs); // may wrap until the bias is out
        }
        pin(to);
      }
    }
  }
#pragma GCC unroll 8
  for (uint32_t t = 0; t < kRows; ++t)
#pragma GCC unroll 2
    for (uint32_t p = 0; p < kPanels; ++p) {
      __m256i v = sum[p][t];
      if constexpr (!kVnni && !kSigned) {
        if constexpr (kBias != 0) v = _mm256_sub_epi16(v, bias16<kBias>(sums16(t)));
        v = _mm256_madd_epi16(v, factor[p]);
      }
      out[p][t] = _mm256_cvtepi32_ps(v);
      if constexpr (S::kHalfScales == Scales::floats)
        out[p][t] = _mm256_mul_ps(out[p][t], _mm256_castsi256_ps(scale[p]));
    }
}

// Two neighbouring panels times kRows rows of activations from t0 on; `columns` of the results are wanted.
template <class S>
void multiply(const Panel (&panel)[kPanels], uint32_t groups, uint32_t blocks, const ActBlocks &a, uint32_t t0,
              uint32_t columns, float *y, size_t y_stride) {
  __m256 lane[kGroup][kPanels][kRows];
  for (uint32_t l = 0; l < kGroup; ++l) {
    __m256 acc[kPanels][kRows];
#pragma GCC unroll 2
    for (uint32_t p = 0; p < kPanels; ++p)
#pragma GCC unroll 8
      for (uint32_t t = 0; t < kRows; ++t) acc[p][t] = _mm256_setzero_ps();
    Rows act(a, t0);
    act.next(l, 0);
    size_t at = size_t{l} * groups;
    for (uint32_t b = l; b < blocks; b += kGroup, ++at, act.next(0, 1)) {
      __m256 first[kPanels][kRows], second[kPanels][kRows];
      half_sums<S>(panel, at, 0, act, first);
#pragma GCC unroll 8
      for (uint32_t t = 0; t < kRows; ++t) {
        const __m256 d = broadcast_float(act.d + 2 * act.stride[t]);
#pragma GCC unroll 2
        for (uint32_t p = 0; p < kPanels; ++p) first[p][t] = _mm256_mul_ps(first[p][t], d);
      }
      half_sums<S>(panel, at, 1, act, second);
#pragma GCC unroll 8
      for (uint32_t t = 0; t < kRows; ++t) {
        const __m256 d = broadcast_float(act.d + 2 * act.stride[t] + 32);
#pragma GCC unroll 2
        for (uint32_t p = 0; p < kPanels; ++p) second[p][t] = _mm256_fmadd_ps(second[p][t], d, first[p][t]);
      }
#pragma GCC unroll 2
      for (uint32_t p = 0; p < kPanels; ++p) {
        const __m256 scale = _mm256_loadu_ps(panel[p].scale + 8 * at);
#pragma GCC unroll 8
        for (uint32_t t = 0; t < kRows; ++t) acc[p][t] = _mm256_fmadd_ps(scale, second[p][t], acc[p][t]);
        if constexpr (S::kMinimum) {
          const __m256 minimum = _mm256_loadu_ps(panel[p].minimum + 8 * at);
#pragma GCC unroll 8
          for (uint32_t t = 0; t < kRows; ++t)
            acc[p][t] = _mm256_fmadd_ps(minimum, broadcast_float(act.s + act.stride[t]), acc[p][t]);
        }
        if constexpr (S::kHalfMinima) {
          const __m256 minimum = _mm256_loadu_ps(panel[p].minimum + 8 * at);
          const Halves m = widen_halves(load32(panel[p].minima + 32 * at));
          const __m256 m0 = _mm256_cvtepi32_ps(m.first), m1 = _mm256_cvtepi32_ps(m.second);
#pragma GCC unroll 8
          for (uint32_t t = 0; t < kRows; ++t) {
            const char *s = act.s16 + 2 * act.stride[t];
            const __m256 v = _mm256_fmadd_ps(m1, broadcast_float(s + 32), _mm256_mul_ps(m0, broadcast_float(s)));
            acc[p][t] = _mm256_fmadd_ps(minimum, v, acc[p][t]);
          }
        }
      }
    }
#pragma GCC unroll 2
    for (uint32_t p = 0; p < kPanels; ++p)
#pragma GCC unroll 8
      for (uint32_t t = 0; t < kRows; ++t) lane[l][p][t] = acc[p][t];
  }
  for (uint32_t p = 0; p < columns / kPanelRows; ++p)
    for (uint32_t t = 0; t < kRows; ++t) {
      const auto add = [&](uint32_t i, uint32_t j)
                           __attribute__((always_inline)) { return _mm256_add_ps(lane[i][p][t], lane[j][p][t]); };
      const __m256 even = _mm256_add_ps(add(0, 4), add(2, 6)), odd = _mm256_add_ps(add(1, 5), add(3, 7));
      _mm256_storeu_ps(y + t * y_stride + p * kPanelRows, _mm256_add_ps(even, odd));
    }
}

struct Gemm {
  const Matrix &w;
  const ActBlocks &a;
  uint32_t rows, begin, end; // multiples of kRows and kPanelRows
  float *y;
  size_t y_stride;
  void *work;

  template <class S> void run(void (*fill)(const Matrix &, uint32_t, uint32_t, const Panel &)) const {
    const uint32_t groups = groups_of(w.k), panels = panels_of(w.k);
    Panel panel[kMaxPanels];
    for (uint32_t i = 0; i < panels; ++i) panel[i] = Panel(static_cast<uint8_t *>(work) + i * panel_bytes(w.k), groups);
    for (uint32_t n = begin; n < end; n += panels * kPanelRows) {
      const uint32_t left = (end - n) / kPanelRows, count = left < panels ? left : panels;
      for (uint32_t i = 0; i < count; ++i)
        for (uint32_t g = 0; g < groups; ++g) fill(w, n + i * kPanelRows, g, panel[i]);
      for (uint32_t t = 0; t < rows; t += kRows)
        for (uint32_t i = 0; i < count; i += kPanels) {
          const bool two = i + 1 < count; // else the last one stands for both
          multiply<S>({panel[i], panel[two ? i + 1 : i]}, groups, w.k / 32, a, t, two ? 2 * kPanelRows : kPanelRows,
                      y + t * y_stride + (n - begin) + i * kPanelRows, y_stride);
        }
    }
  }
};

} // namespace

size_t gemm_work_bytes(uint32_t k) {
  return panels_of(k) * panel_bytes(k);
}

void gemm(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
          void *work) {
  const Gemm gemm{w, a, rows, begin, end, y, y_stride, work};
  with_format(w.dtype, [&]<class F>() { gemm.run<ShapeOf<F>>(fill_group<F>); });
  with_codes(w.dtype, [&]<class B>() { gemm.run<ShapeOfCodes<Codes<B>>>(fill_group_of_codes<B>); });
}

} // namespace apu::cpu::APU_AVX2

#endif
