/* The choice among the tile kernels, and tasks that use them. */
#include "core/cpu/tile.h"

const fattni_cpu_kernels *fattni_cpu_kernels_of(const fattn_ctx *ctx, fattn_dtype dtype) {
    const int type = dtype == FATTN_F64;
#ifdef FATTNI_HAVE_BF16_PRODUCTS
    if (dtype == FATTN_BF16 && !(ctx->flags & FATTN_CTX_F32_PRODUCTS)) {
        if (ctx->isa >= FATTNI_ISA_AMX) return &fattni_cpu_amx;
        if (ctx->isa >= FATTNI_ISA_AVX512BF16) return &fattni_cpu_avx512bf16;
    }
#endif
#if defined(__x86_64__)
    if (ctx->isa >= FATTNI_ISA_AVX512) return &fattni_cpu_avx512[type];
    if (ctx->isa >= FATTNI_ISA_AVX2) return &fattni_cpu_avx2[type];
#else
    (void)ctx;
#endif
    return &fattni_cpu_baseline[type];
}

typedef struct products {
    const fattni_cpu_kernels *k;
    fattni_task task;
    void *arg;
} products;

static void run_task(void *arg, int64_t index, int thread) {
    const products *const p = arg;
    p->k->begin();
    p->task(p->arg, index, thread);
    p->k->end();
}

void fattni_cpu_tasks(const fattn_ctx *ctx, const fattni_cpu_kernels *k, int64_t count, fattni_task task, void *arg) {
    products p = {k, task, arg};
    if (k->begin)
        fattni_parallel(ctx, count, run_task, &p);
    else
        fattni_parallel(ctx, count, task, arg);
}
