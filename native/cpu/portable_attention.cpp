// Attention kernels with the compiler's own 128-bit vectors, and the choice of a level's table.
// Tiles of 2 vectors by 4 rows, or by 4 registers of columns; multiply and add stay apart, as not every processor of
// this level has fma in hardware. A call moves the rows of K or V that it is given once per two vectors.
#include "attention_tile.h"

#include "apu.h"
#include "quant/unpack.h"

namespace apu::cpu {
namespace {

struct Portable {
  typedef float T __attribute__((vector_size(16)));
  static constexpr uint32_t W = 4, Q = 2;
  static T zero() { return T{}; }
  static T set(float x) { return T{x, x, x, x}; }
  static T load(const float *p) {
    T x;
    memcpy(&x, p, sizeof(x));
    return x;
  }
  static T load(const uint16_t *p) {
    return T{quant::f16_to_f32(p[0]), quant::f16_to_f32(p[1]), quant::f16_to_f32(p[2]), quant::f16_to_f32(p[3])};
  }
  static void store(float *p, T x) { memcpy(p, &x, sizeof(x)); }
  static T fma(T a, T b, T c) { return a * b + c; }
  static T reduce(const T *a) {
    T out;
    for (int i = 0; i < 4; ++i) out[i] = (a[i][0] + a[i][2]) + (a[i][1] + a[i][3]);
    return out;
  }
};

} // namespace

const AttentionKernels *portable_attention() {
  static constexpr AttentionKernels table = attention_table<Portable>();
  return &table;
}

const AttentionKernels *attention_kernels(uint32_t isa) {
  const AttentionKernels *found = nullptr;
  if (isa == APU_ISA_AVX512) found = avx512_attention();
  if (isa == APU_ISA_AVX2 || isa == APU_ISA_AVX2_VNNI) found = avx2_attention();
  return found ? found : portable_attention();
}

} // namespace apu::cpu
