// A stand-in for libamdhip64 that runs kernels on the CPU through the shim, for machines without an AMD GPU.
//
// It is asynchronous as the real one is: each stream has a thread that works through what was enqueued. Device memory
// lies between inaccessible pages, full of poison, and is out of the host's reach while no stream works. Faults are
// arranged by `apu_double_set("key=value ...")` (double.py); each says in its comment where the real runtime was seen
// to do so. Names and numbers are hip_runtime_api.h's, written down here a second time on purpose.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#define HIP_API extern "C" __attribute__((visibility("default")))

namespace hip_double {

enum Error : int {
  hipSuccess = 0,
  hipErrorInvalidValue = 1,
  hipErrorOutOfMemory = 2,
  hipErrorNotInitialized = 3,
  hipErrorInvalidConfiguration = 9,
  hipErrorNoDevice = 100,
  hipErrorInvalidDevice = 101,
  hipErrorInvalidImage = 200,
  hipErrorNoBinaryForGpu = 209,
  hipErrorInvalidHandle = 400,
  hipErrorNotFound = 500,
  hipErrorNotReady = 600,
  hipErrorIllegalAddress = 700,
  hipErrorHostMemoryNotRegistered = 713,
  hipErrorLaunchFailure = 719,
  hipErrorStreamCaptureUnsupported = 900,
  hipErrorStreamCaptureInvalidated = 901,
  hipErrorStreamCaptureUnmatched = 903,
  hipErrorCapturedEvent = 907,
  hipErrorStreamCaptureWrongThread = 908,
  hipErrorUnknown = 999,
};

struct Allocation {
  uint8_t *map = nullptr; // with its guard pages
  size_t map_bytes = 0;
  uint8_t *data = nullptr;
  size_t bytes = 0;
  uint8_t *second = nullptr; // pinned memory seen by the device at another address
  bool pinned = false;
  int device = 0;
};

struct Kernel { // an entry of a shared object that the shim made
  std::string name;
  uint32_t threads = 0;
  uint64_t bytes = 0; // of its argument
  int (*launch)(const char *, const uint32_t *, uint32_t, uint32_t, const void *, uint64_t, uint32_t, char *,
                uint64_t) = nullptr;
};
struct Module {
  std::vector<void *> libraries;
  std::map<std::string, Kernel> kernels;
};

// Host memory that hipHostRegister or hsa_amd_memory_lock gave to the device.
struct Registration {
  size_t bytes = 0;
  uint8_t *device = nullptr; // where the device sees it: the host's address, or inside of `map`
  uint8_t *map = nullptr;
  size_t map_bytes = 0;
  bool locked = false; // by hsa_amd_memory_lock
};

// Pages of host memory of which the kernel driver was told something. It forgets them when they are unmapped, whatever
// the runtime is told before.
struct Range {
  uint8_t *end = nullptr;
  bool coarse = false, accessible = false;
  const char *way = nullptr; // by which it came
};

using Work = std::function<void()>;

// What exists, then totals: in memory that APU_HIP_DOUBLE_COUNTS may name a file for, so that it outlives a process
// that is killed. In the order of LIVE and TOTALS in hip_double.py.
enum Count : uint32_t {
  kAllocations,
  kPinned,
  kStreams,
  kEvents,
  kModules,
  kGraphs,
  kExecs,
  kRegistrations,
  kRangeBytes, // of host memory that the device can reach in place
  kLiveCounts,
  kMostDeviceBytes = kLiveCounts, // allocated at any one time
  kMostPinnedBytes,
  kCopiedBytes,   // to the device
  kPageableBytes, // of them from memory that is not pinned
  kCounts,
};

struct Graph {
  std::vector<Work> nodes;
};

struct Stream {
  std::thread thread;
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<Work> queue;
  bool busy = false, ending = false;
  std::atomic<uint64_t> worked{0}; // nanoseconds, by the device's clock
  // capture
  std::unique_ptr<Graph> capture;
  std::thread::id capturer;
  bool invalidated = false;
};

struct Event {
  std::mutex mutex;
  std::condition_variable changed;
  uint64_t recorded = 0, passed = 0;
  uint64_t time = 0; // nanoseconds, of the last that passed
  bool timing = true, captured = false;
};

struct State {
  std::mutex mutex; // all but the atomics
  std::map<std::string, std::string> faults;
  std::map<uint8_t *, Allocation> allocations;     // by the device's address
  uint64_t allocated = 0, pinned = 0;              // bytes of device memory, of pinned memory
  std::map<uint8_t *, Registration> registrations; // by the host's address
  std::map<uint8_t *, Range> ranges;
  std::multimap<uint8_t *, std::pair<void *, size_t>> copied; // what registering cost in anonymous memory
  std::set<Stream *> streams;
  std::set<std::shared_ptr<Event> *> events;
  std::set<Module *> modules;
  std::set<Graph *> graphs;
  std::set<std::shared_ptr<Graph> *> execs;
  uint32_t working = 0; // streams that work: device memory is open
  uint64_t mallocs = 0, host_mallocs = 0;
  std::atomic<uint64_t> copies{0};
  std::atomic<uint64_t> *counts = nullptr; // kCounts
  std::string error;                       // of the last kernel that failed
  std::mutex launching;                    // the shim's signal handlers belong to one launch at a time
  std::atomic<int> sticky{hipSuccess};
  std::condition_variable faults_changed;
};

State &state();
std::string fault(const char *key); // "" where it is not set
uint64_t fault_number(const char *key, uint64_t otherwise);

// The device of a process whose GPU has faulted answers every call with the same error, in every thread, until the
// process ends: ROCm/rocm-systems#10656 (sticky across 15 calls), and reports of gfx1151 on ROCm 7.15.
#define CHECK_STICKY()                                                                                                 \
  if (const int sticky_error = hip_double::state().sticky.load(); sticky_error) return sticky_error

// While a thread captures in other than relaxed mode, calls that could interfere are refused to it, and the capture
// ends invalid: ROCm 7.0 and later, as CUDA (ROCm/rccl#2022, ROCm/hip#3876).
int refuse_while_capturing();

bool on_device(const void *p, size_t bytes); // within one allocation or registration that the device can reach
bool names_moved_memory(
    const std::vector<uint8_t> &argument);                 // at the host's address, where the device has another one
bool pinned(const void *p, size_t bytes);                  // at the host's address of pinned memory
bool registered(const void *p, size_t bytes, bool device); // at the device's or the host's address
void open_memory();                                        // for the calling stream's thread
void close_memory();
int enqueue(Stream *stream, Work work); // or captures it
void drain_all();                       // waits for every stream
int current_device();                   // of the calling thread
void sticky_fault(int error, const std::string &text);
void hang(const char *key, const std::string &value); // until the fault is arranged otherwise
// A stream's clock runs while it works, by the computer's clock or by what its work says that it takes.
void take(uint64_t ns);
uint64_t read_ns(const void *from, uint64_t bytes); // that plain reads of a range take

// With the state's mutex:
const std::pair<uint8_t *const, Registration> *registration_of(const void *host);
void forget_unmapped(); // host memory of which the mapping has ended
void publish();         // counts what exists

} // namespace hip_double
