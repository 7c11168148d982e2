/* The tape: order, accumulation, skipped work, memory from step to step, errors. */
#include "suite.h"
#include "tape_ops.h"

#include <math.h>
#include <string.h>

TestSuite(tape, .init = open_tape, .fini = close_tape);

static void backward(fattn_var scalar) {
    cr_assert_eq(fattn_tape_backward(tape, scalar), FATTN_OK, "%s", fattn_ctx_error(ctx));
}

Test(tape, values_and_gradients) {
    leaf a, b;
    leaf_init(&a, 2, (int64_t[]){3, 4});
    leaf_init(&b, 2, (int64_t[]){3, 4});
    b.grad[5] = 100; /* gradients are added to existing values */
    const fattn_var s = sum(tape, mul(tape, fattn_use(tape, &a.p), fattn_use(tape, &b.p)));
    double want = 0, got = 0;
    for (int i = 0; i < 12; ++i) want += a.value[i] * b.value[i];
    cr_assert_eq(fattn_tape_item(tape, s, &got), FATTN_OK);
    cr_assert_float_eq(got, want, 1e-12);
    backward(s);
    for (int i = 0; i < 12; ++i) {
        cr_assert_eq(a.grad[i], b.value[i]);
        cr_assert_eq(b.grad[i], a.value[i] + (i == 5 ? 100 : 0));
    }
    fattn_tensor value;
    cr_assert_eq(fattn_tape_value(tape, s, &value), FATTN_OK, "values outlive backward");
    cr_assert_eq(*(double *)value.data, got);
}

Test(tape, a_variable_used_often_gets_the_sum) {
    leaf a;
    leaf_init(&a, 1, (int64_t[]){6});
    const fattn_var x = fattn_use(tape, &a.p), y = fattn_use(tape, &a.p); /* one param, two ids */
    const fattn_var square = mul(tape, x, x), mixed = mul(tape, square, y);
    const fattn_var s = sum(tape, mul(tape, mixed, square)); /* x^5 */
    backward(s);
    for (int i = 0; i < 6; ++i) cr_assert_float_eq(a.grad[i], 5 * pow(a.value[i], 4), 1e-10);
}

Test(tape, two_parameters_may_share_a_gradient) {
    leaf a;
    leaf_init(&a, 1, (int64_t[]){6});
    fattn_param twin = a.p;
    backward(sum(tape, mul(tape, fattn_use(tape, &a.p), fattn_use(tape, &twin))));
    for (int i = 0; i < 6; ++i) cr_assert_eq(a.grad[i], 2 * a.value[i]);
}

static void leaf_of_one_pass(leaf *l, int ndim, const int64_t *shape) {
    leaf_init(l, ndim, shape);
    l->p.flags = FATTN_PARAM_ONE_PASS;
    for (int i = 0; i < 60; ++i) l->grad[i] = NAN;
}

/* Over what was there: of a parameter in use once, of which a part is used, none, and that is in use without a
   gradient. */
Test(tape, gradients_of_one_pass_are_stored) {
    leaf a, part, unused, apart, added;
    leaf_of_one_pass(&a, 1, (int64_t[]){6});
    leaf_of_one_pass(&part, 2, (int64_t[]){3, 4});
    leaf_of_one_pass(&unused, 1, (int64_t[]){6});
    leaf_of_one_pass(&apart, 1, (int64_t[]){6});
    leaf_init(&added, 1, (int64_t[]){6});
    for (int n = 1; n <= 2; ++n) {
        fattn_tape_reset(tape);
        const fattn_var y = fattn_use(tape, &apart.p), x = fattn_use(tape, &a.p);
        const fattn_var columns = slice(tape, fattn_use(tape, &part.p), 1, 1, 3);
        mul(tape, y, x); /* in no loss */
        backward(sum(tape, join(tape, mul(tape, x, fattn_use(tape, &added.p)), columns)));
        for (int i = 0; i < 6; ++i) {
            cr_assert_eq(a.grad[i], added.value[i]);
            cr_assert_eq(added.grad[i], n * a.value[i]);
            cr_assert_eq(apart.grad[i], 0);
            cr_assert(isnan(unused.grad[i]));
        }
        for (int i = 0; i < 12; ++i) cr_assert_eq(part.grad[i], i % 4 == 1 || i % 4 == 2);
    }
}

