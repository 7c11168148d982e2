/* Forward attention of few rows with mma.sync, F16 also on sm_75: one CTA per tile of rows and part of its keys.

   S = Q K^T, P = exp(s - m), O = P V as in fwd_mma16.cuh, with a sum l and a maximum m per warp. Results over other
   keys are added with m = max(m1, m2), O = O1 exp(m1 - m) + O2 exp(m2 - m), l likewise: first those of the warps, in
   shared memory; then those of FATTNI_PARTS_ADDED parts, by the CTA that is the last of them to finish, and so on,
   until one CTA has the whole. The order is fixed: results repeat bitwise.

   Tensors     q, o [b,h,i,d], k, v [b,g,j,d], lse [b,h,i]; any strides, d contiguous.
   Rows        of the heads of a group, 16 in a tile (fwd_parts.h).
   Threads     WARPS warps; each has all rows, and keys of its own in every block, which it loads itself, without
               waiting for the others. Fragments as in fwd_mma16.cuh.
   Shared      STAGES blocks of K and V, swizzled (core/device/mma16_tile.cuh); at the end the warps' results.
   Variants    few: windows, lengths, sink, merge; few_general: every feature, as uniform branches.

   Instances: fwd_kernels.def. Macros in: cmake/instance.cu.in. */
#include "core/device/describe.cuh"
#include "core/device/mma16_tile.cuh"
#include "fwd/cuda/fwd_parts.h"
#include "fwd/cuda/fwd_softmax.cuh"

enum {
    D = K_D,
    BM = K_BM,
    BN = K_BN,
    WARPS = K_WARPS,
    THREADS = 32 * WARPS,
    GENERAL = K_VARIANT == FATTNI_VARIANT_FEW_GENERAL,
    STAGES = 2,
    WARP_KEYS = BN / WARPS,
    PIECE = 16, /* keys, at most those of a page */
    PIECES = WARP_KEYS / PIECE,
    KEY_TILES = WARP_KEYS / 8,
    COLUMN_TILES = D / 8,
    WARP_TILES = COLUMN_TILES / WARPS, /* columns that a warp adds up, in tiles */
    RESULT = BM * (D + 2)              /* floats of a result: O, maxima, sums */
};

/* Tiles of 16-bit elements. */
typedef struct shared_memory {
    uint16_t k[STAGES][BN][D], v[STAGES][BN][D];
} shared_memory;
enum { SHARED_BYTES = sizeof(shared_memory) };
static_assert(BM == 16 && D % 64 == 0 && WARP_KEYS % PIECE == 0 && COLUMN_TILES % WARPS == 0, "tile shape");
static_assert(4 * WARPS * RESULT <= SHARED_BYTES, "the warps' results take the place of keys");
static_assert((int)WARPS <= (int)FATTNI_PARTS_ADDED, "add_results");

/* The work of a CTA. */
typedef struct key_part {
    int b, h0, r0, rows;      /* rows [r0, r0 + rows) of heads h0 .. h0 + tile_heads - 1 */
    int begin, end;           /* keys [begin, end) */
    int first_seen, end_seen; /* of these, all rows see [first_seen, end_seen) */
    int tile, part, parts;    /* tile: of all of the call */
    sequence s;
} key_part;

/* Tiles of rows with the same keys run side by side, then the parts. Gives 0 where there is nothing to do. */
DEVICE int find_part(const fattni_fwd_parts_args *x, key_part *w) {
    const fattni_attention_args *const a = &x->a;
    const int heads = a->Hq / x->tile_heads, tile = (int)(blockIdx.x % (unsigned)x->tiles);
    unsigned n = blockIdx.x / (unsigned)x->tiles;
    w->part = (int)(n % (unsigned)x->parts), n /= (unsigned)x->parts;
    w->h0 = (int)(n % (unsigned)heads) * x->tile_heads, w->b = (int)(n / (unsigned)heads);
    w->tile = (int)n * x->tiles + tile;
    w->s = sequence_of(a, w->b);
    const int rows = w->s.Sq * x->tile_heads;
    w->r0 = tile * BM, w->rows = min(BM, rows - w->r0);
    if (w->rows <= 0) return 0;
    const int first = w->r0 / x->tile_heads, last = (w->r0 + w->rows - 1) / x->tile_heads;
    w->begin = max(0, min(first + w->s.lo, w->s.Sk)) / 16 * 16;
    w->end = max(w->begin, min(last + 1 + w->s.hi, w->s.Sk));
    const int tiles = heads * ((rows + BM - 1) / BM), keys = fattni_cuda_keys_of_part(w->end - w->begin, tiles, D);
    w->parts = fattni_cuda_parts_of(w->end - w->begin, tiles, D);
    w->begin += w->part * keys, w->end = min(w->end, w->begin + keys);
    w->first_seen = last + w->s.lo, w->end_seen = min(w->end, first + 1 + w->s.hi);
    return w->part < w->parts;
}

