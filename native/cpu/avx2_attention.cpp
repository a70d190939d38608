// Attention kernels with 256-bit registers: up to 6 vectors by 2 registers of positions or columns, which with the
// operands fill the sixteen registers; products of Q8_0 keys in 16 bits. A call moves the rows of K or V that it is
// given once per six vectors, the first time from memory and then from the first two cache levels.
#include "attention_kernels.h"

#if defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)

#include "avx2_math.h"
#include "index_tile.h"

namespace apu::cpu {
namespace {

struct Avx2 {
  using T = __m256;
  static constexpr uint32_t W = 8, NQ = 6, NI = 3, NX = 4, registers = 16;
  static T zero() { return _mm256_setzero_ps(); }
  static T set(float x) { return _mm256_set1_ps(x); }
  static T load(const float *p) { return _mm256_loadu_ps(p); }
  static T load(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i *>(p))); }
  static T load(const int8_t *p) {
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p))));
  }
  static void store(float *p, T x) { _mm256_storeu_ps(p, x); }
  static T add(T a, T b) { return _mm256_add_ps(a, b); }
  static T mul(T a, T b) { return _mm256_mul_ps(a, b); }
  static T max(T a, T b) { return _mm256_max_ps(a, b); }
  static T exp(T x) { return exp8(x); }
  static T fma(T a, T b, T c) { return _mm256_fmadd_ps(a, b, c); }
  static float fma(float a, float b, float c) { return __builtin_fmaf(a, b, c); }
  static uint16_t to_f16(float x) { return static_cast<uint16_t>(_cvtss_sh(x, _MM_FROUND_TO_NEAREST_INT)); }
  static float from_f16(uint16_t x) { return _cvtsh_ss(x); }
  static void to_f16(const float *x, uint16_t *out, uint32_t n) {
    uint32_t i = 0;
    for (; i + 8 <= n; i += 8)
      _mm_storeu_si128(reinterpret_cast<__m128i *>(out + i), _mm256_cvtps_ph(load(x + i), _MM_FROUND_TO_NEAREST_INT));
    for (; i < n; ++i) out[i] = to_f16(x[i]);
  }

  static int32_t split_query(const int16_t *q, int16_t *out) {
    memcpy(out, q, kBlock * sizeof(int16_t));
    return 0;
  }

  // Exact sums over a block of 32, products[2 r + h] for positions 8 h on and vector r.
  template <uint32_t N>
  static void dot_tile(const uint8_t *keys, const int16_t *q, size_t q_stride, const int32_t *, size_t, T *products) {
    __m256i acc[N * 4]; // of four positions each, two lanes a position
    for (uint32_t i = 0; i < N * 4; ++i) acc[i] = _mm256_setzero_si256();
    for (uint32_t g = 0; g < 8; ++g) {
      __m256i four[N];
      for (uint32_t r = 0; r < N; ++r) {
        long long bits;
        memcpy(&bits, q + r * q_stride + 4 * g, 8);
        four[r] = _mm256_set1_epi64x(bits);
      }
      for (uint32_t p = 0; p < 4; ++p) {
        const __m256i k =
            _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i *>(keys + 64 * g + 16 * p)));
        for (uint32_t r = 0; r < N; ++r)
          acc[r * 4 + p] = _mm256_add_epi32(acc[r * 4 + p], _mm256_madd_epi16(k, four[r]));
      }
    }
    for (uint32_t i = 0; i < N * 2; ++i)
      products[i] = _mm256_cvtepi32_ps(
          _mm256_permute4x64_epi64(_mm256_hadd_epi32(acc[2 * i], acc[2 * i + 1]), _MM_SHUFFLE(3, 1, 2, 0)));
  }

  // Exact sums over a group of 32, products[2 r + p] for heads 8 p on and row r. 16 bits hold 16 products of 31 by 15.
  template <uint32_t N>
  static void small_dots(const int8_t *heads, const int32_t *offsets, const uint8_t *rows, size_t stride, T *products) {
    for (uint32_t p = 0; p < 2; ++p) {
      __m256i acc[N];
      for (uint32_t r = 0; r < N; ++r) acc[r] = _mm256_setzero_si256();
      for (uint32_t g = 0; g < 8; ++g) {
        const __m256i q = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(heads + 64 * g + 32 * p));
        for (uint32_t r = 0; r < N; ++r) {
          int32_t four;
          memcpy(&four, rows + r * stride + 4 * g, 4);
          acc[r] = _mm256_add_epi16(acc[r], _mm256_maddubs_epi16(_mm256_set1_epi32(four), q));
        }
      }
      const __m256i offset = _mm256_loadu_si256(reinterpret_cast<const __m256i *>(offsets + 8 * p));
      for (uint32_t r = 0; r < N; ++r)
        products[2 * r + p] =
            _mm256_cvtepi32_ps(_mm256_add_epi32(_mm256_madd_epi16(acc[r], _mm256_set1_epi16(1)), offset));
    }
  }
};

} // namespace

const AttentionKernels *avx2_attention() {
  static constexpr AttentionKernels table = attention_table<Avx2>(index_table<Avx2>());
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
