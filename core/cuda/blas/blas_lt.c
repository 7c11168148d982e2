#include "core/cuda/blas/blas_lt.h"

#include "core/cuda/launch.h"
#include "core/cuda/library.h"

#include <cublasLt.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <float.h>
#include <string.h>

#define FUNCTIONS(X)                                                                                                   \
    X(multiply, cublasLtMatmul)                                                                                        \
    X(candidates, cublasLtMatmulAlgoGetHeuristic)                                                                      \
    X(new_product, cublasLtMatmulDescCreate)                                                                           \
    X(set_product, cublasLtMatmulDescSetAttribute)                                                                     \
    X(delete_product, cublasLtMatmulDescDestroy)                                                                       \
    X(new_matrix, cublasLtMatrixLayoutCreate)                                                                          \
    X(set_matrix, cublasLtMatrixLayoutSetAttribute)                                                                    \
    X(delete_matrix, cublasLtMatrixLayoutDestroy)                                                                      \
    X(new_wish, cublasLtMatmulPreferenceCreate)                                                                        \
    X(set_wish, cublasLtMatmulPreferenceSetAttribute)                                                                  \
    X(delete_wish, cublasLtMatmulPreferenceDestroy)

enum { CANDIDATES = 8, FIRST_CAPACITY = 32, MOST_CHOICES = 512, ALIGNMENT = 16 };
/* A timing is the least of ROUNDS times of so many runs in a row that they take TIMED_MS, but of at most MOST_RUNS. */
enum { ROUNDS = 4, MOST_RUNS = 16 };
static const float TIMED_MS = 0.25f;

/* The key of a choice; without padding, since it is compared with memcmp. */
typedef struct shape {
    int64_t dtype, c_dtype, trans_a, trans_b, tf32, adds, row, from, gelu;
    int64_t batches, M, N, K, lda, ldb, ldc, stride_a, stride_b, stride_c;
} shape;

typedef struct choice {
    shape of;
    bool usable;
    cublasLtMatmulDesc_t product;
    cublasLtMatrixLayout_t a, b, c; /* of the transposes: cuBLAS is column-major */
    cublasLtMatmulAlgo_t algorithm;
} choice;

struct fattni_cuda_lt {
    void *library;
    cublasLtHandle_t handle;
    cudaStream_t stream; /* for timings: the context's may be the default one, which cannot be captured */
    cudaEvent_t begin, end;
    choice *choices;
    int count, capacity, oldest;
#define X(name, symbol) __typeof__(symbol) *name;
    FUNCTIONS(X)
#undef X
};

#define SONAME FATTNI_LIBRARY_FILE("libcublasLt", CUBLAS_VER_MAJOR)

static bool load(struct fattni_cuda_lt *t) {
    const fattni_symbol wanted[] = {
#define X(name, symbol) {#symbol, &t->name},
        FUNCTIONS(X)
#undef X
    };
    const char *missing;
    t->library = fattni_library_open(SONAME, wanted, sizeof wanted / sizeof *wanted, &missing);
    return t->library && cudaStreamCreateWithFlags(&t->stream, cudaStreamNonBlocking) == cudaSuccess &&
           cudaEventCreate(&t->begin) == cudaSuccess && cudaEventCreate(&t->end) == cudaSuccess;
}

fattn_status fattni_cuda_lt_open(fattn_ctx *ctx, void *handle, struct fattni_cuda_lt **out) {
    void *p;
    *out = NULL;
    FATTNI_TRY(fattni_host_alloc(ctx, sizeof **out, &p));
    memset(p, 0, sizeof **out);
    *out = p;
    (*out)->handle = handle;
    if (load(*out)) return FATTN_OK;
    fattni_cuda_lt_close(ctx, *out);
    *out = NULL;
    return FATTN_OK;
}

static void forget(struct fattni_cuda_lt *t, choice *c) {
    if (c->product) t->delete_product(c->product);
    if (c->a) t->delete_matrix(c->a);
    if (c->b) t->delete_matrix(c->b);
    if (c->c) t->delete_matrix(c->c);
}

