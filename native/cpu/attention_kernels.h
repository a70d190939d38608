// The two products of attention over one page of 128 rows, per instruction-set level.
//
// A query vector's result has the same bits whatever other vectors are computed with it: a score is one chain of fma
// per lane over the head and a fixed tree over the lanes, an output element one chain of fma over the rows in order.
// (At the portable level multiply and add are apart.) Head sizes must be multiples of `width`.
#pragma once

#include <cstdint>

namespace apu::cpu {

constexpr uint32_t kAttentionRows = 128; // of a page, and the stride of scores
constexpr uint32_t kAttentionPad = 4;    // vectors are computed in groups of at most this many

struct AttentionKernels {
  uint32_t width;
  // scores[i * 128 + j] = q[i] . k[j] for i in [0, n) and j in [begin, end); q (n, d). q and scores have room for n
  // rounded up to kAttentionPad vectors; scores outside [begin, end) may be overwritten.
  void (*scores)(const float *q, uint32_t n, const float *k, uint32_t d, uint32_t begin, uint32_t end, float *scores);
  void (*scores_f16)(const float *q, uint32_t n, const uint16_t *k, uint32_t d, uint32_t begin, uint32_t end,
                     float *scores);
  // acc[i] += p[i * 128 + j] * v[j] for i in [0, n) and j in [begin[i], end[i]) in order; acc (n, d).
  void (*values)(const float *p, uint32_t n, const float *v, uint32_t d, const uint32_t *begin, const uint32_t *end,
                 float *acc);
  void (*values_f16)(const float *p, uint32_t n, const uint16_t *v, uint32_t d, const uint32_t *begin,
                     const uint32_t *end, float *acc);
};

const AttentionKernels *attention_kernels(uint32_t isa); // APU_ISA_*, one that kernel_table() has

const AttentionKernels *portable_attention();
const AttentionKernels *avx2_attention(); // null on builds for other architectures
const AttentionKernels *avx512_attention();

} // namespace apu::cpu
