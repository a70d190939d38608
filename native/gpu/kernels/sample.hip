// SAMPLE: two kernels. sample_survey reads all logits once, in chunks over the whole device: maxima, sums of
// exponentials, the check for NaN, the copy with penalties, bias and mask. sample_finish ends each output with one
// block, which for the most probable token looks at the survey only.
//
// Rules and their order are the CPU's (native/cpu/ops_sample.cpp). What is decided by comparing logits is exact: greedy
// tokens, sets of top_k, top-n and their order. Sets up to 1024 are drawn from with the CPU's double arithmetic; larger
// ones with float exponentials summed exactly, so that a token can differ from the CPU's only where the rounding of an
// exponential decides.
// Moves 4 V bytes an output (greedy), and as much again for each of the up to four passes of a cut without top_k.
#include "select.h"

#include "../../include/apu.h"

using namespace apu::gpu;

constexpr float kMinusInfinity = -__builtin_inff();
constexpr float kMostFloat = 0x1.fffffep127f;
constexpr float kLeastNormal = 0x1p-126f;
constexpr u32 kSurveyWaves = kSurveyThreads / kWaveSize;

APU_DEVICE bool wants_logprobs(const Output &o) {
  return (o.want & APU_OUT_TOP) || o.wants_logprob;
}
APU_DEVICE bool has_penalties(const Output &o) {
  return o.history_count && (o.repeat_penalty != 1 || o.frequency_penalty != 0 || o.presence_penalty != 0);
}
APU_DEVICE bool is_adjusted(const Output &o) {
  return has_penalties(o) || o.bias_count || o.mask_at != kNone;
}

// A token is drawn without top_k, or from more than kFew.
APU_DEVICE bool draws_many(const Output &o, u32 size) {
  return (o.want & APU_OUT_SAMPLE) && o.temperature != 0 && !(o.top_k && o.top_k < size && o.top_k <= kFew);
}

// A wave's share of a chunk: kSurveyItems times kWaveSize consecutive logits, item by item.
APU_DEVICE u32 item_of(u32 i) {
  return wave_id() * (kSurveyItems * kWaveSize) + i * kWaveSize + lane_id();
}

// The largest of a wave's share, and of each cell of it.
APU_DEVICE float survey_cells(const float *v, float *cells) {
  constexpr u32 items = kCell / kWaveSize, count = kSurveyItems / items;
  float most = kMinusInfinity;
#pragma unroll
  for (u32 c = 0; c < count; ++c) {
    float m = v[c * items];
#pragma unroll
    for (u32 i = 1; i < items; ++i) m = max_f32(m, v[c * items + i]);
    m = wave_max(m);
    if (lane_id() == 0) cells[wave_id() * count + c] = m;
    most = max_f32(most, m);
  }
  return most;
}

// Penalties, bias and mask over the chunk from token `begin` on; v in, v out.
APU_DEVICE void adjust(const StepView &step, const Output &o, u32 begin, float *v) {
  APU_SHARED float logits[kChunk];
  APU_SHARED u32 ids[kSurveyThreads];
  APU_SHARED float values[kSurveyThreads];
  APU_SHARED u32 counts[kSurveyWaves];
  const u32 *extras = global_pointer<const u32>(u64(step.extras[0]));
#pragma unroll
  for (u32 i = 0; i < kSurveyItems; ++i) logits[item_of(i)] = v[i];
  block_sync();
  if (has_penalties(o)) { // its tokens are distinct
    for (u32 i = thread_id(); i < o.history_count; i += kSurveyThreads) {
      const u32 at = extras[o.history_at + i] - begin;
      if (at >= kChunk) continue;
      float l = logits[at];
      l = l > 0 ? l / o.repeat_penalty : l * o.repeat_penalty;
      l -= float(i32(extras[o.history_at + o.history_count + i])) * o.frequency_penalty + o.presence_penalty;
      logits[at] = l;
    }
    block_sync();
  }
  // A token may have several biases: those of this chunk are gathered in order, and each is added by the thread that
  // holds the token.
  for (u32 first = 0; first < o.bias_count; first += kSurveyThreads) {
    const u32 mine = first + thread_id();
    const u32 at = mine < o.bias_count ? extras[o.bias_at + mine] - begin : kNone;
    const u64 ballot = wave_ballot(at < kChunk);
    if (lane_id() == 0) counts[wave_id()] = bit_count(ballot);
    block_sync();
    u32 place = bit_count(ballot & ((u64(1) << lane_id()) - 1)), n = 0;
    for (u32 w = 0; w < kSurveyWaves; ++w) {
      if (w < wave_id()) place += counts[w];
      n += counts[w];
    }
    if (at < kChunk) {
      ids[place] = at;
      values[place] = bits_to_float(extras[o.bias_at + o.bias_count + mine]);
    }
    block_sync();
    for (u32 i = 0; i < n; ++i)
      if (ids[i] / (kSurveyItems * kWaveSize) == wave_id() && ids[i] % kWaveSize == lane_id())
        logits[ids[i]] += values[i];
    block_sync();
  }
#pragma unroll
  for (u32 i = 0; i < kSurveyItems; ++i) {
    const u32 id = begin + item_of(i);
    v[i] = logits[item_of(i)];
    if (o.mask_at != kNone && id < step.vocabulary && !(extras[o.mask_at + id / 32] >> (id % 32) & 1))
      v[i] = kMinusInfinity;
  }
}

