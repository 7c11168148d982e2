#include "core/materialized/standard_cuda.h"

#include "core/cuda/kernels.h"
#include "core/cuda/device.h"

extern void fattn_gather(fattni_dense_args);
extern void fattn_scatter(fattni_dense_args);

enum { THREADS = FATTNI_STANDARD_THREADS };

/* Threads of the largest launch: elements of P, of a dense buffer, of d_bias. */
static int64_t most_threads(const fattni_problem *p) {
    const int64_t rows = p->B * p->Hq * p->Sq, keys = p->B * p->Hkv * p->Sk;
    const int64_t width = fattni_max(p->D, p->Dv);
    int64_t bias = p->d_bias.present;
    for (int d = 0; d < 4; ++d) bias *= p->d_bias.s[d] ? p->d_bias.n[d] : 1;
    return fattni_max(fattni_max(rows * fattni_max(p->Sk, width), keys * width), bias);
}

const char *fattni_cuda_standard_why_unsupported(const fattn_ctx *ctx, const fattni_problem *p) {
    if (p->algorithm == FATTN_ALGO_AUTO && fattni_cuda_is_fused(ctx, p)) return "is for calls without fused kernels";
    const char *reason = fattni_cuda_why_unsupported(ctx, p);
    if (!reason && p->page) reason = "has no pages";
    if (!reason) reason = fattni_cuda_blas_missing(ctx);
    if (!reason) reason = fattni_standard_why_unsupported(p);
    if (reason) return reason;
    if (p->B * p->Hq > INT32_MAX / fattni_max(p->Sq, 1)) return "takes at most 2^31-1 rows";
    return fattni_cuda_why_grid_unsupported(fattni_ceil_div(most_threads(p), THREADS));
}

fattni_standard_args fattni_standard_args_of(const fattni_problem *p) {
    return (fattni_standard_args){
        .a = fattni_cuda_args_of(p),
        .scale = p->scale,
        .softcap = p->softcap,
        .keep_scale = p->keep_scale,
        .dtype = p->dtype,
        .o_dtype = p->o.dtype,
        .bias_dtype = p->bias.dtype,
        .P = p->saved,
        .keep = p->saved ? fattni_standard_mask(p) : NULL,
        .L = p->saved ? fattni_standard_L(p) : NULL,
    };
}

static fattni_dense_args dense_args(const fattni_problem *p, const fattni_dense *d) {
    const fattni_array *const x = d->array;
    return (fattni_dense_args){
        .a = fattni_cuda_args_of(p),
        .view = {x->p, x->s[0], x->s[1], x->s[2], x->s[3]},
        .dense = d->dense,
        .scale = 1,
        .rows = d->keys ? p->Sk : p->Sq,
        .width = d->width,
        .view_dtype = x->dtype,
        .dense_dtype = d->dtype,
        .heads = (int32_t)(d->keys ? p->Hkv : p->Hq),
        .keys = d->keys,
    };
}

static int64_t blocks(const fattni_problem *p, const fattni_dense_args *x) {
    return fattni_ceil_div(p->B * x->heads * x->rows * x->width, THREADS);
}

fattn_status fattni_standard_gather(fattn_ctx *ctx, const fattni_problem *p, const fattni_dense *d) {
    const fattni_dense_args x = dense_args(p, d);
    return FATTNI_START(ctx, fattn_gather, blocks(p, &x), THREADS, &x);
}

fattn_status fattni_standard_scatter(fattn_ctx *ctx, const fattni_problem *p, const fattni_dense *d, double scale,
                                     bool add) {
    fattni_dense_args x = dense_args(p, d);
    x.scale = scale;
    x.add = add;
    return FATTNI_START(ctx, fattn_scatter, blocks(p, &x), THREADS, &x);
}

