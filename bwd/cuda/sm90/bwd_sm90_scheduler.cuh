/* The work items of a Hopper backward call. Besides the main loop there is what bwd_preprocess.cu does before it and
   bwd_postprocess.cu after it. Separate kernels for these move the fp32 accumulator of dQ through memory three times,
   which takes as long as the products of short sequences. Here the key heads of a call are divided into head groups,
   whose work items are, in this order,

       preprocess(0);
       for each head group g:  preprocess(g + 1), main loop(g), postprocess(g - LAG);
       postprocess of the last LAG head groups

   PREPROCESS    lse2, delta and a zeroed accumulator for some rows
   MAINLOOP      a key block and all its row blocks (bwd_sm90.cuh, bwd_sm90_cluster.cuh)
   POSTPROCESS   dq = dq_scale * accumulator for some rows

   so that accumulators stay in L2: those of RING head groups, each in the place of an earlier one. Work items are
   claimed in this order and wait only for earlier ones, so there is no deadlock. Three counters per head group say what
   is done. Where `progress` is NULL all work items are MAINLOOP, and the two kernels do the rest.

   Include after what bwd_sm90_common.cuh asks for, and SLICE: floats of an accumulator's row block that 128 threads
   added. Tile c of 8 columns of thread x is float4 number c * 128 + x. */
#ifndef FATTNI_BWD_CUDA_SM90_BWD_SM90_SCHEDULER_H
#define FATTNI_BWD_CUDA_SM90_BWD_SM90_SCHEDULER_H

#include "bwd/cuda/sm90/bwd_sm90_common.cuh"

enum { RING = FATTNI_RING, LAG = FATTNI_LAG, ROWS_AT_ONCE = FATTNI_ROWS_AT_ONCE(D) };
enum { PREPROCESSED, DQ_ADDITIONS, POSTPROCESSED }; /* counters: of work items, but ADDITIONS of dq_additions() */

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
    return min(p->schedule.head_group, p->bwd.a.B * p->bwd.a.Hkv - head_group * p->schedule.head_group);
}
DEVICE int dq_additions(const fattni_bwd_sm90_args *p, int head_group) {
    return 2 * heads_of_group(p, head_group) * p->schedule.blocks;
}

/* Work item `number` of the call. */
DEVICE work_item work_item_of(const fattni_bwd_sm90_args *p, int number) {
    const int rows = p->row_items, keys = p->schedule.head_group * p->schedule.blocks, round = 2 * rows + keys;
    work_item x = {number < p->items ? MAINLOOP : END, 0, number};
    if (!p->progress || x.kind == END) return x;
    if (number < rows) {
        x.kind = PREPROCESS;
    } else if (number - rows < p->head_groups * round) {
        const int head_group = (number - rows) / round, rest = (number - rows) % round;
        x.kind = rest < rows ? PREPROCESS : rest < rows + keys ? MAINLOOP : POSTPROCESS;
        x.head_group = x.kind == PREPROCESS ? head_group + 1 : x.kind == POSTPROCESS ? head_group - LAG : head_group;
        x.number = x.kind == PREPROCESS ? rest
                   : x.kind == MAINLOOP ? head_group * keys + rest - rows
                                        : rest - rows - keys;
    } else {
        const int rest = number - rows - p->head_groups * round;
        x.kind = POSTPROCESS;
        x.head_group = p->head_groups - LAG + rest / rows;
        x.number = rest % rows;
    }
    const int exists =
        x.head_group >= 0 && x.head_group < p->head_groups && (x.kind != MAINLOOP || x.number < p->schedule.tiles);
    if (!exists) x.kind = NOTHING;
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
    s.begin = chunk % p->row_chunks * ROWS_AT_ONCE;
    s.end = min(s.begin + ROWS_AT_ONCE, rows);
    return s;
}
/* Query head number `head` of a head group. */
typedef struct query_head {
    int b, h;
} query_head;
DEVICE query_head head_of(const fattni_bwd_sm90_args *p, int head_group, int head) {
    const int plane = head_group * p->schedule.head_group + head / p->bwd.a.group;
    const query_head at = {plane / p->bwd.a.Hkv, plane % p->bwd.a.Hkv * p->bwd.a.group + head % p->bwd.a.group};
    return at;
}
DEVICE int sequence_rows(const fattni_attention_args *a, int b) { return GENERAL ? sequence_of(a, b).Sq : a->Sq; }
DEVICE float *accumulator_of(const fattni_bwd_sm90_args *p, int head_group, int head) {
    const int64_t place = (int64_t)(head_group % RING) * p->schedule.head_group * p->bwd.a.group + head;
    return p->bwd.dq_accumulator + place * p->bwd.padded_rows * D;
}

