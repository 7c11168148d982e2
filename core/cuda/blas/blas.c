#include "core/cuda/blas/blas.h"

#include "core/cuda/launch.h"
#include "core/cuda/library.h"
#include "core/cuda/blas/blas_lt.h"

#include <cublas_v2.h>
#include <dlfcn.h>
#include <string.h>

/* The functions in use, by the names under which the library exports them. */
#define FUNCTIONS(X)                                                                                                   \
    X(create, cublasCreate_v2)                                                                                         \
    X(destroy, cublasDestroy_v2)                                                                                       \
    X(set_stream, cublasSetStream_v2)                                                                                  \
    X(set_workspace, cublasSetWorkspace_v2)                                                                            \
    X(multiply, cublasGemmStridedBatchedEx_64)

struct fattni_cuda_blas {
    void *library;
    cublasHandle_t handle;
    struct fattni_cuda_lt *lt; /* NULL: no cuBLASLt */
#define X(name, symbol) __typeof__(symbol) *name;
    FUNCTIONS(X)
#undef X
};

#define SONAME FATTNI_LIBRARY_FILE("libcublas", CUBLAS_VER_MAJOR)

/* CUBLAS_STATUS_SUCCESS also without the library. */
static cublasStatus_t load(struct fattni_cuda_blas *b) {
    const fattni_symbol wanted[] = {
#define X(name, symbol) {#symbol, &b->name},
        FUNCTIONS(X)
#undef X
    };
    const char *missing;
    b->library = fattni_library_open(SONAME, wanted, sizeof wanted / sizeof *wanted, &missing);
    return b->library ? b->create(&b->handle) : CUBLAS_STATUS_SUCCESS;
}

fattn_status fattni_cuda_blas_open(fattn_ctx *ctx) {
    void *p;
    FATTNI_TRY(fattni_host_alloc(ctx, sizeof(struct fattni_cuda_blas), &p));
    memset(p, 0, sizeof(struct fattni_cuda_blas));
    ctx->gpu.blas = p;
    ctx->gpu.blas_status = (int)load(ctx->gpu.blas);
    if (!ctx->gpu.blas->handle) {
        fattni_cuda_blas_close(ctx);
        return FATTN_OK;
    }
    return fattni_cuda_lt_open(ctx, ctx->gpu.blas->handle, &ctx->gpu.blas->lt);
}

void fattni_cuda_blas_close(fattn_ctx *ctx) {
    struct fattni_cuda_blas *const b = ctx->gpu.blas;
    if (!b) return;
    fattni_cuda_lt_close(ctx, b->lt);
    if (b->handle) b->destroy(b->handle);
    if (b->library) dlclose(b->library);
    fattni_host_free(ctx, b, sizeof *b);
    ctx->gpu.blas = NULL;
}

const char *fattni_cuda_blas_missing(const fattn_ctx *ctx) {
    if (ctx->gpu.blas || ctx->flags & FATTN_CTX_PLAN_ONLY) return NULL;
    switch (ctx->gpu.blas_status) {
    case CUBLAS_STATUS_SUCCESS: return "needs cuBLAS (" SONAME "), which was not found";
    case CUBLAS_STATUS_ALLOC_FAILED: return "needs cuBLAS, for which the GPU had no memory when the context was made";
    default: return "needs cuBLAS (" SONAME "), which did not start: cublasCreate failed when the context was made";
    }
}

int fattni_cuda_blas_type(fattn_dtype t) {
    switch (t) {
    case FATTN_F64: return CUDA_R_64F;
    case FATTN_F16: return CUDA_R_16F;
    case FATTN_BF16: return CUDA_R_16BF;
    default: return CUDA_R_32F;
    }
}

