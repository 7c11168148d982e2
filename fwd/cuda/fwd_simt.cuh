/* Forward attention in F32 by fused multiply-add: one CTA per row block, FlashAttention-2's order,
   every feature.

   S = scale Q K^T, P = exp(S - m), O = P V / l, L = m + ln l, online, key blocks right to left.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; any strides, d contiguous.
   Threads     blocks of S by S_SPLIT threads each, blocks of 8 rows and VECTORS vectors of O
               (core/device/simt_tile.cuh). A row of S is one warp's.
   Shared      Q [BM][D], K, V [BN][D], P [BM][BN], K and P paired, and what becomes of each row of
   O: a factor and,
               at the end, one for the old O.
   Loads       cp.async: V(n) flies under Q K^T and softmax, K(n-1) under P V.

   Instances: fwd_kernels.def. */
#include "core/device/simt_tile.cuh"
#include "core/device/score_terms_fma.cuh"

enum { VECTORS = BM * D / (BLOCK * VECTOR * THREADS) }; /* of a block of O */
static_assert(BN / BLOCK == LANES_X(S_SPLIT), "a row of S is one warp's");
static_assert(VECTORS * BLOCK * VECTOR * THREADS == BM * D && VECTORS <= 4, "O");

/* Sum and maximum over the threads of a row of S, as block_of has them. */
enum { THIRD_BIT = S_SPLIT == 1 ? 16 : 8 };
DEVICE real row_sum(real x) {
    x += __shfl_xor_sync(0xffffffffu, x, 1);
    x += __shfl_xor_sync(0xffffffffu, x, 4);
    return LANES_X(S_SPLIT) > 4 ? x + __shfl_xor_sync(0xffffffffu, x, THIRD_BIT) : x;
}
DEVICE real row_max(real x) {
    x = fmax(x, __shfl_xor_sync(0xffffffffu, x, 1));
    x = fmax(x, __shfl_xor_sync(0xffffffffu, x, 4));
    return LANES_X(S_SPLIT) > 4 ? fmax(x, __shfl_xor_sync(0xffffffffu, x, THIRD_BIT)) : x;
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_cuda_args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    real *const q_tile = (real *)shared, *const k_tile = q_tile + TILE(BM, D),
               *const v_tile = k_tile + TILE(BN, D), *const p_tile = v_tile + TILE(BN, D),
               *const factors = p_tile + TILE(BM, BN), *const old_factors = factors + BM;
    const block mine = s_block(), out = block_of(D / (VECTOR * VECTORS), 1);

    /* Row blocks vary fastest, the longest first. */
    const int blocks = (a.Sq + BM - 1) / BM;
    const int plane = (int)(blockIdx.x / (unsigned)blocks), h = plane % a.Hq, b = plane / a.Hq;
    const int i0 = (blocks - 1 - (int)(blockIdx.x % (unsigned)blocks)) * BM;
    const sequence s = sequence_of(&a, b);
    if (i0 >= s.Sq) return;
    const int rows = min(BM, s.Sq - i0);
    const int begin = max(0, min(i0 + s.lo, s.Sk)), end = max(0, min(i0 + rows + s.hi, s.Sk));
    const int depth = (a.D + S_DEPTH - 1) / S_DEPTH * S_DEPTH;

    const real *const k = row_at(&a.k, &s, h / a.group, s.k0),
               *const v = row_at(&a.v, &s, h / a.group, s.k0);

    vector o[BLOCK * VECTORS];
    real m[S_ROWS], l[S_ROWS]; /* running maximum; sum of this thread's exponentials */
#pragma unroll
    for (int r = 0; r < S_ROWS; ++r) m[r] = -(real)INFINITY, l[r] = 0;
    clear(o, BLOCK * VECTORS);

    const int first = begin / BN;
    int block = end > begin ? (end + BN - 1) / BN - 1 : first - 1;
    load_tile(q_tile, PLAIN, BM, row_at(&a.q, &s, h, s.q0 + i0), a.q.row, rows, a.D, a.vector_qkv);
    if (block >= first)
        load_tile(k_tile, PAIRED, BN, k + (int64_t)block * BN * a.k.row, a.k.row,
                  s.Sk - block * BN, a.D, a.vector_qkv);
    cp_async_commit();

    for (; block >= first; --block) {
        const int j0 = block * BN;
        cp_async_wait(0);
        __syncthreads(); /* K(n) is there, and nobody reads V(n+1) and P(n+1) any more */
        load_tile(v_tile, PLAIN, BN, v + (int64_t)j0 * a.v.row, a.v.row, s.Sk - j0, a.Dv,
                  a.vector_qkv);
        cp_async_commit();

        real p[PLACES];
        product_nt(p, q_tile, k_tile, depth);
#pragma unroll
        for (int n = 0; n < PLACES; ++n) p[n] = rounded_product(ARG(&a, scale), p[n]);
        general_scores(p, 0, p_tile, &a, &s, b, h, i0, j0);
        if (!all_visible(&s, i0, j0)) {
#pragma unroll
            for (int n = 0; n < PLACES; ++n)
                if (!visible(&s, i0 + place_row(n), j0 + place_column(n))) p[n] = -(real)INFINITY;
        }
#pragma unroll
        for (int r = 0; r < S_ROWS; ++r) {
            real top = m[r];
#pragma unroll
            for (int c = 0; c < BLOCK; ++c) top = fmax(top, p[r * BLOCK + c]);
            top = row_max(top);
            const real base = top == -(real)INFINITY ? (real)0 : top, correction = exp(m[r] - base);
            m[r] = top;
            l[r] *= correction;
#pragma unroll
            for (int c = 0; c < BLOCK; ++c) {
                p[r * BLOCK + c] = exp(p[r * BLOCK + c] - base);
                l[r] += p[r * BLOCK + c];
            }
            if (mine.x == 0) factors[place_row(r * BLOCK)] = correction;
        }
        if (a.drop_T) {
            const uint64_t keep = kept(&a, b, h, i0, j0);
#pragma unroll
            for (int n = 0; n < PLACES; ++n)
                if (!(keep >> n & 1)) p[n] = 0;
        }
#pragma unroll
        for (int r = 0; r < S_ROWS; ++r) put_row(p_tile, r, p + r * BLOCK);

        cp_async_wait(0);
        __syncthreads(); /* P and V(n) are there, and nobody reads K(n) any more */
        if (block > first)
            load_tile(k_tile, PAIRED, BN, k + (int64_t)(j0 - BN) * a.k.row, a.k.row, BN, a.D,
                      a.vector_qkv);
        cp_async_commit();
#pragma unroll
        for (int r = 0; r < BLOCK; ++r) {
            const real correction = factors[out.y * BLOCK + r];
#pragma unroll
            for (int c = 0; c < VECTORS; ++c)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) o[r * VECTORS + c].e[e] *= correction;
        }
        product_nn(o, VECTORS, 1, p_tile, v_tile, PLAIN);
    }

    /* A row without keys gives O = 0, L = -inf. */
    cp_async_wait(0);
    __syncthreads(); /* nobody reads factors any more */
#pragma unroll
    for (int r = 0; r < S_ROWS; ++r) {
        const int i = place_row(r * BLOCK);
        const real sum = row_sum(l[r]);
        if (mine.x != 0 || i >= rows) continue;
        real *const lse = row_at(&a.lse, &s, h, s.q0 + i0 + i);
        const real old_L = a.flags & FATTN_MERGE ? *lse : -(real)INFINITY;
        const row_result row = finish_row(&a, m[r], sum, h, old_L);
        *lse = row.L;
        factors[i] = row.scale;
        old_factors[i] = row.keep_old;
    }
    __syncthreads(); /* the factors are there */
#pragma unroll
    for (int r = 0; r < BLOCK; ++r) {
        const int i = out.y * BLOCK + r;
        if (i >= rows) continue;
        real *const to = row_at(&a.o, &s, h, s.q0 + i0 + i);
        const real factor = factors[i], keep_old = old_factors[i];
#pragma unroll
        for (int c = 0; c < VECTORS; ++c)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const int d = c * (D / VECTORS) + out.x * VECTOR + e;
                if (d >= a.Dv) continue;
                const real x = o[r * VECTORS + c].e[e] * factor;
                to[d] = keep_old > 0 ? x + keep_old * to[d] : x;
            }
    }
}
