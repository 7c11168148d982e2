/* Forward attention with mma.sync for full and causal masks, as fwd_mma16.cuh, where a thread has no registers for two
   row tiles of O: each B fragment is still loaded once for 32 rows, because two warps share these.

   Threads     WARPS warps in pairs; a pair has 32 rows. Of S each of its warps has half of the keys, of O half of the
               columns.
   Shared      struct shared_memory. P goes from one division to the other by way of it, as do the halves' maxima.
               O is stored through Q's tile.
   Loads       cp.async: the load of V(n) overlaps Q K^T and softmax, that of K(n-1) P V.

   Instances: fwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "fwd/cuda/fwd_row_block.cuh"
#include "fwd/cuda/fwd_softmax.cuh"
#include "core/device/mma16_tile.cuh"
#include "core/ptx/mbarrier.h"

enum {
    D = K_D,
    PITCH = (D + 63) / 64 * 64,
    BM = K_BM,
    BN = K_BN,
    WARPS = K_WARPS,
    THREADS = 32 * WARPS,
    ROW_TILES = 2,
    KEYS = BN / 2, /* of a warp */
    KEY_TILES = KEYS / 8,
    COLUMNS = D / 2, /* of a warp */
    COLUMN_TILES = COLUMNS / 8
};

/* Tiles of 16-bit elements. halves: of both halves of a row, maxima, and in the end sums. */
typedef struct shared_memory {
    uint16_t q[BM][PITCH], k[BN][PITCH], v[BN][PITCH], p[BM][BN];
    float halves[2][BM];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(BM == 16 * WARPS && BN % 64 == 0 && D % 128 == 0, "tile shape");
static_assert(K_VARIANT != FATTNI_VARIANT_GENERAL, "it has no features");
static_assert(BM * PITCH / 8 % THREADS == 0 && BN * PITCH / 8 % THREADS == 0, "each thread loads as much");
static_assert(SHARED_BYTES <= 227 * 1024, "shared memory");

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_attention_args a) {
    extern __shared__ __align__(1024) unsigned char memory[];
    shared_memory *const tiles = (shared_memory *)memory;
    const uint32_t shared = shared_address(memory), q_tile = MEMBER_ADDRESS(shared, q),
                   k_tile = MEMBER_ADDRESS(shared, k), v_tile = MEMBER_ADDRESS(shared, v),
                   p_tile = MEMBER_ADDRESS(shared, p);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, pair = warp / 2, side = warp % 2;
    const int g = lane / 4, t = lane % 4, row0 = 32 * pair, key0 = KEYS * side, column0 = COLUMNS * side;

    row_block work;
    if (!find_row_block(&a, 0, BM, BN, &work)) return;
    const int h = work.h, i0 = work.i0, rows = work.rows, begin = work.begin, end = work.end;
    const sequence s = work.s;
    const half_type *const q = (const half_type *)a.q.p + s.batch * a.q.b + h * a.q.h + (int64_t)(s.q0 + i0) * a.q.row;
    const half_type *const k =
        (const half_type *)a.k.p + s.batch * a.k.b + h / a.group * a.k.h + (int64_t)s.k0 * a.k.row;
    const half_type *const v =
        (const half_type *)a.v.p + s.batch * a.v.b + h / a.group * a.v.h + (int64_t)s.k0 * a.v.row;

    float o[ROW_TILES * COLUMN_TILES][4];
    float m[ROW_TILES][2], l[ROW_TILES][2]; /* running maximum of the scores before `unit`; sum of this thread's P */
    clear(o, ROW_TILES * COLUMN_TILES);
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) {
        m[r][0] = m[r][1] = -INFINITY;
        l[r][0] = l[r][1] = 0.0f;
    }
    const float unit = a.scale * LOG2E;

    const int first = begin / BN;
    int block = (end + BN - 1) / BN - 1;
    if (end <= begin) block = first - 1;
    load_tile(q_tile, PITCH, BM, THREADS, q, a.q.row, rows, a.D, a.vector_qkv);
    if (block >= first)
        load_tile(k_tile, PITCH, BN, THREADS, k + (int64_t)block * BN * a.k.row, a.k.row, s.Sk - block * BN, a.D,
                  a.vector_qkv);
    cp_async_commit();

    for (; block >= first; --block) {
        const int j0 = block * BN;
        cp_async_wait(0);
        __syncthreads(); /* K(n) has arrived, and all warps have read V(n+1) and P(n+1) */
        load_tile(v_tile, PITCH, BN, THREADS, v + (int64_t)j0 * a.v.row, a.v.row, s.Sk - j0, a.Dv, a.vector_qkv);
        cp_async_commit();

        float p[ROW_TILES][KEY_TILES][4];
        product_nt(p[0], ROW_TILES, KEY_TILES, D, lane_16(q_tile, PITCH), row0, lane_8(k_tile, PITCH), key0, PITCH);
        if (!(i0 + BM - 1 + s.lo <= j0 && j0 + BN - 1 <= i0 + s.hi && j0 + BN <= s.Sk)) {
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int i = i0 + row0 + 16 * r + g + (e >= 2 ? 8 : 0);
                    const int high = min(i + s.hi, s.Sk - 1) - j0 - key0 - 2 * t - (e & 1);
#pragma unroll
                    for (int n = 0; n < KEY_TILES; ++n)
                        if (8 * n > high) p[r][n][e] = -INFINITY;
                }
        }

        float tops[ROW_TILES][2], correction[ROW_TILES][2]; /* 2^(old - new maximum) */
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                tops[r][half] = maximum_of(p[r], KEY_TILES, half, m[r][half]);
                if (t == 0) tiles->halves[side][row0 + 16 * r + 8 * half + g] = tops[r][half];
            }
        named_barrier_sync(1 + pair, 64); /* both warps' maxima are there */
        int rose = 0;                     /* whether some row's maximum did: only then O is rescaled */
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
            for (int half = 0; half < 2; ++half)
                tops[r][half] = fmaxf(tops[r][half], tiles->halves[!side][row0 + 16 * r + 8 * half + g]);
            rose |= softmax_below(p[r], KEY_TILES, tops[r], m[r], l[r], correction[r], unit);
