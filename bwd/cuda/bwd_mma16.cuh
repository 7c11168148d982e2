/* Backward attention with mma.sync, sm_80 and later: one CTA per key block (FlashAttention-2).

   For each row block: S^T = K Q^T, P = exp(S - L), dP^T = V dO^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += dS K.

   Tensors     q, d_o [b,h,i,d], k, v, dk, dv [b,g,j,d]; lse2 = L log2(e) and delta from bwd_preprocess.cu,
               padded rows hold +inf and 0, so that their P is 0.
   Ownership   dK, dV of BN keys stay in registers over all row blocks of all query heads of the group;
               dQ goes to an fp32 accumulator by red.add, in fragment order (dq_offset).
   Threads     KEY_WARPS x SPLIT warps. S^T and dP^T: a warp has 32 keys and BM/SPLIT rows; dV, dK: 32
               keys and D/SPLIT columns; dQ: 32 rows and a share of the columns. P^T and dS^T go
               from one division to the other through shared memory.
   Shared      struct shared_memory.
   Loads       Q, dO of the next row block overlap with all of this one.
   Rounding    P and dS to the input dtype, accumulation fp32; scale is applied to dK here, to dQ in
               bwd_postprocess.cu.

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "bwd/cuda/bwd_blocks.cuh"
#include "bwd/cuda/bwd_dq_semaphore.cuh"
#include "bwd/cuda/bwd_workspace.cuh"
#include "core/device/mma16_tile.cuh"
#include "core/device/score_terms_mma.cuh"

enum {
    D = K_D,
    PITCH = (D + 63) / 64 * 64,
    BM = K_BM,
    BN = K_BN,
    WARPS = K_WARPS,
    THREADS = 32 * WARPS,
    GENERAL = K_VARIANT == FATTNI_VARIANT_GENERAL,
    KEY_WARPS = BN / 32,
    SPLIT = WARPS / KEY_WARPS,
    ROWS_PER_WARP = BM / SPLIT,
    ROW_TILES = ROWS_PER_WARP / 8, /* columns of S^T */
    COLUMNS_PER_WARP = D / SPLIT,
    COLUMN_TILES = COLUMNS_PER_WARP / 8, /* of dK, dV */
    DQ_ROW_WARPS = BM / 32,
    DQ_COLUMNS = D / (WARPS / DQ_ROW_WARPS),
    DQ_TILES = DQ_COLUMNS / 8,
    TILE_M = BM * PITCH * 2 /* bytes */
};
static_assert(KEY_WARPS * SPLIT == WARPS && ROW_TILES % 2 == 0 && COLUMN_TILES % 2 == 0, "S, dK, dV");
static_assert(DQ_ROW_WARPS * (WARPS / DQ_ROW_WARPS) == WARPS && DQ_TILES % 2 == 0, "dQ");
static_assert(BM * PITCH / 8 % THREADS == 0 && BN * PITCH / 8 % THREADS == 0, "loads divide evenly");
static_assert(BM % 64 == 0, "P and dS are stored in chunks of 64 rows");

typedef struct row_statistics {
    float lse2[BM], delta[BM];
} row_statistics;
typedef struct shared_memory {
    half_type k[BN * PITCH], v[BN * PITCH];
    half_type q[2][BM * PITCH], d_o[2][BM * PITCH]; /* two stages */
    half_type p[BN * BM], ds[BN * BM];              /* transposed */
    row_statistics rows[2];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };

#include "bwd/cuda/bwd_load16.cuh"

/* lse2 and delta of the row block at padded row `at` to shared memory. */
DEVICE void load_statistics(uint32_t rows, const fattni_bwd_args *bwd, int64_t at) {
    const int n = (int)threadIdx.x * 4;
    if (n < BM)
        cp_async_16(rows + 4 * n, bwd->lse2 + at + n, 16);
    else if (n < 2 * BM)
        cp_async_16(rows + 4 * n, bwd->delta + at + n - BM, 16);
}

/* The dQ accumulator of a row block is in fragment order: each warp has 32 rows, two row tiles of as many column tiles,
   counted row by row; tile c of thread x is float4 number c * THREADS + x. */
DEVICE int64_t dq_offset(int tile) { return ((int64_t)tile * THREADS + threadIdx.x) * 4; }

