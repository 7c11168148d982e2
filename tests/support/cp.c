#include "cp.h"

#include "ranks.h"

#include "core/context_parallel/cp.h"
#include "core/tensor/numeric.h"

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

const char *const cp_names[CP_RESULTS] = {"o", "lse", "dq", "dk", "dv", "d_sink"};

const fattn_stream *cp_streams;

/* q, k, v, d_o, d_lse, alibi, sink: what a call reads. */
enum { Q, K, V, D_O, D_LSE, ALIBI, SINK, INPUTS };

static fattn_dtype dtype_of(const cp_case *c) { return c->dtype ? c->dtype : FATTN_F64; }
static fattn_dtype wide_of(fattn_dtype t) { return t == FATTN_F64 ? FATTN_F64 : FATTN_F32; }

static fattn_tensor host(fattn_dtype dtype, int ndim, const int64_t *shape) {
    fattn_tensor t = fattn_tensor_view(NULL, dtype, FATTN_CPU, 0, ndim, shape);
    t.data = calloc((size_t)fattn_tensor_numel(&t) + 1, fattn_dtype_size(dtype));
    cr_assert_not_null(t.data);
    return t;
}

/* The inputs in F64, rounded to the case's dtype; the same for every number of ranks. */
static void make_inputs(const cp_case *c, fattn_tensor *in) {
    const int64_t Dv = c->Dv ? c->Dv : c->D;
    const int64_t shapes[INPUTS][4] = {{c->B, c->Hq, c->N, c->D},
                                       {c->B, c->Hkv, c->N, c->D},
                                       {c->B, c->Hkv, c->N, Dv},
                                       {c->B, c->Hq, c->N, Dv},
                                       {c->B, c->Hq, c->N},
                                       {c->Hq},
                                       {c->Hq}};
    static const int ndims[INPUTS] = {4, 4, 4, 4, 3, 1, 1};
    fattn_ctx *ctx;
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    for (int i = 0; i < INPUTS; ++i) {
        in[i] = host(FATTN_F64, ndims[i], shapes[i]);
        fattn_tensor rounded = host(i <= D_O ? dtype_of(c) : wide_of(dtype_of(c)), ndims[i], shapes[i]);
        const fattn_rng rng = {.seed = 7, .stream = (uint32_t)i};
        cr_assert_eq(fattn_tensor_normal(ctx, &in[i], 0, 1, rng), FATTN_OK);
        double *const x = in[i].data;
        for (int64_t n = 0; i == K && c->key_means && n < fattn_tensor_numel(&in[i]); ++n)
            if (n % c->D < 4) x[n] += 10;
        for (int64_t n = 0; i == ALIBI && n < c->Hq; ++n) x[n] = 1.0 / (double)(2 << n % 8);
        cr_assert_eq(fattn_tensor_copy(ctx, &rounded, &in[i]), FATTN_OK);
        cr_assert_eq(fattn_tensor_copy(ctx, &in[i], &rounded), FATTN_OK);
        free(rounded.data);
    }
    fattn_ctx_destroy(ctx);
}

static void starts_of(const cp_case *c, int32_t *starts) {
    starts[0] = 0;
    for (int i = 0; i < c->n_sequences; ++i) starts[i + 1] = starts[i] + c->lengths[i];
}

static fattn_attention_params params_of(const cp_case *c) {
    return (fattn_attention_params){.struct_size = sizeof(fattn_attention_params),
                                    .flags = c->flags,
                                    .softcap = c->softcap,
                                    .dropout_p = c->dropout_p,
                                    .window_left = c->window_left,
                                    .window_right = c->window_right,
                                    .rng = {.seed = 99, .stream = 3}};
}

/* The tensors of a call with so many rows, on the context's device; freed by close_call. */
typedef struct call_tensors {
    fattn_tensor in[INPUTS], out[CP_RESULTS], step;
    fattn_attention_io io;
} call_tensors;

#define EXPECT(expression) cr_assert_eq(expression, FATTN_OK, "%s: %s", #expression, fattn_ctx_error(ctx))

static fattn_tensor allocate(fattn_ctx *ctx, const cp_case *c, fattn_dtype dtype, int ndim, const int64_t *shape) {
    fattn_tensor t;
    if (ndim < 4 || !c->heads_last) {
        EXPECT(fattn_tensor_alloc(ctx, dtype, ndim, shape, &t));
        return t;
    }
    static const int order[] = {0, 2, 1, 3};
    EXPECT(fattn_tensor_alloc(ctx, dtype, 4, (const int64_t[]){shape[0], shape[2], shape[1], shape[3]}, &t));
    return fattn_tensor_permute(&t, order);
}

