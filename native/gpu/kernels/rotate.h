// Rotary embedding: the angles of a position and the rotation of pairs, (2 i, 2 i + 1) or (i, i + pairs).
//
// Angles are made by every block: position times frequency in double, reduced to a quarter turn in double, then
// polynomials in float; that is cheaper than a table between kernels. Arguments that rotate hold `turns` (pairs),
// quarter turns for each position, `factors` (pairs) that divide them, or null, `magnitude`, `pairs` and `halves`; the
// host fills them with set_turns (native/gpu/turns.h).
#pragma once

#include "gpu.h"

namespace apu::gpu {

// cos and sin of `quarters` quarter turns, within 1e-7.
APU_DEVICE void turn(double quarters, float *cos, float *sin) {
  const double whole = floor_f64(quarters + 0.5);
  const float x = float(quarters - whole); // -0.5 to 0.5
  const i32 quadrant = i32(whole - 4.0 * floor_f64(whole * 0.25));
  const float y = x * x; // Taylor's terms of sin and cos of x pi / 2
  float s = fma_f32(y, 1.6044118e-4f, -4.6817541e-3f);
  s = fma_f32(y, s, 7.9692626e-2f);
  s = fma_f32(y, s, -6.4596410e-1f);
  s = fma_f32(y, s, 1.5707963e0f) * x;
  float c = fma_f32(y, -2.5202042e-5f, 9.1926027e-4f);
  c = fma_f32(y, c, -2.0863481e-2f);
  c = fma_f32(y, c, 2.5366951e-1f);
  c = fma_f32(y, c, -1.2337006e0f);
  c = fma_f32(y, c, 1.0f);
  const float a = quadrant & 1 ? s : c, b = quadrant & 1 ? c : s;
  *cos = quadrant == 1 || quadrant == 2 ? -a : a;
  *sin = quadrant >= 2 ? -b : b;
}

// By the block: cos and sin of a row's pairs, times the magnitude, in LDS.
template <u32 Threads, class Args> APU_DEVICE void turn_pairs(const Args &a, u32 position, float *cos, float *sin) {
  for (u32 i = thread_id(); i < a.pairs; i += Threads) {
    double quarters = double(position) * a.turns[i];
    if (a.factors) quarters /= double(a.factors[i]);
    float co, si;
    turn(quarters, &co, &si);
    cos[i] = co * a.magnitude;
    sin[i] = si * a.magnitude;
  }
}

// The rotation by an angle; back is the one by (cos, -sin).
APU_DEVICE void rotate_pair(float &u, float &v, float cos, float sin) {
  const float a = u, b = v;
  u = a * cos - b * sin;
  v = b * cos + a * sin;
}

// The 2 pairs elements from x on, in place, by one wave.
APU_DEVICE void rotate_wave(float *x, const float *cos, const float *sin, u32 pairs, u32 halves) {
  for (u32 i = lane_id(); i < pairs; i += kWaveSize) {
    const u32 first = halves ? i : 2 * i, second = halves ? i + pairs : 2 * i + 1;
    float u = x[first], v = x[second];
    rotate_pair(u, v, cos[i], sin[i]);
    x[first] = u;
    x[second] = v;
  }
}

} // namespace apu::gpu
