/* Forward attention of few rows on Hopper where they are too many for fwd_decode.cuh: more than 16 rows of the heads
   that share K and V, in tiles of 64 or 128, so that K and V are read once.

   S = Q K^T, P = exp(s - m), O = P V by wgmma, K and V through a ring in shared memory that TMA fills. What such a call
   takes is the time to read K and V: the ring has all of shared memory, and the producer goes on to the CTA's next item
   while the consumers end the last one.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d] or pages [page,g,j,d], lse [b,h,i]; d is D; k and v with strides that
               tensor maps can take.
   Items       a tile's keys, or consecutive parts of them; item n of the call is CTA n % grid's. Parts (fwd_decode.h)
               follow from the sequence's keys and the number of heads. The parts of each half of a tile are added up in
               their order, then both halves (fattni_rows_order). Which CTA computed a part does not show in the bits.
   Results     The item with the first part of a half adds up its parts of that half as it computes them. This sum, and
               each other part, is a result. Of an item that has all parts none leaves the CTA. Where two CTAs have a
               half each, they exchange rows in a cluster's shared memory. Otherwise results lie in memory, and are
               added up by the tile's CTAs, which are a cluster where they are few, or by a second launch.
   Warps       of the first warpgroup one loads K and V, or two load one each, and the others load Q. The other
               warpgroups compute. In a tile of 128 rows two own 64 each. In one of 64 they are one, or (head_dim 64,
               where one alone would take longer than memory) two, which take turns at the blocks: at the end of a part
               the second one's sum is added to the first one's.
   Pipeline    P V of block n - 1 runs beside the softmax of block n, S of block n + 1 beside O's rescaling.

   Instances: fwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "core/device/sm90_tile.cuh"
#include "core/ptx/cluster.h"
#include "core/ptx/cp_async.h"
#include "core/ptx/grid.h"
#include "fwd/cuda/fwd_decode.h"

enum {
    D = K_D,
    BM = K_BM,
    BN = K_BN,
    LOG2_BN = BN == 128 ? 7 : 6,
    CONSUMERS = K_WARPS / 4 - 1, /* warpgroups */
    TURNS = 64 * CONSUMERS > BM, /* they take turns at the blocks */
    STEP = TURNS ? 2 : 1,        /* blocks, from one of a consumer's to its next */
    THREADS = 32 * K_WARPS,
    PANELS = D / 64,
    Q_BYTES = PANELS * BM * 128,
    KV_BYTES = PANELS * BN * 128,
    ROW_THREADS = 2 * BM,  /* of the consumers, those that have rows in the end */
    SUM_FOURS = D / 8 + 1, /* float4s of a thread's sum and its statistics */
    IS_LARGE = BM * D > 128 * 64,
    /* float4s of a thread: what one of two that take turns sends; the sum of the first half of all parts, else in local
       memory; of the sum of parts, what there are no registers for while blocks are computed */
    SENT = TURNS ? SUM_FOURS : 0,
    KEPT = IS_LARGE ? 0 : SUM_FOURS,
    ASIDE = IS_LARGE ? D / 16 : 0,
    STAGES = (226 * 1024 - 2 * Q_BYTES - (SENT + KEPT + ASIDE) * ROW_THREADS * 16) / (2 * KV_BYTES),
    PRODUCERS = STAGES < 3 ? 2 : 1, /* warps: of few stages V must not hold up K of a later block */
    QUERY_WARPS = 4 - PRODUCERS,
    ALIGNED = BN /* the first key of a tile, so that a block has whole pages, or a part of one */
};
#include "fwd/cuda/sm90/fwd_decode_parts.cuh"

