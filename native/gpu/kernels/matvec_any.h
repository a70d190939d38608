// Products of a matrix of any quantised type, with int8 activations or, in precision "exact", with float ones: the
// frame of `matvec` for types without a Format, and for every type where weights are dequantised.
//
// A lane unpacks a block of 32 (unpack.h; one branch over the type, uniform over the wave) straight from memory and
// multiplies it with every row of activations, which come from cache. The block's product is that of
// native/quant/blocks.h; exact products add the block's elements in order. Sums over lanes and slices are matvec.h's.
// Bytes moved: the matrix once for each 8 rows of activations; the activations once for each row of the matrix, from
// cache.
#pragma once

#include "matvec.h"
#include "unpack.h"

namespace apu::gpu {

struct Block { // of 32
  Half half[2];
};
struct UnpackBlock {
  const u8 *row;
  u32 b; // counted from the row's start
  Block &out;
  template <class B> APU_METHOD void operator()() const {
    constexpr u32 blocks = q::Traits<B>::blocks32;
    const u8 *p = row + u64(b / blocks) * sizeof(B);
    unpack_half<B>(p, 2 * (b % blocks), out.half[0]);
    unpack_half<B>(p, 2 * (b % blocks) + 1, out.half[1]);
  }
};

template <bool Exact> struct UnpackedProduct {
  static constexpr u32 kSet = kMatvecSet;
  static constexpr u32 blocks(u32) { return 0; } // as many as the compiler sees fit
  template <u32 R> static APU_METHOD float *sums() { return reinterpret_cast<float *>(dynamic_shared()); }

  static APU_METHOD float add(const Block &block, const ActivationRow &row, u32 column, float sum) {
    float part[2];
    if constexpr (Exact) {
#pragma unroll
      for (u32 h = 0; h < 2; ++h) {
        const Half &half = block.half[h];
        const float scale = half.ws * half.sc, minimum = half.wm * half.m;
#pragma unroll
        for (u32 i = 0; i < 16; ++i) {
          const float v = scale * float(i8(half.q[i / 4] >> 8 * (i % 4))) + minimum;
          sum = fma_f32(v, row.x[column + 16 * h + i], sum);
        }
      }
      return sum;
    } else {
      const float *d = row.d + column / 16, *s = row.s16 + column / 16;
#pragma unroll
      for (u32 h = 0; h < 2; ++h) {
        u32 y[4];
        load_q<4>(row, column + 16 * h, y);
        i32 dot = 0;
#pragma unroll
        for (u32 i = 0; i < 4; ++i) dot = dot4(block.half[h].q[i], y[i], dot);
        part[h] = block.half[h].sc * float(dot);
      }
      const Half &first = block.half[0], &second = block.half[1];
      sum = fma_f32(first.ws, fma_f32(part[1], d[1], part[0] * d[0]), sum);
      return fma_f32(first.wm, fma_f32(second.m, s[1], first.m * s[0]), sum); // wm is 0 where there is no minimum
    }
  }

  template <u32 R> static APU_METHOD void run(const MatvecWork &work, const ActivationRows &rows) {
    const u32 wave = wave_uniform(wave_id()), lane = lane_id(), k = work.w.k;
    const u32 groups = kMatvecWaves >> work.split_shift, group = wave >> work.split_shift,
              set_rows = groups * work.steps * kSet;
    float *to = sums<R>();
    const u32 mine = work.steps * kSet; // rows of this wave's group
    for (u32 i = wave & (work.splits - 1); i < work.slices * work.slots; i += work.splits) {
      const MatvecSlice part = MatvecSlice::of(work, i);
      ActivationRow x[R];
#pragma unroll
      for (u32 r = 0; r < R; ++r) x[r] = rows.row(r, part.slot);
      const u32 begin = part.slice * kWaveSize * kItemColumns;
      const u32 end = begin + kWaveSize * kItemColumns < k ? begin + kWaveSize * kItemColumns : k;
      for (u32 j = 0; j < mine; ++j) {
        const u32 set = j / kSet * groups + group, q = j % kSet;
        u32 row = work.row_begin + (work.pair ? set * (kSet / 2) + q / 2 : set * kSet + q);
        if (row >= work.row_end) row = work.row_end - 1; // beyond the matrix: the last one again, of no use
        const Matrix &w = work.pair && q % 2 ? work.w2 : work.w;
        const u8 *p = matrix_row(w, part.first_row + row);
        float sum[R];
#pragma unroll
        for (u32 r = 0; r < R; ++r) sum[r] = 0;
#pragma unroll 1
        for (u32 column = begin + 32 * lane; column < end; column += 32 * kWaveSize) {
          Block block;
          q::with_block_type(w.type, UnpackBlock{p, column / 32, block});
#pragma unroll
          for (u32 r = 0; r < R; ++r) sum[r] = add(block, x[r], column, sum[r]);
        }
        const float total = wave_sums(sum);
        constexpr u32 kLanes = kWaveSize / R;
        if (lane % kLanes == 0) to[(i * R + lane / kLanes) * set_rows + set * kSet + q] = total;
      }
    }
    block_sync();
  }
};

} // namespace apu::gpu
