// Quantised matrix times many rows of activations. A tile of 32 weight rows x K is unpacked once to signed bytes in
// `work` (it stays in L2), then multiplied by vpdpbusd with every eight rows of activations, whose bytes, offset to be
// unsigned, and scales lie in panels, block by block in the order of use. The float accumulators are kept per (output,
// lane b mod 8), 8 KB in L1, so that results have the bits of the matvec: see quant/blocks.h. Scale and minimum are
// applied per 32-block, as there.
#include "avx512.h"
#include "avx512_codebook_group.h"

#ifdef APU_AVX512

#include "../quant/visit.h"

namespace apu::cpu::avx512 {
namespace {

constexpr int kTileRows = 32;

struct Tile {
  uint8_t *w;    // (blocks, 8, 32, 4): step, row, byte; signed. Blocks lie lane by lane: b mod 8, then b / 8
  int32_t *bias; // (blocks, 2, 32) what the offset of the activations adds to a half, negated
  float *ws;     // (blocks, 32)
  float *wm;     // (blocks, 32)
  float *scales; // (blocks, 2, 32)
  float *mins;   // (blocks, 2, 32)
};
constexpr size_t kTileBlockBytes = kTileRows * (kBlock + 8 + 4 + 4 + 8 + 8);

// One 32-block of eight rows of activations; blocks lie lane by lane, as in the tile.
struct alignas(64) Panel {
  int32_t q[8][kPanelRows]; // four consecutive values + 128
  float d[2][kPanelRows];
  float s16[2][kPanelRows];
  float s[kPanelRows];
};
static_assert(sizeof(Panel) == kPanelBlockBytes);

size_t padded_blocks(uint32_t k) {
  return (k + kGroup - 1) / kGroup * kLanes;
}

// Dword s of 16 rows of 16 bytes each, for s = 0..3.
APU_INLINE void transpose(const void *from, size_t stride, __m512i *out) {
  const auto *rows = static_cast<const uint8_t *>(from);
  __m512i z[4];
  for (int i = 0; i < 4; i++) {
    z[i] = _mm512_zextsi128_si512(load128(rows + i * stride));
    z[i] = _mm512_inserti32x4(z[i], load128(rows + (i + 4) * stride), 1);
    z[i] = _mm512_inserti32x4(z[i], load128(rows + (i + 8) * stride), 2);
    z[i] = _mm512_inserti32x4(z[i], load128(rows + (i + 12) * stride), 3);
  }
  const __m512i a = _mm512_unpacklo_epi32(z[0], z[1]), b = _mm512_unpackhi_epi32(z[0], z[1]);
  const __m512i c = _mm512_unpacklo_epi32(z[2], z[3]), d = _mm512_unpackhi_epi32(z[2], z[3]);
  out[0] = _mm512_unpacklo_epi64(a, c);
  out[1] = _mm512_unpackhi_epi64(a, c);
  out[2] = _mm512_unpacklo_epi64(b, d);
  out[3] = _mm512_unpackhi_epi64(b, d);
}

// One group of 16 rows, as it is loaded, before the transposition.
struct Staging {
  alignas(64) uint8_t q[16][kGroup];
  alignas(64) float ws[16][8];
  alignas(64) float wm[16][8];
  alignas(64) float scales[16][16];
  alignas(64) float mins[16][16];
};

template <class B, class G> APU_INLINE void stage(const G &g, int r, Staging &staging) {
  for (int i = 0; i < 4; i++)
    _mm512_store_si512(staging.q[r] + 64 * i,
                       _mm512_sub_epi8(g.q[i], _mm512_set1_epi8(static_cast<char>(Group<B>::kOffset))));
  _mm256_store_ps(staging.ws[r], g.ws);
  if constexpr (Traits<B>::minimum != Minimum::none) _mm256_store_ps(staging.wm[r], g.wm);
  if constexpr (Traits<B>::minimum == Minimum::per_half)
    _mm512_store_ps(staging.mins[r], _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(g.mins)));
  if constexpr (Traits<B>::sub_block == 16) _mm512_store_ps(staging.scales[r], g.ordered_scales());
}

template <Order O> inline constexpr Table<uint8_t> kPlace{[](int i) { return natural_dword<O>(i); }};

template <class B> void unpack_tile(const uint8_t *row, size_t stride, uint32_t rows, uint32_t k, const Tile &tile) {
  using G = Group<B>;
  const int blocks = static_cast<int>(k / kBlock);
  const size_t groups = static_cast<size_t>(blocks + 7) / kLanes;
  const auto place = [groups](int group, int b) {
    return static_cast<size_t>(b) * groups + static_cast<size_t>(group);
  };
  const auto tail = G::tail(blocks % 8);
  Staging staging;
  __m512i out[4];
  for (int half = 0; half < 2; half++) {
    for (int group = 0; 8 * group < blocks; group++) {
      const int count = blocks - 8 * group < 8 ? blocks - 8 * group : 8;
      // Sixteen rows are too many streams for the hardware's prefetcher: two groups ahead, at a row's end those of the
      // row that is read next in its place.
      const size_t next = static_cast<size_t>(group) + 2;
      const size_t ahead = next < groups ? next * G::kBytes : 16 * stride + (next - groups) * G::kBytes;
      for (int r = 0; r < 16; r++) {
        for (int i = 0; i < G::kBytes; i += 64)
          _mm_prefetch(reinterpret_cast<const char *>(row) + (16 * half + r) * stride + ahead + i, _MM_HINT_T0);
        const uint32_t n = static_cast<uint32_t>(16 * half + r);
        const uint8_t *p = row + (n < rows ? n : rows - 1) * stride + static_cast<size_t>(group) * G::kBytes;
        if (count == 8)
          stage<B>(G::template load<false, 2>(p, tail), r, staging);
        else
          stage<B>(G::template load<true, 2>(p, tail), r, staging);
      }
      for (int piece = 0; piece < kGroup / 16; piece++) {
        transpose(staging.q[0] + 16 * piece, kGroup, out);
        for (int i = 0; i < 4; i++) {
          const int at = kPlace<G::kOrder>.v[4 * piece + i]; // eight dwords a block
          _mm512_store_si512(tile.w + ((place(group, at / 8) * 8 + at % 8) * 2 + half) * 64, out[i]);
        }
      }
      for (int h = 0; h < 2 * count; h++) {
        const size_t at = 2 * place(group, h / 2) + h % 2;
        const uint8_t *w = tile.w + (8 * at + half) * 64;
        __m512i sum = _mm512_setzero_si512();
        for (int i = 0; i < 4; i++)
          sum = _mm512_dpbusd_epi32(sum, _mm512_set1_epi8(-128), _mm512_load_si512(w + 128 * i));
        _mm512_store_si512(tile.bias + at * kTileRows + 16 * half, _mm512_sub_epi32(_mm512_setzero_si512(), sum));
      }
      // Four blocks' values of 16 rows, to `rows` rows of the tile per block.
      const auto scatter = [&](const void *from, size_t from_stride, int b, int rows, auto *to) {
        transpose(from, from_stride, out);
        for (int i = 0; i < 4; i++)
          _mm512_store_si512(to + (place(group, b + i / rows) * rows + i % rows) * kTileRows + 16 * half, out[i]);
      };
      for (int b = 0; b < count; b += 4) {
        scatter(&staging.ws[0][b], sizeof staging.ws[0], b, 1, tile.ws);
        if constexpr (Traits<B>::minimum != Minimum::none)
          scatter(&staging.wm[0][b], sizeof staging.wm[0], b, 1, tile.wm);
      }
      if constexpr (Traits<B>::sub_block == 16)
        for (int b = 0; b < 8; b += 2) scatter(&staging.scales[0][2 * b], sizeof staging.scales[0], b, 2, tile.scales);
      if constexpr (Traits<B>::minimum == Minimum::per_half)
        for (int b = 0; b < 8; b += 2) scatter(&staging.mins[0][2 * b], sizeof staging.mins[0], b, 2, tile.mins);
    }
  }
}

// The integers of half h, for R rows of activations from R0.
template <int R, int R0>
APU_INLINE void integer_dots(const uint8_t *w, const int32_t *bias, const Panel &a, int h, __m512i (&acc)[R][2]) {
#pragma GCC unroll 8
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) acc[r][i] = _mm512_load_si512(bias + h * kTileRows + 16 * i);
#pragma GCC unroll 4
  for (int i = 4 * h; i < 4 * h + 4; i++) {
    const __m512i w0 = _mm512_load_si512(w + 128 * i), w1 = _mm512_load_si512(w + 128 * i + 64);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      const __m512i v = _mm512_set1_epi32(a.q[i][R0 + r]);
      acc[r][0] = _mm512_dpbusd_epi32(acc[r][0], v, w0);
      acc[r][1] = _mm512_dpbusd_epi32(acc[r][1], v, w1);
    }
  }
}

