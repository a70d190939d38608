// The GGUF types that few files use, as the AVX2 levels see them: indices into codebooks, ternary digits, E2M1 with
// scales for 16. Codes<B>::unpack takes a group of eight 32-blocks apart to memory, in the order of avx2_sums.h; what
// comes after is the same code for all of them, which keeps the library small and costs little beside the look-ups:
// 64-bit loads from the grid, as the processor's gather is no faster.
// Weights are below 16 in magnitude and unsigned with a bias of 16, or signed and at most 64 (kSigned).
// In an unnamed namespace: nothing here may be shared with files compiled without these flags.
#pragma once

#include "../quant/unpack.h"
#include "avx2_formats.h"

namespace apu::cpu {
namespace {

struct Unpacked {
  alignas(32) uint8_t q[32 * kGroup]; // as activations
  __m256 ws;
  __m256 half[2]; // scales of the halves, where the type has them

  APU_INLINE void store(uint32_t j, uint32_t i, __m256i v) { store32(q + 128 * j + 32 * i, v); }
  APU_INLINE void store(uint32_t j, const Quad &quad) {
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) store(j, i, quad.half[i / 2][i % 2]);
  }
  APU_INLINE Quad operator()(uint32_t j) const {
    const uint8_t *p = q + 128 * j;
    return {{{load32(p), load32(p + 32)}, {load32(p + 64), load32(p + 96)}}};
  }
  APU_INLINE bool second() const { return true; }
};

constexpr int kCodeBias = 4;

struct CodesDefaults {
  static constexpr bool kSigned = false, kHalfScales = false;
};

template <class B> struct Codes;

template <class B> APU_INLINE __m256 add_unpacked(const Unpacked &w, const ActGroup &a, __m256 acc) {
  Halves sum;
  if constexpr (Codes<B>::kSigned)
    sum = dot_signed<true>(w, a);
  else
    sum = dot_narrow<kCodeBias>(w, a);
  __m256 first = _mm256_cvtepi32_ps(sum.first), second = _mm256_cvtepi32_ps(sum.second);
  if constexpr (Codes<B>::kHalfScales) {
    first = _mm256_mul_ps(first, w.half[0]);
    second = _mm256_mul_ps(second, w.half[1]);
  }
  return _mm256_fmadd_ps(w.ws, weigh(first, second, a.d), acc);
}

// ---- codebooks

// Of 32 bytes, for groups of eight elements in order, eight times that of group i of each block of quad j.
APU_INLINE __m256i spread(__m256i bytes, uint32_t j, uint32_t i) {
  const long long low = 0x0101010101010101 * (8 * j + i), high = low + 0x0404040404040404;
  return _mm256_shuffle_epi8(bytes, _mm256_setr_epi64x(low, high, low, high));
}
// -1 where bit e of the group's byte is set.
APU_INLINE __m256i spread_bits(__m256i bytes, uint32_t j, uint32_t i) {
  const __m256i bit = _mm256_set1_epi64x(static_cast<long long>(0x8040201008040201));
  return _mm256_cmpeq_epi8(_mm256_and_si256(spread(bytes, j, i), bit), bit);
}
APU_INLINE __m256i bytes_set1(int v) {
  return _mm256_set1_epi8(static_cast<int8_t>(v));
}

// quant::even_signs of 32 bytes.
APU_INLINE __m256i even_signs(__m256i seven) {
  const __m256i odd = _mm256_broadcastsi128_si256(
      _mm_setr_epi8(0, -128, -128, 0, -128, 0, 0, -128, -128, 0, 0, -128, 0, -128, -128, 0));
  const __m256i parity =
      _mm256_xor_si256(_mm256_shuffle_epi8(odd, low_nibbles(seven)), _mm256_shuffle_epi8(odd, high_nibbles(seven)));
  return _mm256_xor_si256(seven, parity);
}
// Four times seven bits from bit 0 of each dword.
APU_INLINE __m256i even_signs_packed(__m256i v) {
  const auto part = [=](int shift, int mask) __attribute__((always_inline)) {
    return _mm256_and_si256(_mm256_slli_epi32(v, shift), _mm256_set1_epi32(mask));
  };
  return even_signs(_mm256_or_si256(_mm256_or_si256(part(0, 0x7f), part(1, 0x7f00)),
                                    _mm256_or_si256(part(2, 0x7f0000), part(3, 0x7f000000))));
}

// Group i (eight elements) of the blocks of quad j, from a grid of eights; index(block, i).
template <class Grid, class Index> APU_INLINE __m256i eights(const Grid &grid, uint32_t j, uint32_t i, Index index) {
  const auto load = [&](uint32_t b)
                        __attribute__((always_inline)) { return static_cast<long long>(grid.v[index(b, i)]); };
  return _mm256_setr_epi64x(load(2 * j), load(2 * j + 1), load(2 * j + 4), load(2 * j + 5));
}
// The same from a grid of fours, of which group i has indices 2 i and 2 i + 1.
template <class Grid, class Index> APU_INLINE __m256i fours(const Grid &grid, uint32_t j, uint32_t i, Index index) {
  const auto load = [&](uint32_t b, uint32_t last)
                        __attribute__((always_inline)) { return static_cast<int>(grid.v[index(b, 2 * i + last)]); };
  return _mm256_setr_epi32(load(2 * j, 0), load(2 * j, 1), load(2 * j + 1, 0), load(2 * j + 1, 1), load(2 * j + 4, 0),
                           load(2 * j + 4, 1), load(2 * j + 5, 0), load(2 * j + 5, 1));
}

// Calls element(j, i) for all of a group's registers and stores what it returns.
template <class Element> APU_INLINE void unpack_each(Unpacked &out, Element element) {
#pragma GCC unroll 2
  for (uint32_t j = 0; j < 2; ++j)
#pragma GCC unroll 4
    for (uint32_t i = 0; i < 4; ++i) out.store(j, i, element(j, i));
}

APU_INLINE __m256i negate_where(__m256i magnitude, __m256i mask) {
  return signed_weights(_mm256_sub_epi8(_mm256_xor_si256(magnitude, mask), mask));
}

// 2 v + 1 as floats.
APU_INLINE __m256 odd_scales(__m256i v) {
  return _mm256_cvtepi32_ps(_mm256_or_si256(_mm256_slli_epi32(v, 1), _mm256_set1_epi32(1)));
}
// Nibbles of eight bytes, the low ones for the first half of each block.
APU_INLINE void odd_half_scales(const uint8_t *p, Unpacked &out) {
  const __m256i both = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(p)));
  out.half[0] = odd_scales(_mm256_and_si256(both, _mm256_set1_epi32(15)));
  out.half[1] = odd_scales(_mm256_srli_epi32(both, 4));
}
APU_INLINE __m256 eighth(__m256 v) {
  return _mm256_mul_ps(v, _mm256_set1_ps(0.125f));
}

