/* Elements and sums on the device: grids, and how much of them a thread takes. */
#include "autograd_c/ops/op_cuda.h"

#include "autograd_c/ops/ops.h"

FATTNI_KERNEL(each, fattni_element_args);
FATTNI_KERNEL(each4, fattni_element_args);
FATTNI_KERNEL(gelu_back, fattni_gelu_back_args);
FATTNI_KERNEL(sum, fattni_sum_args);
FATTNI_KERNEL(sum_columns, fattni_sum_args);
FATTNI_KERNEL(sum_tall_columns, fattni_sum_args);
FATTNI_KERNEL(add_parts, fattni_parts_args);

enum { ROW_THREADS = 256 };
/* Sums are cut in parts, of at least LEAST_PART terms, until about THREADS threads have work. */
enum { THREADS = 1 << 18, LEAST_PART = 64, MOST_PARTS = 1024, FEW_SUMS = 2048 };
enum { ENOUGH_BLOCKS = 528 }; /* of sums of columns: about as many as run at a time */
/* Rows of which a block takes all, of fewer columns: 3.7 us for 2048 on an H100, with parts and the kernel that adds
   them 5. */
enum { FEW_ROWS = 2048 };

fattni_walk fattni_walk_of(const fattn_tensor *t) {
    const fattni_rows r = fattni_rows_of(t);
    fattni_walk w = {.n = r.n};
    for (int d = 0; d < r.n; ++d) {
        w.shape[d] = r.shape[d];
        w.stride[d] = r.stride[d];
    }
    return w;
}

int32_t fattni_common_dtype(const fattni_operand *const *t, int n) {
    int32_t dtype = t[0]->dtype;
    for (int k = 1; k < n; ++k)
        if (t[k]->p && t[k]->dtype != dtype) dtype = 0;
    return dtype;
}

bool fattni_rows_in_packs(const fattn_tensor *t) {
    const int last = t->ndim - 1;
    bool fits = last >= 0 && (uintptr_t)t->data % 16 == 0 && t->shape[last] % FATTNI_PACK == 0 &&
                (t->stride[last] == 1 || t->shape[last] == 1);
    for (int d = 0; d < last && fits; ++d) fits = t->shape[d] == 1 || t->stride[d] % FATTNI_PACK == 0;
    return fits;
}

/* Operand k in packs of neighbours of the innermost dimension, with 16-byte accesses. */
static bool is_in_packs(const fattni_grid *g, int k, const fattni_operand *t) {
    const int last = g->n - 1;
    bool fits =
        g->stride[last][k] == 1 && (uintptr_t)t->p % 16 == 0 && (last == 0 || g->shape[last] % FATTNI_PACK == 0);
    for (int d = 0; d < last && fits; ++d) fits = g->stride[d][k] % FATTNI_PACK == 0;
    return fits;
}

/* All operands: side by side in the innermost dimension, or one element repeated. */
static bool is_vector(const fattni_element_args *a) {
    bool fits = a->grid.n > 0 && is_in_packs(&a->grid, 0, &a->t[0]);
    for (int k = 1; k < a->operands && fits; ++k) {
        const bool repeated = a->grid.stride[a->grid.n - 1][k] == 0;
        fits = (a->t[k].dtype == FATTN_F64) == (a->t[0].dtype == FATTN_F64) &&
               (repeated || is_in_packs(&a->grid, k, &a->t[k]));
    }
    return fits;
}

fattn_status fattni_cuda_each(fattn_ctx *ctx, enum fattni_element what, const fattn_tensor *const *t, int operands,
                              bool fresh, double value) {
    fattni_element_args a = {.grid = fattni_grid_of(t, operands),
                             .value = value,
                             .what = (int32_t)what,
                             .fresh = fresh,
                             .operands = operands};
    if (a.grid.count == 0) return FATTN_OK;
    for (int k = 0; k < operands; ++k) a.t[k] = fattni_operand_of(t[k]);
    a.vector = is_vector(&a);
    a.flat = a.vector && a.grid.n == 1;
    for (int k = 0; k < operands; ++k) a.flat = a.flat && a.grid.stride[0][k] == 1;
    a.dtype = fattni_common_dtype((const fattni_operand *[]){&a.t[0], &a.t[1], &a.t[2], &a.t[3]}, operands);
    const int64_t blocks = fattni_grid_blocks(&a.grid, a.vector ? FATTNI_PACK : 1);
    if (operands > 3) return FATTNI_START_REAL(ctx, t[0]->dtype, each4, blocks, FATTNI_GRID_THREADS, &a);
    return FATTNI_START_REAL(ctx, t[0]->dtype, each, blocks, FATTNI_GRID_THREADS, &a);
}

static fattn_status fill(fattn_ctx *ctx, const fattn_tensor *d, double value, bool fresh) {
    return fattni_cuda_each(ctx, FATTNI_FILL, &d, 1, fresh, value);
}

