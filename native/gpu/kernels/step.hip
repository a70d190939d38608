// Copies a step from pinned host memory to the device before its first op, and the results back behind its last.
//
// step_begin: kStepBlocks blocks move the header's sections 16 bytes a thread; the first unit of each thread is read
// together with the header, whose counts say what it is, so that a decode step costs one round trip to the host's
// memory. A submission that was cancelled meanwhile gets counts of zero, and every kernel behind it ends at once.
// Moves: the step's bytes twice. step_rows: outputs * width * 8 bytes. step_end: 32 bytes for each output.
#include "gpu.h"
#include "step.h"

namespace apu::gpu {
namespace {

// Copies of what one section holds; units are counted from the section's first.
APU_DEVICE bool put(u32 &unit, u32 units, void *to, u32x4 value) {
  if (unit < units) {
    store16(static_cast<u8 *>(to) + u64(unit) * kStepUnit, value);
    return true;
  }
  unit -= units;
  return false;
}

APU_DEVICE u32 units_of(u64 bytes) {
  return u32((bytes + kStepUnit - 1) / kStepUnit);
}

} // namespace

APU_KERNEL(256) void step_begin(StepBeginArgs a) {
  const u32 turn = a.state->turn;
  const u8 *slot = a.slots + u64(turn % kStepSlots) * a.slot_bytes;
  const u8 *sections = slot + kStepHeaderUnits * kStepUnit;
  const StepHeader &header = *reinterpret_cast<const StepHeader *>(slot);
  u32 unit = block_id() * kStepThreads + thread_id();
  const u32 stride = kStepBlocks * kStepThreads;
  u32x4 value = load16(sections + u64(unit) * kStepUnit); // there is always room for the first
  const StepCounts counts = header.counts;
  const u32 rows = counts.rows, sequences = units_of(counts.sequences * u64(sizeof(Sequence))),
            slots = counts.sequences * a.groups, pages = units_of(counts.pages * u64(sizeof(u32))),
            outputs = counts.outputs * u32(sizeof(Output) / kStepUnit);
  const u32 total = rows + sequences + slots + pages + outputs;
  const bool mine = header.turn == turn;
  for (; mine && unit < total; unit += stride) {
    u32 at = unit;
    if (unit >= stride) value = load16(sections + u64(unit) * kStepUnit);
    if (!put(at, rows, a.to.rows, value) && !put(at, sequences, a.to.sequences, value) &&
        !put(at, slots, a.to.slots, value) && !put(at, pages, a.to.pages, value))
      put(at, outputs, a.to.outputs, value);
  }
  const u8 *from = reinterpret_cast<const u8 *>(header.extras_from);
  u8 *extras = global_pointer<u8>(header.extras_to);
  for (u32 i = block_id() * kStepThreads + thread_id(); mine && i < header.extras_units; i += stride)
    store16(extras + u64(i) * kStepUnit, load16(from + u64(i) * kStepUnit));

  if (block_id() != 0 || thread_id() != 0) return;
  StepState &s = *a.state;
  s.status = !mine ? kStepLost : i32(*a.cancelled - turn) > 0 ? kStepCancelled : kStepRan;
  s.counts = s.status == kStepRan ? counts : StepCounts{0, 0, 0, 0};
  s.extras = header.extras_to;
  s.top_ids = header.top_ids;
  s.top_logprobs = header.top_logprobs;
  s.logits = header.logits;
  s.hidden = header.hidden;
}

APU_KERNEL(256) void step_rows(StepRowsArgs a) {
  const u32 output = block_id();
  if (output >= a.step.counts->outputs || !(a.step.outputs[output].want & a.want)) return;
  const float *from = a.from + u64(output) * a.width;
  float *to = reinterpret_cast<float *>(*a.to) + u64(output) * a.width;
  for (u32 i = block_id_y() * kStepThreads + thread_id(); i < a.width; i += a.parts * kStepThreads) to[i] = from[i];
}

APU_KERNEL(256) void step_end(StepEndArgs a) {
  const u32 turn = a.state->turn;
  StepEnding *ending = reinterpret_cast<StepEnding *>(a.endings + u64(turn % kStepSlots) * a.slot_bytes);
  OutputResult *results = reinterpret_cast<OutputResult *>(ending + 1);
  const u32 outputs = a.state->counts.outputs;
  for (u32 i = thread_id(); i < outputs; i += kStepThreads) results[i] = a.results[i];
  device_fence();
  block_sync();
  if (thread_id() != 0) return;
  ending->turn = turn;
  ending->status = a.state->status;
  *a.ended = turn + 1;
  a.state->turn = turn + 1;
}

// Where a submission has got to, for a fault's message.
APU_KERNEL(64) void step_mark(StepMarkArgs a) {
  if (thread_id() == 0) *a.at = a.value;
}

} // namespace apu::gpu
