/* What the kernels of capped sums share: the division of a tile of S among warps, and a row's sums.

   With the softcap's derivative c, dS = P c (dP - delta) has no sum that is known before, but three sums over the keys
   that a row sees tell it (capped_sum_of_ds), of P, c and dP in fp32, for any number `near` delta:

       sum P (dP - near)        sum P c (dP - near)        sum P c

   An includer defines before: D, BM, BN, THREADS, of these THREADS_OF_S that have a part of S, the last ones, and
   ROW_TILES, of 16 rows, of a warp. */
#ifndef FATTNI_BWD_CUDA_ROWS_BWD_CAPPED_SUMS_COMMON_CUH
#define FATTNI_BWD_CUDA_ROWS_BWD_CAPPED_SUMS_COMMON_CUH

#include "bwd/cuda/bwd_blocks.cuh"
#include "bwd/cuda/bwd_workspace.cuh"

enum {
    ROW_WARPS = BM / (16 * ROW_TILES),
    KEY_WARPS = THREADS_OF_S / 32 / ROW_WARPS,
    KEY_TILES = BN / KEY_WARPS / 8, /* of 8 keys, of a warp */
    SUMS = 3
};
static_assert(32 * ROW_WARPS * KEY_WARPS == THREADS_OF_S && KEY_TILES * KEY_WARPS * 8 == BN, "S");

/* Of a row block. L: as an exponent of P has it, +inf where the row is not the main kernel's. */
typedef struct row_statistics {
    float L[BM], near[BM], sums[KEY_WARPS][SUMS][BM];
} row_statistics;

/* A thread's part of a tile of S: element e of tiles r and n is row 16 r + 8 (e/2), key 8 n + e%2 from its first ones
   on. */
typedef float tile_part[ROW_TILES][KEY_TILES][4];
DEVICE int thread_of_s(void) { return (int)threadIdx.x - (THREADS - THREADS_OF_S); }
DEVICE int warp_row(void) { return thread_of_s() / 32 % ROW_WARPS * (16 * ROW_TILES); }
DEVICE int warp_key(void) { return thread_of_s() / 32 / ROW_WARPS * (8 * KEY_TILES); }
DEVICE int thread_row(void) { return warp_row() + (int)threadIdx.x % 32 / 4; }
DEVICE int thread_key(void) { return warp_key() + (int)threadIdx.x % 4 * 2; }

/* Of this thread's rows: row 16 r + 8 half. */
typedef float row_sums[SUMS][ROW_TILES][2];
DEVICE void add_element(row_sums sums, int r, int e, float p, float c, float dp, float near) {
    const float y = dp - near, weight = p * c;
    sums[0][r][e / 2] += p * y;
    sums[1][r][e / 2] += weight * y;
    sums[2][r][e / 2] += weight;
}

/* To shared memory, over the lanes that share a row. */
DEVICE void store_sums(const row_sums sums, row_statistics *rows) {
#pragma unroll
    for (int n = 0; n < SUMS; ++n)
#pragma unroll
        for (int m = 0; m < 2 * ROW_TILES; ++m) {
            float x = sums[n][m / 2][m % 2];
            x += __shfl_xor_sync(ALL_LANES, x, 1);
            x += __shfl_xor_sync(ALL_LANES, x, 2);
            if (threadIdx.x % 4 == 0) rows->sums[thread_of_s() / 32 / ROW_WARPS][n][thread_row() + 8 * m] = x;
        }
}

/* L of row i, +inf beyond the sequence; dL; whether dS of a row with this L is the main kernel's. */
DEVICE float lse_of(const fattni_attention_args *a, const sequence *s, int h, int i) {
    if (i >= s->Sq) return INFINITY;
    return ((const float *)a->lse.p)[s->batch * a->lse.b + h * a->lse.h + (int64_t)(s->q0 + i) * a->lse.row];
}
DEVICE float d_lse_of(const fattni_bwd_args *bwd, const sequence *s, int h, int i) {
    const fattni_view *const x = &bwd->d_lse;
    if (i >= s->Sq || !x->p) return 0.0f;
    return ((const float *)x->p)[s->batch * x->b + h * x->h + (int64_t)(s->q0 + i) * x->row];
}
DEVICE int counts(float L) { return L - L == 0.0f && !FATTNI_IS_HUGE(L); }

/* What dS of row i sums to, number r of the block. */
DEVICE float sum_of_row(const fattni_bwd_args *bwd, const sequence *s, const row_statistics *rows, int h, int i,
                        int r) {
    const fattni_attention_args *const a = &bwd->a;
    const float L = lse_of(a, s, h, i), sink = a->sink.p ? float_at(&a->sink, h) : -INFINITY;
    if (!counts(L)) return 0.0f;
    float sums[SUMS] = {};
    for (int w = 0; w < KEY_WARPS; ++w)
        for (int n = 0; n < SUMS; ++n) sums[n] += rows->sums[w][n][r];
    const float known = sum_of_ds(bwd, expf(sink - L), rows->near[r], d_lse_of(bwd, s, h, i));
    return capped_sum_of_ds(bwd, known, sums[0], sums[1], sums[2]);
}

/* The row block of this CTA, one per row block of one (sequence, head): with a causal mask the last rows have the most
   keys, and start first. 0 where it has nothing to do, since the keys have no mean or there are no such rows; the first
   block of a sequence without rows has. */
typedef struct row_block_of_cta {
    int b, h, hk, i0;
    sequence s;
    interval keys; /* that its rows see */
} row_block_of_cta;
DEVICE int find_row_block(const fattni_bwd_args *bwd, row_block_of_cta *x) {
    const fattni_attention_args *const a = &bwd->a;
    const block_position at = block_at(gridDim.x - 1 - blockIdx.x, a->Sq, BM, a->Hq);
    x->b = at.b, x->h = at.h, x->hk = at.h / a->group, x->i0 = at.first;
    if (!key_mean_of(bwd, x->b, x->hk)) return 0;
    x->s = sequence_of(a, x->b);
    if (x->i0 >= max(x->s.Sq, 1)) return 0;
    x->keys = keys_seen_by(&x->s, x->i0, min(BM, x->s.Sq - x->i0));
    return 1;
}

#endif
