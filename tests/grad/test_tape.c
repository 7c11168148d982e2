/* The tape itself, with ops of a few lines: order, views, aliases, memory, errors. */
#include <criterion/criterion.h>
#include <fattn/fattn.h>

#include <stdlib.h>
#include <string.h>

/* y = a*b, same shape, any strides. */
static int64_t offset_of(const fattn_tensor *t, int64_t element) {
    int64_t offset = 0;
    for (int d = t->ndim - 1; d >= 0; --d) {
        offset += element % t->shape[d] * t->stride[d];
        element /= t->shape[d];
    }
    return offset;
}
static double *at(const fattn_tensor *t, int64_t element) {
    return (double *)t->data + offset_of(t, element);
}

static fattn_status mul_infer(fattn_op_call *c) {
    c->out[0] = c->in[0];
    c->out[0].data = NULL;
    memset(c->out[0].stride, 0, sizeof c->out[0].stride);
    c->saved_bytes = 8;
    c->fwd_workspace = 100, c->bwd_workspace = 1000;
    return FATTN_OK;
}
static fattn_status mul_forward(fattn_op_call *c) {
    const int64_t n = fattn_tensor_numel(&c->out[0]);
    memset(c->workspace, 0xff, c->fwd_workspace);
    *(int64_t *)c->saved = n;
    for (int64_t e = 0; e < n; ++e) *at(&c->out[0], e) = *at(&c->in[0], e) * *at(&c->in[1], e);
    return FATTN_OK;
}
/* The gradient of b first, to show that order does not matter. */
static fattn_status mul_backward(fattn_op_call *c) {
    const int64_t n = *(int64_t *)c->saved;
    memset(c->workspace, 0xff, c->bwd_workspace);
    for (int i = 1; i >= 0; --i)
        for (int64_t e = 0; e < n && c->d_in[i].data; ++e) {
            const double d = *at(&c->d_out[0], e) * *at(&c->in[1 - i], e);
            *at(&c->d_in[i], e) = d + (c->d_in_fresh[i] ? 0 : *at(&c->d_in[i], e));
        }
    return FATTN_OK;
}
static const fattn_op_def mul_def = {.struct_size = sizeof mul_def,
                                     .n_out = 1,
                                     .name = "mul",
                                     .infer = mul_infer,
                                     .forward = mul_forward,
                                     .backward = mul_backward};
static fattn_var mul(fattn_tape *t, fattn_var a, fattn_var b) {
    return fattn_op_custom(t, &mul_def, (fattn_var[]){a, b}, 2, NULL);
}

static fattn_status sum_infer(fattn_op_call *c) {
    c->out[0].dtype = FATTN_F64;
    return FATTN_OK;
}
static fattn_status sum_forward(fattn_op_call *c) {
    double sum = 0;
    for (int64_t e = 0; e < fattn_tensor_numel(&c->in[0]); ++e) sum += *at(&c->in[0], e);
    *(double *)c->out[0].data = sum;
    return FATTN_OK;
}
static fattn_status sum_backward(fattn_op_call *c) {
    const double d = *(const double *)c->d_out[0].data;
    for (int64_t e = 0; e < fattn_tensor_numel(&c->in[0]); ++e)
        *at(&c->d_in[0], e) = d + (c->d_in_fresh[0] ? 0 : *at(&c->d_in[0], e));
    return FATTN_OK;
}
static const fattn_op_def sum_def = {.struct_size = sizeof sum_def,
                                     .n_out = 1,
                                     .name = "sum",
                                     .infer = sum_infer,
                                     .forward = sum_forward,
                                     .backward = sum_backward};
static fattn_var sum(fattn_tape *t, fattn_var x) {
    return fattn_op_custom(t, &sum_def, &x, 1, NULL);
}

/* Columns [begin, end) of a matrix, a view. */
typedef struct range {
    int64_t dim, begin, end;
} range;
static fattn_status slice_infer(fattn_op_call *c) {
    const range *r = c->attr;
    c->out[0] = fattn_tensor_slice(&c->in[0], (int)r->dim, r->begin, r->end);
    return FATTN_OK;
}
static const fattn_op_def slice_def = {.struct_size = sizeof slice_def,
                                       .attr_size = sizeof(range),
                                       .n_out = 1,
                                       .name = "slice",
                                       .infer = slice_infer};
