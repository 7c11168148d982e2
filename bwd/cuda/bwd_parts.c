/* Into how many work items a Hopper backward kernel divides the row blocks of a key block. A call of few heads has
   fewer key blocks than there are SMs, or is as slow as the longest of them below a diagonal. Parts of a key block run
   on several SMs, and cost the exchange of their dK and dV (bwd_sm90_items.cuh, join_parts). */
#include "bwd/cuda/bwd_cuda.h"

/* In quarters of a step (a row block of a head), measured at head_dim 128: what a work item takes beside its steps,
   what a part takes to store dK and dV, and what the last one takes to add those of each other part. */
enum { STEP = 4, ITEM = 12, STORE = 4, ADD = 6 };
enum { MOST_SMS = 256, MOST_TASKS = 2 * MOST_SMS }; /* of larger GPUs no call is divided */

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
/* The least from `most` on with which there are at most `items`. */
static int32_t part_for(const tasks *x, int32_t most, int32_t items) {
    while (most < x->longest && items_of(x, most) > items) most += 1 + most / 16;
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
    for (int32_t j = 0; j < x->count; ++j)
        for (int32_t n = 0, blocks = x->blocks[j], parts = parts_of(blocks, most); n < parts; ++n) {
            const int32_t steps = (blocks * (n + 1) / parts - blocks * n / parts) * x->group,
                          exchange = n + 1 == parts ? ADD * (parts - 1) : STORE;
            for (int32_t plane = 0; plane < x->planes; ++plane) claim(&h, STEP * steps + ITEM + exchange);
        }
    for (int32_t n = 0; n < h.count; ++n) end = h.time[n] > end ? h.time[n] : end;
    return end;
}

/* Of a part, at most. Each SM has one work item, but that of so many parts adding them would take longer than their
   steps; or, of key blocks of different lengths, the longest ones are divided, and SMs with short ones have two. */
static int32_t part_blocks(const tasks *x, int32_t sms) {
    int32_t parts = 1;
    while (ADD * (parts + 1) * parts < STEP * x->longest * x->group)
        ++parts; /* ADD parts + STEP steps / parts: least */
    const int32_t one = part_for(x, (x->longest + parts - 1) / parts, sms);
    if (2 * x->count * x->planes <= sms) return one;
    const int32_t two = part_for(x, one / 2 + 1, sms + sms / 4), whole = end_of(x, x->longest, sms),
                  end_one = end_of(x, one, sms), end_two = end_of(x, two, sms);
    const int32_t least = end_one < end_two ? end_one : end_two;
    return 32 * least > 31 * whole ? x->longest : end_one < end_two ? one : two;
}

fattni_bwd_parts fattni_bwd_sm90_parts(const fattn_ctx *ctx, const fattni_problem *p, const fattni_cuda_kernel *k) {
    const int64_t planes = fattni_bwd_sm90_planes(p, k), all = fattni_bwd_sm90_blocks(p, k) * planes;
    const int64_t sms = ctx->gpu.all_sms;
    fattni_bwd_parts x = {.most = 1};
    /* Deterministic calls: the bits of a head do not depend on how many there are. */
    if (k->arch != 90 || k->cluster > 1 || fattni_bwd_by_heads(k) || p->packed || all == 0 || 2 * all > 3 * sms ||
        sms > MOST_SMS || p->Sq * p->group > 1 << 24 || (p->flags & FATTN_DETERMINISTIC))
        return x;
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
    const int32_t blocks = part_blocks(&t, (int32_t)sms);
    if (blocks >= t.longest) return x;
    x.most = parts_of(t.longest, blocks), x.blocks = blocks;
    x.stored = (size_t)fattni_round_up(all * 4, FATTNI_ALIGN);
    x.sums = (size_t)(all * (x.most - 1)) * (size_t)(k->BN * (k->D + k->Dv)) * 4;
    return x;
}
