// GEMM (gemm.h) of legacy types of 32 elements to a block.
#include "gemm.h"

namespace apu::gpu {

APU_GEMM(q4_0, BlockWeights<q::Q4_0>)
APU_GEMM(q4_1, BlockWeights<q::Q4_1>)
APU_GEMM(q5_0, BlockWeights<q::Q5_0>)
APU_GEMM(q5_1, BlockWeights<q::Q5_1>)
APU_GEMM(q8_0, BlockWeights<q::Q8_0>)

} // namespace apu::gpu
