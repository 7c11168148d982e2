/* Backward attention for Hopper, head_dim up to 128, and 192 with v of 128 (else: bwd_sm90_cluster.cuh): TMA, wgmma.
   One persistent CTA per SM claims work items: key blocks of BN keys, and the rows of pre- and postprocess
   (bwd_sm90_scheduler.cuh).

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
   Means       Where the keys of a head have a mean m (bwd_key_mean.cu): dQ += dS (K - m), S is of K. So K is loaded
               twice then (TWO_K_TILES); where there is no room for that, dQ += dS K - (sum of dS) m. Of head_dim 64 dS
               has one stage where there is (with two a causal mask takes 3 % longer).
   Heads       SHORT and HEADS are CAUSAL, HEADS_FULL is FULL, for few keys: with heads in place of work items
               (bwd_sm90_short.cuh).
   WIDE        Of head_dim 192 dK and dV take 160 registers of a thread. So dP is computed for half of the rows at a
               time, each half beside the exponentials of the same rows, and of dQ a part while dV is not complete. dK
               reads dS from shared memory, where dS has one stage.
   dQ order    FATTN_DETERMINISTIC: the adding warps wait for the key blocks before theirs (bwd_dq_semaphore.cuh).

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
    CTAS = 1,
    WIDE = D > 128,
    KEEPS_DQ = K_VARIANT == FATTNI_VARIANT_SHORT, /* dQ of a head is in shared memory */
    BY_HEADS = KEEPS_DQ || K_VARIANT == FATTNI_VARIANT_HEADS || K_VARIANT == FATTNI_VARIANT_HEADS_FULL,
    CAUSAL = K_VARIANT == FATTNI_VARIANT_CAUSAL || (BY_HEADS && K_VARIANT != FATTNI_VARIANT_HEADS_FULL),
    BANDS = !BY_HEADS && K_VARIANT >= FATTNI_VARIANT_BANDED,
    CAPPED = K_VARIANT == FATTNI_VARIANT_CAPPED,
    GENERAL = K_VARIANT == FATTNI_VARIANT_GENERAL || CAPPED,
    BIASED = K_VARIANT == FATTNI_VARIANT_BIASED,
    PANELS = (D + 63) / 64,
    V_PANELS = (DV + 63) / 64,
    HALF = 32 * PANELS,
    V_HALF = 32 * V_PANELS,
    KEY_BYTES = BN * PANELS * 128,
    VALUE_BYTES = BN * V_PANELS * 128,
    ROW_BYTES = BM * PANELS * 128,
    D_O_BYTES = BM * V_PANELS * 128,
    DS_BYTES = BN * BM * 2,
    TWO_K_TILES = !WIDE && !BIASED && !KEEPS_DQ && (D <= 64 || !BY_HEADS), /* where there is room */
    DS_STAGES = KEEPS_DQ || WIDE || (TWO_K_TILES && D == 64) ? 1 : 2,
    DP_PARTS = WIDE ? 2 : 1,
    DP_ROWS = BM / DP_PARTS,                               /* rows of dP that are there at a time */
    DQ_BLOCKS = KEEPS_DQ ? FATTNI_SHORT_KEYS / BM - 1 : 1, /* row blocks of dQ in shared memory */
    STAGED = BY_HEADS && D > 64 ? KEY_BYTES : 0,           /* bytes for dK and dV, beside those of dS */
    BEGINS_WITH_L = FATTNI_BEGINS_WITH_L(!GENERAL && !BIASED, CTAS, BM),
    LSE_AHEAD = GENERAL || BIASED || BEGINS_WITH_L ? 0 : 3, /* of lse2: tiles of 8 rows that are loaded a step before */
    /* dQ: a consumer has half of 128 rows, or of 64 rows half of the columns. The halves of head_dim 80 are 48 columns
       and overlap in REPEATED; K's second panel starts with the second half. Those of head_dim 192 are the first or the
       third panel and half of the second. */
    SPLIT_ROWS = BM > 64,
    COLUMNS = SPLIT_ROWS ? 64 : (D + 31) / 32 * 16,
    APART = WIDE ? 32 : 0, /* of these, those of the second panel: a product of their own */
    REPEATED = SPLIT_ROWS ? 0 : 2 * COLUMNS - D,
    PACKS = BANDS && !GENERAL && !BIASED, /* there is no register for it beside features */
    DIVIDES = !BY_HEADS,
    GOES_BY_ROWS = !BY_HEADS && !GENERAL && (CAUSAL || D > 64), /* elsewhere there is no register for it */
    SLICE = 64 * COLUMNS,                                       /* floats */
    K_PANEL = D % 64 ? D - COLUMNS : 64,                        /* columns from panel to panel of K */
    MOST_ROW_STAGES = 4,                                        /* bwd_sm90_rows.cuh */
    /* What ptxas makes of the main loop: it is not to read the thread's number again in each step; of head_dim 64 it
       computes addresses in shared memory again, which spills less. */
    HOLDS_THREAD = !BY_HEADS && !WIDE,
    HIDES_SHARED = D == 64 && !BY_HEADS,
    LOADER_REGISTERS = WIDE ? 24 : 40, /* of warpgroup 0 */
    CONSUMER_REGISTERS = WIDE ? 240 : 232
};
static_assert(BN == 128 && K_WARPS == 12, "two consumers of 64 keys");
static_assert(D == 64 ? BM == 128 : D % 16 == 0 && BM == 64, "two slices of dQ");
static_assert(WIDE ? D == 192 && DV == 128 && BEGINS_WITH_L : D == DV, "what there are registers for");