/* Q as A fragments, from global memory: rows `low` and `high`, NULL beyond the tile. */
DEVICE void load_q(uint32_t (*q)[4], const half_type *low, const half_type *high, int width, int vector) {
    const int t = (int)threadIdx.x & 3;
    if (vector) { /* loads that do not wait for each other */
#pragma unroll
        for (int n = 0; n < D / 4; ++n) {
            const half_type *const row = n & 1 ? high : low;
            const int column = 16 * (n / 4) + 8 * (n / 2 % 2) + 2 * t;
            q[n / 4][n % 4] = row && column < width ? *(const uint32_t *)(row + column) : 0;
        }
        return;
    }
#pragma unroll
    for (int n = 0; n < D / 4; ++n) {
        const half_type *const row = n & 1 ? high : low;
        const int column = 16 * (n / 4) + 8 * (n / 2 % 2) + 2 * t;
        half_type x[2] = {to_half(0.0f), to_half(0.0f)};
        if (row && column < width) x[0] = row[column];
        if (row && column + 1 < width) x[1] = row[column + 1];
        q[n / 4][n % 4] = *(const uint32_t *)x;
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

/* This warp's keys from j on, of those below `end`, of K or V of a head, as one group of copies. */
DEVICE void load_keys(uint32_t tile, const fattni_fwd_parts_args *x, const fattni_view *keys, const half_type *head,
                      const int page[PIECES], int j, int end, int width) {
    const int lane = (int)threadIdx.x & 31, vector = x->a.vector_qkv;
    if (j < end && !x->page_table.p)
        load_tile_by(lane, 32, tile, D, WARP_KEYS, head + j * keys->row, keys->row, end - j, width, vector);
    else if (j < end)
#pragma unroll
        for (int n = 0; n < PIECES; ++n) {
            const int at = j + n * PIECE, row = at & ((1 << x->page_log2) - 1);
            load_tile_by(lane, 32, tile + n * PIECE * D * 2, D, PIECE, head + page[n] * keys->b + row * keys->row,
                         keys->row, end - at, width, vector);
        }
    cp_async_commit();
}

/* From shared memory, or what other CTAs have written to global memory. */
DEVICE float load_float(const float *from, int global) { return global ? __ldcg(from) : *from; }
DEVICE float2 load_pair(const float *from, int global) {
    return global ? __ldcg((const float2 *)from) : *(const float2 *)from;
}

/* What a warp adds up and stores: columns [column0, column0 + 8 WARP_TILES) of results, which have `rows` rows of
   `width` floats, then the rows' maxima and sums. */
typedef struct piece {
    int column0, rows, width;
} piece;

/* `count` results, `step` floats apart, added up in their order. count <= FATTNI_PARTS_ADDED. */
DEVICE void add_results(float x[WARP_TILES][4], float m[2], float l[2], const float *from, int count, int64_t step,
                        int global, float unit, const piece *w) {
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
    clear(x, WARP_TILES);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = g + 8 * half;
        m[half] = -INFINITY, l[half] = 0.0f;
        if (row >= w->rows) continue;
        const float *const maxima = from + w->rows * w->width + row, *const o = from + row * w->width + w->column0;
        float weight[FATTNI_PARTS_ADDED], sum[FATTNI_PARTS_ADDED]; /* loads that do not wait for each other */
#pragma unroll
        for (int n = 0; n < FATTNI_PARTS_ADDED; ++n) {
            weight[n] = n < count ? load_float(maxima + n * step, global) : -INFINITY;
            sum[n] = n < count ? load_float(maxima + n * step + w->rows, global) : 0.0f;
        }
#pragma unroll
        for (int n = 0; n < FATTNI_PARTS_ADDED; ++n) m[half] = fmaxf(m[half], weight[n]);
#pragma unroll
        for (int n = 0; n < FATTNI_PARTS_ADDED; ++n) {
            weight[n] = weight_of(weight[n], m[half], unit);
            l[half] += weight[n] * sum[n];
        }
#pragma unroll
        for (int c = 0; c < WARP_TILES; ++c) {
            if (w->column0 + 8 * c >= w->width) continue;
#pragma unroll
            for (int n = 0; n < FATTNI_PARTS_ADDED; ++n) {
                const float2 part = n < count ? load_pair(o + n * step + 8 * c + 2 * t, global) : make_float2(0, 0);
                x[c][2 * half] += weight[n] * part.x;
                x[c][2 * half + 1] += weight[n] * part.y;
            }
        }
    }
}

/* `tiles` tiles of 8 columns of a result; statistics: m and l, too. */
DEVICE void store_result(float *to, const float (*x)[4], int tiles, const float m[2], const float l[2], int statistics,
                         const piece *w) {
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = g + 8 * half;
        if (row >= w->rows) continue;
        float *const o = to + row * w->width + w->column0;
#pragma unroll
        for (int c = 0; c < tiles; ++c)
            if (w->column0 + 8 * c < w->width)
                *(float2 *)(o + 8 * c + 2 * t) = make_float2(x[c][2 * half], x[c][2 * half + 1]);
        if (!statistics || t != 0) continue;
        to[w->rows * w->width + row] = m[half];
        to[w->rows * w->width + w->rows + row] = l[half];
    }
}

