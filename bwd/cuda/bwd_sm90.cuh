/* Backward attention for Hopper, head_dim up to 128 (beyond: bwd_sm90_cluster.cuh, bwd_sm90_cluster_general.cuh):
   TMA, wgmma. One persistent CTA per SM, whose pieces of work are blocks of 128 keys and, beside them, rows before
   and after the products (bwd_sm90_scheduler.cuh).

   For each row block: S^T = K Q^T, P = exp(S - L), dP^T = V dO^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += dS K.

   Tensors     q, d_o [b,h,i,d], k, v, dk, dv [b,g,j,d]; lse2 and delta (bwd_workspace.cuh) of padded rows. q, k,
               v, d_o with strides that tensor maps can take.
   Ownership   dK, dV of BN keys stay in registers over all row blocks of all query heads of the group;
               dQ is added to an fp32 accumulator at L2 by bulk reductions.
   Threads     warpgroup 0: warp 0 claims pieces and loads, warps 1 and 2 add the dQ of consumer 0 and 1, warp 3
               ends turns. Two consumers own 64 keys each: S^T and dP^T are computed transposed, so that P^T
               and dS^T are the register operands of dV and dK. dQ: a consumer has half of 128 rows, or all of
               64 rows and half of the columns.
   Overlap     The exponentials run beside dP. While wgmma reads both operands from shared memory a load from there
               waits, for 64x64 until the products are over; so S begins with -L / scale where a row block has
               64 rows, and of 128 rows half of lse2 is loaded beside the last dK (there are no registers for more).
   Shared      K, V [BN][D], Q and dO two stages [BM][D], dS two stages [BM][BN], dQ fp32, lse2 and
               delta two stages [BM]; the last two pieces. Stages go on across pieces, so the next keys, Q
               and dO are loaded while dK and dV are stored.
   Rounding    P and dS to the input dtype, accumulation fp32; scale enters dK here, dQ at the end.
   General     windows, lengths, ALiBi, bias, sink and dropout in GENERAL, with a softcap in CAPPED instances:
               other steps between S and dS (bwd_sm90_general.cuh); FULL and CAUSAL know none of them.
   Turns       FATTN_DETERMINISTIC: the adding warps wait for the key blocks before theirs (core/device/dq_order.cuh).

   Instances: bwd_kernels.def. Macros in: K_NAME, K_BF16, K_D, K_MASK, K_BM, K_BN, K_WARPS. */
#if K_D > 128 && K_MASK <= 1
#include "bwd/cuda/bwd_sm90_cluster.cuh"
#elif K_D > 128
#include "bwd/cuda/bwd_sm90_cluster_general.cuh"
#else
#include "core/device/sm90_tile.cuh"

enum {
    D = K_D, BM = K_BM, BN = K_BN, THREADS = 32 * K_WARPS, CAUSAL = K_MASK == 1,
    GENERAL = K_MASK >= 2, CAPPED = K_MASK == 3, CTAS = 1, PANELS = (D + 63) / 64,
    KEY_BYTES = BN * PANELS * 128, ROW_BYTES = BM * PANELS * 128, DS_BYTES = BM * BN * 2,
    BEGINS = FATTNI_BEGINS_WITH_L(!GENERAL, D, BM), EARLY = GENERAL || BEGINS ? 0 : 3,
    /* dQ: a consumer has half of 128 rows, or of 64 rows half of the columns. For d 80 the halves are 48
       columns that overlap, so are K's panels, of which the second starts with the second half. */
    SPLIT_ROWS = BM > 64, COLUMNS = D > 96 || SPLIT_ROWS ? 64 : 48,
    REPEATED = SPLIT_ROWS ? 0 : 2 * COLUMNS - D, SLICE = 64 * COLUMNS, /* floats */
    K_PANEL = D % 64 ? D - COLUMNS : 64,
    V_AT = KEY_BYTES, Q_AT = 2 * KEY_BYTES, DO_AT = Q_AT + 2 * ROW_BYTES, DS_AT = DO_AT + 2 * ROW_BYTES,
    DQ_AT = DS_AT + 2 * DS_BYTES, LSE_AT = DQ_AT + BM * D * 4, DELTA_AT = LSE_AT + 2 * BM * 4,
    BARRIERS_AT = DELTA_AT + 2 * BM * 4, PIECES_AT = BARRIERS_AT + 144, SHARED_BYTES = PIECES_AT + 96
};
static_assert(BN == 128 && K_WARPS == 12, "two consumers of 64 keys");
static_assert(D == 64 ? BM == 128 : D % 16 == 0 && BM == 64, "two slices of dQ");
static_assert(SHARED_BYTES == FATTNI_BWD_SM90_SHARED(D, BM, BN) && SHARED_BYTES <= 227 * 1024,
              "shared memory");

