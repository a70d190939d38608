// MATMUL: up to four matrices over one input, with everything that would otherwise be another pass over memory.
//
// The input is prepared once (matrix_product.h). Then the matrices' rows, all matrices together, are split into units
// of 8 (few rows) or 32 (many), so that each worker streams one contiguous part of the weights. A gated pair computes
// gate and up of the same rows into the worker's tile and writes only act(gate) * up. Precision "fine" adds the results
// of its two terms in pairs.
#include "cpu/matrix_product.h"

#include "common.h"

#include <cstring>

namespace apu::cpu {
namespace {

constexpr size_t kTileFloats = size_t(kMaxTile) * kWideUnit;
static_assert(kTileFloats >= 2 * size_t(kManyRows) * kMaxChunkRows); // two terms

struct Side {
  const Tensor *w = nullptr;   // (N, K)
  const float *bias = nullptr; // (N) or null
  float *out = nullptr;        // (T, N)
  uint32_t n = 0;
  bool quantized = false;
};

class Matmul final : public Op {
public:
  Matmul(Builder &b, const apu_op &op)
      : in_tensor_(*b.info().tensor(op.in[0])), residual_(b.scratch(op.in[1])), cap_(op.f[1]), limit_(op.f[2]),
        k_(uint32_t(in_tensor_.inner)), activation_(activation(b.kernels(), op.i[0])) {
    bool floats = false, quantized = false;
    for (; count_ < 4 && op.w[1 + count_] != APU_NONE; ++count_) {
      Side &s = sides_[count_];
      s.w = b.info().tensor(op.w[1 + count_]);
      s.bias = b.vector(op.w[5 + count_]);
      s.out = b.scratch(op.out[count_]);
      s.n = uint32_t(s.w->rows);
      s.quantized = has_quantized_rows(s.w->d.dtype, op.i[1]);
      (s.quantized ? quantized : floats) = true;
    }
    input_ = MatrixInput(b.scratch(op.in[0]), b.vector(op.w[0]), op.f[0], k_, floats, quantized,
                         op.i[1] == APU_PRECISION_FINE);
    terms_ = input_.terms();
    work_bytes_ = b.kernels().work_bytes(k_);
    // A tile's call must stay far below the time in which a cancellation is to be noticed.
    uint64_t macs = &b.kernels() == portable_table() ? 1u << 23 : 1u << 28;
    tile_ = uint32_t(std::clamp<uint64_t>(macs / kWideUnit / k_ / terms_ / 32 * 32, 32, kMaxTile / terms_));
    input_.reserve(b.workspace, in_tensor_.rows);
    b.workspace.worker_bytes =
        std::max(b.workspace.worker_bytes,
                 input_.worker_bytes() + (1 + terms_) * aligned(kTileFloats * sizeof(float)) + aligned(work_bytes_));
  }

  void run(Worker &worker, Run &run) override {
    uint32_t rows = run.rows(in_tensor_);
    if (rows == 0) return;
    Bump scratch = run.scratch(worker);
    Call c{run,
           scratch.take<float>(kTileFloats),
           scratch.take<float>(kTileFloats),
           terms_ == 2 ? scratch.take<float>(kTileFloats) : nullptr,
           scratch.bytes(work_bytes_),
           {},
           rows};
    c.in = input_.prepare(worker, run, scratch, rows);
    uint32_t unit = rows < kManyRows ? kNarrowUnit : kWideUnit;
    uint32_t first[5] = {}; // unit at which each matrix begins
    uint32_t blocks = activation_ ? 1 : count_;
    for (uint32_t m = 0; m < blocks; ++m) first[m + 1] = first[m] + (sides_[m].n + unit - 1) / unit;
    uint32_t chunk = 1;
    if (unit == kNarrowUnit) {
      const uint64_t row_bytes = sides_[0].w->row_bytes * (activation_ ? 2 : 1);
      chunk = chunk_rows(worker, row_bytes * first[blocks] * unit, row_bytes) / unit;
    }
    Split split(worker, first[blocks], chunk);
    for (uint32_t begin, end; split.next(begin, end);) {
      if (run.stopping()) break;
      for (uint32_t m = 0; begin < end; ++m) {
        if (begin >= first[m + 1]) continue;
        uint32_t stop = std::min(end, first[m + 1]);
        compute(c, m, (begin - first[m]) * unit, std::min((stop - first[m]) * unit, sides_[m].n));
        begin = stop;
      }
    }
  }

