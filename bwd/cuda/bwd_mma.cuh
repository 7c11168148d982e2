/* Backward attention in F64, and in F32 rounded to TF32, on tensor cores: one CTA per key block,
   every feature.

   For each row block: S^T = scale K Q^T, P = exp(S - L), dP^T = V dO^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += scale dS K.

   Tensors     q, d_o [b,h,i,d], k, v, dk, dv [b,g,j,d], lse [b,h,i]; delta from bwd_preprocess_real.cuh, which
               also zeroed dq.
   Ownership   dK, dV of BN keys stay in registers over all row blocks of all query heads of the
               group; dQ goes to the caller's tensor by atomic adds.
   Threads     KEY_WARPS x SPLIT warps. For S^T and dP^T a warp has 16 keys and BM/SPLIT rows; where
               that is less than 16, all rows and a SPLIT-th of the depth, and the warps of the same
               keys sum their parts. For dV and dK it has its own keys, P^T and dS^T staying in its
               registers; with a split up to 32 keys and a part of the columns. Of dQ it has
               ROWS_TN rows and DQ_GROUPS groups of columns.
   Shared      struct shared_memory.
   Loads       Q and dO of the next row block overlap with dQ.
   Rounding    TF32: Q, K, V, dO as they arrive, P and dS before their products.

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "bwd/cuda/bwd_workspace.cuh"
#include "core/device/mma_tile.cuh"
#include "core/ptx/mbarrier.h"

enum {
    /* S, dP */
    KEY_WARPS = BN / 16,
    SPLIT = WARPS / KEY_WARPS,
    DEPTH_SPLIT = SPLIT > 1 &&
                          BM / SPLIT<16 ? SPLIT : 1, ROWS = BM * DEPTH_SPLIT / SPLIT, ROW_TILES = ROWS / 8,
                                     PAIRS = ROW_TILES * 2 / DEPTH_SPLIT, ELEMENTS = 2 * PAIRS,
                                     /* dK, dV */
                                     KEY_TILES = SPLIT> 1 &&
                          KEY_WARPS > 1
                      ? 2
                      : 1,
    PARTS = SPLIT * KEY_TILES,
    GROUPS = D / PARTS / GROUP,
    /* dQ */
    DQ_WARPS = BM / ROWS_TN,
    DQ_GROUPS = D / GROUP * DQ_WARPS / WARPS,
    SUMS = BM * BN < 8 * THREADS ? (16 * WARPS - BN) * BM * 2 : 0 /* that warps with the same keys exchange */
};
static_assert(KEY_WARPS * 16 == BN && KEY_WARPS * SPLIT == WARPS && ROWS % 8 == 0, "S");
static_assert(PAIRS * DEPTH_SPLIT == ROW_TILES * 2, "sums over the depth");
static_assert(GROUPS * PARTS * GROUP == D && KEY_WARPS % KEY_TILES == 0, "dK, dV");
static_assert(DQ_WARPS * ROWS_TN == BM && DQ_GROUPS * WARPS == D / GROUP * DQ_WARPS, "dQ");

typedef struct shared_memory {
    real k[BN * D], v[BN * D], q[BM * D], d_o[BM * D];
    real ds[BN * BM], p[SPLIT > 1 ? BN *BM : 0]; /* transposed; without a split P^T is in registers alone */
    real L[BM], delta[BM];
    real sums[SUMS]; /* S^T and dP^T over parts of the depth */
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };

/* Named barriers: for each 16 keys; and for the keys of a warp's part of dK and dV. */
enum { DEPTH_PARTS_STORED = 1, P_AND_DS_STORED = DEPTH_PARTS_STORED + KEY_WARPS };

/* Of S^T and dP^T: this warp's first key, its part of the rows or of the depth; pair n of the
   warp's accumulators is two rows of one key. */