#include "bwd/cuda/bwd_sm90_general.cuh"
#include "bwd/cuda/bwd_sm90_scheduler.cuh"

/* named barriers */
enum { DS_WRITTEN = 1, DQ_FULL = 2, DQ_EMPTY = 4, CLEARED = 6 };

/* ---- pieces: the producer tells the others, in three int4 for each of the last two ---- */

DEVICE uint32_t piece_full(int n) { return BARRIERS_AT + 80 + 8u * (n & 1); }
DEVICE uint32_t piece_empty(int n) { return BARRIERS_AT + 96 + 8u * (n & 1); }
DEVICE void init_pieces(uint32_t shared, int turns) {
    if (threadIdx.x > 0) return;
    for (int n = 0; n < 2; ++n) {
        mbarrier_init(shared + piece_full(n), 1);
        mbarrier_init(shared + piece_empty(n), 10 + turns); /* warps: consumers', adding ones, that of turns */
    }
    mbarrier_init_fence();
}
DEVICE uint32_t piece_slot(uint32_t shared, int n) { return shared + PIECES_AT + (n & 1) * 48; }
DEVICE void write_piece(uint32_t slot, const piece *x, const task *t) {
    const uint32_t walk[4] = {(uint32_t)t->j0, (uint32_t)t->from, (uint32_t)t->to,
                              (uint32_t)(t->before | t->keys << 2 | t->steps << 3)},
                   what[4] = {(uint32_t)x->kind, (uint32_t)x->section, (uint32_t)x->number,
                              (uint32_t)t->to_head},
                   whose[4] = {(uint32_t)t->b, (uint32_t)t->hk, 0, 0};
    store_shared_words(slot, walk);
    store_shared_words(slot + 16, what);
    store_shared_words(slot + 32, whose);
}
DEVICE piece read_piece(uint32_t slot) {
    uint32_t what[4];
    load_shared_4(what, slot + 16);
    const piece x = {(int)what[0], (int)what[1], (int)what[2]};
    return x;
}
/* Which steps a task has. */
DEVICE task read_walk(const fattni_cuda_args *a, uint32_t slot) {
    uint32_t walk[4];
    load_shared_4(walk, slot);
    task t = {0, 0, (int)walk[0], (int)walk[1], (int)walk[2], (int)(walk[3] >> 3)};
    t.before = walk[3] & 3, t.keys = walk[3] >> 2 & 1;
    t.s = whole_sequence(a, 0, CAUSAL);
    return t;
}
DEVICE task read_task(const fattni_cuda_args *a, uint32_t slot) {
    uint32_t what[4], whose[4];
    task t = read_walk(a, slot);
    load_shared_4(what, slot + 16);
    load_shared_4(whose, slot + 32);
    t.section = what[1], t.to_head = what[3];
    t.b = t.s.batch = whose[0], t.hk = whose[1];
    if (GENERAL) t.s = sequence_of(a, t.b);
    return t;
}

/* ---- the producer's warps ---- */

/* K and V to L2, while those of the last task are in use. */
DEVICE void prefetch_keys(const fattni_sm90_args *p, const task *t) {
    const int key = t->s.k0 + t->j0;
    for (int x = 0; x < PANELS; ++x) {
        tma_prefetch(&p->k, K_PANEL * x, key, t->hk * p->k_step.head, t->s.batch * p->k_step.batch);
        tma_prefetch(&p->v, 64 * x, key, t->hk * p->v_step.head, t->s.batch * p->v_step.batch);
    }
}
/* K and V, when those of the last task are not needed any more. */
DEVICE void load_keys(const fattni_sm90_args *p, const task *t, uint32_t shared) {
    const int key = t->s.k0 + t->j0;
    mbarrier_wait(shared + KEYS_EMPTY, (uint32_t)t->keys ^ 1);
    mbarrier_expect(shared + K_FULL, KEY_BYTES);
    for (int x = 0; x < PANELS; ++x)
        tma_load(shared + x * BN * 128, &p->k, shared + K_FULL, K_PANEL * x, key, t->hk * p->k_step.head,
                 t->s.batch * p->k_step.batch);
    mbarrier_expect(shared + V_FULL, KEY_BYTES);
    load_panels(shared + V_AT, &p->v, shared + V_FULL, PANELS, BN, key, t->hk * p->v_step.head,
                t->s.batch * p->v_step.batch);
}

