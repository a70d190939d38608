// ATTENTION over paged keys and values: several sequences, ragged rows, causal by position, optional window.
//
// The result of a row and head is defined by absolute positions alone, so that it has the same bits alone, in a
// prefill, beside other sequences and on any number of workers: the context is cut into spans of 256 positions; in a
// span, pages of 128 are folded in order by online softmax in float32; then the spans' (maximum, sum, accumulator) are
// folded in order. When a step has many rows a worker folds all spans of a block of rows and one kv head as it goes;
// when it has few, spans are spread over the workers and folded afterwards, by the same arithmetic.
//
// LATENT_ATTENTION is the same over one row per position that all heads share. Rows lie as values do; what is not F32
// becomes floats, a page at a time. Scores are then products of matrix rows, and values are added over whole rows, of
// which the result is the beginning. Heads are cut into groups, as many workers' share of the same pages.
#include "cpu/attention_kernels.h"
#include "cpu/ops.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace apu::cpu {
namespace {

constexpr uint32_t kSpan = 256;         // positions; a multiple of the page
constexpr uint32_t kBlockVectors = 36;  // query vectors (rows x heads of one kv head) that share loads of K and V:
                                        // whole groups of the kernels' six
constexpr uint32_t kLatentVectors = 16; // that share a page's floats: with 32 the second cache level lost a third
constexpr uint32_t kFetchVectors = 6;
constexpr uint32_t kMaxSpreadBlocks = 64;
constexpr size_t kPartialFloor = 16u << 20;

struct Softmax { // state of one query vector: maximum, sum of exponentials; its accumulator lies elsewhere
  float max;
  float sum;
};

constexpr Softmax kEmpty{-std::numeric_limits<float>::infinity(), 0};

uint32_t latent_groups(uint32_t heads) {
  uint32_t group = std::min(heads, kLatentVectors);
  while (heads % group) --group;
  return heads / group;
}

class Attention final : public Op {
public:
  Attention(Builder &b, const apu_op &op)
      : latent_(op.kind == APU_OP_LATENT_ATTENTION), k_state_(b.info().states[size_t(op.state[0])]),
        v_state_(b.info().states[size_t(op.state[latent_ ? 0 : 1])]), q_(b.scratch(op.in[0])),
        out_(b.scratch(op.out[0])), sinks_(b.vector(op.w[0])), scale_(op.f[0]), cap_(op.f[1]), d_(k_state_.d.head_size),
        dv_(v_state_.d.head_size), width_(latent_ ? uint32_t(op.i[0]) : dv_),
        heads_(uint32_t(b.info().tensor(op.in[0])->inner / d_)),
        kv_heads_(latent_ ? latent_groups(heads_) : k_state_.d.heads), group_(heads_ / kv_heads_),
        window_(k_state_.d.window), softmax_(b.attention()->softmax), k_(*b.attention()->type(k_state_.d.dtype)),
        v_(latent_ ? b.attention()->f32 : *b.attention()->type(v_state_.d.dtype)),
        work_bytes_(std::max(cpu::work_bytes(std::max(d_, dv_)), latent_ ? b.kernels().work_bytes(d_) : 0)) {
    block_rows_ = std::max((latent_ ? kLatentVectors : kBlockVectors) / group_, 1u);
    vectors_ = block_rows_ * group_;
    uint64_t spans = (b.info().max_positions + kSpan - 1) / kSpan;
    if (window_) spans = std::min<uint64_t>(spans, window_ / kSpan + 2);
    Workspace &ws = b.workspace;
    // At least one row of the longest context.
    ws.partial_bytes =
        std::max({ws.partial_bytes, kPartialFloor, kv_heads_ * spans * partial_floats(group_) * sizeof(float)});
    ws.worker_bytes =
        std::max(ws.worker_bytes, aligned(size_t(vectors_) * d_ * sizeof(float)) + aligned(query_bytes(vectors_, d_)) +
                                      aligned(size_t(vectors_) * kPageTokens * sizeof(float)) + aligned(work_bytes_) +
                                      aligned(row_bytes()) + 2 * aligned(vectors_ * sizeof(uint32_t)) +
                                      2 * aligned(vectors_ * sizeof(Softmax)) +
                                      2 * aligned(size_t(vectors_) * dv_ * sizeof(float)));
  }

