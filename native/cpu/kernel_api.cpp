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

apu_status find_pool(apu_device *any, const char *name, Device *&device) {
  device = as_cpu(any);
  if (!device) return fail(APU_E_UNSUPPORTED, "%s: expected a cpu device, found %s", name, any->kind());
  if (!device->pool.forked()) return APU_OK;
  return fail(APU_E_DEVICE, "%s: the device's workers stayed with the parent process; open a device after fork()",
              name);
}

// Reads [in, in + bytes) with loads of 64 bytes; the result keeps them alive.
uint64_t read_range(const uint8_t *in, uint64_t bytes) {
  typedef uint64_t Line __attribute__((vector_size(64), aligned(1), may_alias));
  const uint64_t lines = bytes / sizeof(Line);
  const auto *p = reinterpret_cast<const Line *>(in);
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

} // namespace

apu_status apu_kernel_matmul(apu_device *device, uint32_t dtype, uint32_t precision, const void *w, uint64_t row_stride,
                             const float *x, float *y, uint32_t rows, uint32_t n, uint32_t k) {
  if (!device || !w || !x || !y) return fail(APU_E_INVALID, "apu_kernel_matmul: device, w, x and y must not be NULL");
  if (!has_matmul(dtype))
    return fail(APU_E_UNSUPPORTED, "apu_kernel_matmul: no kernel multiplies with dtype %u (%s)", dtype,
                dtype_name(dtype));
  if (precision > APU_PRECISION_FINE)
    return fail(APU_E_INVALID, "apu_kernel_matmul: precision is %u, expected 0 to 2", precision);
  const size_t bytes = row_bytes(dtype, k);
  if (k == 0 || bytes == 0)
    return fail(APU_E_INVALID, "apu_kernel_matmul: k is %u, expected a positive multiple of %s's block", k,
                dtype_name(dtype));
  if (row_stride < bytes)
    return fail(APU_E_INVALID, "apu_kernel_matmul: row_stride is %llu, expected at least the row's %llu bytes",
                static_cast<unsigned long long>(row_stride), static_cast<unsigned long long>(bytes));
  if (rows > kMaxRows || n > kMaxMatrixRows || k > kMaxMatrixRows)
    return fail(APU_E_INVALID, "apu_kernel_matmul: %u rows, n %u, k %u: expected at most %u rows, n and k %u", rows, n,
                k, kMaxRows, kMaxMatrixRows);
  if (rows == 0 || n == 0) return APU_OK;
  Device *cpu = nullptr;
  TRY(find_pool(device, "apu_kernel_matmul", cpu));
  try {
    const KernelTable &kernels = *cpu->kernels;
    const Matrix matrix{static_cast<const uint8_t *>(w), static_cast<size_t>(row_stride), dtype, k};
    const bool quantized = is_quantized(dtype) && precision != APU_PRECISION_EXACT;
    const uint32_t terms = quantized && precision == APU_PRECISION_FINE ? 2 : 1;
    const ActLayout layout(k);
    const size_t act_rows = quantized ? size_t{rows} * terms : 0;
    const Buffer<uint8_t> act = allocate<uint8_t>(layout.bytes(act_rows));
    const ActBlocks acts = layout.at(act.get(), act_rows);
    const Buffer<float> residual = allocate<float>(terms == 2 ? size_t{rows} * k : 0);
    const Buffer<float> both = allocate<float>(terms == 2 ? size_t{rows} * 2 * n : 0); // (T, 2, N)
    const size_t work_bytes = aligned(kernels.work_bytes(k));
    const Buffer<uint8_t> work = allocate<uint8_t>(work_bytes * cpu->pool.size());
    cpu->pool.run(0, [&](Worker &worker) {
      if (quantized) {
        Split split(worker, rows, 1);
        for (uint32_t b, e; split.next(b, e);)
          for (size_t t = b; t < e; ++t) {
            kernels.quantize(x + t * k, k, 1, k, acts.from(t * terms));
            if (terms == 1) continue;
            quant::quantize_residual(x + t * k, k, residual.get() + t * k);
            kernels.quantize(residual.get() + t * k, k, 1, k, acts.from(t * terms + 1));
          }
        worker.barrier();
      }
      void *scratch = work.get() + work_bytes * worker.index;
      Split split(worker, n, rows < kManyRows ? chunk_rows(worker, uint64_t{bytes} * n, bytes) : kWideUnit);
      for (uint32_t b, e; split.next(b, e);) {
        if (!quantized) {
          kernels.matmul_float(matrix, x, k, rows, b, e, y + b, n, scratch);
          continue;
        }
        kernels.matmul(matrix, acts, rows * terms, b, e, (terms == 1 ? y : both.get()) + b, n, scratch);
        for (size_t t = 0; terms == 2 && t < rows; ++t)
          for (size_t i = b; i < e; ++i) y[t * n + i] = both[2 * t * n + i] + both[(2 * t + 1) * n + i];
      }
    });
  } catch (const std::bad_alloc &) {
    return fail(APU_E_MEMORY, "apu_kernel_matmul: cannot allocate buffers for %u rows of %u", rows, k);
  }
  return APU_OK;
}

