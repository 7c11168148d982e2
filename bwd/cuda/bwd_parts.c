/* Into how many work items a Hopper backward kernel divides a key block: its row blocks, or its query heads. A call of
   few heads has fewer key blocks than there are SMs, or is as slow as the longest of them below a diagonal; and of a
   full mask, whose key blocks take the same time, the last ones leave SMs without work. Parts of a key block run on
   several SMs, and cost the exchange of their dK and dV (bwd_sm90_items.cuh, join_parts). And in which order whole key
   blocks below a diagonal are claimed (core/cuda/order.c), and a task has its row blocks. */
#include "bwd/cuda/bwd_cuda.h"
#include "core/cuda/sm90.h"

#include <string.h>

/* In quarters of a step (a row block of a head), measured at head_dim 128: what a work item takes beside its steps,
   what a part takes to store dK and dV, and what the last one takes to add those of each other part. */
enum { STEP = 4, ITEM = 12, STORE = 4, ADD = 6 };
enum { MOST_SMS = 256, MOST_WAVES = 4, MOST_TASKS = MOST_WAVES * MOST_SMS }; /* of larger GPUs no call is divided */
/* Parts of a task: of those that all take the same time; where SMs have several. Results of parts that there is memory
   for, of which each has 128 KiB at head_dim 128. */
enum { MOST_OF_LAST = 8, MOST_PARTS = 32, MOST_STORED = 2 * MOST_SMS };

/* A call's tasks: of each of `planes` heads `count` key blocks with so many row blocks, each of `group` steps. */
typedef struct tasks {
    int32_t count, planes, group, longest;
    int32_t blocks[MOST_TASKS];
} tasks;

/* Tasks from number `whole` on are divided. Of a part at most: row blocks, of all heads of the group; or query heads,
   else 0. Task n has key block n / planes. */
typedef struct division {
    int32_t whole, blocks, heads;
} division;

