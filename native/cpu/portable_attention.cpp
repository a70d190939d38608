// Attention kernels with the compiler's own 128-bit vectors, and the choice of a level's table.
// Tiles of 2 vectors by 4 registers of positions or columns; multiply and add stay apart, as not every processor of
// this level has fma in hardware. A call moves the rows of K or V that it is given once per two vectors.
#include "index_tile.h"

#include "apu.h"
#include "portable.h"
#include "quant/unpack.h"

#include <cmath>

namespace apu::cpu {
namespace {

struct Portable {
  typedef float T __attribute__((vector_size(16)));
  static constexpr uint32_t W = 4, NQ = 2, NI = 2, NX = 2, registers = 16;
  static T zero() { return T{}; }
  static T set(float x) { return T{x, x, x, x}; }
  static T load(const float *p) {
    T x;
    memcpy(&x, p, sizeof(x));
    return x;
  }
  static T load(const uint16_t *p) { return T{from_f16(p[0]), from_f16(p[1]), from_f16(p[2]), from_f16(p[3])}; }
  static T load(const int8_t *p) {
    return T{static_cast<float>(p[0]), static_cast<float>(p[1]), static_cast<float>(p[2]), static_cast<float>(p[3])};
  }
  static void store(float *p, T x) { memcpy(p, &x, sizeof(x)); }
  static T add(T a, T b) { return a + b; }
  static T mul(T a, T b) { return a * b; }
  static T max(T a, T b) { return a > b ? a : b; }
  static T exp(T x) { return T{std::exp(x[0]), std::exp(x[1]), std::exp(x[2]), std::exp(x[3])}; }
  static T fma(T a, T b, T c) { return a * b + c; }
  static float fma(float a, float b, float c) { return a * b + c; }
  static uint16_t to_f16(float x) {
    uint16_t out;
    portable::f32_to_f16(&x, &out, 1);
    return out;
  }
  static float from_f16(uint16_t x) { return quant::f16_to_f32(x); }
  static void to_f16(const float *x, uint16_t *out, uint32_t n) { portable::f32_to_f16(x, out, n); }

  static int32_t split_query(const int16_t *q, int16_t *out) {
    memcpy(out, q, kBlock * sizeof(int16_t));
    return 0;
  }

  // Exact sums over a block of 32, products[4 r + p] for positions 4 p on and vector r.
  template <uint32_t N>
  static void dot_tile(const uint8_t *keys, const int16_t *q, size_t q_stride, const int32_t *, size_t, T *products) {
    const auto *k = reinterpret_cast<const int8_t *>(keys);
    for (uint32_t r = 0; r < N; ++r) {
      int32_t acc[16] = {};
      for (uint32_t g = 0; g < 8; ++g)
        for (uint32_t l = 0; l < 16; ++l)
          for (uint32_t e = 0; e < 4; ++e) acc[l] += k[64 * g + 4 * l + e] * q[r * q_stride + 4 * g + e];
      for (uint32_t l = 0; l < 16; ++l) products[r * 4 + l / 4][l % 4] = static_cast<float>(acc[l]);
    }
  }

  // Exact sums over a group of 32, products[4 r + p] for heads 4 p on and row r.
  template <uint32_t N>
  static void small_dots(const int8_t *heads, const int32_t *offsets, const uint8_t *rows, size_t stride, T *products) {
    for (uint32_t r = 0; r < N; ++r)
      for (uint32_t l = 0; l < 16; ++l) {
        int32_t sum = offsets[l];
        for (uint32_t i = 0; i < kBlock; ++i) sum += heads[i / 4 * 64 + 4 * l + i % 4] * rows[r * stride + i];
        products[r * 4 + l / 4][l % 4] = static_cast<float>(sum);
      }
  }
};

} // namespace

const AttentionKernels *portable_attention() {
  static constexpr AttentionKernels table = attention_table<Portable>(index_table<Portable>());
  return &table;
}

const AttentionKernels *attention_kernels(uint32_t isa) {
  const AttentionKernels *found = nullptr;
  if (isa == APU_ISA_AVX512) found = avx512_attention();
  if (isa == APU_ISA_AVX2 || isa == APU_ISA_AVX2_VNNI) found = avx2_attention();
  return found ? found : portable_attention();
}

const AttentionKernels::Type *AttentionKernels::type(uint32_t dtype) const {
  switch (dtype) {
  case APU_F32: return &f32;
  case APU_F16: return &f16;
  case APU_Q8_0: return &q8_0;
  default: return nullptr;
  }
}

} // namespace apu::cpu
