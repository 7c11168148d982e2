/* The fused attention as an op: inputs q, k, v and the optional ones, outputs o and L. Keeps
   nothing beyond them, but for FATTN_ALGO_STANDARD, whose P is `saved`.

   infer validates the call and chooses its kernel; forward runs what infer prepared. o is laid out
   [B,S,H,D], so that merging the heads is a view. Gradients go straight to where the
   tape wants them, d_in_fresh 0 being a FATTN_ACC flag; that of a bias of another dtype than L, in which it is
   computed, through the workspace. */
#include "autograd_c/ops/ops.h"
#include "autograd_c/ops/sequence/op_attention.h"
#include "core/attention/kernel.h"

#include <string.h>

enum { Q, K, V, BIAS, ALIBI, SINK, SEQLENS_Q, SEQLENS_K, CU_SEQLENS_Q, CU_SEQLENS_K, RNG_STEP, INPUTS };
enum { O, LSE, OUTPUTS };

static const uint32_t accumulate_flags = FATTN_ACC_DQ | FATTN_ACC_DK | FATTN_ACC_DV | FATTN_ACC_DBIAS | FATTN_ACC_DSINK;

/* What the tape keeps beside the inputs. */
typedef struct attribute {
    fattn_attention_params params;
    fattni_call forward; /* made by infer; outputs and memory have no addresses yet */
    size_t workspace;    /* of the attention's backward, where that of the op begins */
} attribute;

static const fattn_tensor *if_given(const fattn_tensor *t) { return t->dtype ? t : NULL; }
static const fattn_tensor *if_data(const fattn_tensor *t) { return t->data ? t : NULL; }

static fattn_attention_io forward_io(const fattn_op_call *c) {
    return (fattn_attention_io){
        .struct_size = sizeof(fattn_attention_io),
        .q = if_given(&c->in[Q]),
        .k = if_given(&c->in[K]),
        .v = if_given(&c->in[V]),
        .o = &c->out[O],
        .lse = &c->out[LSE],
        .bias = if_given(&c->in[BIAS]),
        .alibi = if_given(&c->in[ALIBI]),
        .sink = if_given(&c->in[SINK]),
        .seqlens_q = if_given(&c->in[SEQLENS_Q]),
        .seqlens_k = if_given(&c->in[SEQLENS_K]),
        .cu_seqlens_q = if_given(&c->in[CU_SEQLENS_Q]),
        .cu_seqlens_k = if_given(&c->in[CU_SEQLENS_K]),
        .rng_step = if_given(&c->in[RNG_STEP]),
        .saved = c->saved,
        .saved_bytes = c->saved_bytes,
        .workspace = c->workspace,
        .workspace_bytes = c->fwd_workspace,
    };
}

/* Attention leaves rows past the end of a sequence alone; on the tape they are zero. */
static bool has_lengths(const fattn_op_call *c) {
    return c->in[SEQLENS_Q].dtype || c->in[SEQLENS_K].dtype || c->in[CU_SEQLENS_Q].dtype;
}

fattn_status fattni_check_qkv(const fattn_op_call *c, const char *op) {
    static const char *const names[] = {"q", "k", "v"};
    for (int i = Q; i <= V; ++i) {
        if (!c->in[i].dtype) return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "%s: %s is absent", op, names[i]);
        if (c->in[i].ndim != 4)
            return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "%s: %s has %d dimensions instead of 4: [B,H,S,D]", op,
                                  names[i], c->in[i].ndim);
    }
    return FATTN_OK;
}

void fattni_attention_outputs(fattn_op_call *c) {
    const int64_t *const q = c->in[Q].shape, Dv = c->in[V].shape[3];
    const int64_t B = q[0], H = q[1], S = q[2];
    c->out[O].ndim = 4;
    c->out[O].dtype = c->in[Q].dtype;
    memcpy(c->out[O].shape, (int64_t[]){B, H, S, Dv}, 4 * sizeof(int64_t));
    memcpy(c->out[O].stride, (int64_t[]){S * H * Dv, Dv, H * Dv, 1}, 4 * sizeof(int64_t));
    c->out[LSE].ndim = 3;
    c->out[LSE].dtype = c->in[Q].dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    memcpy(c->out[LSE].shape, (int64_t[]){B, H, S}, 3 * sizeof(int64_t));
    memcpy(c->out[LSE].stride, (int64_t[]){H * S, S, 1}, 3 * sizeof(int64_t));
}

