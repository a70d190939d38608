// A plan on a GPU, and the submissions that run on its stream.
//
// A submission is one launch of a graph that was captured for its slice of ops and its bucket of sizes, or the same
// kernels one by one where graphs are off; everything that differs from step to step travels through StepMemory. Up to
// kStepSlots submissions are under way. Nobody is told when one ends: whoever waits for an event, or needs its slot,
// looks, and hands the results over in the order of submission.
#pragma once

#include "gpu/step.h"
#include "plan/backend.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <vector>

namespace apu::gpu {

class Plan;
class StreamLauncher;

constexpr uint32_t kMaxGraphs = 64;

using Clock = std::chrono::steady_clock;

// What a plan shares with events that may outlive it.
struct Gate {
  std::mutex mutex;
};

struct Ending final : apu_event {
  Ending(std::shared_ptr<Gate> shared, Plan *owner) : gate(std::move(shared)), plan(owner) {}
  apu_status wait(int64_t timeout_us) override;

  const std::shared_ptr<Gate> gate; // guards the rest
  Plan *plan;                       // null once it has ended
  apu_status status = APU_OK;
  char text[kErrorBytes] = "";
};

struct GraphKey {
  uint32_t first, last; // ops
  Bucket bucket;
  uint32_t copies; // APU_OUT_LOGITS, APU_OUT_HIDDEN where some output wants them
  bool operator==(const GraphKey &o) const {
    return first == o.first && last == o.last && bucket.rows == o.bucket.rows && bucket.outputs == o.bucket.outputs &&
           bucket.context == o.bucket.context && copies == o.copies;
  }
};

// A captured graph. The cache and every submission under way hold one each; the last that lets go destroys it.
struct GraphEntry {
  GraphEntry(Driver &runtime, const GraphKey &bucket, Graph captured)
      : driver(runtime), key(bucket), graph(captured), process(getpid()) {}
  ~GraphEntry() {
    if (process == getpid()) driver.graph_destroy(graph);
  }
  Driver &driver;
  const GraphKey key;
  const Graph graph;
  const pid_t process;
  std::atomic<float> took_us{0}; // its last run
};

struct Launched { // a kernel of a submission without a graph
  uint32_t op;
  const char *kernel;
};

struct Submission {
  StepCopy step;
  GraphKey key{};
  bool samples = false, gathers = false; // the slice holds SAMPLE, GATHER_NORM
  bool draws = false;                    // some row's token is an earlier output's
  bool profiled = false;
  Ending *event = nullptr;
  Event done = nullptr;
  std::shared_ptr<GraphEntry> graph; // null where its kernels were launched one by one
  Clock::time_point begun;
  uint32_t first_mark = 0;
  std::vector<Launched> trail; // of marks from first_mark on
};

class Plan final : public apu_plan {
public:
  explicit Plan(Device &owner) : device(owner), process_(getpid()) {}
  ~Plan() override;
  // From `info` to ops that can be launched (plan_create.cpp).
  apu_status build(bool graphs);

  uint64_t scratch_bytes() const override { return bytes_; }
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

private:
  friend class PlanBuilder;
  friend class StreamLauncher;
  friend struct Ending;

  bool forked() const { return process_ != getpid(); }
  // For every call that reaches the driver: not forked, nothing broken, this thread's device set.
  apu_status enter(const char *call);
  std::string label(uint32_t op) const; // "op 7 MATMUL (layer 1)"

  // These four hold the gate. look() hands over what has ended.
  void look();
  void finish(Submission &s, uint32_t turn);
  void break_off(const std::string &reason); // the device failed: ends all that is pending
  std::string last_seen() const;             // the kernel under way, where kernels are launched one by one; else ""

  apu_status wait_until(uint32_t pending); // at most so many are
  apu_status prepare(Submission &s, const apu_step &step, uint32_t first, uint32_t last);
  apu_status enqueue(Submission &s);
  void launch_ops(StreamLauncher &launcher, const GraphKey &key, const std::vector<Event> *clocks);
  std::shared_ptr<GraphEntry> graph_of(const GraphKey &key);
  // Calls `move` for each state of the group with the unit's address and size.
  template <typename Move> apu_status for_units(const char *call, const Group &group, uint32_t unit, Move move);

  const pid_t process_;
  Stream stream_ = nullptr;
  StepMemory step_;
  DeviceBuffer arena_;
  DeviceBuffer shared_[size_t(Scratch::count)];
  std::vector<DeviceBuffer> constants_;
  uint64_t bytes_ = 0;
  std::vector<std::unique_ptr<Op>> ops_;
  std::vector<uint8_t> of_outputs_; // the op's rows are outputs

  // Submitting holds this for its whole length.
  std::mutex submit_mutex_;
  std::vector<std::shared_ptr<GraphEntry>> graphs_; // the last used first
  bool use_graphs_ = true;
  bool profiling_ = false;
  std::vector<Event> clocks_;         // (op_count + 1), made when profiling begins
  std::vector<uint64_t> nanoseconds_; // (op_count)
  uint32_t rows_ = 0, outputs_ = 0;   // of the last submission
  uint32_t marks_ = 0;                // used so far
  int32_t gather_ = APU_NONE;         // the op whose rows are apu_output.hidden

  std::shared_ptr<Gate> gate_ = std::make_shared<Gate>();
  Submission submissions_[kStepSlots];
  uint32_t oldest_ = 0, next_ = 0;                     // turns: pending are [oldest_, next_)
  uint32_t cancelled_from_ = 0, cancelled_before_ = 0; // turns
  std::vector<int32_t> sampled_;                       // (max_outputs) as handed over
  Clock::time_point last_end_, last_busy_;             // when a submission was seen to have ended, not to have ended
  std::atomic<bool> broken_{false};
  char broken_text_[kErrorBytes] = "";
};

} // namespace apu::gpu
