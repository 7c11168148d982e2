/* How far FATTN_FP8 is from fp64 on the original inputs: by distribution, beside an emulation in fp64; and hard cases
   that other libraries have failed. */
#include "fp8.h"
#include "thinned.h"

#include "core/attention/ref.h"
#include "core/tensor/normal.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Element by element, q, k or v. */
typedef double change(double x, int64_t row, int64_t d, int64_t count);

static void apply(attention *a, enum tensor_id id, change *to) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[id]); ++n) {
        attention_index(&a->t[id], n, at);
        attention_set(&a->t[id], at, to(attention_get(&a->t[id], at), at[2], at[3], n));
    }
}

/* ---- results ---- */

typedef struct results {
    double *o, *lse;
} results;

static void free_results(results *r) { free(r->o), free(r->lse); }

static results emulated(const attention *a) {
    const results r = {fp8_values(a, T_O), fp8_values(a, T_LSE)};
    fp8_numbers n = fp8_numbers_of(a);
    fp8_model(a, &n, r.o, r.lse, NULL);
    fp8_numbers_free(&n);
    return r;
}

static results exact(attention *a) {
    const uint32_t flags = a->c.flags;
    a->c.flags &= ~(uint32_t)(FATTN_FP8 | FATTN_FP8_HADAMARD | FATTN_FP8_INT8);
    attention *const twin = attention_twin(a, FATTN_F64);
    a->c.flags = flags;
    attention_forward(twin, REFERENCE);
    const results r = {fp8_values(twin, T_O), fp8_values(twin, T_LSE)};
    attention_free(twin);
    return r;
}

static results computed(attention *a) {
    attention_forward(a, LIBRARY);
    return (results){fp8_values(a, T_O), fp8_values(a, T_LSE)};
}

/* Of L: a standard deviation. */
static double spread(const attention *a, const double *x, const double *want) {
    const int64_t rows = fattn_tensor_numel(&a->t[T_LSE]);
    double sum = 0;
    for (int64_t i = 0; i < rows; ++i) sum += (x[i] - want[i]) * (x[i] - want[i]);
    return sqrt(sum / (double)rows);
}

/* The library is at most 5 % further off than the emulation, which rounds the same numbers in fp64, up to the last
   rounding of O or, of O in F32, that of partial sums over keys: a random walk. */
static void compare(attention *a, double *o_off, double *lse_off) {
    results want = exact(a), emulation = emulated(a), got = computed(a);
    *o_off = fp8_error(a, T_O, got.o, want.o), *lse_off = spread(a, got.lse, want.lse);
    const double most_o = fp8_error(a, T_O, emulation.o, want.o), most = spread(a, emulation.lse, want.lse);
    const double u = a->t[T_O].dtype == FATTN_F32    ? 100 * 0x1p-24 * sqrt((double)a->c.Sk)
                     : a->t[T_O].dtype == FATTN_BF16 ? 0.2
                                                     : 0.025;
    cr_assert(*o_off <= sqrt(most_o * most_o * 1.1025 + u * u), "%s: O is off by %g %%, the emulation by %g %%",
              a->c.name, *o_off, most_o);
    cr_assert(*lse_off <= 1.05 * most + 1e-5, "%s: L is off by %g, the emulation by %g", a->c.name, *lse_off, most);
    free_results(&want), free_results(&emulation), free_results(&got);
}

/* ---- distributions ---- */

/* FlashAttention-3's: one of a thousand numbers has ten times the size. */
static double outlier(double x, int64_t row, int64_t d, int64_t count) {
    (void)row, (void)d;
    const fattn_rng rng = {.seed = 11, .stream = 1}, which = {.seed = 12, .stream = 2};
    return fabs(fattni_normal_at(&which, count)) > 3.2905 ? x + 10 * fattni_normal_at(&rng, count) : x;
}
static double channels(double x, int64_t row, int64_t d, int64_t count) {
    (void)row, (void)count;
    return d % 32 == 5 ? x + (d % 64 < 32 ? 10 : -10) : x;
}
static double half_more(double x, int64_t row, int64_t d, int64_t count) {
    (void)row, (void)d, (void)count;
    return x + 0.5;
}
static double thrice(double x, int64_t row, int64_t d, int64_t count) {
    (void)row, (void)d, (void)count;
    return 3 * x;
}

