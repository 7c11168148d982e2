/* The CUDA row of the forward table: picks an instance of fwd_kernels.def and launches it. */
#include "core/cuda/sm90.h"
#include "core/attention/kernel.h"

#include <string.h>

static int64_t grid_of(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    const int64_t tiles = fattni_ceil_div(p->Sq, k->BM) * p->Hq * p->B;
    return k->arch == 90 ? fattni_min(tiles, ctx->gpu.sms) : tiles;
}

static const char *refuses(const fattn_ctx *ctx, const fattni_problem *p) {
    const char *reason = fattni_cuda_refuses(p);
    if (reason) return reason;
    const fattni_cuda_kernel *const k = fattni_cuda_find(ctx, p);
    if (!k) return "has no kernel for this dtype, head_dim and mask on this device";
    return fattni_cuda_refuses_grid(grid_of(ctx, p, k));
}

static void plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const fattni_cuda_kernel *k = fattni_cuda_find(ctx, p);
    out->deterministic = true;
    /* The tile counter of the persistent kernels; whether one runs may hang on an address. */
    if (ctx->gpu.arch == 90) out->workspace = FATTNI_ALIGN;
    strncpy(out->name, k->name, sizeof out->name - 1);
}

static fattn_status run_persistent(fattn_ctx *ctx, const fattni_problem *p,
                                   const fattni_cuda_kernel *k) {
    fattni_sm90_args a;
    FATTNI_TRY(fattni_sm90_args_of(ctx, p, k, &a));
    a.next_tile = p->workspace;
    if (k->mask != FATTNI_MASK_FULL)
        FATTNI_TRY(fattni_cuda_zero(ctx, a.next_tile, sizeof *a.next_tile));
    return fattni_cuda_start(ctx, k->name, k->kernel, grid_of(ctx, p, k), k->threads, k->shared, &a);
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p) {
    const fattni_cuda_kernel *k = fattni_cuda_find(ctx, p);
    if (k->arch == 90) return run_persistent(ctx, p, k);
    const fattni_cuda_args a = fattni_cuda_args_of(p);
    return fattni_cuda_start(ctx, k->name, k->kernel, grid_of(ctx, p, k), k->threads, k->shared, &a);
}

const fattni_kernel fattni_fwd_cuda = {
    "fattn_fwd", FATTN_CUDA, 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH2, refuses, plan, run};
