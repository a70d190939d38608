// Checks each op of a plan against apu.h: its operands, shapes, numbers and aliases, and with them all that a kernel
// relies on. Tensors and states have been checked before (validate.cpp).
#include "plan/op_check.h"

#include <algorithm>

namespace apu {
namespace {

apu_status check_embed(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(0, 1, 1, 0));
  TRY(c.matrix(0, 0, 0));
  const Tensor &table = *c.info().tensor(op.w[0]);
  if (table.rows < c.info().vocabulary)
    return c.bad("w0 \"%s\" %s: expected at least %u rows, the vocabulary", table.name.c_str(), dims(table.d).c_str(),
                 c.info().vocabulary);
  TRY(c.number("i0 (copies)", op.i[0], 0, 16));
  return c.scratch("out", 0, op.out[0], table.inner * uint64_t(std::max(op.i[0], 1)), APU_ROWS_STEP);
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
  TRY(c.positive("f2 (limit)", op.f[2], true));
  TRY(c.number("i0 (activation)", op.i[0], APU_ACT_NONE, APU_ACT_SWIGLU_OAI));
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
  TRY(check_rope(c, 0, d));
  return c.aliases({{0, 0}});
}

apu_status check_latent_store(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(3, 1, 5, 1));
  TRY(c.latent_state());
  const uint64_t d = c.info().states[size_t(op.state[0])].d.head_size;
  TRY(c.scratch("in", 0, op.in[0], 0, APU_ROWS_STEP));
  const Tensor &q = *c.info().tensor(op.in[0]);
  TRY(c.number("i3 (heads)", op.i[3], 1, int32_t(kMaxRowHeads)));
  const uint64_t heads = uint64_t(op.i[3]);
  if (q.inner % heads != 0)
    return c.bad("in0 \"%s\" %s: expected %llu heads", q.name.c_str(), dims(q.d).c_str(), u64(heads));
  TRY(c.heads(heads + 1));
  if (op.out[0] != op.in[0]) return c.bad("out0 is %d, expected in0 (%d): q is rotated in place", op.out[0], op.in[0]);
  TRY(c.scratch("in", 1, op.in[1], d, APU_ROWS_STEP));
  TRY(check_rope(c, 2, std::min(d - 1, q.inner / heads)));
  TRY(c.present("w", 0, op.w[0]));
  TRY(c.vector(0, d - uint64_t(op.i[0])));
  return c.aliases({{0, 0}});
}

apu_status check_head_matmul(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(1, 1, 1, 0));
  TRY(c.number("i0 (matrices lie across)", op.i[0], 0, 1));
  TRY(c.number("i1 (precision)", op.i[1], APU_PRECISION_DEFAULT, APU_PRECISION_EXACT));
  TRY(c.number("i2 (elements that follow)", op.i[2], 0, int32_t(kMaxMatrixRows)));
  TRY(c.present("w", 0, op.w[0]));
  const Tensor &w = *c.info().tensor(op.w[0]);
  TRY(c.stack(0, w.d.shape[0], 0, w.inner));
  const uint64_t heads = w.d.shape[0], rest = uint64_t(op.i[2]);
  const uint64_t k = w.d.shape[op.i[0] ? 1 : 2], n = w.d.shape[op.i[0] ? 2 : 1];
  TRY(c.scratch("in", 0, op.in[0], heads * (k + rest), -1));
  TRY(c.scratch("out", 0, op.out[0], heads * (n + rest), -1));
  TRY(c.same_rows("out", 0, op.out[0], *c.info().tensor(op.in[0])));
  TRY(c.heads(heads));
  return c.aliases({});
}

apu_status check_latent_attention(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(1, 1, 1, 1));
  TRY(c.latent_state());
  const uint64_t d = c.info().states[size_t(op.state[0])].d.head_size;
  TRY(c.scratch("in", 0, op.in[0], 0, APU_ROWS_STEP));
  const Tensor &q = *c.info().tensor(op.in[0]);
  if (q.inner % d != 0)
    return c.bad("in0 \"%s\" %s: expected whole heads of %llu elements", q.name.c_str(), dims(q.d).c_str(), u64(d));
  TRY(c.heads(q.inner / d));
  TRY(c.number("i0 (elements of a value)", op.i[0], 1, int32_t(d)));
  TRY(c.scratch("out", 0, op.out[0], q.inner / d * uint64_t(op.i[0]), APU_ROWS_STEP));
  TRY(c.vector(0, q.inner / d));
  TRY(c.positive("f1 (soft cap)", op.f[1], true));
  return c.aliases({});
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
  TRY(c.operands(1, 3, 31, 0));
  TRY(c.scratch("in", 0, op.in[0], 0, op.w[3] == APU_NONE ? -1 : APU_ROWS_STEP));
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
  TRY(c.number("i0 (score)", op.i[0], APU_SCORE_SOFTMAX, APU_SCORE_SQRT_SOFTPLUS));
  TRY(c.number("i1 (divide by the sum)", op.i[1], 0, 1));
  if (const Tensor *table = c.info().tensor(op.w[3])) {
    if (table->d.ndim != 2 || table->d.dtype != APU_I32 || table->rows < c.info().vocabulary ||
        table->inner != ids.inner)
      return c.bad("w3 \"%s\": expected shape (%u, %llu) in I32, found %s in %s", table->name.c_str(),
                   c.info().vocabulary, u64(ids.inner), dims(table->d).c_str(), dtype_name(table->d.dtype));
    if (op.w[2] != APU_NONE || op.i[2] != 0) return c.bad("w3: a row's experts are given, expected no w2 and i2 = 0");
  }
  TRY(c.vector(2, router.rows));
  TRY(c.vector(4, router.rows));
  TRY(c.number("i2 (groups)", op.i[2], 0, int32_t(router.rows)));
  if (op.i[2] > 0) {
    const uint64_t groups = uint64_t(op.i[2]), size = router.rows / groups;
    if (router.rows % groups != 0)
      return c.bad("i2 (groups) is %d, which does not divide the %llu experts of w1 \"%s\"", op.i[2], u64(router.rows),
                   router.name.c_str());
    TRY(c.number("i3 (groups used)", op.i[3], 1, op.i[2]));
    TRY(c.number("i4 (score of a group)", op.i[4], APU_GROUP_MAX, APU_GROUP_SUM2));
    if (op.i[4] == APU_GROUP_SUM2 && size < 2)
      return c.bad("i4 (score of a group) adds two experts, but a group has one");
    if (ids.inner > size * uint64_t(op.i[3]))
      return c.bad("out0 \"%s\" %s: expected at most %llu experts a row, those of %d groups", ids.name.c_str(),
                   dims(ids.d).c_str(), u64(size * uint64_t(op.i[3])), op.i[3]);
  }
  TRY(c.positive("f0 (eps)", op.f[0], true));
  TRY(c.positive("f1 (scale)", op.f[1], false));
  TRY(c.positive("f2 (smallest divisor)", op.f[2], true));
  return c.aliases({});
}

