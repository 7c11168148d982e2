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
#include "core/device/load_8.cuh"
#include "core/device/mma16_tile.cuh"
#include "core/device/score_terms_mma.cuh"
#include "core/ptx/grid.h"

enum { D = K_D, PITCH = D, BM = K_BM, BN = K_BN, THREADS = 32 * K_WARPS };

#include "bwd/cuda/rows/bwd_capped_sums_common.cuh"

/* Of a thread's part of S, CHUNK tiles of 8 keys of P for which there are registers beside tanh and dP. */
enum { CHUNK = 2 };
static_assert(D % 64 == 0 && KEY_TILES % CHUNK == 0, "S");
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

/* L and near of the row block, dO of which has arrived. D / 8 lanes have a row. */
DEVICE void find_statistics(const fattni_bwd_args *bwd, const sequence *s, row_statistics *rows, uint32_t d_o, int h,
                            int i0) {
    enum { LANES = D / 8, KIND = K_BF16 ? KIND_BF16 : KIND_F16 };
    const fattni_attention_args *const a = &bwd->a;
    const int kind = a->o_f32 ? KIND_F32 : KIND, lane = (int)threadIdx.x % LANES;
    const int64_t size = a->o_f32 ? 4 : 2, row = a->o.row * size;
    const char *const o =
        (const char *)a->o.p + (s->batch * a->o.b + h * a->o.h + (int64_t)(s->q0 + i0) * a->o.row) * size;
#pragma unroll 4
    for (int r = (int)threadIdx.x / LANES; r < BM; r += THREADS / LANES) {
        const uint4 chunk = load_chunk(d_o + tile_offset(PITCH, r, lane));
        float x[8], y[8], sum = 0.0f;
        load_8(x, o + r * row, kind, 8 * lane, i0 + r < s->Sq ? a->Dv : 0, bwd->vector_gradients);
        convert_8(y, (const uint16_t *)&chunk, KIND);
#pragma unroll
        for (int e = 0; e < 8; ++e) sum += x[e] * y[e];
#pragma unroll
        for (int lanes = LANES / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, lanes);
        if (lane != 0) continue;
        const float L = lse_of(a, s, h, i0 + r);
        rows->L[r] = counts(L) || L != L ? (L - bwd->lse_shift) * LOG2E : INFINITY;
        rows->near[r] = sum - d_lse_of(bwd, s, h, i0 + r);
    }
}

/* Products Q K^T to tanh. */
DEVICE void apply_cap(tile_part x, const fattni_attention_args *a) {
    if (a->softcap > FATTNI_LARGE_CAP)
        large_cap(x[0], ROW_TILES * KEY_TILES, a->scale, a->softcap, 1.0f);
    else
        cap(x[0], ROW_TILES * KEY_TILES, __fdividef(a->scale, a->softcap), 1.0f);
}

/* P = 0, whatever L is, where a row does not see a key; i, j: of the first element. */
DEVICE void mask_unseen(float (*p)[4], int tiles, const sequence *s, int i, int j) {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = row_of(0, i, n, e), key = column_of(0, j, n, e);
            if (key < row + s->lo || key > row + s->hi || key >= s->Sk) p[n][e] = 0.0f;
        }
}

/* Adds the sums of a tile, from tanh and dO V^T. */
DEVICE void add_sums(row_sums sums, const tile_part tanhs, tile_part dp, const fattni_attention_args *a,
                     const sequence *s, const row_statistics *rows, int b, int h, int i0, int j0) {
    const int key = j0 + thread_key();
    const int all_seen = j0 >= i0 + BM - 1 + s->lo && j0 + BN - 1 <= i0 + s->hi && j0 + BN <= s->Sk;
    const float slope = slope_of(a, h);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
        const int row = thread_row() + 16 * r, i = i0 + row;
        const float base[2] = {rows->L[row], rows->L[row + 8]}, near[2] = {rows->near[row], rows->near[row + 8]};
        if (a->drop_T) {
            const dropout_plane plane = dropout_plane_of(a, b, h);
            uint32_t keep[(KEY_TILES + 7) / 8];
            keep_tiles(keep, KEY_TILES, a, &plane, 0, i, key);
#pragma unroll
            for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) dp[r][n][e] = is_kept(keep, 0, n, e) ? dp[r][n][e] * a->keep_scale : 0.0f;
        }
#pragma unroll
        for (int first = 0; first < KEY_TILES; first += CHUNK) {
            const int j = key + 8 * first;
            float p[CHUNK][4];
#pragma unroll
            for (int n = 0; n < CHUNK; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) p[n][e] = a->softcap * tanhs[r][first + n][e];
            add_terms(p, CHUNK, 0, a, s, slope, b, h, i, j);
#pragma unroll
            for (int n = 0; n < CHUNK; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) p[n][e] = exp2_approx(p[n][e] * LOG2E - base[e / 2]);
            if (!all_seen) mask_unseen(p, CHUNK, s, i, j);
#pragma unroll
            for (int n = 0; n < CHUNK; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float t = tanhs[r][first + n][e];
                    add_element(sums, r, e, p[n][e], fmaf(-t, t, 1.0f), dp[r][first + n][e], near[e / 2]);
                }
        }
    }
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
    find_statistics(bwd, &s, &tiles->rows, d_o, h, i0);

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
    /* Padded rows, which have none, too: the kernels after read them with the others. */
    const int64_t base = row_base(bwd, &s, b, h);
    const int end =
        !a->cu_seqlens_q.p ? bwd->padded_rows : (s.Sq + bwd->row_block - 1) / bwd->row_block * bwd->row_block;
    for (int r = (int)threadIdx.x; i0 + r < end && (r < BM || i0 + BM >= s.Sq); r += THREADS)
        bwd->dq_of_mean[base + i0 + r] = r < BM ? sum_of_row(bwd, &s, &tiles->rows, h, i0 + r, r) : 0.0f;
}

DESCRIBE_KERNEL_THAT_WAITS(fattni_bwd_args, SHARED_BYTES, 1);
