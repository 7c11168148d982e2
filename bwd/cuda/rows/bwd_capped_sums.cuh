/* What each row of dS sums to in 16-bit calls with a softcap, where keys have a mean (bwd_key_mean.cu), to dq_of_mean.
   Before the main kernel, after the one that finds means.

   With the softcap's derivative c, dS = P c (dP - delta) has no sum that is known before, but three sums over the keys
   that a row sees tell it (capped_sum_of_ds), of P, c and dP in fp32, for any number `near` delta:

       sum P (dP - near)        sum P c (dP - near)        sum P c

   near = dO.O - dL: it only must leave few digits to cancel.

   Tensors     q, d_o, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; dq_of_mean of padded rows.
   CTAs        one per row block of one (sequence, head); where keys have no mean it reads that and ends. With a causal
               mask the last rows have the most keys, and start first.
   Threads     ROW_WARPS x KEY_WARPS warps of 16 ROW_TILES rows and 8 KEY_TILES keys of S and dP.
   Shared      struct shared_memory. V arrives during Q K^T and tanh, the next K during dO V^T and sums.

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "bwd/cuda/bwd_blocks.cuh"
#include "bwd/cuda/bwd_workspace.cuh"
#include "core/device/load_8.cuh"
#include "core/device/mma16_tile.cuh"
#include "core/device/score_terms_mma.cuh"
#include "core/ptx/grid.h"

enum {
    D = K_D,
    PITCH = D,
    BM = K_BM,
    BN = K_BN,
    THREADS = 32 * K_WARPS,
    ROW_TILES = BM >= 64 ? 2 : 1, /* of 16 rows, of a warp */
    ROW_WARPS = BM / (16 * ROW_TILES),
    KEY_WARPS = K_WARPS / ROW_WARPS,
    KEY_TILES = BN / KEY_WARPS / 8,
    SUMS = 3
};
static_assert(D % 64 == 0 && ROW_WARPS * KEY_WARPS == K_WARPS && KEY_TILES % 2 == 0, "S");
static_assert(BM * PITCH / 8 % THREADS == 0 && BN * PITCH / 8 % THREADS == 0, "loads divide evenly");

typedef struct shared_memory {
    half_type q[BM * PITCH], d_o[BM * PITCH], k[BN * PITCH], v[BN * PITCH];
    float lse2[BM], near[BM], sums[KEY_WARPS][SUMS][BM];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };

#include "bwd/cuda/bwd_load16.cuh"

/* Where this thread's part of a tile of S begins: its first row and key. */
typedef struct thread_part {
    int row, key;
} thread_part;
DEVICE int warp_row(void) { return (int)threadIdx.x / 32 % ROW_WARPS * (16 * ROW_TILES); }
DEVICE int warp_key(void) { return (int)threadIdx.x / 32 / ROW_WARPS * (8 * KEY_TILES); }
DEVICE thread_part part_of_thread(void) {
    const int lane = (int)threadIdx.x % 32;
    const thread_part x = {warp_row() + lane / 4, warp_key() + lane % 4 * 2};
    return x;
}

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

/* L of row i, +inf beyond the sequence; dL. */
DEVICE float lse_of(const fattni_attention_args *a, const sequence *s, int h, int i) {
    if (i >= s->Sq) return INFINITY;
    return ((const float *)a->lse.p)[s->batch * a->lse.b + h * a->lse.h + (int64_t)(s->q0 + i) * a->lse.row];
}
DEVICE float d_lse_of(const fattni_bwd_args *bwd, const sequence *s, int h, int i) {
    const fattni_view *const x = &bwd->d_lse;
    if (i >= s->Sq || !x->p) return 0.0f;
    return ((const float *)x->p)[s->batch * x->b + h * x->h + (int64_t)(s->q0 + i) * x->row];
}
/* Whether dS of a row with this L is the main kernel's. */
DEVICE int counts(float L) { return L - L == 0.0f && !FATTNI_IS_HUGE(L); }

/* lse2 and near of the row block, dO of which has arrived. D / 8 lanes have a row. */
DEVICE void find_statistics(const fattni_bwd_args *bwd, const sequence *s, shared_memory *memory, uint32_t d_o, int h,
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
        memory->lse2[r] = counts(L) || L != L ? (L - bwd->lse_shift) * LOG2E : INFINITY;
        memory->near[r] = sum - d_lse_of(bwd, s, h, i0 + r);
    }
}

/* A thread's part of a tile of S, and CHUNK tiles of 8 keys of it, for which there are registers beside tanh and dP. */
enum { CHUNK = 2 };
typedef float tile_part[ROW_TILES][KEY_TILES][4];

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

/* Of this thread's rows: row 8 half + 16 r of its part. */
typedef float row_sums[SUMS][ROW_TILES][2];

/* Adds those of a tile, from tanh and dO V^T. */
DEVICE void add_sums(row_sums sums, const tile_part tanhs, tile_part dp, const fattni_attention_args *a,
                     const sequence *s, const shared_memory *memory, int b, int h, int i0, int j0) {
    const thread_part at = part_of_thread();
    const int all_seen = j0 >= i0 + BM - 1 + s->lo && j0 + BN - 1 <= i0 + s->hi && j0 + BN <= s->Sk;
    const float slope = slope_of(a, h);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
        const int row = at.row + 16 * r, i = i0 + row;
        const float base[2] = {memory->lse2[row], memory->lse2[row + 8]},
                    near[2] = {memory->near[row], memory->near[row + 8]};
        if (a->drop_T) {
            const dropout_plane plane = dropout_plane_of(a, b, h);
            uint32_t keep[(KEY_TILES + 7) / 8];
            keep_tiles(keep, KEY_TILES, a, &plane, 0, i, j0 + at.key);
#pragma unroll
            for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
                for (int e = 0; e < 4; ++e) dp[r][n][e] = is_kept(keep, 0, n, e) ? dp[r][n][e] * a->keep_scale : 0.0f;
        }
#pragma unroll
        for (int first = 0; first < KEY_TILES; first += CHUNK) {
            const int j = j0 + at.key + 8 * first;
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
                    const float t = tanhs[r][first + n][e], y = dp[r][first + n][e] - near[e / 2];
                    const float weight = p[n][e] * fmaf(-t, t, 1.0f);
                    sums[0][r][e / 2] += p[n][e] * y;
                    sums[1][r][e / 2] += weight * y;
                    sums[2][r][e / 2] += weight;
                }
        }
    }
}

