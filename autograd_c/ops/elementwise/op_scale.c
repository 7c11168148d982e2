/* y = factor x for a number that is the same for all elements and has no gradient. Backward: dx = factor dy. */
#include "autograd_c/ops/ops.h"

#include <float.h>
#include <math.h>

#define BODY "autograd_c/ops/elementwise/op_scale.inc"
#include "core/base/for_each_real.inc"

fattn_status fattni_scale(fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x, double factor, bool fresh) {
    const fattni_elements f = {scale_f32, scale_f64, FATTNI_SCALE, factor};
    const fattn_tensor *const t[] = {d, x};
    return fattni_each_element(ctx, &f, t, 2, fresh);
}

static fattn_status infer(fattn_op_call *c) {
    const double factor = *(const double *)c->attr;
    FATTNI_TRY(fattni_check_real(c, "scale", "x", 0));
    if (!(fabs(factor) <= (c->in[0].dtype == FATTN_F64 ? DBL_MAX : (double)FLT_MAX)))
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "scale: the factor is %g, which is not finite in %s", factor,
                              c->in[0].dtype == FATTN_F64 ? "f64" : "f32");
    fattni_out_like(c, 0);
    return fattni_check_extents(c, "scale");
}

static fattn_status forward(fattn_op_call *c) {
    return fattni_scale(c->ctx, &c->out[0], &c->in[0], *(const double *)c->attr, true);
}

static fattn_status backward(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_gradients(c, "scale"));
    if (!c->d_in[0].data) return FATTN_OK;
    return fattni_scale(c->ctx, &c->d_in[0], &c->d_out[0], *(const double *)c->attr, c->d_in_fresh[0]);
}

const fattn_op_def fattni_op_scale = {.struct_size = sizeof(fattn_op_def),
                                      .attr_size = sizeof(double),
                                      .n_out = 1,
                                      .flags = FATTN_OP_F32_ON_CPU,
                                      .name = "scale",
                                      .infer = infer,
                                      .forward = forward,
                                      .backward = backward};

fattn_var fattn_op_scale(fattn_tape *t, fattn_var x, double factor) {
    return fattn_op_custom(t, &fattni_op_scale, &x, 1, &factor);
}