fattn_status fattni_standard_scatter_o(fattn_ctx *ctx, const fattni_problem *p, const fattni_dense *d,
                                       const fattni_standard_args *rows) {
    fattni_dense_args x = dense_args(p, d);
    x.scale = p->keep_scale;
    x.kept = rows->kept;
    x.o_scale = rows->o_scale;
    return FATTNI_START(ctx, fattn_scatter, blocks(p, &x), THREADS, &x);
}

fattni_standard_input_layout fattni_standard_lay_out_inputs(const fattni_problem *p, size_t *bytes) {
    const size_t element = fattn_dtype_size(p->dtype);
    const int64_t rows = p->B * p->Hq * p->Sq, keys = p->B * p->Hkv * p->Sk;
    fattni_standard_input_layout at;
    at.q = fattni_standard_reserve(bytes, rows * p->D, element);
    at.k = fattni_standard_reserve(bytes, keys * p->D, element);
    at.v = fattni_standard_reserve(bytes, keys * p->Dv, element);
    at.dropped = fattni_standard_reserve(bytes, p->drop_T ? rows * p->Sk : 0, element);
    return at;
}

fattn_status fattni_standard_gather_inputs(fattn_ctx *ctx, const fattni_problem *p,
                                           const fattni_standard_input_layout *at, fattni_standard_inputs *out) {
    char *const w = p->workspace;
    *out = (fattni_standard_inputs){
        .q = {&p->q, w + at->q, p->dtype, p->D, false},
        .k = {&p->k, w + at->k, p->dtype, p->D, true},
        .v = {&p->v, w + at->v, p->dtype, p->Dv, true},
        .dropped = p->drop_T ? w + at->dropped : NULL,
    };
    FATTNI_TRY(fattni_standard_gather(ctx, p, &out->q));
    FATTNI_TRY(fattni_standard_gather(ctx, p, &out->k));
    return fattni_standard_gather(ctx, p, &out->v);
}

/* c[M,N] = alpha op(a) op(b), each [B Hkv] matrices that lie dense, one after the other. */
static fattn_status multiply(fattn_ctx *ctx, const fattni_problem *p, bool trans_a, bool trans_b, int64_t M, int64_t N,
                             int64_t K, double alpha, const void *a, const void *b, void *c, void *workspace) {
    const fattni_cuda_gemm g = {.dtype = p->dtype,
                                .c_dtype = fattni_standard_real(p),
                                .tf32 = p->flags & FATTN_TF32,
                                .trans_a = trans_a,
                                .trans_b = trans_b,
                                .batches = p->B * p->Hkv,
                                .M = M,
                                .N = N,
                                .K = K,
                                .alpha = alpha,
                                .a = a,
                                .b = b,
                                .c = c,
                                .lda = fattni_max(trans_a ? M : K, 1),
                                .ldb = fattni_max(trans_b ? K : N, 1),
                                .ldc = N,
                                .stride_a = M * K,
                                .stride_b = K * N,
                                .stride_c = M * N};
    return fattni_cuda_multiply(ctx, &g, workspace, NULL);
}

fattn_status fattni_standard_rows_by_keys(fattn_ctx *ctx, const fattni_problem *p, int64_t width, double alpha,
                                          const void *rows, const void *keys, void *c, void *workspace) {
    return multiply(ctx, p, false, true, p->group * p->Sq, p->Sk, width, alpha, rows, keys, c, workspace);
}

fattn_status fattni_standard_matrix_by_keys(fattn_ctx *ctx, const fattni_problem *p, int64_t width, const void *matrix,
                                            const void *keys, void *c, void *workspace) {
    return multiply(ctx, p, false, false, p->group * p->Sq, width, p->Sk, 1, matrix, keys, c, workspace);
}

fattn_status fattni_standard_matrix_by_rows(fattn_ctx *ctx, const fattni_problem *p, int64_t width, const void *matrix,
                                            const void *rows, void *c, void *workspace) {
    return multiply(ctx, p, true, false, p->Sk, width, p->group * p->Sq, 1, matrix, rows, c, workspace);
}
