/* Forward attention of few rows with mma.sync, F16 also on sm_75: one CTA per tile of rows and part of its keys.

   S = Q K^T, P = exp(s - m), O = P V as in fwd_mma16.cuh, with a sum l and a maximum m per warp. Results over other
   keys are added with m = max(m1, m2), O = O1 exp(m1 - m) + O2 exp(m2 - m), l likewise: first those of the warps, in
   shared memory; then those of FATTNI_PARTS_ADDED parts, by the CTA that is the last of them to finish, and so on,
   until one CTA has the whole. The order is fixed: results repeat bitwise. With clusters (fwd_parts_cluster.cuh) the
   first of these steps takes place in the CTAs' shared memory, without counters.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; any strides, d contiguous.
   Rows        of the heads of a group, 16 in a tile (fwd_parts.h).
   Threads     WARPS warps; each has all rows, and keys of its own in every block, which it loads itself, without
               waiting for the others. Fragments as in fwd_mma16.cuh.
   Shared      blocks of K and V, as many as the call has stages, swizzled (core/device/mma16_tile.cuh); at the end the
               warps' results.
   Code        K and V are usually not in L2, and with them the code is pushed out of it: what runs once, in particular
               all that comes after the keys, is written to be short.
   Variants    few: windows, lengths, sink, merge; few_general: every feature, as uniform branches; few_unified: as
               few, with m given (FlashDecoding++, Hong et al. 2023). Nothing is rescaled then, but once at the end: no
               P is 1, so that rounding would show in a row that one key dominates, and O is multiplied by the sum of P
               over that of the rounded P. A warp whose l or O leave their range computes its keys once more, with
               maxima.

   Instances: fwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/attention/unified.h"
#include "core/device/describe.cuh"
#define XOR_COLUMNS 256
#include "core/device/mma16_tile.cuh"
#include "core/ptx/grid.h"
#include "core/ptx/relaxed.h"
#if K_ARCH == 90
#include "core/ptx/cluster.h"
#endif
#include "fwd/cuda/fwd_parts.h"
#include "fwd/cuda/fwd_softmax.cuh"

enum {
    D = K_D,
    BM = K_BM,
    BN = K_BN,
    WARPS = K_WARPS,
    THREADS = 32 * WARPS,
    GENERAL = K_VARIANT == FATTNI_VARIANT_FEW_GENERAL,
    UNIFIED = K_VARIANT == FATTNI_VARIANT_FEW_UNIFIED,
    MOST_STAGES = K_ARCH == 90 ? FATTNI_FEW_STAGES_OF_HALF : FATTNI_FEW_STAGES,
    STAGE_BYTES = 4 * BN * D,
    WARP_KEYS = BN / WARPS,
    PIECE = 16, /* keys, at most those of a page */
    PIECES = WARP_KEYS / PIECE,
    KEY_TILES = WARP_KEYS / 8,
    COLUMN_TILES = D / 8,
    RESULT = BM * (D + 2) /* most floats of a result: O, maxima, sums */
};

/* After the keys, and in their place. */
typedef struct shared_memory {
    float of_warps[WARPS * RESULT], of_cta[RESULT]; /* results; their rows may be fewer and shorter */
    float weights[FATTNI_PARTS_ADDED][BM];          /* of results that are added up */
    float scales[BM];                               /* of rows of O, at the end */
    float old_weights[BM];                          /* of an O that is there (MERGE) */
    int64_t places[BM];                             /* of rows in o */
} shared_memory;
enum { SHARED_BYTES = MOST_STAGES * STAGE_BYTES }; /* of a stage: a block of K, and of V */
static_assert(BM == 16 && D % 64 == 0 && WARP_KEYS % PIECE == 0, "tile shape");
static_assert((int)WARPS <= (int)FATTNI_PARTS_ADDED, "weights");
static_assert((int)sizeof(shared_memory) <= FATTNI_FEW_STAGES * STAGE_BYTES, "results take the place of keys");

/* The work of a CTA. */
typedef struct key_part {
    int b, h0, r0, rows;      /* rows [r0, r0 + rows) of heads h0 .. h0 + tile_heads - 1 */
    int begin, end;           /* keys [begin, end) */
    int first_seen, end_seen; /* of these, all rows see [first_seen, end_seen) */
    int tile, part, parts;    /* tile: of all of the call */
    sequence s;
} key_part;

