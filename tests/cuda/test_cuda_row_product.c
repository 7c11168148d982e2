/* Ops of one row, whose products are a kernel of their own: against sums in double; in a graph, where they read frozen
   parameters early; right behind what writes their parameters. */
#include "pair.h"

#include <fattn/graph.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const float eps = 1e-5f;

enum { X, W, BIAS, RESIDUAL, GAIN, NORM_BIAS, INPUTS };
enum { LINEAR, ONTO, GELU, LAYER, LAYER_GELU, RMS, OPS };
static const char *const op_names[OPS] = {"linear",    "linear_residual", "linear_gelu",
                                          "layernorm", "gelu of it",      "rmsnorm"};

static fattn_tensor normal(fattn_ctx *gpu, fattn_dtype dtype, uint32_t stream, int ndim, const int64_t *shape,
                           double deviation) {
    fattn_tensor wide, t;
    MUST(gpu, fattn_tensor_alloc(gpu, FATTN_F32, ndim, shape, &wide));
    MUST(gpu, fattn_tensor_alloc(gpu, dtype, ndim, shape, &t));
    MUST(gpu, fattn_tensor_normal(gpu, &wide, 0.1, deviation, (fattn_rng){.seed = 8, .stream = stream}));
    MUST(gpu, fattn_tensor_copy(gpu, &t, &wide));
    fattn_tensor_free(gpu, &wide);
    return t;
}

static void make_inputs(fattn_ctx *gpu, fattn_dtype dtype, int64_t N, int64_t K, fattn_tensor in[INPUTS]) {
    in[X] = normal(gpu, dtype, X, 3, (int64_t[]){1, 1, K}, 1);
    in[W] = normal(gpu, dtype, W, 2, (int64_t[]){N, K}, 1 / sqrt((double)K));
    in[BIAS] = normal(gpu, dtype, BIAS, 1, (int64_t[]){N}, 1);
    in[RESIDUAL] = normal(gpu, dtype, RESIDUAL, 3, (int64_t[]){1, 1, N}, 1);
    in[GAIN] = normal(gpu, dtype, GAIN, 1, (int64_t[]){K}, 1);
    in[NORM_BIAS] = normal(gpu, dtype, NORM_BIAS, 1, (int64_t[]){K}, 1);
}

static fattn_var apply(fattn_tape *t, int op, const fattn_var in[INPUTS]) {
    const fattn_var none = {0};
    switch (op) {
    case LINEAR: return fattn_op_linear(t, in[X], in[W], in[BIAS]);
    case ONTO: return fattn_op_linear_residual(t, in[X], in[W], in[BIAS], in[RESIDUAL]);
    case GELU: return fattn_op_linear_gelu(t, in[X], in[W], in[BIAS]);
    case RMS: return fattn_op_norm_linear(t, in[X], in[GAIN], none, eps, in[W], none, FATTN_NORM_RMS);
    default:
        return fattn_op_norm_linear(t, in[X], in[GAIN], in[NORM_BIAS], eps, in[W], in[BIAS],
                                    op == LAYER_GELU ? FATTN_LINEAR_GELU : 0);
    }
}

/* h, or x where there is no norm, and by how much each of its elements may be off: 32 roundings of F32 statistics, and
   its own. */
static void row_of(int op, const double *const in[INPUTS], int64_t K, double unit, double *h, double *off) {
    double mean = 0, square = 0, size = 0;
    const bool norms = op >= LAYER, centred = op != RMS;
    for (int64_t k = 0; k < K && centred; ++k) mean += in[X][k] / (double)K;
    for (int64_t k = 0; k < K; ++k) {
        square += (in[X][k] - mean) * (in[X][k] - mean) / (double)K;
        size += fabs(in[X][k]) / (double)K;
    }
    const double r = 1 / sqrt(square + (double)eps);
    for (int64_t k = 0; k < K; ++k) {
        const double value = (in[X][k] - mean) * r * in[GAIN][k], added = centred ? in[NORM_BIAS][k] : 0;
        h[k] = norms ? value + added : in[X][k];
        off[k] =
            norms ? 32 * 0x1p-24 * (fabs(value) + size * r * fabs(in[GAIN][k]) + fabs(added)) + unit * fabs(h[k]) : 0;
    }
}

