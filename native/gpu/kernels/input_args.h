// The argument of the input kernels: what is made of an op's input rows before matrices read them.
#pragma once

#include "common.h"

namespace apu::gpu {

constexpr u32 kInputSmall = 256;            // threads of a block: input_small, for short rows and for parts of rows
constexpr u32 kInputLarge = 1024;           // and input_large, for rows whose norm needs all of them
constexpr u32 kInputPart = kInputSmall * 4; // columns of a block where there is no norm

struct InputArgs {
  const StepCounts *counts;
  const float *in;   // (T, K)
  u64 in_stride;     // of its rows
  const float *norm; // (K) or null
  float eps;
  u32 k, columns;  // columns: K rounded up to a multiple of 256
  u32 rows_each;   // rows of `in` for each row of the step
  u32 output_rows; // rows are counted by counts->outputs
  u32 terms;       // rows of q, d, s16 for each row of `in`: 2 in precision "fine"
  i8 *q;           // (T * terms, columns) or null
  float *d, *s16;  // (T * terms, columns / 16)
  float *x;        // (T, K) normed, or null
};

} // namespace apu::gpu
