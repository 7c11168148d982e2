/* linear_norm: its definition and gradients, and the bits of the two ops that it stands for. */
#include "opcheck.h"

#include <criterion/criterion.h>

#include <math.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#define MUST(call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(ctx))

enum { X, W, BIAS, RESIDUAL, GAIN, NORM_BIAS, INPUTS };
static const float eps = 1e-3f;

/* ---- by definition ---- */

static int64_t R, N, K; /* set by the test that uses the reference */
enum outputs { SUM = 1, NORMED = 2, BOTH = 3 };
static enum outputs outputs;

static fattn_var op(fattn_tape *t, const fattn_var *in, fattn_var *normed) {
    return fattn_op_linear_norm(t, in[X], in[W], in[BIAS], in[RESIDUAL], in[GAIN], in[NORM_BIAS], eps, normed);
}

/* Outputs side by side: their gradients are views of one, that of the sum alone, or of the norm alone. */
static fattn_var graph(fattn_tape *t, const fattn_var *in) {
    fattn_var of[2];
    of[0] = op(t, in, &of[1]);
    return outputs == BOTH ? fattn_op_concat(t, of, 2, 0) : of[outputs == NORMED];
}

static double *sums_of(const double *const *in) {
    double *const s = malloc((size_t)(R * N + 1) * sizeof *s);
    for (int64_t r = 0; r < R; ++r)
        for (int64_t n = 0; n < N; ++n) {
            double sum = in[RESIDUAL][r * N + n] + (in[BIAS] ? in[BIAS][n] : 0);
            for (int64_t k = 0; k < K; ++k) sum += in[X][r * K + k] * in[W][n * K + k];
            s[r * N + n] = sum;
        }
    return s;
}

static void statistics(const double *s, double *mean, double *scale) {
    double sum = 0, squares = 0;
    for (int64_t n = 0; n < N; ++n) sum += s[n];
    *mean = sum / (double)N;
    for (int64_t n = 0; n < N; ++n) squares += (s[n] - *mean) * (s[n] - *mean);
    *scale = 1 / sqrt(squares / (double)N + (double)eps);
}

static void reference(const double *const *in, const int32_t *const *ids, double *y) {
    (void)ids;
    double *const s = sums_of(in), *const normed = outputs == BOTH ? y + R * N : y;
    if (outputs & SUM) memcpy(y, s, (size_t)(R * N) * sizeof *y);
    for (int64_t r = 0; r < R && outputs & NORMED; ++r) {
        double mean, scale;
        statistics(s + r * N, &mean, &scale);
        for (int64_t n = 0; n < N; ++n)
            normed[r * N + n] = (s[r * N + n] - mean) * scale * in[GAIN][n] + (in[NORM_BIAS] ? in[NORM_BIAS][n] : 0);
    }
    free(s);
}

static void gradient(const double *const *in, const int32_t *const *ids, const double *dy, double *const *d) {
    (void)ids;
    const double *const of_sum = outputs & SUM ? dy : NULL;
    const double *const of_norm = outputs == BOTH ? dy + R * N : outputs == NORMED ? dy : NULL;
    double *const s = sums_of(in), *const ds = calloc((size_t)(R * N + 1), sizeof *ds);
    const int64_t size[INPUTS] = {R * K, N * K, N, R * N, N, N};
    for (int i = 0; i < INPUTS; ++i)
        for (int64_t e = 0; e < size[i] && d[i]; ++e) d[i][e] = 0;
    for (int64_t r = 0; r < R; ++r) {
        double mean, scale, through_scale = 0, through_mean = 0;
        statistics(s + r * N, &mean, &scale);
        for (int64_t n = 0; n < N && of_norm; ++n) {
            const double g = of_norm[r * N + n], h = s[r * N + n] - mean;
            d[GAIN][n] += g * h * scale;
            if (d[NORM_BIAS]) d[NORM_BIAS][n] += g;
            through_scale += g * in[GAIN][n] * h;
            through_mean -= g * in[GAIN][n] * scale;
        }
        for (int64_t n = 0; n < N; ++n) {
            const int64_t e = r * N + n;
            if (of_sum) ds[e] += of_sum[e];
            if (of_norm)
                ds[e] += of_norm[e] * in[GAIN][n] * scale + through_mean / (double)N -
                         through_scale * scale * scale * scale * (s[e] - mean) / (double)N;
            d[RESIDUAL][e] = ds[e];
            if (d[BIAS]) d[BIAS][n] += ds[e];
            for (int64_t k = 0; k < K; ++k) {
                d[X][r * K + k] += ds[e] * in[W][n * K + k];
                d[W][n * K + k] += ds[e] * in[X][r * K + k];
            }
        }
    }
    free(s);
    free(ds);
}

