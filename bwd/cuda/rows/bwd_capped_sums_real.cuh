/* What rows of dS sum to in TF32 calls with a softcap, where keys have a mean (bwd_key_mean.cu): to dQ, times scale and
   the mean. After bwd_preprocess_real.cuh, before the main kernel, which takes what its rounded dS sums to from dQ. The
   sums: bwd_capped_sums_common.cuh, with near = delta; S and dP of operands in TF32, as the main kernel has them.

   Tensors     q, d_o, dq [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; delta of bwd_preprocess_real.cuh.
   CTAs        one per row block of one (sequence, head); where keys have no mean it reads that and ends.
   Threads     ROW_WARPS x KEY_WARPS warps of 16 ROW_TILES rows and 8 KEY_TILES keys of S and dP.
   Shared      struct shared_memory. V arrives during Q K^T, the next K during the rest.

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "bwd/cuda/bwd_args.h"
#include "core/device/dropout.cuh"
#include "core/device/mma_tile.cuh"
#include "core/ptx/grid.h"
#include "core/device/score_real.cuh"

enum { THREADS_OF_S = THREADS, ROW_TILES = BM >= 64 ? 2 : 1 };

#include "bwd/cuda/rows/bwd_capped_sums_common.cuh"

typedef struct shared_memory {
    real q[BM * D], d_o[BM * D], k[BN * D], v[BN * D];
    row_statistics rows; /* L in natural units */
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };

/* A tile of K or V, of the keys at j0. */
DEVICE void load_key_tile(real *tile, const fattni_attention_args *a, const fattni_view *view, const sequence *s,
                          int hk, int j0, int width) {
    load_tile(tile, BN, row_at(view, s, hk, s->k0 + j0), view->row, s->Sk - j0, width, a->vector_qkv);
    cp_async_commit();
}
/* A tile of K or V has arrived, and is rounded; no warp reads what it read before. */
DEVICE void wait_tile(real *tile) {
    cp_async_wait(0);
    round_tile(tile, BN);
    __syncthreads();
}

/* x = A B^T of this warp's rows and keys. */
DEVICE void rows_by_keys(tile_part x, const fattni_attention_args *a, real *rows, real *keys) {
    const int depth = (max(a->D, a->Dv) + 15) / 16 * 16; /* beyond D or Dv tiles are zero */
    clear(x[0], ROW_TILES * KEY_TILES);
#pragma unroll 1
    for (int d = 0; d < depth; d += 16)
#pragma unroll
        for (int n = 0; n < 16; n += 8)
            step_nt(x[0], ROW_TILES, KEY_TILES, rows, warp_row(), keys, warp_key(), D, d, n);
}

/* Adds the sums of a tile, from Q K^T and dO V^T. */
DEVICE void add_sums(row_sums sums, const tile_part qk, const tile_part dp, const fattni_attention_args *a,
                     const sequence *s, const row_statistics *rows, int b, int h, int i0, int j0) {
    const dropout_plane plane = dropout_plane_of(a, b, h);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = thread_row() + 16 * r + e / 2 * 8, i = i0 + row, j = j0 + thread_key() + 8 * n + e % 2;
                real c = 1;
                const real x = score(qk[r][n][e], &c, a, s, b, h, i, j);
                const real p = x == -INFINITY ? 0.0f : exponential(x - rows->L[row]);
                const int kept = !a->drop_T || keep_at(a, &plane, i, j);
                add_element(sums, r, e, p, c, kept ? a->keep_scale * dp[r][n][e] : 0.0f, rows->near[row]);
            }
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_bwd_args args) {
    begin_grid();
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    extern __shared__ __align__(128) unsigned char SHARED_MEMORY[];
    shared_memory *const tiles = (shared_memory *)SHARED_MEMORY;
    row_statistics *const rows = &tiles->rows;
    row_block_of_cta at;
    if (!find_row_block(bwd, &at)) return;
    const int b = at.b, h = at.h, hk = at.hk, i0 = at.i0;
    const sequence s = at.s;
    const interval keys = at.keys;
    int j0 = keys.begin / BN * BN;

    load_key_tile(tiles->k, a, &a->k, &s, hk, j0, a->D);
    load_tile(tiles->q, BM, row_at(&a->q, &s, h, s.q0 + i0), a->q.row, s.Sq - i0, a->D, a->vector_qkv);
    load_tile(tiles->d_o, BM, row_at(&bwd->d_o, &s, h, s.q0 + i0), bwd->d_o.row, s.Sq - i0, a->Dv, a->vector_qkv);
    cp_async_commit();
    for (int r = (int)threadIdx.x; r < BM; r += THREADS) {
        const float L = lse_of(a, &s, h, i0 + r);
        rows->L[r] = counts(L) || L != L ? L : INFINITY;
        rows->near[r] = i0 + r < s.Sq ? bwd->delta[row_number(a, &s, h, i0 + r)] : 0.0f;
    }
    cp_async_wait(0);
    round_tile(tiles->q, BM);
    round_tile(tiles->d_o, BM);

    row_sums sums = {};
    for (; j0 < keys.end; j0 += BN) {
        tile_part qk, dp;
        wait_tile(tiles->k);
        load_key_tile(tiles->v, a, &a->v, &s, hk, j0, a->Dv);
        rows_by_keys(qk, a, tiles->q, tiles->k);
        wait_tile(tiles->v);
        if (j0 + BN < keys.end) load_key_tile(tiles->k, a, &a->k, &s, hk, j0 + BN, a->D);
        rows_by_keys(dp, a, tiles->d_o, tiles->v);
        add_sums(sums, qk, dp, a, &s, rows, b, h, i0, j0);
    }
    store_sums(sums, rows);
    __syncthreads();
    for (int r = (int)threadIdx.x; r < BM; r += THREADS) rows->L[r] = sum_of_row(bwd, &s, rows, h, i0 + r, r);
    __syncthreads();
    const float *const mean = key_mean_of(bwd, b, hk);
    for (int n = (int)threadIdx.x; n < BM * D; n += THREADS) {
        const int r = n / D, d = n % D;
        if (i0 + r < s.Sq && d < a->D) row_at(&bwd->dq, &s, h, s.q0 + i0 + r)[d] += a->scale * rows->L[r] * mean[d];
    }
}

DESCRIBE_KERNEL_THAT_WAITS(fattni_bwd_args, SHARED_BYTES, 1);
