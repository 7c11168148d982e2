/* Backward attention with mma.sync, for full and causal masks: as bwd_mma16.cuh, in 163 or 99 KiB of shared memory.

   For each row block: S^T = K Q^T, P = exp(S - L), dP^T = V dO^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += dS K.

   Threads     as bwd_mma16.cuh; a warp of blocks of 32 rows has 16 keys. Above head_dim 64 half of the warps compute
               S^T and the others dP^T, of 32 rows each, and then two share what both have: with 16 rows of both a warp
               would have fewer products per fragment that it loads.
   Shared      struct shared_memory: dO has one stage, with K_AHEAD (bwd_mma16_ahead.cuh) two, Q two where V's
               fragments are in registers (all, or all but the last V_COLUMNS). V arrives, and dV leaves, by way of Q or
               its own tile.
   Registers   to head_dim 64 K's fragments, too; above, the first half of the warps has K's in place of V's.
   Loads       dO of the next row block overlaps with dQ and dK, Q with all of this one; with one stage only with dQ;
               with two stages both with all of it.

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
#ifndef K_AHEAD
#define K_AHEAD 0
#endif
enum { APART = K_D > 64, KEY_TILES = K_BM == 32 ? 1 : 2 };
#include "bwd/cuda/bwd_mma16_warp.cuh"
#include "core/ptx/mbarrier.h"

enum {
    BESIDE = BM == 32,                         /* a tile has P^T and, in its other half, dS^T */
    V_COLUMNS = APART ? (BESIDE ? 64 : D) : 0, /* in shared memory */
    V_STEPS = (D - V_COLUMNS) / 16,            /* in registers */
    HELD = V_STEPS ? KEY_TILES * V_STEPS : 1,
    Q_STAGES = V_STEPS ? 2 : 1,
    EARLY_Q = Q_STAGES == 2 && BN <= BM, /* V takes one tile of Q: the first Q arrives in the other */
    DO_STAGES = K_AHEAD ? 2 : 1
};
static_assert(!GENERAL && ROW_TILES % 2 == 0, "S");
static_assert(!APART || ROWS_PER_WARP == 16, "two warps share 32 rows");
static_assert(BN <= Q_STAGES * BM, "V and dV fit into the tiles of Q");
static_assert(DO_STAGES == 1 || Q_STAGES == 2, "what is ahead of dO");

typedef struct shared_memory {
    half_type k[BN * PITCH], q[Q_STAGES][BM * PITCH], d_o[DO_STAGES][BM * PITCH];
    half_type p[BN * P_PITCH], ds[BESIDE ? 0 : BN * P_PITCH]; /* transposed */
    half_type v[BN * V_COLUMNS];                              /* its last columns */
    row_statistics rows[2];
    float4 scratch[APART && !BESIDE ? THREADS * 4 : 0]; /* for `share`; else each pair has its part of p */
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory), TILE_M = BM * PITCH * 2 /* bytes */ };

/* x: of side 0 S^T, of side 1 dP^T of this warp's keys and the pair's 32 rows. Each of the two warps gets half of the
   rows of both, the lower half or the upper one. scratch: the pair's. */
