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
               keys add up. For dV and dK it has its own keys, P^T and dS^T staying in its
               registers; with a split up to 32 keys and a part of the columns. Of dQ it has
               ROWS_TN rows and DQ_GROUPS groups of columns.
   Shared      K, V [BN][D], Q, dO [BM][D], dS^T and, for a split, P^T [BN][BM], L and delta [BM],
               sums over parts of the depth.
   Loads       Q and dO of the next row block fly under dQ.
   Rounding    TF32: Q, K, V, dO as they arrive, P and dS before their products.

   Instances: bwd_kernels.def; huge: bwd_huge_real.cuh. */
#if K_HUGE
#include "bwd/cuda/bwd_huge_real.cuh"
#else
#include "core/device/dq_order.cuh"
#include "core/attention/huge.h"
#include "core/device/mma_tile.cuh"
#include "core/ptx/mbarrier.h"

enum {
    /* S, dP */
    KEY_WARPS = BN / 16, SPLIT = WARPS / KEY_WARPS,
    DEPTH_SPLIT = SPLIT > 1 && BM / SPLIT < 16 ? SPLIT : 1, ROWS = BM * DEPTH_SPLIT / SPLIT,
    ROW_TILES = ROWS / 8, PAIRS = ROW_TILES * 2 / DEPTH_SPLIT, PLACES = 2 * PAIRS,
    /* dK, dV */
    KEY_TILES = SPLIT > 1 && KEY_WARPS > 1 ? 2 : 1, PARTS = SPLIT * KEY_TILES,
    GROUPS = D / PARTS / GROUP,
    /* dQ */
    DQ_WARPS = BM / ROWS_TN, DQ_GROUPS = D / GROUP * DQ_WARPS / WARPS
};
static_assert(KEY_WARPS * 16 == BN && KEY_WARPS * SPLIT == WARPS && ROWS % 8 == 0, "S");
static_assert(PAIRS * DEPTH_SPLIT == ROW_TILES * 2, "the sums' owners");
static_assert(GROUPS * PARTS * GROUP == D && KEY_WARPS % KEY_TILES == 0, "dK, dV");
static_assert(DQ_WARPS * ROWS_TN == BM && DQ_GROUPS * WARPS == D / GROUP * DQ_WARPS, "dQ");
static_assert(BM <= THREADS, "statistics");

/* Of S^T and dP^T: this warp's first key, its part of the rows or of the depth; pair n of the
   warp's accumulators is two rows of one key. */
DEVICE int key_of_warp(void) { return (int)threadIdx.x / 32 % KEY_WARPS * 16; }
DEVICE int part_of_warp(void) { return (int)threadIdx.x / 32 / KEY_WARPS; }
DEVICE int pair_of_place(int n) { return (DEPTH_SPLIT > 1 ? part_of_warp() * PAIRS : 0) + n / 2; }
DEVICE int place_row(int n) {
    return (DEPTH_SPLIT > 1 ? 0 : part_of_warp() * ROWS) + pair_of_place(n) / 2 * 8 +
           lane_of() % 4 * 2 + n % 2;
}
DEVICE int place_column(int n) { return key_of_warp() + lane_of() / 4 + pair_of_place(n) % 2 * 8; }

/* Of dK and dV. The warps of KEY_TILES * 16 keys are those of the same keys of S^T. */
DEVICE int gradient_key(void) {
    return (int)threadIdx.x / 32 % KEY_WARPS / KEY_TILES * (KEY_TILES * 16);
}
DEVICE int gradient_column(void) {
    return (part_of_warp() * KEY_TILES + (int)threadIdx.x / 32 % KEY_TILES) * (D / PARTS);
}

#include "core/device/score_terms_fma.cuh"

/* Adds up S^T and dP^T over the DEPTH_SPLIT warps of the same keys; part n keeps pairs n PAIRS and
   on, its places. sums: room for (DEPTH_SPLIT - 1) PAIRS pairs of all threads, twice. */
DEVICE void sum_depth(real p[PLACES], real ds[PLACES], const real (*x)[4], const real (*y)[4],
                      real *sums) {
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
    named_barrier_sync(1 + key_of_warp() / 16, 32 * SPLIT);
#pragma unroll
    for (int n = 0; n < (DEPTH_SPLIT - 1) * PAIRS; ++n) {
        const int distance = n / PAIRS + 1, from = (part - distance + DEPTH_SPLIT) % DEPTH_SPLIT;
        const int i = n % PAIRS,
                  at = n * THREADS + key_of_warp() * 2 + from * 32 * KEY_WARPS + lane_of();
        p[2 * i] += to[at].low, p[2 * i + 1] += to[at].high;
        ds[2 * i] += to_ds[at].low, ds[2 * i + 1] += to_ds[at].high;
    }
}

/* This warp's part of P^T or dS^T to the tile of all, rounded. */
DEVICE void publish(real *tile, const real x[PLACES]) {
#pragma unroll
    for (int n = 0; n < PLACES; n += 2) {
        const pair rounded = {operand(x[n]), operand(x[n + 1])};
        *pair_at(tile, BM, place_column(n), place_row(n)) = rounded;
    }
}

