// Threads, barriers and the division of work; see pool.h. How many threads there are by default is decided here too:
// physical cores, because two hyper-threads of one core share its load ports, within what the container may use.
#include "cpu/pool.h"

#include <algorithm>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <fcntl.h>
#include <fstream>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <set>
#include <sstream>
#include <sys/syscall.h>
#include <system_error>
#include <unistd.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace apu::cpu {

namespace {

constexpr uint32_t kDefaultSpinUs = 30;

// Crowding: how much running time is weighed at once, and how long until another worker is tried, at first and at most.
constexpr uint64_t kWindowNs = 30'000'000;
constexpr uint64_t kPatienceNs = 250'000'000;
constexpr uint64_t kMostPatienceNs = 4'000'000'000;

void pause_cpu() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

void futex_wait(std::atomic<uint32_t> *word, uint32_t value, uint32_t bits) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), FUTEX_WAIT_BITSET_PRIVATE, value, nullptr, nullptr, bits);
}

void futex_wake(std::atomic<uint32_t> *word, uint32_t bits) {
  syscall(SYS_futex, reinterpret_cast<uint32_t *>(word), FUTEX_WAKE_BITSET_PRIVATE, INT_MAX, nullptr, nullptr, bits);
}

// A worker sleeps under one of 32 bits, so that a job for a few workers does not wake the others.
uint32_t bit_of(uint32_t worker) {
  return 1u << (worker % 32);
}

std::string read_file(const std::string &path) {
  std::ifstream in(path);
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

// CPUs this process may run on, one per physical core.
std::vector<int> core_cpus() {
  // The kernel's mask can be wider than cpu_set_t: grow until it fits.
  for (int cpus = 1024; cpus <= 1 << 16; cpus *= 2) {
    cpu_set_t *set = CPU_ALLOC(cpus);
    size_t bytes = CPU_ALLOC_SIZE(cpus);
    if (sched_getaffinity(0, bytes, set) != 0) {
      bool narrow = errno == EINVAL;
      CPU_FREE(set);
      if (narrow) continue;
      break;
    }
    std::vector<int> out;
    std::set<std::string> cores;
    for (int cpu = 0; cpu < cpus; ++cpu) {
      if (!CPU_ISSET_S(cpu, bytes, set)) continue;
      std::string base = "/sys/devices/system/cpu/cpu" + std::to_string(cpu) + "/topology/";
      std::string core = read_file(base + "physical_package_id") + "/" + read_file(base + "core_id");
      if (core == "/") core = "cpu" + std::to_string(cpu); // no topology: every CPU counts
      if (cores.insert(core).second) out.push_back(cpu);
    }
    CPU_FREE(set);
    return out;
  }
  return {};
}

// The least quota on the way from `path` to the root, in cores; 0 when there is none.
double quota(const std::string &root, std::string path, bool v2) {
  double least = 0;
  for (;;) {
    double limit = 0, period = 0;
    std::string base = root + path;
    if (v2) {
      std::string text = read_file(base + "/cpu.max"); // "200000 100000" or "max 100000"
      if (std::sscanf(text.c_str(), "%lf %lf", &limit, &period) != 2) limit = 0;
    } else {
      limit = std::atof(read_file(base + "/cpu.cfs_quota_us").c_str());
      period = std::atof(read_file(base + "/cpu.cfs_period_us").c_str());
    }
    if (limit > 0 && period > 0 && (least == 0 || limit / period < least)) least = limit / period;
    if (path.empty() || path == "/") return least;
    path.erase(path.rfind('/'));
  }
}

double cgroup_cores() {
  std::istringstream lines(read_file("/proc/self/cgroup"));
  double least = 0;
  for (std::string line; std::getline(lines, line);) { // "0::/path" (v2) or "3:cpu,cpuacct:/path" (v1)
    size_t a = line.find(':'), b = line.find(':', a + 1);
    if (a == std::string::npos || b == std::string::npos) continue;
    std::string controllers = line.substr(a, b - a), path = line.substr(b + 1); // ":cpu,cpuacct"
    controllers[0] = ',';
    controllers += ',';
    double q = 0;
    if (controllers == ",,") {
      q = quota("/sys/fs/cgroup", path, true);
    } else if (controllers.find(",cpu,") != std::string::npos) {
      q = quota("/sys/fs/cgroup/cpu", path, false);
      // Inside a container the path is often the host's, while the mount shows the container's own group at its root.
      if (q == 0) q = quota("/sys/fs/cgroup/cpu", "", false);
    }
    if (q > 0 && (least == 0 || q < least)) least = q;
  }
  return least;
}

} // namespace

