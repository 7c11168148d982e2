/* PREPROCESS and POSTPROCESS work items (bwd_sm90_scheduler.cuh). What they read comes by the TMA unit: loads by
   threads pass L1, which has 28 KiB beside this shared memory, too few for as many in flight as the memory needs. Each
   128 threads, a group, have ROW_STAGES pieces of shared memory, and load again into one once they have what was there
   in registers. Include after the scheduler and what it asks for, and:

   ROW_STAGES, ROW_STAGE_BYTES   at least UNIT rows of O and dO, and four tiles of a slice
   row_stage_at(group, n)        where a stage is in shared memory
   await_row_stages(group)       until all may be used, not only those from 0 to FIRST_ROW_STAGES - 1; not called in
                                 the first work item of a CTA, where nothing has used them
   rows_full[]                   an mbarrier for each stage of each group, and named barriers from ROWS_READ on */
#ifndef FATTNI_BWD_CUDA_SM90_BWD_SM90_ROWS_H
#define FATTNI_BWD_CUDA_SM90_BWD_SM90_ROWS_H

enum {
    ROW_PANELS = (DV + 63) / 64,
    LANES = 8 * ROW_PANELS,        /* that share a row of O and dO, 16 bytes each */
    UNIT = FATTNI_ROWS_OF_UNIT(D), /* rows of one head that a group has at a time */
    EACH = UNIT * LANES / 128,     /* of these, a group of lanes; they follow each other */
    UNIT_BYTES = UNIT * 128,       /* of a panel */
    TILES = SLICE / 512,           /* of 8 columns, of a slice of the accumulator at most */
    TILES_HELD = ROW_STAGE_BYTES / 2048 < TILES ? ROW_STAGE_BYTES / 2048 : TILES
};
static_assert(2 * ROW_PANELS * UNIT_BYTES <= ROW_STAGE_BYTES && UNIT_BYTES % 1024 == 0 && BM % UNIT == 0 &&
                  32 % LANES == 0 && EACH * 128 == UNIT * LANES && EACH <= LANES && TILES_HELD % 4 == 0,
              "rows of a unit");

/* A group's loads of a work item, one after the other: the stage of the next one that is used, and the parity of its
   mbarrier, which is 0 at the start and at the end. */
typedef struct row_loads {
    uint32_t shared, parity;
    int group, stage;
} row_loads;
DEVICE row_loads first_load(uint32_t shared, int thread) {
    const row_loads x = {shared, 0, thread / 128, 0};
    return x;
}
DEVICE uint32_t row_stage(const row_loads *x) { return x->shared + row_stage_at(x->group, x->stage); }
DEVICE uint32_t row_stage_full(const row_loads *x) {
    return ELEMENT_ADDRESS(x->shared, rows_full, x->group * ROW_STAGES + x->stage);
}
DEVICE void wait_loaded(const row_loads *x) { mbarrier_wait(row_stage_full(x), x->parity); }
/* All threads of a group have what was loaded to a stage. */
DEVICE void release_stage(const row_loads *x) {
    __syncwarp();
    named_barrier_sync(ROWS_READ + x->group, 128);
}
DEVICE void next_stage(row_loads *x) {
    x->stage += 1;
    if (x->stage == ROW_STAGES) x->stage = 0, x->parity ^= 1;
}
DEVICE int is_loader(int thread) { return thread % 128 == 0; }
/* Mbarriers whose parity is 1 complete another phase. */
DEVICE void end_loads(row_loads *x, int thread) {
    if (!is_loader(thread)) return;
    const int last = x->stage;
    for (x->stage = 0; x->stage < ROW_STAGES; ++x->stage)
        if (x->parity ^ (x->stage < last)) mbarrier_arrive(row_stage_full(x));
}

/* Until `count` of `which` are counted; count 0: until all threads are here. Then loads may begin. */
DEVICE void begin_row_item(const fattni_bwd_sm90_args *p, int head_group, int which, int count, int thread,
                           int threads) {
    if (count && is_loader(thread)) wait_counter(p, head_group, which, count);
    __syncwarp();
    named_barrier_sync(ROWS_DONE, threads);
}
/* All `threads`, after what they wrote; `counts`: somebody waits for it. */
DEVICE void end_row_item(const fattni_bwd_sm90_args *p, int head_group, int which, int counts, int thread,
                         int threads) {
    if (counts) async_proxy_fence_global();
    __syncwarp();
    named_barrier_sync(ROWS_DONE, threads);
    if (counts && thread == 0) add_release(counter_of(p, head_group, which), 1);
}

