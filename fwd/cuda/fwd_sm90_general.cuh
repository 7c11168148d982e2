/* What fwd_sm90.cuh has of the general variant's features in its own stretches of code: ALiBi under S, the
   softcap of small scores in the exponent, dropout beside the exponentials. What these do not cover is in
   core/device/score_terms_mma.cuh.

   Include after BN is defined. s[BN / 2] is a thread's part of S in the layout of ptx/wgmma.h. */
#ifndef FATTNI_FWD_CUDA_FWD_SM90_GENERAL_H
#define FATTNI_FWD_CUDA_FWD_SM90_GENERAL_H

#include "core/device/score_terms_mma.cuh"
#include "core/device/quad.cuh"

#define LOG2E 1.4426950408889634f

/* Scores in units of log2: unit x + base[row of the thread], or unit x + cubic x^3 + quintic x^5. */
typedef struct measure {
    float unit, base[2], cubic, quintic;
} measure;
/* The latter over x. */
DEVICE float slope_at(float x, const measure *m) {
    return fmaf(x * x, fmaf(x * x, m->quintic, m->cubic), m->unit);
}

/* cap tanh(inner x) in units of log2, inner = scale / cap, as x times a polynomial of x^2 while |inner x| is
   at most CAP_LIMIT: the relative error is 1.1e-7. */
#define CAP_LIMIT 0.2f
DEVICE measure capped_measure(const fattni_cuda_args *a, float inner) {
    const float unit = a->scale * LOG2E, square = inner * inner;
    const measure m = {unit * 0.9999999f, {0.0f, 0.0f}, unit * square * -0.3332859f,
                       unit * square * square * 0.1301541f};
    return m;
}
/* Whether no score of this warp times `factor` is beyond +-limit; `above` is the thread's largest, if that is
   positive. As unsigned integers negative floats are the largest ones, in the order of their size. */
DEVICE int all_within(const float s[BN / 2], float above, float factor, float limit) {
    uint32_t x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = __float_as_uint(s[n]);
#pragma unroll
    for (int n = 4; n < BN / 2; n += 2)
        x[n / 2 % 4] = __vimax3_u32(x[n / 2 % 4], __float_as_uint(s[n]), __float_as_uint(s[n + 1]));
    const uint32_t below = __vimax3_u32(__vimax3_u32(x[0], x[1], x[2]), x[3], x[3]);
    return !__any_sync(ALL_LANES, !(factor * above <= limit && factor * __uint_as_float(below) >= -limit));
}

/* Whether ALiBi may be as large as floats resolve badly; then it is a term like others. */
DEVICE int is_steep(const fattni_cuda_args *a) {
    float most = 0.0f;
    for (int h = 0; a->alibi.p && h < a->Hq; ++h) most = fmaxf(most, fabsf(float_at(&a->alibi, h)));
    return most * ((float)a->Sq + (float)a->Sk + fabsf((float)a->shift)) > 1e6f;
}

/* ALiBi of a tile, -slope |i' + off - j'|, in units of the products, as what S is accumulated upon. In blocks
   that lie on one side of the diagonal in all rows of the consumer S begins with a ramp, 0 at the thread's
   column nearest to the diagonal, and what ALiBi is in that column is the rows' base. In others S begins with
   all of it. */
typedef struct ramp {
    float slope;
    int corner; /* i' + off - j' of the consumer's first row, `row`, and of key 0 */
} ramp;
DEVICE ramp ramp_of(const fattni_cuda_args *a, int h, int diagonal, int row) {
    ramp x = {0.0f, 0};
    if (!a->alibi.p) return x;
    x.slope = slope_of(a, h) / a->scale;
    x.corner = diagonal + row;
    return x;
}
/* `at`: the same of the block's first key; this thread's first row and column lie `mine` further. */
enum { NEAREST = BN - 7 }; /* left of the diagonal: the thread's last column, less its first */
DEVICE int left_of(int at) { return at >= BN - 1; }
DEVICE int right_of(int at) { return at <= -63; }
DEVICE void begin_scores(float s[BN / 2], float slope, int at, int mine) {
    if (left_of(at)) {
#pragma unroll
        for (int n = 0; n < BN / 2; ++n) s[n] = slope * (float)(n / 4 * 8 + n % 2 - NEAREST);
    } else if (right_of(at)) {
#pragma unroll
        for (int n = 0; n < BN / 2; ++n) s[n] = -slope * (float)(n / 4 * 8 + n % 2);
    } else {
#pragma unroll
        for (int n = 0; n < BN / 2; ++n)
            s[n] = -slope * fabsf((float)(at + mine) + (float)(n / 2 % 2 * 8 - n / 4 * 8 - n % 2));
    }
}
DEVICE void find_base(measure *m, float slope, int at, int mine) {
    const int nearest = at + mine - (left_of(at) ? NEAREST : 0);
    const float steepness = left_of(at) || right_of(at) ? -slope * m->unit : 0.0f;
    m->base[0] = steepness * fabsf((float)nearest);
    m->base[1] = steepness * fabsf((float)(nearest + 8));
}

/* Where a thread's part of a block begins in dropout's numbers; a tile lies at multiples of 16 in the whole
   sequence (fattni_sm90_fits), so a Philox block is what the thread has of 16 columns. */
typedef struct dropout {
    uint64_t seed;
    fattni_block at;
    uint32_t T;
} dropout;
DEVICE dropout dropout_of(const fattni_cuda_args *a, int b, int h, int row, int column) {
    const dropout_plane plane = dropout_plane_of(a, b, h);
    dropout d = {plane.seed,
                 fattni_dropout_counter(0, 0, 0, (int64_t)a->q_pos0 + row, (int64_t)a->k_pos0 + column),
                 a->drop_T};
    d.at.w[2] = plane.w2, d.at.w[3] = plane.w3;
    return d;
}
/* P of dropped elements becomes 0; the sums have it. */
DEVICE void drop(uint32_t p[BN / 4], dropout d) {
#pragma unroll
    for (int n = 0; n < BN / 16; ++n, d.at.w[0] += 4) {
        const fattni_block r = fattni_philox(d.seed, d.at);
#pragma unroll
        for (int e = 0; e < 4; ++e)
            p[4 * n + e] &= ((r.w[e] & 0xffffu) >= d.T ? 0x0000ffffu : 0) |
                            (r.w[e] >> 16 >= d.T ? 0xffff0000u : 0);
    }
}

#endif
