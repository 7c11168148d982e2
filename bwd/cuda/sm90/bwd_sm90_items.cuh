/* Key blocks as work items (bwd_sm90_scheduler.cuh): the end of bwd_sm90.cuh for all but BY_HEADS. Warp 0 claims
   work items and loads, warps 1 and 2 add the dQ of consumer 0 and 1, warp 3 finds means of keys and posts the dQ
   semaphores. The others learn from warp 0, through two slots, what the work items are. */
#ifndef FATTNI_BWD_CUDA_SM90_BWD_SM90_ITEMS_H
#define FATTNI_BWD_CUDA_SM90_BWD_SM90_ITEMS_H

typedef fattni_bwd_sm90_args kernel_args;
enum { ADDER_THREADS = 128 + 32 }; /* a consumer, and the warp that adds its dQ */
/* Work items of rows: a consumer has half of the buffer of dS, which is free between tasks, and half of that of dQ,
   when the last task's has been added. */
enum {
    ROW_STAGE_BYTES = D == 64 || D == 128 ? 16 * 1024 : 8 * 1024,
    FIRST_ROW_STAGES = DS_STAGES * DS_BYTES / 2 / ROW_STAGE_BYTES,
    DQ_ROW_STAGES = BM * D * 4 / 2 / ROW_STAGE_BYTES,
    ROW_STAGES = FIRST_ROW_STAGES + DQ_ROW_STAGES
};
static_assert(FIRST_ROW_STAGES > 0 && DQ_ROW_STAGES > 0 && ROW_STAGES <= MOST_ROW_STAGES, "stages of rows");
static_assert(DQ_ROW_STAGES * ROW_STAGE_BYTES <= (SLICE - REPEATED * 64) * 4 && SLICE * 4 % 1024 == 0 &&
                  offsetof(shared_memory, dq) % 1024 == 0,
              "a consumer's stages of rows are in its slice of dQ, which its own adding warp has read");
DEVICE uint32_t row_stage_at(int group, int n) {
    enum { BEYOND = SLICE * 4 - DQ_ROW_STAGES * ROW_STAGE_BYTES }; /* of a slice, after its stages */
    const int of_dq = n >= FIRST_ROW_STAGES;
    const int number = of_dq ? group * DQ_ROW_STAGES + n - FIRST_ROW_STAGES : group * FIRST_ROW_STAGES + n;
    return (uint32_t)((of_dq ? offsetof(shared_memory, dq) : offsetof(shared_memory, ds)) + number * ROW_STAGE_BYTES +
                      (of_dq ? group * BEYOND : 0));
}
DEVICE void await_row_stages(int group) {
    __syncwarp();
    named_barrier_sync(DQ_EMPTY + group, ADDER_THREADS);
}
#include "bwd/cuda/sm90/bwd_sm90_rows.cuh"

/* ---- work items, from the producer to the other warps ---- */

