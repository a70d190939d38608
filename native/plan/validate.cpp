// Checks a plan description and copies it: after describe() no index, shape, dtype, extent or alias is wrong, and
// nothing later checks them again. Messages name the op or tensor, what was expected and what was found.
#include "common.h"
#include "cpu/kernels.h"
#include "plan/plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <utility>

namespace apu {
namespace {

using u64 = unsigned long long;

std::string dims(const apu_tensor &t) {
  std::string out = "(";
  for (uint32_t i = 0; i < t.ndim; ++i) out += (i ? ", " : "") + std::to_string(t.shape[i]);
  return out + ")";
}

// Text of an op's message after its name; keeps describe_op's checks to one line each.
class OpCheck {
public:
  OpCheck(const PlanInfo &info, const apu_op &op, size_t index) : info_(info), op_(op), index_(index) {}

  template <typename... Args> [[nodiscard]] apu_status bad(const char *format, Args... args) const {
    char text[600];
    if constexpr (sizeof...(args) == 0)
      std::snprintf(text, sizeof(text), "%s", format);
    else
      std::snprintf(text, sizeof(text), format, args...);
    if (op_.layer >= 0)
      return fail(APU_E_INVALID, "op %zu %s (layer %d): %s", index_, op_name(op_.kind), op_.layer, text);
    return fail(APU_E_INVALID, "op %zu %s: %s", index_, op_name(op_.kind), text);
  }

  // Only the operands in the masks may be set, and all ids must exist.
  apu_status operands(unsigned in, unsigned out, unsigned w, unsigned states) const {
    apu_status s;
    if ((s = ids("in", op_.in, 4, in, info_.tensors.size(), "tensors")) != APU_OK) return s;
    if ((s = ids("out", op_.out, 4, out, info_.tensors.size(), "tensors")) != APU_OK) return s;
    if ((s = ids("w", op_.w, 10, w, info_.tensors.size(), "tensors")) != APU_OK) return s;
    if ((s = ids("state", op_.state, 4, states, info_.states.size(), "states")) != APU_OK) return s;
    for (int i = 0; i < 4; ++i) {
      for (const char *side : {"in", "out"}) {
        const Tensor *t = info_.tensor(side[0] == 'i' ? op_.in[i] : op_.out[i]);
        if (t && t->is_weight())
          return bad("%s%d \"%s\": expected a scratch tensor, found a weight", side, i, t->name.c_str());
      }
    }
    for (int i = 0; i < 10; ++i) {
      const Tensor *t = info_.tensor(op_.w[i]);
      if (t && !t->is_weight()) return bad("w%d \"%s\": expected a weight, found scratch", i, t->name.c_str());
    }
    for (int i = 0; i < 8; ++i)
      if (!std::isfinite(op_.f[i])) return bad("f%d is %g, expected a finite number", i, double(op_.f[i]));
    return APU_OK;
  }

  apu_status present(const char *side, int i, int32_t id) const {
    if (id == APU_NONE) return bad("%s%d is missing", side, i);
    return APU_OK;
  }

  // A scratch tensor of `inner` elements a row (0: any) whose rows count what `rows` says (-1: any).
  apu_status scratch(const char *side, int i, int32_t id, uint64_t inner, int rows, uint32_t dtype = APU_F32) const {
    if (apu_status s = present(side, i, id); s != APU_OK) return s;
    const Tensor &t = *info_.tensor(id);
    if (t.d.dtype != dtype)
      return bad("%s%d \"%s\": expected %s, found %s", side, i, t.name.c_str(), dtype_name(dtype),
                 dtype_name(t.d.dtype));
    static const char *const kinds[] = {"fixed", "step", "output"};
    if (rows >= 0 && t.d.rows != uint32_t(rows))
      return bad("%s%d \"%s\": expected %s rows, found %s", side, i, t.name.c_str(), kinds[rows], kinds[t.d.rows]);
    if (inner && t.inner != inner)
      return bad("%s%d \"%s\": expected %llu elements a row, found %llu, shape %s", side, i, t.name.c_str(), u64(inner),
                 u64(t.inner), dims(t.d).c_str());
    return APU_OK;
  }

  apu_status same_rows(const char *side, int i, int32_t id, const Tensor &like) const {
    const Tensor &t = *info_.tensor(id);
    if (t.d.rows != like.d.rows || t.rows != like.rows)
      return bad("%s%d \"%s\" %s: its rows differ from those of \"%s\" %s", side, i, t.name.c_str(), dims(t.d).c_str(),
                 like.name.c_str(), dims(like.d).c_str());
    return APU_OK;
  }

  // Experts that one row has: a scratch tensor (T, k).
  apu_status slots(const char *side, int i, int32_t id, uint64_t k, uint32_t dtype, const Tensor &like) const {
    if (apu_status s = scratch(side, i, id, k, -1, dtype); s != APU_OK) return s;
    return same_rows(side, i, id, like);
  }