void fattni_cuda_lt_close(fattn_ctx *ctx, struct fattni_cuda_lt *t) {
    if (!t) return;
    for (int n = 0; n < t->count; ++n) forget(t, &t->choices[n]);
    if (t->begin) cudaEventDestroy(t->begin);
    if (t->end) cudaEventDestroy(t->end);
    if (t->stream) cudaStreamDestroy(t->stream);
    if (t->library) dlclose(t->library);
    fattni_host_free(ctx, t->choices, (size_t)t->capacity * sizeof *t->choices);
    fattni_host_free(ctx, t, sizeof *t);
}

enum { NO_GELU, GELU, GELU_AND_C };
static int gelu_of(const fattni_cuda_gemm *g) { return !g->gelu ? NO_GELU : g->gelu == g->c ? GELU : GELU_AND_C; }

static shape shape_of(const fattni_cuda_gemm *g) {
    return (shape){.dtype = g->dtype,
                   .c_dtype = g->c_dtype,
                   .trans_a = g->trans_a,
                   .trans_b = g->trans_b,
                   .tf32 = g->tf32,
                   .adds = g->beta != 0,
                   .row = g->row != NULL,
                   .from = g->from != NULL,
                   .gelu = gelu_of(g),
                   .batches = g->batches,
                   .M = g->M,
                   .N = g->N,
                   .K = g->K,
                   .lda = g->lda,
                   .ldb = g->ldb,
                   .ldc = g->ldc,
                   .stride_a = g->stride_a,
                   .stride_b = g->stride_b,
                   .stride_c = g->stride_c};
}

static cublasStatus_t matrix(const struct fattni_cuda_lt *t, const fattni_cuda_gemm *g, fattn_dtype dtype, int64_t rows,
                             int64_t columns, int64_t pitch, int64_t stride, cublasLtMatrixLayout_t *out) {
    const int32_t batches = (int32_t)g->batches;
    cublasStatus_t s = t->new_matrix(out, fattni_cuda_blas_type(dtype), (uint64_t)rows, (uint64_t)columns, pitch);
    if (!s && batches > 1) s = t->set_matrix(*out, CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &batches, sizeof batches);
    if (!s && batches > 1) s = t->set_matrix(*out, CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &stride, sizeof stride);
    return s;
}

/* What the product reads or writes beside its matrices. */
static cublasStatus_t point(const struct fattni_cuda_lt *t, const choice *c, const fattni_cuda_gemm *g) {
    cublasStatus_t s = CUBLAS_STATUS_SUCCESS;
    if (g->row) s = t->set_product(c->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->row, sizeof g->row);
    if (!s && gelu_of(g) == GELU_AND_C)
        s = t->set_product(c->product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_POINTER, &g->c, sizeof g->c);
    return s;
}

static cublasLtEpilogue_t epilogue_of(const fattni_cuda_gemm *g) { /* a row is a column of C^T */
    switch (gelu_of(g)) {
    case GELU: return g->row ? CUBLASLT_EPILOGUE_GELU_BIAS : CUBLASLT_EPILOGUE_GELU;
    case GELU_AND_C: return g->row ? CUBLASLT_EPILOGUE_GELU_AUX_BIAS : CUBLASLT_EPILOGUE_GELU_AUX;
    default: return g->row ? CUBLASLT_EPILOGUE_BIAS : CUBLASLT_EPILOGUE_DEFAULT;
    }
}

