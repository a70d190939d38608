// What host and kernels share: plain structs of fixed layout that travel as kernel arguments or lie in device memory.
//
// Included by device code of every target and by the host's C++, so it knows no vendor. Pointers are the device's.
// Shape letters as in apu.h.
#pragma once

#include <stdint.h>

namespace apu::gpu {

using u8 = uint8_t;
using i8 = int8_t;
using u16 = uint16_t;
using i16 = int16_t;
using u32 = uint32_t;
using i32 = int32_t;
using u64 = uint64_t;
using i64 = int64_t;

constexpr u32 kPageRows = 128; // tokens of a page of KV
constexpr u32 kMatvecRows = 8; // up to so many rows a product is a matvec, above them a GEMM
// A kernel reads no more than the aligned units of so many bytes that hold a weight's: inside of its pages, which are
// all that there is of a file read in place.
constexpr u32 kWeightPadding = 16;

struct Segment { // rows [row_begin, row_begin + row_count) of a matrix
  u64 address;
  u64 row_begin;
  u64 row_count;
  u64 row_stride; // bytes
};

// A weight matrix (N, K), or (E, N, K) whose rows are counted through. With one segment `data` and `row_stride` say
// all.
struct Matrix {
  const u8 *data;          // of the first segment
  u64 row_stride;          // of the first segment
  const Segment *segments; // (segment_count), device memory
  u32 segment_count;
  u32 rows; // N, of one expert where there are experts
  u32 k;
  u32 type; // APU_*
};

// The input of quantised matrices, row-major, quantised as native/quant/activations.h defines: for each half-block of
// 16 one scale. Columns are padded with zeros to `columns`, a multiple of 256.
struct Activations {
  const i8 *q;      // (T, columns)
  const float *d;   // (T, columns / 16)
  const float *s16; // (T, columns / 16) d * sum of q
  const float *x;   // (T, K) the same rows in float, normed; for float matrices and precision "exact"
  u32 columns;
  u32 k;
};

struct StepCounts {
  u32 rows, sequences, outputs, pages;
};

struct Row {
  i32 token; // or -1: sampled[previous]
  i32 previous;
  u32 position;
  u32 sequence;
};

struct Sequence {
  u32 row_begin, row_count;
};

struct Slot { // (sequence, group)
  u32 page_begin, page_count, read_slot, write_slot;
};

struct Output { // apu_output without its pointers; histories, biases and masks lie in StepView::extras
  u32 row, want;
  float temperature;
  u32 top_k;
  float top_p, min_p, repeat_penalty, frequency_penalty, presence_penalty;
  u32 top_n;
  u64 seed;
  u32 draw, history_count, bias_count, wants_logprob;
  u32 history_at, bias_at, mask_at, top_at; // 32-bit words into extras; kNone where there is none. top_at: into tops
};
constexpr u32 kNone = 0xffffffffu;

struct OutputResult {
  i32 token;
  float logprob;
  u32 status; // OutputStatus
  u32 reserved;
};
enum OutputStatus : u32 { kOutputOk = 0, kOutputNotFinite = 1, kOutputNothingAllowed = 2 };

// One step as kernels see it: device memory at addresses that never change, so that a captured graph stays valid. Grids
// cover a bucket; kernels compare with counts and exit early.
struct StepView {
  const StepCounts *counts;
  const Row *rows;           // (T)
  const Sequence *sequences; // (S)
  const Slot *slots;         // (S, groups)
  const u32 *pages;
  const Output *outputs;    // (O)
  const u32 *const *extras; // one pointer: histories (ids, then counts), biases (ids, then float values), masks
  i32 *sampled;             // (O) tokens of the last SAMPLE, -1 where there is none
  OutputResult *results;    // (O)
  i32 *const *top_ids;      // one pointer: (sum of top_n)
  float *const *top_logprobs;
  u32 groups;
  u32 vocabulary;
};

struct PagedState {
  u8 *address;
  u64 page_bytes;
  u64 head_bytes; // one head's part of a page
  u32 heads, head_size, dtype, window;
  u32 group;
  u32 page_rows; // kPageRows, or fewer, each of which stands for several tokens
};

} // namespace apu::gpu
