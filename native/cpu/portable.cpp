// Matrix kernels in plain C++ for any architecture: the level that every other one is compared with, bit for bit.
// A weight row is taken apart once into `work` (int8 values, then one record a 32-block), then multiplied with every
// row of activations, so few and many rows take one path. std::fma keeps the rounding of the vector levels on
// processors without the instruction.
#include "portable.h"

#include <cmath>
#include <cstring>

#include "../include/apu.h"
#include "../quant/activations.h"
#include "../quant/fp8.h"
#include "../quant/unpack.h"
#include "../quant/visit.h"

namespace apu::cpu::portable {

namespace {

using quant::kBlock, quant::kFloatLanes, quant::kLanes, quant::Minimum;

struct BlockScales {
  float ws, wm, sc[2];
  int32_t m[2];
};

size_t work_bytes(uint32_t k) { // the larger of an unpacked row of integers and a dequantised one
  const size_t integers = (size_t{k} + kBlock - 1) / kBlock * (kBlock + sizeof(BlockScales));
  const size_t floats = size_t{k} * sizeof(float);
  return integers > floats ? integers : floats;
}

// ---- activations

void quantize(const float *x, size_t x_stride, uint32_t rows, uint32_t k, const ActBlocks &all) {
  for (uint32_t t = 0; t < rows; ++t) {
    const ActBlocks a = all.from(t);
    const float *row = x + t * x_stride;
    for (uint32_t b = 0; b < a.blocks; ++b) {
      for (uint32_t h = 0; h < 2; ++h) {
        const uint32_t begin = b * kBlock + 16 * h, left = begin < k ? k - begin : 0;
        const size_t i = quant::half_index(b, h);
        a.d[i] = quant::quantize_half(left ? row + begin : row, left < 16 ? left : 16, a.q + begin, a.sum16 + i);
        a.s16[i] = a.d[i] * static_cast<float>(a.sum16[i]);
      }
      a.s[b] = a.s16[quant::half_index(b, 0)] + a.s16[quant::half_index(b, 1)];
    }
  }
}

// ---- quantised types

int32_t dot16(const int8_t *a, const int8_t *b) {
  int32_t sum = 0;
  for (uint32_t i = 0; i < 16; ++i) sum += int32_t{a[i]} * b[i];
  return sum;
}

template <class Type> float dot_row(const int8_t *w, const BlockScales *scales, uint32_t blocks, const ActBlocks &a) {
  float lane[kLanes] = {};
  for (uint32_t b = 0; b < blocks; ++b) {
    const BlockScales &c = scales[b];
    float &acc = lane[b % kLanes];
    auto low = static_cast<float>(dot16(w + kBlock * b, a.q + kBlock * b));
    auto high = static_cast<float>(dot16(w + kBlock * b + 16, a.q + kBlock * b + 16));
    if constexpr (Type::sub_block == 16) low *= c.sc[0], high *= c.sc[1]; // exact
    const size_t h0 = quant::half_index(b, 0), h1 = quant::half_index(b, 1);
    acc = std::fma(c.ws, quant::add_halves(low, high, a.d[h0], a.d[h1]), acc);
    if constexpr (Type::minimum == Minimum::per_block) acc = std::fma(c.wm, a.s[b], acc);
    if constexpr (Type::minimum == Minimum::per_half) {
      const auto m0 = static_cast<float>(c.m[0]), m1 = static_cast<float>(c.m[1]);
      acc = std::fma(c.wm, quant::add_halves(m0, m1, a.s16[h0], a.s16[h1]), acc);
    }
  }
  return quant::sum8(lane);
}

struct MatmulRows {
  const Matrix &w;
  const ActBlocks &a;
  uint32_t rows, begin, end;
  float *y;
  size_t y_stride;
  void *work;

  template <class B> void operator()() const {
    using Type = quant::Traits<B>;
    const uint32_t blocks = w.k / kBlock;
    auto *scales = static_cast<BlockScales *>(work);
    auto *values = reinterpret_cast<int8_t *>(scales + blocks);
    for (uint32_t n = begin; n < end; ++n) {
      const uint8_t *row = w.data + n * w.row_stride;
      quant::Block32 block{};
      for (uint32_t b = 0; b < blocks; ++b) {
        const auto *file_block = reinterpret_cast<const B *>(row + size_t{b / Type::blocks32} * Type::bytes);
        quant::unpack_block(*file_block, b % Type::blocks32, block);
        std::memcpy(values + kBlock * b, block.q, kBlock);
        scales[b] = {block.ws, block.wm, {block.sc[0], block.sc[1]}, {block.m[0], block.m[1]}};
      }
      for (uint32_t t = 0; t < rows; ++t)
        y[t * y_stride + (n - begin)] = dot_row<Type>(values, scales, blocks, a.from(t));
    }
  }
};

void matmul(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
            void *work) {
  quant::with_block_type(w.dtype, MatmulRows{w, a, rows, begin, end, y, y_stride, work});
}

// ---- float types and exact precision

struct DequantizeRow {
  const uint8_t *in;
  uint32_t k;
  float *out;

  template <class B> void operator()() const { quant::dequantize_row<B>(in, k, out); }
};

void dequantize_row(uint32_t dtype, const uint8_t *in, uint32_t k, float *out) {
  switch (dtype) {
  case APU_F32: std::memcpy(out, in, size_t{k} * sizeof(float)); break;
  case APU_F16:
    for (uint32_t i = 0; i < k; ++i) out[i] = quant::load_f16(in + 2 * size_t{i});
    break;
  case APU_BF16:
    for (uint32_t i = 0; i < k; ++i) out[i] = quant::bf16_to_f32(quant::load16(in + 2 * size_t{i}));
    break;
  case APU_F8_E4M3:
    for (uint32_t i = 0; i < k; ++i) out[i] = quant::e4m3_to_f32(in[i]);
    break;
  default: quant::with_block_type(dtype, DequantizeRow{in, k, out});
  }
}

float dot_exact(const float *w, const float *x, uint32_t k) {
  float lane[kFloatLanes] = {};
  uint32_t i = 0;
  for (; i + kFloatLanes <= k; i += kFloatLanes)
    for (uint32_t j = 0; j < kFloatLanes; ++j) lane[j] = std::fma(w[i + j], x[i + j], lane[j]);
  for (uint32_t j = 0; i + j < k; ++j) lane[j] = std::fma(w[i + j], x[i + j], lane[j]);
  return quant::sum16(lane);
}

void matmul_float(const Matrix &w, const float *x, size_t x_stride, uint32_t rows, uint32_t begin, uint32_t end,
                  float *y, size_t y_stride, void *work) {
  auto *row = static_cast<float *>(work);
  for (uint32_t n = begin; n < end; ++n) {
    dequantize_row(w.dtype, w.data + n * w.row_stride, w.k, row);
    quant::scale_e4m3_row(w.scales.dtype, w.scales.of_row(n), w.scales.block_columns, w.k, row);
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
      .pack = nullptr,
      .matmul = portable::matmul,
      .matmul_float = portable::matmul_float,
      .work_bytes = portable::work_bytes,
      .dequantize_row = portable::dequantize_row,
      .scale = portable::scale,
      .rms_norm = portable::rms_norm,
      .silu_mul = portable::silu_mul,
      .gelu_tanh_mul = portable::gelu_tanh_mul,
      .gelu_erf_mul = portable::gelu_erf_mul,
      .swiglu_oai = portable::swiglu_oai,
      .soft_cap = portable::soft_cap,
      .max = portable::max,
      .exp_sum = portable::exp_sum,
  };
  return &table;
}

} // namespace apu::cpu
