/* loss = cross_entropy(x w^T, target); x [..,K] seen as R rows, w [V,K], target I32 [..]. When w has more rows than
   there are classes, only its first V are read; the others' gradient is 0.

   Logits exist for one chunk of rows at a time, in the workspace. Forward turns them into
   G = (softmax - onehot) / kept in place and at once takes dx = G w and dw += G^T x, which it saves;
   backward scales both by dloss. So the head costs three products, as if logits were kept. To compute
   them again in backward would make it four; what that saves, one dx and one dw, lives from forward to
   backward only, which follow one another when the loss is the end of the graph. When no gradient is
   wanted, forward computes the loss alone.

   On the CPU BF16 inputs are either F32 copies (tape_wide.c), or are multiplied as they are (fattni_choose_products):
   then logits, dx and dw are F32, and G is two BF16 matrices of equal size, G rounded and what that leaves, so that
   its products lose 2^-16 of a term where BF16 alone would lose 2^-8. */
#include "autograd_c/ops/exp.h"
#include "autograd_c/ops/ops.h"
#include "core/base/isa_clones.h"
#include "autograd_c/ops/loss/op_loss.h"
#include "autograd_c/ops/loss/targets.h"
#include "core/cpu/gemm_bf16.h"
#include "core/tensor/numeric.h"

#include <math.h>
#include <string.h>

enum { X = FATTNI_LOSS_X, W = FATTNI_LOSS_W, TARGET = FATTNI_LINEAR_CROSS_ENTROPY_TARGET };
/* A chunk has about a million logits, yet enough rows for the products to be fast. */
enum { CHUNK_LOGITS = 1 << 20, LEAST_ROWS = 256, MOST_ROWS = 2048, ELEMENTS_PER_TASK = 16384 };

/* Shapes, and how the work is cut: by shape alone. */
typedef struct plan {
    fattni_flat x;
    fattn_tensor w; /* [V,K], the classes */
    int64_t R, V, K, chunk, rows_per_task;
    fattn_dtype real; /* of logits, and of what is saved */
    bool want_dx, want_dw, splits;
} plan;

static plan plan_of(const fattn_op_call *c) {
    plan p = {.x = fattni_flatten(&c->in[X]), .want_dx = c->wanted[X], .want_dw = c->wanted[W]};
    p.R = p.x.t.shape[0], p.K = p.x.t.shape[1], p.V = fattni_loss_classes(c);
    p.w = fattn_tensor_slice(&c->in[W], 0, 0, p.V);
    p.real = p.w.dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    p.splits = p.w.dtype == FATTN_BF16 && (p.want_dx || p.want_dw);
    const int64_t rows = CHUNK_LOGITS / fattni_max(1, p.V);
    p.chunk = fattni_max(1, fattni_min(p.R, fattni_max(LEAST_ROWS, fattni_min(MOST_ROWS, rows))));
    p.rows_per_task = fattni_max(1, ELEMENTS_PER_TASK / fattni_max(1, p.V));
    return p;
}

static fattn_tensor matrix(const plan *p, fattn_dtype dtype, int64_t rows, int64_t columns, void *data) {
    return fattn_tensor_view(data, dtype, (fattn_device)p->w.device, p->w.device_id, 2,
                             (const int64_t[]){rows, columns});
}

/* Where a chunk's matrices are. */
typedef struct places {
    void *logits, *dx, *dw;
    uint16_t *high, *low; /* G in two parts; NULL: it takes the place of the logits */
} places;

/* What one chunk of rows is put through. */
typedef struct products {
    fattn_tensor x, logits, g, dx, dw;
    fattni_product forward, to_dx, to_dw;
} products;

