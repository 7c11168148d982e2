/* What the kernels of capped sums for 16 bits share, with mma and with wgmma, whose accumulators are divided alike. */
#ifndef FATTNI_BWD_CUDA_ROWS_BWD_CAPPED_SUMS16_CUH
#define FATTNI_BWD_CUDA_ROWS_BWD_CAPPED_SUMS16_CUH

#include "bwd/cuda/rows/bwd_capped_sums_common.cuh"
#include "core/device/load_8.cuh"
#include "core/device/score_terms_mma.cuh"

/* Of a thread's part of S, CHUNK tiles of 8 keys of P for which there are registers beside tanh and dP. */
enum { CHUNK = 2 };
static_assert(KEY_TILES % CHUNK == 0, "S");

/* L and near of the row block. D / 8 lanes have a row. */
DEVICE void find_statistics(const fattni_bwd_args *bwd, const sequence *s, row_statistics *rows, int h, int i0) {
    enum { LANES = D > 128 ? 32 : D / 8, KIND = K_BF16 ? KIND_BF16 : KIND_F16 };
    const fattni_attention_args *const a = &bwd->a;
    const int kind = a->o_f32 ? KIND_F32 : KIND, lane = thread_of_s() % LANES, column = 8 * lane;
    const int64_t size = a->o_f32 ? 4 : 2, row = a->o.row * size, first = s->q0 + i0;
    const char *const o = (const char *)a->o.p + (s->batch * a->o.b + h * a->o.h + first * a->o.row) * size;
    const half_type *const d_o =
        (const half_type *)bwd->d_o.p + s->batch * bwd->d_o.b + h * bwd->d_o.h + first * bwd->d_o.row;
#pragma unroll 4
    for (int r = thread_of_s() / LANES; r < BM; r += THREADS_OF_S / LANES) {
        const int width = i0 + r < s->Sq ? a->Dv : 0;
        float x[8], y[8], sum = 0.0f;
        load_8(x, o + r * row, kind, column, width, bwd->vector_gradients);
        load_8(y, d_o + r * bwd->d_o.row, KIND, column, width, a->vector_qkv);
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

/* P, tanh and dP are 0, whatever they would be, where a row does not see a key; i, j: of the first element. */
DEVICE void mask_unseen(float (*p)[4], float (*tanhs)[4], float (*dp)[4], int tiles, const sequence *s, int i, int j) {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const int row = row_of(0, i, n, e), key = column_of(0, j, n, e);
            if (key < row + s->lo || key > row + s->hi || key >= s->Sk) p[n][e] = tanhs[n][e] = dp[n][e] = 0.0f;
        }
}

/* Adds the sums of a tile, from tanh and dO V^T. */
DEVICE void add_sums(row_sums sums, tile_part tanhs, tile_part dp, const fattni_attention_args *a, const sequence *s,
                     const row_statistics *rows, int b, int h, int i0, int j0) {
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
            if (!all_seen) mask_unseen(p, tanhs[r] + first, dp[r] + first, CHUNK, s, i, j);
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

/* What the rows sum to, to dq_of_mean; and 0 for padded rows, which the kernels after read with the others. */
DEVICE void store_row_block(const fattni_bwd_args *bwd, const sequence *s, const row_statistics *rows, int b, int h,
                            int i0) {
    const int64_t base = row_base(bwd, s, b, h);
    const int end =
        !bwd->a.cu_seqlens_q.p ? bwd->padded_rows : (s->Sq + bwd->row_block - 1) / bwd->row_block * bwd->row_block;
    for (int r = thread_of_s(); i0 + r < end && (r < BM || i0 + BM >= s->Sq); r += THREADS_OF_S)
        bwd->dq_of_mean[base + i0 + r] = r < BM ? sum_of_row(bwd, s, rows, h, i0 + r, r) : 0.0f;
}

#endif
