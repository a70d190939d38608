// SAMPLE: a survey of all logits, then one block for each output; see kernels/sample.hip.
//
// Both are always launched: what an output asks for is known on the device only. Outputs share slots of scratch, so
// that a large vocabulary does not need a second copy of every output's logits.
#include "gpu/kernels/sample.h"
#include "gpu/ops.h"

#include <algorithm>

namespace apu::gpu {
namespace {

constexpr uint64_t kScratchBytes = 64 << 20;
constexpr uint64_t kLeastSlots = 8;

class Sample final : public Op {
public:
  Sample(Builder &b, const apu_op &op) : survey_(b.kernel("sample_survey")), finish_(b.kernel("sample_finish")) {
    const uint32_t vocabulary = b.info().vocabulary;
    args_.step = b.step();
    args_.logits = b.scratch(op.in[0]);
    args_.layout = sample_layout(vocabulary);
    args_.chunks = chunk_count(vocabulary);
    const uint64_t fit = std::max(kScratchBytes / args_.layout.slot_bytes, kLeastSlots);
    slots_ = uint32_t(std::min<uint64_t>(fit, b.info().max_outputs));
    b.reserve(Scratch::sampler, slots_ * args_.layout.slot_bytes);
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    SampleArgs args = args_;
    args.scratch = launcher.scratch_as<uint8_t>(Scratch::sampler);
    for (args.base = 0; args.base < bucket.outputs; args.base += slots_) {
      const uint32_t slots = std::min(slots_, bucket.outputs - args.base);
      launcher.launch(survey_, {args.chunks, slots}, kSurveyThreads, args);
      launcher.launch(finish_, {slots}, kFinishThreads, args);
    }
  }

private:
  Kernel survey_, finish_;
  SampleArgs args_{};
  uint32_t slots_; // outputs in flight
};

} // namespace

std::unique_ptr<Op> make_sample(Builder &builder, const apu_op &op) {
  return std::make_unique<Sample>(builder, op);
}

} // namespace apu::gpu
