/* On the CPU: loops over the elements of several tensors at once, and sums over broadcast dimensions. */
#include "core/tensor/numeric.h"
#include "autograd_c/ops/ops.h"
#include "core/base/isa_clones.h"

#include <string.h>

/* Dimensions that all operands walk together, outermost first. One of them has more than one element;
   neighbours that every operand walks with one stride are joined. */
enum { GRID_DIMS = FATTN_MAX_DIMS + 1 };
typedef struct grid {
    int n;
    int64_t count;
    int64_t shape[GRID_DIMS], stride[GRID_DIMS][FATTNI_OPERANDS];
} grid;

static void push(grid *g, int64_t shape, const int64_t *stride) {
    g->count *= shape;
    if (shape == 1) return;
    bool joins = g->n > 0;
    for (int k = 0; k < FATTNI_OPERANDS && joins; ++k) joins = g->stride[g->n - 1][k] == shape * stride[k];
    if (!joins) g->shape[g->n++] = 1;
    g->shape[g->n - 1] *= shape;
    memcpy(g->stride[g->n - 1], stride, sizeof g->stride[0]);
}

/* t[0] and what broadcasts to it. */
static grid grid_of(const fattn_tensor *const *t, int n) {
    grid g = {.count = 1};
    for (int d = 0; d < t[0]->ndim; ++d) {
        int64_t stride[FATTNI_OPERANDS] = {0};
        for (int k = 0; k < n; ++k) {
            const int own = d - (t[0]->ndim - t[k]->ndim);
            if (own >= 0 && t[k]->shape[own] > 1) stride[k] = t[k]->stride[own];
        }
        push(&g, t[0]->shape[d], stride);
    }
    return g;
}

static grid without_last(const grid *g) {
    grid rows = *g;
    if (g->n > 0) rows.count /= rows.shape[--rows.n];
    return rows;
}

/* Where the operands stand at position `at` of the row-major count. */
static void offsets(const grid *g, int64_t at, int64_t *out) {
    memset(out, 0, FATTNI_OPERANDS * sizeof *out);
    for (int d = g->n - 1; d >= 0; --d) {
        const int64_t i = d > 0 ? at % g->shape[d] : at;
        for (int k = 0; k < FATTNI_OPERANDS; ++k) out[k] += i * g->stride[d][k];
        if (d > 0) at /= g->shape[d];
    }
}

enum { ELEMENTS_PER_TASK = 16384 };

typedef struct walk {
    int n; /* operands */
    grid rows;
    int64_t width, chunk; /* of the last dimension */
    int64_t chunks, rows_per_task;
    int64_t step[FATTNI_OPERANDS];
    size_t size[FATTNI_OPERANDS];
    char *data[FATTNI_OPERANDS];
    fattni_loop run;
    const void *arg;
} walk;

static void walk_rows(void *arg, int64_t task, int thread) {
    (void)thread;
    const walk *w = arg;
    const int64_t first = task % w->chunks * w->chunk, begin = task / w->chunks * w->rows_per_task;
    const int64_t end = fattni_min(w->rows.count, begin + w->rows_per_task);
    for (int64_t row = begin; row < end; ++row) {
        int64_t offset[FATTNI_OPERANDS];
        void *p[FATTNI_OPERANDS] = {NULL};
        offsets(&w->rows, row, offset);
        for (int k = 0; k < w->n; ++k) p[k] = w->data[k] + (offset[k] + first * w->step[k]) * (int64_t)w->size[k];
        w->run(p, w->step, fattni_min(w->chunk, w->width - first), w->arg);
    }
}

