/* relu(x) = max(x, 0). Backward: dx = dy where x > 0, else 0. */
#include "autograd_c/ops/elementwise/op_unary.h"

#define BODY "autograd_c/ops/elementwise/op_relu.inc"
#include "core/base/for_each_real.inc"

static const fattni_unary relu = {
    "relu",      forward_f32_by_isa, forward_f64_by_isa, backward_f32_by_isa, backward_f64_by_isa,
    FATTNI_RELU, FATTNI_RELU_BACK};

static fattn_status infer(fattn_op_call *c) { return fattni_unary_infer(c, &relu); }
static fattn_status forward(fattn_op_call *c) { return fattni_unary_forward(c, &relu); }
static fattn_status backward(fattn_op_call *c) { return fattni_unary_backward(c, &relu); }

const fattn_op_def fattni_op_relu = {.struct_size = sizeof(fattn_op_def),
                                     .n_out = 1,
                                     .flags = FATTN_OP_F32_ON_CPU,
                                     .name = "relu",
                                     .infer = infer,
                                     .forward = forward,
                                     .backward = backward};

fattn_var fattn_op_relu(fattn_tape *t, fattn_var x) { return fattn_op_custom(t, &fattni_op_relu, &x, 1, NULL); }
