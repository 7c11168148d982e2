/* The trainer's steps as graphs, without a GPU: a context of the CPU gets functions that record and launch, and copies
   of page-locked memory that arrive late. Bitwise the steps of a trainer that enqueues each op; evaluations between;
   failures; nothing is read before it has arrived, nor overwritten before it has been copied.

   Recording runs the ops, and then puts all memory back as it was. A launch runs them anew on a tape of its own. */
#include <criterion/criterion.h>

#include "autograd_c/tape/tape_nodes.h"
#include "cli/train/trainer_parts.h"
#include "core/base/device.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 17, CONTEXT = 16, BATCH = 3, HELD_OUT = 5, STEPS = 12 };

/* ---- a device that records ---- */

enum { MOST_BLOCKS = 4096, MOST_TRANSFERS = 64, MOST_PINNED = 16 };

typedef struct block {
    char *p, *before; /* before: its contents when the recording began */
    size_t bytes;
} block;

/* A copy of page-locked memory that is under way. One that arrives there does so, and one from there must still find
   its contents, when a mark behind it is waited for. */
typedef struct transfer {
    char *at, *contents;
    size_t bytes;
    bool arrives;
} transfer;

static struct {
    block blocks[MOST_BLOCKS], pinned[MOST_PINNED];
    int n, n_pinned;
    transfer on_the_way[MOST_TRANSFERS]; /* [from, to) are, modulo their number */
    int64_t from, to;
    int records, launches, destroyed;
    bool fails; /* the next recordings do */
    trainer *trainer;
    fattn_tape *tape; /* of launches */
    fattni_device_ops ops;
    fattn_status (*copy)(fattn_ctx *ctx, const fattn_tensor *dst, const fattn_tensor *src);
} device;

static fattn_ctx *ctx;

static void must(fattn_status s) { cr_assert_eq(s, FATTN_OK, "%s", fattn_ctx_error(ctx)); }

static void *take(void *user, size_t bytes, size_t align, fattn_stream s) {
    (void)user, (void)s;
    char *const p = aligned_alloc(align, (bytes + align - 1) / align * align);
    cr_assert(p && device.n < MOST_BLOCKS);
    device.blocks[device.n++] = (block){.p = p, .bytes = bytes};
    return p;
}

static void give(void *user, void *p, size_t bytes, fattn_stream s) {
    (void)user, (void)s;
    int i = 0;
    while (i < device.n && device.blocks[i].p != p) ++i;
    cr_assert(i < device.n && device.blocks[i].bytes == bytes);
    device.blocks[i] = device.blocks[--device.n];
    free(p);
}

static char *copy_of(const void *p, size_t bytes) {
    char *const copy = malloc(bytes);
    memcpy(copy, p, bytes);
    return copy;
}

static fattn_status graph_begin(fattn_ctx *c) {
    (void)c;
    for (int i = 0; i < device.n; ++i) device.blocks[i].before = copy_of(device.blocks[i].p, device.blocks[i].bytes);
    return FATTN_OK;
}

/* What a launch does to the memory: the pass, on tape t, and the update if it is in the graph. */
static void run_recorded(trainer *r, fattn_tape *t) {
    fattn_tape *const own = r->tape;
    const int64_t step = r->step;
    fattn_tensor loss;
    r->tape = t, r->step = -1; /* a graph knows only what is in the device's memory */
    fattn_tape_reset(t);
    const fattn_var l = trainer_pass_loss(r);
    must(fattn_tape_backward_from(t, l, &r->scale));
    must(fattn_tape_value(t, l, &loss));
    memcpy(r->graph.loss.data, loss.data, sizeof(float));
    if (r->config.passes == 1) must(fattn_adamw_step(r->adamw));
    r->tape = own, r->step = step;
}

