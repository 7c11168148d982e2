/* cross_entropy and linear_cross_entropy. */
#include "opcheck.h"

#include <criterion/criterion.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int64_t R, V, K;
static int32_t ignore;

static fattn_var cross_entropy(fattn_tape *t, const fattn_var *in) {
    return fattn_op_cross_entropy(t, in[0], in[1], ignore);
}

/* The loss of logits [R,V] and, when d is given, its gradient. */
static double loss_of(const double *logits, const int32_t *target, double dy, double *d) {
    double loss = 0, kept = 0;
    for (int64_t r = 0; r < R; ++r) kept += target[r] != ignore;
    for (int64_t r = 0; r < R; ++r) {
        const double *x = logits + r * V;
        double max = -INFINITY, sum = 0;
        for (int64_t j = 0; j < V; ++j) max = fmax(max, x[j]);
        for (int64_t j = 0; j < V; ++j) sum += exp(x[j] - max);
        for (int64_t j = 0; j < V && d; ++j) d[r * V + j] = 0;
        if (target[r] == ignore) continue;
        loss += (max + log(sum) - x[target[r]]) / kept;
        for (int64_t j = 0; j < V && d; ++j) d[r * V + j] = dy * (exp(x[j] - max) / sum - (j == target[r])) / kept;
    }
    return loss;
}

static void reference(const double *const *in, const int32_t *const *ids, double *y) {
    y[0] = loss_of(in[0], ids[1], 0, NULL);
}

static void gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    loss_of(in[0], ids[1], dy[0], d[0]);
}

/* Rows of any leading dimensions; every fifth target is ignored. */
static op_case loss(int ndim, int64_t rows, int64_t classes, int32_t ignored) {
    R = rows, V = classes, ignore = ignored;
    op_case c = {.name = "cross_entropy",
                 .graph = cross_entropy,
                 .reference = reference,
                 .gradient = gradient,
                 .n = 2,
                 .in = {{.ndim = ndim}, {.ndim = ndim - 1, .classes = (int32_t)V, .ignore = ignored}},
                 .roundings = 16 + (double)V};
    for (int i = 0; i < 2; ++i)
        for (int d = 0; d < ndim - 1; ++d) c.in[i].shape[d] = d == 0 ? (ndim > 2 ? R / 2 : R) : d == 1 ? 2 : 1;
    c.in[0].shape[ndim - 1] = V;
    return c;
}

Test(cross_entropy, gradients) {
    for (int ndim = 1; ndim <= 4; ++ndim) {
        const op_case c = loss(ndim, ndim == 1 ? 1 : 6, 7, -1);
        opcheck(&c);
    }
    const op_case one = loss(2, 4, 1, -100);
    opcheck(&one);
    const op_case two = loss(2, 5, 2, 0); /* a class is ignored */
    opcheck(&two);
}

Test(cross_entropy, large) {
    const int64_t sizes[][2] = {{1003, 96}, {3, 50001}, {40001, 2}};
    for (int i = 0; i < 3; ++i) {
        const op_case c = loss(2, sizes[i][0], sizes[i][1], -1);
        opcheck_values(&c);
        opcheck_f32(&c);
        opcheck_threads(&c);
    }
}

Test(cross_entropy, nothing_kept) {
    const op_case empty = loss(2, 0, 5, -1);
    opcheck_values(&empty);
    op_case c = loss(2, 4, 5, 3);
    c.in[1].classes = 1, c.in[1].ignore = 0, ignore = 0; /* all targets are 0 */
    for (int graph = 0; graph < OP_SURROUNDINGS - 1; ++graph) {
        op_result r = op_run(&c, (op_surrounding)graph, FATTN_F32, 2);
        cr_assert_eq(*(const float *)r.y.data, 0.0f);
        for (int e = 0; e < 20; ++e) cr_assert_eq(((const float *)r.d[0].data)[e], 0.0f);
        op_release(&r);
    }
}

