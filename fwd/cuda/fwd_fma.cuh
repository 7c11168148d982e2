/* Forward attention in F32 by fused multiply-add: one CTA per row block (and part of its keys, fwd_split.h),
   FlashAttention-2's order, every feature.

   S = scale Q K^T, P = exp(S - m), O = P V / l, L = m + ln l, with an online softmax, key blocks from right to left.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; any strides, d contiguous.
   Threads     8 x 8 blocks of S, each by S_SPLIT threads; of O 8 rows by VECTORS vectors each
               (core/device/fma_tile.cuh). A row of S belongs to one warp.
   Shared      struct shared_memory: Q, K, V, P and the factors of O's rows.
   Loads       cp.async: the load of V(n) overlaps Q K^T and softmax, that of K(n-1) overlaps P V.

   Instances: fwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "fwd/cuda/fwd_row_block.cuh"
#include "core/device/fma_tile.cuh"
#include "core/device/score_terms_fma.cuh"

enum { VECTORS = BM * D / (BLOCK * VECTOR * THREADS) }; /* of a row of a thread's block of O */
static_assert(BN / BLOCK == LANES_X(S_SPLIT) && LANES_X(S_SPLIT) >= 4, "a row of S belongs to one warp");
static_assert(VECTORS * BLOCK * VECTOR * THREADS == BM * D && VECTORS <= 4, "O");

typedef struct shared_memory {
    real q[TILE(BM, D)], k[TILE(BN, D)], v[TILE(BN, D)], p[TILE(BM, BN)]; /* k and p are paired tiles */
    real factors[BM];     /* of O's rows: exp(old - new maximum), at the end 1 / l and so on */
    real old_factors[BM]; /* at the end: of the earlier O */
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };

