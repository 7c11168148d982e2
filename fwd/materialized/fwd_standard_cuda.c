/* FATTN_ALGO_STANDARD, forward on the device: S = scale Q K^T, P = softmax(S), O = P V, with P
   stored whole. Products through cuBLAS, all heads in one call; see core/materialized/standard_cuda.h. */
#include "core/materialized/standard_cuda.h"

#include "core/cuda/device.h"
#include "core/attention/dropout.h"

#include <stdio.h>

extern void fattn_fwd_standard_rows_f32(fattni_standard_args);
extern void fattn_fwd_standard_rows_f64(fattni_standard_args);

enum { ROW_THREADS = 256 };

/* Byte offsets in the workspace. */
typedef struct layout {
    size_t blas, S, dropped, q, k, v, o, kept, weight, bytes;
} layout;

static layout layout_of(const fattni_problem *p) {
    const size_t element = fattn_dtype_size(p->dtype);
    const size_t real = fattn_dtype_size(fattni_standard_real(p));
    const int64_t rows = p->B * p->Hq * p->Sq, keys = p->B * p->Hkv * p->Sk;
    layout l = {0};
    l.blas = fattni_standard_reserve(&l.bytes, FATTNI_CUDA_BLAS_WORKSPACE, 1);
    l.S = fattni_standard_reserve(&l.bytes, element == real ? 0 : rows * p->Sk, real);
    l.dropped = fattni_standard_reserve(&l.bytes, p->drop_T ? rows * p->Sk : 0, element);
    l.q = fattni_standard_reserve(&l.bytes, rows * p->D, element);
    l.k = fattni_standard_reserve(&l.bytes, keys * p->D, element);
    l.v = fattni_standard_reserve(&l.bytes, keys * p->Dv, element);
    l.o = fattni_standard_reserve(&l.bytes, rows * p->Dv, real);
    l.kept = fattni_standard_reserve(&l.bytes, p->flags & FATTN_MERGE ? rows : 0, real);
    l.weight = fattni_standard_reserve(&l.bytes, element == real ? 0 : rows, real);
    return l;
}

static void plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    (void)ctx;
    out->workspace = layout_of(p).bytes;
    out->saved = fattni_standard_saved(p);
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_fwd_standard_cuda_%s", fattn_dtype_name(p->dtype));
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p) {
    const layout l = layout_of(p);
    char *const w = p->workspace;
    const fattn_dtype real = fattni_standard_real(p);
    const fattni_dense q = {&p->q, w + l.q, p->dtype, p->D, false};
    const fattni_dense k = {&p->k, w + l.k, p->dtype, p->D, true};
    const fattni_dense v = {&p->v, w + l.v, p->dtype, p->Dv, true};
    const fattni_dense o = {&p->o, w + l.o, real, p->Dv, false};
    FATTNI_TRY(fattni_standard_gather(ctx, p, &q));
    FATTNI_TRY(fattni_standard_gather(ctx, p, &k));
    FATTNI_TRY(fattni_standard_gather(ctx, p, &v));

    fattni_standard_args x = fattni_standard_args_of(p);
    x.S = p->dtype == real ? p->saved : w + l.S;
    if (p->drop_T) {
        const int64_t stride[4] = {p->Hq * p->Sq * p->Sk, p->Sq * p->Sk, p->Sk, 1};
        FATTNI_TRY(fattni_cuda_mask(ctx, p, x.keep, stride, p->Sq, p->Sk));
        x.dropped = w + l.dropped;
    }
    if (p->flags & FATTN_MERGE) x.kept = w + l.kept;
    if (p->dtype != real) x.weight = w + l.weight;
    FATTNI_TRY(fattni_standard_rows_by_keys(ctx, p, p->D, p->scale, q.dense, k.dense, x.S,
                                            w + l.blas));
    const int64_t rows = p->B * p->Hq * p->Sq;
    if (real == FATTN_F64)
        FATTNI_TRY(FATTNI_START(ctx, fattn_fwd_standard_rows_f64, rows, ROW_THREADS, &x));
    else
        FATTNI_TRY(FATTNI_START(ctx, fattn_fwd_standard_rows_f32, rows, ROW_THREADS, &x));
    FATTNI_TRY(fattni_standard_matrix_by_keys(ctx, p, p->Dv, x.dropped ? x.dropped : x.P, v.dense,
                                              o.dense, w + l.blas));
    return fattni_standard_scatter_o(ctx, p, &o, &x);
}

const fattni_kernel fattni_fwd_standard_cuda = {
    .family = "fattn_fwd_standard_cuda",
    .device = FATTN_CUDA,
    .algorithms = 1u << FATTN_ALGO_STANDARD,
    .refuses = fattni_cuda_standard_refuses,
    .plan = plan,
    .run = run,
};