DEVICE int key_of_warp(void) { return (int)threadIdx.x / 32 % KEY_WARPS * 16; }
DEVICE int part_of_warp(void) { return (int)threadIdx.x / 32 / KEY_WARPS; }
DEVICE int pair_of_element(int n) { return (DEPTH_SPLIT > 1 ? part_of_warp() * PAIRS : 0) + n / 2; }
DEVICE int element_row(int n) {
    return (DEPTH_SPLIT > 1 ? 0 : part_of_warp() * ROWS) + pair_of_element(n) / 2 * 8 + lane_of() % 4 * 2 + n % 2;
}
DEVICE int element_column(int n) { return key_of_warp() + lane_of() / 4 + pair_of_element(n) % 2 * 8; }

/* Of dK and dV. The warps of KEY_TILES * 16 keys are those of the same keys of S^T. */
DEVICE int gradient_key(void) { return (int)threadIdx.x / 32 % KEY_WARPS / KEY_TILES * (KEY_TILES * 16); }
DEVICE int gradient_column(void) {
    return (part_of_warp() * KEY_TILES + (int)threadIdx.x / 32 % KEY_TILES) * (D / PARTS);
}

#include "core/device/score_terms_fma.cuh"
#include "bwd/cuda/bwd_real.cuh"

DEVICE void load_rows(real *tile, const fattni_view *view, const sequence *s, int h, int i0, int width, int vectors) {
    load_tile(tile, BM, row_at(view, s, h, s->q0 + i0), view->row, s->Sq - i0, width, vectors);
}

/* Sums S^T and dP^T over the DEPTH_SPLIT warps of the same keys; warp n of them gets pairs n * PAIRS and on. `sums`
   has room for (DEPTH_SPLIT - 1) * PAIRS pairs of all threads, twice. */
DEVICE void sum_depth(real p[ELEMENTS], real ds[ELEMENTS], const real (*x)[4], const real (*y)[4], real *sums) {
    pair *const to = (pair *)sums, *const to_ds = to + (DEPTH_SPLIT - 1) * PAIRS * THREADS;
    const int part = part_of_warp();
#pragma unroll
    for (int n = 0; n < DEPTH_SPLIT * PAIRS; ++n) {
        const pair u = {x[n / 2][n % 2 * 2], x[n / 2][n % 2 * 2 + 1]},
                   w = {y[n / 2][n % 2 * 2], y[n / 2][n % 2 * 2 + 1]};
        const int distance = (n / PAIRS - part + DEPTH_SPLIT) % DEPTH_SPLIT, i = n % PAIRS;
        if (distance == 0) {
            p[2 * i] = u.low, p[2 * i + 1] = u.high, ds[2 * i] = w.low, ds[2 * i + 1] = w.high;
        } else {
            to[((distance - 1) * PAIRS + i) * THREADS + threadIdx.x] = u;
            to_ds[((distance - 1) * PAIRS + i) * THREADS + threadIdx.x] = w;
        }
    }
    named_barrier_sync(DEPTH_PARTS_STORED + key_of_warp() / 16, 32 * SPLIT);
#pragma unroll
    for (int n = 0; n < (DEPTH_SPLIT - 1) * PAIRS; ++n) {
        const int distance = n / PAIRS + 1, from = (part - distance + DEPTH_SPLIT) % DEPTH_SPLIT;
        const int i = n % PAIRS, at = n * THREADS + key_of_warp() * 2 + from * 32 * KEY_WARPS + lane_of();
        p[2 * i] += to[at].low, p[2 * i + 1] += to[at].high;
        ds[2 * i] += to_ds[at].low, ds[2 * i + 1] += to_ds[at].high;
    }
}

/* This warp's part of P^T or dS^T, rounded, to shared memory. */
DEVICE void store_rounded(real *tile, const real x[ELEMENTS]) {
#pragma unroll
    for (int n = 0; n < ELEMENTS; n += 2) {
        const pair rounded = {operand(x[n]), operand(x[n + 1])};
        *pair_at(tile, BM, element_column(n), element_row(n)) = rounded;
    }
}

