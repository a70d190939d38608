// ATTENTION and LATENT_ATTENTION: which kernels take a step's sequences, and the memory that they share.
//
// F16 and Q8_0 caches of heads of 32 to 256 go through matrix tiles: sequences with up to kFewRows rows in the step in
// spans of their contexts, the others in blocks of rows. Everything else goes through FMA, in spans. Which kernel a row
// meets depends on its own sequence alone, never on the rest of the step. LATENT_ATTENTION is alike: F16 and Q8_0 rows
// of up to 576 elements go through latent tiles, everything else through FMA, in shorter spans.
#include "gpu/kernels/attention_args.h"
#include "gpu/ops.h"

#include <algorithm>

namespace apu::gpu {
namespace {

constexpr uint32_t kFewRows = 32; // a power of two, as buckets are
constexpr uint32_t kFmaVectors = 8;
constexpr uint32_t kFmaLds = 48 * 1024;        // chunks of larger heads have fewer vectors
constexpr uint32_t kBlocksOfUnit = 16;         // of a compute unit: more would not run at once, and they stride
constexpr uint64_t kMostPartBytes = 64u << 20; // beyond them one block takes all spans of its rows
constexpr uint32_t kWideHeads = 32;            // of more a block of latent tiles takes 64

struct Lds {
  uint32_t span, rows;
};
template <u32 Type, u32 Most, bool Rings> Lds lds_of(uint32_t wave_size) {
  if (wave_size == 64) return {kSpanLds<Type, Most, kSpanThreads / 64, Rings>, kRowsLds<Most, kRowsThreads / 64>};
  return {kSpanLds<Type, Most, kSpanThreads / 32, Rings>, kRowsLds<Most, kRowsThreads / 32>};
}
template <u32 Type> Lds lds_of(uint32_t most, uint32_t wave_size, bool rings) {
  if (rings) {
    return most == 64    ? lds_of<Type, 64, true>(wave_size)
           : most == 128 ? lds_of<Type, 128, true>(wave_size)
                         : lds_of<Type, 256, true>(wave_size);
  }
  return most == 64    ? lds_of<Type, 64, false>(wave_size)
         : most == 128 ? lds_of<Type, 128, false>(wave_size)
                       : lds_of<Type, 256, false>(wave_size);
}

// Columns of a wave's tiles in the kernels by spans (kTileFew).
uint32_t few_vectors(const DriverProps &props) {
  return props.bulk_copies ? 8 : kTileVectors;
}

bool aligned16(const PagedState &s) {
  return reinterpret_cast<uint64_t>(s.address) % 16 == 0 && s.page_bytes % 16 == 0 && s.head_bytes % 16 == 0;
}

class Attention final : public Op {
public:
  Attention(Builder &b, const apu_op &op) : latent_(op.kind == APU_OP_LATENT_ATTENTION) {
    args_.step = b.step();
    args_.k_state = b.paged(op.state[0]);
    args_.v_state = b.paged(op.state[latent_ ? 0 : 1]);
    if (latent_) args_.v_state.head_size = uint32_t(op.i[0]);
    args_.q = b.scratch(op.in[0]);
    args_.sinks = b.vector(op.w[0]);
    args_.out = b.scratch(op.out[0]);
    args_.scale = op.f[0];
    args_.cap = op.f[1];
    args_.heads = uint32_t(b.info().tensor(op.in[0])->inner / args_.k_state.head_size);
    args_.group = args_.heads / args_.k_state.heads;
    args_.max_sequences = b.info().max_sequences;
    most_blocks_ = kBlocksOfUnit * std::max(b.props().compute_units, 1u);
    if (latent_ && choose_latent_tiles(b)) return;
    if (latent_)
      choose_latent(b);
    else
      choose(b);
    reserve(b, uint32_t(op.state[0]));
  }

