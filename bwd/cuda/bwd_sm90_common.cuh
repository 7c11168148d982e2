/* What both Hopper backward bodies share: the work of a CTA, its loads, masking, and the way of
   dK and dV out. Include after the enumerators D, BM, BN, CTAS (that walk over the same rows,
   each with BN keys), PANELS, K_PANEL (columns from one panel of K to the next), CAUSAL,
   GENERAL and the offsets in shared memory. Named barrier ROWS_DONE is for pieces of rows. */
#ifndef FATTNI_BWD_CUDA_BWD_SM90_COMMON_H
#define FATTNI_BWD_CUDA_BWD_SM90_COMMON_H

#include "bwd/cuda/bwd_workspace.cuh"
#include "core/device/dq_order.cuh"
#include "core/device/sm90_tile.cuh"

#define LOG2E 1.4426950408889634f

enum { ROWS_DONE = 7 };
/* mbarriers */
enum {
    K_FULL = BARRIERS_AT, V_FULL = BARRIERS_AT + 8, KEYS_EMPTY = BARRIERS_AT + 112,
    TURN_USED = BARRIERS_AT + 120, TURN_SEEN = BARRIERS_AT + 128
};
DEVICE uint32_t q_full(int stage) { return BARRIERS_AT + 16 + 8u * stage; }
DEVICE uint32_t q_empty(int stage) { return BARRIERS_AT + 32 + 8u * stage; }
DEVICE uint32_t do_full(int stage) { return BARRIERS_AT + 48 + 8u * stage; }
DEVICE uint32_t do_empty(int stage) { return BARRIERS_AT + 64 + 8u * stage; }

/* 8 consumer warps release a stage, so many `adders` use a turn. A CTA barrier must follow. */
DEVICE void init_barriers(uint32_t shared, int adders) {
    if (threadIdx.x == 0) {
        mbarrier_init(shared + K_FULL, 1);
        mbarrier_init(shared + V_FULL, 1);
        mbarrier_init(shared + KEYS_EMPTY, 8);
        mbarrier_init(shared + TURN_USED, adders);
        mbarrier_init(shared + TURN_SEEN, 1);
        for (int n = 0; n < 2; ++n) {
            mbarrier_init(shared + q_full(n), 1);
            mbarrier_init(shared + do_full(n), 1);
            mbarrier_init(shared + q_empty(n), 8);
            mbarrier_init(shared + do_empty(n), 8);
        }
        mbarrier_init_fence();
    }
}

/* One of the pieces that a call is cut into; sections are those of bwd_sm90_scheduler.cuh. */
enum { MULTIPLY, PREPARE, FINISH, NOTHING, END };
enum { RING = FATTNI_RING, LAG = FATTNI_LAG, ROWS_AT_ONCE = FATTNI_ROWS_AT_ONCE(D) };
typedef struct piece {
    int kind, section, number;
} piece;

/* A piece that multiplies: keys [j0, j0 + BN) of (b, hk), for each head of the group the row blocks that see one
   of them or of its neighbours' keys, from that at row `from` to that at row `to`. The last rows come first: so
   all CTAs of a head start at the same ones, and where they take turns a wait at the start is short. In short
   sequences without turns the first come first: so they start at different ones. */
typedef struct task {
    int b, hk, j0, from, to, steps;
    int section;
    int to_head;      /* h + to_head is whose accumulator h has, if no lengths are packed */
    int before, keys; /* of this CTA: steps of earlier tasks, which stages count on from, and how many of
                         these had steps; their last bits */
    sequence s;
} task;

DEVICE task task_of(const fattni_sm90_args *p, const piece *x) {
    const fattni_cuda_args *const a = &p->a;
    /* The first keys have most rows below a diagonal, and add first when they take turns. */
    const int in_sections = CAUSAL || a->turns != 0 || (GENERAL && a->right < FATTNI_FAR);
    const position at = position_of(p, a->Hkv, x->number, in_sections);
    const int j0 = at.block * (CTAS * BN);
    task t = {at.plane / a->Hkv, at.plane % a->Hkv, j0 + (int)blockIdx.x % CTAS * BN, 0, 0, 0};
    const int place = p->progress ? x->section % RING * p->section + at.plane - x->section * p->section
                                  : at.plane;
    t.section = x->section;
    t.to_head = (place - t.hk) * a->group;
    t.s = GENERAL ? sequence_of(a, t.b) : whole_sequence(a, t.b, CAUSAL);
    const int keys = min(CTAS * BN, t.s.Sk - j0);
    const int begin = max(0, j0 - t.s.hi), end = GENERAL ? min(j0 + keys - t.s.lo, t.s.Sq) : t.s.Sq;
    if (begin >= end || keys <= 0) return t;
    const int first = begin / BM, last = (end - 1) / BM, upwards = !a->turns && p->blocks <= FATTNI_SHORT_BLOCKS;
    t.from = (upwards ? first : last) * BM;
    t.to = (upwards ? last : first) * BM;
    t.steps = (last - first + 1) * a->group;
    return t;
}
/* A row block of a query head, which one step of the task is about. Each is made from the one before, without
   branches: what stands before a step's first product delays all of it. */
