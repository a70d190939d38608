// From a dtype to its block type: the one list of quantised types that have kernels. A new type is its number in
// apu.h, its block and traits in blocks.h, its unpack_block, and a line here.
// Internal linkage and always inline: no copy may carry an instruction set's code into another object.
#ifndef APU_QUANT_VISIT_H
#define APU_QUANT_VISIT_H

#include "../include/apu.h"
#include "blocks.h"
#include "target.h"

namespace apu::quant {

// Calls use.template operator()<B>() for a quantised dtype, else nothing.
template <class Use> [[gnu::always_inline]] APU_QUANT_FUNCTION void with_block_type(uint32_t dtype, const Use &use) {
  switch (dtype) {
  case APU_Q4_0: return use.template operator()<Q4_0>();
  case APU_Q4_1: return use.template operator()<Q4_1>();
  case APU_Q5_0: return use.template operator()<Q5_0>();
  case APU_Q5_1: return use.template operator()<Q5_1>();
  case APU_Q8_0: return use.template operator()<Q8_0>();
  case APU_Q2_K: return use.template operator()<Q2_K>();
  case APU_Q3_K: return use.template operator()<Q3_K>();
  case APU_Q4_K: return use.template operator()<Q4_K>();
  case APU_Q5_K: return use.template operator()<Q5_K>();
  case APU_Q6_K: return use.template operator()<Q6_K>();
  case APU_IQ2_XXS: return use.template operator()<IQ2_XXS>();
  case APU_IQ2_XS: return use.template operator()<IQ2_XS>();
  case APU_IQ3_XXS: return use.template operator()<IQ3_XXS>();
  case APU_IQ1_S: return use.template operator()<IQ1_S>();
  case APU_IQ4_NL: return use.template operator()<IQ4_NL>();
  case APU_IQ3_S: return use.template operator()<IQ3_S>();
  case APU_IQ2_S: return use.template operator()<IQ2_S>();
  case APU_IQ4_XS: return use.template operator()<IQ4_XS>();
  case APU_IQ1_M: return use.template operator()<IQ1_M>();
  case APU_TQ1_0: return use.template operator()<TQ1_0>();
  case APU_TQ2_0: return use.template operator()<TQ2_0>();
  case APU_MXFP4: return use.template operator()<MXFP4>();
  case APU_NVFP4: return use.template operator()<NVFP4>();
  default: return;
  }
}

} // namespace apu::quant

#endif // APU_QUANT_VISIT_H
