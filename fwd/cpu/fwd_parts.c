#include "fwd/cpu/fwd_parts.h"
#include "core/attention/kernel.h"
#include "core/attention/unified.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* States of all parts take at most so many bytes; else threads share heads only (fwd_cpu.c), with the same bits. */
static const double MOST_STATE_BYTES = 1 << 28;

int64_t fattni_few_rows(const fattn_ctx *ctx, const fattni_problem *p) {
    return fattni_cpu_kernels_of(ctx, p->dtype)->round ? 4 : 8;
}

fattni_parts fattni_parts_of(const fattn_ctx *ctx, const fattni_problem *p, int64_t together) {
    fattni_parts f = {.p = p, .k = fattni_cpu_kernels_of(ctx, fattni_real(p)), .few = fattni_few_rows(ctx, p)};
    const size_t size = fattn_dtype_size(f.k->dtype);
    const int64_t rows = fattni_clamp(p->Sq, 1, f.few);
    const bool alike = !p->alibi.present && !p->bias.present && !p->drop_T;
    f.heads = alike ? fattni_min(f.k->rows / rows, together) : 1;
    f.tiles = fattni_ceil_div(together, f.heads);
    f.q_width = fattni_round_up(p->D, f.k->lanes);
    f.o_width = fattni_round_up(p->Dv, f.k->lanes);
    fattni_append(&f.state_bytes, (size_t)(f.heads * rows * f.o_width) * size);
    f.max = fattni_append(&f.state_bytes, fattni_row_bytes(f.k));
    f.sum = fattni_append(&f.state_bytes, fattni_row_bytes(f.k));
    f.layout = fattni_fwd_lay_out(p, f.k, 1);
    f.bytes = f.layout.bytes;
    f.q = fattni_append(&f.bytes, (size_t)(together * rows * f.q_width) * size);
    f.o = fattni_append(&f.bytes, (size_t)(rows * f.o_width) * size);
    return f;
}

/* Parts with a key that some row sees. */
static fattni_range parts_of(const fattni_sequence *seq) {
    const fattni_range keys = fattni_keys_of(&seq->band, 0, seq->band.Sq);
    if (keys.begin >= keys.end) return (fattni_range){0, 0};
    return (fattni_range){keys.begin / FATTNI_PART_KEYS, fattni_ceil_div(keys.end, FATTNI_PART_KEYS)};
}

/* Row i of head n of a tile is row n Sq + i of it. Masked scores become -inf here, so that the tile's kernels see a
   rectangle: diagonals cross few tiles. */
static void mask(const fattni_score_tile *at, void *s) {
    const fattni_band *const band = &at->seq->band;
    for (int64_t r = 0; r < at->tile.rows; ++r)
        for (int64_t j = 0; j < at->tile.keys; ++j)
            if (!fattni_visible(band, r % band->Sq, at->j0 + j))
                fattni_store(s, at->k->dtype, j * at->k->rows + r, -INFINITY);
}

/* The maximum that FATTN_UNIFIED_MAX puts in place of those of rows, in units of scores. */
static double unified_max(const fattni_parts *f) {
    const double max = f->p->unified_max / fattni_score_unit(f->p);
    return f->k->dtype == FATTN_F32 ? (double)(float)max : max;
}

/* A step of the online softmax, as fattni_fwd_tile, or with the unified maximum. */
static void take_keys(const fattni_parts *f, const fattni_score_tile *at, bool unified, const void *q, char *state,
                      char *scratch) {
    const fattni_problem *const p = f->p;
    const fattni_tile *const t = &at->tile;
    void *const s = scratch + f->layout.s, *const decay = scratch + f->layout.decay;
    void *const extra = scratch + f->layout.extra;
    f->k->few_scores(t, p->D, p->dtype, at->key, at->key_stride, q, f->q_width, s);
    fattni_adjust(at, extra, s, NULL);
    if (!fattni_all_visible(&at->seq->band, 0, at->seq->band.Sq, at->j0, at->j0 + t->keys)) mask(at, s);
    if (unified)
        f->k->exponentials(t, fattni_log2_factor(p), unified_max(f), s, state + f->sum);
    else
        f->k->softmax(t, fattni_log2_factor(p), s, state + f->max, state + f->sum, decay);
    if (p->drop_T) {
        fattni_keep_mask(at, p->keep_scale, extra);
        f->k->multiply(t, extra, s);
    }
    f->k->few_add(t, p->Dv, p->dtype, at->value, at->value_stride, s, decay, state, f->o_width);
}

