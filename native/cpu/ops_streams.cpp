// STREAMS_IN and STREAMS_OUT: hyper-connections. Several streams stand where others have one residual; a block takes
// their weighted sum and gives back to each, while they mix by a doubly stochastic matrix (arXiv 2512.24880).
//
// The products that the weights come from are split by matrix rows (few rows: the matrix is most of a megabyte) or by
// tiles of both; dividing by the rms follows them, so that the streams are read as they are. The mix is S x S numbers:
// a row's are made where its sum is. Giving back splits by blocks of elements, of which all streams are read before
// any is written.
#include "cpu/matrix_product.h"

#include <cmath>
#include <cstring>

namespace apu::cpu {
namespace {

constexpr uint32_t kTileRows = 32; // of the input, in one call
constexpr uint32_t kFewUnit = 2;   // matrix rows
constexpr uint32_t kBlock = 512;   // elements of a stream

float sigmoid(float x) {
  return 1.0f / (1.0f + std::exp(-x));
}

class StreamsIn final : public Op {
public:
  StreamsIn(Builder &b, const apu_op &op)
      : w_(*b.info().tensor(op.w[0])), in_(b.scratch(op.in[0])), out_(b.scratch(op.out[0])), mix_(b.scratch(op.out[1])),
        scale_(b.vector(op.w[1])), offset_(b.vector(op.w[2])), eps_(op.f[0]), floor_(op.f[1]),
        streams_(uint32_t(op.i[0])), iterations_(uint32_t(op.i[1])), n_(uint32_t(w_.rows)), k_(uint32_t(w_.inner)),
        work_bytes_(b.kernels().work_bytes(k_)) {
    Workspace &ws = b.workspace;
    ws.score_bytes = std::max(ws.score_bytes, b.info().max_rows * size_t(n_) * sizeof(float));
    ws.worker_bytes = std::max(ws.worker_bytes, aligned(work_bytes_) + aligned(n_ * sizeof(float)));
  }

  void run(Worker &worker, Run &run) override {
    const uint32_t rows = uint32_t(run.step.rows.size());
    Bump scratch = run.scratch(worker);
    void *work = scratch.bytes(work_bytes_);
    float *weights = scratch.take<float>(n_), *products = run.workspace->score; // (T, n)
    {
      const uint32_t unit = rows < kManyRows ? kFewUnit : kWideUnit, across = (n_ + unit - 1) / unit;
      Split split(worker, (rows + kTileRows - 1) / kTileRows * across, 1);
      for (uint32_t at, end; split.next(at, end);) {
        if (run.stopping()) break;
        for (; at < end; ++at) {
          const uint32_t t = at / across * kTileRows, begin = at % across * unit;
          const uint32_t count = std::min(kTileRows, rows - t);
          float *y = products + size_t(t) * n_ + begin;
          for_segments(w_, begin, std::min(begin + unit, n_),
                       [&](const Matrix &matrix, uint32_t first, uint32_t last, uint32_t skip) {
                         run.kernels->matmul_float(matrix, in_ + size_t(t) * k_, k_, count, first, last, y + skip, n_,
                                                   work);
                       });
        }
      }
      worker.barrier();
    }
    Split split(worker, rows, 1);
    for (uint32_t t, end; split.next(t, end);)
      for (; t < end; ++t) {
        if (run.stopping()) return;
        finish(products + size_t(t) * n_, weights, t);
      }
  }

  uint64_t work(const StepCopy &step) const override { return step.rows.size() * n_ * k_; }

private:
  void finish(const float *products, float *w, size_t t) const {
    const float *x = in_ + t * k_;
    float lanes[16] = {};
    uint32_t i = 0;
    for (; i + 16 <= k_; i += 16)
      for (uint32_t l = 0; l < 16; ++l) lanes[l] += x[i + l] * x[i + l];
    for (uint32_t l = 0; i + l < k_; ++l) lanes[l] += x[i + l] * x[i + l];
    double squares = 0;
    for (float lane : lanes) squares += double(lane);
    const float shrink = float(1 / std::sqrt(squares / k_ + double(eps_)));
    const uint32_t s = streams_, d = k_ / s;
    for (uint32_t n = 0; n < n_; ++n) w[n] = products[n] * shrink * scale_[n < s ? 0 : n < 2 * s ? 1 : 2] + offset_[n];
    float *out = out_ + t * d;
    std::memset(out, 0, d * sizeof(float));
    for (uint32_t j = 0; j < s; ++j) {
      const float weight = sigmoid(w[j]) + floor_, *from = x + size_t(j) * d;
      for (uint32_t m = 0; m < d; ++m) out[m] += weight * from[m];
    }
    if (!mix_) return;
    float *post = mix_ + t * (s + s * s), *mix = post + s;
    for (uint32_t j = 0; j < s; ++j) post[j] = 2 * sigmoid(w[s + j]);
    for (uint32_t j = 0; j < s; ++j) {
      const float *row = w + 2 * s + j * s, max = *std::max_element(row, row + s);
      float sum = 0;
      for (uint32_t m = 0; m < s; ++m) sum += mix[j * s + m] = std::exp(row[m] - max);
      for (uint32_t m = 0; m < s; ++m) mix[j * s + m] = mix[j * s + m] / sum + floor_;
    }
    for (uint32_t iteration = 0; iteration < iterations_; ++iteration) {
      if (iteration) divide(mix, s, 1);
      divide(mix, 1, s);
    }
  }