// One block, R rows of activations from R0: the canonical step into the accumulators of the block's lane.
template <class B, int R, int R0>
APU_INLINE void block_rows(const Tile &tile, const Panel &a, size_t at, __m512 (&acc)[R][2]) {
  constexpr Minimum minimum = Traits<B>::minimum;
  const uint8_t *w = tile.w + at * kTileRows * kBlock;
  const int32_t *bias = tile.bias + at * 2 * kTileRows;
  __m512i first[R][2], second[R][2];
  integer_dots<R, R0>(w, bias, a, 0, first);
  integer_dots<R, R0>(w, bias, a, 1, second);
#pragma GCC unroll 2
  for (int i = 0; i < 2; i++) {
    const size_t column = at * kTileRows + 16 * i;
    const float *halves = tile.scales + 2 * at * kTileRows + 16 * i, *mins = tile.mins + 2 * at * kTileRows + 16 * i;
    const __m512 ws = _mm512_load_ps(tile.ws + column);
#pragma GCC unroll 8
    for (int r = 0; r < R; r++) {
      __m512 f0 = _mm512_cvtepi32_ps(first[r][i]), f1 = _mm512_cvtepi32_ps(second[r][i]);
      if constexpr (Traits<B>::sub_block == 16) { // exact: below 2^24
        f0 = _mm512_mul_ps(f0, _mm512_load_ps(halves));
        f1 = _mm512_mul_ps(f1, _mm512_load_ps(halves + kTileRows));
      }
      const __m512 t =
          _mm512_fmadd_ps(f1, _mm512_set1_ps(a.d[1][R0 + r]), _mm512_mul_ps(f0, _mm512_set1_ps(a.d[0][R0 + r])));
      __m512 v = _mm512_fmadd_ps(ws, t, acc[r][i]);
      if constexpr (minimum == Minimum::per_half) {
        const __m512 m = _mm512_mul_ps(_mm512_load_ps(mins), _mm512_set1_ps(a.s16[0][R0 + r]));
        v = add_minimum<B>(_mm512_load_ps(tile.wm + column),
                           _mm512_fmadd_ps(_mm512_load_ps(mins + kTileRows), _mm512_set1_ps(a.s16[1][R0 + r]), m), v);
      }
      if constexpr (minimum == Minimum::per_block)
        v = add_minimum<B>(_mm512_load_ps(tile.wm + column), _mm512_set1_ps(a.s[R0 + r]), v);
      acc[r][i] = v;
    }
  }
}