uint64_t now_ns() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return uint64_t(t.tv_sec) * 1000000000u + uint64_t(t.tv_nsec);
}

uint32_t available_cores() {
  double cores = double(core_cpus().size());
  double quota = cgroup_cores();
  if (quota > 0) cores = std::min(cores, quota);
  return std::max(1u, uint32_t(cores)); // part of a core would only get every worker throttled
}

std::string processor_name() {
  std::istringstream lines(read_file("/proc/cpuinfo"));
  for (std::string line; std::getline(lines, line);) {
    size_t colon = line.find(": ");
    if (colon != std::string::npos && line.compare(0, 10, "model name") == 0) return line.substr(colon + 2);
  }
  return "cpu";
}

template <typename Ready> bool Pool::spin(Ready ready) const {
  uint64_t start = 0;
  for (uint32_t i = 1;; ++i) {
    if (ready()) return true;
    pause_cpu();
    if (i % 32 == 0) { // the clock costs as much as a look
      uint64_t now = now_ns();
      if (start == 0) start = now;
      if (now - start > spin_ns_) return false;
    }
  }
}

bool Pool::spin_epoch(uint32_t seen) const {
  return spin([&] { return epoch_.load(std::memory_order_acquire) != seen; });
}

void Pool::sleep_epoch(uint32_t seen) {
  // Dekker's order: this increment, then the kernel's look at the epoch; the other side stores the epoch, then looks
  // for sleepers.
  epoch_sleepers_.fetch_add(1, std::memory_order_seq_cst);
  while (epoch_.load(std::memory_order_acquire) == seen) futex_wait(&epoch_, seen, ~0u);
  epoch_sleepers_.fetch_sub(1, std::memory_order_relaxed);
}

void Pool::wake_epoch() {
  futex_wake(&epoch_, ~0u);
}

