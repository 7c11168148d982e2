/* Forward attention in F64, and in F32 rounded to TF32, on tensor cores: one CTA per row block,
   FlashAttention-2's order, every feature.

   S = scale Q K^T, P = exp(S - m), O = P V / l, L = m + ln l, online, key blocks right to left.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; any strides, d contiguous.
   Threads     WARPS warps, each with ROW_TILES times 16 rows and all keys; P stays in registers.
   Shared      Q [BM][D], K, V [BN][D], swizzled (mma_tile.h).
   Loads       cp.async: V(n) flies under Q K^T, K(n-1) under softmax and P V.
   Rounding    TF32: Q, K, V as they arrive, P before P V; sums, softmax and O are F32.

   Instances: fwd_kernels.def. */
#include "mma_tile.h"

enum {
    ROW_TILES = BM / (16 * WARPS), KEY_TILES = BN / 8, GROUPS = D / GROUP,
    PLACES = KEY_TILES * 4 /* of one row tile */
};
static_assert(ROW_TILES * 16 * WARPS == BM && ROW_TILES <= 2 && BN % 8 == 0 && D % GROUP == 0,
              "tile shape");
static_assert(THREADS * PLACES <= BN * D, "the features' scratch is the K tile");

/* In the first row tile of this thread's warp. */
DEVICE int place_row(int n) {
    return (int)threadIdx.x / 32 * 16 * ROW_TILES + lane_of() / 4 + n % 4 / 2 * 8;
}
DEVICE int place_column(int n) { return n / 4 * 8 + lane_of() % 4 * 2 + n % 2; }

#include "real_general.h"

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_cuda_args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    real *const q_tile = (real *)shared, *const k_tile = q_tile + BM * D,
               *const v_tile = k_tile + BN * D;
    const int t = lane_of() % 4, row0 = (int)threadIdx.x / 32 * 16 * ROW_TILES;

    /* Row blocks vary fastest, the longest first. */
    const int blocks = (a.Sq + BM - 1) / BM;
    const int plane = (int)(blockIdx.x / (unsigned)blocks), h = plane % a.Hq, b = plane / a.Hq;
    const int i0 = (blocks - 1 - (int)(blockIdx.x % (unsigned)blocks)) * BM;
    const sequence s = sequence_of(&a, b);
    if (i0 >= s.Sq) return;
    const int rows = min(BM, s.Sq - i0);
    const int begin = max(0, min(i0 + s.lo, s.Sk)), end = max(0, min(i0 + rows + s.hi, s.Sk));
    const int depth = (a.D + 7) / 8 * 8;

    const real *const k = row_at(&a.k, &s, h / a.group, s.k0),
               *const v = row_at(&a.v, &s, h / a.group, s.k0);

    real o[ROW_TILES * GROUPS * VECTOR][4];
    real m[ROW_TILES][2], l[ROW_TILES][2]; /* running maximum; sum of this thread's exponentials */
    clear(o, ROW_TILES * GROUPS * VECTOR);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
        m[r][0] = m[r][1] = -(real)INFINITY;
        l[r][0] = l[r][1] = 0;
    }

    const int first = begin / BN;
    int block = end > begin ? (end + BN - 1) / BN - 1 : first - 1;
    load_tile(q_tile, BM, row_at(&a.q, &s, h, s.q0 + i0), a.q.row, rows, a.D, a.vector_qkv);
    if (block >= first)
        load_tile(k_tile, BN, k + (int64_t)block * BN * a.k.row, a.k.row, s.Sk - block * BN, a.D,
                  a.vector_qkv);
    cp_async_commit();
    if (!K_F64) {
        cp_async_wait(0);
        round_tile(q_tile, BM);
    }

    for (; block >= first; --block) {
        const int j0 = block * BN;
        cp_async_wait(0);
        round_tile(k_tile, BN);
        __syncthreads(); /* K(n) is there, and nobody reads V(n+1) any more */
        load_tile(v_tile, BN, v + (int64_t)j0 * a.v.row, a.v.row, s.Sk - j0, a.Dv, a.vector_qkv);
        cp_async_commit();

        real p[ROW_TILES][PLACES / 4][4];
        clear(p[0], ROW_TILES * KEY_TILES);
#pragma unroll 2
        for (int step = 0; step < depth; step += 8)
            step_nt(p[0], ROW_TILES, KEY_TILES, q_tile, row0, k_tile, 0, D, step);
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int n = 0; n < PLACES; ++n) p[r][n / 4][n % 4] *= ARG(&a, scale);
        if (scores_change(&a)) {
            __syncthreads(); /* nobody reads K(n) any more */
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
                general_scores(p[r][0], 0, k_tile, &a, &s, b, h, i0 + 16 * r, j0);
        }
        if (!all_visible(&s, i0, j0)) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int n = 0; n < PLACES; ++n)
                    if (!visible(&s, i0 + 16 * r + place_row(n), j0 + place_column(n)))
                        p[r][n / 4][n % 4] = -(real)INFINITY;
        }

        cp_async_wait(0);
        round_tile(v_tile, BN);
        __syncthreads(); /* V(n) is there, and nobody reads K(n) any more */
        if (block > first)
            load_tile(k_tile, BN, k + (int64_t)(j0 - BN) * a.k.row, a.k.row, BN, a.D, a.vector_qkv);
        cp_async_commit();

