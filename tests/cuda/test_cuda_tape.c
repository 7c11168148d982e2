/* The tape on the device: the recorded cases of every op and of whole blocks; gradients against central
   differences taken on the device; odd shapes and numbers against the CPU. */
#include "device.h"
#include "extremes.h"
#include "op_graphs.h"
#include "pair.h"

#include <criterion/criterion.h>
#include <cuda_runtime_api.h>
#include <fattn/check.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- recorded cases ---- */

static void compare(const pair *p, fattn_fixture *f, const op_case *c, const char *what, int i, const fattn_tensor *got,
                    double tolerance) {
    char path[160];
    fattn_tensor want, here = to_host(p, got);
    fattn_report r = {.struct_size = sizeof r};
    snprintf(path, sizeof path, "/cases/%s/%s%d", c->name, what, i);
    MUST(p->cpu, fattn_fixture_get(f, path, FATTN_F64, &want));
    const fattn_status s = fattn_compare(p->cpu, &here, &want, NULL, 0, (fattn_tolerance){tolerance, tolerance, 0}, &r);
    cr_assert_eq(s, FATTN_OK, "%s, %s, %s%d: %s", c->name, fattn_dtype_name(c->dtype), what, i,
                 fattn_ctx_error(p->cpu));
    fattn_tensor_free(p->cpu, &want);
    fattn_tensor_free(p->cpu, &here);
}

/* As tests/fixture/test_fixture_ops.c; F64 may differ because of another BLAS and libm. */
static double tolerance(const op_case *c, bool block) {
    if (c->dtype == FATTN_F64) return 1e-12;
    int64_t terms = 1;
    for (int i = 0; i < OP_INPUTS; ++i)
        if (c->in[i].value.dtype && fattn_tensor_numel(&c->in[i].value) > terms)
            terms = fattn_tensor_numel(&c->in[i].value);
    return 0x1p-24 * (8 + sqrt((double)terms)) * (block ? 14 : 1);
}

/* Returns whether the device has kernels for the case: AUTO's attention may lack F32 and F64. */
static bool check_case(const pair *p, fattn_fixture *f, const char *name, fattn_dtype dtype, bool block) {
    op_case c;
    MUST(p->gpu, op_case_load_on(p->cpu, p->gpu, f, name, dtype, &c));
    const fattn_status s = op_case_run(&c, true);
    if (s != FATTN_E_UNSUPPORTED) {
        cr_assert_eq(s, FATTN_OK, "%s: %s", name, fattn_ctx_error(p->gpu));
        for (int i = 0; i < c.n_out; ++i) compare(p, f, &c, "out", i, &c.out[i], tolerance(&c, block));
        for (int i = 0; i < OP_INPUTS; ++i)
            if (c.in[i].grad.dtype) compare(p, f, &c, "d_in", i, &c.in[i].grad, tolerance(&c, block));
    }
    op_case_free(&c);
    return s == FATTN_OK;
}

static void check_recorded(fattn_dtype dtype) {
    static const char *const files[] = {"ops.h5", "block.h5"};
    pair p = pair_or_skip(0);
    int done = 0, cases = 0;
    for (int n = 0; n < 2; ++n) {
        char path[512];
        fattn_fixture *f;
        snprintf(path, sizeof path, "%s/data/%s", FATTN_SOURCE, files[n]);
        MUST(p.cpu, fattn_fixture_open(p.cpu, path, 0, &f));
        for (int i = 0; i < fattn_fixture_count(f); ++i, ++cases)
            done += check_case(&p, f, fattn_fixture_case(f, i), dtype, n == 1);
        cr_assert_eq(fattn_fixture_close(f), FATTN_OK);
    }
    printf("%s: %d of %d recorded cases\n", fattn_dtype_name(dtype), done, cases);
    cr_assert_geq(done, 28);
    pair_free(&p);
}

Test(cuda_tape, recorded_f64) { check_recorded(FATTN_F64); }
Test(cuda_tape, recorded_f32) { check_recorded(FATTN_F32); }

/* ---- differences ---- */

static fattn_var mlp(fattn_tape *t, const fattn_var *in, int n, void *user) {
    (void)n, (void)user;
    const fattn_var none = {0};
    const fattn_var h = fattn_op_linear(t, fattn_op_layernorm(t, in[0], in[1], in[2], 1e-5f), in[3], in[4]);
    const fattn_var y = fattn_op_linear_residual(t, fattn_op_gelu(t, h), in[5], none, in[0]);
    return fattn_op_mul(t, fattn_op_silu(t, y), fattn_op_rmsnorm(t, y, in[1], 1e-5f));
}

static fattn_var activated(fattn_tape *t, const fattn_var *in, int n, void *user) {
    (void)n, (void)user;
    return fattn_op_linear_gelu(t, in[0], in[1], in[2]);
}

static fattn_var attend(fattn_tape *t, const fattn_var *in, int n, void *user) {
    (void)n, (void)user;
    const fattn_attention_params p = {.struct_size = sizeof p, .flags = FATTN_CAUSAL, .algorithm = FATTN_ALGO_STANDARD};
    const fattn_var q = fattn_op_rope(t, fattn_op_heads(t, in[0], 0, 2, 4), 1e4f, 3);
    const fattn_var k = fattn_op_rope(t, fattn_op_heads(t, in[0], 2, 1, 4), 1e4f, 3);
    const fattn_var v = fattn_op_heads(t, in[0], 3, 1, 4);
    return fattn_op_merge(t, fattn_op_attention(t, q, k, v, &p));
}