  // Heads that one row of the step has.
  apu_status heads(uint64_t count) const {
    if (count > kMaxRowHeads / info_.max_rows)
      return bad("%llu heads in each of %u rows: expected at most %llu in all", u64(count), info_.max_rows,
                 u64(kMaxRowHeads));
    return APU_OK;
  }

  apu_status readable(int i) const {
    const Tensor &t = *info_.tensor(op_.w[i]);
    if (!cpu::has_matmul(t.d.dtype))
      return bad("w%d \"%s\": no kernel reads dtype %s (%u)", i, t.name.c_str(), dtype_name(t.d.dtype), t.d.dtype);
    return APU_OK;
  }

  // A weight of n elements in one row, or none.
  apu_status vector(int i, uint64_t n) const {
    const Tensor *t = info_.tensor(op_.w[i]);
    if (!t) return APU_OK;
    if (apu_status s = readable(i); s != APU_OK) return s;
    if (t->rows != 1 || t->inner != n)
      return bad("w%d \"%s\": expected shape (%llu), found %s", i, t->name.c_str(), u64(n), dims(t->d).c_str());
    return APU_OK;
  }

  // A weight (n, k); n or k 0: any.
  apu_status matrix(int i, uint64_t n, uint64_t k) const {
    if (apu_status s = present("w", i, op_.w[i]); s != APU_OK) return s;
    const Tensor &t = *info_.tensor(op_.w[i]);
    if (t.d.ndim != 2 || (n && t.rows != n) || (k && t.inner != k)) {
      char expected[64];
      if (n && k)
        std::snprintf(expected, sizeof(expected), "(%llu, %llu)", u64(n), u64(k));
      else if (n)
        std::snprintf(expected, sizeof(expected), "(%llu, any)", u64(n));
      else
        std::snprintf(expected, sizeof(expected), "(any, %llu)", u64(k));
      return bad("w%d \"%s\": expected shape %s, found %s", i, t.name.c_str(), expected, dims(t.d).c_str());
    }
    return readable(i);
  }

  // A weight (experts, n, any): the stacked matrices of all experts; n 0: any.
  apu_status stack(int i, uint64_t experts, uint64_t n, uint64_t k) const {
    if (apu_status s = present("w", i, op_.w[i]); s != APU_OK) return s;
    const Tensor &t = *info_.tensor(op_.w[i]);
    if (t.d.ndim != 3 || t.d.shape[0] != experts || (n && t.d.shape[1] != n) || t.inner != k)
      return bad("w%d \"%s\": expected shape (%llu, %s, %llu), found %s", i, t.name.c_str(), u64(experts),
                 n ? std::to_string(n).c_str() : "any", u64(k), dims(t.d).c_str());
    if (t.rows > kMaxMatrixRows || t.inner > kMaxMatrixRows)
      return bad("w%d \"%s\" %s: expected at most %u rows of all experts, and columns", i, t.name.c_str(),
                 dims(t.d).c_str(), kMaxMatrixRows);
    return readable(i);
  }

  // The last op before this one that writes tensor `id`.
  const apu_op *writer(int32_t id) const {
    for (size_t i = index_; i-- > 0;)
      for (int32_t out : info_.ops[i].out)
        if (out == id) return &info_.ops[i];
    return nullptr;
  }

  // Key and value state of an attention op: pages of 128 rows in F32 or F16, of one group and one number of heads.
  apu_status kv_states() const {
    for (int i = 0; i < 2; ++i) {
      if (op_.state[i] == APU_NONE) return bad("state%d is missing", i);
      const State &s = info_.states[size_t(op_.state[i])];
      if (s.d.kind != APU_STATE_PAGED) return bad("state%d \"%s\": expected a paged state", i, s.name.c_str());
      if (s.d.rows_per_page != kPageTokens)
        return bad("state%d \"%s\": expected %u rows a page, found %u", i, s.name.c_str(), kPageTokens,
                   s.d.rows_per_page);
      if (s.d.dtype != APU_F32 && s.d.dtype != APU_F16)
        return bad("state%d \"%s\": expected F32 or F16, found %s (%u)", i, s.name.c_str(), dtype_name(s.d.dtype),
                   s.d.dtype);
    }
    const State &k = info_.states[size_t(op_.state[0])], &v = info_.states[size_t(op_.state[1])];
    if (k.d.group != v.d.group || k.d.heads != v.d.heads || k.d.window != v.d.window)
      return bad("state0 \"%s\" (group %u, %u heads, window %u) and state1 \"%s\" (group %u, %u heads, window %u): "
                 "expected the same",
                 k.name.c_str(), k.d.group, k.d.heads, k.d.window, v.name.c_str(), v.d.group, v.d.heads, v.d.window);
    if (op_.state[0] == op_.state[1]) return bad("state0 and state1 are both \"%s\"", k.name.c_str());
    return APU_OK;
  }

