/* Backward attention in F32 by fused multiply-add: one CTA per key block, every feature.

   For each row block: S = scale Q K^T, P = exp(S - L), dP = dO V^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += scale dS K.

   Tensors     q, d_o [b,h,i,d], k, v, dk, dv [b,g,j,d], lse [b,h,i]; delta from bwd_preprocess_real.cuh, which
               also zeroed dq.
   Ownership   dK, dV of BN keys stay in registers over all row blocks of all query heads of the
               group; dQ goes to the caller's tensor by atomic adds.
   Threads     blocks of 8 x 8 of every product (core/device/fma_tile.cuh): S_SPLIT threads share a block of S and dP,
               KEY_SPLIT one of dV and dK, ROW_SPLIT one of dQ.
   Shared      struct shared_memory.
   Loads       dO of the next row block overlaps with dK and dQ, Q with dQ.

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "core/ptx/mma.h"
#include "core/device/fma_tile.cuh"
#include "core/device/score_terms_fma.cuh"
#include "bwd/cuda/bwd_real.cuh"

enum { KEY_SPLIT = BLOCK * BLOCK * THREADS / (BN * D), ROW_SPLIT = BLOCK * BLOCK * THREADS / (BM * D) };
static_assert(KEY_SPLIT * BN * D == BLOCK * BLOCK * THREADS && KEY_SPLIT <= 2, "dK, dV");
static_assert(ROW_SPLIT * BM * D == BLOCK * BLOCK * THREADS && ROW_SPLIT <= 2, "dQ");

typedef struct shared_memory {
    real k[TILE(BN, D)], v[TILE(BN, D)]; /* paired (fma_tile.cuh) */
    real q[TILE(BM, D)], d_o[TILE(BM, D)];
    real s[TILE(BM, BN)]; /* P, then dS; paired */
    real L[BM], delta[BM];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(TILE(BN, D) % VECTOR == 0 && TILE(BM, D) % VECTOR == 0 && TILE(BM, BN) % VECTOR == 0, "vectors");

DEVICE void load_rows(real *tile, const fattni_view *view, const sequence *s, int h, int i0, int width, int vectors) {
    load_tile(tile, PLAIN, BM, row_at(view, s, h, s->q0 + i0), view->row, s->Sq - i0, width, vectors);
}

