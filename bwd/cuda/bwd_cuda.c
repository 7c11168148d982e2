/* The CUDA row of the backward table for BF16 and F16: the mean of the keys, preprocess, sums of dS where there is a
   softcap, the main kernel, postprocess, huge rows, dsink. Most calls of the Hopper kernels have no separate preprocess
   and postprocess: the main kernel does their work. */
#include "bwd/cuda/bwd_cuda.h"
#include "bwd/cuda/bwd_padded_blocks.h"
#include "core/cuda/sm90.h"

#include <math.h>

extern void fattn_bwd_preprocess(fattni_bwd_args);
extern void fattn_bwd_postprocess(fattni_bwd_args);

/* The workspace: a range of padded rows per (sequence, head); packed sequences share one range per head, with up to one
   row block of padding each. */
typedef struct layout {
    int64_t padded_rows, rows;
    size_t lse2, delta, dq, d_o, sink, dq_semaphore; /* offsets; an absent part has size 0 */
    fattni_bwd_key_mean key_mean;
    size_t dq_of_mean;
    fattni_bwd_parts parts;
    size_t part_sums;
    fattni_bwd_huge huge;
    size_t counters, parts_stored, bytes; /* both are zeroed together with the end of `huge`, which precedes them */
} layout;

/* An F32 d_o is copied to [B,Hq,rows,D] of the 16-bit dtype. */
static size_t copied_rows(const fattni_problem *p) { return (size_t)((p->packed ? 1 : p->B) * p->Hq * p->rows_q); }

/* The problem with that copy as its d_o. */
static fattni_problem with_copy(const fattni_problem *p, const fattni_view *copy) {
    fattni_problem copied = *p;
    copied.d_o = (fattni_array){.p = copy->p,
                                .n = {p->packed ? 1 : p->B, p->Hq, p->rows_q, p->Dv},
                                .s = {p->packed ? 0 : copy->b, copy->h, copy->row, 1},
                                .dtype = (int32_t)p->dtype,
                                .present = true};
    return copied;
}

static bool is_sm90(const fattni_cuda_kernel *k) { return k->arch == 90; }
static bool is_plain(const fattni_cuda_kernel *k) {
    return k->variant < FATTNI_VARIANT_GENERAL || fattni_bwd_by_heads(k);
}
/* Global counters of the Hopper kernels: next_tile, one for SEARCH, and the progress of each head group
   (bwd_sm90_scheduler.cuh). */
static size_t counter_bytes(int64_t head_groups) {
    return (size_t)fattni_round_up((2 + FATTNI_COUNTERS * head_groups) * 4, FATTNI_ALIGN);
}

static size_t aligned(int64_t bytes) { return (size_t)fattni_round_up(bytes, FATTNI_ALIGN); }

/* Of Hopper's kernels dQ has nothing of the mean: only rows whose dS sums to something need it. */
static bool keeps_dq_of_mean(const fattni_problem *p, const fattni_cuda_kernel *k, const layout *l) {
    return l->key_mean.present && (!is_sm90(k) || p->sink.present || p->d_lse.present || p->softcap > 0);
}

static layout layout_of(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                        const fattni_cuda_kernel *huge) {
    layout l = {.parts = fattni_bwd_sm90_parts(ctx, p, k)};
    l.padded_rows = fattni_round_up(p->packed ? p->rows_q + p->B * k->BM : p->Sq, k->BM);
    l.rows = l.padded_rows * p->Hq * (p->packed ? 1 : p->B);
    const size_t vector = aligned(l.rows * 4);
    l.lse2 = 0;
    l.delta = vector;
    l.dq = 2 * vector;
    l.d_o = l.dq + (p->dq.present ? (size_t)l.rows * (size_t)k->D * 4 : 0);
    l.sink = l.d_o + (p->d_o.dtype == FATTN_F32 ? copied_rows(p) * (size_t)k->D * 2 : 0);
    l.dq_semaphore = l.sink + fattni_bwd_cuda_sink_bytes(p, k);
    l.key_mean = fattni_bwd_cuda_key_mean_parts(p, k, huge, l.dq_semaphore + fattni_bwd_cuda_semaphore_bytes(p, k));
    l.dq_of_mean = l.key_mean.end;
    l.part_sums = l.dq_of_mean + (keeps_dq_of_mean(p, k, &l) ? vector : 0);
    l.huge = fattni_bwd_cuda_huge_parts(p, huge, l.part_sums + l.parts.sums, l.rows);
    l.counters = l.huge.end;
    l.parts_stored = l.counters + (is_sm90(k) ? counter_bytes(p->B * p->Hkv) : 0);
    l.bytes = l.parts_stored + l.parts.stored;
    return l;
}