static fattn_status accumulate(fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x, bool fresh) {
    return fattni_cuda_each(ctx, FATTNI_PUT, (const fattn_tensor *[]){d, x}, 2, fresh, 0);
}

static fattn_status each(fattn_ctx *ctx, const fattni_elements *f, const fattn_tensor *const *t, int n, bool fresh) {
    return fattni_cuda_each(ctx, f->what, t, n, fresh, f->value);
}

static int lanes_of(const fattn_tensor *d) { return fattn_tensor_numel(d) < FEW_SUMS ? ROW_THREADS : 1; }

static int64_t parts_of(const fattn_tensor *d, const fattn_tensor *x) {
    const int64_t kept = fattn_tensor_numel(d);
    if (kept == 0) return 1;
    const int64_t length = fattn_tensor_numel(x) / kept, lanes = lanes_of(d);
    const int64_t useful = fattni_min(MOST_PARTS, length / (LEAST_PART * lanes));
    return fattni_max(1, fattni_min(useful, THREADS / (kept * lanes)));
}

static int64_t column_parts_of(const fattn_tensor *d, const fattn_tensor *x) {
    const int64_t kept = fattn_tensor_numel(d);
    if (kept == 0 || kept % FATTNI_PACK) return 1;
    const int64_t length = fattn_tensor_numel(x) / kept,
                  enough = ENOUGH_BLOCKS / fattni_ceil_div(kept, FATTNI_BLOCK_COLUMNS);
    return fattni_max(1, fattni_min(enough, length / LEAST_PART));
}

static size_t reduce_workspace(const fattn_tensor *d, const fattn_tensor *x) {
    const int64_t parts = fattni_max(parts_of(d, x), column_parts_of(d, x));
    return parts > 1 ? (size_t)(parts * fattn_tensor_numel(d)) * sizeof(double) : 0;
}

/* Kept elements lie side by side in all operands, in packs; what is summed are rows of one stride. */
static bool sums_columns(const fattni_sum_args *a) {
    const fattni_operand *const t[] = {&a->d, &a->x, &a->y};
    bool fits = a->kept.n == 1 && a->reduced.n == 1 && a->kept.count % FATTNI_PACK == 0;
    for (int k = 0; k < 3 && fits; ++k) {
        if (!t[k]->p) continue; /* no y */
        fits = a->kept.stride[0][k] == 1 && a->reduced.stride[0][k] % FATTNI_PACK == 0 &&
               (uintptr_t)t[k]->p % 16 == 0 && (t[k]->dtype == FATTN_F64) == (a->d.dtype == FATTN_F64);
    }
    return fits;
}

/* Appends dimension d of g. */
static void append(fattni_grid *to, const fattni_grid *g, int d) {
    to->shape[to->n] = g->shape[d];
    for (int k = 0; k < FATTNI_GRID_OPERANDS; ++k) to->stride[to->n][k] = g->stride[d][k];
    to->n += 1;
    to->count *= g->shape[d];
}

static fattn_status reduce(fattn_ctx *ctx, const fattn_tensor *d, bool fresh, const fattn_tensor *x,
                           const fattn_tensor *y, double divisor, void *workspace) {
    if (fattn_tensor_numel(d) == 0) return FATTN_OK;
    /* x leads the grid, for it has every dimension; then operands change places. */
    const fattn_tensor *const t[] = {x, d, y ? y : x};
    fattni_grid g = fattni_grid_of(t, 3);
    fattni_sum_args a = {.kept = {.count = 1},
                         .reduced = {.count = g.count ? 1 : 0},
                         .d = fattni_operand_of(d),
                         .x = fattni_operand_of(x),
                         .partial = workspace,
                         .divisor = divisor,
                         .parts = parts_of(d, x),
                         .fresh = fresh,
                         .lanes = lanes_of(d)};
    if (y) a.y = fattni_operand_of(y);
    for (int i = 0; i < g.n; ++i) {
        const int64_t of_x = g.stride[i][0];
        g.stride[i][0] = g.stride[i][1];
        g.stride[i][1] = of_x;
        append(g.stride[i][0] ? &a.kept : &a.reduced, &g, i);
    }
    if (sums_columns(&a)) {
        a.dtype = fattni_common_dtype((const fattni_operand *[]){&a.x, &a.y}, 2);
        a.parts = column_parts_of(d, x);
        if (a.parts > 1 && a.reduced.count <= FEW_ROWS)
            return FATTNI_START_REAL(ctx, d->dtype, sum_tall_columns,
                                     fattni_ceil_div(a.kept.count, FATTNI_TALL_COLUMNS), FATTNI_TALL_THREADS, &a);
        const int64_t blocks = fattni_ceil_div(a.kept.count, FATTNI_BLOCK_COLUMNS) * a.parts;
        FATTNI_TRY(FATTNI_START_REAL(ctx, d->dtype, sum_columns, blocks, ROW_THREADS, &a));
    } else {
        const int64_t blocks = fattni_ceil_div(a.kept.count * a.lanes, ROW_THREADS) * a.parts;
        FATTNI_TRY(FATTNI_START_REAL(ctx, d->dtype, sum, blocks, ROW_THREADS, &a));
    }
    if (a.parts == 1) return FATTN_OK;
    return fattni_cuda_add_parts(ctx, &(fattni_part_sum){d, workspace, fresh}, 1, a.parts, a.kept.count, divisor);
}