/* Tiles of rows with the same keys run side by side, then the parts; with clusters the parts of a tile. Gives 0 where
   the tile has no rows, and without clusters where there is no such part. */
DEVICE int find_part(const fattni_fwd_parts_args *x, key_part *w) {
    const fattni_attention_args *const a = &x->a;
    int n = (int)blockIdx.x, tile;
#if K_ARCH == 90
    w->part = fattni_divide(&n, &x->parts), tile = fattni_divide(&n, &x->tiles);
#else
    tile = fattni_divide(&n, &x->tiles), w->part = fattni_divide(&n, &x->parts);
#endif
    w->tile = n * (int)x->tiles.by + tile;
    w->h0 = fattni_divide(&n, &x->heads) * (int)x->tile_heads.by, w->b = n;
    w->s = sequence_of(a, w->b);
    const int rows = w->s.Sq * (int)x->tile_heads.by;
    w->r0 = tile * BM, w->rows = min(BM, rows - w->r0);
    if (w->rows <= 0) return 0;
    const int first = fattni_divided(w->r0, &x->tile_heads), last = fattni_divided(w->r0 + w->rows - 1, &x->tile_heads);
    w->begin = max(0, min(first + w->s.lo, w->s.Sk)) / 16 * 16;
    w->end = max(w->begin, min(last + 1 + w->s.hi, w->s.Sk));
    const int seen = w->end - w->begin, tiles = (int)x->heads.by * ((rows + BM - 1) / BM);
    const int keys = fattni_cuda_keys_of_part(seen, tiles, D);
    w->parts = fattni_cuda_parts_of(seen, keys);
    w->begin += w->part * keys, w->end = min(w->end, w->begin + keys);
    w->first_seen = last + w->s.lo, w->end_seen = min(w->end, first + 1 + w->s.hi);
    return K_ARCH == 90 || w->part < w->parts;
}

/* Row r of the tile: its place in a tensor, in elements. */
DEVICE int64_t place_of(const fattni_fwd_parts_args *x, const key_part *w, const fattni_view *t, int r) {
    int row = w->r0 + r;
    const int h = w->h0 + fattni_divide(&row, &x->tile_heads);
    return w->s.batch * t->b + h * t->h + (int64_t)(w->s.q0 + row) * t->row;
}

/* Q as A fragments, from global memory: rows `low` and `high`, NULL beyond the tile; all of the warp have no `high` if
   the tile has 8 rows or fewer. */
DEVICE void load_q(uint32_t (*q)[4], const half_type *low, const half_type *high, int tile_rows, int width,
                   int vector) {
    const int t = (int)threadIdx.x & 3;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const half_type *const row = half ? high : low;
#pragma unroll
        for (int n = half; n < D / 4; n += 2) q[n / 4][n % 4] = 0;
        if (half && tile_rows <= 8) break;
        if (vector && row) { /* loads that do not wait for each other */
#pragma unroll
            for (int n = half; n < D / 4; n += 2) {
                const int column = 16 * (n / 4) + 8 * (n / 2 % 2) + 2 * t;
                if (column < width) q[n / 4][n % 4] = *(const uint32_t *)(row + column);
            }
        } else if (row) {
#pragma unroll
            for (int n = half; n < D / 4; n += 2) {
                const int column = 16 * (n / 4) + 8 * (n / 2 % 2) + 2 * t;
                half_type x[2] = {to_half(0.0f), to_half(0.0f)};
                if (column < width) x[0] = row[column];
                if (column + 1 < width) x[1] = row[column + 1];
                q[n / 4][n % 4] = *(const uint32_t *)x;
            }
        }
    }
}

/* The pages of this warp's keys from j on, of those below `end`. */
DEVICE void find_pages(int page[PIECES], const fattni_fwd_parts_args *x, int b, int j, int end) {
    if (!x->page_table.p) return;
    const int32_t *const row = (const int32_t *)x->page_table.p + b * x->page_table.b;
#pragma unroll
    for (int n = 0; n < PIECES; ++n) {
        const int at = j + n * PIECE;
        page[n] = at < end ? row[(at >> x->page_log2) * x->page_table.h] : 0;
        if ((unsigned)page[n] >= (unsigned)x->pages) page[n] = 0;
    }
}

