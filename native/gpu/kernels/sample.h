// Arguments and scratch layout of the sampler's kernels (sample.hip), for host and device.
#pragma once

#include "common.h"

namespace apu::gpu {

constexpr u32 kSurveyThreads = 256;
constexpr u32 kSurveyItems = 8; // logits of a thread
constexpr u32 kChunk = kSurveyThreads * kSurveyItems;
constexpr u32 kCell = 64;     // logits whose maximum is kept
constexpr u32 kTileCells = 8; // cells that a wave looks at together
constexpr u32 kFinishThreads = 1024;
constexpr u32 kFew = 1024; // sets up to this size are sorted in LDS

struct ChunkStats {
  float raw_max; // of the logits as they are
  float raw_sum; // of exp(x - raw_max), where log-probabilities are wanted
  u32 bad;       // NaN or +infinity
  float max;     // after penalties, bias and mask
  u32 best;      // first token that has it
  u32 reserved;
  u64 mass; // of exp((x - max) / temperature), in units of 2^-39, where a token is drawn from many
};

// What one output has in scratch; offsets in bytes, all multiples of 64.
struct SampleLayout {
  u64 stats;      // (chunks) ChunkStats
  u64 raw_cells;  // (cells) largest logit of each
  u64 cells;      // (cells) the same after penalties, bias and mask, where there are any
  u64 list;       // (cells) chosen cells, ascending
  u64 tile_mass;  // (cells / kTileCells) u64
  u64 adjusted;   // (V) logits after penalties, bias and mask, where there are any
  u64 slot_bytes; // of all
};

constexpr u32 chunk_count(u32 vocabulary) {
  return (vocabulary + kChunk - 1) / kChunk;
}
constexpr u32 cell_count(u32 vocabulary) { // whole chunks of them, so that a survey writes all
  return chunk_count(vocabulary) * (kChunk / kCell);
}
constexpr SampleLayout sample_layout(u32 vocabulary) {
  SampleLayout l{};
  u64 at = 0;
  const auto take = [&at](u64 bytes) {
    const u64 begin = at;
    at += (bytes + 63) / 64 * 64;
    return begin;
  };
  const u64 cells = cell_count(vocabulary);
  l.stats = take(chunk_count(vocabulary) * sizeof(ChunkStats));
  l.raw_cells = take(cells * sizeof(float));
  l.cells = take(cells * sizeof(float));
  l.list = take(cells * sizeof(u32));
  l.tile_mass = take(cells / kTileCells * sizeof(u64));
  l.adjusted = take(u64(vocabulary) * sizeof(float));
  l.slot_bytes = at;
  return l;
}

struct SampleArgs {
  StepView step;
  const float *logits; // (O, V)
  u8 *scratch;         // (slots) of layout.slot_bytes
  SampleLayout layout;
  u32 base;   // the output of slot 0
  u32 chunks; // of the vocabulary
};

} // namespace apu::gpu
