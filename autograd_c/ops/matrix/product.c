/* Products of strided tensors through OpenBLAS, or on a GPU through cuBLAS. */
#include "core/cpu/gemm_cpu.h"
#include "autograd_c/ops/ops.h"
#ifdef FATTNI_HAVE_CUDA
#include "core/cuda/blas.h"
#endif

/* The last two dimensions as a BLAS reads them: rows of a pitch, possibly of the transpose. False
   when neither dimension is contiguous, rows overlap, or the pitch does not fit its integers. */
static bool as_matrix(const fattn_tensor *t, bool *transposed, int64_t *pitch) {
    const int64_t rows = t->shape[t->ndim - 2], columns = t->shape[t->ndim - 1];
    const int64_t down = t->stride[t->ndim - 2], across = t->stride[t->ndim - 1];
    *transposed = false;
    *pitch = rows > 1 ? down : columns;
    if ((columns <= 1 || across == 1) && *pitch >= columns && *pitch <= INT32_MAX) return true;
    *transposed = true;
    *pitch = columns > 1 ? across : rows;
    return (rows <= 1 || down == 1) && *pitch >= rows && *pitch <= INT32_MAX;
}

/* Matrices over the leading dimensions, as rows of one element. */
static fattni_rows batches(const fattn_tensor *t) {
    fattn_tensor leading = *t;
    leading.ndim -= 1;
    leading.shape[leading.ndim - 1] = 1;
    return fattni_rows_of(&leading);
}

/* cuBLAS walks all matrices with one stride, upwards. */
static bool walks(const fattn_tensor *t) {
    const fattni_rows r = batches(t);
    return t->device == FATTN_CPU || (r.n == 1 && r.stride[0] >= 0);
}

static bool is_readable(const fattn_tensor *t) {
    bool transposed;
    int64_t pitch;
    return as_matrix(t, &transposed, &pitch) && walks(t);
}

static bool is_writable(const fattn_tensor *t) {
    bool transposed;
    int64_t pitch;
    return as_matrix(t, &transposed, &pitch) && !transposed && walks(t);
}

static fattni_gemm shape_of(const fattni_product *p) {
    const int last = p->c->ndim - 1;
    return (fattni_gemm){.dtype = (fattn_dtype)p->c->dtype,
                         .M = p->c->shape[last - 1],
                         .N = p->c->shape[last],
                         .K = p->a->shape[p->trans_a ? last - 1 : last],
                         .alpha = 1,
                         .row = p->row};
}

size_t fattni_product_workspace(const fattni_product *p) {
    size_t bytes = 0;
    if (!is_readable(p->a)) bytes += fattni_room(fattni_tensor_bytes(p->a));
    if (!is_readable(p->b)) bytes += fattni_room(fattni_tensor_bytes(p->b));
    if (!is_writable(p->c)) bytes += fattni_room(fattni_widest_bytes(p->c));
#ifdef FATTNI_HAVE_CUDA
    if (p->c->device == FATTN_CUDA) return bytes + FATTNI_CUDA_BLAS_WORKSPACE;
#endif
    const fattni_gemm g = shape_of(p);
    if (batches(p->c).count == 1) bytes += fattni_room(fattni_gemm_workspace(&g));
    return bytes;
}

typedef struct job {
    fattni_gemm g; /* of the first batch */
    fattni_rows a, b, c;
    int64_t blocks;
} job;

static void run_block(void *arg, int64_t task, int thread) {
    (void)thread;
    const job *j = arg;
    const int64_t batch = task / j->blocks, size = (int64_t)fattn_dtype_size(j->g.dtype);
    fattni_gemm g = j->g;
    g.a = (const char *)g.a + fattni_row(&j->a, batch) * size;
    g.b = (const char *)g.b + fattni_row(&j->b, batch) * size;
    g.c = (char *)g.c + fattni_row(&j->c, batch) * size;
    fattni_gemm_block(&g, task % j->blocks);
}

/* t, or a row-major copy of it. */
static fattn_status pack(fattn_ctx *ctx, const fattn_tensor *t, void **workspace,
                         fattn_tensor *out) {
    *out = *t;
    if (is_readable(t)) return FATTN_OK;
    *out = fattni_row_major(t, fattni_carve(workspace, fattni_tensor_bytes(t)));
    return fattn_tensor_copy(ctx, out, t);
}

#ifdef FATTNI_HAVE_CUDA
static int64_t batch_stride(const fattni_rows *r) { return r->count > 1 ? r->stride[0] : 0; }

