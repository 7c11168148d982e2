/* Linked with --wrap=fattni_cpu_kernels_of a test runs attention on 16-bit tensors by the models of AMX, on any x86-64
   and whatever instruction set its contexts have. */
#include "amx_model.h"

#ifdef FATTNI_HAVE_NARROW_PRODUCTS
const fattni_cpu_kernels *__real_fattni_cpu_kernels_of(const fattn_ctx *ctx, fattn_dtype dtype);
const fattni_cpu_kernels *__wrap_fattni_cpu_kernels_of(const fattn_ctx *ctx, fattn_dtype dtype);

const fattni_cpu_kernels *__wrap_fattni_cpu_kernels_of(const fattn_ctx *ctx, fattn_dtype dtype) {
    if (ctx->flags & FATTN_CTX_F32_PRODUCTS) return __real_fattni_cpu_kernels_of(ctx, dtype);
    if (dtype == FATTN_BF16) return &fattni_cpu_amx_model;
    if (dtype == FATTN_F16) return &fattni_cpu_amxfp16_model;
    return __real_fattni_cpu_kernels_of(ctx, dtype);
}
#endif
