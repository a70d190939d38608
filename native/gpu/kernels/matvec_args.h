// The argument of the matvec kernels and the geometry that host and device must agree on.
//
// A row's columns are cut into items of 64 (of 32 in float matrices), an item for each lane of a wave, and so into
// slices of 64 * wave size columns. Of each slice a wave makes one sum (a fixed tree over its lanes); slices are added
// in ascending order. That order depends on the type and K alone, so neither the number of activation rows, nor the
// matrix, nor how waves are assigned changes a bit.
#pragma once

#include "common.h"

namespace apu::gpu {

constexpr u32 kMatvecWaves = 4;       // of a block
constexpr u32 kMatvecSet = 2;         // rows of a matrix that a wave computes at once; a pair's have half of each
constexpr u32 kFloatSet = 4;          // the same for float matrices and precision "exact"
constexpr u32 kItemColumns = 64;      // of a lane
constexpr u32 kFloatItemColumns = 32; // of a lane in a slice of a float matrix
constexpr u32 kMatvecSides = 4;       // matrices of one launch
constexpr u32 kRowImageExtra = 32;    // bytes of a staged row beside its slice: lead, misalignment and overshoot

// Rows of a set of a quantised type. A bulk copy and a sum over the wave cost the same for short rows as for long ones.
constexpr u32 matvec_set(bool bulk_copies, u32 elements, u32 bytes) {
  return bulk_copies && 8 * bytes < 4 * elements ? 2 * kMatvecSet : kMatvecSet;
}

// Whether a type has so few bits that taking them apart needs more registers.
constexpr bool matvec_few(u32 elements, u32 bytes) {
  return 16 * bytes < 9 * elements;
}

// Blocks of a unit, of one row of activations, whose waves hold a set in registers: what the rows of a type leave.
constexpr u32 matvec_held_blocks(u32 elements, u32 bytes) {
  return 8 * bytes <= 5 * elements ? 7 : 8 * bytes <= 8 * elements ? 6 : 5;
}

struct MatvecSide {
  Matrix w;
  const float *bias; // (N) or null
  float *out;        // (T, N)
};

// What the first copies of weights wait for comes first: a launch begins with no arguments in cache.
struct MatvecArgs {
  u32 slices;                    // of a row
  u32 splits;                    // waves that share a row, a divisor of kMatvecWaves
  u32 split_shift;               // its binary logarithm
  u32 steps;                     // row sets that a wave computes, one after the other
  u32 first_block[kMatvecSides]; // of a side; kNone of those that are not there, and of up
  u32 pair;                      // sides 0 and 1 are gate and up, out is of side 0
  u32 rows;                      // of `in` that may be read, at least those that count
  u32 terms;                     // rows of `in` that are added to one of out: 1, or 2 in precision "fine"
  u32 plain;                     // out is the product and nothing else: one term, no bias and so on
  MatvecSide sides[kMatvecSides];
  Activations in;        // (T * terms) rows
  const u32 *count;      // rows of out, in the step's counts
  u32 activation;        // ActivationKind
  float limit;           // of gate and up, 0 for none
  float soft_cap;        // of side 0, 0 for none
  const float *up;       // (T, N) computed before, where there is an activation and no pair
  const float *residual; // (T, N) of side 0 or null
};

// Dynamic LDS of a block: images of the staged rows (quantised matrices), then a float for each slice, activation row
// and row; set is kMatvecSet or kFloatSet.
//   images: kMatvecWaves * set * (slice bytes + kRowImageExtra)
//   sums:   4 * slices * R * rows, rows = set * steps * kMatvecWaves / splits

} // namespace apu::gpu