static void open_call(fattn_ctx *ctx, const cp_case *c, fattn_dtype dtype, int64_t rows, call_tensors *t) {
    const int64_t Dv = c->Dv ? c->Dv : c->D, B = c->B, Hq = c->Hq, Hkv = c->Hkv;
    const fattn_dtype wide = wide_of(dtype), result = c->wide ? wide : dtype;
    const int64_t q[] = {B, Hq, rows, c->D}, k[] = {B, Hkv, rows, c->D}, v[] = {B, Hkv, rows, Dv},
                  o[] = {B, Hq, rows, Dv};
    memset(t, 0, sizeof *t);
    t->in[Q] = allocate(ctx, c, dtype, 4, q), t->in[K] = allocate(ctx, c, dtype, 4, k);
    t->in[V] = allocate(ctx, c, dtype, 4, v), t->in[D_O] = allocate(ctx, c, dtype, 4, o);
    t->in[D_LSE] = allocate(ctx, c, wide, 3, o), t->in[ALIBI] = allocate(ctx, c, wide, 1, &Hq);
    t->in[SINK] = allocate(ctx, c, wide, 1, &Hq), t->out[CP_D_SINK] = allocate(ctx, c, wide, 1, &Hq);
    t->out[CP_O] = allocate(ctx, c, result, 4, o), t->out[CP_LSE] = allocate(ctx, c, wide, 3, o);
    t->out[CP_DQ] = allocate(ctx, c, result, 4, q), t->out[CP_DK] = allocate(ctx, c, result, 4, k);
    t->out[CP_DV] = allocate(ctx, c, result, 4, v), t->step = allocate(ctx, c, FATTN_I32, 0, NULL);
    /* Gradients begin as ones, to which ACC_ flags add. */
    double one = 1;
    for (int i = 0; i < CP_RESULTS; ++i) {
        fattn_tensor ones = t->out[i];
        memset(ones.stride, 0, sizeof ones.stride);
        ones.data = &one, ones.dtype = FATTN_F64, ones.device = FATTN_CPU, ones.device_id = 0;
        EXPECT(fattn_tensor_copy(ctx, &t->out[i], &ones));
    }
    int32_t number = 5;
    const fattn_tensor step = fattn_tensor_view(&number, FATTN_I32, FATTN_CPU, 0, 0, NULL);
    EXPECT(fattn_tensor_copy(ctx, &t->step, &step));
    t->io = (fattn_attention_io){.struct_size = sizeof t->io,
                                 .q = &t->in[Q],
                                 .k = &t->in[K],
                                 .v = &t->in[V],
                                 .o = &t->out[CP_O],
                                 .lse = &t->out[CP_LSE],
                                 .alibi = c->alibi ? &t->in[ALIBI] : NULL,
                                 .sink = c->sink ? &t->in[SINK] : NULL,
                                 .rng_step = c->rng_step ? &t->step : NULL,
                                 .d_o = &t->in[D_O],
                                 .d_lse = c->d_lse ? &t->in[D_LSE] : NULL,
                                 .dq = &t->out[CP_DQ],
                                 .dk = &t->out[CP_DK],
                                 .dv = &t->out[CP_DV],
                                 .d_sink = c->sink ? &t->out[CP_D_SINK] : NULL};
}

static void free_any(fattn_ctx *ctx, const cp_case *c, fattn_tensor *t) {
    static const int order[] = {0, 2, 1, 3};
    if (t->ndim == 4 && c->heads_last) *t = fattn_tensor_permute(t, order);
    fattn_tensor_free(ctx, t);
}

static void close_call(fattn_ctx *ctx, const cp_case *c, call_tensors *t) {
    for (int i = 0; i < INPUTS; ++i) free_any(ctx, c, &t->in[i]);
    for (int i = 0; i < CP_RESULTS; ++i) free_any(ctx, c, &t->out[i]);
    free_any(ctx, c, &t->step);
}