DEVICE void load(const fattni_sm90_args *p, const task *t, uint32_t shared) {
    if (p->progress) await(p, t->section, PREPARED, p->row_pieces);
    place at = first_place(t, p->a.group);
    for (int n = 0; n < t->steps; ++n, go_on(&at, t)) {
        const step s = step_at(&at, t, n);
        const int64_t row = padded_row(&p->a, t, &s);
        load_q(p, t, &s, row, shared);
        if (n == 0) load_keys(p, t, shared);
        load_d_o(p, t, &s, row, s.stage, s.parity, shared);
    }
}

/* Adds a consumer's slices to the accumulator, one warp per consumer. */
DEVICE void add_dq(const fattni_sm90_args *p, const task *t, uint32_t shared, int consumer) {
    const fattni_cuda_args *const a = &p->a;
    const int leader = is_leader();
    if (leader && p->progress) await(p, t->section, PREPARED, p->row_pieces);
    __syncwarp();
    if (t->steps) named_barrier_arrive(DQ_EMPTY + consumer, 160);
    place at = first_place(t, a->group);
    for (int n = 0; n < t->steps; ++n, go_on(&at, t)) {
        const step s = step_at(&at, t, n);
        asm volatile("" : "+r"(consumer)); /* addresses are made anew: 24 registers do not hold them */
        if (leader && a->turns) wait_for_turn(turn_counter(a, t, &s), t, &s);
        __syncwarp();
        named_barrier_sync(DQ_FULL + consumer, 160);
        if (leader) {
            bulk_reduce_add(accumulator_at(a, t, &s) + consumer * SLICE,
                            shared + DQ_AT + consumer * SLICE * 4, SLICE * 4 - consumer * REPEATED * 256);
            bulk_commit();
            bulk_wait_read();
        }
        __syncwarp();
        if (n + 1 < t->steps) named_barrier_arrive(DQ_EMPTY + consumer, 160);
        if (leader && a->turns) {
            bulk_wait();
            use_turn(&s, shared);
        }
    }
    if (!leader) return;
    bulk_wait();
    if (p->progress) report_sums(p, t->section);
}

/* ---- consumers ---- */

/* along_columns where the second panel starts at column `panel`. */
DEVICE uint32_t along_keys(int step, int panel) {
    return step < 4 ? step * 2 : BN * 8 + (step * 16 - panel) / 8;
}
/* x = A B^T, or x += A B^T: 64 keys x BM rows, over D. */
DEVICE void keys_by_rows(float x[BM / 2], uint64_t keys, int panel, uint64_t rows, int add) {
#pragma unroll
    for (int e = 0; e < D / 16; ++e)
        if (e == 0 && !add) PASTE(wgmma_ss_new_n, K_BM)(x, keys, rows);
        else PASTE(wgmma_ss_n, K_BM)(x, keys + along_keys(e, panel), rows + along_columns(e, BM), 1);
}
/* What this thread's keys see of each row. */
DEVICE void begin_rows(float x[BM / 2], const float2 *of_rows) {
#pragma unroll
    for (int i = 0; i < BM / 8; ++i) {
        const float2 y = of_rows[4 * i];
        x[4 * i] = x[4 * i + 2] = y.x;
        x[4 * i + 1] = x[4 * i + 3] = y.y;
    }
    PIN(x, BM / 2);
}
/* dV or dK += X^T rows: 64 keys x D, over BM. */
DEVICE void accumulate(float x[D / 2], const uint32_t left[BM / 4], uint64_t rows) {
#pragma unroll
    for (int e = 0; e < BM / 16; ++e)
        PASTE(wgmma_rs_n, K_D)(x, left + 4 * e, rows + along_rows(e), 1);
}
/* dQ = dS K: 64 x COLUMNS, over BN. */
DEVICE void dq_product(float x[COLUMNS / 2], uint64_t ds, uint64_t keys) {
#pragma unroll
    for (int e = 0; e < BN / 16; ++e) {
        const uint64_t left = ds + along_columns(e, BM), right = keys + along_rows(e);
        if (COLUMNS == 48 && e == 0) wgmma_st_new_n48(x, left, right);
        else if (COLUMNS == 48) wgmma_st_n48(x, left, right, 1);
        else if (e == 0) wgmma_st_new_n64(x, left, right);
        else wgmma_st_n64(x, left, right, 1);
    }
}

