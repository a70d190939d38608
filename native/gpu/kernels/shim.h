// The CPU's side of gpu.h: the same functions for g++ or clang, so that tests run the kernels' own sources (tests/gpu
// compiles them, shim_launch.h runs them). -DAPU_SHIM_WAVE=32 or 64 gives the wave size, -DAPU_SHIM_ASYNC=1 the forms
// of kernels for hardware with asynchronous copies.
//
// Stricter than a GPU: 16-byte loads check their alignment, all lanes must take part in wave operations, asynchronous
// copies arrive as late as copy_wait allows in forward runs and at once in reversed ones. Half precision is done in
// bits: g++ 11 has no type for it.
#pragma once

#include <cmath>

#define APU_KERNEL(threads)                                                                                            \
  static_assert((threads) % apu::gpu::kWaveSize == 0, "apu_kernel");                                                   \
  extern "C" __attribute__((visibility("default")))
#define APU_KERNEL_OF(threads, blocks) APU_KERNEL(threads)
#define APU_DEVICE [[maybe_unused]] static inline
#define APU_METHOD
#define APU_SHARED static thread_local
#define APU_CONSTANT [[maybe_unused]] static const

namespace apu::gpu {

constexpr u32 kWaveSize = APU_SHIM_WAVE;
#if defined(APU_SHIM_ASYNC)
constexpr bool kBulkCopy = true;
#else
constexpr bool kBulkCopy = false;
#endif
constexpr u32 kGridCopies = 2, kSignCopies = APU_SHIM_WAVE / 2;
constexpr bool kSignsOfActivations = APU_SHIM_WAVE == 64;

struct alignas(16) u32x4 {
  u32 x, y, z, w;
  u32 &operator[](u32 i) { return (&x)[i]; }
  const u32 &operator[](u32 i) const { return (&x)[i]; }
};
struct alignas(8) u32x2 {
  u32 x, y;
  u32 &operator[](u32 i) { return (&x)[i]; }
  const u32 &operator[](u32 i) const { return (&x)[i]; }
};
struct alignas(16) f32x4 {
  float x, y, z, w;
  float &operator[](u32 i) { return (&x)[i]; }
  const float &operator[](u32 i) const { return (&x)[i]; }
};

} // namespace apu::gpu

#include "shim_launch.h"

