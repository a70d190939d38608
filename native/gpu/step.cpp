// Packs steps, hands results over, and launches the kernels at both ends of a submission.
#include "gpu/step.h"

#include <cstring>

namespace apu::gpu {
namespace {

uint64_t padded(uint64_t bytes) {
  return (bytes + kStepUnit - 1) / kStepUnit * kStepUnit;
}

bool wants_mask(const apu_output &o) {
  return (o.want & APU_OUT_SAMPLE) && o.mask;
}

uint32_t mask_words(uint32_t vocabulary) {
  return (vocabulary + 31) / 32;
}

// Pages of a sequence that its rows can reach; its table in the step may be longer.
uint32_t reached_pages(const StepCopy &step, const apu_sequence &q) {
  return step.rows[q.row_begin + q.row_count - 1].position / kPageTokens + 1;
}

} // namespace

apu_status StepMemory::create(Device &device, const PlanInfo &info, uint64_t hidden_width, Stream stream) {
  driver_ = &device.driver(), stream_ = stream;
  groups_ = uint32_t(info.groups.size()), vocabulary_ = info.vocabulary, hidden_width_ = hidden_width;
  TRY(device.kernel("step_begin", 0, begin_));
  TRY(device.kernel("step_end", 0, end_));
  TRY(device.kernel("step_rows", 0, rows_));
  TRY(device.kernel("step_mark", 0, mark_));

  const uint64_t pages = uint64_t(info.max_sequences) * groups_ * ((info.max_positions - 1) / kPageTokens + 1);
  const uint64_t sizes[] = {padded(sizeof(StepState)),
                            padded(info.max_rows * sizeof(Row)),
                            padded(info.max_sequences * sizeof(Sequence)),
                            padded(uint64_t(info.max_sequences) * groups_ * sizeof(Slot)),
                            padded(pages * sizeof(u32)),
                            padded(info.max_outputs * sizeof(Output)),
                            padded(info.max_outputs * sizeof(i32)),
                            padded(info.max_outputs * sizeof(OutputResult))};
  uint64_t total = 0, at[std::size(sizes)];
  for (size_t i = 0; i < std::size(sizes); ++i) {
    at[i] = total;
    total += (sizes[i] + 255) / 256 * 256;
  }
  TRY(memory_.alloc(*driver_, total));
  TRY(driver_->fill(memory_.address(), 0, total, stream));
  TRY(driver_->fill(memory_.address() + at[6], 0xff, std::max<uint64_t>(sizes[6], 1), stream)); // no token yet
  const auto place = [&](size_t i) { return memory_.address() + at[i]; };
  state_ = reinterpret_cast<StepState *>(place(0));
  targets_ = {reinterpret_cast<Row *>(place(1)), reinterpret_cast<Sequence *>(place(2)),
              reinterpret_cast<Slot *>(place(3)), reinterpret_cast<u32 *>(place(4)),
              reinterpret_cast<Output *>(place(5))};
  view_.counts = &state_->counts;
  view_.rows = targets_.rows;
  view_.sequences = targets_.sequences;
  view_.slots = targets_.slots;
  view_.pages = targets_.pages;
  view_.outputs = targets_.outputs;
  view_.extras = reinterpret_cast<const u32 *const *>(&state_->extras);
  view_.sampled = reinterpret_cast<i32 *>(place(6));
  view_.results = reinterpret_cast<OutputResult *>(place(7));
  view_.top_ids = reinterpret_cast<i32 *const *>(&state_->top_ids);
  view_.top_logprobs = reinterpret_cast<float *const *>(&state_->top_logprobs);
  view_.groups = groups_;
  view_.vocabulary = vocabulary_;

  // step_begin reads the first unit of every thread before it knows how many there are.
  const uint64_t sections = std::max<uint64_t>(sizes[1] + sizes[2] + sizes[3] + sizes[4] + sizes[5],
                                               uint64_t(kStepBlocks) * kStepThreads * kStepUnit);
  ending_at_ = kStepHeaderUnits * kStepUnit + sections;
  slot_bytes_ = (ending_at_ + sizeof(StepEnding) + sizes[7] + 255) / 256 * 256;
  TRY(slots_.alloc(*driver_, slot_bytes_ * kStepSlots));
  std::memset(slots_.host(), 0, slots_.bytes());
  TRY(cells_.alloc(*driver_, 64));
  std::memset(cells_.host(), 0, cells_.bytes());
  return APU_OK;
}

uint64_t StepMemory::extras_words(const StepCopy &step, uint32_t vocabulary) {
  uint64_t words = step.ids.size() + step.values.size();
  for (const apu_output &o : step.outputs)
    if (wants_mask(o)) words += mask_words(vocabulary);
  return words;
}

apu_status StepMemory::make_room(uint64_t words) {
  return extras_.alloc(*driver_, padded(std::max<uint64_t>({words * 4, extras_.bytes() * 2, 4096})));
}

apu_status StepMemory::pack(const PlanInfo &info, const StepCopy &step, uint32_t turn) {
  Growing &g = growing_[turn % kStepSlots];
  StepHeader header{};
  header.turn = turn;
  header.counts = {uint32_t(step.rows.size()), uint32_t(step.sequences.size()), uint32_t(step.outputs.size()), 0};

  uint8_t *to = slot_at<uint8_t>(turn, kStepHeaderUnits * kStepUnit);
  static_assert(sizeof(Row) == sizeof(apu_row) && sizeof(Sequence) == sizeof(apu_sequence));
  std::memcpy(to, step.rows.data(), step.rows.size() * sizeof(Row));
  to += padded(step.rows.size() * sizeof(Row));
  std::memcpy(to, step.sequences.data(), step.sequences.size() * sizeof(Sequence));
  to += padded(step.sequences.size() * sizeof(Sequence));
  Slot *slots = reinterpret_cast<Slot *>(to);
  to += padded(step.sequences.size() * groups_ * sizeof(Slot));
  u32 *pages = reinterpret_cast<u32 *>(to);
  for (size_t s = 0; s < step.sequences.size(); ++s) {
    const uint32_t reached = reached_pages(step, step.sequences[s]);
    for (uint32_t i = 0; i < groups_; ++i) {
      const apu_slot &from = step.slots[s * groups_ + i];
      Slot &slot = slots[s * groups_ + i];
      slot = {0, 0, from.read_slot, from.write_slot};
      if (info.groups[i].kind == APU_STATE_FIXED) continue;
      slot.page_begin = header.counts.pages, slot.page_count = reached;
      std::memcpy(pages + slot.page_begin, step.pages.data() + from.page_begin, reached * sizeof(u32));
      header.counts.pages += reached;
    }
  }
  to += padded(header.counts.pages * sizeof(u32));

  const uint64_t words = extras_words(step, vocabulary_);
  uint64_t tops = 0;
  uint32_t wants = 0;
  for (const apu_output &o : step.outputs) {
    wants |= o.want;
    if (o.want & APU_OUT_TOP) tops += o.top_n;
  }
  TRY(g.extras.grow(*driver_, padded(words * 4)));
  TRY(g.top_ids.grow(*driver_, tops * sizeof(i32)));
  TRY(g.top_logprobs.grow(*driver_, tops * sizeof(float)));
  if (wants & APU_OUT_LOGITS) TRY(g.logits.grow(*driver_, step.outputs.size() * uint64_t(vocabulary_) * sizeof(float)));
  if (wants & APU_OUT_HIDDEN) TRY(g.hidden.grow(*driver_, step.outputs.size() * hidden_width_ * sizeof(float)));

  Output *out = reinterpret_cast<Output *>(to);
  u32 *extra = g.extras.host<u32>();
  u32 next = 0, top = 0;
  const auto add = [&](const void *from, uint32_t count) {
    if (!count) return kNone;
    std::memcpy(extra + next, from, count * sizeof(u32));
    next += count;
    return next - count;
  };
  for (const apu_output &o : step.outputs) {
    Output &d = *out++;
    d = {o.row,
         o.want,
         o.temperature,
         o.top_k,
         o.top_p,
         o.min_p,
         o.repeat_penalty,
         o.frequency_penalty,
         o.presence_penalty,
         o.top_n,
         o.seed,
         o.draw,
         o.history_count,
         o.bias_count,
         o.logprob ? 1u : 0u,
         kNone,
         kNone,
         kNone,
         kNone};
    if (o.history_count) {
      d.history_at = add(o.history_ids, o.history_count);
      add(o.history_counts, o.history_count);
    }
    if (o.bias_count) {
      d.bias_at = add(o.bias_ids, o.bias_count);
      add(o.bias_values, o.bias_count);
    }
    if (wants_mask(o)) d.mask_at = add(o.mask, mask_words(vocabulary_));
    if (o.want & APU_OUT_TOP) d.top_at = top, top += o.top_n;
  }
  header.extras_units = uint32_t(padded(words * 4) / kStepUnit);
  header.extras_from = g.extras.device();
  header.extras_to = extras_.address();
  header.top_ids = g.top_ids.device();
  header.top_logprobs = g.top_logprobs.device();
  header.logits = g.logits.device();
  header.hidden = g.hidden.device();
  slot_at<StepEnding>(turn, ending_at_)->turn = turn - 1; // none yet
  *slot_at<StepHeader>(turn, 0) = header;
  return APU_OK;
}

void StepMemory::hand_over(const StepCopy &step, uint32_t turn, bool samples, bool gathers) const {
  const Growing &g = growing_[turn % kStepSlots];
  const OutputResult *result = results(turn);
  uint64_t top = 0;
  for (size_t i = 0; i < step.outputs.size(); ++i) {
    const apu_output &o = step.outputs[i];
    if (gathers && (o.want & APU_OUT_HIDDEN))
      std::memcpy(o.hidden, g.hidden.host<float>() + i * hidden_width_, hidden_width_ * sizeof(float));
    if (!samples) continue;
    if (o.want & APU_OUT_LOGITS)
      std::memcpy(o.logits, g.logits.host<float>() + i * uint64_t(vocabulary_), vocabulary_ * sizeof(float));
    if (o.want & APU_OUT_TOP) {
      if (result[i].status != kOutputNotFinite) {
        std::memcpy(o.top_ids, g.top_ids.host<i32>() + top, o.top_n * sizeof(i32));
        std::memcpy(o.top_logprobs, g.top_logprobs.host<float>() + top, o.top_n * sizeof(float));
      }
      top += o.top_n;
    }
    if ((o.want & APU_OUT_SAMPLE) && result[i].status == kOutputOk) {
      *o.token = result[i].token;
      if (o.logprob) *o.logprob = result[i].logprob;
    }
  }
}

void StepMemory::begin(Launcher &launcher) const {
  launcher.launch(begin_, {kStepBlocks}, kStepThreads,
                  StepBeginArgs{state_, reinterpret_cast<const u8 *>(slots_.device()), slot_bytes_,
                                reinterpret_cast<const u32 *>(cells_.device(8)), targets_, groups_});
}

void StepMemory::end(Launcher &launcher) const {
  launcher.launch(end_, {1}, kStepThreads,
                  StepEndArgs{state_, view_.results, reinterpret_cast<u8 *>(slots_.device(ending_at_)), slot_bytes_,
                              reinterpret_cast<u32 *>(cells_.device(0))});
}

void StepMemory::rows(Launcher &launcher, const float *from, uint32_t width, uint32_t outputs, uint32_t want) const {
  const u64 *to = want == APU_OUT_LOGITS ? &state_->logits : &state_->hidden;
  const uint32_t parts = std::clamp((width + kStepThreads * 4 - 1) / (kStepThreads * 4), 1u, 64u);
  launcher.launch(rows_, {outputs, parts}, kStepThreads, StepRowsArgs{view_, from, to, width, parts, want});
}

void StepMemory::mark(Launcher &launcher, uint32_t value) const {
  launcher.launch(mark_, {1}, 64, StepMarkArgs{reinterpret_cast<u32 *>(cells_.device(4)), value});
}

apu_status StepMemory::set_turn(uint32_t turn) {
  TRY(driver_->copy_to_device(reinterpret_cast<uint64_t>(&state_->turn), &turn, sizeof(turn), stream_));
  return driver_->stream_wait(stream_);
}

} // namespace apu::gpu
