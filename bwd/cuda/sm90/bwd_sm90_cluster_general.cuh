/* The consumers of bwd_sm90_cluster.cuh in GENERAL, CAPPED and BIASED. Here dS may need more of a score than P (the
   derivative of its cap, a dropped element), so each consumer has all that belongs to a score, and P is ready only when
   dP is: of S^T and dP^T a consumer has all 64 keys and half of the 64 rows; P^T and dS^T are put together in shared
   memory; of dV and dK it has half of the columns. The dQ warpgroup does one panel of columns at a time: the consumers
   need the registers.

   Order of products: dK(n) S(n+1) dP(n+1) dV(n+1), about four issued at a time, so that exponentials and dS overlap
   with those of dQ. */
#ifndef FATTNI_BWD_CUDA_SM90_BWD_SM90_CLUSTER_GENERAL_H
#define FATTNI_BWD_CUDA_SM90_BWD_SM90_CLUSTER_GENERAL_H

#include "bwd/cuda/sm90/bwd_sm90_general.cuh"

enum { ROWS = BM / 2 };               /* of S, for a consumer */
enum { DS_WRITTEN = 1, CLEARED = 2 }; /* named barriers */

/* x = A B^T: 64 keys x this consumer's rows, over 2 `half` columns. */
DEVICE void keys_by_rows(float x[ROWS / 2], int half, int panels, uint64_t keys, uint64_t rows) {
    wgmma_ss_new_n32(x, keys, rows);
#pragma unroll
    for (int e = 1; e < half / 8; ++e)
        wgmma_ss_n32(x, keys + advance_halves(e, half, panels, BN), rows + advance_halves(e, half, panels, BM), 1);
}
/* Where this thread's part of S^T begins: row row0 of a row block, and this key. */
typedef struct part {
    int consumer, row0, key;
} part;

/* Zeroes rows [from, rows) of a tile. Both consumers; a barrier must follow. */
DEVICE void clear(uint32_t tile, int panels, int rows, int from) {
    clear_rows(tile, panels, rows, max(0, from), (int)threadIdx.x - 128, 256);
}
/* Zeroes the step's Q or dO beyond the sequence. */
DEVICE void clear_rows_of(const task *t, const step *s, uint32_t tile, int panels) {
    if (s->i0 + BM <= t->s.Sq) return;
    clear(tile, panels, BM, t->s.Sq - s->i0);
    named_barrier_sync(CLEARED, 256);
}
DEVICE void clear_keys(const task *t, uint32_t shared) {
    const int j0 = t->j0, other = j0 ^ BN;
    if (max(j0, other) + BN <= t->s.Sk) return;
    clear(MEMBER_ADDRESS(shared, k), PANELS, BN, t->s.Sk - j0);
    clear(MEMBER_ADDRESS(shared, v), V_PANELS, BN, t->s.Sk - j0);
    clear(MEMBER_ADDRESS(shared, other_k), PANELS / 2, BN, t->s.Sk - other);
    named_barrier_sync(CLEARED, 256);
}

/* This thread's part of P^T or dS^T, rounded, to its tile: lanes 0-15 point at the warp's keys in one chunk of 8 rows
   i, lanes 16-31 in the next. */
DEVICE void store_part(uint32_t tile, int consumer, const uint32_t x[ROWS / 4]) {
    const int warp = (int)threadIdx.x / 32 % 4, lane = (int)threadIdx.x % 32;
    const int chunk = consumer * (ROWS / 8) + (lane >> 4);
#pragma unroll
    for (int i = 0; i < ROWS / 16; ++i)
        stmatrix_x4(tile + (warp * 16 + (lane & 15)) * 128 + (((chunk + 2 * i) ^ (lane & 7)) << 4), x + 4 * i);
}

DEVICE origin origin_of(const fattni_attention_args *a, const task *t, const step *now, const part *mine) {
    const origin at = {t->b, now->h, now->i0 + mine->row0, mine->key, slope_of(a, now->h)};
    return at;
}

