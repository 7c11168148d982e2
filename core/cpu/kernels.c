/* The choice among the tile kernels, and tasks that use them. */
#include "core/cpu/tile.h"

#include <stdatomic.h>

const fattni_cpu_kernels *fattni_cpu_kernels_of(const fattn_ctx *ctx, fattn_dtype dtype) {
    const int type = dtype == FATTN_F64;
#ifdef FATTNI_HAVE_NARROW_PRODUCTS
    if (!(ctx->flags & FATTN_CTX_F32_PRODUCTS)) {
        if (dtype == FATTN_F16 && ctx->isa >= FATTNI_ISA_AMXFP16) return &fattni_cpu_amxfp16;
        if (dtype == FATTN_BF16 && ctx->isa >= FATTNI_ISA_AMX) return &fattni_cpu_amx;
        if (dtype == FATTN_BF16 && ctx->isa >= FATTNI_ISA_AVX512BF16) return &fattni_cpu_avx512bf16;
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

typedef struct stages {
    const fattni_cpu_kernels *k;
    const fattni_stage *stages;
    void *arg;
    atomic_llong done; /* tasks */
} stages;

static void run_task(void *arg, int64_t index, int thread) {
    stages *const s = arg;
    const fattni_stage *stage = s->stages;
    int64_t before = 0; /* tasks of the stages before */
    for (; index - before >= stage->count; ++stage) before += stage->count;
    for (int n = 0; atomic_load_explicit(&s->done, memory_order_acquire) < before; ++n) fattni_pause(n);
    if (s->k->begin) s->k->begin();
    stage->run(s->arg, index - before, thread);
    if (s->k->end) s->k->end();
    atomic_fetch_add_explicit(&s->done, 1, memory_order_release);
}

void fattni_cpu_stages(const fattn_ctx *ctx, int64_t threads, const fattni_cpu_kernels *k, const fattni_stage *list,
                       int count, void *arg) {
    stages s = {k, list, arg, 0};
    int64_t tasks = 0;
    for (int n = 0; n < count; ++n) tasks += list[n].count;
    fattni_parallel_on(ctx, threads, tasks, run_task, &s);
}
