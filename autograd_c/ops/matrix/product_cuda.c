/* Products through cuBLAS: all batches in one call. Those with one row by a kernel of their own. */
#include "autograd_c/ops/matrix/product.h"
#include "autograd_c/ops/matrix/row_product.h"
#include "autograd_c/ops/op_cuda.h"
#include "core/cuda/blas/blas.h"

static size_t workspace_of(const fattn_ctx *ctx, fattn_dtype operands, const fattni_gemm *first, int64_t batches) {
    (void)ctx, (void)operands, (void)first, (void)batches;
    return FATTNI_CUDA_BLAS_WORKSPACE;
}

static int64_t batch_stride(const fattni_rows *r) { return r->count > 1 ? r->stride[0] : 0; }

/* A row that is added to every row is a part of the product, or what C holds before; onto and gelu are a part of it, or
   left to the caller. */
static fattn_status run(fattn_ctx *ctx, const fattni_batched_product *p, void *workspace, bool *onto_added) {
    const fattni_gemm *const g = &p->first;
    fattni_cuda_gemm product = {.dtype = p->operands,
                                .c_dtype = g->dtype,
                                .trans_a = g->trans_a,
                                .trans_b = g->trans_b,
                                .tf32 = ctx->flags & FATTN_CTX_TF32,
                                .batches = p->c.count,
                                .M = g->M,
                                .N = g->N,
                                .K = g->K,
                                .a = g->a,
                                .b = g->b,
                                .c = g->c,
                                .lda = g->lda,
                                .ldb = g->ldb,
                                .ldc = g->ldc,
                                .stride_a = batch_stride(&p->a),
                                .stride_b = batch_stride(&p->b),
                                .stride_c = batch_stride(&p->c),
                                .alpha = 1,
                                .beta = g->row ? 0 : g->beta,
                                .row = g->row};
    bool added = false;
    *onto_added = false;
    if (fattni_cuda_is_row_product(&product, p->norm)) {
        product.gelu = p->gelu;
        if (p->gelu) *p->activated = true;
        if (fattni_onto_lies_as_c(p)) product.from = p->onto->data, *onto_added = true;
        return fattni_cuda_row_product(ctx, &product, p->early, p->norm);
    }
    if (p->norm) return fattn_ctx_fail(ctx, FATTN_E_STATE, "product: norm of what takes_norm refuses");
    if (p->gelu) {
        product.gelu = p->gelu;
        FATTNI_TRY(fattni_cuda_multiply(ctx, &product, workspace, p->activated));
        if (*p->activated) return FATTN_OK;
        product.gelu = NULL;
    }
    if (fattni_onto_lies_as_c(p)) {
        product.from = p->onto->data;
        FATTNI_TRY(fattni_cuda_multiply(ctx, &product, workspace, onto_added));
        if (*onto_added) return FATTN_OK;
        product.from = NULL;
    }
    FATTNI_TRY(fattni_cuda_multiply(ctx, &product, workspace, &added));
    if (!g->row || added) return FATTN_OK;
    const fattn_tensor row =
        fattn_tensor_view((void *)(uintptr_t)g->row, p->operands, ctx->device, ctx->device_id, 1, &g->N);
    const fattn_tensor *const t[] = {p->to, &row};
    FATTNI_TRY(fattni_cuda_each(ctx, FATTNI_PUT, t, 2, true, 0));
    product.row = NULL, product.beta = 1;
    return fattni_cuda_multiply(ctx, &product, workspace, NULL);
}

static bool takes_norm(const fattn_tensor *x, const fattn_tensor *w, const fattni_row_norm *norm) {
    const fattni_cuda_gemm g = {.dtype = (fattn_dtype)x->dtype,
                                .trans_b = true,
                                .batches = 1,
                                .M = 1,
                                .N = w->shape[0],
                                .K = w->shape[1],
                                .a = x->data,
                                .b = w->data,
                                .ldb = w->stride[0],
                                .alpha = 1};
    return w->stride[1] == 1 && w->stride[0] >= w->shape[1] && fattni_cuda_is_row_product(&g, norm);
}

const fattni_product_code fattni_products_cuda = {
    .one_stride = true, .takes_norm = takes_norm, .workspace = workspace_of, .run = run};
