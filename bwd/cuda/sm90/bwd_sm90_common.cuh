/* What the Hopper backward kernels share: mbarriers, tasks, the producer's loads, masking, exponentials, and the
   epilogue of dK and dV. An includer defines before:

   D, BM, BN, CTAS      head_dim, tile, CTAs of a cluster: these have neighbouring key blocks and the same row blocks
   CAUSAL, GENERAL      of the variant
   BANDS                it has windows and lengths
   BIASED               it has a bias in shared memory
   PACKS                packed sequences of a head group follow each other (bwd_sm90_items.cuh, find_packed)
   DIVIDES              a task may be divided into parts (bwd_sm90_items.cuh, join_parts)
   GOES_BY_ROWS         a task may have each row block of all heads before the next one
   PANELS, ROW_BYTES    panels of 64 columns, and bytes, of a tile of Q
   V_PANELS, D_O_BYTES  the same of dO
   HALF, V_HALF         columns where the second half of the panels begins, of Q and of dO
   shared_memory        a struct with the tiles q[stages], d_o[stages], the floats lse2[stages][BM],
                        delta[stages][BM], and the mbarriers k_full, v_full, keys_empty, q_full[2], q_empty[2],
                        do_full[2], do_empty[2], dq_added, dq_added_seen
   ROWS_DONE            a named barrier, for work items of rows */
#ifndef FATTNI_BWD_CUDA_SM90_BWD_SM90_COMMON_H
#define FATTNI_BWD_CUDA_SM90_BWD_SM90_COMMON_H

#include "bwd/cuda/bwd_dq_semaphore.cuh"
#include "bwd/cuda/bwd_workspace.cuh"
#include "core/device/sm90_tile.cuh"
#include "core/ptx/grid.h"

/* 8 consumer warps release a stage; `dq_adders` warps or threads add the dQ of a step; K has `keys` arrivals. A CTA
   barrier must follow. */
DEVICE void init_barriers(uint32_t shared, int dq_adders, int keys) {
    if (threadIdx.x == 0) {
        mbarrier_init(MEMBER_ADDRESS(shared, k_full), keys);
        mbarrier_init(MEMBER_ADDRESS(shared, v_full), 1);
        mbarrier_init(MEMBER_ADDRESS(shared, keys_empty), 8);
        mbarrier_init(MEMBER_ADDRESS(shared, dq_added), dq_adders);
        mbarrier_init(MEMBER_ADDRESS(shared, dq_added_seen), 1);
        for (int n = 0; n < 2; ++n) {
            mbarrier_init(ELEMENT_ADDRESS(shared, q_full, n), 1);
            mbarrier_init(ELEMENT_ADDRESS(shared, do_full, n), 1);
            mbarrier_init(ELEMENT_ADDRESS(shared, q_empty, n), 8);
            mbarrier_init(ELEMENT_ADDRESS(shared, do_empty, n), 8);
        }
        mbarrier_init_fence();
    }
}

/* What a CTA, or a cluster, does at a time: work item `number` of its kind (bwd_sm90_scheduler.cuh). NOTHING: the next
   one. */
enum { MAINLOOP, SEARCH, PREPROCESS, POSTPROCESS, NOTHING, END };
typedef struct work_item {
    int kind, head_group, number;
} work_item;

/* A MAINLOOP work item: keys [j0, j0 + BN) of (b, hk), and for each of its query heads the row blocks that see one of
   the cluster's keys, from the one at row `from` on. The last rows come first, so that all CTAs of a head start at the
   same ones, and with a deterministic dQ wait little at the start. Short sequences without it begin with the first
   rows, so that CTAs start at different ones. Where p->turns, tasks of every second wave begin with the first rows,
   their diagonal: those of the wave before end one after the other, the shortest first, and the next task of each has
   its diagonal where the others are by then. So all are at the same rows, and what they share stays in L2. */
typedef struct task {
    int b, hk, j0, from, last, steps; /* last: row of a head's last step; steps: row blocks of all its heads */
    int last_head, heads;             /* its query heads: those of the group, or of a part of it */
    int head_group;
    int accumulator_shift; /* head h adds to the dQ accumulator of head h + accumulator_shift; packed: where PACKS */
    int steps_before;      /* of this CTA's earlier tasks, modulo 4: stages continue from task to task */
    int kv_phase;          /* parity of K's and V's mbarriers */
    int part, parts;       /* DIVIDES: it is one of so many, of row blocks or of heads; parts 0: none */
    sequence s;
} task;

