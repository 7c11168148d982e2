/* Rotary positions on the device: angles once for all heads, then a thread per pair or pack of
   pairs. */
#include "op_cuda.h"
#include "op_rope.h"

#include <string.h>

FATTNI_KERNEL(rope_angles, fattni_rope_args);
FATTNI_KERNEL(rope, fattni_rope_args);

enum { THREADS = 256 };

static void plan(fattn_op_call *c) {
    const fattn_tensor *const x = &c->in[0];
    const size_t real = x->dtype == FATTN_F64 ? sizeof(double) : sizeof(float);
    c->fwd_workspace = c->bwd_workspace = (size_t)(x->shape[2] * x->shape[3]) * real;
}

static fattn_status turn(const fattn_op_call *c, const fattn_tensor *to, const fattn_tensor *from,
                         bool back, bool fresh) {
    const fattni_rope *const r = c->attr;
    fattni_rope_args a = {.to = fattni_place_of(to),
                          .from = fattni_place_of(from),
                          .turns = c->workspace,
                          .base = (double)r->base,
                          .position = (double)r->position,
                          .back = back,
                          .fresh = fresh};
    memcpy(a.shape, to->shape, sizeof a.shape);
    memcpy(a.to_stride, to->stride, sizeof a.to_stride);
    memcpy(a.from_stride, from->stride, sizeof a.from_stride);
    const int64_t pairs = fattn_tensor_numel(to) / 2;
    if (pairs == 0) return FATTN_OK;
    if (to->shape[0] * to->shape[1] > INT32_MAX || to->shape[2] > INT32_MAX)
        return fattn_ctx_fail(c->ctx, FATTN_E_UNSUPPORTED, "rope: more than 2^31-1 heads or rows");
    const bool packs = fattni_rows_in_packs(to) && fattni_rows_in_packs(from) &&
                       to->shape[3] / 2 % FATTNI_PACK == 0;
    a.pack = packs ? FATTNI_PACK : 1;
    const int64_t angles = to->shape[2] * to->shape[3] / 2;
    const int32_t dtype = c->in[0].dtype;
    FATTNI_TRY(FATTNI_START_REAL(c->ctx, dtype, rope_angles, fattni_ceil_div(angles, THREADS),
                                 THREADS, &a));
    return FATTNI_START_REAL(c->ctx, dtype, rope, fattni_ceil_div(pairs / a.pack, THREADS), THREADS,
                             &a);
}

static fattn_status forward(fattn_op_call *c) {
    return turn(c, &c->out[0], &c->in[0], false, true);
}

static fattn_status backward(fattn_op_call *c) {
    if (!c->d_in[0].data) return FATTN_OK;
    return turn(c, &c->d_in[0], &c->d_out[0], true, c->d_in_fresh[0]);
}

const fattni_code fattni_rope_cuda = {plan, forward, backward};
