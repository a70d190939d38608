// INDEX: which compressed rows a row attends to, by the scores of many small heads.
//
// Queries are rotated and rounded first. Then, 32 rows of the step at a time, (row, page) pairs are scored, each page
// by one product of its rows with the row's heads, and the rows choose. Where no more than k can be seen nothing is
// scored. A score depends on nothing but the row and the page's row, and of equal ones the lowest row wins, so that the
// choice is the same in any batch.
#include "cpu/matrix_product.h"
#include "cpu/rotate.h"
#include "cpu/rounding.h"

#include <cmath>
#include <limits>
#include <numeric>

namespace apu::cpu {
namespace {

constexpr uint32_t kTileRows = 32;

class Index final : public Op {
public:
  Index(Builder &b, const apu_op &op)
      : state_(b.info().states[size_t(op.state[0])]), q_(b.scratch(op.in[0])), weight_(b.scratch(op.in[1])),
        ids_(reinterpret_cast<int32_t *>(b.scratch(op.out[0]))), scale_(op.f[7]), halves_(op.i[1] == APU_ROPE_HALVES),
        pairs_(uint32_t(op.i[0]) / 2), round_(op.i[3]), d_(state_.d.head_size),
        heads_(uint32_t(b.info().tensor(op.in[1])->inner)), k_(uint32_t(b.info().tensor(op.out[0])->inner)),
        per_page_(state_.d.rows_per_page), tokens_(kPageTokens / per_page_),
        most_((b.info().max_positions + kPageTokens - 1) / kPageTokens * per_page_), table_(b.rope(op)),
        work_bytes_(b.kernels().work_bytes(d_)) {
    Workspace &ws = b.workspace;
    const size_t tile = std::min(kTileRows, b.info().max_rows);
    ws.score_bytes = std::max(ws.score_bytes, tile * most_ * sizeof(float));
    ws.worker_bytes = std::max(ws.worker_bytes, aligned(size_t(heads_) * per_page_ * sizeof(float)) +
                                                    aligned(most_ * sizeof(uint32_t)) + aligned(work_bytes_));
  }

  void run(Worker &worker, Run &run) override {
    const uint32_t rows = uint32_t(run.step.rows.size());
    Bump scratch = run.scratch(worker);
    float *products = scratch.take<float>(size_t(heads_) * per_page_); // (H, rows of a page)
    uint32_t *order = scratch.take<uint32_t>(most_);
    void *work = scratch.bytes(work_bytes_);
    {
      const RopeTable &table = run.workspace->ropes[table_];
      Split split(worker, rows * heads_, std::max(1u, 1024 / d_));
      for (uint32_t u, end; split.next(u, end);) {
        if (run.stopping()) break;
        for (; u < end; ++u) {
          const size_t t = u / heads_;
          float *q = q_ + size_t(u) * d_;
          rotate(q + d_ - 2 * pairs_, table.cos + t * pairs_, table.sin + t * pairs_, pairs_, halves_);
          round_row(round_, q, d_, 2 * pairs_);
        }
      }
    }
    for (uint32_t tile = 0; tile < rows; tile += kTileRows) {
      worker.barrier();
      const uint32_t count = std::min(kTileRows, rows - tile);
      uint32_t pages = 0;
      for (uint32_t t = tile; t < tile + count; ++t)
        if (const uint32_t n = seen(run, t); n > k_) pages = std::max(pages, (n + per_page_ - 1) / per_page_);
      {
        Split split(worker, count * pages, 1);
        for (uint32_t u, end; split.next(u, end);) {
          if (run.stopping()) break;
          for (; u < end; ++u) score(run, tile + u / pages, u % pages, row_scores(run, u / pages), products, work);
        }
        worker.barrier();
      }
      Split split(worker, count, 1);
      for (uint32_t t, end; split.next(t, end);) {
        if (run.stopping()) break;
        for (; t < end; ++t) choose(row_scores(run, t), seen(run, tile + t), order, ids_ + size_t(tile + t) * k_);
      }
    }
  }

  uint64_t work(const StepCopy &step) const override {
    uint64_t positions = 0;
    for (const apu_row &row : step.rows) positions += row.position / tokens_;
    return (positions + step.rows.size()) * heads_ * d_;
  }

private:
  uint32_t seen(const Run &run, uint32_t t) const { return (run.step.rows[t].position + 1) / tokens_; }
  float *row_scores(const Run &run, uint32_t t) const { return run.workspace->score + size_t(t) * most_; }

  void score(const Run &run, uint32_t t, uint32_t page, float *scores, float *products, void *work) const {
    const uint32_t n = seen(run, t), first = page * per_page_;
    if (n <= k_ || first >= n) return;
    const uint32_t count = std::min(per_page_, n - first);
    const uint64_t at = run.step.page_table(run.step.rows[t].sequence, state_.d.group)[page];
    const Matrix matrix{state_.head(at, 0), state_.row_bytes, state_.d.dtype, d_};
    run.kernels->matmul_float(matrix, q_ + size_t(t) * heads_ * d_, d_, heads_, 0, count, products, per_page_, work);
    float *to = scores + first;
    std::fill_n(to, count, 0.0f);
    for (uint32_t h = 0; h < heads_; ++h) {
      const float weight = weight_[size_t(t) * heads_ + h], *p = products + h * per_page_;
      for (uint32_t i = 0; i < count; ++i) to[i] += weight * std::max(p[i], 0.0f);
    }
    for (uint32_t i = 0; i < count; ++i)
      to[i] = std::isnan(to[i]) ? -std::numeric_limits<float>::infinity() : to[i] * scale_;
  }

  void choose(const float *scores, uint32_t n, uint32_t *order, int32_t *ids) const {
    const uint32_t count = std::min(n, k_);
    std::iota(order, order + n, 0u);
    if (n > k_) {
      std::nth_element(order, order + k_ - 1, order + n, [scores](uint32_t a, uint32_t b) {
        return scores[a] != scores[b] ? scores[a] > scores[b] : a < b;
      });
      std::sort(order, order + k_);
    }
    std::copy_n(order, count, ids);
    std::fill_n(ids + count, k_ - count, -1);
  }

  const State &state_;  // pages (128 / tokens, d)
  float *q_;            // (T, H, d)
  const float *weight_; // (T, H)
  int32_t *ids_;        // (T, k)
  float scale_;
  bool halves_;
  uint32_t pairs_;
  int32_t round_;
  uint32_t d_, heads_, k_, per_page_, tokens_;
  size_t most_; // rows that can be seen, whole pages
  uint32_t table_;
  size_t work_bytes_;
};

} // namespace

std::unique_ptr<Op> make_index(Builder &builder, const apu_op &op) {
  return std::make_unique<Index>(builder, op);
}

} // namespace apu::cpu