/* x[KEY_TILES * 16 keys][D / PARTS] += P^T B: P^T from shared memory, or this warp's own. */
DEVICE void add_product(real (*x)[4], real *p_tile, const real (*p)[4], real *b_tile) {
    if (SPLIT > 1)
        product_nn(x, KEY_TILES, GROUPS, BM, p_tile, gradient_key(), BM, b_tile, D, gradient_column());
    else
        product_registers(x, 1, GROUPS, BM, p, b_tile, D, 0);
}

#if K_F64
/* Thread t of a quad has elements 4t .. 4t+3 of a row: adds them all, an aligned four at once. */
DEVICE void add_row(real *row, real x[4], int width) {
    const int t = lane_of() % 4;
    transpose_quad(x);
#pragma unroll
    for (int n = 0; n < 4; ++n)
        if (4 * n + t < width) reduce_add(row + 4 * n + t, x[n]);
}
#else
/* Thread t of a quad has elements 8t .. 8t+7 of a row: adds them all. */
DEVICE void add_row(real *row, real x[8], int width) {
    const int at = lane_of() % 4 * 8;
#pragma unroll
    for (int n = 0; n < 8; n += 4) {
        if (at + n + 4 <= width && (uintptr_t)row % 16 == 0) {
            reduce_add_4(row + at + n, x + n);
            continue;
        }
#pragma unroll
        for (int e = 0; e < 4; ++e)
            if (at + n + e < width) reduce_add(row + at + n + e, x[n + e]);
    }
}
#endif

/* This warp's part of a block of dK or dV. */
DEVICE void store_gradient(const real (*x)[4], real factor, const fattni_view *view, const sequence *s, int head,
                           int j0, int width, int accumulate, int vectors) {
    if (!view->p) return;
#pragma unroll
    for (int half = 0; half < 2 * KEY_TILES; ++half) {
        const int j = j0 + gradient_key() + half * 8 + lane_of() / 4;
        if (j >= s->Sk) continue;
        real *const to = row_at(view, s, head, s->k0 + j);
#pragma unroll
        for (int n = 0; n < 2 * GROUPS; ++n) { /* VECTOR columns, one of each fragment */
            const int d0 = gradient_column() + n / 2 * GROUP + (lane_of() % 4 * 2 + n % 2) * VECTOR;
            vector y = columns_of(x, half / 2 * GROUPS + n / 2, half % 2, n % 2);
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) y.e[e] *= factor;
            if (vectors && !accumulate) {
                if (d0 < width) *(vector *)(to + d0) = y;
                continue;
            }
#pragma unroll
            for (int e = 0; e < VECTOR; ++e)
                if (d0 + e < width) to[d0 + e] = accumulate ? to[d0 + e] + y.e[e] : y.e[e];
        }
    }
}

#if !K_F64
/* TF32's dQ less the sums of dS over these keys times their mean (bwd_key_mean.cu); bwd_preprocess_real.cuh adds what
   dS sums to exactly. dQ's columns begin at `column`. */
