/* Inputs on which other libraries failed: the reference in double, FATTN_ALGO_STANDARD and the tiles against
   the reference in 128 bits, and against exact properties. */
#include "attention.h"
#include "core/attention/ref.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>

/* Sets every in-use element of a tensor. */
static void set_all(attention *a, enum tensor_id id, double x) {
    const fattn_tensor *const t = &a->t[id];
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
        attention_index(t, n, at);
        if (attention_in_use(a, id, at)) attention_set(t, at, x);
    }
}

static void add_all(attention *a, enum tensor_id id, double factor, double shift) {
    const fattn_tensor *const t = &a->t[id];
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
        attention_index(t, n, at);
        attention_set(t, at, factor * attention_get(t, at) + shift);
    }
}

static bool all_near(const attention *a, enum tensor_id id, double x, double most) {
    const fattn_tensor *const t = &a->t[id];
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
        attention_index(t, n, at);
        const double y = attention_get(t, at);
        if (y != x && !(fabs(y - x) <= most)) return false;
    }
    return true;
}
static bool all_equal(const attention *a, enum tensor_id id, double x) { return all_near(a, id, x, 0); }

static bool all_finite(const attention *a, enum tensor_id id) {
    const fattn_tensor *const t = &a->t[id];
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
        attention_index(t, n, at);
        if (attention_in_use(a, id, at) && !isfinite(attention_get(t, at))) return false;
    }
    return true;
}

/* The implementations that are compared with the 128-bit reference. */
typedef struct implementation {
    enum engine by;
    fattn_dtype dtype;
    int32_t algorithm;
} implementation;
static const implementation implementations[] = {{REFERENCE, FATTN_F64, 0},
                                                 {LIBRARY, FATTN_F64, FATTN_ALGO_STANDARD},
                                                 {LIBRARY, FATTN_F32, FATTN_ALGO_STANDARD},
                                                 {LIBRARY, FATTN_F64, FATTN_ALGO_AUTO},
                                                 {LIBRARY, FATTN_F32, FATTN_ALGO_AUTO},
                                                 {LIBRARY, FATTN_F64, FATTN_ALGO_FLASH1},
                                                 {LIBRARY, FATTN_F32, FATTN_ALGO_FLASH1}};
enum { IMPLEMENTATIONS = sizeof implementations / sizeof *implementations };

static attention *with_implementation(fattn_ctx *ctx, const attention_case *c, int n) {
    attention_case one = *c;
    one.algorithm = implementations[n].algorithm;
    one.dtype = implementations[n].dtype;
    return attention_new(ctx, &one);
}

/* Runs a and its twin in 128 bits; all results must be finite and within rounding. */
static void check_against_quad(attention *a, int n) {
    attention *const want = attention_twin(a, FATTN_F64);
    attention_run(a, implementations[n].by);
    attention_run(want, QUAD);
    for (int out = 0; out < 7; ++out)
        if (a->present[attention_outputs[out]]) {
            cr_assert(all_finite(want, attention_outputs[out]), "%s: the reference itself", a->c.name);
            cr_assert(all_finite(a, attention_outputs[out]), "%s: %s", a->c.name,
                      attention_names[attention_outputs[out]]);
        }
    attention_match_rounded(a, want);
    attention_free(want);
}

/* Logits near `level`, spread by about one: q = 1 and k = level sqrt(D) / D, plus noise. */
static void shift_logits(attention *a, double level) {
    const double D = (double)a->c.D;
    add_all(a, T_Q, 0.05, 1);
    add_all(a, T_K, 0.5, level / sqrt(D));
}