/* One row of given logits: its loss and gradient in F32. */
static void one_row(const float *x, int64_t n, int32_t target, double *value, float *dx) {
    fattn_ctx *ctx;
    fattn_tape *t;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    const int64_t shape[] = {1, n};
    memset(dx, 0, (size_t)n * sizeof *dx);
    fattn_param p = {.value = fattn_tensor_view((void *)x, FATTN_F32, FATTN_CPU, 0, 2, shape),
                     .grad = fattn_tensor_view(dx, FATTN_F32, FATTN_CPU, 0, 2, shape)};
    const fattn_tensor tt = fattn_tensor_view(&target, FATTN_I32, FATTN_CPU, 0, 1, shape);
    const fattn_var l = fattn_op_cross_entropy(t, fattn_use(t, &p), fattn_input(t, &tt), -1);
    cr_assert_eq(fattn_tape_item(t, l, value), FATTN_OK);
    cr_assert_eq(fattn_tape_backward(t, l), FATTN_OK);
    fattn_tape_destroy(t);
    fattn_ctx_destroy(ctx);
}

Test(cross_entropy, the_largest_logit_anywhere) {
    enum { N = 19 };
    for (int at = 0; at < N; ++at) {
        double value;
        float x[N] = {0}, dx[N];
        x[at] = 1000;
        one_row(x, N, (at + 1) % N, &value, dx);
        cr_assert_eq(value, 1000.0, "%d", at);
        cr_assert_eq(dx[at], 1.0f, "%d", at);
    }
}

Test(cross_entropy, extreme_logits) {
    double value;
    float dx[3];
    one_row((const float[]){1e30f, -1e30f, 0}, 3, 0, &value, dx);
    cr_assert_eq(value, 0.0);
    cr_assert_eq(dx[0], 0.0f);
    cr_assert_eq(dx[1], 0.0f);
    cr_assert_eq(dx[2], 0.0f);
    one_row((const float[]){-INFINITY, 1, 1}, 3, 1, &value, dx); /* a masked class */
    cr_assert_float_eq(value, log(2), 1e-7);
    cr_assert_eq(dx[0], 0.0f);
    cr_assert_float_eq(dx[1], -0.5f, 1e-7f);
    /* Large logits whose differences are small: exact to rounding, although their joint logarithm
       is known to 1e-3 only. */
    one_row((const float[]){10000, 10001, 10000}, 3, 1, &value, dx);
    const double e = exp(-1), sum = 1 + 2 * e;
    cr_assert_float_eq(value, log(sum), 1e-6);
    cr_assert_float_eq(dx[0], (float)(e / sum), 1e-6f);
    cr_assert_float_eq(dx[1], (float)(1 / sum - 1), 1e-6f);
    one_row((const float[]){0, NAN, 0}, 3, 0, &value, dx);
    cr_assert(isnan(value) && isnan(dx[0]));
}

static fattn_var linear_loss(fattn_tape *t, const fattn_var *in) {
    return fattn_op_linear_cross_entropy(t, in[0], in[1], in[2], ignore);
}

static double *logits_of(const double *const *in) {
    double *logits = malloc(sizeof(double) * (size_t)(R * V + 1));
    for (int64_t e = 0; e < R * V; ++e) {
        logits[e] = 0;
        for (int64_t k = 0; k < K; ++k) logits[e] += in[0][e / V * K + k] * in[1][e % V * K + k];
    }
    return logits;
}

static void linear_reference(const double *const *in, const int32_t *const *ids, double *y) {
    double *logits = logits_of(in);
    y[0] = loss_of(logits, ids[2], 0, NULL);
    free(logits);
}

static void linear_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    double *logits = logits_of(in), *g = malloc(sizeof(double) * (size_t)(R * V + 1));
    loss_of(logits, ids[2], dy[0], g);
    for (int64_t e = 0; e < R * K; ++e) d[0][e] = 0;
    for (int64_t e = 0; e < V * K; ++e) d[1][e] = 0;
    for (int64_t e = 0; e < R * V; ++e)
        for (int64_t k = 0; k < K; ++k) {
            d[0][e / V * K + k] += g[e] * in[1][e % V * K + k];
            d[1][e % V * K + k] += g[e] * in[0][e / V * K + k];
        }
    free(logits), free(g);
}