typedef struct shared_memory {
    unsigned char q[2][Q_BYTES], k[STAGES][KV_BYTES], v[STAGES][KV_BYTES]; /* panels (core/device/sm90_tile.cuh) */
    float4 sent[SENT][ROW_THREADS], kept[KEPT][ROW_THREADS], aside[ASIDE][ROW_THREADS];
    uint64_t q_full[2], q_empty[2];
    uint64_t k_full[STAGES], v_full[STAGES], k_empty[STAGES], v_empty[STAGES];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert((BM == 64 || BM == 64 * CONSUMERS) && CONSUMERS <= 2 && D % 64 == 0 && BN == 1 << LOG2_BN, "tile shape");
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");
static_assert(FATTNI_ROWS_BLOCK % (STEP * BN) == 0, "each part begins with the first consumer");

/* Named barriers; 0 is __syncthreads. TAIL_BARRIER + consumer: its threads have cleared their part of V. Where two take
   turns: SENT_BARRIER, the second one's sum is there; FREE_BARRIER, the first one has read it. ADD_BARRIER: the
   statistics of results in memory are added up. */
enum named_barrier { TAIL_BARRIER = 1, SENT_BARRIER = 3, FREE_BARRIER = 4, ADD_BARRIER = 5 };

/* A stage, of several that are used in turn, and the parity of the phase that is waited for. */
typedef struct ring {
    int stage;
    uint32_t parity;
} ring;
DEVICE void advance(ring *x, int by, int stages) {
    const int to = x->stage + by, turns = to / stages;
    x->stage = to - turns * stages, x->parity ^= turns & 1;
}

/* Tile n of the call. Gives its parts, or 0 where it has no rows. */
DEVICE int find_parts(const fattni_fwd_rows_args *z, int n, key_part *w) {
    if (find_tile(&z->x, n, w) == 0) return 0;
    w->keys = fattni_rows_keys_of_part(w->end - w->begin, z->most);
    return parts_of(w);
}
/* Item n of the call. Gives 0 where its tile has no rows, or fewer parts. */
DEVICE int find_item(const fattni_fwd_rows_args *z, int n, key_part *w) {
    w->cta = fattni_divide(&n, &z->x.parts), w->part = w->cta * z->each;
    return w->part < find_parts(z, n, w);
}
/* Whether two CTAs, which are a cluster, have a half each of a tile with so many parts. */
DEVICE int are_halves(const fattni_fwd_rows_args *z, int parts) {
    const fattni_rows_order order = fattni_rows_order_of(parts, z->each);
    return z->x.cluster == 2 && parts > z->each && order.results == 2;
}
/* Keys of an item: [item_begin, item_end), of which the first is at a multiple of BN. */
DEVICE int item_begin(const key_part *w) { return w->begin + w->part * w->keys; }
DEVICE int item_end(const fattni_fwd_rows_args *z, const key_part *w) {
    return min(w->end, item_begin(w) + z->each * w->keys);
}

/* ---- producers ---- */

/* Loads K and V of the CTA's items, or one of them. Pages of fewer than BN keys are loaded one by one. once: whether
   they leave L2 first, where results of parts are to stay; a constant, for the loop's speed. */
DEVICE void produce_keys(const fattni_fwd_rows_args *z, uint32_t shared, int first, int last, int once) {
    const fattni_fwd_parts_args *const x = &z->x;
    const int pages = x->page_table.p != 0, log2 = pages ? min(x->page_log2, LOG2_BN) : LOG2_BN;
    ring at = {0, 1};
    for (int n = (int)blockIdx.x; n < z->items; n += (int)gridDim.x) {
        key_part w;
        if (!find_item(z, n, &w)) continue;
        const int begin = item_begin(&w), end = item_end(z, &w), k_head = w.hk * z->k_step.head,
                  v_head = w.hk * z->v_step.head;
        int page = 0; /* lane l's: that of the keys from (l << log2) on, among 32 times as many */
        for (int j = begin; j < end; j += BN) {
            const uint32_t k_full = ELEMENT_ADDRESS(shared, k_full, at.stage),
                           v_full = ELEMENT_ADDRESS(shared, v_full, at.stage), k = ELEMENT_ADDRESS(shared, k, at.stage),
                           v = ELEMENT_ADDRESS(shared, v, at.stage);
            if (pages && ((j - begin) >> log2) % 32 == 0) {
                const int key = j + ((int)threadIdx.x % 32 << log2);
                page = key < end ? page_of(x, w.b, key) : 0;
            }
            for (int values = first; values <= last; ++values) {
                const uint32_t full = values ? v_full : k_full;
                mbarrier_wait(values ? ELEMENT_ADDRESS(shared, v_empty, at.stage)
                                     : ELEMENT_ADDRESS(shared, k_empty, at.stage),
                              at.parity);
                if (is_leader()) mbarrier_expect(full, KV_BYTES);
                for (int y = 0; y < BN; y += 1 << log2) {
                    const int batch = pages ? __shfl_sync(ALL_LANES, page, ((j + y - begin) >> log2) % 32) : w.s.batch,
                              row = (w.s.k0 + j + y) & x->page_mask;
                    if (!is_leader()) continue;
                    for (int c = 0; c < PANELS; ++c)
                        if (values)
                            (once ? tma_load_once : tma_load)(v + (c * BN + y) * 128, &z->v, full, 64 * c, row, v_head,
                                                              batch * z->v_step.batch);
                        else
                            (once ? tma_load_once : tma_load)(k + (c * BN + y) * 128, &z->k, full, 64 * c, row, k_head,
                                                              batch * z->k_step.batch);
                }
            }
            advance(&at, 1, STAGES);
        }
    }
}

/* Loads Q of the CTA's items, by QUERY_WARPS: in a tile the rows of several heads lie next to each other. */
DEVICE void produce_queries(const fattni_fwd_rows_args *z, uint32_t shared, int warp) {
    enum { CHUNKS = D / 8, ROWS_AT_ONCE = 32 / CHUNKS * QUERY_WARPS }; /* of a row; of all warps */
    const fattni_fwd_parts_args *const x = &z->x;
    const int lane = (int)threadIdx.x % 32, chunk = lane % CHUNKS;
    ring at = {0, 1};
    for (int n = (int)blockIdx.x; n < z->items; n += (int)gridDim.x) {
        key_part w;
        if (!find_item(z, n, &w)) continue;
        mbarrier_wait(ELEMENT_ADDRESS(shared, q_empty, at.stage), at.parity);
        const uint32_t panel = ELEMENT_ADDRESS(shared, q, at.stage) + chunk / 8 * (BM * 128);
#pragma unroll 4
        for (int r = lane / CHUNKS + 32 / CHUNKS * warp; r < BM; r += ROWS_AT_ONCE) {
            const int inside = r < w.rows;
            const half_type *const from = (const half_type *)x->a.q.p + place_of(x, &w, &x->a.q, inside ? r : 0);
            cp_async_16(panel + r * 128 + swizzled_chunk(chunk % 8, r % 8), from + 8 * chunk, inside ? 16 : 0);
        }
        cp_async_commit();
        cp_async_wait(0);
        async_proxy_fence();
        mbarrier_arrive(ELEMENT_ADDRESS(shared, q_full, at.stage));
        advance(&at, 1, 2);
    }
}

/* ---- consumers ---- */

/* Of a part or several, a thread's two rows: m and l, and their columns of O in the order of wgmma's accumulators. */
typedef struct rows_sum {
    float m[2], l[2], o[D / 2];
} rows_sum;
DEVICE void clear_sum(rows_sum *x) {
#pragma unroll
    for (int e = 0; e < 2; ++e) x->m[e] = -INFINITY, x->l[e] = 0.0f;
#pragma unroll
    for (int i = 0; i < D / 2; ++i) x->o[i] = 0.0f;
}
/* The last columns of a sum of parts, which lie in shared memory while blocks are computed. */
DEVICE void put_aside(shared_memory *smem, const rows_sum *x) {
#pragma unroll
    for (int n = 0; n < ASIDE; ++n) {
        const float *const o = x->o + D / 2 - 4 * ASIDE + 4 * n;
        smem->aside[n][threadIdx.x - 128] = make_float4(o[0], o[1], o[2], o[3]);
    }
}
DEVICE void take_back(const shared_memory *smem, rows_sum *x) {
#pragma unroll
    for (int n = 0; n < ASIDE; ++n) {
        const float4 y = smem->aside[n][threadIdx.x - 128];
        float *const o = x->o + D / 2 - 4 * ASIDE + 4 * n;
        o[0] = y.x, o[1] = y.y, o[2] = y.z, o[3] = y.w;
    }
}
/* Adds the part after x to it. */
DEVICE void add_sum(rows_sum *x, const rows_sum *part, float unit) {
    float old[2], own[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) add_statistics(&x->m[e], &x->l[e], part->m[e], part->l[e], &old[e], &own[e], unit);
#pragma unroll
    for (int i = 0; i < D / 2; ++i) x->o[i] = joined(x->o[i], old[i / 2 % 2], part->o[i], own[i / 2 % 2]);
}

/* Columns 8 n + 4 (t / 2) + 0 to 3 of one of the thread's rows, n = c in even lanes and c + 1 in odd ones. */
DEVICE float4 four_of(const float o[D / 2], int c, int half) {
    const int odd = (int)threadIdx.x & 1;
    const float *const even_pair = o + 4 * c + 2 * half, *const odd_pair = even_pair + 4;
    const float x = odd ? odd_pair[0] : even_pair[0], y = odd ? odd_pair[1] : even_pair[1],
                u = __shfl_xor_sync(ALL_LANES, odd ? even_pair[0] : odd_pair[0], 1),
                v = __shfl_xor_sync(ALL_LANES, odd ? even_pair[1] : odd_pair[1], 1);
    return odd ? make_float4(u, v, x, y) : make_float4(x, y, u, v);
}
/* The column of four_of's first number. */
DEVICE int column_of(int c) {
    const int t = (int)threadIdx.x & 3;
    return 8 * (c + t % 2) + t / 2 * 4;
}
/* A part's sum to memory, as result `slot`, of this thread's rows: `row` of the tile and eight more. */
DEVICE void store_part(const fattni_fwd_rows_args *z, const key_part *w, const rows_sum *sum, int row, int slot) {
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int c = 0; c < D / 8; c += 2) {
            const row_sum x = {four_of(sum->o, c, half), sum->m[half], sum->l[half]};
            if (row + 8 * half < w->rows) store_to_memory(&z->x, w, &x, row + 8 * half, column_of(c), slot, z->groups);
        }
}
/* The end of row `row` + 8 * half. */
DEVICE void store_row(const fattni_fwd_rows_args *z, const key_part *w, const rows_sum *sum, int row, int half) {
    const int r = row + 8 * half, inside = r < w->rows;
    row_sum x = {make_float4(0, 0, 0, 0), sum->m[half], sum->l[half]};
    row_result end = {0, 0, 0, 0};
    if (inside) end = end_of(&z->x, w, &x, r, z->x.a.scale * LOG2E);
    __syncwarp(); /* all lanes of a row have read the old L */
#pragma unroll
    for (int c = 0; c < D / 8; c += 2) {
        x.o = four_of(sum->o, c, half);
        if (inside) store_end(&z->x, w, &x, &end, r, column_of(c));
    }
}

