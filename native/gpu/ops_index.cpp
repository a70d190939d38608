// INDEX: queries, then scores and the choice, for as many rows of the step at a time as their scores have room; see
// kernels/index.hip. Which kernel makes the scores is the plan's matter, not the step's: a row has the same bits in any
// batch.
#include "gpu/kernels/attention_args.h"
#include "gpu/kernels/index.h"
#include "gpu/kernels/sample.h"
#include "gpu/turns.h"

#include <algorithm>

namespace apu::gpu {
namespace {

constexpr uint64_t kMostScoreBytes = 16u << 20; // beyond them the rows of a step take turns
constexpr uint32_t kMostTurnRows = 256;
constexpr uint32_t kBlocksOfUnit = 8;   // of a compute unit: more stride
constexpr uint32_t kMostTileHeads = 96; // whose queries have room in LDS

class Index final : public Op {
public:
  Index(Builder &b, const apu_op &op) {
    const PlanInfo &info = b.info();
    const PagedState &rows = args_.rows = b.paged(op.state[0]);
    const uint32_t d = rows.head_size;
    args_.step = b.step();
    args_.q = b.scratch(op.in[0]);
    args_.weights = b.scratch(op.in[1]);
    args_.ids = reinterpret_cast<int32_t *>(b.scratch(op.out[0]));
    args_.scale = op.f[7];
    args_.round = uint32_t(op.i[3]);
    args_.shrink = float(1 / std::sqrt(double(d)));
    args_.heads = uint32_t(info.tensor(op.in[1])->inner);
    args_.padded = (args_.heads + kIndexTileHeads - 1) / kIndexTileHeads * kIndexTileHeads;
    args_.k = uint32_t(info.tensor(op.out[0])->inner);
    args_.tokens = kPageRows / rows.page_rows;
    const uint32_t pages = (info.max_positions + kPageRows - 1) / kPageRows;
    args_.most = (pages * rows.page_rows + kCell - 1) / kCell * kCell;
    set_turns(b, op, args_);
    const uint32_t most_rows = std::min(info.max_rows, kMostTurnRows);
    turn_ = uint32_t(std::clamp<uint64_t>(kMostScoreBytes / (args_.most * sizeof(float)), 1, most_rows));

    waves_ = kIndexThreads / b.props().wave_size;
    queries_lds_ = uint32_t(sizeof(float)) * (2 * args_.pairs + waves_ * d);
    queries_ = b.kernel("index_queries", queries_lds_);
    const bool aligned = reinterpret_cast<uint64_t>(rows.address) % 16 == 0 && rows.page_bytes % 16 == 0 && d % 8 == 0;
    tiles_ = aligned && rows.dtype == APU_F16 && args_.round == APU_ROUND_FP4 && d == kIndexTileElements &&
             rows.page_rows % kIndexTileRows == 0 && args_.padded <= kMostTileHeads;
    if (tiles_) {
      scores_lds_ = args_.padded * (kIndexTileStride * 2 + uint32_t(sizeof(float)));
      scores_ = b.kernel("index_scores_tiles", scores_lds_);
      most_blocks_ = kBlocksOfUnit * std::max(b.props().compute_units, 1u);
      b.reserve(Scratch::halves, tile_bytes(info.max_rows) + info.max_rows * args_.padded * sizeof(float));
    } else {
      scores_lds_ = uint32_t(sizeof(float)) * kIndexFmaHeads * ((d + 3) / 4 * 4);
      const char *type = !aligned ? "any" : rows.dtype == APU_F32 ? "f32" : "f16";
      scores_ = b.kernel(std::string("index_scores_") + type, scores_lds_);
    }
    choose_ = b.kernel("index_choose");
    b.reserve(Scratch::counters, uint64_t(turn_) * kIndexBins * sizeof(uint32_t));
    b.reserve(Scratch::scores, uint64_t(turn_) * args_.most * sizeof(float));
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    IndexArgs args = args_;
    if (tiles_) {
      args.tiles = launcher.scratch_as<u16>(Scratch::halves);
      args.scaled = reinterpret_cast<float *>(launcher.scratch(Scratch::halves) + tile_bytes(bucket.rows));
    }
    args.scores = launcher.scratch_as<float>(Scratch::scores);
    args.counts = launcher.scratch_as<uint32_t>(Scratch::counters);
    const uint32_t heads = tiles_ ? args.padded : args.heads;
    launcher.launch(queries_, {bucket.rows, (heads + waves_ - 1) / waves_}, kIndexThreads, args, queries_lds_);
    const uint32_t seen = bucket.context / args.tokens;
    for (uint32_t rows; args.first < bucket.rows; args.first += rows) {
      rows = std::min(turn_, bucket.rows - args.first);
      if (seen > args.k) {
        const uint32_t of_block = tiles_ ? waves_ * kIndexTileRows : kIndexFmaThreads;
        uint32_t blocks = (seen + of_block - 1) / of_block;
        if (tiles_) blocks = std::min(blocks, std::max(most_blocks_ / rows, 1u));
        launcher.launch(scores_, {blocks, rows}, tiles_ ? kIndexThreads : kIndexFmaThreads, args, scores_lds_);
      }
      launcher.launch(choose_, {rows}, kFinishThreads, args);
    }
  }

private:
  uint64_t tile_bytes(uint32_t rows) const { return uint64_t(rows) * args_.padded * kIndexTileElements * 2; }

  Kernel queries_, scores_, choose_;
  IndexArgs args_{};
  bool tiles_ = false; // scores are made by matrix tiles
  uint32_t waves_ = 0, queries_lds_ = 0, scores_lds_ = 0, most_blocks_ = 0;
  uint32_t turn_ = 0; // rows of the step whose scores have room
};

} // namespace

std::unique_ptr<Op> make_index(Builder &builder, const apu_op &op) {
  return std::make_unique<Index>(builder, op);
}

} // namespace apu::gpu
