/* tanh x. Backward: dx = dy (1 - tanh^2 x), computed as dy 4t/(1 + t)^2 with t = exp(-2|x|), which does not cancel
   where tanh is near 1. */
#include "autograd_c/ops/exp.h"
#include "autograd_c/ops/elementwise/op_unary.h"

#include <math.h>

#define BODY "autograd_c/ops/elementwise/op_tanh.inc"
#include "core/base/for_each_real.inc"

static const fattni_unary tangent = {
    "tanh",      forward_f32_by_isa, forward_f64_by_isa, backward_f32_by_isa, backward_f64_by_isa,
    FATTNI_TANH, FATTNI_TANH_BACK};

static fattn_status infer(fattn_op_call *c) { return fattni_unary_infer(c, &tangent); }
static fattn_status forward(fattn_op_call *c) { return fattni_unary_forward(c, &tangent); }
static fattn_status backward(fattn_op_call *c) { return fattni_unary_backward(c, &tangent); }

const fattn_op_def fattni_op_tanh = {.struct_size = sizeof(fattn_op_def),
                                     .n_out = 1,
                                     .flags = FATTN_OP_F32_ON_CPU,
                                     .name = "tanh",
                                     .infer = infer,
                                     .forward = forward,
                                     .backward = backward};

fattn_var fattn_op_tanh(fattn_tape *t, fattn_var x) { return fattn_op_custom(t, &fattni_op_tanh, &x, 1, NULL); }
