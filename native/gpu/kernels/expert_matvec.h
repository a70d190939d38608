// Products of the chosen experts' matrices with 1 to 8 rows of the step: the blocks of matvec.h over the rows that ids
// name (expert_matvec_args.h says how units are laid out).
// Bytes moved: for each row of the step and slot its expert's matrices once, less what cache keeps for units that share
// an expert; activations from cache.
#pragma once

#include "expert_matvec_args.h"
#include "matvec.h"

namespace apu::gpu {

template <class Product> APU_DEVICE void expert_matvec(const ExpertMatvecArgs &a) {
  const u32 unit = block_id() % a.units, block = block_id() / a.units, t = a.second ? unit : unit / a.used;
  if (t >= a.counts->rows) return;
  const u32 split_shift = split_shift_of(a.splits), set_rows = (kMatvecWaves >> split_shift) * a.steps * Product::kSet,
            block_rows = a.pair ? set_rows / 2 : set_rows;
  const u32 row_begin = block * block_rows, rows = a.w[0].rows;
  const u32 input = a.second ? t * a.used : t;
  MatvecWork work{a.w[0], a.w[1], a.pair != 0, row_begin, rows, a.slices, a.splits, split_shift, a.steps};
  work.experts = a.experts;
  work.ids = a.ids + (a.second ? t * a.used : unit);
  work.slots = a.second ? a.used : 1;
  Product::template run<1>(work, ActivationRows{a.in, input, input});

  const float *sums = Product::template sums<1>();
  const auto biased = [&](u32 m, u32 slot, u32 n, float v) {
    if (!a.bias[m]) return v;
    const u32 id = u32(work.ids[slot]);
    return v + a.bias[m][u64(id < a.experts ? id : a.experts - 1) * rows + n];
  };
  for (u32 j = thread_id(); j < block_rows; j += kMatvecWaves * kWaveSize) {
    const u32 n = row_begin + j;
    if (n >= rows) continue;
    if (!a.second) {
      const u64 at = u64(unit) * rows + n;
      float y = biased(0, 0, n, matvec_total<1>(sums, a.slices, set_rows, 0, a.pair ? 2 * j : j));
      if (a.activation) {
        const float up = a.pair ? biased(1, 0, n, matvec_total<1>(sums, a.slices, set_rows, 0, 2 * j + 1)) : a.up[at];
        y = gated_activation(a.activation, a.limit, y, up);
      }
      a.out[at] = y;
      continue;
    }
    const u64 at = u64(t) * rows + n;
    float y = a.residual ? a.residual[at] : 0.0f;
    for (u32 slot = 0; slot < a.used; ++slot) {
      const float product = matvec_total<1>(sums + slot * a.slices * set_rows, a.slices, set_rows, 0, j);
      y += a.weights[t * a.used + slot] * biased(0, slot, n, product);
    }
    a.out[at] = y;
  }
}

#define APU_EXPERT_MATVEC(name, Product)                                                                               \
  APU_KERNEL_OF(kMatvecWaves *kWaveSize, Product::blocks(1)) void expert_matvec_##name(ExpertMatvecArgs args) {        \
    expert_matvec<Product>(args);                                                                                      \
  }

} // namespace apu::gpu