static void products_of(const plan *p, int64_t begin, int64_t rows, const places *at, products *out) {
    out->x = fattn_tensor_slice(&p->x.t, 0, begin, begin + rows);
    out->logits = matrix(p, p->real, rows, p->V, at->logits);
    out->g = p->splits ? matrix(p, FATTN_BF16, rows, p->V, at->high) : out->logits;
    out->dx = matrix(p, p->real, p->R, p->K, at->dx);
    out->dx = fattn_tensor_slice(&out->dx, 0, begin, begin + rows);
    out->dw = matrix(p, p->real, p->V, p->K, at->dw);
    out->forward = (fattni_product){.a = &out->x, .b = &p->w, .c = &out->logits, .trans_b = true};
    out->to_dx = (fattni_product){.a = &out->g, .b = &p->w, .c = &out->dx};
    out->to_dw = (fattni_product){.a = &out->g, .b = &out->x, .c = &out->dw, .trans_a = true, .add = begin > 0};
}

static size_t product_room(const fattn_ctx *ctx, const plan *p, int64_t rows) {
    products q;
    products_of(p, 0, rows, &(places){NULL}, &q);
    size_t bytes = fattni_product_workspace(ctx, &q.forward);
    const size_t dx = fattni_product_workspace(ctx, &q.to_dx);
    const size_t dw = fattni_product_workspace(ctx, &q.to_dw);
    if (p->want_dx && dx > bytes) bytes = dx;
    if (p->want_dw && dw > bytes) bytes = dw;
    return bytes;
}

/* The product of G, or of its two parts. */
static fattn_status multiply_g(fattn_ctx *ctx, const plan *p, fattni_product *product, fattn_tensor *g,
                               const places *at, void *workspace) {
    FATTNI_TRY(fattni_product_run(ctx, product, workspace));
    if (!p->splits) return FATTN_OK;
    g->data = at->low;
    product->add = true;
    const fattn_status s = fattni_product_run(ctx, product, workspace);
    g->data = at->high;
    return s;
}

static size_t part_bytes(const plan *p) { return p->splits ? (size_t)(p->chunk * p->V) * sizeof(uint16_t) : 0; }

static size_t loss_bytes(const plan *p) { return (size_t)fattni_ceil_div(p->chunk, p->rows_per_task) * sizeof(double); }

static fattn_status infer(fattn_op_call *c) {
    const char *const op = "linear_cross_entropy";
    FATTNI_TRY(fattni_check_real(c, op, "x", X));
    FATTNI_TRY(fattni_check_real(c, op, "w", W));
    FATTNI_TRY(fattni_check_i32(c, op, "target", TARGET));
    const fattn_tensor *x = &c->in[X], *w = &c->in[W];
    if (w->ndim != 2 || x->ndim < 1 || x->shape[x->ndim - 1] != w->shape[1])
        return fattni_misfit(c, op, "x", X, "w", W, "[..,K] and [V,K] are needed");
    FATTNI_TRY(fattni_check_per_row(c, op, "target", TARGET, "x", X));
    FATTNI_TRY(fattni_check_extents(c, op));
    const int64_t classes = fattni_loss_classes(c);
    if (classes < 0 || classes > w->shape[0])
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "%s: %lld classes, w has %lld rows: 0..%lld are possible", op,
                              (long long)classes, (long long)w->shape[0], (long long)w->shape[0]);
    const plan p = plan_of(c);
    FATTNI_TRY(fattni_check_product(c, op, p.R, p.V, p.K));
    if (p.x.in_place) FATTNI_TRY(fattni_choose_products(c, p.chunk, p.V, p.K));
    c->out[0].dtype = x->dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    fattni_code_of(c, FATTNI_LINEAR_CROSS_ENTROPY)->plan(c);
    return FATTN_OK;
}

static void plan_cpu(fattn_op_call *c) {
    const plan p = plan_of(c);
    const fattn_tensor logits = matrix(&p, p.real, p.chunk, p.V, NULL);
    const size_t full = product_room(c->ctx, &p, p.chunk);
    const size_t last = product_room(c->ctx, &p, p.R % p.chunk);
    c->fwd_workspace = fattni_room(fattni_flat_bytes(&p.x)) + fattni_room(loss_bytes(&p)) +
                       fattni_room(fattni_tensor_bytes(&logits)) + 2 * fattni_room(part_bytes(&p)) +
                       (full > last ? full : last);
    if (p.want_dx) c->saved_bytes += fattni_room(fattni_widest_bytes(&c->in[X]));
    if (p.want_dw) c->saved_bytes += fattni_room(fattni_widest_bytes(&p.w));
}

