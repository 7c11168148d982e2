/* y = x w^T + b, or with a residual r y = r + x w^T + b; x [..,K] seen as R rows, w [N,K], b [N] or absent.
   Backward: dx = dy w, dw = dy^T x, db = the sum of dy over rows; dr = dy is passed on by the tape. Saves nothing.

   linear_gelu: y = gelu(z), z = x w^T + b, which is saved where a gradient is wanted. Backward: dz = dy gelu'(z) in the
   workspace, and its sum over rows in the same pass; then as above. */
#include "autograd_c/ops/ops.h"
#include "autograd_c/tape/tape_nodes.h"

enum { X = 0, W = 1, BIAS = 2, RESIDUAL = 3 };

static fattn_status check(const fattn_op_call *c) {
    const fattn_tensor *x = &c->in[X], *w = &c->in[W], *bias = &c->in[BIAS];
    FATTNI_TRY(fattni_check_real(c, "linear", "x", X));
    FATTNI_TRY(fattni_check_real(c, "linear", "w", W));
    if (w->ndim != 2 || x->ndim < 1 || x->shape[x->ndim - 1] != w->shape[1])
        return fattni_misfit(c, "linear", "x", X, "w", W, "[..,K] and [N,K] are needed");
    if (fattni_absent(bias)) return FATTN_OK;
    FATTNI_TRY(fattni_check_real(c, "linear", "bias", BIAS));
    FATTNI_TRY(fattni_check_contiguous(c, "linear", "bias", BIAS));
    if (bias->ndim != 1 || bias->shape[0] != w->shape[0])
        return fattni_misfit(c, "linear", "w", W, "bias", BIAS, "[N,K] and [N] are needed");
    return FATTN_OK;
}

static fattn_status infer(fattn_op_call *c) {
    FATTNI_TRY(check(c));
    const fattn_tensor *w = &c->in[W];
    fattni_out_like(c, X);
    c->out[0].shape[c->in[X].ndim - 1] = w->shape[0];
    FATTNI_TRY(fattni_check_extents(c, "linear"));
    if (c->n_in > RESIDUAL) {
        const fattn_tensor *const r = &c->in[RESIDUAL];
        bool same = r->ndim == c->out[0].ndim;
        FATTNI_TRY(fattni_check_real(c, "linear", "residual", RESIDUAL));
        for (int d = 0; d < r->ndim && same; ++d) same = r->shape[d] == c->out[0].shape[d];
        if (!same) return fattni_misfit(c, "linear", "w", W, "residual", RESIDUAL, "it needs the shape of x w^T");
    }

    /* The three gradients are computed one after the other in the same workspace. */
    const fattn_tensor y = fattni_row_major(&c->out[0], NULL);
    const fattni_flat x = fattni_flatten(&c->in[X]), dy = fattni_flatten(&y);
    FATTNI_TRY(fattni_check_product(c, "linear", x.t.shape[0], w->shape[0], w->shape[1]));
    if (x.in_place) FATTNI_TRY(fattni_choose_products(c, x.t.shape[0], w->shape[0], w->shape[1]));
    const size_t copy = fattni_room(fattni_flat_bytes(&x));
    const fattni_product forward = {.a = &x.t, .b = w, .c = &dy.t, .trans_b = true};
    const fattni_product dx = {.a = &dy.t, .b = w, .c = &x.t};
    const fattni_product dw = {.a = &dy.t, .b = &x.t, .c = w, .trans_a = true};
    const size_t stages[] = {copy + fattni_product_workspace(c->ctx, &dx), copy + fattni_product_workspace(c->ctx, &dw),
                             fattni_sum_rows_workspace(c->ctx, &c->in[BIAS], &dy.t)};
    c->fwd_workspace = copy + fattni_product_workspace(c->ctx, &forward);
    for (int i = X; i <= BIAS; ++i)
        if (c->wanted[i] && stages[i] > c->bwd_workspace) c->bwd_workspace = stages[i];
    return FATTN_OK;
}

