// The argument of the kernels that multiply each head by a matrix of its own (heads.hip), for host and device.
#pragma once

#include "rows.h"

namespace apu::gpu {

constexpr u32 kHeadThreads = 256;
constexpr u32 kHeadRows = 4;     // of the step, in a block of the kernels for many
constexpr u32 kHeadOutputs = 4;  // of a group of lanes
constexpr u32 kHeadColumns = 16; // of a matrix row, in a lane

struct HeadArgs {
  RowCount count;
  Matrix w;        // (H, N, K), or (H, K, N) where the matrices lie across
  const float *in; // (T, H, K + rest)
  float *out;      // (T, H, N + rest)
  u32 heads;       // H
  u32 k, n;
  u32 rest;    // elements that follow a head's K, passed on as they are
  u32 lanes;   // that share a row of the matrix: a power of two, at most a wave
  u32 blocks;  // of a head
  u32 aligned; // K is a multiple of 16, all rows of `in` lie at multiples of 16 bytes
};

} // namespace apu::gpu
