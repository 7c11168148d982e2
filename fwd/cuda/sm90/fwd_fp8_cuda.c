/* The CUDA row for FATTN_FP8: copies of q, k and v (core/fp8), then a kernel of family sm90_f8 over them. */
#include "core/attention/kernel.h"
#include "core/cuda/device.h"
#include "core/cuda/sm90.h"
#include "core/fp8/fp8.h"
#include "fwd/cuda/fwd_cuda.h"

#include <string.h>

/* A call without keys multiplies nothing: the other row serves it. */
static fattni_problem without_fp8(const fattni_problem *p) {
    fattni_problem plain = *p;
    plain.flags &= ~(uint32_t)(FATTN_FP8 | FATTN_FP8_HADAMARD | FATTN_FP8_INT8);
    return plain;
}

static int64_t blocks_of(const fattni_problem *p, const fattni_cuda_kernel *k) { return fattni_ceil_div(p->Sq, k->BM); }

/* Plain kernels store O by its tensor map alone, the banded ones anywhere. */
static bool maps_o(const fattni_problem *p) {
    return p->o.dtype == (int32_t)p->dtype && p->dtype != FATTN_F32 && fattni_sm90_maps(&p->o, p->Dv);
}

/* Rows of a call's last blocks that are beyond its end. */
static int64_t idle_rows(const fattni_problem *p, const fattni_cuda_kernel *k) {
    return blocks_of(p, k) * k->BM - p->Sq;
}

/* The first line that fits, unless a later one with smaller blocks saves a sixteenth of the rows. */
static const fattni_cuda_kernel *choose(const fattn_ctx *ctx, const fattni_problem *p) {
    const int32_t codes = p->flags & FATTN_FP8_INT8 ? FATTN_I8 : FATTN_F8E4M3;
    const int variant = maps_o(p) ? fattni_cuda_variant_of(p, false) : FATTNI_VARIANT_BANDED;
    const fattni_cuda_kernel *best = NULL;
    for (const fattni_cuda_kernel *const *k = fattni_fwd_cuda_kernels; *k; ++k) {
        if ((*k)->dtype != codes || (*k)->variant != variant || p->D > (*k)->D || p->Dv > (*k)->Dv ||
            !fattni_cuda_has_code(*k, ctx) || (*k)->shared > ctx->gpu.shared_limit)
            continue;
        if (!best || ((*k)->D == best->D && 16 * (idle_rows(p, best) - idle_rows(p, *k)) > p->Sq)) best = *k;
    }
    return best;
}

static size_t bytes_of_copies(const fattni_problem *p) {
    return p->fp8.q.present ? 0 : (size_t)fattni_round_up((int64_t)fattni_fp8_bytes(p), FATTNI_ALIGN);
}

static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const char *const reason = fattni_cuda_why_unsupported(ctx, p);
    if (reason) return reason;
    if (ctx->gpu.arch != 90) return "needs a Hopper GPU (sm_90) for FATTN_FP8; the CPU emulates it";
    if (p->Sk == 0 || p->rows_k == 0) {
        const fattni_problem plain = without_fp8(p);
        return fattni_fwd_cuda.plan(ctx, &plain, out);
    }
    const fattni_cuda_kernel *const k = choose(ctx, p);
    if (!k) return fattni_cuda_why_no_kernel(p);
    if (!fattni_sm90_counts(blocks_of(p, k), p->Hq * p->B)) return "supports at most 2^28 row blocks of all heads";
    out->choice[0] = k;
    out->deterministic = true;
    out->workspace = bytes_of_copies(p) + FATTNI_ALIGN; /* and the tile counter */
    strncpy(out->name, k->name, sizeof out->name - 1);
    return NULL;
}

static fattn_status make_maps(fattn_ctx *ctx, const fattni_problem *p, const fattni_fp8 *copies,
                              const fattni_cuda_kernel *k, fattni_fwd_sm90_args *x) {
    const int columns = FATTNI_FWD_F8_COLUMNS(k->D), keys = FATTNI_FWD_F8_KEYS(k->BN);
    const int q_rows = FATTNI_FWD_SM90_Q_ROWS(k->variant, k->D, k->BM);
    FATTNI_TRY(fattni_sm90_map_codes(ctx, &copies->q, p->D, columns, q_rows, &x->q, &x->q_step));
    FATTNI_TRY(fattni_sm90_map_codes(ctx, &copies->k, p->D, columns, k->BN, &x->k, &x->k_step));
    FATTNI_TRY(fattni_sm90_map_codes(ctx, &copies->v, copies->v.n[3], keys, k->D, &x->v, &x->v_step));
    return x->o_by_tma ? fattni_sm90_map(ctx, &p->o, p->dtype, p->Dv, 16, &x->o, &x->o_step) : FATTN_OK;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    if (p->Sk == 0 || p->rows_k == 0) {
        const fattni_problem plain = without_fp8(p);
        return fattni_fwd_cuda.run(ctx, &plain, plan);
    }
    const fattni_cuda_kernel *const k = plan->choice[0];
    const int64_t blocks = blocks_of(p, k), tiles = blocks * p->Hq * p->B;
    if (tiles == 0) return FATTN_OK;
    fattni_fp8 copies;
    FATTNI_TRY(fattni_fp8_copies(ctx, p, &copies));
    fattni_fwd_sm90_args x = {.a = fattni_cuda_args_of(p),
                              .o_by_tma = maps_o(p),
                              .f8 = {.q_scale = fattni_cuda_view_of(&copies.q_scale),
                                     .q_shift = fattni_cuda_view_of(&copies.q_shift),
                                     .k_scale = fattni_cuda_view_of(&copies.k_scale),
                                     .v_scale = fattni_cuda_view_of(&copies.v_scale),
                                     .v_mean = fattni_cuda_view_of(&copies.v_mean)}};
    x.a.o_f32 = p->o.dtype == FATTN_F32;
    x.a.vector_qkv = x.a.o_f32 || fattni_cuda_vector(&p->o, p->Dv); /* in these kernels: of o */
    x.scale_log2 = x.a.scale * 1.4426950408889634f;
    const int64_t planes = p->Hq * p->B;
    const fattni_fwd_groups groups = fattni_fwd_head_groups(ctx, p, blocks, 1);
    x.schedule = fattni_sm90_schedule_of(blocks, planes, groups.each);
    x.order = fattni_fwd_order_of(&x.schedule, (int)p->Hq, 1, k->variant != FATTNI_VARIANT_FULL,
                                  (int)fattni_min(groups.last, planes));
    x.schedule.next_tile = (int32_t *)((char *)p->workspace + bytes_of_copies(p));
    bool entered;
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered)); /* encoding a tensor map needs a current context */
    const fattn_status s = make_maps(ctx, p, &copies, k, &x);
    fattni_cuda_leave(ctx, entered);
    if (s) return s;
    const int64_t grid = fattni_min(tiles, ctx->gpu.sms);
    return fattni_sm90_start(ctx, k, grid, &x, sizeof x, x.schedule.next_tile,
                             k->variant != FATTNI_VARIANT_FULL && tiles > grid);
}

const fattni_kernel fattni_fwd_fp8_cuda = {
    .family = "fattn_fwd_fp8_cuda",
    .device = FATTN_CUDA,
    .algorithms = 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH2,
    .plan = plan,
    .run = run,
    .fp8 = true,
};
