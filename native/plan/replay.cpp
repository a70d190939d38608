// Submitting steps and replaying them: the pool's workers walk the slice of ops with a barrier behind each one.
//
// Whether to go on is decided once per barrier, by the last worker to arrive, so that all workers end at the same op;
// inside an op a worker may stop early on its own. Errors of a run belong to its event.
#include "plan/replay.h"

#include "cpu/guard.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace apu {
namespace {

// Multiply-adds per worker and op from which a worker is worth its share of a barrier.
constexpr uint64_t kWorkPerWorker = 16384;

} // namespace

void Submission::reset() {
  stop_ = false;
  failed_.store(0, std::memory_order_relaxed);
  failure_status_ = APU_OK;
  samples = false;
  ropes.clear();
}

bool Submission::stopping() const {
  return failed_.load(std::memory_order_relaxed) || plan_.cancelled.load(std::memory_order_relaxed) >= id;
}

void Submission::fail(uint32_t order, apu_status status, const char *format, ...) {
  std::lock_guard<std::mutex> lock(failure_mutex_);
  if (failure_status_ != APU_OK && failure_order_ <= order) return;
  failure_status_ = status;
  failure_order_ = order;
  va_list args;
  va_start(args, format);
  std::vsnprintf(failure_text_, sizeof(failure_text_), format, args);
  va_end(args);
  failed_.store(1, std::memory_order_release);
}

void Submission::run(cpu::Worker &worker) {
  if (!ropes.empty()) fill_ropes(worker, *this, ropes);
  worker.barrier([this] {
    stop_ = stopping();
    clock_ = plan_.profiling.load(std::memory_order_relaxed) ? cpu::now_ns() : 0;
  });
  for (uint32_t i = first; i < last && !stop_; ++i) {
    plan_.ops[i]->run(worker, *this);
    worker.barrier([this, i] {
      stop_ = stopping();
      if (clock_) {
        uint64_t now = cpu::now_ns();
        plan_.nanoseconds[i] = now - clock_;
        clock_ = now;
      }
    });
  }
}

void Submission::done() {
  apu_event &e = *event;
  if (failure_status_ != APU_OK) {
    e.status = failure_status_;
    std::memcpy(e.text, failure_text_, sizeof(e.text));
  } else if (stop_) {
    e.status = APU_E_CANCELLED;
    std::snprintf(e.text, sizeof(e.text), "the submission was cancelled");
  } else if ((e.status = check_mappings()) != APU_OK) {
    std::memcpy(e.text, error_text(), sizeof(e.text));
  }
  if (samples && e.status != APU_OK) std::fill(plan_.sampled.begin(), plan_.sampled.end(), -1);
  {
    std::lock_guard<std::mutex> lock(plan_.mutex);
    plan_.idle.push_back(this);
    --plan_.pending;
    plan_.changed.notify_all(); // under the lock: afterwards the plan may be gone
  }
  e.ended.store(1, std::memory_order_seq_cst);
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(&e.ended), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
  e.release();
}

} // namespace apu

using namespace apu;

std::unique_lock<std::mutex> apu_plan::wait_idle() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [this] { return pending == 0; });
  return lock;
}

namespace {

// Everything of a submission that does not touch the queue.
apu_status prepare(apu_plan &plan, const apu_step &step, uint32_t first, uint32_t last, Submission &s) {
  if (apu_status status = copy_step(plan.info, plan.previous, step, plan.marks, s.step); status != APU_OK)
    return status;
  s.reset();
  s.kernels = plan.device->kernels;
  s.workspace = &plan.workspace;
  s.sampled = plan.sampled.data();
  s.first = first, s.last = last;
  uint64_t work = 0;
  for (uint32_t i = first; i < last; ++i) {
    work += plan.ops[i]->work(s.step);
    s.samples |= plan.info.ops[i].kind == APU_OP_SAMPLE;
    int32_t rope = plan.op_rope[i];
    if (rope >= 0 && std::find(s.ropes.begin(), s.ropes.end(), uint32_t(rope)) == s.ropes.end())
      s.ropes.push_back(uint32_t(rope));
  }
  if (last > first) work /= last - first;
  work = (work + kWorkPerWorker - 1) / kWorkPerWorker;
  s.workers = uint32_t(std::clamp<uint64_t>(work, 1, plan.device->pool.size()));
  auto event = std::make_unique<apu_event>();
  if (s.samples) {
    plan.previous.sampled.resize(s.step.outputs.size());
    for (size_t i = 0; i < s.step.outputs.size(); ++i)
      plan.previous.sampled[i] = (s.step.outputs[i].want & APU_OUT_SAMPLE) != 0;
  }
  s.event = event.release();
  return APU_OK;
}

} // namespace

