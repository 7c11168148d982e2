/* Records ops and runs their backward. Independent of the ops; memory is described in tape_nodes.h. */
#include "core/tensor/numeric.h"
#include "autograd_c/ops/op_device.h"
#include "autograd_c/parallel/reducer.h"
#include "autograd_c/tape/tape_nodes.h"

#include <stdio.h>
#include <string.h>

enum { MAX_OPERANDS = 64, FIRST_VARIABLES = 64, RECORD_ALIGN = 16 };
enum { LEAST_RECORDS = 16 << 10, LEAST_DATA = 64 << 10 };

fattn_status fattni_tape_fail(fattn_tape *t, fattn_status s) {
    if (t->status == FATTN_OK) t->status = s;
    return s;
}

/* An op's functions must not change the tape that calls them. */
static fattn_status check_idle(fattn_tape *t, const char *what) {
    if (!t->running) return FATTN_OK;
    return fattni_tape_fail(t, fattn_ctx_fail(t->ctx, FATTN_E_STATE,
                                              "%s: not allowed while the tape runs the %s of op %s; use "
                                              "another tape there",
                                              what, t->stage, t->running->def.name));
}

/* Zeroed memory for the tape's own records. */
static fattn_status new_records(fattn_tape *t, size_t count, size_t size, void **out) {
    FATTNI_TRY(fattni_arena_take(&t->records, count * size, out));
    if (*out) memset(*out, 0, count * size);
    return FATTN_OK;
}

fattn_status fattn_tape_create(fattn_ctx *ctx, fattn_tape **out) {
    if (!ctx) return FATTN_E_ARG;
    if (!out) return fattn_ctx_fail(ctx, FATTN_E_ARG, "tape_create: out is NULL");
    *out = NULL;
    void *p;
    FATTNI_TRY(fattni_host_alloc(ctx, sizeof(fattn_tape), &p));
    fattn_tape *t = p;
    *t = (fattn_tape){
        .ctx = ctx,
        .records = {.ctx = ctx, .align = RECORD_ALIGN, .least = LEAST_RECORDS, .on_host = true},
        .values = {.ctx = ctx, .align = FATTNI_ALIGN, .least = LEAST_DATA},
        .grads = {.ctx = ctx, .align = FATTNI_ALIGN, .least = LEAST_DATA},
    };
    *out = t;
    return FATTN_OK;
}

void fattn_tape_destroy(fattn_tape *t) {
    if (!t || check_idle(t, "tape_destroy")) return;
    fattn_ctx *ctx = t->ctx;
    fattni_arena_free(&t->records);
    fattni_arena_free(&t->values);
    fattni_arena_free(&t->grads);
    fattni_free(ctx, t->workspace, t->workspace_bytes);
    fattni_host_free(ctx, t->variables, (size_t)t->capacity * sizeof *t->variables);
    fattni_host_free(ctx, t, sizeof *t);
}

void fattn_tape_reset(fattn_tape *t) {
    if (!t || check_idle(t, "tape_reset")) return;
    fattni_arena_reset(&t->records);
    fattni_arena_reset(&t->values);
    fattni_arena_reset(&t->grads);
    memset(t->free_blocks, 0, sizeof t->free_blocks);
    t->last = NULL;
    t->count = 0;
    t->ran_back = false;
    t->status = FATTN_OK;
}

fattn_status fattn_tape_status(const fattn_tape *t) { return t ? t->status : FATTN_E_ARG; }

/* Makes sure that `more` variables can be added without failure. */
static fattn_status reserve(fattn_tape *t, int32_t more) {
    const int32_t needed = t->count + more + 1;
    if (needed <= t->capacity) return FATTN_OK;
    int32_t capacity = t->capacity ? t->capacity : FIRST_VARIABLES;
    while (capacity < needed) capacity *= 2;
    void *p;
    FATTNI_TRY(fattni_host_alloc(t->ctx, (size_t)capacity * sizeof *t->variables, &p));
    if (t->capacity) memcpy(p, t->variables, (size_t)t->capacity * sizeof *t->variables);
    fattni_host_free(t->ctx, t->variables, (size_t)t->capacity * sizeof *t->variables);
    t->variables = p;
    t->capacity = capacity;
    return FATTN_OK;
}

static bool is_float(int32_t dtype) {
    return dtype == FATTN_F64 || dtype == FATTN_F32 || dtype == FATTN_F16 || dtype == FATTN_BF16;
}

