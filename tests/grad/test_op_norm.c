/* layernorm and rmsnorm. */
#include "opcheck.h"

#include <criterion/criterion.h>

#include <math.h>

static int64_t R, C;
static bool centred;
static const float eps = 1e-3f;

static fattn_var layernorm(fattn_tape *t, const fattn_var *in) {
    return fattn_op_layernorm(t, in[0], in[1], in[2], eps);
}
static fattn_var rmsnorm(fattn_tape *t, const fattn_var *in) { return fattn_op_rmsnorm(t, in[0], in[1], eps); }

static void statistics(const double *x, double *mean, double *r) {
    double sum = 0, squares = 0;
    for (int64_t i = 0; i < C && centred; ++i) sum += x[i];
    *mean = sum / (double)C;
    for (int64_t i = 0; i < C; ++i) squares += (x[i] - *mean) * (x[i] - *mean);
    *r = 1 / sqrt(squares / (double)C + (double)eps);
}

static void reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t row = 0; row < R; ++row) {
        double mean, r;
        statistics(in[0] + row * C, &mean, &r);
        for (int64_t i = 0; i < C; ++i)
            y[row * C + i] = (in[0][row * C + i] - mean) * r * in[1][i] + (in[2] ? in[2][i] : 0);
    }
}

/* dx by the chain rule through mean and r, written out: every element against every other. */
static void gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    (void)ids;
    for (int64_t i = 0; i < C; ++i) {
        d[1][i] = 0;
        if (d[2]) d[2][i] = 0;
    }
    for (int64_t row = 0; row < R; ++row) {
        const double *const x = in[0] + row * C, *const g = dy + row * C;
        double mean, r, through_r = 0, through_mean = 0;
        statistics(x, &mean, &r);
        for (int64_t i = 0; i < C; ++i) {
            d[1][i] += g[i] * (x[i] - mean) * r;
            if (d[2]) d[2][i] += g[i];
            through_r += g[i] * in[1][i] * (x[i] - mean);
            through_mean -= g[i] * in[1][i] * r;
        }
        for (int64_t i = 0; i < C; ++i) {
            const double dr = -r * r * r * (x[i] - mean) / (double)C;
            d[0][row * C + i] = g[i] * in[1][i] * r + through_r * dr + (centred ? through_mean / (double)C : 0);
        }
    }
}

/* A row's sums, divided by C, and the sums over R rows; values below 4, r at most 1/sqrt(eps). */
static op_case norm(bool layer, bool bias, int ndim, int64_t rows, int64_t columns) {
    R = rows, C = columns;
    centred = layer;
    op_case c = {.name = layer ? "layernorm" : "rmsnorm",
                 .graph = layer ? layernorm : rmsnorm,
                 .reference = reference,
                 .gradient = gradient,
                 .n = layer ? 3 : 2,
                 .in = {{.ndim = ndim}, {1, {C}}, {1, {C}, .absent = !bias}},
                 .roundings = 64 + 4 * (double)R};
    for (int d = 0; d < ndim - 1; ++d) c.in[0].shape[d] = d == 0 ? R : 1;
    if (ndim == 4) c.in[0].shape[0] = 2, c.in[0].shape[1] = R / 2;
    c.in[0].shape[ndim - 1] = C;
    return c;
}

Test(norm, gradients) {
    const int64_t columns[] = {1, 2, 7, 16};
    for (int i = 0; i < 4 * 3; ++i) {
        const op_case c = norm(i % 3 != 0, i % 3 == 1, i & 1 ? 4 : 2, 6, columns[i / 3]);
        opcheck(&c);
    }
    const op_case vector = norm(true, true, 1, 1, 9);
    opcheck(&vector);
}

Test(norm, large) {
    const int64_t sizes[][2] = {{1000, 129}, {5003, 3}, {3, 5003}};
    for (int i = 0; i < 3 * 3; ++i) {
        const op_case c = norm(i % 3 != 0, i % 3 == 1, 2, sizes[i / 3][0], sizes[i / 3][1]);
        opcheck_values(&c);
        opcheck_f32(&c);
        opcheck_threads(&c);
    }
}

