// HEAD_MATMUL. Up to 8 rows, of types that have such kernels, in default precision: int8 rows through matvec's blocks
// (kernels/head_matvec.hip). More rows of all types but F32: GEMM on matrix tiles, a head at a time. Else, and in
// precision "exact", in float, whatever the type (kernels/heads.hip): one kernel for a single row, one for tiles of
// several, which give a row the same bits.
#include "gpu/kernels/heads.h"
#include "gpu/kernels/matvec_args.h"
#include "gpu/matvec.h"
#include "gpu/ops.h"

#include <algorithm>
#include <bit>
#include <vector>

namespace apu::gpu {
namespace {

// Products of int8 rows.
class HeadMatvec {
public:
  static bool serves(const DriverProps &props, const Matrix &w, int32_t precision) {
    const MatvecKind kind = matvec_kind(props, w.type, precision);
    return kind.bytes && (w.type == APU_Q8_0 || w.type == APU_Q5_0 || w.type == APU_Q4_K) && w.k % kItemColumns == 0;
  }

  // `w` (H, N, K), whose segments, if there are several, are also `segments`.
  HeadMatvec(Builder &b, const HeadArgs &heads, const Tensor &tensor, uint32_t max_rows) : props_(b.props()) {
    args_.count = heads.count;
    args_.w = heads.w;
    args_.w.rows = heads.n, args_.w.k = heads.k;
    args_.x = heads.in, args_.out = heads.out;
    args_.heads = heads.heads, args_.n = heads.n, args_.k = heads.k, args_.rest = heads.rest;
    args_.packed = 1;
    kind_ = matvec_kind(props_, heads.w.type, APU_PRECISION_DEFAULT);
    pack(b, tensor);
    InputDesc input;
    input.in = heads.in, input.in_stride = heads.k + heads.rest, input.k = heads.k;
    input.max_rows = max_rows, input.rows_each = heads.heads;
    input.quantized = true;
    input.output_rows = heads.count.kind == APU_ROWS_OUTPUT;
    input_ = make_input(b, input);
    for (uint32_t i = 0; i < 2; ++i)
      kernels_[i] = b.kernel("head_matvec_" + std::string(kind_.name) + (i ? "_r4" : "_r1"), geometry(i ? 4 : 1).lds);
  }

  void launch(Launcher &launcher, const Bucket &bucket, uint32_t rows) const {
    HeadMatvecArgs args = args_;
    const uint32_t r = rows == 1 ? 1 : 4;
    const MatvecGeometry g = geometry(r);
    args.in = input_->launch(launcher, bucket);
    args.rows = rows;
    args.blocks = (args.w.rows + g.block_rows - 1) / g.block_rows;
    args.slices = g.slices, args.splits = g.splits, args.steps = g.steps;
    args.split_shift = uint32_t(std::countr_zero(g.splits));
    launcher.launch(kernels_[r / 4], {args.blocks * args.heads, (rows + r - 1) / r}, g.threads, args, g.lds);
  }

private:
  // Rows that fill a part of a slice become parts of one, where the file's rows lie without gaps.
  void pack(Builder &b, const Tensor &tensor) {
    const uint32_t slice = kItemColumns * props_.wave_size, some = slice / args_.k;
    if (some < 2 || slice % args_.k || args_.n % some || args_.k / kind_.elements * kind_.bytes != args_.w.row_stride)
      return;
    std::vector<Segment> segments;
    for (const apu_segment &s : tensor.segments) {
      if (s.row_begin % some || s.row_count % some || s.row_stride != args_.w.row_stride) return;
      segments.push_back({s.address, s.row_begin / some, s.row_count / some, s.row_stride * some});
    }
    args_.packed = some;
    args_.w.rows /= some, args_.w.k = slice, args_.w.row_stride *= some;
    if (segments.size() > 1)
      args_.w.segments = static_cast<const Segment *>(b.constant(segments.data(), segments.size() * sizeof(Segment)));
  }

