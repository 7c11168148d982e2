/* The CUDA row of the forward table, for the row of FATTN_FP8, and its steps, for tests. */
#ifndef FATTNI_FWD_CUDA_FWD_CUDA_H
#define FATTNI_FWD_CUDA_FWD_CUDA_H

#include "core/attention/kernel.h"
#include "core/cuda/kernels.h"
#include "fwd/cuda/fwd_args.h"

extern const fattni_kernel fattni_fwd_cuda;

/* The first kernel of fwd_kernels.def that supports the call, or NULL. */
const fattni_cuda_kernel *fattni_fwd_cuda_choose(const fattn_ctx *ctx, const fattni_problem *p);
/* The query heads of n K/V heads, n a power of two, whose K and V fit five eighths of L2: what Hopper's kernels work on
   together. */
int64_t fattni_fwd_head_group(const fattn_ctx *ctx, const fattni_problem *p, int64_t element_bytes);
/* For a Hopper kernel; encodes the tensor maps: host work only. */
fattn_status fattni_fwd_sm90_args_of(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                     fattni_fwd_sm90_args *out);

#endif
