/* Backward attention for Hopper, head_dim above 128, GENERAL and CAPPED: two CTAs as in
   bwd_sm90_cluster.cuh. Here dS may want more of a score than P (the derivative of its cap, a
   dropped element), so each consumer has all of what belongs to a score, and P comes when dP is
   there.

   Threads     warpgroup 0 loads. Two consumers: of S^T and dP^T each has all 64 keys and half of
               the 64 rows; P^T and dS^T meet in shared memory; of dV and dK each has half of the
               columns. The last warpgroup has dQ (bwd_sm90_cluster_common.cuh), one panel of columns
               at a time: the registers go to the consumers.
   Order       dK(n) S(n+1) dP(n+1) dV(n+1): products are queued about four at a time, so
               exponentials and dS overlap with those of dQ.
   Shared      as there, P^T two stages and no rest. */
#include "core/device/sm90_tile.cuh"

enum {
    D = K_D,
    BM = K_BM,
    BN = K_BN,
    THREADS = 32 * K_WARPS,
    CAUSAL = 0,
    GENERAL = 1,
    CAPPED = K_MASK == 3,
    CTAS = 2,
    PANELS = D / 64,
    K_PANEL = 64,
    KEY_BYTES = BN * D * 2,
    ROW_BYTES = BM * D * 2,
    TILE_BYTES = BM * BN * 2,
    ROWS = BM / 2,
    COLUMNS = D / 2, /* of one consumer */
    SLICE = BM * COLUMNS,
    DQ_COLUMNS = 64,
    PAUSE = 0,
    V_AT = KEY_BYTES,
    OTHER_K_AT = 2 * KEY_BYTES,
    Q_AT = OTHER_K_AT + KEY_BYTES / 2,
    DO_AT = Q_AT + 2 * ROW_BYTES,
    P_AT = DO_AT + ROW_BYTES,
    DS_AT = P_AT + 2 * TILE_BYTES,
    OTHER_DS_AT = DS_AT + 2 * TILE_BYTES,
    LSE_AT = OTHER_DS_AT + 2 * TILE_BYTES,
    DELTA_AT = LSE_AT + 2 * BM * 4,
    BARRIERS_AT = DELTA_AT + BM * 4,
    SHARED_BYTES = BARRIERS_AT + 160
};
static_assert(BN == 64 && BM == 64 && D == 256 && K_WARPS == 16 && K_MASK >= 2,
              "the division of labour");
static_assert(SHARED_BYTES == FATTNI_BWD_SM90_SHARED(D, BM, BN) && SHARED_BYTES <= 227 * 1024,
              "shared memory");

#include "bwd/cuda/bwd_sm90_general.cuh"
#include "bwd/cuda/bwd_sm90_cluster_common.cuh"

/* named barriers */
enum { DS_WRITTEN = 1, CLEARED = 2 };

/* x = A B^T: 64 keys x this consumer's rows, over D. */
DEVICE void keys_by_rows(float x[ROWS / 2], uint64_t keys, uint64_t rows) {
    wgmma_ss_new_n32(x, keys, rows);
#pragma unroll
    for (int e = 1; e < D / 16; ++e)
        wgmma_ss_n32(x, keys + along_columns(e, BN), rows + along_columns(e, BM), 1);
}
/* dV or dK += X^T rows: 64 keys x this consumer's columns, over BM. */
DEVICE void accumulate(float x[COLUMNS / 2], uint64_t left, uint64_t rows) {
#pragma unroll
    for (int e = 0; e < BM / 16; ++e)
        wgmma_st_n128(x, left + along_columns(e, BN), rows + along_rows(e), 1);
}
/* Which part of the tiles a thread has: from this row of a block and this key on. */
typedef struct part {
    int consumer, row0, key;
} part;

/* Rows [from, rows) of a tile become 0; both consumers, and a barrier must follow. */
DEVICE void clear(uint32_t tile, int panels, int rows, int from) {
    clear_rows(tile, panels, rows, max(0, from), (int)threadIdx.x - 128, 256);
}
/* The step's Q or dO, beyond the sequence. */
DEVICE void clear_rows_of(const task *t, const step *s, uint32_t tile) {
    if (s->i0 + BM <= t->s.Sq) return;
    clear(tile, PANELS, BM, t->s.Sq - s->i0);
    named_barrier_sync(CLEARED, 256);
}
DEVICE void clear_keys(const task *t, uint32_t shared) {
    const int j0 = t->j0, other = j0 ^ BN;
    if (max(j0, other) + BN <= t->s.Sk) return;
    clear(shared, PANELS, BN, t->s.Sk - j0);
    clear(shared + V_AT, PANELS, BN, t->s.Sk - j0);
    clear(shared + OTHER_K_AT, PANELS / 2, BN, t->s.Sk - other);
    named_barrier_sync(CLEARED, 256);
}

