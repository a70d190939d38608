// Host side of GEMM: which kernels a product needs, their tiles, splits and scratch.
//
// Matrices of one type that share an input are one launch; a gated pair of two types is two, the second of which reads
// the gate. Splits of K follow from N, K and the device, not from the rows of a step, so that a row has the same bits
// in any batch of its class (small and large blocks). Experts: pairs of (row, slot) are sorted by expert on the device,
// then tiles lie within an expert's pairs.
#include "gpu/kernels/gemm_args.h"

#include "gpu/ops.h"

#include "cpu/kernels.h"
#include "quant/blocks.h"

#include <algorithm>
#include <string>
#include <vector>

namespace apu::gpu {
namespace {

constexpr uint32_t kThreads = 256;     // of gemm_rows.hip and gemm_f32.hip
constexpr uint32_t kFloatTile = 64;    // rows and columns of gemm_f32's blocks
constexpr uint32_t kSmallRows = 64;    // up to so many rows, blocks are small
constexpr uint32_t kTypicalRows = 512; // for which large blocks are to fill the device
constexpr uint32_t kSplitColumns = 1024;
constexpr uint64_t kMostHeadBytes = 64u << 20; // of halves of some heads

uint32_t ceil_div(uint64_t a, uint64_t b) {
  return uint32_t((a + b - 1) / b);
}

struct Type { // kernels of their own; all others share gemm_any
  uint32_t type;
  const char *name;
  uint32_t chunk_columns, chunk_bytes;
};
template <class B> constexpr Type blocks(uint32_t type, const char *name) {
  return {type, name, 256, 256 / quant::Traits<B>::elements * uint32_t(sizeof(B))};
}
constexpr Type kTypes[] = {
    blocks<quant::Q4_0>(APU_Q4_0, "q4_0"),
    blocks<quant::Q4_1>(APU_Q4_1, "q4_1"),
    blocks<quant::Q5_0>(APU_Q5_0, "q5_0"),
    blocks<quant::Q5_1>(APU_Q5_1, "q5_1"),
    blocks<quant::Q8_0>(APU_Q8_0, "q8_0"),
    blocks<quant::Q2_K>(APU_Q2_K, "q2_k"),
    blocks<quant::Q3_K>(APU_Q3_K, "q3_k"),
    blocks<quant::Q4_K>(APU_Q4_K, "q4_k"),
    blocks<quant::Q5_K>(APU_Q5_K, "q5_k"),
    blocks<quant::Q6_K>(APU_Q6_K, "q6_k"),
    blocks<quant::IQ2_XXS>(APU_IQ2_XXS, "iq2_xxs"),
    blocks<quant::IQ4_NL>(APU_IQ4_NL, "iq4_nl"),
    blocks<quant::IQ4_XS>(APU_IQ4_XS, "iq4_xs"),
    blocks<quant::MXFP4>(APU_MXFP4, "mxfp4"),
    {APU_F16, "f16", 64, 128},
    {APU_BF16, "bf16", 64, 128},
};

struct BlockKernel { // a kernel of tiles, and its block
  Kernel kernel;
  GemmShape shape{};
  uint32_t lds = 0;
};

// One launch: matrices of one type, or in float of any.
struct Group {
  bool floats = false;    // gemm_f32
  bool quantized = false; // its rows of halves come from int8 rows
  BlockKernel small, large;
  GemmArgs args{};
};

class Tiles { // what dense and expert products share
public:
  Tiles(Builder &b, uint32_t k, int32_t precision, bool output_rows)
      : builder_(b), staged_(b.props().arch.rfind("gfx", 0) != 0), k_(k), columns_(ceil_div(k, 256) * 256),
        precision_(precision) {
    base_.counts = b.step().counts;
    base_.k = k, base_.columns = columns_, base_.output_rows = output_rows, base_.row_divisor = 1;
  }

