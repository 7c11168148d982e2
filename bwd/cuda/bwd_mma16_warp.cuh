/* What the backward kernels of mma.sync for 16-bit tensors share: how a CTA's work is divided among its warps, and a
   warp's part of P^T and dS^T. Include after defining KEY_TILES, the tiles of 16 keys that a warp has. */
#ifndef FATTNI_BWD_CUDA_BWD_MMA16_WARP_H
#define FATTNI_BWD_CUDA_BWD_MMA16_WARP_H

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
    P_PITCH = (BM + 63) / 64 * 64, /* of P^T and dS^T */
    WARPS = K_WARPS,
    THREADS = 32 * WARPS,
    GENERAL = K_VARIANT == FATTNI_VARIANT_GENERAL,
    KEYS_PER_WARP = 16 * KEY_TILES,
    KEY_WARPS = BN / KEYS_PER_WARP,
    SPLIT = WARPS / KEY_WARPS,
    ROWS_PER_WARP = BM / SPLIT,
    ROW_TILES = ROWS_PER_WARP / 8, /* columns of S^T */
    COLUMNS_PER_WARP = D / SPLIT,
    COLUMN_TILES = COLUMNS_PER_WARP / 8, /* of dK, dV */
    DQ_ROW_WARPS = BM / 32,
    DQ_COLUMNS = D / (WARPS / DQ_ROW_WARPS),
    DQ_TILES = DQ_COLUMNS / 8
};
static_assert(KEY_WARPS * SPLIT == WARPS && ROWS_PER_WARP % 8 == 0 && COLUMN_TILES % 2 == 0, "S, dK, dV");
static_assert(DQ_ROW_WARPS * (WARPS / DQ_ROW_WARPS) == WARPS && DQ_TILES % 2 == 0, "dQ");
static_assert(BM * PITCH / 8 % THREADS == 0 && BN * PITCH / 8 % THREADS == 0, "loads divide evenly");

typedef struct row_statistics {
    float lse2[BM], delta[BM];
} row_statistics;

/* This thread's place: its warp's keys of the block, rows of P, columns of dK and dV; rows and columns of dQ. */
typedef struct warp_part {
    int g, t, key0, row0, column0, dq_row0, dq_column0;
} warp_part;
DEVICE warp_part part_of_warp(void) {
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    const warp_part x = {lane / 4,
                         lane % 4,
                         warp % KEY_WARPS * KEYS_PER_WARP,
                         warp / KEY_WARPS * ROWS_PER_WARP,
                         warp / KEY_WARPS * COLUMNS_PER_WARP,
                         warp % DQ_ROW_WARPS * 32,
                         warp / DQ_ROW_WARPS * DQ_COLUMNS};
    return x;
}
/* What lies across this block of keys and rows. */
typedef struct tile_position {
    int b, h, i0, j0, keys; /* keys: of the block that exist */
} tile_position;

#include "bwd/cuda/bwd_load16.cuh"

/* From one step to the next: its row block becomes `now`. By counting, as row_block_of divides, which takes as long as
   a product; but with features registers are short. */