/* ---- preprocess ---- */

DEVICE float dot_8(const uint4 *x, const uint4 *y) {
    float sum = 0.0f;
    const uint32_t *const a = (const uint32_t *)x, *const b = (const uint32_t *)y;
#pragma unroll
    for (int n = 0; n < 4; ++n) {
        const float2 u = unpack(a[n]), v = unpack(b[n]);
        sum += u.x * v.x;
        sum += u.y * v.y;
    }
    return sum;
}

/* What keys with a mean need beside delta and lse2, for rows of one head; after these (store_mean_terms). LANES share a
   row, and load AT_ONCE rows before they use them; lane n has row n's result. */
DEVICE void preprocess_means(const fattni_bwd_args *bwd, const query_head *at, const float *mean, int64_t base,
                             const row_range *s, int end, int thread, int threads) {
    enum { LANES = D > 128 ? 32 : D > 64 ? 16 : 8, AT_ONCE = LANES == 16 ? 16 : 8 };
    const fattni_attention_args *const a = &bwd->a;
    const int lane = thread % LANES, column = lane * 8;
    const half_type *const q = (const half_type *)a->q.p + at->b * a->q.b + at->h * a->q.h + column;
    const float *const lse = (const float *)a->lse.p + at->b * a->lse.b + at->h * a->lse.h;
    const float *const d_lse = (const float *)bwd->d_lse.p + at->b * bwd->d_lse.b + at->h * bwd->d_lse.h;
    const float sink = GENERAL && a->sink.p ? float_at(&a->sink, at->h) : -INFINITY;
    const float4 low = *(const float4 *)(mean + column), high = *(const float4 *)(mean + column + 4);
    const float m[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
    __syncwarp();
    named_barrier_sync(ROWS_DONE, threads); /* delta and lse2 are stored */
    for (int first = s->begin; first < s->end; first += threads / LANES * AT_ONCE) {
        const int i0 = first + thread / LANES * AT_ONCE;
        uint4 rows[AT_ONCE];
        float q_mean = 0.0f;
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const int inside = i0 + n < end && column < a->D;
            rows[n] = inside ? *(const uint4 *)(q + (i0 + n) * a->q.row) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
            const uint32_t pairs[4] = {rows[n].x, rows[n].y, rows[n].z, rows[n].w};
            float sum = 0.0f;
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float2 y = unpack(pairs[e]);
                sum += y.x * m[2 * e];
                sum += y.y * m[2 * e + 1];
            }
#pragma unroll
            for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
            if (lane == n) q_mean = sum;
        }
        const int row = i0 + lane;
        if (lane < AT_ONCE && row < s->end)
            store_mean_terms(bwd, base + row, row < end ? lse[row * a->lse.row] : INFINITY, q_mean, sink,
                             row < end && bwd->d_lse.p ? d_lse[row * bwd->d_lse.row] : 0.0f);
    }
}

DEVICE void preprocess(const fattni_bwd_sm90_args *p, const work_item *x, int thread, int threads) {
    /* LANES share a row, and load AT_ONCE rows before they use them: one CTA of an SM must have enough loads in flight.
       Lane n has lse2 and delta of row n. */
    enum { LANES = D > 128 ? 32 : D > 64 ? 16 : 8, AT_ONCE = LANES == 16 ? 16 : 8 };
    const fattni_bwd_args *const bwd = &p->bwd;
    const fattni_attention_args *const a = &p->bwd.a;
    const row_range s = rows_of_item(p, x);
    const int groups = threads / LANES, lane = thread % LANES, column = lane * 8;
    if (x->head_group >= RING)
        wait_counter_all(p, x->head_group - RING, POSTPROCESSED, p->row_items * CTAS, thread, threads);
    for (int head = s.head; head < s.last; ++head) {
        const query_head at = head_of(p, x->head_group, head);
        const half_type *const o = (const half_type *)a->o.p + at.b * a->o.b + at.h * a->o.h + column;
        const half_type *const d_o = (const half_type *)bwd->d_o.p + at.b * bwd->d_o.b + at.h * bwd->d_o.h + column;
        float4 *const zero = (float4 *)(accumulator_of(p, x->head_group, head) + (int64_t)s.begin * D);
        const float *const lse = (const float *)a->lse.p + at.b * a->lse.b + at.h * a->lse.h;
        const int64_t base = ((int64_t)at.b * a->Hq + at.h) * bwd->padded_rows;
        const int end = min(s.end, sequence_rows(a, at.b));
        const float *const mean = key_mean_of(bwd, at.b, at.h / a->group);
        for (int first = s.begin; first < s.end; first += AT_ONCE * groups) {
            const int i0 = first + thread / LANES * AT_ONCE;
            uint4 left[AT_ONCE], right[AT_ONCE];
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const int i = i0 + n, inside = i < end && column < a->Dv;
                left[n] = inside ? *(const uint4 *)(o + i * a->o.row) : make_uint4(0, 0, 0, 0);
                right[n] = inside ? *(const uint4 *)(d_o + i * bwd->d_o.row) : make_uint4(0, 0, 0, 0);
            }
            for (int n = (first - s.begin) * (D / 4) + thread;
                 n < (min(first + AT_ONCE * groups, s.end) - s.begin) * (D / 4); n += threads)
                zero[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const int row = i0 + lane, inside = row < end && lane < AT_ONCE;
            const float L = inside ? lse[row * a->lse.row] : INFINITY;
            float delta = 0.0f;
            if (inside && bwd->d_lse.p)
                delta -=
                    ((const float *)bwd->d_lse.p)[at.b * bwd->d_lse.b + at.h * bwd->d_lse.h + row * bwd->d_lse.row];
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                float sum = dot_8(left + n, right + n);
#pragma unroll
                for (int step = LANES / 2; step > 0; step /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, step);
                if (lane == n) delta += sum;
            }
            if (row < s.end && lane < AT_ONCE) store_statistics(bwd, base + row, L, delta);
        }
        if (mean) preprocess_means(bwd, &at, mean, base, &s, end, thread, threads);
        if (bwd->dq_semaphore) /* no key block has added */
            for (int i0 = s.begin + thread * BM; i0 < min(s.end, a->Sq); i0 += threads * BM)
                bwd->dq_semaphore[((int64_t)at.b * a->Hq + at.h) * ((a->Sq + BM - 1) / BM) + i0 / BM] = 0;
    }
    count_work_item(p, x->head_group, PREPROCESSED, thread, threads);
}

