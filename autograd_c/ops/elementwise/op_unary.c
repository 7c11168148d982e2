/* What the ops of one variable share: checks, and the choice of the loop. */
#include "autograd_c/ops/elementwise/op_unary.h"

fattn_status fattni_unary_infer(fattn_op_call *c, const fattni_unary *f) {
    FATTNI_TRY(fattni_check_real(c, f->name, "x", 0));
    fattni_out_like(c, 0);
    return fattni_check_extents(c, f->name);
}

fattn_status fattni_unary_forward(fattn_op_call *c, const fattni_unary *f) {
    const fattn_tensor *const t[] = {&c->out[0], &c->in[0]};
    const int isa = c->ctx->isa;
    const fattni_elements value = {f->forward_f32[isa], f->forward_f64[isa], f->on_device};
    return fattni_each_element(c->ctx, &value, t, 2, true);
}

fattn_status fattni_unary_backward(fattn_op_call *c, const fattni_unary *f) {
    FATTNI_TRY(fattni_check_gradients(c, f->name));
    if (!c->d_in[0].data) return FATTN_OK;
    const fattn_tensor *const t[] = {&c->d_in[0], &c->in[0], &c->d_out[0]};
    const int isa = c->ctx->isa;
    const fattni_elements slope = {f->backward_f32[isa], f->backward_f64[isa], f->back_on_device};
    return fattni_each_element(c->ctx, &slope, t, 3, c->d_in_fresh[0]);
}
