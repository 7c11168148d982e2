/* gelu(x) = x/2 (1 + tanh u), u = sqrt(2/pi) (x + 0.044715 x^3), computed as x s with
   s = sigmoid(2u) = (1 + tanh u)/2. Backward: dx = dy (s + x s (1 - s) 2u'). */
#include "autograd_c/ops/exp.h"
#include "autograd_c/ops/elementwise/op_unary.h"

#include <math.h>

#define BODY "autograd_c/ops/elementwise/op_gelu.inc"
#include "core/base/for_each_real.inc"

static const fattni_unary gelu = {
    "gelu",      forward_f32_by_isa, forward_f64_by_isa, backward_f32_by_isa, backward_f64_by_isa,
    FATTNI_GELU, FATTNI_GELU_BACK};

static fattn_status infer(fattn_op_call *c) { return fattni_unary_infer(c, &gelu); }
static fattn_status forward(fattn_op_call *c) { return fattni_unary_forward(c, &gelu); }
static fattn_status backward(fattn_op_call *c) { return fattni_unary_backward(c, &gelu); }

const fattn_op_def fattni_op_gelu = {.struct_size = sizeof(fattn_op_def),
                                     .n_out = 1,
                                     .flags = FATTN_OP_F32_ON_CPU,
                                     .name = "gelu",
                                     .infer = infer,
                                     .forward = forward,
                                     .backward = backward};

fattn_var fattn_op_gelu(fattn_tape *t, fattn_var x) { return fattn_op_custom(t, &fattni_op_gelu, &x, 1, NULL); }
