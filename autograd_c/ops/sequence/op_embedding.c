/* y[r, :] = table[ids[r], :]; table [V,C], ids I32 [..]. Backward: dtable[v, :] = the sum of dy[r, :]
   over the rows with ids[r] = v, in ascending order of r: rows are sorted by id (a counting sort) and
   each task owns some of the table. An id outside 0..V-1 is FATTN_E_ARG on the CPU, a row of NaN on a
   GPU. Saves nothing. */
#include "autograd_c/ops/sequence/op_embedding.h"
#include "autograd_c/ops/ops.h"

#include <string.h>

enum { TABLE = FATTNI_EMBEDDING_TABLE, IDS = FATTNI_EMBEDDING_IDS };
enum { ROWS_PER_TASK = 128, ENTRIES = 32, COLUMNS = 256 };

static fattn_status infer(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_real(c, "embedding", "table", TABLE));
    FATTNI_TRY(fattni_check_i32(c, "embedding", "ids", IDS));
    const fattn_tensor *table = &c->in[TABLE], *ids = &c->in[IDS];
    FATTNI_TRY(fattni_check_contiguous(c, "embedding", "table", TABLE));
    if (table->ndim != 2 || ids->ndim >= FATTN_MAX_DIMS)
        return fattni_misfit(c, "embedding", "table", TABLE, "ids", IDS,
                             "table must be [V,C], ids of at most 4 dimensions");
    c->out[0].ndim = ids->ndim + 1;
    c->out[0].dtype = table->dtype;
    for (int d = 0; d < ids->ndim; ++d) c->out[0].shape[d] = ids->shape[d];
    c->out[0].shape[ids->ndim] = table->shape[1];
    FATTNI_TRY(fattni_check_extents(c, "embedding"));
    const int64_t rows = fattn_tensor_numel(ids);
    if (rows > INT32_MAX)
        return fattn_ctx_fail(c->ctx, FATTN_E_UNSUPPORTED, "embedding: %lld ids, at most %d", (long long)rows,
                              INT32_MAX);
    fattni_code_of(c, FATTNI_EMBEDDING)->plan(c);
    return FATTN_OK;
}

static void plan_cpu(fattn_op_call *c) {
    const int64_t rows = fattn_tensor_numel(&c->in[IDS]), V = c->in[TABLE].shape[0];
    if (c->wanted[TABLE]) c->bwd_workspace = (size_t)(V + 1 + rows) * sizeof(int32_t);
}

/* ids[r] */
static int32_t id_at(const fattn_tensor *ids, const fattni_rows *r, int64_t row) {
    const int64_t columns = r->columns;
    return ((const int32_t *)ids->data)[fattni_row(r, row / columns) + row % columns * r->step];
}

typedef struct job {
    const fattn_op_call *c;
    fattni_rows ids, table, d_table;
    int64_t C, chunks;        /* columns; chunks of them */
    const int32_t *end, *row; /* rows of id v: row[end[v-1]..end[v]) */
} job;

static job job_of(const fattn_op_call *c) {
    return (job){
        .c = c, .ids = fattni_rows_of(&c->in[IDS]), .table = fattni_rows_of(&c->in[TABLE]), .C = c->in[TABLE].shape[1]};
}

static void copy_rows(void *arg, int64_t task, int thread) {
    (void)thread;
    const job *j = arg;
    const fattn_tensor *ids = &j->c->in[IDS], *table = &j->c->in[TABLE];
    const int64_t size = (int64_t)fattn_dtype_size((fattn_dtype)table->dtype);
    const int64_t end = fattni_min(fattn_tensor_numel(ids), (task + 1) * ROWS_PER_TASK);
    for (int64_t r = task * ROWS_PER_TASK; r < end; ++r)
        memcpy((char *)j->c->out[0].data + r * j->C * size,
               (const char *)table->data + fattni_row(&j->table, id_at(ids, &j->ids, r)) * size, (size_t)(j->C * size));
}

static fattn_status forward_cpu(fattn_op_call *c) {
    job j = job_of(c);
    const int64_t rows = fattn_tensor_numel(&c->in[IDS]), V = c->in[TABLE].shape[0];
    for (int64_t r = 0; r < rows; ++r) {
        const int32_t id = id_at(&c->in[IDS], &j.ids, r);
        if (id < 0 || id >= V)
            return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "embedding: ids[%lld] is %d, the table has rows 0..%lld",
                                  (long long)r, id, (long long)V - 1);
    }
    if (j.C > 0) fattni_parallel(c->ctx, fattni_ceil_div(rows, ROWS_PER_TASK), copy_rows, &j);
    return FATTN_OK;
}

#define BODY "autograd_c/ops/sequence/op_embedding.inc"
#include "core/base/for_each_real.inc"

static void sort_rows(job *j, int32_t *end, int32_t *row) {
    const fattn_tensor *ids = &j->c->in[IDS];
    const int64_t rows = fattn_tensor_numel(ids), V = j->c->in[TABLE].shape[0];
    memset(end, 0, (size_t)(V + 1) * sizeof *end);
    for (int64_t r = 0; r < rows; ++r) end[id_at(ids, &j->ids, r) + 1] += 1;
    for (int64_t v = 0; v < V; ++v) end[v + 1] += end[v];
    /* end[v] is where v begins, and moves to where it ends. */
    for (int64_t r = 0; r < rows; ++r) row[end[id_at(ids, &j->ids, r)]++] = (int32_t)r;
    j->end = end;
    j->row = row;
}

static fattn_status backward_cpu(fattn_op_call *c) {
    if (!c->d_in[TABLE].data) return FATTN_OK;
    job j = job_of(c);
    const int64_t V = c->in[TABLE].shape[0];
    j.d_table = fattni_rows_of(&c->d_in[TABLE]);
    j.chunks = fattni_ceil_div(j.C, COLUMNS);
    int32_t *const end = c->workspace;
    sort_rows(&j, end, end + V + 1);
    fattni_parallel(c->ctx, fattni_ceil_div(V, ENTRIES) * j.chunks,
                    c->in[TABLE].dtype == FATTN_F64 ? add_rows_f64 : add_rows_f32, &j);
    return FATTN_OK;
}

const fattni_code fattni_embedding_cpu = {plan_cpu, forward_cpu, backward_cpu};

static fattn_status forward(fattn_op_call *c) { return fattni_code_of(c, FATTNI_EMBEDDING)->forward(c); }

static fattn_status backward(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_gradients(c, "embedding"));
    return fattni_code_of(c, FATTNI_EMBEDDING)->backward(c);
}

const fattn_op_def fattni_op_embedding = {.struct_size = sizeof(fattn_op_def),
                                          .n_out = 1,
                                          .flags = FATTN_OP_F32_ON_CPU,
                                          .name = "embedding",
                                          .infer = infer,
                                          .forward = forward,
                                          .backward = backward};

fattn_var fattn_op_embedding(fattn_tape *t, fattn_var table, fattn_var ids) {
    return fattn_op_custom(t, &fattni_op_embedding, (fattn_var[]){table, ids}, 2, NULL);
}
