/* dropout on the device: a thread per Philox block, of eight elements. */
#include "autograd_c/ops/op_cuda.h"
#include "autograd_c/ops/dropout/op_dropout.h"

FATTNI_KERNEL(dropout, fattni_dropout_args);

enum { X = FATTNI_DROPOUT_X, STEP = FATTNI_DROPOUT_STEP };

static void plan(fattn_op_call *c) { (void)c; }

static bool is_side_by_side(const fattni_grid *g, int k, const fattni_operand *t) {
    return g->n == 1 && g->stride[0][k] == 1 && (uintptr_t)t->p % 16 == 0;
}

static fattn_status drop(const fattn_op_call *c, const fattn_tensor *d, const fattn_tensor *x, bool fresh) {
    const fattni_dropout *const attr = c->attr;
    const fattn_tensor *const t[] = {d, x};
    fattni_dropout_args a = {.grid = fattni_grid_of(t, 2),
                             .d = fattni_operand_of(d),
                             .x = fattni_operand_of(x),
                             .step = c->in[STEP].data,
                             .seed = attr->rng.seed,
                             .scale = attr->scale,
                             .stream = attr->rng.stream,
                             .T = attr->T,
                             .fresh = fresh};
    if (a.grid.count == 0) return FATTN_OK;
    a.vector = is_side_by_side(&a.grid, 0, &a.d) && is_side_by_side(&a.grid, 1, &a.x);
    return FATTNI_START_REAL(c->ctx, d->dtype, dropout, fattni_grid_blocks(&a.grid, FATTNI_PACK), FATTNI_GRID_THREADS,
                             &a);
}

static fattn_status forward(fattn_op_call *c) { return drop(c, &c->out[0], &c->in[X], true); }

static fattn_status backward(fattn_op_call *c) {
    return c->d_in[X].data ? drop(c, &c->d_in[X], &c->d_out[0], c->d_in_fresh[X]) : FATTN_OK;
}

const fattni_code fattni_dropout_cuda = {plan, forward, backward};
