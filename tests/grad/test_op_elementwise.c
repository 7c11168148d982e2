/* add, mul, gelu, silu, relu, tanh, scale, swiglu, geglu, cast. */
#include "opcheck.h"

#include <criterion/criterion.h>

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static fattn_var add(fattn_tape *t, const fattn_var *in) { return fattn_op_add(t, in[0], in[1]); }
static fattn_var mul(fattn_tape *t, const fattn_var *in) { return fattn_op_mul(t, in[0], in[1]); }

/* Shapes of a and b; the references read them here. */
typedef struct pair {
    int n;
    int64_t a[FATTN_MAX_DIMS];
    int m;
    int64_t b[FATTN_MAX_DIMS];
} pair;
static pair sizes;

static int64_t count_a(void) {
    int64_t n = 1;
    for (int d = 0; d < sizes.n; ++d) n *= sizes.a[d];
    return n;
}

/* The index of b's element that is combined with element e of a. */
static int64_t place_in_b(int64_t e) {
    int64_t place = 0, stride = 1;
    for (int d = sizes.n - 1; d >= 0; --d) {
        const int own = d - (sizes.n - sizes.m);
        const int64_t i = e % sizes.a[d];
        e /= sizes.a[d];
        if (own < 0) continue;
        place += sizes.b[own] == 1 ? 0 : i * stride;
        stride *= sizes.b[own];
    }
    return place;
}

static void add_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t e = 0; e < count_a(); ++e) y[e] = in[0][e] + in[1][place_in_b(e)];
}

static void mul_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t e = 0; e < count_a(); ++e) y[e] = in[0][e] * in[1][place_in_b(e)];
}

static void add_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    (void)in, (void)ids;
    int64_t count_b = 1;
    for (int k = 0; k < sizes.m; ++k) count_b *= sizes.b[k];
    for (int64_t e = 0; e < count_b; ++e) d[1][e] = 0;
    for (int64_t e = 0; e < count_a(); ++e) d[0][e] = dy[e], d[1][place_in_b(e)] += dy[e];
}

static void mul_gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    (void)ids;
    int64_t count_b = 1;
    for (int k = 0; k < sizes.m; ++k) count_b *= sizes.b[k];
    for (int64_t e = 0; e < count_b; ++e) d[1][e] = 0;
    for (int64_t e = 0; e < count_a(); ++e) {
        d[0][e] = dy[e] * in[1][place_in_b(e)];
        d[1][place_in_b(e)] += dy[e] * in[0][e];
    }
}

/* db sums up to count_a() terms below 16. */
static op_case binary(bool times) {
    op_case c = {.name = times ? "mul" : "add",
                 .graph = times ? mul : add,
                 .reference = times ? mul_reference : add_reference,
                 .gradient = times ? mul_gradient : add_gradient,
                 .n = 2,
                 .in = {{.ndim = sizes.n}, {.ndim = sizes.m}},
                 .any_strides = true,
                 .roundings = 16 + 16 * (double)count_a()};
    for (int d = 0; d < FATTN_MAX_DIMS; ++d) {
        c.in[0].shape[d] = sizes.a[d];
        c.in[1].shape[d] = sizes.b[d];
    }
    return c;
}

Test(broadcast, shapes) {
    const pair list[] = {
        {2, {3, 4}, 2, {3, 4}},
        {2, {3, 4}, 1, {4}},
        {2, {3, 4}, 2, {3, 1}},
        {2, {3, 4}, 2, {1, 4}},
        {2, {3, 4}, 0, {0}},
        {2, {3, 4}, 2, {1, 1}},
        {0, {0}, 0, {0}},
        {1, {5}, 1, {1}},
        {3, {2, 3, 4}, 2, {3, 4}},
        {3, {2, 3, 4}, 3, {2, 1, 4}},
        {4, {2, 3, 2, 2}, 3, {3, 1, 2}},
        {5, {2, 2, 3, 2, 2}, 5, {2, 1, 3, 1, 2}},
        {5, {2, 2, 3, 2, 2}, 4, {2, 1, 2, 1}},
        {2, {1, 4}, 1, {4}},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list * 2; ++i) {
        sizes = list[i / 2];
        const op_case c = binary(i % 2);
        opcheck(&c);
    }
}

