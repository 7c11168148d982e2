/* fattn_sample on the CPU: every token against a sort of all, frequencies, what top_k and top_p leave, refusals. */
#include "attention.h"
#include "sampling.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdbool.h>
#include <string.h>

static fattn_ctx *ctx;
static void begin(void) { ctx = attention_context(2); }
static void end(void) {
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0u);
    fattn_ctx_destroy(ctx);
}
TestSuite(sample, .init = begin, .fini = end);

Test(sample, cases) {
    for (int n = 0; n < SAMPLING_CASES; ++n) sampling_check(ctx, n);
    for (int n = 0; n < SAMPLING_LARGE; ++n) sampling_check_large(ctx, n);
}
Test(sample, rows_without_a_choice) { sampling_check_bad_rows(ctx); }

Test(sample, chooses_by_probability) {
    enum { N = 4, DRAWS = 40000 };
    const float logits[N] = {0, 1, 2, -1};
    const sampling_rule o = {.temperature = 2, .rng = {.seed = 5}}, greedy = {.temperature = 0},
                        two = {.temperature = 2, .top_k = 2, .rng = {.seed = 5}};
    int count[N] = {0}, count_two[N] = {0};
    double p[N], sum = 0;
    for (int i = 0; i < N; ++i) sum += p[i] = exp(logits[i] / 2);
    for (int32_t i = 0; i < DRAWS; ++i) {
        count[sampling_of_row(ctx, logits, N, &o, i)] += 1;
        count_two[sampling_of_row(ctx, logits, N, &two, i)] += 1;
    }
    for (int i = 0; i < N; ++i) {
        const double mean = DRAWS * p[i] / sum, sigma = sqrt(mean * (1 - p[i] / sum));
        cr_assert_float_eq(count[i], mean, 5 * sigma, "symbol %d: %d, not %g", i, count[i], mean);
    }
    cr_assert(count_two[0] == 0 && count_two[3] == 0 && count_two[1] > 0);
    cr_assert_eq(sampling_of_row(ctx, logits, N, &greedy, 0), 2);
}

/* Which of n symbols 2000 draws choose, as bits. */
static unsigned chosen(const float *logits, int64_t n, sampling_rule o) {
    unsigned bits = 0;
    if (o.temperature == 0) o.temperature = 1;
    for (int32_t i = 0; i < 2000; ++i) bits |= 1u << sampling_of_row(ctx, logits, n, &o, i);
    return bits;
}

/* The number of symbols that come before i. */
static int64_t place_of(const float *logits, int64_t n, int64_t i) {
    int64_t before = 0;
    for (int64_t j = 0; j < n; ++j) before += logits[j] > logits[i] || (logits[j] == logits[i] && j < i);
    return before;
}

/* Many symbols, among them equal ones, at a temperature at which all that are left are drawn. */
Test(sample, top_k_and_top_p_of_many_symbols) {
    enum { N = 1500, DRAWS = 2000 };
    float logits[N];
    int32_t at[N];
    bool drawn[N];
    for (int64_t i = 0; i < N; ++i) logits[i] = (float)(i * 7919 % 1009) / 1000 + (i % 64 == 5 ? 1.0f : 0.0f);
    for (int64_t i = 0; i < N; ++i) at[place_of(logits, N, i)] = (int32_t)i;
    double mass = 0, sum = 0;
    for (int64_t i = 0; i < N; ++i) mass += exp((double)logits[i] / 8);
    int64_t nucleus = 0;
    while (sum < 0.02 * mass) sum += exp((double)logits[at[nucleus++]] / 8);
    const struct {
        sampling_rule o;
        int64_t left;
    } cases[] = {{{.temperature = 8, .top_k = 1}, 1},
                 {{.temperature = 8, .top_k = 11}, 11},
                 {{.temperature = 8, .top_k = 40}, 40},
                 {{.temperature = 8, .top_p = 0.02}, nucleus},
                 {{.temperature = 8, .top_k = 11, .top_p = 0.999999}, 11}};
    for (size_t c = 0; c < sizeof cases / sizeof *cases; ++c) {
        memset(drawn, 0, sizeof drawn);
        for (int32_t i = 0; i < DRAWS; ++i) drawn[sampling_of_row(ctx, logits, N, &cases[c].o, i)] = true;
        for (int64_t i = 0; i < N; ++i)
            cr_assert_eq(drawn[at[i]], i < cases[c].left, "case %zu: symbol %d, number %lld of the likeliest", c, at[i],
                         (long long)i);
    }
}

