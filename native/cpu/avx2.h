// Functions of the AVX2 levels, one group a file: matrices of quantised types (avx2_matvec.cpp for few rows,
// avx2_gemm.cpp for many), of float types and exact precision (avx2_float.cpp), row helpers (avx2_rows.cpp).
// The first two are compiled three times, with one source for all: plain, and with vpdpbusd in either encoding, VEX
// (AVX-VNNI: Alder Lake, Zen 5) and EVEX (AVX-512 VNNI and VL: what the AVX-512 level asks is not complete on Cascade
// Lake). Each has its own namespace, APU_AVX2; the rest exists once.
#pragma once

#include "kernels.h"

#if defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define APU_AVX2 avx2_evex
#elif defined(__AVXVNNI__)
#define APU_AVX2 avx2_vex
#else
#define APU_AVX2 avx2
#endif

namespace apu::cpu {

struct Avx2Products { // as in KernelTable; work_bytes is enough for all of the level
  void (*quantize)(const float *x, size_t x_stride, uint32_t rows, uint32_t k, const ActBlocks &a);
  void (*matmul)(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y,
                 size_t y_stride, void *work);
  size_t (*work_bytes)(uint32_t k);
};

namespace avx2 {
extern const Avx2Products products;
}
namespace avx2_vex {
extern const Avx2Products products;
}
namespace avx2_evex {
extern const Avx2Products products;
}

namespace APU_AVX2 {

// matmul for many rows: `rows` a multiple of kGemmRows, end - begin of kGemmColumns.
inline constexpr uint32_t kGemmRows = 4, kGemmColumns = 8;
void gemm(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
          void *work);
size_t gemm_work_bytes(uint32_t k);

} // namespace APU_AVX2

namespace avx2 {

void matmul_float(const Matrix &w, const float *x, size_t x_stride, uint32_t rows, uint32_t begin, uint32_t end,
                  float *y, size_t y_stride, void *work);
void dequantize_row(uint32_t dtype, const uint8_t *in, uint32_t k, float *out);

#include "row_helpers.h"

} // namespace avx2
} // namespace apu::cpu
