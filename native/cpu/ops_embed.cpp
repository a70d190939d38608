// EMBED: a row of the table for every row of the step, from any dtype, in place.
//
// Moves one table row and 4 D bytes a token, nothing beside a layer's matrices: rows are dealt out one by one. A token
// that was sampled in the step before is looked up here, so that the next step can be submitted before it is known.
#include "cpu/ops.h"

#include <cstring>

namespace apu::cpu {
namespace {

class Embed final : public Op {
public:
  Embed(Builder &b, const apu_op &op)
      : table_(*b.info().tensor(op.w[0])), out_(b.scratch(op.out[0])), scale_(op.f[0]), d_(uint32_t(table_.inner)),
        copies_(uint32_t(std::max(op.i[0], 1))) {}

  void run(Worker &worker, Run &run) override {
    Split split(worker, uint32_t(run.step.rows.size()), 1);
    for (uint32_t begin, end; split.next(begin, end);) {
      if (run.stopping()) break;
      for (uint32_t t = begin; t < end; ++t) {
        const apu_row &row = run.step.rows[t];
        const int32_t token = run.token(row);
        if (token < 0) {
          run.fail(t, APU_E_INVALID, "row %u takes the token of output %d of the step before, which ended without one",
                   t, row.previous);
          break;
        }
        float *out = out_ + size_t(t) * copies_ * d_;
        run.kernels->dequantize_row(table_.d.dtype, row_address(uint64_t(token)), d_, out);
        if (scale_ != 1.0f) run.kernels->scale(scale_, out, d_);
        for (uint32_t i = 1; i < copies_; ++i) std::memcpy(out + size_t(i) * d_, out, d_ * sizeof(float));
      }
    }
  }

  uint64_t work(const StepCopy &step) const override { return step.rows.size() * d_; }

private:
  const uint8_t *row_address(uint64_t row) const {
    auto s = std::upper_bound(table_.segments.begin(), table_.segments.end(), row,
                              [](uint64_t r, const apu_segment &g) { return r < g.row_begin; });
    --s;
    return reinterpret_cast<const uint8_t *>(s->address) + (row - s->row_begin) * s->row_stride;
  }

  const Tensor &table_; // (V, D)
  float *out_;          // (T, copies, D)
  float scale_;
  uint32_t d_, copies_;
};

} // namespace

std::unique_ptr<Op> make_embed(Builder &builder, const apu_op &op) {
  return std::make_unique<Embed>(builder, op);
}

} // namespace apu::cpu
