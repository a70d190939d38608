// NVIDIA's side of gpu.h, for nvcc: a stand-in on which the same kernels are verified.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define APU_KERNEL(threads) extern "C" __global__ __launch_bounds__(threads)
#define APU_KERNEL_OF(threads, blocks) extern "C" __global__ __launch_bounds__(threads, blocks)
#define APU_DEVICE static __device__ __forceinline__
#define APU_METHOD __device__ __forceinline__
#define APU_SHARED static __shared__
#define APU_CONSTANT static __device__ const

namespace apu::gpu {

constexpr u32 kWaveSize = 32;
constexpr bool kBulkCopy = true;
constexpr u32 kGridCopies = 1, kSignCopies = 32;
constexpr bool kSignsOfActivations = false;

struct alignas(16) u32x4 {
  u32 x, y, z, w;
  APU_METHOD u32 &operator[](u32 i) { return (&x)[i]; }
  APU_METHOD const u32 &operator[](u32 i) const { return (&x)[i]; }
};
struct alignas(8) u32x2 {
  u32 x, y;
  APU_METHOD u32 &operator[](u32 i) { return (&x)[i]; }
  APU_METHOD const u32 &operator[](u32 i) const { return (&x)[i]; }
};
struct alignas(16) f32x4 {
  float x, y, z, w;
  APU_METHOD float &operator[](u32 i) { return (&x)[i]; }
  APU_METHOD const float &operator[](u32 i) const { return (&x)[i]; }
};

APU_DEVICE u32 thread_id() {
  return threadIdx.x;
}
APU_DEVICE u32 block_id() {
  return blockIdx.x;
}
APU_DEVICE u32 block_id_y() {
  return blockIdx.y;
}
APU_DEVICE u32 grid_size() {
  return gridDim.x;
}
APU_DEVICE u32 wave_uniform(u32 v) { // for ptxas too, which then computes with it in uniform registers
  return u32(__shfl_sync(0xffffffffu, v, 0));
}
APU_DEVICE void block_sync() {
  __syncthreads();
}
APU_DEVICE void wave_sync() {
  __syncwarp();
}
APU_DEVICE void keep_order() {}
APU_DEVICE void device_fence() {
  __threadfence();
}

APU_DEVICE float bits_to_float(u32 u) {
  return __uint_as_float(u);
}
APU_DEVICE u32 float_to_bits(float x) {
  return __float_as_uint(x);
}

template <typename T> APU_DEVICE T wave_shuffle(T v, u32 lane) {
  return __shfl_sync(0xffffffffu, v, int(lane));
}
APU_DEVICE u32 wave_read(u32 v, u32 lane) {
  return wave_shuffle(v, lane);
}
template <typename T> APU_DEVICE T wave_shuffle_xor(T v, u32 mask) {
  return __shfl_xor_sync(0xffffffffu, v, int(mask));
}
APU_DEVICE u64 wave_ballot(bool p) {
  return __ballot_sync(0xffffffffu, p);
}
APU_DEVICE bool wave_any(bool p) {
  return __any_sync(0xffffffffu, p);
}

APU_DEVICE u32 bit_count(u64 v) {
  return u32(__popcll(v));
}
APU_DEVICE u32 lowest_bit(u64 v) {
  return u32(__ffsll(i64(v)) - 1);
}
APU_DEVICE i32 dot4(u32 a, u32 b, i32 c) {
  return __dp4a(int(a), int(b), c);
}
APU_DEVICE i32 dot4_us(u32 a, u32 b, i32 c) {
  i32 d;
  asm("dp4a.u32.s32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
APU_DEVICE i32 mul24(i32 a, i32 b) {
  return a * b;
}
// Conversions share the pipe of shifts and logic: numbers are built as 1.5 * 2^23 + i instead.
constexpr i32 kDotStart = 0x4b400000;
APU_DEVICE float dot_to_float(i32 dot) {
  return __int_as_float(dot) - 12582912.0f;
}
APU_DEVICE float byte_to_float(u32 word, u32 i) {
  return __uint_as_float(__byte_perm(word, 0x4b000000, 0x7440 | i)) - 8388608.0f;
}
APU_DEVICE float scaled_to_float(i32 dot, u32 word, u32 i, i32 offset) {
  const i32 rest = offset ? dot * -offset + kDotStart : kDotStart;
  return dot_to_float(dot * i32(__byte_perm(word, 0, 0x4440 | i)) + rest);
}
APU_DEVICE u32 funnel_shift_right(u32 low, u32 high, u32 bits) {
  return __funnelshift_r(low, high, bits);
}
APU_DEVICE u32 byte_permute(u32 a, u32 b, u32 selector) { // one selector in each byte; prmt wants them in nibbles
  const u32 pairs = (selector | selector >> 4) & 0x00ff00ffu;
  return __byte_perm(a, b, (pairs | pairs >> 8) & 0xffffu);
}

// A selector with its top bit set gives the sign of the byte instead; __byte_perm would clear that bit first.
APU_DEVICE u32 nvidia_permute(u32 a, u32 b, u32 selectors) {
  u32 d;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(selectors));
  return d;
}
constexpr bool kNibblesByHalves = true;
APU_DEVICE u32 nibble_permute(u32 a, u32 b, u32 nibbles) {
  return nvidia_permute(a, b, nibbles);
}
// prmt takes four nibbles of a word at once, low and high ones in turn; they are parted afterwards.
APU_DEVICE u32 nvidia_look_up(const ByteTable &table, u32 at, u32 upper) {
  return nvidia_permute(nvidia_permute(table.v[0], table.v[1], at), nvidia_permute(table.v[2], table.v[3], at), upper);
}
APU_DEVICE void keep(u32 &v) { // or zero, the top bit of %lanemask_lt, which ptxas does not know to be that
  asm volatile("{ .reg .u32 t; mov.u32 t, %%lanemask_lt; shr.u32 t, t, 31; or.b32 %0, %0, t; }" : "+r"(v));
}
APU_DEVICE void hide(u32 &v) {
  asm volatile("" : "+r"(v));
}
APU_DEVICE void look_up_nibbles(const ByteTable &table, u32 v, u32 &low, u32 &high) {
  const u32 at = v & 0x77777777u, upper = (v & 0x88888888u) >> 1 | 0x32103210u;
  const u32 first = nvidia_look_up(table, at, upper), last = nvidia_look_up(table, at >> 16, upper >> 16);
  low = nvidia_permute(first, last, 0x6420);
  high = nvidia_permute(first, last, 0x7531);
}
// Nibbles of two words that meet the same half of the activations are joined in one: words 0 and 1, 2 and 3, low and
// high ones. A permute takes four of them, two of each word.
struct NibbleValues {
  u32 lower[8], upper[8]; // low nibbles, high nibbles
};
APU_DEVICE void arrange_nibbles(u32 *q) {
#pragma unroll
  for (u32 i = 0; i < 8; i += 2) {
    const u32 first = q[i], second = q[i + 1];
    q[i] = nvidia_permute(first, second, 0x5140);
    q[i + 1] = nvidia_permute(first, second, 0x7362);
  }
}
APU_DEVICE NibbleValues nibble_values(const NibbleTable &table, const u32 *w) {
  NibbleValues v;
#pragma unroll
  for (u32 i = 0; i < 8; i += 2) {
    const u32 a = w[i % 4], b = w[i % 4 + 1];
    const u32 at = i < 4 ? (a & 0x0f0f0f0fu) | (b << 4 & 0xf0f0f0f0u) : (a >> 4 & 0x0f0f0f0fu) | (b & 0xf0f0f0f0u);
    const u32 other = at ^ 0x88888888u;
    v.lower[i] = nvidia_permute(table.lower[0], table.lower[1], at);
    v.lower[i + 1] = nvidia_permute(table.lower[0], table.lower[1], at >> 16);
    v.upper[i] = nvidia_permute(table.upper[0], table.upper[1], other);
    v.upper[i + 1] = nvidia_permute(table.upper[0], table.upper[1], other >> 16);
  }
  return v;
}
APU_DEVICE i32 nvidia_dot16(const u32 *v, const u32 *q, i32 start) {
  return dot4(v[3], q[3], dot4(v[2], q[2], dot4(v[1], q[1], dot4(v[0], q[0], start))));
}
APU_DEVICE i32 dot_low(const NibbleValues &v, const u32 *q) {
  return nvidia_dot16(v.lower, q, kDotStart) - nvidia_dot16(v.upper, q, 0);
}
APU_DEVICE i32 dot_high(const NibbleValues &v, const u32 *q) {
  return nvidia_dot16(v.lower + 4, q, kDotStart) - nvidia_dot16(v.upper + 4, q, 0);
}
using ByteSelectors = u32; // a nibble each
APU_DEVICE ByteSelectors byte_selectors(u32 nibbles) {
  return nibbles;
}
APU_DEVICE void select_bytes(u32 a, u32 b, ByteSelectors s, u32 &low, u32 &high) {
  low = nvidia_permute(a, b, s);
  high = nvidia_permute(a, b, s >> 16);
}

APU_DEVICE u32x4 load16(const void *p) {
  const uint4 v = *static_cast<const uint4 *>(p);
  return {v.x, v.y, v.z, v.w};
}
APU_DEVICE u32x4 load16_stream(const void *p) {
  const uint4 v = __ldcs(static_cast<const uint4 *>(p));
  return {v.x, v.y, v.z, v.w};
}
template <typename T> APU_DEVICE T *global_pointer(u64 address) {
  return reinterpret_cast<T *>(address);
}
template <u32 N> APU_DEVICE void load_unaligned(const void *p, u32 *words) {
  const u32 shift = u32(reinterpret_cast<u64>(p) & 3) * 8;
  const u32 *from = reinterpret_cast<const u32 *>(static_cast<const u8 *>(p) - shift / 8); // LDS is still seen as such
  u32 low = from[0];
  // Behind a range of memory there may be none; in LDS there is, and its loads keep to one base.
  const u32 *end = from + N - (!__isShared(from) && shift == 0);
#pragma unroll
  for (u32 i = 0; i < N; ++i) {
    const u32 high = i + 1 < N ? from[i + 1] : *end;
    words[i] = __funnelshift_r(low, high, shift);
    low = high;
  }
}
APU_DEVICE void store16(void *p, u32x4 v) {
  *static_cast<uint4 *>(p) = make_uint4(v.x, v.y, v.z, v.w);
}
APU_DEVICE void copy16_async(void *shared, const void *global) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(u32(__cvta_generic_to_shared(shared))), "l"(global)
               : "memory");
}
typedef u32 SharedAddress;
// ptxas computes the address of a shared variable anew, with a slow special register, wherever it is used; what a
// shuffle returned it must keep.
APU_DEVICE SharedAddress shared_address(void *p) {
  return wave_shuffle(u32(__cvta_generic_to_shared(p)), 0);
}
APU_DEVICE u32 shared_load(SharedAddress a) {
  u32 v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(a) : "memory");
  return v;
}
APU_DEVICE u32x4 shared_load16(SharedAddress a) {
  u32x4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(a)
               : "memory");
  return v;
}
APU_DEVICE u32 shared_load_u16(SharedAddress a) {
  u32 v;
  asm volatile("{ .reg .u16 t; ld.shared.u16 t, [%1]; cvt.u32.u16 %0, t; }" : "=r"(v) : "r"(a) : "memory");
  return v;
}
APU_DEVICE void bulk_init(SharedAddress barrier, u32 lanes) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;\nfence.mbarrier_init.release.cluster;" ::"r"(barrier), "r"(lanes)
               : "memory");
}
APU_DEVICE void bulk_expect(SharedAddress barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
APU_DEVICE void bulk_copy(SharedAddress to, const void *global, u32 bytes, SharedAddress barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}
APU_DEVICE void bulk_fence() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}
APU_DEVICE void bulk_wait(SharedAddress barrier, u32 parity) {
  asm volatile("{\n"
               ".reg .pred done;\n"
               "waiting%=:\n"
               "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
               "@!done bra waiting%=;\n"
               "}" ::"r"(barrier),
               "r"(parity)
               : "memory");
}
APU_DEVICE void copy_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}
template <int N> APU_DEVICE void copy_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

