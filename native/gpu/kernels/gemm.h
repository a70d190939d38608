// GEMM: y (T,N) = activations (T,K) times weights (N,K) of any type, for more rows than a matvec takes.
//
// A block makes a tile of the result. Activations come as halves from a pass over the input (gemm_rows.hip), with a
// power of two for each row kept apart. Weights are read as they lie in the file, once for each tile of rows: 16 or 32
// columns of a row to a thread, which unpacks them to halves in LDS while the matrix units work on the step before.
// Where the hardware copies to LDS in the background (`Staged`) the file's bytes pass through LDS too, 16 at a time
// whatever their alignment. One barrier a step: B has two buffers, A as many as copies need.
//
// A result's bits depend on its own row and on the weights: products are summed in float in the order of columns, in
// splits that follow from N, K and the device alone.
//
// Bytes moved: weights once for each tile of rows (256; 128 without staging; 64 of small blocks), halves of activations
// once for each tile of columns (128; 64), 4 T N of results. Measured on an H200, 512 rows at 14336x4096, as a share of
// torch's bf16 product (480 TFLOP/s): Q4_0 .58, Q2_K .56, MXFP4 .56, Q4_K .53, F16 .53, Q8_0 .52, BF16 .51, Q6_K .51,
// Q5_K .49, IQ2_XXS .48. On gfx1151 a wave's step is 16 WMMA (512 cycles) to about 65 VALU instructions of Q4_0, 110 of
// Q4_K: a WMMA to 18 bytes of either, six waves a SIMD.
#pragma once

#include "activation.h"
#include "gemm_args.h"
#include "gemm_unpack.h"
#include "matrix.h"
#include "tile.h"

