/* y = a b elementwise, b broadcast to a (NumPy's rules). Backward: da = dy b; db = the sum of dy a
   over the dimensions that b repeats in. Saves nothing: a and b are at hand. */
#include "autograd_c/ops/ops.h"

#define BODY "autograd_c/ops/elementwise/op_mul.inc"
#include "core/base/for_each_real.inc"

const fattni_elements fattni_elementwise_product = {mul_f32, mul_f64, FATTNI_MUL};

static fattn_status infer(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_real(c, "mul", "a", 0));
    FATTNI_TRY(fattni_check_real(c, "mul", "b", 1));
    if (!fattni_broadcasts(&c->in[1], &c->in[0]))
        return fattni_misfit(c, "mul", "a", 0, "b", 1, "b must broadcast to a");
    fattni_out_like(c, 0);
    FATTNI_TRY(fattni_check_extents(c, "mul"));
    c->bwd_workspace = fattni_reduce_workspace(c->ctx, &c->in[1], &c->out[0]);
    return FATTN_OK;
}

static fattn_status multiply(const fattn_op_call *c, const fattn_tensor *d, bool fresh, const fattn_tensor *x,
                             const fattn_tensor *y) {
    const fattn_tensor *const t[] = {d, x, y};
    return fattni_each_element(c->ctx, &fattni_elementwise_product, t, 3, fresh);
}

static fattn_status forward(fattn_op_call *c) { return multiply(c, &c->out[0], true, &c->in[0], &c->in[1]); }

static fattn_status backward(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_gradients(c, "mul"));
    const fattn_tensor *a = &c->in[0], *b = &c->in[1], *dy = &c->d_out[0];
    const fattn_tensor *da = &c->d_in[0], *db = &c->d_in[1];
    if (da->data) FATTNI_TRY(multiply(c, da, c->d_in_fresh[0], dy, b));
    if (!db->data) return FATTN_OK;
    if (fattn_tensor_numel(db) == fattn_tensor_numel(dy)) return multiply(c, db, c->d_in_fresh[1], dy, a);
    return fattni_reduce(c->ctx, db, c->d_in_fresh[1], dy, a, c->workspace);
}

const fattn_op_def fattni_op_mul = {.struct_size = sizeof(fattn_op_def),
                                    .n_out = 1,
                                    .flags = FATTN_OP_F32_ON_CPU,
                                    .name = "mul",
                                    .infer = infer,
                                    .forward = forward,
                                    .backward = backward};

fattn_var fattn_op_mul(fattn_tape *t, fattn_var a, fattn_var b) {
    return fattn_op_custom(t, &fattni_op_mul, (fattn_var[]){a, b}, 2, NULL);
}
