#include "tape_ops.h"

#include <criterion/criterion.h>

#include <string.h>

int mul_backward_calls;
uint8_t mul_fresh[2];

double *element(const fattn_tensor *t, int64_t e) {
    int64_t offset = 0;
    for (int d = t->ndim - 1; d >= 0; --d) {
        offset += e % t->shape[d] * t->stride[d];
        e /= t->shape[d];
    }
    return (double *)t->data + offset;
}

static void put(const fattn_op_call *c, int input, int64_t e, double gradient) {
    double *to = element(&c->d_in[input], e);
    *to = gradient + (c->d_in_fresh[input] ? 0 : *to);
}

enum { SAVED_BYTES = 40, FWD_WORKSPACE = 100, BWD_WORKSPACE = 1000 };

static fattn_status mul_infer(fattn_op_call *c) {
    c->out[0].ndim = c->in[0].ndim;
    c->out[0].dtype = FATTN_F64;
    memcpy(c->out[0].shape, c->in[0].shape, sizeof c->out[0].shape);
    c->saved_bytes = SAVED_BYTES;
    c->fwd_workspace = FWD_WORKSPACE;
    c->bwd_workspace = BWD_WORKSPACE;
    return FATTN_OK;
}

static fattn_status mul_forward(fattn_op_call *c) {
    const int64_t n = fattn_tensor_numel(&c->out[0]);
    memset(c->workspace, 0xff, FWD_WORKSPACE);
    memset(c->saved, (int)(n % 251), SAVED_BYTES);
    for (int64_t e = 0; e < n; ++e) *element(&c->out[0], e) = *element(&c->in[0], e) * *element(&c->in[1], e);
    return FATTN_OK;
}

static fattn_status mul_backward(fattn_op_call *c) {
    const int64_t n = fattn_tensor_numel(&c->out[0]);
    for (int i = 0; i < SAVED_BYTES; ++i)
        cr_assert_eq(((unsigned char *)c->saved)[i], n % 251, "saved memory was overwritten");
    memset(c->workspace, 0xff, BWD_WORKSPACE);
    memset(c->saved, 0xff, SAVED_BYTES);
    memcpy(mul_fresh, c->d_in_fresh, 2);
    ++mul_backward_calls;
    if (c->d_in[0].data) cr_assert_neq(c->d_in[0].data, c->d_in[1].data, "gradients share memory");
    for (int i = 1; i >= 0; --i)
        for (int64_t e = 0; e < n && c->d_in[i].data; ++e)
            put(c, i, e, *element(&c->d_out[0], e) * *element(&c->in[1 - i], e));
    return FATTN_OK;
}

fattn_var mul(fattn_tape *t, fattn_var a, fattn_var b) {
    static const fattn_op_def def = {.struct_size = sizeof def,
                                     .n_out = 1,
                                     .name = "mul",
                                     .infer = mul_infer,
                                     .forward = mul_forward,
                                     .backward = mul_backward};
    return fattn_op_custom(t, &def, (fattn_var[]){a, b}, 2, NULL);
}

static fattn_status add_infer(fattn_op_call *c) {
    c->out[0].ndim = c->in[0].ndim;
    c->out[0].dtype = FATTN_F64;
    memcpy(c->out[0].shape, c->in[0].shape, sizeof c->out[0].shape);
    return FATTN_OK;
}

static fattn_status add_forward(fattn_op_call *c) {
    for (int64_t e = 0; e < fattn_tensor_numel(&c->out[0]); ++e)
        *element(&c->out[0], e) = *element(&c->in[0], e) + *element(&c->in[1], e);
    return FATTN_OK;
}

static fattn_status add_backward(fattn_op_call *c) {
    for (int i = 0; i < 2; ++i)
        for (int64_t e = 0; e < fattn_tensor_numel(&c->out[0]) && c->d_in[i].data; ++e)
            put(c, i, e, *element(&c->d_out[0], e));
    return FATTN_OK;
}

fattn_var add(fattn_tape *t, fattn_var a, fattn_var b) {
    static const fattn_op_def def = {.struct_size = sizeof def,
                                     .n_out = 1,
                                     .name = "add",
                                     .infer = add_infer,
                                     .forward = add_forward,
                                     .backward = add_backward};
    return fattn_op_custom(t, &def, (fattn_var[]){a, b}, 2, NULL);
}

static fattn_status sum_infer(fattn_op_call *c) {
    c->out[0].dtype = FATTN_F64;
    return FATTN_OK;
}

static fattn_status sum_forward(fattn_op_call *c) {
    double total = 0;
    for (int64_t e = 0; e < fattn_tensor_numel(&c->in[0]); ++e) total += *element(&c->in[0], e);
    *(double *)c->out[0].data = total;
    return FATTN_OK;
}

static fattn_status sum_backward(fattn_op_call *c) {
    const double d = *(const double *)c->d_out[0].data;
    for (int64_t e = 0; e < fattn_tensor_numel(&c->in[0]) && c->d_in[0].data; ++e) put(c, 0, e, d);
    return FATTN_OK;
}

