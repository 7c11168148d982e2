#include "cli/train/op_shift.h"

#include <stdbool.h>
#include <string.h>

typedef struct attribute {
    fattn_tensor carried; /* ndim 0: none */
} attribute;

static fattn_status infer(fattn_op_call *c) {
    const fattn_tensor *x = &c->in[0];
    if (x->ndim != 3)
        return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "shift: x has %d dimensions, must have 3: [B,S,C]", x->ndim);
    fattn_tensor *y = &c->out[0];
    y->ndim = x->ndim;
    y->dtype = x->dtype;
    memcpy(y->shape, x->shape, sizeof y->shape);
    return FATTN_OK;
}

/* Rows begin..end-1 of every sequence. */
static fattn_tensor rows(const fattn_tensor *t, int64_t begin, int64_t end) {
    return fattn_tensor_slice(t, 1, begin, end);
}

static fattn_status zero(fattn_ctx *ctx, const fattn_tensor *t) {
    return fattn_tensor_normal(ctx, t, 0, 0, (fattn_rng){0});
}

static fattn_status forward(fattn_op_call *c) {
    const attribute *const a = c->attr;
    const int64_t S = c->in[0].shape[1];
    const fattn_tensor first = rows(&c->out[0], 0, 1), rest = rows(&c->out[0], 1, S);
    const fattn_tensor before = rows(&c->in[0], 0, S - 1), last = rows(&c->in[0], S - 1, S);
    const bool carries = a->carried.ndim > 0;
    fattn_status s = carries ? fattn_tensor_copy(c->ctx, &first, &a->carried) : zero(c->ctx, &first);
    if (!s && carries) s = fattn_tensor_copy(c->ctx, &a->carried, &last);
    return s ? s : fattn_tensor_copy(c->ctx, &rest, &before);
}

static fattn_status backward(fattn_op_call *c) {
    if (!c->d_in[0].data) return FATTN_OK;
    const int64_t S = c->d_out[0].shape[1];
    const fattn_tensor rest = rows(&c->d_out[0], 1, S), before = rows(&c->d_in[0], 0, S - 1);
    const fattn_tensor last = rows(&c->d_in[0], S - 1, S);
    if (!c->d_in_fresh[0]) return fattn_tensor_add(c->ctx, &before, &rest);
    const fattn_status s = zero(c->ctx, &last);
    return s ? s : fattn_tensor_copy(c->ctx, &before, &rest);
}

static const fattn_op_def shift = {
    .struct_size = sizeof shift,
    .attr_size = sizeof(attribute),
    .n_out = 1,
    .name = "shift",
    .infer = infer,
    .forward = forward,
    .backward = backward,
};

fattn_var op_shift(fattn_tape *t, fattn_var x, const fattn_tensor *carried) {
    const attribute a = {.carried = carried ? *carried : (fattn_tensor){0}};
    return fattn_op_custom(t, &shift, &x, 1, &a);
}
