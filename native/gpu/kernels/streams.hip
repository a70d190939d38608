// STREAMS_IN and STREAMS_OUT: hyper-connections (arXiv 2512.24880).
//
// streams_* make the products that a block's weights come from, in float, and the sum of squares beside them; dividing
// by the rms follows, so that the streams are read as they are. A wave has one row of the matrix (few rows) or six
// (tiles of eight rows, from which both matrix and streams come from cache). With few rows the last block of a row
// finishes it: one wave mixes while the others add the streams up; a layer of a decode step waits once. With many rows
// streams_finish follows, whose blocks share a row's columns. The mix is kept as the scales of rows and columns of
// what the iterations began with: for four streams all of it is in each lane's registers and no lane waits for another.
// Bytes moved: the matrix for each row, or tile of rows, and twice the streams; STREAMS_OUT 4 (2 S + 1) D bytes a row.
#include "dequantize.h"
#include "matrix.h"
#include "row_count.h"
#include "streams.h"

using namespace apu::gpu;

constexpr u32 kPartColumns = kStreamSteps * kStreamColumns * kWaveSize;

struct Columns4 {
  float v[kStreamColumns];
};
APU_DEVICE Columns4 load_columns(const void *p) {
  const u32x4 bits = load16(p);
  return {{bits_to_float(bits.x), bits_to_float(bits.y), bits_to_float(bits.z), bits_to_float(bits.w)}};
}
APU_DEVICE void store_columns(float *p, const Columns4 &c) {
  store16(p, u32x4{float_to_bits(c.v[0]), float_to_bits(c.v[1]), float_to_bits(c.v[2]), float_to_bits(c.v[3])});
}

// Four columns of a matrix row, or of an input. The first two want rows at multiples of four columns' bytes, and K a
// multiple of four.
struct F16Columns {
  APU_METHOD static Columns4 weights(const Matrix &, const u8 *row, u32 column) {
    const u32x2 bits = *global_pointer<const u32x2>(reinterpret_cast<u64>(row) + 2 * u64(column));
    return {{half_to_float(bits.x & 0xffffu), half_to_float(bits.x >> 16), half_to_float(bits.y & 0xffffu),
             half_to_float(bits.y >> 16)}};
  }
  APU_METHOD static Columns4 inputs(const float *row, u32, u32 column) { return load_columns(row + column); }
};
struct F32Columns {
  APU_METHOD static Columns4 weights(const Matrix &, const u8 *row, u32 column) {
    return load_columns(row + 4 * u64(column));
  }
  APU_METHOD static Columns4 inputs(const float *row, u32, u32 column) { return load_columns(row + column); }
};
struct AnyColumns { // of any type at any address
  APU_METHOD static Columns4 weights(const Matrix &w, const u8 *row, u32 column) {
    float v[16];
    dequantize_any16(w.type, row, w.k, column / 16, v);
    const u32 quarter = column / 4 % 4;
    Columns4 out;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const float first = v[i], second = v[4 + i], third = v[8 + i], fourth = v[12 + i];
      out.v[i] = quarter == 0 ? first : quarter == 1 ? second : quarter == 2 ? third : fourth;
    }
    return out;
  }
  APU_METHOD static Columns4 inputs(const float *row, u32 k, u32 column) {
    Columns4 out;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) out.v[i] = column + i < k ? row[column + i] : 0.0f;
    return out;
  }
};

