/* The attention cases of attention_small.h5, masks.h5 and dropout.h5. */
#include "generator.h"

#include "core/tensor/philox.h"

#include <math.h>

#define COUNT(specs) (int)(sizeof(specs) / sizeof *(specs))
#define EVERY_ACC (FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV | FATTN_ACC_DBIAS | FATTN_ACC_DSINK)

/* Shapes, dtypes, layouts. */
const attention_spec small_specs[] = {
    {"plain", "two batches, two heads", .B = 2, .Sq = 13, .D = 8},
    {"causal", "two batches, two heads", .B = 2, .Sq = 13, .D = 8, .params.flags = FATTN_CAUSAL},
    {"one_of_each", "one row, one key, one channel", .Hq = 1, .Sq = 1, .D = 1},
    {"one_key", "P = 1 everywhere: dQ and dK are zero", .Sq = 5, .Sk = 1, .D = 4},
    {"one_row", "a row of a decoder", .Sq = 1, .Sk = 9, .D = 4},
    {"d_1", "the smallest head", .Sq = 11, .D = 1},
    {"d_59", "a head dimension that is no multiple of 8", .Hq = 1, .Sq = 9, .Sk = 7, .D = 59},
    {"d_111", "a head dimension that is no multiple of 16", .Hq = 1, .Sq = 5, .Sk = 6, .D = 111},
    {"d_256", "the largest head", .Hq = 1, .Sq = 3, .Sk = 4, .D = 256},
    {"dv_wider", "values wider than keys", .Sq = 6, .Sk = 7, .D = 5, .Dv = 9},
    {"dv_narrower", "values narrower than keys", .Sq = 6, .Sk = 7, .D = 9, .Dv = 1},
    {"gqa_2_of_4", "two query heads share a key head", .Hq = 4, .Hkv = 2, .Sq = 7, .Sk = 6, .D = 5},
    {"mqa_4", "one key head for all", .B = 2, .Hq = 4, .Hkv = 1, .Sq = 5, .Sk = 6, .D = 4,
     .params.flags = FATTN_CAUSAL},
    {"mqa_8", "one key head for eight", .Hq = 8, .Hkv = 1, .Sq = 4, .Sk = 5, .D = 3},
    {"rows_1_keys_239", "one long row", .Hq = 1, .Sq = 1, .Sk = 239, .D = 3},
    {"rows_799_keys_3", "far more rows than keys", .Hq = 1, .Sq = 799, .Sk = 3, .D = 1},
    {"rows_3_keys_799", "far more keys than rows", .Hq = 1, .Sq = 3, .Sk = 799, .D = 1},
    {"rows_47_keys_49", "around a block of 48 rows", .Hq = 1, .Sq = 47, .Sk = 49, .D = 3},
    {"rows_49_keys_47", "around a block of 48 rows", .Hq = 1, .Sq = 49, .Sk = 47, .D = 3},
    {"rows_63_keys_65", "around a block of 64", .Hq = 1, .Sq = 63, .Sk = 65, .D = 2},
    {"rows_65_keys_63", "around a block of 64", .Hq = 1, .Sq = 65, .Sk = 63, .D = 2},
    {"rows_64_causal", "a block and its diagonal", .Hq = 1, .Sq = 64, .D = 2, .params.flags = FATTN_CAUSAL},
    {"rows_97_causal", "a prime", .Hq = 1, .Sq = 97, .D = 2, .params.flags = FATTN_CAUSAL},
    {"rows_129_causal", "a block of 128 and one", .Hq = 1, .Sq = 129, .D = 2, .params.flags = FATTN_CAUSAL},
    {"layout_bshd", "rows of one position together: o and its gradient have different strides", .B = 2, .Sq = 5,
     .Sk = 7, .D = 3, .layout = "bshd"},
    {"layout_qkv", "slices of one [B,S,3,H,D], the gradients too", .B = 2, .Sq = 6, .D = 4, .layout = "qkv",
     .params.flags = FATTN_CAUSAL},
    {"layout_pitch", "rows D+1 apart, data aligned to its element only", .B = 2, .Sq = 5, .Sk = 6, .D = 3,
     .layout = "pitch"},
    {"gradient_of_a_sum", "one row of dO for all, by stride 0", .B = 2, .Sq = 5, .Sk = 6, .D = 3, .sum_d_o = true},
    {"scale", "a scale that is not 1/sqrt(D)", .Sq = 6, .D = 4, .params.scale = 0.83f},
    {"d_lse", "a gradient that reaches L itself", .Sq = 6, .Sk = 7, .D = 4, .d_lse = true},
    {"delta_given", "delta from the caller, dL already in it", .Sq = 6, .Sk = 7, .D = 4, .d_lse = true, .delta = true},
    {"f16", "values that f16 holds", .Sq = 9, .Sk = 8, .D = 8, .exact = FATTN_F16},
    {"f16_causal_gqa", "values that f16 holds", .Hq = 4, .Hkv = 2, .Sq = 8, .D = 8, .exact = FATTN_F16,
     .params.flags = FATTN_CAUSAL},
    {"bf16", "values that bf16 holds", .Sq = 9, .Sk = 8, .D = 8, .exact = FATTN_BF16},
    {"bf16_causal_gqa", "values that bf16 holds", .Hq = 4, .Hkv = 2, .Sq = 8, .D = 8, .exact = FATTN_BF16,
     .params.flags = FATTN_CAUSAL},
    {"accumulate", "every gradient is added to what is there", .B = 2, .Sq = 5, .Sk = 6, .D = 3, .bias = BIAS | OVER_B,
     .sink = true, .params.flags = EVERY_ACC},
    {"accumulate_dk", "one gradient is added, the others are written", .Sq = 5, .Sk = 6, .D = 3,
     .params.flags = FATTN_ACC_DK},
    {"no_rows", "Sq = 0: dK and dV are zero", .B = 2, .Sq = 0, .Sk = 3, .D = 2, .empty = true},
    {"no_keys", "Sk = 0: O = 0, L = -inf", .B = 2, .Sq = 3, .Sk = 0, .D = 2, .empty = true},
    {"no_batch", "B = 0: nothing at all", .Sq = 3, .Sk = 3, .D = 2, .empty = true},
};
const int small_count = COUNT(small_specs);