/* This thread's part of P^T or dS^T, rounded, to its tile. Lanes 0-15 name the warp's keys at
   one chunk of 8 rows i, lanes 16-31 at the next. */
DEVICE void store_part(uint32_t tile, int consumer, const uint32_t x[ROWS / 4]) {
    const int warp = (int)threadIdx.x / 32 % 4, lane = (int)threadIdx.x % 32;
    const int chunk = consumer * (ROWS / 8) + (lane >> 4);
#pragma unroll
    for (int i = 0; i < ROWS / 16; ++i)
        stmatrix_x4(tile + (warp * 16 + (lane & 15)) * 128 + (((chunk + 2 * i) ^ (lane & 7)) << 4),
                    x + 4 * i);
}

DEVICE corner corner_of(const fattni_cuda_args *a, const task *t, const step *now,
                        const part *mine) {
    const corner at = {t->b, now->h, now->i0 + mine->row0, mine->key, slope_of(a, now->h)};
    return at;
}

/* S to what general_gradients wants, and dropout's bits. */
DEVICE void probabilities_of(float s[ROWS / 2], uint32_t keep[1], const fattni_cuda_args *a,
                             const task *t, const step *now, const part *mine,
                             const unsigned char *memory) {
    const corner at = corner_of(a, t, now, mine);
    if (a->drop_T) keep_rows(keep, ROWS, a, &at);
    general_probabilities(s, ROWS, statistics(memory, LSE_AT + now->stage * BM * 4, mine->row0), a, &t->s,
                          &at, crosses_edge(&t->s, now->i0, t->j0));
}

/* And dP to P and dS, here and in the other CTA. */
DEVICE void score_gradients_of(float s[ROWS / 2], float dp[ROWS / 2], const uint32_t keep[1],
                               const fattni_cuda_args *a, const task *t, const step *now,
                               const part *mine, uint32_t shared, const unsigned char *memory) {
    const corner at = corner_of(a, t, now, mine);
    uint32_t pr[ROWS / 4], ds[ROWS / 4];
    general_gradients(pr, ds, s, dp, ROWS, statistics(memory, LSE_AT + now->stage * BM * 4, mine->row0),
                      statistics(memory, DELTA_AT, mine->row0), keep, a, &t->s, &at,
                      crosses_edge(&t->s, now->i0, t->j0));
    store_part(shared + P_AT + now->stage * TILE_BYTES, mine->consumer, pr);
    mbarrier_wait(shared + ds_empty(now->stage), now->parity ^ 1);
    store_part(shared + DS_AT + now->stage * TILE_BYTES, mine->consumer, ds);
    async_proxy_fence();
    named_barrier_sync(DS_WRITTEN, 256);
    if (threadIdx.x == 128) send_ds(shared, now->stage);
}

DEVICE void add_to_dv(float dv[COLUMNS / 2], uint32_t base, int stage, uint32_t half_at) {
    wgmma_fence();
    accumulate(dv, operand(base + P_AT + stage * TILE_BYTES, 0),
               operand(base + DO_AT + half_at, BM * 128));
    wgmma_commit();
}

