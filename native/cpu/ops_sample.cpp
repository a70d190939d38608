// SAMPLE: a token, log-probabilities or the logits themselves for every output.
//
// First all workers walk the logits once, in chunks at absolute places: copies, maximum, sum of exponentials, and the
// check for NaN. Then each output is finished by one worker.
// Penalties, bias and mask act on a copy of the logits; then temperature, top_k, top_p and min_p. Each of the three
// cuts keeps a prefix of the tokens in descending order, found without sorting the vocabulary: a heap for a small
// top_k, a histogram of the weights for top_p. What is left is drawn in the order of token ids, from one random number
// that is a function of (seed, position, draw): the same on every device, whatever else is sampled beside it.
#include "cpu/ops.h"

#include <cmath>
#include <cstring>
#include <limits>

namespace apu::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr uint32_t kChunk = 4096;                      // logits; with its copy it stays in the first-level cache
constexpr uint32_t kHeapMost = 1024;                   // entries up to which a heap beats a partial sort
constexpr uint32_t kBuckets = (0x3f800000u >> 16) + 1; // by the upper half of a weight's bits, weights being 0 to 1

// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011); uniform in [0, 1), 53 bits.
double uniform(uint64_t seed, uint32_t position, uint32_t draw) {
  uint32_t c[4] = {position, draw, 0, 0}, key[2] = {uint32_t(seed), uint32_t(seed >> 32)};
  for (int round = 0; round < 10; ++round) {
    uint64_t a = uint64_t(0xD2511F53u) * c[0], b = uint64_t(0xCD9E8D57u) * c[2];
    uint32_t next[4] = {uint32_t(b >> 32) ^ c[1] ^ key[0], uint32_t(b), uint32_t(a >> 32) ^ c[3] ^ key[1], uint32_t(a)};
    std::memcpy(c, next, sizeof(c));
    key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
  }
  return double((uint64_t(c[1]) << 32 | c[0]) >> 11) * 0x1p-53;
}

// The n largest of x in descending order, of equals the lower id first. `ids` has room for the vocabulary.
void select_top(const float *x, uint32_t size, uint32_t n, uint32_t *ids) {
  auto before = [x](uint32_t a, uint32_t b) { return x[a] > x[b] || (x[a] == x[b] && a < b); };
  if (n > kHeapMost) {
    for (uint32_t i = 0; i < size; ++i) ids[i] = i;
    if (n < size) std::nth_element(ids, ids + n, ids + size, before);
    std::sort(ids, ids + n, before);
    return;
  }
  for (uint32_t i = 0; i < n; ++i) ids[i] = i;
  std::make_heap(ids, ids + n, before); // the worst on top
  float worst = x[ids[0]];
  for (uint32_t begin = n; begin < size; begin += 32) {
    uint32_t end = std::min(begin + 32, size);
    bool any = false;
    for (uint32_t i = begin; i < end; ++i) any |= x[i] > worst; // an equal one further on is worse
    if (!any) continue;
    for (uint32_t i = begin; i < end; ++i) {
      if (!(x[i] > worst)) continue;
      std::pop_heap(ids, ids + n, before);
      ids[n - 1] = i;
      std::push_heap(ids, ids + n, before);
      worst = x[ids[0]];
    }
  }
  std::sort_heap(ids, ids + n, before);
}

struct Chunk {
  float max;
  float sum; // of exp(x - max); 0 when nobody asks
  bool bad;  // NaN or +infinity
};

class Sample final : public Op {
public:
  Sample(Builder &b, const apu_op &op)
      : logits_(b.scratch(op.in[0])), v_(b.info().vocabulary), chunks_((v_ + kChunk - 1) / kChunk) {
    Workspace &ws = b.workspace;
    size_t bytes =
        2 * aligned(v_ * sizeof(float)) + aligned(v_ * sizeof(uint32_t)) + aligned(kBuckets * sizeof(double));
    ws.worker_bytes = std::max({ws.worker_bytes, bytes, aligned(kChunk * sizeof(float))});
    ws.chunk_bytes = std::max(ws.chunk_bytes, size_t(b.info().max_outputs) * chunks_ * sizeof(Chunk));
  }

  void run(Worker &worker, Run &run) override {
    uint32_t outputs = uint32_t(run.step.outputs.size());
    if (outputs == 0) return;
    Bump scratch = run.scratch(worker);
    Call c{run, scratch.take<float>(v_), scratch.take<float>(v_), scratch.take<uint32_t>(v_),
           scratch.take<double>(kBuckets)};
    {
      Split split(worker, outputs * chunks_, 1);
      for (uint32_t begin, end; split.next(begin, end);) {
        if (run.stopping()) break;
        for (uint32_t u = begin; u < end; ++u) survey(c, u / chunks_, u % chunks_);
      }
    }
    worker.barrier();
    Split split(worker, outputs, 1);
    for (uint32_t begin, end; split.next(begin, end);) {
      for (uint32_t o = begin; o < end; ++o) {
        if (run.stopping()) return;
        output(c, o);
      }
    }
  }

