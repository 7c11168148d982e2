/* Short rows (BY_HEADS): as many rows as keys, one query head per key head, 16-bit tensors with 16-byte accesses. A CTA
   takes all key blocks of a head, one after the other, and then another head, at a fixed stride. So dQ needs no zeros,
   no order between CTAs and no kernel or work item that finishes it: the first key block of a row block stores it, the
   others add, and the last one, the diagonal's in causal calls, gives it to the caller.

   KEEPS_DQ: each thread of a consumer has its part of dQ in shared memory, of FATTNI_SHORT_KEYS rows. Else the CTA has
   an accumulator in global memory, and warps 1 and 2 bring a consumer's part of a row block there, and back for the
   last key block. This accumulator, Q and dO of all CTAs fill L2. So each key block has the rows in the other direction
   than the one before, and what is read or written for the last time leaves L2 first.

   The consumers find lse2 and delta of a head's rows, before the last key block of the head before, so that the copies
   to shared memory are there in time. The other warps of warpgroup 0 bring O and dO to L2, and find the mean of a
   head's keys.

   The end of bwd_sm90.cuh for these kernels. */
#ifndef FATTNI_BWD_CUDA_SM90_BWD_SM90_SHORT_H
#define FATTNI_BWD_CUDA_SM90_BWD_SM90_SHORT_H

#include "core/ptx/load_once.h"

static_assert(CTAS == 1 && (D == 64 || D == 128) && BN % BM == 0, "head_dims and blocks");
static_assert(!KEEPS_DQ || BM * D * (FATTNI_SHORT_KEYS / BM - 1) == sizeof(((shared_memory *)0)->dq) / 4,
              "dQ of all row blocks but the first");
static_assert(DS_STAGES * DS_BYTES + STAGED >= 2 * KEY_BYTES, "dK and dV");

enum {
    AHEAD_WARPS = KEEPS_DQ ? 3 : 1, /* the last ones of warpgroup 0 */
    AHEAD_THREADS = 32 * AHEAD_WARPS,
    ROW_LANES = D / 8, /* lanes that share a row, in 16-byte loads */
    ADDER_THREADS = 128 + 32
};

typedef fattni_bwd_sm90_args kernel_args;

/* Head number n of the CTA, a plane of the schedule; how many it has. */
DEVICE int plane_of(int n) { return (int)blockIdx.x + n * (int)gridDim.x; }
DEVICE int planes_of_cta(const fattni_bwd_sm90_args *p) {
    return (p->schedule.planes - (int)blockIdx.x + (int)gridDim.x - 1) / (int)gridDim.x;
}

/* Key block `number` of the CTA. */
DEVICE task short_task(const fattni_bwd_sm90_args *p, int number) {
    const fattni_attention_args *const a = &p->bwd.a;
    const int blocks = p->schedule.blocks, n = number / blocks, j = number % blocks, plane = plane_of(n);
    const int rows = (a->Sq + BM - 1) / BM, skipped = CAUSAL ? BN / BM : 0; /* row blocks; above each key block */
    const int first = j * skipped * BM, last = (rows - 1) * BM, back = !KEEPS_DQ && j % 2;
    task t = {plane / a->Hkv, plane % a->Hkv, j * BN, back ? last : first, back ? first : last, rows - j * skipped};
    t.last_head = t.hk, t.heads = 1;
    t.steps_before =
        (n * (blocks * rows - skipped * (blocks * (blocks - 1) / 2)) + j * rows - skipped * (j * (j - 1) / 2)) & 3;
    t.kv_phase = number & 1;
    const sequence whole = {a->Sq, a->Sk, 0, 0, t.b, 0, -FATTNI_FAR, CAUSAL ? 0 : FATTNI_FAR};
    t.s = whole; /* causal: row i sees keys up to i */
    /* Hides them: they are kept, not what they are made of. */
    asm volatile("" : "+r"(t.j0), "+r"(t.from), "+r"(t.last), "+r"(t.steps), "+r"(t.steps_before));
    return t;
}

/* ---- rows of a head, and the mean of its keys ---- */

