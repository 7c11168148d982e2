/* Keys in pages, for kernels that have no page table: K and V of the whole batch are copied into the workspace, one
   sequence after the other. */
#ifndef FATTNI_FWD_CUDA_FWD_PAGES_H
#define FATTNI_FWD_CUDA_FWD_PAGES_H

#include "core/cuda/args.h"

#ifndef __CUDACC__
#include "core/attention/problem.h"

/* The same call with K and V as [B,Hkv,Sk,D] at the beginning of the workspace, which is used up to there; bytes: of
   both. */
fattni_problem fattni_without_pages(const fattni_problem *p, size_t *bytes);
/* Thread blocks of the copy. */
int64_t fattni_pages_blocks(const fattni_problem *paged);
/* Copies them there. */
fattn_status fattni_gather_pages(fattn_ctx *ctx, const fattni_problem *paged, const fattni_problem *dense);
#endif

enum { FATTNI_PAGES_THREADS = 256 };

/* A thread copies one unit of 16 bytes, or an element where rows are not made of such units. */
typedef struct fattni_pages_args {
    fattni_view from[2], to[2]; /* K and V; strides in units, from[].b: of pages */
    int64_t row_units[2];       /* of a row of K and V */
    int64_t k_threads, threads; /* of K, which come first; of both */
    fattni_view page_table;
    fattni_line lengths;
    int32_t Hkv, Sk, pages, page_log2;
    int32_t unit, reserved; /* bytes: 2, 4, 8 or 16 */
} fattni_pages_args;

#endif
