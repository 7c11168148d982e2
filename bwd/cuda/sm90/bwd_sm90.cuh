/* Backward attention for Hopper, head_dim up to 128 (beyond: bwd_sm90_cluster.cuh): TMA, wgmma. One persistent CTA per
   SM claims work items: key blocks of BN keys, and the rows of pre- and postprocess (bwd_sm90_scheduler.cuh).

   For each row block: S^T = K Q^T, P = exp(S - L), dP^T = V dO^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += dS K.

   Tensors     q, d_o [b,h,i,d], k, v, dk, dv [b,g,j,d]; lse2 and delta (bwd_workspace.cuh) of padded rows. q, k,
               v, d_o with strides that tensor maps can take.
   Ownership   dK, dV of BN keys stay in registers over all row blocks of all query heads of the group;
               dQ is added to an fp32 accumulator in L2 by bulk reductions.
   Threads     warpgroup 0 loads; what else its warps do is in bwd_sm90_items.cuh and bwd_sm90_short.cuh. Two consumer
               warpgroups own 64 keys each: S^T and dP^T are computed transposed, so that P^T and dS^T are the register
               operands of dV and dK. dQ: a consumer has half of 128 rows, or all of 64 rows and half of the columns.
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

enum { CONSUMER_THREADS = THREADS - 128 };
/* Named barriers; DQ_FULL and DQ_EMPTY one per consumer; the last two of SHORT. */
enum { DS_WRITTEN = 1, DQ_FULL = 2, DQ_EMPTY = 4, CLEARED = 6, ROWS_DONE = 7, MEAN_FOUND = 8, MEAN_PARTS = 9 };

#include "bwd/cuda/sm90/bwd_sm90_general.cuh"
#include "bwd/cuda/sm90/bwd_sm90_bias.cuh"
#include "bwd/cuda/sm90/bwd_sm90_scheduler.cuh"

static_assert(offsetof(shared_memory, v) % 1024 == 0 && offsetof(shared_memory, q) % 1024 == 0 &&
                  offsetof(shared_memory, d_o) % 1024 == 0 && offsetof(shared_memory, ds) % 1024 == 0 &&
                  offsetof(shared_memory, bias) % 1024 == 0 && ROW_BYTES % 1024 == 0 && DS_BYTES % 1024 == 0,
              "swizzled tiles");

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

/* What differs between kernels that claim work items (bwd_sm90_items.cuh) and those that have all key blocks of a head
   (bwd_sm90_short.cuh): the buffer for dS of a step, once it is free; where this thread's part of dQ of a step goes,
   while dK is computed; where dK and dV of a task go. `number` is the task's in the CTA. */
DEVICE int ds_stage_of(const step *now, int number, uint32_t shared);
DEVICE void pass_dq(const fattni_bwd_sm90_args *p, const task *t, const step *now, int number, uint32_t shared,
                    int consumer, uint32_t thread, float dq[COLUMNS / 2]);
DEVICE void store_keys(const fattni_bwd_sm90_args *p, int number, uint32_t shared, int consumer, const float dk[D / 2],
                       const float dv[D / 2]);

/* Zeroes rows [from, rows) of two tiles that have arrived. Both consumers. */
DEVICE void clear_tails(uint32_t tile0, uint32_t tile1, int rows, int from) {
    clear_rows(tile0, PANELS, rows, from, (int)threadIdx.x - 128, CONSUMER_THREADS);
    clear_rows(tile1, PANELS, rows, from, (int)threadIdx.x - 128, CONSUMER_THREADS);
    named_barrier_sync(CLEARED, CONSUMER_THREADS);
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

/* dK, dV and this consumer's part of dQ of a task, number `number` of the CTA. */
DEVICE void main_loop(const fattni_bwd_sm90_args *p, const task *t, int number, uint32_t shared,
                      const shared_memory *memory, int consumer) {
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
        named_barrier_sync(CLEARED, CONSUMER_THREADS);
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
        const int ds_stage = ds_stage_of(&now, number, shared);
#pragma unroll
        for (int i = 0; i < BM / 16; ++i)
            stmatrix_x4_trans(ds_to(shared, consumer, thread) + ds_stage * DS_BYTES + i * 2048, ds + 4 * i);

        /* dV is issued before the proxy fence, so that the fence costs nothing. */
        wgmma_fence();
        accumulate(dv, pr, operand_descriptor(d_o, BM * 128));
        wgmma_commit();
        async_proxy_fence();
        named_barrier_sync(DS_WRITTEN, CONSUMER_THREADS);
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
        pass_dq(p, t, &now, number, shared, consumer, thread, dq);
        next_rows(&rows, t, a);
        clear_rows_ahead(t, &rows, n + 1, shared);
        wgmma_wait(0); /* dK */
        PIN_INTEGERS(ds, BM / 4);
        arrive_once_per_warp(ELEMENT_ADDRESS(shared, q_empty, now.stage));
    }
    PIN(dk, D / 2);
    PIN(dv, D / 2);
    store_keys(p, number, shared, consumer, dk, dv);
}

#if K_VARIANT == FATTNI_VARIANT_SHORT
#include "bwd/cuda/sm90/bwd_sm90_short.cuh"
#else
#include "bwd/cuda/sm90/bwd_sm90_items.cuh"
#endif

DESCRIBE_KERNEL(kernel_args, SHARED_BYTES, CTAS);
