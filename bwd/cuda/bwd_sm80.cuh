/* Backward attention with mma.sync, sm_80 and later: one CTA per key block (FlashAttention-2).

   For each row block: S^T = K Q^T, P = exp(S - L), dP^T = V dO^T, dS = P (dP - delta),
   dV += P^T dO, dK += dS^T Q, dQ += dS K.

   Tensors     q, d_o [b,h,i,d], k, v, dk, dv [b,g,j,d]; lse2 = L log2(e) and delta from bwd_preprocess.cu,
               padded rows hold +inf and 0, so that their P is 0.
   Ownership   dK, dV of BN keys stay in registers over all row blocks of all query heads of the group;
               dQ goes to an fp32 accumulator by red.add, in fragment order (dq_offset).
   Threads     KEY_WARPS x SPLIT warps. S^T and dP^T: a warp has 32 keys and BM/SPLIT rows; dV, dK: 32
               keys and D/SPLIT columns; dQ: 32 rows and a share of the columns. P^T and dS^T go from
               one division to the other through shared memory.
   Shared      K, V [BN][PITCH], Q and dO two stages [BM][PITCH], P^T and dS^T [BN][BM], lse2 and
               delta.
   Loads       Q, dO of the next row block fly during all of this one.
   Rounding    P and dS to the input dtype, accumulation fp32; scale enters dK here, dQ in bwd_postprocess.cu.

   Instances: bwd_kernels.def; huge: bwd_huge.cuh. */
#if K_HUGE
#include "bwd/cuda/bwd_huge.cuh"
#else
#include "bwd/cuda/bwd_layout.cuh"
#include "core/device/dq_order.cuh"
#include "core/device/score_terms_mma.cuh"

enum {
    D = K_D, PITCH = (D + 63) / 64 * 64, BM = K_BM, BN = K_BN, WARPS = K_WARPS,
    THREADS = 32 * WARPS,
    CAUSAL = K_MASK == 1, GENERAL = K_MASK == 2,
    KEY_WARPS = BN / 32, SPLIT = WARPS / KEY_WARPS,
    ROWS_PER_WARP = BM / SPLIT, ROW_TILES = ROWS_PER_WARP / 8,         /* columns of S^T */
    COLUMNS_PER_WARP = D / SPLIT, COLUMN_TILES = COLUMNS_PER_WARP / 8, /* of dK, dV */
    DQ_ROW_WARPS = BM / 32, DQ_COLUMNS = D / (WARPS / DQ_ROW_WARPS), DQ_TILES = DQ_COLUMNS / 8,
    TILE_M = BM * PITCH * 2, TILE_N = BN * PITCH * 2, TILE_S = BN * BM * 2
};
static_assert(KEY_WARPS * SPLIT == WARPS && ROW_TILES % 2 == 0 && COLUMN_TILES % 2 == 0, "S, dK, dV");
static_assert(DQ_ROW_WARPS * (WARPS / DQ_ROW_WARPS) == WARPS && DQ_TILES % 2 == 0, "dQ");
static_assert(BM * PITCH / 8 % THREADS == 0 && BN * PITCH / 8 % THREADS == 0,
              "loads divide evenly");
static_assert(BM % 64 == 0, "P and dS are stored in chunks of 64 rows");

