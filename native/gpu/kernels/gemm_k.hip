// GEMM (gemm.h) of K-quants.
#include "gemm.h"

namespace apu::gpu {

APU_GEMM(q2_k, BlockWeights<q::Q2_K>)
APU_GEMM(q3_k, BlockWeights<q::Q3_K>)
APU_GEMM(q4_k, BlockWeights<q::Q4_K>)
APU_GEMM(q5_k, BlockWeights<q::Q5_K>)
APU_GEMM(q6_k, BlockWeights<q::Q6_K>)

} // namespace apu::gpu