/* x[KEY_TILES * 16 keys][D / PARTS] += P^T B: P^T from the tile of all, or this warp's own. */
DEVICE void add_product(real (*x)[4], real *p_tile, const real (*p)[4], real *b_tile) {
    if (SPLIT > 1)
        product_nn(x, KEY_TILES, GROUPS, BM, p_tile, gradient_key(), BM, b_tile, D,
                   gradient_column());
    else product_registers(x, 1, GROUPS, BM, p, b_tile, D, 0);
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
DEVICE void store_gradient(const real (*x)[4], real factor, const fattni_view *view,
                           const sequence *s, int head, int j0, int width, int accumulate,
                           int vectors) {
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

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_cuda_args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    real *const k_tile = (real *)shared, *const v_tile = k_tile + BN * D,
               *const q_tile = v_tile + BN * D, *const do_tile = q_tile + BM * D,
               *const ds_tile = do_tile + BM * D, *const p_tile = ds_tile + BN * BM,
               *const statistics = SPLIT > 1 ? p_tile + BN * BM : p_tile,
               *const sums = statistics + 2 * BM;
    const int key0 = key_of_warp(), warp = (int)threadIdx.x / 32;
    const int dq_row = warp % DQ_WARPS * ROWS_TN, dq_column = warp / DQ_WARPS * DQ_GROUPS * GROUP;

    const int blocks = (a.Sk + BN - 1) / BN;
    const int plane = (int)(blockIdx.x / (unsigned)blocks), hk = plane % a.Hkv, b = plane / a.Hkv;
    const int j0 = (int)(blockIdx.x % (unsigned)blocks) * BN;
    const sequence s = sequence_of(&a, b);
    if (j0 >= s.Sk) return;
    const int keys = min(BN, s.Sk - j0);
    const int begin = max(0, min(j0 - s.hi, s.Sq)), end = max(0, min(j0 + keys - s.lo, s.Sq));
    const int first = begin / BM, row_blocks = end > begin ? (end + BM - 1) / BM - first : 0;
    const int steps = row_blocks * a.group; /* row blocks of head 0, of head 1, ... */
    const int depth = (max(a.D, a.Dv) + 15) / 16 * 16; /* beyond D or Dv tiles are zero */

    real dk[KEY_TILES * GROUPS * VECTOR][4], dv[KEY_TILES * GROUPS * VECTOR][4];
    clear(dk, KEY_TILES * GROUPS * VECTOR);
    clear(dv, KEY_TILES * GROUPS * VECTOR);

    /* A row past the end, or without any key, has P = 0, and a huge one is bwd_huge_real.cuh's. */
    real L = 0, delta = 0; /* of row threadIdx.x of the step's block */
#define LOAD_STATISTICS(h, i0)                                                    \
    if ((int)threadIdx.x < BM) {                                                  \
        const int i = (i0) + (int)threadIdx.x;                                    \
        L = i < s.Sq ? *row_at(&a.lse, &s, h, s.q0 + i) : (real)INFINITY;         \
        if (L == -(real)INFINITY || FATTNI_IS_HUGE(L)) L = (real)INFINITY;        \
        delta = L == (real)INFINITY                                               \
                    ? (real)0                                                     \
                    : ((const real *)a.delta)[row_number(&a, &s, h, i)];          \
    }
#define LOAD_ROWS(tile, view, h, i0, width)                                       \
    load_tile(tile, BM, row_at(&view, &s, h, s.q0 + (i0)), (view).row, s.Sq - (i0), width, \
              a.vector_qkv)
    if (steps > 0) {
        const int h = hk * a.group, i0 = first * BM;
        load_tile(k_tile, BN, row_at(&a.k, &s, hk, s.k0 + j0), a.k.row, keys, a.D, a.vector_qkv);
        load_tile(v_tile, BN, row_at(&a.v, &s, hk, s.k0 + j0), a.v.row, keys, a.Dv, a.vector_qkv);
        LOAD_ROWS(q_tile, a.q, h, i0, a.D);
        LOAD_ROWS(do_tile, a.d_o, h, i0, a.Dv);
        cp_async_commit();
        LOAD_STATISTICS(h, i0)
        if (!K_F64) {
            cp_async_wait(0);
            round_tile(k_tile, BN);
            round_tile(v_tile, BN);
        }
    }

    for (int step = 0; step < steps; ++step) {
        const int h = hk * a.group + step / row_blocks, i0 = (first + step % row_blocks) * BM;
        const int more = step + 1 < steps, next_h = hk * a.group + (step + 1) / row_blocks,
                  next_i0 = (first + (step + 1) % row_blocks) * BM;
        if ((int)threadIdx.x < BM)
            statistics[threadIdx.x] = L, statistics[BM + threadIdx.x] = delta;
        cp_async_wait(0);
        round_tile(q_tile, BM);
        round_tile(do_tile, BM);
        __syncthreads(); /* this step's tiles are there, and nobody reads the last dS any more */
        if (more) {
            LOAD_STATISTICS(next_h, next_i0)
        }

        real x[ROW_TILES][4], y[ROW_TILES][4], steepness[PLACES];
        clear(x, ROW_TILES);
        clear(y, ROW_TILES);
        const int my_row = DEPTH_SPLIT > 1 ? 0 : part_of_warp() * ROWS;
        const int from = DEPTH_SPLIT > 1 ? 16 * part_of_warp() : 0;
#pragma unroll 1
        for (int at = from; at < depth; at += 16 * DEPTH_SPLIT) /* S^T and dP^T */
#pragma unroll
            for (int n = 0; n < 16; n += 8) {
                step_nt(x, 1, ROW_TILES, k_tile, key0, q_tile, my_row, D, at, n);
                step_nt(y, 1, ROW_TILES, v_tile, key0, do_tile, my_row, D, at, n);
            }
        real p[PLACES], ds[PLACES];
        if (DEPTH_SPLIT > 1) {
            sum_depth(p, ds, x, y, sums);
        } else {
#pragma unroll
            for (int n = 0; n < PLACES; ++n) p[n] = x[n / 4][n % 4], ds[n] = y[n / 4][n % 4];
        }
#pragma unroll
        for (int n = 0; n < PLACES; ++n) p[n] = rounded_product(ARG(&a, scale), p[n]);
        if (scores_change(&a)) {
            general_scores(p, steepness, ds_tile, &a, &s, b, h, i0, j0);
            __syncthreads(); /* everyone is done with the places in the tile */
        }
#pragma unroll
        for (int n = 0; n < PLACES; ++n)
            p[n] = exponential(p[n] - statistics[place_row(n)]);
        if (!all_visible(&s, i0, j0)) { /* after the exponential: a masked P is 0 whatever L is */
#pragma unroll
            for (int n = 0; n < PLACES; ++n)
                if (!visible(&s, i0 + place_row(n), j0 + place_column(n))) p[n] = 0;
        }
        const uint64_t keep = a.drop_T ? kept(&a, b, h, i0, j0) : ~(uint64_t)0;
#pragma unroll
        for (int n = 0; n < PLACES; ++n) {
            const int stays = (int)(keep >> n & 1);
            const real dp = stays ? ARG(&a, keep_scale) * ds[n] : (real)0;
            ds[n] = p[n] * (dp - statistics[BM + place_row(n)]);
            if (!stays) p[n] = 0;
        }
        if (gradients_change(&a)) {
            put(ds_tile, ds);
            general_gradients(ds_tile, steepness, &a, &s, b, h, i0, j0);
            get(ds, ds_tile);
            __syncthreads();
        }
        publish(ds_tile, ds);
        if (SPLIT > 1) {
            publish(p_tile, p);
            /* The warps of these keys have, too. */
            named_barrier_sync(1 + KEY_WARPS + gradient_key() / 16, 32 * SPLIT * KEY_TILES);
        }
        add_product(dv, p_tile, (const real(*)[4])p, do_tile);
        add_product(dk, ds_tile, (const real(*)[4])ds, q_tile);
        __syncthreads(); /* dS is published, and nobody reads Q and dO any more */
        if (more) {
            LOAD_ROWS(q_tile, a.q, next_h, next_i0, a.D);
            LOAD_ROWS(do_tile, a.d_o, next_h, next_i0, a.Dv);
        }
        cp_async_commit();
        if (!a.dq.p) continue;

        real dq[ROWS_TN / 16 * DQ_GROUPS * VECTOR][4];
        product_tn(dq, DQ_GROUPS, BN, ds_tile, dq_row, BM, k_tile, D, dq_column);
        wait_turn(&a, &s, b, h, i0, j0, BN);
#pragma unroll
        for (int m = 0; m < ROWS_TN / 8; ++m) { /* rows of this thread */
            const int i = i0 + dq_row + row_tn(m / 2, m % 2);
            real *const to = row_at(&a.dq, &s, h, s.q0 + i);
            const int width = i < s.Sq ? a.D - dq_column : 0;
#pragma unroll
            for (int c = 0; c < DQ_GROUPS; ++c) {
                real x[2 * VECTOR];
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const vector y = columns_of(dq, m / 2 * DQ_GROUPS + c, m % 2, n);
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) x[n * VECTOR + e] = ARG(&a, scale) * y.e[e];
                }
                add_row(to + dq_column + c * GROUP, x, width - c * GROUP);
            }
        }
        end_turn(&a, b, h, i0);
    }
    cp_async_wait(0);
    store_gradient(dk, ARG(&a, scale), &a.dk, &s, hk, j0, a.D, a.flags & FATTN_ACC_DK,
                   a.vector_gradients);
    store_gradient(dv, ARG(&a, keep_scale), &a.dv, &s, hk, j0, a.Dv, a.flags & FATTN_ACC_DV,
                   a.vector_gradients);
}
#endif
