// Layouts of GGUF blocks as they lie in the file, and the arithmetic that every kernel of a quantised type follows.
// Shared by CPU and GPU sources, so: no includes beyond stdint, every member a byte (alignment 1: a block may start
// at any address), 16-bit fields little-endian. Formats: the GGUF specification and the gguf package's dequantiser.
//
// Canonical arithmetic. Activations of EVERY quantised type are int8 in blocks of 32, a float32 scale d for each half
// (activations.h). A weight row is seen as 32-blocks b = 0, 1, ... (a K-quant superblock is eight of them) and gives
// per block integers q[32], a float scale ws, and for some types a minimum. For the halves h = 0 (k < 16) and 1:
//   I_h = sc_h * sum_{k in h} q[k] * y[k]      exact in float32; sc_h = 1 unless the type has scales for 16 elements
//   acc[b mod 8] = fma(ws_b, fma(I_1, d_1, I_0 * d_0), acc[b mod 8])
// and then in the same lane, where the type has a minimum, with s16_h = d_h * float(sum_{k in h} y[k]),
//   Q4_1 Q5_1 Q4_K Q5_K: acc = fma(wm_b, s_b, acc),  s_b = s16_0 + s16_1
//   Q2_K:                acc = fma(wm_b, fma(float(m_1), s16_1, float(m_0) * s16_0), acc)
// over b ascending; the result is sum8(acc). Values per type (float32; every product that forms ws or wm is exact),
// where s stands for the stored scale of 32 elements, s_h for that of 16:
//   type     q                  sc     ws        wm          type     q                      sc       ws
//   Q4_0     nibble - 8         -      d         -           IQ1_S    8 * (-1 0 1) +- 1      -        d * (2s + 1) / 8
//   Q4_1     nibble             -      d         m           IQ1_M    8 * (-1 0 1) +- 1      2s_h+1   d / 8
//   Q5_0     5 bits - 16        -      d         -           IQ2_XXS  +- (8 25 43)           -        d * (2s + 1) / 8
//   Q5_1     5 bits             -      d         m           IQ2_XS   +- (8 25 43)           2s_h+1   d / 8
//   Q8_0     int8               -      d         -           IQ2_S    +- (8 25 43)           2s_h+1   d / 8
//   Q2_K     2 bits             s_h    d         -dmin (m)   IQ3_XXS  +- (4 12 .. 52 62)     -        d * (2s + 1) / 4
//   Q3_K     3 bits - 4         s_h    d         -           IQ3_S    +- (1 3 .. 15)         -        d * (2s + 1)
//   Q4_K     nibble             -      d * s     -dmin * m   IQ4_NL   16 values              -        d
//   Q5_K     5 bits             -      d * s     -dmin * m   IQ4_XS   16 values              -        d * (s - 32)
//   Q6_K     6 bits - 32        s_h    d         -           MXFP4    2 * E2M1               -        2^(e - 128)
//   TQ1_0    base 3 digit - 1   -      d         -           NVFP4    2 * E2M1               E4M3/2   1
//   TQ2_0    2 bits - 1         -      d         -
// Dequantised ("exact" precision): (ws * sc) * q, then + wm (Q2_K: + wm * m), each step rounded, no fma.
// Integer sums may be formed in any order; nothing else may be reordered. So few-row and many-row kernels and all
// instruction sets agree bit for bit. unpack.h is this table in scalar code.
#ifndef APU_QUANT_BLOCKS_H
#define APU_QUANT_BLOCKS_H

#include <stdint.h>

