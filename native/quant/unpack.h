// Scalar unpacking of one 32-block of any quantised type, half and bfloat conversion, and dequantisation of rows.
// The table in blocks.h in code: the portable kernels, "exact" precision and the tests stand on it.
// Everything has internal linkage: the file is compiled into objects of different instruction sets.
#ifndef APU_QUANT_UNPACK_H
#define APU_QUANT_UNPACK_H

#include "blocks.h"
#include "codebooks.h"
#include "target.h"

#if defined(__F16C__) && !defined(APU_QUANT_HALF_TO_FLOAT)
#include <immintrin.h>
#endif

namespace apu::quant {

APU_QUANT_FUNCTION uint32_t load32(const uint8_t *p) {
  uint32_t v;
  APU_QUANT_COPY_BYTES(&v, p, 4);
  return v;
}
APU_QUANT_FUNCTION uint16_t load16(const uint8_t *p) {
  uint16_t v;
  APU_QUANT_COPY_BYTES(&v, p, 2);
  return v;
}

APU_QUANT_FUNCTION float bf16_to_f32(uint16_t h) {
  const uint32_t bits = static_cast<uint32_t>(h) << 16;
  float f;
  APU_QUANT_COPY_BYTES(&f, &bits, 4);
  return f;
}

APU_QUANT_FUNCTION float f16_to_f32(uint16_t h) {
#if defined(APU_QUANT_HALF_TO_FLOAT)
  return APU_QUANT_HALF_TO_FLOAT(h);
#elif defined(__F16C__)
  return _cvtsh_ss(h);
#else
  // Exponent and mantissa moved into place, then scaled by 2^112: denormals come out right.
  const uint32_t magnitude = h & 0x7fffu;
  uint32_t bits = magnitude << 13;
  float f;
  if (magnitude >= 0x7c00u) {
    bits |= magnitude > 0x7c00u ? 0x7fc00000u : 0x7f800000u; // infinity; NaN made quiet
    APU_QUANT_COPY_BYTES(&f, &bits, 4);
  } else {
    APU_QUANT_COPY_BYTES(&f, &bits, 4);
    f *= 0x1p112f;
  }
  APU_QUANT_COPY_BYTES(&bits, &f, 4);
  bits |= static_cast<uint32_t>(h & 0x8000u) << 16;
  APU_QUANT_COPY_BYTES(&f, &bits, 4);
  return f;
#endif
}

APU_QUANT_FUNCTION float load_f16(const uint8_t *p) {
  return f16_to_f32(load16(p));
}

struct Block32 {
  int8_t q[32]; // with the type's offset subtracted
  float sc[2];  // per half; 1 for types with sub-blocks of 32
  int32_t m[2]; // per half; used by Minimum::per_half
  float ws;
  float wm;
};

APU_QUANT_FUNCTION void unpack_nibbles(const uint8_t *qs, int offset, int8_t *q) {
  for (uint32_t i = 0; i < 16; i++) {
    q[i] = static_cast<int8_t>((qs[i] & 15) - offset);
    q[i + 16] = static_cast<int8_t>((qs[i] >> 4) - offset);
  }
}
APU_QUANT_FUNCTION void unpack_nibbles5(const uint8_t *qs, const uint8_t *qh, int offset, int8_t *q) {
  uint32_t high;
  APU_QUANT_COPY_BYTES(&high, qh, 4);
  for (uint32_t i = 0; i < 16; i++) {
    q[i] = static_cast<int8_t>(((qs[i] & 15) | ((high >> i & 1) << 4)) - offset);
    q[i + 16] = static_cast<int8_t>(((qs[i] >> 4) | ((high >> (i + 16) & 1) << 4)) - offset);
  }
}
// Scale and minimum j of 8 from the 12 bytes of Q4_K and Q5_K: 6 bits each.
APU_QUANT_FUNCTION void scale_min_k4(const uint8_t *scales, uint32_t j, int32_t *sc, int32_t *m) {
  if (j < 4) {
    *sc = scales[j] & 63;
    *m = scales[j + 4] & 63;
  } else {
    *sc = (scales[j + 4] & 15) | (scales[j - 4] >> 6 << 4);
    *m = (scales[j + 4] >> 4) | (scales[j] >> 6 << 4);
  }
}
// Scale i of 16 from the 12 bytes of Q3_K, 32 subtracted.
APU_QUANT_FUNCTION int32_t scale_q3_k(const uint8_t *scales, uint32_t i) {
  const int32_t low = i < 8 ? scales[i] & 15 : scales[i - 8] >> 4;
  const int32_t high = scales[8 + i % 4] >> (2 * (i / 4)) & 3;
  return (low | high << 4) - 32;
}

// Block b of a file block (b = 0 where that is one block).
APU_QUANT_FUNCTION void unpack_block(const Q4_0 &w, uint32_t, Block32 &out) {
  unpack_nibbles(w.qs, 8, out.q);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d);
}
APU_QUANT_FUNCTION void unpack_block(const Q4_1 &w, uint32_t, Block32 &out) {
  unpack_nibbles(w.qs, 0, out.q);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d);
  out.wm = load_f16(w.m);
}
APU_QUANT_FUNCTION void unpack_block(const Q5_0 &w, uint32_t, Block32 &out) {
  unpack_nibbles5(w.qs, w.qh, 16, out.q);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d);
}
APU_QUANT_FUNCTION void unpack_block(const Q5_1 &w, uint32_t, Block32 &out) {
  unpack_nibbles5(w.qs, w.qh, 0, out.q);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d);
  out.wm = load_f16(w.m);
}
APU_QUANT_FUNCTION void unpack_block(const Q8_0 &w, uint32_t, Block32 &out) {
  APU_QUANT_COPY_BYTES(out.q, w.qs, 32);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d);
}
APU_QUANT_FUNCTION void unpack_block(const Q2_K &w, uint32_t b, Block32 &out) {
  for (uint32_t l = 0; l < 32; l++) out.q[l] = static_cast<int8_t>(w.qs[32 * (b / 4) + l] >> (2 * (b % 4)) & 3);
  for (uint32_t h = 0; h < 2; h++) {
    out.sc[h] = static_cast<float>(w.scales[2 * b + h] & 15);
    out.m[h] = w.scales[2 * b + h] >> 4;
  }
  out.ws = load_f16(w.d);
  out.wm = -load_f16(w.dmin);
}
APU_QUANT_FUNCTION void unpack_block(const Q3_K &w, uint32_t b, Block32 &out) {
  for (uint32_t l = 0; l < 32; l++) {
    const int low = w.qs[32 * (b / 4) + l] >> (2 * (b % 4)) & 3;
    out.q[l] = static_cast<int8_t>((low | (w.hmask[l] >> b & 1) << 2) - 4);
  }
  for (uint32_t h = 0; h < 2; h++) out.sc[h] = static_cast<float>(scale_q3_k(w.scales, 2 * b + h));
  out.ws = load_f16(w.d);
}
APU_QUANT_FUNCTION void unpack_block(const Q4_K &w, uint32_t b, Block32 &out) {
  for (uint32_t l = 0; l < 32; l++) out.q[l] = static_cast<int8_t>(w.qs[32 * (b / 2) + l] >> (4 * (b % 2)) & 15);
  int32_t sc, m;
  scale_min_k4(w.scales, b, &sc, &m);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d) * static_cast<float>(sc);
  out.wm = -(load_f16(w.dmin) * static_cast<float>(m));
}
APU_QUANT_FUNCTION void unpack_block(const Q5_K &w, uint32_t b, Block32 &out) {
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
APU_QUANT_FUNCTION void unpack_block(const Q6_K &w, uint32_t b, Block32 &out) {
  const uint32_t half = b / 4, j = b % 4;
  for (uint32_t l = 0; l < 32; l++) {
    const int low = w.ql[64 * half + 32 * (j % 2) + l] >> (4 * (j / 2)) & 15;
    out.q[l] = static_cast<int8_t>((low | (w.qh[32 * half + l] >> (2 * j) & 3) << 4) - 32);
  }
  for (uint32_t h = 0; h < 2; h++) out.sc[h] = static_cast<float>(static_cast<int8_t>(w.scales[2 * b + h]));
  out.ws = load_f16(w.d);
}

// ---- codebooks

// Eight elements: bytes of a grid, negated where their bit is set.
APU_QUANT_FUNCTION void unpack_signed(uint64_t grid, uint32_t signs, int8_t *q) {
  for (uint32_t i = 0; i < 8; i++) {
    const int v = static_cast<int>(grid >> 8 * i & 255);
    q[i] = static_cast<int8_t>(signs >> i & 1 ? -v : v);
  }
}
APU_QUANT_FUNCTION uint64_t two_fours(uint32_t first, uint32_t second) {
  return first | static_cast<uint64_t>(second) << 32;
}
// 2 s + 1 of scale i, nibbles from the low one.
APU_QUANT_FUNCTION float odd_nibble(const uint8_t *scales, uint32_t i) {
  return static_cast<float>(2 * (scales[i / 2] >> 4 * (i % 2) & 15) + 1);
}

APU_QUANT_FUNCTION void unpack_block(const IQ2_XXS &w, uint32_t b, Block32 &out) {
  const uint8_t *p = w.qs + 8 * b;
  const uint32_t packed = load32(p + 4);
  for (uint32_t i = 0; i < 4; i++) unpack_signed(kIq2xxsGrid.v[p[i]], even_signs(packed >> 7 * i & 127), out.q + 8 * i);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d) * static_cast<float>(2 * (packed >> 28) + 1) * 0.125f;
}
APU_QUANT_FUNCTION void unpack_block(const IQ2_XS &w, uint32_t b, Block32 &out) {
  for (uint32_t i = 0; i < 4; i++) {
    const uint32_t v = load16(w.qs + 8 * b + 2 * i);
    unpack_signed(kIq2xsGrid.v[v & 511], even_signs(v >> 9), out.q + 8 * i);
  }
  for (uint32_t h = 0; h < 2; h++) out.sc[h] = odd_nibble(w.scales, 2 * b + h);
  out.ws = load_f16(w.d) * 0.125f;
}
APU_QUANT_FUNCTION void unpack_block(const IQ2_S &w, uint32_t b, Block32 &out) {
  for (uint32_t i = 0; i < 4; i++) {
    const uint32_t index = w.qs[4 * b + i] | (w.qh[b] >> 2 * i & 3u) << 8;
    unpack_signed(kIq2sGrid.v[index], w.signs[4 * b + i], out.q + 8 * i);
  }
  for (uint32_t h = 0; h < 2; h++) out.sc[h] = odd_nibble(w.scales, 2 * b + h);
  out.ws = load_f16(w.d) * 0.125f;
}
APU_QUANT_FUNCTION void unpack_block(const IQ3_XXS &w, uint32_t b, Block32 &out) {
  const uint8_t *p = w.qs + 8 * b;
  const uint32_t packed = load32(w.signs + 4 * b);
  for (uint32_t i = 0; i < 4; i++) {
    const uint64_t grid = two_fours(kIq3xxsGrid.v[p[2 * i]], kIq3xxsGrid.v[p[2 * i + 1]]);
    unpack_signed(grid, even_signs(packed >> 7 * i & 127), out.q + 8 * i);
  }
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d) * static_cast<float>(2 * (packed >> 28) + 1) * 0.25f;
}
APU_QUANT_FUNCTION void unpack_block(const IQ3_S &w, uint32_t b, Block32 &out) {
  const auto four = [&](uint32_t i) { return kIq3sGrid.v[w.qs[8 * b + i] | (w.qh[b] >> i & 1u) << 8]; };
  for (uint32_t i = 0; i < 4; i++)
    unpack_signed(two_fours(four(2 * i), four(2 * i + 1)), w.signs[4 * b + i], out.q + 8 * i);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d) * odd_nibble(w.scales, b);
}