/* The keys that this thread's rows see: from low to high. */
typedef struct seen_keys {
    int low[2], high[2];
} seen_keys;
DEVICE seen_keys seen_of(const fattni_fwd_parts_args *x, const key_part *w, int row) {
    seen_keys seen;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const int i = fattni_divided(w->r0 + row + 8 * e, &x->tile_heads);
        seen.low[e] = i + w->s.lo, seen.high[e] = min(i + w->s.hi, w->end - 1);
    }
    return seen;
}
DEVICE void hide(float s[BN / 2], const seen_keys *seen, int j) {
    const int column = j + 2 * ((int)threadIdx.x & 3);
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
        const int key = column + i / 4 * 8 + i % 2, e = i / 2 % 2;
        if (key < seen->low[e] || key > seen->high[e]) s[i] = -INFINITY;
    }
}

/* online_softmax (fwd_softmax.cuh) of the thread's two rows at once, with four sums and maxima of each that do not wait
   for each other. */
DEVICE int softmax_of_block(float s[BN / 2], rows_sum *sum, float correction[2], float unit) {
    float high[2][4], sums[2][4], base[2], shift[2] = {0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
        float *const to = &high[i / 2 % 2][i / 8 % 2 * 2 + i % 2];
        *to = i < 16 && i % 8 / 4 == 0 ? s[i] : fmaxf(*to, s[i]);
    }
    int rose = 0;
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        const float own = fmaxf(fmaxf(high[e][0], high[e][1]), fmaxf(high[e][2], high[e][3])),
                    top = fmaxf(quad_max(own), sum->m[e]);
        rose |= top != sum->m[e];
        base[e] = top == -INFINITY ? 0.0f : __fmul_rn(top, unit);
        if (is_far(base[e])) { /* the difference comes before the product */
            base[e] = 0.0f, shift[e] = top;
#pragma unroll
            for (int i = 0; i < BN / 4; ++i) s[i / 2 * 4 + 2 * e + i % 2] -= top;
        }
        /* The product is rounded as base is, so that this is 2^0 where the maximum stays. */
        correction[e] = exp2_approx(__fmul_rn(sum->m[e] - shift[e], unit) - base[e]);
        sum->m[e] = top;
    }
