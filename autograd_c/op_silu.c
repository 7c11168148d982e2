/* silu(x) = x s, s = sigmoid(x). Backward: dx = dy s (1 + x (1 - s)). Saves nothing. */
#include "expf.h"
#include "piece_isa.h"

#include <math.h>

#define BODY "op_silu.inc"
#include "reals.inc"

static fattn_status infer(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_real(c, "silu", "x", 0));
    fattni_out_like(c, 0);
    FATTNI_TRY(fattni_check_extents(c, "silu"));
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
    FATTNI_TRY(fattni_check_gradients(c, "silu"));
    const fattn_tensor *const t[] = {&c->d_in[0], &c->in[0], &c->d_out[0]};
    if (!c->d_in[0].data) return FATTN_OK;
    const bool wide = c->out[0].dtype == FATTN_F64;
    const fattni_piece *const pieces = wide ? backward_f64_by_isa : backward_f32_by_isa;
    fattni_each(c->ctx, t, 3, pieces[c->ctx->isa], &c->d_in_fresh[0]);
    return FATTN_OK;
}

const fattn_op_def fattni_op_silu = {.struct_size = sizeof(fattn_op_def),
                                     .n_out = 1,
                                     .name = "silu",
                                     .infer = infer,
                                     .forward = forward,
                                     .backward = backward};

fattn_var fattn_op_silu(fattn_tape *t, fattn_var x) {
    return fattn_op_custom(t, &fattni_op_silu, &x, 1, NULL);
}