typedef struct distribution {
    const char *name;
    change *q, *k, *v;
    int64_t keys;
    double plain, rotated, integers, integers_rotated; /* O's error in percent: NUMERICS.md, and a tenth of it */
} distribution;
static const distribution distributions[] = {
    {"gaussian", NULL, NULL, NULL, 1024, 5.5, 5.4, 3.7, 3.7},
    {"gaussian, long", NULL, NULL, NULL, 16384, 5.6, 5.7, 3.95, 3.95},
    {"outliers", outlier, outlier, outlier, 4096, 6.2, 5.7, 3.1, 2.1},
    {"channel means", NULL, channels, half_more, 16384, 0.145, 0.145, 0.1, 0.1},
    {"large q", thrice, NULL, NULL, 4096, 9.7, 9.5, 4, 4},
};

Test(fp8_accuracy, by_distribution, .timeout = 900) {
    fattn_ctx *const ctx = attention_context(0);
    for (size_t n = 0; n < sizeof distributions / sizeof *distributions; n += THINNED(4))
        for (int way = 0; way < 4; ++way) {
            const bool rotated = way % 2, integers = way / 2;
            const distribution *const x = &distributions[n];
            const attention_case c = {x->name,
                                      .B = 1,
                                      .Hq = 1,
                                      .Sq = 128,
                                      .Sk = x->keys,
                                      .D = 128,
                                      .dtype = FATTN_BF16,
                                      .wide = true,
                                      .flags = FATTN_FP8 | (rotated ? FATTN_FP8_HADAMARD : 0u) |
                                               (integers ? FATTN_FP8_INT8 : 0u)};
            const double most[4] = {x->plain, x->rotated, x->integers, x->integers_rotated};
            attention *const a = attention_new(ctx, &c);
            if (x->q) apply(a, T_Q, x->q);
            if (x->k) apply(a, T_K, x->k);
            if (x->v) apply(a, T_V, x->v);
            double o_off, lse_off;
            compare(a, &o_off, &lse_off);
            printf("%s%s%s: O %.3g %%, L %.3g\n", x->name, rotated ? ", rotated" : "", integers ? ", int8" : "", o_off,
                   lse_off);
            cr_assert(o_off <= most[way], "%s: O is off by %g %%", x->name, o_off);
            attention_free(a);
        }
    fattn_ctx_destroy(ctx);
}

/* Of all scores of a call, as norms, and of L. */
typedef struct score_errors {
    double s, expected, lse; /* in percent, of S; of L */
} score_errors;

/* Of q_scale q8.k_scale k8 against q.k of the numbers before rounding. expected: of errors of both that are uniform in
   steps of 1, as with integers, and independent. */
static score_errors errors_of_scores(attention *a) {
    fp8_numbers n = fp8_numbers_of(a);
    const int64_t D = a->c.D, Sq = a->c.Sq, Sk = a->c.Sk;
    double off = 0, expected = 0, size = 0;
    for (int64_t i = 0; i < Sq; ++i)
        for (int64_t j = 0; j < Sk; ++j) {
            const double unit = n.q_scale[i] * n.k_scale[j];
            double s = 0, rounded = 0;
            for (int64_t d = 0; d < D; ++d) {
                const double q = n.q[i * D + d], k = n.k[j * D + d];
                s += unit * q * k, rounded += unit * n.q8[i * D + d] * n.k8[j * D + d];
                expected += unit * unit * (q * q + k * k + 1 / 12.0) / 12;
            }
            size += s * s, off += (rounded - s) * (rounded - s);
        }
    results got = computed(a), want = exact(a);
    const score_errors e = {100 * sqrt(off / size), 100 * sqrt(expected / size), spread(a, got.lse, want.lse)};
    free_results(&want), free_results(&got);
    fp8_numbers_free(&n);
    return e;
}

