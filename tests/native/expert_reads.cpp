// Counts how often EXPERTS reads each row of its matrices: the op itself, over kernels that compute nothing and note
// which bytes they were given.
//   expert_reads ROWS WORKERS < ids (ROWS x 6 of 32 experts)
// prints, of each half, the matrix rows read: in all, distinct, and the most often that one was read.
#include "cpu/ops.h"

#include <cstdio>
#include <cstdlib>
#include <map>
#include <mutex>

// Two functions of the library that the op asks.
namespace apu::cpu {
bool has_quantized_rows(uint32_t dtype, int32_t) {
  return dtype == APU_Q8_0;
}
const KernelTable *portable_table() {
  return nullptr;
}
} // namespace apu::cpu

namespace {

using namespace apu;
using namespace apu::cpu;

constexpr uint32_t kExperts = 32, kUsed = 6, kD = 512, kF = 768;

std::mutex mutex;
std::map<const uint8_t *, uint32_t> reads; // of matrix rows

void note(const Matrix &w, const ActBlocks &, uint32_t, uint32_t begin, uint32_t end, float *, size_t, void *) {
  std::lock_guard<std::mutex> lock(mutex);
  for (uint32_t row = begin; row < end; ++row) ++reads[w.data + row * w.row_stride];
}
void quantize(const float *, size_t, uint32_t, uint32_t, const ActBlocks &) {}
size_t work_bytes(uint32_t) {
  return 64;
}
void multiply(const float *, const float *, float *, uint32_t) {}

const KernelTable kernels = [] {
  KernelTable table{};
  table.quantize = quantize;
  table.matmul = note;
  table.work_bytes = work_bytes;
  table.silu_mul = multiply;
  return table;
}();

struct Setup final : Builder {
  PlanInfo plan;
  std::vector<std::vector<float>> memory;
  const PlanInfo &info() const override { return plan; }
  const KernelTable &kernels() const override { return ::kernels; }
  const AttentionKernels *attention() const override { return nullptr; }
  float *scratch(int32_t t) override { return t == APU_NONE ? nullptr : memory[size_t(t)].data(); }
  const float *vector(int32_t) override { return nullptr; }
  uint32_t rope(const apu_op &) override { return 0; }

  int32_t add(uint32_t kind, uint32_t dtype, std::vector<uint64_t> shape) {
    Tensor t{};
    t.d.kind = kind, t.d.dtype = dtype, t.d.rows = APU_ROWS_STEP;
    t.d.ndim = uint32_t(shape.size());
    for (size_t i = 0; i < 4; ++i) t.d.shape[i] = i < shape.size() ? shape[i] : 1;
    const bool weight = kind == APU_TENSOR_WEIGHT;
    t.rows = shape[0], t.inner = 1;
    for (size_t i = 1; i < shape.size(); ++i) t.inner *= shape[i];
    if (weight) t.inner = shape.back(), t.rows = shape[0] * shape[1], t.row_bytes = t.inner / 32 * 34;
    memory.emplace_back(weight ? t.rows * t.row_bytes / 4 : t.rows * t.inner);
    if (weight) t.segments = {{reinterpret_cast<uint64_t>(memory.back().data()), 0, t.rows, t.row_bytes, 0}};
    plan.tensors.push_back(t);
    return int32_t(plan.tensors.size() - 1);
  }
};

struct Step final : Run {
  bool stopping() const override { return false; }
  void fail(uint32_t, apu_status, const char *, ...) override { std::abort(); }
};

} // namespace

int main(int, char **argv) {
  const uint32_t rows = uint32_t(std::atoi(argv[1])), workers = uint32_t(std::atoi(argv[2]));
  Setup b;
  b.plan.max_rows = rows;
  const int32_t x = b.add(APU_TENSOR_SCRATCH, APU_F32, {rows, kD}),
                ids = b.add(APU_TENSOR_SCRATCH, APU_I32, {rows, kUsed});
  const int32_t weights = b.add(APU_TENSOR_SCRATCH, APU_F32, {rows, kUsed});
  const int32_t h = b.add(APU_TENSOR_SCRATCH, APU_F32, {rows, kUsed, kF}),
                out = b.add(APU_TENSOR_SCRATCH, APU_F32, {rows, kD});
  const int32_t gate = b.add(APU_TENSOR_WEIGHT, APU_Q8_0, {kExperts, kF, kD});
  const int32_t up = b.add(APU_TENSOR_WEIGHT, APU_Q8_0, {kExperts, kF, kD});
  const int32_t down = b.add(APU_TENSOR_WEIGHT, APU_Q8_0, {kExperts, kD, kF});
  auto *chosen = reinterpret_cast<int32_t *>(b.memory[size_t(ids)].data());
  for (uint32_t i = 0; i < rows * kUsed; ++i)
    if (std::scanf("%d", chosen + i) != 1) return 2;

  const auto op = [](std::vector<int32_t> in, int32_t to, std::vector<int32_t> w, int32_t act) {
    apu_op o{};
    o.kind = APU_OP_EXPERTS;
    for (size_t i = 0; i < std::size(o.in); ++i) o.in[i] = i < in.size() ? in[i] : APU_NONE;
    for (size_t i = 0; i < std::size(o.w); ++i) o.w[i] = i < w.size() ? w[i] : APU_NONE;
    o.out[0] = to, o.i[0] = act, o.i[1] = APU_PRECISION_DEFAULT;
    return o;
  };
  const auto first = make_experts(b, op({x, ids}, h, {APU_NONE, gate, up}, APU_ACT_SILU));
  const auto second = make_experts(b, op({h, ids, weights}, out, {APU_NONE, down}, APU_ACT_NONE));

  Pool pool({workers, false, 0});
  Workspace &ws = b.workspace;
  std::vector<std::vector<uint8_t>> buffers;
  const auto take = [&](size_t bytes) { return buffers.emplace_back(bytes + kAlign).data(); };
  buffers.reserve(8);
  ws.act = take(ws.act_bytes), ws.group = take(ws.group_bytes), ws.workers = take(ws.worker_bytes * workers);
  ws.normed = reinterpret_cast<float *>(take(ws.normed_bytes));
  Step step;
  step.kernels = &kernels;
  step.workspace = &ws;
  step.step.rows.resize(rows);
  for (Op *half : {first.get(), second.get()}) {
    reads.clear();
    pool.run(workers, [&](Worker &worker) { half->run(worker, step); });
    uint64_t all = 0;
    uint32_t most = 0;
    for (const auto &[row, count] : reads) all += count, most = std::max(most, count);
    std::printf("%llu %zu %u\n", (unsigned long long)all, reads.size(), most);
  }
}