namespace apu::quant {

inline constexpr uint32_t kBlock = 32;       // elements of a legacy block, and of an activation block
inline constexpr uint32_t kSuperblock = 256; // elements of a K-quant superblock
inline constexpr uint32_t kLanes = 8;        // float lanes of a quantised dot product
inline constexpr uint32_t kFloatLanes = 16;  // float lanes of a dot product of float types

// ---- legacy types: 32 elements; low nibbles are elements 0..15, high nibbles 16..31 --------------------------------

struct Q4_0 {
  uint8_t d[2]; // f16
  uint8_t qs[16];
};
struct Q4_1 {
  uint8_t d[2];
  uint8_t m[2]; // f16
  uint8_t qs[16];
};
struct Q5_0 {
  uint8_t d[2];
  uint8_t qh[4]; // bit k: bit 4 of element k
  uint8_t qs[16];
};
struct Q5_1 {
  uint8_t d[2];
  uint8_t m[2];
  uint8_t qh[4];
  uint8_t qs[16];
};
struct Q8_0 {
  uint8_t d[2];
  uint8_t qs[32]; // int8
};

// ---- K-quants: 256 elements ----------------------------------------------------------------------------------------

struct Q2_K {
  uint8_t scales[16]; // per 16 elements: scale low nibble, minimum high nibble
  uint8_t qs[64];     // byte 32 h + l, bits 2j..2j+1: element 128 h + 32 j + l
  uint8_t d[2];
  uint8_t dmin[2];
};
struct Q3_K {
  uint8_t hmask[32];  // byte l, bit 4 h + j: bit 2 of element 128 h + 32 j + l, clear means subtract 4
  uint8_t qs[64];     // as in Q2_K
  uint8_t scales[12]; // sixteen 6-bit scales + 32: low nibbles of 0..7 and 8..15 in bytes 0..7 (low, high nibble);
                      // bits 4..5 of scale i in byte 8 + i mod 4, bits 2 (i / 4)
  uint8_t d[2];
};
struct Q4_K {
  uint8_t d[2];
  uint8_t dmin[2];
  uint8_t scales[12]; // see scale_min_k4 in unpack.h
  uint8_t qs[128];    // byte 32 c + l: low nibble element 64 c + l, high nibble element 64 c + 32 + l
};
struct Q5_K {
  uint8_t d[2];
  uint8_t dmin[2];
  uint8_t scales[12];
  uint8_t qh[32]; // byte l, bit b: bit 4 of element 32 b + l
  uint8_t qs[128];
};
struct Q6_K {
  uint8_t ql[128];    // byte 64 h + 32 j + l: low nibble element 128 h + 32 j + l, high nibble 64 elements further
  uint8_t qh[64];     // byte 32 h + l, bits 2j..2j+1: bits 4..5 of element 128 h + 32 j + l
  uint8_t scales[16]; // int8, per 16 elements
  uint8_t d[2];
};

// ---- codebooks: 256 elements in groups of eight (IQ1, IQ2) or four (IQ3) that are one index; see unpack.h -----------

struct IQ2_XXS {
  uint8_t d[2];   // f16
  uint8_t qs[64]; // per 32: four indices, then u32: four times seven signs (even_signs) from bit 0, s in bits 28..31
};
struct IQ2_XS {
  uint8_t d[2];
  uint8_t qs[64];    // u16 per 8: index in bits 0..8, seven signs above
  uint8_t scales[8]; // s per 16, low nibble first
};
struct IQ2_S {
  uint8_t d[2];
  uint8_t qs[32];    // low eight bits of the indices
  uint8_t signs[32]; // bit i: element i of the group is negative
  uint8_t qh[8];     // byte per 32: two high bits of each index
  uint8_t scales[8]; // as in IQ2_XS
};
struct IQ3_XXS {
  uint8_t d[2];
  uint8_t qs[64];    // indices
  uint8_t signs[32]; // u32 per 32, as in IQ2_XXS
};
struct IQ3_S {
  uint8_t d[2];
  uint8_t qs[64];    // low eight bits of the indices
  uint8_t qh[8];     // byte per 32, bit i: bit 8 of index i
  uint8_t signs[32]; // as in IQ2_S
  uint8_t scales[4]; // s per 32, low nibble first
};
struct IQ1_S {
  uint8_t d[2];
  uint8_t qs[32]; // low eight bits of the indices
  uint8_t qh[16]; // u16 per 32: three high bits of each index from bit 0, s in bits 12..14, bit 15: minus an eighth
};
struct IQ1_M {
  uint8_t qs[32];    // low eight bits of the indices
  uint8_t qh[16];    // nibble per 8: three high bits of the index, bit 3: minus an eighth
  uint8_t scales[8]; // four u16: s of four times 16 elements, three bits each; bits 12..15 are nibble i of d
};

// ---- tables of sixteen values ---------------------------------------------------------------------------------------

struct IQ4_NL { // 32 elements, nibbles as in Q4_0
  uint8_t d[2];
  uint8_t qs[16];
};
struct IQ4_XS { // 256 elements
  uint8_t d[2];
  uint8_t scales_h[2]; // two high bits of s per 32, from bit 0
  uint8_t scales_l[4]; // low nibbles of s, low nibble first
  uint8_t qs[128];     // per 32 as in IQ4_NL
};
struct MXFP4 {    // 32 elements
  uint8_t e;      // E8M0
  uint8_t qs[16]; // as in IQ4_NL
};
struct NVFP4 {       // 64 elements
  uint8_t scales[4]; // unsigned E4M3 per 16
  uint8_t qs[32];    // per 16 elements eight bytes: low nibbles elements 0..7, high nibbles 8..15
};

// ---- ternary: 256 elements ------------------------------------------------------------------------------------------

struct TQ1_0 {
  uint8_t qs[48]; // digit n of five in base 3 of byte l: element 32 n + l of 0..159, then 160 + 16 n + l
  uint8_t qh[4];  // digit n of four of byte l: element 240 + 4 n + l; see ternary_digit in unpack.h
  uint8_t d[2];
};
struct TQ2_0 {
  uint8_t qs[64]; // as in Q2_K
  uint8_t d[2];
};

static_assert(sizeof(Q4_0) == 18 && sizeof(Q4_1) == 20 && sizeof(Q5_0) == 22 && sizeof(Q5_1) == 24 &&
              sizeof(Q8_0) == 34);
static_assert(sizeof(Q2_K) == 84 && sizeof(Q3_K) == 110 && sizeof(Q4_K) == 144 && sizeof(Q5_K) == 176 &&
              sizeof(Q6_K) == 210);
static_assert(sizeof(IQ2_XXS) == 66 && sizeof(IQ2_XS) == 74 && sizeof(IQ2_S) == 82 && sizeof(IQ3_XXS) == 98 &&
              sizeof(IQ3_S) == 110 && sizeof(IQ1_S) == 50 && sizeof(IQ1_M) == 56);
static_assert(sizeof(IQ4_NL) == 18 && sizeof(IQ4_XS) == 136 && sizeof(MXFP4) == 17 && sizeof(NVFP4) == 36 &&
              sizeof(TQ1_0) == 54 && sizeof(TQ2_0) == 66);

// What a kernel template needs to know of a type: elements and bytes of its file block, 32-blocks in it, the offset
// subtracted from the stored unsigned integer (0 where it is used as stored), sub-block width, and minimum.
enum class Minimum { none, per_block, per_half };

template <class B, uint32_t Elements, int Offset, uint32_t SubBlock, Minimum Min> struct BlockTraits {
  static constexpr uint32_t elements = Elements;
  static constexpr uint32_t bytes = sizeof(B);
  static constexpr uint32_t blocks32 = Elements / kBlock;
  static constexpr int offset = Offset;
  static constexpr uint32_t sub_block = SubBlock;
  static constexpr Minimum minimum = Min;
};

template <class B> struct Traits;
template <> struct Traits<Q4_0> : BlockTraits<Q4_0, 32, 8, 32, Minimum::none> {};
template <> struct Traits<Q4_1> : BlockTraits<Q4_1, 32, 0, 32, Minimum::per_block> {};
template <> struct Traits<Q5_0> : BlockTraits<Q5_0, 32, 16, 32, Minimum::none> {};
template <> struct Traits<Q5_1> : BlockTraits<Q5_1, 32, 0, 32, Minimum::per_block> {};
template <> struct Traits<Q8_0> : BlockTraits<Q8_0, 32, 0, 32, Minimum::none> {};
template <> struct Traits<Q2_K> : BlockTraits<Q2_K, 256, 0, 16, Minimum::per_half> {};
template <> struct Traits<Q3_K> : BlockTraits<Q3_K, 256, 4, 16, Minimum::none> {};
template <> struct Traits<Q4_K> : BlockTraits<Q4_K, 256, 0, 32, Minimum::per_block> {};
template <> struct Traits<Q5_K> : BlockTraits<Q5_K, 256, 0, 32, Minimum::per_block> {};
template <> struct Traits<Q6_K> : BlockTraits<Q6_K, 256, 32, 16, Minimum::none> {};
template <> struct Traits<IQ2_XXS> : BlockTraits<IQ2_XXS, 256, 0, 32, Minimum::none> {};
template <> struct Traits<IQ2_XS> : BlockTraits<IQ2_XS, 256, 0, 16, Minimum::none> {};
template <> struct Traits<IQ2_S> : BlockTraits<IQ2_S, 256, 0, 16, Minimum::none> {};
template <> struct Traits<IQ3_XXS> : BlockTraits<IQ3_XXS, 256, 0, 32, Minimum::none> {};
template <> struct Traits<IQ3_S> : BlockTraits<IQ3_S, 256, 0, 32, Minimum::none> {};
template <> struct Traits<IQ1_S> : BlockTraits<IQ1_S, 256, 0, 32, Minimum::none> {};
template <> struct Traits<IQ1_M> : BlockTraits<IQ1_M, 256, 0, 16, Minimum::none> {};
template <> struct Traits<IQ4_NL> : BlockTraits<IQ4_NL, 32, 0, 32, Minimum::none> {};
template <> struct Traits<IQ4_XS> : BlockTraits<IQ4_XS, 256, 0, 32, Minimum::none> {};
template <> struct Traits<MXFP4> : BlockTraits<MXFP4, 32, 0, 32, Minimum::none> {};
template <> struct Traits<NVFP4> : BlockTraits<NVFP4, 64, 0, 16, Minimum::none> {};
template <> struct Traits<TQ1_0> : BlockTraits<TQ1_0, 256, 1, 32, Minimum::none> {};
template <> struct Traits<TQ2_0> : BlockTraits<TQ2_0, 256, 1, 32, Minimum::none> {};

} // namespace apu::quant

#endif // APU_QUANT_BLOCKS_H