/* Views of a product, a copy of what strides cannot express, and parts put together again. */
static fattn_var shapes(fattn_tape *t, const fattn_var *in, int n, void *user) {
    (void)n, (void)user;
    const fattn_var x = fattn_op_scale(t, in[0], 0.5); /* [2,6,16] */
    const fattn_var heads = fattn_op_reshape(t, x, 4, (const int64_t[]){2, 6, 4, 4});
    const fattn_var h = fattn_op_permute(t, heads, 4, (const int[]){0, 2, 1, 3});
    const fattn_var a = fattn_op_slice(t, h, 1, 0, 2), b = fattn_op_slice(t, h, 1, 2, 4);
    const fattn_var c = fattn_op_concat(t, (const fattn_var[]){fattn_op_mul(t, a, b), b, a}, 3, 2);
    return fattn_op_tanh(t, fattn_op_reshape(t, fattn_op_transpose(t, c, 1, 3), 2, (const int64_t[]){-1, 6}));
}

/* Softmax over rows of a warp, with masked elements and a masked row; sums and means. */
static fattn_var reductions(fattn_tape *t, const fattn_var *in, int n, void *user) {
    (void)n, (void)user;
    const fattn_var y = fattn_op_scale(t, fattn_op_softmax(t, fattn_op_add(t, in[0], in[1])), 16); /* [2,6,16] */
    const fattn_var a = fattn_op_sum(t, fattn_op_mul(t, y, y), (const int[]){1}, 1, 1);            /* [2,1,16] */
    const fattn_var b = fattn_op_mean(t, fattn_op_mul(t, y, in[0]), (const int[]){0, 2}, 2, 0);    /* [6] */
    const fattn_var c = fattn_op_mul(t, fattn_op_transpose(t, y, 1, 2), b);                        /* [2,16,6] */
    return fattn_op_swiglu(t, fattn_op_geglu(t, fattn_op_transpose(t, c, 1, 2), y), fattn_op_mul(t, y, a));
}

static fattn_var losses(fattn_tape *t, const fattn_var *in, int n, void *user) {
    (void)n, (void)user;
    const fattn_var x = fattn_op_embedding(t, in[0], in[1]);
    const fattn_var a = fattn_op_linear_cross_entropy(t, x, in[0], in[2], -1);
    const fattn_var b = fattn_op_cross_entropy(t, fattn_op_matmul(t, x, in[3], 0, 1), in[2], -1);
    return fattn_op_add(t, a, b);
}

enum { PADDED = 24, CLASSES = 19 }; /* the last class and the padding share a pack */
static fattn_var padded_loss(fattn_tape *t, const fattn_var *in, int n, void *user) {
    (void)n, (void)user;
    const fattn_var x = fattn_op_embedding(t, in[0], in[1]);
    return fattn_op_linear_cross_entropy_padded(t, x, in[0], in[2], -1, CLASSES);
}

static fattn_tensor normal(fattn_ctx *ctx, uint32_t stream, int ndim, const int64_t *shape) {
    fattn_tensor t;
    MUST(ctx, fattn_tensor_alloc(ctx, FATTN_F64, ndim, shape, &t));
    MUST(ctx, fattn_tensor_normal(ctx, &t, 0, 0.7, (fattn_rng){.seed = 5, .stream = stream}));
    return t;
}

static fattn_tensor symbols(const pair *p, int64_t rows, int64_t columns, int classes, bool holes) {
    int32_t host[256];
    const int64_t shape[2] = {rows, columns};
    fattn_tensor t;
    for (int i = 0; i < rows * columns; ++i) host[i] = holes && i % 5 == 4 ? -1 : 7 * i % classes;
    const fattn_tensor here = fattn_tensor_view(host, FATTN_I32, FATTN_CPU, 0, 2, shape);
    MUST(p->gpu, fattn_tensor_alloc(p->gpu, FATTN_I32, 2, shape, &t));
    MUST(p->gpu, fattn_tensor_copy(p->gpu, &t, &here));
    return t;
}

static void check_gradient(const pair *p, fattn_graph_fn graph, fattn_tensor *in, int n) {
    const fattn_gradcheck_options o = {.struct_size = sizeof o, .max_coords = 24};
    fattn_report r = {.struct_size = sizeof r};
    cr_expect_eq(fattn_gradcheck(p->gpu, graph, NULL, in, n, &o, &r), FATTN_OK, "%s", fattn_ctx_error(p->gpu));
    cr_expect_gt(r.checked, 0);
    for (int i = 0; i < n; ++i) fattn_tensor_free(p->gpu, &in[i]);
}