/* Where rows of a row block are: row i of a head's padded rows is row i + shift of its buffers, up to `end`. */
typedef struct row_place {
    int b, shift, end;
} row_place;
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

/* Number n of what each of a work item's heads is divided into, of head number `head` of its head group. A group has
   another one of every `step`. */
typedef struct row_number {
    int head, n;
} row_number;
DEVICE void advance(row_number *x, int step, int of_head) {
    for (x->n += step; x->n >= of_head; x->n -= of_head) x->head += 1;
}
DEVICE row_number first_number(const row_range *s, int group, int of_head) {
    row_number x = {s->head, 0};
    advance(&x, group, of_head);
    return x;
}

/* ---- preprocess ---- */

/* Rows [i0, i0 + UNIT) of one query head of a work item, number `head` of its head group. */
typedef struct row_unit {
    query_head at;
    int head, i0;
    row_place place;
} row_unit;
DEVICE row_unit unit_of(const fattni_bwd_sm90_args *p, const work_item *x, const row_range *s, const row_number *r) {
    row_unit u = {head_of(p, x->head_group, r->head), r->head, s->begin + r->n * UNIT};
    u.place = place_of_rows(&p->bwd, u.at.b, u.i0, min(s->end, sequence_rows(&p->bwd, u.at.b)));
    return u;
}
/* To the stage that is used next. One warp. */
DEVICE void load_unit(const fattni_bwd_sm90_args *p, const row_unit *u, const row_loads *x) {
    const uint32_t to = row_stage(x), full = row_stage_full(x);
    const int row = u->i0 + u->place.shift;
    if (!is_leader()) return;
    mbarrier_expect(full, 2 * ROW_PANELS * UNIT_BYTES);
    for (int n = 0; n < ROW_PANELS; ++n) {
        tma_load_once(to + n * UNIT_BYTES, &p->o_rows, full, 64 * n, row, u->at.h * p->o_step.head,
                      u->at.b * p->o_step.batch);
        tma_load(to + (ROW_PANELS + n) * UNIT_BYTES, &p->d_o_rows, full, 64 * n, row, u->at.h * p->d_o_step.head,
                 u->at.b * p->d_o_step.batch);
    }
}

/* lse2 and delta of a unit, and zeros for its part of the accumulator, while it is loaded; asks for unit `later`, where
   there is one. Lane n of a group of lanes has lse2 and delta of row n of EACH. */
DEVICE void preprocess_unit(const fattni_bwd_sm90_args *p, const work_item *x, const row_range *s,
                            const row_number *now, const row_number *later, const row_loads *loads, int thread,
                            int has_rest) {
    const row_unit unit = unit_of(p, x, s, now), *const u = &unit;
    const fattni_bwd_args *const bwd = &p->bwd;
    const fattni_attention_args *const a = &p->bwd.a;
    const query_head *const at = &u->at;
    const int lane = thread % LANES, column = lane * 8, first = thread % 128 / LANES * EACH;
    const int i = u->i0 + first + lane, row = i + u->place.shift, inside = i < u->place.end && lane < EACH;
    uint2 rest[EACH];
    if (has_rest) {
        const char *const from = (const char *)a->o_rest.p + at->b * a->o_rest.b + at->h * a->o_rest.h + column;
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
            const int j = u->i0 + first + n, is_row = j < u->place.end && column < a->Dv;
            rest[n] = is_row ? *(const uint2 *)(from + (j + u->place.shift) * a->o_rest.row) : make_uint2(0, 0);
        }
    }
    const float *const lse = (const float *)a->lse.p + at->b * a->lse.b + at->h * a->lse.h;
    const float *const d_lse = (const float *)bwd->d_lse.p + at->b * bwd->d_lse.b + at->h * bwd->d_lse.h;
    const float L = inside ? lse[row * a->lse.row] : INFINITY;
    const float d_l = inside && bwd->d_lse.p ? d_lse[row * bwd->d_lse.row] : 0.0f;
    float4 *const zero = (float4 *)(accumulator_of(p, x->head_group, u->head) + (int64_t)u->i0 * D);
#pragma unroll
    for (int n = 0; n < UNIT * D / 4; n += 128)
        if (n + 128 <= UNIT * D / 4 || n + thread % 128 < UNIT * D / 4)
            zero[n + thread % 128] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);

    uint4 left[EACH], right[EACH];
    wait_loaded(loads);
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        const uint32_t from =
            row_stage(loads) + lane / 8 * UNIT_BYTES + (first + n) * 128 + swizzled_chunk(lane % 8, (first + n) % 8);
        load_shared_4(&left[n].x, from);
        load_shared_4(&right[n].x, from + ROW_PANELS * UNIT_BYTES);
    }
    release_stage(loads);
    if (later->head < s->last && thread % 128 < 32) {
        const row_unit next = unit_of(p, x, s, later);
        load_unit(p, &next, loads);
    }
    float delta = 0.0f;
