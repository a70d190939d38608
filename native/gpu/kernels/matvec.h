// Products of a quantised matrix with 1 to 8 rows of int8 activations: the frame, over a Format that knows one type.
//
// A wave copies the bytes of a few matrix rows (a set) as they lie in the file into LDS of its own: 16 aligned bytes a
// lane, through registers while it multiplies the set before, or by bulk copies where registers are short and the
// hardware has such. A lane owns the same 64 columns (an item) of every row and keeps their activations in registers,
// so a row costs its own bytes and nothing else. Sums of waves meet in LDS once, at the end of the block, where bias,
// activation, residual and cap are applied and rows are written side by side. Bytes moved: the matrix once for each 8
// rows of activations; the activations once for each block, from cache.
// Measured on an H200 at 14336x4096, one row, as a share of a plain read kernel: Q8_0 .91, Q4_1, Q4_0 .86, Q4_K, Q5_1
// .84, Q5_K .78, Q6_K .77, MXFP4 .76, Q2_K .71, Q3_K .68, IQ2_XXS .46; docs/kernels.md has other shapes. What is left
// is the start of a launch, until all waves have asked for weights, and its end: the code to the first load and from
// the last sum is short, and its arguments lie together.
//
// A Format is a struct of
//   kElements, kBytes       of a file block; kElements divides 64, or is 256
//   kAligned                multiply<true> exists: it may assume 16-byte aligned rows whose items are all full
//   X                       what a lane keeps of a row's 64 columns
//   load(x, row, item)      fills it; `item` counts items from the row's first column, so columns are 64 * item + ...
//                           or for blocks of 256 any 64 of the block's columns, by item % 4
//   multiply<aligned, R>(image, item, x, sum, full)
//                           adds the item's products with x[0..R) to sum[0..R). `item` counts from the slice's start (a
//                           multiple of 4), `image` holds the slice; `full` is false where only the first 32 columns
//                           lie inside the row (kElements 32): nothing after them may be used.
//   prepare()               optional: fills tables in LDS, by all threads of the block
//   kHeld                   optional, true: few instructions, such that registers for the next set are worth more than
//                           what bulk copies save
// For each r the operations must be the same in number and order whatever R is (blocks.h of native/quant says which).
#pragma once

#include "activation.h"
#include "gpu.h"
#include "matrix.h"
#include "matvec_args.h"

namespace apu::gpu {

// One row of activations. Columns beyond K are zero up to a multiple of 256.
struct ActivationRow {
  const i8 *q;
  const float *d, *s16;
  const float *x; // (K), of float matrices
};

// Rows of activations from `first` on; beyond `last` it is repeated. Of those that a row has `each` of, this one.
struct ActivationRows {
  const Activations &in;
  u32 first, last;
  u32 each = 1, own = 0;

  APU_METHOD ActivationRow row(u32 r, u32 slot = 0) const {
    const u64 at = u64(first + r < last ? first + r : last) * each + own + slot;
    const u64 halves = at * (in.columns / 16);
    return {global_pointer<const i8>(u64(in.q + at * in.columns)), global_pointer<const float>(u64(in.d + halves)),
            global_pointer<const float>(u64(in.s16 + halves)), global_pointer<const float>(u64(in.x + at * in.k))};
  }
};

// Words of a slice of a row in LDS, at any alignment. Offsets are bytes from the slice's start, -4 or more.
struct RowImage {
  SharedAddress bytes; // 16-byte aligned
  u32 start;           // of the slice, 16 to 31

