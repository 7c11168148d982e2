#include "extremes.h"

#include "core/tensor/numeric.h"

#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef long double wide; /* x87's exponent: squares of the largest double are finite */
_Static_assert(LDBL_MAX_EXP > 2 * DBL_MAX_EXP, "the references need a wider exponent");

enum { INPUTS = 3 };

typedef struct input {
    int ndim;
    int64_t shape[4];
    double *x;          /* NULL: absent */
    double *d;          /* its gradient */
    const int32_t *ids; /* instead of x */
} input;

typedef struct seed {
    fattn_tensor dy;
} seed;

static fattn_status seed_infer(fattn_op_call *c) {
    c->out[0].dtype = c->in[0].dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    return FATTN_OK;
}
static fattn_status seed_forward(fattn_op_call *c) {
    return fattn_tensor_normal(c->ctx, &c->out[0], 0, 0, (fattn_rng){0});
}
static fattn_status seed_backward(fattn_op_call *c) {
    return fattn_tensor_copy(c->ctx, &c->d_in[0], &((const seed *)c->attr)->dy);
}
/* A scalar whose gradient is dy, whatever its input is. */
static const fattn_op_def seed_op = {.struct_size = sizeof seed_op,
                                     .attr_size = sizeof(seed),
                                     .n_out = 1,
                                     .name = "seed",
                                     .infer = seed_infer,
                                     .forward = seed_forward,
                                     .backward = seed_backward};

typedef fattn_var (*graph)(fattn_tape *t, const fattn_var *in, const void *user);

static fattn_tensor here(fattn_dtype dtype, int ndim, const int64_t *shape, const void *data) {
    return fattn_tensor_view((void *)(uintptr_t)data, dtype, FATTN_CPU, 0, ndim, shape);
}

#define MUST(call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(ctx))

/* y and the inputs' gradients for the gradient dy of y; NULL: y is the loss. */
static void run(fattn_ctx *ctx, fattn_dtype dtype, graph g, const void *user, input in[INPUTS], const double *dy,
                double *y) {
    fattn_tape *t;
    fattn_param p[INPUTS] = {{.name = "x"}, {.name = "gain"}, {.name = "bias"}};
    fattn_tensor ids = {0}, value;
    fattn_var v[INPUTS] = {{0}};
    MUST(fattn_tape_create(ctx, &t));
    for (int i = 0; i < INPUTS; ++i) {
        const fattn_tensor from = here(in[i].ids ? FATTN_I32 : FATTN_F64, in[i].ndim, in[i].shape,
                                       in[i].ids ? (const void *)in[i].ids : in[i].x);
        if (!from.data) continue;
        if (in[i].ids) {
            MUST(fattn_tensor_alloc(ctx, FATTN_I32, in[i].ndim, in[i].shape, &ids));
            MUST(fattn_tensor_copy(ctx, &ids, &from));
            v[i] = fattn_input(t, &ids);
            continue;
        }
        MUST(fattn_tensor_alloc(ctx, dtype, in[i].ndim, in[i].shape, &p[i].value));
        MUST(fattn_tensor_alloc(ctx, dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32, in[i].ndim, in[i].shape, &p[i].grad));
        MUST(fattn_tensor_copy(ctx, &p[i].value, &from));
        MUST(fattn_tensor_normal(ctx, &p[i].grad, 0, 0, (fattn_rng){0}));
        v[i] = fattn_use(t, &p[i]);
    }
    const fattn_var out = g(t, v, user);
    MUST(fattn_tape_value(t, out, &value));
    const fattn_tensor to = here(FATTN_F64, value.ndim, value.shape, y);
    MUST(fattn_tensor_copy(ctx, &to, &value));
    const seed s = {here(FATTN_F64, value.ndim, value.shape, dy)};
    MUST(fattn_tape_backward(t, dy ? fattn_op_custom(t, &seed_op, &out, 1, &s) : out));
    for (int i = 0; i < INPUTS; ++i) {
        if (!p[i].value.dtype) continue;
        const fattn_tensor d = here(FATTN_F64, in[i].ndim, in[i].shape, in[i].d);
        MUST(fattn_tensor_copy(ctx, &d, &p[i].grad));
        fattn_tensor_free(ctx, &p[i].value);
        fattn_tensor_free(ctx, &p[i].grad);
    }
    fattn_tensor_free(ctx, &ids);
    fattn_tape_destroy(t);
}

