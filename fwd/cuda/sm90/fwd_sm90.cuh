/* Forward attention for Hopper: TMA, wgmma, one producer warpgroup and two or three consumer warpgroups.

   S = Q K^T, P = exp(scale S - m), O = P V / l, L = m + ln l, with an online softmax over key blocks from right to
   left, so that the blocks that need a mask come first.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; q, k, v with strides that tensor maps can
               take (fattni_sm90_fits), o and lse any.
   CTAs        one per SM, persistent. A tile is BM rows of one (b, h). Full: tiles at a fixed stride; all others:
               the longest first, or as schedule.order says, from an atomic counter.
   Threads     warpgroup 0 is the producer, of which one warp loads. Each consumer warpgroup owns 64 rows of the tile
               and all keys. Layout of S and O in registers: core/ptx/wgmma.h.
   Shared      struct shared_memory. K and V have two stages each, four at d 64. Up to d 128 Q has two stages, too, and
               O a buffer of its own. Above, Q has one stage: each consumer's rows are loaded as soon as it has read the
               last tile's, from L2, to which they were prefetched. V and O may be narrower than Q and K (d 192/128).
   Pipeline    one loop over the key blocks of all tiles. S(n) is issued before P V(n-1), also across tiles, and the
               softmax of block n overlaps P V(n-1); so a tile's O is stored during the next tile's first softmax.
               Warpgroup order barriers let the consumers issue their products one after the other
               (FlashAttention-3's ping-pong). O is rescaled while S runs, or before S is issued where products
               take all of the time (PRODUCTS_TOGETHER).
   Softmax     a thread's two rows one after the other: the first one's exponentials overlap the second one's maximum
               and P V of the block before; up to d 64, where P V is over by then, both at once. P is relative to
               a maximum that is updated only where that matters (FlashAttention-4's conditional rescaling, with a
               bound on the error: rescale_threshold); then O is multiplied by 2^(old - new maximum). Blocks that
               cross an edge of the mask, and all blocks until every maximum of the warp is positive, take the exact
               path: maxima of floats, rows without keys.
   Store       O by stmatrix to shared memory in the middle of the next tile's first softmax and from there by TMA,
               16 rows of a warp at a time; above d 128 in two parts where shared memory has room (d 192/128, short
               kernels of d 256), and otherwise from registers, 16 bytes per thread.
   Rounding    P to the input dtype before P V, unscaled; everything else fp32.
   Variants    full, causal and short have no other feature; banded has windows, lengths, sink and merge, parts also
               row blocks whose keys are divided among tiles (fwd_sm90_parts.cuh), general also
               softcap, ALiBi, bias and dropout, as uniform branches. biased is banded with a bias, whose tile
               is loaded beside K and V, one stage with the rows of each consumer.
   ALiBi       is what the accumulators of S start from; beside a softcap or a bias it is added to S instead.
   Softcap     of small scores: a polynomial whose last multiplication is the exponent's multiply-add; otherwise, and
               beside other terms, general_scores.

   F8          operands are E4M3 codes (fwd_sm90_f8.cuh, fwd_sm90_scales.cuh): half the bytes, V transposed by the
               quantiser, a scale per row of Q. A second warp of the producer loads scales.
   INT8        beside F8: Q and K are integers (fwd_sm90_i8.cuh), with scales of K per 32 keys.

   Instances: fwd_kernels.def. Macros in: cmake/instance.cu.in. */
#ifndef F8
#define F8 0 /* E4M3 operands: fwd_sm90_f8.cuh */
#endif
#ifndef INT8
#define INT8 0 /* of Q and K: integers, fwd_sm90_i8.cuh */
#endif
#define HAS_BIAS (K_D <= 128)
#define TAKES_PARTS (K_VARIANT == FATTNI_VARIANT_PARTS)
#include "core/device/describe.cuh"
#include "fwd/cuda/fwd_args.h"
#include "core/ptx/grid.h"
#include "core/ptx/thread.h"
#include "core/device/sm90_bias.cuh"

enum {
    D = K_D,   /* columns of Q and K */
    DV = K_DV, /* of V and O */
    BM = K_BM,
    BN = K_BN,
    THREADS = 32 * K_WARPS,
    CONSUMERS = K_WARPS / 4 - 1,
    CAUSAL = K_VARIANT == FATTNI_VARIANT_CAUSAL || K_VARIANT == FATTNI_VARIANT_SHORT,
    BANDS = K_VARIANT >= FATTNI_VARIANT_BANDED,
    GENERAL = K_VARIANT == FATTNI_VARIANT_GENERAL,
    BIASED = K_VARIANT == FATTNI_VARIANT_BIASED,
    COUNTED = CAUSAL || BANDS,                         /* tiles come from the counter */
    PANELS = (DV + 63) / 64,                           /* of V and O */
    ROW = F8 ? FATTNI_FWD_F8_COLUMNS(D) : 128,         /* bytes of a row of a panel of Q and K */
    INPUTS = F8 ? D / ROW : (D + 63) / 64,             /* panels of Q and K, */
    COLUMNS = F8 ? ROW : 64,                           /* their columns */
    STEP = F8 ? 32 : 16,                               /* depth of a product */
    Q_ROWS = FATTNI_FWD_SM90_Q_ROWS(K_VARIANT, D, BM), /* of one load */
    Q_STAGES = Q_ROWS < BM ? 1 : 2,
    KV_STAGES = D <= 64 && !BIASED && !F8 ? 4 : 2, /* where shared memory has room */
    Q_BY_PANELS = Q_STAGES == 1 && !GENERAL, /* a barrier for each panel of Q; general has no registers for that */
    ROWS_TOGETHER = D <= (F8 ? 128 : 64),    /* softmax of both rows at once: P V of the block before is over by then */
    PRODUCTS_TOGETHER =
        D > 128 && !F8, /* S and P V are issued without a pause in between: they fill the time of a block */
    Q_BYTES = INPUTS * BM * ROW,
    K_BYTES = INPUTS * BN * ROW,
    V_BYTES = F8 ? DV * BN : PANELS * BN * 128,
    STAGED_O = F8 || (FATTNI_FWD_SM90_STAGES_O(DV, BN) &&
                      !(BIASED && DV > 128)), /* O is stored through shared memory; otherwise that is full */
    O_PARTS = D > 128 ? 2 : 1,
    O_PANELS = PANELS / O_PARTS,       /* parts of O go through its buffer one after the other */
    O_BYTES = O_PANELS * 16 * 128,     /* of a warp */
    BIAS_BYTES = BN / 64 * (64 * 128), /* of a consumer */
    /* A consumer leaves out what only others' rows need (pass_block): the first block of a tile, or all others. Of two
       consumers one alone is not faster at d 128, and ptxas' order a hundredth slower. */
    PASSES_OTHERS = (CONSUMERS == 3 || D > 128) && !BIASED && !F8,
    PASSES_FIRST = PASSES_OTHERS && CAUSAL && BM - 64 >= BN - 16,
    TILE_SLOTS = 4 /* a tile is stored when the next but one may have been announced */
};

