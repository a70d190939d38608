// From a checked description to ops with pointers. The arena is mapped before the ops are made, which
// need its addresses; the workspace after they have said how much they need. Both are committed as they are touched, so
// that a plan for long contexts costs what its steps use.
#include "cpu/plan.h"

#include <cerrno>
#include <cstring>
#include <sys/mman.h>

namespace apu::cpu {
namespace {

class PlanBuilder final : public Builder {
public:
  explicit PlanBuilder(Plan &plan) : plan_(plan), vectors_(plan.info.tensors.size(), nullptr) {}

  const PlanInfo &info() const override { return plan_.info; }
  const KernelTable &kernels() const override { return *plan_.device.kernels; }
  const AttentionKernels *attention() const override { return attention_kernels(plan_.device.isa); }

  float *scratch(int32_t id) override {
    const Tensor *t = plan_.info.tensor(id);
    return t ? reinterpret_cast<float *>(plan_.memory + t->d.offset) : nullptr;
  }

  const float *vector(int32_t id) override {
    const Tensor *t = plan_.info.tensor(id);
    if (!t) return nullptr;
    const float *&out = vectors_[size_t(id)];
    if (out) return out;
    uint64_t address = t->segments[0].address; // one row, so one segment
    if (t->d.dtype == APU_F32 && address % alignof(float) == 0) return out = reinterpret_cast<const float *>(address);
    plan_.vectors.push_back(std::make_unique<float[]>(t->inner));
    kernels().dequantize_row(t->d.dtype, reinterpret_cast<const uint8_t *>(address), uint32_t(t->inner),
                             plan_.vectors.back().get());
    return out = plan_.vectors.back().get();
  }

  uint32_t rope(const apu_op &op) override {
    RopeTable table = make_rope_table(op, vector(op.w[2]));
    auto &all = workspace.ropes;
    for (uint32_t i = 0; i < all.size(); ++i)
      if (all[i].frequency == table.frequency && all[i].magnitude == table.magnitude) return last_rope = i;
    all.push_back(std::move(table));
    return last_rope = uint32_t(all.size() - 1);
  }