  void run(Worker &worker, Run &run) override {
    const StepCopy &step = run.step;
    uint32_t blocks = 0, longest = 0;
    for (const apu_sequence &s : step.sequences) {
      blocks += (s.row_count + block_rows_ - 1) / block_rows_;
      longest = std::max(longest, span_count(step, {0, s.row_begin + s.row_count - 1, 1}));
    }
    Bump scratch = run.scratch(worker);
    Call c{run,
           scratch.take<float>(size_t(vectors_) * d_),
           scratch.bytes(query_bytes(vectors_, d_)),
           scratch.take<float>(size_t(vectors_) * kPageTokens),
           reinterpret_cast<float *>(scratch.bytes(work_bytes_)),
           reinterpret_cast<float *>(scratch.bytes(row_bytes())),
           scratch.take<uint32_t>(vectors_),
           scratch.take<uint32_t>(vectors_),
           scratch.take<Softmax>(vectors_),
           scratch.take<Softmax>(vectors_),
           scratch.take<float>(size_t(vectors_) * dv_),
           scratch.take<float>(size_t(vectors_) * dv_)};
    // Decided from the step and the pool's size, which all workers see alike; the results do not depend on it.
    if (longest > 1 && blocks <= kMaxSpreadBlocks && blocks * kv_heads_ < 4 * worker.count && run_spread(worker, c))
      return;
    Split split(worker, blocks * kv_heads_, 1);
    for (uint32_t begin, end; split.next(begin, end);) {
      for (uint32_t u = begin; u < end; ++u) {
        if (run.stopping()) return;
        uint32_t head = u / blocks; // consecutive units share a head's pages
        Block block = find_block(step, u % blocks);
        auto [first, last] = spans(step, block);
        load_queries(c, block, head);
        for (uint32_t s = first; s <= last; ++s) {
          attend(c, block, head, s, c.part, c.part_acc);
          fold(c.total, c.total_acc, c.part, c.part_acc, block.count * group_, s == first);
        }
        write(block, head, c.total, c.total_acc);
      }
    }
  }

  uint64_t work(const StepCopy &step) const override {
    uint64_t positions = 0;
    for (const apu_sequence &s : step.sequences) {
      uint64_t last = step.rows[s.row_begin + s.row_count - 1].position + 1;
      positions += s.row_count * (window_ ? std::min<uint64_t>(last, window_) : last);
    }
    return positions * heads_ * (d_ + dv_);
  }

private:
  struct Block { // rows [row, row + count) of one sequence
    uint32_t sequence;
    uint32_t row;
    uint32_t count;
  };

  struct Call { // one worker's buffers
    Run &run;
    float *q;        // (vectors, d) times the scale
    void *query;     // the same as the scores' kernel wants it
    float *scores;   // (vectors, 128)
    float *work;     // the kernels'
    float *rows;     // (128, d) of a latent page
    uint32_t *begin; // (vectors) rows of the page that each one sees
    uint32_t *end;
    Softmax *part;    // (vectors)
    Softmax *total;   // (vectors)
    float *part_acc;  // (vectors, dv)
    float *total_acc; // (vectors, dv)
  };

  size_t row_bytes() const { return latent_ ? size_t(d_) * kPageTokens * sizeof(float) : 0; }
  size_t partial_floats(uint32_t vectors) const { return size_t(vectors) * (dv_ + 2); }

