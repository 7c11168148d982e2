/* Gradients of bias and sink on the CPU.

   dbias = sum of G over the dimensions that bias broadcasts over. The tasks are the elements that
   are there: each owns a block of d_bias and walks everything that adds to it in ascending order,
   sequences, heads, rows, keys, so that no two tasks meet and bits depend on nothing else. That
   computes S and dP once more, 2 products beside the 5 or 7 of the other gradients. */
#include "bwd/cpu/bwd_row_block.h"

#include <math.h>

/* Blocks of rows when d_bias has rows, else of keys when it has keys, else one. */
static int64_t blocks_of(const fattni_array *a, int64_t rows) {
    if (a->s[2]) return fattni_ceil_div(a->n[2], rows);
    if (a->s[3]) return fattni_ceil_div(a->n[3], FATTNI_TILE_KEYS);
    return 1;
}

int64_t fattni_bwd_bias_tasks(const fattni_problem *p, const fattni_cpu_kernels *k) {
    const fattni_array *const a = &p->d_bias;
    return a->present ? fattni_distinct(a, 0) * fattni_distinct(a, 1) * blocks_of(a, k->rows) : 0;
}

/* [begin, begin + size) of a dimension, clipped to what it has. */
static fattni_range clip(int64_t begin, int64_t size, int64_t end) {
    return (fattni_range){fattni_min(begin, end), fattni_min(begin + size, end)};
}

static void zero(const fattni_array *a, int64_t b, int64_t h, fattni_range rows, fattni_range keys) {
    for (int64_t i = rows.begin; i < rows.end; ++i)
        for (int64_t j = keys.begin; j < keys.end; ++j) fattni_set(a, b, h, i, j, 0);
}

/* What one head of one sequence adds to rows x keys. */
static void add_head(const fattni_bwd *w, int64_t b, int64_t h, fattni_range rows, fattni_range keys, char *scratch) {
    const fattni_array *const a = &w->p->d_bias;
    const fattni_sequence seq = fattni_sequence_of(w->p, b);
    const int64_t end = fattni_min(rows.end, seq.band.Sq);
    for (int64_t i0 = rows.begin; i0 < end; i0 += w->k->rows) {
        const fattni_range seen = fattni_keys_of(&seq.band, i0, fattni_min(i0 + w->k->rows, end));
        const int64_t last = fattni_min(seen.end, keys.end);
        int64_t j = fattni_max(seen.begin, keys.begin) / FATTNI_TILE_KEYS * FATTNI_TILE_KEYS;
        if (j >= last) continue;
        const fattni_bwd_rows r = fattni_bwd_pack(w, &seq, b, h, i0, 0, scratch);
        for (; j < last; j += FATTNI_TILE_KEYS) {
            const int64_t count = fattni_min(FATTNI_TILE_KEYS, last - j);
            fattni_bwd_load_keys(w, &seq, b, h / w->p->group, (fattni_range){j, j + count}, scratch);
            const fattni_score_tile at = fattni_bwd_score_tile(w, &r, j, j, count);
            fattni_bwd_probabilities(w, &r, &at, ldexp(1, -w->p_exponent));
            const int64_t first = b * a->s[0] + h * a->s[1] + i0 * a->s[2] + j * a->s[3];
            char *const to = (char *)a->p + first * (int64_t)fattn_dtype_size(w->k->dtype);
            w->k->add_elements(&at.tile, scratch + w->layout.ds, to, a->s[2], a->s[3]);
        }
    }
}

static void bias_task(void *arg, int64_t task, int thread) {
    const fattni_bwd *const w = arg;
    const fattni_problem *const p = w->p;
    const fattni_array *const a = &p->d_bias;
    const int64_t count = blocks_of(a, w->k->rows), block = task % count, plane = task / count;
    const int64_t b0 = plane / fattni_distinct(a, 1), h0 = plane % fattni_distinct(a, 1);
    fattni_range rows = {0, p->Sq}, keys = {0, p->Sk};
    /* What this task owns. */
    fattni_range i = {0, fattni_distinct(a, 2)}, j = {0, fattni_distinct(a, 3)};
    if (a->s[2])
        rows = i = clip(block * w->k->rows, w->k->rows, a->n[2]);
    else if (a->s[3])
        keys = j = clip(block * FATTNI_TILE_KEYS, FATTNI_TILE_KEYS, a->n[3]);
    if (!(p->flags & FATTN_ACC_DBIAS)) zero(a, b0, h0, i, j);
    const int64_t b_end = a->s[0] ? b0 + 1 : p->B, h_end = a->s[1] ? h0 + 1 : p->Hq;
    for (int64_t b = b0; b < b_end; ++b)
        for (int64_t h = h0; h < h_end; ++h) add_head(w, b, h, rows, keys, fattni_bwd_scratch(w, thread));
}

void fattni_bwd_bias(const fattn_ctx *ctx, fattni_bwd *w) {
    const fattni_stage stage = {w->bias_tasks, bias_task};
    fattni_cpu_stages(ctx, w->threads, w->k, &stage, 1, w);
}

/* Task: one head. dsink = -sum exp(sink - L) delta over its rows, in ascending order, in double. */
static void sink_task(void *arg, int64_t h, int thread) {
    (void)thread;
    const fattni_bwd *const w = arg;
    const fattni_problem *const p = w->p;
    const double sink = fattni_get(&p->sink, h, 0, 0, 0);
    double sum = 0;
    for (int64_t b = 0; b < p->B && sink != -INFINITY; ++b) {
        const fattni_sequence seq = fattni_sequence_of(p, b);
        for (int64_t row = seq.q0; row < seq.q0 + seq.band.Sq; ++row) {
            const double L = fattni_get(&p->lse, seq.batch, h, row, 0);
            if (L == -INFINITY) continue;
            const fattni_row_sum x = fattni_bwd_row_sum(w, seq.batch, h, row);
            const double above = fattni_bwd_sink_above(w, sink, x.max);
            const double share = L == INFINITY ? sink == L : exp(above - x.log_sum);
            sum -= share * fattni_bwd_delta(w, seq.batch, h, row);
        }
    }
    const double before = p->flags & FATTN_ACC_DSINK ? fattni_get(&p->d_sink, h, 0, 0, 0) : 0;
    fattni_set(&p->d_sink, h, 0, 0, 0, before + sum);
}

void fattni_bwd_sink(const fattn_ctx *ctx, fattni_bwd *w) {
    if (w->p->d_sink.present) fattni_parallel(ctx, w->p->Hq, sink_task, w);
}
