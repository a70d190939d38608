// The host's side of the matvec kernels. Matrices of one kind share a launch (query, key and value; gate and up); a
// product of several kinds is as many launches.
//
// The geometry changes no bit of a result (kernels/matvec_args.h), so it is free to follow the device: enough waves to
// fill it, and beyond that as many rows for each wave as amortise the reading of its activations.
#include "gpu/matvec.h"

#include "gpu/kernels/activation_kinds.h"
#include "gpu/kernels/matvec_args.h"
#include "gpu/ops.h"
#include "quant/visit.h"

#include <algorithm>
#include <bit>
#include <string>
#include <vector>

namespace apu::gpu {

static_assert(uint32_t(kActNone) == APU_ACT_NONE && uint32_t(kActSilu) == APU_ACT_SILU &&
              uint32_t(kActGeluTanh) == APU_ACT_GELU_TANH && uint32_t(kActGeluErf) == APU_ACT_GELU_ERF &&
              uint32_t(kActSwigluOai) == APU_ACT_SWIGLU_OAI);

namespace {

constexpr uint32_t kMostSteps = 6; // where they let all blocks run at once
constexpr uint32_t kManySteps = 4, kFewSteps = 2;
constexpr uint32_t kStepBytes = 4 << 10; // of a step: enough that few are worth a block
constexpr uint32_t kManyUnits = 64;      // compute units of a device that one round of blocks nearly fills

const char *tuned_name(uint32_t type) {
  switch (type) {
  case APU_F32: return "f32";
  case APU_F16: return "f16";
  case APU_BF16: return "bf16";
  case APU_Q4_0: return "q4_0";
  case APU_Q4_1: return "q4_1";
  case APU_Q5_0: return "q5_0";
  case APU_Q5_1: return "q5_1";
  case APU_Q8_0: return "q8_0";
  case APU_Q2_K: return "q2_k";
  case APU_Q3_K: return "q3_k";
  case APU_Q4_K: return "q4_k";
  case APU_Q5_K: return "q5_k";
  case APU_Q6_K: return "q6_k";
  case APU_IQ2_XXS: return "iq2_xxs";
  case APU_IQ4_NL: return "iq4_nl";
  case APU_IQ4_XS: return "iq4_xs";
  case APU_MXFP4: return "mxfp4";
  default: return nullptr;
  }
}

bool is_float(uint32_t type) {
  return type == APU_F32 || type == APU_F16 || type == APU_BF16;
}

// Types whose kernels hold a set in registers on every device.
bool is_held(uint32_t type) {
  switch (type) {
  case APU_Q4_0:
  case APU_Q4_1:
  case APU_Q5_0:
  case APU_Q5_1:
  case APU_Q8_0:
  case APU_Q4_K:
  case APU_Q5_K: return true;
  default: return false;
  }
}

// Waves of a compute unit that registers and LDS let run at once: more rows of activations take more registers.
uint32_t waves_of_unit(const MatvecKind &kind, const DriverProps &props, uint32_t lds, uint32_t r) {
  const uint32_t bulk = (r == 1 ? 8 : 6) - matvec_few(kind.elements, kind.bytes);
  const uint32_t held = kMatvecWaves * (r == 2 ? 4 : matvec_held_blocks(kind.elements, kind.bytes));
  const uint32_t registers = r > 2 ? (r == 4 ? 12 : 8) : kind.held ? held : kMatvecWaves * bulk;
  uint32_t waves = std::min(props.threads_of_unit / props.wave_size, registers);
  if (lds) waves = std::min(waves, props.lds_of_unit / lds * kMatvecWaves);
  return std::max(waves, kMatvecWaves);
}

} // namespace

MatvecKind matvec_kind(const DriverProps &props, uint32_t type, int32_t precision) {
  const char *name = tuned_name(type);
  if (is_float(type)) return {name, kFloatSet, 0, 0, true, kFloatItemColumns};
  if (precision == APU_PRECISION_EXACT) return {"exact", kMatvecSet, 0, 0, true, kItemColumns};
  if (!name) return {"any", kMatvecSet, 0, 0, false, kItemColumns};
  MatvecKind kind{name, kMatvecSet, 0, 0, false, kItemColumns};
  quant::with_block_type(type, [&]<class B>() {
    kind.elements = quant::Traits<B>::elements;
    kind.bytes = quant::Traits<B>::bytes;
  });
  kind.held = is_held(type);
  kind.set = matvec_set(props.bulk_copies, kind.elements, kind.bytes);
  return kind;
}

uint32_t matvec_image_bytes(const MatvecKind &kind, const DriverProps &props) {
  if (!kind.bytes) return 0;
  const uint32_t slice = kItemColumns * props.wave_size / kind.elements * kind.bytes;
  return kMatvecWaves * kind.set * (slice + kRowImageExtra);
}

MatvecGeometry matvec_geometry(const MatvecKind &kind, const DriverProps &props, uint32_t k, uint64_t rows, uint32_t r,
                               bool pair) {
  const uint32_t columns = kind.columns * props.wave_size, set = kind.set;
  const uint32_t images = matvec_image_bytes(kind, props);
  MatvecGeometry g{};
  g.slices = (k + columns - 1) / columns;
  g.threads = kMatvecWaves * props.wave_size;
  auto sums = [&](uint32_t splits, uint32_t steps) {
    return uint32_t(sizeof(float)) * g.slices * r * set * steps * kMatvecWaves / splits;
  };
  const uint64_t sets = (rows * (pair ? 2 : 1) + set - 1) / set;
  // A row's slices side by side, which ends soonest. Then steps: as many as it takes for all blocks to run at once,
  // else few, since blocks that follow each other spread more evenly; on few units many, which read the activations
  // less.
  g.splits = g.steps = 1;
  while (g.splits < kMatvecWaves && g.splits < g.slices) g.splits *= 2;
  const uint64_t resident = uint64_t(props.compute_units) * waves_of_unit(kind, props, images + sums(1, 1), r);
  const uint64_t rounds = (sets * g.splits + resident - 1) / resident; // of blocks of one step
  if (kind.bytes) {
    const bool large = set * kItemColumns * props.wave_size / kind.elements * kind.bytes >= kStepBytes;
    const uint32_t some = large && props.compute_units >= kManyUnits ? kFewSteps : kManySteps;
    g.steps = rounds <= kMostSteps ? uint32_t(std::max<uint64_t>(rounds, 1)) : some;
  }
  while (g.steps > 1 && sums(g.splits, g.steps) > kMatvecSumBytes) --g.steps;
  g.block_rows = set * g.steps * kMatvecWaves / g.splits / (pair ? 2 : 1);
  g.lds = images + sums(g.splits, g.steps);
  return g;
}

uint32_t matvec_rows(uint32_t rows, uint32_t terms) {
  uint32_t r = terms;
  while (r < kMatvecRows && r < rows * terms) r *= 2;
  return r;
}

namespace {

class Matvec final : public ProductKernels {
public:
  Matvec(Builder &builder, const Product &product) : props_(builder.props()), output_rows_(product.output_rows) {
    const uint32_t max_rows =
        std::min(kMatvecRows, product.output_rows ? builder.info().max_outputs : builder.info().max_rows);
    std::vector<uint32_t> left;
    for (uint32_t m = 0; m < product.count; ++m) left.push_back(m);
    auto kind_of = [&](uint32_t m) { return matvec_kind(props_, product.sides[m].w.type, product.precision); };
    auto same = [&](uint32_t a, uint32_t b) { return std::string(kind_of(a).name) == kind_of(b).name; };
    const bool gated = product.activation != APU_ACT_NONE, pair = gated && same(0, 1);
    if (gated && !pair) { // up first, into memory that gate's launch reads
      up_bytes_ = uint64_t(kMatvecRows) * product.sides[1].w.rows * sizeof(float);
      builder.reserve(Scratch::partial, up_bytes_);
      left = {1, 0};
    }
    while (!left.empty()) {
      std::vector<uint32_t> group, rest;
      for (uint32_t m : left) (same(m, left[0]) ? group : rest).push_back(m);
      add_part(builder, product, kind_of(group[0]), group, pair, max_rows);
      left = rest;
    }
  }

