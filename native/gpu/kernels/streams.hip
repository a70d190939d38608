// STREAMS_IN and STREAMS_OUT: hyper-connections (arXiv 2512.24880).
//
// Products with the streams are made in float, and the sum of squares beside them; dividing by the rms follows, so that
// the streams are read as they are. Few rows: a block has a part of the columns in all streams, and the last block of a
// row finishes it: one wave mixes while the others add the streams up. streams_joined_* close the block before as well,
// each its own columns: a layer of a decode step waits twice for hyper-connections. Many rows: streams_*_many reads
// tiles of eight rows, streams_finish_* follows, whose blocks share a row's columns. The mix is kept as the scales of
// rows and columns of what the iterations began with: for four streams all of it is in each lane's registers and no
// lane waits for another. Bytes moved: the matrix for each row, or tile of rows, and twice the streams; STREAMS_OUT 4
// (2 S + 1) D bytes a row.
#include "dequantize.h"
#include "matrix.h"
#include "row_count.h"
#include "streams.h"

using namespace apu::gpu;

struct Columns4 {
  float v[kStreamColumns];
};
APU_DEVICE Columns4 columns_of(u32x4 bits) {
  return {{bits_to_float(bits.x), bits_to_float(bits.y), bits_to_float(bits.z), bits_to_float(bits.w)}};
}
APU_DEVICE u32x4 bits_of(const Columns4 &c) {
  return {float_to_bits(c.v[0]), float_to_bits(c.v[1]), float_to_bits(c.v[2]), float_to_bits(c.v[3])};
}
APU_DEVICE Columns4 load_columns(const void *p) {
  return columns_of(load16(p));
}
APU_DEVICE void store_columns(float *p, const Columns4 &c) {
  store16(p, bits_of(c));
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

// Sums of one part for a tile of rows, `Outputs` rows of the matrix a wave. Grid (parts times groups of outputs,
// tiles).
template <class Columns, u32 Outputs> APU_DEVICE void sum_products(const StreamsInArgs &a) {
  constexpr u32 waves = kStreamManyThreads / kWaveSize, R = kStreamManyRows;
  const u32 rows = count_rows(a.count), t0 = block_id_y() * R, all = a.w.rows, k = a.w.k;
  if (t0 >= rows) return;
  const u32 part = block_id() % a.parts, n0 = (block_id() / a.parts * waves + wave_uniform(wave_id())) * Outputs;
  if (n0 >= all) return;
  const u8 *w[Outputs];
  const float *x[R];
#pragma unroll
  for (u32 o = 0; o < Outputs; ++o) w[o] = matrix_row(a.w, n0 + o < all ? n0 + o : all - 1);
#pragma unroll
  for (u32 r = 0; r < R; ++r) x[r] = a.in + u64(t0 + r < rows ? t0 + r : rows - 1) * k;

  float sum[Outputs][R] = {}, squares[R] = {};
  constexpr u32 step = kStreamColumns * kWaveSize;
  const u32 begin = part * kStreamSteps * step + lane_id() * kStreamColumns;
  const u32 end = begin + kStreamSteps * step < k ? begin + kStreamSteps * step : k;
#pragma unroll 1
  for (u32 c = begin; c < end; c += step) {
    Columns4 weights[Outputs], v[R];
#pragma unroll
    for (u32 o = 0; o < Outputs; ++o) weights[o] = Columns::weights(a.w, w[o], c);
#pragma unroll
    for (u32 r = 0; r < R; ++r) v[r] = Columns::inputs(x[r], k, c);
#pragma unroll
    for (u32 r = 0; r < R; ++r) {
#pragma unroll
      for (u32 i = 0; i < kStreamColumns; ++i) {
        if (n0 == 0) squares[r] = fma_f32(v[r].v[i], v[r].v[i], squares[r]);
#pragma unroll
        for (u32 o = 0; o < Outputs; ++o) sum[o][r] = fma_f32(v[r].v[i], weights[o].v[i], sum[o][r]);
      }
    }
  }
  constexpr u32 kLanes = kWaveSize / R; // that hold the same row's sum
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
}

// Four streams of a part; a thread has four columns of one stream, those that exist.
struct PartOfFour {
  static constexpr u32 kThreads = 4 * kStreamPart / kStreamColumns; // that have some
  u32 stream, column;
  bool has;

  static APU_METHOD PartOfFour of(u32 part, u32 d) {
    const u32 at = thread_id() * kStreamColumns, column = part * kStreamPart + at % kStreamPart;
    return {at / kStreamPart, column, thread_id() < kThreads && column < d};
  }
  APU_METHOD Columns4 load(const float *row, u32 d) const {
    return has ? load_columns(row + u64(stream) * d + column) : Columns4{};
  }
  // The stream as STREAMS_OUT makes it.
  APU_METHOD Columns4 close(const StreamsOutArgs &a, u32 t) const {
    Columns4 y{};
    if (!has) return y;
    const float *const in = a.in + u64(t) * 4 * a.d + column, *const mix = a.mix + u64(t) * 20 + stream;
    Columns4 x[4];
    float weight[5];
#pragma unroll
    for (u32 j = 0; j < 4; ++j) x[j] = load_columns(in + u64(j) * a.d);
    const Columns4 made = load_columns(a.made + u64(t) * a.d + column);
#pragma unroll
    for (u32 j = 0; j < 5; ++j) weight[j] = mix[4 * j];
#pragma unroll
    for (u32 i = 0; i < kStreamColumns; ++i) {
      y.v[i] = weight[0] * made.v[i];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) y.v[i] = fma_f32(weight[1 + j], x[j].v[i], y.v[i]);
    }
    return y;
  }
};