static void set(attention_case *c, enum slot s, double x) {
    double *const at = c->t[s].data;
    for (int64_t n = 0; n < fattn_tensor_numel(&c->t[s]); ++n) at[n] = x;
}

/* Scores about -100: zero padding that a kernel does not mask would contribute exp(0 + 100). */
static void scores_of_minus_100(attention_case *c) {
    double *const q = c->t[Q].data, *const k = c->t[K].data;
    const double scale = sqrt((double)c->t[Q].shape[3]);
    for (int64_t n = 0; n < fattn_tensor_numel(&c->t[Q]); ++n) q[n] = (double)(float)(10 + q[n] / 16);
    for (int64_t n = 0; n < fattn_tensor_numel(&c->t[K]); ++n) k[n] = (double)(float)((-10 + k[n] / 16) / scale);
}

/* Up to +-1e4: P is 0 or 1. */
static void scores_of_10000(attention_case *c) {
    double *const q = c->t[Q].data;
    for (int64_t n = 0; n < fattn_tensor_numel(&c->t[Q]); ++n) q[n] *= 4096;
}

static void mask_some(attention_case *c) { /* every seventh, and all of the first row */
    double *const bias = c->t[BIAS_IN].data;
    const int64_t keys = c->t[BIAS_IN].shape[3];
    for (int64_t n = 0; n < fattn_tensor_numel(&c->t[BIAS_IN]); ++n)
        if (n % 7 == 3 || n < keys) bias[n] = -INFINITY;
}

static void mask_all(attention_case *c) { set(c, BIAS_IN, -INFINITY); }

static void sinks_at_infinity(attention_case *c) { /* of four heads */
    double *const sink = c->t[SINK].data;
    sink[0] = -INFINITY, sink[1] = INFINITY;
    sink[2] = (double)-1e38f, sink[3] = (double)1e38f;
}