static fattn_status check(const fattn_op_call *c) {
    const fattn_attention_params *p = &((const attribute *)c->attr)->params;
    FATTNI_TRY(fattni_check_qkv(c, "attention"));
    if (p->flags & (accumulate_flags | FATTN_MERGE))
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "attention: flags 0x%x: MERGE and ACC_* are not for a tape's op",
                              p->flags);
    if (c->wanted[ALIBI])
        return fattn_ctx_fail(c->ctx, FATTN_E_UNSUPPORTED,
                              "attention: ALiBi slopes have no gradient: make them an input or a "
                              "frozen parameter");
    return FATTN_OK;
}

/* A row of zeros in backward's workspace, where the host's are out of reach. */
static size_t zeros_room(const fattn_op_call *c) {
    return c->ctx->device == FATTN_CPU ? 0 : FATTNI_MAX_HEAD_DIM * sizeof(double);
}

/* Backward will see the same set of gradients as the query that plans for it. */
static bool will_write(const fattn_op_call *c, int i) { return c->wanted[i] && fattn_tensor_numel(&c->in[i]) > 0; }

/* The gradient of the bias is computed in L's dtype, row-major at the end of backward's workspace, and added to the
   tape's from there. */
static bool converts_bias(const fattn_op_call *c) {
    return will_write(c, BIAS) && c->in[BIAS].dtype != c->out[LSE].dtype;
}

static fattn_tensor converted_bias(const fattn_op_call *c, void *data) {
    fattn_tensor d = fattni_row_major(&c->in[BIAS], data);
    d.dtype = c->out[LSE].dtype;
    return d;
}

/* The tape's copy, which is this op's to write. */
static attribute *attribute_of(const fattn_op_call *c) {
    attribute *own;
    memcpy(&own, &c->attr, sizeof own);
    return own;
}

static fattn_status infer(fattn_op_call *c) {
    FATTNI_TRY(check(c));
    fattni_attention_outputs(c);

    /* Nothing is read, but addresses are wanted: such multiples of 16 as the tape gives. */
    fattn_tensor o = c->out[O], lse = c->out[LSE], d[SINK + 1];
    o.data = lse.data = c->ctx;
    fattn_attention_io io = forward_io(c);
    io.o = io.d_o = &o;
    io.lse = io.d_lse = &lse;
    memcpy(d, c->in, sizeof d);
    if (will_write(c, Q)) io.dq = &d[Q];
    if (will_write(c, K)) io.dk = &d[K];
    if (will_write(c, V)) io.dv = &d[V];
    if (converts_bias(c)) d[BIAS] = converted_bias(c, c->ctx);
    if (will_write(c, BIAS)) io.d_bias = &d[BIAS];
    if (will_write(c, SINK)) io.d_sink = &d[SINK];
    attribute *const own = attribute_of(c);
    fattni_call b;
    FATTNI_TRY(fattni_prepare_both(c->ctx, &own->params, &io, &own->forward, &b));
    c->fwd_workspace = own->forward.plan.workspace;
    own->workspace = b.plan.workspace;
    c->bwd_workspace = fattni_room(own->workspace) + fattni_room(zeros_room(c));
    if (converts_bias(c)) c->bwd_workspace += fattni_tensor_bytes(&d[BIAS]);
    c->saved_bytes = own->forward.plan.saved;
    return FATTN_OK;
}

static fattn_status forward(fattn_op_call *c) {
    fattni_call *const call = &attribute_of(c)->forward;
    for (int i = O; i < OUTPUTS && has_lengths(c); ++i) FATTNI_TRY(fattni_fill(c->ctx, &c->out[i], 0, true));
    call->p.o.p = c->out[O].data, call->p.lse.p = c->out[LSE].data;
    call->p.saved = c->saved, call->p.saved_bytes = c->saved_bytes;
    call->p.workspace = c->workspace, call->p.workspace_bytes = c->fwd_workspace;
    FATTNI_TRY(fattni_check_lengths(c->ctx, &call->p));
    return fattni_run(c->ctx, call);
}