/* The strides of a tensor without elements may have any value: ops get row-major ones. */
static fattn_tensor with_strides(const fattn_tensor *t) {
    if (fattn_tensor_numel(t)) return *t;
    return fattn_tensor_view(t->data, (fattn_dtype)t->dtype, (fattn_device)t->device, t->device_id, t->ndim, t->shape);
}

/* Capacity must have been reserved. */
static fattni_variable *add_variable(fattn_tape *t, const fattn_tensor *value) {
    fattni_variable *v = &t->variables[++t->count];
    *v = (fattni_variable){.value = with_strides(value), .base = t->count};
    return v;
}

static fattn_status check_variable(fattn_tape *t, const char *who, fattn_var v) {
    if (v.id >= 1 && v.id <= t->count) return FATTN_OK;
    return fattn_ctx_fail(t->ctx, FATTN_E_ARG, "%s: variable %d is not on this tape, which has 1..%d", who, v.id,
                          t->count);
}

fattn_var fattn_input(fattn_tape *t, const fattn_tensor *x) {
    if (!t || t->status || check_idle(t, "input")) return (fattn_var){0};
    fattn_status s = fattni_check_tensor(t->ctx, "input", x);
    if (!s) s = reserve(t, 1);
    if (fattni_tape_fail(t, s)) return (fattn_var){0};
    add_variable(t, x);
    return (fattn_var){t->count};
}

static const char *name_of(const fattn_param *p) { return p->name ? p->name : "param"; }

static fattn_status misfit_of_grad(fattn_ctx *ctx, const fattn_param *p) {
    return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "%s: the value is %s, the gradient %s", name_of(p),
                          fattn_dtype_name((fattn_dtype)p->value.dtype), fattn_dtype_name((fattn_dtype)p->grad.dtype));
}

fattn_status fattni_check_param(fattn_ctx *ctx, const fattn_param *p) {
    if (!p) return fattn_ctx_fail(ctx, FATTN_E_ARG, "param is NULL");
    const char *const name = name_of(p);
    FATTNI_TRY(fattni_check_tensor(ctx, name, &p->value));
    if (!is_float(p->value.dtype))
        return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "%s: %s cannot be a parameter", name,
                              fattn_dtype_name((fattn_dtype)p->value.dtype));
    const bool frozen = p->flags & FATTN_PARAM_FROZEN;
    if (!frozen) {
        FATTNI_TRY(fattni_check_tensor(ctx, name, &p->grad));
        if (p->grad.dtype != p->value.dtype && p->grad.dtype != FATTN_F32) return misfit_of_grad(ctx, p);
        bool same = p->grad.ndim == p->value.ndim;
        for (int d = 0; same && d < p->value.ndim; ++d) same = p->grad.shape[d] == p->value.shape[d];
        char a[96], b[96];
        if (!same)
            return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: the value is %s, the gradient %s", name,
                                  fattni_shape_text(&p->value, a, sizeof a), fattni_shape_text(&p->grad, b, sizeof b));
    }
    if (!fattni_is_row_major(&p->value) || (!frozen && !fattni_is_row_major(&p->grad)))
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "%s: value and gradient must be row-major", name);
    return FATTN_OK;
}

fattn_var fattn_use(fattn_tape *t, fattn_param *p) {
    if (!t || t->status || check_idle(t, "use")) return (fattn_var){0};
    fattn_status s = fattni_check_param(t->ctx, p);
    /* Optimizers take F32 gradients of F64 values, no op adds to them. */
    if (!s && !(p->flags & FATTN_PARAM_FROZEN) && p->value.dtype == FATTN_F64 && p->grad.dtype != FATTN_F64)
        s = misfit_of_grad(t->ctx, p);
    if (!s) s = reserve(t, 1);
    if (fattni_tape_fail(t, s)) return (fattn_var){0};
    fattni_variable *v = add_variable(t, &p->value);
    v->is_frozen = p->flags & FATTN_PARAM_FROZEN;
    if (!v->is_frozen) {
        v->wants_grad = v->is_param = true;
        v->one_pass = p->flags & FATTN_PARAM_ONE_PASS;
        v->param = p;
        v->grad = p->grad;
        v->cover.all = true;
    }
    return (fattn_var){t->count};
}

