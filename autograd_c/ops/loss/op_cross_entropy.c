/* loss = the mean over kept rows of log(sum_j exp x_j) - x_target; logits x [..,V], target I32 [..].
   Rows with target = ignore are left out; when none is kept the loss is 0.
   Backward: dx = dloss / kept (softmax(x) - onehot(target)), 0 in rows left out. Saves the number of
   kept rows, and of each row its maximum and the sum of exp(x - max): unlike their joint logarithm
   they keep the gradient exact when logits are large. */
#include "autograd_c/ops/exp.h"
#include "autograd_c/ops/ops.h"
#include "core/base/isa_clones.h"
#include "autograd_c/ops/loss/op_loss.h"
#include "autograd_c/ops/loss/targets.h"

#include <math.h>
#include <string.h>

enum { LOGITS = FATTNI_LOSS_LOGITS, TARGET = FATTNI_CROSS_ENTROPY_TARGET, ELEMENTS_PER_TASK = 16384 };

typedef struct row_state {
    double max, sum;
} row_state;

typedef struct job {
    const fattn_op_call *c;
    fattni_targets target;
    fattni_rows x, dx;
    int64_t rows_per_task;
    double *kept; /* saved: how many rows; then the states */
    row_state *state;
    double *loss;  /* workspace: [tasks], sums */
    double weight; /* of a kept row in backward */
} job;

#define BODY "autograd_c/ops/loss/op_cross_entropy.inc"
#include "core/base/for_each_real.inc"

static int64_t rows_per_task(int64_t V) { return fattni_max(1, ELEMENTS_PER_TASK / fattni_max(1, V)); }

static job job_of(const fattn_op_call *c) {
    job j = {.c = c,
             .target = fattni_targets_of(&c->in[TARGET], *(const int32_t *)c->attr),
             .x = fattni_rows_of(&c->in[LOGITS]),
             .kept = c->saved};
    j.rows_per_task = rows_per_task(j.x.columns);
    j.state = (row_state *)(j.kept + 2);
    return j;
}

static fattn_status infer(fattn_op_call *c) {
    const char *const op = "cross_entropy";
    FATTNI_TRY(fattni_check_real(c, op, "logits", LOGITS));
    FATTNI_TRY(fattni_check_contiguous(c, op, "logits", LOGITS));
    FATTNI_TRY(fattni_check_i32(c, op, "target", TARGET));
    FATTNI_TRY(fattni_check_per_row(c, op, "target", TARGET, "logits", LOGITS));
    FATTNI_TRY(fattni_check_extents(c, op));
    c->out[0].dtype = c->in[LOGITS].dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    fattni_code_of(c, FATTNI_CROSS_ENTROPY)->plan(c);
    return FATTN_OK;
}

static void plan_cpu(fattn_op_call *c) {
    const fattni_rows x = fattni_rows_of(&c->in[LOGITS]);
    c->saved_bytes = 2 * sizeof(double) + (size_t)x.count * sizeof(row_state);
    c->fwd_workspace = (size_t)fattni_ceil_div(x.count, rows_per_task(x.columns)) * sizeof(double);
}

static fattn_status forward_cpu(fattn_op_call *c) {
    job j = job_of(c);
    const int64_t tasks = fattni_ceil_div(j.x.count, j.rows_per_task);
    int64_t kept;
    FATTNI_TRY(fattni_targets_check(c->ctx, "cross_entropy", &j.target, j.x.columns, &kept));
    j.kept[0] = (double)kept;
    j.loss = c->workspace;
    const bool wide = c->out[0].dtype == FATTN_F64;
    fattni_parallel(c->ctx, tasks, (wide ? forward_f64_by_isa : forward_f32_by_isa)[c->ctx->isa], &j);
    double loss = 0;
    for (int64_t i = 0; i < tasks; ++i) loss += j.loss[i];
    if (kept > 0) loss /= (double)kept;
    if (wide)
        *(double *)c->out[0].data = loss;
    else
        *(float *)c->out[0].data = (float)loss;
    return FATTN_OK;
}

static fattn_status backward_cpu(fattn_op_call *c) {
    if (!c->d_in[LOGITS].data) return FATTN_OK;
    job j = job_of(c);
    const bool wide = c->out[0].dtype == FATTN_F64;
    const double d = wide ? *(const double *)c->d_out[0].data : (double)*(const float *)c->d_out[0].data;
    j.dx = fattni_rows_of(&c->d_in[LOGITS]);
    j.weight = j.kept[0] > 0 ? d / j.kept[0] : 0;
    fattni_parallel(c->ctx, fattni_ceil_div(j.x.count, j.rows_per_task),
                    (wide ? backward_f64_by_isa : backward_f32_by_isa)[c->ctx->isa], &j);
    return FATTN_OK;
}

const fattni_code fattni_cross_entropy_cpu = {plan_cpu, forward_cpu, backward_cpu};

static fattn_status forward(fattn_op_call *c) { return fattni_code_of(c, FATTNI_CROSS_ENTROPY)->forward(c); }

static fattn_status backward(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_gradients(c, "cross_entropy"));
    return fattni_code_of(c, FATTNI_CROSS_ENTROPY)->backward(c);
}

const fattn_op_def fattni_op_cross_entropy = {.struct_size = sizeof(fattn_op_def),
                                              .attr_size = sizeof(int32_t),
                                              .n_out = 1,
                                              .flags = FATTN_OP_F32_ON_CPU,
                                              .name = "cross_entropy",
                                              .infer = infer,
                                              .forward = forward,
                                              .backward = backward};

fattn_var fattn_op_cross_entropy(fattn_tape *t, fattn_var logits, fattn_var target, int32_t ignore) {
    return fattn_op_custom(t, &fattni_op_cross_entropy, (fattn_var[]){logits, target}, 2, &ignore);
}
