// INDEX: which compressed rows a row attends to, by the scores of many small heads.
//
// index_queries rotates and rounds the queries, a wave for each head. index_scores_* make the scores: rows in F16 whose
// queries were rounded to FP4, which halves hold exactly, go through matrix tiles, a wave taking 16 rows and all heads;
// everything else through FMA, a thread for a row. index_choose ends each row of the step with one block: the key of
// the k-th score from three histograms (select.h), then the rows above it and the first of those at it, in order. Where
// no more than k rows can be seen nothing is scored. A score depends on nothing but the row and the compressed row.
// Moves, for each row of the step, 2 d bytes (F16) and 4 of each compressed row, then the 4 again for each histogram.
#include "index.h"
#include "kv.h"
#include "rotate.h"
#include "rounding.h"
#include "select.h"
#include "tile.h"

namespace apu::gpu {

constexpr u32 kFirstShift = 21, kSecondShift = 10; // of a key's digits, of 11, 11 and 10 bits
static_assert(kBins == 1u << 11 && kBins == kIndexBins);

// The sequence of row t of the step, and how many compressed rows it sees; false behind the step's rows, which hold
// something, too, so that all of it is on its way at once.
APU_DEVICE bool row_of_step(const IndexArgs &a, u32 t, u32 &sequence, u32 &seen) {
  const Row row = a.step.rows[t];
  sequence = row.sequence;
  seen = (row.position + 1) / a.tokens;
  return t < a.step.counts->rows;
}

// x or 0; NaN stays.
APU_DEVICE float positive(float x) {
  return x < 0.0f ? 0.0f : x;
}

// A score that is not a number is the least.
APU_DEVICE float score_of(float sum, float scale) {
  const float score = sum * scale;
  return score == score ? score : -__builtin_inff();
}

// By the block: counts the first bits of its keys, (kIndexBlockRows) in LDS, 0 where there is none. The first of equals
// adds all of them. Begins and ends with a barrier.
APU_DEVICE void count_keys(const u32 *keys, u32 *counts) {
  block_sync();
  const u32 i = thread_id();
  if (i < kIndexBlockRows && keys[i]) {
    const u32 mine = keys[i] >> kFirstShift;
    u32 same = 0, earlier = 0;
#pragma unroll 4
    for (u32 j = 0; j < kIndexBlockRows; j += 4) {
      const u32x4 four = *reinterpret_cast<const u32x4 *>(keys + j);
#pragma unroll
      for (u32 e = 0; e < 4; ++e) {
        const u32 equal = four[e] >> kFirstShift == mine;
        same += equal;
        earlier += j + e < i ? equal : 0;
      }
    }
    if (earlier == 0) atomic_add(counts + mine, same);
  }
  block_sync();
}

// Grid (rows, heads in groups of waves).
APU_KERNEL(kIndexThreads) void index_queries(IndexArgs a) {
  constexpr u32 waves = kIndexThreads / kWaveSize, items = 4;
  const u32 t = block_id(), lane = lane_id(), wave = wave_uniform(wave_id()), h = block_id_y() * waves + wave;
  const u32 d = a.rows.head_size;
  float *cos = reinterpret_cast<float *>(dynamic_shared()), *sin = cos + a.pairs, *x = sin + a.pairs + wave * d;
  float *q = a.q + (u64(t) * a.heads + h) * d;
  const u32 position = a.step.rows[t].position; // rows behind the step's hold something, too
  const float weight = h < a.heads && a.tiles ? a.weights[u64(t) * a.heads + h] : 0.0f;
  if (h < a.heads) {
    for (u32 begin = lane; begin < d; begin += items * kWaveSize) {
      float v[items];
#pragma unroll
      for (u32 i = 0; i < items; ++i) v[i] = begin + i * kWaveSize < d ? q[begin + i * kWaveSize] : 0.0f;
#pragma unroll
      for (u32 i = 0; i < items; ++i)
        if (begin + i * kWaveSize < d) x[begin + i * kWaveSize] = v[i];
    }
  }
  if (t >= a.step.counts->rows) return;
  turn_pairs<kIndexThreads>(a, position, cos, sin);
  block_sync();
  if (h < a.heads) {
    rotate_wave(x + d - 2 * a.pairs, cos, sin, a.pairs, a.halves);
    round_row(a.round, x, d, 2 * a.pairs, a.shrink);
    for (u32 m = lane; m < d; m += kWaveSize) q[m] = x[m];
  }
  if (!a.tiles || h >= a.padded) return;
  // The largest becomes 2^14 or more, so that halves hold all that is not 2^-36 of it.
  float amax = 0.0f;
  if (h < a.heads)
    for (u32 m = lane; m < d; m += kWaveSize) amax = max_f32(amax, fabs_f32(x[m]));
  amax = wave_max(amax);
  const int exponent = amax >= 0x1p-100f && amax <= 0x1p100f ? 14 - quant::binary_exponent(amax) : 0;
  const float power = quant::power_of_two(exponent);
  u16 *to = a.tiles + (u64(t) * a.padded + h) * d;
  for (u32 m = lane; m < d; m += kWaveSize) to[m] = h < a.heads ? float_to_half(x[m] * power) : u16(0);
  if (lane == 0) a.scaled[u64(t) * a.padded + h] = weight * quant::power_of_two(-exponent);
}

// 32 elements of 16 rows, as lines of a tile.
APU_DEVICE void load_line(TileLines &lines, const u16 *from, u32 stride) {
#pragma unroll
  for (u32 i = 0; i < kTileLines; ++i) {
    const u16 *p = from + tile_line_row(i) * stride + tile_line_begin();
#pragma unroll
    for (u32 j = 0; j < kTileDepth; j += 4) {
      const u32x4 v = load16(p + 2 * j);
#pragma unroll
      for (u32 w = 0; w < 4; ++w) lines.v[i][j + w] = v[w];
    }
  }
}
APU_DEVICE void load_line_shared(TileLines &lines, const u16 *from, u32 stride) {
#pragma unroll
  for (u32 i = 0; i < kTileLines; ++i) {
    const u16 *p = from + tile_line_row(i) * stride + tile_line_begin();
#pragma unroll
    for (u32 j = 0; j < kTileDepth; j += 4) {
      const u32x4 v = *reinterpret_cast<const u32x4 *>(p + 2 * j);
#pragma unroll
      for (u32 w = 0; w < 4; ++w) lines.v[i][j + w] = v[w];
    }
  }
}

// S (16 heads, 16 rows) = Q C^T; then down its columns. Pages hold a multiple of 16 rows in F16 of kIndexTileElements,
// 16-byte aligned. Grid (rows in groups of 16 for each wave, or fewer blocks, rows of the turn).
APU_KERNEL(kIndexThreads) void index_scores_tiles(IndexArgs a) {
  constexpr u32 waves = kIndexThreads / kWaveSize, d = kIndexTileElements, steps = d / 32;
  constexpr u32 of_block = waves * kIndexTileRows;
  APU_SHARED u32x4 fours[kIndexBlockRows / 4];
  u32 *keys = reinterpret_cast<u32 *>(fours);
  static_assert(of_block <= kIndexBlockRows);
  const u32 t = a.first + block_id_y();
  u32 sequence, n;
  if (!row_of_step(a, t, sequence, n)) return;
  u32 begin = block_id() * of_block;
  if (n <= a.k || begin >= n) return;
  const u32 *table = page_table(a.step, sequence, a.rows.group);
  const u32 place = wave_uniform(wave_id()) * kIndexTileRows;
  TileLines lines[steps];
  const auto load_rows = [&](u32 base) { // a wave behind the last row takes the block's first ones again
    const u32 r = base + place < n ? base + place : base, page = wave_uniform(table[r / a.rows.page_rows]);
    const u16 *rows = reinterpret_cast<const u16 *>(page_part(a.rows, page, 0)) + r % a.rows.page_rows * d;
#pragma unroll
    for (u32 s = 0; s < steps; ++s) load_line(lines[s], rows + 32 * s, d);
  };
  load_rows(begin);
  u16 *q = reinterpret_cast<u16 *>(dynamic_shared()); // (padded, kIndexTileStride)
  float *weights = reinterpret_cast<float *>(q + a.padded * kIndexTileStride);
  const u16 *from = a.tiles + u64(t) * a.padded * d;
#pragma unroll 4
  for (u32 u = thread_id(); u < a.padded * (d / 8); u += kIndexThreads)
    store16(q + u / (d / 8) * kIndexTileStride + u % (d / 8) * 8, load16(from + u * 8));
  for (u32 h = thread_id(); h < a.padded; h += kIndexThreads) weights[h] = a.scaled[u64(t) * a.padded + h];
  for (u32 i = thread_id(); i < kIndexBlockRows; i += kIndexThreads) keys[i] = 0;
  block_sync();
  float *scores = a.scores + u64(block_id_y()) * a.most;
  for (;;) {
    TileB b[steps][2];
#pragma unroll
    for (u32 s = 0; s < steps; ++s) tile_lines_b(b[s], lines[s]);
    float sum[kTileOwn] = {};
#pragma unroll 1
    for (u32 h = 0; h < a.padded; h += kIndexTileHeads) {
      constexpr u32 tiles = kIndexTileHeads / 16; // whose sums do not wait for each other
      TileC c[tiles];
#pragma unroll
      for (u32 k = 0; k < tiles; ++k) tile_zero(c[k]);
#pragma unroll
      for (u32 s = 0; s < steps; ++s)
#pragma unroll
        for (u32 k = 0; k < tiles; ++k) {
          TileLines heads;
          load_line_shared(heads, q + (h + 16 * k) * kIndexTileStride + 32 * s, kIndexTileStride);
          TileA x[2];
          tile_lines_a(x, heads);
          tile_multiply(c[k], x[0], b[s][0]);
          tile_multiply(c[k], x[1], b[s][1]);
        }
#pragma unroll
      for (u32 k = 0; k < tiles; ++k)
#pragma unroll
        for (u32 i = 0; i < kTileRegisters; ++i)
          sum[tile_own(i)] = fma_f32(weights[h + 16 * k + tile_row(i)], positive(c[k].v[i]), sum[tile_own(i)]);
    }
#pragma unroll
    for (u32 j = 0; j < kTileOwn; ++j) {
      const float all = tile_column_sum(sum[j]);
      const u32 column = tile_own_column(j), row = begin + place + column;
      if (tile_row(0) != 0) continue;
      const float score = score_of(all, a.scale);
      if (row < n) scores[row] = score;
      keys[place + column] = row < n ? ordered(score) : 0;
    }
    begin += grid_size() * of_block;
    const bool more = begin < n;
    if (more) load_rows(begin);
    count_keys(keys, a.counts + u64(block_id_y()) * kIndexBins);
    if (!more) break;
  }
}

constexpr u32 kAnyType = ~0u; // known at run time, or pages that are not 16-byte aligned, or rows not of whole eights

// Four elements of a row from m on, m a multiple of 4; zero from d on.
template <u32 Type> APU_DEVICE void load_four(u32 type, const u8 *part, u32 r, u32 m, u32 d, float *v) {
  if constexpr (Type == kF32) {
    const u32x4 x = load16(part + (u64(r) * d + m) * 4);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[i] = bits_to_float(x[i]);
  } else if constexpr (Type == kF16) {
    const u32x2 x = *global_pointer<const u32x2>(u64(part) + (u64(r) * d + m) * 2);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[i] = half_to_float(x[i / 2] >> 16 * (i % 2) & 0xffffu);
  } else {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[i] = m + i < d ? load_element<false>(type, part, r, m + i, d) : 0.0f;
  }
}

// Grid (compressed rows in groups of threads, rows of the turn).
template <u32 Type> APU_DEVICE void index_scores(const IndexArgs &a) {
  static_assert(kIndexFmaThreads == kIndexBlockRows);
  APU_SHARED u32x4 fours[kIndexBlockRows / 4];
  u32 *keys = reinterpret_cast<u32 *>(fours);
  const u32 t = a.first + block_id_y(), d = a.rows.head_size, whole = (d + 3) / 4 * 4;
  u32 sequence, n;
  if (!row_of_step(a, t, sequence, n)) return;
  if (n <= a.k || block_id() * kIndexFmaThreads >= n) return;
  float *q = reinterpret_cast<float *>(dynamic_shared()); // (heads at a time, whole)
  const u32 *table = page_table(a.step, sequence, a.rows.group);
  const u32 r = block_id() * kIndexFmaThreads + thread_id(), row = r < n ? r : n - 1;
  const u8 *part = page_part(a.rows, table[row / a.rows.page_rows], 0);
  const u32 place = row % a.rows.page_rows;
  float sum = 0.0f;
  for (u32 h = 0; h < a.heads; h += kIndexFmaHeads) {
    const u32 count = a.heads - h < kIndexFmaHeads ? a.heads - h : kIndexFmaHeads;
    block_sync();
    for (u32 u = thread_id(); u < kIndexFmaHeads * whole; u += kIndexFmaThreads) {
      const u32 i = u / whole, m = u % whole;
      q[u] = i < count && m < d ? a.q[(u64(t) * a.heads + h + i) * d + m] : 0.0f;
    }
    block_sync();
    float dot[kIndexFmaHeads] = {};
#pragma unroll 2
    for (u32 m = 0; m < d; m += 4) {
      float v[4];
      load_four<Type>(a.rows.dtype, part, place, m, d, v);
#pragma unroll
      for (u32 i = 0; i < kIndexFmaHeads; ++i) {
        const f32x4 x = *reinterpret_cast<const f32x4 *>(q + i * whole + m);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) dot[i] = fma_f32(x[e], v[e], dot[i]);
      }
    }
#pragma unroll
    for (u32 i = 0; i < kIndexFmaHeads; ++i)
      if (i < count) sum = fma_f32(a.weights[u64(t) * a.heads + h + i], positive(dot[i]), sum);
  }
  const float score = score_of(sum, a.scale);
  if (r < n) a.scores[u64(block_id_y()) * a.most + r] = score;
  keys[thread_id()] = r < n ? ordered(score) : 0;
  count_keys(keys, a.counts + u64(block_id_y()) * kIndexBins);
}