// A part of one row of four streams, all of a wave's weights under way at once. Grid (parts, rows). False where the row
// does not count, which is looked at last: memory holds the rows of every bucket.
template <class Columns, bool Joined> APU_DEVICE bool sum_part_of_four(const StreamsInArgs &a) {
  APU_SHARED u32x4 x[PartOfFour::kThreads];
  APU_SHARED float sums[25];
  constexpr u32 waves = kStreamFourThreads / kWaveSize, outputs = 24 / waves, step = kStreamColumns * kWaveSize;
  constexpr u32 steps = 4 * kStreamPart / step;
  const u32 t = block_id_y(), part = block_id(), all = a.w.rows, d = a.d;
  const u32 rows = count_rows(a.count), wave = wave_uniform(wave_id()), first = lane_id() * kStreamColumns;
  Columns4 weights[outputs][steps];
#pragma unroll
  for (u32 o = 0; o < outputs; ++o) {
    const u32 n = wave + o * waves;
    const u8 *const w = matrix_row(a.w, n < all ? n : all - 1);
#pragma unroll
    for (u32 s = 0; s < steps; ++s) {
      const u32 at = first + s * step, column = part * kStreamPart + at % kStreamPart;
      weights[o][s] = Columns::weights(a.w, w, column < d ? at / kStreamPart * d + column : 0); // else times zero
    }
  }
  const PartOfFour own = PartOfFour::of(part, d);
  Columns4 mine;
  if constexpr (Joined)
    mine = own.close(a.before, t);
  else
    mine = own.load(a.in + u64(t) * 4 * d, d);
  if (thread_id() < PartOfFour::kThreads) x[thread_id()] = bits_of(mine);
  block_sync(); // and all have read what is written now
  if (t >= rows) return false;
  if (Joined && own.has) store_columns(a.before.out + (u64(t) * 4 + own.stream) * d + own.column, mine);
  float sum[outputs] = {}, squares = 0;
#pragma unroll
  for (u32 s = 0; s < steps; ++s) {
    const Columns4 v = columns_of(x[lane_id() + s * kWaveSize]);
#pragma unroll
    for (u32 i = 0; i < kStreamColumns; ++i) {
      squares = fma_f32(v.v[i], v.v[i], squares);
#pragma unroll
      for (u32 o = 0; o < outputs; ++o) sum[o] = fma_f32(v.v[i], weights[o][s].v[i], sum[o]);
    }
  }
#pragma unroll
  for (u32 o = 0; o < outputs; ++o) {
    const float total = wave_sum(sum[o]);
    const u32 n = wave + o * waves;
    if (lane_id() == 0 && n < all) sums[n] = total;
  }
  if (wave == waves - 1) {
    squares = wave_sum(squares);
    if (lane_id() == 0) sums[all] = squares;
  }
  block_sync();
  const u32 n = thread_id();
  if (n <= all) a.sums[(u64(t) * a.parts + part) * (all + 1) + n] = sums[n];
  return true;
}

