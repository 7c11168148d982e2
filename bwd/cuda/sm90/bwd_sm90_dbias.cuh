/* The gradient of a bias for Hopper, after a BIASED kernel (bwd_sm90.cuh, bwd_sm90_cluster.cuh), from its tensor maps,
   lse2 and delta:

   dbias = sum of P (dP - delta) over the sequences and heads that share it, S = scale Q K^T + bias, P = exp(S - L),
   dP = dO V^T.

   S and dP are computed again, two of backward's five products, and a tile of dbias stays in registers over all (b, h)
   that share it: each element is written once, in the same order of sums each time. Atomic additions from the BIASED
   kernel itself, one for each score, took three times as long for four sequences.

   Tensors     those of bwd_sm90.cuh; d_bias [b,h,i,j] in F32, any strides. All of it is written, or added to
               (FATTN_ACC_DBIAS): 0 where no row sees a key.
   CTAs        one per SM, persistent: tiles of BM rows x BN keys at a fixed stride, all keys of a row block first.
   Threads     warpgroup 0: one thread loads. Two consumers have 64 rows each.
   Shared      struct shared_memory: a ring of pairs of operands, Q and K, then dO and V, above head_dim 128 by halves
               of the columns; and the tile of bias.
   Rows        beyond a sequence's end, or without keys, have lse2 = inf; those of a tile that is cut are masked, too,
               since their operands may be NaN.

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "bwd/cuda/bwd_args.h"
#include "bwd/cuda/bwd_workspace.cuh"
#include "core/device/sm90_bias.cuh"

enum {
    D = K_D,
    BM = K_BM,
    BN = K_BN,
    THREADS = 32 * K_WARPS,
    HALVES = D > 128 ? 2 : 1, /* of the columns */
    COLUMNS = D / HALVES,     /* of an operand */
    PANELS = COLUMNS / 64,
    OPERAND_BYTES = BM * PANELS * 128,
    PAIRS = D > 64 ? 3 : 5,
    KEY_BOX = D > 128 ? 64 : 128, /* keys of a box of the maps */
    BIAS_BYTES = BM * BN * 2
};
static_assert(BM == 128 && BN == 128 && K_WARPS == 12 && COLUMNS % 64 == 0, "two consumers of 64 rows");

