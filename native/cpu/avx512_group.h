// Eight consecutive 32-blocks of a weight row (eight legacy blocks, or one K-quant superblock) in registers.
// Group<B>::load unpacks the file's bytes once to 256 unsigned integers and eight float scales; dot() multiplies them
// with one row's int8 activations and returns the blocks' sixteen integers I_h in planes, I_0 of the eight blocks and
// then I_1, so that the canonical step (quant/blocks.h) is one convert and three multiplications per eight blocks.
// Sums inside a block go through 16-bit packs where they provably fit: |weight| * 127 * terms < 2^15.
// The integers keep the order in which the bytes fall out of the file's layout (natural_dword); activations are packed
// to match, which costs nothing per weight row.
#pragma once

#include "avx512_common.h"

#ifdef APU_AVX512

namespace apu::cpu::avx512 {
namespace {

using namespace apu::quant;

inline constexpr int kGroup = 256; // elements

// The order of a group's 256 integers: eight elements of a half of block b stand beside the same eight of block b + 4,
// so that two accumulators hold all sixteen halves, two dwords of each. Registers are (first or last 8 elements, which
// accumulator); by accumulator and lane of four dwords:
//   nibbles: half;                  block mod 4
//   pairs:   block mod 2;           2 (block / 2 mod 2) + half
//   quads:   block / 2 mod 2;       2 (block mod 2) + half
// and blocks, where neighbours stand together: half; block / 2.
// Activations are stored as quads (quantize), which is within lanes of the other two.
enum class Order { nibbles, pairs, quads, blocks };

struct Place { // of eight elements
  int block, half;
};
template <Order O> constexpr Place place(int accumulator, int lane, int high) {
  switch (O) {
  case Order::nibbles: return {lane + 4 * high, accumulator};
  case Order::pairs: return {lane / 2 * 2 + accumulator + 4 * high, lane % 2};
  case Order::blocks: return {2 * lane + high, accumulator};
  default: return {lane / 2 + 2 * accumulator + 4 * high, lane % 2};
  }
}
// What stands at dword i of the order: 8 * block + dword of the block.
template <Order O> constexpr int natural_dword(int i) {
  const Place p = place<O>(i / 16 % 2, i / 4 % 4, i / 2 % 2);
  return 8 * p.block + 4 * p.half + 2 * (i / 32) + i % 2;
}
// The plane that stands at dword i of the sums: per lane those of the first accumulator, then of the second.
template <Order O> constexpr int plane_of(int i) {
  const Place p = place<O>(i / 2 % 2, i / 4, i % 2);
  return 8 * p.half + p.block;
}
template <Order O> constexpr int dword_of_plane(int plane) {
  for (int i = 0; i < 16; i++)
    if (plane_of<O>(i) == plane) return i;
  return 0;
}
template <Order O> inline constexpr Table<int32_t> kToPlanes{[](int i) { return dword_of_plane<O>(i); }};
template <Order O> inline constexpr Table<int32_t> kFromPlanes{[](int i) { return plane_of<O>(i); }};

template <Order O> APU_INLINE __m512i to_planes(__m512i sums) {
  return _mm512_permutexvar_epi32(kToPlanes<O>, sums);
}

APU_INLINE __m512i dot4(__m512i unsigned8, const int8_t *y) {
  return _mm512_dpbusd_epi32(_mm512_setzero_si512(), unsigned8, load512(y));
}
// Per 128-bit lane a0+a1, a2+a3, b0+b1, b2+b3.
APU_INLINE __m512i add_even_odd(__m512i a, __m512i b) {
  const __m512 x = _mm512_castsi512_ps(a), y = _mm512_castsi512_ps(b);
  return _mm512_add_epi32(_mm512_castps_si512(_mm512_shuffle_ps(x, y, 0x88)),
                          _mm512_castps_si512(_mm512_shuffle_ps(x, y, 0xdd)));
}
// The two accumulators of a group and a row.
APU_INLINE void dot_registers(const __m512i *q, const int8_t *y, __m512i &first, __m512i &second) {
  first = _mm512_dpbusd_epi32(dot4(q[0], y), q[2], load512(y + 128));
  second = _mm512_dpbusd_epi32(dot4(q[1], y + 64), q[3], load512(y + 192));
}
// Registers of two times 64 elements to those of an order, by eights.
APU_INLINE void interleave(__m512i a, __m512i b, __m512i &first, __m512i &last) {
  first = _mm512_unpacklo_epi64(a, b);
  last = _mm512_unpackhi_epi64(a, b);
}

// I_0 * d_0 + I_1 * d_1 as the canonical step has it; d in planes.
APU_INLINE __m256 add_halves(__m512 planes, const float *d) {
  const __m256 first = _mm256_mul_ps(_mm512_castps512_ps256(planes), _mm256_loadu_ps(d));
  return _mm256_fmadd_ps(_mm512_extractf32x8_ps(planes, 1), _mm256_loadu_ps(d + 8), first);
}

// acc + wm * s; the groups of K-quants hold the value that is subtracted.
template <class B> APU_INLINE __m256 add_minimum(__m256 wm, __m256 s, __m256 acc) {
  return Traits<B>::elements == kSuperblock ? _mm256_fnmadd_ps(wm, s, acc) : _mm256_fmadd_ps(wm, s, acc);
}
template <class B> APU_INLINE __m512 add_minimum(__m512 wm, __m512 s, __m512 acc) {
  return Traits<B>::elements == kSuperblock ? _mm512_fnmadd_ps(wm, s, acc) : _mm512_fmadd_ps(wm, s, acc);
}

// The high nibble of every byte, in one instruction of the ports that shuffles do not need.
APU_INLINE __m512i high_nibbles(__m512i v) {
  return _mm512_gf2p8affine_epi64_epi8(v, _mm512_set1_epi64(0x1020408000000000), 0);
}

// kOffset: how much larger than the values the unsigned integers are.
template <class B> struct Group;

// ---- legacy types with nibbles
//
// Four blocks (a quad, 72 to 96 bytes) come from one 64-byte load and one of the rest, merged by one byte permute.

template <class B> struct NibbleGroup {
  static constexpr Order kOrder = Order::nibbles;
  static constexpr int kOffset = Traits<B>::offset;
  static constexpr int kBytes = 8 * sizeof(B);
  static constexpr int kQuad = 4 * sizeof(B);
  static constexpr bool kFive = sizeof(B) == sizeof(Q5_0) || sizeof(B) == sizeof(Q5_1);
  static constexpr bool kMin = Traits<B>::minimum == Minimum::per_block;
  static constexpr int kRest = kQuad <= 72 ? 8 : kQuad <= 80 ? 16 : 32; // bytes of the second load
  static constexpr int kSecond = kQuad - kRest;                         // its offset

  __m512i q[4];
  __m256 ws, wm;

  struct Tail { // byte masks of the last group
    __mmask64 first[2];
    __mmask32 rest[2];
  };
  static Tail tail(int blocks) {
    const int bytes = blocks * static_cast<int>(sizeof(B));
    Tail t;
    for (int i = 0; i < 2; i++) {
      t.first[i] = low_mask(bytes - i * kQuad);
      t.rest[i] = static_cast<__mmask32>(low_mask(bytes - i * kQuad - kSecond));
    }
    return t;
  }

  static constexpr int index(int offset) { return offset < 64 ? offset : 64 + offset - kSecond; }
  static constexpr int block(int j) { return j * static_cast<int>(sizeof(B)); }
  static constexpr Table<uint8_t> kNibbles{
      [](int i) { return index(block(i / 16) + static_cast<int>(sizeof(B)) - 16 + i % 16); }};
  static constexpr Table<uint8_t> kEightBytes{
      [](int i) { return 64 * (i / 8 % 2) + block(i / 16) + static_cast<int>(sizeof(B)) - 16 + i % 8; }};
  static constexpr int high_byte(int i) { return block(i / 16) + static_cast<int>(sizeof(B)) - 20 + i % 16 / 8; }
  static constexpr Table<uint8_t> kHighOfLow{[](int i) { return index(high_byte(i)); }};
  static constexpr Table<uint8_t> kHighOfHigh{[](int i) { return index(high_byte(i) + 2); }};
  static constexpr Table<uint8_t> kBit{[](int i) { return 1 << i % 8; }};
  // d of eight blocks then m of eight, from the first loads of two quads; or d and m of four from a quad's two loads.
  static constexpr Table<uint16_t> kScales{[](int i) {
    const int k = i % 8, field = i / 8 % 2;
    return 32 * (k / 4) + block(k % 4) / 2 + field;
  }};
  static constexpr Table<uint16_t> kQuadScales{[](int i) { return index(block(i % 4) + 2 * (i / 4 % 2)) / 2; }};
  template <bool Masked> static APU_INLINE __m512i load_first(const uint8_t *p, const Tail &t, int i) {
    return loaded(Masked ? _mm512_maskz_loadu_epi8(t.first[i], p) : load512(p));
  }
  template <bool Masked> static APU_INLINE __m512i load_rest(const uint8_t *p, const Tail &t, int i) {
    if constexpr (Masked) return _mm512_castsi256_si512(_mm256_maskz_loadu_epi8(t.rest[i], p + kSecond));
    if constexpr (kRest == 8) return _mm512_castsi128_si512(_mm_loadu_si64(p + kSecond));
    if constexpr (kRest == 16) return _mm512_castsi128_si512(load128(p + kSecond));
    return _mm512_castsi256_si512(load256(p + kSecond));
  }

  // The fifth bits of two blocks.
  static APU_INLINE uint64_t qh_pair(const uint8_t *p) {
    uint32_t first, second;
    memcpy(&first, p + sizeof(B) - 20, 4);
    memcpy(&second, p + 2 * sizeof(B) - 20, 4);
    return first | uint64_t{second} << 32;
  }

  template <bool Masked, int Quads> static APU_INLINE NibbleGroup load(const uint8_t *p, const Tail &t) {
    if constexpr (Masked || sizeof(B) != sizeof(Q4_0)) return load_two<Masked, Quads>(p, p + kQuad, t);
    // Blocks so small that eight bytes of each of four lie within 64: two shuffles less.
    NibbleGroup g;
    const __m512i first = loaded(load512(p)), second = loaded(load512(p + kQuad));
    g.split(_mm512_permutex2var_epi8(first, kEightBytes, second),
            _mm512_permutex2var_epi8(load512(p + 8), kEightBytes, load512(p + kQuad + 8)));
    g.ws = _mm256_cvtph_ps(_mm512_castsi512_si128(_mm512_permutex2var_epi16(first, kScales, second)));
    return g;
  }
  // From the nibbles of the first eight bytes of each block and of the last.
  APU_INLINE void split(__m512i first, __m512i last) {
    const __m512i low4 = _mm512_set1_epi8(15);
    q[0] = _mm512_and_si512(first, low4);
    q[2] = _mm512_and_si512(last, low4);
    q[1] = high_nibbles(first);
    q[3] = high_nibbles(last);
  }
  // At most four blocks at each place.
  static APU_INLINE NibbleGroup load_quads(const uint8_t *quad0, const uint8_t *quad1, Tail t) {
    t.first[1] = t.first[0];
    t.rest[1] = t.rest[0];
    return load_two<true, 2>(quad0, quad1, t);
  }
  template <bool Masked, int Quads>
  static APU_INLINE NibbleGroup load_two(const uint8_t *quad0, const uint8_t *quad1, const Tail &t) {
    NibbleGroup g;
    const __m512i low4 = _mm512_set1_epi8(15), zero = _mm512_setzero_si512();
    __m512i first[2] = {zero, zero}, rest[2] = {zero, zero}, nibbles[2] = {zero, zero}, low[2], high[2];
    for (int i = 0; i < 2; i++) {
      if (i >= Quads) {
        low[i] = high[i] = zero;
        continue;
      }
      const uint8_t *p = i == 0 ? quad0 : quad1;
      first[i] = load_first<Masked>(p, t, i);
      rest[i] = load_rest<Masked>(p, t, i);
      nibbles[i] = _mm512_permutex2var_epi8(first[i], kNibbles, rest[i]);
      if constexpr (kFive) {
        __mmask64 low_bits, high_bits;
        if constexpr (Masked) {
          const __m512i bytes = _mm512_permutex2var_epi8(first[i], kHighOfLow, rest[i]);
          const __m512i upper = _mm512_permutex2var_epi8(first[i], kHighOfHigh, rest[i]);
          low_bits = _mm512_test_epi8_mask(bytes, kBit);
          high_bits = _mm512_test_epi8_mask(upper, kBit);
        } else { // the vector ports are the bottleneck: assembled by the scalar ones
          const uint64_t lows = 0x0000ffff0000ffff;
          const uint64_t a = qh_pair(p), b = qh_pair(p + 2 * sizeof(B));
          low_bits = _pext_u64(a, lows) | _pext_u64(b, lows) << 32;
          high_bits = _pext_u64(a, ~lows) | _pext_u64(b, ~lows) << 32;
        }
        const __m512i sixteen = _mm512_set1_epi8(16);
        low[i] = _mm512_and_si512(nibbles[i], low4);
        low[i] = _mm512_mask_add_epi8(low[i], low_bits, low[i], sixteen);
        high[i] = high_nibbles(nibbles[i]);
        high[i] = _mm512_mask_add_epi8(high[i], high_bits, high[i], sixteen);
      }
    }
    if constexpr (kFive) {
      interleave(low[0], low[1], g.q[0], g.q[2]);
      interleave(high[0], high[1], g.q[1], g.q[3]);
    } else {
      g.split(_mm512_unpacklo_epi64(nibbles[0], nibbles[1]), _mm512_unpackhi_epi64(nibbles[0], nibbles[1]));
    }
    if constexpr (!kFive) {
      const __m512i halves = _mm512_permutex2var_epi16(first[0], kScales, first[1]);
      if constexpr (kMin) {
        const __m512 scales = _mm512_cvtph_ps(_mm512_castsi512_si256(halves));
        g.ws = _mm512_castps512_ps256(scales);
        g.wm = _mm512_extractf32x8_ps(scales, 1);
      } else {
        g.ws = _mm256_cvtph_ps(_mm512_castsi512_si128(halves));
      }
    } else {
      const __m128i a = _mm512_castsi512_si128(_mm512_permutex2var_epi16(first[0], kQuadScales, rest[0]));
      __m128i b = _mm_setzero_si128();
      if constexpr (Quads == 2) b = _mm512_castsi512_si128(_mm512_permutex2var_epi16(first[1], kQuadScales, rest[1]));
      g.ws = _mm256_cvtph_ps(_mm_unpacklo_epi64(a, b));
      if constexpr (kMin) g.wm = _mm256_cvtph_ps(_mm_unpackhi_epi64(a, b));
    }
    return g;
  }

  // c: -offset * sum(y) of the halves, where the sums stand.
  APU_INLINE __m512i dot(const int8_t *y, const int32_t *c) const {
    __m512i low, high;
    dot_registers(q, y, low, high);
    const __m512i words = _mm512_packs_epi32(low, high), ones = _mm512_set1_epi16(1); // 8 * 31 * 127 < 2^15
    return to_planes<kOrder>(kMin ? _mm512_madd_epi16(words, ones) : _mm512_dpwssd_epi32(load512(c), words, ones));
  }
};

template <> struct Group<Q4_0> : NibbleGroup<Q4_0> {};
template <> struct Group<Q4_1> : NibbleGroup<Q4_1> {};
template <> struct Group<Q5_0> : NibbleGroup<Q5_0> {};
template <> struct Group<Q5_1> : NibbleGroup<Q5_1> {};

// ---- Q8_0
//
// 272 bytes by five consecutive loads; pairs of blocks are cut out of neighbouring loads. Signed weights become
// unsigned by adding 128, which the correction of 128 * sum(y) takes back.

inline constexpr Table<uint8_t> kQ8Pair[4] = {Table<uint8_t>{[](int i) { return 2 + i + 2 * (i / 32); }},
                                              Table<uint8_t>{[](int i) { return 6 + i + 2 * (i / 32); }},
                                              Table<uint8_t>{[](int i) { return 10 + i + 2 * (i / 32); }},
                                              Table<uint8_t>{[](int i) { return 14 + i + 2 * (i / 32); }}};
inline constexpr Table<uint16_t> kQ8Scales[2] = {Table<uint16_t>{[](int i) { return i % 4 * 17; }},
                                                 Table<uint16_t>{[](int i) { return i % 4 * 17 + 4; }}};

template <> struct Group<Q8_0> {
  static constexpr Order kOrder = Order::quads;
  static constexpr int kOffset = 128;
  static constexpr int kBytes = 8 * sizeof(Q8_0);
  static constexpr int kQuad = 4 * sizeof(Q8_0);

  __m512i q[4];
  __m256 ws, wm;

  struct Tail {
    __mmask64 part[5];
  };
  static Tail tail(int blocks) {
    Tail t;
    for (int i = 0; i < 5; i++) t.part[i] = low_mask(blocks * static_cast<int>(sizeof(Q8_0)) - 64 * i);
    return t;
  }

  template <bool Masked, int Quads> static APU_INLINE Group load(const uint8_t *p, const Tail &t) {
    __m512i part[5];
    for (int i = 0; i < 5; i++) {
      if (i > 2 * Quads)
        part[i] = _mm512_setzero_si512();
      else if constexpr (Masked)
        part[i] = _mm512_maskz_loadu_epi8(t.part[i], p + 64 * i);
      else
        part[i] = i < 4 ? loaded(load512(p + 64 * i)) : _mm512_castsi128_si512(load128(p + 64 * i));
    }
    return unpack(part, kQ8Pair[2], kQ8Pair[3], part + 2, kQ8Scales[1]);
  }
  // At most four blocks at each place.
  static APU_INLINE Group load_quads(const uint8_t *quad0, const uint8_t *quad1, const Tail &t) {
    __m512i part[6];
    for (int i = 0; i < 3; i++) {
      part[i] = _mm512_maskz_loadu_epi8(t.part[i], quad0 + 64 * i);
      part[3 + i] = _mm512_maskz_loadu_epi8(t.part[i], quad1 + 64 * i);
    }
    return unpack(part, kQ8Pair[0], kQ8Pair[1], part + 3, kQ8Scales[0]);
  }

private:
  // Blocks 0..3 lie in three registers from `first` on, 4..7 from `second` on.
  static APU_INLINE Group unpack(const __m512i *first, const Table<uint8_t> &pair2, const Table<uint8_t> &pair3,
                                 const __m512i *second, const Table<uint16_t> &scales) {
    const __m512i sign = _mm512_set1_epi8(-128);
    const __m512i a = _mm512_permutex2var_epi8(first[0], kQ8Pair[0], first[1]);
    const __m512i b = _mm512_permutex2var_epi8(first[1], kQ8Pair[1], first[2]);
    const __m512i c = _mm512_permutex2var_epi8(second[0], pair2, second[1]);
    const __m512i d = _mm512_permutex2var_epi8(second[1], pair3, second[2]);
    Group g;
    interleave(a, c, g.q[0], g.q[2]);
    interleave(b, d, g.q[1], g.q[3]);
    for (int i = 0; i < 4; i++) g.q[i] = _mm512_xor_si512(g.q[i], sign);
    const __m512i low = _mm512_permutex2var_epi16(first[0], kQ8Scales[0], first[1]);
    const __m512i high = _mm512_permutex2var_epi16(second[0], scales, second[1]);
    g.ws = _mm256_cvtph_ps(_mm_unpacklo_epi64(_mm512_castsi512_si128(low), _mm512_castsi512_si128(high)));
    return g;
  }

public:
  // c: -128 * sum(y) of the halves, in planes.
  APU_INLINE __m512i dot(const int8_t *y, const int32_t *c) const {
    __m512i first, second;
    dot_registers(q, y, first, second);
    return _mm512_add_epi32(to_planes<kOrder>(add_even_odd(first, second)), load512(c));
  }
};

// ---- Q4_K, Q5_K

// d * sc and dmin * m of the eight sub-blocks; six-bit fields are unpacked by the scalar ports, which are idle.
APU_INLINE void scales_min_k4(const uint8_t *p, __m256 &ws, __m256 &wm) {
  uint64_t both; // bytes 4..11: six bits of scales 0..3 and minimums 0..3, and on top bits 4..5 of 4..7
  uint32_t last; // bytes 12..15: low nibbles of scales 4..7, high of minimums
  int32_t halves;
  memcpy(&halves, p, 4);
  memcpy(&both, p + 4, 8);
  memcpy(&last, p + 12, 4);
  const uint64_t first = both & 0x3f3f3f3f3f3f3f3f;
  const uint64_t second = ((last | uint64_t{last} << 28) & 0x0f0f0f0f0f0f0f0f) | (both >> 2 & 0x3030303030303030);
  const uint64_t scales = static_cast<uint32_t>(first) | second << 32, mins = first >> 32 | (second >> 32 << 32);
  const __m128 d = _mm_cvtph_ps(_mm_cvtsi32_si128(halves));
  const __m256i sc = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(scales)));
  const __m256i m = _mm256_cvtepu8_epi32(_mm_cvtsi64_si128(static_cast<int64_t>(mins)));
  ws = _mm256_mul_ps(_mm256_cvtepi32_ps(sc), _mm256_broadcastss_ps(d));
  wm = _mm256_mul_ps(_mm256_cvtepi32_ps(m), _mm256_broadcastss_ps(_mm_movehdup_ps(d)));
}