namespace apu::gpu {

APU_DEVICE u32 thread_id() {
  return shim::run->thread;
}
APU_DEVICE u32 block_id() {
  return shim::run->block[0];
}
APU_DEVICE u32 block_id_y() {
  return shim::run->block[1];
}
APU_DEVICE u32 grid_size() {
  return shim::run->grid[0];
}

APU_DEVICE void block_sync(u32 line = __builtin_LINE()) {
  shim::wait_block(line);
}
APU_DEVICE void wave_sync(u32 line = __builtin_LINE()) {
  shim::exchange_bytes("wave_sync", line, nullptr, 0);
}
APU_DEVICE void keep_order() {}
APU_DEVICE void device_fence() {}
APU_DEVICE u32 wave_uniform(u32 v) {
  return v;
}

APU_DEVICE float bits_to_float(u32 u) {
  return __builtin_bit_cast(float, u);
}
APU_DEVICE u32 float_to_bits(float x) {
  return __builtin_bit_cast(u32, x);
}

template <typename T> APU_DEVICE T wave_shuffle(T v, u32 lane, u32 line = __builtin_LINE()) {
  static_assert(sizeof(T) == 4);
  return shim::exchange("wave_shuffle", line, v)[lane];
}
APU_DEVICE u32 wave_read(u32 v, u32 lane, u32 line = __builtin_LINE()) {
  return wave_shuffle(v, lane, line);
}
template <typename T> APU_DEVICE T wave_shuffle_xor(T v, u32 mask, u32 line = __builtin_LINE()) {
  static_assert(sizeof(T) == 4);
  return shim::exchange("wave_shuffle_xor", line, v)[thread_id() ^ mask];
}
APU_DEVICE u64 wave_ballot(bool p, u32 line = __builtin_LINE()) {
  const auto lanes = shim::exchange("wave_ballot", line, p);
  u64 ballot = 0;
  for (u32 lane = 0; lane < kWaveSize; ++lane) ballot |= u64(lanes[lane]) << lane;
  return ballot;
}
APU_DEVICE bool wave_any(bool p, u32 line = __builtin_LINE()) {
  return wave_ballot(p, line) != 0;
}

APU_DEVICE u32 bit_count(u64 v) {
  return u32(__builtin_popcountll(v));
}
APU_DEVICE u32 lowest_bit(u64 v) {
  return u32(__builtin_ctzll(v));
}
APU_DEVICE i32 dot4(u32 a, u32 b, i32 c) {
  u32 sum = u32(c); // wraps as the hardware does
  for (u32 i = 0; i < 4; ++i) sum += u32(i32(i8(a >> 8 * i)) * i32(i8(b >> 8 * i)));
  return i32(sum);
}
APU_DEVICE i32 dot4_us(u32 a, u32 b, i32 c) {
  u32 sum = u32(c);
  for (u32 i = 0; i < 4; ++i) sum += u32(i32(u8(a >> 8 * i)) * i32(i8(b >> 8 * i)));
  return i32(sum);
}
APU_DEVICE i32 mul24(i32 a, i32 b) {
  return a * b;
}
constexpr i32 kDotStart = APU_SHIM_WAVE == 32 ? 0x4b400000 : 0; // both forms of kernels are tested
APU_DEVICE float dot_to_float(i32 dot) {
  if (kDotStart == 0) return float(dot);
  if (dot < kDotStart - (1 << 22) || dot >= kDotStart + (1 << 22)) shim::fail("dot_to_float: 2^22 or more");
  return bits_to_float(u32(dot)) - 12582912.0f;
}
APU_DEVICE float byte_to_float(u32 word, u32 i) {
  return float(word >> 8 * i & 255);
}
APU_DEVICE float scaled_to_float(i32 dot, u32 word, u32 i, i32 offset) {
  const i32 product = dot * (i32(word >> 8 * i & 255) - offset);
  if (product < -(1 << 22) || product >= 1 << 22) shim::fail("scaled_to_float: 2^22 or more");
  return float(product);
}
APU_DEVICE u32 funnel_shift_right(u32 low, u32 high, u32 bits) {
  return u32((u64(high) << 32 | low) >> (bits % 32));
}
APU_DEVICE u32 byte_permute(u32 a, u32 b, u32 selector) {
  const u64 bytes = u64(b) << 32 | a;
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 pick = selector >> 8 * i & 255;
    if (pick > 7) shim::fail("byte_permute: a selector above 7");
    result |= u32(bytes >> 8 * pick & 255) << 8 * i;
  }
  return result;
}

