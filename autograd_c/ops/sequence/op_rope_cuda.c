/* Rotary positions on the device: angles once for all heads, then a thread per pair or pack of
   pairs, in the order of memory. */
#include "autograd_c/ops/op_cuda.h"
#include "autograd_c/ops/sequence/op_rope.h"

#include <string.h>

FATTNI_KERNEL(rope_angles, fattni_rope_args);
FATTNI_KERNEL(rope, fattni_rope_args);

enum { THREADS = 256 };

/* [B,H,S,D] that lies as [B,S,H,D]. */
static bool heads_inside(const fattn_tensor *t) {
    return t->shape[1] > 1 && t->shape[2] > 1 && t->stride[1] < t->stride[2];
}

/* y lies as x does, but dense. */
static void plan(fattn_op_call *c) {
    const fattn_tensor *const x = &c->in[0];
    const int64_t H = x->shape[1], S = x->shape[2], D = x->shape[3];
    if (heads_inside(x)) memcpy(c->out[0].stride, (const int64_t[]){S * H * D, D, H * D, 1}, 4 * sizeof(int64_t));
    const size_t real = x->dtype == FATTN_F64 ? sizeof(double) : sizeof(float);
    c->fwd_workspace = c->bwd_workspace = (size_t)(x->shape[2] * x->shape[3]) * real;
}

static fattn_status turn(const fattn_op_call *c, const fattn_tensor *to, const fattn_tensor *from, bool back,
                         bool fresh) {
    const fattni_rope *const r = c->attr;
    fattni_rope_args a = {.to = fattni_operand_of(to),
                          .from = fattni_operand_of(from),
                          .cos_sin = c->workspace,
                          .positions = c->n_in > 1 ? c->in[1].data : NULL,
                          .position_step = c->n_in > 1 ? c->in[1].stride[0] : 0,
                          .base = (double)r->base,
                          .position = (double)r->position,
                          .back = back,
                          .fresh = fresh};
    memcpy(a.shape, to->shape, sizeof a.shape);
    memcpy(a.to_stride, to->stride, sizeof a.to_stride);
    memcpy(a.from_stride, from->stride, sizeof a.from_stride);
    const int64_t pairs = fattn_tensor_numel(to) / 2;
    if (pairs == 0) return FATTN_OK;
    a.heads_inside = heads_inside(to) && heads_inside(from);
    const int64_t inner = to->shape[a.heads_inside ? 1 : 2];
    if (to->shape[0] * to->shape[1] * to->shape[2] / inner > INT32_MAX || inner > INT32_MAX)
        return fattn_ctx_fail(c->ctx, FATTN_E_UNSUPPORTED, "rope: more than 2^31-1 heads or rows");
    const bool packs = fattni_rows_in_packs(to) && fattni_rows_in_packs(from) && to->shape[3] / 2 % FATTNI_PACK == 0;
    a.pack = packs ? FATTNI_PACK : 1;
    a.dtype = fattni_common_dtype((const fattni_operand *[]){&a.to, &a.from}, 2);
    const int64_t angles = to->shape[2] * to->shape[3] / 2;
    const int32_t dtype = c->in[0].dtype;
    FATTNI_TRY(FATTNI_START_REAL(c->ctx, dtype, rope_angles, fattni_ceil_div(angles, THREADS), THREADS, &a));
    return FATTNI_START_REAL(c->ctx, dtype, rope, fattni_ceil_div(pairs / a.pack, THREADS), THREADS, &a);
}

static fattn_status forward(fattn_op_call *c) { return turn(c, &c->out[0], &c->in[0], false, true); }

static fattn_status backward(fattn_op_call *c) {
    if (!c->d_in[0].data) return FATTN_OK;
    return turn(c, &c->d_in[0], &c->d_out[0], true, c->d_in_fresh[0]);
}

const fattni_code fattni_rope_cuda = {plan, forward, backward};
