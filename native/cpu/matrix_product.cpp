// The input of matrices: norm, quantisation and where the result lies; matrix_product.h says who does it and why.
// Shared memory (Workspace::act, ::normed) holds it from three rows on, until the op ends; before that it is the
// worker's own.
#include "cpu/matrix_product.h"

#include "quant/activations.h"

namespace apu::cpu {

void MatrixInput::reserve(Workspace &ws, uint64_t rows) const {
  rows = std::max<uint64_t>(rows, 1);
  ws.act_bytes =
      std::max(ws.act_bytes, quantized_ ? layout_.bytes(rows * terms_) + layout_.panel_bytes(rows * terms_) : 0);
  ws.normed_bytes = std::max(ws.normed_bytes, floats_ && norm_ ? rows * k_ * sizeof(float) : 0);
}

size_t MatrixInput::worker_bytes() const {
  return aligned(kRedundantRows * size_t(k_) * sizeof(float)) + layout_.bytes(kRedundantRows * terms_) +
         aligned(terms_ == 2 ? k_ * sizeof(float) : 0);
}

void MatrixInput::quantize(const KernelTable &kernels, const float *x, const ActBlocks &to, float *residual) const {
  kernels.quantize(x, k_, 1, k_, to);
  if (terms_ == 1) return;
  quant::quantize_residual(x, k_, residual);
  kernels.quantize(residual, k_, 1, k_, to.from(1));
}

InputRows MatrixInput::prepare(Worker &worker, Run &run, Bump &scratch, uint32_t rows) const {
  const KernelTable &kernels = *run.kernels;
  InputRows out{in_, {}};
  float *residual = terms_ == 2 ? scratch.take<float>(k_) : nullptr; // (K)
  if (rows <= kRedundantRows) {
    if (norm_) {
      float *x = scratch.take<float>(size_t(rows) * k_);
      for (size_t t = 0; t < rows; ++t) kernels.rms_norm(in_ + t * k_, norm_, nullptr, eps_, x + t * k_, k_);
      out.x = x;
    }
    if (quantized_) {
      out.a = layout_.at(scratch.bytes(layout_.bytes(rows * terms_)), rows * terms_);
      for (size_t t = 0; t < rows; ++t) quantize(kernels, out.x + t * k_, out.a.from(t * terms_), residual);
    }
    return out;
  }
  if (!norm_ && !quantized_) return out;
  float *row = scratch.take<float>(k_);
  float *normed = floats_ && norm_ ? run.workspace->normed : nullptr; // (T, K)
  const size_t act_rows = size_t(rows) * terms_;
  if (quantized_) out.a = layout_.at(run.workspace->act, act_rows);
  const bool panels = quantized_ && kernels.pack && act_rows >= kPanelRows;
  if (panels) out.a.panels = run.workspace->act + layout_.bytes(act_rows);
  const uint32_t group = panels ? kPanelRows : 1;
  Split split(worker, (rows + group - 1) / group, panels ? 1 : 1 + 2048 / k_);
  for (uint32_t begin, end; split.next(begin, end);) {
    if (run.stopping()) break;
    const size_t last = std::min(size_t(end) * group, size_t(rows));
    for (size_t t = size_t(begin) * group; t < last; ++t) {
      const float *x = in_ + t * k_;
      if (norm_) {
        float *to = normed ? normed + t * k_ : row;
        kernels.rms_norm(x, norm_, nullptr, eps_, to, k_);
        x = to;
      }
      if (quantized_) quantize(kernels, x, out.a.from(t * terms_), residual);
    }
    for (size_t t = size_t(begin) * group * terms_; panels && t + kPanelRows <= last * terms_; t += kPanelRows)
      kernels.pack(out.a.from(t));
  }
  worker.barrier();
  if (normed) out.x = normed;
  return out;
}

Activation activation(const KernelTable &kernels, int32_t kind) {
  switch (kind) {
  case APU_ACT_SILU: return kernels.silu_mul;
  case APU_ACT_GELU_TANH: return kernels.gelu_tanh_mul;
  case APU_ACT_GELU_ERF: return kernels.gelu_erf_mul;
  case APU_ACT_SWIGLU_OAI: return kernels.swiglu_oai;
  default: return nullptr;
  }
}

} // namespace apu::cpu
