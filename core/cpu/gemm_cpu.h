/* Matrix products of the CPU, through OpenBLAS or oneDNN, bitwise independent of the thread count. */
#ifndef FATTNI_CORE_CPU_GEMM_CPU_H
#define FATTNI_CORE_CPU_GEMM_CPU_H

#include "core/base/internal.h"

/* C[M,N] = alpha op(A) op(B) + beta C + row, row-major, dtype F32 or F64 for all; op transposes
   when its flag is set; ld* are row pitches in elements, at least the columns of what is stored.
   beta 0 ignores what C held. K = 0 scales C. */
typedef struct fattni_gemm {
    fattn_dtype dtype;
    bool trans_a, trans_b;
    int64_t M, N, K;
    double alpha, beta;
    const void *a;
    const void *b;
    void *c;
    int64_t lda, ldb, ldc;
    const void *row;  /* [N] added to every row of C, needs beta 0; NULL: none */
    const void *onto; /* [M,N] of C's pitch, apart from C: added to it, needs beta 0; NULL: none */
    void *workspace;  /* fattni_gemm_workspace bytes; NULL: K is never split */
} fattni_gemm;

/* Bytes with which fattni_gemm_cpu sums a long K over a small C in several tasks: a weight gradient
   has few blocks, but a row of the batch for each step of K. By shape and dtype alone; often 0. */
size_t fattni_gemm_workspace(const fattni_gemm *g);
/* Splits C, and with a workspace K, into blocks chosen by shape alone; runs them as tasks. */
void fattni_gemm_cpu(const fattn_ctx *ctx, const fattni_gemm *g);
/* The blocks of C one by one, for callers with tasks of their own; K is not split. */
int64_t fattni_gemm_blocks(const fattni_gemm *g);
void fattni_gemm_block(const fattn_ctx *ctx, const fattni_gemm *g, int64_t block);
/* On the calling thread; for use inside a task. */
void fattni_gemm_task(const fattn_ctx *ctx, const fattni_gemm *g);

/* A library's product of F32 matrices on the calling thread, with this beta. False: it has no memory, and c is what it
   was. */
typedef bool fattni_f32_library(const fattni_gemm *g, double beta);
extern fattni_f32_library fattni_onednn_f32; /* in builds with oneDNN */

/* For a new context: decides who multiplies F32 matrices, and tells its log if OpenBLAS does not know the CPU. */
void fattni_gemm_open(fattn_ctx *ctx);

#endif
