/* Backward attention for Hopper, head_dim above 128, full and causal masks: as bwd_sm90.cuh,
   with another division of labour. dK and dV of 64 keys fill the registers of two warpgroups,
   and adding 64 x D floats of dQ for each 64 keys is more than L2 takes beside the products. So
   two CTAs, a cluster, have neighbouring keys and walk over the same row blocks: they exchange
   dS^T, and each adds half of the columns of dQ for the keys of both.

   For each row block: S^T = K Q^T, P = exp(S - L), dP^T = V dO^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += dS K.

   Threads     warpgroup 0 loads. The first consumer has S and P, the second dP and dS: a product
               of 64 keys x 64 rows reads a third less from shared memory than two of 64 x 32. Of
               dV and dK each has half of the columns. P reaches the second as two numbers of the
               input dtype, P rounded (for dV) and the rest. The last warpgroup has dQ
               (bwd_sm90_cluster_common.cuh).
   Overlap     A warpgroup's products are queued about four at a time, so each warpgroup computes
               while others multiply: the first goes on to the next S while the second has dS.
   Shared      K, V [BN][D], half of the columns of the other CTA's K, Q two stages [BM][D], dO
               [BM][D], P^T, its rest, dS^T and the other CTA's dS^T two stages [BN][BM], lse2
               two stages [BM], delta [BM].
   Turns       FATTN_DETERMINISTIC: pairs wait for those before theirs; each CTA is one of two
               parts.
   Pieces      A cluster has one (bwd_sm90_scheduler.cuh). */
#include "core/device/sm90_tile.cuh"

enum {
    D = K_D,
    BM = K_BM,
    BN = K_BN,
    THREADS = 32 * K_WARPS,
    CAUSAL = K_MASK == 1,
    GENERAL = 0,
    CTAS = 2,
    PANELS = D / 64,
    K_PANEL = 64,
    KEY_BYTES = BN * D * 2,
    ROW_BYTES = BM * D * 2,
    TILE_BYTES = BM * BN * 2,
    COLUMNS = D / 2, /* of dV and dK for a consumer, of dQ for a CTA */
    DQ_COLUMNS = COLUMNS,
    SLICE = BM * COLUMNS, /* floats */
    PAUSE = 90, /* of warps of dQ */
    V_AT = KEY_BYTES,
    OTHER_K_AT = 2 * KEY_BYTES,
    Q_AT = OTHER_K_AT + KEY_BYTES / 2,
    DO_AT = Q_AT + 2 * ROW_BYTES,
    P_AT = DO_AT + ROW_BYTES,
    REST_AT = P_AT + TILE_BYTES,
    DS_AT = REST_AT + TILE_BYTES,
    OTHER_DS_AT = DS_AT + 2 * TILE_BYTES,
    LSE_AT = OTHER_DS_AT + 2 * TILE_BYTES,
    DELTA_AT = LSE_AT + 2 * BM * 4,
    BARRIERS_AT = DELTA_AT + BM * 4,
    STEPS_AT = BARRIERS_AT + 144, /* of the task: a loop has no register for them */
    SHARED_BYTES = BARRIERS_AT + 160
};
static_assert(BN == 64 && BM == 64 && D == 256 && K_WARPS == 16 && K_MASK <= 1,
              "the division of labour");
static_assert(SHARED_BYTES == FATTNI_BWD_SM90_SHARED(D, BM, BN) && SHARED_BYTES <= 227 * 1024,
              "shared memory");

#include "bwd/cuda/bwd_sm90_cluster_common.cuh"

/* named barriers */
enum { P_STORED = 1, P_WRITTEN = 2, DS_STORED = 3, DS_WRITTEN = 4 };

/* x = A B^T: 64 keys x 64 rows, over D. */
DEVICE void keys_by_rows(float x[BM / 2], uint32_t keys, uint32_t rows) {
    const uint64_t left = operand(keys, 0), right = operand(rows, 0);
    wgmma_ss_new_n64(x, left, right);
#pragma unroll
    for (int e = 1; e < D / 16; ++e)
        wgmma_ss_n64(x, left + along_columns(e, BN), right + along_columns(e, BM), 1);
}
/* dV or dK += X^T rows: 64 keys x a consumer's half of the columns, over BM. */
DEVICE void accumulate(float x[COLUMNS / 2], uint32_t tile, uint32_t rows, int half) {
    const uint64_t left = operand(tile, 0),
                   right = operand(rows + half * (ROW_BYTES / 2), BM * 128);
#pragma unroll
    for (int e = 0; e < BM / 16; ++e)
        wgmma_st_n128(x, left + along_columns(e, BN), right + along_rows(e), 1);
}

/* Where this thread stores, or loads, matrices of its warp's 16 keys in a tile [BN][BM]: chunks
   of 8 rows 0 (lanes 0-15) and 1; XOR 32 n: chunks 2n and 2n + 1. */