bool fattni_tape_reads_early(const fattn_tape *t, fattn_var v) {
    return t && t->ctx->recording && v.id >= 1 && v.id <= t->count && t->variables[v.id].is_frozen;
}

/* One block is shared by all calls. While a graph is recorded it stays, and this fails: recorded ops may use it. */
static fattn_status grow_workspace(fattn_tape *t, size_t bytes) {
    void *grown;
    if (bytes <= t->workspace_bytes) return FATTN_OK;
    if (!t->ctx->recording) {
        fattni_free(t->ctx, t->workspace, t->workspace_bytes);
        t->workspace = NULL, t->workspace_bytes = 0;
    }
    FATTNI_TRY(fattni_alloc(t->ctx, bytes, &grown));
    t->workspace = grown, t->workspace_bytes = bytes;
    return FATTN_OK;
}

/* Runs one function of an op; adds an error message if the op has set none. */
static fattn_status run(fattn_tape *t, const fattni_node *n, const char *stage, fattn_status (*f)(fattn_op_call *),
                        fattn_op_call *c) {
    fattn_ctx *ctx = c->ctx;
    const char before = ctx->error[0];
    ctx->error[0] = 0;
    t->running = n, t->stage = stage;
    fattn_status s = f(c);
    t->running = NULL;
    if (t->status) s = t->status; /* set by check_idle */
    if (s && !ctx->error[0])
        return fattn_ctx_fail(ctx, s, "%s: %s returned %s", n->def.name, stage, fattn_status_name(s));
    if (!ctx->error[0]) ctx->error[0] = before;
    return s;
}

static fattn_status check_def(fattn_ctx *ctx, const fattn_op_def *def, const fattn_var *in, int n_in, const void *attr,
                              fattn_op_def *known) {
    if (!def) return fattn_ctx_fail(ctx, FATTN_E_ARG, "op_custom: def is NULL");
    FATTNI_TRY(fattni_take_struct(ctx, "fattn_op_def", def, known, sizeof *known));
    if (!known->name) known->name = "op";
    if (!known->infer) return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: infer is NULL", known->name);
    const uint32_t flags = FATTN_OP_MAY_VIEW | FATTN_OP_PASS_GRAD | FATTN_OP_PASS_GRAD_LAST | FATTN_OP_F32_ON_CPU |
                           FATTN_OP_COLLECTIVE | FATTN_OP_COMPLETES_GRAD;
    if (known->flags & ~flags)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: unknown flags 0x%x", known->name, known->flags);
    if (known->n_out < 1 || known->n_out > MAX_OPERANDS || n_in < 0 || n_in > MAX_OPERANDS)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: %d inputs (must be 0..%d), %d outputs (must be 1..%d)",
                              known->name, n_in, MAX_OPERANDS, known->n_out, MAX_OPERANDS);
    if ((n_in && !in) || (known->attr_size && !attr))
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "%s: %s is NULL", known->name, n_in && !in ? "in" : "attr");
    return FATTN_OK;
}

/* A node with everything that infer may read. */
static fattn_status new_node(fattn_tape *t, const fattn_op_def *def, const fattn_var *in, int n_in, const void *attr,
                             fattni_node **out) {
    fattn_op_def known;
    FATTNI_TRY(check_def(t->ctx, def, in, n_in, attr, &known));
    const size_t ni = (size_t)n_in, no = (size_t)known.n_out;
    void *node, *ids, *tensors, *flags, *apart, *copy;
    FATTNI_TRY(new_records(t, 1, sizeof(fattni_node), &node));
    FATTNI_TRY(new_records(t, ni, sizeof(int32_t), &ids));
    FATTNI_TRY(new_records(t, 2 * (ni + no), sizeof(fattn_tensor), &tensors));
    FATTNI_TRY(new_records(t, 2 * ni, sizeof(uint8_t), &flags));
    FATTNI_TRY(new_records(t, ni, sizeof(fattni_tape_block *), &apart));
    FATTNI_TRY(new_records(t, known.attr_size, 1, &copy));
    if (known.attr_size) memcpy(copy, attr, known.attr_size);

    fattni_node *n = node;
    fattn_tensor *const values = tensors;
    *n = (fattni_node){.previous = t->last,
                       .def = known,
                       .in = ids,
                       .first_out = t->count + 1,
                       .d_out = values + ni + no,
                       .d_in = values + ni + 2 * no,
                       .fresh = flags,
                       .apart = apart};
    uint8_t *const wanted = n->fresh + ni;
    for (int i = 0; i < n_in; ++i) {
        ((int32_t *)ids)[i] = in[i].id;
        if (in[i].id == 0) continue;
        FATTNI_TRY(check_variable(t, known.name, in[i]));
        const fattni_variable *v = &t->variables[in[i].id];
        values[i] = v->value;
        wanted[i] = v->wants_grad && known.backward;
    }
    for (size_t o = 0; o < no; ++o)
        values[ni + o] = (fattn_tensor){.device = (int32_t)t->ctx->device, .device_id = t->ctx->device_id};
    n->call = (fattn_op_call){
        .struct_size = sizeof n->call,
        .flags = known.flags,
        .ctx = t->ctx,
        .attr = copy,
        .in = values,
        .n_in = n_in,
        .n_out = known.n_out,
        .out = values + ni,
        .wanted = wanted,
    };
    *out = n;
    return FATTN_OK;
}