DEVICE int packs(const fattni_bwd_args *bwd) { return PACKS && bwd->a.cu_seqlens_k.p != 0; }

/* Where MAINLOOP work item `number` is, and which part of its task. Below a diagonal the first keys have most rows,
   and come first, or as schedule.order says; with a deterministic dQ they add first. */
DEVICE position position_of_task(const fattni_bwd_sm90_args *p, int number, int *part) {
    int task = number;
    *part = 0;
    if (DIVIDES && number >= p->whole) {
        task = p->whole + (number - p->whole) / p->most_parts;
        *part = (number - p->whole) % p->most_parts;
    }
    const int by_head_group = CAUSAL || p->bwd.dq_semaphore != 0 || (BANDS && p->bwd.a.right < FATTNI_FAR);
    position at = position_of(&p->schedule, task, by_head_group);
    if (CAUSAL && CTAS == 1) at.block = fattni_ordered_block(&p->schedule.order, at.block);
    return at;
}
/* Where plane n of the schedule is: the heads of a sequence follow each other or, where sequences share a bias, which
   then stays in L2, the sequences of a head. */
typedef struct key_head {
    int b, hk;
} key_head;
DEVICE key_head key_head_of(const fattni_bwd_sm90_args *p, int plane) {
    const fattni_attention_args *const a = &p->bwd.a;
    const int by_head = BIASED && !p->bias_step.batch;
    const key_head x = {by_head ? plane % a->B : plane / a->Hkv, by_head ? plane / a->B : plane % a->Hkv};
    return x;
}
/* Its query heads. The first part has fewer where they are not all as many: the last one waits for the others. */
DEVICE void find_heads(const fattni_bwd_sm90_args *p, task *t) {
    const int group = p->bwd.a.group, some = DIVIDES && t->parts > 1 ? p->part_heads : 0;
    const int end = group - (some ? (t->parts - 1 - t->part) * some : 0);
    t->heads = some ? min(some, end) : group;
    t->last_head = t->hk * group + end - 1;
}
DEVICE task task_at(const fattni_bwd_sm90_args *p, const work_item *x, const position *at, int part) {
    const fattni_bwd_args *const bwd = &p->bwd;
    const fattni_attention_args *const a = &p->bwd.a;
    const int j0 = at->block * (CTAS * BN);
    const key_head key = key_head_of(p, at->plane);
    task t = {key.b, key.hk, j0 + (int)blockIdx.x % CTAS * BN, 0, 0, 0};
    const int group = p->schedule.head_group, plane = packs(bwd) ? t.hk : at->plane, /* of the schedule */
        accumulator = p->progress ? x->head_group % FATTNI_RING * group + plane - x->head_group * group
                      : BIASED    ? t.b * a->Hkv + t.hk
                                  : plane;
    t.part = part, t.parts = part == 0;
    t.head_group = x->head_group;
    t.accumulator_shift = (accumulator - t.hk) * a->group;
    t.s = BANDS ? sequence_of(a, t.b) : whole_sequence(a, t.b, CAUSAL);
    const int keys = min(CTAS * BN, t.s.Sk - j0);
    const int begin = max(0, j0 - t.s.hi), blocks = (a->Sk + CTAS * BN - 1) / (CTAS * BN),
              end = BANDS ? min(j0 + keys - t.s.lo, t.s.Sq) : t.s.Sq;
    if (begin >= end || keys <= 0) return t;
    const int second = p->turns && (x->number - x->head_group * p->group_items) / (int)gridDim.x % 2;
    const int upwards = !bwd->dq_semaphore && (blocks <= FATTNI_SHORT_BLOCKS || second);
    int first = begin / BM, last = (end - 1) / BM;
    if (DIVIDES && x->number >= p->whole && p->part_heads) {
        t.parts = p->most_parts;
    } else if (DIVIDES && x->number >= p->whole) {
        const int rows = last - first + 1, parts = min(p->most_parts, (rows + p->part_blocks - 1) / p->part_blocks);
        t.parts = part < parts ? parts : 0;
        last = first + rows * (part + 1) / parts - 1;
        first += rows * part / parts;
    }
    t.from = (upwards ? first : last) * BM, t.last = (upwards ? last : first) * BM;
    find_heads(p, &t);
    t.steps = (last - first + 1) * t.heads;
    return t;
}
/* The row block of a query head that belongs to a step of the task: all row blocks of a head, then the next head; or,
   where p->by_rows, a row block of all heads, then the next row block. Advanced without branches: whatever stands
   before a step's first product delays all of it. */
