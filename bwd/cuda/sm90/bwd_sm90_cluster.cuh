/* Backward attention for Hopper, head_dim above 128: as bwd_sm90.cuh, with another division of labour. dK and dV of
   64 keys fill the registers of two warpgroups, and adding 64 x D floats of dQ for each 64 keys is more than L2 takes
   beside the products. So two CTAs, a cluster, have neighbouring keys and the same row blocks: they exchange dS^T, and
   each adds half of the columns of dQ for the keys of both, dS = [this CTA's | the other's], K likewise.

   For each row block: S^T = K Q^T, P = exp(S - L), dP^T = V dO^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += dS K.

   Threads     warpgroup 0 loads, and waits for and posts dQ semaphores. Two consumer warpgroups have S, P, dP, dS and
               half of the columns of dV and dK each (bwd_sm90_cluster_plain.cuh, bwd_sm90_cluster_general.cuh). The
               last warpgroup has dQ.
   Overlap     Products are issued about four at a time, so each warpgroup computes while others multiply.
   Shared      struct shared_memory. A stage of dS^T is full with this CTA's part and the one the other CTA has sent,
               and empty when the dQ warpgroups of both CTAs have read it.
   Means       Where the keys of a head have a mean m (bwd_key_mean.cu): dQ += dS K - (sum of dS) m.
   dQ order    FATTN_DETERMINISTIC: clusters wait for those with keys before theirs (bwd_dq_semaphore.cuh); each CTA
               adds one of two parts.
   Work        A cluster has one work item (bwd_sm90_scheduler.cuh).

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "bwd/cuda/bwd_args.h"
#include "core/device/sm90_tile.cuh"

enum {
    D = K_D,
    DV = K_DV,
    BM = K_BM,
    BN = K_BN,
    THREADS = 32 * K_WARPS,
    CTAS = 2,
    CAUSAL = K_VARIANT == FATTNI_VARIANT_CAUSAL,
    BANDS = K_VARIANT >= FATTNI_VARIANT_BANDED,
    PACKS = 0,
    DIVIDES = 0,
    GOES_BY_ROWS = 0,
    GENERAL = K_VARIANT >= FATTNI_VARIANT_GENERAL,
    CAPPED = K_VARIANT == FATTNI_VARIANT_CAPPED,
    BIASED = K_VARIANT == FATTNI_VARIANT_BIASED, /* and GENERAL, by its division of labour */
    /* Half of the columns are a unit of work, and begin with a panel of their own: of head_dim 192 a half has one and
       a half. A consumer has half of the columns of dK and dV, a CTA those of dQ. */
    HALF = D / 2,
    V_HALF = DV / 2,
    PANELS = 2 * ((HALF + 63) / 64), /* of Q and K */
    V_PANELS = 2 * ((V_HALF + 63) / 64),
    KEY_BYTES = BN * PANELS * 128,
    VALUE_BYTES = BN * V_PANELS * 128,
    ROW_BYTES = BM * PANELS * 128,
    D_O_BYTES = BM * V_PANELS * 128,
    TILE_BYTES = BM * BN * 2,
    DO_STAGES = D == 256 ? 1 : 2,                       /* as many as there is memory for */
    P_STAGES = BIASED ? 1 : 2,                          /* the same */
    SLICE = BM * HALF,                                  /* floats of a row block's accumulator that a CTA adds */
    DQ_COLUMNS = GENERAL && HALF % 64 == 0 ? 64 : HALF, /* at a time: what the dQ warpgroup has registers for */
    ROW_STAGES = 3,                                     /* of 128 threads of a work item of rows */
    DQ_PAUSE = GENERAL ? 0 : 90,                        /* cycles between two reductions of a warp */
    DQ_PAUSE_WITH_MEANS = GENERAL ? 0 : 64,             /* less, since sums take time */
    DQ_REGISTERS = GENERAL && D == 256 ? 72 : 104,
    CONSUMER_REGISTERS = GENERAL && D == 256 ? 208 : 192
};
static_assert(BN == 64 && BM == 64 && K_WARPS == 16, "the division of labour");
static_assert(FATTNI_SEARCH_WARPS == CTAS * K_WARPS, "warps of a cluster");
static_assert((D == 256 && DV == 256) || (D == 192 && DV == 128), "columns of a product");

