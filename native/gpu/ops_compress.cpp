// COMPRESS: one kernel, a block for each row of the step; see kernels/compress.hip. SHARED_STORE is in ops_rope.cpp.
#include "gpu/kernels/compress.h"
#include "gpu/turns.h"

namespace apu::gpu {
namespace {

class Compress final : public Op {
public:
  Compress(Builder &b, const apu_op &op) {
    args_.step = b.step();
    args_.open = b.paged(op.state[0]);
    args_.rows = b.paged(op.state[1]);
    args_.in = b.scratch(op.in[0]);
    args_.gate = b.scratch(op.in[1]);
    args_.bias = b.vector(op.w[0]);
    args_.width = uint32_t(b.info().tensor(op.w[0])->inner);
    args_.tokens = uint32_t(b.info().tensor(op.w[0])->rows);
    args_.norm = b.vector(op.w[1]);
    args_.eps = op.f[0];
    args_.round = uint32_t(op.i[3]);
    args_.shrink = float(1 / std::sqrt(double(args_.rows.head_size)));
    set_turns(b, op, args_);
    lds_ = uint32_t(sizeof(float)) * (2 * args_.pairs + args_.rows.head_size);
    kernel_ = b.kernel("compress", lds_);
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    launcher.launch(kernel_, {bucket.rows}, kCompressThreads, args_, lds_);
  }

private:
  Kernel kernel_;
  CompressArgs args_{};
  uint32_t lds_;
};

} // namespace

std::unique_ptr<Op> make_compress(Builder &builder, const apu_op &op) {
  return std::make_unique<Compress>(builder, op);
}

} // namespace apu::gpu
