// From a checked description to a plan on a GPU. Scratch of tensors and step memory are allocated before the ops are
// made, which need their addresses; what ops share comes after they have said how much they need. Weights of one row
// become float32 copies, since every norm kernel reads them; everything else of the weights is read where it lies.
#include "gpu/plan.h"

#include "cpu/kernels.h"
#include "gpu/kernels/route.h"

#include <cstring>

namespace apu::gpu {
namespace {

constexpr uint64_t kBlockBytes = 1 << 20; // of constants
constexpr uint64_t kConstantAlign = 256;

} // namespace

class PlanBuilder final : public Builder {
public:
  explicit PlanBuilder(Plan &plan) : plan_(plan), vectors_(plan.info.tensors.size(), nullptr) {}

  const PlanInfo &info() const override { return plan_.info; }
  const DriverProps &props() const override { return plan_.device.driver_props(); }
  StepView step() const override { return plan_.step_.view(); }

  Kernel kernel(const std::string &name, uint32_t dynamic_lds) override {
    Kernel out;
    keep(plan_.device.kernel(name, dynamic_lds, out));
    return out;
  }

  void reserve(Scratch which, uint64_t bytes) override {
    uint64_t &most = reserved[size_t(which)];
    most = std::max(most, bytes);
  }

  float *scratch(int32_t id) override {
    const Tensor *t = plan_.info.tensor(id);
    return t ? reinterpret_cast<float *>(plan_.arena_.address() + t->d.offset) : nullptr;
  }

  const float *vector(int32_t id) override {
    const Tensor *t = plan_.info.tensor(id);
    if (!t) return nullptr;
    const float *&out = vectors_[size_t(id)];
    if (out || status != APU_OK) return out;
    std::vector<uint8_t> raw;
    std::vector<float> values(t->rows * t->inner);
    Driver &driver = plan_.device.driver();
    for (const apu_segment &s : t->segments) {
      raw.resize((s.row_count - 1) * s.row_stride + t->row_bytes);
      keep(driver.copy_to_host(raw.data(), s.address, raw.size(), plan_.stream_));
      keep(driver.stream_wait(plan_.stream_));
      if (status != APU_OK) return nullptr;
      for (uint64_t row = 0; row < s.row_count; ++row)
        cpu::kernel_table(APU_ISA_PORTABLE)
            ->dequantize_row(t->d.dtype, raw.data() + row * s.row_stride, uint32_t(t->inner),
                             values.data() + (s.row_begin + row) * t->inner);
    }
    return out = static_cast<const float *>(constant(values.data(), values.size() * sizeof(float)));
  }

  Matrix matrix(int32_t id) override {
    const Tensor *t = plan_.info.tensor(id);
    if (!t) return {};
    std::vector<Segment> segments;
    for (const apu_segment &s : t->segments) segments.push_back({s.address, s.row_begin, s.row_count, s.row_stride});
    Matrix m{};
    m.data = reinterpret_cast<const u8 *>(segments[0].address);
    m.row_stride = segments[0].row_stride;
    m.segments = static_cast<const Segment *>(constant(segments.data(), segments.size() * sizeof(Segment)));
    m.segment_count = uint32_t(segments.size());
    m.rows = uint32_t(t->d.ndim == 3 ? t->d.shape[1] : t->rows);
    m.k = uint32_t(t->inner);
    m.type = t->d.dtype;
    return m;
  }

  PagedState paged(int32_t id) override {
    const State &s = plan_.info.states[size_t(id)];
    PagedState out{};
    out.address = reinterpret_cast<u8 *>(s.d.address);
    out.page_bytes = s.d.page_bytes;
    out.head_bytes = s.d.rows_per_page * s.row_bytes;
    out.heads = s.d.heads, out.head_size = s.d.head_size;
    out.dtype = s.d.dtype, out.window = s.d.window, out.group = s.d.group, out.page_rows = s.d.rows_per_page;
    return out;
  }

  const void *constant(const void *data, size_t bytes) override {
    const uint64_t padded = (bytes + kConstantAlign - 1) / kConstantAlign * kConstantAlign;
    if (used_ + padded > host_.size()) {
      upload();
      host_.assign(std::max(padded, kBlockBytes), 0);
      plan_.constants_.emplace_back();
      keep(plan_.constants_.back().alloc(plan_.device.driver(), host_.size()));
      used_ = 0;
    }
    if (status != APU_OK) return nullptr;
    std::memcpy(host_.data() + used_, data, bytes);
    used_ += padded;
    return reinterpret_cast<const void *>(plan_.constants_.back().address() + used_ - padded);
  }

  // The last block of constants to the device.
  void upload() {
    if (used_ == 0 || status != APU_OK) return;
    Driver &driver = plan_.device.driver();
    keep(driver.copy_to_device(plan_.constants_.back().address(), host_.data(), used_, plan_.stream_));
    keep(driver.stream_wait(plan_.stream_));
  }

  // The first failure stays.
  void keep(apu_status result) {
    if (result == APU_OK || status != APU_OK) return;
    status = result;
    text = op < plan_.info.ops.size() ? plan_.label(op) + ": " + error_text() : error_text();
  }