typedef struct shared_memory {
    half_type k[BN * PANELS * 64], v[BN * V_PANELS * 64];
    half_type other_k[BN * PANELS * 32]; /* of the other CTA: the columns of dQ that this CTA has */
    half_type q[2][BM * PANELS * 64], d_o[DO_STAGES][BM * V_PANELS * 64];
    half_type p[P_STAGES][BN * BM]; /* P^T; GENERAL: stages, else P rounded and what was rounded off */
    half_type bias[BIASED ? BM * BN : 0];
    half_type ds[2][BN * BM], other_ds[2][BN * BM]; /* dS^T, and the other CTA's */
    float lse2[2][BM], delta[DO_STAGES][BM];
    float key_mean[HALF]; /* where it is used; of this CTA's columns of dQ */
    uint64_t k_full, v_full, q_full[2], q_empty[2], do_full[2],
        do_empty[2]; /* of one stage of dO the second is unused */
    uint64_t bias_full[BIASED], bias_empty[BIASED];
    uint64_t ds_full[2], ds_empty[2], keys_empty, dq_added, dq_added_seen, dq_granted, mean_full,
        rows_full[THREADS / 128 * ROW_STAGES]; /* keys_empty is unused */
    int32_t steps, has_mean, reserved[2];      /* steps: of the task; the second consumer has no register for them */
} shared_memory;
enum {
    SHARED_BYTES = sizeof(shared_memory),
    TO_OTHER_DS = offsetof(shared_memory, other_ds) - offsetof(shared_memory, ds)
};
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");

/* Named barriers; 1 to 4 are the consumers'; ROWS_READ one per 128 threads. */
enum { DQ_READY = 5, ROWS_DONE = 6, ROWS_READ = 7 };

#include "bwd/cuda/sm90/bwd_sm90_bias.cuh"
#include "bwd/cuda/sm90/bwd_sm90_scheduler.cuh"
/* A work item of rows has all of the CTA's shared memory. */
enum { ROW_STAGE_BYTES = 16 * 1024, FIRST_ROW_STAGES = ROW_STAGES };
DEVICE uint32_t row_stage_at(int group, int n) { return (uint32_t)(group * ROW_STAGES + n) * ROW_STAGE_BYTES; }
DEVICE void await_row_stages(int) {}
#include "bwd/cuda/sm90/bwd_sm90_rows.cuh"
#include "core/ptx/clock.h"
#include "core/ptx/cluster.h"

static_assert(offsetof(shared_memory, v) % 1024 == 0 && offsetof(shared_memory, other_k) % 1024 == 0 &&
                  offsetof(shared_memory, q) % 1024 == 0 && offsetof(shared_memory, d_o) % 1024 == 0 &&
                  offsetof(shared_memory, p) % 1024 == 0 && offsetof(shared_memory, bias) % 1024 == 0 &&
                  offsetof(shared_memory, ds) % 1024 == 0 && offsetof(shared_memory, other_ds) % 1024 == 0 &&
                  ROW_BYTES % 1024 == 0 && TILE_BYTES % 1024 == 0,
              "swizzled tiles");

/* Stages of tiles are addressed by MEMBER_ADDRESS + stage * bytes: ELEMENT_ADDRESS adds in an order that ptxas makes
   other code of. */
DEVICE int cta(void) { return (int)blockIdx.x % CTAS; }
DEVICE uint32_t other_cta(void) { return (uint32_t)cta() ^ 1; }

/* Where dO and delta of step n are, and the parity of their mbarriers. */
DEVICE int do_stage(int n) { return DO_STAGES > 1 ? n & 1 : 0; }
DEVICE uint32_t do_parity(int n) { return (uint32_t)(DO_STAGES > 1 ? n >> 1 & 1 : n & 1); }