static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    fattni_bwd_choice c;
    const char *const reason = fattni_bwd_cuda_choose(ctx, p, &c);
    if (reason) return reason;
    const fattni_cuda_kernel *const any[] = {c.aligned, c.portable, c.main}; /* by addresses */
    for (int n = 0; n < 3; ++n) {
        if (!any[n] || (n == 2 && any[2] == any[0])) continue;
        const layout l = layout_of(ctx, p, any[n], c.huge);
        if (any[n] == c.main && l.padded_rows > INT32_MAX)
            return "pads the rows of packed sequences to more than 2^31-1";
        if (l.bytes > out->workspace) out->workspace = l.bytes;
    }
    fattni_bwd_cuda_keep_choice(&c, p, out);
    return NULL;
}

/* ---- Hopper ---- */

/* Whether the main kernel can also do preprocess and postprocess: 16-bit tensors with 16-byte accesses, dq overwritten,
   delta not given, no dsink. Of packed sequences where they are long on average: rows of short ones are most of the
   work, and kernels of their own have more of them in flight. */
enum { LONG_ROWS = 1024 };
static bool does_rows(const fattni_problem *p, const fattni_cuda_kernel *k, const fattni_bwd_args *x) {
    const bool packed = x->a.cu_seqlens_q.p,
               can = !packed || (fattni_bwd_sm90_packs(k) && x->a.rows_q / LONG_ROWS >= x->a.B);
    return is_sm90(k) && x->vector_gradients && !x->a.o_f32 && !x->d_o_f32 && !x->dq_f32 && !x->given_delta.p &&
           !x->d_sink.p && can && !(x->a.flags & FATTN_ACC_DQ) &&
           (fattni_bwd_by_heads(k) || fattni_sm90_maps(&p->o, p->Dv));
}

/* Whether the main kernel finds the means of keys, in those that do rows, too. Kernels with features have no registers
   for it (and a bias may mask keys), and of packed sequences a row range may have many. */
static bool finds_means(const fattni_cuda_kernel *k, const fattni_bwd_args *x) {
    return x->key_mean && is_plain(k) && !x->a.cu_seqlens_k.p;
}

static fattn_status make_maps(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k, bool rows,
                              fattni_bwd_sm90_args *x) {
    FATTNI_TRY(fattni_sm90_map(ctx, &p->q, p->dtype, p->D, k->BM, &x->q, &x->q_step));
    FATTNI_TRY(fattni_sm90_map(ctx, &p->k, p->dtype, p->D, k->BN, &x->k, &x->k_step));
    FATTNI_TRY(fattni_sm90_map(ctx, &p->v, p->dtype, p->Dv, k->BN, &x->v, &x->v_step));
    if (fattni_bwd_by_heads(k)) { /* a warp stores 16 rows at a time */
        FATTNI_TRY(fattni_sm90_map(ctx, &p->dk, p->dtype, p->D, 16, &x->dk, &x->dk_step));
        FATTNI_TRY(fattni_sm90_map(ctx, &p->dv, p->dtype, p->Dv, 16, &x->dv, &x->dv_step));
    }
    if (k->variant == FATTNI_VARIANT_BIASED)
        FATTNI_TRY(fattni_sm90_map(ctx, &p->bias, p->dtype, p->max_k, k->BM, &x->bias, &x->bias_step));
    FATTNI_TRY(fattni_sm90_map(ctx, &p->d_o, p->dtype, p->Dv, k->BM, &x->d_o, &x->d_o_step));
    if (!rows || fattni_bwd_by_heads(k)) return FATTN_OK;
    const int unit = FATTNI_ROWS_OF_UNIT(k->D);
    FATTNI_TRY(fattni_sm90_map(ctx, &p->o, p->dtype, p->Dv, unit, &x->o_rows, &x->o_step));
    return fattni_sm90_map(ctx, &p->d_o, p->dtype, p->Dv, unit, &x->d_o_rows, &x->d_o_step);
}

