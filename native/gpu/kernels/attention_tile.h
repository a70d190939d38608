// Attention on matrix tiles over F16 and Q8_0 caches: one wave, 16 query vectors, 32 positions at a time.
//
// S (16 vectors, 32 positions) = Q K^T, an online softmax in float32 with two or four lanes a vector, O (16, dv) += P
// V. Keys and values go from device memory straight into the tiles' registers, 16 bytes a lane, each element once; Q8_0
// becomes halves on the way (values times scales, rounded to a half). Queries and the exponentials are halves in LDS,
// scores and sums float32. Scores are in units of log 2.
#pragma once

#include "attention_items.h"
#include "tile.h"

namespace apu::gpu {

constexpr float kLog2E = 1.44269504f, kLn2 = 0.693147181f;
constexpr u32 kLanesOfVector = kWaveSize / kTileVectors;
constexpr u32 kKeysOfLane = kTileKeys / kLanesOfVector;

struct WaveLds { // of one wave
  float *scores; // (16, 33)
  u32 *weights;  // (16, 16) pairs of exponentials
  float *shrink; // (16)
};
APU_DEVICE WaveLds wave_lds(float *words) {
  WaveLds lds;
  lds.scores = words;
  lds.weights = reinterpret_cast<u32 *>(words + kTileVectors * kScoreRow);
  lds.shrink = words + kTileVectors * kScoreRow + kTileVectors * kTileKeys / 2;
  return lds;
}

// What a lane knows of its vector (row lane / kLanesOfVector): the positions it sees, its maximum, its part of the sum.
struct VectorState {
  u32 low, high; // low > high: none
  float max, sum;
};

APU_DEVICE VectorState vector_state(const AttentionArgs &a, const Item &item, u32 first_vector) {
  const u32 vector = first_vector + lane_id() / kLanesOfVector;
  VectorState v = {1, 0, kMinusInfinity, 0.0f};
  if (vector < item.rows * item.heads) {
    v.high = item.position + vector / item.heads;
    v.low = lowest_position(a, v.high);
  }
  return v;
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
// 2 * kTileDepth neighbouring elements; `count` of them, a multiple of 8, exist, the others are 0.
APU_DEVICE void load_halves(const u16 *from, u32 *words, u32 count = 2 * kTileDepth) {
#pragma unroll
  for (u32 i = 0; i < kTileDepth; i += 4) {
    u32x4 v = {0, 0, 0, 0};
    if (2 * i < count) v = load16(from + 2 * i);
#pragma unroll
    for (u32 j = 0; j < 4; ++j) words[i + j] = v[j];
  }
}
// Rows of a matrix of halves in LDS, its 32 columns from `from` on.
APU_DEVICE void load_line_halves(TileLines &lines, const u16 *from, u32 stride) {
#pragma unroll
  for (u32 i = 0; i < kTileLines; ++i) {
    const u16 *row = from + tile_line_row(i) * stride + tile_line_begin();
#pragma unroll
    for (u32 j = 0; j < kTileDepth; j += 4) {
      const u32x4 v = load16_shared(row + 2 * j);
#pragma unroll
      for (u32 w = 0; w < 4; ++w) lines.v[i][j + w] = v[w];
    }
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

// Elements [32 c, 32 c + 32) of positions [r, r + 16) of a page.
template <u32 Type> APU_DEVICE void load_keys(TileLines &lines, const u8 *part, u32 r, u32 c, u32 d) {
  const u32 begin = 32 * c + tile_line_begin();
#pragma unroll
  for (u32 i = 0; i < kTileLines; ++i) {
    const u32 row = r + tile_line_row(i);
    if constexpr (Type == kF16) {
      load_halves(reinterpret_cast<const u16 *>(part) + row * d + begin, lines.v[i], begin < d ? d - begin : 0);
    } else {
      load_bytes(part + row * d + begin, lines.v[i]);
      const u16 *scales = reinterpret_cast<const u16 *>(part + kPageRows * d);
      const u32 scale = scales[kv_scale_index<false>(row, c, d)], pair = scale | scale << 16;
#pragma unroll
      for (u32 j = 0; j < kTileDepth; ++j) lines.v[i][j] = half2_mul(lines.v[i][j], pair);
    }
  }
}

// Elements [16 n, 16 n + 16) of positions [r, r + 32) of a page; those behind dv repeat the last.
template <u32 Type> APU_DEVICE void load_values(TileLines &lines, const u8 *part, u32 r, u32 n, u32 dv) {
  const u32 tile = r / kValueTile, begin = tile_line_begin();
#pragma unroll
  for (u32 i = 0; i < kTileLines; ++i) {
    u32 m = 16 * n + tile_line_row(i);
    m = m < dv ? m : dv - 1;
    const u32 at = (tile * dv + m) * kValueTile + begin;
    if constexpr (Type == kF16) {
      load_halves(reinterpret_cast<const u16 *>(part) + at, lines.v[i]);
    } else {
      load_bytes(part + at, lines.v[i]);
      const u16 *scales = reinterpret_cast<const u16 *>(part + kPageRows * dv);
      TileLines pairs;
      load_halves(scales + kv_scale_index<true>(r, n / 2, dv) + begin, pairs.v[0]);
#pragma unroll
      for (u32 j = 0; j < kTileDepth; ++j) lines.v[i][j] = half2_mul(lines.v[i][j], pairs.v[0][j]);
    }
  }
}

// Vectors [first, first + 16) of the item, times the scale, as halves in LDS (16, kQueryStride); zero behind d and
// behind the last vector. By one wave.
template <u32 Most>
APU_DEVICE void load_queries(const AttentionArgs &a, const Item &item, u32 first, u32 step, u32 begin, u16 *to) {
  const u32 d = a.k_state.head_size, vectors = item.rows * item.heads;
  const float scale = a.cap != 0.0f ? a.scale : a.scale * kLog2E;
  for (u32 i = begin; i < kTileVectors * Most; i += step) {
    const u32 vector = first + i / Most, m = i % Most;
    float x = 0.0f;
    if (vector < vectors && m < d) {
      const u32 row = item.row + vector / item.heads, head = item.first_head + vector % item.heads;
      x = a.q[(u64(row) * a.heads + head) * d + m] * scale;
    }
    to[i / Most * kQueryStride<Most> + m] = float_to_half(x);
  }
}

// Exponentials of a tile's scores, in place of them as halves; `base` is the tile's first position.
APU_DEVICE void softmax_tile(const AttentionArgs &a, const WaveLds &lds, u32 base, VectorState &state) {
  const u32 row = lane_id() / kLanesOfVector, first = lane_id() % kLanesOfVector * kKeysOfLane;
  const float *scores = lds.scores + row * kScoreRow + first;
  float s[kKeysOfLane], most = kMinusInfinity;
#pragma unroll
  for (u32 j = 0; j < kKeysOfLane; ++j) {
    const u32 position = base + first + j;
    float x = scores[j];
    if (a.cap != 0.0f) x = soft_cap(x, a.cap) * kLog2E;
    s[j] = position >= state.low && position <= state.high ? x : kMinusInfinity;
    most = max_f32(most, s[j]);
  }
#pragma unroll
  for (u32 mask = 1; mask < kLanesOfVector; mask *= 2) most = max_f32(most, wave_shuffle_xor(most, mask));
  const float max = max_f32(state.max, most), from = max == kMinusInfinity ? 0.0f : max;
  const float shrink = exp2_f32(state.max - from);
  float sum = 0.0f;
  u32 *weights = lds.weights + (row * kTileKeys + first) / 2;
#pragma unroll
  for (u32 j = 0; j < kKeysOfLane; j += 2) {
    const float x = exp2_f32(s[j] - from), y = exp2_f32(s[j + 1] - from);
    sum += x + y;
    weights[j / 2] = u32(float_to_half(x)) | u32(float_to_half(y)) << 16;
  }
  state.sum = fma_f32(state.sum, shrink, sum);
  state.max = max;
  if (first == 0) lds.shrink[row] = shrink;
}

// Adds positions [base, base + 32) to a wave's vectors; those from `end` on may hold anything. `q` (16, kQueryStride).
template <u32 Type, u32 Most>
APU_DEVICE void attend_tile(const AttentionArgs &a, u32 head, u32 page, u32 base, u32 end, const u16 *q,
                            const WaveLds &lds, VectorState &state, TileC (&o)[Most / 16]) {
  const u32 d = a.k_state.head_size, dv = a.v_state.head_size, r = base % kPageRows;
  const u8 *k = page_part(a.k_state, page, head), *v = page_part(a.v_state, page, head);
  // As many values as registers can hold are on their way while the scores are made.
  constexpr u32 of_tile = kTileLines * kTileDepth, room = (Most > 128 ? 0 : kTileDepth >= 8 ? 32 : 64) / of_tile;
  constexpr u32 ahead = room < Most / 16 ? room : Most / 16;

  TileC s[2];
  tile_zero(s[0]);
  tile_zero(s[1]);
#pragma unroll
  for (u32 c = 0; c < Most / 32; ++c) {
    if (32 * c < d) {
      TileLines lines;
      TileA vectors[2];
      TileB keys[2];
      load_line_halves(lines, q + 32 * c, kQueryStride<Most>);
      tile_lines_a(vectors, lines);
#pragma unroll
      for (u32 t = 0; t < 2; ++t) {
        load_keys<Type>(lines, k, r + 16 * t, c, d);
        tile_lines_b(keys, lines);
        tile_multiply(s[t], vectors[0], keys[0]);
        tile_multiply(s[t], vectors[1], keys[1]);
      }
    }
  }
  TileLines values[ahead + 1];
#pragma unroll
  for (u32 n = 0; n < ahead; ++n)
    if (16 * n < dv) load_values<Type>(values[n], v, r, n, dv);
#pragma unroll
  for (u32 t = 0; t < 2; ++t)
#pragma unroll
    for (u32 i = 0; i < kTileRegisters; ++i) lds.scores[tile_row(i) * kScoreRow + 16 * t + tile_column(i)] = s[t].v[i];
  wave_sync();
  softmax_tile(a, lds, base, state);
  wave_sync();
  float shrink[kTileRegisters];
  bool shrinks = false;
#pragma unroll
  for (u32 i = 0; i < kTileRegisters; ++i) {
    shrink[i] = lds.shrink[tile_row(i)];
    shrinks |= shrink[i] != 1.0f;
  }
  if (wave_any(shrinks)) {
#pragma unroll
    for (u32 n = 0; n < Most / 16; ++n)
#pragma unroll
      for (u32 i = 0; i < kTileRegisters; ++i) o[n].v[i] *= shrink[i];
  }
  TileLines lines;
  TileA weights[2];
  load_line_halves(lines, reinterpret_cast<const u16 *>(lds.weights), kTileKeys);
  tile_lines_a(weights, lines);
#pragma unroll
  for (u32 n = 0; n < Most / 16; ++n) {
    if (16 * n < dv) {
      if (n < ahead)
        lines = values[n < ahead ? n : 0];
      else
        load_values<Type>(lines, v, r, n, dv);
      if (base + kTileKeys > end) { // what lies there is not written yet, and may be NaN
#pragma unroll
        for (u32 i = 0; i < kTileLines; ++i) cut_line(lines.v[i], tile_line_begin(), end - base);
      }
      TileB columns[2];
      tile_lines_b(columns, lines);
      tile_multiply(o[n], weights[0], columns[0]);
      tile_multiply(o[n], weights[1], columns[1]);
    }
  }
  wave_sync(); // before the next tile's scores
}

// ---- few rows of a sequence: a block takes a span, waves every so many tiles of it
// -----------------------------------

template <u32 Type, u32 Most> APU_DEVICE void attention_span(AttentionArgs a) {
  constexpr u32 waves = kAttentionThreads / kWaveSize, together = kSpanWords<Most, waves> / (kTileVectors * Most);
  const u32 wave = wave_uniform(wave_id());
  float *acc = reinterpret_cast<float *>(dynamic_shared()); // (16, dv)
  float *maxima = acc + kTileVectors * Most;                // (waves, 16)
  float *sums = maxima + kTileVectors * waves;              // (waves, 16)
  float *max = sums + kTileVectors * waves;                 // (16)
  float *sum = max + kTileVectors;                          // (16)
  u32 *flag = reinterpret_cast<u32 *>(sum + kTileVectors);
  float *region = sum + kTileVectors + 4; // queries and the waves' own; then accumulators; then the combination's
  u16 *q = reinterpret_cast<u16 *>(region);
  const WaveLds lds = wave_lds(region + kTileVectors * kQueryStride<Most> / 2 + wave * kWaveWords);

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
      load_queries<Most>(a, item, 0, kAttentionThreads, thread_id(), q);
      TileC o[Most / 16];
#pragma unroll
      for (u32 n = 0; n < Most / 16; ++n) tile_zero(o[n]);
      VectorState state = vector_state(a, item, 0);
      u32 begin, end;
      span_range(a, item, &begin, &end);
      block_sync();
      for (u32 base = item.span * kSpan + wave * kTileKeys; base < end; base += waves * kTileKeys)
        if (base + kTileKeys > begin)
          attend_tile<Type, Most>(a, item.head, wave_uniform(table[base / kPageRows]), base, end, q, lds, state, o);

      // The waves' results become one, in the waves' order.
      const u32 row = lane_id() / kLanesOfVector;
#pragma unroll
      for (u32 mask = 1; mask < kLanesOfVector; mask *= 2) state.sum += wave_shuffle_xor(state.sum, mask);
      if (lane_id() % kLanesOfVector == 0) {
        maxima[wave * kTileVectors + row] = state.max;
        sums[wave * kTileVectors + row] = state.sum;
      }
      block_sync();
      if (thread_id() < kTileVectors) {
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
          float *to = region + (wave - first) * kTileVectors * Most;
#pragma unroll
          for (u32 i = 0; i < kTileRegisters; ++i) {
            const u32 v = tile_row(i);
            const float factor = maxima[wave * kTileVectors + v];
            if (v < vectors) {
#pragma unroll
              for (u32 n = 0; n < Most / 16; ++n)
                if (16 * n + tile_column(i) < dv) to[v * dv + 16 * n + tile_column(i)] = o[n].v[i] * factor;
            }
          }
        }
        block_sync();
        const u32 count = waves - first < together ? waves - first : together;
        for (u32 i = thread_id(); i < vectors * dv; i += kAttentionThreads) {
          float x = first ? acc[i] : 0.0f;
          for (u32 w = 0; w < count; ++w) x += region[w * kTileVectors * Most + i];
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
  constexpr u32 own = kTileVectors * kQueryStride<Most> / 2 + kWaveWords;
  const u32 dv = a.v_state.head_size;
  float *region = reinterpret_cast<float *>(dynamic_shared()) + wave_id() * own;
  u16 *q = reinterpret_cast<u16 *>(region);
  const WaveLds lds = wave_lds(region + kTileVectors * kQueryStride<Most> / 2);

  const Survey survey = survey_step(a);
  for (u32 index = block_id(); index < survey.items; index += grid_size()) {
    const Item item = find_item(a, survey, survey.items - 1 - index); // the longest first
    const u32 vectors = item.rows * item.heads, first = wave_uniform(wave_id()) * kTileVectors;
    if (first >= vectors) continue;
    const u32 *table = page_table(a.step, item.sequence, a.k_state.group);
    load_queries<Most>(a, item, first, kWaveSize, lane_id(), q);
    wave_sync();
    TileC o[Most / 16];
#pragma unroll
    for (u32 n = 0; n < Most / 16; ++n) tile_zero(o[n]);
    VectorState state = vector_state(a, item, first);
    const u32 behind = first + kTileVectors < vectors ? first + kTileVectors : vectors;
    const u32 begin = lowest_position(a, item.position + first / item.heads);
    const u32 end = item.position + (behind - 1) / item.heads + 1;
    for (u32 base = begin / kTileKeys * kTileKeys; base < end; base += kTileKeys)
      attend_tile<Type, Most>(a, item.head, wave_uniform(table[base / kPageRows]), base, end, q, lds, state, o);
#pragma unroll
    for (u32 mask = 1; mask < kLanesOfVector; mask *= 2) state.sum += wave_shuffle_xor(state.sum, mask);
    const u32 vector = first + lane_id() / kLanesOfVector;
    if (lane_id() % kLanesOfVector == 0 && vector < vectors)
      lds.shrink[lane_id() / kLanesOfVector] =
          final_factor(a, item.first_head + vector % item.heads, state.max * kLn2, state.sum);
    wave_sync();
#pragma unroll
    for (u32 i = 0; i < kTileRegisters; ++i) {
      const u32 v = tile_row(i);
      const float factor = lds.shrink[v];
      if (first + v < vectors) {
        float *out = output_row(a, item, first + v);
#pragma unroll
        for (u32 n = 0; n < Most / 16; ++n)
          if (16 * n + tile_column(i) < dv) out[16 * n + tile_column(i)] = o[n].v[i] * factor;
      }
    }
    wave_sync();
  }
}

} // namespace apu::gpu
