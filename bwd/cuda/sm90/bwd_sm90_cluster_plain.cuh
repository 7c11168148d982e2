/* The consumers of bwd_sm90_cluster.cuh in FULL, CAUSAL and BANDED instances; with lengths the general one runs, for
   nothing is cleared here. The first has S and P, the second dP and dS: one product of 64 keys x 64 rows reads a third
   less from shared memory than two of 64 x 32. Of dV and dK each has half of the columns. P reaches the second as two
   numbers of the input dtype: P rounded, for dV, and what was rounded off. The first goes on to the next S while the
   second has dS. */
#ifndef FATTNI_BWD_CUDA_SM90_BWD_SM90_CLUSTER_PLAIN_H
#define FATTNI_BWD_CUDA_SM90_BWD_SM90_CLUSTER_PLAIN_H

/* Named barriers: of one consumer's warps, and of both consumers. */
enum { P_STORED = 1, P_WRITTEN = 2, DS_STORED = 3, DS_WRITTEN = 4 };

/* x = A B^T: 64 keys x 64 rows, over 2 `half` columns. */
DEVICE void keys_by_rows(float x[BM / 2], int half, int panels, uint32_t keys, uint32_t rows) {
    const uint64_t left = operand_descriptor(keys, 0), right = operand_descriptor(rows, 0);
    wgmma_ss_new_n64(x, left, right);
#pragma unroll
    for (int e = 1; e < half / 8; ++e)
        wgmma_ss_n64(x, left + advance_halves(e, half, panels, BN), right + advance_halves(e, half, panels, BM), 1);
}
DEVICE void scores_of(float s[BM / 2], uint32_t base, int stage) {
    keys_by_rows(s, HALF, PANELS, MEMBER_ADDRESS(base, k), MEMBER_ADDRESS(base, q) + stage * ROW_BYTES);
}
/* A consumer's half of the columns. */
DEVICE void add_to_dv(float dv[V_HALF / 2], uint32_t base, int stage, int half) {
    accumulate(dv, V_HALF, operand_descriptor(MEMBER_ADDRESS(base, p[0]), 0),
               operand_descriptor(MEMBER_ADDRESS(base, d_o) + stage * D_O_BYTES + half * (D_O_BYTES / 2), BM * 128));
}
DEVICE void add_to_dk(float dk[HALF / 2], uint32_t base, int stage, int half) {
    accumulate(dk, HALF, operand_descriptor(MEMBER_ADDRESS(base, ds) + stage * TILE_BYTES, 0),
               operand_descriptor(MEMBER_ADDRESS(base, q) + stage * ROW_BYTES + half * (ROW_BYTES / 2), BM * 128));
}

/* Where this thread stores or loads matrices of its warp's 16 keys in a tile [BN][BM]: chunk 0 of 8 rows (lanes 0-15)
   or chunk 1; XOR 32 n: chunks 2n and 2n + 1. */
DEVICE uint32_t matrices_at(uint32_t tile, int thread) {
    const int warp = thread / 32 % 4, lane = thread % 32;
    return tile + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
}
DEVICE int first_row(int thread) { return thread % 4 * 2; }

/* S of step n to P, in shared memory as two numbers. */
DEVICE void store_p(float s[BM / 2], const float2 lse2[BM / 2], const fattni_attention_args *a, const task *t,
                    const step *now, int n, uint32_t shared) {
    const int key = first_key(t);
    const int row0 = first_row((int)threadIdx.x);
    if (BANDS)
        mask_band(s, BM, &t->s, now->i0, row0, t->j0, key);
    else
        mask_edge(s, BM, crosses_edge(&t->s, now->i0, t->j0), a->Sk, t->s.hi, now->i0, row0, key);
    /* Both consumers' dV has read the last P. */
    mbarrier_wait(ELEMENT_ADDRESS(shared, do_empty, do_stage(n - 1)), do_parity(n - 1));
    const uint32_t to = matrices_at(MEMBER_ADDRESS(shared, p[0]), (int)threadIdx.x);
#pragma unroll
    for (int i = 0; i < BM / 16; ++i) {
        uint32_t rounded[4], rest[4];
        float *const p = s + 8 * i;
        exponentials((float(*)[4])p, 2, a->scale * LOG2E, lse2 + 8 * i);
        round_pairs(rounded, p, 8);
        stmatrix_x4(to ^ 32 * i, rounded);
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 high = unpack(rounded[e]);
            rest[e] = pack(p[2 * e] - high.x, p[2 * e + 1] - high.y);
        }
        stmatrix_x4((to ^ 32 * i) + TILE_BYTES, rest);
    }
    async_proxy_fence();
    named_barrier_sync(P_STORED, 128);
    named_barrier_arrive(P_WRITTEN, 256);
}