/* Of thread 0..127 of a consumer: the first of its two keys; where it stores its part of dS with stmatrix,
   whose matrices are (8 rows i) x (8 keys): lanes 0-7, 8-15 of keys 0-7, 8-15; then 8 rows on; and of dQ. */
DEVICE int first_key(const task *t, int consumer, uint32_t thread) {
    return t->j0 + consumer * 64 + (int)(thread / 32 * 16 + thread % 32 / 4);
}
DEVICE uint32_t ds_to(uint32_t shared, int consumer, uint32_t thread) {
    const uint32_t lane = thread % 32, chunk = thread / 32 * 2 + (lane >> 3 & 1);
    return shared + DS_AT + consumer * (BM * 128) + (8 * (lane >> 4) + (lane & 7)) * 128 +
           ((chunk ^ (lane & 7)) << 4);
}
DEVICE uint32_t dq_to(uint32_t shared, int consumer, uint32_t thread) {
    return shared + DQ_AT + consumer * (SLICE - REPEATED * 64) * 4 + thread * 16;
}

/* When the Q of step n is there. */
DEVICE void load_early(float2 *early, const task *t, int n, uint32_t shared, const unsigned char *memory,
                       uint32_t thread) {
#pragma unroll
    for (int i = 0; i < EARLY; ++i) FORGET(&early[4 * i].x, 2);
    if (n == t->steps) return;
    const place any = {0, 0};
    const step s = step_at(&any, t, n);
    mbarrier_wait(shared + q_full(s.stage), s.parity);
    const float2 *const lse2 = statistics(memory, LSE_AT + s.stage * BM * 4, (int)(thread % 4 * 2));
#pragma unroll
    for (int i = 0; i < EARLY; ++i) early[4 * i] = lse2[4 * i];
}

