/* gelu(x) = x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3), computed as x s with
   s = sigmoid(2u) = (1 + tanh u)/2. Backward: dx = dy (s + x s (1 - s) 2u'). Saves nothing. */
#include "expf.h"
#include "piece_isa.h"

#include <math.h>

#define BODY "op_gelu.inc"
#include "reals.inc"

static fattn_status infer(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_real(c, "gelu", "x", 0));
    fattni_out_like(c, 0);
    FATTNI_TRY(fattni_check_extents(c, "gelu"));
    return FATTN_OK;
}

static fattn_status forward(fattn_op_call *c) {
    const fattn_tensor *const t[] = {&c->out[0], &c->in[0]};
    const bool wide = c->out[0].dtype == FATTN_F64;
    const fattni_piece *const pieces = wide ? forward_f64_by_isa : forward_f32_by_isa;
    fattni_each(c->ctx, t, 2, pieces[c->ctx->isa], NULL);
    return FATTN_OK;
}

static fattn_status backward(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_gradients(c, "gelu"));
    const fattn_tensor *const t[] = {&c->d_in[0], &c->in[0], &c->d_out[0]};
    if (!c->d_in[0].data) return FATTN_OK;
    const bool wide = c->out[0].dtype == FATTN_F64;
    const fattni_piece *const pieces = wide ? backward_f64_by_isa : backward_f32_by_isa;
    fattni_each(c->ctx, t, 3, pieces[c->ctx->isa], &c->d_in_fresh[0]);
    return FATTN_OK;
}

const fattn_op_def fattni_op_gelu = {.struct_size = sizeof(fattn_op_def),
                                     .n_out = 1,
                                     .name = "gelu",
                                     .infer = infer,
                                     .forward = forward,
                                     .backward = backward};

fattn_var fattn_op_gelu(fattn_tape *t, fattn_var x) {
    return fattn_op_custom(t, &fattni_op_gelu, &x, 1, NULL);
}
