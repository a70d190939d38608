// Sums that tell whether a device reads a range as the host wrote it: every word counts by its value and its place.
//
// Sum of (w[i] + 1) * (2 i + 1) over the little-endian words of 4 bytes, zeros behind the last byte; each block leaves
// its part, and the host adds them and multiplies by the constant that all words have in common (apu.h).
// Moves: the bytes once. No word outside of the range's own aligned words is read.
#include "checksum.h"
#include "gpu.h"

using namespace apu::gpu;

namespace {

// Word i of a range that begins `shift` bits into the aligned word at `in`.
APU_DEVICE u32 word_at(const u32 *in, u64 i, u32 shift, u64 aligned_words, u64 bytes) {
  u32 v = in[i];
  if (shift) v = funnel_shift_right(v, i + 1 < aligned_words ? in[i + 1] : 0, shift);
  const u64 left = bytes - i * 4;
  return left < 4 ? v & ((1u << (u32(left) * 8)) - 1) : v;
}

} // namespace

APU_KERNEL(kChecksumThreads) void checksum(ChecksumArgs a) {
  APU_SHARED u64 parts[kChecksumThreads];
  const u32 shift = u32(a.address % 4) * 8;
  const u32 *in = global_pointer<u32>(a.address - a.address % 4);
  const u64 words = (a.bytes + 3) / 4, aligned_words = (a.address % 4 + a.bytes + 3) / 4;
  // Whole units of four words by 16-byte loads where they lie so, the rest word by word.
  const u64 units = a.address % 16 == 0 ? a.bytes / 16 : 0;
  const u64 stride = u64(grid_size()) * kChecksumThreads, first = u64(block_id()) * kChecksumThreads + thread_id();
  u64 sum = 0;
  for (u64 unit = first; unit < units; unit += stride) {
    const u32x4 v = load16_stream(reinterpret_cast<const u8 *>(in + unit * 4));
    const u64 weight = unit * 8 + 1;
    sum += (u64(v[0]) + 1) * weight + (u64(v[1]) + 1) * (weight + 2) + (u64(v[2]) + 1) * (weight + 4) +
           (u64(v[3]) + 1) * (weight + 6);
  }
  for (u64 i = units * 4 + first; i < words; i += stride)
    sum += (u64(word_at(in, i, shift, aligned_words, a.bytes)) + 1) * (2 * i + 1);
  parts[thread_id()] = sum;
  for (u32 half = kChecksumThreads / 2; half; half /= 2) {
    block_sync();
    if (thread_id() < half) parts[thread_id()] += parts[thread_id() + half];
  }
  if (thread_id() == 0) a.sums[block_id()] = parts[0];
}