Test(tape, gradients_of_one_pass_may_share_memory) {
    leaf a;
    leaf_of_one_pass(&a, 1, (int64_t[]){6});
    fattn_param twin = a.p, half = a.p;
    half.value.shape[0] = half.grad.shape[0] = 3; /* the first three */
    for (int n = 0; n < 2; ++n) {
        fattn_tape_reset(tape);
        const fattn_var x = fattn_use(tape, &a.p), y = fattn_use(tape, &a.p), z = fattn_use(tape, &twin);
        const fattn_var first = fattn_use(tape, &half);
        backward(sum(tape, join(tape, mul(tape, mul(tape, x, y), z), first)));
        for (int i = 0; i < 6; ++i) cr_assert_float_eq(a.grad[i], 3 * a.value[i] * a.value[i] + (i < 3), 1e-12);
    }
}

Test(tape, a_parameter_of_one_pass_may_be_the_scalar) {
    leaf a;
    leaf_of_one_pass(&a, 0, NULL);
    backward(fattn_use(tape, &a.p));
    cr_assert_eq(a.grad[0], 1);
}

Test(tape, long_chains_need_no_stack) {
    leaf a;
    leaf_init(&a, 1, (int64_t[]){2});
    a.value[0] = 1, a.value[1] = -1;
    const fattn_var x = fattn_use(tape, &a.p);
    fattn_var y = x;
    for (int n = 0; n < 50000; ++n) y = mul(tape, y, x);
    backward(sum(tape, y));
    cr_assert_eq(a.grad[0], 50001);
    cr_assert_eq(a.grad[1], 50001);
}

Test(tape, nothing_is_done_for_what_needs_no_gradient) {
    leaf a, frozen;
    leaf_init(&a, 1, (int64_t[]){4});
    leaf_init(&frozen, 1, (int64_t[]){4});
    frozen.p.flags = FATTN_PARAM_FROZEN;
    frozen.p.grad = (fattn_tensor){0}; /* needs none */
    const fattn_var x = fattn_use(tape, &a.p), f = fattn_use(tape, &frozen.p);
    const fattn_var in = fattn_input(tape, &frozen.p.value);
    const fattn_var constant = mul(tape, mul(tape, f, in), f);
    mul(tape, x, x); /* reaches no output */
    const fattn_var s = sum(tape, mul(tape, constant, x));
    mul(tape, s, s); /* after the scalar: not reached */
    mul_backward_calls = 0;
    backward(s);
    cr_assert_eq(mul_backward_calls, 1);
    fattn_tensor g;
    cr_assert_eq(fattn_tape_grad(tape, f, &g), FATTN_E_STATE);
    cr_assert_eq(fattn_tape_grad(tape, in, &g), FATTN_E_STATE);
    cr_assert_eq(fattn_tape_grad(tape, constant, &g), FATTN_E_STATE);
    cr_assert_eq(fattn_tape_grad(tape, x, &g), FATTN_OK);
    cr_assert_eq(g.data, a.grad);
    for (int i = 0; i < 4; ++i) cr_assert_eq(a.grad[i], pow(frozen.value[i], 3));
}