/* Whether results of a part with the unified maximum can be used, for `rows` rows of a tile. */
static bool is_in_range(const fattni_parts *f, const char *state, int64_t rows) {
    const fattn_dtype type = f->k->dtype;
    const bool wide = type == FATTN_F64;
    const double least = wide ? FATTNI_UNIFIED_LEAST_SUM_F64 : (double)FATTNI_UNIFIED_LEAST_SUM;
    const double most = wide ? FATTNI_UNIFIED_MOST_SUM_F64 : (double)FATTNI_UNIFIED_MOST_SUM;
    const double most_o = wide ? FATTNI_UNIFIED_MOST_O_F64 : (double)FATTNI_UNIFIED_MOST_O;
    bool good = true;
    for (int64_t i = 0; i < rows; ++i) {
        const double sum = fattni_load(state + f->sum, type, i);
        good = good && sum > least && sum < most;
        for (int64_t d = 0; good && d < f->p->Dv; ++d)
            good = fabs(fattni_load(state, type, i * f->o_width + d)) < most_o;
    }
    return good;
}

/* One part of the keys for heads [h, h + count), which read each tile of keys while it is in cache. */
static void take_part_by(const fattni_parts *f, const fattni_sequence *seq, int64_t b, int64_t h, int64_t count,
                         int64_t part, bool unified, char *states, char *scratch) {
    const fattni_problem *const p = f->p;
    const fattn_dtype type = f->k->dtype;
    const int64_t Sq = seq->band.Sq, row = f->q_width * (int64_t)fattn_dtype_size(type);
    const char *const q = scratch + f->q;
    const double max = unified ? unified_max(f) : -INFINITY;
    for (int64_t i = 0; i < f->k->rows && unified; ++i) fattni_store(scratch + f->layout.decay, type, i, 1);
    for (int64_t n = 0; n < f->tiles; ++n) {
        char *const state = states + (size_t)n * f->state_bytes;
        memset(state, 0, f->state_bytes);
        for (int64_t i = 0; i < f->k->rows; ++i) fattni_store(state + f->max, type, i, max);
    }
    memset(scratch + f->layout.s, 0, FATTNI_TILE_BYTES); /* kernels compute whole vectors of rows */
    const fattni_range seen = fattni_keys_of(&seq->band, 0, Sq);
    const int64_t end = fattni_min(seen.end, (part + 1) * FATTNI_PART_KEYS);
    for (int64_t j = part * FATTNI_PART_KEYS; j < end; j += FATTNI_TILE_KEYS) {
        const int64_t begin = fattni_max(j, seen.begin), keys = fattni_min(end, j + FATTNI_TILE_KEYS) - begin;
        if (keys <= 0) continue;
        const fattni_range range = {begin, begin + keys};
        const fattni_fwd_keys x = fattni_fwd_find_keys(p, seq, h / p->group, range, scratch + f->layout.gathered);
        for (int64_t n = 0; n < f->tiles; ++n) {
            const int64_t first = n * f->heads, rows = fattni_min(f->heads, count - first) * Sq;
            const fattni_score_tile at = {.p = p,
                                          .k = f->k,
                                          .seq = seq,
                                          .b = b,
                                          .h = h + first,
                                          .j0 = begin,
                                          .tile = {rows, keys, -FATTNI_UNBOUNDED, FATTNI_UNBOUNDED},
                                          .key = x.key,
                                          .value = x.value,
                                          .key_stride = x.key_stride,
                                          .value_stride = x.value_stride};
            take_keys(f, &at, unified, q + first * Sq * row, states + (size_t)n * f->state_bytes, scratch);
        }
    }
}

