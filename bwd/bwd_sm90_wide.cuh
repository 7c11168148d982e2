/* Backward attention for Hopper, head_dim above 128: as bwd_sm90.cuh, with another division of labour,
   since dK and dV of 64 keys already fill the registers of two warpgroups.

   For each row block: S^T = K Q^T, P = exp(S - L), dP^T = V dO^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += dS K.

   Threads     warpgroup 0: warp 0 loads, warp 1 looks after turns. Two consumers: of S^T and dP^T each
               has all 64 keys and half of the 64 rows; P^T and dS^T meet in shared memory; of dV, dK and
               dQ each has half of the columns.
   dQ          vector reductions from registers to the fp32 accumulator at L2.
   Shared      K, V [BN][D], Q and dO two stages [BM][D], P^T and dS^T two stages [BN][BM], lse2 and
               delta two stages [BM]. */
#include "sm90_tile.h"

enum {
    D = K_D, BM = K_BM, BN = K_BN, THREADS = 32 * K_WARPS, CAUSAL = K_MASK == 1,
    GENERAL = K_MASK >= 2, CAPPED = K_MASK == 3,
    TURNS = GENERAL, /* the others have no registers to spare for them */
    PANELS = D / 64, K_PANEL = 64,
    KEY_BYTES = BN * D * 2, ROW_BYTES = BM * D * 2, DS_BYTES = BM * BN * 2,
    ROWS = BM / 2, COLUMNS = D / 2, /* of one consumer */
    V_AT = KEY_BYTES, Q_AT = 2 * KEY_BYTES, DO_AT = Q_AT + 2 * ROW_BYTES, P_AT = DO_AT + 2 * ROW_BYTES,
    DS_AT = P_AT + 2 * DS_BYTES, LSE_AT = DS_AT + 2 * DS_BYTES, DELTA_AT = LSE_AT + 2 * BM * 4,
    BARRIERS_AT = DELTA_AT + 2 * BM * 4, SHARED_BYTES = BARRIERS_AT + 128
};
static_assert(BN == 64 && BM == 64 && D == 256 && K_WARPS == 12, "the division of labour");
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");

#include "bwd_sm90_general.h"

/* named barriers */
enum { WRITTEN = 1, CLEARED = 2, TURN_BEGINS = 3, TURN_ENDS = 4 };

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
/* dQ = dS K: 64 rows x one panel of columns, over BN; dS^T is what lies in shared memory. */
DEVICE void dq_product(float x[32], uint64_t ds, uint64_t keys) {
    wgmma_tt_new_n64(x, ds, keys);
#pragma unroll
    for (int e = 1; e < BN / 16; ++e) wgmma_tt_n64(x, ds + along_rows(e), keys + along_rows(e), 1);
}

/* What the step's tiles hold beyond the sequence. */
DEVICE void clear_rows_of(const task *t, step s, uint32_t shared) {
    if (s.i0 + BM > t->s.Sq)
        clear_tails(shared + Q_AT + s.stage * ROW_BYTES, shared + DO_AT + s.stage * ROW_BYTES, BM,
                    t->s.Sq - s.i0, CLEARED);
}

/* One warp looks after the turns of both consumers: the release also covers what they added. */
DEVICE void look_after_turns(const fattni_cuda_args *a, const task *t) {
    const int leader = threadIdx.x % 32 == 0;
    for (int n = 0; n < t->steps; ++n) {
        const step s = step_of(t, a->group, n);
        int32_t *const turn = turn_counter(a, t, &s);
        if (leader) wait_for_turn(turn, t, &s);
        __syncwarp();
        named_barrier_sync(TURN_BEGINS, 288);
        named_barrier_sync(TURN_ENDS, 288);
        if (leader) add_release(turn, 2);
    }
}

