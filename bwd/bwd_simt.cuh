/* Backward attention in F32 and F64 by fused multiply-add: one CTA per key block, every feature.

   For each row block: S = scale Q K^T, P = exp(S - L), dP = dO V^T, dS = P (dP - delta),
   dV += P^T dO, dQ += scale dS K, dK += dS^T Q.

   Tensors     q, d_o [b,h,i,d], k, v, dk, dv [b,g,j,d], lse [b,h,i]; delta from bwd_rows.cuh, which
               also zeroed dq.
   Ownership   dK, dV of BN keys stay in registers over all row blocks of all query heads of the
               group; dQ goes to the caller's tensor by atomic adds.
   Threads     S_TX x S_TY x SPLIT, each S_ROWS rows and KEYS columns of S and dP; TX x TY, each
               VECTORS vectors of KEY_ROWS keys of dK and dV and of ROWS rows of dQ (simt_tile.h).
   Shared      K, V [BN][D], Q, dO [BM][D], and [BM][BN] for first P, then dS.

   Instances: bwd_kernels.def. */
#define SPLIT (K_BM * K_BN / (32 * K_WARPS) < 32 ? 4 : 1)
#include "cuda_turns.h"
#include "ptx/mma.h"
#include "simt_tile.h"
#include "real_general.h"

enum { KEY_ROWS = BN / TY };
static_assert(KEY_ROWS * TY == BN && KEY_ROWS % VECTOR == 0, "dK, dV");

/* p[0..VECTOR) += x, of which `count` are inside. */
DEVICE void add(real *p, vector x, int count) {
#if __CUDA_ARCH__ >= 900 && !K_F64
    if (count >= VECTOR && (uintptr_t)p % 16 == 0) {
        reduce_add_4(p, x.e);
        return;
    }
#endif
#pragma unroll
    for (int e = 0; e < VECTOR; ++e)
        if (e < count) atomicAdd(p + e, x.e[e]);
}

