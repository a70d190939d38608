// The argument of the expert matvec kernels: EXPERTS for 1 to 8 rows of the step, one half of it in a launch.
//
// First half: a unit is a pair (row, slot), whose expert's gate and up rows meet in the activation. Second half: a unit
// is a row; the products of its k slots are made side by side by the block's waves and added in slot order. Blocks of
// all units for the same rows of the experts' matrices come one after the other, so that units which share an expert
// find its rows in cache. Sums are those of matvec_args.h, for each slot.
#pragma once

#include "common.h"

namespace apu::gpu {

struct ExpertMatvecArgs {
  const StepCounts *counts;
  Activations in;        // (T) rows, or (T * k) in the second half
  Matrix w[2];           // (E, N, K): gate and up, or one
  const float *bias[2];  // (E, N) of w, or null
  const i32 *ids;        // (T, k)
  const float *weights;  // (T, k), second half
  const float *residual; // (T, N) or null, second half
  const float *up;       // (T, k, N) computed before, where gate and up are of different types
  float *out;            // (T, k, N), or (T, N) in the second half
  u32 experts, used;     // E, k
  u32 second;
  u32 pair;       // w[0] and w[1] are gate and up
  u32 activation; // ActivationKind; none: out is the product
  float limit;    // of gate and up, 0 for none
  u32 units;      // that the grid covers
  u32 slices;     // of a row
  u32 splits;     // waves that share a row, a divisor of kMatvecWaves
  u32 steps;      // row sets that a wave computes, one after the other
};

} // namespace apu::gpu
