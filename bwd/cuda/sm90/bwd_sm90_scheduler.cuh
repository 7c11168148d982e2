/* The work items of a Hopper backward call. Besides the main loop there is what bwd_preprocess.cu does before it and
   bwd_postprocess.cu after it. Separate kernels for these move the fp32 accumulator of dQ through memory three times,
   which takes as long as the products of short sequences. Here the key heads of a call are divided into head groups,
   whose work items are, in this order,

       search; preprocess(0);
       for each head group g:  preprocess(g + 1), main loop(g), postprocess(g - LAG);
       postprocess of the last LAG head groups

   SEARCH        the means of some heads' keys
   PREPROCESS    lse2, delta and a zeroed accumulator for some rows
   MAINLOOP      a key block and all its row blocks, or a part of these (bwd_sm90.cuh, bwd_sm90_cluster.cuh)
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
/* The same for all `threads`. */
DEVICE void wait_counter_all(const fattni_bwd_sm90_args *p, int head_group, int which, int count, int thread,
                             int threads) {
    if (thread == 0) wait_counter(p, head_group, which, count);
    __syncwarp();
    named_barrier_sync(ROWS_DONE, threads);
}
/* One thread, when its additions to dQ of a task are complete. */
DEVICE void count_dq_addition(const fattni_bwd_sm90_args *p, int head_group) {
    async_proxy_fence_global();
    add_release(counter_of(p, head_group, DQ_ADDITIONS), 1);
}
/* All `threads`, after what they wrote for a work item of rows. */
DEVICE void count_work_item(const fattni_bwd_sm90_args *p, int head_group, int which, int thread, int threads) {
    async_proxy_fence_global();
    named_barrier_sync(ROWS_DONE, threads);
    if (thread == 0) add_release(counter_of(p, head_group, which), 1);
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
    const int rows = p->bwd.padded_rows, chunk = CTAS * x->number + (int)blockIdx.x % CTAS;
    row_range s;
    s.head = chunk / p->row_chunks * p->row_heads;
    s.last = min(s.head + p->row_heads, heads_of_group(p, x->head_group) * p->bwd.a.group);
    s.begin = chunk % p->row_chunks * p->rows_at_once;
    s.end = min(s.begin + p->rows_at_once, rows);
    return s;
}
/* Where rows of a row block are: row i of a head's padded rows is row i + shift of its buffers, up to `end`. */
typedef struct row_place {
    int b, shift, end;
} row_place;
static_assert(!PACKS || CTAS == 1, "rows that a warp has at once are in one row block");
/* All lanes of a warp ask for the same row block, that of row i0. b: of rows that are not packed; end: at most. */
DEVICE row_place place_of_rows(const fattni_bwd_args *bwd, int b, int i0, int end) {
    row_place x = {b, 0, end};
    if (!packs(bwd)) return x;
    const fattni_attention_args *const a = &bwd->a;
    const int block = i0 / BM, lane = (int)threadIdx.x % 32;
    x.b = 0;                             /* its first block is number q0 / BM + b, as row_base has it */
    for (int count = a->B; count > 1;) { /* sequences from x.b on that may have it: each lane asks for one in `step` */
        const int step = (count + 31) / 32, n = lane * step;
        const int q0 = n < count ? max(0, min(integer_at(&a->cu_seqlens_q, x.b + n), a->rows_q)) : 0;
        const int before = n < count && q0 / BM + x.b + n <= block;
        const int last = max(0, __popc(__ballot_sync(ALL_LANES, before)) - 1) * step;
        x.b += last, count = min(step, count - last);
    }
    const sequence s = sequence_of(a, x.b);
    const int first = (s.q0 / BM + x.b) * BM;
    x.shift = s.q0 - first, x.end = i0 < first ? 0 : min(end, first + s.Sq);
    return x;
}
/* Query head number `head` of a head group. */
typedef struct query_head {
    int b, h;
} query_head;
DEVICE query_head head_of(const fattni_bwd_sm90_args *p, int head_group, int head) {
    const int plane = head_group * p->schedule.head_group + head / p->bwd.a.group;
    const key_head key = key_head_of(p, plane);
    const query_head at = {key.b, key.hk * p->bwd.a.group + head % p->bwd.a.group};
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

/* What bwd_key_mean.cu does as a kernel, from fewer keys: 64 of a short sequence, of a long one 1 of 128, at most 512,
   in sixteens. A warp has a head, a lane 2 or 4 neighbouring channels. Other calls' means are found before, by that
   kernel: of packed sequences, of which a row range may have many, and in kernels with features, where there are no
   registers for it, and which with a softcap need them before (rows/bwd_capped_sums.cuh).

   The first dQ of a call waits for it, and at that time rows load so much that each load takes thousands of cycles. So
   all keys are asked for at once where there is shared memory for STAGED_KEYS, and registers: not above head_dim 128.
   (By bulk copies: with cp.async in a kernel ptxas puts dummy loads before the barriers of its main loop.) */
enum {
    SEARCHES = !GENERAL && !BIASED,
    FEWEST_KEYS = 64,
    MOST_KEYS = 512,
    STAGED_KEYS = 128,
    CHANNEL_PAIRS = D > 64 && D <= 128 ? 2 : 1,     /* of a lane */
    KEYS_AT_ONCE = D > 128 ? 8 : 16 / CHANNEL_PAIRS /* a part that bounds the mean */
};

DEVICE int finds_means(const fattni_bwd_sm90_args *p) { return SEARCHES && p->finds_means; }

/* The mean of a channel of `count` keys from sums of them and of their squares; to z (bwd_key_mean.cuh). */
DEVICE float mean_of_sums(float *z, const mean_range *range, float sum, float square, int count) {
    if (count == 0) return 0.0f;
    const float weight = __fdividef(1.0f, (float)count), mean = sum * weight;
    const float used = channel_mean(z, mean, fmaxf(square * weight - mean * mean, 0.0f), count);
    return used == 0.0f ? used : bounded_mean(range, used);
}
DEVICE float sum_of_warp(float x) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x += __shfl_xor_sync(ALL_LANES, x, lanes);
    return x;
}

