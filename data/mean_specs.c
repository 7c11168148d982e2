/* The cases of means.h5: keys whose channels have means, as those of trained models. Rows of dS sum to zero,
   rounded ones do not: what is left is multiplied by the mean of K and becomes an error of dQ. All values are
   exact in bf16, f16 and F32. */
#include "generator.h"

#include "core/tensor/numeric.h"

#include <math.h>

/* A multiple of 2^-6 that bf16 holds. */
static double on_grid(double x) {
    return (double)fattni_bf16_to_float(fattni_float_to_bf16((float)(rint(x * 64) / 64)));
}

/* Adds `mean`, of alternating sign, to every step-th channel. */
static void raise_channels(fattn_tensor *t, int64_t step, double mean) {
    const int64_t D = t->shape[3];
    double *const x = t->data;
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
        const int64_t d = n % D, sign = d / step % 2 == 0 ? 1 : -1;
        x[n] = on_grid(x[n] + (d % step == 0 ? (double)sign * mean : 0));
    }
}

/* Four channels of K, and those of V at half a standard deviation. */
static void four_channels(attention_case *c, double mean) {
    raise_channels(&c->t[Q], 1, 0);
    raise_channels(&c->t[K], c->t[K].shape[3] / 4, mean);
    raise_channels(&c->t[V], c->t[V].shape[3] / 4, 0.5);
    raise_channels(&c->t[D_O], 1, 0);
}
static void at_10(attention_case *c) { four_channels(c, 10); }
static void at_100(attention_case *c) { four_channels(c, 100); }

static void every_channel_at_1(attention_case *c) {
    four_channels(c, 0);
    raise_channels(&c->t[K], 1, 1);
}

static void every_mean(attention_case *c) {
    four_channels(c, 10);
    raise_channels(&c->t[Q], c->t[Q].shape[3] / 4, 1);
    raise_channels(&c->t[V], c->t[V].shape[3] / 4, 3);
    raise_channels(&c->t[D_O], c->t[D_O].shape[3] / 4, 1);
}

#define LONG .Hq = 1, .Sq = 16, .Sk = 256, .D = 64, .exact = FATTN_BF16
#define SHORT .Hq = 1, .Sq = 16, .Sk = 48, .D = 16, .Dv = 8, .exact = FATTN_BF16
const attention_spec mean_specs[] = {
    {"channels_10", "four channels of K at 10 standard deviations", LONG, .adjust = at_10},
    {"channels_100", "at 100, narrow values", LONG, .Dv = 8, .adjust = at_100},
    {"every_channel", "all channels of K at one standard deviation", SHORT, .adjust = every_channel_at_1},
    {"all_tensors", "q, k, v and dO have means", SHORT, .adjust = every_mean},
    {"causal", "the mean of the keys that a row sees", .Hq = 1, .Sq = 40, .D = 16, .Dv = 8, .exact = FATTN_BF16,
     .adjust = at_10, .params.flags = FATTN_CAUSAL},
    {"causal_wide", "more keys than rows", SHORT, .adjust = at_100, .params.flags = FATTN_CAUSAL},
    {"gqa_4", "four query heads share a key head", .Hq = 4, .Hkv = 1, .Sq = 8, .Sk = 48, .D = 16, .Dv = 8,
     .exact = FATTN_BF16, .adjust = at_10},
    {"window", "rows of few keys", .Hq = 1, .Sq = 40, .D = 16, .Dv = 8, .exact = FATTN_BF16, .adjust = at_10,
     .params = {.flags = FATTN_WINDOW, .window_left = 9, .window_right = 3}},
    {"sink", "rows of P sum to less than 1, those of dS not to zero", SHORT, .adjust = at_10, .sink = true,
     .d_lse = true},
    {"d_lse", "rows of dS sum to dL", SHORT, .adjust = at_10, .d_lse = true},
    {"packed", "sequences with means, an empty one, spare rows that also have them", .B = 4, .Hq = 1, .Sq = 20,
     .Sk = 30, .D = 16, .Dv = 8, .exact = FATTN_BF16, .lengths = PACKED, .length_q = {20, 0, 5, 13},
     .length_k = {30, 3, 9, 22}, .adjust = at_10},
    {"softcap", "rows of dS sum to zero before the cap's derivative", SHORT, .adjust = at_10, .params.softcap = 3},
};
const int mean_count = (int)(sizeof mean_specs / sizeof *mean_specs);
