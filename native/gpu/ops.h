// What the ops of a plan see on a GPU: how they are made from a checked description, and how they put their kernels on
// the stream. An op is made once; launch() is called while a graph is captured for a bucket of sizes, or for every step
// where graphs are off, and must depend on the bucket alone: everything else is read from the step in device memory.
#pragma once

#include "gpu/device.h"
#include "gpu/kernels/common.h"
#include "plan/plan.h"

#include <memory>

namespace apu::gpu {

// Upper bounds of a step's sizes; a graph is captured for each that occurs.
struct Bucket {
  uint32_t rows = 1;    // 1 to 8 as they are, above them powers of two, at most the plan's maximum
  uint32_t outputs = 0; // 0, 1, 2, 4, ...
  uint32_t context = 0; // tokens of the longest sequence, a power of two from 256 on, at most the plan's maximum
  uint32_t of(const Tensor &t) const {
    return t.d.rows == APU_ROWS_STEP ? rows : t.d.rows == APU_ROWS_OUTPUT ? outputs : uint32_t(t.rows);
  }
};

// Memory that ops of a plan share, one after the other; each is as large as the op that needs most. Zeroed once.
enum class Scratch : uint32_t {
  activations, // quantised rows of one op's input
  normed,      // float rows of it
  partial,     // attention's parts, products split over columns
  experts,     // rows sorted by expert; the gate of a pair of two types
  halves,      // rows of activations for matrix tiles
  scores,      // of a router
  sampler,
  rope,     // cos and sin of the step's positions
  counters, // what blocks count in; every kernel leaves its own at zero
  count
};

class Launcher {
public:
  virtual ~Launcher() = default;
  // `args` is the kernel's one argument. Errors are kept and end the submission; names the op, its layer and the
  // kernel.
  template <typename Args>
  void launch(const Kernel &kernel, Dim grid, uint32_t threads, const Args &args, uint32_t lds = 0) {
    launch_bytes(kernel, grid, threads, lds, &args, sizeof(args));
  }
  virtual void launch_bytes(const Kernel &kernel, Dim grid, uint32_t threads, uint32_t lds, const void *args,
                            size_t bytes) = 0;
  virtual uint64_t scratch(Scratch which) const = 0; // device address
  template <typename T> T *scratch_as(Scratch which) const { return reinterpret_cast<T *>(scratch(which)); }
};

class Op {
public:
  virtual ~Op() = default;
  virtual void launch(Launcher &launcher, const Bucket &bucket) const = 0;
  // This op and the one behind it in one launch, with the bits of two. False, and nothing launched, where that cannot
  // be.
  virtual bool launch_with(const Op & /*next*/, Launcher & /*launcher*/, const Bucket & /*bucket*/) const {
    return false;
  }
};

// What makers draw on. Failures (an unknown kernel, no memory) are kept by the builder and end apu_plan_create.
class Builder {
public:
  virtual ~Builder() = default;
  virtual const PlanInfo &info() const = 0;
  virtual const DriverProps &props() const = 0;
  virtual StepView step() const = 0;
  virtual Kernel kernel(const std::string &name, uint32_t dynamic_lds = 0) = 0;
  virtual void reserve(Scratch which, uint64_t bytes) = 0;
  virtual float *scratch(int32_t tensor) = 0;      // device address of a scratch tensor, null for APU_NONE
  virtual const float *vector(int32_t tensor) = 0; // a weight as float32 in device memory, null for NONE
  virtual Matrix matrix(int32_t tensor) = 0;       // {} for APU_NONE
  virtual PagedState paged(int32_t state) = 0;
  // Device memory that lives as long as the plan, filled from `data`.
  virtual const void *constant(const void *data, size_t bytes) = 0;
};

using MakeOp = std::unique_ptr<Op> (*)(Builder &, const apu_op &);
std::unique_ptr<Op> make_embed(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_rms_norm(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_matmul(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_rope_store(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_attention(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_row_store(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_compress(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_index(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_head_matmul(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_gather_norm(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_sample(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_route(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_experts(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_streams_in(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_streams_out(Builder &builder, const apu_op &op);
std::unique_ptr<Op> make_sparse_attention(Builder &builder, const apu_op &op);

// The parts of a product over prepared rows (ops_matmul.cpp decides by the bucket's rows).
struct ProductSide { // one matrix of a product, with what is done to its result
  Matrix w;
  const float *bias = nullptr; // (N) or null
  float *out = nullptr;        // (T, N)
};
struct Product {
  ProductSide sides[4];
  uint32_t count = 0;
  int32_t activation = APU_ACT_NONE; // sides 0 and 1 are gate and up, out is sides[0].out
  float limit = 0;                   // of gate and up, 0 for none
  const float *residual = nullptr;   // (T, N) added to side 0, may be its out
  float soft_cap = 0;                // of side 0, 0 for none
  int32_t precision = APU_PRECISION_DEFAULT;
  bool output_rows = false; // rows are counted by StepCounts::outputs, not ::rows
};
struct ExpertProduct {
  Matrix w[2];               // gate and up, or one; rows is N of one expert
  const float *bias[2] = {}; // (E, N) of w, or null
  int32_t activation = APU_ACT_NONE;
  float limit = 0;                 // of gate and up, 0 for none
  uint32_t experts = 0;            // E
  uint32_t used = 0;               // k
  const int32_t *ids = nullptr;    // (T, k)
  const float *weights = nullptr;  // (T, k), second half
  const float *residual = nullptr; // (T, N), second half
  float *out = nullptr;            // (T, k, N), or (T, N) in the second half
  int32_t precision = APU_PRECISION_DEFAULT;
  bool second = false; // in0 is (T, k, K), products are weighted and added
};

struct HeadProduct {         // HEAD_MATMUL
  Matrix w;                  // (H, N, K)
  const float *in = nullptr; // (T, H, K + rest)
  float *out = nullptr;      // (T, H, N + rest)
  uint32_t heads = 0, rest = 0;
  bool output_rows = false;
};

// matvec: bucket.rows up to kMatvecRows. gemm: above. Kernels are looked up when these are made.
class ProductKernels {
public:
  virtual ~ProductKernels() = default;
  virtual void launch(Launcher &launcher, const Bucket &bucket, const Activations &in) const = 0;
};
std::unique_ptr<ProductKernels> make_matvec(Builder &builder, const Product &product);
std::unique_ptr<ProductKernels> make_gemm(Builder &builder, const Product &product);
std::unique_ptr<ProductKernels> make_expert_matvec(Builder &builder, const ExpertProduct &product);
std::unique_ptr<ProductKernels> make_expert_gemm(Builder &builder, const ExpertProduct &product);
// Of every type but F32; reads the product's own input.
std::unique_ptr<ProductKernels> make_head_gemm(Builder &builder, const HeadProduct &product);

// Norm and quantisation of an op's input into Scratch::activations and Scratch::normed; in `rows_each` rows for each
// row of the step (k of an expert's second half).
class InputKernels {
public:
  virtual ~InputKernels() = default;
  virtual Activations launch(Launcher &launcher, const Bucket &bucket) const = 0;
};
struct InputDesc {
  const float *in = nullptr;   // (T, K)
  uint64_t in_stride = 0;      // of its rows where it is not K
  const float *norm = nullptr; // (K) or null
  float eps = 0;
  uint32_t k = 0;
  uint32_t max_rows = 0;
  uint32_t rows_each = 1;
  bool floats = false;    // Activations::x is wanted
  bool quantized = false; // q, d, s16 are wanted
  bool fine = false;      // two rows for each: of x, and of what quantising it lost
  bool output_rows = false;
};
std::unique_ptr<InputKernels> make_input(Builder &builder, const InputDesc &desc);

} // namespace apu::gpu
