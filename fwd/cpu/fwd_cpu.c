/* Flash attention forward on the CPU in FlashAttention-2's order (Dao 2023): blocks of rows in
   parallel, each once through all keys that it sees; O, max and sum stay in cache. fwd/README.md.
 */
#include "fwd/cpu/fwd_cpu.h"

#include "fwd/cpu/fwd_parts.h"
#include "core/attention/kernel.h"

#include <stdatomic.h>
#include <stdio.h>

/* Up to MOST_BLOCKS neighbouring blocks of a head are one piece of work, which takes each tile of keys
   through all of them while it is in cache. That pays most where keys lie a large power of two
   apart, and in 16 bits, where a tile is first converted to floats, an eighth of a block's time.
   The last blocks of a head stay pieces of their own, so that threads end at about the same time.
   Threads begin at different heads, stay while there is work, for K and V are in their cache then, and go on with the
   next ones. A block's results do not depend on the piece or the thread. */
enum { MOST_BLOCKS = 4, LONE_PER_THREAD = 4 };

/* 16-bit products take a fraction of that time. So K and V of a head are copied into their layout once, by the threads
   that begin with it, where that takes at most so many bytes of the workspace for all heads. */
enum { MOST_COPIED_BYTES = 64 << 20 };

typedef struct forward {
    const fattni_problem *p;
    const fattni_cpu_kernels *k;
    fattni_fwd_layout layout;
    fattni_parts parts;     /* for sequences with few rows, one head at a time */
    size_t scratch_bytes;   /* of a thread */
    int64_t planes, blocks; /* heads of sequences; blocks of rows in the longest sequence */
    int64_t grouped;        /* blocks of a plane whose pieces have several */
    int64_t groups, pieces; /* of a plane: pieces for those, pieces in all */
    int64_t threads;        /* that have scratch */
    int64_t copied;         /* tiles of keys of a head, if copied once for all pieces, else 0 */
    size_t keys, counters;  /* offsets: K and V of all tiles; counters */
    size_t shared_bytes;    /* of both */
} forward;

/* What threads share. */
typedef struct counter {
    atomic_llong pieces;       /* of a plane: begun */
    atomic_llong tiles, ready; /* of a key head, at its first plane: tiles of keys begun, done */
} counter;

static size_t tile_bytes(const forward *f) {
    return fattni_fwd_key_bytes(f->p, f->k) + fattni_fwd_value_bytes(f->p, f->k);
}

static forward plan_forward(const fattn_ctx *ctx, const fattni_problem *p) {
    forward f = {.p = p, .k = fattni_cpu_kernels_of(ctx, p->dtype), .planes = p->B * p->Hq};
    f.blocks = fattni_ceil_div(p->Sq, f.k->rows);
    const int64_t lone = fattni_ceil_div(LONE_PER_THREAD * ctx->cpu_threads, fattni_max(f.planes, 1));
    f.grouped = fattni_max(f.blocks - lone, 0);
    f.groups = fattni_ceil_div(f.grouped, MOST_BLOCKS);
    f.pieces = f.groups + f.blocks - f.grouped;
    f.threads = fattni_min(ctx->cpu_threads, f.planes * f.pieces);
    f.layout = fattni_fwd_lay_out(p, f.k, fattni_clamp(f.grouped, 1, MOST_BLOCKS));
    f.scratch_bytes = f.layout.bytes;
    if (p->flags & FATTN_FP8) {
        f.parts.few = -1;
    } else if (p->packed || p->seqlens_q.present || p->Sq <= fattni_few_rows(ctx, p)) {
        f.parts = fattni_parts_of(ctx, p, 1);
        const size_t bytes = f.parts.bytes + f.parts.state_bytes;
        if (bytes > f.scratch_bytes) f.scratch_bytes = bytes;
    }
    const int64_t tiles = fattni_ceil_div(p->Sk, FATTNI_TILE_KEYS);
    const size_t bytes = (size_t)(p->B * p->Hkv) * (size_t)tiles * tile_bytes(&f);
    const bool once = f.pieces * p->group > 1; /* else no piece repeats it */
    if (f.k->round && once && bytes <= MOST_COPIED_BYTES) f.copied = tiles;
    f.keys = fattni_append(&f.shared_bytes, f.copied ? bytes : 0);
    f.counters = fattni_append(&f.shared_bytes, (size_t)f.planes * sizeof(counter));
    return f;
}

static counter *counter_of(const forward *f, int64_t plane) {
    return (counter *)((char *)f->p->workspace + f->counters) + plane;
}

static char *scratch_of(const forward *f, int thread) {
    return (char *)f->p->workspace + f->shared_bytes + (size_t)thread * f->scratch_bytes;
}

static fattni_fwd_room copied_tile(const forward *f, int64_t b, int64_t g, int64_t tile, char *scratch) {
    const int64_t n = (b * f->p->Hkv + g) * f->copied + tile;
    char *const at = (char *)f->p->workspace + f->keys + (size_t)n * tile_bytes(f);
    return (fattni_fwd_room){at, at + fattni_fwd_key_bytes(f->p, f->k), scratch + f->layout.gathered};
}

