// Arguments of compress (compress.hip), for host and device. Those of shared_store are RowStoreArgs.
#pragma once

#include "common.h"

namespace apu::gpu {

constexpr u32 kCompressThreads = 512;

struct CompressArgs {
  StepView step;
  PagedState open;      // pages (128, 2, C*d) F32: values, then gates
  PagedState rows;      // pages (128 / tokens, d)
  const float *in;      // (T, C*d)
  const float *gate;    // (T, C*d)
  const float *bias;    // (tokens, C*d)
  const float *norm;    // (d)
  const double *turns;  // as in RopeStoreArgs
  const float *factors; // or null
  float eps, magnitude;
  u32 pairs, halves;
  u32 width;    // C*d
  u32 tokens;   // of a compressed row, a power of two
  u32 round;    // APU_ROUND_*
  float shrink; // d^-1/2
};

} // namespace apu::gpu