fattn_status fattni_cuda_add_parts(fattn_ctx *ctx, const fattni_part_sum *of, int n, int64_t parts, int64_t stride,
                                   double divisor) {
    fattni_parts_args a = {.parts = parts, .stride = stride, .divisor = divisor};
    int64_t blocks = 0;
    for (int k = 0; k < n; ++k) {
        const fattni_grid grid = fattni_grid_of(&of[k].d, 1);
        const int64_t own = fattni_ceil_div(grid.count, 32);
        a.of[k].grid = grid, a.of[k].d = fattni_operand_of(of[k].d);
        a.of[k].partial = of[k].partial, a.of[k].fresh = of[k].fresh;
        a.of[k].blocks = (int32_t)fattni_min(own, INT32_MAX); /* with more, the launch fails */
        blocks += own;
    }
    return FATTNI_START_REAL(ctx, of->d->dtype, add_parts, blocks, FATTNI_PARTS_THREADS, &a);
}

static fattn_status gelu(fattn_ctx *ctx, const fattn_tensor *y, const fattn_tensor *x) {
    return fattni_cuda_each(ctx, FATTNI_GELU, (const fattn_tensor *[]){y, x}, 2, true, 0);
}

enum { LEAST_GELU_ROWS = 32 }; /* of a part */
static int64_t gelu_parts_of(int64_t rows, int64_t columns) {
    const int64_t enough = ENOUGH_BLOCKS / fattni_ceil_div(columns, FATTNI_BLOCK_COLUMNS);
    return fattni_max(1, fattni_min(enough, rows / LEAST_GELU_ROWS));
}

static size_t gelu_back_workspace(const fattn_tensor *sums, const fattn_tensor *x) {
    const int64_t columns = x->shape[x->ndim - 1];
    if (columns == 0) return 0;
    const size_t parts = (size_t)(gelu_parts_of(fattn_tensor_numel(x) / columns, columns) * columns) * sizeof(double);
    const size_t apart = reduce_workspace(sums, x);
    return parts > apart ? parts : apart;
}

static fattn_status gelu_back(fattn_ctx *ctx, const fattn_tensor *d, const fattn_tensor *x, const fattn_tensor *dy,
                              const fattn_tensor *sums, bool fresh, void *workspace) {
    const fattn_tensor *const t[] = {d, x, dy};
    const fattni_rows rows = fattni_rows_of(dy);
    const bool packs = fattni_rows_in_packs(d) && fattni_rows_in_packs(x) && fattni_rows_in_packs(dy) && rows.n == 1 &&
                       (rows.count == 1 || rows.stride[0] == rows.columns);
    if (!sums || !packs || fattn_tensor_numel(d) == 0) {
        FATTNI_TRY(fattni_cuda_each(ctx, FATTNI_GELU_BACK, t, 3, true, 0));
        return sums ? reduce(ctx, sums, fresh, d, NULL, 1, workspace) : FATTN_OK;
    }
    fattni_gelu_back_args a = {.d = fattni_operand_of(d),
                               .x = fattni_operand_of(x),
                               .dy = fattni_operand_of(dy),
                               .partial = workspace,
                               .rows = rows.count,
                               .columns = rows.columns,
                               .parts = gelu_parts_of(rows.count, rows.columns)};
    a.dtype = fattni_common_dtype((const fattni_operand *[]){&a.d, &a.x, &a.dy}, 3);
    const int64_t blocks = fattni_ceil_div(a.columns, FATTNI_BLOCK_COLUMNS) * a.parts;
    FATTNI_TRY(FATTNI_START_REAL(ctx, x->dtype, gelu_back, blocks, ROW_THREADS, &a));
    const fattni_part_sum of = {sums, a.partial, fresh};
    return fattni_cuda_add_parts(ctx, &of, 1, a.parts, a.columns, 1);
}

const fattni_element_code fattni_elements_cuda = {.fill = fill,
                                                  .accumulate = accumulate,
                                                  .each = each,
                                                  .reduce_workspace = reduce_workspace,
                                                  .reduce = reduce,
                                                  .gelu_back_workspace = gelu_back_workspace,
                                                  .gelu_back = gelu_back,
                                                  .gelu = gelu};
