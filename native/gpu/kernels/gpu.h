// The one header through which kernels see a GPU: keywords, ids, barriers, wave operations, integer dot products, loads
// and matrix tiles, for AMD (clang, no ROCm headers), NVIDIA (nvcc) and the CPU (tests run the same sources there).
//
// Everything vendor-specific is in the three headers below; kernels hold no vendor macro, no assembly and no wave size
// as a number: reductions and layouts are written over kWaveSize (32 or 64), a constant of the target.
// What each of them provides is listed here once; semantics are the same everywhere.
#pragma once

#include "common.h"

// APU_KERNEL(threads) void name(Args args): an entry point, launched with exactly `threads` threads in x.
// APU_KERNEL_OF(threads, blocks): the same, its registers such that so many blocks fit an NVIDIA unit.
// APU_DEVICE: inlined device function.  APU_SHARED: static LDS variable.  APU_CONSTANT: table in constant memory.
// dynamic_shared(): the launch's dynamic LDS, 16-byte aligned.
namespace apu::gpu {
struct ByteTable {
  u32 v[4];
};

// Sixteen signed values that weights of four bits stand for. Also in two parts, value = lower - upper: each has eight
// entries of one sign, so that a permute which repeats the sign where a nibble's top bit is set gives the same byte for
// all nibbles of the other part (0, or -1 in both).
//
// NibbleValues nibble_values(table, w): a block's 32 values, from its four words, nibbles as in Q4_0.
// arrange_nibbles(q): orders the block's eight words of activations for them, once.
// dot_low(v, q), dot_high(v, q): kDotStart + products of the low nibbles with four words q, and of the high nibbles.
struct NibbleTable {
  ByteTable values;
  u32 lower[2], upper[2];
};
} // namespace apu::gpu

#if defined(APU_GPU_SHIM)
#include "shim.h"
#elif defined(__CUDACC__) && !defined(__HIP__)
#include "nvidia.h"
#else
#include "amd.h"
#endif

