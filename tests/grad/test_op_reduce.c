/* sum, mean, softmax. */
#include "core/tensor/numeric.h"
#include "opcheck.h"
#include "thinned.h"

#include <criterion/criterion.h>

#include <math.h>
#include <string.h>

/* The case's numbers; graphs and references read them here. */
static struct {
    int ndim, n, keep;
    int64_t shape[FATTN_MAX_DIMS];
    int dims[FATTN_MAX_DIMS];
} now;

static int64_t count(void) {
    int64_t n = 1;
    for (int d = 0; d < now.ndim; ++d) n *= now.shape[d];
    return n;
}

static bool is_summed(int d) {
    bool found = now.n == 0;
    for (int i = 0; i < now.n; ++i) found = found || now.dims[i] == d;
    return found;
}

static int64_t count_kept(void) {
    int64_t n = 1;
    for (int d = 0; d < now.ndim; ++d) n *= is_summed(d) ? 1 : now.shape[d];
    return n;
}

/* The element of y that element e of x is added to. */
static int64_t place(int64_t e) {
    int64_t at = 0, step = 1;
    for (int d = now.ndim - 1; d >= 0; --d) {
        if (!is_summed(d)) {
            at += e % now.shape[d] * step;
            step *= now.shape[d];
        }
        e /= now.shape[d];
    }
    return at;
}

static fattn_var sum(fattn_tape *t, const fattn_var *in) { return fattn_op_sum(t, in[0], now.dims, now.n, now.keep); }
static fattn_var mean(fattn_tape *t, const fattn_var *in) { return fattn_op_mean(t, in[0], now.dims, now.n, now.keep); }

static void sum_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t k = 0; k < count_kept(); ++k) y[k] = 0;
    for (int64_t e = 0; e < count(); ++e) y[place(e)] += in[0][e];
}
static void sum_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    (void)in, (void)ids;
    for (int64_t e = 0; e < count(); ++e) d[0][e] = dy[place(e)];
}
static void mean_reference(const double *const *in, const int32_t *const *ids, double *y) {
    sum_reference(in, ids, y);
    for (int64_t k = 0; k < count_kept(); ++k) y[k] *= (double)count_kept() / (double)count();
}
static void mean_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    sum_gradient(in, ids, dy, d);
    for (int64_t e = 0; e < count(); ++e) d[0][e] *= (double)count_kept() / (double)count();
}

/* The reference adds in double, one by one: a rounding per term of a sum of terms below 4. */
static op_case reducing(bool is_mean) {
    op_case c = {.name = is_mean ? "mean" : "sum",
                 .graph = is_mean ? mean : sum,
                 .reference = is_mean ? mean_reference : sum_reference,
                 .gradient = is_mean ? mean_gradient : sum_gradient,
                 .n = 1,
                 .in = {{.ndim = now.ndim}},
                 .any_strides = true,
                 .roundings = 8 + 4 * (double)(count_kept() ? count() / count_kept() : 0)};
    memcpy(c.in[0].shape, now.shape, sizeof c.in[0].shape);
    return c;
}

/* Every set of dimensions of [3,2,4,5], kept or not, in both orders. */
Test(reduce, sets) {
    for (int set = 0; set < 16; ++set)
        for (int how = set % THINNED(4); how < 4; how += THINNED(4)) {
            now.ndim = 4, now.n = 0, now.keep = how & 1;
            memcpy(now.shape, (int64_t[]){3, 2, 4, 5}, 4 * sizeof(int64_t));
            for (int d = 0; d < 4; ++d)
                if (set >> d & 1) now.dims[now.n++] = d;
            for (int i = 0; i < now.n / 2 && how & 2; ++i) {
                const int first = now.dims[i];
                now.dims[i] = now.dims[now.n - 1 - i];
                now.dims[now.n - 1 - i] = first;
            }
            const op_case c = reducing(how & 1 ? set & 1 : !(set & 1));
            opcheck(&c);
        }
}

Test(reduce, few_elements) {
    static const struct {
        int ndim;
        int64_t shape[2];
        int n, dims[1];
    } list[] = {{0, {0}, 0, {0}},    {1, {1}, 0, {0}},    {1, {1}, 1, {0}},
                {2, {1, 5}, 1, {0}}, {2, {5, 1}, 1, {1}}, {2, {5, 1}, 1, {0}}};
    for (int i = 0; i < 12; ++i) {
        now.ndim = list[i / 2].ndim, now.n = list[i / 2].n, now.keep = 0;
        memcpy(now.shape, list[i / 2].shape, sizeof list[0].shape);
        now.dims[0] = list[i / 2].dims[0];
        const op_case c = reducing(i & 1);
        opcheck(&c);
    }
}