/* init_barriers, the mbarriers of dS and dQ, and a cluster barrier: after it the other CTA may arrive. 4 warps of each
   CTA release a stage of dS. */
DEVICE void init_cluster_barriers(uint32_t shared) {
    init_barriers(shared, 4, 1);
    if (BIASED) init_bias_barriers(shared);
    if (threadIdx.x == 0) {
        for (int n = 0; n < 2; ++n) {
            mbarrier_init(ELEMENT_ADDRESS(shared, ds_full, n), 1);
            mbarrier_init(ELEMENT_ADDRESS(shared, ds_empty, n), 8);
        }
        mbarrier_init(MEMBER_ADDRESS(shared, dq_granted), 1);
        mbarrier_init(MEMBER_ADDRESS(shared, mean_full), 1);
        mbarrier_init_fence();
    }
    cluster_sync();
}

/* ---- the producer ---- */

/* Q, dO and what belongs to them, of step n. */
DEVICE void load_rows(const fattni_bwd_sm90_args *p, const task *t, const row_cursor *at, int n, uint32_t shared) {
    const step s = step_at(at, t, n);
    const int64_t row = padded_row(&p->bwd, t, &s);
    load_q(p, t, &s, shared);
    load_lse2(p, &s, row, shared);
    if (n == 0) {
        mbarrier_expect(MEMBER_ADDRESS(shared, v_full), VALUE_BYTES);
        load_halves(MEMBER_ADDRESS(shared, v), &p->v, MEMBER_ADDRESS(shared, v_full), V_PANELS, V_HALF, BN,
                    t->s.k0 + t->j0, t->hk * p->v_step.head, t->s.batch * p->v_step.batch);
    }
    load_d_o(p, t, &s, do_stage(n), do_parity(n), shared);
    load_delta(p, row, do_stage(n), shared);
    if (BIASED) load_bias(p, t, &s, shared); /* it waits longest */
}
/* All that a task reads. One thread. */
DEVICE void load(const fattni_bwd_sm90_args *p, const task *t, uint32_t shared) {
    const int key = t->s.k0 + t->j0, other_key = t->s.k0 + (t->j0 ^ BN);
    const int k_head = t->hk * p->k_step.head, k_batch = t->s.batch * p->k_step.batch;
    mbarrier_expect(MEMBER_ADDRESS(shared, k_full), KEY_BYTES + KEY_BYTES / 2);
    load_halves(MEMBER_ADDRESS(shared, k), &p->k, MEMBER_ADDRESS(shared, k_full), PANELS, HALF, BN, key, k_head,
                k_batch);
    for (int x = 0; x < PANELS / 2; ++x)
        tma_load(MEMBER_ADDRESS(shared, other_k) + x * BN * 128, &p->k, MEMBER_ADDRESS(shared, k_full),
                 HALF * cta() + 64 * x, other_key, k_head, k_batch);
    const int seen = wait_preprocessed(p, t);
    if (!t->steps) return;
    row_cursor at = first_rows(t);
    load_rows(p, t, &at, 0, shared);
    load_mean(p, t, seen, cta() * HALF, HALF, 0, shared);
    for (int n = 1; n < t->steps; ++n) {
        next_rows(&at, t, p);
        load_rows(p, t, &at, n, shared);
    }
}

/* One thread of warpgroup 0: waits for the semaphores, so that the dQ warpgroup need not. */
DEVICE void wait_dq_semaphores(const fattni_bwd_sm90_args *p, const task *t, uint32_t shared) {
    const fattni_bwd_args *const bwd = &p->bwd;
    const fattni_attention_args *const a = &p->bwd.a;
    if (p->progress) wait_counter(p, t->head_group, PREPROCESSED, p->row_items * CTAS);
    row_cursor at = first_rows(t);
    for (int n = 0; n < t->steps; ++n, next_rows(&at, t, p)) {
        const step s = step_at(&at, t, n);
        wait_dq_semaphore_of_step(dq_semaphore_of_step(bwd, t, &s), t, &s);
        /* The last grant has been used. */
        mbarrier_wait(MEMBER_ADDRESS(shared, dq_added_seen), (uint32_t)s.stage ^ 1);
        mbarrier_arrive(MEMBER_ADDRESS(shared, dq_granted));
    }
}

