// Groups (avx512_group.h) of the types whose weights are codes: codebooks, tables of sixteen values, ternary digits.
// UnpackedGroup takes 32-blocks apart with the scalar code of quant/unpack.h: right for any type, for those that few
// files use.
#pragma once

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

// ---- by scalar code

// Where eight elements, the first or the last of a half, stand in Order::quads.
constexpr int quads_place(int block, int half, int last) {
  return 128 * last + 64 * (block / 2 % 2) + 16 * (2 * (block % 2) + half) + 8 * (block / 4);
}

template <class B> struct UnpackedGroup {
  static constexpr Order kOrder = Order::quads;
  static constexpr int kOffset = 128;
  static constexpr int kBlocks = Traits<B>::blocks32;
  static constexpr int kBytes = 8 / kBlocks * static_cast<int>(sizeof(B));

  __m512i q[4];
  __m256 ws;
  __m512 scales; // of the halves, block after block

  using Tail = int; // blocks of the last group
  static Tail tail(int blocks) { return blocks; }

  template <bool Masked, int> static APU_INLINE UnpackedGroup load(const uint8_t *p, Tail t) {
    Unpacked to{};
    unpack(p, Masked ? t : 8, 0, to);
    return to.group();
  }
  // At most four blocks at each place.
  static APU_INLINE UnpackedGroup load_quads(const uint8_t *quad0, const uint8_t *quad1, Tail t) {
    Unpacked to{};
    unpack(quad0, t, 0, to);
    unpack(quad1, t, 4, to);
    return to.group();
  }

  // c: -128 * sum(y) of the halves, in planes.
  APU_INLINE __m512i dot(const int8_t *y, const int32_t *c) const {
    __m512i first, second;
    dot_registers(q, y, first, second);
    return _mm512_add_epi32(to_planes<kOrder>(add_even_odd(first, second)), load512(c));
  }
  APU_INLINE __m512 ordered_scales() const { return scales; }
  APU_INLINE __m512 half_scales() const {
    static constexpr Table<int32_t> planes{[](int i) { return i % 8 * 2 + i / 8; }};
    return _mm512_permutexvar_ps(planes, scales);
  }

private:
  struct Unpacked {
    alignas(64) int8_t q[kGroup];
    alignas(64) float scales[16];
    alignas(32) float ws[8];

    APU_INLINE UnpackedGroup group() const {
      UnpackedGroup g;
      for (int i = 0; i < 4; i++) g.q[i] = _mm512_xor_si512(load512(q + 64 * i), _mm512_set1_epi8(-128));
      g.ws = _mm256_load_ps(ws);
      g.scales = _mm512_load_ps(scales);
      return g;
    }
  };
  // `count` blocks to block `first` on.
  static __attribute__((noinline)) void unpack(const uint8_t *p, int count, int first, Unpacked &to) {
    Block32 block;
    for (int b = 0; b < count; b++) {
      unpack_block(*reinterpret_cast<const B *>(p + b / kBlocks * sizeof(B)), b % kBlocks, block);
      const int at = first + b;
      for (int i = 0; i < 4; i++) memcpy(to.q + quads_place(at, i / 2, i % 2), block.q + 8 * i, 8);
      to.ws[at] = block.ws;
      memcpy(to.scales + 2 * at, block.sc, sizeof block.sc);
    }
  }
};

template <> struct Group<IQ1_S> : UnpackedGroup<IQ1_S> {};
template <> struct Group<IQ1_M> : UnpackedGroup<IQ1_M> {};
template <> struct Group<IQ2_XS> : UnpackedGroup<IQ2_XS> {};
template <> struct Group<IQ2_S> : UnpackedGroup<IQ2_S> {};
template <> struct Group<IQ3_XXS> : UnpackedGroup<IQ3_XXS> {};
template <> struct Group<IQ3_S> : UnpackedGroup<IQ3_S> {};
template <> struct Group<NVFP4> : UnpackedGroup<NVFP4> {};
template <> struct Group<TQ1_0> : UnpackedGroup<TQ1_0> {};
template <> struct Group<TQ2_0> : UnpackedGroup<TQ2_0> {};

} // namespace
} // namespace apu::cpu::avx512

#endif
