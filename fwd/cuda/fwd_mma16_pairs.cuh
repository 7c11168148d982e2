/* Forward attention with mma.sync for full and causal masks, as fwd_mma16.cuh, where a thread has no registers for two
   row tiles of O: each B fragment is still loaded once for 32 rows, because two warps share these.

   Threads     WARPS warps in pairs; a pair has 32 rows. Of S each of its warps has half of the keys, of O half of the
               columns. Pairs do not wait for each other, so that one multiplies while another has its softmax.
   Shared      struct shared_memory. P goes from one division to the other by way of it. O is stored through Q's tile.
   Loads       cp.async, by halves: of K columns, of V keys. A half of the next block takes the place of one that all
               warps have read, a product or more after this warp has, so that it seldom waits for the others.

   Instances: fwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "fwd/cuda/fwd_row_block.cuh"
#include "fwd/cuda/fwd_softmax.cuh"
#include "core/device/mma16_tile.cuh"
#include "core/ptx/after_loads.h"
#include "core/ptx/mbarrier.h"

enum {
    D = K_D,
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

/* Halves of K and V: the mbarriers say that they are loaded, and that all warps have read them. */
enum { K0, K1, V0, V1, HALVES };

/* Tiles of 16-bit elements. halves: of both halves of a row, maxima, and in the end sums. */
typedef struct shared_memory {
    uint16_t q[2][BM][D / 2], k[2][BN][D / 2], v[2][BN / 2][D], p[BM][BN];
    float halves[2][BM];
    uint64_t loaded[HALVES], read[HALVES];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(BM == 16 * WARPS && BN == 64 && D == 256, "tile shape");
static_assert(K_VARIANT != FATTNI_VARIANT_GENERAL, "it has no features");
static_assert(BM * D / 8 % THREADS == 0, "each thread loads as much");
static_assert(SHARED_BYTES <= 163 * 1024, "shared memory");

/* Where the keys come from: row 0 of the sequence. */
typedef struct key_source {
    const half_type *k, *v;
    int Sk;
} key_source;

/* Loads a half of the block of keys from j0 on; all threads. */
DEVICE void load_half(const fattni_attention_args *a, const key_source *from, uint32_t shared, int half, int j0) {
    const uint32_t loaded = ELEMENT_ADDRESS(shared, loaded, half);
    const int column = half == K1 ? D / 2 : 0, key = j0 + (half == V1 ? BN / 2 : 0);
    if (half <= K1)
        load_tile(ELEMENT_ADDRESS(shared, k, half), D / 2, BN, THREADS, from->k + key * a->k.row + column, a->k.row,
                  from->Sk - key, min(a->D - column, D / 2), a->vector_qkv);
    else
        load_tile(ELEMENT_ADDRESS(shared, v, half - V0), D, BN / 2, THREADS, from->v + key * a->v.row, a->v.row,
                  from->Sk - key, a->Dv, a->vector_qkv);
    if (a->vector_qkv)
        cp_async_arrive(loaded);
    else
        mbarrier_arrive(loaded);
}

DEVICE void wait_loaded(uint32_t shared, int half, uint32_t parity) {
    mbarrier_wait(ELEMENT_ADDRESS(shared, loaded, half), parity);
}
/* In place of what all warps have read, of the block of `parity`. */
DEVICE void load_in_place(const fattni_attention_args *a, const key_source *from, uint32_t shared, int half,
                          uint32_t parity, int j0) {
    mbarrier_wait(ELEMENT_ADDRESS(shared, read, half), parity);
    load_half(a, from, shared, half, j0);
}
/* After the warp's last load from a half, of which `product` comes. All lanes arrive, as all have loaded. */
DEVICE void give_back(uint32_t shared, int half, float product) {
    mbarrier_arrive(after_load(ELEMENT_ADDRESS(shared, read, half), __float_as_uint(product)));
}

/* P of this warp's keys, to the pair's tile. */
DEVICE void store_p(uint32_t p_tile, const float p[ROW_TILES][KEY_TILES][4], int row0, int key0) {
    const int lane = (int)threadIdx.x % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r)
#pragma unroll
        for (int n = 0; n < KEY_TILES; ++n) {
            const uint32_t to = p_tile + tile_offset(BN, row0 + 16 * r + g, key0 / 8) + 4u * t ^ (uint32_t)(n << 4);
            store_shared_word(to, pack(p[r][n][0], p[r][n][1]));
            store_shared_word(to + 8 * BN * 2, pack(p[r][n][2], p[r][n][3]));
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_attention_args a) {
    extern __shared__ __align__(1024) unsigned char SHARED_MEMORY[];
    shared_memory *const tiles = (shared_memory *)SHARED_MEMORY;
    const uint32_t shared = shared_address(SHARED_MEMORY), p_tile = MEMBER_ADDRESS(shared, p);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, pair = warp / 2, side = warp % 2;
    const int g = lane / 4, t = lane % 4, row0 = 32 * pair, key0 = KEYS * side, column0 = COLUMNS * side;

    row_block work;
    if (!find_row_block(&a, 0, BM, BN, &work)) return;
    const int h = work.h, i0 = work.i0, rows = work.rows, begin = work.begin, end = work.end;
    const sequence s = work.s;
    const half_type *const q = (const half_type *)a.q.p + s.batch * a.q.b + h * a.q.h + (int64_t)(s.q0 + i0) * a.q.row;
    const key_source keys = {(const half_type *)a.k.p + s.batch * a.k.b + h / a.group * a.k.h + (int64_t)s.k0 * a.k.row,
                             (const half_type *)a.v.p + s.batch * a.v.b + h / a.group * a.v.h + (int64_t)s.k0 * a.v.row,
                             s.Sk};

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
    if (threadIdx.x < HALVES) {
        mbarrier_init(ELEMENT_ADDRESS(shared, loaded, threadIdx.x), THREADS);
        mbarrier_init(ELEMENT_ADDRESS(shared, read, threadIdx.x), THREADS);
    }
    __syncthreads();
    if (block >= first)
#pragma unroll
        for (int half = 0; half < HALVES; ++half) {
            if (half <= K1) /* K's arrival says that this has arrived, too */
                load_tile(ELEMENT_ADDRESS(shared, q, half), D / 2, BM, THREADS, q + D / 2 * half, a.q.row, rows,
                          min(a.D - D / 2 * half, D / 2), a.vector_qkv);
            load_half(&a, &keys, shared, half, block * BN);
        }
    prefetch_next_q(&a, BM, D, THREADS);

    const int last = block;
    for (uint32_t parity = 0; block >= first; --block, parity ^= 1) {
        const int j0 = block * BN;
        const int sees = i0 + row0 + 31 + s.hi >= j0 && row0 < rows; /* whether rows of the pair see the block */

        float p[ROW_TILES][KEY_TILES][4];
        clear(p[0], ROW_TILES * KEY_TILES);
        wait_loaded(shared, K0, parity);
        if (sees)
            add_product_nt(p[0], ROW_TILES, KEY_TILES, D / 2, lane_16(ELEMENT_ADDRESS(shared, q, 0), D / 2), row0,
                           D / 2, lane_8(ELEMENT_ADDRESS(shared, k, 0), D / 2), key0, D / 2);
        if (block < last) load_in_place(&a, &keys, shared, V0, parity ^ 1, j0);
        wait_loaded(shared, K1, parity);
        give_back(shared, K0, p[ROW_TILES - 1][KEY_TILES - 1][0]);
        if (sees)
            add_product_nt(p[0], ROW_TILES, KEY_TILES, D / 2, lane_16(ELEMENT_ADDRESS(shared, q, 1), D / 2), row0,
                           D / 2, lane_8(ELEMENT_ADDRESS(shared, k, 1), D / 2), key0, D / 2);
        give_back(shared, K1, p[ROW_TILES - 1][KEY_TILES - 1][0]);
        if (block < last) load_in_place(&a, &keys, shared, V1, parity ^ 1, j0);
        if (sees) {
            if (j0 + key0 + KEYS > min(i0 + row0 + 1 + s.hi, s.Sk)) {
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
            named_barrier_sync(1 + pair, 64); /* both warps' maxima are there, and both have read the last P */
            int rose = 0;                     /* whether some row's maximum did: only then O is rescaled */
#pragma unroll
            for (int r = 0; r < ROW_TILES; ++r) {
#pragma unroll
                for (int half = 0; half < 2; ++half)
                    tops[r][half] = fmaxf(tops[r][half], tiles->halves[!side][row0 + 16 * r + 8 * half + g]);
                rose |= softmax_below(p[r], KEY_TILES, tops[r], m[r], l[r], correction[r], unit);
            }
            store_p(p_tile, p, row0, key0);
            if (__any_sync(ALL_LANES, rose)) {
#pragma unroll
                for (int c = 0; c < ROW_TILES * COLUMN_TILES; ++c)
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[c][e] *= correction[c / COLUMN_TILES][e / 2];
            }
            named_barrier_sync(1 + pair, 64); /* P is there */
        }
        wait_loaded(shared, V0, parity);
        if (sees)
            product_nn(o, ROW_TILES, COLUMN_TILES, BN / 2, lane_16(p_tile, BN), row0, BN, 0,
                       lane_16(ELEMENT_ADDRESS(shared, v, 0), D), column0, D);
        if (block > first) load_in_place(&a, &keys, shared, K0, parity, j0 - BN);
        wait_loaded(shared, V1, parity);
        give_back(shared, V0, o[ROW_TILES * COLUMN_TILES - 1][0]);
        if (sees)
            product_nn(o, ROW_TILES, COLUMN_TILES, BN / 2, lane_16(p_tile, BN) ^ (uint32_t)BN, row0, BN, 0,
                       lane_16(ELEMENT_ADDRESS(shared, v, 1), D), column0, D);
        give_back(shared, V1, o[ROW_TILES * COLUMN_TILES - 1][0]);
        if (block > first) load_in_place(&a, &keys, shared, K1, parity, j0 - BN);
    }

    /* Row epilogue: O / l, L = m + ln l; a row without keys gives O = 0, L = -inf. */
    cp_async_wait(0);
    __syncthreads();
    const int end_i = own_row(row0, ROW_TILES, g, t); /* this lane's row */
    float sums[ROW_TILES][2];
#pragma unroll
    for (int r = 0; r < ROW_TILES; ++r) sums[r][0] = quad_sum(l[r][0]), sums[r][1] = quad_sum(l[r][1]);
    const float sum = of_own_row(sums, ROW_TILES);
    tiles->halves[side][end_i] = sum;
    named_barrier_sync(1 + pair, 64); /* both warps' sums are there */
    const row_result row =
        end_of_row(&a, 0, of_own_row(m, ROW_TILES), sum + tiles->halves[!side][end_i], unit, a.scale, h, 0);
    if (side == 0 && end_i < rows)
        ((float *)a.lse.p)[s.batch * a.lse.b + h * a.lse.h + (int64_t)(s.q0 + i0 + end_i) * a.lse.row] = row.L;
#pragma unroll
    for (int n = 0; n < 2 * ROW_TILES; ++n) {
        const float scale = __shfl_sync(ALL_LANES, row.scale, lane_of_row(n / 2, n % 2));
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) {
            float *const x = &o[n / 2 * COLUMN_TILES + c][n % 2 * 2];
            x[0] *= scale, x[1] *= scale;
        }
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
    store_rows(o, ROW_TILES, COLUMN_TILES, ELEMENT_ADDRESS(shared, q, side), COLUMNS, row0, out + column0, a.o.row,
               rows, a.Dv - column0, a.vector_qkv);
}

DESCRIBE_KERNEL(fattni_attention_args, SHARED_BYTES, 1);