apu_status apu_kernel_dequantize(uint32_t dtype, const void *in, float *out, uint64_t rows, uint64_t k) {
  if (!in || !out) return fail(APU_E_INVALID, "apu_kernel_dequantize: in and out must not be NULL");
  if (!has_matmul(dtype))
    return fail(APU_E_UNSUPPORTED, "apu_kernel_dequantize: no kernel reads dtype %u (%s)", dtype, dtype_name(dtype));
  const size_t bytes = row_bytes(dtype, k);
  if (k > std::numeric_limits<uint32_t>::max() || bytes == 0)
    return fail(APU_E_INVALID, "apu_kernel_dequantize: k is %llu, expected a positive multiple of %s's block",
                static_cast<unsigned long long>(k), dtype_name(dtype));
  const KernelTable *kernels = kernel_table(APU_ISA_AUTO);
  const auto *row = static_cast<const uint8_t *>(in);
  for (uint64_t r = 0; r < rows; ++r)
    kernels->dequantize_row(dtype, row + r * bytes, static_cast<uint32_t>(k), out + r * k);
  return APU_OK;
}

apu_status apu_kernel_read(apu_device *device, const void *in, uint64_t bytes, uint32_t repeats, double *gb_per_s) {
  if (!device || !in || !gb_per_s)
    return fail(APU_E_INVALID, "apu_kernel_read: device, in and gb_per_s must not be NULL");
  if (bytes == 0 || repeats == 0)
    return fail(APU_E_INVALID, "apu_kernel_read: bytes and repeats must be positive, they are %llu and %u",
                static_cast<unsigned long long>(bytes), repeats);
  Device *cpu = nullptr;
  TRY(find_pool(device, "apu_kernel_read", cpu));
  // Shared out as a matrix's rows are: contiguous ranges, and whoever is done helps, so that one slow worker does not
  // make the limit look lower than what a product can reach.
  const uint64_t unit = std::max<uint64_t>(kReadBytes, bytes / kMaxUnits + 1);
  const auto units = static_cast<uint32_t>((bytes + unit - 1) / unit);
  const auto *base = static_cast<const uint8_t *>(in);
  double best = std::numeric_limits<double>::infinity();
  uint64_t start = 0;
  std::atomic<uint64_t> sink{0};
  try {
    cpu->pool.run(0, [&](Worker &worker) {
      for (uint32_t r = 0; r < repeats; ++r) {
        worker.barrier([&] { start = now_ns(); });
        Split split(worker, units, 1);
        uint64_t sum = 0;
        for (uint32_t b, e; split.next(b, e);) sum ^= read_range(base + b * unit, std::min(bytes, e * unit) - b * unit);
        sink.fetch_xor(sum, std::memory_order_relaxed);
        worker.barrier([&] { best = std::min(best, static_cast<double>(now_ns() - start) * 1e-9); });
      }
    });
  } catch (const std::bad_alloc &) {
    return fail(APU_E_MEMORY, "apu_kernel_read: cannot allocate the workers' job");
  }
  *gb_per_s = static_cast<double>(bytes) / best * 1e-9;
  return APU_OK;
}