/* A row of s has K + 2 terms, and its error reaches y and the gradients times r, at most 1/sqrt(eps), and a number
   below 8: 256. Then the sums of a norm and those over rows, as in the tests of the two ops. */
static op_case of(enum outputs which, int64_t rows, int64_t columns, int64_t terms, bool biases) {
    R = rows, N = columns, K = terms, outputs = which;
    const int64_t half = R % 2 == 0 && R > 0 ? R / 2 : R, ahead = half == R ? 1 : 2;
    return (op_case){.name = "linear_norm",
                     .graph = graph,
                     .reference = reference,
                     .gradient = gradient,
                     .n = INPUTS,
                     .in = {{3, {ahead, half, K}},
                            {2, {N, K}},
                            {1, {N}, .absent = !biases},
                            {3, {ahead, half, N}},
                            {1, {N}},
                            {1, {N}, .absent = !biases}},
                     .roundings = 256.0 * (double)(K + 2) + 64 + 20.0 * (double)R};
}

Test(linear_norm, gradients) {
    const int64_t sizes[][3] = {{6, 11, 7}, {6, 7, 7}, {1, 2, 1}, {5, 8, 3}};
    for (int i = 0; i < 4 * 3 * 2; ++i) {
        const int64_t *const s = sizes[i / 6];
        const op_case c = of((enum outputs)(1 + i / 2 % 3), s[0], s[1], s[2], i % 2);
        opcheck(&c);
    }
}

/* Many blocks of rows, and the parts of sums over rows. */
Test(linear_norm, large) {
    for (int which = NORMED; which <= BOTH; ++which) {
        const op_case c = of((enum outputs)which, 2100, 70, 9, true);
        opcheck_values(&c);
        opcheck_f32(&c);
        opcheck_threads(&c);
    }
}

Test(linear_norm, nothing) {
    const int64_t sizes[][3] = {{0, 4, 3}, {5, 0, 3}, {5, 4, 0}};
    for (int i = 0; i < 3; ++i) {
        const op_case c = of(BOTH, sizes[i][0], sizes[i][1], sizes[i][2], true);
        opcheck_values(&c); /* K = 0: the residual and the bias */
        opcheck_f32(&c);
    }
}

/* ---- the bits of the two ops ---- */

/* A residual stream of three of them. What else reads a sum: the next one alone, or also some of its columns, all of
   it, or the norm's output. */
enum { LAYERS = 3, C = 24, HIDDEN = 16, ROWS = 34, PARAMS = 1 + LAYERS * 5 };
typedef struct stream {
    bool apart;      /* by the two ops */
    bool biased;     /* with biases of the products and of the norms */
    bool reads_sums; /* also beside the stream */
    bool keeps;      /* the gradients of the sums */
    uint32_t frozen; /* parameters, a bit each */
    fattn_dtype dtype, grad;
} stream;

static fattn_var layer(fattn_tape *t, const stream *s, const fattn_var *in, fattn_var x, fattn_var residual,
                       fattn_var *normed) {
    const fattn_var none = {0}, bias = s->biased ? in[1] : none, norm_bias = s->biased ? in[3] : none;
    if (!s->apart) return fattn_op_linear_norm(t, x, in[0], bias, residual, in[2], norm_bias, eps, normed);
    const fattn_var sum = fattn_op_linear_residual(t, x, in[0], bias, residual);
    *normed = fattn_op_layernorm(t, sum, in[2], norm_bias, eps);
    return sum;
}

