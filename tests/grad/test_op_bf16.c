/* linear, matmul and linear_cross_entropy on BF16 tensors that a CPU with AMX or AVX512-BF16 multiplies as they are:
   against F64 on the same numbers, with bounds from the lengths of the sums; which path ran; bits for any number of
   threads; memory. Sums of gradients. */
#include "suite.h"

#include "autograd_c/ops/op_device.h"
#include "core/base/internal.h"
#include "core/cpu/with_onednn.h"
#include "core/tensor/numeric.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

TestSuite(bf16, .init = open_tape, .fini = close_tape);

#define MUST(call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(ctx))

static const char *const built_in[] = {FATTNI_WITH_ONEDNN("oneDNN", ) NULL};

enum { INPUTS = 3, ROOM = 1 << 17 };

/* y of up to three inputs; inputs are [shape], of BF16 numbers, and parameters. */
typedef struct graph {
    const char *name;
    fattn_var (*op)(const fattn_var *in, fattn_var ids);
    int n, ndim[INPUTS];
    int64_t shape[INPUTS][4];
    int64_t terms;    /* longest sum */
    int64_t products; /* that the library computes, forward and backward */
} graph;

static fattn_var linear(const fattn_var *in, fattn_var ids) {
    (void)ids;
    return fattn_op_linear(tape, in[0], in[1], in[2]);
}
static fattn_var linear_of_a_slice(const fattn_var *in, fattn_var ids) {
    (void)ids;
    return fattn_op_linear(tape, fattn_op_slice(tape, in[0], 1, 3, 77), fattn_op_slice(tape, in[1], 1, 5, 79), in[2]);
}
static fattn_var linear_of_permuted_rows(const fattn_var *in, fattn_var ids) {
    (void)ids;
    return fattn_op_linear(tape, fattn_op_transpose(tape, in[0], 0, 1), in[1], (fattn_var){0});
}
static fattn_var linear_of_transposes(const fattn_var *in, fattn_var ids) {
    (void)ids;
    return fattn_op_linear(tape, fattn_op_transpose(tape, in[0], 0, 1), fattn_op_transpose(tape, in[1], 0, 1), in[2]);
}
static fattn_var matmul_nn(const fattn_var *in, fattn_var ids) {
    (void)ids;
    return fattn_op_matmul(tape, in[0], in[1], 0, 0);
}
static fattn_var matmul_nt(const fattn_var *in, fattn_var ids) {
    (void)ids;
    return fattn_op_matmul(tape, in[0], in[1], 0, 1);
}
static fattn_var matmul_tn(const fattn_var *in, fattn_var ids) {
    (void)ids;
    return fattn_op_matmul(tape, in[0], in[1], 1, 0);
}
static fattn_var matmul_tt(const fattn_var *in, fattn_var ids) {
    (void)ids;
    return fattn_op_matmul(tape, in[0], in[1], 1, 1);
}
static fattn_var matmul_of_views(const fattn_var *in, fattn_var ids) {
    (void)ids; /* neither dimension of the last is contiguous */
    return fattn_op_matmul(tape, fattn_op_permute(tape, in[0], 3, (const int[]){1, 2, 0}),
                           fattn_op_permute(tape, in[1], 3, (const int[]){1, 0, 2}), 0, 0);
}
static fattn_var matmul_of_itself(const fattn_var *in, fattn_var ids) {
    (void)ids;
    return fattn_op_matmul(tape, in[0], in[0], 0, 1);
}

static const graph graphs[] = {
    {"linear", linear, 3, {2, 2, 1}, {{61, 67}, {71, 67}, {71}}, 71, 3},
    {"linear of [2,3,..]", linear, 3, {4, 2, 1}, {{2, 3, 37, 64}, {128, 64}, {128}}, 222, 3},
    {"linear, one row", linear, 3, {1, 2, 1}, {{300}, {113, 300}, {113}}, 300, 3},
    {"linear, a long sum", linear, 3, {2, 2, 1}, {{1031, 40}, {33, 40}, {33}}, 1031, 3},
    {"linear of slices", linear_of_a_slice, 3, {2, 2, 1}, {{83, 80}, {59, 80}, {59}}, 83, 3},
    {"linear of transposes", linear_of_transposes, 3, {2, 2, 1}, {{67, 61}, {67, 71}, {71}}, 71, 3},
    {"linear of permuted rows", linear_of_permuted_rows, 2, {3, 2}, {{7, 11, 67}, {71, 67}}, 77, 0},
    {"matmul", matmul_nn, 2, {2, 2}, {{53, 67}, {67, 41}}, 67, 3},
    {"matmul, b transposed", matmul_nt, 2, {3, 3}, {{3, 53, 67}, {3, 41, 67}}, 67, 9},
    {"matmul, a transposed", matmul_tn, 2, {3, 3}, {{3, 67, 53}, {3, 67, 41}}, 67, 9},
    {"matmul, both transposed", matmul_tt, 2, {4, 4}, {{2, 2, 67, 53}, {2, 2, 41, 67}}, 67, 12},
    {"matmul of views", matmul_of_views, 2, {3, 3}, {{37, 3, 41}, {37, 3, 43}}, 43, 9},
    {"matmul of itself", matmul_of_itself, 1, {2}, {{53, 67}}, 106, 3},
    {"matmul, too small", matmul_nn, 2, {2, 2}, {{20, 20}, {20, 20}}, 20, 0},
};
enum { GRAPHS = sizeof graphs / sizeof *graphs };

