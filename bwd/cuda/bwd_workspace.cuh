/* Where the backward kernels keep what belongs to a row: lse2, delta and the fp32 dQ accumulator. */
#ifndef FATTNI_BWD_CUDA_BWD_WORKSPACE_H
#define FATTNI_BWD_CUDA_BWD_WORKSPACE_H

#include "core/device/sequence.cuh"
#include "core/attention/huge.h"

/* First padded row of (sequence b, head h), in lse2, delta and (times D) the dQ accumulator. Packed
   sequences start at multiples of the row block: each may waste one. */
DEVICE int64_t row_base(const fattni_cuda_args *a, const sequence *s, int b, int h) {
    if (!a->cu_seqlens_q.p) return ((int64_t)b * a->Hq + h) * a->padded_rows;
    return (int64_t)h * a->padded_rows + (s->q0 / a->row_block + b) * (int64_t)a->row_block;
}

/* lse2 and delta of the padded row `at`, from its L and rowsum(dO * O) - dL. Rows that must not count get
   an infinite L and 0: their P is 0. So is that of huge rows here: they are bwd_huge.cuh's, which starts when
   some thread has seen one. */
DEVICE void store_statistics(const fattni_cuda_args *a, int64_t at, float L, float sum) {
    const int counts = L != -INFINITY && L != INFINITY, huge = FATTNI_IS_HUGE(L);
    a->lse2[at] = a->lse_factor * ((counts && !huge) || L != L ? L - a->lse_shift : INFINITY);
    a->delta[at] = counts || L != L ? sum : 0.0f;
    if (huge) a->huge[0] = 1;
}

#endif
