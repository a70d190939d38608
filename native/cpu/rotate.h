// Rotary embedding of one head, in place: pairs are (2i, 2i + 1), or (i, i + pairs) where halves. Back is the rotation
// by the opposite angle.
#pragma once

#include <cstddef>

namespace apu::cpu {

inline void rotate_pair(float &a, float &b, float cos, float sin) {
  const float x = a, y = b;
  a = x * cos - y * sin;
  b = y * cos + x * sin;
}

inline void rotate(float *x, const float *cos, const float *sin, size_t pairs, bool halves) {
  if (halves)
    for (size_t i = 0; i < pairs; ++i) rotate_pair(x[i], x[i + pairs], cos[i], sin[i]);
  else
    for (size_t i = 0; i < pairs; ++i) rotate_pair(x[2 * i], x[2 * i + 1], cos[i], sin[i]);
}

inline void rotate_back(float *x, const float *cos, const float *sin, size_t pairs, bool halves) {
  if (halves)
    for (size_t i = 0; i < pairs; ++i) rotate_pair(x[i], x[i + pairs], cos[i], -sin[i]);
  else
    for (size_t i = 0; i < pairs; ++i) rotate_pair(x[2 * i], x[2 * i + 1], cos[i], -sin[i]);
}

} // namespace apu::cpu
