// Expert matvec of every type that matvec has kernels for.
#include "expert_matvec.h"
#include "formats_k.h"
#include "formats_legacy.h"
#include "formats_q2_q3.h"
#include "formats_tables.h"
#include "matvec_any.h"
#include "matvec_float.h"

namespace apu::gpu {

APU_EXPERT_MATVEC(f32, FloatProduct<F32Weights>)
APU_EXPERT_MATVEC(f16, FloatProduct<F16Weights>)
APU_EXPERT_MATVEC(bf16, FloatProduct<BF16Weights>)
APU_EXPERT_MATVEC(q8_0, QuantizedProduct<Q8_0>)
APU_EXPERT_MATVEC(q4_0, QuantizedProduct<Q4_0>)
APU_EXPERT_MATVEC(q4_1, QuantizedProduct<Q4_1>)
APU_EXPERT_MATVEC(q5_0, QuantizedProduct<Q5_0>)
APU_EXPERT_MATVEC(q5_1, QuantizedProduct<Q5_1>)
APU_EXPERT_MATVEC(q2_k, QuantizedProduct<Q2_K>)
APU_EXPERT_MATVEC(q3_k, QuantizedProduct<Q3_K>)
APU_EXPERT_MATVEC(q4_k, QuantizedProduct<Q4_K>)
APU_EXPERT_MATVEC(q5_k, QuantizedProduct<Q5_K>)
APU_EXPERT_MATVEC(q6_k, QuantizedProduct<Q6_K>)
APU_EXPERT_MATVEC(iq4_nl, QuantizedProduct<IQ4_NL>)
APU_EXPERT_MATVEC(iq4_xs, QuantizedProduct<IQ4_XS>)
APU_EXPERT_MATVEC(mxfp4, QuantizedProduct<MXFP4>)
APU_EXPERT_MATVEC(iq2_xxs, QuantizedProduct<IQ2_XXS>)
APU_EXPERT_MATVEC(any, UnpackedProduct<false>)
APU_EXPERT_MATVEC(exact, UnpackedProduct<true>)

} // namespace apu::gpu