DEVICE void init_work_slots(uint32_t shared, int deterministic) {
    if (threadIdx.x > 0) return;
    for (int n = 0; n < 2; ++n) {
        mbarrier_init(ELEMENT_ADDRESS(shared, work_full, n), 1);
        /* warps: 8 of consumers, 2 that add dQ, one that posts semaphores */
        mbarrier_init(ELEMENT_ADDRESS(shared, work_empty, n), 10 + deterministic);
    }
    for (int n = 0; n < 2 * ROW_STAGES; ++n) mbarrier_init(ELEMENT_ADDRESS(shared, rows_full, n), 1);
    mbarrier_init(MEMBER_ADDRESS(shared, mean_full), 1);
    if (DS_STAGES == 1) mbarrier_init(MEMBER_ADDRESS(shared, ds_empty), 8);
    mbarrier_init_fence();
}
DEVICE uint32_t slot_at(uint32_t shared, int n) { return ELEMENT_ADDRESS(shared, work, n & 1); }
DEVICE sequence read_sequence(const fattni_attention_args *a, uint32_t from, int b) {
    uint32_t x[4];
    load_shared_4(x, from);
    sequence s = {(int)x[0], (int)x[1], (int)x[2], (int)x[3], a->cu_seqlens_q.p ? 0 : b};
    find_band(a, &s);
    return s;
}
DEVICE void write_work(uint32_t shared, int n, const work_item *x, const task *t) {
    const uint32_t slot = slot_at(shared, n);
    const uint32_t steps[4] = {(uint32_t)t->j0, (uint32_t)t->from, (uint32_t)t->last,
                               (uint32_t)(t->steps_before | t->kv_phase << 2 | t->steps << 3)},
                   item[4] = {(uint32_t)x->kind, (uint32_t)x->head_group, (uint32_t)x->number,
                              (uint32_t)t->accumulator_shift},
                   head[4] = {(uint32_t)t->b, (uint32_t)t->hk, (uint32_t)t->part, (uint32_t)t->parts},
                   lengths[4] = {(uint32_t)t->s.Sq, (uint32_t)t->s.Sk, (uint32_t)t->s.q0, (uint32_t)t->s.k0};
    store_shared_words(slot + offsetof(work_slot, steps), steps);
    store_shared_words(slot + offsetof(work_slot, item), item);
    store_shared_words(slot + offsetof(work_slot, head), head);
    if (BANDS) store_shared_words(ELEMENT_ADDRESS(shared, sequences, n & 1), lengths);
}
DEVICE work_item read_work(uint32_t slot) {
    uint32_t item[4];
    load_shared_4(item, slot + offsetof(work_slot, item));
    const work_item x = {(int)item[0], (int)item[1], (int)item[2]};
    return x;
}
DEVICE task read_task(const fattni_bwd_sm90_args *p, uint32_t shared, int number) {
    const fattni_attention_args *const a = &p->bwd.a;
    const uint32_t slot = slot_at(shared, number);
    uint32_t steps[4], item[4], head[4];
    load_shared_4(steps, slot + offsetof(work_slot, steps));
    task t = {0, 0, (int)steps[0], (int)steps[1], (int)steps[2], (int)(steps[3] >> 3)};
    t.steps_before = steps[3] & 3, t.kv_phase = steps[3] >> 2 & 1;
    t.s = whole_sequence(a, 0, CAUSAL);
    load_shared_4(item, slot + offsetof(work_slot, item));
    load_shared_4(head, slot + offsetof(work_slot, head));
    t.head_group = item[1], t.accumulator_shift = item[3];
    t.b = t.s.batch = head[0], t.hk = head[1];
    t.part = head[2], t.parts = head[3];
    find_heads(p, &t);
    if (BANDS) t.s = read_sequence(a, ELEMENT_ADDRESS(shared, sequences, number & 1), t.b);
    return t;
}

/* ---- producer and dQ warps ---- */

