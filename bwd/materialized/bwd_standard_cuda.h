/* The arguments of materialized backward's kernels. */
#ifndef FATTNI_BWD_MATERIALIZED_BWD_STANDARD_CUDA_H
#define FATTNI_BWD_MATERIALIZED_BWD_STANDARD_CUDA_H

#include "bwd/cuda/bwd_args.h"
#include "core/materialized/standard_cuda.h"

typedef struct fattni_bwd_standard_args {
    fattni_standard_args x;
    fattni_bwd_args bwd; /* gradients; no workspace */
    int32_t d_o_dtype, reserved;
    void *dP;             /* REAL, then G */
    void *X;              /* REAL: scale/cap q.k, with a softcap only */
    void *dX;             /* dtype; the place of dP when that is REAL, too */
    void *delta;          /* REAL [B Hq Sq] */
    int64_t d_bias_lanes; /* threads of a block that share one element */
} fattni_bwd_standard_args;

#endif
