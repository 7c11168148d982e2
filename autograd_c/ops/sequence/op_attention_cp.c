/* Attention over the ranks of a communicator as an op: inputs q, k, v, alibi, sink, rng_step, outputs o and L. Keeps
   nothing beyond them, but with options.save what fattn_cp_saved says. Other memory is that of the fattn_cp. */
#include "autograd_c/ops/op_device.h"
#include "autograd_c/ops/sequence/op_attention.h"
#include "core/context_parallel/cp.h"

#include <string.h>

enum { Q, K, V, ALIBI, SINK, RNG_STEP, INPUTS };
enum { O, LSE, OUTPUTS };
enum { ZEROS = 256 * sizeof(double) }; /* bytes: of the longest row of O */

typedef struct attribute {
    fattn_cp *cp;
    fattn_attention_params params;
} attribute;

static const fattn_tensor *if_given(const fattn_tensor *t) { return t->dtype ? t : NULL; }
static const fattn_tensor *if_data(const fattn_tensor *t) { return t->data ? t : NULL; }

static fattn_attention_io io_of(const fattn_op_call *c) {
    return (fattn_attention_io){.struct_size = sizeof(fattn_attention_io),
                                .q = &c->in[Q],
                                .k = &c->in[K],
                                .v = &c->in[V],
                                .o = &c->out[O],
                                .lse = &c->out[LSE],
                                .alibi = if_given(&c->in[ALIBI]),
                                .sink = if_given(&c->in[SINK]),
                                .rng_step = if_given(&c->in[RNG_STEP]),
                                .saved = c->saved,
                                .saved_bytes = c->saved_bytes};
}

/* What fattn_cp_fwd would refuse for its shapes it refuses itself, when it runs. */
static fattn_status infer(fattn_op_call *c) {
    const attribute *const a = c->attr;
    FATTNI_TRY(fattni_check_qkv(c, "attention_cp"));
    const uint32_t accumulate = FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV | FATTN_ACC_DBIAS | FATTN_ACC_DSINK;
    if (a->params.flags & accumulate)
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "attention_cp: flags 0x%x: ACC_* are not for a tape's op",
                              a->params.flags);
    if (c->wanted[ALIBI])
        return fattn_ctx_fail(c->ctx, FATTN_E_UNSUPPORTED,
                              "attention_cp: ALiBi slopes have no gradient: make them an input or a frozen parameter");
    fattni_attention_outputs(c);
    c->bwd_workspace = ZEROS;
    const fattn_attention_io io = io_of(c);
    const fattn_cp_form form = fattn_cp_form_of(a->cp, c->in[Q].shape[1], c->in[K].shape[1], &a->params);
    if (a->cp->save) c->saved_bytes = fattni_cp_saved_bytes(a->cp, form, &io);
    return FATTN_OK;
}

static fattn_status forward(fattn_op_call *c) {
    const attribute *const a = c->attr;
    const fattn_attention_io io = io_of(c);
    return fattn_cp_fwd(a->cp, &a->params, &io);
}

/* Some rank has no rows. There the tape tells nothing of which gradients are written first; so all are added to. */
static bool has_idle_ranks(const fattn_cp *cp) {
    for (int r = 0; r < cp->comm->size; ++r)
        if (fattni_cp_rows_of(cp, r) == 0) return true;
    return false;
}

/* The gradient of input i, on every rank or on none. */
static const fattn_tensor *if_wanted(const fattn_op_call *c, int i) { return c->wanted[i] ? &c->d_in[i] : NULL; }

static fattn_status backward(fattn_op_call *c) {
    const attribute *const a = c->attr;
    fattn_attention_io io = io_of(c);
    fattn_attention_params p = a->params;
    fattn_tensor no_d_o = c->out[O]; /* only L matters: every row is one row of zeros */
    memset(no_d_o.stride, 0, sizeof no_d_o.stride);
    no_d_o.stride[3] = 1;
    no_d_o.data = c->workspace;
    if (!c->d_out[O].data) FATTNI_TRY(c->ctx->ops->zero_rows(c->ctx, c->workspace, ZEROS, ZEROS, 1));
    io.d_o = c->d_out[O].data ? &c->d_out[O] : &no_d_o;
    io.d_lse = if_data(&c->d_out[LSE]);
    io.dq = if_wanted(c, Q);
    io.dk = if_wanted(c, K);
    io.dv = if_wanted(c, V);
    io.d_sink = if_wanted(c, SINK);
    static const struct {
        int input;
        uint32_t accumulate;
    } gradients[] = {{Q, FATTN_ACC_DQ}, {K, FATTN_ACC_DK}, {V, FATTN_ACC_DV}, {SINK, FATTN_ACC_DSINK}};
    const bool always_add = has_idle_ranks(a->cp);
    for (size_t n = 0; n < sizeof gradients / sizeof *gradients; ++n) {
        const int i = gradients[n].input;
        if (!c->wanted[i] || (c->d_in_fresh[i] && !always_add)) continue;
        if (c->d_in_fresh[i]) FATTNI_TRY(fattni_fill(c->ctx, &c->d_in[i], 0, true));
        p.flags |= gradients[n].accumulate;
    }
    return fattn_cp_bwd(a->cp, &p, &io);
}

static const fattn_op_def attention_cp = {
    .struct_size = sizeof attention_cp,
    .attr_size = sizeof(attribute),
    .n_out = OUTPUTS,
    .flags = FATTN_OP_COLLECTIVE,
    .name = "attention_cp",
    .infer = infer,
    .forward = forward,
    .backward = backward,
};

fattn_var fattn_op_attention_cp(fattn_tape *t, fattn_cp *cp, const fattn_attention_vars *x,
                                const fattn_attention_params *p, fattn_var *lse) {
    if (lse) *lse = (fattn_var){0};
    if (!t || t->status) return (fattn_var){0};
    fattn_attention_vars vars = {0};
    attribute own = {.cp = cp};
    fattn_status s = FATTN_OK;
    if (!x || !cp) s = fattn_ctx_fail(t->ctx, FATTN_E_ARG, "attention_cp: the variables or cp are NULL");
    if (!s) s = fattni_take_struct(t->ctx, "fattn_attention_vars", x, &vars, sizeof vars);
    if (!s && p) s = fattni_take_struct(t->ctx, "fattn_attention_params", p, &own.params, sizeof own.params);
    if (!s && (vars.bias.id || vars.seqlens_q.id || vars.seqlens_k.id || vars.cu_seqlens_q.id || vars.cu_seqlens_k.id))
        s = fattn_ctx_fail(t->ctx, FATTN_E_UNSUPPORTED,
                           "attention_cp: bias and lengths cannot be given; lengths are those of fattn_cp_create");
    own.params.struct_size = sizeof own.params;
    if (fattni_tape_fail(t, s)) return (fattn_var){0};
    const fattn_var in[INPUTS] = {vars.q, vars.k, vars.v, vars.alibi, vars.sink, vars.rng_step};
    const fattn_var o = fattn_op_custom(t, &attention_cp, in, INPUTS, &own);
    if (lse && o.id) *lse = (fattn_var){o.id + LSE};
    return o;
}
