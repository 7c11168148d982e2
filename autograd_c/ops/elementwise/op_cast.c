/* y = x in another floating type, rounded to nearest even; to its own type, a view. Backward:
   dx = dy in x's type. */
#include "autograd_c/ops/ops.h"

static bool is_float(int32_t t) { return t == FATTN_F64 || t == FATTN_F32 || t == FATTN_F16 || t == FATTN_BF16; }

static bool is_dense(const fattn_tensor *x) {
    const fattni_rows r = fattni_rows_of(x);
    return r.n == 1 && r.step == 1 && (r.count == 1 || r.stride[0] == r.columns);
}

static fattn_status infer(fattn_op_call *c) {
    const int32_t to = *(const int32_t *)c->attr;
    const fattn_tensor *x = &c->in[0];
    if (fattni_absent(x)) return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "cast: x is absent");
    if (!is_float(x->dtype) || !is_float(to))
        return fattn_ctx_fail(c->ctx, FATTN_E_DTYPE, "cast: %s to %s, but both must be floating types",
                              fattn_dtype_name((fattn_dtype)x->dtype), fattn_dtype_name((fattn_dtype)to));
    fattni_out_like(c, 0);
    c->out[0].dtype = to;
    if (to == x->dtype && is_dense(x)) c->out[0].data = x->data;
    return FATTN_OK;
}

static fattn_status forward(fattn_op_call *c) { return fattn_tensor_copy(c->ctx, &c->out[0], &c->in[0]); }

static fattn_status backward(fattn_op_call *c) {
    if (!c->d_in[0].data) return FATTN_OK;
    return fattni_accumulate(c->ctx, &c->d_in[0], &c->d_out[0], c->d_in_fresh[0]);
}

const fattn_op_def fattni_op_cast = {.struct_size = sizeof(fattn_op_def),
                                     .attr_size = sizeof(int32_t),
                                     .n_out = 1,
                                     .flags = FATTN_OP_MAY_VIEW,
                                     .name = "cast",
                                     .infer = infer,
                                     .forward = forward,
                                     .backward = backward};

fattn_var fattn_op_cast(fattn_tape *t, fattn_var x, fattn_dtype to) {
    return fattn_op_custom(t, &fattni_op_cast, &x, 1, &(int32_t){(int32_t)to});
}