/* K and V to L2, while those of the last task are still in use. */
DEVICE void prefetch_keys(const fattni_bwd_sm90_args *p, const task *t) {
    const int key = t->s.k0 + t->j0;
    for (int x = 0; x < PANELS; ++x) {
        tma_prefetch(&p->k, K_PANEL * x, key, t->hk * p->k_step.head, t->s.batch * p->k_step.batch);
        if (x < V_PANELS) tma_prefetch(&p->v, 64 * x, key, t->hk * p->v_step.head, t->s.batch * p->v_step.batch);
    }
}
DEVICE void load_k_tile(const fattni_bwd_sm90_args *p, const task *t, uint32_t to, uint32_t bar) {
    for (int x = 0; x < PANELS; ++x)
        tma_load(to + x * BN * 128, &p->k, bar, K_PANEL * x, t->s.k0 + t->j0, t->hk * p->k_step.head,
                 t->s.batch * p->k_step.batch);
}
/* K and V, once those of the last task are released. */
DEVICE void load_keys(const fattni_bwd_sm90_args *p, const task *t, uint32_t shared) {
    const int key = t->s.k0 + t->j0;
    mbarrier_wait(MEMBER_ADDRESS(shared, keys_empty), (uint32_t)t->kv_phase ^ 1);
    mbarrier_expect(MEMBER_ADDRESS(shared, k_full), KEY_BYTES);
    load_k_tile(p, t, MEMBER_ADDRESS(shared, k), MEMBER_ADDRESS(shared, k_full));
    mbarrier_expect(MEMBER_ADDRESS(shared, v_full), VALUE_BYTES);
    load_panels(MEMBER_ADDRESS(shared, v), &p->v, MEMBER_ADDRESS(shared, v_full), V_PANELS, BN, key,
                t->hk * p->v_step.head, t->s.batch * p->v_step.batch);
}
/* Q, dO and what belongs to them, of step n. */
DEVICE void load_rows(const fattni_bwd_sm90_args *p, const task *t, const row_cursor *at, int n, uint32_t shared) {
    const step s = step_at(at, t, n);
    const int64_t row = padded_row(&p->bwd, t, &s);
    load_q(p, t, &s, shared);
    load_lse2(p, &s, row, shared);
    load_d_o(p, t, &s, s.stage, s.parity, shared);
    load_delta(p, row, s.stage, shared);
    if (BIASED) load_bias(p, t, &s, shared); /* it waits longest */
}
/* All that a task reads. Only lse2 and delta wait for rows to be preprocessed. One thread. */
DEVICE void load(const fattni_bwd_sm90_args *p, const task *t, int first, uint32_t shared) {
    row_cursor at = first_rows(t);
    const step s = step_at(&at, t, 0);
    const int64_t row = padded_row(&p->bwd, t, &s);
    if (t->steps) {
        if (first) load_keys(p, t, shared);
        load_q(p, t, &s, shared);
        if (!first) load_keys(p, t, shared);
        load_d_o(p, t, &s, s.stage, s.parity, shared);
    }
    const int seen = wait_preprocessed(p, t);
    if (!t->steps) return;
    load_lse2(p, &s, row, shared);
    load_delta(p, row, s.stage, shared);
    if (BIASED) load_bias(p, t, &s, shared);
    if (first && finds_means(p)) group_has_means(p, 0, 0); /* warp 3 has used the next stage */
    if (load_mean(p, t, seen, 0, PANELS * 64, TWO_K_TILES ? KEY_BYTES : 0, shared) && TWO_K_TILES)
        load_k_tile(p, t, MEMBER_ADDRESS(shared, k_of_dq), MEMBER_ADDRESS(shared, mean_full));
    for (int n = 1; n < t->steps; ++n) {
        next_rows(&at, t, p);
        load_rows(p, t, &at, n, shared);
    }
}

/* Adds a consumer's slices of dQ to the accumulator. One warp. */
DEVICE void add_dq(const fattni_bwd_sm90_args *p, const task *t, uint32_t shared, int consumer) {
    const fattni_bwd_args *const bwd = &p->bwd;
    const int leader = is_leader();
    if (leader && p->progress) wait_counter(p, t->head_group, PREPROCESSED, p->row_items);
    __syncwarp();
    if (t->steps) named_barrier_arrive(DQ_EMPTY + consumer, ADDER_THREADS);
    row_cursor at = first_rows(t);
    for (int n = 0; n < t->steps; ++n, next_rows(&at, t, p)) {
        const step s = step_at(&at, t, n);
        asm volatile("" : "+r"(consumer)); /* hides it: addresses are recomputed, 40 registers do not hold them */
        if (leader && bwd->dq_semaphore) wait_dq_semaphore_of_step(dq_semaphore_of_step(bwd, t, &s), t, &s);
        __syncwarp();
        named_barrier_sync(DQ_FULL + consumer, ADDER_THREADS);
        if (leader) {
            bulk_reduce_add(accumulator_at(bwd, t, &s) + consumer * SLICE,
                            MEMBER_ADDRESS(shared, dq) + consumer * SLICE * 4, SLICE * 4 - consumer * REPEATED * 256);
            bulk_commit();
            bulk_wait_read();
        }
        __syncwarp();
        if (n + 1 < t->steps) named_barrier_arrive(DQ_EMPTY + consumer, ADDER_THREADS);
        if (leader && bwd->dq_semaphore) {
            bulk_wait();
            report_dq_added(&s, shared);
        }
    }
    if (!leader) return;
    bulk_wait();
    if (p->progress) count_dq_addition(p, t->head_group);
}

