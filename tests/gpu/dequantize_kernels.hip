// For test_dequantize_device.py: dequantize.h and unpack.h on rows of any type.
#include "dequantize.h"

namespace apu::gpu {

struct DequantizeArgs {
  const u8 *row;
  float *out;   // (K), of dequantize_any16
  float *value; // (K / 16), one of each group by dequantize_value
  u32 type, k;
};

struct OneValue {
  const u8 *row;
  u32 i;
  float *out;
  template <class B> void operator()() const {
    constexpr u32 n = q::Traits<B>::elements;
    *out = dequantize_value<B>(row + u64(i / n) * sizeof(B), i % n);
  }
};

APU_KERNEL(64) void dequantize_row(DequantizeArgs a) {
  const u32 g = block_id() * 64 + thread_id();
  if (16 * g >= a.k) return;
  float v[16];
  dequantize_any16(a.type, a.row, a.k, g, v);
  for (u32 i = 0; i < 16; ++i) {
    if (16 * g + i < a.k)
      a.out[16 * g + i] = v[i];
    else if (v[i] != 0)
      a.out[0] = v[i]; // wrong
  }
  q::with_block_type(a.type, OneValue{a.row, 16 * g + g % 16, a.value + g});
}

} // namespace apu::gpu