DEVICE uint32_t matrices_at(uint32_t tile, int thread) {
    const int warp = thread / 32 % 4, lane = thread % 32;
    return tile + (warp * 16 + (lane & 15)) * 128 + (((lane >> 4) ^ (lane & 7)) << 4);
}
DEVICE int first_row(int thread) { return thread % 4 * 2; }
DEVICE int first_key(const task *t) {
    return t->j0 + (int)threadIdx.x / 32 % 4 * 16 + (int)threadIdx.x % 32 / 4;
}

/* S to P and on to shared memory, in step n. */
DEVICE void give_p(float s[BM / 2], const float2 lse2[BM / 2], const fattni_cuda_args *a,
                   const task *t, const step *now, int n, uint32_t shared) {
    const int key = first_key(t);
    if (crosses_edge(&t->s, now->i0, t->j0)) { /* row i sees keys up to i + hi */
        const int far = 1 << 20,
                  first = CAUSAL ? key - t->s.hi - now->i0 - first_row((int)threadIdx.x) : -far;
        mask(s, BM, key < a->Sk ? first : far, key + 8 < a->Sk ? first + 8 : far);
    }
    mbarrier_wait(shared + do_empty(0), n & 1 ^ 1); /* both consumers' dV is done with the last P */
    const uint32_t to = matrices_at(shared + P_AT, (int)threadIdx.x);
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
        stmatrix_x4((to ^ 32 * i) + (REST_AT - P_AT), rest);
    }
    async_proxy_fence();
    named_barrier_sync(P_STORED, 128);
    named_barrier_arrive(P_WRITTEN, 256);
}

/* The first consumer. */
DEVICE void walk_with_p(const fattni_cuda_args *a, const task *t, uint32_t shared,
                        const unsigned char *memory, float dk[COLUMNS / 2], float dv[COLUMNS / 2]) {
    float s[BM / 2];
    float2 lse2[BM / 2]; /* every fourth, as `exponentials` wants them */
    place rows = first_place(t, a->group);
    step now = step_at(&rows, t, 0);
    mbarrier_wait(shared + K_FULL, 0);
    mbarrier_wait(shared + q_full(0), 0);
    wgmma_fence();
    keys_by_rows(s, shared, shared + Q_AT);
    wgmma_commit();
    wgmma_wait(0);
    PIN(s, BM / 2);
    give_p(s, statistics(memory, LSE_AT, first_row((int)threadIdx.x)), a, t, &now, 0, shared);
    for (int n = 0; n + 1 < t->steps; ++n) {
        go_on(&rows, t);
        const step next = step_at(&rows, t, n + 1);
        uint32_t base = shared; /* descriptors are made anew: kept from above the loop they spill */
        asm volatile("" : "+r"(base));
        mbarrier_wait(base + do_full(0), n & 1);
        PIN(dv, COLUMNS / 2);
        wgmma_fence();
        accumulate(dv, base + P_AT, base + DO_AT, 0);
        wgmma_commit();
        wgmma_wait(0);
        PIN(dv, COLUMNS / 2);
        release(base + do_empty(0));
        mbarrier_wait(base + q_full(next.stage), next.parity);
        const float2 *const from = statistics(memory, LSE_AT + next.stage * BM * 4, first_row((int)threadIdx.x));
#pragma unroll /* now, since shared memory is slow beside products */
        for (int i = 0; i < BM / 2; i += 4) lse2[i] = from[i];
        wgmma_fence();
        keys_by_rows(s, base, base + Q_AT + next.stage * ROW_BYTES);
        wgmma_commit();
        named_barrier_sync(DS_WRITTEN, 256);
        wgmma_fence();
        accumulate(dk, base + DS_AT + now.stage * TILE_BYTES, base + Q_AT + now.stage * ROW_BYTES,
                   0);
        wgmma_commit();
        wgmma_wait(1);
        PIN(s, BM / 2);
        give_p(s, lse2, a, t, &next, n + 1, base);
        wgmma_wait(0);
        PIN(dk, COLUMNS / 2);
        release(base + q_empty(now.stage));
        now = next;
    }
    mbarrier_wait(shared + do_full(0), t->steps - 1 & 1);
    PIN(dv, COLUMNS / 2);
    wgmma_fence();
    accumulate(dv, shared + P_AT, shared + DO_AT, 0);
    wgmma_commit();
    named_barrier_sync(DS_WRITTEN, 256);
    PIN(dk, COLUMNS / 2);
    wgmma_fence();
    accumulate(dk, shared + DS_AT + now.stage * TILE_BYTES, shared + Q_AT + now.stage * ROW_BYTES,
               0);
    wgmma_commit();
    wgmma_wait(0);
    PIN(dv, COLUMNS / 2);
    PIN(dk, COLUMNS / 2);
}

