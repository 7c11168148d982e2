/* Forward attention in F64, and in F32 rounded to TF32, on tensor cores: one CTA per row block (and part of its
   keys, fwd_split.h), FlashAttention-2's order, every feature.

   S = scale Q K^T, P = exp(S - m), O = P V / l, L = m + ln l, with an online softmax, key blocks from right to left.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; any strides, d contiguous.
   Threads     WARPS warps, each with ROW_TILES times 16 rows and all keys; P stays in registers. Where O is too wide
               for that, SPLIT = 2 partner warps share 16 rows: each computes half of the columns of O, and sums S over
               half of head_dim. They add up S, each does the softmax of eight of the rows, and they exchange P. Each
               lane exchanges with the same lane of the partner.
   Shared      struct shared_memory: Q, K, V, swizzled (core/device/mma_tile.cuh), and what partners exchange.
   Loads       cp.async: the load of V(n) overlaps Q K^T, that of K(n-1) softmax and P V.
   Rounding    TF32: Q, K, V in shared memory, P before P V; sums, softmax and O are F32.

   Instances: fwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "fwd/cuda/fwd_row_block.cuh"
#include "core/device/mma_tile.cuh"
#include "core/ptx/mbarrier.h"

enum {
    SPLIT = 16 * WARPS > BM ? 16 * WARPS / BM : 1,
    ROW_TILES = BM * SPLIT / (16 * WARPS),
    KEY_TILES = BN / 8,
    GROUPS = D / SPLIT / GROUP,
    HALVES = 2 / SPLIT,
    ELEMENTS = KEY_TILES * HALVES * 2 /* elements of S of a thread in one row tile */
};

/* Exchange buffers: pairs of all threads, one after the other, for each key tile. sums: S; shares: P, and in one more
   pair a number of the row. Each also serves for one number of the row at the end. */
typedef struct shared_memory {
    real q[BM * D], k[BN * D], v[BN * D];
    pair sums[SPLIT > 1 ? KEY_TILES *THREADS : 0];
    pair shares[SPLIT > 1 ? (KEY_TILES + 1) * THREADS : 0];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(ROW_TILES * 16 * WARPS == BM * SPLIT && ROW_TILES * SPLIT <= 2, "rows");
static_assert(BN % 8 == 0 && GROUPS * SPLIT * GROUP == D, "columns");
static_assert(THREADS * ELEMENTS <= BN * D, "general_scores keeps S in the K tile");

/* Partners are neighbouring warps; part h does the softmax of rows 8 h to 8 h + 7 of their row tile. Each pair has a
   named barrier, from PARTNER_BARRIER on; 0 is __syncthreads. */
enum named_barrier { PARTNER_BARRIER = 1 };
DEVICE int part_of_warp(void) { return SPLIT > 1 ? (int)threadIdx.x / 32 % SPLIT : 0; }
DEVICE int row_of_warp(void) { return (int)threadIdx.x / (32 * SPLIT) * 16 * ROW_TILES; }
DEVICE void sync_partners(void) {
    if (SPLIT > 1)
        named_barrier_sync(PARTNER_BARRIER + (int)threadIdx.x / (32 * SPLIT), 32 * SPLIT);
    else
        __syncwarp();
}

/* Row and column in the block of element n of this thread's S, in the warp's first row tile. */
DEVICE int element_row(int n) {
    const int half = SPLIT > 1 ? part_of_warp() : n / 2 % 2;
    return row_of_warp() + lane_of() / 4 + half * 8;
}
DEVICE int element_column(int n) { return n / (2 * HALVES) * 8 + lane_of() % 4 * 2 + n % 2; }

#include "core/device/score_terms_fma.cuh"

/* p = S of this part's eight rows: x[KEY_TILES][4] of both partners added up, x[n][0..1] belonging to the upper rows,
   x[n][2..3] to the lower ones. room: a pair per key tile of all threads. */
DEVICE void sum_with_partner(real p[ELEMENTS], const real (*x)[4], pair *room) {
    const int upper = part_of_warp() == 0;
    pair *const mine = room + threadIdx.x, *const other = room + (threadIdx.x ^ 32);
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
        const pair given = {upper ? x[n][2] : x[n][0], upper ? x[n][3] : x[n][1]};
        mine[n * THREADS] = given;
    }
    sync_partners();
#pragma unroll
    for (int n = 0; n < KEY_TILES; ++n) {
        const pair got = other[n * THREADS];
        p[2 * n] = (upper ? x[n][0] : x[n][2]) + got.low;
        p[2 * n + 1] = (upper ? x[n][1] : x[n][3]) + got.high;
    }
}

/* Partners exchange what they have of their eight rows: x[key_tiles][4] becomes P of all 16 rows, and both[2], from a
   number of this part's row in both[0], that of both parts. room: as above and one pair more. */
