/* Ops y = up f(gate), of one shape; they save nothing. Their loops come from op_gated.inc. */
#ifndef FATTNI_AUTOGRAD_OPS_GATED_OP_GATED_H
#define FATTNI_AUTOGRAD_OPS_GATED_OP_GATED_H

#include "autograd_c/ops/ops.h"
#include "core/base/isa_clones.h"

typedef struct fattni_gate {
    const char *name;
    /* f_by_isa of F32 and of F64 */
    const fattni_loop *f32, *f64, *back_f32, *back_f64;
    enum fattni_element on_device, back_on_device;
} fattni_gate;

/* Inputs gate and up, any strides. dgate (+)= dy up f'(gate), dup (+)= dy f(gate). */
fattn_status fattni_gate_infer(fattn_op_call *c, const fattni_gate *f);
fattn_status fattni_gate_forward(fattn_op_call *c, const fattni_gate *f);
fattn_status fattni_gate_backward(fattn_op_call *c, const fattni_gate *f);

#endif
