/* Inputs one after the other along a dimension, copied into one row-major tensor. Backward: each gets its part of
   dy. Saves nothing. */
#include "autograd_c/ops/ops.h"

#include <stdio.h>

static fattn_status infer(fattn_op_call *c) {
    const int32_t dim = *(const int32_t *)c->attr;
    const fattn_tensor *const first = &c->in[0];
    int64_t sum = 0;
    char name[16], text[96];
    if (c->n_in == 0) return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "concat: no inputs");
    for (int i = 0; i < c->n_in; ++i) {
        const fattn_tensor *const x = &c->in[i];
        snprintf(name, sizeof name, "x[%d]", i);
        if (fattni_absent(x)) return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "concat: %s is absent", name);
        if (x->dtype != first->dtype)
            return fattn_ctx_fail(c->ctx, FATTN_E_DTYPE, "concat: x[0] is %s, %s is %s",
                                  fattn_dtype_name((fattn_dtype)first->dtype), name,
                                  fattn_dtype_name((fattn_dtype)x->dtype));
        if (dim < 0 || dim >= first->ndim)
            return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "concat: x[0] is %s, without a dimension %d",
                                  fattni_shape_text(first, text, sizeof text), dim);
        bool fits = x->ndim == first->ndim;
        for (int d = 0; fits && d < x->ndim; ++d) fits = d == dim || x->shape[d] == first->shape[d];
        if (!fits) return fattni_misfit(c, "concat", "x[0]", 0, name, i, "only the joined dimension may differ");
        if (__builtin_add_overflow(sum, x->shape[dim], &sum))
            return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "concat: the joined dimension exceeds 2^63 - 1");
    }
    fattni_out_like(c, 0);
    c->out[0].shape[dim] = sum;
    return fattni_check_extents(c, "concat");
}

/* The part of y, or of its gradient, that is input i; *from: where it begins, which moves on to the next. */
static fattn_tensor part_of(const fattn_op_call *c, const fattn_tensor *y, int i, int64_t *from) {
    const int32_t dim = *(const int32_t *)c->attr;
    const int64_t begin = *from;
    *from += c->in[i].shape[dim];
    return fattn_tensor_slice(y, dim, begin, *from);
}

static fattn_status forward(fattn_op_call *c) {
    int64_t from = 0;
    for (int i = 0; i < c->n_in; ++i) {
        const fattn_tensor y = part_of(c, &c->out[0], i, &from);
        FATTNI_TRY(fattn_tensor_copy(c->ctx, &y, &c->in[i]));
    }
    return FATTN_OK;
}

static fattn_status backward(fattn_op_call *c) {
    int64_t from = 0;
    for (int i = 0; i < c->n_in; ++i) {
        const fattn_tensor dy = part_of(c, &c->d_out[0], i, &from);
        if (c->d_in[i].data) FATTNI_TRY(fattni_accumulate(c->ctx, &c->d_in[i], &dy, c->d_in_fresh[i]));
    }
    return FATTN_OK;
}

const fattn_op_def fattni_op_concat = {.struct_size = sizeof(fattn_op_def),
                                       .attr_size = sizeof(int32_t),
                                       .n_out = 1,
                                       .name = "concat",
                                       .infer = infer,
                                       .forward = forward,
                                       .backward = backward};

fattn_var fattn_op_concat(fattn_tape *t, const fattn_var *x, int n, int dim) {
    return fattn_op_custom(t, &fattni_op_concat, x, n, &(int32_t){dim});
}
