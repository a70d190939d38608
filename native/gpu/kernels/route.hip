// ROUTE: products of rows with the router in float, then scores and the choice of the k best experts of each row.
//
// route_scores_* move the router, 4 E D bytes, once for each row (few rows) or each eight (many). An expert's columns
// are shared by `parts` waves of a block, by lanes of a wave four at a time, in an order that does not depend on the
// number of rows. The norm is part of it: products are linear, so that x * norm * w is summed beside x * x and scaled
// last. Choosing ranks every expert against all others, which needs no rounds: a rank below k is a place. With few rows
// and up to 256 experts the last block of a row's products chooses, so that a layer of a decode step waits once.
#include "dequantize.h"
#include "matrix.h"
#include "route.h"
#include "row_count.h"

using namespace apu::gpu;

constexpr u32 kRouteWaves = kRouteThreads / kWaveSize;

struct Floats4 {
  float v[4];
};

APU_DEVICE Floats4 load_floats4(const float *p) {
  const u32x4 bits = load16(p);
  return {{bits_to_float(bits[0]), bits_to_float(bits[1]), bits_to_float(bits[2]), bits_to_float(bits[3])}};
}

// Four columns at a time of rows at multiples of as many columns' bytes.
struct F32Columns {
  static constexpr u32 width = 4;
  APU_METHOD static void weights(const Matrix &, const u8 *row, u32 column, float *v) {
    const Floats4 four = load_floats4(reinterpret_cast<const float *>(row) + column);
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[i] = four.v[i];
  }
  APU_METHOD static void inputs(const float *row, u32, u32 column, float *v) {
    weights(Matrix{}, reinterpret_cast<const u8 *>(row), column, v);
  }
};
struct F16Columns : F32Columns {
  APU_METHOD static void weights(const Matrix &, const u8 *row, u32 column, float *v) {
    const u32x2 bits = *global_pointer<const u32x2>(reinterpret_cast<u64>(row) + 2 * u64(column));
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[i] = half_to_float(bits[i / 2] >> 16 * (i % 2) & 0xffffu);
  }
};
// Sixteen at a time of any type at any address.
struct AnyColumns {
  static constexpr u32 width = 16;
  APU_METHOD static void weights(const Matrix &w, const u8 *row, u32 column, float *v) {
    dequantize_any16(w.type, row, w.k, column / 16, v);
  }
  APU_METHOD static void inputs(const float *row, u32 d, u32 column, float *v) {
#pragma unroll
    for (u32 i = 0; i < 16; ++i) v[i] = column + i < d ? row[column + i] : 0;
  }
};

// The sums of one wave over its part of the columns, Batch steps of which are under way at a time.
template <class Columns, u32 Rows, u32 Experts, u32 Batch, bool Norm>
APU_DEVICE void sum_columns(const RouteArgs &a, u32 part, const u8 *const *w, const float *const *x,
                            float (*sum)[Experts], float *squares) {
  constexpr u32 width = Columns::width;
  const u32 d = a.router.k, step = kWaveSize * width;
  for (u32 c0 = part * step + lane_id() * width; c0 < d; c0 += Batch * a.parts * step) {
    float weight[Batch][Experts][width], norm[Batch][width], v[Batch][Rows][width];
#pragma unroll
    for (u32 b = 0; b < Batch; ++b) {
      const u32 c = c0 + b * a.parts * step, at = c < d ? c : c0; // what is read twice counts as zero
#pragma unroll
      for (u32 e = 0; e < Experts; ++e) Columns::weights(a.router, w[e], at, weight[b][e]);
#pragma unroll
      for (u32 t = 0; t < Rows; ++t) Columns::inputs(x[t], d, at, v[b][t]);
      if (Norm) Columns::inputs(a.norm, d, at, norm[b]);
    }
#pragma unroll
    for (u32 b = 0; b < Batch; ++b) {
      const bool inside = b == 0 || c0 + b * a.parts * step < d;
#pragma unroll
      for (u32 t = 0; t < Rows; ++t) {
#pragma unroll
        for (u32 i = 0; i < width; ++i) {
          const float value = inside ? v[b][t][i] : 0, y = Norm ? value * norm[b][i] : value;
          if (Norm) squares[t] = fma_f32(value, value, squares[t]);
#pragma unroll
          for (u32 e = 0; e < Experts; ++e) sum[t][e] = fma_f32(y, weight[b][e][i], sum[t][e]);
        }
      }
    }
  }
}