APU_DEVICE float half_to_float(u32 bits) {
  return __half2float(__ushort_as_half(u16(bits)));
}
APU_DEVICE u16 float_to_half(float x) {
  return __half_as_ushort(__float2half_rn(x));
}
APU_DEVICE float bfloat16_to_float(u32 bits) {
  return bits_to_float(bits << 16);
}
APU_DEVICE u16 float_to_bfloat16(float x) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(x));
}
APU_DEVICE __half2 nvidia_half2(u32 v) {
  return *reinterpret_cast<__half2 *>(&v);
}
APU_DEVICE u32 nvidia_bits(__half2 v) {
  return *reinterpret_cast<u32 *>(&v);
}
APU_DEVICE u32 floats_to_halves(float low, float high) {
  return nvidia_bits(__floats2half2_rn(low, high));
}
APU_DEVICE u32 max_u16_pairs(u32 a, u32 b) {
  return __vmaxu2(a, b);
}
APU_DEVICE u32 half2_mul(u32 a, u32 b) {
  return nvidia_bits(__hmul2(nvidia_half2(a), nvidia_half2(b)));
}
APU_DEVICE u32 half2_add(u32 a, u32 b) {
  return nvidia_bits(__hadd2(nvidia_half2(a), nvidia_half2(b)));
}
APU_DEVICE u32 half2_fma(u32 a, u32 b, u32 c) {
  return nvidia_bits(__hfma2(nvidia_half2(a), nvidia_half2(b), nvidia_half2(c)));
}

