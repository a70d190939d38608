// Arguments of the kernels over rows (rows.hip), for host and device.
#pragma once

#include "common.h"

namespace apu::gpu {

constexpr u32 kEmbedThreads = 256;
constexpr u32 kNormThreads = 512;
constexpr u32 kNormItems = 4; // of four columns, that a thread keeps

// How many rows a tensor has in a step.
struct RowCount {
  const StepCounts *counts;
  u32 kind;  // APU_ROWS_*
  u32 fixed; // for APU_ROWS_FIXED
};

struct EmbedArgs {
  Matrix table; // (V, D)
  const StepCounts *counts;
  const Row *rows;
  const i32 *sampled;
  float *out; // (T, copies, D)
  float scale;
  u32 copies;
};

struct NormArgs {
  RowCount count;
  const float *in;       // (T, D)
  const float *weight;   // (D) or null
  const float *residual; // (T, D) or null
  float *out;            // (T, D)
  u32 d;
  float eps;
};

struct GatherArgs {
  const StepCounts *counts;
  const Output *outputs;
  const float *in;     // (T, D)
  const float *weight; // (D) or null
  float *out;          // (O, D)
  u32 d;
  float eps;
};

} // namespace apu::gpu