/* x rounded to the dtype. */
static double rounded(fattn_dtype dtype, double x) {
    double cell;
    fattni_store(&cell, (int32_t)dtype, 0, x);
    return fattni_load(&cell, (int32_t)dtype, 0);
}

/* A finite number near the largest. */
static double largest(fattn_dtype dtype) {
    return rounded(dtype, dtype == FATTN_F64 ? 1.7e308 : dtype == FATTN_F16 ? 65504 : 3.3e38);
}

/* Some roundings of the dtype, and one step of its subnormal numbers. */
static void near(fattn_dtype dtype, const char *what, double x, double got, wide want, wide scale) {
    const double unit = dtype == FATTN_F64   ? 0x1p-50
                        : dtype == FATTN_F32 ? 0x1p-20
                        : dtype == FATTN_F16 ? 0x1p-9
                                             : 0x1p-6;
    const double least = dtype == FATTN_F64 ? 0x1p-1070 : dtype == FATTN_F16 ? 0x1p-23 : 0x1p-130;
    const double end = dtype == FATTN_F64 ? DBL_MAX : dtype == FATTN_F16 ? 65504 : (double)FLT_MAX;
    if (fabsl(want) > (wide)end * (1 + (wide)unit)) {
        cr_assert(isinf(got) && (got > 0) == (want > 0), "%s, %s at %g: %g, not infinite", fattn_dtype_name(dtype),
                  what, x, got);
        return;
    }
    if (fabsl(want) > (wide)end * (1 - (wide)unit) && isinf(got) && (got > 0) == (want > 0)) return;
    cr_assert(fabsl((wide)got - want) <= (wide)unit * fmaxl(fabsl(want), scale) + (wide)least,
              "%s, %s at %g: %.9g, not %.9Lg", fattn_dtype_name(dtype), what, x, got, want);
}

static wide gelu_gate(wide x) {
    const wide u = sqrtl(2 / acosl(-1)) * (x + 0.044715L * x * x * x);
    return 1 / (1 + expl(-2 * u));
}
static wide gelu(wide x) { return x * gelu_gate(x); }
static wide gelu_slope(wide x) {
    const wide s = gelu_gate(x);
    if (s == 0 || s == 1) return s;
    return s + x * s * (1 - s) * 2 * sqrtl(2 / acosl(-1)) * (1 + 3 * 0.044715L * x * x);
}
static wide silu(wide x) { return x / (1 + expl(-x)); }
static wide silu_slope(wide x) {
    const wide s = 1 / (1 + expl(-x));
    return s == 0 || s == 1 ? s : s + x * s * (1 - s);
}
static wide relu(wide x) { return x > 0 ? x : 0; }
static wide relu_slope(wide x) { return x > 0; }
static wide tanh_slope(wide x) {
    const wide t = expl(-2 * fabsl(x));
    return 4 * t / ((1 + t) * (1 + t));
}
static wide scale(wide x) { return x * 3; }
static wide scale_slope(wide x) { return 0 * x + 3; }
static const struct {
    const char *name, *slope_name;
    wide (*of)(wide x), (*slope)(wide x);
} functions[] = {{"gelu", "gelu'", gelu, gelu_slope},
                 {"silu", "silu'", silu, silu_slope},
                 {"relu", "relu'", relu, relu_slope},
                 {"tanh", "tanh'", tanhl, tanh_slope},
                 {"scale", "scale'", scale, scale_slope}};