/* The same with the unified maximum, unless some row's results are out of range. */
static void take_part(const fattni_parts *f, const fattni_sequence *seq, int64_t b, int64_t h, int64_t count,
                      int64_t part, char *states, char *scratch) {
    const fattni_problem *const p = f->p;
    const int64_t Sq = seq->band.Sq, row = f->q_width * (int64_t)fattn_dtype_size(f->k->dtype);
    for (int64_t n = 0; n < count; ++n)
        f->k->widen(Sq, p->D, p->dtype, fattni_at(&p->q, seq->batch, h + n, seq->q0), p->q.s[2],
                    scratch + f->q + n * Sq * row, f->q_width);
    bool good = p->flags & FATTN_UNIFIED_MAX;
    if (good) take_part_by(f, seq, b, h, count, part, true, states, scratch);
    for (int64_t n = 0; good && n < f->tiles; ++n)
        good = is_in_range(f, states + (size_t)n * f->state_bytes, fattni_min(f->heads, count - n * f->heads) * Sq);
    if (!good) take_part_by(f, seq, b, h, count, part, false, states, scratch);
}

/* O, maximum and sum of the rows r with those of a part, of which they are rows first, first + 1, ..: both are scaled
   by exp(its maximum - the larger one). A part that saw nothing changes nothing: no inf - inf. */
static void add_part(const fattni_parts *f, const fattni_fwd_rows *r, const char *state, int64_t first, char *o) {
    const fattn_dtype type = f->k->dtype;
    const double unit = fattni_score_unit(f->p);
    const size_t row = (size_t)f->o_width * fattn_dtype_size(type);
    const fattni_tile one = {1, 1, -FATTNI_UNBOUNDED, FATTNI_UNBOUNDED};
    for (int64_t i = 0; i < r->rows; ++i) {
        const double sum = fattni_load(state + f->sum, type, first + i);
        if (sum == 0) continue;
        const double max = fattni_load(state + f->max, type, first + i);
        const double old_max = fattni_load(r->max, type, i), old_sum = fattni_load(r->sum, type, i);
        const double top = max > old_max ? max : old_max;
        const double weight = exp(unit * (max - top)), old_weight = old_sum == 0 ? 0 : exp(unit * (old_max - top));
        fattni_store(r->max, type, i, top);
        fattni_store(r->sum, type, i, old_weight * old_sum + weight * sum);
        fattni_store(r->s, type, 0, weight);
        fattni_store(r->decay, type, 0, old_weight);
        f->k->few_add(&one, f->p->Dv, type, state + (size_t)(first + i) * row, 0, r->s, r->decay, o + (size_t)i * row,
                      f->o_width);
    }
}

/* O and L of head h from the states of its parts, [part][tiles], or, where these are NULL, computing each. */
static void attend(const fattni_parts *f, const fattni_sequence *seq, int64_t b, int64_t h, const char *states,
                   char *scratch) {
    const fattni_problem *const p = f->p;
    const fattni_fwd_rows r = fattni_fwd_rows_of(p, f->k, &f->layout, seq, b, h, 0, scratch, 0);
    char *const o = scratch + f->o, *const own = scratch + f->bytes;
    const int64_t n = states ? h % p->group : 0; /* its number among the heads of a state */
    const fattni_range parts = parts_of(seq);
    if (r.rows == 0) return;
    fattni_fwd_start(&r);
    memset(o, 0, (size_t)(r.rows * f->o_width) * fattn_dtype_size(f->k->dtype));
    f->k->unpack(0, r.rows, p->Dv, r.o, NULL, o, f->o_width);
    for (int64_t part = parts.begin; part < parts.end; ++part) {
        const int64_t tile = part * f->tiles + n / f->heads;
        if (!states) take_part(f, seq, b, h, 1, part, own, scratch);
        add_part(f, &r, states ? states + (size_t)tile * f->state_bytes : own, n % f->heads * r.rows, o);
    }
    f->k->pack(r.rows, p->Dv, f->k->dtype, o, f->o_width, NULL, r.o);
    fattni_fwd_finish(&r);
}

void fattni_parts_attend(const fattni_parts *f, const fattni_sequence *seq, int64_t b, int64_t h, char *scratch) {
    attend(f, seq, b, h, NULL, scratch);
}

/* ---- calls of which every sequence has few rows ---- */