/* A loss whose gradient is a tensor of y's shape. */
static const fattn_tensor *given_dy;
static fattn_status given_infer(fattn_op_call *c) {
    c->out[0].dtype = FATTN_F32;
    return FATTN_OK;
}
static fattn_status given_forward(fattn_op_call *c) {
    *(float *)c->out[0].data = 0;
    return FATTN_OK;
}
static fattn_status given_backward(fattn_op_call *c) { return fattn_tensor_copy(c->ctx, &c->d_in[0], given_dy); }
static const fattn_op_def given = {.struct_size = sizeof given,
                                   .n_out = 1,
                                   .name = "given",
                                   .infer = given_infer,
                                   .forward = given_forward,
                                   .backward = given_backward};

static int64_t count(const graph *g, int i) {
    int64_t n = 1;
    for (int d = 0; d < g->ndim[i]; ++d) n *= g->shape[i][d];
    return n;
}

static double number(int64_t i, int which) { /* of BF16, in (-1, 1) */
    const uint64_t x = (uint64_t)(i + 1000003 * which + 1) * 0x9e3779b97f4a7c15u;
    return (double)fattni_bf16_to_float(fattni_float_to_bf16((float)((double)(int64_t)(x ^ (x >> 29)) * 0x1p-63)));
}

/* y and the gradients, in F64. */
typedef struct results {
    double y[ROOM], d[INPUTS][ROOM];
    int64_t n;
} results;

/* Runs g in dtype, with gradients in `grad` that are `before` at first. Magnitudes: of |numbers|, so that the results
   are sums of |terms|. */
static void run(const graph *g, fattn_dtype dtype, fattn_dtype grad, double before, bool magnitudes, results *r) {
    static double values[INPUTS][ROOM], grads[INPUTS][ROOM], dy[ROOM];
    fattn_param p[INPUTS];
    fattn_var in[INPUTS] = {{0}};
    fattn_tensor y;
    fattn_tape_reset(tape);
    for (int i = 0; i < g->n; ++i) {
        p[i] = (fattn_param){.value = fattn_tensor_view(values[i], dtype, FATTN_CPU, 0, g->ndim[i], g->shape[i]),
                             .grad = fattn_tensor_view(grads[i], grad, FATTN_CPU, 0, g->ndim[i], g->shape[i])};
        for (int64_t e = 0; e < count(g, i); ++e) {
            fattni_store(values[i], (int32_t)dtype, e, magnitudes ? fabs(number(e, i)) : number(e, i));
            fattni_store(grads[i], (int32_t)grad, e, before);
        }
        in[i] = fattn_use(tape, &p[i]);
    }
    const fattn_var out = g->op(in, (fattn_var){0});
    MUST(fattn_tape_value(tape, out, &y));
    cr_assert_eq(y.dtype, (int32_t)dtype, "%s", g->name);
    r->n = fattn_tensor_numel(&y);
    for (int64_t e = 0; e < r->n; ++e) {
        r->y[e] = fattni_load(y.data, y.dtype, e);
        fattni_store(dy, (int32_t)dtype, e, magnitudes ? fabs(number(e, 9)) : number(e, 9));
    }
    const fattn_tensor gradient = fattn_tensor_view(dy, dtype, FATTN_CPU, 0, y.ndim, y.shape);
    given_dy = &gradient;
    MUST(fattn_tape_backward(tape, fattn_op_custom(tape, &given, &out, 1, NULL)));
    for (int i = 0; i < g->n; ++i)
        for (int64_t e = 0; e < count(g, i); ++e) r->d[i][e] = fattni_load(grads[i], (int32_t)grad, e);
}