/* lse2 and delta of a head's padded rows. ROW_LANES load AT_ONCE rows before they use them; lane n has row n's
   result. */
DEVICE void find_statistics(const fattni_bwd_args *bwd, const query_head *at, int has_rest) {
    enum { LANES = ROW_LANES, AT_ONCE = 8, GROUPS = CONSUMER_THREADS / LANES };
    const int thread = (int)threadIdx.x - 128;
    const fattni_attention_args *const a = &bwd->a;
    const int lane = thread % LANES, column = lane * 8;
    const half_type *const o = (const half_type *)a->o.p + at->b * a->o.b + at->h * a->o.h + column;
    const half_type *const d_o = (const half_type *)bwd->d_o.p + at->b * bwd->d_o.b + at->h * bwd->d_o.h + column;
    const char *const o_rest = (const char *)a->o_rest.p + at->b * a->o_rest.b + at->h * a->o_rest.h + column;
    const float *const lse = (const float *)a->lse.p + at->b * a->lse.b + at->h * a->lse.h;
    const int64_t base = ((int64_t)at->b * a->Hq + at->h) * bwd->padded_rows;
#pragma unroll 1
    for (int i0 = thread / LANES * AT_ONCE; i0 < bwd->padded_rows; i0 += GROUPS * AT_ONCE) {
        uint4 left[AT_ONCE], right[AT_ONCE];
        uint2 rest[AT_ONCE];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int i = i0 + n, inside = i < a->Sq && column < a->Dv;
            left[n] = inside ? *(const uint4 *)(o + i * a->o.row) : make_uint4(0, 0, 0, 0);
            right[n] = inside ? *(const uint4 *)(d_o + i * bwd->d_o.row) : make_uint4(0, 0, 0, 0);
            if (has_rest) rest[n] = inside ? *(const uint2 *)(o_rest + i * a->o_rest.row) : make_uint2(0, 0);
        }
        const int i = i0 + lane, has_row = lane < AT_ONCE;
        const float L = has_row && i < a->Sq ? lse[i * a->lse.row] : INFINITY;
        float delta = 0.0f;
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const float sum = dot_of_row(left + n, right + n, rest + n, has_rest, LANES);
            if (lane == n) delta = sum;
        }
        if (has_row && i < bwd->padded_rows) store_statistics(bwd, base + i, L, delta);
    }
    __syncwarp();
}

/* Two channels of keys: sums, and of their squares. `from`: the first key's; of the part's `count` keys, from number
   `first` on, at most PART; beyond them the sample's last. */
enum { SAMPLED = 32, SAMPLE_PARTS = 3, PART = (SAMPLED + SAMPLE_PARTS - 1) / SAMPLE_PARTS };
DEVICE float4 sums_of_part(const half_type *from, int64_t row, int first, int keys, int stride) {
    uint32_t pairs[PART];
    float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int n = 0; n < PART; ++n)
        pairs[n] = *(const uint32_t *)(from + sampled_key(min(first + n, keys - 1), stride) * row);
#pragma unroll
    for (int n = 0; n < PART; ++n) {
        const float2 y = unpack(pairs[n]);
        const float low = first + n < keys ? y.x : 0.0f, high = first + n < keys ? y.y : 0.0f;
        sums.x += low, sums.y += high;
        sums.z += low * low, sums.w += high * high;
    }
    return sums;
}

/* The mean of the keys of a head, as search_head finds it, from fewer keys, by AHEAD_WARPS, which share the parts; a
   lane has a pair of channels at a time. Beyond D it reads the first pair. Sums of several warps meet in the
   accumulator of dQ, which nothing else uses then. */