typedef struct forward {
    fattni_parts f;
    int64_t parts; /* of the longest sequence */
    int64_t threads;
    size_t shared_bytes; /* states, [sequence][key head][part][tiles] */
} forward;

static double most_states(const forward *w) {
    return (double)w->f.p->B * (double)w->f.p->Hkv * (double)w->parts * (double)w->f.tiles;
}

static forward plan_forward(const fattn_ctx *ctx, const fattni_problem *p) {
    forward w = {.f = fattni_parts_of(ctx, p, p->group)};
    w.parts = fattni_ceil_div(p->Sk, FATTNI_PART_KEYS);
    const double bytes = most_states(&w) * (double)w.f.state_bytes;
    if (bytes <= MOST_STATE_BYTES) w.shared_bytes = (size_t)bytes;
    const int64_t tasks = p->B * fattni_max(p->Hq, p->Hkv * w.parts);
    w.threads = fattni_min(ctx->cpu_threads, tasks);
    return w;
}

static char *states_of(const forward *w, int64_t b, int64_t g) {
    const fattni_problem *const p = w->f.p;
    return (char *)p->workspace + (size_t)((b * p->Hkv + g) * w->parts * w->f.tiles) * w->f.state_bytes;
}
static char *scratch_of(const forward *w, int thread) {
    return (char *)w->f.p->workspace + w->shared_bytes + (size_t)thread * w->f.bytes;
}

/* Task: a part of the keys of a key head, with all of its query heads. */
static void run_part(void *arg, int64_t task, int thread) {
    const forward *const w = arg;
    const fattni_problem *const p = w->f.p;
    const int64_t part = task % w->parts, g = task / w->parts % p->Hkv, b = task / w->parts / p->Hkv;
    const fattni_sequence seq = fattni_sequence_of(p, b);
    const fattni_range parts = parts_of(&seq);
    if (part < parts.begin || part >= parts.end) return;
    char *const states = states_of(w, b, g) + (size_t)(part * w->f.tiles) * w->f.state_bytes;
    take_part(&w->f, &seq, b, g * p->group, p->group, part, states, scratch_of(w, thread));
}

/* Task: a query head. */
static void run_head(void *arg, int64_t task, int thread) {
    const forward *const w = arg;
    const fattni_problem *const p = w->f.p;
    const int64_t b = task / p->Hq, h = task % p->Hq;
    const fattni_sequence seq = fattni_sequence_of(p, b);
    attend(&w->f, &seq, b, h, states_of(w, b, h / p->group), scratch_of(w, thread));
}

/* Every feature, every dtype. */
static const char *plan(const fattn_ctx *ctx, const fattni_problem *p, fattni_kernel_plan *out) {
    const bool unified = p->flags & FATTN_UNIFIED_MAX;
    if (p->Sq > fattni_few_rows(ctx, p))
        return unified ? "takes FATTN_UNIFIED_MAX with few rows only: 8, or 4 where BF16 is multiplied"
                       : "has sequences of more than a few rows";
    const forward w = plan_forward(ctx, p);
    if (most_states(&w) * (double)w.f.state_bytes > MOST_STATE_BYTES) return "has too many parts of keys";
    out->workspace = w.shared_bytes + (size_t)w.threads * w.f.bytes;
    out->deterministic = true;
    snprintf(out->name, sizeof out->name, "fattn_fwd_parts_%s_%s", w.f.k->isa, fattn_dtype_name(p->dtype));
    return NULL;
}

static fattn_status run(fattn_ctx *ctx, const fattni_problem *p, const fattni_kernel_plan *plan) {
    (void)plan;
    forward w = plan_forward(ctx, p);
    const fattni_stage stages[2] = {{p->B * p->Hkv * w.parts, run_part}, {p->B * p->Hq, run_head}};
    fattni_cpu_stages(ctx, w.threads, w.f.k, stages, 2, &w);
    return FATTN_OK;
}

const fattni_kernel fattni_fwd_parts = {
    .family = "fattn_fwd_parts",
    .device = FATTN_CPU,
    .algorithms = 1u << FATTN_ALGO_AUTO | 1u << FATTN_ALGO_FLASH2,
    .plan = plan,
    .run = run,
    .unified = true,
};
