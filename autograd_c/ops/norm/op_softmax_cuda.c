/* softmax on the device: a warp per row up to 1024 elements, else a block. */
#include "autograd_c/ops/op_cuda.h"
#include "autograd_c/ops/norm/op_softmax.h"
#include "core/tensor/rows.h"

FATTNI_KERNEL(softmax_warp, fattni_softmax_args);
FATTNI_KERNEL(softmax_block, fattni_softmax_args);
FATTNI_KERNEL(softmax_warp_back, fattni_softmax_args);
FATTNI_KERNEL(softmax_block_back, fattni_softmax_args);

enum { ROW_THREADS = 256, MOST_OF_A_WARP = 1024 };

static void plan(fattn_op_call *c) { (void)c; }

static fattni_softmax_args args_of(const fattn_op_call *c) {
    const fattni_rows y = fattni_rows_of(&c->out[0]);
    return (fattni_softmax_args){.x = fattni_walk_of(&c->in[0]),
                                 .y = fattni_walk_of(&c->out[0]),
                                 .in = fattni_operand_of(&c->in[0]),
                                 .out = fattni_operand_of(&c->out[0]),
                                 .rows = y.count,
                                 .C = y.columns};
}

static fattn_status forward(fattn_op_call *c) {
    const fattni_softmax_args a = args_of(c);
    const int32_t dtype = c->in[0].dtype;
    if (a.C > MOST_OF_A_WARP) return FATTNI_START_REAL(c->ctx, dtype, softmax_block, a.rows, ROW_THREADS, &a);
    const int64_t blocks = fattni_ceil_div(a.rows, ROW_THREADS / 32);
    return FATTNI_START_REAL(c->ctx, dtype, softmax_warp, blocks, ROW_THREADS, &a);
}

static fattn_status backward(fattn_op_call *c) {
    fattni_softmax_args a = args_of(c);
    const int32_t dtype = c->in[0].dtype;
    if (!c->d_in[0].data) return FATTN_OK;
    a.dx = fattni_walk_of(&c->d_in[0]);
    a.d_out = fattni_operand_of(&c->d_out[0]);
    a.d_in = fattni_operand_of(&c->d_in[0]);
    a.fresh = c->d_in_fresh[0];
    if (a.C > MOST_OF_A_WARP) return FATTNI_START_REAL(c->ctx, dtype, softmax_block_back, a.rows, ROW_THREADS, &a);
    const int64_t blocks = fattni_ceil_div(a.rows, ROW_THREADS / 32);
    return FATTNI_START_REAL(c->ctx, dtype, softmax_warp_back, blocks, ROW_THREADS, &a);
}

const fattni_code fattni_softmax_cuda = {plan, forward, backward};