DEVICE void consume(const fattni_sm90_args *p, const task *t, uint32_t shared,
                    const unsigned char *memory, int consumer) {
    const fattni_cuda_args *const a = &p->a;
    const int warp = (int)threadIdx.x / 32 % 4, lane = (int)threadIdx.x % 32;
    const int row0 = consumer * ROWS + lane % 4 * 2, key = t->j0 + warp * 16 + lane / 4;
    const float unit = a->scale * LOG2E;
    const uint64_t k_keys = operand(shared, 0), v_keys = operand(shared + V_AT, 0);
    const uint32_t rows_at = consumer * (ROWS * 128), half = PANELS / 2 * consumer; /* panels */
    const uint64_t k_depth = operand(shared + half * (BN * 128), BN * 128);
    /* stmatrix: lanes 0-15 name the warp's keys at one chunk of 8 rows i, lanes 16-31 at the next. */
    const uint32_t to = (warp * 16 + (lane & 15)) * 128;
    const int chunk = consumer * (ROWS / 8) + (lane >> 4);
    float dk[COLUMNS / 2], dv[COLUMNS / 2], s[ROWS / 2], dp[ROWS / 2];
    uint32_t pr[ROWS / 4], ds[ROWS / 4]; /* P and dS, rounded */
#pragma unroll
    for (int i = 0; i < COLUMNS / 2; ++i) dk[i] = dv[i] = 0.0f;

    mbarrier_wait(shared + K_FULL, 0);
    if (t->steps) {
        mbarrier_wait(shared + V_FULL, 0);
        mbarrier_wait(shared + q_full(0), 0);
        mbarrier_wait(shared + do_full(0), 0);
        if (GENERAL && t->j0 + BN > t->s.Sk)
            clear_tails(shared, shared + V_AT, BN, t->s.Sk - t->j0, CLEARED);
        if (GENERAL) clear_rows_of(t, step_of(t, a->group, 0), shared);
    }
    wgmma_fence(); /* of garbage, which nobody reads, when there is no step */
    keys_by_rows(s, k_keys, operand(shared + Q_AT + rows_at, 0));
    keys_by_rows(dp, v_keys, operand(shared + DO_AT + rows_at, 0));
    wgmma_commit();
    wgmma_wait(0);
    for (int n = 0; n < t->steps; ++n) {
        const step now = step_of(t, a->group, n);
        const uint32_t q = shared + Q_AT + now.stage * ROW_BYTES, d_o = shared + DO_AT + now.stage * ROW_BYTES;
        const uint32_t p_tile = shared + P_AT + now.stage * DS_BYTES, ds_tile = shared + DS_AT + now.stage * DS_BYTES;
        const float2 *const lse2 = (const float2 *)(memory + LSE_AT + now.stage * BM * 4) + row0 / 2;
        const float2 *const delta = (const float2 *)(memory + DELTA_AT + now.stage * BM * 4) + row0 / 2;
        PIN(s, ROWS / 2);
        PIN(dp, ROWS / 2);
        const int edge = crosses_edge(&t->s, now.i0, t->j0);
        if (GENERAL) {
            const corner at = {t->b, now.h, now.i0 + row0, key, slope_of(a, now.h)};
            uint32_t keep[1];
            if (a->drop_T) keep_rows(keep, ROWS, a, &at);
            general_probabilities(s, ROWS, lse2, a, &t->s, &at, edge);
            general_gradients(pr, ds, s, dp, ROWS, lse2, delta, keep, a, &t->s, &at, edge);
        } else {
            if (edge) { /* row i sees keys up to i + hi */
                const int far = 1 << 20, first = CAUSAL ? key - t->s.hi - now.i0 - row0 : -far;
                mask(s, ROWS, key < a->Sk ? first : far, key + 8 < a->Sk ? first + 8 : far);
            }
            probabilities(s, pr, ROWS, unit, lse2);
        }
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i)
            stmatrix_x4(p_tile + to + (((chunk + 2 * i) ^ (lane & 7)) << 4), pr + 4 * i);
        if (!GENERAL) score_gradients(ds, s, dp, ROWS, delta);
#pragma unroll
        for (int i = 0; i < ROWS / 16; ++i)
            stmatrix_x4(ds_tile + to + (((chunk + 2 * i) ^ (lane & 7)) << 4), ds + 4 * i);
        async_proxy_fence();
        named_barrier_sync(WRITTEN, 256);

        /* dQ in halves, for its registers; each leaves for L2 while the tensor cores have other work: this
           step's dV, dK, then S^T and dP^T of the next (after the last: of garbage). */
        float dq[COLUMNS / 4];
        float *const to_dq = a->dq_accumulator + padded_row(a, t, &now) * D +
                             consumer * (BM * COLUMNS) + (threadIdx.x & 127) * 4;
        const int other = now.stage ^ 1;
        wgmma_fence();
        dq_product(dq, operand(ds_tile, 0), k_depth);
        wgmma_commit();
        accumulate(dv, operand(p_tile, 0), operand(d_o + half * (BM * 128), BM * 128));
        wgmma_commit();
        wgmma_wait(1);
        PIN(dq, COLUMNS / 4);
        if (TURNS && a->turns) named_barrier_sync(TURN_BEGINS, 288);
#pragma unroll
        for (int i = 0; i < COLUMNS / 16; ++i) reduce_add_4(to_dq + i * 512, dq + 4 * i);
        wgmma_fence();
        dq_product(dq, operand(ds_tile, 0), k_depth + BN * 8);
        wgmma_commit();
        accumulate(dk, operand(ds_tile, 0), operand(q + half * (BM * 128), BM * 128));
        wgmma_commit();
        wgmma_wait(1);
        PIN(dq, COLUMNS / 4);
#pragma unroll
        for (int i = 0; i < COLUMNS / 16; ++i)
            reduce_add_4(to_dq + (COLUMNS / 16 + i) * 512, dq + 4 * i);
        if (TURNS && a->turns) named_barrier_arrive(TURN_ENDS, 288);
        if (n + 1 < t->steps) {
            const uint32_t parity = (n + 1) >> 1 & 1;
            mbarrier_wait(shared + q_full(other), parity);
            mbarrier_wait(shared + do_full(other), parity);
            if (GENERAL) clear_rows_of(t, step_of(t, a->group, n + 1), shared);
        }
        uint32_t base = shared; /* descriptors are made anew: kept from above the loop they spill */
        asm volatile("" : "+r"(base));
        wgmma_fence();
        keys_by_rows(s, operand(base, 0), operand(base + Q_AT + other * ROW_BYTES + rows_at, 0));
        keys_by_rows(dp, operand(base + V_AT, 0), operand(base + DO_AT + other * ROW_BYTES + rows_at, 0));
        wgmma_commit();
        wgmma_wait(1);
        PIN(dv, COLUMNS / 2);
        PIN(dk, COLUMNS / 2);
        release(shared + do_empty(now.stage));
        release(shared + q_empty(now.stage));
        wgmma_wait(0);
    }
    const int column0 = consumer * COLUMNS;
    store_keys(&a->dv, t, key, column0, COLUMNS, dv, GENERAL ? a->keep_scale : 1.0f, a->Dv, a->dv_f32, a->flags & FATTN_ACC_DV);
    store_keys(&a->dk, t, key, column0, COLUMNS, dk, a->scale, a->D, a->dk_f32,
               a->flags & FATTN_ACC_DK);
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    K_NAME(const __grid_constant__ fattni_sm90_args p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int role = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0);
    const task t = task_of(&p);
    if (GENERAL && t.j0 >= t.s.Sk) return;
    init_barriers(shared);
    __syncthreads();
    if (role == 0) {
        registers_lower(24);
        if (threadIdx.x == 0) load(&p, &t, shared);
        else if (threadIdx.x / 32 == 1 && TURNS && p.a.turns) look_after_turns(&p.a, &t);
    } else {
        registers_raise(240);
        consume(&p, &t, shared, memory, role - 1);
    }
}
