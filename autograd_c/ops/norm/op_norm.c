/* layernorm and rmsnorm over the last dimension, C elements.

   layernorm   h = (x - mean) r,  r = 1 / sqrt(mean((x - mean)^2) + eps)
   rmsnorm     h = x r,           r = 1 / sqrt(mean(x^2) + eps)
   y = h gain + bias; gain, bias [C].

   Backward, with g = dy gain: dx = r (g - mean(g) - h mean(g h)), without mean(g) for rmsnorm;
   dgain = sum over rows of dy h, dbias = sum of dy. Saves mean (layernorm) and r of each row. Sums
   of a row are in double; dgain and dbias are summed within a block of rows first, in x's type. */
#include "autograd_c/ops/norm/op_norm.h"
#include "autograd_c/ops/ops.h"
#include "core/base/isa_clones.h"

#include <math.h>
#include <string.h>

typedef fattni_norm norm;
enum { X = FATTNI_NORM_X, GAIN = FATTNI_NORM_GAIN, BIAS = FATTNI_NORM_BIAS };
/* Rows of a task: enough to pay for it; so many that at most 256 partial sums are kept. */
enum { LEAST_ROWS = 16, MOST_BLOCKS = 256, SUMS = 128 };
/* Outside of (least, 1 / least) a mean square may have lost to the ends of double's range; the row is
   then seen in another unit. */
#define LEAST_SQUARE 0x1p-900
#define UNIT 0x1p-700

static int64_t rows_per_task(int64_t rows) { return fattni_max(LEAST_ROWS, fattni_ceil_div(rows, MOST_BLOCKS)); }

typedef struct job {
    const fattn_op_call *c;
    double eps;
    bool centred;
    fattni_rows x, dx, y; /* y: output, and its gradient in backward */
    int64_t rows_per_task;
    void *statistics; /* saved: r[rows], mean[rows] */
    void *partial;    /* [blocks][2][C]: sums of dy h and of dy; NULL: not wanted */
} job;

#define BODY "autograd_c/ops/norm/op_norm.inc"
#include "core/base/for_each_real.inc"

static job job_of(const fattn_op_call *c) {
    const norm *a = c->attr;
    job j = {.c = c,
             .eps = (double)a->eps,
             .centred = a->centred,
             .x = fattni_rows_of(&c->in[X]),
             .y = fattni_rows_of(&c->out[0]),
             .statistics = c->saved};
    j.rows_per_task = rows_per_task(j.x.count);
    return j;
}

static fattn_status infer_as(fattn_op_call *c, const char *op) {
    const norm *a = c->attr;
    FATTNI_TRY(fattni_check_real(c, op, "x", X));
    FATTNI_TRY(fattni_check_contiguous(c, op, "x", X));
    const int64_t C = c->in[X].shape[c->in[X].ndim - 1];
    for (int i = GAIN; i < c->n_in; ++i) {
        const char *const name = i == GAIN ? "gain" : "bias";
        if (i == BIAS && fattni_absent(&c->in[i])) continue;
        FATTNI_TRY(fattni_check_real(c, op, name, i));
        FATTNI_TRY(fattni_check_contiguous(c, op, name, i));
        if (c->in[i].ndim != 1 || c->in[i].shape[0] != C)
            return fattni_misfit(c, op, "x", X, name, i, "it needs one element per column of x");
    }
    if (!(isfinite(a->eps) && a->eps >= 0))
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "%s: eps is %g", op, (double)a->eps);
    fattni_out_like(c, X);
    FATTNI_TRY(fattni_check_extents(c, op));
    fattni_code_of(c, FATTNI_NORM)->plan(c);
    return FATTN_OK;
}

static void plan_cpu(fattn_op_call *c) {
    const fattni_rows x = fattni_rows_of(&c->in[X]);
    const size_t size = fattn_dtype_size((fattn_dtype)c->in[X].dtype);
    const int64_t blocks = fattni_ceil_div(x.count, rows_per_task(x.count));
    const bool sums = c->wanted[GAIN] || (c->n_in > BIAS && c->wanted[BIAS]);
    c->saved_bytes = (size_t)x.count * size * (((const norm *)c->attr)->centred ? 2 : 1);
    if (sums) c->bwd_workspace = (size_t)(blocks * 2 * x.columns) * size;
}