/* A work item and its task, as the producer passes them to the other warps. */
typedef struct work_slot {
    uint4 steps; /* j0, from, last, (steps_before, kv_phase, steps) */
    uint4 item;  /* kind, head_group, number, accumulator_shift */
    uint4 head;  /* b, hk */
} work_slot;
typedef struct shared_memory {
    half_type k[BN * PANELS * 64], v[BN * V_PANELS * 64];
    half_type q[2][BM * PANELS * 64], d_o[2][BM * V_PANELS * 64];
    half_type ds[DS_STAGES][BN * BM], staged[STAGED / 2];
    half_type bias[BIASED ? BM * BN : 0];
    half_type k_of_dq[TWO_K_TILES ? BN * PANELS * 64 : 0];
    float dq[DQ_BLOCKS * BM * D];
    float lse2[2][BM], delta[2][BM];
    float key_mean[PANELS * 64]; /* where it is used */
    uint64_t k_full, v_full, q_full[2], q_empty[2], do_full[2], do_empty[2];
    uint64_t work_full[2], work_empty[2], keys_empty, dq_added, dq_added_seen, mean_full;
    uint64_t bias_full[BIASED], bias_empty[BIASED];
    uint64_t ds_empty[DS_STAGES == 1], rows_full[2 * MOST_ROW_STAGES], mean_seen[BY_HEADS], rows_wanted[BY_HEADS],
        dq_loaded[2 * (BY_HEADS && !KEEPS_DQ)];
    work_slot work[2];
    int32_t has_mean, first_plane, reserved[2]; /* has_mean: of the task's keys; first_plane: that is searched */
    uint4 sequences[2];                         /* BANDS: the tasks' Sq, Sk, q0, k0 */
} shared_memory;
enum {
    SHARED_BYTES = sizeof(shared_memory),
    K_OF_DQ = TWO_K_TILES ? offsetof(shared_memory, k_of_dq) : offsetof(shared_memory, k) /* of keys with means */
};
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");

enum { CONSUMER_THREADS = THREADS - 128 };
/* Named barriers; DQ_FULL, DQ_EMPTY and ROWS_READ one per consumer; MEAN_PARTS of BY_HEADS. */
enum {
    DS_WRITTEN = 1,
    DQ_FULL = 2,
    DQ_EMPTY = 4,
    CLEARED = 6,
    ROWS_DONE = 7,
    MEAN_FOUND = 8,
    MEAN_PARTS = 9,
    ROWS_READ = 10
};

#include "bwd/cuda/sm90/bwd_sm90_general.cuh"
#include "bwd/cuda/sm90/bwd_sm90_bias.cuh"
#include "bwd/cuda/sm90/bwd_sm90_centre.cuh"
#include "bwd/cuda/sm90/bwd_sm90_scheduler.cuh"