static bool multiplies_bf16(void) { return ctx->isa >= FATTNI_ISA_AVX512BF16 && built_in[0]; }

static void compare(const graph *g, const char *what, const double *got, const double *want, const double *sizes,
                    int64_t n, double unit, double of_size) {
    for (int64_t e = 0; e < n; ++e) {
        const double bound = unit * fabs(want[e]) + (of_size + (double)(g->terms + 8) * 0x1p-24) * sizes[e];
        cr_assert(fabs(got[e] - want[e]) <= bound, "%s: %s[%ld] = %g, not %g, bound %g", g->name, what, (long)e, got[e],
                  want[e], bound);
    }
}

/* Each result is an F32 sum that is rounded once, what a gradient is added to included. Two sums, those of a matrix
   times itself, are rounded one after the other: relative to the size of their terms. */
Test(bf16, against_f64) {
    static results want, sizes, got;
    for (int i = 0; i < GRAPHS * 4; ++i) {
        const graph *const g = &graphs[i / 4];
        const fattn_dtype grad = i & 1 ? FATTN_F32 : FATTN_BF16;
        const double before = i & 2 ? 0.5 : 0, unit = 0x1p-8;
        run(g, FATTN_F64, FATTN_F64, before, false, &want);
        run(g, FATTN_F64, FATTN_F64, before, true, &sizes);
        const int64_t products = ctx->bf16.products;
        run(g, FATTN_BF16, grad, before, false, &got);
        cr_assert_eq(ctx->bf16.products - products, multiplies_bf16() ? g->products : 0, "%s: %ld products", g->name,
                     (long)(ctx->bf16.products - products));
        compare(g, "y", got.y, want.y, sizes.y, want.n, unit, 0);
        const double last = grad == FATTN_BF16 ? unit : 0x1p-24;
        const bool twice = g->op == matmul_of_itself;
        for (int k = 0; k < g->n; ++k)
            compare(g, "gradient", got.d[k], want.d[k], sizes.d[k], count(g, k), twice ? 0 : last,
                    twice ? 2 * last : 0);
    }
}

static fattn_var head(const fattn_var *in, fattn_var ids) {
    return fattn_op_linear_cross_entropy(tape, in[0], in[1], ids, -1);
}
static fattn_var padded_head(const fattn_var *in, fattn_var ids) {
    return fattn_op_linear_cross_entropy_padded(tape, in[0], in[1], ids, -1, 401);
}

enum { ROWS = 301, CLASSES = 409, WIDTH = 67 }; /* 301 rows of 409 classes: two chunks are of other shapes below */

/* The loss and the gradients of x [ROWS,WIDTH] and w [CLASSES,WIDTH]. */
static double loss_of(fattn_var (*op)(const fattn_var *, fattn_var), fattn_dtype dtype, fattn_dtype grad, double before,
                      double d[2][ROOM]) {
    static double values[2][ROOM], grads[2][ROOM];
    static int32_t symbols[ROWS];
    static const int64_t shape[2][2] = {{ROWS, WIDTH}, {CLASSES, WIDTH}};
    fattn_param p[2];
    fattn_var in[2];
    double loss;
    fattn_tape_reset(tape);
    for (int i = 0; i < 2; ++i) {
        p[i] = (fattn_param){.value = fattn_tensor_view(values[i], dtype, FATTN_CPU, 0, 2, shape[i]),
                             .grad = fattn_tensor_view(grads[i], grad, FATTN_CPU, 0, 2, shape[i])};
        for (int64_t e = 0; e < shape[i][0] * WIDTH; ++e) {
            fattni_store(values[i], (int32_t)dtype, e, number(e, i));
            fattni_store(grads[i], (int32_t)grad, e, before);
        }
        in[i] = fattn_use(tape, &p[i]);
    }
    for (int r = 0; r < ROWS; ++r) symbols[r] = r % 5 == 4 ? -1 : r * 7 % 401;
    const fattn_tensor ids = fattn_tensor_view(symbols, FATTN_I32, FATTN_CPU, 0, 1, shape[0]);
    const fattn_var l = op(in, fattn_input(tape, &ids));
    MUST(fattn_tape_backward(tape, fattn_op_scale(tape, l, 3)));
    MUST(fattn_tape_item(tape, l, &loss));
    for (int i = 0; i < 2; ++i)
        for (int64_t e = 0; e < shape[i][0] * WIDTH; ++e) d[i][e] = fattni_load(grads[i], (int32_t)grad, e);
    return loss;
}

