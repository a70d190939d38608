// How a step reaches the device and how its results come back: what step.hip and the host (gpu/step.h) share.
//
// A submission lies in one of kStepSlots slots of pinned host memory: a header, then the sections of StepView one after
// the other, each padded to 16 bytes, then room for results. Slots are taken in turn; which turn it is counts the
// device, so that a captured graph serves every submission without being changed.
#pragma once

#include "common.h"

namespace apu::gpu {

constexpr u32 kStepSlots = 4;
constexpr u32 kStepBlocks = 4; // of step_begin
constexpr u32 kStepThreads = 256;
constexpr u32 kStepUnit = 16;       // bytes that a thread moves
constexpr u32 kStepHeaderUnits = 8; // of a slot, before the sections

struct StepHeader {
  u32 turn;
  u32 extras_units;
  StepCounts counts;
  u64 extras_from; // pinned host memory, as the device addresses it
  u64 extras_to;   // device memory
  u64 top_ids;     // pinned, and so the next three; 0 where nobody asks
  u64 top_logprobs;
  u64 logits; // (O, V)
  u64 hidden; // (O, D)
};
static_assert(sizeof(StepHeader) <= kStepHeaderUnits * kStepUnit);
static_assert(sizeof(Output) % kStepUnit == 0 && sizeof(Row) == kStepUnit && sizeof(Slot) == kStepUnit);

enum StepStatus : u32 { kStepRan = 0, kStepCancelled = 1, kStepLost = 2 };

struct StepEnding { // in a slot, behind the sections' room
  u32 turn;
  u32 status; // StepStatus
  u32 reserved[2];
};

// What step_begin writes and others read through StepView, beside the sections.
struct StepState {
  StepCounts counts;
  u32 turn;   // of the submission that runs, or of the next one
  u32 status; // StepStatus
  u64 extras;
  u64 top_ids;
  u64 top_logprobs;
  u64 logits;
  u64 hidden;
};

// Sections: where units of a slot go.
struct StepTargets {
  Row *rows;
  Sequence *sequences;
  Slot *slots;
  u32 *pages;
  Output *outputs;
};

struct StepBeginArgs {
  StepState *state;
  const u8 *slots; // kStepSlots of slot_bytes each
  u64 slot_bytes;
  const u32 *cancelled; // host: submissions of earlier turns than this do nothing
  StepTargets to;
  u32 groups;
};

struct StepEndArgs {
  StepState *state;
  const OutputResult *results; // (O)
  u8 *endings;                 // of slot 0: a StepEnding, then (O) OutputResult
  u64 slot_bytes;
  u32 *ended; // host: the next turn to end
};

// Rows of the outputs that want them, to pinned host memory.
struct StepRowsArgs {
  StepView step;
  const float *from; // (O, width)
  const u64 *to;     // one address
  u32 width;
  u32 parts; // blocks of a row, in y
  u32 want;  // APU_OUT_LOGITS or APU_OUT_HIDDEN
};

struct StepMarkArgs {
  u32 *at; // host
  u32 value;
};

} // namespace apu::gpu
