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
/* Row blocks without keys, which are no tiles (fwd_sm90_keyless.cuh). */
int32_t fattni_fwd_sm90_keyless(const fattni_problem *p, const fattni_cuda_kernel *k);
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
/* How many planes (query heads of all sequences) are a head group, and the last one at least: those that Hopper's
   kernels work on together. As many as have K and V in five eighths of L2 (fattni_cuda_even_group); of few row blocks
   one K/V head's, so that these read its keys at the same time, and at the end two waves of tiles, of which the longest
   come first. element_bytes: of K and V. */
typedef struct fattni_fwd_groups {
    int64_t each, last;
} fattni_fwd_groups;
fattni_fwd_groups fattni_fwd_head_groups(const fattn_ctx *ctx, const fattni_problem *p, int64_t blocks,
                                         int64_t element_bytes);
/* For a Hopper kernel; encodes the tensor maps: host work only. */
fattn_status fattni_fwd_sm90_args_of(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                     const fattni_fwd_parts *parts, fattni_fwd_sm90_args *out);

#endif