/* Many tasks and parts, and more sums, and more terms of each, than a cell has. */
Test(reduce, large) {
    static const int64_t shapes[][3] = {{70, 301, 9}, {1, 3, 40001}, {3, 40001, 1}};
    for (int i = 0; i < 3 * 8; i += THINNED(5)) {
        now.ndim = 3, now.n = 0, now.keep = 0;
        memcpy(now.shape, shapes[i / 8], sizeof shapes[0]);
        for (int d = 0; d < 3; ++d)
            if (i % 8 >> d & 1) now.dims[now.n++] = d;
        const op_case c = reducing(i & 1);
        opcheck_values(&c);
        opcheck_f32(&c);
        opcheck_threads(&c);
    }
}

/* A sum of no elements is 0, also where there are several such sums. */
Test(reduce, nothing) {
    static const struct {
        int64_t shape[2];
        int n, dim;
    } list[] = {{{3, 0}, 1, 1}, {{0, 3}, 1, 0}, {{0, 3}, 1, 1}, {{0, 0}, 0, 0}};
    for (int i = 0; i < 4; ++i) {
        now.ndim = 2, now.n = list[i].n, now.keep = 0, now.dims[0] = list[i].dim;
        memcpy(now.shape, list[i].shape, sizeof list[0].shape);
        const op_case c = reducing(false);
        opcheck_values(&c);
        opcheck_f32(&c);
    }
    now.ndim = 2, now.n = 1, now.dims[0] = 1; /* means of nothing, of which there are none */
    memcpy(now.shape, (int64_t[]){0, 3}, 2 * sizeof(int64_t));
    const op_case c = reducing(true);
    opcheck_values(&c);
}

/* ---- softmax ---- */

static int64_t rows, columns;

static fattn_var softmax(fattn_tape *t, const fattn_var *in) { return fattn_op_softmax(t, in[0]); }

static void softmax_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t r = 0; r < rows; ++r) {
        long double most = -INFINITY, all = 0;
        for (int64_t i = 0; i < columns; ++i) most = fmaxl(most, in[0][r * columns + i]);
        for (int64_t i = 0; i < columns; ++i) all += expl(in[0][r * columns + i] - most);
        for (int64_t i = 0; i < columns; ++i) y[r * columns + i] = (double)(expl(in[0][r * columns + i] - most) / all);
    }
}

static void softmax_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    softmax_reference(in, ids, d[0]);
    for (int64_t r = 0; r < rows; ++r) {
        double *const y = d[0] + r * columns, dot = 0;
        for (int64_t i = 0; i < columns; ++i) dot += dy[r * columns + i] * y[i];
        for (int64_t i = 0; i < columns; ++i) y[i] *= dy[r * columns + i] - dot;
    }
}

/* Exponentials of 1.5 u of numbers that are rounded once, a product, a sum in double; backward five more. */
static op_case soft(int ndim, const int64_t *shape) {
    op_case c = {.name = "softmax",
                 .graph = softmax,
                 .reference = softmax_reference,
                 .gradient = softmax_gradient,
                 .n = 1,
                 .in = {{.ndim = ndim}},
                 .roundings = 16};
    rows = 1, columns = shape[ndim - 1];
    for (int d = 0; d < ndim - 1; ++d) rows *= shape[d];
    memcpy(c.in[0].shape, shape, (size_t)ndim * sizeof *shape);
    return c;
}

Test(softmax, gradients) {
    static const int64_t shapes[][4] = {{7}, {1}, {3, 5}, {2, 3, 1}, {2, 3, 2, 33}};
    static const int dims[] = {1, 1, 2, 3, 4};
    for (int i = 0; i < 5; ++i) {
        const op_case c = soft(dims[i], shapes[i]);
        opcheck(&c);
    }
}

Test(softmax, large_and_nothing) {
    static const int64_t shapes[][2] = {{3001, 17}, {5, 40001}, {0, 4}, {4, 0}};
    for (int i = 0; i < 4; ++i) {
        const op_case c = soft(2, shapes[i]);
        opcheck_values(&c);
        opcheck_f32(&c);
        opcheck_threads(&c);
    }
}