/* Heads that are processed together: about two and a half waves of CTAs at most, the longest work items first, so that
   their dQ accumulators fit L2. Of many short sequences, where rows are much of the work, little more than a wave, as
   was measured. For clusters in short sequences half a wave, since each of their row work items has its own CTA.
   Deterministic: concurrent key blocks of one head wait for each other: a larger group has fewer of them. */
static int64_t head_group_of(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k, int64_t blocks,
                             int64_t planes) {
    const bool is_short = blocks <= FATTNI_SHORT_BLOCKS, deterministic = p->flags & FATTN_DETERMINISTIC;
    const int64_t sms = ctx->gpu.sms, half_waves = k->cluster > 1 && is_short ? 1 : 5, eighths = k->D > 96 ? 10 : 11;
    if (is_short && k->cluster == 1 && !deterministic && planes * blocks > 4 * sms)
        return fattni_cuda_even_group(fattni_max(eighths * sms / (8 * blocks), 1), planes);
    int64_t n = 1;
    while (2 * (2 * n * blocks * k->cluster) <= half_waves * sms) n *= 2;
    if (deterministic && !is_short) n = fattni_max(n, k->variant == FATTNI_VARIANT_FULL ? 16 : 32);
    return fattni_cuda_even_group(n, planes);
}

/* Divides the tasks of `parts`, of several head groups those of the last one. */
static void divide(fattni_bwd_sm90_args *x, const fattni_bwd_parts *parts) {
    fattni_sm90_schedule *const s = &x->schedule;
    const int64_t of_others = (s->planes - 1) / s->head_group * s->head_group * s->blocks;
    const int64_t whole = parts->whole ? fattni_max(parts->whole, of_others) : 0;
    x->whole = parts->most > 1 ? (int32_t)whole : s->tiles;
    x->most_parts = (int32_t)parts->most;
    x->part_blocks = (int32_t)parts->blocks, x->part_heads = (int32_t)parts->heads;
    s->tiles = x->items = x->whole + (s->tiles - x->whole) * x->most_parts;
}

fattn_status fattni_bwd_sm90_args_of(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                     const fattni_bwd_parts *parts, const fattni_bwd_args *bwd, void *counters,
                                     bool rows, fattni_bwd_sm90_args *x) {
    const fattni_problem mapped = bwd->d_o_copy.p ? with_copy(p, &bwd->d_o_copy) : *p;
    const int64_t blocks = fattni_bwd_sm90_blocks(p, k), planes = fattni_bwd_sm90_planes(p, k);
    bool entered;
    *x = (fattni_bwd_sm90_args){.bwd = *bwd};
    FATTNI_TRY(fattni_cuda_enter(ctx, &entered)); /* encoding a tensor map needs a current context */
    const fattn_status s = make_maps(ctx, &mapped, k, rows, x);
    fattni_cuda_leave(ctx, entered);
    const fattni_block_order order = fattni_bwd_sm90_order(ctx, p, k, parts);
    x->schedule = fattni_sm90_schedule_of(
        blocks, planes, order.count || parts->together ? planes : head_group_of(ctx, p, k, blocks, planes));
    x->schedule.order = order;
    x->schedule.next_tile = counters;
    divide(x, parts);
    fattni_bwd_sm90_order_rows(x, p, k);
    x->finds_means = rows && finds_means(k, bwd);
    if (fattni_bwd_by_heads(k))
        x->items = x->schedule.planes;
    else if (rows)
        fattni_schedule_backward(x, k->cluster, ctx->gpu.sms);
    return s;
}

