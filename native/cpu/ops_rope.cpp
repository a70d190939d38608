// ROPE_STORE: per-head norm and rotary embedding of q and k, and k and v into their pages, in one pass over the rows.
// LATENT_STORE: the same of a latent row, which lies in its page as values do.
//
// Angles are position * frequency in double, their cos and sin rounded once; they are computed once per step for all
// layers that rotate alike.
#include "cpu/ops.h"
#include "cpu/rotate.h"
#include "plan/rope.h"

#include <cmath>
#include <cstring>

namespace apu::cpu {

RopeTable make_rope_table(const apu_op &op, const float *factors) {
  RopeTable table;
  table.frequency = rope_frequencies(op, factors);
  table.magnitude = op.f[4];
  return table;
}

void fill_ropes(Worker &worker, Run &run, std::span<const uint32_t> tables) {
  uint32_t rows = uint32_t(run.step.rows.size());
  Split split(worker, rows * uint32_t(tables.size()), 8);
  for (uint32_t begin, end; split.next(begin, end);) {
    for (uint32_t u = begin; u < end; ++u) {
      const RopeTable &table = run.workspace->ropes[tables[u / rows]];
      size_t pairs = table.frequency.size(), t = u % rows;
      double position = run.step.rows[t].position;
      for (size_t i = 0; i < pairs; ++i) {
        double angle = position * table.frequency[i];
        table.cos[t * pairs + i] = float(std::cos(angle) * table.magnitude);
        table.sin[t * pairs + i] = float(std::sin(angle) * table.magnitude);
      }
    }
  }
}

namespace {

class RopeStore final : public Op {
public:
  RopeStore(Builder &b, const apu_op &op)
      : k_state_(b.info().states[size_t(op.state[0])]), v_state_(b.info().states[size_t(op.state[1])]),
        q_(b.scratch(op.in[0])), k_(b.scratch(op.in[1])), v_(b.scratch(op.in[2])), q_norm_(b.vector(op.w[0])),
        k_norm_(b.vector(op.w[1])), eps_(op.f[0]), halves_(op.i[1] == APU_ROPE_HALVES), pairs_(uint32_t(op.i[0]) / 2),
        d_(k_state_.d.head_size), dv_(v_state_.d.head_size), heads_(uint32_t(b.info().tensor(op.in[0])->inner / d_)),
        kv_heads_(k_state_.d.heads), store_k_(b.attention()->type(k_state_.d.dtype)->store_k),
        store_v_(b.attention()->type(v_state_.d.dtype)->store_v) {
    if (pairs_) table_ = b.rope(op);
    b.workspace.worker_bytes = std::max(b.workspace.worker_bytes, aligned(d_ * sizeof(float)));
  }

  void run(Worker &worker, Run &run) override {
    float *head = run.scratch(worker).take<float>(d_);
    uint32_t per_row = heads_ + kv_heads_; // a unit is a head of q, or of k with its v
    Split split(worker, uint32_t(run.step.rows.size()) * per_row, std::max(1u, 1024 / d_));
    for (uint32_t begin, end; split.next(begin, end);) {
      if (run.stopping()) break;
      for (uint32_t u = begin; u < end; ++u) {
        size_t t = u / per_row;
        uint32_t h = u % per_row;
        if (h < heads_) {
          float *q = q_ + (t * heads_ + h) * d_;
          finish(run, t, q, q_norm_, q);
        } else {
          h -= heads_;
          finish(run, t, k_ + (t * kv_heads_ + h) * d_, k_norm_, head);
          const apu_row &row = run.step.rows[t];
          uint64_t page = run.step.page_table(row.sequence, k_state_.d.group)[row.position / kPageTokens];
          store_k_(head, d_, row.position % kPageTokens, k_state_.head(page, h));
          store_v_(v_ + (t * kv_heads_ + h) * dv_, dv_, row.position % kPageTokens, v_state_.head(page, h));
        }
      }
    }
  }