// Grid (chunks, slots).
APU_KERNEL(kSurveyThreads) void sample_survey(SampleArgs a) {
  APU_SHARED float raw[kSurveyWaves], most[kSurveyWaves], parts[kSurveyWaves];
  APU_SHARED u32 first[kSurveyWaves], bad[kSurveyWaves];
  APU_SHARED u64 masses[kSurveyWaves];
  const u32 slot = block_id_y(), index = a.base + slot;
  if (index >= a.step.counts->outputs) return;
  const Output &o = a.step.outputs[index];
  if (!(o.want & (APU_OUT_SAMPLE | APU_OUT_TOP))) return;
  const u32 size = a.step.vocabulary, begin = block_id() * kChunk;
  const float *x = a.logits + u64(index) * size;
  u8 *scratch = a.scratch + slot * a.layout.slot_bytes;

  float v[kSurveyItems];
  bool broken = false;
#pragma unroll
  for (u32 i = 0; i < kSurveyItems; ++i) {
    const u32 id = begin + item_of(i);
    v[i] = id < size ? x[id] : kMinusInfinity;
    broken |= !(v[i] <= kMostFloat);
  }
  const u32 cell = begin / kCell;
  const float raw_most = survey_cells(v, reinterpret_cast<float *>(scratch + a.layout.raw_cells) + cell);
  float y[kSurveyItems], wave_most = raw_most;
#pragma unroll
  for (u32 i = 0; i < kSurveyItems; ++i) y[i] = v[i];
  if (is_adjusted(o)) {
    adjust(a.step, o, begin, y);
    wave_most = survey_cells(y, reinterpret_cast<float *>(scratch + a.layout.cells) + cell);
    float *adjusted = reinterpret_cast<float *>(scratch + a.layout.adjusted);
#pragma unroll
    for (u32 i = 0; i < kSurveyItems; ++i) {
      const u32 id = begin + item_of(i);
      if (id < size) adjusted[id] = y[i];
    }
  }
  u32 best = kNone;
#pragma unroll
  for (u32 i = 0; i < kSurveyItems; ++i) {
    const u64 ballot = wave_ballot(y[i] == wave_most);
    if (best == kNone && ballot) best = begin + item_of(i) - lane_id() + lowest_bit(ballot);
  }
  const u64 any_broken = wave_ballot(broken);
  if (lane_id() == 0) {
    raw[wave_id()] = raw_most;
    most[wave_id()] = wave_most;
    first[wave_id()] = best;
    bad[wave_id()] = any_broken != 0;
  }
  block_sync();
  ChunkStats stats = {raw[0], 0, bad[0], most[0], first[0], 0, 0};
#pragma unroll
  for (u32 w = 1; w < kSurveyWaves; ++w) {
    stats.raw_max = max_f32(stats.raw_max, raw[w]);
    stats.bad |= bad[w];
    if (most[w] > stats.max) stats.max = most[w], stats.best = first[w];
  }
  if (wants_logprobs(o) && stats.raw_max > kMinusInfinity) {
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < kSurveyItems; ++i) sum += exp_f32(v[i] - stats.raw_max);
    stats.raw_sum = block_sum(sum, parts, kSurveyWaves);
  }
  if (draws_many(o, size) && stats.max > kMinusInfinity) {
    u64 mass = 0;
#pragma unroll
    for (u32 i = 0; i < kSurveyItems; ++i) mass += mass_of(exp_f32((y[i] - stats.max) / o.temperature));
    mass = wave_sum64(mass);
    if (lane_id() == 0) masses[wave_id()] = mass;
    block_sync();
    for (u32 w = 0; w < kSurveyWaves; ++w) stats.mass += masses[w];
  }
  if (thread_id() == 0) reinterpret_cast<ChunkStats *>(scratch + a.layout.stats)[block_id()] = stats;
}