/* Several tasks and parts: rows, columns, everything, a few long and many short sums. */
Test(broadcast, large) {
    const pair list[] = {
        {2, {4200, 33}, 1, {33}},        {2, {33, 4200}, 2, {33, 1}},        {2, {170, 300}, 0, {0}},
        {2, {3, 40001}, 1, {40001}},     {3, {70, 3, 301}, 3, {70, 1, 301}}, {2, {300, 301}, 2, {300, 301}},
        {3, {130, 5, 70}, 3, {1, 5, 1}},
    };
    for (size_t i = 0; i < sizeof list / sizeof *list * 2; ++i) {
        sizes = list[i / 2];
        const op_case c = binary(i % 2);
        opcheck_values(&c);
        opcheck_f32(&c);
        opcheck_threads(&c);
    }
}

Test(broadcast, nothing) {
    const pair list[] = {{2, {0, 4}, 1, {4}}, {2, {3, 0}, 1, {0}}, {2, {0, 4}, 2, {0, 4}}, {2, {3, 0}, 2, {3, 1}}};
    for (size_t i = 0; i < sizeof list / sizeof *list * 2; ++i) {
        sizes = list[i / 2];
        const op_case c = binary(i % 2);
        opcheck_values(&c);
        opcheck_f32(&c);
    }
}

Test(broadcast, errors) {
    const op_error list[] = {
        {add,
         FATTN_E_SHAPE,
         "a is [3,4], b is [3]: b must broadcast to a",
         2,
         {{FATTN_F32, 2, {3, 4}}, {FATTN_F32, 1, {3}}}},
        {add, FATTN_E_SHAPE, "b is [1,3,4]", 2, {{FATTN_F32, 2, {3, 4}}, {FATTN_F32, 3, {1, 3, 4}}}},
        {mul, FATTN_E_SHAPE, "a is [1,4], b is [3,4]", 2, {{FATTN_F32, 2, {1, 4}}, {FATTN_F32, 2, {3, 4}}}},
        {add, FATTN_E_DTYPE, "add: b is f64", 2, {{FATTN_F32, 1, {4}}, {FATTN_F64, 1, {4}}}},
        {mul, FATTN_E_DTYPE, "mul: a is u8", 2, {{FATTN_U8, 1, {4}}, {FATTN_U8, 1, {4}}}},
        {add, FATTN_E_ARG, "add: b is absent", 1, {{FATTN_F32, 1, {4}}}},
        {mul, FATTN_E_ARG, "mul: b is absent", 1, {{FATTN_F32, 1, {4}}}},
    };
    opcheck_errors(list, sizeof list / sizeof *list);
}

static const double factor = -1.7;
static fattn_var gelu(fattn_tape *t, const fattn_var *in) { return fattn_op_gelu(t, in[0]); }
static fattn_var silu(fattn_tape *t, const fattn_var *in) { return fattn_op_silu(t, in[0]); }
static fattn_var relu(fattn_tape *t, const fattn_var *in) { return fattn_op_relu(t, in[0]); }
static fattn_var tanh_op(fattn_tape *t, const fattn_var *in) { return fattn_op_tanh(t, in[0]); }
static fattn_var scale(fattn_tape *t, const fattn_var *in) { return fattn_op_scale(t, in[0], factor); }

static double gelu_of(double x) { return 0.5 * x * (1 + tanh(sqrt(2 / acos(-1)) * (x + 0.044715 * x * x * x))); }
static double silu_of(double x) { return x / (1 + exp(-x)); }
static double relu_of(double x) { return x > 0 ? x : 0; }
static double scale_of(double x) { return factor * x; }

static const struct {
    const char *name;
    op_graph graph;
    double (*of)(double x);
} functions[] = {
    {"gelu", gelu, gelu_of}, {"silu", silu, silu_of},    {"relu", relu, relu_of},
    {"tanh", tanh_op, tanh}, {"scale", scale, scale_of},
};
enum { FUNCTIONS = sizeof functions / sizeof *functions };

static int64_t length;
static int function; /* what the reference computes */

static void unary_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t e = 0; e < length; ++e) y[e] = functions[function].of(in[0][e]);
}

static op_case unary(int which, int64_t n) {
    length = n;
    function = which;
    return (op_case){.name = functions[which].name,
                     .graph = functions[which].graph,
                     .reference = unary_reference,
                     .n = 1,
                     .in = {{1, {n}}},
                     .any_strides = true,
                     .roundings = 16};
}

Test(unary, gradients) {
    for (int i = 0; i < FUNCTIONS; ++i) {
        op_case c = unary(i, 5 * 7);
        opcheck(&c);
        c.in[0] = (op_input){3, {5, 1, 7}};
        opcheck(&c);
    }
}