/* This lane's channels of a key. */
DEVICE void load_channels(uint32_t pairs[CHANNEL_PAIRS], const half_type *from) {
    if (CHANNEL_PAIRS == 1) {
        pairs[0] = *(const uint32_t *)from;
    } else {
        const uint2 x = *(const uint2 *)from;
        pairs[0] = x.x, pairs[CHANNEL_PAIRS - 1] = x.y;
    }
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
/* A part of the sample. */
DEVICE void add_part(channel_pair x[CHANNEL_PAIRS], const uint32_t pairs[KEYS_AT_ONCE][CHANNEL_PAIRS]) {
#pragma unroll
    for (int e = 0; e < CHANNEL_PAIRS; ++e) {
        float2 sum = make_float2(0.0f, 0.0f), square = sum;
#pragma unroll
        for (int n = 0; n < KEYS_AT_ONCE; ++n) {
            const float2 y = unpack(pairs[n][e]);
            sum.x += y.x, sum.y += y.y;
            square.x += y.x * y.x, square.y += y.y * y.y;
        }
        const float2 least = unpack(x[e].least), most = unpack(x[e].most);
        mean_range low = {least.x, most.x}, high = {least.y, most.y};
        bound_mean(&low, 0.0f, sum.x, square.x, (float)KEYS_AT_ONCE);
        bound_mean(&high, 0.0f, sum.y, square.y, (float)KEYS_AT_ONCE);
        x[e].least = pack(low.least, high.least), x[e].most = pack(low.most, high.most);
        x[e].sum.x += sum.x, x[e].sum.y += sum.y;
        x[e].square.x += square.x, x[e].square.y += square.y;
    }
}
/* Their means; to z. */
DEVICE float2 means_of_pair(float *z, const channel_pair *x, int count) {
    const float2 least = unpack(x->least), most = unpack(x->most);
    const mean_range low = {least.x, most.x}, high = {least.y, most.y};
    return make_float2(mean_of_sums(z, &low, x->sum.x, x->square.x, count),
                       mean_of_sums(z, &high, x->sum.y, x->square.y, count));
}

/* The mean of the keys of a head, to memory; one warp. Returns whether it is used. `staging`: shared memory for
   STAGED_KEYS, and an mbarrier, for one call; or NULL. */
DEVICE int search_head(const fattni_bwd_args *bwd, const key_head *at, half_type *staging, uint32_t bar) {
    const fattni_attention_args *const a = &bwd->a;
    const sequence s = BANDS ? sequence_of(a, at->b) : whole_sequence(a, at->b, CAUSAL);
    const interval seen = keys_seen_by(&s, 0, s.Sq);
    const int lane = (int)threadIdx.x % 32, keys = max(seen.end - seen.begin, 0);
    const int most = min(keys, max((int)FEWEST_KEYS, min(keys / 128, (int)MOST_KEYS))), count = most & ~15;
    const int plane = at->b * a->Hkv + at->hk;
    const half_type *head = (const half_type *)a->k.p + at->b * a->k.b + at->hk * a->k.h + seen.begin * a->k.row;
    const int stride = count ? keys / count : 1, five = 5 % stride,
              staged = D <= 128 && staging && count <= STAGED_KEYS;
    float z = 0.0f;
    if (staged) {
        if (lane == 0) mbarrier_expect(bar, count * a->D * 2);
        __syncwarp();
#pragma unroll 1
        for (int n = lane; n < count; n += 32)
            bulk_load(shared_address(staging + n * a->D), head + sampled_key(n, stride) * a->k.row, a->D * 2, bar);
        __syncwarp();
        mbarrier_wait(bar, 0);
        head = staging;
    }
#pragma unroll 1
    for (int pass = 0; pass < (PANELS + CHANNEL_PAIRS - 1) / CHANNEL_PAIRS; ++pass) {
        const int channel = (pass * 32 + lane) * (2 * CHANNEL_PAIRS), inside = channel < a->D;
        const half_type *const k = head + (inside ? channel : 0);
        channel_pair x[CHANNEL_PAIRS] = {no_keys()};
        x[CHANNEL_PAIRS - 1] = no_keys();
        int key = 0, rest = 0; /* sampled_key is their sum */
#pragma unroll 1
        for (int n0 = 0; n0 < count && staged; n0 += KEYS_AT_ONCE) {
            uint32_t pairs[KEYS_AT_ONCE][CHANNEL_PAIRS];
#pragma unroll
            for (int n = 0; n < KEYS_AT_ONCE; ++n) load_channels(pairs[n], k + (n0 + n) * a->D);
            add_part(x, pairs);
        }
#pragma unroll 1
        for (int n0 = 0; n0 < count && !staged; n0 += KEYS_AT_ONCE) {
            uint32_t pairs[KEYS_AT_ONCE][CHANNEL_PAIRS];
#pragma unroll
            for (int n = 0; n < KEYS_AT_ONCE; ++n) {
                load_channels(pairs[n], k + (key + rest) * a->k.row);
                key += stride, rest += five;
                if (rest >= stride) rest -= stride;
            }
            add_part(x, pairs);
        }
        if (channel >= 64 * PANELS) continue;
        float2 *const mean = (float2 *)(bwd->key_mean + (int64_t)plane * bwd->key_mean_pitch + channel);
#pragma unroll
        for (int e = 0; e < CHANNEL_PAIRS; ++e) mean[e] = means_of_pair(&z, x + e, inside ? count : 0);
    }
    __syncwarp();
    const int use = shows_means(sum_of_warp(z), a->D, count);
    if (lane == 0) bwd->key_mean_used[plane] = use;
    return use;
}
/* SEARCH: the mean of the keys of a plane of the schedule. One warp. */
DEVICE void search(const fattni_bwd_sm90_args *p, int plane, half_type *staging, uint32_t bar) {
    if (plane < p->schedule.planes) {
        const key_head at = key_head_of(p, plane);
        const int use = search_head(&p->bwd, &at, staging, bar), head_group = plane / p->schedule.head_group;
        async_proxy_fence_global(); /* the producer has the mean copied */
        __syncwarp();
        if (is_leader()) {
            if (use) atomicOr(counter_of(p, head_group, SEARCHED), HAS_MEANS);
            add_release(counter_of(p, head_group, SEARCHED), 1);
        }
    }
    __syncwarp();
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
   mean_full has both. Only dQ needs it, so the first tiles do not wait for the search. */
DEVICE void load_mean(const fattni_bwd_sm90_args *p, const task *t, int seen, int column, int columns,
                      uint32_t shared) {
    const int some = !finds_means(p) || group_has_means(p, t->head_group, seen);
    const float *const mean = some ? key_mean_of(&p->bwd, t->b, t->hk) : 0;
    const uint32_t full = MEMBER_ADDRESS(shared, mean_full);
    store_shared_word(MEMBER_ADDRESS(shared, has_mean), mean != 0);
    mbarrier_expect(full, mean ? columns * 4 : 0);
    if (mean) bulk_load(MEMBER_ADDRESS(shared, key_mean), mean + column, columns * 4, full);
}

/* ---- preprocess ---- */

/* x.y; x more exact by its `rest` (o_rest.h) where has_rest. */
DEVICE float dot_8(const uint4 *x, const uint4 *y, const uint2 *rest, int has_rest) {
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
    return sum;
}

/* lse2, delta and a zeroed accumulator for rows of one head. LANES share a row, and load `at_once` rows before they use
   them: one CTA of an SM must have enough loads in flight. Lane n has lse2 and delta of row n. */
enum { ROWS_AT_A_TIME = CTAS == 1 && D > 64 ? 16 : 8, ROWS_WITH_REST = CTAS > 1 ? 4 : 8 };
DEVICE void preprocess_rows(const fattni_bwd_args *bwd, const query_head *at, float4 *zero, int64_t base,
                            const row_range *s, int end, int thread, int threads, int at_once, int has_rest) {
    enum { LANES = D > 128 ? 32 : D > 64 ? 16 : 8, MOST = 16 };
    const fattni_attention_args *const a = &bwd->a;
    const int groups = threads / LANES, lane = thread % LANES, column = lane * 8;
    const half_type *const o = (const half_type *)a->o.p + at->b * a->o.b + at->h * a->o.h + column;
    const half_type *const d_o = (const half_type *)bwd->d_o.p + at->b * bwd->d_o.b + at->h * bwd->d_o.h + column;
    const char *const o_rest = (const char *)a->o_rest.p + at->b * a->o_rest.b + at->h * a->o_rest.h + column;
    const float *const lse = (const float *)a->lse.p + at->b * a->lse.b + at->h * a->lse.h;
    const float *const d_lse = (const float *)bwd->d_lse.p + at->b * bwd->d_lse.b + at->h * bwd->d_lse.h;
    const float sink = BANDS && a->sink.p ? float_at(&a->sink, at->h) : -INFINITY;
    for (int first = s->begin; first < s->end; first += at_once * groups) {
        const int i0 = first + thread / LANES * at_once;
        const row_place place = place_of_rows(bwd, at->b, i0, end);
        uint4 left[MOST], right[MOST];
        uint2 rest[MOST];
#pragma unroll
        for (int n = 0; n < at_once; ++n) {
            const int i = i0 + n + place.shift, inside = i0 + n < place.end && column < a->Dv;
            left[n] = inside ? *(const uint4 *)(o + i * a->o.row) : make_uint4(0, 0, 0, 0);
            right[n] = inside ? *(const uint4 *)(d_o + i * bwd->d_o.row) : make_uint4(0, 0, 0, 0);
            if (has_rest) rest[n] = inside ? *(const uint2 *)(o_rest + i * a->o_rest.row) : make_uint2(0, 0);
        }
        for (int n = (first - s->begin) * (D / 4) + thread;
             n < (min(first + at_once * groups, s->end) - s->begin) * (D / 4); n += threads)
            zero[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        const int i = i0 + lane, row = i + place.shift, inside = i < place.end && lane < at_once;
        const float L = inside ? lse[row * a->lse.row] : INFINITY;
        const float d_l = inside && bwd->d_lse.p ? d_lse[row * bwd->d_lse.row] : 0.0f;
        float delta = -d_l;
#pragma unroll
        for (int n = 0; n < at_once; ++n) {
            float sum = dot_8(left + n, right + n, rest + n, has_rest);
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
            if (lane == n) delta += sum;
        }
        if (i >= s->end || lane >= at_once) continue;
        store_statistics(bwd, base + i, L, delta);
        if (!CAPPED && bwd->dq_of_mean) store_sum_of_ds(bwd, base + i, L, delta, sink, d_l);
    }
}

/* The rows of one head of a work item: its accumulator, its first padded row, and where its rows end. */
typedef struct head_rows {
    query_head at;
    float4 *accumulator;
    int64_t base;
    int end;
} head_rows;
DEVICE head_rows rows_of_head(const fattni_bwd_sm90_args *p, const work_item *x, const row_range *s, int head) {
    const fattni_attention_args *const a = &p->bwd.a;
    head_rows r = {head_of(p, x->head_group, head)};
    r.accumulator = (float4 *)(accumulator_of(p, x->head_group, head) + (int64_t)s->begin * D);
    r.base = ((int64_t)r.at.b * a->Hq + r.at.h) * p->bwd.padded_rows;
    r.end = min(s->end, sequence_rows(&p->bwd, r.at.b));
    return r;
}

/* No key block has added to rows of one head. */
DEVICE void zero_semaphores(const fattni_bwd_args *bwd, const query_head *at, const row_range *s, int thread,
                            int threads) {
    const fattni_attention_args *const a = &bwd->a;
    const int blocks = (a->Sq + BM - 1) / BM;
    for (int i0 = s->begin + thread / 32 * BM; i0 < s->end; i0 += threads / 32 * BM) {
        const row_place place = place_of_rows(bwd, at->b, i0, sequence_rows(bwd, at->b));
        const int row = packs(bwd) ? i0 + place.shift - sequence_of(a, place.b).q0 : i0;
        if (i0 < place.end && thread % 32 == 0)
            bwd->dq_semaphore[((int64_t)place.b * a->Hq + at->h) * blocks + row / BM] = 0;
    }
}

/* By `threads`. */
DEVICE void preprocess(const fattni_bwd_sm90_args *p, const work_item *x, int thread, int threads) {
    const fattni_bwd_args *const bwd = &p->bwd;
    const fattni_attention_args *const a = &p->bwd.a;
    const row_range s = rows_of_item(p, x);
    if (x->head_group >= RING)
        wait_counter_all(p, x->head_group - RING, POSTPROCESSED, p->row_items * CTAS, thread, threads);
    for (int head = s.head; head < s.last; ++head) {
        const head_rows r = rows_of_head(p, x, &s, head);
        if (a->o_rest.p)
            preprocess_rows(bwd, &r.at, r.accumulator, r.base, &s, r.end, thread, threads, ROWS_WITH_REST, 1);
        else
            preprocess_rows(bwd, &r.at, r.accumulator, r.base, &s, r.end, thread, threads, ROWS_AT_A_TIME, 0);
        if (bwd->dq_semaphore) zero_semaphores(bwd, &r.at, &s, thread, threads);
    }
    count_work_item(p, x->head_group, PREPROCESSED, thread, threads);
}

/* ---- postprocess ---- */

/* Tiles of 8 columns in a slice of a row block; of head_dim 80 the second slice has fewer. */
DEVICE int tiles_of(int part, int most) { return BM > 64 || part == 0 ? most : min(most, D / 8 - most); }

/* To accumulators of `slices` slices of rows of one head, from row i0 on, dq_of_mean times the mean of the keys. Each
   thread changes those that it will read. */
DEVICE void add_mean(const fattni_bwd_args *bwd, const query_head *at, float4 *accumulators, int i0, int slices,
                     int thread, int threads) {
    enum { TILES = SLICE / 512 };
    const int64_t row = ((int64_t)at->b * bwd->a.Hq + at->h) * bwd->padded_rows + i0;
    const float *mean = key_mean_of(bwd, at->b, at->h / bwd->a.group);
    if (!packs(bwd) && !mean) return;
    for (int slice = thread / 128; slice < slices; slice += threads / 128) {
        const int first = slice / 2 * BM, part = slice % 2, tiles = tiles_of(part, TILES);
        if (packs(bwd)) {
            mean = key_mean_of(bwd, place_of_rows(bwd, 0, i0 + first, bwd->padded_rows).b, at->h / bwd->a.group);
            if (!mean) continue;
        }
        const int column = (BM > 64 ? 0 : part * (TILES * 8)) + thread % 4 * 2;
        const int64_t i = row + first + (BM > 64 ? 64 * part : 0) + thread % 128 / 32 * 16 + thread % 32 / 4;
        const float sum = bwd->dq_of_mean[i], sum8 = bwd->dq_of_mean[i + 8];
        float4 *const tile = accumulators + (slice / 2 * (BM * D) + part * SLICE) / 4 + thread % 128;
#pragma unroll
        for (int c = 0; c < TILES; ++c)
            if (c < tiles) {
                const float2 m = *(const float2 *)(mean + column + 8 * c);
                const float4 y = __ldcg(tile + c * 128);
                __stcg(tile + c * 128,
                       make_float4(y.x + sum * m.x, y.y + sum * m.y, y.z + sum8 * m.x, y.w + sum8 * m.y));
            }
    }
}

DEVICE void postprocess(const fattni_bwd_sm90_args *p, const work_item *x, int thread, int threads) {
    /* Tiles of a slice at most; slices of a row block; slices loaded before they are used. */
    enum { TILES = SLICE / 512, PARTS = 2, AT_ONCE = CTAS > 1 ? 1 : D > 128 ? 2 : 4 };
    const fattni_bwd_args *const bwd = &p->bwd;
    const fattni_attention_args *const a = &p->bwd.a;
    const row_range s = rows_of_item(p, x);
    const int groups = threads / 128, slices = (s.end - s.begin) / BM * PARTS;
    const int t = thread % 4, row = thread % 128 / 32 * 16 + thread % 32 / 4 + t / 2 * 8; /* after transpose_quad */
    if (bwd->dq_of_mean && finds_means(p) && thread == 0) /* who adds nothing has not asked for means */
        group_has_means(p, x->head_group, 0);
    wait_counter_all(p, x->head_group, DQ_ADDITIONS, dq_additions(p, x->head_group), thread, threads);
    for (int head = s.head; head < s.last; ++head) {
        const query_head at = head_of(p, x->head_group, head);
        const float4 *const from =
            (const float4 *)(accumulator_of(p, x->head_group, head) + (int64_t)s.begin * D) + thread % 128;
        half_type *const to = (half_type *)bwd->dq.p + at.b * bwd->dq.b + at.h * bwd->dq.h;
        const int rows = sequence_rows(bwd, at.b);
        if (bwd->dq_of_mean) {
            float4 *const begin = (float4 *)(accumulator_of(p, x->head_group, head) + (int64_t)s.begin * D);
            add_mean(bwd, &at, begin, s.begin, slices, thread, threads);
        }
        for (int first = thread / 128; first < slices; first += AT_ONCE * groups) {
            float4 y[AT_ONCE][TILES];
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const int slice = first + n * groups, tiles = tiles_of(slice % PARTS, TILES);
                const float4 *const tile = from + (slice / PARTS * (BM * D) + slice % PARTS * SLICE) / 4;
#pragma unroll
                for (int c = 0; c < TILES; ++c)
                    y[n][c] =
                        slice < slices && c < tiles ? __ldcg(tile + c * 128) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const int slice = first + n * groups, part = slice % PARTS;
                const int i0 = s.begin + slice / PARTS * BM, i = i0 + row + (BM > 64 ? 64 * part : 0);
                const row_place place = place_of_rows(bwd, at.b, i0, rows);
                const int column = (BM > 64 ? 0 : part * (TILES * 8)) + t % 2 * 8;
                const int width = slice < slices && i < place.end ? min(a->D, column + 8 * tiles_of(part, TILES)) : 0;
                half_type *const to_row = to + (i + place.shift) * bwd->dq.row + column;
#pragma unroll
                for (int c = 0; c < TILES; c += 2) { /* lane t of a quad: tile c + t % 2, row 8 (t / 2) */
                    uint32_t r[4];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float4 z = y[n][c + e];
                        r[e] = pack(bwd->dq_scale * z.x, bwd->dq_scale * z.y);
                        r[2 + e] = pack(bwd->dq_scale * z.z, bwd->dq_scale * z.w);
                    }
                    transpose_quad(r);
                    store_global_4_if(to_row + c * 8, r, column + c * 8 < width);
                }
            }
        }
    }
    count_work_item(p, x->head_group, POSTPROCESSED, thread, threads);
}

#endif
