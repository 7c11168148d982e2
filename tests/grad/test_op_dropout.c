/* dropout: the mask by its definition, scaling, repeatability. */
#include "opcheck.h"
#include "suite.h"

#include "core/tensor/philox.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static struct {
    float p;
    fattn_rng rng;
    int64_t count;
} now;

static fattn_var dropout(fattn_tape *t, const fattn_var *in) {
    return fattn_op_dropout(t, in[0], now.p, now.rng, (fattn_var){0});
}

/* Element e has bits 16 (e % 2).. of word e / 2 % 4 of block e / 8. */
static bool keeps(int64_t e, int32_t step) {
    const fattni_block counter = {
        {(uint32_t)(e / 8), (uint32_t)(e / 8 >> 32), UINT32_MAX, now.rng.stream + 0x9E3779B1u * (uint32_t)step}};
    const uint32_t word = fattni_mask_philox(now.rng.seed, counter).w[e / 2 % 4];
    const long bits = word >> (16 * (e % 2)) & 0x7fff, T = lround(32768 * (double)now.p);
    return T <= 16384 ? bits >= T : bits < 32768 - T;
}

static double scale(void) { return 32768 / (32768 - round(32768 * (double)now.p)); }

static void reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t e = 0; e < now.count; ++e) y[e] = keeps(e, 0) ? in[0][e] * scale() : 0;
}
static void gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    (void)in, (void)ids;
    for (int64_t e = 0; e < now.count; ++e) d[0][e] = keeps(e, 0) ? dy[e] * scale() : 0;
}

static op_case dropping(float p, int ndim, const int64_t *shape) {
    op_case c = {.name = "dropout",
                 .graph = dropout,
                 .reference = reference,
                 .gradient = gradient,
                 .n = 1,
                 .in = {{.ndim = ndim}},
                 .any_strides = true,
                 .roundings = 2};
    now.p = p, now.count = 1;
    now.rng = (fattn_rng){.seed = UINT64_C(0x123456789abcdef), .stream = 7};
    for (int d = 0; d < ndim; ++d) now.count *= c.in[0].shape[d] = shape[d];
    return c;
}

Test(dropout, gradients) {
    static const float rates[] = {0, 0.1f, 0.5f, 0.999f, 0x1p-16f};
    static const int64_t shapes[][5] = {{7}, {8}, {3, 5}, {2, 1, 9}, {2, 3, 2, 2, 3}};
    static const int dims[] = {1, 1, 2, 3, 5};
    for (int n = 0; n < 25; ++n) {
        const op_case c = dropping(rates[n / 5], dims[n % 5], shapes[n % 5]);
        opcheck(&c);
    }
    const op_case scalar = dropping(0.5f, 0, NULL);
    opcheck(&scalar);
}

Test(dropout, large_and_nothing) {
    static const int64_t shapes[][2] = {{70001, 1}, {1, 70001}, {301, 167}, {0, 4}, {4, 0}};
    for (int n = 0; n < 5; ++n) {
        const op_case c = dropping(0.25f, 2, shapes[n]);
        opcheck_values(&c);
        opcheck_f32(&c);
        opcheck_threads(&c);
    }
}
TestSuite(dropout_masks, .init = open_tape, .fini = close_tape);

enum { N = 1 << 20 };

/* Dropout of N ones; the caller frees. */
static float *masked(float p, fattn_rng rng, const int32_t *step) {
    static float ones[N];
    fattn_tensor y;
    fattn_var steps = {0};
    for (int e = 0; e < N; ++e) ones[e] = 1;
    fattn_tape_reset(tape);
    const fattn_tensor x = fattn_tensor_view(ones, FATTN_F32, FATTN_CPU, 0, 1, (const int64_t[]){N});
    const fattn_tensor at = fattn_tensor_view((void *)(uintptr_t)step, FATTN_I32, FATTN_CPU, 0, 0, NULL);
    if (step) steps = fattn_input(tape, &at);
    cr_assert_eq(fattn_tape_value(tape, fattn_op_dropout(tape, fattn_input(tape, &x), p, rng, steps), &y), FATTN_OK,
                 "%s", fattn_ctx_error(ctx));
    float *const copy = malloc(sizeof ones);
    memcpy(copy, y.data, sizeof ones);
    return copy;
}

/* Elements that two masks decide alike. */
static double agreement(const float *a, const float *b) {
    int64_t same = 0;
    for (int e = 0; e < N; ++e) same += (a[e] > 0) == (b[e] > 0);
    return (double)same / N;
}

/* A share of T/32768 is dropped, within 5 deviations of N draws; kept elements are scaled by one number. */
Test(dropout_masks, rates) {
    static const float rates[] = {0.1f, 0.5f, 0.9f};
    for (int n = 0; n < 3; ++n) {
        const double p = round(32768 * (double)rates[n]) / 32768;
        float *const y = masked(rates[n], (fattn_rng){.seed = 3}, NULL);
        int64_t dropped = 0;
        for (int e = 0; e < N; ++e) {
            dropped += y[e] == 0;
            cr_assert(y[e] == 0 || y[e] == (float)(1 / (1 - p)));
        }
        cr_assert_leq(fabs((double)dropped / N - p), 5 * sqrt(p * (1 - p) / N), "%g dropped", (double)dropped / N);
        free(y);
    }
}