static fattn_status forward(fattn_op_call *c) {
    void *workspace = c->workspace;
    fattni_flat x = fattni_flatten(&c->in[X]);
    const fattni_flat y = fattni_flatten(&c->out[0]);
    FATTNI_TRY(fattni_flat_read(c->ctx, &x, &c->in[X], &workspace));
    fattni_product p = {.a = &x.t,
                        .b = &c->in[W],
                        .c = &y.t,
                        .trans_b = true,
                        .row = c->in[BIAS].data,
                        .early = ((const fattni_linear *)c->attr)->early};
    if (c->n_in == RESIDUAL) return fattni_product_run(c->ctx, &p, workspace);
    const fattni_flat r = fattni_flatten(&c->in[RESIDUAL]);
    if (r.in_place) p.onto = &r.t;
    FATTNI_TRY(fattni_product_run(c->ctx, &p, workspace));
    return r.in_place ? FATTN_OK : fattni_accumulate(c->ctx, &c->out[0], &c->in[RESIDUAL], false);
}

/* dx and dw from the product's gradient. */
static fattn_status back(const fattn_op_call *c, const fattn_tensor *d_out, void *const rest) {
    const fattn_tensor *dx = &c->d_in[X], *dw = &c->d_in[W];
    const fattni_flat dy = fattni_flatten(d_out);
    if (dx->data) {
        void *workspace = rest;
        fattni_flat flat = fattni_flatten(dx);
        fattni_flat_place(&flat, &workspace);
        const fattni_product p = {.a = &dy.t, .b = &c->in[W], .c = &flat.t, .add = flat.in_place && !c->d_in_fresh[X]};
        FATTNI_TRY(fattni_product_run(c->ctx, &p, workspace));
        if (!flat.in_place) FATTNI_TRY(fattni_flat_add_to(c->ctx, &flat, dx, c->d_in_fresh[X]));
    }
    if (dw->data) {
        void *workspace = rest;
        fattni_flat x = fattni_flatten(&c->in[X]);
        FATTNI_TRY(fattni_flat_read(c->ctx, &x, &c->in[X], &workspace));
        const fattni_product p = {.a = &dy.t, .b = &x.t, .c = dw, .trans_a = true, .add = !c->d_in_fresh[W]};
        FATTNI_TRY(fattni_product_run(c->ctx, &p, workspace));
    }
    return FATTN_OK;
}

static fattn_status backward(fattn_op_call *c) {
    const fattn_tensor *const db = &c->d_in[BIAS];
    FATTNI_TRY(fattni_check_gradients(c, "linear"));
    FATTNI_TRY(back(c, &c->d_out[0], c->workspace));
    if (!db->data) return FATTN_OK;
    const fattni_flat dy = fattni_flatten(&c->d_out[0]);
    return fattni_sum_rows(c->ctx, db, c->d_in_fresh[BIAS], &dy.t, c->workspace);
}

static const fattni_element_code *elements_of(const fattn_ctx *ctx) { return fattni_op_device_of(ctx)->elements; }

static fattn_status infer_gelu(fattn_op_call *c) {
    FATTNI_TRY(infer(c));
    const size_t bytes = fattni_tensor_bytes(&c->out[0]);
    bool keeps = false;
    for (int i = X; i <= BIAS; ++i) keeps = keeps || c->wanted[i];
    if (!keeps) return FATTN_OK;
    const size_t sums = c->wanted[BIAS] ? elements_of(c->ctx)->gelu_back_workspace(&c->in[BIAS], &c->out[0]) : 0;
    c->saved_bytes = bytes;
    c->bwd_workspace = fattni_room(bytes) + (c->bwd_workspace > sums ? c->bwd_workspace : sums);
    return FATTN_OK;
}