// An affine matrix that moves bits `from` (lower 32 bytes of the zmm) and `from_upper` (upper 32) to bit `to`.
constexpr uint64_t bit_move(int from, int to) {
  return 1ull << from << 8 * (7 - to);
}

// 32 bytes with a bit for each block, eight bytes twice as they stand in both halves: to bit To of each element, the
// bits Base, Base + 4, Base, Base + 4 of the lower lanes and those Step further of the upper ones.
template <int Base, int Step, int To> APU_INLINE __m512i block_bits(__m512i bytes) {
  static constexpr Table<uint64_t> move{[](int i) { return bit_move(Base + i / 4 * Step + i % 2 * 4, To); }};
  return _mm512_gf2p8affine_epi64_epi8(bytes, move, 0);
}
APU_INLINE void both_eights(const uint8_t *p, __m512i &first, __m512i &last) {
  const __m512i bytes = _mm512_broadcast_i64x4(load256(p));
  interleave(bytes, bytes, first, last);
}

template <class B> struct PairsGroup {
  static constexpr Order kOrder = Order::pairs;
  static constexpr int kOffset = 0;
  static constexpr int kBytes = sizeof(B);
  static constexpr bool kFive = sizeof(B) == sizeof(Q5_K);

  __m512i q[4];
  __m256 ws, wm;

  struct Tail {};
  static Tail tail(int) { return {}; }

  template <bool, int> static APU_INLINE PairsGroup load(const uint8_t *p, const Tail &) {
    PairsGroup g;
    scales_min_k4(p, g.ws, g.wm);
    const __m512i low4 = _mm512_set1_epi8(15);
    const uint8_t *qs = p + sizeof(B) - 128;
    const __m512i first = loaded(load512(qs)), second = loaded(load512(qs + 64));
    const __m512i nibbles[2] = {_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second)};
    __m512i bits[2];
    if constexpr (kFive) both_eights(p + 16, bits[0], bits[1]);
    for (int i = 0; i < 2; i++) {
      if constexpr (!kFive) {
        g.q[2 * i] = _mm512_and_si512(nibbles[i], low4);
        g.q[2 * i + 1] = high_nibbles(nibbles[i]);
      } else {
        g.q[2 * i] = _mm512_ternarylogic_epi64(nibbles[i], low4, (block_bits<0, 2, 4>(bits[i])), 0xea); // (a & b) | c
        g.q[2 * i + 1] =
            _mm512_ternarylogic_epi64(_mm512_srli_epi16(nibbles[i], 4), low4, (block_bits<1, 2, 4>(bits[i])), 0xea);
      }
    }
    return g;
  }

  APU_INLINE __m512i dot(const int8_t *y, const int32_t *) const {
    __m512i even, odd;
    dot_registers(q, y, even, odd); // 8 * 31 * 127 < 2^15
    return to_planes<kOrder>(_mm512_madd_epi16(_mm512_packs_epi32(even, odd), _mm512_set1_epi16(1)));
  }
};

