/* The bias of BIASED instances of the Hopper backward: a step's tile in shared memory.

   Tensors     bias [b,h,i,j] in the input dtype.
   Shared      bias[BM][BN] in panels of 64 keys, one stage: S has been computed when it is read, which is most of a
               step before the next one is.
   Layout      of S^T: ldmatrix with transposition gives a thread two rows of one key.

   Include after bwd_sm90_common.cuh, and BIASED. */
#ifndef FATTNI_BWD_CUDA_SM90_BWD_SM90_BIAS_H
#define FATTNI_BWD_CUDA_SM90_BWD_SM90_BIAS_H

#include "bwd/cuda/sm90/bwd_sm90_common.cuh"
#include "core/device/sm90_bias.cuh"

DEVICE void init_bias_barriers(uint32_t shared) {
    if (threadIdx.x > 0) return;
    mbarrier_init(MEMBER_ADDRESS(shared, bias_full), 1);
    mbarrier_init(MEMBER_ADDRESS(shared, bias_empty), 8); /* warps that read it */
    mbarrier_init_fence();
}

/* The tile of a step; its parity is the step's stage: steps are counted over all tasks. */
DEVICE void load_bias(const fattni_bwd_sm90_args *p, const task *t, const step *s, uint32_t shared) {
    const uint32_t full = MEMBER_ADDRESS(shared, bias_full);
    mbarrier_wait(MEMBER_ADDRESS(shared, bias_empty), (uint32_t)s->stage ^ 1);
    mbarrier_expect(full, BM * BN * 2);
    for (int x = 0; x < BN / 64; ++x)
        tma_load(MEMBER_ADDRESS(shared, bias) + x * BM * 128, &p->bias, full, t->j0 + 64 * x, s->i0,
                 s->h * p->bias_step.head, t->b * p->bias_step.batch);
}

/* S becomes scale S + bias, in natural units: of 64 keys and the `rows` rows at `tile`, from row `end` on 0, where
   the sequence has ended and the bias may be anything. */
DEVICE void add_bias_tile(float *s, int rows, uint32_t tile, float scale, int end, const step *now, uint32_t shared,
                          uint32_t thread) {
    const uint32_t lane = thread % 32, chunk = thread / 32 % 4 * 2 + lane / 8 % 2; /* of 8 keys */
    const uint32_t from = tile + (lane / 16 * 8 + lane % 8) * 128 + ((chunk ^ lane % 8) << 4);
    uint32_t loaded = 0;
    mbarrier_wait(MEMBER_ADDRESS(shared, bias_full), (uint32_t)now->stage);
#pragma unroll
    for (int n = 0; n < rows / 8; n += 2) { /* matrices: 8 keys and the next 8, of 8 rows and of the next 8 */
        uint32_t x[4];
        ldmatrix_x4_trans(x, from + n * 1024);
        loaded |= x[0];
        scale_and_add(s + 4 * n, x, scale);
    }
    arrive_once_per_warp(after_load(MEMBER_ADDRESS(shared, bias_empty), loaded));
    if (end >= rows) return;
#pragma unroll
    for (int n = 0; n < rows / 8; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (8 * n + (int)lane % 4 * 2 + e % 2 >= end) s[4 * n + e] = 0.0f;
}

#endif