/* x^T to shared memory, [BN][BM]: the warp's keys and rows. */
DEVICE void publish(uint32_t tile, const float x[2][ROW_TILES][4], int key0, int row0) {
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

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_cuda_args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    const uint32_t k_tile = shared_address(shared), v_tile = k_tile + TILE_N,
                   q_tiles = v_tile + TILE_N, do_tiles = q_tiles + 2 * TILE_M,
                   p_tile = do_tiles + 2 * TILE_M, ds_tile = p_tile + TILE_S;
    float *const statistics = (float *)(shared + 2 * TILE_N + 4 * TILE_M + 2 * TILE_S);

    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int key0 = warp % KEY_WARPS * 32, row0 = warp / KEY_WARPS * ROWS_PER_WARP,
              column0 = warp / KEY_WARPS * COLUMNS_PER_WARP;
    const int dq_row0 = warp % DQ_ROW_WARPS * 32, dq_column0 = warp / DQ_ROW_WARPS * DQ_COLUMNS;

    /* Key blocks vary fastest; with a causal mask the first has the most rows and starts first. */
    const int blocks = (a.Sk + BN - 1) / BN;
    const int plane = (int)(blockIdx.x / (unsigned)blocks), hk = plane % a.Hkv, b = plane / a.Hkv;
    const int j0 = (int)(blockIdx.x % (unsigned)blocks) * BN;
    const sequence s = sequence_of(&a, b);
    if (j0 >= s.Sk) return;
    const int keys = min(BN, s.Sk - j0);
    const int begin = max(0, min(j0 - s.hi, s.Sq)), end = max(0, min(j0 + keys - s.lo, s.Sq));
    const int first = begin / BM, row_blocks = end > begin ? (end + BM - 1) / BM - first : 0;
    const int steps = row_blocks * a.group; /* row blocks of head 0, of head 1, ... */

    const half_type *const k = (const half_type *)a.k.p + s.batch * a.k.b + hk * a.k.h +
                               (int64_t)(s.k0 + j0) * a.k.row;
    const half_type *const v = (const half_type *)a.v.p + s.batch * a.v.b + hk * a.v.h +
                               (int64_t)(s.k0 + j0) * a.v.row;
    const half_type *const q = (const half_type *)a.q.p + s.batch * a.q.b + (int64_t)s.q0 * a.q.row;
    const half_type *const d_o =
        (const half_type *)a.d_o.p + s.batch * a.d_o.b + (int64_t)s.q0 * a.d_o.row;

    float dk[2 * COLUMN_TILES][4], dv[2 * COLUMN_TILES][4];
#pragma unroll
    for (int c = 0; c < 2 * COLUMN_TILES; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) dk[c][e] = dv[c][e] = 0.0f;

    if (steps > 0) {
        const int h = hk * a.group, i = first * BM;
        load_tile(k_tile, PITCH, BN, THREADS, k, a.k.row, keys, a.D, a.vector_qkv);
        load_tile(v_tile, PITCH, BN, THREADS, v, a.v.row, keys, a.Dv, a.vector_qkv);
        load_tile(q_tiles, PITCH, BM, THREADS, q + h * a.q.h + (int64_t)i * a.q.row, a.q.row,
                  s.Sq - i, a.D, a.vector_qkv);
        load_tile(do_tiles, PITCH, BM, THREADS, d_o + h * a.d_o.h + (int64_t)i * a.d_o.row,
                  a.d_o.row, s.Sq - i, a.Dv, a.vector_qkv);
        load_statistics(statistics, BM, &a, &s, b, h, i);
        cp_async_commit();
    }
    const float unit = GENERAL ? 1.4426950408889634f : a.scale * 1.4426950408889634f;

    for (int step = 0; step < steps; ++step) {
        const int h = hk * a.group + step / row_blocks, i0 = (first + step % row_blocks) * BM;
        const uint32_t stage = (uint32_t)(step & 1) * TILE_M, q_tile = q_tiles + stage,
                       do_tile = do_tiles + stage;
        const float *const lse2 = statistics + (step & 1) * 2 * BM, *const delta = lse2 + BM;
        cp_async_wait(0);
        __syncthreads(); /* this step's tiles are there; everyone is done with the last one's */
        if (step + 1 < steps) {
            const int next_h = hk * a.group + (step + 1) / row_blocks,
                      next_i = (first + (step + 1) % row_blocks) * BM;
            const uint32_t other = (uint32_t)TILE_M - stage;
            load_tile(q_tiles + other, PITCH, BM, THREADS,
                      q + next_h * a.q.h + (int64_t)next_i * a.q.row, a.q.row, s.Sq - next_i, a.D,
                      a.vector_qkv);
            load_tile(do_tiles + other, PITCH, BM, THREADS,
                      d_o + next_h * a.d_o.h + (int64_t)next_i * a.d_o.row, a.d_o.row, s.Sq - next_i,
                      a.Dv, a.vector_qkv);
            load_statistics(statistics + ((step + 1) & 1) * 2 * BM, BM, &a, &s, b, next_h, next_i);
            cp_async_commit();
        }

        float p[2][ROW_TILES][4], ds[2][ROW_TILES][4];
        product_nt(p[0], 2, ROW_TILES, D, lane_16(k_tile, PITCH), key0, lane_8(q_tile, PITCH), row0,
                   PITCH);
        float tanhs[2][ROW_TILES][4];
        if (GENERAL)
#pragma unroll
            for (int k = 0; k < 2; ++k)
                general_scores(p[k], tanhs[k], ROW_TILES, 1, &a, &s, slope_of(&a, h), b, h,
                               i0 + row0 + 2 * t, j0 + key0 + 16 * k + g);
        const int all = j0 >= i0 + BM - 1 + s.lo && j0 + BN - 1 <= i0 + s.hi && keys == BN;
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
            const float2 base = *(const float2 *)&lse2[row0 + 8 * n + 2 * t];
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int e = 0; e < 4; ++e)
                    p[k][n][e] = exp2_approx(p[k][n][e] * unit - (e & 1 ? base.y : base.x));
        }
        if (!all) { /* after the exponential: a masked P is 0 whatever L is */
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
        if (GENERAL && a.drop_T) {
            const dropout_plane plane_rng = dropout_plane_of(&a, b, h);
            float kept[2][ROW_TILES][4];
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                keep_tiles(keep[k], ROW_TILES, &a, &plane_rng, 1, i0 + row0 + 2 * t,
                           j0 + key0 + 16 * k + g);
#pragma unroll
                for (int n = 0; n < ROW_TILES; ++n)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        kept[k][n][e] = keep[k][n / 8] >> (4 * (n % 8) + e) & 1 ? p[k][n][e] : 0.0f;
            }
            publish(p_tile, kept, key0, row0);
        } else {
            publish(p_tile, p, key0, row0);
        }
        product_nt(ds[0], 2, ROW_TILES, D, lane_16(v_tile, PITCH), key0, lane_8(do_tile, PITCH),
                   row0, PITCH);