cp_result cp_whole(const cp_case *c, fattn_device device, fattn_dtype dtype) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .device = device, .cpu_threads = 2};
    fattn_ctx *ctx;
    fattn_tensor in[INPUTS], cu = {0};
    call_tensors t;
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    make_inputs(c, in);
    open_call(ctx, c, dtype ? dtype : dtype_of(c), c->N, &t);
    for (int i = 0; i < INPUTS; ++i) EXPECT(fattn_tensor_copy(ctx, &t.in[i], &in[i]));
    fattn_attention_params p = params_of(c);
    if (c->n_sequences) {
        int32_t starts[CP_MOST_SEQUENCES + 1];
        const int64_t n = c->n_sequences + 1;
        starts_of(c, starts);
        const fattn_tensor from = fattn_tensor_view(starts, FATTN_I32, FATTN_CPU, 0, 1, &n);
        EXPECT(fattn_tensor_alloc(ctx, FATTN_I32, 1, &n, &cu));
        EXPECT(fattn_tensor_copy(ctx, &cu, &from));
        t.io.cu_seqlens_q = t.io.cu_seqlens_k = &cu;
        for (int i = 0; i < c->n_sequences; ++i)
            if (c->lengths[i] > p.max_seqlen_q) p.max_seqlen_q = p.max_seqlen_k = c->lengths[i];
    }
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    EXPECT(fattn_attention_query(ctx, &p, &t.io, &plan));
    fattn_tensor workspace;
    t.io.workspace_bytes = plan.fwd_workspace > plan.bwd_workspace ? plan.fwd_workspace : plan.bwd_workspace;
    EXPECT(fattn_tensor_alloc(ctx, FATTN_U8, 1, (const int64_t[]){(int64_t)t.io.workspace_bytes}, &workspace));
    t.io.workspace = workspace.data;
    EXPECT(fattn_attention_fwd(ctx, &p, &t.io));
    EXPECT(fattn_attention_bwd(ctx, &p, &t.io));
    cp_result r = {0};
    for (int i = 0; i < CP_RESULTS; ++i) {
        if (i == CP_D_SINK && !c->sink) continue;
        r.t[i] = host((fattn_dtype)t.out[i].dtype, t.out[i].ndim, t.out[i].shape);
        EXPECT(fattn_tensor_copy(ctx, &r.t[i], &t.out[i]));
    }
    fattn_tensor_free(ctx, &workspace);
    fattn_tensor_free(ctx, &cu);
    close_call(ctx, c, &t);
    for (int i = 0; i < INPUTS; ++i) free(in[i].data);
    fattn_ctx_destroy(ctx);
    return r;
}

/* ---- ranks ---- */

typedef struct shared {
    const cp_case *c;
    const fattn_tensor *in;
    cp_result *result;
    int form, layout;
} shared;

#define TRY(expression)                                                                                                \
    do {                                                                                                               \
        const fattn_status try_status = (expression);                                                                  \
        if (try_status) return try_status;                                                                             \
    } while (0)

/* io.saved of a call, which some forms use. */
static fattn_status open_saved(rank_call *r, fattn_cp *cp, const fattn_attention_params *p, call_tensors *t,
                               fattn_tensor *saved) {
    size_t bytes;
    TRY(fattn_cp_saved(cp, p, &t->io, &bytes));
    TRY(fattn_tensor_alloc(r->ctx, FATTN_U8, 1, (const int64_t[]){(int64_t)bytes}, saved));
    t->io.saved = saved->data, t->io.saved_bytes = bytes;
    return FATTN_OK;
}

/* Backward reads none of these. */
static fattn_status forget(rank_call *r, call_tensors *t) {
    double nan = NAN;
    const fattn_tensor *const read[] = {&t->in[Q], &t->in[K], &t->in[V], &t->out[CP_O], &t->out[CP_LSE]};
    for (int i = 0; i < 5; ++i) {
        fattn_tensor nans = *read[i];
        memset(nans.stride, 0, sizeof nans.stride);
        nans.data = &nan, nans.dtype = FATTN_F64, nans.device = FATTN_CPU, nans.device_id = 0;
        TRY(fattn_tensor_copy(r->ctx, read[i], &nans));
    }
    return FATTN_OK;
}