static fattn_status backward(fattn_op_call *c) {
    /* Without a gradient of o, only L matters. */
    static const double zeros[FATTNI_MAX_HEAD_DIM];
    fattn_tensor no_d_o = c->out[O];
    memset(no_d_o.stride, 0, sizeof no_d_o.stride);
    no_d_o.stride[3] = 1;
    memcpy(&no_d_o.data, &(const void *){zeros}, sizeof no_d_o.data); /* only read */
    const attribute *const own = c->attr;
    void *workspace = c->workspace;
    fattni_carve(&workspace, own->workspace);
    const size_t room = zeros_room(c);
    void *const row = fattni_carve(&workspace, room);
    if (room && !c->d_out[O].data) {
        no_d_o.data = row;
        FATTNI_TRY(c->ctx->ops->zero_rows(c->ctx, row, room, room, 1));
    }

    fattn_attention_io io = forward_io(c);
    io.workspace_bytes = own->workspace;
    io.d_o = c->d_out[O].data ? &c->d_out[O] : &no_d_o;
    io.d_lse = if_data(&c->d_out[LSE]);
    io.dq = if_data(&c->d_in[Q]);
    io.dk = if_data(&c->d_in[K]);
    io.dv = if_data(&c->d_in[V]);
    io.d_bias = if_data(&c->d_in[BIAS]);
    io.d_sink = if_data(&c->d_in[SINK]);

    static const struct {
        int input;
        uint32_t accumulate;
    } gradients[] = {
        {Q, FATTN_ACC_DQ}, {K, FATTN_ACC_DK}, {V, FATTN_ACC_DV}, {BIAS, FATTN_ACC_DBIAS}, {SINK, FATTN_ACC_DSINK}};
    fattn_attention_params p = own->params;
    const bool converts = c->d_in[BIAS].data && converts_bias(c);
    const fattn_tensor bias = converts ? converted_bias(c, workspace) : c->d_in[BIAS];
    if (converts) io.d_bias = &bias;
    if (converts && has_lengths(c)) FATTNI_TRY(fattni_fill(c->ctx, &bias, 0, true));
    for (size_t n = 0; n < sizeof gradients / sizeof *gradients; ++n) {
        const int i = gradients[n].input;
        if (!c->d_in[i].data || (i == BIAS && converts)) continue;
        if (!c->d_in_fresh[i])
            p.flags |= gradients[n].accumulate;
        else if (has_lengths(c))
            FATTNI_TRY(fattni_fill(c->ctx, &c->d_in[i], 0, true));
    }
    FATTNI_TRY(fattn_attention_bwd(c->ctx, &p, &io));
    return converts ? fattni_accumulate(c->ctx, &c->d_in[BIAS], &bias, c->d_in_fresh[BIAS]) : FATTN_OK;
}

static const fattn_op_def attention = {
    .struct_size = sizeof attention,
    .attr_size = sizeof(attribute),
    .n_out = OUTPUTS,
    .name = "attention",
    .infer = infer,
    .forward = forward,
    .backward = backward,
};

fattn_var fattn_op_attention_ex(fattn_tape *t, const fattn_attention_vars *x, const fattn_attention_params *p,
                                fattn_var *lse) {
    if (lse) *lse = (fattn_var){0};
    if (!t || t->status) return (fattn_var){0};
    fattn_attention_vars vars = {0};
    attribute own = {0};
    fattn_status s = FATTN_OK;
    if (!x) s = fattn_ctx_fail(t->ctx, FATTN_E_ARG, "attention: the variables are NULL");
    if (!s) s = fattni_take_struct(t->ctx, "fattn_attention_vars", x, &vars, sizeof vars);
    if (!s && (vars.reserved || vars.reserved2))
        s = fattn_ctx_fail(t->ctx, FATTN_E_ARG, "attention: the variables' reserved is %u, reserved2 %u, not 0",
                           vars.reserved, vars.reserved2);
    if (!s && p) s = fattni_take_struct(t->ctx, "fattn_attention_params", p, &own.params, sizeof own.params);
    own.params.struct_size = sizeof own.params;
    if (fattni_tape_fail(t, s)) return (fattn_var){0};
    const fattn_var in[INPUTS] = {[Q] = vars.q,
                                  [K] = vars.k,
                                  [V] = vars.v,
                                  [BIAS] = vars.bias,
                                  [ALIBI] = vars.alibi,
                                  [SINK] = vars.sink,
                                  [SEQLENS_Q] = vars.seqlens_q,
                                  [SEQLENS_K] = vars.seqlens_k,
                                  [CU_SEQLENS_Q] = vars.cu_seqlens_q,
                                  [CU_SEQLENS_K] = vars.cu_seqlens_k,
                                  [RNG_STEP] = vars.rng_step};
    const fattn_var o = fattn_op_custom(t, &attention, in, INPUTS, &own);
    if (lse && o.id) *lse = (fattn_var){o.id + LSE};
    return o;
}

fattn_var fattn_op_attention(fattn_tape *t, fattn_var q, fattn_var k, fattn_var v, const fattn_attention_params *p) {
    const fattn_attention_vars vars = {.struct_size = sizeof vars, .q = q, .k = k, .v = v};
    return fattn_op_attention_ex(t, &vars, p, NULL);
}