  bool is_quantized(const Matrix &w) const { return cpu::has_quantized_rows(w.type, precision_); }
  bool is_float(const Matrix &w) const { return w.type == APU_F32 || precision_ == APU_PRECISION_EXACT; }
  // Whether two matrices can be one launch.
  bool alike(const Matrix &a, const Matrix &b) const {
    if (is_float(a) || is_float(b)) return is_float(a) && is_float(b);
    return a.type == b.type || (!own(a.type) && !own(b.type));
  }

  Group group(std::initializer_list<ProductSide> sides) { return group(sides.begin(), uint32_t(sides.size())); }
  Group group(const ProductSide *sides, uint32_t count) {
    Group g;
    g.args = base_;
    g.args.side_count = count;
    g.floats = is_float(sides[0].w), g.quantized = is_quantized(sides[0].w);
    g.args.passes = g.quantized && precision_ == APU_PRECISION_FINE ? 2 : 1;
    for (uint32_t m = 0; m < count; ++m) {
      g.args.sides[m] = {sides[m].w, sides[m].bias, sides[m].out, 0, g.args.all_columns};
      g.args.all_columns += sides[m].w.rows;
    }
    const uint32_t type = sides[0].w.type;
    if (g.floats) {
      g.large.kernel = builder_.kernel("gemm_f32");
      g.large.shape = {kFloatTile, kFloatTile, 16, 4};
      g.small = g.large;
    } else if (const Type *t = own(type)) {
      g.small = block(std::string("gemm_") + t->name + "_small", staged_ ? kGemmSmall : kGemmSmallDirect, *t);
      const GemmShape large = staged_ ? kGemmLarge : kGemmLargeDirect;
      const bool fits = lds_of(large, *t) <= builder_.props().lds_bytes;
      g.large = fits ? block(std::string("gemm_") + t->name + "_large", large, *t) : g.small;
    } else {
      g.large = block("gemm_any", kGemmAny, {type, "", 1u << 30, 0});
      g.small = g.large;
    }
    if (!g.floats) {
      (g.quantized ? halves_q_ : halves_x_) = true;
      passes_ = std::max(passes_, g.args.passes);
    }
    return g;
  }

  // Rows of halves that all groups read, after the last group was made.
  void reserve_rows(uint64_t rows) {
    rows_ = rows;
    if (!halves_q_ && !halves_x_) return;
    rows_kernel_ = builder_.kernel("gemm_rows");
    builder_.reserve(Scratch::halves, half_bytes(passes_) * halves_q_ + half_bytes(1) * halves_x_);
  }
  // With `pairs` a row for each of them, in their order.
  void launch_rows(Launcher &launcher, uint32_t rows, uint32_t rows_each, const Activations &in,
                   const u32 *pairs = nullptr, uint32_t row_divisor = 1) const {
    GemmRowsArgs a{};
    a.counts = base_.counts;
    a.columns = columns_, a.k = k_, a.rows_each = rows_each, a.output_rows = base_.output_rows;
    a.pairs = pairs, a.row_divisor = row_divisor;
    for (bool quantized : {true, false}) {
      if (!(quantized ? halves_q_ : halves_x_)) continue;
      a.q = quantized ? in.q : nullptr, a.d = in.d, a.x = in.x;
      a.passes = quantized ? passes_ : 1;
      a.a_scale = scales(launcher, quantized), a.a = halves(launcher, quantized);
      launcher.launch(rows_kernel_, {rows * rows_each}, kThreads, a);
    }
  }

  static uint32_t column_tiles(GemmArgs &args, const GemmShape &shape) {
    if (args.pair) return ceil_div(args.sides[0].w.rows, shape.columns / 2);
    uint32_t tiles = 0;
    for (uint32_t m = 0; m < args.side_count; ++m) {
      args.sides[m].tile_begin = tiles;
      tiles += ceil_div(args.sides[m].w.rows, shape.columns);
    }
    return tiles;
  }

