// What the checks of ops are made of: operands exist and are of the kind that the op takes, shapes agree, nothing that
// is written lies on what is read. Every message names the op by number, kind and layer, the operand by its place and
// name, what was expected and what was found.
#pragma once

#include "common.h"
#include "cpu/kernels.h"
#include "plan/plan.h"

#include <cmath>
#include <cstdio>
#include <utility>

namespace apu {

using u64 = unsigned long long;

inline std::string dims(const apu_tensor &t) {
  std::string out = "(";
  for (uint32_t i = 0; i < t.ndim; ++i) out += (i ? ", " : "") + std::to_string(t.shape[i]);
  return out + ")";
}

// Text of an op's message after its name; keeps the checks to one line each.
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
    const bool product = op_.kind == APU_OP_MATMUL || op_.kind == APU_OP_EXPERTS || op_.kind == APU_OP_HEAD_MATMUL;
    if (!t.scales.segments.empty() && (!product || t.d.ndim < 2))
      return bad("w%d \"%s\": has a scale plane, which only the matrices of MATMUL, EXPERTS and HEAD_MATMUL may", i,
                 t.name.c_str());
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

  // A state of an attention op: pages of 128 rows in F32, F16 or Q8_0.
  apu_status paged_state(int i) const {
    if (op_.state[i] == APU_NONE) return bad("state%d is missing", i);
    const State &s = info_.states[size_t(op_.state[i])];
    if (s.d.kind != APU_STATE_PAGED) return bad("state%d \"%s\": expected a paged state", i, s.name.c_str());
    if (s.d.rows_per_page != kPageTokens)
      return bad("state%d \"%s\": expected %u rows a page, found %u", i, s.name.c_str(), kPageTokens,
                 s.d.rows_per_page);
    if (s.d.dtype != APU_F32 && s.d.dtype != APU_F16 && s.d.dtype != APU_Q8_0)
      return bad("state%d \"%s\": expected F32, F16 or Q8_0, found %s (%u)", i, s.name.c_str(), dtype_name(s.d.dtype),
                 s.d.dtype);
    return APU_OK;
  }

  apu_status latent_state() const { // one row for all heads
    if (apu_status s = paged_state(0); s != APU_OK) return s;
    const State &s = info_.states[size_t(op_.state[0])];
    if (s.d.heads != 1) return bad("state0 \"%s\": expected one head, found %u", s.name.c_str(), s.d.heads);
    return APU_OK;
  }

  // A state of one head in F32 or F16, `rows` a page (0: any).
  apu_status row_state(int i, uint32_t rows) const {
    if (op_.state[i] == APU_NONE) return bad("state%d is missing", i);
    const State &s = info_.states[size_t(op_.state[i])];
    if (s.d.kind != APU_STATE_PAGED) return bad("state%d \"%s\": expected a paged state", i, s.name.c_str());
    if (rows && s.d.rows_per_page != rows)
      return bad("state%d \"%s\": expected %u rows a page, found %u", i, s.name.c_str(), rows, s.d.rows_per_page);
    if (s.d.dtype != APU_F32 && s.d.dtype != APU_F16)
      return bad("state%d \"%s\": expected F32 or F16, found %s (%u)", i, s.name.c_str(), dtype_name(s.d.dtype),
                 s.d.dtype);
    if (s.d.heads != 1) return bad("state%d \"%s\": expected one head, found %u", i, s.name.c_str(), s.d.heads);
    return APU_OK;
  }

  // Key and value state, of one group and one number of heads.
  apu_status kv_states() const {
    for (int i = 0; i < 2; ++i)
      if (apu_status s = paged_state(i); s != APU_OK) return s;
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

apu_status check_op(const PlanInfo &info, size_t index); // in validate_ops.cpp
apu_status check_sparse_op(const OpCheck &c);            // in validate_sparse.cpp: kinds from STREAMS_IN on
// The rotary embedding of an op that rotates, of `least` to `most` dims.
apu_status check_rope(const OpCheck &c, uint64_t least, uint64_t most);

} // namespace apu