Test(sample, top_k_and_top_p_leave_the_likeliest) {
    const float p[] = {logf(0.15f), logf(0.5f), logf(0.05f), logf(0.3f)}, equal[] = {1, 1, 1, 1, 1};
    cr_assert_eq(chosen(p, 4, (sampling_rule){0}), 0xf);
    cr_assert_eq(chosen(p, 4, (sampling_rule){.top_p = 1}), 0xf);
    cr_assert_eq(chosen(p, 4, (sampling_rule){.top_p = 1e-6}), 0x2);
    cr_assert_eq(chosen(p, 4, (sampling_rule){.top_p = 0.49}), 0x2);
    cr_assert_eq(chosen(p, 4, (sampling_rule){.top_p = 0.51}), 0xa);
    cr_assert_eq(chosen(p, 4, (sampling_rule){.top_p = 0.79}), 0xa);
    cr_assert_eq(chosen(p, 4, (sampling_rule){.top_p = 0.81}), 0xb);
    cr_assert_eq(chosen(p, 4, (sampling_rule){.top_p = 0.96}), 0xf);
    cr_assert_eq(chosen(p, 4, (sampling_rule){.top_k = 1}), 0x2);
    cr_assert_eq(chosen(p, 4, (sampling_rule){.top_k = 3}), 0xb);
    cr_assert_eq(chosen(p, 4, (sampling_rule){.top_k = 9}), 0xf);
    /* Top-k first: of the two the first has 0.625. */
    cr_assert_eq(chosen(p, 4, (sampling_rule){.top_k = 2, .top_p = 0.62}), 0x2);
    cr_assert_eq(chosen(p, 4, (sampling_rule){.top_k = 2, .top_p = 0.63}), 0xa);
    /* Temperature before both: square roots of 0.5 and 0.3 over those of all four have 0.38 and 0.29. */
    cr_assert_eq(chosen(p, 4, (sampling_rule){.temperature = 2, .top_p = 0.37}), 0x2);
    cr_assert_eq(chosen(p, 4, (sampling_rule){.temperature = 2, .top_p = 0.51}), 0xa);
    cr_assert_eq(chosen(p, 4, (sampling_rule){.temperature = 2, .top_p = 0.7}), 0xb);
    cr_assert_eq(chosen(equal, 5, (sampling_rule){.top_k = 2}), 0x3);
    cr_assert_eq(chosen(equal, 5, (sampling_rule){.top_p = 0.41}), 0x7);
}

/* ---- refusals ---- */

enum { B = 3, V = 40 };
static float x[B][V];
static int32_t draws[B], after[B], tokens[B];

static fattn_tensor view(void *p, fattn_dtype dtype, int ndim, int64_t rows, int64_t columns) {
    return fattn_tensor_view(p, dtype, FATTN_CPU, 0, ndim, (int64_t[]){rows, columns});
}

