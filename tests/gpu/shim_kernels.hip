// Small kernels that show what the shim does: test_shim.py launches them. Some are wrong on purpose.
#include "gpu.h"

namespace apu::gpu {

struct SumArgs {
  const float *x; // (blocks * threads)
  float *sums;    // (blocks)
};
APU_KERNEL(256) void shim_block_sum(SumArgs a) {
  APU_SHARED float parts[256 / kWaveSize];
  const float sum = block_sum(a.x[block_id() * 256 + thread_id()], parts, 256 / kWaveSize);
  if (thread_id() == 0) a.sums[block_id()] = sum;
}

struct WaveArgs {
  const u32 *in; // (threads)
  u32 *rotated, *swapped;
  u64 *ballots;
  u32 values[2];
};
APU_KERNEL(128) void shim_wave(WaveArgs a) {
  const u32 t = thread_id(), v = a.in[t];
  a.rotated[t] = wave_shuffle(v, lane_id() + 1);
  a.swapped[t] = wave_shuffle_xor(v, 5);
  a.ballots[t] = wave_ballot(v % 3 == 0);
}

struct BitsArgs {
  const u32 *a, *b;
  u32 *out; // (8, n)
  u32 n;
};
APU_KERNEL(64) void shim_bits(BitsArgs args) {
  const u32 i = block_id() * 64 + thread_id();
  if (i >= args.n) return;
  const u32 a = args.a[i], b = args.b[i], n = args.n;
  args.out[i] = u32(dot4(a, b, 7));
  args.out[n + i] = u32(dot4_us(a, b, -7));
  args.out[2 * n + i] = funnel_shift_right(a, b, a);
  args.out[3 * n + i] = byte_permute(a, b, b & 0x07070707);
  args.out[4 * n + i] = half2_mul(a, b);
  args.out[5 * n + i] = half2_add(a, b);
  args.out[6 * n + i] = half2_fma(a, b, a ^ b);
  args.out[7 * n + i] = u32(float_to_half(bits_to_float(a))) | u32(float_to_bfloat16(bits_to_float(b))) << 16;
}

struct CopyArgs {
  const u8 *from;
  u8 *to;
  u32 wait, sync;
};
// A wave copies to dynamic LDS, the next wave of the ring writes it out.
APU_KERNEL(128) void shim_copy(CopyArgs a) {
  u8 *lds = dynamic_shared();
  const u32 t = thread_id();
  copy16_async(lds + t * 16, a.from + t * 16);
  copy_commit();
  if (a.wait) copy_wait<0>();
  if (a.sync) block_sync();
  const u32 other = (t + kWaveSize) % 128;
  store16(a.to + other * 16, *reinterpret_cast<const u32x4 *>(lds + other * 16));
}

struct WrongArgs {
  u32 *out;
  u32 what;
  i32 at;
};
APU_KERNEL(64) void shim_wrong(WrongArgs a) {
  APU_SHARED u32 lds[64];
  const u32 t = thread_id();
  u32 v = t;
  if (a.what == 0 && lane_id() < 3) v = wave_shuffle(v, 0);          // not all lanes
  if (a.what == 1 && wave_id() * kWaveSize + lane_id() == 5) return; // ended before a barrier
  if (a.what == 2) lds[t + 1] = 1;                                   // beyond the array
  if (a.what == 3) v = *reinterpret_cast<const u32 *>(reinterpret_cast<const u8 *>(a.out) + 2); // misaligned
  if (a.what == 4) v = a.out[a.at];                                                             // beyond the buffer
  if (a.what == 5) a.out[-1] = 0;
  if (a.what == 8) v = load16(lds)[0];
  block_sync();
  a.out[t] = a.what == 6 ? lds[t] : v; // 6: never written
}

} // namespace apu::gpu
