/* GEGLU: y = up gelu(gate), gelu in its tanh form (Shazeer, arXiv 2002.05202), without gelu(gate) in memory. */
#include "autograd_c/ops/exp.h"
#include "autograd_c/ops/gated/op_gated.h"

#include <math.h>

#define BODY "autograd_c/ops/gated/op_geglu.inc"
#include "core/base/for_each_real.inc"

static const fattni_gate geglu = {
    "geglu",      gated_f32_by_isa, gated_f64_by_isa, gated_back_f32_by_isa, gated_back_f64_by_isa,
    FATTNI_GEGLU, FATTNI_GEGLU_BACK};

static fattn_status infer(fattn_op_call *c) { return fattni_gate_infer(c, &geglu); }
static fattn_status forward(fattn_op_call *c) { return fattni_gate_forward(c, &geglu); }
static fattn_status backward(fattn_op_call *c) { return fattni_gate_backward(c, &geglu); }

const fattn_op_def fattni_op_geglu = {.struct_size = sizeof(fattn_op_def),
                                      .n_out = 1,
                                      .flags = FATTN_OP_F32_ON_CPU,
                                      .name = "geglu",
                                      .infer = infer,
                                      .forward = forward,
                                      .backward = backward};

fattn_var fattn_op_geglu(fattn_tape *t, fattn_var gate, fattn_var up) {
    return fattn_op_custom(t, &fattni_op_geglu, (fattn_var[]){gate, up}, 2, NULL);
}
