// Layouts of GGUF blocks as they lie in the file, and the arithmetic that every kernel of a quantised type follows.
// Shared by CPU and GPU sources, so: no includes beyond stdint, every member a byte (alignment 1: a block may start
// at any address), 16-bit fields little-endian. Formats: the GGUF specification and the gguf package's dequantiser.
//
// Canonical arithmetic. Activations of EVERY quantised type are int8 in blocks of 32, a float32 scale d for each half
// (activations.h). A weight row is seen as 32-blocks b = 0, 1, ... (a K-quant superblock is eight of them) and gives
// per block integers q[32], a float scale ws, and for some types a minimum. For the halves h = 0 (k < 16) and 1:
//   I_h = sum_{k in h} q[k] * y[k]             sub-blocks of 32: Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q4_K Q5_K
//   I_h = sc_h * sum_{k in h} q[k] * y[k]      sub-blocks of 16: Q2_K Q3_K Q6_K; an exact integer, |I_h| < 2^24
//   acc[b mod 8] = fma(ws_b, fma(float(I_1), d_1, float(I_0) * d_0), acc[b mod 8])
// and then in the same lane, where the type has a minimum, with s16_h = d_h * float(sum_{k in h} y[k]),
//   Q4_1 Q5_1 Q4_K Q5_K: acc = fma(wm_b, s_b, acc),  s_b = s16_0 + s16_1
//   Q2_K:                acc = fma(wm_b, fma(float(m_1), s16_1, float(m_0) * s16_0), acc)
// over b ascending; the result is sum8(acc). Values per type (float32; every product that forms ws or wm is exact):
//   type  q          ws        wm              type  q                         ws          wm
//   Q4_0  nibble-8   d         -               Q2_K  2 bits, sc = low nibble   d           -dmin, m = high nibble
//   Q4_1  nibble     d         m               Q3_K  3 bits - 4, sc 6 bits-32  d           -
//   Q5_0  5 bits-16  d         -               Q4_K  nibble                    d * sc_b    -(dmin * m_b)
//   Q5_1  5 bits     d         m               Q5_K  5 bits                    d * sc_b    -(dmin * m_b)
//   Q8_0  int8       d         -               Q6_K  6 bits - 32, sc int8      d           -
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

static_assert(sizeof(Q4_0) == 18 && sizeof(Q4_1) == 20 && sizeof(Q5_0) == 22 && sizeof(Q5_1) == 24 &&
              sizeof(Q8_0) == 34);
static_assert(sizeof(Q2_K) == 84 && sizeof(Q3_K) == 110 && sizeof(Q4_K) == 144 && sizeof(Q5_K) == 176 &&
              sizeof(Q6_K) == 210);

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

} // namespace apu::quant

#endif // APU_QUANT_BLOCKS_H