namespace apu::gpu {

// The end of a product: bias and a pair's activation are done, n counts the columns of side 0.
APU_DEVICE void gemm_finish(const GemmArgs &g, u32 row, u32 n, float v) {
  const u64 at = u64(row) * g.sides[0].w.rows + n;
  if (g.gate) v = gated_activation(g.activation, g.limit, g.gate[at], v);
  if (g.soft_cap != 0) v = soft_cap(v, g.soft_cap);
  if (g.residual) v += g.residual[at];
  g.sides[0].out[at] = v;
}
APU_DEVICE float gemm_bias(const GemmSide &side, u32 expert, u32 n, float v) {
  return side.bias ? v + side.bias[u64(expert) * side.w.rows + n] : v;
}
APU_DEVICE void gemm_store(const GemmArgs &g, u32 m, u32 expert, u32 row, u32 n, float v) {
  const GemmSide &side = g.sides[m];
  v = gemm_bias(side, expert, n, v);
  if (m == 0) return gemm_finish(g, row, n, v);
  side.out[u64(row) * side.w.rows + n] = v;
}
APU_DEVICE void gemm_store_gated(const GemmArgs &g, u32 expert, u32 row, u32 n, float gate, float up) {
  gate = gemm_bias(g.sides[0], expert, n, gate);
  up = gemm_bias(g.sides[1], expert, n, up);
  gemm_finish(g, row, n, gated_activation(g.activation, g.limit, gate, up));
}

// Waves side by side: those whose parts of the tile are closest to squares, which read the least of A and B.
constexpr u32 gemm_waves_n(u32 rows, u32 columns, u32 waves) {
  u32 best = 0, least = ~0u;
  for (u32 n = 1; n <= waves; n *= 2) {
    const u32 part = rows / (waves / n) + columns / n;
    if (rows % (16 * (waves / n)) || columns % (32 * n) || part >= least) continue;
    least = part;
    best = n;
  }
  return best;
}

template <class Weights, u32 Rows, u32 Columns, u32 Depth, u32 Unit, bool Staged> struct Gemm {
  static constexpr GemmShape shape{Rows, Columns, Depth, Unit};
  static constexpr u32 stride = shape.stride();
  static constexpr u32 threads = shape.threads(), waves = threads / kWaveSize;
  static constexpr u32 waves_n = gemm_waves_n(Rows, Columns, waves), waves_m = waves / waves_n;
  static constexpr u32 wave_rows = Rows / waves_m, wave_columns = Columns / waves_n;
  static constexpr u32 tiles_m = wave_rows / 16, tiles_n = wave_columns / 16;
  static constexpr u32 a_stages = gemm_a_stages(Staged), a_lead = a_stages - 1;
  static constexpr bool raw = Staged && Weights::can_stage;
  static constexpr u32 chunk_columns = Weights::chunk_columns, chunk_bytes = Weights::chunk_bytes;
  static constexpr u32 chunk_steps = chunk_columns / Depth;
  static constexpr u32 chunk_stride = gemm_chunk_stride(chunk_bytes), chunk_pieces = chunk_stride / 16;
  static constexpr u32 chunk_stages = gemm_chunk_stages(chunk_columns, Depth);
  static constexpr GemmLayout layout = gemm_layout(shape, Staged, chunk_columns, raw ? chunk_bytes : 0);
  static constexpr u32 line = 36;                             // floats of a row of results in LDS
  static constexpr u32 a_pieces = Rows * Depth / 8 / threads; // 16-byte pieces of A a thread copies in a step
  static_assert(waves_m * waves_n == waves && tiles_n % 2 == 0 && a_pieces * threads * 8 == Rows * Depth);

  const GemmArgs &g;
  u8 *const lds = dynamic_shared();
  u64 *const addresses = reinterpret_cast<u64 *>(lds + layout.addresses); // of the tile's rows of weights
  u32 *const out_rows = reinterpret_cast<u32 *>(lds + layout.rows);
  float *const scales = reinterpret_cast<float *>(lds + layout.scales);
  u16 *const a_tiles = reinterpret_cast<u16 *>(lds + layout.a);
  u16 *const b_tiles = reinterpret_cast<u16 *>(lds + layout.b);
  u8 *const chunks = lds + layout.raw;
  u32 count = 0;   // rows of this tile
  u32 side = 0;    // 0 where it is gated
  u32 n_begin = 0; // first column
  u32 head = 0;    // of this launch, where there are heads
  u32 expert = 0;  // or head
  u32 pass_steps = 0;
  u64 a_from = 0, a_next_row = 0; // of this thread's first piece of A, and to the next
  u32x4 pieces[Staged ? 1 : a_pieces];

  APU_METHOD explicit Gemm(const GemmArgs &args) : g(args) {}

  // Where the block stands; false where there is nothing to do.
  APU_METHOD bool place() {
    const u32 row_tile = block_id() % g.row_tiles, column_tile = block_id() / g.row_tiles;
    u32 begin = row_tile * Rows, a_begin = 0;
    if (g.tiles) {
      if (row_tile >= *g.tile_count) return false;
      const ExpertTile tile = g.tiles[row_tile];
      expert = tile.expert;
      begin = tile.begin;
      count = tile.count;
    } else {
      const u32 rows = g.output_rows ? g.counts->outputs : g.counts->rows;
      if (begin >= rows) return false;
      count = rows - begin < Rows ? rows - begin : Rows;
      if (g.heads) {
        head = block_id_y();
        expert = g.head_begin + head;
        a_begin = head * g.max_rows;
      }
    }
    if (g.pair) {
      n_begin = column_tile * (Columns / 2);
    } else {
      for (side = 0; side + 1 < g.side_count && column_tile >= g.sides[side + 1].tile_begin;) ++side;
      n_begin = (column_tile - g.sides[side].tile_begin) * Columns;
    }
    for (u32 r = thread_id(); r < Columns; r += threads) {
      const Matrix &w = g.sides[g.pair ? r / 16 % 2 : side].w;
      const u32 n = n_begin + (g.pair ? r / 32 * 16 + r % 16 : r);
      addresses[r] = reinterpret_cast<u64>(matrix_row(w, u64(expert) * w.rows + (n < w.rows ? n : w.rows - 1)));
    }
    for (u32 r = thread_id(); r < Rows; r += threads) { // rows beyond `count` are not stored
      const u32 at = begin + (r < count ? r : count - 1);
      out_rows[r] = g.tiles ? g.pairs[at] : at;
      scales[r] = g.a_scale[a_begin + at];
    }
    const u32 row = a_begin + begin + thread_id() / (Depth / 8), row_halves = g.passes * g.columns;
    a_from = reinterpret_cast<u64>(g.a + u64(row) * row_halves + thread_id() % (Depth / 8) * 8);
    a_next_row = u64(threads / (Depth / 8)) * row_halves * 2;
    pass_steps = g.passes == 1 ? (g.k + Depth - 1) / Depth : g.columns / Depth;
    block_sync();
    return true;
  }

  // Pieces [i, i + n) of A at a step: begun early, ended where their place in LDS is free. What lies beyond the last
  // row and the last column is read and not used.
  APU_METHOD u16 *a_to(u32 stage, u32 i) const {
    const u32 at = thread_id() + i * threads;
    return a_tiles + (stage * Rows + at / (Depth / 8)) * stride + at % (Depth / 8) * 8;
  }
  APU_METHOD void begin_a(u32 step, u32 stage, u32 begin = 0, u32 n = a_pieces) {
#pragma unroll
    for (u32 i = begin; i < begin + n; ++i) {
      const void *const from = global_pointer<const u8>(a_from + i * a_next_row + u64(step) * (Depth * 2));
      if constexpr (Staged)
        copy16_async(a_to(stage, i), from);
      else
        pieces[i] = load16(from);
    }
  }
  APU_METHOD void end_a(u32 stage) {
    if constexpr (!Staged) {
#pragma unroll
      for (u32 i = 0; i < a_pieces; ++i) store16(a_to(stage, i), pieces[i]);
    }
  }

  // The file's bytes of chunk c of every row; chunks of a second pass are those of the first.
  APU_METHOD void copy_chunk(u32 c, u32 chunk_end) {
    if (c >= chunk_end) return;
    const u32 of_pass = g.columns / chunk_columns, offset = (c < of_pass ? c : c - of_pass) * chunk_bytes;
    const u32 rest = Weights::row_bytes(g.k) - offset;
    u8 *const to = chunks + c % chunk_stages * (Columns * chunk_stride);
#pragma unroll
    for (u32 i = 0; i < (Columns * chunk_pieces + threads - 1) / threads; ++i) {
      const u32 at = thread_id() + i * threads, row = at / chunk_pieces, piece = at % chunk_pieces;
      if (Columns * chunk_pieces % threads && at >= Columns * chunk_pieces) continue;
      const u64 first = addresses[row] + offset;
      const u32 low = u32(first) % 16, last = (rest + low - 1) / 16; // pieces beyond the row repeat its last one
      copy16_async(to + row * chunk_stride + piece * 16,
                   global_pointer<const u8>(first - low + (piece < last ? piece : last) * 16));
    }
  }

  // Float rows may end within a chunk: what lies beyond them in LDS becomes zero.
  APU_METHOD void clear_tail(u32 step) {
    if constexpr (raw && Weights::any_k) {
      if (step >= pass_steps || (step + 1) * Depth <= g.k) return;
      for (u32 row = thread_id(); row < Columns; row += threads) {
        const u32 low = (u32(addresses[row]) + step * chunk_bytes) % 16;
        u8 *const to = chunks + (step % chunk_stages * Columns + row) * chunk_stride;
        for (u32 i = low + Weights::row_bytes(g.k) - step * chunk_bytes; i < chunk_stride; ++i) to[i] = 0;
      }
      block_sync();
    }
  }

  // This thread's weights at a step, to LDS. Beyond K and after the last step they are other ones times zero.
  struct Place {
    const u8 *p;
    u16 *to;
    u32 at, type, k;
    float power;
  };
  APU_METHOD Place place_weights(u32 step, u32 end, u32 stage, float power) const {
    const u32 row = thread_id() / (Depth / Unit), part = thread_id() % (Depth / Unit);
    const u32 now = step < end ? step : end - 1,
              kstep = now < pass_steps ? now : now - pass_steps; // two passes at most
    const u32 last = (g.k + Unit - 1) / Unit - 1, wanted = kstep * (Depth / Unit) + part;
    const u32 at = wanted < last ? wanted : last, chunk = kstep / chunk_steps;
    Place w;
    if constexpr (raw) {
      const u32 low = (u32(addresses[row]) + chunk * chunk_bytes) % 16;
      w.p = chunks + (now / chunk_steps % chunk_stages * Columns + row) * chunk_stride + low;
    } else {
      w.p = global_pointer<const u8>(addresses[row] + u64(chunk) * chunk_bytes);
    }
    w.to = b_tiles + (stage * Columns + row) * stride + part * Unit;
    w.at = (at - chunk * (chunk_columns / Unit)) * (Unit / 16);
    // What each of many types makes of a place stays inside the loop: there are fewer registers than types.
    if constexpr (!Weights::can_stage) hide(w.at);
    w.type = g.sides[g.pair ? row / 16 % 2 : side].w.type;
    w.k = g.k - chunk * chunk_columns;
    w.power = wanted > last ? 0 : power;
    return w;
  }
  // n times 16 of them from the first on.
  template <u32 n> APU_METHOD void unpack(const Place &w, u32 first, float &bound) const {
    u32 words[8 * n];
#pragma unroll
    for (u32 h = 0; h < n; ++h)
      Weights::template unpack<raw>(w.type, w.p, w.at + first + h, w.k, w.power, words + 8 * h, bound);
#pragma unroll
    for (u32 i = 0; i < 2 * n; ++i)
      store16(w.to + 16 * first + 8 * i, u32x4{words[4 * i], words[4 * i + 1], words[4 * i + 2], words[4 * i + 3]});
  }

  // Products of a step, between which the next one's weights are unpacked and A of a later one is read. Where registers
  // suffice (`Staged`) tiles are loaded 16 columns ahead.
  APU_METHOD void multiply(u32 step, u32 a_stage, u32 a_later, u32 b_stage, const Place &next, float &bound,
                           TileC (&c)[tiles_m][tiles_n]) {
    constexpr u32 ahead = Staged ? 2 : 1, parts = Depth / 16;
    const u16 *const a_at = a_tiles + (a_stage * Rows + wave_uniform(wave_id()) / waves_n * wave_rows) * stride;
    const u16 *const b_at = b_tiles + (b_stage * Columns + wave_uniform(wave_id()) % waves_n * wave_columns) * stride;
    TileA a[ahead][tiles_m];
    TileB b[ahead][tiles_n];
    const auto load = [&](u32 part) {
#pragma unroll
      for (u32 i = 0; i < tiles_m; ++i) tile_load_a(a[part % ahead][i], a_at + i * 16 * stride + part * 16, stride);
#pragma unroll
      for (u32 j = 0; j < tiles_n; ++j) tile_load_b(b[part % ahead][j], b_at + j * 16 * stride + part * 16, stride);
    };
    if (ahead == 2) load(0);
#pragma unroll
    for (u32 part = 0; part < parts; ++part) {
      if (ahead == 1) load(part);
      if (ahead == 2 && part + 1 < parts) load(part + 1);
#pragma unroll
      for (u32 i = 0; i < a_pieces; ++i)
        if (Staged && i * parts / a_pieces == part) begin_a(step + a_lead, a_later, i, 1);
      if constexpr (Weights::shares_loads) { // of two halves of a block
        if (part == parts / 2) unpack<Unit / 16>(next, 0, bound);
      } else if (part * Unit / 16 % parts == 0) {
        unpack<1>(next, part * Unit / 16 / parts, bound);
      }
#pragma unroll
      for (u32 j = 0; j < tiles_n; ++j)
#pragma unroll
        for (u32 i = 0; i < tiles_m; ++i) tile_multiply(c[i][j], a[part % ahead][i], b[part % ahead][j]);
    }
  }

  // All steps of this split; returns the largest magnitude of this thread's weights times power, or more.
  APU_METHOD float steps(float power, TileC (&c)[tiles_m][tiles_n]) {
#pragma unroll
    for (u32 i = 0; i < tiles_m; ++i)
#pragma unroll
      for (u32 j = 0; j < tiles_n; ++j) tile_zero(c[i][j]);
    const u32 all = g.passes * pass_steps, begin = g.heads ? 0 : block_id_y() * g.split_steps;
    const u32 end = all - begin < g.split_steps ? all : begin + g.split_steps;
    const u32 chunk_end = (end + chunk_steps - 1) / chunk_steps;
    if constexpr (raw)
      for (u32 i = 0; i + 1 < chunk_stages; ++i) copy_chunk(begin / chunk_steps + i, chunk_end);
    begin_a(begin, 0);
    copy_commit();
    copy_wait<0>();
    end_a(0);
    block_sync();
    if constexpr (Staged) {
      begin_a(begin + 1, 1);
      if constexpr (raw) copy_chunk(begin / chunk_steps + chunk_stages - 1, chunk_end);
      copy_commit();
    }
    clear_tail(begin);
    float bound = 0;
    unpack<Unit / 16>(place_weights(begin, end, 0, power), 0, bound);
    u32 a_now = 0, a_later = a_lead;
    const bool active = wave_uniform(wave_id()) / waves_n * wave_rows < count;
    for (u32 step = begin; step < end; ++step) { // multiplies `step`, unpacks the one after it
      const u32 next_stage = (step + 1 - begin) % 2;
      if constexpr (Staged) copy_wait<1>();
      block_sync();
      if constexpr (raw)
        if ((step + 1 - begin) % chunk_steps == 0) copy_chunk((step + 1) / chunk_steps + chunk_stages - 1, chunk_end);
      clear_tail(step + 1);
      if constexpr (!Staged) begin_a(step + 1, 0);
      const Place next = place_weights(step + 1, end, next_stage, power);
      if (active) {
        multiply(step, a_now, a_later, 1 - next_stage, next, bound, c);
      } else {
        if constexpr (Staged) begin_a(step + a_lead, a_later);
        unpack<Unit / 16>(next, 0, bound);
      }
      copy_commit();
      end_a(next_stage);
      a_now = a_now + 1 == a_stages ? 0 : a_now + 1;
      a_later = a_later + 1 == a_stages ? 0 : a_later + 1;
    }
    return bound;
  }

  // Up to 32 rows and 32 columns at a time through LDS, each wave its own part of what A and B took; then results of a
  // row lie together. Of a gated pair they are 16 of the gate and 16 of up.
  APU_METHOD void finish(float power, const TileC (&c)[tiles_m][tiles_n]) const {
    constexpr u32 group = tiles_m < 2 ? 1 : 2; // tiles of rows
    static_assert(waves * group * 16 * line * 4 <= layout.raw - layout.a && tiles_m % group == 0);
    float *const own = reinterpret_cast<float *>(a_tiles) + wave_id() * group * 16 * line;
    const float inverse = 1.0f / power;
#pragma unroll
    for (u32 i = 0; i < tiles_m; i += group)
#pragma unroll
      for (u32 j = 0; j < tiles_n; j += 2) {
#pragma unroll
        for (u32 t = 0; t < group * 2; ++t)
#pragma unroll
          for (u32 r = 0; r < kTileRegisters; ++r)
            own[(16 * (t / 2) + tile_row(r)) * line + 16 * (t % 2) + tile_column(r)] =
                c[i + t / 2][j + t % 2].v[r] * inverse;
        wave_sync();
        store_group<group>(own, wave_id() / waves_n * wave_rows + 16 * i, wave_id() % waves_n * wave_columns + 16 * j);
        wave_sync();
      }
  }
  // Lanes keep to their column. Results that nothing is done to but a bias go out eight rows at a time.
  template <u32 Group> APU_METHOD void store_group(const float *from, u32 row_begin, u32 column_begin) const {
    const u32 rows = count > row_begin ? (count - row_begin < 16 * Group ? count - row_begin : 16 * Group) : 0;
    const u32 width = g.pair && !g.partial ? 16 : 32, own = lane_id() % width, first = lane_id() / width;
    const u32 m = g.pair ? own / 16 : side, n_count = g.sides[m].w.rows;
    const u32 n = n_begin + (g.pair ? column_begin / 2 + own % 16 : column_begin + own);
    if (n >= n_count) return;
    const u32 *const places = out_rows + row_begin;
    const float *const powers = scales + row_begin;
    if (g.partial || !(g.pair || (m == 0 && (g.gate || g.residual || g.soft_cap != 0)))) {
      const float bias = g.partial ? 0.0f : gemm_bias(g.sides[m], expert, n, 0.0f);
      const u64 row_stride = g.partial ? g.all_columns : g.heads ? g.out_width : n_count;
      float *const to = global_pointer<float>(reinterpret_cast<u64>(
          g.partial ? g.partial + u64(block_id_y()) * g.max_rows * g.all_columns + g.sides[m].column_begin + n
                    : g.sides[m].out + u64(g.head_begin + head) * g.head_width + n));
#pragma unroll 8
      for (u32 r = first; r < rows; r += kWaveSize / 32)
        to[places[r] * row_stride] = fma_f32(from[r * line + own], powers[r], bias);
      return;
    }
#pragma unroll 2
    for (u32 r = first; r < rows; r += kWaveSize / width) {
      const float v = from[r * line + own] * powers[r];
      if (g.pair)
        gemm_store_gated(g, expert, places[r], n, v, from[r * line + own + 16] * powers[r]);
      else
        gemm_store(g, m, expert, places[r], n, v);
    }
  }

  APU_METHOD void run() {
    if (!place()) return;
    TileC c[tiles_m][tiles_n];
    float power = 1;
    for (u32 again = 0; again < 2; ++again) {
      const float own = steps(power, c);
      copy_wait<0>();
      const float bound = block_max(own, reinterpret_cast<float *>(lds + layout.bounds), waves);
      if (bound == 0 || (bound >= kTileLow && bound < kTileHigh) || !(bound < 3.4e38f)) break;
      power = bits_to_float((254 + 13 - (float_to_bits(bound) >> 23)) << 23); // the bound comes to [2^13, 2^14)
      block_sync();
    }
    finish(power, c);
  }
};

constexpr GemmShape kSmallShape = kStagedTiles ? kGemmSmall : kGemmSmallDirect;
constexpr GemmShape kLargeShape = kStagedTiles ? kGemmLarge : kGemmLargeDirect;
template <class Weights, GemmShape s> using GemmOf = Gemm<Weights, s.rows, s.columns, s.depth, s.unit, kStagedTiles>;

// The kernels of a type: small blocks, for few rows of activations, and large ones.
#define APU_GEMM(type, ...)                                                                                            \
  APU_KERNEL((kSmallShape.threads())) void gemm_##type##_small(GemmArgs g) {                                           \
    GemmOf<__VA_ARGS__, kSmallShape>(g).run();                                                                         \
  }                                                                                                                    \
  APU_KERNEL((kLargeShape.threads())) void gemm_##type##_large(GemmArgs g) {                                           \
    GemmOf<__VA_ARGS__, kLargeShape>(g).run();                                                                         \
  }

