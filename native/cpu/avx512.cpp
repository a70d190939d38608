// The AVX-512 level's table (F, BW, VL, DQ, VNNI, VBMI, GFNI: Zen 4, Ice Lake and later), null on other builds.
#include "avx512.h"
#include "avx512_common.h"

namespace apu::cpu {

#ifdef APU_AVX512

namespace {

void matmul(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
            void *work) {
  const uint32_t many = rows < kManyRows ? 0 : rows / kPanelRows * kPanelRows, few = rows - many;
  if (many) avx512::gemm(w, a, many, begin, end, y, y_stride, work);
  if (!few) return;
  avx512::matvec(w, a.from(many), few, begin, end, y + many * y_stride, y_stride, work);
}

size_t work_bytes(uint32_t k) {
  size_t bytes = avx512::matvec_work_bytes(k);
  if (avx512::pairs_work_bytes(k) > bytes) bytes = avx512::pairs_work_bytes(k);
  if (avx512::gemm_work_bytes(k) > bytes) bytes = avx512::gemm_work_bytes(k);
  if (avx512::float_work_bytes(k) > bytes) bytes = avx512::float_work_bytes(k);
  return bytes;
}

} // namespace

const KernelTable *avx512_table() {
  static constexpr KernelTable table{
      .name = "avx512",
      .quantize = avx512::quantize,
      .pack = avx512::pack,
      .matmul = matmul,
      .matmul_float = avx512::matmul_float,
      .work_bytes = work_bytes,
      .dequantize_row = avx512::dequantize_row,
      .scale = avx512::scale,
      .rms_norm = avx512::rms_norm,
      .silu_mul = avx512::silu_mul,
      .gelu_tanh_mul = avx512::gelu_tanh_mul,
      .gelu_erf_mul = avx512::gelu_erf_mul,
      .swiglu_oai = avx512::swiglu_oai,
      .soft_cap = avx512::soft_cap,
      .max = avx512::max,
      .exp_sum = avx512::exp_sum,
  };
  return &table;
}

#else

const KernelTable *avx512_table() {
  return nullptr;
}

#endif

} // namespace apu::cpu