/* PIECE rows of a tile, of which `valid` exist; the others become 0. */
DEVICE void load_piece(uint32_t tile, const half_type *rows, int64_t row, int valid, int width, int vector) {
    enum { CHUNKS = D / 8, AT_ONCE = 32 / CHUNKS };
    const int lane = (int)threadIdx.x & 31, chunk = lane % CHUNKS, row0 = lane / CHUNKS;
    if (vector) {
        const half_type *from = rows + row0 * row + chunk * 8;
        if (chunk * 8 >= width) valid = 0;
#pragma unroll
        for (int i = row0; i - row0 < PIECE; i += AT_ONCE, from += AT_ONCE * row)
            cp_async_16(tile + tile_offset(D, i, chunk), i < valid ? from : rows, i < valid ? 16 : 0);
        return;
    }
#pragma unroll 1
    for (int at = lane; at < PIECE * D; at += 32) {
        const int i = at / D, column = at % D;
        const half_type x = i < valid && column < width ? rows[i * row + column] : to_half(0.0f);
        store_shared_half(tile + tile_offset(D, i, column / 8) + (uint32_t)(column % 8) * 2, *(const uint16_t *)&x);
    }
}

/* This warp's keys from j on, of those below `end`, of K or V of a head, as one group of copies. */
DEVICE void load_keys(uint32_t tile, const fattni_fwd_parts_args *x, const half_type *head, int64_t page_step,
                      int64_t row, const int page[PIECES], int j, int end, int width) {
#pragma unroll
    for (int n = 0; n < PIECES && j < end; ++n) {
        const int at = j + n * PIECE;
        load_piece(tile + n * PIECE * D * 2, head + page[n] * page_step + (at & x->page_mask) * row, row, end - at,
                   width, x->a.vector_qkv);
    }
    cp_async_commit();
}

/* Until the oldest of the groups of copies is done, of the K and V of all stages. */
DEVICE void wait_oldest(int stages) {
    if (MOST_STAGES >= FATTNI_FEW_STAGES_OF_HALF && stages == FATTNI_FEW_STAGES_OF_HALF)
        cp_async_wait(2 * FATTNI_FEW_STAGES_OF_HALF - 1);
    else if (MOST_STAGES >= FATTNI_FEW_STAGES_OF_ONE && stages == FATTNI_FEW_STAGES_OF_ONE)
        cp_async_wait(2 * FATTNI_FEW_STAGES_OF_ONE - 1);
    else
        cp_async_wait(2 * FATTNI_FEW_STAGES - 1);
}

/* Whether this warp's results with the unified maximum can be used. */
DEVICE int is_in_range(const float (*o)[4], const float l[2], int rows) {
    int good = 1;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float sum = quad_sum(l[half]);
        float size = 0.0f;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c) size += fabsf(o[c][2 * half]) + fabsf(o[c][2 * half + 1]);
        if ((int)(threadIdx.x & 31) / 4 + 8 * half < rows)
            good &= sum > FATTNI_UNIFIED_LEAST_SUM && sum < FATTNI_UNIFIED_MOST_SUM && size < FATTNI_UNIFIED_MOST_O;
    }
    return !__any_sync(ALL_LANES, !good);
}

/* Adds rounded P to the sums of rows. */
DEVICE void add_rounded(float sums[2], const uint32_t (*p)[4]) {
#pragma unroll
    for (int n = 0; n < KEY_TILES / 2; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) /* bf16 is the upper half of a float */
            sums[e % 2] += __uint_as_float(p[n][e] << 16) + __uint_as_float(p[n][e] & 0xffff0000u);
}

/* Where results are that are added up: of this CTA's warps, of the cluster's CTAs, or of CTAs that have written them to
   global memory. */
enum { OF_WARPS, OF_CLUSTER, OF_GRID };
DEVICE const float *result_at(const float *first, int n, int64_t step, int where) {
#if K_ARCH == 90
    if (where == OF_CLUSTER) return (const float *)cluster_pointer(first, (uint32_t)n);
#endif
    return first + n * step;
}

/* A warp's result. */
DEVICE void store_result(float *to, const float (*o)[4], const float m[2], const float l[2], int rows, int width) {
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = g + 8 * half;
        if (row >= rows) break;
#pragma unroll
        for (int c = 0; c < COLUMN_TILES; ++c)
            if (8 * c < width)
                *(float2 *)(to + row * width + 8 * c + 2 * t) = make_float2(o[c][2 * half], o[c][2 * half + 1]);
        if (t == 0) to[rows * width + row] = m[half], to[rows * width + rows + row] = l[half];
    }
}