// Scores of `Rows` rows from block_id_y() * Rows on, and `Experts` experts of a.share waves, which take the parts in
// turn. False where all rows are beyond the count, which is looked at first where there are several: memory holds the
// rows of every bucket.
template <class Columns, u32 Rows, u32 Experts, u32 Batch> APU_DEVICE bool route_scores(const RouteArgs &a) {
  constexpr bool turns = Experts > 1; // else all parts run at once
  APU_SHARED float sums[Rows * (Experts + 1)][turns ? kRouteWaves * kRouteWaves : kRouteWaves]; // (groups, parts)
  const u32 rows = count_rows(a.count), t0 = block_id_y() * Rows;
  if (Rows > 1 && t0 >= rows) return false;
  const u32 d = a.router.k, experts = a.router.rows;
  const u32 share = turns ? a.share : a.parts;
  const u32 group = wave_id() / share, groups = kRouteWaves / share;
  const u32 e0 = (block_id() * groups + group) * Experts;
  const u8 *w[Experts];
  const float *x[Rows];
#pragma unroll
  for (u32 e = 0; e < Experts; ++e) w[e] = matrix_row(a.router, e0 + e < experts ? e0 + e : experts - 1);
#pragma unroll
  for (u32 t = 0; t < Rows; ++t) x[t] = a.in + u64(Rows == 1 || t0 + t < rows ? t0 + t : rows - 1) * d;

  const auto sum_part = [&](u32 part) {
    float sum[Rows][Experts] = {}, squares[Rows] = {};
    if (a.norm)
      sum_columns<Columns, Rows, Experts, Batch, true>(a, part, w, x, sum, squares);
    else
      sum_columns<Columns, Rows, Experts, Batch, false>(a, part, w, x, sum, squares);
    float products[Rows * Experts];
#pragma unroll
    for (u32 i = 0; i < Rows * Experts; ++i) products[i] = sum[i / Experts][i % Experts];
    constexpr u32 lanes = kWaveSize / (Rows * Experts), square_lanes = kWaveSize / Rows; // that get the same sum
    const u32 lane = lane_id(), column = group * a.parts + part;
    const float product = wave_sums(products);
    if (lane % lanes == 0) sums[lane / lanes][column] = product;
    if (!a.norm) return;
    const float square = wave_sums(squares);
    if (lane % square_lanes == 0) sums[Rows * Experts + lane / square_lanes][column] = square;
  };
  u32 part = wave_id() % share;
  sum_part(part);
  if constexpr (turns) {
#pragma unroll 1
    for (part += share; part < a.parts; part += share) sum_part(part);
  }
  block_sync();
  for (u32 i = thread_id(); i < groups * Rows * Experts; i += kRouteThreads) {
    const u32 e = i % Experts, t = i / Experts % Rows, g = i / Experts / Rows;
    const u32 expert = (block_id() * groups + g) * Experts + e;
    if (t0 + t >= rows || expert >= experts) continue;
    float s = 0, square = 0;
    for (u32 p = 0; p < a.parts; ++p) {
      s += sums[t * Experts + e][g * a.parts + p];
      if (a.norm) square += sums[Rows * Experts + t][g * a.parts + p];
    }
    if (a.norm) s *= 1.0f / sqrt_f32(square / float(d) + a.eps);
    if (a.added) s += a.added[expert];
    a.scores[u64(t0 + t) * experts + expert] = s;
  }
  return t0 < rows;
}

constexpr float kMinusInfinity = -__builtin_inff();

