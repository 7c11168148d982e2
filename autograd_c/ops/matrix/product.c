/* Products of strided tensors, as the BLAS of the context's device takes them. */
#include "autograd_c/ops/matrix/product.h"

/* The last two dimensions as a BLAS reads them: rows of a pitch, possibly of the transpose. False
   when neither dimension is contiguous, rows overlap, or the pitch does not fit its integers. */
static bool as_matrix(const fattn_tensor *t, bool *transposed, int64_t *pitch) {
    const int64_t rows = t->shape[t->ndim - 2], columns = t->shape[t->ndim - 1];
    const int64_t down = t->stride[t->ndim - 2], across = t->stride[t->ndim - 1];
    *transposed = false;
    *pitch = rows > 1 ? down : columns;
    if ((columns <= 1 || across == 1) && *pitch >= columns && *pitch <= INT32_MAX) return true;
    *transposed = true;
    *pitch = columns > 1 ? across : rows;
    return (rows <= 1 || down == 1) && *pitch >= rows && *pitch <= INT32_MAX;
}

/* Matrices over the leading dimensions, as rows of one element. */
static fattni_rows batches(const fattn_tensor *t) {
    fattn_tensor leading = *t;
    leading.ndim -= 1;
    leading.shape[leading.ndim - 1] = 1;
    return fattni_rows_of(&leading);
}

static const fattni_product_code *code_of(const fattn_ctx *ctx) { return fattni_op_device_of(ctx)->products; }

static bool walks(const fattn_ctx *ctx, const fattn_tensor *t) {
    const fattni_rows r = batches(t);
    return !code_of(ctx)->one_stride || (r.n == 1 && r.stride[0] >= 0);
}

static bool is_readable(const fattn_ctx *ctx, const fattn_tensor *t) {
    bool transposed;
    int64_t pitch;
    return as_matrix(t, &transposed, &pitch) && walks(ctx, t);
}

static bool is_writable(const fattn_ctx *ctx, const fattn_tensor *t) {
    bool transposed;
    int64_t pitch;
    return as_matrix(t, &transposed, &pitch) && !transposed && walks(ctx, t);
}

static fattni_gemm shape_of(const fattni_product *p) {
    const int last = p->c->ndim - 1;
    return (fattni_gemm){.dtype = (fattn_dtype)p->c->dtype,
                         .M = p->c->shape[last - 1],
                         .N = p->c->shape[last],
                         .K = p->a->shape[p->trans_a ? last - 1 : last],
                         .alpha = 1,
                         .row = p->row};
}

fattn_status fattni_choose_products(fattn_op_call *c, int64_t M, int64_t N, int64_t K) {
    const fattni_product_code *const code = code_of(c->ctx);
    bool takes;
    if (!code->takes_bf16 || c->in[0].dtype != FATTN_BF16) return FATTN_OK;
    FATTNI_TRY(code->takes_bf16(c->ctx, M, N, K, &takes));
    if (takes) c->flags &= ~(uint32_t)FATTN_OP_F32_ON_CPU;
    return FATTN_OK;
}

size_t fattni_product_workspace(const fattn_ctx *ctx, const fattni_product *p) {
    size_t bytes = 0;
    if (!is_readable(ctx, p->a)) bytes += fattni_room(fattni_tensor_bytes(p->a));
    if (!is_readable(ctx, p->b)) bytes += fattni_room(fattni_tensor_bytes(p->b));
    if (!is_writable(ctx, p->c)) bytes += fattni_room(fattni_widest_bytes(p->c));
    const fattni_gemm g = shape_of(p);
    return bytes + code_of(ctx)->workspace(ctx, (fattn_dtype)p->a->dtype, &g, batches(p->c).count);
}

/* t, or a row-major copy of it. */
static fattn_status pack(fattn_ctx *ctx, const fattn_tensor *t, void **workspace, fattn_tensor *out) {
    *out = *t;
    if (is_readable(ctx, t)) return FATTN_OK;
    *out = fattni_row_major(t, fattni_carve(workspace, fattni_tensor_bytes(t)));
    return fattn_tensor_copy(ctx, out, t);
}

