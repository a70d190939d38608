// RMS_NORM and GATHER_NORM: one block for each row; see kernels/rows.hip.
#include "gpu/kernels/rows.h"
#include "gpu/ops.h"

namespace apu::gpu {
namespace {

class RmsNorm final : public Op {
public:
  RmsNorm(Builder &b, const apu_op &op) : kernel_(b.kernel("rms_norm")), tensor_(*b.info().tensor(op.in[0])) {
    args_.count = {b.step().counts, tensor_.d.rows, uint32_t(tensor_.rows)};
    args_.in = b.scratch(op.in[0]);
    args_.weight = b.vector(op.w[0]);
    args_.residual = b.scratch(op.in[1]);
    args_.out = b.scratch(op.out[0]);
    args_.d = uint32_t(tensor_.inner);
    args_.eps = op.f[0];
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    if (const uint32_t rows = bucket.of(tensor_)) launcher.launch(kernel_, {rows}, kNormThreads, args_);
  }

private:
  Kernel kernel_;
  const Tensor &tensor_; // (T, D)
  NormArgs args_{};
};

class GatherNorm final : public Op {
public:
  GatherNorm(Builder &b, const apu_op &op) : kernel_(b.kernel("gather_norm")) {
    const StepView step = b.step();
    args_.counts = step.counts;
    args_.outputs = step.outputs;
    args_.in = b.scratch(op.in[0]);
    args_.weight = b.vector(op.w[0]);
    args_.out = b.scratch(op.out[0]);
    args_.d = uint32_t(b.info().tensor(op.in[0])->inner);
    args_.eps = op.f[0];
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    if (bucket.outputs) launcher.launch(kernel_, {bucket.outputs}, kNormThreads, args_);
  }

private:
  Kernel kernel_;
  GatherArgs args_{};
};

} // namespace

std::unique_ptr<Op> make_rms_norm(Builder &builder, const apu_op &op) {
  return std::make_unique<RmsNorm>(builder, op);
}

std::unique_ptr<Op> make_gather_norm(Builder &builder, const apu_op &op) {
  return std::make_unique<GatherNorm>(builder, op);
}

} // namespace apu::gpu