enum { FUNCTIONS = sizeof functions / sizeof *functions };
static fattn_var unary_graph(fattn_tape *t, const fattn_var *in, const void *user) {
    switch (*(const int *)user) {
    case 0: return fattn_op_gelu(t, in[0]);
    case 1: return fattn_op_silu(t, in[0]);
    case 2: return fattn_op_relu(t, in[0]);
    case 3: return fattn_op_tanh(t, in[0]);
    default: return fattn_op_scale(t, in[0], 3);
    }
}

void extremes_unary(fattn_ctx *ctx, fattn_dtype dtype) {
    static const double sizes[] = {0,    1e-300, 1e-45, 1e-38, 1e-7, 0.5,   1,     5,     9,    12,   20,
                                   63.5, 64,     65,    89,    127,  1e3,   1e4,   6e4,   1e10, 1e13, 1e19,
                                   1e20, 1e30,   3e38,  1e51,  1e77, 1e103, 1e154, 1e200, 1e308};
    enum { SIZES = sizeof sizes / sizeof *sizes };
    for (int op = 0; op < FUNCTIONS; ++op) {
        double x[2 * SIZES + 1], y[2 * SIZES + 1], dy[2 * SIZES + 1], d[2 * SIZES + 1];
        int64_t n = 0;
        for (int i = 0; i < 2 * SIZES; ++i) {
            const double one = rounded(dtype, i % 2 ? -sizes[i / 2] : sizes[i / 2]);
            if (fabs(one) <= largest(dtype)) x[n] = one, dy[n++] = 1;
        }
        x[n] = largest(dtype), dy[n++] = 1;
        input in[INPUTS] = {{.ndim = 1, .shape = {n}, .x = x, .d = d}};
        run(ctx, dtype, unary_graph, &op, in, dy, y);
        for (int64_t i = 0; i < n; ++i) {
            /* The exponent's rounding error counts as that of the gate, which matters up to here. */
            near(dtype, functions[op].name, x[i], y[i], functions[op].of((wide)x[i]), fminl(fabsl((wide)x[i]), 100));
            near(dtype, functions[op].slope_name, x[i], d[i], functions[op].slope((wide)x[i]),
                 64); /* x 2u' times 1 - s's rounding */
        }
    }
}

typedef struct norm {
    bool centred;
    float eps;
} norm;
static fattn_var norm_graph(fattn_tape *t, const fattn_var *in, const void *user) {
    const norm *const n = user;
    return n->centred ? fattn_op_layernorm(t, in[0], in[1], in[2], n->eps) : fattn_op_rmsnorm(t, in[0], in[1], n->eps);
}

/* Row `kind` of C elements. */
enum { KINDS = 8 };
static double element(fattn_dtype dtype, int kind, int64_t i, int64_t C, float eps) {
    const double most = largest(dtype), root = dtype == FATTN_F16 ? 300 : sqrt(most);
    const double small = eps > 0 ? 1e-6 : dtype == FATTN_F64 ? 1e-300 : dtype == FATTN_F16 ? 1e-6 : 1e-36;
    switch (kind) {
    case 0: return i % 2 ? -most : most;                     /* x - mean overflows, squares do */
    case 1: return i == 0 ? most : -most;                    /* the mean is near one end */
    case 2: return most * (1 - (double)i / (double)(2 * C)); /* the sum overflows */
    case 3: return i == C / 2 ? most : 1;                    /* one large element */
    case 4: return root * (i % 3 ? 1.5 : -2);                /* squares about overflow */
    case 5: return small * (double)(i % 5 - 2);              /* squares vanish */
    case 6: return i % 7 == 0 ? 1e-3 : (double)(i % 4);
    default: return root * 1e-3 * (double)(i % 9 - 4) + small;
    }
}

