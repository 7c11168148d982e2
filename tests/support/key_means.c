#include "key_means.h"

#include "core/tensor/numeric.h"

#include <criterion/criterion.h>
#include <math.h>

#define SHAPE .B = 1, .Hq = 2, .Sq = 300, .Sk = 520
const attention_case key_means_cases[] = {
    {"full", SHAPE},
    {"causal", .B = 1, .Hq = 4, .Hkv = 2, .Sq = 400, .Sk = 400, .flags = FATTN_CAUSAL},
    {"window", SHAPE, .flags = FATTN_WINDOW, .window_left = 150, .window_right = 90},
    {"sink", SHAPE, .sink = true},
    {"d_lse", SHAPE, .d_lse = true},
    {"sink, d_lse, ALiBi", SHAPE, .sink = true, .d_lse = true, .alibi = true},
    {"dropout", SHAPE, .dropout_p = 0.2f},
    {"bias", SHAPE, .bias = 15},
    {"add to dq", SHAPE, .flags = FATTN_ACC_DQ, .d_lse = true},
    {"deterministic", SHAPE, .flags = FATTN_DETERMINISTIC, .sink = true},
    {"padded", .B = 2, .Hq = 2, .Sq = 300, .Sk = 520, .lengths = LENGTHS_PADDED, .length_q = {300, 111},
     .length_k = {390, 520}},
    {"packed", .B = 3, .Hq = 2, .Sq = 200, .Sk = 300, .lengths = LENGTHS_PACKED, .length_q = {200, 0, 150},
     .length_k = {300, 40, 260}, .sink = true},
    /* Hopper: the last head group has one head. */
    {"many heads", .B = 5, .Hq = 13, .Hkv = 13, .Sq = 130, .Sk = 400, .flags = FATTN_CAUSAL},
    {"softcap", SHAPE, .softcap = 50},
    {"small softcap, causal", .B = 1, .Hq = 4, .Hkv = 2, .Sq = 400, .Sk = 400, .flags = FATTN_CAUSAL, .softcap = 2},
    {"softcap, sink, d_lse, dropout", SHAPE, .softcap = 20, .sink = true, .d_lse = true, .dropout_p = 0.2f},
    {"softcap, packed, add to dq", .B = 3, .Hq = 2, .Sq = 200, .Sk = 300, .flags = FATTN_ACC_DQ, .softcap = 10,
     .lengths = LENGTHS_PACKED, .length_q = {200, 0, 150}, .length_k = {300, 40, 260}, .sink = true},
    {"softcap, ALiBi, bias, window", SHAPE, .flags = FATTN_WINDOW, .window_left = 150, .window_right = 90,
     .softcap = 30, .alibi = true, .bias = 15},
    {"softcap, padded, GQA, deterministic", .B = 2, .Hq = 4, .Hkv = 2, .Sq = 300, .Sk = 520,
     .flags = FATTN_DETERMINISTIC, .softcap = 50, .lengths = LENGTHS_PADDED, .length_q = {300, 111},
     .length_k = {390, 520}, .d_lse = true},
    {"softcap, many heads, causal", .B = 5, .Hq = 13, .Hkv = 13, .Sq = 130, .Sk = 400, .flags = FATTN_CAUSAL,
     .softcap = 50},
    {"large softcap", SHAPE, .softcap = 100000}, /* kernels without one of their own */
};
const int key_means_case_count = sizeof key_means_cases / sizeof *key_means_cases;

void key_means_add(attention *a, key_means add) {
    const struct {
        enum tensor_id id;
        double mean;
        int64_t every;
    } to[3] = {{T_K, add.key, a->c.D / 4}, {T_V, add.value, add.every}, {T_Q, 0, 1}};
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int m = 0; m < 3; ++m) {
        const fattn_tensor *const t = &a->t[to[m].id];
        for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
            attention_index(t, n, at);
            double x = attention_get(t, at);
            if (at[3] % to[m].every == 0) x += to[m].mean;
            if (a->c.dtype == FATTN_F32) {
                uint16_t cell;
                fattni_store(&cell, FATTN_BF16, 0, x);
                x = fattni_load(&cell, FATTN_BF16, 0);
            }
            attention_set(t, at, x);
        }
    }
}

/* Over what is written, in the Frobenius norm relative to want's. What was there before is not the gradient's. */
static double error_of(const attention *got, const attention *want, enum tensor_id id) {
    double error = 0, size = 0;
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&want->t[id]); ++n) {
        attention_index(&want->t[id], n, at);
        const double x = attention_get(&want->t[id], at), y = attention_get(&got->t[id], at);
        if (isnan(x)) continue;
        cr_assert(isfinite(y), "%s: %s is not finite", got->c.name, attention_names[id]);
        error += (y - x) * (y - x), size += x * x;
    }
    return sqrt(error / size);
}

static gradient_errors errors_with(fattn_ctx *ctx, const attention_case *c, key_means add, enum engine by,
                                   fattn_status (*on_device)(attention *a, enum fattni_pass pass)) {
    attention *const got = attention_new(ctx, c);
    key_means_add(got, add);
    attention *const want = attention_twin(got, FATTN_F64);
    got->on_device = on_device;
    attention_run(want, REFERENCE);
    attention_run(got, by);
    const gradient_errors errors = {error_of(got, want, T_DQ), error_of(got, want, T_DK)};
    attention_free(got);
    attention_free(want);
    return errors;
}