Test(unary, large_and_nothing) {
    for (int i = 0; i < 2 * FUNCTIONS; ++i) {
        const op_case c = unary(i / 2, i & 1 ? 70001 : 0);
        opcheck_values(&c);
        opcheck_f32(&c);
        opcheck_threads(&c);
    }
}

/* Tails, where exponentials over- and underflow: the error is below 16 roundings of |x|, and results that should be 0
   are 0. */
Test(unary, every_magnitude_in_f32) {
    fattn_ctx *ctx;
    fattn_tape *t;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
    enum { N = 4001 };
    static float x[N], dx[N];
    for (int i = 0; i < N; ++i) {
        const double magnitude = pow(10, -6 + 10.0 * abs(i - N / 2) / (N / 2));
        x[i] = (float)(i < N / 2 ? -magnitude : magnitude);
    }
    for (int which = 0; which < FUNCTIONS; ++which) {
        fattn_tape_reset(t);
        for (int i = 0; i < N; ++i) dx[i] = 0;
        fattn_param p = {.value = fattn_tensor_view(x, FATTN_F32, FATTN_CPU, 0, 1, (const int64_t[]){N}),
                         .grad = fattn_tensor_view(dx, FATTN_F32, FATTN_CPU, 0, 1, (const int64_t[]){N})};
        const fattn_var in = fattn_use(t, &p), y = functions[which].graph(t, &in);
        fattn_tensor value;
        cr_assert_eq(fattn_tape_value(t, y, &value), FATTN_OK);
        cr_assert_eq(fattn_tape_backward(t, op_contract(t, y)), FATTN_OK);
        for (int i = 0; i < N; ++i) {
            const double want = functions[which].of((double)x[i]);
            const double got = (double)((const float *)value.data)[i];
            cr_assert(fabs(got - want) <= 16 * 0x1p-24 * fabs((double)x[i]), "%s(%g) = %g, not %g",
                      functions[which].name, (double)x[i], got, want);
            cr_assert(isfinite(dx[i]), "%s'(%g)", functions[which].name, (double)x[i]);
        }
    }
    fattn_tape_destroy(t);
    fattn_ctx_destroy(ctx);
}

Test(unary, every_instruction_set_gives_the_same_bits) {
    enum { N = 1003 };
    float x[N], first[2 * N];
    for (int i = 0; i < N; ++i) x[i] = (float)(i - N / 2) * 0.2f;
    for (int cap = 1; cap <= 3; ++cap) {
        const fattn_ctx_options o = {.struct_size = sizeof o, .arch_cap = cap};
        fattn_ctx *ctx;
        fattn_tape *t;
        cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
        cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
        float d[N] = {0};
        const int64_t n = N;
        fattn_param p = {.value = fattn_tensor_view(x, FATTN_F32, FATTN_CPU, 0, 1, &n),
                         .grad = fattn_tensor_view(d, FATTN_F32, FATTN_CPU, 0, 1, &n)};
        const fattn_var in = fattn_use(t, &p), y = gelu(t, &in), z = tanh_op(t, (fattn_var[]){silu(t, &y)});
        fattn_tensor value;
        cr_assert_eq(fattn_tape_backward(t, op_contract(t, z)), FATTN_OK);
        cr_assert_eq(fattn_tape_value(t, z, &value), FATTN_OK);
        if (cap == 1) {
            memcpy(first, value.data, sizeof d);
            memcpy(first + N, d, sizeof d);
        }
        cr_assert(memcmp(first, value.data, sizeof d) == 0, "arch_cap %d: values", cap);
        cr_assert(memcmp(first + N, d, sizeof d) == 0, "arch_cap %d: gradients", cap);
        fattn_tape_destroy(t);
        fattn_ctx_destroy(ctx);
    }
}

static fattn_var scale_nan(fattn_tape *t, const fattn_var *in) { return fattn_op_scale(t, in[0], (double)NAN); }
static fattn_var scale_far(fattn_tape *t, const fattn_var *in) { return fattn_op_scale(t, in[0], -1e39); }