#pragma unroll
    for (int n = 0; n < EACH; ++n) {
        const float sum = dot_of_row(left + n, right + n, rest + n, has_rest, LANES);
        if (lane == n && inside) delta = sum - d_l; /* beyond the end there may be anything */
    }
    if (lane >= EACH) return;
    const int64_t to = ((int64_t)at->b * a->Hq + at->h) * bwd->padded_rows + i;
    store_statistics(bwd, to, L, delta);
    const float sink = BANDS && a->sink.p ? float_at(&a->sink, at->h) : -INFINITY;
    if (!CAPPED && bwd->dq_of_mean) store_sum_of_ds(bwd, to, L, delta, sink, d_l);
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

/* By `threads`; `first`: it is the CTA's first work item. */
DEVICE void preprocess(const fattni_bwd_sm90_args *p, const work_item *x, uint32_t shared, int first, int thread,
                       int threads) {
    const fattni_bwd_args *const bwd = &p->bwd;
    const row_range s = rows_of_item(p, x);
    const int groups = threads / 128, of_head = (s.end - s.begin) / UNIT;
    row_loads loads = first_load(shared, thread);
    row_number now = first_number(&s, loads.group, of_head), later = now;
    begin_row_item(p, x->head_group - RING, POSTPROCESSED, x->head_group < RING ? 0 : p->row_items * CTAS, thread,
                   threads);
    for (; loads.parity == 0; advance(&later, groups, of_head), next_stage(&loads)) {
        if (loads.stage == FIRST_ROW_STAGES && !first) await_row_stages(loads.group);
        if (later.head >= s.last || thread % 128 >= 32) continue;
        const row_unit unit = unit_of(p, x, &s, &later);
        load_unit(p, &unit, &loads);
    }
    __syncwarp();
    loads.parity = 0;
    for (; now.head < s.last; advance(&now, groups, of_head), advance(&later, groups, of_head), next_stage(&loads))
        if (p->bwd.a.o_rest.p)
            preprocess_unit(p, x, &s, &now, &later, &loads, thread, 1);
        else
            preprocess_unit(p, x, &s, &now, &later, &loads, thread, 0);
    end_loads(&loads, thread);
    for (int head = s.head; head < s.last && bwd->dq_semaphore; ++head) {
        const query_head at = head_of(p, x->head_group, head);
        zero_semaphores(bwd, &at, &s, thread, threads);
    }
    end_row_item(p, x->head_group, PREPROCESSED, 1, thread, threads);
}

/* ---- postprocess ---- */

/* Tiles [tile, tile + tiles) of a slice of a row block's accumulator. A row block has two slices: rows below and from
   64 on, or halves of the columns, of which the second one of head_dim 80 has fewer. */
typedef struct slice_part {
    int head, i0, part, tile, tiles; /* part: which slice */
} slice_part;
enum { SLICE_LOADS = (TILES + TILES_HELD - 1) / TILES_HELD };
DEVICE slice_part slice_of(const row_range *s, const row_number *r) {
    const int slice = r->n / SLICE_LOADS;
    slice_part x = {r->head, s->begin + slice / 2 * BM, slice % 2, r->n % SLICE_LOADS * TILES_HELD};
    const int most = BM > 64 || x.part == 0 ? TILES : min(TILES, D / 8 - TILES);
    x.tiles = max(0, min(TILES_HELD, most - x.tile));
    return x;
}
DEVICE float *slice_at(const fattni_bwd_sm90_args *p, const work_item *x, const slice_part *s) {
    return accumulator_of(p, x->head_group, s->head) + (int64_t)s->i0 * D + s->part * SLICE + s->tile * 512;
}
/* To the stage that is used next. One thread. */
DEVICE void load_slice(const fattni_bwd_sm90_args *p, const work_item *x, const slice_part *s, const row_loads *loads) {
    mbarrier_expect(row_stage_full(loads), s->tiles * 2048);
    if (s->tiles) bulk_load(row_stage(loads), slice_at(p, x, s), s->tiles * 2048, row_stage_full(loads));
}

