/* cross_entropy and linear_cross_entropy on the device. */
#include "autograd_c/ops/op_cuda.h"
#include "autograd_c/ops/loss/op_loss.h"
#include "autograd_c/ops/ops.h"
#include "core/cuda/device.h"

FATTNI_KERNEL(loss_rows, fattni_loss_args);
FATTNI_KERNEL(loss_back, fattni_loss_args);
extern void fattn_loss_count(fattni_loss_args);
extern void fattn_loss_mean(fattni_loss_args);

enum { LOGITS = FATTNI_LOSS_LOGITS, X = FATTNI_LOSS_X, W = FATTNI_LOSS_W };

/* Threads of a row, each with the same number of packs or elements, two at least. */
static int threads_of(const fattni_loss_args *a) {
    const int64_t packs = fattni_ceil_div(a->width, a->pack);
    const int64_t each = fattni_max(2, fattni_ceil_div(packs, FATTNI_LOSS_THREADS));
    return 32 * (int)fattni_max(1, fattni_ceil_div(fattni_ceil_div(packs, each), 32));
}

/* kernel's blocks of all rows; `shared` bytes for each row. */
static fattn_status start(fattn_ctx *ctx, const char *name, fattni_cuda_any kernel, size_t shared,
                          fattni_loss_args *a) {
    a->row_threads = threads_of(a);
    const int rows = a->row_threads == 32 ? FATTNI_LOSS_ROWS : 1; /* of a block */
    return fattni_cuda_start(ctx, name, kernel, fattni_ceil_div(a->rows, rows), rows * a->row_threads,
                             (size_t)rows * shared, a);
}

/* Losses, and gradients if they are wanted. Where an SM's shared memory holds two rows, they stay there. */
static fattn_status start_rows(fattn_ctx *ctx, fattn_dtype real, fattni_loss_args *a) {
    enum { ELSE_SHARED = 2048 }; /* of a block at most: its sums, and what CUDA reserves */
    const size_t row = (size_t)a->width * sizeof(uint16_t), most = fattni_cuda_most_shared(ctx) / 2 - ELSE_SHARED;
    a->keeps = a->gradients && a->dtype == FATTN_BF16 && a->pack == FATTNI_PACK && row <= most;
    const fattni_cuda_any kernel =
        real == FATTN_F64 ? (fattni_cuda_any)fattn_loss_rows_f64 : (fattni_cuda_any)fattn_loss_rows_f32;
    if (a->keeps) FATTNI_TRY(fattni_cuda_allow_shared(ctx, "loss_rows", kernel));
    return start(ctx, "loss_rows", kernel, a->keeps ? row : 0, a);
}

static fattni_loss_args targets_of(const fattn_op_call *c, const fattn_tensor *target) {
    const fattni_rows rows = fattni_rows_of(target);
    return (fattni_loss_args){.target = fattni_walk_of(target),
                              .target_columns = rows.columns,
                              .target_step = rows.step,
                              .id = target->data,
                              .all = fattn_tensor_numel(target),
                              .fours = fattni_is_row_major(target) && (uintptr_t)target->data % 16 == 0,
                              .ignore = *(const int32_t *)c->attr};
}

/* ---- cross_entropy: saved are kept (one, padded to two) and each row's state ---- */

static void plan_cross_entropy(fattn_op_call *c) {
    const size_t rows = (size_t)fattni_rows_of(&c->in[LOGITS]).count;
    c->saved_bytes = (2 + 2 * rows) * sizeof(double);
    c->fwd_workspace = rows * sizeof(double);
}

static fattni_loss_args cross_entropy_args(const fattn_op_call *c) {
    fattni_loss_args a = targets_of(c, &c->in[FATTNI_CROSS_ENTROPY_TARGET]);
    a.x = fattni_walk_of(&c->in[LOGITS]);
    a.logits = fattni_operand_of(&c->in[LOGITS]);
    a.kept = c->saved;
    a.state = a.kept + 2;
    a.rows = a.all;
    a.V = a.width = c->in[LOGITS].shape[c->in[LOGITS].ndim - 1];
    return a;
}

static fattn_status forward_cross_entropy(fattn_op_call *c) {
    fattni_loss_args a = cross_entropy_args(c);
    a.out = fattni_operand_of(&c->out[0]);
    a.loss = c->workspace;
    a.pack = fattni_rows_in_packs(&c->in[LOGITS]) ? FATTNI_PACK : 1;
    a.dtype = a.logits.dtype;
    FATTNI_TRY(FATTNI_START(c->ctx, fattn_loss_count, 1, FATTNI_LOSS_THREADS, &a));
    FATTNI_TRY(start_rows(c->ctx, (fattn_dtype)a.logits.dtype, &a));
    return FATTNI_START(c->ctx, fattn_loss_mean, 1, FATTNI_LOSS_THREADS, &a);
}

