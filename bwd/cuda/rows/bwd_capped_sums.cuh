/* What each row of dS sums to in 16-bit calls with a softcap, where keys have a mean (bwd_key_mean.cu), to dq_of_mean.
   Before the main kernel, after the one that finds means. The sums: bwd_capped_sums_common.cuh, with near = dO.O - dL,
   which leaves few digits to cancel.

   Tensors     q, d_o, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; dq_of_mean of padded rows.
   CTAs        one per row block of one (sequence, head); where keys have no mean it reads that and ends.
   Threads     ROW_WARPS x KEY_WARPS warps of 16 ROW_TILES rows and 8 KEY_TILES keys of S and dP.
   Shared      struct shared_memory. V arrives during Q K^T and tanh, the next K during dO V^T and sums.

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "bwd/cuda/bwd_args.h"
#include "core/device/mma16_tile.cuh"
#include "core/ptx/grid.h"

enum {
    D = K_D,
    PITCH = D,
    BM = K_BM,
    BN = K_BN,
    THREADS = 32 * K_WARPS,
    THREADS_OF_S = THREADS,
    ROW_TILES = BM >= 64 ? 2 : 1
};

#include "bwd/cuda/rows/bwd_capped_sums16.cuh"

static_assert(D % 64 == 0, "S");
static_assert(BM * PITCH / 8 % THREADS == 0 && BN * PITCH / 8 % THREADS == 0, "loads divide evenly");

typedef struct shared_memory {
    half_type q[BM * PITCH], d_o[BM * PITCH], k[BN * PITCH], v[BN * PITCH];
    row_statistics rows; /* L in units of log2 */
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };

#include "bwd/cuda/bwd_load16.cuh"

/* A tile of K or V, of the keys at j0. */
DEVICE void load_key_tile(uint32_t tile, const fattni_attention_args *a, const fattni_view *view, const sequence *s,
                          int hk, int j0, int width) {
    load_tile(tile, PITCH, BN, THREADS, half_row_at(view, s, hk, s->k0 + j0), view->row, s->Sk - j0, width,
              a->vector_qkv);
    cp_async_commit();
}

/* This thread's loads are done, then those of all; and no warp reads what it read before. */
DEVICE void wait_loads(void) {
    cp_async_wait(0);
    __syncthreads();
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_bwd_args args) {
    begin_grid();
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    extern __shared__ __align__(1024) unsigned char SHARED_MEMORY[];
    shared_memory *const tiles = (shared_memory *)SHARED_MEMORY;
    const uint32_t shared = shared_address(SHARED_MEMORY), q = MEMBER_ADDRESS(shared, q),
                   d_o = MEMBER_ADDRESS(shared, d_o), k = MEMBER_ADDRESS(shared, k), v = MEMBER_ADDRESS(shared, v);
    row_block_of_cta at;
    if (!find_row_block(bwd, &at)) return;
    const int b = at.b, h = at.h, hk = at.hk, i0 = at.i0;
    const sequence s = at.s;
    const interval keys = at.keys;
    int j0 = keys.begin / BN * BN;

    load_key_tile(k, a, &a->k, &s, hk, j0, a->D);
    load_tile(q, PITCH, BM, THREADS, half_row_at(&a->q, &s, h, s.q0 + i0), a->q.row, s.Sq - i0, a->D, a->vector_qkv);
    load_tile(d_o, PITCH, BM, THREADS, half_row_at(&bwd->d_o, &s, h, s.q0 + i0), bwd->d_o.row, s.Sq - i0, a->Dv,
              a->vector_qkv);
    cp_async_commit();
    wait_loads();
    find_statistics(bwd, &s, &tiles->rows, h, i0);

    row_sums sums = {};
    for (; j0 < keys.end; j0 += BN) {
        tile_part tanhs, dp;
        wait_loads(); /* K, and at first L */
        load_key_tile(v, a, &a->v, &s, hk, j0, a->Dv);
        product_nt(tanhs[0], ROW_TILES, KEY_TILES, D, lane_16(q, PITCH), warp_row(), lane_8(k, PITCH), warp_key(),
                   PITCH);
        apply_cap(tanhs, a);
        wait_loads(); /* V */
        if (j0 + BN < keys.end) load_key_tile(k, a, &a->k, &s, hk, j0 + BN, a->D);
        product_nt(dp[0], ROW_TILES, KEY_TILES, D, lane_16(d_o, PITCH), warp_row(), lane_8(v, PITCH), warp_key(),
                   PITCH);
        add_sums(sums, tanhs, dp, a, &s, &tiles->rows, b, h, i0, j0);
    }
    store_sums(sums, &tiles->rows);
    __syncthreads();
    store_row_block(bwd, &s, &tiles->rows, b, h, i0);
}

DESCRIBE_KERNEL_THAT_WAITS(fattni_bwd_args, SHARED_BYTES, 1);