  // Scratch that is written must not lie on other operands; `pairs` of (in, out) may be the same tensor in place.
  apu_status aliases(std::initializer_list<std::pair<int, int>> pairs) const {
    for (int o = 0; o < 4; ++o) {
      const Tensor *out = info_.tensor(op_.out[o]);
      if (!out) continue;
      for (int i = 0; i < 4; ++i) {
        const Tensor *in = info_.tensor(op_.in[i]);
        if (!in || !overlap(*in, *out)) continue;
        bool allowed = false;
        for (auto [a, b] : pairs)
          allowed |= a == i && b == o && in->d.offset == out->d.offset && in->bytes() == out->bytes();
        if (!allowed)
          return bad("out%d \"%s\" lies on in%d \"%s\" in the arena", o, out->name.c_str(), i, in->name.c_str());
      }
      for (int p = 0; p < o; ++p) {
        const Tensor *other = info_.tensor(op_.out[p]);
        if (other && overlap(*other, *out))
          return bad("out%d \"%s\" lies on out%d \"%s\" in the arena", o, out->name.c_str(), p, other->name.c_str());
      }
    }
    return APU_OK;
  }

  apu_status number(const char *name, int32_t value, int32_t low, int32_t high) const {
    if (value < low || value > high) return bad("%s is %d, expected %d to %d", name, value, low, high);
    return APU_OK;
  }

  apu_status positive(const char *name, float value, bool zero) const {
    if (!(zero ? value >= 0 : value > 0))
      return bad("%s is %g, expected %s", name, double(value), zero ? "at least 0" : "more than 0");
    return APU_OK;
  }

  const PlanInfo &info() const { return info_; }
  const apu_op &op() const { return op_; }

private:
  static bool overlap(const Tensor &a, const Tensor &b) {
    return a.d.offset < b.d.offset + b.bytes() && b.d.offset < a.d.offset + a.bytes();
  }

  apu_status ids(const char *side, const int32_t *list, int count, unsigned used, size_t limit,
                 const char *what) const {
    for (int i = 0; i < count; ++i) {
      if (list[i] == APU_NONE) continue;
      if (list[i] < 0 || size_t(list[i]) >= limit)
        return bad("%s%d is %d, but there are %zu %s", side, i, list[i], limit, what);
      if (!(used >> i & 1)) return bad("%s%d is %d, but this op does not use it: expected -1", side, i, list[i]);
    }
    return APU_OK;
  }

  const PlanInfo &info_;
  const apu_op &op_;
  size_t index_;
};

apu_status check_embed(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(0, 1, 1, 0));
  TRY(c.matrix(0, 0, 0));
  const Tensor &table = *c.info().tensor(op.w[0]);
  if (table.rows < c.info().vocabulary)
    return c.bad("w0 \"%s\" %s: expected at least %u rows, the vocabulary", table.name.c_str(), dims(table.d).c_str(),
                 c.info().vocabulary);
  return c.scratch("out", 0, op.out[0], table.inner, APU_ROWS_STEP);
}

apu_status check_rms_norm(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(3, 1, 1, 0));
  TRY(c.scratch("in", 0, op.in[0], 0, -1));
  const Tensor &in = *c.info().tensor(op.in[0]);
  TRY(c.scratch("out", 0, op.out[0], in.inner, -1));
  TRY(c.same_rows("out", 0, op.out[0], in));
  if (op.in[1] != APU_NONE) {
    TRY(c.scratch("in", 1, op.in[1], in.inner, -1));
    TRY(c.same_rows("in", 1, op.in[1], in));
  }
  TRY(c.vector(0, in.inner));
  TRY(c.positive("f0 (eps)", op.f[0], true));
  return c.aliases({{0, 0}, {1, 0}});
}