/* Half a standard deviation in four channels of V, so that O has a mean. */
static double error_of_dq(fattn_ctx *ctx, const attention_case *c, double mean, enum engine by,
                          fattn_status (*on_device)(attention *a, enum fattni_pass pass)) {
    const key_means add = {mean, mean != 0 ? 0.5 : 0, (c->Dv ? c->Dv : c->D) / 4};
    return errors_with(ctx, c, add, by, on_device).dq;
}

void key_means_check(fattn_ctx *ctx, const attention_case *c, double least, enum engine by,
                     fattn_status (*on_device)(attention *a, enum fattni_pass pass)) {
    static const double of_keys[] = {100, 10, 3, 1};
    const double without = error_of_dq(ctx, c, 0, by, on_device);
    for (int n = 0; n < 4 && of_keys[n] >= least; ++n) {
        const double with = error_of_dq(ctx, c, of_keys[n], by, on_device);
        /* A score is a sum of D terms in F32, and as large as the mean: a random walk of D roundings. */
        const double of_scores = of_keys[n] * sqrt((double)c->D) * 0x1p-24;
        cr_assert(with <= 1.5 * without + of_scores, "%s %s, D %d: with means of %g dq is off by %.2e, without by %.2e",
                  c->name, fattn_dtype_name(c->dtype), (int)c->D, of_keys[n], with, without);
    }
}

gradient_errors key_means_errors(fattn_ctx *ctx, const attention_case *c, double key, double value, enum engine by,
                                 fattn_status (*on_device)(attention *a, enum fattni_pass pass)) {
    return errors_with(ctx, c, (key_means){key, value, 1}, by, on_device);
}

#define HIDDEN .B = 1, .Hq = 2, .Hkv = 1, .D = 64
#define MASKED HIDDEN, .Sq = 130, .Sk = 256, .bias = BIAS | BIAS_OVER_I | BIAS_F32
#define TOP_LEFT HIDDEN, .flags = FATTN_CAUSAL_TOP_LEFT
#define DRIFTING HIDDEN, .Sq = 300, .Sk = 300, .flags = FATTN_CAUSAL
const hidden_means_case hidden_means_cases[] = {
    {{"masked keys", MASKED}, {128, -INFINITY, 130}},
    {{"many masked keys", MASKED}, {24, -1e9, 130}},
    {{"few masked keys", MASKED}, {200, -1e4, 130}},
    {{"later keys", TOP_LEFT, .Sq = 90, .Sk = 512}, {90, 0, 90}},
    {{"few rows", TOP_LEFT, .Sq = 20, .Sk = 400}, {20, 0, 20}},
    {{"few rows, softcap", TOP_LEFT, .Sq = 20, .Sk = 400, .softcap = 30}, {20, 0, 20}},
    /* Rows of the first half see no key of the second, whose mean is another one. */
    {{"drifting means", DRIFTING}, {150, 0, 150}},
    {{"drifting means, softcap", DRIFTING, .softcap = 50, .sink = true}, {150, 0, 150}},
};
const int hidden_means_case_count = sizeof hidden_means_cases / sizeof *hidden_means_cases;

void key_means_add_hidden(attention *a, double mean, const hidden_means *x) {
    static const enum tensor_id ids[3] = {T_K, T_V, T_BIAS};
    for (int m = 0; m < (a->c.bias ? 3 : 2); ++m) {
        const fattn_tensor *const t = &a->t[ids[m]];
        int64_t at[FATTN_MAX_DIMS];
        for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
            attention_index(t, n, at);
            if (ids[m] == T_BIAS)
                attention_set(t, at, at[3] >= x->begin ? x->mask : 0);
            else if (ids[m] == T_V) /* so that O has a mean */
                attention_set(t, at, attention_get(t, at) + 0.5);
            else if (at[2] >= x->begin && at[3] % (a->c.D / 4) == 0)
                attention_set(t, at, attention_get(t, at) + mean);
        }
    }
}

double key_means_hidden_error(const attention *got, int64_t rows) {
    attention *const want = attention_twin(got, FATTN_F64);
    double error = 0, size = 0;
    int64_t at[FATTN_MAX_DIMS];
    attention_run(want, REFERENCE);
    for (int64_t n = 0; n < fattn_tensor_numel(&want->t[T_DQ]); ++n) {
        attention_index(&want->t[T_DQ], n, at);
        if (at[2] >= rows) continue;
        const double x = attention_get(&want->t[T_DQ], at), y = attention_get(&got->t[T_DQ], at);
        error += (y - x) * (y - x), size += x * x;
    }
    attention_free(want);
    return sqrt(error / size);
}

void key_means_check_hidden(fattn_ctx *ctx, const attention_case *c, const hidden_means *x, enum engine by,
                            fattn_status (*on_device)(attention *a, enum fattni_pass pass)) {
    static const double means[] = {0, 3, 30, 300, 3000};
    double without = 0;
    for (int n = 0; n < 5; ++n) {
        attention *const a = attention_new(ctx, c);
        key_means_add_hidden(a, means[n], x);
        a->on_device = on_device;
        attention_run(a, by);
        const double error = key_means_hidden_error(a, x->rows);
        attention_free(a);
        if (n == 0) without = error;
        cr_assert(error <= 1.5 * without, "%s, %s, D %d: with a mean of %g dq is off by %.2e, without by %.2e", c->name,
                  fattn_dtype_name(c->dtype), (int)c->D, means[n], error, without);
    }
}