  Block find_block(const StepCopy &step, uint32_t index) const {
    for (uint32_t s = 0;; ++s) {
      const apu_sequence &q = step.sequences[s];
      uint32_t blocks = (q.row_count + block_rows_ - 1) / block_rows_;
      if (index < blocks) {
        uint32_t row = index * block_rows_;
        return {s, q.row_begin + row, std::min(block_rows_, q.row_count - row)};
      }
      index -= blocks;
    }
  }

  uint32_t lowest(uint32_t position) const { return window_ && position >= window_ ? position - window_ + 1 : 0; }

  // First and last span that any row of the block sees.
  std::pair<uint32_t, uint32_t> spans(const StepCopy &step, const Block &b) const {
    return {lowest(step.rows[b.row].position) / kSpan, step.rows[b.row + b.count - 1].position / kSpan};
  }

  uint32_t span_count(const StepCopy &step, const Block &b) const {
    auto [first, last] = spans(step, b);
    return last - first + 1;
  }

  void load_queries(const Call &c, const Block &b, uint32_t head) const {
    for (uint32_t r = 0; r < b.count; ++r) {
      const float *from = q_ + (size_t(b.row + r) * heads_ + head * group_) * d_;
      float *to = c.q + size_t(r) * group_ * d_;
      for (uint32_t i = 0; i < group_ * d_; ++i) to[i] = from[i] * scale_;
    }
    if (!latent_) k_.prepare(c.q, b.count * group_, d_, c.query);
  }

  // A latent page as (128, d) floats, of which rows [first, last) are valid.
  const float *latent_rows(const Call &c, const uint8_t *page, uint32_t first, uint32_t last) const {
    const KernelTable &kernels = *c.run.kernels;
    if (k_state_.d.dtype == APU_F32) return reinterpret_cast<const float *>(page);
    if (k_state_.d.dtype == APU_F16) {
      const size_t stride = size_t(d_) * 2;
      for (uint32_t j = first; j < last; ++j)
        kernels.dequantize_row(APU_F16, page + j * stride, d_, c.rows + size_t(j) * d_);
      return c.rows;
    }
    for (uint32_t j = first; j < last; ++j) { // Q8_0 by tiles: quants (32, d), scales (d/32, 32)
      const uint32_t lane = j % kValueTileQ8;
      const uint8_t *tile = page + j / kValueTileQ8 * kValueTileQ8 * k_state_.row_bytes;
      if (j == first || lane == 0) kernels.dequantize_row(APU_F16, tile + size_t(d_) * kValueTileQ8, d_, c.work);
      const int8_t *from = reinterpret_cast<const int8_t *>(tile) + size_t(lane) * d_;
      float *to = c.rows + size_t(j) * d_;
      for (uint32_t m = 0; m < d_; m += 32) {
        const float scale = c.work[m + lane];
        for (uint32_t i = m; i < m + 32; ++i) to[i] = float(from[i]) * scale;
      }
    }
    return c.rows;
  }