/* O and L of the tile's rows, this warp's columns. */
DEVICE void store_rows_of(const fattni_fwd_parts_args *x, const key_part *w, float o[WARP_TILES][4], const float m[2],
                          const float l[2], float unit, const piece *own) {
    const fattni_attention_args *const a = &x->a;
    const int lane = (int)threadIdx.x & 31, g = lane / 4, t = lane % 4, column0 = own->column0;
    const int width = min(a->Dv - column0, 8 * WARP_TILES);
    float L[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = w->r0 + g + 8 * half, inside = g + 8 * half < w->rows, h = w->h0 + r % x->tile_heads;
        const int64_t at = inside ? w->s.q0 + r / x->tile_heads : 0;
        const float *const lse = (const float *)a->lse.p + w->s.batch * a->lse.b + h * a->lse.h + at * a->lse.row;
        const row_result row = end_of_row(a, 1, m[half], l[half], unit, GENERAL ? 1.0f : a->scale, h, inside ? lse : 0);
        const float *const old = (const float *)a->o.p + w->s.batch * a->o.b + h * a->o.h + at * a->o.row + column0;
        L[half] = row.L;
#pragma unroll
        for (int c = 0; c < WARP_TILES; ++c)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int d = 8 * c + 2 * t + e;
                o[c][2 * half + e] *= row.scale;
                if ((a->flags & FATTN_MERGE) && inside && d < width && row.keep_old > 0)
                    o[c][2 * half + e] += row.keep_old * old[d];
            }
    }
    __syncthreads(); /* all warps have read the old L */
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int r = w->r0 + g + 8 * half, inside = g + 8 * half < w->rows, h = w->h0 + r % x->tile_heads;
        const int64_t at = inside ? w->s.q0 + r / x->tile_heads : 0;
        if (a->o_rest.p) {
            char *const to = (char *)a->o_rest.p + w->s.batch * a->o_rest.b + h * a->o_rest.h + at * a->o_rest.row;
            store_rest(to + column0, &o[0][2 * half], WARP_TILES, 1.0f, inside, width);
        }
        if (!inside) continue;
        const int64_t first = w->s.batch * a->o.b + h * a->o.h + at * a->o.row + column0;
