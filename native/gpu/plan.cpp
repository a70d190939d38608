// Submitting steps to the stream, noticing their end, and everything else that a plan on a GPU is asked for.
#include "gpu/plan.h"

#include "cpu/guard.h"

#include <cstdio>
#include <cstring>
#include <ctime>

namespace apu::gpu {

// Puts the kernels of ops on a stream, and keeps the first failure.
class StreamLauncher final : public Launcher {
public:
  // `trail` notes every kernel, and a mark behind each says how far the stream has come; null where nobody wants that.
  StreamLauncher(Plan &plan, std::vector<Launched> *trail) : plan_(plan), trail_(trail) {}

  void launch_bytes(const Kernel &kernel, Dim grid, uint32_t threads, uint32_t lds, const void *args,
                    size_t bytes) override {
    if (status_ != APU_OK || grid.x == 0 || grid.y == 0 || grid.z == 0) return;
    status_ = plan_.device.driver().launch(kernel.function, grid, threads, lds, plan_.stream_, args, bytes);
    if (status_ != APU_OK) {
      text_ =
          (op == kOutside ? std::string("step") : plan_.label(op)) + ", kernel " + kernel.name + ": " + error_text();
      return;
    }
    if (!trail_ || marking_) return;
    trail_->push_back({op, kernel.name});
    marking_ = true;
    plan_.step_.mark(*this, ++plan_.marks_);
    marking_ = false;
  }
  uint64_t scratch(Scratch which) const override { return plan_.shared_[size_t(which)].address(); }

  apu_status outcome() const { return status_ == APU_OK ? APU_OK : fail(status_, "%s", text_.c_str()); }

  static constexpr uint32_t kOutside = ~0u; // before the first op, or behind the last
  uint32_t op = kOutside;

private:
  Plan &plan_;
  std::vector<Launched> *trail_;
  bool marking_ = false;
  apu_status status_ = APU_OK;
  std::string text_;
};

namespace {

constexpr uint32_t kLeastContext = 256;

double microseconds(Clock::duration d) {
  return std::chrono::duration<double, std::micro>(d).count();
}

uint32_t power_of_two(uint32_t n, uint32_t most) {
  uint32_t out = 1;
  while (out < n && out < 1u << 31) out *= 2;
  return std::min(out, most);
}

Bucket bucket_of(const PlanInfo &info, const StepCopy &step) {
  Bucket b;
  const uint32_t rows = uint32_t(step.rows.size());
  b.rows = rows <= kMatvecRows ? rows : power_of_two(rows, info.max_rows);
  if (!step.outputs.empty()) b.outputs = power_of_two(uint32_t(step.outputs.size()), info.max_outputs);
  uint32_t context = 0;
  for (const apu_sequence &q : step.sequences)
    context = std::max(context, step.rows[q.row_begin + q.row_count - 1].position + 1);
  b.context = power_of_two(std::max(context, kLeastContext), info.max_positions);
  return b;
}

// What a waiting thread does between two looks at the device: sleeps while the end is far off by what such a step took
// last, then looks without pause, and sleeps in pieces again when that was in vain. How much longer than asked this
// system sleeps is learnt, and taken off.
class Patience {
public:
  void pause(Clock::time_point begun, double expected_us, double most_us = 20000) {
    const double passed = microseconds(Clock::now() - begun);
    const double early = expected_us * 0.9 - 100 - late_us_.load(std::memory_order_relaxed) - passed;
    if (early > 50)
      sleep(std::min(early, most_us));
    else if (passed < expected_us * 1.3 + 300)
      for (int i = 0; i < 8; ++i) relax();
    else
      sleep(std::min({500.0, 20 + passed * 0.02, most_us}));
  }

private:
  static void sleep(double us) {
    const timespec t{0, long(us * 1000)};
    const Clock::time_point start = Clock::now();
    nanosleep(&t, nullptr);
    const double late = microseconds(Clock::now() - start) - us;
    late_us_.store(float(std::clamp(late, late_us_.load(std::memory_order_relaxed) * 0.98, 5000.0)),
                   std::memory_order_relaxed);
  }
  static void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }

  static inline std::atomic<float> late_us_{0}; // the most of late, fading
};

} // namespace

// ---- the end of a submission
// -----------------------------------------------------------------------------------------

