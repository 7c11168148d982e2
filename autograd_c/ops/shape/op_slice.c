/* Elements begin..end-1 along a dimension: a view, so that slices which tile x write its gradient without a copy.
   Elements that share an address are copied, as by permute. */
#include "autograd_c/ops/shape/part.h"

typedef struct range {
    int64_t begin, end;
    int32_t dim, reserved;
} range;

static fattn_tensor part_of(const fattn_op_call *c) {
    const range *const a = c->attr;
    return fattn_tensor_slice(&c->in[0], a->dim, a->begin, a->end);
}

static fattn_status infer(fattn_op_call *c) {
    const range *const a = c->attr;
    const fattn_tensor *const x = &c->in[0];
    char text[96];
    if (fattni_absent(x)) return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "slice: x is absent");
    if (a->dim < 0 || a->dim >= x->ndim)
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "slice: x is %s, without a dimension %d",
                              fattni_shape_text(x, text, sizeof text), a->dim);
    if (a->begin < 0 || a->end < a->begin || a->end > x->shape[a->dim])
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "slice: %lld..%lld does not lie in dimension %d of %s",
                              (long long)a->begin, (long long)a->end, a->dim, fattni_shape_text(x, text, sizeof text));
    const fattn_tensor y = part_of(c);
    return fattni_part_infer(c, &y);
}

static fattn_status forward(fattn_op_call *c) {
    const fattn_tensor y = part_of(c);
    return fattn_tensor_copy(c->ctx, &c->out[0], &y);
}

const fattn_op_def fattni_op_slice = {.struct_size = sizeof(fattn_op_def),
                                      .attr_size = sizeof(range),
                                      .n_out = 1,
                                      .flags = FATTN_OP_MAY_VIEW,
                                      .name = "slice",
                                      .infer = infer,
                                      .forward = forward,
                                      .backward = fattni_part_backward};

fattn_var fattn_op_slice(fattn_tape *t, fattn_var x, int dim, int64_t begin, int64_t end) {
    return fattn_op_custom(t, &fattni_op_slice, &x, 1, &(range){.begin = begin, .end = end, .dim = dim});
}
