/* The two kernel lists, included twice each: declarations, then rows. Kernels are extern "C", so
   their host stubs carry their names. */
#include "core/cuda/kernels.h"

#include "core/cuda/sm90.h"
#include "core/attention/problem.h"

#define NAME(pass, arch, dtype, D, mask) fattn_##pass##_##arch##_##dtype##_d##D##_##mask

typedef fattni_cuda_args ARGS_sm80, ARGS_tf32, ARGS_mma, ARGS_mmal, ARGS_simt, ARGS_simtl;
typedef fattni_sm90_args ARGS_sm90;
#define K(arch, dtype, D, mask, BM, BN, warps, ctas) \
    extern void NAME(fwd, arch, dtype, D, mask)(ARGS_##arch);
#include "fwd_kernels.def"
#undef K
#define K(arch, dtype, D, mask, BM, BN, warps, ctas) \
    extern void NAME(bwd, arch, dtype, D, mask)(ARGS_##arch);
#include "bwd_kernels.def"
#undef K

enum {
    ARCH_sm80 = 80, ARCH_sm90 = 90, ARCH_tf32 = 80, ARCH_mma = 80, ARCH_mmal = 80, ARCH_simt = 80,
    ARCH_simtl = 80
};
enum {
    TF32_sm80, TF32_sm90 = 0, TF32_tf32 = 1, TF32_mma = 0, TF32_mmal = 0, TF32_simt = 0, TF32_simtl = 0
};
enum { DTYPE_bf16 = FATTN_BF16, DTYPE_f16 = FATTN_F16, DTYPE_f32 = FATTN_F32, DTYPE_f64 = FATTN_F64 };
enum { SIZE_bf16 = 2, SIZE_f16 = 2, SIZE_f32 = 4, SIZE_f64 = 8 };
enum {
    MASK_full = FATTNI_MASK_FULL, MASK_causal = FATTNI_MASK_CAUSAL, MASK_general = FATTNI_MASK_GENERAL,
    MASK_banded = FATTNI_MASK_BANDED, MASK_short = FATTNI_MASK_SHORT, MASK_capped = FATTNI_MASK_CAPPED,
    MASK_huge = FATTNI_MASK_HUGE
};
/* Shared memory of each body, as its head says. */
#define PITCH(D) (((D) + 63) / 64 * 64)
#define SHARED_fwd_sm80(D, BM, BN, warps, size, mask) (((BM) + 2 * (BN)) * PITCH(D) * 2)
#define SHARED_fwd_sm90(D, BM, BN, warps, size, mask) FATTNI_FWD_SM90_SHARED(D, BM, BN)
#define SHARED_bwd_sm90(D, BM, BN, warps, size, mask) FATTNI_BWD_SM90_SHARED(D, BM, BN)
#define SHARED_bwd_sm80(D, BM, BN, warps, size, mask)                               \
    ((int)(mask) == FATTNI_MASK_HUGE                                                 \
         ? 4 * (BM) * PITCH(D) * 2 + 2 * (BM) * (BN) * 2 + 7 * (BM) * 4             \
         : (2 * (BN) + 4 * (BM)) * PITCH(D) * 2 + 2 * (BM) * (BN) * 2 + 4 * (BM) * 4)
#define SHARED_fwd_mma(D, BM, BN, warps, size, mask) \
    ((((BM) + 2 * (BN)) * (D) + (16 * (warps) > (BM) ? 32 * (warps) * ((BN) / 2 + 2) : 0)) * (size))
#define SHARED_bwd_mma(D, BM, BN, warps, size, mask) \
    ((2 * ((BM) + (BN)) * (D) + (16 * (warps) > (BN) ? 2 : 1) * (BM) * (BN) + 2 * (BM) +              \
      ((BM) * (BN) < 256 * (warps) ? (16 * (warps) - (BN)) * (BM) * 2 : 0)) * (size))
#define TILE_simt(rows, columns) ((rows) * (columns) + (rows) / 8 * 4)
#define SHARED_fwd_simt(D, BM, BN, warps, size, mask) \
    ((TILE_simt(BM, D) + 2 * TILE_simt(BN, D) + TILE_simt(BM, BN) + 2 * (BM)) * (size))
#define SHARED_bwd_simt(D, BM, BN, warps, size, mask)                               \
    (((int)(mask) == FATTNI_MASK_HUGE                                                \
          ? 4 * (BM) * ((D) + 1) + 2 * (BM) * ((BN) + 1) + 3 * (BM)                 \
          : 2 * (TILE_simt(BM, D) + TILE_simt(BN, D)) + TILE_simt(BM, BN) + 2 * (BM)) * (size))
#define SHARED_fwd_tf32 SHARED_fwd_mma
#define SHARED_bwd_tf32 SHARED_bwd_mma
#define SHARED_fwd_mmal SHARED_fwd_mma
#define SHARED_bwd_mmal SHARED_bwd_mma
#define SHARED_fwd_simtl SHARED_fwd_simt
#define SHARED_bwd_simtl SHARED_bwd_simt

/* CTAs of a cluster: bwd/cuda/bwd_sm90_cluster.cuh, bwd/cuda/bwd_sm90_cluster_general.cuh. */
#define CLUSTER(PASS, arch, D) (ARCH_##arch == 90 && (PASS) == FATTNI_BWD && (D) > 128 ? 2 : 1)

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)
#define ROW(pass, PASS, arch, dtype, D, mask, BM, BN, warps)                                        \
    {TEXT(NAME(pass, arch, dtype, D, mask)),                                                       \
     (fattni_cuda_any)NAME(pass, arch, dtype, D, mask), PASS, \
     ARCH_##arch, (fattn_dtype)DTYPE_##dtype, TF32_##arch, D, (enum fattni_mask)MASK_##mask, BM,   \
     BN, 32 * (warps), CLUSTER(PASS, arch, D),                                                      \
     SHARED_##pass##_##arch(D, BM, BN, warps, SIZE_##dtype, MASK_##mask)},

const fattni_cuda_kernel fattni_cuda_kernels[] = {
#define K(arch, dtype, D, mask, BM, BN, warps, ctas) \
    ROW(fwd, FATTNI_FWD, arch, dtype, D, mask, BM, BN, warps)
#include "fwd_kernels.def"
#undef K
#define K(arch, dtype, D, mask, BM, BN, warps, ctas) \
    ROW(bwd, FATTNI_BWD, arch, dtype, D, mask, BM, BN, warps)
#include "bwd_kernels.def"
#undef K
    {0}};

static enum fattni_mask mask_of(const fattni_problem *p) {
    const bool causal = p->flags & (FATTN_CAUSAL | FATTN_CAUSAL_TOP_LEFT);
    if (p->softcap > 0 || p->alibi.present || p->bias.present || p->drop_T) return FATTNI_MASK_GENERAL;
    if (p->sink.present || p->packed || p->padded || p->window_left != FATTNI_UNBOUNDED ||
        (!causal && p->window_right != FATTNI_UNBOUNDED) ||
        (p->pass == FATTNI_FWD && (p->flags & FATTN_MERGE)))
        return FATTNI_MASK_BANDED;
    return causal ? FATTNI_MASK_CAUSAL : FATTNI_MASK_FULL;
}

/* Code for sm_90a runs on 9.0 and nowhere else. */
static bool runs_on(const fattni_cuda_kernel *k, const fattn_ctx *ctx, const fattni_problem *p) {
    if (k->arch != 90) return k->arch <= ctx->gpu.arch;
    return ctx->gpu.arch == 90 && fattni_sm90_fits(p) && fattni_sm90_counts(p, k);
}

/* Hopper's backward has a softcap in kernels of its own. */
static bool serves(const fattni_cuda_kernel *k, enum fattni_mask wanted, const fattni_problem *p) {
    const bool hopper_back = k->arch == 90 && p->pass == FATTNI_BWD;
    const bool plain = k->mask == FATTNI_MASK_FULL || k->mask == FATTNI_MASK_CAUSAL;
    if (k->arch == 90 && p->pass == FATTNI_FWD && !fattni_sm90_maps_o(p) &&
        ((plain && k->D <= 128) || k->mask == FATTNI_MASK_SHORT))
        return false; /* the banded ones store O anywhere */
    switch (k->mask) {
    case FATTNI_MASK_SHORT: return wanted == FATTNI_MASK_CAUSAL && p->Sq <= FATTNI_SHORT;
    case FATTNI_MASK_HUGE: return false;
    case FATTNI_MASK_CAPPED: return p->softcap > 0 && p->softcap <= FATTNI_LARGE_CAP;
    case FATTNI_MASK_GENERAL: return !hopper_back || !(p->softcap > 0);
    case FATTNI_MASK_BANDED: return wanted != FATTNI_MASK_GENERAL;
    default: return k->mask == wanted;
    }
}

static bool computes(const fattni_cuda_kernel *k, const fattni_problem *p) {
    return k->dtype == p->dtype && (!k->tf32 || (p->flags & FATTN_TF32));
}

static const fattni_cuda_kernel *find(const fattn_ctx *ctx, const fattni_problem *p, int most) {
    const enum fattni_mask mask = mask_of(p);
    for (const fattni_cuda_kernel *k = fattni_cuda_kernels; k->name; ++k)
        if (k->pass == (int)p->pass && k->arch <= most && runs_on(k, ctx, p) &&
            computes(k, p) && serves(k, mask, p) && fattni_max(p->D, p->Dv) <= k->D &&
            k->shared <= ctx->gpu.shared_limit)
            return k;
    return NULL;
}

const fattni_cuda_kernel *fattni_cuda_find(const fattn_ctx *ctx, const fattni_problem *p) {
    return find(ctx, p, 90);
}
const fattni_cuda_kernel *fattni_cuda_find_aligned(const fattn_ctx *ctx, const fattni_problem *p) {
    fattni_problem aligned = *p;
    fattni_array *const all[] = {&aligned.q,   &aligned.k,  &aligned.v,  &aligned.o,
                                 &aligned.d_o, &aligned.dq, &aligned.dk, &aligned.dv};
    for (size_t n = 0; n < sizeof all / sizeof all[0]; ++n) all[n]->p = NULL;
    return find(ctx, &aligned, 90);
}
const fattni_cuda_kernel *fattni_cuda_find_portable(const fattn_ctx *ctx, const fattni_problem *p) {
    return find(ctx, p, 80);
}
const fattni_cuda_kernel *fattni_cuda_find_huge(const fattn_ctx *ctx, const fattni_problem *p) {
    for (const fattni_cuda_kernel *k = fattni_cuda_kernels; k->name; ++k)
        if (k->mask == FATTNI_MASK_HUGE && k->arch <= ctx->gpu.arch && k->dtype == p->dtype &&
            fattni_max(p->D, p->Dv) <= k->D && k->shared <= ctx->gpu.shared_limit)
            return k;
    return NULL;
}