/* This thread's part of a block of dK or dV. */
DEVICE void store_gradient(const vector *x, real factor, const fattni_view *view, const sequence *s,
                           int head, int j0, int width, int accumulate) {
    if (!view->p) return;
#pragma unroll
    for (int r = 0; r < KEY_ROWS; ++r) {
        const int j = j0 + transposed_row(r);
        if (j >= s->Sk) continue;
        real *const to = row_at(view, s, head, s->k0 + j);
#pragma unroll
        for (int n = 0; n < VECTORS * VECTOR; ++n) {
            const int d = ((int)threadIdx.x % TX + n / VECTOR * TX) * VECTOR + n % VECTOR;
            const real y = factor * x[r * VECTORS + n / VECTOR].e[n % VECTOR];
            if (d < width) to[d] = accumulate ? to[d] + y : y;
        }
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_cuda_args a) {
    extern __shared__ __align__(128) unsigned char shared[];
    real *const k_tile = (real *)shared, *const v_tile = k_tile + BN * PITCH,
               *const q_tile = v_tile + BN * PITCH, *const do_tile = q_tile + BM * PITCH,
               *const s_tile = do_tile + BM * PITCH;
    const int tx = (int)threadIdx.x % TX, ty = (int)threadIdx.x / TX;

    const int blocks = (a.Sk + BN - 1) / BN;
    const int plane = (int)(blockIdx.x / (unsigned)blocks), hk = plane % a.Hkv, b = plane / a.Hkv;
    const int j0 = (int)(blockIdx.x % (unsigned)blocks) * BN;
    const sequence s = sequence_of(&a, b);
    if (j0 >= s.Sk) return;
    const int keys = min(BN, s.Sk - j0);
    const int begin = max(0, min(j0 - s.hi, s.Sq)), end = max(0, min(j0 + keys - s.lo, s.Sq));
    const int first = begin / BM, row_blocks = end > begin ? (end + BM - 1) / BM - first : 0;
    const int step_d = SPLIT * VECTOR, depth = (a.D + step_d - 1) / step_d * step_d;
    const int depth_v = (a.Dv + step_d - 1) / step_d * step_d;

    vector dk[KEY_ROWS * VECTORS], dv[KEY_ROWS * VECTORS];
#pragma unroll
    for (int n = 0; n < KEY_ROWS * VECTORS; ++n)
#pragma unroll
        for (int e = 0; e < VECTOR; ++e) dk[n].e[e] = dv[n].e[e] = 0;

    load_tile(k_tile, BN, row_at(&a.k, &s, hk, s.k0 + j0), a.k.row, keys, a.D, a.vector_qkv);
    load_tile(v_tile, BN, row_at(&a.v, &s, hk, s.k0 + j0), a.v.row, keys, a.Dv, a.vector_qkv);

    /* Row blocks of head 0, of head 1, ... */
    for (int step = 0; step < row_blocks * a.group; ++step) {
        const int h = hk * a.group + step / row_blocks, i0 = (first + step % row_blocks) * BM;
        __syncthreads(); /* nobody reads the last step's tiles any more */
        load_tile(q_tile, BM, row_at(&a.q, &s, h, s.q0 + i0), a.q.row, s.Sq - i0, a.D,
                  a.vector_qkv);
        load_tile(do_tile, BM, row_at(&a.d_o, &s, h, s.q0 + i0), a.d_o.row, s.Sq - i0, a.Dv,
                  a.vector_qkv);
        cp_async_commit();
        real L[S_ROWS], delta[S_ROWS]; /* a row past the end, or without any key, has P = 0 */
#pragma unroll
        for (int r = 0; r < S_ROWS; ++r) {
            const int i = i0 + place_row(r * KEYS);
            L[r] = i < s.Sq ? *row_at(&a.lse, &s, h, s.q0 + i) : (real)INFINITY;
            if (L[r] == -(real)INFINITY) L[r] = (real)INFINITY;
            delta[r] = L[r] == (real)INFINITY
                           ? (real)0
                           : ((const real *)a.delta)[row_number(&a, &s, h, i)];
        }
        cp_async_wait(0);
        __syncthreads(); /* the tiles are there */

        real p[PLACES], ds[PLACES], steepness[PLACES];
        product_nt(p, q_tile, k_tile, depth);
#pragma unroll
        for (int n = 0; n < PLACES; ++n) p[n] *= ARG(&a, scale);
        general_scores(p, steepness, s_tile, &a, &s, b, h, i0, j0);
#pragma unroll
        for (int n = 0; n < PLACES; ++n) p[n] = exp(p[n] - L[n / KEYS]);
        if (!all_visible(&s, i0, j0)) { /* after the exponential: a masked P is 0 whatever L is */
#pragma unroll
            for (int n = 0; n < PLACES; ++n)
                if (!visible(&s, i0 + place_row(n), j0 + place_column(n))) p[n] = 0;
        }
        put(s_tile, p); /* until dP is there, for the registers; then for all */
        product_nt(ds, do_tile, v_tile, depth_v);
        const uint64_t keep = a.drop_T ? kept(&a, b, h, i0, j0) : ~(uint64_t)0;
#pragma unroll
        for (int n = 0; n < PLACES; ++n) {
            const int stays = (int)(keep >> n & 1);
            const real dp = stays ? ARG(&a, keep_scale) * ds[n] : (real)0;
            ds[n] = *place(s_tile, n) * (dp - delta[n / KEYS]);
            if (!stays) *place(s_tile, n) = 0;
        }
        __syncthreads(); /* P is published */
        product_tn(dv, KEY_ROWS, s_tile, do_tile, BM);
        __syncthreads(); /* nobody reads P any more */
        put(s_tile, ds);
        general_gradients(s_tile, steepness, &a, &s, b, h, i0, j0);
        __syncthreads(); /* dS is published */
        if (a.dq.p) {
            vector dq[ROWS * VECTORS];
#pragma unroll
            for (int n = 0; n < ROWS * VECTORS; ++n)
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) dq[n].e[e] = 0;
            product_nn(dq, ROWS, s_tile, k_tile, BN);
            wait_turn(&a, &s, b, h, i0, j0, BN);
#pragma unroll
            for (int n = 0; n < ROWS * VECTORS; ++n) {
                const int i = i0 + ty + TY * (n / VECTORS), d = (tx + TX * (n % VECTORS)) * VECTOR;
#pragma unroll
                for (int e = 0; e < VECTOR; ++e) dq[n].e[e] *= ARG(&a, scale);
                if (i < s.Sq) add(row_at(&a.dq, &s, h, s.q0 + i) + d, dq[n], a.D - d);
            }
            end_turn(&a, b, h, i0);
        }
        product_tn(dk, KEY_ROWS, s_tile, q_tile, BM);
    }
    cp_async_wait(0);
    store_gradient(dk, ARG(&a, scale), &a.dk, &s, hk, j0, a.D, a.flags & FATTN_ACC_DK);
    store_gradient(dv, ARG(&a, keep_scale), &a.dv, &s, hk, j0, a.Dv, a.flags & FATTN_ACC_DV);
}
