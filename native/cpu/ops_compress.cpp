// SHARED_STORE: the one head that all heads read as key and value. COMPRESS: rows that stand for several tokens.
//
// What a compressed row is made of waits in pages, by token, like all that is cached: a page is written once per token
// and never overwritten, so that truncating, forking and restoring a sequence between two compressed rows needs nothing
// beside its pages. Rows are stored first, all of the step; then each row that ends its tokens reads them, this step's
// and earlier ones', so that a prefill makes the same rows as single steps do, bit for bit.
#include "cpu/matrix_product.h"
#include "cpu/rotate.h"
#include "cpu/rounding.h"
#include "quant/rounding.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace apu::cpu {

void round_row(int32_t kind, float *x, uint32_t d, uint32_t rotated) {
  if (kind == APU_ROUND_NONE) return;
  const bool fp4 = kind == APU_ROUND_FP4;
  if (fp4) { // Hadamard matrix of d, a power of two, times d^-1/2
    for (uint32_t half = 1; half < d; half *= 2)
      for (uint32_t i = 0; i < d; i += 2 * half)
        for (uint32_t j = i; j < i + half; ++j) {
          const float a = x[j], b = x[j + half];
          x[j] = a + b;
          x[j + half] = a - b;
        }
    const float shrink = float(1 / std::sqrt(double(d)));
    for (uint32_t i = 0; i < d; ++i) x[i] *= shrink;
  }
  const uint32_t group = fp4 ? quant::kFp4Group : quant::kE4M3Group, end = fp4 ? d : d - rotated;
  for (uint32_t begin = 0; begin < end; begin += group) {
    const uint32_t stop = std::min(begin + group, end);
    float amax = 0;
    for (uint32_t i = begin; i < stop; ++i) amax = std::max(amax, std::fabs(x[i]));
    if (!std::isfinite(amax)) continue; // stays what it is: a row that is broken shows
    const float scale = fp4 ? quant::fp4_scale(amax) : quant::e4m3_scale(amax);
    for (uint32_t i = begin; i < stop; ++i)
      x[i] = (fp4 ? quant::round_e2m1(x[i] / scale) : quant::round_e4m3(x[i] / scale)) * scale;
  }
}

namespace {

class SharedStore final : public Op {
public:
  SharedStore(Builder &b, const apu_op &op)
      : state_(b.info().states[size_t(op.state[0])]), q_(b.scratch(op.in[0])), c_(b.scratch(op.in[1])),
        norm_(b.vector(op.w[0])), eps_(op.f[0]), halves_(op.i[1] == APU_ROPE_HALVES), pairs_(uint32_t(op.i[0]) / 2),
        round_(op.i[3]), d_(state_.d.head_size), heads_(uint32_t(b.info().tensor(op.in[0])->inner / d_)),
        store_(b.attention()->type(state_.d.dtype)->store_v), table_(b.rope(op)) {
    b.workspace.worker_bytes = std::max(b.workspace.worker_bytes, aligned(d_ * sizeof(float)));
  }

  void run(Worker &worker, Run &run) override {
    float *row = run.scratch(worker).take<float>(d_);
    const uint32_t per_row = heads_ + 1; // a unit is a head of q, or the row that is stored
    const RopeTable &table = run.workspace->ropes[table_];
    Split split(worker, uint32_t(run.step.rows.size()) * per_row, std::max(1u, 1024 / d_));
    for (uint32_t begin, end; split.next(begin, end);) {
      if (run.stopping()) break;
      for (uint32_t u = begin; u < end; ++u) {
        const size_t t = u / per_row;
        const uint32_t h = u % per_row;
        float *out = h < heads_ ? q_ + (t * heads_ + h) * d_ : row;
        run.kernels->rms_norm(h < heads_ ? out : c_ + t * d_, h < heads_ ? nullptr : norm_, nullptr, eps_, out, d_);
        rotate(out + d_ - 2 * pairs_, table.cos + t * pairs_, table.sin + t * pairs_, pairs_, halves_);
        if (h < heads_) continue;
        round_row(round_, row, d_, 2 * pairs_);
        const apu_row &at = run.step.rows[t];
        const uint64_t page = run.step.page_table(at.sequence, state_.d.group)[at.position / kPageTokens];
        store_(row, d_, at.position % kPageTokens, state_.head(page, 0));
      }
    }
  }

  uint64_t work(const StepCopy &step) const override { return step.rows.size() * (heads_ + 1) * d_ * 2; }

private:
  const State &state_; // pages (128, d)
  float *q_;           // (T, H, d)
  const float *c_;     // (T, d)
  const float *norm_;  // (d)
  float eps_;
  bool halves_;
  uint32_t pairs_;
  int32_t round_;
  uint32_t d_, heads_;
  void (*store_)(const float *, uint32_t, uint32_t, uint8_t *);
  uint32_t table_;
};

class Compress final : public Op {
public:
  Compress(Builder &b, const apu_op &op)
      : open_(b.info().states[size_t(op.state[0])]), state_(b.info().states[size_t(op.state[1])]),
        in_(b.scratch(op.in[0])), gate_(b.scratch(op.in[1])), bias_(*b.info().tensor(op.w[0])),
        norm_(b.vector(op.w[1])), eps_(op.f[0]), halves_(op.i[1] == APU_ROPE_HALVES), pairs_(uint32_t(op.i[0]) / 2),
        round_(op.i[3]), d_(state_.d.head_size), width_(uint32_t(b.info().tensor(op.in[0])->inner)),
        tokens_(uint32_t(bias_.rows)), store_(b.attention()->type(state_.d.dtype)->store_v),
        rope_(make_rope_table(op, b.vector(op.w[2]))) {
    b.workspace.worker_bytes =
        std::max(b.workspace.worker_bytes, 3 * aligned(d_ * sizeof(float)) + aligned(width_ * sizeof(float)) +
                                               2 * aligned(pairs_ * sizeof(float)));
  }