DEVICE void exchange_with_partner(real (*x)[4], int key_tiles, const real *p, real both[2], pair *room) {
    const int lower = part_of_warp();
    pair *const mine = room + threadIdx.x, *const other = room + (threadIdx.x ^ 32);
#pragma unroll
    for (int n = 0; n < key_tiles; ++n) {
        const pair given = {p[2 * n], p[2 * n + 1]};
        mine[n * THREADS] = given;
    }
    mine[key_tiles * THREADS].low = both[0];
    sync_partners();
#pragma unroll
    for (int n = 0; n < key_tiles; ++n) {
        const pair got = other[n * THREADS];
        x[n][0] = lower ? got.low : p[2 * n], x[n][1] = lower ? got.high : p[2 * n + 1];
        x[n][2] = lower ? p[2 * n] : got.low, x[n][3] = lower ? p[2 * n + 1] : got.high;
    }
    const real got = other[key_tiles * THREADS].low, own = both[0];
    both[0] = lower ? got : own, both[1] = lower ? own : got;
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS)
    K_NAME(const __grid_constant__ fattni_fwd_split_args args) {
    extern __shared__ __align__(128) unsigned char SHARED_MEMORY[];
    const fattni_attention_args &a = args.a;
    shared_memory *const smem = (shared_memory *)SHARED_MEMORY;
    real *const q_tile = smem->q, *const k_tile = smem->k, *const v_tile = smem->v;
    const int t = lane_of() % 4, row0 = row_of_warp(), column0 = part_of_warp() * (D / SPLIT);

    row_block work;
    if (!find_row_block(&a, args.results ? &args : 0, BM, BN, &work)) return;
    const int b = work.b, h = work.h, i0 = work.i0, rows = work.rows, begin = work.begin, end = work.end;
    const sequence s = work.s;
    const int depth = (a.D + 15) / 16 * 16;

    const real *const k = row_at(&a.k, &s, h / a.group, s.k0), *const v = row_at(&a.v, &s, h / a.group, s.k0);

    real o[ROW_TILES * GROUPS * VECTOR][4];
    real m[ROW_TILES][HALVES], l[ROW_TILES][HALVES]; /* running maximum; this thread's sum */
    clear(o, ROW_TILES * GROUPS * VECTOR);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) m[r][half] = -(real)INFINITY, l[r][half] = 0;
    }

    const int first = begin / BN;
    int block = end > begin ? (end + BN - 1) / BN - 1 : first - 1;
    load_tile(q_tile, BM, row_at(&a.q, &s, h, s.q0 + i0), a.q.row, rows, a.D, a.vector_qkv);
    if (block >= first)
        load_tile(k_tile, BN, k + (int64_t)block * BN * a.k.row, a.k.row, s.Sk - block * BN, a.D, a.vector_qkv);
    cp_async_commit();
    if (!K_F64) {
        cp_async_wait(0);
        round_tile(q_tile, BM);
    }

    for (; block >= first; --block) {
        const int j0 = block * BN;
        cp_async_wait(0);
        round_tile(k_tile, BN);
        __syncthreads(); /* K(n) has arrived, and all warps have read V(n+1) */
        load_tile(v_tile, BN, v + (int64_t)j0 * a.v.row, a.v.row, s.Sk - j0, a.Dv, a.vector_qkv);
        cp_async_commit();

        real x[ROW_TILES * KEY_TILES][4];
        clear(x, ROW_TILES * KEY_TILES);
#pragma unroll 1
        for (int at = 16 * part_of_warp(); at < depth; at += 16 * SPLIT)
#pragma unroll
            for (int step = 0; step < 16; step += 8)
                step_nt(x, ROW_TILES, KEY_TILES, q_tile, row0, k_tile, 0, D, at, step);
        real p[ROW_TILES][ELEMENTS];
        if (SPLIT > 1) {
            sum_with_partner(p[0], x, smem->sums);
        } else {
#pragma unroll
            for (int n = 0; n < ROW_TILES * ELEMENTS; ++n) p[n / ELEMENTS][n % ELEMENTS] = x[n / 4][n % 4];
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int n = 0; n < ELEMENTS; ++n) p[r][n] = rounded_product(ARG(&a, scale), p[r][n]);
        if (scores_change(&a)) {
            __syncthreads(); /* all warps have read K(n), whose tile is used here */
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) general_scores(p[r], 0, k_tile, &a, &s, b, h, i0 + 16 * r, j0);
        }
        if (!all_visible(&s, i0, j0)) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int n = 0; n < ELEMENTS; ++n)
                    if (!visible(&s, i0 + 16 * r + element_row(n), j0 + element_column(n))) p[r][n] = -(real)INFINITY;
        }

        cp_async_wait(0);
        round_tile(v_tile, BN);
        __syncthreads(); /* V(n) has arrived, and all warps have read K(n) */
        if (block > first) load_tile(k_tile, BN, k + (int64_t)(j0 - BN) * a.k.row, a.k.row, BN, a.D, a.vector_qkv);
        cp_async_commit();

        real correction[ROW_TILES][2];
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < HALVES; ++half) {
                real top = m[r][half];
#pragma unroll
                for (int n = 2 * half; n < ELEMENTS; n += 2 * HALVES) top = fmax(top, fmax(p[r][n], p[r][n + 1]));
                top = row_max(top);
                const real base = top == -(real)INFINITY ? (real)0 : top;
                correction[r][half] = exponential(m[r][half] - base);
                m[r][half] = top;
                l[r][half] *= correction[r][half];
#pragma unroll
                for (int n = 2 * half; n < ELEMENTS; n += 2 * HALVES)
#pragma unroll
                    for (int e = n; e < n + 2; ++e) {
                        p[r][e] = exponential(p[r][e] - base);
                        l[r][half] += p[r][e];
                    }
            }
        if (a.drop_T) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
                const uint64_t keep = kept(&a, b, h, i0 + 16 * r, j0);
