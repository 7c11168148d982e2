#include "tiles.h"

#include "core/cpu/tile.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>

attention_case tiles_case(int n, fattn_dtype dtype) {
    static const int64_t D[] = {64, 1, 128, 3, 96, 8, 59, 256, 80, 16, 111, 32};
    static const uint32_t masks[] = {FATTN_CAUSAL, 0, FATTN_CAUSAL_TOP_LEFT, FATTN_WINDOW, FATTN_CAUSAL | FATTN_WINDOW};
    static const enum layout layouts[] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH};
    const attention_shape s = attention_shapes[n % attention_shape_count];
    return (attention_case){.name = "walk",
                            .dtype = dtype,
                            .B = 1 + n % 2,
                            .Hq = 1 + n / 2 % 3,
                            .Hkv = 1,
                            .Sq = s.Sq,
                            .Sk = s.Sk,
                            .D = D[n % 12],
                            .Dv = D[n % 3 ? n % 12 : (n + 5) % 12],
                            .flags = masks[n % 5],
                            .window_left = n % 41,
                            .window_right = n % 29 - 1,
                            .layout = layouts[n % 3]};
}

attention_case tiles_enlarge(const attention_case *given, int n) {
    attention_case c = *given;
    const int32_t rows = 10 + 5 * (n % 3), keys = 10 + 7 * (n % 4); /* for each one of before */
    c.Sq = c.Sq * rows - n % 2;
    c.Sk = c.Sk * keys - n % 3;
    if (c.Sq < 0) c.Sq = 0;
    if (c.Sk < 0) c.Sk = 0;
    c.D = c.D * (5 + n % 17);
    c.Dv = c.Dv * (3 + n % 19);
    c.window_left *= keys / 2;
    c.window_right *= keys / 2;
    c.q_pos0 *= 5;
    c.k_pos0 *= 7;
    for (int b = 0; b < MAX_SEQUENCES; ++b) {
        const int64_t q = (int64_t)c.length_q[b] * rows, k = (int64_t)c.length_k[b] * keys;
        c.length_q[b] = (int32_t)(q < c.Sq ? q : c.Sq);
        c.length_k[b] = (int32_t)(k < c.Sk ? k : c.Sk);
    }
    return c;
}

attention_case tiles_random(int n) {
    static const int64_t dims[] = {1, 2, 7, 8, 16, 24, 33, 40, 59, 64, 80, 96, 111, 128, 200, 256};
    static const fattn_dtype dtypes[] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};
    static const enum layout layouts[] = {LAYOUT_BHSD, LAYOUT_BSHD, LAYOUT_PITCH, LAYOUT_REVERSED};
    static const int32_t algorithms[] = {FATTN_ALGO_AUTO, FATTN_ALGO_FLASH2, FATTN_ALGO_FLASH1};
    uint64_t r = (uint64_t)n * 7368787u + 1;
    attention_case c = attention_mix(n);
    if (cases_below(&r, 5)) c = tiles_enlarge(&c, cases_below(&r, 12));
    c.D = dims[cases_below(&r, 16)];
    c.Dv = cases_below(&r, 2) ? c.D : dims[cases_below(&r, 16)];
    c.dtype = dtypes[cases_below(&r, 4)];
    c.layout = layouts[cases_below(&r, 4)];
    c.algorithm = algorithms[cases_below(&r, 3)];
    c.wide = cases_below(&r, 3) == 0 || c.flags & FATTN_MERGE;
    if (c.bias && cases_below(&r, 2)) c.bias |= BIAS_F32;
    if (cases_below(&r, 4) == 0) c.omit = (unsigned)cases_below(&r, 7); /* at least one of dq, dk, dv is computed */
    c.sum_d_o = cases_below(&r, 8) == 0;
    /* The reference takes a second for 10^8 products. */
    while ((double)(c.B * c.Hq * c.Sq * c.Sk) * (double)(c.D + c.Dv) > 1e7 && c.D + c.Dv > 20)
        c.D = (c.D + 1) / 2, c.Dv = (c.Dv + 1) / 2;
    return c;
}