template <> struct Group<Q4_K> : PairsGroup<Q4_K> {};
template <> struct Group<Q5_K> : PairsGroup<Q5_K> {};

// ---- types with scales per 16: Q6_K, Q3_K, Q2_K
//
// The scales enter as floats: an integer below 2^24 times a scale is exact as long as the product is below 2^24.

// Sixteen bytes, one for 16 elements each, to planes.
APU_INLINE __m128i byte_planes(__m128i v) {
  return _mm_shuffle_epi8(v, _mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
}

// Scales of halves, block after block, to planes.
inline constexpr Table<int32_t> kOrderedToPlanes{[](int i) { return i % 8 * 2 + i / 8; }};

// From registers of blocks b, b + 4 and b + 1, b + 5.
APU_INLINE void interleave_far(__m512i a, __m512i b, __m512i &first, __m512i &last) {
  static constexpr Table<int64_t> firsts{[](int i) { return i / 4 * 8 + i % 2 * 4 + i / 2 % 2 * 2; }};
  static constexpr Table<int64_t> lasts{[](int i) { return i / 4 * 8 + i % 2 * 4 + i / 2 % 2 * 2 + 1; }};
  first = _mm512_permutex2var_epi64(a, firsts, b);
  last = _mm512_permutex2var_epi64(a, lasts, b);
}

// Moves bits n, n + 1 of the lower and of the upper 32 bytes to bits `to`, to + 1.
template <int Low, int High, int To> APU_INLINE __m512i two_bits(__m512i bits) {
  static constexpr Table<uint64_t> move{[](int i) {
    const int from = i < 4 ? Low : High;
    return bit_move(from, To) | bit_move(from + 1, To + 1);
  }};
  return _mm512_gf2p8affine_epi64_epi8(bits, move, 0);
}

template <class B> struct HalvesGroup {
  static constexpr Order kOrder = Order::quads;
  static constexpr int kBytes = sizeof(B);
  static constexpr int kOffset = Traits<B>::offset;

  __m512i q[4];
  __m256 ws, wm;
  __m128i scales, mins; // (16) int8, block after block

  struct Tail {};
  static Tail tail(int) { return {}; }

  // Without the scales; c: -offset * sum(y) of the halves, in planes.
  APU_INLINE __m512i dot(const int8_t *y, const int32_t *c) const {
    __m512i first, second;
    dot_registers(q, y, first, second);
    const bool narrow = sizeof(B) != sizeof(Q6_K); // 8 * 7 * 127 < 2^15
    const __m512i sums =
        to_planes<kOrder>(narrow ? _mm512_madd_epi16(_mm512_packs_epi32(first, second), _mm512_set1_epi16(1))
                                 : add_even_odd(first, second));
    return kOffset == 0 ? sums : _mm512_add_epi32(sums, load512(c));
  }
  // As floats, in planes or block after block.
  APU_INLINE __m512 ordered_scales() const { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(scales)); }
  APU_INLINE __m512 half_scales() const { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(byte_planes(scales))); }
  APU_INLINE __m512 half_minimums() const { return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(byte_planes(mins))); }
};

