// Quantised matrix times 1 to 8 rows of activations: bound by memory, every weight byte is read once, one row of
// the matrix after the other (several rows at a time defeat the prefetcher: 50-60% of the read limit).
// Each group of eight 32-blocks is unpacked once and multiplied with all T rows. The activations are first copied to
// `work` in the order in which the type's bytes unpack, K bytes per row and call.
#include "avx512.h"
#include "avx512_group.h"

#ifdef APU_AVX512

#include "../include/apu.h"

namespace apu::cpu::avx512 {
namespace {

// Activations of one call, packed: per row y (groups * 256), d, s, c (groups * 8 each).
struct Packed {
  const int8_t *y;
  const float *d;
  const float *s;
  const int32_t *c;
  size_t groups; // per row
};

size_t groups_of(uint32_t k) {
  return (k + kGroup - 1) / kGroup;
}
constexpr size_t kGroupBytes = kGroup + 3 * kLanes * 4;

template <class B> Packed pack(const ActBlocks &a, uint32_t rows, uint32_t k, void *work) {
  using G = Group<B>;
  const size_t groups = groups_of(k);
  auto *y = reinterpret_cast<int8_t *>((reinterpret_cast<uintptr_t>(work) + 63) & ~uintptr_t{63});
  auto *d = reinterpret_cast<float *>(y + rows * groups * kGroup);
  auto *s = d + rows * groups * kLanes;
  auto *c = reinterpret_cast<int32_t *>(s + rows * groups * kLanes);
  const Packed packed{y, d, s, c, groups};
  for (uint32_t t = 0; t < rows; t++) {
    const size_t first = size_t{t} * a.blocks;
    for (size_t g = 0; g < groups; g++, y += kGroup, d += kLanes, s += kLanes, c += kLanes) {
      const size_t at = first + g * kLanes;
      for (int b = 0; b < 8; b++)
        for (int h = 0; h < 2; h++)
          _mm_store_si128(reinterpret_cast<__m128i *>(y + piece_offset<G::kOrder>(b, h)),
                          load128(a.q + (at + b) * kBlock + 16 * h));
      _mm256_store_ps(d, _mm256_loadu_ps(a.d + at));
      // K-quants subtract their minimum, kept positive in the group
      const __m256 sums = _mm256_loadu_ps(a.s + at);
      _mm256_store_ps(s, Traits<B>::elements == kSuperblock ? _mm256_sub_ps(_mm256_setzero_ps(), sums) : sums);
      const int32_t *halves = a.sum16 + 2 * at;
      if constexpr (Traits<B>::sub_block == 16) {
        int16_t words[16];
        for (int i = 0; i < 16; i++) words[i] = static_cast<int16_t>(-halves[i]);
        memcpy(c, words, sizeof words);
      } else {
        const int offset = sizeof(B) == sizeof(Q8_0) ? 128 : Traits<B>::offset;
        for (int b = 0; b < 8; b++) c[b] = -offset * (halves[2 * b] + halves[2 * b + 1]);
      }
    }
  }
  return packed;
}

template <class B, int T, bool Masked, int Quads>
APU_INLINE void step(const uint8_t *p, const typename Group<B>::Tail &tail, const Packed &a, size_t g, __m256 *acc) {
  const auto w = Group<B>::template load<Masked, Quads>(p, tail);
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
    const size_t at = t * a.groups + g;
    const __m256i integers = w.template dot<Quads>(a.y + at * kGroup, a.c + at * kLanes);
    acc[t] =
        _mm256_fmadd_ps(_mm256_cvtepi32_ps(integers), _mm256_mul_ps(w.ws, _mm256_load_ps(a.d + at * kLanes)), acc[t]);
    if constexpr (Traits<B>::minimum == Minimum::per_half)
      acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(w.minimums(a.c + at * kLanes)),
                               _mm256_mul_ps(w.wm, _mm256_load_ps(a.d + at * kLanes)), acc[t]);
    if constexpr (Group<B>::kMin) acc[t] = _mm256_fmadd_ps(w.wm, _mm256_load_ps(a.s + at * kLanes), acc[t]);
  }
}

template <class B, int T>
__attribute__((noinline)) void rows(const Matrix &w, const Packed &a, uint32_t begin, uint32_t end, float *y,
                                    size_t y_stride) {
  using G = Group<B>;
  const size_t full = w.k / kGroup;
  const int rest = static_cast<int>(w.k % kGroup / kBlock); // blocks of the last group; 0 for K-quants
  const auto tail = G::tail(rest);
  const uint8_t *row = w.data + begin * w.row_stride;
  for (uint32_t n = begin; n < end; n++, row += w.row_stride) {
    __m256 acc[T];
    for (int t = 0; t < T; t++) acc[t] = _mm256_setzero_ps();
    const uint8_t *p = row;
#pragma GCC unroll 1
    for (size_t g = 0; g < full; g++, p += G::kBytes) step<B, T, false, 2>(p, tail, a, g, acc);
    if constexpr (Traits<B>::elements == kBlock) {
      if (rest > 4)
        step<B, T, true, 2>(p, tail, a, full, acc);
      else if (rest > 0)
        step<B, T, true, 1>(p, tail, a, full, acc);
    }
    for (int t = 0; t < T; t++) y[t * y_stride + (n - begin)] = sum8(acc[t]);
  }
}

template <class B>
void matvec_type(const Matrix &w, const ActBlocks &a, uint32_t count, uint32_t begin, uint32_t end, float *y,
                 size_t y_stride, void *work) {
  const Packed packed = pack<B>(a, count, w.k, work);
  switch (count) {
  case 1: return rows<B, 1>(w, packed, begin, end, y, y_stride);
  case 2: return rows<B, 2>(w, packed, begin, end, y, y_stride);
  case 3: return rows<B, 3>(w, packed, begin, end, y, y_stride);
  case 4: return rows<B, 4>(w, packed, begin, end, y, y_stride);
  case 5: return rows<B, 5>(w, packed, begin, end, y, y_stride);
  case 6: return rows<B, 6>(w, packed, begin, end, y, y_stride);
  case 7: return rows<B, 7>(w, packed, begin, end, y, y_stride);
  default: return rows<B, 8>(w, packed, begin, end, y, y_stride);
  }
}

} // namespace

size_t matvec_work_bytes(uint32_t k) {
  return kMatvecRows * groups_of(k) * kGroupBytes + 64;
}

void matvec(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
            void *work) {
  switch (w.dtype) {
  case APU_Q4_0: return matvec_type<Q4_0>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q4_1: return matvec_type<Q4_1>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q5_0: return matvec_type<Q5_0>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q5_1: return matvec_type<Q5_1>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q8_0: return matvec_type<Q8_0>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q2_K: return matvec_type<Q2_K>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q3_K: return matvec_type<Q3_K>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q4_K: return matvec_type<Q4_K>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q5_K: return matvec_type<Q5_K>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q6_K: return matvec_type<Q6_K>(w, a, rows, begin, end, y, y_stride, work);
  default: return;
  }
}

} // namespace apu::cpu::avx512

#endif
