/* Products through cuBLAS: all batches in one call. */
#include "autograd_c/ops/matrix/product.h"
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

const fattni_product_code fattni_products_cuda = {.one_stride = true, .workspace = workspace_of, .run = run};