  // Softmax state and accumulator of every vector of the block over one span; empty where a row sees none of it.
  void attend(const Call &c, const Block &b, uint32_t head, uint32_t span, Softmax *state, float *acc) const {
    const KernelTable &kernels = *c.run.kernels;
    const uint32_t *table = c.run.step.page_table(b.sequence, k_state_.d.group);
    uint32_t n = b.count * group_;
    std::fill_n(state, n, kEmpty);
    std::memset(acc, 0, size_t(n) * dv_ * sizeof(float));
    const bool few = n <= kFetchVectors;
    uint32_t low = lowest(c.run.step.rows[b.row].position);
    uint32_t high = c.run.step.rows[b.row + b.count - 1].position;
    for (uint32_t base = span * kSpan; base < (span + 1) * kSpan && base <= high; base += kPageTokens) {
      if (base + kPageTokens <= low) continue;
      uint64_t page = table[base / kPageTokens];
      uint32_t first = kPageTokens, last = 0; // rows that any vector sees
      for (uint32_t i = 0; i < n; ++i) {
        uint32_t position = c.run.step.rows[b.row + i / group_].position, from = lowest(position);
        c.begin[i] = from > base ? from - base : 0;
        c.end[i] = position < base ? 0 : std::min(position - base + 1, kPageTokens);
        if (c.begin[i] >= c.end[i])
          c.begin[i] = c.end[i] = 0;
        else
          first = std::min(first, c.begin[i]), last = std::max(last, c.end[i]);
      }
      if (first >= last) continue;
      // Few vectors take a page faster than memory gives the next one: it must be on its way by then.
      const uint8_t *v_part = v_state_.head(page, latent_ ? 0 : head), *next = nullptr;
      if (latent_) {
        const float *rows = latent_rows(c, v_part, first, last);
        v_part = reinterpret_cast<const uint8_t *>(rows);
        kernels.matmul_float({v_part, size_t(d_) * sizeof(float), APU_F32, d_}, c.q, d_, n, first, last,
                             c.scores + first, kPageTokens, c.work);
      } else {
        if (base + kPageTokens <= high) next = k_state_.head(table[base / kPageTokens + 1], head);
        k_.scores(c.query, n, k_state_.head(page, head), d_, first, last, few ? v_part : nullptr, c.scores, c.work);
      }
      for (uint32_t i = 0; i < n; ++i) {
        if (c.begin[i] == c.end[i]) continue;
        float *s = c.scores + size_t(i) * kPageTokens + c.begin[i];
        uint32_t count = c.end[i] - c.begin[i];
        if (cap_ != 0) kernels.soft_cap(s, cap_, count);
        float sum, max = softmax_(s, count, state[i].max, &sum);
        float shrink = state[i].max == max ? 1 : std::exp(state[i].max - max);
        state[i] = {max, state[i].sum * shrink + sum};
        if (shrink != 1) kernels.scale(shrink, acc + size_t(i) * dv_, dv_);
      }
      v_.values(c.scores, n, v_part, dv_, c.begin, c.end, few ? next : nullptr, acc, c.work);
    }
  }

  // total = total followed by part.
  void fold(Softmax *total, float *total_acc, const Softmax *part, const float *part_acc, uint32_t vectors,
            bool first) const {
    if (first) {
      std::memcpy(total, part, vectors * sizeof(Softmax));
      std::memcpy(total_acc, part_acc, size_t(vectors) * dv_ * sizeof(float));
      return;
    }
    for (uint32_t i = 0; i < vectors; ++i) {
      const float *from = part_acc + size_t(i) * dv_;
      float *to = total_acc + size_t(i) * dv_;
      if (part[i].sum == 0) continue; // the row sees nothing of this span
      if (total[i].sum == 0) {        // nor of those before
        total[i] = part[i];
        std::memcpy(to, from, dv_ * sizeof(float));
        continue;
      }
      float max = std::max(total[i].max, part[i].max);
      float a = total[i].max == max ? 1 : std::exp(total[i].max - max);
      float b = part[i].max == max ? 1 : std::exp(part[i].max - max);
      total[i] = {max, total[i].sum * a + part[i].sum * b};
      for (uint32_t j = 0; j < dv_; ++j) to[j] = to[j] * a + from[j] * b;
    }
  }

  void write(const Block &b, uint32_t head, const Softmax *state, const float *acc) const {
    for (uint32_t i = 0; i < b.count * group_; ++i) {
      uint32_t h = head * group_ + i % group_;
      float shrink = 1, sum = state[i].sum;
      if (sinks_) { // a score without a value
        float max = std::max(state[i].max, sinks_[h]);
        shrink = std::exp(state[i].max - max);
        sum = sum * shrink + std::exp(sinks_[h] - max);
      }
      float factor = shrink / sum;
      float *out = out_ + (size_t(b.row + i / group_) * heads_ + h) * width_;
      for (uint32_t j = 0; j < width_; ++j) out[j] = acc[size_t(i) * dv_ + j] * factor;
    }
  }

