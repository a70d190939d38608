// The host's side of kernels/input.hip: where the prepared rows of an op's input lie, and the launch that makes them.
#include "gpu/ops.h"

#include "gpu/kernels/input_args.h"

namespace apu::gpu {
namespace {

constexpr uint64_t kAlignment = 256;

uint64_t aligned(uint64_t bytes) {
  return (bytes + kAlignment - 1) / kAlignment * kAlignment;
}

class Input final : public InputKernels {
public:
  Input(Builder &builder, const InputDesc &desc)
      : desc_(desc), counts_(builder.step().counts), columns_((desc.k + 255) / 256 * 256),
        terms_(desc.quantized && desc.fine ? 2 : 1), rows_(uint64_t(desc.max_rows) * desc.rows_each) {
    normed_ = desc.floats && desc.norm;
    if (desc.quantized) builder.reserve(Scratch::activations, scales_at(2));
    if (normed_) builder.reserve(Scratch::normed, rows_ * desc.k * sizeof(float));
    const bool small = !desc.norm || columns_ <= kInputPart;
    threads_ = small ? kInputSmall : kInputLarge;
    if (desc.quantized || normed_) kernel_ = builder.kernel(small ? "input_small" : "input_large");
  }

  Activations launch(Launcher &launcher, const Bucket &bucket) const override {
    Activations out{nullptr, nullptr, nullptr, desc_.floats ? desc_.in : nullptr, columns_, desc_.k};
    InputArgs args{counts_,    desc_.in,        desc_.in_stride ? desc_.in_stride : desc_.k,
                   desc_.norm, desc_.eps,       desc_.k,
                   columns_,   desc_.rows_each, desc_.output_rows,
                   terms_,     nullptr,         nullptr,
                   nullptr,    nullptr};
    if (desc_.quantized) {
      const uint64_t at = launcher.scratch(Scratch::activations);
      out.q = args.q = reinterpret_cast<i8 *>(at);
      out.d = args.d = reinterpret_cast<float *>(at + scales_at(0));
      out.s16 = args.s16 = reinterpret_cast<float *>(at + scales_at(1));
    }
    if (normed_) out.x = args.x = launcher.scratch_as<float>(Scratch::normed);
    const uint32_t rows = (desc_.output_rows ? bucket.outputs : bucket.rows) * desc_.rows_each;
    const uint32_t parts = desc_.norm ? 1 : (columns_ + kInputPart - 1) / kInputPart;
    if (kernel_.function && rows) launcher.launch(kernel_, {rows, parts, 1}, threads_, args);
    return out;
  }

private:
  // Bytes before d (0), s16 (1) and the end (2) of the quantised rows.
  uint64_t scales_at(uint32_t index) const {
    const uint64_t rows = rows_ * terms_;
    return aligned(rows * columns_) + index * aligned(rows * (columns_ / 16) * sizeof(float));
  }

  InputDesc desc_;
  const StepCounts *counts_;
  uint32_t columns_, terms_, threads_ = 0;
  uint64_t rows_;
  bool normed_ = false;
  Kernel kernel_;
};

} // namespace

std::unique_ptr<InputKernels> make_input(Builder &builder, const InputDesc &desc) {
  return std::make_unique<Input>(builder, desc);
}

} // namespace apu::gpu