// The same of any number of streams and any matrix.
APU_DEVICE bool sum_part(const StreamsInArgs &a) {
  APU_SHARED float x[kStreamsMost * kStreamPart];
  constexpr u32 waves = kStreamThreads / kWaveSize;
  const u32 t = block_id_y(), part = block_id(), all = a.w.rows, d = a.d, s = a.streams;
  if (t >= count_rows(a.count)) return false;
  for (u32 i = thread_id(); i < s * kStreamPart; i += kStreamThreads) {
    const u32 column = part * kStreamPart + i % kStreamPart;
    x[i] = column < d ? a.in[(u64(t) * s + i / kStreamPart) * d + column] : 0.0f;
  }
  block_sync();
  float *const to = a.sums + (u64(t) * a.parts + part) * (all + 1);
  for (u32 n = wave_uniform(wave_id()); n <= all; n += waves) {
    const u8 *const w = matrix_row(a.w, n < all ? n : 0);
    float sum = 0;
    for (u32 i = lane_id() * 16; i < s * kStreamPart; i += kWaveSize * 16) { // sixteen columns of one stream
      const u32 column = part * kStreamPart + i % kStreamPart, begin = i / kStreamPart * d + column;
      const u32 end = column < d ? begin + (d - column < 16 ? d - column : 16) : begin;
      for (u32 g = begin / 16; 16 * g < end; ++g) { // of the matrix, which need not begin where they do
        float v[16];
        dequantize_any16(a.w.type, w, a.w.k, g, v);
#pragma unroll
        for (u32 c = 0; c < 16; ++c) {
          const u32 at = 16 * g + c;
          if (at < begin || at >= end) continue;
          const float value = x[i + at - begin];
          sum = fma_f32(value, n < all ? v[c] : value, sum);
        }
      }
    }
    sum = wave_sum(sum);
    if (lane_id() == 0) to[n] = sum;
  }
  return true;
}

APU_DEVICE float sigmoid(float x) {
  return 1.0f / (1.0f + exp_f32(-x));
}

// What all threads of a block know of a row.
struct RowWeights {
  float sums[kStreamThreads / kWaveSize][kStreamsMost * (kStreamsMost + 2) + 1]; // of the parts of a wave
  float totals[kStreamsMost * (kStreamsMost + 2) + 1];                           // products, then the squares
  float input[kStreamsMost];
  float mix[kStreamsMost * kStreamsMost];
  float shrink;

  APU_METHOD float number(const StreamsInArgs &a, u32 n, u32 kind) const {
    return fma_f32(totals[n] * shrink, a.scale[kind], a.offset[n]);
  }
};