// Sums of one part for `Rows` rows from block_id_y() * Rows on, `Outputs` rows of the matrix a wave; Batch steps are
// under way at a time. Grid: parts times groups of outputs. False where no row counts, which of a single row is looked
// at last: memory holds the rows of every bucket.
template <class Columns, u32 Rows, u32 Outputs, u32 Batch>
APU_DEVICE bool sum_products(const StreamsInArgs &a, u32 waves) {
  const u32 rows = count_rows(a.count), t0 = block_id_y() * Rows, all = a.w.rows, k = a.w.k;
  if (Rows > 1 && t0 >= rows) return false;
  const u32 part = block_id() % a.parts, n0 = (block_id() / a.parts * waves + wave_uniform(wave_id())) * Outputs;
  if (n0 >= all) return t0 < rows;
  const u8 *w[Outputs];
  const float *x[Rows];
#pragma unroll
  for (u32 o = 0; o < Outputs; ++o) w[o] = matrix_row(a.w, n0 + o < all ? n0 + o : all - 1);
#pragma unroll
  for (u32 r = 0; r < Rows; ++r) x[r] = a.in + u64(Rows == 1 || t0 + r < rows ? t0 + r : rows - 1) * k;

  float sum[Outputs][Rows] = {}, squares[Rows] = {};
  const u32 begin = part * kPartColumns + lane_id() * kStreamColumns, step = kStreamColumns * kWaveSize;
#pragma unroll 1
  for (u32 s = 0; s < kStreamSteps; s += Batch) {
    Columns4 weights[Batch][Outputs], v[Batch][Rows];
#pragma unroll
    for (u32 b = 0; b < Batch; ++b) {
      const u32 c = begin + (s + b) * step, at = c < k ? c : 0; // what is beyond the row counts as zero
#pragma unroll
      for (u32 o = 0; o < Outputs; ++o) weights[b][o] = Columns::weights(a.w, w[o], at);
#pragma unroll
      for (u32 r = 0; r < Rows; ++r) v[b][r] = Columns::inputs(x[r], k, at);
    }
#pragma unroll
    for (u32 b = 0; b < Batch; ++b) {
      const bool inside = begin + (s + b) * step < k;
#pragma unroll
      for (u32 r = 0; r < Rows; ++r) {
#pragma unroll
        for (u32 i = 0; i < kStreamColumns; ++i) {
          const float value = inside ? v[b][r].v[i] : 0.0f;
          if (Rows == 1 || n0 == 0) squares[r] = fma_f32(value, value, squares[r]);
#pragma unroll
          for (u32 o = 0; o < Outputs; ++o) sum[o][r] = fma_f32(value, weights[b][o].v[i], sum[o][r]);
        }
      }
    }
  }
  constexpr u32 kLanes = kWaveSize / Rows; // that hold the same row's sum
  const u32 r = lane_id() / kLanes;
  float *const to = a.sums + (u64(t0 + r) * a.parts + part) * (all + 1);
  const bool writes = lane_id() % kLanes == 0 && t0 + r < rows;
#pragma unroll
  for (u32 o = 0; o < Outputs; ++o) {
    const float total = wave_sums(sum[o]);
    if (writes && n0 + o < all) to[n0 + o] = total;
  }
  if (n0 == 0) {
    const float total = wave_sums(squares);
    if (writes) to[all] = total;
  }
  return t0 < rows;
}

APU_DEVICE float sigmoid(float x) {
  return 1.0f / (1.0f + exp_f32(-x));
}

// What all threads of a block know of a row.
struct RowWeights {
  float totals[kStreamsMost * (kStreamsMost + 2) + 1]; // of the products, then of the squares
  float input[kStreamsMost];
  float mix[kStreamsMost * kStreamsMost];
  float shrink;

  APU_METHOD float number(const StreamsInArgs &a, u32 n, u32 kind) const {
    return fma_f32(totals[n] * shrink, a.scale[kind], a.offset[n]);
  }
};

// By one wave: 4 x 4 numbers, those of a row in neighbouring lanes, then all of them in every lane.
APU_DEVICE void mix_four(const StreamsInArgs &a, const RowWeights &row, float *mix) {
  const u32 at = lane_id() % 16;
  const float number = row.number(a, 8 + at, 2);
  float most = max_f32(number, wave_shuffle_xor(number, 1));
  most = max_f32(most, wave_shuffle_xor(most, 2));
  const float own = exp_f32(number - most);
  float sum = own + wave_shuffle_xor(own, 1);
  sum += wave_shuffle_xor(sum, 2);
  const float begun = own / sum + a.floor;
  float m[4][4], rows[4] = {1, 1, 1, 1}, columns[4] = {1, 1, 1, 1};
#pragma unroll
  for (u32 i = 0; i < 16; ++i) m[i / 4][i % 4] = wave_shuffle(begun, i);
#pragma unroll 1
  for (u32 iteration = 0; iteration < a.iterations; ++iteration) {
    if (iteration) {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        float s = m[i][0] * columns[0];
#pragma unroll
        for (u32 j = 1; j < 4; ++j) s = fma_f32(m[i][j], columns[j], s);
        rows[i] *= rcp_f32(fma_f32(s, rows[i], a.floor));
      }
    }
#pragma unroll
    for (u32 j = 0; j < 4; ++j) {
      float s = m[0][j] * rows[0];
#pragma unroll
      for (u32 i = 1; i < 4; ++i) s = fma_f32(m[i][j], rows[i], s);
      columns[j] *= rcp_f32(fma_f32(s, columns[j], a.floor));
    }
  }
  const u32 i = at / 4, j = at % 4;
  const float of_row = i == 0 ? rows[0] : i == 1 ? rows[1] : i == 2 ? rows[2] : rows[3];
  const float of_column = j == 0 ? columns[0] : j == 1 ? columns[1] : j == 2 ? columns[2] : columns[3];
  if (lane_id() < 16) mix[at] = begun * of_row * of_column;
}