Test(cuda_tape, differences) {
    pair p = pair_or_skip(0);
    fattn_ctx *const g = p.gpu;
    fattn_tensor of_mlp[] = {normal(g, 1, 3, (int64_t[]){2, 5, 12}), normal(g, 2, 1, (int64_t[]){12}),
                             normal(g, 3, 1, (int64_t[]){12}),       normal(g, 4, 2, (int64_t[]){20, 12}),
                             normal(g, 5, 1, (int64_t[]){20}),       normal(g, 6, 2, (int64_t[]){12, 20})};
    check_gradient(&p, mlp, of_mlp, 6);
    /* Rows in packs, whose sums are in parts; then rows that are not. */
    fattn_tensor of_activated[] = {normal(g, 1, 2, (int64_t[]){70, 12}), normal(g, 2, 2, (int64_t[]){264, 12}),
                                   normal(g, 3, 1, (int64_t[]){264})};
    check_gradient(&p, activated, of_activated, 3);
    fattn_tensor of_odd[] = {normal(g, 1, 3, (int64_t[]){2, 5, 12}), normal(g, 2, 2, (int64_t[]){21, 12}),
                             normal(g, 3, 1, (int64_t[]){21})};
    check_gradient(&p, activated, of_odd, 3);
    fattn_tensor of_attend[] = {normal(g, 7, 3, (int64_t[]){2, 6, 16})};
    check_gradient(&p, attend, of_attend, 1);
    fattn_tensor of_shapes[] = {normal(g, 7, 3, (int64_t[]){2, 6, 16})};
    check_gradient(&p, shapes, of_shapes, 1);
    fattn_tensor of_reductions[] = {normal(g, 7, 3, (int64_t[]){2, 6, 16}), normal(g, 8, 1, (int64_t[]){16})};
    check_gradient(&p, reductions, of_reductions, 2);
    fattn_tensor of_losses[] = {normal(g, 8, 2, (int64_t[]){11, 6}), symbols(&p, 3, 7, 11, false),
                                symbols(&p, 3, 7, 11, true), normal(g, 9, 3, (int64_t[]){3, 11, 6})};
    check_gradient(&p, losses, of_losses, 4);
    fattn_tensor of_padded[] = {normal(g, 10, 2, (int64_t[]){PADDED, 6}), symbols(&p, 3, 7, CLASSES, false),
                                symbols(&p, 3, 7, CLASSES, true)};
    check_gradient(&p, padded_loss, of_padded, 3);
    pair_free(&p);
}

/* ---- 16 bits ---- */

/* The graph on either context, with inputs on the device: its output, and the gradients of its output if that is
   a loss, else of its rows' cross-entropy against class 0; in F64 on the host. */
static void run_graph(const pair *p, fattn_ctx *ctx, fattn_graph_fn graph, const fattn_tensor *in, int n,
                      fattn_dtype dtype, void *user, fattn_tensor out[8]) {
    fattn_tape *tape;
    fattn_param params[8] = {{.name = NULL}};
    fattn_var x[8];
    MUST(ctx, fattn_tape_create(ctx, &tape));
    for (int i = 0; i < n; ++i) {
        fattn_param *const q = &params[i];
        if (in[i].dtype == FATTN_I32) {
            x[i] = fattn_input(tape, &in[i]);
            continue;
        }
        MUST(ctx, fattn_tensor_alloc(ctx, dtype, in[i].ndim, in[i].shape, &q->value));
        MUST(ctx,
             fattn_tensor_alloc(ctx, dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32, in[i].ndim, in[i].shape, &q->grad));
        MUST(p->gpu, fattn_tensor_copy(p->gpu, &q->value, &in[i]));
        MUST(ctx, fattn_tensor_normal(ctx, &q->grad, 0, 0, (fattn_rng){0}));
        x[i] = fattn_use(tape, q);
    }
    fattn_tensor y;
    fattn_var v = graph(tape, x, n, user);
    MUST(ctx, fattn_tape_value(tape, v, &y));
    out[n] = to_host(p, &y);
    if (y.ndim > 0) {
        int32_t zeros[512] = {0};
        fattn_tensor ids;
        const fattn_tensor here = fattn_tensor_view(zeros, FATTN_I32, FATTN_CPU, 0, y.ndim - 1, y.shape);
        MUST(ctx, fattn_tensor_alloc(ctx, FATTN_I32, y.ndim - 1, y.shape, &ids));
        MUST(p->gpu, fattn_tensor_copy(p->gpu, &ids, &here));
        v = fattn_op_cross_entropy(tape, v, fattn_input(tape, &ids), -1);
        MUST(ctx, fattn_tape_backward(tape, v));
        fattn_tensor_free(ctx, &ids);
    } else {
        MUST(ctx, fattn_tape_backward(tape, v));
    }
    for (int i = 0; i < n; ++i) {
        out[i] = (fattn_tensor){0};
        if (in[i].dtype == FATTN_I32) continue;
        out[i] = to_host(p, &params[i].grad);
        fattn_tensor_free(ctx, &params[i].value);
        fattn_tensor_free(ctx, &params[i].grad);
    }
    fattn_tape_destroy(tape);
}

/* Inputs are rounded first, so both see the same numbers; a graph of a few ops rounds each of its
   intermediate results once: 16 roundings of the largest number bound the error by far. */
