/* What the F32 and F64 kernels share (bwd_fma.cuh, bwd_mma.cuh). Include after score_terms_fma.cuh. */
#ifndef FATTNI_BWD_CUDA_BWD_REAL_H
#define FATTNI_BWD_CUDA_BWD_REAL_H

#include "bwd/cuda/bwd_blocks.cuh"
#include "bwd/cuda/bwd_dq_semaphore.cuh"
#include "core/attention/huge.h"

static_assert(BM <= THREADS, "statistics");

/* Of row threadIdx.x of a row block, if there is one; loaded a step ahead. Rows past the end and rows without any key
   have L = inf, so that their P is 0. So have huge rows, which bwd_huge_real.cuh does. */
typedef struct row_statistics {
    real L, delta;
} row_statistics;
DEVICE void load_statistics(row_statistics *x, const fattni_bwd_args *bwd, const sequence *s, int h, int i0) {
    const fattni_attention_args *const a = &bwd->a;
    if ((int)threadIdx.x >= BM) return;
    const int i = i0 + (int)threadIdx.x;
    real L = i < s->Sq ? *row_at(&a->lse, s, h, s->q0 + i) : (real)INFINITY;
    if (L == -(real)INFINITY || FATTNI_IS_HUGE(L)) L = (real)INFINITY;
    x->L = L;
    x->delta = L == (real)INFINITY ? (real)0 : ((const real *)bwd->delta)[row_number(a, s, h, i)];
}
DEVICE void store_statistics(real L[BM], real delta[BM], const row_statistics *x) {
    if ((int)threadIdx.x < BM) L[threadIdx.x] = x->L, delta[threadIdx.x] = x->delta;
}

/* P = 0 where a row does not see a key. After the exponential: a masked P is 0, whatever L is. */
DEVICE void mask_probabilities(real p[ELEMENTS], const sequence *s, int i0, int j0) {
    if (all_visible(s, i0, j0)) return;
#pragma unroll
    for (int n = 0; n < ELEMENTS; ++n)
        if (!visible(s, i0 + element_row(n), j0 + element_column(n))) p[n] = 0;
}

#endif