  uint64_t work(const StepCopy &step) const override { return step.outputs.size() * v_; }

private:
  struct Call { // one worker's buffers
    Run &run;
    float *adjusted; // (V)
    float *weights;  // (V)
    uint32_t *ids;   // (V)
    double *buckets; // (kBuckets)
  };

  Chunk *chunks(const Run &run, uint32_t output) const {
    return reinterpret_cast<Chunk *>(run.workspace->chunk) + size_t(output) * chunks_;
  }

  static bool wants_logprobs(const apu_output &o) { return (o.want & APU_OUT_TOP) || o.logprob; }

  void survey(const Call &c, uint32_t index, uint32_t chunk) const {
    const apu_output &o = c.run.step.outputs[index];
    uint32_t begin = chunk * kChunk, n = std::min(kChunk, v_ - begin);
    const float *x = logits_ + size_t(index) * v_ + begin;
    if (o.want & APU_OUT_LOGITS) std::memcpy(o.logits + begin, x, n * sizeof(float));
    if (!(o.want & (APU_OUT_SAMPLE | APU_OUT_TOP))) return;
    Chunk &out = chunks(c.run, index)[chunk];
    uint32_t bad = 0;
    for (uint32_t i = 0; i < n; ++i) bad |= !(x[i] <= std::numeric_limits<float>::max());
    out = {c.run.kernels->max(x, n), 0, bad != 0};
    if (!wants_logprobs(o) || out.bad || out.max == -kInfinity) return;
    std::memcpy(c.weights, x, n * sizeof(float));
    out.sum = c.run.kernels->exp_sum(c.weights, out.max, n);
  }

  void output(const Call &c, uint32_t index) const {
    const apu_output &o = c.run.step.outputs[index];
    const KernelTable &kernels = *c.run.kernels;
    const float *x = logits_ + size_t(index) * v_;
    c.run.sampled[index] = -1;
    if (!(o.want & (APU_OUT_SAMPLE | APU_OUT_TOP))) return;

    const Chunk *parts = chunks(c.run, index);
    float max = -kInfinity;
    bool bad = false;
    for (uint32_t i = 0; i < chunks_; ++i) max = std::max(max, parts[i].max), bad |= parts[i].bad;
    if (bad || max == -kInfinity) {
      c.run.fail(index, APU_E_DEVICE,
                 "output %u (row %u): its logits hold NaN or infinity: the weights or the cache are damaged, or the "
                 "model overflows in this precision",
                 index, o.row);
      return;
    }
    double normalizer = 0; // log of the sum of exponentials
    if (wants_logprobs(o)) {
      double sum = 0;
      for (uint32_t i = 0; i < chunks_; ++i)
        if (parts[i].sum > 0) sum += double(parts[i].sum) * std::exp(double(parts[i].max) - max);
      normalizer = double(max) + std::log(sum);
    }
    if (o.want & APU_OUT_TOP) {
      select_top(x, v_, o.top_n, c.ids);
      for (uint32_t i = 0; i < o.top_n; ++i) {
        o.top_ids[i] = int32_t(c.ids[i]);
        o.top_logprobs[i] = float(x[c.ids[i]] - normalizer);
      }
    }
    if (!(o.want & APU_OUT_SAMPLE)) return;
    const float *adjusted = adjust(c, o, x);
    if (adjusted != x) max = kernels.max(adjusted, v_);
    if (max == -kInfinity) {
      c.run.fail(index, APU_E_INVALID, "output %u (row %u): every token is excluded by its mask or bias", index, o.row);
      return;
    }
    uint32_t token =
        o.temperature == 0 ? first_equal(c.run, index, adjusted, adjusted == x, max) : draw(c, o, adjusted, max);
    c.run.sampled[index] = *o.token = int32_t(token);
    if (o.logprob) *o.logprob = float(x[token] - normalizer);
  }

  // The first token with logit `max`; only its chunk is searched when the logits are those that were surveyed.
  uint32_t first_equal(const Run &run, uint32_t index, const float *x, bool surveyed, float max) const {
    uint32_t begin = 0;
    for (const Chunk *part = chunks(run, index); surveyed && part->max != max; ++part) begin += kChunk;
    return uint32_t(std::find(x + begin, x + v_, max) - x);
  }

  const float *adjust(const Call &c, const apu_output &o, const float *x) const {
    bool penalties = o.history_count && (o.repeat_penalty != 1 || o.frequency_penalty != 0 || o.presence_penalty != 0);
    if (!penalties && !o.bias_count && !o.mask) return x;
    float *y = c.adjusted;
    std::memcpy(y, x, v_ * sizeof(float));
    if (penalties) {
      for (uint32_t i = 0; i < o.history_count; ++i) {
        float &l = y[o.history_ids[i]];
        l = l > 0 ? l / o.repeat_penalty : l * o.repeat_penalty;
        l -= float(o.history_counts[i]) * o.frequency_penalty + o.presence_penalty;
      }
    }
    for (uint32_t i = 0; i < o.bias_count; ++i) y[o.bias_ids[i]] += o.bias_values[i];
    if (o.mask) {
      for (uint32_t word = 0; word < (v_ + 31) / 32; ++word) {
        uint32_t bits = o.mask[word];
        if (bits == ~0u) continue;
        for (uint32_t i = word * 32; i < std::min(word * 32 + 32, v_); ++i)
          if (!(bits >> (i % 32) & 1)) y[i] = -kInfinity;
      }
    }
    return y;
  }

