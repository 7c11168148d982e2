/* The pieces of work of a Hopper backward pass. Beside the products there is what bwd_preprocess.cu does
   before and bwd_postprocess.cu after: as kernels of their own they move the fp32 accumulator of dQ through
   memory three times, which takes as long as the products of short sequences. Here the heads of a call are
   cut into sections, whose pieces are, in order,

       prepare(0);  for each section s:  prepare(s + 1), multiply(s), finish(s - LAG);  finish the rest

   prepare   lse2, delta and an accumulator of zeros for some rows
   multiply  one block of keys, all its row blocks (bwd_sm90.cuh, bwd_sm90_cluster.cuh)
   finish    dq = scale * accumulator for some rows

   so that accumulators live in L2: those of RING sections, each in the place of an earlier one. Pieces are
   started in this order and wait only for earlier ones, so there is no deadlock. Three counters per section
   say how far it is; `progress` NULL: all pieces multiply, and the two kernels do the rest.

   Include after what bwd_sm90_common.cuh wants, and SLICE, floats of an accumulator's row block that 128 threads
   added: tile c of 8 columns of thread x is float4 number c * 128 + x. */
#ifndef FATTNI_BWD_CUDA_BWD_SM90_SCHEDULER_H
#define FATTNI_BWD_CUDA_BWD_SM90_SCHEDULER_H

#include "bwd/cuda/bwd_sm90_common.cuh"

enum { PREPARED, ADDED, FINISHED }; /* pieces, adders, pieces */

DEVICE int32_t *counter_of(const fattni_sm90_args *p, int section, int which) {
    return p->progress + section * FATTNI_COUNTERS + which;
}

/* One thread, before it or those behind a barrier read what others wrote. */
DEVICE void await(const fattni_sm90_args *p, int section, int which, int count) {
    while (load_acquire(counter_of(p, section, which)) < count) {}
    async_proxy_fence_global();
}
/* All `threads` wait, one of them for others. */
DEVICE void await_all(const fattni_sm90_args *p, int section, int which, int count, int thread, int threads) {
    if (thread == 0) await(p, section, which, count);
    __syncwarp();
    named_barrier_sync(ROWS_DONE, threads);
}
/* One thread, after sums that are complete. */
DEVICE void report_sums(const fattni_sm90_args *p, int section) {
    async_proxy_fence_global();
    add_release(counter_of(p, section, ADDED), 1);
}
/* All `threads`, after their writes. */
DEVICE void report(const fattni_sm90_args *p, int section, int which, int thread, int threads) {
    async_proxy_fence_global();
    named_barrier_sync(ROWS_DONE, threads);
    if (thread == 0) add_release(counter_of(p, section, which), 1);
}

/* Heads of a section: all but the last have p->section of a key head. */
DEVICE int section_heads(const fattni_sm90_args *p, int section) {
    return min(p->section, p->a.B * p->a.Hkv - section * p->section);
}
DEVICE int adders(const fattni_sm90_args *p, int section) {
    return 2 * section_heads(p, section) * p->blocks;
}

/* Piece `number` of the call. */
DEVICE piece piece_of(const fattni_sm90_args *p, int number) {
    const int rows = p->row_pieces, keys = p->section * p->blocks, round = 2 * rows + keys;
    piece x = {number < p->pieces ? MULTIPLY : END, 0, number};
    if (!p->progress || x.kind == END) return x;
    if (number < rows) {
        x.kind = PREPARE;
    } else if (number - rows < p->sections * round) {
        const int section = (number - rows) / round, rest = (number - rows) % round;
        x.kind = rest < rows ? PREPARE : rest < rows + keys ? MULTIPLY : FINISH;
        x.section = x.kind == PREPARE ? section + 1 : x.kind == FINISH ? section - LAG : section;
        x.number = x.kind == PREPARE    ? rest
                   : x.kind == MULTIPLY ? section * keys + rest - rows
                                        : rest - rows - keys;
    } else {
        const int rest = number - rows - p->sections * round;
        x.kind = FINISH;
        x.section = p->sections - LAG + rest / rows;
        x.number = rest % rows;
    }
    const int exists = x.section >= 0 && x.section < p->sections && (x.kind != MULTIPLY || x.number < p->tiles);
    if (!exists) x.kind = NOTHING;
    return x;
}