DEVICE void go_on(row_block *now, row_block *next, const row_blocks *rows, int step) {
    if (GENERAL) {
        *now = row_block_of(rows, step), *next = row_block_of(rows, step + 1);
        return;
    }
    *now = *next;
    next->i0 += BM;
    if (next->i0 == (rows->first + rows->count) * BM) next->h++, next->i0 = rows->first * BM;
}
/* The first padded row of a row block. base: row_base of head 0. */
DEVICE int64_t padded_row(const fattni_bwd_args *bwd, int64_t base, const row_block *x) {
    return base + (int64_t)x->h * bwd->padded_rows + x->i0;
}
/* Loads of its tiles, and of its lse2 and delta. */
DEVICE void load_q(uint32_t tile, const fattni_bwd_args *bwd, const sequence *s, const row_block *x) {
    load_tile(tile, PITCH, BM, THREADS, half_row_at(&bwd->a.q, s, x->h, s->q0 + x->i0), bwd->a.q.row, s->Sq - x->i0,
              bwd->a.D, bwd->a.vector_qkv);
}
DEVICE void load_do(uint32_t tile, const fattni_bwd_args *bwd, const sequence *s, const row_block *x) {
    load_tile(tile, PITCH, BM, THREADS, half_row_at(&bwd->d_o, s, x->h, s->q0 + x->i0), bwd->d_o.row, s->Sq - x->i0,
              bwd->a.Dv, bwd->a.vector_qkv);
}
DEVICE void load_statistics(uint32_t rows, const fattni_bwd_args *bwd, int64_t base, const row_block *x) {
    const int n = (int)threadIdx.x * 4;
    const int64_t at = padded_row(bwd, base, x);
    if (n < BM)
        cp_async_16(rows + 4 * n, bwd->lse2 + at + n, 16);
    else if (n < 2 * BM)
        cp_async_16(rows + 4 * n, bwd->delta + at + n - BM, 16);
}

/* The dQ accumulator of a row block is in fragment order: each warp has 32 rows, two row tiles of as many column tiles,
   counted row by row; tile c of thread x is float4 number c * THREADS + x. */
DEVICE int64_t dq_offset(int tile) { return ((int64_t)tile * THREADS + threadIdx.x) * 4; }

/* A warp's keys (row0..) and columns (column0..) of a dK or dV block to global memory. `tile` has room for the block in
   shared memory, and only this warp uses its part. */
DEVICE void store_gradient(const float (*x)[4], int column_tiles, uint32_t tile, int columns, int row0, int column0,
                           const fattni_view *view, int batch, int head, int first_row, int rows, int width, int f32,
                           int accumulate, int vector) {
    if (!view->p) return;
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
    const int64_t at = batch * view->b + head * view->h + (int64_t)first_row * view->row;
    if (f32 || accumulate || !vector) {
#pragma unroll
        for (int n = 0; n < KEY_TILES * column_tiles; ++n)
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
    for (int n = 0; n < KEY_TILES * column_tiles; ++n) {
        const int row = row0 + n / column_tiles * 16 + g, chunk = column0 / 8 + n % column_tiles;
        store_shared_word(tile + tile_offset(columns, row, chunk) + 4u * t, pack(x[n][0], x[n][1]));
        store_shared_word(tile + tile_offset(columns, row + 8, chunk) + 4u * t, pack(x[n][2], x[n][3]));
    }
    __syncwarp();
    for (int n = lane; n < KEYS_PER_WARP * column_tiles; n += 32) {
        const int row = row0 + n / column_tiles, chunk = column0 / 8 + n % column_tiles;
        if (row < rows && chunk * 8 < width)
            *(uint4 *)((half_type *)view->p + at + row * view->row + chunk * 8) =
                load_chunk(tile + tile_offset(columns, row, chunk));
    }
}

/* This warp's keys and rows of P^T or dS^T to shared memory, [BN][P_PITCH]. */
DEVICE void store_transposed(uint32_t tile, const float x[KEY_TILES][ROW_TILES][4], int key0, int row0) {
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
    const uint32_t to = tile + tile_offset(P_PITCH, key0 + g, row0 / 8) + 4u * t;
#pragma unroll
    for (int k = 0; k < KEY_TILES; ++k)
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
            const uint32_t at = (to ^ (uint32_t)(n << 4)) + (uint32_t)(16 * k * P_PITCH * 2);
            store_shared_word(at, pack(x[k][n][0], x[k][n][1]));
            store_shared_word(at + 8 * P_PITCH * 2, pack(x[k][n][2], x[k][n][3]));
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
            load_a_trans(rows, lane_8(ds_tile, P_PITCH), P_PITCH, 16 * step, row0 + 16 * r);
            mma(sum, rows, ONES, ONES);
        }
        if (lane % 4 == 0) {
            reduce_add(at + 16 * r + lane / 4, -sum[0]);
            reduce_add(at + 16 * r + lane / 4 + 8, -sum[2]);
        }
    }
}