/* Columns d and d + 1 of a row of O, whose place in o is `at`; of columns from Dv on only the rest, which is 0. */
DEVICE void store_pair(const fattni_fwd_parts_args *x, const key_part *w, int r, int64_t at, int d, float2 value,
                       float old_weight) {
    const fattni_attention_args *const a = &x->a;
    float *const o = (float *)a->o.p + at + d;
    half_type *const half_o = (half_type *)a->o.p + at + d;
    const int first = d < a->Dv, second = d + 1 < a->Dv;
    if (a->o_f32) {
        if (first && old_weight > 0) value.x += old_weight * o[0];
        if (second && old_weight > 0) value.y += old_weight * o[1];
        if (first) o[0] = value.x;
        if (second) o[1] = value.y;
        return;
    }
    const half_type rounded[2] = {to_half(value.x), to_half(value.y)};
    if (first) half_o[0] = rounded[0];
    if (second) half_o[1] = rounded[1];
    if (!a->o_rest.p) return;
    int8_t *const rest = (int8_t *)a->o_rest.p + place_of(x, w, &a->o_rest, r) + d;
    rest[0] = (int8_t)fattni_o_rest(__float_as_uint(value.x), __float_as_uint(to_float(rounded[0])), O_REST);
    rest[1] = (int8_t)fattni_o_rest(__float_as_uint(value.y), __float_as_uint(to_float(rounded[1])), O_REST);
}

/* `count` results, in memory `step` floats apart, added up in their order: a result again, or, where `to` is NULL, O
   and L. */