  void launch(Launcher &launcher, const Bucket &bucket, const Activations &in) const override {
    const uint32_t rows = output_rows_ ? bucket.outputs : bucket.rows;
    if (rows == 0) return;
    for (const Part &part : parts_) {
      const uint32_t r = matvec_rows(rows, part.args.terms);
      const MatvecGeometry g =
          matvec_geometry(part.kind, props_, part.args.sides[0].w.k, part.rows, r, part.args.pair != 0);
      MatvecArgs args = part.args;
      args.in = in;
      args.rows = rows * args.terms;
      args.slices = g.slices, args.splits = g.splits, args.steps = g.steps;
      args.split_shift = uint32_t(std::countr_zero(g.splits));
      uint32_t blocks = 0;
      for (uint32_t m = 0; m < kMatvecSides; ++m) {
        const bool there = m < (args.pair ? 1 : part.sides);
        args.first_block[m] = there ? blocks : kNone;
        if (there) blocks += (args.sides[m].w.rows + g.block_rows - 1) / g.block_rows;
      }
      if (part.writes_up) args.sides[0].out = launcher.scratch_as<float>(Scratch::partial);
      if (part.reads_up) args.up = launcher.scratch_as<float>(Scratch::partial);
      const uint32_t groups = (rows * args.terms + r - 1) / r;
      launcher.launch(part.kernels[r], {blocks, groups, 1}, g.threads, args, g.lds);
    }
  }

private:
  struct Part { // one launch
    MatvecKind kind{};
    MatvecArgs args{};
    uint32_t sides = 0;
    uint64_t rows = 0; // of all its matrices, of one of a pair
    bool writes_up = false, reads_up = false;
    Kernel kernels[kMatvecRows + 1]; // by the rows they compute: 1, 2, 4, 8
  };

