/* The work items of a Hopper backward call. Besides the main loop there is what bwd_preprocess.cu does before it and
   bwd_postprocess.cu after it. Separate kernels for these move the fp32 accumulator of dQ through memory three times,
   which takes as long as the products of short sequences. Here the key heads of a call are divided into head groups,
   whose work items are, in this order,

       search; preprocess(0);
       for each head group g:  preprocess(g + 1), main loop(g), postprocess(g - LAG);
       postprocess of the last LAG head groups

   SEARCH        the means of some heads' keys
   PREPROCESS    lse2, delta and a zeroed accumulator for some rows
   MAINLOOP      a key block and all its row blocks, or a part of these, or those of some of its query heads
                 (bwd_sm90.cuh, bwd_sm90_cluster.cuh)
   POSTPROCESS   dq = dq_scale * accumulator for some rows

   (of one head group: preprocess, main loop, postprocess), so that accumulators stay in L2: those of RING head groups,
   each in the place of an earlier one. Work items are claimed in this order and wait only for earlier ones, so there is
   no deadlock. (SEARCH has work items in clusters alone. In bwd_sm90.cuh a warp that is idle at the start does it in
   each CTA: who waits for a mean waits for a CTA that runs.) Four counters per head group say what is done. Where
   `progress` is NULL all work items are MAINLOOP, and the two kernels do the rest. Where packed sequences follow each
   other (packs) a head group has all of them.

   Include after what bwd_sm90_common.cuh asks for, and SLICE: floats of an accumulator's row block that 128 threads
   added. Tile c of 8 columns of thread x is float4 number c * 128 + x. */
#ifndef FATTNI_BWD_CUDA_SM90_BWD_SM90_SCHEDULER_H
#define FATTNI_BWD_CUDA_SM90_BWD_SM90_SCHEDULER_H

#include "bwd/cuda/sm90/bwd_sm90_common.cuh"
#include "bwd/cuda/bwd_blocks.cuh"
#include "bwd/cuda/bwd_key_mean.cuh"
#include "core/ptx/relaxed.h"

enum { RING = FATTNI_RING, LAG = FATTNI_LAG };
/* counters: of work items, but SEARCHED of key heads and ADDITIONS of dq_additions() */
enum { SEARCHED, PREPROCESSED, DQ_ADDITIONS, POSTPROCESSED };
enum { HAS_MEANS = 1 << 30 }; /* set in SEARCHED: keys of the head group have means */

DEVICE int32_t *counter_of(const fattni_bwd_sm90_args *p, int head_group, int which) {
    return p->progress + head_group * FATTNI_COUNTERS + which;
}

/* One thread: until the counter is `count`. It, and others after a barrier, may then read what was counted. */
DEVICE void wait_counter(const fattni_bwd_sm90_args *p, int head_group, int which, int count) {
    while (load_acquire(counter_of(p, head_group, which)) < count) {}
    async_proxy_fence_global();
}
/* One thread, when its additions to dQ of a task are complete. */
DEVICE void count_dq_addition(const fattni_bwd_sm90_args *p, int head_group) {
    async_proxy_fence_global();
    add_release(counter_of(p, head_group, DQ_ADDITIONS), 1);
}
/* Key heads of a head group; the last group may have fewer than the others. */
DEVICE int heads_of_group(const fattni_bwd_sm90_args *p, int head_group) {
    return min(p->schedule.head_group, p->schedule.planes - head_group * p->schedule.head_group);
}
DEVICE int dq_additions(const fattni_bwd_sm90_args *p, int head_group) {
    return 2 * (head_group + 1 < p->head_groups ? p->group_items : p->last_items);
}

/* The first of the work items at the end, which are POSTPROCESS; those of SEARCH are not counted. */
DEVICE int last_rows(const fattni_bwd_sm90_args *p) {
    return p->row_items + p->head_groups * 2 * p->rows_beside + p->schedule.tiles;
}

