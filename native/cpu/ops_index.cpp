// INDEX: which compressed rows a row attends to, by the scores of many small heads.
//
// Queries are rotated and rounded first. Then, 32 rows of the step at a time, pages are scored, each for all of these
// rows, and the rows choose. Where no more than k can be seen nothing is scored. Rows of FP4 go through integers;
// other rows, and pages that hold one, are multiplied as floats. A score depends on nothing but the row
// and what it can see of the page, and of equal ones the lowest row wins, so that the choice is the same in any batch.
#include "cpu/matrix_product.h"
#include "cpu/rotate.h"
#include "cpu/rounding.h"
#include "quant/rounding.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace apu::cpu {
namespace {

constexpr uint32_t kTileRows = 32;
constexpr uint32_t kBins = 1u << 11; // of a pass over the keys

// Orders as the numbers do; both zeros are one.
uint32_t order_key(float x) {
  x += 0.0f;
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return bits ^ (bits >> 31 ? ~0u : 1u << 31);
}

class Index final : public Op {
public:
  Index(Builder &b, const apu_op &op)
      : state_(b.info().states[size_t(op.state[0])]), q_(b.scratch(op.in[0])), weight_(b.scratch(op.in[1])),
        ids_(reinterpret_cast<int32_t *>(b.scratch(op.out[0]))), scale_(op.f[7]), halves_(op.i[1] == APU_ROPE_HALVES),
        pairs_(uint32_t(op.i[0]) / 2), round_(op.i[3]), d_(state_.d.head_size),
        heads_(uint32_t(b.info().tensor(op.in[1])->inner)), k_(uint32_t(b.info().tensor(op.out[0])->inner)),
        per_page_(state_.d.rows_per_page), tokens_(kPageTokens / per_page_),
        most_((b.info().max_positions + kPageTokens - 1) / kPageTokens * per_page_), kernels_(b.attention()->index),
        table_(b.rope(op)), work_bytes_(b.kernels().work_bytes(d_)), max_rows_(b.info().max_rows) {
    groups_ = round_ == APU_ROUND_FP4 && d_ % quant::kFp4Group == 0 ? d_ / quant::kFp4Group : 0;
    tiles_ = groups_ ? (heads_ + kIndexTile - 1) / kIndexTile : 0;
    const size_t lanes = size_t(max_rows_) * tiles_ * kIndexTile;
    Workspace &ws = b.workspace;
    ws.score_bytes = std::max(ws.score_bytes, aligned(std::min(kTileRows, max_rows_) * most_ * sizeof(float)) +
                                                  aligned(lanes * d_) + 2 * aligned(lanes * groups_ * sizeof(float)) +
                                                  aligned(lanes * sizeof(float)) + aligned(lanes));
    const size_t numbers = size_t(per_page_) * groups_;
    ws.worker_bytes = std::max(ws.worker_bytes, aligned(size_t(heads_) * per_page_ * sizeof(float)) +
                                                    aligned(most_ * sizeof(uint32_t)) + aligned(work_bytes_) +
                                                    aligned(d_ * sizeof(float)) + aligned(numbers * quant::kFp4Group) +
                                                    aligned(numbers * sizeof(float)));
  }