apu_status check_matmul(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(3, 15, 0x1ff, 0));
  TRY(c.scratch("in", 0, op.in[0], 0, -1));
  const Tensor &in = *c.info().tensor(op.in[0]);
  TRY(c.vector(0, in.inner));
  TRY(c.positive("f0 (eps)", op.f[0], true));
  TRY(c.positive("f1 (soft cap)", op.f[1], true));
  TRY(c.number("i0 (activation)", op.i[0], APU_ACT_NONE, APU_ACT_GELU_ERF));
  TRY(c.number("i1 (precision)", op.i[1], APU_PRECISION_DEFAULT, APU_PRECISION_FINE));
  bool gated = op.i[0] != APU_ACT_NONE, ended = false;
  for (int m = 0; m < 4; ++m) {
    if (op.w[1 + m] == APU_NONE) {
      if (m == 0) return c.bad("w1 is missing");
      if (op.w[5 + m] != APU_NONE) return c.bad("w%d is a bias without its matrix w%d", 5 + m, 1 + m);
      if (op.out[m] != APU_NONE) return c.bad("out%d has no matrix w%d", m, 1 + m);
      ended = true;
      continue;
    }
    if (ended) return c.bad("w%d follows a gap: matrices must be w1 on", 1 + m);
    if (gated && m >= 2) return c.bad("w%d: a gated pair takes no other matrix", 1 + m);
    TRY(c.matrix(1 + m, 0, in.inner));
    const Tensor &w = *c.info().tensor(op.w[1 + m]);
    if (w.rows > kMaxMatrixRows || w.inner > kMaxMatrixRows)
      return c.bad("w%d \"%s\" %s: no dimension may exceed %u", 1 + m, w.name.c_str(), dims(w.d).c_str(),
                   kMaxMatrixRows);
    TRY(c.vector(5 + m, w.rows));
    if (gated && m == 1) {
      if (op.out[1] != APU_NONE) return c.bad("out1: a gated pair has one output");
      continue;
    }
    TRY(c.scratch("out", m, op.out[m], w.rows, -1));
    TRY(c.same_rows("out", m, op.out[m], in));
  }
  if (gated) {
    if (op.w[2] == APU_NONE) return c.bad("w2 (up) of the gated pair is missing");
    const Tensor &gate = *c.info().tensor(op.w[1]), &up = *c.info().tensor(op.w[2]);
    if (gate.rows != up.rows)
      return c.bad("w1 \"%s\" %s and w2 \"%s\" %s: expected as many rows", gate.name.c_str(), dims(gate.d).c_str(),
                   up.name.c_str(), dims(up.d).c_str());
  }
  if (op.in[1] != APU_NONE) {
    const Tensor &out = *c.info().tensor(op.out[0]);
    TRY(c.scratch("in", 1, op.in[1], out.inner, -1));
    TRY(c.same_rows("in", 1, op.in[1], out));
  }
  return c.aliases({{1, 0}});
}

apu_status check_rope_store(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(7, 1, 7, 3));
  TRY(c.kv_states());
  const State &k = c.info().states[size_t(op.state[0])], &v = c.info().states[size_t(op.state[1])];
  uint64_t d = k.d.head_size;
  TRY(c.scratch("in", 0, op.in[0], 0, APU_ROWS_STEP));
  const Tensor &q = *c.info().tensor(op.in[0]);
  if (q.inner % d != 0)
    return c.bad("in0 \"%s\" %s: expected whole heads of %llu elements", q.name.c_str(), dims(q.d).c_str(), u64(d));
  TRY(c.heads(q.inner / d + k.d.heads));
  if (op.out[0] != op.in[0]) return c.bad("out0 is %d, expected in0 (%d): q is rotated in place", op.out[0], op.in[0]);
  TRY(c.scratch("in", 1, op.in[1], d * k.d.heads, APU_ROWS_STEP));
  TRY(c.scratch("in", 2, op.in[2], uint64_t(v.d.head_size) * v.d.heads, APU_ROWS_STEP));
  TRY(c.vector(0, d));
  TRY(c.vector(1, d));
  TRY(c.positive("f0 (eps)", op.f[0], true));
  TRY(c.number("i0 (rotary dims)", op.i[0], 0, int32_t(d)));
  if (op.i[0] % 2) return c.bad("i0 (rotary dims) is %d, expected an even number", op.i[0]);
  TRY(c.number("i1 (rotary style)", op.i[1], APU_ROPE_PAIRS, APU_ROPE_HALVES));
  TRY(c.number("i2 (original context)", op.i[2], 0, INT32_MAX));
  if (op.i[0] > 0) {
    TRY(c.vector(2, uint64_t(op.i[0]) / 2));
    TRY(c.positive("f1 (base)", op.f[1], false));
    TRY(c.positive("f2 (frequency scale)", op.f[2], false));
    TRY(c.positive("f3 (YaRN extrapolation mix)", op.f[3], true));
    TRY(c.positive("f4 (magnitude)", op.f[4], false));
    if (op.f[3] > 0) {
      TRY(c.number("i2 (original context)", op.i[2], 1, INT32_MAX));
      TRY(c.positive("f5 (beta_fast)", op.f[5], false));
      TRY(c.positive("f6 (beta_slow)", op.f[6], false));
    }
  }
  return c.aliases({{0, 0}});
}

apu_status check_attention(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(1, 1, 1, 3));
  TRY(c.kv_states());
  const State &k = c.info().states[size_t(op.state[0])], &v = c.info().states[size_t(op.state[1])];
  TRY(c.scratch("in", 0, op.in[0], 0, APU_ROWS_STEP));
  const Tensor &q = *c.info().tensor(op.in[0]);
  uint64_t group = uint64_t(k.d.heads) * k.d.head_size; // one query head for every kv head
  if (q.inner % group != 0)
    return c.bad("in0 \"%s\" %s: expected a multiple of %u heads of %u elements", q.name.c_str(), dims(q.d).c_str(),
                 k.d.heads, k.d.head_size);
  uint64_t heads = q.inner / k.d.head_size;
  TRY(c.heads(heads));
  TRY(c.scratch("out", 0, op.out[0], heads * v.d.head_size, APU_ROWS_STEP));
  TRY(c.vector(0, heads));
  TRY(c.positive("f1 (soft cap)", op.f[1], true));
  return c.aliases({});
}