/* A warp's 32 rows (row0..) and columns (column0..) of a dK or dV block to global memory; x has two row
   tiles. `tile` has room for the block in shared memory, and only this warp uses its part. */
DEVICE void store_gradient(const float (*x)[4], int column_tiles, uint32_t tile, int columns, int row0, int column0,
                           const fattni_view *view, int batch, int head, int first_row, int rows, int width, int f32,
                           int accumulate, int vector) {
    if (!view->p) return;
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
    const int64_t at = batch * view->b + head * view->h + (int64_t)first_row * view->row;
    if (f32 || accumulate || !vector) {
#pragma unroll
        for (int n = 0; n < 2 * column_tiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int row = row0 + n / column_tiles * 16 + g + (e >= 2 ? 8 : 0);
                const int d = column0 + n % column_tiles * 8 + 2 * t + (e & 1);
                if (row >= rows || d >= width) continue;
                const int64_t to = at + row * view->row + d;
                if (f32) {
                    float *const p = (float *)view->p + to;
                    *p = accumulate ? *p + x[n][e] : x[n][e];
                } else {
                    half_type *const p = (half_type *)view->p + to;
                    *p = to_half(accumulate ? to_float(*p) + x[n][e] : x[n][e]);
                }
            }
        return;
    }
    __syncwarp();
#pragma unroll
    for (int n = 0; n < 2 * column_tiles; ++n) {
        const int row = row0 + n / column_tiles * 16 + g, chunk = column0 / 8 + n % column_tiles;
        store_shared_word(tile + tile_offset(columns, row, chunk) + 4u * t, pack(x[n][0], x[n][1]));
        store_shared_word(tile + tile_offset(columns, row + 8, chunk) + 4u * t, pack(x[n][2], x[n][3]));
    }
    __syncwarp();
    for (int n = lane; n < 32 * column_tiles; n += 32) {
        const int row = row0 + n / column_tiles, chunk = column0 / 8 + n % column_tiles;
        if (row < rows && chunk * 8 < width)
            *(uint4 *)((half_type *)view->p + at + row * view->row + chunk * 8) =
                load_chunk(tile + tile_offset(columns, row, chunk));
    }
}

/* This warp's keys and rows of P^T or dS^T to shared memory, [BN][BM]. */
DEVICE void store_transposed(uint32_t tile, const float x[2][ROW_TILES][4], int key0, int row0) {
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
    const uint32_t to = tile + tile_offset(BM, key0 + g, row0 / 8) + 4u * t;
#pragma unroll
    for (int k = 0; k < 2; ++k)
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
            const uint32_t at = (to ^ (uint32_t)(n << 4)) + (uint32_t)(16 * k * BM * 2);
            store_shared_word(at, pack(x[k][n][0], x[k][n][1]));
            store_shared_word(at + 8 * BM * 2, pack(x[k][n][2], x[k][n][3]));
        }
}

/* Of keys with a mean (bwd_key_mean.cu): subtracts what 32 rows of dS sum to over this block's keys. `at`: dq_of_mean
   of the first row. One warp. */