// Eight elements in eighths: those of a grid, plus or minus one.
APU_QUANT_FUNCTION void unpack_eighths(uint64_t grid, int delta, int8_t *q) {
  for (uint32_t i = 0; i < 8; i++) q[i] = static_cast<int8_t>(static_cast<int8_t>(grid >> 8 * i) + delta);
}
APU_QUANT_FUNCTION void unpack_block(const IQ1_S &w, uint32_t b, Block32 &out) {
  const uint32_t high = load16(w.qh + 2 * b);
  for (uint32_t i = 0; i < 4; i++)
    unpack_eighths(kIq1Grid.v[w.qs[4 * b + i] | (high >> 3 * i & 7) << 8], high >> 15 ? -1 : 1, out.q + 8 * i);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d) * static_cast<float>(2 * (high >> 12 & 7) + 1) * 0.125f;
}
// The scale of IQ1_M, a nibble in each u16.
APU_QUANT_FUNCTION float scale_iq1_m(const uint8_t *scales) {
  uint32_t d = 0;
  for (uint32_t i = 0; i < 4; i++) d |= static_cast<uint32_t>(scales[2 * i + 1] >> 4) << 4 * i;
  return f16_to_f32(static_cast<uint16_t>(d));
}
APU_QUANT_FUNCTION void unpack_block(const IQ1_M &w, uint32_t b, Block32 &out) {
  for (uint32_t i = 0; i < 4; i++) {
    const uint32_t high = w.qh[2 * b + i / 2] >> 4 * (i % 2) & 15u;
    unpack_eighths(kIq1Grid.v[w.qs[4 * b + i] | (high & 7) << 8], high >> 3 ? -1 : 1, out.q + 8 * i);
  }
  const uint32_t packed = load16(w.scales + b / 2 * 2) >> 6 * (b % 2);
  for (uint32_t h = 0; h < 2; h++) out.sc[h] = static_cast<float>(2 * (packed >> 3 * h & 7) + 1);
  out.ws = scale_iq1_m(w.scales) * 0.125f;
}

