// Choosing from a vocabulary's logits with one block and without sorting it.
//
// A View is a list of cells of 64 consecutive logits, ascending. Passes over it take kTileCells cells a wave at a time.
// Weights are summed as integers, 2^-39 each: such sums are the same in any order, so that they may be gathered with
// atomics and are still deterministic, and what they round away cannot be drawn in a lifetime.
//   select: the largest key above or at which the view holds a given mass (three passes over digits of the key).
//   locate: the first token, in order of ids, with which the mass passes a given one.
#pragma once

#include "gpu.h"
#include "sample.h"

namespace apu::gpu {

constexpr u32 kFinishWaves = kFinishThreads / kWaveSize;
constexpr u32 kBins = 2048;

struct View {
  const float *x;
  u32 size;        // of x
  const u32 *list; // chosen cells, or null: those from `first` on
  u32 cells;       // of the list, or from `first` on
  u32 first;
};

struct SelectShared {
  u32 low[kBins], high[kBins]; // sums of 64 bits
  u64 wave_totals[kFinishWaves + 1];
  u64 found[4];
};

APU_DEVICE u64 shuffle64(u64 v, u32 lane) {
  return u64(wave_shuffle(u32(v >> 32), lane)) << 32 | wave_shuffle(u32(v), lane);
}
APU_DEVICE u64 shuffle_xor64(u64 v, u32 mask) {
  return u64(wave_shuffle_xor(u32(v >> 32), mask)) << 32 | wave_shuffle_xor(u32(v), mask);
}
APU_DEVICE u64 wave_sum64(u64 v) {
#pragma unroll
  for (u32 i = 1; i < kWaveSize; i *= 2) v += shuffle_xor64(v, kWaveSize / 2 / i);
  return v;
}

// Sums over this lane and those before it, of u32 or u64.
template <class T> APU_DEVICE T wave_scan(T v) {
#pragma unroll
  for (u32 distance = 1; distance < kWaveSize; distance *= 2) {
    const u32 from = lane_id() >= distance ? lane_id() - distance : lane_id();
    T other;
    if constexpr (sizeof(T) == 8)
      other = shuffle64(v, from);
    else
      other = wave_shuffle(v, from);
    if (lane_id() >= distance) v += other;
  }
  return v;
}

// Sum of v over the threads before this one; `total` over all. Ends with all threads past their reads of `totals`.
template <class T> APU_DEVICE T block_scan(T v, T *totals, T &total) {
  static_assert(kFinishWaves <= kWaveSize);
  const T sum = wave_scan(v);
  if (lane_id() == kWaveSize - 1) totals[wave_id()] = sum;
  block_sync();
  if (wave_id() == 0) {
    const T mine = lane_id() < kFinishWaves ? totals[lane_id()] : 0, all = wave_scan(mine);
    if (lane_id() < kFinishWaves) totals[lane_id()] = all - mine;
    if (lane_id() == kFinishWaves - 1) totals[kFinishWaves] = all;
  }
  block_sync();
  const T before = totals[wave_id()];
  total = totals[kFinishWaves];
  block_sync();
  return before + sum - v;
}

// Order of floats as unsigned integers; the two zeros are equal.
APU_DEVICE u32 ordered(float x) {
  const u32 u = x == 0 ? 0 : float_to_bits(x);
  return u & 0x80000000u ? ~u : u | 0x80000000u;
}
APU_DEVICE float from_ordered(u32 key) {
  return bits_to_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

constexpr u64 kUnitMass = u64(1) << 39; // of weight 1
APU_DEVICE u64 mass_of(float weight) {  // 0 to 1
  return weight > 0 ? u64(weight * 0x1p39f) : 0;
}

// use(value, index) for every element of tiles `tile`, with all lanes of the wave in step. An index past the end comes
// with -infinity.
template <class Use> APU_DEVICE void for_tile(const View &view, u32 tile, const Use &use) {
  constexpr u32 items = kTileCells * (kCell / kWaveSize);
  float v[items];
  u32 id[items];
#pragma unroll
  for (u32 i = 0; i < items; ++i) {
    const u32 at = tile * kTileCells + i / (kCell / kWaveSize);
    const u32 cell = at >= view.cells ? 0 : view.list ? view.list[at] : view.first + at;
    id[i] = cell * kCell + i % (kCell / kWaveSize) * kWaveSize + lane_id();
    if (at >= view.cells || id[i] >= view.size) id[i] = kNone;
    v[i] = id[i] == kNone ? -__builtin_inff() : view.x[id[i]];
  }
#pragma unroll
  for (u32 i = 0; i < items; ++i) use(v[i], id[i]);
}
APU_DEVICE u32 tiles_of(const View &view) {
  return (view.cells + kTileCells - 1) / kTileCells;
}
template <class Use> APU_DEVICE void for_each(const View &view, const Use &use) {
  for (u32 tile = wave_id(); tile < tiles_of(view); tile += kFinishWaves) for_tile(view, tile, use);
}

struct Selected {
  u32 key = 0;
  u64 above = 0; // mass of larger keys
  u64 at = 0;    // mass at the key
  u64 goal = 0;  // what was wanted
  bool any = false;
};

// `wanted` is called with the view's mass; what it returns is cut to 1 to that mass.
template <class Key, class Mass, class Wanted>
APU_DEVICE Selected select(const View &view, const Key &key, const Mass &mass, const Wanted &wanted, SelectShared &s) {
  static_assert(2 * kFinishThreads == kBins);
  Selected result;
#pragma unroll 1
  for (u32 pass = 0; pass < 3; ++pass) {
    const u32 shift = pass == 0 ? 21 : pass == 1 ? 10 : 0, bits = pass == 2 ? 10 : 11;
    for (u32 b = thread_id(); b < kBins; b += kFinishThreads) s.low[b] = s.high[b] = 0;
    block_sync();
    for_each(view, [&](float x, u32 id) {
      if (id == kNone) return;
      const u32 k = key(x, id);
      if (pass && k >> (shift + bits) != result.key >> (shift + bits)) return;
      const u64 m = mass(x, id);
      if (!m) return;
      const u32 bin = k >> shift & ((1u << bits) - 1), low = u32(m);
      const u32 old = atomic_add(&s.low[bin], low);
      const u32 high = u32(m >> 32) + (old + low < old ? 1 : 0);
      if (high) atomic_add(&s.high[bin], high);
    });
    block_sync();
    // thread t takes the bins 2 t and 2 t + 1 from the top
    const u32 first = kBins - 1 - 2 * thread_id(), second = first - 1;
    const u64 a = u64(s.high[first]) << 32 | s.low[first], b = u64(s.high[second]) << 32 | s.low[second];
    u64 total;
    const u64 before = result.above + block_scan(a + b, s.wave_totals, total);
    if (pass == 0) {
      if (total == 0) return result;
      const u64 goal = wanted(total);
      result.goal = goal < 1 ? 1 : goal > total ? total : goal;
    }
    if (before < result.goal && result.goal <= before + a + b) {
      const bool one = result.goal <= before + a;
      s.found[0] = one ? first : second;
      s.found[1] = one ? before : before + a;
      s.found[2] = one ? a : b;
    }
    block_sync();
    result.key |= u32(s.found[0]) << shift;
    result.above = s.found[1];
    result.at = s.found[2];
  }
  result.any = true;
  return result;
}

// The first index, ascending, with which the mass of the view exceeds wanted(its whole mass); kNone where it has none.
// mass(value, index) of an index past the end is not asked.
template <class Mass, class Wanted>
APU_DEVICE u32 locate(const View &view, const Mass &mass, const Wanted &wanted, u64 *tile_mass, SelectShared &s) {
  const u32 tiles = tiles_of(view);
  for (u32 tile = wave_id(); tile < tiles; tile += kFinishWaves) {
    u64 sum = 0;
    for_tile(view, tile, [&](float x, u32 id) {
      if (id != kNone) sum += mass(x, id);
    });
    sum = wave_sum64(sum);
    if (lane_id() == 0) tile_mass[tile] = sum;
  }
  block_sync();
  const u32 run = (tiles + kFinishThreads - 1) / kFinishThreads, begin = thread_id() * run;
  u64 sum = 0, total;
  for (u32 i = begin; i < begin + run && i < tiles; ++i) sum += tile_mass[i];
  u64 before = block_scan(sum, s.wave_totals, total);
  if (total == 0) return kNone;
  u64 goal = wanted(total);
  if (goal >= total) goal = total - 1;
  if (before <= goal && goal < before + sum) {
    u32 tile = begin;
    while (before + tile_mass[tile] <= goal) before += tile_mass[tile++];
    s.found[0] = tile;
    s.found[1] = goal - before;
  }
  block_sync();
  static_assert(kTileCells * kCell <= kFinishThreads);
  const u32 tile = u32(s.found[0]), at = tile * kTileCells + thread_id() / kCell;
  u32 id = kNone;
  u64 mine = 0;
  if (thread_id() < kTileCells * kCell && at < view.cells) {
    id = (view.list ? view.list[at] : view.first + at) * kCell + thread_id() % kCell;
    if (id < view.size) mine = mass(view.x[id], id);
  }
  goal = s.found[1];
  u64 all;
  before = block_scan(mine, s.wave_totals, all);
  if (before <= goal && goal < before + mine) s.found[2] = id;
  block_sync();
  return u32(s.found[2]);
}

// The cells whose largest logit passes `keep`, ascending, into `list`; returns how many.
template <class Keep>
APU_DEVICE u32 list_cells(const float *cells, u32 count, const Keep &keep, u32 *list, SelectShared &s) {
  const u32 run = (count + kFinishThreads - 1) / kFinishThreads, begin = thread_id() * run;
  u64 mine = 0, total;
  for (u32 i = begin; i < begin + run && i < count; ++i) mine += keep(cells[i]);
  u32 at = u32(block_scan(mine, s.wave_totals, total));
  for (u32 i = begin; i < begin + run && i < count; ++i)
    if (keep(cells[i])) list[at++] = i;
  block_sync();
  return u32(total);
}

// Sorts n keys ascending, in LDS or in device memory, by a bitonic network whose first step of each merge mirrors: it
// works for any n. before(a, b): a comes first. Starts and ends with a barrier.
template <class T, class Before> APU_DEVICE void block_sort(T *v, u32 n, const Before &before) {
  for (u32 size = 2; size / 2 < n; size *= 2) {
    for (u32 step = size / 2; step; step /= 2) {
      block_sync();
      for (u32 i = thread_id(); i < (n + size - 1) / size * (size / 2); i += kFinishThreads) {
        const u32 a = i / step * 2 * step + i % step;
        const u32 b = step == size / 2 ? a / size * size + size - 1 - a % size : a + step;
        if (b >= n) continue;
        const T x = v[a], y = v[b];
        if (before(y, x)) v[a] = y, v[b] = x;
      }
    }
  }
  block_sync();
}

// How many of v[0..n) come before v[index], for index thread_id() / 4 < n, n at most kRanked; in all of its four
// threads.
constexpr u32 kRanked = kFinishThreads / 4;
template <class T, class Before> APU_DEVICE u32 rank_of(const T *v, u32 n, const Before &before) {
  const u32 index = thread_id() / 4;
  const T mine = v[index < n ? index : 0];
  u32 rank = 0;
#pragma unroll 8
  for (u32 i = thread_id() % 4; i < n; i += 4) rank += before(v[i], i, mine, index);
  rank += wave_shuffle_xor(rank, 1);
  return rank + wave_shuffle_xor(rank, 2);
}

} // namespace apu::gpu
