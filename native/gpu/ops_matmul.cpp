// MATMUL: the input is normed and quantised once for all matrices of the op; few rows go to matvec kernels, many to
// GEMMs on matrix tiles. Matrices of float types, and all of them in precision "exact", read the rows in float.
#include "gpu/ops.h"

#include "cpu/kernels.h"

namespace apu::gpu {
namespace {

class Matmul final : public Op {
public:
  Matmul(Builder &b, const apu_op &op) : in_(*b.info().tensor(op.in[0])) {
    Product product;
    product.activation = op.i[0];
    product.limit = op.f[2];
    product.precision = op.i[1];
    product.residual = b.scratch(op.in[1]);
    product.soft_cap = op.f[1];
    product.output_rows = in_.d.rows == APU_ROWS_OUTPUT;
    InputDesc input;
    for (int m = 0; m < 4 && op.w[1 + m] != APU_NONE; ++m) {
      product.sides[m] = {b.matrix(op.w[1 + m]), b.vector(op.w[5 + m]), b.scratch(op.out[m])};
      ++product.count;
      const bool quantized = cpu::has_quantized_rows(product.sides[m].w.type, op.i[1]);
      (quantized ? input.quantized : input.floats) = true;
    }
    input.in = b.scratch(op.in[0]);
    input.norm = b.vector(op.w[0]);
    input.eps = op.f[0];
    input.k = uint32_t(in_.inner);
    input.max_rows = uint32_t(in_.rows);
    input.fine = input.quantized && op.i[1] == APU_PRECISION_FINE;
    input.output_rows = product.output_rows;
    input_ = make_input(b, input);
    few_ = make_matvec(b, product);
    if (in_.rows > kMatvecRows) many_ = make_gemm(b, product);
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    const Activations in = input_->launch(launcher, bucket);
    (bucket.of(in_) <= kMatvecRows ? few_ : many_)->launch(launcher, bucket, in);
  }

private:
  const Tensor &in_; // (T, K)
  std::unique_ptr<InputKernels> input_;
  std::unique_ptr<ProductKernels> few_, many_; // many_: null where the plan's rows are few
};

} // namespace

std::unique_ptr<Op> make_matmul(Builder &builder, const apu_op &op) {
  return std::make_unique<Matmul>(builder, op);
}

} // namespace apu::gpu