/* ---- consumers ---- */

DEVICE int ds_stage_of(const step *now, int number, uint32_t shared) {
    if (DS_STAGES == 1) wait_ds_empty(now->stage, shared);
    return DS_STAGES == 1 ? 0 : now->stage;
}
/* To the warp that adds it. */
DEVICE void pass_dq(const fattni_bwd_sm90_args *p, const task *t, const step *now, int number, uint32_t shared,
                    int consumer, uint32_t thread, float dq[COLUMNS / 2]) {
    named_barrier_sync(DQ_EMPTY + consumer, ADDER_THREADS);
    PIN(dq, COLUMNS / 2);
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i)
        if (i >= REPEATED / 8 || consumer == 0)
            store_shared_4(dq_to(shared, consumer, thread) + column_tile(i, consumer) * 2048, dq + 4 * i);
    async_proxy_fence();
    named_barrier_arrive(DQ_FULL + consumer, ADDER_THREADS);
}
/* x += what join_parts stored of a part, or stores it. */
DEVICE void store_part(float4 *to, const float *x, int count) {
#pragma unroll
    for (int n = 0; n < count / 4; ++n)
        __stcg(to + n * CONSUMER_THREADS, make_float4(x[4 * n], x[4 * n + 1], x[4 * n + 2], x[4 * n + 3]));
}
DEVICE void add_part(float *x, const float4 *from, int count) {
    enum { AT_ONCE = 16 };
#pragma unroll
    for (int first = 0; first < count / 4; first += AT_ONCE) {
        const int end = min(count / 4, first + AT_ONCE);
        float4 y[AT_ONCE];
#pragma unroll
        for (int n = first; n < end; ++n) y[n - first] = __ldcg(from + n * CONSUMER_THREADS);
#pragma unroll
        for (int n = first; n < end; ++n) {
            x[4 * n] += y[n - first].x, x[4 * n + 1] += y[n - first].y;
            x[4 * n + 2] += y[n - first].z, x[4 * n + 3] += y[n - first].w;
        }
    }
}
/* Of a task in parts each part stores its dK and dV, in F32, and the last one adds them to its own, in their order: the
   same bits in every call. It waits for parts that were claimed before it. `number` is the work item's. Returns whether
   this is the last part. */
