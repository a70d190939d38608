// Products of a float matrix (F32, F16, BF16) with 1 to 8 rows of float activations: the other frame of `matvec`.
//
// A wave computes four rows at once and walks over a slice in steps of eight columns a lane, 16 bytes of weights (32 of
// F32) straight from memory and the activations from cache. Sums are those of matvec.h: a lane adds its columns in
// order, then the wave, then slices. Rows that are not aligned or not a multiple of eight long take a slower path with
// the same sums.
// Bytes moved: the matrix once for each 8 rows of activations; the activations once for each four rows, from cache.
// Measured on an H200 at 14336x4096, one row, as a share of a plain read kernel: F16 and BF16 .96, F32 .95.
#pragma once

#include "matvec.h"

namespace apu::gpu {

struct F32Weights {
  static constexpr u32 kWords = 8; // of eight values
  static APU_METHOD void values(const u32 *w, float (&v)[8]) {
#pragma unroll
    for (u32 i = 0; i < 8; ++i) v[i] = bits_to_float(w[i]);
  }
};
struct F16Weights {
  static constexpr u32 kWords = 4;
  static APU_METHOD void values(const u32 *w, float (&v)[8]) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[2 * i] = half_to_float(w[i] & 0xffffu), v[2 * i + 1] = half_to_float(w[i] >> 16);
  }
};
struct BF16Weights {
  static constexpr u32 kWords = 4;
  static APU_METHOD void values(const u32 *w, float (&v)[8]) {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) v[2 * i] = bits_to_float(w[i] << 16), v[2 * i + 1] = bits_to_float(w[i] & 0xffff0000u);
  }
};

