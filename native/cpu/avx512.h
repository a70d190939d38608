// Functions of the AVX-512 level, one file a group: matrices of quantised types for few rows (matvec) and many
// (gemm), float types and exact precision (float), quantisation and row helpers (rows). avx512.cpp makes the table.
#pragma once

#include "kernels.h"

namespace apu::cpu::avx512 {

size_t matvec_work_bytes(uint32_t k);
size_t pairs_work_bytes(uint32_t k);
size_t gemm_work_bytes(uint32_t k);
size_t float_work_bytes(uint32_t k);

// As KernelTable::matmul, for fewer than kManyRows rows and for multiples of kPanelRows.
void matvec(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
            void *work);
// Part of matvec: the types that Pair (avx512_pairs.h) is there for.
void matvec_pairs(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y,
                  size_t y_stride, void *work);
void gemm(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
          void *work);

// The rest as in KernelTable.
void matmul_float(const Matrix &w, const float *x, size_t x_stride, uint32_t rows, uint32_t begin, uint32_t end,
                  float *y, size_t y_stride, void *work);
void dequantize_row(uint32_t dtype, const uint8_t *in, uint32_t k, float *out);
void pack(const ActBlocks &a);
void quantize(const float *x, size_t x_stride, uint32_t rows, uint32_t k, const ActBlocks &a);
#include "row_helpers.h"

} // namespace apu::cpu::avx512