/* S to P, in CAPPED to tanh (bwd_sm90_general.cuh), and dropout's bits. */
DEVICE void probabilities_of(float s[ROWS / 2], uint32_t keep[1], const fattni_attention_args *a, const task *t,
                             const step *now, const part *mine, uint32_t shared, const shared_memory *memory) {
    const origin at = origin_of(a, t, now, mine);
    if (BIASED) {
        add_bias_tile(s, ROWS, MEMBER_ADDRESS(shared, bias) + mine->consumer * (ROWS * 128), a->scale,
                      t->s.Sq - now->i0 - mine->consumer * ROWS, now, shared, threadIdx.x);
        exponentials((float(*)[4])s, ROWS / 8, LOG2E, statistics(memory->lse2[now->stage], mine->row0));
        if (crosses_edge(&t->s, now->i0, t->j0)) mask_outside((float(*)[4])s, ROWS / 8, &t->s, at.i, at.j);
        return;
    }
    if (a->drop_T) keep_rows(keep, ROWS, a, &at);
    general_probabilities(s, ROWS, statistics(memory->lse2[now->stage], mine->row0), a, &t->s, &at,
                          crosses_edge(&t->s, now->i0, t->j0));
}

/* With dP to P and dS, stored here and in the other CTA. */
DEVICE void score_gradients_of(float s[ROWS / 2], float dp[ROWS / 2], const uint32_t keep[1],
                               const fattni_bwd_args *bwd, const task *t, const step *now, const part *mine,
                               uint32_t shared, const shared_memory *memory) {
    const fattni_attention_args *const a = &bwd->a;
    const origin at = origin_of(a, t, now, mine);
    uint32_t pr[ROWS / 4], ds[ROWS / 4];
    if (BIASED) {
        round_pairs(pr, s, ROWS / 2);
        score_gradients(ds, s, dp, ROWS, statistics(memory->delta[do_stage(now->stage)], mine->row0));
    } else
        general_gradients(pr, ds, s, dp, ROWS, statistics(memory->lse2[now->stage], mine->row0),
                          statistics(memory->delta[do_stage(now->stage)], mine->row0), keep, bwd, &t->s, &at,
                          crosses_edge(&t->s, now->i0, t->j0));
    store_part(MEMBER_ADDRESS(shared, p) + now->stage % P_STAGES * TILE_BYTES, mine->consumer, pr);
    mbarrier_wait(ELEMENT_ADDRESS(shared, ds_empty, now->stage), now->parity ^ 1);
    store_part(MEMBER_ADDRESS(shared, ds) + now->stage * TILE_BYTES, mine->consumer, ds);
    async_proxy_fence();
    named_barrier_sync(DS_WRITTEN, 256);
    if (threadIdx.x == 128) send_ds(shared, now->stage);
}

DEVICE void add_to_dv(float dv[V_HALF / 2], uint32_t base, int stage, int consumer) {
    wgmma_fence();
    accumulate(dv, V_HALF, operand_descriptor(MEMBER_ADDRESS(base, p) + stage % P_STAGES * TILE_BYTES, 0),
               operand_descriptor(MEMBER_ADDRESS(base, d_o) + do_stage(stage) * D_O_BYTES + consumer * (D_O_BYTES / 2),
                                  BM * 128));
    wgmma_commit();
}