APU_DEVICE double bits_to_double(u64 bits) {
  double v;
  __builtin_memcpy(&v, &bits, sizeof(v));
  return v;
}
APU_DEVICE u64 double_to_bits(double v) {
  u64 bits;
  __builtin_memcpy(&bits, &v, sizeof(bits));
  return bits;
}

// e^x for x <= 0 or so, to about an ulp: 2^n times Taylor's series on [-ln 2 / 2, ln 2 / 2]. Zero below 2^-1022.
APU_DEVICE double exp_f64(double x) {
  if (x < -708.0) return 0;
  const double n = floor_f64(fma_f64(x, 0x1.71547652b82fep0, 0.5));
  double r = fma_f64(n, -0x1.62e42fefa39efp-1, x);
  r = fma_f64(n, -0x1.abc9e3b39803fp-56, r);
  double p = 1.0 / 6227020800.0;
  constexpr double terms[] = {1.0 / 479001600.0,
                              1.0 / 39916800.0,
                              1.0 / 3628800.0,
                              1.0 / 362880.0,
                              1.0 / 40320.0,
                              1.0 / 5040.0,
                              1.0 / 720.0,
                              1.0 / 120.0,
                              1.0 / 24.0,
                              1.0 / 6.0,
                              0.5,
                              1.0,
                              1.0};
#pragma unroll
  for (u32 i = 0; i < 13; ++i) p = fma_f64(p, r, terms[i]);
  return p * bits_to_double(u64(i64(n) + 1023) << 52);
}
// One step of Newton's method from the float's logarithm.
APU_DEVICE double log_f64(double x) {
  const double y = log_f32(float(x));
  return y + fma_f64(x, exp_f64(-y), -1.0);
}

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011); uniform in [0, 1), 53 bits.
APU_DEVICE double uniform(u64 seed, u32 position, u32 draw) {
  u32 c0 = position, c1 = draw, c2 = 0, c3 = 0, k0 = u32(seed), k1 = u32(seed >> 32);
#pragma unroll 1
  for (u32 round = 0; round < 10; ++round) {
    const u64 a = u64(0xD2511F53u) * c0, b = u64(0xCD9E8D57u) * c2;
    c0 = u32(b >> 32) ^ c1 ^ k0, c1 = u32(b), c2 = u32(a >> 32) ^ c3 ^ k1, c3 = u32(a);
    k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
  }
  return double((u64(c1) << 32 | c0) >> 11) * 0x1p-53;
}

struct FinishShared {
  SelectShared select;
  u64 keys[kFew];
  double weights[kFew];
  u64 best[kFinishWaves];
  double sums[kFinishWaves];
  float raw_max[kFinishWaves];
  u32 bad[kFinishWaves];
  u32 count, finite, token;
};

// The logits that an output is drawn from, and the places of its scratch.
struct Drawn {
  const float *x;
  const float *cell_max;
  u32 *list;
  u64 *tile_mass;
  const ChunkStats *stats; // their max and mass are of x
  u32 chunks;
  u32 size;
};
APU_DEVICE View all_of(const Drawn &d) {
  return {d.x, d.size, nullptr, (d.size + kCell - 1) / kCell, 0};
}