typedef struct shared_memory {
    unsigned char rows[PAIRS][OPERAND_BYTES], keys[PAIRS][OPERAND_BYTES];
    unsigned char bias[BIAS_BYTES]; /* panels of 64 keys */
    uint64_t full[PAIRS], empty[PAIRS], bias_full, bias_empty;
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");

/* A tile of dbias, and what shares it: sequences [b, b_end) and heads [h, h_end). */
typedef struct tile {
    int i0, j0, b, b_end, h, h_end;
} tile;
DEVICE int rows_of(const fattni_bwd_args *bwd) { return (int)bwd->d_bias_n[2]; }
DEVICE int keys_of(const fattni_bwd_args *bwd) { return (int)bwd->d_bias_n[3]; }
DEVICE int64_t tiles_of(const fattni_bwd_args *bwd) {
    return bwd->d_bias_n[0] * bwd->d_bias_n[1] * ((rows_of(bwd) + BM - 1) / BM) * ((keys_of(bwd) + BN - 1) / BN);
}
DEVICE tile tile_of(const fattni_bwd_args *bwd, int64_t number) {
    const fattni_attention_args *const a = &bwd->a;
    const int columns = (keys_of(bwd) + BN - 1) / BN, rows = (rows_of(bwd) + BM - 1) / BM;
    const int block = (int)(number % ((int64_t)columns * rows)), plane = (int)(number / ((int64_t)columns * rows));
    tile t = {block / columns * BM, block % columns * BN, 0, a->B, 0, a->Hq};
    if (bwd->d_bias_n[1] > 1) t.h = plane % a->Hq, t.h_end = t.h + 1;
    if (bwd->d_bias_n[0] > 1) t.b = plane / (int)bwd->d_bias_n[1], t.b_end = t.b + 1;
    return t;
}
/* Whether some row of the tile sees one of its keys in a sequence; and whether some do not. */
DEVICE int is_visible(const tile *t, const sequence *s) {
    const int last_row = min(t->i0 + BM, s->Sq) - 1, last_key = min(t->j0 + BN, s->Sk) - 1;
    return t->i0 < s->Sq && t->j0 < s->Sk && last_row + s->hi >= t->j0 && t->i0 + s->lo <= last_key;
}
DEVICE int is_cut(const tile *t, const sequence *s) {
    return t->i0 + BM > s->Sq || t->j0 + BN > s->Sk || t->i0 + s->hi < t->j0 + BN - 1 || t->j0 < t->i0 + BM - 1 + s->lo;
}

DEVICE uint32_t parity_of(uint32_t pair) { return pair / PAIRS & 1; }

/* Two operands, from `column` on; the maps' boxes have row_block rows of Q and dO. One thread. */
DEVICE void load_pair(const CUtensorMap *rows, const CUtensorMap *keys, const fattni_map_step *row_step,
                      const fattni_map_step *key_step, uint32_t pair, const tile *t, const sequence *s, int h, int hk,
                      int column, int row_block, uint32_t shared) {
    const int slot = (int)(pair % PAIRS);
    const uint32_t full = ELEMENT_ADDRESS(shared, full, slot);
    mbarrier_wait(ELEMENT_ADDRESS(shared, empty, slot), parity_of(pair) ^ 1);
    mbarrier_expect(full, 2 * OPERAND_BYTES);
    for (int x = 0; x < PANELS; ++x) {
        for (int y = 0; y < BM; y += row_block)
            tma_load(ELEMENT_ADDRESS(shared, rows, slot) + x * (BM * 128) + y * 128, rows, full, column + 64 * x,
                     s->q0 + t->i0 + y, h * row_step->head, s->batch * row_step->batch);
        for (int y = 0; y < BN; y += KEY_BOX)
            tma_load(ELEMENT_ADDRESS(shared, keys, slot) + x * (BN * 128) + y * 128, keys, full, column + 64 * x,
                     s->k0 + t->j0 + y, hk * key_step->head, s->batch * key_step->batch);
    }
}
/* Of tiles that have been counted so far. */
DEVICE void load_bias(const fattni_bwd_sm90_args *p, uint32_t count, const tile *t, uint32_t shared) {
    const uint32_t full = MEMBER_ADDRESS(shared, bias_full);
    mbarrier_wait(MEMBER_ADDRESS(shared, bias_empty), (count & 1) ^ 1);
    mbarrier_expect(full, BIAS_BYTES);
    for (int x = 0; x < BN / 64; ++x)
        for (int y = 0; y < BM; y += p->bwd.row_block)
            tma_load(MEMBER_ADDRESS(shared, bias) + x * (BM * 128) + y * 128, &p->bias, full, t->j0 + 64 * x, t->i0 + y,
                     t->h * p->bias_step.head, t->b * p->bias_step.batch);
}

/* One thread. The bias comes after a tile's first operands: the last tile's is in use until that tile is done. */
DEVICE void produce(const fattni_bwd_sm90_args *p, uint32_t shared) {
    const fattni_bwd_args *const bwd = &p->bwd;
    uint32_t pair = 0, count = 0;
    for (int64_t number = blockIdx.x; number < tiles_of(bwd); number += gridDim.x) {
        const tile t = tile_of(bwd, number);
        int first = 1;
        for (int b = t.b; b < t.b_end; ++b) {
            const sequence s = sequence_of(&bwd->a, b);
            for (int h = t.h; h < t.h_end && is_visible(&t, &s); ++h) {
                const int hk = h / bwd->a.group;
                for (int half = 0; half < HALVES; ++half)
                    load_pair(&p->q, &p->k, &p->q_step, &p->k_step, pair++, &t, &s, h, hk, half * COLUMNS,
                              bwd->row_block, shared);
                for (int half = 0; half < HALVES; ++half)
                    load_pair(&p->d_o, &p->v, &p->d_o_step, &p->v_step, pair++, &t, &s, h, hk, half * COLUMNS,
                              bwd->row_block, shared);
                if (first) load_bias(p, count++, &t, shared);
                first = 0;
            }
        }
    }
}

/* x = A B^T: this consumer's 64 rows x BN keys, over D. The operands begin with pair number `pair`. */
DEVICE void rows_by_keys(float x[BN / 2], uint32_t pair, uint32_t shared, int consumer) {
#pragma unroll
    for (int half = 0; half < HALVES; ++half, ++pair) {
        const int slot = (int)(pair % PAIRS);
        const uint64_t rows = operand_descriptor(ELEMENT_ADDRESS(shared, rows, slot) + consumer * (64 * 128), 0),
                       keys = operand_descriptor(ELEMENT_ADDRESS(shared, keys, slot), 0);
        mbarrier_wait(ELEMENT_ADDRESS(shared, full, slot), parity_of(pair));
        wgmma_fence();
#pragma unroll
        for (int e = 0; e < COLUMNS / 16; ++e)
            if (half + e == 0)
                wgmma_ss_new_n128(x, rows, keys);
            else
                wgmma_ss_n128(x, rows + advance_columns(e, BM), keys + advance_columns(e, BN), 1);
    }
    wgmma_commit();
}
DEVICE void release_pairs(uint32_t pair, uint32_t shared) {
    for (int half = 0; half < HALVES; ++half)
        arrive_once_per_warp(ELEMENT_ADDRESS(shared, empty, (pair + half) % PAIRS));
}

/* This thread's elements: row i + 8 (e/2), key j + 8 n + e%2. */
DEVICE void store_tile(const fattni_bwd_args *bwd, const tile *t, int i, int j, const float x[BN / 2]) {
    const fattni_view *const to = &bwd->d_bias;
    const int add = bwd->a.flags & FATTN_ACC_DBIAS, columns = keys_of(bwd) - j;
    float *const plane = (float *)to->p + t->b * to->b + t->h * to->h + j * to->column;
    const int pairs = to->column == 1 && ((uintptr_t)plane | (uintptr_t)(4 * to->row)) % 8 == 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        float *const row = plane + (i + 8 * half) * to->row;
        if (i + 8 * half >= rows_of(bwd)) continue;
#pragma unroll
        for (int n = 0; n < BN / 8; ++n) {
            float2 y = {x[4 * n + 2 * half] * bwd->dbias_scale, x[4 * n + 2 * half + 1] * bwd->dbias_scale};
            if (pairs && 8 * n + 1 < columns) {
                float2 *const at = (float2 *)(row + 8 * n);
                if (add) y.x += at->x, y.y += at->y;
                *at = y;
                continue;
            }
            float *const at = row + 8 * n * to->column;
            if (8 * n < columns) *at = add ? *at + y.x : y.x;
            if (8 * n + 1 < columns) at[to->column] = add ? at[to->column] + y.y : y.y;
        }
    }
}