template <class Weights> struct FloatProduct {
  static constexpr u32 kSet = kFloatSet, kWords = Weights::kWords;
  static constexpr u32 blocks(u32) { return 0; } // as many as the compiler sees fit

  template <u32 R> static APU_METHOD float *sums() { return reinterpret_cast<float *>(dynamic_shared()); }

  // Eight weights at p, of which `count` lie inside the row.
  static APU_METHOD void load(const u8 *p, u32 count, bool aligned, u32 (&w)[kWords]) {
    if (aligned) {
#pragma unroll
      for (u32 i = 0; i < kWords; i += 4) {
        const u32x4 v = load16_stream(p + 4 * i);
        w[i] = v.x, w[i + 1] = v.y, w[i + 2] = v.z, w[i + 3] = v.w;
      }
      return;
    }
    constexpr u32 kValueBytes = kWords / 2;
#pragma unroll
    for (u32 i = 0; i < kWords; ++i) {
      w[i] = 0;
#pragma unroll
      for (u32 b = 0; b < 4; ++b)
        if ((4 * i + b) / kValueBytes < count) w[i] |= u32(p[4 * i + b]) << (8 * b);
    }
  }

  template <u32 R> static APU_METHOD void run(const MatvecWork &work, const ActivationRows &rows) {
    const u32 wave = wave_uniform(wave_id()), lane = lane_id(), k = work.w.k;
    const u32 groups = kMatvecWaves >> work.split_shift, group = wave >> work.split_shift,
              set_rows = groups * work.steps * kSet;
    float *to = sums<R>();
    for (u32 step = 0; step < work.steps; ++step) {
      const u32 set = step * groups + group;
      for (u32 i = wave & (work.splits - 1); i < work.slices * work.slots; i += work.splits) {
        const MatvecSlice part = MatvecSlice::of(work, i);
        const WaveRows<kSet> matrix = WaveRows<kSet>::of(work, part.first_row, group, groups);
        if (!matrix.at(step, 0)) continue;
        ActivationRow x[R];
#pragma unroll
        for (u32 r = 0; r < R; ++r) x[r] = rows.row(r, part.slot);
        const u8 *w[kSet];
        bool aligned = k % 8 == 0 && reinterpret_cast<u64>(x[0].x) % 16 == 0;
#pragma unroll
        for (u32 q = 0; q < kSet; ++q) {
          w[q] = matrix.at(step, q);
          if (!w[q]) w[q] = w[0]; // beyond the matrix: of no use
          aligned = aligned && reinterpret_cast<u64>(w[q]) % 16 == 0;
        }
        float sum[kSet * R];
#pragma unroll
        for (u32 v = 0; v < kSet * R; ++v) sum[v] = 0;
        constexpr u32 kSlice = kWaveSize * kFloatItemColumns;
        const u32 begin = part.slice * kSlice, end = begin + kSlice < k ? begin + kSlice : k;
        if (aligned)
          add<true, R>(w, x, begin, end, sum);
        else
          add<false, R>(w, x, begin, end, sum);
        const float total = wave_sums(sum);
        constexpr u32 kLanes = kWaveSize / (kSet * R);
        const u32 value = lane / kLanes;
        if (lane % kLanes == 0) to[(i * R + value % R) * set_rows + set * kSet + value / R] = total;
      }
    }
    block_sync();
  }

  // Adds columns [begin, end) of kSet rows to sum[q * R + r]. Several groups of eight columns are loaded before the
  // first is needed, as many as there are registers for, without conditions, which would put the loads apart.
  template <bool Aligned, u32 R>
  static APU_METHOD void add(const u8 *const (&w)[kSet], const ActivationRow (&rows)[R], u32 begin, u32 end,
                             float (&sum)[kSet * R]) {
    constexpr u32 kFetched = R > 2 || !kBulkCopy ? 8 : 16; // words of a row; large devices want more on the way
    constexpr u32 kGroups = Aligned && R <= 4 ? kFetched / kWords : 1, kColumns = kGroups * 8 * kWaveSize;
    u32 first = begin;
    if constexpr (Aligned) {
#pragma unroll 1
      for (; first + kColumns <= end; first += kColumns) add_groups<kGroups, true, R>(w, rows, first, end, sum);
    }
#pragma unroll 1
    for (first += 8 * lane_id(); first < end; first += 8 * kWaveSize)
      add_groups<1, Aligned, R>(w, rows, first - 8 * lane_id(), end, sum);
  }

  template <u32 Groups, bool Aligned, u32 R>
  static APU_METHOD void add_groups(const u8 *const (&w)[kSet], const ActivationRow (&rows)[R], u32 first, u32 end,
                                    float (&sum)[kSet * R]) {
    u32 words[Groups][kSet][kWords];
#pragma unroll
    for (u32 g = 0; g < Groups; ++g) {
      const u32 column = first + 8 * (g * kWaveSize + lane_id()), count = end - column < 8 ? end - column : 8;
#pragma unroll
      for (u32 q = 0; q < kSet; ++q) load(w[q] + u64(column) * (kWords / 2), count, Aligned, words[g][q]);
    }
    if constexpr (Groups > 1) wave_sync(); // no load is put off to where it is needed
#pragma unroll
    for (u32 g = 0; g < Groups; ++g) {
      const u32 column = first + 8 * (g * kWaveSize + lane_id()), count = end - column < 8 ? end - column : 8;
#pragma unroll
      for (u32 r = 0; r < R; ++r) {
        float x[8];
        if constexpr (Aligned) {
          load_4(rows[r].x, column, x);
          load_4(rows[r].x, column + 4, x + 4);
        } else {
#pragma unroll
          for (u32 i = 0; i < 8; ++i) x[i] = i < count ? rows[r].x[column + i] : 0.0f;
        }
#pragma unroll
        for (u32 q = 0; q < kSet; ++q) {
          float v[8];
          Weights::values(words[g][q], v);
#pragma unroll
          for (u32 i = 0; i < 8; ++i) sum[q * R + r] = fma_f32(v[i], x[i], sum[q * R + r]);
        }
      }
    }
  }
};

} // namespace apu::gpu
