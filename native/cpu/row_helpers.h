// The row helpers of KernelTable as functions: every level defines them, so each level's header includes these
// declarations inside its own namespace. No include guard for that reason.
void scale(float scale, float *y, uint32_t n);
void rms_norm(const float *x, const float *weight, const float *residual, float eps, float *out, uint32_t n);
void silu_mul(const float *gate, const float *up, float *out, uint32_t n);
void gelu_tanh_mul(const float *gate, const float *up, float *out, uint32_t n);
void gelu_erf_mul(const float *gate, const float *up, float *out, uint32_t n);
void swiglu_oai(const float *gate, const float *up, float *out, uint32_t n);
void soft_cap(float *x, float cap, uint32_t n);
float max(const float *x, uint32_t n);
float exp_sum(float *x, float max, uint32_t n);