/* ---- the dQ warpgroup ---- */

/* 64 rows x DQ_COLUMNS, over the keys of both CTAs; shared memory holds dS^T. */
DEVICE void dq_product(float x[DQ_COLUMNS / 2], uint32_t ds, uint32_t keys, uint32_t other_keys) {
#pragma unroll
    for (int part = 0; part < 2; ++part) {
        const uint64_t left = operand_descriptor(ds + (part ? TO_OTHER_DS : 0), 0),
                       right = operand_descriptor(part ? other_keys : keys, BN * 128);
#pragma unroll
        for (int e = 0; e < BN / 16; ++e) {
            const uint64_t a = left + advance_rows(e), b = right + advance_rows(e);
            if (DQ_COLUMNS == 128 && part + e == 0)
                wgmma_tt_new_n128(x, a, b);
            else if (DQ_COLUMNS == 128)
                wgmma_tt_n128(x, a, b, 1);
            else if (DQ_COLUMNS == 96 && part + e == 0)
                wgmma_tt_new_n96(x, a, b);
            else if (DQ_COLUMNS == 96)
                wgmma_tt_n96(x, a, b, 1);
            else if (part + e == 0)
                wgmma_tt_new_n64(x, a, b);
            else
                wgmma_tt_n64(x, a, b, 1);
        }
    }
}

/* What dS sums to over the keys of both CTAs, of the two rows of dQ that this thread has (sums[0] and sums[2]). */
DEVICE void sum_rows(float sums[4], uint32_t ds) {
    uint32_t thread = threadIdx.x;
    asm volatile("" : "+r"(thread)); /* hides it: there are no registers to keep what depends on it */
    const uint32_t lane = thread % 32, chunk = thread / 32 % 4 * 2 + lane / 8 % 2,
                   from = ds + (lane % 8 + lane / 16 * 8) * 128 + swizzled_chunk((int)chunk, (int)lane % 8);
    float other[4] = {};
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[e] = 0.0f;
#pragma unroll
    for (int e = 0; e < BN / 16; ++e) {
        uint32_t x[4], y[4];
        ldmatrix_x4_trans(x, from + e * 2048);
        ldmatrix_x4_trans(y, from + TO_OTHER_DS + e * 2048);
        mma(sums, x, ONES, ONES);
        mma(other, y, ONES, ONES);
    }
    sums[0] += other[0], sums[2] += other[2];
}
/* dQ less these sums times the mean of the keys, `mean` of the columns. */
DEVICE void subtract_means(float dq[DQ_COLUMNS / 2], const float sums[4], const float *mean) {
#pragma unroll
    for (int i = 0; i < DQ_COLUMNS / 8; ++i) {
        subtract_mean(dq + 4 * i, sums, (const float2 *)(mean + 8 * i + threadIdx.x % 4 * 2));
        PIN(dq + 4 * i, 4); /* one after the other: few registers */
    }
}

/* Reductions wait for L2, and other warps' accesses to shared memory queue up behind them: hence a warpgroup that does
   nothing else, and pauses. */
