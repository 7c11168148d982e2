/* Features of the general variant that fwd_sm90.cuh has code of its own for: ALiBi as what S starts from, the softcap
   of small scores as part of the exponent, dropout beside the exponentials. All else is in
   core/device/score_terms_mma.cuh.

   Include after BN is defined. s[BN / 2] is a thread's part of S in the layout of core/ptx/wgmma.h. */
#ifndef FATTNI_FWD_CUDA_SM90_FWD_SM90_GENERAL_H
#define FATTNI_FWD_CUDA_SM90_FWD_SM90_GENERAL_H

#include "core/device/score_terms_mma.cuh"
#include "core/device/quad.cuh"

/* A product x = q.k as a score in units of log2: unit x + base[row of the thread], or, with a softcap,
   unit x + cubic x^3 + quintic x^5. */
typedef struct logit_scale {
    float unit, base[2], cubic, quintic;
    float row_unit[2];              /* F8: in place of unit */
    float key_unit[(BN + 31) / 32]; /* INT8: of 32 keys, beside row_unit */
} logit_scale;
/* The latter divided by x. */
DEVICE float cap_factor(float x, const logit_scale *logits) {
    return fmaf(x * x, fmaf(x * x, logits->quintic, logits->cubic), logits->unit);
}

/* cap tanh(inner x) in units of log2, inner = scale / cap, as x times a polynomial of x^2, for |inner x| up to
   CAP_LIMIT: the relative error is 1.1e-7. */
#define CAP_LIMIT 0.2f
DEVICE logit_scale capped_scale(const fattni_attention_args *a, float inner) {
    const float unit = a->scale * LOG2E, square = inner * inner;
    const logit_scale logits = {
        unit * 0.9999999f, {0.0f, 0.0f}, unit * square * -0.3332859f, unit * square * square * 0.1301541f};
    return logits;
}
/* Whether all scores of this warp times `factor` are within +-limit. `largest`: the thread's largest score, if that is
   positive. The smallest is found among floats compared as unsigned integers, where negative ones are the largest, in
   the order of their size. */
DEVICE int all_within(const float s[BN / 2], float largest, float factor, float limit) {
    uint32_t x[4];
#pragma unroll
    for (int n = 0; n < 4; ++n) x[n] = __float_as_uint(s[n]);
#pragma unroll
    for (int n = 4; n < BN / 2; n += 2)
        x[n / 2 % 4] = __vimax3_u32(x[n / 2 % 4], __float_as_uint(s[n]), __float_as_uint(s[n + 1]));
    const uint32_t smallest = __vimax3_u32(__vimax3_u32(x[0], x[1], x[2]), x[3], x[3]);
    return !__any_sync(ALL_LANES, !(factor * largest <= limit && factor * __uint_as_float(smallest) >= -limit));
}

/* Whether ALiBi may be so large that floats do not resolve scores well; then it is added to S like other terms. */
DEVICE int is_steep(const fattni_attention_args *a) {
    float largest = 0.0f;
    for (int h = 0; a->alibi.p && h < a->Hq; ++h) largest = fmaxf(largest, fabsf(float_at(&a->alibi, h)));
    return largest * ((float)a->Sq + (float)a->Sk + fabsf((float)a->shift)) > 1e6f;
}

/* ALiBi of a tile, -slope |i' + off - j'|, in units of the products q.k, as what the accumulators of S start from. In a
   block that lies on one side of the diagonal in all rows of the consumer S starts from a ramp, which is 0 at the
   thread's column nearest to the diagonal; ALiBi in that column is the row's base (logit_scale). In other blocks S
   starts from the whole term. */
typedef struct alibi_ramp {
    float slope;
    int corner; /* i' + off - j' of the consumer's first row, `row`, and of key 0 */
} alibi_ramp;
DEVICE alibi_ramp ramp_of(const fattni_attention_args *a, int h, int diagonal, int row) {
    alibi_ramp x = {0.0f, 0};
    if (!a->alibi.p) return x;
    x.slope = slope_of(a, h) / a->scale;
    x.corner = diagonal + row;
    return x;
}
/* `corner`: i' + off - j' of the consumer's first row and the block's first key; of this thread's first row and column
   it is corner + offset. */
enum { LAST_COLUMN = BN - 7 }; /* of a thread, less its first: the nearest one, left of the diagonal */
DEVICE int left_of_diagonal(int corner) { return corner >= BN - 1; }
DEVICE int right_of_diagonal(int corner) { return corner <= -63; }
DEVICE void begin_scores(float s[BN / 2], float slope, int corner, int offset) {
    if (left_of_diagonal(corner)) {
#pragma unroll
        for (int n = 0; n < BN / 2; ++n) s[n] = slope * (float)(n / 4 * 8 + n % 2 - LAST_COLUMN);
    } else if (right_of_diagonal(corner)) {
#pragma unroll
        for (int n = 0; n < BN / 2; ++n) s[n] = -slope * (float)(n / 4 * 8 + n % 2);
    } else {
#pragma unroll
        for (int n = 0; n < BN / 2; ++n)
            s[n] = -slope * fabsf((float)(corner + offset) + (float)(n / 2 % 2 * 8 - n / 4 * 8 - n % 2));
    }
}
DEVICE void find_base(logit_scale *logits, float slope, int corner, int offset) {
    const int nearest = corner + offset - (left_of_diagonal(corner) ? LAST_COLUMN : 0);
    const float factor = left_of_diagonal(corner) || right_of_diagonal(corner) ? -slope * logits->unit : 0.0f;
    logits->base[0] = factor * fabsf((float)nearest);
    logits->base[1] = factor * fabsf((float)(nearest + 8));
}

/* Dropout's random numbers for a thread's part of a block. Tiles start at multiples of 16 in the whole sequence
   (fattni_sm90_fits), so one Philox block is what the thread has of 16 columns. */
typedef struct dropout {
    uint64_t seed;
    fattni_block at; /* the counter of its first 16 columns */
    keep_rule rule;
} dropout;
DEVICE dropout dropout_of(const fattni_attention_args *a, int b, int h, int row, int column) {
    const dropout_plane plane = dropout_plane_of(a, b, h);
    const dropout d = {plane.seed, dropout_counter(&plane, (int64_t)a->q_pos0 + row, (int64_t)a->k_pos0 + column),
                       keep_rule_of(a->drop_T)};
    return d;
}
/* Dropped elements of P become 0. Row sums include them: they have been added up before. */
DEVICE void drop(uint32_t p[BN / 4], dropout d) {
#pragma unroll
    for (int n = 0; n < BN / 16; ++n, d.at.w[0] += 4) {
        const fattni_block r = fattni_mask_philox(d.seed, d.at);
#pragma unroll
        for (int e = 0; e < 4; ++e) p[4 * n + e] &= keep_mask_of(r.w[e], d.rule);
    }
}

#endif