static void check_narrow(const pair *p, fattn_graph_fn graph, fattn_tensor *in, int n) {
    static const fattn_dtype types[] = {FATTN_BF16, FATTN_F16};
    static const double ulp[] = {0x1p-8, 0x1p-11};
    for (int k = 0; k < 2; ++k) {
        fattn_tensor got[8], want[8];
        for (int i = 0; i < n; ++i) {
            fattn_tensor rounded;
            if (in[i].dtype == FATTN_I32) continue;
            MUST(p->gpu, fattn_tensor_alloc(p->gpu, types[k], in[i].ndim, in[i].shape, &rounded));
            MUST(p->gpu, fattn_tensor_copy(p->gpu, &rounded, &in[i]));
            MUST(p->gpu, fattn_tensor_copy(p->gpu, &in[i], &rounded));
            fattn_tensor_free(p->gpu, &rounded);
        }
        run_graph(p, p->gpu, graph, in, n, types[k], NULL, got);
        run_graph(p, p->gpu, graph, in, n, FATTN_F32, NULL, want);
        for (int i = 0; i <= n; ++i) {
            if (!got[i].data) continue;
            double most = 0, error = 0;
            for (int64_t e = 0; e < fattn_tensor_numel(&got[i]); ++e) {
                const double x = ((double *)got[i].data)[e], y = ((double *)want[i].data)[e];
                most = fmax(most, fabs(y));
                error = fmax(error, fabs(x - y));
            }
            cr_expect(error <= 16 * ulp[k] * most, "%s, %s %d: error %g of %g", fattn_dtype_name(types[k]),
                      i < n ? "gradient" : "output", i, error, most);
            cr_expect_gt(error, 0); /* 0 would mean that nothing was rounded */
            fattn_tensor_free(p->cpu, &got[i]);
            fattn_tensor_free(p->cpu, &want[i]);
        }
    }
    for (int i = 0; i < n; ++i) fattn_tensor_free(p->gpu, &in[i]);
}

Test(cuda_tape, sixteen_bits) {
    pair p = pair_or_skip(0);
    fattn_ctx *const g = p.gpu;
    fattn_tensor of_mlp[] = {normal(g, 1, 3, (int64_t[]){2, 5, 24}), normal(g, 2, 1, (int64_t[]){24}),
                             normal(g, 3, 1, (int64_t[]){24}),       normal(g, 4, 2, (int64_t[]){40, 24}),
                             normal(g, 5, 1, (int64_t[]){40}),       normal(g, 6, 2, (int64_t[]){24, 40})};
    check_narrow(&p, mlp, of_mlp, 6);
    fattn_tensor of_activated[] = {normal(g, 1, 2, (int64_t[]){70, 24}), normal(g, 2, 2, (int64_t[]){264, 24}),
                                   normal(g, 3, 1, (int64_t[]){264})};
    check_narrow(&p, activated, of_activated, 3);
    fattn_tensor of_attend[] = {normal(g, 7, 3, (int64_t[]){2, 6, 16})};
    check_narrow(&p, attend, of_attend, 1);
    fattn_tensor of_shapes[] = {normal(g, 7, 3, (int64_t[]){2, 6, 16})};
    check_narrow(&p, shapes, of_shapes, 1);
    fattn_tensor of_reductions[] = {normal(g, 7, 3, (int64_t[]){2, 6, 16}), normal(g, 8, 1, (int64_t[]){16})};
    check_narrow(&p, reductions, of_reductions, 2);
    fattn_tensor of_losses[] = {normal(g, 8, 2, (int64_t[]){11, 6}), symbols(&p, 3, 7, 11, false),
                                symbols(&p, 3, 7, 11, true), normal(g, 9, 3, (int64_t[]){3, 11, 6})};
    check_narrow(&p, losses, of_losses, 4);
    fattn_tensor of_padded[] = {normal(g, 10, 2, (int64_t[]){PADDED, 6}), symbols(&p, 3, 7, CLASSES, false),
                                symbols(&p, 3, 7, CLASSES, true)};
    check_narrow(&p, padded_loss, of_padded, 3);
    pair_free(&p);
}

/* ---- dropout ---- */

/* [7,11,24]: in packs, element by element, and of a permuted x; the gradient of in[0] is the sum of three masks times
   in[1]. */
static fattn_var dropped(fattn_tape *t, const fattn_var *in, int n, void *user) {
    (void)n, (void)user;
    const fattn_var none = {0}, turned = fattn_op_transpose(t, in[0], 0, 2);
    const fattn_var a = fattn_op_dropout(t, in[0], 0.5f, (fattn_rng){.seed = 1, .stream = 2}, in[2]);
    const fattn_var b = fattn_op_dropout(t, fattn_op_slice(t, in[0], 2, 1, 24), 0.25f, (fattn_rng){.seed = 3}, none);
    const fattn_var c = fattn_op_transpose(t, fattn_op_dropout(t, turned, 0.75f, (fattn_rng){.seed = 4}, none), 0, 2);
    const fattn_var d = fattn_op_concat(t, (const fattn_var[]){b, fattn_op_slice(t, in[1], 2, 0, 1)}, 2, 2);
    const fattn_var y = fattn_op_add(t, fattn_op_add(t, a, c), d);
    return fattn_op_sum(t, fattn_op_mul(t, y, in[1]), NULL, 0, 0);
}

/* in[1] is the same in all elements: 1. Gradients of F32 and F64 are sums of the same three numbers on both devices,
   and the step, which is on the device, counts. */