typedef struct row_cursor {
    int h, i0;
} row_cursor;
DEVICE row_cursor first_rows(const task *t) {
    const row_cursor x = {t->last_head - t->heads + 1, t->from};
    return x;
}
DEVICE void next_rows(row_cursor *x, const task *t, const fattni_bwd_sm90_args *p) {
    const int by_rows = GOES_BY_ROWS && p->by_rows, ends = by_rows ? x->h == t->last_head : x->i0 == t->last;
    const int next = x->i0 + (t->from <= t->last ? BM : -BM);
    x->i0 = by_rows ? (ends ? next : x->i0) : ends ? t->from : next;
    x->h += by_rows && ends ? 1 - t->heads : by_rows || ends;
}
/* Step n of the task: its rows, and the stage and parity of their tiles. */
typedef struct step {
    int h, i0, stage;
    uint32_t parity;
} step;
DEVICE step step_at(const row_cursor *x, const task *t, int n) {
    const int count = t->steps_before + n;
    const step s = {x->h, x->i0, count & 1, (uint32_t)(count >> 1 & 1)};
    return s;
}
/* Whether some row of the block at i0 does not see some key of the block at j0. */
DEVICE int crosses_edge(const sequence *s, int i0, int j0) {
    if (j0 + BN > s->Sk) return 1;
    if (BANDS && j0 < i0 + BM - 1 + s->lo) return 1;
    return (CAUSAL || BANDS) && i0 + s->hi < j0 + BN - 1;
}
DEVICE int64_t padded_row(const fattni_bwd_args *bwd, const task *t, const step *s) {
    const fattni_attention_args *const a = &bwd->a;
    if (BANDS) return row_base(bwd, &t->s, t->b, s->h) + s->i0;
    return ((int64_t)t->b * a->Hq + s->h) * bwd->padded_rows + s->i0;
}

DEVICE float *accumulator_at(const fattni_bwd_args *bwd, const task *t, const step *s) {
    const fattni_attention_args *const a = &bwd->a;
    const int packed = BANDS && a->cu_seqlens_q.p != 0;
    const int64_t head = t->accumulator_shift + (packed ? 0 : s->h);
    const int64_t row = (PACKS || !packed ? head * bwd->padded_rows : 0) + (packed ? padded_row(bwd, t, s) : s->i0);
    return bwd->dq_accumulator + row * D;
}

/* ---- deterministic dQ (bwd_dq_semaphore.cuh) ---- */

/* dq_semaphore_at, without divisions. It counts in halves: a key block is done after two additions, of the two
   consumers or of the two CTAs of a cluster. */
DEVICE int32_t *dq_semaphore_of_step(const fattni_bwd_args *bwd, const task *t, const step *s) {
    const fattni_attention_args *const a = &bwd->a;
    return bwd->dq_semaphore + ((int64_t)t->b * a->Hq + s->h) * ((a->Sq + BM - 1) / BM) + s->i0 / BM;
}
DEVICE void wait_dq_semaphore_of_step(int32_t *semaphore, const task *t, const step *s) {
    acquire_dq_semaphore(semaphore, 2 * dq_ticket_of(&t->s, s->i0, t->j0, CTAS * BN));
}
/* A release waits for the additions of all, which takes a third of a step: a thread does nothing else
   (post_dq_semaphores). This tells it that the caller's additions of a step are complete. */
