#include "gemm_cpu.h"

#include <cblas.h>

/* Blocks of C: large enough for OpenBLAS to run at full speed, small enough that a weight gradient
   of a small transformer still feeds 16 threads. */
enum { BLOCK = 256, SMALL_BLOCK = 128, ENOUGH_BLOCKS = 16 };

void fattni_gemm_task(const fattni_gemm *g) {
    if (g->M <= 0 || g->N <= 0) return;
    const CBLAS_TRANSPOSE ta = g->trans_a ? CblasTrans : CblasNoTrans;
    const CBLAS_TRANSPOSE tb = g->trans_b ? CblasTrans : CblasNoTrans;
    const blasint M = (blasint)g->M, N = (blasint)g->N, K = (blasint)g->K;
    const blasint lda = (blasint)fattni_max(g->lda, 1), ldb = (blasint)fattni_max(g->ldb, 1);
    const blasint ldc = (blasint)fattni_max(g->ldc, 1);
    if (g->dtype == FATTN_F64)
        cblas_dgemm(CblasRowMajor, ta, tb, M, N, K, g->alpha, g->a, lda, g->b, ldb, g->beta, g->c,
                    ldc);
    else
        cblas_sgemm(CblasRowMajor, ta, tb, M, N, K, (float)g->alpha, g->a, lda, g->b, ldb,
                    (float)g->beta, g->c, ldc);
}

typedef struct blocks {
    const fattni_gemm *g;
    int64_t rows, columns, across; /* block size, blocks per row of blocks */
} blocks;

static void run_block(void *arg, int64_t task, int thread) {
    (void)thread;
    const blocks *s = arg;
    const fattni_gemm *g = s->g;
    const int64_t size = (int64_t)fattn_dtype_size(g->dtype);
    const int64_t m = task / s->across * s->rows, n = task % s->across * s->columns;
    fattni_gemm part = *g;
    part.M = fattni_min(s->rows, g->M - m);
    part.N = fattni_min(s->columns, g->N - n);
    part.a = (const char *)g->a + m * (g->trans_a ? 1 : g->lda) * size;
    part.b = (const char *)g->b + n * (g->trans_b ? g->ldb : 1) * size;
    part.c = (char *)g->c + (m * g->ldc + n) * size;
    fattni_gemm_task(&part);
}

void fattni_gemm_cpu(const fattn_ctx *ctx, const fattni_gemm *g) {
    if (g->M <= 0 || g->N <= 0) return;
    blocks s = {.g = g, .rows = BLOCK, .columns = BLOCK};
    if (fattni_ceil_div(g->M, BLOCK) * fattni_ceil_div(g->N, BLOCK) < ENOUGH_BLOCKS)
        s.rows = s.columns = SMALL_BLOCK;
    s.across = fattni_ceil_div(g->N, s.columns);
    fattni_parallel(ctx, fattni_ceil_div(g->M, s.rows) * s.across, run_block, &s);
}