/* A hash (FNV-1a) of what a pass leaves. */
static uint64_t outcome(const trainer *r) {
    uint64_t hash = 0xcbf29ce484222325ull;
    int n;
    fattn_param *const *const p = model_params(r->model, &n);
    for (int i = 0; i <= 2 * n; ++i) {
        const fattn_tensor *const t = i == 2 * n ? &r->graph.loss : i < n ? &p[i]->value : &p[i - n]->grad;
        const size_t bytes = (size_t)fattn_tensor_numel(t) * fattn_dtype_size((fattn_dtype)t->dtype);
        for (size_t k = 0; k < bytes; ++k) hash = (hash ^ ((const unsigned char *)t->data)[k]) * 0x100000001b3ull;
    }
    return hash;
}

/* The context lies in a block, too: of its own fields none differs but the error message. */
static void put_back(void) {
    for (int i = 0; i < device.n; ++i) memcpy(device.blocks[i].p, device.blocks[i].before, device.blocks[i].bytes);
}

/* What has been recorded is what launches run here. */
static void check_recorded(fattn_ctx *c) {
    fattn_tape *t;
    const uint64_t recorded = outcome(device.trainer);
    put_back();
    must(fattn_tape_create(c, &t));
    run_recorded(device.trainer, t);
    cr_assert_eq(outcome(device.trainer), recorded, "a launch differs from the recorded step");
    fattn_tape_destroy(t);
}

static fattn_status graph_end(fattn_ctx *c, fattn_graph **out) {
    if (!device.fails) check_recorded(c);
    put_back();
    for (int i = 0; i < device.n; ++i) free(device.blocks[i].before);
    if (device.fails) return fattn_ctx_fail(c, FATTN_E_CUDA, "this device does not record today");
    device.records += 1;
    *out = (fattn_graph *)&device;
    return FATTN_OK;
}

static fattn_status graph_launch(fattn_ctx *c, const fattn_graph *g) {
    const trainer *const r = device.trainer;
    cr_assert(g == (const fattn_graph *)&device && g == r->graph.graph);
    cr_assert_eq(r->tape->count, 0, "the graph's tape has been used for something else");
    if (!device.tape) must(fattn_tape_create(c, &device.tape));
    run_recorded(device.trainer, device.tape);
    device.launches += 1;
    return FATTN_OK;
}

static void graph_destroy(fattn_ctx *c, fattn_graph *g) {
    (void)c;
    cr_assert_eq((void *)g, &device);
    device.destroyed += 1;
}

static fattn_status pinned_alloc(fattn_ctx *c, size_t bytes, void **out) {
    (void)c;
    cr_assert_lt(device.n_pinned, MOST_PINNED);
    *out = memset(malloc(bytes), 0xff, bytes); /* NaN */
    device.pinned[device.n_pinned++] = (block){.p = *out, .bytes = bytes};
    return FATTN_OK;
}

static void pinned_free(fattn_ctx *c, void *p) {
    (void)c;
    int i = 0;
    while (i < device.n_pinned && device.pinned[i].p != p) ++i;
    cr_assert_lt(i, device.n_pinned);
    device.pinned[i] = device.pinned[--device.n_pinned];
    for (int64_t t = device.from; t < device.to; ++t) {
        const char *const at = device.on_the_way[t % MOST_TRANSFERS].at;
        cr_assert(at < (char *)p || at >= (char *)p + device.pinned[i].bytes, "freed under a copy");
    }
    free(p);
}

static bool is_pinned(const fattn_tensor *t) {
    for (int i = 0; i < device.n_pinned; ++i) {
        const char *const at = t->data, *const p = device.pinned[i].p;
        if (at >= p && at < p + device.pinned[i].bytes) return true;
    }
    return false;
}

static fattn_status copy(fattn_ctx *c, const fattn_tensor *dst, const fattn_tensor *src) {
    const bool arrives = is_pinned(dst);
    if (!arrives && !is_pinned(src)) return device.copy(c, dst, src);
    const size_t bytes = (size_t)fattn_tensor_numel(src) * fattn_dtype_size((fattn_dtype)src->dtype);
    cr_assert(device.to - device.from < MOST_TRANSFERS && dst->dtype == src->dtype);
    device.on_the_way[device.to++ % MOST_TRANSFERS] =
        (transfer){.at = arrives ? dst->data : src->data, .contents = copy_of(src->data, bytes), bytes, arrives};
    if (!arrives) return device.copy(c, dst, src);
    memset(dst->data, 0xff, bytes);
    return FATTN_OK;
}