  uint64_t work(const StepCopy &step) const override { return step.rows.size() * (heads_ + 2 * kv_heads_) * d_ * 2; }

private:
  void finish(const Run &run, size_t t, const float *x, const float *norm, float *out) const {
    if (norm)
      run.kernels->rms_norm(x, norm, nullptr, eps_, out, d_);
    else if (x != out)
      std::memcpy(out, x, d_ * sizeof(float));
    if (!pairs_) return;
    const RopeTable &table = run.workspace->ropes[table_];
    rotate(out, table.cos + t * pairs_, table.sin + t * pairs_, pairs_, halves_);
  }

  const State &k_state_, &v_state_; // pages (K, 128, d)
  float *q_;                        // (T, H, d)
  const float *k_;                  // (T, K, d)
  const float *v_;                  // (T, K, dv)
  const float *q_norm_, *k_norm_;   // (d) or null
  float eps_;
  bool halves_;
  uint32_t pairs_;
  uint32_t d_, dv_;
  uint32_t heads_, kv_heads_;
  void (*store_k_)(const float *, uint32_t, uint32_t, uint8_t *);
  void (*store_v_)(const float *, uint32_t, uint32_t, uint8_t *);
  uint32_t table_ = 0;
};

class LatentStore final : public Op {
public:
  LatentStore(Builder &b, const apu_op &op)
      : state_(b.info().states[size_t(op.state[0])]), q_(b.scratch(op.in[0])), c_(b.scratch(op.in[1])),
        norm_(b.vector(op.w[0])), eps_(op.f[0]), halves_(op.i[1] == APU_ROPE_HALVES), pairs_(uint32_t(op.i[0]) / 2),
        d_(state_.d.head_size), heads_(uint32_t(op.i[3])), dq_(uint32_t(b.info().tensor(op.in[0])->inner / heads_)),
        store_(b.attention()->type(state_.d.dtype)->store_v), table_(b.rope(op)) {
    b.workspace.worker_bytes = std::max(b.workspace.worker_bytes, aligned(d_ * sizeof(float)));
  }

  void run(Worker &worker, Run &run) override {
    float *latent = run.scratch(worker).take<float>(d_);
    const uint32_t per_row = heads_ + 1; // a unit is a head of q, or the row that is stored
    const RopeTable &table = run.workspace->ropes[table_];
    Split split(worker, uint32_t(run.step.rows.size()) * per_row, std::max(1u, 1024 / dq_));
    for (uint32_t begin, end; split.next(begin, end);) {
      if (run.stopping()) break;
      for (uint32_t u = begin; u < end; ++u) {
        const size_t t = u / per_row;
        const uint32_t h = u % per_row;
        const float *cos = table.cos + t * pairs_, *sin = table.sin + t * pairs_;
        if (h < heads_) {
          rotate(q_ + (t * heads_ + h + 1) * dq_ - 2 * pairs_, cos, sin, pairs_, halves_);
          continue;
        }
        const uint32_t rank = d_ - 2 * pairs_;
        const float *c = c_ + t * d_;
        run.kernels->rms_norm(c, norm_, nullptr, eps_, latent, rank);
        std::memcpy(latent + rank, c + rank, 2 * pairs_ * sizeof(float));
        rotate(latent + rank, cos, sin, pairs_, halves_);
        const apu_row &row = run.step.rows[t];
        const uint64_t page = run.step.page_table(row.sequence, state_.d.group)[row.position / kPageTokens];
        store_(latent, d_, row.position % kPageTokens, state_.head(page, 0));
      }
    }
  }

  uint64_t work(const StepCopy &step) const override { return step.rows.size() * (heads_ * 4 * pairs_ + 4 * d_); }

private:
  const State &state_; // pages (128, d)
  float *q_;           // (T, H, dq)
  const float *c_;     // (T, d)
  const float *norm_;  // (d - 2 pairs)
  float eps_;
  bool halves_;
  uint32_t pairs_, d_, heads_, dq_;
  void (*store_)(const float *, uint32_t, uint32_t, uint8_t *);
  uint32_t table_;
};

} // namespace

std::unique_ptr<Op> make_latent_store(Builder &builder, const apu_op &op) {
  return std::make_unique<LatentStore>(builder, op);
}

std::unique_ptr<Op> make_rope_store(Builder &builder, const apu_op &op) {
  return std::make_unique<RopeStore>(builder, op);
}

} // namespace apu::cpu
