// AMD's side of gpu.h: clang's AMDGPU builtins, no ROCm header. Everything here is compiled for device only; the host
// pass of HIP compilation never happens (--cuda-device-only).
#pragma once

#define APU_KERNEL(threads)                                                                                            \
  extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(threads, threads)))
#define APU_KERNEL_OF(threads, blocks) APU_KERNEL(threads)
#define APU_DEVICE static inline __attribute__((device)) __attribute__((always_inline))
#define APU_METHOD __attribute__((device)) __attribute__((always_inline))
#define APU_SHARED static __attribute__((shared))
#define APU_CONSTANT static __attribute__((device)) const

namespace apu::gpu {

#if defined(__gfx90a__)
constexpr u32 kWaveSize = 64;
#else
constexpr u32 kWaveSize = 32;
#endif
constexpr bool kBulkCopy = false;
constexpr u32 kGridCopies = 2, kSignCopies = 2;
constexpr bool kSignsOfActivations = true;

typedef u32 u32x4 __attribute__((ext_vector_type(4)));
typedef u32 u32x2 __attribute__((ext_vector_type(2)));
typedef float f32x4 __attribute__((ext_vector_type(4)));

APU_DEVICE u32 thread_id() {
  return __builtin_amdgcn_workitem_id_x();
}
APU_DEVICE u32 block_id() {
  return __builtin_amdgcn_workgroup_id_x();
}
APU_DEVICE u32 block_id_y() {
  return __builtin_amdgcn_workgroup_id_y();
}
// Of the kernel's implicit arguments in code object v5 and later: block_count_x is the first.
APU_DEVICE u32 grid_size() {
  return *(const __attribute__((address_space(4))) u32 *)__builtin_amdgcn_implicitarg_ptr();
}

APU_DEVICE u32 wave_uniform(u32 v) {
  return u32(__builtin_amdgcn_readfirstlane(i32(v)));
}

APU_DEVICE void block_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
APU_DEVICE void wave_sync() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
  __builtin_amdgcn_wave_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
APU_DEVICE void keep_order() {
  __builtin_amdgcn_sched_barrier(0);
}
APU_DEVICE void device_fence() {
  __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, "agent");
}

APU_DEVICE float bits_to_float(u32 u) {
  return __builtin_bit_cast(float, u);
}
APU_DEVICE u32 float_to_bits(float x) {
  return __builtin_bit_cast(u32, x);
}

template <typename T> APU_DEVICE T wave_shuffle(T v, u32 lane) {
  static_assert(sizeof(T) == 4);
  return __builtin_bit_cast(T, __builtin_amdgcn_ds_bpermute(i32(lane * 4), __builtin_bit_cast(i32, v)));
}
APU_DEVICE u32 wave_read(u32 v, u32 lane) {
  return u32(__builtin_amdgcn_readlane(i32(v), i32(lane)));
}
APU_DEVICE u32 amd_lane() {
  return thread_id() % kWaveSize;
}
template <int Control, typename T> APU_DEVICE T amd_dpp(T v) {
  return __builtin_bit_cast(T, __builtin_amdgcn_update_dpp(0, __builtin_bit_cast(i32, v), Control, 0xf, 0xf, true));
}
// Constant masks, as all are once loops are unrolled, need no LDS access within rows of 16 lanes.
template <typename T> APU_DEVICE T wave_shuffle_xor(T v, u32 mask) {
#if !defined(__gfx90a__)
  switch (mask) { // row_xmask, and the two rows exchanged
  case 1: return amd_dpp<0x161>(v);
  case 2: return amd_dpp<0x162>(v);
  case 4: return amd_dpp<0x164>(v);
  case 8: return amd_dpp<0x168>(v);
  case 16:
    return __builtin_bit_cast(
        T, __builtin_amdgcn_permlanex16(0, __builtin_bit_cast(i32, v), 0x76543210, i32(0xfedcba98u), true, false));
  default: break;
  }
#endif
  return wave_shuffle(v, amd_lane() ^ mask);
}
APU_DEVICE u64 wave_ballot(bool p) {
  if constexpr (kWaveSize == 64)
    return __builtin_amdgcn_ballot_w64(p);
  else
    return __builtin_amdgcn_ballot_w32(p);
}
APU_DEVICE bool wave_any(bool p) {
  return wave_ballot(p) != 0;
}

