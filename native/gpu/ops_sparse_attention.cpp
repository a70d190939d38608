// SPARSE_ATTENTION: F16 rows of up to 512 elements go through matrix tiles, others through FMA. With few rows in the
// step what each attends to is cut into spans, which a second kernel adds up; with more a block takes all of a row.
#include "gpu/kernels/sparse_attention.h"
#include "gpu/turns.h"

#include <algorithm>

namespace apu::gpu {
namespace {

constexpr uint32_t kFewRows = kMatvecRows;
constexpr uint32_t kMostLds = 48 * 1024; // larger heads have fewer in a block of FMA

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
    args_.heads = uint32_t(b.info().tensor(op.in[0])->inner / args_.window.head_size);
    choose(b, op.state[1] != APU_NONE);
    chunks_ = (args_.heads + args_.chunk_heads - 1) / args_.chunk_heads;

    few_parts_ = uint64_t(std::min(b.info().max_rows, kFewRows)) * args_.heads * spans(b.info().max_positions);
    b.reserve(Scratch::partial, few_parts_ * (args_.window.head_size + 2) * sizeof(float));
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    SparseAttentionArgs args = args_;
    const bool cut = bucket.rows <= kFewRows;
    args.spans = cut ? spans(bucket.context) : 0;
    args.parts = launcher.scratch_as<float>(Scratch::partial);
    args.part_ends = args.parts + few_parts_ * args.window.head_size;
    launcher.launch(kernel_, {bucket.rows * (cut ? args.spans : 1), chunks_}, kSparseThreads, args, lds_);
    if (args.spans > 1) launcher.launch(sum_, {bucket.rows, args.heads}, kSparseSumThreads, args, sum_lds_);
  }

private:
  void choose(Builder &b, bool compressed) {
    const PagedState &window = args_.window, &rows = args_.rows;
    const uint32_t d = window.head_size;
    const bool fast = aligned(window) && (!compressed || (rows.dtype == window.dtype && aligned(rows)));
    const char *name = "sparse_attention_any";
    if (fast && window.dtype == APU_F16 && d % 16 == 0 && d <= kSparseTileMost) {
      name = d == kSparseTileMost ? "sparse_attention_tile_512" : "sparse_attention_tile_to_512";
      args_.chunk_heads = kSparseTileHeads;
      lds_ = sparse_tile_lds(b.props().wave_size, b.props().arch.rfind("gfx", 0) != 0, args_.pairs);
    } else {
      if (fast && window.dtype == APU_F32 && d % 8 == 0) name = "sparse_attention_f32";
      args_.chunk_heads = std::min(args_.heads, kSparseVectors);
      while (args_.chunk_heads > 1 && sparse_lds(args_.chunk_heads, d, args_.pairs) > kMostLds) args_.chunk_heads /= 2;
      lds_ = sparse_lds(args_.chunk_heads, d, args_.pairs);
    }
    sum_lds_ = sparse_sum_lds(d, args_.pairs);
    kernel_ = b.kernel(name, lds_);
    sum_ = b.kernel("sparse_attention_sum", sum_lds_);
  }

  uint32_t spans(uint32_t context) const { // of a row, at most
    const uint32_t window = args_.window.window;
    uint64_t rows = window ? std::min(window, context) : context;
    const uint32_t seen = args_.rows.page_rows ? context / (kPageRows / args_.rows.page_rows) : 0;
    rows += args_.ids ? std::min(args_.chosen, seen) : seen;
    return uint32_t(std::min<uint64_t>((rows + kSparseSpan - 1) / kSparseSpan, kSparseSpans));
  }

  Kernel kernel_, sum_;
  SparseAttentionArgs args_{};
  uint32_t lds_ = 0, sum_lds_ = 0, chunks_ = 0;
  uint64_t few_parts_ = 0;
};

} // namespace

std::unique_ptr<Op> make_sparse_attention(Builder &builder, const apu_op &op) {
  return std::make_unique<SparseAttention>(builder, op);
}

} // namespace apu::gpu