/* A logit is a sum of K terms, and its error is also that of the loss and its gradients. */
static op_case linear(int ndim, int64_t rows, int64_t classes, int64_t columns) {
    const op_case l = loss(ndim, rows, classes, -1);
    K = columns;
    op_case c = {.name = "linear_cross_entropy",
                 .graph = linear_loss,
                 .reference = linear_reference,
                 .gradient = linear_gradient,
                 .n = 3,
                 .in = {l.in[0], {2, {V, K}}, l.in[1]},
                 .any_strides = true,
                 .roundings = 64 + 32 * (double)K};
    c.in[0].shape[ndim - 1] = K;
    return c;
}

Test(linear_cross_entropy, gradients) {
    for (int ndim = 1; ndim <= 4; ++ndim) {
        const op_case c = linear(ndim, ndim == 1 ? 1 : 6, 7, 3);
        opcheck(&c);
    }
}

/* ---- w has more rows than there are classes ---- */

static int64_t padded; /* rows of w */

static fattn_var padded_loss(fattn_tape *t, const fattn_var *in) {
    return fattn_op_linear_cross_entropy_padded(t, in[0], in[1], in[2], ignore, V);
}

static void padded_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    linear_gradient(in, ids, dy, d);
    for (int64_t e = V * K; e < padded * K; ++e) d[1][e] = 0;
}

static op_case with_padding(int ndim, int64_t rows, int64_t classes, int64_t columns, int64_t padding) {
    op_case c = linear(ndim, rows, classes, columns);
    padded = classes + padding;
    c.name = "linear_cross_entropy_padded";
    c.graph = padded_loss;
    c.gradient = padded_gradient;
    c.in[1].shape[0] = padded;
    return c;
}

Test(linear_cross_entropy_padded, gradients) {
    for (int ndim = 1; ndim <= 4; ++ndim) {
        const op_case c = with_padding(ndim, ndim == 1 ? 1 : 6, 7, 3, ndim);
        opcheck(&c);
    }
    const op_case none = with_padding(2, 6, 7, 3, 0);
    opcheck(&none);
}

Test(linear_cross_entropy_padded, large) {
    const int64_t sizes[][4] = {{4999, 11, 5, 5}, {601, 5003, 3, 117}, {300, 500, 64, 12}};
    for (int i = 0; i < 3; ++i) {
        const op_case c = with_padding(2, sizes[i][0], sizes[i][1], sizes[i][2], sizes[i][3]);
        opcheck_values(&c);
        opcheck_f32(&c);
        opcheck_threads(&c);
    }
}

/* Not small: 0, whether the gradient is fresh or not; also when no row has a loss, and of no class. */
Test(linear_cross_entropy_padded, the_padding_has_no_gradient) {
    const int64_t classes[] = {5, 0};
    for (int empty = 0; empty < 2; ++empty) {
        op_case c = with_padding(2, 4, classes[empty], 3, 4);
        if (empty) c.in[2].classes = 1, c.in[2].ignore = 0, ignore = 0; /* all targets are 0, and ignored */
        for (int graph = 0; graph < OP_SURROUNDINGS; ++graph) {
            op_result r = op_run(&c, (op_surrounding)graph, FATTN_F32, 2);
            const float *const dw = r.d[1].data;
            for (int64_t e = 0; e < V * 3; ++e)
                cr_assert_neq(dw[e], 0.0f, "graph %d, element %lld", graph, (long long)e);
            for (int64_t e = V * 3; e < padded * 3; ++e)
                cr_assert_eq(dw[e], 0.0f, "graph %d, element %lld", graph, (long long)e);
            op_release(&r);
        }
    }
}

