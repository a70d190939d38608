// A plan on the CPU device, and the submissions that run on it.
//
// Submissions are kept and reused, so that a step allocates nothing once the plan has warmed up; an event is a small
// object of its own, because it may outlive both its submission and the plan.
#pragma once

#include "common.h"
#include "cpu/ops.h"
#include "plan/backend.h"

#include <condition_variable>
#include <mutex>

namespace apu::cpu {

constexpr uint32_t kMaxPending = 8; // submissions of a plan; the next one waits

class Plan;

struct Ending final : apu_event {
  std::atomic<uint32_t> ended{0};  // futex
  std::atomic<uint32_t> owners{2}; // the caller and the submission
  apu_status status = APU_OK;
  char text[kErrorBytes] = "";

  apu_status wait(int64_t timeout_us) override;
  void release() {
    if (owners.fetch_sub(1, std::memory_order_acq_rel) == 1) delete this;
  }
};

class Submission final : public Job, public Run {
public:
  explicit Submission(Plan &plan) : plan_(plan) { elastic = true; }

  void run(Worker &worker) override;
  void done() override;
  bool stopping() const override;
  [[gnu::format(printf, 4, 5)]] void fail(uint32_t order, apu_status status, const char *format, ...) override;

  uint64_t id = 0;
  uint32_t first = 0, last = 0; // ops
  bool samples = false;         // the slice holds APU_OP_SAMPLE
  std::vector<uint32_t> ropes;  // tables that the slice uses
  Ending *event = nullptr;
  void reset();

private:
  Plan &plan_;
  bool stop_ = false; // decided by the last worker at a barrier, so that all of them end at the same op
  uint64_t clock_ = 0;
  std::atomic<uint32_t> failed_{0};
  std::mutex failure_mutex_;
  uint32_t failure_order_ = 0;
  apu_status failure_status_ = APU_OK;
  char failure_text_[kErrorBytes] = "";
};

class Plan final : public apu_plan {
public:
  explicit Plan(Device &owner) : device(owner) {}
  ~Plan() override;

  uint64_t scratch_bytes() const override { return memory_bytes + work_bytes; }
  apu_status submit(const apu_step &step, uint32_t first, uint32_t last, apu_event *&out) override;
  void cancel() override;
  void close() override;
  apu_status read(const Tensor &scratch, void *out, uint64_t bytes) override;
  apu_status profile(bool enable, uint64_t *nanoseconds) override;
  apu_status copy_unit(const Group &group, uint32_t from, uint32_t to) override;
  apu_status reset_unit(const Group &group, uint32_t unit) override;
  apu_status export_unit(const Group &group, uint32_t unit, uint8_t *out) override;
  apu_status import_unit(const Group &group, uint32_t unit, const uint8_t *in) override;

  Device &device;
  std::vector<std::unique_ptr<Op>> ops;
  std::vector<int32_t> op_rope;                  // RopeTable of each op, or -1
  std::vector<std::unique_ptr<float[]>> vectors; // float32 copies of norm weights that cannot be read in place
  Workspace workspace;
  uint8_t *memory = nullptr; // the arena
  uint64_t memory_bytes = 0;
  uint8_t *work_memory = nullptr; // the workspace
  uint64_t work_bytes = 0;
  std::vector<int32_t> sampled; // (max_outputs), written and read by the workers

  // Submitting holds the first for its whole length; the workers take only the second, and briefly.
  std::mutex submit_mutex;
  std::vector<std::unique_ptr<Submission>> submissions;

  std::mutex mutex;
  std::condition_variable changed; // pending
  std::vector<Submission *> idle;
  uint32_t pending = 0;
  uint64_t next_id = 1;
  uint32_t rows = 0, outputs = 0;    // of the last submission
  std::vector<uint64_t> nanoseconds; // (op_count), written by the workers while something is pending
  std::atomic<bool> profiling{false};
  std::atomic<uint64_t> cancelled{0}; // submissions up to this id

private:
  std::unique_lock<std::mutex> wait_idle(); // holds `mutex`: nothing is pending, and nothing can begin
  apu_status prepare(const apu_step &step, uint32_t first, uint32_t last, Submission &s);
};

} // namespace apu::cpu
