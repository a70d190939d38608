// IQ2_XXS times few rows of activations: bound by arithmetic (see avx512_iq2xxs.h). The chain from a superblock's
// bytes to its place in the sums is longer than the processor's schedulers, so what does not depend on activations is
// done a pair of superblocks ahead, across the ends of rows, and for one row of activations the last steps a pair late.
// Sums of a pair stay in one register, lane l of four: blocks 2 l, 2 l + 1 of the first superblock, then of the second;
// accumulators change places between the two, which follow each other in the canonical sum.
#include "avx512_iq2xxs.h"

#include "avx512.h"

#ifdef APU_AVX512

#include "avx512_group.h"

namespace apu::cpu::avx512 {
namespace {

constexpr int kBytes = sizeof(quant::IQ2_XXS);
constexpr int kPrefetch = 2048;
constexpr uint32_t kPassRows = 8;        // of activations that use a superblock while it is in registers
constexpr size_t kPassBytes = 128 << 10; // of weights that are read from memory once for several passes

struct alignas(64) PairActivations {
  int8_t y[2][4][64];  // superblock, eight of a block, block and element
  float d[2][16];      // half; lanes as the sums of a pair
  int32_t c[2][2][16]; // superblock, half, two dwords a block: what the offset of the weights adds, negated, and zero
};

APU_INLINE void pack_superblock(const int8_t *q, int8_t (*y)[64]) { // from Order::quads
  static constexpr Table<int64_t> blocks[2] = {
      Table<int64_t>{[](int n) { return 8 * (n / 2 % 2) + 4 * (n % 2) + n / 4; }},
      Table<int64_t>{[](int n) { return 8 * (n / 2 % 2) + 4 * (n % 2) + n / 4 + 2; }}};
  for (int i = 0; i < 4; i++) { // eight i % 2 of half i / 2
    const int8_t *p = q + 128 * (i % 2);
    _mm512_store_si512(y[i], _mm512_permutex2var_epi64(load512(p), blocks[i / 2], load512(p + 64)));
  }
}

// Superblocks are taken by twos. Where a row has an odd number of them, two rows make a unit, whose pair `mixed` is the
// end of the first and the beginning of the second; else a row is one.
struct Unit {
  size_t superblocks, pairs, mixed;