fattn_status fattni_product_run(fattn_ctx *ctx, const fattni_product *p, void *workspace) {
    fattn_tensor a, b, c = *p->c;
    FATTNI_TRY(pack(ctx, p->a, &workspace, &a));
    FATTNI_TRY(pack(ctx, p->b, &workspace, &b));
    const bool direct = is_writable(ctx, p->c);
    if (!direct) c = fattni_row_major(p->c, fattni_carve(&workspace, fattni_widest_bytes(p->c)));
    if (!direct && ctx->device == FATTN_CPU && c.dtype == FATTN_BF16) c.dtype = FATTN_F32; /* rounded once, below */
    bool flip_a, flip_b, flip_c;
    fattni_batched_product all = {.first = shape_of(p),
                                  .operands = (fattn_dtype)a.dtype,
                                  .a = batches(&a),
                                  .b = batches(&b),
                                  .c = batches(&c),
                                  .to = &c,
                                  .onto = direct ? p->onto : NULL,
                                  .gelu = direct && p->gelu ? p->gelu->data : NULL,
                                  .activated = p->activated,
                                  .early = p->early && b.data == p->b->data,
                                  .norm = p->norm};
    fattni_gemm *const g = &all.first;
    g->dtype = (fattn_dtype)c.dtype;
    as_matrix(&a, &flip_a, &g->lda);
    as_matrix(&b, &flip_b, &g->ldb);
    as_matrix(&c, &flip_c, &g->ldc);
    g->trans_a = p->trans_a ^ flip_a;
    g->trans_b = p->trans_b ^ flip_b;
    g->beta = direct && p->add;
    g->a = a.data, g->b = b.data, g->c = c.data;
    bool onto_added = false;
    if (p->gelu) *p->activated = false;
    FATTNI_TRY(code_of(ctx)->run(ctx, &all, workspace, &onto_added));
    if (!direct) FATTNI_TRY(fattni_accumulate(ctx, p->c, &c, !p->add));
    return p->onto && !onto_added ? fattni_accumulate(ctx, p->c, p->onto, false) : FATTN_OK;
}

size_t fattni_sum_rows_workspace(const fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x) {
    const fattni_product_code *const code = code_of(ctx);
    if (code->sum_rows && x->dtype == FATTN_BF16) return code->sum_rows_workspace(x);
    return fattni_reduce_workspace(ctx, d, x);
}

fattn_status fattni_sum_rows(fattn_ctx *ctx, const fattn_tensor *d, bool fresh, const fattn_tensor *x,
                             void *workspace) {
    const fattni_product_code *const code = code_of(ctx);
    if (!code->sum_rows || x->dtype != FATTN_BF16) return fattni_reduce(ctx, d, fresh, x, NULL, workspace);
    code->sum_rows(ctx, d, fresh, x, workspace);
    return FATTN_OK;
}

fattni_flat fattni_flatten(const fattn_tensor *x) {
    const fattni_rows r = fattni_rows_of(x);
    fattni_flat f = {.t = *x, .in_place = r.n == 1};
    f.t.ndim = 2;
    f.t.shape[0] = r.count, f.t.shape[1] = r.columns;
    f.t.stride[0] = r.stride[0], f.t.stride[1] = r.step;
    if (!f.in_place) f.t = fattni_row_major(&f.t, NULL);
    return f;
}

void fattni_flat_place(fattni_flat *f, void **workspace) {
    if (!f->in_place) f->t.data = fattni_carve(workspace, fattni_tensor_bytes(&f->t));
}

fattn_status fattni_flat_read(fattn_ctx *ctx, fattni_flat *f, const fattn_tensor *x, void **workspace) {
    if (f->in_place) return FATTN_OK;
    fattni_flat_place(f, workspace);
    const fattn_tensor copy = fattni_row_major(x, f->t.data);
    return fattn_tensor_copy(ctx, &copy, x);
}

fattn_status fattni_flat_add_to(fattn_ctx *ctx, const fattni_flat *f, const fattn_tensor *d, bool fresh) {
    const fattn_tensor copy = fattni_row_major(d, f->t.data);
    return fattni_accumulate(ctx, d, &copy, fresh);
}
