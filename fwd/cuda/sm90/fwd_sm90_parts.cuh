/* Row blocks whose keys are divided among tiles (fwd_sm90.cuh): calls with few row blocks, or with a long last wave.

   A part has m, l and O of its keys. All but the last store O, and a counter tells how many have; the last one adds
   theirs to its own, in their order: with m = max(m1, m2), O = O1 exp(m1 - m) + O2 exp(m2 - m), l likewise. Then its
   rows end as those of a tile that has all keys. It waits for parts whose tiles were started before it (first_number).

   The counter is for another warp: before it counts, what was stored must have arrived, for which the consumers' next
   softmax would wait.

   Scores of far rows are relative to shifts: m1 and m2 are compared after the difference of these has been added. */
#ifndef FATTNI_FWD_CUDA_SM90_FWD_SM90_PARTS_H
#define FATTNI_FWD_CUDA_SM90_FWD_SM90_PARTS_H

#include "core/ptx/acquire.h"
#include "core/ptx/load_once.h"

/* The row block's number in all of the call. */
DEVICE int number_of(const fattni_fwd_sm90_args *p, const volatile tile_slot *from) {
    return (from->b * p->a.Hq + from->h) * p->schedule.blocks + from->i0 / BM;
}
/* Where a part stores row `row0` of its rows. */
DEVICE fattni_part_row *row_of_part(const fattni_fwd_sm90_args *p, int row_block, int part, int row0) {
    return p->part_rows + ((int64_t)row_block * (int)p->order.parts.by + part) * BM + row0;
}
/* Where it stores this lane's O; float4s are 32 apart. */
DEVICE float4 *sums_of_part(const fattni_fwd_sm90_args *p, int row_block, int part, int row0) {
    const int64_t warps = ((int64_t)row_block * ((int)p->order.parts.by - 1) + part) * (BM / 16) + row0 / 16;
    return (float4 *)p->part_sums + warps * (16 * DV / 4) + (int)threadIdx.x % 32;
}

/* This thread's two rows of a part. */
DEVICE void store_rows(const fattni_fwd_sm90_args *p, const volatile tile_slot *from, int row0, const row_state *r,
                       const float sum[2], const shared_memory *smem) {
    fattni_part_row *const to = row_of_part(p, number_of(p, from), from->part, row0);
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const float shift = has_shifts(r) ? smem->shifts[row0 + 8 * e] : 0.0f;
        if (threadIdx.x % 4 == 0) __stcg((float4 *)(to + 8 * e), make_float4(r->m[e], sum[e], shift, 0.0f));
    }
    __syncwarp(); /* join_parts reads them in all lanes */
}

DEVICE float4 load_of_part(const void *from) {
    uint32_t x[4];
    load_once_4(x, from);
    return make_float4(__uint_as_float(x[0]), __uint_as_float(x[1]), __uint_as_float(x[2]), __uint_as_float(x[3]));
}
/* The number of the row block of which this warp has stored a part; of no row block after the last tile. */
DEVICE void post_part(uint32_t shared, shared_memory *smem, int warp, int row_block) {
    part_board *const board = &smem->parts;
    volatile int *const count = &board->count[warp];
    const int n = *count;
    if (n > 0) mbarrier_wait(MEMBER_ADDRESS(shared, parts.empty), (uint32_t)(n - 1) & 1);
    __syncwarp(); /* all lanes have stored, and read the count */
    if (!is_leader()) return;
    *count = n + 1;
    store_same_integer(board->row_block + n % 2, row_block);
    mbarrier_arrive(MEMBER_ADDRESS(shared, parts.full));
}
/* By a warp of the producer's. */
DEVICE void publish_parts(const fattni_fwd_sm90_args *p, uint32_t shared, const shared_memory *smem) {
    if (!is_leader()) return;
    for (int n = 0;; ++n) {
        mbarrier_wait(MEMBER_ADDRESS(shared, parts.full), (uint32_t)n & 1);
        const int row_block = ((const volatile int *)smem->parts.row_block)[n % 2];
        if (row_block < 0) return;
        if (n == 0) grid_dependency_wait(); /* the counters are zero */
        add_release(p->parts_stored + row_block, 1);
        mbarrier_arrive(MEMBER_ADDRESS(shared, parts.empty));
    }
}

/* Stores O, and it is no longer pending; or, of the last part, adds the others to it, and its scale is known. */
DEVICE void join_parts(const fattni_fwd_sm90_args *p, shared_memory *smem, uint32_t shared,
                       const volatile tile_slot *from, int row0, int64_t lse, int *pending, o_scale *scale,
                       float o[DV / 2]) {
    enum { AT_ONCE = DV % 128 == 0 ? 16 : 8 }; /* loads that do not wait for each other */
    const int part = from->part, parts = from->parts, row_block = number_of(p, from);
    if (part + 1 < parts) {
        float4 *const to = sums_of_part(p, row_block, part, row0);
#pragma unroll
        for (int n = 0; n < DV / 8; ++n)
            __stcg(to + 32 * n, make_float4(o[4 * n], o[4 * n + 1], o[4 * n + 2], o[4 * n + 3]));
        post_part(shared, smem, row0 / 16, row_block);
        *pending = 0;
        return;
    }
    float m[2], sum[2], shift[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const float4 x = __ldcg((const float4 *)(row_of_part(p, row_block, part, row0) + 8 * e));
        m[e] = x.x, sum[e] = x.y, shift[e] = x.z;
    }
    if (is_leader()) {
        grid_dependency_wait(); /* the counters are zero */
        while (load_acquire(p->parts_stored + row_block) < parts - 1) {}
    }
    __syncwarp();
    const float unit = p->scale_log2;
#pragma unroll 1
    for (int n = 0; n < parts - 1; ++n) {
        const float4 *const from_o = sums_of_part(p, row_block, n, row0);
        const fattni_part_row *const from_row = row_of_part(p, row_block, n, row0);
        float own[2], other[2]; /* factors */
#pragma unroll
        for (int first = 0; first < DV / 8; first += AT_ONCE) {
            float4 x[AT_ONCE], row[2];
#pragma unroll
            for (int c = 0; c < AT_ONCE; ++c) x[c] = load_of_part(from_o + 32 * (first + c));
            if (first == 0) {
#pragma unroll
                for (int e = 0; e < 2; ++e) row[e] = load_of_part(from_row + 8 * e);
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    /* m of that part, relative to this shift */
                    const float above = fmaf(row[e].z - shift[e], unit, row[e].x);
                    const int higher = above > m[e];
                    own[e] = higher ? exp2_approx(m[e] - above) : 1.0f;
                    other[e] = higher ? 1.0f : exp2_approx(row[e].x == -INFINITY ? -INFINITY : above - m[e]);
                    sum[e] = fmaf(sum[e], own[e], row[e].y * other[e]);
                    if (higher) m[e] = row[e].x, shift[e] = row[e].z;
                }
            }
#pragma unroll
            for (int c = 0; c < AT_ONCE; ++c) {
                float *const to = o + 4 * (first + c);
                to[0] = fmaf(to[0], own[0], x[c].x * other[0]), to[1] = fmaf(to[1], own[0], x[c].y * other[0]);
                to[2] = fmaf(to[2], own[1], x[c].z * other[1]), to[3] = fmaf(to[3], own[1], x[c].w * other[1]);
            }
        }
    }
    shift[0] *= p->a.scale, shift[1] *= p->a.scale;
    *scale = end_rows(&p->a, from, lse, row0, m, sum, shift, 1);
}

#endif
