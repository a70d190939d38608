// Pages of keys and values, and what attention does with one head's part of a page, per instruction-set level.
//
// A head's part of a page holds 128 positions of d elements. Keys lie so that a register holds one element of
// neighbouring positions, and scores need no sum across a register; values lie so that it holds neighbouring elements
// of one position:
//   keys    F32, F16  (2, d, 64): element m of position 64 t + l at (t, m, l)
//           Q8_0      (8, {quants (d/4, 16, 4) int8, scales (d/32, 16) F16})
//   values  F32, F16  (128, d)
//           Q8_0      (4, {quants (32, d) int8, scales (d/32, 32) F16})
// The tiles are such that a head's part is read once and in its order: a single stream reaches the speed of a plain
// read, two streams through the same bytes fell to half of it. Q8_0 has GGUF's bytes in another order, 34 for 32
// elements; d is the largest magnitude / 127 rounded to F16, and a quant is x / d rounded to nearest even. What is
// stored has the same bits at every level.
//
// A query vector's result has the same bits whatever other vectors are computed with it: a score is one chain of fma
// over the head, in order, and an output element one chain of fma over the positions. (At the portable level multiply
// and add are apart.) Against Q8_0 keys the query is quantised to 16 bits per 32 elements, the products of a block are
// exact integers, and the chain runs over the blocks; Q8_0 values are converted, which is exact.
#pragma once

#include <cstddef>
#include <cstdint>

namespace apu::cpu {

constexpr uint32_t kAttentionRows = 128; // of a page, and the stride of scores
constexpr uint32_t kKeyTile = 64;        // positions of F32 and F16
constexpr uint32_t kKeyTileQ8 = 16;
constexpr uint32_t kValueTileQ8 = 32;

constexpr uint32_t kIndexTile = 16; // heads of an indexer

// Groups of 32 elements as small integers times a power of two: what FP4 rows are.
struct IndexQuery {       // of one row, heads of d elements
  const int8_t *numbers;  // (tiles, d/4, 16 heads, 4)
  const float *scales;    // (tiles, d/32, 16)
  const int32_t *offsets; // (tiles, d/32, 16)
  const float *weights;   // (tiles, 16), 0 for heads that are not there, whose numbers may be anything and scales 0
  uint32_t tiles;
};
struct IndexRows {
  const uint8_t *numbers; // (rows, d), 16 too large
  const float *scales;    // (rows, d/32)
};
struct IndexKernels {
  // x (d) as one head of a tile, or as one row; false where x is no such thing.
  bool (*query)(const float *x, uint32_t d, uint32_t head, int8_t *tile, float *scales, int32_t *offsets);
  bool (*row)(const float *x, uint32_t d, uint8_t *numbers, float *scales);
  // scores (count) = sum over the heads of weight * max(q . row, 0)
  void (*scores)(const IndexQuery &q, const IndexRows &rows, uint32_t count, uint32_t d, float *scores);
};

struct AttentionKernels {
  struct Type {
    // Writes x (d) as position `row` of a head's part of a page.
    void (*store_k)(const float *x, uint32_t d, uint32_t row, uint8_t *page);
    void (*store_v)(const float *x, uint32_t d, uint32_t row, uint8_t *page);
    // What scores() wants of queries q (n, d), in query_bytes(n, d) bytes.
    void (*prepare)(const float *q, uint32_t n, uint32_t d, void *query);
    // scores[i * 128 + j] = q[i] . k[j] for i in [0, n) and j in [begin, end); what lies outside may be overwritten.
    // work: work_bytes(d). next: a part of a page that will be read afterwards and comes to the cache meanwhile, or
    // null.
    void (*scores)(const void *query, uint32_t n, const uint8_t *k, uint32_t d, uint32_t begin, uint32_t end,
                   const uint8_t *next, float *scores, float *work);
    // acc[i] += p[i * 128 + j] * v[j] for i in [0, n) and j in [begin[i], end[i]) in order; acc (n, d).
    void (*values)(const float *p, uint32_t n, const uint8_t *v, uint32_t d, const uint32_t *begin, const uint32_t *end,
                   const uint8_t *next, float *acc, float *work);
  };
  Type f32, f16, q8_0;
  // s = exp(s - m), m the larger of `max` and the n scores, which is returned; *sum their sum.
  float (*softmax)(float *s, uint32_t n, float max, float *sum);
  IndexKernels index;

  const Type *type(uint32_t dtype) const; // null: no cache has that dtype
};

// Floats of q for F32 and F16; for Q8_0 16-bit numbers or two times 8 bits, and two numbers for each 32.
constexpr size_t query_bytes(uint32_t n, uint32_t d) {
  return size_t(n) * d * sizeof(float);
}
// The most that is converted at once, a page.
constexpr size_t work_bytes(uint32_t d) {
  return size_t(d) * kAttentionRows * sizeof(float);
}

const AttentionKernels *attention_kernels(uint32_t isa); // APU_ISA_*, one that kernel_table() has

const AttentionKernels *portable_attention();
const AttentionKernels *avx2_attention(); // null on builds for other architectures
const AttentionKernels *avx512_attention();

} // namespace apu::cpu
