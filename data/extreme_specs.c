/* The cases of extremes.h5: scores of 1e5 to 1e38. All their terms are integers times powers of two, whose
   products and sums, in any order, are exact in F32 wherever they affect the softmax. So every dtype and every
   algorithm has the same scores, and errors do not grow with them. Where `far` is so large that F32's steps
   exceed 1, the keys that reach the maximum of a row have equal weights, and all others none. */
#include "generator.h"

#include <math.h>

static uint32_t scatter(int64_t n, uint32_t salt) {
    uint32_t x = ((uint32_t)n ^ salt * 0x85ebca6bu) * 0x9e3779b1u;
    x = (x ^ x >> 15) * 0xc2b2ae35u;
    return x ^ x >> 13;
}
/* 1 or -1 with probability 1/4 each, else 0. */
static double digit(int64_t n, uint32_t salt) {
    const uint32_t x = scatter(n, salt) % 4;
    return x == 0 ? 1 : x == 1 ? -1 : 0;
}

/* Selects the rows of a head, by position, that have far scores. */
typedef bool rows(int64_t i);
static bool every(int64_t i) { return (void)i, true; }
static bool odd(int64_t i) { return i % 2 == 1; }
enum { PADDING = 10 };
static bool padding(int64_t i) { return i < PADDING; }

/* q.k of digits: a few quarters. In far rows multiples of grain / 4, or, in every other one of them, 0, as
   in padding. */
static void near_scores(attention_case *c, rows *far) {
    const double grain = c->spec->grain > 0 ? c->spec->grain : 1;
    double *const q = c->t[Q].data, *const k = c->t[K].data;
    const int64_t D = c->t[Q].shape[3], Sq = c->t[Q].shape[2];
    for (int64_t n = 0; n < fattn_tensor_numel(&c->t[Q]); ++n) {
        const int64_t i = n / D % Sq;
        q[n] = digit(n, 1) * (!far(i) ? 1 : i % 4 == 3 ? 0 : grain);
    }
    for (int64_t n = 0; n < fattn_tensor_numel(&c->t[K]); ++n) k[n] = digit(n, 2);
}

/* A bias of far on every key of the far rows, quarters elsewhere. */
static void mask_rows(attention_case *c, rows *far) {
    double *const bias = c->t[BIAS_IN].data;
    const int64_t Sq = c->t[BIAS_IN].shape[2], Sk = c->t[BIAS_IN].shape[3];
    near_scores(c, far);
    for (int64_t n = 0; n < fattn_tensor_numel(&c->t[BIAS_IN]); ++n)
        bias[n] = far(n / Sk % Sq) ? c->spec->far : (double)(scatter(n, 3) % 4) / 4;
}
static void odd_rows(attention_case *c) { mask_rows(c, odd); }
static void every_row(attention_case *c) { mask_rows(c, every); }

/* A bias of far on the padding. */
static void left_padding(attention_case *c) {
    double *const bias = c->t[BIAS_IN].data;
    near_scores(c, padding);
    for (int64_t j = 0; j < fattn_tensor_numel(&c->t[BIAS_IN]); ++j)
        bias[j] = padding(j) ? c->spec->far : (double)(scatter(j, 3) % 4) / 4;
}
/* A bias of far on all but the first five keys, for the second head on all but the last five; in odd rows
   on all. */
static void all_but_five_keys(attention_case *c) {
    double *const bias = c->t[BIAS_IN].data;
    const int64_t *const n = c->t[BIAS_IN].shape;
    near_scores(c, odd);
    for (int64_t at = 0; at < fattn_tensor_numel(&c->t[BIAS_IN]); ++at) {
        const int64_t j = at % n[3], i = at / n[3] % n[2], h = at / n[3] / n[2];
        const bool seen = !odd(i) && (h == 0 ? j < 5 : j >= n[3] - 5);
        bias[at] = seen ? (double)(scatter(at, 3) % 4) / 4 : c->spec->far;
    }
}

