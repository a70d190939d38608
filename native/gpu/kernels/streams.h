// Arguments of the kernels of hyper-connections (streams.hip), for host and device.
//
// Sums over S*D columns are made in parts, which are added in ascending order. Few rows: a part is kStreamPart columns
// of D in all streams, so that the block that has it can also close the block before it in place. Many rows: it is
// kStreamSteps steps of a wave, four columns a lane. Within a part a lane adds its columns in order, then a fixed tree
// goes over the lanes. Neither depends on the number of rows: a row has the same bits in any batch of its class.
#pragma once

#include "rows.h"

namespace apu::gpu {

constexpr u32 kStreamThreads = 256;     // of all kernels but those that follow
constexpr u32 kStreamFourThreads = 384; // of few rows of four streams
constexpr u32 kStreamManyThreads = 128; // of streams_*_many
constexpr u32 kStreamRounds = 3;        // of four columns a thread, that are read ahead where a row is finished
constexpr u32 kStreamFinish = 2048;     // columns of a block of streams_finish_*
constexpr u32 kStreamFewRows = 8;       // up to so many rows, the last block of a row's parts finishes it
constexpr u32 kStreamPart = 64;         // columns of each stream in a part of few rows
constexpr u32 kStreamManyRows = 8;      // of a block of streams_*_many
constexpr u32 kStreamManyOutputs = 6;   // rows of the matrix of a wave there; of other kernels one
constexpr u32 kStreamColumns = 4;       // of a lane
constexpr u32 kStreamSteps = 8;         // of a part of many rows
constexpr u32 kStreamsMost = 16;        // S, as describe() allows

struct StreamsOutArgs {
  RowCount count;
  const float *in;   // (T, S, D), may be out
  const float *made; // (T, D)
  const float *mix;  // (T, S+S*S)
  float *out;        // (T, S, D)
  u32 streams;       // S
  u32 d;             // D
};

struct StreamsInArgs {
  RowCount count;
  Matrix w;            // (N, S*D), N = S*(S+2), or S without mix
  const float *in;     // (T, S, D)
  const float *scale;  // (3), or (1) without mix
  const float *offset; // (N)
  float *out;          // (T, D)
  float *mix;          // (T, S+S*S) or null
  float *sums;         // (T, parts, N+1) of the products, then of the squares
  u32 *counters;       // (T) of blocks that ended a row; streams_finish takes none
  u32 streams;         // S
  u32 d;               // D
  u32 iterations;
  u32 parts; // of S*D columns
  float eps, floor;
  StreamsOutArgs before; // of streams_joined_*: makes `in`, which is its out
};

} // namespace apu::gpu