/* Work item `item` of the call. */
DEVICE work_item work_item_of(const fattni_bwd_sm90_args *p, int item) {
    const int rows = p->row_items, beside = p->rows_beside, number = item - p->search_items;
    work_item x = {item < p->items ? MAINLOOP : END, 0, item};
    if (!p->progress || x.kind == END) return x;
    if (number < 0) {
        x.kind = SEARCH;
    } else if (number < rows) {
        x.kind = PREPROCESS, x.number = number;
    } else if (number < last_rows(p)) {
        const int round = 2 * beside + p->group_items, last = p->head_groups - 1; /* of one g of the loop */
        const int head_group = min((number - rows) / round, last), rest = number - rows - head_group * round;
        const int keys = head_group < last ? p->group_items : p->last_items;
        x.kind = rest < beside ? PREPROCESS : rest < beside + keys ? MAINLOOP : POSTPROCESS;
        x.head_group = x.kind == PREPROCESS ? head_group + 1 : x.kind == POSTPROCESS ? head_group - LAG : head_group;
        x.number = x.kind == PREPROCESS ? rest
                   : x.kind == MAINLOOP ? head_group * p->group_items + rest - beside
                                        : rest - beside - keys;
    } else {
        const int rest = number - last_rows(p);
        x.kind = POSTPROCESS;
        x.head_group = max(p->head_groups - LAG, 0) + rest / rows;
        x.number = rest % rows;
    }
    if (x.head_group < 0 || x.head_group >= p->head_groups) x.kind = NOTHING;
    return x;
}

/* The rows of a PREPROCESS or POSTPROCESS work item, in a cluster this CTA's share of them: rows [begin, end) of the
   query heads [head, last) of its head group. */
typedef struct row_range {
    int head, last, begin, end;
} row_range;
DEVICE row_range rows_of_item(const fattni_bwd_sm90_args *p, const work_item *x) {
    const int rows = p->bwd.padded_rows;
    int head = CTAS * x->number + (int)blockIdx.x % CTAS;
    const int chunk = fattni_divide(&head, &p->by_chunks);
    row_range s;
    s.head = head * p->row_heads;
    s.last = min(s.head + p->row_heads, heads_of_group(p, x->head_group) * p->bwd.a.group);
    s.begin = chunk * p->rows_at_once;
    s.end = min(s.begin + p->rows_at_once, rows);
    return s;
}
/* Query head number `head` of a head group. */
typedef struct query_head {
    int b, h;
} query_head;
DEVICE query_head head_of(const fattni_bwd_sm90_args *p, int head_group, int head) {
    const int group = p->bwd.a.group, first = head_group * p->schedule.head_group;
    query_head at;
    if (BIASED) {
        const key_head key = key_head_of(p, first + head / group);
        at.b = key.b, at.h = key.hk * group + head % group;
    } else { /* planes are in the order of key_head_of */
        at.b = first * group + head;
        at.h = fattni_divide(&at.b, &p->by_heads);
    }
    return at;
}
/* Of sequence b; packed: of the buffers, see place_of_rows. */
DEVICE int sequence_rows(const fattni_bwd_args *bwd, int b) {
    const fattni_attention_args *const a = &bwd->a;
    return packs(bwd) ? bwd->padded_rows : BANDS ? sequence_of(a, b).Sq : a->Sq;
}
DEVICE float *accumulator_of(const fattni_bwd_sm90_args *p, int head_group, int head) {
    const int64_t place = (int64_t)(head_group % RING) * p->schedule.head_group * p->bwd.a.group + head;
    return p->bwd.dq_accumulator + place * p->bwd.padded_rows * D;
}

/* ---- the mean of the keys ---- */

/* What bwd_key_mean.cu does as a kernel, from fewer keys: 32 of a short sequence, of a long one 1 of 128, at most 512,
   in eights. A warp has a head, a lane two neighbouring channels of 64. Other calls' means are found before, by that
   kernel: of packed sequences, of which a row range may have many, and in kernels with features, where there are no
   registers for it, and which with a softcap need them before (rows/bwd_capped_sums.cuh).

   The first dQ of a call waits for it. So three warps share a CTA's first head, if that is of the first head group
   (bwd_sm90_items.cuh). The bits are those of one warp; so products that are added are explicit (fmaf). */
enum {
    SEARCHES = !GENERAL && !BIASED,
    FEWEST_KEYS = 32,
    MOST_KEYS = 512,
    PART_KEYS = 8 /* each part bounds the mean */
};

DEVICE int finds_means(const fattni_bwd_sm90_args *p) { return SEARCHES && p->finds_means; }

/* The mean of a channel of `count` keys from sums of them and of their squares; to z (bwd_key_mean.cuh). */
DEVICE float mean_of_sums(float *z, const mean_range *range, float sum, float square, int count) {
    if (count == 0) return 0.0f;
    const float weight = __fdividef(1.0f, (float)count), mean = sum * weight;
    const float used = channel_mean(z, mean, fmaxf(fmaf(square, weight, -mean * mean), 0.0f), count);
    return used == 0.0f ? used : bounded_mean(range, used);
}
DEVICE float sum_of_warp(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(ALL_LANES, x, lanes);
    return x;
}

/* What is known of two channels: sums of keys and of their squares; where the mean may be (bwd_key_mean.cuh), of both
   in a word, since registers are few. */
