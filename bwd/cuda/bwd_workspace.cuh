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

/* The mean of the keys of (b, hk), where it is used (bwd_key_mean.cu); else NULL. */
DEVICE const float *key_mean_of(const fattni_bwd_args *bwd, int b, int hk) {
    const int64_t plane = (int64_t)b * bwd->a.Hkv + hk;
    return bwd->key_mean && bwd->key_mean_used[plane] ? bwd->key_mean + plane * bwd->key_mean_pitch : 0;
}
/* What a row of dS sums to: sum P (dP - delta) = dL + exp(sink - L) delta. In the scale of F16's dS. */
DEVICE float sum_of_ds(const fattni_bwd_args *bwd, float sink_share, float delta, float d_lse) {
    return (d_lse + sink_share * delta) / bwd->dbias_scale;
}
/* With a softcap, whose derivative is c, dS = P c (dP - delta) has no known sum, but P (dP - delta) has. What that sums
   to beyond it, `known`, is the error of the delta that it was computed with, which is in dS times P c: from sums of a
   row's P (dP - delta), P c (dP - delta) and P c, in the scale of F16's P, what dS sums to with the true delta. */
DEVICE float capped_sum_of_ds(const fattni_bwd_args *bwd, float known, float sum, float capped_sum, float weight) {
    return capped_sum - (sum - known) * (weight * bwd->dbias_scale);
}
/* Where the keys' mean may be used: dq_of_mean of the padded row `at` begins with what dS sums to, from the row's L and
   delta (with a softcap: rows/bwd_capped_sums.cuh). The kernels of sm_80 subtract what the rounded dS sums to. */
DEVICE void store_sum_of_ds(const fattni_bwd_args *bwd, int64_t at, float L, float delta, float sink, float d_lse) {
    const int counts = L - L == 0.0f && !FATTNI_IS_HUGE(L);
    bwd->dq_of_mean[at] = counts ? sum_of_ds(bwd, expf(sink - L), delta, d_lse) : 0.0f;
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