// Lines by their sums plus the floor, a lane to each: `line` apart, their elements `step`.
APU_DEVICE void divide_lines(float *m, u32 streams, u32 line, u32 step, float floor) {
  if (lane_id() < streams) {
    float *const of = m + lane_id() * line, sum = floor;
    for (u32 i = 0; i < streams; ++i) sum += of[i * step];
    for (u32 i = 0; i < streams; ++i) of[i * step] /= sum;
  }
  wave_sync();
}

// By one wave, any number of streams.
APU_DEVICE void mix_any(const StreamsInArgs &a, RowWeights &row, float *mix) {
  const u32 s = a.streams, lane = lane_id();
  if (lane < s) {
    float *const of = row.mix + lane * s;
    const u32 first = (lane + 2) * s;
    float most = row.number(a, first, 2), sum = 0;
    for (u32 i = 1; i < s; ++i) most = max_f32(most, row.number(a, first + i, 2));
    for (u32 i = 0; i < s; ++i) sum += of[i] = exp_f32(row.number(a, first + i, 2) - most);
    for (u32 i = 0; i < s; ++i) of[i] = of[i] / sum + a.floor;
  }
  wave_sync();
  for (u32 iteration = 0; iteration < a.iterations; ++iteration) {
    if (iteration) divide_lines(row.mix, s, s, 1, a.floor);
    divide_lines(row.mix, s, 1, s, a.floor);
  }
  for (u32 i = lane; i < s * s; i += kWaveSize) mix[i] = row.mix[i];
}

// Columns [begin, end) of out; Streams is 0 where their number is not known to the compiler.
template <u32 Streams>
APU_DEVICE void add_streams(const StreamsInArgs &a, const RowWeights &row, u32 t, u32 begin, u32 end, u32 threads) {
  const u32 s = Streams ? Streams : a.streams;
  const float *const in = a.in + u64(t) * s * a.d;
  float *const out = a.out + u64(t) * a.d;
  if (a.aligned) {
#pragma unroll 2
    for (u32 c = begin + 4 * thread_id(); c < end; c += 4 * threads) {
      Columns4 sum{};
#pragma unroll
      for (u32 j = 0; j < s; ++j) {
        const Columns4 x = load_columns(in + u64(j) * a.d + c);
#pragma unroll
        for (u32 i = 0; i < 4; ++i) sum.v[i] = fma_f32(row.input[j], x.v[i], sum.v[i]);
      }
      store_columns(out + c, sum);
    }
    return;
  }
  for (u32 c = begin + thread_id(); c < end; c += threads) {
    float sum = 0;
    for (u32 j = 0; j < s; ++j) sum = fma_f32(row.input[j], in[u64(j) * a.d + c], sum);
    out[c] = sum;
  }
}

// A row, of whose columns this block has [begin, end). The one that has the first also mixes, by its last wave.
APU_DEVICE void finish_row(const StreamsInArgs &a, u32 t, u32 begin, u32 end) {
  APU_SHARED RowWeights row;
  const u32 s = a.streams, all = a.w.rows;
  for (u32 n = thread_id(); n <= all; n += kStreamThreads) {
    const float *const from = a.sums + u64(t) * a.parts * (all + 1) + n;
    float total = 0;
#pragma unroll 8
    for (u32 p = 0; p < a.parts; ++p) total += from[p * (all + 1)];
    row.totals[n] = total;
    if (n == all) row.shrink = 1.0f / sqrt_f32(total / float(a.w.k) + a.eps);
  }
  block_sync();
  const u32 thread = thread_id();
  if (thread < s) row.input[thread] = sigmoid(row.number(a, thread, 0)) + a.floor;
  block_sync();
  const bool mixes = a.mix && begin == 0;
  const u32 workers = mixes ? kStreamThreads - kWaveSize : kStreamThreads;
  if (thread < workers) {
    if (s == 4)
      add_streams<4>(a, row, t, begin, end, workers);
    else
      add_streams<0>(a, row, t, begin, end, workers);
    return;
  }
  float *const post = a.mix + u64(t) * (s + s * s);
  if (lane_id() < s) post[lane_id()] = 2.0f * sigmoid(row.number(a, s + lane_id(), 1));
  if (s == 4)
    mix_four(a, row, post + s);
  else
    mix_any(a, row, post + s);
}

