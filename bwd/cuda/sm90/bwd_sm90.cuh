/* Backward attention for Hopper, head_dim up to 128 (beyond: bwd_sm90_cluster.cuh): TMA, wgmma. One persistent CTA per
   SM claims work items: key blocks of BN keys, and the rows of pre- and postprocess (bwd_sm90_scheduler.cuh).

   For each row block: S^T = K Q^T, P = exp(S - L), dP^T = V dO^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += dS K.

   Tensors     q, d_o [b,h,i,d], k, v, dk, dv [b,g,j,d]; lse2 and delta (bwd_workspace.cuh) of padded rows. q, k,
               v, d_o with strides that tensor maps can take.
   Ownership   dK, dV of BN keys stay in registers over all row blocks of all query heads of the group;
               dQ is added to an fp32 accumulator in L2 by bulk reductions.
   Threads     warpgroup 0: warp 0 claims work items and loads, warps 1 and 2 add the dQ of consumer 0 and 1, warp 3
               finds means of keys and posts the dQ semaphores. Two consumer warpgroups own 64 keys each: S^T and dP^T
               are computed transposed, so that P^T and dS^T are the register operands of dV and dK. dQ: a consumer has
               half of 128 rows, or all of 64 rows and half of the columns.
   Overlap     Exponentials overlap with dP. While wgmma reads both operands from shared memory a load from there
               waits, for 64x64 until the products are over. So where a row block has 64 rows S starts with
               -L / scale, and of 128 rows half of lse2 is loaded before, beside dK (there are no registers for more).
   Shared      struct shared_memory. Stages continue from task to task: the next K, V, Q and dO are loaded while dK
               and dV are stored.
   Rounding    P and dS to the input dtype, accumulation fp32; scale is applied to dK here, to dQ in postprocess.
   Variants    BANDED has windows, lengths and sink, GENERAL also ALiBi, bias and dropout, CAPPED also a softcap: these
               two have other steps from S to dS (bwd_sm90_general.cuh). FULL and CAUSAL have none of them. BIASED is
               BANDED with a bias, of which a step's tile is loaded beside Q and dO; its gradient: bwd_sm90_dbias.cuh.
   Bias        in natural units: S becomes scale S + bias, and lse2 is in units of log2 (bwd_sm90_bias.cuh).
   Centring    Where the keys of a head have a mean (bwd_key_mean.cu) K in shared memory is less it, and lse2 is less
               its part of S.
   Short       SHORT is CAUSAL for few keys, with heads in place of work items (bwd_sm90_short.cuh).
   dQ order    FATTN_DETERMINISTIC: the adding warps wait for the key blocks before theirs (bwd_dq_semaphore.cuh).

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "bwd/cuda/bwd_short.h"
#include "core/device/sm90_tile.cuh"

enum {
    D = K_D,
    BM = K_BM,
    BN = K_BN,
    THREADS = 32 * K_WARPS,
    CTAS = 1,
    SHORT = K_VARIANT == FATTNI_VARIANT_SHORT,
    CAUSAL = K_VARIANT == FATTNI_VARIANT_CAUSAL || SHORT,
    BANDS = K_VARIANT >= FATTNI_VARIANT_BANDED,
    CAPPED = K_VARIANT == FATTNI_VARIANT_CAPPED,
    GENERAL = K_VARIANT == FATTNI_VARIANT_GENERAL || CAPPED,
    BIASED = K_VARIANT == FATTNI_VARIANT_BIASED,
    PANELS = (D + 63) / 64,
    V_PANELS = PANELS,
    HALF = 32 * PANELS,
    V_HALF = HALF,
    KEY_BYTES = BN * PANELS * 128,
    ROW_BYTES = BM * PANELS * 128,
    D_O_BYTES = ROW_BYTES,
    DS_BYTES = BN * BM * 2,
    DS_STAGES = SHORT ? 1 : 2,
    DQ_BLOCKS = SHORT ? FATTNI_SHORT_KEYS / BM - 1 : 1, /* row blocks of dQ in shared memory */
    BEGINS_WITH_L = FATTNI_BEGINS_WITH_L(!GENERAL && !BIASED, D, BM),
    LSE_AHEAD = GENERAL || BIASED || BEGINS_WITH_L ? 0 : 3, /* of lse2: tiles of 8 rows that are loaded a step before */
    /* dQ: a consumer has half of 128 rows, or of 64 rows half of the columns. The halves of head_dim 80 are 48 columns
       and overlap in REPEATED; K's second panel starts with the second half. */
    SPLIT_ROWS = BM > 64,
    COLUMNS = D > 96 || SPLIT_ROWS ? 64 : 48,
    REPEATED = SPLIT_ROWS ? 0 : 2 * COLUMNS - D,
    PACKS = BANDS && !GENERAL && !BIASED, /* there is no register for it beside features */
    SLICE = 64 * COLUMNS,                 /* floats */
    K_PANEL = D % 64 ? D - COLUMNS : 64   /* columns from panel to panel of K */
};
static_assert(BN == 128 && K_WARPS == 12, "two consumers of 64 keys");
static_assert(D == 64 ? BM == 128 : D % 16 == 0 && BM == 64, "two slices of dQ");