static void check(const pair *p, fattn_dtype dtype, int64_t N, int64_t K) {
    const double unit = dtype == FATTN_F32 ? 0x1p-24 : dtype == FATTN_F16 ? 0x1p-11 : 0x1p-8;
    fattn_tensor in[INPUTS], host[INPUTS], value, y;
    const double *of[INPUTS];
    double *const h = malloc((size_t)K * sizeof *h), *const off = malloc((size_t)K * sizeof *off);
    fattn_tape *t;
    make_inputs(p->gpu, dtype, N, K, in);
    for (int i = 0; i < INPUTS; ++i) host[i] = to_host(p, &in[i]), of[i] = host[i].data;
    MUST(p->gpu, fattn_tape_create(p->gpu, &t));
    for (int op = 0; op < OPS; ++op) {
        fattn_var v[INPUTS];
        for (int i = 0; i < INPUTS; ++i) v[i] = fattn_input(t, &in[i]);
        MUST(p->gpu, fattn_tape_value(t, apply(t, op, v), &value));
        y = to_host(p, &value);
        row_of(op, of, K, unit, h, off);
        for (int64_t n = 0; n < N; ++n) {
            const bool biased = op != RMS, gelu = op == GELU || op == LAYER_GELU;
            double z = biased ? of[BIAS][n] : 0, error = 0;
            if (op == ONTO) z += of[RESIDUAL][n];
            double size = fabs(z);
            for (int64_t k = 0; k < K; ++k) {
                const double w = of[W][n * K + k];
                z += h[k] * w, size += fabs(h[k] * w), error += off[k] * fabs(w);
            }
            error += ((double)K / 64 + 17) * 0x1p-24 * size; /* a lane's sums, then of lanes, warps, bias, residual */
            if (K % 8 > 0) error += 2 * unit * size; /* cuBLAS's, which is rounded, then what is added, then gelu */
            if (gelu) {
                const double of_cublas = K % 8 > 0 ? 0x1p-11 * fabs(z) : 0; /* its tanh in BF16 */
                z /= 1 + exp(-1.5957691216057308 * (z + 0.044715 * z * z * z));
                error = 1.13 * error + 0x1p-20 * fabs(z) + of_cublas;
            }
            const double got = ((const double *)y.data)[n];
            cr_assert(fabs(got - z) <= error + unit * fabs(z) + 0x1p-25, "%s %s N %lld K %lld: [%lld] is %g, not %g",
                      fattn_dtype_name(dtype), op_names[op], (long long)N, (long long)K, (long long)n, got, z);
        }
        fattn_tensor_free(p->cpu, &y);
        fattn_tape_reset(t);
    }
    fattn_tape_destroy(t);
    for (int i = 0; i < INPUTS; ++i) fattn_tensor_free(p->gpu, &in[i]), fattn_tensor_free(p->cpu, &host[i]);
    free(h), free(off);
}

/* Shapes of GPT-2 124M and 1558M; rows that 1 to 8 warps share; what cuBLAS and two ops compute: no pack of 8, too wide
   for a norm. */
Test(cuda_row_product, sums_in_double, .timeout = 100) {
    static const int64_t sizes[][2] = {{2304, 768}, {768, 768}, {3072, 768}, {768, 3072}, {4800, 1600}, {50304, 64},
                                       {1, 8},      {5, 264},   {33, 6400},  {40, 12},    {40, 13},     {40, 2056}};
    static const fattn_dtype dtypes[] = {FATTN_F32, FATTN_F16, FATTN_BF16};
    pair p = pair_or_skip(0);
    for (int d = 0; d < 3; ++d)
        for (int n = 0; n < 12; ++n) check(&p, dtypes[d], sizes[n][0], sizes[n][1]);
    pair_free(&p);
}

/* ---- parameters that change ---- */

enum { C = 768, LAYERS = 6, KINDS = 2 };
typedef struct rows {
    pair p;
    fattn_param up[LAYERS], down[LAYERS], gain;
    fattn_tensor x, kinds[KINDS]; /* kinds: two values of a layer's parameters, F32 [C,C] */
} rows;

static fattn_param param(fattn_ctx *gpu, bool frozen) {
    fattn_param q = {.flags = frozen ? FATTN_PARAM_FROZEN : 0,
                     .value = normal(gpu, FATTN_BF16, 9, 2, (int64_t[]){C, C}, 0.05)};
    if (!frozen) q.grad = normal(gpu, FATTN_F32, 9, 2, (int64_t[]){C, C}, 0);
    return q;
}

static rows rows_new(bool frozen) {
    rows r = {.p = pair_or_skip(0)};
    fattn_ctx *const gpu = r.p.gpu;
    for (int l = 0; l < LAYERS; ++l) r.up[l] = param(gpu, frozen), r.down[l] = param(gpu, frozen);
    r.gain = (fattn_param){.flags = FATTN_PARAM_FROZEN, .value = normal(gpu, FATTN_BF16, 3, 1, (int64_t[]){C}, 1)};
    r.x = normal(gpu, FATTN_BF16, 4, 2, (int64_t[]){1, C}, 1);
    for (uint32_t k = 0; k < KINDS; ++k) r.kinds[k] = normal(gpu, FATTN_F32, 20 + k, 2, (int64_t[]){C, C}, 0.05);
    return r;
}

