// HEAD_MATMUL: each head of every row by a matrix of its own, of any type, in float32.
//
// Grid (blocks of each tile of 1 or 4 rows of the step, heads). A lane dequantises 16 columns at a time and
// multiplies them with the tile's rows, which come from cache. Matrices (N, K): a group of lanes shares four rows of
// the matrix, one where the type is known at run time alone, and adds its sums up. Matrices (K, N): a wave takes a part
// of the K rows, a lane 16 columns of each; the waves' sums are added in LDS. A row's bits do not
// depend on the tile. Bytes: the matrices once for each tile.
#include "dequantize.h"
#include "heads.h"
#include "matrix.h"
#include "row_count.h"

using namespace apu::gpu;

constexpr u32 kHeadWaves = kHeadThreads / kWaveSize;

struct HeadMatrix { // rows of one head's matrix; mostly they lie in one segment
  u64 begin;
  const u8 *data; // null where they do not
  u64 stride;

  static APU_METHOD HeadMatrix of(const Matrix &w, u64 begin, u32 rows) {
    HeadMatrix out{begin, w.data + begin * w.row_stride, w.row_stride};
    if (w.segment_count <= 1) return out;
    u32 low = 0, high = w.segment_count - 1;
    while (low < high) {
      const u32 middle = (low + high + 1) / 2;
      if (w.segments[middle].row_begin <= begin)
        low = middle;
      else
        high = middle - 1;
    }
    const Segment &s = w.segments[low];
    out.data = begin + rows <= s.row_begin + s.row_count
                   ? global_pointer<const u8>(s.address) + (begin - s.row_begin) * s.row_stride
                   : nullptr;
    out.stride = s.row_stride;
    return out;
  }
  APU_METHOD const u8 *row(const Matrix &w, u32 i) const {
    return global_pointer<const u8>(u64(data ? data + i * stride : matrix_row(w, begin + i)));
  }
};

struct AnyRow {}; // a type known at run time
template <class Type> constexpr bool kIsAny = false;
template <> constexpr bool kIsAny<AnyRow> = true;

template <u32 Rows> struct LoadRows { // 16 columns of several rows
  const u8 *const *row;
  u32 k, g;
  float (*v)[kHeadColumns];
  template <class B> APU_METHOD void operator()() const {
#pragma unroll
    for (u32 i = 0; i < Rows; ++i) dequantize_row16<B>(row[i], k, g, v[i]);
  }
};

template <class Type, u32 Rows>
APU_DEVICE void load_rows(const Matrix &w, const u8 *const *row, u32 k, u32 g, float (*v)[kHeadColumns]) {
  const LoadRows<Rows> load{row, k, g, v};
  if constexpr (kIsAny<Type>)
    with_any_type(w.type, load);
  else
    load.template operator()<Type>();
}

template <class Type> constexpr u32 kFloatWords = 0; // of 16 elements of a float type
template <> constexpr u32 kFloatWords<F32Row> = 16;
template <> constexpr u32 kFloatWords<F16Row> = 8;
template <> constexpr u32 kFloatWords<BF16Row> = 8;

// Of aligned rows of a float type.
template <class Type, u32 Rows> APU_DEVICE void load_aligned(const u8 *const *row, u32 g, float (*v)[kHeadColumns]) {
  constexpr u32 words = kFloatWords<Type>;
  u32x4 w[Rows][words / 4];
#pragma unroll
  for (u32 i = 0; i < Rows; ++i)
#pragma unroll
    for (u32 j = 0; j < words / 4; ++j) w[i][j] = load16_stream(row[i] + u64(g) * 4 * words + 16 * j);
#pragma unroll
  for (u32 i = 0; i < Rows; ++i)
#pragma unroll
    for (u32 j = 0; j < kHeadColumns; ++j) {
      const u32 word = w[i][j * words / 64][j * words / 16 % 4];
      if constexpr (__is_same(Type, F32Row))
        v[i][j] = bits_to_float(word);
      else if constexpr (__is_same(Type, F16Row))
        v[i][j] = half_to_float(j % 2 ? word >> 16 : word & 0xffffu);
      else
        v[i][j] = bits_to_float(j % 2 ? word & 0xffff0000u : word << 16);
    }
}

APU_DEVICE void load_inputs(const HeadArgs &a, const float *x, u32 column, float *v) {
  if (a.aligned) {
#pragma unroll
    for (u32 i = 0; i < kHeadColumns; i += 4) {
      const u32x4 four = load16(x + column + i);
#pragma unroll
      for (u32 j = 0; j < 4; ++j) v[i + j] = bits_to_float(four[j]);
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < kHeadColumns; ++i) v[i] = column + i < a.k ? x[column + i] : 0.0f;
  }
}

APU_DEVICE const float *head_input(const HeadArgs &a, u32 t, u32 h) {
  return a.in + (u64(t) * a.heads + h) * (a.k + a.rest);
}
APU_DEVICE float *head_output(const HeadArgs &a, u32 t, u32 h) {
  return a.out + (u64(t) * a.heads + h) * (a.n + a.rest);
}

template <u32 Rows> APU_DEVICE void copy_rest(const HeadArgs &a, u32 t0, u32 rows, u32 h) {
  for (u32 r = 0; r < Rows && t0 + r < rows; ++r)
    for (u32 i = thread_id(); i < a.rest; i += kHeadThreads)
      head_output(a, t0 + r, h)[a.n + i] = head_input(a, t0 + r, h)[a.k + i];
}

