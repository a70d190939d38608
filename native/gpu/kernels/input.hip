// RMS norm and int8 quantisation of the rows of an op's input, once for all the matrices that read them; the law is
// that of native/quant/activations.h, to the bit.
//
// One block a row, or without a norm a block for each kInputPart columns of it. A thread takes groups of four values,
// so that four threads have a half-block of 16, and keeps them between the sum of squares and the quantisation; rows
// longer than the block holds are read twice. At one row latency is all that counts: the norm's weights are read beside
// the row, before its sum is known, and the step's counts only guard what is written. Bytes moved for each row: 4 K
// read, then 1.5 K of q, d and s16, and 4 K where floats are wanted; all of it in cache.
#include "gpu.h"
#include "input_args.h"

namespace apu::gpu {

constexpr u32 kInfinityBits = 0x7f800000u, kNanBits = 0x7fc00000u;
constexpr u32 kSmallestAmaxBits = (127 - 100) << 23; // 2^-100: below it a half is zero

struct HalfScale {
  float d;
  i32 sum;
};

// Quantises the four values that this thread has of a half-block; scale and sum are those of all sixteen.
APU_DEVICE HalfScale quantize_4(const float (&v)[4], i32 (&q)[4]) {
  u32 amax = 0;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    const u32 magnitude = float_to_bits(v[i]) & 0x7fffffffu;
    amax = magnitude > amax ? magnitude : amax;
  }
  u32 other = wave_shuffle_xor(amax, 1);
  amax = other > amax ? other : amax;
  other = wave_shuffle_xor(amax, 2);
  amax = other > amax ? other : amax;
  float d = bits_to_float(amax) / 127.0f;
  const bool usable = amax >= kSmallestAmaxBits && amax < kInfinityBits;
  const float inverse = usable ? 1.0f / d : 0.0f;
  i32 sum = 0;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) {
    q[i] = usable ? i32(round_even_f32(v[i] * inverse)) : 0;
    sum += q[i];
  }
  sum += wave_shuffle_xor(sum, 1);
  sum += wave_shuffle_xor(sum, 2);
  if (!usable) d = amax >= kInfinityBits ? bits_to_float(kNanBits) : 0.0f;
  return {d, sum};
}

template <u32 Threads, u32 Held> APU_DEVICE void prepare_input(const InputArgs &a) {
  APU_SHARED float parts[Threads / kWaveSize];
  const u32 row = block_id();
  const u32 *counter = a.output_rows ? &a.counts->outputs : &a.counts->rows;
  const float *in = a.in + u64(row) * a.in_stride;
  const u32 first = a.norm ? 0 : block_id_y() * kInputPart; // column
  const u32 last = a.norm || first + kInputPart > a.columns ? a.columns : first + kInputPart;
  const u32 groups = (last - first + Threads * 4 - 1) / (Threads * 4);
  const bool wide = a.k % 4 == 0 && a.in_stride % 4 == 0 && reinterpret_cast<u64>(a.in) % 16 == 0 &&
                    reinterpret_cast<u64>(a.norm) % 16 == 0 && reinterpret_cast<u64>(a.x) % 16 == 0;

  auto column_of = [&](u32 g) { return first + (g * Threads + thread_id()) * 4; };
  auto load = [&](const float *from, u32 g, float (&v)[4]) {
    const u32 column = column_of(g);
    if (wide && column < a.k) {
      const f32x4 four = *reinterpret_cast<const f32x4 *>(from + column);
      v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
      return;
    }
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[i] = column + i < a.k ? from[column + i] : 0.0f;
  };

  float square = 0, inverse = 1;
  float held[Held][4], weights[Held][4];
  auto add_squares = [&](const float (&v)[4]) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) square = fma_f32(v[i], v[i], square);
  };
#pragma unroll
  for (u32 g = 0; g < Held; ++g) load(in, g, held[g]);
  if (a.norm) {
#pragma unroll
    for (u32 g = 0; g < Held; ++g) load(a.norm, g, weights[g]);
  }
  if (row >= *counter * a.rows_each) return;
  if (a.norm) {
#pragma unroll
    for (u32 g = 0; g < Held; ++g) add_squares(held[g]);
    for (u32 g = Held; g < groups; ++g) {
      float v[4];
      load(in, g, v);
      add_squares(v);
    }
    inverse = 1.0f / sqrt_f32(block_sum(square, parts, Threads / kWaveSize) / float(a.k) + a.eps);
  }

  auto finish = [&](u32 g, float (&v)[4], const float (&weight)[4]) {
    const u32 column = column_of(g);
    if (a.norm) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) v[i] = v[i] * inverse * weight[i];
    }
    if (a.x) {
      float *x = a.x + u64(row) * a.k + column;
      if (wide && column < a.k)
        *reinterpret_cast<f32x4 *>(x) = f32x4{v[0], v[1], v[2], v[3]};
      else
#pragma unroll
        for (u32 i = 0; i < 4; ++i)
          if (column + i < a.k) x[i] = v[i];
    }
    if (!a.q) return;
    i32 q[4];
    auto quantize = [&](u32 term) {
      const HalfScale half = quantize_4(v, q);
      const u64 to = u64(row) * a.terms + term;
      if (column < a.columns) {
        const u32 packed = (u32(q[0]) & 255) | (u32(q[1]) & 255) << 8 | (u32(q[2]) & 255) << 16 | u32(q[3]) << 24;
        *reinterpret_cast<u32 *>(a.q + to * a.columns + column) = packed;
        if (column % 16 == 0) {
          a.d[to * (a.columns / 16) + column / 16] = half.d;
          a.s16[to * (a.columns / 16) + column / 16] = half.d * float(half.sum);
        }
      }
      return half.d;
    };
    const double d = quantize(0);
    if (a.terms == 1) return;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[i] = float(double(v[i]) - d * q[i]); // exact in double, then rounded once
    quantize(1);
  };
#pragma unroll
  for (u32 g = 0; g < Held; ++g)
    if (g < groups) finish(g, held[g], weights[g]);
  for (u32 g = Held; g < groups; ++g) {
    float v[4], weight[4];
    load(in, g, v);
    if (a.norm) load(a.norm, g, weight);
    finish(g, v, weight);
  }
}

APU_KERNEL(kInputSmall) void input_small(InputArgs args) {
  prepare_input<kInputSmall, 1>(args);
}
APU_KERNEL(kInputLarge) void input_large(InputArgs args) {
  prepare_input<kInputLarge, 4>(args);
}

} // namespace apu::gpu
