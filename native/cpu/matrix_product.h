// What the ops over matrices share: their input as the kernels take it, and the walk over a weight's segments.
//
// The input is normed and quantised once: by every worker for itself when there are one or two rows (cheaper than a
// barrier), else split by rows. Precision "fine" makes two rows of int8 of each input row, of the input and of what its
// quantisation lost.
#pragma once

#include "cpu/ops.h"

namespace apu::cpu {

constexpr uint32_t kRedundantRows = 2; // up to here every worker prepares the input for itself
constexpr uint32_t kNarrowUnit = 8;    // matrix rows
constexpr uint32_t kWideUnit = 32;
constexpr uint32_t kMaxChunkRows = 256;
constexpr uint32_t kMaxTile = 512; // input rows computed in one call

// Matrix rows that a worker takes at once where few rows of activations meet `bytes` of weights, row_bytes a row: a
// quarter of its share, so that shares come out even, but every change of place costs a start of the hardware's
// prefetchers, and two matrices that are read in turn change it with each chunk.
inline uint32_t chunk_rows(const Worker &worker, uint64_t bytes, uint64_t row_bytes) {
  const uint64_t share = std::clamp<uint64_t>(bytes / worker.count / 4, 32 << 10, 256 << 10);
  return uint32_t(std::clamp<uint64_t>(share / row_bytes, kNarrowUnit, kMaxChunkRows)) / kNarrowUnit * kNarrowUnit;
}

struct InputRows {
  const float *x = nullptr; // (T, K) normed; where only quantised matrices read it, not kept
  ActBlocks a{};            // (T, terms) rows
};

class MatrixInput {
public:
  MatrixInput() : layout_(0) {}
  // `floats` and `quantized` say what kinds of matrices read it; norm may be null.
  MatrixInput(const float *in, const float *norm, float eps, uint32_t k, bool floats, bool quantized, bool fine)
      : in_(in), norm_(norm), eps_(eps), k_(k), layout_(k), floats_(floats), quantized_(quantized),
        terms_(quantized && fine ? 2 : 1) {}

  uint32_t terms() const { return terms_; }
  void reserve(Workspace &ws, uint64_t rows) const; // the shared part
  size_t worker_bytes() const;
  // All workers; x is valid where `floats`, a where `quantized`.
  InputRows prepare(Worker &worker, Run &run, Bump &scratch, uint32_t rows) const;

private:
  void quantize(const KernelTable &kernels, const float *x, const ActBlocks &to, float *residual) const;

  const float *in_ = nullptr;   // (T, K)
  const float *norm_ = nullptr; // (K) or null
  float eps_ = 0;
  uint32_t k_ = 0;
  ActLayout layout_;
  bool floats_ = false, quantized_ = false;
  uint32_t terms_ = 1;
};

// act(gate) * up; null for APU_ACT_NONE.
using Activation = void (*)(const float *gate, const float *up, float *out, uint32_t n);
Activation activation(const KernelTable &kernels, int32_t kind);

// The limit of a gated pair, where it has one.
inline void limit_pair(float limit, float *gate, float *up, uint32_t n) {
  if (limit == 0) return;
  for (uint32_t i = 0; i < n; ++i) gate[i] = std::min(gate[i], limit);
  for (uint32_t i = 0; i < n; ++i) up[i] = std::clamp(up[i], -limit, limit);
}

// Calls f(segment's matrix, its first row, its last, rows after `begin` that it starts at) over rows [begin, end).
template <typename F> void for_segments(const Tensor &w, uint64_t begin, uint64_t end, F f) {
  auto g = w.segments.begin();
  if (w.segments.size() > 1) // one for each expert of a large file
    g = std::partition_point(g, w.segments.end(), [=](auto &s) { return s.row_begin + s.row_count <= begin; });
  for (; g != w.segments.end() && g->row_begin < end; ++g) {
    const uint64_t b = std::max(begin, g->row_begin), e = std::min(end, g->row_begin + g->row_count);
    Matrix m{reinterpret_cast<const uint8_t *>(g->address), g->row_stride, w.d.dtype, uint32_t(w.inner)};
    if (w.scales.segments.empty()) {
      f(m, uint32_t(b - g->row_begin), uint32_t(e - g->row_begin), uint32_t(b - begin));
      continue;
    }
    const auto &all = w.scales.segments;
    auto s = std::partition_point(all.begin(), all.end(), [=](auto &x) { return x.row_begin + x.row_count <= b; });
    for (; s != all.end() && s->row_begin < e; ++s) { // a call has scales of one segment
      const uint64_t first = std::max(b, s->row_begin), last = std::min(e, s->row_begin + s->row_count);
      m.scales = {reinterpret_cast<const uint8_t *>(s->address),
                  s->row_stride,
                  int64_t(s->row_begin) - int64_t(g->row_begin),
                  w.scales.dtype,
                  w.scales.block_rows,
                  w.scales.block_columns};
      f(m, uint32_t(first - g->row_begin), uint32_t(last - g->row_begin), uint32_t(first - begin));
    }
  }
}

inline const uint8_t *row_address(const Tensor &w, uint64_t row) {
  const uint8_t *address = nullptr;
  for_segments(w, row, row + 1,
               [&](const Matrix &m, uint32_t first, uint32_t, uint32_t) { address = m.data + first * m.row_stride; });
  return address;
}

} // namespace apu::cpu