DEVICE int join_parts(const fattni_bwd_sm90_args *p, const task *t, int number, float dk[D / 2], float dv[DV / 2]) {
    enum { SIZE = BN * (D + DV) / 4, OF_DV = BN * D / 4 }; /* float4s */
    const int thread = (int)threadIdx.x - 128, others = p->most_parts - 1;
    const int at = (number - p->whole) / p->most_parts; /* as in position_of_task */
    float4 *sums = (float4 *)p->part_sums + (int64_t)at * others * SIZE + thread;
    if (t->part + 1 < t->parts) {
        sums += t->part * SIZE;
        store_part(sums, dk, D / 2);
        store_part(sums + OF_DV, dv, DV / 2);
        named_barrier_sync(ROWS_DONE, CONSUMER_THREADS);
        if (thread == 0) add_release(p->parts_stored + at, 1);
        return 0;
    }
    if (thread == 0)
        while (load_acquire(p->parts_stored + at) < t->parts - 1) {}
    __syncwarp();
    named_barrier_sync(ROWS_DONE, CONSUMER_THREADS);
    /* Two loops: with one ptxas orders the main loop of head_dim 128 in another way, which is 1 % slower. */
#pragma unroll 1
    for (int part = 0; part + 1 < t->parts; ++part) add_part(dk, sums + part * SIZE, D / 2);
#pragma unroll 1
    for (int part = 0; part + 1 < t->parts; ++part) add_part(dv, sums + part * SIZE + OF_DV, DV / 2);
    return 1;
}
DEVICE void store_keys(const fattni_bwd_sm90_args *p, int number, uint32_t shared, int consumer, float dk[D / 2],
                       float dv[DV / 2]) {
    const task t = read_task(p, shared, number); /* again: there are no registers to keep it */
    if (t.steps) arrive_once_per_warp(MEMBER_ADDRESS(shared, keys_empty));
    if (t.parts > 1 && !join_parts(p, &t, read_work(slot_at(shared, number)).number, dk, dv)) return;
    uint32_t thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread));
    const int key = first_key(&t, consumer, thread);
    store_dv(&p->bwd, &t, key, 0, DV, dv);
    store_dk(&p->bwd, &t, key, 0, D, dk);
}

/* ---- loops over work items ---- */

/* Packed sequences are of many lengths: most key blocks that the longest one has are of none of the others. So those of
   a head group (without `progress` of all heads) are numbered one sequence after the other, in each of them as in
   position_of, with so many heads at once as have as many as a head group. A CTA's numbers rise: it looks for the
   sequence from its last one on, of the next head group from there or from the first one on. */
typedef struct packed_cursor {
    int b, first, blocks; /* a sequence, key blocks before it and of it; -1, 0, 0 at the start */
} packed_cursor;
/* Gives 0 if there is no key block with this number. */
DEVICE int find_packed(packed_cursor *c, position *at, const fattni_bwd_sm90_args *p, const work_item *x) {
    const fattni_attention_args *const a = &p->bwd.a;
    const int group = p->schedule.head_group, items = group * p->schedule.blocks;
    const int progress = p->progress != 0;
    const int all = progress ? heads_of_group(p, x->head_group) : a->Hkv, head0 = progress ? x->head_group * group : 0,
              number = progress ? x->number - x->head_group * items : x->number;
    if (number < c->first * all) c->b = -1, c->first = c->blocks = 0; /* of the next head group */
    while (number >= (c->first + c->blocks) * all) {
        if (c->b + 1 == a->B) return 0;
        c->first += c->blocks;
        c->blocks = (sequence_of(a, ++c->b).Sk + BN - 1) / BN;
    }
    const int most = min(items / c->blocks, all), rest = number - c->first * all, part = rest / (most * c->blocks),
              in_part = rest % (most * c->blocks), heads = min(most, all - part * most);
    at->plane = c->b * a->Hkv + head0 + part * most + in_part % heads;
    at->block = in_part / heads;
    return 1;
}

/* At the start, when nothing else can be done: the first load by a map waits for the map, too. */
DEVICE void prefetch_maps(const fattni_bwd_sm90_args *p) {
    tma_prefetch_map(&p->k), tma_prefetch_map(&p->v), tma_prefetch_map(&p->q), tma_prefetch_map(&p->d_o);
    if (p->progress) tma_prefetch_map(&p->o_rows), tma_prefetch_map(&p->d_o_rows);
}
/* The producer claims a work item when all loads of the last one have been issued; where only rows of postprocess are
   left, when the last one is done, so that all CTAs share them. One thread. */