void fattni_each(const fattn_ctx *ctx, const fattn_tensor *const *t, int n, fattni_loop run, const void *arg) {
    const grid g = grid_of(t, n);
    if (g.count == 0) return;
    walk w = {.n = n, .rows = without_last(&g), .width = 1, .run = run, .arg = arg};
    for (int k = 0; k < FATTNI_OPERANDS; ++k) w.step[k] = 1;
    if (g.n > 0) {
        w.width = g.shape[g.n - 1];
        memcpy(w.step, g.stride[g.n - 1], sizeof w.step);
    }
    for (int k = 0; k < n; ++k) {
        w.data[k] = t[k]->data;
        w.size[k] = fattn_dtype_size((fattn_dtype)t[k]->dtype);
    }
    w.chunk = fattni_min(w.width, ELEMENTS_PER_TASK);
    w.chunks = fattni_ceil_div(w.width, w.chunk);
    w.rows_per_task = ELEMENTS_PER_TASK / w.chunk;
    fattni_parallel(ctx, fattni_ceil_div(w.rows.count, w.rows_per_task) * w.chunks, walk_rows, &w);
}

/* d[kept] (+)= the sum over the reduced positions of x y, over divisor. Cells are what is summed side by side: up to
   CELL neighbours of one kept row, or one element when the reduced dimension is the inner one. */
enum { CELL = 256, D = 0, X = 1, Y = 2, MOST_PARTS = 64, LEAST_PART = 64 };
typedef struct reduction {
    grid kept, reduced;            /* rows, without the inner dimension */
    int64_t width;                 /* of the inner dimension when it is kept, else 1 */
    int64_t run;                   /* of the inner dimension when it is reduced, else 1 */
    int64_t step[FATTNI_OPERANDS]; /* of the inner dimension */
    int64_t cells_per_row, cells_per_task, tasks_per_part;
    int64_t parts, length; /* what is reduced is `length` positions, cut in `parts` */
    double divisor;
    bool fresh;
    double *partial; /* parts > 1: the sums of each part, [parts][kept], with d's steps for kept; else NULL */
    int64_t partial_stride;
    void *d;
    const void *x, *y;
} reduction;

#define BODY "autograd_c/ops/elementwise/op_each.inc"
#include "core/base/for_each_real.inc"

typedef struct filling {
    double value;
    int32_t dtype;
    bool fresh;
} filling;

static void accumulate_any(void *const *p, const int64_t *step, int64_t n, const void *arg) {
    const int32_t *dtype = arg; /* of d, of x, fresh */
    for (int64_t i = 0; i < n; ++i) {
        const double old = dtype[2] ? 0 : fattni_load(p[0], dtype[0], i * step[0]);
        fattni_store(p[0], dtype[0], i * step[0], old + fattni_load(p[1], dtype[1], i * step[1]));
    }
}

/* BF16 neighbours, the same bits: the sum of two numbers of 8 bits that is near a tie is exact in F32. */
static FATTNI_CLONED void accumulate_bf16(void *const *p, const int64_t *step, int64_t n, const void *arg) {
    if (step[0] != 1 || step[1] != 1) {
        accumulate_any(p, step, n, arg);
        return;
    }
    const bool fresh = ((const int32_t *)arg)[2];
    uint16_t *const d = p[0];
    const uint16_t *const x = p[1];
    for (int64_t i = 0; i < n; ++i)
        d[i] = fattni_float_to_bf16(fresh ? 0.0f + fattni_bf16_to_float(x[i])
                                          : fattni_bf16_to_float(d[i]) + fattni_bf16_to_float(x[i]));
}
FATTNI_LOOPS_BY_ISA(accumulate_bf16)

/* a + b, rounded to odd (fattni_double_to_float_odd), so that a second rounding gives what one would. The error of
   the sum is exact: Knuth's TwoSum. */
