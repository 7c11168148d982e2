/* Dropout (Srivastava et al., 2014), scaled while training: y = x 32768/(32768 - T) where an element is kept, else 0,
   T = round(32768 p). Whether element e, in row-major order, is kept says lane e % 8 of Philox block e / 8
   (fattni_keeps, core/tensor/philox.h): the mask depends on the seed, the stream, the step and e alone. Backward: the
   same of dy, with the mask computed again; nothing is saved. p 0: y is a view of x. */
#include "autograd_c/ops/dropout/op_dropout.h"
#include "autograd_c/ops/shape/part.h"
#include "core/tensor/philox.h"

#include <math.h>
#include <string.h>

enum { X = FATTNI_DROPOUT_X, STEP = FATTNI_DROPOUT_STEP };
enum { BLOCK = 8, ELEMENTS_PER_TASK = 16384 };

typedef struct job {
    const fattni_dropout *attr;
    uint32_t step;
    fattni_rows to, from;
    void *d;
    const void *x;
    int64_t count;
    bool fresh;
} job;

#define BODY "autograd_c/ops/dropout/op_dropout.inc"
#include "core/base/for_each_real.inc"

/* The tape's copy, which is this op's to write. */
static fattni_dropout *attribute_of(const fattn_op_call *c) {
    fattni_dropout *own;
    memcpy(&own, &c->attr, sizeof own);
    return own;
}

static fattn_status infer(fattn_op_call *c) {
    fattni_dropout *const a = attribute_of(c);
    char text[96];
    FATTNI_TRY(fattni_check_real(c, "dropout", "x", X));
    if (!(a->p >= 0 && a->p < 1))
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "dropout: p is %g, not in [0, 1)", (double)a->p);
    if (a->rng.reserved)
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "dropout: rng.reserved is %u, not 0", a->rng.reserved);
    const long T = lround(FATTNI_DROP_ALL * (double)a->p);
    if (a->p > 0 && (T < 1 || T >= FATTNI_DROP_ALL))
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "dropout: p is %g, which rounds to %ld/%d, not 1 to %d of them",
                              (double)a->p, T, FATTNI_DROP_ALL, FATTNI_DROP_ALL - 1);
    if (!fattni_absent(&c->in[STEP])) {
        FATTNI_TRY(fattni_check_i32(c, "dropout", "step", STEP));
        if (c->in[STEP].ndim != 0)
            return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "dropout: step is %s, not a scalar",
                                  fattni_shape_text(&c->in[STEP], text, sizeof text));
    }
    a->T = (uint32_t)T;
    a->scale = FATTNI_DROP_ALL / (double)(FATTNI_DROP_ALL - T);
    fattni_out_like(c, X);
    FATTNI_TRY(fattni_check_extents(c, "dropout"));
    if (T == 0) return fattni_part_infer(c, &c->in[X]);
    fattni_code_of(c, FATTNI_DROPOUT)->plan(c);
    return FATTN_OK;
}

static void plan_cpu(fattn_op_call *c) { (void)c; }

static void drop(const fattn_op_call *c, const fattn_tensor *d, const fattn_tensor *x, bool fresh) {
    const int32_t *const step = c->in[STEP].data;
    job j = {.attr = c->attr,
             .step = step ? (uint32_t)*step : 0,
             .to = fattni_rows_of(d),
             .from = fattni_rows_of(x),
             .d = d->data,
             .x = x->data,
             .count = fattn_tensor_numel(d),
             .fresh = fresh};
    fattni_parallel(c->ctx, fattni_ceil_div(j.count, ELEMENTS_PER_TASK), d->dtype == FATTN_F64 ? drop_f64 : drop_f32,
                    &j);
}

static fattn_status forward_cpu(fattn_op_call *c) {
    drop(c, &c->out[0], &c->in[X], true);
    return FATTN_OK;
}

static fattn_status backward_cpu(fattn_op_call *c) {
    if (c->d_in[X].data) drop(c, &c->d_in[X], &c->d_out[0], c->d_in_fresh[X]);
    return FATTN_OK;
}

const fattni_code fattni_dropout_cpu = {plan_cpu, forward_cpu, backward_cpu};

static fattn_status forward(fattn_op_call *c) {
    if (attribute_of(c)->T == 0) return fattn_tensor_copy(c->ctx, &c->out[0], &c->in[X]);
    return fattni_code_of(c, FATTNI_DROPOUT)->forward(c);
}

static fattn_status backward(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_gradients(c, "dropout"));
    return fattni_code_of(c, FATTNI_DROPOUT)->backward(c);
}

const fattn_op_def fattni_op_dropout = {.struct_size = sizeof(fattn_op_def),
                                        .attr_size = sizeof(fattni_dropout),
                                        .n_out = 1,
                                        .flags = FATTN_OP_MAY_VIEW | FATTN_OP_F32_ON_CPU,
                                        .name = "dropout",
                                        .infer = infer,
                                        .forward = forward,
                                        .backward = backward};

fattn_var fattn_op_dropout(fattn_tape *t, fattn_var x, float p, fattn_rng rng, fattn_var step) {
    return fattn_op_custom(t, &fattni_op_dropout, (fattn_var[]){x, step}, 2, &(fattni_dropout){.rng = rng, .p = p});
}
