// Attention over rows that are key and value of all heads, on matrix tiles: one block, 16 or 64 query vectors, and
// whatever rows a Source names.
//
// Of each tile of 32 or 64 rows C: S^T (rows, vectors) = C Q^T, parts of which the waves share; an online softmax in
// float32 down its columns; O^T (values, vectors) += C^T P^T, of which each wave has an eighth of the values. A tile is
// read from memory once, into LDS, and from there as key and as value. Where there are bulk copies the next F16 tile is
// on its way meanwhile; else it waits in registers, where Q8_0 becomes halves (quants times scales, rounded to a half).
// Queries times the scale and exponentials are rounded to halves; scores are in units of log 2.
//
// A vector's bits depend on its query and its rows alone: on `begin` / tile, on the order of rows, on 16 or 64 vectors,
// not on the other vectors.
//
// A Source is a struct of
//   RowAddress row(i)      where row i lies; begin <= i < end
//   bool sees(v, i)        whether vector v attends row i
//   bool all(begin, end)   whether all vectors attend all of these rows
#pragma once

#include "attention_tile.h"

namespace apu::gpu {

struct RowAddress {
  const u8 *elements, *scales; // scales of Q8_0: a half for each 32 elements; elements 16-byte aligned
};

// Row r of a page whose rows lie as keys.
template <u32 Type> APU_DEVICE RowAddress latent_row(const PagedState &state, u32 page, u32 r) {
  const u8 *part = page_part(state, page, 0);
  const u32 d = state.head_size;
  if constexpr (Type == kF16) return {part + r * d * 2, nullptr};
  return {part + kv_quant_offset<false>(r, 0, d), part + kv_scale_offset<false>(r, 0, d)};
}

template <u32 Type, u32 Vectors> struct LatentTile {
  static constexpr u32 rows = latent_rows(Vectors), row_tiles = rows / 16, head_tiles = Vectors / 16;
  static constexpr u32 score_tiles = row_tiles * head_tiles, stride = kLatentStride;
  // Tiles of scores: several of a wave, in a row of them, or one of several waves, each with a part of the elements.
  static constexpr u32 own_tiles = score_tiles > kLatentWaves ? score_tiles / kLatentWaves : 1;
  static constexpr u32 parts = score_tiles < kLatentWaves ? kLatentWaves / score_tiles : 1;
  static constexpr u32 value_tiles = kLatentValue / 16 / kLatentWaves; // of a wave
  static constexpr u32 own = own_tiles * kTileOwn;                     // columns of scores of a lane
  static constexpr u32 threads = kLatentWaves * kWaveSize;
  static constexpr bool ring = kBulkCopy && Type == kF16;
  static constexpr LatentLayout layout = latent_layout(Vectors, ring);
  static constexpr u32 piece = Type == kF16 ? 8 : 16; // elements of 16 bytes
  static constexpr u32 pieces = ring ? 1 : (rows * kLatentKey / piece + threads - 1) / threads;
  static_assert(own_tiles * kLatentWaves == score_tiles || parts * score_tiles == kLatentWaves);

  u32 d, dv; // multiples of 16, of 32 where the type has blocks
  float cap;
  u32 wave = wave_uniform(wave_id());
  u32 row_tile = wave % row_tiles, head_tile = wave / row_tiles % (head_tiles / own_tiles) * own_tiles;
  u32 part = wave / (row_tiles * (head_tiles / own_tiles));
  u16 *const queries = reinterpret_cast<u16 *>(dynamic_shared()); // (Vectors, stride)
  u16 *const tiles = reinterpret_cast<u16 *>(dynamic_shared() + layout.tiles);
  float *const maxima = reinterpret_cast<float *>(dynamic_shared() + layout.maxima); // (Vectors, row tiles); sums
  float *const factors = reinterpret_cast<float *>(dynamic_shared() + layout.factors);
  SharedAddress shared_tiles = shared_address(dynamic_shared() + layout.tiles);
  SharedAddress barriers = shared_address(dynamic_shared() + layout.barriers);
  float max[own], sum[own];
  TileC o[value_tiles][head_tiles];
  u32x4 held[pieces];

  APU_METHOD LatentTile(u32 key, u32 value, float soft_cap) : d(key), dv(value), cap(soft_cap) {}

  // Queries to LDS by all threads: `from(v)` is vector v's, 16-byte aligned, null for none.
  template <class From> APU_METHOD void load_queries(float scale, From from) {
    constexpr u32 each = Vectors / kLatentWaves, together = 2, steps = (kLatentKey / 4 + kWaveSize - 1) / kWaveSize;
    scale = cap != 0.0f ? scale : scale * kLog2E;
#pragma unroll 1
    for (u32 i = 0; i < each; i += together) {
      u32x4 x[together][steps];
#pragma unroll
      for (u32 t = 0; t < together; ++t) {
        const u64 of = u64(from(wave + (i + t) * kLatentWaves));
#pragma unroll
        for (u32 s = 0; s < steps; ++s) {
          const u32 m = 4 * (s * kWaveSize + lane_id());
          x[t][s] = u32x4{0, 0, 0, 0};
          if (of && m < d) x[t][s] = load16(global_pointer<const float>(of) + m);
        }
      }
#pragma unroll
      for (u32 t = 0; t < together; ++t) {
        u16 *to = queries + (wave + (i + t) * kLatentWaves) * stride;
#pragma unroll
        for (u32 s = 0; s < steps; ++s) {
          const u32 m = 4 * (s * kWaveSize + lane_id());
          if (m >= d) continue;
          float v[4];
#pragma unroll
          for (u32 e = 0; e < 4; ++e) v[e] = bits_to_float(x[t][s][e]) * scale;
          *reinterpret_cast<u32x2 *>(to + m) = u32x2{floats_to_halves(v[0], v[1]), floats_to_halves(v[2], v[3])};
        }
      }
    }
  }

  // All rows [begin, end), in tiles that begin at multiples. prepare() loads the queries, while rows are on their way.
  template <class Source, class Prepare>
  APU_METHOD void attend(const Source &source, u32 begin, u32 end, Prepare prepare) {
    RowAddress *const addresses = reinterpret_cast<RowAddress *>(dynamic_shared() + layout.addresses);
#pragma unroll
    for (u32 j = 0; j < own; ++j) {
      max[j] = kMinusInfinity;
      sum[j] = 0.0f;
    }
#pragma unroll
    for (u32 n = 0; n < value_tiles; ++n)
#pragma unroll
      for (u32 h = 0; h < head_tiles; ++h) tile_zero(o[n][h]);
    const u32 first = begin / rows * rows;
    // Rows of a tile that are not attended are others, times zero.
    auto address = [&](u32 base) {
      const u32 i = base + thread_id() < begin ? begin : base + thread_id();
      return source.row(i < end ? i : end - 1);
    };
    RowAddress next = {};
    if constexpr (ring) {
      if (thread_id() == 0) {
        bulk_init(barriers, rows);
        bulk_init(barriers + 8, rows);
      }
      if (thread_id() < rows) next = address(first);
      block_sync();
      if (thread_id() < rows) {
        copy(next, 0);
        next = address(first + rows);
      }
      prepare();
    } else {
      if (thread_id() < rows) {
        addresses[thread_id()] = address(first);
        next = address(first + rows);
      }
      block_sync();
      fetch(addresses);
      prepare();
      put(addresses, tiles);
    }
    block_sync();
    u32 now = 0, round = 0;
    for (u32 base = first; base < end; base += rows) {
      u16 *const c = tiles + (ring ? now * rows * stride : 0);
      if constexpr (ring) {
        if (thread_id() < rows && base + rows < end) {
          copy(next, 1 - now);
          next = address(base + 2 * rows);
        }
        bulk_wait(barriers + 8 * now, round);
      } else if (thread_id() < rows) {
        addresses[thread_id()] = next;
        next = address(base + 2 * rows);
      }
      TileC s[own_tiles];
      multiply_keys(c, s);
      if (part == 0) begin_softmax(source, s, base, begin, end);
      block_sync(); // of keys nothing is read any more
      u16 *const p = c + kLatentValue;
      if (part == 0) end_softmax(s, p);
      if constexpr (!ring) {
        if (base + rows < end) fetch(addresses);
      }
      block_sync();
      multiply_values(c, p);
      if constexpr (ring) {
        bulk_fence(); // exponentials were written where the copies go
        round ^= now;
        now = 1 - now;
      }
      block_sync();
      if constexpr (!ring) {
        if (base + rows < end) put(addresses, tiles);
        block_sync();
      }
    }
  }

  // Hands on what all vectors have: `out(v, max, sum, leads)` gives where vector v's values go, null for nowhere, and
  // what they are multiplied with. One thread of those that share a vector `leads`.
  template <class Out> APU_METHOD void finish(Out out) {
    if (part == 0) {
#pragma unroll
      for (u32 j = 0; j < own; ++j) {
        const float total = tile_column_sum(sum[j]);
        if (tile_row(0) != 0) continue;
        maxima[column(j) * row_tiles + row_tile] = total;
        if (row_tile == 0) factors[column(j)] = max[j] * kLn2;
      }
    }
    block_sync();
#pragma unroll
    for (u32 h = 0; h < head_tiles; ++h)
#pragma unroll
      for (u32 j = 0; j < kTileOwn; ++j) {
        const u32 v = 16 * h + tile_own_column(j);
        float total = 0.0f;
#pragma unroll
        for (u32 t = 0; t < row_tiles; ++t) total += maxima[v * row_tiles + t];
        const Place to = out(v, factors[v], total, wave == 0 && tile_row(0) == 0);
        if (!to.values) continue;
        float *const values = global_pointer<float>(u64(to.values));
#pragma unroll
        for (u32 i = 0; i < kTileRegisters; ++i) {
          if (tile_own(i) != j) continue;
#pragma unroll
          for (u32 n = 0; n < value_tiles; ++n)
            if (value_tile(n) < dv) values[value_tile(n) + tile_row(i)] = o[n][h].v[i] * to.factor;
        }
      }
  }
  struct Place {
    float *values;
    float factor;
  };

private:
  APU_METHOD u32 column(u32 j) const { return 16 * (head_tile + j / kTileOwn) + tile_own_column(j % kTileOwn); }
  APU_METHOD u32 value_tile(u32 n) const { return 16 * (wave * value_tiles + n); }

  APU_METHOD void copy(const RowAddress &from, u32 to) const {
    bulk_expect(barriers + 8 * to, 2 * d);
    bulk_copy(shared_tiles + (to * rows + thread_id()) * (stride * 2), from.elements, 2 * d, barriers + 8 * to);
  }

  // Pieces of the tile: this thread's ith, in order of rows.
  struct Piece {
    u32 row, element;
  };
  APU_METHOD Piece piece_of(u32 i) const {
    const u32 of_row = d / piece, at = i * threads + thread_id();
    const u32 row = at * ((1u << 20) / of_row + 1) >> 20; // at / of_row
    return {row, (at - row * of_row) * piece};
  }
  APU_METHOD void fetch(const RowAddress *addresses) {
#pragma unroll
    for (u32 i = 0; i < pieces; ++i) {
      const Piece p = piece_of(i);
      if (p.row >= rows) continue;
      held[i] = load16(global_pointer<const u8>(u64(addresses[p.row].elements)) + p.element * (16 / piece));
    }
  }
  APU_METHOD void put(const RowAddress *addresses, u16 *c) const {
    u32 scales[Type == kQ8 ? pieces : 1]; // held they would be too many
    if constexpr (Type == kQ8) {
#pragma unroll
      for (u32 i = 0; i < pieces; ++i) {
        const Piece p = piece_of(i);
        if (p.row < rows) scales[i] = global_pointer<const u16>(u64(addresses[p.row].scales))[p.element / kScaleBlock];
      }
    }
#pragma unroll
    for (u32 i = 0; i < pieces; ++i) {
      const Piece p = piece_of(i);
      if (p.row >= rows) continue;
      u16 *to = c + p.row * stride + p.element;
      if constexpr (Type == kF16) {
        store16(to, held[i]);
      } else {
        const u32 pair = scales[i] | scales[i] << 16;
        u32 words[8];
#pragma unroll
        for (u32 j = 0; j < 4; ++j) bytes_to_halves(held[i][j], words + 2 * j);
#pragma unroll
        for (u32 j = 0; j < 8; ++j) words[j] = half2_mul(words[j], pair);
        store16(to, u32x4{words[0], words[1], words[2], words[3]});
        store16(to + 8, u32x4{words[4], words[5], words[6], words[7]});
      }
    }
  }

  // Tiles of scores of the waves whose part is 0.
  APU_METHOD void multiply_keys(const u16 *c, TileC (&s)[own_tiles]) const {
#pragma unroll
    for (u32 h = 0; h < own_tiles; ++h) tile_zero(s[h]);
    const u16 *const a_at = c + 16 * row_tile * stride, *const b_at = queries + 16 * head_tile * stride;
    const u32 steps = d / 16, last = steps * (part + 1) / parts;
#pragma unroll kBulkCopy ? 4 : 1
    for (u32 step = steps * part / parts; step < last; ++step) {
      TileA a;
      tile_load_a(a, a_at + 16 * step, stride);
      TileB b[own_tiles];
#pragma unroll
      for (u32 h = 0; h < own_tiles; ++h) tile_load_b(b[h], b_at + 16 * (h * stride + step), stride);
#pragma unroll
      for (u32 h = 0; h < own_tiles; ++h) tile_multiply(s[h], a, b[h]);
    }
    if constexpr (parts > 1) {
      float *const others = reinterpret_cast<float *>(dynamic_shared() + layout.scores) + wave % score_tiles * 256 +
                            lane_id(); // of this tile, (parts - 1, score tiles, 256)
      if (part > 0) {
#pragma unroll
        for (u32 i = 0; i < kTileRegisters; ++i) others[(part - 1) * score_tiles * 256 + i * kWaveSize] = s[0].v[i];
      }
      block_sync();
      if (part == 0) {
#pragma unroll
        for (u32 w = 0; w + 1 < parts; ++w)
#pragma unroll
          for (u32 i = 0; i < kTileRegisters; ++i) s[0].v[i] += others[w * score_tiles * 256 + i * kWaveSize];
      }
    }
  }

  // Scores become what counts, and their maxima go to LDS.
  template <class Source>
  APU_METHOD void begin_softmax(const Source &source, TileC (&s)[own_tiles], u32 base, u32 begin, u32 end) {
    if (cap != 0.0f) {
      const float inverse = 1.0f / cap;
#pragma unroll
      for (u32 h = 0; h < own_tiles; ++h)
#pragma unroll
        for (u32 i = 0; i < kTileRegisters; ++i) s[h].v[i] = cap_score(s[h].v[i], cap, inverse);
    }
    if (base < begin || base + rows > end || !source.all(base, base + rows)) {
#pragma unroll
      for (u32 h = 0; h < own_tiles; ++h)
#pragma unroll
        for (u32 i = 0; i < kTileRegisters; ++i) {
          const u32 row = base + 16 * row_tile + tile_row(i);
          const bool seen = row >= begin && row < end && source.sees(column(h * kTileOwn + tile_own(i)), row);
          s[h].v[i] = seen ? s[h].v[i] : kMinusInfinity;
        }
    }
#pragma unroll
    for (u32 j = 0; j < own; ++j) {
      float most = kMinusInfinity;
#pragma unroll
      for (u32 i = 0; i < kTileRegisters; ++i)
        if (tile_own(i) == j % kTileOwn) most = max_f32(most, s[j / kTileOwn].v[i]);
      most = tile_column_max(most);
      if (tile_row(0) == 0) maxima[column(j) * row_tiles + row_tile] = most;
    }
  }

  // Scores become exponentials, as halves p (vectors, rows), and what the accumulators shrink by is known.
  APU_METHOD void end_softmax(const TileC (&s)[own_tiles], u16 *p) {
#pragma unroll
    for (u32 j = 0; j < own; ++j) {
      float most = max[j];
#pragma unroll
      for (u32 t = 0; t < row_tiles; ++t) most = max_f32(most, maxima[column(j) * row_tiles + t]);
      const float from = most == kMinusInfinity ? 0.0f : most, shrink = exp2_f32(max[j] - from);
      max[j] = most;
      if (row_tile == 0 && tile_row(0) == 0) factors[column(j)] = shrink;
      float total = 0.0f;
#pragma unroll
      for (u32 i = 0; i < kTileRegisters; ++i) {
        if (tile_own(i) != j % kTileOwn) continue;
        const float e = exp2_f32(s[j / kTileOwn].v[i] - from);
        total += e;
        p[column(j) * stride + 16 * row_tile + tile_row(i)] = float_to_half(e);
      }
      sum[j] = fma_f32(sum[j], shrink, total);
    }
  }

  APU_METHOD void multiply_values(const u16 *c, const u16 *p) {
    float shrink[head_tiles][kTileOwn];
    bool any = false;
#pragma unroll
    for (u32 h = 0; h < head_tiles; ++h)
#pragma unroll
      for (u32 j = 0; j < kTileOwn; ++j) {
        shrink[h][j] = factors[16 * h + tile_own_column(j)];
        any = any || shrink[h][j] != 1.0f;
      }
    if (wave_any(any)) {
#pragma unroll
      for (u32 n = 0; n < value_tiles; ++n)
#pragma unroll
        for (u32 h = 0; h < head_tiles; ++h)
#pragma unroll
          for (u32 i = 0; i < kTileRegisters; ++i) o[n][h].v[i] *= shrink[h][tile_own(i)];
    }
#pragma unroll
    for (u32 t = 0; t < row_tiles; ++t) {
      TileB b[head_tiles];
#pragma unroll
      for (u32 h = 0; h < head_tiles; ++h) tile_load_b(b[h], p + 16 * (h * stride + t), stride);
#pragma unroll
      for (u32 n = 0; n < value_tiles; ++n) {
        if (value_tile(n) >= dv) continue;
        TileA a;
        tile_load_a_transposed(a, c + 16 * t * stride + value_tile(n), stride);
#pragma unroll
        for (u32 h = 0; h < head_tiles; ++h) tile_multiply(o[n][h], a, b[h]);
      }
    }
  }
};

} // namespace apu::gpu