/* Named barriers; 0 is __syncthreads. Each consumer has its own, at + consumer. ORDER_BARRIER is the warpgroup order
   barrier: a consumer waits at its own before it issues its products, and arrives at the next one's afterwards.
   TAIL_BARRIER: all threads of the consumer have cleared their part of V. ANNOUNCED_BARRIER, one for even and one for
   odd tiles: the producer's first warp has announced a tile to its second one. */
enum named_barrier { ORDER_BARRIER = 1, TAIL_BARRIER = 4, ANNOUNCED_BARRIER = 8 };
enum { ORDER_THREADS = 2 * 128, TAIL_THREADS = 128, ANNOUNCED_THREADS = 64 };
static_assert(CONSUMERS <= TAIL_BARRIER - ORDER_BARRIER, "named barriers");

/* A tile as the producer announces it to the consumers. */
typedef struct __align__(32) tile_slot {
    int i0, h, b, blocks;  /* as in struct tile */
    int first, Sq, Sk, q0; /* BANDS: its first block; of its sequence */
#if TAKES_PARTS
    int part, parts;
#endif
}
tile_slot;

#include "fwd/cuda/sm90/fwd_sm90_scales.cuh"

/* Parts that the consumers have stored, for the warp that tells other CTAs so (publish_parts). */
typedef struct part_board {
    uint64_t full, empty;
    int row_block[2];   /* of an even and of an odd part; below 0: there are no more */
    int count[BM / 16]; /* parts that a warp has stored */
} part_board;

/* Tiles of Q, K, V and O are panels of 64 columns (core/device/sm90_tile.cuh). Q has two barriers of each kind: for its
   two stages or, where it has one stage, for the rows of the two consumers. */