Test(cuda_tape, dropout_masks_are_the_cpus) {
    pair p = pair_or_skip(0);
    const int32_t steps[] = {0, 5};
    fattn_tensor first = {0};
    for (int n = 0; n < 4; ++n) {
        const fattn_tensor here = fattn_tensor_view((void *)(uintptr_t)&steps[n / 2], FATTN_I32, FATTN_CPU, 0, 0, NULL);
        fattn_tensor got[8], want[8], in[] = {normal(p.gpu, 1, 3, (int64_t[]){7, 11, 24}), {0}, {0}};
        MUST(p.gpu, fattn_tensor_alloc(p.gpu, FATTN_F64, 3, in[0].shape, &in[1]));
        MUST(p.gpu, fattn_tensor_normal(p.gpu, &in[1], 1, 0, (fattn_rng){0}));
        MUST(p.gpu, fattn_tensor_alloc(p.gpu, FATTN_I32, 0, NULL, &in[2]));
        MUST(p.gpu, fattn_tensor_copy(p.gpu, &in[2], &here));
        const fattn_dtype dtype = n % 2 ? FATTN_F64 : FATTN_F32;
        run_graph(&p, p.gpu, dropped, in, 3, dtype, NULL, got);
        fattn_tensor_free(p.gpu, &in[2]);
        in[2] = here; /* where the CPU's context has it */
        run_graph(&p, p.cpu, dropped, in, 3, dtype, NULL, want);
        const size_t bytes = (size_t)fattn_tensor_numel(&got[0]) * sizeof(double);
        cr_assert(memcmp(got[0].data, want[0].data, bytes) == 0, "%s, step %d", fattn_dtype_name(dtype), steps[n / 2]);
        if (n == 1) first = got[0];
        if (n == 3) cr_assert(memcmp(got[0].data, first.data, bytes) != 0, "the step does not count");
        for (int i = 0; i < 4; ++i) {
            if (n != 1 || i) fattn_tensor_free(p.cpu, &got[i]);
            fattn_tensor_free(p.cpu, &want[i]);
        }
        for (int i = 0; i < 2; ++i) fattn_tensor_free(p.gpu, &in[i]);
    }
    fattn_tensor_free(p.cpu, &first);
    pair_free(&p);
}

/* ---- sizes that fill packs, warps and blocks ---- */

static fattn_var wide(fattn_tape *t, const fattn_var *in, int n, void *user) {
    (void)n;
    const int *const heads = user;
    const fattn_var h = fattn_op_layernorm(t, in[0], in[1], in[2], 1e-5f);
    const fattn_var r = fattn_op_rope(t, fattn_op_heads(t, h, 0, heads[0], heads[1]), 1e4f, 0);
    const fattn_var y = fattn_op_gelu(t, fattn_op_merge(t, r));
    const fattn_var z = fattn_op_relu(t, fattn_op_scale(t, fattn_op_tanh(t, in[0]), -1.5));
    const fattn_var s = fattn_op_mul(t, fattn_op_softmax(t, in[0]), fattn_op_sum(t, in[0], (const int[]){0, 1}, 2, 0));
    const fattn_var g = fattn_op_geglu(t, fattn_op_slice(t, in[0], 2, 1, heads[0] * heads[1]),
                                       fattn_op_slice(t, h, 2, 0, heads[0] * heads[1] - 1));
    /* Of the size of the other terms: what is added to all of a row's logits takes bits from them. */
    const fattn_var squares = fattn_op_scale(t, fattn_op_mul(t, g, g), 1.0 / (heads[0] * heads[1]));
    const fattn_var u = fattn_op_sum(t, squares, (const int[]){2}, 1, 1);
    const fattn_var m = fattn_op_add(t, fattn_op_add(t, s, u), fattn_op_mean(t, in[0], (const int[]){2}, 1, 1));
    return fattn_op_add(t, fattn_op_add(t, fattn_op_add(t, fattn_op_swiglu(t, in[0], h), z), m),
                        fattn_op_mul(t, y, in[1]));
}

/* The same on both devices. Sums over 300 rows or thousands of columns: a bound of 64 ulps of the largest number; in
   F64 plus RoPE's angles, which are double in all dtypes, with 150 ulps each for sine and cosine. A row of a norm is
   processed by a warp up to 1024 columns, by a block up to 8192 if they are multiples of 8, and otherwise read several
   times. */
static void check_wide(pair *p, int heads, int width, fattn_dtype dtype) {
    const int64_t columns = heads * width;
    fattn_tensor got[8], want[8];
    fattn_tensor in[] = {normal(p->gpu, 1, 3, (int64_t[]){2, 150, columns}), normal(p->gpu, 2, 1, &columns),
                         normal(p->gpu, 3, 1, &columns)};
    int shape[2] = {heads, width};
    run_graph(p, p->gpu, wide, in, 3, dtype, shape, got);
    run_graph(p, p->cpu, wide, in, 3, dtype, shape, want);
    for (int i = 0; i < 4; ++i) {
        double most = 0, error = 0;
        for (int64_t e = 0; e < fattn_tensor_numel(&got[i]); ++e) {
            const double x = ((double *)got[i].data)[e], y = ((double *)want[i].data)[e];
            most = fmax(most, fabs(y));
            error = isnan(x) ? INFINITY : fmax(error, fabs(x - y));
        }
        cr_expect(error <= (dtype == FATTN_F64 ? (64 + 300) * 0x1p-53 : 64 * 0x1p-24) * most,
                  "%s, %lld columns, %s %d: error %g of %g", fattn_dtype_name(dtype), (long long)columns,
                  i < 3 ? "gradient" : "output", i, error, most);
        fattn_tensor_free(p->cpu, &got[i]);
        fattn_tensor_free(p->cpu, &want[i]);
        if (i < 3) fattn_tensor_free(p->gpu, &in[i]);
    }
}

