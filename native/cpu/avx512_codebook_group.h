// Groups (avx512_group.h) of the types whose weights are codes: tables of sixteen values, ternary digits, and, in
// avx512_grid_group.h, codebooks.
#pragma once

#include "avx512_grid_group.h"
#include "avx512_group.h"
#include "avx512_pairs.h"

#ifdef APU_AVX512

#include "../quant/unpack.h"

namespace apu::cpu::avx512 {
namespace {

// ---- tables of sixteen values: IQ4_NL, IQ4_XS, MXFP4

// Nibbles of eight blocks, the first eight bytes of each and the last, to values: a byte permute ignores what is above
// the index, and the table is there four times.
template <class B> struct TableGroup {
  static constexpr Order kOrder = Order::nibbles;
  static constexpr bool kNarrow = sizeof(B) == sizeof(MXFP4); // 8 * 24 * 127 < 2^15
  static constexpr int kOffset = kNarrow ? 12 : 128;
  static constexpr Table<uint8_t> kValues{[](int i) { return kOffset + (kNarrow ? kE2m1Values : kIq4Values)[i % 16]; }};

  __m512i q[4];
  __m256 ws;

  APU_INLINE void look_up(__m512i first, __m512i last) {
    q[0] = _mm512_permutexvar_epi8(first, kValues);
    q[1] = _mm512_permutexvar_epi8(_mm512_srli_epi16(first, 4), kValues);
    q[2] = _mm512_permutexvar_epi8(last, kValues);
    q[3] = _mm512_permutexvar_epi8(_mm512_srli_epi16(last, 4), kValues);
  }
  // c: -kOffset * sum(y) of the halves, where the sums stand.
  APU_INLINE __m512i dot(const int8_t *y, const int32_t *c) const {
    __m512i low, high;
    dot_registers(q, y, low, high);
    if constexpr (kNarrow)
      return to_planes<kOrder>(_mm512_dpwssd_epi32(load512(c), _mm512_packs_epi32(low, high), _mm512_set1_epi16(1)));
    return to_planes<kOrder>(_mm512_add_epi32(add_even_odd(low, high), load512(c)));
  }
};

// Blocks of 32: the eight bytes of four lie within 64, so that two loads of each four need no merging.
template <class B> struct SmallTableGroup : TableGroup<B> {
  static constexpr int kBytes = 8 * sizeof(B);
  static constexpr int kQuad = 4 * sizeof(B);
  static constexpr int kSecond = kQuad - 64; // offset of the second load
  static constexpr int kHeader = sizeof(B) - 16;

  struct Tail { // byte masks of the last group
    __mmask64 first[2], last[2];
  };
  static Tail tail(int blocks) {
    Tail t;
    for (int i = 0; i < 2; i++) {
      t.first[i] = low_mask(blocks * static_cast<int>(sizeof(B)) - i * kQuad);
      t.last[i] = low_mask(blocks * static_cast<int>(sizeof(B)) - i * kQuad - kSecond);
    }
    return t;
  }
  template <bool Masked, int Quads> static APU_INLINE SmallTableGroup load(const uint8_t *p, const Tail &t) {
    return load_two<Masked, Quads>(p, p + kQuad, t);
  }
  // At most four blocks at each place.
  static APU_INLINE SmallTableGroup load_quads(const uint8_t *quad0, const uint8_t *quad1, Tail t) {
    t.first[1] = t.first[0];
    t.last[1] = t.last[0];
    return load_two<true, 2>(quad0, quad1, t);
  }

private:
  static constexpr int place(int i) { return 64 * (i / 8 % 2) + i / 16 * static_cast<int>(sizeof(B)) + i % 8; }
  static constexpr Table<uint8_t> kFirst{[](int i) { return place(i) + kHeader; }};
  static constexpr Table<uint8_t> kLast{[](int i) { return place(i) + kHeader + 8 - kSecond; }};

  template <bool Masked> static APU_INLINE __m512i load_part(const uint8_t *p, __mmask64 mask) {
    return Masked ? _mm512_maskz_loadu_epi8(mask, p) : load512(p);
  }
  template <bool Masked, int Quads>
  static APU_INLINE SmallTableGroup load_two(const uint8_t *quad0, const uint8_t *quad1, const Tail &t) {
    SmallTableGroup g;
    const __m512i first0 = loaded(load_part<Masked>(quad0, t.first[0])),
                  last0 = load_part<Masked>(quad0 + kSecond, t.last[0]);
    __m512i first1 = _mm512_setzero_si512(), last1 = first1;
    if constexpr (Quads == 2) {
      first1 = loaded(load_part<Masked>(quad1, t.first[1]));
      last1 = load_part<Masked>(quad1 + kSecond, t.last[1]);
    }
    g.look_up(_mm512_permutex2var_epi8(first0, kFirst, first1), _mm512_permutex2var_epi8(last0, kLast, last1));
    if constexpr (kHeader == 2) {
      static constexpr Table<uint16_t> scales{[](int i) { return 32 * (i / 4 % 2) + i % 4 * kQuad / 8; }};
      g.ws = _mm256_cvtph_ps(_mm512_castsi512_si128(_mm512_permutex2var_epi16(first0, scales, first1)));
    } else { // 2^(e - 128): e - 1 in the exponent's place, or for 0 and 1 a denormal's bits, which then are more
      static constexpr Table<uint8_t> scales{
          [](int i) { return 64 * (i / 16 % 2) + i / 4 % 4 * static_cast<int>(sizeof(B)); }};
      const __mmask64 low_bytes = 0x1111111111111111;
      const __m256i e = _mm512_castsi512_si256(_mm512_maskz_permutex2var_epi8(low_bytes, first0, scales, first1));
      const __m256i normal = _mm256_sub_epi32(_mm256_slli_epi32(e, 23), _mm256_set1_epi32(1 << 23));
      const __m256i denormal = _mm256_add_epi32(_mm256_slli_epi32(e, 21), _mm256_set1_epi32(1 << 21));
      g.ws = _mm256_castsi256_ps(_mm256_max_epi32(normal, denormal));
    }
    return g;
  }
};

template <> struct Group<IQ4_NL> : SmallTableGroup<IQ4_NL> {};
template <> struct Group<MXFP4> : SmallTableGroup<MXFP4> {};

template <> struct Group<IQ4_XS> : TableGroup<IQ4_XS> {
  static constexpr int kBytes = sizeof(IQ4_XS);

  struct Tail {};
  static Tail tail(int) { return {}; }

  template <bool, int> static APU_INLINE Group load(const uint8_t *p, const Tail &) {
    Group g;
    const __m512i a = loaded(load512(p + 8)), b = loaded(load512(p + 72));
    g.look_up(_mm512_unpacklo_epi64(a, b), _mm512_unpackhi_epi64(a, b));
    const uint64_t sixes = _pdep_u64(load32(p + 4), 0x0f0f0f0f0f0f0f0f) | _pdep_u64(load16(p + 2), 0x3030303030303030);
    const __m256i s = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(sixes)));
    g.ws = _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_sub_epi32(s, _mm256_set1_epi32(32))), broadcast_f16(p));
    return g;
  }
};