#pragma unroll
                for (int n = 0; n < ELEMENTS; ++n)
                    if (!(keep >> n & 1)) p[r][n] = 0;
            }
        }
        if (SPLIT > 1) {
            exchange_with_partner(x, KEY_TILES, p[0], correction[0], smem->shares);
        } else {
#pragma unroll
            for (int n = 0; n < ROW_TILES * ELEMENTS; ++n) x[n / 4][n % 4] = p[n / ELEMENTS][n % ELEMENTS];
        }
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half)
                if (__any_sync(ALL_LANES, correction[r][half] != 1)) {
#pragma unroll
                    for (int c = 0; c < GROUPS * VECTOR; ++c) {
                        o[r * GROUPS * VECTOR + c][2 * half] *= correction[r][half];
                        o[r * GROUPS * VECTOR + c][2 * half + 1] *= correction[r][half];
                    }
                }
        product_registers(o, ROW_TILES, GROUPS, BN, x, v_tile, D, column0);
    }

    /* Row epilogue; a row without keys gives O = 0, L = -inf. A part is stored as it is. */
    cp_async_wait(0);
    real *const part = args.results ? (real *)args.results + result_of_part(&args) : 0;
    real top[ROW_TILES][2], sum[ROW_TILES][2], old_L[ROW_TILES][2];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
        for (int half = 0; half < HALVES; ++half) top[r][half] = m[r][half], sum[r][half] = row_sum(l[r][half]);
        if (SPLIT > 1) {
            exchange_with_partner(0, 0, 0, top[r], smem->sums);
            exchange_with_partner(0, 0, 0, sum[r], smem->shares);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row0 + 16 * r + lane_of() / 4 + 8 * half;
            old_L[r][half] =
                i < rows && !part && (a.flags & FATTN_MERGE) ? *row_at(&a.lse, &s, h, s.q0 + i0 + i) : -(real)INFINITY;
        }
    }
    sync_partners(); /* all threads of the rows have read lse */
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row0 + 16 * r + lane_of() / 4 + 8 * half;
            if (i >= rows) continue;
            row_result row = {1, 0, 0};
            if (!part) row = finish_row(&a, top[r][half], sum[r][half], h, old_L[r][half]);
            if (t == 0 && part_of_warp() == 0) {
                real *const at = part ? part + args.rows * args.width + i : row_at(&a.lse, &s, h, s.q0 + i0 + i);
                *at = part ? top[r][half] : row.L;
                if (part) at[args.rows] = sum[r][half];
            }
            real *const out = part ? part + i * args.width : row_at(&a.o, &s, h, s.q0 + i0 + i);
#pragma unroll
            for (int c = 0; c < GROUPS; ++c)
#pragma unroll
                for (int n = 0; n < 2; ++n) { /* VECTOR columns, one from each fragment of the group */
                    const int d0 = column0 + c * GROUP + (2 * t + n) * VECTOR;
                    vector x = columns_of(o, r * GROUPS + c, half, n);
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e) x.e[e] *= row.scale;
                    if (a.vector_qkv && !(row.keep_old > 0)) {
                        if (d0 < a.Dv) *(vector *)(out + d0) = x;
                        continue;
                    }
#pragma unroll
                    for (int e = 0; e < VECTOR; ++e)
                        if (d0 + e < a.Dv)
                            out[d0 + e] = row.keep_old > 0 ? x.e[e] + row.keep_old * out[d0 + e] : x.e[e];
                }
        }
}

DESCRIBE_KERNEL(fattni_fwd_split_args, SHARED_BYTES, 1);
