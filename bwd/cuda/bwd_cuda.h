/* What the CUDA rows of the backward table share. */
#ifndef FATTNI_BWD_CUDA_BWD_CUDA_H
#define FATTNI_BWD_CUDA_BWD_CUDA_H

#include "core/cuda/device.h"
#include "core/cuda/kernels.h"
#include "core/attention/kernel.h"

/* NULL, or why no CUDA backward kernel takes it: as fattni_cuda_refuses, and what
   FATTN_DETERMINISTIC or a grid cannot have. */
const char *fattni_bwd_cuda_refuses(const fattn_ctx *ctx, const fattni_problem *p);

/* Gradients repeat bitwise: asked for, or no dQ and no dbias whose terms come in any order. */
bool fattni_bwd_cuda_repeats(const fattni_problem *p);

/* Blocks of rows and of keys, of all heads: grids of what runs beside the main kernel, and of it. */
int64_t fattni_bwd_cuda_row_grid(const fattni_problem *p, const fattni_cuda_kernel *k);
int64_t fattni_bwd_cuda_key_grid(const fattni_problem *p, const fattni_cuda_kernel *k);

/* Parts of the workspace that both have, each aligned, 0 bytes when absent: for dsink and for the
   turns of FATTN_DETERMINISTIC. */
size_t fattni_bwd_cuda_sink_bytes(const fattni_problem *p, const fattni_cuda_kernel *k);
size_t fattni_bwd_cuda_turns_bytes(const fattni_problem *p, const fattni_cuda_kernel *k);

/* Parts of the workspace for huge rows (core/attention/huge.h) from offset `begin` on, `rows` of them in m and
   log l. What is 0 at the start of a call comes last, from `zero` to `end`. */
typedef struct fattni_bwd_huge {
    size_t max, log_sum, blocks, zero, counters, sink, end;
} fattni_bwd_huge;
fattni_bwd_huge fattni_bwd_cuda_huge_parts(const fattn_ctx *ctx, const fattni_problem *p, size_t begin, int64_t rows);
/* Their addresses in the arguments of all kernels of the call; then, after dq, dk and dv have all else, the kernel. */
void fattni_bwd_cuda_huge_args(const fattn_ctx *ctx, const fattni_problem *p, const fattni_bwd_huge *parts,
                               fattni_cuda_args *a);
fattn_status fattni_bwd_cuda_huge(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *after,
                                  const fattni_cuda_args *a);

/* d_bias = 0 before the main kernel, dsink from its parts after it; nothing when not wanted. */
fattn_status fattni_bwd_cuda_zero(fattn_ctx *ctx, const fattni_problem *p,
                                  const fattni_cuda_args *a);
fattn_status fattni_bwd_cuda_sink(fattn_ctx *ctx, const fattni_problem *p,
                                  const fattni_cuda_args *a);

#endif