/* Persistent: one CTA per SM takes work items, or heads. With clusters: one cluster per work item. */
static fattn_status launch_sm90(fattn_ctx *ctx, const fattni_cuda_kernel *k, const fattni_bwd_sm90_args *x) {
    const int64_t grid = k->cluster == 1 ? fattni_min(x->items, ctx->gpu.sms) : (int64_t)x->items * k->cluster;
    return fattni_cuda_launch(ctx, k, grid, x, sizeof *x);
}

/* After a BIASED kernel, which leaves dbias to one of its own (bwd_sm90_dbias.cuh), or NULL. */
static const fattni_cuda_kernel *dbias_kernel_of(const fattn_ctx *ctx, const fattni_problem *p,
                                                 const fattni_cuda_kernel *k) {
    if (k->variant != FATTNI_VARIANT_BIASED || !p->d_bias.present) return NULL;
    for (const fattni_cuda_kernel *const *x = fattni_bwd_cuda_kernels; *x; ++x)
        if ((*x)->variant == FATTNI_VARIANT_DBIAS && fattni_cuda_can_run(*x, ctx, p)) return *x;
    return NULL;
}

/* What rows of dS sum to, with a softcap: hopper, of the main kernel, where that is Hopper's. */
static fattn_status launch_sums(fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                const fattni_bwd_args *bwd, const fattni_bwd_sm90_args *hopper) {
    const int64_t grid = fattni_bwd_cuda_row_grid(p, k);
    return is_sm90(k) ? fattni_cuda_launch(ctx, k, grid, hopper, sizeof *hopper)
                      : fattni_cuda_launch(ctx, k, grid, bwd, sizeof *bwd);
}

static fattn_status launch_dbias(fattn_ctx *ctx, const fattni_cuda_kernel *k, const fattni_bwd_sm90_args *x) {
    const int64_t *const n = x->bwd.d_bias_n;
    const int64_t tiles = n[0] * n[1] * fattni_ceil_div(n[2], k->BM) * fattni_ceil_div(n[3], k->BN);
    return fattni_cuda_launch(ctx, k, fattni_min(tiles, ctx->gpu.sms), x, sizeof *x);
}

/* ---- the call ---- */

static void scale_gradients(const fattni_problem *p, fattni_bwd_args *x) {
    const int k = fattni_p_exponent(p);
    const float unit = ldexpf(1.0f, -k);
    x->lse_shift = (float)(k * 0.6931471805599453);
    x->dq_scale = x->dk_scale = x->a.scale * unit;
    x->dv_scale = x->a.keep_scale * unit;
    x->dbias_scale = unit;
}