static void slopes(attention_case *c) {
    double *const slope = c->t[ALIBI].data;
    near_scores(c, every);
    for (int64_t h = 0; h < fattn_tensor_numel(&c->t[ALIBI]); ++h) slope[h] = h % 2 ? -c->spec->far : c->spec->far;
}
/* A bias that cancels the slopes' terms, except far. */
static void slopes_and_bias(attention_case *c) {
    slopes(c);
    double *const bias = c->t[BIAS_IN].data;
    const double *const slope = c->t[ALIBI].data;
    const int64_t *const n = c->t[BIAS_IN].shape;
    for (int64_t h = 0; h < n[1]; ++h)
        for (int64_t i = 0; i < n[2]; ++i)
            for (int64_t j = 0; j < n[3]; ++j)
                bias[(h * n[2] + i) * n[3] + j] = slope[h] * fabs((double)(i + n[3] - n[2] - j)) - 8 * c->spec->far;
}

/* scale q.k = far or 3/2 far, for the second head 8 times that, of either sign by rows, from column 0 alone:
   elsewhere q or k is 0. */
static void far_scores(attention_case *c) {
    double *const q = c->t[Q].data, *const k = c->t[K].data;
    const int64_t D = c->t[Q].shape[3], head = D * c->t[Q].shape[2];
    for (int64_t n = 0; n < fattn_tensor_numel(&c->t[Q]); ++n)
        q[n] = n % D == 0 ? (n < head ? 0x1p15 : 0x1p18) * (scatter(n, 1) % 2 ? 1 : -1) : n % 2 == 0 ? digit(n, 1) : 0;
    for (int64_t n = 0; n < fattn_tensor_numel(&c->t[K]); ++n)
        k[n] = n % D == 0   ? c->spec->far * 0x1p-13 * (1 + (double)(scatter(n, 2) % 2) / 2)
               : n % 2 == 1 ? digit(n, 2)
                            : 0;
}
/* As far_scores, with keys of either sign: with a cap of a thousandth of the scores tanh is 1 or -1. */
static void far_scores_capped(attention_case *c) {
    double *const k = c->t[K].data;
    const int64_t D = c->t[K].shape[3];
    far_scores(c);
    for (int64_t n = 0; n < fattn_tensor_numel(&c->t[K]); n += D)
        k[n] = c->spec->far * 0x1p-13 * (scatter(n, 2) % 2 ? 1 : -1);
}

/* Sinks as large as the scores of their row. */
static void far_sinks(attention_case *c) {
    double *const sink = c->t[SINK].data;
    mask_rows(c, every);
    for (int64_t h = 0; h < fattn_tensor_numel(&c->t[SINK]); ++h)
        sink[h] = c->spec->far + (double)h * c->spec->grain / 4;
}
/* The first takes all probability of a masked row, the second as much as one key. */
static void near_and_far_sinks(attention_case *c) {
    double *const sink = c->t[SINK].data;
    mask_rows(c, odd);
    sink[0] = 0.5, sink[1] = c->spec->far;
}