DEVICE void produce(const fattni_bwd_sm90_args *p, uint32_t shared) {
    packed_cursor packed = {-1, 0, 0};
    for (int n = 0, steps_before = 0, kv_phase = 0, first = 1;; ++n) {
        work_item x = {NOTHING, 0, 0};
        task t = {0};
        int number = 0;
        while (x.kind == NOTHING) {
            number = atomicAdd(p->schedule.next_tile, 1);
            x = work_item_of(p, number);
            if (x.kind != MAINLOOP) continue;
            position at = {0, 0};
            int part = 0;
            if (!packs(&p->bwd)) {
                at = position_of_task(p, x.number, &part);
            } else if (!find_packed(&packed, &at, p, &x)) {
                x.kind = p->progress ? NOTHING : END;
                if (!p->progress) continue;
                /* As all do that add: who waits for them also waits for the rows. */
                wait_counter(p, x.head_group, PREPROCESSED, p->row_items);
                add_release(counter_of(p, x.head_group, DQ_ADDITIONS), 2);
                continue;
            }
            t = task_at(p, &x, &at, part);
            if (t.parts == 0 && p->progress) add_release(counter_of(p, x.head_group, DQ_ADDITIONS), 2);
            if (t.parts == 0 || (!p->progress && t.j0 >= t.s.Sk)) x.kind = NOTHING;
        }
        if (x.kind == MAINLOOP) prefetch_keys(p, &t);
        t.steps_before = steps_before, t.kv_phase = kv_phase;
        mbarrier_wait(ELEMENT_ADDRESS(shared, work_empty, n & 1), (uint32_t)(n >> 1 & 1) ^ 1);
        write_work(shared, n, &x, &t);
        mbarrier_arrive(ELEMENT_ADDRESS(shared, work_full, n & 1));
        if (x.kind == END) {
            grid_dependents_start(); /* not before: CTAs of the next kernel would wait on SMs that others can use */
            return;
        }
        if (x.kind == POSTPROCESS && number >= last_rows(p))
            mbarrier_wait(ELEMENT_ADDRESS(shared, work_empty, n & 1), (uint32_t)(n >> 1 & 1));
        if (x.kind != MAINLOOP) continue;
        load(p, &t, first, shared);
        first &= t.steps == 0;
        steps_before = (steps_before + t.steps) & 3, kv_phase ^= t.steps > 0;
    }
}

/* Warps 1 and 2 add dQ. */
DEVICE void add(const fattni_bwd_sm90_args *p, uint32_t shared, int consumer) {
    for (int n = 0;; ++n) {
        const uint32_t slot = slot_at(shared, n);
        mbarrier_wait(ELEMENT_ADDRESS(shared, work_full, n & 1), (uint32_t)(n >> 1 & 1));
        const int kind = read_work(slot).kind;
        const task t = read_task(p, shared, n);
        __syncwarp();
        arrive_once_per_warp(ELEMENT_ADDRESS(shared, work_empty, n & 1));
        if (kind == END) return;
        if (kind == MAINLOOP)
            add_dq(p, &t, shared, consumer);
        else if (n > 0)
            await_row_stages(consumer); /* the consumer waits for this warp */
        __syncwarp();
    }
}
/* Warp 3 finds means of keys: the CTAs share the heads, and are soon ahead of the rows that need them. It claims a head
   like a work item, so that nobody waits for a CTA that does not run. Warps 1 and 2 help it with its first one, if that
   is of the first head group: they copy the sample to shared memory, a round of it at a time, since one load after the
   other takes longer than what is left; then each has some parts, and then a pass. That is where the second tiles of Q
   and dO will be, so the CTA's first task must wait for the search of that group (load). */
enum {
    SEARCH_WARPS = 3,
    SEARCH_THREADS = 32 * SEARCH_WARPS,
    PITCH = PANELS * 64, /* of a key in shared memory */
    ROUND_KEYS = WIDE ? 32 : 64,
    ROUND_PARTS = ROUND_KEYS / PART_KEYS
};
typedef struct shared_sample {
    channel_pair parts[ROUND_PARTS][PANELS * 32]; /* of lanes and passes */
    float z[PANELS];
} shared_sample;
static_assert(sizeof(shared_sample) <= D_O_BYTES && ROUND_KEYS * PITCH * 2 <= ROW_BYTES && PANELS <= SEARCH_WARPS,
              "a round's keys, what is known of them, and passes");