static bool lies_inside(const fattn_tensor *part, const fattn_tensor *whole) {
    if (!whole->data || part->dtype != whole->dtype) return false;
    const int64_t size = (int64_t)fattn_dtype_size((fattn_dtype)part->dtype);
    const uintptr_t begin = (uintptr_t)part->data - (uintptr_t)(fattni_before(part) * size);
    const uintptr_t whole_begin = (uintptr_t)whole->data - (uintptr_t)(fattni_before(whole) * size);
    return begin >= whole_begin && (begin - whole_begin) % (uintptr_t)size == 0 &&
           begin + (uintptr_t)(fattni_footprint(part) * size) <=
               whole_begin + (uintptr_t)(fattni_footprint(whole) * size);
}

/* Checks out[o] as infer has set it and completes its strides. viewed: the input whose memory it shares,
   or -1 for memory of its own. */
static fattn_status check_output(const fattni_node *n, int o, int *viewed) {
    const fattn_op_call *c = &n->call;
    fattn_tensor *y = &c->out[o];
    char who[80];
    snprintf(who, sizeof who, "%s: output %d", n->def.name, o);
    fattn_tensor located = *y;
    if (!y->data) located.data = c->ctx; /* any aligned address: memory is allocated later */
    FATTNI_TRY(fattni_check_tensor(c->ctx, who, &located));
    bool strided = false;
    for (int d = 0; d < y->ndim; ++d) strided = strided || y->stride[d];
    if (!strided || fattn_tensor_numel(y) == 0)
        *y = fattn_tensor_view(y->data, (fattn_dtype)y->dtype, c->ctx->device, c->ctx->device_id, y->ndim,
                               located.shape);
    *viewed = -1;
    if (y->data && n->def.forward && !(n->def.flags & FATTN_OP_MAY_VIEW))
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG,
                              "%s: infer set data, which makes it a view, without "
                              "FATTN_OP_MAY_VIEW",
                              who);
    for (int i = 0; i < c->n_in && y->data && *viewed < 0; ++i)
        if (n->in[i] && lies_inside(y, &c->in[i])) *viewed = i;
    if (y->data && *viewed < 0)
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "%s: infer set data, but not inside an input", who);
    if (*viewed < 0 && !n->def.forward && fattn_tensor_numel(y))
        return fattn_ctx_fail(c->ctx, FATTN_E_ARG, "%s: not a view, and the op has no forward", who);
    for (int d = 0; d < y->ndim && *viewed < 0; ++d)
        if (y->shape[d] > 1 && y->stride[d] < 0)
            return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE,
                                  "%s: stride %lld of dimension %d is negative, but it is not a view", who,
                                  (long long)y->stride[d], d);
    return fattni_check_layout(c->ctx, who, y);
}

static fattn_status infer(fattn_tape *t, fattni_node *n) {
    FATTNI_TRY(run(t, n, "infer", n->def.infer, &n->call));
    if (!fattni_is_wide(n)) return FATTN_OK;
    FATTNI_TRY(fattni_wide_make(n, &t->records));
    FATTNI_TRY(run(t, n, "infer", n->def.infer, &n->wide->call));
    fattni_wide_plan(n);
    return FATTN_OK;
}

static fattn_status forward(fattn_tape *t, fattni_node *n) {
    if (!n->wide) return run(t, n, "forward", n->def.forward, &n->call);
    FATTNI_TRY(fattni_wide_open_forward(n));
    FATTNI_TRY(run(t, n, "forward", n->def.forward, &n->wide->call));
    return fattni_wide_close_forward(n);
}

