/* What kernels of few rows over parts of keys have in common (fwd_decode.cuh, fwd_decode_rows.cuh): the rows of a tile,
   the keys that they see, results of parts, the end of a row.

   A part has m, l and O of its keys for every row. Parts are added up in the same order, wherever it is done: in
   registers, in shared memory or, from memory, by a second launch of the kernel. Include where D and BM are known. */
#ifndef FATTNI_FWD_CUDA_SM90_FWD_DECODE_PARTS_H
#define FATTNI_FWD_CUDA_SM90_FWD_DECODE_PARTS_H

#include "core/device/half_types.cuh"
#include "core/device/sequence.cuh"
#include "core/ptx/grid.h"
#include "fwd/cuda/fwd_decode.h"
#include "fwd/cuda/fwd_softmax.cuh"

/* The work of a CTA. */
typedef struct key_part {
    int b, hk, h0, r0, rows;  /* rows [r0, r0 + rows) of heads h0 .. h0 + tile_heads - 1, which share key head hk */
    int begin, end, keys;     /* of the tile; of a part */
    int first_seen, end_seen; /* all rows see [first_seen, end_seen) */
    int tile, cta;            /* of all tiles of the call; of the tile's CTAs */
    int part, first;          /* the first part of this CTA, and of its cluster */
    sequence s;
} key_part;

/* Tile n of the call: its rows, and the keys that they see, from a multiple of ALIGNED on. Gives how many rows the
   sequence has in all of its tiles for these heads, or 0 where this tile has none. */
DEVICE int find_tile(const fattni_fwd_parts_args *x, int n, key_part *w) {
    const fattni_attention_args *const a = &x->a;
    w->tile = n;
    const int tile = fattni_divide(&n, &x->tiles);
    w->hk = fattni_divide(&n, &x->heads), w->h0 = w->hk * (int)x->tile_heads.by, w->b = n;
    if (a->seqlens_q.p || a->seqlens_k.p || a->cu_seqlens_q.p) grid_dependency_wait();
    w->s = sequence_of(a, w->b);
    const int rows = w->s.Sq * (int)x->tile_heads.by;
    w->r0 = tile * BM, w->rows = min(BM, rows - w->r0);
    if (w->rows <= 0) return 0;
    const int first = fattni_divided(w->r0, &x->tile_heads), last = fattni_divided(w->r0 + w->rows - 1, &x->tile_heads);
    w->begin = max(0, min(first + w->s.lo, w->s.Sk)) & ~(ALIGNED - 1);
    w->end = max(w->begin, min(last + 1 + w->s.hi, w->s.Sk));
    w->first_seen = last + w->s.lo, w->end_seen = min(w->end, first + 1 + w->s.hi);
    return rows;
}

/* Row r of the tile: its place in a tensor, in elements. */
DEVICE int64_t place_of(const fattni_fwd_parts_args *x, const key_part *w, const fattni_view *t, int r) {
    int row = w->r0 + r;
    const int h = w->h0 + fattni_divide(&row, &x->tile_heads);
    return w->s.batch * t->b + h * t->h + (int64_t)(w->s.q0 + row) * t->row;
}

/* The page of keys from j on; 0 without pages. */
DEVICE int page_of(const fattni_fwd_parts_args *x, int b, int j) {
    if (!x->page_table.p) return 0;
    const int page = ((const int32_t *)x->page_table.p + b * x->page_table.b)[(j >> x->page_log2) * x->page_table.h];
    return (unsigned)page >= (unsigned)x->pages ? 0 : page;
}

/* Parts of a tile's keys. */
DEVICE int parts_of(const key_part *w) {
    const int seen = w->end - w->begin;
    return seen > w->keys ? (seen + w->keys - 1) / w->keys : 1;
}
/* Four columns of a row of results, and its statistics. */
typedef struct row_sum {
    float4 o;
    float m, l;
} row_sum;
/* weight_of, and without branches. */
DEVICE float weight_at(float m, float top, float unit) {
    const float base = top == -INFINITY ? 0.0f : __fmul_rn(top, unit);
    return exp2_approx(is_far(base) ? __fmul_rn(m - top, unit) : __fmul_rn(m, unit) - base);
}
/* m and l of a row become those with the part after it, of y_m and y_l; what O of both is multiplied by. */
DEVICE void add_statistics(float *m, float *l, float y_m, float y_l, float *old, float *own, float unit) {
    const float top = fmaxf(*m, y_m), weight = weight_at(fminf(*m, y_m), top, unit);
    *old = *m < top ? weight : 1.0f, *own = y_m < top ? weight : 1.0f;
    *m = top, *l = fmaf(*own, y_l, *l * *old);
}
/* O of both: so rounded wherever parts are added up. */
DEVICE float joined(float x, float old, float y, float own) { return fmaf(own, y, x * old); }
DEVICE void add_weighted(float4 *x, float4 y, float2 by) {
    x->x = joined(x->x, by.x, y.x, by.y), x->y = joined(x->y, by.x, y.y, by.y);
    x->z = joined(x->z, by.x, y.z, by.y), x->w = joined(x->w, by.x, y.w, by.y);
}
/* Adds the part after x to it. */
DEVICE void add_part(row_sum *x, const row_sum *y, float unit) {
    float2 by;
    add_statistics(&x->m, &x->l, y->m, y->l, &by.x, &by.y, unit);
    add_weighted(&x->o, y->o, by);
}
/* Adds parts `from`..count - 1 to x, one after the other; part 0 is all that there is so far. Those from `half` on are
   a sum of their own, which is added at the end. m, l: of the row; o: of the part 0. Eight are loaded at a time. */