/* C^T = op(B)^T op(A)^T */
static cublasStatus_t describe(const struct fattni_cuda_lt *t, const fattni_cuda_gemm *g, choice *c) {
    const cublasOperation_t first = g->trans_b ? CUBLAS_OP_T : CUBLAS_OP_N;
    const cublasOperation_t second = g->trans_a ? CUBLAS_OP_T : CUBLAS_OP_N;
    cublasStatus_t s = t->new_product(
        &c->product, g->dtype == FATTN_F32 && g->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F, CUDA_R_32F);
    if (!s) s = t->set_product(c->product, CUBLASLT_MATMUL_DESC_TRANSA, &first, sizeof first);
    if (!s) s = t->set_product(c->product, CUBLASLT_MATMUL_DESC_TRANSB, &second, sizeof second);
    const cublasLtEpilogue_t epilogue = epilogue_of(g);
    if (!s && epilogue != CUBLASLT_EPILOGUE_DEFAULT)
        s = t->set_product(c->product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof epilogue);
    if (!s && gelu_of(g) == GELU_AND_C)
        s = t->set_product(c->product, CUBLASLT_MATMUL_DESC_EPILOGUE_AUX_LD, &g->ldc, sizeof g->ldc);
    if (!s) s = point(t, c, g);
    if (!s) s = matrix(t, g, g->dtype, g->trans_b ? g->K : g->N, g->trans_b ? g->N : g->K, g->ldb, g->stride_b, &c->a);
    if (!s) s = matrix(t, g, g->dtype, g->trans_a ? g->M : g->K, g->trans_a ? g->K : g->M, g->lda, g->stride_a, &c->b);
    if (!s) s = matrix(t, g, g->c_dtype, g->N, g->M, g->ldc, g->stride_c, &c->c);
    return s;
}

static int ask(const struct fattni_cuda_lt *t, const choice *c, cublasLtMatmulHeuristicResult_t out[CANDIDATES]) {
    const uint64_t workspace = FATTNI_CUDA_BLAS_WORKSPACE;
    const uint32_t alignment = ALIGNMENT;
    static const cublasLtMatmulPreferenceAttributes_t aligned[] = {
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
        CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES};
    cublasLtMatmulPreference_t wish = NULL;
    int found = 0;
    cublasStatus_t s = t->new_wish(&wish);
    if (!s) s = t->set_wish(wish, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof workspace);
    for (int n = 0; n < 4 && !s; ++n) s = t->set_wish(wish, aligned[n], &alignment, sizeof alignment);
    if (!s) s = t->candidates(t->handle, c->product, c->a, c->b, c->c, c->c, wish, CANDIDATES, out, &found);
    if (wish) t->delete_wish(wish);
    return s ? 0 : found;
}

static cublasStatus_t run(const struct fattni_cuda_lt *t, const choice *c, const fattni_cuda_gemm *g, float alpha,
                          void *workspace, cudaStream_t stream) {
    const void *const from = g->from ? g->from : g->c;
    const float beta = g->from ? 1.0f : (float)g->beta;
    void *const to = g->gelu ? g->gelu : g->c;
    const cublasStatus_t s = point(t, c, g);
    if (s) return s;
    return t->multiply(t->handle, c->product, &alpha, g->b, c->a, g->a, c->b, &beta, g->gelu ? to : from, c->c, to,
                       c->c, &c->algorithm, workspace, FATTNI_CUDA_BLAS_WORKSPACE, stream);
}

/* What is timed. With beta != 0, alpha is the smallest number, so that a timing does not change C. */
typedef struct timing {
    const struct fattni_cuda_lt *t;
    const fattni_cuda_gemm *g;
    void *workspace;
    float alpha;
} timing;
typedef struct candidate {
    choice c;
    float ms; /* of a run; below 0: it cannot be run */
    cudaGraphExec_t runs;
} candidate;

static bool enqueue(const timing *x, const candidate *y) {
    return run(x->t, &y->c, x->g, x->alpha, x->workspace, x->t->stream) == CUBLAS_STATUS_SUCCESS;
}
/* Waits for what lies between the two events. */
static float elapsed(const timing *x) {
    float ms = -1;
    if (cudaEventRecord(x->t->end, x->t->stream) || cudaEventSynchronize(x->t->end) ||
        cudaEventElapsedTime(&ms, x->t->begin, x->t->end))
        return -1;
    return ms;
}
/* The second of two runs: the first one may load its kernel. */
static float time_once(const timing *x, const candidate *y) {
    if (!enqueue(x, y) || cudaEventRecord(x->t->begin, x->t->stream) || !enqueue(x, y)) return -1;
    return elapsed(x);
}

