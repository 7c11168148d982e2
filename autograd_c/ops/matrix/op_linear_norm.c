/* A product onto a residual and the norm of the sum as one op, by the code of the two:

       s = residual + x w^T + bias,  y = layernorm(s) gain + norm_bias

   Backward: the tape gives ds as the consumers of s have left it (FATTN_OP_COMPLETES_GRAD). The norm adds its part in
   place; dx, dw and dbias are linear's for that sum, which the tape passes on to the residual. Where the norm's kernel
   has ds in registers it also sums it over rows, which is dbias. Saves the norm's statistics. */
#include "autograd_c/ops/norm/op_norm.h"
#include "autograd_c/ops/ops.h"
#include "autograd_c/tape/tape_nodes.h"

enum { X, W, BIAS, GAIN, NORM_BIAS, RESIDUAL };
enum { SUM, NORMED, OUTPUTS };
enum { MOST_INPUTS = 4 };

/* The call as one of the two ops sees it; not to be copied. */
typedef struct half {
    fattn_op_call c;
    fattn_tensor in[MOST_INPUTS], d_in[MOST_INPUTS];
    uint8_t fresh[MOST_INPUTS], wanted[MOST_INPUTS];
} half;

static void take_output(half *h, const fattn_op_call *c, int o) {
    h->c = *c;
    h->c.flags = FATTN_OP_F32_ON_CPU; /* as both ops have it */
    h->c.in = h->in, h->c.d_in = h->d_in, h->c.d_in_fresh = h->fresh, h->c.wanted = h->wanted;
    h->c.n_in = 0, h->c.n_out = 1, h->c.out = &c->out[o];
    if (c->d_out) h->c.d_out = &c->d_out[o];
}

static void take_input(half *h, const fattn_op_call *c, int i) {
    const int k = h->c.n_in++;
    h->in[k] = c->in[i], h->wanted[k] = c->wanted[i];
    if (c->d_in) h->d_in[k] = c->d_in[i], h->fresh[k] = c->d_in_fresh[i];
}

static void take_linear(half *h, const fattn_op_call *c) {
    static const int inputs[] = {X, W, BIAS, RESIDUAL};
    static const fattni_linear late = {false};
    take_output(h, c, SUM);
    h->c.attr = &late;
    for (int k = 0; k < 4; ++k) take_input(h, c, inputs[k]);
}

/* After infer of linear, which makes the norm's x. */
static void take_norm(half *h, const fattn_op_call *c, const fattni_norm *attr) {
    take_output(h, c, NORMED);
    h->c.attr = attr;
    h->in[h->c.n_in++] = fattni_row_major(&c->out[SUM], c->out[SUM].data);
    h->wanted[0] = 1;
    if (c->d_out) h->d_in[0] = c->d_out[SUM], h->fresh[0] = (uint8_t)c->d_out_fresh;
    take_input(h, c, GAIN);
    take_input(h, c, NORM_BIAS);
}

static fattni_norm norm_of(const fattn_op_call *c, fattni_norm_sum *sum) {
    return (fattni_norm){.eps = *(const float *)c->attr, .centred = 1, .sum = c->wanted[BIAS] ? sum : NULL};
}

static fattn_status infer(fattn_op_call *c) {
    fattni_norm_sum sum = {NULL};
    const fattni_norm attr = norm_of(c, &sum);
    half linear, norm;
    take_linear(&linear, c);
    FATTNI_TRY(fattni_op_linear.infer(&linear.c));
    take_norm(&norm, c, &attr);
    FATTNI_TRY(fattni_op_layernorm.infer(&norm.c));
    const fattn_op_call *const one = &linear.c, *const other = &norm.c;
    c->saved_bytes = other->saved_bytes;
    c->fwd_workspace = one->fwd_workspace > other->fwd_workspace ? one->fwd_workspace : other->fwd_workspace;
    c->bwd_workspace = one->bwd_workspace > other->bwd_workspace ? one->bwd_workspace : other->bwd_workspace;
    return FATTN_OK;
}

static fattn_status forward(fattn_op_call *c) {
    const fattni_norm attr = norm_of(c, NULL);
    half linear, norm;
    take_linear(&linear, c);
    take_norm(&norm, c, &attr);
    FATTNI_TRY(fattni_op_linear.forward(&linear.c));
    return fattni_op_layernorm.forward(&norm.c);
}

static fattn_status backward(fattn_op_call *c) {
    fattni_norm_sum sum = {.d = &c->d_in[BIAS], .fresh = c->d_in_fresh[BIAS]};
    const fattni_norm attr = norm_of(c, &sum);
    half linear, norm;
    take_linear(&linear, c);
    take_norm(&norm, c, &attr);
    if (c->d_out[NORMED].data) FATTNI_TRY(fattni_op_layernorm.backward(&norm.c));
    for (int i = GAIN; i <= NORM_BIAS && !c->d_out[NORMED].data; ++i)
        if (c->d_in[i].data && c->d_in_fresh[i]) FATTNI_TRY(fattni_fill(c->ctx, &c->d_in[i], 0, true));
    if (sum.done) linear.d_in[BIAS].data = NULL;
    return fattni_op_linear.backward(&linear.c);
}

static const fattn_op_def linear_norm = {.struct_size = sizeof(fattn_op_def),
                                         .attr_size = sizeof(float),
                                         .n_out = OUTPUTS,
                                         .flags = FATTN_OP_PASS_GRAD_LAST | FATTN_OP_COMPLETES_GRAD,
                                         .name = "linear_norm",
                                         .infer = infer,
                                         .forward = forward,
                                         .backward = backward};

/* 16 bits on a CPU are two ops: as one, the tape would give it s and ds in F32, and what the second part reads would
   not be rounded as the tape's variables are. */
static bool is_apart(const fattn_tape *t, fattn_var x) {
    if (!t || t->ctx->device != FATTN_CPU || x.id < 1 || x.id > t->count) return false;
    const int32_t dtype = t->variables[x.id].value.dtype;
    return dtype == FATTN_F16 || dtype == FATTN_BF16;
}

fattn_var fattn_op_linear_norm(fattn_tape *t, fattn_var x, fattn_var w, fattn_var bias, fattn_var residual,
                               fattn_var gain, fattn_var norm_bias, float eps, fattn_var *normed) {
    if (!normed) {
        if (t && !t->status) fattni_tape_fail(t, fattn_ctx_fail(t->ctx, FATTN_E_ARG, "linear_norm: normed is NULL"));
        return (fattn_var){0};
    }
    if (is_apart(t, x)) {
        const fattn_var s = fattn_op_linear_residual(t, x, w, bias, residual);
        *normed = fattn_op_layernorm(t, s, gain, norm_bias, eps);
        return normed->id ? s : *normed;
    }
    const fattn_var s = fattn_op_custom(t, &linear_norm, (fattn_var[]){x, w, bias, gain, norm_bias, residual}, 6, &eps);
    *normed = (fattn_var){s.id ? s.id + NORMED : 0};
    return s;
}