DEVICE void main_loop(const fattni_bwd_sm90_args *p, const task *t, uint32_t shared, const shared_memory *memory,
                      int consumer, float dk[HALF / 2], float dv[V_HALF / 2]) {
    const fattni_bwd_args *const bwd = &p->bwd;
    const fattni_attention_args *const a = &p->bwd.a;
    const part thread_part = {consumer, consumer * ROWS + (int)threadIdx.x % 32 % 4 * 2, first_key(t)};
    const part *const mine = &thread_part;
    if (!t->steps) return;
    const uint32_t rows_at = consumer * (ROWS * 128);    /* of Q and dO: this consumer's rows */
    const uint32_t half_at = consumer * (ROW_BYTES / 2); /* of Q: its columns */
    float s[ROWS / 2], dp[ROWS / 2];
    uint32_t keep[1];
    row_cursor rows = first_rows(t);
    step now = step_at(&rows, t, 0);
    mbarrier_wait(MEMBER_ADDRESS(shared, k_full), 0);
    mbarrier_wait(MEMBER_ADDRESS(shared, v_full), 0);
    mbarrier_wait(MEMBER_ADDRESS(shared, q_full[0]), 0);
    mbarrier_wait(MEMBER_ADDRESS(shared, do_full[0]), 0);
    clear_keys(t, shared);
    clear_rows_of(t, &now, MEMBER_ADDRESS(shared, q[0]), PANELS);
    clear_rows_of(t, &now, MEMBER_ADDRESS(shared, d_o[0]), V_PANELS);
    wgmma_fence();
    keys_by_rows(s, HALF, PANELS, operand_descriptor(MEMBER_ADDRESS(shared, k), 0),
                 operand_descriptor(MEMBER_ADDRESS(shared, q[0]) + rows_at, 0));
    keys_by_rows(dp, V_HALF, V_PANELS, operand_descriptor(MEMBER_ADDRESS(shared, v), 0),
                 operand_descriptor(MEMBER_ADDRESS(shared, d_o[0]) + rows_at, 0));
    wgmma_commit();
    wgmma_wait(0);
    PIN(s, ROWS / 2);
    PIN(dp, ROWS / 2);
    probabilities_of(s, keep, a, t, &now, mine, shared, memory);
    score_gradients_of(s, dp, keep, bwd, t, &now, mine, shared, memory);
    PIN(dv, V_HALF / 2);
    add_to_dv(dv, shared, 0, consumer);

    for (int n = 0; n + 1 < t->steps; ++n) {
        next_rows(&rows, t, p);
        const step next = step_at(&rows, t, n + 1);
        uint32_t base = shared;
        asm volatile("" : "+r"(base)); /* hides it: descriptors are recomputed, kept from above the loop they spill */
        const uint32_t q = MEMBER_ADDRESS(base, q) + now.stage * ROW_BYTES,
                       next_q = MEMBER_ADDRESS(base, q) + next.stage * ROW_BYTES;
        wgmma_wait(0); /* dO is released before the next products are issued */
        PIN(dv, V_HALF / 2);
        arrive_once_per_warp(ELEMENT_ADDRESS(base, do_empty, do_stage(n)));
        mbarrier_wait(ELEMENT_ADDRESS(base, q_full, next.stage), next.parity);
        clear_rows_of(t, &next, next_q, PANELS);
        wgmma_fence();
        accumulate(dk, HALF, operand_descriptor(MEMBER_ADDRESS(base, ds) + now.stage * TILE_BYTES, 0),
                   operand_descriptor(q + half_at, BM * 128));
        keys_by_rows(s, HALF, PANELS, operand_descriptor(MEMBER_ADDRESS(base, k), 0),
                     operand_descriptor(next_q + rows_at, 0));
        wgmma_commit();
        wgmma_wait(0);
        PIN(s, ROWS / 2);
        PIN(dk, HALF / 2);
        arrive_once_per_warp(ELEMENT_ADDRESS(base, q_empty, now.stage));
        probabilities_of(s, keep, a, t, &next, mine, base, memory);
        const uint32_t next_d_o = MEMBER_ADDRESS(base, d_o) + do_stage(n + 1) * D_O_BYTES;
        mbarrier_wait(ELEMENT_ADDRESS(base, do_full, do_stage(n + 1)), do_parity(n + 1));
        clear_rows_of(t, &next, next_d_o, V_PANELS);
        wgmma_fence();
        keys_by_rows(dp, V_HALF, V_PANELS, operand_descriptor(MEMBER_ADDRESS(base, v), 0),
                     operand_descriptor(next_d_o + rows_at, 0));
        wgmma_commit();
        wgmma_wait(0);
        PIN(dp, ROWS / 2);
        if (P_STAGES == 1) /* both consumers' dV has read the last P */
            mbarrier_wait(ELEMENT_ADDRESS(base, do_empty, do_stage(n)), do_parity(n));
        score_gradients_of(s, dp, keep, bwd, t, &next, mine, base, memory);
        add_to_dv(dv, base, next.stage, consumer);
        now = next;
    }
    wgmma_fence();
    accumulate(dk, HALF, operand_descriptor(MEMBER_ADDRESS(shared, ds) + now.stage * TILE_BYTES, 0),
               operand_descriptor(MEMBER_ADDRESS(shared, q) + now.stage * ROW_BYTES + half_at, BM * 128));
    wgmma_commit();
    wgmma_wait(0);
    PIN(dv, V_HALF / 2);
    PIN(dk, HALF / 2);
}

#endif
