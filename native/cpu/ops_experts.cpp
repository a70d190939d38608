// EXPERTS: matrices of which each row of the step uses k of E, in two halves with the activation between.
//
// A (row, slot) is a pair. Pairs are sorted by expert first, so that an expert's weights are read, and unpacked, once a
// step however many rows chose it. The first half splits (expert, block of matrix rows) among the workers: each streams
// a contiguous part of one expert after another, with the expert's rows of the input gathered for many-row kernels. The
// second half adds the experts' products into the row, so it splits by matrix rows alone, and a worker goes through the
// experts in ascending order, which is that of a row's slots: the sum needs no buffer and has the same bits in any
// batch. Its input has a row for each pair and is quantised straight to its place in the order of experts.
#include "cpu/matrix_product.h"

#include <cstring>

namespace apu::cpu {
namespace {

constexpr uint32_t kTileFloats = kMaxTile * kWideUnit; // outputs of one call
constexpr uint32_t kClaims = 4;                        // of each worker, where rows are many

struct Groups {
  uint32_t *count;  // (1) experts with a pair
  uint32_t *expert; // (count) ascending
  uint32_t *begin;  // (count + 1) in pairs
  uint32_t *place;  // (count + 1) in the second half's input: whole panels for each expert, where there are panels
  uint32_t *pairs;  // (T * k) by expert, ascending within one
  uint32_t *next;   // (E) while sorting

  Groups(Bump &memory, size_t experts, size_t pairs_)
      : count(memory.take<uint32_t>(1)), expert(memory.take<uint32_t>(experts)),
        begin(memory.take<uint32_t>(experts + 1)), place(memory.take<uint32_t>(experts + 1)),
        pairs(memory.take<uint32_t>(pairs_)), next(memory.take<uint32_t>(experts)) {}
  static size_t bytes(size_t experts, size_t pairs) {
    return aligned(4) + 2 * aligned(experts * 4) + 2 * aligned((experts + 1) * 4) + aligned(pairs * 4);
  }
  uint32_t size(uint32_t group) const { return begin[group + 1] - begin[group]; }
};

struct Side {
  const Tensor *w = nullptr;   // (E, N, K)
  const float *bias = nullptr; // (E, N) or null
  bool quantized = false;
};

class Experts final : public Op {
public:
  Experts(Builder &b, const apu_op &op)
      : in_tensor_(*b.info().tensor(op.in[0])), in_(b.scratch(op.in[0])),
        ids_(reinterpret_cast<const int32_t *>(b.scratch(op.in[1]))), weights_(b.scratch(op.in[2])),
        residual_(b.scratch(op.in[3])), out_(b.scratch(op.out[0])), slots_(uint32_t(b.info().tensor(op.in[1])->inner)),
        activation_(activation(b.kernels(), op.i[0])), limit_(op.f[1]) {
    for (uint32_t m = 0; m < (activation_ ? 2u : 1u); ++m) {
      Side &s = sides_[m];
      s.w = b.info().tensor(op.w[1 + m]);
      s.bias = b.vector(op.w[3 + m]);
      s.quantized = has_quantized_rows(s.w->d.dtype, op.i[1]);
      (s.quantized ? quantized_ : floats_) = true;
    }
    experts_ = uint32_t(sides_[0].w->d.shape[0]);
    n_ = uint32_t(sides_[0].w->d.shape[1]);
    k_ = uint32_t(sides_[0].w->inner);
    layout_ = ActLayout(k_);
    panels_ = quantized_ && b.kernels().pack;
    input_ = MatrixInput(in_, b.vector(op.w[0]), op.f[0], k_, floats_, quantized_, false);
    work_bytes_ = b.kernels().work_bytes(k_);
    // A call must stay far below the time in which a cancellation is to be noticed.
    const uint64_t macs = &b.kernels() == portable_table() ? 1u << 23 : 1u << 28;
    outputs_ = uint32_t(std::clamp<uint64_t>(macs / k_, 32 * kWideUnit, kTileFloats));
    tile_ = outputs_ / kWideUnit;

    const uint64_t rows = std::max<uint64_t>(in_tensor_.rows, 1), pairs = rows * slots_;
    const size_t tiles = 2 * aligned(outputs_ * sizeof(float)) + aligned(work_bytes_);
    const size_t few = kRedundantRows * size_t(slots_);
    Workspace &ws = b.workspace;
    ws.group_bytes = std::max(ws.group_bytes, Groups::bytes(experts_, pairs));
    size_t own = tiles + Groups::bytes(experts_, few);
    if (activation_) {
      input_.reserve(ws, rows);
      own += input_.worker_bytes() + act_bytes(tile_) + float_bytes(tile_);
    } else {
      const uint64_t places = pairs + (panels_ ? kPanelRows * std::min<uint64_t>(experts_, pairs) : 0);
      ws.act_bytes = std::max(ws.act_bytes, act_bytes(places));
      ws.normed_bytes = std::max(ws.normed_bytes, float_bytes(places));
      own += act_bytes(few) + float_bytes(few);
    }
    ws.worker_bytes = std::max(ws.worker_bytes, own);
  }