  void launch(Launcher &launcher, const Bucket &bucket) const override {
    AttentionArgs args = args_;
    args.parts = launcher.scratch_as<float>(Scratch::partial);
    if (combine_.function) return launch_latent_tiles(launcher, bucket, args);
    args.counters = launcher.scratch_as<u32>(Scratch::counters);
    // Bucket sizes above 8 are less than twice the step's: a single sequence in a larger one has more rows than few.
    if (!rows_.function || args.max_sequences > 1 || bucket.rows <= kFewRows)
      launcher.launch(span_, grid(args, uint64_t(units(bucket.rows)) * spans(bucket.context)), span_threads_, args,
                      span_lds_);
    if (!rows_.function || bucket.rows <= kFewRows) return;
    split(args, rows_vectors_);
    args.min_rows = kFewRows + 1;
    args.max_rows = ~0u;
    args.slots = 0;
    const uint64_t chunks = bucket.rows / args.chunk_rows + std::min(args.max_sequences, bucket.rows / kFewRows);
    launcher.launch(rows_, grid(args, chunks), kRowsThreads, args, rows_lds_);
  }

private:
  void choose(Builder &b) {
    const PagedState &k = args_.k_state, &v = args_.v_state;
    const uint32_t d = k.head_size, dv = v.head_size, wave_size = b.props().wave_size;
    const uint32_t waves = kRowsThreads / wave_size;
    const bool aligned = aligned16(k) && aligned16(v);
    const bool tiles = aligned && k.dtype == v.dtype && k.dtype != APU_F32 && d % 8 == 0 &&
                       d >= (k.dtype == APU_F16 ? 32 : 64) && dv % 16 == 0;
    if (tiles && std::max(d, dv) <= 256) {
      const uint32_t most = d == 64 && dv == 64 ? 64 : std::max(d, dv) <= 128 ? 128 : 256;
      const bool rings = b.props().bulk_copies;
      const Lds lds = k.dtype == APU_F16 ? lds_of<kF16>(most, wave_size, rings) : lds_of<kQ8>(most, wave_size, rings);
      const bool exact = d == most && dv == most && (k.dtype == APU_F16 || most <= 128);
      const std::string name =
          std::string(k.dtype == APU_F16 ? "f16_" : "q8_0_") + (exact ? "" : "to_") + std::to_string(most);
      span_ = b.kernel("attention_span_" + name, lds.span);
      rows_ = b.kernel("attention_rows_" + name, lds.rows);
      span_threads_ = kSpanThreads, span_lds_ = lds.span, rows_lds_ = lds.rows;
      rows_vectors_ = kTileVectors * waves / (most > 128 ? 2 : 1);
      split(args_, few_vectors(b.props()));
      args_.max_rows = kFewRows;
    } else {
      auto bytes = [&](uint32_t vectors) { return uint32_t(sizeof(float)) * (vectors * (d + dv + kPageRows + 3) + 1); };
      uint32_t vectors = kFmaVectors;
      while (vectors > 1 && bytes(vectors) > kFmaLds) vectors /= 2;
      split(args_, vectors);
      span_threads_ = kFmaThreads, span_lds_ = bytes(vectors);
      span_ =
          b.kernel(aligned && k.dtype == APU_F32 && v.dtype == APU_F32 ? "attention_f32" : "attention_any", span_lds_);
      args_.max_rows = ~0u;
    }
    args_.min_rows = 1;
  }

  void choose_latent(Builder &b) {
    const PagedState &c = args_.k_state;
    const uint32_t d = c.head_size;
    auto bytes = [&](uint32_t vectors) {
      return uint32_t(sizeof(float)) *
             (vectors * (d + args_.v_state.head_size + 3) + kPageRows * kLatentVectors + kLatentFront);
    };
    uint32_t vectors = kLatentVectors;
    while (vectors > 1 && bytes(vectors) > kFmaLds) vectors /= 2;
    split(args_, vectors);
    span_threads_ = kFmaThreads, span_lds_ = bytes(vectors);
    const bool floats = c.dtype == APU_F32 && aligned16(c) && d % 8 == 0;
    span_ = b.kernel(floats ? "latent_attention_f32" : "latent_attention_any", span_lds_);
    args_.min_rows = 1;
    args_.max_rows = ~0u;
  }

  // False where they do not serve.
  bool choose_latent_tiles(Builder &b) {
    const PagedState &c = args_.k_state;
    const uint32_t d = c.head_size, dv = args_.v_state.head_size, unit = c.dtype == APU_F16 ? 16 : 32;
    const bool ring = b.props().bulk_copies && c.dtype == APU_F16;
    auto lds = [&](uint32_t vectors) { return latent_layout(vectors, ring).bytes; };
    const uint32_t most = b.props().lds_bytes;
    if (c.dtype == APU_F32 || !aligned16(c) || d % unit || dv % 16 || d > kLatentKey || dv > kLatentValue) return false;
    if (lds(16) > most) return false;
    const std::string name = c.dtype == APU_F16 ? "latent_tiles_f16_" : "latent_tiles_q8_0_";
    const bool wide = b.props().bulk_copies && lds(64) <= most;
    auto choose = [&](uint32_t vectors, Kernel &kernel, uint32_t &bytes) {
      bytes = lds(vectors);
      kernel = b.kernel(name + std::to_string(vectors), bytes);
      return vectors;
    };
    args_.vectors = choose(wide && args_.heads > kWideHeads ? 64 : 16, span_, span_lds_);
    rows_vectors_ = choose(wide ? 64 : 16, rows_, rows_lds_);
    span_threads_ = kLatentWaves * b.props().wave_size;
    combine_ = b.kernel("latent_combine");
    split(args_, args_.vectors, 1);
    args_.min_rows = 1, args_.max_rows = kFewRows;
    args_.span_rows = kLatentUnit;
    args_.slot_floats = part_floats(args_.vectors, dv);
    // So many that a row alone fills the device.
    const uint32_t blocks = std::max(b.props().lds_of_unit / std::max(span_lds_, 1u), 1u) * b.props().compute_units;
    args_.most_spans = std::max(blocks / args_.head_chunks, 1u);
    const uint64_t bytes = uint64_t(latent_spans(b.info().max_positions)) * args_.head_chunks * args_.slot_floats * 4;
    const uint64_t rows = std::min<uint64_t>(b.info().max_rows, uint64_t(args_.max_sequences) * kFewRows);
    rows_together_ = uint32_t(std::clamp<uint64_t>(kMostPartBytes / bytes, 1, rows));
    b.reserve(Scratch::partial, rows_together_ * bytes);
    return true;
  }