DEVICE void subtract_mean(real (*dq)[4], real *ds_tile, int row, int column, const float *mean) {
    real sum[ROWS_TN / 16][4];
    clear(sum, ROWS_TN / 16);
#pragma unroll 1
    for (int step = 0; step < BN; step += 8) {
        real rows[ROWS_TN / 16][4];
        load_tn(rows, ds_tile, BM, step, row);
#pragma unroll
        for (int m = 0; m < ROWS_TN / 16; ++m) multiply(sum[m], rows[m], 1.0f, 1.0f);
    }
#pragma unroll
    for (int c = 0; c < DQ_GROUPS * VECTOR; ++c) { /* element 2h + n of fragment e: column (2t + n) VECTOR + e */
        const float *const at = mean + column + c / VECTOR * GROUP + lane_of() % 4 * 2 * VECTOR + c % VECTOR;
#pragma unroll
        for (int m = 0; m < ROWS_TN / 16; ++m)
#pragma unroll
            for (int e = 0; e < 4; ++e) dq[m * DQ_GROUPS * VECTOR + c][e] -= sum[m][e] * at[e % 2 * VECTOR];
    }
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_bwd_args args) {
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    extern __shared__ __align__(128) unsigned char SHARED_MEMORY[];
    shared_memory *const tiles = (shared_memory *)SHARED_MEMORY;
    real *const k_tile = tiles->k, *const v_tile = tiles->v, *const q_tile = tiles->q, *const do_tile = tiles->d_o,
                *const ds_tile = tiles->ds, *const p_tile = tiles->p;
    const int key0 = key_of_warp(), warp = (int)threadIdx.x / 32;
    const int dq_row = warp % DQ_WARPS * ROWS_TN, dq_column = warp / DQ_WARPS * DQ_GROUPS * GROUP;

    key_block work;
    if (!find_key_block(a, blockIdx.x, BM, BN, &work)) return;
    const int b = work.b, hk = work.hk, j0 = work.j0, keys = work.keys, steps = work.rows.steps;
    const row_blocks rows = work.rows;
    const sequence s = work.s;
    const int depth = (max(a->D, a->Dv) + 15) / 16 * 16; /* beyond D or Dv tiles are zero */

    real dk[KEY_TILES * GROUPS * VECTOR][4], dv[KEY_TILES * GROUPS * VECTOR][4];
    clear(dk, KEY_TILES * GROUPS * VECTOR);
    clear(dv, KEY_TILES * GROUPS * VECTOR);

    row_statistics loaded = {0, 0};
    if (steps > 0) {
        const row_block first = row_block_of(&rows, 0);
        load_tile(k_tile, BN, row_at(&a->k, &s, hk, s.k0 + j0), a->k.row, keys, a->D, a->vector_qkv);
        load_tile(v_tile, BN, row_at(&a->v, &s, hk, s.k0 + j0), a->v.row, keys, a->Dv, a->vector_qkv);
        load_rows(q_tile, &a->q, &s, first.h, first.i0, a->D, a->vector_qkv);
        load_rows(do_tile, &bwd->d_o, &s, first.h, first.i0, a->Dv, a->vector_qkv);
        cp_async_commit();
        load_statistics(&loaded, bwd, &s, first.h, first.i0);
        if (!K_F64) {
            cp_async_wait(0);
            round_tile(k_tile, BN);
            round_tile(v_tile, BN);
        }
    }

    for (int step = 0; step < steps; ++step) {
        const row_block now = row_block_of(&rows, step), next = row_block_of(&rows, step + 1);
        const int h = now.h, i0 = now.i0, more = step + 1 < steps;
        store_statistics(tiles->L, tiles->delta, &loaded);
        cp_async_wait(0);
        round_tile(q_tile, BM);
        round_tile(do_tile, BM);
        __syncthreads(); /* this step's tiles have arrived, and no warp reads the last dS any more */
        if (more) load_statistics(&loaded, bwd, &s, next.h, next.i0);

        real s_part[ROW_TILES][4], dp_part[ROW_TILES][4], dcap[ELEMENTS];
        clear(s_part, ROW_TILES);
        clear(dp_part, ROW_TILES);
        const int first_row = DEPTH_SPLIT > 1 ? 0 : part_of_warp() * ROWS;
        const int from = DEPTH_SPLIT > 1 ? 16 * part_of_warp() : 0;
#pragma unroll 1
        for (int d = from; d < depth; d += 16 * DEPTH_SPLIT) /* S^T and dP^T */
#pragma unroll
            for (int n = 0; n < 16; n += 8) {
                step_nt(s_part, 1, ROW_TILES, k_tile, key0, q_tile, first_row, D, d, n);
                step_nt(dp_part, 1, ROW_TILES, v_tile, key0, do_tile, first_row, D, d, n);
            }
        real p[ELEMENTS], ds[ELEMENTS];
        if (DEPTH_SPLIT > 1) {
            sum_depth(p, ds, s_part, dp_part, tiles->sums);
        } else {
#pragma unroll
            for (int n = 0; n < ELEMENTS; ++n) p[n] = s_part[n / 4][n % 4], ds[n] = dp_part[n / 4][n % 4];
        }
#pragma unroll
        for (int n = 0; n < ELEMENTS; ++n) p[n] = rounded_product(ARG(a, scale), p[n]);
        if (scores_change(a)) {
            general_scores(p, dcap, ds_tile, a, &s, b, h, i0, j0);
            __syncthreads(); /* all threads are done with their places in the tile */
        }
#pragma unroll
        for (int n = 0; n < ELEMENTS; ++n) p[n] = exponential(p[n] - tiles->L[element_row(n)]);
        mask_probabilities(p, &s, i0, j0);
        const uint64_t keep = a->drop_T ? kept(a, b, h, i0, j0) : ~(uint64_t)0;
#pragma unroll
        for (int n = 0; n < ELEMENTS; ++n) {
            const int is_kept = (int)(keep >> n & 1);
            const real dp = is_kept ? ARG(a, keep_scale) * ds[n] : (real)0;
            ds[n] = p[n] * (dp - tiles->delta[element_row(n)]);
            if (!is_kept) p[n] = 0;
        }
        if (gradients_change(a, &bwd->d_bias)) {
            store_elements(ds_tile, ds);
            general_gradients(ds_tile, dcap, a, &bwd->d_bias, &s, b, h, i0, j0);
            load_elements(ds, ds_tile);
            __syncthreads();
        }
        store_rounded(ds_tile, ds);
        if (SPLIT > 1) {
            store_rounded(p_tile, p);
            /* by all warps of these keys */
            named_barrier_sync(P_AND_DS_STORED + gradient_key() / 16, 32 * SPLIT * KEY_TILES);
        }
        add_product(dv, p_tile, (const real(*)[4])p, do_tile);
        add_product(dk, ds_tile, (const real(*)[4])ds, q_tile);
        __syncthreads(); /* dS is in shared memory, and no warp reads Q and dO any more */
        if (more) {
            load_rows(q_tile, &a->q, &s, next.h, next.i0, a->D, a->vector_qkv);
            load_rows(do_tile, &bwd->d_o, &s, next.h, next.i0, a->Dv, a->vector_qkv);
        }
        cp_async_commit();
        if (!bwd->dq.p) continue;

        real dq[ROWS_TN / 16 * DQ_GROUPS * VECTOR][4];
        product_tn(dq, DQ_GROUPS, BN, ds_tile, dq_row, BM, k_tile, D, dq_column);
#if !K_F64
        const float *const mean = key_mean_of(bwd, b, hk);
        if (mean) subtract_mean(dq, ds_tile, dq_row, dq_column, mean);
#endif
        wait_dq_semaphore(bwd, &s, b, h, i0, j0, BN);
#pragma unroll
        for (int m = 0; m < ROWS_TN / 8; ++m) { /* rows of this thread */
            const int i = i0 + dq_row + row_tn(m / 2, m % 2);
            real *const to = row_at(&bwd->dq, &s, h, s.q0 + i);
            const int width = i < s.Sq ? a->D - dq_column : 0;
#pragma unroll
            for (int c = 0; c < DQ_GROUPS; ++c) {
                real x[2 * VECTOR];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const vector y = columns_of(dq, m / 2 * DQ_GROUPS + c, m % 2, n);
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) x[n * VECTOR + e] = ARG(a, scale) * y.e[e];
                }
                add_row(to + dq_column + c * GROUP, x, width - c * GROUP);
            }
        }
        post_dq_semaphore(bwd, b, h, i0);
    }
    cp_async_wait(0);
    store_gradient(dk, ARG(a, scale), &bwd->dk, &s, hk, j0, a->D, a->flags & FATTN_ACC_DK, bwd->vector_gradients);
    store_gradient(dv, ARG(a, keep_scale), &bwd->dv, &s, hk, j0, a->Dv, a->flags & FATTN_ACC_DV, bwd->vector_gradients);
}

DESCRIBE_KERNEL(fattni_bwd_args, SHARED_BYTES, 1);