/* What a piece of rows covers, or this CTA's share of it: rows [begin, end) of heads [head, last) of its
   section, as query heads. */
typedef struct stretch {
    int head, last, begin, end;
} stretch;
DEVICE stretch stretch_of(const fattni_sm90_args *p, const piece *x) {
    const int rows = p->a.padded_rows, chunk = CTAS * x->number + (int)blockIdx.x % CTAS;
    stretch s;
    s.head = chunk / p->row_chunks * p->row_heads;
    s.last = min(s.head + p->row_heads, section_heads(p, x->section) * p->a.group);
    s.begin = chunk % p->row_chunks * ROWS_AT_ONCE;
    s.end = min(s.begin + ROWS_AT_ONCE, rows);
    return s;
}
/* Query head number `head` of a section. */
typedef struct query_head {
    int b, h;
} query_head;
DEVICE query_head head_of(const fattni_sm90_args *p, int section, int head) {
    const int plane = section * p->section + head / p->a.group;
    const query_head at = {plane / p->a.Hkv, plane % p->a.Hkv * p->a.group + head % p->a.group};
    return at;
}
DEVICE int rows_of(const fattni_cuda_args *a, int b) { return GENERAL ? sequence_of(a, b).Sq : a->Sq; }
DEVICE float *accumulator_of(const fattni_sm90_args *p, int section, int head) {
    const int64_t place = (int64_t)(section % RING) * p->section * p->a.group + head;
    return p->a.dq_accumulator + place * p->a.padded_rows * D;
}

/* ---- before the products ---- */

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

DEVICE void prepare(const fattni_sm90_args *p, const piece *x, int thread, int threads) {
    /* Lanes of a row, and rows of such a group under way: an SM alone has to have much of it under way, and
       all that a row needs is asked for at once. Lane n has the statistics of row n. */
    enum { LANES = D > 128 ? 32 : D > 64 ? 16 : 8, AT_ONCE = LANES == 16 ? 16 : 8 };
    const fattni_cuda_args *const a = &p->a;
    const stretch s = stretch_of(p, x);
    const int groups = threads / LANES, lane = thread % LANES, column = lane * 8;
    if (x->section >= RING)
        await_all(p, x->section - RING, FINISHED, p->row_pieces * CTAS, thread, threads);
    for (int head = s.head; head < s.last; ++head) {
        const query_head at = head_of(p, x->section, head);
        const half_type *const o = (const half_type *)a->o.p + at.b * a->o.b + at.h * a->o.h + column;
        const half_type *const d_o =
            (const half_type *)a->d_o.p + at.b * a->d_o.b + at.h * a->d_o.h + column;
        float4 *const zero = (float4 *)(accumulator_of(p, x->section, head) + (int64_t)s.begin * D);
        const float *const lse = (const float *)a->lse.p + at.b * a->lse.b + at.h * a->lse.h;
        const int64_t base = ((int64_t)at.b * a->Hq + at.h) * a->padded_rows;
        const int end = min(s.end, rows_of(a, at.b));
        for (int first = s.begin; first < s.end; first += AT_ONCE * groups) {
            const int i0 = first + thread / LANES * AT_ONCE;
            uint4 left[AT_ONCE], right[AT_ONCE];
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const int i = i0 + n, inside = i < end && column < a->Dv;
                left[n] = inside ? *(const uint4 *)(o + i * a->o.row) : make_uint4(0, 0, 0, 0);
                right[n] = inside ? *(const uint4 *)(d_o + i * a->d_o.row) : make_uint4(0, 0, 0, 0);
            }
            for (int n = (first - s.begin) * (D / 4) + thread;
                 n < (min(first + AT_ONCE * groups, s.end) - s.begin) * (D / 4); n += threads)
                zero[n] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            const int mine = i0 + lane, there = mine < end && lane < AT_ONCE;
            const float L = there ? lse[mine * a->lse.row] : INFINITY;
            float delta = 0.0f;
            if (there && a->d_lse.p)
                delta -= ((const float *)a->d_lse.p)[at.b * a->d_lse.b + at.h * a->d_lse.h + mine * a->d_lse.row];
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                float sum = dot_8(left + n, right + n);
#pragma unroll
                for (int step = LANES / 2; step > 0; step /= 2)
                    sum += __shfl_xor_sync(ALL_LANES, sum, step);
                if (lane == n) delta += sum;
            }
            if (mine < s.end && lane < AT_ONCE) store_statistics(a, base + mine, L, delta);
        }
        if (a->turns) /* none has added yet */
            for (int i0 = s.begin + thread * BM; i0 < min(s.end, a->Sq); i0 += threads * BM)
                a->turns[((int64_t)at.b * a->Hq + at.h) * ((a->Sq + BM - 1) / BM) + i0 / BM] = 0;
    }
    report(p, x->section, PREPARED, thread, threads);
}