  // N words, shifted by up to 7 bits that other bits follow. The word after them is read too.
  template <u32 N> APU_METHOD void words(u32 offset, u32 (&out)[N], u32 shift = 0) const {
    const u32 at = start + offset, bits = at % 4 * 8 + shift;
    const SharedAddress p = bytes + (at & ~3u);
    u32 low = shared_load(p);
#pragma unroll
    for (u32 i = 0; i < N; ++i) {
      const u32 high = shared_load(p + 4 * (i + 1));
      out[i] = funnel_shift_right(low, high, bits);
      low = high;
    }
  }
  // The image as that of an aligned row, of which offsets within a lane's bytes are the same in every row.
  template <bool Aligned> APU_METHOD RowImage known() const { return {bytes, Aligned ? 16 : start}; }
  // N words at an offset of an aligned row that is a multiple of 4.
  template <u32 N> APU_METHOD void plain_words(u32 offset, u32 (&out)[N]) const {
#pragma unroll
    for (u32 i = 0; i < N; ++i) out[i] = shared_load(bytes + (16 + offset) + 4 * i);
  }
  // N words, a multiple of 4, at an aligned offset of an aligned row.
  template <u32 N> APU_METHOD void aligned_words(u32 offset, u32 (&out)[N]) const {
#pragma unroll
    for (u32 i = 0; i < N; i += 4) {
      const u32x4 v = shared_load16(bytes + (16 + offset) + 4 * i);
      out[i] = v.x, out[i + 1] = v.y, out[i + 2] = v.z, out[i + 3] = v.w;
    }
  }
  template <bool Aligned, u32 N> APU_METHOD void plain_words_at(u32 offset, u32 (&out)[N]) const {
    if constexpr (Aligned)
      plain_words(offset, out);
    else
      words(offset, out);
  }
  template <bool Aligned, u32 N> APU_METHOD void words_at(u32 offset, u32 (&out)[N]) const {
    if constexpr (Aligned)
      aligned_words(offset, out);
    else
      words(offset, out);
  }
  // At an even offset of an aligned row.
  APU_METHOD u32 half_word(u32 offset) const { return shared_load_u16(bytes + (16 + offset)); }
  APU_METHOD u32 half(u32 offset) const { // bits of 16; those above them are undefined
    u32 v[1];
    words(offset, v);
    return v[0];
  }
};

// Columns [column, column + 4 N) of a row's q, as words; column is a multiple of 16.
template <u32 N> APU_DEVICE void load_q(const ActivationRow &row, u32 column, u32 *q) {
#pragma unroll
  for (u32 i = 0; i < N; i += 4) {
    const u32x4 v = load16(row.q + column + 4 * i);
    q[i] = v.x, q[i + 1] = v.y, q[i + 2] = v.z, q[i + 3] = v.w;
  }
}
// Four floats at an index that is a multiple of 4.
APU_DEVICE void load_4(const float *p, u32 index, float *out) {
  const u32x4 v = load16(p + index);
  out[0] = bits_to_float(v.x), out[1] = bits_to_float(v.y), out[2] = bits_to_float(v.z), out[3] = bits_to_float(v.w);
}

APU_DEVICE u32 split_shift_of(u32 splits) { // log2 of 1, 2, 4 or 8; a division would take longer than a small matrix
  return splits / 2 - splits / 8;
}

// What a block computes: rows [row_begin, row_begin + rows) of one matrix, or of two where `pair`. Sums are left in LDS
// at sums[(slice * R + r) * set_rows + i], where i counts the block's rows set by set; in a pair's set gate and up
// alternate. Where matrices are experts' (E, N, K), `slots` of them are computed, slices counted through: those of slot
// 1 follow those of slot 0, and its rows of activations are the next ones. Short rows may be packed: one of w is
// several that lie one behind the other, `lanes` of a wave to each, and so many sums follow each other at each place.
struct MatvecWork {
  Matrix w, w2; // w2: up of a pair
  bool pair;
  u32 row_begin, row_end;
  u32 slices, splits, split_shift, steps;
  const i32 *ids = nullptr; // (slots) experts
  u32 experts = 0, slots = 1;
  u32 first_row = 0; // where there are no ids: of the matrix, that row 0 is
  u32 lanes = kWaveSize;
};

// A slice of all that a block computes.
struct MatvecSlice {
  u32 slice; // of the row
  u32 slot;
  u32 first_row; // of the matrix that row 0 is, counted through the experts

