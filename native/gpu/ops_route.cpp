// ROUTE: products with the router, then the choice of each row's experts, in one kernel where rows are few; see
// kernels/route.hip. The kernels for few rows and for many give the same bits: the number of rows decides by speed
// alone.
#include "gpu/kernels/route.h"
#include "gpu/ops.h"

#include <algorithm>

namespace apu::gpu {
namespace {

constexpr uint32_t kFewRows = 4;
constexpr uint32_t kBlocksOfUnit = 2;

class Route final : public Op {
public:
  Route(Builder &b, const apu_op &op)
      : in_(*b.info().tensor(op.in[0])), wave_(b.props().wave_size), units_(b.props().compute_units) {
    const uint32_t d = uint32_t(in_.inner);
    args_.count = {b.step().counts, in_.d.rows, uint32_t(in_.rows)};
    args_.router = b.matrix(op.w[1]);
    args_.in = b.scratch(op.in[0]);
    args_.norm = b.vector(op.w[0]);
    args_.ids = reinterpret_cast<int32_t *>(b.scratch(op.out[0]));
    args_.weights = b.scratch(op.out[1]);
    args_.eps = op.f[0];
    args_.k = uint32_t(b.info().tensor(op.out[0])->inner);
    args_.score = uint32_t(op.i[0]);
    args_.divide = op.i[1] != 0;
    args_.scale = op.f[1];
    args_.floor = op.f[2];
    args_.bias = b.vector(op.w[2]);
    args_.added = b.vector(op.w[4]);
    args_.groups = uint32_t(op.i[2]);
    args_.groups_used = uint32_t(op.i[3]);
    args_.group_sum2 = op.i[4] == APU_GROUP_SUM2;
    args_.table = b.matrix(op.w[3]);
    args_.tokens = b.step().rows;
    args_.sampled = b.step().sampled;
    const uint32_t experts = args_.router.rows;
    args_.parts = std::min(kRouteThreads / wave_, d >= 4096 || (d >= 1024 && experts <= 128) ? 8u
                                                  : d >= 2048                                ? 4u
                                                                                             : 2u);
    const auto at = [](const void *p) { return reinterpret_cast<uintptr_t>(p); };
    const uint32_t bytes = args_.router.type == APU_F32 ? 16 : args_.router.type == APU_F16 ? 8 : 0; // of four columns
    fast_ = bytes && d % 4 == 0 && at(args_.in) % 16 == 0 && at(args_.norm) % 16 == 0;
    for (const apu_segment &s : b.info().tensor(op.w[1])->segments)
      fast_ = fast_ && s.address % bytes == 0 && s.row_stride % bytes == 0;
    const std::string name = !fast_ ? "any" : bytes == 16 ? "f32" : "f16";
    one_ = experts <= kRouteWaveItems * wave_;
    few_ = b.kernel("route_scores_" + name);
    if (in_.rows > kFewRows) many_ = b.kernel("route_scores_" + name + "_many");
    choose_ = b.kernel("route_choose");
    b.reserve(Scratch::scores, in_.rows * experts * sizeof(float));
    b.reserve(Scratch::counters, kFewRows * sizeof(uint32_t));
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    const uint32_t rows = bucket.of(in_);
    if (rows == 0) return;
    const bool many = rows > kFewRows;
    const uint32_t row_blocks = many ? (rows + kRouteManyRows - 1) / kRouteManyRows : rows;
    const auto expert_blocks = [&](uint32_t share) {
      const uint32_t experts = kRouteThreads / wave_ / share * (many && fast_ ? kRouteManyExperts : 1);
      return (args_.router.rows + experts - 1) / experts;
    };
    // With enough blocks to fill the device, the fewer waves share an expert the more experts share the reading of
    // rows.
    uint32_t share = args_.parts;
    while (many && fast_ && share > 1 &&
           uint64_t(expert_blocks(share / 2)) * row_blocks >= kBlocksOfUnit * uint64_t(units_))
      share /= 2;
    const Dim grid = {expert_blocks(share), row_blocks};
    RouteArgs args = args_;
    args.share = share;
    args.scores = launcher.scratch_as<float>(Scratch::scores);
    if (!many && one_) args.counters = launcher.scratch_as<uint32_t>(Scratch::counters);
    launcher.launch(many ? many_ : few_, grid, kRouteThreads, args);
    if (!args.counters) launcher.launch(choose_, {rows}, kRouteThreads, args);
  }

private:
  const Tensor &in_; // (T, D)
  uint32_t wave_, units_;
  bool fast_ = false; // rows at multiples of four columns
  bool one_ = false;  // few enough experts that the last block of products chooses
  Kernel few_, many_, choose_;
  RouteArgs args_{};
};

} // namespace

std::unique_ptr<Op> make_route(Builder &builder, const apu_op &op) {
  return std::make_unique<Route>(builder, op);
}

} // namespace apu::gpu