static void rows_free(rows *r) {
    fattn_ctx *const gpu = r->p.gpu;
    for (int l = 0; l < LAYERS; ++l) {
        fattn_tensor_free(gpu, &r->up[l].value), fattn_tensor_free(gpu, &r->down[l].value);
        if (!(r->up[l].flags & FATTN_PARAM_FROZEN))
            fattn_tensor_free(gpu, &r->up[l].grad), fattn_tensor_free(gpu, &r->down[l].grad);
    }
    fattn_tensor_free(gpu, &r->gain.value), fattn_tensor_free(gpu, &r->x);
    for (int k = 0; k < KINDS; ++k) fattn_tensor_free(gpu, &r->kinds[k]);
    pair_free(&r->p);
}

/* By kernels, which convert. */
static void change(rows *r, int kind) {
    for (int l = 0; l < LAYERS; ++l) {
        MUST(r->p.gpu, fattn_tensor_copy(r->p.gpu, &r->down[l].value, &r->kinds[kind]));
        MUST(r->p.gpu, fattn_tensor_copy(r->p.gpu, &r->up[l].value, &r->kinds[kind]));
    }
}

static fattn_tensor pass(rows *r, fattn_tape *t) {
    const fattn_var none = {0};
    fattn_tensor y;
    fattn_var x = fattn_input(t, &r->x);
    for (int l = 0; l < LAYERS; ++l) {
        const fattn_var up = fattn_op_norm_linear(t, x, fattn_use(t, &r->gain), none, eps, fattn_use(t, &r->up[l]),
                                                  none, FATTN_LINEAR_GELU);
        x = fattn_op_linear_residual(t, up, fattn_use(t, &r->down[l]), none, x);
    }
    MUST(r->p.gpu, fattn_tape_value(t, x, &y));
    return y;
}

static void expect_bits(const rows *r, const fattn_tensor *got, const fattn_tensor *want, int n) {
    fattn_tensor a = to_host(&r->p, got), b = to_host(&r->p, want);
    cr_assert_arr_eq(a.data, b.data, C * sizeof(double), "repetition %d", n);
    fattn_tensor_free(r->p.cpu, &a), fattn_tensor_free(r->p.cpu, &b);
}

/* What each kind gives, computed after all writes have ended. */
static void find_wanted(rows *r, fattn_tape *t, fattn_tensor want[KINDS]) {
    fattn_ctx *const gpu = r->p.gpu;
    for (int k = 0; k < KINDS; ++k) {
        change(r, k);
        MUST(gpu, fattn_ctx_sync(gpu));
        const fattn_tensor y = pass(r, t);
        MUST(gpu, fattn_tensor_alloc(gpu, FATTN_BF16, 2, y.shape, &want[k]));
        MUST(gpu, fattn_tensor_copy(gpu, &want[k], &y));
        fattn_tape_reset(t);
    }
}

Test(cuda_row_product, launches_of_a_graph_see_changed_parameters, .timeout = 100) {
    enum { REPEATS = 100 };
    rows r = rows_new(true);
    fattn_ctx *const gpu = r.p.gpu;
    fattn_tape *t;
    fattn_graph *g;
    fattn_tensor want[KINDS];
    MUST(gpu, fattn_tape_create(gpu, &t));
    find_wanted(&r, t, want);
    MUST(gpu, fattn_graph_begin(gpu));
    const fattn_tensor y = pass(&r, t);
    MUST(gpu, fattn_graph_end(gpu, &g));
    for (int n = 0; n < REPEATS; ++n) {
        change(&r, n % KINDS);
        MUST(gpu, fattn_graph_launch(gpu, g));
        expect_bits(&r, &y, &want[n % KINDS], n);
    }
    fattn_graph_destroy(gpu, g);
    fattn_tape_destroy(t);
    for (int k = 0; k < KINDS; ++k) fattn_tensor_free(gpu, &want[k]);
    rows_free(&r);
}

static void see_changes(bool frozen) {
    enum { REPEATS = 100 };
    rows r = rows_new(frozen);
    fattn_ctx *const gpu = r.p.gpu;
    fattn_tape *t;
    fattn_tensor want[KINDS];
    MUST(gpu, fattn_tape_create(gpu, &t));
    find_wanted(&r, t, want);
    for (int n = 0; n < REPEATS; ++n) {
        change(&r, n % KINDS);
        const fattn_tensor y = pass(&r, t);
        expect_bits(&r, &y, &want[n % KINDS], n);
        fattn_tape_reset(t);
    }
    fattn_tape_destroy(t);
    for (int k = 0; k < KINDS; ++k) fattn_tensor_free(gpu, &want[k]);
    rows_free(&r);
}
Test(cuda_row_product, ops_see_changed_parameters, .timeout = 100) { see_changes(false); }
Test(cuda_row_product, ops_see_changed_frozen_parameters, .timeout = 100) { see_changes(true); }