static_assert(offsetof(shared_memory, v) % 1024 == 0 && offsetof(shared_memory, q) % 1024 == 0 &&
                  offsetof(shared_memory, d_o) % 1024 == 0 && offsetof(shared_memory, ds) % 1024 == 0 &&
                  offsetof(shared_memory, bias) % 1024 == 0 && offsetof(shared_memory, k_of_dq) % 1024 == 0 &&
                  ROW_BYTES % 1024 == 0 && DS_BYTES % 1024 == 0,
              "swizzled tiles");

/* ---- consumers ---- */

/* advance_columns where the second panel starts at column `panel`. */
DEVICE uint32_t advance_keys(int step, int panel) {
    return step < 4 || panel == 64 ? advance_columns(step, BN) : BN * 8 + (step * 16 - panel) / 8;
}
/* x = A B^T, or x += A B^T: 64 keys x `rows` rows, over `depth` columns. */
DEVICE void keys_by_rows(float *x, int rows, int depth, uint64_t keys, int panel, uint64_t tile, int add) {
#pragma unroll
    for (int e = 0; e < depth / 16; ++e) {
        const uint64_t left = keys + advance_keys(e, panel), right = tile + advance_columns(e, BM);
        if (rows == 32 && e == 0 && !add)
            wgmma_ss_new_n32(x, left, right);
        else if (rows == 32)
            wgmma_ss_n32(x, left, right, 1);
        else if (e == 0 && !add)
            PASTE(wgmma_ss_new_n, K_BM)(x, left, right);
        else
            PASTE(wgmma_ss_n, K_BM)(x, left, right, 1);
    }
}
/* P of `count` elements of S that began with -L / scale. */
DEVICE void probabilities(float *s, int count, float unit) {
#pragma unroll
    for (int e = 0; e < count; ++e) s[e] = exp2_approx(s[e] * unit);
    PIN(s, count);
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
/* dV += P^T dO: 64 keys x DV, over BM. */
DEVICE void add_to_dv(float dv[DV / 2], const uint32_t pr[BM / 4], uint64_t d_o) {
#pragma unroll
    for (int e = 0; e < BM / 16; ++e) PASTE(wgmma_rs_n, K_DV)(dv, pr + 4 * e, d_o + advance_rows(e), 1);
}
/* dK += dS^T Q: 64 keys x D, over BM. dS from registers; WIDE: of shared memory, `ds_keys`. */
DEVICE void add_to_dk(float dk[D / 2], const uint32_t *ds, uint64_t ds_keys, uint64_t q) {
#pragma unroll
    for (int e = 0; e < BM / 16; ++e)
        if (WIDE)
            PASTE(wgmma_tt_n, K_D)(dk, ds_keys + advance_rows(e), q + advance_rows(e), 1);
        else
            PASTE(wgmma_rs_n, K_D)(dk, ds + 4 * e, q + advance_rows(e), 1);
}
/* dQ = dS K: 64 x `columns`, over BN. */
DEVICE void dq_product(float *x, int columns, uint64_t ds, uint64_t keys) {
#pragma unroll
    for (int e = 0; e < BN / 16; ++e) {
        const uint64_t left = ds + advance_columns(e, BM), right = keys + advance_rows(e);
        if (columns == 32 && e == 0)
            wgmma_st_new_n32(x, left, right);
        else if (columns == 32)
            wgmma_st_n32(x, left, right, 1);
        else if (columns == 48 && e == 0)
            wgmma_st_new_n48(x, left, right);
        else if (columns == 48)
            wgmma_st_n48(x, left, right, 1);
        else if (e == 0)
            wgmma_st_new_n64(x, left, right);
        else
            wgmma_st_n64(x, left, right, 1);
    }
}

/* Which tile of 8 columns of a consumer's part of dQ its accumulators 4i have: what is APART comes last in these, but
   consumer 1 has it first in the part. */
DEVICE int column_tile(int i, int consumer) {
    if (!APART || consumer == 0) return i;
    return i < (COLUMNS - APART) / 8 ? i + APART / 8 : i - (COLUMNS - APART) / 8;
}
/* What dS sums to over BN keys, of the two rows of dQ that this thread has. `rows`: of dS, those of the consumer. */
DEVICE void sum_rows(float sums[4], uint32_t rows, uint32_t thread) {
    const uint32_t lane = thread % 32,
                   from = rows + thread / 32 * 2048 + lane % 16 * 128 + swizzled_chunk(lane / 16, lane % 8);
#pragma unroll
    for (int e = 0; e < 4; ++e) sums[e] = 0.0f;
#pragma unroll
    for (int e = 0; e < BN / 16; ++e) {
        uint32_t x[4];
        ldmatrix_x4(x, (from ^ e % 4 * 32) + e / 4 * (BM * 128));
        mma(sums, x, ONES, ONES);
    }
}
/* dQ of a step less these sums times the mean of the keys. */
DEVICE void subtract_means(float dq[COLUMNS / 2], const float sums[4], const float *mean, int consumer,
                           uint32_t thread) {
    mean += (SPLIT_ROWS ? 0 : consumer * (COLUMNS - REPEATED)) + thread % 4 * 2;
#pragma unroll
    for (int i = 0; i < COLUMNS / 8; ++i)
        subtract_mean(dq + 4 * i, sums, (const float2 *)(mean + 8 * column_tile(i, consumer)));
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
DEVICE void store_keys(const fattni_bwd_sm90_args *p, int number, uint32_t shared, int consumer, float dk[D / 2],
                       float dv[DV / 2]);

/* Whether a thread of main_loop is the first of its warp. */
DEVICE int leads(uint32_t thread) { return HOLDS_THREAD ? thread % 32 == 0 : is_leader(); }
/* Where dS has one stage: until its use number n, from 0 on, may begin; that the calling warp needs it no longer. */
DEVICE void wait_ds_empty(int n, uint32_t shared) {
    mbarrier_wait(MEMBER_ADDRESS(shared, ds_empty), (uint32_t)(n & 1) ^ 1);
}
DEVICE void release_ds(uint32_t shared, int leads) { mbarrier_arrive_if(MEMBER_ADDRESS(shared, ds_empty), leads); }

/* Zeroes rows [from, rows) of K and V, or Q and dO, that have arrived. Both consumers. */
DEVICE void clear_tails(uint32_t k_or_q, uint32_t v_or_d_o, int rows, int from) {
    clear_rows(k_or_q, PANELS, rows, from, (int)threadIdx.x - 128, CONSUMER_THREADS);
    clear_rows(v_or_d_o, V_PANELS, rows, from, (int)threadIdx.x - 128, CONSUMER_THREADS);
    named_barrier_sync(CLEARED, CONSUMER_THREADS);
}

/* S = -inf where a row does not see a key. */
DEVICE void hide(float s[BM / 2], const fattni_attention_args *a, const task *t, const step *now, int row0, int key) {
    const int edge = crosses_edge(&t->s, now->i0, t->j0);
    if (!BANDS)
        mask_edge(s, BM, edge, a->Sk, t->s.hi, now->i0, row0, key);
    else if (edge)
        mask_band(s, BM, &t->s, now->i0, row0, t->j0, key);
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
    const uint32_t k_columns = SPLIT_ROWS ? 0 : consumer * (WIDE ? 2 * BN * 128 : BN * 128);
    const uint64_t k_apart = operand_descriptor(MEMBER_ADDRESS(shared, k) + BN * 128 + consumer * (APART * 2), 0);
    float dk[D / 2], dv[DV / 2], s[BM / 2], dp[DP_ROWS / 2], dq[COLUMNS / 2];
    uint32_t pr[BM / 4], ds[DP_ROWS / 4]; /* P and dS, rounded */
    float2 ahead[BM / 2] = {}; /* lse2, every fourth as `statistics` has it; LSE_AHEAD are loaded a step before */
#pragma unroll
    for (int i = 0; i < D / 2; ++i) dk[i] = 0.0f;
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) dv[i] = 0.0f;

    if (t->steps) {
        mbarrier_wait(MEMBER_ADDRESS(shared, k_full), (uint32_t)t->kv_phase);
        mbarrier_wait(MEMBER_ADDRESS(shared, v_full), (uint32_t)t->kv_phase);
    }
    if (BANDS && t->j0 + BN > t->s.Sk && t->steps)
        clear_tails(MEMBER_ADDRESS(shared, k), MEMBER_ADDRESS(shared, v), BN, t->s.Sk - t->j0);
    if (LSE_AHEAD) load_lse2_ahead(ahead, t, 0, shared, memory, threadIdx.x);
    row_cursor rows = first_rows(t);
    clear_rows_ahead(t, &rows, 0, shared);
    if (!BY_HEADS && t->steps) mbarrier_wait(MEMBER_ADDRESS(shared, mean_full), (uint32_t)t->kv_phase);
    const int has_mean = (BY_HEADS || t->steps) && load_shared_word(MEMBER_ADDRESS(shared, has_mean));
    const uint32_t k_of_dq = shared + (uint32_t)(has_mean ? K_OF_DQ : offsetof(shared_memory, k));
    const uint64_t k_depth = operand_descriptor(k_of_dq + k_columns, 0);
    if (TWO_K_TILES && has_mean) {
        if (BANDS && t->j0 + BN > t->s.Sk) {
            clear_rows(k_of_dq, PANELS, BN, t->s.Sk - t->j0, (int)threadIdx.x - 128, CONSUMER_THREADS);
            named_barrier_sync(CLEARED, CONSUMER_THREADS);
        }
        centre_tile(MEMBER_ADDRESS(shared, k_of_dq), PANELS, K_PANEL, memory->key_mean);
        named_barrier_sync(CLEARED, CONSUMER_THREADS);
    }
    uint32_t own = threadIdx.x % 128;
    if (HOLDS_THREAD) asm volatile("" : "+r"(own));
    for (int n = 0; n < t->steps; ++n) {
        uint32_t thread = own;
        asm volatile("" : "+r"(number), "+r"(thread)); /* hides them: what depends on them is recomputed */
        if (HIDES_SHARED) asm volatile("" : "+r"(shared));
        const int key = first_key(t, consumer, thread), row0 = (int)(thread % 4 * 2);
        const step now = step_at(&rows, t, n);
        const uint32_t q = ELEMENT_ADDRESS(shared, q, now.stage), d_o = ELEMENT_ADDRESS(shared, d_o, now.stage);
        const float2 *const lse2 = statistics(memory->lse2[now.stage], row0);
        const float2 *const delta = statistics(memory->delta[now.stage], row0);
        mbarrier_wait(ELEMENT_ADDRESS(shared, q_full, now.stage), now.parity);
        if (BEGINS_WITH_L) begin_rows(s, lse2);
        wgmma_fence();
        keys_by_rows(s, BM, D, k_keys, K_PANEL, operand_descriptor(q, 0), BEGINS_WITH_L);
        wgmma_commit();
        mbarrier_wait(ELEMENT_ADDRESS(shared, do_full, now.stage), now.parity);
        wgmma_fence();
        keys_by_rows(dp, DP_ROWS, DV, v_keys, 64, operand_descriptor(d_o, 0), 0);
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
            hide(s, a, t, &now, row0, key);
            if (BEGINS_WITH_L) {
                probabilities(s, DP_ROWS / 2, unit);
                if (!WIDE) round_pairs(pr, s, BM / 2);
            } else {
#pragma unroll
                for (int i = LSE_AHEAD; i < BM / 8; ++i) ahead[4 * i] = lse2[4 * i];
                exponentials((float(*)[4])s, BM / 8, BIASED ? LOG2E : unit, ahead);
                PIN(s, BM / 2);
            }
            /* Again: ptxas moves the wait for dP up to the last branch, which of head_dim 64 does no harm. */
            if (!HIDES_SHARED) mbarrier_wait(ELEMENT_ADDRESS(shared, do_full, now.stage), now.parity);
        }
        int ds_stage = 0;
#pragma unroll
        for (int part = 0; part < DP_PARTS; ++part) {
            const int row = part * DP_ROWS;
            wgmma_wait(0);
            PIN(dp, DP_ROWS / 2);
            if (GENERAL) {
                general_gradients(pr, ds, s, dp, BM, lse2, delta, keep, bwd, &t->s, &at, edge);
            } else {
                /* not before, where there were no registers for pr */
                if (!BEGINS_WITH_L || WIDE) round_pairs(pr + row / 4, s + row / 2, DP_ROWS / 2);
                score_gradients(ds, s + row / 2, dp, DP_ROWS, delta + row / 2);
            }
            if (part == 0) ds_stage = ds_stage_of(&now, number, shared);
#pragma unroll
            for (int i = 0; i < DP_ROWS / 16; ++i)
                stmatrix_x4_trans(ds_to(shared, consumer, thread) + ds_stage * DS_BYTES + (row / 16 + i) * 2048,
                                  ds + 4 * i);
            if (part + 1 < DP_PARTS) { /* not before dS is stored: ptxas would let both parts overlap */
                const int next = row + DP_ROWS;
                wgmma_fence();
                keys_by_rows(dp, DP_ROWS, DV, v_keys, 64, operand_descriptor(d_o, 0) + advance_rows(next / 16), 0);
                wgmma_commit();
                probabilities(s + next / 2, DP_ROWS / 2, unit);
                mbarrier_wait(ELEMENT_ADDRESS(shared, do_full, now.stage), now.parity); /* as above */
            }
        }

        /* dV is issued before the proxy fence, so that the fence costs nothing. */
        wgmma_fence();
        add_to_dv(dv, pr, operand_descriptor(d_o, BM * 128));
        wgmma_commit();
        async_proxy_fence();
        named_barrier_sync(DS_WRITTEN, CONSUMER_THREADS);
        const uint32_t ds_tile = ELEMENT_ADDRESS(shared, ds, ds_stage);
        wgmma_fence();
        /* WIDE: a part, while dV has the registers of P */
        dq_product(WIDE ? dq + 32 : dq, WIDE ? APART : COLUMNS, operand_descriptor(ds_tile + ds_rows, 0),
                   WIDE ? k_apart : k_depth);
        wgmma_commit();
        wgmma_wait(1); /* dV */
        PIN_INTEGERS(pr, BM / 4);
        mbarrier_arrive_if(ELEMENT_ADDRESS(shared, do_empty, now.stage), leads(thread));
        wgmma_fence();
        if (WIDE) {
            dq_product(dq, COLUMNS - APART, operand_descriptor(ds_tile, 0), k_depth);
            wgmma_commit();
        }
        add_to_dk(dk, ds, operand_descriptor(ds_tile + consumer * 8192, 0), operand_descriptor(q, BM * 128));
        wgmma_commit();
        float sums[4];
        if (!TWO_K_TILES && has_mean) sum_rows(sums, ds_tile + ds_rows, thread);
        wgmma_wait(1); /* dQ */
        if (DS_STAGES == 1 && !WIDE) release_ds(shared, leads(thread));
        if (!TWO_K_TILES && has_mean) {
            PIN(dq, COLUMNS / 2);
            subtract_means(dq, sums, memory->key_mean, consumer, thread);
        }
        if (LSE_AHEAD) load_lse2_ahead(ahead, t, n + 1, shared, memory, thread);
        pass_dq(p, t, &now, number, shared, consumer, thread, dq);
        next_rows(&rows, t, p);
        clear_rows_ahead(t, &rows, n + 1, shared);
        wgmma_wait(0); /* dK */
        PIN_INTEGERS(ds, DP_ROWS / 4);
        if (WIDE) release_ds(shared, leads(thread));
        mbarrier_arrive_if(ELEMENT_ADDRESS(shared, q_empty, now.stage), leads(thread));
    }
    PIN(dk, D / 2);
    PIN(dv, DV / 2);
    store_keys(p, number, shared, consumer, dk, dv);
}

#if K_VARIANT == FATTNI_VARIANT_SHORT || K_VARIANT == FATTNI_VARIANT_HEADS || K_VARIANT == FATTNI_VARIANT_HEADS_FULL
#include "bwd/cuda/sm90/bwd_sm90_short.cuh"
#else
#include "bwd/cuda/sm90/bwd_sm90_items.cuh"
#endif

DESCRIBE_KERNEL_THAT_WAITS(kernel_args, SHARED_BYTES, CTAS);