DEVICE void share(float p[KEY_TILES][ROW_TILES][4], float ds[KEY_TILES][ROW_TILES][4], const float x[KEY_TILES][4][4],
                  float4 *scratch, int side, int pair) {
    enum { HALF = KEY_TILES * 2 * 32 };
    float4 *const own = scratch + side * HALF + ((int)threadIdx.x & 31);
    const float4 *const others = scratch + !side * HALF + ((int)threadIdx.x & 31);
#pragma unroll
    for (int n = 0; n < 2 * KEY_TILES; ++n) {
        float given[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) given[e] = side ? x[n / 2][n % 2][e] : x[n / 2][n % 2 + 2][e];
        own[32 * n] = make_float4(given[0], given[1], given[2], given[3]);
    }
    named_barrier_sync(1 + pair, 64);
#pragma unroll
    for (int n = 0; n < 2 * KEY_TILES; ++n) {
        const float4 y = others[32 * n];
        const float other[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            p[n / 2][n % 2][e] = side ? other[e] : x[n / 2][n % 2][e];
            ds[n / 2][n % 2][e] = side ? x[n / 2][n % 2 + 2][e] : other[e];
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_bwd_args args) {
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    extern __shared__ __align__(128) unsigned char SHARED_MEMORY[];
    shared_memory *const tiles = (shared_memory *)SHARED_MEMORY;
    const uint32_t shared = shared_address(SHARED_MEMORY), k_tile = MEMBER_ADDRESS(shared, k),
                   q_tiles = MEMBER_ADDRESS(shared, q), do_tiles = MEMBER_ADDRESS(shared, d_o),
                   p_tile = MEMBER_ADDRESS(shared, p), v_tile = MEMBER_ADDRESS(shared, v),
                   ds_tile = BESIDE ? p_tile : MEMBER_ADDRESS(shared, ds);
    const int ds_column = BESIDE ? BM : 0;
    warp_part w = part_of_warp();
    const int warp = (int)threadIdx.x / 32, side = warp / (WARPS / 2), pair = warp % (WARPS / 2);
    if (APART) w.row0 = pair / KEY_WARPS * 32 + side * 16;
    float4 *const scratch = (BESIDE ? (float4 *)tiles->p : tiles->scratch) + pair * (KEY_TILES * 128);

    key_block work;
    if (!find_key_block(a, blockIdx.x, BM, BN, &work)) return;
    const int b = work.b, hk = work.hk, j0 = work.j0, keys = work.keys, steps = work.rows.steps;
    const row_blocks rows = work.rows;
    const sequence s = work.s;

    float dk[KEY_TILES * COLUMN_TILES][4], dv[KEY_TILES * COLUMN_TILES][4];
    clear(dk, KEY_TILES * COLUMN_TILES);
    clear(dv, KEY_TILES * COLUMN_TILES);

    uint32_t v[HELD][4], k[HELD][4];
    const int64_t base = row_base(bwd, &s, b, 0); /* padded row */
    row_block now, next = {rows.head, rows.first * BM};
    if (steps > 0) {
        load_keys(k_tile, V_STEPS ? q_tiles : v_tile, a, &s, hk, j0);
        load_do(do_tiles, bwd, &s, &next);
        if (EARLY_Q) load_q(q_tiles + TILE_M, bwd, &s, &next);
        if (V_STEPS && V_COLUMNS)
            load_tile(v_tile, V_COLUMNS, BN, THREADS, half_row_at(&a->v, &s, hk, s.k0 + j0) + (D - V_COLUMNS), a->v.row,
                      s.Sk - j0, a->Dv - (D - V_COLUMNS), a->vector_qkv);
        if (V_STEPS) {
            cp_async_commit();
            cp_async_wait(0);
            __syncthreads();
#pragma unroll
            for (int n = 0; n < KEY_TILES * V_STEPS; ++n)
                if (V_STEPS) {
                    const int key = w.key0 + 16 * (n / (V_STEPS + !V_STEPS)), d = 16 * (n % (V_STEPS + !V_STEPS));
                    load_a(v[n], lane_16(APART && !side ? k_tile : q_tiles, PITCH), PITCH, key, d);
                    if (!APART) load_a(k[n], lane_16(k_tile, PITCH), PITCH, key, d);
                }
            __syncthreads(); /* all warps have read V: Q takes its place */
        }
        if (!EARLY_Q) load_q(q_tiles, bwd, &s, &next);
        load_statistics(MEMBER_ADDRESS(shared, rows), bwd, base, &next);
        cp_async_commit();
    }
    const int has_mean = w.dq_column0 == 0 && key_mean_of(bwd, b, hk);

    for (int step = 0; step < steps; ++step) {
        go_on(&now, &next, &rows, step);
        const tile_position at = {b, now.h, now.i0, j0, keys};
        const uint32_t stage = Q_STAGES == 2 ? (uint32_t)(step & 1 ^ EARLY_Q) * TILE_M : 0, q_tile = q_tiles + stage,
                       do_tile = do_tiles + (DO_STAGES == 2 ? (uint32_t)(step & 1) * TILE_M : 0);
        float p[KEY_TILES][ROW_TILES][4], ds[KEY_TILES][ROW_TILES][4], dq[2 * DQ_TILES][4];
        keep_bits keep;

        cp_async_wait(0);
        __syncthreads(); /* Q and dO have arrived; all warps are done with P, dS and the last Q */
        if (step + 1 < steps) {
            if (DO_STAGES == 2) load_do(do_tiles + (uint32_t)(~step & 1) * TILE_M, bwd, &s, &next);
            if (Q_STAGES == 2) load_q(q_tiles + ((uint32_t)TILE_M - stage), bwd, &s, &next);
            load_statistics(ELEMENT_ADDRESS(shared, rows, (step + 1) & 1), bwd, base, &next);
            cp_async_commit();
        }
        if (APART) {
            float x[KEY_TILES][4][4];
            const uint32_t b_lane = lane_8(side ? do_tile : q_tile, PITCH);
            if (V_STEPS) {
                product_fragments_nt(x[0], 1, 4, V_STEPS, v, b_lane, 0, PITCH);
                add_product_nt(x[0], 1, 4, V_COLUMNS,
                               side ? fragment_at(lane_16(v_tile, V_COLUMNS), V_COLUMNS, w.key0, 0)
                                    : fragment_at(lane_16(k_tile, PITCH), PITCH, w.key0, D - V_COLUMNS),
                               0, V_COLUMNS, fragment_at(b_lane, PITCH, 0, D - V_COLUMNS), 0, PITCH);
            } else {
                product_nt(x[0], KEY_TILES, 4, D, lane_16(side ? v_tile : k_tile, PITCH), w.key0, b_lane,
                           w.row0 - 16 * side, PITCH);
            }
            share(p, ds, x, scratch, side, pair);
            if (BESIDE) named_barrier_sync(1 + pair, 64); /* both have read: P and dS take its place */
        } else {
            product_fragments_nt(p[0], KEY_TILES, ROW_TILES, V_STEPS, k, lane_8(q_tile, PITCH), w.row0, PITCH);
        }
        probabilities(p, 0, a, &s, &w, &at, tiles->rows[step & 1].lse2);
        store_transposed(p_tile, p, w.key0, w.row0);
        if (!APART)
            product_fragments_nt(ds[0], KEY_TILES, ROW_TILES, V_STEPS, v, lane_8(do_tile, PITCH), w.row0, PITCH);
        score_gradients(ds, p, 0, keep, bwd, &s, &w, &at, tiles->rows[step & 1].delta);
        store_transposed(ds_tile, ds, w.key0, w.row0 + ds_column);
        __syncthreads(); /* P and dS are in shared memory */

        product_nn(dv, KEY_TILES, COLUMN_TILES, BM, lane_16(p_tile, P_PITCH), w.key0, P_PITCH, 0,
                   lane_16(do_tile, PITCH), w.column0, PITCH);
        if (DO_STAGES == 1) {
            __syncthreads(); /* all warps have read dO */
            if (step + 1 < steps) {
                load_do(do_tile, bwd, &s, &next);
                cp_async_commit();
            }
        }
        const uint32_t ds_lane = fragment_at(lane_16(ds_tile, P_PITCH), P_PITCH, 0, ds_column);
        const int64_t padded = padded_row(bwd, base, &now);
        if (Q_STAGES == 1) {
            product_nn(dk, KEY_TILES, COLUMN_TILES, BM, ds_lane, w.key0, P_PITCH, 0, lane_16(q_tile, PITCH), w.column0,
                       PITCH);
            __syncthreads(); /* all warps have read Q */
            if (step + 1 < steps) {
                load_q(q_tile, bwd, &s, &next);
                cp_async_commit();
            }
        }
        product_dq(dq, ds_tile, ds_column, k_tile, &w);
        /* Above head_dim 64 dQ has no registers beside dK. */
        if (APART) add_dq(dq, ds_tile, ds_column, bwd, &s, &w, &at, padded, has_mean);
        if (Q_STAGES == 2)
            product_nn(dk, KEY_TILES, COLUMN_TILES, BM, ds_lane, w.key0, P_PITCH, 0, lane_16(q_tile, PITCH), w.column0,
                       PITCH);
        if (!APART) add_dq(dq, ds_tile, ds_column, bwd, &s, &w, &at, padded, has_mean);
    }

    cp_async_wait(0);
    __syncthreads(); /* all warps have read K and Q */
    store_gradients(dk, dv, k_tile, q_tiles, bwd, &s, &w, hk, j0, keys);
}

DESCRIBE_KERNEL(fattni_bwd_args, SHARED_BYTES, 1);