DEVICE void add_results(shared_memory *smem, const fattni_fwd_parts_args *x, const key_part *w, const float *from,
                        int count, int64_t step, int where, float *to, float unit) {
    const fattni_attention_args *const a = &x->a;
    const int thread = (int)threadIdx.x, rows = x->rows, width = x->width;
    if (thread < rows) {
        const int maximum = rows * width + thread, sum = maximum + rows;
        float m = -INFINITY, l = 0.0f;
#pragma unroll 4
        for (int n = 0; n < count; ++n) m = fmaxf(m, load_relaxed(result_at(from, n, step, where) + maximum));
#pragma unroll 4
        for (int n = 0; n < count; ++n) {
            const float *const result = result_at(from, n, step, where);
            const float weight = weight_of(load_relaxed(result + maximum), m, unit);
            smem->weights[n][thread] = weight;
            l += weight * load_relaxed(result + sum);
        }
        if (to) {
            to[maximum] = m, to[sum] = l;
        } else if (thread < w->rows) {
            int h = w->r0 + thread;
            h = w->h0 + fattni_divide(&h, &x->tile_heads);
            float *const lse = (float *)a->lse.p + place_of(x, w, &a->lse, thread);
            const row_result end = end_of_row(a, 1, m, l, unit, GENERAL ? 1.0f : a->scale, h, lse);
            *lse = end.L;
            smem->scales[thread] = end.scale;
            smem->old_weights[thread] = a->flags & FATTN_MERGE ? end.keep_old : 0.0f;
            smem->places[thread] = place_of(x, w, &a->o, thread);
        }
    }
    __syncthreads(); /* the weights are there */
#pragma unroll 1
    for (int n = thread; n < (to ? rows : w->rows) * (D / 2); n += THREADS) {
        const int r = n / (D / 2), d = n % (D / 2) * 2;
        if (d >= width) continue;
        float2 sum = make_float2(0, 0);
#pragma unroll 4
        for (int k = 0; k < count; ++k) {
            const float2 part = load_relaxed_2(result_at(from, k, step, where) + r * width + d);
            sum.x += smem->weights[k][r] * part.x, sum.y += smem->weights[k][r] * part.y;
        }
        if (to) {
            *(float2 *)(to + r * width + d) = sum;
            continue;
        }
        /* Scaled last: how many levels there were does not show in the bits. */
        sum.x *= smem->scales[r];
        sum.y *= smem->scales[r];
        store_pair(x, w, r, smem->places[r], d, sum, smem->old_weights[r]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_fwd_parts_args x) {
    begin_grid();
    extern __shared__ __align__(1024) unsigned char SHARED_MEMORY[];
    shared_memory *const smem = (shared_memory *)SHARED_MEMORY;
    const fattni_attention_args &a = x.a;
    const uint32_t shared = shared_address(SHARED_MEMORY);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, t = lane % 4, keys0 = warp * WARP_KEYS;
    key_part w;
    if (!find_part(&x, &w)) return;
#if K_ARCH == 90
    if (w.part >= w.parts) { /* the others of the cluster add up without it */
        if (x.cluster > 1) cluster_sync(), cluster_sync();
        return;
    }
#endif
    const sequence s = w.s;
    const int first = w.begin + keys0;
    const int64_t hk = w.h0 / a.group;
    const int batch = x.page_table.p ? 0 : s.batch;
    const half_type *const k = (const half_type *)a.k.p + batch * a.k.b + hk * a.k.h + (int64_t)s.k0 * a.k.row;
    const half_type *const v = (const half_type *)a.v.p + batch * a.v.b + hk * a.v.h + (int64_t)s.k0 * a.v.row;
    const uint32_t k_tile = shared + (uint32_t)(keys0 * D * 2), v_tile = k_tile + STAGE_BYTES / 2,
                   k_lane = lane_8(k_tile, D), v_lane = lane_16(v_tile, D);
    const int stages = MOST_STAGES > FATTNI_FEW_STAGES ? x.stages : (int)FATTNI_FEW_STAGES;

    /* From scores to units of log2: general_scores scales them, where it is called. */
    const float unit = GENERAL ? LOG2E : a.scale * LOG2E, base = __fmul_rn(x.unified_max, unit);
    int unified = UNIFIED && first < w.end && !is_far(base); /* else with maxima */
    float o[COLUMN_TILES][4], m[2], l[2];
    for (;;) {
        /* K and V of a block, one group each, even if it is empty. */
        int page[PIECES] = {0};
#pragma unroll 1
        for (int n = 0; n < stages; ++n) {
            find_pages(page, &x, w.b, first + n * BN, w.end);
            load_keys(k_tile + n * STAGE_BYTES, &x, k, a.k.b, a.k.row, page, first + n * BN, w.end, a.D);
            load_keys(v_tile + n * STAGE_BYTES, &x, v, a.v.b, a.v.row, page, first + n * BN, w.end, a.Dv);
        }
        find_pages(page, &x, w.b, first + stages * BN, w.end);

        uint32_t q[D / 16][4];
        int row[2], h = w.h0;
        const half_type *rows[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int n = lane / 4 + 8 * half;
            row[half] = fattni_divided(w.r0 + n, &x.tile_heads);
            rows[half] = n < w.rows ? (const half_type *)a.q.p + place_of(&x, &w, &a.q, n) : 0;
        }
        load_q(q, rows[0], rows[1], w.rows, a.D, a.vector_qkv);

        float rounded[2] = {0.0f, 0.0f}; /* sums of rounded P */
        m[0] = m[1] = -INFINITY, l[0] = l[1] = 0.0f;
        clear(o, COLUMN_TILES);
        uint32_t stage = 0; /* bytes from the first one */
        for (int j = first; j < w.end; j += BN) {
            wait_oldest(stages);
            __syncwarp(); /* this warp's K of the block has arrived */

            float p[KEY_TILES][4];
            product_fragments_nt(p, 1, KEY_TILES, D / 16, q, k_lane + stage, 0, D);
            __syncwarp(); /* and has been read */
            load_keys(k_tile + stage, &x, k, a.k.b, a.k.row, page, j + stages * BN, w.end, a.D);
            if (GENERAL) general_scores(p, 0, KEY_TILES, 0, &a, &s, slope_of(&a, h), w.b, h, row[0], j + 2 * t);
            if (j < w.first_seen || j + WARP_KEYS > w.end_seen)
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const int low = row[e / 2] + s.lo - j - 2 * t - (e & 1);
                    const int high = min(row[e / 2] + s.hi, w.end - 1) - j - 2 * t - (e & 1);
#pragma unroll
                    for (int c = 0; c < KEY_TILES; ++c)
                        if (8 * c > high || 8 * c < low) p[c][e] = -INFINITY;
                }

            float correction[2];
            if (UNIFIED && unified)
                fixed_softmax(p, KEY_TILES, l, unit, base);
            else if (__any_sync(ALL_LANES, online_softmax(p, KEY_TILES, m, l, correction, unit)))
#pragma unroll
                for (int c = 0; c < COLUMN_TILES; ++c)
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[c][e] *= correction[e / 2];
            if (GENERAL && a.drop_T) {
                const dropout_plane plane = dropout_plane_of(&a, w.b, h);
                uint32_t keep[(KEY_TILES + 7) / 8];
                keep_tiles(keep, KEY_TILES, &a, &plane, 0, row[0], j + 2 * t);
#pragma unroll
                for (int c = 0; c < KEY_TILES; ++c)
#pragma unroll
                    for (int e = 0; e < 4; ++e)
                        if (!is_kept(keep, 0, c, e)) p[c][e] = 0.0f;
            }
            uint32_t p_rows[KEY_TILES / 2][4];
            to_fragments(p_rows, p, KEY_TILES / 2);
            if (UNIFIED) add_rounded(rounded, p_rows);
            wait_oldest(stages);
            __syncwarp(); /* V of the block */
            product_fragments_nn(o, COLUMN_TILES, KEY_TILES / 2, p_rows, v_lane + stage, D);
            __syncwarp();
            load_keys(v_tile + stage, &x, v, a.v.b, a.v.row, page, j + stages * BN, w.end, a.Dv);
            find_pages(page, &x, w.b, j + (stages + 1) * BN, w.end);
            stage = stage == (uint32_t)(stages - 1) * STAGE_BYTES ? 0 : stage + STAGE_BYTES;
        }
        if (!UNIFIED || !unified) break;
        cp_async_wait(0);
        if (is_in_range(o, l, w.rows)) {
            m[0] = m[1] = x.unified_max;
            const float scale[2] = {quad_sum(l[0]) / quad_sum(rounded[0]), quad_sum(l[1]) / quad_sum(rounded[1])};
#pragma unroll
            for (int c = 0; c < COLUMN_TILES; ++c)
#pragma unroll
                for (int e = 0; e < 4; ++e) o[c][e] *= scale[e / 2];
            break;
        }
        unified = 0;
        __syncwarp(); /* all lanes have read what is loaded again */
    }

    l[0] = quad_sum(l[0]), l[1] = quad_sum(l[1]);
    cp_async_wait(0);
    __syncthreads(); /* all warps have read their keys */
    const int64_t size = x.rows * (x.width + 2);
    store_result(smem->of_warps + warp * size, o, m, l, x.rows, x.width);
    __syncthreads();

    /* Level by level: result `node` of `count`; in global memory it lies in the place of its first part. */
    float *const of_parts = x.results + (int64_t)w.tile * x.parts.by * size;
    int *arrived = x.arrived + (int64_t)w.tile * x.counters;
    const float *from = smem->of_warps;
    int where = OF_WARPS, members = WARPS, node = w.part, count = w.parts;
    int64_t place = 1, step = size;
#pragma unroll 1
    for (;;) {
        const int in_cluster = K_ARCH == 90 && where == OF_WARPS && x.cluster > 1;
        float *const to = in_cluster ? smem->of_cta : count == 1 ? 0 : of_parts + node * place * size;
        add_results(smem, &x, &w, from, members, step, where, to, unit);
#if K_ARCH == 90
        if (where == OF_CLUSTER) cluster_sync(); /* the other CTAs' results have been read */
#endif
        if (!to) return;
        const int together = in_cluster ? x.cluster : FATTNI_PARTS_ADDED, group = node / together;
        members = min(together, count - group * together), step = place * size, place *= together;
#if K_ARCH == 90
        if (in_cluster) {
            cluster_sync(); /* all results are written */
            if (node % together) {
                cluster_sync();
                return;
            }
            from = smem->of_cta, where = OF_CLUSTER;
        } else
#endif
        {
            __syncthreads(); /* all of it is written */
            int last = 0;
            if (threadIdx.x == 0) {
                __threadfence();
                last = atomicAdd(&arrived[group], 1) == members - 1;
                __threadfence();
            }
            if (!__syncthreads_or(last)) return;
            from = of_parts + group * place * size, where = OF_GRID;
        }
        node = group, count = (count + together - 1) / together;
        arrived += count;
    }
}

DESCRIBE_KERNEL_THAT_WAITS(fattni_fwd_parts_args, SHARED_BYTES, 1);