  MatvecGeometry geometry(uint32_t r) const {
    MatvecGeometry g = matvec_geometry(kind_, props_, args_.w.k, uint64_t(args_.w.rows) * args_.heads, r, false);
    const uint32_t images = matvec_image_bytes(kind_, props_);
    g.lds = images + (g.lds - images) * args_.packed;
    return g;
  }

  DriverProps props_;
  MatvecKind kind_;
  HeadMatvecArgs args_{};
  std::unique_ptr<InputKernels> input_;
  Kernel kernels_[2]; // of 1 and of 4 rows
};

class HeadMatmul final : public Op {
public:
  HeadMatmul(Builder &b, const apu_op &op) : in_(*b.info().tensor(op.in[0])) {
    const Tensor &w = *b.info().tensor(op.w[0]);
    const bool across = op.i[0] != 0;
    args_.count = {b.step().counts, in_.d.rows, uint32_t(in_.rows)};
    args_.w = b.matrix(op.w[0]);
    args_.in = b.scratch(op.in[0]);
    args_.out = b.scratch(op.out[0]);
    args_.heads = uint32_t(w.d.shape[0]);
    args_.k = uint32_t(w.d.shape[across ? 1 : 2]);
    args_.n = uint32_t(w.d.shape[across ? 2 : 1]);
    args_.rest = uint32_t(op.i[2]);
    const uint32_t wave = b.props().wave_size;
    for (args_.lanes = 1; args_.lanes < wave && args_.lanes * kHeadColumns < args_.k;) args_.lanes *= 2;
    const std::string kernel = name(args_.w.type, across);
    const uint32_t outputs = kernel == "heads_any" ? 1 : kHeadOutputs;
    const uint32_t each = across ? wave * kHeadColumns : kHeadThreads / args_.lanes * outputs;
    args_.blocks = (args_.n + each - 1) / each;
    args_.aligned =
        args_.k % kHeadColumns == 0 && args_.rest % 4 == 0 && reinterpret_cast<uintptr_t>(args_.in) % 16 == 0;
    args_.aligned_w = args_.k % kHeadColumns == 0;
    for (const apu_segment &segment : w.segments)
      if (segment.address % 16 || segment.row_stride % 16) args_.aligned_w = 0;
    one_ = b.kernel(kernel + "_r1");
    if (in_.rows > 1) many_ = b.kernel(kernel + "_many");
    if (across || in_.d.rows == APU_ROWS_FIXED || op.i[1] == APU_PRECISION_EXACT) return;
    if (args_.w.type != APU_F32 && in_.rows > kMatvecRows)
      tiles_ = make_head_gemm(
          b, {args_.w, args_.in, args_.out, args_.heads, args_.rest, args_.count.kind == APU_ROWS_OUTPUT});
    if (HeadMatvec::serves(b.props(), args_.w, op.i[1]))
      few_ = std::make_unique<HeadMatvec>(b, args_, w, std::min(uint32_t(in_.rows), kMatvecRows));
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    const uint32_t rows = bucket.of(in_), tile = rows == 1 ? 1 : kHeadRows;
    if (rows == 0) return;
    if (tiles_ && rows > kMatvecRows) return tiles_->launch(launcher, bucket, {});
    if (few_ && rows <= kMatvecRows) return few_->launch(launcher, bucket, rows);
    launcher.launch(rows == 1 ? one_ : many_, {(rows + tile - 1) / tile * args_.blocks, args_.heads}, kHeadThreads,
                    args_);
  }

private:
  static std::string name(uint32_t type, bool across) {
    if (across) return "heads_across";
    switch (type) {
    case APU_F32: return "heads_f32";
    case APU_F16: return "heads_f16";
    case APU_BF16: return "heads_bf16";
    default: return "heads_any";
    }
  }

  const Tensor &in_; // (T, H, K + rest)
  Kernel one_, many_;
  std::unique_ptr<HeadMatvec> few_;       // null where int8 rows do not serve
  std::unique_ptr<ProductKernels> tiles_; // null where matrix tiles do not
  HeadArgs args_{};
};

} // namespace

std::unique_ptr<Op> make_head_matmul(Builder &builder, const apu_op &op) {
  return std::make_unique<HeadMatmul>(builder, op);
}

} // namespace apu::gpu