/* The loss of [3,4] rows over `classes` of w [96,4]. */
static int64_t asked;
static fattn_var asked_loss(fattn_tape *t, const fattn_var *in) {
    return fattn_op_linear_cross_entropy_padded(t, in[0], in[1], in[2], -1, asked);
}

Test(linear_cross_entropy_padded, errors) {
    const struct {
        int64_t classes;
        const char *message;
        int32_t target;
    } list[] = {{97, "linear_cross_entropy: 97 classes, w has 96 rows: 0..96 are possible", 0},
                {-1, "-1 classes, w has 96 rows", 0},
                {90, "target[0] is 90, the classes are 0..89 and -1 is ignored", 90},
                {0, "target[0] is 0, the classes are 0..-1", 0}};
    for (int i = 0; i < 4; ++i) {
        asked = list[i].classes;
        const op_error e = {asked_loss,
                            FATTN_E_ARG,
                            list[i].message,
                            3,
                            {{FATTN_F32, 2, {3, 4}}, {FATTN_F32, 2, {96, 4}}, {FATTN_I32, 1, {3}, list[i].target}}};
        opcheck_errors(&e, 1);
    }
}

/* Several chunks, the last one ragged; one class more than a task's share of logits. */
Test(linear_cross_entropy, large) {
    const int64_t sizes[][3] = {{4999, 11, 5}, {601, 5003, 3}, {2048, 7, 130}};
    for (int i = 0; i < 3; ++i) {
        const op_case c = linear(2, sizes[i][0], sizes[i][1], sizes[i][2]);
        opcheck_values(&c);
        opcheck_f32(&c);
        opcheck_threads(&c);
    }
}

Test(linear_cross_entropy, nothing) {
    const op_case none = linear(2, 0, 5, 3);
    opcheck_values(&none);
    const op_case flat = linear(2, 4, 5, 0); /* all classes alike */
    opcheck_values(&flat);
    op_case c = linear(2, 4, 5, 3);
    c.in[2].classes = 1, c.in[2].ignore = 0, ignore = 0; /* all targets are 0, and ignored */
    op_result r = op_run(&c, OP_FRESH, FATTN_F32, 2);
    cr_assert_eq(*(const float *)r.y.data, 0.0f);
    for (int e = 0; e < 12; ++e) cr_assert_eq(((const float *)r.d[0].data)[e], 0.0f);
    for (int e = 0; e < 15; ++e) cr_assert_eq(((const float *)r.d[1].data)[e], 0.0f);
    op_release(&r);
}

/* Peak memory of the loss of R rows, forward and backward, without parameters and inputs. */
static size_t peak_of(int64_t rows, int64_t classes, int64_t columns, bool chunked) {
    fattn_ctx *ctx;
    fattn_tape *t;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    fattn_param x = {.flags = 0}, w = {.flags = 0};
    const int64_t xs[] = {rows, columns}, ws[] = {classes, columns};
    fattn_tensor target;
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, 2, xs, &x.value), FATTN_OK);
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, 2, xs, &x.grad), FATTN_OK);
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, 2, ws, &w.value), FATTN_OK);
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, 2, ws, &w.grad), FATTN_OK);
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_I32, 1, xs, &target), FATTN_OK);
    fattn_tensor *const all[] = {&x.value, &x.grad, &w.value, &w.grad, &target};
    for (int i = 0; i < 5; ++i) memset(all[i]->data, 0, (size_t)fattn_tensor_numel(all[i]) * 4);
    const size_t before = fattn_ctx_mem(ctx).live;
    const fattn_var none = {0}, xv = fattn_use(t, &x), wv = fattn_use(t, &w);
    const fattn_var tv = fattn_input(t, &target);
    const fattn_var l = chunked ? fattn_op_linear_cross_entropy(t, xv, wv, tv, -1)
                                : fattn_op_cross_entropy(t, fattn_op_linear(t, xv, wv, none), tv, -1);
    cr_assert_eq(fattn_tape_backward(t, l), FATTN_OK, "%s", fattn_ctx_error(ctx));
    const size_t peak = fattn_ctx_mem(ctx).peak - before;
    for (int i = 0; i < 5; ++i) fattn_tensor_free(ctx, all[i]);
    fattn_tape_destroy(t);
    fattn_ctx_destroy(ctx);
    return peak;
}