static fattn_status backward_cross_entropy(fattn_op_call *c) {
    if (!c->d_in[LOGITS].data) return FATTN_OK;
    fattni_loss_args a = cross_entropy_args(c);
    a.out = fattni_operand_of(&c->d_out[0]);
    a.dx = fattni_walk_of(&c->d_in[LOGITS]);
    a.d = fattni_operand_of(&c->d_in[LOGITS]);
    a.fresh = c->d_in_fresh[LOGITS];
    a.pack = fattni_rows_in_packs(&c->in[LOGITS]) && fattni_rows_in_packs(&c->d_in[LOGITS]) ? FATTNI_PACK : 1;
    a.dtype = fattni_common_dtype((const fattni_operand *[]){&a.logits, &a.d}, 2);
    const fattni_cuda_any kernel =
        a.logits.dtype == FATTN_F64 ? (fattni_cuda_any)fattn_loss_back_f64 : (fattni_cuda_any)fattn_loss_back_f32;
    return start(c->ctx, "loss_back", kernel, 0, &a);
}

const fattni_code fattni_cross_entropy_cuda = {plan_cross_entropy, forward_cross_entropy, backward_cross_entropy};

/* ---- linear_cross_entropy: as on the CPU (op_linear_cross_entropy.c), with larger chunks ----

   A chunk's logits have the inputs' dtype, and their gradient G takes their place. The products take w's padding in,
   which keeps them aligned; its columns of G are 0. dx and dw are saved,
   dw as F32 beside 16 bits: it is summed over the chunks.

   Beside F16, where a probability over thousands of rows is 0, G is that of the losses' sum, times FATTNI_LOSS_UNIT;
   backward divides by both, with the loss scale, which is part of dloss. */

/* Of a chunk's logits. Its rows are a power of two: whole tiles of the products, and few waves of them
   that are not full. */
enum { CHUNK_BYTES = 1 << 30 };

typedef struct chunks {
    fattni_flat x;
    fattn_tensor w;
    int64_t R, V, K, rows; /* V: rows of w, padding included; rows: of a chunk */
    fattn_dtype dtype, real;
    bool want_dx, want_dw;
} chunks;

static chunks chunks_of(const fattn_op_call *c) {
    chunks p = {.x = fattni_flatten(&c->in[X]), .w = c->in[W], .want_dx = c->wanted[X], .want_dw = c->wanted[W]};
    p.R = p.x.t.shape[0], p.K = p.x.t.shape[1], p.V = p.w.shape[0];
    p.dtype = (fattn_dtype)p.w.dtype;
    const int64_t row_bytes = fattni_max(1, p.V) * (int64_t)fattn_dtype_size(p.dtype);
    int64_t rows = 1;
    while (2 * rows * row_bytes <= CHUNK_BYTES) rows *= 2;
    p.rows = fattni_max(1, fattni_min(p.R, rows));
    p.real = p.dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    return p;
}

static fattn_tensor matrix(const chunks *p, fattn_dtype dtype, int64_t rows, int64_t columns, void *data) {
    return fattn_tensor_view(data, dtype, (fattn_device)p->w.device, p->w.device_id, 2,
                             (const int64_t[]){rows, columns});
}

/* What one chunk is put through. */
typedef struct products {
    fattn_tensor x, logits, dx, dw;
    fattni_product forward, to_dx, to_dw;
} products;

static void products_of(const chunks *p, int64_t begin, int64_t rows, void *logits, void *dx, void *dw, products *out) {
    out->x = fattn_tensor_slice(&p->x.t, 0, begin, begin + rows);
    out->logits = matrix(p, p->dtype, rows, p->V, logits);
    out->dx = matrix(p, p->dtype, p->R, p->K, dx);
    out->dx = fattn_tensor_slice(&out->dx, 0, begin, begin + rows);
    out->dw = matrix(p, p->real, p->V, p->K, dw);
    out->forward = (fattni_product){.a = &out->x, .b = &p->w, .c = &out->logits, .trans_b = true};
    out->to_dx = (fattni_product){.a = &out->logits, .b = &p->w, .c = &out->dx};
    out->to_dw = (fattni_product){.a = &out->logits, .b = &out->x, .c = &out->dw, .trans_a = true, .add = begin > 0};
}

static size_t matrix_bytes(const chunks *p, fattn_dtype dtype, int64_t rows, int64_t columns) {
    const fattn_tensor t = matrix(p, dtype, rows, columns, NULL);
    return fattni_tensor_bytes(&t);
}

static size_t product_room(const fattn_ctx *ctx, const chunks *p, int64_t rows) {
    products q;
    products_of(p, 0, rows, NULL, NULL, NULL, &q);
    const size_t needs[] = {fattni_product_workspace(ctx, &q.forward), fattni_product_workspace(ctx, &q.to_dx),
                            fattni_product_workspace(ctx, &q.to_dw)};
    size_t bytes = 0;
    for (int n = 0; n < 3; ++n) bytes = needs[n] > bytes ? needs[n] : bytes;
    return bytes;
}

static size_t saved_dx_room(const chunks *p) {
    return p->want_dx ? fattni_room(matrix_bytes(p, p->dtype, p->R, p->K)) : 0;
}
static size_t saved_dw_room(const chunks *p) {
    return p->want_dw ? fattni_room(matrix_bytes(p, p->real, p->V, p->K)) : 0;
}

