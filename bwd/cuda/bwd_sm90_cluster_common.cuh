/* What both Hopper backward bodies for wide heads share: two CTAs, a cluster, with neighbouring
   keys that walk over the same row blocks. Each loads what it needs itself, and adds half of the
   columns of dQ for the keys of both: dS = [dS here | dS of the other], K likewise. Include
   after the enumerators of bwd_sm90_common.cuh and COLUMNS, half of D; OTHER_K_AT, DS_AT,
   OTHER_DS_AT, TILE_BYTES; SLICE, floats of a row block's accumulator that a CTA adds; DQ_COLUMNS, 64 or 128,
   which the warpgroup of dQ has registers for; and PAUSE, cycles between two reductions of a warp.

   dS^T has two stages on both sides. A stage is full with this CTA's part and that which the
   other has sent; it is empty when both CTAs' dQ has read it. */
#ifndef FATTNI_BWD_CUDA_BWD_SM90_CLUSTER_COMMON_H
#define FATTNI_BWD_CUDA_BWD_SM90_CLUSTER_COMMON_H

#include "bwd/cuda/bwd_sm90_scheduler.cuh"
#include "core/ptx/clock.h"
#include "core/ptx/cluster.h"

enum { ROWS_READY = 5 }; /* a named barrier; the bodies have 1 to 4 */
DEVICE uint32_t ds_full(int stage) { return BARRIERS_AT + 80 + 8u * stage; }
DEVICE uint32_t ds_empty(int stage) { return BARRIERS_AT + 96 + 8u * stage; }

enum { TURN_CAME = BARRIERS_AT + 136 };

DEVICE int cta(void) { return (int)blockIdx.x % CTAS; }
DEVICE uint32_t other_cta(void) { return (uint32_t)cta() ^ 1; }

/* In place of init_barriers and the CTA barrier after it: the other CTA may arrive then. 4 warps
   of each CTA empty a stage. */
DEVICE void init_pair(uint32_t shared) {
    init_barriers(shared, 4);
    if (threadIdx.x == 0) {
        for (int n = 0; n < 2; ++n) {
            mbarrier_init(shared + ds_full(n), 1);
            mbarrier_init(shared + ds_empty(n), 8);
        }
        mbarrier_init(shared + TURN_CAME, 1);
        mbarrier_init_fence();
    }
    cluster_sync();
}

/* ---- the producer ---- */

DEVICE void load_pair(const fattni_sm90_args *p, const task *t, uint32_t shared) {
    const int key = t->s.k0 + t->j0, other_key = t->s.k0 + (t->j0 ^ BN);
    const int k_head = t->hk * p->k_step.head, k_batch = t->s.batch * p->k_step.batch;
    mbarrier_expect(shared + K_FULL, KEY_BYTES + KEY_BYTES / 2);
    load_panels(shared, &p->k, shared + K_FULL, PANELS, BN, key, k_head, k_batch);
    for (int x = 0; x < PANELS / 2; ++x)
        tma_load(shared + OTHER_K_AT + x * BN * 128, &p->k, shared + K_FULL,
                 64 * (PANELS / 2 * cta() + x), other_key, k_head, k_batch);
    if (p->progress) await(p, t->section, PREPARED, p->row_pieces * CTAS);
    place at = first_place(t, p->a.group);
    for (int n = 0; n < t->steps; ++n, go_on(&at, t)) {
        const step s = step_at(&at, t, n);
        const int64_t row = padded_row(&p->a, t, &s);
        load_q(p, t, &s, row, shared);
        if (n == 0) {
            mbarrier_expect(shared + V_FULL, KEY_BYTES);
            load_panels(shared + V_AT, &p->v, shared + V_FULL, PANELS, BN, key,
                        t->hk * p->v_step.head, t->s.batch * p->v_step.batch);
        }
        load_d_o(p, t, &s, row, 0, (uint32_t)(n & 1), shared); /* which has one stage */
    }
}

/* One thread: the warpgroup of dQ has none to spare. Counters are 0 when the rows are prepared. */
DEVICE void await_turns(const fattni_sm90_args *p, const task *t, uint32_t shared) {
    const fattni_cuda_args *const a = &p->a;
    if (p->progress) await(p, t->section, PREPARED, p->row_pieces * CTAS);
    place at = first_place(t, a->group);
    for (int n = 0; n < t->steps; ++n, go_on(&at, t)) {
        const step s = step_at(&at, t, n);
        wait_for_turn(turn_counter(a, t, &s), t, &s);
        mbarrier_wait(shared + TURN_SEEN, (uint32_t)s.stage ^ 1); /* so the last turn has been used */
        mbarrier_arrive(shared + TURN_CAME);
    }
}