static fattni_bwd_args args_of(const fattni_problem *p, const fattni_cuda_kernel *k, const layout *l) {
    char *const workspace = p->workspace;
    const bool sm90 = is_sm90(k); /* its dQ accumulator: two warpgroups, 16 rows per warp */
    fattni_bwd_args x = fattni_bwd_args_of(p);
    x.padded_rows = (int32_t)l->padded_rows;
    x.row_block = k->BM;
    x.dq_threads = sm90 ? 256 : k->threads;
    x.dq_group = sm90 ? 128 : k->threads;
    x.dq_warp_rows = sm90 ? 16 : 32;
    x.D_padded = k->D;
    x.lse2 = (float *)(workspace + l->lse2);
    x.lse_factor =
        FATTNI_BEGINS_WITH_L(sm90 && is_plain(k), k->cluster, k->BM) ? (float)(-1 / p->scale) : 1.4426950408889634f;
    scale_gradients(p, &x);
    x.delta = (float *)(workspace + l->delta);
    x.sink_parts = workspace + l->sink;
    if (l->key_mean.mean > l->dq_semaphore) x.dq_semaphore = (int32_t *)(workspace + l->dq_semaphore);
    if (p->d_o.dtype == FATTN_F32)
        x.d_o_copy = (fattni_view){workspace + l->d_o, p->Hq * p->rows_q * k->D, p->rows_q * k->D, k->D, 1};
    if (p->dq.present) x.dq_accumulator = (float *)(workspace + l->dq);
    if (keeps_dq_of_mean(p, k, l)) x.dq_of_mean = (float *)(workspace + l->dq_of_mean);
    return x;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    const fattni_cuda_kernel *const k = plan->choice[0], *const huge = plan->choice[1], *const sums = plan->choice[2];
    const layout l = layout_of(ctx, p, k, huge);
    fattni_bwd_args x = args_of(p, k, &l);
    fattni_bwd_cuda_huge_args(p, huge, &l.huge, &x);
    fattni_bwd_cuda_key_mean_args(p, huge, &l.key_mean, &x);
    const int64_t row_grid =
                      FATTNI_BY_PADDED_BLOCKS(&x) ? FATTNI_PADDED_BLOCKS(&x) * p->Hq : fattni_bwd_cuda_row_grid(p, k),
                  key_grid = fattni_bwd_cuda_key_grid(p, k);
    const bool rows = does_rows(p, k, &x);
    fattni_bwd_args main = x; /* reads the copy of dO */
    if (x.d_o_copy.p) main.d_o = x.d_o_copy;
    if (!is_sm90(k)) main.a.at_once = fattni_bwd_cuda_at_once(ctx, p, k, &x.a);
    fattni_bwd_sm90_args s;
    const fattni_cuda_kernel *const dbias = dbias_kernel_of(ctx, p, k);
    if (is_sm90(k)) /* steps that may fail come before those that write */
        FATTNI_TRY(fattni_bwd_sm90_args_of(ctx, p, k, &l.parts, &main, (char *)p->workspace + l.counters, rows, &s));
    if (is_sm90(k) && s.most_parts > 1) {
        s.part_sums = (float *)((char *)p->workspace + l.part_sums);
        s.parts_stored = (int32_t *)((char *)p->workspace + l.parts_stored);
    }
    const bool capped = x.key_mean && p->softcap > 0, find_means = x.key_mean && !(rows && finds_means(k, &x));
    FATTNI_TRY(fattni_bwd_cuda_zero_counters(ctx, p, &x, l.huge.zero, l.bytes, find_means));
    if (!dbias) FATTNI_TRY(fattni_bwd_cuda_zero(ctx, p, &x)); /* that overwrites all of it */
    if (!rows) FATTNI_TRY(FATTNI_START(ctx, fattn_bwd_preprocess, row_grid, 256, &x));
    if (capped) FATTNI_TRY(launch_sums(ctx, p, sums, &main, &s));
    FATTNI_TRY(is_sm90(k) ? launch_sm90(ctx, k, &s) : fattni_cuda_launch(ctx, k, key_grid, &main, sizeof main));
    if (p->dq.present && !rows) FATTNI_TRY(FATTNI_START(ctx, fattn_bwd_postprocess, row_grid, x.dq_threads, &x));
    if (dbias) FATTNI_TRY(launch_dbias(ctx, dbias, &s));
    FATTNI_TRY(fattni_bwd_cuda_huge(ctx, p, huge, k, &main));
    return fattni_bwd_cuda_sink(ctx, p, &x);
}

const fattni_kernel fattni_bwd_cuda = {
    .family = "fattn_bwd",
    .device = FATTN_CUDA,
    .algorithms = 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH1 | 1u << FATTN_ALGO_FLASH2,
    .plan = plan,
    .run = run,
    .dtypes = 1u << FATTN_BF16 | 1u << FATTN_F16,
};