static fattn_status node_backward(fattn_tape *t, fattni_node *n) {
    if (!n->wide) return run(t, n, "backward", n->def.backward, &n->call);
    FATTNI_TRY(fattni_wide_open_backward(n));
    FATTNI_TRY(run(t, n, "backward", n->def.backward, &n->wide->call));
    return fattni_wide_close_backward(n);
}

/* From the node's inputs to its outputs: infer, memory, forward. */
static fattn_status run_forward(fattn_tape *t, fattni_node *n) {
    fattn_op_call *c = &n->call;
    /* Without a forward, outputs that are no views are empty. */
    bool wants_grad = false, owns = false;
    for (int i = 0; i < c->n_in; ++i)
        wants_grad = wants_grad || c->wanted[i] || (!n->def.forward && n->in[i] && t->variables[n->in[i]].wants_grad);
    FATTNI_TRY(infer(t, n));
    FATTNI_TRY(reserve(t, c->n_out));
    const int32_t count = t->count;
    for (int o = 0; o < c->n_out; ++o) {
        int viewed;
        fattn_status s = check_output(n, o, &viewed);
        fattn_tensor *y = &c->out[o];
        if (!s && viewed < 0) {
            const size_t size = fattn_dtype_size((fattn_dtype)y->dtype);
            s = fattni_arena_take(&t->values, (size_t)fattni_footprint(y) * size, &y->data);
            owns = owns || y->data;
        }
        if (s) {
            t->count = count;
            return s;
        }
        fattni_variable *v = add_variable(t, y);
        if (viewed >= 0) {
            const fattni_variable *x = &t->variables[n->in[viewed]];
            v->base = x->base;
            v->wants_grad = x->wants_grad;
        } else {
            v->wants_grad = wants_grad && is_float(y->dtype);
            /* Without a backward: a view, but for its lack of elements; what is behind it may be reached. */
            n->wants_backward = n->wants_backward || v->wants_grad;
        }
    }
    fattn_status s = FATTN_OK;
    if (c->saved_bytes) s = fattni_tape_block_take(t, &t->values, c->saved_bytes, &n->saved);
    if (!s) s = grow_workspace(t, c->fwd_workspace);
    if (!s && (owns || (n->def.flags & FATTN_OP_COLLECTIVE && n->def.forward))) {
        c->saved = n->saved ? n->saved->p : NULL;
        c->workspace = c->fwd_workspace ? t->workspace : NULL;
        s = forward(t, n);
    }
    if (s) t->count = count;
    return s;
}

fattn_var fattn_op_custom(fattn_tape *t, const fattn_op_def *def, const fattn_var *in, int n_in, const void *attr) {
    if (!t || t->status || check_idle(t, "recording an op")) return (fattn_var){0};
    fattni_node *n;
    fattn_status s = new_node(t, def, in, n_in, attr, &n);
    if (!s) s = run_forward(t, n);
    if (fattni_tape_fail(t, s)) return (fattn_var){0};
    if (n->wants_backward) {
        t->last = n;
    } else {
        fattni_tape_block_give(t, n->saved);
    }
    return (fattn_var){n->first_out};
}

/* Whether in[i]'s gradient is out[0]'s (FATTN_OP_PASS_GRAD, FATTN_OP_PASS_GRAD_LAST). */
static bool passes(const fattn_tape *t, const fattni_node *n, int i) {
    const fattn_tensor *const x = &n->call.in[i], *const y = &n->call.out[0];
    const uint32_t flags = FATTN_OP_PASS_GRAD | (i == n->call.n_in - 1 ? (uint32_t)FATTN_OP_PASS_GRAD_LAST : 0);
    bool same = n->def.flags & flags && n->call.wanted[i] && x->dtype == y->dtype && x->ndim == y->ndim &&
                t->variables[n->first_out].base == n->first_out;
    for (int d = 0; d < y->ndim && same; ++d) same = x->shape[d] == y->shape[d];
    return same;
}

/* Gradient tensors of all inputs except those that pass on out[0]'s. If two may share elements, the op must
   not write both: the later one gets separate memory, which is added afterwards. */
