// EMBED: one block for each row; see kernels/rows.hip.
#include "gpu/kernels/rows.h"
#include "gpu/ops.h"

#include <algorithm>

namespace apu::gpu {
namespace {

class Embed final : public Op {
public:
  Embed(Builder &b, const apu_op &op) : kernel_(b.kernel("embed")) {
    const StepView step = b.step();
    args_.table = b.matrix(op.w[0]);
    args_.counts = step.counts;
    args_.rows = step.rows;
    args_.sampled = step.sampled;
    args_.out = b.scratch(op.out[0]);
    args_.scale = op.f[0];
    args_.copies = uint32_t(std::max(op.i[0], 1));
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    launcher.launch(kernel_, {bucket.rows}, kEmbedThreads, args_);
  }

private:
  Kernel kernel_;
  EmbedArgs args_{};
};

} // namespace

std::unique_ptr<Op> make_embed(Builder &builder, const apu_op &op) {
  return std::make_unique<Embed>(builder, op);
}

} // namespace apu::gpu