Test(extremes, logits_far_from_zero) {
    static const int64_t keys[] = {64, 192, 1000, 1216, 1280};
    static const double levels[] = {-100, -1e4, 100, 1e4};
    fattn_ctx *const ctx = attention_context(1);
    for (int s = 0; s < 5; ++s)
        for (int level = 0; level < 4; ++level)
            for (int n = 0; n < IMPLEMENTATIONS; ++n) {
                char name[64];
                snprintf(name, sizeof name, "logits %g, %lld keys", levels[level], (long long)keys[s]);
                const attention_case c = {name,          .B = 1, .Hq = 2,      .Hkv = 1, .Sq = 1 + 4 * (s == 0),
                                          .Sk = keys[s], .D = 8, .d_lse = true};
                attention *const a = with_implementation(ctx, &c, n);
                shift_logits(a, levels[level]);
                check_against_quad(a, n);
                attention_free(a);
            }
    fattn_ctx_destroy(ctx);
}

/* The same with masked keys, and rows that see none. */
Test(extremes, very_negative_L_under_a_mask) {
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < IMPLEMENTATIONS; ++n) {
        const attention_case c = {"masked", .B = 2, .Hq = 2, .Sq = 40, .Sk = 33, .D = 4, .flags = FATTN_CAUSAL};
        attention *const a = with_implementation(ctx, &c, n);
        shift_logits(a, -300);
        attention *const want = attention_twin(a, FATTN_F64);
        attention_run(a, implementations[n].by);
        attention_run(want, QUAD);
        cr_assert(all_finite(a, T_O) && all_finite(a, T_DQ) && all_finite(a, T_DK) && all_finite(a, T_DV));
        attention_match_rounded(a, want);
        attention_free(a);
        attention_free(want);
    }
    fattn_ctx_destroy(ctx);
}

Test(extremes, rows_without_keys) {
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < IMPLEMENTATIONS; ++n) {
        const attention_case c = {"no keys",    .B = 1, .Hq = 2, .Sq = 9, .Sk = 5, .D = 3, .flags = FATTN_CAUSAL,
                                  .d_lse = true};
        attention *const a = with_implementation(ctx, &c, n);
        attention_run(a, implementations[n].by);
        for (int64_t h = 0; h < 2; ++h)
            for (int64_t i = 0; i < 9; ++i) {
                const int64_t row[4] = {0, h, i, 0};
                cr_assert_eq(attention_get(&a->t[T_LSE], row) == -INFINITY, i < 4);
                for (int64_t d = 0; d < 3; ++d) {
                    const int64_t at[4] = {0, h, i, d};
                    cr_assert_eq(attention_get(&a->t[T_O], at) == 0, i < 4);
                    cr_assert_eq(attention_get(&a->t[T_DQ], at) == 0, i < 4);
                }
            }
        cr_assert(all_finite(a, T_DK) && all_finite(a, T_DV));
        attention_free(a);
    }
    fattn_ctx_destroy(ctx);
}

/* A row with L = -inf contributes nothing, not even if its dL is NaN. */
Test(extremes, gradient_of_an_infinite_L_is_not_read) {
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < IMPLEMENTATIONS; ++n) {
        const attention_case c = {"no keys",
                                  .B = 1,
                                  .Hq = 2,
                                  .Sq = 9,
                                  .Sk = 5,
                                  .D = 3,
                                  .flags = FATTN_CAUSAL,
                                  .d_lse = true,
                                  .sink = true,
                                  .bias = BIAS | BIAS_OVER_I};
        attention *const a = with_implementation(ctx, &c, n), *const want = with_implementation(ctx, &c, n);
        for (int64_t row = 0; row < 2 * 9; ++row) {
            const int64_t at[3] = {0, row / 9, row % 9};
            if (row % 9 < 4) attention_set(&a->t[T_D_LSE], at, NAN);
        }
        set_all(a, T_SINK, -INFINITY);
        set_all(want, T_SINK, -INFINITY);
        attention_run(a, implementations[n].by);
        attention_run(want, implementations[n].by);
        attention_same_bits(a, want);
        attention_free(a);
        attention_free(want);
    }
    fattn_ctx_destroy(ctx);
}