Test(tape, gradients_of_variables_can_be_kept) {
    leaf a;
    leaf_init(&a, 1, (int64_t[]){4});
    const fattn_var x = fattn_use(tape, &a.p), y = mul(tape, x, x), z = mul(tape, y, y);
    const fattn_var unused = mul(tape, x, x), s = sum(tape, z);
    fattn_tensor dy, g;
    cr_assert_eq(fattn_tape_grad(tape, x, &g), FATTN_E_STATE, "before backward");
    cr_assert_eq(fattn_tape_keep_grad(tape, y), FATTN_OK);
    cr_assert_eq(fattn_tape_keep_grad(tape, unused), FATTN_OK);
    backward(s);
    cr_assert_eq(fattn_tape_grad(tape, z, &g), FATTN_E_STATE, "recycled");
    cr_assert(strstr(fattn_ctx_error(ctx), "keep_grad"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_tape_grad(tape, unused, &g), FATTN_E_STATE, "nothing reached it");
    cr_assert_eq(fattn_tape_keep_grad(tape, z), FATTN_E_STATE, "too late");
    cr_assert_eq(fattn_tape_grad(tape, y, &dy), FATTN_OK);
    for (int i = 0; i < 4; ++i) cr_assert_eq(*element(&dy, i), 2 * a.value[i] * a.value[i]);
    cr_assert_eq(fattn_tape_status(tape), FATTN_OK, "questions do not break a tape");
}

/* x -> y = x + x^2 -> y + y: gradients that are only read share memory, those that are added to get their own. */
Test(tape, sums_pass_their_gradient_on) {
    leaf a, b;
    leaf_init(&a, 1, (int64_t[]){5});
    leaf_init(&b, 1, (int64_t[]){5});
    const fattn_var x = mul(tape, fattn_use(tape, &a.p), fattn_use(tape, &b.p));
    const fattn_var branch = mul(tape, x, x), y = fattn_op_add(tape, x, branch);
    const fattn_var s = sum(tape, fattn_op_add(tape, y, y)), kept[] = {x, branch, y};
    fattn_tensor d[3];
    for (int i = 0; i < 3; ++i) cr_assert_eq(fattn_tape_keep_grad(tape, kept[i]), FATTN_OK);
    backward(s);
    for (int i = 0; i < 3; ++i) cr_assert_eq(fattn_tape_grad(tape, kept[i], &d[i]), FATTN_OK);
    cr_assert_eq(d[1].data, d[2].data, "a copy for a branch that only reads");
    cr_assert_neq(d[0].data, d[2].data, "the stream was written while it was shared");
    for (int i = 0; i < 5; ++i) {
        const double product = a.value[i] * b.value[i];
        cr_assert_eq(*element(&d[2], i), 2);
        cr_assert_eq(*element(&d[1], i), 2);
        cr_assert_eq(*element(&d[0], i), 2 + 4 * product);
        cr_assert_eq(a.grad[i], (2 + 4 * product) * b.value[i]);
    }
}

/* Not shared: parameters, which have a gradient already, views, another layout, broadcasts. */
Test(tape, sums_that_cannot_pass_add) {
    leaf a, b, c;
    leaf_init(&a, 2, (int64_t[]){3, 4});
    leaf_init(&b, 2, (int64_t[]){4, 3});
    leaf_init(&c, 1, (int64_t[]){4});
    const fattn_var pa = fattn_use(tape, &a.p), pb = fattn_use(tape, &b.p);
    const fattn_var turned = transpose(tape, mul(tape, pb, pb));
    const fattn_var row = slice(tape, mul(tape, pa, pa), 0, 1, 2); /* [1,4] of [3,4] */
    fattn_var y = fattn_op_add(tape, pa, turned);
    y = fattn_op_add(tape, y, fattn_use(tape, &c.p));
    y = fattn_op_add(tape, y, row);
    backward(sum(tape, fattn_op_add(tape, y, pa)));
    for (int i = 0; i < 12; ++i) {
        const bool in_row = i >= 4 && i < 8;
        cr_assert_eq(a.grad[i], 2 + (in_row ? 3 * 2 * a.value[i] : 0));
        cr_assert_eq(b.grad[i], 2 * b.value[i]);
    }
    for (int i = 0; i < 4; ++i) cr_assert_eq(c.grad[i], 3);
}

Test(tape, a_parameter_may_be_the_scalar) {
    leaf a;
    leaf_init(&a, 0, NULL);
    a.grad[0] = 5;
    backward(fattn_use(tape, &a.p));
    cr_assert_eq(a.grad[0], 6);
}

/* Two outputs, x and 3x on rows; absent second input allowed. */
static const fattn_op_call *last_call;
static fattn_status pair_infer(fattn_op_call *c) {
    cr_assert(c->in[1].ndim == 0 && c->in[1].dtype == 0 && c->in[1].data == NULL);
    cr_assert(c->wanted[0] == 1 && c->wanted[1] == 0);
    for (int o = 0; o < 3; ++o) {
        c->out[o].ndim = 1;
        c->out[o].dtype = o == 2 ? FATTN_I32 : FATTN_F64;
        c->out[o].shape[0] = c->in[0].shape[0];
    }
    return FATTN_OK;
}
static fattn_status pair_forward(fattn_op_call *c) {
    for (int64_t e = 0; e < c->in[0].shape[0]; ++e) {
        *element(&c->out[0], e) = *element(&c->in[0], e);
        *element(&c->out[1], e) = 3 * *element(&c->in[0], e);
        ((int32_t *)c->out[2].data)[e] = (int32_t)e;
    }
    return FATTN_OK;
}
static fattn_status pair_backward(fattn_op_call *c) {
    last_call = c;
    cr_assert_null(c->d_out[0].data);
    cr_assert_null(c->d_out[2].data);
    cr_assert_null(c->d_in[1].data);
    for (int64_t e = 0; e < c->in[0].shape[0]; ++e) *element(&c->d_in[0], e) += 3 * *element(&c->d_out[1], e);
    return FATTN_OK;
}

Test(tape, outputs_may_have_no_gradient_and_inputs_be_absent) {
    static const fattn_op_def def = {.struct_size = sizeof def,
                                     .n_out = 3,
                                     .name = "pair",
                                     .infer = pair_infer,
                                     .forward = pair_forward,
                                     .backward = pair_backward};
    leaf a;
    leaf_init(&a, 1, (int64_t[]){5});
    const fattn_var in[2] = {fattn_use(tape, &a.p), {0}};
    const fattn_var first = fattn_op_custom(tape, &def, in, 2, NULL), second = {first.id + 1};
    fattn_tensor third;
    cr_assert_eq(fattn_tape_value(tape, (fattn_var){first.id + 2}, &third), FATTN_OK);
    cr_assert_eq(((int32_t *)third.data)[4], 4);
    backward(sum(tape, second));
    cr_assert_not_null(last_call);
    for (int i = 0; i < 5; ++i) cr_assert_eq(a.grad[i], 3);
}

Test(tape, empty_tensors_pass) {
    leaf a, b;
    leaf_init(&a, 2, (int64_t[]){0, 4});
    leaf_init(&b, 1, (int64_t[]){3});
    const fattn_var x = fattn_use(tape, &a.p), y = fattn_use(tape, &b.p);
    const fattn_var nothing = slice(tape, transpose(tape, mul(tape, x, x)), 0, 1, 2);
    const fattn_var s = sum(tape, y), zero = sum(tape, nothing);
    backward(sum(tape, mul(tape, s, zero)));
    for (int i = 0; i < 3; ++i) cr_assert_eq(b.grad[i], 0);
    fattn_tape_reset(tape); /* the sum over nothing depends on it, too */
    backward(sum(tape, transpose(tape, fattn_use(tape, &a.p))));
    fattn_tensor g;
    cr_assert_eq(fattn_tape_grad(tape, x, &g), FATTN_OK); /* the first variable again */
}

/* ---- memory ---- */

enum { BIG = 60 };

/* A step whose shapes depend on n; returns its loss. */
static double step(leaf *l, int64_t n, int depth) {
    leaf_init(l, 1, &n);
    fattn_tape_reset(tape);
    const fattn_var x = fattn_use(tape, &l->p);
    fattn_var y = x;
    for (int d = 0; d < depth; ++d) y = mul(tape, mul(tape, y, x), slice(tape, y, 0, 0, n));
    const fattn_var s = sum(tape, y);
    double loss = NAN;
    cr_assert_eq(fattn_tape_item(tape, s, &loss), FATTN_OK, "%s", fattn_ctx_error(ctx));
    backward(s);
    return loss;
}

Test(tape, later_steps_allocate_nothing) {
    leaf first, later;
    const double loss = step(&first, BIG, 400);
    cr_assert_gt(fattn_ctx_mem(ctx).allocs, 5, "the first step takes several chunks");
    const size_t peak = fattn_ctx_mem(ctx).peak;
    fattn_tape_reset(tape); /* one chunk each */
    const fattn_mem after = fattn_ctx_mem(ctx);
    cr_assert_leq(after.peak, peak);
    for (int n = 0; n < 3; ++n) {
        cr_assert_eq(step(&later, BIG, 400), loss);
        cr_assert_arr_eq(first.grad, later.grad, sizeof first.grad);
        cr_assert_eq(fattn_ctx_mem(ctx).allocs, after.allocs);
    }
    step(&later, BIG / 2, 300); /* smaller shapes fit, too */
    cr_assert_eq(step(&later, BIG, 400), loss);
    cr_assert_eq(fattn_ctx_mem(ctx).allocs, after.allocs);
    step(&later, BIG, 500); /* larger ones grow once */
    fattn_tape_reset(tape);
    const size_t allocs = fattn_ctx_mem(ctx).allocs;
    cr_assert_gt(allocs, after.allocs);
    step(&later, BIG, 400);
    step(&later, BIG, 500);
    cr_assert_eq(fattn_ctx_mem(ctx).allocs, allocs);

    fattn_tape_reset(tape); /* and use no more memory than a tape that has seen no other shape */
    const size_t live = fattn_ctx_mem(ctx).live;
    fattn_tape_destroy(tape);
    cr_assert_eq(fattn_tape_create(ctx, &tape), FATTN_OK);
    step(&later, BIG, 500);
    fattn_tape_reset(tape);
    cr_assert_leq(live, fattn_ctx_mem(ctx).live + 1024, "but for the tables of chunks");
}

Test(tape, growing_does_not_move_what_is_there) {
    leaf a;
    leaf_init(&a, 1, (int64_t[]){BIG});
    const fattn_var x = fattn_use(tape, &a.p), y = mul(tape, x, x);
    fattn_tensor early, again;
    cr_assert_eq(fattn_tape_value(tape, y, &early), FATTN_OK);
    for (int n = 0; n < 3000; ++n) cr_assert_neq(mul(tape, y, x).id, 0);
    cr_assert_gt(fattn_ctx_mem(ctx).allocs, 10);
    cr_assert_eq(fattn_tape_value(tape, y, &again), FATTN_OK);
    cr_assert_eq(early.data, again.data);
    for (int i = 0; i < BIG; ++i) cr_assert_eq(*element(&early, i), a.value[i] * a.value[i]);
}

enum { LARGE = 20000 };

/* x -> x, with saved memory as large as x. */
static fattn_status same_infer(fattn_op_call *c) {
    c->out[0].ndim = 1;
    c->out[0].dtype = FATTN_F64;
    c->out[0].shape[0] = c->in[0].shape[0];
    c->saved_bytes = (size_t)c->in[0].shape[0] * sizeof(double);
    return FATTN_OK;
}
static fattn_status same_forward(fattn_op_call *c) {
    memcpy(c->out[0].data, c->in[0].data, c->saved_bytes);
    memset(c->saved, 1, c->saved_bytes);
    return FATTN_OK;
}
static fattn_status same_backward(fattn_op_call *c) {
    cr_assert_eq(((char *)c->saved)[c->saved_bytes - 1], 1);
    for (int64_t e = 0; e < c->in[0].shape[0]; ++e)
        *element(&c->d_in[0], e) = *element(&c->d_out[0], e) + (c->d_in_fresh[0] ? 0 : *element(&c->d_in[0], e));
    return FATTN_OK;
}

Test(tape, saved_memory_is_reused_for_gradients) {
    static const fattn_op_def def = {.struct_size = sizeof def,
                                     .n_out = 1,
                                     .name = "same",
                                     .infer = same_infer,
                                     .forward = same_forward,
                                     .backward = same_backward};
    fattn_param p = {.name = "large"};
    const int64_t shape[] = {LARGE};
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F64, 1, shape, &p.value), FATTN_OK);
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F64, 1, shape, &p.grad), FATTN_OK);
    for (int i = 0; i < LARGE; ++i) ((double *)p.value.data)[i] = ((double *)p.grad.data)[i] = 0;
    fattn_var y = fattn_use(tape, &p);
    for (int d = 0; d < 20; ++d) {
        y = fattn_op_custom(tape, &def, &y, 1, NULL);
        cr_assert_eq(fattn_tape_keep_grad(tape, y), FATTN_OK);
    }
    const fattn_var s = sum(tape, y);
    const size_t before = fattn_ctx_mem(ctx).live;
    backward(s);
    cr_assert_leq(fattn_ctx_mem(ctx).live - before, 3 * LARGE * sizeof(double));
    for (int i = 0; i < LARGE; ++i) cr_assert_eq(((double *)p.grad.data)[i], 1);
    fattn_tensor_free(ctx, &p.value);
    fattn_tensor_free(ctx, &p.grad);
}