DEVICE void find_mean(const fattni_bwd_args *bwd, int plane, int thread) {
    enum { FEWEST_BOUND = 8 };
    const fattni_attention_args *const a = &bwd->a;
    const int lane = thread % 32, warp = thread / 32, count = min(a->Sk, (int)SAMPLED), stride = a->Sk / count;
    const half_type *const head = (const half_type *)a->k.p + plane / a->Hkv * a->k.b + plane % a->Hkv * a->k.h;
    float4 *const parts = (float4 *)bwd->dq_accumulator + (int64_t)blockIdx.x * AHEAD_THREADS + lane;
    float z = 0.0f;
#pragma unroll 1
    for (int channel = 2 * lane; channel < D; channel += 64) {
        const int inside = channel < a->D;
        const half_type *const k = head + (inside ? channel : 0);
        if (AHEAD_WARPS > 1) {
            parts[32 * warp] = sums_of_part(k, a->k.row, warp * PART, count, stride);
            __syncwarp();
            named_barrier_sync(MEAN_PARTS, AHEAD_THREADS);
            if (warp < AHEAD_WARPS - 1) continue;
        }
        float4 sums = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        mean_range low = any_mean(), high = any_mean();
#pragma unroll 1
        for (int n = 0; n < SAMPLE_PARTS; ++n) {
            const float4 x = AHEAD_WARPS > 1 ? parts[32 * n] : sums_of_part(k, a->k.row, n * PART, count, stride);
            const int keys = min((int)PART, count - n * PART);
            sums.x += x.x, sums.y += x.y, sums.z += x.z, sums.w += x.w;
            if (keys < FEWEST_BOUND) continue;
            bound_mean(&low, 0.0f, x.x, x.z, (float)keys);
            bound_mean(&high, 0.0f, x.y, x.w, (float)keys);
        }
        const int counted = inside ? count : 0;
        *(float2 *)(bwd->key_mean + (int64_t)plane * bwd->key_mean_pitch + channel) = make_float2(
            mean_of_sums(&z, &low, sums.x, sums.z, counted), mean_of_sums(&z, &high, sums.y, sums.w, counted));
    }
    __syncwarp();
    if (AHEAD_WARPS > 1)
        named_barrier_sync(MEAN_PARTS, AHEAD_THREADS); /* parts have been read: the next head's follow */
    if (warp == AHEAD_WARPS - 1) {
        const int use = shows_means(sum_of_warp(z), a->D, count);
        if (lane == 0) bwd->key_mean_used[plane] = use;
        async_proxy_fence_global(); /* the producer has it copied */
    }
    __syncwarp();
}
static_assert(AHEAD_WARPS == 1 || (AHEAD_WARPS == SAMPLE_PARTS && D == 64), "one exchange of parts");

/* Rows of a tensor of a head to L2; a row has one line, or D / 64. */
DEVICE void prefetch_rows(const fattni_view *x, int bytes, int b, int h, int rows, int thread) {
    const char *const from = (const char *)x->p + (b * x->b + h * x->h) * bytes;
#pragma unroll 1
    for (int i = thread; i < rows; i += AHEAD_THREADS)
#pragma unroll
        for (int line = 0; line < D / 64; ++line) prefetch_line(from + i * x->row * bytes + line * (64 * bytes));
}
/* AHEAD_WARPS: the mean of a head's keys, as soon as there is nothing else to do, so that nobody waits for it; and once
   a key block of the head before has begun, its O, the rest of O and dO to L2. */
