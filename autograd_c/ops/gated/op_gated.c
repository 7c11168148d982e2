/* What the gates share: checks, and the choice of the loop. */
#include "autograd_c/ops/gated/op_gated.h"

enum { GATE, UP };

fattn_status fattni_gate_infer(fattn_op_call *c, const fattni_gate *f) {
    FATTNI_TRY(fattni_check_real(c, f->name, "gate", GATE));
    FATTNI_TRY(fattni_check_real(c, f->name, "up", UP));
    bool same = c->in[GATE].ndim == c->in[UP].ndim;
    for (int d = 0; same && d < c->in[UP].ndim; ++d) same = c->in[GATE].shape[d] == c->in[UP].shape[d];
    if (!same) return fattni_misfit(c, f->name, "gate", GATE, "up", UP, "their shapes must be the same");
    fattni_out_like(c, GATE);
    return fattni_check_extents(c, f->name);
}

/* d (+)= x value(gate) */
static fattn_status multiply(const fattn_op_call *c, const fattni_gate *f, const fattn_tensor *d, const fattn_tensor *x,
                             bool fresh) {
    const fattn_tensor *const t[] = {d, &c->in[GATE], x};
    const int isa = c->ctx->isa;
    const fattni_elements value = {f->f32[isa], f->f64[isa], f->on_device};
    return fattni_each_element(c->ctx, &value, t, 3, fresh);
}

fattn_status fattni_gate_forward(fattn_op_call *c, const fattni_gate *f) {
    return multiply(c, f, &c->out[0], &c->in[UP], true);
}

fattn_status fattni_gate_backward(fattn_op_call *c, const fattni_gate *f) {
    FATTNI_TRY(fattni_check_gradients(c, f->name));
    const fattn_tensor *const t[] = {&c->d_in[GATE], &c->in[GATE], &c->in[UP], &c->d_out[0]};
    const int isa = c->ctx->isa;
    const fattni_elements slope = {f->back_f32[isa], f->back_f64[isa], f->back_on_device};
    if (t[0]->data) FATTNI_TRY(fattni_each_element(c->ctx, &slope, t, 4, c->d_in_fresh[GATE]));
    if (!c->d_in[UP].data) return FATTN_OK;
    return multiply(c, f, &c->d_in[UP], &c->d_out[0], c->d_in_fresh[UP]);
}