fattn_var sum(fattn_tape *t, fattn_var x) {
    static const fattn_op_def def = {.struct_size = sizeof def,
                                     .n_out = 1,
                                     .name = "sum",
                                     .infer = sum_infer,
                                     .forward = sum_forward,
                                     .backward = sum_backward};
    return fattn_op_custom(t, &def, &x, 1, NULL);
}

static fattn_status join_infer(fattn_op_call *c) {
    c->out[0].ndim = 1;
    c->out[0].dtype = FATTN_F64;
    c->out[0].shape[0] = fattn_tensor_numel(&c->in[0]) + fattn_tensor_numel(&c->in[1]);
    return FATTN_OK;
}

static fattn_status join_forward(fattn_op_call *c) {
    const int64_t n = fattn_tensor_numel(&c->in[0]);
    for (int64_t e = 0; e < c->out[0].shape[0]; ++e)
        *element(&c->out[0], e) = e < n ? *element(&c->in[0], e) : *element(&c->in[1], e - n);
    return FATTN_OK;
}

static fattn_status join_backward(fattn_op_call *c) {
    const int64_t n = fattn_tensor_numel(&c->in[0]);
    for (int64_t e = 0; e < c->out[0].shape[0]; ++e) {
        const int input = e >= n;
        if (c->d_in[input].data) put(c, input, input ? e - n : e, *element(&c->d_out[0], e));
    }
    return FATTN_OK;
}

fattn_var join(fattn_tape *t, fattn_var a, fattn_var b) {
    static const fattn_op_def def = {.struct_size = sizeof def,
                                     .n_out = 1,
                                     .name = "join",
                                     .infer = join_infer,
                                     .forward = join_forward,
                                     .backward = join_backward};
    return fattn_op_custom(t, &def, (fattn_var[]){a, b}, 2, NULL);
}

typedef struct range {
    int64_t dim, begin, end;
} range;

static fattn_status slice_infer(fattn_op_call *c) {
    const range *r = c->attr;
    c->out[0] = fattn_tensor_slice(&c->in[0], (int)r->dim, r->begin, r->end);
    return FATTN_OK;
}

fattn_var slice(fattn_tape *t, fattn_var x, int64_t dim, int64_t begin, int64_t end) {
    static const fattn_op_def def = {
        .struct_size = sizeof def, .attr_size = sizeof(range), .n_out = 1, .name = "slice", .infer = slice_infer};
    const range r = {dim, begin, end};
    return fattn_op_custom(t, &def, &x, 1, &r);
}

typedef struct stride {
    int64_t dim, step;
} stride;

static fattn_status every_infer(fattn_op_call *c) {
    const stride *s = c->attr;
    c->out[0] = c->in[0];
    c->out[0].shape[s->dim] = (c->in[0].shape[s->dim] + s->step - 1) / s->step;
    c->out[0].stride[s->dim] *= s->step;
    return FATTN_OK;
}

fattn_var every(fattn_tape *t, fattn_var x, int64_t dim, int64_t step) {
    static const fattn_op_def def = {
        .struct_size = sizeof def, .attr_size = sizeof(stride), .n_out = 1, .name = "every", .infer = every_infer};
    const stride s = {dim, step};
    return fattn_op_custom(t, &def, &x, 1, &s);
}

static fattn_status reverse_infer(fattn_op_call *c) {
    const int64_t d = *(const int64_t *)c->attr;
    fattn_tensor *const y = &c->out[0];
    *y = c->in[0];
    y->data = (double *)y->data + (y->shape[d] - 1) * y->stride[d];
    y->stride[d] = -y->stride[d];
    return FATTN_OK;
}

fattn_var reverse(fattn_tape *t, fattn_var x, int64_t dim) {
    static const fattn_op_def def = {
        .struct_size = sizeof def, .attr_size = sizeof dim, .n_out = 1, .name = "reverse", .infer = reverse_infer};
    return fattn_op_custom(t, &def, &x, 1, &dim);
}

static fattn_status transpose_infer(fattn_op_call *c) {
    int order[FATTN_MAX_DIMS];
    for (int d = 0; d < c->in[0].ndim; ++d) order[d] = c->in[0].ndim - 1 - d;
    c->out[0] = fattn_tensor_permute(&c->in[0], order);
    return FATTN_OK;
}

fattn_var transpose(fattn_tape *t, fattn_var x) {
    static const fattn_op_def def = {
        .struct_size = sizeof def, .n_out = 1, .name = "transpose", .infer = transpose_infer};
    return fattn_op_custom(t, &def, &x, 1, NULL);
}

void leaf_init(leaf *l, int ndim, const int64_t *shape) {
    for (int i = 0; i < 60; ++i) l->value[i] = 1 + 0.5 * i, l->grad[i] = 0;
    l->p = (fattn_param){
        .value = fattn_tensor_view(l->value, FATTN_F64, FATTN_CPU, 0, ndim, shape),
        .grad = fattn_tensor_view(l->grad, FATTN_F64, FATTN_CPU, 0, ndim, shape),
        .name = "leaf",
    };
    cr_assert_leq(fattn_tensor_numel(&l->p.value), 60);
}
