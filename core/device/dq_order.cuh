/* FATTN_DETERMINISTIC: the key blocks that add to one row block of dQ take turns, first to last.
   One counter per row block of each (sequence, head), zero before the kernel, says how many parts
   of the block were added: whose turn it is.

   A CTA waits only for CTAs of smaller blockIdx, which the hardware starts first: there is no
   deadlock. */
#ifndef FATTNI_CORE_DEVICE_DQ_ORDER_H
#define FATTNI_CORE_DEVICE_DQ_ORDER_H

#include "core/device/sequence.cuh"
#include "core/ptx/acquire.h"

/* The counter of the row block at i0. */
DEVICE int32_t *turns_at(const fattni_cuda_args *a, int b, int h, int i0) {
    const int blocks = (a->Sq + a->row_block - 1) / a->row_block;
    return a->turns + ((int64_t)b * a->Hq + h) * blocks + i0 / a->row_block;
}

/* The key block at j0 of BN keys is number so many of those that see the row block at i0. */
DEVICE int turn_of(const sequence *s, int i0, int j0, int BN) {
    return j0 / BN - max(0, i0 + s->lo) / BN;
}

/* One thread. */
DEVICE void acquire_turn(const int32_t *turn, int mine) {
    while (load_acquire(turn) < mine) {}
}

/* All threads, before and after the additions; nothing when the order is free. */
DEVICE void wait_turn(const fattni_cuda_args *a, const sequence *s, int b, int h, int i0, int j0,
                      int BN) {
    if (!a->turns) return;
    if (threadIdx.x == 0) acquire_turn(turns_at(a, b, h, i0), turn_of(s, i0, j0, BN));
    __syncthreads();
}

DEVICE void end_turn(const fattni_cuda_args *a, int b, int h, int i0) {
    if (!a->turns) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) add_release(turns_at(a, b, h, i0), 1);
}

#endif
