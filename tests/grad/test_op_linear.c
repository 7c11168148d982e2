/* linear and matmul. */
#include "opcheck.h"

#include <criterion/criterion.h>

#include <math.h>
#include <stdlib.h>

static fattn_var linear(fattn_tape *t, const fattn_var *in) { return fattn_op_linear(t, in[0], in[1], in[2]); }

/* Sizes, set by the test that uses the reference. */
static int64_t R, M, N, K;

static void linear_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t r = 0; r < R; ++r)
        for (int64_t n = 0; n < N; ++n) {
            y[r * N + n] = in[2] ? in[2][n] : 0;
            for (int64_t k = 0; k < K; ++k) y[r * N + n] += in[0][r * K + k] * in[1][n * K + k];
        }
}

static void linear_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    (void)ids;
    for (int64_t e = 0; e < R * K; ++e) d[0][e] = 0;
    for (int64_t e = 0; e < N * K; ++e) d[1][e] = 0;
    for (int64_t n = 0; n < N && d[2]; ++n) d[2][n] = 0;
    for (int64_t r = 0; r < R; ++r)
        for (int64_t n = 0; n < N; ++n) {
            const double g = dy[r * N + n];
            for (int64_t k = 0; k < K; ++k) {
                d[0][r * K + k] += g * in[1][n * K + k];
                d[1][n * K + k] += g * in[0][r * K + k];
            }
            if (d[2]) d[2][n] += g;
        }
}

/* K products and sums forward, R backward, of numbers up to 4: 16 in units of the largest result. */
static double roundings(int64_t terms) { return 16.0 * (double)terms; }

Test(linear, rows_of_many_dimensions) {
    const int64_t shape[][FATTN_MAX_DIMS] = {{7}, {3, 7}, {2, 3, 7}, {2, 3, 2, 7}, {2, 1, 3, 2, 7}};
    const int64_t rows[] = {1, 3, 6, 12, 12};
    K = 7, N = 11;
    for (int d = 0; d < 5; ++d)
        for (int bias = 0; bias < 2; ++bias) {
            op_case c = {.name = "linear",
                         .graph = linear,
                         .reference = linear_reference,
                         .gradient = linear_gradient,
                         .n = 3,
                         .in = {{.ndim = d + 1}, {2, {N, K}}, {1, {N}, .absent = !bias}},
                         .any_strides = !bias,
                         .roundings = roundings(12)};
            for (int k = 0; k < FATTN_MAX_DIMS; ++k) c.in[0].shape[k] = shape[d][k];
            R = rows[d];
            opcheck(&c);
        }
}

Test(linear, single_rows_and_columns) {
    const int64_t sizes[][3] = {{1, 1, 1}, {5, 1, 3}, {1, 4, 3}, {5, 4, 1}};
    for (int i = 0; i < 4; ++i) {
        R = sizes[i][0], N = sizes[i][1], K = sizes[i][2];
        opcheck(&(op_case){.name = "linear",
                           .graph = linear,
                           .reference = linear_reference,
                           .gradient = linear_gradient,
                           .n = 3,
                           .in = {{2, {R, K}}, {2, {N, K}}, {1, {N}}},
                           .roundings = roundings(5)});
    }
}

static fattn_var onto(fattn_tape *t, const fattn_var *in) {
    return fattn_op_linear_residual(t, in[0], in[1], in[2], in[3]);
}

static void onto_reference(const double *const *in, const int32_t *const *ids, double *y) {
    linear_reference(in, ids, y);
    for (int64_t e = 0; e < R * N; ++e) y[e] += in[3][e];
}

static void onto_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    linear_gradient(in, ids, dy, d);
    for (int64_t e = 0; e < R * N && d[3]; ++e) d[3][e] = dy[e];
}

