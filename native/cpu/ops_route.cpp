// ROUTE: which experts a row goes to, and with what weight.
//
// The products with the router's rows come first, split by its rows (few rows: a router is a megabyte) or by tiles of
// both, and scored there unless a score depends on the others; then each row chooses its k best. A row's scores depend
// on nothing but the row, and of equal scores the lowest id wins, so that a row takes the same experts in any batch.
#include "cpu/matrix_product.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

namespace apu::cpu {
namespace {

constexpr uint32_t kTileRows = 32; // of the input, in one call
constexpr float kLowest = -std::numeric_limits<float>::infinity();

class Route final : public Op {
public:
  Route(Builder &b, const apu_op &op)
      : in_tensor_(*b.info().tensor(op.in[0])), router_(*b.info().tensor(op.w[1])), d_(uint32_t(in_tensor_.inner)),
        experts_(uint32_t(router_.rows)), k_(uint32_t(b.info().tensor(op.out[0])->inner)),
        ids_(reinterpret_cast<int32_t *>(b.scratch(op.out[0]))), weights_(b.scratch(op.out[1])),
        bias_(b.vector(op.w[2])), table_(b.info().tensor(op.w[3])), added_(b.vector(op.w[4])), score_(op.i[0]),
        divide_(op.i[1] != 0), scale_(op.f[1]), floor_(op.f[2]), groups_(uint32_t(op.i[2])),
        groups_used_(uint32_t(op.i[3])), sum2_(op.i[4] == APU_GROUP_SUM2), work_bytes_(b.kernels().work_bytes(d_)) {
    input_ = MatrixInput(b.scratch(op.in[0]), b.vector(op.w[0]), op.f[0], d_, true, false, false);
    input_.reserve(b.workspace, in_tensor_.rows);
    Workspace &ws = b.workspace;
    ws.score_bytes = std::max(ws.score_bytes, in_tensor_.rows * experts_ * sizeof(float));
    ws.worker_bytes = std::max(ws.worker_bytes, input_.worker_bytes() + aligned(experts_ * sizeof(uint32_t)) +
                                                    2 * aligned(experts_ * sizeof(float)) + aligned(work_bytes_));
  }

  void run(Worker &worker, Run &run) override {
    const uint32_t rows = run.rows(in_tensor_);
    if (rows == 0) return;
    Bump scratch = run.scratch(worker);
    const Choice choice{scratch.take<uint32_t>(experts_), scratch.take<float>(experts_), scratch.take<float>(experts_)};
    void *work = scratch.bytes(work_bytes_);
    const InputRows in = input_.prepare(worker, run, scratch, rows);
    float *scores = run.workspace->score; // (T, E)
    {
      const uint64_t row_bytes = router_.row_bytes;
      const uint32_t unit = rows < kManyRows ? chunk_rows(worker, row_bytes * experts_, row_bytes) : kWideUnit;
      const uint32_t across = (experts_ + unit - 1) / unit;
      Split split(worker, (rows + kTileRows - 1) / kTileRows * across, 1);
      for (uint32_t at, end; split.next(at, end);) {
        if (run.stopping()) break;
        for (; at < end; ++at) {
          const uint32_t t = at / across * kTileRows, e = at % across * unit;
          product(*run.kernels, in, t, std::min(kTileRows, rows - t), e, std::min(e + unit, experts_), scores, work);
        }
      }
      worker.barrier();
    }
    Split split(worker, rows, 8);
    for (uint32_t t, end; split.next(t, end);) {
      if (run.stopping()) break;
      for (; t < end; ++t) choose(run, scores + size_t(t) * experts_, choice, t);
    }
  }

  uint64_t work(const StepCopy &step) const override {
    const uint64_t rows = in_tensor_.d.rows == APU_ROWS_OUTPUT ? step.outputs.size() : step.rows.size();
    return rows * experts_ * d_;
  }

private:
  struct Choice {    // one worker's
    uint32_t *order; // (E)
    float *rank;     // (E) scores that the choice goes by
    float *group;    // (groups)
  };

  // The `used` best of `count` come first in `order`, of equal ones the lowest.
  static void best(const float *rank, uint32_t count, uint32_t used, uint32_t *order) {
    std::iota(order, order + count, 0u);
    if (used < count)
      std::nth_element(order, order + used - 1, order + count,
                       [rank](uint32_t a, uint32_t b) { return rank[a] != rank[b] ? rank[a] > rank[b] : a < b; });
  }