/* ---- what is expected ---- */

/* The rounding error of storing 1 in a type. */
static double half_unit(int32_t dtype) {
    switch (dtype) {
    case FATTN_F64: return 0x1p-53;
    case FATTN_F32: return 0x1p-24;
    case FATTN_F16: return 0x1p-11;
    default: return 0x1p-8;
    }
}

/* The reference's results in F64. For other dtypes FATTN_ALGO_STANDARD also computes them in F32, from the
   same inputs: the tiles may have twice its error. With 16 bits, O is stored rounded, and backward reads the
   rounded O, here as in the library: `rounded` has it for all. */
typedef struct expected {
    attention *want, *gradients; /* O, L; the others: the same unless O is rounded */
    attention *rounded;
    double baseline[7]; /* largest error of the unfused computation, per output */
} expected;

static void copy(const attention *to, const attention *from, enum tensor_id id) {
    cr_assert_eq(fattn_tensor_copy(to->ctx, &to->t[id], &from->t[id]), FATTN_OK);
}

static double largest_error(const attention *got, const attention *want, enum tensor_id id) {
    const fattn_tensor *const g = &got->t[id], *const w = &want->t[id];
    int64_t at[FATTN_MAX_DIMS] = {0};
    double most = 0;
    for (int64_t n = 0; got->present[id] && n < fattn_tensor_numel(w); ++n) {
        attention_index(w, n, at);
        const double error = fabs(attention_get(g, at) - attention_get(w, at));
        if (isfinite(error)) most = fmax(most, error);
    }
    return most;
}

static void measure_baseline(expected *e, const attention *inputs, bool backward) {
    attention *const unfused = attention_twin(inputs, FATTN_F32);
    attention_forward(unfused, LIBRARY);
    for (int n = 0; n < 2; ++n) e->baseline[n] = largest_error(unfused, e->want, attention_outputs[n]);
    if (backward) {
        if (e->rounded) copy(unfused, e->rounded, T_O);
        attention_backward(unfused, LIBRARY);
        for (int n = 2; n < 7; ++n) e->baseline[n] = largest_error(unfused, e->gradients, attention_outputs[n]);
    }
    attention_free(unfused);
}

static expected expect(fattn_ctx *ctx, const attention_case *c, bool backward, void (*change)(attention *a)) {
    attention_case unfused = *c;
    unfused.algorithm = FATTN_ALGO_STANDARD;
    unfused.flags &= ~(uint32_t)FATTN_UNIFIED_MAX; /* which it lacks */
    attention *const inputs = attention_new(ctx, &unfused);
    if (change) change(inputs);
    expected e = {.want = attention_twin(inputs, FATTN_F64)};
    e.gradients = e.want;
    attention_forward(e.want, REFERENCE);
    if (c->dtype == FATTN_F16 || c->dtype == FATTN_BF16) {
        e.rounded = attention_new(ctx, &unfused);
        copy(e.rounded, e.want, T_O);
        e.gradients = attention_twin(inputs, FATTN_F64);
        copy(e.gradients, e.rounded, T_O);
        copy(e.gradients, e.want, T_LSE);
    }
    if (backward) attention_backward(e.gradients, REFERENCE);
    if (c->dtype != FATTN_F64) measure_baseline(&e, inputs, backward);
    attention_free(inputs);
    return e;
}

static void expected_free(expected *e) {
    if (e->gradients != e->want) attention_free(e->gradients);
    if (e->rounded) attention_free(e->rounded);
    attention_free(e->want);
}

static double largest(const fattn_tensor *t) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    double most = 0;
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
        attention_index(t, n, at);
        const double x = fabs(attention_get(t, at));
        if (isfinite(x)) most = fmax(most, x);
    }
    return most;
}

