/* Shared by the CUDA rows of the backward table. */
#ifndef FATTNI_BWD_CUDA_BWD_CUDA_H
#define FATTNI_BWD_CUDA_BWD_CUDA_H

#include "bwd/cuda/bwd_args.h"
#include "core/attention/kernel.h"
#include "core/cuda/device.h"
#include "core/cuda/kernels.h"

/* The kernels of a call, found in one pass over the list. main is `aligned` or `portable`, depending on addresses: a
   plan covers both. Hopper kernels can only be `aligned`. */
typedef struct fattni_bwd_choice {
    const fattni_cuda_kernel *main, *huge; /* huge: for the huge rows, which main skips */
    const fattni_cuda_kernel *sums;        /* 16 bits and TF32 with a softcap (rows/bwd_capped_sums*.cuh); else NULL */
    const fattni_cuda_kernel *aligned;     /* main if all addresses are multiples of 16 bytes */
    const fattni_cuda_kernel *portable;    /* for every architecture */
} fattni_bwd_choice;
/* NULL and the choice, or why no CUDA backward kernel supports the call. */
const char *fattni_bwd_cuda_choose(const fattn_ctx *ctx, const fattni_problem *p, fattni_bwd_choice *out);
/* Stores main, huge and sums in the plan, for run; also name and determinism. */
void fattni_bwd_cuda_keep_choice(const fattni_bwd_choice *choice, const fattni_problem *p, fattni_kernel_plan *out);

/* The call's tensors; the workspace's fields are 0. */
fattni_bwd_args fattni_bwd_args_of(const fattni_problem *p);

/* Of a Hopper kernel: whether packed sequences follow each other (bwd_sm90_items.cuh, find_packed); most key blocks,
   those of a cluster counted as one, of a sequence's head or, then, of a head; and how many of these there are. */
bool fattni_bwd_sm90_packs(const fattni_cuda_kernel *k);
/* A CTA has all key blocks of a head, and finds delta itself (sm90/bwd_sm90_short.cuh). */
bool fattni_bwd_by_heads(const fattni_cuda_kernel *k);
int64_t fattni_bwd_sm90_blocks(const fattni_problem *p, const fattni_cuda_kernel *k);
int64_t fattni_bwd_sm90_planes(const fattni_problem *p, const fattni_cuda_kernel *k);

/* Parts of key blocks (bwd_parts.c): tasks that are whole, before those in parts; the most parts of a task, and the
   most row blocks of one, or the most query heads, of which the other is 0; whether this is of all heads in one head
   group; bytes of dK and dV of parts, and of the counters of those that are stored, which are zero at the start. most
   1: all tasks are whole, the others are 0. */
typedef struct fattni_bwd_parts {
    int64_t whole, most, blocks, heads;
    bool together;
    size_t sums, stored;
} fattni_bwd_parts;
fattni_bwd_parts fattni_bwd_sm90_parts(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k);

/* The order of a causal call's key blocks, of whose heads one head group is made, where that ends sooner. */
fattni_block_order fattni_bwd_sm90_order(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                         const fattni_bwd_parts *parts);
/* In which order a task has the row blocks of its query heads: by_rows and turns, when schedule and parts are set. */
void fattni_bwd_sm90_order_rows(fattni_bwd_sm90_args *x, const fattni_problem *p, const fattni_cuda_kernel *k);

/* For a Hopper kernel; encodes the tensor maps: host work only. counters: zeroed by the caller; rows: the kernel also
   does the work of preprocess and postprocess. parts: whose memory the caller adds. */
fattn_status fattni_bwd_sm90_args_of(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                     const fattni_bwd_parts *parts, const fattni_bwd_args *bwd, void *counters,
                                     bool rows, fattni_bwd_sm90_args *out);

/* Blocks of rows and of keys of all heads: grids of the auxiliary kernels and of the main kernel. */
int64_t fattni_bwd_cuda_row_grid(const fattni_problem *p, const fattni_cuda_kernel *k);
int64_t fattni_bwd_cuda_key_grid(const fattni_problem *p, const fattni_cuda_kernel *k);

/* a.at_once (core/cuda/args.h) of a main kernel with a CTA for each key block. */
int32_t fattni_bwd_cuda_at_once(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                const fattni_attention_args *a);

/* Sizes of workspace parts that both rows have, aligned, 0 when absent: partial sums of dsink, and the semaphores of
   deterministic accumulation. */
size_t fattni_bwd_cuda_sink_bytes(const fattni_problem *p, const fattni_cuda_kernel *k);
size_t fattni_bwd_cuda_semaphore_bytes(const fattni_problem *p, const fattni_cuda_kernel *k);

/* Parts of the workspace for huge rows (core/attention/huge.h) from offset `begin` on, with `rows` values of m and of
   log l; k: the kernel for huge rows. The parts from `zero` to `end` must be zeroed before a call. */
typedef struct fattni_bwd_huge {
    size_t max, log_sum, blocks, zero, counters, sink, end;
} fattni_bwd_huge;
fattni_bwd_huge fattni_bwd_cuda_huge_parts(const fattni_problem *p, const fattni_cuda_kernel *k, size_t begin,
                                           int64_t rows);
/* Sets their addresses in the arguments, for all kernels of the call. */
void fattni_bwd_cuda_huge_args(const fattni_problem *p, const fattni_cuda_kernel *k, const fattni_bwd_huge *parts,
                               fattni_bwd_args *bwd);
/* Launches the kernel for huge rows k; `after`: the main kernel, which must have written dq, dk and dv. */
fattn_status fattni_bwd_cuda_huge(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                  const fattni_cuda_kernel *after, const fattni_bwd_args *bwd);

/* Parts of the workspace for bwd_key_mean.cu from offset `begin` on; k: the main kernel; huge: the one for huge rows,
   whose D is the pitch. Present where it is known what a row of dS sums to, so that dQ can be corrected where it does
   not: o, lse and delta are of the call's keys alone, and the main kernel rounds dS. */
typedef struct fattni_bwd_key_mean {
    size_t mean, used, end;
    bool present;
} fattni_bwd_key_mean;
fattni_bwd_key_mean fattni_bwd_cuda_key_mean_parts(const fattni_problem *p, const fattni_cuda_kernel *k,
                                                   const fattni_cuda_kernel *huge, size_t begin);
void fattni_bwd_cuda_key_mean_args(const fattni_problem *p, const fattni_cuda_kernel *huge,
                                   const fattni_bwd_key_mean *parts, fattni_bwd_args *bwd);
/* The first launch of a call zeroes its counters, the workspace from `zero` to `end`; find_means: and finds the keys'
   means. */
fattn_status fattni_bwd_cuda_zero_counters(fattn_ctx *ctx, const fattni_problem *p, fattni_bwd_args *bwd, size_t zero,
                                           size_t end, bool find_means);

/* Sets d_bias to 0 before the main kernel; sums dsink from its parts after it. No-ops when not needed. */
fattn_status fattni_bwd_cuda_zero(fattn_ctx *ctx, const fattni_problem *p, const fattni_bwd_args *bwd);
fattn_status fattni_bwd_cuda_sink(fattn_ctx *ctx, const fattni_problem *p, const fattni_bwd_args *bwd);

#endif