APU_DEVICE void hide(u32 &) {}
APU_DEVICE void look_up_nibbles(const ByteTable &table, u32 v, u32 &low, u32 &high) {
  low = high = 0;
  for (u32 i = 0; i < 32; i += 8) {
    const u32 l = v >> i & 15, h = v >> (i + 4) & 15;
    low |= (table.v[l / 4] >> l % 4 * 8 & 255) << i;
    high |= (table.v[h / 4] >> h % 4 * 8 & 255) << i;
  }
}
struct NibbleValues {
  u32 v[8]; // low nibbles, high nibbles
};
APU_DEVICE void keep(u32 &) {}
APU_DEVICE void arrange_nibbles(u32 *) {}
APU_DEVICE u8 shim_nibble(const NibbleTable &table, u32 nibble) { // through the parts, as a permute with signs does
  const u32 i = nibble % 8, shift = i % 4 * 8;
  const u8 lower = u8(table.lower[i / 4] >> shift), upper = u8(table.upper[i / 4] >> shift);
  const u8 value = nibble < 8 ? lower - u8(-(upper >> 7)) : u8(-(lower >> 7)) - upper;
  if (value != u8(table.values.v[nibble / 4] >> shift)) shim::fail("nibble_table: its parts do not give its values");
  return value;
}
APU_DEVICE NibbleValues nibble_values(const NibbleTable &table, const u32 *w) {
  NibbleValues v = {};
  for (u32 i = 0; i < 16; ++i) {
    const u32 byte = w[i / 4] >> i % 4 * 8 & 255;
    v.v[i / 4] |= u32(shim_nibble(table, byte & 15)) << i % 4 * 8;
    v.v[4 + i / 4] |= u32(shim_nibble(table, byte >> 4)) << i % 4 * 8;
  }
  return v;
}
APU_DEVICE i32 dot_low(const NibbleValues &v, const u32 *q) {
  return dot4(v.v[3], q[3], dot4(v.v[2], q[2], dot4(v.v[1], q[1], dot4(v.v[0], q[0], kDotStart))));
}
APU_DEVICE i32 dot_high(const NibbleValues &v, const u32 *q) {
  return dot4(v.v[7], q[3], dot4(v.v[6], q[2], dot4(v.v[5], q[1], dot4(v.v[4], q[0], kDotStart))));
}
constexpr bool kNibblesByHalves = APU_SHIM_WAVE == 32;
APU_DEVICE u32 nibble_permute(u32 a, u32 b, u32 nibbles) {
  u32 out = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 n = nibbles >> 4 * i & 15, byte = u32((u64(b) << 32 | a) >> 8 * (n % 8)) & 255;
    out |= (n < 8 ? byte : byte >> 7 ? 255 : 0) << 8 * i;
  }
  return out;
}
using ByteSelectors = u32; // a nibble each
APU_DEVICE ByteSelectors byte_selectors(u32 nibbles) {
  return nibbles;
}
APU_DEVICE void select_bytes(u32 a, u32 b, ByteSelectors s, u32 &low, u32 &high) {
  const auto bytes = [&](u32 n) {
    return byte_permute(a, b, (n & 15) | (n & 0xf0) << 4 | (n & 0xf00) << 8 | (n & 0xf000) << 12);
  };
  low = bytes(s);
  high = bytes(s >> 16);
}