/* Integers make the errors of uniform steps. The largest of D or 32 D normal numbers is 2.4 to 4.2 deviations, so that
   these are 0.6 to 1 % of a number of q or k: less than a third of E4M3's 2.6 % in scores, and a fourth in L. */
Test(fp8_accuracy, integer_scores, .timeout = 200) {
    fattn_ctx *const ctx = attention_context(0);
    for (int n = 0; n < 4; ++n) {
        const int64_t D = (const int64_t[4]){64, 128, 256, 80}[n];
        attention_case c = {"integer scores",    .B = 1,      .Hq = 1, .Sq = 128, .Sk = 1000, .D = D,
                            .dtype = FATTN_BF16, .wide = true};
        score_errors e[2];
        for (int integers = 0; integers < 2; ++integers) {
            c.flags = FATTN_FP8 | (integers ? FATTN_FP8_INT8 : 0u);
            attention *const a = attention_new(ctx, &c);
            e[integers] = errors_of_scores(a);
            attention_free(a);
        }
        printf("D %d: S %.3g %% (expected %.3g %%), L %.3g; E4M3 %.3g %%, %.3g\n", (int)D, e[1].s, e[1].expected,
               e[1].lse, e[0].s, e[0].lse);
        cr_assert(fabs(e[1].s / e[1].expected - 1) < 0.02, "D %d: S is off by %g %%, expected are %g %%", (int)D,
                  e[1].s, e[1].expected);
        cr_assert(3 * e[1].s < e[0].s && 4 * e[1].lse < e[0].lse, "D %d: S is off by %g %%, with E4M3 by %g %%", (int)D,
                  e[1].s, e[0].s);
    }
    fattn_ctx_destroy(ctx);
}

/* ---- hard cases ---- */

static attention *case_new(fattn_ctx *ctx, const char *name, int64_t Sq, int64_t Sk, int64_t D, uint32_t flags) {
    const attention_case c = {name,
                              .B = 1,
                              .Hq = 1,
                              .Sq = Sq,
                              .Sk = Sk,
                              .D = D,
                              .dtype = FATTN_BF16,
                              .wide = true,
                              .flags = flags | FATTN_FP8};
    return attention_new(ctx, &c);
}

static void fill(attention *a, enum tensor_id id, double x) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[id]); ++n) {
        attention_index(&a->t[id], n, at);
        attention_set(&a->t[id], at, x);
    }
}

static void set(attention *a, enum tensor_id id, int64_t row, int64_t d, double x) {
    const int64_t at[4] = {0, 0, row, d};
    attention_set(&a->t[id], at, x);
}

/* Whatever the weights are, sums of no code but 0 are 0. */
Test(fp8_accuracy, equal_values_are_exact) {
    fattn_ctx *const ctx = attention_context(1);
    static const double values[3] = {1, -0.75, 384};
    for (int n = 0; n < 3; ++n) {
        attention *const a = case_new(ctx, "equal values", 100, 1000, 64, n ? FATTN_CAUSAL : 0);
        fill(a, T_V, values[n]);
        results got = computed(a);
        for (int64_t e = 0; e < 100 * 64; ++e) cr_assert_eq(got.o[e], values[n], "%g, not %g", got.o[e], values[n]);
        free_results(&got);
        attention_free(a);
    }
    fattn_ctx_destroy(ctx);
}