DEVICE void report_dq_added(const step *s, uint32_t shared) {
    mbarrier_wait(MEMBER_ADDRESS(shared, dq_added_seen), (uint32_t)s->stage ^ 1); /* of the last step */
    mbarrier_arrive(MEMBER_ADDRESS(shared, dq_added));
}
DEVICE void post_dq_semaphores(const fattni_bwd_sm90_args *p, const task *t, uint32_t shared) {
    row_cursor at = first_rows(t);
    for (int n = 0; n < t->steps; ++n, next_rows(&at, t, p)) {
        const step s = step_at(&at, t, n);
        mbarrier_wait(MEMBER_ADDRESS(shared, dq_added), (uint32_t)s.stage);
        mbarrier_arrive(MEMBER_ADDRESS(shared, dq_added_seen));
        add_release(dq_semaphore_of_step(&p->bwd, t, &s), 2 / CTAS);
    }
}

/* ---- the producer ---- */

/* load_panels where the second half of the panels begins with column `half`. */
DEVICE void load_halves(uint32_t to, const CUtensorMap *map, uint32_t bar, int panels, int half, int rows, int row,
                        int head, int batch) {
    for (int x = 0; x < panels; ++x) {
        const int first = half == 32 * panels ? 64 * x : x / (panels / 2) * half + x % (panels / 2) * 64;
        tma_load(to + x * rows * 128, map, bar, first, row, head, batch);
    }
}
/* Q of a step to its stage, whose mbarrier then waits for lse2, too. */
DEVICE void load_q(const fattni_bwd_sm90_args *p, const task *t, const step *s, uint32_t shared) {
    const uint32_t full = ELEMENT_ADDRESS(shared, q_full, s->stage);
    mbarrier_wait(ELEMENT_ADDRESS(shared, q_empty, s->stage), s->parity ^ 1);
    mbarrier_expect(full, ROW_BYTES + BM * 4);
    load_halves(ELEMENT_ADDRESS(shared, q, s->stage), &p->q, full, PANELS, HALF, BM, t->s.q0 + s->i0,
                s->h * p->q_step.head, t->s.batch * p->q_step.batch);
}
/* dO, which delta follows, to a stage and phase of their own: bwd_sm90_cluster.cuh has one stage. */
DEVICE void load_d_o(const fattni_bwd_sm90_args *p, const task *t, const step *s, int stage, uint32_t parity,
                     uint32_t shared) {
    const uint32_t full = ELEMENT_ADDRESS(shared, do_full, stage);
    mbarrier_wait(ELEMENT_ADDRESS(shared, do_empty, stage), parity ^ 1);
    mbarrier_expect(full, D_O_BYTES + BM * 4);
    load_halves(ELEMENT_ADDRESS(shared, d_o, stage), &p->d_o, full, V_PANELS, V_HALF, BM, t->s.q0 + s->i0,
                s->h * p->d_o_step.head, t->s.batch * p->d_o_step.batch);
}
/* lse2 and delta of a step's rows, of which `row` is the first padded row. */
DEVICE void load_lse2(const fattni_bwd_sm90_args *p, const step *s, int64_t row, uint32_t shared) {
    bulk_load(ELEMENT_ADDRESS(shared, lse2, s->stage), p->bwd.lse2 + row, BM * 4,
              ELEMENT_ADDRESS(shared, q_full, s->stage));
}
DEVICE void load_delta(const fattni_bwd_sm90_args *p, int64_t row, int stage, uint32_t shared) {
    bulk_load(ELEMENT_ADDRESS(shared, delta, stage), p->bwd.delta + row, BM * 4,
              ELEMENT_ADDRESS(shared, do_full, stage));
}

/* ---- consumers ---- */

/* A stage of lse2 or delta, from row0 on: element 4n has rows row0 + 8n and row0 + 8n + 1. */
DEVICE const float2 *statistics(const float rows[BM], int row0) { return (const float2 *)rows + row0 / 2; }

/* S^T of this thread's two keys, `columns` rows of S: -inf where 8i + e < limit of the key. */
DEVICE void mask(float *s, int columns, int limit0, int limit1) {
#pragma unroll
    for (int i = 0; i < columns / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (8 * i + e < limit0) s[4 * i + e] = -INFINITY;
            if (8 * i + e < limit1) s[4 * i + 2 + e] = -INFINITY;
        }
}

