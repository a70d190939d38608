// The plain read that bandwidths are compared with: every byte once, by 16-byte loads, nothing else.
#include "gpu.h"
#include "read.h"

using namespace apu::gpu;

// Block `block` of the range; `sink` keeps the loads, and any value will do.
APU_DEVICE void read_block(const u8 *in, u64 bytes, u32 block, u32 *sink) {
  const u64 begin = u64(block) * kReadBlockBytes + thread_id() * 16;
  u32x4 v[kReadLoads];
#pragma unroll
  for (u32 i = 0; i < kReadLoads; ++i) {
    const u64 at = begin + u64(i) * kReadThreads * 16;
    v[i] = load16_stream(in + (at < bytes ? at : 0));
  }
  u32 sum = 0;
#pragma unroll
  for (u32 i = 0; i < kReadLoads; ++i) sum ^= v[i][0] ^ v[i][1] ^ v[i][2] ^ v[i][3];
  if (sum == 0x9e3779b9u) *sink = sum;
}

// Grid (bytes / kReadBlockBytes), rounded up.
APU_KERNEL(kReadThreads) void plain_read(ReadArgs a) {
  read_block(a.in, a.bytes, block_id(), a.sink);
}

// Grid (the same, parts).
APU_KERNEL(kReadThreads) void gather_read(GatherArgs a) {
  read_block(reinterpret_cast<const u8 *>(a.parts[block_id_y()]), a.bytes, block_id(), a.sink);
}
