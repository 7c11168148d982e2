/* Dimension d of y is dimension order[d] of x: a view. Elements that share an address, as those of an input with a
   stride of 0, are copied instead; such an x has no gradient. */
#include "autograd_c/ops/shape/part.h"

typedef struct permute {
    int32_t ndim; /* of order; 0: order[0] and order[1] change places */
    int32_t order[FATTN_MAX_DIMS];
} permute;

static fattn_status order_of(const fattn_op_call *c, int order[FATTN_MAX_DIMS]) {
    const permute *const a = c->attr;
    const fattn_tensor *const x = &c->in[0];
    char text[96];
    bool seen[FATTN_MAX_DIMS] = {false};
    if (a->ndim != x->ndim)
        return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "permute: x is %s, the order has %d dimensions",
                              fattni_shape_text(x, text, sizeof text), a->ndim);
    for (int d = 0; d < a->ndim; ++d) {
        const int from = order[d] = a->order[d];
        if (from < 0 || from >= a->ndim || seen[from])
            return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "permute: order[%d] is %d, %s", d, from,
                                  from < 0 || from >= a->ndim ? "no dimension of x" : "which is there twice");
        seen[from] = true;
    }
    return FATTN_OK;
}

static fattn_status infer_permute(fattn_op_call *c) {
    int order[FATTN_MAX_DIMS];
    if (fattni_absent(&c->in[0])) return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "permute: x is absent");
    FATTNI_TRY(order_of(c, order));
    const fattn_tensor y = fattn_tensor_permute(&c->in[0], order);
    return fattni_part_infer(c, &y);
}

static fattn_status forward_permute(fattn_op_call *c) {
    int order[FATTN_MAX_DIMS];
    FATTNI_TRY(order_of(c, order));
    const fattn_tensor y = fattn_tensor_permute(&c->in[0], order);
    return fattn_tensor_copy(c->ctx, &c->out[0], &y);
}

static fattn_tensor swapped(const fattn_op_call *c) {
    const permute *const a = c->attr;
    int order[FATTN_MAX_DIMS];
    for (int d = 0; d < c->in[0].ndim; ++d)
        order[d] = d == a->order[0] ? a->order[1] : d == a->order[1] ? a->order[0] : d;
    return fattn_tensor_permute(&c->in[0], order);
}

static fattn_status infer_transpose(fattn_op_call *c) {
    const permute *const a = c->attr;
    const fattn_tensor *const x = &c->in[0];
    char text[96];
    if (fattni_absent(x)) return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "transpose: x is absent");
    for (int i = 0; i < 2; ++i)
        if (a->order[i] < 0 || a->order[i] >= x->ndim)
            return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "transpose: x is %s, without a dimension %d",
                                  fattni_shape_text(x, text, sizeof text), a->order[i]);
    const fattn_tensor y = swapped(c);
    return fattni_part_infer(c, &y);
}

static fattn_status forward_transpose(fattn_op_call *c) {
    const fattn_tensor y = swapped(c);
    return fattn_tensor_copy(c->ctx, &c->out[0], &y);
}

const fattn_op_def fattni_op_permute = {.struct_size = sizeof(fattn_op_def),
                                        .attr_size = sizeof(permute),
                                        .n_out = 1,
                                        .flags = FATTN_OP_MAY_VIEW,
                                        .name = "permute",
                                        .infer = infer_permute,
                                        .forward = forward_permute,
                                        .backward = fattni_part_backward};
const fattn_op_def fattni_op_transpose = {.struct_size = sizeof(fattn_op_def),
                                          .attr_size = sizeof(permute),
                                          .n_out = 1,
                                          .flags = FATTN_OP_MAY_VIEW,
                                          .name = "transpose",
                                          .infer = infer_transpose,
                                          .forward = forward_transpose,
                                          .backward = fattni_part_backward};

fattn_var fattn_op_permute(fattn_tape *t, fattn_var x, int ndim, const int *order) {
    if (!t || t->status) return (fattn_var){0};
    permute a = {.ndim = ndim};
    fattn_status s = FATTN_OK;
    if (ndim < 0 || ndim > FATTN_MAX_DIMS || (ndim && !order))
        s = fattn_ctx_fail(t->ctx, FATTN_E_ARG, "permute: order is NULL, or %d dimensions are not 0..%d", ndim,
                           FATTN_MAX_DIMS);
    if (fattni_tape_fail(t, s)) return (fattn_var){0};
    for (int d = 0; d < ndim; ++d) a.order[d] = order[d];
    return fattn_op_custom(t, &fattni_op_permute, &x, 1, &a);
}

fattn_var fattn_op_transpose(fattn_tape *t, fattn_var x, int dim, int other) {
    return fattn_op_custom(t, &fattni_op_transpose, &x, 1, &(permute){.order = {dim, other}});
}