  // Each of S lines by its sum: the lines are `line` apart, their elements `step`.
  void divide(float *mix, uint32_t line, uint32_t step) const {
    for (uint32_t j = 0; j < streams_; ++j) {
      float *of = mix + j * line, sum = floor_;
      for (uint32_t m = 0; m < streams_; ++m) sum += of[m * step];
      for (uint32_t m = 0; m < streams_; ++m) of[m * step] /= sum;
    }
  }

  const Tensor &w_;              // (n, S*D)
  const float *in_;              // (T, S, D)
  float *out_;                   // (T, D)
  float *mix_;                   // (T, S + S*S) or null
  const float *scale_, *offset_; // (3) or (1), (n)
  float eps_, floor_;
  uint32_t streams_, iterations_; // S
  uint32_t n_, k_;                // k = S*D
  size_t work_bytes_;
};

class StreamsOut final : public Op {
public:
  StreamsOut(Builder &b, const apu_op &op)
      : in_(b.scratch(op.in[0])), made_(b.scratch(op.in[1])), mix_(b.scratch(op.in[2])), out_(b.scratch(op.out[0])),
        streams_(uint32_t(op.i[0])), d_(uint32_t(b.info().tensor(op.in[1])->inner)) {
    b.workspace.worker_bytes = std::max(b.workspace.worker_bytes, aligned(streams_ * kBlock * sizeof(float)));
  }

  void run(Worker &worker, Run &run) override {
    float *block = run.scratch(worker).take<float>(streams_ * kBlock); // (S, kBlock)
    const uint32_t across = (d_ + kBlock - 1) / kBlock, s = streams_;
    Split split(worker, uint32_t(run.step.rows.size()) * across, 1);
    for (uint32_t u, end; split.next(u, end);)
      for (; u < end; ++u) {
        if (run.stopping()) return;
        const size_t t = u / across;
        const uint32_t begin = u % across * kBlock, count = std::min(kBlock, d_ - begin);
        const float *in = in_ + t * s * d_ + begin, *made = made_ + t * d_ + begin, *post = mix_ + t * (s + s * s);
        const float *mix = post + s;
        for (uint32_t k = 0; k < s; ++k) {
          float *to = block + k * kBlock;
          for (uint32_t m = 0; m < count; ++m) to[m] = post[k] * made[m];
          for (uint32_t j = 0; j < s; ++j) {
            const float weight = mix[j * s + k], *from = in + size_t(j) * d_;
            for (uint32_t m = 0; m < count; ++m) to[m] += weight * from[m];
          }
        }
        for (uint32_t k = 0; k < s; ++k)
          std::memcpy(out_ + (t * s + k) * d_ + begin, block + k * kBlock, count * sizeof(float));
      }
  }

  uint64_t work(const StepCopy &step) const override { return step.rows.size() * d_ * streams_ * (streams_ + 1); }

private:
  const float *in_;   // (T, S, D), may be out
  const float *made_; // (T, D)
  const float *mix_;  // (T, S + S*S)
  float *out_;
  uint32_t streams_, d_;
};

} // namespace

std::unique_ptr<Op> make_streams_in(Builder &builder, const apu_op &op) {
  return std::make_unique<StreamsIn>(builder, op);
}

std::unique_ptr<Op> make_streams_out(Builder &builder, const apu_op &op) {
  return std::make_unique<StreamsOut>(builder, op);
}

} // namespace apu::cpu
