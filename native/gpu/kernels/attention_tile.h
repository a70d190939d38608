// Attention on matrix tiles over F16 and Q8_0 caches: one wave, 16 query vectors, 32 positions at a time.
//
// S^T (32 positions, vectors) = K Q^T, an online softmax in float32 down its columns, O^T (dv, vectors) += V^T P^T.
// Keys and values are the rows of A and go from device memory straight into registers, 16 bytes a lane, each element
// once; Q8_0 becomes halves on the way (quants times scales, rounded to a half). Exponentials become B where they are,
// since the order of the keys among S's rows is chosen so. Queries are halves in LDS. Scores are in units of log 2.
#pragma once

#include "attention_items.h"
#include "tile.h"

namespace apu::gpu {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;

// Head sizes of keys and values: `Most` itself, as constants, or up to it.
template <u32 Most, bool Exact> APU_DEVICE u32 key_size(const AttentionArgs &a) {
  if constexpr (Exact) return Most;
  return a.k_state.head_size;
}
template <u32 Most, bool Exact> APU_DEVICE u32 value_size(const AttentionArgs &a) {
  if constexpr (Exact) return Most;
  return a.v_state.head_size;
}

// What a lane knows of the vectors in its columns: the positions they see, their maxima, its rows' part of their sums.
template <bool Few> struct Columns {
  static constexpr u32 count = Few ? kTileFewOwn : kTileOwn, registers = Few ? kTileFewRegisters : kTileRegisters;
  u32 low[count], high[count]; // low > high: none
  float max[count], sum[count];
};

template <bool Few> APU_DEVICE Columns<Few> begin_columns(const AttentionArgs &a, const Item &item, u32 first_vector) {
  Columns<Few> out;
#pragma unroll
  for (u32 j = 0; j < out.count; ++j) {
    const u32 vector = first_vector + tile_own_column(j);
    const bool real = vector < item.rows * item.heads;
    out.high[j] = real ? item.position + row_of(a, vector) : 0;
    out.low[j] = real ? lowest_position(a, out.high[j]) : 1;
    out.max[j] = kMinusInfinity;
    out.sum[j] = 0.0f;
  }
  return out;
}

// Four biased bytes as two pairs of halves: 1024 + 128 + q is a half with the byte in its low bits.
APU_DEVICE void bytes_to_halves(u32 bytes, u32 *pairs) {
  pairs[0] = half2_add(byte_permute(bytes, 0x64646464u, 0x04010400u), 0xe480e480u);
  pairs[1] = half2_add(byte_permute(bytes, 0x64646464u, 0x04030402u), 0xe480e480u);
}

APU_DEVICE u32x4 load16_shared(const void *p) {
  return *static_cast<const u32x4 *>(p);
}
template <u32 Words> APU_DEVICE void load_words(const u8 *from, u32 *words) { // of device memory
  if constexpr (Words == 2) {
    const u32x2 v = *global_pointer<const u32x2>(u64(from));
    words[0] = v[0];
    words[1] = v[1];
  } else {
#pragma unroll
    for (u32 i = 0; i < Words; i += 4) {
      const u32x4 v = load16(from + 4 * i);
#pragma unroll
      for (u32 j = 0; j < 4; ++j) words[i + j] = v[j];
    }
  }
}
// Zero from element `end` on, of those that begin with `begin`.
APU_DEVICE void cut_line(u32 *words, u32 begin, u32 end) {
#pragma unroll
  for (u32 i = 0; i < kTileDepth; ++i) {
    const u32 at = begin + 2 * i;
    words[i] = at + 1 < end ? words[i] : at < end ? words[i] & 0xffffu : 0u;
  }
}

// Heads are taken in chunks, of 32 elements in F16 and of 64 in Q8_0, where a lane takes 16 bytes or more of one; the
// last chunk of a head overlaps the one before, and queries are 0 there.
template <u32 Type> constexpr u32 kChunk = Type == kF16 ? 32 : 64;
template <u32 Type> APU_DEVICE u32 chunk_begin(u32 chunk, u32 d) {
  return kChunk<Type> * chunk < d - kChunk<Type> ? kChunk<Type> * chunk : d - kChunk<Type>;
}

// Queries in LDS (vectors, kQueryStride) as B, for step c of 32 elements of K.
template <u32 Type, u32 Most, bool Few> APU_DEVICE void load_vectors(TileB (&b)[2], const u16 *q, u32 c) {
  TileLines lines = {};
  const u32 at =
      Type == kF16 ? 32 * c + tile_line_begin() : c / 2 * 64 + 2 * tile_line_begin() + c % 2 * 2 * kTileDepth;
#pragma unroll
  for (u32 i = 0; i < (Few ? 1 : kTileLines); ++i) {
    const u16 *row = q + tile_line_row(i) * kQueryStride<Most> + at;
#pragma unroll
    for (u32 j = 0; j < kTileDepth; j += 4) {
      const u32x4 v = load16_shared(row + 2 * j);
#pragma unroll
      for (u32 w = 0; w < 4; ++w) lines.v[i][j + w] = v[w];
    }
  }
  tile_lines_b(b, lines);
}

// One chunk of the positions of a page from r on that are the rows of tile t of S^T, as it comes from memory. Addresses
// are a part that is the same in all lanes and a lane's own that all chunks share.
template <u32 Type> struct Keys {
  u32 v[kTileLines][kTileDepth];
  u32 scales[kTileLines]; // of two blocks of Q8_0

  APU_METHOD void load(const u8 *part, u32 r, u32 t, u32 chunk, u32 d) {
    constexpr u32 bytes = Type == kF16 ? 2 : 1;
    const u32 begin = chunk_begin<Type>(chunk, d), blocks = d / kScaleBlock;
    const u8 *from = part + (r * d + begin) * bytes;
    const u8 *scales_from = part + kPageRows * d + (r * blocks + begin / kScaleBlock) * 2;
#pragma unroll
    for (u32 i = 0; i < kTileLines; ++i) {
      const u32 row = tile_line_index(t, tile_line_row(i));
      load_words<kTileDepth>(from + row * d * bytes + tile_line_begin() * 2, v[i]);
      if constexpr (Type == kQ8) {
        const u16 *p = global_pointer<const u16>(u64(scales_from + row * blocks * 2));
        scales[i] = u32(p[0]) | u32(p[1]) << 16;
      }
    }
  }

  // Step `half` of the chunk's steps of 32 elements.
  APU_METHOD void rows(TileA (&a)[2], u32 half) const {
    TileLines lines;
#pragma unroll
    for (u32 i = 0; i < kTileLines; ++i) {
      if constexpr (Type == kF16) {
#pragma unroll
        for (u32 j = 0; j < kTileDepth; ++j) lines.v[i][j] = v[i][j];
      } else {
        const u32 block = (2 * tile_line_begin() + half * 2 * kTileDepth) / kScaleBlock;
        const u32 scale = block ? scales[i] >> 16 : scales[i] & 0xffffu, pair = scale | scale << 16;
#pragma unroll
        for (u32 j = 0; j < kTileDepth / 2; ++j) bytes_to_halves(v[i][half * kTileDepth / 2 + j], lines.v[i] + 2 * j);
#pragma unroll
        for (u32 j = 0; j < kTileDepth; ++j) lines.v[i][j] = half2_mul(lines.v[i][j], pair);
      }
    }
    tile_lines_a(a, lines);
  }
};

// Elements [16 n, 16 n + 16) of positions [r, r + 32) of a page; behind dv something that exists.
template <u32 Type> struct Values {
  u32 v[kTileLines][Type == kF16 ? kTileDepth : kTileDepth / 2];
  u32 scales[kTileDepth]; // of Q8_0, in pairs

  APU_METHOD void load(const u8 *part, u32 r, u32 n, u32 dv) {
    constexpr u32 bytes = Type == kF16 ? 2 : 1;
    const u32 tile = r / kValueTile, first = 16 * n < dv ? 16 * n : 0;
    const u8 *from = part + (tile * dv + first) * kValueTile * bytes;
    const u8 *scales_from = part + kPageRows * dv + (tile * (dv / kScaleBlock) + first / kScaleBlock) * kValueTile * 2;
#pragma unroll
    for (u32 i = 0; i < kTileLines; ++i)
      load_words<kTileDepth * bytes / 2>(from + (tile_line_row(i) * kValueTile + tile_line_begin()) * bytes, v[i]);
    if constexpr (Type == kQ8) load_words<kTileDepth>(scales_from + tile_line_begin() * 2, scales);
  }

  // Positions from r + `end` on become 0.
  APU_METHOD void cut(u32 end) {
    if constexpr (Type == kQ8) cut_line(scales, tile_line_begin(), end);
    if constexpr (Type == kF16) {
#pragma unroll
      for (u32 i = 0; i < kTileLines; ++i) cut_line(v[i], tile_line_begin(), end);
    }
  }

  APU_METHOD void rows(TileA (&a)[2]) const {
    TileLines lines;
#pragma unroll
    for (u32 i = 0; i < kTileLines; ++i) {
      if constexpr (Type == kF16) {
#pragma unroll
        for (u32 j = 0; j < kTileDepth; ++j) lines.v[i][j] = v[i][j];
      } else {
#pragma unroll
        for (u32 j = 0; j < kTileDepth / 2; ++j) bytes_to_halves(v[i][j], lines.v[i] + 2 * j);
#pragma unroll
        for (u32 j = 0; j < kTileDepth; ++j) lines.v[i][j] = half2_mul(lines.v[i][j], scales[j]);
      }
    }
    tile_lines_a(a, lines);
  }
};

// Vectors [first, first + count) of the item, times the scale, as halves in LDS (count, kQueryStride), chunk by chunk;
// zero behind d, where chunks overlap, and behind the last vector. By threads begin, begin + step, ...
template <u32 Type, u32 Most>
APU_DEVICE void store_queries(const AttentionArgs &a, const Item &item, u32 d, u32 first, u32 count, u32 begin,
                              u32 step, u16 *to) {
  const u32 vectors = item.rows * item.heads;
  const float scale = a.cap != 0.0f ? a.scale : a.scale * kLog2E;
#pragma unroll 2
  for (u32 i = begin; i < count * Most / 2; i += step) {
    const u32 v = i / (Most / 2), vector = first + v, slot = i % (Most / 2) * 2;
    const u32 own = slot / kChunk<Type> * kChunk<Type>, m = chunk_begin<Type>(slot / kChunk<Type>, d) + slot - own;
    u32 pair = 0;
    if (vector < vectors && m >= own) { // heads are even
      const u64 row = item.row + row_of(a, vector);
      const float *x = a.q + (row * a.heads + head_of(a, item, vector)) * d + m;
      pair = floats_to_halves(x[0] * scale, x[1] * scale);
    }
    reinterpret_cast<u32 *>(to)[(v * kQueryStride<Most> + slot) / 2] = pair;
  }
}

// cap * tanh(s / cap) in units of log 2.
APU_DEVICE float cap_score(float s, float cap, float inverse) {
  const float e = exp2_f32(fabs_f32(s) * inverse * (-2.0f * kLog2E)), t = cap * kLog2E * (1.0f - e) * rcp_f32(1.0f + e);
  return s < 0.0f ? -t : t;
}

// Scores become exponentials; shrink is what the vectors' earlier ones are to be multiplied with. `base` is the tiles'
// first position; `seen`: all vectors see all of them.
template <bool Few>
APU_DEVICE void softmax_columns(const AttentionArgs &a, TileC (&s)[2], u32 base, bool seen, Columns<Few> &state,
                                float (&shrink)[Columns<Few>::count]) {
  constexpr u32 registers = Columns<Few>::registers, count = Columns<Few>::count;
  if (a.cap != 0.0f) {
    const float inverse = 1.0f / a.cap;
#pragma unroll
    for (u32 t = 0; t < 2; ++t)
#pragma unroll
      for (u32 i = 0; i < registers; ++i) s[t].v[i] = cap_score(s[t].v[i], a.cap, inverse);
  }
  if (!seen) {
#pragma unroll
    for (u32 t = 0; t < 2; ++t)
#pragma unroll
      for (u32 i = 0; i < registers; ++i) {
        const u32 position = base + tile_line_index(t, tile_row(i)), j = tile_own(i);
        s[t].v[i] = position >= state.low[j] && position <= state.high[j] ? s[t].v[i] : kMinusInfinity;
      }
  }
  float max[count], sum[count];
#pragma unroll
  for (u32 j = 0; j < count; ++j) {
    max[j] = state.max[j];
    sum[j] = 0.0f;
  }
#pragma unroll
  for (u32 t = 0; t < 2; ++t)
#pragma unroll
    for (u32 i = 0; i < registers; ++i) max[tile_own(i)] = max_f32(max[tile_own(i)], s[t].v[i]);
  float from[count];
#pragma unroll
  for (u32 j = 0; j < count; ++j) {
    max[j] = tile_column_max(max[j]);
    from[j] = max[j] == kMinusInfinity ? 0.0f : max[j];
    shrink[j] = exp2_f32(state.max[j] - from[j]);
    state.max[j] = max[j];
  }
#pragma unroll
  for (u32 t = 0; t < 2; ++t)
#pragma unroll
    for (u32 i = 0; i < registers; ++i) {
      s[t].v[i] = exp2_f32(s[t].v[i] - from[tile_own(i)]);
      sum[tile_own(i)] += s[t].v[i];
    }
#pragma unroll
  for (u32 j = 0; j < count; ++j) state.sum[j] = fma_f32(state.sum[j], shrink[j], sum[j]);
}

template <bool Few> APU_DEVICE void multiply(TileC &c, const TileA &a, const TileB &b) {
  if constexpr (Few)
    tile_multiply_few(c, a, b);
  else
    tile_multiply(c, a, b);
}

// What a wave reads of 32 positions: all of it comes while the positions before are worked on, where registers hold so
// much; else each part when it is needed.
template <u32 Type, u32 Most, bool Few> struct Tile {
  static constexpr u32 chunks = Most / kChunk<Type>, steps = kChunk<Type> / 32; // of K
  static constexpr u32 key_words = kTileLines * kTileDepth, value_words = Type == kF16 ? key_words : key_words / 2;
  static constexpr bool ahead =
      Few && kTileAhead && 2 * chunks * key_words <= kTileLoads && kWaveTiles<Most> * value_words <= kTileLoads;
  static constexpr u32 held = ahead ? chunks : 1;
  static constexpr u32 room = kTileLoads / key_words, few = room < kWaveTiles<Most> ? room : kWaveTiles<Most>;
  static constexpr u32 values_held = ahead ? kWaveTiles<Most> : few;

  const u8 *k, *v; // the head's parts of the page
  u32 r;           // the first position in it
  Keys<Type> keys[held][2];
  Values<Type> values[values_held];

  APU_METHOD void find(const AttentionArgs &a, u32 head, u32 page, u32 base) {
    k = page_part(a.k_state, page, head);
    v = page_part(a.v_state, page, head);
    r = base % kPageRows;
  }
  APU_METHOD void load_keys(u32 chunk, u32 d) {
#pragma unroll
    for (u32 c = 0; c < held; ++c)
#pragma unroll
      for (u32 t = 0; t < 2; ++t) keys[c][t].load(k, r, t, chunk + c, d);
  }
  APU_METHOD void load_values(u32 n, u32 dv) {
#pragma unroll
    for (u32 i = 0; i < values_held; ++i) values[i].load(v, r, n + i, dv);
  }
};

// A wave's vectors over positions [begin, end): `step` tiles apart from `base` on, the first that is not below begin.
// Positions from `end` on may hold anything. `q`: the vectors' queries in LDS, there once prepare() has been called by
// all; o: tiles of values from first_tile on. low, high: positions that the first and the last of the vectors are at;
// `whole`: there are as many as columns.
template <u32 Type, u32 Most, bool Exact, bool Few, class Prepare>
APU_DEVICE void attend(const AttentionArgs &a, const Item &item, u32 base, u32 step, u32 end, u32 low, u32 high,
                       bool whole, const u16 *q, u32 first_tile, Columns<Few> &state, TileC (&o)[kWaveTiles<Most>],
                       Prepare prepare) {
  using Loads = Tile<Type, Most, Few>;
  const u32 d = key_size<Most, Exact>(a), dv = value_size<Most, Exact>(a), lowest = lowest_position(a, high);
  const u32 *table = a.step.pages + item.pages;
  Loads tile;
  if (base < end) {
    tile.find(a, item.head, wave_uniform(table[base / kPageRows]), base);
    if constexpr (Loads::ahead) {
      tile.load_keys(0, d);
      tile.load_values(first_tile, dv);
    }
  }
  prepare();
  for (; base < end; base += step) {
    const u32 next = base + step;
    const u32 next_page = next < end ? table[next / kPageRows] : 0;
    constexpr u32 chains = Loads::ahead ? 2 : 1; // that are added up, since a chain of products is slow
    TileC s[2], more[2];
#pragma unroll
    for (u32 t = 0; t < 2; ++t) {
      tile_zero(s[t]);
      tile_zero(more[t]);
    }
#pragma unroll
    for (u32 chunk = 0; chunk < Loads::chunks; chunk += Loads::held) {
      if constexpr (!Loads::ahead) tile.load_keys(chunk, d);
#pragma unroll
      for (u32 c = 0; c < Loads::held * Loads::steps; ++c) {
        TileB vectors[2];
        load_vectors<Type, Most, Few>(vectors, q, chunk * Loads::steps + c);
#pragma unroll
        for (u32 t = 0; t < 2; ++t) {
          TileA rows[2];
          tile.keys[c / Loads::steps][t].rows(rows, c % Loads::steps);
          multiply<Few>(s[t], rows[0], vectors[0]);
          multiply<Few>(chains > 1 ? more[t] : s[t], rows[1], vectors[1]);
        }
      }
      if constexpr (!Loads::ahead) keep_order();
    }
    if constexpr (chains > 1) {
#pragma unroll
      for (u32 t = 0; t < 2; ++t)
#pragma unroll
        for (u32 i = 0; i < Columns<Few>::registers; ++i) s[t].v[i] += more[t].v[i];
    }
    Loads following;
    following.find(a, item.head, wave_uniform(next_page), next);
    if constexpr (!Loads::ahead)
      tile.load_values(first_tile, dv);
    else if (next < end)
      following.load_keys(0, d);

    float shrink[Columns<Few>::count];
    softmax_columns<Few>(a, s, base, whole && base + kTileKeys <= low + 1 && base >= lowest, state, shrink);
    TileB weights[2];
    tile_products_b(weights[0], s[0]);
    tile_products_b(weights[1], s[1]);
#pragma unroll
    for (u32 n = 0; n < kWaveTiles<Most>; ++n)
#pragma unroll
      for (u32 i = 0; i < Columns<Few>::registers; ++i) o[n].v[i] *= shrink[tile_own(i)];
#pragma unroll
    for (u32 first = 0; first < kWaveTiles<Most>; first += Loads::values_held) {
      if (first > 0) tile.load_values(first_tile + first, dv);
      // What lies behind the end is not written yet, and may be NaN. Without a branch where copies would cost
      // registers.
      if (!kTileAhead || base + kTileKeys > end) {
#pragma unroll
        for (u32 n = 0; n < Loads::values_held; ++n) tile.values[n].cut(end - base);
      }
#pragma unroll
      for (u32 n = 0; n < Loads::values_held; ++n) {
        TileA rows[2];
        tile.values[n].rows(rows);
        multiply<Few>(o[first + n], rows[0], weights[0]);
        multiply<Few>(o[first + n], rows[1], weights[1]);
      }
      if constexpr (!Loads::ahead) keep_order();
    }
    if constexpr (Loads::ahead) {
      if (next < end) following.load_values(first_tile, dv);
      tile = following;
    } else {
      tile.find(a, item.head, wave_uniform(next_page), next);
    }
  }
}

// ---- few rows of a sequence: a block takes a span, waves every so many tiles of it
// -----------------------------------

template <u32 Most, u32 Shares> struct SpanResult { // of the waves' shares of the positions, in LDS
  const float *maxima, *sums, *acc;                 // (shares, 16), (shares, 16), (shares, 16, Most + pad)
  APU_METHOD SpanElement of(u32 v, u32 m) const {
    SpanElement x = {kMinusInfinity, 0.0f, 0.0f};
#pragma unroll
    for (u32 w = 0; w < Shares; ++w) x.max = max_f32(x.max, maxima[w * kTileVectors + v]);
    const float from = x.max == kMinusInfinity ? 0.0f : x.max;
#pragma unroll
    for (u32 w = 0; w < Shares; ++w) {
      const float factor = exp2_f32(maxima[w * kTileVectors + v] - from);
      x.sum = fma_f32(factor, sums[w * kTileVectors + v], x.sum);
      x.value = fma_f32(factor, acc[(w * kTileVectors + v) * (Most + kAccPad) + m], x.value);
    }
    x.max *= kLn2;
    return x;
  }
};

template <u32 Type, u32 Most, bool Exact> APU_DEVICE void attention_span(const AttentionArgs &a) {
  constexpr u32 shares = kSpanThreads / kWaveSize / kWaveParts<Most>, stride = Most + kAccPad;
  const u32 share = wave_uniform(wave_id()) / kWaveParts<Most>;
  const u32 first_tile = wave_uniform(wave_id()) % kWaveParts<Most> * kWaveTiles<Most>;
  u16 *q = reinterpret_cast<u16 *>(dynamic_shared());                               // (16, kQueryStride)
  float *maxima = reinterpret_cast<float *>(q + kTileVectors * kQueryStride<Most>); // (shares, 16)
  float *sums = maxima + shares * kTileVectors;                                     // (shares, 16)
  float *acc = sums + shares * kTileVectors;                                        // (shares, 16, stride)
  u32 *flag = reinterpret_cast<u32 *>(acc + shares * kTileVectors * stride);

  const SequenceItems mine = sequence_items(a, 0);
  const Survey survey = survey_step(a, mine);
  if (block_id() >= survey.stride || block_id() >= survey.items) return;
  Item item = find_item(a, survey, mine, block_id());
  for (u32 index = block_id();;) {
    const u32 vectors = item.rows * item.heads;
    TileC o[kWaveTiles<Most>];
#pragma unroll
    for (u32 n = 0; n < kWaveTiles<Most>; ++n) tile_zero(o[n]);
    Columns<true> state = begin_columns<true>(a, item, 0);
    u32 begin, end;
    span_range(a, item, &begin, &end);
    u32 base = item.span * kSpan + share * kTileKeys; // of this wave's tiles, the first that anything is seen of
    if (base + kTileKeys <= begin) base += (begin - base) / (shares * kTileKeys) * (shares * kTileKeys);
    if (base + kTileKeys <= begin) base += shares * kTileKeys;
    attend<Type, Most, Exact, true>(a, item, base, shares * kTileKeys, end, item.position,
                                    item.position + item.rows - 1, vectors == kTileFew, q, first_tile, state, o, [&] {
                                      store_queries<Type, Most>(a, item, key_size<Most, Exact>(a), 0, kTileFew,
                                                                thread_in_loop(), kSpanThreads, q);
                                      block_sync();
                                    });
#pragma unroll
    for (u32 j = 0; j < state.count; ++j) {
      const u32 at = share * kTileVectors + tile_own_column(j);
      const float total = tile_column_sum(state.sum[j]);
      if (first_tile == 0 && tile_row(0) == 0) {
        maxima[at] = state.max[j];
        sums[at] = total;
      }
#pragma unroll
      for (u32 i = 0; i < state.registers; ++i) {
        if (tile_own(i) == j) {
#pragma unroll
          for (u32 n = 0; n < kWaveTiles<Most>; ++n) acc[at * stride + 16 * (first_tile + n) + tile_row(i)] = o[n].v[i];
        }
      }
    }
    block_sync();
    const SpanResult<Most, shares> result = {maxima, sums, acc};
    finish_span<kSpanThreads>(a, survey, item, value_size<Most, Exact>(a), result, flag, acc);
    if (survey.whole && item.span < item.last_span) {
      ++item.span;
      continue;
    }
    index += survey.stride;
    if (index >= survey.items) return;
    item = find_item(a, survey, sequence_items(a, 0), index);
  }
}

// ---- many rows of a sequence: a wave takes 16 vectors and all that they see
// ------------------------------------------

template <u32 Type, u32 Most, bool Exact> APU_DEVICE void attention_rows(const AttentionArgs &a) {
  constexpr u32 together = kTileVectors * kRowsThreads / kWaveSize / kWaveParts<Most>;
  const u32 dv = value_size<Most, Exact>(a);
  const u32 first_tile = wave_uniform(wave_id()) % kWaveParts<Most> * kWaveTiles<Most>;
  const u32 first = wave_uniform(wave_id()) / kWaveParts<Most> * kTileVectors;
  u16 *q = reinterpret_cast<u16 *>(dynamic_shared());
  const Survey survey = survey_step(a, sequence_items(a, 0));
  for (u32 index = block_id(); index < survey.items; index += grid_size()) {
    const Item item = find_item(a, survey, sequence_items(a, 0), survey.items - 1 - index); // the longest first
    const u32 vectors = item.rows * item.heads;
    TileC o[kWaveTiles<Most>];
#pragma unroll
    for (u32 n = 0; n < kWaveTiles<Most>; ++n) tile_zero(o[n]);
    Columns<false> state = begin_columns<false>(a, item, first);
    const u32 behind = first + kTileVectors < vectors ? first + kTileVectors : vectors;
    const u32 low = item.position + row_of(a, first), high = item.position + row_of(a, behind - 1);
    attend<Type, Most, Exact, false>(
        a, item, lowest_position(a, low) / kTileKeys * kTileKeys, kTileKeys, first < vectors ? high + 1 : 0, low, high,
        behind == first + kTileVectors, q + first * kQueryStride<Most>, first_tile, state, o, [&] {
          store_queries<Type, Most>(a, item, key_size<Most, Exact>(a), 0, together, thread_in_loop(), kRowsThreads, q);
          block_sync();
        });
#pragma unroll
    for (u32 j = 0; j < state.count; ++j) {
      const u32 vector = first + tile_own_column(j);
      const float total = tile_column_sum(state.sum[j]);
      if (vector < vectors) {
        const float factor = final_factor(a, head_of(a, item, vector), state.max[j] * kLn2, total);
        float *out = output_row(a, item, vector) + 16 * first_tile;
#pragma unroll
        for (u32 i = 0; i < state.registers; ++i) {
          if (tile_own(i) == j) {
#pragma unroll
            for (u32 n = 0; n < kWaveTiles<Most>; ++n)
              if (16 * (first_tile + n) < dv) out[16 * n + tile_row(i)] = o[n].v[i] * factor;
          }
        }
      }
    }
    block_sync();
  }
}

} // namespace apu::gpu