static fattn_status forward_cpu(fattn_op_call *c) {
    job j = job_of(c);
    fattni_parallel(c->ctx, fattni_ceil_div(j.x.count, j.rows_per_task),
                    (c->out[0].dtype == FATTN_F64 ? forward_f64_by_isa : forward_f32_by_isa)[c->ctx->isa], &j);
    return FATTN_OK;
}

static fattn_status backward_cpu(fattn_op_call *c) {
    job j = job_of(c);
    j.dx = fattni_rows_of(&c->d_in[X]);
    const bool wide = c->out[0].dtype == FATTN_F64;
    const fattn_tensor *dgain = &c->d_in[GAIN], *dbias = c->n_in > BIAS ? &c->d_in[BIAS] : NULL;
    if (dgain->data || (dbias && dbias->data)) j.partial = c->workspace;
    fattni_parallel(c->ctx, fattni_ceil_div(j.x.count, j.rows_per_task),
                    (wide ? backward_f64_by_isa : backward_f32_by_isa)[c->ctx->isa], &j);
    for (int which = 0; which < 2; ++which) {
        const fattn_tensor *d = which == 0 ? dgain : dbias;
        if (!d || !d->data) continue;
        const int64_t blocks = fattni_ceil_div(j.x.count, j.rows_per_task);
        (wide ? add_blocks_f64 : add_blocks_f32)(&j, blocks, which, d, c->d_in_fresh[GAIN + which]);
    }
    return FATTN_OK;
}

const fattni_code fattni_norm_cpu = {plan_cpu, forward_cpu, backward_cpu};

static fattn_status forward(fattn_op_call *c) { return fattni_code_of(c, FATTNI_NORM)->forward(c); }

static fattn_status backward_as(fattn_op_call *c, const char *op) {
    FATTNI_TRY(fattni_check_gradients(c, op));
    return fattni_code_of(c, FATTNI_NORM)->backward(c);
}

static fattn_status infer_layernorm(fattn_op_call *c) { return infer_as(c, "layernorm"); }
static fattn_status infer_rmsnorm(fattn_op_call *c) { return infer_as(c, "rmsnorm"); }
static fattn_status back_layernorm(fattn_op_call *c) { return backward_as(c, "layernorm"); }
static fattn_status back_rmsnorm(fattn_op_call *c) { return backward_as(c, "rmsnorm"); }

const fattn_op_def fattni_op_layernorm = {.struct_size = sizeof(fattn_op_def),
                                          .attr_size = sizeof(norm),
                                          .n_out = 1,
                                          .flags = FATTN_OP_F32_ON_CPU,
                                          .name = "layernorm",
                                          .infer = infer_layernorm,
                                          .forward = forward,
                                          .backward = back_layernorm};
const fattn_op_def fattni_op_rmsnorm = {.struct_size = sizeof(fattn_op_def),
                                        .attr_size = sizeof(norm),
                                        .n_out = 1,
                                        .flags = FATTN_OP_F32_ON_CPU,
                                        .name = "rmsnorm",
                                        .infer = infer_rmsnorm,
                                        .forward = forward,
                                        .backward = back_rmsnorm};

fattn_var fattn_op_layernorm(fattn_tape *t, fattn_var x, fattn_var gain, fattn_var bias, float eps) {
    return fattn_op_custom(t, &fattni_op_layernorm, (fattn_var[]){x, gain, bias}, 3, &(norm){.eps = eps, .centred = 1});
}

fattn_var fattn_op_rmsnorm(fattn_tape *t, fattn_var x, fattn_var gain, float eps) {
    return fattn_op_custom(t, &fattni_op_rmsnorm, (fattn_var[]){x, gain}, 2, &(norm){.eps = eps});
}