// A chunk's part of the sum of exp((x - most) / temperature).
APU_DEVICE u64 chunk_mass(const ChunkStats &stats, float most, float temperature) {
  return stats.mass ? u64(double(stats.mass) * exp_f64((double(stats.max) - double(most)) / double(temperature))) : 0;
}
APU_DEVICE u64 total_mass(const Drawn &d, const Output &o, float most, FinishShared &s) {
  u64 sum = 0, total;
  for (u32 c = thread_id(); c < d.chunks; c += kFinishThreads) sum += chunk_mass(d.stats[c], most, o.temperature);
  block_scan(sum, s.select.wave_totals, total);
  return total;
}

// The n largest logits, of equal ones the lower ids.
struct Top {
  View view; // the cells that hold them
  u32 key, last;
};
APU_DEVICE bool is_in(const Top &top, float x, u32 id) {
  const u32 key = ordered(x);
  return key > top.key || (key == top.key && id <= top.last);
}
APU_DEVICE Top choose_top(const Drawn &d, u32 n, SelectShared &s) {
  const auto key = [](float x, u32) { return ordered(x); };
  const auto one = [](float, u32) { return u64(1); };
  const auto wanted = [n](u64) { return u64(n); };
  Top top = {all_of(d), 0, kNone - 1};
  if (n < top.view.cells) { // n cells have a maximum that is as large as the n-th largest of maxima
    const View maxima = {d.cell_max, top.view.cells, nullptr, (top.view.cells + kCell - 1) / kCell, 0};
    const u32 least = select(maxima, key, one, wanted, s).key;
    top.view.cells =
        list_cells(d.cell_max, top.view.cells, [least](float m) { return ordered(m) >= least; }, d.list, s);
    top.view.list = d.list;
  }
  const Selected found = select(top.view, key, one, wanted, s);
  top.key = found.key;
  if (found.above + found.at > n)
    top.last = locate(
        top.view, [&found](float x, u32) { return u64(ordered(x) == found.key); },
        [&found, n](u64) { return n - found.above - 1; }, d.tile_mass, s);
  return top;
}

// use(place, value, id) once for each of them, places in any order.
template <class Use> APU_DEVICE void collect(const Top &top, u32 &counter, const Use &use) {
  block_sync();
  if (thread_id() == 0) counter = 0;
  block_sync();
  for_each(top.view, [&](float x, u32 id) {
    if (id != kNone && is_in(top, x, id)) use(atomic_add(&counter, 1), x, id);
  });
  block_sync();
}
// A sorted key: ascending keys are descending logits, of equal ones the lower ids first.
APU_DEVICE u64 key_of(float x, u32 id) {
  return u64(~ordered(x)) << 32 | id;
}
APU_DEVICE float logit_of(u64 key) {
  return from_ordered(~u32(key >> 32));
}
APU_DEVICE void sort_keys(u64 *keys, u32 n, SelectShared &s) {
  if (n > kRanked) return block_sort(keys, n, [](u64 a, u64 b) { return a < b; });
  u64 *sorted = reinterpret_cast<u64 *>(s.high);
  const u32 rank = rank_of(keys, n, [](u64 a, u32, u64 b, u32) { return a < b; }); // keys are distinct
  if (thread_id() % 4 == 0 && thread_id() / 4 < n) sorted[rank] = keys[thread_id() / 4];
  block_sync();
  if (thread_id() < n) keys[thread_id()] = sorted[thread_id()];
  block_sync();
}

