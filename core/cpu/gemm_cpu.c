#include "core/cpu/gemm_cpu.h"

#include "core/cpu/with_onednn.h"

#include <cblas.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Of F32 matrices, beside OpenBLAS. The first one is used. */
static fattni_f32_library *const f32_libraries[] = {FATTNI_WITH_ONEDNN(fattni_onednn_f32, ) NULL};

/* Smaller products are faster by OpenBLAS (bench/results/cpu_linear_f32.txt). */
static const double LEAST_PRODUCT = 32 * 32 * 32;

/* Sizes of a block of C, largest first: large enough for OpenBLAS to run at full speed, small
   enough that a small transformer still has work for 16 threads. With few blocks K is split as
   well (split-K), into parts long enough to pay for the packing of a block, before blocks become
   smaller: with small ones each operand is packed more often. */
static const struct { int64_t rows, columns; } block_sizes[] = {{256, 512}, {256, 256}, {128, 256}, {128, 128}};
enum { BLOCK_SIZES = 4, ENOUGH_TASKS = 16, LEAST_K = 512 };

typedef struct blocking {
    int64_t rows, columns; /* of a block */
    int64_t across;        /* blocks beside each other */
    int64_t blocks;        /* in all */
    int64_t parts;         /* of K */
} blocking;

/* splits: K may be split. */
static blocking blocking_of(const fattni_gemm *g, bool splits) {
    blocking s = {.parts = 1};
    if (g->M <= 0 || g->N <= 0) return s;
    for (int i = 0; i < BLOCK_SIZES && s.blocks * s.parts < ENOUGH_TASKS; ++i) {
        s.rows = block_sizes[i].rows;
        s.columns = block_sizes[i].columns;
        s.across = fattni_ceil_div(g->N, s.columns);
        s.blocks = fattni_ceil_div(g->M, s.rows) * s.across;
        if (splits && !g->row && !g->onto)
            s.parts = fattni_max(1, fattni_min(fattni_ceil_div(ENOUGH_TASKS, s.blocks), g->K / LEAST_K));
    }
    return s;
}

static void *at(const fattni_gemm *g, const void *p, int64_t element) {
    return (char *)p + element * (int64_t)fattn_dtype_size(g->dtype);
}

/* OpenBLAS packs an operand of a small product panel by panel into the same few pages of its buffer, and its kernels
   for AVX2 prefetch the panel behind. Where no product has been wide enough for it to pack them side by side, these
   pages have no memory, each prefetch is a search for them, and on an AMD Zen of the first generation that takes two
   thirds of the time. So a thread's first product of a dtype is a wide one, of zeros. */
static void warm_up(fattn_dtype dtype) {
    enum { M = 48, N = 1024, K = 384 }; /* a few panels; more columns than a block of any CPU's; a block's depth */
    static _Thread_local bool warm[2];
    if (warm[dtype == FATTN_F64]) return;
    warm[dtype == FATTN_F64] = true;
    double *const zeros = calloc(N * K + M * N, sizeof *zeros); /* A is a part of B */
    if (!zeros) return;
    if (dtype == FATTN_F64)
        cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, M, N, K, 1.0, zeros, K, zeros, K, 0.0, zeros + N * K, N);
    else
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, M, N, K, 1.0f, (float *)zeros, K, (float *)zeros, K, 0.0f,
                    (float *)zeros + N * K, N);
    free(zeros);
}

/* C as it is before the product is added to it: row, onto or their sum. */
static void begin_rows(const fattni_gemm *g) {
    const size_t bytes = (size_t)g->N * fattn_dtype_size(g->dtype);
    const blasint N = (blasint)g->N;
    for (int64_t m = 0; m < g->M; ++m) {
        void *const c = at(g, g->c, m * g->ldc);
        memcpy(c, g->onto ? at(g, g->onto, m * g->ldc) : g->row, bytes);
        if (!g->onto || !g->row) continue;
        if (g->dtype == FATTN_F64)
            cblas_daxpy(N, 1.0, g->row, 1, c, 1);
        else
            cblas_saxpy(N, 1.0f, g->row, 1, c, 1);
    }
}

