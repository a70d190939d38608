// Attention kernels with 512-bit registers: 4 vectors by 4 rows, or by 4 registers of columns.
#include "attention_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)

#if defined(__GNUC__) && !defined(__clang__) // g++'s own headers read the undefined halves they declare
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "attention_tile.h"

#include <immintrin.h>

namespace apu::cpu {
namespace {

struct Avx512 {
  using T = __m512;
  static constexpr uint32_t W = 16, Q = 4;
  static T zero() { return _mm512_setzero_ps(); }
  static T set(float x) { return _mm512_set1_ps(x); }
  static T load(const float *p) { return _mm512_loadu_ps(p); }
  static T load(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
  static void store(float *p, T x) { _mm512_storeu_ps(p, x); }
  static T fma(T a, T b, T c) { return _mm512_fmadd_ps(a, b, c); }
  static T reduce(const T *a) {
    T quads[4]; // four sums in each 128-bit lane, still to be added across the lanes
    for (int i = 0; i < 4; ++i) {
      const T *b = a + 4 * i;
      T x = _mm512_add_ps(_mm512_unpacklo_ps(b[0], b[1]), _mm512_unpackhi_ps(b[0], b[1]));
      T y = _mm512_add_ps(_mm512_unpacklo_ps(b[2], b[3]), _mm512_unpackhi_ps(b[2], b[3]));
      __m512d u = _mm512_castps_pd(x), v = _mm512_castps_pd(y);
      quads[i] = _mm512_add_ps(_mm512_castpd_ps(_mm512_unpacklo_pd(u, v)), _mm512_castpd_ps(_mm512_unpackhi_pd(u, v)));
    }
    T x = _mm512_add_ps(_mm512_shuffle_f32x4(quads[0], quads[1], 0x88), _mm512_shuffle_f32x4(quads[0], quads[1], 0xdd));
    T y = _mm512_add_ps(_mm512_shuffle_f32x4(quads[2], quads[3], 0x88), _mm512_shuffle_f32x4(quads[2], quads[3], 0xdd));
    return _mm512_add_ps(_mm512_shuffle_f32x4(x, y, 0x88), _mm512_shuffle_f32x4(x, y, 0xdd));
  }
};

} // namespace

const AttentionKernels *avx512_attention() {
  static constexpr AttentionKernels table = attention_table<Avx512>();
  return &table;
}

} // namespace apu::cpu

#else

namespace apu::cpu {

const AttentionKernels *avx512_attention() {
  return nullptr;
}

} // namespace apu::cpu

#endif