/* Square weights too, where x has the residual's shape, but its gradient is another. */
Test(linear, onto_a_residual) {
    const int64_t sizes[][3] = {{6, 11, 7}, {6, 7, 7}, {1, 1, 1}, {6, 5, 1}};
    for (int i = 0; i < 4; ++i)
        for (int bias = 0; bias < 2; ++bias) {
            R = sizes[i][0], N = sizes[i][1], K = sizes[i][2];
            const int64_t half = R / 2 > 0 ? R / 2 : 1;
            opcheck(&(op_case){
                .name = "linear",
                .graph = onto,
                .reference = onto_reference,
                .gradient = onto_gradient,
                .n = 4,
                .in = {{3, {R / half, half, K}}, {2, {N, K}}, {1, {N}, .absent = !bias}, {3, {R / half, half, N}}},
                .any_strides = !bias,
                .roundings = roundings(12)});
        }
}

/* gelu(x w^T + b): the reference and its gradient from those of linear. */
static fattn_var activated(fattn_tape *t, const fattn_var *in) { return fattn_op_linear_gelu(t, in[0], in[1], in[2]); }

static double gelu_of(double x, double *slope) {
    const double u = 0.7978845608028654 * (x + 0.044715 * x * x * x), y = tanh(u);
    *slope = 0.5 * (1 + y) + 0.5 * x * (1 - y * y) * 0.7978845608028654 * (1 + 0.134145 * x * x);
    return 0.5 * x * (1 + y);
}

static void activated_reference(const double *const *in, const int32_t *const *ids, double *y) {
    double slope;
    linear_reference(in, ids, y);
    for (int64_t e = 0; e < R * N; ++e) y[e] = gelu_of(y[e], &slope);
}

static void activated_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    double z[128], slope;
    cr_assert_leq(R * N, 128);
    linear_reference(in, ids, z);
    for (int64_t e = 0; e < R * N; ++e) {
        gelu_of(z[e], &slope);
        z[e] = dy[e] * slope;
    }
    linear_gradient(in, ids, z, d);
}

/* A slope of gelu has about as many roundings as a product of these sizes. */
Test(linear, with_gelu) {
    const int64_t sizes[][3] = {{6, 11, 7}, {1, 1, 1}, {6, 5, 1}};
    for (int i = 0; i < 3; ++i)
        for (int bias = 0; bias < 2; ++bias) {
            R = sizes[i][0], N = sizes[i][1], K = sizes[i][2];
            const int64_t half = R / 2 > 0 ? R / 2 : 1;
            opcheck(&(op_case){.name = "linear",
                               .graph = activated,
                               .reference = activated_reference,
                               .gradient = activated_gradient,
                               .n = 3,
                               .in = {{3, {R / half, half, K}}, {2, {N, K}}, {1, {N}, .absent = !bias}},
                               .any_strides = !bias,
                               .roundings = roundings(24)});
        }
}

/* A stream that is its own residual: both of its gradients reach it. */
static fattn_var onto_itself(fattn_tape *t, const fattn_var *in) {
    return fattn_op_linear_residual(t, in[0], in[1], (fattn_var){0}, in[0]);
}

static void itself_reference(const double *const *in, const int32_t *const *ids, double *y) {
    linear_reference((const double *const[]){in[0], in[1], NULL}, ids, y);
    for (int64_t e = 0; e < R * N; ++e) y[e] += in[0][e];
}

static void itself_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    linear_gradient((const double *const[]){in[0], in[1], NULL}, ids, dy, (double *const[]){d[0], d[1], NULL});
    for (int64_t e = 0; e < R * N; ++e) d[0][e] += dy[e];
}

Test(linear, onto_its_own_input) {
    R = 6, N = K = 9;
    opcheck(&(op_case){.name = "linear",
                       .graph = onto_itself,
                       .reference = itself_reference,
                       .gradient = itself_gradient,
                       .n = 2,
                       .in = {{3, {2, 3, K}}, {2, {N, K}}},
                       .any_strides = true,
                       .roundings = roundings(12)});
}