/* Only one or two gradients of a chain exist at a time, for any length. */
Test(tape, gradients_are_recycled) {
    size_t bytes[2];
    enum { SHORT = 10, LONG = 30 };
    fattn_param p = {.name = "large"};
    const int64_t shape[] = {LARGE};
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F64, 1, shape, &p.value), FATTN_OK);
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F64, 1, shape, &p.grad), FATTN_OK);
    for (int n = 0; n < 2; ++n) {
        const int depth = n ? LONG : SHORT;
        for (int i = 0; i < LARGE; ++i) ((double *)p.value.data)[i] = 1, ((double *)p.grad.data)[i] = 0;
        fattn_tape_reset(tape);
        const fattn_var x = fattn_use(tape, &p);
        fattn_var y = x;
        for (int d = 0; d < depth; ++d) y = mul(tape, y, x);
        const size_t before = fattn_ctx_mem(ctx).live;
        backward(sum(tape, y));
        bytes[n] = fattn_ctx_mem(ctx).live - before;
        cr_assert_eq(((double *)p.grad.data)[7], depth + 1);
    }
    cr_assert_leq(bytes[0], 3 * LARGE * sizeof(double));
    cr_assert_leq(bytes[1], bytes[0], "longer by 20 tensors, but no more memory for gradients");
    fattn_tensor_free(ctx, &p.value);
    fattn_tensor_free(ctx, &p.grad);
}