// At least the n largest as sorted keys; returns how many, or 0 where they are too many. Maxima of n of up to kRanked
// groups of cells are at least the n-th largest of these maxima, and few other logits are.
APU_DEVICE u32 quick_groups(u32 size) {
  const u32 cells = (size + kCell - 1) / kCell;
  return cells < kRanked ? cells : kRanked;
}
APU_DEVICE u32 most_quick(u32 size) { // of n
  return size > kFew ? quick_groups(size) * 3 / 4 : kFew;
}
APU_DEVICE u32 collect_quick(const Drawn &d, u32 n, FinishShared &s) {
  const u32 cells = (d.size + kCell - 1) / kCell, groups = quick_groups(d.size);
  u32 *list = s.select.low, *maxima = s.select.high;
  u32 least = 0;
  block_sync();
  if (d.size > kFew) {
    if (thread_id() < groups) {
      float most = kMinusInfinity;
#pragma unroll 4
      for (u32 c = thread_id(); c < cells; c += groups) most = max_f32(most, d.cell_max[c]);
      maxima[thread_id()] = ordered(most);
    }
    block_sync();
    const u32 rank = rank_of(maxima, groups, [](u32 a, u32 i, u32 b, u32 j) { return a > b || (a == b && i < j); });
    if (thread_id() % 4 == 0 && thread_id() / 4 < groups && rank == n - 1) s.token = maxima[thread_id() / 4];
    if (thread_id() == 0) s.count = 0;
    block_sync();
    least = s.token;
  } else {
    if (thread_id() == 0) s.count = 0;
    block_sync();
  }
#pragma unroll 4
  for (u32 c = thread_id(); c < cells; c += kFinishThreads) {
    if (ordered(d.cell_max[c]) < least) continue;
    const u32 place = atomic_add(&s.count, 1);
    if (place < kBins) list[place] = c;
  }
  block_sync();
  const u32 chosen = s.count;
  block_sync();
  if (chosen > kBins) return 0;
  if (thread_id() == 0) s.count = 0;
  block_sync();
  constexpr u32 items = kCell / kWaveSize;
#pragma unroll 2
  for (u32 c = wave_id(); c < chosen; c += kFinishWaves) {
    float v[items];
#pragma unroll
    for (u32 i = 0; i < items; ++i) {
      const u32 id = list[c] * kCell + i * kWaveSize + lane_id();
      v[i] = id < d.size ? d.x[id] : kMinusInfinity;
    }
#pragma unroll
    for (u32 i = 0; i < items; ++i) {
      const u32 id = list[c] * kCell + i * kWaveSize + lane_id();
      if (id >= d.size || ordered(v[i]) < least) continue;
      const u32 place = atomic_add(&s.count, 1);
      if (place < kFew) s.keys[place] = key_of(v[i], id);
    }
  }
  block_sync();
  const u32 found = s.count;
  block_sync();
  if (found > kFew) return 0;
  sort_keys(s.keys, found, s.select);
  return found;
}

// The n largest, at most kFew, as sorted keys.
APU_DEVICE void collect_sorted(const Drawn &d, u32 n, FinishShared &s) {
  if (n <= most_quick(d.size) && collect_quick(d, n, s)) return;
  collect(choose_top(d, n, s.select), s.count, [&s](u32 place, float x, u32 id) { s.keys[place] = key_of(x, id); });
  sort_keys(s.keys, n, s.select);
}

APU_DEVICE void write_top(const Drawn &d, u32 n, double normalizer, i32 *ids, float *logprobs, FinishShared &s) {
  if (n <= kFew) {
    collect_sorted(d, n, s);
    for (u32 i = thread_id(); i < n; i += kFinishThreads) {
      ids[i] = i32(u32(s.keys[i]));
      logprobs[i] = float(double(d.x[u32(s.keys[i])]) - normalizer);
    }
    block_sync();
    return;
  }
  collect(choose_top(d, n, s.select), s.count, [ids](u32 place, float, u32 id) { ids[place] = i32(id); });
  const float *x = d.x;
  block_sort(ids, n, [x](i32 a, i32 b) {
    const float p = x[a], q = x[b];
    return p > q || (p == q && a < b);
  });
  for (u32 i = thread_id(); i < n; i += kFinishThreads) logprobs[i] = float(double(x[ids[i]]) - normalizer);
  block_sync();
}

// use(weight, index) in order, by one thread, with eight loads under way; ends early where it returns false.
template <class Use> APU_DEVICE void in_order(const double *weights, u32 n, const Use &use) {
  for (u32 i = 0; i < n; i += 8) {
    double w[8];
#pragma unroll
    for (u32 j = 0; j < 8; ++j) w[j] = weights[i + j < n ? i + j : i];
#pragma unroll
    for (u32 j = 0; j < 8; ++j)
      if (i + j < n && !use(w[j], i + j)) return;
  }
}

