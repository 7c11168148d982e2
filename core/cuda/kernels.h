/* Every CUDA attention kernel, from fwd_kernels.def and bwd_kernels.def. */
#ifndef FATTNI_CORE_CUDA_KERNELS_H
#define FATTNI_CORE_CUDA_KERNELS_H

#include "core/cuda/device.h"

/* BANDED: windows, lengths, sink, merge. GENERAL: also softcap, ALiBi, bias, dropout.
   CAPPED: general with a softcap. HUGE: any, but only rows whose L does not tell their P (huge.h). SHORT: causal, at most FATTNI_SHORT rows; lower tiles waste less at the
   diagonal. */
enum fattni_mask {
    FATTNI_MASK_FULL, FATTNI_MASK_CAUSAL, FATTNI_MASK_GENERAL, FATTNI_MASK_BANDED, FATTNI_MASK_SHORT,
    FATTNI_MASK_CAPPED, FATTNI_MASK_HUGE
};
enum { FATTNI_SHORT = 1024 };

typedef struct fattni_cuda_kernel {
    const char *name;    /* symbol, file and profiler name: fattn_fwd_sm80_bf16_d64_causal */
    fattni_cuda_any kernel;
    int pass;            /* enum fattni_pass */
    int arch;            /* 80: sm_80 and later, takes fattni_cuda_args; 90: sm_90a, fattni_sm90_args */
    fattn_dtype dtype;
    bool tf32;           /* rounds F32 to TF32: only for those who allow it */
    int D;               /* head dims up to this, rounded up in shared memory */
    enum fattni_mask mask;
    int BM, BN, threads;
    int cluster; /* so many CTAs work together on neighbouring blocks; a grid is a multiple of it */
    size_t shared;
} fattni_cuda_kernel;

/* In order of preference; ends with name NULL. */
extern const fattni_cuda_kernel fattni_cuda_kernels[];

/* The first that holds the problem on this device, or NULL. A general kernel holds any mask, a banded
   one those without terms and dropout. */
const fattni_cuda_kernel *fattni_cuda_find(const fattn_ctx *ctx, const fattni_problem *p);
/* The same where all tensors lie at multiples of 16 bytes, and among the kernels for sm_80 and later: what
   the first one finds is one of these two, by addresses, so that a plan covers both. Either may be NULL. */
const fattni_cuda_kernel *fattni_cuda_find_aligned(const fattn_ctx *ctx, const fattni_problem *p);
const fattni_cuda_kernel *fattni_cuda_find_portable(const fattn_ctx *ctx, const fattni_problem *p);
/* Backward: the one for huge rows. */
const fattni_cuda_kernel *fattni_cuda_find_huge(const fattn_ctx *ctx, const fattni_problem *p);

#endif
