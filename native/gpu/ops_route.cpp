// ROUTE: products with the router, then the choice of each row's experts; see kernels/route.hip.
//
// The kernels for few rows and for many give the same bits, so that the number of rows decides by speed alone.
#include "gpu/kernels/route.h"
#include "gpu/ops.h"

#include <algorithm>

namespace apu::gpu {
namespace {

constexpr uint32_t kFewRows = 16;

class Route final : public Op {
public:
  Route(Builder &b, const apu_op &op) : in_(*b.info().tensor(op.in[0])), wave_(b.props().wave_size) {
    const RowCount count = {b.step().counts, in_.d.rows, uint32_t(in_.rows)};
    const uint32_t d = uint32_t(in_.inner);
    scores_.count = count;
    scores_.router = b.matrix(op.w[1]);
    scores_.in = b.scratch(op.in[0]);
    scores_.norm = b.vector(op.w[0]);
    scores_.eps = op.f[0];
    scores_.parts = std::min(kRouteThreads / wave_, d >= 4096 ? 8u : d >= 2048 ? 4u : d >= 1024 ? 2u : 1u);
    const auto aligned = [](const void *p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
    fast_ = scores_.router.type == APU_F32 && scores_.router.segment_count <= 1 && aligned(scores_.router.data) &&
            scores_.router.row_stride % 16 == 0 && aligned(scores_.norm) && d % 4 == 0;
    few_ = b.kernel(fast_ ? "route_scores_f32" : "route_scores_any");
    many_ = b.kernel(fast_ ? "route_scores_f32_many" : "route_scores_any_many");
    choose_.count = count;
    choose_.ids = reinterpret_cast<int32_t *>(b.scratch(op.out[0]));
    choose_.weights = b.scratch(op.out[1]);
    choose_.experts = scores_.router.rows;
    choose_.k = uint32_t(b.info().tensor(op.out[0])->inner);
    choose_.softmax = op.i[0] == APU_SCORE_SOFTMAX;
    choose_.divide = op.i[1] != 0;
    choose_.scale = op.f[1];
    choose_.floor = op.f[2];
    choose_kernel_ = b.kernel("route_choose");
    b.reserve(Scratch::scores, in_.rows * choose_.experts * sizeof(float));
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    const uint32_t rows = bucket.of(in_);
    if (rows == 0) return;
    const bool many = rows > kFewRows;
    const uint32_t experts = kRouteThreads / wave_ / scores_.parts * (many && fast_ ? kRouteManyExperts : 1);
    const Dim grid = {(choose_.experts + experts - 1) / experts,
                      many ? (rows + kRouteManyRows - 1) / kRouteManyRows : rows};
    RouteScoresArgs scores = scores_;
    RouteChooseArgs choose = choose_;
    choose.scores = scores.scores = launcher.scratch_as<float>(Scratch::scores);
    launcher.launch(many ? many_ : few_, grid, kRouteThreads, scores);
    launcher.launch(choose_kernel_, {rows}, kRouteThreads, choose);
  }

private:
  const Tensor &in_; // (T, D)
  uint32_t wave_;
  bool fast_ = false; // float rows at multiples of 16 bytes
  Kernel few_, many_, choose_kernel_;
  RouteScoresArgs scores_{};
  RouteChooseArgs choose_{};
};

} // namespace

std::unique_ptr<Op> make_route(Builder &builder, const apu_op &op) {
  return std::make_unique<Route>(builder, op);
}

} // namespace apu::gpu