// A token of n sorted keys, after top_p and min_p, with the CPU's double arithmetic in its order. `total`: of the
// weights of all tokens, those that are not among the keys included; 0: of the keys. kNone where the cuts may keep
// others.
APU_DEVICE u32 draw_sorted(u32 n, const Output &o, double total, double u, FinishShared &s) {
  const double most = logit_of(s.keys[0]), min_p = o.min_p;
  const u32 i = thread_id();
  double mine = 0;
  if (i < n) s.weights[i] = mine = exp_f64((double(logit_of(s.keys[i])) - most) / double(o.temperature));
  if (i == 0) s.count = 0;
  block_sync();
  // Keys of finite logits, and of these the ones that min_p keeps, are the first.
  const bool last = i + 1 == n, finite = i < n && logit_of(s.keys[i]) > kMinusInfinity;
  if (finite && (last || !(logit_of(s.keys[i + 1]) > kMinusInfinity))) s.finite = i + 1;
  if (i < n && (i == 0 || mine >= min_p) && (last || s.weights[i + 1] < min_p)) atomic_max(&s.count, i + 1);
  block_sync();
  const u32 finite_count = s.finite, min_p_keeps = s.count < finite_count ? s.count : finite_count;
  block_sync();
  if (i == 0) {
    bool known = total == 0 || min_p_keeps < n;
    u32 keep = finite_count;
    if (o.top_p < 1) {
      double sum = 0;
      if (total == 0) {
        in_order(s.weights, finite_count, [&](double w, u32) { return total += w, true; });
      }
      const double target = double(o.top_p) * total;
      keep = 0;
      in_order(s.weights, finite_count, [&](double w, u32 at) {
        if (at && !(sum < target)) return false;
        sum += w;
        keep = at + 1;
        return true;
      });
      known |= sum >= target;
    }
    keep = keep < min_p_keeps ? keep : min_p_keeps;
    s.count = known ? keep : 0;
  }
  block_sync();
  const u32 keep = s.count;
  if (keep == 0) return kNone;
  if (i < keep) s.keys[i] = (s.keys[i] & 0xffffffffu) << 32 | i;
  block_sync();
  sort_keys(s.keys, keep, s.select);
  double *by_id = reinterpret_cast<double *>(s.select.low);
  if (i < keep) by_id[i] = s.weights[u32(s.keys[i])];
  block_sync();
  if (i == 0) {
    double sum = 0;
    in_order(by_id, keep, [&](double w, u32) { return sum += w, true; });
    const double target = u * sum;
    u32 drawn = keep - 1;
    sum = 0;
    in_order(by_id, keep, [&](double w, u32 at) {
      if (!((sum += w) > target)) return true;
      drawn = at;
      return false;
    });
    s.token = u32(s.keys[drawn] >> 32);
  }
  block_sync();
  return s.token;
}

// Of all tokens: the chunk by the survey's masses, then the token in it.
APU_DEVICE u32 draw_plain(const Drawn &d, const Output &o, float most, double u, FinishShared &s) {
  const u32 run = (d.chunks + kFinishThreads - 1) / kFinishThreads, begin = thread_id() * run;
  const auto mass = [&](u32 c) { return chunk_mass(d.stats[c], most, o.temperature); };
  u64 sum = 0, total;
  for (u32 c = begin; c < begin + run && c < d.chunks; ++c) sum += mass(c);
  u64 before = block_scan(sum, s.select.wave_totals, total);
  u64 goal = u64(u * double(total));
  if (goal >= total) goal = total - 1;
  if (before <= goal && goal < before + sum) {
    u32 c = begin;
    while (before + mass(c) <= goal) before += mass(c++);
    s.select.found[0] = c;
    s.weights[0] = double(goal - before) / double(mass(c));
  }
  block_sync();
  const u32 first = u32(s.select.found[0]) * (kChunk / kCell), cells = (d.size + kCell - 1) / kCell;
  const double part = s.weights[0];
  const View view = {d.x, d.size, nullptr, cells - first < kChunk / kCell ? cells - first : kChunk / kCell, first};
  const float temperature = o.temperature;
  return locate(
      view, [=](float x, u32) { return mass_of(exp_f32((x - most) / temperature)); },
      [part](u64 all) { return u64(part * double(all)); }, d.tile_mass, s.select);
}