static fattn_status mark_create(fattn_ctx *c, void **event) {
    (void)c;
    *event = calloc(1, sizeof(int64_t));
    return FATTN_OK;
}
static fattn_status mark_set(fattn_ctx *c, void *event) {
    (void)c;
    *(int64_t *)event = device.to;
    return FATTN_OK;
}
static fattn_status mark_wait(fattn_ctx *c, void *event) {
    (void)c;
    for (; device.from < *(const int64_t *)event; ++device.from) {
        const transfer *const t = &device.on_the_way[device.from % MOST_TRANSFERS];
        if (t->arrives)
            memcpy(t->at, t->contents, t->bytes);
        else
            cr_assert_eq(memcmp(t->at, t->contents, t->bytes), 0, "overwritten before it was copied");
        free(t->contents);
    }
    return FATTN_OK;
}
static void mark_destroy(fattn_ctx *c, void *event) {
    (void)c;
    free(event);
}

static void open_device(void) {
    const fattn_ctx_options o = {.struct_size = sizeof o, .cpu_threads = 1, .allocator = {take, give, NULL}};
    cr_assert_eq(fattn_ctx_create(&o, &ctx), FATTN_OK);
    device.ops = *ctx->ops;
    device.copy = ctx->ops->copy;
    device.ops.copy = copy;
    device.ops.graph_begin = graph_begin, device.ops.graph_end = graph_end;
    device.ops.graph_launch = graph_launch, device.ops.graph_destroy = graph_destroy;
    device.ops.pinned_alloc = pinned_alloc, device.ops.pinned_free = pinned_free;
    device.ops.mark_create = mark_create, device.ops.mark_set = mark_set;
    device.ops.mark_wait = mark_wait, device.ops.mark_destroy = mark_destroy;
    ctx->ops = &device.ops;
}

static void close_device(void) {
    fattn_tape_destroy(device.tape);
    cr_assert(fattn_ctx_mem(ctx).live == 0 && device.n_pinned == 0 && device.from == device.to);
    cr_assert_eq(device.records, device.destroyed);
    fattn_ctx_destroy(ctx);
    cr_assert_eq(device.n, 0);
}

TestSuite(step_graph, .init = open_device, .fini = close_device);

/* ---- trainings ---- */

static void sequence(task *t, int64_t index, int32_t *ids, int32_t *targets) {
    uint32_t state = (uint32_t)(index + 1) * 2654435769u;
    for (int64_t i = 0; i < t->context; ++i) {
        ids[i] = (int32_t)((state >> 16) % VOCAB);
        state = state * 1664525u + 1013904223u;
        targets[i] = i % 5 == 4 ? TASK_IGNORE : (int32_t)((state >> 16) % VOCAB);
    }
}

static task data = {.vocab = VOCAB, .context = CONTEXT, .held_out = HELD_OUT, .train = sequence, .test = sequence};
static const model_config small = {.vocab = VOCAB,
                                   .context = CONTEXT,
                                   .channels = 16,
                                   .layers = 2,
                                   .heads = 2,
                                   .kv_heads = 1,
                                   .mlp_ratio = 2,
                                   .dropout = 0.2f,
                                   .seed = 3};

static trainer_config config_of(int64_t passes, bool graph) {
    return (trainer_config){.batch = BATCH,
                            .passes = passes,
                            .steps = STEPS,
                            .warmup = 3,
                            .lr = 1e-2,
                            .weight_decay = 0.1,
                            .clip = 0.5,
                            .graph = graph};
}

static void start(trainer *r, const model_config *shape, const trainer_config *config) {
    must(trainer_create(r, ctx, &data, shape, config));
    if (config->graph) device.trainer = r;
}