Test(cuda_tape, large) {
    pair p = pair_or_skip(0);
    static const int heads[][2] = {{8, 64},   {12, 86},  {5, 30},  {3, 8},  {33, 32}, {16, 64}, {25, 64}, {50, 64},
                                   {128, 64}, {129, 64}, {3, 346}, {2, 64}, {4, 64},  {6, 64},  {10, 64}, {12, 64}};
    for (size_t k = 0; k < sizeof heads / sizeof heads[0]; ++k) {
        check_wide(&p, heads[k][0], heads[k][1], FATTN_F32);
        check_wide(&p, heads[k][0], heads[k][1], FATTN_F64);
    }
    pair_free(&p);
}

static fattn_tensor normed(const pair *p, const fattn_tensor *x, const fattn_tensor *gain, const fattn_tensor *bias) {
    fattn_tape *tape;
    fattn_tensor y;
    MUST(p->gpu, fattn_tape_create(p->gpu, &tape));
    const fattn_var in[] = {fattn_input(tape, x), fattn_input(tape, gain), fattn_input(tape, bias)};
    MUST(p->gpu, fattn_tape_value(tape, fattn_op_layernorm(tape, in[0], in[1], in[2], 1e-5f), &y));
    const fattn_tensor host = to_host(p, &y);
    fattn_tape_destroy(tape);
    return host;
}

/* A row's bits do not depend on how many there are, which chooses the kernel above 512 columns, and the rows of a warp
   below. */
Test(cuda_tape, norm_of_few_rows) {
    enum { ROWS = 5000, FEW = 3 };
    static const fattn_dtype types[] = {FATTN_BF16, FATTN_F16, FATTN_F32};
    static const int64_t columns[] = {128, 136, 384, 512, 520, 768, 1000, 1024};
    pair p = pair_or_skip(0);
    for (int n = 0; n < 24; ++n) {
        const int64_t C = columns[n / 3], shapes[3][2] = {{ROWS, C}, {C}, {C}};
        fattn_tensor in[3];
        for (int i = 0; i < 3; ++i) {
            fattn_tensor wide_one = normal(p.gpu, (uint32_t)i + 1, i ? 1 : 2, shapes[i]);
            MUST(p.gpu, fattn_tensor_alloc(p.gpu, types[n % 3], i ? 1 : 2, shapes[i], &in[i]));
            MUST(p.gpu, fattn_tensor_copy(p.gpu, &in[i], &wide_one));
            fattn_tensor_free(p.gpu, &wide_one);
        }
        fattn_tensor first = in[0];
        first.shape[0] = FEW;
        fattn_tensor all = normed(&p, &in[0], &in[1], &in[2]), few = normed(&p, &first, &in[1], &in[2]);
        cr_expect(memcmp(all.data, few.data, (size_t)(FEW * C) * sizeof(double)) == 0, "%s, %lld columns",
                  fattn_dtype_name(types[n % 3]), (long long)C);
        fattn_tensor_free(p.cpu, &all);
        fattn_tensor_free(p.cpu, &few);
        for (int i = 0; i < 3; ++i) fattn_tensor_free(p.gpu, &in[i]);
    }
    pair_free(&p);
}

/* ---- rows that are added to every row ---- */

static fattn_var biased(fattn_tape *t, const fattn_var *in, int n, void *user) {
    (void)n, (void)user;
    const fattn_var y = fattn_op_linear(t, in[0], in[1], in[2]);
    return fattn_op_add(t, fattn_op_mul(t, y, in[2]), in[3]);
}

static double largest_of(const fattn_tensor *t) {
    double most = 0;
    for (int64_t e = 0; e < fattn_tensor_numel(t); ++e) most = fmax(most, fabs(((double *)t->data)[e]));
    return most;
}

/* A bias is a part of a product (cuBLASLt), or of F64 added to before; rows are in packs, or one by one; their
   gradients are sums of columns. Bounds of check_wide; in BF16 results are rounded four times on the way, and a
   rounding of a logit, which may be another on each device, is a relative error of its probability. */
static void check_biased(const pair *p, int64_t N, fattn_dtype dtype) {
    fattn_tensor got[8], want[8];
    fattn_tensor in[] = {normal(p->gpu, 1, 3, (int64_t[]){2, 250, 40}), normal(p->gpu, 2, 2, (int64_t[]){N, 40}),
                         normal(p->gpu, 3, 1, &N), normal(p->gpu, 4, 1, &N)};
    run_graph(p, p->gpu, biased, in, 4, dtype, NULL, got);
    run_graph(p, p->cpu, biased, in, 4, dtype, NULL, want);
    const double narrow = (4 + 2 * largest_of(&want[4])) * 0x1p-9;
    const double bound = dtype == FATTN_F64 ? 64 * 0x1p-53 : dtype == FATTN_F32 ? 64 * 0x1p-24 : narrow;
    for (int i = 0; i < 5; ++i) {
        const double most = largest_of(&want[i]);
        double error = 0;
        for (int64_t e = 0; e < fattn_tensor_numel(&got[i]); ++e) {
            const double x = ((double *)got[i].data)[e], y = ((double *)want[i].data)[e];
            error = isnan(x) ? INFINITY : fmax(error, fabs(x - y));
        }
        cr_expect(error <= bound * most, "%s, %lld columns, %s %d: error %g of %g, bound %g", fattn_dtype_name(dtype),
                  (long long)N, i < 4 ? "gradient" : "output", i, error, most, bound * most);
        fattn_tensor_free(p->cpu, &got[i]);
        if (i < 4) fattn_tensor_free(p->gpu, &in[i]);
    }
    for (int i = 0; i < 5; ++i) fattn_tensor_free(p->cpu, &want[i]);
}