  static APU_METHOD MatvecSlice of(const MatvecWork &work, u32 i) {
    if (!work.ids) return {i, 0, work.first_row};
    const u32 slot = i / work.slices, id = u32(work.ids[slot]);
    // Ids are what ROUTE wrote, or anything where it has not run yet.
    return {i % work.slices, slot, (id < work.experts ? id : work.experts - 1) * work.w.rows};
  }
};

// Addresses of the rows that a wave computes, row q of set `step`; null beyond the matrix. Of a matrix in one segment
// they are products, else they are found once and kept in the lanes, that of lane step * kSet + q.
template <u32 kSet> struct WaveRows {
  const u8 *first[kSet];
  u32 stride;          // of a step, bytes
  u32 step_rows, left; // rows of a step, rows of the matrix from the first on
  bool pair, products;
  u32 low, high;

  static APU_METHOD WaveRows of(const MatvecWork &work, u32 first_row, u32 group, u32 groups) {
    WaveRows a;
    const u32 rows = work.pair ? kSet / 2 : kSet, row = work.row_begin + group * rows;
    a.step_rows = groups * rows;
    a.left = row < work.row_end ? work.row_end - row : 0;
    a.pair = work.pair;
    a.products = work.w.segment_count <= 1 && (!work.pair || work.w2.segment_count <= 1);
    if (work.pair && work.w2.row_stride != work.w.row_stride) a.products = false;
    a.stride = a.step_rows * u32(work.w.row_stride);
#pragma unroll
    for (u32 q = 0; q < kSet; ++q) {
      const u8 *data = work.pair && q % 2 ? work.w2.data : work.w.data;
      a.first[q] = data + u64(first_row + row + a.row_of(0, q)) * u32(work.w.row_stride);
    }
    a.low = a.high = 0;
    if (!a.products) [[unlikely]] {
      const u32 step = lane_id() / kSet, q = lane_id() % kSet, at = a.row_of(step, q);
      if (step < work.steps && at < a.left) {
        const u8 *p = matrix_row(work.w, first_row + row + at);
        if (work.pair && q % 2) p = matrix_row(work.w2, first_row + row + at);
        a.low = u32(reinterpret_cast<u64>(p));
        a.high = u32(reinterpret_cast<u64>(p) >> 32);
      }
    }
    return a;
  }
  APU_METHOD u32 row_of(u32 step, u32 q) const { return step * step_rows + (pair ? q / 2 : q); } // from the first on
  APU_METHOD u32 low_at(u32 step, u32 q) const {
    return products ? u32(reinterpret_cast<u64>(first[q])) + step * stride : wave_read(low, step * kSet + q);
  }
  APU_METHOD const u8 *at(u32 step, u32 q) const {
    if (row_of(step, q) >= left) return nullptr;
    if (products) return first[q] + u64(step) * stride;
    const u32 lane = step * kSet + q;
    return reinterpret_cast<const u8 *>(u64(wave_read(high, lane)) << 32 | wave_read(low, lane));
  }
};

// The same for bulk copies, which lanes begin: that of lane step * kSet + q copies row q of set `step`.
template <u32 kSet> struct LaneRows {
  u32 low, high; // address, 0 beyond the matrix

  static APU_METHOD LaneRows of(const MatvecWork &work, u32 first_row, u32 group, u32 groups) {
    const u32 rows = work.pair ? kSet / 2 : kSet, step = lane_id() / kSet, q = lane_id() % kSet;
    const u32 row = work.row_begin + (step * groups + group) * rows + (work.pair ? q / 2 : q);
    const bool up = work.pair && q % 2;
    Matrix w; // chosen value by value: a choice between places would be kept in memory
    w.data = up ? work.w2.data : work.w.data;
    w.row_stride = up ? work.w2.row_stride : work.w.row_stride;
    w.segments = up ? work.w2.segments : work.w.segments;
    w.segment_count = up ? work.w2.segment_count : work.w.segment_count;
    u64 p = 0;
    if (step < work.steps && row < work.row_end) p = reinterpret_cast<u64>(matrix_row(w, first_row + row));
    return {u32(p), u32(p >> 32)};
  }
  APU_METHOD u32 low_at(u32 step, u32 q) const { return wave_read(low, step * kSet + q); }
  APU_METHOD bool aligned() const { return !wave_any(low % 16 != 0); }
};

template <u32 kSet, bool Bulk> struct RowsOfSets {
  using Type = WaveRows<kSet>;
};
template <u32 kSet> struct RowsOfSets<kSet, true> {
  using Type = LaneRows<kSet>;
};

template <class Format> constexpr u32 kSliceBytesOf = kWaveSize * kItemColumns / Format::kElements * Format::kBytes;
template <class Format> constexpr u32 kSetOf = matvec_set(kBulkCopy, Format::kElements, Format::kBytes);

// The block's LDS sums begin here.
template <class Format, u32 R> APU_DEVICE float *matvec_sums() {
  constexpr u32 kImages = kMatvecWaves * kSetOf<Format> * (kSliceBytesOf<Format> + kRowImageExtra);
  return reinterpret_cast<float *>(dynamic_shared() + kImages);
}

template <class Format> constexpr bool held_in_registers() {
  if constexpr (requires { Format::kHeld; }) return Format::kHeld;
  return false;
}

// The sets of a slice of rows, one after the other: copies to LDS, and products from there.
template <class Format, u32 R, bool Bulk = kBulkCopy && !(held_in_registers<Format>() && R <= 2)> struct SliceSets {
  static constexpr bool kBulk = Bulk;
  static constexpr u32 kSet = kSetOf<Format>, kSliceBytes = kSliceBytesOf<Format>;
  static constexpr u32 kImage = kSliceBytes + kRowImageExtra, kChunks = (kSliceBytes / 16 + kWaveSize) / kWaveSize;
  static_assert(kSliceBytes % 16 == 0 && kSet == (kSet / 2) * 2);
  // The next set waits in registers while one is multiplied, where there are enough; else bulk copies fetch it, where
  // there are such.
  static constexpr bool kHold = !Bulk && R <= 2;
  static constexpr u32 kSumTogether = R == 1 ? kSet : R == 2 ? 2 : 1; // rows at once, as far as registers go
  // A loop for aligned rows and one for others, or with sets in registers, which two loops would keep twice, a choice
  // in one loop.
  static constexpr bool kTwoLoops = Bulk && Format::kAligned;

  u8 *images; // of the wave
  SharedAddress shared_images;
  u32 phase; // of copies
  typename RowsOfSets<kSet, Bulk>::Type matrix;
  u32 slice, bytes;
  u32x4 held[kHold ? kSet : 1][Bulk ? 1 : kChunks];

  static APU_METHOD u32 place(u32 q) { return q * kImage + 16; }
  APU_METHOD void put_row(const u32x4 *from, u8 *to) const { // what was not fetched too: nobody reads it
#pragma unroll
    for (u32 c = 0; c < kChunks; ++c) {
      const u32 at = c * kWaveSize + lane_id();
      if ((c + 1) * kWaveSize <= kImage / 16 - 1 || at < kImage / 16 - 1)
        store16(to + 16 * lane_id() + c * kWaveSize * 16, from[c]);
    }
  }
  // Begins to fetch the set `step`. Bulk copies have a barrier, in the lead of the first image.
  APU_METHOD void fetch(u32 step) {
    if constexpr (Bulk) {
      if (lane_id() / kSet == step) {
        const u64 p = u64(matrix.high) << 32 | matrix.low;
        const u32 size = p ? (matrix.low % 16 + bytes + 15) & ~15u : 0;
        bulk_expect(shared_images, size);
        if (p)
          bulk_copy(shared_images + place(lane_id() % kSet),
                    reinterpret_cast<const u8 *>((p & ~u64(15)) + slice * kSliceBytes), size, shared_images);
      }
    } else {
#pragma unroll
      for (u32 q = 0; q < kSet; ++q) {
        const u8 *p = matrix.at(step, q); // null beyond the matrix
        const u32 low = u32(reinterpret_cast<u64>(p)), size = p ? low % 16 + bytes : 0;
        const u8 *from = reinterpret_cast<const u8 *>(reinterpret_cast<u64>(p) & ~u64(15)) + slice * kSliceBytes;
        u32x4 *row = held[kHold ? q : 0];
        const i32 mine = i32(size) - i32(16 * lane_id()); // bytes from this lane's first on
#pragma unroll
        for (u32 c = 0; c < kChunks; ++c)
          if (mine > i32(16 * c * kWaveSize)) row[c] = load16_stream(from + 16 * lane_id() + c * kWaveSize * 16);
        if (!kHold) put_row(row, images + place(q));
      }
    }
  }

  // Products of all sets; `sums` are those of the slice and of the group of waves. `Aligned` rows are known to be so;
  // of others those are, where all items are `whole`, that begin where an aligned row would. `lanes` of a packed row.
  template <bool Aligned, bool Packed>
  APU_METHOD void multiply(const typename Format::X (&x)[R], u32 steps, bool valid, bool full, bool whole, float *sums,
                           u32 set_rows, u32 step_rows, u32 lanes) {
#pragma unroll 1
    for (u32 step = 0; step < steps; ++step) {
      if constexpr (Bulk) {
        bulk_wait(shared_images, phase);
        phase ^= 1;
      }
      if constexpr (kHold) {
#pragma unroll
        for (u32 q = 0; q < kSet; ++q) put_row(held[q], images + place(q));
        if (step + 1 < steps) fetch(step + 1);
      }
      wave_sync();
      u32 starts[kSet]; // of the slices in their images
#pragma unroll
      for (u32 q = 0; q < kSet; ++q) starts[q] = 16 + (Aligned ? 0 : matrix.low_at(step, q) % 16);
#pragma unroll R <= 2 ? kSet : 1
      for (u32 q0 = 0; q0 < kSet; q0 += kSumTogether) {
        float sum[kSumTogether * R] = {};
        if (valid || !Bulk) { // where registers allow it, rows are multiplied side by side
#pragma unroll
          for (u32 q = 0; q < kSumTogether; ++q) {
            float part[R] = {};
            u32 at = starts[q];
#pragma unroll
            for (u32 other = 1; other < kSet; ++other) at = q0 + q == other ? starts[other] : at;
            const RowImage image{shared_images + (place(q0 + q) - 16), at};
            constexpr bool kEither = Format::kAligned && !kTwoLoops;
            if (valid || Bulk) {
              if constexpr (Aligned)
                Format::template multiply<true, R>(image, lane_id(), x, part, full);
              else if (kEither && at == 16 && whole)
                Format::template multiply<kEither, R>(image, lane_id(), x, part, full);
              else
                Format::template multiply<false, R>(image, lane_id(), x, part, full);
            }
#pragma unroll
            for (u32 r = 0; r < R; ++r) sum[q * R + r] = part[r];
          }
        }
        if constexpr (Bulk) { // the next set is on its way while this one's sums are formed
          if (q0 + kSumTogether == kSet) {
            wave_sync();
            if (step + 1 < steps) fetch(step + 1);
          }
        }
        if constexpr (Packed) {
          const u32 each = kWaveSize / lanes;
#pragma unroll
          for (u32 value = 0; value < kSumTogether * R; ++value) {
            float total = sum[value];
            for (u32 mask = 1; mask < lanes; mask *= 2) total += wave_shuffle_xor(total, mask);
            const u32 at = value % R * set_rows + step * step_rows + q0 + value / R;
            if (lane_id() % lanes == 0) sums[at * each + lane_id() / lanes] = total;
          }
          continue;
        }
        const float total = wave_sums(sum);
        constexpr u32 kLanes = kWaveSize / (kSumTogether * R);
        const u32 value = lane_id() / kLanes;
        if (lane_id() % kLanes == 0) sums[value % R * set_rows + step * step_rows + q0 + value / R] = total;
      }
      if constexpr (!Bulk) {
        wave_sync();
        if (!kHold && step + 1 < steps) fetch(step + 1);
      }
    }
  }
};

// All threads of the block; `rows` are those of activations. Ends with a barrier.
template <class Format, u32 R, bool Packed = false>
APU_DEVICE void matvec_block(const MatvecWork &work, const ActivationRows &rows) {
  using Sets = SliceSets<Format, R>;
  const u32 wave = wave_uniform(wave_id()), lane = lane_id();
  const u32 groups = kMatvecWaves >> work.split_shift, group = wave >> work.split_shift;
  const u32 k = work.w.k, items = (k + kItemColumns - 1) / kItemColumns;
  const u32 row_bytes = k / Format::kElements * Format::kBytes;
  const u32 step_rows = groups * Sets::kSet, set_rows = step_rows * work.steps;
  float *sums = matvec_sums<Format, R>();
  Sets sets;
  sets.phase = 0;
  sets.images = dynamic_shared() + wave * (Sets::kSet * Sets::kImage);
  sets.shared_images = shared_address(sets.images);
  if constexpr (Sets::kBulk) {
    if (lane == 0) bulk_init(sets.shared_images, Sets::kSet);
    wave_sync();
  }
  if constexpr (requires { Format::prepare(); }) {
    Format::prepare();
    block_sync();
  }

  for (u32 i = wave & (work.splits - 1); i < work.slices * work.slots; i += work.splits) {
    const MatvecSlice part = MatvecSlice::of(work, i);
    const u32 slice = sets.slice = part.slice, left = row_bytes - slice * Sets::kSliceBytes;
    sets.matrix = decltype(sets.matrix)::of(work, part.first_row, group, groups);
    sets.bytes = left < Sets::kSliceBytes ? left : Sets::kSliceBytes;
    sets.fetch(0);
    const u32 item = slice * kWaveSize + lane;
    const bool valid = item < items, full = item * kItemColumns + kItemColumns / 2 < k;
    typename Format::X x[R];
    if (valid) {
#pragma unroll
      for (u32 r = 0; r < R; ++r) Format::load(x[r], rows.row(r, part.slot), Packed ? item & (work.lanes - 1) : item);
    }
    float *to = sums + i * R * set_rows + group * Sets::kSet * (Packed ? kWaveSize / work.lanes : 1);
    const bool whole = k % kItemColumns == 0; // items
    if constexpr (Sets::kTwoLoops) {
      if (whole && sets.matrix.aligned()) {
        sets.template multiply<true, Packed>(x, work.steps, valid, full, whole, to, set_rows, step_rows, work.lanes);
        continue;
      }
    }
    sets.template multiply<false, Packed>(x, work.steps, valid, full, whole, to, set_rows, step_rows, work.lanes);
  }
  block_sync();
}

// The sum over slices for activation row r and row i of the block.
template <u32 R> APU_DEVICE float matvec_total(const float *sums, u32 slices, u32 set_rows, u32 r, u32 i) {
  float total = sums[r * set_rows + i];
#pragma unroll 1
  for (u32 slice = 1; slice < slices; ++slice) total += sums[(slice * R + r) * set_rows + i];
  return total;
}

// How `matvec` computes a block: quantised matrices here, float ones in matvec_float.h.
template <class Format> struct QuantizedProduct {
  static constexpr u32 kSet = kSetOf<Format>;
  static constexpr u32 blocks(u32 r) { // of a unit, without spills
    constexpr bool kFew = matvec_few(Format::kElements, Format::kBytes);
    if (r > 2) return r == 4 ? 3 : 2;
    if (!held_in_registers<Format>()) return (r == 1 ? 8 : 6) - kFew;
    return r == 2 ? 4 : matvec_held_blocks(Format::kElements, Format::kBytes);
  }
  template <u32 R> static APU_METHOD float *sums() { return matvec_sums<Format, R>(); }
  template <u32 R> static APU_METHOD void run(const MatvecWork &work, const ActivationRows &rows) {
    matvec_block<Format, R>(work, rows);
  }
};

// Blocks in x walk over the rows of all matrices, blocks in y over groups of R activation rows. Each way through the
// code is short and rarely jumps: a launch of a few microseconds begins with no instructions in cache either.
template <class Product, u32 R> APU_DEVICE void matvec(const MatvecArgs &a) {
  constexpr u32 kSet = Product::kSet;
  const u32 begin = block_id_y() * R, block = block_id();
  const u32 count = *a.count; // first and used last: nothing waits for it
  u32 m = 0;
#pragma unroll
  for (u32 i = 1; i < kMatvecSides; ++i) m += block >= a.first_block[i];
  const MatvecSide side = a.sides[m];
  const u32 set_rows = (kMatvecWaves >> a.split_shift) * a.steps * kSet;
  const u32 block_rows = a.pair ? set_rows / 2 : set_rows, row_begin = (block - a.first_block[m]) * block_rows;
  Product::template run<R>(
      {side.w, a.sides[1].w, a.pair != 0, row_begin, side.w.rows, a.slices, a.splits, a.split_shift, a.steps},
      ActivationRows{a.in, begin, a.rows - 1});

  const float *sums = Product::template sums<R>();
  const u32 term_shift = a.terms - 1; // 8 rows of two terms are 4 of out
#pragma unroll 1
  for (u32 t = wave_id(); t < R >> term_shift; t += kMatvecWaves) {
    const u32 row = (begin >> term_shift) + t;
    if (row >= count) break;
#pragma unroll 1
    for (u32 j = lane_id(); j < block_rows; j += kWaveSize) {
      const u32 n = row_begin + j;
      if (n >= side.w.rows) break;
      const u64 at = u64(row) * side.w.rows + n;
      auto total = [&](u32 i) {
        float y = matvec_total<R>(sums, a.slices, set_rows, t << term_shift, i);
        if (a.terms == 2) y += matvec_total<R>(sums, a.slices, set_rows, t * 2 + 1, i);
        return y;
      };
      float y;
      if (a.plain) {
        y = matvec_total<R>(sums, a.slices, set_rows, t, j);
      } else {
        y = total(a.pair ? 2 * j : j);
        if (side.bias) y += side.bias[n];
        if (m == 0) { // what is done to side 0
          if (a.activation) {
            float up;
            if (a.pair) {
              up = total(2 * j + 1);
              if (a.sides[1].bias) up += a.sides[1].bias[n];
            } else {
              up = a.up[at];
            }
            y = gated_activation(a.activation, a.limit, y, up);
          }
          if (a.soft_cap != 0) y = soft_cap(y, a.soft_cap);
          if (a.residual) y = a.residual[at] + y;
        }
      }
      side.out[at] = y;
    }
  }
}

// Entry points of a type: matvec_<name>_r1, _r2, _r4 and _r8.
#define APU_MATVEC_KERNEL(name, Product, R)                                                                            \
  APU_KERNEL_OF(kMatvecWaves *kWaveSize, Product::blocks(R)) void matvec_##name##_r##R(MatvecArgs args) {              \
    matvec<Product, R>(args);                                                                                          \
  }
#define APU_MATVEC_ROWS(name, Product)                                                                                 \
  APU_MATVEC_KERNEL(name, Product, 1)                                                                                  \
  APU_MATVEC_KERNEL(name, Product, 2) APU_MATVEC_KERNEL(name, Product, 4) APU_MATVEC_KERNEL(name, Product, 8)
#define APU_MATVEC_KERNELS(name, Format) APU_MATVEC_ROWS(name, QuantizedProduct<Format>)

} // namespace apu::gpu