/* Of the last step of a history that is complete. */
static void expect_same_results(const trainer *a, const trainer *b) {
    const int64_t n = a->history.steps;
    cr_assert_eq(n, b->history.steps);
    for (int64_t i = 0; i < n; ++i)
        cr_assert_eq(a->history.loss[i], b->history.loss[i], "step %lld: %.9g, %.9g", (long long)i, a->history.loss[i],
                     b->history.loss[i]);
    const bool both_overflow = isnan(a->grad_norm) && isnan(b->grad_norm);
    cr_assert(a->lr == b->lr && (both_overflow || a->grad_norm == b->grad_norm), "step %lld", (long long)n);
    cr_assert_eq(a->scaling.scale, b->scaling.scale, "step %lld", (long long)n);
    cr_assert_eq(a->scaling.skipped_steps, b->scaling.skipped_steps, "step %lld", (long long)n);
}

static void expect_same_state(const trainer *a, const trainer *b) {
    int n;
    fattn_param *const *const p = model_params(a->model, &n), *const *const q = model_params(b->model, &n);
    for (int i = 0; i < n; ++i) {
        fattn_tensor x[2][3] = {{p[i]->value}, {q[i]->value}};
        for (int k = 0; k < 2; ++k) {
            fattn_adamw *const w = k ? b->adamw : a->adamw;
            must(fattn_adamw_state(w, i, FATTN_ADAM_M, &x[k][1]));
            must(fattn_adamw_state(w, i, FATTN_ADAM_V, &x[k][2]));
        }
        for (int k = 0; k < 3; ++k) {
            const size_t size = fattn_dtype_size((fattn_dtype)x[0][k].dtype);
            cr_assert_eq(memcmp(x[0][k].data, x[1][k].data, size * (size_t)fattn_tensor_numel(&x[0][k])), 0, "%s, %d",
                         p[i]->name, k);
        }
    }
    cr_assert(a->step == b->step && a->cursor == b->cursor);
}

/* The graph's results lag by one step: after step n + 1 those of step n are there. */
static void follow(const model_config *shape, int64_t passes, int evaluate_every) {
    const trainer_config one = config_of(passes, false), other = config_of(passes, true);
    trainer ops, graph;
    start(&ops, shape, &one);
    start(&graph, shape, &other);
    if (shape->dtype == FATTN_F16) { /* too large: the first steps are skipped */
        const fattn_loss_scale_state most = {.struct_size = sizeof most, .scale = 0x1p24f};
        must(fattn_adamw_set_loss_scale(ops.adamw, &most));
        must(fattn_adamw_set_loss_scale(graph.adamw, &most));
    }
    cr_assert(*trainer_why_no_graph(&ops) && !*trainer_why_no_graph(&graph));
    for (int step = 1; step <= STEPS; ++step) {
        must(trainer_step(&graph));
        if (step == 1) must(trainer_step(&ops)); /* op by op, too */
        const bool lags = graph.graph.pending;
        cr_assert_eq(lags, step > 1);
        cr_assert_eq(graph.history.steps, lags ? step - 1 : step);
        expect_same_results(&graph, &ops);
        if (step > 1) must(trainer_step(&ops));
        if (step % evaluate_every) continue;
        evaluation a, b;
        must(trainer_evaluate(&graph, HELD_OUT, &a));
        must(trainer_evaluate(&ops, HELD_OUT, &b));
        cr_assert(a.loss == b.loss && a.right == b.right && a.targets == b.targets);
        expect_same_results(&graph, &ops);
    }
    must(trainer_settle(&graph));
    expect_same_results(&graph, &ops);
    expect_same_state(&graph, &ops);
    if (shape->dtype == FATTN_F16) cr_assert_gt(graph.scaling.skipped_steps, 0);
    cr_assert_eq(device.launches, (STEPS - 1) * passes);
    cr_assert_eq(device.records, 1 + (STEPS - 1) / evaluate_every);
    trainer_destroy(&graph);
    trainer_destroy(&ops);
}

Test(step_graph, steps_are_those_op_by_op) { follow(&small, 1, STEPS + 1); }
Test(step_graph, evaluations_use_the_tape_in_between) { follow(&small, 1, 4); }
Test(step_graph, several_passes) { follow(&small, 3, 5); }

Test(step_graph, other_models_and_a_loss_scale) {
    model_config half = small;
    half.dtype = FATTN_F16;
    follow(&half, 1, 7);
}

