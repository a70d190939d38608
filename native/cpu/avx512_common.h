// Shared by the AVX-512 sources: intrinsics, inlining, constant tables, the canonical final sums.
// Unnamed namespace and no C++ library calls: nothing compiled with these flags may be merged with, or stand in for,
// code of another instruction-set level.
#pragma once

#if defined(__AVX512VNNI__) && defined(__AVX512VBMI__) && defined(__GFNI__)
#define APU_AVX512 1

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "../quant/blocks.h"
#include "kernels.h"

// g++ 12 and 13 warn about the deliberately undefined operands inside their own intrinsics.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#define APU_INLINE inline __attribute__((always_inline))

namespace apu::cpu::avx512 {
namespace {

// A zmm constant, filled at compile time by f(index).
template <class T> struct alignas(64) Table {
  T v[64 / sizeof(T)];
  template <class F> constexpr explicit Table(F f) : v{} {
    for (int i = 0; i < static_cast<int>(64 / sizeof(T)); i++) v[i] = static_cast<T>(f(i));
  }
  APU_INLINE operator __m512i() const { return _mm512_load_si512(v); }
};

APU_INLINE __m512i load512(const void *p) {
  return _mm512_loadu_si512(p);
}
// A value that is used twice: compilers would rather load it twice, but a load across cache lines costs two cycles.
APU_INLINE __m512i loaded(__m512i v) {
  asm("" : "+v"(v));
  return v;
}
APU_INLINE __m256i load256(const void *p) {
  return _mm256_loadu_si256(static_cast<const __m256i *>(p));
}
APU_INLINE __m128i load128(const void *p) {
  return _mm_loadu_si128(static_cast<const __m128i *>(p));
}

// The lowest n bits of a mask of 64; n may be negative or above 64.
APU_INLINE __mmask64 low_mask(int n) {
  return n <= 0 ? 0 : n >= 64 ? ~0ull : (1ull << n) - 1;
}

inline constexpr uint32_t kPassRows = 8; // of activations that use weights while they are in registers

// Calls f(matrix, first row of activations, the row after the last, first matrix row, the row after the last): as many
// passes over each `block` of matrix rows as `count` rows of activations take.
template <class F>
APU_INLINE void for_passes(const Matrix &w, uint32_t count, uint32_t begin, uint32_t end, uint32_t block, F f) {
  const uint32_t passes = (count + kPassRows - 1) / kPassRows;
  for (uint32_t n = begin; n < end; n += block)
    for (uint32_t p = 0; p < passes; p++) {
      const uint32_t last = n + block < end ? n + block : end;
      Matrix part = w; // `next` is read after the last pass over the last block
      if (p + 1 < passes)
        part.next = w.data + n * w.row_stride;
      else if (last < end)
        part.next = nullptr;
      f(part, p * count / passes, (p + 1) * count / passes, n, last);
    }
}

// ((0+4)+(2+6)) + ((1+5)+(3+7)), see quant/activations.h
APU_INLINE float sum8(__m256 v) {
  const __m128 pairs = _mm_add_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps(v, 1));
  const __m128 quads = _mm_add_ps(pairs, _mm_movehl_ps(pairs, pairs));
  return _mm_cvtss_f32(_mm_add_ss(quads, _mm_movehdup_ps(quads)));
}
APU_INLINE float sum16(__m512 v) {
  return sum8(_mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)));
}

} // namespace
} // namespace apu::cpu::avx512

#endif