  // `row_tiles` of the grid; a pair's gate and up of gemm_f32 are two tiles of one block.
  void launch_group(Launcher &launcher, const Group &g, const BlockKernel &block, uint32_t row_tiles, uint32_t max_rows,
                    uint32_t splits, const Activations &in) const {
    GemmArgs args = g.args;
    GemmShape shape = block.shape;
    if (g.floats) {
      args.x = in.x;
      if (args.pair) shape.columns *= 2;
    } else {
      args.a = halves(launcher, g.quantized), args.a_scale = scales(launcher, g.quantized);
    }
    const uint32_t tiles = column_tiles(args, shape);
    const uint32_t steps = args.passes == 1 ? ceil_div(k_, shape.depth) : 2 * (columns_ / shape.depth);
    const uint32_t unit = std::max(256 / shape.depth, 1u); // whole chunks
    args.row_tiles = row_tiles, args.max_rows = max_rows;
    args.split_steps = ceil_div(ceil_div(steps, splits), unit) * unit;
    splits = ceil_div(steps, args.split_steps);
    args.partial = splits > 1 ? launcher.scratch_as<float>(Scratch::partial) : nullptr;
    launcher.launch(block.kernel, {row_tiles * tiles, splits}, g.floats ? kThreads : shape.threads(), args, block.lds);
    if (splits == 1) return;
    GemmReduceArgs reduce{args, splits};
    const uint32_t outputs = args.pair ? args.sides[0].w.rows : args.all_columns;
    launcher.launch(reduce_, {ceil_div(outputs, kThreads), max_rows}, kThreads, reduce);
  }

  // Of a group's small or large blocks: a function of the matrices and the device.
  uint32_t splits(const Group &g, bool large) const {
    if (g.floats) return 1;
    GemmArgs args = g.args;
    const GemmShape &shape = large ? g.large.shape : g.small.shape;
    const uint32_t units = std::max(builder_units_, 1u);
    const uint32_t blocks = column_tiles(args, shape) * (large ? ceil_div(kTypicalRows, shape.rows) : 1);
    const uint32_t wanted = (large ? 1 : 2) * units / blocks;
    return std::clamp(wanted, 1u, std::max(k_ / kSplitColumns, 1u));
  }
  void reserve_splits(const Group &g, uint64_t rows) {
    const uint64_t most = std::max(splits(g, false), splits(g, true));
    if (most == 1) return;
    reduce_ = builder_.kernel("gemm_reduce");
    builder_.reserve(Scratch::partial, most * rows * g.args.all_columns * sizeof(float));
  }

  GemmArgs &base() { return base_; }
  bool staged() const { return staged_; }

private:
  static const Type *own(uint32_t type) {
    const Type *end = std::end(kTypes),
               *t = std::find_if(std::begin(kTypes), end, [&](const Type &x) { return x.type == type; });
    return t == end ? nullptr : t;
  }
  uint32_t lds_of(GemmShape shape, const Type &t) const {
    return gemm_layout(shape, staged_, t.chunk_columns, staged_ ? t.chunk_bytes : 0).bytes;
  }
  BlockKernel block(const std::string &name, GemmShape shape, const Type &t) {
    const uint32_t lds = lds_of(shape, t);
    return {builder_.kernel(name, lds), shape, lds};
  }
  // Scales of all rows, then halves.
  uint64_t scale_bytes() const { return ceil_div(rows_ * sizeof(float), 256) * 256; }
  uint64_t half_bytes(uint32_t passes) const {
    return scale_bytes() + (rows_ + kGemmExtraRows) * passes * columns_ * sizeof(u16);
  }
  uint64_t half_base(const Launcher &launcher, bool quantized) const {
    return launcher.scratch(Scratch::halves) + (quantized || !halves_q_ ? 0 : half_bytes(passes_));
  }
  float *scales(const Launcher &launcher, bool quantized) const {
    return reinterpret_cast<float *>(half_base(launcher, quantized));
  }
  u16 *halves(const Launcher &launcher, bool quantized) const {
    return reinterpret_cast<u16 *>(half_base(launcher, quantized) + scale_bytes());
  }

