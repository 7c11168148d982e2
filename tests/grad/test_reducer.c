/* Gradients that are summed over ranks under backward, and AdamW whose state the ranks divide: bits as without. */
#include "core/comm/comm.h"
#include "ranks.h"
#include "thinned.h"

#include <fattn/optim.h>
#include <fattn/parallel.h>

#include <criterion/criterion.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

static const int sizes[] = {1, 2, 3, 4};
#define EACH_SIZE(i) (size_t i = 0; i < sizeof sizes / sizeof *sizes; ++i)

#define TRY(expression)                                                                                                \
    do {                                                                                                               \
        const fattn_status tried = (expression);                                                                       \
        if (tried) return tried;                                                                                       \
    } while (0)
#define CHECK(condition)                                                                                               \
    do {                                                                                                               \
        if (!(condition)) return fattn_ctx_fail(c->ctx, FATTN_E_MISMATCH, "line %d: %s", __LINE__, #condition);        \
    } while (0)

/* TABLE is embedding and head. GAIN and SHIFT lie behind UP, UNUSED behind DOWN; the others apart. */
enum { TABLE, UP, GAIN, SHIFT, FROZEN, EMPTY, DOWN, UNUSED, PARAMS };
enum { VOCAB = 500, WIDTH = 40, HIDDEN = 500, ROWS = 6 };
static const int64_t shapes[PARAMS][2] = {
    [TABLE] = {VOCAB, WIDTH},  [UP] = {HIDDEN, WIDTH}, [GAIN] = {1, HIDDEN},     [SHIFT] = {1, HIDDEN},
    [FROZEN] = {WIDTH, WIDTH}, [EMPTY] = {0, WIDTH},   [DOWN] = {WIDTH, HIDDEN}, [UNUSED] = {1, 77}};
static const int groups[][2] = {{TABLE, TABLE}, {UP, SHIFT}, {FROZEN, FROZEN}, {EMPTY, EMPTY}, {DOWN, UNUSED}};
enum { GROUPS = sizeof groups / sizeof *groups };

typedef struct model {
    fattn_param p[PARAMS];
    fattn_param *list[PARAMS];
    fattn_tensor values[GROUPS], grads[GROUPS];
    int32_t ids[ROWS]; /* of the batch that is on the tape */
} model;

typedef struct kind {
    fattn_dtype value, grad;
    uint32_t flags; /* of the optimizer */
} kind;
enum { STOCHASTIC = FATTN_OPTIM_NO_MASTERS | FATTN_OPTIM_STOCHASTIC_ROUNDING };
static const kind kinds[] = {
    {FATTN_F32, FATTN_F32},
    {FATTN_F64, FATTN_F64},
    {FATTN_BF16, FATTN_F32},
    {FATTN_BF16, FATTN_BF16},
    {FATTN_F16, FATTN_F16},
    {FATTN_BF16, FATTN_F32, STOCHASTIC},
    {FATTN_F16, FATTN_F16, STOCHASTIC},
};
enum { KINDS = sizeof kinds / sizeof *kinds };

static int64_t numel(int i) { return shapes[i][0] * shapes[i][1]; }

static fattn_tensor place(const fattn_tensor *all, int64_t at, int i) {
    const fattn_dtype t = (fattn_dtype)all->dtype;
    void *const data = numel(i) ? (char *)all->data + (size_t)at * fattn_dtype_size(t) : NULL;
    return fattn_tensor_view(data, t, FATTN_CPU, 0, 2, shapes[i]);
}

static fattn_status model_new(model *m, fattn_ctx *ctx, const kind *k) {
    static const char *const names[PARAMS] = {"table", "up", "gain", "shift", "frozen", "empty", "down", "unused"};
    for (int g = 0; g < GROUPS; ++g) {
        int64_t n = 0, at = 0;
        for (int i = groups[g][0]; i <= groups[g][1]; ++i) n += numel(i);
        TRY(fattn_tensor_alloc(ctx, k->value, 1, &n, &m->values[g]));
        TRY(fattn_tensor_alloc(ctx, k->grad, 1, &n, &m->grads[g]));
        TRY(fattn_tensor_normal(ctx, &m->values[g], 0, 0.3, (fattn_rng){.seed = 5, .stream = (uint32_t)g}));
        TRY(fattn_tensor_normal(ctx, &m->grads[g], 0, 0, (fattn_rng){.seed = 0}));
        for (int i = groups[g][0]; i <= groups[g][1]; at += numel(i++)) {
            m->p[i] = (fattn_param){.value = place(&m->values[g], at, i),
                                    .grad = place(&m->grads[g], at, i),
                                    .name = names[i],
                                    .flags = i == FROZEN  ? FATTN_PARAM_FROZEN
                                             : i == SHIFT ? FATTN_PARAM_NO_DECAY
                                                          : 0};
            m->list[i] = &m->p[i];
        }
    }
    return FATTN_OK;
}

static void model_free(model *m, fattn_ctx *ctx) {
    for (int g = 0; g < GROUPS; ++g) {
        fattn_tensor_free(ctx, &m->values[g]);
        fattn_tensor_free(ctx, &m->grads[g]);
    }
}

/* All gradients but those of UNUSED and EMPTY begin as numbers that nobody wants. */
static fattn_status set_one_pass(fattn_ctx *ctx, model *m) {
    for (int i = 0; i < PARAMS; ++i) {
        m->p[i].flags |= FATTN_PARAM_ONE_PASS;
        if (i != UNUSED && i != FROZEN) TRY(fattn_tensor_normal(ctx, &m->p[i].grad, 0, 1e4, (fattn_rng){.seed = 9}));
    }
    return FATTN_OK;
}

static bool same(const fattn_tensor *a, const fattn_tensor *b) {
    const size_t bytes = (size_t)fattn_tensor_numel(a) * fattn_dtype_size((fattn_dtype)a->dtype);
    return a->dtype == b->dtype && fattn_tensor_numel(a) == fattn_tensor_numel(b) &&
           (bytes == 0 || memcmp(a->data, b->data, bytes) == 0);
}

/* The table is used first and last, UP by two products. */
static fattn_var loss_of(fattn_tape *t, model *m, const fattn_tensor *ids) {
    const fattn_var none = {0};
    fattn_var w[PARAMS], x;
    for (int i = 0; i < PARAMS; ++i)
        if (i != UNUSED && i != EMPTY) w[i] = fattn_use(t, &m->p[i]);
    x = fattn_op_embedding(t, w[TABLE], fattn_input(t, ids));
    fattn_var h = fattn_op_linear(t, x, w[UP], none);
    h = fattn_op_add(t, fattn_op_mul(t, fattn_op_gelu(t, h), w[GAIN]), w[SHIFT]);
    h = fattn_op_add(t, h, fattn_op_linear(t, fattn_op_linear(t, x, w[FROZEN], none), fattn_use(t, &m->p[UP]), none));
    x = fattn_op_add(t, x, fattn_op_linear(t, h, w[DOWN], none));
    return fattn_op_mean(t, fattn_op_tanh(t, fattn_op_linear(t, x, w[TABLE], none)), NULL, 0, 0);
}

typedef struct settings {
    kind kind;
    int64_t bucket_bytes;
    int late;
    uint32_t hold;
    bool one_pass; /* gradients are stored */
} settings;

static fattn_status compare(rank_call *c, model *a, model *b, fattn_tape *t, fattn_reducer *r) {
    for (int step = 0; step < 3; ++step) {
        int32_t ids[ROWS];
        const int64_t rows = ROWS;
        const fattn_tensor in = fattn_tensor_view(ids, FATTN_I32, FATTN_CPU, 0, 1, &rows);
        for (int i = 0; i < ROWS; ++i) ids[i] = (131 * c->rank + 17 * step + 29 * i) % VOCAB;
        fattn_tape_reset(t);
        TRY(fattn_tape_backward(t, loss_of(t, a, &in)));
        for (int i = 0; i < PARAMS; ++i)
            if (i != FROZEN) TRY(fattn_comm_all_reduce(c->comm, &a->p[i].grad));
        fattn_tape_reset(t);
        if (step < 2) {
            TRY(fattn_reducer_backward(r, t, loss_of(t, b, &in), NULL));
        } else {
            TRY(fattn_tape_backward(t, loss_of(t, b, &in))); /* finish alone makes the sums, too */
        }
        TRY(fattn_reducer_finish(r));
        for (int i = 0; i < PARAMS; ++i) CHECK(same(&a->p[i].grad, &b->p[i].grad));
    }
    return FATTN_OK;
}

static fattn_status reduce(rank_call *c) {
    const settings *const o = c->arg;
    const fattn_reducer_options options = {
        .struct_size = sizeof options, .bucket_bytes = o->bucket_bytes, .late = o->late, .hold = o->hold};
    model a = {.list = {0}}, b = {.list = {0}};
    fattn_tape *t = NULL;
    fattn_reducer *r = NULL;
    fattn_status s = model_new(&a, c->ctx, &o->kind);
    if (!s) s = model_new(&b, c->ctx, &o->kind);
    if (!s && o->one_pass) s = set_one_pass(c->ctx, &a);
    if (!s && o->one_pass) s = set_one_pass(c->ctx, &b);
    if (!s) s = fattn_tape_create(c->ctx, &t);
    if (!s) s = fattn_reducer_create(c->ctx, c->comm, &options, b.list, PARAMS, &r);
    if (!s) s = compare(c, &a, &b, t, r);
    fattn_reducer_destroy(r);
    fattn_tape_destroy(t);
    model_free(&a, c->ctx);
    model_free(&b, c->ctx);
    return s;
}

/* Buckets of one parameter each, of some, and of all that lie side by side. */
Test(reducer, same_bits_as_all_reduce) {
    static const int64_t buckets[] = {1, 5000, 90000, 0};
    for (int k = 0; k < KINDS; ++k)
        for (size_t n = (size_t)k % THINNED(4); n < sizeof buckets / sizeof *buckets; n += THINNED(4))
            for
                EACH_SIZE(i) {
                    settings o = {kinds[k], buckets[n], (int)((i + n) % 3 * 3), (uint32_t)((i + 2 * n) % 3 * 50)};
                    expect_ranks(sizes[i], NULL, reduce, &o);
                    o.one_pass = true;
                    expect_ranks(sizes[i], NULL, reduce, &o);
                }
}

/* ---- several batches a step ---- */

static fattn_status gradients_of(model *m, fattn_tape *t, int step, int batch, fattn_var *loss) {
    const int64_t rows = ROWS;
    const fattn_tensor in = fattn_tensor_view(m->ids, FATTN_I32, FATTN_CPU, 0, 1, &rows);
    for (int i = 0; i < ROWS; ++i) m->ids[i] = (57 * batch + 17 * step + 29 * i) % VOCAB;
    fattn_tape_reset(t);
    *loss = loss_of(t, m, &in);
    return fattn_tape_status(t);
}

/* The gradients of batches first..first+n-1 in m, added like n ranks: the larger power of two on the left. */
static fattn_status add_tree(fattn_ctx *ctx, model *m, fattn_tape *t, const kind *k, int step, int first, int n) {
    if (n == 1) {
        fattn_var loss;
        TRY(gradients_of(m, t, step, first, &loss));
        return fattn_tape_backward(t, loss);
    }
    int left = 1;
    while (2 * left < n) left *= 2;
    model right = {.list = {0}};
    fattn_status s = model_new(&right, ctx, k);
    if (!s) s = add_tree(ctx, m, t, k, step, first, left);
    if (!s) s = add_tree(ctx, &right, t, k, step, first + left, n - left);
    for (int i = 0; i < PARAMS && !s; ++i)
        if (i != FROZEN && i != EMPTY) s = fattn_tensor_add(ctx, &m->p[i].grad, &right.p[i].grad);
    model_free(&right, ctx);
    return s;
}

typedef struct batches {
    settings o;
    int each;
} batches;

static fattn_status compare_batches(rank_call *c, const batches *o, fattn_tape *t, model *b, fattn_reducer *r) {
    for (int step = 0; step < 2; ++step) {
        fattn_var loss;
        for (int i = 0; i < o->each; ++i) {
            TRY(gradients_of(b, t, step, c->rank * o->each + i, &loss));
            if (i + 1 < o->each) TRY(fattn_tape_backward(t, loss));
            if (i + 1 < o->each) TRY(fattn_reducer_set_aside(r));
        }
        TRY(fattn_reducer_backward(r, t, loss, NULL));
        TRY(fattn_reducer_finish(r));
        model a = {.list = {0}};
        fattn_status s = model_new(&a, c->ctx, &o->o.kind);
        if (!s) s = add_tree(c->ctx, &a, t, &o->o.kind, step, 0, o->each * c->size);
        for (int i = 0; i < PARAMS && !s; ++i) {
            if (!same(&a.p[i].grad, &b->p[i].grad))
                s = fattn_ctx_fail(c->ctx, FATTN_E_MISMATCH, "step %d: the gradient of %s", step, a.p[i].name);
            if (i != EMPTY && !s) s = fattn_tensor_normal(c->ctx, &b->p[i].grad, 0, 0, (fattn_rng){.seed = 0});
        }
        model_free(&a, c->ctx);
        TRY(s);
    }
    return FATTN_OK;
}

static fattn_status aside(rank_call *c) {
    const batches *const o = c->arg;
    const fattn_reducer_options options = {.struct_size = sizeof options, .bucket_bytes = o->o.bucket_bytes};
    model b = {.list = {0}};
    fattn_tape *t = NULL;
    fattn_reducer *r = NULL;
    fattn_status s = model_new(&b, c->ctx, &o->o.kind);
    if (!s) s = fattn_tape_create(c->ctx, &t);
    if (!s) s = fattn_reducer_create(c->ctx, c->comm, &options, b.list, PARAMS, &r);
    if (!s) s = compare_batches(c, o, t, &b, r);
    fattn_reducer_destroy(r);
    fattn_tape_destroy(t);
    model_free(&b, c->ctx);
    return s;
}

/* Eight batches on 1, 2, 4 and 8 ranks; other numbers of them on one rank, and of ranks. */
Test(reducer, batches_are_added_like_ranks) {
    static const int cases[][2] = {{1, 8}, {2, 4}, {4, 2}, {8, 1}, {1, 7}, {1, 3}, {3, 2}};
    for (int k = 0; k < 3; ++k)
        for (size_t i = (size_t)k % THINNED(3); i < sizeof cases / sizeof *cases; i += THINNED(3)) {
            batches o = {{kinds[k], i % 2 ? 90000 : 1}, cases[i][1]};
            expect_ranks(cases[i][0], NULL, aside, &o);
        }
}

static fattn_status narrow_aside(rank_call *c) {
    model m = {.list = {0}};
    fattn_reducer *r = NULL;
    TRY(model_new(&m, c->ctx, &kinds[3]));
    TRY(fattn_reducer_create(c->ctx, c->comm, NULL, m.list, PARAMS, &r));
    CHECK(fattn_reducer_set_aside(NULL) == FATTN_E_ARG);
    CHECK(fattn_reducer_set_aside(r) == FATTN_E_DTYPE && strstr(fattn_ctx_error(c->ctx), "is in bf16"));
    fattn_reducer_destroy(r);
    model_free(&m, c->ctx);
    return FATTN_OK;
}

Test(reducer, gradients_of_16_bits_are_not_set_aside) { expect_ranks(1, NULL, narrow_aside, NULL); }

/* ---- late params ---- */

/* Four square matrices whose gradients lie side by side, of which the first LATE are late. */
enum { MATRICES = 4, LATE = 2, SIDE = 16, MATRIX_BYTES = SIDE * SIDE * (int)sizeof(float) };

/* A transport that hands exchanges to another communicator's and counts those of gradients. */
typedef struct watcher {
    const fattn_comm *below;
    const char *grads;
    int all, of_late, of_both;  /* exchanges so far: with gradients, with those of late params, with others', too */
    int before_late, late_then; /* all and of_late, when backward comes to the late params */
} watcher;

static fattn_status watched_start(void *state, fattn_ctx *ctx, const fattn_message *sends, int n_sends,
                                  const fattn_message *receives, int n_receives, void **request) {
    watcher *const w = state;
    const fattn_transport *const below = &w->below->transport;
    const uintptr_t grads = (uintptr_t)w->grads;
    bool late = false, prompt = false;
    for (int i = 0; i < n_sends; ++i) {
        const uintptr_t at = (uintptr_t)sends[i].data;
        if (at < grads || at >= grads + MATRICES * MATRIX_BYTES) continue;
        late |= at < grads + LATE * MATRIX_BYTES;
        prompt |= at + sends[i].bytes > grads + LATE * MATRIX_BYTES;
    }
    w->all += late || prompt;
    w->of_late += late;
    w->of_both += late && prompt;
    return below->start(below->state, ctx, sends, n_sends, receives, n_receives, request);
}
static fattn_status watched_finish(void *state, fattn_ctx *ctx, void *request) {
    const fattn_transport *const below = &((const watcher *)state)->below->transport;
    return below->finish(below->state, ctx, request);
}
static void watched_abort(void *state, const char *text) {
    const fattn_transport *const below = &((const watcher *)state)->below->transport;
    below->abort(below->state, text);
}
static void watched_close(void *state, fattn_ctx *ctx) { (void)state, (void)ctx; } /* below outlives it */

/* y = x; its backward notes what has been exchanged. */
static fattn_status mark_infer(fattn_op_call *c) {
    c->out[0].ndim = c->in[0].ndim;
    c->out[0].dtype = c->in[0].dtype;
    memcpy(c->out[0].shape, c->in[0].shape, sizeof c->in[0].shape);
    return FATTN_OK;
}
static fattn_status mark_forward(fattn_op_call *c) { return fattn_tensor_copy(c->ctx, &c->out[0], &c->in[0]); }
static fattn_status mark_backward(fattn_op_call *c) {
    watcher *const w = *(watcher *const *)c->attr;
    w->before_late = w->all, w->late_then = w->of_late;
    CHECK(c->d_in_fresh[0]);
    return fattn_tensor_copy(c->ctx, &c->d_in[0], &c->d_out[0]);
}
static const fattn_op_def mark_def = {.struct_size = sizeof mark_def,
                                      .attr_size = sizeof(watcher *),
                                      .n_out = 1,
                                      .name = "mark",
                                      .infer = mark_infer,
                                      .forward = mark_forward,
                                      .backward = mark_backward};

typedef struct late_case {
    int64_t bucket_bytes;
    int late;
    int before_late, all; /* exchanges: before backward comes to the first LATE params, of a pass */
    uint32_t hold;
} late_case;

static fattn_status watched_pass(rank_call *c, const late_case *o, watcher *w, fattn_param *const *params,
                                 fattn_tape *t, fattn_reducer *r) {
    float x[ROWS * SIDE];
    const fattn_var none = {0};
    for (int i = 0; i < ROWS * SIDE; ++i) x[i] = (float)(c->rank + i % 7);
    const fattn_tensor in = fattn_tensor_view(x, FATTN_F32, FATTN_CPU, 0, 2, (int64_t[]){ROWS, SIDE});
    fattn_var h = fattn_input(t, &in);
    for (int i = 0; i < MATRICES; ++i) {
        if (i == LATE) h = fattn_op_custom(t, &mark_def, &h, 1, &w);
        h = fattn_op_linear(t, h, fattn_use(t, params[i]), none);
    }
    TRY(fattn_reducer_backward(r, t, fattn_op_mean(t, h, NULL, 0, 0), NULL));
    const int late_in_backward = w->of_late;
    TRY(fattn_reducer_finish(r)); /* before checks, which else leave exchanges open */
    CHECK(w->before_late == o->before_late && w->all == o->all);
    if (!o->late) return FATTN_OK;
    CHECK(w->late_then == 0 && late_in_backward == 1);
    CHECK(w->of_late == 2 && w->of_both == 0); /* their parts and their sums, as of one bucket */
    return FATTN_OK;
}

static fattn_status watched(rank_call *c) {
    const late_case *const o = c->arg;
    const fattn_reducer_options options = {.struct_size = sizeof options,
                                           .bucket_bytes = o->bucket_bytes,
                                           .late = o->late,
                                           .hold = c->rank ? 100 : o->hold};
    const int64_t shape[2] = {SIDE, SIDE}, n = MATRICES * SIDE * SIDE;
    fattn_tensor *const values = &c->tensors[c->n_tensors++], *const grads = &c->tensors[c->n_tensors++];
    TRY(fattn_tensor_alloc(c->ctx, FATTN_F32, 1, &n, values));
    TRY(fattn_tensor_alloc(c->ctx, FATTN_F32, 1, &n, grads));
    TRY(fattn_tensor_normal(c->ctx, values, 0, 0.3, (fattn_rng){.seed = 5}));
    TRY(fattn_tensor_normal(c->ctx, grads, 0, 0, (fattn_rng){.seed = 0}));
    fattn_param p[MATRICES], *list[MATRICES];
    for (int i = 0; i < MATRICES; ++i) {
        void *const value = (char *)values->data + i * MATRIX_BYTES, *const grad =
                                                                         (char *)grads->data + i * MATRIX_BYTES;
        p[i] = (fattn_param){.value = fattn_tensor_view(value, FATTN_F32, FATTN_CPU, 0, 2, shape),
                             .grad = fattn_tensor_view(grad, FATTN_F32, FATTN_CPU, 0, 2, shape),
                             .name = "matrix"};
        list[i] = &p[i];
    }
    watcher w = {.below = c->comm, .grads = grads->data};
    const fattn_transport transport = {.struct_size = sizeof transport,
                                       .rank = c->rank,
                                       .size = c->size,
                                       .devices = 1u << FATTN_CPU,
                                       .name = "watcher",
                                       .state = &w,
                                       .start = watched_start,
                                       .finish = watched_finish,
                                       .abort = watched_abort,
                                       .close = watched_close};
    fattn_comm *comm = NULL;
    fattn_tape *t = NULL;
    fattn_reducer *r = NULL;
    fattn_status s = fattn_comm_create(c->ctx, &transport, &comm);
    if (!s) s = fattn_tape_create(c->ctx, &t);
    if (!s) s = fattn_reducer_create(c->ctx, comm, &options, list, MATRICES, &r);
    if (!s) s = watched_pass(c, o, &w, list, t, r);
    fattn_reducer_destroy(r);
    fattn_tape_destroy(t);
    fattn_comm_destroy(comm);
    return s;
}

static void expect_watched(const late_case *given) {
    for (int size = 2; size <= 3; ++size) {
        late_case o = *given;
        expect_ranks(size, NULL, watched, &o);
    }
}

/* Late params share one bucket, whatever its size, and no other param's sum waits for them: a bucket's parts are
   exchanged before backward comes to them, and of the bucket before, if there is one, the sums, too. */
Test(reducer, sums_do_not_wait_for_late_params) {
    static const late_case cases[] = {{0, 0, 0, 2}, {1, 0, 2, 8}, {0, LATE, 1, 4}, {1, LATE, 3, 6}};
    for (size_t n = 0; n < sizeof cases / sizeof *cases; ++n) expect_watched(&cases[n]);
}

/* Buckets of one matrix each, of which two are complete at the mark. The other ranks ask for 100: the least counts. */
Test(reducer, held_buckets_start_bit_by_bit) {
    static const late_case cases[] = {{1, 0, 2, 8, 25},  {1, 0, 1, 8, 50},    {1, 0, 0, 8, 75},
                                      {1, 0, 0, 8, 100}, {1, LATE, 3, 6, 50}, {1, LATE, 1, 6, 100}};
    for (size_t n = 0; n < sizeof cases / sizeof *cases; ++n) expect_watched(&cases[n]);
}

/* ---- AdamW with owners ---- */

static fattn_adamw_options adamw_options(const kind *k, const fattn_loss_scale_options *scale) {
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    o.weight_decay = 0.1f;
    o.max_grad_norm = 2;
    if (k->value == FATTN_F16) o.loss_scale = scale;
    o.flags = k->flags;
    o.seed = k->flags ? 99 : 0;
    return o;
}

static fattn_status set_gradients(rank_call *c, model *m, int step) {
    for (int g = 0; g < GROUPS; ++g) {
        const fattn_rng rng = {.seed = (uint64_t)(10 * step + c->rank), .stream = (uint32_t)g};
        TRY(fattn_tensor_normal(c->ctx, &m->grads[g], 0, 0.1 * (g + 1), rng));
    }
    if (step == 2 && c->rank == c->size - 1) { /* a step that all ranks skip */
        const double infinity = INFINITY;
        const fattn_tensor one = fattn_tensor_view((void *)(uintptr_t)&infinity, FATTN_F64, FATTN_CPU, 0, 0, NULL);
        const fattn_tensor first = fattn_tensor_slice(&m->grads[1], 0, 3, 4);
        const fattn_tensor to = fattn_tensor_view(first.data, (fattn_dtype)first.dtype, FATTN_CPU, 0, 0, NULL);
        TRY(fattn_tensor_copy(c->ctx, &to, &one));
    }
    return FATTN_OK;
}

/* States of b, divided, are those of a; and those that are set are those that one gets. */
static fattn_status compare_states(rank_call *c, const kind *k, model *m, fattn_adamw *a, fattn_adamw *b) {
    for (int i = 0; i < PARAMS; ++i)
        for (int which = FATTN_ADAM_M; which <= (int)FATTN_ADAM_MASTER; ++which) {
            const bool masters = fattn_dtype_size(k->value) == 2 && !k->flags;
            const bool has = i != FROZEN && (which != (int)FATTN_ADAM_MASTER || masters);
            fattn_tensor view, whole;
            if (!has) continue;
            TRY(fattn_adamw_state(a, i, (fattn_adam_state)which, &view));
            TRY(fattn_tensor_alloc(c->ctx, (fattn_dtype)view.dtype, view.ndim, view.shape, &whole));
            fattn_status s = fattn_adamw_get_state(b, i, (fattn_adam_state)which, c->rank == 0 ? &whole : NULL);
            if (!s && c->rank == 0 && !same(&whole, &view))
                s = fattn_ctx_fail(c->ctx, FATTN_E_MISMATCH, "state %d of %s", which, m->p[i].name);
            if (!s) s = fattn_tensor_normal(c->ctx, &view, 0, 1e-3, (fattn_rng){.seed = (uint64_t)which});
            if (!s && which == (int)FATTN_ADAM_V) s = fattn_tensor_normal(c->ctx, &view, 1e-4, 0, (fattn_rng){0});
            if (!s) s = fattn_adamw_set_state(b, i, (fattn_adam_state)which, &view);
            fattn_tensor_free(c->ctx, &whole);
            TRY(s);
        }
    return FATTN_OK;
}

static fattn_status train(rank_call *c, const kind *k, model *one, model *two, fattn_adamw *a, fattn_adamw *b,
                          fattn_reducer *r) {
    fattn_tensor scale;
    TRY(fattn_adamw_loss_scale(a, &scale));
    TRY(fattn_adamw_loss_scale(b, &scale));
    for (int step = 0; step < 5; ++step) {
        double norms[2];
        fattn_loss_scale_state scales[2] = {{.struct_size = sizeof *scales}, {.struct_size = sizeof *scales}};
        TRY(set_gradients(c, one, step));
        TRY(set_gradients(c, two, step));
        for (int i = 0; i < PARAMS; ++i)
            if (i != FROZEN) TRY(fattn_comm_all_reduce(c->comm, &one->p[i].grad));
        TRY(fattn_reducer_finish(r));
        TRY(fattn_adamw_step(a));
        TRY(fattn_adamw_step(b));
        TRY(fattn_adamw_grad_norm(a, &norms[0]));
        TRY(fattn_adamw_grad_norm(b, &norms[1]));
        CHECK(step == 2 ? !isfinite(norms[0]) && !isfinite(norms[1]) : norms[0] == norms[1]);
        TRY(fattn_adamw_get_loss_scale(a, &scales[0]));
        TRY(fattn_adamw_get_loss_scale(b, &scales[1]));
        CHECK(memcmp(&scales[0], &scales[1], sizeof *scales) == 0);
        for (int i = 0; i < PARAMS; ++i) {
            CHECK(same(&one->p[i].value, &two->p[i].value));
            if (two->p[i].flags & FATTN_PARAM_ONE_PASS) continue;
            CHECK(i == FROZEN || same(&one->p[i].grad, &two->p[i].grad)); /* both are zeroed */
        }
        if (step == 3) TRY(compare_states(c, k, one, a, b));
    }
    fattn_tensor view;
    CHECK(fattn_adamw_state(b, UP, FATTN_ADAM_M, &view) == FATTN_E_STATE);
    return FATTN_OK;
}

static fattn_status divided(rank_call *c) {
    const settings *const o = c->arg;
    fattn_loss_scale_options scale = {.struct_size = sizeof scale};
    fattn_loss_scale_defaults(&scale);
    const fattn_reducer_options options = {.struct_size = sizeof options,
                                           .flags = FATTN_REDUCE_TO_OWNERS,
                                           .bucket_bytes = o->bucket_bytes,
                                           .late = o->late};
    fattn_adamw_options adamw = adamw_options(&o->kind, &scale);
    model one = {.list = {0}}, two = {.list = {0}};
    fattn_reducer *r = NULL;
    fattn_adamw *a = NULL, *b = NULL;
    int64_t owned = 0, all = 0, begin, end;
    fattn_status s = model_new(&one, c->ctx, &o->kind);
    if (!s) s = model_new(&two, c->ctx, &o->kind);
    for (int i = 0; i < PARAMS && o->one_pass; ++i) two.p[i].flags |= FATTN_PARAM_ONE_PASS;
    if (!s) s = fattn_reducer_create(c->ctx, c->comm, &options, two.list, PARAMS, &r);
    if (!s) s = fattn_adamw_create(c->ctx, &adamw, one.list, PARAMS, &a);
    adamw.owners = r;
    if (!s) s = fattn_adamw_create(c->ctx, &adamw, two.list, PARAMS, &b);
    if (!s) s = train(c, &o->kind, &one, &two, a, b, r);
    for (int i = 0; i < PARAMS && !s; ++i) {
        if (i == FROZEN) continue;
        s = fattn_reducer_share(r, i, &begin, &end);
        owned += end - begin, all += numel(i);
    }
    double sum = (double)owned;
    const fattn_tensor total = fattn_tensor_view(&sum, FATTN_F64, FATTN_CPU, 0, 0, NULL);
    if (!s) s = fattn_comm_all_reduce(c->comm, &total);
    if (!s && sum != (double)all) s = fattn_ctx_fail(c->ctx, FATTN_E_MISMATCH, "%g of %lld", sum, (long long)all);
    fattn_adamw_destroy(a);
    fattn_adamw_destroy(b);
    fattn_reducer_destroy(r);
    model_free(&one, c->ctx);
    model_free(&two, c->ctx);
    return s;
}

Test(reducer, divided_adamw_has_the_same_bits) {
    static const int64_t buckets[] = {1, 90000, 0};
    for (int k = 0; k < KINDS; ++k)
        for (size_t n = 0; n < sizeof buckets / sizeof *buckets; ++n)
            for
                EACH_SIZE(i) {
                    settings o = {kinds[k], buckets[n], (int)((i + n) % 3 * 3), (uint32_t)((i + 2 * n) % 3 * 50)};
                    o.one_pass = ((size_t)k + n + i) % 2;
                    expect_ranks(sizes[i], NULL, divided, &o);
                }
}

/* ---- errors ---- */

static void expect_failures(int size, fattn_status (*function)(rank_call *), fattn_status own, const char *text) {
    rank_call calls[4];
    run_ranks(size, NULL, function, NULL, calls);
    for (int r = 0; r < size; ++r) {
        cr_assert_eq(calls[r].status, r == 1 ? own : FATTN_E_COMM, "rank %d: %s: %s", r,
                     fattn_status_name(calls[r].status), calls[r].error);
        cr_assert_not_null(strstr(calls[r].error, text), "rank %d: %s", r, calls[r].error);
    }
}

typedef fattn_status use_fn(rank_call *c, model *m, fattn_tape *t, fattn_reducer *r);

static fattn_status with_reducer(rank_call *c, int n, int64_t bytes, use_fn *use) {
    const fattn_reducer_options options = {.struct_size = sizeof options, .bucket_bytes = bytes};
    model m = {.list = {0}};
    fattn_tape *t = NULL;
    fattn_reducer *r = NULL;
    fattn_status s = model_new(&m, c->ctx, &kinds[0]);
    if (!s) s = fattn_tape_create(c->ctx, &t);
    if (!s) s = fattn_reducer_create(c->ctx, c->comm, &options, m.list, n, &r);
    if (!s) s = use(c, &m, t, r);
    fattn_reducer_destroy(r);
    fattn_tape_destroy(t);
    model_free(&m, c->ctx);
    return s;
}

static fattn_status nothing(rank_call *c, model *m, fattn_tape *t, fattn_reducer *r) {
    (void)c, (void)m, (void)t, (void)r;
    return FATTN_OK;
}
static fattn_status fewer_params(rank_call *c) { return with_reducer(c, c->rank == 1 ? 3 : PARAMS, 0, nothing); }
static fattn_status other_buckets(rank_call *c) { return with_reducer(c, PARAMS, c->rank == 1 ? 7 : 0, nothing); }

static fattn_status other_param(rank_call *c, int64_t n, uint32_t flags) {
    float values[9] = {0}, grads[9] = {0};
    fattn_param p = {.value = fattn_tensor_view(values, FATTN_F32, FATTN_CPU, 0, 1, &n),
                     .grad = fattn_tensor_view(grads, FATTN_F32, FATTN_CPU, 0, 1, &n),
                     .flags = flags};
    fattn_param *const list = &p;
    fattn_reducer *r = NULL;
    const fattn_status s = fattn_reducer_create(c->ctx, c->comm, NULL, &list, 1, &r);
    fattn_reducer_destroy(r);
    return s;
}
static fattn_status other_size(rank_call *c) { return other_param(c, c->rank == 1 ? 9 : 8, 0); }
static fattn_status other_flags(rank_call *c) { return other_param(c, 8, c->rank == 1 ? FATTN_PARAM_FROZEN : 0u); }
Test(reducer, ranks_that_differ) {
    expect_failures(3, fewer_params, FATTN_E_COMM, "number of params is 3 on rank 1, 8 on rank 0");
    expect_failures(3, other_size, FATTN_E_COMM, "number of elements is 9 on rank 1, 8 on rank 0");
    expect_failures(3, other_flags, FATTN_E_COMM, "digest of sizes, dtypes and flags of the reducer's params is ");
    expect_failures(3, other_buckets, FATTN_E_COMM, "bucket_bytes is 7 on rank 1, 64000000 on rank 0");
}

static fattn_status passes(rank_call *c, model *m, fattn_tape *t, fattn_reducer *r) {
    int32_t ids[ROWS] = {0};
    const int64_t rows = ROWS;
    const fattn_tensor in = fattn_tensor_view(ids, FATTN_I32, FATTN_CPU, 0, 1, &rows);
    const int n = c->arg ? *(const int *)c->arg : 2;
    for (int i = 0; i < n; ++i) {
        fattn_tape_reset(t);
        const fattn_var loss = loss_of(t, m, &in);
        TRY(fattn_reducer_backward(r, t, c->rank == 1 && i == 1 ? (fattn_var){9999} : loss, NULL));
        TRY(fattn_reducer_finish(r));
    }
    return FATTN_OK;
}
static fattn_status bad_pass(rank_call *c) { return with_reducer(c, PARAMS, 1, passes); }

static fattn_status twice(rank_call *c, model *m, fattn_tape *t, fattn_reducer *r) {
    int32_t ids[ROWS] = {0};
    const int64_t rows = ROWS;
    const fattn_tensor in = fattn_tensor_view(ids, FATTN_I32, FATTN_CPU, 0, 1, &rows);
    for (int i = 0; i < 2; ++i) {
        fattn_tape_reset(t);
        TRY(fattn_reducer_backward(r, t, loss_of(t, m, &in), NULL));
        if (c->rank != 1) TRY(fattn_reducer_finish(r));
    }
    return FATTN_OK;
}
static fattn_status unfinished(rank_call *c) { return with_reducer(c, PARAMS, 1, twice); }

/* The same on one rank, where nothing is exchanged. */
static fattn_status twice_alone(rank_call *c, model *m, fattn_tape *t, fattn_reducer *r) {
    int32_t ids[ROWS] = {0};
    const int64_t rows = ROWS;
    const fattn_tensor in = fattn_tensor_view(ids, FATTN_I32, FATTN_CPU, 0, 1, &rows);
    for (int i = 0; i < 2; ++i) {
        TRY(fattn_reducer_backward(r, t, loss_of(t, m, &in), NULL));
        fattn_tape_reset(t);
        if (i == 0) TRY(fattn_reducer_finish(r));
    }
    CHECK(fattn_reducer_backward(r, t, loss_of(t, m, &in), NULL) == FATTN_E_STATE);
    CHECK(strstr(fattn_ctx_error(c->ctx), "has no fattn_reducer_finish"));
    return FATTN_OK;
}
static fattn_status unfinished_alone(rank_call *c) { return with_reducer(c, PARAMS, 1, twice_alone); }

Test(reducer, one_rank_finishes_passes_too) { expect_ranks(1, NULL, unfinished_alone, NULL); }

static fattn_status moves(rank_call *c, model *m, fattn_tape *t, fattn_reducer *r) {
    (void)t;
    if (c->rank == 1) m->p[UP].grad.data = (char *)m->p[UP].grad.data + sizeof(float);
    return fattn_reducer_finish(r);
}
static fattn_status moved(rank_call *c) { return with_reducer(c, PARAMS, 0, moves); }

Test(reducer, a_rank_fails) {
    expect_failures(4, bad_pass, FATTN_E_ARG, "variable 9999");
    expect_failures(4, unfinished, FATTN_E_STATE, "has no fattn_reducer_finish");
    expect_failures(4, moved, FATTN_E_STATE, "params[1] has been frozen or thawed");
}

static fattn_status arguments(rank_call *c) {
    fattn_reducer *r = NULL;
    fattn_reducer_options o = {.struct_size = sizeof o, .flags = 2};
    fattn_adamw_options adamw = {.struct_size = sizeof adamw};
    fattn_adamw *a;
    int64_t begin, end;
    model m = {.list = {0}};
    fattn_adamw_defaults(&adamw);
    TRY(model_new(&m, c->ctx, &kinds[0]));
    CHECK(fattn_reducer_create(NULL, c->comm, NULL, m.list, PARAMS, &r) == FATTN_E_ARG);
    CHECK(fattn_reducer_create(c->ctx, NULL, NULL, m.list, PARAMS, &r) == FATTN_E_ARG);
    CHECK(fattn_reducer_create(c->ctx, c->comm, NULL, NULL, 1, &r) == FATTN_E_ARG);
    CHECK(fattn_reducer_create(c->ctx, c->comm, NULL, m.list, 1, NULL) == FATTN_E_ARG);
    CHECK(fattn_reducer_create(c->ctx, c->comm, &o, m.list, PARAMS, &r) == FATTN_E_ARG);
    o.flags = 0, o.bucket_bytes = -1;
    CHECK(fattn_reducer_create(c->ctx, c->comm, &o, m.list, PARAMS, &r) == FATTN_E_ARG);
    o.bucket_bytes = 0, o.late = -1;
    CHECK(fattn_reducer_create(c->ctx, c->comm, &o, m.list, PARAMS, &r) == FATTN_E_ARG);
    o.late = PARAMS + 1;
    CHECK(fattn_reducer_create(c->ctx, c->comm, &o, m.list, PARAMS, &r) == FATTN_E_ARG);
    o.late = 0, o.hold = 101;
    CHECK(fattn_reducer_create(c->ctx, c->comm, &o, m.list, PARAMS, &r) == FATTN_E_ARG);
    o.struct_size = 0;
    CHECK(fattn_reducer_create(c->ctx, c->comm, &o, m.list, PARAMS, &r) == FATTN_E_ABI && !r);
    TRY(fattn_reducer_create(c->ctx, c->comm, NULL, m.list, PARAMS, &r));
    CHECK(fattn_reducer_comm(r) == c->comm && !fattn_reducer_comm(NULL));
    CHECK(fattn_reducer_share(r, PARAMS, &begin, &end) == FATTN_E_ARG);
    CHECK(fattn_reducer_share(r, 0, NULL, &end) == FATTN_E_ARG);
    CHECK(fattn_reducer_share(NULL, 0, &begin, &end) == FATTN_E_ARG);
    TRY(fattn_reducer_share(r, UP, &begin, &end));
    CHECK(begin == 0 && end == numel(UP)); /* not to owners */
    adamw.owners = r;
    CHECK(fattn_adamw_create(c->ctx, &adamw, m.list, PARAMS, &a) == FATTN_E_ARG);
    CHECK(fattn_reducer_finish(NULL) == FATTN_E_ARG && fattn_reducer_backward(NULL, NULL, (fattn_var){1}, NULL));
    CHECK(!fattn_adamw_owners(NULL));
    fattn_reducer_destroy(r);
    fattn_reducer_destroy(NULL);
    model_free(&m, c->ctx);
    return FATTN_OK;
}
Test(reducer, arguments) { expect_ranks(1, NULL, arguments, NULL); }

/* Two params with one gradient, or one param twice: the sums would be made twice. */
static fattn_status same_gradient(rank_call *c) {
    fattn_reducer *r;
    model m = {.list = {0}};
    TRY(model_new(&m, c->ctx, &kinds[0]));
    m.p[SHIFT].grad.data = m.p[GAIN].grad.data;
    const fattn_status s = fattn_reducer_create(c->ctx, c->comm, NULL, m.list, PARAMS, &r);
    model_free(&m, c->ctx);
    CHECK(s == FATTN_E_ARG);
    return FATTN_OK;
}
Test(reducer, one_gradient_of_two_params) { expect_ranks(1, NULL, same_gradient, NULL); }