static cublasComputeType_t compute_type(const fattni_cuda_gemm *g) {
    if (g->dtype == FATTN_F64) return CUBLAS_COMPUTE_64F;
    return g->dtype == FATTN_F32 && g->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

static fattn_status blas_check(fattn_ctx *ctx, cublasStatus_t s, const char *what) {
    if (s == CUBLAS_STATUS_SUCCESS) return FATTN_OK;
    return fattn_ctx_fail(ctx, FATTN_E_CUDA, "%s: cuBLAS status %d", what, (int)s);
}

/* K is 0: the product is an empty sum. */
static fattn_status clear(fattn_ctx *ctx, const fattni_cuda_gemm *g) {
    const size_t size = fattn_dtype_size(g->c_dtype);
    for (int64_t n = 0; n < g->batches; ++n)
        FATTNI_TRY(fattni_cuda_zero_rows(ctx, (char *)g->c + (size_t)(n * g->stride_c) * size, (size_t)g->ldc * size,
                                         (size_t)g->N * size, g->M));
    return FATTN_OK;
}

/* cuBLAS itself has products alone. */
static bool needs_lt(const fattni_cuda_gemm *g) { return g->row || g->from || g->gelu; }

static fattn_status multiply(fattn_ctx *ctx, const fattni_cuda_gemm *g, void *workspace, bool *added) {
    struct fattni_cuda_blas *const b = ctx->gpu.blas;
    bool done = false;
    /* Untimed it is for what it adds, and cuBLAS chooses for other products. */
    const bool by_lt = ctx->flags & FATTN_CTX_TUNE || needs_lt(g);
    if (b->lt && by_lt) FATTNI_TRY(fattni_cuda_lt_multiply(ctx, b->lt, g, workspace, &done));
    if (needs_lt(g)) *added = done;
    if (done || needs_lt(g)) return FATTN_OK;

    /* Setting the stream resets the workspace, so both are set for each product, in this order. */
    FATTNI_TRY(blas_check(ctx, b->set_stream(b->handle, ctx->stream), "cublasSetStream"));
    FATTNI_TRY(
        blas_check(ctx, b->set_workspace(b->handle, workspace, FATTNI_CUDA_BLAS_WORKSPACE), "cublasSetWorkspace"));
    const double wide[2] = {g->alpha, g->beta};
    const float narrow[2] = {(float)g->alpha, (float)g->beta};
    const bool is_wide = g->dtype == FATTN_F64;
    const void *const alpha = is_wide ? (const void *)&wide[0] : &narrow[0];
    const void *const beta = is_wide ? (const void *)&wide[1] : &narrow[1];
    const int type = fattni_cuda_blas_type(g->dtype);
    /* cuBLAS is column-major: it computes the transposes, C^T = op(B)^T op(A)^T. */
    const cublasStatus_t s = b->multiply(
        b->handle, g->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N, g->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N, g->N, g->M, g->K,
        alpha, g->b, type, g->ldb, g->stride_b, g->a, type, g->lda, g->stride_a, beta, g->c,
        fattni_cuda_blas_type(g->c_dtype), g->ldc, g->stride_c, g->batches, compute_type(g), CUBLAS_GEMM_DEFAULT);
    return blas_check(ctx, s, "cublasGemmStridedBatchedEx");
}

fattn_status fattni_cuda_multiply(fattn_ctx *ctx, const fattni_cuda_gemm *g, void *workspace, bool *added) {
    bool entered;
    if (needs_lt(g)) *added = false;
    if (!ctx->gpu.blas)
        return fattn_ctx_fail(ctx, FATTN_E_UNSUPPORTED, "a matrix product %s", fattni_cuda_blas_missing(ctx));
    if (g->batches == 0 || g->M == 0 || g->N == 0 || (g->K == 0 && needs_lt(g))) return FATTN_OK;
    if (g->K == 0) return g->beta == 0 ? clear(ctx, g) : FATTN_OK;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered)); /* a handle belongs to a CUDA context */
    const fattn_status s = multiply(ctx, g, workspace, added);
    fattni_cuda_leave(ctx, entered);
    return s;
}