static FATTNI_CLONED float sum_to_odd(float a, float b) {
    const float sum = a + b, of_b = sum - a, error = (a - (sum - of_b)) + (b - of_b);
    const uint32_t u = fattni_float_bits(sum), e = fattni_float_bits(error);
    const uint32_t inexact = (e << 1) != 0, finite = (u & 0x7f800000u) != 0x7f800000u; /* without branches: vectors */
    return fattni_bits_float(u + (inexact & finite & ~u & 1u) * (1u - ((u ^ e) >> 31 << 1)));
}
/* F32 to BF16, the same bits. */
static FATTNI_CLONED void accumulate_narrowed(void *const *p, const int64_t *step, int64_t n, const void *arg) {
    uint16_t *const d = p[0];
    const float *const x = p[1];
    if (step[0] == 1 && step[1] == 1)
        for (int64_t i = 0; i < n; ++i) d[i] = fattni_float_to_bf16(sum_to_odd(fattni_bf16_to_float(d[i]), x[i]));
    else
        accumulate_any(p, step, n, arg);
}
FATTNI_LOOPS_BY_ISA(accumulate_narrowed)

/* BF16 to F32. */
static FATTNI_CLONED void accumulate_widened(void *const *p, const int64_t *step, int64_t n, const void *arg) {
    float *const d = p[0];
    const uint16_t *const x = p[1];
    (void)arg;
    if (step[0] == 1 && step[1] == 1)
        for (int64_t i = 0; i < n; ++i) d[i] += fattni_bf16_to_float(x[i]);
    else
        for (int64_t i = 0; i < n; ++i) d[i * step[0]] += fattni_bf16_to_float(x[i * step[1]]);
}
FATTNI_LOOPS_BY_ISA(accumulate_widened)

static void fill_any(void *const *p, const int64_t *step, int64_t n, const void *arg) {
    const filling *f = arg;
    for (int64_t i = 0; i < n; ++i)
        fattni_store(p[0], f->dtype, i * step[0], f->value + (f->fresh ? 0 : fattni_load(p[0], f->dtype, i * step[0])));
}

static fattn_status fill(fattn_ctx *ctx, const fattn_tensor *d, double value, bool fresh) {
    fattni_each(ctx, &d, 1, fill_any, &(filling){value, d->dtype, fresh});
    return FATTN_OK;
}

static fattn_status each(fattn_ctx *ctx, const fattni_elements *f, const fattn_tensor *const *t, int n, bool fresh) {
    fattni_each(ctx, t, n, t[0]->dtype == FATTN_F64 ? f->f64 : f->f32, &(fattni_how){fresh, f->value});
    return FATTN_OK;
}

static fattn_status accumulate(fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x, bool fresh) {
    const fattn_tensor *const t[] = {d, x};
    const int32_t any[] = {d->dtype, x->dtype, fresh};
    if (d->dtype != x->dtype && fresh) return fattn_tensor_copy(ctx, d, x);
    if (d->dtype == FATTN_BF16 && x->dtype == FATTN_BF16)
        fattni_each(ctx, t, 2, accumulate_bf16_by_isa[ctx->isa], any);
    else if (d->dtype == FATTN_F32 && x->dtype == FATTN_BF16)
        fattni_each(ctx, t, 2, accumulate_widened_by_isa[ctx->isa], any);
    else if (d->dtype == FATTN_BF16 && x->dtype == FATTN_F32)
        fattni_each(ctx, t, 2, accumulate_narrowed_by_isa[ctx->isa], any);
    else if (d->dtype != x->dtype)
        fattni_each(ctx, t, 2, accumulate_any, any);
    else if (d->dtype == FATTN_F64)
        fattni_each(ctx, t, 2, put_f64, &fresh);
    else if (d->dtype == FATTN_F32)
        fattni_each(ctx, t, 2, put_f32, &fresh);
    else
        fattni_each(ctx, t, 2, accumulate_any, any);
    return FATTN_OK;
}