/* A logit is off by at most e = 2 WIDTH 2^-24 WIDTH, for all numbers are below 1; then G, the gradients of logits, by a
   factor of 1 + 2 e; as two BF16 numbers it loses 2^-16, and its sums in F32 add CLASSES or ROWS 2^-24. The sum of |G|
   over a row is at most 2 / kept, over a column at most 1: times 3, the loss's gradient. G in one BF16 number would
   lose 2^-8, which these bounds do not allow. */
Test(bf16, linear_cross_entropy) {
    static double want[2][ROOM], got[2][ROOM];
    const double e = 2.0 * WIDTH * WIDTH * 0x1p-24, lost = 2 * e + 0x1p-16 + (CLASSES + 8) * 0x1p-24;
    const double sizes[2] = {3 * 2 / (ROWS * 0.8), 3};
    const int64_t n[2] = {ROWS * WIDTH, CLASSES * WIDTH};
    for (int i = 0; i < 8; ++i) {
        const fattn_dtype grad = i & 1 ? FATTN_F32 : FATTN_BF16;
        const double before = i & 2 ? 0.5 : 0, unit = i & 1 ? 0x1p-24 : 0x1p-8;
        const double right = loss_of(i & 4 ? padded_head : head, FATTN_F64, FATTN_F64, before, want);
        const int64_t products = ctx->bf16.products;
        const double loss = loss_of(i & 4 ? padded_head : head, FATTN_BF16, grad, before, got);
        cr_assert_eq(ctx->bf16.products - products, multiplies_bf16() ? 5 : 0);
        cr_assert(fabs(loss - right) <= 2 * e + 0x1p-24 * right, "%.9g, not %.9g", loss, right);
        for (int k = 0; k < 2; ++k)
            for (int64_t j = 0; j < n[k]; ++j)
                cr_assert(fabs(got[k][j] - want[k][j]) <= unit * fabs(want[k][j]) + lost * sizes[k],
                          "gradient %d [%ld] = %.9g, not %.9g", k, (long)j, got[k][j], want[k][j]);
    }
}

/* Without gradients only the loss is computed: one product. */
Test(bf16, loss_alone) {
    float x[64 * 64] = {0};
    int32_t ids[64] = {0};
    double loss;
    const fattn_tensor rows = fattn_tensor_view(x, FATTN_BF16, FATTN_CPU, 0, 2, (const int64_t[]){64, 64});
    const fattn_tensor target = fattn_tensor_view(ids, FATTN_I32, FATTN_CPU, 0, 1, (const int64_t[]){64});
    const fattn_var v = fattn_input(tape, &rows);
    MUST(fattn_tape_item(tape, fattn_op_linear_cross_entropy(tape, v, v, fattn_input(tape, &target), -1), &loss));
    cr_assert_float_eq(loss, log(64), 1e-6);
    cr_assert_eq(ctx->bf16.products, multiplies_bf16() ? 1 : 0);
}

/* The same program in a context of its own. */
static void in_context(int threads, int cap, uint32_t flags, const graph *g, results *r, size_t *peak) {
    fattn_ctx *const outer = ctx;
    fattn_tape *const outer_tape = tape;
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = threads, .arch_cap = cap, .flags = flags};
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    MUST(fattn_tape_create(ctx, &tape));
    run(g, FATTN_BF16, FATTN_F32, 0.25, false, r);
    fattn_tape_reset(tape);
    run(g, FATTN_BF16, FATTN_F32, 0.25, false, r);
    const size_t allocs = fattn_ctx_mem(ctx).allocs;
    run(g, FATTN_BF16, FATTN_F32, 0.25, false, r);
    cr_assert_eq(fattn_ctx_mem(ctx).allocs, allocs, "%s: a later step allocated", g->name);
    *peak = fattn_ctx_mem(ctx).peak;
    fattn_tape_destroy(tape);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
    ctx = outer, tape = outer_tape;
}

Test(bf16, bits_for_any_number_of_threads) {
    static results one, other;
    size_t peak;
    for (int i = 0; i < GRAPHS; ++i) {
        in_context(1, 0, 0, &graphs[i], &one, &peak);
        for (int threads = 2; threads <= 5; ++threads) {
            in_context(threads, 0, 0, &graphs[i], &other, &peak);
            cr_assert_eq(memcmp(one.y, other.y, (size_t)one.n * sizeof *one.y), 0, "%s", graphs[i].name);
            for (int k = 0; k < graphs[i].n; ++k)
                cr_assert_eq(memcmp(one.d[k], other.d[k], (size_t)count(&graphs[i], k) * sizeof **one.d), 0, "%s",
                             graphs[i].name);
        }
    }
}