// Adds splits in their order; a thread makes one element of a row, of sides 0 and 1 at once where they are gated.
APU_DEVICE float gemm_sum(const GemmReduceArgs &a, u32 row, u32 column) {
  const GemmArgs &g = a.gemm;
  float sum = 0;
  for (u32 s = 0; s < a.splits; ++s) sum += g.partial[(u64(s) * g.max_rows + row) * g.all_columns + column];
  return sum;
}
APU_DEVICE void gemm_reduce_row(const GemmReduceArgs &a, u32 threads) {
  const GemmArgs &g = a.gemm;
  const u32 row = block_id_y();
  if (row >= (g.output_rows ? g.counts->outputs : g.counts->rows)) return;
  u32 n = block_id() * threads + thread_id();
  if (g.pair) {
    if (n < g.sides[0].w.rows)
      gemm_store_gated(g, 0, row, n, gemm_sum(a, row, n), gemm_sum(a, row, g.sides[1].column_begin + n));
    return;
  }
  if (n >= g.all_columns) return;
  u32 m = 0;
  while (m + 1 < g.side_count && n >= g.sides[m + 1].column_begin) ++m;
  gemm_store(g, m, 0, row, n - g.sides[m].column_begin, gemm_sum(a, row, n));
}

} // namespace apu::gpu