#pragma unroll
    for (int i = 0; i < BN / 2; ++i) {
        float *const to = &sums[i / 2 % 2][i / 8 % 2 * 2 + i % 2];
        s[i] = exp2_approx(fmaf(s[i], unit, -base[i / 2 % 2]));
        *to = i < 16 && i % 8 / 4 == 0 ? s[i] : *to + s[i];
    }
#pragma unroll
    for (int e = 0; e < 2; ++e)
        sum->l[e] = fmaf(sum->l[e], correction[e], sums[e][0] + sums[e][1] + (sums[e][2] + sums[e][3]));
    return rose;
}

/* Begins S of the block of that stage. Where no block is left it is the last one's, which may have other keys by now:
   nothing reads that S, but wgmma behind a branch would be serialised. */
DEVICE void begin_scores(float s[BN / 2], uint64_t q, uint32_t shared, int stage) {
    const uint64_t k = row_descriptor(MEMBER_ADDRESS(shared, k), 128) + stage * (KV_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int e = 0; e < D / 16; ++e)
        PASTE(wgmma_ss_n, K_BN)(s, q + advance_columns(e, BM), k + advance_columns(e, BN), e > 0);
    wgmma_commit();
}

/* What a consumer goes through its blocks with. */
typedef struct block_state {
    uint64_t q;   /* descriptor of its rows of Q */
    ring at;      /* this block's stage */
    int j, first; /* its first key; whether it is its part's first block */
    int pending;  /* stage that is free when P V of the block before is over; -1: none */
    seen_keys seen;
} block_state;

/* Call when P V of the block before is over. */
DEVICE void free_stage(uint32_t shared, block_state *x) {
    if (x->pending >= 0) arrive_once_per_warp(ELEMENT_ADDRESS(shared, v_empty, x->pending));
    x->pending = -1;
}