apu_status check_gather_norm(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(1, 1, 1, 0));
  TRY(c.scratch("in", 0, op.in[0], 0, APU_ROWS_STEP));
  const Tensor &in = *c.info().tensor(op.in[0]);
  TRY(c.scratch("out", 0, op.out[0], in.inner, APU_ROWS_OUTPUT));
  TRY(c.vector(0, in.inner));
  TRY(c.positive("f0 (eps)", op.f[0], true));
  return c.aliases({});
}

apu_status check_sample(const OpCheck &c) {
  TRY(c.operands(1, 0, 0, 0));
  TRY(c.scratch("in", 0, c.op().in[0], c.info().vocabulary, APU_ROWS_OUTPUT));
  if (uint64_t(c.info().max_outputs) * c.info().vocabulary > kMaxLogits)
    return c.bad("%u outputs of %u logits, expected at most %llu in all", c.info().max_outputs, c.info().vocabulary,
                 u64(kMaxLogits));
  return APU_OK;
}

apu_status check_route(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(1, 3, 3, 0));
  TRY(c.scratch("in", 0, op.in[0], 0, -1));
  const Tensor &in = *c.info().tensor(op.in[0]);
  TRY(c.vector(0, in.inner));
  TRY(c.matrix(1, 0, in.inner));
  const Tensor &router = *c.info().tensor(op.w[1]);
  if (router.rows > kMaxExperts)
    return c.bad("w1 \"%s\" %s: expected at most %u experts", router.name.c_str(), dims(router.d).c_str(), kMaxExperts);
  TRY(c.slots("out", 0, op.out[0], 0, APU_I32, in));
  const Tensor &ids = *c.info().tensor(op.out[0]);
  if (ids.inner > router.rows)
    return c.bad("out0 \"%s\" %s: expected at most %llu experts a row, the rows of w1 \"%s\"", ids.name.c_str(),
                 dims(ids.d).c_str(), u64(router.rows), router.name.c_str());
  if (ids.rows * ids.inner > kMaxRowHeads)
    return c.bad("out0 \"%s\" %s: expected at most %llu experts of all rows", ids.name.c_str(), dims(ids.d).c_str(),
                 u64(kMaxRowHeads));
  TRY(c.slots("out", 1, op.out[1], ids.inner, APU_F32, in));
  TRY(c.number("i0 (score)", op.i[0], APU_SCORE_SOFTMAX, APU_SCORE_SIGMOID));
  TRY(c.number("i1 (divide by the sum)", op.i[1], 0, 1));
  TRY(c.positive("f0 (eps)", op.f[0], true));
  TRY(c.positive("f1 (scale)", op.f[1], false));
  TRY(c.positive("f2 (smallest divisor)", op.f[2], true));
  return c.aliases({});
}

apu_status check_experts(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.number("i0 (activation)", op.i[0], APU_ACT_NONE, APU_ACT_GELU_ERF));
  TRY(c.number("i1 (precision)", op.i[1], APU_PRECISION_DEFAULT, APU_PRECISION_EXACT));
  bool gated = op.i[0] != APU_ACT_NONE;
  if (gated)
    TRY(c.operands(3, 1, 7, 0));
  else
    TRY(c.operands(15, 1, 2, 0));
  TRY(c.scratch("in", 0, op.in[0], 0, -1));
  const Tensor &in = *c.info().tensor(op.in[0]);
  TRY(c.slots("in", 1, op.in[1], 0, APU_I32, in));
  const Tensor &ids = *c.info().tensor(op.in[1]);
  const apu_op *route = c.writer(op.in[1]);
  if (!route)
    return c.bad("in1 \"%s\": expected ids of an earlier ROUTE, found no op that writes it", ids.name.c_str());
  uint64_t experts = c.info().tensor(route->w[1])->rows, k = ids.inner; // nothing else writes I32
  if (in.inner % (gated ? 1 : k) != 0)
    return c.bad("in0 \"%s\" %s: expected a part for each of %llu experts of a row", in.name.c_str(),
                 dims(in.d).c_str(), u64(k));
  uint64_t columns = gated ? in.inner : in.inner / k;
  TRY(c.stack(1, experts, 0, columns));
  uint64_t n = c.info().tensor(op.w[1])->d.shape[1];
  if (gated) {
    TRY(c.vector(0, columns));
    TRY(c.positive("f0 (eps)", op.f[0], true));
    TRY(c.stack(2, experts, n, columns));
    TRY(c.scratch("out", 0, op.out[0], k * n, -1));
  } else {
    TRY(c.slots("in", 2, op.in[2], k, APU_F32, in));
    TRY(c.scratch("out", 0, op.out[0], n, -1));
    if (op.in[3] != APU_NONE) {
      TRY(c.scratch("in", 3, op.in[3], n, -1));
      TRY(c.same_rows("in", 3, op.in[3], in));
    }
  }
  TRY(c.same_rows("out", 0, op.out[0], in));
  return c.aliases({{3, 0}});
}