/* dq of a part of a slice, with dq_of_mean times the mean of the keys; asks for part `later`, where there is one. */
DEVICE void postprocess_slice(const fattni_bwd_sm90_args *p, const work_item *x, const row_range *rows,
                              const row_number *now, const row_number *later, const row_loads *loads, int thread) {
    const slice_part slice = slice_of(rows, now), *const s = &slice;
    const fattni_bwd_args *const bwd = &p->bwd;
    const fattni_attention_args *const a = &p->bwd.a;
    const query_head at = head_of(p, x->head_group, s->head);
    const row_place place = place_of_rows(bwd, at.b, s->i0, sequence_rows(bwd, at.b));
    const int row = s->i0 + (BM > 64 ? 64 * s->part : 0) + thread % 128 / 32 * 16; /* of the warp's 16 */
    const int column = (BM > 64 ? 0 : s->part * (TILES * 8)) + s->tile * 8;
    const float *const mean = bwd->dq_of_mean ? key_mean_of(bwd, packs(bwd) ? place.b : at.b, at.h / a->group) : 0;
    float4 y[TILES_HELD];
    wait_loaded(loads);
#pragma unroll
    for (int c = 0; c < TILES_HELD; ++c)
        if (c < s->tiles) {
            uint32_t words[4];
            load_shared_4(words, row_stage(loads) + (c * 128 + thread % 128) * 16);
            y[c] = make_float4(__uint_as_float(words[0]), __uint_as_float(words[1]), __uint_as_float(words[2]),
                               __uint_as_float(words[3]));
        } else {
            y[c] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
    release_stage(loads);
    if (later->head < rows->last && is_loader(thread)) {
        const slice_part next = slice_of(rows, later);
        load_slice(p, x, &next, loads);
    }
    if (mean) {
        const int64_t i = ((int64_t)at.b * a->Hq + at.h) * bwd->padded_rows + row + thread % 32 / 4;
        const float sum = bwd->dq_of_mean[i], sum8 = bwd->dq_of_mean[i + 8];
#pragma unroll
        for (int c = 0; c < TILES_HELD; ++c)
            if (c < s->tiles) {
                const float2 m = *(const float2 *)(mean + column + 8 * c + thread % 4 * 2);
                y[c] = make_float4(y[c].x + sum * m.x, y[c].y + sum * m.y, y[c].z + sum8 * m.x, y[c].w + sum8 * m.y);
            }
    }
    const int t = thread % 4, i = row + thread % 32 / 4, begin = column + t * 8, end = min(a->D, column + 8 * s->tiles);
    half_type *const to =
        (half_type *)bwd->dq.p + at.b * bwd->dq.b + at.h * bwd->dq.h + (i + place.shift) * bwd->dq.row + begin;
#pragma unroll
    for (int c = 0; c < TILES_HELD; c += 4) /* lane t of a quad has tile c + t: 64 bytes of a row at a time */
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            uint32_t r[4];
#pragma unroll
            for (int n = 0; n < 4; ++n) {
                const float4 z = y[c + n];
                r[n] = pack(bwd->dq_scale * (e ? z.z : z.x), bwd->dq_scale * (e ? z.w : z.y));
            }
            transpose_quad(r);
            store_global_4_if(to + 8 * e * bwd->dq.row + c * 8, r, begin + c * 8 < end && i + 8 * e < place.end);
        }
}

DEVICE void postprocess(const fattni_bwd_sm90_args *p, const work_item *x, uint32_t shared, int first, int thread,
                        int threads) {
    const row_range s = rows_of_item(p, x);
    const int groups = threads / 128, of_head = (s.end - s.begin) / BM * (2 * SLICE_LOADS);
    row_loads loads = first_load(shared, thread);
    row_number now = first_number(&s, loads.group, of_head), later = now;
    if (p->bwd.dq_of_mean && finds_means(p) && thread == 0) /* who adds nothing has not asked for means */
        group_has_means(p, x->head_group, 0);
    begin_row_item(p, x->head_group, DQ_ADDITIONS, dq_additions(p, x->head_group), thread, threads);
    for (; loads.parity == 0; advance(&later, groups, of_head), next_stage(&loads)) {
        if (loads.stage == FIRST_ROW_STAGES && !first) await_row_stages(loads.group);
        if (later.head >= s.last || !is_loader(thread)) continue;
        const slice_part slice = slice_of(&s, &later);
        load_slice(p, x, &slice, &loads);
    }
    __syncwarp();
    loads.parity = 0;
    for (; now.head < s.last; advance(&now, groups, of_head), advance(&later, groups, of_head), next_stage(&loads))
        postprocess_slice(p, x, &s, &now, &later, &loads, thread);
    end_loads(&loads, thread);
    end_row_item(p, x->head_group, POSTPROCESSED, x->head_group + RING < p->head_groups, thread, threads);
}

#endif