// R rows of activations from R0 over the `count` blocks of one lane, which lie together.
template <class B, int R, int R0>
APU_INLINE void lane_rows(const Tile &tile, const Panel *a, size_t at, size_t count, float *lane) {
  __m512 acc[R][2];
  for (int r = 0; r < R; r++) acc[r][0] = acc[r][1] = _mm512_setzero_ps();
#pragma GCC unroll 1
  for (size_t j = 0; j < count; j++) block_rows<B, R, R0>(tile, a[at + j], at + j, acc);
  for (int r = 0; r < R; r++)
    for (int i = 0; i < 2; i++) _mm512_store_ps(lane + (R0 + r) * kTileRows + 16 * i, acc[r][i]);
}

// y (8, columns) of one tile and eight rows of activations.
template <class B>
__attribute__((noinline)) void multiply(const Tile &tile, const Panel *a, size_t blocks, uint32_t columns, float *y,
                                        size_t y_stride) {
  alignas(64) float lanes[kLanes][kPanelRows * kTileRows];
  const size_t groups = (blocks + kLanes - 1) / kLanes;
#pragma GCC unroll 1
  for (size_t l = 0; l < kLanes; l++) { // two sets of sums of eight rows would not fit the registers
    const size_t count = (blocks + kLanes - 1 - l) / kLanes;
    lane_rows<B, 4, 0>(tile, a, l * groups, count, lanes[l]);
    lane_rows<B, 4, 4>(tile, a, l * groups, count, lanes[l]);
  }
  for (uint32_t r = 0; r < kPanelRows; r++)
    for (int i = 0; i < 2; i++) {
      __m512 v[kLanes];
      for (uint32_t l = 0; l < kLanes; l++) v[l] = _mm512_load_ps(lanes[l] + r * kTileRows + 16 * i);
      const __m512 even = _mm512_add_ps(_mm512_add_ps(v[0], v[4]), _mm512_add_ps(v[2], v[6]));
      const __m512 odd = _mm512_add_ps(_mm512_add_ps(v[1], v[5]), _mm512_add_ps(v[3], v[7]));
      const auto mask = static_cast<__mmask16>(low_mask(static_cast<int>(columns) - 16 * i));
      _mm512_mask_storeu_ps(y + r * y_stride + 16 * i, mask, _mm512_add_ps(even, odd));
    }
}

