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
           p->D <= k->D && p->Dv <= k->Dv && k->shared <= ctx->gpu.shared_limit;
}

/* A block takes 1 KiB more than it asks for. */
static int64_t warps_per_sm(const fattn_ctx *ctx, const fattni_cuda_kernel *k) {
    return (int64_t)((ctx->gpu.shared_limit + 1024) / (k->shared + 1024)) * (k->threads / 32);
}

const fattni_cuda_kernel *fattni_cuda_prefer(const fattn_ctx *ctx, const fattni_cuda_kernel *first,
                                             const fattni_cuda_kernel *next) {
    enum { ENOUGH = 8 };
    if (!first) return next;
    const bool comparable = next->tf32 == first->tf32 && 3 * next->D <= 4 * first->D;
    return comparable && warps_per_sm(ctx, first) < ENOUGH && warps_per_sm(ctx, next) >= ENOUGH ? next : first;
}

bool fattni_cuda_is_fused(const fattn_ctx *ctx, const fattni_problem *p) {
    if ((p->dtype != FATTN_F32 && p->dtype != FATTN_F64) || ctx->gpu.shared_limit >= fattni_cuda_shared_of(80))
        return true;
    bool forward = false, backward = false, huge = false;
    for (const fattni_cuda_kernel *const *k = fattni_fwd_cuda_kernels; *k; ++k)
        forward |= (*k)->variant != FATTNI_VARIANT_ADD && fattni_cuda_can_run(*k, ctx, p);
    for (const fattni_cuda_kernel *const *k = fattni_bwd_cuda_kernels; *k; ++k) {
        const bool runs = (*k)->variant != FATTNI_VARIANT_SUMS && fattni_cuda_can_run(*k, ctx, p);
        *((*k)->variant == FATTNI_VARIANT_HUGE ? &huge : &backward) |= runs;
    }
    return forward && backward && huge;
}

const char *fattni_cuda_why_no_kernel(const fattni_problem *p) {
    if (p->page && (p->dtype == FATTN_F32 || p->dtype == FATTN_F64))
        return "has no fused kernel for this dtype and head_dim in this device's shared memory, and "
               "FATTN_ALGO_STANDARD has no pages";
    return p->dtype == FATTN_F32 || p->dtype == FATTN_F64
               ? "has no fused kernel for this dtype and head_dim in this device's shared memory; "
                 "FATTN_ALGO_STANDARD and AUTO need none"
               : "has no kernel for this dtype, head_dim and features on this device";
}

size_t fattni_cuda_shared_of(int arch) {
    const size_t kib = arch < 80                    ? 64
                       : arch == 86 || arch == 89   ? 99
                       : arch == 120 || arch == 121 ? 99
                       : arch < 90                  ? 163
                                                    : 227;
    return kib << 10;
}

fattn_status fattni_cuda_launch_clusters(fattn_ctx *ctx, const fattni_cuda_kernel *k, int64_t grid, int cluster,
                                         int threads, size_t shared, const void *args, size_t args_bytes) {
    if (args_bytes != k->args_bytes)
        return fattn_ctx_fail(ctx, FATTN_E_STATE, "%s has %zu bytes of arguments, not %zu", k->name, k->args_bytes,
                              args_bytes);
    FATTNI_TRY(fattni_cuda_ready(ctx, k));
    return fattni_cuda_start_clusters(ctx, k->name, k->stub, grid, cluster, threads, shared, args, k->waits);
}

fattn_status fattni_cuda_launch(fattn_ctx *ctx, const fattni_cuda_kernel *k, int64_t grid, const void *args,
                                size_t args_bytes) {
    return fattni_cuda_launch_clusters(ctx, k, grid, 1, k->threads, k->shared, args, args_bytes);
}