/* The first consumer. */
DEVICE void main_loop_of_p(const fattni_bwd_sm90_args *p, const task *t, uint32_t shared, const shared_memory *memory,
                           float dk[HALF / 2], float dv[V_HALF / 2]) {
    const fattni_attention_args *const a = &p->bwd.a;
    float s[BM / 2];
    float2 lse2[BM / 2]; /* every fourth, as `statistics` has it */
    row_cursor rows = first_rows(t);
    step now = step_at(&rows, t, 0);
    mbarrier_wait(MEMBER_ADDRESS(shared, k_full), 0);
    mbarrier_wait(MEMBER_ADDRESS(shared, q_full[0]), 0);
    wgmma_fence();
    scores_of(s, shared, 0);
    wgmma_commit();
    wgmma_wait(0);
    PIN(s, BM / 2);
    store_p(s, statistics(memory->lse2[0], first_row((int)threadIdx.x)), a, t, &now, 0, shared);
    for (int n = 0; n + 1 < t->steps; ++n) {
        next_rows(&rows, t, p);
        const step next = step_at(&rows, t, n + 1);
        uint32_t base = shared;
        asm volatile("" : "+r"(base)); /* hides it: descriptors are recomputed, kept from above the loop they spill */
        mbarrier_wait(ELEMENT_ADDRESS(base, do_full, do_stage(n)), do_parity(n));
        PIN(dv, V_HALF / 2);
        wgmma_fence();
        add_to_dv(dv, base, do_stage(n), 0);
        wgmma_commit();
        wgmma_wait(0);
        PIN(dv, V_HALF / 2);
        arrive_once_per_warp(ELEMENT_ADDRESS(base, do_empty, do_stage(n)));
        mbarrier_wait(ELEMENT_ADDRESS(base, q_full, next.stage), next.parity);
        const float2 *const from = statistics(memory->lse2[next.stage], first_row((int)threadIdx.x));
#pragma unroll /* before the products are issued: beside them loads are slow */
        for (int i = 0; i < BM / 2; i += 4) lse2[i] = from[i];
        wgmma_fence();
        scores_of(s, base, next.stage);
        wgmma_commit();
        named_barrier_sync(DS_WRITTEN, 256);
        wgmma_fence();
        add_to_dk(dk, base, now.stage, 0);
        wgmma_commit();
        wgmma_wait(1);
        PIN(s, BM / 2);
        store_p(s, lse2, a, t, &next, n + 1, base);
        wgmma_wait(0);
        PIN(dk, HALF / 2);
        arrive_once_per_warp(ELEMENT_ADDRESS(base, q_empty, now.stage));
        now = next;
    }
    mbarrier_wait(ELEMENT_ADDRESS(shared, do_full, do_stage(t->steps - 1)), do_parity(t->steps - 1));
    PIN(dv, V_HALF / 2);
    wgmma_fence();
    add_to_dv(dv, shared, do_stage(t->steps - 1), 0);
    wgmma_commit();
    named_barrier_sync(DS_WRITTEN, 256);
    PIN(dk, HALF / 2);
    wgmma_fence();
    add_to_dk(dk, shared, now.stage, 0);
    wgmma_commit();
    wgmma_wait(0);
    PIN(dv, V_HALF / 2);
    PIN(dk, HALF / 2);
}

/* dS of step n from dP, after whose product that of dV has been issued, and P; stored here and in the other CTA. On
   return dV is done, too. */
