// STREAMS_IN and STREAMS_OUT: hyper-connections; see kernels/streams.hip. With few rows STREAMS_OUT and the STREAMS_IN
// behind it are one launch, which gives the bits that two would.
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

// Whether what is written lies apart from what is read, or takes its place row by row.
bool are_apart(const float *a, uint64_t a_row, const float *b, uint64_t b_row, uint64_t rows) {
  return (a == b && a_row == b_row) || a + rows * a_row <= b || b + rows * b_row <= a;
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
    args_.eps = op.f[0];
    args_.floor = op.f[1];
    const std::string many = float_name(*b.info().tensor(op.w[0]));
    const bool aligned = args_.streams == 4 && are_aligned(args_.d, args_.in, args_.out);
    four_ = aligned && many != "any";
    few_ = b.kernel("streams_" + (four_ ? many : "any"));
    if (four_) joined_ = b.kernel("streams_joined_" + many);
    few_parts_ = ceil_div(args_.d, kStreamPart);
    many_parts_ = ceil_div(args_.w.k, kStreamSteps * kStreamColumns * b.props().wave_size);
    outputs_ = kStreamManyThreads / b.props().wave_size * (many == "any" ? 1 : kStreamManyOutputs);
    const uint64_t few_rows = std::min<uint64_t>(in_.rows, kStreamFewRows);
    const uint64_t most = std::max(few_rows * few_parts_, in_.rows > kStreamFewRows ? in_.rows * many_parts_ : 0);
    b.reserve(Scratch::counters, kStreamFewRows * sizeof(uint32_t));
    b.reserve(Scratch::scores, most * (args_.w.rows + 1) * sizeof(float));
    if (in_.rows <= kStreamFewRows) return;
    many_ = b.kernel("streams_" + many + "_many");
    finish_ = b.kernel(aligned ? "streams_finish_four" : "streams_finish_any");
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    const uint32_t rows = bucket.of(in_);
    if (rows == 0) return;
    StreamsInArgs args = args_;
    if (rows <= kStreamFewRows) return launch_few(launcher, few_, args, rows);
    args.sums = launcher.scratch_as<float>(Scratch::scores);
    args.parts = many_parts_;
    launcher.launch(many_, {args.parts * ceil_div(args.w.rows, outputs_), ceil_div(rows, kStreamManyRows)},
                    kStreamManyThreads, args);
    launcher.launch(finish_, {ceil_div(args.d, kStreamFinish), rows}, kStreamThreads, args);
  }

  // Together with the STREAMS_OUT before it, the same bits as apart. False where they cannot be one kernel: its blocks
  // end a row while others still read theirs.
  bool launch_joined(Launcher &launcher, const Bucket &bucket, const StreamsOutArgs &before) const {
    const uint32_t rows = bucket.of(in_);
    const uint64_t d = args_.d, mixed = 20;
    if (!four_ || rows == 0 || rows > kStreamFewRows || before.out != args_.in || before.in != before.out) return false;
    for (const auto &[to, width] : {std::pair{args_.out, d}, std::pair{args_.mix, mixed}})
      if (rows > 1 && to &&
          !(are_apart(to, width, before.made, d, rows) && are_apart(to, width, before.mix, mixed, rows)))
        return false;
    StreamsInArgs args = args_;
    args.before = before;
    launch_few(launcher, joined_, args, rows);
    return true;
  }

private:
  void launch_few(Launcher &launcher, const Kernel &kernel, StreamsInArgs &args, uint32_t rows) const {
    args.sums = launcher.scratch_as<float>(Scratch::scores);
    args.counters = launcher.scratch_as<uint32_t>(Scratch::counters);
    args.parts = few_parts_;
    launcher.launch(kernel, {args.parts, rows}, four_ ? kStreamFourThreads : kStreamThreads, args);
  }

  // Of the kernels of float types, which want all rows at multiples of four elements.
  std::string float_name(const Tensor &w) const {
    const uint32_t bytes = w.d.dtype == APU_F16 ? 8 : w.d.dtype == APU_F32 ? 16 : 0;
    bool aligned = bytes && args_.w.k % 4 == 0 && reinterpret_cast<uintptr_t>(args_.in) % 16 == 0;
    for (const apu_segment &s : w.segments) aligned = aligned && s.address % bytes == 0 && s.row_stride % bytes == 0;
    return !aligned ? "any" : bytes == 8 ? "f16" : "f32";
  }

  const Tensor &in_; // (T, S, D)
  bool four_;        // streams, and all at multiples of 16 bytes
  uint32_t few_parts_, many_parts_, outputs_;
  Kernel few_, joined_, many_, finish_; // the last two: only where the plan's rows are many
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

  bool launch_with(const Op &next, Launcher &launcher, const Bucket &bucket) const override {
    const auto *opens = dynamic_cast<const StreamsIn *>(&next);
    return opens && four_ && opens->launch_joined(launcher, bucket, args_);
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
