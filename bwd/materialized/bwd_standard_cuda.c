/* FATTN_ALGO_STANDARD, backward on the device. P comes from forward; dP is stored whole:

     dP = dO V^T                                             product
     delta = rowsum(dO O) - dL, G = P (keep dP/(1-p) - delta)    rows
     dbias, dsink; dX = G (1 - tanh^2(x/cap)), x/cap computed again
     dQ = scale dX K, dK = scale dX^T Q, dV = (keep P)^T dO/(1-p)  products

   Nothing is added atomically: gradients repeat bitwise. */
#include "core/materialized/standard_cuda.h"

#include "core/cuda/device.h"

#include <stdio.h>

#define KERNELS(X) X(rows) X(scores) X(bias) X(sink)
#define X(name)                                                   \
    extern void fattn_bwd_standard_##name##_f32(fattni_standard_args); \
    extern void fattn_bwd_standard_##name##_f64(fattni_standard_args);
KERNELS(X)
#undef X
#define START(ctx, p, name, grid, x)                                                     \
    ((p)->dtype == FATTN_F64                                                             \
         ? FATTNI_START(ctx, fattn_bwd_standard_##name##_f64, grid, ROW_THREADS, x)      \
         : FATTNI_START(ctx, fattn_bwd_standard_##name##_f32, grid, ROW_THREADS, x))

enum { ROW_THREADS = 256 };

/* Byte offsets in the workspace. */
typedef struct layout {
    size_t blas, dP, X, dX, dropped, q, k, v, d_o, gradient, delta, bytes;
} layout;

static layout layout_of(const fattni_problem *p) {
    const size_t element = fattn_dtype_size(p->dtype);
    const size_t real = fattn_dtype_size(fattni_standard_real(p));
    const int64_t rows = p->B * p->Hq * p->Sq, keys = p->B * p->Hkv * p->Sk, matrix = rows * p->Sk;
    const int64_t of_q = p->dq.present ? rows * p->D : 0, of_k = p->dk.present ? keys * p->D : 0;
    const int64_t of_v = p->dv.present ? keys * p->Dv : 0;
    layout l = {0};
    l.blas = fattni_standard_reserve(&l.bytes, FATTNI_CUDA_BLAS_WORKSPACE, 1);
    l.dP = fattni_standard_reserve(&l.bytes, matrix, real);
    l.X = fattni_standard_reserve(&l.bytes, p->softcap > 0 ? matrix : 0, real);
    l.dX = fattni_standard_reserve(&l.bytes, element == real ? 0 : matrix, element);
    l.dropped = fattni_standard_reserve(&l.bytes, p->drop_T ? matrix : 0, element);
    l.q = fattni_standard_reserve(&l.bytes, rows * p->D, element);
    l.k = fattni_standard_reserve(&l.bytes, keys * p->D, element);
    l.v = fattni_standard_reserve(&l.bytes, keys * p->Dv, element);
    l.d_o = fattni_standard_reserve(&l.bytes, rows * p->Dv, element);
    l.gradient = fattni_standard_reserve(&l.bytes, fattni_max(of_q, fattni_max(of_k, of_v)), real);
    l.delta = fattni_standard_reserve(&l.bytes, rows, real);
    return l;
}

static void plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    (void)ctx;
    out->workspace = layout_of(p).bytes;
    out->saved = fattni_standard_saved(p);
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_bwd_standard_cuda_%s", fattn_dtype_name(p->dtype));
}

/* Many elements have a thread each, few a block each. */
static fattn_status bias_gradient(fattn_ctx *ctx, const fattni_problem *p,
                                  fattni_standard_args *x) {
    const int64_t *const n = x->a.d_bias_n, elements = n[0] * n[1] * n[2] * n[3];
    x->d_bias_lanes = elements < 1 << 14 ? ROW_THREADS : 1;
    return START(ctx, p, bias, fattni_ceil_div(elements * x->d_bias_lanes, ROW_THREADS), x);
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p) {
    const layout l = layout_of(p);
    char *const w = p->workspace;
    void *const blas = w + l.blas;
    const fattn_dtype real = fattni_standard_real(p);
    const fattni_dense q = {&p->q, w + l.q, p->dtype, p->D, false};
    const fattni_dense k = {&p->k, w + l.k, p->dtype, p->D, true};
    const fattni_dense v = {&p->v, w + l.v, p->dtype, p->Dv, true};
    const fattni_dense d_o = {&p->d_o, w + l.d_o, p->dtype, p->Dv, false};
    const fattni_dense *const operands[] = {&q, &k, &v, &d_o};
    for (int n = 0; n < 4; ++n) FATTNI_TRY(fattni_standard_gather(ctx, p, operands[n]));

    fattni_standard_args x = fattni_standard_args_of(p);
    const int64_t rows = p->B * p->Hq * p->Sq;
    x.dP = w + l.dP;
    x.dX = p->dtype == real ? x.dP : w + l.dX;
    x.delta = w + l.delta;
    if (p->drop_T) x.dropped = w + l.dropped;
    FATTNI_TRY(fattni_standard_rows_by_keys(ctx, p, p->Dv, 1, d_o.dense, v.dense, x.dP, blas));
    FATTNI_TRY(START(ctx, p, rows, rows, &x));
    if (p->d_bias.present) FATTNI_TRY(bias_gradient(ctx, p, &x));
    if (p->d_sink.present) FATTNI_TRY(START(ctx, p, sink, p->Hq, &x));

    if (p->softcap > 0) {
        x.X = w + l.X;
        FATTNI_TRY(fattni_standard_rows_by_keys(ctx, p, p->D, p->scale / p->softcap, q.dense,
                                                k.dense, x.X, blas));
    }
    if (x.X || p->dtype != real)
        FATTNI_TRY(START(ctx, p, scores, fattni_ceil_div(rows * p->Sk, ROW_THREADS), &x));

    void *const gradient = w + l.gradient;
    if (p->dq.present) {
        const fattni_dense dq = {&p->dq, gradient, real, p->D, false};
        FATTNI_TRY(fattni_standard_matrix_by_keys(ctx, p, p->D, x.dX, k.dense, gradient, blas));
        FATTNI_TRY(fattni_standard_scatter(ctx, p, &dq, p->scale, p->flags & FATTN_ACC_DQ));
    }
    if (p->dk.present) {
        const fattni_dense dk = {&p->dk, gradient, real, p->D, true};
        FATTNI_TRY(fattni_standard_matrix_by_rows(ctx, p, p->D, x.dX, q.dense, gradient, blas));
        FATTNI_TRY(fattni_standard_scatter(ctx, p, &dk, p->scale, p->flags & FATTN_ACC_DK));
    }
    if (p->dv.present) {
        const fattni_dense dv = {&p->dv, gradient, real, p->Dv, true};
        FATTNI_TRY(fattni_standard_matrix_by_rows(ctx, p, p->Dv, x.dropped ? x.dropped : x.P,
                                                  d_o.dense, gradient, blas));
        FATTNI_TRY(fattni_standard_scatter(ctx, p, &dv, p->keep_scale, p->flags & FATTN_ACC_DV));
    }
    return FATTN_OK;
}

const fattni_kernel fattni_bwd_standard_cuda = {
    .family = "fattn_bwd_standard_cuda",
    .device = FATTN_CUDA,
    .algorithms = 1u << FATTN_ALGO_STANDARD,
    .refuses = fattni_cuda_standard_refuses,
    .plan = plan,
    .run = run,
};