/* dK and dV over all steps; there is one. */
DEVICE void walk(const fattni_cuda_args *a, const task *t, uint32_t shared,
                 const unsigned char *memory, const part *mine, float dk[COLUMNS / 2],
                 float dv[COLUMNS / 2]) {
    const uint32_t rows_at = mine->consumer * (ROWS * 128);
    const uint32_t half_at =
        mine->consumer * (PANELS / 2 * BM * 128); /* of the columns of Q and dO */
    float s[ROWS / 2], dp[ROWS / 2];
    uint32_t keep[1];
    place rows = first_place(t, a->group);
    step now = step_at(&rows, t, 0);
    mbarrier_wait(shared + K_FULL, 0);
    mbarrier_wait(shared + V_FULL, 0);
    mbarrier_wait(shared + q_full(0), 0);
    mbarrier_wait(shared + do_full(0), 0);
    clear_keys(t, shared);
    clear_rows_of(t, &now, shared + Q_AT);
    clear_rows_of(t, &now, shared + DO_AT);
    wgmma_fence();
    keys_by_rows(s, operand(shared, 0), operand(shared + Q_AT + rows_at, 0));
    keys_by_rows(dp, operand(shared + V_AT, 0), operand(shared + DO_AT + rows_at, 0));
    wgmma_commit();
    wgmma_wait(0);
    PIN(s, ROWS / 2);
    PIN(dp, ROWS / 2);
    probabilities_of(s, keep, a, t, &now, mine, memory);
    score_gradients_of(s, dp, keep, a, t, &now, mine, shared, memory);
    PIN(dv, COLUMNS / 2);
    add_to_dv(dv, shared, 0, half_at);

    for (int n = 0; n + 1 < t->steps; ++n) {
        go_on(&rows, t);
        const step next = step_at(&rows, t, n + 1);
        uint32_t base = shared; /* descriptors are made anew: kept from above the loop they spill */
        asm volatile("" : "+r"(base));
        const uint32_t q = base + Q_AT + now.stage * ROW_BYTES,
                       next_q = base + Q_AT + next.stage * ROW_BYTES;
        wgmma_wait(0); /* dO is let go before the next products are queued */
        PIN(dv, COLUMNS / 2);
        release(base + do_empty(0));
        mbarrier_wait(base + q_full(next.stage), next.parity);
        clear_rows_of(t, &next, next_q);
        wgmma_fence();
        accumulate(dk, operand(base + DS_AT + now.stage * TILE_BYTES, 0),
                   operand(q + half_at, BM * 128));
        keys_by_rows(s, operand(base, 0), operand(next_q + rows_at, 0));
        wgmma_commit();
        wgmma_wait(0);
        PIN(s, ROWS / 2);
        PIN(dk, COLUMNS / 2);
        release(base + q_empty(now.stage));
        probabilities_of(s, keep, a, t, &next, mine, memory);
        mbarrier_wait(base + do_full(0), (n + 1) & 1);
        clear_rows_of(t, &next, base + DO_AT);
        wgmma_fence();
        keys_by_rows(dp, operand(base + V_AT, 0), operand(base + DO_AT + rows_at, 0));
        wgmma_commit();
        wgmma_wait(0);
        PIN(dp, ROWS / 2);
        score_gradients_of(s, dp, keep, a, t, &next, mine, base, memory);
        add_to_dv(dv, base, next.stage, half_at);
        now = next;
    }
    wgmma_fence();
    accumulate(dk, operand(shared + DS_AT + now.stage * TILE_BYTES, 0),
               operand(shared + Q_AT + now.stage * ROW_BYTES + half_at, BM * 128));
    wgmma_commit();
    wgmma_wait(0);
    PIN(dv, COLUMNS / 2);
    PIN(dk, COLUMNS / 2);
}

DEVICE void consume(const fattni_sm90_args *p, const task *t, uint32_t shared,
                    const unsigned char *memory, int consumer) {
    const fattni_cuda_args *const a = &p->a;
    const int warp = (int)threadIdx.x / 32 % 4, lane = (int)threadIdx.x % 32;
    const part mine = {consumer, consumer * ROWS + lane % 4 * 2, t->j0 + warp * 16 + lane / 4};
    float dk[COLUMNS / 2], dv[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) dk[i] = dv[i] = 0.0f;
    if (t->steps) walk(a, t, shared, memory, &mine, dk, dv);
    const int column0 = consumer * COLUMNS;
    store_keys(&a->dv, t, mine.key, column0, COLUMNS, dv, scale_of_dv(a), a->Dv, a->dv_f32,
               a->flags & FATTN_ACC_DV);
    store_keys(&a->dk, t, mine.key, column0, COLUMNS, dk, a->dk_scale, a->D, a->dk_f32,
               a->flags & FATTN_ACC_DK);
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1)
    K_NAME(const __grid_constant__ fattni_sm90_args p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int role = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0);
    const piece x = piece_of(&p, (int)blockIdx.x / CTAS);
    if (x.kind == PREPARE) prepare(&p, &x, (int)threadIdx.x, THREADS);
    if (x.kind == FINISH) finish(&p, &x, (int)threadIdx.x, THREADS);
    if (x.kind != MULTIPLY) return;
    const task t = task_of(&p, &x);
    if (!p.progress && (t.j0 & ~BN) >= t.s.Sk) return;
    init_pair(shared);
    if (role == 0) {
        registers_lower(24);
        if (threadIdx.x == 0) load_pair(&p, &t, shared);
        else if (threadIdx.x == 32 && p.a.turns) await_turns(&p, &t, shared);
        else if (threadIdx.x == 64 && p.a.turns) end_turns(&p.a, &t, shared);
    } else if (role == 3) {
        registers_lower(72);
        add_dq(&p, &t, shared);
    } else {
        registers_raise(208);
        consume(&p, &t, shared, memory, role - 1);
    }
    cluster_sync(); /* neither leaves while the other sends to it or reads from it */
}