DEVICE void look_ahead(const fattni_bwd_sm90_args *p, uint32_t shared) {
    const fattni_attention_args *const a = &p->bwd.a;
    const int thread = (int)threadIdx.x - (128 - AHEAD_THREADS), planes = planes_of_cta(p);
#pragma unroll 1
    for (int n = 0; n <= planes; ++n) {
        const int last = n - 1, plane = plane_of(last), b = plane / a->Hkv, h = plane % a->Hkv;
        if (last > 0) mbarrier_wait(MEMBER_ADDRESS(shared, mean_seen), (uint32_t)(last - 1) & 1);
        __syncwarp();
        if (last >= 0) named_barrier_arrive(MEAN_FOUND, AHEAD_THREADS + CONSUMER_THREADS);
        if (last > 0) { /* those of the first head are loaded already */
            mbarrier_wait(MEMBER_ADDRESS(shared, rows_wanted), (uint32_t)(last - 1) & 1);
            __syncwarp();
            prefetch_rows(&a->o, 2, b, h, a->Sq, thread);
            prefetch_rows(&p->bwd.d_o, 2, b, h, a->Sq, thread);
            if (a->o_rest.p) prefetch_rows(&a->o_rest, 1, b, h, a->Sq, thread);
        }
        if (n < planes && p->bwd.key_mean) find_mean(&p->bwd, plane_of(n), thread);
    }
}
/* Consumers: the rows of a head, for the main loop. */
DEVICE void prepare_rows(const fattni_bwd_args *bwd, int n, uint32_t shared) {
    const int plane = plane_of(n);
    const query_head at = {plane / bwd->a.Hkv, plane % bwd->a.Hkv};
    if (bwd->a.o_rest.p)
        find_statistics(bwd, &at, 1);
    else
        find_statistics(bwd, &at, 0);
    named_barrier_sync(MEAN_FOUND, AHEAD_THREADS + CONSUMER_THREADS);
    arrive_once_per_warp(MEMBER_ADDRESS(shared, mean_seen));
    named_barrier_sync(ROWS_DONE, CONSUMER_THREADS); /* no warp is in the main loop while another prepares */
    async_proxy_fence_global();                      /* the producer has them copied */
    __syncwarp();
    arrive_once_per_warp(ELEMENT_ADDRESS(shared, rows_full, n & 1));
}

/* ---- producer ---- */

/* Whether a step's key block is the last one of its rows. */
DEVICE int ends_rows(const fattni_bwd_sm90_args *p, const task *t, int i0) {
    return CAUSAL ? i0 < t->j0 + BN : t->j0 + BN >= p->bwd.a.Sk;
}
/* load_panels; `once`: nothing reads them again. */
DEVICE void load_tile(uint32_t to, const CUtensorMap *map, uint32_t bar, int rows, int row, int head, int batch,
                      int once) {
    for (int x = 0; x < PANELS; ++x)
        if (once)
            tma_load_once(to + x * rows * 128, map, bar, 64 * x, row, head, batch);
        else
            tma_load(to + x * rows * 128, map, bar, 64 * x, row, head, batch);
}
/* What key block `number` reads. Its tiles are asked for before its head's rows are prepared. */
DEVICE void load_short(const fattni_bwd_sm90_args *p, const task *t, int number, uint32_t shared) {
    const uint32_t k_full = MEMBER_ADDRESS(shared, k_full), v_full = MEMBER_ADDRESS(shared, v_full);
    row_cursor at = first_rows(t);
    for (int n = 0; n < t->steps; ++n, next_rows(&at, t, p)) {
        const step s = step_at(&at, t, n);
        const uint32_t q_full = ELEMENT_ADDRESS(shared, q_full, s.stage),
                       do_full = ELEMENT_ADDRESS(shared, do_full, s.stage);
        mbarrier_wait(ELEMENT_ADDRESS(shared, q_empty, s.stage), s.parity ^ 1);
        const int once = ends_rows(p, t, s.i0);
        load_tile(ELEMENT_ADDRESS(shared, q, s.stage), &p->q, q_full, BM, s.i0, s.h * p->q_step.head,
                  t->b * p->q_step.batch, once);
        if (n == 0) {
            mbarrier_wait(MEMBER_ADDRESS(shared, keys_empty), (uint32_t)t->kv_phase ^ 1);
            load_tile(MEMBER_ADDRESS(shared, k), &p->k, k_full, BN, t->j0, t->hk * p->k_step.head,
                      t->b * p->k_step.batch, !TWO_K_TILES);
            mbarrier_expect(v_full, KEY_BYTES);
            load_tile(MEMBER_ADDRESS(shared, v), &p->v, v_full, BN, t->j0, t->hk * p->v_step.head,
                      t->b * p->v_step.batch, 1);
        }
        mbarrier_wait(ELEMENT_ADDRESS(shared, do_empty, s.stage), s.parity ^ 1);
        load_tile(ELEMENT_ADDRESS(shared, d_o, s.stage), &p->d_o, do_full, BM, s.i0, s.h * p->d_o_step.head,
                  t->b * p->d_o_step.batch, once);
        if (n == 0 && t->j0 == 0) {
            const int head = number / p->schedule.blocks; /* the next one's may be prepared, too */
            mbarrier_wait(ELEMENT_ADDRESS(shared, rows_full, head & 1), (uint32_t)(head >> 1) & 1);
            async_proxy_fence_global();
        }
        const int64_t row = padded_row(&p->bwd, t, &s);
        mbarrier_expect(q_full, ROW_BYTES + BM * 4);
        bulk_load(ELEMENT_ADDRESS(shared, lse2, s.stage), p->bwd.lse2 + row, BM * 4, q_full);
        if (n == 0) {
            const float *const mean = key_mean_of(&p->bwd, t->b, t->hk);
            store_shared_word(MEMBER_ADDRESS(shared, has_mean), mean != 0);
            mbarrier_expect(k_full, KEY_BYTES + (mean ? PANELS * 256 + (TWO_K_TILES ? KEY_BYTES : 0) : 0));
            if (mean) bulk_load(MEMBER_ADDRESS(shared, key_mean), mean, PANELS * 256, k_full);
            if (mean && TWO_K_TILES)
                load_tile(MEMBER_ADDRESS(shared, k_of_dq), &p->k, k_full, BN, t->j0, t->hk * p->k_step.head,
                          t->b * p->k_step.batch, 1);
        }
        mbarrier_expect(do_full, D_O_BYTES + BM * 4);
        bulk_load(ELEMENT_ADDRESS(shared, delta, s.stage), p->bwd.delta + row, BM * 4, do_full);
    }
}