static fattn_status forward_gelu(fattn_op_call *c) {
    void *workspace = c->workspace;
    fattni_flat x = fattni_flatten(&c->in[X]);
    const fattni_flat y = fattni_flatten(&c->out[0]);
    fattn_tensor z = y.t;
    if (c->saved) z = fattni_row_major(&y.t, c->saved);
    FATTNI_TRY(fattni_flat_read(c->ctx, &x, &c->in[X], &workspace));
    bool activated;
    const fattni_product p = {.a = &x.t,
                              .b = &c->in[W],
                              .c = &z,
                              .trans_b = true,
                              .row = c->in[BIAS].data,
                              .gelu = &y.t,
                              .activated = &activated,
                              .early = ((const fattni_linear *)c->attr)->early};
    FATTNI_TRY(fattni_product_run(c->ctx, &p, workspace));
    return activated ? FATTN_OK : elements_of(c->ctx)->gelu(c->ctx, &y.t, &z);
}

static fattn_status backward_gelu(fattn_op_call *c) {
    void *workspace = c->workspace;
    const fattn_tensor *const db = &c->d_in[BIAS];
    FATTNI_TRY(fattni_check_gradients(c, "linear_gelu"));
    const fattn_tensor z = fattni_row_major(&c->out[0], c->saved);
    const fattn_tensor dz = fattni_row_major(&c->out[0], fattni_carve(&workspace, fattni_tensor_bytes(&c->out[0])));
    FATTNI_TRY(elements_of(c->ctx)->gelu_back(c->ctx, &dz, &z, &c->d_out[0], db->data ? db : NULL, c->d_in_fresh[BIAS],
                                              workspace));
    return back(c, &dz, workspace);
}

const fattn_op_def fattni_op_linear = {.struct_size = sizeof(fattn_op_def),
                                       .attr_size = sizeof(fattni_linear),
                                       .n_out = 1,
                                       .flags = FATTN_OP_F32_ON_CPU,
                                       .name = "linear",
                                       .infer = infer,
                                       .forward = forward,
                                       .backward = backward};

static const fattn_op_def linear_residual = {.struct_size = sizeof(fattn_op_def),
                                             .attr_size = sizeof(fattni_linear),
                                             .n_out = 1,
                                             .flags = FATTN_OP_F32_ON_CPU | FATTN_OP_PASS_GRAD_LAST,
                                             .name = "linear",
                                             .infer = infer,
                                             .forward = forward,
                                             .backward = backward};

/* Of a GPU: on a CPU they are two ops. */
static const fattn_op_def linear_gelu = {.struct_size = sizeof(fattn_op_def),
                                         .attr_size = sizeof(fattni_linear),
                                         .n_out = 1,
                                         .name = "linear_gelu",
                                         .infer = infer_gelu,
                                         .forward = forward_gelu,
                                         .backward = backward_gelu};

fattn_var fattn_op_linear(fattn_tape *t, fattn_var x, fattn_var w, fattn_var bias) {
    return fattn_op_custom(t, &fattni_op_linear, (fattn_var[]){x, w, bias}, 3,
                           &(fattni_linear){fattni_tape_reads_early(t, w)});
}

fattn_var fattn_op_linear_residual(fattn_tape *t, fattn_var x, fattn_var w, fattn_var bias, fattn_var residual) {
    return fattn_op_custom(t, &linear_residual, (fattn_var[]){x, w, bias, residual}, 4,
                           &(fattni_linear){fattni_tape_reads_early(t, w)});
}

fattn_var fattn_op_linear_gelu(fattn_tape *t, fattn_var x, fattn_var w, fattn_var bias) {
    if (t && !elements_of(t->ctx)->gelu_back) return fattn_op_gelu(t, fattn_op_linear(t, x, w, bias));
    return fattn_op_custom(t, &linear_gelu, (fattn_var[]){x, w, bias}, 3,
                           &(fattni_linear){fattni_tape_reads_early(t, w)});
}
