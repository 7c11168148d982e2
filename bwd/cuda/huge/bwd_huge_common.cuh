/* What both kernels of huge rows share (core/attention/huge.h): tasks, and the statistics of rows. A task is a row
   block of one (sequence, head), or, after all of these, a key block of one (sequence, key head). CTAs claim tasks in
   this order, and key blocks wait until all row blocks are done, so that no CTA waits for one that has not begun.

   An includer defines before: BM, BN, its shared_memory with the reals max[BM], log_sum[BM], delta[BM], and cta_memory,
   by which its functions get at it. And after: row_task, key_task. */
#ifndef FATTNI_BWD_CUDA_BWD_HUGE_COMMON_H
#define FATTNI_BWD_CUDA_BWD_HUGE_COMMON_H

#include "bwd/cuda/bwd_blocks.cuh"
#include "core/attention/huge.h"
#include "core/device/float_types.cuh"
#include "core/ptx/acquire.h"
#include "core/ptx/grid.h"

DEVICE real lse_at(const fattni_attention_args *a, const sequence *s, int h, int i) {
    return i < s->Sq ? *row_at(&a->lse, s, h, s->q0 + i) : (real)INFINITY;
}
/* Whether some row of the block at i0 is huge. All threads. */
DEVICE int has_huge_rows(const fattni_attention_args *a, const sequence *s, int h, int i0) {
    int huge = 0;
    if ((int)threadIdx.x < BM) {
        const real L = lse_at(a, s, h, i0 + (int)threadIdx.x);
        huge = FATTNI_IS_HUGE(L);
    }
    return __syncthreads_or(huge);
}

/* The row block of a task: rows [i0, i0 + rows) of one (sequence, head). */
typedef struct huge_rows {
    int b, h, i0, rows;
    sequence s;
} huge_rows;
/* Finds it and notes for the key tasks whether it has huge rows; gives 0 if not. All threads. */
DEVICE int find_huge_rows(const fattni_bwd_args *bwd, int task, huge_rows *x) {
    const fattni_attention_args *const a = &bwd->a;
    const block_position at = block_at((unsigned)task, a->Sq, BM, a->Hq);
    x->b = at.b, x->h = at.h, x->i0 = at.first;
    x->s = sequence_of(a, at.b);
    x->rows = min(BM, x->s.Sq - at.first);
    const int huge = x->rows > 0 && has_huge_rows(a, &x->s, at.h, at.first);
    if (threadIdx.x == 0) bwd->huge_blocks[task] = huge;
    return huge;
}
/* What find_huge_rows noted. */
DEVICE int is_huge(const fattni_bwd_args *bwd, int b, int h, int i0) {
    const fattni_attention_args *const a = &bwd->a;
    const int row_blocks = (a->Sq + BM - 1) / BM;
    return bwd->huge_blocks[(b * a->Hq + h) * (int64_t)row_blocks + i0 / BM];
}

/* log l of a row from its L, m and l: L - m where that differs by more than rounding, for L may include other keys. */
DEVICE real log_sum_of(real L, real max, real sum) {
    const real log_sum = log(sum), more = L - max - log_sum;
    const real rounding = K_F64 ? (real)FATTNI_HUGE_ROUNDING_F64 : (real)FATTNI_HUGE_ROUNDING_F32;
    return fabs(more) > fabs(L) * rounding ? log_sum + more : log_sum;
}
/* The part of dsink of the row block at i0, from those of its rows. Thread 0. */
DEVICE void store_sink_part(const fattni_bwd_args *bwd, int b, int h, int i0, const real *parts) {
    const fattni_attention_args *const a = &bwd->a;
    real gradient = 0;
    for (int n = 0; n < BM; ++n) gradient += parts[n];
    const int blocks = (a->Sq + BM - 1) / BM;
    ((real *)bwd->huge_sink)[((int64_t)h * a->B + b) * blocks + i0 / BM] = gradient;
}
/* Statistics of row `r` of a row block from the workspace, where they are number `at`; of rows past the end none. */
DEVICE void load_statistics(shared_memory *to, const fattni_bwd_args *bwd, int r, int64_t at, int inside) {
    to->max[r] = inside ? ((const real *)bwd->huge_max)[at] : (real)0;
    to->log_sum[r] = inside ? ((const real *)bwd->huge_log_sum)[at] : (real)INFINITY;
    to->delta[r] = inside ? ((const real *)bwd->delta)[at] : (real)0;
}

DEVICE void row_task(const fattni_bwd_args *bwd, cta_memory *m, int task);
DEVICE void key_task(const fattni_bwd_args *bwd, cta_memory *m, int task);

/* bwd->huge: whether there are huge rows; tasks claimed; row blocks done. */
DEVICE int has_tasks(const fattni_bwd_args *bwd) {
    begin_grid();
    return *(volatile const int32_t *)bwd->huge != 0;
}
DEVICE void run_tasks(const fattni_bwd_args *bwd, cta_memory *m) {
    const fattni_attention_args *const a = &bwd->a;
    const int row_tasks = a->B * a->Hq * ((a->Sq + BM - 1) / BM), key_tasks = a->B * a->Hkv * ((a->Sk + BN - 1) / BN);
    for (;;) {
        static __shared__ int claimed;
        __syncthreads();
        if (threadIdx.x == 0) claimed = atomicAdd(bwd->huge + 1, 1);
        __syncthreads();
        const int task = claimed;
        if (task >= row_tasks + key_tasks) return;
        if (task < row_tasks) {
            row_task(bwd, m, task);
            __threadfence();
            __syncthreads();
            if (threadIdx.x == 0) add_release(bwd->huge + 2, 1);
            continue;
        }
        if (threadIdx.x == 0)
            while (load_acquire(bwd->huge + 2) < row_tasks) {}
        __syncthreads();
        key_task(bwd, m, task - row_tasks);
    }
}

#endif