  int32_t last_rope = -1; // of the op that is being made

private:
  Plan &plan_;
  std::vector<const float *> vectors_;
};

std::unique_ptr<Op> make_op(Builder &b, const apu_op &op) {
  switch (op.kind) {
  case APU_OP_EMBED: return make_embed(b, op);
  case APU_OP_RMS_NORM: return make_rms_norm(b, op);
  case APU_OP_MATMUL: return make_matmul(b, op);
  case APU_OP_ROPE_STORE: return make_rope_store(b, op);
  case APU_OP_ATTENTION: return make_attention(b, op);
  case APU_OP_GATHER_NORM: return make_gather_norm(b, op);
  case APU_OP_ROUTE: return make_route(b, op);
  case APU_OP_EXPERTS: return make_experts(b, op);
  case APU_OP_LATENT_STORE: return make_latent_store(b, op);
  case APU_OP_HEAD_MATMUL: return make_head_matmul(b, op);
  case APU_OP_LATENT_ATTENTION: return make_attention(b, op);
  case APU_OP_STREAMS_IN: return make_streams_in(b, op);
  case APU_OP_STREAMS_OUT: return make_streams_out(b, op);
  case APU_OP_SHARED_STORE: return make_shared_store(b, op);
  case APU_OP_COMPRESS: return make_compress(b, op);
  case APU_OP_INDEX: return make_index(b, op);
  case APU_OP_SPARSE_ATTENTION: return make_sparse_attention(b, op);
  default: return make_sample(b, op); // describe() knows no other
  }
}

// Experts by token come from the file: none may be past the last.
apu_status check_table(const PlanInfo &info, const apu_op &op) {
  const Tensor *t = op.kind == APU_OP_ROUTE ? info.tensor(op.w[3]) : nullptr;
  if (!t) return APU_OK;
  const uint64_t experts = info.tensor(op.w[1])->rows;
  for (const apu_segment &s : t->segments)
    for (uint64_t r = 0; r < s.row_count; ++r)
      for (uint64_t i = 0; i < t->inner; ++i) {
        int32_t id;
        std::memcpy(&id, reinterpret_cast<const uint8_t *>(s.address + r * s.row_stride) + i * sizeof(id), sizeof(id));
        if (id < 0 || uint64_t(id) >= experts)
          return fail(APU_E_INVALID, "tensor \"%s\": token %llu goes to expert %d, expected 0 to %llu", t->name.c_str(),
                      (unsigned long long)(s.row_begin + r), id, (unsigned long long)(experts - 1));
      }
  return APU_OK;
}

apu_status map_memory(uint64_t bytes, uint8_t *&out, const char *what) {
  void *p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED)
    return fail(APU_E_MEMORY, "plan: cannot allocate %llu bytes of %s: %s", (unsigned long long)bytes, what,
                std::strerror(errno));
  out = static_cast<uint8_t *>(p);
  return APU_OK;
}

apu_status build(Plan &plan) {
  uint64_t arena = std::max<uint64_t>(aligned(plan.info.arena_bytes), 4096);
  if (apu_status s = map_memory(arena, plan.memory, "scratch"); s != APU_OK) return s;
  plan.memory_bytes = arena;
  for (const apu_op &op : plan.info.ops)
    if (apu_status s = check_table(plan.info, op); s != APU_OK) return s;
  PlanBuilder builder(plan);
  for (const apu_op &op : plan.info.ops) {
    builder.last_rope = -1;
    plan.ops.push_back(make_op(builder, op));
    plan.op_rope.push_back(builder.last_rope);
  }
  plan.workspace = std::move(builder.workspace);
  Workspace &ws = plan.workspace;
  constexpr size_t kPage = 4096; // workers' parts share no page and no prefetched line
  auto paged = [](size_t n) { return (n + kPage - 1) / kPage * kPage; };
  ws.worker_bytes = paged(ws.worker_bytes);
  if (ws.ropes.size() * plan.info.max_rows > kMaxUnits)
    return fail(APU_E_INVALID, "plan: %zu different rotary embeddings of %u rows, expected at most %u in all",
                ws.ropes.size(), plan.info.max_rows, kMaxUnits);
  size_t ropes = 0;
  for (const RopeTable &r : ws.ropes)
    ropes += 2 * aligned(size_t(plan.info.max_rows) * r.frequency.size() * sizeof(float));
  size_t total = paged(ws.act_bytes) + paged(ws.normed_bytes) + paged(ws.partial_bytes) + paged(ws.chunk_bytes) +
                 paged(ws.score_bytes) + paged(ws.group_bytes) + paged(ropes) +
                 ws.worker_bytes * plan.device.pool.size();
  if (apu_status s = map_memory(std::max(total, kPage), plan.work_memory, "workspace"); s != APU_OK) return s;
  plan.work_bytes = std::max(total, kPage);
  uint8_t *next = plan.work_memory;
  auto take = [&](size_t n) {
    uint8_t *out = next;
    next += paged(n);
    return out;
  };
  ws.act = take(ws.act_bytes);
  ws.normed = reinterpret_cast<float *>(take(ws.normed_bytes));
  ws.partial = reinterpret_cast<float *>(take(ws.partial_bytes));
  ws.chunk = take(ws.chunk_bytes);
  ws.score = reinterpret_cast<float *>(take(ws.score_bytes));
  ws.group = take(ws.group_bytes);
  Bump bump(take(ropes));
  for (RopeTable &r : ws.ropes) {
    r.cos = bump.take<float>(size_t(plan.info.max_rows) * r.frequency.size());
    r.sin = bump.take<float>(size_t(plan.info.max_rows) * r.frequency.size());
  }
  ws.workers = next;
  plan.sampled.assign(plan.info.max_outputs, -1);
  plan.nanoseconds.assign(plan.info.ops.size(), 0);
  return APU_OK;
}

} // namespace

apu_status Device::create_plan(const apu_plan_desc &desc, apu_plan **out) {
  auto plan = std::make_unique<Plan>(*this);
  TRY(describe(desc, plan->info));
  TRY(build(*plan));
  *out = plan.release();
  return APU_OK;
}

Plan::~Plan() {
  if (memory) munmap(memory, memory_bytes);
  if (work_memory) munmap(work_memory, work_bytes);
}

} // namespace apu::cpu
