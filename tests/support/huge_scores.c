#include "huge_scores.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>

enum source { ON_BIAS, ON_ALIBI, ON_SCORES, ON_SINK, ON_CAP, SOURCES };
static const char *const source_names[SOURCES] = {"bias", "alibi", "q.k", "sink", "softcap"};

/* Powers of two: 1.6e4 to 1.7e38. */
static const int exponents[] = {14, 17, 20, 23, 27, 30, 33, 40, 66, 100, 127};
enum { EXPONENTS = sizeof exponents / sizeof exponents[0], SHAPES = 5 };

const int huge_case_count = SOURCES * EXPONENTS * 2 * SHAPES;

static enum source source_of(int n) { return (enum source)(n % SOURCES); }
static int exponent_of(int n) { return exponents[n / SOURCES % EXPONENTS]; }
static int sign_of(int n) { return n / SOURCES / EXPONENTS % 2 ? 1 : -1; }
static int shape_of(int n) { return n / SOURCES / EXPONENTS / 2; }

/* The largest exponent that the dtype can hold, also when multiplied by distances. */
static int exponent_for(int n, fattn_dtype dtype) {
    const int most = source_of(n) == ON_ALIBI ? 118 : source_of(n) == ON_SCORES ? 120 : 127;
    const int of_dtype = dtype == FATTN_F16 && source_of(n) == ON_SCORES ? 31 : most; /* 1.5 2^15 */
    const int exponent = exponent_of(n);
    return exponent < of_dtype ? exponent : of_dtype;
}

attention_case huge_case(int n, int64_t D, fattn_dtype dtype) {
    static char name[96];
    attention_case c = {
        .name = name, .dtype = dtype, .B = 1, .Hq = 2, .Hkv = 1, .Sq = 150, .Sk = 203, .D = D, .scale = 0.25f};
    snprintf(name, sizeof name, "huge %d: %s of %c2^%d, d %d", n, source_names[source_of(n)],
             sign_of(n) < 0 ? '-' : '+', exponent_for(n, dtype), (int)D);
    switch (source_of(n)) {
    case ON_BIAS: c.bias = BIAS | BIAS_F32 | (shape_of(n) % 2 ? BIAS_OVER_H : 0); break;
    case ON_ALIBI: c.alibi = true; break;
    case ON_SINK: c.sink = true, c.bias = BIAS | BIAS_F32; break;
    case ON_CAP: c.softcap = (float)ldexp(1, exponent_for(n, dtype)); break;
    default: break;
    }
    switch (shape_of(n)) {
    case 1: c.flags |= FATTN_CAUSAL; break;
    case 2: c.flags |= FATTN_WINDOW, c.window_left = 40, c.window_right = 33, c.dropout_p = 0.25f; break;
    case 3:
        c.B = 2, c.lengths = LENGTHS_PACKED, c.flags |= FATTN_CAUSAL, c.d_lse = true, c.sink = true;
        c.length_q[0] = 70, c.length_q[1] = 150, c.length_k[0] = 203, c.length_k[1] = 131;
        break;
    case 4: c.wide = dtype == FATTN_F16 || dtype == FATTN_BF16, c.Dv = D > 8 ? D - 8 : D; break;
    default: break;
    }
    return c;
}

static uint32_t scatter(const int64_t *at, uint32_t salt) {
    uint32_t x = salt;
    for (int d = 0; d < 4; ++d) x = (x ^ (uint32_t)at[d]) * 0x9e3779b1u, x ^= x >> 15;
    return x;
}

typedef double value(int n, const attention *a, const int64_t *at);
static void set_all(int n, attention *a, enum tensor_id id, value *of) {
    const fattn_tensor *const t = &a->t[id];
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t e = 0; a->present[id] && e < fattn_tensor_numel(t); ++e) {
        attention_index(t, e, at);
        if (attention_in_use(a, id, at)) attention_set(t, at, of(n, a, at));
    }
}

/* A row's entries are mostly 0, so that a score is a small multiple of 1/4. For q.k = 2^x, q and k each have
   a part of the exponent. */
