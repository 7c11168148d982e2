/* Backward attention in F32 by fused multiply-add: one CTA per key block, every feature.

   For each row block: S = scale Q K^T, P = exp(S - L), dP = dO V^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += scale dS K.

   Tensors     q, d_o [b,h,i,d], k, v, dk, dv [b,g,j,d], lse [b,h,i]; delta from bwd_preprocess_real.cuh, which
               also zeroed dq.
   Ownership   dK, dV of BN keys stay in registers over all row blocks of all query heads of the
               group; dQ goes to the caller's tensor by atomic adds.
   Threads     blocks of 8 x 8 of every product (core/device/simt_tile.cuh): S and dP by S_SPLIT threads to a
   block,
               dV and dK by KEY_SPLIT, dQ by ROW_SPLIT.
   Shared      K, V [BN][D], paired, Q, dO [BM][D], first P, then dS [BM][BN], paired, L and
               delta [BM].
   Loads       dO of the next row block flies under dK and dQ, Q under dQ.

   Instances: bwd_kernels.def; huge: bwd_huge_real.cuh. */
#if K_HUGE
#include "bwd/cuda/bwd_huge_real.cuh"
#else
#include "core/device/dq_order.cuh"
#include "core/attention/huge.h"
#include "core/ptx/mma.h"
#include "core/device/simt_tile.cuh"
#include "core/device/score_terms_fma.cuh"

enum {
    KEY_SPLIT = BLOCK * BLOCK * THREADS / (BN * D), ROW_SPLIT = BLOCK * BLOCK * THREADS / (BM * D)
};
static_assert(KEY_SPLIT * BN * D == BLOCK * BLOCK * THREADS && KEY_SPLIT <= 2, "dK, dV");
static_assert(ROW_SPLIT * BM * D == BLOCK * BLOCK * THREADS && ROW_SPLIT <= 2, "dQ");
static_assert(BM <= THREADS, "statistics");

/* This thread's part of a block of dK or dV. */
DEVICE void store_gradient(vector *x, real factor, const fattni_view *view, const sequence *s,
                           int head, int j0, int width, int accumulate) {
    const block at = block_of(D / BLOCK, KEY_SPLIT);
#pragma unroll
    for (int n = 0; n < 2 * BLOCK; ++n)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e)
            if (KEY_SPLIT > 1) x[n].e[e] += __shfl_xor_sync(0xffffffffu, x[n].e[e], 16);
    if (!view->p) return;
