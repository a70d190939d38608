// Matrices of the quantised types that avx2_formats.h has no format for, few rows and many: a row of the matrix is
// taken apart once by the scalar code of quant/unpack.h, to int8 in the order of the activations, and multiplied with
// every row of them. Right for any type, with the bits of the others.
#if defined(__AVX2__)

#include "avx2.h"
#include "avx2_formats.h"

#include "../quant/unpack.h"
#include "../quant/visit.h"

namespace apu::cpu::avx2 {

namespace {

struct UnpackedGroup { // eight blocks, zero beyond the row
  alignas(32) int8_t q[32 * kGroup];
  alignas(32) float scale[2 * kGroup]; // of the halves, in planes
  alignas(32) float ws[kGroup];
};

template <class B> void unpack_row(const uint8_t *row, uint32_t blocks, UnpackedGroup *groups) {
  using Type = quant::Traits<B>;
  quant::Block32 block;
  std::memset(groups, 0, (size_t{blocks} + kGroup - 1) / kGroup * sizeof *groups);
  for (uint32_t b = 0; b < blocks; ++b) {
    const auto *file_block = reinterpret_cast<const B *>(row + size_t{b / Type::blocks32} * Type::bytes);
    quant::unpack_block(*file_block, b % Type::blocks32, block);
    UnpackedGroup &group = groups[b / kGroup];
    const uint32_t i = b % kGroup;
    for (uint32_t e = 0; e < 4; ++e) // 64 h + 32 (element / 8), see ActGroup
      std::memcpy(group.q + quad_offset(i) + 32 * e, block.q + 8 * e, 8);
    group.scale[i] = block.sc[0];
    group.scale[kGroup + i] = block.sc[1];
    group.ws[i] = block.ws;
  }
}

float dot(const UnpackedGroup *groups, uint32_t count, ActGroup a) {
  __m256 acc = _mm256_setzero_ps();
  for (uint32_t g = 0; g < count; ++g, a.next()) {
    const UnpackedGroup &group = groups[g];
    struct {
      const int8_t *q;
      Quad operator()(uint32_t j) const {
        const int8_t *p = q + 128 * j;
        return Quad{{{load32(p), load32(p + 32)}, {load32(p + 64), load32(p + 96)}}};
      }
      bool second() const { return true; }
    } quads{group.q};
    const Halves sums = dot_signed<false>(quads, a);
    const __m256 first = _mm256_mul_ps(_mm256_cvtepi32_ps(sums.first), _mm256_load_ps(group.scale));
    const __m256 second = _mm256_mul_ps(_mm256_cvtepi32_ps(sums.second), _mm256_load_ps(group.scale + kGroup));
    const __m256 value =
        _mm256_fmadd_ps(second, _mm256_loadu_ps(a.d + kGroup), _mm256_mul_ps(first, _mm256_loadu_ps(a.d)));
    acc = _mm256_fmadd_ps(_mm256_load_ps(group.ws), value, acc);
  }
  return sum8(acc);
}

UnpackedGroup *groups_in(void *work) {
  return reinterpret_cast<UnpackedGroup *>((reinterpret_cast<uintptr_t>(work) + 31) & ~uintptr_t{31});
}

} // namespace

size_t unpacked_work_bytes(uint32_t k) {
  return (size_t{k} / 32 + kGroup - 1) / kGroup * sizeof(UnpackedGroup) + 32;
}

void matmul_unpacked(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y,
                     size_t y_stride, void *work) {
  UnpackedGroup *groups = groups_in(work);
  const uint32_t blocks = w.k / 32;
  for (uint32_t n = begin; n < end; ++n) {
    const uint8_t *row = w.data + n * w.row_stride;
    quant::with_block_type(w.dtype, [&]<class B>() {
      if constexpr (quant::Traits<B>::minimum == quant::Minimum::none) unpack_row<B>(row, blocks, groups);
    });
    for (uint32_t t = 0; t < rows; ++t)
      y[t * y_stride + (n - begin)] = dot(groups, (blocks + kGroup - 1) / kGroup, ActGroup(a, size_t{t} * a.blocks));
  }
}

} // namespace apu::cpu::avx2

#endif
