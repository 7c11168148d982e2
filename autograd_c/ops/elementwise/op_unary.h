/* Ops that are a function of one variable, element by element; they save nothing. Their loops come
   from op_unary.inc. */
#ifndef FATTNI_AUTOGRAD_OPS_ELEMENTWISE_OP_UNARY_H
#define FATTNI_AUTOGRAD_OPS_ELEMENTWISE_OP_UNARY_H

#include "autograd_c/ops/ops.h"
#include "core/base/isa_clones.h"

typedef struct fattni_unary {
    const char *name;
    /* f_by_isa of F32 and of F64 */
    const fattni_loop *forward_f32, *forward_f64, *backward_f32, *backward_f64;
    enum fattni_element on_device, back_on_device;
} fattni_unary;

/* y = f(x), of x's shape; dx (+)= dy f'(x). Any strides. */
fattn_status fattni_unary_infer(fattn_op_call *c, const fattni_unary *f);
fattn_status fattni_unary_forward(fattn_op_call *c, const fattni_unary *f);
fattn_status fattni_unary_backward(fattn_op_call *c, const fattni_unary *f);

#endif