#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                real top = m[r][half];
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n)
                    top = fmax(top, fmax(p[r][n][2 * half], p[r][n][2 * half + 1]));
                top = row_max(top);
                const real base = top == -(real)INFINITY ? (real)0 : top;
                const real correction = exponential(m[r][half] - base);
                m[r][half] = top;
                l[r][half] *= correction;
#pragma unroll
                for (int n = 0; n < KEY_TILES; ++n)
#pragma unroll
                    for (int e = 2 * half; e < 2 * half + 2; ++e) {
                        p[r][n][e] = exponential(p[r][n][e] - base);
                        l[r][half] += p[r][n][e];
                    }
                if (__any_sync(0xffffffffu, correction != 1)) {
#pragma unroll
                    for (int c = 0; c < GROUPS * VECTOR; ++c) {
                        o[r * GROUPS * VECTOR + c][2 * half] *= correction;
                        o[r * GROUPS * VECTOR + c][2 * half + 1] *= correction;
                    }
                }
            }
        if (a.drop_T) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                const uint64_t keep = kept(&a, b, h, i0 + 16 * r, j0);
#pragma unroll
                for (int n = 0; n < PLACES; ++n)
                    if (!(keep >> n & 1)) p[r][n / 4][n % 4] = 0;
            }
        }
        product_registers(o, ROW_TILES, GROUPS, BN, p[0], v_tile, D, 0);
    }

    /* A row without keys gives O = 0, L = -inf. */
    cp_async_wait(0);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = 16 * r + place_row(2 * half);
            const real sum = row_sum(l[r][half]);
            real *const lse = i < rows ? row_at(&a.lse, &s, h, s.q0 + i0 + i) : 0;
            const real old_L = lse && (a.flags & FATTN_MERGE) ? *lse : -(real)INFINITY;
            const row_result row = finish_row(&a, m[r][half], sum, h, old_L);
            __syncwarp(); /* all threads of the row have read lse */
            if (!lse) continue;
            if (t == 0) *lse = row.L;
            real *const out = row_at(&a.o, &s, h, s.q0 + i0 + i);
#pragma unroll
            for (int c = 0; c < GROUPS; ++c)
#pragma unroll
                for (int n = 0; n < 2; ++n) { /* VECTOR columns, one of each fragment */
                    const int d0 = c * GROUP + (2 * t + n) * VECTOR;
                    vector x;
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e)
                        x.e[e] = o[(r * GROUPS + c) * VECTOR + e][2 * half + n] * row.scale;
                    if (a.vector_qkv && !(row.keep_old > 0)) {
                        if (d0 < a.Dv) *(vector *)(out + d0) = x;
                        continue;
                    }
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e)
                        if (d0 + e < a.Dv)
                            out[d0 + e] = row.keep_old > 0 ? x.e[e] + row.keep_old * out[d0 + e]
                                                           : x.e[e];
                }
        }
}