/* Errors are those of what values differ by, however large their mean is. */
Test(fp8_accuracy, values_around_one) {
    fattn_ctx *const ctx = attention_context(0);
    attention *const a = case_new(ctx, "values around one", 64, 4096, 64, 0), *const same =
                                                                                  case_new(ctx, "", 64, 4096, 64, 0);
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < 4096 * 64; ++n) { /* exact in BF16 beside 1 */
        attention_index(&a->t[T_V], n, at);
        const double x = rint(fmax(-4, fmin(4, attention_get(&a->t[T_V], at)))) / 128;
        attention_set(&same->t[T_V], at, x);
        attention_set(&a->t[T_V], at, 1 + x);
    }
    results got = computed(a), want = exact(a), around_0 = exact(same), off = computed(same);
    double error = 0, error_0 = 0;
    for (int64_t e = 0; e < 64 * 64; ++e) {
        error = fmax(error, fabs(got.o[e] - want.o[e]));
        error_0 = fmax(error_0, fabs(off.o[e] - around_0.o[e]));
    }
    cr_assert(error <= 1.05 * error_0 + 1e-6, "off by %g, around 0 by %g", error, error_0);
    free_results(&got), free_results(&want), free_results(&around_0), free_results(&off);
    attention_free(a), attention_free(same);
    fattn_ctx_destroy(ctx);
}

/* The maximum rises by `rise` at key 128, and falls again: sums and P are relative to different ones. */
Test(fp8_accuracy, a_key_above_all_before) {
    fattn_ctx *const ctx = attention_context(1);
    static const double rises[4] = {1, 5, 12, 60};
    for (int n = 0; n < 4; ++n) {
        attention *const a = case_new(ctx, "a key above all before", 33, 300, 64, 0);
        double o_off, lse_off;
        for (int64_t i = 0; i < 33; ++i) set(a, T_Q, i, 0, 8);
        for (int64_t j = 0; j < 300; ++j) set(a, T_K, j, 0, j == 128 ? rises[n] : 0); /* q.k / 8 */
        compare(a, &o_off, &lse_off);
        cr_assert(o_off <= 8, "%g: O is off by %g %%", rises[n], o_off);
        attention_free(a);
    }
    fattn_ctx_destroy(ctx);
}

/* One key has most of the weight and no value, so that O is the sum of weights of 1e-5 each. P in units of 2^-15 would
   lose them if a larger maximum came first (flash-attention's issue 2731). */
Test(fp8_accuracy, many_small_weights_beside_a_large_one) {
    fattn_ctx *const ctx = attention_context(0);
    for (int first = 0; first < 2; ++first) {
        const int64_t large = first ? 0 : 4095;
        attention *const a = case_new(ctx, "small weights", 16, 4096, 64, 0);
        double o_off, lse_off;
        fill(a, T_Q, 1), fill(a, T_K, 0), fill(a, T_V, 1);
        for (int64_t d = 0; d < 64; ++d) set(a, T_K, large, d, 1.25), set(a, T_V, large, d, 0); /* a score of 10 */
        compare(a, &o_off, &lse_off);
        cr_assert(o_off <= 4, "O is off by %g %%", o_off);
        attention_free(a);
    }
    fattn_ctx_destroy(ctx);
}

/* O of many keys is small beside its values, and has the mean of what rounding takes off these in full, unless v_mean
   makes up for it: for normal numbers of 16 bits some 2e-4, of an O of 1 / 200. */