APU_DEVICE u32 bit_count(u64 v) {
  return u32(__builtin_popcountll(v));
}
APU_DEVICE u32 lowest_bit(u64 v) {
  return u32(__builtin_ctzll(v));
}
APU_DEVICE i32 dot4(u32 a, u32 b, i32 c) {
#if defined(__gfx90a__)
  return __builtin_amdgcn_sdot4(i32(a), i32(b), c, false);
#else
  return __builtin_amdgcn_sudot4(true, i32(a), true, i32(b), c, false);
#endif
}
APU_DEVICE i32 dot4_us(u32 a, u32 b, i32 c) {
#if defined(__gfx90a__)
  // No mixed-sign form: unsigned a = signed (a ^ 0x80) + 128.
  const i32 ones = __builtin_amdgcn_sdot4(0x01010101, i32(b), 0, false);
  return __builtin_amdgcn_sdot4(i32(a ^ 0x80808080u), i32(b), c, false) + 128 * ones;
#else
  return __builtin_amdgcn_sudot4(false, i32(a), true, i32(b), c, false);
#endif
}
APU_DEVICE i32 mul24(i32 a, i32 b) { // v_mul_i32_i24, at full rate
  return (a << 8 >> 8) * (b << 8 >> 8);
}
constexpr i32 kDotStart = 0;
APU_DEVICE float dot_to_float(i32 dot) {
  return float(dot);
}
APU_DEVICE float byte_to_float(u32 word, u32 i) { // v_cvt_f32_ubyte
  return float(word >> 8 * i & 255);
}
APU_DEVICE float scaled_to_float(i32 dot, u32 word, u32 i, i32 offset) {
  return float(dot) * (byte_to_float(word, i) - float(offset));
}
APU_DEVICE u32 funnel_shift_right(u32 low, u32 high, u32 bits) {
  return __builtin_amdgcn_alignbit(high, low, bits);
}
APU_DEVICE u32 byte_permute(u32 a, u32 b, u32 selector) {
  return __builtin_amdgcn_perm(b, a, selector);
}

APU_DEVICE u32 amd_look_up(const ByteTable &table, u32 at, u32 high) { // high: 4 where the upper eight are meant
  return byte_permute(byte_permute(table.v[0], table.v[1], at), byte_permute(table.v[2], table.v[3], at),
                      high | 0x03020100u);
}
APU_DEVICE void hide(u32 &v) {
  asm volatile("" : "+v"(v));
}
APU_DEVICE void look_up_nibbles(const ByteTable &table, u32 v, u32 &low, u32 &high) {
  low = amd_look_up(table, v & 0x07070707u, v >> 1 & 0x04040404u);
  high = amd_look_up(table, v >> 4 & 0x07070707u, v >> 5 & 0x04040404u);
}
struct NibbleValues {
  u32 v[8]; // low nibbles, high nibbles
};
APU_DEVICE void keep(u32 &) {}
APU_DEVICE void arrange_nibbles(u32 *) {}
APU_DEVICE NibbleValues nibble_values(const NibbleTable &table, const u32 *w) {
  NibbleValues v;
#pragma unroll
  for (u32 i = 0; i < 4; ++i) look_up_nibbles(table.values, w[i], v.v[i], v.v[4 + i]);
  return v;
}
APU_DEVICE i32 dot_low(const NibbleValues &v, const u32 *q) {
  return dot4(v.v[3], q[3], dot4(v.v[2], q[2], dot4(v.v[1], q[1], dot4(v.v[0], q[0], kDotStart))));
}
APU_DEVICE i32 dot_high(const NibbleValues &v, const u32 *q) {
  return dot4(v.v[7], q[3], dot4(v.v[6], q[2], dot4(v.v[5], q[1], dot4(v.v[4], q[0], kDotStart))));
}
constexpr bool kNibblesByHalves = false;
APU_DEVICE u32 nibble_permute(u32 a, u32 b, u32 nibbles) {
  u32 at = (nibbles | nibbles << 8) & 0x00ff00ffu;
  at = (at | at << 4) & 0x0f0f0f0fu;
  const u32 bytes = byte_permute(a, b, at & 0x07070707u), repeated = (bytes >> 7 & 0x01010101u) * 255u;
  const u32 signs = (at >> 3 & 0x01010101u) * 255u;
  return (bytes & ~signs) | (repeated & signs);
}
using ByteSelectors = u64; // a byte each
APU_DEVICE ByteSelectors byte_selectors(u32 nibbles) {
  u64 bytes = nibbles;
  bytes = (bytes | bytes << 16) & 0x0000ffff0000ffffu;
  bytes = (bytes | bytes << 8) & 0x00ff00ff00ff00ffu;
  return (bytes | bytes << 4) & 0x0f0f0f0f0f0f0f0fu;
}
APU_DEVICE void select_bytes(u32 a, u32 b, ByteSelectors s, u32 &low, u32 &high) {
  low = byte_permute(a, b, u32(s));
  high = byte_permute(a, b, u32(s >> 32));
}