/* The share of thread 0 to SEARCH_THREADS - 1 of `count` keys, from number `first` of the sample on. Not by cp.async:
   ptxas would have instructions for it in the main loop. */
DEVICE void copy_keys(const sample *s, int first, int count, int width, int thread, uint4 *to) {
    enum { CHUNKS = PITCH / 8, STEP = SEARCH_THREADS / CHUNKS, AT_ONCE = 3 };
    const int chunk = thread % CHUNKS, further = STEP * 5 % s->stride;
    int key = thread / CHUNKS, rest = (first + key) * 5 % s->stride; /* see sampled_key */
    if (key >= STEP || chunk * 8 >= width) return;
#pragma unroll 1
    for (; key < count; key += AT_ONCE * STEP) {
        uint4 x[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int row = (first + key + n * STEP) * s->stride + rest;
            if (key + n * STEP < count) x[n] = *(const uint4 *)(s->keys + row * s->row + chunk * 8);
            rest += further;
            if (rest >= s->stride) rest -= s->stride;
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n)
            if (key + n * STEP < count) to[(key + n * STEP) * CHUNKS + chunk] = x[n];
    }
}
/* `search` by all these warps, of which this is `number`; warp 0 counts the head. */
DEVICE void share_search(const fattni_bwd_sm90_args *p, int plane, shared_memory *memory, int number) {
    const key_head at = key_head_of(p, plane);
    const sample s = sample_of(&p->bwd, &at);
    shared_sample *const known = (shared_sample *)memory->d_o[1];
    const int lane = (int)threadIdx.x % 32, width = p->bwd.a.D;
    channel_pair x = no_keys(); /* of pass `number` */
    for (int first = 0; first < s.count; first += ROUND_KEYS) {
        const sample copied = {memory->q[1], PITCH, min(s.count - first, (int)ROUND_KEYS), 1};
        copy_keys(&s, first, copied.count, width, number * 32 + lane, (uint4 *)memory->q[1]);
        __syncwarp();
        named_barrier_sync(MEAN_FOUND, SEARCH_THREADS);
#pragma unroll 1
        for (int n = number; n < copied.count / PART_KEYS * PANELS; n += SEARCH_WARPS) {
            const int part = n / PANELS, pass = n % PANELS, channel = channel_of(pass);
            known->parts[part][pass * 32 + lane] = part_of_sample(&copied, channel < width ? channel : 0, part);
        }
        __syncwarp();
        named_barrier_sync(MEAN_FOUND, SEARCH_THREADS);
#pragma unroll 1
        for (int part = 0; number < PANELS && part < copied.count / PART_KEYS; ++part)
            join_channels(&x, &known->parts[part][number * 32 + lane]);
    }
    const float z = number < PANELS ? store_means(&p->bwd, &at, &s, number, &x) : 0.0f;
    if (number < PANELS && is_leader()) known->z[number] = z;
    if (number > 0) async_proxy_fence_global(); /* means; warp 0 does it where they are used */
    async_proxy_fence();                        /* tiles come where the sample is */
    __syncwarp();
    named_barrier_sync(MEAN_FOUND, SEARCH_THREADS);
    if (number > 0) return;
    float sum = 0.0f;
    for (int pass = 0; pass < PANELS; ++pass) sum += known->z[pass];
    end_search(p, plane, &at, &s, sum);
}
DEVICE int claim_plane(const fattni_bwd_sm90_args *p) {
    return from_leader(is_leader() ? atomicAdd(p->schedule.next_tile + 1, 1) : 0);
}
/* Warps 3, 1 and 2 as numbers 0 to 2. */
DEVICE void search_heads(const fattni_bwd_sm90_args *p, shared_memory *memory, int number) {
    if (number == 0) {
        const int claimed = claim_plane(p);
        if (is_leader()) memory->first_plane = claimed;
    }
    __syncwarp();
    named_barrier_sync(MEAN_FOUND, SEARCH_THREADS);
    int plane = memory->first_plane;
    const int shared = plane < p->schedule.head_group;
    if (shared) share_search(p, plane, memory, number);
    if (number > 0) return;
    if (shared) plane = claim_plane(p);
    for (; plane < p->schedule.planes; plane = claim_plane(p)) search(p, plane);
}
/* Then it posts semaphores. */
DEVICE void post(const fattni_bwd_sm90_args *p, uint32_t shared) {
    for (int n = 0;; ++n) {
        const uint32_t slot = slot_at(shared, n);
        mbarrier_wait(ELEMENT_ADDRESS(shared, work_full, n & 1), (uint32_t)(n >> 1 & 1));
        const int kind = read_work(slot).kind;
        const task t = read_task(p, shared, n);
        __syncwarp();
        arrive_once_per_warp(ELEMENT_ADDRESS(shared, work_empty, n & 1));
        if (kind == MAINLOOP && is_leader()) post_dq_semaphores(p, &t, shared);
        __syncwarp();
        if (kind == END) return;
    }
}

