// ROPE_STORE: one kernel, a wave for each head of q, k and v; LATENT_STORE and SHARED_STORE, a wave for each head of q
// and one, or a block, for the row that is stored. See kernels/rope.hip and kernels/compress.hip.
#include "gpu/kernels/attention_args.h"
#include "gpu/turns.h"

#include <algorithm>

namespace apu::gpu {
namespace {

class RopeStore final : public Op {
public:
  RopeStore(Builder &b, const apu_op &op) {
    args_.step = b.step();
    args_.k_state = b.paged(op.state[0]);
    args_.v_state = b.paged(op.state[1]);
    args_.q = b.scratch(op.in[0]);
    args_.k = b.scratch(op.in[1]);
    args_.v = b.scratch(op.in[2]);
    args_.q_norm = b.vector(op.w[0]);
    args_.k_norm = b.vector(op.w[1]);
    args_.eps = op.f[0];
    args_.heads = uint32_t(b.info().tensor(op.in[0])->inner / args_.k_state.head_size);
    if (op.i[0] > 0) set_turns(b, op, args_);
    waves_ = kRopeThreads / b.props().wave_size;
    lds_ = uint32_t(sizeof(float)) *
           (2 * args_.pairs + waves_ * std::max(args_.k_state.head_size, args_.v_state.head_size));
    kernel_ = b.kernel("rope_store", lds_);
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    const uint32_t heads = args_.heads + 2 * args_.k_state.heads;
    launcher.launch(kernel_, {bucket.rows, (heads + waves_ - 1) / waves_}, kRopeThreads, args_, lds_);
  }

private:
  Kernel kernel_;
  RopeStoreArgs args_{};
  uint32_t waves_, lds_;
};

class RowStore final : public Op {
public:
  RowStore(Builder &b, const apu_op &op) {
    const bool latent = op.kind == APU_OP_LATENT_STORE;
    args_.step = b.step();
    args_.state = b.paged(op.state[0]);
    args_.q = b.scratch(op.in[0]);
    args_.c = b.scratch(op.in[1]);
    args_.norm = b.vector(op.w[0]);
    args_.eps = op.f[0];
    const uint32_t d = args_.state.head_size, width = uint32_t(b.info().tensor(op.in[0])->inner);
    args_.heads = latent ? uint32_t(op.i[3]) : width / d;
    args_.q_size = width / args_.heads;
    if (!latent) args_.round = uint32_t(op.i[3]);
    set_turns(b, op, args_);
    const uint32_t waves = kRopeThreads / b.props().wave_size;
    // A wave for each head, and for what is stored one more, or a block of its own.
    blocks_ = (args_.heads + (latent ? 1 : 0) + waves - 1) / waves + (latent ? 0 : 1);
    lds_ = uint32_t(sizeof(float)) * (2 * args_.pairs + (latent ? 1 : waves) * d);
    kernel_ = b.kernel(latent ? "latent_store" : "shared_store", lds_);
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    launcher.launch(kernel_, {bucket.rows, blocks_}, kRopeThreads, args_, lds_);
  }

private:
  Kernel kernel_;
  RowStoreArgs args_{};
  uint32_t lds_;
  uint32_t blocks_; // of a row
};

} // namespace

std::unique_ptr<Op> make_row_store(Builder &builder, const apu_op &op) {
  return std::make_unique<RowStore>(builder, op);
}

std::unique_ptr<Op> make_rope_store(Builder &builder, const apu_op &op) {
  return std::make_unique<RopeStore>(builder, op);
}

} // namespace apu::gpu
