// Functions of the AVX-512 level, one file a group: matrices of quantised types for few rows (matvec) and many
// (gemm), float types (float), quantisation and row helpers (rows). avx512.cpp puts them into the table.
#pragma once

#include "kernels.h"

namespace apu::cpu::avx512 {

// Up to kMatvecRows rows of activations are multiplied while the weights stream by once.
inline constexpr uint32_t kMatvecRows = 8;

size_t matvec_work_bytes(uint32_t k);
size_t gemm_work_bytes(uint32_t k);
// As KernelTable::matmul; matvec takes at most kMatvecRows rows.
void matvec(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
            void *work);
void gemm(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
          void *work);

} // namespace apu::cpu::avx512
