/* Products through OpenBLAS: K of one product is split, several products are tasks side by side. */
#include "autograd_c/ops/matrix/product.h"

static size_t workspace_of(const fattni_gemm *first, int64_t batches) {
    return batches == 1 ? fattni_room(fattni_gemm_workspace(first)) : 0;
}

typedef struct job {
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
    fattni_gemm_block(&g, task % j->blocks);
}

static fattn_status run(fattn_ctx *ctx, const fattni_batched_product *p, void *workspace) {
    if (p->c.count == 1) {
        fattni_gemm g = p->first;
        g.workspace = fattni_carve(&workspace, fattni_gemm_workspace(&g));
        fattni_gemm_cpu(ctx, &g);
    } else {
        job j = {.p = p, .blocks = fattni_gemm_blocks(&p->first)};
        fattni_parallel(ctx, p->c.count * j.blocks, run_block, &j);
    }
    return FATTN_OK;
}

const fattni_product_code fattni_products_cpu = {.workspace = workspace_of, .run = run};