apu_status Ending::wait(int64_t timeout_us) {
  const Clock::time_point start = Clock::now();
  Patience patience;
  for (bool first = true;; first = false) {
    Clock::time_point begun;
    double expected = 0, left = 20000;
    {
      std::unique_lock<std::mutex> lock(gate->mutex);
      if (plan) {
        if (first) TRY(plan->enter("apu_event_wait"));
        plan->look();
      }
      if (!plan) {
        const apu_status result = status;
        if (result != APU_OK) std::memcpy(error_text(), text, kErrorBytes);
        lock.unlock();
        delete this;
        return result;
      }
      if (timeout_us >= 0) left = std::min(left, double(timeout_us) - microseconds(Clock::now() - start));
      if (left <= 0) {
        const std::string at = plan->last_seen();
        return fail(APU_E_TIMEOUT, "the submission has not ended after %lld us%s%s", static_cast<long long>(timeout_us),
                    at.empty() ? "" : "; it is at ", at.c_str());
      }
      const Submission &oldest = plan->submissions_[plan->oldest_ % kStepSlots];
      begun = std::max(oldest.begun, plan->last_end_);
      if (oldest.graph) expected = oldest.graph->took_us;
    }
    patience.pause(begun, expected, left);
  }
}

apu_status Plan::enter(const char *call) {
  if (forked())
    return fail(APU_E_DEVICE, "%s: this process was forked after the device was opened: open a device of its own",
                call);
  if (broken_.load(std::memory_order_acquire)) return fail(APU_E_DEVICE, "%s", broken_text_);
  return device.use();
}

std::string Plan::label(uint32_t op) const {
  char text[96];
  const apu_op &o = info.ops[op];
  if (o.layer >= 0)
    std::snprintf(text, sizeof(text), "op %u %s (layer %d)", op, op_name(o.kind), o.layer);
  else
    std::snprintf(text, sizeof(text), "op %u %s", op, op_name(o.kind));
  return text;
}

void Plan::look() {
  while (oldest_ != next_) {
    Submission &s = submissions_[oldest_ % kStepSlots];
    bool ended = false;
    if (device.driver().event_query(s.done, ended) != APU_OK) return break_off(error_text());
    if (!ended) {
      last_busy_ = Clock::now();
      return;
    }
    finish(s, oldest_++);
  }
}

void Plan::finish(Submission &s, uint32_t turn) {
  const Clock::time_point now = Clock::now();
  if (s.graph) { // a late look says no more than that it did not take longer; what is believed must not keep itself up
    const double took = microseconds(now - std::max(s.begun, last_end_));
    const bool exact = microseconds(now - last_busy_) < std::max(60.0, took * 0.05);
    s.graph->took_us = float(exact ? took : std::min(took, s.graph->took_us * 0.8));
  }
  last_end_ = now;
  Ending &e = *s.event;
  const auto end_with = [&e](apu_status status, const char *format, auto... args) {
    e.status = status;
    std::snprintf(e.text, sizeof(e.text), format, args...);
  };
  const StepEnding &ending = step_.ending(turn);
  const bool cancelled = turn - cancelled_from_ < cancelled_before_ - cancelled_from_;
  const OutputResult *results = step_.results(turn);
  if (ending.turn != turn || ending.status == kStepLost) {
    end_with(APU_E_DEVICE, "the device ran another step than the one submitted (turn %u, found %u)", turn, ending.turn);
  } else if (cancelled || ending.status == kStepCancelled) {
    end_with(APU_E_CANCELLED, "the submission was cancelled");
  } else {
    for (uint32_t t = 0; s.draws && t < s.step.rows.size(); ++t) {
      const apu_row &row = s.step.rows[t];
      if (row.token >= 0 || sampled_[size_t(row.previous)] >= 0) continue;
      end_with(APU_E_INVALID, "row %u takes the token of output %d of the step before, which ended without one", t,
               row.previous);
      break;
    }
    for (uint32_t i = 0; s.samples && e.status == APU_OK && i < s.step.outputs.size(); ++i) {
      const apu_output &o = s.step.outputs[i];
      if (!(o.want & (APU_OUT_SAMPLE | APU_OUT_TOP))) continue;
      if (results[i].status == kOutputNotFinite)
        end_with(APU_E_DEVICE,
                 "output %u (row %u): its logits hold NaN or infinity: the weights or the cache are damaged, or the "
                 "model overflows in this precision",
                 i, o.row);
      else if (results[i].status == kOutputNothingAllowed)
        end_with(APU_E_INVALID, "output %u (row %u): every token is excluded by its mask or bias", i, o.row);
    }
    step_.hand_over(s.step, turn, s.samples, s.gathers);
    if (e.status == APU_OK && (e.status = check_mappings()) != APU_OK)
      std::memcpy(e.text, error_text(), sizeof(e.text));
  }
  if (s.samples) {
    for (size_t i = 0; i < s.step.outputs.size(); ++i)
      sampled_[i] = e.status == APU_OK && (s.step.outputs[i].want & APU_OUT_SAMPLE) ? results[i].token : -1;
  }
  for (uint32_t i = s.key.first; s.profiled && i < s.key.last; ++i) {
    float ms = 0;
    if (device.driver().event_elapsed(clocks_[i], clocks_[i + 1], ms) == APU_OK) nanoseconds_[i] = uint64_t(ms * 1e6);
  }
  s.graph.reset();
  s.event = nullptr;
  e.plan = nullptr;
}

