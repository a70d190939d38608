// The host's side of the expert matvec kernels: one launch for a half of EXPERTS, two where gate and up are of
// different kinds. As in matvec.cpp the geometry changes no bit of a result and follows the device.
#include "gpu/kernels/activation_kinds.h"
#include "gpu/kernels/expert_matvec_args.h"
#include "gpu/kernels/matvec_args.h"
#include "gpu/matvec.h"
#include "gpu/ops.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <vector>

namespace apu::gpu {
namespace {

constexpr uint32_t kWavesOfUnit = 12; // resident ones that a launch counts on
constexpr uint32_t kFewSteps = 4, kManySteps = 8, kManyRounds = 32;

class ExpertMatvec final : public ProductKernels {
public:
  ExpertMatvec(Builder &builder, const ExpertProduct &product) : props_(builder.props()) {
    ExpertMatvecArgs args{};
    args.counts = builder.step().counts;
    args.ids = product.ids;
    args.weights = product.weights;
    args.residual = product.residual;
    args.out = product.out;
    args.experts = product.experts;
    args.used = product.used;
    args.second = product.second;
    const bool gated = product.activation != APU_ACT_NONE;
    const MatvecKind kind = matvec_kind(builder.props(), product.w[0].type, product.precision);
    args.w[0] = product.w[0], args.bias[0] = product.bias[0];
    args.activation = uint32_t(product.activation);
    args.limit = product.limit;
    if (gated) {
      const MatvecKind up = matvec_kind(builder.props(), product.w[1].type, product.precision);
      args.pair = !std::strcmp(kind.name, up.name);
      args.w[1] = product.w[1], args.bias[1] = product.bias[1];
      if (!args.pair) { // up first, into memory that gate's launch reads
        ExpertMatvecArgs first = args;
        first.w[0] = product.w[1], first.bias[0] = product.bias[1];
        first.activation = APU_ACT_NONE;
        const uint64_t rows = std::min(kMatvecRows, builder.info().max_rows);
        builder.reserve(Scratch::partial, rows * args.used * args.w[1].rows * sizeof(float));
        add(builder, up, first, Role::writes_up);
      }
    }
    add(builder, kind, args, gated && !args.pair ? Role::reads_up : Role::whole);
  }

  void launch(Launcher &launcher, const Bucket &bucket, const Activations &in) const override {
    if (bucket.rows == 0) return;
    for (const Part &part : parts_) {
      ExpertMatvecArgs args = part.args;
      const Geometry g = geometry(part.kind, args, bucket.rows);
      args.in = in;
      args.units = units(args, bucket.rows);
      args.slices = g.slices, args.splits = g.splits, args.steps = g.steps;
      if (part.role == Role::writes_up) args.out = launcher.scratch_as<float>(Scratch::partial);
      if (part.role == Role::reads_up) args.up = launcher.scratch_as<float>(Scratch::partial);
      const uint32_t blocks = (args.w[0].rows + g.block_rows - 1) / g.block_rows;
      launcher.launch(part.kernel, {blocks * args.units, 1, 1}, kMatvecWaves * props_.wave_size, args, g.lds);
    }
  }

private:
  enum class Role { whole, writes_up, reads_up };
  struct Part { // one launch
    MatvecKind kind;
    ExpertMatvecArgs args;
    Role role;
    Kernel kernel;
  };
  struct Geometry {
    uint32_t slices, splits, steps, block_rows, lds;
  };

  static uint32_t units(const ExpertMatvecArgs &args, uint32_t rows) { return args.second ? rows : rows * args.used; }

  Geometry geometry(const MatvecKind &kind, const ExpertMatvecArgs &args, uint32_t rows) const {
    const uint32_t columns = kind.columns * props_.wave_size, sides = args.pair ? 2 : 1;
    Geometry g{};
    g.slices = (args.w[0].k + columns - 1) / columns;
    const uint32_t parts = g.slices * (args.second ? args.used : 1); // slices of all slots
    const uint64_t sets = (uint64_t(args.w[0].rows) * sides + kind.set - 1) / kind.set * units(args, rows);
    g.splits = 1;
    while (g.splits < kMatvecWaves && g.splits < parts) g.splits *= 2;
    const uint64_t rounds = sets * g.splits / (uint64_t(props_.compute_units) * kWavesOfUnit);
    g.steps = rounds >= kManyRounds ? kManySteps : uint32_t(std::clamp<uint64_t>(rounds, 1, kFewSteps));
    const auto set_rows = [&] { return kind.set * g.steps * kMatvecWaves / g.splits; };
    const auto sums = [&] { return uint32_t(sizeof(float)) * parts * set_rows(); };
    while (g.steps > 1 && sums() > kMatvecSumBytes) --g.steps;
    g.block_rows = set_rows() / sides;
    g.lds = matvec_image_bytes(kind, props_) + sums();
    return g;
  }

  void add(Builder &builder, const MatvecKind &kind, const ExpertMatvecArgs &args, Role role) {
    uint32_t lds = 0; // the most of any bucket
    for (uint32_t rows = 1; rows <= kMatvecRows; ++rows) lds = std::max(lds, geometry(kind, args, rows).lds);
    parts_.push_back({kind, args, role, builder.kernel("expert_matvec_" + std::string(kind.name), lds)});
  }

  DriverProps props_;
  std::vector<Part> parts_;
};

} // namespace

std::unique_ptr<ProductKernels> make_expert_matvec(Builder &builder, const ExpertProduct &product) {
  return std::make_unique<ExpertMatvec>(builder, product);
}

} // namespace apu::gpu
