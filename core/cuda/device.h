/* The GPU behind a context. Host C; needs only CUDA's runtime API. */
#ifndef FATTNI_CORE_CUDA_DEVICE_H
#define FATTNI_CORE_CUDA_DEVICE_H

#include "core/cuda/args.h"
#include "core/cuda/launch.h"
#include "core/attention/problem.h"

/* Looks at device ctx->device_id and fills ctx->gpu; every kernel of both tables is allowed its
   dynamic shared memory here, once. UNSUPPORTED when there is no such device or it is older than
   sm_80; CUDA for faults. */
fattn_status fattni_cuda_open(fattn_ctx *ctx);
void fattni_cuda_close(fattn_ctx *ctx);
fattn_allocator fattni_cuda_allocator(void);
/* Dynamic shared memory that a block may have beside a kilobyte of its kernel's own. */
size_t fattni_cuda_most_shared(const fattn_ctx *ctx);

/* From the validated problem to the kernel's view of it. */
fattni_cuda_args fattni_cuda_args_of(const fattni_problem *p);
/* NULL, or why 32-bit indices cannot hold the problem. */
const char *fattni_cuda_refuses(const fattni_problem *p);
/* NULL, or why a launch of so many blocks cannot be: asked before anything is written. */
const char *fattni_cuda_refuses_grid(int64_t blocks);
/* 16-byte accesses are possible for this tensor's rows. */
bool fattni_cuda_vector(const fattni_array *a, int64_t width);

#endif