// ---- IQ2_XXS

template <> struct Group<IQ2_XXS> {
  static constexpr Order kOrder = Order::blocks;
  static constexpr int kOffset = Pair<IQ2_XXS>::kOffset;
  static constexpr int kBytes = sizeof(IQ2_XXS);

  __m512i q[4];
  __m256 ws;

  struct Tail {};
  static Tail tail(int) { return {}; }

  template <bool, int> static APU_INLINE Group load(const uint8_t *p, const Tail &) {
    Group g;
    const Pair<IQ2_XXS> pair(p, p);
    for (int h = 0; h < 2; h++) {
      g.q[h] = pair.value(0, h, 0);
      g.q[2 + h] = pair.value(0, h, 1);
    }
    g.ws = pair.first_scales();
    return g;
  }
};

// ---- NVFP4: the eight bytes of sixteen elements are the low and high nibbles of eight each

template <> struct Group<NVFP4> {
  static constexpr Order kOrder = Order::quads;
  static constexpr int kOffset = TableGroup<MXFP4>::kOffset;
  static constexpr int kBytes = 4 * sizeof(NVFP4);

  __m512i q[4];
  __m256 ws;
  __m512 scales; // of the halves, block after block

  using Tail = int; // blocks of 64 in the last group
  static Tail tail(int blocks) { return blocks / 2; }

  template <bool Masked, int> static APU_INLINE Group load(const uint8_t *p, Tail count) {
    return load_two<Masked>(p, count < 2 ? count : 2, p + 2 * sizeof(NVFP4), count - 2);
  }
  // At most two blocks at each place.
  static APU_INLINE Group load_quads(const uint8_t *quad0, const uint8_t *quad1, Tail count) {
    return load_two<true>(quad0, count, quad1, count);
  }

  // c: -offset * sum(y) of the halves, in planes.
  APU_INLINE __m512i dot(const int8_t *y, const int32_t *c) const { // 8 * 24 * 127 < 2^15
    __m512i first, second;
    dot_registers(q, y, first, second);
    const __m512i words = _mm512_packs_epi32(first, second);
    return _mm512_add_epi32(to_planes<kOrder>(_mm512_madd_epi16(words, _mm512_set1_epi16(1))), load512(c));
  }
  APU_INLINE __m512 ordered_scales() const { return scales; }
  APU_INLINE __m512 half_scales() const { return _mm512_permutexvar_ps(kOrderedToPlanes, scales); }

private:
  template <bool Masked>
  static APU_INLINE Group load_two(const uint8_t *quad0, int count0, const uint8_t *quad1, int count1) {
    static constexpr Table<int64_t> alternate{[](int i) { return i / 2 + i % 2 * 8; }};
    static constexpr Table<uint8_t> values{[](int i) { return kOffset + kE2m1Values[i % 16]; }};
    const auto bytes = [](const uint8_t *p, bool there) __attribute__((always_inline)) {
      return _mm512_castsi256_si512(Masked ? _mm256_maskz_loadu_epi32(there ? 0xff : 0, p + 4) : load256(p + 4));
    };
    const auto word = [](const uint8_t *p, bool there) __attribute__((always_inline)) {
      return !Masked || there ? static_cast<int32_t>(load32(p)) : 0;
    };
    const uint8_t *p0 = quad0 + sizeof(NVFP4), *p1 = quad1 + sizeof(NVFP4);
    Group g;
    const __m512i n[2] = {_mm512_permutex2var_epi64(bytes(quad0, count0 > 0), alternate, bytes(quad1, count1 > 0)),
                          _mm512_permutex2var_epi64(bytes(p0, count0 > 1), alternate, bytes(p1, count1 > 1))};
    for (int i = 0; i < 2; i++) {
      g.q[i] = _mm512_permutexvar_epi8(n[i], values);
      g.q[2 + i] = _mm512_permutexvar_epi8(_mm512_srli_epi16(n[i], 4), values);
    }
    // Exponent and mantissa in their places make 2^-119 of half the number, denormals too; 0x7f stands for zero.
    const __m512i e4m3 = _mm512_cvtepu8_epi32(
        _mm_setr_epi32(word(quad0, count0 > 0), word(p0, count0 > 1), word(quad1, count1 > 0), word(p1, count1 > 1)));
    const __mmask16 number = _mm512_cmpneq_epi32_mask(e4m3, _mm512_set1_epi32(0x7f));
    const __m512i placed = _mm512_slli_epi32(_mm512_and_si512(e4m3, _mm512_set1_epi32(0x7f)), 20);
    g.scales = _mm512_maskz_mul_ps(number, _mm512_castsi512_ps(placed), _mm512_set1_ps(0x1p119f));
    g.ws = _mm256_set1_ps(1.0f);
    return g;
  }
};