static void run_reduction(const fattn_ctx *ctx, const grid *g, int32_t dtype, reduction s) {
    s.kept.count = s.reduced.count = 1;
    s.width = s.run = s.length = 1;
    for (int d = 0; d < g->n; ++d) {
        const bool inner = d == g->n - 1, keep = g->stride[d][D] != 0;
        if (!keep) s.length *= g->shape[d];
        if (!inner) {
            push(keep ? &s.kept : &s.reduced, g->shape[d], g->stride[d]);
            continue;
        }
        *(keep ? &s.width : &s.run) = g->shape[d];
        memcpy(s.step, g->stride[d], sizeof s.step);
    }
    s.cells_per_row = fattni_ceil_div(s.width, CELL);
    const int64_t cells = s.kept.count * s.cells_per_row;
    const int64_t work = fattni_min(s.width, CELL) * fattni_ceil_div(s.length, s.parts);
    s.cells_per_task = fattni_max(1, ELEMENTS_PER_TASK / fattni_max(1, work));
    s.tasks_per_part = fattni_ceil_div(cells, s.cells_per_task);
    const fattni_task *const run = dtype == FATTN_F64 ? reduce_f64_by_isa : reduce_f32_by_isa;
    fattni_parallel(ctx, s.tasks_per_part * s.parts, run[ctx->isa], &s);
}

/* A few sums over much are cut in parts. */
static int64_t parts_of(const fattn_tensor *d, const fattn_tensor *x) {
    const int64_t kept = fattn_tensor_numel(d);
    if (kept == 0) return 1;
    const int64_t cells = fattni_ceil_div(kept, CELL), length = fattn_tensor_numel(x) / kept;
    return fattni_max(1, fattni_min(MOST_PARTS / cells, length / LEAST_PART));
}

static size_t reduce_workspace(const fattn_tensor *d, const fattn_tensor *x) {
    const int64_t parts = parts_of(d, x);
    return parts > 1 ? (size_t)(fattn_tensor_numel(d) * parts) * sizeof(double) : 0;
}

/* d (+)= the sums of the parts, of which there are few elements, over divisor. */
static void join_parts(const fattn_tensor *d, const reduction *r) {
    const fattn_tensor *const t[] = {d};
    const grid g = grid_of(t, 1);
    double *const sum = r->partial;
    const int64_t kept = r->partial_stride;
    for (int64_t part = 1; part < r->parts; ++part)
        for (int64_t e = 0; e < kept; ++e) sum[e] += sum[part * kept + e];
    for (int64_t e = 0; e < kept; ++e) {
        int64_t at[FATTNI_OPERANDS];
        offsets(&g, e, at);
        const double before = r->fresh ? 0 : fattni_load(d->data, d->dtype, at[0]);
        fattni_store(d->data, d->dtype, at[0], before + sum[e] / r->divisor);
    }
}

static fattn_status reduce(fattn_ctx *ctx, const fattn_tensor *d, bool fresh, const fattn_tensor *x,
                           const fattn_tensor *y, double divisor, void *workspace) {
    const int64_t parts = parts_of(d, x), kept = fattn_tensor_numel(d);
    if (kept == 0) return FATTN_OK;
    const fattn_tensor dense = fattni_row_major(d, workspace);
    /* x leads the grid, for it has every dimension; then operands change places. */
    const fattn_tensor *const t[] = {x, parts > 1 ? &dense : d, y ? y : x};
    grid g = grid_of(t, 3);
    for (int i = 0; i < g.n; ++i) {
        const int64_t swap = g.stride[i][0];
        g.stride[i][0] = g.stride[i][1];
        g.stride[i][1] = swap;
    }
    const reduction r = {.parts = parts,
                         .divisor = divisor,
                         .fresh = fresh,
                         .partial = parts > 1 ? workspace : NULL,
                         .partial_stride = kept,
                         .d = d->data,
                         .x = x->data,
                         .y = y ? y->data : NULL};
    run_reduction(ctx, &g, d->dtype, r);
    if (parts > 1) join_parts(d, &r);
    return FATTN_OK;
}

const fattni_element_code fattni_elements_cpu = {
    .fill = fill, .accumulate = accumulate, .each = each, .reduce_workspace = reduce_workspace, .reduce = reduce};