/* Sums a block of dK or dV over the KEY_SPLIT threads that share it, and stores this thread's part. */
DEVICE void store_gradient(vector *x, real factor, const fattni_view *view, const sequence *s, int head, int j0,
                           int width, int accumulate) {
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

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_bwd_args args) {
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    extern __shared__ __align__(128) unsigned char SHARED_MEMORY[];
    shared_memory *const tiles = (shared_memory *)SHARED_MEMORY;
    real *const k_tile = tiles->k, *const v_tile = tiles->v, *const q_tile = tiles->q, *const do_tile = tiles->d_o,
                *const s_tile = tiles->s;

    key_block work;
    if (!find_key_block(a, blockIdx.x, BM, BN, &work)) return;
    const int b = work.b, hk = work.hk, j0 = work.j0, keys = work.keys, steps = work.rows.steps;
    const row_blocks rows = work.rows;
    const sequence s = work.s;
    const int depth = (a->D + S_DEPTH - 1) / S_DEPTH * S_DEPTH;
    const int depth_v = (a->Dv + S_DEPTH - 1) / S_DEPTH * S_DEPTH;

    vector dk[2 * BLOCK], dv[2 * BLOCK];
    clear(dk, 2 * BLOCK);
    clear(dv, 2 * BLOCK);

    row_statistics loaded = {0, 0};
    if (steps > 0) {
        const row_block first = row_block_of(&rows, 0);
        load_tile(k_tile, PAIRED, BN, row_at(&a->k, &s, hk, s.k0 + j0), a->k.row, keys, a->D, a->vector_qkv);
        load_tile(v_tile, PAIRED, BN, row_at(&a->v, &s, hk, s.k0 + j0), a->v.row, keys, a->Dv, a->vector_qkv);
        load_rows(q_tile, &a->q, &s, first.h, first.i0, a->D, a->vector_qkv);
        load_rows(do_tile, &bwd->d_o, &s, first.h, first.i0, a->Dv, a->vector_qkv);
        cp_async_commit();
        load_statistics(&loaded, bwd, &s, first.h, first.i0);
    }

    for (int step = 0; step < steps; ++step) {
        const row_block now = row_block_of(&rows, step), next = row_block_of(&rows, step + 1);
        const int h = now.h, i0 = now.i0, more = step + 1 < steps;
        store_statistics(tiles->L, tiles->delta, &loaded);
        cp_async_wait(0);
        __syncthreads(); /* this step's tiles have arrived, and no warp reads the last dS any more */
        if (more) load_statistics(&loaded, bwd, &s, next.h, next.i0);

        real p[ELEMENTS], ds[ELEMENTS], dcap[ELEMENTS];
        product_nt(p, q_tile, k_tile, depth);
#pragma unroll
        for (int n = 0; n < ELEMENTS; ++n) p[n] = rounded_product(ARG(a, scale), p[n]);
        general_scores(p, dcap, s_tile, a, &s, b, h, i0, j0);
#pragma unroll
        for (int n = 0; n < ELEMENTS; ++n) p[n] = exp(p[n] - tiles->L[element_row(n)]);
        mask_probabilities(p, &s, i0, j0);
        /* P waits in shared memory until dP has been computed: there are no registers for both. */
#pragma unroll
        for (int r = 0; r < S_ROWS; ++r) put_row(s_tile, r, p + r * BLOCK);
        product_nt(ds, do_tile, v_tile, depth_v);
        const uint64_t keep = a->drop_T ? kept(a, b, h, i0, j0) : ~(uint64_t)0;
#pragma unroll
        for (int r = 0; r < S_ROWS; ++r) {
            const real delta_of_row = tiles->delta[element_row(r * BLOCK)];
            real *const x = p + r * BLOCK;
            get_row(x, s_tile, r);
#pragma unroll
            for (int c = 0; c < BLOCK; ++c) {
                const int n = r * BLOCK + c, is_kept = (int)(keep >> n & 1);
                const real dp = is_kept ? ARG(a, keep_scale) * ds[n] : (real)0;
                ds[n] = x[c] * (dp - delta_of_row);
                if (!is_kept) x[c] = 0;
            }
            if (a->drop_T) put_row(s_tile, r, x);
        }
        __syncthreads(); /* P is in shared memory */
        product_tn(dv, KEY_SPLIT, s_tile, do_tile);
        __syncthreads(); /* no warp reads P and dO any more */
        if (more) load_rows(do_tile, &bwd->d_o, &s, next.h, next.i0, a->Dv, a->vector_qkv);
#pragma unroll
        for (int r = 0; r < S_ROWS; ++r) put_row(s_tile, r, ds + r * BLOCK);
        general_gradients(s_tile, dcap, a, &bwd->d_bias, &s, b, h, i0, j0);
        __syncthreads(); /* dS is in shared memory */
        product_tn(dk, KEY_SPLIT, s_tile, q_tile);
        __syncthreads(); /* no warp reads Q any more */
        if (more) load_rows(q_tile, &a->q, &s, next.h, next.i0, a->D, a->vector_qkv);
        cp_async_commit();
        if (!bwd->dq.p) continue;

        vector dq[2 * BLOCK];
        clear(dq, 2 * BLOCK);
        product_nn(dq, 2, ROW_SPLIT, s_tile, k_tile, PAIRED);
        sum_parts((real *)dq, BLOCK, ROW_SPLIT);
        wait_dq_semaphore(bwd, &s, b, h, i0, j0, BN);
        const block part = block_of(D / BLOCK, ROW_SPLIT);
        const int row0 = i0 + part.y * BLOCK + part.part * (BLOCK / ROW_SPLIT);
        real *to = row_at(&bwd->dq, &s, h, s.q0 + row0) + part.x * VECTOR;
#pragma unroll
        for (int r = 0; r < BLOCK / ROW_SPLIT; ++r, to += bwd->dq.row)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const int width = row0 + r < s.Sq ? a->D - part.x * VECTOR - c * (D / 2) : 0;
                real *const x = dq[2 * r + c].e;
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) x[e] *= ARG(a, scale);
                if (bwd->vector_gradients) {
                    if (width > 0) reduce_add_4(to + c * (D / 2), x);
                    continue;
                }
#pragma unroll
                for (int e = 0; e < VECTOR; ++e)
                    if (e < width) reduce_add(to + c * (D / 2) + e, x[e]);
            }
        post_dq_semaphore(bwd, b, h, i0);
    }
    cp_async_wait(0);
    store_gradient(dk, ARG(a, scale), &bwd->dk, &s, hk, j0, a->D, a->flags & FATTN_ACC_DK);
    store_gradient(dv, ARG(a, keep_scale), &bwd->dv, &s, hk, j0, a->Dv, a->flags & FATTN_ACC_DV);
}

DESCRIBE_KERNEL(fattni_bwd_args, SHARED_BYTES, 1);
