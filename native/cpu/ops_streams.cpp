// STREAMS_IN and STREAMS_OUT: hyper-connections. Several streams stand where others have one residual; a block takes
// their weighted sum and gives back to each, while they mix by a doubly stochastic matrix (arXiv 2512.24880).
//
// The products that the weights come from are split by matrix rows (few rows: the matrix is most of a megabyte) or by
// tiles of both; dividing by the rms, whose squares are summed beside them, follows, so that the streams are read as
// they are. The sum splits by blocks of elements, each of which makes its weights for itself; the first one makes the
// mix, S x S numbers. Giving back splits by such blocks too, of which all streams are read before any is written.
#include "cpu/matrix_product.h"

#include <cmath>
#include <cstring>

namespace apu::cpu {
namespace {

constexpr uint32_t kTileRows = 32; // of the input, in one call
constexpr uint32_t kFewUnit = 2;   // matrix rows, at least
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
        work_bytes_(b.kernels().work_bytes(k_)), max_rows_(b.info().max_rows) {
    Workspace &ws = b.workspace;
    ws.score_bytes = std::max(ws.score_bytes,
                              aligned(max_rows_ * n_ * sizeof(float)) + aligned(max_rows_ * streams_ * sizeof(float)));
    ws.worker_bytes = std::max(ws.worker_bytes, aligned(work_bytes_));
  }

  void run(Worker &worker, Run &run) override {
    const uint32_t rows = uint32_t(run.step.rows.size());
    Bump shared(reinterpret_cast<uint8_t *>(run.workspace->score));
    const Call c{shared.take<float>(max_rows_ * n_), shared.take<float>(max_rows_ * streams_)};
    const uint32_t d = k_ / streams_;
    void *work = run.scratch(worker).bytes(work_bytes_);
    {
      const uint32_t few = std::max(kFewUnit, (n_ + 2 * worker.count - 1) / (2 * worker.count));
      const uint32_t unit = rows < kManyRows ? few : kWideUnit, across = (n_ + unit - 1) / unit;
      const uint32_t tiles = (rows + kTileRows - 1) / kTileRows * across;
      Split split(worker, tiles + rows * streams_, 1);
      for (uint32_t at, end; split.next(at, end);) {
        if (run.stopping()) break;
        for (; at < end; ++at) {
          if (at >= tiles) {
            const float *x = in_ + size_t(at - tiles) * d;
            const Matrix stream{reinterpret_cast<const uint8_t *>(x), d * sizeof(float), APU_F32, d};
            run.kernels->matmul_float(stream, x, d, 1, 0, 1, c.squares + (at - tiles), 1, work);
            continue;
          }
          const uint32_t t = at / across * kTileRows, begin = at % across * unit;
          const uint32_t count = std::min(kTileRows, rows - t);
          float *y = c.products + size_t(t) * n_ + begin;
          for_segments(w_, begin, std::min(begin + unit, n_),
                       [&](const Matrix &matrix, uint32_t first, uint32_t last, uint32_t skip) {
                         run.kernels->matmul_float(matrix, in_ + size_t(t) * k_, k_, count, first, last, y + skip, n_,
                                                   work);
                       });
        }
      }
      worker.barrier();
    }
    const uint32_t across = (d + kBlock - 1) / kBlock;
    Split split(worker, rows * across, 1);
    for (uint32_t u, end; split.next(u, end);)
      for (; u < end; ++u) {
        if (run.stopping()) return;
        finish(c, u / across, u % across * kBlock);
      }
  }

  uint64_t work(const StepCopy &step) const override { return step.rows.size() * n_ * k_; }

private:
  struct Call {
    float *products; // (T, n)
    float *squares;  // (T, S) sums
  };

  // Elements [begin, begin + kBlock) of a row.
  void finish(const Call &c, size_t t, uint32_t begin) const {
    const uint32_t s = streams_, d = k_ / s, end = std::min(begin + kBlock, d);
    double sum = 0;
    for (uint32_t j = 0; j < s; ++j) sum += double(c.squares[t * s + j]);
    const float shrink = float(1 / std::sqrt(sum / k_ + double(eps_)));
    const auto number = [&](uint32_t n) {
      return c.products[t * n_ + n] * shrink * scale_[n < s ? 0 : n < 2 * s ? 1 : 2] + offset_[n];
    };
    const float *x = in_ + t * k_;
    float *out = out_ + t * d;
    std::fill(out + begin, out + end, 0.0f);
    for (uint32_t j = 0; j < s; ++j) {
      const float weight = sigmoid(number(j)) + floor_, *from = x + size_t(j) * d;
      for (uint32_t m = begin; m < end; ++m) out[m] += weight * from[m];
    }
    if (!mix_ || begin > 0) return;
    float *post = mix_ + t * (s + s * s), *mix = post + s;
    for (uint32_t j = 0; j < s; ++j) post[j] = 2 * sigmoid(number(s + j));
    for (uint32_t j = 0; j < s; ++j) {
      float *row = mix + j * s;
      for (uint32_t m = 0; m < s; ++m) row[m] = number(2 * s + j * s + m);
      const float max = *std::max_element(row, row + s);
      float total = 0;
      for (uint32_t m = 0; m < s; ++m) total += row[m] = std::exp(row[m] - max);
      for (uint32_t m = 0; m < s; ++m) row[m] = row[m] / total + floor_;
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
  size_t max_rows_;
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