APU_KERNEL(kIndexFmaThreads) void index_scores_f32(IndexArgs a) {
  index_scores<kF32>(a);
}
APU_KERNEL(kIndexFmaThreads) void index_scores_f16(IndexArgs a) {
  index_scores<kF16>(a);
}
APU_KERNEL(kIndexFmaThreads) void index_scores_any(IndexArgs a) {
  index_scores<kAnyType>(a);
}

constexpr u32 kKeysOfThread = 16, kKeysOfTurn = kKeysOfThread * kFinishThreads;

// Keys of rows begin + kKeysOfThread * thread_id() on; 0 from n on.
APU_DEVICE void load_keys(const float *scores, u32 begin, u32 n, u32 *keys) {
  const u32 first = begin + kKeysOfThread * thread_id();
#pragma unroll
  for (u32 i = 0; i < kKeysOfThread; i += 4) {
    const u32x4 four = first + i < n ? load16(scores + first + i) : u32x4{};
#pragma unroll
    for (u32 e = 0; e < 4; ++e) keys[i + e] = first + i + e < n ? ordered(bits_to_float(four[e])) : 0;
  }
}

struct ChooseShared {
  u32 counts[kBins];
  u32 totals[kFinishWaves + 1];
  u32 digit, above, at;
};

// By the block, of two bins for each thread, the thread's from the top: that of the k-th key, where `above` keys are
// known to be larger.
APU_DEVICE void find_digit(u32 upper, u32 lower, u32 k, u32 &above, u32 &at, u32 &digit, ChooseShared &s) {
  u32 total;
  const u32 before = above + block_scan(upper + lower, s.totals, total);
  if (before < k && k <= before + upper + lower) {
    const bool one = k <= before + upper;
    s.digit = kBins - 1 - 2 * thread_id() - (one ? 0 : 1);
    s.above = one ? before : before + upper;
    s.at = one ? upper : lower;
  }
  block_sync();
  digit = s.digit, above = s.above, at = s.at;
}