apu_status check_op(const PlanInfo &info, size_t index) {
  const apu_op &op = info.ops[index];
  OpCheck c(info, op, index);
  switch (op.kind) {
  case APU_OP_EMBED: return check_embed(c);
  case APU_OP_RMS_NORM: return check_rms_norm(c);
  case APU_OP_MATMUL: return check_matmul(c);
  case APU_OP_ROPE_STORE: return check_rope_store(c);
  case APU_OP_ATTENTION: return check_attention(c);
  case APU_OP_GATHER_NORM: return check_gather_norm(c);
  case APU_OP_SAMPLE: return check_sample(c);
  case APU_OP_ROUTE: return check_route(c);
  case APU_OP_EXPERTS: return check_experts(c);
  default: return fail(APU_E_UNSUPPORTED, "op %zu: unknown kind %u", index, op.kind);
  }
}

// ---- tensors and states --------------------------------------------------------------------------------------------

bool read_name(const apu_plan_desc &desc, uint64_t offset, std::string &out) {
  if (offset >= desc.names_bytes) return false;
  out = desc.names + offset; // the block ends in NUL
  return true;
}

apu_status check_segments(const apu_plan_desc &desc, const apu_plane &plane, Tensor &t) {
  const char *name = t.name.c_str();
  if (plane.segment_begin > desc.segment_count || plane.segment_count > desc.segment_count - plane.segment_begin)
    return fail(APU_E_INVALID, "tensor \"%s\": segments %u to %llu, but there are %u", name, plane.segment_begin,
                u64(plane.segment_begin) + plane.segment_count, desc.segment_count);
  uint64_t next = 0;
  for (uint32_t i = 0; i < plane.segment_count; ++i) {
    const apu_segment &s = desc.segments[plane.segment_begin + i];
    if (s.row_begin != next)
      return fail(APU_E_INVALID, "tensor \"%s\": segment %u begins at row %llu, expected %llu: segments must adjoin",
                  name, i, u64(s.row_begin), u64(next));
    if (s.row_count == 0 || s.row_count > t.rows - next)
      return fail(APU_E_INVALID, "tensor \"%s\": segment %u has %llu rows, expected 1 to %llu", name, i,
                  u64(s.row_count), u64(t.rows - next));
    if (s.address == 0) return fail(APU_E_INVALID, "tensor \"%s\": segment %u has address 0", name, i);
    if (s.row_count > 1 && s.row_stride < t.row_bytes)
      return fail(APU_E_INVALID, "tensor \"%s\": segment %u has rows of %llu bytes at a stride of %llu", name, i,
                  u64(t.row_bytes), u64(s.row_stride));
    uint64_t extent;
    if (__builtin_mul_overflow(s.row_count - 1, s.row_stride, &extent) ||
        __builtin_add_overflow(extent, t.row_bytes, &extent) || __builtin_add_overflow(extent, s.address, &extent))
      return fail(APU_E_INVALID, "tensor \"%s\": segment %u wraps around the address space", name, i);
    next += s.row_count;
    t.segments.push_back(s);
    t.segments.back().row_stride = std::max(s.row_stride, t.row_bytes); // a single row may come without one
  }
  if (next != t.rows)
    return fail(APU_E_INVALID, "tensor \"%s\": its segments hold %llu rows, expected %llu", name, u64(next),
                u64(t.rows));
  return APU_OK;
}

