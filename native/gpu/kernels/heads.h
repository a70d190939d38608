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
  u32 rest;      // elements that follow a head's K, passed on as they are
  u32 lanes;     // that share a row of the matrix: a power of two, at most a wave
  u32 blocks;    // of a head
  u32 aligned;   // K is a multiple of 16, all rows of `in` lie at multiples of 16 bytes
  u32 aligned_w; // so do rows of the matrix, of a float type, and K is such a multiple
};

// Of the kernels that multiply with quantised rows (head_matvec.hip). Where K is short w has packed rows, wave size *
// 64 columns long.
struct HeadMatvecArgs {
  RowCount count;
  Matrix w;        // (H, N / packed, K * packed)
  Activations in;  // (T, H) rows
  const float *x;  // (T, H, K + rest)
  float *out;      // (T, H, N + rest)
  u32 heads, n, k; // H, N, K
  u32 rest;
  u32 packed;                             // rows of a head that are one of w
  u32 rows;                               // of the step that may be read, at least those that count
  u32 blocks;                             // of a head
  u32 slices, splits, split_shift, steps; // as in MatvecArgs
};

} // namespace apu::gpu
