// Attention over the last tokens and over compressed rows, chosen or all; a row is key and value of all heads. FMA in
// float32; states of F16 go through sparse_attention_tile.hip.
//
// A block takes a span of what one query row attends to (sparse_items.h) for up to 8 of its heads. Batches of 128 rows
// by online softmax: where they lie is looked up once; scores by one thread for a row and half of the heads, 8 elements
// at a time; values by one thread for two neighbouring elements and all heads. Bytes: the rows, for each chunk of
// heads.
//
// sparse_attention_sum: parts of spans become a head of the output, a block for each.
#include "sparse_items.h"

namespace apu::gpu {

constexpr u32 kHalfVectors = kSparseVectors / 2;
constexpr u32 kAnyType = ~0u; // known at run time, or rows at odd addresses

struct SparseLds {
  u64 *address;  // (128)
  float *scores; // (128, 8)
  float *q;      // (vectors, d) times the scale
  float *acc;    // (vectors, d)
  float *max, *sum, *shrink;
  float *cos, *sin;
};

template <u32 Type> APU_DEVICE u32 type_of(const SparseAttentionArgs &a, bool near) {
  if constexpr (Type != kAnyType) return Type;
  return near ? a.window.dtype : a.rows.dtype;
}

APU_DEVICE float load_one(u32 type, u64 row, u32 m) {
  if (type == kF16) return half_to_float(global_pointer<const u16>(row)[m]);
  return global_pointer<const float>(row)[m];
}

// Elements m to m + 7; zero from d on.
template <u32 Type> APU_DEVICE void load8(u32 type, u64 row, u32 m, u32 d, float *v) {
  if constexpr (Type == kF32) {
#pragma unroll
    for (u32 h = 0; h < 2; ++h) {
      const u32x4 x = load16(global_pointer<const float>(row) + m + 4 * h);
#pragma unroll
      for (u32 i = 0; i < 4; ++i) v[4 * h + i] = bits_to_float(x[i]);
    }
  } else {
#pragma unroll
    for (u32 i = 0; i < 8; ++i) v[i] = m + i < d ? load_one(type, row, m + i) : 0.0f;
  }
}

// Elements m and m + 1, m even; zero from d on.
template <u32 Type> APU_DEVICE void load2(u32 type, u64 row, u32 m, u32 d, float *v) {
  if constexpr (Type == kF32) {
    const u32x2 x = *global_pointer<const u32x2>(row + u64(m) * 4);
    v[0] = bits_to_float(x[0]);
    v[1] = bits_to_float(x[1]);
  } else {
    v[0] = load_one(type, row, m);
    v[1] = m + 1 < d ? load_one(type, row, m + 1) : 0.0f;
  }
}

// s[i] = q[i] . row for the `count` vectors of a thread, and something for the others: one chain of FMA over the row.
template <u32 Type> APU_DEVICE void score_row(u32 type, const float *q, u32 count, u64 row, u32 d, float *s) {
#pragma unroll 1
  for (u32 m = 0; m < d; m += 8) {
    float c[8];
    load8<Type>(type, row, m, d, c);
#pragma unroll
    for (u32 i = 0; i < kHalfVectors; ++i) {
      const float *x = q + (i < count ? i * d : 0) + m;
      if constexpr (Type == kAnyType) {
        for (u32 e = 0; e < 8; ++e)
          if (m + e < d) s[i] = fma_f32(x[e], c[e], s[i]);
      } else {
#pragma unroll
        for (u32 h = 0; h < 2; ++h) {
          const f32x4 four = *reinterpret_cast<const f32x4 *>(x + 4 * h);
#pragma unroll
          for (u32 e = 0; e < 4; ++e) s[i] = fma_f32(four[e], c[4 * h + e], s[i]);
        }
      }
    }
  }
}

// Rows [begin, end), at most kSparseBatch.
template <u32 Type>
APU_DEVICE void attend_rows(const SparseAttentionArgs &a, const SparseItem &item, const SparseLds &lds, u32 begin,
                            u32 end) {
  const u32 d = a.window.head_size, count = end - begin;
  const u32 near_bytes = type_of<Type>(a, true) == kF16 ? 2 : 4, far_bytes = type_of<Type>(a, false) == kF16 ? 2 : 4;
  const u32 r = thread_id() % kSparseBatch, first = thread_id() / kSparseBatch * kHalfVectors;
  bool seen = false;
  float s[kHalfVectors] = {};
  if (r < count) {
    const u64 address = sparse_address(a, item, begin + r, near_bytes, far_bytes, &seen);
    if (first == 0) lds.address[r] = address;
    if (first < item.heads)
      score_row<Type>(type_of<Type>(a, begin + r < item.near), lds.q + first * d, item.heads - first, address, d, s);
  }
  f32x4 out;
#pragma unroll
  for (u32 i = 0; i < kHalfVectors; ++i) out[i] = first + i >= item.heads ? 0.0f : seen ? s[i] : kNothing;
  *reinterpret_cast<f32x4 *>(lds.scores + r * kSparseVectors + first) = out;
  block_sync();
  for (u32 i = wave_id(); i < item.heads; i += kSparseThreads / kWaveSize) {
    float *scores = lds.scores + i, most = kNothing, sum = 0.0f;
    for (u32 j = lane_id(); j < kSparseBatch; j += kWaveSize) most = max_f32(most, scores[j * kSparseVectors]);
    const float old = lds.max[i], max = max_f32(old, wave_max(most));
    const float from = max == kNothing ? 0.0f : max; // nothing seen yet: all exponentials are 0
    for (u32 j = lane_id(); j < kSparseBatch; j += kWaveSize) {
      const float e = exp_f32(scores[j * kSparseVectors] - from);
      scores[j * kSparseVectors] = e;
      sum += e;
    }
    sum = wave_sum(sum);
    const float shrink = exp_f32(old - from);
    wave_sync(); // all lanes have read what lane 0 writes
    if (lane_id() == 0) {
      lds.max[i] = max;
      lds.sum[i] = fma_f32(lds.sum[i], shrink, sum);
      lds.shrink[i] = shrink;
    }
  }
  block_sync();
  for (u32 m = 2 * thread_id(); m < d; m += 2 * kSparseThreads) {
    float x[kSparseVectors][2] = {};
#pragma unroll
    for (u32 i = 0; i < kSparseVectors; ++i) {
      if (i >= item.heads) continue;
      x[i][0] = lds.acc[i * d + m] * lds.shrink[i];
      if (m + 1 < d) x[i][1] = lds.acc[i * d + m + 1] * lds.shrink[i];
    }
#pragma unroll 4
    for (u32 j = 0; j < count; ++j) {
      float c[2];
      load2<Type>(type_of<Type>(a, begin + j < item.near), lds.address[j], m, d, c);
#pragma unroll
      for (u32 h = 0; h < 2; ++h) {
        const f32x4 p = *reinterpret_cast<const f32x4 *>(lds.scores + j * kSparseVectors + h * kHalfVectors);
#pragma unroll
        for (u32 i = 0; i < kHalfVectors; ++i) {
          x[h * kHalfVectors + i][0] = fma_f32(p[i], c[0], x[h * kHalfVectors + i][0]);
          x[h * kHalfVectors + i][1] = fma_f32(p[i], c[1], x[h * kHalfVectors + i][1]);
        }
      }
    }
#pragma unroll
    for (u32 i = 0; i < kSparseVectors; ++i) {
      if (i >= item.heads) continue;
      lds.acc[i * d + m] = x[i][0];
      if (m + 1 < d) lds.acc[i * d + m + 1] = x[i][1];
    }
  }
  block_sync();
}

template <u32 Type> APU_DEVICE void sparse_attention(const SparseAttentionArgs &a) {
  SparseItem item;
  if (!find_sparse_item(a, a.window.head_size, item)) return;
  const u32 d = a.window.head_size;
  SparseLds lds;
  lds.address = reinterpret_cast<u64 *>(dynamic_shared());
  lds.scores = reinterpret_cast<float *>(lds.address + kSparseBatch);
  lds.q = lds.scores + kSparseBatch * kSparseVectors;
  lds.acc = lds.q + a.chunk_heads * d;
  lds.max = lds.acc + a.chunk_heads * d;
  lds.sum = lds.max + a.chunk_heads;
  lds.shrink = lds.sum + a.chunk_heads;
  lds.cos = lds.shrink + a.chunk_heads;
  lds.sin = lds.cos + a.pairs;
  const float *q = a.q + (u64(item.t) * a.heads + item.head) * d;
  for (u32 i = thread_id(); i < item.heads * d; i += kSparseThreads) {
    lds.q[i] = q[i] * a.scale;
    lds.acc[i] = 0.0f;
  }
  if (thread_id() < item.heads) {
    lds.max[thread_id()] = kNothing;
    lds.sum[thread_id()] = 0.0f;
  }
  block_sync();
  for (u32 i = item.begin; i < item.end; i += kSparseBatch)
    attend_rows<Type>(a, item, lds, i, i + kSparseBatch < item.end ? i + kSparseBatch : item.end);
  if (item.spans > 1) {
    write_parts<kSparseThreads>(a, item, item.head, item.heads, lds.acc, d, lds.max, lds.sum);
    return;
  }
  turn_pairs<kSparseThreads>(a, item.position, lds.cos, lds.sin);
  for (u32 v = thread_id(); v < item.heads; v += kSparseThreads)
    lds.shrink[v] = sparse_factor(a, item.head + v, lds.max[v], lds.sum[v]);
  block_sync();
  write_heads<kSparseThreads>(a, item, item.head, item.heads, lds.acc, d, lds.shrink, lds.cos, lds.sin);
}

// Pages 16-byte aligned, rows of multiples of 8 elements.
APU_KERNEL_OF(kSparseThreads, 2) void sparse_attention_f32(SparseAttentionArgs a) {
  sparse_attention<kF32>(a);
}
APU_KERNEL_OF(kSparseThreads, 2) void sparse_attention_any(SparseAttentionArgs a) {
  sparse_attention<kAnyType>(a);
}

// acc (d) = sum of weights[s] * parts (spans, d), in order.
template <u32 Width> APU_DEVICE void add_parts(const float *parts, const float *weights, u32 spans, u32 d, float *acc) {
  for (u32 i = Width * thread_id(); i < d; i += Width * kSparseSumThreads) {
    float total[Width] = {};
#pragma unroll 8
    for (u32 s = 0; s < spans; ++s) {
      float x[Width];
      if constexpr (Width == 4) {
        const u32x4 words = load16(parts + s * d + i);
#pragma unroll
        for (u32 e = 0; e < 4; ++e) x[e] = bits_to_float(words[e]);
      } else {
        x[0] = parts[s * d + i];
      }
#pragma unroll
      for (u32 e = 0; e < Width; ++e) total[e] = fma_f32(weights[s], x[e], total[e]);
    }
#pragma unroll
    for (u32 e = 0; e < Width; ++e) acc[i + e] = total[e];
  }
}

APU_KERNEL(kSparseSumThreads) void sparse_attention_sum(SparseAttentionArgs a) {
  SparseItem item;
  if (!find_sparse_row(a, block_id(), a.window.head_size, item)) return;
  const u32 d = a.window.head_size, head = block_id_y(), lane = lane_id();
  const u32 span = sparse_span(item.rows), spans = (item.rows + span - 1) / span;
  if (spans == 1) return;                                   // the attention itself has written it
  float *acc = reinterpret_cast<float *>(dynamic_shared()); // (d)
  float *weights = acc + d, *cos = weights + kSparseSpans, *sin = cos + a.pairs, *factor = sin + a.pairs;
  const u64 first = (u64(item.t) * a.heads + head) * a.spans;
  turn_pairs<kSparseSumThreads>(a, item.position, cos, sin);
  if (wave_id() == 0) {
    const float *end = a.part_ends + (first + lane) * 2;
    const float max = lane < spans ? end[0] : kNothing, sum = lane < spans ? end[1] : 0.0f;
    const float most = wave_max(max), from = most == kNothing ? 0.0f : most;
    const float weight = exp_f32(max - from), all = wave_sum(weight * sum);
    if (lane < kSparseSpans) weights[lane] = weight;
    if (lane == 0) *factor = sparse_factor(a, head, most, all);
  }
  block_sync();
  const float *part = a.parts + first * d;
  if (d % 4 == 0)
    add_parts<4>(part, weights, spans, d, acc);
  else
    add_parts<1>(part, weights, spans, d, acc);
  block_sync();
  write_heads<kSparseSumThreads>(a, item, head, 1, acc, d, factor, cos, sin);
}

} // namespace apu::gpu
