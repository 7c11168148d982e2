/* The lists of CUDA attention kernels, the criteria for choosing among them, and their launch. */
#ifndef FATTNI_CORE_CUDA_KERNELS_H
#define FATTNI_CORE_CUDA_KERNELS_H

#include "core/attention/problem.h"
#include "core/cuda/kernel.h"

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

/* Launches an attention kernel; args_bytes, the size of the struct that args points to, must equal the kernel's. */
fattn_status fattni_cuda_launch(fattn_ctx *ctx, const fattni_cuda_kernel *k, int64_t grid, const void *args,
                                size_t args_bytes);

#endif