/* One block more, whose S is complete in s, where that of the next one follows. */
DEVICE void add_block(const fattni_fwd_rows_args *z, const key_part *w, uint32_t shared, block_state *x, rows_sum *sum,
                      float s[BN / 2], int more) {
    const ring at = x->at;
    advance(&x->at, STEP, STAGES);
    if (x->j < w->first_seen || x->j + BN > w->end_seen) hide(s, &x->seen, x->j);
    float correction[2];
    const int rose = softmax_of_block(s, sum, correction, z->x.a.scale * LOG2E);
    wgmma_wait(0);
    PIN(sum->o, D / 2);
    uint32_t p[BN / 4]; /* in the registers of the block before's, which are read until now */
#pragma unroll
    for (int i = 0; i < BN / 4; ++i) p[i] = pack(s[2 * i], s[2 * i + 1]);
    free_stage(shared, x);
    if (more) mbarrier_wait(ELEMENT_ADDRESS(shared, k_full, x->at.stage), x->at.parity);
    operands_may_change(!more);
    begin_scores(s, x->q, shared, more ? x->at.stage : at.stage);
    operands_may_change(0);
    if (__any_sync(ALL_LANES, rose && !x->first)) {
#pragma unroll
        for (int i = 0; i < D / 2; ++i) sum->o[i] *= correction[i / 2 % 2];
    }
    mbarrier_wait(ELEMENT_ADDRESS(shared, v_full, at.stage), at.parity);
    if (z->ragged &&
        x->j + BN > w->s.Sk) { /* beyond its end a sequence's buffer may hold anything, and 0 * NaN is NaN */
        clear_rows(ELEMENT_ADDRESS(shared, v, at.stage), PANELS, BN, w->s.Sk - x->j, (int)threadIdx.x % 128, 128);
        named_barrier_sync(TAIL_BARRIER + (int)threadIdx.x / 128 - 1, 128);
    }
    const uint64_t v = operand_descriptor(MEMBER_ADDRESS(shared, v), BN * 128) + at.stage * (KV_BYTES >> 4);
    wgmma_fence();
#pragma unroll
    for (int e = 0; e < BN / 16; ++e)
        PASTE(wgmma_rs_n, K_D)(sum->o, p + 4 * e, v + advance_rows(e), e > 0 || !x->first);
    wgmma_commit();
    wgmma_wait(1);
    PIN(s, BN / 2);
    if (more) arrive_once_per_warp(ELEMENT_ADDRESS(shared, k_empty, x->at.stage));
    x->pending = at.stage, x->first = 0, x->j += STEP * BN;
}

/* A part's blocks; s: as in add_block. */
DEVICE void add_blocks(const fattni_fwd_rows_args *z, const key_part *w, uint32_t shared, block_state *x, rows_sum *sum,
                       float s[BN / 2], int end_of_part, int end) {
    x->first = 1;
    clear_sum(sum);
#pragma unroll 1
    while (x->j < end_of_part) add_block(z, w, shared, x, sum, s, x->j + STEP * BN < end);
    wgmma_wait(0);
    PIN(sum->o, D / 2);
    free_stage(shared, x);
    sum->l[0] = quad_sum(sum->l[0]), sum->l[1] = quad_sum(sum->l[1]);
}

DEVICE void load_shared_floats(float x[4], uint32_t from) {
    uint32_t y[4];
    load_shared_4(y, from);
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = __uint_as_float(y[n]);
}

/* A thread's sum; number n of its float4s is at kept[n * KEPT_PITCH]. */
enum { KEPT_PITCH = KEPT ? ROW_THREADS : 1 };
static_assert(!SENT || KEPT_PITCH == ROW_THREADS, "send_sum");
DEVICE void keep_sum(float4 *kept, const rows_sum *sum) {
#pragma unroll
    for (int n = 0; n < D / 8; ++n)
        kept[n * KEPT_PITCH] = make_float4(sum->o[4 * n], sum->o[4 * n + 1], sum->o[4 * n + 2], sum->o[4 * n + 3]);
    kept[D / 8 * KEPT_PITCH] = make_float4(sum->m[0], sum->m[1], sum->l[0], sum->l[1]);
}

/* Of consumers that take turns: the second one's sum of a part, which is added to the first one's, between threads that
   have the same rows and columns. */
DEVICE void send_sum(shared_memory *smem, const rows_sum *sum) {
    named_barrier_sync(FREE_BARRIER, 256);
    keep_sum(&smem->sent[0][(int)threadIdx.x % 128], sum);
    named_barrier_arrive(SENT_BARRIER, 256);
}
DEVICE void receive_sum(uint32_t shared, rows_sum *sum, float unit) {
    const uint32_t from = MEMBER_ADDRESS(shared, sent) + (uint32_t)threadIdx.x % 128 * 16;
    named_barrier_sync(SENT_BARRIER, 256);
    float y[4], old[2], own[2];
    load_shared_floats(y, from + D / 8 * 2048);
    add_statistics(&sum->m[0], &sum->l[0], y[0], y[2], &old[0], &own[0], unit);
    add_statistics(&sum->m[1], &sum->l[1], y[1], y[3], &old[1], &own[1], unit);
#pragma unroll
    for (int n = 0; n < D / 8; n += 4) { /* four loads at a time: there are no registers for all */
        float x[16];
#pragma unroll
        for (int i = 0; i < 4; ++i) load_shared_floats(x + 4 * i, from + (n + i) * 2048);
#pragma unroll
        for (int i = 0; i < 16; ++i)
            sum->o[4 * n + i] = joined(sum->o[4 * n + i], old[i / 2 % 2], x[i], own[i / 2 % 2]);
        PIN(sum->o + 4 * n, 16);
    }
    named_barrier_arrive(FREE_BARRIER, 256);
}

/* The sum after the kept one becomes that of both. */
DEVICE void add_to_kept(rows_sum *sum, const float4 *kept, float unit) {
    const float4 y = kept[D / 8 * KEPT_PITCH];
    float m[2] = {y.x, y.y}, l[2] = {y.z, y.w}, first_by[2], second_by[2];
#pragma unroll
    for (int e = 0; e < 2; ++e) {
        add_statistics(&m[e], &l[e], sum->m[e], sum->l[e], &first_by[e], &second_by[e], unit);
        sum->m[e] = m[e], sum->l[e] = l[e];
    }
#pragma unroll
    for (int n = 0; n < D / 8; ++n) {
        const float4 first = kept[n * KEPT_PITCH];
        const float x[4] = {first.x, first.y, first.z, first.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)
            sum->o[4 * n + i] = joined(x[i], first_by[i / 2], sum->o[4 * n + i], second_by[i / 2]);
    }
}

