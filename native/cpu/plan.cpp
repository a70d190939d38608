// Submitting steps and replaying them: the pool's workers walk the slice of ops with a barrier behind each one.
//
// Whether to go on is decided once per barrier, by the last worker to arrive, so that all workers end at the same op;
// inside an op a worker may stop early on its own. Errors of a run belong to its event.
#include "cpu/plan.h"

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

namespace apu::cpu {
namespace {

// Multiply-adds per worker and op from which a worker is worth its share of a barrier.
constexpr uint64_t kWorkPerWorker = 16384;

uint8_t *unit_of(const State &s, uint32_t index) {
  return reinterpret_cast<uint8_t *>(s.d.address + index * s.unit_bytes());
}

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

void Submission::run(Worker &worker) {
  if (!ropes.empty()) fill_ropes(worker, *this, ropes);
  worker.barrier([this] {
    stop_ = stopping();
    clock_ = plan_.profiling.load(std::memory_order_relaxed) ? now_ns() : 0;
  });
  for (uint32_t i = first; i < last && !stop_; ++i) {
    plan_.ops[i]->run(worker, *this);
    worker.barrier([this, i] {
      stop_ = stopping();
      if (clock_) {
        uint64_t now = now_ns();
        plan_.nanoseconds[i] = now - clock_;
        clock_ = now;
      }
    });
  }
}

void Submission::done() {
  Ending &e = *event;
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

apu_status Ending::wait(int64_t timeout_us) {
  timespec until;
  if (timeout_us >= 0) {
    clock_gettime(CLOCK_MONOTONIC, &until);
    int64_t ns = until.tv_nsec + timeout_us % 1000000 * 1000;
    until.tv_sec += timeout_us / 1000000 + ns / 1000000000;
    until.tv_nsec = ns % 1000000000;
  }
  while (ended.load(std::memory_order_acquire) == 0) {
    // WAIT_BITSET takes an absolute time of CLOCK_MONOTONIC.
    long r = syscall(SYS_futex, reinterpret_cast<uint32_t *>(&ended), FUTEX_WAIT_BITSET_PRIVATE, 0,
                     timeout_us >= 0 ? &until : nullptr, nullptr, FUTEX_BITSET_MATCH_ANY);
    if (r != 0 && errno == ETIMEDOUT && ended.load(std::memory_order_acquire) == 0)
      return apu::fail(APU_E_TIMEOUT, "the submission has not ended after %lld us", static_cast<long long>(timeout_us));
  }
  apu_status result = status;
  if (result != APU_OK) std::memcpy(error_text(), text, kErrorBytes);
  release();
  return result;
}

std::unique_lock<std::mutex> Plan::wait_idle() {
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [this] { return pending == 0; });
  return lock;
}

// Everything of a submission that does not touch the queue.
apu_status Plan::prepare(const apu_step &step, uint32_t first, uint32_t last, Submission &s) {
  s.reset();
  for (uint32_t i = first; i < last; ++i) s.samples |= info.ops[i].kind == APU_OP_SAMPLE;
  TRY(take_step(step, s.samples, s.step));
  s.kernels = device.kernels;
  s.workspace = &workspace;
  s.sampled = sampled.data();
  s.first = first, s.last = last;
  uint64_t work = 0;
  for (uint32_t i = first; i < last; ++i) {
    work += ops[i]->work(s.step);
    int32_t rope = op_rope[i];
    if (rope >= 0 && std::find(s.ropes.begin(), s.ropes.end(), uint32_t(rope)) == s.ropes.end())
      s.ropes.push_back(uint32_t(rope));
  }
  if (last > first) work /= last - first;
  work = (work + kWorkPerWorker - 1) / kWorkPerWorker;
  s.workers = uint32_t(std::clamp<uint64_t>(work, 1, device.pool.size()));
  s.event = new Ending;
  return APU_OK;
}

apu_status Plan::submit(const apu_step &step, uint32_t first, uint32_t last, apu_event *&out) {
  if (device.pool.forked())
    return fail(APU_E_DEVICE, "submit: this process was forked after the device was opened: open a device of its own");
  std::lock_guard<std::mutex> submitting(submit_mutex);
  std::unique_lock<std::mutex> lock(mutex);
  changed.wait(lock, [this] { return pending < kMaxPending; });
  if (idle.empty()) {
    idle.reserve(submissions.size() + 1); // done() must not allocate
    submissions.push_back(std::make_unique<Submission>(*this));
    idle.push_back(submissions.back().get());
  }
  Submission &s = *idle.back(); // nobody else takes it: done() only adds, and submitting is one at a time
  idle.pop_back();
  lock.unlock();
  apu_status status;
  try {
    status = prepare(step, first, last, s);
  } catch (const std::exception &e) {
    status = fail(APU_E_MEMORY, "submit: out of memory: %s", e.what());
  }
  lock.lock();
  if (status != APU_OK) {
    idle.push_back(&s);
    return status;
  }
  s.id = next_id++;
  rows = step.row_count, outputs = step.output_count;
  ++pending;
  lock.unlock();
  out = s.event;
  device.pool.post(&s); // may wait for workers, who need the mutex
  return APU_OK;
}

void Plan::cancel() {
  std::lock_guard<std::mutex> lock(mutex);
  cancelled.store(next_id - 1, std::memory_order_relaxed);
}

void Plan::close() {
  if (device.pool.forked()) return; // the workers stayed with the parent
  cancel();
  wait_idle();
}

apu_status Plan::read(const Tensor &t, void *out, uint64_t bytes) {
  auto lock = wait_idle();
  TRY(check_read(t, rows, outputs, bytes));
  std::memcpy(out, memory + t.d.offset, bytes);
  return APU_OK;
}

apu_status Plan::profile(bool enable, uint64_t *out) {
  auto lock = wait_idle();
  profiling.store(enable, std::memory_order_relaxed);
  if (out) std::copy(nanoseconds.begin(), nanoseconds.end(), out);
  return APU_OK;
}

apu_status Plan::copy_unit(const Group &group, uint32_t from, uint32_t to) {
  auto lock = wait_idle();
  for (uint32_t i : group.states) {
    const State &s = info.states[i];
    std::memcpy(unit_of(s, to), unit_of(s, from), s.unit_bytes());
  }
  return APU_OK;
}

apu_status Plan::reset_unit(const Group &group, uint32_t unit) {
  auto lock = wait_idle();
  for (uint32_t i : group.states) {
    const State &s = info.states[i];
    std::memset(unit_of(s, unit), 0, s.unit_bytes());
  }
  return APU_OK;
}

apu_status Plan::export_unit(const Group &group, uint32_t unit, uint8_t *out) {
  auto lock = wait_idle();
  for (uint32_t i : group.states) {
    const State &s = info.states[i];
    std::memcpy(out, unit_of(s, unit), s.unit_bytes());
    out += s.unit_bytes();
  }
  return APU_OK;
}

apu_status Plan::import_unit(const Group &group, uint32_t unit, const uint8_t *in) {
  auto lock = wait_idle();
  for (uint32_t i : group.states) {
    const State &s = info.states[i];
    std::memcpy(unit_of(s, unit), in, s.unit_bytes());
    in += s.unit_bytes();
  }
  return APU_OK;
}

} // namespace apu::cpu
