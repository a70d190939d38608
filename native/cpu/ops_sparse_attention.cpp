// SPARSE_ATTENTION: one head of keys that are values too, of the last tokens and of compressed rows, chosen or all.
//
// A unit of work is one row with a group of its heads, which share the rows as floats: scores are products of matrix
// rows, values are added over whole rows, by online softmax. The parts that are folded one after the other are the
// window's pages, then 128 compressed rows at a time in ascending order: they follow from the row's position alone, and
// so do the bits of its result, as no head's depend on those beside it: groups are as large as leaves work for all.
#include "cpu/attention_kernels.h"
#include "cpu/matrix_product.h"
#include "cpu/rotate.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace apu::cpu {
namespace {

constexpr uint32_t kMostHeads = 16; // of a group
constexpr uint32_t kLeastHeads = 4;
constexpr uint32_t kHeads = 6;     // that the kernels take at once without a copy of the rows
constexpr uint32_t kAheadRows = 4; // chosen rows lie anywhere

class SparseAttention final : public Op {
public:
  SparseAttention(Builder &b, const apu_op &op)
      : window_(b.info().states[size_t(op.state[0])]),
        compressed_(op.state[1] == APU_NONE ? nullptr : &b.info().states[size_t(op.state[1])]), q_(b.scratch(op.in[0])),
        ids_(reinterpret_cast<const int32_t *>(b.scratch(op.in[1]))), out_(b.scratch(op.out[0])),
        sinks_(b.vector(op.w[0])), scale_(op.f[7]), halves_(op.i[1] == APU_ROPE_HALVES), pairs_(uint32_t(op.i[0]) / 2),
        d_(window_.d.head_size), heads_(uint32_t(b.info().tensor(op.in[0])->inner / d_)),
        k_(ids_ ? uint32_t(b.info().tensor(op.in[1])->inner) : 0), most_(std::min(heads_, kMostHeads)),
        softmax_(b.attention()->softmax), values_(b.attention()->f32.values), table_(b.rope(op)),
        work_bytes_(std::max(cpu::work_bytes(d_), b.kernels().work_bytes(d_))) {
    b.workspace.worker_bytes =
        std::max(b.workspace.worker_bytes, 2 * aligned(size_t(most_) * d_ * sizeof(float)) +
                                               aligned(size_t(most_) * kPageTokens * sizeof(float)) +
                                               aligned(size_t(d_) * kPageTokens * sizeof(float)) +
                                               4 * aligned(most_ * sizeof(float)) + aligned(work_bytes_));
  }

  void run(Worker &worker, Run &run) override {
    Bump scratch = run.scratch(worker);
    Call c{run,
           scratch.take<float>(size_t(most_) * d_),
           scratch.take<float>(size_t(most_) * d_),
           scratch.take<float>(size_t(most_) * kPageTokens),
           scratch.take<float>(size_t(d_) * kPageTokens),
           scratch.take<float>(most_),
           scratch.take<float>(most_),
           scratch.take<uint32_t>(most_),
           scratch.take<uint32_t>(most_),
           reinterpret_cast<float *>(scratch.bytes(work_bytes_))};
    const uint32_t rows = uint32_t(run.step.rows.size()), share = rows * heads_ / (2 * worker.count);
    const uint32_t group = std::min(std::clamp(share, kLeastHeads, kMostHeads), most_);
    const uint32_t groups = (heads_ + group - 1) / group;
    Split split(worker, rows * groups, 1);
    for (uint32_t u, end; split.next(u, end);)
      for (; u < end; ++u) {
        if (run.stopping()) return;
        const uint32_t head = u % groups * group;
        attend(c, u / groups, head, std::min(group, heads_ - head));
      }
  }

  uint64_t work(const StepCopy &step) const override {
    uint64_t rows = 0;
    for (const apu_row &row : step.rows) {
      const uint64_t all = row.position + 1;
      rows += window_.d.window ? std::min<uint64_t>(all, window_.d.window) : all;
      if (compressed_) rows += ids_ ? std::min<uint64_t>(k_, visible(row)) : visible(row);
    }
    return rows * heads_ * d_ * 2;
  }

private:
  struct Call { // one worker's buffers
    Run &run;
    float *q;              // (heads of the group, d) times the scale
    float *acc;            // (heads, d)
    float *scores;         // (heads, 128)
    float *rows;           // (128, d)
    float *max, *sum;      // (heads)
    uint32_t *begin, *end; // (heads)
    float *work;
  };

  uint32_t visible(const apu_row &row) const {
    return (row.position + 1) / (kPageTokens / compressed_->d.rows_per_page);
  }