/* Infinities and NaN: relu and tanh keep a NaN; relu's gradient is 0 where x <= 0 whatever dy is. */
Test(unary, not_finite) {
    const double x[] = {-INFINITY, -1, 0, 1, INFINITY, NAN}, big = DBL_MAX;
    const double relus[] = {0, 0, 0, 1, INFINITY, NAN}, slopes[] = {0, 0, 0, 1, 1, 1};
    for (int wide = 0; wide < 2; ++wide) {
        fattn_ctx *ctx;
        fattn_tape *t;
        cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
        cr_assert_eq(fattn_tape_create(ctx, &t), FATTN_OK);
        const int64_t n = 6;
        const fattn_dtype dtype = wide ? FATTN_F64 : FATTN_F32;
        const fattn_tensor from = fattn_tensor_view((void *)(uintptr_t)x, FATTN_F64, FATTN_CPU, 0, 1, &n);
        double memory[2][6] = {{0}}, y[6], dx[6];
        fattn_param p = {.value = fattn_tensor_view(memory[0], dtype, FATTN_CPU, 0, 1, &n),
                         .grad = fattn_tensor_view(memory[1], dtype, FATTN_CPU, 0, 1, &n)};
        cr_assert_eq(fattn_tensor_copy(ctx, &p.value, &from), FATTN_OK);
        const fattn_var in = fattn_use(t, &p), relu_y = relu(t, &in), tanh_y = tanh_op(t, &in);
        const fattn_var s = op_contract(t, fattn_op_scale(t, relu_y, wide ? big : (double)FLT_MAX));
        cr_assert_eq(fattn_tape_backward(t, s), FATTN_OK, "%s", fattn_ctx_error(ctx));
        const fattn_tensor to = fattn_tensor_view(y, FATTN_F64, FATTN_CPU, 0, 1, &n);
        const fattn_tensor d_to = fattn_tensor_view(dx, FATTN_F64, FATTN_CPU, 0, 1, &n);
        fattn_tensor value;
        cr_assert_eq(fattn_tensor_copy(ctx, &d_to, &p.grad), FATTN_OK);
        cr_assert_eq(fattn_tape_value(t, relu_y, &value), FATTN_OK);
        cr_assert_eq(fattn_tensor_copy(ctx, &to, &value), FATTN_OK);
        for (int i = 0; i < 6; ++i) {
            cr_assert(isnan(relus[i]) ? isnan(y[i]) : y[i] == relus[i], "relu(%g) = %g", x[i], y[i]);
            cr_assert(slopes[i] == 0 ? dx[i] == 0 : fabs(dx[i]) > 1e37, "relu'(%g): %g", x[i], dx[i]);
        }
        cr_assert_eq(fattn_tape_value(t, tanh_y, &value), FATTN_OK);
        cr_assert_eq(fattn_tensor_copy(ctx, &to, &value), FATTN_OK);
        cr_assert(y[0] == -1 && y[2] == 0 && y[4] == 1 && isnan(y[5]), "tanh: %g %g %g %g", y[0], y[2], y[4], y[5]);
        fattn_tape_destroy(t);
        fattn_ctx_destroy(ctx);
    }
}

Test(unary, errors) {
    const op_error list[] = {
        {silu, FATTN_E_DTYPE, "silu: x is i32", 1, {{FATTN_I32, 1, {4}}}},
        {gelu, FATTN_E_ARG, "gelu: x is absent", 1, {{0}}},
        {silu, FATTN_E_ARG, "silu: x is absent", 1, {{0}}},
        {relu, FATTN_E_DTYPE, "relu: x is u8", 1, {{FATTN_U8, 1, {4}}}},
        {tanh_op, FATTN_E_ARG, "tanh: x is absent", 1, {{0}}},
        {scale, FATTN_E_DTYPE, "scale: x is i32", 1, {{FATTN_I32, 1, {4}}}},
        {scale_nan, FATTN_E_ARG, "scale: the factor is nan, which is not finite in f64", 1, {{FATTN_F64, 1, {4}}}},
        {scale_far, FATTN_E_ARG, "scale: the factor is -1e+39, which is not finite in f32", 1, {{FATTN_F32, 1, {4}}}},
    };
    opcheck_errors(list, sizeof list / sizeof *list);
}

/* ---- gates ---- */

static fattn_var swiglu(fattn_tape *t, const fattn_var *in) { return fattn_op_swiglu(t, in[0], in[1]); }
static fattn_var geglu(fattn_tape *t, const fattn_var *in) { return fattn_op_geglu(t, in[0], in[1]); }
static fattn_var silu_mul(fattn_tape *t, const fattn_var *in) { return fattn_op_mul(t, silu(t, in), in[1]); }
static fattn_var gelu_mul(fattn_tape *t, const fattn_var *in) { return fattn_op_mul(t, gelu(t, in), in[1]); }