  explicit Unit(uint32_t k)
      : superblocks(k / kGroup), pairs(superblocks % 2 ? superblocks : superblocks / 2),
        mixed(superblocks % 2 ? superblocks / 2 : pairs) {}
};

// (T, pairs)
PairActivations *pack(const ActBlocks &a, uint32_t rows, const Unit &unit, void *work) {
  static constexpr Table<int32_t> halves[2] = {
      Table<int32_t>{[](int i) { return 16 * (i / 2 % 2) + 2 * (i / 4) + i % 2; }},
      Table<int32_t>{[](int i) { return 16 * (i / 2 % 2) + 2 * (i / 4) + i % 2 + 8; }}};
  auto *const first = reinterpret_cast<PairActivations *>((reinterpret_cast<uintptr_t>(work) + 63) & ~uintptr_t{63});
  PairActivations *to = first;
  for (size_t t = 0; t < rows; t++)
    for (size_t i = 0; i < unit.pairs; i++, to++) {
      __m512 d[2];
      for (size_t s = 0; s < 2; s++) {
        const size_t from = t * (a.blocks / kLanes) + (2 * i + s) % unit.superblocks;
        pack_superblock(a.q + from * kGroup, to->y[s]);
        d[s] = _mm512_loadu_ps(a.d + 16 * from);
        for (size_t h = 0; h < 2; h++) {
          const __m256i sums = load256(a.sum16 + 16 * from + 8 * h);
          const __m256i taken = _mm256_mullo_epi32(sums, _mm256_set1_epi32(-Iq2xxsPair::kOffset));
          _mm512_store_si512(to->c[s][h], _mm512_cvtepu32_epi64(taken));
        }
      }
      for (int h = 0; h < 2; h++) _mm512_store_ps(to->d[h], _mm512_permutex2var_ps(d[0], halves[h], d[1]));
    }
  return first;
}

// Four products a dword, of superblock and half.
struct PairSums {
  __m512i v[2][2];
};
APU_INLINE PairSums multiply(const __m512i (&codes)[2][2], const PairActivations &a) {
  PairSums sums;
#pragma GCC unroll 2
  for (int s = 0; s < 2; s++)
#pragma GCC unroll 2
    for (int h = 0; h < 2; h++) {
      const __m512i first =
          _mm512_dpbusd_epi32(load512(a.c[s][h]), Iq2xxsPair::values<0>(codes[s][h]), load512(a.y[s][2 * h]));
      sums.v[s][h] = _mm512_dpbusd_epi32(first, Iq2xxsPair::values<1>(codes[s][h]), load512(a.y[s][2 * h + 1]));
    }
  return sums;
}
// The canonical step for both superblocks; accumulators count in the first's places. At the end of a row the first's
// result goes to *first, and the second begins with zero.
APU_INLINE __m512 add_pair(const PairSums &sums, __m512 ws, const PairActivations &a, __m512 acc, bool mixed,
                           __m512 *first) {
  __m512 half[2];
  for (int h = 0; h < 2; h++) half[h] = _mm512_cvtepi32_ps(add_even_odd(sums.v[0][h], sums.v[1][h]));
  const __m512 sum = _mm512_fmadd_ps(half[1], _mm512_load_ps(a.d[1]), _mm512_mul_ps(half[0], _mm512_load_ps(a.d[0])));
  acc = _mm512_fmadd_ps(ws, sum, acc);
  if (mixed) {
    *first = acc;
    acc = _mm512_setzero_ps();
  }
  return _mm512_permute_ps(_mm512_fmadd_ps(ws, sum, _mm512_permute_ps(acc, 0x4e)), 0x4e);
}
APU_INLINE float total(__m512 acc) {
  static constexpr Table<int32_t> first{[](int i) { return i / 2 * 4 + i % 2; }};
  return sum8(_mm512_castps512_ps256(_mm512_permutexvar_ps(first, acc)));
}

// The pairs of rows [begin, end) in order, each made while the one before is used.
struct Stream {
  const Unit unit;
  const size_t stride;
  const uint8_t *row, *second, *p; // a unit's rows, where it has two, and the next pair's first superblock
  uint32_t left;                   // rows from `row` on
  Iq2xxsPair next;

  APU_INLINE Stream(const Matrix &w, const Unit &u, uint32_t begin, uint32_t end)
      : unit(u), stride(w.row_stride), row(w.data + begin * w.row_stride), second(row + (end - begin > 1 ? stride : 0)),
        p(row), left(end - begin), next(p, partner(0)) {}

  // What goes with the superblock at p, the first of pair i.
  APU_INLINE const uint8_t *partner(size_t i) const { return i == unit.mixed ? second : p + kBytes; }

