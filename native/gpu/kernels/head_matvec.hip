// HEAD_MATMUL with int8 rows: matvec's blocks over the matrix of each head, for 1 to 8 rows of the step.
//
// Rows shorter than a slice are packed: what lies in the file one behind the other is a row of a slice's length, a lane
// still owns the same 64 columns of every row it meets, and lanes of one row add up. Grid (blocks of all heads, groups
// of rows). Bytes: the matrices once for each group of 4 rows.
#include "formats_k.h"
#include "formats_legacy.h"
#include "heads.h"
#include "row_count.h"

namespace apu::gpu {

template <class Format, u32 R> APU_DEVICE void head_matvec(const HeadMatvecArgs &a) {
  const u32 begin = block_id_y() * R, count = count_rows(a.count);
  if (begin >= count) return;
  const u32 h = block_id() / a.blocks, block = block_id() % a.blocks;
  const u32 set_rows = (kMatvecWaves >> a.split_shift) * a.steps * kSetOf<Format>, row_begin = block * set_rows;
  MatvecWork work{a.w, a.w, false, row_begin, a.w.rows, a.slices, a.splits, a.split_shift, a.steps};
  work.first_row = h * a.w.rows;
  const ActivationRows rows{a.in, begin, a.rows - 1, a.heads, h};
  if (a.packed > 1) {
    work.lanes = kWaveSize / a.packed;
    matvec_block<Format, R, true>(work, rows);
  } else {
    matvec_block<Format, R>(work, rows);
  }
  const float *sums = matvec_sums<Format, R>();
  const u32 block_rows = set_rows * a.packed, width = a.n + a.rest;
  for (u32 r = 0; r < R && begin + r < count; ++r) {
    float *out = a.out + (u64(begin + r) * a.heads + h) * width;
    for (u32 j = thread_id(); j < block_rows; j += kMatvecWaves * kWaveSize) {
      const u32 n = row_begin * a.packed + j;
      if (n < a.n) out[n] = matvec_total<R>(sums, a.slices, block_rows, r, j);
    }
    if (block == 0) {
      const float *x = a.x + (u64(begin + r) * a.heads + h) * (a.k + a.rest) + a.k;
      for (u32 i = thread_id(); i < a.rest; i += kMatvecWaves * kWaveSize) out[a.n + i] = x[i];
    }
  }
}

#define APU_HEAD_MATVEC(name, Format)                                                                                  \
  APU_KERNEL_OF(kMatvecWaves *kWaveSize, QuantizedProduct<Format>::blocks(1))                                          \
  void head_matvec_##name##_r1(HeadMatvecArgs a) {                                                                     \
    head_matvec<Format, 1>(a);                                                                                         \
  }                                                                                                                    \
  APU_KERNEL_OF(kMatvecWaves *kWaveSize, QuantizedProduct<Format>::blocks(4))                                          \
  void head_matvec_##name##_r4(HeadMatvecArgs a) {                                                                     \
    head_matvec<Format, 4>(a);                                                                                         \
  }

// What matrices of heads are in files; of 128 columns, which hold no block of 256, Q5_0 stands for Q4_K.
APU_HEAD_MATVEC(q8_0, Q8_0)
APU_HEAD_MATVEC(q5_0, Q5_0)
APU_HEAD_MATVEC(q4_k, Q4_K)

} // namespace apu::gpu