DEVICE void store_ds(float dp[BM / 2], int n, int stage, uint32_t shared, const shared_memory *memory, int thread) {
    const float2 *const delta = statistics(memory->delta[do_stage(n)], first_row(thread));
    const uint32_t from = matrices_at(MEMBER_ADDRESS(shared, p[0]), thread),
                   to = from + (int)(offsetof(shared_memory, ds) - offsetof(shared_memory, p)) + stage * TILE_BYTES;
    uint32_t ds[BM / 4];
#pragma unroll
    for (int i = 0; i < BM / 16; ++i) {
        uint32_t rounded[4], rest[4];
        ldmatrix_x4(rounded, from ^ 32 * i);
        ldmatrix_x4(rest, (from ^ 32 * i) + TILE_BYTES);
        const float2 delta_of_rows[5] = {delta[8 * i], {0, 0}, {0, 0}, {0, 0}, delta[8 * i + 4]};
        float p[8];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float2 high = unpack(rounded[e]), low = unpack(rest[e]);
            p[2 * e] = high.x + low.x;
            p[2 * e + 1] = high.y + low.y;
        }
        if (i == 0) {
            wgmma_wait(1);
            PIN(dp, BM / 2);
        }
        score_gradients(ds + 4 * i, p, dp + 8 * i, 16, delta_of_rows);
    }
    wgmma_wait(0);
    mbarrier_wait(ELEMENT_ADDRESS(shared, ds_empty, stage), n >> 1 & 1 ^ 1);
    mbarrier_wait(ELEMENT_ADDRESS(shared, q_empty, stage), n >> 1 & 1 ^ 1); /* dK has read the last dS of the stage */
#pragma unroll
    for (int i = 0; i < BM / 16; ++i) stmatrix_x4(to ^ 32 * i, ds + 4 * i);
    /* After dS, which needs delta: a load that is still in flight may complete after an arrival. */
    arrive_once_per_warp(ELEMENT_ADDRESS(shared, do_empty, do_stage(n)));
    async_proxy_fence();
    named_barrier_sync(DS_STORED, 128);
    named_barrier_arrive(DS_WRITTEN, 256);
    if (threadIdx.x % 128 == 0) send_ds(shared, stage);
}

/* The second. */
DEVICE void main_loop_of_ds(uint32_t shared, const shared_memory *memory, float dk[HALF / 2], float dv[V_HALF / 2]) {
    float dp[BM / 2];
    mbarrier_wait(MEMBER_ADDRESS(shared, v_full), 0);
    for (int n = 0; n < ((const volatile shared_memory *)memory)->steps; ++n) {
        const int stage = n & 1;
        uint32_t base = shared;
        int thread = (int)threadIdx.x;
        asm volatile("" : "+r"(base), "+r"(thread));
        mbarrier_wait(ELEMENT_ADDRESS(base, do_full, do_stage(n)), do_parity(n));
        wgmma_fence();
        keys_by_rows(dp, V_HALF, V_PANELS, MEMBER_ADDRESS(base, v),
                     MEMBER_ADDRESS(base, d_o) + do_stage(n) * D_O_BYTES);
        wgmma_commit();
        named_barrier_sync(P_WRITTEN, 256);
        PIN(dv, V_HALF / 2);
        wgmma_fence();
        add_to_dv(dv, base, do_stage(n), 1);
        wgmma_commit();
        store_ds(dp, n, stage, base, memory, thread);
        PIN(dv, V_HALF / 2);
        mbarrier_wait(ELEMENT_ADDRESS(base, q_full, stage), n >> 1 & 1);
        wgmma_fence();
        add_to_dk(dk, base, stage, 1);
        wgmma_commit();
        wgmma_wait(0);
        PIN(dk, HALF / 2);
        arrive_once_per_warp(ELEMENT_ADDRESS(base, q_empty, stage));
    }
}

DEVICE void main_loop(const fattni_bwd_sm90_args *p, const task *t, uint32_t shared, const shared_memory *memory,
                      int consumer, float dk[HALF / 2], float dv[V_HALF / 2]) {
    if (t->steps && consumer == 0)
        main_loop_of_p(p, t, shared, memory, dk, dv);
    else if (t->steps)
        main_loop_of_ds(shared, memory, dk, dv);
}

#endif
