/* The accuracy of the tiles compared with a computation that stores N x N matrices in the same type: largest
   errors, biased errors, and L. Against the reference in F64 on the same inputs. */
#include "key_means.h"
#include "thinned.h"
#include "tiles.h"

#include <criterion/criterion.h>
#include <math.h>

static const fattn_dtype narrow[2] = {FATTN_F16, FATTN_BF16};

/* |tiles - reference| <= factor |unfused - reference| + two roundings, in the maximum; forward with
   factor 2, backward 3. */
static void check_rule(fattn_ctx *ctx, const attention_case *c) {
    attention *const got = attention_new(ctx, c), *const low = attention_new(ctx, c);
    attention *const want = attention_twin(got, FATTN_F64);
    attention_run(want, REFERENCE);
    attention_run(low, UNFUSED);
    attention_run(got, LIBRARY);
    attention forward = *got, backward = *got;
    for (int n = 0; n < 7; ++n) (n < 2 ? &backward : &forward)->present[attention_outputs[n]] = false;
    attention_match(&forward, want, low, 2, (fattn_tolerance){0});
    attention_match(&backward, want, low, 3, (fattn_tolerance){0});
    attention_free(got);
    attention_free(low);
    attention_free(want);
}

#define USUAL .B = 1, .Hq = 2, .Hkv = 1, .Sq = 110, .Sk = 135, .D = 64
static const attention_case usual[] = {
    {"plain", USUAL},
    {"causal", USUAL, .flags = FATTN_CAUSAL},
    {"window", USUAL, .flags = FATTN_WINDOW, .window_left = 40, .window_right = 3},
    {"softcap", USUAL, .softcap = 1.5f},
    {"ALiBi", USUAL, .alibi = true, .flags = FATTN_CAUSAL},
    {"bias", USUAL, .bias = BIAS},
    {"bias over rows", USUAL, .bias = BIAS | BIAS_OVER_I | BIAS_OVER_H},
    {"sink", USUAL, .sink = true, .d_lse = true},
    {"dropout", USUAL, .dropout_p = 0.3f},
    {"merge", USUAL, .flags = FATTN_MERGE, .wide = true},
    {"accumulate", USUAL, .flags = FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV},
    {"packed", .B = 3, .Hq = 2, .Sq = 130, .Sk = 130, .D = 64, .lengths = LENGTHS_PACKED, .length_q = {130, 47, 90},
     .length_k = {64, 130, 65}, .flags = FATTN_CAUSAL},
    {"many at once", USUAL, .flags = FATTN_CAUSAL, .softcap = 3, .alibi = true, .sink = true, .dropout_p = 0.2f,
     .bias = BIAS | BIAS_OVER_B, .wide = true},
};
enum { USUAL_COUNT = sizeof usual / sizeof *usual };

Test(tiles_accuracy, sixteen_bits_by_the_baseline_rule) {
    fattn_ctx *const ctx = attention_context(2);
    for (int n = 0; n < 2 * USUAL_COUNT; ++n) {
        attention_case c = usual[n / 2];
        c.dtype = narrow[n % 2];
        check_rule(ctx, &c);
    }
    fattn_ctx_destroy(ctx);
}

/* Where 16 bits are only stored, O and the gradients in F32 are as good as those of F32 inputs. */
Test(tiles_accuracy, wide_outputs_of_16_bit_inputs_are_exact_to_f32) {
    for (int n = 0; n < 2 * USUAL_COUNT; ++n) {
        attention_case c = usual[n / 2];
        c.dtype = narrow[n % 2];
        c.wide = true;
        tiles_check_backward(&c);
    }
}

/* Biased rounding, such as truncation, can make a training diverge. With V > 0 a bias of P or O does not
   cancel. Rows are independent, so their mean error over its standard error is nearly a standard normal
   number. */
static void positive(attention *a) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[T_V]); ++n) {
        attention_index(&a->t[T_V], n, at);
        attention_set(&a->t[T_V], at, 1 + fabs(attention_get(&a->t[T_V], at)));
    }
}

