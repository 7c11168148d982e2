/* silu(x) = x s, s = sigmoid(x). Backward: dx = dy s (1 + x (1 - s)). */
#include "autograd_c/ops/exp.h"
#include "autograd_c/ops/elementwise/op_unary.h"

#include <math.h>

#define BODY "autograd_c/ops/elementwise/op_silu.inc"
#include "core/base/for_each_real.inc"

static const fattni_unary silu = {
    "silu",      forward_f32_by_isa, forward_f64_by_isa, backward_f32_by_isa, backward_f64_by_isa,
    FATTNI_SILU, FATTNI_SILU_BACK};

static fattn_status infer(fattn_op_call *c) { return fattni_unary_infer(c, &silu); }
static fattn_status forward(fattn_op_call *c) { return fattni_unary_forward(c, &silu); }
static fattn_status backward(fattn_op_call *c) { return fattni_unary_backward(c, &silu); }

const fattn_op_def fattni_op_silu = {.struct_size = sizeof(fattn_op_def),
                                     .n_out = 1,
                                     .flags = FATTN_OP_F32_ON_CPU,
                                     .name = "silu",
                                     .infer = infer,
                                     .forward = forward,
                                     .backward = backward};

fattn_var fattn_op_silu(fattn_tape *t, fattn_var x) { return fattn_op_custom(t, &fattni_op_silu, &x, 1, NULL); }
