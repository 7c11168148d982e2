/* Score terms for the F32 and F64 kernels: softcap, ALiBi, bias and dropout on a thread's elements. Uniform branches
   around loops; during a loop the elements are in a tile of shared memory, so that it need not be unrolled. Include
   after the kernel's tile header, which says what a thread has: ELEMENTS elements, element n at row element_row(n) and
   column element_column(n), kept at element_slot(tile, n). */
#ifndef FATTNI_CORE_DEVICE_SCORE_TERMS_FMA_H
#define FATTNI_CORE_DEVICE_SCORE_TERMS_FMA_H

#include "core/device/dropout.cuh"
#include "core/device/finish_row.cuh"

DEVICE void store_elements(real *tile, const real x[ELEMENTS]) {
#pragma unroll
    for (int n = 0; n < ELEMENTS; ++n) *element_slot(tile, n) = x[n];
}
DEVICE void load_elements(real x[ELEMENTS], real *tile) {
#pragma unroll
    for (int n = 0; n < ELEMENTS; ++n) x[n] = *element_slot(tile, n);
}

DEVICE int64_t bias_offset(const fattni_view *v, int b, int h, int i, int j) {
    return b * v->b + h * v->h + i * v->row + j * v->column;
}

/* Whether general_scores, and general_gradients, have anything to do. */
DEVICE int scores_change(const fattni_attention_args *a) { return a->softcap > 0 || a->alibi.p || a->bias.p; }
DEVICE int gradients_change(const fattni_attention_args *a, const fattni_view *d_bias) {
    return a->softcap > 0 || d_bias->p;
}

/* x = scale q.k to s = cap(x) - slope |i' + off - j'| + bias, for the block at (i0, j0). `dcap`, unless NULL, gets
   1 - tanh^2 of each element where there is a softcap. */
DEVICE void general_scores(real x[ELEMENTS], real *dcap, real *tile, const fattni_attention_args *a, const sequence *s,
                           int b, int h, int i0, int j0) {
    if (!scores_change(a)) return;
    const real slope = a->alibi.p ? real_at(&a->alibi, h) : (real)0, cap = ARG(a, softcap);
    store_elements(tile, x);
#pragma unroll 4
    for (int n = 0; n < ELEMENTS; ++n) {
        const int i = i0 + element_row(n), j = j0 + element_column(n);
        real y = *element_slot(tile, n);
        if (cap > 0) {
            const real t = tanh(y / cap);
            if (dcap) dcap[n] = 1 - t * t;
            y = cap * t;
        }
        if (a->alibi.p) y -= slope * fabs((real)(i - j + s->diagonal));
        if (a->bias.p && i < s->Sq && j < s->Sk)
            y += __ldg((const real *)a->bias.p + bias_offset(&a->bias, b, h, i, j));
        *element_slot(tile, n) = y;
    }
    load_elements(x, tile);
}

/* A block that needs no mask: every row below i0 + BM sees every key below j0 + BN. */
DEVICE int all_visible(const sequence *s, int i0, int j0) {
    return j0 >= i0 + BM - 1 + s->lo && j0 + BN - 1 <= i0 + s->hi && j0 + BN <= s->Sk;
}
DEVICE int visible(const sequence *s, int i, int j) { return j >= i + s->lo && j <= i + s->hi && j < s->Sk; }

/* Dropout: bit n is set where element n of the block at (i0, j0) is kept. */
DEVICE uint64_t kept(const fattni_attention_args *a, int b, int h, int i0, int j0) {
    const dropout_plane plane = dropout_plane_of(a, b, h);
    uint64_t bits = 0;
#pragma unroll 2
    for (int n = 0; n < ELEMENTS; ++n)
        bits |= (uint64_t)keep_at(a, &plane, i0 + element_row(n), j0 + element_column(n)) << n;
    return bits;
}
static_assert(ELEMENTS <= 64, "one bit per element");

/* The tile has G = P (dP - delta): dbias += G, and the tile becomes dX = G (1 - tanh^2). */
DEVICE void general_gradients(real *tile, const real *dcap, const fattni_attention_args *a, const fattni_view *d_bias,
                              const sequence *s, int b, int h, int i0, int j0) {
    if (!gradients_change(a, d_bias)) return;
#pragma unroll 1
    for (int n = 0; n < ELEMENTS; ++n) {
        const int i = i0 + element_row(n), j = j0 + element_column(n);
        const real g = *element_slot(tile, n);
        if (d_bias->p && i < s->Sq && j < s->Sk && g != 0)
            atomicAdd((real *)d_bias->p + bias_offset(d_bias, b, h, i, j), g);
        if (a->softcap > 0) *element_slot(tile, n) = g * dcap[n];
    }
}

#endif