  uint32_t latent_spans(uint32_t context) const { // of a row, at most
    const uint32_t window = args_.k_state.window;
    const uint32_t all = window ? std::min(context, window + kLatentUnit) : context;
    return std::min(args_.most_spans, (all + args_.span_rows - 1) / args_.span_rows);
  }

  void launch_latent_tiles(Launcher &launcher, const Bucket &bucket, AttentionArgs &args) const {
    const uint32_t rows = std::min<uint64_t>(bucket.rows, uint64_t(args.max_sequences) * kFewRows);
    if (args.max_sequences > 1 || bucket.rows <= kFewRows) {
      args.spans = latent_spans(bucket.context);
      for (args.first = 0; args.first < rows; args.first += rows_together_) {
        const uint32_t some = std::min(rows_together_, rows - args.first);
        launcher.launch(span_, {some * args.spans, args.head_chunks}, span_threads_, args, span_lds_);
        if (args.spans > 1)
          launcher.launch(combine_, {some * args.chunk_heads, args.head_chunks}, kCombineThreads, args);
      }
    }
    if (bucket.rows <= kFewRows) return;
    split(args, rows_vectors_);
    args.vectors = rows_vectors_;
    args.min_rows = kFewRows + 1, args.max_rows = ~0u;
    args.first = args.spans = 0;
    const uint32_t chunks = bucket.rows / args.chunk_rows + std::min(args.max_sequences, bucket.rows / kFewRows);
    launcher.launch(rows_, {chunks, args.head_chunks}, span_threads_, args, rows_lds_);
  }

  static void split(AttentionArgs &args, uint32_t vectors, uint32_t most_rows = ~0u) {
    args.chunk_heads = std::min(args.group, vectors);
    args.chunk_rows = std::min(vectors / args.chunk_heads, most_rows);
    args.row_factor = args.chunk_rows == 1 ? 0 : 65536 / args.chunk_heads + 1;
    args.head_chunks = (args.group + args.chunk_heads - 1) / args.chunk_heads;
  }

  // `items` of each kv head's heads: not more blocks than run at once, a few times over.
  Dim grid(const AttentionArgs &args, uint64_t items) const {
    const uint32_t heads = args.k_state.heads * args.head_chunks;
    return {uint32_t(std::min<uint64_t>(items, std::max(most_blocks_ / heads, 1u))), heads};
  }

  uint32_t units(uint32_t rows) const { // chunks of rows that a step of so many rows has, at most
    const uint64_t of_sequence = (std::min(rows, args_.max_rows) + args_.chunk_rows - 1) / args_.chunk_rows;
    return uint32_t(std::min<uint64_t>(rows, args_.max_sequences * of_sequence));
  }

  uint32_t span() const { return latent_ ? kLatentSpan : kSpan; }
  uint32_t spans(uint32_t context) const {
    const uint32_t all = (context + span() - 1) / span(), window = args_.k_state.window;
    // The rows of a sequence look back from at most kFewRows positions.
    return window && rows_.function ? std::min(all, (window + kFewRows) / kSpan + 2) : all;
  }

  void reserve(Builder &b, uint32_t state) {
    const PlanInfo &info = b.info();
    const uint64_t heads = uint64_t(args_.k_state.heads) * args_.head_chunks, longest = spans(info.max_positions);
    args_.slot_floats = part_floats(args_.chunk_rows * args_.chunk_heads, args_.v_state.head_size);
    // As many as all pages of the state need for the chunks of kFewRows rows, and what the longest context needs alone.
    const uint64_t pages = info.states[state].d.page_count, sequences = std::min(args_.max_sequences, kFewRows);
    const uint64_t chunks = (units(kFewRows) + sequences - 1) / sequences, all = units(info.max_rows) * longest;
    const uint64_t wanted = std::min<uint64_t>(all, chunks * (pages * kPageRows / span() + 2 * sequences));
    const uint64_t bytes = args_.slot_floats * sizeof(float), most = kMostPartBytes / bytes;
    args_.slots = uint32_t(std::max(std::min(wanted * heads, most), longest * heads));
    b.reserve(Scratch::partial, args_.slots * bytes);
    b.reserve(Scratch::counters, uint64_t(info.max_rows) * heads * sizeof(u32));
  }

  bool latent_;
  AttentionArgs args_{}; // of the kernel by spans
  Kernel span_, rows_;   // rows_ is null where spans are for all
  Kernel combine_;       // of latent tiles
  uint32_t span_threads_ = 0, span_lds_ = 0, rows_lds_ = 0;
  uint32_t rows_vectors_ = 0, most_blocks_ = 0;
  uint32_t rows_together_ = 0; // of latent tiles: rows whose parts there is room for
};

} // namespace

std::unique_ptr<Op> make_attention(Builder &builder, const apu_op &op) {
  return std::make_unique<Attention>(builder, op);
}

} // namespace apu::gpu