std::string Plan::last_seen() const {
  const uint32_t mark = step_.marked();
  for (uint32_t turn = oldest_; turn != next_; ++turn) {
    const Submission &s = submissions_[turn % kStepSlots];
    const uint32_t at = mark - s.first_mark;
    if (at < s.trail.size())
      return (s.trail[at].op == StreamLauncher::kOutside ? std::string("step") : label(s.trail[at].op)) + ", kernel " +
             s.trail[at].kernel;
  }
  return "";
}

void Plan::break_off(const std::string &reason) {
  const Submission &oldest = submissions_[oldest_ % kStepSlots];
  const std::string seen = last_seen();
  if (!seen.empty())
    std::snprintf(broken_text_, sizeof(broken_text_), "%s: %s", seen.c_str(), reason.c_str());
  else
    std::snprintf(broken_text_, sizeof(broken_text_),
                  "%s to %s, in one graph: %s; without graphs (--no-graph) the message names the kernel",
                  label(oldest.key.first).c_str(), label(oldest.key.last - 1).c_str(), reason.c_str());
  broken_.store(true, std::memory_order_release);
  for (; oldest_ != next_; ++oldest_) {
    Submission &s = submissions_[oldest_ % kStepSlots];
    s.event->status = APU_E_DEVICE;
    std::memcpy(s.event->text, broken_text_, sizeof(broken_text_));
    s.event->plan = nullptr;
    s.event = nullptr;
    s.graph.reset();
  }
}

apu_status Plan::wait_until(uint32_t pending) {
  Patience patience;
  for (;;) {
    Clock::time_point begun;
    double expected = 0;
    {
      std::lock_guard<std::mutex> lock(gate_->mutex);
      look();
      if (broken_.load(std::memory_order_relaxed)) return fail(APU_E_DEVICE, "%s", broken_text_);
      if (next_ - oldest_ <= pending) return APU_OK;
      const Submission &oldest = submissions_[oldest_ % kStepSlots];
      begun = std::max(oldest.begun, last_end_);
      if (oldest.graph) expected = oldest.graph->took_us;
    }
    patience.pause(begun, expected);
  }
}

// ---- its beginning
// ---------------------------------------------------------------------------------------------------

apu_status Plan::prepare(Submission &s, const apu_step &step, uint32_t first, uint32_t last) {
  bool embeds = false;
  s.samples = s.gathers = s.draws = false;
  for (uint32_t i = first; i < last; ++i) {
    s.samples |= info.ops[i].kind == APU_OP_SAMPLE;
    s.gathers |= int32_t(i) == gather_;
    embeds |= info.ops[i].kind == APU_OP_EMBED;
  }
  TRY(take_step(step, s.samples, s.step));
  for (const apu_row &row : s.step.rows) s.draws |= embeds && row.token < 0;
  uint32_t wants = 0;
  for (const apu_output &o : s.step.outputs) wants |= o.want;
  s.key = {first, last, bucket_of(info, s.step),
           wants & ((s.samples ? uint32_t(APU_OUT_LOGITS) : 0) | (s.gathers ? uint32_t(APU_OUT_HIDDEN) : 0))};
  s.profiled = profiling_;
  s.trail.clear();
  s.first_mark = marks_;
  const uint64_t extras = StepMemory::extras_words(s.step, info.vocabulary);
  if (!step_.has_room(extras)) {
    TRY(wait_until(0));
    TRY(step_.make_room(extras));
  }
  return step_.pack(info, s.step, next_);
}