/* ---- consumers ---- */

/* Where dS has one stage, which dK and dV of a task are stored from, too: use number n of it, of a CTA's steps and
   tasks, is after all consumer warps have arrived n times. */
DEVICE int ds_stage_of(const step *now, int number, uint32_t shared) {
    if (DS_STAGES == 1) wait_ds_empty(now->stage + number, shared);
    return DS_STAGES == 1 ? 0 : now->stage;
}
/* Once dK and dV of the task before have been read. */
DEVICE void release_stored_keys(uint32_t shared) {
    if (is_leader()) bulk_wait_read();
    __syncwarp();
    if (DS_STAGES == 1)
        release_ds(shared, is_leader());
    else
        named_barrier_sync(ROWS_DONE, CONSUMER_THREADS);
}
/* A warp's 16 keys, times `scale`, to panels of 64 columns in shared memory, which are 64 keys apart. */
DEVICE void stage_keys(uint32_t to, const float x[D / 2], float scale) {
    const int lane = (int)threadIdx.x % 32;
#pragma unroll
    for (int n = 0; n < D / 16; ++n) { /* 16 columns */
        uint32_t r[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) r[i] = pack(x[8 * n + 2 * i] * scale, x[8 * n + 2 * i + 1] * scale);
        stmatrix_x4(to + n / 4 * 8192 + lane % 16 * 128 + swizzled_chunk(n % 4 * 2 + lane / 16, lane % 8), r);
    }
}
/* dK and dV of a task, by TMA, while the next one begins. */
DEVICE void store_keys(const fattni_bwd_sm90_args *p, int number, uint32_t shared, int consumer, float dk[D / 2],
                       float dv[D / 2]) {
    enum { TILE = PANELS * 8192 }; /* bytes of a consumer's dK or dV */
    const task t = short_task(p, number);
    arrive_once_per_warp(MEMBER_ADDRESS(shared, keys_empty));
    const int warp = (int)threadIdx.x % 128 / 32, key = t.j0 + 64 * consumer + 16 * warp;
    const uint32_t to = MEMBER_ADDRESS(shared, ds) + consumer * (2 * TILE) + warp * 2048;
    if (DS_STAGES == 1)
        wait_ds_empty(t.steps_before + number + t.steps, shared);
    else
        named_barrier_sync(ROWS_DONE, CONSUMER_THREADS); /* the other consumer has read dS, too */
    stage_keys(to, dv, scale_of_dv(&p->bwd));
    stage_keys(to + TILE, dk, p->bwd.dk_scale);
    async_proxy_fence();
    __syncwarp();
    if (is_leader()) {
#pragma unroll
        for (int x = 0; x < PANELS; ++x) {
            tma_store_once(&p->dv, to + x * 8192, 64 * x, key, t.hk * p->dv_step.head, t.b * p->dv_step.batch);
            tma_store_once(&p->dk, to + TILE + x * 8192, 64 * x, key, t.hk * p->dk_step.head, t.b * p->dk_step.batch);
        }
        bulk_commit();
    }
    __syncwarp();
}

