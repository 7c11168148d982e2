#include "cases.h"

const attention_shape attention_shapes[] = {
    {1, 1},     {1, 2},     {2, 1},     {3, 5},   {7, 7},     {8, 9},     {15, 16},   {16, 17},
    {17, 15},   {31, 33},   {32, 32},   {33, 31}, {47, 48},   {48, 48},   {49, 47},   {61, 97},
    {63, 65},   {64, 64},   {65, 63},   {97, 61}, {127, 128}, {128, 129}, {129, 127}, {101, 211},
    {211, 101}, {255, 257}, {257, 255}, {799, 3}, {3, 799},   {1, 239},   {239, 1},
};
const int attention_shape_count = (int)(sizeof attention_shapes / sizeof *attention_shapes);

#define SMALL .B = 2, .Hq = 2, .Sq = 5, .Sk = 7, .D = 3 /* off = 2 */
#define TALL .B = 2, .Hq = 2, .Sq = 7, .Sk = 4, .D = 3  /* off = -3: causal rows without keys */
#define EVERY_ACC (FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV | FATTN_ACC_DBIAS | FATTN_ACC_DSINK)

const attention_case attention_features[] = {
    {"plain", SMALL},
    {"one key", .B = 2, .Hq = 2, .Sq = 4, .Sk = 1, .D = 3},
    {"one row", .B = 2, .Hq = 2, .Sq = 1, .Sk = 6, .D = 3},
    {"one of each", .B = 1, .Hq = 1, .Sq = 1, .Sk = 1, .D = 1},
    {"D = 1", .B = 2, .Hq = 2, .Sq = 5, .Sk = 7, .D = 1},
    {"D > Dv", SMALL, .Dv = 2},
    {"D < Dv", SMALL, .Dv = 5},
    {"GQA 4", .B = 2, .Hq = 4, .Hkv = 1, .Sq = 4, .Sk = 5, .D = 3},
    {"GQA 2 of 4", .B = 1, .Hq = 4, .Hkv = 2, .Sq = 4, .Sk = 5, .D = 3},
    {"GQA 8", .B = 1, .Hq = 8, .Hkv = 1, .Sq = 3, .Sk = 4, .D = 2},
    {"scale", SMALL, .scale = 0.83f},
    {"causal", SMALL, .flags = FATTN_CAUSAL},
    {"causal, tall", TALL, .flags = FATTN_CAUSAL},
    {"causal top left", SMALL, .flags = FATTN_CAUSAL_TOP_LEFT},
    {"causal top left, tall", TALL, .flags = FATTN_CAUSAL_TOP_LEFT},
    {"window", SMALL, .flags = FATTN_WINDOW, .window_left = 2, .window_right = 1},
    {"window, tall", TALL, .flags = FATTN_WINDOW, .window_left = 1, .window_right = 1},
    {"window left only", SMALL, .flags = FATTN_WINDOW, .window_left = 1, .window_right = -1},
    {"window right only", SMALL, .flags = FATTN_WINDOW, .window_left = -1, .window_right = 0},
    {"window of one key", SMALL, .flags = FATTN_WINDOW},
    {"causal window", SMALL, .flags = FATTN_CAUSAL | FATTN_WINDOW, .window_left = 2, .window_right = 5},
    {"causal window top left", TALL, .flags = FATTN_CAUSAL_TOP_LEFT | FATTN_WINDOW, .window_left = 1,
     .window_right = -1},
    {"positions", SMALL, .flags = FATTN_CAUSAL_TOP_LEFT, .q_pos0 = 11, .k_pos0 = 9},
    {"positions hide all keys", SMALL, .flags = FATTN_CAUSAL, .k_pos0 = 40},
    {"positions hide most keys", SMALL, .flags = FATTN_CAUSAL, .k_pos0 = 5},
    {"softcap", SMALL, .softcap = 0.75f},
    {"softcap, only dK", SMALL, .softcap = 0.75f, .omit = NO_DQ | NO_DV},
    {"softcap, causal", TALL, .softcap = 1.5f, .flags = FATTN_CAUSAL},
    {"ALiBi", SMALL, .alibi = true},
    {"ALiBi, tall, positions", TALL, .alibi = true, .q_pos0 = 3, .k_pos0 = 1},
    {"ALiBi, top left", SMALL, .alibi = true, .flags = FATTN_CAUSAL_TOP_LEFT},
    {"bias", SMALL, .bias = BIAS},
    {"bias over B", SMALL, .bias = BIAS | BIAS_OVER_B},
    {"bias over H", SMALL, .bias = BIAS | BIAS_OVER_H},
    {"bias over rows", SMALL, .bias = BIAS | BIAS_OVER_I},
    {"bias over keys", SMALL, .bias = BIAS | BIAS_OVER_J},
    {"bias over B, H", SMALL, .bias = BIAS | BIAS_OVER_B | BIAS_OVER_H},
    {"bias over all", SMALL, .bias = BIAS | BIAS_OVER_B | BIAS_OVER_H | BIAS_OVER_I | BIAS_OVER_J},
    {"bias masks", SMALL, .bias = BIAS | BIAS_MASKS},
    {"bias masks whole rows", .B = 2, .Hq = 2, .Sq = 14, .Sk = 1, .D = 2, .bias = BIAS | BIAS_MASKS},
    {"bias after softcap", SMALL, .bias = BIAS, .softcap = 0.5f},
    {"sink", SMALL, .sink = true},
    {"sink, rows without keys", TALL, .sink = true, .flags = FATTN_CAUSAL, .d_lse = true},
    {"dropout", SMALL, .dropout_p = 0.4f},
    {"dropout of one in a hundred", SMALL, .dropout_p = 0.01f},
    {"dropout of nearly all", SMALL, .dropout_p = 0.97f},
    {"dropout, positions", SMALL, .dropout_p = 0.4f, .q_pos0 = 13, .k_pos0 = 6},
    {"dropout, rng_step", SMALL, .dropout_p = 0.25f, .rng_step = true},
    {"dropout, GQA, sink", .B = 2, .Hq = 4, .Hkv = 2, .Sq = 5, .Sk = 7, .D = 3, .dropout_p = 0.3f, .sink = true},
    {"dL", SMALL, .d_lse = true},
    {"given delta", SMALL, .delta = true},
    {"given delta with dL", SMALL, .delta = true, .d_lse = true, .sink = true},
    {"sum", SMALL, .sum_d_o = true},
    {"merge", SMALL, .flags = FATTN_MERGE},
    {"merge, causal, tall", TALL, .flags = FATTN_MERGE | FATTN_CAUSAL, .d_lse = true},
    {"merge, sink", SMALL, .flags = FATTN_MERGE, .sink = true, .d_lse = true},
    {"accumulate", SMALL, .flags = EVERY_ACC, .bias = BIAS | BIAS_OVER_B, .sink = true},
    {"accumulate dQ only", SMALL, .flags = FATTN_ACC_DQ},
    {"accumulate dK only", SMALL, .flags = FATTN_ACC_DK},
    {"accumulate dV only", SMALL, .flags = FATTN_ACC_DV},
    {"only dQ", SMALL, .omit = NO_DK | NO_DV},
    {"only dK", SMALL, .omit = NO_DQ | NO_DV},
    {"only dV", SMALL, .omit = NO_DQ | NO_DK},
    {"only dbias", SMALL, .bias = BIAS, .omit = NO_DQ | NO_DK | NO_DV},
    {"only dsink", SMALL, .sink = true, .omit = NO_DQ | NO_DK | NO_DV},
    {"padded rows", .B = 4, .Hq = 2, .Sq = 5, .Sk = 6, .D = 3, .lengths = LENGTHS_PADDED_Q, .length_q = {5, 0, 3, 1}},
    {"padded keys", .B = 4, .Hq = 2, .Sq = 5, .Sk = 6, .D = 3, .lengths = LENGTHS_PADDED_K, .length_k = {6, 0, 3, 1}},
    {"padded, causal", .B = 4, .Hq = 2, .Sq = 5, .Sk = 6, .D = 3, .flags = FATTN_CAUSAL, .lengths = LENGTHS_PADDED,
     .length_q = {5, 4, 0, 2}, .length_k = {3, 6, 2, 0}},
    {"padded, all features", .B = 3, .Hq = 4, .Hkv = 2, .Sq = 5, .Sk = 6, .D = 3, .Dv = 2,
     .flags = FATTN_CAUSAL | FATTN_WINDOW, .window_left = 3, .softcap = 2, .dropout_p = 0.2f, .alibi = true,
     .sink = true, .d_lse = true, .bias = BIAS | BIAS_OVER_B, .lengths = LENGTHS_PADDED, .length_q = {5, 4, 0},
     .length_k = {3, 6, 2}},
    {"packed", .B = 3, .Hq = 2, .Sq = 6, .Sk = 5, .D = 3, .lengths = LENGTHS_PACKED, .length_q = {2, 6, 3},
     .length_k = {5, 1, 4}},
    {"packed, empty ones", .B = 7, .Hq = 2, .Sq = 4, .Sk = 4, .D = 2, .flags = FATTN_CAUSAL, .lengths = LENGTHS_PACKED,
     .length_q = {0, 4, 0, 0, 3, 2, 0}, .length_k = {0, 3, 0, 4, 4, 0, 0}},
    {"packed, all empty", .B = 2, .Hq = 2, .Sq = 3, .Sk = 3, .D = 2, .lengths = LENGTHS_PACKED},
    {"packed, all features", .B = 3, .Hq = 4, .Hkv = 2, .Sq = 5, .Sk = 6, .D = 3, .Dv = 4, .flags = FATTN_CAUSAL,
     .softcap = 2, .dropout_p = 0.2f, .rng_step = true, .alibi = true, .sink = true, .d_lse = true,
     .bias = BIAS | BIAS_OVER_H | BIAS_MASKS, .lengths = LENGTHS_PACKED, .length_q = {5, 0, 4}, .length_k = {6, 2, 3}},
    {"packed, dropout, window", .B = 3, .Hq = 2, .Sq = 6, .Sk = 7, .D = 2, .dropout_p = 0.5f, .flags = FATTN_WINDOW,
     .window_left = 2, .window_right = 2, .lengths = LENGTHS_PACKED, .length_q = {6, 3, 1}, .length_k = {4, 7, 3}},
    {"no rows", .B = 2, .Hq = 2, .Sq = 0, .Sk = 3, .D = 2},
    {"no keys", .B = 2, .Hq = 2, .Sq = 3, .Sk = 0, .D = 2},
    {"no keys but a sink", .B = 2, .Hq = 2, .Sq = 3, .Sk = 0, .D = 2, .sink = true, .d_lse = true},
    {"no keys, bias over keys", .B = 2, .Hq = 2, .Sq = 3, .Sk = 0, .D = 2, .bias = BIAS | BIAS_OVER_J},
    {"no rows, no keys", .B = 2, .Hq = 2, .Sq = 0, .Sk = 0, .D = 2},
    {"no batch", .B = 0, .Hq = 2, .Sq = 3, .Sk = 3, .D = 2, .sink = true},
    {"no batch, bias over B", .B = 0, .Hq = 2, .Sq = 3, .Sk = 3, .D = 2, .bias = BIAS | BIAS_OVER_B},
    {"no batch, packed", .B = 0, .Hq = 2, .Sq = 3, .Sk = 3, .D = 2, .lengths = LENGTHS_PACKED},
    {"all features",
     .B = 2,
     .Hq = 4,
     .Hkv = 2,
     .Sq = 6,
     .Sk = 7,
     .D = 4,
     .Dv = 3,
     .flags = FATTN_CAUSAL | FATTN_WINDOW,
     .window_left = 4,
     .window_right = -1,
     .scale = 0.7f,
     .softcap = 1.25f,
     .dropout_p = 0.3f,
     .rng_step = true,
     .alibi = true,
     .sink = true,
     .d_lse = true,
     .bias = BIAS | BIAS_OVER_B,
     .q_pos0 = 2,
     .k_pos0 = 3},
    {"all features, merge, accumulate", .B = 2, .Hq = 4, .Hkv = 1, .Sq = 6, .Sk = 5, .D = 3, .Dv = 4,
     .flags = FATTN_CAUSAL | FATTN_MERGE | EVERY_ACC, .softcap = 1.25f, .dropout_p = 0.3f, .alibi = true, .sink = true,
     .d_lse = true, .bias = BIAS | BIAS_OVER_H | BIAS_MASKS},
};
const int attention_feature_count = (int)(sizeof attention_features / sizeof *attention_features);