apu_status check_experts(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.number("i0 (activation)", op.i[0], APU_ACT_NONE, APU_ACT_SWIGLU_OAI));
  TRY(c.number("i1 (precision)", op.i[1], APU_PRECISION_DEFAULT, APU_PRECISION_EXACT));
  bool gated = op.i[0] != APU_ACT_NONE;
  if (gated)
    TRY(c.operands(3, 1, 0x1f, 0));
  else
    TRY(c.operands(15, 1, 0xa, 0));
  TRY(c.scratch("in", 0, op.in[0], 0, -1));
  const Tensor &in = *c.info().tensor(op.in[0]);
  TRY(c.positive("f1 (limit)", op.f[1], true));
  TRY(c.slots("in", 1, op.in[1], 0, APU_I32, in));
  const Tensor &ids = *c.info().tensor(op.in[1]);
  const apu_op *route = c.writer(op.in[1]);
  if (!route || route->kind != APU_OP_ROUTE)
    return c.bad("in1 \"%s\": expected ids of an earlier ROUTE, found no op that writes it", ids.name.c_str());
  uint64_t experts = c.info().tensor(route->w[1])->rows, k = ids.inner;
  if (in.inner % (gated ? 1 : k) != 0)
    return c.bad("in0 \"%s\" %s: expected a part for each of %llu experts of a row", in.name.c_str(),
                 dims(in.d).c_str(), u64(k));
  uint64_t columns = gated ? in.inner : in.inner / k;
  TRY(c.stack(1, experts, 0, columns));
  uint64_t n = c.info().tensor(op.w[1])->d.shape[1];
  TRY(c.vector(3, experts * n));
  TRY(c.vector(4, experts * n));
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

} // namespace

apu_status check_rope(const OpCheck &c, uint64_t least, uint64_t most) {
  const apu_op &op = c.op();
  TRY(c.positive("f0 (eps)", op.f[0], true));
  TRY(c.number("i0 (rotary dims)", op.i[0], int32_t(least), int32_t(most)));
  if (op.i[0] % 2) return c.bad("i0 (rotary dims) is %d, expected an even number", op.i[0]);
  TRY(c.number("i1 (rotary style)", op.i[1], APU_ROPE_PAIRS, APU_ROPE_HALVES));
  TRY(c.number("i2 (original context)", op.i[2], 0, INT32_MAX));
  TRY(c.number("i4 (dimensions as they are)", op.i[4], 0, 1));
  if (op.i[0] == 0) return APU_OK;
  TRY(c.vector(2, uint64_t(op.i[0]) / 2));
  TRY(c.positive("f1 (base)", op.f[1], false));
  TRY(c.positive("f2 (frequency scale)", op.f[2], false));
  TRY(c.positive("f3 (YaRN extrapolation mix)", op.f[3], true));
  TRY(c.positive("f4 (magnitude)", op.f[4], false));
  if (op.f[3] == 0) return APU_OK;
  TRY(c.number("i2 (original context)", op.i[2], 1, INT32_MAX));
  TRY(c.positive("f5 (beta_fast)", op.f[5], false));
  return c.positive("f6 (beta_slow)", op.f[6], false);
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
  case APU_OP_LATENT_STORE: return check_latent_store(c);
  case APU_OP_HEAD_MATMUL: return check_head_matmul(c);
  case APU_OP_LATENT_ATTENTION: return check_latent_attention(c);
  case APU_OP_STREAMS_IN:
  case APU_OP_STREAMS_OUT:
  case APU_OP_SHARED_STORE:
  case APU_OP_COMPRESS:
  case APU_OP_INDEX:
  case APU_OP_SPARSE_ATTENTION: return check_sparse_op(c);
  default: return fail(APU_E_UNSUPPORTED, "op %zu: unknown kind %u", index, op.kind);
  }
}

} // namespace apu