DEVICE void add_dq(const fattni_bwd_sm90_args *p, const task *t, uint32_t shared, const shared_memory *memory) {
    const fattni_bwd_args *const bwd = &p->bwd;
    const fattni_attention_args *const a = &p->bwd.a;
    const int leader = threadIdx.x % 128 == 0;
    if (p->progress) {
        if (leader) wait_counter(p, t->head_group, PREPROCESSED, p->row_items * CTAS);
        __syncwarp();
        named_barrier_sync(DQ_READY, 128);
    }
    mbarrier_wait(MEMBER_ADDRESS(shared, k_full), 0);
    if (t->steps) mbarrier_wait(MEMBER_ADDRESS(shared, mean_full), 0);
    row_cursor at = first_rows(t);
    for (int n = 0; n < t->steps; ++n, next_rows(&at, t, p)) {
        const step s = step_at(&at, t, n);
        const uint32_t ds = MEMBER_ADDRESS(shared, ds) + s.stage * TILE_BYTES,
                       empty = ELEMENT_ADDRESS(shared, ds_empty, s.stage);
        uint32_t keys = MEMBER_ADDRESS(shared, k) + cta() * (KEY_BYTES / 2),
                 other_keys = MEMBER_ADDRESS(shared, other_k);
        float *to = accumulator_at(bwd, t, &s) + cta() * SLICE + (threadIdx.x & 127) * 4;
        float sums[4];
        mbarrier_wait(ELEMENT_ADDRESS(shared, ds_full, s.stage), s.parity);
        const int means = load_shared_word(MEMBER_ADDRESS(shared, has_mean)),
                  pause = means ? DQ_PAUSE_WITH_MEANS : DQ_PAUSE;
        if (means) sum_rows(sums, ds);
#pragma unroll 1
        for (int columns = DQ_COLUMNS; columns <= HALF; columns += DQ_COLUMNS) {
            float dq[DQ_COLUMNS / 2];
            wgmma_fence();
            dq_product(dq, ds, keys, other_keys);
            wgmma_commit();
            if (columns == DQ_COLUMNS && bwd->dq_semaphore)
                mbarrier_wait(MEMBER_ADDRESS(shared, dq_granted), (uint32_t)(n & 1));
            wgmma_wait(0);
            PIN(dq, DQ_COLUMNS / 2);
            if (means) subtract_means(dq, sums, memory->key_mean + columns - DQ_COLUMNS);
            if (columns == HALF) {
                arrive_once_per_warp(empty);
                if (threadIdx.x % 32 == 0) cluster_arrive(cluster_address(empty, other_cta()));
            }
            const uint32_t begin = clock_now(), offset = threadIdx.x / 32 % 4 * (pause / 4);
#pragma unroll
            for (int i = 0; i < DQ_COLUMNS / 8; ++i) {
                while (DQ_PAUSE && clock_now() - begin < offset + i * pause) {}
                reduce_add_4(to + i * 512, dq + 4 * i);
            }
            to += BM * DQ_COLUMNS;
            keys += BN * DQ_COLUMNS * 2;
            other_keys += BN * DQ_COLUMNS * 2;
        }
        if (bwd->dq_semaphore) {
            __threadfence_block(); /* reductions before the arrival */
            __syncwarp();
            if (is_leader()) report_dq_added(&s, shared);
        }
    }
    if (p->progress) {
        named_barrier_sync(DQ_READY, 128);
        if (leader) count_dq_addition(p, t->head_group);
    }
}

/* ---- consumers ---- */

/* One thread, when the consumers have stored dS^T: it is full for this CTA's dQ, and copied to the other CTA. */
DEVICE void send_ds(uint32_t shared, int stage) {
    const uint32_t ds = MEMBER_ADDRESS(shared, ds) + stage * TILE_BYTES, full = ELEMENT_ADDRESS(shared, ds_full, stage);
    mbarrier_expect(full, TILE_BYTES); /* which the other CTA sends */
    cluster_copy(cluster_address(ds + TO_OTHER_DS, other_cta()), ds, TILE_BYTES, cluster_address(full, other_cta()));
}

/* This thread's first key of dK and dV; the second is 8 keys on. */
DEVICE int first_key(const task *t) { return t->j0 + (int)threadIdx.x / 32 % 4 * 16 + (int)threadIdx.x % 32 / 4; }

/* 16 `step` columns further in a K-major operand of `rows` rows, whose second half begins with column `half`. */
DEVICE uint32_t advance_halves(int step, int half, int panels, int rows) {
    return step / (half / 16) * (panels * (rows * 4)) + advance_columns(step % (half / 16), rows);
}
/* dK or dV += X^T rows: 64 keys x half of the columns, over BM. */
DEVICE void accumulate(float *x, int columns, uint64_t left, uint64_t rows) {
#pragma unroll
    for (int e = 0; e < BM / 16; ++e) {
        const uint64_t a = left + advance_columns(e, BN), b = rows + advance_rows(e);
        if (columns == 128)
            wgmma_st_n128(x, a, b, 1);
        else if (columns == 96)
            wgmma_st_n96(x, a, b, 1);
        else
            wgmma_st_n64(x, a, b, 1);
    }
}

