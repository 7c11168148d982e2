/* The CUDA row of the backward table for F32 and F64: bwd_preprocess_real.cuh, the main kernel, huge rows, dsink. */
#include "bwd/cuda/bwd_cuda.h"

#include <string.h>

extern void fattn_bwd_rows_f32(fattni_cuda_args);
extern void fattn_bwd_rows_f64(fattni_cuda_args);

/* The workspace: offsets; an absent part has no bytes. delta is [B,Hq,rows_q]. */
typedef struct layout {
    size_t delta, sink, turns;
    fattni_bwd_huge huge;
} layout;

static layout layout_of(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    const int64_t rows = (p->packed ? 1 : p->B) * p->Hq * p->rows_q;
    const int64_t size = (int64_t)fattn_dtype_size(p->dtype);
    layout l = {.delta = 0, .sink = (size_t)fattni_round_up(rows * size, FATTNI_ALIGN)};
    l.turns = l.sink + fattni_bwd_cuda_sink_bytes(p, k);
    l.huge = fattni_bwd_cuda_huge_parts(ctx, p, l.turns + fattni_bwd_cuda_turns_bytes(p, k), rows);
    return l;
}

static void plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const fattni_cuda_kernel *k = fattni_cuda_find(ctx, p);
    out->workspace = layout_of(ctx, p, k).huge.end;
    out->deterministic = fattni_bwd_cuda_repeats(p);
    strncpy(out->name, k->name, sizeof out->name - 1);
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p) {
    const fattni_cuda_kernel *k = fattni_cuda_find(ctx, p);
    const layout l = layout_of(ctx, p, k);
    char *const workspace = p->workspace;
    fattni_cuda_args a = fattni_cuda_args_of(p);
    a.row_block = k->BM;
    a.delta = (float *)(workspace + l.delta);
    a.sink_parts = workspace + l.sink;
    if (l.huge.max > l.turns) a.turns = (int32_t *)(workspace + l.turns);
    const int64_t row_grid = fattni_bwd_cuda_row_grid(p, k), key_grid = fattni_bwd_cuda_key_grid(p, k);
    fattni_bwd_cuda_huge_args(ctx, p, &l.huge, &a);
    FATTNI_TRY(fattni_cuda_zero(ctx, workspace + l.huge.zero, l.huge.end - l.huge.zero));
    FATTNI_TRY(fattni_bwd_cuda_zero(ctx, p, &a));
    FATTNI_TRY(a.f64 ? FATTNI_START(ctx, fattn_bwd_rows_f64, row_grid, 256, &a)
                     : FATTNI_START(ctx, fattn_bwd_rows_f32, row_grid, 256, &a));
    FATTNI_TRY(fattni_cuda_start(ctx, k->name, k->kernel, key_grid, k->threads, k->shared, &a));
    FATTNI_TRY(fattni_bwd_cuda_huge(ctx, p, k, &a));
    return fattni_bwd_cuda_sink(ctx, p, &a);
}

const fattni_kernel fattni_bwd_cuda_simt = {
    "fattn_bwd_simt", FATTN_CUDA,
    1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH1 | 1u << FATTN_ALGO_FLASH2,
    fattni_bwd_cuda_refuses, plan, run, 1u << FATTN_F32 | 1u << FATTN_F64};