APU_DEVICE void shim_check16(const void *p) {
  if (reinterpret_cast<u64>(p) % 16) shim::fail("16 bytes at an address that is not a multiple of 16");
}
APU_DEVICE u32x4 load16(const void *p) {
  shim_check16(p);
  if (shim::is_lds(p)) shim::fail("load16 of LDS");
  u32x4 v;
  std::memcpy(&v, p, 16);
  return v;
}
APU_DEVICE u32x4 load16_stream(const void *p) {
  return load16(p);
}
template <typename T> APU_DEVICE T *global_pointer(u64 address) {
  return reinterpret_cast<T *>(address);
}
template <u32 N> APU_DEVICE void load_unaligned(const void *p, u32 *words) { // reads all that a GPU may read
  const u64 base = reinterpret_cast<u64>(p) & ~u64{3}, before = reinterpret_cast<u64>(p) & 3;
  u8 bytes[4 * N + 4];
  std::memcpy(bytes, reinterpret_cast<const void *>(base), 4 * N + (before ? 4 : 0));
  std::memcpy(words, bytes + before, 4 * N);
}
APU_DEVICE void store16(void *p, u32x4 v) {
  shim_check16(p);
  std::memcpy(p, &v, 16);
}
APU_DEVICE void copy16_async(void *shared, const void *global) {
  shim_check16(shared);
  shim_check16(global);
  shim::Fiber &fiber = shim::run->fibers[thread_id()];
  if (shim::run->reverse)
    std::memcpy(shared, global, 16);
  else
    fiber.copies.push_back({shared, global, fiber.groups});
}
typedef u8 *SharedAddress;
APU_DEVICE SharedAddress shared_address(void *p) {
  return static_cast<u8 *>(p);
}
APU_DEVICE u32 shared_load(SharedAddress a) {
  return *reinterpret_cast<const u32 *>(a); // alignment is checked
}
APU_DEVICE u32x4 shared_load16(SharedAddress a) {
  return *reinterpret_cast<const u32x4 *>(a);
}
APU_DEVICE u32 shared_load_u16(SharedAddress a) {
  return *reinterpret_cast<const u16 *>(a);
}
// Copies are under way until the wait.
struct BulkBarrier {
  u8 lanes, expected; // that expect copies in each round, that did so in this one
  u16 rounds;         // begun by all of them
  u32 bytes;          // still to be asked for
};
static_assert(sizeof(BulkBarrier) == 8);
APU_DEVICE void bulk_init(SharedAddress barrier, u32 lanes) {
  *reinterpret_cast<BulkBarrier *>(barrier) = {u8(lanes), 0, 0, 0};
}
APU_DEVICE void bulk_expect(SharedAddress barrier, u32 bytes) {
  BulkBarrier &b = *reinterpret_cast<BulkBarrier *>(barrier);
  if (b.expected == 0 && b.bytes) shim::fail("bulk_expect: the round before has not all its copies");
  b.bytes += bytes;
  if (++b.expected == b.lanes) b.expected = 0, ++b.rounds;
}
APU_DEVICE void bulk_copy(SharedAddress to, const void *global, u32 bytes, SharedAddress barrier) {
  shim_check16(to);
  shim_check16(global);
  BulkBarrier &b = *reinterpret_cast<BulkBarrier *>(barrier);
  if (bytes % 16 || bytes > b.bytes) shim::fail("bulk_copy: bytes that were not expected");
  b.bytes -= bytes;
  if (shim::run->reverse)
    std::memcpy(to, global, bytes);
  else
    shim::run->bulk.push_back({to, global, bytes, barrier});
}
APU_DEVICE void bulk_fence() {}
APU_DEVICE void bulk_wait(SharedAddress barrier, u32 parity, u32 line = __builtin_LINE()) {
  wave_sync(line); // the lanes that copy come here too, after they have asked for all
  const BulkBarrier &b = *reinterpret_cast<const BulkBarrier *>(barrier);
  if (b.expected || b.bytes || !b.rounds || (b.rounds - 1) % 2 != parity)
    shim::fail("bulk_wait: a round that never ends");
  std::vector<shim::BulkCopy> left;
  for (const shim::BulkCopy &copy : shim::run->bulk) {
    if (copy.barrier == barrier)
      std::memcpy(copy.to, copy.from, copy.bytes);
    else
      left.push_back(copy);
  }
  shim::run->bulk.swap(left);
}
APU_DEVICE void copy_commit() {
  ++shim::run->fibers[thread_id()].groups;
}
template <int N> APU_DEVICE void copy_wait() { // until at most N committed groups are under way
  const u32 groups = shim::run->fibers[thread_id()].groups;
  shim::finish_copies(groups > u32(N) ? groups - u32(N) : 0);
}