/* The job through cuBLAS; a row that is added to every row is what C holds before. */
static fattn_status run_cuda(fattn_ctx *ctx, const job *j, const fattn_tensor *a,
                             const fattn_tensor *c, void *workspace) {
    const fattni_gemm *const g = &j->g;
    if (g->row) {
        const fattn_tensor row = fattn_tensor_view((void *)(uintptr_t)g->row, (fattn_dtype)a->dtype,
                                                   ctx->device, ctx->device_id, 1, &g->N);
        const fattn_tensor *const t[] = {c, &row};
        FATTNI_TRY(fattni_cuda_each(ctx, FATTNI_PUT, t, 2, true, 0));
    }
    const fattni_cuda_gemm product = {.dtype = (fattn_dtype)a->dtype,
                                      .c_dtype = (fattn_dtype)c->dtype,
                                      .trans_a = g->trans_a,
                                      .trans_b = g->trans_b,
                                      .batches = j->c.count,
                                      .M = g->M,
                                      .N = g->N,
                                      .K = g->K,
                                      .a = g->a,
                                      .b = g->b,
                                      .c = g->c,
                                      .lda = g->lda,
                                      .ldb = g->ldb,
                                      .ldc = g->ldc,
                                      .stride_a = batch_stride(&j->a),
                                      .stride_b = batch_stride(&j->b),
                                      .stride_c = batch_stride(&j->c),
                                      .alpha = 1,
                                      .beta = g->row ? 1 : g->beta};
    return fattni_cuda_multiply(ctx, &product, workspace);
}
#endif

static void run_cpu(fattn_ctx *ctx, job *j, void *workspace) {
    if (j->c.count == 1) {
        j->g.workspace = fattni_carve(&workspace, fattni_gemm_workspace(&j->g));
        fattni_gemm_cpu(ctx, &j->g);
    } else {
        j->blocks = fattni_gemm_blocks(&j->g);
        fattni_parallel(ctx, j->c.count * j->blocks, run_block, j);
    }
}

fattn_status fattni_product_run(fattn_ctx *ctx, const fattni_product *p, void *workspace) {
    fattn_tensor a, b, c = *p->c;
    FATTNI_TRY(pack(ctx, p->a, &workspace, &a));
    FATTNI_TRY(pack(ctx, p->b, &workspace, &b));
    const bool direct = is_writable(p->c);
    if (!direct) c = fattni_row_major(p->c, fattni_carve(&workspace, fattni_tensor_bytes(p->c)));
    bool flip_a, flip_b, flip_c;
    job j = {.g = shape_of(p), .a = batches(&a), .b = batches(&b), .c = batches(&c)};
    as_matrix(&a, &flip_a, &j.g.lda);
    as_matrix(&b, &flip_b, &j.g.ldb);
    as_matrix(&c, &flip_c, &j.g.ldc);
    j.g.trans_a = p->trans_a ^ flip_a;
    j.g.trans_b = p->trans_b ^ flip_b;
    j.g.beta = direct && p->add;
    j.g.a = a.data, j.g.b = b.data, j.g.c = c.data;
#ifdef FATTNI_HAVE_CUDA
    if (ctx->device == FATTN_CUDA)
        FATTNI_TRY(run_cuda(ctx, &j, &a, &c, workspace));
    else
#endif
        run_cpu(ctx, &j, workspace);
    return direct ? FATTN_OK : fattni_accumulate(ctx, p->c, &c, !p->add);
}

fattni_flat fattni_flatten(const fattn_tensor *x) {
    const fattni_rows r = fattni_rows_of(x);
    fattni_flat f = {.t = *x, .in_place = r.n == 1};
    f.t.ndim = 2;
    f.t.shape[0] = r.count, f.t.shape[1] = r.columns;
    f.t.stride[0] = r.stride[0], f.t.stride[1] = r.step;
    if (!f.in_place) f.t = fattni_row_major(&f.t, NULL);
    return f;
}

void fattni_flat_place(fattni_flat *f, void **workspace) {
    if (!f->in_place) f->t.data = fattni_carve(workspace, fattni_tensor_bytes(&f->t));
}

fattn_status fattni_flat_read(fattn_ctx *ctx, fattni_flat *f, const fattn_tensor *x,
                              void **workspace) {
    if (f->in_place) return FATTN_OK;
    fattni_flat_place(f, workspace);
    const fattn_tensor copy = fattni_row_major(x, f->t.data);
    return fattn_tensor_copy(ctx, &copy, x);
}

fattn_status fattni_flat_add_to(fattn_ctx *ctx, const fattni_flat *f, const fattn_tensor *d,
                                bool fresh) {
    const fattn_tensor copy = fattni_row_major(d, f->t.data);
    return fattni_accumulate(ctx, d, &copy, fresh);
}
