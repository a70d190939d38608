// Checks the ops of hyper-connections and of compressed attention against apu.h, as validate_ops.cpp does the others.
#include "plan/op_check.h"

#include <algorithm>

namespace apu {
namespace {

constexpr int32_t kMaxStreams = 16;
constexpr int32_t kMaxIterations = 1000; // of the mix

apu_status check_streams(const OpCheck &c, const Tensor &in, uint64_t streams) {
  if (in.inner % streams != 0)
    return c.bad("in0 \"%s\" %s: expected %llu streams", in.name.c_str(), dims(in.d).c_str(), u64(streams));
  return APU_OK;
}

apu_status check_streams_in(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(1, 3, 7, 0));
  TRY(c.number("i0 (streams)", op.i[0], 1, kMaxStreams));
  TRY(c.number("i1 (iterations)", op.i[1], 0, kMaxIterations));
  TRY(c.positive("f0 (eps)", op.f[0], true));
  TRY(c.positive("f1 (what is added)", op.f[1], true));
  const uint64_t s = uint64_t(op.i[0]);
  const bool mixes = op.out[1] != APU_NONE;
  TRY(c.scratch("in", 0, op.in[0], 0, APU_ROWS_STEP));
  const Tensor &in = *c.info().tensor(op.in[0]);
  TRY(check_streams(c, in, s));
  TRY(c.scratch("out", 0, op.out[0], in.inner / s, APU_ROWS_STEP));
  const uint64_t n = mixes ? s * (s + 2) : s;
  TRY(c.matrix(0, n, in.inner));
  for (int i = 1; i < 3; ++i) TRY(c.present("w", i, op.w[i]));
  TRY(c.vector(1, mixes ? 3 : 1));
  TRY(c.vector(2, n));
  if (mixes) TRY(c.scratch("out", 1, op.out[1], s + s * s, APU_ROWS_STEP));
  return c.aliases({});
}

apu_status check_streams_out(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(7, 1, 0, 0));
  TRY(c.number("i0 (streams)", op.i[0], 1, kMaxStreams));
  const uint64_t s = uint64_t(op.i[0]);
  TRY(c.scratch("in", 0, op.in[0], 0, APU_ROWS_STEP));
  const Tensor &in = *c.info().tensor(op.in[0]);
  TRY(check_streams(c, in, s));
  TRY(c.scratch("in", 1, op.in[1], in.inner / s, APU_ROWS_STEP));
  TRY(c.scratch("in", 2, op.in[2], s + s * s, APU_ROWS_STEP));
  TRY(c.scratch("out", 0, op.out[0], in.inner, APU_ROWS_STEP));
  TRY(c.heads((in.inner / s + 511) / 512)); // blocks of elements
  return c.aliases({{0, 0}});
}

apu_status check_round(const OpCheck &c, uint64_t d, bool fp4) {
  const int32_t kind = c.op().i[3];
  TRY(c.number("i3 (rounding)", kind, APU_ROUND_NONE, fp4 ? APU_ROUND_FP4 : APU_ROUND_E4M3));
  if (kind == APU_ROUND_FP4 && (d & (d - 1)) != 0)
    return c.bad("i3 (rounding) is FP4, but a row has %llu elements: expected a power of two", u64(d));
  return APU_OK;
}

// Heads of as many elements as state `i`'s one.
apu_status check_heads(const OpCheck &c, uint64_t d) {
  TRY(c.scratch("in", 0, c.op().in[0], 0, APU_ROWS_STEP));
  const Tensor &q = *c.info().tensor(c.op().in[0]);
  if (q.inner % d != 0)
    return c.bad("in0 \"%s\" %s: expected whole heads of %llu elements", q.name.c_str(), dims(q.d).c_str(), u64(d));
  return c.heads(q.inner / d + 1);
}

apu_status check_shared_store(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(3, 1, 5, 1));
  TRY(c.row_state(0, kPageTokens));
  const uint64_t d = c.info().states[size_t(op.state[0])].d.head_size;
  TRY(check_heads(c, d));
  if (op.out[0] != op.in[0]) return c.bad("out0 is %d, expected in0 (%d): q is rotated in place", op.out[0], op.in[0]);
  TRY(c.scratch("in", 1, op.in[1], d, APU_ROWS_STEP));
  TRY(c.present("w", 0, op.w[0]));
  TRY(c.vector(0, d));
  TRY(check_rope(c, 2, d));
  TRY(check_round(c, d, false));
  return c.aliases({{0, 0}});
}