  void run(Worker &worker, Run &run) override {
    const uint32_t rows = uint32_t(run.step.rows.size());
    const size_t lanes = size_t(max_rows_) * tiles_ * kIndexTile, numbers = size_t(per_page_) * groups_;
    Bump shared(reinterpret_cast<uint8_t *>(run.workspace->score)), scratch = run.scratch(worker);
    Call c{run,
           shared.take<float>(std::min(kTileRows, max_rows_) * most_),
           shared.take<int8_t>(lanes * d_),
           shared.take<float>(lanes * groups_),
           shared.take<int32_t>(lanes * groups_),
           shared.take<float>(lanes),
           shared.take<uint8_t>(lanes),
           scratch.take<float>(size_t(heads_) * per_page_),
           scratch.take<uint32_t>(most_),
           scratch.bytes(work_bytes_),
           scratch.take<float>(d_),
           scratch.take<uint8_t>(numbers * quant::kFp4Group),
           scratch.take<float>(numbers)};
    {
      Split split(worker, rows * heads_, std::max(1u, 1024 / d_));
      for (uint32_t u, end; split.next(u, end);) {
        if (run.stopping()) break;
        for (; u < end; ++u) prepare(c, u / heads_, u % heads_);
      }
    }
    for (uint32_t tile = 0; tile < rows; tile += kTileRows) {
      worker.barrier();
      const uint32_t count = std::min(kTileRows, rows - tile);
      uint32_t pages = 0;
      for (uint32_t t = tile; t < tile + count; ++t)
        if (const uint32_t n = seen(run, t); n > k_) pages = std::max(pages, (n + per_page_ - 1) / per_page_);
      {
        Split split(worker, pages, 1);
        for (uint32_t page, end; split.next(page, end);) {
          if (run.stopping()) break;
          for (; page < end; ++page) score_page(c, tile, count, page);
        }
        worker.barrier();
      }
      Split split(worker, count, 1);
      for (uint32_t t, end; split.next(t, end);) {
        if (run.stopping()) break;
        for (; t < end; ++t) choose(row_scores(c, t), seen(run, tile + t), c.order, ids_ + size_t(tile + t) * k_);
      }
    }
  }

  uint64_t work(const StepCopy &step) const override {
    uint64_t positions = 0;
    for (const apu_row &row : step.rows) positions += row.position / tokens_;
    return (positions + step.rows.size()) * heads_ * d_;
  }

private:
  struct Call { // one worker's view of a run
    Run &run;
    float *scores;    // (32, rows that can be seen)
    int8_t *heads;    // the queries as IndexQuery: (T, tiles, d/4, 16, 4)
    float *scales;    // (T, tiles, d/32, 16)
    int32_t *offsets; // (T, tiles, d/32, 16)
    float *weights;   // (T, tiles, 16)
    uint8_t *small;   // (T, tiles, 16) whether a head is small integers
    float *products;  // (H, rows of a page)
    uint32_t *order;  // (rows that can be seen)
    uint8_t *work;
    float *row;        // (d)
    uint8_t *numbers;  // a page as IndexRows
    float *row_scales; // its scales
  };

  uint32_t seen(const Run &run, uint32_t t) const { return (run.step.rows[t].position + 1) / tokens_; }
  float *row_scores(const Call &c, uint32_t t) const { return c.scores + size_t(t) * most_; }

  // The first head of a row also fills up its last tile.
  void prepare(const Call &c, size_t t, uint32_t head) const {
    const RopeTable &table = c.run.workspace->ropes[table_];
    float *q = q_ + (t * heads_ + head) * d_;
    rotate(q + d_ - 2 * pairs_, table.cos + t * pairs_, table.sin + t * pairs_, pairs_, halves_);
    round_row(round_, q, d_, 2 * pairs_);
    const size_t lane = t * tiles_ * kIndexTile;
    if (!groups_) return;
    const auto of_tile = [&](uint32_t h) { return (lane + h / kIndexTile * kIndexTile) * groups_; };
    int8_t *tile = c.heads + of_tile(head) * quant::kFp4Group;
    c.small[lane + head] =
        kernels_.query(q, d_, head % kIndexTile, tile, c.scales + of_tile(head), c.offsets + of_tile(head));
    c.weights[lane + head] = weight_[t * heads_ + head];
    for (uint32_t h = heads_; head == 0 && h < tiles_ * kIndexTile; ++h) {
      c.weights[lane + h] = 0;
      for (uint32_t g = 0; g < groups_; ++g) c.scales[of_tile(h) + g * kIndexTile + h % kIndexTile] = 0;
    }
  }

