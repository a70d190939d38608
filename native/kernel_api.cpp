// The C functions of kernels by themselves, for tests and benchmarks: arguments are checked here, once for every
// device.
#include "backend.h"
#include "cpu/kernels.h"
#include "plan/plan.h"

#include <exception>
#include <limits>

using namespace apu;
using namespace apu::cpu;

namespace {

template <typename Call> apu_status guarded(const char *name, const Call &call) {
  try {
    return call();
  } catch (const std::exception &e) { // bad_alloc, length_error
    return fail(APU_E_MEMORY, "%s: out of memory: %s", name, e.what());
  }
}

apu_status check_product(const char *name, KernelProduct &p) {
  if (!has_matmul(p.dtype))
    return fail(APU_E_UNSUPPORTED, "%s: no kernel multiplies with dtype %u (%s)", name, p.dtype, dtype_name(p.dtype));
  if (p.precision > APU_PRECISION_FINE)
    return fail(APU_E_INVALID, "%s: precision is %u, expected 0 to 2", name, p.precision);
  p.row_bytes = row_bytes(p.dtype, p.k);
  if (p.k == 0 || p.row_bytes == 0)
    return fail(APU_E_INVALID, "%s: k is %u, expected a positive multiple of %s's block", name, p.k,
                dtype_name(p.dtype));
  if (p.row_stride < p.row_bytes)
    return fail(APU_E_INVALID, "%s: row_stride is %llu, expected at least the row's %llu bytes", name,
                static_cast<unsigned long long>(p.row_stride), static_cast<unsigned long long>(p.row_bytes));
  if (p.rows > kMaxRows || p.n > kMaxMatrixRows || p.k > kMaxMatrixRows)
    return fail(APU_E_INVALID, "%s: %u rows, n %u, k %u: expected at most %u rows, n and k %u", name, p.rows, p.n, p.k,
                kMaxRows, kMaxMatrixRows);
  return APU_OK;
}

} // namespace

apu_status apu_kernel_matmul(apu_device *device, uint32_t dtype, uint32_t precision, const void *w, uint64_t row_stride,
                             const float *x, float *y, uint32_t rows, uint32_t n, uint32_t k) {
  if (!device || !w || !x || !y) return fail(APU_E_INVALID, "apu_kernel_matmul: device, w, x and y must not be NULL");
  KernelProduct product{dtype, precision, w, 0, row_stride, x, rows, n, k};
  TRY(check_product("apu_kernel_matmul", product));
  if (rows == 0 || n == 0) return APU_OK;
  return guarded("apu_kernel_matmul", [&] { return device->kernel_matmul(product, y); });
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
  return guarded("apu_kernel_read", [&] { return device->kernel_read(in, bytes, repeats, *gb_per_s); });
}

apu_status apu_kernel_gather(apu_device *device, const uint64_t *parts, uint32_t count, uint64_t bytes,
                             uint32_t repeats, double *gb_per_s) {
  constexpr uint32_t kMostParts = 65535; // a grid's second dimension
  if (!device || !parts || !gb_per_s)
    return fail(APU_E_INVALID, "apu_kernel_gather: device, parts and gb_per_s must not be NULL");
  if (count == 0 || count > kMostParts || bytes == 0 || repeats == 0)
    return fail(APU_E_INVALID,
                "apu_kernel_gather: %u parts of %llu bytes, %u times; expected 1 to %u parts, and positive numbers",
                count, static_cast<unsigned long long>(bytes), repeats, kMostParts);
  for (uint32_t i = 0; i < count; ++i)
    if (!parts[i]) return fail(APU_E_INVALID, "apu_kernel_gather: part %u is at address 0", i);
  return guarded("apu_kernel_gather", [&] { return device->kernel_gather(parts, count, bytes, repeats, *gb_per_s); });
}

apu_status apu_kernel_checksum(apu_device *device, uint64_t address, uint64_t bytes, uint64_t *out) {
  if (!device || !address || !out)
    return fail(APU_E_INVALID, "apu_kernel_checksum: device, address and out must not be 0");
  *out = 0;
  if (bytes == 0) return APU_OK;
  return guarded("apu_kernel_checksum", [&] { return device->kernel_checksum(address, bytes, *out); });
}

apu_status apu_kernel_time(apu_device *device, uint32_t dtype, uint32_t precision, const void *w, uint64_t row_stride,
                           const float *x, uint32_t rows, uint32_t n, uint32_t k, uint32_t count, uint32_t repeats,
                           double *nanoseconds) {
  if (!device || !w || !nanoseconds)
    return fail(APU_E_INVALID, "apu_kernel_time: device, w and nanoseconds must not be NULL");
  if (rows == 0 || n == 0 || count == 0 || repeats == 0)
    return fail(APU_E_INVALID, "apu_kernel_time: rows, n, count and repeats must be positive, they are %u, %u, %u, %u",
                rows, n, count, repeats);
  KernelProduct product{dtype, precision, w, 0, row_stride, x, rows, n, k};
  TRY(check_product("apu_kernel_time", product));
  return guarded("apu_kernel_time", [&] { return device->kernel_time(product, count, repeats, *nanoseconds); });
}