// ---- tables of sixteen values

APU_QUANT_FUNCTION void unpack_table(const uint8_t *qs, const int8_t (&values)[16], int8_t *q) {
  for (uint32_t i = 0; i < 16; i++) {
    q[i] = values[qs[i] & 15];
    q[i + 16] = values[qs[i] >> 4];
  }
}
// 2^(e - 128). The first two are denormal: their bits are (e + 1) << 21, less than a normal number's from e = 2 on.
APU_QUANT_FUNCTION float half_e8m0(uint8_t e) {
  const int32_t normal = (e - 1) * (1 << 23), denormal = (e + 1) * (1 << 21);
  const int32_t bits = normal > denormal ? normal : denormal;
  float f;
  APU_QUANT_COPY_BYTES(&f, &bits, 4);
  return f;
}
// Half of an unsigned E4M3; bit 7 is ignored, 0x7f (NaN in E4M3) is zero.
APU_QUANT_FUNCTION float half_e4m3(uint8_t v) {
  const uint32_t exponent = v >> 3 & 15, mantissa = v & 7;
  if (v == 0x7f) return 0.0f;
  if (exponent == 0) return static_cast<float>(mantissa) * 0x1p-10f;
  const uint32_t bits = (exponent + 119) << 23 | mantissa << 20; // 2^(exponent - 8)
  float f;
  APU_QUANT_COPY_BYTES(&f, &bits, 4);
  return f;
}
APU_QUANT_FUNCTION void unpack_block(const IQ4_NL &w, uint32_t, Block32 &out) {
  unpack_table(w.qs, kIq4Values, out.q);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d);
}
APU_QUANT_FUNCTION void unpack_block(const IQ4_XS &w, uint32_t b, Block32 &out) {
  unpack_table(w.qs + 16 * b, kIq4Values, out.q);
  const int scale = (w.scales_l[b / 2] >> 4 * (b % 2) & 15) | (load16(w.scales_h) >> 2 * b & 3) << 4;
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d) * static_cast<float>(scale - 32);
}
APU_QUANT_FUNCTION void unpack_block(const MXFP4 &w, uint32_t, Block32 &out) {
  unpack_table(w.qs, kE2m1Values, out.q);
  out.sc[0] = out.sc[1] = 1;
  out.ws = half_e8m0(w.e);
}
APU_QUANT_FUNCTION void unpack_block(const NVFP4 &w, uint32_t b, Block32 &out) {
  for (uint32_t i = 0; i < 32; i++) {
    const uint8_t byte = w.qs[16 * b + i / 16 * 8 + i % 8];
    out.q[i] = kE2m1Values[i / 8 % 2 ? byte >> 4 : byte & 15];
  }
  for (uint32_t h = 0; h < 2; h++) out.sc[h] = half_e4m3(w.scales[2 * b + h]);
  out.ws = 1;
}