/* splitmix64 (Steele, Lea, Flood 2014) */
int cases_below(uint64_t *state, int n) {
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return (int)((z ^ z >> 31) % (uint64_t)n);
}

attention_case attention_mix(int n) {
    uint64_t r = (uint64_t)n * 1000003u;
    attention_case c = {.name = "mix"};
    c.B = 1 + cases_below(&r, 3);
    c.Hkv = 1 + cases_below(&r, 2);
    c.Hq = c.Hkv * (1 + cases_below(&r, 3));
    c.Sq = 1 + cases_below(&r, 8);
    c.Sk = 1 + cases_below(&r, 8);
    c.D = 1 + cases_below(&r, 4);
    c.Dv = 1 + cases_below(&r, 4);
    static const uint32_t causal[4] = {0, 0, FATTN_CAUSAL, FATTN_CAUSAL_TOP_LEFT};
    c.flags = causal[cases_below(&r, 4)];
    if (cases_below(&r, 3) == 0) {
        c.flags |= FATTN_WINDOW;
        c.window_left = cases_below(&r, 6) - 1;
        c.window_right = cases_below(&r, 6) - 1;
    }
    if (cases_below(&r, 4) == 0) c.flags |= FATTN_MERGE;
    for (uint32_t flag = FATTN_ACC_DQ; flag <= FATTN_ACC_DSINK; flag *= 2)
        if (cases_below(&r, 4) == 0) c.flags |= flag;
    if (cases_below(&r, 3) == 0) c.q_pos0 = cases_below(&r, 20), c.k_pos0 = cases_below(&r, 6);
    if (cases_below(&r, 2) == 0) c.scale = 0.25f + 0.25f * (float)cases_below(&r, 4);
    if (cases_below(&r, 2) == 0) c.softcap = 0.5f + 0.5f * (float)cases_below(&r, 4);
    if (cases_below(&r, 2) == 0) c.dropout_p = 0.1f * (float)(1 + cases_below(&r, 7));
    if (cases_below(&r, 2) == 0) c.bias = BIAS | (unsigned)cases_below(&r, 32) << 1;
    c.alibi = cases_below(&r, 2) == 0;
    c.sink = cases_below(&r, 2) == 0;
    c.d_lse = cases_below(&r, 2) == 0;
    c.delta = cases_below(&r, 4) == 0;
    c.rng_step = cases_below(&r, 4) == 0;
    c.lengths = (enum lengths)cases_below(&r, LENGTHS_PACKED + 1);
    for (int b = 0; b < MAX_SEQUENCES; ++b) {
        c.length_q[b] = cases_below(&r, (int)c.Sq + 1);
        c.length_k[b] = cases_below(&r, (int)c.Sk + 1);
    }
    return c;
}
