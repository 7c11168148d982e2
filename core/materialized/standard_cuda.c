#include "core/materialized/standard_cuda.h"

#include "core/cuda/device.h"

extern void fattn_gather(fattni_dense_args);
extern void fattn_scatter(fattni_dense_args);

enum { THREADS = 256 };

/* Threads of the largest launch: elements of P, of a dense buffer, of d_bias. */
static int64_t most_threads(const fattni_problem *p) {
    const int64_t rows = p->B * p->Hq * p->Sq, keys = p->B * p->Hkv * p->Sk;
    const int64_t width = fattni_max(p->D, p->Dv);
    int64_t bias = p->d_bias.present;
    for (int d = 0; d < 4; ++d) bias *= p->d_bias.s[d] ? p->d_bias.n[d] : 1;
    return fattni_max(fattni_max(rows * fattni_max(p->Sk, width), keys * width), bias);
}

const char *fattni_cuda_standard_refuses(const fattn_ctx *ctx, const fattni_problem *p) {
    const char *reason = fattni_cuda_refuses(p);
    if (!reason) reason = fattni_cuda_blas_missing(ctx);
    if (reason) return reason;
    if (!fattni_standard_fits(p)) return "stores B Hq Sq Sk probabilities: more than 2^56";
    if (p->B * p->Hq > INT32_MAX / fattni_max(p->Sq, 1)) return "takes at most 2^31-1 rows";
    return fattni_cuda_refuses_grid(fattni_ceil_div(most_threads(p), THREADS));
}

fattni_standard_args fattni_standard_args_of(const fattni_problem *p) {
    return (fattni_standard_args){
        .a = fattni_cuda_args_of(p),
        .scale = p->scale,
        .softcap = p->softcap,
        .keep_scale = p->keep_scale,
        .dtype = p->dtype,
        .o_dtype = p->o.dtype,
        .d_o_dtype = p->d_o.dtype,
        .bias_dtype = p->bias.dtype,
        .given_dtype = p->lse.dtype,
        .P = p->saved,
        .keep = p->saved ? fattni_standard_mask(p) : NULL,
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

fattn_status fattni_standard_gather(fattn_ctx *ctx, const fattni_problem *p,
                                    const fattni_dense *d) {
    const fattni_dense_args x = dense_args(p, d);
    return FATTNI_START(ctx, fattn_gather, blocks(p, &x), THREADS, &x);
}

fattn_status fattni_standard_scatter(fattn_ctx *ctx, const fattni_problem *p, const fattni_dense *d,
                                     double scale, bool add) {
    fattni_dense_args x = dense_args(p, d);
    x.scale = scale;
    x.add = add;
    return FATTNI_START(ctx, fattn_scatter, blocks(p, &x), THREADS, &x);
}

fattn_status fattni_standard_scatter_o(fattn_ctx *ctx, const fattni_problem *p,
                                       const fattni_dense *d, const fattni_standard_args *rows) {
    fattni_dense_args x = dense_args(p, d);
    x.scale = p->keep_scale;
    x.kept = rows->kept;
    x.weight = rows->weight;
    return FATTNI_START(ctx, fattn_scatter, blocks(p, &x), THREADS, &x);
}

/* Sizes and strides are those of C; the callers fill in the operands. */
static fattni_cuda_gemm product(const fattni_problem *p, int64_t M, int64_t N, int64_t K) {
    return (fattni_cuda_gemm){.dtype = p->dtype,
                              .c_dtype = fattni_standard_real(p),
                              .tf32 = p->flags & FATTN_TF32,
                              .batches = p->B * p->Hkv,
                              .M = M,
                              .N = N,
                              .K = K,
                              .ldc = N,
                              .stride_c = M * N,
                              .alpha = 1};
}

fattn_status fattni_standard_rows_by_keys(fattn_ctx *ctx, const fattni_problem *p, int64_t width,
                                          double alpha, const void *rows, const void *keys, void *c,
                                          void *workspace) {
    const int64_t G = p->group * p->Sq;
    fattni_cuda_gemm g = product(p, G, p->Sk, width);
    g.alpha = alpha;
    g.trans_b = true;
    g.a = rows, g.lda = width, g.stride_a = G * width;
    g.b = keys, g.ldb = width, g.stride_b = p->Sk * width;
    g.c = c;
    return fattni_cuda_multiply(ctx, &g, workspace);
}

fattn_status fattni_standard_matrix_by_keys(fattn_ctx *ctx, const fattni_problem *p, int64_t width,
                                            const void *matrix, const void *keys, void *c,
                                            void *workspace) {
    const int64_t G = p->group * p->Sq;
    fattni_cuda_gemm g = product(p, G, width, p->Sk);
    g.a = matrix, g.lda = fattni_max(p->Sk, 1), g.stride_a = G * p->Sk;
    g.b = keys, g.ldb = width, g.stride_b = p->Sk * width;
    g.c = c;
    return fattni_cuda_multiply(ctx, &g, workspace);
}

fattn_status fattni_standard_matrix_by_rows(fattn_ctx *ctx, const fattni_problem *p, int64_t width,
                                            const void *matrix, const void *rows, void *c,
                                            void *workspace) {
    const int64_t G = p->group * p->Sq;
    fattni_cuda_gemm g = product(p, p->Sk, width, G);
    g.trans_a = true;
    g.a = matrix, g.lda = fattni_max(p->Sk, 1), g.stride_a = G * p->Sk;
    g.b = rows, g.ldb = width, g.stride_b = G * width;
    g.c = c;
    return fattni_cuda_multiply(ctx, &g, workspace);
}
