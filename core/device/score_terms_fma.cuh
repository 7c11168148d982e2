/* The features of scores for the F32 and F64 kernels: uniform branches around loops over a thread's
   elements, which lie in their places of a tile meanwhile. Include after the body's tiles, which say
   what a thread has: PLACES elements, element n of row place_row(n), column place_column(n), at
   place(tile, n). */
#ifndef FATTNI_CORE_DEVICE_SCORE_TERMS_FMA_H
#define FATTNI_CORE_DEVICE_SCORE_TERMS_FMA_H

#include "core/device/dropout.cuh"
#include "core/device/float_types.cuh"

DEVICE void put(real *tile, const real x[PLACES]) {
#pragma unroll
    for (int n = 0; n < PLACES; ++n) *place(tile, n) = x[n];
}
DEVICE void get(real x[PLACES], real *tile) {
#pragma unroll
    for (int n = 0; n < PLACES; ++n) x[n] = *place(tile, n);
}

DEVICE int64_t bias_place(const fattni_view *v, int b, int h, int i, int j) {
    return b * v->b + h * v->h + i * v->row + j * v->column;
}

/* Whether the next two do anything. */
DEVICE int scores_change(const fattni_cuda_args *a) {
    return a->softcap > 0 || a->alibi.p || a->bias.p;
}
DEVICE int gradients_change(const fattni_cuda_args *a) { return a->softcap > 0 || a->d_bias.p; }

/* x = scale q.k to s = cap(x) - slope |i' + off - j'| + bias, for the tile at (i0, j0).
   `steepness`, unless NULL, gets 1 - tanh^2 of each element when there is a softcap. */
DEVICE void general_scores(real x[PLACES], real *steepness, real *tile, const fattni_cuda_args *a,
                           const sequence *s, int b, int h, int i0, int j0) {
    if (!scores_change(a)) return;
    const real slope = a->alibi.p ? real_at(&a->alibi, h) : (real)0, cap = ARG(a, softcap);
    put(tile, x);
#pragma unroll 4
    for (int n = 0; n < PLACES; ++n) {
        const int i = i0 + place_row(n), j = j0 + place_column(n);
        real y = *place(tile, n);
        if (cap > 0) {
            const real t = tanh(y / cap);
            if (steepness) steepness[n] = 1 - t * t;
            y = cap * t;
        }
        if (a->alibi.p) y -= slope * fabs((real)(i - j + s->diagonal));
        if (a->bias.p && i < s->Sq && j < s->Sk)
            y += __ldg((const real *)a->bias.p + bias_place(&a->bias, b, h, i, j));
        *place(tile, n) = y;
    }
    get(x, tile);
}

/* A tile that needs no element test: every row below i0 + BM sees every key below j0 + BN. */
DEVICE int all_visible(const sequence *s, int i0, int j0) {
    return j0 >= i0 + BM - 1 + s->lo && j0 + BN - 1 <= i0 + s->hi && j0 + BN <= s->Sk;
}
DEVICE int visible(const sequence *s, int i, int j) {
    return j >= i + s->lo && j <= i + s->hi && j < s->Sk;
}

/* Bit n: element n of the tile at (i0, j0) is kept. */
DEVICE uint64_t kept(const fattni_cuda_args *a, int b, int h, int i0, int j0) {
    const dropout_plane plane = dropout_plane_of(a, b, h);
    uint64_t bits = 0;
#pragma unroll 2
    for (int n = 0; n < PLACES; ++n)
        bits |= (uint64_t)keep_at(a, &plane, i0 + place_row(n), j0 + place_column(n)) << n;
    return bits;
}
static_assert(PLACES <= 64, "one bit per element");

/* G = P (dP - delta) in the tile: dbias += G, then dX = G (1 - tanh^2). */
DEVICE void general_gradients(real *tile, const real *steepness, const fattni_cuda_args *a,
                              const sequence *s, int b, int h, int i0, int j0) {
    if (!gradients_change(a)) return;
#pragma unroll 1
    for (int n = 0; n < PLACES; ++n) {
        const int i = i0 + place_row(n), j = j0 + place_column(n);
        const real g = *place(tile, n);
        if (a->d_bias.p && i < s->Sq && j < s->Sk && g != 0)
            atomicAdd((real *)a->d_bias.p + bias_place(&a->d_bias, b, h, i, j), g);
        if (a->softcap > 0) *place(tile, n) = g * steepness[n];
    }
}

/* How a row leaves: O = scale * accumulator + keep_old * old O, and its L. */
typedef struct row_result { real scale, L, keep_old; } row_result;

/* `top`: the row's maximum; sum: its sum of exp(s - top); old_L: of the partial result to merge
   with, -inf without one, whose O is not read then. */
DEVICE row_result finish_row(const fattni_cuda_args *a, real top, real sum, int h, real old_L) {
    row_result row = {sum != 0 ? 1 / sum : (real)0, sum != 0 ? top + log(sum) : -(real)INFINITY, 0};
    if (a->sink.p) {
        const real sink = real_at(&a->sink, h), both = fmax(top, sink);
        if (sink == (real)INFINITY) {
            row.scale = 0, row.L = sink;
        } else if (both > -(real)INFINITY) {
            const real weight = exp(top - both), total = sum * weight + exp(sink - both);
            row.scale = weight / total;
            row.L = both + log(total);
        }
    }
    row.scale *= ARG(a, keep_scale);
    if (old_L == -(real)INFINITY) return row;
    const real high = old_L > row.L ? old_L : row.L, low = old_L > row.L ? row.L : old_L;
    const real joint = low == -(real)INFINITY || high == (real)INFINITY
                           ? high
                           : high + log1p(exp(low - high));
    row.keep_old = share_of(old_L, joint);
    row.scale *= share_of(row.L, joint);
    row.L = joint;
    return row;
}

#endif
