/* Flash attention forward on the CPU in FlashAttention-2's order (Dao 2023): blocks of rows in
   parallel, each once through all keys that it sees; O, max and sum stay in cache. fwd/README.md.
 */
#include "fwd/cpu/fwd_row_block.h"
#include "core/attention/kernel.h"

#include <stdio.h>

/* Up to MOST_BLOCKS neighbouring blocks of a head are one task, which takes each tile of keys
   through all of them while it is in cache. That pays most where keys lie a large power of two
   apart, and in 16 bits, where a tile is first converted to floats, an eighth of a block's time.
   The last blocks of a head stay tasks of their own, so that threads end at about the same time.
   A block's results do not depend on the task it is in. */
enum { MOST_BLOCKS = 4, LONE_PER_THREAD = 4 };

typedef struct forward {
    const fattni_problem *p;
    const fattni_cpu_kernels *k;
    fattni_fwd_layout layout;
    int64_t planes, blocks; /* heads of sequences; blocks of rows in the longest sequence */
    int64_t grouped;        /* blocks of a plane whose tasks have several */
    int64_t groups, tasks;  /* tasks of a plane for those, tasks in all */
} forward;

static forward plan_forward(const fattn_ctx *ctx, const fattni_problem *p) {
    forward f = {.p = p, .k = fattni_cpu_kernels_of(ctx, p->dtype), .planes = p->B * p->Hq};
    f.blocks = fattni_ceil_div(p->Sq, f.k->rows);
    const int64_t lone = fattni_ceil_div(LONE_PER_THREAD * ctx->cpu_threads, fattni_max(f.planes, 1));
    f.grouped = fattni_max(f.blocks - lone, 0);
    f.groups = fattni_ceil_div(f.grouped, MOST_BLOCKS);
    f.tasks = f.planes * (f.groups + f.blocks - f.grouped);
    f.layout = fattni_fwd_lay_out(p, f.k, fattni_clamp(f.grouped, 1, MOST_BLOCKS));
    return f;
}

/* Blocks of task n of a plane. Late rows see more keys when a mask is causal, so they come first:
   short tasks at the end leave no thread idle for long. */
static fattni_range blocks_of(const forward *f, int64_t n) {
    const bool group = n < f->groups;
    const int64_t before = group ? n * MOST_BLOCKS : f->grouped + n - f->groups;
    const int64_t count = group ? fattni_min(MOST_BLOCKS, f->grouped - before) : 1;
    return (fattni_range){f->blocks - before - count, f->blocks - before};
}

static void attend(void *arg, int64_t task, int thread) {
    const forward *const f = arg;
    const fattni_problem *const p = f->p;
    const int64_t plane = task % f->planes, b = plane / p->Hq, h = plane % p->Hq;
    const fattni_range blocks = blocks_of(f, task / f->planes);
    const fattni_sequence seq = fattni_sequence_of(p, b);
    char *const scratch = (char *)p->workspace + (size_t)thread * f->layout.bytes;
    fattni_fwd_rows r[MOST_BLOCKS];
    fattni_range seen[MOST_BLOCKS];
    int64_t count = 0;
    for (int64_t i0 = blocks.begin * f->k->rows; count < blocks.end - blocks.begin; ++count) {
        r[count] = fattni_fwd_rows_of(p, f->k, &f->layout, &seq, b, h, i0, scratch, count);
        if (r[count].rows <= 0) break; /* past the end of a shorter sequence */
        seen[count] = fattni_keys_of(&seq.band, i0, i0 + r[count].rows);
        fattni_fwd_load_q(&r[count]);
        fattni_fwd_start(&r[count]);
        i0 += f->k->rows;
    }
    if (count == 0) return;

    /* Tiles lie on one grid. The first block's keys begin first, the last one's end last. */
    const fattni_range keys = {seen[0].begin, seen[count - 1].end};
    for (int64_t j = keys.begin / FATTNI_TILE_KEYS * FATTNI_TILE_KEYS; j < keys.end; j += FATTNI_TILE_KEYS) {
        const int64_t end = j + FATTNI_TILE_KEYS;
        fattni_fwd_load_keys(r, (fattni_range){j, fattni_min(end, keys.end)});
        for (int64_t n = 0; n < count; ++n) {
            const fattni_range tile = {j, fattni_min(end, seen[n].end)};
            if (fattni_max(j, seen[n].begin) < tile.end) fattni_fwd_tile(&r[n], tile);
        }
    }
    for (int64_t n = 0; n < count; ++n) fattni_fwd_finish(&r[n]);
}

/* Every feature, every dtype. */
static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const forward f = plan_forward(ctx, p);
    out->workspace = (size_t)fattni_min(ctx->cpu_threads, f.tasks) * f.layout.bytes;
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_fwd_cpu_%s_%s", f.k->isa, fattn_dtype_name(p->dtype));
    return NULL;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    (void)plan;
    forward f = plan_forward(ctx, p);
    fattni_cpu_tasks(ctx, f.k, f.tasks, attend, &f);
    return FATTN_OK;
}

const fattni_kernel fattni_fwd_cpu = {
    .family = "fattn_fwd_cpu",
    .device = FATTN_CPU,
    .algorithms = 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH2,
    .plan = plan,
    .run = run,
};
