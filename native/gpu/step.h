// A step's way to the device and its results' way back (kernels/step.h): the memory behind StepView, and kStepSlots
// slots of pinned host memory that submissions take in turn.
//
// The first kernel of every submission copies its slot to the device, the last one the results back; slots are packed
// by the host while earlier submissions run. What has no bound that matters (histories, biases, masks, logits) lies in
// buffers that grow when a step needs more than any before.
#pragma once

#include "gpu/buffer.h"
#include "gpu/kernels/step.h"
#include "gpu/ops.h"

namespace apu::gpu {

class StepMemory {
public:
  apu_status create(Device &device, const PlanInfo &info, uint64_t hidden_width, Stream stream);

  const StepView &view() const { return view_; }
  uint64_t bytes() const { return memory_.bytes() + extras_.bytes(); }

  // Device memory for the histories, biases and masks of a step. Moving it needs that nothing runs.
  static uint64_t extras_words(const StepCopy &step, uint32_t vocabulary);
  bool has_room(uint64_t words) const { return words * 4 <= extras_.bytes(); }
  apu_status make_room(uint64_t words);

  // Writes a submission's slot, which no other uses any more.
  apu_status pack(const PlanInfo &info, const StepCopy &step, uint32_t turn);
  // Of a submission that ended: what became of it, and its results to the caller's pointers. `sampled` (max_outputs)
  // holds the tokens of the last submission that ran SAMPLE.
  const StepEnding &ending(uint32_t turn) const { return *slot_at<StepEnding>(turn, ending_at_); }
  const OutputResult *results(uint32_t turn) const {
    return slot_at<OutputResult>(turn, ending_at_ + sizeof(StepEnding));
  }
  void hand_over(const StepCopy &step, uint32_t turn, bool samples, bool gathers) const;

  void begin(Launcher &launcher) const;
  void end(Launcher &launcher) const;
  // Rows of `from` (O, width) that the outputs want; `want` is APU_OUT_LOGITS or APU_OUT_HIDDEN.
  void rows(Launcher &launcher, const float *from, uint32_t width, uint32_t outputs, uint32_t want) const;
  void mark(Launcher &launcher, uint32_t value) const;

  // The last mark that was reached, and the first turn that has not ended, both as far as the device has told.
  uint32_t marked() const { return __atomic_load_n(cells_.host<uint32_t>(4), __ATOMIC_ACQUIRE); }
  uint32_t ended() const { return __atomic_load_n(cells_.host<uint32_t>(0), __ATOMIC_ACQUIRE); }
  void cancel_before(uint32_t turn) { __atomic_store_n(cells_.host<uint32_t>(8), turn, __ATOMIC_RELEASE); }
  // After a submission that was broken off: the device's turn is the host's again. Nothing runs.
  apu_status set_turn(uint32_t turn);

private:
  template <typename T> T *slot_at(uint32_t turn, uint64_t offset) const {
    return slots_.host<T>(uint64_t(turn % kStepSlots) * slot_bytes_ + offset);
  }

  Driver *driver_ = nullptr;
  Stream stream_ = nullptr;
  uint32_t groups_ = 0, vocabulary_ = 0;
  uint64_t hidden_width_ = 0; // D of GATHER_NORM, 0 without one
  DeviceBuffer memory_;
  DeviceBuffer extras_;
  StepState *state_ = nullptr; // device
  StepTargets targets_{};
  StepView view_{};
  PinnedBuffer slots_;
  PinnedBuffer cells_; // ended, marked, cancelled
  uint64_t slot_bytes_ = 0, ending_at_ = 0;
  struct Growing { // one of each slot
    PinnedBuffer extras, top_ids, top_logprobs, logits, hidden;
  } growing_[kStepSlots];
  Kernel begin_, end_, rows_, mark_;
};

} // namespace apu::gpu