/* Numbers of any size, masks, and what is not a number. */
Test(softmax, rows) {
    enum { ROWS = 8, C = 3 };
    for (int wide = 0; wide < 2; ++wide) {
        const double far = wide ? 1.7e308 : 3.4e38, no = -INFINITY;
        const double in[ROWS][C] = {{no, no, no}, {no, 2, no},   {far, -far, far}, {-far, -far, -far},
                                    {1, NAN, 2},  {no, NAN, no}, {INFINITY, 1, 2}, {1000, 999, no}};
        const double e = 1 / (1 + exp(-1)),
                     want[ROWS][C] = {{0, 0, 0},       {0, 1, 0},       {0.5, 0, 0.5},   {1 / 3.0, 1 / 3.0, 1 / 3.0},
                                      {NAN, NAN, NAN}, {NAN, NAN, NAN}, {NAN, NAN, NAN}, {e, 1 - e, 0}};
        fattn_ctx *ctx;
        fattn_tape *t;
        cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
        cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
        const int64_t shape[] = {ROWS, C};
        const fattn_dtype dtype = wide ? FATTN_F64 : FATTN_F32;
        double memory[2][ROWS * C] = {{0}}, y[ROWS][C], dx[ROWS][C];
        fattn_param p = {.value = fattn_tensor_view(memory[0], dtype, FATTN_CPU, 0, 2, shape),
                         .grad = fattn_tensor_view(memory[1], dtype, FATTN_CPU, 0, 2, shape)};
        const fattn_tensor from = fattn_tensor_view((void *)(uintptr_t)in, FATTN_F64, FATTN_CPU, 0, 2, shape);
        const fattn_tensor to = fattn_tensor_view(y, FATTN_F64, FATTN_CPU, 0, 2, shape);
        const fattn_tensor d_to = fattn_tensor_view(dx, FATTN_F64, FATTN_CPU, 0, 2, shape);
        fattn_tensor value;
        cr_assert_eq(fattn_tensor_copy(ctx, &p.value, &from), FATTN_OK);
        const fattn_var v = fattn_op_softmax(t, fattn_use(t, &p));
        cr_assert_eq(fattn_tape_value(t, v, &value), FATTN_OK);
        cr_assert_eq(fattn_tensor_copy(ctx, &to, &value), FATTN_OK);
        cr_assert_eq(fattn_tape_backward(t, op_contract(t, v)), FATTN_OK);
        cr_assert_eq(fattn_tensor_copy(ctx, &d_to, &p.grad), FATTN_OK);
        for (int i = 0; i < ROWS * C; ++i) {
            const double got = y[i / C][i % C], right = want[i / C][i % C];
            cr_assert(isnan(right) ? isnan(got) : fabs(got - right) <= 4 * (wide ? 0x1p-53 : 0x1p-24),
                      "row %d, element %d: %g, not %g", i / C, i % C, got, right);
            cr_assert(isnan(right) == isnan(dx[i / C][i % C]), "row %d's gradient", i / C);
            if (i < C) cr_assert_eq(dx[0][i], 0, "of a masked row");
        }
        fattn_tape_destroy(t);
        fattn_ctx_destroy(ctx);
    }
}

/* Sums of F32 and F64 are in double and rounded once, also where they are cut in parts: numbers of 2^-20 to 2^20 and
   their negatives, far from each other, leave what is added to them. A mean of equal numbers is that number. */
Test(sum, rounds_once) {
    enum { MOST = 4100, COLUMNS = 3 };
    static const int64_t lengths[] = {6, 130, 257, 1025, MOST - 2};
    static double memory[MOST * COLUMNS];
    static const int first[] = {0};
    fattn_ctx *ctx;
    fattn_tape *t;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    for (size_t n = 0; n < 2 * sizeof lengths / sizeof *lengths; ++n) {
        const int64_t R = lengths[n / 2] / 2 * 2, all = R + 1, shape[2] = {all, COLUMNS};
        const fattn_dtype dtype = n % 2 ? FATTN_F64 : FATTN_F32;
        const fattn_tensor x = fattn_tensor_view(memory, dtype, FATTN_CPU, 0, 2, shape);
        fattn_tensor y, z;
        for (int64_t i = 0; i < R * COLUMNS; ++i) {
            const int64_t half = R / 2 * COLUMNS, e = i % half;
            const double number = ldexp(1 + (double)(e % 7), (int)(e * 11 % 41) - 20);
            fattni_store(memory, (int32_t)dtype, i, i < half ? number : -number);
        }
        for (int64_t i = 0; i < COLUMNS; ++i) fattni_store(memory, (int32_t)dtype, R * COLUMNS + i, ldexp(3, -22));
        fattn_tape_reset(t);
        cr_assert_eq(fattn_tape_value(t, fattn_op_sum(t, fattn_input(t, &x), first, 1, 0), &y), FATTN_OK);
        for (int64_t i = 0; i < COLUMNS; ++i)
            cr_assert_eq(fattni_load(y.data, y.dtype, i), ldexp(3, -22), "%d rows", (int)R);
        const double sum = ldexp(3 * COLUMNS, -22);
        cr_assert_eq(fattn_tape_value(t, fattn_op_sum(t, fattn_input(t, &x), NULL, 0, 0), &y), FATTN_OK);
        cr_assert_eq(fattni_load(y.data, y.dtype, 0), sum, "%d rows", (int)R);
        for (int64_t i = 0; i < all * COLUMNS; ++i) fattni_store(memory, (int32_t)dtype, i, 1);
        cr_assert_eq(fattn_tape_value(t, fattn_op_mean(t, fattn_input(t, &x), NULL, 0, 0), &y), FATTN_OK);
        cr_assert_eq(fattn_tape_value(t, fattn_op_mean(t, fattn_input(t, &x), first, 1, 0), &z), FATTN_OK);
        cr_assert_eq(fattni_load(y.data, y.dtype, 0), 1, "%d rows", (int)R);
        for (int64_t i = 0; i < COLUMNS; ++i) cr_assert_eq(fattni_load(z.data, z.dtype, i), 1, "%d rows", (int)R);
    }
    fattn_tape_destroy(t);
    fattn_ctx_destroy(ctx);
}