  // Pair i of the `pairs` of this unit.
  APU_INLINE Iq2xxsPair take(size_t i, size_t pairs) {
    const Iq2xxsPair pair = next;
    if (++i == pairs) { // after the last of all the first of that unit again
      const uint32_t used = unit.mixed < unit.pairs ? 2 : 1;
      if (left > used) {
        left -= used;
        row += used * stride;
        second = left > 1 ? row + stride : row;
      }
      p = row;
      i = 0;
    } else {
      p = i == unit.mixed + 1 ? second + kBytes : p + 2 * kBytes;
    }
    for (int c = 0; c < 2 * kBytes; c += 64)
      _mm_prefetch(reinterpret_cast<const char *>(p) + kPrefetch + c, _MM_HINT_NTA);
    next = Iq2xxsPair(p, partner(i));
    return pair;
  }
};

// How many pairs the unit has that begins with row n, and its rows in *count.
APU_INLINE size_t pairs_here(const Unit &unit, uint32_t n, uint32_t end, uint32_t *count) {
  *count = unit.mixed < unit.pairs && end - n > 1 ? 2 : 1;
  return unit.mixed < unit.pairs && *count == 1 ? unit.mixed + 1 : unit.pairs;
}

template <int T>
__attribute__((noinline)) void rows(const Matrix &w, const Unit &unit, const PairActivations *a, uint32_t begin,
                                    uint32_t end, float *y, size_t y_stride) {
  Stream stream(w, unit, begin, end);
  uint32_t count;
  for (uint32_t n = begin; n < end; n += count, y += count) {
    const size_t pairs = pairs_here(unit, n, end, &count);
    __m512 acc[T], first[T];
    for (int t = 0; t < T; t++) acc[t] = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (size_t i = 0; i < pairs; i++) {
      const Iq2xxsPair pair = stream.take(i, pairs);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        const PairActivations &act = a[t * unit.pairs + i];
        acc[t] = add_pair(multiply(pair.codes, act), pair.ws, act, acc[t], i == unit.mixed, first + t);
      }
    }
    for (int t = 0; t < T; t++) {
      float *out = y + t * y_stride;
      if (unit.mixed < unit.pairs) *out++ = total(first[t]);
      if (unit.mixed >= unit.pairs || count == 2) *out = total(acc[t]);
    }
  }
}

// One row of activations: a pair's sums are added up while the next pair is multiplied, in the next unit if need be.
template <>
__attribute__((noinline)) void rows<1>(const Matrix &w, const Unit &unit, const PairActivations *a, uint32_t begin,
                                       uint32_t end, float *y, size_t) {
  Stream stream(w, unit, begin, end);
  PairSums late;
  __m512 late_ws, acc = _mm512_setzero_ps();
  const auto multiply_pair = [&](size_t i, size_t pairs) __attribute__((always_inline)) {
    const Iq2xxsPair pair = stream.take(i, pairs);
    late = multiply(pair.codes, a[i]);
    late_ws = pair.ws;
  };
  const auto add_late = [&](size_t i) __attribute__((always_inline)) {
    __m512 first;
    acc = add_pair(late, late_ws, a[i], acc, i == unit.mixed, &first);
    if (i == unit.mixed) *y++ = total(first);
  };
  uint32_t count = 0;
  size_t pairs = 0;
  const auto finish = [&]() __attribute__((always_inline)) {
    add_late(pairs - 1);
    if (unit.mixed >= unit.pairs || count == 2) *y++ = total(acc);
    acc = _mm512_setzero_ps();
  };
  for (uint32_t n = begin; n < end; n += count) {
    if (n > begin) finish();
    pairs = pairs_here(unit, n, end, &count);
    multiply_pair(0, pairs);
#pragma GCC unroll 1
    for (size_t i = 1; i < pairs; i++) {
      add_late(i - 1);
      multiply_pair(i, pairs);
    }
  }
  finish();
}

void one_pass(const Matrix &w, const Unit &unit, const PairActivations *a, uint32_t count, uint32_t begin, uint32_t end,
              float *y, size_t y_stride) {
  switch (count) {
  case 1: return rows<1>(w, unit, a, begin, end, y, y_stride);
  case 2: return rows<2>(w, unit, a, begin, end, y, y_stride);
  case 3: return rows<3>(w, unit, a, begin, end, y, y_stride);
  case 4: return rows<4>(w, unit, a, begin, end, y, y_stride);
  case 5: return rows<5>(w, unit, a, begin, end, y, y_stride);
  case 6: return rows<6>(w, unit, a, begin, end, y, y_stride);
  case 7: return rows<7>(w, unit, a, begin, end, y, y_stride);
  default: return rows<8>(w, unit, a, begin, end, y, y_stride);
  }
}

} // namespace

size_t iq2_xxs_work_bytes(uint32_t k) {
  return kManyRows * size_t{k / kGroup} * sizeof(PairActivations) + 64;
}

void matvec_iq2_xxs(const Matrix &w, const ActBlocks &a, uint32_t count, uint32_t begin, uint32_t end, float *y,
                    size_t y_stride, void *work) {
  const Unit unit(w.k);
  const PairActivations *pairs = pack(a, count, unit, work);
  const uint32_t passes = (count + kPassRows - 1) / kPassRows;
  const auto block = passes == 1 ? end - begin : static_cast<uint32_t>(kPassBytes / w.row_stride / 2 * 2 + 2);
  for (uint32_t n = begin; n < end; n += block)
    for (uint32_t p = 0; p < passes; p++) {
      const uint32_t t = p * count / passes, t_end = (p + 1) * count / passes;
      one_pass(w, unit, pairs + t * unit.pairs, t_end - t, n, n + block < end ? n + block : end,
               y + t * y_stride + (n - begin), y_stride);
    }
}

} // namespace apu::cpu::avx512

#endif