static fattn_status open_inputs(fattn_tape *t, fattni_node *n) {
    const fattn_op_call *c = &n->call;
    for (int i = 0; i < c->n_in; ++i) {
        if (!c->wanted[i] || passes(t, n, i)) {
            n->d_in[i] = c->in[i];
            n->d_in[i].data = NULL;
            continue;
        }
        FATTNI_TRY(fattni_grad_open(t, n->in[i], &n->d_in[i], &n->fresh[i]));
        bool overlaps = false;
        for (int j = 0; j < i && n->d_in[i].data; ++j)
            overlaps = overlaps || (n->d_in[j].data && fattni_grads_overlap(t, n->in[i], n->in[j]));
        if (!overlaps) continue;
        const size_t size = fattn_dtype_size((fattn_dtype)n->d_in[i].dtype);
        FATTNI_TRY(fattni_tape_block_take(t, &t->grads, (size_t)fattni_footprint(&n->d_in[i]) * size, &n->apart[i]));
        n->d_in[i].data = (char *)n->apart[i]->p + (size_t)fattni_before(&n->d_in[i]) * size;
        n->fresh[i] = 1;
    }
    return FATTN_OK;
}

/* The gradient of an output that a collective op's backward gets: on every rank, or on none. */
static fattn_status read_collective(fattn_tape *t, int32_t id, fattn_tensor *d) {
    uint8_t fresh;
    if (d->data || !t->variables[id].reached) return FATTN_OK;
    FATTNI_TRY(fattni_grad_open(t, id, d, &fresh));
    if (d->data) return fattni_fill(t->ctx, d, 0, fresh); /* what consumed it has no elements here */
    d->data = t->ctx;                                     /* any address: there is no element */
    return FATTN_OK;
}

/* The gradient of out[0] for backward to complete, where one reaches another output. */
static fattn_status open_completed(fattn_tape *t, fattni_node *n) {
    const fattn_op_call *const c = &n->call;
    uint8_t fresh = 0;
    n->completes = false;
    for (int o = 1; o < c->n_out; ++o) n->completes = n->completes || n->d_out[o].data;
    n->completes = n->completes && n->def.backward && t->variables[n->first_out].base == n->first_out;
    if (n->completes) FATTNI_TRY(fattni_grad_open(t, n->first_out, &n->d_out[0], &fresh));
    n->call.d_out_fresh = fresh;
    return FATTN_OK;
}

/* d_out, and whether backward runs: where a gradient was written, or, of a collective op, where it would be if nothing
   were empty. */
static fattn_status open_outputs(fattn_tape *t, fattni_node *n, bool *runs) {
    const fattn_op_call *c = &n->call;
    bool reached = false;
    *runs = false;
    for (int o = 0; o < c->n_out; ++o) {
        const int32_t id = n->first_out + o;
        n->d_out[o] = c->out[o];
        n->d_out[o].data = NULL;
        if (t->variables[id].base != id) continue;
        FATTNI_TRY(fattni_grad_read(t, id, &n->d_out[o]));
        if (n->def.flags & FATTN_OP_COLLECTIVE) FATTNI_TRY(read_collective(t, id, &n->d_out[o]));
        reached = reached || t->variables[id].reached;
        *runs = *runs || (n->d_out[o].data && n->def.backward);
    }
    if (n->def.flags & FATTN_OP_COMPLETES_GRAD) FATTNI_TRY(open_completed(t, n));
    for (int i = 0; i < c->n_in && reached; ++i) {
        const fattni_variable *const x = &t->variables[n->in[i]];
        if (n->in[i] && x->wants_grad) t->variables[x->base].reached = true;
    }
    return FATTN_OK;
}

static fattn_status run_back(fattn_tape *t, fattni_node *n) {
    fattn_op_call *c = &n->call;
    bool runs;
    FATTNI_TRY(open_outputs(t, n, &runs));
    if (!runs) {
        fattni_tape_block_give(t, n->saved);
        return FATTN_OK;
    }
    FATTNI_TRY(open_inputs(t, n));
    FATTNI_TRY(grow_workspace(t, c->bwd_workspace));
    c->workspace = c->bwd_workspace ? t->workspace : NULL;
    c->d_out = n->d_out;
    c->d_in = n->d_in;
    c->d_in_fresh = n->fresh;
    FATTNI_TRY(node_backward(t, n));
    for (int i = 0; i < c->n_in; ++i) {
        if (!n->apart[i]) continue;
        fattn_tensor total;
        FATTNI_TRY(fattni_grad_read(t, n->in[i], &total));
        FATTNI_TRY(fattni_accumulate(t->ctx, &total, &n->d_in[i], false));
        fattni_tape_block_give(t, n->apart[i]);
    }
    for (int i = 0; i < c->n_in; ++i)
        if (passes(t, n, i)) FATTNI_TRY(fattni_grad_pass(t, n->first_out, n->in[i]));
    for (int o = 0; o < c->n_out; ++o) fattni_grad_release(t, n->first_out + o);
    fattni_tape_block_give(t, n->saved);
    return FATTN_OK;
}