// ---- ternary

template <> struct Group<TQ2_0> : HalvesGroup<TQ2_0> {
  template <bool, int> static APU_INLINE Group load(const uint8_t *p, const Tail &) {
    Group g;
    two_bit_blocks(p, g.q);
    g.ws = broadcast_f16(p + 64);
    return g;
  }
};

template <> struct Group<TQ1_0> : HalvesGroup<TQ1_0> {
  template <bool, int> static APU_INLINE Group load(const uint8_t *p, const Tail &) {
    Group g;
    const __m512i packed = _mm512_maskz_loadu_epi8(low_mask(sizeof(TQ1_0)), p);
    digits<0, 2>(packed, g.q);
    digits<1, 3>(packed, g.q);
    g.ws = broadcast_f16(p + 52);
    return g;
  }

private:
  static constexpr int kPowers[5] = {1, 3, 9, 27, 81};
  struct Digit {
    int byte, power;
  };
  // Of the element at byte i of register r.
  static constexpr Digit digit(int r, int i) {
    const int element = 4 * natural_dword<Order::quads>(16 * r + i / 4) + i % 4;
    if (element < 160) return {element % 32, kPowers[element / 32]};
    if (element < 240) return {32 + element % 16, kPowers[(element - 160) / 16]};
    return {48 + element % 4, kPowers[(element - 240) / 4]};
  }
  // (byte * power mod 256) * 3 / 256 of two registers, even and odd bytes apart.
  template <int R, int S> static APU_INLINE void digits(__m512i packed, __m512i *q) {
    digits_of<R>(packed, q);
    digits_of<S>(packed, q);
  }
  template <int R> static APU_INLINE void digits_of(__m512i packed, __m512i *q) {
    static constexpr Table<uint8_t> bytes{[](int i) { return digit(R, i).byte; }};
    static constexpr Table<uint16_t> even{[](int i) { return digit(R, 2 * i).power; }};
    static constexpr Table<uint16_t> odds{[](int i) { return digit(R, 2 * i + 1).power * 256; }};
    const __m512i v = _mm512_permutexvar_epi8(bytes, packed), low8 = _mm512_set1_epi16(255);
    const __m512i a = _mm512_and_si512(_mm512_mullo_epi16(_mm512_and_si512(v, low8), even), low8);
    const __m512i b = _mm512_mullo_epi16(_mm512_srli_epi16(v, 8), odds); // in the upper byte
    const __m512i first = _mm512_srli_epi16(_mm512_add_epi16(_mm512_add_epi16(a, a), a), 8);
    const __m512i second = _mm512_mulhi_epu16(b, _mm512_set1_epi16(3));
    q[R] = _mm512_or_si512(first, _mm512_slli_epi16(second, 8));
  }
};

} // namespace
} // namespace apu::cpu::avx512

#endif