/* The partial result of odd rows is over no keys: L = -inf, and o has arbitrary values. */
static void merge_with_empty(attention_case *c) {
    double *const lse = c->initial[LSE].data;
    for (int64_t n = 1; n < fattn_tensor_numel(&c->t[LSE]); n += 2) lse[n] = -INFINITY;
}

/* Masks, lengths, biases, sinks, merging. Small: Sk - Sq = 2; tall: Sk - Sq = -3. */
#define SMALL .Sq = 5, .Sk = 7, .D = 3
#define TALL .Sq = 7, .Sk = 4, .D = 3
const attention_spec mask_specs[] = {
    {"causal_wide", "more keys than rows", SMALL, .params.flags = FATTN_CAUSAL},
    {"causal_tall", "more rows than keys: the first see none", TALL, .params.flags = FATTN_CAUSAL},
    {"top_left_wide", "the other alignment", SMALL, .params.flags = FATTN_CAUSAL_TOP_LEFT},
    {"top_left_tall", "the other alignment", TALL, .params.flags = FATTN_CAUSAL_TOP_LEFT},
    {"window_wide", "both ends inclusive", SMALL,
     .params = {.flags = FATTN_WINDOW, .window_left = 2, .window_right = 1}},
    {"window_tall", "rows without keys", TALL, .params = {.flags = FATTN_WINDOW, .window_left = 1, .window_right = 1}},
    {"window_left", "unbounded to the right", SMALL,
     .params = {.flags = FATTN_WINDOW, .window_left = 1, .window_right = -1}},
    {"window_right", "unbounded to the left", SMALL,
     .params = {.flags = FATTN_WINDOW, .window_left = -1, .window_right = 0}},
    {"window_of_one", "the diagonal alone", SMALL, .params = {.flags = FATTN_WINDOW}},
    {"causal_window", "causal bounds the right end", SMALL,
     .params = {.flags = FATTN_CAUSAL | FATTN_WINDOW, .window_left = 2, .window_right = 5}},
    {"top_left_window", "causal and window, the other alignment", TALL,
     .params = {.flags = FATTN_CAUSAL_TOP_LEFT | FATTN_WINDOW, .window_left = 1, .window_right = -1}},
    {"window_blocks", "whole blocks outside the window", .Hq = 1, .Sq = 150, .Sk = 170, .D = 1,
     .params = {.flags = FATTN_CAUSAL | FATTN_WINDOW, .window_left = 20}},
    {"positions", "a slice of a longer sequence", SMALL,
     .params = {.flags = FATTN_CAUSAL_TOP_LEFT, .q_pos0 = 11, .k_pos0 = 9}},
    {"positions_hide_most", "keys from the future", SMALL, .params = {.flags = FATTN_CAUSAL, .k_pos0 = 5}},
    {"positions_hide_all", "fully masked: O = 0, L = -inf, no gradient", SMALL, .d_lse = true,
     .params = {.flags = FATTN_CAUSAL, .k_pos0 = 40}},
    {"softcap", "tanh near and far from its slope of 1", SMALL, .params.softcap = 0.75f},
    {"softcap_then_bias", "the cap comes before the bias; so does its derivative", SMALL, .bias = BIAS,
     .params.softcap = 0.5f},
    {"alibi", "distance from the diagonal, both sides", .Hq = 4, SMALL, .alibi = true},
    {"alibi_top_left", "distance in the other alignment, with positions", TALL, .alibi = true,
     .params = {.flags = FATTN_CAUSAL_TOP_LEFT, .q_pos0 = 3, .k_pos0 = 1}},
    {"bias", "one number per score", .B = 2, SMALL, .bias = BIAS},
    {"bias_over_b", "broadcast over the batch", .B = 2, SMALL, .bias = BIAS | OVER_B},
    {"bias_over_h", "broadcast over the heads", .B = 2, SMALL, .bias = BIAS | OVER_H},
    {"bias_over_rows", "a bias per key", .B = 2, SMALL, .bias = BIAS | OVER_ROWS},
    {"bias_over_keys", "a bias per row: moves L alone", .B = 2, SMALL, .bias = BIAS | OVER_KEYS, .d_lse = true},
    {"bias_over_all", "one number", .B = 2, SMALL, .d_lse = true,
     .bias = BIAS | OVER_B | OVER_H | OVER_ROWS | OVER_KEYS},
    {"bias_masks", "-inf hides a key, and a whole row", SMALL, .bias = BIAS, .adjust = mask_some},
    {"bias_masks_all", "fully masked without any mask", SMALL, .bias = BIAS | OVER_ROWS, .adjust = mask_all},
    {"bias_f16", "values that f16 holds", SMALL, .bias = BIAS | OVER_B, .exact = FATTN_F16},
    {"sink", "a logit that takes mass and adds no value", .B = 2, SMALL, .sink = true},
    {"sink_without_keys", "rows without keys: L is the sink, dsink is dL", TALL, .sink = true, .d_lse = true,
     .params.flags = FATTN_CAUSAL},
    {"sink_alone", "Sk = 0, but a sink", .Sq = 3, .Sk = 0, .B = 1, .D = 2, .empty = true, .sink = true, .d_lse = true},
    {"sink_extremes", "-inf, inf, -1e38, 1e38", .Hq = 4, SMALL, .sink = true, .d_lse = true,
     .adjust = sinks_at_infinity, .steep = true},
    {"padded", "lengths on both sides; rows past the end stay untouched", .B = 4, .Sq = 5, .Sk = 6, .D = 3,
     .lengths = PADDED, .length_q = {5, 4, 0, 2}, .length_k = {3, 6, 2, 0}, .params.flags = FATTN_CAUSAL},
    {"padded_rows", "lengths of the rows alone", .B = 4, .Sq = 5, .Sk = 6, .D = 3, .lengths = PADDED_Q,
     .length_q = {5, 0, 3, 1}},
    {"padded_keys", "lengths of the keys alone", .B = 4, .Sq = 5, .Sk = 6, .D = 3, .lengths = PADDED_K,
     .length_k = {6, 0, 3, 1}, .d_lse = true},
    {"packed", "three sequences, spare rows at the end", .B = 3, .Sq = 6, .Sk = 5, .D = 3, .lengths = PACKED,
     .length_q = {2, 6, 3}, .length_k = {5, 1, 4}},
    {"packed_empty", "empty sequences at the start, in the middle, at the end", .B = 7, .Sq = 4, .Sk = 4, .D = 2,
     .lengths = PACKED, .length_q = {0, 4, 0, 0, 3, 2, 0}, .length_k = {0, 3, 0, 4, 4, 0, 0},
     .params.flags = FATTN_CAUSAL},
    {"packed_blocks", "sequences that end inside of blocks", .B = 3, .Hq = 1, .Sq = 70, .Sk = 65, .D = 1,
     .lengths = PACKED, .length_q = {70, 3, 33}, .length_k = {65, 20, 47}, .params.flags = FATTN_CAUSAL},
    {"packed_bias", "a bias per sequence", .B = 3, .Hq = 4, .Hkv = 2, .Sq = 5, .Sk = 6, .D = 3, .Dv = 4,
     .lengths = PACKED, .length_q = {5, 0, 4}, .length_k = {6, 2, 3}, .bias = BIAS | OVER_H, .alibi = true,
     .sink = true, .d_lse = true, .params = {.flags = FATTN_CAUSAL, .softcap = 2}},
    {"merge", "joined with a result over other keys", SMALL, .params.flags = FATTN_MERGE},
    {"merge_empty", "L = -inf on either side, and on both", .Sq = 8, .Sk = 4, .D = 3, .adjust = merge_with_empty,
     .d_lse = true, .params.flags = FATTN_MERGE | FATTN_CAUSAL},
    {"merge_sink", "the sink counts once, here", SMALL, .sink = true, .d_lse = true, .params.flags = FATTN_MERGE},
    {"merge_bf16", "a partial result in f32 beside bf16", SMALL, .exact = FATTN_BF16, .params.flags = FATTN_MERGE},
    {"minus_100_keys_64", "scores near -100: exp(-L) overflows f32", .Hq = 1, .Sq = 1, .Sk = 64, .D = 1,
     .adjust = scores_of_minus_100},
    {"minus_100_keys_192", "scores near -100", .Hq = 1, .Sq = 1, .Sk = 192, .D = 1, .adjust = scores_of_minus_100},
    {"minus_100_keys_1000", "scores near -100", .Hq = 1, .Sq = 1, .Sk = 1000, .D = 1, .adjust = scores_of_minus_100},
    {"minus_100_keys_1216", "scores near -100", .Hq = 1, .Sq = 1, .Sk = 1216, .D = 1, .adjust = scores_of_minus_100},
    {"minus_100_keys_1280", "scores near -100", .Hq = 1, .Sq = 1, .Sk = 1280, .D = 1, .adjust = scores_of_minus_100},
    {"minus_100_rows_61", "scores near -100, ragged both ways", .Hq = 1, .Sq = 61, .Sk = 67, .D = 1,
     .adjust = scores_of_minus_100, .params.flags = FATTN_CAUSAL},
    {"scores_of_10000", "softmax becomes a choice of one key", SMALL, .d_lse = true, .adjust = scores_of_10000,
     .steep = true},
    {"everything", "all that can be asked for at once", .B = 2, .Hq = 4, .Hkv = 2, .Sq = 6, .Sk = 7, .D = 4, .Dv = 3,
     .bias = BIAS | OVER_B, .alibi = true, .sink = true, .d_lse = true, .step = true, .layout = "bshd",
     .params = {.flags = FATTN_CAUSAL | FATTN_WINDOW,
                .window_left = 4,
                .window_right = -1,
                .scale = 0.7f,
                .softcap = 1.25f,
                .dropout_p = 0.3f,
                .q_pos0 = 2,
                .k_pos0 = 3,
                .rng = {.seed = 9}}},
};
const int mask_count = COUNT(mask_specs);