typedef struct place {
    int h, i0;
} place;
DEVICE place first_place(const task *t, int group) {
    const place x = {t->hk * group, t->from};
    return x;
}
DEVICE void go_on(place *x, const task *t) {
    const int last = x->i0 == t->to; /* of its head */
    x->i0 = last ? t->from : x->i0 + (t->from <= t->to ? BM : -BM);
    x->h += last;
}
/* Step n, and the stage of what is loaded for it. */
typedef struct step {
    int h, i0, stage;
    uint32_t parity;
} step;
DEVICE step step_at(const place *x, const task *t, int n) {
    const int count = t->before + n;
    const step s = {x->h, x->i0, count & 1, (uint32_t)(count >> 1 & 1)};
    return s;
}
/* Whether some row of the block at i0 does not see some key of the block at j0. */
DEVICE int crosses_edge(const sequence *s, int i0, int j0) {
    if (j0 + BN > s->Sk) return 1;
    if (GENERAL && j0 < i0 + BM - 1 + s->lo) return 1;
    return (CAUSAL || GENERAL) && i0 + s->hi < j0 + BN - 1;
}
DEVICE int64_t padded_row(const fattni_cuda_args *a, const task *t, const step *s) {
    if (GENERAL) return row_base(a, &t->s, t->b, s->h) + s->i0;
    return ((int64_t)t->b * a->Hq + s->h) * a->padded_rows + s->i0;
}

DEVICE float *accumulator_at(const fattni_cuda_args *a, const task *t, const step *s) {
    const int packed = GENERAL && a->cu_seqlens_q.p != 0;
    const int64_t row = packed ? padded_row(a, t, s) : (int64_t)(t->to_head + s->h) * a->padded_rows + s->i0;
    return a->dq_accumulator + row * D;
}

/* ---- turns ---- */

/* turns_at, without divisions; a turn is over when two parts were added, whoever they are of. */
DEVICE int32_t *turn_counter(const fattni_cuda_args *a, const task *t, const step *s) {
    return a->turns + ((int64_t)t->b * a->Hq + s->h) * ((a->Sq + BM - 1) / BM) + s->i0 / BM;
}
DEVICE void wait_for_turn(int32_t *counter, const task *t, const step *s) {
    acquire_turn(counter, 2 * turn_of(&t->s, s->i0, t->j0, CTAS * BN));
}
/* To say that a turn is over takes as long as a third of a step, since it waits for the sums of others, too: so a
   thread does nothing else. An adder: its sums of the step are complete. */
DEVICE void use_turn(const step *s, uint32_t shared) {
    mbarrier_wait(shared + TURN_SEEN, (uint32_t)s->stage ^ 1); /* of the last step */
    mbarrier_arrive(shared + TURN_USED);
}
DEVICE void end_turns(const fattni_cuda_args *a, const task *t, uint32_t shared) {
    place at = first_place(t, a->group);
    for (int n = 0; n < t->steps; ++n, go_on(&at, t)) {
        const step s = step_at(&at, t, n);
        mbarrier_wait(shared + TURN_USED, (uint32_t)s.stage);
        mbarrier_arrive(shared + TURN_SEEN);
        add_release(turn_counter(a, t, &s), 2 / CTAS);
    }
}

/* ---- the producer ---- */

/* Q and lse2 of a step, whose rows begin at padded row `at`, to its stage; dO and delta to stage `stage`, as soon
   as phase `parity` has left it. */
