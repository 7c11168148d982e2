#include "core/cuda/kernels.h"

#include "core/cuda/launch.h"

int fattni_cuda_variant_of(const fattni_problem *p, bool banded) {
    const bool causal = p->flags & (FATTN_CAUSAL | FATTN_CAUSAL_TOP_LEFT);
    if (p->softcap > 0 || p->alibi.present || p->bias.present || p->drop_T) return FATTNI_VARIANT_GENERAL;
    if (banded || p->sink.present || p->packed || p->padded || p->window_left != FATTNI_UNBOUNDED ||
        (!causal && p->window_right != FATTNI_UNBOUNDED))
        return FATTNI_VARIANT_BANDED;
    return causal ? FATTNI_VARIANT_CAUSAL : FATTNI_VARIANT_FULL;
}

bool fattni_cuda_has_code(const fattni_cuda_kernel *k, const fattn_ctx *ctx) {
    return k->arch == 90 ? ctx->gpu.arch == 90 : k->arch <= ctx->gpu.arch; /* sm_90a runs on 9.0 only */
}

bool fattni_cuda_can_run(const fattni_cuda_kernel *k, const fattn_ctx *ctx, const fattni_problem *p) {
    return k->dtype == (int32_t)p->dtype && (!k->tf32 || (p->flags & FATTN_TF32)) && fattni_cuda_has_code(k, ctx) &&
           fattni_max(p->D, p->Dv) <= k->D && k->shared <= ctx->gpu.shared_limit;
}

fattn_status fattni_cuda_launch(fattn_ctx *ctx, const fattni_cuda_kernel *k, int64_t grid, const void *args,
                                size_t args_bytes) {
    if (args_bytes != k->args_bytes)
        return fattn_ctx_fail(ctx, FATTN_E_STATE, "%s has %zu bytes of arguments, not %zu", k->name, k->args_bytes,
                              args_bytes);
    return fattni_cuda_start(ctx, k->name, k->stub, grid, k->threads, k->shared, args);
}