  // Experts of all groups but the best lose their rank.
  void limit(const Choice &c) const {
    const uint32_t size = experts_ / groups_;
    for (uint32_t g = 0; g < groups_; ++g) {
      float first = kLowest, second = kLowest;
      for (const float *r = c.rank + g * size, *end = r + size; r < end; ++r) {
        second = std::max(second, std::min(first, *r));
        first = std::max(first, *r);
      }
      c.group[g] = sum2_ ? first + second : first;
    }
    best(c.group, groups_, groups_used_, c.order);
    for (uint32_t i = groups_used_; i < groups_; ++i) std::fill_n(c.rank + c.order[i] * size, size, kLowest);
  }

  void product(const KernelTable &kernels, const InputRows &in, uint32_t t, uint32_t rows, uint32_t begin, uint32_t end,
               float *scores, void *work) const {
    float *y = scores + size_t(t) * experts_ + begin;
    for_segments(router_, begin, end, [&](const Matrix &matrix, uint32_t first, uint32_t last, uint32_t at) {
      kernels.matmul_float(matrix, in.x + size_t(t) * d_, d_, rows, first, last, y + at, experts_, work);
    });
    for (uint32_t i = 0; i < rows && added_; ++i)
      for (uint32_t e = begin; e < end; ++e) y[size_t(i) * experts_ + e - begin] += added_[e];
    for (uint32_t i = 0; i < rows && score_ != APU_SCORE_SOFTMAX; ++i) score(y + size_t(i) * experts_, end - begin);
  }

  void score(float *scores, uint32_t count) const {
    if (score_ == APU_SCORE_SIGMOID) {
      for (uint32_t e = 0; e < count; ++e) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
    } else {
      for (uint32_t e = 0; e < count; ++e)
        scores[e] = std::sqrt(std::max(scores[e], 0.0f) + std::log1p(std::exp(-std::fabs(scores[e]))));
    }
  }

  // The row's k experts come first in c.order.
  void choose(const float *scores, const Choice &c) const {
    for (uint32_t e = 0; e < experts_; ++e) {
      const float rank = bias_ ? scores[e] + bias_[e] : scores[e];
      c.rank[e] = std::isnan(rank) ? kLowest : rank; // a broken row still goes to k experts
    }
    if (groups_) limit(c);
    best(c.rank, experts_, k_, c.order);
  }

  void choose(Run &run, float *scores, const Choice &c, size_t t) const {
    uint32_t *order = c.order;
    if (score_ == APU_SCORE_SOFTMAX) {
      const float sum = run.kernels->exp_sum(scores, run.kernels->max(scores, experts_), experts_);
      for (uint32_t e = 0; e < experts_; ++e) scores[e] /= sum;
    }
    if (table_) {
      const int32_t token = run.token(run.step.rows[t]); // without one EMBED has failed the step
      std::memcpy(order, row_address(*table_, uint64_t(std::max(token, 0))), k_ * sizeof(uint32_t));
    } else {
      choose(scores, c);
    }
    std::sort(order, order + k_);
    float factor = scale_;
    if (divide_) {
      float sum = 0;
      for (uint32_t i = 0; i < k_; ++i) sum += scores[order[i]];
      factor /= std::max(sum, floor_);
    }
    for (uint32_t i = 0; i < k_; ++i) {
      ids_[t * k_ + i] = int32_t(order[i]);
      weights_[t * k_ + i] = scores[order[i]] * factor;
    }
  }

  const Tensor &in_tensor_; // (T, D)
  const Tensor &router_;    // (E, D)
  uint32_t d_, experts_, k_;
  int32_t *ids_;        // (T, k)
  float *weights_;      // (T, k)
  const float *bias_;   // (E) or null
  const Tensor *table_; // (V, k) or null
  const float *added_;  // (E) to products, or null
  int32_t score_;
  bool divide_;
  float scale_, floor_;
  uint32_t groups_, groups_used_;
  bool sum2_;
  size_t work_bytes_;
  MatrixInput input_;
};

} // namespace

std::unique_ptr<Op> make_route(Builder &builder, const apu_op &op) {
  return std::make_unique<Route>(builder, op);
}

} // namespace apu::cpu