  void run(Worker &worker, Run &run) override {
    const uint32_t rows = uint32_t(run.step.rows.size());
    Bump scratch = run.scratch(worker);
    Call c{run,
           scratch.take<float>(d_),
           scratch.take<float>(d_),
           scratch.take<float>(d_),
           scratch.take<float>(width_),
           scratch.take<float>(pairs_),
           scratch.take<float>(pairs_)};
    {
      Split split(worker, rows, 1 + 2048 / width_);
      for (uint32_t t, end; split.next(t, end);) {
        if (run.stopping()) break;
        for (; t < end; ++t) keep(c, t);
      }
      worker.barrier();
    }
    Split split(worker, rows, 1);
    for (uint32_t t, end; split.next(t, end);)
      for (; t < end; ++t) {
        if (run.stopping()) return;
        if ((run.step.rows[t].position + 1) % tokens_ == 0) pool(c, run.step.rows[t]);
      }
  }

  uint64_t work(const StepCopy &step) const override { return step.rows.size() * width_ * 4; }

private:
  struct Call { // one worker's buffers
    Run &run;
    float *max, *sum, *out; // (d)
    float *bias;            // (C*d)
    float *cos, *sin;       // (pairs)
  };

  float *token(const Run &run, const apu_row &row, uint32_t position) const { // (2, C*d)
    const uint64_t page = run.step.page_table(row.sequence, open_.d.group)[position / kPageTokens];
    return reinterpret_cast<float *>(open_.head(page, 0) + position % kPageTokens * open_.row_bytes);
  }

  void keep(const Call &c, size_t t) const {
    const apu_row &row = c.run.step.rows[t];
    float *to = token(c.run, row, row.position);
    const float *gate = gate_ + t * width_;
    c.run.kernels->dequantize_row(bias_.d.dtype, row_address(bias_, row.position % tokens_), width_, c.bias);
    std::memcpy(to, in_ + t * width_, width_ * sizeof(float));
    for (uint32_t i = 0; i < width_; ++i) to[width_ + i] = gate[i] + c.bias[i];
  }

  // The row that ends with `row`.
  void pool(const Call &c, const apu_row &row) const {
    const uint32_t first = row.position + 1 - tokens_;
    const uint32_t begin = width_ > d_ && first > 0 ? first - tokens_ : first;
    std::fill_n(c.max, d_, -std::numeric_limits<float>::infinity());
    std::memset(c.sum, 0, d_ * sizeof(float));
    std::memset(c.out, 0, d_ * sizeof(float));
    // Of the tokens before, the first d elements count.
    const auto values = [&](uint32_t p) { return token(c.run, row, p) + (p >= first ? width_ - d_ : 0); };
    for (uint32_t p = begin; p <= row.position; ++p) {
      const float *gate = values(p) + width_;
      for (uint32_t i = 0; i < d_; ++i) c.max[i] = std::max(c.max[i], gate[i]);
    }
    for (uint32_t p = begin; p <= row.position; ++p) {
      const float *value = values(p), *gate = value + width_;
      for (uint32_t i = 0; i < d_; ++i) {
        const float e = std::exp(gate[i] - c.max[i]);
        c.sum[i] += e;
        c.out[i] += e * value[i];
      }
    }
    for (uint32_t i = 0; i < d_; ++i) c.out[i] /= c.sum[i];
    c.run.kernels->rms_norm(c.out, norm_, nullptr, eps_, c.out, d_);
    for (uint32_t i = 0; i < pairs_; ++i) {
      const double angle = double(first) * rope_.frequency[i];
      c.cos[i] = float(std::cos(angle) * rope_.magnitude);
      c.sin[i] = float(std::sin(angle) * rope_.magnitude);
    }
    rotate(c.out + d_ - 2 * pairs_, c.cos, c.sin, pairs_, halves_);
    round_row(round_, c.out, d_, 2 * pairs_);
    const uint64_t page = c.run.step.page_table(row.sequence, state_.d.group)[row.position / kPageTokens];
    store_(c.out, d_, row.position / tokens_ % state_.d.rows_per_page, state_.head(page, 0));
  }

  const State &open_;       // pages (128, 2, C*d)
  const State &state_;      // pages (128 / tokens, d)
  const float *in_, *gate_; // (T, C*d)
  const Tensor &bias_;      // (tokens, C*d)
  const float *norm_;       // (d)
  float eps_;
  bool halves_;
  uint32_t pairs_;
  int32_t round_;
  uint32_t d_, width_, tokens_; // width = C*d
  void (*store_)(const float *, uint32_t, uint32_t, uint8_t *);
  RopeTable rope_;
};

} // namespace

std::unique_ptr<Op> make_shared_store(Builder &builder, const apu_op &op) {
  return std::make_unique<SharedStore>(builder, op);
}

std::unique_ptr<Op> make_compress(Builder &builder, const apu_op &op) {
  return std::make_unique<Compress>(builder, op);
}

} // namespace apu::cpu