static int32_t parts_of(const tasks *x, int32_t task, division d) {
    const int32_t blocks = x->blocks[task / x->planes];
    if (task < d.whole) return 1;
    if (d.heads) return (x->group + d.heads - 1) / d.heads;
    return blocks > d.blocks ? (blocks + d.blocks - 1) / d.blocks : 1;
}
/* Steps of part n of `parts` of a task. */
static int32_t steps_of(const tasks *x, int32_t task, division d, int32_t parts, int32_t n) {
    const int32_t blocks = x->blocks[task / x->planes];
    if (parts > 1 && d.heads) return blocks * (n > 0 ? d.heads : x->group - (parts - 1) * d.heads);
    return (blocks * (n + 1) / parts - blocks * n / parts) * x->group;
}
/* Row blocks of the longest task from number `first` on. */
static int32_t longest_from(const tasks *x, int32_t first) {
    int32_t longest = 0;
    for (int32_t j = first / x->planes; j < x->count; ++j) longest = x->blocks[j] > longest ? x->blocks[j] : longest;
    return longest;
}
static int32_t items_of(const tasks *x, division d) {
    int32_t n = 0;
    for (int32_t task = 0; task < x->count * x->planes; ++task) n += parts_of(x, task, d);
    return n;
}
static int32_t most_parts_of(const tasks *x, division d) {
    int32_t most = 1;
    for (int32_t task = d.whole; task < x->count * x->planes; task += x->planes)
        if (parts_of(x, task, d) > most) most = parts_of(x, task, d);
    return most;
}
/* Results of parts that there must be memory for: of each divided task as many as of the longest. */
static int32_t stored(const tasks *x, division d) {
    return (most_parts_of(x, d) - 1) * (x->count * x->planes - d.whole);
}
/* Parts of the fewest row blocks, `most` or more, of which there are at most `items`, and memory for their results. */
static division part_for(const tasks *x, int32_t most, int32_t items) {
    division d = {0, most, 0};
    while (d.blocks < x->longest && (items_of(x, d) > items || stored(x, d) > MOST_STORED))
        d.blocks += 1 + d.blocks / 16;
    return d;
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
/* When a work item ends that takes so long, and waits until others have ended. */
static int32_t claim(heap *x, int32_t time, int32_t others) {
    const bool free = x->count < x->size;
    const int32_t own = (free ? 0 : x->time[0]) + time, end = own > others ? own : others;
    x->time[free ? x->count++ : 0] = end;
    if (!free) sink(x, 0);
    for (int32_t n = free && x->count == x->size ? x->size / 2 : 0; n-- > 0;) sink(x, n);
    return end;
}
/* When the last work item ends. */
static int32_t end_of(const tasks *x, division d, int32_t sms) {
    heap h = {.size = sms};
    int32_t end = 0;
    for (int32_t task = 0; task < x->count * x->planes; ++task)
        for (int32_t n = 0, parts = parts_of(x, task, d), others = 0; n < parts; ++n) {
            const bool last = n + 1 == parts;
            const int32_t exchange = last ? ADD * (parts - 1) : STORE,
                          time = STEP * steps_of(x, task, d, parts, n) + ITEM + exchange;
            const int32_t ends = claim(&h, time, last ? others : 0);
            others = ends > others ? ends : others;
            end = ends > end ? ends : end;
        }
    return end;
}

/* Each SM has one work item, but not one of so many parts that adding them would take longer than their steps. */
static division one_for_each(const tasks *x, int32_t sms) {
    int32_t parts = 1;
    while (ADD * (parts + 1) * parts < STEP * x->longest * x->group)
        ++parts; /* ADD parts + STEP steps / parts: least */
    return part_for(x, (x->longest + parts - 1) / parts, sms);
}
/* A division, and when a call ends with it. */
typedef struct candidate {
    division d;
    int32_t end;
} candidate;
/* Memory takes a 64th of a step for each result that is stored. */
static void consider(const tasks *x, division d, int32_t sms, candidate *best) {
    const int32_t results = stored(x, d),
                  end = results > MOST_STORED ? INT32_MAX : end_of(x, d, sms) + STEP * results / 64;
    if (end < best->end) *best = (candidate){d, end};
}
/* The division with which a call ends soonest: one work item for each SM; or, of key blocks of different lengths, the
   longest ones are divided and SMs with short ones have two; or all are in so many parts that SMs have several, which
   pays where the heads of a group make tasks long; or so are those that are left when each SM has had as many as the
   others. Parts of heads have a key block's length, the short ones of which fill the end. */
static division soonest(const tasks *x, int32_t sms) {
    const division whole = {0, x->longest, 0}, one = one_for_each(x, sms);
    const int32_t end = end_of(x, whole, sms), all = x->count * x->planes;
    candidate best = {whole, end - (end + 31) / 32}; /* less is not worth it */
    consider(x, one, sms, &best);
    consider(x, part_for(x, one.blocks / 2 + 1, sms + sms / 4), sms, &best);
    for (int32_t parts = 2; parts <= MOST_PARTS; parts += 1 + parts / 8)
        for (int32_t first = 0; first < all; first += sms) {
            const int32_t longest = longest_from(x, first);
            if (longest == 0) continue;
            if (parts <= x->group) consider(x, (division){first, 0, (x->group + parts - 1) / parts}, sms, &best);
            consider(x, (division){first, (longest + parts - 1) / parts, 0}, sms, &best);
        }
    return best.d;
}

/* Tasks of the last wave, where all take the same time: of `count` tasks those that not all SMs have. */
static fattni_bwd_parts last_wave(int64_t count, int64_t blocks, int64_t group, int64_t sms) {
    const int64_t rest = count % sms, waves = count / sms, task = STEP * blocks * group + ITEM;
    int64_t most = 1, end = task;
    for (int64_t parts = 2; parts <= MOST_OF_LAST && parts * rest <= 2 * sms; ++parts) {
        const int64_t part = STEP * fattni_ceil_div(blocks, parts) * group + ITEM + STORE;
        const int64_t with = fattni_ceil_div(parts * rest, sms) * part + ADD * (parts - 1);
        if (with < end) end = with, most = parts;
    }
    fattni_bwd_parts x = {.most = 1};
    if (rest == 0 || 64 * (task - end) < (waves + 1) * task) return x; /* less than a 64th of all */
    x.blocks = fattni_ceil_div(blocks, most), x.most = fattni_ceil_div(blocks, x.blocks), x.whole = count - rest;
    return x;
}

/* What the tasks of a call depend on. */
typedef struct shape {
    fattni_band band;
    int64_t BM, BN, planes, group, sms;
} shape;
static shape shape_of(const fattni_problem *p, const fattni_cuda_kernel *k, int64_t planes, int64_t sms) {
    fattni_problem longest = *p; /* lengths are on the device */
    longest.seqlens_q.present = longest.seqlens_k.present = false;
    return (shape){fattni_sequence_of(&longest, 0).band, k->BM, k->BN, planes, p->group, sms};
}
/* At most MOST_TASKS key blocks. */
static tasks tasks_of(const shape *x) {
    tasks t = {.planes = (int32_t)x->planes, .group = (int32_t)x->group};
    for (int64_t j0 = 0; j0 < x->band.Sk; j0 += x->BN) {
        const fattni_range rows = fattni_band_rows(&x->band, j0, fattni_min(j0 + x->BN, x->band.Sk));
        const int64_t blocks = rows.end > rows.begin ? (rows.end + x->BM - 1) / x->BM - rows.begin / x->BM : 0;
        t.blocks[t.count++] = (int32_t)blocks;
        t.longest = (int32_t)fattni_max(t.longest, blocks);
    }
    return t;
}

/* Few tasks, of any mask. */
static fattni_bwd_parts divided(const shape *x) {
    const tasks t = tasks_of(x);
    const int32_t sms = (int32_t)x->sms;
    const bool few = t.group == 1 && 2 * t.count * t.planes <= sms;
    const division d = few ? one_for_each(&t, sms) : soonest(&t, sms);
    const int64_t most = most_parts_of(&t, d);
    if (most == 1) return (fattni_bwd_parts){.most = 1};
    return (fattni_bwd_parts){.whole = d.whole, .most = most, .blocks = d.blocks, .heads = d.heads, .together = true};
}
/* Most calls of a thread are of a few shapes, and `soonest` takes up to 0.5 ms. */
static fattni_bwd_parts few_tasks(const fattni_problem *p, const fattni_cuda_kernel *k, int64_t planes, int64_t sms) {
    enum { KEPT = 8 };
    static _Thread_local struct {
        shape of;
        fattni_bwd_parts parts;
    } kept[KEPT];
    static _Thread_local unsigned next;
    const shape x = shape_of(p, k, planes, sms);
    for (int n = 0; n < KEPT; ++n)
        if (!memcmp(&kept[n].of, &x, sizeof x)) return kept[n].parts;
    const unsigned n = next++ % KEPT;
    kept[n].of = x;
    return kept[n].parts = divided(&x);
}

/* All tasks take the same time, and those of a head follow each other (position_of_task). */
static bool equal_tasks(const fattni_problem *p, const fattni_cuda_kernel *k) {
    const fattni_attention_args a = fattni_cuda_args_of(p);
    return a.left == FATTNI_FAR && a.right == FATTNI_FAR && !p->seqlens_q.present && !p->seqlens_k.present &&
           k->variant != FATTNI_VARIANT_BIASED;
}

/* Up to how many tasks of different lengths may be divided. All of them are one head group, whose rows nothing runs
   beside, and else mostly several where there are more than two and a half for each SM: so those only of long
   sequences. More than one and a half only below a diagonal, where tasks are claimed as they are numbered here. */
static int64_t most_tasks(const fattni_problem *p, int64_t blocks, int64_t sms) {
    enum { LONG_BLOCKS = 32 };
    if (p->group == 1 || blocks <= FATTNI_SHORT_BLOCKS || fattni_cuda_args_of(p).right == FATTNI_FAR)
        return 3 * sms / 2;
    return blocks <= LONG_BLOCKS ? 5 * sms / 2 : MOST_WAVES * sms;
}

fattni_bwd_parts fattni_bwd_sm90_parts(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    const int64_t planes = fattni_bwd_sm90_planes(p, k), blocks = fattni_bwd_sm90_blocks(p, k), all = blocks * planes;
    const int64_t sms = ctx->gpu.all_sms;
    fattni_bwd_parts x = {.most = 1};
    /* Deterministic calls: the bits of a head do not depend on how many there are. */
    if (k->arch != 90 || k->cluster > 1 || fattni_bwd_by_heads(k) || p->packed || all == 0 || sms > MOST_SMS ||
        p->Sq * p->group > 1 << 24 || (p->flags & FATTN_DETERMINISTIC))
        return x;
    if (all > sms && equal_tasks(p, k))
        x = last_wave(all, fattni_ceil_div(p->Sq, k->BM), p->group, sms);
    else if (all <= most_tasks(p, blocks, sms))
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
    const shape of = shape_of(p, k, planes, ctx->gpu.sms);
    tasks t = tasks_of(&of);
    for (int32_t n = 0; n < t.count; ++n) t.blocks[n] = STEP * t.blocks[n] * t.group + (k->BM > 64 ? WIDE_ITEM : ITEM);
    return fattni_sm90_order_of(t.blocks, t.count, planes, ctx->gpu.sms);
}

/* Tasks of different lengths are at different heads soon. Then what they read and what they add to dQ does not stay in
   L2; it does where each row block of all heads comes before the next one. Below a diagonal all tasks are at the same
   rows if those of every second wave turn round; parts of rows are not. Not with windows, whose tasks have the same
   length; nor can kernels with features, and of head_dim 64 others than CAUSAL (bwd_sm90.cuh, GOES_BY_ROWS). */
void fattni_bwd_sm90_order_rows(fattni_bwd_sm90_args *x, const fattni_problem *p, const fattni_cuda_kernel *k) {
    enum { MANY_HEADS = 8 }; /* from which on it pays without turning */
    const fattni_attention_args *const a = &x->bwd.a;
    const bool can = k->cluster == 1 && k->variant != FATTNI_VARIANT_GENERAL && k->variant != FATTNI_VARIANT_CAPPED &&
                     (k->D > 64 || k->variant == FATTNI_VARIANT_CAUSAL) && a->left == FATTNI_FAR,
               whole = x->most_parts == 1 || x->part_heads || x->whole > 0,
               of_lengths = p->packed || p->seqlens_q.present || p->seqlens_k.present;
    x->turns = can && whole && !of_lengths && a->right < FATTNI_FAR && p->group > 1 &&
               x->schedule.blocks > FATTNI_SHORT_BLOCKS && x->schedule.order.count == 0 &&
               !(p->flags & FATTN_DETERMINISTIC);
    x->by_rows = can && (x->turns || (p->group >= MANY_HEADS && k->D > 64));
}