  void attend(const Call &c, size_t t, uint32_t head, uint32_t heads) const {
    const apu_row &row = c.run.step.rows[t];
    const float *q = q_ + (t * heads_ + head) * d_;
    for (uint32_t i = 0; i < heads * d_; ++i) c.q[i] = q[i] * scale_;
    std::memset(c.acc, 0, size_t(heads) * d_ * sizeof(float));
    std::fill_n(c.max, heads, -std::numeric_limits<float>::infinity());
    std::fill_n(c.sum, heads, 0.0f);

    const uint32_t *table = c.run.step.page_table(row.sequence, window_.d.group);
    const uint32_t low = window_.d.window && row.position >= window_.d.window ? row.position - window_.d.window + 1 : 0;
    for (uint32_t p = low / kPageTokens; p <= row.position / kPageTokens; ++p) {
      const uint32_t base = p * kPageTokens, first = std::max(low, base) - base;
      const uint32_t last = std::min(row.position + 1 - base, kPageTokens);
      const uint8_t *page = window_.head(table[p], 0);
      const float *rows = reinterpret_cast<const float *>(page);
      if (window_.d.dtype != APU_F32) {
        for (uint32_t j = first; j < last; ++j) load(c, window_, page, j, j);
        rows = c.rows;
      }
      fold(c, heads, rows, first, last);
    }
    if (compressed_) {
      const uint32_t seen = visible(row), per_page = compressed_->d.rows_per_page;
      const int32_t *ids = ids_ ? ids_ + t * k_ : nullptr;
      table = c.run.step.page_table(row.sequence, compressed_->d.group);
      const uint32_t most = ids ? k_ : seen;
      const auto page = [&](uint32_t id) { return compressed_->head(table[id / per_page], 0); };
      uint32_t count = 0;
      for (uint32_t i = 0; i < most; ++i) {
        const uint32_t id = ids ? uint32_t(ids[i]) : i;
        if (id >= seen) break; // -1 follows the last; a slice that runs before its INDEX finds anything here
        if (const uint32_t next = i + kAheadRows < most ? ids ? uint32_t(ids[i + kAheadRows]) : i + kAheadRows : seen;
            next < seen) {
          const uint8_t *row = page(next) + next % per_page * compressed_->row_bytes;
          for (size_t line = 0; line < compressed_->row_bytes; line += 64) __builtin_prefetch(row + line);
        }
        load(c, *compressed_, page(id), id % per_page, count++);
        if (count < kPageTokens) continue;
        fold(c, heads, c.rows, 0, count);
        count = 0;
      }
      if (count) fold(c, heads, c.rows, 0, count);
    }
    write(c, t, head, heads);
  }

  void load(const Call &c, const State &state, const uint8_t *page, uint32_t row, uint32_t to) const {
    c.run.kernels->dequantize_row(state.d.dtype, page + row * state.row_bytes, d_, c.rows + size_t(to) * d_);
  }

  // Rows [first, last) of (128, d) floats.
  void fold(const Call &c, uint32_t heads, const float *rows, uint32_t first, uint32_t last) const {
    const KernelTable &kernels = *c.run.kernels;
    const uint8_t *bytes = reinterpret_cast<const uint8_t *>(rows);
    const uint32_t parts = (heads + kHeads - 1) / kHeads;
    for (uint32_t part = 0; part < parts; ++part) {
      const uint32_t begin = heads * part / parts, n = heads * (part + 1) / parts - begin;
      float *scores = c.scores + size_t(begin) * kPageTokens, *acc = c.acc + size_t(begin) * d_;
      kernels.matmul_float({bytes, size_t(d_) * sizeof(float), APU_F32, d_}, c.q + size_t(begin) * d_, d_, n, first,
                           last, scores + first, kPageTokens, c.work);
      for (uint32_t i = 0; i < n; ++i) {
        const uint32_t h = begin + i;
        float sum, max = softmax_(scores + size_t(i) * kPageTokens + first, last - first, c.max[h], &sum);
        const float shrink = c.max[h] == max ? 1 : std::exp(c.max[h] - max);
        c.max[h] = max;
        c.sum[h] = c.sum[h] * shrink + sum;
        if (shrink != 1) kernels.scale(shrink, acc + size_t(i) * d_, d_);
        c.begin[h] = first;
        c.end[h] = last;
      }
      values_(scores, n, bytes, d_, c.begin + begin, c.end + begin, nullptr, acc, c.work);
    }
  }

  void write(const Call &c, size_t t, uint32_t head, uint32_t heads) const {
    const RopeTable &table = c.run.workspace->ropes[table_];
    for (uint32_t h = 0; h < heads; ++h) {
      float shrink = 1, sum = c.sum[h];
      if (sinks_) { // a score without a value
        const float sink = sinks_[head + h], max = std::max(c.max[h], sink);
        shrink = std::exp(c.max[h] - max);
        sum = sum * shrink + std::exp(sink - max);
      }
      const float factor = shrink / sum, *acc = c.acc + size_t(h) * d_;
      float *out = out_ + (t * heads_ + head + h) * d_;
      for (uint32_t i = 0; i < d_; ++i) out[i] = acc[i] * factor;
      rotate_back(out + d_ - 2 * pairs_, table.cos + t * pairs_, table.sin + t * pairs_, pairs_, halves_);
    }
  }

  const State &window_;     // pages (128, d)
  const State *compressed_; // pages (128 / tokens, d) or null
  const float *q_;          // (T, H, d)
  const int32_t *ids_;      // (T, k) or null
  float *out_;              // (T, H, d)
  const float *sinks_;      // (H) or null
  float scale_;
  bool halves_;
  uint32_t pairs_, d_, heads_, k_, most_; // heads of a group
  decltype(AttentionKernels::softmax) softmax_;
  decltype(AttentionKernels::Type::values) values_;
  uint32_t table_;
  size_t work_bytes_;
};

} // namespace

std::unique_ptr<Op> make_sparse_attention(Builder &builder, const apu_op &op) {
  return std::make_unique<SparseAttention>(builder, op);
}

} // namespace apu::cpu
