/* FATTN_ALGO_STANDARD, backward on the device. P comes from forward; dP is stored whole:

     dP = dO V^T                                             product
     delta = rowsum(dO O) - dL, G = P (keep dP/(1-p) - delta)    rows
     dbias, dsink; dX = G (1 - tanh^2(x/cap)), x/cap computed again
     dQ = scale dX K, dK = scale dX^T Q, dV = (keep P)^T dO/(1-p)  products

   Nothing is added atomically: gradients repeat bitwise. */
#include "bwd/materialized/bwd_standard_cuda.h"

#include "bwd/cuda/bwd_cuda.h"

FATTNI_STANDARD_KERNEL(bwd_standard_rows, fattni_bwd_standard_args);
FATTNI_STANDARD_KERNEL(bwd_standard_scores, fattni_bwd_standard_args);
FATTNI_STANDARD_KERNEL(bwd_standard_bias, fattni_bwd_standard_args);
FATTNI_STANDARD_KERNEL(bwd_standard_sink, fattni_bwd_standard_args);

/* Byte offsets in the workspace. */
typedef struct layout {
    size_t blas, dP, X, dX, d_o, gradient, delta, P, bytes; /* P: of a part of the keys, without dropout */
    fattni_standard_input_layout in;
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
    l.in = fattni_standard_lay_out_inputs(p, &l.bytes);
    l.d_o = fattni_standard_reserve(&l.bytes, rows * p->Dv, element);
    l.gradient = fattni_standard_reserve(&l.bytes, fattni_max(of_q, fattni_max(of_k, of_v)), real);
    l.delta = fattni_standard_reserve(&l.bytes, rows, real);
    l.P = fattni_standard_reserve(&l.bytes, (p->flags & FATTN_MERGE) && !p->drop_T ? matrix : 0, element);
    return l;
}

static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const char *const reason = fattni_cuda_standard_why_unsupported(ctx, p);
    if (reason) return reason;
    fattni_standard_plan(p, "fattn_bwd_standard_cuda", layout_of(p).bytes, out);
    return NULL;
}

/* Many elements have a thread each, few a block each. */
static fattn_status bias_gradient(fattn_ctx *ctx, const fattni_problem *p, fattni_bwd_standard_args *x) {
    const int64_t *const n = x->bwd.d_bias_n, elements = n[0] * n[1] * n[2] * n[3];
    x->d_bias_lanes = elements < 1 << 14 ? FATTNI_STANDARD_THREADS : 1;
    return FATTNI_STANDARD_START(ctx, p, bwd_standard_bias,
                                 fattni_ceil_div(elements * x->d_bias_lanes, FATTNI_STANDARD_THREADS), x);
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    (void)plan;
    const layout l = layout_of(p);
    char *const w = p->workspace;
    void *const blas = w + l.blas;
    const fattn_dtype real = fattni_standard_real(p);
    const fattni_dense d_o = {&p->d_o, w + l.d_o, p->dtype, p->Dv, false};
    fattni_standard_inputs in;
    FATTNI_TRY(fattni_standard_gather_inputs(ctx, p, &l.in, &in));
    FATTNI_TRY(fattni_standard_gather(ctx, p, &d_o));

    fattni_bwd_standard_args x = {
        .x = fattni_standard_args_of(p), .bwd = fattni_bwd_args_of(p), .d_o_dtype = p->d_o.dtype};
    const int64_t rows = p->B * p->Hq * p->Sq;
    x.dP = w + l.dP;
    x.dX = p->dtype == real ? x.dP : w + l.dX;
    x.delta = w + l.delta;
    x.x.dropped = in.dropped;
    if ((p->flags & FATTN_MERGE) && !p->drop_T) x.x.dropped = w + l.P;
    FATTNI_TRY(fattni_standard_rows_by_keys(ctx, p, p->Dv, 1, d_o.dense, in.v.dense, x.dP, blas));
    FATTNI_TRY(FATTNI_STANDARD_START(ctx, p, bwd_standard_rows, rows, &x));
    if (p->d_bias.present) FATTNI_TRY(bias_gradient(ctx, p, &x));
    if (p->d_sink.present) FATTNI_TRY(FATTNI_STANDARD_START(ctx, p, bwd_standard_sink, p->Hq, &x));

    if (p->softcap > 0) {
        x.X = w + l.X;
        FATTNI_TRY(
            fattni_standard_rows_by_keys(ctx, p, p->D, p->scale / p->softcap, in.q.dense, in.k.dense, x.X, blas));
    }
    if (x.X || p->dtype != real)
        FATTNI_TRY(FATTNI_STANDARD_START(ctx, p, bwd_standard_scores,
                                         fattni_ceil_div(rows * p->Sk, FATTNI_STANDARD_THREADS), &x));

    void *const gradient = w + l.gradient;
    if (p->dq.present) {
        const fattni_dense dq = {&p->dq, gradient, real, p->D, false};
        FATTNI_TRY(fattni_standard_matrix_by_keys(ctx, p, p->D, x.dX, in.k.dense, gradient, blas));
        FATTNI_TRY(fattni_standard_scatter(ctx, p, &dq, p->scale, p->flags & FATTN_ACC_DQ));
    }
    if (p->dk.present) {
        const fattni_dense dk = {&p->dk, gradient, real, p->D, true};
        FATTNI_TRY(fattni_standard_matrix_by_rows(ctx, p, p->D, x.dX, in.q.dense, gradient, blas));
        FATTNI_TRY(fattni_standard_scatter(ctx, p, &dk, p->scale, p->flags & FATTN_ACC_DK));
    }
    if (p->dv.present) {
        const fattni_dense dv = {&p->dv, gradient, real, p->Dv, true};
        FATTNI_TRY(fattni_standard_matrix_by_rows(ctx, p, p->Dv, x.x.dropped ? x.x.dropped : x.x.P, d_o.dense, gradient,
                                                  blas));
        FATTNI_TRY(fattni_standard_scatter(ctx, p, &dv, p->keep_scale, p->flags & FATTN_ACC_DV));
    }
    return FATTN_OK;
}

const fattni_kernel fattni_bwd_standard_cuda = {
    .family = "fattn_bwd_standard_cuda",
    .device = FATTN_CUDA,
    .algorithms = 1u << FATTN_ALGO_STANDARD | 1u << FATTN_ALGO_AUTO, /* AUTO: where no fused kernel fits */
    .plan = plan,
    .run = run,
};