Test(extremes, sink_of_plus_infinity_takes_all) {
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < IMPLEMENTATIONS; ++n) {
        const attention_case c = {"sink", .B = 2, .Hq = 1, .Sq = 3, .Sk = 4, .D = 2, .sink = true, .d_lse = true};
        attention *const a = with_implementation(ctx, &c, n);
        set_all(a, T_SINK, INFINITY);
        attention_run(a, implementations[n].by);
        cr_assert(all_equal(a, T_O, 0) && all_equal(a, T_LSE, INFINITY));
        cr_assert(all_equal(a, T_DQ, 0) && all_equal(a, T_DK, 0) && all_equal(a, T_DV, 0));
        double sum = 0; /* dL/dsink = 1 in each of six rows */
        int64_t at[FATTN_MAX_DIMS] = {0};
        for (int64_t e = 0; e < 6; ++e) {
            attention_index(&a->t[T_D_LSE], e, at);
            sum += attention_get(&a->t[T_D_LSE], at);
        }
        const int64_t head = 0;
        cr_assert_float_eq(attention_get(&a->t[T_D_SINK], &head), sum, 1e-6);
        attention_free(a);
    }
    fattn_ctx_destroy(ctx);
}

Test(extremes, sinks_of_1e38_and_minus_infinity) {
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < IMPLEMENTATIONS; ++n) {
        attention_case c = {"sink", .B = 1, .Hq = 2, .Sq = 3, .Sk = 4, .D = 2};
        attention *const none = with_implementation(ctx, &c, n);
        attention_run(none, implementations[n].by);
        c.sink = true;
        static const double far[] = {-INFINITY, -1e38};
        for (int s = 0; s < 2; ++s) {
            attention *const a = with_implementation(ctx, &c, n);
            set_all(a, T_SINK, far[s]);
            attention_run(a, implementations[n].by);
            attention_same_bits(a, none);
            cr_assert(all_equal(a, T_D_SINK, 0));
            attention_free(a);
        }
        attention *const a = with_implementation(ctx, &c, n);
        set_all(a, T_SINK, 1e38);
        attention_run(a, implementations[n].by);
        cr_assert(all_equal(a, T_O, 0) && all_equal(a, T_DQ, 0) && all_equal(a, T_DK, 0));
        cr_assert(all_equal(a, T_LSE, implementations[n].dtype == FATTN_F32 ? (double)1e38f : 1e38));
        attention_free(a);
        attention_free(none);
    }
    fattn_ctx_destroy(ctx);
}

/* Capped scores are in -cap..cap; the bias is added after that and not capped. */
Test(extremes, bias_comes_after_softcap) {
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < IMPLEMENTATIONS; ++n) {
        const attention_case c = {"order", .B = 1, .Hq = 1, .Sq = 4, .Sk = 1, .D = 2, .softcap = 2, .bias = BIAS};
        attention *const a = with_implementation(ctx, &c, n);
        set_all(a, T_Q, 1e4);
        set_all(a, T_K, 1e4);
        set_all(a, T_BIAS, 50);
        attention_run(a, implementations[n].by);
        /* cap tanh(large) + bias, one key; converted to units of log2 and back, with two roundings each. */
        const double u = implementations[n].dtype == FATTN_F32 ? 0x1p-24 : 0x1p-53;
        cr_assert(all_near(a, T_LSE, 52, 4 * 52 * u));
        cr_assert(all_equal(a, T_DQ, 0) && all_finite(a, T_D_BIAS));
        attention_free(a);
    }
    fattn_ctx_destroy(ctx);
}

/* A NaN that a row sees reaches its result; one past the end of the keys does not (all other tests have
   NaN there). */