DEVICE void subtract_sums(float *at, uint32_t ds_tile, int row0) {
    const int lane = (int)threadIdx.x & 31;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
        for (int step = 0; step < BN / 16; ++step) {
            uint32_t rows[4];
            load_a_trans(rows, lane_8(ds_tile, BM), BM, 16 * step, row0 + 16 * r);
            mma(sum, rows, ONES, ONES);
        }
        if (lane % 4 == 0) {
            reduce_add(at + 16 * r + lane / 4, -sum[0]);
            reduce_add(at + 16 * r + lane / 4 + 8, -sum[2]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_bwd_args args) {
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    extern __shared__ __align__(128) unsigned char bytes[];
    const shared_memory *const memory = (const shared_memory *)bytes;
    const uint32_t shared = shared_address(bytes), k_tile = MEMBER_ADDRESS(shared, k),
                   v_tile = MEMBER_ADDRESS(shared, v), q_tiles = MEMBER_ADDRESS(shared, q),
                   do_tiles = MEMBER_ADDRESS(shared, d_o), p_tile = MEMBER_ADDRESS(shared, p),
                   ds_tile = MEMBER_ADDRESS(shared, ds);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int key0 = warp % KEY_WARPS * 32, row0 = warp / KEY_WARPS * ROWS_PER_WARP,
              column0 = warp / KEY_WARPS * COLUMNS_PER_WARP;
    const int dq_row0 = warp % DQ_ROW_WARPS * 32, dq_column0 = warp / DQ_ROW_WARPS * DQ_COLUMNS;

    /* Key blocks vary fastest; with a causal mask the first has the most rows and starts first. */
    const block_position at = block_at(blockIdx.x, a->Sk, BN, a->Hkv);
    const int b = at.b, hk = at.h, j0 = at.first;
    const sequence s = sequence_of(a, b);
    if (j0 >= s.Sk) return;
    const int keys = min(BN, s.Sk - j0);
    const row_blocks rows = row_blocks_that_see(&s, j0, keys, hk, a->group, BM);
    const int steps = rows.steps;

    float dk[2 * COLUMN_TILES][4], dv[2 * COLUMN_TILES][4];
#pragma unroll
    for (int c = 0; c < 2 * COLUMN_TILES; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[c][e] = dv[c][e] = 0.0f;

    if (steps > 0) {
        const row_block first = row_block_of(&rows, 0);
        load_keys(k_tile, v_tile, a, &s, hk, j0);
        load_rows(q_tiles, do_tiles, bwd, &s, first.h, first.i0);
        load_statistics(MEMBER_ADDRESS(shared, rows), bwd, row_base(bwd, &s, b, first.h) + first.i0);
        cp_async_commit();
    }
    const int has_mean = dq_column0 == 0 && key_mean_of(bwd, b, hk);
    const float unit = GENERAL ? 1.4426950408889634f : a->scale * 1.4426950408889634f;

    for (int step = 0; step < steps; ++step) {
        const row_block now = row_block_of(&rows, step);
        const int h = now.h, i0 = now.i0;
        const uint32_t stage = (uint32_t)(step & 1) * TILE_M, q_tile = q_tiles + stage, do_tile = do_tiles + stage;
        const float *const lse2 = memory->rows[step & 1].lse2, *const delta = memory->rows[step & 1].delta;
        cp_async_wait(0);
        __syncthreads(); /* this step's tiles have arrived; all warps are done with the last one's */
        if (step + 1 < steps) {
            const row_block next = row_block_of(&rows, step + 1);
            const uint32_t other = (uint32_t)TILE_M - stage;
            load_rows(q_tiles + other, do_tiles + other, bwd, &s, next.h, next.i0);
            load_statistics(ELEMENT_ADDRESS(shared, rows, (step + 1) & 1), bwd, row_base(bwd, &s, b, next.h) + next.i0);
            cp_async_commit();
        }

        float p[2][ROW_TILES][4], ds[2][ROW_TILES][4];
        product_nt(p[0], 2, ROW_TILES, D, lane_16(k_tile, PITCH), key0, lane_8(q_tile, PITCH), row0, PITCH);
        float tanhs[2][ROW_TILES][4];
        if (GENERAL)
#pragma unroll
            for (int k = 0; k < 2; ++k)
                general_scores(p[k], tanhs[k], ROW_TILES, 1, a, &s, slope_of(a, h), b, h, i0 + row0 + 2 * t,
                               j0 + key0 + 16 * k + g);
        const int all = j0 >= i0 + BM - 1 + s.lo && j0 + BN - 1 <= i0 + s.hi && keys == BN;
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
            const float2 base = *(const float2 *)&lse2[row0 + 8 * n + 2 * t];
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int e = 0; e < 4; ++e) p[k][n][e] = exp2_approx(p[k][n][e] * unit - (e & 1 ? base.y : base.x));
        }
        if (!all) { /* after the exponential: a masked P is 0, whatever L is */
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int j = key0 + 16 * k + g + (e >= 2 ? 8 : 0);
                    /* visible: i + lo <= j0 + j <= i + hi, i = i0 + row0 + 8 n + 2 t + (e & 1) */
                    const int from = j0 + j - s.hi - i0 - row0 - 2 * t - (e & 1);
                    const int to = j < keys ? j0 + j - s.lo - i0 - row0 - 2 * t - (e & 1) : -1;
#pragma unroll
                    for (int n = 0; n < ROW_TILES; ++n)
                        if (8 * n < from || 8 * n > to) p[k][n][e] = 0.0f;
                }
        }
        uint32_t keep[2][(ROW_TILES + 7) / 8];
        if (GENERAL && a->drop_T) {
            const dropout_plane plane_rng = dropout_plane_of(a, b, h);
            float kept[2][ROW_TILES][4];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                keep_tiles(keep[k], ROW_TILES, a, &plane_rng, 1, i0 + row0 + 2 * t, j0 + key0 + 16 * k + g);
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        kept[k][n][e] = keep[k][n / 8] >> (4 * (n % 8) + e) & 1 ? p[k][n][e] : 0.0f;
            }
            store_transposed(p_tile, kept, key0, row0);
        } else {
            store_transposed(p_tile, p, key0, row0);
        }
        product_nt(ds[0], 2, ROW_TILES, D, lane_16(v_tile, PITCH), key0, lane_8(do_tile, PITCH), row0, PITCH);
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
            const float2 base = *(const float2 *)&delta[row0 + 8 * n + 2 * t];
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float dp = ds[k][n][e];
                    if (GENERAL && a->drop_T) dp = keep[k][n / 8] >> (4 * (n % 8) + e) & 1 ? dp * a->keep_scale : 0.0f;
                    ds[k][n][e] = p[k][n][e] * (dp - (e & 1 ? base.y : base.x));
                }
        }
        if (GENERAL) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if (bwd->d_bias.p)
                    add_dbias(ds[k], ROW_TILES, 1, &bwd->d_bias, bwd->dbias_scale, &s, b, h, i0 + row0 + 2 * t,
                              j0 + key0 + 16 * k + g);
                if (a->softcap > 0) softcap_backward(ds[k], tanhs[k], ROW_TILES);
            }
        }
        store_transposed(ds_tile, ds, key0, row0);
        __syncthreads(); /* P and dS are in shared memory */

        product_nn(dv, 2, COLUMN_TILES, BM, lane_16(p_tile, BM), key0, BM, 0, lane_16(do_tile, PITCH), column0, PITCH);
        float dq[2 * DQ_TILES][4];
