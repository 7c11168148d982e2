/* The CUDA row of the forward table: picks an instance of fwd_kernels.def and launches it. */
#include "cuda_device.h"
#include "cuda_kernels.h"
#include "kernel.h"

#include <string.h>

static const char *refuses(const fattn_ctx *ctx, const fattni_problem *p) {
    const char *reason = fattni_cuda_refuses(p);
    if (reason) return reason;
    if (p->dtype != FATTN_BF16 && p->dtype != FATTN_F16) return "computes bf16 and f16 only";
    if (!fattni_cuda_find(ctx, p)) return "has no kernel for this head_dim and mask on this device";
    return NULL;
}

static void plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const fattni_cuda_kernel *k = fattni_cuda_find(ctx, p);
    out->deterministic = true;
    strncpy(out->name, k->name, sizeof out->name - 1);
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p) {
    const fattni_cuda_kernel *k = fattni_cuda_find(ctx, p);
    const fattni_cuda_args a = fattni_cuda_args_of(p);
    const int64_t grid = fattni_ceil_div(p->Sq, k->BM) * p->Hq * p->B;
    return fattni_cuda_launch(ctx, k->name, k->kernel, grid, k->threads, k->shared, &a);
}

const fattni_kernel fattni_fwd_cuda = {
    "fattn_fwd_sm80", FATTN_CUDA, 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH2, refuses, plan, run};
