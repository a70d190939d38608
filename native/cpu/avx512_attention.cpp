// Attention kernels with 512-bit registers: 6 vectors by 4 registers of positions or columns; int8 products of Q8_0
// keys by VNNI. A call moves the rows of K or V that it is given once per six vectors, the first time from memory and
// then from the first two cache levels (a page of one head is 8 to 128 KB).
#include "attention_kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512VNNI__)

#if defined(__GNUC__) && !defined(__clang__) // g++'s own headers read the undefined halves they declare
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include "index_tile.h"

#include <immintrin.h>

namespace apu::cpu {
namespace {

struct Avx512 {
  using T = __m512;
  static constexpr uint32_t W = 16, NQ = 6, NI = 6, NX = 8, registers = 32;
  static T zero() { return _mm512_setzero_ps(); }
  static T set(float x) { return _mm512_set1_ps(x); }
  static T load(const float *p) { return _mm512_loadu_ps(p); }
  static T load(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i *>(p))); }
  static T load(const int8_t *p) {
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))));
  }
  static void store(float *p, T x) { _mm512_storeu_ps(p, x); }
  static T add(T a, T b) { return _mm512_add_ps(a, b); }
  static T mul(T a, T b) { return _mm512_mul_ps(a, b); }
  static T max(T a, T b) { return _mm512_max_ps(a, b); }
  static T fma(T a, T b, T c) { return _mm512_fmadd_ps(a, b, c); }
  static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static uint16_t to_f16(float x) { return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
  static float from_f16(uint16_t x) { return _cvtsh_ss(x); }
  static void to_f16(const float *x, uint16_t *out, uint32_t n) {
    for (uint32_t i = 0; i < n; i += 16) {
      const auto mask = static_cast<__mmask16>(n - i >= 16 ? 0xffff : (1u << (n - i)) - 1);
      _mm256_mask_storeu_epi16(out + i, mask,
                               _mm512_cvtps_ph(_mm512_maskz_loadu_ps(mask, x + i), _MM_FROUND_TO_NEAREST_INT));
    }
  }

  // e^x for x <= 0, relative error below 1e-7: r = x - n ln 2, a polynomial for e^r, times 2^n. A NaN passes.
  static T exp(T x) {
    x = _mm512_max_ps(_mm512_set1_ps(-120.0f), x);
    const T n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
    T r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x); // exact: n has few bits
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    T p = _mm512_set1_ps(0.0001990965974982828f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.0013946457765996456f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.008333280682563782f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.04166626185178757f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.1666666716337204f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(0.5f));
    p = _mm512_fmadd_ps(_mm512_mul_ps(r, r), p, r);
    return _mm512_scalef_ps(_mm512_add_ps(p, _mm512_set1_ps(1.0f)), n);
  }

  // 32 numbers 254 a + b as the bytes a, then the bytes b; returns what makes up for keys being 128 too large.
  static int32_t split_query(const int16_t *q, int16_t *out) {
    auto *bytes = reinterpret_cast<int8_t *>(out);
    int32_t sum = 0;
    for (uint32_t i = 0; i < kBlock; ++i) {
      const float shifted = static_cast<float>(q[i]) * (1.0f / 254.0f) + 12582912.0f;
      const int32_t a = static_cast<int32_t>(shifted - 12582912.0f);
      bytes[i] = static_cast<int8_t>(a);
      bytes[kBlock + i] = static_cast<int8_t>(q[i] - 254 * a);
      sum += q[i];
    }
    return -128 * sum;
  }

  // Exact sums over a block of 32, lane l of products[r] for position l and vector r.
  template <uint32_t N>
  static void dot_tile(const uint8_t *keys, const int16_t *q, size_t q_stride, const int32_t *sums, size_t sum_stride,
                       T *products) {
    __m512i k[8], acc[N]; // (16, 4) keys, made unsigned
    for (uint32_t g = 0; g < 8; ++g) k[g] = _mm512_xor_si512(_mm512_loadu_si512(keys + 64 * g), _mm512_set1_epi8(-128));
    for (uint32_t r = 0; r < N; ++r) acc[r] = _mm512_setzero_si512();
    for (uint32_t half = 0; half < 2; ++half) {
      for (uint32_t g = 0; g < 8; ++g)
        for (uint32_t r = 0; r < N; ++r) {
          int32_t four;
          memcpy(&four, reinterpret_cast<const int8_t *>(q + r * q_stride) + half * kBlock + 4 * g, 4);
          acc[r] = _mm512_dpbusd_epi32(acc[r], k[g], _mm512_set1_epi32(four));
        }
      if (half == 0)
        for (uint32_t r = 0; r < N; ++r)
          acc[r] = _mm512_add_epi32(_mm512_mullo_epi32(acc[r], _mm512_set1_epi32(254)),
                                    _mm512_set1_epi32(sums[r * sum_stride]));
    }
    for (uint32_t r = 0; r < N; ++r) products[r] = _mm512_cvtepi32_ps(acc[r]);
  }

  // Exact sums over a group of 32, lane l of products[r] for head l and row r.
  template <uint32_t N>
  static void small_dots(const int8_t *heads, const int32_t *offsets, const uint8_t *rows, size_t stride, T *products) {
    __m512i acc[N];
    for (uint32_t r = 0; r < N; ++r) acc[r] = _mm512_loadu_si512(offsets);
    for (uint32_t g = 0; g < 8; ++g) {
      const __m512i q = _mm512_loadu_si512(heads + 64 * g);
      for (uint32_t r = 0; r < N; ++r) {
        int32_t four;
        memcpy(&four, rows + r * stride + 4 * g, 4);
        acc[r] = _mm512_dpbusd_epi32(acc[r], _mm512_set1_epi32(four), q);
      }
    }
    for (uint32_t r = 0; r < N; ++r) products[r] = _mm512_cvtepi32_ps(acc[r]);
  }

  // Four groups: x (128) as numbers + 16 and scales (4).
  static bool small_row(const float *x, uint8_t *numbers, float *scales) {
    T v[8], most[4];
    for (uint32_t i = 0; i < 8; ++i) v[i] = load(x + 16 * i);
    for (uint32_t g = 0; g < 4; ++g) most[g] = _mm512_range_ps(v[2 * g], v[2 * g + 1], 0x0b); // largest magnitudes
    const T a = max(_mm512_unpacklo_ps(most[0], most[1]), _mm512_unpackhi_ps(most[0], most[1]));
    const T b = max(_mm512_unpacklo_ps(most[2], most[3]), _mm512_unpackhi_ps(most[2], most[3]));
    const T quarters = max(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
    const __m256 halves = _mm256_max_ps(_mm512_castps512_ps256(quarters), _mm512_extractf32x8_ps(quarters, 1));
    const __m128 largest = _mm_max_ps(_mm256_castps256_ps128(halves), _mm256_extractf128_ps(halves, 1));

    const __m128i exponent = _mm_and_si128(_mm_castps_si128(largest), _mm_set1_epi32(0x7f800000));
    const __mmask8 used = _mm_cmpneq_epi32_mask(_mm_castps_si128(largest), _mm_setzero_si128());
    const __mmask8 small = _mm_mask_cmplt_epu32_mask(used, exponent, _mm_set1_epi32(27 << 23));
    if (small | _mm_mask_cmpgt_epu32_mask(used, exponent, _mm_set1_epi32(227 << 23))) return false;
    const __m128i least = _mm_set1_epi32(3 << 23), both = _mm_set1_epi32(static_cast<int32_t>(257u << 23));
    _mm_storeu_si128(reinterpret_cast<__m128i *>(scales), _mm_maskz_sub_epi32(used, exponent, least));
    alignas(16) float inverse[4];
    _mm_store_si128(reinterpret_cast<__m128i *>(inverse), _mm_sub_epi32(both, exponent));

    T fractions = zero();
    for (uint32_t i = 0; i < 8; ++i) {
      const T y = mul(v[i], set(inverse[i / 2]));
      fractions = _mm512_or_ps(fractions, _mm512_reduce_ps(y, 0x08)); // y less the nearest integer
      const __m128i bytes = _mm512_cvtepi32_epi8(_mm512_cvtps_epi32(y));
      _mm_storeu_si128(reinterpret_cast<__m128i *>(numbers + 16 * i), _mm_add_epi8(bytes, _mm_set1_epi8(16)));
    }
    return _mm512_test_epi32_mask(_mm512_castps_si512(fractions), _mm512_set1_epi32(0x7fffffff)) == 0;
  }
};

} // namespace

const AttentionKernels *avx512_attention() {
  static constexpr AttentionKernels table = attention_table<Avx512>(index_table<Avx512>());
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
