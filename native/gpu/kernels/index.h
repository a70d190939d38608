// Arguments of the kernels of INDEX (index.hip), for host and device.
#pragma once

#include "common.h"

namespace apu::gpu {

constexpr u32 kIndexThreads = 256;
constexpr u32 kIndexTileElements = 128; // of a head, where scores are made by matrix tiles
constexpr u32 kIndexTileRows = 16;      // compressed rows of a wave at a time
constexpr u32 kIndexTileStride =
    kIndexTileElements + 32;          // halves between queries in LDS: quads of lanes meet no bank twice
constexpr u32 kIndexTileHeads = 32;   // at a time
constexpr u32 kIndexBlockRows = 128;  // compressed rows of a block at a time, at most
constexpr u32 kIndexBins = 2048;      // of a key's first bits
constexpr u32 kIndexFmaThreads = 128; // compressed rows of a block, where scores are made by FMA
constexpr u32 kIndexFmaHeads = 8;     // at a time

struct IndexArgs {
  StepView step;
  PagedState rows;         // pages (128 / tokens, d)
  float *q;                // (T, H, d), rotated and rounded in place
  const float *weights;    // (T, H)
  u16 *tiles;              // (T, padded heads, d) q times a power of two for each head, in halves; or null
  float *scaled;           // (T, padded heads) weights times that power's inverse
  float *scores;           // (rows of a turn, most)
  u32 *counts;             // (rows of a turn, kIndexBins) keys by their first bits, zero
  i32 *ids;                // (T, k)
  const double *turns;     // as in RopeStoreArgs
  const float *factors;    // or null
  float magnitude, shrink; // d^-1/2
  float scale;
  u32 pairs, halves; // as in RopeStoreArgs
  u32 round;         // APU_ROUND_*
  u32 heads, padded; // H, and a multiple of kIndexTileHeads
  u32 tokens;        // of a compressed row
  u32 k;
  u32 most;  // compressed rows that a row may see, a multiple of 64
  u32 first; // row of the step that this turn begins with
};

} // namespace apu::gpu
