/* Flash attention forward on the CPU in FlashAttention-2's order (Dao 2023): blocks of rows in
   parallel, each once through all keys that it sees; O, max and sum stay in cache. fwd/README.md.
 */
#include "fwd_rows.h"
#include "kernel.h"

#include <stdio.h>

typedef struct forward {
    const fattni_problem *p;
    const fattni_cpu_kernels *k;
    fattni_fwd_layout at;
    int64_t blocks, tasks; /* blocks of rows in the longest sequence */
} forward;

static forward plan_forward(const fattn_ctx *ctx, const fattni_problem *p) {
    forward f = {.p = p, .k = fattni_cpu_kernels_of(ctx, p->dtype), .at = fattni_fwd_lay_out(p)};
    f.blocks = fattni_ceil_div(p->Sq, f.k->rows);
    f.tasks = f.blocks * p->B * p->Hq;
    return f;
}

/* Task: one block of rows of one head. Late rows see more keys when a mask is causal, so they come
   first: short tasks at the end leave no thread idle for long. */
static void attend(void *arg, int64_t task, int thread) {
    const forward *const f = arg;
    const fattni_problem *const p = f->p;
    const int64_t planes = p->B * p->Hq, plane = task % planes;
    const int64_t i0 = (f->blocks - 1 - task / planes) * f->k->rows;
    const fattni_sequence seq = fattni_sequence_of(p, plane / p->Hq);
    char *const scratch = (char *)p->workspace + (size_t)thread * f->at.bytes;
    const fattni_fwd_rows r =
        fattni_fwd_rows_of(p, f->k, &f->at, &seq, plane / p->Hq, plane % p->Hq, i0, scratch);
    if (r.rows <= 0) return;

    fattni_fwd_load_q(&r);
    fattni_fwd_start(&r);
    const fattni_range keys = fattni_keys_of(&seq.band, i0, i0 + r.rows);
    for (int64_t j = keys.begin; j < keys.end; j += FATTNI_TILE_KEYS)
        fattni_fwd_tile(&r, j, fattni_min(FATTNI_TILE_KEYS, keys.end - j));
    fattni_fwd_finish(&r);
}

/* Every feature, every dtype. */
static const char *refuses(const fattn_ctx *ctx, const fattni_problem *p) {
    (void)ctx, (void)p;
    return NULL;
}

static void plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const forward f = plan_forward(ctx, p);
    out->workspace = (size_t)fattni_min(ctx->cpu_threads, f.tasks) * f.at.bytes;
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_fwd_cpu_%s_%s", f.k->isa,
             fattn_dtype_name(p->dtype));
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p) {
    forward f = plan_forward(ctx, p);
    fattni_parallel(ctx, f.tasks, attend, &f);
    return FATTN_OK;
}

const fattni_kernel fattni_fwd_cpu = {
    .family = "fattn_fwd_cpu",
    .device = FATTN_CPU,
    .algorithms = 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH2,
    .refuses = refuses,
    .plan = plan,
    .run = run,
};