/* To shared memory, over the lanes that share a row. */
DEVICE void store_sums(const row_sums sums, shared_memory *memory) {
    const thread_part at = part_of_thread();
#pragma unroll
    for (int n = 0; n < SUMS; ++n)
#pragma unroll
        for (int m = 0; m < 2 * ROW_TILES; ++m) {
            float x = sums[n][m / 2][m % 2];
            x += __shfl_xor_sync(ALL_LANES, x, 1);
            x += __shfl_xor_sync(ALL_LANES, x, 2);
            if (threadIdx.x % 4 == 0) memory->sums[threadIdx.x / 32 / ROW_WARPS][n][at.row + 8 * m] = x;
        }
}

/* dq_of_mean of row i, number r of the block. */
DEVICE float sum_of_row(const fattni_bwd_args *bwd, const sequence *s, const shared_memory *memory, int h, int i,
                        int r) {
    const fattni_attention_args *const a = &bwd->a;
    const float L = lse_of(a, s, h, i), sink = a->sink.p ? float_at(&a->sink, h) : -INFINITY;
    if (!counts(L)) return 0.0f;
    float sums[SUMS] = {};
    for (int w = 0; w < KEY_WARPS; ++w)
        for (int n = 0; n < SUMS; ++n) sums[n] += memory->sums[w][n][r];
    const float known = sum_of_ds(bwd, expf(sink - L), memory->near[r], d_lse_of(bwd, s, h, i));
    return capped_sum_of_ds(bwd, known, sums[0], sums[1], sums[2]);
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_bwd_args args) {
    begin_grid();
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    extern __shared__ __align__(1024) unsigned char SHARED_MEMORY[];
    shared_memory *const tiles = (shared_memory *)SHARED_MEMORY;
    const uint32_t shared = shared_address(SHARED_MEMORY), q = MEMBER_ADDRESS(shared, q),
                   d_o = MEMBER_ADDRESS(shared, d_o), k = MEMBER_ADDRESS(shared, k), v = MEMBER_ADDRESS(shared, v);
    const block_position at = block_at(gridDim.x - 1 - blockIdx.x, a->Sq, BM, a->Hq);
    const int b = at.b, h = at.h, hk = h / a->group, i0 = at.first;
    if (!key_mean_of(bwd, b, hk)) return;
    const sequence s = sequence_of(a, b);
    if (i0 >= max(s.Sq, 1)) return;
    const interval keys = keys_seen_by(&s, i0, min(BM, s.Sq - i0));
    int j0 = keys.begin / BN * BN;

    load_key_tile(k, a, &a->k, &s, hk, j0, a->D);
    load_tile(q, PITCH, BM, THREADS, half_row_at(&a->q, &s, h, s.q0 + i0), a->q.row, s.Sq - i0, a->D, a->vector_qkv);
    load_tile(d_o, PITCH, BM, THREADS, half_row_at(&bwd->d_o, &s, h, s.q0 + i0), bwd->d_o.row, s.Sq - i0, a->Dv,
              a->vector_qkv);
    cp_async_commit();
    wait_loads();
    find_statistics(bwd, &s, tiles, d_o, h, i0);

    row_sums sums = {};
    for (; j0 < keys.end; j0 += BN) {
        tile_part tanhs, dp;
        wait_loads(); /* K, and at first lse2 */
        load_key_tile(v, a, &a->v, &s, hk, j0, a->Dv);
        product_nt(tanhs[0], ROW_TILES, KEY_TILES, D, lane_16(q, PITCH), warp_row(), lane_8(k, PITCH), warp_key(),
                   PITCH);
        apply_cap(tanhs, a);
        wait_loads(); /* V */
        if (j0 + BN < keys.end) load_key_tile(k, a, &a->k, &s, hk, j0 + BN, a->D);
        product_nt(dp[0], ROW_TILES, KEY_TILES, D, lane_16(d_o, PITCH), warp_row(), lane_8(v, PITCH), warp_key(),
                   PITCH);
        add_sums(sums, tanhs, dp, a, &s, tiles, b, h, i0, j0);
    }
    store_sums(sums, tiles);
    __syncthreads();
    /* Padded rows, which have none, too: the kernels after read them with the others. */
    const int64_t base = row_base(bwd, &s, b, h);
    const int end =
        !a->cu_seqlens_q.p ? bwd->padded_rows : (s.Sq + bwd->row_block - 1) / bwd->row_block * bwd->row_block;
    for (int r = (int)threadIdx.x; i0 + r < end && (r < BM || i0 + BM >= s.Sq); r += THREADS)
        bwd->dq_of_mean[base + i0 + r] = r < BM ? sum_of_row(bwd, &s, tiles, h, i0 + r, r) : 0.0f;
}

DESCRIBE_KERNEL_THAT_WAITS(fattni_bwd_args, SHARED_BYTES, 1);