/* Where two CTAs have a half of a tile each, the first one ends the first of a thread's two rows, the second one the
   other. What a thread has of the other CTA's row it leaves where the CTA has computed, for the same thread there. */
typedef struct left_rows {
    float4 o[D / 16][ROW_THREADS];
    float2 statistics[ROW_THREADS];
} left_rows;
static_assert(sizeof(left_rows) <= 2 * Q_BYTES + STAGES * 2 * KV_BYTES, "shared memory");
DEVICE void leave_row(left_rows *to, const rows_sum *sum, int second) {
    const int thread = (int)threadIdx.x - 128;
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
        const float *const x = sum->o + 8 * n;
        to->o[n][thread] = second ? make_float4(x[0], x[1], x[4], x[5]) : make_float4(x[2], x[3], x[6], x[7]);
    }
    to->statistics[thread] = make_float2(second ? sum->m[0] : sum->m[1], second ? sum->l[0] : sum->l[1]);
}
/* The thread's row that ends here becomes the sum of both CTAs' (and so does the other one, so that no register is
   chosen by an index). */
DEVICE void take_row(const left_rows *from, rows_sum *sum, int second, float unit) {
    const int thread = (int)threadIdx.x - 128;
    const float2 other = from->statistics[thread];
    float m = second ? other.x : sum->m[0], l = second ? other.y : sum->l[0], first_by, second_by;
    add_statistics(&m, &l, second ? sum->m[1] : other.x, second ? sum->l[1] : other.y, &first_by, &second_by, unit);
    sum->m[0] = sum->m[1] = m, sum->l[0] = sum->l[1] = l;
#pragma unroll
    for (int n = 0; n < D / 16; ++n) {
        const float4 y = from->o[n][thread];
        const float x[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float *const o = sum->o + 8 * n + 4 * (i / 2) + i % 2; /* and o[2], of the second row */
            o[0] = o[2] = second ? joined(x[i], first_by, o[2], second_by) : joined(o[0], first_by, x[i], second_by);
        }
    }
}

/* Returns whether the cluster has nothing left to add up. */
DEVICE int consume(const fattni_fwd_rows_args *z, uint32_t shared, shared_memory *smem) {
    const int consumer = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128 - 1, 0), sends = TURNS && consumer == 1;
    const int row0 = TURNS ? 0 : 64 * consumer,
              row = row0 + (int)threadIdx.x % 128 / 32 * 16 + (int)threadIdx.x % 32 / 4;
    const int first = TURNS ? consumer : 0; /* of its blocks */
    const uint64_t q_rows = row_descriptor(MEMBER_ADDRESS(shared, q) + row0 * 128, 128);
    const float unit = z->x.a.scale * LOG2E;
    ring q_at = {0, 0}, at = {0, 0};
    float4 local[KEPT ? 1 : SUM_FOURS];
    int zero = 0; /* hidden, so that no part of `local` is in registers */
    asm volatile("" : "+r"(zero));
    float4 *const kept = KEPT ? smem->kept[0] + threadIdx.x - 128 : local + zero;
    if (TURNS && !sends) named_barrier_arrive(FREE_BARRIER, 256);
    for (int n = (int)blockIdx.x; n < z->items; n += (int)gridDim.x) {
        key_part w;
        if (!find_item(z, n, &w)) continue;
        const int begin = item_begin(&w), end = item_end(z, &w);
        block_state x = {q_rows + q_at.stage * (Q_BYTES >> 4), at, begin + first * BN, 0, -1, seen_of(&z->x, &w, row)};
        rows_sum all, part;
        float s[BN / 2];
        advance(&x.at, first, STAGES);
        advance(&at, (end - begin + BN - 1) / BN, STAGES);
        mbarrier_wait(ELEMENT_ADDRESS(shared, q_full, q_at.stage), q_at.parity);
        clear_sum(&all);
        put_aside(smem, &all);
        if (x.j < end) {
            mbarrier_wait(ELEMENT_ADDRESS(shared, k_full, x.at.stage), x.at.parity);
            begin_scores(s, x.q, shared, x.at.stage);
            wgmma_wait(0);
            PIN(s, BN / 2);
            arrive_once_per_warp(ELEMENT_ADDRESS(shared, k_empty, x.at.stage));
        }
        const int parts = parts_of(&w), alone = parts <= z->each;
        const fattni_rows_order order = fattni_rows_order_of(parts, z->each);
        const int exchanges = are_halves(z, parts);
        int number = w.part;
        for (int j = begin; j < end; ++number, j += w.keys) {
            const int end_of_part = min(j + w.keys, end);
            add_blocks(z, &w, shared, &x, &part, s, end_of_part, end);
            if (sends) {
                if (end_of_part - j > BN) send_sum(smem, &part);
                continue;
            }
            if (TURNS && end_of_part - j > BN) receive_sum(shared, &part, unit);
            if (fattni_rows_joins(&order, number)) {
                take_back(smem, &all);
                add_sum(&all, &part, unit);
            } else {
                all = part;
            }
            put_aside(smem, &all);
            if (!alone && !exchanges && (end_of_part == end || !fattni_rows_joins(&order, number + 1)))
                store_part(z, &w, &all, row, fattni_rows_result(&order, number));
            if (alone && number + 1 == order.half && order.half < parts) keep_sum(kept, &all);
        }
        arrive_once_per_warp(ELEMENT_ADDRESS(shared, q_empty, q_at.stage));
        advance(&q_at, 1, 2);
        take_back(smem, &all);
        int ends = alone && !sends ? 3 : 0; /* of the thread's two rows, those that end here */
        if (exchanges) {
            left_rows *const left = (left_rows *)smem;
            if (sends) named_barrier_sync(FREE_BARRIER, 256);
            named_barrier_sync(ADD_BARRIER, THREADS - 128); /* all have computed */
            if (!sends) leave_row(left, &all, w.cta);
            cluster_sync();
            if (!sends) take_row((const left_rows *)cluster_pointer(left, (uint32_t)(1 - w.cta)), &all, w.cta, unit);
            ends = sends ? 0 : 1 << w.cta;
        }
        if (ends == 3 && order.half < parts) add_to_kept(&all, kept, unit);
        if (ends & 1) store_row(z, &w, &all, row, 0);
        if (ends & 2) store_row(z, &w, &all, row, 1);
        if (!exchanges) continue;
        cluster_sync(); /* no CTA ends while the other one reads */
        return 1;
    }
    if (sends) named_barrier_sync(FREE_BARRIER, 256); /* so that each arrival has its wait */
    return 0;
}