Test(norm, nothing) {
    for (int i = 0; i < 3; ++i) {
        op_case c = norm(i != 0, i == 1, 2, 0, 5);
        opcheck_values(&c);
        opcheck_f32(&c);
        c = norm(i != 0, i == 1, 2, 5, 0);
        opcheck_values(&c);
    }
}

/* The mean is subtracted before squares are summed, so that the variance is accurate with a large mean. */
Test(norm, large_mean) {
    fattn_ctx *ctx;
    fattn_tape *t;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    const int64_t n = 8;
    double x[8], one[8];
    for (int i = 0; i < n; ++i) {
        x[i] = 1e9 + (i & 1 ? 1 : -1);
        one[i] = 1;
    }
    const fattn_tensor xt = fattn_tensor_view(x, FATTN_F64, FATTN_CPU, 0, 1, &n);
    const fattn_tensor gt = fattn_tensor_view(one, FATTN_F64, FATTN_CPU, 0, 1, &n);
    const fattn_var y = fattn_op_layernorm(t, fattn_input(t, &xt), fattn_input(t, &gt), (fattn_var){0}, 0);
    fattn_tensor value;
    cr_assert_eq(fattn_tape_value(t, y, &value), FATTN_OK);
    for (int i = 0; i < n; ++i) cr_assert_float_eq(((const double *)value.data)[i], i & 1 ? 1 : -1, 1e-15);
    fattn_tape_destroy(t);
    fattn_ctx_destroy(ctx);
}

static fattn_var negative_eps(fattn_tape *t, const fattn_var *in) { return fattn_op_rmsnorm(t, in[0], in[1], -1e-5f); }
static fattn_var infinite_eps(fattn_tape *t, const fattn_var *in) {
    return fattn_op_layernorm(t, in[0], in[1], in[2], INFINITY);
}

Test(norm, errors) {
    const op_error list[] = {
        {layernorm,
         FATTN_E_SHAPE,
         "layernorm: x is [3,4], gain is [5]",
         2,
         {{FATTN_F32, 2, {3, 4}}, {FATTN_F32, 1, {5}}}},
        {layernorm,
         FATTN_E_SHAPE,
         "x is [3,4], bias is [3]",
         3,
         {{FATTN_F32, 2, {3, 4}}, {FATTN_F32, 1, {4}}, {FATTN_F32, 1, {3}}}},
        {rmsnorm,
         FATTN_E_SHAPE,
         "rmsnorm: x is [3,4], gain is [1,4]",
         2,
         {{FATTN_F32, 2, {3, 4}}, {FATTN_F32, 2, {1, 4}}}},
        {rmsnorm, FATTN_E_SHAPE, "x is a scalar", 2, {{FATTN_F32, 0}, {FATTN_F32, 1, {1}}}},
        {rmsnorm, FATTN_E_DTYPE, "gain is f64", 2, {{FATTN_F32, 1, {4}}, {FATTN_F64, 1, {4}}}},
        {layernorm, FATTN_E_ARG, "gain is absent", 1, {{FATTN_F32, 1, {4}}}},
        {rmsnorm, FATTN_E_ARG, "gain is absent", 1, {{FATTN_F32, 1, {4}}}},
        {rmsnorm,
         FATTN_E_SHAPE,
         "rmsnorm: a tensor of shape [1099511627776,1024,0] is too large",
         2,
         {{FATTN_F32, 3, {INT64_C(1) << 40, 1024, 0}}, {FATTN_F32, 1, {0}}}},
        {negative_eps, FATTN_E_ARG, "eps is -1e-05", 2, {{FATTN_F32, 1, {4}}, {FATTN_F32, 1, {4}}}},
        {infinite_eps, FATTN_E_ARG, "eps is inf", 2, {{FATTN_F32, 1, {4}}, {FATTN_F32, 1, {4}}}},
    };
    opcheck_errors(list, sizeof list / sizeof *list);
}
