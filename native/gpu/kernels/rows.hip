// EMBED, RMS_NORM and GATHER_NORM: one block for each row, 256 threads.
//
// embed moves one row of the table and 4 D bytes a copy, the norms 8 D bytes (12 D with a residual). All of it is in
// the caches but the table; what counts is the latency of a launch, so that a row's values are read twice instead of
// kept.
#include "dequantize.h"
#include "matrix.h"
#include "row_count.h"

using namespace apu::gpu;

APU_KERNEL(kEmbedThreads) void embed(EmbedArgs a) {
  const u32 t = block_id();
  if (t >= a.counts->rows) return;
  const Row &row = a.rows[t];
  const i32 token = row.token >= 0 ? row.token : a.sampled[row.previous];
  const u32 d = a.table.k;
  float *out = a.out + u64(t) * a.copies * d;
  if (token < 0) { // the output it refers to failed: so do all that depend on this row
    for (u32 i = thread_id(); i < a.copies * d; i += kEmbedThreads) out[i] = bits_to_float(0x7fc00000u);
    return;
  }
  const u8 *in = matrix_row(a.table, u64(token));
  for (u32 g = thread_id(); 16 * g < d; g += kEmbedThreads) {
    float v[16];
    dequantize_any16(a.table.type, in, d, g, v);
    if (a.scale != 1.0f) {
#pragma unroll
      for (u32 i = 0; i < 16; ++i) v[i] *= a.scale;
    }
    for (u32 copy = 0; copy < a.copies; ++copy) {
      float *const to = out + u64(copy) * d + 16 * g;
      if (d % 4 == 0) {
#pragma unroll
        for (u32 i = 0; i < 16; i += 4) {
          const u32x4 four = {float_to_bits(v[i]), float_to_bits(v[i + 1]), float_to_bits(v[i + 2]),
                              float_to_bits(v[i + 3])};
          if (16 * g + i < d) store16(to + i, four);
        }
      } else {
#pragma unroll
        for (u32 i = 0; i < 16; ++i)
          if (16 * g + i < d) to[i] = v[i];
      }
    }
  }
}

APU_DEVICE float inverse_rms(float squares, u32 d, float eps) {
  constexpr u32 waves = kNormThreads / kWaveSize;
  APU_SHARED float parts[waves];
  return 1.0f / sqrt_f32(block_sum(squares, parts, waves) / float(d) + eps);
}

// d is a multiple of 4, at most kNormThreads * kNormItems * 4.
APU_DEVICE void norm_short(const float *in, const float *weight, const float *residual, float *out, u32 d, float eps) {
  f32x4 x[kNormItems], w[kNormItems], r[kNormItems];
  float squares = 0;
#pragma unroll
  for (u32 i = 0; i < kNormItems; ++i) {
    const u32 c = (i * kNormThreads + thread_id()) * 4, at = c < d ? c : 0;
    x[i] = *reinterpret_cast<const f32x4 *>(in + at);
    if (weight) w[i] = *reinterpret_cast<const f32x4 *>(weight + at);
    if (residual) r[i] = *reinterpret_cast<const f32x4 *>(residual + at);
  }
#pragma unroll
  for (u32 i = 0; i < kNormItems; ++i) {
    if ((i * kNormThreads + thread_id()) * 4 >= d) continue;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) squares = fma_f32(x[i][j], x[i][j], squares);
  }
  const float inverse = inverse_rms(squares, d, eps);
#pragma unroll
  for (u32 i = 0; i < kNormItems; ++i) {
    const u32 c = (i * kNormThreads + thread_id()) * 4;
    if (c >= d) continue;
    f32x4 y;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      float v = x[i][j] * inverse;
      if (weight) v *= w[i][j];
      if (residual) v += r[i][j];
      y[j] = v;
    }
    *reinterpret_cast<f32x4 *>(out + c) = y;
  }
}

// The sum of squares is taken lane by lane, then over lanes and waves: the same for a row wherever it stands.
APU_DEVICE void norm_row(const float *in, const float *weight, const float *residual, float *out, u32 d, float eps) {
  if (d % 4 == 0 && d <= kNormThreads * kNormItems * 4) return norm_short(in, weight, residual, out, d, eps);
  float squares = 0;
#pragma unroll 8
  for (u32 i = thread_id(); i < d; i += kNormThreads) squares = fma_f32(in[i], in[i], squares);
  const float inverse = inverse_rms(squares, d, eps);
#pragma unroll 4
  for (u32 i = thread_id(); i < d; i += kNormThreads) {
    float v = in[i] * inverse;
    if (weight) v *= weight[i];
    if (residual) v += residual[i];
    out[i] = v;
  }
}

APU_KERNEL(kNormThreads) void rms_norm(NormArgs a) {
  const u32 t = block_id();
  if (t >= count_rows(a.count)) return;
  const u64 at = u64(t) * a.d;
  norm_row(a.in + at, a.weight, a.residual ? a.residual + at : nullptr, a.out + at, a.d, a.eps);
}

APU_KERNEL(kNormThreads) void gather_norm(GatherArgs a) {
  const u32 o = block_id();
  if (o >= a.counts->outputs) return;
  norm_row(a.in + u64(a.outputs[o].row) * a.d, a.weight, nullptr, a.out + u64(o) * a.d, a.d, a.eps);
}