static bool by_onednn(const fattn_ctx *ctx, const fattni_gemm *g, double beta) {
    if (!ctx->f32_by_onednn || g->dtype != FATTN_F32) return false;
    return (double)g->M * (double)g->N * (double)g->K >= LEAST_PRODUCT && f32_libraries[0](g, beta);
}

void fattni_gemm_task(const fattn_ctx *ctx, const fattni_gemm *g) {
    if (g->M <= 0 || g->N <= 0) return;
    double beta = g->beta;
    if (g->row || g->onto) {
        begin_rows(g);
        beta = 1;
    }
    if (by_onednn(ctx, g, beta)) return;
    warm_up(g->dtype);
    const CBLAS_TRANSPOSE ta = g->trans_a ? CblasTrans : CblasNoTrans;
    const CBLAS_TRANSPOSE tb = g->trans_b ? CblasTrans : CblasNoTrans;
    const blasint M = (blasint)g->M, N = (blasint)g->N, K = (blasint)g->K;
    const blasint lda = (blasint)fattni_max(g->lda, 1), ldb = (blasint)fattni_max(g->ldb, 1);
    const blasint ldc = (blasint)fattni_max(g->ldc, 1);
    if (g->dtype == FATTN_F64)
        cblas_dgemm(CblasRowMajor, ta, tb, M, N, K, g->alpha, g->a, lda, g->b, ldb, beta, g->c, ldc);
    else
        cblas_sgemm(CblasRowMajor, ta, tb, M, N, K, (float)g->alpha, g->a, lda, g->b, ldb, (float)beta, g->c, ldc);
}

static fattni_gemm block_of(const fattni_gemm *g, const blocking *s, int64_t block) {
    const int64_t m = block / s->across * s->rows, n = block % s->across * s->columns;
    fattni_gemm part = *g;
    part.M = fattni_min(s->rows, g->M - m);
    part.N = fattni_min(s->columns, g->N - n);
    part.a = at(g, g->a, m * (g->trans_a ? 1 : g->lda));
    part.b = at(g, g->b, n * (g->trans_b ? g->ldb : 1));
    part.c = at(g, g->c, m * g->ldc + n);
    if (g->row) part.row = at(g, g->row, n);
    if (g->onto) part.onto = at(g, g->onto, m * g->ldc + n);
    return part;
}

int64_t fattni_gemm_blocks(const fattni_gemm *g) { return blocking_of(g, false).blocks; }

void fattni_gemm_block(const fattn_ctx *ctx, const fattni_gemm *g, int64_t block) {
    const blocking s = blocking_of(g, false);
    const fattni_gemm part = block_of(g, &s, block);
    fattni_gemm_task(ctx, &part);
}

typedef struct job {
    const fattn_ctx *ctx;
    const fattni_gemm *g;
    blocking s;
} job;

static void run_block(void *arg, int64_t task, int thread) {
    (void)thread;
    const job *j = arg;
    const fattni_gemm part = block_of(j->g, &j->s, task);
    fattni_gemm_task(j->ctx, &part);
}

/* Part p of K of one block, into slice p of the workspace [parts, M, N]. */
static void run_part(void *arg, int64_t task, int thread) {
    (void)thread;
    const job *j = arg;
    const fattni_gemm *g = j->g;
    const int64_t p = task / j->s.blocks, k = g->K * p / j->s.parts;
    fattni_gemm slice = *g;
    slice.c = at(g, g->workspace, p * g->M * g->N);
    slice.ldc = g->N;
    slice.beta = 0;
    fattni_gemm part = block_of(&slice, &j->s, task % j->s.blocks);
    part.K = g->K * (p + 1) / j->s.parts - k;
    part.a = at(g, part.a, k * (g->trans_a ? g->lda : 1));
    part.b = at(g, part.b, k * (g->trans_b ? 1 : g->ldb));
    fattni_gemm_task(j->ctx, &part);
}

enum { ROWS_PER_SUM = 32 };

