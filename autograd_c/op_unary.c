/* What the ops of one variable share: checks, and the choice of the loop. */
#include "op_unary.h"

fattn_status fattni_unary_infer(fattn_op_call *c, const fattni_unary *f) {
    FATTNI_TRY(fattni_check_real(c, f->name, "x", 0));
    fattni_out_like(c, 0);
    return fattni_check_extents(c, f->name);
}

fattn_status fattni_unary_forward(fattn_op_call *c, const fattni_unary *f) {
    const fattn_tensor *const t[] = {&c->out[0], &c->in[0]};
    const fattni_piece *const by_isa =
        c->out[0].dtype == FATTN_F64 ? f->forward_f64 : f->forward_f32;
    fattni_each(c->ctx, t, 2, by_isa[c->ctx->isa], NULL);
    return FATTN_OK;
}

fattn_status fattni_unary_backward(fattn_op_call *c, const fattni_unary *f) {
    FATTNI_TRY(fattni_check_gradients(c, f->name));
    if (!c->d_in[0].data) return FATTN_OK;
    const fattn_tensor *const t[] = {&c->d_in[0], &c->in[0], &c->d_out[0]};
    const fattni_piece *const by_isa =
        c->out[0].dtype == FATTN_F64 ? f->backward_f64 : f->backward_f32;
    fattni_each(c->ctx, t, 3, by_isa[c->ctx->isa], &c->d_in_fresh[0]);
    return FATTN_OK;
}
