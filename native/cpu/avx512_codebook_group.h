// Groups (avx512_group.h) of the types whose weights are codes: codebooks, tables of sixteen values, ternary digits.
// UnpackedGroup takes 32-blocks apart with the scalar code of quant/unpack.h: right for any type, for those that few
// files use.
#pragma once

#include "avx512_group.h"

#ifdef APU_AVX512

#include "../quant/unpack.h"

namespace apu::cpu::avx512 {
namespace {

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
template <> struct Group<IQ2_XXS> : UnpackedGroup<IQ2_XXS> {};
template <> struct Group<IQ2_XS> : UnpackedGroup<IQ2_XS> {};
template <> struct Group<IQ2_S> : UnpackedGroup<IQ2_S> {};
template <> struct Group<IQ3_XXS> : UnpackedGroup<IQ3_XXS> {};
template <> struct Group<IQ3_S> : UnpackedGroup<IQ3_S> {};
template <> struct Group<IQ4_NL> : UnpackedGroup<IQ4_NL> {};
template <> struct Group<IQ4_XS> : UnpackedGroup<IQ4_XS> {};
template <> struct Group<MXFP4> : UnpackedGroup<MXFP4> {};
template <> struct Group<NVFP4> : UnpackedGroup<NVFP4> {};
template <> struct Group<TQ1_0> : UnpackedGroup<TQ1_0> {};
template <> struct Group<TQ2_0> : UnpackedGroup<TQ2_0> {};

} // namespace
} // namespace apu::cpu::avx512

#endif