  uint32_t draw(const Call &c, const apu_output &o, const float *x, float max) const {
    double u = uniform(o.seed, c.run.step.rows[o.row].position, o.draw);
    if (o.top_k && o.top_k < v_ && o.top_k <= kHeapMost) return draw_few(c, o, x, u);
    float *w = c.weights; // 1 for the most probable token
    for (uint32_t i = 0; i < v_; ++i) w[i] = (x[i] - max) / o.temperature;
    c.run.kernels->exp_sum(w, 0, v_);
    if (o.top_k && o.top_k < v_) {
      select_top(x, v_, o.top_k, c.ids);
      for (uint32_t i = o.top_k; i < v_; ++i) w[c.ids[i]] = 0;
    }
    // A token stays when its weight is above `cut`, or equal to it with an id of at most `last`.
    float cut = std::max(o.min_p, std::numeric_limits<float>::min());
    uint32_t last = v_;
    if (o.top_p < 1) {
      auto [weight, id] = nucleus(c, w, o.top_p);
      if (weight >= cut) cut = weight, last = id;
    }
    auto kept = [&](uint32_t i) { return w[i] > cut || (w[i] == cut && i <= last); };
    double total = 0;
    for (uint32_t i = 0; i < v_; ++i)
      if (kept(i)) total += w[i];
    double target = u * total, sum = 0;
    uint32_t token = 0;
    for (uint32_t i = 0; i < v_; ++i) {
      if (!kept(i)) continue;
      token = i;
      if ((sum += w[i]) > target) break;
    }
    return token;
  }

  // The least likely token of the smallest set, by descending weight, that holds top_p of the total.
  std::pair<float, uint32_t> nucleus(const Call &c, const float *w, float top_p) const {
    auto bucket = [w](uint32_t i) {
      uint32_t bits;
      std::memcpy(&bits, w + i, sizeof(bits));
      return bits >> 16;
    };
    std::fill_n(c.buckets, kBuckets, 0.0);
    for (uint32_t i = 0; i < v_; ++i) c.buckets[bucket(i)] += w[i];
    double total = 0, sum = 0;
    for (uint32_t b = kBuckets; b-- > 0;) total += c.buckets[b];
    double target = top_p * total;
    uint32_t b = kBuckets - 1;
    while (b > 0 && sum + c.buckets[b] < target) sum += c.buckets[b--];
    uint32_t n = 0;
    for (uint32_t i = 0; i < v_; ++i)
      if (bucket(i) == b) c.ids[n++] = i;
    std::sort(c.ids, c.ids + n, [w](uint32_t i, uint32_t j) { return w[i] > w[j] || (w[i] == w[j] && i < j); });
    uint32_t i = 0;
    while (i + 1 < n && (sum += w[c.ids[i]]) < target) ++i;
    return {w[c.ids[i]], c.ids[i]};
  }

  uint32_t draw_few(const Call &c, const apu_output &o, const float *x, double u) const {
    select_top(x, v_, o.top_k, c.ids);
    double w[kHeapMost], total = 0;
    uint32_t n = 0;
    for (; n < o.top_k && x[c.ids[n]] > -kInfinity; ++n) {
      w[n] = std::exp((double(x[c.ids[n]]) - x[c.ids[0]]) / o.temperature);
      total += w[n];
    }
    uint32_t keep = n;
    if (o.top_p < 1) {
      double target = o.top_p * total, sum = 0;
      for (keep = 0; keep < n && (keep == 0 || sum < target); ++keep) sum += w[keep];
    }
    while (keep > 1 && w[keep - 1] < o.min_p) --keep;
    std::pair<uint32_t, double> kept[kHeapMost];
    for (uint32_t i = 0; i < keep; ++i) kept[i] = {c.ids[i], w[i]};
    std::sort(kept, kept + keep);
    total = 0;
    for (uint32_t i = 0; i < keep; ++i) total += kept[i].second;
    double target = u * total, sum = 0;
    for (uint32_t i = 0; i < keep; ++i)
      if ((sum += kept[i].second) > target) return kept[i].first;
    return kept[keep - 1].first;
  }

  const float *logits_; // (O, V)
  uint32_t v_, chunks_;
};

} // namespace

std::unique_ptr<Op> make_sample(Builder &builder, const apu_op &op) {
  return std::make_unique<Sample>(builder, op);
}

} // namespace apu::cpu
