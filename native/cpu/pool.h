// The workers of a CPU device: one set of threads that runs jobs in the order they were posted.
//
// A job is entered by its first `workers` threads at once; inside, they meet at barriers and divide units of work with
// Split. Waiting is a bounded spin (a step has hundreds of barriers a few microseconds apart) and then a futex, so that
// an idle pool costs nothing and a busy neighbour costs its share of a core and no more. Split gives every worker its
// own contiguous range first, which keeps a matrix streaming, and lets whoever is done take from the end of the
// others'.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

namespace apu::cpu {

class Pool;

// What one thread knows while it runs a job.
struct Worker {
  Pool &pool;
  uint32_t index;
  uint32_t count;     // workers of this job
  uint32_t split = 0; // splits so far in this job; the same on all of its workers between barriers

  // All workers of the job meet; `serial` runs on the last to arrive, before anyone leaves.
  template <typename F> void barrier(F serial);
  void barrier() {
    barrier([] {});
  }
};

struct Job {
  uint32_t workers = 0; // how many of the pool's threads take part, at least 1; set by post()
  bool elastic = false; // fewer may take part
  virtual void run(Worker &worker) = 0;
  virtual void done() = 0; // on the last worker to finish; the pool does not touch the job afterwards
  virtual ~Job() = default;
};

class Pool {
public:
  struct Options {
    uint32_t threads = 0; // 0: available_cores()
    bool pin = false;
    uint32_t spin_us = 0; // 0: default
  };

  explicit Pool(const Options &options); // throws std::system_error when a thread cannot be started
  ~Pool();                               // after the last job is done
  Pool(const Pool &) = delete;
  Pool &operator=(const Pool &) = delete;

  uint32_t size() const { return uint32_t(threads_.size()); }
  bool forked() const; // true in a child process, where the threads do not exist

  void post(Job *job);

  // Runs f(Worker &) on `workers` threads (0: all) and waits.
  void run(uint32_t workers, const std::function<void(Worker &)> &f);

private:
  friend struct Worker;
  friend class Split;
  static constexpr uint32_t kQueue = 64;

  struct alignas(128) Share { // what is left of one worker's range: split number, begin, end
    std::atomic<uint64_t> value{0};
  };

  // How many workers elastic jobs get. Time that a worker is ready to run but has no core, as the kernel counts it, is
  // weighed against what one worker less would cost; from time to time one more is tried.
  struct Crowding {
    std::vector<int> stat; // /proc/self/task/*/schedstat of each worker; empty where the kernel does not count
    std::vector<uint64_t> waited;
    uint64_t job_start = 0, busy = 0, raise_at = 0, raised_at = 0, patience = 0; // nanoseconds
    std::atomic<uint32_t> limit{0};
  };

  void watch();
  void weigh(uint32_t workers, bool elastic);
  void loop(uint32_t index);
  void signal(uint32_t workers);
  template <typename Ready> bool spin(Ready ready) const;
  bool spin_epoch(uint32_t seen) const;
  void sleep_epoch(uint32_t seen);
  void wake_epoch();

  uint64_t spin_ns_;
  int pid_;
  std::unique_ptr<Share[]> shares_;
  std::unique_ptr<std::atomic<int>[]> tids_;

  alignas(128) std::atomic<uint32_t> arrived_{0};
  alignas(128) std::atomic<uint32_t> epoch_{0}; // of barriers
  alignas(128) std::atomic<uint32_t> epoch_sleepers_{0};

  alignas(128) std::atomic<uint64_t> posted_{0}; // jobs
  std::atomic<uint64_t> completed_{0};
  std::atomic<uint32_t> signal_{0}; // changes whenever posted_, completed_ or stop_ does
  std::atomic<uint32_t> sleepers_{0};
  std::atomic<bool> stop_{false};
  alignas(128) std::atomic<uint32_t> finished_{0}; // workers that left the current job
  struct Entry {
    std::atomic<Job *> job{nullptr};
    std::atomic<uint32_t> workers{0};
  };
  Entry queue_[kQueue];
  std::mutex post_mutex_;
  Crowding crowding_; // but for the limit, touched by the last worker to finish a job
  std::vector<std::thread> threads_;
};

template <typename F> void Worker::barrier(F serial) {
  if (count == 1) {
    serial();
    return;
  }
  uint32_t seen = pool.epoch_.load(std::memory_order_relaxed);
  if (pool.arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
    serial();
    pool.arrived_.store(0, std::memory_order_relaxed);
    pool.epoch_.store(seen + 1, std::memory_order_seq_cst);
    if (pool.epoch_sleepers_.load(std::memory_order_seq_cst)) pool.wake_epoch();
  } else if (!pool.spin_epoch(seen)) {
    pool.sleep_epoch(seen);
  }
}

// Divides `units` among the job's workers in chunks. All workers construct the same Splits in the same order, with a
// barrier between one and the next. Who gets a unit is up to timing: units must not depend on each other.
//   Split s(worker, units, chunk);
//   for (uint32_t b, e; s.next(b, e);) ...
class Split {
public:
  Split(Worker &worker, uint32_t units, uint32_t chunk);
  bool next(uint32_t &begin, uint32_t &end);

private:
  bool claim(uint32_t victim, bool front, uint32_t &begin, uint32_t &end);

  Worker &worker_;
  uint32_t units_;
  uint32_t chunk_;
  uint64_t tag_;
  uint32_t offset_ = 0; // victim = own index + offset
};

constexpr uint32_t kMaxUnits = (1u << 25) - 1; // of a Split; validate_ops.cpp keeps every op below it

// Physical cores that the affinity mask and the cgroup's CPU quota (v1 and v2) leave this process; at least 1.
uint32_t available_cores();
uint64_t now_ns(); // CLOCK_MONOTONIC
// "AMD Ryzen AI MAX+ 395"; "cpu" where unknown.
std::string processor_name();

} // namespace apu::cpu