Test(extremes, visible_nan_shows) {
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < IMPLEMENTATIONS; ++n) {
        const attention_case c = {"nan", .B = 1, .Hq = 1, .Sq = 2, .Sk = 3, .D = 2};
        attention *const a = with_implementation(ctx, &c, n);
        const int64_t at[4] = {0, 0, 1, 1};
        attention_set(&a->t[T_K], at, NAN);
        attention_run(a, implementations[n].by);
        const int64_t row[4] = {0, 0, 0, 0};
        cr_assert(isnan(attention_get(&a->t[T_O], row)) && isnan(attention_get(&a->t[T_LSE], row)));
        cr_assert(isnan(attention_get(&a->t[T_DQ], row)));
        attention_free(a);
    }
    fattn_ctx_destroy(ctx);
}

/* --- keys in parts ---------------------------------------------------------------------------- */

/* Runs a pass on keys begin..end-1 of a, as in ring attention. */
static void run_part(attention *a, enum engine by, enum fattni_pass pass, uint32_t flags, int64_t begin, int64_t end) {
    fattn_tensor part[4];
    static const enum tensor_id ids[4] = {T_K, T_V, T_DK, T_DV};
    for (int n = 0; n < 4; ++n) part[n] = fattn_tensor_slice(&a->t[ids[n]], 2, begin, end);
    fattn_attention_params params = a->params;
    params.flags |= flags;
    params.k_pos0 = begin;
    fattn_attention_io io = a->io;
    io.k = &part[0], io.v = &part[1], io.dk = &part[2], io.dv = &part[3];
    fattn_status s;
    if (by == LIBRARY) {
        s = (pass == FATTNI_FWD ? fattn_attention_fwd : fattn_attention_bwd)(a->ctx, &params, &io);
    } else {
        fattni_problem p;
        s = fattni_problem_init(a->ctx, &params, &io, pass, true, &p);
        if (s == FATTN_OK) s = (pass == FATTNI_FWD ? fattni_fwd_ref : fattni_bwd_ref)(a->ctx, &p);
    }
    cr_assert_eq(s, FATTN_OK, "%s", fattn_ctx_error(a->ctx));
}

/* Forward over the parts one by one, merging; then backward over each with the merged O and L. */
static void check_parts(fattn_ctx *ctx, enum engine by, const attention_case *c, const int64_t *ends, int parts) {
    attention *const whole = attention_new(ctx, c), *const split = attention_new(ctx, c);
    attention_run(whole, REFERENCE);
    attention_run(split, by); /* gives it a workspace, too */
    const size_t forward = split->plan.fwd_workspace, backward = split->plan.bwd_workspace;
    split->io.workspace_bytes = forward > backward ? forward : backward;
    attention_reset(split);
    for (int n = 0; n < parts; ++n) run_part(split, by, FATTNI_FWD, n ? FATTN_MERGE : 0, n ? ends[n - 1] : 0, ends[n]);
    for (int n = 0; n < parts; ++n)
        run_part(split, by, FATTNI_BWD, FATTN_MERGE | (n ? FATTN_ACC_DQ : 0), n ? ends[n - 1] : 0, ends[n]);
    attention_match(split, whole, NULL, 0, (fattn_tolerance){1e-13, 1e-12, 0});
    attention_free(whole);
    attention_free(split);
}

Test(extremes, parts_merge_to_the_whole) {
    fattn_ctx *const ctx = attention_context(1);
    static const attention_case cases[] = {
        {"plain", .B = 2, .Hq = 2, .Hkv = 1, .Sq = 6, .Sk = 11, .D = 3, .d_lse = true},
        {"causal, dropout, ALiBi", .B = 1, .Hq = 2, .Sq = 9, .Sk = 11, .D = 3, .dropout_p = 0.3f, .alibi = true,
         .flags = FATTN_CAUSAL_TOP_LEFT},
        {"window", .B = 1, .Hq = 2, .Sq = 9, .Sk = 11, .D = 3, .window_left = 1,
         .flags = FATTN_CAUSAL_TOP_LEFT | FATTN_WINDOW},
    };
    /* With a causal mask the last parts are empty for the first rows, and with a window the first parts for
       the last rows; parts without any key are at the start, in the middle, at the end. */
    static const int64_t ends[][5] = {{4, 11, 11, 11, 11}, {0, 3, 3, 8, 11}, {1, 2, 10, 11, 11}};
    for (size_t n = 0; n < sizeof cases / sizeof *cases; ++n)
        for (int way = 0; way < 6; ++way) check_parts(ctx, way < 3 ? REFERENCE : LIBRARY, &cases[n], ends[way % 3], 5);
    fattn_ctx_destroy(ctx);
}