typedef struct channel_pair {
    float2 sum, square;
    uint32_t least, most;
} channel_pair;
DEVICE channel_pair no_keys(void) {
    const channel_pair x = {{0.0f, 0.0f}, {0.0f, 0.0f}, pack(-INFINITY, -INFINITY), pack(INFINITY, INFINITY)};
    return x;
}
/* Of a part of the sample: from its sums of both channels, and of their squares. */
DEVICE channel_pair known_of_part(float4 sums) {
    mean_range low = any_mean(), high = any_mean();
    bound_mean(&low, 0.0f, sums.x, sums.z, (float)PART_KEYS);
    bound_mean(&high, 0.0f, sums.y, sums.w, (float)PART_KEYS);
    const channel_pair x = {{sums.x, sums.y}, {sums.z, sums.w}, pack(low.least, high.least), pack(low.most, high.most)};
    return x;
}
DEVICE void join_channels(channel_pair *x, const channel_pair *part) {
    const float2 least = unpack(x->least), most = unpack(x->most), low = unpack(part->least), high = unpack(part->most);
    x->least = pack(fmaxf(least.x, low.x), fmaxf(least.y, low.y));
    x->most = pack(fminf(most.x, high.x), fminf(most.y, high.y));
    x->sum.x += part->sum.x, x->sum.y += part->sum.y;
    x->square.x += part->square.x, x->square.y += part->square.y;
}
/* Their means; to z. */
DEVICE float2 means_of_pair(float *z, const channel_pair *x, int count) {
    const float2 least = unpack(x->least), most = unpack(x->most);
    const mean_range low = {least.x, most.x}, high = {least.y, most.y};
    return make_float2(mean_of_sums(z, &low, x->sum.x, x->square.x, count),
                       mean_of_sums(z, &high, x->sum.y, x->square.y, count));
}

/* The keys of a head whose mean is taken. */
typedef struct sample {
    const half_type *keys; /* the first that rows see */
    int64_t row;
    int count, stride; /* see sampled_key; a multiple of PART_KEYS */
} sample;
DEVICE sample sample_of(const fattni_bwd_args *bwd, const key_head *at) {
    const fattni_attention_args *const a = &bwd->a;
    const sequence s = BANDS ? sequence_of(a, at->b) : whole_sequence(a, at->b, CAUSAL);
    const interval seen = keys_seen_by(&s, 0, s.Sq);
    const int keys = max(seen.end - seen.begin, 0);
    const int most = min(keys, max((int)FEWEST_KEYS, min(keys / 128, (int)MOST_KEYS))), count = most & -PART_KEYS;
    const half_type *const head = (const half_type *)a->k.p + at->b * a->k.b + at->hk * a->k.h;
    const sample x = {head + seen.begin * a->k.row, a->k.row, count, count ? keys / count : 1};
    return x;
}
/* What a part says of the two channels from `channel` on. */
DEVICE channel_pair part_of_sample(const sample *s, int channel, int part) {
    const half_type *const from = s->keys + channel;
    const int five = 5 % s->stride;
    int key = part * PART_KEYS * s->stride, rest = part * PART_KEYS * 5 % s->stride; /* sampled_key is their sum */
    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    uint32_t pairs[PART_KEYS];
#pragma unroll
    for (int n = 0; n < PART_KEYS; ++n) {
        pairs[n] = *(const uint32_t *)(from + (key + rest) * s->row);
        key += s->stride, rest += five;
        if (rest >= s->stride) rest -= s->stride;
    }
#pragma unroll
    for (int n = 0; n < PART_KEYS; ++n) {
        const float2 y = unpack(pairs[n]);
        sums.x += y.x, sums.y += y.y;
        sums.z = fmaf(y.x, y.x, sums.z), sums.w = fmaf(y.y, y.y, sums.w);
    }
    return known_of_part(sums);
}
/* This lane's first channel in a pass over 64 of them; beyond D it reads the first ones. */
DEVICE int channel_of(int pass) { return pass * 64 + (int)threadIdx.x % 32 * 2; }
/* A pass: the means of its channels, to memory; one warp. Gives its part of z. */
DEVICE float store_means(const fattni_bwd_args *bwd, const key_head *at, const sample *s, int pass,
                         const channel_pair *x) {
    const int channel = channel_of(pass), plane = at->b * bwd->a.Hkv + at->hk;
    float z = 0.0f;
    *(float2 *)(bwd->key_mean + (int64_t)plane * bwd->key_mean_pitch + channel) =
        means_of_pair(&z, x, channel < bwd->a.D ? s->count : 0);
    return sum_of_warp(z);
}
/* All passes are done: whether the head's means are used, to memory, and the head is counted. One warp. */
DEVICE void end_search(const fattni_bwd_sm90_args *p, int plane, const key_head *at, const sample *s, float z) {
    const int use = shows_means(z, p->bwd.a.D, s->count), head_group = plane / p->schedule.head_group;
    if (is_leader()) p->bwd.key_mean_used[at->b * p->bwd.a.Hkv + at->hk] = use;
    if (use) async_proxy_fence_global(); /* the producer has the mean copied */
    __syncwarp();
    if (is_leader()) {
        if (use) atomicOr(counter_of(p, head_group, SEARCHED), HAS_MEANS);
        add_release(counter_of(p, head_group, SEARCHED), 1);
    }
    __syncwarp();
}
/* SEARCH: the mean of the keys of a plane of the schedule. One warp. */
DEVICE void search(const fattni_bwd_sm90_args *p, int plane) {
    if (plane >= p->schedule.planes) return;
    const key_head at = key_head_of(p, plane);
    const sample s = sample_of(&p->bwd, &at);
    float z = 0.0f;
#pragma unroll 1
    for (int pass = 0; pass < PANELS; ++pass) {
        const int channel = channel_of(pass);
        channel_pair x = no_keys();
#pragma unroll 1
        for (int part = 0; part < s.count / PART_KEYS; ++part) {
            const channel_pair y = part_of_sample(&s, channel < p->bwd.a.D ? channel : 0, part);
            join_channels(&x, &y);
        }
        z += store_means(&p->bwd, &at, &s, pass, &x);
    }
    end_search(p, plane, &at, &s, z);
}