apu_status check_tensor(const apu_plan_desc &desc, uint32_t index, Tensor &t) {
  if (!read_name(desc, t.d.name, t.name))
    return fail(APU_E_INVALID, "tensor %u: its name is at %llu of %llu bytes of names", index, u64(t.d.name),
                u64(desc.names_bytes));
  const char *name = t.name.c_str();
  if (t.d.ndim < 1 || t.d.ndim > 4)
    return fail(APU_E_INVALID, "tensor \"%s\": %u dimensions, expected 1 to 4", name, t.d.ndim);
  uint64_t elements = 1;
  for (uint32_t i = 0; i < t.d.ndim; ++i) {
    // Below 2^44 so that byte counts of any dtype cannot overflow.
    if (t.d.shape[i] == 0 || __builtin_mul_overflow(elements, t.d.shape[i], &elements) || elements >> 44)
      return fail(APU_E_INVALID, "tensor \"%s\": shape %s is empty or too large", name, dims(t.d).c_str());
  }
  switch (t.d.kind) {
  case APU_TENSOR_WEIGHT: {
    t.inner = t.d.shape[t.d.ndim - 1];
    t.rows = elements / t.inner;
    t.row_bytes = cpu::row_bytes(t.d.dtype, t.inner);
    if (t.row_bytes == 0) {
      if (*dtype_name(t.d.dtype) == '?')
        return fail(APU_E_UNSUPPORTED, "tensor \"%s\": dtype %u is not supported", name, t.d.dtype);
      return fail(APU_E_UNSUPPORTED, "tensor \"%s\": rows of %llu elements are not whole blocks of %s", name,
                  u64(t.inner), dtype_name(t.d.dtype));
    }
    if (t.d.plane_count != 1)
      return fail(APU_E_UNSUPPORTED, "tensor \"%s\": %u planes, expected 1", name, t.d.plane_count);
    if (t.d.plane_begin >= desc.plane_count)
      return fail(APU_E_INVALID, "tensor \"%s\": plane %u, but there are %u", name, t.d.plane_begin, desc.plane_count);
    const apu_plane &plane = desc.planes[t.d.plane_begin];
    if (plane.kind != APU_PLANE_DATA)
      return fail(APU_E_UNSUPPORTED, "tensor \"%s\": plane of kind %u, expected data", name, plane.kind);
    if (plane.dtype != t.d.dtype)
      return fail(APU_E_INVALID, "tensor \"%s\": its plane is %s, expected %s", name, dtype_name(plane.dtype),
                  dtype_name(t.d.dtype));
    return check_segments(desc, plane, t);
  }
  case APU_TENSOR_SCRATCH:
  case APU_TENSOR_BOUNDARY: {
    t.rows = t.d.shape[0];
    t.inner = elements / t.rows;
    if (t.d.dtype != APU_F32 && t.d.dtype != APU_I32)
      return fail(APU_E_INVALID, "tensor \"%s\": scratch of dtype %s (%u), expected F32 or I32", name,
                  dtype_name(t.d.dtype), t.d.dtype);
    if (t.d.rows > APU_ROWS_OUTPUT)
      return fail(APU_E_INVALID, "tensor \"%s\": unknown kind of rows %u", name, t.d.rows);
    uint64_t needed = t.d.rows == APU_ROWS_STEP ? desc.max_rows : t.d.rows == APU_ROWS_OUTPUT ? desc.max_outputs : 0;
    if (needed && t.rows != needed)
      return fail(APU_E_INVALID, "tensor \"%s\" %s: expected %llu rows, the plan's maximum", name, dims(t.d).c_str(),
                  u64(needed));
    if (t.rows > kMaxRows || t.inner > kMaxMatrixRows)
      return fail(APU_E_INVALID, "tensor \"%s\" %s: expected at most %u rows of %u elements", name, dims(t.d).c_str(),
                  kMaxRows, kMaxMatrixRows);
    if (t.d.offset % 64 != 0)
      return fail(APU_E_INVALID, "tensor \"%s\": offset %llu is not a multiple of 64", name, u64(t.d.offset));
    if (t.d.offset > desc.arena_bytes || t.bytes() > desc.arena_bytes - t.d.offset)
      return fail(APU_E_INVALID, "tensor \"%s\": %llu bytes at %llu do not fit into the arena of %llu bytes", name,
                  u64(t.bytes()), u64(t.d.offset), u64(desc.arena_bytes));
    return APU_OK;
  }
  default: return fail(APU_E_INVALID, "tensor \"%s\": unknown kind %u", name, t.d.kind);
  }
}

apu_status check_state(const apu_plan_desc &desc, uint32_t index, State &s, std::vector<Group> &groups) {
  if (!read_name(desc, s.d.name, s.name))
    return fail(APU_E_INVALID, "state %u: its name is at %llu of %llu bytes of names", index, u64(s.d.name),
                u64(desc.names_bytes));
  const char *name = s.name.c_str();
  if (s.d.kind > APU_STATE_FIXED) return fail(APU_E_INVALID, "state \"%s\": unknown kind %u", name, s.d.kind);
  if (s.d.group >= desc.group_count)
    return fail(APU_E_INVALID, "state \"%s\": group %u, but there are %u", name, s.d.group, desc.group_count);
  s.element_bytes = uint32_t(cpu::row_bytes(s.d.dtype, 1));
  if (s.element_bytes == 0)
    return fail(APU_E_UNSUPPORTED, "state \"%s\": dtype %s (%u) is not supported", name, dtype_name(s.d.dtype),
                s.d.dtype);
  if (s.d.heads == 0 || s.d.head_size == 0 || s.d.page_count == 0)
    return fail(APU_E_INVALID, "state \"%s\": %u heads of %u elements in %u pages: expected at least 1 of each", name,
                s.d.heads, s.d.head_size, s.d.page_count);
  uint64_t rows = 1;
  if (s.d.kind == APU_STATE_PAGED) {
    rows = s.d.rows_per_page;
    if (rows == 0 || rows > kPageTokens || kPageTokens % rows != 0)
      return fail(APU_E_INVALID, "state \"%s\": %u rows a page, expected a divisor of %u", name, s.d.rows_per_page,
                  kPageTokens);
  } else if (s.d.versions == 0) {
    return fail(APU_E_INVALID, "state \"%s\": 0 versions, expected at least 1", name);
  }
  uint64_t need, extent;
  if (__builtin_mul_overflow(uint64_t(s.d.heads) * s.d.head_size, rows * s.element_bytes, &need) ||
      s.d.page_bytes < need)
    return fail(APU_E_INVALID, "state \"%s\": pages of %llu bytes, expected at least %llu", name, u64(s.d.page_bytes),
                u64(need));
  if (s.d.page_bytes % s.element_bytes != 0 || s.d.address % s.element_bytes != 0 || s.d.address == 0)
    return fail(APU_E_INVALID, "state \"%s\": address %llx or page size %llu is 0 or no multiple of %u", name,
                u64(s.d.address), u64(s.d.page_bytes), s.element_bytes);
  uint64_t units = uint64_t(s.d.page_count) * (s.d.kind == APU_STATE_FIXED ? s.d.versions : 1);
  if (__builtin_mul_overflow(units, s.d.page_bytes, &extent) || __builtin_add_overflow(extent, s.d.address, &extent))
    return fail(APU_E_INVALID, "state \"%s\": its pages wrap around the address space", name);
  Group &g = groups[s.d.group];
  if (!g.states.empty() && g.kind != s.d.kind)
    return fail(APU_E_INVALID, "state \"%s\": group %u mixes paged and fixed states", name, s.d.group);
  bool first = g.states.empty();
  g.kind = s.d.kind;
  g.page_count = first ? s.d.page_count : std::min(g.page_count, s.d.page_count);
  g.window = first ? s.d.window : g.window == 0 || s.d.window == 0 ? 0 : std::max(g.window, s.d.window);
  g.states.push_back(index);
  return APU_OK;
}

} // namespace