/* ---- dQ ---- */

/* dQ of a step's rows, all key blocks added, to the caller. */
DEVICE void store_dq(const fattni_bwd_sm90_args *p, const step *now, int number, int consumer, uint32_t thread,
                     const float dq[COLUMNS / 2]) {
    const fattni_bwd_args *const bwd = &p->bwd;
    const task here = short_task(p, number); /* again: there are no registers to keep it */
    const int row = now->i0 + (SPLIT_ROWS ? 64 * consumer : 0) + (int)(thread / 32 * 16 + thread % 32 / 4),
              column = SPLIT_ROWS ? 0 : COLUMNS * consumer;
    half_type *const to = (half_type *)bwd->dq.p + here.b * bwd->dq.b + here.hk * bwd->dq.h + column;
#pragma unroll
    for (int e = 0; e < 2; ++e)
        store_row(to + (row + 8 * e) * bwd->dq.row, dq + 2 * e, COLUMNS / 8, bwd->dq_scale, row + 8 * e < bwd->a.Sq,
                  bwd->a.D - column, 0, 0);
}
/* dq += what is at `from` in shared memory. */
DEVICE void add_kept(float dq[COLUMNS / 2], uint32_t from) {
#pragma unroll
    for (int c = 0; c < COLUMNS / 8; ++c) {
        uint32_t x[4];
        load_shared_4(x, from + c * 2048);
#pragma unroll
        for (int e = 0; e < 4; ++e) dq[4 * c + e] += __uint_as_float(x[e]);
    }
}
DEVICE void keep(uint32_t to, const float dq[COLUMNS / 2]) {
#pragma unroll
    for (int c = 0; c < COLUMNS / 8; ++c) store_shared_4(to + c * 2048, dq + 4 * c);
}
/* dQ of a step, without scale. */
DEVICE void pass_dq(const fattni_bwd_sm90_args *p, const task *t, const step *now, int number, uint32_t shared,
                    int consumer, uint32_t thread, float dq[COLUMNS / 2]) {
    const int ends = ends_rows(p, t, now->i0);
    uint32_t kept = dq_to(shared, consumer, thread);
    if (KEEPS_DQ) {
        PIN(dq, COLUMNS / 2);
        kept += (uint32_t)(now->i0 / BM - 1) * (BM * D * 4);
        if (t->j0 > 0) add_kept(dq, kept);
        if (!ends) keep(kept, dq);
    } else {
        named_barrier_sync(DQ_EMPTY + consumer, ADDER_THREADS);
        PIN(dq, COLUMNS / 2);
        if (!ends) {
            keep(kept, dq);
            async_proxy_fence();
        } else if (t->j0 > 0) {
            add_kept(dq, kept);
        }
        named_barrier_arrive(DQ_FULL + consumer, ADDER_THREADS);
    }
    if (ends) store_dq(p, now, number, consumer, thread, dq);
}
/* Not KEEPS_DQ: takes a consumer's part of dQ from its buffer to the CTA's accumulator, and for a row block's last key
   block back. One warp. */
