/* The elements of x, in row-major order, in another shape: a view where strides can express it, as for every
   row-major x and for every split of a dimension, else a copy, whose gradient is copied back. */
#include "autograd_c/ops/ops.h"
#include "autograd_c/tape/tape_nodes.h"

#include <string.h>

typedef struct reshape {
    int64_t shape[FATTN_MAX_DIMS];
    int32_t ndim, reserved;
} reshape;

/* Strides of y over x's elements; false: there are none. Dimensions of x that one stride walks form a run, which
   dimensions of y must split evenly. Both have the same number of elements, not 0. */
static bool take_strides(fattn_tensor *y, const fattn_tensor *x) {
    int64_t shape[FATTN_MAX_DIMS], stride[FATTN_MAX_DIMS]; /* of the runs */
    int runs = 0, d = 0;
    for (int k = 0; k < x->ndim; ++k) {
        if (x->shape[k] == 1) continue;
        if (runs > 0 && stride[runs - 1] == x->shape[k] * x->stride[k])
            shape[runs - 1] *= x->shape[k];
        else
            shape[runs++] = x->shape[k];
        stride[runs - 1] = x->stride[k];
    }
    for (int r = 0; r < runs; ++r) {
        int64_t rest = shape[r];
        for (; d < y->ndim && rest > 1 && rest % y->shape[d] == 0; ++d) {
            rest /= y->shape[d];
            y->stride[d] = rest * stride[r];
        }
        if (rest > 1) return false;
    }
    for (; d < y->ndim; ++d) y->stride[d] = 1; /* of one element */
    return true;
}

/* Puts the number of elements that are left in the place of a -1. */
static fattn_status take_shape(const fattn_op_call *c, fattn_tensor *y) {
    const reshape *const a = c->attr;
    const fattn_tensor *const x = &c->in[0];
    const int64_t count = fattn_tensor_numel(x);
    char from[96], to[96];
    int open = -1;
    y->ndim = a->ndim;
    for (int d = 0; d < a->ndim; ++d) {
        y->shape[d] = a->shape[d];
        if (a->shape[d] >= 0) continue;
        if (a->shape[d] != -1 || open >= 0)
            return fattn_ctx_fail(c->ctx, FATTN_E_ARG,
                                  "reshape: dimension %d is %lld; one may be -1, the rest 0 or more", d,
                                  (long long)a->shape[d]);
        y->shape[open = d] = 1;
    }
    const int64_t known = fattn_tensor_numel(y);
    if (open >= 0 && known > 0 && count % known == 0) y->shape[open] = count / known;
    if (fattn_tensor_numel(y) == count && (open < 0 || known > 0)) return FATTN_OK;
    if (open >= 0) y->shape[open] = -1;
    return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "reshape: x is %s, of %lld elements, which %s cannot hold",
                          fattni_shape_text(x, from, sizeof from), (long long)count,
                          fattni_shape_text(y, to, sizeof to));
}

static fattn_status infer(fattn_op_call *c) {
    const fattn_tensor *const x = &c->in[0];
    fattn_tensor *const y = &c->out[0], view = *y;
    if (fattni_absent(x)) return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "reshape: x is absent");
    y->dtype = x->dtype;
    FATTNI_TRY(take_shape(c, y));
    if (fattn_tensor_numel(x) == 0 || fattni_elements_overlap(x)) return FATTN_OK;
    view = *y;
    view.data = x->data;
    if (take_strides(&view, x)) *y = view;
    return FATTN_OK;
}

/* y, which is row-major, in x's shape. */
static fattn_tensor as_x(const fattn_op_call *c, const fattn_tensor *y) {
    fattn_tensor t = fattni_row_major(&c->in[0], y->data);
    t.dtype = y->dtype;
    return t;
}

static fattn_status forward(fattn_op_call *c) {
    const fattn_tensor y = as_x(c, &c->out[0]);
    return fattn_tensor_copy(c->ctx, &y, &c->in[0]);
}

static fattn_status backward(fattn_op_call *c) {
    const fattn_tensor dy = as_x(c, &c->d_out[0]);
    return c->d_in[0].data ? fattni_accumulate(c->ctx, &c->d_in[0], &dy, c->d_in_fresh[0]) : FATTN_OK;
}

const fattn_op_def fattni_op_reshape = {.struct_size = sizeof(fattn_op_def),
                                        .attr_size = sizeof(reshape),
                                        .n_out = 1,
                                        .flags = FATTN_OP_MAY_VIEW,
                                        .name = "reshape",
                                        .infer = infer,
                                        .forward = forward,
                                        .backward = backward};

fattn_var fattn_op_reshape(fattn_tape *t, fattn_var x, int ndim, const int64_t *shape) {
    if (!t || t->status) return (fattn_var){0};
    reshape a = {.ndim = ndim};
    fattn_status s = FATTN_OK;
    if (ndim < 0 || ndim > FATTN_MAX_DIMS || (ndim && !shape))
        s = fattn_ctx_fail(t->ctx, FATTN_E_ARG, "reshape: shape is NULL, or %d dimensions are not 0..%d", ndim,
                           FATTN_MAX_DIMS);
    if (fattni_tape_fail(t, s)) return (fattn_var){0};
    if (ndim) memcpy(a.shape, shape, (size_t)ndim * sizeof *shape);
    return fattn_op_custom(t, &fattni_op_reshape, &x, 1, &a);
}
