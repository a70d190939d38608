// What the CPU ops need from the matrix kernels, and the table through which the instruction set is chosen.
//
// One object of KernelTable per instruction-set level (portable, avx2, avx2vnni, avx512), each in a file compiled with
// that level's flags; nothing else in the library may be compiled with them. Ops split a matrix by rows among the
// workers and by segments, so a kernel sees one base pointer and one stride, and never reads past row_end's last byte.
//
// Numerics (identical at every level and row count, bit for bit): activations of quantised types are int8 in blocks
// of 32 (ActBlocks), d = amax / 127 in float32 for each half of 16, rounded to nearest even. A dot product is the sum
// over 32-blocks b of
//   fma(ws_b, fma(float(I_1), d_1, float(I_0) * d_0), .)  and, for types with a minimum,  fma(wm_b, s_b, .)
// into lane b mod 8 of eight float lanes (the minimum's fma follows the block's own in the same lane), I_h being the
// exact integers of the halves with sub-block scales folded in; the lanes are added as ((0+4)+(2+6)) + ((1+5)+(3+7)).
// quant/blocks.h has the types one by one. Precision "fine" is two such products, of the quantised input and of what
// quantisation lost, in neighbouring rows of ActBlocks that the caller adds: y1 + y2.
// Float types, F8_E4M3 and precision "exact": element k goes to lane k mod 16 by fma, lanes added by the tree in
// sum16().
#pragma once

#include <cstddef>
#include <cstdint>

namespace apu::cpu {

// Rows of activations from which kernels unpack the weights to a tile first. Below, they unpack anew for every eight or
// so, which then costs less. Measured at every level; free to choose, as both have the same bits.
inline constexpr uint32_t kManyRows = 16;
inline constexpr uint32_t kPanelRows = 8;       // of activations that ActBlocks::panels has together
inline constexpr size_t kPanelBlockBytes = 448; // of a panel's 32-block

// Quantised activations of T rows, row t `blocks` blocks into each array. Half h of block b stands at
// 16 (b / 8) + 8 h + b mod 8 of a row's halves. A level may order a row's elements otherwise, as only its own kernels
// read what its quantize writes, but the rows keep these sizes.
struct ActBlocks {
  int8_t *q;       // (T, blocks * 32) values in [-127, 127], zero beyond K
  float *d;        // (T, blocks / 8, 2, 8) scale of a half
  float *s16;      // (T, blocks / 8, 2, 8) d * sum of the half's q
  float *s;        // (T, blocks) s16 of the first half + s16 of the second
  int32_t *sum16;  // (T, blocks / 8, 2, 8) sum of the half's q
  uint32_t blocks; // ceil(K / 32), rounded up to a multiple of 8; padding has d = 0
  // (T / kPanelRows, blocks, kPanelBlockBytes) or null: the rows once more, by panels, in a layout of the level's
  // many-row kernels, which save the time to make it when pack() did so before.
  uint8_t *panels = nullptr;

  // Rows from there on. Always inline: no copy may carry a level's instructions into other code.
  [[gnu::always_inline]] ActBlocks from(size_t row) const {
    const size_t b = row * blocks;
    return {q + b * 32,
            d + 2 * b,
            s16 + 2 * b,
            s + b,
            sum16 + 2 * b,
            blocks,
            panels && row % kPanelRows == 0 ? panels + b / kPanelRows * kPanelBlockBytes : nullptr};
  }
};

struct MatrixScales {            // one for block_rows x block_columns elements; absent where data is null
  const uint8_t *data = nullptr; // those of row `row`, which may lie before the matrix' first
  size_t stride = 0;             // bytes from one row of scales to the next
  int64_t row = 0;
  uint32_t dtype = 0, block_rows = 1, block_columns = 1;

  [[gnu::always_inline]] const uint8_t *of_row(uint32_t n) const {
    return data ? data + static_cast<uint64_t>(n - row) / block_rows * stride : nullptr;
  }
};

struct Matrix { // rows [0, n) of one segment
  const uint8_t *data;
  size_t row_stride; // bytes
  uint32_t dtype;
  uint32_t k;
  const uint8_t *next = nullptr; // what the caller reads after this call, when it does not follow: to be prefetched
  MatrixScales scales{};
};

struct KernelTable {
  const char *name;
  // Quantises rows x (T, k), row stride x_stride floats, into a (already sized for T rows).
  void (*quantize)(const float *x, size_t x_stride, uint32_t rows, uint32_t k, const ActBlocks &a);
  // Makes a.panels of kPanelRows quantised rows; null where the level has no use for them.
  void (*pack)(const ActBlocks &a);
  // y[t * y_stride + n - begin] = dot(w row n, activations row t) for n in [begin, end), t in [0, rows).
  // work: scratch of work_bytes(k) for this worker.
  void (*matmul)(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y,
                 size_t y_stride, void *work);
  // The same with float activations x (T, k); for F32, F16, BF16, F8_E4M3 always, for quantised types when exact is
  // asked.
  void (*matmul_float)(const Matrix &w, const float *x, size_t x_stride, uint32_t rows, uint32_t begin, uint32_t end,
                       float *y, size_t y_stride, void *work);
  size_t (*work_bytes)(uint32_t k);
  // out (k) = the row as float32.
  void (*dequantize_row)(uint32_t dtype, const uint8_t *in, uint32_t k, float *out);

  // Row helpers of the other ops.
  void (*scale)(float scale, float *y, uint32_t n);
  void (*rms_norm)(const float *x, const float *weight, const float *residual, float eps, float *out, uint32_t n);
  void (*silu_mul)(const float *gate, const float *up, float *out, uint32_t n);
  void (*gelu_tanh_mul)(const float *gate, const float *up, float *out, uint32_t n);
  void (*gelu_erf_mul)(const float *gate, const float *up, float *out, uint32_t n);
  void (*swiglu_oai)(const float *gate, const float *up, float *out, uint32_t n);
  void (*soft_cap)(float *x, float cap, uint32_t n); // x = cap * tanh(x / cap) in place
  float (*max)(const float *x, uint32_t n);
  float (*exp_sum)(float *x, float max, uint32_t n); // x = exp(x - max) in place; returns the sum
};

// Bytes of a row of k elements; 0 when the dtype is unknown or k does not fit its block.
size_t row_bytes(uint32_t dtype, uint64_t k);
bool is_quantized(uint32_t dtype);
// Whether a product with a matrix of this type takes its rows in int8, by APU_PRECISION_*.
bool has_quantized_rows(uint32_t dtype, int32_t precision);
bool has_matmul(uint32_t dtype);

// Null when the processor or the build lacks the level (APU_ISA_*).
const KernelTable *kernel_table(uint32_t isa);
uint32_t best_isa();

const KernelTable *portable_table();
const KernelTable *avx2_table();               // null on builds for other architectures
const KernelTable *avx2_vnni_table(bool evex); // with vpdpbusd in VEX or in EVEX encoding
const KernelTable *avx512_table();

} // namespace apu::cpu
