// Scalar unpacking of one 32-block of any quantised type, half and bfloat conversion, and dequantisation of rows.
// The table in blocks.h in code: the portable kernels, "exact" precision and the tests stand on it.
// Everything has internal linkage: the file is compiled into objects of different instruction sets.
#ifndef APU_QUANT_UNPACK_H
#define APU_QUANT_UNPACK_H

#include "blocks.h"

#include <string.h>

#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace apu::quant {

static inline uint16_t load16(const uint8_t *p) {
  uint16_t v;
  memcpy(&v, p, 2);
  return v;
}

static inline float bf16_to_f32(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  memcpy(&f, &bits, 4);
  return f;
}

static inline float f16_to_f32(uint16_t h) {
#if defined(__F16C__)
  return _cvtsh_ss(h);
#else
  // Exponent and mantissa moved into place, then scaled by 2^112: denormals come out right.
  const uint32_t magnitude = h & 0x7fffu;
  uint32_t bits = magnitude << 13;
  float f;
  if (magnitude >= 0x7c00u) {
    bits |= magnitude > 0x7c00u ? 0x7fc00000u : 0x7f800000u; // infinity; NaN made quiet
    memcpy(&f, &bits, 4);
  } else {
    memcpy(&f, &bits, 4);
    f *= 0x1p112f;
  }
  memcpy(&bits, &f, 4);
  bits |= static_cast<uint32_t>(h & 0x8000u) << 16;
  memcpy(&f, &bits, 4);
  return f;
#endif
}

static inline float load_f16(const uint8_t *p) {
  return f16_to_f32(load16(p));
}

struct Block32 {
  int8_t q[32];  // with the type's offset subtracted
  int32_t sc[2]; // per half; 1 for types with sub-blocks of 32
  int32_t m[2];  // per half; used by Minimum::per_half
  float ws;
  float wm;
};

static inline void unpack_nibbles(const uint8_t *qs, int offset, int8_t *q) {
  for (uint32_t i = 0; i < 16; i++) {
    q[i] = static_cast<int8_t>((qs[i] & 15) - offset);
    q[i + 16] = static_cast<int8_t>((qs[i] >> 4) - offset);
  }
}
static inline void unpack_nibbles5(const uint8_t *qs, const uint8_t *qh, int offset, int8_t *q) {
  uint32_t high;
  memcpy(&high, qh, 4);
  for (uint32_t i = 0; i < 16; i++) {
    q[i] = static_cast<int8_t>(((qs[i] & 15) | ((high >> i & 1) << 4)) - offset);
    q[i + 16] = static_cast<int8_t>(((qs[i] >> 4) | ((high >> (i + 16) & 1) << 4)) - offset);
  }
}
// Scale and minimum j of 8 from the 12 bytes of Q4_K and Q5_K: 6 bits each.
static inline void scale_min_k4(const uint8_t *scales, uint32_t j, int32_t *sc, int32_t *m) {
  if (j < 4) {
    *sc = scales[j] & 63;
    *m = scales[j + 4] & 63;
  } else {
    *sc = (scales[j + 4] & 15) | (scales[j - 4] >> 6 << 4);
    *m = (scales[j + 4] >> 4) | (scales[j] >> 6 << 4);
  }
}
// Scale i of 16 from the 12 bytes of Q3_K, 32 subtracted.
static inline int32_t scale_q3_k(const uint8_t *scales, uint32_t i) {
  const int32_t low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
  const int32_t high = scales[8 + i % 4] >> (2 * (i / 4)) & 3;
  return (low | high << 4) - 32;
}