static void check_norm(fattn_ctx *ctx, fattn_dtype dtype, const norm *n, int64_t C) {
    const size_t size = (size_t)(KINDS * C) * sizeof(double);
    double *const x = malloc(size), *const y = malloc(size), *const dy = malloc(size);
    double *const d = malloc(size), *const rest = malloc(4 * size);
    double *const gain = rest, *const bias = rest + C, *const d_gain = rest + 2 * C, *const d_bias = rest + 3 * C;
    for (int64_t i = 0; i < KINDS * C; ++i) {
        x[i] = rounded(dtype, element(dtype, (int)(i / C), i % C, C, n->eps));
        dy[i] = rounded(dtype, (double)(i % 5) * 0.5 - 0.75);
    }
    for (int64_t i = 0; i < C; ++i) gain[i] = 1 + (double)(i % 3) * 0.5, bias[i] = 0.25;
    input in[INPUTS] = {{.ndim = 2, .shape = {KINDS, C}, .x = x, .d = d},
                        {.ndim = 1, .shape = {C}, .x = gain, .d = d_gain},
                        {.ndim = 1, .shape = {C}, .x = n->centred ? bias : NULL, .d = d_bias}};
    run(ctx, dtype, norm_graph, n, in, dy, y);
    wide *const sums = calloc((size_t)(2 * C), sizeof *sums);
    for (int kind = 0; kind < KINDS; ++kind) {
        const double *const row = x + kind * C, *const g = dy + kind * C;
        wide mean = 0, square = 0, g_mean = 0, gh_mean = 0, most = 0;
        for (int64_t i = 0; i < C && n->centred; ++i) mean += (wide)row[i] / (wide)C;
        for (int64_t i = 0; i < C; ++i) {
            const wide e = (wide)row[i] - mean;
            square += e * e / (wide)C;
            most = fmaxl(most, fabsl((wide)row[i]));
        }
        const wide r = 1 / sqrtl(square + (wide)n->eps);
        for (int64_t i = 0; i < C; ++i) {
            const wide h = ((wide)row[i] - mean) * r, gi = (wide)g[i] * (wide)gain[i];
            if (n->centred) g_mean += gi / (wide)C;
            gh_mean += gi * h / (wide)C;
        }
        /* Roundings of x, r (22 bits where it is subnormal) and of sums of C terms, carried by r. */
        const wide scale = fmaxl(1, 8 * most * r) * (1 + (wide)C / 64);
        char what[64];
        snprintf(what, sizeof what, "%s, C %d, row %d", n->centred ? "layernorm" : "rmsnorm", (int)C, kind);
        for (int64_t i = 0; i < C; ++i) {
            const wide h = ((wide)row[i] - mean) * r;
            near(dtype, what, row[i], y[kind * C + i], h * (wide)gain[i] + (n->centred ? (wide)bias[i] : 0), scale);
            near(dtype == FATTN_F64 ? dtype : FATTN_F32, what, row[i], d[kind * C + i],
                 r * ((wide)g[i] * (wide)gain[i] - g_mean - h * gh_mean), 64 * r * scale);
            sums[i] += (wide)g[i] * h, sums[C + i] += (wide)g[i];
        }
    }
    for (int64_t i = 0; i < C; ++i) {
        const fattn_dtype of = dtype == FATTN_F64 ? dtype : FATTN_F32;
        near(of, "dgain", 0, d_gain[i], sums[i], 64 * sqrtl((wide)C));
        if (n->centred) near(of, "dbias", 0, d_bias[i], sums[C + i], 8);
    }
    free(x), free(y), free(dy), free(d), free(rest), free(sums);
}

void extremes_norm(fattn_ctx *ctx, fattn_dtype dtype) {
    static const int64_t widths[] = {2, 5, 8, 64, 300, 1032}; /* in packs and not, in a warp and not */
    for (int n = 0; n < 6; ++n)
        for (int kind = 0; kind < 4; ++kind) {
            const norm how = {kind % 2, kind / 2 ? 0 : 1e-5f};
            check_norm(ctx, dtype, &how, widths[n]);
        }
}

static fattn_var loss_graph(fattn_tape *t, const fattn_var *in, const void *user) {
    (void)user;
    return fattn_op_cross_entropy(t, in[0], in[1], -1);
}

