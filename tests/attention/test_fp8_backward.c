/* What backward would lose with products of 8 bits, from a model in fp64: one product at a time and all five, beside
   BF16. NUMERICS.md, section 7, has the table; it is why backward of FATTN_FP8 stays in the dtype. */
#include "fp8.h"
#include "thinned.h"

#include "core/tensor/normal.h"
#include "core/tensor/numeric.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum { N = 1024 / THINNED(4), D = 128, TILE = 64 };
/* The products whose operands are rounded. */
enum { S = 1, DP = 2, DV = 4, DQ = 8, DK = 16, ALL = 31 };

typedef double rounding(double x);
static double to_bf16(double x) { return fattni_bf16_to_float(fattni_float_to_bf16((float)x)); }

/* Rows are of n numbers, tensors row-major. */
typedef struct gradients {
    double *dq, *dk, *dv;
} gradients;
typedef struct inputs {
    double *q, *k, *v, *d_o; /* [N, D]; k and v less their means, which changes no gradient */
} inputs;

static double *numbers(int64_t n) {
    double *const x = calloc((size_t)n, sizeof *x);
    cr_assert(x);
    return x;
}

/* Blocks of `rows` by `columns` get a scale each, a power of two (which keeps BF16 numbers) that brings the largest
   magnitude to 224 .. 448: at least as fine as any kernel's scales for that product. */
static double *rounded(const double *x, int64_t all_rows, int64_t all_columns, int64_t rows, int64_t columns,
                       rounding *to) {
    double *const y = numbers(all_rows * all_columns);
    for (int64_t r = 0; r < all_rows; r += rows)
        for (int64_t c = 0; c < all_columns; c += columns) {
            double most = 1e-30;
            for (int64_t i = r; i < r + rows; ++i)
                for (int64_t j = c; j < c + columns; ++j) most = fmax(most, fabs(x[i * all_columns + j]));
            const double scale = exp2(floor(log2(448 / most)));
            for (int64_t i = r; i < r + rows; ++i)
                for (int64_t j = c; j < c + columns; ++j)
                    y[i * all_columns + j] = to(x[i * all_columns + j] * scale) / scale;
        }
    return y;
}

/* a [N, n] b [n, m], a^T b of a [n, N] with a_transposed; both rounded by blocks, or not if to is NULL. */
typedef struct blocks {
    int64_t rows, columns;
} blocks;
static double *product(const double *a, blocks of_a, int64_t a_columns, bool a_transposed, const double *b, blocks of_b,
                       int64_t b_columns, rounding *to) {
    const int64_t inner = a_transposed ? N : a_columns, rows = a_transposed ? a_columns : N;
    double *const x = to ? rounded(a, N, a_columns, of_a.rows, of_a.columns, to) : NULL;
    double *const y = to ? rounded(b, inner, b_columns, of_b.rows, of_b.columns, to) : NULL;
    const double *const from = x ? x : a, *const by = y ? y : b;
    double *const sum = numbers(rows * b_columns);
    for (int64_t i = 0; i < rows; ++i)
        for (int64_t n = 0; n < inner; ++n) {
            const double f = a_transposed ? from[n * a_columns + i] : from[i * a_columns + n];
            for (int64_t j = 0; j < b_columns; ++j) sum[i * b_columns + j] += f * by[n * b_columns + j];
        }
    free(x), free(y);
    return sum;
}

static double *transposed(const double *x) { /* [N, D] */
    double *const y = numbers(N * D);
    for (int64_t i = 0; i < N; ++i)
        for (int64_t d = 0; d < D; ++d) y[d * N + i] = x[i * D + d];
    return y;
}

/* Backward in fp64 with the operands of `products` rounded. P and L are those of its own S, as of a forward with the
   same copies; delta is from dP before rounding. */