  uint32_t op = 0; // that is being made
  uint64_t reserved[size_t(Scratch::count)] = {};
  apu_status status = APU_OK;
  std::string text;

private:
  Plan &plan_;
  std::vector<const float *> vectors_;
  std::vector<uint8_t> host_; // of the last block of constants
  uint64_t used_ = 0;
};

namespace {

MakeOp maker(uint32_t kind) {
  switch (kind) {
  case APU_OP_EMBED: return make_embed;
  case APU_OP_RMS_NORM: return make_rms_norm;
  case APU_OP_MATMUL: return make_matmul;
  case APU_OP_ROPE_STORE: return make_rope_store;
  case APU_OP_ATTENTION:
  case APU_OP_LATENT_ATTENTION: return make_attention;
  case APU_OP_LATENT_STORE:
  case APU_OP_SHARED_STORE: return make_row_store;
  case APU_OP_COMPRESS: return make_compress;
  case APU_OP_INDEX: return make_index;
  case APU_OP_HEAD_MATMUL: return make_head_matmul;
  case APU_OP_GATHER_NORM: return make_gather_norm;
  case APU_OP_ROUTE: return make_route;
  case APU_OP_EXPERTS: return make_experts;
  case APU_OP_STREAMS_IN: return make_streams_in;
  case APU_OP_STREAMS_OUT: return make_streams_out;
  case APU_OP_SPARSE_ATTENTION: return make_sparse_attention;
  default: return make_sample; // describe() knows no other
  }
}

// What describe() lets pass and no kernel does. Kernels count rows by the step; nothing emits the other kind.
apu_status check_supported(const PlanInfo &info, const std::string &label, const apu_op &op) {
  for (int i = 0; i < 10; ++i)
    if (const Tensor *w = info.tensor(op.w[i]); w && w->d.dtype == APU_F8_E4M3)
      return fail(APU_E_UNSUPPORTED, "%s: w%d \"%s\" is F8_E4M3, which no GPU kernel reads yet; use --device cpu",
                  label.c_str(), i, w->name.c_str());
  if (op.kind == APU_OP_ROUTE && op.i[2] > int32_t(kRouteGroups))
    return fail(APU_E_UNSUPPORTED, "%s: i2 (groups) is %d, GPU kernels have at most %u; use --device cpu",
                label.c_str(), op.i[2], kRouteGroups);
  const Tensor *in = info.tensor(op.in[0]);
  if (in && in->d.rows == APU_ROWS_FIXED)
    return fail(APU_E_UNSUPPORTED, "%s: in0 \"%s\" has a fixed number of rows, expected the step's or its outputs'",
                label.c_str(), in->name.c_str());
  if (in && in->d.rows == APU_ROWS_OUTPUT && (op.kind == APU_OP_EXPERTS || op.kind == APU_OP_ROUTE))
    return fail(APU_E_UNSUPPORTED, "%s: in0 \"%s\" has the outputs' rows, expected the step's", label.c_str(),
                in->name.c_str());
  return APU_OK;
}

bool counts_outputs(const PlanInfo &info, const apu_op &op) {
  for (int i = 0; i < 4; ++i)
    for (int32_t id : {op.in[i], op.out[i]})
      if (const Tensor *t = info.tensor(id); t && t->d.rows == APU_ROWS_OUTPUT) return true;
  return false;
}

} // namespace

apu_status Plan::build(bool graphs) {
  Driver &driver = device.driver();
  TRY(device.use());
  TRY(driver.stream_create(stream_));
  use_graphs_ = graphs;
  uint64_t hidden = 0;
  for (size_t i = 0; i < info.ops.size(); ++i) {
    const apu_op &op = info.ops[i];
    TRY(check_supported(info, label(uint32_t(i)), op));
    of_outputs_.push_back(counts_outputs(info, op));
    if (op.kind != APU_OP_GATHER_NORM) continue;
    gather_ = int32_t(i);
    hidden = info.tensor(op.out[0])->inner;
  }
  TRY(arena_.alloc(driver, std::max<uint64_t>(info.arena_bytes, kConstantAlign)));
  TRY(driver.fill(arena_.address(), 0, arena_.bytes(), stream_));
  TRY(step_.create(device, info, hidden, stream_));

  PlanBuilder builder(*this);
  for (; builder.op < info.ops.size(); ++builder.op) {
    const apu_op &op = info.ops[builder.op];
    ops_.push_back(maker(op.kind)(builder, op));
    if (builder.status != APU_OK) break;
  }
  builder.upload();
  if (builder.status != APU_OK) return fail(builder.status, "%s", builder.text.c_str());

  bytes_ = arena_.bytes() + step_.bytes();
  for (size_t i = 0; i < size_t(Scratch::count); ++i) {
    TRY(shared_[i].alloc(driver, std::max<uint64_t>(builder.reserved[i], kConstantAlign)));
    TRY(driver.fill(shared_[i].address(), 0, shared_[i].bytes(), stream_));
    bytes_ += shared_[i].bytes();
  }
  for (const DeviceBuffer &block : constants_) bytes_ += block.bytes();
  for (Submission &s : submissions_) TRY(driver.event_create(s.done, false));
  sampled_.assign(info.max_outputs, -1);
  nanoseconds_.assign(info.ops.size(), 0);
  return driver.stream_wait(stream_);
}

apu_status Device::create_plan(const apu_plan_desc &desc, apu_plan **out) {
  auto plan = std::make_unique<Plan>(*this);
  TRY(describe(desc, plan->info));
  TRY(plan->build(!(desc.flags & APU_PLAN_NO_GRAPH)));
  *out = plan.release();
  return APU_OK;
}

} // namespace apu::gpu
