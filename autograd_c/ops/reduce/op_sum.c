/* Sum and mean over some dimensions. Sums are in double, in an order that shapes alone decide, and are rounded once.
   Backward: dx = dy, or dy / n, in every element that was summed. Saves nothing. */
#include "autograd_c/ops/ops.h"
#include "autograd_c/tape/tape_nodes.h"

typedef struct over {
    int32_t n; /* 0: all dimensions */
    int32_t dim[FATTN_MAX_DIMS];
    int32_t keep; /* summed dimensions stay, with one element */
} over;

/* Bit d: dimension d is summed. */
static fattn_status dims_of(const fattn_op_call *c, const char *op, unsigned *dims) {
    const over *const a = c->attr;
    char text[96];
    *dims = a->n ? 0 : (1u << c->in[0].ndim) - 1;
    for (int i = 0; i < a->n; ++i) {
        const int d = a->dim[i];
        if (d < 0 || d >= c->in[0].ndim || (*dims >> d & 1))
            return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "%s: dims[%d] is %d, %s of x, %s", op, i, d,
                                  d < 0 || d >= c->in[0].ndim ? "no dimension" : "named twice,",
                                  fattni_shape_text(&c->in[0], text, sizeof text));
        *dims |= 1u << d;
    }
    return FATTN_OK;
}

/* y, or its gradient, with x's dimensions: of one element where x is summed. */
static fattn_tensor spread(const fattn_op_call *c, unsigned dims, const fattn_tensor *y) {
    fattn_tensor t = fattni_row_major(&c->in[0], y->data);
    for (int d = 0; d < t.ndim; ++d)
        if (dims >> d & 1) t.shape[d] = 1;
    t = fattni_row_major(&t, y->data);
    t.dtype = y->dtype;
    return t;
}

static fattn_status infer_as(fattn_op_call *c, const char *op, bool mean) {
    const fattn_tensor *const x = &c->in[0];
    fattn_tensor *const y = &c->out[0];
    unsigned dims;
    char text[96];
    FATTNI_TRY(fattni_check_real(c, op, "x", 0));
    FATTNI_TRY(dims_of(c, op, &dims));
    y->dtype = x->dtype;
    for (int d = 0; d < x->ndim; ++d) {
        const bool summed = dims >> d & 1;
        if (!summed || ((const over *)c->attr)->keep) y->shape[y->ndim++] = summed ? 1 : x->shape[d];
    }
    FATTNI_TRY(fattni_check_extents(c, op));
    if (mean && fattn_tensor_numel(x) == 0 && fattn_tensor_numel(y) > 0)
        return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "%s: x is %s: there is no mean of no elements", op,
                              fattni_shape_text(x, text, sizeof text));
    const fattn_tensor all = spread(c, dims, y);
    c->fwd_workspace = fattni_reduce_workspace(c->ctx, &all, x);
    return FATTN_OK;
}

/* How many elements an element of y is the mean of; of a sum 1. */
static double divisor_of(const fattn_op_call *c, bool mean) {
    const int64_t kept = fattn_tensor_numel(&c->out[0]);
    return mean && kept ? (double)(fattn_tensor_numel(&c->in[0]) / kept) : 1;
}

static fattn_status forward_as(fattn_op_call *c, const char *op, bool mean) {
    unsigned dims;
    FATTNI_TRY(dims_of(c, op, &dims));
    const fattn_tensor y = spread(c, dims, &c->out[0]);
    return fattni_reduce_divided(c->ctx, &y, &c->in[0], divisor_of(c, mean), c->workspace);
}

static fattn_status backward_as(fattn_op_call *c, const char *op, bool mean) {
    unsigned dims;
    FATTNI_TRY(fattni_check_gradients(c, op));
    FATTNI_TRY(dims_of(c, op, &dims));
    const fattn_tensor dy = spread(c, dims, &c->d_out[0]);
    return c->d_in[0].data ? fattni_scale(c->ctx, &c->d_in[0], &dy, 1 / divisor_of(c, mean), c->d_in_fresh[0])
                           : FATTN_OK;
}

static fattn_status infer_sum(fattn_op_call *c) { return infer_as(c, "sum", false); }
static fattn_status infer_mean(fattn_op_call *c) { return infer_as(c, "mean", true); }
static fattn_status forward_sum(fattn_op_call *c) { return forward_as(c, "sum", false); }
static fattn_status forward_mean(fattn_op_call *c) { return forward_as(c, "mean", true); }
static fattn_status back_sum(fattn_op_call *c) { return backward_as(c, "sum", false); }
static fattn_status back_mean(fattn_op_call *c) { return backward_as(c, "mean", true); }

const fattn_op_def fattni_op_sum = {.struct_size = sizeof(fattn_op_def),
                                    .attr_size = sizeof(over),
                                    .n_out = 1,
                                    .flags = FATTN_OP_F32_ON_CPU,
                                    .name = "sum",
                                    .infer = infer_sum,
                                    .forward = forward_sum,
                                    .backward = back_sum};
const fattn_op_def fattni_op_mean = {.struct_size = sizeof(fattn_op_def),
                                     .attr_size = sizeof(over),
                                     .n_out = 1,
                                     .flags = FATTN_OP_F32_ON_CPU,
                                     .name = "mean",
                                     .infer = infer_mean,
                                     .forward = forward_mean,
                                     .backward = back_mean};

static fattn_var record(fattn_tape *t, const fattn_op_def *def, fattn_var x, const int *dims, int n, int keep) {
    if (!t || t->status) return (fattn_var){0};
    over a = {.n = n, .keep = keep != 0};
    fattn_status s = FATTN_OK;
    if (n < 0 || n > FATTN_MAX_DIMS || (n && !dims))
        s = fattn_ctx_fail(t->ctx, FATTN_E_ARG, "%s: dims is NULL, or their number %d is not 0..%d", def->name, n,
                           FATTN_MAX_DIMS);
    if (fattni_tape_fail(t, s)) return (fattn_var){0};
    for (int i = 0; i < n; ++i) a.dim[i] = dims[i];
    return fattn_op_custom(t, def, &x, 1, &a);
}

fattn_var fattn_op_sum(fattn_tape *t, fattn_var x, const int *dims, int n, int keep) {
    return record(t, &fattni_op_sum, x, dims, n, keep);
}

fattn_var fattn_op_mean(fattn_tape *t, fattn_var x, const int *dims, int n, int keep) {
    return record(t, &fattni_op_mean, x, dims, n, keep);
}
