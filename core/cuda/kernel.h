/* The host's description of a CUDA attention kernel. Each instance defines its own (core/device/describe.cuh); a pass
   lists its kernels in order of preference. Plain C and C++: device code includes it, too. */
#ifndef FATTNI_CORE_CUDA_KERNEL_H
#define FATTNI_CORE_CUDA_KERNEL_H

#include <stddef.h>
#include <stdint.h>

/* Masks and features of a kernel. Not an enum: kernels compare them in #if. FULL, CAUSAL: that mask alone; PLAIN: both,
   told apart at run time. SHORT: causal, few rows. HEADS, HEADS_FULL: a CTA has a head (bwd_sm90_short.cuh). BANDED:
   windows, lengths, sink, merge; PARTS: also divided keys. GENERAL: also softcap, ALiBi, bias, dropout. CAPPED: with a
   softcap. BIASED: banded with a bias that TMA loads; DBIAS: its gradient. HUGE: core/attention/huge.h. FEW,
   FEW_GENERAL, FEW_UNIFIED: for few rows (fwd/cuda/fwd_parts.h). ADD: fwd_split.h. SUMS: bwd_capped_sums.cuh. */
#define FATTNI_VARIANT_FULL 0
#define FATTNI_VARIANT_CAUSAL 1
#define FATTNI_VARIANT_PLAIN 2
#define FATTNI_VARIANT_SHORT 3
#define FATTNI_VARIANT_HEADS_FULL 4
#define FATTNI_VARIANT_BANDED 5
#define FATTNI_VARIANT_GENERAL 6
#define FATTNI_VARIANT_CAPPED 7
#define FATTNI_VARIANT_HUGE 8
#define FATTNI_VARIANT_FEW 9
#define FATTNI_VARIANT_FEW_GENERAL 10
#define FATTNI_VARIANT_ADD 11
#define FATTNI_VARIANT_FEW_UNIFIED 12
#define FATTNI_VARIANT_BIASED 13
#define FATTNI_VARIANT_DBIAS 14
#define FATTNI_VARIANT_PARTS 15
#define FATTNI_VARIANT_HEADS 16
#define FATTNI_VARIANT_SUMS 17
enum { FATTNI_SHORT_ROWS = 1024 };
typedef void (*fattni_cuda_any)(void); /* a kernel's host stub, of any argument type */

typedef struct fattni_cuda_kernel {
    const char *name; /* symbol, file and profiler name: fattn_fwd_mma16_bf16_d64_causal_128x128 */
    fattni_cuda_any stub;
    size_t args_bytes; /* of its one argument, a struct passed by value */
    size_t shared;     /* dynamic shared memory of a CTA, bytes */
    int32_t arch;      /* 80: sm_80 and later; 90: sm_90a only */
    int32_t dtype;     /* fattn_dtype of q, k, v */
    int32_t tf32;      /* rounds F32 to TF32: only for calls with FATTN_TF32 */
    int32_t D, Dv;     /* the largest head_dim of q and k, of v; smaller ones are padded to it in shared memory */
    int32_t variant;   /* FATTNI_VARIANT_* */
    int32_t BM, BN, threads;
    int32_t cluster; /* CTAs per cluster, which work on neighbouring blocks; the grid is a multiple of it */
    int32_t waits;   /* calls grid_dependency_wait (core/ptx/grid.h): may start before the kernel before it has ended */
} fattni_cuda_kernel;

#endif