// The address space is said: where the compiler cannot find out, it takes flat loads, which hold up LDS reads.
typedef const __attribute__((address_space(1))) u32x4 *GlobalU32x4;
APU_DEVICE u32x4 load16(const void *p) {
  return *(GlobalU32x4)p;
}
APU_DEVICE u32x4 load16_stream(const void *p) {
  return __builtin_nontemporal_load((GlobalU32x4)p);
}
// Global memory and LDS are read at any address on amdhsa.
template <typename T> APU_DEVICE T *global_pointer(u64 address) {
  return (T *)(__attribute__((address_space(1))) T *)address;
}
template <u32 N> APU_DEVICE void load_unaligned(const void *p, u32 *words) {
  __builtin_memcpy(words, p, 4 * N);
}
APU_DEVICE void store16(void *p, u32x4 v) {
  *static_cast<u32x4 *>(p) = v;
}
APU_DEVICE void copy16_async(void *shared, const void *global) {
  store16(shared, load16_stream(global));
}
typedef __attribute__((address_space(3))) u8 *SharedAddress;
APU_DEVICE SharedAddress shared_address(void *p) {
  return (SharedAddress)p;
}
APU_DEVICE u32 shared_load(SharedAddress a) {
  return *(const __attribute__((address_space(3))) u32 *)a;
}
APU_DEVICE u32x4 shared_load16(SharedAddress a) {
  return *(const __attribute__((address_space(3))) u32x4 *)a;
}
APU_DEVICE u32 shared_load_u16(SharedAddress a) {
  return *(const __attribute__((address_space(3))) u16 *)a;
}
APU_DEVICE void bulk_init(SharedAddress, u32) {}
APU_DEVICE void bulk_expect(SharedAddress, u32) {}
APU_DEVICE void bulk_copy(SharedAddress, const void *, u32, SharedAddress) {}
APU_DEVICE void bulk_fence() {}
APU_DEVICE void bulk_wait(SharedAddress, u32) {}
APU_DEVICE void copy_commit() {}
template <int N> APU_DEVICE void copy_wait() {}

APU_DEVICE float half_to_float(u32 bits) {
  return float(__builtin_bit_cast(_Float16, u16(bits)));
}
APU_DEVICE u16 float_to_half(float x) {
  return __builtin_bit_cast(u16, _Float16(x));
}
APU_DEVICE float bfloat16_to_float(u32 bits) {
  return bits_to_float(bits << 16);
}
APU_DEVICE u16 float_to_bfloat16(float x) {
  const u32 u = float_to_bits(x);
  if ((u & 0x7fffffffu) > 0x7f800000u) return u16(u >> 16 | 64); // NaN stays one
  return u16((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
typedef _Float16 half2_t __attribute__((ext_vector_type(2)));
APU_DEVICE u32 floats_to_halves(float low, float high) {
  typedef float float2_t __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(u32, __builtin_convertvector((float2_t{low, high}), half2_t));
}
APU_DEVICE u32 max_u16_pairs(u32 a, u32 b) {
  typedef u16 u16x2 __attribute__((ext_vector_type(2)));
  return __builtin_bit_cast(u32, __builtin_elementwise_max(__builtin_bit_cast(u16x2, a), __builtin_bit_cast(u16x2, b)));
}
APU_DEVICE u32 half2_mul(u32 a, u32 b) {
  return __builtin_bit_cast(u32, __builtin_bit_cast(half2_t, a) * __builtin_bit_cast(half2_t, b));
}
APU_DEVICE u32 half2_add(u32 a, u32 b) {
  return __builtin_bit_cast(u32, __builtin_bit_cast(half2_t, a) + __builtin_bit_cast(half2_t, b));
}
APU_DEVICE u32 half2_fma(u32 a, u32 b, u32 c) {
  return __builtin_bit_cast(u32,
                            __builtin_elementwise_fma(__builtin_bit_cast(half2_t, a), __builtin_bit_cast(half2_t, b),
                                                      __builtin_bit_cast(half2_t, c)));
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
  return __builtin_amdgcn_rcpf(x);
}
APU_DEVICE float exp2_f32(float x) {
  return __builtin_amdgcn_exp2f(x);
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
  return __scoped_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}
APU_DEVICE u32 atomic_max(u32 *p, u32 v) {
  return __scoped_atomic_fetch_max(p, v, __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}

APU_DEVICE u8 *dynamic_shared() {
  extern __attribute__((shared)) __attribute__((aligned(16))) u8 apu_dynamic_shared[];
  return apu_dynamic_shared;
}

} // namespace apu::gpu
