/* The CUDA row of the backward table for F32 and F64: bwd_preprocess_real.cuh, in TF32 with a softcap sums of dS, the
   main kernel, huge rows, dsink. */
#include "bwd/cuda/bwd_cuda.h"

extern void fattn_bwd_preprocess_f32(fattni_bwd_args);
extern void fattn_bwd_preprocess_f64(fattni_bwd_args);

/* The workspace: offsets; an absent part has size 0. delta is [B,Hq,rows_q]. */
typedef struct layout {
    size_t delta, sink, dq_semaphore;
    fattni_bwd_key_mean key_mean;
    fattni_bwd_huge huge;
} layout;

static layout layout_of(const fattni_problem *p, const fattni_cuda_kernel *k, const fattni_cuda_kernel *huge) {
    const int64_t rows = (p->packed ? 1 : p->B) * p->Hq * p->rows_q;
    const int64_t size = (int64_t)fattn_dtype_size(p->dtype);
    layout l = {.delta = 0, .sink = (size_t)fattni_round_up(rows * size, FATTNI_ALIGN)};
    l.dq_semaphore = l.sink + fattni_bwd_cuda_sink_bytes(p, k);
    l.key_mean = fattni_bwd_cuda_key_mean_parts(p, k, huge, l.dq_semaphore + fattni_bwd_cuda_semaphore_bytes(p, k));
    l.huge = fattni_bwd_cuda_huge_parts(p, huge, l.key_mean.end, rows);
    return l;
}

static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    fattni_bwd_choice c;
    const char *const reason = fattni_bwd_cuda_choose(ctx, p, &c);
    if (reason) return reason;
    out->workspace = layout_of(p, c.main, c.huge).huge.end;
    fattni_bwd_cuda_keep_choice(&c, p, out);
    return NULL;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    const fattni_cuda_kernel *const k = plan->choice[0], *const huge = plan->choice[1], *const sums = plan->choice[2];
    const layout l = layout_of(p, k, huge);
    char *const workspace = p->workspace;
    fattni_bwd_args x = fattni_bwd_args_of(p);
    x.row_block = k->BM;
    x.dbias_scale = 1; /* dS has no power of two in it, as F16's may have */
    x.delta = (float *)(workspace + l.delta);
    x.sink_parts = workspace + l.sink;
    if (l.key_mean.mean > l.dq_semaphore) x.dq_semaphore = (int32_t *)(workspace + l.dq_semaphore);
    x.a.at_once = fattni_bwd_cuda_at_once(ctx, p, k, &x.a);
    const int64_t row_grid = fattni_bwd_cuda_row_grid(p, k), key_grid = fattni_bwd_cuda_key_grid(p, k);
    fattni_bwd_cuda_huge_args(p, huge, &l.huge, &x);
    fattni_bwd_cuda_key_mean_args(p, huge, &l.key_mean, &x);
    FATTNI_TRY(fattni_bwd_cuda_zero_counters(ctx, p, &x, l.huge.zero, l.huge.end, l.key_mean.present));
    FATTNI_TRY(fattni_bwd_cuda_zero(ctx, p, &x));
    FATTNI_TRY(x.a.f64 ? FATTNI_START(ctx, fattn_bwd_preprocess_f64, row_grid, 256, &x)
                       : FATTNI_START(ctx, fattn_bwd_preprocess_f32, row_grid, 256, &x));
    if (l.key_mean.present && p->softcap > 0)
        FATTNI_TRY(fattni_cuda_launch(ctx, sums, fattni_bwd_cuda_row_grid(p, sums), &x, sizeof x));
    FATTNI_TRY(fattni_cuda_launch(ctx, k, key_grid, &x, sizeof x));
    FATTNI_TRY(fattni_bwd_cuda_huge(ctx, p, huge, k, &x));
    return fattni_bwd_cuda_sink(ctx, p, &x);
}

const fattni_kernel fattni_bwd_cuda_real = {
    .family = "fattn_bwd_real",
    .device = FATTN_CUDA,
    .algorithms = 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH1 | 1u << FATTN_ALGO_FLASH2,
    .plan = plan,
    .run = run,
    .dtypes = 1u << FATTN_F32 | 1u << FATTN_F64,
};