namespace apu::gpu {

// ids: thread_id(), block_id(), block_id_y(), grid_size() (blocks in x); lane_id() and wave_id() follow.
APU_DEVICE u32 lane_id() {
  return thread_id() % kWaveSize;
}
APU_DEVICE u32 wave_id() { // of the block
  return thread_id() / kWaveSize;
}

// block_sync(): barrier and memory order for the block.  wave_sync(): memory order among the lanes of a wave.
// keep_order(): nothing is scheduled across it, for compilers that would load ahead more than registers hold.
// wave_uniform(u32 v): v, which is the same in all lanes, known to be so.
// wave_shuffle(v, lane), wave_shuffle_xor(v, mask): u32, i32 or float of another lane; all lanes take part.
// wave_read(u32 v, lane): v of a lane that is the same for all lanes; uniform.
// Masks are best constants; in a loop over masks, count upwards (i *= 2), which compilers unroll for certain.
// wave_any(bool), wave_ballot(bool) -> u64: all lanes take part.
// bit_count(u64), lowest_bit(u64): its index, of a number that has one.
// dot4(a, b, c): c + four signed bytes of a times those of b.  dot4_us(a, b, c): unsigned bytes of a.
// keep(v): a constant is from here on a register of unknown contents, where an instruction takes it from nowhere else.
// dot_to_float(i): of a sum of dot4s that began with kDotStart and is below 2^22.  byte_to_float(word, i): of byte i.
// scaled_to_float(dot, word, i, offset): of dot * (byte i of word - offset), a constant offset, products below 2^22.
// mul24(a, b): product of two that fit signed 24 bits.
// funnel_shift_right(low, high, bits): low 32 bits of (high:low) >> (bits % 32).
// byte_permute(a, b, selector): each selector byte 0 to 7 picks a byte of (b:a), a's four first.
// look_up_nibbles(table, v, low, high): bytes table[n] of the low and of the high nibbles n of v's bytes; a ByteTable
// is sixteen bytes in four words. ByteSelectors: eight selectors of byte_permute packed as the hardware takes them,
// made by byte_selectors(nibbles); unions by |. select_bytes(a, b, s, low, high): the first four and the last four
// bytes that they pick.
//
// load16(p): 16 aligned bytes of device memory, not LDS, kept in caches.  load16_stream(p): read once.
// store16(p, v): to either.
// global_pointer<T>(address): to device memory, known not to be to LDS. For addresses that were themselves loaded.
// load_unaligned<N>(p, words): N words at any address; reads no aligned word that holds none of their bytes.
// copy16_async(shared, global): 16 aligned bytes to LDS; copy_commit(), copy_wait<N>() as in cp.async groups. Where the
// hardware has no such thing the copy is immediate.
// SharedAddress: a place in LDS, to which offsets are added; cheaper in loops than a pointer on NVIDIA.
// shared_address(p), all lanes take part; shared_load(a) -> u32, of a multiple of 4; shared_load16(a);
// shared_load_u16(a), of a multiple of 2.
// Bulk copies, where kBulkCopy: lanes have the hardware copy multiples of 16 bytes, which a barrier of 8 bytes in LDS
// counts. bulk_init(barrier, lanes), then wave_sync(); for each round so many lanes bulk_expect(barrier, bytes),
// perhaps none, and bulk_copy(to, global, bytes, barrier) as many; all lanes bulk_wait(barrier, round % 2). LDS is free
// for the next round after a wave_sync(). bulk_fence(), by all who wrote to that LDS themselves, before the barrier
// that orders it and the copies.
//
// kNibblesByHalves: nibble_permute(a, b, nibbles) is cheap: the four nibbles of the low half of `nibbles`, lowest
// first, pick bytes of (b:a) by their lower three bits; where the fourth is set the byte is its top bit repeated
// instead.
//
// hide(v): the compiler forgets what it knows of a u32, so that what depends on it is not moved out of a loop.
// kGridCopies, kSignCopies: how many copies of a codebook's tables in LDS pay, where every lane looks up its own entry.
// kSignsOfActivations: signs are given to the activations, not to the weights.
//
// half_to_float(bits), float_to_half(x) -> bits, bfloat16_to_float(bits), float_to_bfloat16(x) -> bits; nearest even.
// floats_to_halves(low, high), half2_mul(a, b), half2_add(a, b), half2_fma(a, b, c): two halves in a u32.
// max_u16_pairs(a, b): of the two 16-bit integers in each.
// bits_to_float(u), float_to_bits(x); fma, sqrt, exp, log, floor, fabs, min, max of float: fma_f32 ...
// rcp_f32(x): 1 / x, within 1 ulp.  exp2_f32(x): 2^x, within 2 ulp; results below 2^-126 may be 0.
// round_even_f32(x): to the nearest integer, ties to even. Nothing is contracted: a * b + c rounds twice.
//
// atomic_add(u32*, v), atomic_max(u32*, v): device scope, relaxed; return the old value.
// device_fence(): earlier writes of this thread are visible to the device before later ones.

template <typename T> APU_DEVICE T wave_sum(T v) {
#pragma unroll
  for (u32 i = 1; i < kWaveSize; i *= 2) v += wave_shuffle_xor(v, kWaveSize / 2 / i);
  return v;
}

APU_DEVICE float wave_max(float v) {
#pragma unroll
  for (u32 i = 1; i < kWaveSize; i *= 2) v = max_f32(v, wave_shuffle_xor(v, kWaveSize / 2 / i));
  return v;
}

// Sums over the wave of V values, V a power of two. A lane gets that of value lane / (kWaveSize / V); the tree of
// additions is wave_sum's for any V.
template <u32 V> APU_DEVICE float wave_sums(float (&v)[V]) {
#pragma unroll
  for (u32 i = 2; i <= kWaveSize; i *= 2) {
    const u32 mask = kWaveSize / i, pairs = V / i;
    const bool upper = (lane_id() & mask) != 0;
    if (!pairs) v[0] += wave_shuffle_xor(v[0], mask);
#pragma unroll
    for (u32 p = 0; p < pairs; ++p) {
      const float first = v[p], second = v[p + pairs]; // values: a choice between places would be kept in memory
      const float keep = upper ? second : first, give = upper ? first : second;
      v[p] = keep + wave_shuffle_xor(give, mask);
    }
  }
  return v[0];
}

// Sum over the block, in every thread; `parts` (threads / kWaveSize) in LDS, free again after the next block_sync().
template <typename T> APU_DEVICE T block_sum(T v, T *parts, u32 waves) {
  v = wave_sum(v);
  if (lane_id() == 0) parts[wave_id()] = v;
  block_sync();
  T sum = parts[0];
  for (u32 i = 1; i < waves; ++i) sum += parts[i];
  return sum;
}

APU_DEVICE float block_max(float v, float *parts, u32 waves) {
  v = wave_max(v);
  if (lane_id() == 0) parts[wave_id()] = v;
  block_sync();
  float most = parts[0];
  for (u32 i = 1; i < waves; ++i) most = max_f32(most, parts[i]);
  return most;
}

} // namespace apu::gpu