/* c = beta c + sum of the slices, in the order of k, for some rows of C. */
static void sum_parts(void *arg, int64_t task, int thread) {
    (void)thread;
    const job *j = arg;
    const fattni_gemm *g = j->g;
    const blasint N = (blasint)g->N;
    const int64_t begin = task * ROWS_PER_SUM, end = fattni_min(g->M, begin + ROWS_PER_SUM);
    for (int64_t m = begin; m < end; ++m) {
        void *c = at(g, g->c, m * g->ldc);
        if (g->beta == 0)
            memset(c, 0, (size_t)g->N * fattn_dtype_size(g->dtype));
        else if (g->dtype == FATTN_F64)
            cblas_dscal(N, g->beta, c, 1);
        else
            cblas_sscal(N, (float)g->beta, c, 1);
        for (int64_t p = 0; p < j->s.parts; ++p) {
            const void *slice = at(g, g->workspace, (p * g->M + m) * g->N);
            if (g->dtype == FATTN_F64)
                cblas_daxpy(N, 1.0, slice, 1, c, 1);
            else
                cblas_saxpy(N, 1.0f, slice, 1, c, 1);
        }
    }
}

size_t fattni_gemm_workspace(const fattni_gemm *g) {
    const blocking s = blocking_of(g, true);
    if (s.parts < 2) return 0;
    return (size_t)(s.parts * g->M * g->N) * fattn_dtype_size(g->dtype);
}

void fattni_gemm_cpu(const fattn_ctx *ctx, const fattni_gemm *g) {
    job j = {.ctx = ctx, .g = g, .s = blocking_of(g, g->workspace != NULL)};
    if (j.s.parts > 1) {
        fattni_parallel(ctx, j.s.parts * j.s.blocks, run_part, &j);
        fattni_parallel(ctx, fattni_ceil_div(g->M, ROWS_PER_SUM), sum_parts, &j);
    } else {
        fattni_parallel(ctx, j.s.blocks, run_block, &j);
    }
}

/* OpenBLAS chooses its kernels when it is loaded, by the model of the CPU. On one that is younger it falls back to
   SSE3: an eighth of the speed on one with AVX-512. */
static bool is_unknown_to_openblas(int isa) {
    return isa >= FATTNI_ISA_AVX2 && strcmp(openblas_get_corename(), "Prescott") == 0;
}

/* oneDNN chooses its code by what a CPU can do. On Intel's with AVX-512 it is also faster than OpenBLAS's kernels for
   these. On one with AMX it asks the operating system for that: only in contexts that may use it. Otherwise the choice
   is not the context's: like OpenBLAS, it looks at the CPU, not at arch_cap. */
static bool gains_by_onednn(const fattn_ctx *ctx, int isa, bool unknown) {
    const bool may_ask = ctx->isa >= FATTNI_ISA_AMX && !(ctx->flags & FATTN_CTX_F32_PRODUCTS);
    if (!f32_libraries[0] || (isa >= FATTNI_ISA_AMX && !may_ask)) return false;
    return unknown || (isa >= FATTNI_ISA_AVX512 && fattni_cpu_is_intel());
}

void fattni_gemm_open(fattn_ctx *ctx) {
    const int isa = fattni_cpu_isa();
    const bool unknown = is_unknown_to_openblas(isa);
    ctx->f32_by_onednn = gains_by_onednn(ctx, isa, unknown);
    if (!unknown || !ctx->log) return;
    char text[192]; /* cli/commands/main.c reads the variable's value from it */
    snprintf(
        text, sizeof text,
        "OpenBLAS does not know this CPU and multiplies %s without %s, several times slower: start the program with "
        "OPENBLAS_CORETYPE=%s",
        ctx->f32_by_onednn ? "F64 matrices" : "matrices", isa >= FATTNI_ISA_AVX512 ? "AVX-512" : "AVX2",
        isa >= FATTNI_ISA_AVX512 ? "SkylakeX" : "Haswell");
    ctx->log(ctx->log_user, FATTN_LOG_WARN, text);
}
