// Matrix kernels in plain C++ for any architecture: the level that every other one is compared with, bit for bit.
// A weight row is taken apart once into `work` (int8 values, then one record a 32-block), then multiplied with every
// row of activations, so few and many rows take one path. std::fma keeps the rounding of the vector levels on
// processors without the instruction.
#include <cmath>
#include <cstring>

#include "half.h"
#include "portable.h"
#include "unpack.h"

namespace apu::cpu::portable {

namespace {

constexpr uint32_t kBlockLanes = 8;
constexpr uint32_t kFloatLanes = 16;

struct BlockScales {
  float d, m;
  int32_t scale[2], min[2];
};

size_t blocks_of(uint32_t k) {
  return (size_t{k} + 31) / 32;
}

size_t work_bytes(uint32_t k) { // the larger of an unpacked row of integers and a dequantised one
  const size_t integers = blocks_of(k) * (32 + sizeof(BlockScales));
  const size_t floats = size_t{k} * sizeof(float);
  return (integers > floats ? integers : floats) + 64;
}

float sum8(const float *lane) {
  return ((lane[0] + lane[4]) + (lane[2] + lane[6])) + ((lane[1] + lane[5]) + (lane[3] + lane[7]));
}

float sum16(const float *lane) {
  float s[8];
  for (uint32_t i = 0; i < 8; ++i) s[i] = lane[i] + lane[i + 8];
  return sum8(s);
}

int32_t dot16(const int8_t *a, const int8_t *b) {
  int32_t sum = 0;
  for (uint32_t i = 0; i < 16; ++i) sum += int32_t{a[i]} * b[i];
  return sum;
}

// ---- activations

void quantize(const float *x, size_t x_stride, uint32_t rows, uint32_t k, const ActBlocks &a) {
  for (uint32_t t = 0; t < rows; ++t) {
    const float *in = x + t * x_stride;
    for (uint32_t b = 0; b < a.blocks; ++b) {
      const size_t block = size_t{t} * a.blocks + b;
      const uint32_t begin = b * 32, count = begin >= k ? 0 : (k - begin < 32 ? k - begin : 32);
      float v[32] = {};
      for (uint32_t i = 0; i < count; ++i) v[i] = in[begin + i];
      float amax = 0;
      for (uint32_t i = 0; i < 32; ++i) amax = std::fabs(v[i]) > amax ? std::fabs(v[i]) : amax;
      const float d = amax / 127.0f;
      const float inverse = d > 0 ? 127.0f / amax : 0.0f;
      int8_t *q = a.q + block * 32;
      for (uint32_t i = 0; i < 32; ++i) q[i] = static_cast<int8_t>(std::nearbyint(v[i] * inverse));
      int32_t sum[2] = {};
      for (uint32_t i = 0; i < 32; ++i) sum[i / 16] += q[i];
      a.d[block] = d;
      a.s[block] = d * static_cast<float>(sum[0] + sum[1]);
      a.sum16[2 * block] = sum[0];
      a.sum16[2 * block + 1] = sum[1];
    }
  }
}

// ---- quantised types

template <class Type>
float dot_row(const int8_t *w, const BlockScales *scales, uint32_t blocks, const int8_t *q, const float *d,
              const float *s, const int32_t *sums) {
  float lane[kBlockLanes] = {};
  for (uint32_t b = 0; b < blocks; ++b) {
    const BlockScales &c = scales[b];
    float &acc = lane[b % kBlockLanes];
    const int32_t first = dot16(w + 32 * b, q + 32 * b), second = dot16(w + 32 * b + 16, q + 32 * b + 16);
    const int32_t product =
        Type::kHalfScales ? c.scale[0] * first + c.scale[1] * second : c.scale[0] * (first + second);
    acc = std::fma(static_cast<float>(product), c.d * d[b], acc);
    if constexpr (Type::kMinimum == Minimum::block) acc = std::fma(-(c.m * static_cast<float>(c.min[0])), s[b], acc);
    if constexpr (Type::kMinimum == Minimum::half)
      acc = std::fma(static_cast<float>(c.min[0] * sums[2 * b] + c.min[1] * sums[2 * b + 1]), -(c.m * d[b]), acc);
  }
  return sum8(lane);
}

struct MatmulRows {
  const Matrix &w;
  const ActBlocks &a;
  uint32_t rows, begin, end;
  float *y;
  size_t y_stride;
  void *work;