/* Blocks, the split of the weight gradient's long sum, the parts of the bias gradient. */
Test(linear, large) {
    R = 2100, N = 130, K = 65;
    const op_case c = {.name = "linear",
                       .graph = linear,
                       .reference = linear_reference,
                       .gradient = linear_gradient,
                       .n = 3,
                       .in = {{3, {3, 700, K}}, {2, {N, K}}, {1, {N}}},
                       .roundings = roundings(R)};
    opcheck_values(&c);
    opcheck_f32(&c);
    opcheck_threads(&c);
}

Test(linear, nothing) {
    const int64_t sizes[][3] = {{0, 4, 3}, {5, 0, 3}, {5, 4, 0}};
    for (int i = 0; i < 3; ++i) {
        R = sizes[i][0], N = sizes[i][1], K = sizes[i][2];
        const op_case c = {.name = "linear",
                           .graph = linear,
                           .reference = linear_reference,
                           .gradient = linear_gradient,
                           .n = 3,
                           .in = {{2, {R, K}}, {2, {N, K}}, {1, {N}}},
                           .roundings = 4};
        opcheck_values(&c); /* K = 0: y is the bias */
        opcheck_f32(&c);
    }
}

/* Inputs that OpenBLAS cannot read directly: one row for all, rows in reverse order. */
Test(linear, repeated_and_reversed_rows) {
    fattn_ctx *ctx;
    fattn_tape *t;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    double x[] = {1, 2, 3, 4, 5, 6}, w[] = {1, 10, 100, 1, 0, 0};
    fattn_tensor xt = fattn_tensor_view(x, FATTN_F64, FATTN_CPU, 0, 2, (const int64_t[]){2, 3});
    const fattn_tensor wt = fattn_tensor_view(w, FATTN_F64, FATTN_CPU, 0, 2, (const int64_t[]){2, 3});
    const fattn_var none = {0}, wv = fattn_input(t, &wt);
    const double want[][4] = {{321, 1, 321, 1}, {654, 4, 321, 1}};
    for (int reversed = 0; reversed < 2; ++reversed) {
        xt.stride[0] = reversed ? -3 : 0;
        xt.data = reversed ? x + 3 : x;
        const fattn_var xv = fattn_input(t, &xt), y = fattn_op_linear(t, xv, wv, none);
        const fattn_var same = fattn_op_matmul(t, xv, wv, 0, 1);
        for (int i = 0; i < 2; ++i) {
            fattn_tensor value;
            cr_assert_eq(fattn_tape_value(t, i ? same : y, &value), FATTN_OK);
            for (int e = 0; e < 4; ++e) cr_assert_eq(((const double *)value.data)[e], want[reversed][e]);
        }
    }
    fattn_tape_destroy(t);
    fattn_ctx_destroy(ctx);
}