/* A context with a lower instruction set multiplies F32 numbers, as with the flag that asks for that. */
Test(bf16, lower_instruction_sets) {
    static results flagged, capped;
    size_t peak;
    for (int i = 0; i < GRAPHS; ++i) {
        in_context(2, 0, FATTN_CTX_F32_PRODUCTS, &graphs[i], &flagged, &peak);
        in_context(2, FATTNI_ISA_AVX512, 0, &graphs[i], &capped, &peak);
        cr_assert_eq(memcmp(flagged.y, capped.y, (size_t)flagged.n * sizeof *capped.y), 0, "%s", graphs[i].name);
        for (int k = 0; k < graphs[i].n; ++k)
            cr_assert_eq(memcmp(flagged.d[k], capped.d[k], (size_t)count(&graphs[i], k) * sizeof **capped.d), 0, "%s",
                         graphs[i].name);
    }
}

/* No F32 copies of x, w, dy and the gradients. */
Test(bf16, needs_less_memory_than_f32_products) {
    static const graph g = {"linear", linear, 3, {2, 2, 1}, {{400, 300}, {200, 300}, {200}}, 400, 3};
    static results r;
    size_t wide, narrow;
    if (!multiplies_bf16()) cr_skip("no instructions for it, or built without oneDNN");
    in_context(1, 0, FATTN_CTX_F32_PRODUCTS, &g, &r, &wide);
    in_context(1, 0, 0, &g, &r, &narrow);
    cr_assert_lt(narrow, wide);
}

/* Gradients that are added to others have the bits of a sum in double that is rounded once: numbers near each other's
   ties, subnormal, infinite, not a number; neighbours and others. */
Test(bf16, sums_of_gradients_are_rounded_once) {
    enum { N = 1 << 16 };
    static const fattn_dtype dtypes[][2] = {{FATTN_BF16, FATTN_BF16}, {FATTN_BF16, FATTN_F32}, {FATTN_F32, FATTN_BF16}};
    static float d[N], x[N], old[N];
    uint32_t state = 1;
    for (int c = 0; c < 3 * 4; ++c) {
        const fattn_dtype to = dtypes[c / 4][0], from = dtypes[c / 4][1];
        const int64_t step = 1 + (c & 1), n = N / step;
        const bool fresh = c & 2;
        if (fresh && to != from) continue; /* a copy */
        for (int i = 0; i < N; ++i) {
            state = state * 1664525u + 1013904223u;
            const uint32_t a = state ^ state >> 13;
            state = state * 1664525u + 1013904223u;
            /* of any size, of the same, of some of the other's last bits, or little more than a half of its last one */
            const uint32_t below = i % 4 == 3 ? 8 : 0, bits = i % 8 == 7 ? 0x8000003fu : 0x807fffffu;
            const uint32_t b = i % 2 ? (a & 0x7f800000u) - (below << 23) + (state & bits) : state;
            if (to == FATTN_F32)
                memcpy(&d[i], &a, sizeof a);
            else
                ((uint16_t *)d)[i] = (uint16_t)(a >> 16);
            if (from == FATTN_F32)
                memcpy(&x[i], &b, sizeof b);
            else
                ((uint16_t *)x)[i] = (uint16_t)(b >> 16);
        }
        memcpy(old, d, sizeof d);
        fattn_tensor t = fattn_tensor_view(d, to, FATTN_CPU, 0, 1, &n);
        fattn_tensor s = fattn_tensor_view(x, from, FATTN_CPU, 0, 1, &n);
        t.stride[0] = s.stride[0] = step;
        MUST(fattni_accumulate(ctx, &t, &s, fresh));
        for (int64_t i = 0; i < n; ++i) {
            const double a = fresh ? 0 : fattni_load(old, (int32_t)to, i * step);
            const double b = fattni_load(x, (int32_t)from, i * step);
            double rounded;
            fattni_store(&rounded, (int32_t)to, 0, a + b);
            const double want = fattni_load(&rounded, (int32_t)to, 0), got = fattni_load(d, (int32_t)to, i * step);
            cr_assert(isnan(want) ? isnan(got) : got == want, "%s += %s, element %ld: %a + %a is %a, not %a",
                      fattn_dtype_name(to), fattn_dtype_name(from), (long)i, a, b, got, want);
        }
    }
}
