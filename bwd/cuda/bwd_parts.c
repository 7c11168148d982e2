/* Into how many work items a Hopper backward kernel divides the row blocks of a key block. A call of few heads has
   fewer key blocks than there are SMs, or is as slow as the longest of them below a diagonal; and of a full mask,
   whose key blocks take the same time, the last ones leave SMs without work. Parts of a key block run on several SMs,
   and cost the exchange of their dK and dV (bwd_sm90_items.cuh, join_parts). And in which order whole key blocks below
   a diagonal are claimed (core/cuda/order.c). */
#include "bwd/cuda/bwd_cuda.h"
#include "core/cuda/sm90.h"

#include <string.h>

/* In quarters of a step (a row block of a head), measured at head_dim 128: what a work item takes beside its steps,
   what a part takes to store dK and dV, and what the last one takes to add those of each other part. */
enum { STEP = 4, ITEM = 12, STORE = 4, ADD = 6 };
enum { MOST_SMS = 256, MOST_TASKS = 2 * MOST_SMS }; /* of larger GPUs no call is divided */
/* Parts of a task where SMs have several; results of parts that there is memory for, of which each has 128 KiB at
   head_dim 128. */
enum { MOST_PARTS = 8, MOST_STORED = 2 * MOST_SMS };

/* A call's tasks: of each of `planes` heads `count` key blocks with so many row blocks, each of `group` steps. */
typedef struct tasks {
    int32_t count, planes, group, longest;
    int32_t blocks[MOST_TASKS];
} tasks;

static int32_t parts_of(int32_t blocks, int32_t most) { return blocks > most ? (blocks + most - 1) / most : 1; }
static int32_t items_of(const tasks *x, int32_t most) {
    int32_t n = 0;
    for (int32_t j = 0; j < x->count; ++j) n += parts_of(x->blocks[j], most);
    return n * x->planes;
}
/* Results of parts that there must be memory for: of each task as many as of the longest. */
static int32_t stored(const tasks *x, int32_t most) { return (parts_of(x->longest, most) - 1) * x->count * x->planes; }
/* The least from `most` on with which there are at most `items`, and memory for their results. */
static int32_t part_for(const tasks *x, int32_t most, int32_t items) {
    while (most < x->longest && (items_of(x, most) > items || stored(x, most) > MOST_STORED)) most += 1 + most / 16;
    return most < x->longest ? most : x->longest;
}

/* Work items are claimed in their order by the SM that is free first: a heap of the times when SMs are. */
typedef struct heap {
    int32_t size, count, time[MOST_SMS];
} heap;
static void sink(heap *x, int32_t at) {
    const int32_t time = x->time[at];
    for (int32_t child; (child = 2 * at + 1) < x->size; at = child) {
        if (child + 1 < x->size && x->time[child + 1] < x->time[child]) ++child;
        if (time <= x->time[child]) break;
        x->time[at] = x->time[child];
    }
    x->time[at] = time;
}
static void claim(heap *x, int32_t time) {
    if (x->count < x->size) {
        x->time[x->count++] = time;
        for (int32_t n = x->count == x->size ? x->size / 2 : 0; n-- > 0;) sink(x, n);
    } else {
        x->time[0] += time;
        sink(x, 0);
    }
}
/* When the last work item ends, with parts of at most `most` row blocks. */
static int32_t end_of(const tasks *x, int32_t most, int32_t sms) {
    heap h = {.size = sms};
    int32_t end = 0;
    for (int32_t task = 0; task < x->count * x->planes; ++task)
        for (int32_t n = 0, blocks = x->blocks[task / x->planes], parts = parts_of(blocks, most); n < parts; ++n) {
            const int32_t steps = (blocks * (n + 1) / parts - blocks * n / parts) * x->group,
                          exchange = n + 1 == parts ? ADD * (parts - 1) : STORE;
            claim(&h, STEP * steps + ITEM + exchange);
        }
    for (int32_t n = 0; n < h.count; ++n) end = h.time[n] > end ? h.time[n] : end;
    return end;
}

/* Row blocks of a part, at most: each SM has one work item, but that of so many parts adding them would take longer
   than their steps. */
static int32_t one_for_each(const tasks *x, int32_t sms) {
    int32_t parts = 1;
    while (ADD * (parts + 1) * parts < STEP * x->longest * x->group)
        ++parts; /* ADD parts + STEP steps / parts: least */
    return part_for(x, (x->longest + parts - 1) / parts, sms);
}
/* Row blocks of a part, at most, with which a call ends soonest: one work item for each SM; or, of key blocks of
   different lengths, the longest ones are divided and SMs with short ones have two; or all are in so many parts that
   SMs have several, which pays where the heads of a group make tasks long. */
static int32_t soonest(const tasks *x, int32_t sms) {
    const int32_t one = one_for_each(x, sms), two = part_for(x, one / 2 + 1, sms + sms / 4),
                  whole = end_of(x, x->longest, sms), end_one = end_of(x, one, sms), end_two = end_of(x, two, sms);
    int32_t best = end_one < end_two ? one : two, least = end_one < end_two ? end_one : end_two;
    for (int32_t parts = 2; parts <= MOST_PARTS; ++parts) {
        const int32_t most = (x->longest + parts - 1) / parts;
        if (stored(x, most) > MOST_STORED) break;
        const int32_t end = end_of(x, most, sms);
        if (end < least) best = most, least = end;
    }
    return 32 * least > 31 * whole ? x->longest : best;
}

