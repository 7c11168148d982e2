/* The CUDA row of the forward table, for the row of FATTN_FP8, and its steps, for tests. */
#ifndef FATTNI_FWD_CUDA_FWD_CUDA_H
#define FATTNI_FWD_CUDA_FWD_CUDA_H

#include "core/attention/kernel.h"
#include "core/cuda/kernels.h"
#include "fwd/cuda/fwd_args.h"

extern const fattni_kernel fattni_fwd_cuda;

/* Parts of row blocks of a Hopper kernel (fwd_sm90_parts.c): the most of a row block, and the most key blocks of one.
   most 1: row blocks are whole. */
typedef struct fattni_fwd_parts {
    int64_t most, blocks;
} fattni_fwd_parts;
fattni_fwd_parts fattni_fwd_sm90_parts(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k);
/* The order of a causal call's row blocks, of whose heads one head group is made, where that ends sooner. */
fattni_block_order fattni_fwd_sm90_order(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                         const fattni_fwd_parts *parts);
/* Bytes of the counters of parts that are stored, which are zero at the start, of their rows, and of their O. */
size_t fattni_fwd_parts_stored(const fattni_problem *p, const fattni_cuda_kernel *k, const fattni_fwd_parts *x);
size_t fattni_fwd_parts_rows(const fattni_problem *p, const fattni_cuda_kernel *k, const fattni_fwd_parts *x);
size_t fattni_fwd_parts_sums(const fattni_problem *p, const fattni_cuda_kernel *k, const fattni_fwd_parts *x);

/* The kernel of fwd_kernels.def for the call, or NULL. */
typedef struct fattni_fwd_choice {
    const fattni_cuda_kernel *kernel;
    const fattni_cuda_kernel *divides; /* Hopper's that divides keys, which runs the call unless addresses forbid it */
    fattni_fwd_parts parts;            /* of the latter; most 1 without */
} fattni_fwd_choice;
fattni_fwd_choice fattni_fwd_cuda_choose(const fattn_ctx *ctx, const fattni_problem *p);
/* The query heads of about n K/V heads (fattni_cuda_even_group), n a power of two, whose K and V fit five eighths of
   L2: what Hopper's kernels work on together. */
int64_t fattni_fwd_head_group(const fattn_ctx *ctx, const fattni_problem *p, int64_t element_bytes);
/* For a Hopper kernel; encodes the tensor maps: host work only. */
fattn_status fattni_fwd_sm90_args_of(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                     const fattni_fwd_parts *parts, fattni_fwd_sm90_args *out);

#endif