/* Sum and maximum over the threads of a row of S, whose lanes differ in bits 0 and 2 and in THIRD_BIT (block_of). */
enum { THIRD_BIT = S_SPLIT == 1 ? 16 : 8 };
DEVICE real row_sum(real x) {
    x += __shfl_xor_sync(ALL_LANES, x, 1);
    x += __shfl_xor_sync(ALL_LANES, x, 4);
    return LANES_X(S_SPLIT) > 4 ? x + __shfl_xor_sync(ALL_LANES, x, THIRD_BIT) : x;
}
DEVICE real row_max(real x) {
    x = fmax(x, __shfl_xor_sync(ALL_LANES, x, 1));
    x = fmax(x, __shfl_xor_sync(ALL_LANES, x, 4));
    return LANES_X(S_SPLIT) > 4 ? fmax(x, __shfl_xor_sync(ALL_LANES, x, THIRD_BIT)) : x;
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_fwd_split_args args) {
    extern __shared__ __align__(128) unsigned char SHARED_MEMORY[];
    const fattni_attention_args &a = args.a;
    shared_memory *const smem = (shared_memory *)SHARED_MEMORY;
    real *const q_tile = smem->q, *const k_tile = smem->k, *const v_tile = smem->v, *const p_tile = smem->p,
                *const factors = smem->factors, *const old_factors = smem->old_factors;
    const block mine = s_block(), out = block_of(D / (VECTOR * VECTORS), 1);

    row_block work;
    if (!find_row_block(&a, args.results ? &args : 0, BM, BN, &work)) return;
    const int b = work.b, h = work.h, i0 = work.i0, rows = work.rows, begin = work.begin, end = work.end;
    const sequence s = work.s;
    const int depth = (a.D + S_DEPTH - 1) / S_DEPTH * S_DEPTH;

    const real *const k = row_at(&a.k, &s, h / a.group, s.k0), *const v = row_at(&a.v, &s, h / a.group, s.k0);

    vector o[BLOCK * VECTORS];
    real m[S_ROWS], l[S_ROWS]; /* running maximum; sum of this thread's exponentials */
#pragma unroll
    for (int r = 0; r < S_ROWS; ++r) m[r] = -(real)INFINITY, l[r] = 0;
    clear(o, BLOCK * VECTORS);

    const int first = begin / BN;
    int block = end > begin ? (end + BN - 1) / BN - 1 : first - 1;
    load_tile(q_tile, PLAIN, BM, row_at(&a.q, &s, h, s.q0 + i0), a.q.row, rows, a.D, a.vector_qkv);
    if (block >= first)
        load_tile(k_tile, PAIRED, BN, k + (int64_t)block * BN * a.k.row, a.k.row, s.Sk - block * BN, a.D, a.vector_qkv);
    cp_async_commit();

    for (; block >= first; --block) {
        const int j0 = block * BN;
        cp_async_wait(0);
        __syncthreads(); /* K(n) has arrived, and all warps have read V(n+1) and P(n+1) */
        load_tile(v_tile, PLAIN, BN, v + (int64_t)j0 * a.v.row, a.v.row, s.Sk - j0, a.Dv, a.vector_qkv);
        cp_async_commit();

        real p[ELEMENTS];
        product_nt(p, q_tile, k_tile, depth);
#pragma unroll
        for (int n = 0; n < ELEMENTS; ++n) p[n] = rounded_product(ARG(&a, scale), p[n]);
        general_scores(p, 0, p_tile, &a, &s, b, h, i0, j0);
        if (!all_visible(&s, i0, j0)) {
#pragma unroll
            for (int n = 0; n < ELEMENTS; ++n)
                if (!visible(&s, i0 + element_row(n), j0 + element_column(n))) p[n] = -(real)INFINITY;
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
            if (mine.x == 0) factors[element_row(r * BLOCK)] = correction;
        }
        if (a.drop_T) {
            const uint64_t keep = kept(&a, b, h, i0, j0);
#pragma unroll
            for (int n = 0; n < ELEMENTS; ++n)
                if (!(keep >> n & 1)) p[n] = 0;
        }
#pragma unroll
        for (int r = 0; r < S_ROWS; ++r) put_row(p_tile, r, p + r * BLOCK);

        cp_async_wait(0);
        __syncthreads(); /* P(n) is written, V(n) has arrived, and all warps have read K(n) */
        if (block > first)
            load_tile(k_tile, PAIRED, BN, k + (int64_t)(j0 - BN) * a.k.row, a.k.row, BN, a.D, a.vector_qkv);
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

    /* Row epilogue; a row without keys gives O = 0, L = -inf. A part is stored as it is. */
    cp_async_wait(0);
    __syncthreads();                         /* all warps have read factors */
    const sequence own = sequence_of(&a, b); /* again: it takes no registers before */
    real *const part = args.results ? (real *)args.results + result_of_part(&args) : 0;
#pragma unroll
    for (int r = 0; r < S_ROWS; ++r) {
        const int i = element_row(r * BLOCK);
        const real sum = row_sum(l[r]);
        if (mine.x != 0 || i >= rows) continue;
        if (part) {
            real *const maxima = part + args.rows * args.width;
            maxima[i] = m[r], maxima[args.rows + i] = sum;
            factors[i] = 1, old_factors[i] = 0;
            continue;
        }
        real *const lse = row_at(&a.lse, &own, h, own.q0 + i0 + i);
        const real old_L = a.flags & FATTN_MERGE ? *lse : -(real)INFINITY;
        const row_result row = finish_row(&a, m[r], sum, h, old_L);
        *lse = row.L;
        factors[i] = row.scale;
        old_factors[i] = row.keep_old;
    }
    __syncthreads(); /* factors are written */
#pragma unroll
    for (int r = 0; r < BLOCK; ++r) {
        const int i = out.y * BLOCK + r;
        if (i >= rows) continue;
        real *const to = part ? part + i * args.width : row_at(&a.o, &own, h, own.q0 + i0 + i);
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

DESCRIBE_KERNEL(fattni_fwd_split_args, SHARED_BYTES, 1);