/* SEARCHED at the time: mostly all heads are searched before it is asked for, and nobody waits for this load. */
DEVICE int searched(const fattni_bwd_sm90_args *p, int head_group) {
    return load_relaxed_integer(counter_of(p, head_group, SEARCHED));
}
/* Whether keys of a head group have means, once that is known; `seen`: what `searched` gave. The caller may then read
   and copy them. */
DEVICE int group_has_means(const fattni_bwd_sm90_args *p, int head_group, int seen) {
    const int heads = heads_of_group(p, head_group);
    while ((seen & ~HAS_MEANS) < heads) seen = load_acquire(counter_of(p, head_group, SEARCHED));
    if (!(seen & HAS_MEANS)) return 0;
    seen = load_acquire(counter_of(p, head_group, SEARCHED));
    async_proxy_fence_global();
    return seen & HAS_MEANS;
}

/* One thread: until all rows of a task's head group are preprocessed. Returns what is known of its means by then. */
DEVICE int wait_preprocessed(const fattni_bwd_sm90_args *p, const task *t) {
    const int seen = finds_means(p) ? searched(p, t->head_group) : 0; /* both loads at once */
    if (p->progress) wait_counter(p, t->head_group, PREPROCESSED, p->row_items * CTAS);
    return seen;
}
/* One thread: whether the task's keys have a mean; `columns` of it, from `column` on, to shared memory. Who waits for
   mean_full has both, and `more` bytes that the caller then loads. Only dQ needs it, so the first tiles do not wait for
   the search. */
DEVICE int load_mean(const fattni_bwd_sm90_args *p, const task *t, int seen, int column, int columns, int more,
                     uint32_t shared) {
    const int some = !finds_means(p) || group_has_means(p, t->head_group, seen);
    const float *const mean = some ? key_mean_of(&p->bwd, t->b, t->hk) : 0;
    const uint32_t full = MEMBER_ADDRESS(shared, mean_full);
    store_shared_word(MEMBER_ADDRESS(shared, has_mean), mean != 0);
    mbarrier_expect(full, mean ? columns * 4 + more : 0);
    if (mean) bulk_load(MEMBER_ADDRESS(shared, key_mean), mean + column, columns * 4, full);
    return mean != 0;
}

/* x.y of a row of which each of `lanes` neighbours has 8 columns; x more exact by its `rest` (o_rest.h) where has_rest.
   All lanes of a warp. */
DEVICE float dot_of_row(const uint4 *x, const uint4 *y, const uint2 *rest, int has_rest, int lanes) {
    float sum = 0.0f;
    const uint32_t *const a = (const uint32_t *)x, *const b = (const uint32_t *)y;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        float2 u = unpack(a[n]);
        const float2 v = unpack(b[n]);
        if (has_rest) u = exact_pair(u, (n < 2 ? rest->x : rest->y) >> n % 2 * 16);
        sum += u.x * v.x;
        sum += u.y * v.y;
    }
#pragma unroll
    for (int step = lanes / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
    return sum;
}

#endif
