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
#if K_D == 128 || K_VARIANT == FATTNI_VARIANT_GENERAL
#define XOR_COLUMNS 256
#endif
enum { KEY_TILES = 2 };
#include "bwd/cuda/bwd_mma16_warp.cuh"

static_assert(ROW_TILES % 2 == 0, "S");

typedef struct shared_memory {
    half_type k[BN * PITCH], v[BN * PITCH];
    half_type q[2][BM * PITCH], d_o[2][BM * PITCH]; /* two stages */
    half_type p[BN * P_PITCH], ds[BN * P_PITCH];    /* transposed */
    row_statistics rows[2];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory), TILE_M = BM * PITCH * 2 /* bytes */ };

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_bwd_args args) {
    const fattni_bwd_args *const bwd = &args;
    const fattni_attention_args *const a = &args.a;
    extern __shared__ __align__(128) unsigned char SHARED_MEMORY[];
    const shared_memory *const tiles = (const shared_memory *)SHARED_MEMORY;
    const uint32_t shared = shared_address(SHARED_MEMORY), k_tile = MEMBER_ADDRESS(shared, k),
                   v_tile = MEMBER_ADDRESS(shared, v), q_tiles = MEMBER_ADDRESS(shared, q),
                   do_tiles = MEMBER_ADDRESS(shared, d_o), p_tile = MEMBER_ADDRESS(shared, p),
                   ds_tile = MEMBER_ADDRESS(shared, ds);
    const warp_part w = part_of_warp();

    key_block work;
    if (!find_key_block(a, blockIdx.x, BM, BN, &work)) return;
    const int b = work.b, hk = work.hk, j0 = work.j0, keys = work.keys, steps = work.rows.steps;
    const row_blocks rows = work.rows;
    const sequence s = work.s;

    float dk[KEY_TILES * COLUMN_TILES][4], dv[KEY_TILES * COLUMN_TILES][4];
    clear(dk, KEY_TILES * COLUMN_TILES);
    clear(dv, KEY_TILES * COLUMN_TILES);

    const int64_t base = row_base(bwd, &s, b, 0); /* padded row */
    row_block now, next = {rows.head, rows.first * BM};
    if (steps > 0) {
        load_keys(k_tile, v_tile, a, &s, hk, j0);
        load_q(q_tiles, bwd, &s, &next);
        load_do(do_tiles, bwd, &s, &next);
        load_statistics(MEMBER_ADDRESS(shared, rows), bwd, base, &next);
        cp_async_commit();
    }
    const int has_mean = w.dq_column0 == 0 && key_mean_of(bwd, b, hk);

    for (int step = 0; step < steps; ++step) {
        go_on(&now, &next, &rows, step);
        const tile_position at = {b, now.h, now.i0, j0, keys};
        const uint32_t stage = (uint32_t)(step & 1) * TILE_M, q_tile = q_tiles + stage, do_tile = do_tiles + stage;
        cp_async_wait(0);
        __syncthreads(); /* this step's tiles have arrived; all warps are done with the last one's */
        if (step + 1 < steps) {
            const uint32_t other = (uint32_t)TILE_M - stage;
            load_q(q_tiles + other, bwd, &s, &next);
            load_do(do_tiles + other, bwd, &s, &next);
            load_statistics(ELEMENT_ADDRESS(shared, rows, (step + 1) & 1), bwd, base, &next);
            cp_async_commit();
        }

        float p[2][ROW_TILES][4], ds[2][ROW_TILES][4], tanhs[2][ROW_TILES][4];
        keep_bits keep;
        product_nt(p[0], 2, ROW_TILES, D, lane_16(k_tile, PITCH), w.key0, lane_8(q_tile, PITCH), w.row0, PITCH);
        probabilities(p, tanhs, a, &s, &w, &at, tiles->rows[step & 1].lse2);
        store_probabilities(p_tile, p, keep, a, &w, &at);
        product_nt(ds[0], 2, ROW_TILES, D, lane_16(v_tile, PITCH), w.key0, lane_8(do_tile, PITCH), w.row0, PITCH);
        score_gradients(ds, p, tanhs, keep, bwd, &s, &w, &at, tiles->rows[step & 1].delta);
        store_transposed(ds_tile, ds, w.key0, w.row0);
        __syncthreads(); /* P and dS are in shared memory */

        product_nn(dv, 2, COLUMN_TILES, BM, lane_16(p_tile, P_PITCH), w.key0, P_PITCH, 0, lane_16(do_tile, PITCH),
                   w.column0, PITCH);
        float dq[2 * DQ_TILES][4];
        product_dq(dq, ds_tile, 0, k_tile, &w);
        if (K_CTAS > 2) add_dq(dq, ds_tile, 0, bwd, &s, &w, &at, padded_row(bwd, base, &now), has_mean);
        product_nn(dk, 2, COLUMN_TILES, BM, lane_16(ds_tile, P_PITCH), w.key0, P_PITCH, 0, lane_16(q_tile, PITCH),
                   w.column0, PITCH);
        if (K_CTAS <= 2) add_dq(dq, ds_tile, 0, bwd, &s, &w, &at, padded_row(bwd, base, &now), has_mean);
    }

    cp_async_wait(0);
    __syncthreads();
    store_gradients(dk, dv, k_tile, v_tile, bwd, &s, &w, hk, j0, keys);
}

DESCRIBE_KERNEL(fattni_bwd_args, SHARED_BYTES, 1);
