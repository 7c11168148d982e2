/* Rotary positions (Su et al., arXiv 2104.09864), halves rotated: x [B,H,S,D], D even. Row s turns
   the pair (x[i], x[i + D/2]) by the angle a = (position + s) base^(-2i/D):

   y[i] = x[i] cos a - x[i + D/2] sin a        y[i + D/2] = x[i + D/2] cos a + x[i] sin a

   With positions, row s is at positions[s]. Backward turns dy by -a. Angles, cosines and sines are computed in
   double, once per row for all heads of the batch. Saves nothing. */
#include "autograd_c/ops/sequence/op_rope.h"
#include "autograd_c/ops/ops.h"

#include <math.h>

typedef fattni_rope rope;

enum { POSITIONS_PER_TASK = 16, ELEMENTS_PER_TASK = 8192 };

typedef struct job {
    const fattn_tensor *to, *from;
    const rope *attr;
    void *cos_sin;            /* [S][2][D/2]: cosines and sines */
    const int32_t *positions; /* [S] or NULL */
    int64_t position_step;
    int64_t rows_per_task, tasks_per_sequence;
    bool back, fresh;
} job;

#define BODY "autograd_c/ops/sequence/op_rope.inc"
#include "core/base/for_each_real.inc"

static fattn_status infer(fattn_op_call *c) {
    const rope *a = c->attr;
    const fattn_tensor *x = &c->in[0];
    char text[96];
    FATTNI_TRY(fattni_check_real(c, "rope", "x", 0));
    FATTNI_TRY(fattni_check_contiguous(c, "rope", "x", 0));
    if (x->ndim != 4 || x->shape[3] % 2)
        return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "rope: x is %s, not [B,H,S,D] with D even",
                              fattni_shape_text(x, text, sizeof text));
    if (!(isfinite(a->base) && a->base > 0))
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "rope: base is %g", (double)a->base);
    const fattn_tensor *const at = &c->in[1];
    if (c->n_in > 1 && (at->dtype != FATTN_I32 || at->ndim != 1 || at->shape[0] != x->shape[2]))
        return fattn_ctx_fail(c->ctx, at->dtype != FATTN_I32 ? FATTN_E_DTYPE : FATTN_E_SHAPE,
                              "rope: positions are %s %s, not i32 [%lld]", fattn_dtype_name((fattn_dtype)at->dtype),
                              fattni_shape_text(at, text, sizeof text), (long long)x->shape[2]);
    fattni_out_like(c, 0);
    FATTNI_TRY(fattni_check_extents(c, "rope"));
    fattni_code_of(c, FATTNI_ROPE)->plan(c);
    return FATTN_OK;
}

static void plan_cpu(fattn_op_call *c) {
    const fattn_tensor *const x = &c->in[0];
    const size_t size = fattn_dtype_size((fattn_dtype)x->dtype);
    c->fwd_workspace = c->bwd_workspace = (size_t)(x->shape[2] * x->shape[3]) * size;
}

static void turn(const fattn_op_call *c, job j) {
    const fattn_tensor *x = j.to;
    const int64_t B = x->shape[0], H = x->shape[1], S = x->shape[2], D = x->shape[3];
    const bool wide = x->dtype == FATTN_F64;
    if (fattn_tensor_numel(x) == 0) return;
    j.attr = c->attr;
    j.cos_sin = c->workspace;
    if (c->n_in > 1) j.positions = c->in[1].data, j.position_step = c->in[1].stride[0];
    j.rows_per_task = fattni_max(1, ELEMENTS_PER_TASK / (H * D));
    j.tasks_per_sequence = fattni_ceil_div(S, j.rows_per_task);
    fattni_parallel(c->ctx, fattni_ceil_div(S, POSITIONS_PER_TASK), wide ? angles_f64 : angles_f32, &j);
    fattni_parallel(c->ctx, B * j.tasks_per_sequence, wide ? rotate_f64 : rotate_f32, &j);
}

static fattn_status forward_cpu(fattn_op_call *c) {
    turn(c, (job){.to = &c->out[0], .from = &c->in[0], .fresh = true});
    return FATTN_OK;
}

static fattn_status backward_cpu(fattn_op_call *c) {
    if (c->d_in[0].data)
        turn(c, (job){.to = &c->d_in[0], .from = &c->d_out[0], .back = true, .fresh = c->d_in_fresh[0]});
    return FATTN_OK;
}

const fattni_code fattni_rope_cpu = {plan_cpu, forward_cpu, backward_cpu};

static fattn_status forward(fattn_op_call *c) { return fattni_code_of(c, FATTNI_ROPE)->forward(c); }

static fattn_status backward(fattn_op_call *c) {
    FATTNI_TRY(fattni_check_gradients(c, "rope"));
    return fattni_code_of(c, FATTNI_ROPE)->backward(c);
}

const fattn_op_def fattni_op_rope = {.struct_size = sizeof(fattn_op_def),
                                     .attr_size = sizeof(rope),
                                     .n_out = 1,
                                     .flags = FATTN_OP_F32_ON_CPU,
                                     .name = "rope",
                                     .infer = infer,
                                     .forward = forward,
                                     .backward = backward};

fattn_var fattn_op_rope(fattn_tape *t, fattn_var x, float base, int64_t position) {
    return fattn_op_custom(t, &fattni_op_rope, &x, 1, &(rope){.position = position, .base = base});
}

fattn_var fattn_op_rope_at(fattn_tape *t, fattn_var x, float base, fattn_var positions) {
    return fattn_op_custom(t, &fattni_op_rope, (const fattn_var[]){x, positions}, 2, &(rope){.base = base});
}