static fattn_var sum_dim(fattn_tape *t, const fattn_var *in) { return fattn_op_sum(t, in[0], (const int[]){2}, 1, 0); }
static fattn_var sum_twice(fattn_tape *t, const fattn_var *in) {
    return fattn_op_sum(t, in[0], (const int[]){1, 1}, 2, 0);
}
static fattn_var mean_below(fattn_tape *t, const fattn_var *in) {
    return fattn_op_mean(t, in[0], (const int[]){-1}, 1, 1);
}
static fattn_var mean_all(fattn_tape *t, const fattn_var *in) { return fattn_op_mean(t, in[0], NULL, 0, 0); }
static fattn_var mean_rows(fattn_tape *t, const fattn_var *in) {
    return fattn_op_mean(t, in[0], (const int[]){1}, 1, 0);
}
static fattn_var sum_null(fattn_tape *t, const fattn_var *in) { return fattn_op_sum(t, in[0], NULL, 1, 0); }
static fattn_var sum_six(fattn_tape *t, const fattn_var *in) { return fattn_op_sum(t, in[0], now.dims, 6, 0); }
static fattn_var softmax_transposed(fattn_tape *t, const fattn_var *in) {
    return fattn_op_softmax(t, fattn_op_transpose(t, in[0], 0, 1));
}

Test(reduce, errors) {
    const op_error list[] = {
        {sum_dim, FATTN_E_ARG, "sum: dims[0] is 2, no dimension of x, [3,4]", 1, {{FATTN_F32, 2, {3, 4}}}},
        {sum_twice, FATTN_E_ARG, "sum: dims[1] is 1, named twice", 1, {{FATTN_F32, 2, {3, 4}}}},
        {mean_below, FATTN_E_ARG, "mean: dims[0] is -1, no dimension of x", 1, {{FATTN_F32, 2, {3, 4}}}},
        {mean_all, FATTN_E_SHAPE, "mean: x is [3,0]: there is no mean", 1, {{FATTN_F32, 2, {3, 0}}}},
        {mean_rows, FATTN_E_SHAPE, "mean: x is [3,0]: there is no mean", 1, {{FATTN_F32, 2, {3, 0}}}},
        {sum_null, FATTN_E_ARG, "sum: dims is NULL, or their number 1", 1, {{FATTN_F32, 2, {3, 4}}}},
        {sum_six, FATTN_E_ARG, "their number 6 is not 0..5", 1, {{FATTN_F32, 2, {3, 4}}}},
        {mean_all, FATTN_E_DTYPE, "mean: x is i32", 1, {{FATTN_I32, 2, {3, 4}}}},
        {mean_all, FATTN_E_ARG, "mean: x is absent", 1, {{0}}},
        {softmax, FATTN_E_ARG, "softmax: x is absent", 1, {{0}}},
        {softmax, FATTN_E_SHAPE, "softmax: x is a scalar", 1, {{FATTN_F32, 0, {0}}}},
        {softmax, FATTN_E_DTYPE, "softmax: x is u8", 1, {{FATTN_U8, 1, {4}}}},
        {softmax_transposed, FATTN_E_UNSUPPORTED, "the last dimension of x has stride 4", 1, {{FATTN_F32, 2, {3, 4}}}},
    };
    opcheck_errors(list, sizeof list / sizeof *list);
}