void Plan::launch_ops(StreamLauncher &launcher, const GraphKey &key, const std::vector<Event> *clocks) {
  Driver &driver = device.driver();
  step_.begin(launcher);
  if (clocks) driver.event_record((*clocks)[key.first], stream_);
  for (uint32_t i = key.first; i < key.last; ++i) {
    const apu_op &op = info.ops[i];
    launcher.op = i;
    if (i + 1 < key.last && !clocks && ops_[i]->launch_with(*ops_[i + 1], launcher, key.bucket)) {
      ++i;
      continue;
    }
    if (!of_outputs_[i] || key.bucket.outputs) {
      ops_[i]->launch(launcher, key.bucket);
      if (op.kind == APU_OP_SAMPLE && (key.copies & APU_OUT_LOGITS))
        step_.rows(launcher, reinterpret_cast<const float *>(arena_.address() + info.tensor(op.in[0])->d.offset),
                   info.vocabulary, key.bucket.outputs, APU_OUT_LOGITS);
      if (int32_t(i) == gather_ && (key.copies & APU_OUT_HIDDEN))
        step_.rows(launcher, reinterpret_cast<const float *>(arena_.address() + info.tensor(op.out[0])->d.offset),
                   uint32_t(info.tensor(op.out[0])->inner), key.bucket.outputs, APU_OUT_HIDDEN);
    }
    if (clocks) driver.event_record((*clocks)[i + 1], stream_);
  }
  launcher.op = StreamLauncher::kOutside;
  step_.end(launcher);
}

std::shared_ptr<GraphEntry> Plan::graph_of(const GraphKey &key) {
  for (auto it = graphs_.begin(); it != graphs_.end(); ++it)
    if ((*it)->key == key) {
      std::rotate(graphs_.begin(), it, it + 1);
      return graphs_.front();
    }
  Driver &driver = device.driver();
  Graph graph = nullptr;
  apu_status status = driver.capture_begin(stream_);
  if (status == APU_OK) {
    StreamLauncher launcher(*this, nullptr);
    launch_ops(launcher, key, nullptr);
    status = driver.capture_end(stream_, graph);
    if (status == APU_OK && (status = launcher.outcome()) != APU_OK) driver.graph_destroy(graph);
  }
  if (status != APU_OK) {
    std::fprintf(stderr,
                 "apu_engine: device %s: steps cannot be captured as graphs, kernels are launched one by one: %s\n",
                 device.kind(), error_text());
    use_graphs_ = false;
    return nullptr;
  }
  if (graphs_.size() == kMaxGraphs) graphs_.pop_back();
  graphs_.insert(graphs_.begin(), std::make_shared<GraphEntry>(driver, key, graph));
  return graphs_.front();
}

apu_status Plan::enqueue(Submission &s) {
  Driver &driver = device.driver();
  if (use_graphs_ && !s.profiled) s.graph = graph_of(s.key);
  if (s.graph) {
    if (const apu_status status = driver.graph_launch(s.graph->graph, stream_); status != APU_OK) {
      const std::string reason = error_text();
      return fail(status, "the graph of %s to %s: %s", label(s.key.first).c_str(), label(s.key.last - 1).c_str(),
                  reason.c_str());
    }
  } else {
    StreamLauncher launcher(*this, s.profiled ? nullptr : &s.trail);
    launch_ops(launcher, s.key, s.profiled ? &clocks_ : nullptr);
    TRY(launcher.outcome());
  }
  return driver.event_record(s.done, stream_);
}

apu_status Plan::submit(const apu_step &step, uint32_t first, uint32_t last, apu_event *&out) {
  TRY(enter("submit"));
  std::lock_guard<std::mutex> submitting(submit_mutex_);
  TRY(wait_until(profiling_ ? 0 : kStepSlots - 1));
  Submission &s = submissions_[next_ % kStepSlots]; // only submitting moves next_
  TRY(prepare(s, step, first, last));
  auto event = std::make_unique<Ending>(gate_, this);
  s.begun = Clock::now();
  if (const apu_status status = enqueue(s); status != APU_OK) {
    const std::string reason = error_text();
    previous.sampled.clear();
    s.graph.reset();
    // Part of it may run: the device counts turns as the host does again once it is through.
    if (device.driver().stream_wait(stream_) != APU_OK || step_.set_turn(next_) != APU_OK) {
      std::lock_guard<std::mutex> lock(gate_->mutex);
      break_off(reason);
    }
    return fail(status, "%s", reason.c_str());
  }
  rows_ = step.row_count, outputs_ = step.output_count;
  s.event = event.get();
  out = event.release();
  std::lock_guard<std::mutex> lock(gate_->mutex);
  ++next_;
  return APU_OK;
}

