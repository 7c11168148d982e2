/* y = f(norm(x) w^T + bias): the ops layernorm or rmsnorm, and linear or linear_gelu; or for one row without gradients,
   where the device has code for it, one op, which is what generation calls for each token. */
#include "autograd_c/ops/ops.h"
#include "autograd_c/tape/tape_nodes.h"

#include <math.h>

enum { X, GAIN, NORM_BIAS, W, BIAS, INPUTS };

typedef struct attribute {
    float eps;
    uint32_t flags;
    bool early; /* fattni_product's, of w */
} attribute;

static fattni_row_norm norm_of(const fattn_tensor *in, const attribute *a) {
    return (fattni_row_norm){.gain = in[GAIN].data,
                             .bias = in[NORM_BIAS].data,
                             .eps = (double)a->eps,
                             .centred = !(a->flags & FATTN_NORM_RMS)};
}

static fattn_status infer(fattn_op_call *c) {
    fattni_out_like(c, X);
    c->out[0].shape[c->in[X].ndim - 1] = c->in[W].shape[0];
    return fattni_check_extents(c, "norm_linear");
}

static fattn_status forward(fattn_op_call *c) {
    const attribute *const a = c->attr;
    const fattni_row_norm norm = norm_of(c->in, a);
    const fattni_flat x = fattni_flatten(&c->in[X]), y = fattni_flatten(&c->out[0]);
    bool activated = false;
    const fattni_product p = {.a = &x.t,
                              .b = &c->in[W],
                              .c = &y.t,
                              .trans_b = true,
                              .row = c->in[BIAS].data,
                              .gelu = a->flags & FATTN_LINEAR_GELU ? &y.t : NULL,
                              .activated = &activated,
                              .early = a->early,
                              .norm = &norm};
    return fattni_product_run(c->ctx, &p, NULL);
}

static const fattn_op_def norm_linear = {.struct_size = sizeof norm_linear,
                                         .attr_size = sizeof(attribute),
                                         .n_out = 1,
                                         .name = "norm_linear",
                                         .infer = infer,
                                         .forward = forward};

/* Elements side by side along the only dimension with several. */
static bool is_row(const fattn_tensor *t, int64_t elements) {
    if (t->ndim < 1 || fattn_tensor_numel(t) != elements) return false;
    return t->shape[t->ndim - 1] == elements && (elements == 1 || t->stride[t->ndim - 1] == 1);
}

/* Whether they are a call of the one op. What is wrong is left to the ops' own checks. */
static bool is_one_row(const fattn_tape *t, const fattn_var in[INPUTS], const attribute *a) {
    fattn_tensor value[INPUTS] = {0};
    if (!t || t->status || !fattni_op_device_of(t->ctx)->products->takes_norm) return false;
    for (int i = 0; i < INPUTS; ++i) {
        const bool optional = i == NORM_BIAS || i == BIAS;
        if (in[i].id == 0 && optional) continue;
        if (in[i].id < 1 || in[i].id > t->count || t->variables[in[i].id].wants_grad) return false;
        value[i] = t->variables[in[i].id].value;
        if (value[i].dtype != value[X].dtype) return false;
    }
    if (value[W].ndim != 2) return false;
    const int64_t N = value[W].shape[0], K = value[W].shape[1];
    if (K < 1 || !is_row(&value[X], K) || value[GAIN].ndim != 1 || !is_row(&value[GAIN], K)) return false;
    if (in[NORM_BIAS].id && (value[NORM_BIAS].ndim != 1 || !is_row(&value[NORM_BIAS], K))) return false;
    if (in[BIAS].id && (value[BIAS].ndim != 1 || !is_row(&value[BIAS], N))) return false;
    const fattni_row_norm norm = norm_of(value, a);
    return isfinite(a->eps) && a->eps >= 0 &&
           fattni_op_device_of(t->ctx)->products->takes_norm(&value[X], &value[W], &norm);
}

fattn_var fattn_op_norm_linear(fattn_tape *t, fattn_var x, fattn_var gain, fattn_var norm_bias, float eps, fattn_var w,
                               fattn_var bias, uint32_t flags) {
    const fattn_var in[INPUTS] = {x, gain, norm_bias, w, bias};
    const attribute a = {eps, flags, fattni_tape_reads_early(t, w)};
    const bool rms = flags & FATTN_NORM_RMS, gelu = flags & FATTN_LINEAR_GELU;
    const char *wrong = NULL;
    if (flags & ~(uint32_t)(FATTN_NORM_RMS | FATTN_LINEAR_GELU))
        wrong = "unknown flags";
    else if (rms && norm_bias.id)
        wrong = "FATTN_NORM_RMS with a norm_bias, which rmsnorm has not";
    if (wrong) {
        if (t && !t->status)
            fattni_tape_fail(t, fattn_ctx_fail(t->ctx, FATTN_E_ARG, "norm_linear: %s: 0x%x", wrong, flags));
        return (fattn_var){0};
    }
    if (is_one_row(t, in, &a)) return fattn_op_custom(t, &norm_linear, in, INPUTS, &a);
    const fattn_var h = rms ? fattn_op_rmsnorm(t, x, gain, eps) : fattn_op_layernorm(t, x, gain, norm_bias, eps);
    return gelu ? fattn_op_linear_gelu(t, h, w, bias) : fattn_op_linear(t, h, w, bias);
}