// The last block that comes here for a row finishes it.
APU_DEVICE void finish_last(const StreamsInArgs &a) {
  APU_SHARED u32 last;
  const u32 t = block_id_y();
  device_fence();
  block_sync();
  if (thread_id() == 0) last = atomic_add(a.counters + t, 1) == grid_size() - 1;
  block_sync();
  if (!last) return;
  device_fence();
  if (thread_id() == 0) a.counters[t] = 0;
  finish_row(a, t, 0, a.d);
}

#define APU_STREAMS(name, columns, batch, outputs)                                                                     \
  APU_KERNEL(kStreamThreads) void streams_##name##_few(StreamsInArgs a) {                                              \
    if (sum_products<columns, 1, 1, batch>(a, kStreamThreads / kWaveSize)) finish_last(a);                             \
  }                                                                                                                    \
  APU_KERNEL(kStreamManyThreads) void streams_##name##_many(StreamsInArgs a) {                                         \
    sum_products<columns, kStreamManyRows, outputs, 1>(a, kStreamManyThreads / kWaveSize);                             \
  }

APU_STREAMS(f16, F16Columns, kStreamSteps, kStreamManyOutputs)
APU_STREAMS(f32, F32Columns, kStreamSteps, kStreamManyOutputs)
APU_STREAMS(any, AnyColumns, 1, 1)

// Grid (blocks of a row's columns, rows).
APU_KERNEL(kStreamThreads) void streams_finish(StreamsInArgs a) {
  const u32 t = block_id_y(), begin = block_id() * a.finish_columns;
  if (t >= count_rows(a.count)) return;
  finish_row(a, t, begin, begin + a.finish_columns < a.d ? begin + a.finish_columns : a.d);
}

// Four streams at multiples of 16 bytes, four columns a thread. Grid (columns, rows). A thread reads all streams before
// it writes any: out may be in.
APU_KERNEL(kStreamThreads) void streams_out_four(StreamsOutArgs a) {
  const u32 t = block_id_y(), c = 4 * (block_id() * kStreamThreads + thread_id());
  const u32 rows = count_rows(a.count);
  if (c >= a.d) return;
  const u64 at = u64(t) * 4 * a.d + c;
  Columns4 mix[5], x[4];
#pragma unroll
  for (u32 j = 0; j < 4; ++j) x[j] = load_columns(a.in + at + u64(j) * a.d);
  const Columns4 made = load_columns(a.made + u64(t) * a.d + c);
#pragma unroll
  for (u32 i = 0; i < 5; ++i) mix[i] = load_columns(a.mix + u64(t) * 20 + 4 * i);
  if (t >= rows) return;
#pragma unroll
  for (u32 s = 0; s < 4; ++s) {
    Columns4 y;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      y.v[i] = mix[0].v[s] * made.v[i];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) y.v[i] = fma_f32(mix[1 + j].v[s], x[j].v[i], y.v[i]);
    }
    store_columns(a.out + at + u64(s) * a.d, y);
  }
}

// Any number of streams, a column a thread.
APU_KERNEL(kStreamThreads) void streams_out_any(StreamsOutArgs a) {
  const u32 t = block_id_y(), c = block_id() * kStreamThreads + thread_id(), s = a.streams;
  if (t >= count_rows(a.count) || c >= a.d) return;
  const u64 at = u64(t) * s * a.d + c;
  const float *const post = a.mix + u64(t) * (s + s * s), *const mix = post + s, made = a.made[u64(t) * a.d + c];
  float x[kStreamsMost];
#pragma unroll
  for (u32 j = 0; j < kStreamsMost; ++j) x[j] = j < s ? a.in[at + u64(j) * a.d] : 0.0f;
  for (u32 k = 0; k < s; ++k) {
    float y = post[k] * made;
#pragma unroll
    for (u32 j = 0; j < kStreamsMost; ++j)
      if (j < s) y = fma_f32(mix[j * s + k], x[j], y);
    a.out[at + u64(k) * a.d] = y;
  }
}
