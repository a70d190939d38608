// GEMM (gemm.h) of codebooks and tables of values, of half-precision types, and of every other type (gemm_any).
#include "gemm.h"

namespace apu::gpu {

APU_GEMM(iq2_xxs, BlockWeights<q::IQ2_XXS>)
APU_GEMM(iq4_nl, BlockWeights<q::IQ4_NL>)
APU_GEMM(iq4_xs, BlockWeights<q::IQ4_XS>)
APU_GEMM(mxfp4, BlockWeights<q::MXFP4>)
APU_GEMM(f16, FloatWeights<F16Row>)
APU_GEMM(bf16, FloatWeights<BF16Row>)

APU_KERNEL((kGemmAny.threads())) void gemm_any(GemmArgs g) {
  GemmOf<AnyWeights, kGemmAny>(g).run();
}

} // namespace apu::gpu