Test(step_graph, gpt2) {
    model_config gpt2 = small;
    gpt2.arch = ARCH_GPT2, gpt2.kv_heads = gpt2.heads, gpt2.mlp_ratio = 4, gpt2.algorithm = FATTN_ALGO_STANDARD;
    follow(&gpt2, 2, 6);
}

/* ---- failures ---- */

/* A loss that is NaN is found when it arrives: by the next step, or by what settles. */
Test(step_graph, a_loss_that_is_not_finite_is_found_one_step_later) {
    for (int settles = 0; settles < 2; ++settles) {
        const trainer_config config = config_of(1, true);
        trainer r;
        evaluation e;
        int n;
        start(&r, &small, &config);
        for (int step = 0; step < 3; ++step) must(trainer_step(&r));
        ((float *)model_params(r.model, &n)[0]->value.data)[0] = NAN;
        must(trainer_step(&r)); /* step 4 */
        cr_assert_eq(settles ? trainer_evaluate(&r, 1, &e) : trainer_step(&r), FATTN_E_MISMATCH);
        cr_assert(strstr(fattn_ctx_error(ctx), "the loss of step 4 is nan"), "%s", fattn_ctx_error(ctx));
        cr_assert_eq(r.history.steps, 3);
        trainer_destroy(&r);
    }
}

/* What cannot be recorded runs op by op, to the same bits, and says why. */
Test(step_graph, a_recording_that_fails) {
    const trainer_config one = config_of(1, false), other = config_of(1, true);
    trainer ops, graph;
    start(&ops, &small, &one);
    start(&graph, &small, &other);
    device.fails = true;
    for (int step = 0; step < STEPS; ++step) {
        must(trainer_step(&ops));
        must(trainer_step(&graph));
        cr_assert_eq(strcmp(trainer_why_no_graph(&graph), step ? "this device does not record today" : ""), 0, "%s",
                     trainer_why_no_graph(&graph));
        expect_same_results(&graph, &ops);
    }
    expect_same_state(&graph, &ops);
    trainer_destroy(&graph);
    trainer_destroy(&ops);
    device.trainer = NULL;
}

Test(step_graph, destroyed_while_a_step_is_under_way) {
    const trainer_config config = config_of(2, true);
    trainer r;
    start(&r, &small, &config);
    for (int step = 0; step < 4; ++step) must(trainer_step(&r));
    cr_assert(r.graph.pending && device.from < device.to);
    trainer_destroy(&r);
}

/* One sequence again and again, with a learning rate of 0: only the masks differ, between the steps and the passes. */
static void one_sequence(task *t, int64_t index, int32_t *ids, int32_t *targets) {
    (void)index;
    sequence(t, 0, ids, targets);
}

Test(step_graph, every_pass_has_its_dropout_masks) {
    for (int64_t passes = 1; passes <= 2; ++passes)
        for (int drops = 0; drops < 2; ++drops) {
            trainer_config config = config_of(passes, true);
            model_config shape = small;
            trainer r;
            config.lr = 0;
            if (!drops) shape.dropout = 0;
            data.train = one_sequence;
            start(&r, &shape, &config);
            for (int step = 0; step < 4; ++step) must(trainer_step(&r));
            must(trainer_settle(&r));
            for (int i = 1; i < 4; ++i)
                for (int k = 0; k < i; ++k) cr_assert_eq(r.history.loss[i] != r.history.loss[k], drops, "%d, %d", i, k);
            const float *const losses = r.graph.results[0].losses.data;
            if (passes == 2) cr_assert_eq(losses[0] != losses[1], drops);
            trainer_destroy(&r);
        }
}

Test(step_graph, the_cpu_has_none) {
    const trainer_config config = config_of(1, true);
    trainer r;
    device.ops.graph_begin = NULL;
    start(&r, &small, &config);
    must(trainer_step(&r));
    cr_assert_str_empty(trainer_why_no_graph(&r));
    must(trainer_step(&r));
    cr_assert(strstr(trainer_why_no_graph(&r), "graph: the CPU has none"), "%s", trainer_why_no_graph(&r));
    cr_assert_eq(r.history.steps, 2);
    trainer_destroy(&r);
}