// By one wave: 4 x 4 numbers, of which a lane has one, those of a row beside each other; then each lane has all.
APU_DEVICE void mix_four(const StreamsInArgs &a, float number, float *mix) {
  const u32 at = lane_id() % 16;
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

// Columns [begin, end) of out.
APU_DEVICE void add_streams(const StreamsInArgs &a, const RowWeights &row, u32 t, u32 begin, u32 end, u32 threads) {
  const float *const in = a.in + u64(t) * a.streams * a.d;
  for (u32 c = begin + thread_id(); c < end; c += threads) {
    float sum = 0;
    for (u32 j = 0; j < a.streams; ++j) sum = fma_f32(row.input[j], in[u64(j) * a.d + c], sum);
    a.out[u64(t) * a.d + c] = sum;
  }
}

// A row, of whose columns this block has [begin, end). The one that has the first also mixes, by its last wave.
APU_DEVICE void finish_row(const StreamsInArgs &a, u32 t, u32 begin, u32 end) {
  APU_SHARED RowWeights row;
  const u32 s = a.streams, all = a.w.rows;
  constexpr u32 waves = kStreamThreads / kWaveSize;
  const u32 share = (a.parts + waves - 1) / waves, first = wave_id() * share;
  const u32 last = first + share < a.parts ? first + share : a.parts;
  for (u32 n = lane_id(); n <= all; n += kWaveSize) {
    const float *const from = a.sums + u64(t) * a.parts * (all + 1) + n;
    float total = 0;
#pragma unroll 8
    for (u32 p = first; p < last; ++p) total += from[p * (all + 1)];
    row.sums[wave_id()][n] = total;
  }
  block_sync();
  for (u32 n = thread_id(); n <= all; n += kStreamThreads) {
    float total = 0;
#pragma unroll
    for (u32 w = 0; w < waves; ++w) total += row.sums[w][n];
    row.totals[n] = total;
    if (n == all) row.shrink = 1.0f / sqrt_f32(total / float(a.w.k) + a.eps);
  }
  block_sync();
  const u32 thread = thread_id();
  if (thread < s) row.input[thread] = sigmoid(row.number(a, thread, 0)) + a.floor;
  block_sync();
  const bool mixes = a.mix && begin == 0;
  const u32 workers = mixes ? kStreamThreads - kWaveSize : kStreamThreads;
  if (thread < workers) return add_streams(a, row, t, begin, end, workers);
  float *const post = a.mix + u64(t) * (s + s * s);
  if (lane_id() < s) post[lane_id()] = 2.0f * sigmoid(row.number(a, s + lane_id(), 1));
  if (s == 4)
    mix_four(a, row.number(a, 8 + lane_id() % 16, 2), post + s);
  else
    mix_any(a, row, post + s);
}

// What a lane's product is scaled by and what is added, of four streams: loaded early, since they lie in no cache.
struct LaneNumber {
  float scale, offset;

  static APU_METHOD LaneNumber of(const StreamsInArgs &a) {
    const u32 n = lane_id();
    return n < a.w.rows ? LaneNumber{a.scale[n < 4 ? 0 : n < 8 ? 1 : 2], a.offset[n]} : LaneNumber{};
  }
};

// The same of four streams at multiples of 16 bytes. They are on their way while the weights are made.
template <u32 Threads>
APU_DEVICE void finish_four(const StreamsInArgs &a, u32 t, u32 begin, u32 end, const LaneNumber &own) {
  constexpr u32 waves = Threads / kWaveSize, groups = waves < 8 ? waves : 8; // waves that add parts
  APU_SHARED float sums[groups][kWaveSize], numbers[kWaveSize], input[4];
  const u32 all = a.w.rows, lane = lane_id(), wave = wave_id();
  const bool mixes = a.mix && begin == 0;
  const u32 workers = mixes ? Threads - kWaveSize : Threads;
  const bool works = thread_id() < workers;
  const float *const in = a.in + u64(t) * 4 * a.d;
  float *const out = a.out + u64(t) * a.d;
  const u32 c0 = begin + 4 * thread_id();
  Columns4 x[kStreamRounds][4];
#pragma unroll
  for (u32 r = 0; r < kStreamRounds; ++r) {
    const u32 c = c0 + r * 4 * workers;
#pragma unroll
    for (u32 j = 0; j < 4; ++j) x[r][j] = works && c < end ? load_columns(in + u64(j) * a.d + c) : Columns4{};
  }
  if (wave < groups && lane <= all) {
    const u32 share = (a.parts + groups - 1) / groups, first = wave * share;
    const u32 last = first + share < a.parts ? first + share : a.parts;
    const float *const from = a.sums + u64(t) * a.parts * (all + 1) + lane;
    float total = 0;
#pragma unroll 8
    for (u32 p = first; p < last; ++p) total += from[p * (all + 1)];
    sums[wave][lane] = total;
  }
  block_sync();
  if (wave == 0) {
    float total = 0;
#pragma unroll
    for (u32 g = 0; g < groups; ++g) total += lane <= all ? sums[g][lane] : 0.0f;
    const float shrink = 1.0f / sqrt_f32(wave_shuffle(total, all) / float(a.w.k) + a.eps);
    const float number = fma_f32(total * shrink, own.scale, own.offset);
    numbers[lane] = number;
    if (lane < 4) input[lane] = sigmoid(number) + a.floor;
  }
  block_sync();
  if (!works) {
    float *const post = a.mix + u64(t) * 20;
    if (lane < 4) post[lane] = 2.0f * sigmoid(numbers[4 + lane]);
    return mix_four(a, numbers[8 + lane % 16], post + 4);
  }
  const auto add = [&](u32 c, const Columns4 *streams) {
    Columns4 sum{};
#pragma unroll
    for (u32 j = 0; j < 4; ++j)
#pragma unroll
      for (u32 i = 0; i < 4; ++i) sum.v[i] = fma_f32(input[j], streams[j].v[i], sum.v[i]);
    store_columns(out + c, sum);
  };
#pragma unroll
  for (u32 r = 0; r < kStreamRounds; ++r)
    if (c0 + r * 4 * workers < end) add(c0 + r * 4 * workers, x[r]);
  for (u32 c = c0 + kStreamRounds * 4 * workers; c < end; c += 4 * workers) {
#pragma unroll
    for (u32 j = 0; j < 4; ++j) x[0][j] = load_columns(in + u64(j) * a.d + c);
    add(c, x[0]);
  }
}

// Whether this block is the last one of its row that comes here: what the first `writers` threads of the others wrote
// can then be read.
APU_DEVICE bool is_last(const StreamsInArgs &a, u32 writers) {
  APU_SHARED u32 last;
  u32 *const counter = a.counters + block_id_y();
  if (thread_id() < writers) device_fence();
  block_sync();
  if (thread_id() == 0) last = atomic_add(counter, 1) == grid_size() - 1;
  block_sync();
  if (!last) return false;
  device_fence();
  if (thread_id() == 0) *counter = 0;
  return true;
}

template <class Columns, bool Joined> APU_DEVICE void open_four(const StreamsInArgs &a) {
  const LaneNumber own = LaneNumber::of(a);
  if (sum_part_of_four<Columns, Joined>(a) && is_last(a, PartOfFour::kThreads))
    finish_four<kStreamFourThreads>(a, block_id_y(), 0, a.d, own);
}

#define APU_STREAMS(name, columns)                                                                                     \
  APU_KERNEL(kStreamFourThreads) void streams_##name(StreamsInArgs a) {                                                \
    open_four<columns, false>(a);                                                                                      \
  }                                                                                                                    \
  APU_KERNEL(kStreamFourThreads) void streams_joined_##name(StreamsInArgs a) {                                         \
    open_four<columns, true>(a);                                                                                       \
  }                                                                                                                    \
  APU_KERNEL(kStreamManyThreads) void streams_##name##_many(StreamsInArgs a) {                                         \
    sum_products<columns, kStreamManyOutputs>(a);                                                                      \
  }

APU_STREAMS(f16, F16Columns)
APU_STREAMS(f32, F32Columns)

APU_KERNEL(kStreamThreads) void streams_any(StreamsInArgs a) {
  if (sum_part(a) && is_last(a, kStreamThreads)) finish_row(a, block_id_y(), 0, a.d);
}
APU_KERNEL(kStreamManyThreads) void streams_any_many(StreamsInArgs a) {
  sum_products<AnyColumns, 1>(a);
}

// After products of many rows. Grid (blocks of a row's columns, rows).
APU_KERNEL(kStreamThreads) void streams_finish_any(StreamsInArgs a) {
  const u32 t = block_id_y(), begin = block_id() * kStreamFinish;
  if (t < count_rows(a.count)) finish_row(a, t, begin, begin + kStreamFinish < a.d ? begin + kStreamFinish : a.d);
}
APU_KERNEL(kStreamThreads) void streams_finish_four(StreamsInArgs a) {
  const u32 t = block_id_y(), begin = block_id() * kStreamFinish;
  if (t >= count_rows(a.count)) return;
  finish_four<kStreamThreads>(a, t, begin, begin + kStreamFinish < a.d ? begin + kStreamFinish : a.d,
                              LaneNumber::of(a));
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