Test(cuda_tape, added_rows) {
    for (int tuned = 0; tuned < 2; ++tuned) {
        pair p = pair_or_skip(tuned ? FATTN_CTX_TUNE : 0);
        static const int64_t columns[] = {8, 13, 24, 256, 264, 1000, 2304};
        static const fattn_dtype dtypes[] = {FATTN_F64, FATTN_F32, FATTN_BF16};
        for (int n = 0; n < 7 * 3; ++n) check_biased(&p, columns[n / 3], dtypes[n % 3]);
        pair_free(&p);
    }
}

/* FATTN_CTX_TF32: a product is off by what rounding both operands to 10 bits of fraction costs, 2^-11 each at most, and
   by more than sums in F32 are; with a bias and without, so that cuBLAS and cuBLASLt both multiply. */
Test(cuda_tape, tf32_products) {
    enum { M = 96, N = 136, K = 512 };
    for (int tuned = 0; tuned < 2; ++tuned) {
        pair p = pair_or_skip(FATTN_CTX_TF32 | (tuned ? FATTN_CTX_TUNE : 0u));
        static float x[M * K], w[N * K], b[N], y[M * N];
        const int64_t shapes[4][2] = {{M, K}, {N, K}, {N, 0}, {M, N}};
        float *const host[4] = {x, w, b, y};
        fattn_tensor here[4], there[3];
        for (int i = 0; i < 4; ++i)
            here[i] = fattn_tensor_view(host[i], FATTN_F32, FATTN_CPU, 0, i == 2 ? 1 : 2, shapes[i]);
        for (int i = 0; i < 3; ++i) {
            MUST(p.cpu, fattn_tensor_normal(p.cpu, &here[i], 0, 1, (fattn_rng){.seed = 5, .stream = (uint32_t)i}));
            MUST(p.gpu, fattn_tensor_alloc(p.gpu, FATTN_F32, here[i].ndim, shapes[i], &there[i]));
            MUST(p.gpu, fattn_tensor_copy(p.gpu, &there[i], &here[i]));
        }
        for (int biased = 0; biased < 2; ++biased) {
            fattn_tape *t;
            fattn_tensor value;
            MUST(p.gpu, fattn_tape_create(p.gpu, &t));
            const fattn_var in[2] = {fattn_input(t, &there[0]), fattn_input(t, &there[1])}, none = {0};
            const fattn_var bias = biased ? fattn_input(t, &there[2]) : none;
            MUST(p.gpu, fattn_tape_value(t, fattn_op_linear(t, in[0], in[1], bias), &value));
            MUST(p.gpu, fattn_tensor_copy(p.gpu, &here[3], &value));
            fattn_tape_destroy(t);
            double off = 0;
            for (int i = 0; i < M; ++i)
                for (int j = 0; j < N; ++j) {
                    double sum = biased ? (double)b[j] : 0, sizes = 0;
                    for (int k = 0; k < K; ++k) {
                        const double product = (double)x[i * K + k] * (double)w[j * K + k];
                        sum += product, sizes += fabs(product);
                    }
                    const double error = fabs((double)y[i * N + j] - sum);
                    cr_assert(error <= sizes * 1.01 * 0x1p-10, "row %d, column %d: error %g, sizes %g", i, j, error,
                              sizes);
                    off = fmax(off, error / sizes);
                }
            cr_assert(off > 0x1p-20, "no operand was rounded: the largest error is %g", off);
        }
        for (int i = 0; i < 3; ++i) fattn_tensor_free(p.gpu, &there[i]);
        pair_free(&p);
    }
}

/* ---- numbers near the ends of their types ---- */

Test(cuda_tape, extremes, .timeout = 100) {
    static const fattn_dtype types[] = {FATTN_F64, FATTN_F32, FATTN_BF16, FATTN_F16};
    pair p = pair_or_skip(0);
    for (int n = 0; n < 4; ++n) {
        extremes_unary(p.gpu, types[n]);
        extremes_norm(p.gpu, types[n]);
        extremes_cross_entropy(p.gpu, types[n]);
        extremes_rope(p.gpu, types[n]);
    }
    pair_free(&p);
}

