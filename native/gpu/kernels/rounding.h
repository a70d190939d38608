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

// Elements [0, end), Group of which share a scale.
template <u32 Group, bool Fp4> APU_DEVICE void round_groups(float *x, u32 end) {
  constexpr u32 lanes = Group < kWaveSize ? Group : kWaveSize, items = Group / lanes; // of a group; of a lane
  for (u32 begin = 0; begin < end; begin += kWaveSize * items) {
    float v[items], amax = 0.0f;
#pragma unroll
    for (u32 i = 0; i < items; ++i) {
      const u32 m = begin + i * kWaveSize + lane_id();
      v[i] = m < end ? x[m] : 0.0f;
      amax = max_f32(amax, fabs_f32(v[i]));
    }
#pragma unroll
    for (u32 mask = 1; mask < lanes; mask *= 2) amax = max_f32(amax, wave_shuffle_xor(amax, mask));
    if (!(amax <= 0x1.fffffep127f)) continue;
    const float scale = Fp4 ? quant::fp4_scale(amax) : quant::e4m3_scale(amax), inverse = 1.0f / scale;
#pragma unroll
    for (u32 i = 0; i < items; ++i) { // powers of two: a product is the quotient
      const u32 m = begin + i * kWaveSize + lane_id();
      if (m < end) x[m] = (Fp4 ? quant::round_e2m1(v[i] * inverse) : quant::round_e4m3(v[i] * inverse)) * scale;
    }
  }
}

// x (d), of which the last `rotated` elements are; `shrink` is d^-1/2. Begins and ends with a wave_sync().
APU_DEVICE void round_row(u32 kind, float *x, u32 d, u32 rotated, float shrink) {
  wave_sync();
  if (kind == APU_ROUND_FP4) {
    transform_hadamard(x, d);
    for (u32 i = lane_id(); i < d; i += kWaveSize) x[i] *= shrink;
    wave_sync();
    round_groups<quant::kFp4Group, true>(x, d);
  } else if (kind == APU_ROUND_E4M3) {
    round_groups<quant::kE4M3Group, false>(x, d - rotated);
  }
  wave_sync();
}

} // namespace apu::gpu