static fattn_status call_ranks(rank_call *r, fattn_cp *cp, call_tensors *t) {
    const shared *const s = r->arg;
    const cp_case *const c = s->c;
    for (int i = 0; i < INPUTS; ++i)
        TRY(i <= D_LSE ? fattn_cp_take(cp, &s->in[i], 2, &t->in[i]) : fattn_tensor_copy(r->ctx, &t->in[i], &s->in[i]));
    const fattn_attention_params p = params_of(c);
    if (c->without & 1u << CP_DQ) t->io.dq = NULL;
    if (c->without & 1u << CP_DK) t->io.dk = NULL;
    if (c->without & 1u << CP_DV) t->io.dv = NULL;
    fattn_tensor saved = {0};
    if (c->saves) TRY(open_saved(r, cp, &p, t, &saved));
    TRY(fattn_cp_fwd(cp, &p, &t->io));
    if (t->io.saved_bytes) TRY(forget(r, t));
    TRY(fattn_cp_bwd(cp, &p, &t->io));
    if (t->io.saved_bytes)
        for (int i = Q; i <= V; ++i) TRY(fattn_cp_take(cp, &s->in[i], 2, &t->in[i]));
    const size_t allocs = fattn_ctx_mem(r->ctx).allocs, live = fattn_ctx_mem(r->ctx).live;
    TRY(fattn_cp_fwd(cp, &p, &t->io));
    if (r->ctx && fattn_ctx_device(r->ctx) == FATTN_CUDA && fattn_ctx_mem(r->ctx).allocs != allocs)
        return fattn_ctx_fail(r->ctx, FATTN_E_MISMATCH, "a second call allocated");
    if (fattn_ctx_mem(r->ctx).live != live) return fattn_ctx_fail(r->ctx, FATTN_E_MISMATCH, "a call kept memory");
    if (c->sink) { /* the shares; each began as one where it is added to */
        TRY(fattn_comm_all_reduce(r->comm, &t->out[CP_D_SINK]));
        if (r->rank == 0) TRY(fattn_tensor_copy(r->ctx, &s->result->t[CP_D_SINK], &t->out[CP_D_SINK]));
    }
    for (int i = 0; i < CP_D_SINK; ++i) {
        const fattn_tensor *const out = &t->out[i];
        fattn_tensor whole;
        TRY(fattn_tensor_alloc(r->ctx, (fattn_dtype)out->dtype, out->ndim, s->result->t[i].shape, &whole));
        fattn_status status = fattn_cp_gather(cp, out, 2, &whole);
        if (!status && r->rank == 0) status = fattn_tensor_copy(r->ctx, &s->result->t[i], &whole);
        fattn_tensor_free(r->ctx, &whole);
        TRY(status);
    }
    fattn_tensor_free(r->ctx, &saved);
    return FATTN_OK;
}

static fattn_status on_rank(rank_call *r) {
    const shared *const s = r->arg;
    cp_case own = *s->c;
    if (own.mixed) own.heads_last = r->rank % 2;
    const cp_case *const c = &own;
    int32_t starts[CP_MOST_SEQUENCES + 1];
    starts_of(c, starts);
    const fattn_cp_options o = {.struct_size = sizeof o,
                                .form = s->form,
                                .layout = s->layout,
                                .n_sequences = c->n_sequences,
                                .rows = c->N,
                                .cu_seqlens = c->n_sequences ? starts : NULL};
    fattn_cp *cp;
    call_tensors t;
    if (c->messages) r->comm->parts = NULL;
    TRY(fattn_cp_create(r->comm, &o, &cp));
    cp->groups = c->groups;
    open_call(r->ctx, c, dtype_of(c), fattn_cp_rows(cp), &t);
    fattn_status status = call_ranks(r, cp, &t);
    const fattn_status synced = fattn_ctx_sync(r->ctx);
    close_call(r->ctx, c, &t);
    fattn_cp_destroy(cp);
    return status ? status : synced;
}