/* The same where 8i + e > last, and for the second key 8 more. */
DEVICE void mask_after(float *s, int columns, int last) {
#pragma unroll
    for (int i = 0; i < columns / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (8 * i + e > last) s[4 * i + e] = -INFINITY;
            if (8 * i + e > last + 8) s[4 * i + 2 + e] = -INFINITY;
        }
}

/* mask at the edge of a FULL or CAUSAL mask; row i0 + row0 is the thread's first and sees keys up to + hi. */
DEVICE void mask_edge(float *s, int columns, int edge, int Sk, int hi, int i0, int row0, int key) {
    if (edge) {
        const int far = 1 << 20, first = CAUSAL ? key - hi - i0 - row0 : -far;
        mask(s, columns, key < Sk ? first : far, key + 8 < Sk ? first + 8 : far);
    }
}

/* The same of a band, whose sequence may end before the buffers do. */
DEVICE void mask_band(float *x, int columns, const sequence *s, int i0, int row0, int j0, int key) {
    if (j0 + BN > s->Sk || i0 + s->hi < j0 + BN - 1) {
        const int far = 1 << 20, first = key - s->hi - i0 - row0;
        mask(x, columns, key < s->Sk ? first : far, key + 8 < s->Sk ? first + 8 : far);
    }
    if (j0 < i0 + BM - 1 + s->lo) mask_after(x, columns, key - s->lo - i0 - row0);
}

/* x = 2^(unit x - lse2), in tiles of 8 rows; lse2 as `statistics` returns it. */
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
DEVICE void score_gradients(uint32_t *ds, const float *s, const float *dp, int columns, const float2 *delta) {
#pragma unroll
    for (int i = 0; i < columns / 8; ++i) {
        const float2 x = delta[4 * i];
        ds[2 * i] = pack(s[4 * i] * (dp[4 * i] - x.x), s[4 * i + 1] * (dp[4 * i + 1] - x.y));
        ds[2 * i + 1] = pack(s[4 * i + 2] * (dp[4 * i + 2] - x.x), s[4 * i + 3] * (dp[4 * i + 3] - x.y));
    }
}

/* A tile of 8 columns of dQ, of rows g and g + 8 of a warp's 16, less what dS of these rows sums to (sums[0], sums[2])
   times the mean of the keys. */
DEVICE void subtract_mean(float dq[4], const float sums[4], const float2 *mean) {
    const float2 m = *mean;
    dq[0] -= sums[0] * m.x, dq[1] -= sums[0] * m.y;
    dq[2] -= sums[2] * m.x, dq[3] -= sums[2] * m.y;
}

/* The factor of dV, of dropout and of F16's scaled P (lse_shift); else 1, as a constant. */
DEVICE float scale_of_dv(const fattni_bwd_args *bwd) { return GENERAL || !K_BF16 ? bwd->dv_scale : 1.0f; }

/* This thread's two keys of dK or dV, `columns` columns from column0 on, to the caller's tensor. */
DEVICE void store_keys(const fattni_view *view, const task *t, int key, int column0, int columns, const float *x,
                       float scale, int width, int f32, int add) {
    if (!view->p) return;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int64_t at =
            t->s.batch * view->b + t->hk * view->h + (int64_t)(t->s.k0 + key + 8 * e) * view->row + column0;
        store_row((char *)view->p + at * (f32 ? 4 : 2), x + 2 * e, columns / 8, scale, key + 8 * e < t->s.Sk,
                  width - column0, f32, add);
    }
}
/* dV and dK of this thread's two keys. */
DEVICE void store_dv(const fattni_bwd_args *bwd, const task *t, int key, int column0, int columns, const float *dv) {
    const fattni_attention_args *const a = &bwd->a;
    store_keys(&bwd->dv, t, key, column0, columns, dv, scale_of_dv(bwd), a->Dv, bwd->dv_f32, a->flags & FATTN_ACC_DV);
}
DEVICE void store_dk(const fattni_bwd_args *bwd, const task *t, int key, int column0, int columns, const float *dk) {
    const fattni_attention_args *const a = &bwd->a;
    store_keys(&bwd->dk, t, key, column0, columns, dk, bwd->dk_scale, a->D, bwd->dk_f32, a->flags & FATTN_ACC_DK);
}

#endif
