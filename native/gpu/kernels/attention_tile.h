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
    out.high[j] = real ? item.position + vector / item.heads : 0;
    out.low[j] = real ? lowest_position(a, out.high[j]) : 1;
    out.max[j] = kMinusInfinity;
    out.sum[j] = 0.0f;
  }
  return out;
}

// Four signed bytes as two pairs of halves: 1024 + 128 + b is a half with the byte in its low bits.
APU_DEVICE void bytes_to_halves(u32 bytes, u32 *pairs) {
  const u32 biased = bytes ^ 0x80808080u;
  pairs[0] = half2_add(byte_permute(biased, 0x64646464u, 0x04010400u), 0xe480e480u);
  pairs[1] = half2_add(byte_permute(biased, 0x64646464u, 0x04030402u), 0xe480e480u);
}

APU_DEVICE u32x4 load16_shared(const void *p) {
  return *static_cast<const u32x4 *>(p);
}
// 2 * kTileDepth neighbouring elements of device memory.
APU_DEVICE void load_halves(const u8 *from, u32 *words) {
#pragma unroll
  for (u32 i = 0; i < kTileDepth; i += 4) {
    const u32x4 v = load16(from + 4 * i);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) words[i + j] = v[j];
  }
}
APU_DEVICE void load_bytes(const u8 *from, u32 *words) {
#pragma unroll
  for (u32 i = 0; i < kTileDepth / 2; i += 2) {
    const u32x2 v = *reinterpret_cast<const u32x2 *>(from + 4 * i);
    bytes_to_halves(v[0], words + 2 * i);
    bytes_to_halves(v[1], words + 2 * i + 2);
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

// Queries' columns [32 c, 32 c + 32) of LDS (vectors, kQueryStride) as B.
template <u32 Most, bool Few> APU_DEVICE void load_vectors(TileB (&b)[2], const u16 *q, u32 c) {
  TileLines lines = {};
#pragma unroll
  for (u32 i = 0; i < (Few ? 1 : kTileLines); ++i) {
    const u16 *row = q + tile_line_row(i) * kQueryStride<Most> + 32 * c + tile_line_begin();
#pragma unroll
    for (u32 j = 0; j < kTileDepth; j += 4) {
      const u32x4 v = load16_shared(row + 2 * j);
#pragma unroll
      for (u32 w = 0; w < 4; ++w) lines.v[i][j + w] = v[w];
    }
  }
  tile_lines_b(b, lines);
}

// Where the 32 elements of chunk c begin: the last chunk of a head overlaps the one before, and queries are 0 there.
APU_DEVICE u32 chunk_begin(u32 c, u32 d) {
  return 32 * c < d - 32 ? 32 * c : d - 32;
}

// Chunk c of the positions of a page from r on that are the rows of tile t of S^T. Addresses are a part that is the
// same in all lanes and a lane's own that all chunks share.
template <u32 Type> APU_DEVICE void load_keys(TileLines &lines, const u8 *part, u32 r, u32 t, u32 c, u32 d) {
  constexpr u32 bytes = Type == kF16 ? 2 : 1;
  const u32 begin = chunk_begin(c, d);
  const u8 *from = part + (r * d + begin) * bytes;
#pragma unroll
  for (u32 i = 0; i < kTileLines; ++i) {
    const u32 row = tile_line_index(t, tile_line_row(i)), at = (row * d + tile_line_begin()) * bytes;
    if constexpr (Type == kF16) {
      load_halves(from + at, lines.v[i]);
    } else {
      load_bytes(from + at, lines.v[i]);
      const u32 blocks = d / kScaleBlock;
      const u8 *scales = part + kPageRows * d + (r * blocks + begin / kScaleBlock) * 2;
      const u32 scale = *reinterpret_cast<const u16 *>(scales + row * blocks * 2), pair = scale | scale << 16;
#pragma unroll
      for (u32 j = 0; j < kTileDepth; ++j) lines.v[i][j] = half2_mul(lines.v[i][j], pair);
    }
  }
}

// Elements [16 n, 16 n + 16) of positions [r, r + 32) of a page; behind dv something that exists.
template <u32 Type> APU_DEVICE void load_values(TileLines &lines, const u8 *part, u32 r, u32 n, u32 dv) {
  constexpr u32 bytes = Type == kF16 ? 2 : 1;
  const u32 tile = r / kValueTile, first = 16 * n < dv ? 16 * n : 0;
  const u8 *from = part + (tile * dv + first) * kValueTile * bytes;
  const u8 *scales = part + kPageRows * dv + (tile * (dv / kScaleBlock) + first / kScaleBlock) * kValueTile * 2;
#pragma unroll
  for (u32 i = 0; i < kTileLines; ++i) {
    const u32 at = (tile_line_row(i) * kValueTile + tile_line_begin()) * bytes;
    if constexpr (Type == kF16) {
      load_halves(from + at, lines.v[i]);
    } else {
      load_bytes(from + at, lines.v[i]);
      u32 pairs[kTileDepth];
      load_halves(scales + tile_line_begin() * 2, pairs);
#pragma unroll
      for (u32 j = 0; j < kTileDepth; ++j) lines.v[i][j] = half2_mul(lines.v[i][j], pairs[j]);
    }
  }
}

// Vectors [first, first + count) of the item, times the scale, as halves in LDS (count, kQueryStride), chunk by chunk;
// zero behind d, where chunks overlap, and behind the last vector. By threads begin, begin + step, ...
template <u32 Most>
APU_DEVICE void store_queries(const AttentionArgs &a, const Item &item, u32 first, u32 count, u32 begin, u32 step,
                              u16 *to) {
  const u32 d = a.k_state.head_size, vectors = item.rows * item.heads;
  const float scale = a.cap != 0.0f ? a.scale : a.scale * kLog2E;
  for (u32 i = begin; i < count * Most / 2; i += step) {
    const u32 v = i / (Most / 2), vector = first + v, slot = i % (Most / 2) * 2, own = slot / 32 * 32;
    const u32 m = chunk_begin(slot / 32, d) + slot % 32;
    u32 pair = 0;
    if (vector < vectors && m >= own) { // heads are even
      const u32 row = item.row + vector / item.heads, head = item.first_head + vector % item.heads;
      const float *x = a.q + (u64(row) * a.heads + head) * d + m;
      pair = u32(float_to_half(x[0] * scale)) | u32(float_to_half(x[1] * scale)) << 16;
    }
    reinterpret_cast<u32 *>(to)[(v * kQueryStride<Most> + slot) / 2] = pair;
  }
}

// Scores become exponentials; shrink is what the vectors' earlier ones are to be multiplied with. `base` is the tiles'
// first position; `seen`: all vectors see all of them.
template <bool Few>
APU_DEVICE void softmax_columns(const AttentionArgs &a, TileC (&s)[2], u32 base, bool seen, Columns<Few> &state,
                                float (&shrink)[Columns<Few>::count]) {
  constexpr u32 registers = Columns<Few>::registers, count = Columns<Few>::count;
  if (a.cap != 0.0f) {
#pragma unroll
    for (u32 t = 0; t < 2; ++t)
#pragma unroll
      for (u32 i = 0; i < registers; ++i) s[t].v[i] = soft_cap(s[t].v[i], a.cap) * kLog2E;
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

// Adds positions [base, base + 32) of a page to a wave's vectors, tiles [first_tile, ...) of their values; positions
// from `end` on may hold anything. `q`: the vectors' queries in LDS.
template <u32 Type, u32 Most, bool Few>
APU_DEVICE void attend_tile(const AttentionArgs &a, u32 head, u32 page, u32 base, u32 end, bool seen, const u16 *q,
                            u32 first_tile, Columns<Few> &state, TileC (&o)[kWaveTiles<Most>]) {
  const u32 d = a.k_state.head_size, dv = a.v_state.head_size, r = base % kPageRows;
  const u8 *k = page_part(a.k_state, page, head), *v = page_part(a.v_state, page, head);
  // What is on its way at once: as much as registers hold beside the accumulators.
  constexpr u32 room = kTileLoads / (kTileLines * kTileDepth);
  constexpr u32 group = room < 4 ? 1 : room / 2 < Most / 32 ? room / 2 : Most / 32;
  constexpr u32 ahead = room < kWaveTiles<Most> ? room : kWaveTiles<Most>;

  TileC s[2];
  tile_zero(s[0]);
  tile_zero(s[1]);
#pragma unroll
  for (u32 first = 0; first < Most / 32; first += group) {
    TileLines keys[group][2];
#pragma unroll
    for (u32 c = 0; c < group; ++c)
#pragma unroll
      for (u32 t = 0; t < 2; ++t) load_keys<Type>(keys[c][t], k, r, t, first + c, d);
#pragma unroll
    for (u32 c = 0; c < group; ++c) {
      TileB vectors[2];
      load_vectors<Most, Few>(vectors, q, first + c);
#pragma unroll
      for (u32 t = 0; t < 2; ++t) {
        TileA rows[2];
        tile_lines_a(rows, keys[c][t]);
        multiply<Few>(s[t], rows[0], vectors[0]);
        multiply<Few>(s[t], rows[1], vectors[1]);
      }
    }
    keep_order();
  }
  TileLines values[ahead];
#pragma unroll
  for (u32 n = 0; n < ahead; ++n) load_values<Type>(values[n], v, r, first_tile + n, dv);

  float shrink[Columns<Few>::count];
  softmax_columns<Few>(a, s, base, seen, state, shrink);
#pragma unroll
  for (u32 n = 0; n < kWaveTiles<Most>; ++n)
#pragma unroll
    for (u32 i = 0; i < Columns<Few>::registers; ++i) o[n].v[i] *= shrink[tile_own(i)];
  TileB weights[2];
  tile_products_b(weights[0], s[0]);
  tile_products_b(weights[1], s[1]);
#pragma unroll
  for (u32 first = 0; first < kWaveTiles<Most>; first += ahead) {
    if (first > 0) {
#pragma unroll
      for (u32 n = 0; n < ahead; ++n) load_values<Type>(values[n], v, r, first_tile + first + n, dv);
    }
    if (base + kTileKeys > end) { // what lies there is not written yet, and may be NaN
#pragma unroll
      for (u32 n = 0; n < ahead; ++n)
#pragma unroll
        for (u32 i = 0; i < kTileLines; ++i) cut_line(values[n].v[i], tile_line_begin(), end - base);
    }
#pragma unroll
    for (u32 n = 0; n < ahead; ++n) {
      TileA rows[2];
      tile_lines_a(rows, values[n]);
      multiply<Few>(o[first + n], rows[0], weights[0]);
      multiply<Few>(o[first + n], rows[1], weights[1]);
    }
    keep_order();
  }
}

// Whether vectors of positions [low, high] all see [base, base + 32).
APU_DEVICE bool all_seen(const AttentionArgs &a, u32 low, u32 high, u32 base) {
  return base + kTileKeys <= low + 1 && base >= lowest_position(a, high);
}

// ---- few rows of a sequence: a block takes a span, waves every so many tiles of it
// -----------------------------------

template <u32 Type, u32 Most> APU_DEVICE void attention_span(AttentionArgs a) {
  constexpr u32 all = kAttentionThreads / kWaveSize, waves = all / kWaveParts<Most>, stride = Most + kAccPad;
  constexpr u32 one = kTileVectors * stride, together = kSpanWords<Most, all> / one;
  const u32 wave = wave_uniform(wave_id()) / kWaveParts<Most>;
  const u32 first_tile = wave_uniform(wave_id()) % kWaveParts<Most> * kWaveTiles<Most>;
  float *acc = reinterpret_cast<float *>(dynamic_shared()); // (vectors, dv)
  float *maxima = acc + kTileVectors * Most;                // (waves, 16)
  float *sums = maxima + kTileVectors * waves;              // (waves, 16)
  float *max = sums + kTileVectors * waves;                 // (16)
  float *sum = max + kTileVectors;                          // (16)
  u32 *flag = reinterpret_cast<u32 *>(sum + kTileVectors);
  float *region = sum + kTileVectors + 4; // queries; then the waves' accumulators; then what the combination needs
  u16 *q = reinterpret_cast<u16 *>(region);

  const Survey survey = survey_step(a);
  if (block_id() >= survey.stride) return;
  for (u32 index = block_id(); index < survey.items; index += survey.stride) {
    Item item = find_item(a, survey, index);
    const u32 vectors = item.rows * item.heads, last = survey.whole ? item.last_span : item.span;
    const u32 *table = page_table(a.step, item.sequence, a.k_state.group);
    for (; item.span <= last; ++item.span) {
      hide(a.k_state.head_size); // or the addresses of all phases take registers in each
      hide(a.v_state.head_size);
      a.k_state.head_size = wave_uniform(a.k_state.head_size);
      const u32 dv = a.v_state.head_size = wave_uniform(a.v_state.head_size);
      store_queries<Most>(a, item, 0, kTileFew, thread_id(), kAttentionThreads, q);
      TileC o[kWaveTiles<Most>];
#pragma unroll
      for (u32 n = 0; n < kWaveTiles<Most>; ++n) tile_zero(o[n]);
      Columns<true> state = begin_columns<true>(a, item, 0);
      u32 begin, end;
      span_range(a, item, &begin, &end);
      block_sync();
      for (u32 base = item.span * kSpan + wave * kTileKeys; base < end; base += waves * kTileKeys) {
        if (base + kTileKeys > begin) {
          const bool seen = vectors == kTileFew && all_seen(a, item.position, item.position + item.rows - 1, base);
          attend_tile<Type, Most, true>(a, item.head, wave_uniform(table[base / kPageRows]), base, end, seen, q,
                                        first_tile, state, o);
        }
      }

      // The waves' results become one, in the waves' order.
#pragma unroll
      for (u32 j = 0; j < state.count; ++j) {
        const float total = tile_column_sum(state.sum[j]);
        if (first_tile == 0 && tile_row(0) == 0) {
          maxima[wave * kTileVectors + tile_own_column(j)] = state.max[j];
          sums[wave * kTileVectors + tile_own_column(j)] = total;
        }
      }
      block_sync();
      if (thread_id() < vectors) {
        float most = kMinusInfinity, total = 0.0f;
        for (u32 w = 0; w < waves; ++w) most = max_f32(most, maxima[w * kTileVectors + thread_id()]);
        const float from = most == kMinusInfinity ? 0.0f : most;
        for (u32 w = 0; w < waves; ++w) {
          const float factor = exp2_f32(maxima[w * kTileVectors + thread_id()] - from);
          total = fma_f32(factor, sums[w * kTileVectors + thread_id()], total);
          maxima[w * kTileVectors + thread_id()] = factor;
        }
        max[thread_id()] = most * kLn2;
        sum[thread_id()] = total;
      }
      for (u32 first = 0; first < waves; first += together) {
        block_sync();
        if (wave >= first && wave < first + together) {
          float *to = region + (wave - first) * one;
#pragma unroll
          for (u32 j = 0; j < state.count; ++j) {
            const u32 v = tile_own_column(j);
            if (v < vectors) {
              const float factor = maxima[wave * kTileVectors + v];
#pragma unroll
              for (u32 i = 0; i < state.registers; ++i) {
                if (tile_own(i) == j) {
#pragma unroll
                  for (u32 n = 0; n < kWaveTiles<Most>; ++n)
                    to[v * stride + 16 * (first_tile + n) + tile_row(i)] = o[n].v[i] * factor;
                }
              }
            }
          }
        }
        block_sync();
        const u32 count = waves - first < together ? waves - first : together;
        for (u32 i = thread_id(); i < vectors * dv; i += kAttentionThreads) {
          const float *from = region + i / dv * stride + i % dv;
          float x = first ? acc[i] : 0.0f;
          for (u32 w = 0; w < count; ++w) x += from[w * one];
          acc[i] = x;
        }
      }
      block_sync();
      finish_span<kAttentionThreads>(a, survey, item, max, sum, acc, flag, region);
    }
  }
}

// ---- many rows of a sequence: a wave takes 16 vectors and all that they see
// ------------------------------------------

template <u32 Type, u32 Most> APU_DEVICE void attention_rows(const AttentionArgs &a) {
  constexpr u32 together = kTileVectors * kAttentionThreads / kWaveSize / kWaveParts<Most>;
  const u32 dv = a.v_state.head_size;
  const u32 first_tile = wave_uniform(wave_id()) % kWaveParts<Most> * kWaveTiles<Most>;
  const u32 first = wave_uniform(wave_id()) / kWaveParts<Most> * kTileVectors;
  u16 *q = reinterpret_cast<u16 *>(dynamic_shared());
  const Survey survey = survey_step(a);
  for (u32 index = block_id(); index < survey.items; index += grid_size()) {
    const Item item = find_item(a, survey, survey.items - 1 - index); // the longest first
    const u32 vectors = item.rows * item.heads;
    const u32 *table = page_table(a.step, item.sequence, a.k_state.group);
    store_queries<Most>(a, item, 0, together, thread_id(), kAttentionThreads, q);
    block_sync();
    if (first < vectors) {
      TileC o[kWaveTiles<Most>];
#pragma unroll
      for (u32 n = 0; n < kWaveTiles<Most>; ++n) tile_zero(o[n]);
      Columns<false> state = begin_columns<false>(a, item, first);
      const u32 behind = first + kTileVectors < vectors ? first + kTileVectors : vectors;
      const u32 low = item.position + first / item.heads, high = item.position + (behind - 1) / item.heads;
      for (u32 base = lowest_position(a, low) / kTileKeys * kTileKeys; base <= high; base += kTileKeys) {
        const bool seen = behind == first + kTileVectors && all_seen(a, low, high, base);
        attend_tile<Type, Most, false>(a, item.head, wave_uniform(table[base / kPageRows]), base, high + 1, seen,
                                       q + first * kQueryStride<Most>, first_tile, state, o);
      }
#pragma unroll
      for (u32 j = 0; j < state.count; ++j) {
        const u32 vector = first + tile_own_column(j);
        const float total = tile_column_sum(state.sum[j]);
        if (vector < vectors) {
          const float factor = final_factor(a, item.first_head + vector % item.heads, state.max[j] * kLn2, total);
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
    }
    block_sync();
  }
}

} // namespace apu::gpu