// Eight rows of activations to panels.
void fill(const ActBlocks &a, Panel *panels) {
  const __m256i rows =
      _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7), _mm256_set1_epi32(static_cast<int>(a.blocks)));
  for (size_t b = 0; b < a.blocks; b++) {
    const size_t group = b / kLanes, in_group = b % kLanes;
    Panel &to = panels[in_group * (a.blocks / kLanes) + group];
    const __m256i sign = _mm256_set1_epi8(-128);
    for (int i = 0; i < 8; i++) { // see Order::quads
      const int8_t *q =
          a.q + group * kGroup + 32 * (in_group % 4) + 8 * (in_group / 4) + i / 4 * 16 + i / 2 % 2 * 128 + i % 2 * 4;
      const __m256i v = _mm256_i32gather_epi32(reinterpret_cast<const int *>(q), _mm256_slli_epi32(rows, 3), 4);
      _mm256_store_si256(reinterpret_cast<__m256i *>(to.q[i]), _mm256_xor_si256(v, sign));
    }
    for (int h = 0; h < 2; h++) {
      const size_t at = 16 * group + 8 * h + in_group;
      _mm256_store_ps(to.d[h], _mm256_i32gather_ps(a.d + at, _mm256_slli_epi32(rows, 1), 4));
      _mm256_store_ps(to.s16[h], _mm256_i32gather_ps(a.s16 + at, _mm256_slli_epi32(rows, 1), 4));
    }
    _mm256_store_ps(to.s, _mm256_i32gather_ps(a.s + b, rows, 4));
  }
}

template <class B>
void gemm_type(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y,
               size_t y_stride, void *work) {
  const size_t blocks = padded_blocks(w.k);
  auto *bytes = reinterpret_cast<uint8_t *>((reinterpret_cast<uintptr_t>(work) + 63) & ~uintptr_t{63});
  const auto part = [&](size_t offset) { return reinterpret_cast<float *>(bytes + blocks * kTileRows * offset); };
  const Tile tile{bytes,
                  reinterpret_cast<int32_t *>(part(kBlock)),
                  part(kBlock + 8),
                  part(kBlock + 12),
                  part(kBlock + 16),
                  part(kBlock + 24)};
  auto *own = reinterpret_cast<Panel *>(bytes + blocks * kTileBlockBytes);
  for (uint32_t n = begin; n < end; n += kTileRows) {
    const uint32_t columns = end - n < kTileRows ? end - n : kTileRows;
    unpack_tile<B>(w.data + n * w.row_stride, w.row_stride, columns, w.k, tile);
    for (uint32_t t = 0; t < rows; t += kPanelRows) {
      const ActBlocks eight = a.from(t);
      const auto *panel = reinterpret_cast<const Panel *>(eight.panels);
      if (!panel) {
        fill(eight, own);
        panel = own;
      }
      multiply<B>(tile, panel, w.k / kBlock, columns, y + t * y_stride + (n - begin), y_stride);
    }
  }
}

} // namespace

size_t gemm_work_bytes(uint32_t k) {
  return padded_blocks(k) * (kTileBlockBytes + kPanelBlockBytes) + 64;
}

void pack(const ActBlocks &a) {
  fill(a, reinterpret_cast<Panel *>(a.panels));
}

void gemm(const Matrix &w, const ActBlocks &a, uint32_t rows, uint32_t begin, uint32_t end, float *y, size_t y_stride,
          void *work) {
  with_block_type(w.dtype, [&]<class B>() { gemm_type<B>(w, a, rows, begin, end, y, y_stride, work); });
}

} // namespace apu::cpu::avx512

#endif