  void add_part(Builder &builder, const Product &product, const MatvecKind &kind, const std::vector<uint32_t> &sides,
                bool pair, uint32_t max_rows) {
    Part part;
    part.kind = kind;
    MatvecArgs &args = part.args;
    const StepCounts *counts = builder.step().counts;
    args.count = output_rows_ ? &counts->outputs : &counts->rows;
    args.terms = product.precision == APU_PRECISION_FINE && !kind.floats ? 2 : 1;
    args.pair = pair;
    args.plain = args.terms == 1;
    for (uint32_t m : sides) {
      const ProductSide &side = product.sides[m];
      args.sides[part.sides++] = {side.w, side.bias, side.out};
      if (!pair || m == 0) part.rows += side.w.rows;
      if (side.bias) args.plain = false;
    }
    if (sides[0] == 0) {
      args.activation = uint32_t(product.activation);
      args.limit = product.limit;
      args.residual = product.residual;
      args.soft_cap = product.soft_cap;
      if (args.activation != kActNone || args.residual || args.soft_cap != 0) args.plain = false;
    }
    part.writes_up = up_bytes_ && sides[0] == 1;
    part.reads_up = up_bytes_ && sides[0] == 0;
    for (uint32_t r = args.terms; r <= matvec_rows(max_rows, args.terms); r *= 2) {
      const MatvecGeometry g = matvec_geometry(kind, props_, args.sides[0].w.k, part.rows, r, pair);
      part.kernels[r] = builder.kernel("matvec_" + std::string(kind.name) + "_r" + std::to_string(r), g.lds);
    }
    parts_.push_back(part);
  }

  DriverProps props_;
  bool output_rows_;
  uint64_t up_bytes_ = 0;
  std::vector<Part> parts_;
};

} // namespace

std::unique_ptr<ProductKernels> make_matvec(Builder &builder, const Product &product) {
  return std::make_unique<Matvec>(builder, product);
}

} // namespace apu::gpu
