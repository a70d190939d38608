// The kernels by themselves, for tests and benchmarks: one matrix product, one dequantisation, and the plain read that
// bandwidths are compared with. Workers share the rows of the matrix as they do in a plan; buffers live for the call.
#include "common.h"
#include "cpu/device.h"
#include "cpu/matrix_product.h"
#include "quant/activations.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <new>

using namespace apu;
using namespace apu::cpu;

namespace {

constexpr uint64_t kReadBytes = 256 << 10; // of a plain read that a worker claims at a time

struct Free {
  void operator()(void *p) const { std::free(p); }
};
template <typename T> using Buffer = std::unique_ptr<T[], Free>;

template <typename T> Buffer<T> allocate(size_t count) {
  void *p = std::aligned_alloc(kAlign, std::max(aligned(count * sizeof(T)), kAlign));
  if (!p) throw std::bad_alloc();
  return Buffer<T>(static_cast<T *>(p));
}

apu_status check_pool(Device &device, const char *name) {
  if (!device.pool.forked()) return APU_OK;
  return fail(APU_E_DEVICE, "%s: the device's workers stayed with the parent process; open a device after fork()",
              name);
}

// Reads [in, in + bytes) with loads of 64 bytes; the result keeps them alive.
uint64_t read_range(const uint8_t *in, uint64_t bytes) {
  typedef uint64_t Line __attribute__((vector_size(64), aligned(1), may_alias));
  const uint64_t lines = bytes / sizeof(Line);
  const Line *p = reinterpret_cast<const Line *>(in); // not auto, which would forget the alignment
  Line sum[4] = {};
  uint64_t i = 0;
  for (; i + 4 <= lines; i += 4)
    for (uint32_t j = 0; j < 4; ++j) sum[j] ^= p[i + j];
  for (; i < lines; ++i) sum[0] ^= p[i];
  const Line all = sum[0] ^ sum[1] ^ sum[2] ^ sum[3];
  uint64_t result = 0;
  for (uint32_t j = 0; j < 8; ++j) result ^= all[j];
  for (uint64_t b = lines * sizeof(Line); b < bytes; ++b) result ^= in[b];
  return result;
}

constexpr uint64_t kChecksumFactor = 0x9e3779b97f4a7c15;

// Sum of (w[i] + 1) * (2 (first + i) + 1) over the words of a range; zeros behind its end.
uint64_t checksum_range(const uint8_t *in, uint64_t bytes, uint64_t first) {
  uint64_t sum = 0;
  for (uint64_t i = 0; i < bytes; i += 4) {
    uint32_t word = 0;
    std::memcpy(&word, in + i, std::min<uint64_t>(4, bytes - i));
    sum += (uint64_t{word} + 1) * (2 * (first + i / 4) + 1);
  }
  return sum;
}

} // namespace

