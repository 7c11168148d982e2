/* y = a + b, b broadcast to a (NumPy's rules). Backward: da = dy, and db where it has a's shape, are
   passed on by the tape; else db = the sum of dy over the dimensions that b repeats in. Saves nothing. */
#include "autograd_c/ops/ops.h"

#define BODY "autograd_c/ops/elementwise/op_add.inc"
#include "core/base/for_each_real.inc"

static const fattni_elements sum = {add_f32, add_f64, FATTNI_ADD};

static fattn_status infer(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_real(c, "add", "a", 0));
    FATTNI_TRY(fattni_check_real(c, "add", "b", 1));
    if (!fattni_broadcasts(&c->in[1], &c->in[0]))
        return fattni_misfit(c, "add", "a", 0, "b", 1, "b must broadcast to a");
    fattni_out_like(c, 0);
    FATTNI_TRY(fattni_check_extents(c, "add"));
    c->bwd_workspace = fattni_reduce_workspace(c->ctx, &c->in[1], &c->out[0]);
    return FATTN_OK;
}

static fattn_status forward(fattn_op_call *c) {
    const fattn_tensor *const t[] = {&c->out[0], &c->in[0], &c->in[1]};
    return fattni_each_element(c->ctx, &sum, t, 3, true);
}

static fattn_status backward(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_gradients(c, "add"));
    const fattn_tensor *const db = &c->d_in[1];
    if (!db->data) return FATTN_OK;
    return fattni_reduce(c->ctx, db, c->d_in_fresh[1], &c->d_out[0], NULL, c->workspace);
}

const fattn_op_def fattni_op_add = {.struct_size = sizeof(fattn_op_def),
                                    .n_out = 1,
                                    .flags = FATTN_OP_PASS_GRAD | FATTN_OP_F32_ON_CPU,
                                    .name = "add",
                                    .infer = infer,
                                    .forward = forward,
                                    .backward = backward};

fattn_var fattn_op_add(fattn_tape *t, fattn_var a, fattn_var b) {
    return fattn_op_custom(t, &fattni_op_add, (fattn_var[]){a, b}, 2, NULL);
}