static const int64_t shapes[1 + 5][3] = {{2, ROWS / 2, C}, {C, HIDDEN}, {C}, {C}, {C}, {HIDDEN, C}};
static const int dims[1 + 5] = {3, 2, 1, 1, 1, 2};
static int kind_of(int param) { return param == 0 ? 0 : 1 + (param - 1) % 5; }

/* Values of the outputs and all gradients, behind one another in `to`; returns how many bytes. */
static size_t run(const stream *s, char *to) {
    fattn_ctx *ctx;
    fattn_tape *t;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    MUST(fattn_tape_create(ctx, &t));
    fattn_param p[PARAMS];
    fattn_var in[PARAMS], sums[LAYERS + 1], normed;
    memset(p, 0, sizeof p);
    for (int i = 0; i < PARAMS; ++i) {
        const int kind = kind_of(i);
        fattn_tensor wide;
        MUST(fattn_tensor_alloc(ctx, FATTN_F64, dims[kind], shapes[kind], &wide));
        MUST(fattn_tensor_alloc(ctx, s->dtype, dims[kind], shapes[kind], &p[i].value));
        MUST(fattn_tensor_alloc(ctx, s->grad, dims[kind], shapes[kind], &p[i].grad));
        MUST(fattn_tensor_normal(ctx, &wide, 0, 1, (fattn_rng){.seed = 4, .stream = (uint32_t)i}));
        MUST(fattn_tensor_copy(ctx, &p[i].value, &wide));
        MUST(fattn_tensor_normal(ctx, &wide, 2, 0, (fattn_rng){0}));
        MUST(fattn_tensor_copy(ctx, &p[i].grad, &wide));
        fattn_tensor_free(ctx, &wide);
        if (s->frozen >> i & 1) p[i].flags = FATTN_PARAM_FROZEN;
        in[i] = fattn_use(t, &p[i]);
    }
    sums[0] = in[0], normed = in[0];
    fattn_var loss = {0};
    for (int l = 0; l < LAYERS; ++l) {
        const fattn_var *const of_layer = &in[1 + 5 * l];
        const fattn_var h = fattn_op_linear_gelu(t, normed, of_layer[4], (fattn_var){0});
        sums[l + 1] = layer(t, s, of_layer, h, sums[l], &normed);
        if (s->keeps && !(s->frozen & 1)) MUST(fattn_tape_keep_grad(t, sums[l + 1]));
        fattn_var part = {0};
        if (s->reads_sums && l < 2) part = op_contract(t, fattn_op_tanh(t, l ? sums[l + 1] : normed));
        if (s->reads_sums && l == 2) part = op_contract(t, fattn_op_slice(t, sums[l + 1], 2, 3, 9));
        if (part.id) loss = loss.id ? fattn_op_add(t, loss, part) : part;
    }
    const fattn_var last = op_contract(t, normed);
    loss = loss.id ? fattn_op_add(t, loss, last) : last;
    MUST(fattn_tape_backward(t, loss));
    size_t bytes = 0;
    fattn_tensor all[2 + LAYERS + PARAMS];
    int n = 0;
    MUST(fattn_tape_value(t, normed, &all[n++]));
    for (int l = 1; l <= LAYERS; ++l) {
        MUST(fattn_tape_value(t, sums[l], &all[n++]));
        if (s->keeps && !(s->frozen & 1)) MUST(fattn_tape_grad(t, sums[l], &all[n - 1]));
    }
    for (int i = 0; i < PARAMS; ++i) all[n++] = p[i].grad;
    for (int i = 0; i < n; ++i) {
        const size_t size = (size_t)fattn_tensor_numel(&all[i]) * fattn_dtype_size((fattn_dtype)all[i].dtype);
        memcpy(to + bytes, all[i].data, size);
        bytes += size;
    }
    fattn_tape_destroy(t);
    for (int i = 0; i < PARAMS; ++i) fattn_tensor_free(ctx, &p[i].value), fattn_tensor_free(ctx, &p[i].grad);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
    return bytes;
}