namespace apu::cpu {

apu_status Device::kernel_matmul(const KernelProduct &product, float *y) {
  TRY(check_pool(*this, "apu_kernel_matmul"));
  const uint32_t dtype = product.dtype, precision = product.precision;
  const uint32_t rows = product.rows, n = product.n, k = product.k;
  const uint64_t bytes = product.row_bytes, row_stride = product.row_stride;
  const void *w = product.w;
  const float *x = product.x;
  const KernelTable &table = *kernels;
  const Matrix matrix{static_cast<const uint8_t *>(w), static_cast<size_t>(row_stride), dtype, k};
  const bool quantized = has_quantized_rows(dtype, precision);
  const uint32_t terms = quantized && precision == APU_PRECISION_FINE ? 2 : 1;
  const ActLayout layout(k);
  const size_t act_rows = quantized ? size_t{rows} * terms : 0;
  const Buffer<uint8_t> act = allocate<uint8_t>(layout.bytes(act_rows));
  const ActBlocks acts = layout.at(act.get(), act_rows);
  const Buffer<float> residual = allocate<float>(terms == 2 ? size_t{rows} * k : 0);
  const Buffer<float> both = allocate<float>(terms == 2 ? size_t{rows} * 2 * n : 0); // (T, 2, N)
  const size_t work_bytes = aligned(table.work_bytes(k));
  const Buffer<uint8_t> work = allocate<uint8_t>(work_bytes * pool.size());
  pool.run(0, [&](Worker &worker) {
    if (quantized) {
      Split split(worker, rows, 1);
      for (uint32_t b, e; split.next(b, e);)
        for (size_t t = b; t < e; ++t) {
          table.quantize(x + t * k, k, 1, k, acts.from(t * terms));
          if (terms == 1) continue;
          quant::quantize_residual(x + t * k, k, residual.get() + t * k);
          table.quantize(residual.get() + t * k, k, 1, k, acts.from(t * terms + 1));
        }
      worker.barrier();
    }
    void *scratch = work.get() + work_bytes * worker.index;
    Split split(worker, n, rows < kManyRows ? chunk_rows(worker, uint64_t{bytes} * n, bytes) : kWideUnit);
    for (uint32_t b, e; split.next(b, e);) {
      if (!quantized) {
        table.matmul_float(matrix, x, k, rows, b, e, y + b, n, scratch);
        continue;
      }
      table.matmul(matrix, acts, rows * terms, b, e, (terms == 1 ? y : both.get()) + b, n, scratch);
      for (size_t t = 0; terms == 2 && t < rows; ++t)
        for (size_t i = b; i < e; ++i) y[t * n + i] = both[2 * t * n + i] + both[(2 * t + 1) * n + i];
    }
  });
  return APU_OK;
}

apu_status Device::kernel_read(const void *in, uint64_t bytes, uint32_t repeats, double &gb_per_s) {
  const uint64_t part = reinterpret_cast<uintptr_t>(in);
  return kernel_gather(&part, 1, bytes, repeats, gb_per_s);
}

apu_status Device::kernel_gather(const uint64_t *parts, uint32_t count, uint64_t bytes, uint32_t repeats,
                                 double &gb_per_s) {
  TRY(check_pool(*this, "apu_kernel_gather"));
  // Shared out as a matrix's rows are: contiguous ranges, and whoever is done helps, so that one slow worker does not
  // make the limit look lower than what a product can reach.
  const uint64_t unit = std::max<uint64_t>(kReadBytes, bytes / (kMaxUnits / count) + 1);
  const auto of_part = static_cast<uint32_t>((bytes + unit - 1) / unit);
  double best = std::numeric_limits<double>::infinity();
  uint64_t start = 0;
  std::atomic<uint64_t> sink{0};
  pool.run(0, [&](Worker &worker) {
    for (uint32_t r = 0; r < repeats; ++r) {
      worker.barrier([&] { start = now_ns(); });
      Split split(worker, of_part * count, 1);
      uint64_t sum = 0;
      for (uint32_t b, e; split.next(b, e);)
        for (; b < e; ++b) {
          const uint64_t at = b % of_part * unit;
          sum ^= read_range(reinterpret_cast<const uint8_t *>(parts[b / of_part]) + at, std::min(bytes - at, unit));
        }
      sink.fetch_xor(sum, std::memory_order_relaxed);
      worker.barrier([&] { best = std::min(best, static_cast<double>(now_ns() - start) * 1e-9); });
    }
  });
  gb_per_s = static_cast<double>(bytes) * count / best * 1e-9;
  return APU_OK;
}

apu_status Device::kernel_checksum(uint64_t address, uint64_t bytes, uint64_t &out) {
  TRY(check_pool(*this, "apu_kernel_checksum"));
  const uint64_t unit = std::max<uint64_t>(kReadBytes, (bytes / kMaxUnits / 4 + 1) * 4); // whole words
  const auto units = static_cast<uint32_t>((bytes + unit - 1) / unit);
  const auto *base = reinterpret_cast<const uint8_t *>(address);
  std::atomic<uint64_t> all{0};
  pool.run(0, [&](Worker &worker) {
    Split split(worker, units, 1);
    uint64_t sum = 0;
    for (uint32_t b, e; split.next(b, e);)
      sum += checksum_range(base + b * unit, std::min(bytes, e * unit) - b * unit, b * unit / 4);
    all.fetch_add(sum, std::memory_order_relaxed);
  });
  out = all * kChecksumFactor;
  return APU_OK;
}

apu_status Device::kernel_time(const KernelProduct &, uint32_t, uint32_t, double &) {
  return fail(APU_E_UNSUPPORTED, "apu_kernel_time: expected a GPU, found device cpu");
}

} // namespace apu::cpu
