// RMS_NORM, and GATHER_NORM, which norms the rows that have an output and nothing else.
//
// Both move 8 D bytes a row (12 D with a residual), all of it in the caches; most norms are part of the MATMUL that
// follows them and never come here.
#include "cpu/ops.h"

#include <cstring>

namespace apu::cpu {
namespace {

class RmsNorm final : public Op {
public:
  RmsNorm(Builder &b, const apu_op &op)
      : tensor_(*b.info().tensor(op.in[0])), in_(b.scratch(op.in[0])), residual_(b.scratch(op.in[1])),
        out_(b.scratch(op.out[0])), weight_(b.vector(op.w[0])), eps_(op.f[0]), d_(uint32_t(tensor_.inner)) {}

  void run(Worker &worker, Run &run) override {
    Split split(worker, run.rows(tensor_), 1 + 4096 / d_);
    for (uint32_t begin, end; split.next(begin, end);) {
      if (run.stopping()) break;
      for (size_t t = begin; t < end; ++t)
        run.kernels->rms_norm(in_ + t * d_, weight_, residual_ ? residual_ + t * d_ : nullptr, eps_, out_ + t * d_, d_);
    }
  }

  uint64_t work(const StepCopy &step) const override { return step.rows.size() * d_; }

private:
  const Tensor &tensor_;
  const float *in_;       // (T, D)
  const float *residual_; // (T, D) or null
  float *out_;            // (T, D)
  const float *weight_;   // (D) or null
  float eps_;
  uint32_t d_;
};

class GatherNorm final : public Op {
public:
  GatherNorm(Builder &b, const apu_op &op)
      : in_(b.scratch(op.in[0])), out_(b.scratch(op.out[0])), weight_(b.vector(op.w[0])), eps_(op.f[0]),
        d_(uint32_t(b.info().tensor(op.in[0])->inner)) {}

  void run(Worker &worker, Run &run) override {
    Split split(worker, uint32_t(run.step.outputs.size()), 1);
    for (uint32_t begin, end; split.next(begin, end);) {
      if (run.stopping()) break;
      for (size_t o = begin; o < end; ++o) {
        const apu_output &output = run.step.outputs[o];
        float *out = out_ + o * d_;
        run.kernels->rms_norm(in_ + size_t(output.row) * d_, weight_, nullptr, eps_, out, d_);
        if (output.want & APU_OUT_HIDDEN) std::memcpy(output.hidden, out, d_ * sizeof(float));
      }
    }
  }

  uint64_t work(const StepCopy &step) const override { return step.outputs.size() * d_; }

private:
  const float *in_;     // (T, D)
  float *out_;          // (O, D)
  const float *weight_; // (D) or null
  float eps_;
  uint32_t d_;
};

} // namespace

std::unique_ptr<Op> make_rms_norm(Builder &builder, const apu_op &op) {
  return std::make_unique<RmsNorm>(builder, op);
}

std::unique_ptr<Op> make_gather_norm(Builder &builder, const apu_op &op) {
  return std::make_unique<GatherNorm>(builder, op);
}

} // namespace apu::cpu