  uint64_t work(const StepCopy &step) const override {
    uint64_t rows = in_tensor_.d.rows == APU_ROWS_OUTPUT ? step.outputs.size() : step.rows.size(), n = 0;
    for (uint32_t m = 0; m < count_; ++m) n += sides_[m].n;
    return rows * n * k_;
  }

private:
  struct Call { // one worker's view of a run
    Run &run;
    float *tile; // (rows, units' rows)
    float *tile2;
    float *pairs; // (rows, 2, units' rows) where there are two terms
    void *work;
    InputRows in;
    uint32_t rows;
  };

  // y[t * stride + n - begin] for input rows [t0, t0 + tn) and matrix rows [begin, end); `next` as in Matrix.
  void product(const Call &c, const Side &s, uint32_t t0, uint32_t tn, uint32_t begin, uint32_t end,
               const uint8_t *next, float *y, size_t stride) const {
    for_segments(*s.w, begin, end, [&](Matrix matrix, uint32_t first, uint32_t last, uint32_t at) {
      matrix.next = next;
      if (!s.quantized)
        c.run.kernels->matmul_float(matrix, c.in.x + size_t(t0) * k_, k_, tn, first, last, y + at, stride, c.work);
      else if (terms_ == 1)
        c.run.kernels->matmul(matrix, c.in.a.from(t0), tn, first, last, y + at, stride, c.work);
      else
        add_terms(c, matrix, t0, tn, first, last, y + at, stride);
    });
    if (!s.bias) return;
    for (uint32_t t = 0; t < tn; ++t)
      for (uint32_t n = begin; n < end; ++n) y[t * stride + n - begin] += s.bias[n];
  }

  void add_terms(const Call &c, const Matrix &matrix, uint32_t t0, uint32_t tn, uint32_t first, uint32_t last,
                 float *to, size_t stride) const {
    const size_t width = last - first;
    c.run.kernels->matmul(matrix, c.in.a.from(size_t(t0) * 2), tn * 2, first, last, c.pairs, width, c.work);
    for (size_t t = 0; t < tn; ++t) {
      const float *pair = c.pairs + 2 * t * width;
      for (size_t n = 0; n < width; ++n) to[t * stride + n] = pair[n] + pair[width + n];
    }
  }

  void compute(const Call &c, uint32_t m, uint32_t begin, uint32_t end) const {
    const Side &s = sides_[m];
    uint32_t width = end - begin;
    for (uint32_t t0 = 0; t0 < c.rows; t0 += tile_) {
      if (t0 && c.run.stopping()) return;
      uint32_t tn = std::min(tile_, c.rows - t0);
      float *out = s.out + size_t(t0) * s.n + begin;
      bool finish = m == 0 && (activation_ || cap_ != 0 || residual_);
      if (!finish) {
        product(c, s, t0, tn, begin, end, nullptr, out, s.n);
        continue;
      }
      const uint8_t *other = activation_ ? row_address(*sides_[1].w, begin) : nullptr;
      product(c, s, t0, tn, begin, end, other, c.tile, width);
      if (activation_) product(c, sides_[1], t0, tn, begin, end, row_address(*s.w, end % s.n), c.tile2, width);
      for (size_t t = 0; t < tn; ++t) {
        float *y = c.tile + t * width, *to = out + t * s.n;
        if (activation_) {
          limit_pair(limit_, y, c.tile2 + t * width, width);
          activation_(y, c.tile2 + t * width, y, width);
        }
        if (cap_ != 0) c.run.kernels->soft_cap(y, cap_, width);
        if (residual_) {
          const float *r = residual_ + (t0 + t) * s.n + begin; // may be out itself
          for (uint32_t n = 0; n < width; ++n) to[n] = r[n] + y[n];
        } else {
          std::memcpy(to, y, width * sizeof(float));
        }
      }
    }
  }

  const Tensor &in_tensor_;
  const float *residual_; // (T, N) or null
  float cap_, limit_;
  uint32_t k_;
  Activation activation_;
  MatrixInput input_;
  Side sides_[4];
  uint32_t count_ = 0;
  uint32_t terms_ = 1; // of a quantised input
  size_t work_bytes_ = 0;
  uint32_t tile_ = kMaxTile;
};

} // namespace

std::unique_ptr<Op> make_matmul(Builder &builder, const apu_op &op) {
  return std::make_unique<Matmul>(builder, op);
}

} // namespace apu::cpu