/* One task, this CTA's piece `number`. */
DEVICE void multiply(const fattni_sm90_args *p, const task *t, int number, uint32_t shared,
                     const unsigned char *memory, int consumer) {
    const fattni_cuda_args *const a = &p->a;
    const float unit = a->scale * LOG2E;
    const uint64_t k_keys = operand(shared + consumer * 8192, 0);
    const uint64_t v_keys = operand(shared + V_AT + consumer * 8192, 0);
    const uint32_t ds_rows = SPLIT_ROWS ? consumer * 8192 : 0;
    const uint32_t k_columns = SPLIT_ROWS ? 0 : consumer * (BN * 128);
    const uint64_t k_depth = operand(shared + k_columns, 0);
    float dk[D / 2], dv[D / 2], s[BM / 2], dp[BM / 2], dq[COLUMNS / 2];
    uint32_t pr[BM / 4], ds[BM / 4]; /* P and dS, rounded */
    float2 early[BM / 2] = {}; /* of lse2, every fourth as in shared memory; EARLY are loaded a step before */
#pragma unroll
    for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0.0f;

    if (t->steps) {
        mbarrier_wait(shared + K_FULL, (uint32_t)t->keys);
        mbarrier_wait(shared + V_FULL, (uint32_t)t->keys);
    }
    if (GENERAL && t->j0 + BN > t->s.Sk && t->steps)
        clear_tails(shared, shared + V_AT, BN, t->s.Sk - t->j0, CLEARED);
    if (EARLY) load_early(early, t, 0, shared, memory, threadIdx.x);
    place rows = first_place(t, a->group);
    for (int n = 0; n < t->steps; ++n, go_on(&rows, t)) {
        uint32_t thread = threadIdx.x % 128;
        asm volatile("" : "+r"(number), "+r"(thread)); /* what hangs on them is not kept in registers */
        const int key = first_key(t, consumer, thread), row0 = (int)(thread % 4 * 2);
        const step now = step_at(&rows, t, n);
        const uint32_t q = shared + Q_AT + now.stage * ROW_BYTES, d_o = shared + DO_AT + now.stage * ROW_BYTES;
        const float2 *const lse2 = statistics(memory, LSE_AT + now.stage * BM * 4, row0);
        const float2 *const delta = statistics(memory, DELTA_AT + now.stage * BM * 4, row0);
        mbarrier_wait(shared + q_full(now.stage), now.parity);
        if (GENERAL && now.i0 + BM > t->s.Sq) {
            mbarrier_wait(shared + do_full(now.stage), now.parity);
            clear_tails(q, d_o, BM, t->s.Sq - now.i0, CLEARED);
        }
        if (BEGINS) begin_rows(s, lse2);
        wgmma_fence();
        keys_by_rows(s, k_keys, K_PANEL, operand(q, 0), BEGINS);
        wgmma_commit();
        mbarrier_wait(shared + do_full(now.stage), now.parity);
        wgmma_fence();
        keys_by_rows(dp, v_keys, 64, operand(d_o, 0), 0);
        wgmma_commit();

        corner at = {t->b, now.h, now.i0 + row0, key, 0.0f};
        uint32_t keep[(BM + 63) / 64];
        if (GENERAL) {
            at.slope = slope_of(a, now.h);
            if (a->drop_T) keep_rows(keep, BM, a, &at);
        }
        wgmma_wait(1);
        PIN(s, BM / 2);
        const int edge = crosses_edge(&t->s, now.i0, t->j0);
        if (GENERAL) {
            general_probabilities(s, BM, lse2, a, &t->s, &at, edge);
        } else {
            if (edge) { /* row i sees keys up to i + hi */
                const int far = 1 << 20, first = CAUSAL ? key - t->s.hi - now.i0 - row0 : -far;
                mask(s, BM, key < a->Sk ? first : far, key + 8 < a->Sk ? first + 8 : far);
            }
            if (BEGINS) {
#pragma unroll
                for (int e = 0; e < BM / 2; ++e) s[e] = exp2_approx(s[e] * unit);
                round_pairs(pr, s, BM / 2);
            } else {
#pragma unroll
                for (int i = EARLY; i < BM / 8; ++i) early[4 * i] = lse2[4 * i];
                exponentials((float(*)[4])s, BM / 8, unit, early);
            }
            PIN(s, BM / 2);
            mbarrier_wait(shared + do_full(now.stage), now.parity); /* again: ptxas moves waits up to a branch */
        }
        wgmma_wait(0);
        PIN(dp, BM / 2);
        if (GENERAL) {
            general_gradients(pr, ds, s, dp, BM, lse2, delta, keep, a, &t->s, &at, edge);
        } else {
            if (!BEGINS) round_pairs(pr, s, BM / 2); /* no registers before */
            score_gradients(ds, s, dp, BM, delta);
        }
#pragma unroll
        for (int i = 0; i < BM / 16; ++i)
            stmatrix_x4_trans(ds_to(shared, consumer, thread) + now.stage * DS_BYTES + i * 2048, ds + 4 * i);

        /* dV goes out before the fence, so that the fence costs nothing. */
        wgmma_fence();
        accumulate(dv, pr, operand(d_o, BM * 128));
        wgmma_commit();
        async_proxy_fence();
        named_barrier_sync(DS_WRITTEN, 256);
        wgmma_fence();
        dq_product(dq, operand(shared + DS_AT + now.stage * DS_BYTES + ds_rows, 0), k_depth);
        wgmma_commit();
        wgmma_wait(1); /* dV */
        PIN_INTEGERS(pr, BM / 4);
        release(shared + do_empty(now.stage));
        wgmma_fence();
        accumulate(dk, ds, operand(q, BM * 128));
        wgmma_commit();
        if (EARLY) load_early(early, t, n + 1, shared, memory, thread);
        wgmma_wait(1); /* dQ */
        named_barrier_sync(DQ_EMPTY + consumer, 160);
        PIN(dq, COLUMNS / 2);
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; ++i)
            if (i >= REPEATED / 8 || consumer == 0)
                store_shared_4(dq_to(shared, consumer, thread) + i * 2048, dq + 4 * i);
        async_proxy_fence();
        named_barrier_arrive(DQ_FULL + consumer, 160);
        wgmma_wait(0); /* dK */
        PIN_INTEGERS(ds, BM / 4);
        release(shared + q_empty(now.stage));
    }
    PIN(dk, D / 2);
    PIN(dv, D / 2);
    const task done = read_task(a, piece_slot(shared, number));
    if (done.steps) release(shared + KEYS_EMPTY);
    uint32_t thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread));
    const int key = first_key(&done, consumer, thread);
    store_keys(&a->dv, &done, key, 0, D, dv, scale_of_dv(a), a->Dv, a->dv_f32, a->flags & FATTN_ACC_DV);
    store_keys(&a->dk, &done, key, 0, D, dk, a->dk_scale, a->D, a->dk_f32, a->flags & FATTN_ACC_DK);
}

