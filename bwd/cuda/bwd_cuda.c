/* The CUDA row of the backward table for BF16 and F16: delta, the main kernel, finish, huge rows, dsink. Most calls of Hopper's
   kernels do without delta and finish. */
#include "bwd/cuda/bwd_cuda.h"
#include "core/cuda/sm90.h"

#include <math.h>
#include <string.h>

extern void fattn_bwd_delta(fattni_cuda_args);
extern void fattn_bwd_finish(fattni_cuda_args);

/* The workspace: one stretch of padded rows per (sequence, head); packed sequences share stretches
   of their head and may waste a row block each. */
typedef struct layout {
    int64_t padded_rows, rows;
    size_t lse2, delta, dq, d_o, sink, turns; /* offsets; an absent part has no bytes */
    fattni_bwd_huge huge;
    size_t pieces, bytes; /* after what is 0 at the start, and 0, too */
} layout;

/* An F32 d_o is copied to [B,Hq,rows,D] of the 16-bit dtype. */
static size_t copied_rows(const fattni_problem *p) {
    return (size_t)((p->packed ? 1 : p->B) * p->Hq * p->rows_q);
}

/* The problem with that copy for its d_o. */
static fattni_problem with_copy(const fattni_problem *p, const fattni_view *copy) {
    fattni_problem copied = *p;
    copied.d_o = (fattni_array){.p = copy->p, .n = {p->packed ? 1 : p->B, p->Hq, p->rows_q, p->Dv},
                                .s = {p->packed ? 0 : copy->b, copy->h, copy->row, 1},
                                .dtype = (int32_t)p->dtype, .present = true};
    return copied;
}

/* Hopper's kernels cut their work into pieces (bwd_sm90_scheduler.cuh). */
static bool is_hopper(const fattni_cuda_kernel *k) { return k->arch == 90; }
static bool is_plain(const fattni_cuda_kernel *k) {
    return k->mask == FATTNI_MASK_FULL || k->mask == FATTNI_MASK_CAUSAL;
}
static size_t piece_bytes(int64_t sections) {
    return (size_t)fattni_round_up((1 + FATTNI_COUNTERS * sections) * 4, FATTNI_ALIGN);
}

static layout layout_of(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    layout l = {0};
    l.padded_rows = fattni_round_up(p->packed ? p->rows_q + p->B * k->BM : p->Sq, k->BM);
    l.rows = l.padded_rows * p->Hq * (p->packed ? 1 : p->B);
    const size_t vector = (size_t)fattni_round_up(l.rows * 4, FATTNI_ALIGN);
    l.lse2 = 0;
    l.delta = vector;
    l.dq = 2 * vector;
    l.d_o = l.dq + (p->dq.present ? (size_t)l.rows * (size_t)k->D * 4 : 0);
    l.sink = l.d_o + (p->d_o.dtype == FATTN_F32 ? copied_rows(p) * (size_t)k->D * 2 : 0);
    l.turns = l.sink + fattni_bwd_cuda_sink_bytes(p, k);
    l.huge = fattni_bwd_cuda_huge_parts(ctx, p, l.turns + fattni_bwd_cuda_turns_bytes(p, k), l.rows);
    l.pieces = l.huge.end;
    l.bytes = l.pieces + (is_hopper(k) ? piece_bytes(p->B * p->Hkv) : 0);
    return l;
}

/* Whether pieces of rows know this call: 16-bit tensors by 16 bytes, not packed, dq overwritten, delta not given, no
   dsink. */
static bool does_rows(const fattni_cuda_kernel *k, const fattni_cuda_args *a) {
    return is_hopper(k) && a->vector_gradients && !a->o_f32 && !a->d_o_f32 && !a->dq_f32 &&
           !a->given_delta.p && !a->d_sink.p && !a->cu_seqlens_q.p && !(a->flags & FATTN_ACC_DQ);
}

static const char *refuses(const fattn_ctx *ctx, const fattni_problem *p) {
    const char *reason = fattni_bwd_cuda_refuses(ctx, p);
    if (reason) return reason;
    if (layout_of(ctx, p, fattni_cuda_find(ctx, p)).padded_rows > INT32_MAX)
        return "pads the rows of packed sequences to more than 2^31-1";
    return NULL;
}

static void plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const fattni_cuda_kernel *const k = fattni_cuda_find(ctx, p);
    const fattni_cuda_kernel *const either[] = {fattni_cuda_find_aligned(ctx, p),
                                                fattni_cuda_find_portable(ctx, p)};
    for (int n = 0; n < 2; ++n) {
        const size_t bytes = either[n] ? layout_of(ctx, p, either[n]).bytes : 0;
        if (bytes > out->workspace) out->workspace = bytes;
    }
    out->deterministic = fattni_bwd_cuda_repeats(p);
    strncpy(out->name, k->name, sizeof out->name - 1);
}

