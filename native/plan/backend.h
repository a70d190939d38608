// A plan and its events as the contract's calls see them, whatever device runs it.
//
// api.cpp checks the arguments of every call, takes it to the plan's device through these, and turns exceptions into
// statuses; native/cpu/plan.h and native/gpu/plan.h are the two that exist. The order of submissions, and what waits
// for what, is the backend's own.
#pragma once

#include "plan/plan.h"

struct apu_plan {
  apu::PlanInfo info;

  virtual ~apu_plan() = default; // after close()
  virtual uint64_t scratch_bytes() const = 0;
  virtual apu_status submit(const apu_step &step, uint32_t first, uint32_t last, apu_event *&out) = 0;
  virtual void cancel() = 0; // any thread
  virtual void close() = 0;  // cancels and waits for what is pending

  // The rest waits until nothing is pending. Every argument exists; `bytes` is what the caller has room for.
  virtual apu_status read(const apu::Tensor &scratch, void *out, uint64_t bytes) = 0;
  virtual apu_status profile(bool enable, uint64_t *nanoseconds) = 0; // nanoseconds (op_count) or null
  virtual apu_status copy_unit(const apu::Group &group, uint32_t from, uint32_t to) = 0;
  virtual apu_status reset_unit(const apu::Group &group, uint32_t unit) = 0;
  virtual apu_status export_unit(const apu::Group &group, uint32_t unit, uint8_t *out) = 0;
  virtual apu_status import_unit(const apu::Group &group, uint32_t unit, const uint8_t *in) = 0;

protected:
  apu::Previous previous; // of the last submission; whoever submits holds the backend's lock
  apu::PageMarks marks;

  // The copied step, and what the next one may refer to. `samples`: the slice holds APU_OP_SAMPLE.
  apu_status take_step(const apu_step &step, bool samples, apu::StepCopy &out);
  // How many bytes of scratch the last submission's rows hold, compared with what the caller has room for.
  static apu_status check_read(const apu::Tensor &scratch, uint32_t rows, uint32_t outputs, uint64_t bytes);
};

struct apu_event {
  virtual ~apu_event() = default;
  // The submission's status, its text set; frees the event unless it is APU_E_TIMEOUT. timeout_us < 0: for ever.
  virtual apu_status wait(int64_t timeout_us) = 0;
};