template <> struct Codes<quant::IQ2_XXS> : CodesDefaults {
  static constexpr bool kSigned = true;
  static APU_INLINE void unpack(const uint8_t *p, uint32_t, Unpacked &out) {
    const uint8_t *qs = p + 2;
    const __m256i packed = _mm256_permute4x64_epi64(odd_dwords(load32(qs), load32(qs + 32)), 0xd8);
    const __m256i signs = even_signs_packed(packed);
    unpack_each(out, [&](uint32_t j, uint32_t i) __attribute__((always_inline)) {
      const auto index = [=](uint32_t b, uint32_t n) __attribute__((always_inline)) { return qs[8 * b + n]; };
      return negate_where(eights(quant::kIq2xxsGrid, j, i, index), spread_bits(signs, j, i));
    });
    out.ws = _mm256_mul_ps(eighth(broadcast_f16(p)), odd_scales(_mm256_srli_epi32(packed, 28)));
  }
};

template <> struct Codes<quant::IQ2_XS> : CodesDefaults {
  static constexpr bool kSigned = true, kHalfScales = true;
  static APU_INLINE void unpack(const uint8_t *p, uint32_t, Unpacked &out) {
    const uint8_t *qs = p + 2;
    const __m256i a = _mm256_srli_epi16(load32(qs), 9), b = _mm256_srli_epi16(load32(qs + 32), 9);
    const __m256i signs = even_signs(_mm256_permute4x64_epi64(_mm256_packus_epi16(a, b), 0xd8));
    unpack_each(out, [&](uint32_t j, uint32_t i) __attribute__((always_inline)) {
      const auto index = [=](uint32_t block, uint32_t n)
                             __attribute__((always_inline)) { return load_u16(qs + 8 * block + 2 * n) & 511u; };
      return negate_where(eights(quant::kIq2xsGrid, j, i, index), spread_bits(signs, j, i));
    });
    odd_half_scales(p + 66, out);
    out.ws = eighth(broadcast_f16(p));
  }
};

