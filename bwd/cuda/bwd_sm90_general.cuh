/* The steps of the GENERAL Hopper backward that replace `mask`, `exponentials` and
   `score_gradients`, as passes over a thread's part of S^T and dP^T: branches stand around passes,
   not in them.

   In the CAPPED variant, which alone knows a softcap, the registers of S hold tanh(x / cap) until
   dP is there: its derivative is needed beside P, and there is no room for both. */
#ifndef FATTNI_BWD_CUDA_BWD_SM90_GENERAL_H
#define FATTNI_BWD_CUDA_BWD_SM90_GENERAL_H

#include "bwd/cuda/bwd_sm90_common.cuh"
#include "core/device/score_terms_mma.cuh"

enum { CHUNK = 2 }; /* tiles of 8 rows i for which there are registers beside S and dP */

/* Which part of S^T a thread has: from row i and key j of (b, h) on. */
typedef struct corner {
    int b, h, i, j;
    float slope;
} corner;

DEVICE void keep_rows(uint32_t *keep, int columns, const fattni_cuda_args *a, const corner *at) {
    const dropout_plane plane = dropout_plane_of(a, at->b, at->h);
    keep_tiles(keep, columns / 8, a, &plane, 1, at->i, at->j);
}

/* Where a row does not see a key, P is 0, whatever L is. */
DEVICE void mask_outside(float (*p)[4], int tiles, const sequence *s, int i, int j) {
#pragma unroll
    for (int k = 0; k < 2; ++k) {
        /* row i sees keys i + lo to i + hi: key j is seen by rows j - hi to j - lo */
        const int from = j + 8 * k < s->Sk ? j + 8 * k - s->hi - i : 1 << 30,
                  to = j + 8 * k - s->lo - i;
#pragma unroll
        for (int n = 0; n < tiles; ++n)
#pragma unroll
            for (int e = 0; e < 2; ++e)
                if (8 * n + e < from || 8 * n + e > to) p[n][2 * k + e] = 0.0f;
    }
}

/* Raw products to P; with a softcap to tanh, and P comes later. `edge`: some are masked. */
DEVICE void general_probabilities(float *raw, int columns, const float2 *lse2,
                                  const fattni_cuda_args *a, const sequence *s, const corner *at,
                                  int edge) {
    float(*const x)[4] = (float(*)[4])raw;
    const int tiles = columns / 8, terms = has_terms(a);
    const float factor = CAPPED ? a->scale / a->softcap : a->scale;
    if (terms)
#pragma unroll
        for (int n = 0; n < tiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] *= factor;
    if (CAPPED) {
#pragma unroll
        for (int n = 0; n < tiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e) x[n][e] = tanh_of(x[n][e]);
        return;
    }
    if (terms) add_terms(x, tiles, 1, a, s, at->slope, at->b, at->h, at->i, at->j);
    exponentials(x, tiles, terms ? LOG2E : factor * LOG2E, lse2);
    if (edge) mask_outside(x, tiles, s, at->i, at->j);
}

/* dbias += P g for some tiles from row i on. */
DEVICE void give_to_bias(const float (*p)[4], const float (*g)[4], int tiles,
                         const fattni_cuda_args *a, const sequence *s, const corner *at, int i) {
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        const float product[1][4] = {
            {p[n][0] * g[n][0], p[n][1] * g[n][1], p[n][2] * g[n][2], p[n][3] * g[n][3]}};
        add_dbias(product, 1, 1, a, s, at->b, at->h, i + 8 * n, at->j);
    }
}

/* t = tanh becomes P, and g is multiplied by the derivative of the cap, after dbias has had its
   part. */
DEVICE void leave_cap(float (*t)[4], float (*g)[4], int tiles, const float2 *lse2,
                        const fattni_cuda_args *a, const sequence *s, const corner *at, int edge) {
    if (!a->alibi.p && !a->bias.p && !a->d_bias.p) {
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
        if (a->d_bias.p) give_to_bias(p, g + n, CHUNK, a, s, at, i);
#pragma unroll
        for (int c = 0; c < CHUNK; ++c)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                g[n + c][e] *= fmaf(-t[n + c][e], t[n + c][e], 1.0f);
                t[n + c][e] = p[c][e];
            }
    }
}

/* What general_probabilities left, and dP: P and dX = P (dP - delta), rounded. dP of kept elements
   is dp / (1 - p), of others 0, as is their P for dV. */
DEVICE void general_gradients(uint32_t *pr, uint32_t *ds, float *left, float *dp, int columns,
                              const float2 *lse2, const float2 *delta, const uint32_t *keep,
                              const fattni_cuda_args *a, const sequence *s, const corner *at,
                              int edge) {
    float(*const p)[4] = (float(*)[4])left, (*const g)[4] = (float(*)[4])dp;
    const int tiles = columns / 8;
    if (a->drop_T)
#pragma unroll
        for (int n = 0; n < tiles; ++n)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                g[n][e] = keep[n / 8] >> (4 * (n % 8) + e) & 1 ? g[n][e] * a->keep_scale : 0.0f;
#pragma unroll
    for (int n = 0; n < tiles; ++n) {
        const float2 d = delta[4 * n];
#pragma unroll
        for (int e = 0; e < 4; ++e) g[n][e] -= e & 1 ? d.y : d.x;
    }
    if (CAPPED) {
        leave_cap(p, g, tiles, lse2, a, s, at, edge);
    } else if (a->d_bias.p) {
        give_to_bias(p, g, tiles, a, s, at, at->i);
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
        for (int n = 0; n < 2 * tiles; ++n) {
            const uint32_t bits = keep[n / 16] >> 2 * (n % 16);
            pr[n] &= (bits & 1) * 0xffffu | (bits >> 1 & 1) * 0xffff0000u;
        }
}

#endif
