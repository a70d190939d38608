// Attention on matrix tiles over F16 and Q8_0 caches: one wave, 16 query vectors, 32 positions at a time.
//
// S^T (32 positions, vectors) = K Q^T, an online softmax in float32 down its columns, O^T (dv, vectors) += V^T P^T.
// Keys and values are the rows of A, 16 bytes a lane, each element once: from device memory straight into registers, or
// where there are bulk copies through a ring in LDS of each wave, so that the next positions are on their way while
// these are worked on. Q8_0 becomes halves (quants times scales, rounded to a half). Exponentials become B where they
// are, since the order of the keys among S's rows is chosen so. Queries are halves in LDS. Scores are in units of
// log 2.
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
template <u32 Words, bool Shared> APU_DEVICE void load_words(const u8 *from, u32 *words) {
  if constexpr (Words == 1) {
    words[0] = Shared ? *reinterpret_cast<const u32 *>(from) : *global_pointer<const u32>(u64(from));
  } else if constexpr (Words == 2) {
    const u32x2 v = Shared ? *reinterpret_cast<const u32x2 *>(from) : *global_pointer<const u32x2>(u64(from));
    words[0] = v[0];
    words[1] = v[1];
  } else {
#pragma unroll
    for (u32 i = 0; i < Words; i += 4) {
      const u32x4 v = Shared ? load16_shared(from + 4 * i) : load16(from + 4 * i);
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

struct Positions { // 32 of them: keys or values and, of Q8_0, their scales
  const u8 *elements, *scales;
};

// One chunk of the positions that are the rows of tile t of S^T, as it lies in a page or, `Shared`, in a ring.
// Addresses are a part that is the same in all lanes and a lane's own that all chunks share.
template <u32 Type, bool Exact, bool Shared> struct Keys {
  u32 v[kTileLines][kTileDepth];
  u32 scales[kTileLines]; // of two blocks of Q8_0

  APU_METHOD void load(Positions from, u32 t, u32 chunk, u32 d) {
    constexpr u32 bytes = Type == kF16 ? 2 : 1;
    const u32 begin = chunk_begin<Type>(chunk, d), blocks = d / kScaleBlock;
    const u8 *elements_from = from.elements + begin * bytes, *scales_from = from.scales + begin / kScaleBlock * 2;
#pragma unroll
    for (u32 i = 0; i < kTileLines; ++i) {
      const u32 row = tile_line_index(t, tile_line_row(i));
      load_words<kTileDepth, Shared>(elements_from + row * d * bytes + tile_line_begin() * 2, v[i]);
      if constexpr (Type == kQ8 && Exact) { // blocks are in pairs
        load_words<1, Shared>(scales_from + row * blocks * 2, scales + i);
      } else if constexpr (Type == kQ8) {
        const u8 *at = scales_from + row * blocks * 2;
        const u16 *p = Shared ? reinterpret_cast<const u16 *>(at) : global_pointer<const u16>(u64(at));
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

// Elements [16 n, 16 n + 16) of 32 positions; behind dv something that exists.
template <u32 Type, bool Shared> struct Values {
  u32 v[kTileLines][Type == kF16 ? kTileDepth : kTileDepth / 2];
  u32 scales[kTileDepth]; // of Q8_0, in pairs

  APU_METHOD void load(Positions from, u32 n, u32 dv) {
    constexpr u32 bytes = Type == kF16 ? 2 : 1;
    const u32 first = 16 * n < dv ? 16 * n : 0;
    const u8 *elements_from = from.elements + first * kValueTile * bytes;
#pragma unroll
    for (u32 i = 0; i < kTileLines; ++i)
      load_words<kTileDepth * bytes / 2, Shared>(
          elements_from + (tile_line_row(i) * kValueTile + tile_line_begin()) * bytes, v[i]);
    if constexpr (Type == kQ8)
      load_words<kTileDepth, Shared>(from.scales + (first / kScaleBlock * kValueTile + tile_line_begin()) * 2, scales);
  }

  // Positions from `end` of the 32 on become 0.
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

// Where a head's keys or values of the 32 positions from `base` on lie in a page.
template <u32 Type> constexpr u32 kPositionsBytes = Type == kF16 ? 64 : 34; // for each element of a head
template <u32 Type> APU_DEVICE Positions page_positions(const PagedState &state, u32 page, u32 head, u32 base, u32 d) {
  const u8 *from = page_part(state, page, head) + base % kPageRows / kTileKeys * kPositionsBytes<Type> * d;
  return {from, from + kTileKeys * d};
}

// The positions that a wave works on: 32 every `step` from some base up to `end`.
struct WavePositions {
  const u32 *table; // page table of the sequence
  u32 head;         // kv head
  u32 step, end;
  u32 first_tile; // of values

  static APU_METHOD WavePositions of(const AttentionArgs &a, const Item &item, u32 step, u32 end, u32 first_tile) {
    return {a.step.pages + item.pages, item.head, step, end, first_tile};
  }
};

// As they lie in pages.
template <u32 Type, u32 Most, bool Exact> struct PageSource {
  static constexpr bool ring = false;
  const AttentionArgs &a;
  WavePositions at = {};
  u32 page = 0, next_page = 0;

  APU_METHOD void begin(u32 base) { page = base < at.end ? wave_uniform(at.table[base / kPageRows]) : 0; }
  APU_METHOD void ahead(u32 next) { next_page = next < at.end ? at.table[next / kPageRows] : 0; }
  APU_METHOD Positions keys(u32 base) const {
    return page_positions<Type>(a.k_state, page, at.head, base, key_size<Most, Exact>(a));
  }
  APU_METHOD Positions values(u32 base) const { // from the first tile on
    constexpr u32 bytes = Type == kF16 ? 2 : 1;
    const u32 dv = value_size<Most, Exact>(a), first = 16 * at.first_tile < dv ? 16 * at.first_tile : 0;
    const Positions all = page_positions<Type>(a.v_state, page, at.head, base, dv);
    return {all.elements + first * kValueTile * bytes, all.scales + first / kScaleBlock * kValueTile * 2};
  }
  APU_METHOD u32 value_elements() const { // from the first tile on
    if constexpr (Exact) return 16 * kWaveTiles<Most>;
    const u32 dv = value_size<Most, Exact>(a), first = 16 * at.first_tile;
    return first < dv ? dv - first : dv;
  }
  APU_METHOD void keys_done(u32) {}
  APU_METHOD void values_done(u32) { page = wave_uniform(next_page); }
};

// As bulk copies bring them to a ring in LDS: kRing halves, keys and values of 32 positions in turn. A half that has
// been read makes room for the one that many halves later.
template <u32 Type, u32 Most, bool Exact> struct RingSource {
  static constexpr bool ring = true;
  static constexpr u32 halves = kRing<Type, Most>, half_bytes = kHalfBytes<Type, Most>;
  const AttentionArgs &a;
  WavePositions at = {};
  u8 *images = nullptr;
  SharedAddress shared = {}, barriers = {};
  u32 half = 0, round = 0;       // which one is read next, and the parity of its round
  u32 pages = 0, first_page = 0; // entry of the table that this lane keeps, and the first lane's

  APU_METHOD void init(u8 *rings, u8 *all_barriers) {
    const u32 wave = wave_uniform(wave_id());
    images = rings + wave * halves * half_bytes;
    shared = shared_address(images);
    barriers = shared_address(all_barriers) + wave * halves * 8;
    if (lane_id() == 0) {
#pragma unroll
      for (u32 i = 0; i < halves; ++i) bulk_init(barriers + 8 * i, 1);
    }
    wave_sync();
  }

  APU_METHOD void begin(u32 base) {
    first_page = base / kPageRows;
    const u32 own = first_page + lane_id();
    pages = own * kPageRows < at.end ? at.table[own] : 0;
#pragma unroll
    for (u32 h = 0; h < halves; ++h)
      copy(h % 2, base + h / 2 * at.step, half + h < halves ? half + h : half + h - halves);
  }
  APU_METHOD void ahead(u32) {}
  APU_METHOD Positions keys(u32) const { return image(key_size<Most, Exact>(a)); }
  APU_METHOD Positions values(u32) const { return image(copied_elements()); }
  APU_METHOD u32 value_elements() const { return copied_elements(); }
  APU_METHOD void keys_done(u32 base) { done(halves % 2, base + halves / 2 * at.step); }
  APU_METHOD void values_done(u32 base) { done(1 - halves % 2, base + (halves + 1) / 2 * at.step); }

private:
  APU_METHOD u32 copied_elements() const { // of values
    constexpr u32 most = 16 * kWaveTiles<Most>;
    const u32 dv = value_size<Most, Exact>(a), first = 16 * at.first_tile;
    if constexpr (Exact) return most;
    if constexpr (kWaveParts<Most> == 1) return dv;
    return first >= dv ? (dv < most ? dv : most) : dv - first < most ? dv - first : most;
  }
  APU_METHOD void copy(bool values, u32 base, u32 to) {
    if (base >= at.end) return;
    const u32 page = wave_read(pages, base / kPageRows - first_page);
    if (lane_id() != 0) return;
    const SharedAddress barrier = barriers + 8 * to, image = shared + to * half_bytes;
    const u32 d = values ? value_size<Most, Exact>(a) : key_size<Most, Exact>(a);
    const Positions from = page_positions<Type>(values ? a.v_state : a.k_state, page, at.head, base, d);
    if (!values || kWaveParts<Most> == 1) {
      bulk_expect(barrier, kPositionsBytes<Type> * d);
      bulk_copy(image, from.elements, kPositionsBytes<Type> * d, barrier);
      return;
    }
    const u32 first = 16 * at.first_tile < d ? 16 * at.first_tile : 0, elements = copied_elements() * kValueTile;
    constexpr u32 bytes = Type == kF16 ? 2 : 1;
    bulk_expect(barrier, elements * kPositionsBytes<Type> / kValueTile);
    bulk_copy(image, from.elements + first * kValueTile * bytes, elements * bytes, barrier);
    if constexpr (Type == kQ8)
      bulk_copy(image + elements, from.scales + first / kScaleBlock * kValueTile * 2, elements / kScaleBlock * 2,
                barrier);
  }
  APU_METHOD Positions image(u32 d) const {
    bulk_wait(barriers + 8 * half, round);
    const u8 *from = images + half * half_bytes;
    return {from, from + kTileKeys * d};
  }
  APU_METHOD void done(bool values, u32 base) {
    wave_sync();
    copy(values, base, half);
    ++half;
    if (half < halves) return;
    half = 0;
    round ^= 1;
  }
};

template <bool Ring, u32 Type, u32 Most, bool Exact> struct SpanSource {
  using Of = PageSource<Type, Most, Exact>;
};
template <u32 Type, u32 Most, bool Exact> struct SpanSource<true, Type, Most, Exact> {
  using Of = RingSource<Type, Most, Exact>;
};

// A wave's vectors over the positions of `source`, the first that are not below its range from `base` on. Positions
// from the end on may hold anything. `q`: the vectors' queries in LDS, there once prepare() has been called by all; o:
// tiles of values. low, high: positions that the first and the last of the vectors are at; `whole`: there are as many
// as columns.
template <u32 Type, u32 Most, bool Exact, bool Few, class Source, class Prepare>
APU_DEVICE void attend(const AttentionArgs &a, Source &source, u32 base, u32 low, u32 high, bool whole, const u16 *q,
                       Columns<Few> &state, TileC (&o)[kWaveTiles<Most>], Prepare prepare) {
  constexpr bool ring = Source::ring;
  constexpr u32 steps = kChunk<Type> / 32;                      // of a chunk of keys
  constexpr u32 loads = kTileLoads / (kTileLines * kTileDepth); // of values at once
  constexpr u32 room = ring ? 4 : loads, together = room < kWaveTiles<Most> ? room : kWaveTiles<Most>;
  constexpr u32 chains = ring ? 2 : 1; // of products, added up, since a chain is slow
  const u32 d = key_size<Most, Exact>(a), lowest = lowest_position(a, high), end = source.at.end;
  source.begin(base);
  prepare();
  for (; base < end; base += source.at.step) {
    source.ahead(base + source.at.step);
    TileC s[2], more[2];
#pragma unroll
    for (u32 t = 0; t < 2; ++t) {
      tile_zero(s[t]);
      tile_zero(more[t]);
    }
    const Positions k = source.keys(base);
#pragma unroll
    for (u32 chunk = 0; chunk < Most / kChunk<Type>; ++chunk) {
      Keys<Type, Exact, ring> keys[2];
#pragma unroll
      for (u32 t = 0; t < 2; ++t) keys[t].load(k, t, chunk, d);
#pragma unroll
      for (u32 c = 0; c < steps; ++c) {
        TileB vectors[2];
        load_vectors<Type, Most, Few>(vectors, q, chunk * steps + c);
#pragma unroll
        for (u32 t = 0; t < 2; ++t) {
          TileA rows[2];
          keys[t].rows(rows, c);
          multiply<Few>(s[t], rows[0], vectors[0]);
          multiply<Few>(chains > 1 ? more[t] : s[t], rows[1], vectors[1]);
        }
      }
      if constexpr (!ring) keep_order();
    }
    source.keys_done(base);
    if constexpr (chains > 1) {
#pragma unroll
      for (u32 t = 0; t < 2; ++t)
#pragma unroll
        for (u32 i = 0; i < Columns<Few>::registers; ++i) s[t].v[i] += more[t].v[i];
    }
    Values<Type, ring> values[together];
    const u32 elements = source.value_elements();
    auto load_values = [&](Positions from, u32 first) {
#pragma unroll
      for (u32 n = 0; n < together; ++n) values[n].load(from, first + n, elements);
    };
    Positions v = {};
    if constexpr (!ring) {
      v = source.values(base);
      load_values(v, 0);
    }

    float shrink[Columns<Few>::count];
    softmax_columns<Few>(a, s, base, whole && base + kTileKeys <= low + 1 && base >= lowest, state, shrink);
    TileB weights[2];
    tile_products_b(weights[0], s[0]);
    tile_products_b(weights[1], s[1]);
#pragma unroll
    for (u32 n = 0; n < kWaveTiles<Most>; ++n)
#pragma unroll
      for (u32 i = 0; i < Columns<Few>::registers; ++i) o[n].v[i] *= shrink[tile_own(i)];
    if constexpr (ring) v = source.values(base);
#pragma unroll
    for (u32 first = 0; first < kWaveTiles<Most>; first += together) {
      if (ring || first > 0) load_values(v, first);
      // What lies behind the end is not written yet, and may be NaN. Without a branch where copies would cost
      // registers.
      if (!kBulkCopy || base + kTileKeys > end) {
#pragma unroll
        for (u32 n = 0; n < together; ++n) values[n].cut(end - base);
      }
#pragma unroll
      for (u32 n = 0; n < together; ++n) {
        TileA rows[2];
        values[n].rows(rows);
        multiply<Few>(o[first + n], rows[0], weights[0]);
        multiply<Few>(o[first + n], rows[1], weights[1]);
      }
      if constexpr (!ring) keep_order();
    }
    source.values_done(base);
  }
}

// ---- few rows of a sequence: a block takes a span, waves every so many tiles of it
// -----------------------------------

template <u32 Most, u32 Shares> struct SpanResult { // of the waves' shares of the positions, in LDS
  const float *maxima, *sums, *acc;                 // (shares, 16), (shares, 16), (shares, 16, Most + pad)
  APU_METHOD SpanElements<4> of(u32 v, u32 m) const {
    SpanElements<4> x = {kMinusInfinity, 0.0f, {}};
#pragma unroll
    for (u32 w = 0; w < Shares; ++w) x.max = max_f32(x.max, maxima[w * kTileVectors + v]);
    const float from = x.max == kMinusInfinity ? 0.0f : x.max;
#pragma unroll
    for (u32 w = 0; w < Shares; ++w) {
      const float factor = exp2_f32(maxima[w * kTileVectors + v] - from);
      const u32x4 values = load16_shared(acc + (w * kTileVectors + v) * (Most + kAccPad) + m);
      x.sum = fma_f32(factor, sums[w * kTileVectors + v], x.sum);
#pragma unroll
      for (u32 e = 0; e < 4; ++e) x.values.v[e] = fma_f32(factor, bits_to_float(values[e]), x.values.v[e]);
    }
    x.max *= kLn2;
    return x;
  }
};

template <u32 Type, u32 Most, bool Exact> APU_DEVICE void attention_span(const AttentionArgs &a) {
  constexpr u32 waves = kSpanThreads / kWaveSize, shares = kSpanShares<Most, waves>, stride = Most + kAccPad;
  constexpr bool ring = kBulkCopy && kRing<Type, Most> > 0;
  const u32 share = wave_uniform(wave_id()) / kWaveParts<Most>;
  const u32 first_tile = wave_uniform(wave_id()) % kWaveParts<Most> * kWaveTiles<Most>;
  float *acc = reinterpret_cast<float *>(dynamic_shared()); // (shares, 16, stride), after the rings
  u16 *q = reinterpret_cast<u16 *>(dynamic_shared() + kSpanFront<Type, Most, waves, ring>); // (16, kQueryStride)
  float *maxima = reinterpret_cast<float *>(q + kTileVectors * kQueryStride<Most>);         // (shares, 16)
  float *sums = maxima + shares * kTileVectors;                                             // (shares, 16)
  u32 *flag = reinterpret_cast<u32 *>(sums + shares * kTileVectors);
  typename SpanSource<ring, Type, Most, Exact>::Of source{a};
  if constexpr (ring) source.init(dynamic_shared(), reinterpret_cast<u8 *>(flag + 4));

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
    source.at = WavePositions::of(a, item, shares * kTileKeys, end, first_tile);
    attend<Type, Most, Exact, true>(
        a, source, base, item.position, item.position + item.rows - 1, vectors == kTileFew, q, state, o, [&] {
          store_queries<Type, Most>(a, item, key_size<Most, Exact>(a), 0, kTileFew, thread_in_loop(), kSpanThreads, q);
          block_sync();
        });
    if constexpr (ring) block_sync(); // rings have been read
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
    if constexpr (ring) bulk_fence();
    block_sync();
    const SpanResult<Most, shares> result = {maxima, sums, acc};
    finish_span<kSpanThreads, 4>(a, survey, item, value_size<Most, Exact>(a), result, flag);
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
    PageSource<Type, Most, Exact> source{
        a, WavePositions::of(a, item, kTileKeys, first < vectors ? high + 1 : 0, first_tile)};
    attend<Type, Most, Exact, false>(a, source, lowest_position(a, low) / kTileKeys * kTileKeys, low, high,
                                     behind == first + kTileVectors, q + first * kQueryStride<Most>, state, o, [&] {
                                       store_queries<Type, Most>(a, item, key_size<Most, Exact>(a), 0, together,
                                                                 thread_in_loop(), kRowsThreads, q);
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