typedef struct job {
    const plan *p;
    fattni_targets target;
    int64_t begin, rows; /* of the chunk */
    double weight;       /* of a kept row */
    places at;
    double *loss; /* [tasks of a chunk] */
} job;

typedef struct scaling {
    double by;
    bool fresh;
} scaling;

#define BODY "autograd_c/ops/loss/op_linear_cross_entropy.inc"
#include "core/base/for_each_real.inc"

/* d = by x, or d += by x, for d in BF16. */
static void scale_bf16(void *const *p, const int64_t *step, int64_t n, const void *arg) {
    const scaling *const s = arg;
    const float by = (float)s->by, *const x = p[1];
    uint16_t *const d = p[0];
    for (int64_t i = 0; i < n; ++i) {
        const float old = s->fresh ? 0 : fattni_bf16_to_float(d[i * step[0]]);
        d[i * step[0]] = fattni_float_to_bf16(old + by * x[i * step[1]]);
    }
}

/* The rows of a chunk, G in two parts. */
static FATTNI_CLONED void rows_bf16(void *arg, int64_t task, int thread) {
    const job *const j = arg;
    const int64_t each = j->p->rows_per_task * j->p->V;
    rows_f32(arg, task, thread);
    const int64_t n = fattni_min(each, j->rows * j->p->V - task * each), first = task * each;
    fattni_bf16_split((const float *)j->at.logits + first, j->at.high + first, j->at.low + first, n);
}

FATTNI_TASKS_BY_ISA(rows_bf16)

/* The loss of one chunk, summed; its gradients into what is saved. */
static fattn_status run_chunk(fattn_ctx *ctx, job *j, void *workspace, double *loss) {
    const plan *p = j->p;
    products q;
    products_of(p, j->begin, j->rows, &j->at, &q);
    FATTNI_TRY(fattni_product_run(ctx, &q.forward, workspace));
    const int64_t tasks = fattni_ceil_div(j->rows, p->rows_per_task);
    const fattni_task *const run = p->splits ? rows_bf16_by_isa : rows_f32_by_isa;
    fattni_parallel(ctx, tasks, (p->real == FATTN_F64 ? rows_f64_by_isa : run)[ctx->isa], j);
    for (int64_t i = 0; i < tasks; ++i) *loss += j->loss[i];
    if (p->want_dx) FATTNI_TRY(multiply_g(ctx, p, &q.to_dx, &q.g, &j->at, workspace));
    if (p->want_dw) FATTNI_TRY(multiply_g(ctx, p, &q.to_dw, &q.g, &j->at, workspace));
    return FATTN_OK;
}

/* Where saved gradients lie: dx, then dw. */
static void *saved_dw(const fattn_op_call *c) {
    const size_t dx = c->wanted[X] ? fattni_room(fattni_widest_bytes(&c->in[X])) : 0;
    return c->wanted[W] ? (char *)c->saved + dx : NULL;
}