/* ---- postprocess ---- */

/* Tiles of 8 columns in a slice of a row block; of head_dim 80 the second slice has fewer. */
DEVICE int tiles_of(int part, int most) { return BM > 64 || part == 0 ? most : min(most, D / 8 - most); }

/* To accumulators of the rows of one head dq_of_mean times the mean of the keys. Each thread changes those that it
   will read. Padded row `row` is the first. */
DEVICE void add_mean(const fattni_bwd_args *bwd, float4 *accumulators, const float *mean, int64_t row, int slices,
                     int thread, int threads) {
    enum { TILES = SLICE / 512 };
    for (int slice = thread / 128; slice < slices; slice += threads / 128) {
        const int part = slice % 2, tiles = tiles_of(part, TILES);
        const int column = (BM > 64 ? 0 : part * (TILES * 8)) + thread % 4 * 2;
        const int64_t i = row + slice / 2 * BM + (BM > 64 ? 64 * part : 0) + thread % 128 / 32 * 16 + thread % 32 / 4;
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
    enum { TILES = SLICE / 512, PARTS = 2, AT_ONCE = D > 128 ? 1 : 4 };
    const fattni_bwd_args *const bwd = &p->bwd;
    const fattni_attention_args *const a = &p->bwd.a;
    const row_range s = rows_of_item(p, x);
    const int groups = threads / 128, slices = (s.end - s.begin) / BM * PARTS;
    const int t = thread % 4, row = thread % 128 / 32 * 16 + thread % 32 / 4 + t / 2 * 8; /* after transpose_quad */
    wait_counter_all(p, x->head_group, DQ_ADDITIONS, dq_additions(p, x->head_group), thread, threads);
    for (int head = s.head; head < s.last; ++head) {
        const query_head at = head_of(p, x->head_group, head);
        const float4 *const from =
            (const float4 *)(accumulator_of(p, x->head_group, head) + (int64_t)s.begin * D) + thread % 128;
        half_type *const to = (half_type *)bwd->dq.p + at.b * bwd->dq.b + at.h * bwd->dq.h;
        const int rows = sequence_rows(a, at.b);
        if (bwd->dq_of_mean) {
            const float *const mean = key_mean_of(bwd, at.b, at.h / a->group);
            float4 *const begin = (float4 *)(accumulator_of(p, x->head_group, head) + (int64_t)s.begin * D);
            const int64_t row = ((int64_t)at.b * a->Hq + at.h) * bwd->padded_rows + s.begin;
            if (mean) add_mean(bwd, begin, mean, row, slices, thread, threads);
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
                const int i = s.begin + slice / PARTS * BM + row + (BM > 64 ? 64 * part : 0);
                const int column = (BM > 64 ? 0 : part * (TILES * 8)) + t % 2 * 8;
                const int width = slice < slices && i < rows ? min(a->D, column + 8 * tiles_of(part, TILES)) : 0;
                half_type *const to_row = to + i * bwd->dq.row + column;
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