void extremes_cross_entropy(fattn_ctx *ctx, fattn_dtype dtype) {
    static const int64_t widths[] = {4, 7, 64, 2056};
    const double m = largest(dtype), off = -INFINITY;
    const double rows[][4] = {{m, m, 1, 0},     {m, -m, 0, m},         {-m, -m, -m, -m},
                              {off, 1, 2, off}, {off, m, m, off},      {off, -m, -m, -m},
                              {m / 2, 0, m, 1}, {1e4, 1e4, 9999, off}, {3, off, off, off}};
    enum { ROWS = sizeof rows / sizeof *rows };
    for (int n = 0; n < 4 * ROWS; ++n) { /* a row at a time: a loss may be infinite */
        const int64_t V = widths[n / ROWS];
        for (int32_t target = 0; target < 4; ++target) {
            double *const x = malloc((size_t)V * sizeof *x), *const d = malloc((size_t)V * sizeof *d);
            double y;
            wide top = -(wide)INFINITY, sum = 0;
            for (int64_t i = 0; i < V; ++i) {
                x[i] = rounded(dtype, i < 4 ? rows[n % ROWS][i] : off);
                top = fmaxl(top, (wide)x[i]);
            }
            for (int64_t i = 0; i < V; ++i) sum += expl((wide)x[i] - top);
            input in[INPUTS] = {{.ndim = 2, .shape = {1, V}, .x = x, .d = d},
                                {.ndim = 1, .shape = {1}, .ids = &target}};
            run(ctx, dtype, loss_graph, NULL, in, NULL, &y);
            const fattn_dtype of = dtype == FATTN_F64 ? dtype : FATTN_F32;
            near(of, "loss", x[target], y, top - (wide)x[target] + logl(sum), 1);
            for (int64_t i = 0; i < V; ++i)
                near(of, "softmax - onehot", x[i], d[i], expl((wide)x[i] - top) / sum - (i == target ? 1 : 0), 1);
            free(x), free(d);
        }
    }
}

static fattn_var rope_graph(fattn_tape *t, const fattn_var *in, const void *user) {
    return fattn_op_rope(t, in[0], 1e4f, *(const int64_t *)user);
}

void extremes_rope(fattn_ctx *ctx, fattn_dtype dtype) {
    enum { S = 3, D = 32 };
    const double most = largest(dtype);
    double x[S * D], y[S * D], dy[S * D], d[S * D];
    for (int i = 0; i < S * D; ++i) {
        x[i] = rounded(dtype, i % 3 == 0 ? most : i % 3 == 1 ? -most : 1e-3);
        dy[i] = rounded(dtype, i % 2 ? most / 2 : -most / 2); /* sums of two are finite */
    }
    const int64_t position = 12345;
    input in[INPUTS] = {{.ndim = 4, .shape = {1, 1, S, D}, .x = x, .d = d}};
    run(ctx, dtype, rope_graph, &position, in, dy, y);
    for (int s = 0; s < S; ++s)
        for (int i = 0; i < D / 2; ++i) {
            const double angle = (double)(position + s) * pow((double)1e4f, -2.0 * i / D);
            const wide c = (wide)cos(angle), z = (wide)sin(angle);
            const int low = s * D + i, high = low + D / 2;
            /* Another libm's pow may be an ulp off, which the position multiplies. */
            const wide size = (wide)most * (1 + (wide)angle);
            const wide a = (wide)x[low], b = (wide)x[high], p = (wide)dy[low], q = (wide)dy[high];
            near(dtype, "rope", x[low], y[low], a * c - b * z, size);
            near(dtype, "rope", x[high], y[high], b * c + a * z, size);
            near(dtype == FATTN_F64 ? dtype : FATTN_F32, "rope'", x[low], d[low], p * c + q * z, size);
            near(dtype == FATTN_F64 ? dtype : FATTN_F32, "rope'", x[high], d[high], q * c - p * z, size);
        }
}