cp_result cp_run(const cp_case *c, fattn_device device, int ranks, int form, int layout) {
    fattn_tensor in[INPUTS];
    cp_result r = {0};
    const int64_t Dv = c->Dv ? c->Dv : c->D, B = c->B, Hq = c->Hq, Hkv = c->Hkv, N = c->N;
    const fattn_dtype wide = wide_of(dtype_of(c)), result = c->wide ? wide : dtype_of(c);
    make_inputs(c, in);
    r.t[CP_O] = host(result, 4, (const int64_t[]){B, Hq, N, Dv});
    r.t[CP_LSE] = host(wide, 3, (const int64_t[]){B, Hq, N});
    r.t[CP_DQ] = host(result, 4, (const int64_t[]){B, Hq, N, c->D});
    r.t[CP_DK] = host(result, 4, (const int64_t[]){B, Hkv, N, c->D});
    r.t[CP_DV] = host(result, 4, (const int64_t[]){B, Hkv, N, Dv});
    if (c->sink) r.t[CP_D_SINK] = host(wide, 1, &Hq);
    shared s = {.c = c, .in = in, .result = &r, .form = form, .layout = layout};
    const ranks_options o = {.device = device, .time_limit = 100, .streams = device == FATTN_CUDA ? cp_streams : NULL};
    expect_ranks(ranks, &o, on_rank, &s);
    for (int i = 0; i < INPUTS; ++i) free(in[i].data);
    return r;
}

void cp_free(cp_result *r) {
    for (int i = 0; i < CP_RESULTS; ++i) free(r->t[i].data);
    *r = (cp_result){0};
}

double cp_error(const cp_result *got, const cp_result *want, int i) {
    const fattn_tensor *const g = &got->t[i], *const w = &want->t[i];
    double error = 0, norm = 0;
    if (!w->data) return 0;
    for (int64_t n = 0; n < fattn_tensor_numel(w); ++n) {
        const double a = fattni_load(g->data, g->dtype, n), b = fattni_load(w->data, w->dtype, n);
        if (a == b) continue; /* infinities, too */
        error += (a - b) * (a - b);
        norm += b * b;
    }
    return error == 0 ? 0 : sqrt(error / (norm > 0 ? norm : 1));
}

bool cp_same(const cp_result *a, const cp_result *b, int i) {
    const fattn_tensor *const x = &a->t[i];
    return !x->data || (x->dtype == b->t[i].dtype &&
                        memcmp(x->data, b->t[i].data,
                               (size_t)fattn_tensor_numel(x) * fattn_dtype_size((fattn_dtype)x->dtype)) == 0);
}

/* ---- the op ---- */

enum { OP_N = 150, OP_H = 4, OP_D = 8, OP_PARAMS = 4 };

typedef struct op_run {
    int form, loss;
    bool save;
    double *out;
} op_run;

static int64_t op_size(void) { return 3 * OP_N * OP_H * OP_D + OP_H + 1; }

static fattn_var op_loss(fattn_tape *t, fattn_cp *cp, const fattn_var *x, const fattn_tensor *positions, int loss) {
    const fattn_attention_params p = {.struct_size = sizeof p, .flags = FATTN_CAUSAL};
    const fattn_var at = fattn_input(t, positions);
    const fattn_attention_vars vars = {.struct_size = sizeof vars,
                                       .q = fattn_op_rope_at(t, x[0], 100.0f, at),
                                       .k = fattn_op_rope_at(t, x[1], 100.0f, at),
                                       .v = x[2],
                                       .sink = x[3]};
    fattn_var lse;
    const fattn_var o = fattn_op_attention_cp(t, cp, &vars, &p, &lse);
    const fattn_var a = fattn_op_sum(t, fattn_op_mul(t, o, o), NULL, 0, 0);
    const fattn_var b = fattn_op_sum(t, fattn_op_mul(t, lse, lse), NULL, 0, 0);
    return loss == 1 ? a : loss == 2 ? b : fattn_op_add(t, a, b);
}

