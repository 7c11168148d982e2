/* Deterministic accumulation of dQ (FATTN_DETERMINISTIC): the key blocks add to a row block in a fixed order, first
   to last. One semaphore per row block of each (sequence, head), zero before the kernel, counts the key blocks that
   have added.

   A CTA waits only for CTAs of smaller blockIdx, which the hardware starts first, or for smaller work items
   (bwd_sm90_scheduler.cuh), which are claimed first: there is no deadlock. */
#ifndef FATTNI_BWD_CUDA_BWD_DQ_SEMAPHORE_H
#define FATTNI_BWD_CUDA_BWD_DQ_SEMAPHORE_H

#include "bwd/cuda/bwd_args.h"
#include "core/device/sequence.cuh"
#include "core/ptx/acquire.h"

/* The semaphore of the row block at i0. */
DEVICE int32_t *dq_semaphore_at(const fattni_bwd_args *bwd, int b, int h, int i0) {
    const fattni_attention_args *const a = &bwd->a;
    const int blocks = (a->Sq + bwd->row_block - 1) / bwd->row_block;
    return bwd->dq_semaphore + ((int64_t)b * a->Hq + h) * blocks + i0 / bwd->row_block;
}

/* How many key blocks of BN keys add to the row block at i0 before the one at j0. */
DEVICE int dq_ticket_of(const sequence *s, int i0, int j0, int BN) { return j0 / BN - max(0, i0 + s->lo) / BN; }

/* One thread. */
DEVICE void acquire_dq_semaphore(const int32_t *semaphore, int ticket) {
    while (load_acquire(semaphore) < ticket) {}
}

/* All threads, before and after the additions; nothing without FATTN_DETERMINISTIC. */
DEVICE void wait_dq_semaphore(const fattni_bwd_args *bwd, const sequence *s, int b, int h, int i0, int j0, int BN) {
    if (!bwd->dq_semaphore) return;
    if (threadIdx.x == 0) acquire_dq_semaphore(dq_semaphore_at(bwd, b, h, i0), dq_ticket_of(s, i0, j0, BN));
    __syncthreads();
}

DEVICE void post_dq_semaphore(const fattni_bwd_args *bwd, int b, int h, int i0) {
    if (!bwd->dq_semaphore) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) add_release(dq_semaphore_at(bwd, b, h, i0), 1);
}

#endif
