/* The GPU of a context. Host C; needs only CUDA's runtime API. */
#ifndef FATTNI_CORE_CUDA_DEVICE_H
#define FATTNI_CORE_CUDA_DEVICE_H

#include "core/cuda/args.h"
#include "core/cuda/launch.h"
#include "core/attention/problem.h"

/* Dynamic shared memory that a block may have, with 1 KiB reserved for static shared memory. */
size_t fattni_cuda_most_shared(const fattn_ctx *ctx);
/* Lets launches of a kernel have as much dynamic shared memory as the device has, whatever the context is capped to:
   the limit is one for all contexts of a process. */
fattn_status fattni_cuda_allow_shared(fattn_ctx *ctx, const char *name, fattni_cuda_any kernel);

/* fattni_device_ops.dropout_mask (core/base/device.h). */
fattn_status fattni_cuda_mask(fattn_ctx *ctx, const fattni_problem *p, uint8_t *keep, const int64_t stride[4],
                              int64_t rows, int64_t columns);

/* From the validated problem to the kernel's view of it. */
fattni_attention_args fattni_cuda_args_of(const fattni_problem *p);
fattni_view fattni_cuda_view_of(const fattni_array *a);
fattni_line fattni_cuda_line_of(const fattni_array *a);
/* NULL, or why 32-bit indices cannot hold the problem. */
const char *fattni_cuda_why_unsupported(const fattn_ctx *ctx, const fattni_problem *p);
/* NULL, or why a grid of this many blocks cannot be launched. */
const char *fattni_cuda_why_grid_unsupported(int64_t blocks);
/* Heads that are scheduled together, where these go from long to short tiles: about n of `planes`, half as many to a
   quarter more, or one more, so that the last of up to 16 groups is about as large as it can be. Few heads in the last
   group would be as slow as their longest tiles, which start when all others have ended. */
int64_t fattni_cuda_even_group(int64_t n, int64_t planes);
/* How many planes of so many bytes five eighths of L2 have room for: a power of two. */
int64_t fattni_cuda_planes_in_l2(const fattn_ctx *ctx, int64_t bytes);
/* a->at_once of kernels with a CTA for each block of rows or keys, `blocks` of a plane: below a diagonal as many planes
   as L2 has room for, of `bytes` each, and at least as many as run together anyway; else 0. */
int64_t fattni_cuda_planes_at_once(const fattn_ctx *ctx, const fattni_attention_args *a, int64_t bytes, int64_t blocks,
                                   int64_t planes);
/* 16-byte accesses are possible for this tensor's rows. */
bool fattni_cuda_vector(const fattni_array *a, int64_t width);

#endif
