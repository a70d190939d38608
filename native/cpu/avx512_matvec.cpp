// Quantised matrix times few rows of activations: bound by memory, every weight byte is read once, one row of
// the matrix after the other (several rows at a time defeat the prefetcher: 50-60% of the read limit).
// Each group of eight 32-blocks is unpacked once and multiplied with all T rows. Where the type's bytes do not unpack
// in the order of the activations, these are first copied to `work`, K bytes per row and call.
#include "avx512.h"
#include "avx512_codebook_group.h"

#ifdef APU_AVX512

#include "../quant/visit.h"

namespace apu::cpu::avx512 {
namespace {

// Activations of one call; y and c packed in `work`, the rest where the caller keeps it.
struct Packed {
  const int8_t *y;  // (T, groups, 256) in the order of the type's group
  const int32_t *c; // (T, groups, 16) what Group::dot adds
  const float *d;   // (T, groups, 2, 8)
  const float *s16; // (T, groups, 2, 8)
  const float *s;   // (T, groups, 8)
  size_t groups;

  Packed from(size_t row) const {
    const size_t at = row * groups;
    return {y + kGroup * at, c + 16 * at, d + 16 * at, s16 + 16 * at, s + kLanes * at, groups};
  }
};
constexpr size_t kFarBytes = 2560;              // of rows that are read in two places
constexpr size_t kPassBytes = size_t{64} << 10; // of weights, when there are several passes

size_t groups_of(uint32_t k) {
  return (k + kGroup - 1) / kGroup;
}
// Bytes ahead, into the first level past the others: lines that leave a cache unused push nothing out of the next one,
// which is worth 15 to 30% of the speed; the more a type computes, the further ahead.
template <class B> constexpr int kPrefetch = sizeof(B) == sizeof(Q8_0) ? 128 : 2048;
// Passes over five rows and more are bound by computation, and may be followed by another over the same weights.
template <int T> constexpr _mm_hint kHint = T < 5 ? _MM_HINT_NTA : _MM_HINT_T0;
constexpr size_t kGroupBytes = kGroup + 4 * 2 * kLanes;

// One group: the activations' 256 bytes to the order of the type, and the correction from the halves' sums.
template <class B> constexpr bool kReorders = Group<B>::kOrder != Order::quads;
template <class B> APU_INLINE void pack_values(const __m512i *z, int8_t *y) {
  constexpr bool nibbles = Group<B>::kOrder == Order::nibbles;
  for (int i = 0; i < 4; i += 2) {
    _mm512_store_si512(y + 64 * i, _mm512_shuffle_i64x2(z[i], z[i + 1], nibbles ? 0x88 : 0x44));
    _mm512_store_si512(y + 64 * i + 64, _mm512_shuffle_i64x2(z[i], z[i + 1], nibbles ? 0xdd : 0xee));
  }
}
template <class B> APU_INLINE void pack_sums(__m512i sums, int32_t *c) {
  constexpr int offset = Group<B>::kOffset;
  if constexpr (offset == 0) return;
  sums = _mm512_mullo_epi32(sums, _mm512_set1_epi32(-offset));
  if constexpr (Group<B>::kOrder == Order::nibbles) sums = _mm512_permutexvar_epi32(kFromPlanes<Order::nibbles>, sums);
  _mm512_store_si512(c, sums);
}

template <class B> Packed pack(const ActBlocks &a, uint32_t rows, void *work) {
  const size_t groups = a.blocks / kLanes, all = rows * groups;
  auto *y = reinterpret_cast<int8_t *>((reinterpret_cast<uintptr_t>(work) + 63) & ~uintptr_t{63});
  auto *c = reinterpret_cast<int32_t *>(y + all * kGroup);
  for (size_t g = 0; g < all; g++) {
    pack_sums<B>(load512(a.sum16 + 16 * g), c + 16 * g);
    if constexpr (!kReorders<B>) continue;
    __m512i z[4];
    for (int i = 0; i < 4; i++) z[i] = load512(a.q + g * kGroup + 64 * i);
    pack_values<B>(z, y + g * kGroup);
  }
  return {kReorders<B> ? y : a.q, c, a.d, a.s16, a.s, groups};
}

// The canonical step of a group's eight blocks for T rows.
template <class B, int T, class W> APU_INLINE void accumulate(const W &w, const Packed &a, size_t g, __m256 *acc) {
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
    const size_t at = t * a.groups + g;
    __m512 integers = _mm512_cvtepi32_ps(w.dot(a.y + at * kGroup, a.c + 16 * at));
    if constexpr (Traits<B>::sub_block == 16) integers = _mm512_mul_ps(integers, w.half_scales());
    acc[t] = _mm256_fmadd_ps(w.ws, add_halves(integers, a.d + 16 * at), acc[t]);
    if constexpr (Traits<B>::minimum == Minimum::per_half)
      acc[t] = add_minimum<B>(w.wm, add_halves(w.half_minimums(), a.s16 + 16 * at), acc[t]);
    if constexpr (Traits<B>::minimum == Minimum::per_block)
      acc[t] = add_minimum<B>(w.wm, _mm256_loadu_ps(a.s + kLanes * at), acc[t]);
  }
}

// R rows of the matrix at a time, `apart` rows from each other, begin to end (a multiple of R rows). Two streams far
// apart are read faster than one, by 10 to 20%, as the prefetchers stop at the end of a page, as long as rows are
// shorter than that; three or four are slower.
// `ends` holds the last group's activations with its first four blocks twice: where rows end in at most four blocks
// (K = 576, 640), the ends of two rows make one group.
template <class B, int T, int R>
__attribute__((noinline)) void rows(const Matrix &w, const Packed &a, const Packed &ends, uint32_t begin, uint32_t end,
                                    uint32_t apart, float *y, size_t y_stride) {
  using G = Group<B>;
  const size_t full = w.k / kGroup;
  const int rest = static_cast<int>(w.k % kGroup / kBlock); // blocks of the last group; 0 for K-quants
  const auto tail = G::tail(rest);
  const uint8_t *row = w.data + begin * w.row_stride;
  const auto *limit = reinterpret_cast<const char *>(w.data + end * w.row_stride);
  const ptrdiff_t jump = w.next ? reinterpret_cast<const char *>(w.next) - limit : 0;
  const uint32_t step = apart < R ? R : 1;
  for (uint32_t i = 0; i < (end - begin) / R; i++, row += step * w.row_stride, y += step) {
    __m256 acc[R][T];
    const uint8_t *p[R];
#pragma GCC unroll 2
    for (int r = 0; r < R; r++) {
      for (int t = 0; t < T; t++) acc[r][t] = _mm256_setzero_ps();
      p[r] = row + r * apart * w.row_stride;
#pragma GCC unroll 1
      for (size_t g = 0; g < full; g++, p[r] += G::kBytes) {
        const char *ahead = reinterpret_cast<const char *>(p[r]) + kPrefetch<B>;
        ahead += ahead < limit ? 0 : jump;
        for (int i = 0; i < G::kBytes; i += 64) _mm_prefetch(ahead + i, kHint<T>);
        accumulate<B, T>(G::template load<false, 2>(p[r], tail), a, g, acc[r]);
      }
    }
    if constexpr (Traits<B>::elements != kSuperblock) {
      if (R == 2 && rest > 0 && rest <= 4) {
        __m256 both[T];
        for (int t = 0; t < T; t++) both[t] = _mm256_insertf128_ps(acc[0][t], _mm256_castps256_ps128(acc[R - 1][t]), 1);
        accumulate<B, T>(G::load_quads(p[0], p[R - 1], tail), ends, 0, both);
        for (int t = 0; t < T; t++) {
          acc[0][t] = _mm256_blend_ps(acc[0][t], both[t], 0x0f);
          acc[R - 1][t] = _mm256_insertf128_ps(acc[R - 1][t], _mm256_extractf128_ps(both[t], 1), 0);
        }
      } else {
        for (int r = 0; r < R; r++) {
          if (rest > 4)
            accumulate<B, T>(G::template load<true, 2>(p[r], tail), a, full, acc[r]);
          else if (rest > 0)
            accumulate<B, T>(G::template load<true, 1>(p[r], tail), a, full, acc[r]);
        }
      }
    }
    for (int r = 0; r < R; r++)
      for (int t = 0; t < T; t++) y[t * y_stride + r * apart] = sum8(acc[r][t]);
  }
}

template <class B, int T>
void by_twos(const Matrix &w, const Packed &a, const Packed &ends, uint32_t begin, uint32_t end, uint32_t apart,
             float *y, size_t y_stride) {
  const uint32_t even = begin + (end - begin) / 2 * 2;
  rows<B, T, 2>(w, a, ends, begin, even, apart, y, y_stride);
  rows<B, T, 1>(w, a, ends, even, end, 1, y + (even - begin), y_stride);
}

// For at most four blocks in the last group. What loads read soon after must be stored whole: results
// that miss the cache would keep it waiting in the store queue.
template <class B, int T>
void row_pairs(const Matrix &w, const ActBlocks &all, const Packed &a, uint32_t begin, uint32_t end, float *y,
               size_t y_stride) {
  static constexpr Table<int32_t> twice{[](int i) { return i % 4 + i / 8 * 8; }}; // the first four of each plane
  alignas(64) int8_t q[T * kGroup];
  alignas(64) int32_t c[T * 16];
  alignas(64) float d[T * 16], s[T * 8];
  for (int t = 0; t < T; t++) {
    const size_t at = (t + 1) * a.groups - 1;
    __m512i z[4];
    for (int i = 0; i < 4; i++) {
      z[i] = load512(all.q + at * kGroup + 64 * i);
      z[i] = _mm512_unpacklo_epi64(z[i], z[i]);
      if constexpr (!kReorders<B>) _mm512_store_si512(q + t * kGroup + 64 * i, z[i]);
    }
    if constexpr (kReorders<B>) pack_values<B>(z, q + t * kGroup);
    pack_sums<B>(_mm512_permutexvar_epi32(twice, load512(all.sum16 + 16 * at)), c + 16 * t);
    _mm512_store_ps(d + 16 * t, _mm512_permutexvar_ps(twice, _mm512_loadu_ps(a.d + 16 * at)));
    _mm256_store_ps(s + 8 * t, _mm256_broadcast_ps(reinterpret_cast<const __m128 *>(a.s + 8 * at)));
  }
  by_twos<B, T>(w, a, {q, c, d, nullptr, s, 1}, begin, end, 1, y, y_stride);
}

template <class B>
void one_pass(const Matrix &w, const Packed &a, uint32_t count, uint32_t begin, uint32_t end, float *y,
              size_t y_stride) {
  const uint32_t apart = w.row_stride <= kFarBytes ? (end - begin) / 2 : 1;
  switch (count) {
  case 1: return by_twos<B, 1>(w, a, a, begin, end, apart, y, y_stride);
  case 2: return by_twos<B, 2>(w, a, a, begin, end, apart, y, y_stride);
  case 3: return rows<B, 3, 1>(w, a, a, begin, end, 1, y, y_stride);
  case 4: return rows<B, 4, 1>(w, a, a, begin, end, 1, y, y_stride);
  case 5: return rows<B, 5, 1>(w, a, a, begin, end, 1, y, y_stride);
  case 6: return rows<B, 6, 1>(w, a, a, begin, end, 1, y, y_stride);
  case 7: return rows<B, 7, 1>(w, a, a, begin, end, 1, y, y_stride);
  default: return rows<B, 8, 1>(w, a, a, begin, end, 1, y, y_stride);
  }
}

template <class B>
void matvec_type(const Matrix &w, const ActBlocks &a, uint32_t count, uint32_t begin, uint32_t end, float *y,
                 size_t y_stride, void *work) {
  const Packed packed = pack<B>(a, count, work);
  if (count > kPassRows) { // several passes, over as many weights as stay in the second cache level
    const auto block = static_cast<uint32_t>(1 + kPassBytes / w.row_stride);
    for_passes(w, count, begin, end, block,
               [&](const Matrix &part, uint32_t t, uint32_t t_end, uint32_t n, uint32_t last) {
                 one_pass<B>(part, packed.from(t), t_end - t, n, last, y + t * y_stride + (n - begin), y_stride);
               });
    return;
  }
  if constexpr (Traits<B>::elements != kSuperblock) {
    const uint32_t rest = w.k % kGroup / kBlock;
    if (count <= 2 && rest >= 1 && rest <= 4) {
      if (count == 1) return row_pairs<B, 1>(w, a, packed, begin, end, y, y_stride);
      return row_pairs<B, 2>(w, a, packed, begin, end, y, y_stride);
    }
  }
  one_pass<B>(w, packed, count, begin, end, y, y_stride);
}

} // namespace

size_t matvec_work_bytes(uint32_t k) {
  return kManyRows * groups_of(k) * kGroupBytes + 64;
}

void matvec(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
            void *work) {
  with_block_type(w.dtype, [&]<class B>() {
    if constexpr (kByPairs<B>)
      matvec_pairs(w, a, rows, begin, end, y, y_stride, work);
    else
      matvec_type<B>(w, a, rows, begin, end, y, y_stride, work);
  });
}

} // namespace apu::cpu::avx512

#endif
