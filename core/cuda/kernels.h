/* The lists of CUDA attention kernels, the criteria for choosing among them, and their launch. */
#ifndef FATTNI_CORE_CUDA_KERNELS_H
#define FATTNI_CORE_CUDA_KERNELS_H

#include "core/attention/problem.h"
#include "core/cuda/kernel.h"

enum { FATTNI_CUDA_OLDEST = 75 }; /* the oldest architecture with kernels */

/* fwd/cuda/fwd_kernels.c and bwd/cuda/bwd_kernels.c: in order of preference, then NULL. */
extern const fattni_cuda_kernel *const fattni_fwd_cuda_kernels[];
extern const fattni_cuda_kernel *const fattni_bwd_cuda_kernels[];

/* The FATTNI_VARIANT that a call needs: FULL, CAUSAL, BANDED or GENERAL. `banded`: the caller has other reasons for at
   least BANDED. */
int fattni_cuda_variant_of(const fattni_problem *p, bool banded);
/* Whether the context's device, limited by arch_cap, runs the kernel's machine code. */
bool fattni_cuda_has_code(const fattni_cuda_kernel *k, const fattn_ctx *ctx);
/* Whether dtype, head_dim, machine code and shared memory allow it; mask, features and addresses are not checked. */
bool fattni_cuda_can_run(const fattni_cuda_kernel *k, const fattn_ctx *ctx, const fattni_problem *p);
/* Of two kernels that can run a call, where `first` (or NULL) comes first in the list, the one to prefer: `first`,
   unless an SM holds fewer than 8 warps of it by its shared memory, and at least 8 of `next`, whose head_dim is not
   much larger. */
const fattni_cuda_kernel *fattni_cuda_prefer(const fattn_ctx *ctx, const fattni_cuda_kernel *first,
                                             const fattni_cuda_kernel *next);
/* Shared memory of a block on an architecture, in bytes: what arch_cap allows. */
size_t fattni_cuda_shared_of(int arch);

/* Whether AUTO is a fused kernel. Not in F32 and F64 on devices with little shared memory where one pass has none:
   there it is STANDARD in both passes, whose backward needs the P that its forward saves. */
bool fattni_cuda_is_fused(const fattn_ctx *ctx, const fattni_problem *p);
/* Why a device has no kernel for a call that others run: it has too little shared memory, or this build lacks it. */
const char *fattni_cuda_why_no_kernel(const fattni_problem *p);

/* Before a launch: on devices for which the driver compiles the kernels, raises the limit of shared memory now. */
fattn_status fattni_cuda_ready(fattn_ctx *ctx, const fattni_cuda_kernel *k);
/* Launches an attention kernel; args_bytes, the size of the struct that args points to, must equal the kernel's. */
fattn_status fattni_cuda_launch(fattn_ctx *ctx, const fattni_cuda_kernel *k, int64_t grid, const void *args,
                                size_t args_bytes);
/* The same in clusters of a size that the kernel does not fix; it divides grid. threads: of a CTA, at most k->threads.
   shared: bytes of dynamic shared memory, at most k->shared. */
fattn_status fattni_cuda_launch_clusters(fattn_ctx *ctx, const fattni_cuda_kernel *k, int64_t grid, int cluster,
                                         int threads, size_t shared, const void *args, size_t args_bytes);
/* How many clusters of 2 to 8 CTAs, one on an SM, the device runs at the same time. k: of which an SM has one CTA. */
fattn_status fattni_cuda_clusters(fattn_ctx *ctx, const fattni_cuda_kernel *k, int cluster, int *count);

#endif