Test(sample, refused_calls) {
    fattn_tensor logits, d, a, t, same;
    fattn_sample_io io;
#define REFUSED(status, message, ...)                                                                                  \
    do {                                                                                                               \
        logits = view(x, FATTN_F32, 2, B, V), d = view(draws, FATTN_I32, 1, B, 0);                                     \
        a = view(after, FATTN_I32, 1, B, 0), t = same = view(tokens, FATTN_I32, 1, B, 0);                              \
        io = (fattn_sample_io){.struct_size = sizeof io,                                                               \
                               .temperature = 1,                                                                       \
                               .logits = &logits,                                                                      \
                               .draws = &d,                                                                            \
                               .draws_after = &a,                                                                      \
                               .tokens = &t};                                                                          \
        for (int n = 0; n < B; ++n) draws[n] = 7, after[n] = tokens[n] = -9;                                           \
        __VA_ARGS__;                                                                                                   \
        cr_assert_eq(fattn_sample(ctx, &io), status, "%s", fattn_ctx_error(ctx));                                      \
        cr_assert(strstr(fattn_ctx_error(ctx), message), "%s", fattn_ctx_error(ctx));                                  \
        for (int n = 0; n < B; ++n) cr_assert(after[n] == -9 && tokens[n] == -9);                                      \
    } while (0)
    cr_assert_eq(fattn_sample(NULL, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_sample(ctx, NULL), FATTN_E_ARG);
    REFUSED(FATTN_E_ABI, "fattn_sample_io", io.struct_size = 0);
    REFUSED(FATTN_E_ARG, "temperature: -1 is", io.temperature = -1);
    REFUSED(FATTN_E_ARG, "temperature: nan", io.temperature = (double)NAN);
    REFUSED(FATTN_E_ARG, "temperature: inf", io.temperature = INFINITY);
    REFUSED(FATTN_E_ARG, "temperature: 1e-310 is", io.temperature = 1e-310);
    REFUSED(FATTN_E_ARG, "top_k: -4 is negative", io.top_k = -4);
    REFUSED(FATTN_E_ARG, "top_p: 1.5 is not in 0..1", io.top_p = 1.5);
    REFUSED(FATTN_E_ARG, "top_p: nan", io.top_p = (double)NAN);
    REFUSED(FATTN_E_ARG, "rng.reserved: 2", io.rng.reserved = 2);
    REFUSED(FATTN_E_ARG, "logits", io.logits = NULL);
    REFUSED(FATTN_E_ARG, "tokens", io.tokens = NULL);
    REFUSED(FATTN_E_ARG, "draws_after without draws", io.draws = NULL);
    REFUSED(FATTN_E_DTYPE, "logits: is i32", logits.dtype = FATTN_I32);
    REFUSED(FATTN_E_DTYPE, "draws: is f32", d.dtype = FATTN_F32);
    REFUSED(FATTN_E_DTYPE, "tokens: is f32", t.dtype = FATTN_F32);
    REFUSED(FATTN_E_SHAPE, "logits: is [3,40,1]", logits.ndim = 3, logits.shape[2] = 1);
    REFUSED(FATTN_E_SHAPE, "logits: is [3,0]", logits.shape[1] = 0);
    REFUSED(FATTN_E_SHAPE, "draws: is [2], must be [B] = [3]", d.shape[0] = 2);
    REFUSED(FATTN_E_SHAPE, "draws_after: is [2], must be [B] = [3]", a.shape[0] = 2);
    REFUSED(FATTN_E_SHAPE, "tokens: is [2], must be [B] = [3]", t.shape[0] = 2);
    REFUSED(FATTN_E_SHAPE, "tokens: stride[0] is 0", t.stride[0] = 0);
    REFUSED(FATTN_E_ARG, "tokens", io.draws_after = &same);
    REFUSED(FATTN_E_ARG, "draws", t.data = draws);
    REFUSED(FATTN_E_ARG, "logits", t.data = x[1]);
    REFUSED(FATTN_E_ARG, "draws[1] = -3 is negative", draws[1] = -3);
#undef REFUSED
}

Test(sample, no_rows) {
    fattn_tensor logits = view(NULL, FATTN_F32, 2, 0, V), t = view(NULL, FATTN_I32, 1, 0, 0);
    const fattn_sample_io io = {.struct_size = sizeof io, .logits = &logits, .tokens = &t};
    cr_assert_eq(fattn_sample(ctx, &io), FATTN_OK, "%s", fattn_ctx_error(ctx));
}