/* As tests/grad/test_empty.c: the strides of an empty tensor are not used. */
Test(cuda_tape, strides_of_nothing) {
    static const int64_t strides[] = {0, -3, INT64_MAX, INT64_MIN};
    static const fattn_dtype types[] = {FATTN_F64, FATTN_F32, FATTN_BF16, FATTN_F16};
    const fattn_attention_params p = {.struct_size = sizeof p};
    pair c = pair_or_skip(0);
    for (int n = 0; n < 16; ++n) {
        const int64_t shapes[2][3] = {{2, 0, 12}, {0, 3, 12}}, square[2] = {12, 12};
        for (int k = 0; k < 2; ++k) {
            fattn_tensor x = fattn_tensor_view(NULL, types[n % 4], FATTN_CUDA, 0, 3, shapes[k]);
            fattn_tensor ids = fattn_tensor_view(NULL, FATTN_I32, FATTN_CUDA, 0, 2, shapes[k]);
            for (int d = 0; d < 3; ++d) x.stride[d] = ids.stride[d] = strides[n / 4];
            fattn_param e = {.name = "e", .value = x, .grad = x}, w = {.name = "w"}, g = {.name = "g"};
            MUST(c.gpu, fattn_tensor_alloc(c.gpu, types[n % 4], 2, square, &w.value));
            MUST(c.gpu, fattn_tensor_alloc(c.gpu, types[n % 4], 2, square, &w.grad));
            MUST(c.gpu, fattn_tensor_alloc(c.gpu, types[n % 4], 1, square, &g.value));
            MUST(c.gpu, fattn_tensor_alloc(c.gpu, types[n % 4], 1, square, &g.grad));
            fattn_tape *t;
            MUST(c.gpu, fattn_tape_create(c.gpu, &t));
            const fattn_var in = fattn_use(t, &e), W = fattn_use(t, &w), G = fattn_use(t, &g);
            fattn_var h = fattn_op_rmsnorm(t, fattn_op_add(t, in, fattn_input(t, &x)), G, 1e-5f);
            h = fattn_op_gelu(t, fattn_op_linear(t, fattn_op_mul(t, h, G), W, (fattn_var){0}));
            const fattn_var q = fattn_op_rope(t, fattn_op_heads(t, h, 1, 2, 4), 1e4f, 0);
            const fattn_var v = fattn_op_heads(t, in, 1, 2, 4);
            fattn_op_merge(t, fattn_op_attention(t, q, v, v, &p));
            const fattn_var id = fattn_input(t, &ids);
            h = fattn_op_add(t, h, fattn_op_embedding(t, W, id));
            MUST(c.gpu, fattn_tape_backward(t, fattn_op_linear_cross_entropy(t, h, W, id, -1)));
            MUST(c.gpu, fattn_tensor_copy(c.gpu, &x, &x));
            fattn_tape_destroy(t);
            fattn_tensor_free(c.gpu, &w.value), fattn_tensor_free(c.gpu, &w.grad);
            fattn_tensor_free(c.gpu, &g.value), fattn_tensor_free(c.gpu, &g.grad);
        }
    }
    pair_free(&c);
}

/* As tests/grad/test_reversed.c, with the first two dimensions of x [4,6,24] in either direction: close to the results
   for a copy, which another kernel may compute. */
Test(cuda_tape, inputs_with_negative_strides) {
    static const fattn_dtype types[] = {FATTN_F64, FATTN_F32, FATTN_BF16, FATTN_F16};
    enum { OUTPUTS = 8 };
    const int64_t shape[3] = {4, 6, 24};
    pair p = pair_or_skip(0);
    fattn_tensor numbers = normal(p.gpu, 1, 3, shape);
    for (int n = 0; n < 4 * 4; ++n) {
        const int64_t size = (int64_t)fattn_dtype_size(types[n % 4]);
        fattn_tensor x[2], got[2][OUTPUTS];
        MUST(p.gpu, fattn_tensor_alloc(p.gpu, types[n % 4], 3, shape, &x[0]));
        MUST(p.gpu, fattn_tensor_copy(p.gpu, &x[0], &numbers));
        fattn_tensor memory = x[0];
        for (int d = 0; d < 2; ++d)
            if (n / 4 >> d & 1) {
                x[0].data = (char *)x[0].data + (x[0].shape[d] - 1) * x[0].stride[d] * size;
                x[0].stride[d] = -x[0].stride[d];
            }
        MUST(p.gpu, fattn_tensor_alloc(p.gpu, types[n % 4], 3, shape, &x[1]));
        MUST(p.gpu, fattn_tensor_copy(p.gpu, &x[1], &x[0]));
        for (int k = 0; k < 2; ++k) {
            const fattn_attention_params a = {.struct_size = sizeof a, .flags = FATTN_CAUSAL};
            fattn_tape *t;
            MUST(p.gpu, fattn_tape_create(p.gpu, &t));
            const fattn_var v = fattn_input(t, &x[k]), h = fattn_op_heads(t, v, 1, 2, 8);
            const fattn_var out[OUTPUTS] = {h,
                                            fattn_op_merge(t, h),
                                            fattn_op_add(t, h, h),
                                            fattn_op_gelu(t, v),
                                            fattn_op_matmul(t, v, v, 0, 1),
                                            fattn_op_matmul(t, h, h, 1, 0),
                                            fattn_op_rope(t, h, 1e4f, 2),
                                            fattn_op_attention(t, h, h, h, &a)};
            for (int i = 0; i < OUTPUTS; ++i) {
                fattn_tensor y;
                MUST(p.gpu, fattn_tape_value(t, out[i], &y));
                got[k][i] = to_host(&p, &y);
            }
            fattn_tape_destroy(t);
        }
        for (int i = 0; i < OUTPUTS; ++i) {
            fattn_report r = {.struct_size = sizeof r};
            const double unit = n % 4 == 0 ? 1e-12 : n % 4 == 1 ? 1e-5 : 0x1p-6;
            cr_assert_eq(fattn_compare(p.cpu, &got[0][i], &got[1][i], NULL, 0, (fattn_tolerance){unit, unit, 1}, &r),
                         FATTN_OK, "%d, output %d: %s", n, i, fattn_ctx_error(p.cpu));
            fattn_tensor_free(p.cpu, &got[0][i]);
            fattn_tensor_free(p.cpu, &got[1][i]);
        }
        fattn_tensor_free(p.gpu, &memory);
        fattn_tensor_free(p.gpu, &x[1]);
    }
    fattn_tensor_free(p.gpu, &numbers);
    pair_free(&p);
}