#define SCALE .scale = 0.25f
#define SIZES .Hkv = 1, .Sq = 6, .Sk = 9, .D = 8, .Dv = 4
#define SMALL SIZES, .params.scale = 0.25f
#define ONE_HEAD .Hq = 1, .Sq = 6, .Sk = 9, .D = 8, .Dv = 4, .params.scale = 0.25f
/* -2^30 is a mask of -1e9; F32 has steps of 128 there. */
const attention_spec extreme_specs[] = {
    {"rows_masked_2_17", "a bias of -2^17 on every key of odd rows", ONE_HEAD, .bias = BIAS, .d_lse = true,
     .adjust = odd_rows, .far = -0x1p17},
    {"rows_masked_2_30", "a mask of -1e9 on every key of odd rows, values that bf16 holds", SMALL, .bias = BIAS,
     .exact = FATTN_BF16, .adjust = odd_rows, .far = -0x1p30, .grain = 512},
    {"rows_masked_2_66", "where F64 has steps of 2^13", ONE_HEAD, .bias = BIAS, .adjust = odd_rows, .far = -0x1p66,
     .grain = 0x1p45},
    {"rows_raised_2_30", "a bias of 2^30 on every key of odd rows", ONE_HEAD, .bias = BIAS, .d_lse = true,
     .adjust = odd_rows, .far = 0x1p30, .grain = 512},
    {"rows_masked_causal", "a bias per row, two key heads, wider keys than values", .Hq = 4, .Hkv = 2, .Sq = 5, .Sk = 9,
     .D = 8, .Dv = 3, .bias = BIAS | OVER_H | OVER_KEYS, .d_lse = true, .adjust = odd_rows, .far = -0x1p30,
     .grain = 512, .params = {.flags = FATTN_CAUSAL, SCALE}},
    {"rows_masked_window", "few keys, of which one in four is dropped: L knows nothing of it", .Hq = 1, .Sq = 9,
     .Sk = 13, .D = 8, .Dv = 4, .bias = BIAS, .adjust = odd_rows, .far = -0x1p30, .grain = 512,
     .params =
         {.flags = FATTN_WINDOW, SCALE, .window_left = 4, .window_right = 3, .dropout_p = 0.25f, .rng = {.seed = 6}}},
    {"rows_masked_packed", "every row of three sequences", .B = 3, .Hkv = 1, .Sq = 6, .Sk = 7, .D = 8, .Dv = 4,
     .lengths = PACKED, .length_q = {6, 2, 3}, .length_k = {7, 5, 3}, .bias = BIAS | OVER_H, .d_lse = true,
     .adjust = every_row, .far = -0x1p30, .grain = 512, .params = {.flags = FATTN_CAUSAL, SCALE}},
    {"rows_masked_sink", "a sink of 1/2 takes all of a masked row: O = 0; one of -2^30 its share", SMALL,
     .bias = BIAS | OVER_H, .sink = true, .d_lse = true, .adjust = near_and_far_sinks, .far = -0x1p30, .grain = 512},
    {"keys_masked", "all but five keys, right or left, are padding, in odd rows all; more than a block", .Hkv = 1,
     .Sq = 4, .Sk = 70, .D = 8, .Dv = 2, .bias = BIAS, .adjust = all_but_five_keys, .far = -0x1p30, .grain = 512,
     .params = {SCALE}},
    {"keys_masked_causal", "the first rows see only padding, by a mask of -1e9", .Hq = 1, .Sq = 16, .D = 8, .Dv = 4,
     .bias = BIAS | OVER_ROWS, .d_lse = true, .adjust = left_padding, .far = -0x1p30, .grain = 512,
     .params = {.flags = FATTN_CAUSAL, SCALE}},
    {"alibi_2_20", "slopes of 2^20 and -2^20", SMALL, .alibi = true, .d_lse = true, .adjust = slopes, .far = 0x1p20,
     .grain = 8},
    {"alibi_taken_back", "a bias takes slopes of 2^20 and -2^20 back, but for -2^23", SMALL, .alibi = true,
     .bias = BIAS, .d_lse = true, .adjust = slopes_and_bias, .far = 0x1p20, .grain = 8},
    {"scores_2_33", "q.k of 2^30 and 3/2 of that, for the second head of 2^33; either sign, causal", SIZES,
     .d_lse = true, .adjust = far_scores, .far = 0x1p30, .params = {.flags = FATTN_CAUSAL, SCALE}},
    {"sink_2_30", "a sink as large as the scores", SMALL, .bias = BIAS | OVER_H, .sink = true, .d_lse = true,
     .adjust = far_sinks, .far = 0x1p30, .grain = 512},
    {"softcap_2_127", "a cap at the end of the range, a mask of -2^20 on odd rows", .Hq = 1, .Sq = 6, .Sk = 9, .D = 8,
     .Dv = 4, .bias = BIAS, .adjust = odd_rows, .far = -0x1p20, .params = {SCALE, .softcap = 0x1p127f}},
    {"softcap_reached", "a cap of 2^30 far below the scores: no gradient passes", SIZES, .d_lse = true,
     .adjust = far_scores_capped, .far = 0x1p40, .params = {SCALE, .softcap = 0x1p30f}},
};
const int extreme_count = (int)(sizeof extreme_specs / sizeof *extreme_specs);