static double bias_in_errors(const attention *got, const attention *want, enum tensor_id id) {
    const int64_t columns = id == T_LSE ? 1 : got->c.Dv, rows = fattn_tensor_numel(&got->t[id]) / columns;
    int64_t at[FATTN_MAX_DIMS] = {0};
    double sum = 0, squares = 0;
    for (int64_t row = 0; row < rows; ++row) {
        double mean = 0;
        for (int64_t d = 0; d < columns; ++d) {
            attention_index(&got->t[id], row * columns + d, at);
            const double error = attention_get(&got->t[id], at) - attention_get(&want->t[id], at);
            mean += error / (double)columns;
        }
        sum += mean, squares += mean * mean;
    }
    const double n = (double)rows, mean = sum / n, variance = (squares / n - mean * mean) / (n - 1);
    return mean / sqrt(variance);
}

Test(tiles_accuracy, errors_of_o_have_no_bias) {
    fattn_ctx *const ctx = attention_context(2);
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    for (int n = 0; n < 6; ++n) {
        const attention_case c = {.name = "lean",
                                  .B = 1,
                                  .Hq = 4,
                                  .Sq = 400,
                                  .Sk = 300,
                                  .D = 64,
                                  .dtype = dtypes[n / 2],
                                  .flags = n % 2 ? FATTN_CAUSAL : 0};
        attention *const got = attention_new(ctx, &c);
        positive(got);
        attention *const want = attention_twin(got, FATTN_F64);
        attention_forward(want, REFERENCE);
        attention_forward(got, LIBRARY);
        const double t = bias_in_errors(got, want, T_O);
        cr_assert(fabs(t) < 5, "%s: the mean error of O is %.1f standard errors from 0", fattn_dtype_name(c.dtype), t);
        attention_free(got);
        attention_free(want);
    }
    fattn_ctx_destroy(ctx);
}

/* delta comes from an O of 16 bits. */
Test(tiles_accuracy, keys_with_means) {
    fattn_ctx *const ctx = attention_context(2);
    for (int n = 0; n < 2 * key_means_case_count; n += THINNED(7)) {
        attention_case c = key_means_cases[n / 2];
        c.dtype = n % 2 ? FATTN_BF16 : FATTN_F16;
        c.D = n % 3 ? 64 : 40;
        key_means_check(ctx, &c, 1, LIBRARY, NULL);
    }
    fattn_ctx_destroy(ctx);
}

/* O has not been rounded, but products may be. */
Test(tiles_accuracy, keys_with_means_beside_an_o_of_f32) {
    fattn_ctx *const ctx = attention_context(2);
    for (int n = 0; n < 2 * key_means_case_count; n += THINNED(7)) {
        attention_case c = key_means_cases[n / 2];
        c.dtype = n % 2 ? FATTN_BF16 : FATTN_F16;
        c.D = 64, c.wide = true;
        key_means_check(ctx, &c, 10, LIBRARY, NULL);
    }
    fattn_ctx_destroy(ctx);
}

/* L, a natural logarithm, is correct to a few roundings of a float, also with 16-bit inputs. */
Test(tiles_accuracy, l_is_exact_to_f32) {
    fattn_ctx *const ctx = attention_context(2);
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    for (int n = 0; n < 3 * USUAL_COUNT; ++n) {
        attention_case c = usual[n / 3];
        c.dtype = dtypes[n % 3];
        if (c.flags & FATTN_MERGE) c.wide = true;
        attention *const got = attention_new(ctx, &c);
        attention *const want = attention_twin(got, FATTN_F64);
        attention_forward(want, REFERENCE);
        attention_forward(got, LIBRARY);
        attention l = *got;
        for (int m = 0; m < 7; ++m) l.present[attention_outputs[m]] = attention_outputs[m] == T_LSE;
        /* scores of size 8, or of ALiBi's distances, in sums of D products; L of the same size */
        const double size = c.alibi ? 0.75 * 135 : 8;
        attention_match(&l, want, NULL, 0, (fattn_tolerance){4 * size * 0x1p-24, 0x1p-23, 1});
        attention_free(got);
        attention_free(want);
    }
    fattn_ctx_destroy(ctx);
}
