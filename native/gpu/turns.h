// What kernels that rotate pairs are given of an op's rotary embedding (kernels/rotate.h); the same fields of
// ROPE_STORE and of all ops that refer to it in apu.h.
#pragma once

#include "gpu/ops.h"
#include "plan/rope.h"

#include <cmath>

namespace apu::gpu {

template <class Args> void set_turns(Builder &b, const apu_op &op, Args &args) {
  std::vector<double> turns = rope_frequencies(op, nullptr);
  for (double &t : turns) t *= 2 / M_PI;
  args.turns = static_cast<const double *>(b.constant(turns.data(), turns.size() * sizeof(double)));
  args.factors = b.vector(op.w[2]);
  args.magnitude = op.f[4];
  args.pairs = uint32_t(turns.size());
  args.halves = op.i[1] == APU_ROPE_HALVES;
}

} // namespace apu::gpu