apu_status describe(const apu_plan_desc &desc, PlanInfo &out) {
  struct {
    const char *name;
    const void *pointer;
    uint64_t count;
  } arrays[] = {
      {"tensors", desc.tensors, desc.tensor_count},
      {"planes", desc.planes, desc.plane_count},
      {"segments", desc.segments, desc.segment_count},
      {"states", desc.states, desc.state_count},
      {"ops", desc.ops, desc.op_count},
      {"names", desc.names, desc.names_bytes},
  };
  for (auto &a : arrays)
    if (a.count && !a.pointer)
      return fail(APU_E_INVALID, "plan: %s is NULL, but its count is %llu", a.name, u64(a.count));
  if (desc.names_bytes && desc.names[desc.names_bytes - 1] != 0)
    return fail(APU_E_INVALID, "plan: names does not end in NUL");
  if (desc.max_rows == 0 || desc.max_rows > kMaxRows)
    return fail(APU_E_INVALID, "plan: max_rows is %u, expected 1 to %u", desc.max_rows, kMaxRows);
  if (desc.max_sequences == 0 || desc.max_sequences > desc.max_rows)
    return fail(APU_E_INVALID, "plan: max_sequences is %u, expected 1 to max_rows (%u)", desc.max_sequences,
                desc.max_rows);
  if (desc.max_outputs > kMaxRows)
    return fail(APU_E_INVALID, "plan: max_outputs is %u, expected at most %u", desc.max_outputs, kMaxRows);
  if (desc.vocabulary == 0 || desc.vocabulary > uint32_t(INT32_MAX))
    return fail(APU_E_INVALID, "plan: vocabulary is %u, expected 1 to %d", desc.vocabulary, INT32_MAX);
  if (desc.max_positions == 0 || desc.max_positions > uint32_t(INT32_MAX))
    return fail(APU_E_INVALID, "plan: max_positions is %u, expected 1 to %d", desc.max_positions, INT32_MAX);
  if (desc.group_count > desc.state_count)
    return fail(APU_E_INVALID, "plan: %u groups of %u states", desc.group_count, desc.state_count);
  if (desc.op_count == 0) return fail(APU_E_INVALID, "plan: it has no ops");
  if (desc.arena_bytes >> 46) return fail(APU_E_INVALID, "plan: an arena of %llu bytes", u64(desc.arena_bytes));

  out.arena_bytes = desc.arena_bytes;
  out.max_rows = desc.max_rows, out.max_sequences = desc.max_sequences, out.max_outputs = desc.max_outputs;
  out.vocabulary = desc.vocabulary, out.max_positions = desc.max_positions;
  out.tensors.resize(desc.tensor_count);
  for (uint32_t i = 0; i < desc.tensor_count; ++i) {
    out.tensors[i].d = desc.tensors[i];
    TRY(check_tensor(desc, i, out.tensors[i]));
  }
  out.states.resize(desc.state_count);
  out.groups.resize(desc.group_count);
  for (uint32_t i = 0; i < desc.state_count; ++i) {
    out.states[i].d = desc.states[i];
    TRY(check_state(desc, i, out.states[i], out.groups));
  }
  for (uint32_t g = 0; g < desc.group_count; ++g)
    if (out.groups[g].states.empty()) return fail(APU_E_INVALID, "plan: no state is in group %u", g);
  out.ops.assign(desc.ops, desc.ops + desc.op_count);
  for (uint32_t i = 0; i < desc.op_count; ++i) TRY(check_op(out, i));
  return APU_OK;
}

} // namespace apu
