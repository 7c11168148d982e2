/* Heads [first, first + n) of x [B,S,C] as [B,n,S,head_dim]: a view, so neither values nor gradients
   are copied. Element [b,h,s,d] is x[b, s, (first + h) head_dim + d]. */
#include "autograd_c/ops/ops.h"

typedef struct heads {
    int64_t first, n, head_dim;
} heads;

static fattn_status infer(fattn_op_call *c) {
    const heads *a = c->attr;
    const fattn_tensor *x = &c->in[0];
    char text[96];
    if (fattni_absent(x)) return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "heads: x is absent");
    if (x->ndim != 3)
        return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "heads: x is %s, not [B,S,C]",
                              fattni_shape_text(x, text, sizeof text));
    if (a->first < 0 || a->n < 1 || a->head_dim < 1 || (a->first + a->n) * a->head_dim > x->shape[2])
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "heads: %lld heads of %lld from head %lld on do not lie in %s",
                              (long long)a->n, (long long)a->head_dim, (long long)a->first,
                              fattni_shape_text(x, text, sizeof text));
    const fattn_tensor part = fattn_tensor_slice(x, 2, a->first * a->head_dim, (a->first + a->n) * a->head_dim);
    c->out[0] = part;
    c->out[0].ndim = 4;
    const int64_t step = part.stride[2];
    const int64_t shape[] = {x->shape[0], a->n, x->shape[1], a->head_dim};
    const int64_t stride[] = {x->stride[0], step * a->head_dim, x->stride[1], step};
    for (int d = 0; d < 4; ++d) {
        c->out[0].shape[d] = shape[d];
        c->out[0].stride[d] = stride[d];
    }
    return FATTN_OK;
}

const fattn_op_def fattni_op_heads = {
    .struct_size = sizeof(fattn_op_def), .attr_size = sizeof(heads), .n_out = 1, .name = "heads", .infer = infer};

fattn_var fattn_op_heads(fattn_tape *t, fattn_var x, int first, int n, int head_dim) {
    return fattn_op_custom(t, &fattni_op_heads, &x, 1, &(heads){first, n, head_dim});
}