#pragma unroll
        for (int c = 0; c < WARP_TILES; ++c)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                const int d = 8 * c + 2 * t + e;
                if (d >= width) continue;
                if (a->o_f32)
                    ((float *)a->o.p)[first + d] = o[c][2 * half + e];
                else
                    ((half_type *)a->o.p)[first + d] = to_half(o[c][2 * half + e]);
            }
        if (t == 0 && column0 == 0)
            ((float *)a->lse.p)[w->s.batch * a->lse.b + h * a->lse.h + at * a->lse.row] = L[half];
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, K_CTAS) K_NAME(const __grid_constant__ fattni_fwd_parts_args x) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const fattni_attention_args &a = x.a;
    const uint32_t shared = shared_address(memory);
    const int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32, t = lane % 4, keys0 = warp * WARP_KEYS;
    key_part w;
    if (!find_part(&x, &w)) return;
    const sequence s = w.s;
    const int first = w.begin + keys0;
    const int64_t hk = w.h0 / a.group;
    const int batch = x.page_table.p ? 0 : s.batch;
    const half_type *const k = (const half_type *)a.k.p + batch * a.k.b + hk * a.k.h + (int64_t)s.k0 * a.k.row;
    const half_type *const v = (const half_type *)a.v.p + batch * a.v.b + hk * a.v.h + (int64_t)s.k0 * a.v.row;
    const uint32_t k_tile = MEMBER_ADDRESS(shared, k) + (uint32_t)(keys0 * D * 2),
                   v_tile = MEMBER_ADDRESS(shared, v) + (uint32_t)(keys0 * D * 2);
    const uint32_t stage_bytes = BN * D * 2, k_lane = lane_8(k_tile, D), v_lane = lane_16(v_tile, D);

    /* K and V of block n, one group each, even if it is empty. */
    int page[PIECES] = {0};
    for (int n = 0; n < STAGES; ++n) {
        find_pages(page, &x, w.b, first + n * BN, w.end);
        load_keys(k_tile + n * stage_bytes, &x, &a.k, k, page, first + n * BN, w.end, a.D);
        load_keys(v_tile + n * stage_bytes, &x, &a.v, v, page, first + n * BN, w.end, a.Dv);
    }
    find_pages(page, &x, w.b, first + STAGES * BN, w.end);

    uint32_t q[D / 16][4];
    int row[2], h = w.h0;
    const half_type *rows[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int n = lane / 4 + 8 * half, r = w.r0 + n;
        row[half] = r / x.tile_heads;
        rows[half] = n < w.rows ? (const half_type *)a.q.p + s.batch * a.q.b + (h + r % x.tile_heads) * a.q.h +
                                      (int64_t)(s.q0 + row[half]) * a.q.row
                                : 0;
    }
    load_q(q, rows[0], rows[1], a.D, a.vector_qkv);

    /* From scores to units of log2: general_scores scales them, where it is called. */
    const float unit = GENERAL ? LOG2E : a.scale * LOG2E;
    float o[COLUMN_TILES][4], m[2] = {-INFINITY, -INFINITY}, l[2] = {0.0f, 0.0f};
    clear(o, COLUMN_TILES);
    for (int n = 0, j = first; j < w.end; ++n, j += BN) {
        const uint32_t stage = (uint32_t)(n % STAGES) * stage_bytes;
        cp_async_wait(2 * STAGES - 1);
        __syncwarp(); /* this warp's K of block n has arrived */

        float p[KEY_TILES][4];
        product_fragments_nt(p, KEY_TILES, D / 16, q, k_lane + stage, 0, D);
        __syncwarp(); /* and has been read */
        load_keys(k_tile + stage, &x, &a.k, k, page, j + STAGES * BN, w.end, a.D);
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
        if (__any_sync(ALL_LANES, online_softmax(p, KEY_TILES, m, l, correction, unit)))
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
                    if (!(keep[c / 8] >> (4 * (c % 8) + e) & 1)) p[c][e] = 0.0f;
        }
        uint32_t p_rows[KEY_TILES / 2][4];
        to_fragments(p_rows, p, KEY_TILES / 2);
        cp_async_wait(2 * STAGES - 1);
        __syncwarp(); /* V of block n */
        product_fragments_nn(o, COLUMN_TILES, KEY_TILES / 2, p_rows, v_lane + stage, D);
        __syncwarp();
        load_keys(v_tile + stage, &x, &a.v, v, page, j + STAGES * BN, w.end, a.Dv);
        find_pages(page, &x, w.b, j + (STAGES + 1) * BN, w.end);
    }

    l[0] = quad_sum(l[0]), l[1] = quad_sum(l[1]);
    cp_async_wait(0);
    __syncthreads(); /* all warps have read their keys */
    const piece all = {0, BM, D};
    piece own = {8 * WARP_TILES * warp, BM, D};
    float *const of_warps = (float *)memory, sum[WARP_TILES][4];
    store_result(of_warps + warp * RESULT, o, COLUMN_TILES, m, l, 1, &all);
    __syncthreads();
    add_results(sum, m, l, of_warps, WARPS, RESULT, 0, unit, &own);

    /* Level by level: result `node` of `count`; a result lies in the place of its first part. */
    const int64_t step = x.rows * (x.width + 2);
    own.rows = x.rows, own.width = x.width;
    float *const results = x.results + (int64_t)w.tile * x.parts * step;
    int *arrived = x.arrived + (int64_t)w.tile * fattni_cuda_parts_counters(x.parts);
    int place = 1;
    for (int node = w.part, count = w.parts; count > 1; place *= FATTNI_PARTS_ADDED) {
        store_result(results + (int64_t)node * place * step, sum, WARP_TILES, m, l, own.column0 == 0, &own);
        __syncthreads(); /* all of it is written */
        const int group = node / FATTNI_PARTS_ADDED,
                  members = min(FATTNI_PARTS_ADDED, count - group * FATTNI_PARTS_ADDED);
        int last = 0;
        if (threadIdx.x == 0) {
            __threadfence();
            last = atomicAdd(&arrived[group], 1) == members - 1;
            __threadfence();
        }
        if (!__syncthreads_or(last)) return;
        add_results(sum, m, l, results + (int64_t)group * FATTNI_PARTS_ADDED * place * step, members, place * step, 1,
                    unit, &own);
        __syncthreads(); /* all warps have read the maxima and sums, whose place the next ones take */
        node = group, count = (count + FATTNI_PARTS_ADDED - 1) / FATTNI_PARTS_ADDED;
        arrived += count;
    }
    store_rows_of(&x, &w, sum, m, l, unit, &own);
}

DESCRIBE_KERNEL(fattni_fwd_parts_args, SHARED_BYTES, 1);
