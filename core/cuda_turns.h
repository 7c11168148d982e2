/* FATTN_DETERMINISTIC: the key blocks that add to one row block of dQ take turns, first to last.
   One counter per row block of each (sequence, head), zero before the kernel, says whose turn it
   is.

   A CTA waits only for CTAs of smaller blockIdx, which the hardware starts first: there is no
   deadlock. */
#ifndef FATTNI_CUDA_TURNS_H
#define FATTNI_CUDA_TURNS_H

#include "cuda_sequence.h"

/* The counter of the row block at i0. */
DEVICE int32_t *turns_at(const fattni_cuda_args *a, int b, int h, int i0) {
    const int blocks = (a->Sq + a->row_block - 1) / a->row_block;
    return a->turns + ((int64_t)b * a->Hq + h) * blocks + i0 / a->row_block;
}

/* All threads, before and after the additions; nothing when the order is free. The block at j0 of
   BN keys is number j0 / BN - first of those that see row block i0. */
DEVICE void wait_turn(const fattni_cuda_args *a, const sequence *s, int b, int h, int i0, int j0,
                      int BN) {
    if (!a->turns) return;
    if (threadIdx.x == 0) {
        const int32_t *const turn = turns_at(a, b, h, i0);
        const int mine = j0 / BN - max(0, i0 + s->lo) / BN;
        int now;
        do {
            asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(now) : "l"(turn) : "memory");
        } while (now != mine);
    }
    __syncthreads();
}

DEVICE void end_turn(const fattni_cuda_args *a, int b, int h, int i0) {
    if (!a->turns) return;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0)
        asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(turns_at(a, b, h, i0))
                     : "memory");
}

#endif
