// Attention kernels on matrix tiles, by type of cache and head size, of keys and values alike or up to it:
// attention_span_* for sequences with few rows in the step, attention_rows_* for the others.
//
// A span reads its K and V once: kSpan positions of (d + dv) elements.
#include "attention_tile.h"

namespace apu::gpu {

#define APU_ATTENTION(name, type, most, exact, blocks)                                                                 \
  APU_KERNEL_OF(kSpanThreads, blocks) void attention_span_##name(AttentionArgs a) {                                    \
    attention_span<type, most, exact>(a);                                                                              \
  }                                                                                                                    \
  APU_KERNEL(kRowsThreads) void attention_rows_##name(AttentionArgs a) {                                               \
    attention_rows<type, most, exact>(a);                                                                              \
  }

APU_ATTENTION(f16_64, kF16, 64, true, 4)
APU_ATTENTION(f16_128, kF16, 128, true, 2)
APU_ATTENTION(f16_256, kF16, 256, true, 2)
APU_ATTENTION(f16_to_128, kF16, 128, false, 2)
APU_ATTENTION(f16_to_256, kF16, 256, false, 2)
APU_ATTENTION(q8_0_64, kQ8, 64, true, 4)
APU_ATTENTION(q8_0_128, kQ8, 128, true, 4)
APU_ATTENTION(q8_0_to_128, kQ8, 128, false, 4)
APU_ATTENTION(q8_0_to_256, kQ8, 256, false, 2)

} // namespace apu::gpu