  template <uint32_t Dtype> void operator()() const {
    using Type = Unpack<Dtype>;
    const uint32_t blocks = w.k / 32;
    auto *scales = static_cast<BlockScales *>(work);
    auto *values = reinterpret_cast<int8_t *>(scales + blocks);
    for (uint32_t n = begin; n < end; ++n) {
      const uint8_t *row = w.data + n * w.row_stride;
      for (uint32_t b = 0; b < blocks; ++b) {
        Block32 block{values + 32 * b, 0, 0, {1, 1}, {0, 0}};
        Type::block(row, b, block);
        scales[b] = {block.d, block.m, {block.scale[0], block.scale[1]}, {block.min[0], block.min[1]}};
      }
      for (uint32_t t = 0; t < rows; ++t) {
        const size_t first = size_t{t} * a.blocks;
        y[t * y_stride + (n - begin)] =
            dot_row<Type>(values, scales, blocks, a.q + 32 * first, a.d + first, a.s + first, a.sum16 + 2 * first);
      }
    }
  }
};

void matmul(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
            void *work) {
  with_quantized(w.dtype, MatmulRows{w, a, rows, begin, end, y, y_stride, work});
}

// ---- float types and exact precision

struct DequantizeRow {
  const uint8_t *in;
  uint32_t k;
  float *out;

  template <uint32_t Dtype> void operator()() const {
    int8_t values[32];
    for (uint32_t b = 0; b < k / 32; ++b) {
      Block32 block{values, 0, 0, {1, 1}, {0, 0}};
      Unpack<Dtype>::block(in, b, block);
      for (uint32_t i = 0; i < 32; ++i) {
        const float v = block.d * static_cast<float>(block.scale[i / 16]) * static_cast<float>(values[i]);
        out[32 * b + i] =
            Unpack<Dtype>::kMinimum == Minimum::none ? v : v - block.m * static_cast<float>(block.min[i / 16]);
      }
    }
  }
};

void dequantize_row(uint32_t dtype, const uint8_t *in, uint32_t k, float *out) {
  switch (dtype) {
  case APU_F32: std::memcpy(out, in, size_t{k} * sizeof(float)); break;
  case APU_F16:
    for (uint32_t i = 0; i < k; ++i) out[i] = load_f16(in + 2 * size_t{i});
    break;
  case APU_BF16:
    for (uint32_t i = 0; i < k; ++i) out[i] = load_bf16(in + 2 * size_t{i});
    break;
  default: with_quantized(dtype, DequantizeRow{in, k, out});
  }
}

float dot_exact(const float *w, const float *x, uint32_t k) {
  float lane[kFloatLanes] = {};
  uint32_t i = 0;
  for (; i + kFloatLanes <= k; i += kFloatLanes)
    for (uint32_t j = 0; j < kFloatLanes; ++j) lane[j] = std::fma(w[i + j], x[i + j], lane[j]);
  for (uint32_t j = 0; i + j < k; ++j) lane[j] = std::fma(w[i + j], x[i + j], lane[j]);
  return sum16(lane);
}

void matmul_float(const Matrix &w, const float *x, size_t x_stride, uint32_t rows, uint32_t begin, uint32_t end,
                  float *y, size_t y_stride, void *work) {
  auto *row = static_cast<float *>(work);
  for (uint32_t n = begin; n < end; ++n) {
    dequantize_row(w.dtype, w.data + n * w.row_stride, w.k, row);
    for (uint32_t t = 0; t < rows; ++t) y[t * y_stride + (n - begin)] = dot_exact(row, x + t * x_stride, w.k);
  }
}

} // namespace

} // namespace apu::cpu::portable

namespace apu::cpu {

const KernelTable *portable_table() {
  static const KernelTable table{
      .name = "portable",
      .quantize = portable::quantize,
      .matmul = portable::matmul,
      .matmul_float = portable::matmul_float,
      .work_bytes = portable::work_bytes,
      .dequantize_row = portable::dequantize_row,
      .dot = portable::dot,
      .dot_f16 = portable::dot_f16,
      .axpy = portable::axpy,
      .axpy_f16 = portable::axpy_f16,
      .scale = portable::scale,
      .f32_to_f16 = portable::f32_to_f16,
      .rms_norm = portable::rms_norm,
      .silu_mul = portable::silu_mul,
      .gelu_tanh_mul = portable::gelu_tanh_mul,
      .gelu_erf_mul = portable::gelu_erf_mul,
      .max = portable::max,
      .exp_sum = portable::exp_sum,
  };
  return &table;
}

} // namespace apu::cpu