Test(linear, errors) {
    const op_error list[] = {
        {linear, FATTN_E_SHAPE, "x is [2,77], w is [96,76]", 2, {{FATTN_F32, 2, {2, 77}}, {FATTN_F32, 2, {96, 76}}}},
        {onto,
         FATTN_E_SHAPE,
         "w is [9,7], residual is [1,9]: it needs the shape of x w^T",
         4,
         {{FATTN_F32, 2, {2, 7}}, {FATTN_F32, 2, {9, 7}}, {FATTN_F32, 1, {9}}, {FATTN_F32, 2, {1, 9}}}},
        {onto,
         FATTN_E_DTYPE,
         "residual",
         4,
         {{FATTN_F32, 2, {2, 7}}, {FATTN_F32, 2, {9, 7}}, {FATTN_F32, 1, {9}}, {FATTN_F64, 2, {2, 9}}}},
        {linear, FATTN_E_SHAPE, "[..,K] and [N,K]", 2, {{FATTN_F32, 0}, {FATTN_F32, 2, {96, 76}}}},
        {linear, FATTN_E_SHAPE, "w is [76]", 2, {{FATTN_F32, 2, {2, 76}}, {FATTN_F32, 1, {76}}}},
        {linear,
         FATTN_E_SHAPE,
         "w is [9,7], bias is [8]",
         3,
         {{FATTN_F32, 2, {2, 7}}, {FATTN_F32, 2, {9, 7}}, {FATTN_F32, 1, {8}}}},
        {linear,
         FATTN_E_DTYPE,
         "w is f64, but the first input is f32",
         2,
         {{FATTN_F32, 2, {2, 7}}, {FATTN_F64, 2, {9, 7}}}},
        {linear,
         FATTN_E_DTYPE,
         "bias is f64",
         3,
         {{FATTN_F32, 2, {2, 7}}, {FATTN_F32, 2, {9, 7}}, {FATTN_F64, 1, {9}}}},
        {linear, FATTN_E_DTYPE, "x is i32, not a floating type", 2, {{FATTN_I32, 2, {2, 7}}, {FATTN_F32, 2, {9, 7}}}},
        {linear,
         FATTN_E_SHAPE,
         "[1099511627776,1099511627776] is too large",
         2,
         {{FATTN_F32, 2, {INT64_C(1) << 40, 0}}, {FATTN_F32, 2, {INT64_C(1) << 40, 0}}}},
        {linear,
         FATTN_E_UNSUPPORTED,
         "a product of 4294967296 x 3",
         2,
         {{FATTN_F32, 2, {INT64_C(1) << 32, 0}}, {FATTN_F32, 2, {3, 0}}}},
        {linear, FATTN_E_ARG, "w is absent", 2, {{FATTN_F32, 2, {2, 7}}}},
        {linear, FATTN_E_ARG, "x is absent", 1, {{0}}},
    };
    opcheck_errors(list, sizeof list / sizeof *list);
}

static fattn_var matmul_nn(fattn_tape *t, const fattn_var *in) { return fattn_op_matmul(t, in[0], in[1], 0, 0); }
static fattn_var matmul_nt(fattn_tape *t, const fattn_var *in) { return fattn_op_matmul(t, in[0], in[1], 0, 1); }
static fattn_var matmul_tn(fattn_tape *t, const fattn_var *in) { return fattn_op_matmul(t, in[0], in[1], 1, 0); }
static fattn_var matmul_tt(fattn_tape *t, const fattn_var *in) {
    return fattn_op_matmul(t, in[0], in[1], 7, -1); /* anything but 0 */
}
static const op_graph matmuls[] = {matmul_nn, matmul_nt, matmul_tn, matmul_tt};
static int flags;

static void matmul_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t r = 0; r < R; ++r)
        for (int64_t m = 0; m < M; ++m)
            for (int64_t n = 0; n < N; ++n) {
                const double *const a = in[0] + r * M * K, *const b = in[1] + r * K * N;
                double sum = 0;
                for (int64_t k = 0; k < K; ++k)
                    sum += a[flags & 2 ? k * M + m : m * K + k] * b[flags & 1 ? n * K + k : k * N + n];
                y[(r * M + m) * N + n] = sum;
            }
}

static void matmul_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    (void)ids;
    for (int64_t e = 0; e < R * M * K; ++e) d[0][e] = 0;
    for (int64_t e = 0; e < R * N * K; ++e) d[1][e] = 0;
    for (int64_t r = 0; r < R; ++r)
        for (int64_t m = 0; m < M; ++m)
            for (int64_t n = 0; n < N; ++n)
                for (int64_t k = 0; k < K; ++k) {
                    const int64_t a = r * M * K + (flags & 2 ? k * M + m : m * K + k);
                    const int64_t b = r * K * N + (flags & 1 ? n * K + k : k * N + n);
                    d[0][a] += dy[(r * M + m) * N + n] * in[1][b];
                    d[1][b] += dy[(r * M + m) * N + n] * in[0][a];
                }
}

