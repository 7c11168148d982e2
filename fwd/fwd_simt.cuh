/* Forward attention in F32 and F64 by fused multiply-add: one CTA per row block, FlashAttention-2's
   order, every feature.

   S = scale Q K^T, P = exp(S - m), O = P V / l, L = m + ln l, online, key blocks right to left.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; any strides, d contiguous.
   Threads     TX x TY, each ROWS rows: KEYS columns of S, VECTORS vectors of O (simt_tile.h).
   Shared      Q [BM][D], K, V [BN][D], P [BM][BN]; a row of P is written and read by one warp.
   Loads       cp.async: V(n) flies under Q K^T, K(n-1) under softmax and P V.

   Instances: fwd_kernels.def. */
#define SPLIT 1 /* a row of S stays with the threads of that row of O */
#include "simt_tile.h"
#include "real_general.h"

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_cuda_args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    real *const q_tile = (real *)shared, *const k_tile = q_tile + BM * PITCH,
               *const v_tile = k_tile + BN * PITCH, *const p_tile = v_tile + BN * PITCH;
    const int tx = (int)threadIdx.x % TX, ty = (int)threadIdx.x / TX;

    /* Row blocks vary fastest, the longest first. */
    const int blocks = (a.Sq + BM - 1) / BM;
    const int plane = (int)(blockIdx.x / (unsigned)blocks), h = plane % a.Hq, b = plane / a.Hq;
    const int i0 = (blocks - 1 - (int)(blockIdx.x % (unsigned)blocks)) * BM;
    const sequence s = sequence_of(&a, b);
    if (i0 >= s.Sq) return;
    const int rows = min(BM, s.Sq - i0);
    const int begin = max(0, min(i0 + s.lo, s.Sk)), end = max(0, min(i0 + rows + s.hi, s.Sk));
    const int depth = (a.D + VECTOR - 1) / VECTOR * VECTOR;

    const real *const k = row_at(&a.k, &s, h / a.group, s.k0),
               *const v = row_at(&a.v, &s, h / a.group, s.k0);

    vector o[ROWS * VECTORS];
    real m[ROWS], l[ROWS]; /* running maximum; sum of this thread's exponentials */
#pragma unroll
    for (int r = 0; r < ROWS; ++r) m[r] = -(real)INFINITY, l[r] = 0;
#pragma unroll
    for (int n = 0; n < ROWS * VECTORS; ++n)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) o[n].e[e] = 0;

    const int first = begin / BN;
    int block = end > begin ? (end + BN - 1) / BN - 1 : first - 1;
    load_tile(q_tile, BM, row_at(&a.q, &s, h, s.q0 + i0), a.q.row, rows, a.D, a.vector_qkv);
    if (block >= first)
        load_tile(k_tile, BN, k + (int64_t)block * BN * a.k.row, a.k.row, s.Sk - block * BN, a.D,
                  a.vector_qkv);
    cp_async_commit();

    for (; block >= first; --block) {
        const int j0 = block * BN;
        cp_async_wait(0);
        __syncthreads(); /* K(n) is there, and nobody reads V(n+1) any more */
        load_tile(v_tile, BN, v + (int64_t)j0 * a.v.row, a.v.row, s.Sk - j0, a.Dv, a.vector_qkv);
        cp_async_commit();

        real p[PLACES];
        product_nt(p, q_tile, k_tile, depth);
#pragma unroll
        for (int n = 0; n < PLACES; ++n) p[n] *= ARG(&a, scale);
        general_scores(p, 0, p_tile, &a, &s, b, h, i0, j0);
        if (!all_visible(&s, i0, j0)) {
#pragma unroll
            for (int n = 0; n < PLACES; ++n)
                if (!visible(&s, i0 + place_row(n), j0 + place_column(n))) p[n] = -(real)INFINITY;
        }

        cp_async_wait(0);
        __syncthreads(); /* V(n) is there, and nobody reads K(n) any more */
        if (block > first)
            load_tile(k_tile, BN, k + (int64_t)(j0 - BN) * a.k.row, a.k.row, BN, a.D, a.vector_qkv);
        cp_async_commit();

#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            real top = m[r];
#pragma unroll
            for (int c = 0; c < KEYS; ++c) top = fmax(top, p[r * KEYS + c]);
            top = row_max(top);
            const real base = top == -(real)INFINITY ? (real)0 : top, correction = exp(m[r] - base);
            m[r] = top;
            l[r] *= correction;
#pragma unroll
            for (int c = 0; c < KEYS; ++c) {
                p[r * KEYS + c] = exp(p[r * KEYS + c] - base);
                l[r] += p[r * KEYS + c];
            }
#pragma unroll
            for (int c = 0; c < VECTORS; ++c)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) o[r * VECTORS + c].e[e] *= correction;
        }
        if (a.drop_T) {
            const uint64_t keep = kept(&a, b, h, i0, j0);
#pragma unroll
            for (int n = 0; n < PLACES; ++n)
                if (!(keep >> n & 1)) p[n] = 0;
        }
        put(p_tile, p);
        __syncwarp();
        product_nn(o, ROWS, p_tile, v_tile, BN);
    }

    /* A row without keys gives O = 0, L = -inf. */
    cp_async_wait(0);
#pragma unroll
    for (int r = 0; r < ROWS; ++r) {
        const int i = ty + TY * r;
        const real sum = row_sum(l[r]);
        real *const lse = i < rows ? row_at(&a.lse, &s, h, s.q0 + i0 + i) : 0;
        const real old_L = lse && (a.flags & FATTN_MERGE) ? *lse : -(real)INFINITY;
        const row_result row = finish_row(&a, m[r], sum, h, old_L);
        __syncwarp(); /* all threads of the row have read lse */
        if (!lse) continue;
        if (tx == 0) *lse = row.L;
        real *const out = row_at(&a.o, &s, h, s.q0 + i0 + i);
#pragma unroll
        for (int c = 0; c < VECTORS; ++c)
#pragma unroll
            for (int e = 0; e < VECTOR; ++e) {
                const int d = (tx + TX * c) * VECTOR + e;
                if (d >= a.Dv) continue;
                const real x = o[r * VECTORS + c].e[e] * row.scale;
                out[d] = row.keep_old > 0 ? x + row.keep_old * out[d] : x;
            }
    }
}