/* Of F16: what is left to multiply saved gradients by, and that times dloss. NULL: nothing but dloss. */
static float *saved_rest(const fattn_op_call *c, const chunks *p) {
    const bool wanted = p->dtype == FATTN_F16 && (p->want_dx || p->want_dw);
    return wanted ? (float *)((char *)c->saved + saved_dx_room(p) + saved_dw_room(p)) : NULL;
}

/* Saved: dx, dw, rest. Workspace: x, kept, the rows' losses, logits, what the products need. */
static void plan_linear(fattn_op_call *c) {
    const chunks p = chunks_of(c);
    const size_t full = product_room(c->ctx, &p, p.rows);
    const size_t last = product_room(c->ctx, &p, p.R % p.rows);
    c->fwd_workspace = fattni_room(fattni_flat_bytes(&p.x)) + fattni_room(sizeof(double)) +
                       fattni_room((size_t)p.R * sizeof(double)) + fattni_room(matrix_bytes(&p, p.dtype, p.rows, p.V)) +
                       (full > last ? full : last);
    c->saved_bytes = saved_dx_room(&p) + saved_dw_room(&p);
    if (c->saved_bytes && p.dtype == FATTN_F16) c->saved_bytes += fattni_room(2 * sizeof(float));
}

static fattn_status forward_linear(fattn_op_call *c) {
    chunks p = chunks_of(c);
    fattni_loss_args a = targets_of(c, &c->in[FATTNI_LINEAR_CROSS_ENTROPY_TARGET]);
    void *workspace = c->workspace;
    FATTNI_TRY(fattni_flat_read(c->ctx, &p.x, &c->in[X], &workspace));
    a.kept = fattni_carve(&workspace, sizeof(double));
    a.loss = fattni_carve(&workspace, (size_t)p.R * sizeof(double));
    void *const logits = fattni_carve(&workspace, matrix_bytes(&p, p.dtype, p.rows, p.V));
    void *const dw = p.want_dw ? (char *)c->saved + saved_dx_room(&p) : NULL;
    a.out = fattni_operand_of(&c->out[0]);
    a.V = fattni_loss_classes(c);
    a.width = p.V;
    a.fresh = true;
    a.gradients = p.want_dx || p.want_dw;
    a.rest = saved_rest(c, &p);
    FATTNI_TRY(FATTNI_START(c->ctx, fattn_loss_count, 1, FATTNI_LOSS_THREADS, &a));
    for (; a.first < p.R; a.first += p.rows) {
        products q;
        a.rows = fattni_min(p.rows, p.R - a.first);
        products_of(&p, a.first, a.rows, logits, c->saved, dw, &q);
        a.x = a.dx = fattni_walk_of(&q.logits);
        a.logits = a.d = fattni_operand_of(&q.logits);
        a.pack = fattni_rows_in_packs(&q.logits) ? FATTNI_PACK : 1;
        a.dtype = a.logits.dtype;
        FATTNI_TRY(fattni_product_run(c->ctx, &q.forward, workspace));
        FATTNI_TRY(start_rows(c->ctx, p.real, &a));
        if (p.want_dx) FATTNI_TRY(fattni_product_run(c->ctx, &q.to_dx, workspace));
        if (p.want_dw) FATTNI_TRY(fattni_product_run(c->ctx, &q.to_dw, workspace));
    }
    if (p.R == 0 && dw) FATTNI_TRY(fattni_cuda_zero(c->ctx, dw, matrix_bytes(&p, p.real, p.V, p.K)));
    return FATTNI_START(c->ctx, fattn_loss_mean, 1, FATTNI_LOSS_THREADS, &a);
}

/* Both scaled by dloss, which stays where it is, and by the rest. */
static fattn_status backward_linear(fattn_op_call *c) {
    const chunks p = chunks_of(c);
    fattn_tensor by = c->d_out[0];
    float *const rest = saved_rest(c, &p);
    if (rest) {
        const fattn_tensor left = fattni_row_major(&c->d_out[0], rest);
        by.data = rest + 1;
        FATTNI_TRY(
            fattni_cuda_each(c->ctx, FATTNI_MUL, (const fattn_tensor *[]){&by, &left, &c->d_out[0]}, 3, true, 0));
    }
    for (int i = X; i <= W; ++i) {
        if (!c->d_in[i].data) continue;
        char *const data = (char *)c->saved + (i == W ? saved_dx_room(&p) : 0);
        const fattn_tensor saved = fattn_tensor_view(data, i == W ? p.real : p.dtype, c->ctx->device, c->ctx->device_id,
                                                     c->in[i].ndim, c->in[i].shape);
        const fattn_tensor *const t[] = {&c->d_in[i], &saved, &by};
        FATTNI_TRY(fattni_cuda_each(c->ctx, FATTNI_MUL, t, 3, c->d_in_fresh[i], 0));
    }
    return FATTN_OK;
}

const fattni_code fattni_linear_cross_entropy_cuda = {plan_linear, forward_linear, backward_linear};