void Plan::cancel() {
  if (forked()) return;
  std::lock_guard<std::mutex> lock(gate_->mutex);
  if (int32_t(cancelled_before_ - oldest_) <= 0) cancelled_from_ = step_.ended(); // else some of the last are pending
  cancelled_before_ = next_;
  step_.cancel_before(next_);
}

void Plan::close() {
  if (forked() || device.use() != APU_OK) return;
  std::lock_guard<std::mutex> submitting(submit_mutex_);
  cancel();
  wait_until(0);
}

Plan::~Plan() {
  graphs_.clear();
  if (forked()) return;
  Driver &driver = device.driver();
  for (Submission &s : submissions_)
    if (s.done) driver.event_destroy(s.done);
  for (Event e : clocks_) driver.event_destroy(e);
  if (stream_) driver.stream_destroy(stream_);
}

// ---- between submissions
// -----------------------------------------------------------------------------------------------

apu_status Plan::read(const Tensor &t, void *out, uint64_t bytes) {
  TRY(enter("apu_plan_read"));
  std::lock_guard<std::mutex> submitting(submit_mutex_);
  TRY(wait_until(0));
  TRY(check_read(t, rows_, outputs_, bytes));
  if (bytes) TRY(device.driver().copy_to_host(out, arena_.address() + t.d.offset, bytes, stream_));
  return device.driver().stream_wait(stream_);
}

apu_status Plan::profile(bool enable, uint64_t *out) {
  TRY(enter("apu_plan_profile"));
  std::lock_guard<std::mutex> submitting(submit_mutex_);
  TRY(wait_until(0));
  clocks_.reserve(info.ops.size() + 1);
  while (enable && clocks_.size() < info.ops.size() + 1) {
    Event event;
    TRY(device.driver().event_create(event, true));
    clocks_.push_back(event);
  }
  profiling_ = enable;
  if (out) std::copy(nanoseconds_.begin(), nanoseconds_.end(), out);
  return APU_OK;
}

template <typename Move> apu_status Plan::for_units(const char *call, const Group &group, uint32_t unit, Move move) {
  TRY(enter(call));
  std::lock_guard<std::mutex> submitting(submit_mutex_);
  for (uint32_t i : group.states) {
    const State &s = info.states[i];
    TRY(move(s.d.address + unit * s.unit_bytes(), s.unit_bytes(), s));
  }
  return APU_OK;
}

// Copies and resets take their place on the stream: behind what was submitted, before what will be.
apu_status Plan::copy_unit(const Group &group, uint32_t from, uint32_t to) {
  return for_units("apu_state_copy", group, to, [&](uint64_t at, uint64_t bytes, const State &s) {
    return device.driver().copy_on_device(at, s.d.address + from * bytes, bytes, stream_);
  });
}

apu_status Plan::reset_unit(const Group &group, uint32_t unit) {
  return for_units("apu_state_reset", group, unit, [&](uint64_t at, uint64_t bytes, const State &) {
    return device.driver().fill(at, 0, bytes, stream_);
  });
}

apu_status Plan::export_unit(const Group &group, uint32_t unit, uint8_t *out) {
  TRY(for_units("apu_state_export", group, unit, [&](uint64_t at, uint64_t bytes, const State &) {
    const apu_status status = device.driver().copy_to_host(out, at, bytes, stream_);
    out += bytes;
    return status;
  }));
  return device.driver().stream_wait(stream_);
}

apu_status Plan::import_unit(const Group &group, uint32_t unit, const uint8_t *in) {
  TRY(for_units("apu_state_import", group, unit, [&](uint64_t at, uint64_t bytes, const State &) {
    const apu_status status = device.driver().copy_to_device(at, in, bytes, stream_);
    in += bytes;
    return status;
  }));
  return device.driver().stream_wait(stream_);
}

} // namespace apu::gpu
