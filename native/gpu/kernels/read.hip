// The plain read that bandwidths are compared with: every byte once, by 16-byte loads, nothing else.
#include "gpu.h"
#include "read.h"

using namespace apu::gpu;

// Grid (bytes / kReadBlockBytes), rounded up.
APU_KERNEL(kReadThreads) void plain_read(ReadArgs a) {
  const u64 begin = u64(block_id()) * kReadBlockBytes + thread_id() * 16;
  u32x4 v[kReadLoads];
#pragma unroll
  for (u32 i = 0; i < kReadLoads; ++i) {
    const u64 at = begin + u64(i) * kReadThreads * 16;
    v[i] = load16_stream(a.in + (at < a.bytes ? at : 0));
  }
  u32 sum = 0;
#pragma unroll
  for (u32 i = 0; i < kReadLoads; ++i) sum ^= v[i][0] ^ v[i][1] ^ v[i][2] ^ v[i][3];
  if (sum == 0x9e3779b9u) *a.sink = sum; // keeps the loads; any value will do
}
