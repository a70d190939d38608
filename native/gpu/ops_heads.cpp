// HEAD_MATMUL: one kernel for a single row, one for tiles of several; see kernels/heads.hip. Both give a row the same
// bits. All types are multiplied in float, whatever the precision: there is no second class of results.
#include "gpu/kernels/heads.h"
#include "gpu/ops.h"

#include <algorithm>

namespace apu::gpu {
namespace {

class HeadMatmul final : public Op {
public:
  HeadMatmul(Builder &b, const apu_op &op) : in_(*b.info().tensor(op.in[0])) {
    const Tensor &w = *b.info().tensor(op.w[0]);
    const bool across = op.i[0] != 0;
    args_.count = {b.step().counts, in_.d.rows, uint32_t(in_.rows)};
    args_.w = b.matrix(op.w[0]);
    args_.in = b.scratch(op.in[0]);
    args_.out = b.scratch(op.out[0]);
    args_.heads = uint32_t(w.d.shape[0]);
    args_.k = uint32_t(w.d.shape[across ? 1 : 2]);
    args_.n = uint32_t(w.d.shape[across ? 2 : 1]);
    args_.rest = uint32_t(op.i[2]);
    const uint32_t wave = b.props().wave_size;
    for (args_.lanes = 1; args_.lanes < wave && args_.lanes * kHeadColumns < args_.k;) args_.lanes *= 2;
    const std::string kernel = name(args_.w.type, across);
    const uint32_t outputs = kernel == "heads_any" ? 1 : kHeadOutputs;
    const uint32_t each = across ? wave * kHeadColumns : kHeadThreads / args_.lanes * outputs;
    args_.blocks = (args_.n + each - 1) / each;
    args_.aligned =
        args_.k % kHeadColumns == 0 && args_.rest % 4 == 0 && reinterpret_cast<uintptr_t>(args_.in) % 16 == 0;
    one_ = b.kernel(kernel + "_r1");
    if (in_.rows > 1) many_ = b.kernel(kernel + "_many");
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    const uint32_t rows = bucket.of(in_), tile = rows == 1 ? 1 : kHeadRows;
    if (rows == 0) return;
    launcher.launch(rows == 1 ? one_ : many_, {(rows + tile - 1) / tile * args_.blocks, args_.heads}, kHeadThreads,
                    args_);
  }

private:
  static std::string name(uint32_t type, bool across) {
    if (across) return "heads_across";
    switch (type) {
    case APU_F32: return "heads_f32";
    case APU_F16: return "heads_f16";
    case APU_BF16: return "heads_bf16";
    case APU_Q8_0: return "heads_q8_0";
    default: return "heads_any";
    }
  }

  const Tensor &in_; // (T, H, K + rest)
  Kernel one_, many_;
  HeadArgs args_{};
};

} // namespace

std::unique_ptr<Op> make_head_matmul(Builder &builder, const apu_op &op) {
  return std::make_unique<HeadMatmul>(builder, op);
}

} // namespace apu::gpu
