/* 16-bit variables on the CPU. Ops with FATTN_OP_F32_ON_CPU get F32 copies of them, row-major in the workspace, and
   their F32 results are rounded once when they are stored. Integers, F32 losses and F32 gradients of 16-bit
   parameters are the tape's own tensors. What an op saves is in F32. */
#include "autograd_c/ops/ops.h"
#include "autograd_c/tape/tape_nodes.h"

static bool is_narrow(const fattn_tensor *t) { return t->dtype == FATTN_F16 || t->dtype == FATTN_BF16; }

bool fattni_is_wide(const fattni_node *n) {
    const fattn_op_call *const c = &n->call;
    bool narrow = false, views = false;
    for (int i = 0; i < c->n_in; ++i) narrow = narrow || is_narrow(&c->in[i]);
    for (int o = 0; o < c->n_out; ++o) views = views || c->out[o].data;
    return c->flags & FATTN_OP_F32_ON_CPU && c->ctx->device == FATTN_CPU && narrow && !views;
}

/* t, or a place for it in F32 in the workspace; `at` NULL: none yet. */
static fattn_tensor widened(const fattn_tensor *t, void **at) {
    if (!is_narrow(t)) return *t;
    fattn_tensor w = fattni_row_major(t, NULL);
    w.dtype = FATTN_F32;
    w.data = at ? fattni_carve(at, fattni_tensor_bytes(&w)) : t->data;
    return w;
}

static size_t room_of(const fattn_tensor *t) { return is_narrow(t) ? fattni_room(2 * fattni_tensor_bytes(t)) : 0; }

fattn_status fattni_wide_make(fattni_node *n, fattni_arena *records) {
    const fattn_op_call *const c = &n->call;
    const size_t ni = (size_t)c->n_in, no = (size_t)c->n_out;
    void *wide, *tensors, *fresh;
    FATTNI_TRY(fattni_arena_take(records, sizeof *n->wide, &wide));
    FATTNI_TRY(fattni_arena_take(records, 2 * (ni + no) * sizeof *n->wide->in, &tensors));
    FATTNI_TRY(fattni_arena_take(records, ni, &fresh));
    fattni_wide *const w = n->wide = wide;
    fattn_tensor *const t = tensors;
    *w = (fattni_wide){
        .call = *c, .in = t, .out = t + ni, .d_out = t + ni + no, .d_in = t + ni + 2 * no, .fresh = fresh};
    w->call.in = w->in, w->call.out = w->out;
    w->call.saved_bytes = w->call.fwd_workspace = w->call.bwd_workspace = 0;
    for (size_t i = 0; i < ni; ++i) w->in[i] = widened(&c->in[i], NULL);
    for (size_t o = 0; o < no; ++o)
        w->out[o] = (fattn_tensor){.device = (int32_t)c->ctx->device, .device_id = c->ctx->device_id};
    return FATTN_OK;
}

void fattni_wide_plan(fattni_node *n) {
    fattn_op_call *const c = &n->call;
    const fattni_wide *const w = n->wide;
    size_t inputs = 0, outputs = 0, gradients = 0;
    for (int i = 0; i < c->n_in; ++i) {
        inputs += room_of(&c->in[i]);
        if (c->wanted[i]) gradients += room_of(&c->in[i]);
    }
    for (int o = 0; o < c->n_out; ++o) outputs += room_of(&c->out[o]);
    c->saved_bytes = w->call.saved_bytes;
    c->fwd_workspace = inputs + outputs + w->call.fwd_workspace;
    c->bwd_workspace = inputs + 2 * outputs + gradients + w->call.bwd_workspace;
}

/* *to = `from` in F32, if it is narrow. */
static fattn_status read(fattn_ctx *ctx, const fattn_tensor *from, void **at, fattn_tensor *to) {
    *to = widened(from, from->data ? at : NULL);
    if (!from->data || !is_narrow(from)) return FATTN_OK;
    return fattn_tensor_copy(ctx, to, from);
}

fattn_status fattni_wide_open_forward(fattni_node *n) {
    const fattn_op_call *const c = &n->call;
    fattni_wide *const w = n->wide;
    void *at = c->workspace;
    w->call.saved = c->saved;
    for (int i = 0; i < c->n_in; ++i) FATTNI_TRY(read(c->ctx, &c->in[i], &at, &w->in[i]));
    for (int o = 0; o < c->n_out; ++o) w->out[o] = widened(&c->out[o], &at);
    w->call.workspace = w->call.fwd_workspace ? at : NULL;
    return FATTN_OK;
}

fattn_status fattni_wide_close_forward(fattni_node *n) {
    const fattn_op_call *const c = &n->call;
    for (int o = 0; o < c->n_out; ++o)
        if (is_narrow(&c->out[o])) FATTNI_TRY(fattn_tensor_copy(c->ctx, &c->out[o], &n->wide->out[o]));
    return FATTN_OK;
}

/* The op may write to the tape's gradient of input i, which has the strides of the op's copy of that input. */
static bool is_direct(const fattni_node *n, int i) {
    const fattn_tensor *const d = &n->d_in[i];
    return !is_narrow(&n->call.in[i]) || !d->data || (d->dtype == FATTN_F32 && fattni_is_row_major(d));
}

fattn_status fattni_wide_open_backward(fattni_node *n) {
    const fattn_op_call *const c = &n->call;
    fattni_wide *const w = n->wide;
    void *at = c->workspace;
    for (int i = 0; i < c->n_in; ++i) FATTNI_TRY(read(c->ctx, &c->in[i], &at, &w->in[i]));
    for (int o = 0; o < c->n_out; ++o) {
        FATTNI_TRY(read(c->ctx, &c->out[o], &at, &w->out[o]));
        if (o == 0 && c->d_out_fresh)
            w->d_out[0] = widened(&n->d_out[0], &at); /* there is nothing in it yet */
        else
            FATTNI_TRY(read(c->ctx, &n->d_out[o], &at, &w->d_out[o]));
    }
    for (int i = 0; i < c->n_in; ++i) {
        w->d_in[i] = n->d_in[i];
        w->fresh[i] = n->fresh[i];
        if (is_direct(n, i)) continue;
        w->d_in[i] = widened(&c->in[i], &at);
        w->fresh[i] = 1;
    }
    w->call.d_out = w->d_out, w->call.d_in = w->d_in, w->call.d_in_fresh = w->fresh;
    w->call.d_out_fresh = c->d_out_fresh;
    w->call.workspace = w->call.bwd_workspace ? at : NULL;
    return FATTN_OK;
}

fattn_status fattni_wide_close_backward(fattni_node *n) {
    if (n->completes && is_narrow(&n->d_out[0]))
        FATTNI_TRY(fattn_tensor_copy(n->call.ctx, &n->d_out[0], &n->wide->d_out[0]));
    for (int i = 0; i < n->call.n_in; ++i)
        if (!is_direct(n, i)) FATTNI_TRY(fattni_accumulate(n->call.ctx, &n->d_in[i], &n->wide->d_in[i], n->fresh[i]));
    return FATTN_OK;
}
