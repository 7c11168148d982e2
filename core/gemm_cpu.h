/* Matrix products of the CPU, through OpenBLAS, bitwise independent of the thread count. */
#ifndef FATTNI_GEMM_CPU_H
#define FATTNI_GEMM_CPU_H

#include "internal.h"

/* C[M,N] = alpha op(A) op(B) + beta C, row-major, dtype F32 or F64 for all; op transposes when its
   flag is set; ld* are row pitches in elements. beta 0 ignores what C held. K = 0 scales C. */
typedef struct fattni_gemm {
    fattn_dtype dtype;
    bool trans_a, trans_b;
    int64_t M, N, K;
    double alpha, beta;
    const void *a;
    const void *b;
    void *c;
    int64_t lda, ldb, ldc;
} fattni_gemm;

/* Splits C into blocks chosen by shape alone and runs them as tasks. */
void fattni_gemm_cpu(const fattn_ctx *ctx, const fattni_gemm *g);
/* On the calling thread; for use inside a task. */
void fattni_gemm_task(const fattni_gemm *g);

#endif