Test(linear_norm, has_the_bits_of_two_ops) {
    static char one[1 << 18], two[1 << 18];
    static const fattn_dtype types[][2] = {{FATTN_F64, FATTN_F64},  {FATTN_F32, FATTN_F32}, {FATTN_BF16, FATTN_BF16},
                                           {FATTN_BF16, FATTN_F32}, {FATTN_F16, FATTN_F16}, {FATTN_F16, FATTN_F32}};
    /* None; biases of products; gains and biases of norms; the stream's input; weights; all but a bias. */
    static const uint32_t frozen[] = {0, 0x1084, 0x6318, 1, 0x0842, 0xfffb};
    for (int n = 0; n < 6 * 6 * 8; ++n) {
        stream s = {.biased = n & 1,
                    .reads_sums = n & 2,
                    .keeps = n & 4,
                    .frozen = frozen[n / 8 % 6],
                    .dtype = types[n / 48][0],
                    .grad = types[n / 48][1]};
        if (!s.biased && s.frozen == 0xfffb) continue; /* nothing is wanted */
        const size_t bytes = run(&s, one);
        s.apart = true;
        cr_assert_eq(run(&s, two), bytes);
        cr_assert_leq(bytes, sizeof one);
        for (size_t i = 0; i < bytes; ++i)
            cr_assert_eq(one[i], two[i], "%s, case %d, frozen 0x%x: byte %zu", fattn_dtype_name(s.dtype), n % 8,
                         s.frozen, i);
    }
}

/* ---- errors ---- */

static fattn_var normed_of(fattn_tape *t, const fattn_var *in) {
    fattn_var normed;
    op(t, in, &normed);
    return normed;
}

static fattn_var no_place(fattn_tape *t, const fattn_var *in) { return op(t, in, NULL); }

static fattn_var infinite_eps(fattn_tape *t, const fattn_var *in) {
    fattn_var normed;
    return fattn_op_linear_norm(t, in[X], in[W], in[BIAS], in[RESIDUAL], in[GAIN], in[NORM_BIAS], INFINITY, &normed);
}

#define F(n, ...)                                                                                                      \
    {                                                                                                                  \
        FATTN_F32, n, { __VA_ARGS__ }                                                                                  \
    }
Test(linear_norm, errors) {
    const op_error list[] = {
        {normed_of, FATTN_E_SHAPE, "x is [2,7], w is [9,6]", 6, {F(2, 2, 7), F(2, 9, 6), F(1, 9), F(2, 2, 9)}},
        {normed_of,
         FATTN_E_SHAPE,
         "w is [9,7], residual is [1,9]",
         6,
         {F(2, 2, 7), F(2, 9, 7), F(1, 9), F(2, 1, 9), F(1, 9)}},
        {normed_of,
         FATTN_E_SHAPE,
         "layernorm: x is [2,9], gain is [7]",
         6,
         {F(2, 2, 7), F(2, 9, 7), F(1, 9), F(2, 2, 9), F(1, 7)}},
        {normed_of,
         FATTN_E_SHAPE,
         "x is [2,9], bias is [7]",
         6,
         {F(2, 2, 7), F(2, 9, 7), {0}, F(2, 2, 9), F(1, 9), F(1, 7)}},
        {normed_of, FATTN_E_ARG, "gain is absent", 4, {F(2, 2, 7), F(2, 9, 7), F(1, 9), F(2, 2, 9)}},
        {normed_of, FATTN_E_ARG, "residual is absent", 3, {F(2, 2, 7), F(2, 9, 7), F(1, 9)}},
        {normed_of,
         FATTN_E_DTYPE,
         "gain is f64",
         5,
         {F(2, 2, 7), F(2, 9, 7), F(1, 9), F(2, 2, 9), {FATTN_F64, 1, {9}}}},
        {normed_of, FATTN_E_DTYPE, "w is bf16", 5, {F(2, 2, 7), {FATTN_BF16, 2, {9, 7}}, F(1, 9), F(2, 2, 9), F(1, 9)}},
        {infinite_eps, FATTN_E_ARG, "eps is inf", 5, {F(2, 2, 7), F(2, 9, 7), F(1, 9), F(2, 2, 9), F(1, 9)}},
        {no_place, FATTN_E_ARG, "normed is NULL", 5, {F(2, 2, 7), F(2, 9, 7), F(1, 9), F(2, 2, 9), F(1, 9)}},
    };
    opcheck_errors(list, sizeof list / sizeof *list);
}