#pragma unroll
        for (int n = 0; n < ROW_TILES; ++n) {
            const float2 base = *(const float2 *)&delta[row0 + 8 * n + 2 * t];
#pragma unroll
            for (int k = 0; k < 2; ++k)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float dp = ds[k][n][e];
                    if (GENERAL && a.drop_T)
                        dp = keep[k][n / 8] >> (4 * (n % 8) + e) & 1 ? dp * a.keep_scale : 0.0f;
                    ds[k][n][e] = p[k][n][e] * (dp - (e & 1 ? base.y : base.x));
                }
        }
        if (GENERAL) {
#pragma unroll
            for (int k = 0; k < 2; ++k) {
                if (a.d_bias.p)
                    add_dbias(ds[k], ROW_TILES, 1, &a, &s, b, h, i0 + row0 + 2 * t, j0 + key0 + 16 * k + g);
                if (a.softcap > 0) through_cap(ds[k], tanhs[k], ROW_TILES);
            }
        }
        publish(ds_tile, ds, key0, row0);
        __syncthreads(); /* P and dS are published */

        product_nn(dv, 2, COLUMN_TILES, BM, lane_16(p_tile, BM), key0, BM, 0,
                   lane_16(do_tile, PITCH), column0, PITCH);
        float dq[2 * DQ_TILES][4];
#pragma unroll
        for (int c = 0; c < 2 * DQ_TILES; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) dq[c][e] = 0.0f;
        product_nn(dq, 2, DQ_TILES, BN, lane_8(ds_tile, BM), dq_row0, BM, 1, lane_16(k_tile, PITCH),
                   dq_column0, PITCH);
        if (a.dq_accumulator) {
            float *const to = a.dq_accumulator + (row_base(&a, &s, b, h) + i0) * D;
            wait_turn(&a, &s, b, h, i0, j0, BN);
#pragma unroll
            for (int c = 0; c < 2 * DQ_TILES; ++c) reduce_add_4(to + dq_offset(c, THREADS), dq[c]);
            end_turn(&a, b, h, i0);
        }
        product_nn(dk, 2, COLUMN_TILES, BM, lane_16(ds_tile, BM), key0, BM, 0,
                   lane_16(q_tile, PITCH), column0, PITCH);
    }

    /* dK = scale dS^T Q and dV leave through the K and V tiles. */
    cp_async_wait(0);
    __syncthreads();
#pragma unroll
    for (int c = 0; c < 2 * COLUMN_TILES; ++c)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            dk[c][e] *= a.dk_scale;
            dv[c][e] *= a.dv_scale;
        }
    store_gradient(dk, COLUMN_TILES, k_tile, PITCH, key0, column0, &a.dk, s.batch, hk, s.k0 + j0,
                   keys, a.D, a.dk_f32, a.flags & FATTN_ACC_DK, a.vector_gradients);
    store_gradient(dv, COLUMN_TILES, v_tile, PITCH, key0, column0, &a.dv, s.batch, hk, s.k0 + j0,
                   keys, a.Dv, a.dv_f32, a.flags & FATTN_ACC_DV, a.vector_gradients);
}
#endif