/* main_loop: adds a task to dK and dV, nothing where it has no steps. */
#if K_VARIANT >= FATTNI_VARIANT_GENERAL
#include "bwd/cuda/sm90/bwd_sm90_cluster_general.cuh"
#else
#include "bwd/cuda/sm90/bwd_sm90_cluster_plain.cuh"
#endif

DEVICE void consume(const fattni_bwd_sm90_args *p, const task *t, uint32_t shared, const shared_memory *memory,
                    int consumer) {
    float dk[HALF / 2], dv[V_HALF / 2];
#pragma unroll
    for (int i = 0; i < HALF / 2; ++i) dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < V_HALF / 2; ++i) dv[i] = 0.0f;
    main_loop(p, t, shared, memory, consumer, dk, dv);
    store_dv(&p->bwd, t, first_key(t), consumer * V_HALF, V_HALF, dv);
    store_dk(&p->bwd, t, first_key(t), consumer * HALF, HALF, dk);
}

extern "C" __global__ void __cluster_dims__(CTAS, 1, 1) __launch_bounds__(THREADS, 1)
    K_NAME(const __grid_constant__ fattni_bwd_sm90_args p) {
    extern __shared__ __align__(1024) unsigned char SHARED_MEMORY[];
    const uint32_t shared = shared_address(SHARED_MEMORY);
    const int role = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0);
    const work_item x = work_item_of(&p, (int)blockIdx.x / CTAS);
    grid_dependency_wait();
    if (SEARCHES && x.kind == SEARCH) {
        search(&p, (x.number * CTAS + cta()) * K_WARPS + from_leader((int)threadIdx.x / 32));
        return;
    }
    if (x.kind == PREPROCESS || x.kind == POSTPROCESS) {
        for (int n = 0; n < THREADS / 128 * ROW_STAGES && threadIdx.x == 0; ++n)
            mbarrier_init(ELEMENT_ADDRESS(shared, rows_full, n), 1);
        mbarrier_init_fence();
        __syncthreads();
        if (x.kind == PREPROCESS)
            preprocess(&p, &x, shared, 1, (int)threadIdx.x, THREADS);
        else
            postprocess(&p, &x, shared, 1, (int)threadIdx.x, THREADS);
        return;
    }
    if (x.kind != MAINLOOP) return;
    int part;
    const position at = position_of_task(&p, x.number, &part);
    const task t = task_at(&p, &x, &at, part);
    if (GENERAL && !p.progress && (t.j0 & ~BN) >= t.s.Sk) return;
    if (!GENERAL && threadIdx.x == 0) ((volatile shared_memory *)SHARED_MEMORY)->steps = t.steps;
    init_cluster_barriers(shared);
    if (role == 0) {
        registers_lower(24);
        if (threadIdx.x == 0)
            load(&p, &t, shared);
        else if (threadIdx.x == 32 && p.bwd.dq_semaphore)
            wait_dq_semaphores(&p, &t, shared);
        else if (threadIdx.x == 64 && p.bwd.dq_semaphore)
            post_dq_semaphores(&p, &t, shared);
    } else if (role == 3) {
        registers_lower((int)DQ_REGISTERS);
        add_dq(&p, &t, shared, (const shared_memory *)SHARED_MEMORY);
    } else {
        registers_raise((int)CONSUMER_REGISTERS);
        consume(&p, &t, shared, (const shared_memory *)SHARED_MEMORY, role - 1);
    }
    cluster_sync(); /* neither exits while the other sends to it or reads from it */
}

DESCRIBE_KERNEL_THAT_WAITS(fattni_bwd_sm90_args, SHARED_BYTES, CTAS);