  // A page of each of the rows [tile, tile + count); rows of one sequence share it.
  void score_page(const Call &c, uint32_t tile, uint32_t count, uint32_t page) const {
    const Run &run = c.run;
    uint64_t packed = ~uint64_t{0}; // page id and rows
    bool small = false;
    for (uint32_t t = tile; t < tile + count; ++t) {
      const uint32_t n = seen(run, t), first = page * per_page_;
      if (n <= k_ || first >= n) continue;
      const uint32_t rows = std::min(per_page_, n - first);
      const uint32_t *table = run.step.page_table(run.step.rows[t].sequence, state_.d.group);
      const Matrix matrix{state_.head(table[page], 0), state_.row_bytes, state_.d.dtype, d_};
      if (t == tile && first + per_page_ < n) {
        const uint8_t *next = state_.head(table[page + 1], 0);
        for (size_t line = 0; line < per_page_ * state_.row_bytes; line += 64) __builtin_prefetch(next + line, 0, 2);
      }
      float *to = row_scores(c, t - tile) + first;
      const size_t lane = size_t(t) * tiles_ * kIndexTile;
      if (groups_ && !std::memchr(c.small + lane, 0, heads_)) {
        if (const uint64_t key = uint64_t(table[page]) << 32 | rows; key != packed) {
          packed = key;
          small = pack(c, matrix, rows);
        }
        if (small) {
          const IndexQuery q{c.heads + lane * d_, c.scales + lane * groups_, c.offsets + lane * groups_,
                             c.weights + lane, tiles_};
          kernels_.scores(q, {c.numbers, c.row_scales}, rows, d_, to);
          finish(to, rows);
          continue;
        }
      }
      score(c, matrix, t, rows, to);
    }
  }

  bool pack(const Call &c, const Matrix &matrix, uint32_t rows) const {
    for (uint32_t i = 0; i < rows; ++i) {
      c.run.kernels->dequantize_row(matrix.dtype, matrix.data + i * matrix.row_stride, d_, c.row);
      if (!kernels_.row(c.row, d_, c.numbers + size_t(i) * d_, c.row_scales + size_t(i) * groups_)) return false;
    }
    return true;
  }

  void score(const Call &c, const Matrix &matrix, size_t t, uint32_t rows, float *to) const {
    c.run.kernels->matmul_float(matrix, q_ + t * heads_ * d_, d_, heads_, 0, rows, c.products, per_page_, c.work);
    std::fill_n(to, rows, 0.0f);
    for (uint32_t h = 0; h < heads_; ++h) {
      const float weight = weight_[t * heads_ + h], *p = c.products + h * per_page_;
      for (uint32_t i = 0; i < rows; ++i) to[i] += weight * std::max(p[i], 0.0f);
    }
    finish(to, rows);
  }

  void finish(float *scores, uint32_t n) const {
    for (uint32_t i = 0; i < n; ++i)
      scores[i] = std::isnan(scores[i]) ? -std::numeric_limits<float>::infinity() : scores[i] * scale_;
  }

  // The k largest by their keys' eleven bits, then the next eleven, then ten, of those that share what came before.
  void choose(const float *scores, uint32_t n, uint32_t *keys, int32_t *ids) const {
    const uint32_t count = std::min(n, k_);
    std::fill_n(ids + count, k_ - count, -1);
    if (n <= k_) {
      for (uint32_t i = 0; i < n; ++i) ids[i] = int32_t(i);
      return;
    }
    uint32_t left = n, need = count,
             least = 0; // keys that are still in question; of them to be chosen; their beginning
    for (uint32_t i = 0; i < n; ++i) keys[i] = order_key(scores[i]);
    for (const uint32_t shift : {21u, 10u, 0u}) {
      uint32_t bins[kBins] = {};
      for (uint32_t i = 0; i < left; ++i) ++bins[keys[i] >> shift & (kBins - 1)];
      uint32_t bin = kBins - 1;
      for (; bins[bin] < need; --bin) need -= bins[bin];
      least |= bin << shift;
      uint32_t kept = 0;
      for (uint32_t i = 0; i < left; ++i) {
        keys[kept] = keys[i];
        kept += (keys[i] >> shift & (kBins - 1)) == bin;
      }
      left = kept;
    }
    // All above `least`, and the first `need` of those that equal it.
    for (uint32_t i = 0, c = 0; c < count; ++i) {
      const uint32_t key = order_key(scores[i]);
      const bool equal = key == least && need > 0;
      ids[c] = int32_t(i);
      c += key > least || equal;
      need -= equal;
    }
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
  IndexKernels kernels_;
  uint32_t table_;
  size_t work_bytes_;
  uint32_t max_rows_;
  uint32_t groups_; // d/32 where rows are FP4, else 0
  uint32_t tiles_;  // of 16 heads, where rows are FP4
};

} // namespace

std::unique_ptr<Op> make_index(Builder &builder, const apu_op &op) {
  return std::make_unique<Index>(builder, op);
}

} // namespace apu::cpu