/* ---- the warpgroup of dQ ---- */

/* 64 rows x DQ_COLUMNS, over the keys of both CTAs; dS^T is what lies in shared memory. */
DEVICE void dq_product(float x[DQ_COLUMNS / 2], uint32_t ds, uint32_t keys, uint32_t other_keys) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const uint64_t left = operand(ds + (part ? OTHER_DS_AT - DS_AT : 0), 0),
                       right = operand(part ? other_keys : keys, BN * 128);
#pragma unroll
        for (int e = 0; e < BN / 16; ++e) {
            const uint64_t a = left + along_rows(e), b = right + along_rows(e);
            if (DQ_COLUMNS == 128 && part + e == 0)
                wgmma_tt_new_n128(x, a, b);
            else if (DQ_COLUMNS == 128)
                wgmma_tt_n128(x, a, b, 1);
            else if (part + e == 0)
                wgmma_tt_new_n64(x, a, b);
            else
                wgmma_tt_n64(x, a, b, 1);
        }
    }
}

/* Reductions wait for L2, and while they do other warps' accesses to shared memory stand behind
   them: hence a warpgroup that does nothing else, and pauses. */
DEVICE void add_dq(const fattni_sm90_args *p, const task *t, uint32_t shared) {
    const fattni_cuda_args *const a = &p->a;
    const int leader = threadIdx.x % 128 == 0;
    if (p->progress) {
        if (leader) await(p, t->section, PREPARED, p->row_pieces * CTAS);
        __syncwarp();
        named_barrier_sync(ROWS_READY, 128);
    }
    mbarrier_wait(shared + K_FULL, 0);
    place at = first_place(t, a->group);
    for (int n = 0; n < t->steps; ++n, go_on(&at, t)) {
        const step s = step_at(&at, t, n);
        const uint32_t ds = shared + DS_AT + s.stage * TILE_BYTES,
                       empty = shared + ds_empty(s.stage);
        uint32_t keys = shared + cta() * (KEY_BYTES / 2), other_keys = shared + OTHER_K_AT;
        float *to = accumulator_at(a, t, &s) + cta() * (BM * COLUMNS) +
                    (threadIdx.x & 127) * 4;
        mbarrier_wait(shared + ds_full(s.stage), s.parity);
#pragma unroll 1
        for (int columns = DQ_COLUMNS; columns <= COLUMNS; columns += DQ_COLUMNS) {
            float dq[DQ_COLUMNS / 2];
            wgmma_fence();
            dq_product(dq, ds, keys, other_keys);
            wgmma_commit();
            if (columns == DQ_COLUMNS && a->turns) mbarrier_wait(shared + TURN_CAME, (uint32_t)(n & 1));
            wgmma_wait(0);
            PIN(dq, DQ_COLUMNS / 2);
            if (columns == COLUMNS) {
                release(empty);
                if (threadIdx.x % 32 == 0) cluster_arrive(cluster_address(empty, other_cta()));
            }
            const uint32_t begin = clock_now(), mine = threadIdx.x / 32 % 4 * (PAUSE / 4);
#pragma unroll
            for (int i = 0; i < DQ_COLUMNS / 8; ++i) {
                while (PAUSE && clock_now() - begin < mine + i * PAUSE) {}
                reduce_add_4(to + i * 512, dq + 4 * i);
            }
            to += BM * DQ_COLUMNS;
            keys += BN * DQ_COLUMNS * 2;
            other_keys += BN * DQ_COLUMNS * 2;
        }
        if (a->turns) {
            __threadfence_block(); /* so that an arrival does not overtake reductions */
            __syncwarp();
            if (is_leader()) use_turn(&s, shared);
        }
    }
    if (p->progress) {
        named_barrier_sync(ROWS_READY, 128);
        if (leader) report_sums(p, t->section);
    }
}

/* ---- consumers ---- */

/* One thread, when dS^T of a stage lies in shared memory for all: to this CTA's dQ, and to the
   other CTA. */
DEVICE void send_ds(uint32_t shared, int stage) {
    const uint32_t ds = shared + DS_AT + stage * TILE_BYTES, full = shared + ds_full(stage);
    mbarrier_expect(full, TILE_BYTES); /* which the other CTA sends */
    cluster_copy(cluster_address(ds + (OTHER_DS_AT - DS_AT), other_cta()), ds, TILE_BYTES,
                 cluster_address(full, other_cta()));
}

#endif