static fattn_status forward_cpu(fattn_op_call *c) {
    plan p = plan_of(c);
    job j = {.p = &p, .target = fattni_targets_of(&c->in[TARGET], *(const int32_t *)c->attr)};
    int64_t kept;
    FATTNI_TRY(fattni_targets_check(c->ctx, "linear_cross_entropy", &j.target, p.V, &kept));
    j.weight = kept > 0 ? 1 / (double)kept : 0;
    void *workspace = c->workspace, *const dw = saved_dw(c);
    j.at = (places){.dx = c->saved, .dw = dw};
    FATTNI_TRY(fattni_flat_read(c->ctx, &p.x, &c->in[X], &workspace));
    j.loss = fattni_carve(&workspace, loss_bytes(&p));
    const fattn_tensor logits = matrix(&p, p.real, p.chunk, p.V, NULL);
    j.at.logits = fattni_carve(&workspace, fattni_tensor_bytes(&logits));
    j.at.high = fattni_carve(&workspace, part_bytes(&p));
    j.at.low = fattni_carve(&workspace, part_bytes(&p));
    double loss = 0;
    for (; j.begin < p.R; j.begin += p.chunk) {
        j.rows = fattni_min(p.chunk, p.R - j.begin);
        FATTNI_TRY(run_chunk(c->ctx, &j, workspace, &loss));
    }
    if (p.R == 0 && dw) memset(dw, 0, fattni_widest_bytes(&p.w));
    loss *= j.weight;
    if (p.real == FATTN_F64)
        *(double *)c->out[0].data = loss;
    else
        *(float *)c->out[0].data = (float)loss;
    return FATTN_OK;
}

static fattn_status backward_cpu(fattn_op_call *c) {
    const bool wide = c->in[X].dtype == FATTN_F64;
    const void *d = c->d_out[0].data;
    for (int i = X; i <= W; ++i) {
        if (!c->d_in[i].data) continue;
        const int64_t rows = c->d_in[i].shape[0], classes = i == W ? fattni_loss_classes(c) : rows;
        const fattn_tensor kept = i == W ? fattn_tensor_slice(&c->d_in[i], 0, 0, classes) : c->d_in[i];
        fattn_tensor saved = fattni_row_major(&kept, i == X ? c->saved : saved_dw(c));
        saved.dtype = wide ? FATTN_F64 : FATTN_F32;
        const fattn_tensor *const t[] = {&kept, &saved};
        const scaling s = {wide ? *(const double *)d : (double)*(const float *)d, c->d_in_fresh[i]};
        fattni_each(c->ctx, t, 2, wide ? scale_f64 : kept.dtype == FATTN_BF16 ? scale_bf16 : scale_f32, &s);
        if (classes == rows || !c->d_in_fresh[i]) continue;
        const fattn_tensor padding = fattn_tensor_slice(&c->d_in[i], 0, classes, rows);
        FATTNI_TRY(fattn_tensor_normal(c->ctx, &padding, 0, 0, (fattn_rng){0}));
    }
    return FATTN_OK;
}

const fattni_code fattni_linear_cross_entropy_cpu = {plan_cpu, forward_cpu, backward_cpu};

static fattn_status forward(fattn_op_call *c) { return fattni_code_of(c, FATTNI_LINEAR_CROSS_ENTROPY)->forward(c); }

static fattn_status backward(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_gradients(c, "linear_cross_entropy"));
    return fattni_code_of(c, FATTNI_LINEAR_CROSS_ENTROPY)->backward(c);
}

const fattn_op_def fattni_op_linear_cross_entropy = {.struct_size = sizeof(fattn_op_def),
                                                     .attr_size = sizeof(fattni_linear_loss),
                                                     .n_out = 1,
                                                     .flags = FATTN_OP_F32_ON_CPU,
                                                     .name = "linear_cross_entropy",
                                                     .infer = infer,
                                                     .forward = forward,
                                                     .backward = backward};

fattn_var fattn_op_linear_cross_entropy(fattn_tape *t, fattn_var x, fattn_var w, fattn_var target, int32_t ignore) {
    const fattni_linear_loss attr = {.ignore = ignore, .all = 1};
    return fattn_op_custom(t, &fattni_op_linear_cross_entropy, (fattn_var[]){x, w, target}, 3, &attr);
}

fattn_var fattn_op_linear_cross_entropy_padded(fattn_tape *t, fattn_var x, fattn_var w, fattn_var target,
                                               int32_t ignore, int64_t classes) {
    const fattni_linear_loss attr = {.ignore = ignore, .classes = classes};
    return fattn_op_custom(t, &fattni_op_linear_cross_entropy, (fattn_var[]){x, w, target}, 3, &attr);
}