static void gate_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t e = 0; e < length; ++e) y[e] = functions[function].of(in[0][e]) * in[1][e];
}

static op_case gate(bool is_swiglu, int ndim, const int64_t *shape) {
    op_case c = {.name = is_swiglu ? "swiglu" : "geglu",
                 .graph = is_swiglu ? swiglu : geglu,
                 .reference = gate_reference,
                 .n = 2,
                 .in = {{.ndim = ndim}, {.ndim = ndim}},
                 .any_strides = true,
                 .roundings = 20};
    function = is_swiglu; /* gelu is 0, silu 1 */
    length = 1;
    for (int d = 0; d < ndim; ++d) length *= c.in[0].shape[d] = c.in[1].shape[d] = shape[d];
    return c;
}

Test(gates, gradients) {
    for (int i = 0; i < 2; ++i) {
        op_case c = gate(i, 1, (const int64_t[]){35});
        opcheck(&c);
        c = gate(i, 3, (const int64_t[]){5, 1, 7});
        opcheck(&c);
        c = gate(i, 0, NULL);
        opcheck(&c);
    }
}

Test(gates, large_and_nothing) {
    for (int i = 0; i < 4; ++i) {
        const op_case c = gate(i & 1, 2, (const int64_t[]){i & 2 ? 70001 : 0, 1});
        opcheck_values(&c);
        opcheck_f32(&c);
        opcheck_threads(&c);
    }
}

/* The bits of the two ops that a gate replaces, whatever surrounds them. */
Test(gates, same_bits_as_two_ops) {
    for (int n = 0; n < 2 * 2 * OP_SURROUNDINGS; ++n) {
        op_case fused = gate(n & 1, 2, (const int64_t[]){33, 40}), apart = fused;
        apart.graph = n & 1 ? silu_mul : gelu_mul;
        const fattn_dtype dtype = n & 2 ? FATTN_F64 : FATTN_F32;
        op_result a = op_run(&fused, (op_surrounding)(n / 4), dtype, 2);
        op_result b = op_run(&apart, (op_surrounding)(n / 4), dtype, 2);
        const size_t bytes = (size_t)length * fattn_dtype_size(dtype);
        cr_assert(memcmp(a.y.data, b.y.data, bytes) == 0, "%s, %d", fused.name, n / 4);
        for (int i = 0; i < 2; ++i)
            cr_assert(memcmp(a.d[i].data, b.d[i].data, bytes) == 0, "%s, %d, input %d", fused.name, n / 4, i);
        op_release(&a);
        op_release(&b);
    }
}

/* Halves of one product; the gradients of both are written into one tensor, which is not zeroed. */
static fattn_var halves(fattn_tape *t, const fattn_var *in) {
    return fattn_op_swiglu(t, fattn_op_slice(t, in[0], 1, 0, 4), fattn_op_slice(t, in[0], 1, 4, 8));
}
static void halves_reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    for (int64_t e = 0; e < 12; ++e) y[e] = silu_of(in[0][e / 4 * 8 + e % 4]) * in[0][e / 4 * 8 + 4 + e % 4];
}

Test(gates, halves_of_a_product) {
    const op_case c = {.name = "halves",
                       .graph = halves,
                       .reference = halves_reference,
                       .n = 1,
                       .in = {{2, {3, 8}}},
                       .any_strides = true,
                       .roundings = 20};
    opcheck(&c);
}

Test(gates, errors) {
    const op_error list[] = {
        {swiglu,
         FATTN_E_SHAPE,
         "swiglu: gate is [3,4], up is [4]: their shapes must be the same",
         2,
         {{FATTN_F32, 2, {3, 4}}, {FATTN_F32, 1, {4}}}},
        {geglu, FATTN_E_SHAPE, "geglu: gate is [3], up is [4]", 2, {{FATTN_F32, 1, {3}}, {FATTN_F32, 1, {4}}}},
        {geglu, FATTN_E_DTYPE, "geglu: up is f64", 2, {{FATTN_F32, 1, {4}}, {FATTN_F64, 1, {4}}}},
        {swiglu, FATTN_E_ARG, "swiglu: up is absent", 1, {{FATTN_F32, 1, {4}}}},
        {geglu, FATTN_E_ARG, "geglu: gate is absent", 1, {{0}}},
    };
    opcheck_errors(list, sizeof list / sizeof *list);
}