static op_case matmul(int how) {
    flags = how;
    op_case c = {.name = "matmul",
                 .graph = matmuls[how],
                 .reference = matmul_reference,
                 .gradient = matmul_gradient,
                 .n = 2,
                 .any_strides = true,
                 .roundings = roundings(M > K ? (M > N ? M : N) : (K > N ? K : N))};
    const int64_t a[] = {how & 2 ? K : M, how & 2 ? M : K}, b[] = {how & 1 ? N : K, how & 1 ? K : N};
    const int64_t leading = R == 6 ? 2 : R == 1 ? 0 : 1;
    for (int i = 0; i < 2; ++i) {
        int n = 0;
        if (leading == 2) c.in[i].shape[n++] = 2, c.in[i].shape[n++] = 3;
        if (leading == 1) c.in[i].shape[n++] = R;
        c.in[i].shape[n++] = (i ? b : a)[0];
        c.in[i].shape[n++] = (i ? b : a)[1];
        c.in[i].ndim = n;
    }
    return c;
}

Test(matmul, every_transpose) {
    const int64_t sizes[][4] = {{6, 3, 4, 5}, {1, 4, 3, 2}, {2, 1, 4, 3}, {3, 4, 1, 3}, {2, 3, 4, 1}, {1, 1, 1, 1}};
    for (int i = 0; i < 6 * 4; ++i) {
        R = sizes[i / 4][0], M = sizes[i / 4][1], N = sizes[i / 4][2], K = sizes[i / 4][3];
        const op_case c = matmul(i % 4);
        opcheck(&c);
    }
}

Test(matmul, large) {
    for (int i = 0; i < 8; ++i) {
        R = i < 4 ? 2 : 1, M = i < 4 ? 131 : 65, N = 129, K = i < 4 ? 19 : 1100;
        const op_case c = matmul(i % 4);
        opcheck_values(&c);
        opcheck_f32(&c);
        opcheck_threads(&c);
    }
}

Test(matmul, nothing) {
    const int64_t sizes[][4] = {{0, 3, 4, 5}, {2, 0, 4, 5}, {2, 3, 0, 5}, {2, 3, 4, 0}};
    for (int i = 0; i < 4 * 4; ++i) {
        R = sizes[i / 4][0], M = sizes[i / 4][1], N = sizes[i / 4][2], K = sizes[i / 4][3];
        const op_case c = matmul(i % 4);
        opcheck_values(&c); /* K = 0: zeros */
        opcheck_f32(&c);
    }
}

Test(matmul, errors) {
    const op_error list[] = {
        {matmul_nn,
         FATTN_E_SHAPE,
         "a is [2,3], b is [4,5]: [..,M,K] x [..,K,N]",
         2,
         {{FATTN_F32, 2, {2, 3}}, {FATTN_F32, 2, {4, 5}}}},
        {matmul_nt, FATTN_E_SHAPE, "[..,M,K] x [..,N,K]", 2, {{FATTN_F32, 2, {2, 3}}, {FATTN_F32, 2, {3, 5}}}},
        {matmul_tn, FATTN_E_SHAPE, "[..,K,M] x [..,K,N]", 2, {{FATTN_F32, 2, {2, 3}}, {FATTN_F32, 2, {3, 5}}}},
        {matmul_tt, FATTN_E_SHAPE, "[..,K,M] x [..,N,K]", 2, {{FATTN_F32, 2, {2, 3}}, {FATTN_F32, 2, {5, 3}}}},
        {matmul_nn,
         FATTN_E_SHAPE,
         "a is [7,2,3], b is [6,3,2]",
         2,
         {{FATTN_F32, 3, {7, 2, 3}}, {FATTN_F32, 3, {6, 3, 2}}}},
        {matmul_nn, FATTN_E_SHAPE, "b is [3,2]", 2, {{FATTN_F32, 3, {7, 2, 3}}, {FATTN_F32, 2, {3, 2}}}},
        {matmul_nn, FATTN_E_SHAPE, "a is [3]", 2, {{FATTN_F32, 1, {3}}, {FATTN_F32, 1, {3}}}},
        {matmul_nn, FATTN_E_DTYPE, "b is f64", 2, {{FATTN_F32, 2, {2, 3}}, {FATTN_F64, 2, {3, 5}}}},
        {matmul_nn, FATTN_E_ARG, "b is absent", 1, {{FATTN_F32, 2, {2, 3}}}},
    };
    opcheck_errors(list, sizeof list / sizeof *list);
}