/* Of one call after the other most are the same, and `soonest` takes several times as long as a launch. */
static int32_t part_blocks(const tasks *x, int32_t sms) {
    static _Thread_local struct {
        tasks of;
        int32_t sms, blocks;
    } last;
    if (x->group == 1 && 2 * x->count * x->planes <= sms) return one_for_each(x, sms);
    const bool same = last.sms == sms && last.of.count == x->count && last.of.planes == x->planes &&
                      last.of.group == x->group &&
                      !memcmp(last.of.blocks, x->blocks, (size_t)x->count * sizeof *x->blocks);
    if (!same) last.of = *x, last.sms = sms, last.blocks = soonest(x, sms);
    return last.blocks;
}

/* Tasks of the last wave, where all take the same time: of `count` tasks those that not all SMs have. */
static fattni_bwd_parts last_wave(int64_t count, int64_t blocks, int64_t group, int64_t sms) {
    const int64_t rest = count % sms, waves = count / sms, task = STEP * blocks * group + ITEM;
    int64_t most = 1, end = task;
    for (int64_t parts = 2; parts <= MOST_PARTS && parts * rest <= 2 * sms; ++parts) {
        const int64_t part = STEP * fattni_ceil_div(blocks, parts) * group + ITEM + STORE;
        const int64_t with = fattni_ceil_div(parts * rest, sms) * part + ADD * (parts - 1);
        if (with < end) end = with, most = parts;
    }
    fattni_bwd_parts x = {.most = 1};
    if (rest == 0 || 64 * (task - end) < (waves + 1) * task) return x; /* less than a 64th of all */
    x.blocks = fattni_ceil_div(blocks, most), x.most = fattni_ceil_div(blocks, x.blocks), x.whole = count - rest;
    return x;
}

/* At most MOST_TASKS key blocks. */
static tasks tasks_of(const fattni_problem *p, const fattni_cuda_kernel *k, int64_t planes) {
    fattni_problem longest = *p; /* lengths are on the device */
    longest.seqlens_q.present = longest.seqlens_k.present = false;
    const fattni_band band = fattni_sequence_of(&longest, 0).band;
    tasks t = {.planes = (int32_t)planes, .group = (int32_t)p->group};
    for (int64_t j0 = 0; j0 < p->Sk; j0 += k->BN) {
        const fattni_range rows = fattni_band_rows(&band, j0, fattni_min(j0 + k->BN, p->Sk));
        const int64_t blocks = rows.end > rows.begin ? (rows.end + k->BM - 1) / k->BM - rows.begin / k->BM : 0;
        t.blocks[t.count++] = (int32_t)blocks;
        t.longest = (int32_t)fattni_max(t.longest, blocks);
    }
    return t;
}

/* Few tasks, of any mask. */
static fattni_bwd_parts few_tasks(const fattni_problem *p, const fattni_cuda_kernel *k, int64_t planes, int64_t sms) {
    const tasks t = tasks_of(p, k, planes);
    const int32_t blocks = part_blocks(&t, (int32_t)sms);
    if (blocks >= t.longest) return (fattni_bwd_parts){.most = 1};
    return (fattni_bwd_parts){.most = parts_of(t.longest, blocks), .blocks = blocks};
}

/* All tasks take the same time, and those of a head follow each other (position_of_task). */
static bool equal_tasks(const fattni_problem *p, const fattni_cuda_kernel *k) {
    const fattni_attention_args a = fattni_cuda_args_of(p);
    return a.left == FATTNI_FAR && a.right == FATTNI_FAR && !p->seqlens_q.present && !p->seqlens_k.present &&
           k->variant != FATTNI_VARIANT_BIASED;
}

fattni_bwd_parts fattni_bwd_sm90_parts(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    const int64_t planes = fattni_bwd_sm90_planes(p, k), all = fattni_bwd_sm90_blocks(p, k) * planes;
    const int64_t sms = ctx->gpu.all_sms;
    fattni_bwd_parts x = {.most = 1};
    /* Deterministic calls: the bits of a head do not depend on how many there are. */
    if (k->arch != 90 || k->cluster > 1 || fattni_bwd_by_heads(k) || p->packed || all == 0 || sms > MOST_SMS ||
        p->Sq * p->group > 1 << 24 || (p->flags & FATTN_DETERMINISTIC))
        return x;
    if (all > sms && equal_tasks(p, k))
        x = last_wave(all, fattni_ceil_div(p->Sq, k->BM), p->group, sms);
    else if (2 * all <= 3 * sms)
        x = few_tasks(p, k, planes, sms);
    if (x.most == 1) return x;
    const int64_t divided = all - x.whole;
    x.stored = (size_t)fattni_round_up(divided * 4, FATTNI_ALIGN);
    x.sums = (size_t)(divided * (x.most - 1)) * (size_t)(k->BN * (k->D + k->Dv)) * 4;
    return x;
}

/* ---- order ---- */

fattni_block_order fattni_bwd_sm90_order(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k,
                                         const fattni_bwd_parts *parts) {
    enum { WIDE_ITEM = 5 }; /* ITEM of row blocks of 128 */
    const int64_t planes = fattni_bwd_sm90_planes(p, k), blocks = fattni_bwd_sm90_blocks(p, k);
    if (k->variant != FATTNI_VARIANT_CAUSAL || k->cluster > 1 || parts->most > 1 || p->Sq * p->group > 1 << 24 ||
        (p->flags & FATTN_DETERMINISTIC) || !fattni_sm90_may_order(blocks, planes, ctx->gpu.sms))
        return (fattni_block_order){0};
    tasks t = tasks_of(p, k, planes);
    for (int32_t n = 0; n < t.count; ++n) t.blocks[n] = STEP * t.blocks[n] * t.group + (k->BM > 64 ? WIDE_ITEM : ITEM);
    return fattni_sm90_order_of(t.blocks, t.count, planes, ctx->gpu.sms);
}