/* From S^T, the product of this warp's keys and rows, to P^T; tanhs: of a softcap, for the backward of scores. */
DEVICE void probabilities(float p[KEY_TILES][ROW_TILES][4], float tanhs[KEY_TILES][ROW_TILES][4],
                          const fattni_attention_args *a, const sequence *s, const warp_part *w,
                          const tile_position *at, const float *lse2) {
    const int i0 = at->i0, j0 = at->j0;
    const float unit = GENERAL ? LOG2E : a->scale * LOG2E;
    if (GENERAL)
#pragma unroll
        for (int k = 0; k < KEY_TILES; ++k)
            general_scores(p[k], tanhs[k], ROW_TILES, 1, a, s, slope_of(a, at->h), at->b, at->h,
                           i0 + w->row0 + 2 * w->t, j0 + w->key0 + 16 * k + w->g);
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n) {
        const float2 base = *(const float2 *)&lse2[w->row0 + 8 * n + 2 * w->t];
#pragma unroll
        for (int k = 0; k < KEY_TILES; ++k)
#pragma unroll
            for (int e = 0; e < 4; ++e) p[k][n][e] = exp2_approx(p[k][n][e] * unit - (e & 1 ? base.y : base.x));
    }
    if (j0 >= i0 + BM - 1 + s->lo && j0 + BN - 1 <= i0 + s->hi && at->keys == BN) return;
        /* After the exponential: a masked P is 0, whatever L is. */
#pragma unroll
    for (int k = 0; k < KEY_TILES; ++k)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int j = w->key0 + 16 * k + w->g + (e >= 2 ? 8 : 0);
            /* visible: i + lo <= j0 + j <= i + hi, i = i0 + row0 + 8 n + 2 t + (e & 1) */
            const int from = j0 + j - s->hi - i0 - w->row0 - 2 * w->t - (e & 1);
            const int to = j < at->keys ? j0 + j - s->lo - i0 - w->row0 - 2 * w->t - (e & 1) : -1;
#pragma unroll
            for (int n = 0; n < ROW_TILES; ++n)
                if (8 * n < from || 8 * n > to) p[k][n][e] = 0.0f;
        }
}

/* Bits of dropout's mask, four per row tile. */
typedef uint32_t keep_bits[KEY_TILES][(ROW_TILES + 7) / 8];

/* P^T, without what dropout drops, to shared memory; `keep`: with dropout. */
DEVICE void store_probabilities(uint32_t p_tile, const float p[KEY_TILES][ROW_TILES][4], keep_bits keep,
                                const fattni_attention_args *a, const warp_part *w, const tile_position *at) {
    if (!(GENERAL && a->drop_T)) {
        store_transposed(p_tile, p, w->key0, w->row0);
        return;
    }
    const dropout_plane plane_rng = dropout_plane_of(a, at->b, at->h);
    float kept[KEY_TILES][ROW_TILES][4];
#pragma unroll
    for (int k = 0; k < KEY_TILES; ++k) {
        keep_tiles(keep[k], ROW_TILES, a, &plane_rng, 1, at->i0 + w->row0 + 2 * w->t, at->j0 + w->key0 + 16 * k + w->g);
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) kept[k][n][e] = is_kept(keep[k], 1, n, e) ? p[k][n][e] : 0.0f;
    }
    store_transposed(p_tile, kept, w->key0, w->row0);
}

