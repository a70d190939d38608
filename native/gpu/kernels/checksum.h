// Argument of the checksum (checksum.hip), for host and device.
#pragma once

#include "common.h"

namespace apu::gpu {

constexpr u32 kChecksumThreads = 256;
constexpr u32 kChecksumBlocks = 1024; // at most

struct ChecksumArgs {
  u64 address; // any alignment
  u64 bytes;
  u64 *sums; // (grid)
};

} // namespace apu::gpu