  Builder &builder_; // while plans are built
  bool staged_;
  uint32_t k_, columns_;
  int32_t precision_;
  uint32_t builder_units_ = builder_.props().compute_units;
  GemmArgs base_{};
  Kernel rows_kernel_, reduce_;
  bool halves_q_ = false, halves_x_ = false;
  uint32_t passes_ = 1;
  uint64_t rows_ = 0; // at most
};

class DenseGemm final : public ProductKernels {
public:
  DenseGemm(Builder &b, const Product &p) : tiles_(b, p.sides[0].w.k, p.precision, p.output_rows) {
    const uint64_t rows = p.output_rows ? b.info().max_outputs : b.info().max_rows;
    if (p.activation != APU_ACT_NONE && !tiles_.alike(p.sides[0].w, p.sides[1].w)) {
      // The gate to scratch first, then up, which finishes.
      groups_.push_back(tiles_.group(&p.sides[0], 1));
      Group up = tiles_.group(&p.sides[1], 1);
      up.args.sides[0].out = p.sides[0].out;
      groups_.push_back(up);
      gate_bytes_ = rows * p.sides[0].w.rows * sizeof(float);
      b.reserve(Scratch::experts, gate_bytes_);
      finish(groups_[1], p);
    } else {
      for (uint32_t m = 0, next; m < p.count; m = next) {
        for (next = m + 1; next < p.count && tiles_.alike(p.sides[m].w, p.sides[next].w);) ++next;
        groups_.push_back(tiles_.group(p.sides + m, next - m));
        if (m == 0) finish(groups_[0], p);
      }
      groups_[0].args.pair = p.activation != APU_ACT_NONE;
    }
    tiles_.reserve_rows(rows);
    for (const Group &g : groups_) tiles_.reserve_splits(g, rows);
  }

  void launch(Launcher &launcher, const Bucket &bucket, const Activations &in) const override {
    const uint32_t rows = groups_[0].args.output_rows ? bucket.outputs : bucket.rows;
    tiles_.launch_rows(launcher, rows, 1, in);
    const bool large = rows > kSmallRows;
    for (size_t i = 0; i < groups_.size(); ++i) {
      Group g = groups_[i];
      float *const gate = gate_bytes_ ? launcher.scratch_as<float>(Scratch::experts) : nullptr;
      if (gate && i == 0) g.args.sides[0].out = gate;
      if (i == 1) g.args.gate = gate;
      const BlockKernel &block = large ? g.large : g.small;
      tiles_.launch_group(launcher, g, block, ceil_div(rows, block.shape.rows), rows, tiles_.splits(g, large), in);
    }
  }

private:
  static void finish(Group &g, const Product &p) {
    g.args.activation = uint32_t(p.activation);
    g.args.residual = p.residual;
    g.args.soft_cap = p.soft_cap;
    g.args.limit = p.limit;
  }