// Of a product, where an expert's score does not depend on the others'.
APU_DEVICE float score_alone(u32 kind, float x) {
  if (kind == APU_SCORE_SIGMOID) return 1.0f / (1.0f + exp_f32(-x));
  const float e = exp_f32(-fabs_f32(x)), u = 1.0f + e;
  const float tail = u == 1.0f ? e : log_f32(u) * (e / (u - 1.0f)); // log(1 + e), whatever 1 + e has lost
  return sqrt_f32((x < 0.0f ? 0.0f : x) + tail);
}

// The row's experts where its token says which: ids ascending, take(place, expert) for each.
template <class Take> APU_DEVICE void take_of_token(const RouteArgs &a, u32 row, const Take &take) {
  const Row &r = a.tokens[row];
  const i32 token = r.token >= 0 ? r.token : a.sampled[r.previous]; // without one EMBED has made the row NaN
  const u8 *const from = matrix_row(a.table, token < 0 ? 0 : u32(token));
  const auto expert = [&](u32 i) {
    u32 id[1];
    load_unaligned<1>(from + 4 * u64(i), id);
    return id[0] < a.router.rows ? id[0] : a.router.rows - 1;
  };
  for (u32 i = thread_id(); i < a.k; i += kRouteThreads) {
    const u32 mine = expert(i);
    u32 place = 0;
    for (u32 j = 0; j < a.k; ++j) {
      const u32 other = expert(j);
      place += other < mine || (other == mine && j < i);
    }
    a.ids[u64(row) * a.k + place] = i32(mine);
    take(place, mine);
  }
  block_sync();
}

APU_DEVICE float order_of(float score) { // NaN is the worst
  return score == score ? score : kMinusInfinity;
}

// By the block: groups[g] becomes 1 for the best groups, of equal ones the lowest, and 0 for the others. rank_of(e) is
// what experts are chosen by, never NaN; what it reads is complete for all threads.
template <class Rank> APU_DEVICE void mark_groups(const RouteArgs &a, float *groups, const Rank &rank_of) {
  const u32 size = a.router.rows / a.groups, g = thread_id();
  float mine = kMinusInfinity;
  if (g < a.groups) {
    float first = kMinusInfinity, second = kMinusInfinity;
    for (u32 e = g * size; e < (g + 1) * size; ++e) {
      const float rank = rank_of(e);
      second = max_f32(second, min_f32(first, rank));
      first = max_f32(first, rank);
    }
    mine = a.group_sum2 ? first + second : first;
    groups[g] = mine;
  }
  block_sync();
  u32 before = 0;
  if (g < a.groups)
    for (u32 i = 0; i < a.groups; ++i) before += groups[i] > mine || (groups[i] == mine && i < g);
  block_sync();
  if (g < a.groups) groups[g] = before < a.groups_used ? 1.0f : 0.0f;
  block_sync();
}
static_assert(kRouteGroups <= kRouteThreads);