typedef struct shared_memory {
    unsigned char q[Q_STAGES][Q_BYTES], k[KV_STAGES][K_BYTES], v[KV_STAGES][V_BYTES];
    unsigned char o[STAGED_O ? BM / 16 : 0][O_BYTES];       /* of each warp */
    unsigned char bias[BIASED ? CONSUMERS : 0][BIAS_BYTES]; /* of each consumer's rows */
    __align__(16) float k_scales[INT8 ? SCALE_STAGES : 0][BN / KEYS_OF_SCALE];
    uint64_t q_full[2], q_empty[2];
    uint64_t k_full[KV_STAGES], k_empty[KV_STAGES], v_full[KV_STAGES], v_empty[KV_STAGES];
    uint64_t q_panel_full[3][2]; /* Q_BY_PANELS: of panels 1, 2 and 3 */
    uint64_t bias_full[BIASED ? CONSUMERS : 0], bias_empty[BIASED ? CONSUMERS : 0];
    tile_slot tiles[TILE_SLOTS];
    int64_t lse[TILE_SLOTS]; /* element of lse at which the tile's rows begin */
    float shifts[BM];        /* what a row's scores are relative to (shift_row) */
    tile_scales scales[F8 ? TILE_SLOTS : 0];
#if TAKES_PARTS
    part_board parts;
#endif
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(BM == 64 * CONSUMERS && BN % 16 == 0 && D % 16 == 0 && DV % 16 == 0, "tile shape");
static_assert(offsetof(shared_memory, k) % 1024 == 0 && offsetof(shared_memory, v) % 1024 == 0 &&
                  offsetof(shared_memory, o) % 1024 == 0 && K_BYTES % 1024 == 0 && V_BYTES % 1024 == 0 &&
                  O_BYTES % 1024 == 0 && (!BIASED || (offsetof(shared_memory, bias) % 1024 == 0 && BN % 64 == 0)),
              "swizzled tiles start at multiples of 1024");
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");
static_assert(!STAGED_O || O_PARTS * O_PANELS == PANELS, "parts of O");

/* Scores of rows without shifts are relative to 0. Where such a row's maximum, in units of log2, is beyond this, floats
   are 32 apart, and the exponents of its P might be off by as much: O and L become NaN (NUMERICS.md). */
#define LARGEST_MAX 268435456.0f

/* Addresses of mbarriers. kv counts key blocks over all tiles; `part` of Q is a stage or, where it has one stage, the
   rows of a consumer. */
DEVICE uint32_t q_full(uint32_t shared, int part) { return ELEMENT_ADDRESS(shared, q_full, part); }
DEVICE uint32_t q_panel_full(uint32_t shared, int part, int panel) {
    return panel ? ELEMENT_ADDRESS(shared, q_panel_full, panel - 1) + 8 * part : q_full(shared, part);
}
DEVICE uint32_t q_empty(uint32_t shared, int part) { return ELEMENT_ADDRESS(shared, q_empty, part); }
DEVICE uint32_t k_full(uint32_t shared, uint32_t kv) { return ELEMENT_ADDRESS(shared, k_full, kv % KV_STAGES); }
DEVICE uint32_t k_empty(uint32_t shared, uint32_t kv) { return ELEMENT_ADDRESS(shared, k_empty, kv % KV_STAGES); }
DEVICE uint32_t v_full(uint32_t shared, uint32_t kv) { return ELEMENT_ADDRESS(shared, v_full, kv % KV_STAGES); }
DEVICE uint32_t v_empty(uint32_t shared, uint32_t kv) { return ELEMENT_ADDRESS(shared, v_empty, kv % KV_STAGES); }
DEVICE uint32_t kv_parity(uint32_t kv) { return kv / KV_STAGES & 1; }
DEVICE uint32_t q_parity(uint32_t tile) { return tile / Q_STAGES & 1; }
/* The part of Q that a consumer reads for tile n. */
DEVICE int part_of(int n, int consumer) { return Q_STAGES > 1 ? n % Q_STAGES : consumer; }

#include "fwd/cuda/sm90/fwd_sm90_tiles.cuh"
#include "fwd/cuda/sm90/fwd_sm90_producer.cuh"
#include "fwd/cuda/sm90/fwd_sm90_keyless.cuh"

/* ---- consumers ---- */

/* arrive_once_per_warp() on a condition, for the end of a loop (mbarrier_arrive_if says why). */
DEVICE void arrive_once_per_warp_if(uint32_t bar, int condition) { mbarrier_arrive_if(bar, condition && is_leader()); }

/* The first of a thread's two rows in the tile; the other one is eight rows below. */
DEVICE int first_row(int thread, int consumer) { return consumer * 64 + thread % 128 / 32 * 16 + thread % 32 / 4; }

/* The online softmax of a thread's two rows. */
typedef struct row_state {
    float m[2];      /* what P is relative to, in units of log2: the maximum so far, or an earlier one. Rounded once, so
                        that P and L refer to the same number */
    float l[2];      /* sum of this thread's P */
    float alpha[2];  /* what O is to be multiplied by */
    float threshold; /* m is updated when a score is more than this above it; -inf (always) where rows have shifts */
    int updated;     /* whether m was, in a row of this warp */
} row_state;

/* S (+)= Q K^T, 64 x BN. Q_BY_PANELS: the first S of a tile starts while Q is still arriving; it must `await` each
   panel. */
DEVICE void scores(float s[BN / 2], uint64_t q, uint64_t k, int add, uint32_t shared, int part, uint32_t parity,
                   int await) {
#pragma unroll
    for (int e = 0; e < D / STEP; ++e) {
        if (Q_BY_PANELS && e > 0 && e % 4 == 0) {
            if (await) mbarrier_wait(q_panel_full(shared, part, e / 4), parity);
            wgmma_fence();
        }
        PASTE(PRODUCT_S, K_BN)(s, q + advance_columns(e, BM), k + advance_columns(e, BN), e > 0 ? 1 : add);
    }
}
/* O (+)= P V. */
DEVICE void accumulate(float o[DV / 2], const uint32_t p[P_WORDS], uint64_t v, int add) {
#pragma unroll
    for (int e = 0; e < BN / STEP; ++e)
        PASTE(PRODUCT(rs), K_DV)(o, p + 4 * e, v + (F8 ? advance_keys(e) : advance_rows(e)), e > 0 ? 1 : add);
}

/* S becomes scale S + bias, scores in natural units: the bias of block kv. */
DEVICE void add_bias_tile(float s[BN / 2], uint32_t shared, uint32_t kv, int consumer, float scale) {
    mbarrier_wait(ELEMENT_ADDRESS(shared, bias_full, consumer), kv & 1);
    const uint32_t loaded =
        add_bias_rows(s, BN, ELEMENT_ADDRESS(shared, bias, consumer), 64 * 128, scale, reload_thread_index());
    arrive_once_per_warp(after_load(ELEMENT_ADDRESS(shared, bias_empty, consumer), loaded));
}

/* Masked scores become -inf. Column 8i + e of the thread is visible to its first row where low <= 8i + e <= high, to
   its second row where low + 8 <= 8i + e <= high + 8, and to neither beyond `last`. */
DEVICE void mask(float s[BN / 2], int low, int high, int last) {
    const int high0 = min(high, last), high1 = min(high + 8, last);
#pragma unroll
    for (int i = 0; i < BN / 8; ++i)
#pragma unroll
        for (int e = 0; e < 2; ++e) {
            if (8 * i + e > high0 || (BANDS && 8 * i + e < low)) s[4 * i + e] = -INFINITY;
            if (8 * i + e > high1 || (BANDS && 8 * i + e < low + 8)) s[4 * i + 2 + e] = -INFINITY;
        }
}

/* The largest of this thread's scores in row e. */
DEVICE float maximum(const float s[BN / 2], int e) {
    float x[2] = {s[2 * e], s[2 * e + 1]};
#pragma unroll
    for (int n = 2; n < BN / 4; ++n) x[n % 2] = fmaxf(x[n % 2], s[n / 2 * 4 + 2 * e + n % 2]);
    return fmaxf(x[0], x[1]);
}
/* The same if it is positive, otherwise any of the scores: floats compared as integers, which are in the same order as
   long as one is positive. Three at a time, in half the instructions. */
DEVICE float positive_maximum(const float s[BN / 2], int e) {
    int x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = __float_as_int(s[n / 2 * 4 + 2 * e + n % 2]);
#pragma unroll
    for (int n = 4; n < BN / 4; n += 2)
        x[n / 2 % 4] =
            __vimax3_s32(x[n / 2 % 4], __float_as_int(s[n / 2 * 4 + 2 * e]), __float_as_int(s[n / 2 * 4 + 2 * e + 1]));
    return __int_as_float(max(x[3], __vimax3_s32(x[0], x[1], x[2])));
}
/* Of both rows. */
DEVICE float largest(const float s[BN / 2]) { return fmaxf(positive_maximum(s, 0), positive_maximum(s, 1)); }

/* FAST_PATH: no mask; m of each row is at least its base. EXACT_PATH: rows may see no key. CAPPED_PATH: FAST_PATH with
   a softcap. */
enum softmax_path { FAST_PATH, EXACT_PATH, CAPPED_PATH };

/* Score x of row e in units of log2. */
DEVICE float log2_score(float x, const logit_scale *logits, int e, enum softmax_path path) {
    if (path == CAPPED_PATH) return __fmul_rn(x, cap_factor(x, logits));
    if (F8) return __fmul_rn(x, logits->row_unit[e]);
    return GENERAL ? fmaf(x, logits->unit, logits->base[e]) : __fmul_rn(x, logits->unit);
}
/* The largest of this thread's scores in row e, in units of log2. */
DEVICE float largest_score(const float s[BN / 2], const logit_scale *logits, int e, enum softmax_path path) {
    if (INT8 && path == FAST_PATH) return largest_of_sums(s, logits, e);
    return log2_score(path == EXACT_PATH ? maximum(s, e) : positive_maximum(s, e), logits, e, path);
}
/* m of row e becomes the maximum of m and `high`, which is the same in the lane quad. */
DEVICE void update_max(row_state *r, float high, int e, enum softmax_path path) {
    const float m = fmaxf(r->m[e], high);
    r->alpha[e] = exp2_approx(r->m[e] - (path == EXACT_PATH && m == -INFINITY ? 0.0f : m));
    r->l[e] *= r->alpha[e];
    r->m[e] = m;
}
/* How far above m a score may be. A score whose P is more than DOMINANT of its thread's sum must become m: the rounding
   of its P would show in O, and P = 1 has none. And P must stay in the range of F16. */
#define DOMINANT (F8 ? 0.25f : 0.5f)
DEVICE float rescale_threshold(const row_state *r) {
    return fminf(fmaxf(log2_approx(DOMINANT * fminf(r->l[0], r->l[1])) - P_LOG2, 0.0f), F8 ? P_SLACK : 8.0f);
}

/* Row e of the scores becomes P. */
DEVICE void exponentials(float s[BN / 2], row_state *r, const logit_scale *logits, int e, enum softmax_path path) {
    const float m = path == EXACT_PATH && r->m[e] == -INFINITY ? 0.0f : r->m[e];
    const float base = GENERAL ? logits->base[e] - m : F8 ? P_LOG2 - m : -m;
    float sum[2] = {0.0f, 0.0f};
#pragma unroll
    for (int n = 0; n < BN / 4; ++n) {
        float *const x = s + n / 2 * 4 + 2 * e + n % 2;
        const float unit = path == CAPPED_PATH         ? cap_factor(*x, logits)
                           : INT8 && path == FAST_PATH ? sum_unit(logits, e, n / 2)
                                                       : unit_of(logits, e);
        *x = exp2_approx(fmaf(*x, unit, INT8 && path == FAST_PATH ? fmaf(-ORIGIN, unit, base) : base));
        sum[n % 2] += *x;
    }
    r->l[e] += sum[0] + sum[1];
}
/* Whether m of some row of this warp is below the row's base. Then FAST_PATH, which only finds maxima of positive
   products, might miss a score above m. */
DEVICE int any_below(const row_state *r, const float base[2]) {
    return __any_sync(ALL_LANES, !(r->m[0] >= base[0] && r->m[1] >= base[1] && r->threshold >= 0.0f));
}

DEVICE int has_shifts(const row_state *r) { return r->threshold == -INFINITY; }
/* Whether shift_row has to be called for the rows of this warp; `high`: the largest scores of this thread's rows. */
DEVICE int any_far(const row_state *r, const float high[2]) {
    return __any_sync(ALL_LANES, has_shifts(r) || is_far(high[0]) || is_far(high[1]));
}
/* Scores that are too large for floats to resolve (is_far) become small: from those of row e a shift is subtracted. It
   is 0 for a row whose maximum is not far, and is chosen anew for a row's first block and where scores are far above
   it. Shifts are products q.k, kept in shared memory, for all rows of a warp or for none. Gives the row's largest score
   afterwards, in units of log2. */
DEVICE float shift_row(float s[BN / 2], row_state *r, const logit_scale *logits, shared_memory *smem, int e) {
    const int thread = reload_thread_index(), row = (thread / 128 - 1) * 64 + first_row(thread, 0);
    float *const shift = &smem->shifts[row + 8 * e];
    const float raw = quad_max(maximum(s, e)), old = has_shifts(r) ? *shift : 0.0f,
                distance = (raw - old) * unit_of(logits, e);
    float base = old;
    if (is_far(distance) && (distance > 0 || r->m[e] == -INFINITY))
        base = is_far(raw * unit_of(logits, e)) ? raw : 0.0f;
    __syncwarp(); /* all threads of the row have read the old one */
    if (!has_shifts(r)) store_same(&smem->shifts[row + 8 * (1 - e)], 0.0f);
    store_same(shift, base);
    __syncwarp();
    r->threshold = -INFINITY;
    r->m[e] += (old - base) * unit_of(logits, e);
#pragma unroll
    for (int n = 0; n < BN / 4; ++n) s[n / 2 * 4 + 2 * e + n % 2] -= base;
    return fmaf(raw - base, unit_of(logits, e), GENERAL ? logits->base[e] : 0.0f);
}

/* O relative to the new m. */
DEVICE void rescale(float o[DV / 2], row_state *r) {
    if (!r->updated) return;
    if (!has_shifts(r)) r->threshold = rescale_threshold(r);
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) o[i] *= r->alpha[i % 4 / 2];
}