Test(linear_cross_entropy, logits_are_never_stored_whole) {
    const int64_t rows = 8192, classes = 2000, columns = 8;
    const size_t logits = (size_t)(rows * classes) * sizeof(float);
    cr_assert_gt(peak_of(rows, classes, columns, false), 2 * logits); /* and their gradient */
    cr_assert_lt(peak_of(rows, classes, columns, true), logits / 8);
}

Test(cross_entropy, errors) {
    const op_error list[] = {
        {cross_entropy,
         FATTN_E_ARG,
         "target[0] is 96, the classes are 0..95 and -1 is ignored",
         2,
         {{FATTN_F32, 2, {3, 96}}, {FATTN_I32, 1, {3}, 96}}},
        {cross_entropy, FATTN_E_ARG, "target[0] is -2", 2, {{FATTN_F32, 2, {3, 96}}, {FATTN_I32, 1, {3}, -2}}},
        {cross_entropy, FATTN_E_ARG, "the classes are 0..-1", 2, {{FATTN_F32, 2, {3, 0}}, {FATTN_I32, 1, {3}, 0}}},
        {cross_entropy,
         FATTN_E_SHAPE,
         "target is [3,1], logits is [3,96]: one number per row",
         2,
         {{FATTN_F32, 2, {3, 96}}, {FATTN_I32, 2, {3, 1}}}},
        {cross_entropy, FATTN_E_SHAPE, "target is [4]", 2, {{FATTN_F32, 2, {3, 96}}, {FATTN_I32, 1, {4}}}},
        {cross_entropy, FATTN_E_SHAPE, "logits is a scalar", 2, {{FATTN_F32, 0}, {FATTN_I32, 0}}},
        {cross_entropy, FATTN_E_DTYPE, "target is f32, not i32", 2, {{FATTN_F32, 2, {3, 96}}, {FATTN_F32, 1, {3}}}},
        {cross_entropy, FATTN_E_ARG, "logits is absent", 1, {{0}}},
        {cross_entropy, FATTN_E_ARG, "target is absent", 1, {{FATTN_F32, 2, {3, 96}}}},
        {linear_loss,
         FATTN_E_ARG,
         "linear_cross_entropy: target[0] is 96",
         3,
         {{FATTN_F32, 2, {3, 4}}, {FATTN_F32, 2, {96, 4}}, {FATTN_I32, 1, {3}, 96}}},
        {linear_loss,
         FATTN_E_SHAPE,
         "x is [3,5], w is [96,4]",
         3,
         {{FATTN_F32, 2, {3, 5}}, {FATTN_F32, 2, {96, 4}}, {FATTN_I32, 1, {3}}}},
        {linear_loss,
         FATTN_E_SHAPE,
         "target is [2], x is [3,4]",
         3,
         {{FATTN_F32, 2, {3, 4}}, {FATTN_F32, 2, {96, 4}}, {FATTN_I32, 1, {2}}}},
        {linear_loss,
         FATTN_E_DTYPE,
         "w is f64",
         3,
         {{FATTN_F32, 2, {3, 4}}, {FATTN_F64, 2, {96, 4}}, {FATTN_I32, 1, {3}}}},
        {linear_loss,
         FATTN_E_DTYPE,
         "target is f64",
         3,
         {{FATTN_F64, 2, {3, 4}}, {FATTN_F64, 2, {96, 4}}, {FATTN_F64, 1, {3}}}},
        {linear_loss, FATTN_E_ARG, "target is absent", 2, {{FATTN_F32, 2, {3, 4}}, {FATTN_F32, 2, {96, 4}}}},
    };
    ignore = -1;
    opcheck_errors(list, sizeof list / sizeof *list);
}