/* *seed as a tensor of the scalar's shape. */
static fattn_status check_seed(fattn_ctx *ctx, const fattn_tensor *scalar, const fattn_tensor *seed,
                               fattn_tensor *out) {
    char text[96];
    FATTNI_TRY(fattni_check_tensor(ctx, "backward: the seed", seed));
    if (!is_float(seed->dtype))
        return fattn_ctx_fail(ctx, FATTN_E_DTYPE, "backward: the seed is %s, not a floating type",
                              fattn_dtype_name((fattn_dtype)seed->dtype));
    if (fattn_tensor_numel(seed) != 1)
        return fattn_ctx_fail(ctx, FATTN_E_SHAPE, "backward: the seed is %s, not one number",
                              fattni_shape_text(seed, text, sizeof text));
    *out = fattn_tensor_view(seed->data, (fattn_dtype)seed->dtype, (fattn_device)seed->device, seed->device_id,
                             scalar->ndim, scalar->shape);
    return FATTN_OK;
}

/* The parameter whose gradient the backward of n adds to for input i; NULL: none. */
static const fattn_param *param_of(const fattn_tape *t, const fattni_node *n, int i) {
    return n->in[i] ? t->variables[t->variables[n->in[i]].base].param : NULL;
}

static fattn_status begin_reduction(fattn_tape *t) {
    for (const fattni_node *n = t->last; n; n = n->previous)
        for (int i = 0; i < n->call.n_in; ++i) fattni_reducer_use(t->reducer, param_of(t, n, i));
    return fattni_reducer_begin(t->reducer);
}

static fattn_status reduce_inputs(fattn_tape *t, const fattni_node *n) {
    for (int i = 0; i < n->call.n_in; ++i) {
        if (n->in[i]) FATTNI_TRY(fattni_grad_finish(t, n->in[i]));
        FATTNI_TRY(fattni_reducer_used(t->reducer, param_of(t, n, i)));
    }
    return FATTN_OK;
}

/* from NULL: 1. */
static fattn_status backward(fattn_tape *t, fattn_var scalar, const fattn_tensor *from) {
    FATTNI_TRY(check_variable(t, "backward", scalar));
    const fattni_variable *v = &t->variables[scalar.id];
    char text[96];
    if (fattn_tensor_numel(&v->value) != 1)
        return fattn_ctx_fail(t->ctx, FATTN_E_SHAPE, "backward: variable %d is %s, not a scalar", scalar.id,
                              fattni_shape_text(&v->value, text, sizeof text));
    if (t->ran_back)
        return fattn_ctx_fail(t->ctx, FATTN_E_STATE,
                              "backward: has already run on this graph; reset the tape and record again");
    if (!v->wants_grad)
        return fattn_ctx_fail(t->ctx, FATTN_E_STATE,
                              "backward: variable %d depends on no parameter that needs a gradient", scalar.id);
    fattn_tensor seed, given;
    uint8_t fresh;
    if (from) FATTNI_TRY(check_seed(t->ctx, &v->value, from, &given));
    t->ran_back = true;
    FATTNI_TRY(fattni_grads_begin(t));
    t->variables[v->base].reached = true;
    FATTNI_TRY(fattni_grad_open(t, scalar.id, &seed, &fresh));
    FATTNI_TRY(from ? fattni_accumulate(t->ctx, &seed, &given, fresh) : fattni_fill(t->ctx, &seed, 1, fresh));
    if (t->reducer) FATTNI_TRY(begin_reduction(t));
    for (fattni_node *n = t->last; n; n = n->previous) {
        FATTNI_TRY(run_back(t, n));
        if (t->reducer) FATTNI_TRY(reduce_inputs(t, n));
    }
    for (int32_t id = 1; id <= t->count; ++id) FATTNI_TRY(fattni_grad_finish(t, id));
    return FATTN_OK;
}

