// Argument of the plain read (read.hip), for host and device.
#pragma once

#include "common.h"

namespace apu::gpu {

constexpr u32 kReadThreads = 256;
constexpr u32 kReadLoads = 8; // of 16 bytes, by each thread
constexpr u64 kReadBlockBytes = u64(kReadThreads) * kReadLoads * 16;

struct ReadArgs {
  const u8 *in; // 16-byte aligned
  u64 bytes;    // a multiple of 16
  u32 *sink;
};

struct GatherArgs {
  const u64 *parts; // addresses, 16-byte aligned
  u64 bytes;        // of each, a multiple of 16
  u32 *sink;
};

} // namespace apu::gpu
