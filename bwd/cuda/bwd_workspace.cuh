/* Where lse2, delta and the fp32 dQ accumulator of a row are in the workspace of 16-bit kernels. */
#ifndef FATTNI_BWD_CUDA_BWD_WORKSPACE_H
#define FATTNI_BWD_CUDA_BWD_WORKSPACE_H

#include "bwd/cuda/bwd_args.h"
#include "core/device/sequence.cuh"
#include "core/attention/huge.h"

/* First padded row of (sequence b, head h) in lse2, delta and (times D) the dQ accumulator. Packed sequences start at
   multiples of the row block: each may waste one. */
DEVICE int64_t row_base(const fattni_bwd_args *bwd, const sequence *s, int b, int h) {
    const fattni_attention_args *const a = &bwd->a;
    if (!a->cu_seqlens_q.p) return ((int64_t)b * a->Hq + h) * bwd->padded_rows;
    return (int64_t)h * bwd->padded_rows + (s->q0 / bwd->row_block + b) * (int64_t)bwd->row_block;
}

/* lse2 and delta of the padded row `at`, from its L and rowsum(dO * O) - dL. Rows past the end and rows without a key
   get +inf and 0, so that their P is 0. So do huge rows: bwd_huge.cuh computes them when huge[0] says that there are
   some. */
DEVICE void store_statistics(const fattni_bwd_args *bwd, int64_t at, float L, float sum) {
    const int counts = L != -INFINITY && L != INFINITY, huge = FATTNI_IS_HUGE(L);
    bwd->lse2[at] = bwd->lse_factor * ((counts && !huge) || L != L ? L - bwd->lse_shift : INFINITY);
    bwd->delta[at] = counts || L != L ? sum : 0.0f;
    if (huge) bwd->huge[0] = 1;
}

#endif