DEVICE void load_q(const fattni_sm90_args *p, const task *t, const step *s, int64_t at, uint32_t shared) {
    const uint32_t bar = shared + q_full(s->stage);
    mbarrier_wait(shared + q_empty(s->stage), s->parity ^ 1);
    mbarrier_expect(bar, ROW_BYTES + BM * 4);
    load_panels(shared + Q_AT + s->stage * ROW_BYTES, &p->q, bar, PANELS, BM, t->s.q0 + s->i0,
                s->h * p->q_step.head, t->s.batch * p->q_step.batch);
    bulk_load(shared + LSE_AT + s->stage * BM * 4, p->a.lse2 + at, BM * 4, bar);
}
DEVICE void load_d_o(const fattni_sm90_args *p, const task *t, const step *s, int64_t at, int stage,
                     uint32_t parity, uint32_t shared) {
    const uint32_t bar = shared + do_full(stage);
    mbarrier_wait(shared + do_empty(stage), parity ^ 1);
    mbarrier_expect(bar, ROW_BYTES + BM * 4);
    load_panels(shared + DO_AT + stage * ROW_BYTES, &p->d_o, bar, PANELS, BM, t->s.q0 + s->i0,
                s->h * p->d_o_step.head, t->s.batch * p->d_o_step.batch);
    bulk_load(shared + DELTA_AT + stage * BM * 4, p->a.delta + at, BM * 4, bar);
}

/* ---- consumers ---- */

/* Of lse2 or delta, which lie at byte `at`: row0 and the one after it; [4 n]: those 8 n rows on. */
DEVICE const float2 *statistics(const unsigned char *memory, int at, int row0) {
    return (const float2 *)(memory + at) + row0 / 2;
}

/* Zeroes what two tiles, of `rows` rows each, hold from row `from` on. Both consumers, once the
   tiles are there. */
DEVICE void clear_tails(uint32_t tile0, uint32_t tile1, int rows, int from, int barrier) {
    clear_rows(tile0, PANELS, rows, from, (int)threadIdx.x - 128, 256);
    clear_rows(tile1, PANELS, rows, from, (int)threadIdx.x - 128, 256);
    named_barrier_sync(barrier, 256);
}

/* Keys are rows of S^T; column 8i + e of the thread, i < columns/8, stays where it is >=
   limit[key]. */
DEVICE void mask(float *s, int columns, int limit0, int limit1) {
#pragma unroll
    for (int i = 0; i < columns / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (8 * i + e < limit0) s[4 * i + e] = -INFINITY;
            if (8 * i + e < limit1) s[4 * i + 2 + e] = -INFINITY;
        }
}

/* x = 2^(unit x - lse2), of 8 rows a tile; lse2: from this thread's first row on. */
DEVICE void exponentials(float (*x)[4], int tiles, float unit, const float2 *lse2) {
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        const float2 l = lse2[4 * n];
#pragma unroll
        for (int e = 0; e < 4; ++e) x[n][e] = exp2_approx(fmaf(x[n][e], unit, e & 1 ? -l.y : -l.x));
    }
}
DEVICE void round_pairs(uint32_t *r, const float *x, int count) {
#pragma unroll
    for (int n = 0; n < count / 2; ++n) r[n] = pack(x[2 * n], x[2 * n + 1]);
}
/* ds = P (dP - delta), rounded. */
DEVICE void score_gradients(uint32_t *ds, const float *s, const float *dp, int columns,
                            const float2 *delta) {
#pragma unroll
    for (int i = 0; i < columns / 8; ++i) {
        const float2 x = delta[4 * i];
        ds[2 * i] = pack(s[4 * i] * (dp[4 * i] - x.x), s[4 * i + 1] * (dp[4 * i + 1] - x.y));
        ds[2 * i + 1] =
            pack(s[4 * i + 2] * (dp[4 * i + 2] - x.x), s[4 * i + 3] * (dp[4 * i + 3] - x.y));
    }
}

/* What dV is multiplied by, known here to be 1 for most: dropout's scale, and in F16 what P is scaled by. */
DEVICE float scale_of_dv(const fattni_cuda_args *a) { return GENERAL || !K_BF16 ? a->dv_scale : 1.0f; }

/* This thread's two keys of a gradient, `columns` columns from column0 on. */
DEVICE void store_keys(const fattni_view *view, const task *t, int key, int column0, int columns,
                       const float *x, float scale, int width, int f32, int add) {
    if (!view->p) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int64_t at = t->s.batch * view->b + t->hk * view->h +
                           (int64_t)(t->s.k0 + key + 8 * e) * view->row + column0;
        store_row((char *)view->p + at * (f32 ? 4 : 2), x + 2 * e, columns / 8, scale,
                  key + 8 * e < t->s.Sk, width - column0, f32, add);
    }
}

#endif
