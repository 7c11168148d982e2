/* softmax over the last dimension, C elements: y = exp(x - max) / sum of exp(x - max). A row whose elements are all
   -infinity has y = 0, as attention has O = 0 for a row without keys; a NaN or +infinity makes its row NaN.

   Backward: dx = y (dy - sum of dy y). Saves nothing: y is at hand. Sums of a row are in double. */
#include "autograd_c/ops/exp.h"
#include "autograd_c/ops/ops.h"
#include "core/base/isa_clones.h"
#include "autograd_c/ops/norm/op_softmax.h"

#include <math.h>

enum { ELEMENTS_PER_TASK = 16384 };

typedef struct job {
    const fattn_op_call *c;
    fattni_rows x, y, dx;
    int64_t rows_per_task;
} job;

#define BODY "autograd_c/ops/norm/op_softmax.inc"
#include "core/base/for_each_real.inc"

static fattn_status infer(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_real(c, "softmax", "x", 0));
    FATTNI_TRY(fattni_check_contiguous(c, "softmax", "x", 0));
    fattni_out_like(c, 0);
    FATTNI_TRY(fattni_check_extents(c, "softmax"));
    fattni_code_of(c, FATTNI_SOFTMAX)->plan(c);
    return FATTN_OK;
}

static void plan_cpu(fattn_op_call *c) { (void)c; }

static void run(fattn_op_call *c, const fattni_task *f32, const fattni_task *f64) {
    job j = {.c = c, .x = fattni_rows_of(&c->in[0]), .y = fattni_rows_of(&c->out[0])};
    if (c->d_in) j.dx = fattni_rows_of(&c->d_in[0]);
    j.rows_per_task = fattni_max(1, ELEMENTS_PER_TASK / fattni_max(1, j.y.columns));
    fattni_parallel(c->ctx, fattni_ceil_div(j.y.count, j.rows_per_task),
                    (c->out[0].dtype == FATTN_F64 ? f64 : f32)[c->ctx->isa], &j);
}

static fattn_status forward_cpu(fattn_op_call *c) {
    run(c, forward_f32_by_isa, forward_f64_by_isa);
    return FATTN_OK;
}

static fattn_status backward_cpu(fattn_op_call *c) {
    if (c->d_in[0].data) run(c, backward_f32_by_isa, backward_f64_by_isa);
    return FATTN_OK;
}

const fattni_code fattni_softmax_cpu = {plan_cpu, forward_cpu, backward_cpu};

static fattn_status forward(fattn_op_call *c) { return fattni_code_of(c, FATTNI_SOFTMAX)->forward(c); }

static fattn_status backward(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_gradients(c, "softmax"));
    return fattni_code_of(c, FATTNI_SOFTMAX)->backward(c);
}

const fattn_op_def fattni_op_softmax = {.struct_size = sizeof(fattn_op_def),
                                        .n_out = 1,
                                        .flags = FATTN_OP_F32_ON_CPU,
                                        .name = "softmax",
                                        .infer = infer,
                                        .forward = forward,
                                        .backward = backward};

fattn_var fattn_op_softmax(fattn_tape *t, fattn_var x) { return fattn_op_custom(t, &fattni_op_softmax, &x, 1, NULL); }