#pragma unroll
            for (int n = 0; n < KEY_TILES; ++n) {
                const uint32_t to = p_tile + tile_offset(BN, row0 + 16 * r + g, key0 / 8) + 4u * t ^ (uint32_t)(n << 4);
                store_shared_word(to, pack(p[r][n][0], p[r][n][1]));
                store_shared_word(to + 8 * BN * 2, pack(p[r][n][2], p[r][n][3]));
            }
        }

        cp_async_wait(0);
        __syncthreads(); /* V(n) has arrived, P is in shared memory, and all warps have read K(n) */
        if (block > first)
            load_tile(k_tile, PITCH, BN, THREADS, k + (int64_t)(j0 - BN) * a.k.row, a.k.row, s.Sk - (j0 - BN), a.D,
                      a.vector_qkv);
        cp_async_commit();
        if (__any_sync(ALL_LANES, rose)) {
#pragma unroll
            for (int c = 0; c < ROW_TILES * COLUMN_TILES; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[c][e] *= correction[c / COLUMN_TILES][e / 2];
        }
        product_nn(o, ROW_TILES, COLUMN_TILES, BN, lane_16(p_tile, BN), row0, BN, 0, lane_16(v_tile, PITCH), column0,
                   PITCH);
    }

    /* Row epilogue: O / l, L = m + ln l; a row without keys gives O = 0, L = -inf. */
    cp_async_wait(0);
    __syncthreads();
    float sums[ROW_TILES][2];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            sums[r][half] = quad_sum(l[r][half]);
            if (t == 0) tiles->halves[side][row0 + 16 * r + 8 * half + g] = sums[r][half];
        }
    named_barrier_sync(1 + pair, 64); /* both warps' sums are there */
    float *const lse = (float *)a.lse.p + s.batch * a.lse.b + h * a.lse.h;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int i = row0 + 16 * r + g + 8 * half;
            const row_result row =
                end_of_row(&a, 0, m[r][half], sums[r][half] + tiles->halves[!side][i], unit, a.scale, h, 0);
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; ++c) {
                o[r * COLUMN_TILES + c][2 * half] *= row.scale;
                o[r * COLUMN_TILES + c][2 * half + 1] *= row.scale;
            }
            if (side == 0 && t == 0 && i < rows) lse[(int64_t)(s.q0 + i0 + i) * a.lse.row] = row.L;
        }
    if (a.o_f32) {
        float *const out = (float *)a.o.p + s.batch * a.o.b + h * a.o.h + (int64_t)(s.q0 + i0) * a.o.row;
#pragma unroll
        for (int n = 0; n < ROW_TILES * COLUMN_TILES; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int i = row0 + n / COLUMN_TILES * 16 + g + (e >= 2 ? 8 : 0);
                const int d = column0 + n % COLUMN_TILES * 8 + 2 * t + (e & 1);
                if (i < rows && d < a.Dv) out[i * a.o.row + d] = o[n][e];
            }
        return;
    }
    if (a.o_rest.p)
#pragma unroll
        for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int i = row0 + 16 * r + g + 8 * half;
                char *const to = (char *)a.o_rest.p + s.batch * a.o_rest.b + h * a.o_rest.h +
                                 (int64_t)(s.q0 + i0 + i) * a.o_rest.row + column0;
                store_rest(to, &o[r * COLUMN_TILES][2 * half], COLUMN_TILES, 1.0f, i < rows, a.Dv - column0);
            }
    half_type *const out = (half_type *)a.o.p + s.batch * a.o.b + h * a.o.h + (int64_t)(s.q0 + i0) * a.o.row;
    store_rows(o, ROW_TILES, COLUMN_TILES, q_tile + (uint32_t)(side * BM * COLUMNS * 2), COLUMNS, row0, out + column0,
               a.o.row, rows, a.Dv - column0, a.vector_qkv);
}

DESCRIBE_KERNEL(fattni_attention_args, SHARED_BYTES, 1);
