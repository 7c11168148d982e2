/* Backward attention with mma.sync in little shared memory: as bwd_mma16.cuh, for GPUs with 163, 99 or 64 KiB per
   block.

   For each row block: S^T = K Q^T, P = exp(S - L), dP^T = V dO^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += dS K.

   Shared      Q and dO have one stage, P^T and dS^T one tile: P is overwritten when dV has been summed.
   V           its fragments stay in registers, unless the block is too large (V_IN_REGISTERS): then it has a tile.
   Loads       dO of the next row block overlaps with dK and dQ, Q with dQ.
   Threads     as bwd_mma16.cuh; with V in registers a warp has 16 keys.

   Instances: bwd_kernels.def. Macros in: cmake/instance.cu.in. */
enum { V_IN_REGISTERS = K_BN * K_D <= 64 * 128, KEY_TILES = V_IN_REGISTERS ? 1 : 2 };
#if K_VARIANT == FATTNI_VARIANT_GENERAL && K_BM == 64
#define XOR_COLUMNS 256
#endif
#include "bwd/cuda/bwd_mma16_warp.cuh"

typedef struct shared_memory {
    half_type k[BN * PITCH], q[BM * PITCH], d_o[BM * PITCH];
    half_type p[BN * P_PITCH]; /* P^T, then dS^T */
    row_statistics rows[2];
    half_type v[V_IN_REGISTERS ? 0 : BN * PITCH];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(BN <= BM, "V passes through the tile of dO, dK and dV through those of Q and dO");
static_assert(ROW_TILES % 2 == 0 || (ROW_TILES == 1 && D % 32 == 0), "S");

/* x += A B^T over D for warps with 8 rows: a load has the fragments of two steps. A from its tile, at row a_row, or
   the fragments `v`. */
DEVICE void product_of_8_rows(float x[4], const uint32_t (*v)[4], uint32_t a_tile, int a_row, uint32_t b_tile,
                              int b_row) {
    const int lane = (int)threadIdx.x & 31;
    const uint32_t b_lane = b_tile + tile_offset(PITCH, lane & 7, lane >> 3);
#pragma unroll
    for (int step = 0; step < D / 16; step += 2) {
        uint32_t b[4], a[2][4];
        load_b(b, b_lane, PITCH, b_row, 16 * step);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
            if (!v) load_a(a[n], lane_16(a_tile, PITCH), PITCH, a_row, 16 * (step + n));
            mma(x, v ? v[step + n] : a[n], b[2 * n], b[2 * n + 1]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_bwd_args args) {
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    extern __shared__ __align__(128) unsigned char SHARED_MEMORY[];
    const shared_memory *const tiles = (const shared_memory *)SHARED_MEMORY;
    const uint32_t shared = shared_address(SHARED_MEMORY), k_tile = MEMBER_ADDRESS(shared, k),
                   q_tile = MEMBER_ADDRESS(shared, q), do_tile = MEMBER_ADDRESS(shared, d_o),
                   p_tile = MEMBER_ADDRESS(shared, p), v_tile = V_IN_REGISTERS ? do_tile : MEMBER_ADDRESS(shared, v);
    const warp_part w = part_of_warp();

    key_block work;
    if (!find_key_block(a, blockIdx.x, BM, BN, &work)) return;
    const int b = work.b, hk = work.hk, j0 = work.j0, keys = work.keys, steps = work.rows.steps;
    const row_blocks rows = work.rows;
    const sequence s = work.s;

    float dk[KEY_TILES * COLUMN_TILES][4], dv[KEY_TILES * COLUMN_TILES][4];
    clear(dk, KEY_TILES * COLUMN_TILES);
    clear(dv, KEY_TILES * COLUMN_TILES);

    uint32_t v[V_IN_REGISTERS ? D / 16 : 1][4];
    const int64_t base = row_base(bwd, &s, b, 0); /* padded row */
    row_block now, next = {rows.head, rows.first * BM};
    if (steps > 0) {
        load_keys(k_tile, v_tile, a, &s, hk, j0);
        load_q(q_tile, bwd, &s, &next);
        cp_async_commit();
        if (V_IN_REGISTERS) {
            cp_async_wait(0);
            __syncthreads();
#pragma unroll
            for (int n = 0; n < D / 16; ++n)
                if (V_IN_REGISTERS) load_a(v[n], lane_16(v_tile, PITCH), PITCH, w.key0, 16 * n);
            __syncthreads(); /* all warps have read V: dO takes its place */
        }
        load_do(do_tile, bwd, &s, &next);
        load_statistics(MEMBER_ADDRESS(shared, rows), bwd, base, &next);
        cp_async_commit();
    }
    const int has_mean = w.dq_column0 == 0 && key_mean_of(bwd, b, hk);

    for (int step = 0; step < steps; ++step) {
        go_on(&now, &next, &rows, step);
        const tile_position at = {b, now.h, now.i0, j0, keys};
        float p[KEY_TILES][ROW_TILES][4], ds[KEY_TILES][ROW_TILES][4], tanhs[KEY_TILES][ROW_TILES][4];
        keep_bits keep;
        cp_async_wait(0);
        __syncthreads(); /* Q and dO have arrived; all warps are done with dS */

        if (ROW_TILES > 1) {
            product_nt(p[0], KEY_TILES, ROW_TILES, D, lane_16(k_tile, PITCH), w.key0, lane_8(q_tile, PITCH), w.row0,
                       PITCH);
        } else {
            clear(p[0], ROW_TILES);
            product_of_8_rows(p[0][0], 0, k_tile, w.key0, q_tile, w.row0);
        }
        probabilities(p, tanhs, a, &s, &w, &at, tiles->rows[step & 1].lse2);
        store_probabilities(p_tile, p, keep, a, &w, &at);
        if (!V_IN_REGISTERS) {
            product_nt(ds[0], KEY_TILES, ROW_TILES, D, lane_16(v_tile, PITCH), w.key0, lane_8(do_tile, PITCH), w.row0,
                       PITCH);
        } else if (ROW_TILES > 1) {
            product_fragments_nt(ds[0], 1, ROW_TILES, D / 16, v, lane_8(do_tile, PITCH), w.row0, PITCH);
        } else {
            clear(ds[0], ROW_TILES);
            product_of_8_rows(ds[0][0], v, 0, 0, do_tile, w.row0);
        }
        score_gradients(ds, p, tanhs, keep, bwd, &s, &w, &at, tiles->rows[step & 1].delta);
        __syncthreads(); /* P is in shared memory */
        product_nn(dv, KEY_TILES, COLUMN_TILES, BM, lane_16(p_tile, P_PITCH), w.key0, P_PITCH, 0,
                   lane_16(do_tile, PITCH), w.column0, PITCH);
        __syncthreads(); /* all warps have read P and dO */
        store_transposed(p_tile, ds, w.key0, w.row0);
        if (step + 1 < steps) {
            load_do(do_tile, bwd, &s, &next);
            load_statistics(ELEMENT_ADDRESS(shared, rows, (step + 1) & 1), bwd, base, &next);
            cp_async_commit();
        }
        __syncthreads(); /* dS is in shared memory */
        product_nn(dk, KEY_TILES, COLUMN_TILES, BM, lane_16(p_tile, P_PITCH), w.key0, P_PITCH, 0,
                   lane_16(q_tile, PITCH), w.column0, PITCH);
        __syncthreads(); /* all warps have read Q */
        if (step + 1 < steps) {
            load_q(q_tile, bwd, &s, &next);
            cp_async_commit();
        }
        float dq[2 * DQ_TILES][4];
        product_dq(dq, p_tile, 0, k_tile, &w);
        add_dq(dq, p_tile, 0, bwd, &s, &w, &at, padded_row(bwd, base, &now), has_mean);
    }

    store_gradients(dk, dv, q_tile, do_tile, bwd, &s, &w, hk, j0, keys);
}

DESCRIBE_KERNEL(fattni_bwd_args, SHARED_BYTES, 1);
