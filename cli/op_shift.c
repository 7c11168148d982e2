#include "op_shift.h"

#include <string.h>

static fattn_status infer(fattn_op_call *c) {
    const fattn_tensor *x = &c->in[0];
    if (x->ndim != 3 || x->dtype != FATTN_F32)
        return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "shift: x has %d dimensions of %s, wants 3 of f32",
                              x->ndim, fattn_dtype_name((fattn_dtype)x->dtype));
    fattn_tensor *y = &c->out[0];
    y->ndim = x->ndim;
    y->dtype = x->dtype;
    memcpy(y->shape, x->shape, sizeof y->shape);
    return FATTN_OK;
}

/* Rows of sequence b: S * C numbers. */
static float *sequence(const fattn_tensor *t, int64_t b) {
    return (float *)t->data + b * t->stride[0];
}

static fattn_status forward(fattn_op_call *c) {
    const fattn_tensor *x = &c->in[0], *y = &c->out[0];
    const int64_t S = x->shape[1], C = x->shape[2];
    for (int64_t b = 0; b < x->shape[0] && S > 0; ++b) {
        memset(sequence(y, b), 0, (size_t)C * sizeof(float));
        memcpy(sequence(y, b) + C, sequence(x, b), (size_t)((S - 1) * C) * sizeof(float));
    }
    return FATTN_OK;
}

static fattn_status backward(fattn_op_call *c) {
    const fattn_tensor *dy = &c->d_out[0], *dx = &c->d_in[0];
    const int64_t S = dy->shape[1], C = dy->shape[2];
    for (int64_t b = 0; b < dy->shape[0] && S > 0; ++b) {
        float *to = sequence(dx, b);
        const float *from = sequence(dy, b) + C;
        if (c->d_in_fresh[0]) memset(to, 0, (size_t)(S * C) * sizeof(float));
        for (int64_t n = 0; n < (S - 1) * C; ++n) to[n] += from[n];
    }
    return FATTN_OK;
}

static const fattn_op_def shift = {
    .struct_size = sizeof shift,
    .n_out = 1,
    .name = "shift",
    .infer = infer,
    .forward = forward,
    .backward = backward,
};

fattn_var op_shift(fattn_tape *t, fattn_var x) { return fattn_op_custom(t, &shift, &x, 1, NULL); }