// From any number of tokens; kNone where rounding leaves none.
APU_DEVICE u32 draw_many(const Drawn &d, const Output &o, float most, double u, FinishShared &s) {
  const float temperature = o.temperature;
  const bool cuts = o.top_k && o.top_k < d.size;
  if (!cuts && o.top_p >= 1 && !(o.min_p > 0)) return draw_plain(d, o, most, u, s);
  if (!cuts) {
    const u32 n = collect_quick(d, quick_groups(d.size) / 2, s); // more would not be ranked at once
    const u32 token = n ? draw_sorted(n, o, double(total_mass(d, o, most, s)) * 0x1p-39, u, s) : kNone;
    if (token != kNone) return token;
  }
  const auto weight = [most, temperature](float x) { return exp_f32((x - most) / temperature); };
  Top top = {all_of(d), 0, kNone - 1};
  if (cuts) top = choose_top(d, o.top_k, s.select);
  // A token stays when its weight is above `cut`, or equal to it with an id of at most `last`.
  float cut = o.min_p > kLeastNormal ? o.min_p : kLeastNormal;
  u32 last = kNone - 1;
  if (o.top_p < 1) {
    const float top_p = o.top_p;
    const Selected found = select(
        top.view, [&](float x, u32) { return float_to_bits(weight(x)); },
        [&](float x, u32 id) { return is_in(top, x, id) ? mass_of(weight(x)) : 0; },
        [top_p](u64 total) {
          const double target = double(top_p) * double(total);
          return u64(target) + (double(u64(target)) < target);
        },
        s.select);
    const float least = bits_to_float(found.key);
    if (found.any && least >= cut) {
      cut = least;
      const u64 each = mass_of(least), ties = (found.goal - found.above + each - 1) / each;
      if (ties * each < found.at)
        last = locate(
            top.view, [&](float x, u32 id) { return u64(is_in(top, x, id) && float_to_bits(weight(x)) == found.key); },
            [ties](u64) { return ties - 1; }, d.tile_mass, s.select);
    }
  }
  if (!top.view.list && cut > kLeastNormal) {
    top.view.cells =
        list_cells(d.cell_max, top.view.cells, [&](float m) { return weight(m) >= cut; }, d.list, s.select);
    top.view.list = d.list;
  }
  return locate(
      top.view,
      [&](float x, u32 id) {
        const float w = weight(x);
        return is_in(top, x, id) && (w > cut || (w == cut && id <= last)) ? mass_of(w) : 0;
      },
      [u](u64 total) { return u64(u * double(total)); }, d.tile_mass, s.select);
}

struct Survey {
  float raw_max;
  bool bad;
  float max;
  u32 best;
  double normalizer; // log of the sum of exponentials, where wanted
};