#pragma unroll
    for (int r = 0; r < BLOCK; ++r) {
        const int j = j0 + at.y * BLOCK + r;
        if (j >= s->Sk || r / (BLOCK / KEY_SPLIT) != at.part) continue;
        real *const to = row_at(view, s, head, s->k0 + j);
#pragma unroll
        for (int n = 0; n < 2 * VECTOR; ++n) {
            const int d = n / VECTOR * (D / 2) + at.x * VECTOR + n % VECTOR;
            const real y = factor * x[2 * r + n / VECTOR].e[n % VECTOR];
            if (d < width) to[d] = accumulate ? to[d] + y : y;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_cuda_args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    real *const k_tile = (real *)shared, *const v_tile = k_tile + TILE(BN, D),
               *const q_tile = v_tile + TILE(BN, D), *const do_tile = q_tile + TILE(BM, D),
               *const s_tile = do_tile + TILE(BM, D), *const statistics = s_tile + TILE(BM, BN);

    const int blocks = (a.Sk + BN - 1) / BN;
    const int plane = (int)(blockIdx.x / (unsigned)blocks), hk = plane % a.Hkv, b = plane / a.Hkv;
    const int j0 = (int)(blockIdx.x % (unsigned)blocks) * BN;
    const sequence s = sequence_of(&a, b);
    if (j0 >= s.Sk) return;
    const int keys = min(BN, s.Sk - j0);
    const int begin = max(0, min(j0 - s.hi, s.Sq)), end = max(0, min(j0 + keys - s.lo, s.Sq));
    const int first = begin / BM, row_blocks = end > begin ? (end + BM - 1) / BM - first : 0;
    const int steps = row_blocks * a.group; /* row blocks of head 0, of head 1, ... */
    const int depth = (a.D + S_DEPTH - 1) / S_DEPTH * S_DEPTH;
    const int depth_v = (a.Dv + S_DEPTH - 1) / S_DEPTH * S_DEPTH;

    vector dk[2 * BLOCK], dv[2 * BLOCK];
    clear(dk, 2 * BLOCK);
    clear(dv, 2 * BLOCK);

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
    load_tile(tile, PLAIN, BM, row_at(&view, &s, h, s.q0 + (i0)), (view).row, s.Sq - (i0), \
              width, a.vector_qkv)
    if (steps > 0) {
        const int h = hk * a.group, i0 = first * BM;
        load_tile(k_tile, PAIRED, BN, row_at(&a.k, &s, hk, s.k0 + j0), a.k.row, keys, a.D,
                  a.vector_qkv);
        load_tile(v_tile, PAIRED, BN, row_at(&a.v, &s, hk, s.k0 + j0), a.v.row, keys, a.Dv,
                  a.vector_qkv);
        LOAD_ROWS(q_tile, a.q, h, i0, a.D);
        LOAD_ROWS(do_tile, a.d_o, h, i0, a.Dv);
        cp_async_commit();
        LOAD_STATISTICS(h, i0)
    }

    for (int step = 0; step < steps; ++step) {
        const int h = hk * a.group + step / row_blocks, i0 = (first + step % row_blocks) * BM;
        const int more = step + 1 < steps, next_h = hk * a.group + (step + 1) / row_blocks,
                  next_i0 = (first + (step + 1) % row_blocks) * BM;
        if ((int)threadIdx.x < BM)
            statistics[threadIdx.x] = L, statistics[BM + threadIdx.x] = delta;
        cp_async_wait(0);
        __syncthreads(); /* this step's tiles are there, and nobody reads the last dS any more */
        if (more) {
            LOAD_STATISTICS(next_h, next_i0)
        }

        real p[PLACES], ds[PLACES], steepness[PLACES];
        product_nt(p, q_tile, k_tile, depth);
#pragma unroll
        for (int n = 0; n < PLACES; ++n) p[n] = rounded_product(ARG(&a, scale), p[n]);
        general_scores(p, steepness, s_tile, &a, &s, b, h, i0, j0);
#pragma unroll
        for (int n = 0; n < PLACES; ++n) p[n] = exp(p[n] - statistics[place_row(n)]);
        if (!all_visible(&s, i0, j0)) { /* after the exponential: a masked P is 0 whatever L is */
#pragma unroll
            for (int n = 0; n < PLACES; ++n)
                if (!visible(&s, i0 + place_row(n), j0 + place_column(n))) p[n] = 0;
        }
        /* P lies there until dP has come, for the registers, and then for all. */
#pragma unroll
        for (int r = 0; r < S_ROWS; ++r) put_row(s_tile, r, p + r * BLOCK);
        product_nt(ds, do_tile, v_tile, depth_v);
        const uint64_t keep = a.drop_T ? kept(&a, b, h, i0, j0) : ~(uint64_t)0;
#pragma unroll
        for (int r = 0; r < S_ROWS; ++r) {
            const real delta_of_row = statistics[BM + place_row(r * BLOCK)];
            real *const x = p + r * BLOCK;
            get_row(x, s_tile, r);
#pragma unroll
            for (int c = 0; c < BLOCK; ++c) {
                const int n = r * BLOCK + c, stays = (int)(keep >> n & 1);
                const real dp = stays ? ARG(&a, keep_scale) * ds[n] : (real)0;
                ds[n] = x[c] * (dp - delta_of_row);
                if (!stays) x[c] = 0;
            }
            if (a.drop_T) put_row(s_tile, r, x);
        }
        __syncthreads(); /* P is published */
        product_tn(dv, KEY_SPLIT, s_tile, do_tile);
        __syncthreads(); /* nobody reads P and dO any more */
        if (more) LOAD_ROWS(do_tile, a.d_o, next_h, next_i0, a.Dv);
#pragma unroll
        for (int r = 0; r < S_ROWS; ++r) put_row(s_tile, r, ds + r * BLOCK);
        general_gradients(s_tile, steepness, &a, &s, b, h, i0, j0);
        __syncthreads(); /* dS is published */
        product_tn(dk, KEY_SPLIT, s_tile, q_tile);
        __syncthreads(); /* nobody reads Q any more */
        if (more) LOAD_ROWS(q_tile, a.q, next_h, next_i0, a.D);
        cp_async_commit();
        if (!a.dq.p) continue;

        vector dq[2 * BLOCK];
        clear(dq, 2 * BLOCK);
        product_nn(dq, 2, ROW_SPLIT, s_tile, k_tile, PAIRED);
        sum_parts((real *)dq, BLOCK, ROW_SPLIT);
        wait_turn(&a, &s, b, h, i0, j0, BN);
        const block at = block_of(D / BLOCK, ROW_SPLIT);
        const int row0 = i0 + at.y * BLOCK + at.part * (BLOCK / ROW_SPLIT);
        real *to = row_at(&a.dq, &s, h, s.q0 + row0) + at.x * VECTOR;
#pragma unroll
        for (int r = 0; r < BLOCK / ROW_SPLIT; ++r, to += a.dq.row)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int width = row0 + r < s.Sq ? a.D - at.x * VECTOR - c * (D / 2) : 0;
                real *const x = dq[2 * r + c].e;
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) x[e] *= ARG(&a, scale);
                if (a.vector_gradients) {
                    if (width > 0) reduce_add_4(to + c * (D / 2), x);
                    continue;
                }
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
                    if (e < width) reduce_add(to + c * (D / 2) + e, x[e]);
            }
        end_turn(&a, b, h, i0);
    }
    cp_async_wait(0);
    store_gradient(dk, ARG(&a, scale), &a.dk, &s, hk, j0, a.D, a.flags & FATTN_ACC_DK);
    store_gradient(dv, ARG(&a, keep_scale), &a.dv, &s, hk, j0, a.Dv, a.flags & FATTN_ACC_DV);
}
#endif