Test(fp8_accuracy, many_keys) {
    fattn_ctx *const ctx = attention_context(0);
    attention *const a = case_new(ctx, "many keys", 16, 131072, 32, 0);
    double o_off, lse_off;
    compare(a, &o_off, &lse_off);
    printf("many keys: O %.3g %%\n", o_off);
    cr_assert(o_off <= 5.8, "O is off by %g %%", o_off);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* Key 0 attracts most of every row's weight and has a small value, as first tokens do. */
Test(fp8_accuracy, a_sink_at_key_0) {
    fattn_ctx *const ctx = attention_context(0);
    attention *const a = case_new(ctx, "sink at key 0", 300, 300, 128, FATTN_CAUSAL);
    double o_off, lse_off;
    for (int64_t i = 0; i < 300; ++i) set(a, T_Q, i, 3, 10);
    set(a, T_K, 0, 3, 8);
    for (int64_t d = 0; d < 128; ++d) set(a, T_V, 0, d, 0.01);
    compare(a, &o_off, &lse_off);
    cr_assert(o_off <= 10, "O is off by %g %%", o_off);
    attention_free(a);
    fattn_ctx_destroy(ctx);
}

/* Row i sees one key only, whose values are a column of ones and zeros elsewhere: a key or a column in the wrong place
   gives 0 where 1 should be. */
Test(fp8_accuracy, one_hot_keys_and_columns) {
    enum { N = 300, D = 64 };
    fattn_ctx *const ctx = attention_context(1);
    const attention_case c = {"one hot",
                              .B = 1,
                              .Hq = 1,
                              .Sq = N,
                              .Sk = N,
                              .D = D,
                              .dtype = FATTN_BF16,
                              .wide = true,
                              .flags = FATTN_FP8 | FATTN_WINDOW,
                              .window_left = 0,
                              .window_right = 0};
    for (int by_scores = 0; by_scores < 2; ++by_scores) {
        attention *const a = attention_new(ctx, &c);
        if (by_scores) a->params.flags &= ~(uint32_t)FATTN_WINDOW;
        fill(a, T_V, 0);
        for (int64_t i = 0; i < N; ++i) {
            set(a, T_V, i, i * 7 % D, 1);
            for (int64_t d = 0; d < D && by_scores; ++d) { /* 64 for the same word, else about 8 */
                const bool bit = fattni_philox(5, (fattni_block){{(uint32_t)i}}).w[d / 32] >> d % 32 & 1;
                set(a, T_K, i, d, bit ? 1 : -1);
                set(a, T_Q, i, d, bit ? 4 : -4);
            }
        }
        results got = computed(a);
        for (int64_t i = 0; i < N; ++i)
            for (int64_t d = 0; d < D; ++d) {
                const double want = d == i * 7 % D ? 1 : 0;
                cr_assert(fabs(got.o[i * D + d] - want) < 0.04, "row %d, column %d: %g", (int)i, (int)d,
                          got.o[i * D + d]);
            }
        free_results(&got);
        attention_free(a);
    }
    fattn_ctx_destroy(ctx);
}

/* A rotation keeps products: L is off by roundings alone. */
Test(fp8_accuracy, rotated_products_are_the_same) {
    fattn_ctx *const ctx = attention_context(1);
    for (int64_t D = 16; D <= 256; D *= 2) {
        attention *const a = case_new(ctx, "plain", 40, 500, D, 0);
        attention *const b = case_new(ctx, "rotated", 40, 500, D, FATTN_FP8_HADAMARD);
        results plain = computed(a), rotated = computed(b), want = exact(a);
        cr_assert(spread(a, plain.lse, want.lse) < 1e-2 && spread(a, rotated.lse, want.lse) < 1e-2);
        cr_assert(spread(a, rotated.lse, plain.lse) < 1.5e-2, "%g", spread(a, rotated.lse, plain.lse));
        free_results(&plain), free_results(&rotated), free_results(&want);
        attention_free(a), attention_free(b);
    }
    fattn_ctx_destroy(ctx);
}

/* ---- gradients ---- */

static void put_row_major(attention *a, enum tensor_id id, const double *x) {
    int64_t at[FATTN_MAX_DIMS] = {0};
    for (int64_t n = 0; n < fattn_tensor_numel(&a->t[id]); ++n) {
        attention_index(&a->t[id], n, at);
        attention_set(&a->t[id], at, x[n]);
    }
}

/* With the O and L of this forward: rows of P sum to e^dL, and delta has O's error. As far off as backward in F64 with
   the emulation's O and L and, apart from that, as backward without FATTN_FP8, and 1.1 times that: what L is off by in
   a few rows makes most of it where numbers have outliers. With FATTN_FP8_RENEW as far off as without FATTN_FP8. Errors
   in percent, as norms; NUMERICS.md has them. */
Test(fp8_accuracy, gradients_by_distribution, .timeout = 900) {
    static const struct {
        const char *name;
        change *q, *k, *v;
        uint32_t flags;
    } rows[] = {{"gaussian", NULL, NULL, NULL, 0},
                {"gaussian, causal", NULL, NULL, NULL, FATTN_CAUSAL},
                {"outliers", outlier, outlier, outlier, 0},
                {"outliers, rotated", outlier, outlier, outlier, FATTN_FP8_HADAMARD},
                {"channel means", NULL, channels, half_more, 0},
                {"large q", thrice, NULL, NULL, 0},
                {"gaussian, int8", NULL, NULL, NULL, FATTN_FP8_INT8},
                {"outliers, int8", outlier, outlier, outlier, FATTN_FP8_INT8},
                {"large q, int8", thrice, NULL, NULL, FATTN_FP8_INT8}};
    static const enum tensor_id gradients[3] = {T_DQ, T_DK, T_DV};
    const int64_t N = 2048 / THINNED(4);
    fattn_ctx *const ctx = attention_context(0);
    for (size_t n = 0; n < sizeof rows / sizeof *rows; n += THINNED(5)) {
        const attention_case c = {rows[n].name,
                                  .B = 1,
                                  .Hq = 1,
                                  .Sq = N,
                                  .Sk = N,
                                  .D = 128,
                                  .dtype = FATTN_BF16,
                                  .flags = FATTN_FP8 | rows[n].flags};
        attention_case again = c, without = c;
        again.flags |= FATTN_FP8_RENEW,
            without.flags = rows[n].flags & ~(uint32_t)(FATTN_FP8_HADAMARD | FATTN_FP8_INT8);
        attention *const a = attention_new(ctx, &c), *const renewed = attention_new(ctx, &again),
                         *const plain = attention_new(ctx, &without), *const all[3] = {a, renewed, plain};
        for (int m = 0; m < 3; ++m) {
            if (rows[n].q) apply(all[m], T_Q, rows[n].q);
            if (rows[n].k) apply(all[m], T_K, rows[n].k);
            if (rows[n].v) apply(all[m], T_V, rows[n].v);
        }
        results emulation = emulated(a);
        a->c.flags &= ~(uint32_t)(FATTN_FP8 | FATTN_FP8_HADAMARD | FATTN_FP8_INT8);
        attention *const want = attention_twin(a, FATTN_F64), *const model = attention_twin(a, FATTN_F64);
        for (int m = 0; m < 3; ++m) attention_run(all[m], LIBRARY);
        attention_run(want, LIBRARY), attention_forward(model, LIBRARY);
        put_row_major(model, T_O, emulation.o), put_row_major(model, T_LSE, emulation.lse);
        attention_backward(model, LIBRARY);
        double off[3], most[3], off_renewed[3], off_plain[3];
        for (int m = 0; m < 3; ++m) {
            double *const x = fp8_values(a, gradients[m]), *const y = fp8_values(want, gradients[m]);
            double *const z = fp8_values(model, gradients[m]);
            off[m] = fp8_error(a, gradients[m], x, y), most[m] = fp8_error(a, gradients[m], z, y);
            double *const r = fp8_values(renewed, gradients[m]), *const s = fp8_values(plain, gradients[m]);
            off_renewed[m] = fp8_error(a, gradients[m], r, y), off_plain[m] = fp8_error(a, gradients[m], s, y);
            free(x), free(y), free(z), free(r), free(s);
        }
        printf("%s: dQ %.3g %%, dK %.3g %%, dV %.3g %%; renewed %.3g %%, %.3g %%, %.3g %%\n", rows[n].name, off[0],
               off[1], off[2], off_renewed[0], off_renewed[1], off_renewed[2]);
        for (int m = 0; m < 3; ++m) {
            cr_assert_eq(off_renewed[m], off_plain[m], "%s: %s renewed is off by %g %%, without FP8 by %g %%",
                         rows[n].name, attention_names[gradients[m]], off_renewed[m], off_plain[m]);
            cr_assert(off[m] <= 1.1 * hypot(most[m], off_plain[m]), "%s: %s is off by %g %%, the emulation by %g %%",
                      rows[n].name, attention_names[gradients[m]], off[m], most[m]);
        }
        free_results(&emulation);
        for (int m = 0; m < 3; ++m) attention_free(all[m]);
        attention_free(want), attention_free(model);
    }
    fattn_ctx_destroy(ctx);
}