  void run(Worker &worker, Run &run) override {
    const uint32_t rows = run.rows(in_tensor_), pairs = rows * slots_;
    if (rows == 0) return;
    const bool few = rows <= kRedundantRows;
    Bump scratch = run.scratch(worker), shared(run.workspace->group);
    Call c{run,
           rows,
           pairs,
           Groups(few ? scratch : shared, experts_, pairs),
           scratch.take<float>(outputs_),
           scratch.take<float>(outputs_),
           scratch.bytes(work_bytes_),
           {},
           {}};
    if (few)
      sort(c, 1);
    else
      worker.barrier([&] { sort(c, panels_ ? kPanelRows : 1); });
    if (activation_) {
      c.in = input_.prepare(worker, run, scratch, rows);
      c.gathered = inputs(scratch.bytes(act_bytes(tile_)), scratch.bytes(float_bytes(tile_)), tile_);
      first_half(worker, c);
    } else {
      c.in = sorted_input(worker, c, scratch);
      second_half(worker, c);
    }
  }

  uint64_t work(const StepCopy &step) const override {
    const uint64_t rows = in_tensor_.d.rows == APU_ROWS_OUTPUT ? step.outputs.size() : step.rows.size();
    return rows * slots_ * n_ * k_ * (activation_ ? 2 : 1);
  }

private:
  struct Call { // one worker's view of a run
    Run &run;
    uint32_t rows, pairs;
    Groups groups;
    float *tile; // (pairs, matrix rows) of one call
    float *tile2;
    void *work;
    InputRows in;       // first half: of the rows; second half: of the pairs, sorted
    InputRows gathered; // first half: room for a tile's rows
  };

  size_t act_bytes(size_t rows) const {
    return quantized_ ? aligned(layout_.bytes(rows) + (panels_ ? layout_.panel_bytes(rows) : 0)) : 0;
  }
  size_t float_bytes(size_t rows) const { return floats_ ? aligned(rows * k_ * sizeof(float)) : 0; }
  InputRows inputs(uint8_t *act, void *floats, size_t rows) const {
    InputRows out;
    if (quantized_) out.a = layout_.at(act, rows);
    if (panels_) out.a.panels = act + layout_.bytes(rows);
    if (floats_) out.x = static_cast<float *>(floats);
    return out;
  }
  InputRows rows_from(const InputRows &in, size_t row) const {
    return {floats_ ? in.x + row * k_ : nullptr, quantized_ ? in.a.from(row) : ActBlocks{}};
  }

  // Each expert's place in the second half's input is a multiple of `align`.
  void sort(const Call &c, uint32_t align) const {
    const Groups &g = c.groups;
    // A slice that runs before its ROUTE finds anything here.
    const auto expert = [this](uint32_t pair) { return std::min(uint32_t(ids_[pair]), experts_ - 1); };
    std::fill_n(g.next, experts_, 0u);
    for (uint32_t p = 0; p < c.pairs; ++p) ++g.next[expert(p)];
    uint32_t count = 0, sum = 0, place = 0;
    for (uint32_t e = 0; e < experts_; ++e) {
      const uint32_t size = g.next[e];
      if (!size) continue;
      g.expert[count] = e;
      g.place[count] = place;
      g.begin[count++] = g.next[e] = sum;
      sum += size;
      place += (size + align - 1) / align * align;
    }
    g.begin[count] = sum;
    g.place[count] = place;
    *g.count = count;
    for (uint32_t p = 0; p < c.pairs; ++p) g.pairs[g.next[expert(p)]++] = p;
  }

  InputRows sorted_input(Worker &worker, const Call &c, Bump &scratch) const {
    const uint32_t places = c.groups.place[*c.groups.count];
    if (c.rows <= kRedundantRows) {
      const InputRows out = inputs(scratch.bytes(act_bytes(places)), scratch.bytes(float_bytes(places)), places);
      fill(c, out, 0, places, false);
      return out;
    }
    const InputRows out = inputs(c.run.workspace->act, c.run.workspace->normed, places);
    const uint32_t unit = panels_ ? kPanelRows : 1;
    Split split(worker, places / unit, 1 + 2048 / k_ / unit);
    for (uint32_t begin, end; split.next(begin, end);) {
      if (c.run.stopping()) break;
      fill(c, out, begin * unit, end * unit, panels_);
    }
    worker.barrier();
    return out;
  }