/* What the main kernel on Hopper is told; `rows`: it also does what is done before and after it. */
static fattn_status hopper_args(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                const fattni_cuda_args *a, void *counters, bool rows, fattni_sm90_args *out) {
    const fattni_problem mapped = a->d_o_copy.p ? with_copy(p, &a->d_o_copy) : *p;
    FATTNI_TRY(fattni_sm90_args_of(ctx, &mapped, k, out));
    out->a = *a;
    out->next_tile = counters;
    if (rows) fattni_cut(out, k->cluster);
    return FATTN_OK;
}

/* As many CTAs as SMs share the pieces, or a cluster has one of them. */
static fattn_status start_hopper(fattn_ctx *ctx, const fattni_cuda_kernel *k, const fattni_sm90_args *s) {
    const int64_t grid = k->cluster == 1 ? fattni_min(s->pieces, ctx->gpu.sms) : (int64_t)s->pieces * k->cluster;
    return fattni_cuda_start(ctx, k->name, k->kernel, grid, k->threads, k->shared, s);
}

/* In F16 a P of 1 / Sk is no normal number from Sk = 16384 on, and loses bits: P and dS of long rows are computed
   times 2^k, at most 2^12 times 1 / Sk, so that a P of 1 is in range and a dS has lost as few bits as may be. */
static void scale_gradients(const fattni_problem *p, fattni_cuda_args *a) {
    int k = 0;
    while (p->dtype == FATTN_F16 && k < 15 && p->Sk >> (12 + k) > 1) ++k;
    const float unit = ldexpf(1.0f, -k);
    a->lse_shift = (float)(k * 0.6931471805599453);
    a->dq_scale = a->dk_scale = a->scale * unit;
    a->dv_scale = a->keep_scale * unit;
    a->dbias_scale = unit;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p) {
    const fattni_cuda_kernel *k = fattni_cuda_find(ctx, p);
    const layout l = layout_of(ctx, p, k);
    fattni_cuda_args a = fattni_cuda_args_of(p);
    a.padded_rows = (int32_t)l.padded_rows;
    a.row_block = k->BM;
    const bool hopper = is_hopper(k); /* its accumulator: two warpgroups, 16 rows to a warp */
    a.dq_threads = hopper ? 256 : k->threads;
    a.dq_group = hopper ? 128 : k->threads;
    a.dq_warp_rows = hopper ? 16 : 32;
    a.D_padded = k->D;
    a.lse2 = (float *)((char *)p->workspace + l.lse2);
    a.lse_factor =
        FATTNI_BEGINS_WITH_L(is_hopper(k) && is_plain(k), k->D, k->BM) ? (float)(-1 / p->scale) : 1.4426950408889634f;
    scale_gradients(p, &a);
    a.delta = (float *)((char *)p->workspace + l.delta);
    a.sink_parts = (char *)p->workspace + l.sink;
    if (l.huge.max > l.turns) a.turns = (int32_t *)((char *)p->workspace + l.turns);
    if (p->d_o.dtype == FATTN_F32) {
        const int64_t D = k->D;
        a.d_o_copy = (fattni_view){(char *)p->workspace + l.d_o, p->Hq * p->rows_q * D, p->rows_q * D,
                                   D, 1};
    }
    if (p->dq.present) a.dq_accumulator = (float *)((char *)p->workspace + l.dq);
    const int64_t row_grid = fattni_bwd_cuda_row_grid(p, k), key_grid = fattni_bwd_cuda_key_grid(p, k);
    const bool rows = does_rows(k, &a); /* the main kernel is delta and finish, too */
    fattni_bwd_cuda_huge_args(ctx, p, &l.huge, &a);
    fattni_cuda_args main = a;
    if (a.d_o_copy.p) main.d_o = a.d_o_copy;
    fattni_sm90_args s;
    if (hopper) /* what may fail comes before what writes */
        FATTNI_TRY(hopper_args(ctx, p, k, &main, (char *)p->workspace + l.pieces, rows, &s));
    FATTNI_TRY(fattni_cuda_zero(ctx, (char *)p->workspace + l.huge.zero, l.bytes - l.huge.zero));
    FATTNI_TRY(fattni_bwd_cuda_zero(ctx, p, &a));
    if (!rows) FATTNI_TRY(FATTNI_START(ctx, fattn_bwd_delta, row_grid, 256, &a));
    if (hopper)
        FATTNI_TRY(start_hopper(ctx, k, &s));
    else
        FATTNI_TRY(fattni_cuda_start(ctx, k->name, k->kernel, key_grid, k->threads, k->shared, &main));
    if (p->dq.present && !rows)
        FATTNI_TRY(FATTNI_START(ctx, fattn_bwd_finish, row_grid, a.dq_threads, &a));
    FATTNI_TRY(fattni_bwd_cuda_huge(ctx, p, k, &main));
    return fattni_bwd_cuda_sink(ctx, p, &a);
}

const fattni_kernel fattni_bwd_cuda = {
    "fattn_bwd_sm80", FATTN_CUDA,
    1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH1 | 1u << FATTN_ALGO_FLASH2, refuses, plan, run,
    1u << FATTN_BF16 | 1u << FATTN_F16};