APU_INLINE __m256 broadcast_f16(const uint8_t *p) {
  uint16_t h;
  memcpy(&h, p, 2);
  return _mm256_cvtph_ps(_mm_set1_epi16(static_cast<int16_t>(h)));
}

template <> struct Group<Q6_K> : HalvesGroup<Q6_K> {
  template <bool, int> static APU_INLINE Group load(const uint8_t *p, const Tail &) {
    Group g;
    const __m512i low4 = _mm512_set1_epi8(15);
    __m512i z[4];
    for (int i = 0; i < 2; i++) {
      const __m512i nibbles = loaded(load512(p + 64 * i));
      const __m512i bits = _mm512_broadcast_i64x4(load256(p + 128 + 32 * i));
      z[2 * i] = _mm512_ternarylogic_epi64(nibbles, low4, (two_bits<0, 2, 4>(bits)), 0xea); // (a & b) | c
      z[2 * i + 1] = _mm512_ternarylogic_epi64(_mm512_srli_epi16(nibbles, 4), low4, (two_bits<4, 6, 4>(bits)), 0xea);
    }
    interleave(z[0], z[2], g.q[0], g.q[2]);
    interleave(z[1], z[3], g.q[1], g.q[3]);
    g.scales = load128(p + 192);
    g.ws = broadcast_f16(p + 208);
    return g;
  }
};