/* ---- after them ---- */

/* Tiles of 8 columns of a row block's slice; the second of d 80 has fewer. */
DEVICE int tiles_of(int part, int most) {
    return BM > 64 || part == 0 ? most : min(most, D / 8 - most);
}

DEVICE void finish(const fattni_sm90_args *p, const piece *x, int thread, int threads) {
    /* The most tiles of a slice; slices of a row block; and under way. */
    enum { TILES = SLICE / 512, PARTS = 2, AT_ONCE = D > 128 ? 1 : 4 };
    const fattni_cuda_args *const a = &p->a;
    const stretch s = stretch_of(p, x);
    const int groups = threads / 128, slices = (s.end - s.begin) / BM * PARTS;
    const int t = thread % 4, row = thread % 128 / 32 * 16 + thread % 32 / 4 + t / 2 * 8; /* after the transposition */
    await_all(p, x->section, ADDED, adders(p, x->section), thread, threads);
    for (int head = s.head; head < s.last; ++head) {
        const query_head at = head_of(p, x->section, head);
        const float4 *const from =
            (const float4 *)(accumulator_of(p, x->section, head) + (int64_t)s.begin * D) + thread % 128;
        half_type *const to = (half_type *)a->dq.p + at.b * a->dq.b + at.h * a->dq.h;
        const int rows = rows_of(a, at.b);
        for (int first = thread / 128; first < slices; first += AT_ONCE * groups) {
            float4 y[AT_ONCE][TILES];
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const int slice = first + n * groups, tiles = tiles_of(slice % PARTS, TILES);
                const float4 *const mine = from + (slice / PARTS * (BM * D) + slice % PARTS * SLICE) / 4;
#pragma unroll
                for (int c = 0; c < TILES; ++c)
                    y[n][c] = slice < slices && c < tiles ? __ldcg(mine + c * 128)
                                                          : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            }
#pragma unroll
            for (int n = 0; n < AT_ONCE; ++n) {
                const int slice = first + n * groups, part = slice % PARTS;
                const int i = s.begin + slice / PARTS * BM + row + (BM > 64 ? 64 * part : 0);
                const int column = (BM > 64 ? 0 : part * (TILES * 8)) + t % 2 * 8;
                const int width = slice < slices && i < rows ? min(a->D, column + 8 * tiles_of(part, TILES)) : 0;
                half_type *const to_row = to + i * a->dq.row + column;
#pragma unroll
                for (int c = 0; c < TILES; c += 2) { /* lane t of a quad: tile c + t % 2, row 8 (t / 2) */
                    uint32_t r[4];
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const float4 z = y[n][c + e];
                        r[e] = pack(a->dq_scale * z.x, a->dq_scale * z.y);
                        r[2 + e] = pack(a->dq_scale * z.z, a->dq_scale * z.w);
                    }
                    transpose_quad(r);
                    store_global_4_if(to_row + c * 8, r, column + c * 8 < width);
                }
            }
        }
    }
    report(p, x->section, FINISHED, thread, threads);
}

#endif
