// The tables of the AVX2 levels: one for processors without VNNI, one for those with either encoding of vpdpbusd. They
// differ in products with quantised activations.
#include "avx2.h"

namespace apu::cpu {

#if defined(__AVX2__)

namespace {

constexpr KernelTable table(const char *name, const Avx2Products &products) {
  return {
      .name = name,
      .quantize = products.quantize,
      .pack = nullptr,
      .matmul = products.matmul,
      .matmul_float = avx2::matmul_float,
      .work_bytes = products.work_bytes,
      .dequantize_row = avx2::dequantize_row,
      .scale = avx2::scale,
      .rms_norm = avx2::rms_norm,
      .silu_mul = avx2::silu_mul,
      .gelu_tanh_mul = avx2::gelu_tanh_mul,
      .gelu_erf_mul = avx2::gelu_erf_mul,
      .swiglu_oai = avx2::swiglu_oai,
      .soft_cap = avx2::soft_cap,
      .max = avx2::max,
      .exp_sum = avx2::exp_sum,
  };
}

} // namespace

const KernelTable *avx2_table() {
  static const KernelTable avx2 = table("avx2", avx2::products);
  return &avx2;
}

const KernelTable *avx2_vnni_table(bool evex) {
  static const KernelTable vex = table("avx2vnni", avx2_vex::products);
  static const KernelTable other = table("avx2vnni", avx2_evex::products);
  return evex ? &other : &vex;
}

#else

const KernelTable *avx2_table() {
  return nullptr;
}

const KernelTable *avx2_vnni_table(bool) {
  return nullptr;
}

#endif

} // namespace apu::cpu