// Floats as unsigned integers of the same order. Minus infinity, as which NaN counts, is 1.
APU_DEVICE u32 order_bits(float rank) {
  const u32 bits = float_to_bits(rank);
  return rank > kMinusInfinity ? (bits & 0x80000000u ? ~bits : bits | 0x80000000u) : 1u;
}
APU_DEVICE float order_value(u32 order) {
  return order == 1 ? kMinusInfinity : bits_to_float(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// Up to kRouteWaveItems * kWaveSize experts: every wave holds all scores, so that maximum and sum need no barrier.
// The row is looked for among the step's only after the loads: memory holds the rows of every bucket.
APU_DEVICE void choose_of_few(const RouteArgs &a, u32 row) {
  constexpr u32 most_experts = kRouteWaveItems * kWaveSize;
  APU_SHARED u32x4 orders[most_experts / 4]; // of ranks; what is no expert is 0
  APU_SHARED float values[most_experts];     // scores
  APU_SHARED float chosen[most_experts];     // before that of groups
  static_assert(kRouteGroups <= most_experts);
  APU_SHARED u32 places[kRouteWaves];
  const u32 experts = a.router.rows;
  const float *scores = a.scores + u64(row) * experts;
  float v[kRouteWaveItems], most = kMinusInfinity, total = 0;
#pragma unroll
  for (u32 i = 0; i < kRouteWaveItems; ++i) {
    const u32 e = i * kWaveSize + lane_id();
    v[i] = e < experts ? scores[e] : kMinusInfinity;
  }
  if (row >= count_rows(a.count)) return;
  const bool softmax = a.score == APU_SCORE_SOFTMAX;
  if (softmax) {
#pragma unroll
    for (u32 i = 0; i < kRouteWaveItems; ++i) most = max_f32(most, v[i]);
    most = wave_max(most);
#pragma unroll
    for (u32 i = 0; i < kRouteWaveItems; ++i) {
      if (i * kWaveSize >= experts) continue;
      v[i] = i * kWaveSize + lane_id() < experts ? exp_f32(v[i] - most) : 0;
      total += v[i];
    }
    total = wave_sum(total);
  }
#pragma unroll
  for (u32 i = 0; i < kRouteWaveItems; ++i) {
    const u32 e = i * kWaveSize + lane_id();
    if (i % kRouteWaves != wave_id()) continue; // each wave writes its part
    const float score = softmax ? v[i] / total : score_alone(a.score, v[i]);
    const float rank = a.bias && e < experts ? score + a.bias[e] : score;
    values[e] = score;
    reinterpret_cast<u32 *>(orders)[e] = e < experts ? order_bits(rank) : 0;
  }
  block_sync();
  if (a.groups) {
    u32 *order = reinterpret_cast<u32 *>(orders);
    mark_groups(a, chosen, [&](u32 e) { return order_value(order[e]); });
    const u32 size = experts / a.groups;
    for (u32 e = thread_id(); e < experts; e += kRouteThreads)
      if (chosen[e / size] == 0.0f) order[e] = 1;
    block_sync();
  }
  if (a.table.data) take_of_token(a, row, [&](u32 place, u32 e) { chosen[place] = values[e]; });
  // p threads count, for each expert of a turn, those before it among every p-th four.
  const u32 p = experts <= kRouteThreads / 4 ? 4 : experts <= kRouteThreads / 2 ? 2 : 1;
  const u32 fours = (experts + 3) / 4, part = thread_id() % p;
  u32 found = 0;
  for (u32 e0 = a.table.data ? experts : 0; e0 < experts; e0 += kRouteThreads / p) {
    const u32 e = e0 + thread_id() / p;
    const u32 mine = e < experts ? reinterpret_cast<const u32 *>(orders)[e] : 1;
    u32 rank = 0;
    for (u32 g0 = part; g0 < fours; g0 += 8 * p) { // beyond the experts lie zeros
      u32x4 four[8];
#pragma unroll
      for (u32 i = 0; i < 8; ++i) four[i] = orders[g0 + i * p];
#pragma unroll
      for (u32 i = 0; i < 8; ++i) {
        const u32 least = 4 * (g0 + i * p) + 3 < e ? mine - 1 : mine; // equals win where they come first
#pragma unroll
        for (u32 k = 0; k < 4; ++k) rank += four[i][k] > least;
      }
    }
    if (e < experts && e / 4 % p == part) { // the equals beside it
      const u32x4 four = orders[e / 4];
#pragma unroll
      for (u32 k = 0; k < 3; ++k) rank += k < e % 4 && four[k] == mine;
    }
    if (p > 1) rank += wave_shuffle_xor(rank, 1);
    if (p > 2) rank += wave_shuffle_xor(rank, 2);
    const bool taken = e < experts && rank < a.k && thread_id() % p == 0;
    const u64 ballot = wave_ballot(taken);
    if (lane_id() == 0) places[wave_id()] = bit_count(ballot);
    block_sync();
    u32 place = found + bit_count(ballot & ((u64(1) << lane_id()) - 1));
#pragma unroll
    for (u32 w = 0; w < kRouteWaves; ++w) {
      if (w < wave_id()) place += places[w];
      found += places[w];
    }
    if (taken) {
      a.ids[u64(row) * a.k + place] = i32(e);
      chosen[place] = values[e];
    }
    block_sync();
  }
  float factor = a.scale;
  if (a.divide) { // in the order of ids, as the CPU sums
    float sum = 0;
#pragma unroll 8
    for (u32 i = 0; i < a.k; ++i) sum += chosen[i];
    factor /= sum < a.floor ? a.floor : sum;
  }
  for (u32 i = thread_id(); i < a.k; i += kRouteThreads) a.weights[u64(row) * a.k + i] = chosen[i] * factor;
}

// The last block that comes here for a row chooses.
APU_DEVICE void choose_last(const RouteArgs &a) {
  APU_SHARED u32 last;
  if (!a.counters) return;
  const u32 row = block_id_y();
  device_fence();
  block_sync();
  if (thread_id() == 0) last = atomic_add(a.counters + row, 1) == grid_size() - 1;
  block_sync();
  if (!last) return;
  device_fence();
  if (thread_id() == 0) a.counters[row] = 0;
  choose_of_few(a, row);
}

// Rows of the router at multiples of four elements, others of four floats. Grid (experts, rows).
APU_KERNEL(kRouteThreads) void route_scores_f32(RouteArgs a) {
  if (route_scores<F32Columns, 1, 1, 4>(a)) choose_last(a);
}
APU_KERNEL(kRouteThreads) void route_scores_f32_many(RouteArgs a) {
  route_scores<F32Columns, kRouteManyRows, kRouteManyExperts, 1>(a);
}
APU_KERNEL(kRouteThreads) void route_scores_f16(RouteArgs a) {
  if (route_scores<F16Columns, 1, 1, 4>(a)) choose_last(a);
}
APU_KERNEL(kRouteThreads) void route_scores_f16_many(RouteArgs a) {
  route_scores<F16Columns, kRouteManyRows, kRouteManyExperts, 1>(a);
}
APU_KERNEL(kRouteThreads) void route_scores_any(RouteArgs a) {
  if (route_scores<AnyColumns, 1, 1, 1>(a)) choose_last(a);
}
APU_KERNEL(kRouteThreads) void route_scores_any_many(RouteArgs a) {
  route_scores<AnyColumns, kRouteManyRows, 1, 1>(a);
}

constexpr u32 kRouteItems = kRouteTile / kRouteThreads;

// Experts of a row by score: those of thread t are t, t + kRouteThreads, ...
struct RouteShared {
  alignas(16) float tile[kRouteTile];
  float chosen[kRouteTile];
  float parts[2][kRouteWaves];
  u32 places[kRouteItems][kRouteWaves];
  float groups[kRouteGroups];
};

// Adds to rank[i] how many of tile's n experts, the first of which is `base`, come before expert e0 + t + 256 i.
APU_DEVICE void add_ranks(const RouteShared &s, u32 base, u32 n, const float *mine, u32 e0, u32 experts, u32 *rank) {
#pragma unroll
  for (u32 i = 0; i < kRouteItems; ++i) {
    if (e0 + i * kRouteThreads >= experts) continue;
    const u32 e = e0 + i * kRouteThreads + thread_id() - base; // as an index of the tile, or past either end
    const u32 same = e < kRouteTile ? e : base + kRouteTile <= e0 ? kRouteTile : 0; // equals before it win
#pragma unroll 4
    for (u32 j = 0; j < n; j += 4) {
      const f32x4 four = *reinterpret_cast<const f32x4 *>(s.tile + j);
#pragma unroll
      for (u32 k = 0; k < 4; ++k) rank[i] += four[k] > mine[i] || (four[k] == mine[i] && j + k < same);
    }
  }
}

// Any number of experts.
APU_DEVICE void choose_of_many(const RouteArgs &a, u32 row) {
  APU_SHARED RouteShared s;
  const u32 experts = a.router.rows;
  const float *scores = a.scores + u64(row) * experts;
  i32 *ids = a.ids + u64(row) * a.k;
  float *weights = a.weights + u64(row) * a.k;

  const bool softmax = a.score == APU_SCORE_SOFTMAX;
  float most = kMinusInfinity, total = 1;
  if (softmax) {
    for (u32 e = thread_id(); e < experts; e += kRouteThreads) most = max_f32(most, scores[e]);
    most = block_max(most, s.parts[0], kRouteWaves);
    total = 0;
    for (u32 e = thread_id(); e < experts; e += kRouteThreads) total += exp_f32(scores[e] - most);
    total = block_sum(total, s.parts[1], kRouteWaves);
  }
  const auto score_of = [&](u32 e) {
    if (e >= experts) return kMinusInfinity;
    return softmax ? exp_f32(scores[e] - most) / total : score_alone(a.score, scores[e]);
  };
  const auto rank_in_group = [&](u32 e) { return order_of(a.bias ? score_of(e) + a.bias[e] : score_of(e)); };
  if (a.groups) mark_groups(a, s.groups, rank_in_group);
  const u32 size = a.groups ? experts / a.groups : 1;
  const auto rank_of = [&](u32 e) {
    return e < experts && (!a.groups || s.groups[e / size] != 0.0f) ? rank_in_group(e) : kMinusInfinity;
  };

  const auto take = [&](u32 place, u32 e) {
    weights[place] = score_of(e);
    if (place < kRouteTile) s.chosen[place] = weights[place];
  };
  if (a.table.data) take_of_token(a, row, take);
  u32 found = 0; // in tiles before this one
  for (u32 e0 = a.table.data ? experts : 0; e0 < experts; e0 += kRouteTile) {
    float score[kRouteItems], mine[kRouteItems];
    u32 rank[kRouteItems];
#pragma unroll
    for (u32 i = 0; i < kRouteItems; ++i) {
      const u32 e = e0 + i * kRouteThreads + thread_id();
      score[i] = score_of(e);
      mine[i] = a.bias || a.groups ? rank_of(e) : order_of(score[i]);
      rank[i] = e < experts ? 0 : a.k;
    }
    for (u32 base = 0; base < experts; base += kRouteTile) {
      block_sync();
#pragma unroll
      for (u32 i = 0; i < kRouteItems; ++i) {
        if (base + i * kRouteThreads >= experts) continue;
        const u32 at = i * kRouteThreads + thread_id();
        s.tile[at] = base == e0 ? mine[i] : rank_of(base + at);
      }
      block_sync();
      const u32 n = experts - base < kRouteTile ? experts - base : kRouteTile;
      add_ranks(s, base, n, mine, e0, experts, rank);
    }
    u64 ballot[kRouteItems];
#pragma unroll
    for (u32 i = 0; i < kRouteItems; ++i) {
      ballot[i] = wave_ballot(rank[i] < a.k);
      if (lane_id() == 0) s.places[i][wave_id()] = bit_count(ballot[i]);
    }
    block_sync();
#pragma unroll
    for (u32 i = 0; i < kRouteItems; ++i) {
      u32 place = found + bit_count(ballot[i] & ((u64(1) << lane_id()) - 1));
      for (u32 w = 0; w < kRouteWaves; ++w) {
        if (w < wave_id()) place += s.places[i][w];
        found += s.places[i][w];
      }
      if (rank[i] >= a.k) continue;
      ids[place] = i32(e0 + i * kRouteThreads + thread_id());
      weights[place] = score[i];
      if (place < kRouteTile) s.chosen[place] = score[i];
    }
  }
  block_sync();
  float factor = a.scale;
  if (a.divide) { // in the order of ids, as the CPU sums
    float sum = 0;
    for (u32 i = 0; i < a.k; ++i) sum += i < kRouteTile ? s.chosen[i] : weights[i];
    factor /= sum < a.floor ? a.floor : sum;
    block_sync(); // all have read `weights`
  }
  for (u32 i = thread_id(); i < a.k; i += kRouteThreads)
    weights[i] = (i < kRouteTile ? s.chosen[i] : weights[i]) * factor;
}

// One block a row, after products of many rows or with many experts.
APU_KERNEL(kRouteThreads) void route_choose(RouteArgs a) {
  const u32 row = block_id();
  if (a.router.rows <= kRouteWaveItems * kWaveSize)
    choose_of_few(a, row);
  else if (row < count_rows(a.count))
    choose_of_many(a, row);
}
