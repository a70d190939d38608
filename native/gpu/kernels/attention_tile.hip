// Attention kernels on matrix tiles, by type of cache and largest head size: attention_span_* for sequences with few
// rows in the step, attention_rows_* for the others.
//
// A span reads its K and V once: 512 positions of (d + dv) elements.
#include "attention_tile.h"

namespace apu::gpu {

#define APU_ATTENTION(name, type, most, blocks)                                                                        \
  APU_KERNEL_OF(kSpanThreads, blocks) void attention_span_##name##_##most(AttentionArgs a) {                           \
    attention_span<type, most>(a);                                                                                     \
  }                                                                                                                    \
  APU_KERNEL(kRowsThreads) void attention_rows_##name##_##most(AttentionArgs a) {                                      \
    attention_rows<type, most>(a);                                                                                     \
  }

APU_ATTENTION(f16, kF16, 64, 3)
APU_ATTENTION(f16, kF16, 128, 2)
APU_ATTENTION(f16, kF16, 256, 2)
APU_ATTENTION(q8_0, kQ8, 64, 3)
APU_ATTENTION(q8_0, kQ8, 128, 2)
APU_ATTENTION(q8_0, kQ8, 256, 2)

} // namespace apu::gpu
