/* A custom op: y = max(0, x)^2, with its gradient checked against finite differences.

   The built-in ops are defined the same way: infer sets the outputs' shapes, forward computes them, backward
   computes d_in from d_out. A second check, of a wrong gradient, must fail. */
#include <fattn/fattn.h>
#include <stdio.h>
#include <string.h>

typedef struct square_relu {
    double slope;
} square_relu; /* of the gradient: 2 is right */

static fattn_status infer(fattn_op_call *c) {
    const fattn_tensor *x = &c->in[0];
    if (x->dtype != FATTN_F64)
        return fattn_ctx_fail(c->ctx, FATTN_E_DTYPE, "square_relu: x is %s, not f64",
                              fattn_dtype_name((fattn_dtype)x->dtype));
    int64_t stride = 1;
    for (int d = x->ndim - 1; d >= 0; stride *= x->shape[d], --d)
        if (x->shape[d] > 1 && x->stride[d] != stride)
            return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "square_relu: x is not row-major");
    c->out[0].ndim = x->ndim;
    c->out[0].dtype = x->dtype;
    memcpy(c->out[0].shape, x->shape, sizeof x->shape);
    return FATTN_OK;
}

static fattn_status forward(fattn_op_call *c) {
    const double *x = c->in[0].data;
    double *y = c->out[0].data;
    for (int64_t i = 0, n = fattn_tensor_numel(&c->in[0]); i < n; ++i) y[i] = x[i] > 0 ? x[i] * x[i] : 0;
    return FATTN_OK;
}

static fattn_status backward(fattn_op_call *c) {
    const square_relu *op = c->attr;
    const double *x = c->in[0].data, *dy = c->d_out[0].data;
    double *dx = c->d_in[0].data;
    for (int64_t i = 0, n = fattn_tensor_numel(&c->in[0]); dx && i < n; ++i)
        dx[i] = (x[i] > 0 ? op->slope * x[i] * dy[i] : 0) + (c->d_in_fresh[0] ? 0 : dx[i]);
    return FATTN_OK;
}

static const fattn_op_def square_relu_def = {
    .struct_size = sizeof square_relu_def,
    .attr_size = sizeof(square_relu),
    .n_out = 1,
    .name = "square_relu",
    .infer = infer,
    .forward = forward,
    .backward = backward,
};

/* The graph to check: the op after a matrix product. */
static fattn_var graph(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)n_in;
    const fattn_var h = fattn_op_linear(t, in[0], in[1], (fattn_var){0});
    return fattn_op_custom(t, &square_relu_def, &h, 1, user);
}

static fattn_status check(fattn_ctx *ctx, const fattn_tensor *inputs, double slope) {
    square_relu op = {slope};
    fattn_report r = {.struct_size = sizeof r};
    const fattn_status s = fattn_gradcheck(ctx, graph, &op, inputs, 2, NULL, &r);
    printf("slope %.4f: %s, %lld coordinates, largest relative error %.2g\n", slope,
           s == FATTN_OK ? "passes" : fattn_status_name(s), (long long)r.checked, r.max_rel);
    return s;
}

int main(void) {
    fattn_ctx *ctx;
    if (fattn_ctx_create(NULL, &ctx) != FATTN_OK) return 1;
    double x_data[5 * 4], w_data[6 * 4];
    const fattn_tensor inputs[] = {fattn_tensor_view(x_data, FATTN_F64, FATTN_CPU, 0, 2, (int64_t[]){5, 4}),
                                   fattn_tensor_view(w_data, FATTN_F64, FATTN_CPU, 0, 2, (int64_t[]){6, 4})};
    int ok = 1;
    for (uint32_t i = 0; i < 2; ++i)
        ok = ok && !fattn_tensor_normal(ctx, &inputs[i], 0, 1, (fattn_rng){.seed = 1, .stream = i});
    ok = ok && check(ctx, inputs, 2) == FATTN_OK;
    ok = ok && check(ctx, inputs, 2.0001) == FATTN_E_MISMATCH;
    if (ok)
        printf("failed as expected: %s\n", fattn_ctx_error(ctx));
    else
        fprintf(stderr, "%s\n", fattn_ctx_error(ctx));
    fattn_ctx_destroy(ctx);
    return !ok;
}