/* The gradient of a residual stream stays in one block through all branches. */
Test(tape, residual_streams_share_their_gradient) {
    fattn_param p = {.name = "large"};
    const int64_t shape[] = {LARGE};
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F64, 1, shape, &p.value), FATTN_OK);
    cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F64, 1, shape, &p.grad), FATTN_OK);
    for (int i = 0; i < LARGE; ++i) ((double *)p.value.data)[i] = 1, ((double *)p.grad.data)[i] = 0;
    const fattn_var x = fattn_use(tape, &p);
    fattn_var y = mul(tape, x, x);
    for (int layer = 0; layer < 10; ++layer) y = fattn_op_add(tape, y, mul(tape, mul(tape, y, x), x));
    const fattn_var s = sum(tape, y);
    const size_t before = fattn_ctx_mem(ctx).live;
    backward(s);
    /* the stream's, one of the branch, and mul's workspace */
    cr_assert_leq(fattn_ctx_mem(ctx).live - before, 3 * LARGE * sizeof(double));
    for (int i = 0; i < LARGE; ++i) /* x^2 (1 + x^2)^10 at 1 */
        cr_assert_eq(((double *)p.grad.data)[i], 2 * 1024 + 10 * 2 * 512);
    fattn_tensor_free(ctx, &p.value);
    fattn_tensor_free(ctx, &p.grad);
}