APU_DEVICE float half_to_float(u32 bits) {
  const u32 sign = (bits & 0x8000) << 16, exponent = bits >> 10 & 31, mantissa = bits & 0x3ff;
  if (exponent == 31) return bits_to_float(sign | 0x7f800000 | mantissa << 13);
  if (exponent == 0) { // mantissa * 2^-24, exact
    const float v = float(mantissa) * 0x1p-24f;
    return sign ? -v : v;
  }
  return bits_to_float(sign | (exponent + 112) << 23 | mantissa << 13);
}
APU_DEVICE u16 shim_half(double x) { // nearest even, from a double: halves, floats and their products are exact in it
  const u64 u = __builtin_bit_cast(u64, x);
  const u16 sign = u16(u >> 48 & 0x8000);
  const double magnitude = std::fabs(x);
  if (x != x) return u16(sign | 0x7e00);
  if (magnitude >= 65520.0) return u16(sign | 0x7c00);
  if (magnitude < 0x1p-14) return u16(sign | u16(std::nearbyint(magnitude * 0x1p24))); // 1024 is the least normal
  const u64 m = u & 0x7fffffffffffffff;
  const u64 rounded = m + ((u64(1) << 41) - 1) + (m >> 42 & 1);
  return u16(sign | u16((rounded >> 42) - (u64(1008) << 10)));
}
APU_DEVICE u16 float_to_half(float x) {
  return shim_half(x);
}
APU_DEVICE float bfloat16_to_float(u32 bits) {
  return bits_to_float(bits << 16);
}
APU_DEVICE u16 float_to_bfloat16(float x) {
  const u32 u = float_to_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return u16(u >> 16 | 64); // NaN stays one
  return u16((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
// Sums of halves and products of halves rounded to odd in double, so that rounding to half again is right.
APU_DEVICE double shim_sum_to_odd(double a, double b) {
  const double sum = a + b, part = sum - a;
  const double lost = (a - (sum - part)) + (b - part);
  const u64 u = __builtin_bit_cast(u64, sum);
  if (lost == 0 || lost != lost || u & 1) return sum;
  return __builtin_bit_cast(double, (lost > 0) == (sum > 0) ? u + 1 : u - 1);
}
template <typename F> APU_DEVICE u32 shim_half2(F f) {
  return u32(shim_half(f(0))) | u32(shim_half(f(16))) << 16;
}
APU_DEVICE u32 floats_to_halves(float low, float high) {
  return float_to_half(low) | u32(float_to_half(high)) << 16;
}
APU_DEVICE u32 max_u16_pairs(u32 a, u32 b) {
  const u32 low = (a & 0xffff) > (b & 0xffff) ? a & 0xffff : b & 0xffff;
  return low | (a >> 16 > b >> 16 ? a >> 16 : b >> 16) << 16;
}
APU_DEVICE u32 half2_mul(u32 a, u32 b) {
  return shim_half2([=](u32 s) { return double(half_to_float(a >> s & 0xffff)) * half_to_float(b >> s & 0xffff); });
}
APU_DEVICE u32 half2_add(u32 a, u32 b) {
  return shim_half2([=](u32 s) { return double(half_to_float(a >> s & 0xffff)) + half_to_float(b >> s & 0xffff); });
}
APU_DEVICE u32 half2_fma(u32 a, u32 b, u32 c) {
  return shim_half2([=](u32 s) {
    return shim_sum_to_odd(double(half_to_float(a >> s & 0xffff)) * half_to_float(b >> s & 0xffff),
                           half_to_float(c >> s & 0xffff));
  });
}

APU_DEVICE float fma_f32(float a, float b, float c) {
  return __builtin_fmaf(a, b, c);
}
APU_DEVICE double fma_f64(double a, double b, double c) {
  return __builtin_fma(a, b, c);
}
APU_DEVICE float sqrt_f32(float x) {
  return __builtin_sqrtf(x);
}
APU_DEVICE float exp_f32(float x) {
  return __builtin_expf(x);
}
APU_DEVICE float rcp_f32(float x) {
  return 1.0f / x;
}
APU_DEVICE float exp2_f32(float x) {
  return __builtin_exp2f(x);
}
APU_DEVICE float log_f32(float x) {
  return __builtin_logf(x);
}
APU_DEVICE float fabs_f32(float x) {
  return __builtin_fabsf(x);
}
APU_DEVICE float max_f32(float a, float b) {
  return __builtin_fmaxf(a, b);
}
APU_DEVICE float min_f32(float a, float b) {
  return __builtin_fminf(a, b);
}
APU_DEVICE float round_even_f32(float x) {
  return __builtin_rintf(x);
}
APU_DEVICE double floor_f64(double x) {
  return __builtin_floor(x);
}

APU_DEVICE u32 atomic_add(u32 *p, u32 v) {
  const u32 old = *p;
  *p = old + v;
  return old;
}
APU_DEVICE u32 atomic_max(u32 *p, u32 v) {
  const u32 old = *p;
  if (v > old) *p = v;
  return old;
}

APU_DEVICE u8 *dynamic_shared() {
  return shim::run->dynamic_lds;
}

} // namespace apu::gpu