/* ---- pieces of work, one after the other ---- */

/* The producer claims a piece when all loads of the last one are under way, and tells the others. */
DEVICE void produce(const fattni_sm90_args *p, uint32_t shared) {
    for (int n = 0, before = 0, keys = 0;; ++n) {
        piece x = {NOTHING, 0, 0};
        task t = {0};
        while (x.kind == NOTHING) {
            x = piece_of(p, atomicAdd(p->next_tile, 1));
            if (x.kind == MULTIPLY) t = task_of(p, &x);
            if (x.kind == MULTIPLY && !p->progress && t.j0 >= t.s.Sk) x.kind = NOTHING;
        }
        if (x.kind == MULTIPLY) prefetch_keys(p, &t);
        t.before = before, t.keys = keys;
        mbarrier_wait(shared + piece_empty(n & 1), (uint32_t)(n >> 1 & 1) ^ 1);
        write_piece(piece_slot(shared, n), &x, &t);
        mbarrier_arrive(shared + piece_full(n & 1));
        if (x.kind == END) return;
        if (x.kind != MULTIPLY) continue;
        load(p, &t, shared);
        before = (before + t.steps) & 3, keys ^= t.steps > 0;
    }
}

/* Warps 1 and 2 add, warp 3 ends turns. */
DEVICE void follow(const fattni_sm90_args *p, uint32_t shared, int warp) {
    for (int n = 0;; ++n) {
        const uint32_t slot = piece_slot(shared, n);
        mbarrier_wait(shared + piece_full(n & 1), (uint32_t)(n >> 1 & 1));
        const int kind = read_piece(slot).kind;
        const task t = read_task(&p->a, slot);
        __syncwarp();
        release(shared + piece_empty(n & 1));
        if (kind == END) return;
        if (kind != MULTIPLY) continue;
        if (warp < 3) add_dq(p, &t, shared, warp - 1);
        else if (is_leader()) end_turns(&p->a, &t, shared);
        __syncwarp();
    }
}

DEVICE void consume(const fattni_sm90_args *p, uint32_t shared, const unsigned char *memory, int consumer) {
    for (int n = 0;; ++n) {
        const uint32_t slot = piece_slot(shared, n);
        int thread = (int)threadIdx.x - 128; /* opaque: what depends on it is not kept meanwhile */
        asm volatile("" : "+r"(thread));
        mbarrier_wait(shared + piece_full(n & 1), (uint32_t)(n >> 1 & 1));
        const piece x = read_piece(slot);
        if (x.kind == END) return;
        if (x.kind == MULTIPLY) {
            const task t = read_task(&p->a, slot);
            multiply(p, &t, n, shared, memory, consumer);
        } else if (x.kind == PREPARE) {
            prepare(p, &x, thread, 256);
        } else {
            finish(p, &x, thread, 256);
        }
        __syncwarp();
        release(shared + piece_empty(n & 1));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
    K_NAME(const __grid_constant__ fattni_sm90_args p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int role = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0);
    const int warp = (int)threadIdx.x / 32;
    init_barriers(shared, 2);
    init_pieces(shared, p.a.turns != 0);
    __syncthreads();
    if (role == 0) {
        registers_lower(40);
        if (threadIdx.x == 0) produce(&p, shared);
        else if (warp == 1 || warp == 2 || (warp == 3 && p.a.turns)) follow(&p, shared, warp);
    } else {
        registers_raise(232);
        consume(&p, shared, memory, role - 1);
    }
}
#endif