/* Its runs as a graph, so that the host's time for a call does not count; NULL on failure. */
static cudaGraphExec_t record(const timing *x, const candidate *y, int runs) {
    cudaGraph_t graph = NULL;
    cudaGraphExec_t exec = NULL;
    bool good = true;
    if (cudaStreamBeginCapture(x->t->stream, cudaStreamCaptureModeThreadLocal)) return NULL;
    for (int n = 0; n < runs && good; ++n) good = enqueue(x, y);
    good = cudaStreamEndCapture(x->t->stream, &graph) == cudaSuccess && good;
    if (good && cudaGraphInstantiate(&exec, graph, 0)) exec = NULL;
    if (graph) cudaGraphDestroy(graph);
    return exec;
}
static float time_runs(const timing *x, const candidate *y) {
    if (cudaEventRecord(x->t->begin, x->t->stream) || cudaGraphLaunch(y->runs, x->t->stream)) return -1;
    return elapsed(x);
}

static const candidate *fastest(const candidate *y, int count) {
    const candidate *best = NULL;
    for (int n = 0; n < count; ++n)
        if (y[n].ms >= 0 && (!best || y[n].ms < best->ms)) best = &y[n];
    return best;
}

/* The fastest candidate: of those that are not far behind in one run each, many runs, in turns, since the clock
   varies. */
static const candidate *compete(const timing *x, candidate *y, int count) {
    for (int n = 0; n < count; ++n) y[n].ms = time_once(x, &y[n]);
    const candidate *const first = fastest(y, count);
    if (!first) return NULL;
    const float most = 1.25f * first->ms + 0.01f;
    const int runs = first->ms * MOST_RUNS <= TIMED_MS ? MOST_RUNS : 1 + (int)(TIMED_MS / first->ms);
    for (int n = 0; n < count; ++n) {
        if (y[n].ms < 0) continue;
        if (y[n].ms <= most) y[n].runs = record(x, &y[n], runs);
        y[n].ms = -1;
    }
    for (int round = 0; round < ROUNDS; ++round)
        for (int n = 0; n < count; ++n) {
            const float ms = y[n].runs ? time_runs(x, &y[n]) : -1;
            if (ms >= 0 && (y[n].ms < 0 || ms < y[n].ms)) y[n].ms = ms;
        }
    for (int n = 0; n < count; ++n)
        if (y[n].runs) cudaGraphExecDestroy(y[n].runs);
    const candidate *const best = fastest(y, count);
    return best ? best : first; /* no run could be recorded */
}

static bool times_candidates(const fattn_ctx *ctx) { return ctx->flags & FATTN_CTX_TUNE; }

static void choose(const fattn_ctx *ctx, const struct fattni_cuda_lt *t, const fattni_cuda_gemm *g, void *workspace,
                   choice *c) {
    cublasLtMatmulHeuristicResult_t found[CANDIDATES];
    candidate y[CANDIDATES];
    const int count = describe(t, g, c) ? 0 : ask(t, c, found);
    if (!times_candidates(ctx)) {
        if (count > 0) c->algorithm = found[0].algo, c->usable = true;
        return;
    }
    if (cudaStreamSynchronize(ctx->stream)) return;
    for (int n = 0; n < count; ++n) {
        y[n] = (candidate){.c = *c};
        y[n].c.algorithm = found[n].algo;
    }
    const timing x = {t, g, workspace, g->beta != 0 ? FLT_MIN / 8388608 : (float)g->alpha};
    const candidate *const best = compete(&x, y, count);
    cudaGetLastError(); /* clears the pending error of a candidate that failed */
    if (best) c->algorithm = best->c.algorithm, c->usable = true;
}