DEVICE void consume(const fattni_bwd_sm90_args *p, uint32_t shared, int consumer) {
    const fattni_bwd_args *const bwd = &p->bwd;
    const fattni_attention_args *const a = &bwd->a;
    const int thread = (int)threadIdx.x % 128, row0 = consumer * 64 + thread / 32 * 16 + thread % 32 / 4;
    uint32_t pair = 0, count = 0;
    for (int64_t number = blockIdx.x; number < tiles_of(bwd); number += gridDim.x) {
        const tile t = tile_of(bwd, number);
        const int i = t.i0 + row0, j = t.j0 + thread % 4 * 2;
        float sum[BN / 2];
        int first = 1;
#pragma unroll
        for (int n = 0; n < BN / 2; ++n) sum[n] = 0.0f;
        for (int b = t.b; b < t.b_end; ++b) {
            const sequence s = sequence_of(a, b);
            for (int h = t.h; h < t.h_end && is_visible(&t, &s); ++h, pair += 2 * HALVES) {
                const int64_t row = row_base(bwd, &s, b, h) + i;
                const int cut = is_cut(&t, &s), inside[2] = {i < s.Sq, i + 8 < s.Sq};
                float lse2[2], delta[2], x[BN / 2], dp[BN / 2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    lse2[e] = inside[e] ? bwd->lse2[row + 8 * e] : INFINITY;
                    delta[e] = inside[e] ? bwd->delta[row + 8 * e] : 0.0f;
                }
                rows_by_keys(x, pair, shared, consumer);
                if (HALVES > 1) { /* there is no room for both products' operands */
                    wgmma_wait(0);
                    PIN(x, BN / 2);
                    release_pairs(pair, shared);
                }
                rows_by_keys(dp, pair + HALVES, shared, consumer);
                if (first) mbarrier_wait(MEMBER_ADDRESS(shared, bias_full), count & 1);
                first = 0;
                if (HALVES == 1) {
                    wgmma_wait(1);
                    PIN(x, BN / 2);
                    release_pairs(pair, shared);
                }
                add_bias_rows(x, BN, MEMBER_ADDRESS(shared, bias) + consumer * (64 * 128), BM * 128, a->scale, thread);
#pragma unroll
                for (int n = 0; n < BN / 2; ++n) x[n] = exp2_approx(fmaf(x[n], LOG2E, -lse2[n / 2 % 2]));
                wgmma_wait(0);
                PIN(dp, BN / 2);
                release_pairs(pair + HALVES, shared);
#pragma unroll
                for (int n = 0; n < BN / 2; ++n) {
                    const int e = n / 2 % 2, column = j + n / 4 * 8 + n % 2, low = i + 8 * e + s.lo,
                              high = min(i + 8 * e + s.hi, s.Sk - 1);
                    const float y = x[n] * (dp[n] - delta[e]);
                    if (!cut || (inside[e] && column >= low && column <= high)) sum[n] += y;
                }
            }
        }
        if (!first) {
            arrive_once_per_warp(MEMBER_ADDRESS(shared, bias_empty));
            ++count;
        }
        store_tile(bwd, &t, i, j, sum);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) K_NAME(const __grid_constant__ fattni_bwd_sm90_args p) {
    extern __shared__ __align__(1024) unsigned char SHARED_MEMORY[];
    const uint32_t shared = shared_address(SHARED_MEMORY);
    const int role = __shfl_sync(ALL_LANES, (int)threadIdx.x / 128, 0);
    if (threadIdx.x == 0) {
        for (int n = 0; n < PAIRS; ++n) {
            mbarrier_init(ELEMENT_ADDRESS(shared, full, n), 1);
            mbarrier_init(ELEMENT_ADDRESS(shared, empty, n), 8);
        }
        mbarrier_init(MEMBER_ADDRESS(shared, bias_full), 1);
        mbarrier_init(MEMBER_ADDRESS(shared, bias_empty), 8);
        mbarrier_init_fence();
    }
    __syncthreads();
    if (role == 0) {
        registers_lower(40);
        if (threadIdx.x == 0) produce(&p, shared);
    } else {
        registers_raise(232);
        consume(&p, shared, role - 1);
    }
}

DESCRIBE_KERNEL(fattni_bwd_sm90_args, SHARED_BYTES, 1);