// Keys stay in registers where one turn of the threads holds them all. Grid (rows of the turn).
APU_KERNEL(kFinishThreads) void index_choose(IndexArgs a) {
  APU_SHARED ChooseShared s;
  const u32 t = a.first + block_id(), place = kBins - 2 - 2 * thread_id();
  u32 *counts = a.counts + u64(block_id()) * kBins + place;
  const u32 lower = counts[0], upper = counts[1]; // on their way with the step's row
  u32 sequence, n;
  if (!row_of_step(a, t, sequence, n)) return;
  i32 *ids = a.ids + u64(t) * a.k;
  if (n <= a.k) {
    for (u32 i = thread_id(); i < a.k; i += kFinishThreads) ids[i] = i < n ? i32(i) : -1;
    return;
  }
  const float *scores = a.scores + u64(block_id()) * a.most;
  const bool turns = n > kKeysOfTurn;
  u32 keys[kKeysOfThread];
  load_keys(scores, 0, n, keys);
  u32 above = 0, at, digit;
  counts[0] = counts[1] = 0; // for the next op
  s.counts[place] = s.counts[place + 1] = 0;
  find_digit(upper, lower, a.k, above, at, digit, s);
  u32 shift = kFirstShift, key = digit; // of the k-th, from bit `shift` on
  while (shift && above + at > a.k) {   // not all that have these bits are wanted
    const u32 next = shift == kFirstShift ? kSecondShift : 0;
#pragma unroll 1
    for (u32 begin = 0; begin < n; begin += kKeysOfTurn) {
      if (turns) load_keys(scores, begin, n, keys);
#pragma unroll
      for (u32 i = 0; i < kKeysOfThread; ++i)
        if (keys[i] >> shift == key) atomic_add(&s.counts[keys[i] >> next & ((1u << (shift - next)) - 1)], 1);
    }
    block_sync();
    const u32 more = s.counts[place + 1], less = s.counts[place];
    s.counts[place] = s.counts[place + 1] = 0;
    find_digit(more, less, a.k, above, at, digit, s);
    key = key << (shift - next) | digit;
    shift = next;
  }
  const u32 ties = a.k - above; // of those at the key, the first
  u32 found_above = 0, found_at = 0;
#pragma unroll 1
  for (u32 begin = 0; begin < n; begin += kKeysOfTurn) {
    if (turns) load_keys(scores, begin, n, keys);
    u32 mine = 0, total; // above the key, then at it: 16 bits each
    static_assert(kKeysOfTurn < 1u << 16);
#pragma unroll
    for (u32 i = 0; i < kKeysOfThread; ++i) {
      const u32 digits = keys[i] >> shift;
      mine += digits > key ? 1u << 16 : digits == key;
    }
    const u32 before = block_scan(mine, s.totals, total);
    u32 of_above = found_above + (before >> 16), of_at = found_at + (before & 0xffffu);
    found_above += total >> 16;
    found_at += total & 0xffffu;
    if (mine == 0) continue;
#pragma unroll
    for (u32 i = 0; i < kKeysOfThread; ++i) {
      const u32 digits = keys[i] >> shift;
      const bool is_above = digits > key, is_at = digits == key;
      if (is_above || (is_at && of_at < ties))
        ids[of_above + (of_at < ties ? of_at : ties)] = i32(begin + kKeysOfThread * thread_id() + i);
      of_above += is_above;
      of_at += is_at;
    }
  }
}

} // namespace apu::gpu
