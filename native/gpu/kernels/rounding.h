// APU_ROUND_* of a row in LDS by one wave: to what a narrow type holds and back, the bits of native/quant/rounding.h.
//
// The Hadamard transform takes its butterflies in the CPU's order; largest magnitudes are the same in any order. A
// group that is not finite stays what it is, so that a broken row shows.
#pragma once

#include "quant.h"

#include "../../include/apu.h"
#include "../../quant/rounding.h"

namespace apu::gpu {

// x (d), d a power of two, times the Hadamard matrix.
APU_DEVICE void transform_hadamard(float *x, u32 d) {
  for (u32 half = 1; half < d; half *= 2) {
    wave_sync();
    for (u32 i = lane_id(); i < d / 2; i += kWaveSize) {
      const u32 low = i / half * 2 * half + i % half;
      const float a = x[low], b = x[low + half];
      x[low] = a + b;
      x[low + half] = a - b;
    }
  }
  wave_sync();
}

// Elements [begin, end), from a multiple of Group on, Group of which share a scale; Batch times a wave's at a time.
template <u32 Group, bool Fp4, u32 Batch> APU_DEVICE void round_groups(float *x, u32 begin, u32 end) {
  constexpr u32 lanes = Group < kWaveSize ? Group : kWaveSize, items = Group / lanes; // of a group; of a lane
  for (; begin < end; begin += Batch * items * kWaveSize) {
    float v[Batch][items], amax[Batch];
#pragma unroll
    for (u32 b = 0; b < Batch; ++b) {
      amax[b] = 0.0f;
#pragma unroll
      for (u32 i = 0; i < items; ++i) {
        const u32 m = begin + (b * items + i) * kWaveSize + lane_id();
        v[b][i] = m < end ? x[m] : 0.0f;
        amax[b] = max_f32(amax[b], fabs_f32(v[b][i]));
      }
    }
#pragma unroll
    for (u32 mask = 1; mask < lanes; mask *= 2)
#pragma unroll
      for (u32 b = 0; b < Batch; ++b) amax[b] = max_f32(amax[b], wave_shuffle_xor(amax[b], mask));
#pragma unroll
    for (u32 b = 0; b < Batch; ++b) {
      if (!(amax[b] <= 0x1.fffffep127f)) continue;
      const float scale = Fp4 ? quant::fp4_scale(amax[b]) : quant::e4m3_scale(amax[b]), inverse = 1.0f / scale;
#pragma unroll
      for (u32 i = 0; i < items; ++i) { // powers of two: a product is the quotient
        const u32 m = begin + (b * items + i) * kWaveSize + lane_id();
        const float y = v[b][i] * inverse;
        if (m < end) x[m] = (Fp4 ? quant::round_e2m1(y) : quant::round_e4m3(y)) * scale;
      }
    }
  }
}

// x (d) to FP4; `shrink` is d^-1/2. Begins and ends with a wave_sync().
APU_DEVICE void round_fp4(float *x, u32 d, float shrink) {
  transform_hadamard(x, d);
  for (u32 i = lane_id(); i < d; i += kWaveSize) x[i] *= shrink;
  wave_sync();
  round_groups<quant::kFp4Group, true, 4>(x, 0, d);
  wave_sync();
}

// x (d), of which the last `rotated` elements are. Begins and ends with a wave_sync().
APU_DEVICE void round_row(u32 kind, float *x, u32 d, u32 rotated, float shrink) {
  wave_sync();
  if (kind == APU_ROUND_FP4)
    round_fp4(x, d, shrink);
  else if (kind == APU_ROUND_E4M3)
    round_groups<quant::kE4M3Group, false, 2>(x, 0, d - rotated);
  wave_sync();
}

} // namespace apu::gpu