  // Spans over the workers; false when the partial results have no room.
  bool run_spread(Worker &worker, const Call &c) const {
    const StepCopy &step = c.run.step;
    Block blocks[kMaxSpreadBlocks];
    uint32_t widest = 0;                                  // vectors of a block
    uint32_t first[kMaxSpreadBlocks + 1] = {}, count = 0; // index of each block's first span
    for (uint32_t s = 0; s < step.sequences.size(); ++s) {
      const apu_sequence &q = step.sequences[s];
      for (uint32_t r = 0; r < q.row_count; r += block_rows_, ++count) {
        blocks[count] = {s, q.row_begin + r, std::min(block_rows_, q.row_count - r)};
        widest = std::max(widest, blocks[count].count * group_);
        first[count + 1] = first[count] + span_count(step, blocks[count]);
      }
    }
    uint32_t total = first[count];
    size_t parts = size_t(total) * kv_heads_;
    if (parts > kMaxUnits || parts * partial_floats(widest) * sizeof(float) > c.run.workspace->partial_bytes)
      return false;
    auto partial = [&](uint32_t index, uint32_t head) {
      return c.run.workspace->partial + (size_t(index) * kv_heads_ + head) * partial_floats(widest);
    };
    {
      Split split(worker, total * kv_heads_, 1);
      uint32_t loaded = kMaxUnits; // block and head whose queries are in the buffers
      for (uint32_t begin, end; split.next(begin, end);) {
        for (uint32_t u = begin; u < end; ++u) {
          if (c.run.stopping()) break;
          uint32_t index = u % total, head = u / total, b = 0;
          while (index >= first[b + 1]) ++b;
          float *to = partial(index, head);
          if (loaded != head * count + b) load_queries(c, blocks[b], head), loaded = head * count + b;
          uint32_t span = spans(step, blocks[b]).first + index - first[b];
          attend(c, blocks[b], head, span, reinterpret_cast<Softmax *>(to), to + 2 * widest);
        }
      }
    }
    worker.barrier();
    Split split(worker, count * kv_heads_, 1);
    for (uint32_t begin, end; split.next(begin, end);) {
      for (uint32_t u = begin; u < end; ++u) {
        if (c.run.stopping()) break;
        uint32_t b = u / kv_heads_, head = u % kv_heads_;
        float *total_state = partial(first[b], head); // folds in place into the first
        for (uint32_t s = first[b] + 1; s < first[b + 1]; ++s) {
          float *part = partial(s, head);
          fold(reinterpret_cast<Softmax *>(total_state), total_state + 2 * widest, reinterpret_cast<Softmax *>(part),
               part + 2 * widest, blocks[b].count * group_, false);
        }
        write(blocks[b], head, reinterpret_cast<Softmax *>(total_state), total_state + 2 * widest);
      }
    }
    return true;
  }

  bool latent_;
  const State &k_state_, &v_state_; // pages (K, 128, d); the same (128, d) where latent
  const float *q_;                  // (T, H, d)
  float *out_;                      // (T, H, width)
  const float *sinks_;              // (H) or null
  float scale_, cap_;
  uint32_t d_, dv_;
  uint32_t width_;    // of the result, dv unless latent
  uint32_t heads_;    // H
  uint32_t kv_heads_; // or groups of heads where latent
  uint32_t group_;    // heads of each
  uint32_t window_;
  float (*softmax_)(float *, uint32_t, float, float *);
  const AttentionKernels::Type &k_, &v_;
  size_t work_bytes_;
  uint32_t block_rows_, vectors_;
};

} // namespace

std::unique_ptr<Op> make_attention(Builder &builder, const apu_op &op) {
  return std::make_unique<Attention>(builder, op);
}

} // namespace apu::cpu