fattn_status fattn_tape_backward(fattn_tape *t, fattn_var scalar) {
    if (!t) return FATTN_E_ARG;
    if (!t->status) FATTNI_TRY(check_idle(t, "backward"));
    return t->status ? t->status : fattni_tape_fail(t, backward(t, scalar, NULL));
}

fattn_status fattn_tape_backward_from(fattn_tape *t, fattn_var scalar, const fattn_tensor *seed) {
    if (!t) return FATTN_E_ARG;
    if (!t->status) FATTNI_TRY(check_idle(t, "backward"));
    if (!t->status && !seed)
        return fattni_tape_fail(t, fattn_ctx_fail(t->ctx, FATTN_E_ARG, "backward_from: seed is NULL"));
    return t->status ? t->status : fattni_tape_fail(t, backward(t, scalar, seed));
}

fattn_status fattn_tape_value(fattn_tape *t, fattn_var v, fattn_tensor *view) {
    if (!t) return FATTN_E_ARG;
    if (t->status) return t->status;
    if (!view) return fattn_ctx_fail(t->ctx, FATTN_E_ARG, "value: view is NULL");
    FATTNI_TRY(check_variable(t, "value", v));
    *view = t->variables[v.id].value;
    return FATTN_OK;
}

fattn_status fattn_tape_keep_grad(fattn_tape *t, fattn_var v) {
    if (!t) return FATTN_E_ARG;
    if (t->status) return t->status;
    FATTNI_TRY(check_variable(t, "keep_grad", v));
    if (!t->variables[v.id].wants_grad)
        return fattn_ctx_fail(t->ctx, FATTN_E_STATE, "keep_grad: variable %d has no gradient", v.id);
    if (t->ran_back) return fattn_ctx_fail(t->ctx, FATTN_E_STATE, "keep_grad: backward has already run");
    t->variables[t->variables[v.id].base].keep_grad = true;
    return FATTN_OK;
}

fattn_status fattn_tape_grad(fattn_tape *t, fattn_var v, fattn_tensor *view) {
    if (!t) return FATTN_E_ARG;
    if (t->status) return t->status;
    FATTNI_TRY(check_idle(t, "grad"));
    if (!view) return fattn_ctx_fail(t->ctx, FATTN_E_ARG, "grad: view is NULL");
    FATTNI_TRY(check_variable(t, "grad", v));
    if (!t->ran_back) return fattn_ctx_fail(t->ctx, FATTN_E_STATE, "grad: backward has not run");
    const fattni_variable *x = &t->variables[v.id], *base = &t->variables[x->base];
    if (!x->wants_grad) return fattn_ctx_fail(t->ctx, FATTN_E_STATE, "grad: variable %d has no gradient", v.id);
    if (!base->is_param && !base->keep_grad)
        return fattn_ctx_fail(t->ctx, FATTN_E_STATE,
                              "grad: the gradient of variable %d was not kept; call "
                              "fattn_tape_keep_grad before backward",
                              v.id);
    fattn_tensor g;
    FATTNI_TRY(fattni_grad_read(t, v.id, &g));
    if (!g.data && fattn_tensor_numel(&g))
        return fattn_ctx_fail(t->ctx, FATTN_E_STATE, "grad: no gradient reached variable %d", v.id);
    *view = g;
    return FATTN_OK;
}

fattn_status fattn_tape_item(fattn_tape *t, fattn_var v, double *out) {
    if (!t) return FATTN_E_ARG;
    if (t->status) return t->status;
    if (!out) return fattn_ctx_fail(t->ctx, FATTN_E_ARG, "item: out is NULL");
    FATTNI_TRY(check_variable(t, "item", v));
    const fattn_tensor *x = &t->variables[v.id].value;
    char text[96];
    if (fattn_tensor_numel(x) != 1)
        return fattn_ctx_fail(t->ctx, FATTN_E_SHAPE, "item: variable %d is %s, not one number", v.id,
                              fattni_shape_text(x, text, sizeof text));
    double cell; /* storage for one element of any dtype */
    const fattn_tensor here = fattn_tensor_view(&cell, (fattn_dtype)x->dtype, FATTN_CPU, 0, x->ndim, x->shape);
    FATTNI_TRY(fattn_tensor_copy(t->ctx, &here, x)); /* waits, on a GPU */
    *out = fattni_load(&cell, x->dtype, 0);
    return FATTN_OK;
}