/* p such that T equals the bits of an element (0, j), the smallest number that is kept. */
static void threshold_at_an_element(attention_case *c) {
    const fattn_rng rng = c->params.rng;
    uint32_t T = 0;
    for (int64_t j = 0; T == 0 || T > FATTNI_DROP_ALL / 2; ++j) {
        const fattni_block block = fattni_mask_philox(rng.seed, fattni_dropout_counter(rng.stream, 0, 0, 0, j));
        T = fattni_lane16(block, fattni_dropout_lane(0, j)) % FATTNI_DROP_ALL;
    }
    c->params.dropout_p = (float)T / FATTNI_DROP_ALL;
}

/* The mask is a pure function of seed, stream, step, batch, head and position. */
#define SEED .rng = {.seed = 0xfedcba9876543210u, .stream = 7}
const attention_spec dropout_specs[] = {
    {"plain", "one in ten", .B = 2, SMALL, .params = {.dropout_p = 0.1f, SEED}},
    {"half", "one in two", .B = 2, SMALL, .params = {.dropout_p = 0.5f, SEED}},
    {"rarest", "p = 1/32768, the smallest", SMALL, .params = {.dropout_p = 0x1p-15f, SEED}},
    {"most", "p = 32767/32768, the largest: all is dropped, O = 0, L is not", SMALL,
     .params = {.dropout_p = 32767.0f / 32768.0f, SEED}},
    {"threshold", "T equals the bits of an element of the first row: it is kept", SMALL,
     .adjust = threshold_at_an_element, .params = {SEED}},
    {"rounds_to_rarest", "p = 0.6/32768: what counts is T = lround(32768 p)", SMALL,
     .params = {.dropout_p = 0.6f / 32768.0f, SEED}},
    {"causal", "masked and dropped", .Sq = 19, .Sk = 23, .D = 2,
     .params = {.flags = FATTN_CAUSAL, .dropout_p = 0.25f, SEED}},
    {"patches", "several 16 x 16 patches of the mask, ragged", .Hq = 1, .Sq = 50, .Sk = 70, .D = 2,
     .params = {.dropout_p = 0.3f, SEED}},
    {"blocks", "more than a block of rows and of keys", .Hq = 1, .Sq = 130, .Sk = 70, .D = 1,
     .params = {.flags = FATTN_CAUSAL_TOP_LEFT, .dropout_p = 0.3f, SEED}},
    {"positions", "a slice of a longer sequence has that part of its mask", SMALL,
     .params = {.dropout_p = 0.4f, .q_pos0 = 13, .k_pos0 = 6, SEED}},
    {"far_positions", "beyond 16 and 24 bits", SMALL,
     .params = {.dropout_p = 0.4f, .q_pos0 = 20000003, .k_pos0 = 70001, SEED}},
    {"place", "a slice of a larger batch and of more heads", .B = 2, SMALL,
     .params = {.dropout_p = 0.4f, SEED, .rng_batch0 = 3, .rng_head0 = 2, .rng_heads = 8}},
    {"step", "a step counter beside the seed", SMALL, .step = true, .params = {.dropout_p = 0.25f, SEED}},
    {"stream_0", "the same seed in another call site", SMALL,
     .params = {.dropout_p = 0.25f, .rng = {.seed = 0xfedcba9876543210u}}},
    {"seed_low", "the low half of the seed alone", SMALL,
     .params = {.dropout_p = 0.25f, .rng = {.seed = 0x76543210u, .stream = 7}}},
    {"gqa", "the mask is of the query head", .B = 2, .Hq = 4, .Hkv = 2, SMALL, .params = {.dropout_p = 0.3f, SEED}},
    {"sink", "the sink is never dropped", SMALL, .sink = true, .d_lse = true, .params = {.dropout_p = 0.3f, SEED}},
    {"softcap_bias", "order: scale, cap, slope, bias, softmax, drop", SMALL, .bias = BIAS | OVER_H, .alibi = true,
     .params = {.softcap = 1, .dropout_p = 0.3f, SEED}},
    {"packed", "i and j count inside of a sequence", .B = 3, .Sq = 6, .Sk = 7, .D = 2, .lengths = PACKED,
     .length_q = {6, 3, 1}, .length_k = {4, 7, 3}, .params = {.dropout_p = 0.5f, SEED}},
    {"padded", "rows past the end draw nothing", .B = 3, .Sq = 5, .Sk = 6, .D = 2, .lengths = PADDED,
     .length_q = {5, 2, 0}, .length_k = {6, 3, 1}, .params = {.dropout_p = 0.5f, SEED}},
    {"window", "dropped inside of a window", .Sq = 20, .Sk = 20, .D = 2,
     .params = {.flags = FATTN_WINDOW, .window_left = 3, .window_right = 2, .dropout_p = 0.3f, SEED}},
    {"merge", "dropped, then joined", SMALL, .d_lse = true, .params = {.flags = FATTN_MERGE, .dropout_p = 0.3f, SEED}},
    {"layout_qkv", "slices of one buffer", .B = 2, .Sq = 6, .D = 4, .layout = "qkv",
     .params = {.flags = FATTN_CAUSAL, .dropout_p = 0.2f, SEED}},
    {"f16", "values that f16 holds", .Sq = 9, .Sk = 8, .D = 8, .exact = FATTN_F16, .params = {.dropout_p = 0.2f, SEED}},
    {"bf16_causal_gqa", "values that bf16 holds", .Hq = 4, .Hkv = 2, .Sq = 17, .D = 4, .exact = FATTN_BF16,
     .params = {.flags = FATTN_CAUSAL, .dropout_p = 0.2f, SEED}},
    {"padded_everything", "all that can be asked for at once, padded", .B = 3, .Hq = 4, .Hkv = 2, .Sq = 5, .Sk = 6,
     .D = 3, .Dv = 2, .bias = BIAS | OVER_B, .alibi = true, .sink = true, .d_lse = true, .lengths = PADDED,
     .length_q = {5, 4, 0}, .length_k = {3, 6, 2},
     .params = {.flags = FATTN_CAUSAL | FATTN_WINDOW, .window_left = 3, .softcap = 2, .dropout_p = 0.2f, SEED}},
};
const int dropout_count = COUNT(dropout_specs);