/* Errors of F32 arithmetic that are allowed in addition to twice the baseline's, whose largest error may by
   chance be small where few numbers are compared. Roundings of half a unit are a random walk over the D
   products of a score and over sums of S keys and rows. Scores have size 8 (with ALiBi, that of the
   distances; relative to a unified maximum up to 64), dP has size 3 sqrt(Dv) before delta is subtracted: s
   and L, which the baseline does not compute, P and dP have errors of that many half units, and results
   computed from them the same relative error. dP and delta are sums whose roundings, in units of their size
   sqrt(k) after k terms, add up to Dv / sqrt(6): a G that should be 0 has an error of three times that, times
   elements of size 4. Errors summed over rows, and over keys that share a bias, add up as a random walk, also where the
   sum itself is 0. */
static double granted(const attention *want, enum tensor_id id) {
    const attention_case *const c = &want->c;
    const int64_t off = c->q_pos0 - c->k_pos0, reach = c->Sq + c->Sk + (off < 0 ? -off : off);
    const double Dv = (double)c->Dv, most = fmin(8 + fabs((double)c->unified_max), 64); /* of s - unified_max */
    const double score = c->alibi ? fmax(most, 0.75 * (double)reach) : most;
    const double D = fmax((double)c->D, Dv), S = (double)(c->Sk > c->Sq ? c->Sk : c->Sq);
    const double size = fmax(score, 3 * sqrt(Dv)), chains = 4 * (8 + sqrt(D) + sqrt(S));
    const double scale = c->scale > 0 ? (double)c->scale : 1 / sqrt((double)c->D);
    const double rest = 3 * Dv / sqrt(6) / (1 - (double)c->dropout_p);
    const bool sums = id == T_D_BIAS || id == T_D_SINK, products = id == T_DQ || id == T_DK;
    const double rows = (double)(c->B * c->Hq * c->Sq), numbers = (double)fattn_tensor_numel(&want->t[id]);
    const double terms = id == T_D_BIAS ? fmax(rows, rows * (double)c->Sk / fmax(numbers, 1)) : rows;
    const double walk = sums ? sqrt(terms + 1) : 1;
    const double cancelled = products ? 4 * scale * rest : sums ? walk * rest : 0;
    return 0x1p-24 * fmax(fmax(chains, cancelled), size * fmax(walk, fmax(1, largest(&want->t[id]))));
}

static void match(const attention *got, const expected *e, int first, int last, fattn_tolerance given) {
    for (int n = first; n < last; ++n) {
        const enum tensor_id id = attention_outputs[n];
        const attention *const want = n < 2 ? e->want : e->gradients;
        const double unit = half_unit(got->t[id].dtype), subnormal = unit == 0x1p-11 ? 0x1p-25 : 0;
        attention one = *got;
        if (!got->present[id]) continue;
        for (int m = 0; m < 7; ++m) one.present[attention_outputs[m]] &= m == n;
        fattn_tolerance tol = given; /* 0: 1e-12 of F64 */
        if (given.rtol == 0 && got->c.dtype != FATTN_F64)
            tol = (fattn_tolerance){2 * e->baseline[n] + granted(want, id) + subnormal, unit, 1};
        attention_match(&one, want, NULL, 0, tol);
    }
}

/* ---- checks ---- */

typedef fattn_status other_device(attention *a, enum fattni_pass pass);

/* Where P and dS are rounded for their products, by the rule for 16 bits. */
static void check_rounded(fattn_ctx *ctx, const attention_case *c, bool backward, void (*change)(attention *a)) {
    attention *const got = attention_new(ctx, c), *const low = attention_new(ctx, c);
    if (change) change(got), change(low);
    attention_round_d_o(got, c->dtype);
    attention_round_d_o(low, c->dtype);
    attention *const want = attention_twin(got, FATTN_F64);
    attention_forward(want, REFERENCE), attention_forward(low, UNFUSED), attention_forward(got, LIBRARY);
    for (int n = 2; n < 7 && !backward; ++n) got->present[attention_outputs[n]] = false;
    if (backward)
        attention_backward(want, REFERENCE), attention_backward(low, UNFUSED), attention_backward(got, LIBRARY);
    attention_match_16_bits(got, want, low);
    attention_free(got);
    attention_free(want);
    attention_free(low);
}