static fattn_status reserve(fattn_ctx *ctx, struct fattni_cuda_lt *t) {
    if (t->count < t->capacity) return FATTN_OK;
    const int capacity = t->capacity ? 2 * t->capacity : FIRST_CAPACITY;
    void *p;
    FATTNI_TRY(fattni_host_alloc(ctx, (size_t)capacity * sizeof *t->choices, &p));
    if (t->count) memcpy(p, t->choices, (size_t)t->count * sizeof *t->choices);
    fattni_host_free(ctx, t->choices, (size_t)t->capacity * sizeof *t->choices);
    t->choices = p;
    t->capacity = capacity;
    return FATTN_OK;
}

/* An empty choice, in the place of the oldest where there are many. */
static fattn_status add_choice(fattn_ctx *ctx, struct fattni_cuda_lt *t, choice **out) {
    if (t->count == MOST_CHOICES) {
        *out = &t->choices[t->oldest];
        t->oldest = (t->oldest + 1) % MOST_CHOICES;
        forget(t, *out);
    } else {
        FATTNI_TRY(reserve(ctx, t));
        *out = &t->choices[t->count++];
    }
    memset(*out, 0, sizeof **out);
    return FATTN_OK;
}

/* NULL: there is no choice yet, and none can be made now. */
static fattn_status find(fattn_ctx *ctx, struct fattni_cuda_lt *t, const fattni_cuda_gemm *g, void *workspace,
                         const choice **out) {
    const shape wanted = shape_of(g);
    *out = NULL;
    for (int n = 0; n < t->count && !*out; ++n)
        if (memcmp(&t->choices[n].of, &wanted, sizeof wanted) == 0) *out = &t->choices[n];
    if (*out) return FATTN_OK;
    enum cudaStreamCaptureStatus capturing = cudaStreamCaptureStatusNone;
    FATTNI_TRY(fattni_cuda_check(ctx, cudaStreamIsCapturing(ctx->stream, &capturing), "cudaStreamIsCapturing"));
    if (capturing != cudaStreamCaptureStatusNone && times_candidates(ctx)) return FATTN_OK;
    choice *c;
    FATTNI_TRY(add_choice(ctx, t, &c));
    c->of = wanted;
    choose(ctx, t, g, workspace, c);
    *out = c;
    return FATTN_OK;
}

static bool is_aligned(const void *p) { return (uintptr_t)p % ALIGNMENT == 0; }

fattn_status fattni_cuda_lt_multiply(fattn_ctx *ctx, struct fattni_cuda_lt *t, const fattni_cuda_gemm *g,
                                     void *workspace, bool *done) {
    const choice *c = NULL;
    *done = false;
    if (g->dtype == FATTN_F64 || g->batches > INT32_MAX || !is_aligned(g->a) || !is_aligned(g->b) ||
        !is_aligned(g->c) || !is_aligned(g->from))
        return FATTN_OK;
    /* Its gelu is as exact as BF16 needs; more is not promised. */
    if (g->gelu && (g->batches > 1 || g->dtype != FATTN_BF16 || g->c_dtype != FATTN_BF16 ||
                    g->ldc * (int64_t)sizeof(uint16_t) % ALIGNMENT || !is_aligned(g->gelu)))
        return FATTN_OK;
    if (g->row && (g->batches > 1 || g->c_dtype != g->dtype || !is_aligned(g->row))) return FATTN_OK;
    FATTNI_TRY(find(ctx, t, g, workspace, &c));
    if (!c || !c->usable) return FATTN_OK;
    const cublasStatus_t s = run(t, c, g, (float)g->alpha, workspace, ctx->stream);
    if (s) return fattn_ctx_fail(ctx, FATTN_E_CUDA, "cublasLtMatmul: cuBLAS status %d", (int)s);
    *done = true;
    return FATTN_OK;
}