/* ---- sums of results in memory, by a cluster that has a tile's parts, each CTA some of its rows ---- */

/* Adds up the statistics of a row's results, those from `half` on apart. weights[n]: what O so far is multiplied by
   before result n is added, and that result; weights[0]: what the sums of both halves are. */
DEVICE row_result add_row(const fattni_fwd_rows_args *z, const key_part *w, int row, const float *m, const float *l,
                          int half, int count, float2 *weights) {
    const float unit = z->x.a.scale * LOG2E;
    row_sum sum = {make_float4(0, 0, 0, 0), m[0], l[0]}, first_half;
#pragma unroll 1
    for (int first = 0; first < count; first += 4) {
        const float4 m4 = *(const float4 *)(m + first), l4 = *(const float4 *)(l + first);
        const float ms[4] = {m4.x, m4.y, m4.z, m4.w}, ls[4] = {l4.x, l4.y, l4.z, l4.w};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (first + i == 0 || first + i >= count) continue;
            if (first + i == half) {
                first_half = sum;
                sum.m = ms[i], sum.l = ls[i];
                continue;
            }
            float2 weight;
            add_statistics(&sum.m, &sum.l, ms[i], ls[i], &weight.x, &weight.y, unit);
            weights[first + i] = weight;
        }
    }
    if (half < count) {
        float2 weight;
        add_statistics(&first_half.m, &first_half.l, sum.m, sum.l, &weight.x, &weight.y, unit);
        weights[0] = weight;
        sum = first_half;
    }
    return end_of(&z->x, w, &sum, row, unit);
}
/* In shared memory: an mbarrier, how rows end, weights and results (FATTNI_ROWS_SHARED). */
static_assert(sizeof(row_result) == 16 && sizeof(float2) == 8, "FATTNI_ROWS_SHARED");
static __device__ __noinline__ void add_in_cluster(const fattni_fwd_rows_args *z, unsigned char *memory) {
    enum { FOURS = D / 4, ADDING = THREADS - 128 }; /* of a row; threads: the consumers */
    const fattni_fwd_parts_args *const x = &z->x;
    const int thread = (int)threadIdx.x - 128, ctas = (int)x->parts.by;
    key_part w;
    int tile = (int)blockIdx.x;
    const int cta = fattni_divide(&tile, &x->parts), parts = find_parts(z, tile, &w);
    if (parts <= z->each) return;
    const fattni_rows_order order = fattni_rows_order_of(parts, z->each);
    const int count = order.results, half = fattni_rows_result(&order, order.half);
    const int share = (w.rows + ctas - 1) / ctas, end = min((cta + 1) * share, w.rows),
              bytes = count * D * 4; /* of a row */
    row_result *const ends = (row_result *)(memory + 16);
    float2 *const weights = (float2 *)(ends + z->at_once);
    float *const results = (float *)(weights + z->at_once * z->groups);
    const float *const m = results_of(x, &w, z->groups), *const l = m + x->rows * z->groups,
                       *const o = l + x->rows * z->groups;
    const uint32_t full = shared_address(memory);
    if (thread == 0) {
        mbarrier_init(full, 1);
        mbarrier_init_fence();
    }
    uint32_t parity = 0;
#pragma unroll 1
    for (int begin = cta * share; begin < end; begin += z->at_once, parity ^= 1) {
        const int rows = min(z->at_once, end - begin);
        if (thread == 0) mbarrier_expect(full, rows * bytes);
        if (thread < 32) {
            __syncwarp();
            async_proxy_fence_global(); /* bulk copies read what threads have written */
#pragma unroll 1
            for (int r = thread; r < rows; r += 32)
                bulk_load(shared_address(results) + r * bytes, o + (begin + r) * z->groups * D, bytes, full);
        }
        if (thread < rows) { /* there are more threads than rows */
            const int r = begin + thread;
            ends[thread] =
                add_row(z, &w, r, m + r * z->groups, l + r * z->groups, half, count, weights + thread * z->groups);
        }
        named_barrier_sync(ADD_BARRIER, ADDING);
        mbarrier_wait(full, parity);
#pragma unroll 1
        for (int n = thread; n < rows * FOURS; n += ADDING) {
            const int row = n / FOURS, d = n % FOURS * 4;
            const float *const from = results + row * count * D + d;
            const float2 *const weight = weights + row * z->groups;
            float4 first_half = *(const float4 *)from;
            row_sum sum = {*(const float4 *)(from + half * D), 0, 0};
#pragma unroll 4
            for (int i = 1; i < half; ++i) add_weighted(&first_half, *(const float4 *)(from + i * D), weight[i]);
#pragma unroll 4
            for (int i = half + 1; i < count; ++i) add_weighted(&sum.o, *(const float4 *)(from + i * D), weight[i]);
            add_weighted(&first_half, sum.o, weight[0]);
            sum.o = first_half;
            store_end(x, &w, &sum, &ends[row], begin + row, d);
        }
        named_barrier_sync(ADD_BARRIER, ADDING); /* the next rows take the same memory */
    }
}

