/* Products through OpenBLAS or oneDNN: K of one product is split, several products are tasks side by side. Those of
   BF16 operands are core/cpu/gemm_bf16.h's. */
#include "autograd_c/ops/matrix/product.h"
#include "core/cpu/gemm_bf16.h"

static size_t workspace_of(const fattn_ctx *ctx, fattn_dtype operands, const fattni_gemm *first, int64_t batches) {
    if (operands == FATTN_BF16) return fattni_room(fattni_bf16_workspace(ctx, first, batches));
    return batches == 1 ? fattni_room(fattni_gemm_workspace(first)) : 0;
}

typedef struct job {
    const fattn_ctx *ctx;
    const fattni_batched_product *p;
    int64_t blocks; /* of a batch */
} job;

static void run_block(void *arg, int64_t task, int thread) {
    (void)thread;
    const job *j = arg;
    fattni_gemm g = j->p->first;
    const int64_t batch = task / j->blocks, size = (int64_t)fattn_dtype_size(g.dtype);
    g.a = (const char *)g.a + fattni_row(&j->p->a, batch) * size;
    g.b = (const char *)g.b + fattni_row(&j->p->b, batch) * size;
    g.c = (char *)g.c + fattni_row(&j->p->c, batch) * size;
    fattni_gemm_block(j->ctx, &g, task % j->blocks);
}

static fattn_status run(fattn_ctx *ctx, const fattni_batched_product *p, void *workspace, bool *onto_added) {
    *onto_added = false;
    if (p->operands == FATTN_BF16)
        return fattni_bf16_multiply(ctx, &(fattni_bf16_products){p->first, p->a, p->b, p->c}, workspace);
    if (p->c.count == 1) {
        fattni_gemm g = p->first;
        const size_t bytes = fattni_gemm_workspace(&g);
        *onto_added = bytes == 0 && fattni_onto_lies_as_c(p); /* parts of K begin with 0 */
        if (*onto_added) g.onto = p->onto->data;
        g.workspace = fattni_carve(&workspace, bytes);
        fattni_gemm_cpu(ctx, &g);
    } else {
        job j = {.ctx = ctx, .p = p, .blocks = fattni_gemm_blocks(&p->first)};
        fattni_parallel(ctx, p->c.count * j.blocks, run_block, &j);
    }
    return FATTN_OK;
}

static size_t sum_rows_workspace(const fattn_tensor *x) {
    return fattni_bf16_column_sums_workspace(x->shape[0], x->shape[1]);
}

static void sum_rows(fattn_ctx *ctx, const fattn_tensor *d, bool fresh, const fattn_tensor *x, void *workspace) {
    fattni_bf16_column_sums(ctx, x->data, x->shape[0], x->shape[1], x->stride[0], d->data, (fattn_dtype)d->dtype, fresh,
                            workspace);
}

const fattni_product_code fattni_products_cpu = {.takes_bf16 = fattni_bf16_takes,
                                                 .workspace = workspace_of,
                                                 .run = run,
                                                 .sum_rows_workspace = sum_rows_workspace,
                                                 .sum_rows = sum_rows};