apu_status check_compress(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(3, 0, 7, 3));
  TRY(c.matrix(0, 0, 0));
  const Tensor &bias = *c.info().tensor(op.w[0]);
  if (bias.rows > kPageTokens || kPageTokens % bias.rows != 0)
    return c.bad("w0 \"%s\" %s: expected a row for each of the tokens, which divide %u", bias.name.c_str(),
                 dims(bias.d).c_str(), kPageTokens);
  TRY(c.row_state(0, kPageTokens));
  TRY(c.row_state(1, uint32_t(kPageTokens / bias.rows)));
  const State &open = c.info().states[size_t(op.state[0])], &out = c.info().states[size_t(op.state[1])];
  const uint64_t d = out.d.head_size;
  if (bias.inner != d && bias.inner != 2 * d)
    return c.bad("w0 \"%s\" %s: expected rows of %llu or %llu elements", bias.name.c_str(), dims(bias.d).c_str(),
                 u64(d), u64(2 * d));
  if (op.state[0] == op.state[1]) return c.bad("state0 and state1 are both \"%s\"", open.name.c_str());
  if (open.d.dtype != APU_F32 || open.d.head_size != 2 * bias.inner)
    return c.bad("state0 \"%s\": expected rows of %llu elements in F32, found %u in %s", open.name.c_str(),
                 u64(2 * bias.inner), open.d.head_size, dtype_name(open.d.dtype));
  if (open.d.window && open.d.window < bias.rows * (bias.inner / d))
    return c.bad("state0 \"%s\": window %u, but a row is made of %llu tokens", open.name.c_str(), open.d.window,
                 u64(bias.rows * (bias.inner / d)));
  if (out.d.window) return c.bad("state1 \"%s\": expected no window, found %u", out.name.c_str(), out.d.window);
  for (int i = 0; i < 2; ++i) TRY(c.scratch("in", i, op.in[i], bias.inner, APU_ROWS_STEP));
  TRY(c.present("w", 1, op.w[1]));
  TRY(c.vector(1, d));
  TRY(check_rope(c, 2, d));
  return check_round(c, d, true);
}

apu_status check_index(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(3, 3, 4, 1));
  TRY(c.row_state(0, 0));
  const State &state = c.info().states[size_t(op.state[0])];
  if (state.d.window) return c.bad("state0 \"%s\": expected no window, found %u", state.name.c_str(), state.d.window);
  const uint64_t d = state.d.head_size;
  TRY(check_heads(c, d));
  if (op.out[1] != op.in[0]) return c.bad("out1 is %d, expected in0 (%d): q is rotated in place", op.out[1], op.in[0]);
  TRY(c.scratch("in", 1, op.in[1], c.info().tensor(op.in[0])->inner / d, APU_ROWS_STEP));
  TRY(c.scratch("out", 0, op.out[0], 0, APU_ROWS_STEP, APU_I32));
  const uint64_t pages = (c.info().max_positions + uint64_t(kPageTokens) - 1) / kPageTokens;
  if (pages * std::min<uint64_t>(c.info().max_rows, 32) > kMaxRowHeads)
    return c.bad("%u positions are more than it chooses from", c.info().max_positions);
  TRY(check_rope(c, 2, d));
  TRY(check_round(c, d, true));
  return c.aliases({{0, 1}});
}

apu_status check_sparse_attention(const OpCheck &c) {
  const apu_op &op = c.op();
  TRY(c.operands(3, 1, 5, 3));
  TRY(c.row_state(0, kPageTokens));
  const uint64_t d = c.info().states[size_t(op.state[0])].d.head_size;
  TRY(check_heads(c, d));
  const Tensor &q = *c.info().tensor(op.in[0]);
  if (op.state[1] != APU_NONE) {
    TRY(c.row_state(1, 0));
    const State &rows = c.info().states[size_t(op.state[1])];
    if (rows.d.head_size != d || rows.d.window)
      return c.bad("state1 \"%s\": expected %llu elements and no window, found %u and %u", rows.name.c_str(), u64(d),
                   rows.d.head_size, rows.d.window);
  }
  if (op.in[1] != APU_NONE) {
    if (op.state[1] == APU_NONE) return c.bad("in1 chooses rows of state1, which is missing");
    TRY(c.scratch("in", 1, op.in[1], 0, APU_ROWS_STEP, APU_I32));
  }
  TRY(c.scratch("out", 0, op.out[0], q.inner, APU_ROWS_STEP));
  TRY(c.vector(0, q.inner / d));
  TRY(check_rope(c, 2, d));
  return c.aliases({});
}

} // namespace

apu_status check_sparse_op(const OpCheck &c) {
  switch (c.op().kind) {
  case APU_OP_STREAMS_IN: return check_streams_in(c);
  case APU_OP_STREAMS_OUT: return check_streams_out(c);
  case APU_OP_SHARED_STORE: return check_shared_store(c);
  case APU_OP_COMPRESS: return check_compress(c);
  case APU_OP_INDEX: return check_index(c);
  default: return check_sparse_attention(c);
  }
}

} // namespace apu