Test(tape, every_allocation_may_fail) {
    leaf a;
    long n = 0;
    for (;; ++n) {
        const int64_t shape[] = {BIG};
        leaf_init(&a, 1, shape);
        fattn_tape_destroy(tape);
        tape = NULL;
        cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
        memory.left = n;
        fattn_status s = fattn_tape_create(ctx, &tape);
        if (s == FATTN_OK) {
            const fattn_var x = fattn_use(tape, &a.p);
            fattn_var y = x;
            for (int d = 0; d < 300; ++d) y = mul(tape, y, x);
            s = fattn_tape_backward(tape, sum(tape, y));
        }
        memory.left = -1;
        if (s == FATTN_OK) break;
        cr_assert_eq(s, FATTN_E_NOMEM, "allocation %ld: %s", n, fattn_status_name(s));
        if (!tape) continue;
        cr_assert_eq(fattn_tape_status(tape), FATTN_E_NOMEM);
        cr_assert(isfinite(step(&a, 5, 2)), "the next step works");
    }
    cr_assert_gt(n, 10);
    memory.left = 0; /* the arena cannot be consolidated: reset continues without it */
    fattn_tape_reset(tape);
    cr_assert_eq(sum(tape, fattn_use(tape, &a.p)).id, 0);
    cr_assert_eq(fattn_tape_status(tape), FATTN_E_NOMEM);
    memory.left = -1;
    cr_assert(isfinite(step(&a, 5, 2)));
}