/* From dP^T to dS^T = P^T (dP^T - delta), of the scores before softcap; adds to d_bias. */
DEVICE void score_gradients(float ds[KEY_TILES][ROW_TILES][4], const float p[KEY_TILES][ROW_TILES][4],
                            const float tanhs[KEY_TILES][ROW_TILES][4], const keep_bits keep,
                            const fattni_bwd_args *bwd, const sequence *s, const warp_part *w, const tile_position *at,
                            const float *delta) {
    const fattni_attention_args *const a = &bwd->a;
#pragma unroll
    for (int n = 0; n < ROW_TILES; ++n) {
        const float2 base = *(const float2 *)&delta[w->row0 + 8 * n + 2 * w->t];
#pragma unroll
        for (int k = 0; k < KEY_TILES; ++k)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float dp = ds[k][n][e];
                if (GENERAL && a->drop_T) dp = is_kept(keep[k], 1, n, e) ? dp * a->keep_scale : 0.0f;
                ds[k][n][e] = p[k][n][e] * (dp - (e & 1 ? base.y : base.x));
            }
    }
    if (GENERAL) {
#pragma unroll
        for (int k = 0; k < KEY_TILES; ++k) {
            if (bwd->d_bias.p)
                add_dbias(ds[k], ROW_TILES, 1, &bwd->d_bias, bwd->dbias_scale, s, at->b, at->h,
                          at->i0 + w->row0 + 2 * w->t, at->j0 + w->key0 + 16 * k + w->g);
            if (a->softcap > 0) softcap_backward(ds[k], tanhs[k], ROW_TILES);
        }
    }
}

/* This warp's part of dS K. ds_column: where dS^T begins in its tile. */
DEVICE void product_dq(float dq[2 * DQ_TILES][4], uint32_t ds_tile, int ds_column, uint32_t k_tile,
                       const warp_part *w) {
    clear(dq, 2 * DQ_TILES);
    product_nn(dq, 2, DQ_TILES, BN, lane_8(ds_tile, P_PITCH), ds_column + w->dq_row0, P_PITCH, 1,
               lane_16(k_tile, PITCH), w->dq_column0, PITCH);
}
/* dQ += dS K of this block, to the accumulator. Its branches come after all products of a step, so that these are
   scheduled together. */
DEVICE void add_dq(const float dq[2 * DQ_TILES][4], uint32_t ds_tile, int ds_column, const fattni_bwd_args *bwd,
                   const sequence *s, const warp_part *w, const tile_position *at, int64_t padded, int has_mean) {
    if (!bwd->dq_accumulator) return;
    float *const to = bwd->dq_accumulator + padded * D;
    wait_dq_semaphore(bwd, s, at->b, at->h, at->i0, at->j0, BN);
#pragma unroll
    for (int c = 0; c < 2 * DQ_TILES; ++c) reduce_add_4(to + dq_offset(c), dq[c]);
    if (has_mean) subtract_sums(bwd->dq_of_mean + padded + w->dq_row0, ds_tile, ds_column + w->dq_row0);
    post_dq_semaphore(bwd, at->b, at->h, at->i0);
}

/* dK = scale dS^T Q and dV of the block to global memory, by way of two tiles of shared memory that are free. */
DEVICE void store_gradients(float dk[KEY_TILES * COLUMN_TILES][4], float dv[KEY_TILES * COLUMN_TILES][4],
                            uint32_t dk_tile, uint32_t dv_tile, const fattni_bwd_args *bwd, const sequence *s,
                            const warp_part *w, int hk, int j0, int keys) {
    const fattni_attention_args *const a = &bwd->a;
#pragma unroll
    for (int c = 0; c < KEY_TILES * COLUMN_TILES; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            dk[c][e] *= bwd->dk_scale;
            dv[c][e] *= bwd->dv_scale;
        }
    store_gradient(dk, COLUMN_TILES, dk_tile, PITCH, w->key0, w->column0, &bwd->dk, s->batch, hk, s->k0 + j0, keys,
                   a->D, bwd->dk_f32, a->flags & FATTN_ACC_DK, bwd->vector_gradients);
    store_gradient(dv, COLUMN_TILES, dv_tile, PITCH, w->key0, w->column0, &bwd->dv, s->batch, hk, s->k0 + j0, keys,
                   a->Dv, bwd->dv_f32, a->flags & FATTN_ACC_DV, bwd->vector_gradients);
}

#endif