// Outputs: rows of the matrix of a group of lanes.
template <class Type, u32 Rows, u32 Outputs> APU_DEVICE void multiply_heads(const HeadArgs &a) {
  const u32 t0 = block_id() / a.blocks * Rows, rows = count_rows(a.count);
  if (t0 >= rows) return;
  const u32 h = block_id_y(), block = block_id() % a.blocks;
  const u32 lane = lane_id() & (a.lanes - 1), group = thread_id() / a.lanes, groups = kHeadThreads / a.lanes;
  const u32 n0 = (block * groups + group) * Outputs;
  const HeadMatrix matrix = HeadMatrix::of(a.w, u64(h) * a.n, a.n);
  const u8 *w[Outputs];
#pragma unroll
  for (u32 i = 0; i < Outputs; ++i) w[i] = matrix.row(a.w, n0 + i < a.n ? n0 + i : a.n - 1);
  float sum[Rows][Outputs] = {};
  for (u32 column = lane * kHeadColumns; column < a.k; column += a.lanes * kHeadColumns) {
    float v[Outputs][kHeadColumns];
    if (kFloatWords<Type> && a.aligned_w) {
      if constexpr (kFloatWords<Type> > 0) load_aligned<Type, Outputs>(w, column / kHeadColumns, v);
    } else {
      load_rows<Type, Outputs>(a.w, w, a.k, column / kHeadColumns, v);
    }
#pragma unroll
    for (u32 r = 0; r < Rows; ++r) {
      float x[kHeadColumns];
      load_inputs(a, head_input(a, Rows == 1 || t0 + r < rows ? t0 + r : t0, h), column, x);
#pragma unroll
      for (u32 i = 0; i < kHeadColumns; ++i) {
#pragma unroll
        for (u32 o = 0; o < Outputs; ++o) sum[r][o] = fma_f32(x[i], v[o][i], sum[r][o]);
      }
    }
  }
#pragma unroll
  for (u32 r = 0; r < Rows; ++r) {
#pragma unroll
    for (u32 o = 0; o < Outputs; ++o) {
      float total = sum[r][o];
      for (u32 mask = 1; mask < a.lanes; mask *= 2) total += wave_shuffle_xor(total, mask);
      if (lane == 0 && n0 + o < a.n && t0 + r < rows) head_output(a, t0 + r, h)[n0 + o] = total;
    }
  }
  if (block == 0) copy_rest<Rows>(a, t0, rows, h);
}

template <u32 Rows> APU_DEVICE void multiply_across(const HeadArgs &a) {
  constexpr u32 together = Rows == 1 ? 2 : 1; // rows of the matrix
  APU_SHARED float parts[kHeadWaves][kHeadColumns][kWaveSize];
  const u32 t0 = block_id() / a.blocks * Rows, rows = count_rows(a.count);
  if (t0 >= rows) return;
  const u32 h = block_id_y(), block = block_id() % a.blocks;
  const u32 lane = lane_id(), wave = wave_uniform(wave_id()), group = block * kWaveSize + lane;
  const HeadMatrix matrix = HeadMatrix::of(a.w, u64(h) * a.k, a.k);
  const u32 share = (a.k + kHeadWaves - 1) / kHeadWaves, first = wave * share;
  const u32 last = first + share < a.k ? first + share : a.k;
  float sum[Rows][kHeadColumns] = {};
  for (u32 k = first; k < last; k += together) {
    float v[together][kHeadColumns];
    const u8 *row[together];
#pragma unroll
    for (u32 i = 0; i < together; ++i) row[i] = matrix.row(a.w, k + i < last ? k + i : k);
    if (group * kHeadColumns >= a.n) continue;
    load_rows<AnyRow, together>(a.w, row, a.n, group, v);
#pragma unroll
    for (u32 r = 0; r < Rows; ++r) {
      const float *x = head_input(a, Rows == 1 || t0 + r < rows ? t0 + r : t0, h) + k;
#pragma unroll
      for (u32 j = 0; j < together; ++j) {
        if (k + j >= last) continue;
#pragma unroll
        for (u32 i = 0; i < kHeadColumns; ++i) sum[r][i] = fma_f32(x[j], v[j][i], sum[r][i]);
      }
    }
  }
#pragma unroll
  for (u32 r = 0; r < Rows; ++r) {
#pragma unroll
    for (u32 i = 0; i < kHeadColumns; ++i) parts[wave][i][lane] = sum[r][i];
    block_sync();
    for (u32 i = thread_id(); i < kHeadColumns * kWaveSize; i += kHeadThreads) {
      const u32 n = block * kWaveSize * kHeadColumns + i;
      if (n >= a.n || t0 + r >= rows) continue;
      float total = 0.0f;
#pragma unroll
      for (u32 w = 0; w < kHeadWaves; ++w) total += parts[w][i % kHeadColumns][i / kHeadColumns];
      head_output(a, t0 + r, h)[n] = total;
    }
    block_sync();
  }
  if (block == 0) copy_rest<Rows>(a, t0, rows, h);
}

#define APU_HEADS(name, type, outputs)                                                                                 \
  APU_KERNEL(kHeadThreads) void heads_##name##_r1(HeadArgs a) {                                                        \
    multiply_heads<type, 1, outputs>(a);                                                                               \
  }                                                                                                                    \
  APU_KERNEL(kHeadThreads) void heads_##name##_many(HeadArgs a) {                                                      \
    multiply_heads<type, kHeadRows, outputs>(a);                                                                       \
  }

APU_HEADS(f32, F32Row, kHeadOutputs)
APU_HEADS(f16, F16Row, kHeadOutputs)
APU_HEADS(bf16, BF16Row, kHeadOutputs)
APU_HEADS(any, AnyRow, 1)

APU_KERNEL(kHeadThreads) void heads_across_r1(HeadArgs a) {
  multiply_across<1>(a);
}
APU_KERNEL(kHeadThreads) void heads_across_many(HeadArgs a) {
  multiply_across<kHeadRows>(a);
}