  Tiles tiles_;
  std::vector<Group> groups_;
  uint64_t gate_bytes_ = 0;
};

class ExpertGemm final : public ProductKernels {
public:
  ExpertGemm(Builder &b, const ExpertProduct &p) : p_(p), tiles_(b, p.w[0].k, p.precision, false) {
    const uint64_t rows = b.info().max_rows, pairs = rows * p.used, n = p.w[0].rows;
    float *const out = p.second ? nullptr : p.out; // null: products in scratch, added afterwards
    const ProductSide gate{p.w[0], p.bias[0], out}, up{p.w[1], p.bias[1], out};
    if (p.second) {
      groups_.push_back(tiles_.group({gate}));
    } else if (tiles_.alike(p.w[0], p.w[1])) {
      groups_.push_back(tiles_.group({gate, up}));
      groups_[0].args.pair = 1;
    } else { // the gate to scratch first, then up, which finishes
      groups_.push_back(tiles_.group({{p.w[0], p.bias[0], nullptr}}));
      groups_.push_back(tiles_.group({up}));
    }
    groups_.back().args.activation = uint32_t(p.activation);
    groups_.back().args.limit = p.limit;
    for (Group &g : groups_) g.args.row_divisor = p.second ? 1 : p.used;
    tiles_.reserve_rows(pairs);
    if (p.second || groups_.size() == 2) b.reserve(Scratch::partial, pairs * n * sizeof(float));
    uint32_t least = kGemmLarge.rows; // rows of a tile
    for (const Group &g : groups_) least = std::min({least, g.small.shape.rows, g.large.shape.rows});
    most_tiles_ = ceil_div(pairs, least) + std::min<uint64_t>(p.experts, pairs);
    b.reserve(Scratch::experts, tiles_at(pairs) + most_tiles_ * sizeof(ExpertTile));
    counts_ = b.step().counts;
    sizes_ = b.kernel("expert_sizes"), places_ = b.kernel("expert_places"), combine_ = b.kernel("expert_combine");
    max_pairs_ = pairs;
  }

  void launch(Launcher &launcher, const Bucket &bucket, const Activations &in) const override {
    const uint32_t pairs = bucket.rows * p_.used;
    const uint8_t *const memory = launcher.scratch_as<uint8_t>(Scratch::experts);
    ExpertSortArgs sort{};
    sort.counts = counts_, sort.ids = p_.ids, sort.used = p_.used, sort.experts = p_.experts;
    sort.tile_count = reinterpret_cast<u32 *>(const_cast<uint8_t *>(memory));
    sort.sizes = sort.tile_count + 64;
    sort.pairs = sort.sizes + p_.experts;
    sort.tiles = reinterpret_cast<ExpertTile *>(const_cast<uint8_t *>(memory) + tiles_at(max_pairs_));
    launcher.launch(sizes_, {p_.experts}, kThreads, sort);

    float *const products = launcher.scratch_as<float>(Scratch::partial);
    for (size_t i = 0; i < groups_.size(); ++i) {
      Group g = groups_[i];
      const bool large = uint64_t(pairs) >= uint64_t(p_.experts) * g.large.shape.rows / 2;
      const BlockKernel &block = large ? g.large : g.small;
      if (sort.tile_rows != block.shape.rows) {
        sort.tile_rows = block.shape.rows;
        launcher.launch(places_, {p_.experts}, kThreads, sort);
        if (i == 0) tiles_.launch_rows(launcher, bucket.rows, p_.used, in, sort.pairs, g.args.row_divisor);
      }
      g.args.tiles = sort.tiles, g.args.tile_count = sort.tile_count, g.args.pairs = sort.pairs;
      if (!g.args.sides[0].out) g.args.sides[0].out = products;
      if (i == 1) g.args.gate = products;
      const uint32_t row_tiles = ceil_div(pairs, block.shape.rows) + std::min(p_.experts, pairs);
      tiles_.launch_group(launcher, g, block, row_tiles, pairs, 1, in);
    }
    if (!p_.second) return;
    const uint32_t n = p_.w[0].rows;
    const ExpertCombineArgs combine{counts_, products, p_.weights, p_.residual, p_.out, n, p_.used};
    launcher.launch(combine_, {ceil_div(n, kThreads), bucket.rows}, kThreads, combine);
  }

private:
  // Scratch::experts: the tiles' number, sizes of experts, sorted pairs, tiles.
  uint64_t tiles_at(uint64_t pairs) const {
    return ceil_div((64 + p_.experts + pairs) * sizeof(u32), 256) * uint64_t{256};
  }