static void check_on(const attention_case *c, const expected *e, fattn_ctx *ctx, bool backward,
                     void (*change)(attention *a), fattn_tolerance given, other_device *on_device) {
    const enum engine by = on_device ? ON_DEVICE : LIBRARY;
    char name[128];
    snprintf(name, sizeof name, "%s, %s, %d threads", c->name, fattni_isa_name(ctx->isa), ctx->cpu_threads);
    attention_case named = *c;
    named.name = name;
    if (by == LIBRARY && given.rtol == 0 && fattni_cpu_kernels_of(ctx, c->dtype)->round) {
        check_rounded(ctx, &named, backward, change);
        return;
    }
    attention *const got = attention_new(ctx, &named);
    got->on_device = on_device;
    if (change) change(got);
    attention_forward(got, by);
    match(got, e, 0, 2, given);
    if (backward) {
        if (e->rounded) copy(got, e->rounded, T_O);
        attention_backward(got, by);
        match(got, e, 2, 7, given);
    }
    attention_free(got);
}

void tiles_check_changed(const attention_case *given, bool backward, void (*change)(attention *a),
                         fattn_tolerance tol) {
    fattn_ctx *const one = attention_context(1);
    attention_case c = *given;
    if (!c.dtype) c.dtype = FATTN_F64;
    if (c.flags & FATTN_MERGE) c.wide = true; /* a partial result is F32 or F64 */
    expected e = expect(one, &c, backward, change);
    for (int isa = FATTNI_ISA_BASELINE; isa <= FATTNI_ISA_AMXFP16; ++isa)
        for (int threads = 1; threads <= 16; threads += 15) { /* backward: one pass; chains, or two */
            fattn_ctx *const ctx = attention_context_isa(threads, isa);
            if (!ctx) continue;
            if (threads == 1 || isa == one->isa) /* with 16 only the best instruction set */
                check_on(&c, &e, ctx, backward, change, tol, NULL);
            fattn_ctx_destroy(ctx);
        }
    expected_free(&e);
    fattn_ctx_destroy(one);
}

void tiles_check_random(int first, int count) {
    static const int thread_counts[] = {1, 2, 3, 8, 16};
    fattn_ctx *const one = attention_context(1);
    for (int n = first; n < first + count; ++n) {
        char name[32];
        attention_case c = tiles_random(n);
        snprintf(name, sizeof name, "random %d", n);
        c.name = name;
        fattn_ctx *ctx = attention_context_isa(thread_counts[n % 5], FATTNI_ISA_BASELINE + n % 7 % 5);
        if (!ctx) ctx = attention_context(thread_counts[n % 5]);
        expected e = expect(one, &c, true, NULL);
        check_on(&c, &e, ctx, true, NULL, (fattn_tolerance){0}, NULL);
        expected_free(&e);
        fattn_ctx_destroy(ctx);
    }
    fattn_ctx_destroy(one);
}

void tiles_check_forward(const attention_case *c) {
    attention_case only = *c;
    only.omit = NO_DQ | NO_DK | NO_DV | NO_DBIAS | NO_DSINK;
    tiles_check_changed(&only, false, NULL, (fattn_tolerance){0});
}

void tiles_check_backward(const attention_case *c) { tiles_check_changed(c, true, NULL, (fattn_tolerance){0}); }

void tiles_check_on_device(const attention_case *c, other_device *on_device) {
    fattn_ctx *const ctx = attention_context(1);
    expected e = expect(ctx, c, true, NULL);
    check_on(c, &e, ctx, true, NULL, (fattn_tolerance){0}, on_device);
    expected_free(&e);
    fattn_ctx_destroy(ctx);
}

void tiles_fill(attention *a, enum tensor_id id, double x) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[id]); ++n) {
        attention_index(&a->t[id], n, at);
        attention_set(&a->t[id], at, x);
    }
}