template <> struct Codes<quant::IQ2_S> : CodesDefaults {
  static constexpr bool kSigned = true, kHalfScales = true;
  static APU_INLINE void unpack(const uint8_t *p, uint32_t, Unpacked &out) {
    const uint8_t *qs = p + 2, *qh = p + 66;
    const __m256i signs = load32(p + 34);
    unpack_each(out, [&](uint32_t j, uint32_t i) __attribute__((always_inline)) {
      const auto index = [=](uint32_t b, uint32_t n)
                             __attribute__((always_inline)) { return qs[4 * b + n] | (qh[b] >> 2 * n & 3u) << 8; };
      return negate_where(eights(quant::kIq2sGrid, j, i, index), spread_bits(signs, j, i));
    });
    odd_half_scales(p + 74, out);
    out.ws = eighth(broadcast_f16(p));
  }
};

template <> struct Codes<quant::IQ3_XXS> : CodesDefaults {
  static constexpr bool kSigned = true;
  static APU_INLINE void unpack(const uint8_t *p, uint32_t, Unpacked &out) {
    const uint8_t *qs = p + 2;
    const __m256i packed = load32(p + 66), signs = even_signs_packed(packed);
    unpack_each(out, [&](uint32_t j, uint32_t i) __attribute__((always_inline)) {
      const auto index = [=](uint32_t b, uint32_t n) __attribute__((always_inline)) { return qs[8 * b + n]; };
      return negate_where(fours(quant::kIq3xxsGrid, j, i, index), spread_bits(signs, j, i));
    });
    const __m256 quarter = _mm256_mul_ps(broadcast_f16(p), _mm256_set1_ps(0.25f));
    out.ws = _mm256_mul_ps(quarter, odd_scales(_mm256_srli_epi32(packed, 28)));
  }
};

template <> struct Codes<quant::IQ3_S> : CodesDefaults {
  static APU_INLINE void unpack(const uint8_t *p, uint32_t, Unpacked &out) {
    const uint8_t *qs = p + 2, *qh = p + 66;
    const __m256i signs = load32(p + 74);
    alignas(32) uint16_t indices[64];
    const __m128i bit = _mm_setr_epi16(1, 2, 4, 8, 16, 32, 64, 128);
#pragma GCC unroll 8
    for (uint32_t b = 0; b < 8; ++b) {
      const __m128i low = _mm_cvtepu8_epi16(_mm_loadl_epi64(reinterpret_cast<const __m128i *>(qs + 8 * b)));
      const __m128i set = _mm_cmpeq_epi16(_mm_and_si128(_mm_set1_epi16(qh[b]), bit), bit);
      _mm_store_si128(reinterpret_cast<__m128i *>(indices + 8 * b),
                      _mm_or_si128(low, _mm_and_si128(set, _mm_set1_epi16(256))));
    }
    unpack_each(out, [&](uint32_t j, uint32_t i) __attribute__((always_inline)) {
      const auto index = [&](uint32_t b, uint32_t n) __attribute__((always_inline)) { return indices[8 * b + n]; };
      const __m256i mask = spread_bits(signs, j, i); // -v + 16 is ~v + 17
      return _mm256_add_epi8(_mm256_xor_si256(fours(quant::kIq3sGrid, j, i, index), mask),
                             _mm256_sub_epi8(bytes_set1(16), mask));
    });
    const __m256i scales = _mm256_srlv_epi32(_mm256_set1_epi32(static_cast<int32_t>(load_u32(p + 106))),
                                             _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28));
    out.ws = _mm256_mul_ps(broadcast_f16(p), odd_scales(_mm256_and_si256(scales, _mm256_set1_epi32(15))));
  }
};

// Bytes of a group: 17, or 15 where the mask is set, to be added to the grid.
APU_INLINE __m256i biased_delta(__m256i mask) {
  return _mm256_add_epi8(bytes_set1(17), _mm256_add_epi8(mask, mask));
}

