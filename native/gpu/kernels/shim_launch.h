// Runs kernels on the CPU: blocks one after the other, every thread of a block as a fiber with its own stack, wave
// operations as lockstep exchanges, block_sync as a barrier. Included by shim.h, in the one source of a shared object.
//
// It shows what a GPU hides. A wave runs as far as it can before the next one starts, a lane as far as it can before
// the next lane, in forward or reversed order, so that a missing barrier reads what is not written yet; LDS is poisoned
// before each block; lanes that miss a collective operation, reads outside of buffers and traps end the launch with an
// error that names the kernel and the thread. LDS variables are thread_local: their storage is the object's TLS
// segment.
#pragma once

#include <csetjmp>
#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <link.h>
#include <mutex>
#include <sys/mman.h>
#include <vector>
#if !defined(__x86_64__) && !defined(__aarch64__)
#include <ucontext.h>
#endif

namespace apu::gpu::shim {

constexpr u32 kMaxThreads = 1024;
constexpr u32 kMaxWave = 64;
constexpr u32 kMaxExchange = 512; // bytes a lane gives
constexpr size_t kPage = 4096;
constexpr size_t kStack = 256 * 1024;
constexpr int kPoison = 0xff; // NaN in every float format, -1 in every integer

struct Entry {
  const char *name;
  u32 threads;
  u64 bytes; // of the argument
  void (*call)(const void *argument);
};
extern const Entry entries[]; // ends with a null name; the build appends it to the preprocessed kernels

template <auto function> struct Call;
template <typename Args, void (*function)(Args)> struct Call<function> {
  static constexpr u64 bytes = sizeof(Args);
  static void call(const void *argument) {
    Args args;
    std::memcpy(&args, argument, sizeof args);
    function(args);
  }
};

#if defined(__x86_64__)
using Context = void *; // the stack pointer; registers lie on the stack
extern "C" __attribute__((visibility("hidden"))) void apu_shim_switch(Context *save, Context load);
asm(R"(
.text
.type apu_shim_switch, @function
.hidden apu_shim_switch
.globl apu_shim_switch
apu_shim_switch:
  push %rbp
  push %rbx
  push %r12
  push %r13
  push %r14
  push %r15
  mov %rsp, (%rdi)
  mov %rsi, %rsp
  pop %r15
  pop %r14
  pop %r13
  pop %r12
  pop %rbx
  pop %rbp
  ret
)");
inline void make_context(Context &context, u8 *stack, void (*entry)()) {
  u64 *top = reinterpret_cast<u64 *>(stack + kStack);
  top[-1] = 0;
  top[-2] = reinterpret_cast<u64>(entry);
  context = top - 8; // six registers below the return address
}
inline void switch_context(Context &save, Context &load) {
  apu_shim_switch(&save, load);
}
#elif defined(__aarch64__)
using Context = void *;
extern "C" __attribute__((visibility("hidden"))) void apu_shim_switch(Context *save, Context load);
asm(R"(
.text
.type apu_shim_switch, %function
.hidden apu_shim_switch
.globl apu_shim_switch
apu_shim_switch:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
)");
inline void make_context(Context &context, u8 *stack, void (*entry)()) {
  u64 *top = reinterpret_cast<u64 *>(stack + kStack) - 20;
  std::memset(top, 0, 160);
  top[11] = reinterpret_cast<u64>(entry); // x30
  context = top;
}
inline void switch_context(Context &save, Context &load) {
  apu_shim_switch(&save, load);
}
#else
using Context = ucontext_t;
inline void make_context(Context &context, u8 *stack, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = kStack;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}
inline void switch_context(Context &save, Context &load) {
  swapcontext(&save, &load);
}
#endif

enum class State : u32 { ready, at_wave, at_block, ended };

struct Copy {
  void *to;
  const void *from;
  u32 group;
};

struct Fiber {
  Context context;
  State state;
  const char *operation; // that it waits in
  u32 line;
  const void *given; // to the exchange
  u32 bytes;
  u32 groups;               // of copies, committed
  std::vector<Copy> copies; // under way
};

struct BulkCopy {
  void *to;
  const void *from;
  u32 bytes;
  const void *barrier;
};

struct Run {
  const Entry *entry;
  const void *argument;
  u32 grid[3], block[3];
  u32 thread; // the running fiber
  u32 threads;
  u8 *dynamic_lds, *dynamic_lds_end;
  u8 *static_lds, *static_lds_end;
  bool reverse;
  bool failed;
  Context scheduler;
  std::vector<BulkCopy> bulk; // under way
  Fiber fibers[kMaxThreads];
  alignas(64) u8 exchanged[kMaxThreads * kMaxExchange]; // of each lane, since the wave's last exchange
  char error[1024];
  sigjmp_buf escape;
};

static Run *run;
static u8 *stacks;

__attribute__((format(printf, 1, 2))) inline void set_error(const char *format, ...) {
  if (run->failed) return;
  run->failed = true;
  const int n = std::snprintf(run->error, sizeof run->error, "kernel %s, block (%u, %u, %u): ", run->entry->name,
                              run->block[0], run->block[1], run->block[2]);
  va_list args;
  va_start(args, format);
  std::vsnprintf(run->error + n, sizeof run->error - size_t(n), format, args);
  va_end(args);
}

inline void leave() {
  switch_context(run->fibers[run->thread].context, run->scheduler);
}

[[noreturn]] inline void fail(const char *what) { // of the running thread
  set_error("thread %u: %s", run->thread, what);
  run->fibers[run->thread].state = State::ended;
  leave();
  __builtin_unreachable();
}

inline bool is_lds(const void *p) {
  return (p >= run->dynamic_lds && p < run->dynamic_lds_end) || (p >= run->static_lds && p < run->static_lds_end);
}

// Every lane of the wave gives `bytes` bytes; returns the first lane's place among those of all lanes, kMaxExchange
// apart, valid until this lane's next collective operation.
__attribute__((noinline)) inline const u8 *exchange_bytes(const char *operation, u32 line, const void *given,
                                                          u32 bytes) {
  const u32 thread = run->thread;
  Fiber &fiber = run->fibers[thread];
  fiber.state = State::at_wave;
  fiber.operation = operation;
  fiber.line = line;
  fiber.given = given;
  fiber.bytes = bytes;
  leave();
  return run->exchanged + size_t(thread - thread % kWaveSize) * kMaxExchange;
}

template <typename T> struct Lanes {
  const u8 *first;
  T operator[](u32 lane) const {
    T v;
    std::memcpy(&v, first + size_t(lane % kWaveSize) * kMaxExchange, sizeof v);
    return v;
  }
};
// The primitive behind every wave operation, for matrix tiles too: what each lane of the wave gave.
template <typename T> Lanes<T> exchange(const char *operation, u32 line, const T &given) {
  static_assert(sizeof(T) <= kMaxExchange);
  return {exchange_bytes(operation, line, &given, sizeof given)};
}

__attribute__((noinline)) inline void wait_block(u32 line) {
  Fiber &fiber = run->fibers[run->thread];
  fiber.state = State::at_block;
  fiber.operation = "block_sync";
  fiber.line = line;
  leave();
}

inline void finish_copies(u32 before_group) {
  std::vector<Copy> &copies = run->fibers[run->thread].copies;
  size_t kept = 0;
  for (const Copy &copy : copies) {
    if (copy.group < before_group)
      std::memcpy(copy.to, copy.from, 16);
    else
      copies[kept++] = copy;
  }
  copies.resize(kept);
}

inline void fiber_main() {
  run->entry->call(run->argument);
  finish_copies(~0u);
  run->fibers[run->thread].state = State::ended;
  leave();
  __builtin_trap();
}

inline void describe_divergence(u32 begin, u32 end, const char *scope) {
  char text[400];
  size_t n = 0;
  std::vector<u32> groups; // a thread of each
  for (u32 t = begin; t < end; ++t) {
    const Fiber &f = run->fibers[t];
    bool known = false;
    for (u32 g : groups) {
      const Fiber &other = run->fibers[g];
      known |= f.state == other.state && (f.state == State::ended || f.line == other.line);
    }
    if (known) continue;
    groups.push_back(t);
    u32 count = 0;
    for (u32 i = begin; i < end; ++i) {
      const Fiber &other = run->fibers[i];
      count += f.state == other.state && (f.state == State::ended || f.line == other.line);
    }
    if (n + 80 > sizeof text) break;
    if (f.state == State::ended)
      n += size_t(std::snprintf(text + n, sizeof text - n, "%s%u have ended", n ? ", " : "", count));
    else
      n += size_t(std::snprintf(text + n, sizeof text - n, "%s%u wait in %s (line %u)", n ? ", " : "", count,
                                f.operation, f.line));
  }
  set_error("threads %u to %u diverge in a collective operation of the %s: %s", begin, end - 1, scope, text);
}

inline bool run_wave(u32 begin, u32 end) { // until all lanes wait for the block or have ended
  for (;;) {
    for (u32 i = begin; i < end; ++i) {
      const u32 t = run->reverse ? end - 1 - (i - begin) : i;
      if (run->fibers[t].state != State::ready) continue;
      run->thread = t;
      switch_context(run->scheduler, run->fibers[t].context);
      if (run->failed) return false;
    }
    const Fiber &first = run->fibers[begin];
    for (u32 t = begin; t < end; ++t) {
      const Fiber &f = run->fibers[t];
      if (f.state != first.state || (f.state != State::ended && f.line != first.line))
        return describe_divergence(begin, end, "wave"), false;
    }
    if (first.state != State::at_wave) return true;
    for (u32 t = begin; t < end; ++t) {
      Fiber &f = run->fibers[t];
      if (f.bytes) std::memcpy(run->exchanged + size_t(t) * kMaxExchange, f.given, f.bytes);
      f.state = State::ready;
    }
  }
}

inline bool run_block() {
  for (u32 t = 0; t < run->threads; ++t) {
    Fiber &f = run->fibers[t];
    f.state = State::ready;
    f.groups = 0;
    f.copies.clear();
    make_context(f.context, stacks + size_t(t) * (kStack + kPage) + kPage, fiber_main);
  }
  const u32 waves = run->threads / kWaveSize;
  for (;;) {
    for (u32 i = 0; i < waves; ++i) {
      const u32 wave = run->reverse ? waves - 1 - i : i;
      if (!run_wave(wave * kWaveSize, (wave + 1) * kWaveSize)) return false;
    }
    const State first = run->fibers[0].state;
    for (u32 t = 0; t < run->threads; ++t)
      if (run->fibers[t].state != first) return describe_divergence(0, run->threads, "block"), false;
    if (first == State::ended) return true;
    for (u32 t = 0; t < run->threads; ++t) run->fibers[t].state = State::ready;
  }
}

struct StaticLds {
  void *data;
  size_t bytes;
};
static thread_local u32 lds_anchor; // makes the TLS segment exist

inline StaticLds find_static_lds() {
  asm volatile("" : : "r"(&lds_anchor) : "memory"); // a store that nothing reads would be dropped
  StaticLds lds = {};
  dl_iterate_phdr(
      [](dl_phdr_info *info, size_t, void *out) {
        const u64 here = reinterpret_cast<u64>(&run);
        bool ours = false;
        size_t bytes = 0;
        for (int i = 0; i < info->dlpi_phnum; ++i) {
          const auto &header = info->dlpi_phdr[i];
          const u64 begin = info->dlpi_addr + header.p_vaddr;
          ours |= header.p_type == PT_LOAD && here >= begin && here < begin + header.p_memsz;
          if (header.p_type == PT_TLS) bytes = header.p_memsz;
        }
        if (ours) *static_cast<StaticLds *>(out) = {info->dlpi_tls_data, bytes};
        return int(ours);
      },
      &lds);
  return lds;
}

inline void on_signal(int signal, siginfo_t *info, void *) {
  const char *what = signal == SIGSEGV || signal == SIGBUS ? "memory fault at"
                     : signal == SIGFPE                    ? "division by zero at"
                                                           : "misaligned, out of bounds or undefined operation at";
  const u64 at = reinterpret_cast<u64>(info->si_addr);
  Dl_info object = {};
  const bool code = signal != SIGSEGV && signal != SIGBUS;
  if (code && dladdr(info->si_addr, &object))
    set_error("thread %u: %s +0x%llx of the code", run->thread, what,
              static_cast<unsigned long long>(at - reinterpret_cast<u64>(object.dli_fbase)));
  else
    set_error("thread %u: %s address 0x%llx", run->thread, what, static_cast<unsigned long long>(at));
  siglongjmp(run->escape, 1);
}

// A guard page before each stack, of as many as launches have had threads: a process may have 65,530 mappings in all,
// and tests load dozens of libraries, each with stacks of its own.
inline void allocate_stacks(u32 threads) {
  static u32 guarded = 0;
  if (!run) {
    run = new Run;
    const size_t bytes = kMaxThreads * (kStack + kPage);
    stacks = static_cast<u8 *>(
        mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
  }
  for (; guarded < threads; ++guarded) mprotect(stacks + guarded * (kStack + kPage), kPage, PROT_NONE);
}

// Dynamic LDS ends at an inaccessible page, which is all there is where the launch has none.
struct DynamicLds {
  u8 *map;
  size_t pages; // bytes
  u8 *data;
  explicit DynamicLds(u32 bytes) {
    const size_t rounded = (size_t(bytes) + 15) / 16 * 16;
    pages = (rounded + kPage - 1) / kPage * kPage;
    map = static_cast<u8 *>(mmap(nullptr, pages + kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(map + pages, kPage, PROT_NONE);
    data = map + pages - rounded;
  }
  ~DynamicLds() { munmap(map, pages + kPage); }
};

inline const Entry *find(const char *name) {
  for (const Entry *e = entries; e->name; ++e)
    if (!std::strcmp(e->name, name)) return e;
  return nullptr;
}

constexpr int kSignals[] = {SIGSEGV, SIGBUS, SIGILL, SIGTRAP, SIGFPE};

} // namespace apu::gpu::shim

// The object's interface: 0 where all is well, else 1 and a text.
extern "C" __attribute__((visibility("default"))) int
apu_shim_launch(const char *name, const uint32_t *grid, uint32_t threads, uint32_t lds, const void *argument,
                uint64_t bytes, uint32_t reverse, char *error, uint64_t error_bytes) {
  using namespace apu::gpu::shim;
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  const Entry *entry = find(name);
  if (!entry) return std::snprintf(error, error_bytes, "no kernel %s", name), 1;
  if (threads != entry->threads || bytes != entry->bytes || threads > kMaxThreads) {
    std::snprintf(error, error_bytes, "kernel %s: has %u threads and an argument of %llu bytes, not %u and %llu", name,
                  entry->threads, static_cast<unsigned long long>(entry->bytes), threads,
                  static_cast<unsigned long long>(bytes));
    return 1;
  }
  allocate_stacks(threads);
  const StaticLds static_lds = find_static_lds();
  const DynamicLds dynamic_lds(lds);
  run->entry = entry;
  run->argument = argument;
  run->threads = threads;
  run->reverse = reverse != 0;
  run->failed = false;
  run->dynamic_lds = dynamic_lds.data;
  run->dynamic_lds_end = dynamic_lds.map + dynamic_lds.pages;
  run->static_lds = static_cast<apu::gpu::u8 *>(static_lds.data);
  run->static_lds_end = run->static_lds + static_lds.bytes;
  std::memcpy(run->grid, grid, sizeof run->grid);

  std::vector<apu::gpu::u8> signal_stack(64 * 1024);
  stack_t stack = {}, old_stack = {};
  stack.ss_sp = signal_stack.data();
  stack.ss_size = signal_stack.size();
  sigaltstack(&stack, &old_stack);
  struct sigaction action = {}, old[std::size(kSignals)];
  action.sa_sigaction = on_signal;
  action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &action, &old[i]);
  if (!sigsetjmp(run->escape, 1)) {
    const uint64_t blocks = uint64_t(grid[0]) * grid[1] * grid[2];
    for (uint64_t i = 0; i < blocks && !run->failed; ++i) {
      const uint64_t b = run->reverse ? blocks - 1 - i : i;
      run->block[0] = uint32_t(b % grid[0]);
      run->block[1] = uint32_t(b / grid[0] % grid[1]);
      run->block[2] = uint32_t(b / grid[0] / grid[1]);
      if (run->static_lds) std::memset(run->static_lds, kPoison, static_lds.bytes);
      run->bulk.clear();
      std::memset(run->dynamic_lds, kPoison, size_t(run->dynamic_lds_end - run->dynamic_lds));
      run_block();
    }
  }
  for (size_t i = 0; i < std::size(kSignals); ++i) sigaction(kSignals[i], &old[i], nullptr);
  sigaltstack(&old_stack, nullptr);
  if (run->failed) std::snprintf(error, error_bytes, "%s", run->error);
  return run->failed;
}

// The kernel at `index` of the object; 0 where there is none.
extern "C" __attribute__((visibility("default"))) int apu_shim_kernel(uint32_t index, const char **name,
                                                                      uint32_t *threads, uint64_t *bytes) {
  const apu::gpu::shim::Entry *e = apu::gpu::shim::entries;
  for (uint32_t i = 0; i < index && e->name; ++i) ++e;
  if (!e->name) return 0;
  *name = e->name;
  *threads = e->threads;
  *bytes = e->bytes;
  return 1;
}
