/* FATTN_ALGO_STANDARD, forward on the device: S = scale Q K^T, P = softmax(S), O = P V, with P
   stored whole. Products through cuBLAS, all heads in one call; see core/materialized/standard_cuda.h. */
#include "core/materialized/standard_cuda.h"

#include "core/cuda/device.h"
#include "core/attention/dropout.h"

FATTNI_STANDARD_KERNEL(fwd_standard_rows, fattni_standard_args);

/* Byte offsets in the workspace. */
typedef struct layout {
    size_t blas, S, o, kept, o_scale, bytes;
    fattni_standard_input_layout in;
} layout;

static layout layout_of(const fattni_problem *p) {
    const size_t element = fattn_dtype_size(p->dtype);
    const size_t real = fattn_dtype_size(fattni_standard_real(p));
    const int64_t rows = p->B * p->Hq * p->Sq;
    layout l = {0};
    l.blas = fattni_standard_reserve(&l.bytes, FATTNI_CUDA_BLAS_WORKSPACE, 1);
    l.S = fattni_standard_reserve(&l.bytes, element == real ? 0 : rows * p->Sk, real);
    l.in = fattni_standard_lay_out_inputs(p, &l.bytes);
    l.o = fattni_standard_reserve(&l.bytes, rows * p->Dv, real);
    l.kept = fattni_standard_reserve(&l.bytes, p->flags & FATTN_MERGE ? rows : 0, real);
    l.o_scale = fattni_standard_reserve(&l.bytes, element == real ? 0 : rows, real);
    return l;
}

static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const char *const reason = fattni_cuda_standard_why_unsupported(ctx, p);
    if (reason) return reason;
    fattni_standard_plan(p, "fattn_fwd_standard_cuda", layout_of(p).bytes, out);
    return NULL;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    (void)plan;
    const layout l = layout_of(p);
    char *const w = p->workspace;
    const fattn_dtype real = fattni_standard_real(p);
    const fattni_dense o = {&p->o, w + l.o, real, p->Dv, false};
    fattni_standard_inputs in;
    FATTNI_TRY(fattni_standard_gather_inputs(ctx, p, &l.in, &in));

    fattni_standard_args x = fattni_standard_args_of(p);
    x.S = p->dtype == real ? p->saved : w + l.S;
    x.dropped = in.dropped;
    if (p->drop_T) {
        const int64_t stride[4] = {p->Hq * p->Sq * p->Sk, p->Sq * p->Sk, p->Sk, 1};
        FATTNI_TRY(fattni_cuda_mask(ctx, p, x.keep, stride, p->Sq, p->Sk));
    }
    if (p->flags & FATTN_MERGE) x.kept = w + l.kept;
    if (p->dtype != real) x.o_scale = w + l.o_scale;
    FATTNI_TRY(fattni_standard_rows_by_keys(ctx, p, p->D, p->scale, in.q.dense, in.k.dense, x.S, w + l.blas));
    FATTNI_TRY(FATTNI_STANDARD_START(ctx, p, fwd_standard_rows, p->B * p->Hq * p->Sq, &x));
    FATTNI_TRY(
        fattni_standard_matrix_by_keys(ctx, p, p->Dv, x.dropped ? x.dropped : x.P, in.v.dense, o.dense, w + l.blas));
    return fattni_standard_scatter_o(ctx, p, &o, &x);
}

const fattni_kernel fattni_fwd_standard_cuda = {
    .family = "fattn_fwd_standard_cuda",
    .device = FATTN_CUDA,
    .algorithms = 1u << FATTN_ALGO_STANDARD | 1u << FATTN_ALGO_AUTO, /* AUTO: where no fused kernel fits */
    .plan = plan,
    .run = run,
};