template <> struct Codes<quant::IQ1_S> : CodesDefaults {
  static APU_INLINE void unpack(const uint8_t *p, uint32_t, Unpacked &out) {
    const uint8_t *qs = p + 2, *qh = p + 34;
    const __m256i high = _mm256_cvtepu16_epi32(load16(qh));
    const __m256i delta = biased_delta(_mm256_srai_epi32(_mm256_slli_epi32(high, 16), 31));
    unpack_each(out, [&](uint32_t j, uint32_t i) __attribute__((always_inline)) {
      const auto index = [=](uint32_t b, uint32_t n) __attribute__((always_inline)) {
        return qs[4 * b + n] | (load_u16(qh + 2 * b) >> 3 * n & 7u) << 8;
      };
      return _mm256_add_epi8(eights(quant::kIq1Grid, j, i, index), spread(delta, j, i));
    });
    const __m256i scale = _mm256_and_si256(_mm256_srli_epi32(high, 12), _mm256_set1_epi32(7));
    out.ws = _mm256_mul_ps(eighth(broadcast_f16(p)), odd_scales(scale));
  }
};

template <> struct Codes<quant::IQ1_M> : CodesDefaults {
  static constexpr bool kHalfScales = true;
  static APU_INLINE void unpack(const uint8_t *p, uint32_t, Unpacked &out) {
    const uint8_t *qs = p, *qh = p + 32, *scales = p + 48;
    const __m256i wide = _mm256_cvtepu8_epi16(load16(qh)), bit = bytes_set1(8); // bits 3 and 7 to bit 3 of two bytes
    const __m256i nibbles = _mm256_or_si256(wide, _mm256_slli_epi16(wide, 4));
    const __m256i delta = biased_delta(_mm256_cmpeq_epi8(_mm256_and_si256(nibbles, bit), bit));
    unpack_each(out, [&](uint32_t j, uint32_t i) __attribute__((always_inline)) {
      const auto index = [=](uint32_t b, uint32_t n) __attribute__((always_inline)) {
        return qs[4 * b + n] | (qh[2 * b + n / 2] >> 4 * (n % 2) & 7u) << 8;
      };
      return _mm256_add_epi8(eights(quant::kIq1Grid, j, i, index), spread(delta, j, i));
    });
    const __m128i words = _mm_loadl_epi64(reinterpret_cast<const __m128i *>(scales)); // one for two blocks
    const __m256i twice = _mm256_cvtepu16_epi32(_mm_unpacklo_epi16(words, words));
    const __m256i first = _mm256_srlv_epi32(twice, _mm256_setr_epi32(0, 6, 0, 6, 0, 6, 0, 6));
    const __m256i seven = _mm256_set1_epi32(7);
    out.half[0] = odd_scales(_mm256_and_si256(first, seven));
    out.half[1] = odd_scales(_mm256_and_si256(_mm256_srli_epi32(first, 3), seven));
    out.ws = eighth(_mm256_set1_ps(quant::scale_iq1_m(scales)));
  }
};

// ---- ternary digits

template <> struct Codes<quant::TQ2_0> : CodesDefaults {
  static APU_INLINE void unpack(const uint8_t *p, uint32_t, Unpacked &out) {
    const auto pair = [=](uint32_t i) __attribute__((always_inline)) {
      return Pair{_mm256_add_epi8(two_bits(p, i), bytes_set1(15)),
                  _mm256_add_epi8(two_bits(p + 16, i), bytes_set1(15))};
    };
    out.store(0, quad_of(pair(0), pair(1)));
    out.store(1, quad_of(pair(2), pair(3)));
    out.ws = broadcast_f16(p + 64);
  }
};

template <> struct Codes<quant::TQ1_0> : CodesDefaults {
  static APU_INLINE void unpack(const uint8_t *p, uint32_t, Unpacked &out) {
    // Digit n of a byte v is 3 * (3^n v mod 256) / 256: 0, 1 from 86 and 2 from 171 on.
    const auto digits = [](__m256i v) __attribute__((always_inline)) {
      const auto reaches = [=](int limit) __attribute__((always_inline)) {
        return _mm256_cmpeq_epi8(_mm256_max_epu8(v, bytes_set1(limit)), v);
      };
      return _mm256_sub_epi8(bytes_set1(15), _mm256_add_epi8(reaches(86), reaches(171)));
    };
    const auto triple = [](__m256i v)
                            __attribute__((always_inline)) { return _mm256_add_epi8(_mm256_add_epi8(v, v), v); };
    __m256i blocks[8]; // in the order of elements
    __m256i v = load32(p);
    for (uint32_t b = 0; b < 5; ++b, v = triple(v)) blocks[b] = digits(v);
    const __m128i last = load16(p + 32);
    v = _mm256_set_m128i(_mm256_castsi256_si128(triple(_mm256_castsi128_si256(last))), last);
    for (uint32_t b = 5; b < 7; ++b, v = triple(triple(v))) blocks[b] = digits(v);
    const __m128i four = _mm_set1_epi32(static_cast<int32_t>(load_u32(p + 48))); // times 1, 3, 9, 27 by dwords
    const __m128i powers = _mm_setr_epi32(0x00010001, 0x00030003, 0x00090009, 0x001b001b);
    const __m128i low = _mm_and_si128(_mm_mullo_epi16(four, powers), _mm_set1_epi16(255));
    const __m128i high = _mm_slli_epi16(_mm_mullo_epi16(_mm_srli_epi16(four, 8), powers), 8);
    blocks[7] = digits(_mm256_inserti128_si256(v, _mm_or_si128(low, high), 1));
    const auto pair = [&](uint32_t i) __attribute__((always_inline)) {
      return Pair{_mm256_permute2x128_si256(blocks[i], blocks[i + 4], 0x20),
                  _mm256_permute2x128_si256(blocks[i], blocks[i + 4], 0x31)};
    };
    out.store(0, quad_of(pair(0), pair(1)));
    out.store(1, quad_of(pair(2), pair(3)));
    out.ws = broadcast_f16(p + 52);
  }
};

