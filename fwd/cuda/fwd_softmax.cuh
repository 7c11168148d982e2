/* The online softmax of 16 rows in the accumulators of mma.sync, for 16-bit forward kernels: a thread has rows g and
   g + 8. Maxima are those of the scores before `unit`, which makes them exponents of 2. */
#ifndef FATTNI_FWD_CUDA_FWD_SOFTMAX_H
#define FATTNI_FWD_CUDA_FWD_SOFTMAX_H

#include "core/device/quad.cuh"
#include "core/device/score_terms_mma.cuh"

/* 2^(m - top), rounded as the exponents of P are that were taken from `top`: 1 where they are equal. */
DEVICE float weight_of(float m, float top, float unit) {
    const float base = top == -INFINITY ? 0.0f : __fmul_rn(top, unit);
    return is_far(base) ? exp2_approx(__fmul_rn(m - top, unit)) : exp2_approx(__fmul_rn(m, unit) - base);
}

/* The maximum of row g, or g + 8 (half), and `top`. */
DEVICE float maximum_of(const float (*p)[4], int tiles, int half, float top) {
#pragma unroll
    for (int n = 0; n < tiles; ++n) top = fmaxf(top, fmaxf(p[n][2 * half], p[n][2 * half + 1]));
    return quad_max(top);
}

/* Scores become P, relative to the rows' maxima so far, m; l: sums of this thread's P. Gives whether a maximum rose;
   correction: 2^(old - new maximum), for O. tops: the new maxima, or NULL if they are those of m and these scores. */
DEVICE int softmax_below(float (*p)[4], int tiles, const float *tops, float m[2], float l[2], float correction[2],
                         float unit) {
    int rose = 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const float top = tops ? tops[half] : maximum_of(p, tiles, half, m[half]);
        rose |= top != m[half];
        float base = top == -INFINITY ? 0.0f : __fmul_rn(top, unit), shift = 0.0f;
        if (is_far(base)) { /* the difference comes before the product */
            base = 0.0f, shift = top;
#pragma unroll
            for (int n = 0; n < tiles; ++n) p[n][2 * half] -= top, p[n][2 * half + 1] -= top;
        }
        /* The product is rounded as base is, so that this is 2^0 where the maximum stays. */
        correction[half] = exp2_approx(__fmul_rn(m[half] - shift, unit) - base);
        m[half] = top;
        float sum = 0.0f;
#pragma unroll
        for (int n = 0; n < tiles; ++n) {
            p[n][2 * half] = exp2_approx(p[n][2 * half] * unit - base);
            p[n][2 * half + 1] = exp2_approx(p[n][2 * half + 1] * unit - base);
            sum += p[n][2 * half] + p[n][2 * half + 1];
        }
        l[half] = l[half] * correction[half] + sum;
    }
    return rose;
}
DEVICE int online_softmax(float (*p)[4], int tiles, float m[2], float l[2], float correction[2], float unit) {
    return softmax_below(p, tiles, 0, m, l, correction, unit);
}

/* Scores become P, relative to `base` in units of log2: no maxima. */
DEVICE void fixed_softmax(float (*p)[4], int tiles, float l[2], float unit, float base) {
#pragma unroll
    for (int n = 0; n < tiles; ++n)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            p[n][e] = exp2_approx(p[n][e] * unit - base);
            l[e / 2] += p[n][e];
        }
}

/* What O is multiplied by, and L = m + ln l, of a row's maximum and sum; a row without keys gives O = 0, L = -inf.
   scale: of the scores that m is one of. `general`: with sink, dropout's scale, merge; old_lse as for general_row. */
DEVICE row_result end_of_row(const fattni_attention_args *a, int general, float m, float sum, float unit, float scale,
                             int h, const float *old_lse) {
    const int far = is_far(m * unit);
    const float top = far ? 0.0f : m * unit;
    row_result row = {sum == 0 ? 0.0f : 1.0f / sum, top * LN2 + logf(sum), 0.0f, far ? m * scale : 0.0f};
    if (!(sum > 0) && sum == sum) row.L = -INFINITY;
    if (general) row = general_row(a, row, top, sum, h, old_lse);
    row.L += row.shift;
    return row;
}

/* In the end each lane of a quad finishes one of its rows, where all of them would repeat the division and the
   logarithm: lane t that of row tile t / 2 and half t % 2. With one row tile, not two, lanes 2 and 3 repeat what 0 and
   1 do. */
DEVICE int lane_of_row(int tile, int half) { return ((int)threadIdx.x & 28) + 2 * tile + half; }
DEVICE int own_row(int row0, int row_tiles, int g, int t) {
    return row0 + 16 * (row_tiles == 2 ? t / 2 : 0) + 8 * (t % 2) + g;
}
DEVICE float of_own_row(const float (*x)[2], int row_tiles) {
    const int t = (int)threadIdx.x & 3, tile = row_tiles == 2 && t >= 2;
    const float even = tile ? x[row_tiles - 1][0] : x[0][0], odd = tile ? x[row_tiles - 1][1] : x[0][1];
    return t & 1 ? odd : even;
}

#endif
