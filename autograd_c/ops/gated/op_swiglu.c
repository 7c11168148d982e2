/* SwiGLU: y = up silu(gate) (Shazeer, arXiv 2002.05202), without silu(gate) in memory. */
#include "autograd_c/ops/exp.h"
#include "autograd_c/ops/gated/op_gated.h"

#include <math.h>

#define BODY "autograd_c/ops/gated/op_swiglu.inc"
#include "core/base/for_each_real.inc"

static const fattni_gate swiglu = {
    "swiglu",      gated_f32_by_isa,  gated_f64_by_isa, gated_back_f32_by_isa, gated_back_f64_by_isa,
    FATTNI_SWIGLU, FATTNI_SWIGLU_BACK};

static fattn_status infer(fattn_op_call *c) { return fattni_gate_infer(c, &swiglu); }
static fattn_status forward(fattn_op_call *c) { return fattni_gate_forward(c, &swiglu); }
static fattn_status backward(fattn_op_call *c) { return fattni_gate_backward(c, &swiglu); }

const fattn_op_def fattni_op_swiglu = {.struct_size = sizeof(fattn_op_def),
                                       .n_out = 1,
                                       .flags = FATTN_OP_F32_ON_CPU,
                                       .name = "swiglu",
                                       .infer = infer,
                                       .forward = forward,
                                       .backward = backward};

fattn_var fattn_op_swiglu(fattn_tape *t, fattn_var gate, fattn_var up) {
    return fattn_op_custom(t, &fattni_op_swiglu, (fattn_var[]){gate, up}, 2, NULL);
}
