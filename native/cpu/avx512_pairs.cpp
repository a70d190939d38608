// Matrices of types bound by arithmetic times few rows of activations, two rows of the matrix at a time, a superblock
// of each in registers (avx512_pairs.h). Both rows are prefetched as one stream: as two they took twice the time.
// The chain from a superblock's bytes to its place in the sums is longer than the processor's schedulers, so what does
// not depend on activations is done a superblock ahead, across the ends of rows, and for one row of activations the
// last steps a superblock late. Zen 4, one thread, from memory: 19 GB/s of Q2_K and 12.6 of IQ2_XXS where a read
// makes 28.
#include "avx512_pairs.h"

#include "avx512.h"

#ifdef APU_AVX512

#include "../include/apu.h"

namespace apu::cpu::avx512 {
namespace {

constexpr int kPrefetch = 4096;          // 1024 to 8192 are the same
constexpr size_t kPassBytes = 128 << 10; // of weights that are read from memory once for several passes

struct alignas(64) Activations { // of a superblock
  int8_t y[4][64];               // eight of a block, block and element
  float d[2][16];                // half; in the places of a pair's sums
  float s16[2][16];              // the same
  int32_t c[2][16];              // half, two dwords a block: what the offset of the weights adds, negated, and zero
};

// (T, superblocks), from Order::quads
template <class B> Activations *pack(const ActBlocks &a, uint32_t rows, size_t superblocks, void *work) {
  static constexpr Table<int64_t> eights[2] = {
      Table<int64_t>{[](int n) { return 8 * (n / 2 % 2) + 4 * (n % 2) + n / 4; }},
      Table<int64_t>{[](int n) { return 8 * (n / 2 % 2) + 4 * (n % 2) + n / 4 + 2; }}};
  static constexpr Table<int32_t> twice[2] = {Table<int32_t>{[](int i) { return 2 * (i / 4) + i % 2; }},
                                              Table<int32_t>{[](int i) { return 2 * (i / 4) + i % 2 + 8; }}};
  auto *const first = reinterpret_cast<Activations *>((reinterpret_cast<uintptr_t>(work) + 63) & ~uintptr_t{63});
  Activations *to = first;
  for (size_t t = 0; t < rows; t++)
    for (size_t i = 0; i < superblocks; i++, to++) {
      const size_t g = t * (a.blocks / kLanes) + i;
      for (int j = 0; j < 4; j++) { // eight j % 2 of half j / 2
        const int8_t *q = a.q + g * kGroup + 128 * (j % 2);
        _mm512_store_si512(to->y[j], _mm512_permutex2var_epi64(load512(q), eights[j / 2], load512(q + 64)));
      }
      const __m512 d = _mm512_loadu_ps(a.d + 16 * g), s16 = _mm512_loadu_ps(a.s16 + 16 * g);
      for (int h = 0; h < 2; h++) {
        _mm512_store_ps(to->d[h], _mm512_permutexvar_ps(twice[h], d));
        _mm512_store_ps(to->s16[h], _mm512_permutexvar_ps(twice[h], s16));
        const __m256i sums = load256(a.sum16 + 16 * g + 8 * h);
        const __m256i taken = _mm256_mullo_epi32(sums, _mm256_set1_epi32(-Pair<B>::kOffset));
        _mm512_store_si512(to->c[h], _mm512_cvtepu32_epi64(taken));
      }
    }
  return first;
}

// A pair times a row of activations, before it is added.
template <class B> struct Product {
  __m512i half[2];
  __m512 minimum, ws, wm;
};
template <class B> APU_INLINE Product<B> multiply(const Pair<B> &pair, const Activations &a) {
  Product<B> product;
#pragma GCC unroll 2
  for (int h = 0; h < 2; h++) {
    const __m512i y0 = load512(a.y[2 * h]), y1 = load512(a.y[2 * h + 1]);
    __m512i v[2];
#pragma GCC unroll 2
    for (int r = 0; r < 2; r++) {
      const __m512i c = Pair<B>::kOffset ? load512(a.c[h]) : _mm512_setzero_si512();
      v[r] = _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(c, pair.value(r, h, 0), y0), pair.value(r, h, 1), y1);
    }
    product.half[h] = pair.sum(v, h);
  }
  product.ws = pair.ws;
  if constexpr (Traits<B>::minimum != Minimum::none) {
    const __m512 first = _mm512_mul_ps(pair.minimums[0], _mm512_load_ps(a.s16[0]));
    product.minimum = _mm512_fmadd_ps(pair.minimums[1], _mm512_load_ps(a.s16[1]), first);
    product.wm = pair.wm;
  }
  return product;
}
// The canonical step.
template <class B> APU_INLINE __m512 add(const Product<B> &p, const Activations &a, __m512 acc) {
  const __m512 i0 = _mm512_cvtepi32_ps(p.half[0]), i1 = _mm512_cvtepi32_ps(p.half[1]);
  const __m512 sum = _mm512_fmadd_ps(i1, _mm512_load_ps(a.d[1]), _mm512_mul_ps(i0, _mm512_load_ps(a.d[0])));
  acc = _mm512_fmadd_ps(p.ws, sum, acc);
  if constexpr (Traits<B>::minimum != Minimum::none) acc = _mm512_fnmadd_ps(p.wm, p.minimum, acc);
  return acc;
}
APU_INLINE void finish(__m512 acc, float *y, bool two) {
  const __m512 rows = _mm512_permutexvar_ps(kPairRows, acc);
  y[0] = sum8(_mm512_castps512_ps256(rows));
  if (two) y[1] = sum8(_mm512_extractf32x8_ps(rows, 1));
}

// The superblocks of rows [begin, end), two rows at a time, each pair made while the one before is used. Where the
// number of rows is odd, the last goes with itself.
template <class B> struct Stream {
  const size_t stride;
  const uint8_t *row, *p; // of the first of the two rows, and where its next superblock is
  ptrdiff_t second;       // bytes from there to the second row's
  uint32_t left;          // rows from `row` on
  const char *ahead;      // to be prefetched, both rows as one stream
  const char *limit;      // where that goes on elsewhere
  ptrdiff_t jump;
  Pair<B> next;

  APU_INLINE Stream(const Matrix &w, uint32_t begin, uint32_t end)
      : stride(w.row_stride), row(w.data + begin * stride), p(row),
        second(end - begin > 1 ? static_cast<ptrdiff_t>(stride) : 0), left(end - begin),
        ahead(reinterpret_cast<const char *>(row) + kPrefetch),
        limit(reinterpret_cast<const char *>(w.data + end * stride)),
        jump(w.next ? reinterpret_cast<const char *>(w.next) - limit : 0), next(p, p + second) {}

  APU_INLINE Pair<B> take(bool last_of_row) {
    const Pair<B> pair = next;
    p += sizeof(B);
    ahead += 2 * sizeof(B);
    if (last_of_row) { // after the last of all the first of that row again
      if (left > 2) {
        left -= 2;
        row += 2 * stride;
        if (left == 1) second = 0;
      }
      p = row;
      ahead = reinterpret_cast<const char *>(row) + kPrefetch;
    }
    const char *const from = ahead + (ahead < limit ? 0 : jump);
    for (size_t c = 0; c < 2 * sizeof(B); c += 64) _mm_prefetch(from + c, _MM_HINT_NTA);
    next = Pair<B>(p, p + second);
    return pair;
  }
};

template <class B, int T>
__attribute__((noinline)) void rows(const Matrix &w, const Activations *a, uint32_t begin, uint32_t end, float *y,
                                    size_t y_stride) {
  Stream<B> stream(w, begin, end);
  const size_t superblocks = w.k / kGroup;
  for (uint32_t n = begin; n < end; n += 2, y += 2) {
    __m512 acc[T];
    for (int t = 0; t < T; t++) acc[t] = _mm512_setzero_ps();
#pragma GCC unroll 1
    for (size_t i = 0; i < superblocks; i++) {
      const Pair<B> pair = stream.take(i + 1 == superblocks);
#pragma GCC unroll 8
      for (int t = 0; t < T; t++) {
        const Activations &act = a[t * superblocks + i];
        acc[t] = add(multiply(pair, act), act, acc[t]);
      }
    }
    for (int t = 0; t < T; t++) finish(acc[t], y + t * y_stride, end - n > 1);
  }
}

// One row of activations: a product is added while the next is made, in the next rows if need be.
template <class B>
__attribute__((noinline)) void one_row(const Matrix &w, const Activations *a, uint32_t begin, uint32_t end, float *y) {
  Stream<B> stream(w, begin, end);
  const size_t superblocks = w.k / kGroup;
  Product<B> late;
  __m512 acc;
  for (uint32_t n = begin; n < end; n += 2) {
    if (n > begin) finish(add(late, a[superblocks - 1], acc), y + (n - 2 - begin), true);
    acc = _mm512_setzero_ps();
    late = multiply(stream.take(superblocks == 1), a[0]);
#pragma GCC unroll 1
    for (size_t i = 1; i < superblocks; i++) {
      acc = add(late, a[i - 1], acc);
      late = multiply(stream.take(i + 1 == superblocks), a[i]);
    }
  }
  const uint32_t last = (end - begin - 1) / 2 * 2;
  finish(add(late, a[superblocks - 1], acc), y + last, end - begin - last > 1);
}

template <class B>
void one_pass(const Matrix &w, const Activations *a, uint32_t count, uint32_t begin, uint32_t end, float *y,
              size_t y_stride) {
  switch (count) {
  case 1: return one_row<B>(w, a, begin, end, y);
  case 2: return rows<B, 2>(w, a, begin, end, y, y_stride);
  case 3: return rows<B, 3>(w, a, begin, end, y, y_stride);
  case 4: return rows<B, 4>(w, a, begin, end, y, y_stride);
  case 5: return rows<B, 5>(w, a, begin, end, y, y_stride);
  case 6: return rows<B, 6>(w, a, begin, end, y, y_stride);
  case 7: return rows<B, 7>(w, a, begin, end, y, y_stride);
  default: return rows<B, 8>(w, a, begin, end, y, y_stride);
  }
}

template <class B>
void matvec_type(const Matrix &w, const ActBlocks &a, uint32_t count, uint32_t begin, uint32_t end, float *y,
                 size_t y_stride, void *work) {
  const size_t superblocks = w.k / kGroup;
  const Activations *all = pack<B>(a, count, superblocks, work);
  const auto block = count <= kPassRows ? end - begin : static_cast<uint32_t>(kPassBytes / w.row_stride / 2 * 2 + 2);
  for_passes(w, count, begin, end, block,
             [&](const Matrix &part, uint32_t t, uint32_t t_end, uint32_t n, uint32_t last) {
               one_pass<B>(part, all + t * superblocks, t_end - t, n, last, y + t * y_stride + (n - begin), y_stride);
             });
}

} // namespace

size_t pairs_work_bytes(uint32_t k) {
  return kManyRows * size_t{k / kGroup} * sizeof(Activations) + 64;
}

void matvec_pairs(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y,
                  size_t y_stride, void *work) {
  if (begin == end) return;
  if (w.dtype == APU_IQ2_XXS) return matvec_type<IQ2_XXS>(w, a, rows, begin, end, y, y_stride, work);
  if (w.dtype == APU_Q2_K) return matvec_type<Q2_K>(w, a, rows, begin, end, y, y_stride, work);
}

} // namespace apu::cpu::avx512

#endif
