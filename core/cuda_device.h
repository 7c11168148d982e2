/* The GPU behind a context. Host C; needs only CUDA's runtime API. */
#ifndef FATTNI_CUDA_DEVICE_H
#define FATTNI_CUDA_DEVICE_H

#include "cuda_args.h"
#include "problem.h"

/* Looks at device ctx->device_id and fills ctx->gpu; every kernel of both tables is allowed its
   dynamic shared memory here, once. UNSUPPORTED when there is no such device or it is older than
   sm_80; CUDA for faults. */
fattn_status fattni_cuda_open(fattn_ctx *ctx);
void fattni_cuda_close(fattn_ctx *ctx);
fattn_status fattni_cuda_sync(fattn_ctx *ctx);
fattn_allocator fattni_cuda_allocator(void);
/* FATTN_OK, or FATTN_E_CUDA with "what: CUDA's text". The argument is a cudaError_t. */
fattn_status fattni_cuda_check(fattn_ctx *ctx, int error, const char *what);

typedef void (*fattni_cuda_function)(fattni_cuda_args); /* a kernel's host stub */
typedef void (*fattni_cuda_any)(void);                  /* the same, whatever its one argument */

/* The one way to launch: on the context's device and stream. grid and block are one-dimensional, so
   that no grid limit below 2^31 - 1 matters; grid 0 is nothing to do. A kernel has one argument, a
   struct that is passed by value: `args` points to it. */
fattn_status fattni_cuda_start(fattn_ctx *ctx, const char *name, fattni_cuda_any kernel,
                               int64_t grid, int block, size_t shared, const void *args);
#define FATTNI_START(ctx, kernel, grid, block, args) \
    fattni_cuda_start(ctx, #kernel, (fattni_cuda_any)(kernel), grid, block, 0, args)
/* An attention kernel. */
fattn_status fattni_cuda_launch(fattn_ctx *ctx, const char *name, fattni_cuda_function kernel,
                                int64_t grid, int block, size_t shared,
                                const fattni_cuda_args *args);

/* Enqueued like a kernel. A copy between host and device may wait for the stream. */
fattn_status fattni_cuda_move(fattn_ctx *ctx, void *dst, const void *src, size_t bytes);
fattn_status fattni_cuda_zero(fattn_ctx *ctx, void *p, size_t bytes);
/* `rows` times `width` bytes, `pitch` bytes apart. */
fattn_status fattni_cuda_zero_rows(fattn_ctx *ctx, void *p, size_t pitch, size_t width,
                                   int64_t rows);

/* From the validated problem to the kernel's view of it. */
fattni_cuda_args fattni_cuda_args_of(const fattni_problem *p);
/* NULL, or why 32-bit indices or this build's kernels cannot hold the problem. */
const char *fattni_cuda_refuses(const fattni_problem *p);
/* 16-byte accesses are possible for this tensor's rows. */
bool fattni_cuda_vector(const fattni_array *a, int64_t width);

#endif