DEVICE void add_short(const fattni_bwd_sm90_args *p, uint32_t shared, int consumer) {
    const int count = planes_of_cta(p) * p->schedule.blocks, leader = is_leader();
    const uint32_t buffer = MEMBER_ADDRESS(shared, dq) + consumer * (SLICE * 4),
                   loaded = ELEMENT_ADDRESS(shared, dq_loaded, consumer);
    float *const parts = p->bwd.dq_accumulator + (int64_t)blockIdx.x * p->bwd.padded_rows * D + consumer * SLICE;
    uint32_t phase = 0;
    for (int number = 0; number < count; ++number) {
        const task t = short_task(p, number);
        for (int n = 0; n < t.steps; ++n) {
            const int i0 = t.from + (t.from <= t.last ? n : -n) * BM;
            const int ends = ends_rows(p, &t, i0), begins = t.j0 == 0;
            float *const part = parts + i0 * D;
            if (leader && ends && !begins) {
                mbarrier_expect(loaded, SLICE * 4);
                bulk_load(buffer, part, SLICE * 4, loaded);
                mbarrier_wait(loaded, phase);
            }
            phase ^= ends && !begins;
            __syncwarp();
            named_barrier_arrive(DQ_EMPTY + consumer, ADDER_THREADS);
            named_barrier_sync(DQ_FULL + consumer, ADDER_THREADS);
            if (leader && !ends) {
                if (begins)
                    bulk_store(part, buffer, SLICE * 4);
                else
                    bulk_reduce_add(part, buffer, SLICE * 4);
                bulk_commit();
                bulk_wait_read();
            }
            if (leader && ends) async_proxy_fence(); /* the buffer has been read */
            __syncwarp();
        }
        if (leader) bulk_wait(); /* the next key block adds to them */
        if (leader) async_proxy_fence_global();
        __syncwarp();
    }
}

/* ---- loops over heads ---- */

DEVICE void init_short(uint32_t shared) {
    if (threadIdx.x > 0) return;
    if (DS_STAGES == 1) mbarrier_init(MEMBER_ADDRESS(shared, ds_empty), 8);
    for (int n = 0; n < 2; ++n) mbarrier_init(ELEMENT_ADDRESS(shared, rows_full, n), 8);
    for (int n = 0; n < 2 && !KEEPS_DQ; ++n) mbarrier_init(ELEMENT_ADDRESS(shared, dq_loaded, n), 1);
    mbarrier_init(MEMBER_ADDRESS(shared, mean_seen), 8);
    mbarrier_init(MEMBER_ADDRESS(shared, rows_wanted), 8);
    mbarrier_init_fence();
}
DEVICE void run_short(const fattni_bwd_sm90_args *p, uint32_t shared, const shared_memory *memory, int role) {
    const int blocks = p->schedule.blocks, count = planes_of_cta(p) * blocks;
    const int wanted = D > 64 ? 0 : max(0, blocks - 2); /* with this key block the next head's rows (look_ahead) */
    if (role == 0) {
        registers_lower(40);
        for (int number = 0; threadIdx.x == 0 && number < count; ++number) {
            const task t = short_task(p, number);
            load_short(p, &t, number, shared);
        }
        const int warp = (int)threadIdx.x / 32;
        if (warp >= 4 - AHEAD_WARPS)
            look_ahead(p, shared);
        else if (warp > 0)
            add_short(p, shared, warp - 1);
    } else {
        registers_raise(232);
        for (int number = -1; number < count; ++number) {
            const int next = number + 1;
            if (next % blocks == 0 && next < count) prepare_rows(&p->bwd, next / blocks, shared);
            if (number < 0) continue;
            if (number % blocks == wanted) arrive_once_per_warp(MEMBER_ADDRESS(shared, rows_wanted));
            const task t = short_task(p, number);
            if (number > 0) release_stored_keys(shared);
            main_loop(p, &t, number, shared, memory, role - 1);
        }
        if (is_leader()) bulk_wait();
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) K_NAME(const __grid_constant__ kernel_args p) {
    extern __shared__ __align__(1024) unsigned char SHARED_MEMORY[];
    const uint32_t shared = shared_address(SHARED_MEMORY);
    const int role = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0);
    init_barriers(shared, 2, 1);
    init_short(shared);
    grid_dependency_wait();
    __syncthreads();
    run_short(&p, shared, (const shared_memory *)SHARED_MEMORY, role);
}

#endif
