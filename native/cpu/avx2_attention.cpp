// Attention kernels with 256-bit registers: 2 vectors by 4 rows, or by 4 registers of columns, which with the operands
// fill the sixteen registers. A call moves the rows of K or V that it is given once per two vectors, the first time
// from memory and then from the first two cache levels (a page of one head is 16 to 128 KB).
#include "attention_kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "attention_tile.h"

#include <immintrin.h>

namespace apu::cpu {
namespace {

struct Avx2 {
  using T = __m256;
  static constexpr uint32_t W = 8, Q = 2;
  static T zero() { return _mm256_setzero_ps(); }
  static T set(float x) { return _mm256_set1_ps(x); }
  static T load(const float *p) { return _mm256_loadu_ps(p); }
  static T load(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
  static void store(float *p, T x) { _mm256_storeu_ps(p, x); }
  static T fma(T a, T b, T c) { return _mm256_fmadd_ps(a, b, c); }
  static T reduce(const T *a) {
    T quads[2];
    for (int i = 0; i < 2; ++i) {
      const T *b = a + 4 * i;
      T x = _mm256_add_ps(_mm256_unpacklo_ps(b[0], b[1]), _mm256_unpackhi_ps(b[0], b[1]));
      T y = _mm256_add_ps(_mm256_unpacklo_ps(b[2], b[3]), _mm256_unpackhi_ps(b[2], b[3]));
      __m256d u = _mm256_castps_pd(x), v = _mm256_castps_pd(y);
      quads[i] = _mm256_add_ps(_mm256_castpd_ps(_mm256_unpacklo_pd(u, v)), _mm256_castpd_ps(_mm256_unpackhi_pd(u, v)));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(quads[0], quads[1], 0x20),
                         _mm256_permute2f128_ps(quads[0], quads[1], 0x31));
  }
};

} // namespace

const AttentionKernels *avx2_attention() {
  static constexpr AttentionKernels table = attention_table<Avx2>();
  return &table;
}

} // namespace apu::cpu

#else

namespace apu::cpu {

const AttentionKernels *avx2_attention() {
  return nullptr;
}

} // namespace apu::cpu

#endif