static gradients backward(const inputs *in, unsigned products, rounding *to) {
    const double scale = 1 / sqrt(D);
    const blocks row = {1, D}, key = {D, 1}, channel = {N, 1}, tile = {TILE, 2 * TILE}, score_row = {1, N};
    double *const kt = transposed(in->k), *const vt = transposed(in->v);
    double *const p = product(in->q, row, D, false, kt, key, N, products & S ? to : NULL);
    double *const dp = product(in->d_o, row, D, false, vt, key, N, NULL);
    double *const ds = product(in->d_o, row, D, false, vt, key, N, products & DP ? to : NULL);
    for (int64_t i = 0; i < N; ++i) {
        double most = -INFINITY, sum = 0, delta = 0;
        for (int64_t j = 0; j < N; ++j) most = fmax(most, p[i * N + j]);
        for (int64_t j = 0; j < N; ++j) sum += p[i * N + j] = exp(scale * (p[i * N + j] - most));
        for (int64_t j = 0; j < N; ++j) delta += (p[i * N + j] /= sum) * dp[i * N + j];
        for (int64_t j = 0; j < N; ++j) ds[i * N + j] = p[i * N + j] * (ds[i * N + j] - delta);
    }
    const gradients g = {product(ds, score_row, N, false, in->k, channel, D, products & DQ ? to : NULL),
                         product(ds, tile, N, true, in->q, channel, D, products & DK ? to : NULL),
                         product(p, tile, N, true, in->d_o, channel, D, products & DV ? to : NULL)};
    free(kt), free(vt), free(p), free(dp), free(ds);
    return g;
}

static void gradients_free(gradients *g) { free(g->dq), free(g->dk), free(g->dv); }

static double percent(const double *x, const double *want) {
    double off = 0, all = 0;
    for (int64_t n = 0; n < N * D; ++n) off += (x[n] - want[n]) * (x[n] - want[n]), all += want[n] * want[n];
    return 100 * sqrt(off / all);
}

/* Numbers of BF16. */
static double *normal(uint64_t seed, double factor) {
    double *const x = numbers(N * D);
    const fattn_rng rng = {.seed = seed};
    for (int64_t n = 0; n < N * D; ++n) x[n] = to_bf16(factor * fattni_normal_at(&rng, n));
    return x;
}
static void centre(double *x) {
    for (int64_t d = 0; d < D; ++d) {
        double sum = 0;
        for (int64_t i = 0; i < N; ++i) sum += x[i * D + d];
        for (int64_t i = 0; i < N; ++i) x[i * D + d] -= sum / N;
    }
}

/* Errors of dQ, dK and dV in percent, as in NUMERICS.md. */
static const struct {
    const char *name;
    unsigned products;
    double normal[3], large_q[3];
} ways[] = {
    {"S", S, {3.9, 3.9, 3.9}, {8.1, 8.2, 8.1}}, {"dP", DP, {3.8, 3.8, 0}, {5.8, 5.6, 0}},
    {"dV", DV, {0, 0, 3.7}, {0, 0, 3.8}},       {"dQ", DQ, {3.8, 0, 0}, {3.9, 0, 0}},
    {"dK", DK, {0, 3.8, 0}, {0, 3.8, 0}},       {"all", ALL, {6.7, 6.6, 5.4}, {10.7, 10.5, 8.9}},
};

Test(fp8_backward, products_of_8_bits, .timeout = 300) {
    for (int large = 0; large < 2; large += THINNED(2)) {
        const inputs in = {normal(1, large ? 3 : 1), normal(2, 1), normal(3, 1), normal(4, 1)};
        centre(in.k), centre(in.v);
        gradients want = backward(&in, 0, NULL), bf16 = backward(&in, DV | DQ | DK, to_bf16);
        const double usual[3] = {percent(bf16.dq, want.dq), percent(bf16.dk, want.dk), percent(bf16.dv, want.dv)};
        printf("q of size %d: BF16 %.2f, %.2f, %.2f %%\n", large ? 3 : 1, usual[0], usual[1], usual[2]);
        for (int m = 0; m < 3; ++m) cr_assert(usual[m] < 0.3, "BF16: gradient %d is off by %g %%", m, usual[m]);
        for (size_t n = 0; n < sizeof ways / sizeof *ways; ++n) {
            gradients g = backward(&in, ways[n].products, fp8_round);
            const double off[3] = {percent(g.dq, want.dq), percent(g.dk, want.dk), percent(g.dv, want.dv)};
            const double *const expected = large ? ways[n].large_q : ways[n].normal;
            printf("q of size %d: %s in 8 bits: dQ %.2f, dK %.2f, dV %.2f %%\n", large ? 3 : 1, ways[n].name, off[0],
                   off[1], off[2]);
            for (int m = 0; m < 3; ++m)
                cr_assert(fabs(off[m] - expected[m]) <= 0.1 * expected[m] + 1e-9, "%s, gradient %d: %g %%, not %g %%",
                          ways[n].name, m, off[m], expected[m]);
            gradients_free(&g);
        }
        gradients_free(&want), gradients_free(&bf16);
        free(in.q), free(in.k), free(in.v), free(in.d_o);
    }
}