static fattn_status op_step(rank_call *r, fattn_cp *cp, fattn_tape *t) {
    const op_run *const run = r->arg;
    const int64_t rows = fattn_cp_rows(cp), whole[] = {1, OP_H, OP_N, OP_D}, local[] = {1, OP_H, rows, OP_D};
    const int64_t heads = OP_H, one = 1;
    fattn_tensor value[OP_PARAMS], grad[OP_PARAMS], positions, all;
    fattn_param params[OP_PARAMS];
    fattn_var x[OP_PARAMS];
    int32_t places[OP_N];
    fattn_cp_positions(cp, places);
    const fattn_tensor from = fattn_tensor_view(places, FATTN_I32, FATTN_CPU, 0, 1, &rows);
    TRY(fattn_tensor_alloc(r->ctx, FATTN_I32, 1, &rows, &positions));
    TRY(fattn_tensor_copy(r->ctx, &positions, &from));
    TRY(fattn_tensor_alloc(r->ctx, FATTN_F64, 4, whole, &all));
    for (int i = 0; i < OP_PARAMS; ++i) {
        const int ndim = i < 3 ? 4 : 1;
        const int64_t *const shape = i < 3 ? local : &heads;
        TRY(fattn_tensor_alloc(r->ctx, FATTN_F64, ndim, shape, &value[i]));
        TRY(fattn_tensor_alloc(r->ctx, FATTN_F64, ndim, shape, &grad[i]));
        const fattn_rng rng = {.seed = 4, .stream = (uint32_t)i};
        TRY(fattn_tensor_normal(r->ctx, i < 3 ? &all : &value[i], 0, 1, rng));
        if (i < 3) TRY(fattn_cp_take(cp, &all, 2, &value[i]));
        double zero = 0;
        fattn_tensor zeros = fattn_tensor_view(&zero, FATTN_F64, FATTN_CPU, 0, ndim, shape);
        memset(zeros.stride, 0, sizeof zeros.stride);
        TRY(fattn_tensor_copy(r->ctx, &grad[i], &zeros));
        params[i] = (fattn_param){.value = value[i], .grad = grad[i], .name = "x"};
        x[i] = fattn_use(t, &params[i]);
    }
    const fattn_var loss = op_loss(t, cp, x, &positions, run->loss);
    TRY(fattn_tape_backward(t, loss));
    double *to = run->out, scrap[OP_H + 1];
    for (int i = 0; i < 3; ++i, to += OP_N * OP_H * OP_D) {
        TRY(fattn_cp_gather(cp, &grad[i], 2, &all));
        const fattn_tensor host_all = fattn_tensor_view(to, FATTN_F64, FATTN_CPU, 0, 4, whole);
        if (r->rank == 0) TRY(fattn_tensor_copy(r->ctx, &host_all, &all));
    }
    fattn_tensor value_of_loss, sum;
    TRY(fattn_tape_value(t, loss, &value_of_loss));
    TRY(fattn_tensor_alloc(r->ctx, FATTN_F64, 1, &one, &sum));
    value_of_loss.ndim = 1, value_of_loss.shape[0] = value_of_loss.stride[0] = 1;
    TRY(fattn_tensor_copy(r->ctx, &sum, &value_of_loss));
    TRY(fattn_comm_all_reduce(r->comm, &grad[3])); /* shares */
    TRY(fattn_comm_all_reduce(r->comm, &sum));
    double *const last = r->rank == 0 ? to : scrap;
    const fattn_tensor a = fattn_tensor_view(last, FATTN_F64, FATTN_CPU, 0, 1, &heads);
    const fattn_tensor b = fattn_tensor_view(last + OP_H, FATTN_F64, FATTN_CPU, 0, 1, &one);
    TRY(fattn_tensor_copy(r->ctx, &a, &grad[3]));
    TRY(fattn_tensor_copy(r->ctx, &b, &sum));
    fattn_tape_reset(t);
    for (int i = 0; i < OP_PARAMS; ++i) {
        fattn_tensor_free(r->ctx, &value[i]);
        fattn_tensor_free(r->ctx, &grad[i]);
    }
    fattn_tensor_free(r->ctx, &positions);
    fattn_tensor_free(r->ctx, &all);
    fattn_tensor_free(r->ctx, &sum);
    return FATTN_OK;
}

static fattn_status op_on_rank(rank_call *r) {
    const op_run *const run = r->arg;
    const fattn_cp_options o = {.struct_size = sizeof o, .form = run->form, .rows = OP_N, .save = run->save};
    fattn_cp *cp;
    fattn_tape *t;
    TRY(fattn_cp_create(r->comm, &o, &cp));
    TRY(fattn_tape_create(r->ctx, &t));
    const fattn_status status = op_step(r, cp, t), synced = fattn_ctx_sync(r->ctx);
    fattn_tape_destroy(t);
    fattn_cp_destroy(cp);
    return status ? status : synced;
}

double *cp_op(fattn_device device, int ranks, int form, bool save, int loss, int64_t *n) {
    op_run run = {.form = form, .loss = loss, .save = save, .out = calloc((size_t)op_size(), sizeof(double))};
    cr_assert_not_null(run.out);
    const ranks_options o = {.device = device, .streams = device == FATTN_CUDA ? cp_streams : NULL};
    expect_ranks(ranks, &o, op_on_rank, &run);
    *n = op_size();
    return run.out;
}