  ExpertProduct p_;
  Tiles tiles_;
  std::vector<Group> groups_;
  const StepCounts *counts_ = nullptr;
  Kernel sizes_, places_, combine_;
  uint64_t most_tiles_ = 0, max_pairs_ = 0;
};

// Heads are taken some at a time where all their rows as halves would be many bytes.
class HeadGemm final : public ProductKernels {
public:
  HeadGemm(Builder &b, const HeadProduct &p)
      : p_(p), tiles_(b, p.w.k, APU_PRECISION_DEFAULT, p.output_rows), group_(tiles_.group({{p.w, nullptr, p.out}})),
        rows_(b.kernel("gemm_head_rows")), wave_size_(b.props().wave_size), columns_(ceil_div(p.w.k, 256) * 256) {
    max_rows_ = p.output_rows ? b.info().max_outputs : b.info().max_rows;
    const uint64_t head = max_rows_ * columns_ * sizeof(u16);
    together_ = uint32_t(std::clamp<uint64_t>(kMostHeadBytes / head, 1, p.heads));
    b.reserve(Scratch::halves, scale_bytes() + (together_ * max_rows_ + kGemmExtraRows) * columns_ * sizeof(u16));
  }

  void launch(Launcher &launcher, const Bucket &bucket, const Activations &) const override {
    const uint32_t rows = p_.output_rows ? bucket.outputs : bucket.rows;
    const BlockKernel &block = rows > kSmallRows ? group_.large : group_.small;
    GemmArgs args = group_.args;
    args.a_scale = launcher.scratch_as<float>(Scratch::halves);
    args.a = reinterpret_cast<u16 *>(launcher.scratch(Scratch::halves) + scale_bytes());
    args.max_rows = rows, args.row_tiles = ceil_div(rows, block.shape.rows);
    args.passes = 1;
    args.split_steps = ceil_div(ceil_div(args.k, block.shape.depth) * block.shape.depth, 256) * 256 / block.shape.depth;
    args.head_width = args.sides[0].w.rows + p_.rest, args.out_width = p_.heads * args.head_width;
    const uint32_t tiles = Tiles::column_tiles(args, block.shape);
    GemmHeadRowsArgs from{};
    from.counts = args.counts, from.x = p_.in, from.out = p_.out;
    from.a = const_cast<u16 *>(args.a), from.a_scale = const_cast<float *>(args.a_scale);
    from.all_heads = p_.heads, from.max_rows = rows;
    from.k = args.k, from.columns = args.columns, from.n = args.sides[0].w.rows, from.rest = p_.rest;
    from.output_rows = p_.output_rows;
    for (uint32_t begin = 0; begin < p_.heads; begin += together_) {
      from.head_begin = args.head_begin = begin;
      from.heads = args.heads = std::min(together_, p_.heads - begin);
      launcher.launch(rows_, {ceil_div(uint64_t(rows) * from.heads, kThreads / wave_size_)}, kThreads, from);
      launcher.launch(block.kernel, {args.row_tiles * tiles, args.heads}, block.shape.threads(), args, block.lds);
    }
  }

private:
  uint64_t scale_bytes() const { return ceil_div(together_ * max_rows_ * sizeof(float), 256) * uint64_t{256}; }

  HeadProduct p_;
  Tiles tiles_;
  Group group_;
  Kernel rows_;
  uint32_t wave_size_, columns_, together_ = 1;
  uint64_t max_rows_ = 0;
};

} // namespace

std::unique_ptr<ProductKernels> make_head_gemm(Builder &builder, const HeadProduct &product) {
  return std::make_unique<HeadGemm>(builder, product);
}
std::unique_ptr<ProductKernels> make_expert_gemm(Builder &builder, const ExpertProduct &product) {
  return std::make_unique<ExpertGemm>(builder, product);
}
std::unique_ptr<ProductKernels> make_gemm(Builder &builder, const Product &product) {
  return std::make_unique<DenseGemm>(builder, product);
}

} // namespace apu::gpu
