/* Backward attention with mma.sync in 99 KiB of shared memory, for full and causal masks: as bwd_mma16_lean.cuh, with
   blocks of twice as many keys and half as many barriers.

   For each row block: S^T = K Q^T, P = exp(S - L), dP^T = V dO^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += dS K.

   Threads     a warp has 16 keys and all rows: its P^T and dS^T are operands of dV and dK as they are. Only dS^T goes
               through shared memory, to dQ, of which a warp has 32 rows and a share of the columns.
   Shared      struct shared_memory. V's fragments stay in registers; V arrives, and dK and dV leave, by way of Q and K.
   Loads       Q of the next row block overlaps with all products but S^T, dO with dQ and S^T.

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
enum { KEY_TILES = 1 };
#include "bwd/cuda/bwd_mma16_warp.cuh"

enum { STEPS = BM / 16, STEPS_D = D / 16 };
static_assert(SPLIT == 1 && !GENERAL, "a warp has all rows of its keys");
static_assert(BN == 2 * BM, "V and dV fit into the two tiles of Q");

typedef struct shared_memory {
    half_type k[BN * PITCH], q[2][BM * PITCH] /* two stages */, d_o[BM * PITCH];
    half_type ds[BN * P_PITCH]; /* transposed */
    row_statistics rows[2];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory), TILE_M = BM * PITCH * 2 /* bytes */ };

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_bwd_args args) {
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    extern __shared__ __align__(128) unsigned char SHARED_MEMORY[];
    const shared_memory *const tiles = (const shared_memory *)SHARED_MEMORY;
    const uint32_t shared = shared_address(SHARED_MEMORY), k_tile = MEMBER_ADDRESS(shared, k),
                   q_tiles = MEMBER_ADDRESS(shared, q), do_tile = MEMBER_ADDRESS(shared, d_o),
                   ds_tile = MEMBER_ADDRESS(shared, ds);
    const warp_part w = part_of_warp();

    key_block work;
    if (!find_key_block(a, blockIdx.x, BM, BN, &work)) return;
    const int b = work.b, hk = work.hk, j0 = work.j0, keys = work.keys, steps = work.rows.steps;
    const row_blocks rows = work.rows;
    const sequence s = work.s;

    float dk[COLUMN_TILES][4], dv[COLUMN_TILES][4];
    clear(dk, COLUMN_TILES);
    clear(dv, COLUMN_TILES);

    uint32_t v[STEPS_D][4];
    const int64_t base = row_base(bwd, &s, b, 0); /* padded row */
    row_block now, next = {rows.head, rows.first * BM};
    if (steps > 0) {
        load_keys(k_tile, q_tiles, a, &s, hk, j0);
        load_do(do_tile, bwd, &s, &next);
        cp_async_commit();
        cp_async_wait(0);
        __syncthreads();
#pragma unroll
        for (int n = 0; n < STEPS_D; ++n) load_a(v[n], lane_16(q_tiles, PITCH), PITCH, w.key0, 16 * n);
        __syncthreads(); /* all warps have read V: Q takes its place */
        load_q(q_tiles, bwd, &s, &next);
        load_statistics(MEMBER_ADDRESS(shared, rows), bwd, base, &next);
        cp_async_commit();
        cp_async_commit(); /* of dO, which has arrived */
    }
    const int has_mean = w.dq_column0 == 0 && key_mean_of(bwd, b, hk);

    for (int step = 0; step < steps; ++step) {
        go_on(&now, &next, &rows, step);
        const tile_position at = {b, now.h, now.i0, j0, keys};
        const uint32_t stage = (uint32_t)(step & 1) * TILE_M, q_tile = q_tiles + stage;
        float p[1][ROW_TILES][4], ds[1][ROW_TILES][4];
        keep_bits keep;

        cp_async_wait(1);
        __syncthreads(); /* Q has arrived; all warps are done with dS and with the other stage of Q */
        product_nt(p[0], 1, ROW_TILES, D, lane_16(k_tile, PITCH), w.key0, lane_8(q_tile, PITCH), 0, PITCH);
        probabilities(p, 0, a, &s, &w, &at, tiles->rows[step & 1].lse2);

        cp_async_wait(0);
        __syncthreads(); /* dO has arrived */
        if (step + 1 < steps) {
            load_q(q_tiles + ((uint32_t)TILE_M - stage), bwd, &s, &next);
            load_statistics(ELEMENT_ADDRESS(shared, rows, (step + 1) & 1), bwd, base, &next);
        }
        cp_async_commit();
        product_fragments_nt(ds[0], 1, ROW_TILES, STEPS_D, v, lane_8(do_tile, PITCH), 0, PITCH);
        score_gradients(ds, p, 0, keep, bwd, &s, &w, &at, tiles->rows[step & 1].delta);
        store_transposed(ds_tile, ds, w.key0, 0);

        uint32_t p_rows[STEPS][4], ds_rows[STEPS][4];
        to_fragments(p_rows, p[0], STEPS);
        to_fragments(ds_rows, ds[0], STEPS);
        product_fragments_nn(dv, COLUMN_TILES, STEPS, p_rows, lane_16(do_tile, PITCH), PITCH);
        product_fragments_nn(dk, COLUMN_TILES, STEPS, ds_rows, lane_16(q_tile, PITCH), PITCH);
        __syncthreads(); /* dS is in shared memory, and all warps have read dO */
        if (step + 1 < steps) load_do(do_tile, bwd, &s, &next);
        cp_async_commit();
        float dq[2 * DQ_TILES][4];
        product_dq(dq, ds_tile, 0, k_tile, &w);
        add_dq(dq, ds_tile, 0, bwd, &s, &w, &at, padded_row(bwd, base, &now), has_mean);
    }

    cp_async_wait(0);
    __syncthreads(); /* all warps have read K and Q */
    store_gradients(dk, dv, k_tile, q_tiles, bwd, &s, &w, hk, j0, keys);
}

DESCRIBE_KERNEL(fattni_bwd_args, SHARED_BYTES, 1);
