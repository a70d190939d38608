// SPARSE_ATTENTION: with few rows in the step each is cut into spans, with more a block takes all of a row. Both belong
// to a class of rows: kernels/sparse_attention.hip gives a row the same bits within it.
#include "gpu/kernels/sparse_attention.h"
#include "gpu/turns.h"

#include <algorithm>

namespace apu::gpu {
namespace {

constexpr uint32_t kFewRows = kMatvecRows;
constexpr uint32_t kMostLds = 48 * 1024; // larger heads have fewer in a block

bool aligned(const PagedState &s) {
  return reinterpret_cast<uint64_t>(s.address) % 16 == 0 && s.page_bytes % 16 == 0;
}

class SparseAttention final : public Op {
public:
  SparseAttention(Builder &b, const apu_op &op) {
    args_.step = b.step();
    args_.window = b.paged(op.state[0]);
    if (op.state[1] != APU_NONE) args_.rows = b.paged(op.state[1]);
    args_.q = b.scratch(op.in[0]);
    args_.ids = reinterpret_cast<const i32 *>(b.scratch(op.in[1]));
    if (args_.ids) args_.chosen = uint32_t(b.info().tensor(op.in[1])->inner);
    args_.sinks = b.vector(op.w[0]);
    args_.out = b.scratch(op.out[0]);
    args_.scale = op.f[7];
    set_turns(b, op, args_);
    const uint32_t d = args_.window.head_size, few = std::min(b.info().max_rows, kFewRows);
    args_.heads = uint32_t(b.info().tensor(op.in[0])->inner / d);
    args_.chunk_heads = std::min(args_.heads, kSparseVectors);
    while (args_.chunk_heads > 1 && sparse_lds(args_.chunk_heads, d, args_.pairs) > kMostLds) args_.chunk_heads /= 2;
    lds_ = sparse_lds(args_.chunk_heads, d, args_.pairs);
    const uint32_t type = args_.window.dtype;
    const bool fast = d % 8 == 0 && aligned(args_.window) &&
                      (op.state[1] == APU_NONE || (args_.rows.dtype == type && aligned(args_.rows)));
    kernel_ = b.kernel(!fast             ? "sparse_attention_any"
                       : type == APU_F32 ? "sparse_attention_f32"
                                         : "sparse_attention_f16",
                       lds_);
    args_.slot_floats = sparse_part_floats(args_.chunk_heads, d);
    const uint64_t units = uint64_t(few) * chunks();
    b.reserve(Scratch::partial, units * spans(b.info().max_positions) * args_.slot_floats * sizeof(float));
    b.reserve(Scratch::counters, units * sizeof(u32));
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    SparseAttentionArgs args = args_;
    const bool cut = bucket.rows <= kFewRows;
    args.spans = cut ? spans(bucket.context) : 0;
    args.parts = launcher.scratch_as<float>(Scratch::partial);
    args.counters = launcher.scratch_as<u32>(Scratch::counters);
    launcher.launch(kernel_, {bucket.rows * (cut ? args.spans : 1), chunks()}, kSparseThreads, args, lds_);
  }

private:
  uint32_t chunks() const { return (args_.heads + args_.chunk_heads - 1) / args_.chunk_heads; }
  uint32_t spans(uint32_t context) const { // of a row, at most
    const uint32_t window = args_.window.window;
    uint64_t rows = window ? std::min(window, context) : context;
    const uint32_t seen = args_.rows.page_rows ? context / (kPageRows / args_.rows.page_rows) : 0;
    rows += args_.ids ? std::min(args_.chosen, seen) : seen;
    return uint32_t(std::min<uint64_t>((rows + kSparseSpan - 1) / kSparseSpan, kSparseSpans));
  }

  Kernel kernel_;
  SparseAttentionArgs args_{};
  uint32_t lds_;
};

} // namespace

std::unique_ptr<Op> make_sparse_attention(Builder &builder, const apu_op &op) {
  return std::make_unique<SparseAttention>(builder, op);
}

} // namespace apu::gpu