static double q_or_k(int n, const attention *a, const int64_t *at, uint32_t salt) {
    const int exponent = exponent_for(n, a->c.dtype);
    const int share = source_of(n) == ON_SCORES ? exponent / 2 : 0;
    const int digit = (int)(scatter(at, salt) % 16) - 8; /* -1, 0 or 1; one in eight is not 0 */
    const double x = digit == 0 ? 1 : digit == 1 ? -1 : 0;
    /* Column 0 gives every row its sign and scores of the requested size. */
    if (at[3] == 0 && source_of(n) == ON_SCORES) {
        const double one = salt == 1 ? (double)sign_of(n) : 1 + (double)(scatter(at, salt) % 3) / 4;
        return ldexp(one, share);
    }
    return source_of(n) == ON_SCORES ? 0 : x;
}
static double of_q(int n, const attention *a, const int64_t *at) { return q_or_k(n, a, at, 1); }
static double of_k(int n, const attention *a, const int64_t *at) { return q_or_k(n, a, at, 2); }

/* In the first half of the rows all keys are masked, some more than others; in the other rows a few keys. With
   a sink, all rows are like the first half. */
static double of_bias(int n, const attention *a, const int64_t *at) {
    const double far = ldexp((double)sign_of(n), exponent_for(n, a->c.dtype) - 1);
    const int whole = at[2] < a->c.Sq / 2 || source_of(n) == ON_SINK;
    if (whole) return far * (1 + (double)(scatter(at, 3) % 3) / 4);
    return scatter(at, 4) % 5 == 0 ? -fabs(far) : (double)(scatter(at, 5) % 4) / 4;
}
static double of_alibi(int n, const attention *a, const int64_t *at) {
    return ldexp(at[0] ? (double)sign_of(n) : 0.5, exponent_for(n, a->c.dtype));
}
static double of_sink(int n, const attention *a, const int64_t *at) {
    const double far = ldexp((double)sign_of(n), exponent_for(n, a->c.dtype) - 1);
    return source_of(n) == ON_SINK ? far * (at[0] ? 1.5 : 1) : 0.5;
}
static double of_one(int n, const attention *a, const int64_t *at) {
    (void)n, (void)a, (void)at;
    return 1;
}

static void change(int n, attention *a) {
    set_all(n, a, T_Q, of_q);
    set_all(n, a, T_K, of_k);
    set_all(n, a, T_BIAS, of_bias);
    set_all(n, a, T_ALIBI, of_alibi);
    set_all(n, a, T_SINK, of_sink);
}

static double largest(const attention *a, enum tensor_id id) {
    const fattn_tensor *const t = &a->t[id];
    int64_t at[FATTN_MAX_DIMS] = {0};
    double most = 0;
    for (int64_t e = 0; a->present[id] && e < fattn_tensor_numel(t); ++e) {
        attention_index(t, e, at);
        if (attention_in_use(a, id, at)) most = fmax(most, fabs(attention_get(t, at)));
    }
    return most;
}

/* The scale of an element's error, in ulps of the dtype: the size of the terms of its sum, whose roundings are a
   random walk over rows. Both sides round P and O. dP and delta have terms of size dO V. */
static double scale_of(const attention *a, enum tensor_id id) {
    const double rows = sqrt((double)(a->c.B * a->c.Hq * a->c.Sq)), keys = sqrt((double)a->c.Sk);
    const double kept = 1 / (1 - (double)a->c.dropout_p), dp = 4 * sqrt((double)a->c.Dv) * kept;
    switch (id) {
    case T_O: return 1.5 * kept * largest(a, T_V);
    case T_LSE: return 1; /* relative, see below */
    case T_DQ: return 0.25 * largest(a, T_K) * dp * keys;
    case T_DK: return 0.25 * largest(a, T_Q) * dp * rows;
    case T_DV: return 4 * kept * rows;
    default: return dp * rows;
    }
}

static double half_unit(fattn_dtype dtype) {
    return dtype == FATTN_F64 ? 0x1p-50 : dtype == FATTN_F32 ? 0x1p-22 : dtype == FATTN_F16 ? 0x1p-11 : 0x1p-8;
}

static void compare(const attention *got, const attention *want, enum tensor_id id) {
    if (!got->present[id]) return;
    const double bound = 2 * half_unit((fattn_dtype)got->c.dtype) * scale_of(got, id);
    const double relative = id == T_LSE ? (got->t[id].dtype == FATTN_F64 ? 0x1p-50 : 0x1p-22) : 0;
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t e = 0; e < fattn_tensor_numel(&got->t[id]); ++e) {
        attention_index(&got->t[id], e, at);
        if (!attention_in_use(got, id, at)) continue;
        const double x = attention_get(&got->t[id], at), y = attention_get(&want->t[id], at);
        const double most = id == T_LSE ? relative * (8 + fabs(y)) : bound;
        if (x == y || fabs(x - y) <= most) continue; /* an assertion takes microseconds */
        cr_assert_fail("%s, %s: %s[%d,%d,%d,%d] is %.8g, STANDARD has %.8g, %.3g apart, bound %.3g", got->c.name,
                       fattn_dtype_name(got->c.dtype), attention_names[id], (int)at[0], (int)at[1], (int)at[2],
                       (int)at[3], x, y, fabs(x - y), most);
    }
}