// Block b of a file block (b = 0 for legacy types).
static inline void unpack_block(const Q4_0 &w, uint32_t, Block32 &out) {
  unpack_nibbles(w.qs, 8, out.q);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d);
}
static inline void unpack_block(const Q4_1 &w, uint32_t, Block32 &out) {
  unpack_nibbles(w.qs, 0, out.q);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d);
  out.wm = load_f16(w.m);
}
static inline void unpack_block(const Q5_0 &w, uint32_t, Block32 &out) {
  unpack_nibbles5(w.qs, w.qh, 16, out.q);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d);
}
static inline void unpack_block(const Q5_1 &w, uint32_t, Block32 &out) {
  unpack_nibbles5(w.qs, w.qh, 0, out.q);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d);
  out.wm = load_f16(w.m);
}
static inline void unpack_block(const Q8_0 &w, uint32_t, Block32 &out) {
  memcpy(out.q, w.qs, 32);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d);
}
static inline void unpack_block(const Q2_K &w, uint32_t b, Block32 &out) {
  for (uint32_t l = 0; l < 32; l++) out.q[l] = static_cast<int8_t>(w.qs[32 * (b / 4) + l] >> (2 * (b % 4)) & 3);
  for (uint32_t h = 0; h < 2; h++) {
    out.sc[h] = w.scales[2 * b + h] & 15;
    out.m[h] = w.scales[2 * b + h] >> 4;
  }
  out.ws = load_f16(w.d);
  out.wm = -load_f16(w.dmin);
}
static inline void unpack_block(const Q3_K &w, uint32_t b, Block32 &out) {
  for (uint32_t l = 0; l < 32; l++) {
    const int low = w.qs[32 * (b / 4) + l] >> (2 * (b % 4)) & 3;
    out.q[l] = static_cast<int8_t>((low | (w.hmask[l] >> b & 1) << 2) - 4);
  }
  for (uint32_t h = 0; h < 2; h++) out.sc[h] = scale_q3_k(w.scales, 2 * b + h);
  out.ws = load_f16(w.d);
}
static inline void unpack_block(const Q4_K &w, uint32_t b, Block32 &out) {
  for (uint32_t l = 0; l < 32; l++) out.q[l] = static_cast<int8_t>(w.qs[32 * (b / 2) + l] >> (4 * (b % 2)) & 15);
  int32_t sc, m;
  scale_min_k4(w.scales, b, &sc, &m);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d) * static_cast<float>(sc);
  out.wm = -(load_f16(w.dmin) * static_cast<float>(m));
}
static inline void unpack_block(const Q5_K &w, uint32_t b, Block32 &out) {
  for (uint32_t l = 0; l < 32; l++) {
    const int low = w.qs[32 * (b / 2) + l] >> (4 * (b % 2)) & 15;
    out.q[l] = static_cast<int8_t>(low | (w.qh[l] >> b & 1) << 4);
  }
  int32_t sc, m;
  scale_min_k4(w.scales, b, &sc, &m);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d) * static_cast<float>(sc);
  out.wm = -(load_f16(w.dmin) * static_cast<float>(m));
}
static inline void unpack_block(const Q6_K &w, uint32_t b, Block32 &out) {
  const uint32_t half = b / 4, j = b % 4;
  for (uint32_t l = 0; l < 32; l++) {
    const int low = w.ql[64 * half + 32 * (j % 2) + l] >> (4 * (j / 2)) & 15;
    out.q[l] = static_cast<int8_t>((low | (w.qh[32 * half + l] >> (2 * j) & 3) << 4) - 32);
  }
  for (uint32_t h = 0; h < 2; h++) out.sc[h] = static_cast<int8_t>(w.scales[2 * b + h]);
  out.ws = load_f16(w.d);
}

// out (k) = the row as float32; k is a multiple of the type's elements.
template <class B> static inline void dequantize_row(const uint8_t *row, uint32_t k, float *out) {
  using T = Traits<B>;
  Block32 block;
  for (uint32_t i = 0; i < k / T::elements; i++, row += T::bytes) {
    B file_block;
    memcpy(&file_block, row, T::bytes);
    for (uint32_t b = 0; b < T::blocks32; b++, out += kBlock) {
      unpack_block(file_block, b, block);
      for (uint32_t h = 0; h < 2; h++) {
        const float scale = block.ws * static_cast<float>(block.sc[h]);
        float add = 0.0f;
        if constexpr (T::minimum == Minimum::per_block) add = block.wm;
        if constexpr (T::minimum == Minimum::per_half) add = block.wm * static_cast<float>(block.m[h]);
        for (uint32_t l = 0; l < 16; l++) {
          const float v = scale * static_cast<float>(block.q[16 * h + l]);
          out[16 * h + l] = T::minimum == Minimum::none ? v : v + add;
        }
      }
    }
  }
}

} // namespace apu::quant

#endif // APU_QUANT_UNPACK_H