Pool::Pool(const Options &options) {
  std::vector<int> cpus = core_cpus();
  uint32_t count = options.threads ? options.threads : available_cores();
  spin_ns_ = uint64_t(options.spin_us ? options.spin_us : kDefaultSpinUs) * 1000;
  pid_ = getpid();
  shares_ = std::make_unique<Share[]>(count);
  tids_ = std::make_unique<std::atomic<int>[]>(count);
  threads_.reserve(count);
  crowding_.limit = count;

  // Signals are for the host's threads; faults are synchronous and still reach whoever caused them.
  sigset_t all, before;
  sigfillset(&all);
  for (int fault : {SIGBUS, SIGSEGV, SIGFPE, SIGILL}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  try {
    for (uint32_t i = 0; i < count; ++i) {
      threads_.emplace_back([this, i] { loop(i); });
      std::string name = "apu-" + std::to_string(i);
      pthread_setname_np(threads_.back().native_handle(), name.c_str());
      if (options.pin && !cpus.empty()) {
        int cpu = cpus[i % cpus.size()];
        cpu_set_t *set = CPU_ALLOC(cpu + 1);
        size_t bytes = CPU_ALLOC_SIZE(cpu + 1);
        CPU_ZERO_S(bytes, set);
        CPU_SET_S(cpu, bytes, set);
        pthread_setaffinity_np(threads_.back().native_handle(), bytes, set);
        CPU_FREE(set);
      }
    }
    watch();
  } catch (...) {
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
    stop_.store(true);
    signal(count);
    for (std::thread &t : threads_) t.join();
    throw;
  }
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

Pool::~Pool() {
  for (int fd : crowding_.stat) close(fd);
  if (forked()) { // the threads stayed with the parent
    for (std::thread &t : threads_) t.detach();
    return;
  }
  stop_.store(true, std::memory_order_seq_cst);
  signal(size());
  for (std::thread &t : threads_) t.join();
}

bool Pool::forked() const {
  return getpid() != pid_;
}

void Pool::signal(uint32_t workers) {
  signal_.fetch_add(1, std::memory_order_seq_cst);
  if (sleepers_.load(std::memory_order_seq_cst) == 0) return;
  futex_wake(&signal_, workers >= 32 ? ~0u : (1u << workers) - 1);
}

void Pool::post(Job *job) {
  job->workers = std::clamp(job->workers, 1u, job->elastic ? crowding_.limit.load(std::memory_order_relaxed) : size());
  std::lock_guard<std::mutex> lock(post_mutex_);
  uint64_t n = posted_.load(std::memory_order_relaxed);
  while (n - completed_.load(std::memory_order_acquire) >= kQueue) { // rare: plans bound their own submissions
    timespec t{0, 50000};
    nanosleep(&t, nullptr);
  }
  queue_[n % kQueue].job.store(job, std::memory_order_release);
  queue_[n % kQueue].workers.store(job->workers, std::memory_order_release);
  posted_.store(n + 1, std::memory_order_seq_cst);
  signal(job->workers);
}

void Pool::run(uint32_t workers, const std::function<void(Worker &)> &f) {
  struct Call : Job {
    const std::function<void(Worker &)> &f;
    std::atomic<uint32_t> over{0};
    explicit Call(const std::function<void(Worker &)> &g) : f(g) {}
    void run(Worker &w) override { f(w); }
    void done() override {
      over.store(1, std::memory_order_seq_cst);
      futex_wake(&over, ~0u);
    }
  } call(f);
  call.workers = workers ? workers : size();
  post(&call);
  while (call.over.load(std::memory_order_acquire) == 0) futex_wait(&call.over, 0, ~0u);
}

namespace {

uint64_t waited_ns(int fd) { // "<running> <waiting for a core> <slices>"
  char text[96];
  ssize_t n = pread(fd, text, sizeof(text) - 1, 0);
  text[n > 0 ? n : 0] = 0;
  unsigned long long waited = 0;
  return std::sscanf(text, "%*u %llu", &waited) == 1 ? waited : 0;
}

} // namespace

void Pool::watch() {
  if (size() == 1) return;
  std::vector<int> fds;
  for (uint32_t i = 0; i < size(); ++i) {
    while (tids_[i].load(std::memory_order_acquire) == 0) sched_yield();
    std::string path = "/proc/self/task/" + std::to_string(tids_[i].load()) + "/schedstat";
    int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    if (fd < 0) break;
    fds.push_back(fd);
  }
  if (fds.size() != size()) {
    for (int fd : fds) close(fd);
    return;
  }
  crowding_.waited.assign(size(), 0);
  for (uint32_t i = 0; i < size(); ++i) crowding_.waited[i] = waited_ns(fds[i]);
  crowding_.stat = std::move(fds);
}

void Pool::weigh(uint32_t workers, bool elastic) {
  Crowding &c = crowding_;
  uint32_t limit = c.limit.load(std::memory_order_relaxed);
  if (c.stat.empty() || !elastic || workers < limit) return; // says nothing about the limit
  uint64_t now = now_ns();
  c.busy += now - c.job_start;
  if (c.busy < kWindowNs) return;
  // Workers wait for the slowest at every barrier: what is left of the speed is the product of what each one has.
  double left = 1;
  for (uint32_t i = 0; i < size(); ++i) {
    uint64_t waited = waited_ns(c.stat[i]);
    if (i < workers) left *= 1 - std::min(1.0, double(waited - c.waited[i]) / double(c.busy));
    c.waited[i] = waited;
  }
  c.busy = 0;
  if (limit > 1 && left < 0.95 * (limit - 1) / limit) {
    // A raise that did not last doubles the time until the next one.
    bool again = c.raised_at && now - c.raised_at < 4 * kWindowNs;
    c.patience = again ? std::min(2 * c.patience, kMostPatienceNs) : kPatienceNs;
    c.raise_at = now + c.patience;
    c.limit.store(limit - 1, std::memory_order_relaxed);
  } else if (limit < size() && now >= c.raise_at) {
    c.raised_at = now;
    c.raise_at = now + kPatienceNs;
    c.limit.store(limit + 1, std::memory_order_relaxed);
  }
}

void Pool::loop(uint32_t index) {
  tids_[index].store(int(syscall(SYS_gettid)), std::memory_order_release);
#if defined(__x86_64__)
  _mm_setcsr(0x1f80); // a host that flushes denormals must not change results
#endif
  for (uint64_t next = 0;;) {
    // A job starts when the one before is complete: they may have different workers and share the barrier.
    auto ready = [&] {
      return completed_.load(std::memory_order_acquire) >= next && posted_.load(std::memory_order_acquire) > next;
    };
    if (!spin(ready)) {
      sleepers_.fetch_add(1, std::memory_order_seq_cst);
      for (;;) {
        uint32_t seen = signal_.load(std::memory_order_seq_cst);
        if (ready() || stop_.load(std::memory_order_seq_cst)) break;
        futex_wait(&signal_, seen, bit_of(index));
      }
      sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }
    if (!ready()) return; // stopping, and nothing is left
    // Jobs that completed without this worker did not need it; one that needs it cannot complete, so its entry is
    // not reused. What was read counts only if the job was still open afterwards.
    uint64_t completed = completed_.load(std::memory_order_acquire);
    if (completed > next) {
      next = completed;
      continue;
    }
    Job *job = queue_[next % kQueue].job.load(std::memory_order_acquire);
    uint32_t count = queue_[next % kQueue].workers.load(std::memory_order_acquire);
    if (completed_.load(std::memory_order_acquire) != next) continue;
    ++next;
    if (index >= count) continue;
    Worker worker{*this, index, count};
    shares_[index].value.store(0, std::memory_order_relaxed);
    // No one may look at a share that is not cleared.
    worker.barrier([this] { crowding_.job_start = now_ns(); });
    job->run(worker);
    if (finished_.fetch_add(1, std::memory_order_acq_rel) + 1 == count) {
      finished_.store(0, std::memory_order_relaxed);
      weigh(count, job->elastic);
      job->done(); // the job may be gone now
      completed_.store(next, std::memory_order_seq_cst);
      if (posted_.load(std::memory_order_seq_cst) > next) signal(UINT32_MAX);
    }
  }
}

// ---- Split -------------------------------------------------------------------------------------------------------

namespace {

constexpr uint32_t kUnitBits = 25;
constexpr uint64_t kUnitMask = kMaxUnits;
static_assert(kMaxUnits == (1u << kUnitBits) - 1);
constexpr uint64_t kTagMask = (1u << 14) - 1;

uint64_t pack(uint64_t tag, uint64_t begin, uint64_t end) {
  return tag << (2 * kUnitBits) | begin << kUnitBits | end;
}

} // namespace

Split::Split(Worker &worker, uint32_t units, uint32_t chunk)
    : worker_(worker), units_(units), chunk_(std::max(1u, chunk)) {
  // Every owner touches its share in every split, so a tag in a share is never older than one split: 14 bits do. Zero
  // is what a cleared share holds.
  uint32_t n = ++worker.split;
  tag_ = 1 + n % kTagMask;
  if (tag_ > kTagMask) tag_ = 1;
}

bool Split::claim(uint32_t victim, bool front, uint32_t &begin, uint32_t &end) {
  std::atomic<uint64_t> &share = worker_.pool.shares_[victim].value;
  uint64_t old = share.load(std::memory_order_relaxed);
  for (;;) {
    uint64_t b, e;
    if (old >> (2 * kUnitBits) == tag_) {
      b = old >> kUnitBits & kUnitMask, e = old & kUnitMask;
      if (b >= e) return false;
    } else { // nobody has looked yet: the whole range, also when its owner has not even woken up
      b = uint64_t(units_) * victim / worker_.count, e = uint64_t(units_) * (victim + 1) / worker_.count;
    }
    uint64_t take = std::min<uint64_t>(chunk_, e - b);
    uint64_t left = front ? pack(tag_, b + take, e) : pack(tag_, b, e - take);
    if (share.compare_exchange_weak(old, left, std::memory_order_relaxed)) {
      begin = uint32_t(front ? b : e - take), end = uint32_t(begin + take);
      return take > 0;
    }
  }
}

bool Split::next(uint32_t &begin, uint32_t &end) {
  if (worker_.count == 1) { // no one to share with: the position is kept here
    if (offset_ >= units_) return false;
    begin = offset_, end = offset_ = std::min(units_, offset_ + chunk_);
    return true;
  }
  for (; offset_ < worker_.count; ++offset_) {
    uint32_t victim = (worker_.index + offset_) % worker_.count;
    if (claim(victim, offset_ == 0, begin, end)) return true;
  }
  return false;
}

} // namespace apu::cpu