/* Another seed, stream or step: masks agree as independent ones do, in half of the elements, within 5 deviations. */
Test(dropout_masks, what_they_depend_on) {
    int32_t steps[] = {0, 1, -1};
    const fattn_rng rng = {.seed = 5, .stream = 2};
    float *const first = masked(0.5f, rng, NULL), *const zero = masked(0.5f, rng, &steps[0]);
    float *const others[] = {masked(0.5f, (fattn_rng){.seed = 6, .stream = 2}, NULL),
                             masked(0.5f, (fattn_rng){.seed = 5 + (UINT64_C(1) << 32), .stream = 2}, NULL),
                             masked(0.5f, (fattn_rng){.seed = 5, .stream = 3}, NULL), masked(0.5f, rng, &steps[1]),
                             masked(0.5f, rng, &steps[2])};
    cr_assert(memcmp(first, zero, N * sizeof *first) == 0, "no step is step 0");
    for (int n = 0; n < 5; ++n) {
        cr_assert_leq(fabs(agreement(first, others[n]) - 0.5), 5 * 0.5 / sqrt(N), "%d: %g", n,
                      agreement(first, others[n]));
        free(others[n]);
    }
    free(first);
    free(zero);
}

/* While a model is evaluated, p is 0: no copy. */
Test(dropout_masks, none_is_a_view) {
    const float x[3] = {1, 2, 3};
    fattn_tensor y, in = fattn_tensor_view((void *)(uintptr_t)x, FATTN_F32, FATTN_CPU, 0, 1, (const int64_t[]){3});
    const fattn_rng rng = {.seed = 1};
    const fattn_var none = {0}, v = fattn_input(tape, &in);
    cr_assert_eq(fattn_tape_value(tape, fattn_op_dropout(tape, v, 0, rng, none), &y), FATTN_OK);
    cr_assert_eq(y.data, x);
    in.stride[0] = 0; /* elements that share an address: copied */
    cr_assert_eq(fattn_tape_value(tape, fattn_op_dropout(tape, fattn_input(tape, &in), 0, rng, none), &y), FATTN_OK);
    cr_assert(y.data != x && ((const float *)y.data)[2] == 1);
}

/* What is dropped is 0, whatever it was. */
Test(dropout_masks, of_what_is_not_finite) {
    double x[64];
    fattn_tensor y;
    for (int e = 0; e < 64; ++e) x[e] = e % 2 ? (double)NAN : (double)INFINITY;
    now.p = 0.5f, now.rng = (fattn_rng){.seed = 8};
    const fattn_tensor in = fattn_tensor_view(x, FATTN_F64, FATTN_CPU, 0, 1, (const int64_t[]){64});
    const fattn_var v = fattn_input(tape, &in);
    cr_assert_eq(fattn_tape_value(tape, dropout(tape, &v), &y), FATTN_OK);
    for (int e = 0; e < 64; ++e) {
        const double got = ((const double *)y.data)[e];
        cr_assert(keeps(e, 0) ? !isfinite(got) : got == 0, "%d: %g", e, got);
    }
}

static fattn_var dropout_of(fattn_tape *t, fattn_var x, float p) {
    return fattn_op_dropout(t, x, p, (fattn_rng){.seed = 1}, (fattn_var){0});
}
static fattn_var all(fattn_tape *t, const fattn_var *in) { return dropout_of(t, in[0], 1); }
static fattn_var below(fattn_tape *t, const fattn_var *in) { return dropout_of(t, in[0], -0.1f); }
static fattn_var not_a_number(fattn_tape *t, const fattn_var *in) { return dropout_of(t, in[0], NAN); }
static fattn_var nearly_none(fattn_tape *t, const fattn_var *in) { return dropout_of(t, in[0], 1e-6f); }
static fattn_var nearly_all(fattn_tape *t, const fattn_var *in) { return dropout_of(t, in[0], 1 - FLT_EPSILON); }
static fattn_var half(fattn_tape *t, const fattn_var *in) { return dropout_of(t, in[0], 0.5f); }
static fattn_var stepped(fattn_tape *t, const fattn_var *in) {
    return fattn_op_dropout(t, in[0], 0.5f, (fattn_rng){.seed = 1}, in[1]);
}

static fattn_var reserved(fattn_tape *t, const fattn_var *in) {
    return fattn_op_dropout(t, in[0], 0.5f, (fattn_rng){.reserved = 5}, (fattn_var){0});
}

Test(dropout, errors) {
    const op_error list[] = {
        {reserved, FATTN_E_ARG, "dropout: rng.reserved is 5, not 0", 1, {{FATTN_F32, 1, {4}}}},
        {all, FATTN_E_ARG, "dropout: p is 1, not in [0, 1)", 1, {{FATTN_F32, 1, {4}}}},
        {below, FATTN_E_ARG, "dropout: p is -0.1", 1, {{FATTN_F32, 1, {4}}}},
        {not_a_number, FATTN_E_ARG, "dropout: p is nan", 1, {{FATTN_F32, 1, {4}}}},
        {nearly_none, FATTN_E_ARG, "rounds to 0/32768", 1, {{FATTN_F32, 1, {4}}}},
        {nearly_all, FATTN_E_ARG, "rounds to 32768/32768", 1, {{FATTN_F32, 1, {4}}}},
        {half, FATTN_E_DTYPE, "dropout: x is i32", 1, {{FATTN_I32, 1, {4}}}},
        {half, FATTN_E_ARG, "dropout: x is absent", 1, {{0}}},
        {stepped, FATTN_E_DTYPE, "dropout: step is f32, not i32", 2, {{FATTN_F32, 1, {4}}, {FATTN_F32, 0, {0}}}},
        {stepped, FATTN_E_SHAPE, "dropout: step is [1], not a scalar", 2, {{FATTN_F32, 1, {4}}, {FATTN_I32, 1, {1}}}},
    };
    opcheck_errors(list, sizeof list / sizeof *list);
}