APU_DEVICE Survey gather_survey(const ChunkStats *stats, u32 chunks, bool logprobs, FinishShared &s) {
  float raw_max = kMinusInfinity;
  u64 best = 0; // order of the maximum, then the lower token
  bool bad = false;
  for (u32 c = thread_id(); c < chunks; c += kFinishThreads) {
    raw_max = max_f32(raw_max, stats[c].raw_max);
    const u64 key = u64(ordered(stats[c].max)) << 32 | ~stats[c].best;
    best = key > best ? key : best;
    bad |= stats[c].bad != 0;
  }
  const u32 waves = chunks < kFinishThreads ? (chunks + kWaveSize - 1) / kWaveSize : kFinishWaves; // that hold any
  if (wave_id() < waves) {
    raw_max = wave_max(raw_max);
#pragma unroll
    for (u32 i = 1; i < kWaveSize; i *= 2) {
      const u64 other = shuffle_xor64(best, kWaveSize / 2 / i);
      best = other > best ? other : best;
    }
    bad = wave_any(bad);
    if (lane_id() == 0) s.raw_max[wave_id()] = raw_max, s.best[wave_id()] = best, s.bad[wave_id()] = bad;
  }
  block_sync();
  Survey result = {s.raw_max[0], s.bad[0] != 0, 0, 0, 0};
  best = s.best[0];
  for (u32 w = 1; w < waves; ++w) {
    result.raw_max = max_f32(result.raw_max, s.raw_max[w]);
    result.bad |= s.bad[w] != 0;
    best = s.best[w] > best ? s.best[w] : best;
  }
  result.max = from_ordered(u32(best >> 32));
  result.best = ~u32(best);
  if (!logprobs || result.bad || !(result.raw_max > kMinusInfinity)) return result;
  double sum = 0;
  for (u32 c = thread_id(); c < chunks; c += kFinishThreads)
    if (stats[c].raw_sum > 0)
      sum += double(stats[c].raw_sum) * exp_f64(double(stats[c].raw_max) - double(result.raw_max));
  if (wave_id() < waves) {
#pragma unroll
    for (u32 i = 1; i < kWaveSize; i *= 2) sum += bits_to_double(shuffle_xor64(double_to_bits(sum), kWaveSize / 2 / i));
    if (lane_id() == 0) s.sums[wave_id()] = sum;
  }
  block_sync();
  sum = 0;
  for (u32 w = 0; w < waves; ++w) sum += s.sums[w];
  result.normalizer = double(result.raw_max) + log_f64(sum);
  return result;
}

// Grid (slots).
APU_KERNEL(kFinishThreads) void sample_finish(SampleArgs a) {
  APU_SHARED FinishShared s;
  const u32 slot = block_id(), index = a.base + slot;
  if (index >= a.step.counts->outputs) return;
  const Output &o = a.step.outputs[index];
  OutputResult result = {-1, 0, kOutputOk, 0};
  if (o.want & (APU_OUT_SAMPLE | APU_OUT_TOP)) {
    const u32 size = a.step.vocabulary;
    const float *x = a.logits + u64(index) * size;
    u8 *scratch = a.scratch + slot * a.layout.slot_bytes;
    const ChunkStats *stats = reinterpret_cast<const ChunkStats *>(scratch + a.layout.stats);
    const Survey survey = gather_survey(stats, a.chunks, wants_logprobs(o), s);
    u32 *list = reinterpret_cast<u32 *>(scratch + a.layout.list);
    u64 *tile_mass = reinterpret_cast<u64 *>(scratch + a.layout.tile_mass);
    const float *raw_cells = reinterpret_cast<const float *>(scratch + a.layout.raw_cells);
    if (survey.bad || !(survey.raw_max > kMinusInfinity)) {
      result.status = kOutputNotFinite;
    } else {
      if (o.want & APU_OUT_TOP)
        write_top({x, raw_cells, list, tile_mass, stats, a.chunks, size}, o.top_n, survey.normalizer,
                  a.step.top_ids[0] + o.top_at, a.step.top_logprobs[0] + o.top_at, s);
      if (!(o.want & APU_OUT_SAMPLE)) {
      } else if (!(survey.max > kMinusInfinity)) {
        result.status = kOutputNothingAllowed;
      } else {
        u32 token = survey.best;
        if (o.temperature != 0) {
          Drawn drawn = {x, raw_cells, list, tile_mass, stats, a.chunks, size};
          if (is_adjusted(o)) {
            drawn.x = reinterpret_cast<const float *>(scratch + a.layout.adjusted);
            drawn.cell_max = reinterpret_cast<const float *>(scratch + a.layout.cells);
          }
          const double u = uniform(o.seed, a.step.rows[o.row].position, o.draw);
          if (draws_many(o, size)) {
            token = draw_many(drawn, o, survey.max, u, s);
          } else {
            collect_sorted(drawn, o.top_k, s);
            token = draw_sorted(o.top_k, o, 0, u, s);
          }
          if (token == kNone) token = survey.best;
        }
        result.token = i32(token);
        if (o.wants_logprob) result.logprob = float(double(x[token]) - survey.normalizer);
      }
    }
  }
  if (thread_id() == 0) {
    a.step.sampled[index] = result.token;
    a.step.results[index] = result;
  }
}