enum { ONE_SUM = 1 << 30 }; /* as `half` */
DEVICE void add_parts(row_sum *x, const float *m, const float *l, const float *o, int from, int half, int count,
                      float unit) {
    row_sum first_half;
#pragma unroll 1
    for (int first = 0; first < count; first += 8) {
        row_sum y[8];
#pragma unroll
        for (int n = 0; n < 8; n += 4) {
            if (first + n >= count) break;
            const float4 m4 = *(const float4 *)(m + first + n), l4 = *(const float4 *)(l + first + n);
            y[n].m = m4.x, y[n + 1].m = m4.y, y[n + 2].m = m4.z, y[n + 3].m = m4.w;
            y[n].l = l4.x, y[n + 1].l = l4.y, y[n + 2].l = l4.z, y[n + 3].l = l4.w;
        }
#pragma unroll
        for (int n = 0; n < 8; ++n)
            if (first + n < count) y[n].o = *(const float4 *)(o + (first + n) * D);
#pragma unroll
        for (int n = 0; n < 8; ++n) {
            if (first + n >= count) break;
            if (first + n == half) first_half = *x;
            if (first + n < from || first + n == half)
                *x = y[n];
            else
                add_part(x, &y[n], unit);
        }
    }
    if (half >= count) return;
    add_part(&first_half, x, unit);
    *x = first_half;
}

/* What O of row r is multiplied by, and L. */
DEVICE row_result end_of(const fattni_fwd_parts_args *x, const key_part *w, const row_sum *sum, int r, float unit) {
    const fattni_attention_args *const a = &x->a;
    int h = w->r0 + r;
    h = w->h0 + fattni_divide(&h, &x->tile_heads);
    const float *const lse = (const float *)a->lse.p + place_of(x, w, &a->lse, r);
    return end_of_row(a, a->sink.p || a->flags & FATTN_MERGE, sum->m, sum->l, unit, a->scale, h, lse);
}

/* L of row r, and columns d .. d + 3 of its O. */
DEVICE void store_end(const fattni_fwd_parts_args *x, const key_part *w, const row_sum *sum, const row_result *end,
                      int r, int d) {
    const fattni_attention_args *const a = &x->a;
    if (d == 0) ((float *)a->lse.p)[place_of(x, w, &a->lse, r)] = end->L;
    float o[4] = {sum->o.x * end->scale, sum->o.y * end->scale, sum->o.z * end->scale, sum->o.w * end->scale};
    const int64_t at = place_of(x, w, &a->o, r) + d;
    if (a->o_f32) {
        float *const to = (float *)a->o.p + at;
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            if (a->flags & FATTN_MERGE && end->keep_old > 0) o[e] += end->keep_old * to[e];
            to[e] = o[e];
        }
        return;
    }
    *(uint2 *)((half_type *)a->o.p + at) = make_uint2(pack(o[0], o[1]), pack(o[2], o[3]));
    if (!a->o_rest.p) return;
    const uint32_t rest = rest_pair(o[0], o[1], rest_pair(o[2], o[3], 0));
    *(uint32_t *)((int8_t *)a->o_rest.p + place_of(x, w, &a->o_rest, r) + d) = rest;
}

/* Columns `four`, of all rows, in results of which there are `of`. */
#define RESULT_OF(four, of) ((four) / D * (of)*D + (four) % D)

/* Columns `four` of the tile are ready in `sum`. All threads of a warp call this, and above head_dim 128 of a CTA. */
DEVICE void finish(const fattni_fwd_parts_args *x, const key_part *w, const row_sum *sum, int four, float unit) {
    row_result end;
    if (four < w->rows * D) end = end_of(x, w, sum, four / D, unit);
    if (D > 128) /* all threads of a row have read the old L */
        __syncthreads();
    else
        __syncwarp();
    if (four < w->rows * D) store_end(x, w, sum, &end, four / D, four % D);
}

/* Where results that go through memory lie: maxima, sums and O, [row][groups]. */
DEVICE float *results_of(const fattni_fwd_parts_args *x, const key_part *w, int groups) {
    return x->results + (int64_t)w->tile * (x->rows * groups * (D + 2));
}

DEVICE void store_to_memory(const fattni_fwd_parts_args *x, const key_part *w, const row_sum *sum, int r, int d, int n,
                            int groups) {
    float *const results = results_of(x, w, groups), *const m = results + r * groups + n;
    const int all_m = x->rows * groups;
    if (d == 0) m[0] = sum->m, m[all_m] = sum->l;
    *(float4 *)(results + 2 * all_m + (r * groups + n) * D + d) = sum->o;
}

/* Columns `four` of the tile from the `count` results that lie in memory, those from `half` on apart (add_parts): what
   the second launch of a call does. */
DEVICE void add_results(const fattni_fwd_parts_args *x, const key_part *w, int half, int count, int groups, int four) {
    const int r = four / D, all_m = x->rows * groups;
    const float *const results = results_of(x, w, groups);
    const float unit = x->a.scale * LOG2E;
    row_sum sum;
    if (four < w->rows * D)
        add_parts(&sum, results + r * groups, results + all_m + r * groups,
                  results + 2 * all_m + RESULT_OF(four, groups), 1, half, count, unit);
    finish(x, w, &sum, four, unit);
}

#endif
