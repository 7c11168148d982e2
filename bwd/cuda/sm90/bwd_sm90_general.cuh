/* What GENERAL and CAPPED instances of the Hopper backward do in place of `mask`, `exponentials` and `score_gradients`:
   passes over a thread's part of S^T and dP^T, with branches around the passes, not in them.

   Only CAPPED has a softcap. There the registers of S hold tanh(x / cap) until dP has been computed: the derivative of
   the cap, dcap = 1 - tanh^2, is needed as well as P, and there are no registers for both.

   Include after what bwd_sm90_common.cuh asks for, and CAPPED. */
#ifndef FATTNI_BWD_CUDA_SM90_BWD_SM90_GENERAL_H
#define FATTNI_BWD_CUDA_SM90_BWD_SM90_GENERAL_H

#include "bwd/cuda/sm90/bwd_sm90_common.cuh"
#include "core/device/score_terms_mma.cuh"

enum { CHUNK = 2 }; /* tiles of 8 rows of P that fit in registers together with S and dP */

/* Where this thread's part of S^T begins: row i and key j of (b, h); and the head's ALiBi slope. */
typedef struct origin {
    int b, h, i, j;
    float slope;
} origin;

/* Dropout's bits: which elements are kept. */
DEVICE void keep_rows(uint32_t *keep, int columns, const fattni_attention_args *a, const origin *at) {
    const dropout_plane plane = dropout_plane_of(a, at->b, at->h);
    keep_tiles(keep, columns / 8, a, &plane, 1, at->i, at->j);
}

/* P = 0, whatever L is, where a row does not see a key. */
DEVICE void mask_outside(float (*p)[4], int tiles, const sequence *s, int i, int j) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        /* row i sees keys i + lo to i + hi: key j is seen by rows j - hi to j - lo */
        const int from = j + 8 * k < s->Sk ? j + 8 * k - s->hi - i : 1 << 30, to = j + 8 * k - s->lo - i;
#pragma unroll
        for (int n = 0; n < tiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (8 * n + e < from || 8 * n + e > to) p[n][2 * k + e] = 0.0f;
    }
}

/* Products Q K^T to P; in CAPPED to tanh, apply_dcap computes P. `edge`: some elements are masked. */
DEVICE void general_probabilities(float *raw, int columns, const float2 *lse2, const fattni_attention_args *a,
                                  const sequence *s, const origin *at, int edge) {
    float(*const x)[4] = (float(*)[4])raw;
    const int tiles = columns / 8, terms = has_terms(a);
    if (CAPPED) {
        cap(x, tiles, __fdividef(a->scale, a->softcap), 1.0f);
        return;
    }
    const float factor = a->scale;
    if (terms)
#pragma unroll
        for (int n = 0; n < tiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] *= factor;
    if (terms) add_terms(x, tiles, 1, a, s, at->slope, at->b, at->h, at->i, at->j);
    exponentials(x, tiles, terms ? LOG2E : factor * LOG2E, lse2);
    if (edge) mask_outside(x, tiles, s, at->i, at->j);
}

/* dbias += P g in tiles from row i on. */
DEVICE void add_to_dbias(const float (*p)[4], const float (*g)[4], int tiles, const fattni_bwd_args *bwd,
                         const sequence *s, const origin *at, int i) {
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        const float product[1][4] = {{p[n][0] * g[n][0], p[n][1] * g[n][1], p[n][2] * g[n][2], p[n][3] * g[n][3]}};
        add_dbias(product, 1, 1, &bwd->d_bias, bwd->dbias_scale, s, at->b, at->h, i + 8 * n, at->j);
    }
}

/* t = tanh becomes P; dbias += P g, then g *= dcap. */
DEVICE void apply_dcap(float (*t)[4], float (*g)[4], int tiles, const float2 *lse2, const fattni_bwd_args *bwd,
                       const sequence *s, const origin *at, int edge) {
    const fattni_attention_args *const a = &bwd->a;
    if (!a->alibi.p && !a->bias.p && !bwd->d_bias.p) {
#pragma unroll
        for (int n = 0; n < tiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) g[n][e] *= fmaf(-t[n][e], t[n][e], 1.0f);
        exponentials(t, tiles, a->softcap * LOG2E, lse2);
        if (edge) mask_outside(t, tiles, s, at->i, at->j);
        return;
    }
#pragma unroll
    for (int n = 0; n < tiles; n += CHUNK) {
        const int i = at->i + 8 * n;
        float p[CHUNK][4];
#pragma unroll
        for (int c = 0; c < CHUNK; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) p[c][e] = a->softcap * t[n + c][e];
        add_terms(p, CHUNK, 1, a, s, at->slope, at->b, at->h, i, at->j);
        exponentials(p, CHUNK, LOG2E, lse2 + 4 * n);
        if (edge) mask_outside(p, CHUNK, s, i, at->j);
        if (bwd->d_bias.p) add_to_dbias(p, g + n, CHUNK, bwd, s, at, i);
#pragma unroll
        for (int c = 0; c < CHUNK; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                g[n + c][e] *= fmaf(-t[n + c][e], t[n + c][e], 1.0f);
                t[n + c][e] = p[c][e];
            }
    }
}

/* P and dX = P (dP - delta) dcap, rounded, from what general_probabilities computed and dP. With dropout dP of kept
   elements is dp / (1 - p), of others 0, as is their P for dV. */
DEVICE void general_gradients(uint32_t *pr, uint32_t *ds, float *s_or_p, float *dp, int columns, const float2 *lse2,
                              const float2 *delta, const uint32_t *keep, const fattni_bwd_args *bwd, const sequence *s,
                              const origin *at, int edge) {
    const fattni_attention_args *const a = &bwd->a;
    float(*const p)[4] = (float(*)[4])s_or_p, (*const g)[4] = (float(*)[4])dp;
    const int tiles = columns / 8;
    if (a->drop_T)
#pragma unroll
        for (int n = 0; n < tiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) g[n][e] = is_kept(keep, 1, n, e) ? g[n][e] : 0.0f;
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        const float2 d = delta[4 * n];
#pragma unroll
        for (int e = 0; e < 4; ++e) g[n][e] = fmaf(g[n][e], a->keep_scale, e & 1 ? -d.y : -d.x); /* 1 without dropout */
    }
    if (CAPPED) {
        apply_dcap(p, g, tiles, lse2, bwd, s, at, edge);
    } else if (bwd->d_bias.p) {
        add_to_dbias(p, g, tiles, bwd, s, at, at->i);
    }
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int k = 0; k < 2; ++k) {
            const float low = p[n][2 * k], high = p[n][2 * k + 1];
            pr[2 * n + k] = pack(low, high);
            ds[2 * n + k] = pack(low * g[n][2 * k], high * g[n][2 * k + 1]);
        }
    if (a->drop_T)
#pragma unroll
        for (int n = 0; n < 2 * tiles; ++n) pr[n] &= keep_mask(keep, 1, n / 2, n % 2);
}

#endif