static fattn_var slice(fattn_tape *t, fattn_var x, int64_t dim, int64_t begin, int64_t end) {
    const range r = {dim, begin, end};
    return fattn_op_custom(t, &slice_def, &x, 1, &r);
}

typedef struct leaf {
    double value[12], grad[12];
    fattn_param p;
} leaf;
static void make_leaf(leaf *l, int64_t rows, int64_t columns) {
    for (int i = 0; i < 12; ++i) l->value[i] = 1 + 0.5 * i, l->grad[i] = 0;
    const int64_t shape[] = {rows, columns};
    l->p = (fattn_param){
        .value = fattn_tensor_view(l->value, FATTN_F64, FATTN_CPU, 0, 2, shape),
        .grad = fattn_tensor_view(l->grad, FATTN_F64, FATTN_CPU, 0, 2, shape),
        .name = "leaf",
    };
}

static fattn_ctx *ctx;
static fattn_tape *tape;
static void open_tape(void) {
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_tape_create(ctx, &tape), FATTN_OK);
}
static void close_tape(void) {
    fattn_tape_destroy(tape);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0, "%zu bytes leaked", fattn_ctx_mem(ctx).live);
    fattn_ctx_destroy(ctx);
}
TestSuite(tape, .init = open_tape, .fini = close_tape);

Test(tape, value_item_and_gradient) {
    leaf a, b;
    make_leaf(&a, 3, 4);
    make_leaf(&b, 3, 4);
    b.grad[5] = 100; /* gradients are added */
    const fattn_var x = fattn_use(tape, &a.p), y = fattn_use(tape, &b.p),
                    s = sum(tape, mul(tape, x, y));
    double want = 0, got = 0;
    for (int i = 0; i < 12; ++i) want += a.value[i] * b.value[i];
    cr_assert_eq(fattn_tape_item(tape, s, &got), FATTN_OK);
    cr_assert_float_eq(got, want, 1e-12);
    cr_assert_eq(fattn_tape_backward(tape, s), FATTN_OK, "%s", fattn_ctx_error(ctx));
    for (int i = 0; i < 12; ++i) {
        cr_assert_eq(a.grad[i], b.value[i]);
        cr_assert_eq(b.grad[i], a.value[i] + (i == 5 ? 100 : 0));
    }
}

Test(tape, one_variable_twice_in_a_call) {
    leaf a;
    make_leaf(&a, 3, 4);
    const fattn_var x = fattn_use(tape, &a.p), square = mul(tape, x, x);
    const fattn_var s = sum(tape, mul(tape, square, square));
    cr_assert_eq(fattn_tape_backward(tape, s), FATTN_OK, "%s", fattn_ctx_error(ctx));
    for (int i = 0; i < 12; ++i)
        cr_assert_float_eq(a.grad[i], 4 * a.value[i] * a.value[i] * a.value[i], 1e-12);
}

Test(tape, views_write_into_the_gradient_of_their_base) {
    leaf a, b;
    make_leaf(&a, 3, 4);
    make_leaf(&b, 3, 4);
    const fattn_var x = mul(tape, fattn_use(tape, &a.p), fattn_use(tape, &b.p));
    const fattn_var left = slice(tape, x, 1, 0, 1), right = slice(tape, x, 1, 2, 3);
    const fattn_var s = sum(tape, mul(tape, left, right));
    cr_assert_eq(fattn_tape_keep_grad(tape, right), FATTN_OK);
    cr_assert_eq(fattn_tape_backward(tape, s), FATTN_OK, "%s", fattn_ctx_error(ctx));
    fattn_tensor dx, dright;
    cr_assert_eq(fattn_tape_grad(tape, x, &dx), FATTN_OK);
    cr_assert_eq(fattn_tape_grad(tape, right, &dright), FATTN_OK);
    cr_assert_eq(dright.data, (double *)dx.data + 2);
    for (int i = 0; i < 3; ++i) {
        const double l = a.value[4 * i] * b.value[4 * i],
                     r = a.value[4 * i + 2] * b.value[4 * i + 2];
        const double want[4] = {r, 0, l, 0};
        for (int j = 0; j < 4; ++j) {
            cr_assert_eq(*at(&dx, 4 * i + j), want[j]);
            cr_assert_eq(a.grad[4 * i + j], want[j] * b.value[4 * i + j]);
        }
    }
}