APU_DEVICE float fma_f32(float a, float b, float c) {
  return fmaf(a, b, c);
}
APU_DEVICE double fma_f64(double a, double b, double c) {
  return fma(a, b, c);
}
APU_DEVICE float sqrt_f32(float x) {
  return sqrtf(x);
}
APU_DEVICE float exp_f32(float x) {
  return expf(x);
}
APU_DEVICE float rcp_f32(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
APU_DEVICE float exp2_f32(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
APU_DEVICE float log_f32(float x) {
  return logf(x);
}
APU_DEVICE float fabs_f32(float x) {
  return fabsf(x);
}
APU_DEVICE float max_f32(float a, float b) {
  return fmaxf(a, b);
}
APU_DEVICE float min_f32(float a, float b) {
  return fminf(a, b);
}
APU_DEVICE float round_even_f32(float x) {
  return rintf(x);
}
APU_DEVICE double floor_f64(double x) {
  return floor(x);
}

APU_DEVICE u32 atomic_add(u32 *p, u32 v) {
  return atomicAdd(p, v);
}
APU_DEVICE u32 atomic_max(u32 *p, u32 v) {
  return atomicMax(p, v);
}

APU_DEVICE u8 *dynamic_shared() {
  extern __shared__ __align__(16) u8 apu_dynamic_shared[];
  return apu_dynamic_shared;
}

} // namespace apu::gpu