// ---- ternary

// Digit n, from the most significant, of a byte that stores ceil(256 / 243 * v) for v of five digits.
APU_QUANT_FUNCTION int ternary_digit(uint8_t byte, uint32_t n) {
  constexpr uint8_t power[5] = {1, 3, 9, 27, 81};
  return static_cast<uint8_t>(byte * power[n]) * 3 >> 8;
}
APU_QUANT_FUNCTION void unpack_block(const TQ1_0 &w, uint32_t b, Block32 &out) {
  for (uint32_t l = 0; l < 32; l++) {
    int digit;
    if (b < 5)
      digit = ternary_digit(w.qs[l], b);
    else if (b < 7 || l < 16)
      digit = ternary_digit(w.qs[32 + l % 16], 2 * (b - 5) + l / 16);
    else
      digit = ternary_digit(w.qh[l % 4], l / 4 % 4);
    out.q[l] = static_cast<int8_t>(digit - 1);
  }
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d);
}
APU_QUANT_FUNCTION void unpack_block(const TQ2_0 &w, uint32_t b, Block32 &out) {
  for (uint32_t l = 0; l < 32; l++) out.q[l] = static_cast<int8_t>((w.qs[32 * (b / 4) + l] >> 2 * (b % 4) & 3) - 1);
  out.sc[0] = out.sc[1] = 1;
  out.ws = load_f16(w.d);
}

// ---- rows

// out (k) = the row as float32; k is a multiple of the type's elements.
template <class B> APU_QUANT_FUNCTION void dequantize_row(const uint8_t *row, uint32_t k, float *out) {
  using T = Traits<B>;
  Block32 block;
  for (uint32_t i = 0; i < k / T::elements; i++, row += T::bytes) {
    B file_block;
    APU_QUANT_COPY_BYTES(&file_block, row, T::bytes);
    for (uint32_t b = 0; b < T::blocks32; b++, out += kBlock) {
      unpack_block(file_block, b, block);
      for (uint32_t h = 0; h < 2; h++) {
        const float scale = block.ws * block.sc[h];
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