// 64 bytes of Q2_K's qs.
APU_INLINE void two_bit_blocks(const uint8_t *p, __m512i *q) {
  const __m512i bits = loaded(load512(p)), low2 = _mm512_set1_epi8(3);
  __m512i first, last; // blocks 0, 1, 4, 5, and the others four bits higher
  interleave_far(bits, _mm512_srli_epi16(bits, 2), first, last);
  q[0] = _mm512_and_si512(first, low2);
  q[1] = _mm512_and_si512(_mm512_srli_epi16(first, 4), low2);
  q[2] = _mm512_and_si512(last, low2);
  q[3] = _mm512_and_si512(_mm512_srli_epi16(last, 4), low2);
}

template <> struct Group<Q2_K> : HalvesGroup<Q2_K> {
  template <bool, int> static APU_INLINE Group load(const uint8_t *p, const Tail &) {
    Group g;
    two_bit_blocks(p + 16, g.q);
    g.scales = _mm_and_si128(load128(p), _mm_set1_epi8(15));
    g.mins = _mm_and_si128(_mm_srli_epi16(load128(p), 4), _mm_set1_epi8(15));
    g.ws = broadcast_f16(p + 80);
    g.wm = broadcast_f16(p + 82);
    return g;
  }
};

template <> struct Group<Q3_K> : HalvesGroup<Q3_K> {
  template <bool, int> static APU_INLINE Group load(const uint8_t *p, const Tail &) {
    Group g;
    const __m512i bits = loaded(load512(p + 32)), low2 = _mm512_set1_epi8(3);
    __m512i twos[2], high[2]; // blocks 0, 1, 4, 5, and the others four bits higher
    interleave_far(bits, _mm512_srli_epi16(bits, 2), twos[0], twos[1]);
    both_eights(p, high[0], high[1]);
    for (int i = 0; i < 2; i++) {
      g.q[2 * i] = _mm512_ternarylogic_epi64(twos[i], low2, (block_bits<0, 1, 2>(high[i])), 0xea); // (a & b) | c
      g.q[2 * i + 1] =
          _mm512_ternarylogic_epi64(_mm512_srli_epi16(twos[i], 4), low2, (block_bits<2, 1, 2>(high[i])), 0xea);
    }
    uint64_t low;
    uint32_t top;
    memcpy(&low, p + 96, 8);
    memcpy(&top, p + 104, 4);
    const uint64_t nibbles = 0x0f0f0f0f0f0f0f0full, tops = 0x3030303030303030ull;
    const uint64_t top01 = (top << 4 | uint64_t{top} << 34) & tops; // bits 0..1 of a byte, then bits 2..3
    const uint64_t top23 = (uint64_t{top} | uint64_t{top} >> 2 << 32) & tops;
    const __m128i sixes = _mm_set_epi64x(static_cast<int64_t>((low >> 4 & nibbles) | top23),
                                         static_cast<int64_t>((low & nibbles) | top01));
    g.scales = _mm_sub_epi8(sixes, _mm_set1_epi8(32));
    g.ws = broadcast_f16(p + 108);
    return g;
  }
};

} // namespace
} // namespace apu::cpu::avx512

#endif