/* Takes part in copying K and V of key head g, until all is done. */
static void copy_keys(const forward *f, int64_t b, int64_t g, int thread) {
    const fattni_problem *const p = f->p;
    counter *const c = counter_of(f, b * p->Hq + g * p->group);
    if (atomic_load_explicit(&c->ready, memory_order_acquire) == f->copied) return;
    const fattni_sequence seq = fattni_sequence_of(p, b);
    if (fattni_in_parts(&f->parts, &seq)) return; /* reads the caller's */
    for (int64_t tile; (tile = atomic_fetch_add(&c->tiles, 1)) < f->copied;) {
        const fattni_range keys = {tile * FATTNI_TILE_KEYS, fattni_min((tile + 1) * FATTNI_TILE_KEYS, seq.band.Sk)};
        const fattni_fwd_room to = copied_tile(f, b, g, tile, scratch_of(f, thread));
        if (keys.begin < keys.end) fattni_fwd_load_keys(p, f->k, &seq, g, keys, &to);
        atomic_fetch_add_explicit(&c->ready, 1, memory_order_release);
    }
    for (int n = 0; atomic_load_explicit(&c->ready, memory_order_acquire) < f->copied; ++n) fattni_pause(n);
}

/* Blocks of piece n of a plane. Late rows see more keys when a mask is causal, so they come first:
   short pieces at the end leave no thread idle for long. */
static fattni_range blocks_of(const forward *f, int64_t n) {
    const bool group = n < f->groups;
    const int64_t before = group ? n * MOST_BLOCKS : f->grouped + n - f->groups;
    const int64_t count = group ? fattni_min(MOST_BLOCKS, f->grouped - before) : 1;
    return (fattni_range){f->blocks - before - count, f->blocks - before};
}

static void attend(const forward *f, int64_t plane, int64_t piece, int thread) {
    const fattni_problem *const p = f->p;
    const int64_t b = plane / p->Hq, h = plane % p->Hq;
    const fattni_range blocks = blocks_of(f, piece);
    const fattni_sequence seq = fattni_sequence_of(p, b);
    char *const scratch = scratch_of(f, thread);
    if (fattni_in_parts(&f->parts, &seq)) {
        if (blocks.begin == 0) fattni_parts_attend(&f->parts, &seq, b, h, scratch);
        return;
    }
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
        fattni_fwd_room room = r->room;
        if (f->copied) room = copied_tile(f, b, h / p->group, j / FATTNI_TILE_KEYS, scratch);
        const fattni_range all = {j, fattni_min(end, keys.end)};
        const fattni_fwd_keys operands = f->copied ? fattni_fwd_loaded_keys(p, f->k, &room)
                                                   : fattni_fwd_load_keys(p, f->k, &seq, h / p->group, all, &room);
        for (int64_t n = 0; n < count; ++n) {
            const fattni_range tile = {j, fattni_min(end, seen[n].end)};
            if (fattni_max(j, seen[n].begin) < tile.end) fattni_fwd_tile(&r[n], tile, &operands);
        }
    }
    for (int64_t n = 0; n < count; ++n) fattni_fwd_finish(&r[n]);
}

/* Task: one thread's share, from a plane of its own on. */
static void run_planes(void *arg, int64_t task, int thread) {
    const forward *const f = arg;
    for (int64_t n = 0; n < f->planes; ++n) {
        const int64_t plane = (task * f->planes / f->threads + n) % f->planes;
        atomic_llong *const next = &counter_of(f, plane)->pieces;
        if (atomic_load_explicit(next, memory_order_relaxed) >= f->pieces) continue;
        if (f->copied) copy_keys(f, plane / f->p->Hq, plane % f->p->Hq / f->p->group, thread);
        for (int64_t piece; (piece = atomic_fetch_add(next, 1)) < f->pieces;) attend(f, plane, piece, thread);
    }
}

size_t fattni_fwd_blocks_workspace(const fattn_ctx *ctx, const fattni_problem *p) {
    const forward f = plan_forward(ctx, p);
    return f.shared_bytes + (size_t)f.threads * f.scratch_bytes;
}

void fattni_fwd_blocks(const fattn_ctx *ctx, const fattni_problem *p) {
    forward f = plan_forward(ctx, p);
    for (int64_t n = 0; n < f.planes; ++n) {
        counter *const c = counter_of(&f, n);
        atomic_init(&c->pieces, 0), atomic_init(&c->tiles, 0), atomic_init(&c->ready, 0);
    }
    const fattni_stage stage = {f.threads, run_planes};
    fattni_cpu_stages(ctx, f.threads, f.k, &stage, 1, &f);
}

/* Every feature, every dtype. */
static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    out->workspace = fattni_fwd_blocks_workspace(ctx, p);
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_fwd_cpu_%s_%s", fattni_cpu_kernels_of(ctx, p->dtype)->isa,
             fattn_dtype_name(p->dtype));
    return NULL;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    (void)plan;
    fattni_fwd_blocks(ctx, p);
    return FATTN_OK;
}

const fattni_kernel fattni_fwd_cpu = {
    .family = "fattn_fwd_cpu",
    .device = FATTN_CPU,
    .algorithms = 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH2,
    .plan = plan,
    .run = run,
};