DEVICE void consume(const fattni_bwd_sm90_args *p, uint32_t shared, int consumer) {
    for (int n = 0;; ++n) {
        const uint32_t slot = slot_at(shared, n);
        int thread = (int)threadIdx.x - 128;
        uint32_t rows = shared;
        asm volatile("" : "+r"(thread), "+r"(rows));       /* hides them: what depends on them is recomputed */
        if (HIDES_SHARED) asm volatile("" : "+r"(shared)); /* of head_dim 128 that is slower */
        mbarrier_wait(ELEMENT_ADDRESS(shared, work_full, n & 1), (uint32_t)(n >> 1 & 1));
        const work_item x = read_work(slot);
        if (x.kind == END) return;
        if (x.kind == MAINLOOP) {
            const task t = read_task(p, shared, n);
            /* A pointer made of `shared`: of the array ptxas would ask for the address in every step. */
            main_loop(p, &t, n, shared, (const shared_memory *)shared_pointer(shared), consumer);
        } else if (x.kind == PREPROCESS) {
            preprocess(p, &x, rows, n == 0, thread, CONSUMER_THREADS);
        } else {
            postprocess(p, &x, rows, n == 0, thread, CONSUMER_THREADS);
        }
        __syncwarp();
        arrive_once_per_warp(ELEMENT_ADDRESS(shared, work_empty, n & 1));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) K_NAME(const __grid_constant__ kernel_args p) {
    extern __shared__ __align__(1024) unsigned char SHARED_MEMORY[];
    const uint32_t shared = shared_address(SHARED_MEMORY);
    const int role = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0);
    init_barriers(shared, 2, 1);
    if (BIASED) init_bias_barriers(shared);
    init_work_slots(shared, p.bwd.dq_semaphore != 0);
    if (threadIdx.x == 0) prefetch_maps(&p);
    grid_dependency_wait();
    __syncthreads();
    if (role == 0) {
        const int warp = (int)threadIdx.x / 32;
        registers_lower((int)LOADER_REGISTERS);
        if (warp > 0 && finds_means(&p)) search_heads(&p, (shared_memory *)SHARED_MEMORY, warp % 3);
        if (warp == 3 && p.bwd.dq_semaphore) post(&p, shared);
        if (warp == 1 || warp == 2) add(&p, shared, warp - 1);
        if (threadIdx.x == 0) produce(&p, shared);
    } else {
        registers_raise((int)CONSUMER_REGISTERS);
        consume(&p, shared, role - 1);
    }
}

#endif