  // Places [begin, end) of the second half's input.
  void fill(const Call &c, const InputRows &to, uint32_t begin, uint32_t end, bool panels) const {
    const Groups &g = c.groups;
    const KernelTable &kernels = *c.run.kernels;
    uint32_t group = uint32_t(std::upper_bound(g.place, g.place + *g.count, begin) - g.place) - 1;
    for (uint32_t i = begin; i < end; ++i) {
      while (i >= g.place[group + 1]) ++group;
      const uint32_t at = i - g.place[group];
      if (at >= g.size(group)) continue;
      const float *x = in_ + size_t(g.pairs[g.begin[group] + at]) * k_;
      if (quantized_) kernels.quantize(x, k_, 1, k_, to.a.from(i));
      if (floats_) std::memcpy(const_cast<float *>(to.x) + size_t(i) * k_, x, k_ * sizeof(float));
      if (panels && at % kPanelRows == kPanelRows - 1) kernels.pack(to.a.from(i + 1 - kPanelRows));
    }
  }

  // The input rows of sorted pairs [at, at + count), one after the other.
  InputRows gather(const Call &c, size_t at, uint32_t count) const {
    if (count == 1) return rows_from(c.in, c.groups.pairs[at] / slots_);
    for (size_t i = 0; i < count; ++i) {
      const InputRows from = rows_from(c.in, c.groups.pairs[at + i] / slots_), to = rows_from(c.gathered, i);
      if (floats_) std::memcpy(const_cast<float *>(to.x), from.x, k_ * sizeof(float));
      if (!quantized_) continue;
      const size_t blocks = layout_.blocks;
      std::memcpy(to.a.q, from.a.q, blocks * 32);
      std::memcpy(to.a.d, from.a.d, blocks * 2 * sizeof(float));
      std::memcpy(to.a.s16, from.a.s16, blocks * 2 * sizeof(float));
      std::memcpy(to.a.s, from.a.s, blocks * sizeof(float));
      std::memcpy(to.a.sum16, from.a.sum16, blocks * 2 * sizeof(int32_t));
      if (panels_ && i % kPanelRows == kPanelRows - 1) c.run.kernels->pack(c.gathered.a.from(i + 1 - kPanelRows));
    }
    return c.gathered;
  }

  // y (count, end - begin) of rows [begin, end) of one expert's matrix; `next` is the place read after it.
  void product(const Call &c, const Side &s, uint64_t expert, const InputRows &in, uint32_t count, uint32_t begin,
               uint32_t end, const uint8_t *next, float *y) const {
    const KernelTable &kernels = *c.run.kernels;
    const uint64_t base = expert * n_;
    for_segments(*s.w, base + begin, base + end, [&](Matrix matrix, uint32_t first, uint32_t last, uint32_t at) {
      matrix.next = next;
      if (s.quantized)
        kernels.matmul(matrix, in.a, count, first, last, y + at, end - begin, c.work);
      else
        kernels.matmul_float(matrix, in.x, k_, count, first, last, y + at, end - begin, c.work);
    });
    for (size_t i = 0; i < count && s.bias; ++i)
      for (uint32_t n = begin; n < end; ++n) y[i * (end - begin) + n - begin] += s.bias[base + n];
  }

  // Where a row of a group's expert lies; the rows of groups follow each other, and the first follows the last.
  const uint8_t *place(const Call &c, const Side &s, uint32_t group, uint32_t row) const {
    if (row == n_) row = 0, ++group;
    return row_address(*s.w, uint64_t{c.groups.expert[group % *c.groups.count]} * n_ + row);
  }

  // Calls f(first pair, pairs, matrix rows at once) over an expert's pairs.
  template <typename F> void tiles(const Call &c, uint32_t group, F f) const {
    const uint32_t last = c.groups.begin[group + 1];
    for (uint32_t at = c.groups.begin[group]; at < last; at += tile_) {
      if (c.run.stopping()) return;
      const uint32_t count = std::min(tile_, last - at);
      f(at, count, std::min(outputs_ / count / kWideUnit * kWideUnit, kMaxChunkRows));
    }
  }