apu_status apu_plan_submit(apu_plan *plan, const apu_step *step, uint32_t first, uint32_t last, apu_event **out) {
  if (!plan || !step || !out) return fail(APU_E_INVALID, "apu_plan_submit: plan, step and out must not be NULL");
  *out = nullptr;
  if (first > last || last > plan->ops.size())
    return fail(APU_E_INVALID, "submit: ops %u to %u, but the plan has %zu", first, last, plan->ops.size());
  if (plan->device->pool.forked())
    return fail(APU_E_DEVICE, "submit: this process was forked after the device was opened: open a device of its own");
  if (apu_status s = check_mappings(); s != APU_OK) return s;
  try {
    std::lock_guard<std::mutex> submitting(plan->submit_mutex);
    std::unique_lock<std::mutex> lock(plan->mutex);
    plan->changed.wait(lock, [plan] { return plan->pending < kMaxPending; });
    if (plan->idle.empty()) {
      plan->idle.reserve(plan->submissions.size() + 1); // done() must not allocate
      plan->submissions.push_back(std::make_unique<Submission>(*plan));
      plan->idle.push_back(plan->submissions.back().get());
    }
    Submission &s = *plan->idle.back(); // nobody else takes it: done() only adds, and submitting is one at a time
    plan->idle.pop_back();
    lock.unlock();
    apu_status status;
    try {
      status = prepare(*plan, *step, first, last, s);
    } catch (const std::exception &e) {
      status = fail(APU_E_MEMORY, "submit: out of memory: %s", e.what());
    }
    lock.lock();
    if (status != APU_OK) {
      plan->idle.push_back(&s);
      return status;
    }
    s.id = plan->next_id++;
    plan->rows = step->row_count, plan->outputs = step->output_count;
    ++plan->pending;
    lock.unlock();
    *out = s.event;
    plan->device->pool.post(&s); // may wait for workers, who need the mutex
    return APU_OK;
  } catch (const std::exception &e) {
    return fail(APU_E_MEMORY, "submit: out of memory: %s", e.what());
  }
}

apu_status apu_event_wait(apu_event *event, int64_t timeout_us) {
  if (!event) return fail(APU_E_INVALID, "apu_event_wait: event must not be NULL");
  timespec until;
  if (timeout_us >= 0) {
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t ns = until.tv_nsec + timeout_us % 1000000 * 1000;
    until.tv_sec += timeout_us / 1000000 + ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
  }
  while (event->ended.load(std::memory_order_acquire) == 0) {
    // WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC.
    long r = syscall(SYS_futex, reinterpret_cast<uint32_t *>(&event->ended), FUTEX_WAIT_BITSET_PRIVATE, 0,
                     timeout_us >= 0 ? &until : nullptr, nullptr, FUTEX_BITSET_MATCH_ANY);
    if (r != 0 && errno == ETIMEDOUT && event->ended.load(std::memory_order_acquire) == 0)
      return fail(APU_E_TIMEOUT, "the submission has not ended after %lld us", static_cast<long long>(timeout_us));
  }
  apu_status status = event->status;
  if (status != APU_OK) std::memcpy(error_text(), event->text, kErrorBytes);
  event->release();
  return status;
}

apu_status apu_plan_cancel(apu_plan *plan) {
  if (!plan) return fail(APU_E_INVALID, "apu_plan_cancel: plan must not be NULL");
  std::lock_guard<std::mutex> lock(plan->mutex);
  plan->cancelled.store(plan->next_id - 1, std::memory_order_relaxed);
  return APU_OK;
}

void apu_plan_destroy(apu_plan *plan) {
  if (!plan) return;
  if (!plan->device->pool.forked()) {
    apu_plan_cancel(plan);
    plan->wait_idle();
  }
  delete plan;
}

apu_status apu_plan_read(apu_plan *plan, uint32_t tensor, void *out, uint64_t bytes) {
  if (!plan || !out) return fail(APU_E_INVALID, "apu_plan_read: plan and out must not be NULL");
  if (tensor >= plan->info.tensors.size())
    return fail(APU_E_INVALID, "apu_plan_read: tensor %u, but the plan has %zu", tensor, plan->info.tensors.size());
  const Tensor &t = plan->info.tensors[tensor];
  if (t.is_weight()) return fail(APU_E_INVALID, "apu_plan_read: \"%s\" is a weight, expected scratch", t.name.c_str());
  auto lock = plan->wait_idle();
  uint64_t rows = t.d.rows == APU_ROWS_STEP ? plan->rows : t.d.rows == APU_ROWS_OUTPUT ? plan->outputs : t.rows;
  uint64_t need = rows * t.inner * sizeof(float);
  if (bytes != need)
    return fail(APU_E_INVALID, "apu_plan_read: \"%s\" holds %llu rows of %llu floats: expected %llu bytes, found %llu",
                t.name.c_str(), (unsigned long long)rows, (unsigned long long)t.inner, (unsigned long long)need,
                (unsigned long long)bytes);
  std::memcpy(out, plan->memory + t.d.offset, need);
  return APU_OK;
}

apu_status apu_plan_profile(apu_plan *plan, uint32_t enable, uint64_t *nanoseconds) {
  if (!plan) return fail(APU_E_INVALID, "apu_plan_profile: plan must not be NULL");
  auto lock = plan->wait_idle();
  plan->profiling.store(enable != 0, std::memory_order_relaxed);
  if (nanoseconds) std::copy(plan->nanoseconds.begin(), plan->nanoseconds.end(), nanoseconds);
  return APU_OK;
}
