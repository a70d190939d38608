// STREAMS_IN and STREAMS_OUT: hyper-connections; see kernels/streams.hip. A row has the same bits from the kernels for
// few rows and from those for many: the number of rows decides by speed alone.
#include "gpu/kernels/streams.h"
#include "gpu/ops.h"

#include <algorithm>

namespace apu::gpu {
namespace {

uint32_t ceil_div(uint64_t a, uint64_t b) {
  return uint32_t((a + b - 1) / b);
}

// Multiples of 16 bytes, four columns at a time.
template <typename... T> bool are_aligned(uint32_t d, const T *...p) {
  return d % 4 == 0 && ((reinterpret_cast<uintptr_t>(p) % 16 == 0) && ...);
}

class StreamsIn final : public Op {
public:
  StreamsIn(Builder &b, const apu_op &op) : in_(*b.info().tensor(op.in[0])) {
    args_.count = {b.step().counts, in_.d.rows, uint32_t(in_.rows)};
    args_.w = b.matrix(op.w[0]);
    args_.in = b.scratch(op.in[0]);
    args_.scale = b.vector(op.w[1]);
    args_.offset = b.vector(op.w[2]);
    args_.out = b.scratch(op.out[0]);
    args_.mix = b.scratch(op.out[1]);
    args_.streams = uint32_t(op.i[0]);
    args_.d = args_.w.k / args_.streams;
    args_.iterations = uint32_t(op.i[1]);
    args_.parts = ceil_div(args_.w.k, kStreamSteps * kStreamColumns * b.props().wave_size);
    args_.finish_columns = 4 * kStreamThreads;
    args_.aligned = are_aligned(args_.d, args_.in, args_.out);
    args_.eps = op.f[0];
    args_.floor = op.f[1];
    waves_ = kStreamThreads / b.props().wave_size, many_waves_ = kStreamManyThreads / b.props().wave_size;
    const std::string type = columns(*b.info().tensor(op.w[0])), name = "streams_" + type;
    outputs_ = type == "any" ? 1 : kStreamManyOutputs;
    few_ = b.kernel(name + "_few");
    b.reserve(Scratch::counters, kStreamFewRows * sizeof(uint32_t));
    b.reserve(Scratch::scores, in_.rows * args_.parts * (args_.w.rows + 1) * sizeof(float));
    if (in_.rows <= kStreamFewRows) return;
    many_ = b.kernel(name + "_many");
    finish_ = b.kernel("streams_finish");
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    const uint32_t rows = bucket.of(in_);
    if (rows == 0) return;
    StreamsInArgs args = args_;
    args.sums = launcher.scratch_as<float>(Scratch::scores);
    if (rows <= kStreamFewRows) {
      args.counters = launcher.scratch_as<uint32_t>(Scratch::counters);
      launcher.launch(few_, {args.parts * ceil_div(args.w.rows, waves_), rows}, kStreamThreads, args);
      return;
    }
    const uint32_t outputs = many_waves_ * outputs_;
    launcher.launch(many_, {args.parts * ceil_div(args.w.rows, outputs), ceil_div(rows, kStreamManyRows)},
                    kStreamManyThreads, args);
    launcher.launch(finish_, {ceil_div(args.d, args.finish_columns), rows}, kStreamThreads, args);
  }

private:
  // Of which kernels: those of float types want all rows at multiples of four elements.
  std::string columns(const Tensor &w) const {
    const uint32_t bytes = w.d.dtype == APU_F16 ? 8 : w.d.dtype == APU_F32 ? 16 : 0;
    bool aligned = bytes && args_.w.k % 4 == 0 && reinterpret_cast<uintptr_t>(args_.in) % 16 == 0;
    for (const apu_segment &s : w.segments) aligned = aligned && s.address % bytes == 0 && s.row_stride % bytes == 0;
    return !aligned ? "any" : bytes == 8 ? "f16" : "f32";
  }

  const Tensor &in_;            // (T, S, D)
  uint32_t waves_, many_waves_; // of a block
  uint32_t outputs_;            // of a wave of `many_`
  Kernel few_, many_, finish_;  // the last two: only where the plan's rows are many
  StreamsInArgs args_{};
};

class StreamsOut final : public Op {
public:
  StreamsOut(Builder &b, const apu_op &op) : in_(*b.info().tensor(op.in[0])) {
    args_.count = {b.step().counts, in_.d.rows, uint32_t(in_.rows)};
    args_.in = b.scratch(op.in[0]);
    args_.made = b.scratch(op.in[1]);
    args_.mix = b.scratch(op.in[2]);
    args_.out = b.scratch(op.out[0]);
    args_.streams = uint32_t(op.i[0]);
    args_.d = uint32_t(b.info().tensor(op.in[1])->inner);
    four_ = args_.streams == 4 && are_aligned(args_.d, args_.in, args_.made, args_.mix, args_.out);
    kernel_ = b.kernel(four_ ? "streams_out_four" : "streams_out_any");
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    const uint32_t rows = bucket.of(in_), columns = kStreamThreads * (four_ ? 4 : 1);
    if (rows) launcher.launch(kernel_, {ceil_div(args_.d, columns), rows}, kStreamThreads, args_);
  }

private:
  const Tensor &in_; // (T, S, D)
  bool four_;
  Kernel kernel_;
  StreamsOutArgs args_{};
};

} // namespace

std::unique_ptr<Op> make_streams_in(Builder &builder, const apu_op &op) {
  return std::make_unique<StreamsIn>(builder, op);
}

std::unique_ptr<Op> make_streams_out(Builder &builder, const apu_op &op) {
  return std::make_unique<StreamsOut>(builder, op);
}

} // namespace apu::gpu