#include "fwd/cuda/sm90/fwd_sm90_epilogue.cuh"

/* What a softmax waits for and releases in its middle: the next K, and V of the block before. */
typedef struct pipeline_state {
    uint32_t k_full, k_parity, v_empty;
    int await_k, free_v, shifted; /* shifted: the rows of this block have had shift_row */
    uint32_t zero;                /* an argument of the kernel: the compiler does not know that it is 0 */
} pipeline_state;
/* The softmax of a block: S becomes P, rounded. Row 0's exponentials overlap P V of the block before and row 1's
   maximum; after the wait for that P V, row 1's follow. ROWS_TOGETHER: both maxima come before the wait, all
   exponentials after it. The wait for the next K is here and not before its use because its branch keeps the compiler
   from moving wgmma_wait up.
   Rows with far scores have to be shifted first, which must cost other rows nothing. ROWS_TOGETHER finds out before the
   wait and computes the maxima again after it; the others return 0 after the wait, the caller shifts the rows and calls
   again. */
DEVICE int softmax(uint32_t p[P_WORDS], float s[BN / 2], float o[DV / 2], row_state *r, const logit_scale *logits,
                   enum softmax_path path, pipeline_state pipe, const dropout *dropping, epilogue_state *last_o,
                   shared_memory *smem) {
    const int k_arrived = mbarrier_test(pipe.k_full, pipe.k_parity);
    const float high[2] = {largest_score(s, logits, 0, path), largest_score(s, logits, 1, path)};
    r->alpha[0] = 1.0f;
    if (ROWS_TOGETHER) r->alpha[1] = 1.0f;
    const int above = high[0] > r->m[0] + r->threshold || (ROWS_TOGETHER && high[1] > r->m[1] + r->threshold);
    r->updated = path == EXACT_PATH || __any_sync(ALL_LANES, above);
    const row_state before = *r;
    if (r->updated) {
        update_max(r, quad_max(high[0]), 0, path);
        if (ROWS_TOGETHER) update_max(r, quad_max(high[1]), 1, path);
    }
    const int far = path == EXACT_PATH && !dropping && !pipe.shifted && any_far(r, high);
    if (!ROWS_TOGETHER && far) {
        wgmma_wait(0);
        PIN(o, DV / 2);
        *r = before;
        return 0;
    }
    if (!ROWS_TOGETHER) exponentials(s, r, logits, 0, path);
    if (pipe.await_k && !k_arrived) mbarrier_wait(pipe.k_full, pipe.k_parity);
    wgmma_wait(0);
    PIN(o, DV / 2);
    if (pipe.free_v) arrive_once_per_warp(pipe.v_empty);
    if (ROWS_TOGETHER && far) {
        *r = before;
#pragma unroll
        for (int e = 0; e < 2; ++e) update_max(r, shift_row(s, r, logits, smem, e), e, path);
    }
    if (ROWS_TOGETHER) {
        /* Makes m depend on O, so that ptxas leaves the exponentials after the wait. */
        if (path == FAST_PATH)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                r->m[e] = __int_as_float(__float_as_int(r->m[e]) | (__float_as_int(o[0]) & (int)pipe.zero));
        exponentials(s, r, logits, 0, path);
    }
    if (path == EXACT_PATH) begin_store(last_o, o);
    if (!ROWS_TOGETHER) {
        const float row_high = quad_max(high[1]);
        const int updated = path == EXACT_PATH || __any_sync(ALL_LANES, row_high > r->m[1] + r->threshold);
        update_max(r, updated ? row_high : -INFINITY, 1, path);
        r->updated |= updated;
    }
    exponentials(s, r, logits, 1, path);
    if (F8)
        pack_codes(p, s);
    else
#pragma unroll
        for (int i = 0; i < BN / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
    if (dropping) drop(p, *dropping); /* here, so that it overlaps the exponentials */
    if (path == EXACT_PATH) end_store(last_o, o);
    return 1;
}
/* The buffer may hold anything beyond a sequence's last key, and 0 times NaN is NaN: zeros into those rows of key block
   kv of V, the tile's rightmost and perhaps the sequence's last. Each consumer does it for itself. */
DEVICE void clear_tail(const fattni_attention_args *a, const volatile tile_slot *from, uint32_t shared, uint32_t kv,
                       int consumer) {
    const tile t = read_tile(from);
    const int valid = read_sequence(a, from, t.b).Sk - (t.first + t.blocks - 1) * BN;
    if (F8 || valid >= BN || !(a->cu_seqlens_k.p || a->seqlens_k.p)) return; /* the columns of F8 are 0 there */
    clear_rows(ELEMENT_ADDRESS(shared, v, kv % KV_STAGES), PANELS, BN, max(valid, 0), (int)threadIdx.x % 128, 128);
    named_barrier_sync(TAIL_BARRIER + consumer, TAIL_THREADS);
}

/* The blocks of keys [begin, end) that need no mask in any row of a consumer. */
typedef struct span {
    int begin, end;
} span;
DEVICE span unmasked_blocks(const fattni_attention_args *a, const volatile tile_slot *from, const tile *t,
                            int consumer) {
    const sequence s = read_sequence(a, from, t->b);
    const int row = t->i0 + consumer * 64;
    span x = {0, s.Sk / BN};
    if (COUNTED) x.end = min(x.end, max(0, row + s.hi + 1) / BN);
    if (BANDS) x.begin = (max(0, row + 63 + s.lo) + BN - 1) / BN;
    return x;
}

/* Whether no row of a consumer sees the rightmost block of a tile that has others. */
DEVICE int sees_not_first(const fattni_attention_args *a, const volatile tile_slot *from, const tile *t, int consumer) {
    const int last_row = from->i0 + consumer * 64 + 63;
    return t->blocks > 1 && (t->blocks - 1) * BN > last_row + whole_sequence(a, 0, CAUSAL).hi;
}
/* A block without products: its turn to issue them is passed on at once, and stages are released when they are full,
   since until then the barriers may count for the block before. Of K block k and of V block v. */
DEVICE void pass_block(uint32_t shared, uint32_t k, uint32_t v, int order_barrier, int next_order_barrier) {
    named_barrier_sync(order_barrier, ORDER_THREADS);
    named_barrier_arrive(next_order_barrier, ORDER_THREADS);
    mbarrier_wait(k_full(shared, k), kv_parity(k));
    arrive_once_per_warp(k_empty(shared, k));
    mbarrier_wait(v_full(shared, v), kv_parity(v));
    arrive_once_per_warp(v_empty(shared, v));
}

DEVICE alibi_ramp tile_ramp(const fattni_attention_args *a, const volatile tile_slot *from, const tile *t,
                            int consumer) {
    const alibi_ramp none = {0.0f, 0};
    return GENERAL ? ramp_of(a, t->h, read_sequence(a, from, t->b).diagonal, t->i0 + consumer * 64) : none;
}
/* Of this thread's part of block j. */
DEVICE dropout dropout_of_block(const fattni_attention_args *a, const volatile tile_slot *from, int j, int consumer) {
    const tile t = read_tile(from);
    const int thread = reload_thread_index();
    return dropout_of(a, t.b, t.h, t.i0 + first_row(thread, consumer), j * BN + thread % 4 * 2);
}

DEVICE void consume(const fattni_fwd_sm90_args *p, uint32_t shared, shared_memory *smem, int consumer) {
    const fattni_attention_args *const a = &p->a;
    const int warp = (int)threadIdx.x / 32 % 4, lane = (int)threadIdx.x % 32;
    const int offset = warp * 16 + lane / 4 - lane % 4 * 2; /* first row less first column of this thread */
    const int order_barrier = ORDER_BARRIER + consumer, next_order_barrier = ORDER_BARRIER + (consumer + 1) % CONSUMERS;
    const int terms = GENERAL && (a->softcap > 0 || a->bias.p || is_steep(a)), alibi = GENERAL && a->alibi.p && !terms;
    const int drops = GENERAL && a->drop_T > 0;
    const int fast = !GENERAL || !(a->bias.p || (terms && (a->alibi.p || drops)) || a->softcap > FATTNI_LARGE_CAP),
              capped = fast && terms;
    const float inner = capped ? __fdividef(a->scale, a->softcap) : 0.0f;
    logit_scale linear = {BIASED || terms ? LOG2E : p->scale_log2, {0.0f, 0.0f}, 0.0f, 0.0f};
    const uint64_t q_rows = row_descriptor(MEMBER_ADDRESS(shared, q) + consumer * 64 * ROW, ROW),
                   k_keys = row_descriptor(MEMBER_ADDRESS(shared, k), ROW),
                   v_keys = F8 ? row_descriptor(MEMBER_ADDRESS(shared, v), V_COLUMNS)
                               : operand_descriptor(MEMBER_ADDRESS(shared, v), BN * 128);
    float s[BN / 2], o[DV / 2];
    uint32_t pr[P_WORDS]; /* P, rounded */
    uint32_t kv = 0;      /* key blocks whose S was issued before this one */
    if (consumer == CONSUMERS - 1) named_barrier_arrive(ORDER_BARRIER, ORDER_THREADS); /* consumer 0 begins */
#pragma unroll
    for (int i = 0; i < DV / 2; ++i) o[i] = 0.0f;

    mbarrier_wait(q_full(shared, part_of(0, consumer)), 0);
    tile t = read_tile(slot_of(smem, 0));
#if TAKES_PARTS
    if (t.blocks == 0) post_part(shared, smem, consumer * 4 + warp, -1);
#endif
    if (t.blocks == 0) return;
    alibi_ramp ramp = tile_ramp(a, slot_of(smem, 0), &t, consumer);
    if (alibi) begin_scores(s, ramp.slope, ramp.corner - (t.first + t.blocks - 1) * BN, offset);
    if (INT8) begin_sums(s);
    mbarrier_wait(k_full(shared, 0), 0);
    wgmma_fence();
    scores(s, q_rows, k_keys, INT8 || alibi, shared, part_of(0, consumer), 0, 1);
    wgmma_commit();
    wgmma_wait(0);
    PIN(s, BN / 2);
    arrive_once_per_warp(k_empty(shared, 0));

    arrive_once_per_warp_if(q_empty(shared, part_of(0, consumer)), t.blocks == 1);

    /* One loop over the blocks of all tiles. At its top S of block j is complete, and P V of the block before, of this
       tile or of the last, is under way. */
    const row_state none = {{-INFINITY, -INFINITY}, {0.0f, 0.0f}, {0.0f, 0.0f}, 0.0f, 0};
    row_state r = none;
    o_scale last_scale = 0.0f;
    if (F8) read_units(&linear, &smem->scales[0], first_row(reload_thread_index(), consumer), p->scale_log2);
    span unmasked = unmasked_blocks(a, slot_of(smem, 0), &t, consumer);
    int fast_end = 0; /* the fast path is for blocks left of this one: none while any_below */
    int n = 0, j = t.first + t.blocks - 1, shifted = 0; /* shifted: this block's S has had shift_row */
    uint32_t passed = 0;                                /* blocks passed over before this one */
    for (;;) {
        int first = j == t.first + t.blocks - 1, last = j == t.first;
        const pipeline_state pipe = {k_full(shared, kv + 1),
                                     kv_parity(kv + 1),
                                     v_empty(shared, kv - 1 - passed),
                                     !last,
                                     kv > 0,
                                     shifted,
                                     p->zero};
        if (INT8) read_key_scales(&linear, smem->k_scales[kv % SCALE_STAGES]);
        if (BIASED && !shifted) add_bias_tile(s, shared, kv, consumer, a->scale);
        if (alibi) {
            find_base(&linear, ramp.slope, ramp.corner - j * BN, offset);
            fast_end = any_below(&r, linear.base) ? 0 : unmasked.end;
        }
        const int on_fast_path = fast && j < fast_end && (!BANDS || j >= unmasked.begin);
        if (on_fast_path && !capped && !drops) {
            softmax(pr, s, o, &r, &linear, FAST_PATH, pipe, 0, 0, smem);
        } else if (on_fast_path && !capped) {
            const dropout dropping = dropout_of_block(a, slot_of(smem, n), j, consumer);
            softmax(pr, s, o, &r, &linear, FAST_PATH, pipe, &dropping, 0, smem);
        } else if (on_fast_path && !shifted && all_within(s, largest(s), inner, CAP_LIMIT)) {
            const logit_scale cubic = capped_scale(a, inner);
            softmax(pr, s, o, &r, &cubic, CAPPED_PATH, pipe, 0, 0, smem);
        } else {
            const tile current = read_tile(slot_of(smem, n)); /* again, so that it is not kept in registers */
            const int thread = reload_thread_index(), row0 = first_row(thread, consumer);
            epilogue_state last_o = {p,
                                     slot_of(smem, n - 1),
                                     shared,
                                     row0,
                                     first && n > 0,
                                     last_scale,
                                     F8 ? &smem->scales[(n - 1) % TILE_SLOTS] : 0,
                                     TAKES_PARTS ? lse_of(smem, n - 1) : 0,
                                     smem};
            const int column = j * BN + thread % 4 * 2, row = current.i0 + row0;

            if (INT8 && !shifted) scale_sums(s, &linear);
            if (terms && !shifted) {
                const sequence seq = read_sequence(a, slot_of(smem, n), current.b);
                general_scores((float(*)[4])s, 0, BN / 8, 0, a, &seq, slope_of(a, current.h), current.b, current.h, row,
                               column);
            }
            if (j >= unmasked.end || (BANDS && j < unmasked.begin)) {
                const sequence seq = read_sequence(a, slot_of(smem, n), current.b);
                mask(s, row + seq.lo - column, row + seq.hi - column, seq.Sk - 1 - column);
            }
            if (drops) {
                const dropout dropping = dropout_of_block(a, slot_of(smem, n), j, consumer);
                const float high[2] = {log2_score(maximum(s, 0), &linear, 0, EXACT_PATH),
                                       log2_score(maximum(s, 1), &linear, 1, EXACT_PATH)};
                if (any_far(&r, high)) /* not in softmax: beside random numbers there are no registers for it */
                    shift_row(s, &r, &linear, smem, 0), shift_row(s, &r, &linear, smem, 1);
                softmax(pr, s, o, &r, &linear, EXACT_PATH, pipe, &dropping, &last_o, smem);
            } else if (!softmax(pr, s, o, &r, &linear, EXACT_PATH, pipe, 0, &last_o, smem)) {
                shift_row(s, &r, &linear, smem, 0), shift_row(s, &r, &linear, smem, 1);
                shifted = 1;
                continue;
            }
            shifted = 0;
            fast_end = any_below(&r, linear.base) ? 0 : unmasked.end;
            /* A tile in which this consumer has no rows ends here: its P V is garbage that nothing reads. */
            if (PASSES_OTHERS && first && !last &&
                current.i0 + consumer * 64 >= (BANDS ? slot_of(smem, n)->Sq : a->Sq)) {
                for (; j > t.first; --j, ++kv) pass_block(shared, kv + 1, kv, order_barrier, next_order_barrier);
                arrive_once_per_warp(q_empty(shared, part_of(n, consumer)));
                first = 0, last = 1;
            }
        }

        ++kv;
        const int stage = (n + last) % Q_STAGES, part = part_of(n + last, consumer);
        --j;
        passed = 0;
        if (last) { /* and the next tile's first S */
            mbarrier_wait(q_full(shared, part), q_parity(n + 1));
            t = read_tile(slot_of(smem, n + 1));
            ramp = tile_ramp(a, slot_of(smem, n + 1), &t, consumer);
            if (t.blocks) mbarrier_wait(k_full(shared, kv), kv_parity(kv));
            if (PASSES_FIRST && sees_not_first(a, slot_of(smem, n + 1), &t, consumer)) {
                pass_block(shared, kv, kv, order_barrier, next_order_barrier);
                ++kv, --t.blocks, passed = 1;
                mbarrier_wait(k_full(shared, kv), kv_parity(kv));
            }
            j = t.first + t.blocks - 1;
        }
        if (alibi) begin_scores(s, ramp.slope, ramp.corner - j * BN, offset);
        if (INT8) begin_sums(s);
        const uint32_t v = kv - 1 - passed; /* of P V */
        if (PRODUCTS_TOGETHER) {
            mbarrier_wait(v_full(shared, v), kv_parity(v));
            if (!first) rescale(o, &r);
        }
        named_barrier_sync(order_barrier, ORDER_THREADS);
        wgmma_fence();
        /* After the last tile the result is garbage that nothing reads. */
        scores(s, q_rows + stage * (Q_BYTES >> 4), k_keys + kv % KV_STAGES * (K_BYTES >> 4), INT8 || alibi, shared,
               part, q_parity(n + 1), last && t.blocks);
        wgmma_commit();
        if (!PRODUCTS_TOGETHER) {
            mbarrier_wait(v_full(shared, v), kv_parity(v));
            if (!first) rescale(o, &r); /* while S runs */
        }
        if (BANDS && first) clear_tail(a, slot_of(smem, n), shared, v, consumer);
        wgmma_fence();
        accumulate(o, pr, v_keys + v % KV_STAGES * (V_BYTES >> 4), !first);
        wgmma_commit();
        named_barrier_arrive(next_order_barrier, ORDER_THREADS);
        if (last) {
            last_scale = finish_rows(p, slot_of(smem, n), *lse_of(smem, n), first_row(reload_thread_index(), consumer),
                                     &r, &linear, smem, F8 ? &smem->scales[n % TILE_SLOTS] : 0);
            ++n;
            r = none;
            unmasked = unmasked_blocks(a, slot_of(smem, n), &t, consumer);
            if (F8)
                read_units(&linear, &smem->scales[n % TILE_SLOTS], first_row(reload_thread_index(), consumer),
                           p->scale_log2);
            fast_end = 0;
        }
        wgmma_wait(1);
        PIN(s, BN / 2);
        if (t.blocks == 0) break;
        arrive_once_per_warp(k_empty(shared, kv));
        arrive_once_per_warp_if(q_empty(shared, part), j == t.first);
    }
    wgmma_wait(0);
    PIN(o, DV / 2);
    epilogue_state last_o = {p,
                             slot_of(smem, n - 1),
                             shared,
                             first_row(reload_thread_index(), consumer),
                             1,
                             last_scale,
                             F8 ? &smem->scales[(n - 1) % TILE_SLOTS] : 0,
                             TAKES_PARTS ? lse_of(smem, n - 1) : 0,
                             smem};
    begin_store(&last_o, o);
    end_store(&last_o, o);
#if TAKES_PARTS
    post_part(shared, smem, last_o.row0 / 16, -1);
#endif
    if (STAGED_O && is_leader()) bulk_wait_read(); /* shared memory ends with the CTA */
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) K_NAME(const __grid_constant__ fattni_fwd_sm90_args p) {
    /* Not SHARED_MEMORY: these kernels are translated as alone only where a file has one such symbol. */
    extern __shared__ __align__(1024) unsigned char memory[];
    shared_memory *const smem = (shared_memory *)memory;
    const uint32_t shared = shared_address(memory);
    const int role = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int n = 1; n < INPUTS && Q_BY_PANELS; ++n)
            for (int part = 0; part < 2; ++part) mbarrier_init(q_panel_full(shared, part, n), 1);
        for (int n = 0; n < 2; ++n) {
            mbarrier_init(q_full(shared, n), F8 ? 1 + 32 : 1); /* F8: and the lanes of produce_scales */
            mbarrier_init(q_empty(shared, n), Q_STAGES > 1 ? 4 * CONSUMERS : 4); /* warps that read it */
        }
        for (int n = 0; n < KV_STAGES; ++n) {
            mbarrier_init(k_full(shared, n), 1);
            mbarrier_init(v_full(shared, n), 1);
            mbarrier_init(k_empty(shared, n), 4 * CONSUMERS);
            mbarrier_init(v_empty(shared, n), 4 * CONSUMERS);
        }
        for (int c = 0; c < CONSUMERS && BIASED; ++c) {
            mbarrier_init(ELEMENT_ADDRESS(shared, bias_full, c), 1);
            mbarrier_init(ELEMENT_ADDRESS(shared, bias_empty, c), 4);
        }
#if TAKES_PARTS
        mbarrier_init(MEMBER_ADDRESS(shared, parts.full), 4 * CONSUMERS);
        mbarrier_init(MEMBER_ADDRESS(shared, parts.empty), 1);
        for (int n = 0; n < BM / 16; ++n) smem->parts.count[n] = 0;
#endif
        mbarrier_init_fence();
    }
    __syncthreads();
    /* All registers of the CTA: 512 or 504 for a thread of each of four or three warpgroups. */
    if (role == 0) {
        if (CONSUMERS == 3)
            registers_lower(32);
        else if (BANDS)
            registers_lower(40);
        else
            registers_lower(24);
        const int warp = from_leader((int)threadIdx.x / 32);
        if (warp == 0)
            produce(&p, shared, smem);
        else if (F8 && threadIdx.x < 64)
            produce_scales(&p, shared, smem);
        else if (CAUSAL && !F8)
            end_keyless_rows(&p, warp - 1);
#if TAKES_PARTS
        else if (threadIdx.x < 64)
            publish_parts(&p, shared, smem);
#endif
    } else {
        if (CONSUMERS == 3)
            registers_raise(160);
        else if (BANDS)
            registers_raise(232);
        else
            registers_raise(240);
        consume(&p, shared, smem, role - 1);
    }
}

DESCRIBE_KERNEL(fattni_fwd_sm90_args, SHARED_BYTES, 1);
