/* Enqueues kernels, copies and memsets on a context's stream. */
#ifndef FATTNI_CORE_CUDA_LAUNCH_H
#define FATTNI_CORE_CUDA_LAUNCH_H

#include "core/base/internal.h"
#include "core/cuda/kernel.h"

/* FATTN_OK, or FATTN_E_CUDA with "what: CUDA's text". The argument is a cudaError_t. */
fattn_status fattni_cuda_check(fattn_ctx *ctx, int error, const char *what);

/* Around every call of CUDA and its libraries: enter makes the context's device and CUDA context current for
   this thread, leave restores what was current before. They nest. If it is current already, enter costs one
   query. */
fattn_status fattni_cuda_enter(fattn_ctx *ctx, bool *entered);
void fattni_cuda_leave(const fattn_ctx *ctx, bool entered);

/* All kernel launches, on the context's device and stream. grid and block are one-dimensional, so that the
   only grid limit is 2^31 - 1; with grid 0 nothing is launched. A kernel has one argument, a struct that is
   passed by value: `args` points to it. Where the device supports it this is a programmatic dependent launch: CTAs may
   start before the kernel before it on the stream has completed, and wait for that themselves (core/ptx/grid.h). */
fattn_status fattni_cuda_start(fattn_ctx *ctx, const char *name, fattni_cuda_any kernel, int64_t grid, int block,
                               size_t shared, const void *args);
/* The same in clusters of `cluster` CTAs, which divides grid, above 1 from sm_90 on; `waits`: as above, otherwise the
   launch is none of these. */
fattn_status fattni_cuda_start_clusters(fattn_ctx *ctx, const char *name, fattni_cuda_any kernel, int64_t grid,
                                        int cluster, int block, size_t shared, const void *args, bool waits);
#define FATTNI_START(ctx, kernel, grid, block, args)                                                                   \
    fattni_cuda_start(ctx, #kernel, (fattni_cuda_any)(kernel), grid, block, 0, args)
/* Enqueued like a kernel. A copy between host and device may wait for the stream. */
fattn_status fattni_cuda_move(fattn_ctx *ctx, void *dst, const void *src, size_t bytes);
/* The same for `rows` times `width` bytes on the device; pitches in bytes. */
fattn_status fattni_cuda_move_rows(fattn_ctx *ctx, void *dst, int64_t dst_pitch, const void *src, int64_t src_pitch,
                                   size_t width, int64_t rows);
fattn_status fattni_cuda_zero(fattn_ctx *ctx, void *p, size_t bytes);
/* Before a kernel that waits: the same by a kernel where that is possible, beside which the next one starts. */
fattn_status fattni_cuda_zero_beside(fattn_ctx *ctx, void *p, size_t bytes);
/* `rows` times `width` bytes, `pitch` bytes apart. */
fattn_status fattni_cuda_zero_rows(fattn_ctx *ctx, void *p, size_t pitch, size_t width, int64_t rows);
/* Blocks until the stream's work is done; reports faults. */
fattn_status fattni_cuda_sync(fattn_ctx *ctx);

#endif