/* The second launch of a call of which several CTAs have parts of a tile, and are no cluster. */
static __device__ __noinline__ void add_in_memory(const fattni_fwd_rows_args *z) {
    key_part w;
    int n = (int)blockIdx.x;
    const int cta = fattni_divide(&n, &z->x.parts), parts = find_parts(z, n, &w);
    if (parts <= z->each) return;
    const fattni_rows_order order = fattni_rows_order_of(parts, z->each);
    add_results(&z->x, &w, fattni_rows_result(&order, order.half), order.results, z->groups,
                4 * (cta * FATTNI_ROWS_ADDING + (int)threadIdx.x));
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) K_NAME(const __grid_constant__ fattni_fwd_rows_args args) {
    begin_grid();
    extern __shared__ __align__(1024) unsigned char SHARED_MEMORY[];
    const fattni_fwd_rows_args *const z = &args;
    const uint32_t shared = shared_address(SHARED_MEMORY);
    const int role = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0);
    if (z->adds) {
        add_in_memory(z);
        return;
    }
    if (threadIdx.x == 0) {
        for (int n = 0; n < 2; ++n) {
            mbarrier_init(ELEMENT_ADDRESS(shared, q_full, n), 32 * QUERY_WARPS);
            mbarrier_init(ELEMENT_ADDRESS(shared, q_empty, n), 4 * CONSUMERS);
        }
        for (int n = 0; n < STAGES; ++n) {
            mbarrier_init(ELEMENT_ADDRESS(shared, k_full, n), 1);
            mbarrier_init(ELEMENT_ADDRESS(shared, v_full, n), 1);
            mbarrier_init(ELEMENT_ADDRESS(shared, k_empty, n), TURNS ? 4 : 4 * CONSUMERS);
            mbarrier_init(ELEMENT_ADDRESS(shared, v_empty, n), TURNS ? 4 : 4 * CONSUMERS);
        }
        mbarrier_init_fence();
    }
    __syncthreads();
    if (role == 0) {
        if (CONSUMERS > 1) registers_lower(40);
        const int warp = __shfl_sync(ALL_LANES, (int)threadIdx.x / 32, 0);
        if (warp < PRODUCERS && z->x.tiles.by == 1)
            produce_keys(z, shared, warp, PRODUCERS == 1 ? 1 : warp, 1);
        else if (warp < PRODUCERS)
            produce_keys(z, shared, warp, PRODUCERS == 1 ? 1 : warp, 0);
        else
            produce_queries(z, shared, warp - PRODUCERS);
        if (z->x.cluster > 1) { /* as often as consumers */
            key_part w;
            int tile = (int)blockIdx.x;
            fattni_divide(&tile, &z->x.parts);
            cluster_sync();
            if (are_halves(z, find_parts(z, tile, &w))) cluster_sync();
        }
    } else {
        if (CONSUMERS > 1) registers_raise(232);
        if (consume(z, shared, (shared_memory *)SHARED_MEMORY) || z->x.cluster == 1) return;
        async_proxy_fence_global(); /* results are read by bulk copies */
        cluster_sync();
        add_in_cluster(z, SHARED_MEMORY);
    }
}

DESCRIBE_KERNEL_THAT_WAITS(fattni_fwd_rows_args, SHARED_BYTES, 1);
