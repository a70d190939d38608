// EXPERTS: the chosen experts' matrices in two halves (apu.h). The first half prepares one input for each row, the
// second one for each row and slot; few rows go to matvecs over (row, slot), many are grouped by expert.
#include "gpu/ops.h"

#include "cpu/kernels.h"

namespace apu::gpu {
namespace {

class Experts final : public Op {
public:
  Experts(Builder &b, const apu_op &op) : in_(*b.info().tensor(op.in[0])) {
    ExpertProduct product;
    product.second = op.i[0] == APU_ACT_NONE;
    product.activation = op.i[0];
    product.limit = op.f[1];
    product.precision = op.i[1];
    product.used = uint32_t(b.info().tensor(op.in[1])->inner);
    product.experts = uint32_t(b.info().tensor(op.w[1])->d.shape[0]);
    product.ids = reinterpret_cast<const int32_t *>(b.scratch(op.in[1]));
    product.weights = b.scratch(op.in[2]);
    product.residual = b.scratch(op.in[3]);
    product.out = b.scratch(op.out[0]);
    InputDesc input;
    for (int m = 0; m < (product.second ? 1 : 2); ++m) {
      product.w[m] = b.matrix(op.w[1 + m]), product.bias[m] = b.vector(op.w[3 + m]);
      const bool quantized = cpu::has_quantized_rows(product.w[m].type, op.i[1]);
      (quantized ? input.quantized : input.floats) = true;
    }
    input.in = b.scratch(op.in[0]);
    input.norm = product.second ? nullptr : b.vector(op.w[0]);
    input.eps = op.f[0];
    input.k = product.w[0].k;
    input.max_rows = uint32_t(in_.rows);
    input.rows_each = product.second ? product.used : 1;
    input_ = make_input(b, input);
    few_ = make_expert_matvec(b, product);
    if (in_.rows > kMatvecRows) many_ = make_expert_gemm(b, product);
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    const Activations in = input_->launch(launcher, bucket);
    (bucket.of(in_) <= kMatvecRows ? few_ : many_)->launch(launcher, bucket, in);
  }

private:
  const Tensor &in_; // (T, K) or (T, k, K)
  std::unique_ptr<InputKernels> input_;
  std::unique_ptr<ProductKernels> few_, many_; // many_: null where the plan's rows are few
};

} // namespace

std::unique_ptr<Op> make_experts(Builder &builder, const apu_op &op) {
  return std::make_unique<Experts>(builder, op);
}

} // namespace apu::gpu
