/* Checks that the built-in ops share; each failure is an error message with shapes or dtypes. */
#include "autograd_c/ops/ops.h"

static const int64_t MOST_ELEMENTS = INT64_C(1) << 47;

static const char *dtype_of(const fattn_tensor *t) { return fattn_dtype_name((fattn_dtype)t->dtype); }

static fattn_status absent(const fattn_op_call *c, const char *op, const char *name) {
    return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "%s: %s is absent", op, name);
}

fattn_status fattni_check_real(const fattn_op_call *c, const char *op, const char *name, int i) {
    const fattn_tensor *t = &c->in[i];
    if (fattni_absent(t)) return absent(c, op, name);
    const bool narrow = t->dtype == FATTN_F16 || t->dtype == FATTN_BF16;
    if (narrow && c->ctx->device == FATTN_CPU && !(c->flags & FATTN_OP_F32_ON_CPU))
        return fattn_ctx_fail(c->ctx, FATTN_E_UNSUPPORTED, "%s: %s is %s; on the CPU this op takes f32 and f64", op,
                              name, dtype_of(t));
    if (!narrow && t->dtype != FATTN_F32 && t->dtype != FATTN_F64)
        return fattn_ctx_fail(c->ctx, FATTN_E_DTYPE, "%s: %s is %s, not a floating type", op, name, dtype_of(t));
    if (t->dtype != c->in[0].dtype)
        return fattn_ctx_fail(c->ctx, FATTN_E_DTYPE, "%s: %s is %s, but the first input is %s", op, name, dtype_of(t),
                              dtype_of(&c->in[0]));
    return FATTN_OK;
}

fattn_status fattni_check_i32(const fattn_op_call *c, const char *op, const char *name, int i) {
    const fattn_tensor *t = &c->in[i];
    if (fattni_absent(t)) return absent(c, op, name);
    if (t->dtype != FATTN_I32)
        return fattn_ctx_fail(c->ctx, FATTN_E_DTYPE, "%s: %s is %s, not i32", op, name, dtype_of(t));
    return FATTN_OK;
}

fattn_status fattni_check_contiguous(const fattn_op_call *c, const char *op, const char *name, int i) {
    const fattn_tensor *t = &c->in[i];
    const int last = t->ndim - 1;
    if (last < 0) return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "%s: %s is a scalar; it needs a dimension", op, name);
    if (t->shape[last] > 1 && t->stride[last] != 1)
        return fattn_ctx_fail(c->ctx, FATTN_E_UNSUPPORTED,
                              "%s: the last dimension of %s has stride %lld; only 1 is supported", op, name,
                              (long long)t->stride[last]);
    return FATTN_OK;
}

fattn_status fattni_misfit(const fattn_op_call *c, const char *op, const char *name, int i, const char *other, int j,
                           const char *rule) {
    char a[96], b[96];
    return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "%s: %s is %s, %s is %s: %s", op, name,
                          fattni_shape_text(&c->in[i], a, sizeof a), other, fattni_shape_text(&c->in[j], b, sizeof b),
                          rule);
}

bool fattni_broadcasts(const fattn_tensor *b, const fattn_tensor *a) {
    const int ahead = a->ndim - b->ndim;
    bool fits = ahead >= 0;
    for (int d = 0; fits && d < b->ndim; ++d) fits = b->shape[d] == a->shape[ahead + d] || b->shape[d] == 1;
    return fits;
}

static bool is_countable(const fattn_tensor *t) {
    int64_t count = 1;
    for (int d = 0; d < t->ndim; ++d)
        if (__builtin_mul_overflow(count, fattni_max(1, t->shape[d]), &count) || count > MOST_ELEMENTS) return false;
    return true;
}

fattn_status fattni_check_extents(const fattn_op_call *c, const char *op) {
    char text[96];
    for (int i = 0; i <= c->n_in; ++i) {
        const fattn_tensor *t = i < c->n_in ? &c->in[i] : &c->out[0];
        if (!is_countable(t))
            return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "%s: a tensor of shape %s is too large", op,
                                  fattni_shape_text(t, text, sizeof text));
    }
    return FATTN_OK;
}

fattn_status fattni_check_product(const fattn_op_call *c, const char *op, int64_t M, int64_t N, int64_t K) {
    if (M <= INT32_MAX && N <= INT32_MAX && K <= INT32_MAX) return FATTN_OK;
    return fattn_ctx_fail(c->ctx, FATTN_E_UNSUPPORTED,
                          "%s: a product of %lld x %lld results over %lld terms; OpenBLAS takes at "
                          "most %d of each",
                          op, (long long)M, (long long)N, (long long)K, INT32_MAX);
}

fattn_status fattni_check_per_row(const fattn_op_call *c, const char *op, const char *name, int i, const char *of,
                                  int j) {
    const fattn_tensor *t = &c->in[i], *x = &c->in[j];
    bool fits = t->ndim == x->ndim - 1;
    for (int d = 0; fits && d < t->ndim; ++d) fits = t->shape[d] == x->shape[d];
    return fits ? FATTN_OK : fattni_misfit(c, op, name, i, of, j, "one number per row is needed");
}

fattn_status fattni_check_gradients(const fattn_op_call *c, const char *op) {
    for (int i = 0; i < c->n_in; ++i) {
        const int32_t of = c->in[i].dtype, d = c->d_in[i].dtype;
        const bool sees_all = c->ctx->device != FATTN_CPU || !(c->flags & FATTN_OP_F32_ON_CPU);
        const bool wider = sees_all && d == FATTN_F32 && of != FATTN_F64;
        if (c->d_in[i].data && d != of && !wider)
            return fattn_ctx_fail(c->ctx, FATTN_E_UNSUPPORTED, "%s: input %d is %s, its gradient %s; on the %s", op, i,
                                  dtype_of(&c->in[i]), dtype_of(&c->d_in[i]),
                                  c->ctx->device == FATTN_CPU ? "CPU they must agree"
                                                              : "GPU it may only be wider: f32");
    }
    return FATTN_OK;
}

fattn_tensor fattni_row_major(const fattn_tensor *t, void *data) {
    return fattn_tensor_view(data, (fattn_dtype)t->dtype, (fattn_device)t->device, t->device_id, t->ndim, t->shape);
}

void fattni_out_like(fattn_op_call *c, int i) {
    c->out[0].ndim = c->in[i].ndim;
    c->out[0].dtype = c->in[i].dtype;
    for (int d = 0; d < c->in[i].ndim; ++d) c->out[0].shape[d] = c->in[i].shape[d];
}
