/* [B,H,S,D] -> [B,S,H*D]: element [b, s, h D + d] is x[b,h,s,d]. A view where x lies as [B,S,H,D] in
   memory, as attention leaves its output and heads finds its input; else a copy, whose gradient is
   copied back. */
#include "autograd_c/ops/ops.h"

static fattn_tensor by_row(const fattn_tensor *x) { return fattn_tensor_permute(x, (const int[]){0, 2, 1, 3}); }

/* y [B,S,H*D], row-major, as [B,S,H,D]. */
static fattn_tensor split(const fattn_tensor *y, const fattn_tensor *x) {
    return fattn_tensor_view(y->data, (fattn_dtype)y->dtype, (fattn_device)y->device, y->device_id, 4,
                             (const int64_t[]){x->shape[0], x->shape[2], x->shape[1], x->shape[3]});
}

static fattn_status infer(fattn_op_call *c) {
    const fattn_tensor *x = &c->in[0];
    fattn_tensor *y = &c->out[0];
    char text[96];
    if (fattni_absent(x)) return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "merge: x is absent");
    if (x->ndim != 4)
        return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "merge: x is %s, not [B,H,S,D]",
                              fattni_shape_text(x, text, sizeof text));
    FATTNI_TRY(fattni_check_extents(c, "merge"));
    const int64_t B = x->shape[0], H = x->shape[1], S = x->shape[2], D = x->shape[3];
    y->ndim = 3;
    y->dtype = x->dtype;
    y->shape[0] = B, y->shape[1] = S, y->shape[2] = H * D;
    const int64_t step = D > 1 ? x->stride[3] : x->stride[1];
    const bool joins = H <= 1 || D <= 1 || x->stride[1] == D * x->stride[3];
    /* Strides 0 everywhere mean row-major to the tape: a single element is copied. */
    const bool moves = (B == 1 || x->stride[0] > 0) && (S == 1 || x->stride[2] > 0) && step > 0;
    if (!joins || !moves || !x->data) return FATTN_OK;
    y->stride[0] = x->stride[0], y->stride[1] = x->stride[2], y->stride[2] = step;
    y->data = x->data;
    return FATTN_OK;
}

static fattn_status forward(fattn_op_call *c) {
    const fattn_tensor x = by_row(&c->in[0]), y = split(&c->out[0], &c->in[0]);
    return fattn_tensor_copy(c->ctx, &y, &x);
}

static fattn_status backward(fattn_op_call *c) {
    const fattn_tensor dx = by_row(&c->d_in[0]), dy = split(&c->d_out[0], &c->in[0]);
    return dx.data ? fattni_accumulate(c->ctx, &dx, &dy, c->d_in_fresh[0]) : FATTN_OK;
}

const fattn_op_def fattni_op_merge = {.struct_size = sizeof(fattn_op_def),
                                      .n_out = 1,
                                      .flags = FATTN_OP_MAY_VIEW,
                                      .name = "merge",
                                      .infer = infer,
                                      .forward = forward,
                                      .backward = backward};

fattn_var fattn_op_merge(fattn_tape *t, fattn_var x) { return fattn_op_custom(t, &fattni_op_merge, &x, 1, NULL); }