/* A result over no keys has weight 0, whatever its o holds; merging two of them gives another. */
Test(extremes, merge_with_empty_results) {
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < IMPLEMENTATIONS; ++n) {
        attention_case c = {"merge", .B = 1, .Hq = 2, .Sq = 3, .Sk = 4, .D = 2};
        attention *const alone = with_implementation(ctx, &c, n);
        attention_run(alone, implementations[n].by);
        c.flags = FATTN_MERGE;
        for (int filler = 0; filler < 2; ++filler) {
            attention *const a = with_implementation(ctx, &c, n);
            attention_start(a, T_LSE, -INFINITY);
            attention_start(a, T_O, filler ? NAN : 0);
            attention_run(a, implementations[n].by);
            attention_same_bits(a, alone);
            attention_free(a);
        }
        c.k_pos0 = 100; /* and no key of this call is visible */
        c.flags |= FATTN_CAUSAL;
        attention *const empty = with_implementation(ctx, &c, n);
        attention_start(empty, T_LSE, -INFINITY);
        attention_start(empty, T_O, NAN);
        attention_run(empty, implementations[n].by);
        cr_assert(all_equal(empty, T_O, 0) && all_equal(empty, T_LSE, -INFINITY));
        cr_assert(all_equal(empty, T_DQ, 0) && all_equal(empty, T_DV, 0));
        attention_start(empty, T_LSE, 1.5);
        attention_start(empty, T_O, 0.25);
        attention_run(empty, implementations[n].by);
        cr_assert(all_equal(empty, T_O, 0.25) && all_equal(empty, T_LSE, 1.5));
        cr_assert(all_equal(empty, T_DQ, 0) && all_equal(empty, T_DV, 0));
        attention_free(alone);
        attention_free(empty);
    }
    fattn_ctx_destroy(ctx);
}

/* An infinite sink in one part or the other takes all probability; no inf - inf occurs. */
Test(extremes, merge_with_infinite_sinks) {
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < IMPLEMENTATIONS; ++n)
        for (int where = 1; where < 4; ++where) { /* 1: before, 2: in this call, 3: both */
            const attention_case c = {"merge",     .B = 1, .Hq = 2, .Sq = 3, .Sk = 4, .D = 2, .flags = FATTN_MERGE,
                                      .sink = true};
            attention *const a = with_implementation(ctx, &c, n);
            attention_start(a, T_LSE, where & 1 ? INFINITY : 0.5);
            attention_start(a, T_O, where & 1 ? 0 : 3);
            set_all(a, T_SINK, where & 2 ? INFINITY : 0.5);
            attention_run(a, implementations[n].by);
            cr_assert(all_equal(a, T_LSE, INFINITY) && all_equal(a, T_O, 0), "%d", where);
            cr_assert(all_equal(a, T_DQ, 0) && all_equal(a, T_DK, 0) && all_equal(a, T_DV, 0));
            attention_free(a);
        }
    fattn_ctx_destroy(ctx);
}

/* All features together, in double, against 128 bits. */
Test(extremes, every_feature_in_quad) {
    fattn_ctx *const ctx = attention_context(1);
    for (int n = 0; n < attention_feature_count; ++n) {
        attention *const got = attention_new(ctx, &attention_features[n]);
        attention *const want = attention_twin(got, FATTN_F64);
        attention_run(got, REFERENCE);
        attention_run(want, QUAD);
        attention_match_rounded(got, want);
        attention_free(got);
        attention_free(want);
    }
    fattn_ctx_destroy(ctx);
}