/* With dO = 1 and no dropout a row whose P sums to 1 gives dV a mass of 1 in each column. */
static void check_mass(attention *a, enum engine by) {
    set_all(0, a, T_D_O, of_one);
    attention_run(a, by);
    double mass = 0, rows = 0;
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t e = 0; e < fattn_tensor_numel(&a->t[T_DV]); ++e) {
        attention_index(&a->t[T_DV], e, at);
        if (at[3] == 0 && attention_in_use(a, T_DV, at)) mass += attention_get(&a->t[T_DV], at);
    }
    /* Each row: roundings of P, and of L where backward uses only L (core/attention/huge.h). */
    const double ulp = a->c.dtype == FATTN_F64 ? 0x1p-52 : 0x1p-23;
    double most = 0;
    for (int64_t e = 0; e < fattn_tensor_numel(&a->t[T_LSE]); ++e) {
        attention_index(&a->t[T_LSE], e, at);
        if (!attention_in_use(a, T_LSE, at)) continue;
        const double L = attention_get(&a->t[T_LSE], at);
        if (L == -INFINITY) continue;
        rows += 1;
        most += half_unit((fattn_dtype)a->c.dtype) + ulp * (8 + 2 * fmin(fabs(L), 1024));
    }
    cr_assert_float_eq(mass, rows, most, "%s, %s: weights of %g rows sum to %.17g, bound %.3g", a->c.name,
                       fattn_dtype_name(a->c.dtype), rows, mass, most);
}

void huge_check(fattn_ctx *ctx, int n, const attention_case *c, enum engine by,
                fattn_status (*on_device)(attention *a, enum fattni_pass pass)) {
    attention_case standard = *c;
    standard.algorithm = FATTN_ALGO_STANDARD;
    attention *const got = attention_new(ctx, c), *const want = attention_new(ctx, &standard);
    change(n, got);
    change(n, want);
    got->on_device = want->on_device = on_device;
    attention_run(got, by);
    attention_run(want, by);
    for (int k = 0; k < 7; ++k) compare(got, want, attention_outputs[k]);
    if (c->dropout_p == 0 && !c->sink && got->present[T_DV]) check_mass(got, by);
    attention_free(got);
    attention_free(want);
}

/* Calls that merge into a result over other keys, whose share of a row goes down to 1e-4. */
void huge_check_parts(fattn_ctx *ctx, enum engine by, fattn_status (*on_device)(attention *a, enum fattni_pass pass)) {
    static const double levels[] = {1100, 1e4, -1e4, 1e6};
    for (int n = 0; n < 16; ++n) {
        const double level = levels[n / 4], behind = 3 * (n % 4);
        char name[64];
        snprintf(name, sizeof name, "a part of L %g, the others' %g below", level, behind);
        const attention_case c = {.name = name,
                                  .dtype = FATTN_F64,
                                  .B = 1,
                                  .Hq = 2,
                                  .Hkv = 1,
                                  .Sq = 70,
                                  .Sk = 90,
                                  .D = 16,
                                  .bias = BIAS | BIAS_OVER_H,
                                  .sink = n % 2,
                                  .flags = FATTN_MERGE | (n % 8 > 3 ? (uint32_t)FATTN_CAUSAL : 0u)};
        attention *const got = attention_new(ctx, &c);
        int64_t at[FATTN_MAX_DIMS] = {0};
        for (int64_t e = 0; e < fattn_tensor_numel(&got->t[T_BIAS]); ++e) {
            attention_index(&got->t[T_BIAS], e, at);
            attention_set(&got->t[T_BIAS], at, level + attention_get(&got->t[T_BIAS], at));
        }
        attention *const want = attention_twin(got, FATTN_F64);
        attention_start(got, T_LSE, level + 4.5 - behind); /* 90 scores are 4.5 above their size */
        attention_start(want, T_LSE, level + 4.5 - behind);
        got->on_device = on_device;
        attention_run(got, by);
        attention_run(want, REFERENCE);
        attention_match_rounded(got, want);
        attention_free(got);
        attention_free(want);
    }
}