// ---- E2M1 with an E4M3 scale for 16 elements; two blocks in 36 bytes

template <> struct Codes<quant::NVFP4> : CodesDefaults {
  static constexpr bool kHalfScales = true;
  static APU_INLINE void unpack(const uint8_t *p, uint32_t count, Unpacked &out) {
    const auto block = [=](uint32_t b) __attribute__((always_inline)) {
      return b < count ? load16(p + 36 * (b / 2) + 4 + 16 * (b % 2)) : _mm_setzero_si128();
    };
    const auto pair = [=](uint32_t i)
                          __attribute__((always_inline)) { return _mm256_set_m128i(block(i + 4), block(i)); };
#pragma GCC unroll 2
    for (uint32_t j = 0; j < 2; ++j) {
      const __m256i a = pair(2 * j), b = pair(2 * j + 1);
      const __m256i first = _mm256_unpacklo_epi64(a, b), second = _mm256_unpackhi_epi64(a, b);
      const Quad nibbles{{{low_nibbles(first), high_nibbles(first)}, {low_nibbles(second), high_nibbles(second)}}};
      out.store(j, look_up<quant::kE2m1Values, 1 << kCodeBias>(nibbles));
    }
    const auto four = [=](uint32_t b) __attribute__((always_inline)) {
      return static_cast<int>(b < count ? load_u32(p + 36 * (b / 2)) : 0);
    };
    const __m256i scales = _mm256_cvtepu16_epi32(_mm_setr_epi32(four(0), four(2), four(4), four(6)));
    out.half[0] = half_e4m3(_mm256_and_si256(scales, _mm256_set1_epi32(255)));
    out.half[1] = half_e4m3(_mm256_srli_epi32(scales, 8));
    out.ws = _mm256_set1_ps(1.0f);
  }

private:
  // As quant::half_e4m3: moved to where a float has its exponent and mantissa, denormals come out right too.
  static APU_INLINE __m256 half_e4m3(__m256i v) {
    const __m256i moved = _mm256_slli_epi32(_mm256_and_si256(v, _mm256_set1_epi32(127)), 20);
    const __m256 value = _mm256_mul_ps(_mm256_castsi256_ps(moved), _mm256_set1_ps(0x1p119f));
    return _mm256_andnot_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(v, _mm256_set1_epi32(127))), value);
  }
};

// Calls use.template operator()<B>() for a type that has Codes.
template <class Use> APU_INLINE void with_codes(uint32_t dtype, const Use &use) {
  switch (dtype) {
  case APU_IQ2_XXS: return use.template operator()<quant::IQ2_XXS>();
  case APU_IQ2_XS: return use.template operator()<quant::IQ2_XS>();
  case APU_IQ2_S: return use.template operator()<quant::IQ2_S>();
  case APU_IQ3_XXS: return use.template operator()<quant::IQ3_XXS>();
  case APU_IQ3_S: return use.template operator()<quant::IQ3_S>();
  case APU_IQ1_S: return use.template operator()<quant::IQ1_S>();
  case APU_IQ1_M: return use.template operator()<quant::IQ1_M>();
  case APU_TQ1_0: return use.template operator()<quant::TQ1_0>();
  case APU_TQ2_0: return use.template operator()<quant::TQ2_0>();
  case APU_NVFP4: return use.template operator()<quant::NVFP4>();
  default: return;
  }
}

} // namespace
} // namespace apu::cpu