  // Matrix rows in a unit of work; row_bytes each are read, `parts` times n_ of them in all.
  uint32_t block(const Worker &worker, const Call &c, uint32_t parts, uint64_t row_bytes) const {
    if (c.pairs < kManyRows * *c.groups.count) return chunk_rows(worker, row_bytes * n_ * parts, row_bytes);
    const uint32_t blocks = kClaims * worker.count / parts + 1;
    return (n_ / blocks + kWideUnit) / kWideUnit * kWideUnit;
  }

  void first_half(Worker &worker, const Call &c) const {
    const uint32_t groups = *c.groups.count, rows = block(worker, c, groups, 2 * sides_[0].w->row_bytes);
    const uint32_t across = (n_ + rows - 1) / rows;
    Split split(worker, groups * across, 1);
    for (uint32_t at, end; split.next(at, end);)
      for (; at < end; ++at) {
        const uint32_t begin = at % across * rows;
        gated(c, at / across, begin, std::min(begin + rows, n_));
        if (c.run.stopping()) return;
      }
  }

  void gated(const Call &c, uint32_t g, uint32_t begin, uint32_t end) const {
    tiles(c, g, [&](uint32_t at, uint32_t count, uint32_t width) {
      const InputRows in = gather(c, at, count);
      for (uint32_t n = begin; n < end; n += width) {
        const uint32_t stop = std::min(n + width, end);
        product(c, sides_[0], c.groups.expert[g], in, count, n, stop, place(c, sides_[1], g, n), c.tile);
        product(c, sides_[1], c.groups.expert[g], in, count, n, stop, place(c, sides_[0], g, stop), c.tile2);
        limit_pair(limit_, c.tile, c.tile2, count * (stop - n));
        for (size_t i = 0; i < count; ++i)
          activation_(c.tile + i * (stop - n), c.tile2 + i * (stop - n), out_ + size_t(c.groups.pairs[at + i]) * n_ + n,
                      stop - n);
      }
    });
  }

  void second_half(Worker &worker, const Call &c) const {
    const uint32_t rows = block(worker, c, 1, sides_[0].w->row_bytes);
    Split split(worker, (n_ + rows - 1) / rows, 1);
    for (uint32_t at, end; split.next(at, end);)
      for (; at < end; ++at) {
        add(c, at * rows, std::min(at * rows + rows, n_));
        if (c.run.stopping()) return;
      }
  }

  // Rows [begin, end) of every expert's matrix.
  void add(const Call &c, uint32_t begin, uint32_t end) const {
    for (size_t t = 0; t < c.rows && residual_ != out_; ++t) {
      float *to = out_ + t * n_ + begin;
      if (residual_)
        std::memcpy(to, residual_ + t * n_ + begin, (end - begin) * sizeof(float));
      else
        std::fill_n(to, end - begin, 0.0f);
    }
    for (uint32_t g = 0; g < *c.groups.count; ++g)
      tiles(c, g, [&](uint32_t at, uint32_t count, uint32_t width) {
        const InputRows in = rows_from(c.in, c.groups.place[g] + (at - c.groups.begin[g]));
        for (uint32_t n = begin; n < end; n += width) {
          const uint32_t stop = std::min(n + width, end);
          product(c, sides_[0], c.groups.expert[g], in, count, n, stop,
                  stop < end ? nullptr : place(c, sides_[0], g + 1, begin), c.tile);
          for (size_t i = 0; i < count; ++i) {
            const uint32_t pair = c.groups.pairs[at + i];
            const float weight = weights_[pair], *y = c.tile + i * (stop - n);
            float *to = out_ + size_t(pair / slots_) * n_ + n;
            for (uint32_t m = 0; m < stop - n; ++m) to[m] += weight * y[m];
          }
        }
      });
  }

  const Tensor &in_tensor_;
  const float *in_;       // (T, K), or (T, k, K)
  const int32_t *ids_;    // (T, k)
  const float *weights_;  // (T, k) in the second half
  const float *residual_; // (T, N) or null
  float *out_;            // (T, k, N), or (T, N)
  uint32_t slots_;        // k
  Activation activation_; // null in the second half
  float limit_;
  uint32_t experts_, n_, k_;
  bool floats_ = false, quantized_ = false, panels_ = false;
  Side sides_[2];
  ActLayout layout_{0};
  MatrixInput input_;
  size_t work_bytes_;
  uint32_t outputs_, tile_; // of one call: outputs, input rows
};

} // namespace

std::unique_ptr<Op> make_experts(Builder &builder, const apu_op &op) {
  return std::make_unique<Experts>(builder, op);
}

} // namespace apu::cpu