/* A work item and its task, as the producer passes them to the other warps. */
typedef struct work_slot {
    uint4 steps; /* j0, from, last, (steps_before, kv_phase, steps) */
    uint4 item;  /* kind, head_group, number; accumulator_shift, or PREPROCESS: round */
    uint4 head;  /* b, hk */
} work_slot;
typedef struct shared_memory {
    half_type k[BN * PANELS * 64], v[BN * PANELS * 64];
    half_type q[2][BM * PANELS * 64], d_o[2][BM * PANELS * 64];
    half_type ds[DS_STAGES][BN * BM];
    half_type bias[BIASED ? BM * BN : 0];
    float dq[DQ_BLOCKS * BM * D];
    float lse2[2][BM], delta[2][BM];
    float key_mean[PANELS * 64]; /* where K is centred */
    uint64_t k_full, v_full, q_full[2], q_empty[2], do_full[2], do_empty[2];
    uint64_t work_full[2], work_empty[2], keys_empty, dq_added, dq_added_seen;
    uint64_t bias_full[BIASED], bias_empty[BIASED];
    uint64_t ds_empty[SHORT], rows_full[2 * SHORT], mean_seen[SHORT];
    work_slot work[2];
    mean_search search;
    int32_t centred, reserved[3]; /* centred: the task's K is less its mean */
    uint4 sequences[2];           /* BANDS: the tasks' Sq, Sk, q0, k0 */
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");

/* Named barriers; DQ_FULL and DQ_EMPTY one per consumer; the last two of SHORT. */
enum { DS_WRITTEN = 1, DQ_FULL = 2, DQ_EMPTY = 4, CLEARED = 6, ROWS_DONE = 7, MEAN_FOUND = 8, MEAN_PARTS = 9 };

#include "bwd/cuda/sm90/bwd_sm90_general.cuh"
#include "bwd/cuda/sm90/bwd_sm90_bias.cuh"
#include "bwd/cuda/sm90/bwd_sm90_scheduler.cuh"

static_assert(SHORT || SAMPLE_BYTES <= 2 * DS_BYTES, "a sample of keys takes the place of dS");
static_assert(offsetof(shared_memory, v) % 1024 == 0 && offsetof(shared_memory, q) % 1024 == 0 &&
                  offsetof(shared_memory, d_o) % 1024 == 0 && offsetof(shared_memory, ds) % 1024 == 0 &&
                  offsetof(shared_memory, bias) % 1024 == 0 && ROW_BYTES % 1024 == 0 && DS_BYTES % 1024 == 0,
              "swizzled tiles");

/* ---- work items, from the producer to the other warps ---- */

DEVICE void init_work_slots(uint32_t shared, int deterministic) {
    if (threadIdx.x > 0) return;
    for (int n = 0; n < 2; ++n) {
        mbarrier_init(ELEMENT_ADDRESS(shared, work_full, n), 1);
        /* warps: 8 of consumers, 2 that add dQ, one that posts semaphores */
        mbarrier_init(ELEMENT_ADDRESS(shared, work_empty, n), 10 + deterministic);
    }
    mbarrier_init_fence();
    init_search(shared, 8);
}
DEVICE uint32_t slot_at(uint32_t shared, int n) { return ELEMENT_ADDRESS(shared, work, n & 1); }
DEVICE sequence read_sequence(const fattni_attention_args *a, uint32_t from, int b) {
    uint32_t x[4];
    load_shared_4(x, from);
    sequence s = {(int)x[0], (int)x[1], (int)x[2], (int)x[3], a->cu_seqlens_q.p ? 0 : b};
    find_band(a, &s);
    return s;
}
DEVICE void write_work(uint32_t shared, int n, const work_item *x, const task *t) {
    const uint32_t slot = slot_at(shared, n);
    const uint32_t steps[4] = {(uint32_t)t->j0, (uint32_t)t->from, (uint32_t)t->last,
                               (uint32_t)(t->steps_before | t->kv_phase << 2 | t->steps << 3)},
                   item[4] = {(uint32_t)x->kind, (uint32_t)x->head_group, (uint32_t)x->number,
                              (uint32_t)t->accumulator_shift},
                   head[4] = {(uint32_t)t->b, (uint32_t)t->hk, 0, 0},
                   lengths[4] = {(uint32_t)t->s.Sq, (uint32_t)t->s.Sk, (uint32_t)t->s.q0, (uint32_t)t->s.k0};
    store_shared_words(slot + offsetof(work_slot, steps), steps);
    store_shared_words(slot + offsetof(work_slot, item), item);
    store_shared_words(slot + offsetof(work_slot, head), head);
    if (BANDS) store_shared_words(ELEMENT_ADDRESS(shared, sequences, n & 1), lengths);
}
DEVICE work_item read_work(uint32_t slot) {
    uint32_t item[4];
    load_shared_4(item, slot + offsetof(work_slot, item));
    const work_item x = {(int)item[0], (int)item[1], (int)item[2]};
    return x;
}
DEVICE task read_task(const fattni_attention_args *a, uint32_t shared, int number) {
    const uint32_t slot = slot_at(shared, number);
    uint32_t steps[4], item[4], head[4];
    load_shared_4(steps, slot + offsetof(work_slot, steps));
    task t = {0, 0, (int)steps[0], (int)steps[1], (int)steps[2], (int)(steps[3] >> 3)};
    t.steps_before = steps[3] & 3, t.kv_phase = steps[3] >> 2 & 1;
    t.s = whole_sequence(a, 0, CAUSAL);
    load_shared_4(item, slot + offsetof(work_slot, item));
    load_shared_4(head, slot + offsetof(work_slot, head));
    t.head_group = item[1], t.accumulator_shift = item[3];
    t.b = t.s.batch = head[0], t.hk = head[1];
    if (BANDS) t.s = read_sequence(a, ELEMENT_ADDRESS(shared, sequences, number & 1), t.b);
    return t;
}

/* ---- producer and dQ warps ---- */

/* K and V to L2, while those of the last task are still in use. */
DEVICE void prefetch_keys(const fattni_bwd_sm90_args *p, const task *t) {
    const int key = t->s.k0 + t->j0;
    for (int x = 0; x < PANELS; ++x) {
        tma_prefetch(&p->k, K_PANEL * x, key, t->hk * p->k_step.head, t->s.batch * p->k_step.batch);
        tma_prefetch(&p->v, 64 * x, key, t->hk * p->v_step.head, t->s.batch * p->v_step.batch);
    }
}
/* K and V, once those of the last task are released. */
DEVICE void load_keys(const fattni_bwd_sm90_args *p, const task *t, int centred, uint32_t shared) {
    const int key = t->s.k0 + t->j0, mean_bytes = centred ? PANELS * 256 : 0;
    mbarrier_wait(MEMBER_ADDRESS(shared, keys_empty), (uint32_t)t->kv_phase ^ 1);
    store_shared_word(MEMBER_ADDRESS(shared, centred), (uint32_t)centred);
    mbarrier_expect(MEMBER_ADDRESS(shared, k_full), KEY_BYTES + mean_bytes);
    if (centred)
        bulk_load(MEMBER_ADDRESS(shared, key_mean), key_mean_of(&p->bwd, t->b, t->hk), mean_bytes,
                  MEMBER_ADDRESS(shared, k_full));
    for (int x = 0; x < PANELS; ++x)
        tma_load(MEMBER_ADDRESS(shared, k) + x * BN * 128, &p->k, MEMBER_ADDRESS(shared, k_full), K_PANEL * x, key,
                 t->hk * p->k_step.head, t->s.batch * p->k_step.batch);
    mbarrier_expect(MEMBER_ADDRESS(shared, v_full), KEY_BYTES);
    load_panels(MEMBER_ADDRESS(shared, v), &p->v, MEMBER_ADDRESS(shared, v_full), PANELS, BN, key,
                t->hk * p->v_step.head, t->s.batch * p->v_step.batch);
}

/* All that a task reads. One thread. */
DEVICE void load(const fattni_bwd_sm90_args *p, const task *t, uint32_t shared) {
    const int centred = wait_preprocessed(p, t);
    row_cursor at = first_rows(t, p->bwd.a.group);
    for (int n = 0; n < t->steps; ++n, next_rows(&at, t, &p->bwd.a)) {
        const step s = step_at(&at, t, n);
        const int64_t row = padded_row(&p->bwd, t, &s);
        load_q(p, t, &s, row, shared);
        if (n == 0) load_keys(p, t, centred, shared);
        load_d_o(p, t, &s, row, s.stage, s.parity, shared);
        if (BIASED) load_bias(p, t, &s, shared); /* last: it waits longest */
    }
}

/* Adds a consumer's slices of dQ to the accumulator. One warp. */
DEVICE void add_dq(const fattni_bwd_sm90_args *p, const task *t, uint32_t shared, int consumer) {
    const fattni_bwd_args *const bwd = &p->bwd;
    const fattni_attention_args *const a = &p->bwd.a;
    const int leader = is_leader();
    if (leader && p->progress) wait_counter(p, t->head_group, PREPROCESSED, p->row_items);
    __syncwarp();
    if (t->steps) named_barrier_arrive(DQ_EMPTY + consumer, 160);
    row_cursor at = first_rows(t, a->group);
    for (int n = 0; n < t->steps; ++n, next_rows(&at, t, a)) {
        const step s = step_at(&at, t, n);
        asm volatile("" : "+r"(consumer)); /* hides it: addresses are recomputed, 40 registers do not hold them */
        if (leader && bwd->dq_semaphore) wait_dq_semaphore_of_step(dq_semaphore_of_step(bwd, t, &s), t, &s);
        __syncwarp();
        named_barrier_sync(DQ_FULL + consumer, 160);
        if (leader) {
            bulk_reduce_add(accumulator_at(bwd, t, &s) + consumer * SLICE,
                            MEMBER_ADDRESS(shared, dq) + consumer * SLICE * 4, SLICE * 4 - consumer * REPEATED * 256);
            bulk_commit();
            bulk_wait_read();
        }
        __syncwarp();
        if (n + 1 < t->steps) named_barrier_arrive(DQ_EMPTY + consumer, 160);
        if (leader && bwd->dq_semaphore) {
            bulk_wait();
            report_dq_added(&s, shared);
        }
    }
    if (!leader) return;
    bulk_wait();
    if (p->progress) count_dq_addition(p, t->head_group);
}

/* ---- consumers ---- */

/* advance_columns where the second panel starts at column `panel`. */
DEVICE uint32_t advance_keys(int step, int panel) { return step < 4 ? step * 2 : BN * 8 + (step * 16 - panel) / 8; }
/* x = A B^T, or x += A B^T: 64 keys x BM rows, over D. */
DEVICE void keys_by_rows(float x[BM / 2], uint64_t keys, int panel, uint64_t rows, int add) {
#pragma unroll
    for (int e = 0; e < D / 16; ++e)
        if (e == 0 && !add)
            PASTE(wgmma_ss_new_n, K_BM)(x, keys, rows);
        else
            PASTE(wgmma_ss_n, K_BM)(x, keys + advance_keys(e, panel), rows + advance_columns(e, BM), 1);
}
/* x = the rows' -L / scale, for both of this thread's keys. */
DEVICE void begin_rows(float x[BM / 2], const float2 *lse2) {
#pragma unroll
    for (int i = 0; i < BM / 8; ++i) {
        const float2 y = lse2[4 * i];
        x[4 * i] = x[4 * i + 2] = y.x;
        x[4 * i + 1] = x[4 * i + 3] = y.y;
    }
    PIN(x, BM / 2);
}
/* dV or dK += X^T rows: 64 keys x D, over BM. */
DEVICE void accumulate(float x[D / 2], const uint32_t left[BM / 4], uint64_t rows) {
#pragma unroll
    for (int e = 0; e < BM / 16; ++e) PASTE(wgmma_rs_n, K_D)(x, left + 4 * e, rows + advance_rows(e), 1);
}
/* dQ = dS K: 64 x COLUMNS, over BN. */
DEVICE void dq_product(float x[COLUMNS / 2], uint64_t ds, uint64_t keys) {
#pragma unroll
    for (int e = 0; e < BN / 16; ++e) {
        const uint64_t left = ds + advance_columns(e, BM), right = keys + advance_rows(e);
        if (COLUMNS == 48 && e == 0)
            wgmma_st_new_n48(x, left, right);
        else if (COLUMNS == 48)
            wgmma_st_n48(x, left, right, 1);
        else if (e == 0)
            wgmma_st_new_n64(x, left, right);
        else
            wgmma_st_n64(x, left, right, 1);
    }
}

/* Of thread 0..127 of a consumer: its first key, the second is 8 keys on. */
DEVICE int first_key(const task *t, int consumer, uint32_t thread) {
    return t->j0 + consumer * 64 + (int)(thread / 32 * 16 + thread % 32 / 4);
}
/* Where it stores its part of dS by stmatrix, in matrices of 8 rows i by 8 keys: lanes 0-7 and 8-15 point at keys 0-7
   and 8-15 of the warp, lanes 16-31 at the same keys 8 rows on. */
DEVICE uint32_t ds_to(uint32_t shared, int consumer, uint32_t thread) {
    const uint32_t lane = thread % 32, chunk = thread / 32 * 2 + (lane >> 3 & 1);
    return MEMBER_ADDRESS(shared, ds) + consumer * (BM * 128) + (8 * (lane >> 4) + (lane & 7)) * 128 +
           ((chunk ^ (lane & 7)) << 4);
}
/* And its part of dQ. */
DEVICE uint32_t dq_to(uint32_t shared, int consumer, uint32_t thread) {
    return MEMBER_ADDRESS(shared, dq) + consumer * (SLICE - REPEATED * 64) * 4 + thread * 16;
}

#if K_VARIANT == FATTNI_VARIANT_SHORT
#include "bwd/cuda/sm90/bwd_sm90_short.cuh"
typedef fattni_bwd_short_args kernel_args;
#else
typedef fattni_bwd_sm90_args kernel_args;
#endif

/* Zeroes rows [from, rows) of two tiles that have arrived. Both consumers. */
DEVICE void clear_tails(uint32_t tile0, uint32_t tile1, int rows, int from) {
    clear_rows(tile0, PANELS, rows, from, (int)threadIdx.x - 128, 256);
    clear_rows(tile1, PANELS, rows, from, (int)threadIdx.x - 128, 256);
    named_barrier_sync(CLEARED, 256);
}

/* Zeroes what step n's tiles of Q and dO have beyond the sequence's last row, once they are there. Called in the step
   before, beside dK: no instruction of it is between the arrival of Q and S. */
DEVICE void clear_rows_ahead(const task *t, const row_cursor *rows, int n, uint32_t shared) {
    if (!BANDS || n == t->steps || rows->i0 + BM <= t->s.Sq) return;
    const step s = step_at(rows, t, n);
    mbarrier_wait(ELEMENT_ADDRESS(shared, q_full, s.stage), s.parity);
    mbarrier_wait(ELEMENT_ADDRESS(shared, do_full, s.stage), s.parity);
    clear_tails(ELEMENT_ADDRESS(shared, q, s.stage), ELEMENT_ADDRESS(shared, d_o, s.stage), BM, t->s.Sq - s.i0);
}

/* The first LSE_AHEAD tiles of step n's lse2, once its Q has arrived. */
DEVICE void load_lse2_ahead(float2 *ahead, const task *t, int n, uint32_t shared, const shared_memory *memory,
                            uint32_t thread) {
#pragma unroll
    for (int i = 0; i < LSE_AHEAD; ++i) FORGET(&ahead[4 * i].x, 2);
    if (n == t->steps) return;
    const row_cursor any = {0, 0};
    const step s = step_at(&any, t, n);
    mbarrier_wait(ELEMENT_ADDRESS(shared, q_full, s.stage), s.parity);
    const float2 *const lse2 = statistics(memory->lse2[s.stage], (int)(thread % 4 * 2));
#pragma unroll
    for (int i = 0; i < LSE_AHEAD; ++i) ahead[4 * i] = lse2[4 * i];
}

/* dK, dV and this consumer's part of dQ of a task, the CTA's work item `number`. */
DEVICE void main_loop(const kernel_args *args, const task *t, int number, uint32_t shared, const shared_memory *memory,
                      int consumer) {
#if K_VARIANT == FATTNI_VARIANT_SHORT
    const fattni_bwd_sm90_args *const p = &args->s;
    if (number > 0) release_stored_keys(shared);
#else
    const fattni_bwd_sm90_args *const p = args;
#endif
    const fattni_bwd_args *const bwd = &p->bwd;
    const fattni_attention_args *const a = &p->bwd.a;
    const float unit = a->scale * LOG2E;
    const uint64_t k_keys = operand_descriptor(MEMBER_ADDRESS(shared, k) + consumer * 8192, 0);
    const uint64_t v_keys = operand_descriptor(MEMBER_ADDRESS(shared, v) + consumer * 8192, 0);
    const uint32_t ds_rows = SPLIT_ROWS ? consumer * 8192 : 0;
    const uint32_t k_columns = SPLIT_ROWS ? 0 : consumer * (BN * 128);
    const uint64_t k_depth = operand_descriptor(MEMBER_ADDRESS(shared, k) + k_columns, 0);
    float dk[D / 2], dv[D / 2], s[BM / 2], dp[BM / 2], dq[COLUMNS / 2];
    uint32_t pr[BM / 4], ds[BM / 4]; /* P and dS, rounded */
    float2 ahead[BM / 2] = {};       /* lse2, every fourth as `statistics` has it; LSE_AHEAD are loaded a step before */
#pragma unroll
    for (int i = 0; i < D / 2; ++i) dk[i] = dv[i] = 0.0f;

    if (t->steps) {
        mbarrier_wait(MEMBER_ADDRESS(shared, k_full), (uint32_t)t->kv_phase);
        mbarrier_wait(MEMBER_ADDRESS(shared, v_full), (uint32_t)t->kv_phase);
    }
    if (BANDS && t->j0 + BN > t->s.Sk && t->steps)
        clear_tails(MEMBER_ADDRESS(shared, k), MEMBER_ADDRESS(shared, v), BN, t->s.Sk - t->j0);
    if (t->steps && load_shared_word(MEMBER_ADDRESS(shared, centred))) {
        centre_tile(MEMBER_ADDRESS(shared, k), PANELS, K_PANEL, 64 * PANELS, memory->key_mean);
        named_barrier_sync(CLEARED, 256);
    }
    if (LSE_AHEAD) load_lse2_ahead(ahead, t, 0, shared, memory, threadIdx.x);
    row_cursor rows = first_rows(t, a->group);
    clear_rows_ahead(t, &rows, 0, shared);
    for (int n = 0; n < t->steps; ++n) {
        uint32_t thread = threadIdx.x % 128;
        asm volatile("" : "+r"(number), "+r"(thread)); /* hides them: what depends on them is recomputed */
        const int key = first_key(t, consumer, thread), row0 = (int)(thread % 4 * 2);
        const step now = step_at(&rows, t, n);
        const uint32_t q = ELEMENT_ADDRESS(shared, q, now.stage), d_o = ELEMENT_ADDRESS(shared, d_o, now.stage);
        const float2 *const lse2 = statistics(memory->lse2[now.stage], row0);
        const float2 *const delta = statistics(memory->delta[now.stage], row0);
        mbarrier_wait(ELEMENT_ADDRESS(shared, q_full, now.stage), now.parity);
        if (BEGINS_WITH_L) begin_rows(s, lse2);
        wgmma_fence();
        keys_by_rows(s, k_keys, K_PANEL, operand_descriptor(q, 0), BEGINS_WITH_L);
        wgmma_commit();
        mbarrier_wait(ELEMENT_ADDRESS(shared, do_full, now.stage), now.parity);
        wgmma_fence();
        keys_by_rows(dp, v_keys, 64, operand_descriptor(d_o, 0), 0);
        wgmma_commit();

        origin at = {t->b, now.h, now.i0 + row0, key, 0.0f};
        uint32_t keep[(BM + 63) / 64];
        if (GENERAL) {
            at.slope = slope_of(a, now.h);
            if (a->drop_T) keep_rows(keep, BM, a, &at);
        }
        wgmma_wait(1);
        PIN(s, BM / 2);
        const int edge = crosses_edge(&t->s, now.i0, t->j0);
        if (BIASED)
            add_bias_tile(s, BM, MEMBER_ADDRESS(shared, bias) + consumer * (BM * 128), a->scale, t->s.Sq - now.i0, &now,
                          shared, thread);
        if (GENERAL) {
            general_probabilities(s, BM, lse2, a, &t->s, &at, edge);
        } else {
            if (!BANDS)
                mask_edge(s, BM, edge, a->Sk, t->s.hi, now.i0, row0, key);
            else if (edge)
                mask_band(s, BM, &t->s, now.i0, row0, t->j0, key);
            if (BEGINS_WITH_L) {
#pragma unroll
                for (int e = 0; e < BM / 2; ++e) s[e] = exp2_approx(s[e] * unit);
                round_pairs(pr, s, BM / 2);
            } else {
#pragma unroll
                for (int i = LSE_AHEAD; i < BM / 8; ++i) ahead[4 * i] = lse2[4 * i];
                exponentials((float(*)[4])s, BM / 8, BIASED ? LOG2E : unit, ahead);
            }
            PIN(s, BM / 2);
            /* Again: ptxas moves the wait for dP up to the last branch. */
            mbarrier_wait(ELEMENT_ADDRESS(shared, do_full, now.stage), now.parity);
        }
        wgmma_wait(0);
        PIN(dp, BM / 2);
        if (GENERAL) {
            general_gradients(pr, ds, s, dp, BM, lse2, delta, keep, bwd, &t->s, &at, edge);
        } else {
            if (!BEGINS_WITH_L) round_pairs(pr, s, BM / 2); /* there were no registers for pr before */
            score_gradients(ds, s, dp, BM, delta);
        }
#if K_VARIANT == FATTNI_VARIANT_SHORT
        wait_ds_empty(now.stage + number, shared);
#endif
        const int ds_stage = SHORT ? 0 : now.stage;
#pragma unroll
        for (int i = 0; i < BM / 16; ++i)
            stmatrix_x4_trans(ds_to(shared, consumer, thread) + ds_stage * DS_BYTES + i * 2048, ds + 4 * i);

        /* dV is issued before the proxy fence, so that the fence costs nothing. */
        wgmma_fence();
        accumulate(dv, pr, operand_descriptor(d_o, BM * 128));
        wgmma_commit();
        async_proxy_fence();
        named_barrier_sync(DS_WRITTEN, 256);
        wgmma_fence();
        dq_product(dq, operand_descriptor(ELEMENT_ADDRESS(shared, ds, ds_stage) + ds_rows, 0), k_depth);
        wgmma_commit();
        wgmma_wait(1); /* dV */
        PIN_INTEGERS(pr, BM / 4);
        arrive_once_per_warp(ELEMENT_ADDRESS(shared, do_empty, now.stage));
        wgmma_fence();
        accumulate(dk, ds, operand_descriptor(q, BM * 128));
        wgmma_commit();
        if (LSE_AHEAD) load_lse2_ahead(ahead, t, n + 1, shared, memory, thread);
        wgmma_wait(1); /* dQ */
#if K_VARIANT == FATTNI_VARIANT_SHORT
        PIN(dq, COLUMNS / 2);
        release_ds(shared);
        keep_dq(p, number, t, &now, shared, consumer, thread, dq);
#else
        named_barrier_sync(DQ_EMPTY + consumer, 160);
        PIN(dq, COLUMNS / 2);
#pragma unroll
        for (int i = 0; i < COLUMNS / 8; ++i)
            if (i >= REPEATED / 8 || consumer == 0)
                store_shared_4(dq_to(shared, consumer, thread) + i * 2048, dq + 4 * i);
        async_proxy_fence();
        named_barrier_arrive(DQ_FULL + consumer, 160);
#endif
        next_rows(&rows, t, a);
        clear_rows_ahead(t, &rows, n + 1, shared);
        wgmma_wait(0); /* dK */
        PIN_INTEGERS(ds, BM / 4);
        arrive_once_per_warp(ELEMENT_ADDRESS(shared, q_empty, now.stage));
    }
    PIN(dk, D / 2);
    PIN(dv, D / 2);
#if K_VARIANT == FATTNI_VARIANT_SHORT
    const task done = short_task(p, number);
    arrive_once_per_warp(MEMBER_ADDRESS(shared, keys_empty));
    store_keys_of_task(args, &done, number, shared, consumer, dk, dv);
#else
    const task done = read_task(a, shared, number);
    if (done.steps) arrive_once_per_warp(MEMBER_ADDRESS(shared, keys_empty));
    uint32_t thread = threadIdx.x % 128;
    asm volatile("" : "+r"(thread));
    const int key = first_key(&done, consumer, thread);
    store_dv(bwd, &done, key, 0, D, dv);
    store_dk(bwd, &done, key, 0, D, dk);
#endif
}

#if K_VARIANT != FATTNI_VARIANT_SHORT
/* ---- loops over work items ---- */

/* Packed sequences are of many lengths: most key blocks that the longest one has are of none of the others. So those of
   a head group (without `progress` of all heads) are numbered one sequence after the other, in each of them as in
   position_of, with so many heads at once as have as many as a head group. A CTA's numbers rise: it looks for the
   sequence from its last one on, of the next head group from there or from the first one on. */
typedef struct packed_cursor {
    int b, first, blocks; /* a sequence, key blocks before it and of it; -1, 0, 0 at the start */
} packed_cursor;
/* Gives 0 if there is no key block with this number. */
DEVICE int find_packed(packed_cursor *c, position *at, const fattni_bwd_sm90_args *p, const work_item *x) {
    const fattni_attention_args *const a = &p->bwd.a;
    const int group = p->schedule.head_group, items = group * p->schedule.blocks;
    const int progress = p->progress != 0;
    const int all = progress ? heads_of_group(p, x->head_group) : a->Hkv, head0 = progress ? x->head_group * group : 0,
              number = progress ? x->number - x->head_group * items : x->number;
    if (number < c->first * all) c->b = -1, c->first = c->blocks = 0; /* of the next head group */
    while (number >= (c->first + c->blocks) * all) {
        if (c->b + 1 == a->B) return 0;
        c->first += c->blocks;
        c->blocks = (sequence_of(a, ++c->b).Sk + BN - 1) / BN;
    }
    const int most = min(items / c->blocks, all), rest = number - c->first * all, part = rest / (most * c->blocks),
              in_part = rest % (most * c->blocks), heads = min(most, all - part * most);
    at->plane = c->b * a->Hkv + head0 + part * most + in_part % heads;
    at->block = in_part / heads;
    return 1;
}

/* The producer claims a work item when all loads of the last one have been issued; where only rows of postprocess are
   left, when the last one is done, so that all CTAs share them. One thread. */
DEVICE void produce(const fattni_bwd_sm90_args *p, uint32_t shared) {
    packed_cursor packed = {-1, 0, 0};
    for (int n = 0, steps_before = 0, phases = 0;; ++n) { /* phases: kv_phase, and 2: of PREPROCESS */
        work_item x = {NOTHING, 0, 0};
        task t = {0};
        int number = 0;
        while (x.kind == NOTHING) {
            number = atomicAdd(p->schedule.next_tile, 1);
            x = work_item_of(p, number);
            if (x.kind != MAINLOOP) continue;
            position at = {0, 0};
            if (!packs(&p->bwd)) {
                at = position_of_task(p, x.number);
            } else if (!find_packed(&packed, &at, p, &x)) {
                x.kind = p->progress ? NOTHING : END;
                if (!p->progress) continue;
                /* As all do that add: who waits for them also waits for the rows. */
                wait_counter(p, x.head_group, PREPROCESSED, p->row_items);
                add_release(counter_of(p, x.head_group, DQ_ADDITIONS), 2);
                continue;
            }
            t = task_at(p, &x, &at);
            if (!p->progress && t.j0 >= t.s.Sk) x.kind = NOTHING;
        }
        if (x.kind == MAINLOOP) prefetch_keys(p, &t);
        t.steps_before = steps_before, t.kv_phase = phases & 1;
        if (x.kind == PREPROCESS) t.accumulator_shift = phases >> 1, phases ^= 2;
        mbarrier_wait(ELEMENT_ADDRESS(shared, work_empty, n & 1), (uint32_t)(n >> 1 & 1) ^ 1);
        write_work(shared, n, &x, &t);
        mbarrier_arrive(ELEMENT_ADDRESS(shared, work_full, n & 1));
        if (x.kind == END) return;
        if (x.kind == POSTPROCESS && number >= last_rows(p))
            mbarrier_wait(ELEMENT_ADDRESS(shared, work_empty, n & 1), (uint32_t)(n >> 1 & 1));
        if (x.kind != MAINLOOP) continue;
        load(p, &t, shared);
        steps_before = (steps_before + t.steps) & 3, phases ^= t.steps > 0;
    }
}

/* Warps 1 and 2 add dQ. */
DEVICE void add(const fattni_bwd_sm90_args *p, uint32_t shared, int consumer) {
    for (int n = 0;; ++n) {
        const uint32_t slot = slot_at(shared, n);
        mbarrier_wait(ELEMENT_ADDRESS(shared, work_full, n & 1), (uint32_t)(n >> 1 & 1));
        const int kind = read_work(slot).kind;
        const task t = read_task(&p->bwd.a, shared, n);
        __syncwarp();
        arrive_once_per_warp(ELEMENT_ADDRESS(shared, work_empty, n & 1));
        if (kind == END) return;
        if (kind == MAINLOOP) add_dq(p, &t, shared, consumer);
        __syncwarp();
    }
}
/* Warp 3 finds means of keys. Where dQ is deterministic it also posts semaphores, and follows the work items. */
DEVICE void search_and_post(const fattni_bwd_sm90_args *p, uint32_t shared) {
    uint32_t parities = 0;
    for (int n = 0;; ++n) {
        if (p->bwd.dq_semaphore) {
            const uint32_t slot = slot_at(shared, n);
            mbarrier_wait(ELEMENT_ADDRESS(shared, work_full, n & 1), (uint32_t)(n >> 1 & 1));
            const int kind = read_work(slot).kind;
            const task t = read_task(&p->bwd.a, shared, n);
            __syncwarp();
            arrive_once_per_warp(ELEMENT_ADDRESS(shared, work_empty, n & 1));
            if (kind == MAINLOOP && is_leader()) post_dq_semaphores(&p->bwd, &t, shared);
            __syncwarp();
            if (kind == END) return;
            if (kind != PREPROCESS || !searches(p)) continue;
        }
        if (CAPPED || !find_means(&p->bwd, shared, MEMBER_ADDRESS(shared, ds), &parities)) return;
    }
}

DEVICE void consume(const fattni_bwd_sm90_args *p, uint32_t shared, const shared_memory *memory, int consumer) {
    for (int n = 0;; ++n) {
        const uint32_t slot = slot_at(shared, n);
        int thread = (int)threadIdx.x - 128;
        asm volatile("" : "+r"(thread)); /* hides it: what depends on it is recomputed */
        mbarrier_wait(ELEMENT_ADDRESS(shared, work_full, n & 1), (uint32_t)(n >> 1 & 1));
        const work_item x = read_work(slot);
        if (x.kind == END) {
            /* want_no_mean */
            if (searches(p) && !p->bwd.dq_semaphore) arrive_once_per_warp(MEMBER_ADDRESS(shared, search.asked));
            return;
        }
        if (x.kind == MAINLOOP) {
            const task t = read_task(&p->bwd.a, shared, n);
            main_loop(p, &t, n, shared, memory, consumer);
        } else if (x.kind == PREPROCESS) {
            preprocess(p, &x, shared, slot + offsetof(work_slot, item) + 12, thread, 256);
        } else {
            postprocess(p, &x, thread, 256);
        }
        __syncwarp();
        arrive_once_per_warp(ELEMENT_ADDRESS(shared, work_empty, n & 1));
    }
}

#else

/* ---- heads, in SHORT kernels ---- */

DEVICE void init_short(uint32_t shared) {
    if (threadIdx.x > 0) return;
    mbarrier_init(MEMBER_ADDRESS(shared, ds_empty), 8);
    for (int n = 0; n < 2; ++n) mbarrier_init(ELEMENT_ADDRESS(shared, rows_full, n), 8);
    mbarrier_init(MEMBER_ADDRESS(shared, mean_seen), 8);
    mbarrier_init_fence();
}
DEVICE void run_short(const fattni_bwd_short_args *args, uint32_t shared, const shared_memory *memory, int role) {
    const fattni_bwd_sm90_args *const p = &args->s;
    const int blocks = p->schedule.blocks, count = planes_of_cta(p) * blocks;
    if (role == 0) {
        registers_lower(40);
        for (int number = 0; threadIdx.x == 0 && number < count; ++number) {
            const task t = short_task(p, number);
            load_short(p, &t, number, shared);
        }
        if (threadIdx.x >= 32) look_ahead(p, shared);
    } else {
        registers_raise(232);
        for (int number = -1; number < count; ++number) {
            const int next = number + 1;
            if (next % blocks == 0 && next < count) prepare_rows(&p->bwd, next / blocks, shared);
            if (number < 0) continue;
            const task t = short_task(p, number);
            main_loop(args, &t, number, shared, memory, role - 1);
        }
        if (is_leader()) bulk_wait();
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, 1) K_NAME(const __grid_constant__ kernel_args p) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const uint32_t shared = shared_address(memory);
    const int role = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0);
    init_barriers(shared, 2);
    if (BIASED) init_bias_barriers(shared);
#if K_VARIANT == FATTNI_VARIANT_SHORT
    init_short(shared);
    __syncthreads();
    run_short(&p, shared, (const shared_memory *)memory, role);
#else
    init_work_slots(shared, p.bwd.dq_semaphore != 0);
    __syncthreads();
    if (role == 0) {
        const int warp = (int)threadIdx.x / 32;
        registers_lower(40);
        if (threadIdx.x == 0)
            produce(&p, shared);
        else if (warp == 1 || warp == 2)
            add(&p, shared, warp - 1);
        else if (warp == 3 && (searches(&p) || p.bwd.dq_semaphore))
            search_and_post(&p, shared);
    } else {
        registers_raise(232);
        consume(&p, shared, (const shared_memory *)memory, role - 1);
    }
#endif
}

DESCRIBE_KERNEL(kernel_args, SHARED_BYTES, CTAS);