/* dP, of which one product group (dV) may follow in the queue, and P to dS, here and in the
   other CTA; in step n. On return dV is done, too. */
DEVICE void give_ds(float dp[BM / 2], int n, int stage, uint32_t shared,
                    const unsigned char *memory, int thread) {
    const float2 *const delta = statistics(memory, DELTA_AT, first_row(thread));
    const uint32_t from = matrices_at(shared + P_AT, thread),
                   to = from + (DS_AT - P_AT) + stage * TILE_BYTES;
    uint32_t ds[BM / 4];
#pragma unroll
    for (int i = 0; i < BM / 16; ++i) {
        uint32_t rounded[4], rest[4];
        ldmatrix_x4(rounded, from ^ 32 * i);
        ldmatrix_x4(rest, (from ^ 32 * i) + (REST_AT - P_AT));
        const float2 of_rows[5] = {delta[8 * i], {0, 0}, {0, 0}, {0, 0}, delta[8 * i + 4]};
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
        score_gradients(ds + 4 * i, p, dp + 8 * i, 16, of_rows);
    }
    wgmma_wait(0);
    mbarrier_wait(shared + ds_empty(stage), n >> 1 & 1 ^ 1);
    mbarrier_wait(shared + q_empty(stage), n >> 1 & 1 ^ 1); /* dK has read the stage's last dS */
#pragma unroll
    for (int i = 0; i < BM / 16; ++i) stmatrix_x4(to ^ 32 * i, ds + 4 * i);
    /* Not before dS, which needs delta: a load that is under way may come after an arrival. */
    release(shared + do_empty(0));
    async_proxy_fence();
    named_barrier_sync(DS_STORED, 128);
    named_barrier_arrive(DS_WRITTEN, 256);
    if (threadIdx.x % 128 == 0) send_ds(shared, stage);
}

/* The second. */
DEVICE void walk_with_ds(const task *t, uint32_t shared, const unsigned char *memory,
                         float dk[COLUMNS / 2], float dv[COLUMNS / 2]) {
    float dp[BM / 2];
    mbarrier_wait(shared + V_FULL, 0);
    for (int n = 0; n < *(const volatile int *)(memory + STEPS_AT); ++n) {
        const int stage = n & 1;
        uint32_t base = shared;
        int thread = (int)threadIdx.x;
        asm volatile("" : "+r"(base), "+r"(thread));
        mbarrier_wait(base + do_full(0), n & 1);
        wgmma_fence();
        keys_by_rows(dp, base + V_AT, base + DO_AT);
        wgmma_commit();
        named_barrier_sync(P_WRITTEN, 256);
        PIN(dv, COLUMNS / 2);
        wgmma_fence();
        accumulate(dv, base + P_AT, base + DO_AT, 1);
        wgmma_commit();
        give_ds(dp, n, stage, base, memory, thread);
        PIN(dv, COLUMNS / 2);
        mbarrier_wait(base + q_full(stage), n >> 1 & 1);
        wgmma_fence();
        accumulate(dk, base + DS_AT + stage * TILE_BYTES, base + Q_AT + stage * ROW_BYTES, 1);
        wgmma_commit();
        wgmma_wait(0);
        PIN(dk, COLUMNS / 2);
        release(base + q_empty(stage));
    }
}

DEVICE void consume(const fattni_sm90_args *p, const task *t, uint32_t shared,
                    const unsigned char *memory, int consumer) {
    const fattni_cuda_args *const a = &p->a;
    float dk[COLUMNS / 2], dv[COLUMNS / 2];
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) dk[i] = dv[i] = 0.0f;
    if (t->steps && consumer == 0)
        walk_with_p(a, t, shared, memory, dk, dv);
    else if (t->steps)
        walk_with_ds(t, shared, memory, dk, dv);
    const int column0 = consumer * COLUMNS, key = first_key(t);
    store_keys(&a->dv, t, key, column0, COLUMNS, dv, scale_of_dv(a), a->Dv, a->dv_f32,
               a->flags & FATTN_ACC_DV);
    store_keys(&a->dk, t, key, column0, COLUMNS, dk, a->dk_scale, a->D, a->dk_f32,
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
    if (threadIdx.x == 0) *(volatile int *)(memory + STEPS_AT) = t.steps;
    init_pair(shared);
    if (role == 0) {
        registers_lower(24);
        if (threadIdx.x == 0) load_pair(&p, &t, shared);
        else if (threadIdx.x == 32 && p.a.turns) await_turns(&p, &t, shared);
        else if (threadIdx.x == 64 && p.a.turns) end_turns(&p.a, &t, shared);
    } else if (role == 3) {
        registers_lower(104);
        add_dq(&p, &t, shared);
    } else {
        registers_raise(192);
        consume(&p, &t, shared, memory, role - 1);
    }
    cluster_sync(); /* neither leaves while the other sends to it or reads from it */
}
