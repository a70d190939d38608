// HEAD_MATMUL: each head of every row by a matrix of its own, as latent attention absorbs its key and value matrices.
//
// A unit of work is one head with up to 128 rows, so that a step reads each matrix once for so many. Rows of a matrix
// (N, K) go through the kernels of MATMUL, and their results have the same bits in any batch. Of a matrix (K, N), which
// older files have, rows become floats, 128 at a time, and are added as attention adds values: one chain over K, in
// order.
#include "cpu/matrix_product.h"
#include "quant/fp8.h"

#include <cstring>

namespace apu::cpu {
namespace {

constexpr uint32_t kTileRows = 128; // of the input, in one unit

class HeadMatmul final : public Op {
public:
  HeadMatmul(Builder &b, const apu_op &op)
      : in_tensor_(*b.info().tensor(op.in[0])), w_(*b.info().tensor(op.w[0])), in_(b.scratch(op.in[0])),
        out_(b.scratch(op.out[0])), values_(b.attention()->f32.values), across_(op.i[0] != 0),
        heads_(uint32_t(w_.d.shape[0])), k_(uint32_t(w_.d.shape[across_ ? 1 : 2])),
        n_(uint32_t(w_.d.shape[across_ ? 2 : 1])), rest_(uint32_t(op.i[2])), layout_(k_) {
    quantized_ = !across_ && has_quantized_rows(w_.d.dtype, op.i[1]);
    work_bytes_ = across_ ? cpu::work_bytes(n_) : b.kernels().work_bytes(k_);
    size_t own = aligned(size_t(kTileRows) * n_ * sizeof(float));
    if (across_) own += aligned(kTileRows * kPageTokens * sizeof(float)) + aligned(n_ * kPageTokens * sizeof(float));
    if (quantized_) own += aligned(layout_.bytes(kTileRows)) + aligned(layout_.panel_bytes(kTileRows));
    b.workspace.worker_bytes = std::max(b.workspace.worker_bytes, own + aligned(work_bytes_));
  }

  void run(Worker &worker, Run &run) override {
    const uint32_t rows = run.rows(in_tensor_), tiles = (rows + kTileRows - 1) / kTileRows;
    Split split(worker, heads_ * tiles, 1);
    for (uint32_t begin, end; split.next(begin, end);) {
      for (uint32_t u = begin; u < end; ++u) { // consecutive units share a matrix
        if (run.stopping()) return;
        const uint32_t t = u % tiles * kTileRows, count = std::min(kTileRows, rows - t);
        Bump scratch = run.scratch(worker);
        // Rows of the result lie too far apart for the kernels to write them.
        float *y = scratch.take<float>(size_t(kTileRows) * n_); // (rows, N)
        if (across_)
          add_rows(*run.kernels, scratch, u / tiles, t, count, y);
        else
          multiply(*run.kernels, scratch, u / tiles, t, count, y);
        for (uint32_t i = 0; i < count; ++i) {
          float *to = out_ + (size_t(t + i) * heads_ + u / tiles) * (n_ + rest_);
          std::memcpy(to, y + size_t(i) * n_, n_ * sizeof(float));
          std::memcpy(to + n_, input(t + i, u / tiles) + k_, rest_ * sizeof(float));
        }
      }
    }
  }

  uint64_t work(const StepCopy &step) const override {
    const uint64_t rows = in_tensor_.d.rows == APU_ROWS_OUTPUT ? step.outputs.size() : step.rows.size();
    return rows * heads_ * n_ * k_;
  }

private:
  const float *input(size_t t, uint32_t h) const { return in_ + (t * heads_ + h) * (k_ + rest_); }

  void multiply(const KernelTable &kernels, Bump &scratch, uint32_t h, uint32_t t, uint32_t count, float *y) const {
    const size_t in_stride = size_t(heads_) * (k_ + rest_);
    ActBlocks a{};
    if (quantized_) {
      a = layout_.at(scratch.bytes(layout_.bytes(kTileRows)), count);
      kernels.quantize(input(t, h), in_stride, count, k_, a);
      uint8_t *panels = scratch.bytes(layout_.panel_bytes(kTileRows));
      if (kernels.pack && count >= kPanelRows) a.panels = panels;
      for (uint32_t i = 0; a.panels && i + kPanelRows <= count; i += kPanelRows) kernels.pack(a.from(i));
    }
    void *work = scratch.bytes(work_bytes_);
    const uint64_t base = uint64_t(h) * n_;
    for_segments(w_, base, base + n_, [&](const Matrix &matrix, uint32_t first, uint32_t last, uint32_t at) {
      if (quantized_)
        kernels.matmul(matrix, a, count, first, last, y + at, n_, work);
      else
        kernels.matmul_float(matrix, input(t, h), in_stride, count, first, last, y + at, n_, work);
    });
  }

  // y (rows, N) becomes the sum.
  void add_rows(const KernelTable &kernels, Bump &scratch, uint32_t h, uint32_t t, uint32_t count, float *y) const {
    float *x = scratch.take<float>(kTileRows * kPageTokens);     // (rows, 128) of the input
    float *part = scratch.take<float>(size_t(n_) * kPageTokens); // (128, N) of the matrix
    float *work = reinterpret_cast<float *>(scratch.bytes(work_bytes_));
    std::memset(y, 0, size_t(count) * n_ * sizeof(float));
    for (uint32_t k = 0; k < k_; k += kPageTokens) {
      const uint32_t some = std::min(kPageTokens, k_ - k);
      const uint64_t base = uint64_t(h) * k_ + k;
      for_segments(w_, base, base + some, [&](const Matrix &matrix, uint32_t first, uint32_t last, uint32_t at) {
        for (uint32_t row = first; row < last; ++row) {
          float *to = part + size_t(at + row - first) * n_;
          kernels.dequantize_row(matrix.dtype, matrix.data + row * matrix.row_stride, n_, to);
          quant::scale_e4m3_row(matrix.scales.dtype, matrix.scales.of_row(row), matrix.scales.block_columns, n_, to);
        }
      });
      uint32_t begins[kTileRows] = {}, ends[kTileRows];
      std::fill_n(ends, count, some);
      for (uint32_t i = 0; i < count; ++i) std::memcpy(x + i * kPageTokens, input(t + i, h) + k, some * sizeof(float));
      values_(x, count, reinterpret_cast<const uint8_t *>(part), n_, begins, ends, nullptr, y, work);
    }
  }

  const Tensor &in_tensor_; // (T, H, K + rest)
  const Tensor &w_;         // (H, N, K), or (H, K, N) where across
  const float *in_;
  float *out_; // (T, H, N + rest)
  decltype(AttentionKernels::Type::values) values_;
  bool across_, quantized_ = false;
  uint32_t heads_, k_, n_, rest_;
  ActLayout layout_;
  size_t work_bytes_ = 0;
};

} // namespace

std::unique_ptr<Op> make_head_matmul(Builder &builder, const apu_op &op) {
  return std::make_unique<HeadMatmul>(builder, op);
}

} // namespace apu::cpu
