// Quantised matrix times 1 to 7 rows of activations: bound by memory, every weight byte is read once, one row of
// the matrix after the other (several rows at a time defeat the prefetcher: 50-60% of the read limit).
// Each group of eight 32-blocks is unpacked once and multiplied with all T rows. The activations are first copied to
// `work` in the order in which the type's bytes unpack, K bytes per row and call.
#include "avx512.h"
#include "avx512_group.h"

#ifdef APU_AVX512

#include "../include/apu.h"

namespace apu::cpu::avx512 {
namespace {

// Activations of one call; y and c packed in `work`, the rest where the caller keeps it.
struct Packed {
  const int8_t *y;  // (T, groups, 256) in the order of the type's group
  const int32_t *c; // (T, groups, 8) what Group::dot subtracts, or sixteen int16 sums for scales per 16
  const float *d;   // (T, groups, 8)
  const float *s;   // (T, groups, 8)
  size_t groups;
};

size_t groups_of(uint32_t k) {
  return (k + kGroup - 1) / kGroup;
}
constexpr int kPrefetch = 512; // bytes ahead; the best of 0 to 4096 for every type, by 0 to 13% of the read limit
constexpr size_t kGroupBytes = kGroup + 4 * kLanes;

// 256 bytes of eight blocks to the order of piece_offset().
template <Order O> APU_INLINE void reorder(const int8_t *from, int8_t *to) {
  __m512i z[4];
  for (int i = 0; i < 4; i++) z[i] = load512(from + 64 * i);
  constexpr int other = O == Order::split ? 2 : 1; // the load that holds the partner's lanes
  for (int i = 0; i < 2; i++) {
    const __m512i a = z[other == 1 ? 2 * i : i], b = z[other == 1 ? 2 * i + 1 : i + 2];
    constexpr int low = O == Order::nibbles ? 0x88 : 0x44, high = O == Order::nibbles ? 0xdd : 0xee;
    _mm512_store_si512(to + 128 * i, _mm512_shuffle_i64x2(a, b, low));
    _mm512_store_si512(to + 128 * i + 64, _mm512_shuffle_i64x2(a, b, high));
  }
}

inline constexpr Table<int32_t> kEven{[](int i) { return 2 * i % 16; }};
inline constexpr Table<int32_t> kOdd{[](int i) { return 2 * i % 16 + 1; }};

template <class B> Packed pack(const ActBlocks &a, uint32_t rows, void *work) {
  constexpr Order order = Group<B>::kOrder;
  constexpr int offset = sizeof(B) == sizeof(Q8_0) ? 128 : Traits<B>::offset;
  const size_t groups = a.blocks / kLanes, all = rows * groups;
  auto *y = reinterpret_cast<int8_t *>((reinterpret_cast<uintptr_t>(work) + 63) & ~uintptr_t{63});
  auto *c = reinterpret_cast<int32_t *>(y + all * kGroup);
  for (size_t g = 0; g < all; g++) {
    if constexpr (order != Order::natural) reorder<order>(a.q + g * kGroup, y + g * kGroup);
    const __m512i halves = load512(a.sum16 + 16 * g);
    if constexpr (Traits<B>::sub_block == 16)
      _mm256_store_si256(reinterpret_cast<__m256i *>(c + 8 * g), _mm512_cvtepi32_epi16(halves));
    else if constexpr (offset != 0)
      _mm256_store_si256(reinterpret_cast<__m256i *>(c + 8 * g),
                         _mm256_mullo_epi32(add_lanes(halves, kEven, kOdd), _mm256_set1_epi32(offset)));
  }
  return {order == Order::natural ? a.q : y, c, a.d, a.s, groups};
}

// The canonical step of a group's eight blocks for T rows.
template <class B, int T, int Quads, class W>
APU_INLINE void accumulate(const W &w, const Packed &a, size_t g, __m256 *acc) {
#pragma GCC unroll 8
  for (int t = 0; t < T; t++) {
    const size_t at = t * a.groups + g;
    const __m256i integers = w.template dot<Quads>(a.y + at * kGroup, a.c + at * kLanes);
    const __m256 d = _mm256_loadu_ps(a.d + at * kLanes);
    acc[t] = _mm256_fmadd_ps(_mm256_cvtepi32_ps(integers), _mm256_mul_ps(w.ws, d), acc[t]);
    if constexpr (Traits<B>::minimum == Minimum::per_half)
      acc[t] = _mm256_fnmadd_ps(_mm256_cvtepi32_ps(w.minimums(a.c + at * kLanes)), _mm256_mul_ps(w.wm, d), acc[t]);
    if constexpr (Traits<B>::minimum == Minimum::per_block)
      acc[t] = add_minimum<B>(w.wm, _mm256_loadu_ps(a.s + at * kLanes), acc[t]);
  }
}

// All full groups of a row; returns what follows them.
template <class B, int T>
APU_INLINE const uint8_t *full_groups(const uint8_t *p, const Packed &a, size_t full, __m256 *acc) {
  using G = Group<B>;
  for (int t = 0; t < T; t++) acc[t] = _mm256_setzero_ps();
#pragma GCC unroll 1
  for (size_t g = 0; g < full; g++, p += G::kBytes) {
    for (int i = 0; i < G::kBytes; i += 64)
      _mm_prefetch(reinterpret_cast<const char *>(p) + kPrefetch + i, _MM_HINT_T0);
    accumulate<B, T, 2>(G::template load<false, 2>(p, {}), a, g, acc);
  }
  return p;
}

template <class B, int T>
__attribute__((noinline)) void rows(const Matrix &w, const Packed &a, uint32_t begin, uint32_t end, float *y,
                                    size_t y_stride) {
  using G = Group<B>;
  const size_t full = w.k / kGroup;
  const int rest = static_cast<int>(w.k % kGroup / kBlock); // blocks of the last group; 0 for K-quants
  const auto tail = G::tail(rest);
  const uint8_t *row = w.data + begin * w.row_stride;
  for (uint32_t n = begin; n < end; n++, row += w.row_stride) {
    __m256 acc[T];
    const uint8_t *p = full_groups<B, T>(row, a, full, acc);
    if constexpr (Traits<B>::elements == kBlock) {
      if (rest > 4)
        accumulate<B, T, 2>(G::template load<true, 2>(p, tail), a, full, acc);
      else if (rest > 0)
        accumulate<B, T, 1>(G::template load<true, 1>(p, tail), a, full, acc);
    }
    for (int t = 0; t < T; t++) y[t * y_stride + (n - begin)] = sum8(acc[t]);
  }
}

// One row of activations, and matrix rows that end in at most four blocks (K = 576, 640): the ends of two rows make
// one group. Returns how many rows it did.
template <class B>
__attribute__((noinline)) uint32_t row_pairs(const Matrix &w, const Packed &a, uint32_t begin, uint32_t end, float *y) {
  using G = Group<B>;
  const size_t full = w.k / kGroup;
  const auto tail = G::tail_twice(static_cast<int>(w.k % kGroup / kBlock));
  alignas(64) int8_t y_twice[kGroup];
  alignas(64) int32_t c_twice[kLanes];
  alignas(64) float d_twice[kLanes], s_twice[kLanes];
  for (int i = 0; i < 2; i++) {
    memcpy(y_twice + 128 * i, a.y + full * kGroup, 128);
    memcpy(c_twice + 4 * i, a.c + full * kLanes, 16);
    memcpy(d_twice + 4 * i, a.d + full * kLanes, 16);
    memcpy(s_twice + 4 * i, a.s + full * kLanes, 16);
  }
  const Packed twice{y_twice, c_twice, d_twice, s_twice, 1};
  const uint8_t *row = w.data + begin * w.row_stride;
  uint32_t n = begin;
  for (; n + 2 <= end; n += 2, row += 2 * w.row_stride) {
    __m256 first, second;
    const uint8_t *p0 = full_groups<B, 1>(row, a, full, &first);
    const uint8_t *p1 = full_groups<B, 1>(row + w.row_stride, a, full, &second);
    __m256 lows = _mm256_insertf128_ps(first, _mm256_castps256_ps128(second), 1);
    accumulate<B, 1, 2>(G::template load_quads<true, 2>(p0, p1, tail), twice, 0, &lows);
    y[n - begin] = sum8(_mm256_blend_ps(first, lows, 0x0f));
    y[n - begin + 1] = sum8(_mm256_insertf128_ps(second, _mm256_extractf128_ps(lows, 1), 0));
  }
  return n - begin;
}

template <class B>
void matvec_type(const Matrix &w, const ActBlocks &a, uint32_t count, uint32_t begin, uint32_t end, float *y,
                 size_t y_stride, void *work) {
  const Packed packed = pack<B>(a, count, work);
  switch (count) {
  case 1:
    if constexpr (Group<B>::kOrder == Order::nibbles) {
      const uint32_t rest = w.k % kGroup / kBlock;
      if (rest >= 1 && rest <= 4) {
        const uint32_t done = row_pairs<B>(w, packed, begin, end, y);
        begin += done;
        y += done;
      }
    }
    return rows<B, 1>(w, packed, begin, end, y, y_stride);
  case 2: return rows<B, 2>(w, packed, begin, end, y, y_stride);
  case 3: return rows<B, 3>(w, packed, begin, end, y, y_stride);
  case 4: return rows<B, 4>(w, packed, begin, end, y, y_stride);
  case 5: return rows<B, 5>(w, packed, begin, end, y, y_stride);
  case 6: return rows<B, 6>(w, packed, begin, end, y, y_stride);
  default: return rows<B, 7>(w, packed, begin, end, y, y_stride);
  }
}

} // namespace

size_t matvec_work_bytes(uint32_t k) {
  return kMatvecRows * groups_of(k) * kGroupBytes + 64;
}

void matvec(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
            void *work) {
  switch (w.dtype) {
  case APU_Q4_0: return matvec_type<Q4_0>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q4_1: return matvec_type<Q4_1>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q5_0: return matvec_type<Q5_0>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q5_1: return matvec_type<Q5_1>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q8_0: return matvec_type<Q8_0>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q2_K: return matvec_type<Q2_K>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q3_K: return matvec_type<Q3_K>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q4_K: return matvec_type<Q4_K>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q5_K: return matvec_type<Q5_K>(w, a, rows, begin, end, y, y_stride, work);
  case APU_Q6_K: return matvec_type<Q6_K>(w, a, rows, begin, end, y, y_stride, work);
  default: return;
  }
}

} // namespace apu::cpu::avx512

#endif