#pragma unroll
        for (int c = 0; c < 2 * DQ_TILES; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) dq[c][e] = 0.0f;
        product_nn(dq, 2, DQ_TILES, BN, lane_8(ds_tile, BM), dq_row0, BM, 1, lane_16(k_tile, PITCH), dq_column0, PITCH);
        if (bwd->dq_accumulator) {
            float *const to = bwd->dq_accumulator + (row_base(bwd, &s, b, h) + i0) * D;
            wait_dq_semaphore(bwd, &s, b, h, i0, j0, BN);
#pragma unroll
            for (int c = 0; c < 2 * DQ_TILES; ++c) reduce_add_4(to + dq_offset(c), dq[c]);
            if (has_mean) subtract_sums(bwd->dq_of_mean + row_base(bwd, &s, b, h) + i0 + dq_row0, ds_tile, dq_row0);
            post_dq_semaphore(bwd, b, h, i0);
        }
        product_nn(dk, 2, COLUMN_TILES, BM, lane_16(ds_tile, BM), key0, BM, 0, lane_16(q_tile, PITCH), column0, PITCH);
    }

    /* dK = scale dS^T Q and dV are stored by way of the K and V tiles. */
    cp_async_wait(0);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 2 * COLUMN_TILES; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            dk[c][e] *= bwd->dk_scale;
            dv[c][e] *= bwd->dv_scale;
        }
    store_gradient(dk, COLUMN_TILES, k_tile, PITCH, key0, column0, &bwd->dk, s.batch, hk, s.k0 + j0, keys, a->D,
                   bwd->dk_f32, a->flags & FATTN_ACC_DK, bwd->vector_gradients);
    store_gradient(dv, COLUMN_TILES, v_tile, PITCH, key0, column0, &bwd->dv, s.batch, hk, s.k0 + j0, keys, a->Dv,
                   bwd->dv_f32, a->flags & FATTN_ACC_DV, bwd->vector_gradients);
}

DESCRIBE_KERNEL(fattni_bwd_args, SHARED_BYTES, 1);
