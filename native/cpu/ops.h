// What the ops of a plan see while one submission is replayed on the CPU, and how they are made.
//
// An op is an object with its operands resolved to pointers. run() is entered by all workers of the job; it ends where
// its last unit of work is done, and the replay puts a barrier behind it. Whatever a run needs beyond the arena comes
// from the plan's workspace: one part shared by the workers, one part for each, sized when the plan is created.
// No result may depend on which worker computed it, how many there are, or which other rows the step holds.
#pragma once

#include "cpu/attention_kernels.h"
#include "cpu/device.h"
#include "plan/plan.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <span>

struct apu_plan;

namespace apu::cpu {

constexpr size_t kAlign = 64;

inline size_t aligned(size_t bytes) {
  return (bytes + kAlign - 1) / kAlign * kAlign;
}

// Quantised activations of `rows` rows of k elements, laid out one array after the other.
struct ActLayout {
  uint32_t blocks;
  explicit ActLayout(uint32_t k) : blocks((k + 255) / 256 * 8) {}
  size_t bytes(size_t rows) const {
    return aligned(rows * blocks * 32) + 3 * aligned(rows * blocks * 8) + aligned(rows * blocks * 4);
  }
  size_t panel_bytes(size_t rows) const { return rows / kPanelRows * blocks * kPanelBlockBytes; }
  ActBlocks at(uint8_t *base, size_t rows) const { // without panels
    ActBlocks a;
    a.blocks = blocks;
    a.q = reinterpret_cast<int8_t *>(base);
    a.d = reinterpret_cast<float *>(base += aligned(rows * blocks * 32));
    a.s16 = reinterpret_cast<float *>(base += aligned(rows * blocks * 8));
    a.sum16 = reinterpret_cast<int32_t *>(base += aligned(rows * blocks * 8));
    a.s = reinterpret_cast<float *>(base += aligned(rows * blocks * 8));
    return a;
  }
};

// Hands out pieces of a worker's workspace.
class Bump {
public:
  explicit Bump(uint8_t *base) : next_(base) {}
  uint8_t *bytes(size_t n) {
    uint8_t *out = next_;
    next_ += aligned(n);
    return out;
  }
  template <typename T> T *take(size_t n) { return reinterpret_cast<T *>(bytes(n * sizeof(T))); }

private:
  uint8_t *next_;
};

// cos and sin of one rotary embedding: angle of pair i = position * frequency[i], times magnitude. Filled once per step
// for all ops that share it.
struct RopeTable {
  std::vector<double> frequency; // (pairs)
  double magnitude = 1;
  float *cos = nullptr; // (T, pairs), in the workspace
  float *sin = nullptr;
};

// Sizes that the ops ask for while they are made, and then the memory.
struct Workspace {
  size_t act_bytes = 0;     // shared: quantised input of one matmul
  size_t normed_bytes = 0;  // shared: its float input
  size_t partial_bytes = 0; // shared: attention over split contexts
  size_t chunk_bytes = 0;   // shared: the sampler's survey of the logits
  size_t score_bytes = 0;   // shared: a router's scores
  size_t group_bytes = 0;   // shared: rows by expert
  size_t worker_bytes = 0;  // each
  std::vector<RopeTable> ropes;

  uint8_t *act = nullptr;
  float *normed = nullptr;
  float *partial = nullptr;
  uint8_t *chunk = nullptr;
  float *score = nullptr;
  uint8_t *group = nullptr;
  uint8_t *workers = nullptr;
};

// One submission as its ops see it.
class Run {
public:
  virtual ~Run() = default;
  StepCopy step;
  const KernelTable *kernels = nullptr;
  Workspace *workspace = nullptr;
  int32_t *sampled = nullptr; // (max_outputs) tokens of the last APU_OP_SAMPLE, -1 where there is none

  uint32_t rows(const Tensor &t) const {
    return t.d.rows == APU_ROWS_STEP     ? uint32_t(step.rows.size())
           : t.d.rows == APU_ROWS_OUTPUT ? uint32_t(step.outputs.size())
                                         : uint32_t(t.rows);
  }
  int32_t token(const apu_row &row) const { return row.token >= 0 ? row.token : sampled[row.previous]; } // -1: none
  Bump scratch(const Worker &w) const { return Bump(workspace->workers + size_t(w.index) * workspace->worker_bytes); }

  // True once the submission was cancelled or failed: long loops end early. Workers may see it at different times.
  virtual bool stopping() const = 0;
  // Ends the submission with a message; of several failures the one with the lowest `order` is kept.
  [[gnu::format(printf, 4, 5)]] virtual void fail(uint32_t order, apu_status status, const char *format, ...) = 0;
};

class Op {
public:
  virtual ~Op() = default;
  virtual void run(Worker &worker, Run &run) = 0;
  // Rough work on a step, in multiply-adds: how many workers are worth waking.
  virtual uint64_t work(const StepCopy &step) const = 0;
};

// What the makers below draw on; see create.cpp.
class Builder {
public:
  virtual ~Builder() = default;
  virtual const PlanInfo &info() const = 0;
  virtual const KernelTable &kernels() const = 0;
  virtual const AttentionKernels *attention() const = 0;
  virtual float *scratch(int32_t tensor) = 0;      // null for APU_NONE
  virtual const float *vector(int32_t tensor) = 0; // as float32: in place, or a copy when it is neither aligned nor F32
  virtual uint32_t rope(const apu_op &op) = 0;     // index of its RopeTable
  Workspace workspace;
};

std::unique_ptr<Op> make_embed(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_rms_norm(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_matmul(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_rope_store(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_attention(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_gather_norm(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_sample(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_route(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_experts(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_latent_store(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_head_matmul(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_streams_in(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_streams_out(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_shared_store(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_compress(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_index(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_sparse_attention(Builder &builder, const apu_op &op);

// Frequencies of a ROPE_STORE op; factors (pairs) or null.
RopeTable make_rope_table(const apu_op &op, const float *factors);
// Fills the tables for the step's rows; all workers, no barrier at the end.
void fill_ropes(Worker &worker, Run &run, std::span<const uint32_t> tables);

} // namespace apu::cpu
