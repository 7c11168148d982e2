#include "cli/base/cli.h"
#include "cli/base/device.h"
#include "cli/output/progress.h"
#include "cli/train/trainer_parts.h"

#include <math.h>
#include <stdlib.h>

/* Logits of a batch that are copied to the host: up to 256 MiB. With more, an evaluation has only the loss. */
enum { MOST_LOGITS = 1 << 26 };

/* Behind the losses in `news`: rank 0's clock, and how many ranks have been interrupted. */
enum { CLOCK, INTERRUPTS, NEWS };

static int rank_of(const trainer *r) { return r->config.rank ? r->config.rank->number : 0; }
static int ranks_of(const trainer *r) { return r->config.rank ? r->config.rank->size : 1; }

static fattn_loss_scale_options loss_scale(const trainer_config *c) {
    fattn_loss_scale_options o = {.struct_size = sizeof o};
    fattn_loss_scale_defaults(&o);
    if (c->loss_scale > 0) {
        o.initial = o.minimum = o.maximum = (float)c->loss_scale;
        o.interval = 0;
    }
    return o;
}

int64_t trainer_counted_batch(const task *t, const model_config *config) {
    return MOST_LOGITS / (t->context * model_columns(config));
}

/* This rank's passes of a step. */
static fattn_status divide_passes(trainer *r) {
    const int64_t size = ranks_of(r);
    if (r->config.passes == 0) r->config.passes = size;
    r->own_passes = r->config.passes / size;
    r->first_pass = rank_of(r) * r->own_passes;
    if (r->own_passes * size != r->config.passes)
        return fattn_ctx_fail(r->ctx, FATTN_E_ARG, "%lld passes, which %lld ranks cannot divide",
                              (long long)r->config.passes, (long long)size);
    r->news = malloc((size_t)(r->config.passes + NEWS) * sizeof *r->news);
    return r->news ? FATTN_OK
                   : fattn_ctx_fail(r->ctx, FATTN_E_NOMEM, "no memory for a step of %lld passes",
                                    (long long)r->config.passes);
}

/* From so many tokens of a pass on the last quarter of backward takes longer than all exchanges by NVLink, and links
   that sleep before are worth 0.5 to 1 % of a step of GPUs at their power limit: bench/results/ranks_tried_h200.txt. */
enum { HOLD_TOKENS = 8192, HOLD = 75 };

static fattn_status create_reducer(trainer *r) {
    int n;
    fattn_param *const *const params = model_params(r->model, &n);
    fattn_comm *const comm = r->config.rank ? r->config.rank->comm : NULL;
    const bool holds = fattn_comm_linked(comm) && r->config.batch * r->task->context >= HOLD_TOKENS;
    const fattn_reducer_options o = {.struct_size = sizeof o,
                                     .flags = r->config.zero ? FATTN_REDUCE_TO_OWNERS : 0,
                                     .late = model_late(r->model),
                                     .hold = holds ? HOLD : 0};
    if (!trainer_sums(&r->config, ranks_of(r))) return FATTN_OK;
    return fattn_reducer_create(r->ctx, comm, &o, params, n, &r->reducer);
}

static void set_rounding(const trainer *r, fattn_adamw_options *o) {
    if (r->config.rounding == ROUNDING_MASTERS) return;
    if (r->config.rounding != ROUNDING_STOCHASTIC_MASTERS) o->flags = FATTN_OPTIM_NO_MASTERS;
    if (r->config.rounding == ROUNDING_NEAREST) return;
    o->flags |= FATTN_OPTIM_STOCHASTIC_ROUNDING;
    o->seed = model_get_config(r->model)->seed;
}

/* Gradients of one pass are stored, which reads and zeroes none. */
static void store_gradients(const trainer *r) {
    int n;
    fattn_param *const *const params = model_params(r->model, &n);
    for (int i = 0; i < n && r->own_passes == 1; ++i) params[i]->flags |= FATTN_PARAM_ONE_PASS;
}

static fattn_status create_parts(trainer *r, const model_config *config) {
    fattn_status s = divide_passes(r);
    if (!s) s = model_create(r->ctx, config, &r->model);
    if (!s) store_gradients(r);
    if (!s) s = fattn_tape_create(r->ctx, &r->tape);
    if (!s) s = batch_feed_create(r->ctx, r->config.batch, r->task->context, &r->feed);
    const int64_t most = trainer_counted_batch(r->task, config), batch = r->config.batch;
    const size_t logits = (size_t)(batch * r->task->context * model_columns(config));
    if (batch <= most) r->logits = malloc(logits * sizeof *r->logits);
    if (!s && !r->logits && batch <= most)
        s = fattn_ctx_fail(r->ctx, FATTN_E_NOMEM, "no memory for the logits of a batch");
    if (!s) s = create_reducer(r);
    if (s) return s;
    fattn_adamw_options options = {.struct_size = sizeof options};
    fattn_adamw_defaults(&options);
    options.beta2 = r->config.beta2 > 0 ? (float)r->config.beta2 : 0.99f;
    options.weight_decay = (float)r->config.weight_decay;
    options.max_grad_norm = (float)r->config.clip;
    const fattn_loss_scale_options scale = loss_scale(&r->config);
    if (trainer_is_scaled(r)) options.loss_scale = &scale;
    if (r->config.zero) options.owners = r->reducer;
    set_rounding(r, &options);
    int n;
    fattn_param *const *params = model_params(r->model, &n);
    s = fattn_adamw_create(r->ctx, &options, params, n, &r->adamw);
    if (!s) s = fattn_adamw_loss_scale(r->adamw, &r->scale);
    if (!s) s = trainer_read_scale(r);
    return s ? s : step_graph_create(r);
}

fattn_status trainer_create(trainer *r, fattn_ctx *ctx, task *t, const model_config *shape,
                            const trainer_config *config) {
    *r = (trainer){.config = *config, .ctx = ctx, .task = t, .origin = seconds_now()};
    const fattn_status s = create_parts(r, shape);
    if (s) trainer_destroy(r);
    return s;
}

void trainer_destroy(trainer *r) {
    step_graph_destroy(r);
    fattn_adamw_destroy(r->adamw);
    fattn_reducer_destroy(r->reducer);
    fattn_tape_destroy(r->tape);
    model_destroy(r->model);
    batch_feed_destroy(&r->feed);
    free(r->logits);
    free(r->news);
    free(r->history.loss);
    free(r->history.eval_step);
    free(r->history.eval_loss);
    free(r->history.eval_right);
    *r = (trainer){0};
}

/* ---- history ---- */

static bool grow(double **values, int64_t capacity) {
    double *larger = realloc(*values, (size_t)capacity * sizeof **values);
    if (larger) *values = larger;
    return larger != NULL;
}

fattn_status history_resize(fattn_ctx *ctx, history *h, int64_t steps, int64_t evals) {
    bool ok = true;
    if (steps > h->step_capacity) {
        const int64_t capacity = 2 * steps;
        ok = grow(&h->loss, capacity);
        if (ok) h->step_capacity = capacity;
    }
    if (ok && evals > h->eval_capacity) {
        const int64_t capacity = 2 * evals;
        ok = grow(&h->eval_step, capacity) && grow(&h->eval_loss, capacity) && grow(&h->eval_right, capacity);
        if (ok) h->eval_capacity = capacity;
    }
    if (!ok) return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for the history of %lld steps", (long long)steps);
    h->steps = steps;
    h->evals = evals;
    return FATTN_OK;
}

fattn_status trainer_note(trainer *r, const evaluation *e) {
    history *h = &r->history;
    const int64_t i = h->evals;
    const fattn_status s = history_resize(r->ctx, h, h->steps, i + 1);
    if (s) return s;
    h->eval_step[i] = (double)r->step;
    h->eval_loss[i] = e->loss;
    h->eval_right[i] = e->right;
    return FATTN_OK;
}

/* ---- steps ---- */

bool trainer_leads(const trainer *r) { return rank_of(r) == 0; }
bool trainer_interrupted(const trainer *r) { return ranks_of(r) > 1 ? r->interrupted : cli_interrupted(); }

double trainer_used(const trainer *r) {
    const trainer_config *c = &r->config;
    const double steps = c->steps > 0 ? (double)r->step / (double)c->steps : 0;
    const double time = c->seconds > 0 ? r->elapsed / c->seconds : 0;
    return fmax(steps, time);
}

int64_t trainer_sequences(const trainer *r) { return r->config.batch * r->config.passes; }
bool trainer_is_scaled(const trainer *r) { return model_get_config(r->model)->dtype == FATTN_F16; }
fattn_status trainer_read_scale(trainer *r) {
    r->scaling.struct_size = sizeof r->scaling;
    return fattn_adamw_get_loss_scale(r->adamw, &r->scaling);
}

static double budget_lr(const trainer *r) {
    const double least = 0.1;
    const double used = fmin(trainer_used(r), 1);
    const double cosine = least + (1 - least) * 0.5 * (1 + cos(3.14159265358979323846 * used));
    const double warm = (double)(r->step + 1) / (double)(r->config.warmup + 1);
    return r->config.lr * cosine * fmin(warm, 1);
}

/* llm.c's constant rate has no warm-up. A run that ends in its warm-up is fine here, unlike in the library. */
static fattn_schedule library_schedule(const trainer_config *c) {
    static const fattn_schedule_kind kinds[] = {[SCHEDULE_COSINE] = FATTN_SCHEDULE_COSINE,
                                                [SCHEDULE_LINEAR] = FATTN_SCHEDULE_LINEAR,
                                                [SCHEDULE_CONSTANT] = FATTN_SCHEDULE_CONSTANT,
                                                [SCHEDULE_WSD] = FATTN_SCHEDULE_WSD};
    return (fattn_schedule){.struct_size = sizeof(fattn_schedule),
                            .kind = (int32_t)kinds[c->schedule],
                            .warmup = c->schedule == SCHEDULE_CONSTANT ? 0 : c->warmup,
                            .steps = c->steps > c->warmup ? c->steps : c->warmup,
                            .lr = (float)c->lr,
                            .min_lr = (float)(c->lr * c->final_lr)};
}

fattn_status trainer_lr(const trainer *r, double *lr) {
    if (r->config.schedule == SCHEDULE_BUDGET) {
        *lr = budget_lr(r);
        return FATTN_OK;
    }
    const fattn_schedule schedule = library_schedule(&r->config);
    float rate = 0;
    const fattn_status s = fattn_schedule_lr(r->ctx, &schedule, r->step, &rate);
    if (!s) *lr = (double)rate;
    return s;
}

typedef void (*sequence_fn)(task *t, int64_t index, int32_t *ids, int32_t *targets);

static void put_sequence(trainer *r, const batch_place *to, int64_t row, sequence_fn sequence, int64_t index) {
    const int64_t at = row * r->task->context;
    sequence(r->task, index, to->ids + at, to->targets + at);
}

static fattn_status send_batch(trainer *r, int64_t number) {
    if (r->task->error[0]) return fattn_ctx_fail(r->ctx, FATTN_E_ARG, "%s", r->task->error);
    return batch_feed_send(&r->feed, number);
}

fattn_status trainer_send(trainer *r, int64_t pass) { return send_batch(r, r->step * r->config.passes + pass); }

/* The first training sequence of a pass of this step, or of the next step's first one. */
static int64_t cursor_of(const trainer *r, int64_t pass) {
    const bool next = pass == r->first_pass + r->own_passes;
    return r->cursor + (next ? r->config.passes + r->first_pass : pass) * r->config.batch;
}

fattn_status trainer_prepare(trainer *r, int64_t pass) {
    const int64_t cursor = cursor_of(r, pass);
    batch_place *to;
    const fattn_status s = batch_feed_open(&r->feed, &to);
    if (s || to->cursor == cursor) return s;
    for (int64_t row = 0; row < r->config.batch; ++row) put_sequence(r, to, row, r->task->train, cursor + row);
    to->cursor = cursor;
    return FATTN_OK;
}

fattn_var trainer_pass_loss(trainer *r) {
    const batch_feed *const b = &r->feed;
    const fattn_var loss = model_loss(r->model, r->tape, &b->ids, &b->targets, &b->pass);
    return r->config.passes > 1 ? fattn_op_scale(r->tape, loss, 1 / (double)r->config.passes) : loss;
}

static bool is_last(const trainer *r, int64_t pass) { return pass + 1 == r->first_pass + r->own_passes; }

static fattn_status backward(trainer *r, int64_t pass, fattn_var loss) {
    const bool last = is_last(r, pass);
    if (r->reducer && last) return fattn_reducer_backward(r->reducer, r->tape, loss, &r->scale);
    const fattn_status s = fattn_tape_backward_from(r->tape, loss, &r->scale);
    return s || !r->config.tree || last ? s : fattn_reducer_set_aside(r->reducer);
}

fattn_status trainer_add_gradient(trainer *r, int64_t pass, fattn_var *loss) {
    fattn_status s = trainer_prepare(r, pass);
    if (!s) s = trainer_send(r, pass);
    if (s) return s;
    fattn_tape_reset(r->tape);
    *loss = trainer_pass_loss(r);
    s = backward(r, pass, *loss);
    if (!s && r->reducer && is_last(r, pass)) s = fattn_reducer_finish(r->reducer);
    return s ? s : trainer_prepare(r, pass + 1); /* overlaps with the GPU's work */
}

/* The step's gradient, and the shares of the loss of all passes but the last, whose loss is on the tape. */
static fattn_status add_gradients(trainer *r, fattn_var *last) {
    const int64_t past = r->first_pass + r->own_passes;
    fattn_status s = FATTN_OK;
    for (int64_t pass = r->first_pass; !s && pass < past; ++pass) {
        s = trainer_add_gradient(r, pass, last);
        if (!s && pass + 1 < past) s = fattn_tape_item(r->tape, *last, &r->news[pass]);
    }
    return s;
}

fattn_status trainer_share_losses(trainer *r, const float *losses, double *loss) {
    const int64_t passes = r->config.passes, first = r->first_pass, past = first + r->own_passes;
    double *const news = r->news;
    for (int64_t i = 0; i < passes + NEWS; ++i)
        news[i] = i < first || i >= past ? 0 : losses ? (double)losses[i] : news[i];
    if (trainer_leads(r)) news[passes + CLOCK] = seconds_now() - r->origin;
    news[passes + INTERRUPTS] = cli_interrupted();
    const fattn_status s = r->config.rank ? rank_share(r->config.rank, news, passes + NEWS) : FATTN_OK;
    if (s) return s;
    *loss = 0;
    for (int64_t pass = 0; pass < passes; ++pass) *loss += news[pass];
    r->elapsed = news[passes + CLOCK];
    r->interrupted = news[passes + INTERRUPTS] > 0;
    return FATTN_OK;
}

fattn_status trainer_check_loss(const trainer *r, double loss) {
    if (isfinite(loss)) return FATTN_OK;
    return fattn_ctx_fail(r->ctx, FATTN_E_MISMATCH, "the loss of step %lld is %g: lower --lr%s?",
                          (long long)(r->history.steps + 1), loss,
                          trainer_is_scaled(r) ? ", or a dtype of more range than f16" : "");
}

fattn_status trainer_note_step(trainer *r, double loss) {
    const int64_t step = r->history.steps;
    r->skipped = isfinite(r->grad_norm) ? 0 : r->skipped + 1;
    if (r->skipped == MOST_SKIPPED)
        return fattn_ctx_fail(
            r->ctx, FATTN_E_MISMATCH,
            "the gradients of %d steps one after the other, to step %lld, overflow or are NaN, with a loss "
            "of %g and a loss scale of %g: lower --lr%s?",
            r->skipped, (long long)(step + 1), loss, (double)r->scaling.scale,
            r->config.loss_scale > 0 ? " or --loss-scale" : "");
    const fattn_status s = history_resize(r->ctx, &r->history, step + 1, r->history.evals);
    if (!s) r->history.loss[step] = loss;
    return s;
}

/* One rank: each op is enqueued by itself. The update does not wait for the loss on the host: where that is NaN,
   gradients are, and the update leaves the parameters as they are. */
static fattn_status step_by_ops(trainer *r, double lr) {
    fattn_var last;
    double loss = 0;
    fattn_status s = add_gradients(r, &last);
    if (!s) s = fattn_adamw_set_lr(r->adamw, (float)lr);
    if (!s) s = fattn_adamw_step(r->adamw);
    if (!s) s = fattn_tape_item(r->tape, last, &r->news[r->first_pass + r->own_passes - 1]);
    if (!s) s = trainer_share_losses(r, NULL, &loss);
    if (!s) s = trainer_check_loss(r, loss);
    if (!s) s = fattn_adamw_grad_norm(r->adamw, &r->grad_norm);
    if (!s) s = trainer_read_scale(r);
    r->lr = lr;
    r->graph.warm = true;
    return s ? s : trainer_note_step(r, loss);
}

fattn_status trainer_step(trainer *r) {
    double lr = 0;
    fattn_status s = trainer_lr(r, &lr);
    if (!s) s = step_graph_ready(r) ? step_graph_run(r, lr) : step_by_ops(r, lr);
    if (s) return s;
    r->cursor += trainer_sequences(r);
    r->step += 1;
    if (ranks_of(r) == 1) r->elapsed = seconds_now() - r->origin; /* with the update, which is not in the news */
    return FATTN_OK;
}

fattn_status trainer_settle(trainer *r) {
    const bool waits = r->graph.pending;
    const fattn_status s = step_graph_settle(r);
    if (!s && waits && ranks_of(r) == 1) r->elapsed = seconds_now() - r->origin;
    return s;
}

fattn_status trainer_lend_tape(trainer *r, fattn_tape **tape) {
    const fattn_status s = trainer_settle(r);
    if (s) return s;
    step_graph_forget(r);
    *tape = r->tape;
    return FATTN_OK;
}

const char *trainer_why_no_graph(const trainer *r) { return r->graph.why; }

/* ---- evaluation ---- */

/* Adds the rows of logits [n, columns], of which the first `vocab` columns count, to the sums in e; except those whose
   target is ignored. */
static void add_rows(const float *logits, const int32_t *targets, int64_t n, int64_t vocab, int64_t columns,
                     evaluation *e) {
    for (int64_t i = 0; i < n; ++i) {
        const float *row = logits + i * columns;
        if (targets[i] == TASK_IGNORE) continue;
        int64_t best = 0;
        for (int64_t v = 1; v < vocab; ++v)
            if (row[v] > row[best]) best = v;
        double sum = 0;
        for (int64_t v = 0; v < vocab; ++v) sum += exp((double)row[v] - (double)row[best]);
        e->loss += log(sum) + (double)row[best] - (double)row[targets[i]];
        e->right += best == targets[i];
        e->targets += 1;
    }
}

/* Number i of the n held-out sequences of an evaluation. */
static int64_t held_out(const trainer *r, int64_t i, int64_t n) {
    return r->task->in_order ? i : i * r->task->held_out / n;
}

/* Adds the model's own mean loss over the first `rows` sequences of the batch `to`; which targets are right is not
   known. Those of the others are ignored. */
static fattn_status add_loss(trainer *r, batch_place *to, int64_t rows, evaluation *e) {
    const batch_feed *const b = &r->feed;
    const int64_t n = rows * r->task->context, all = r->config.batch * r->task->context;
    int64_t targets = 0;
    double loss = 0;
    for (int64_t i = n; i < all; ++i) to->targets[i] = TASK_IGNORE;
    for (int64_t i = 0; i < n; ++i) targets += to->targets[i] != TASK_IGNORE;
    fattn_status s = send_batch(r, 0);
    fattn_tape_reset(r->tape);
    if (!s && targets > 0)
        s = fattn_tape_item(r->tape, model_test_loss(r->model, r->tape, &b->ids, &b->targets), &loss);
    e->loss += loss * (double)targets;
    e->right = NAN;
    e->targets += targets;
    return s;
}

/* Adds what the batch of held-out sequences `first` and on says, of n in all, to the sums in e. */
static fattn_status evaluate_batch(trainer *r, int64_t first, int64_t n, evaluation *e) {
    const int64_t size = r->config.batch, rows = first + size < n ? size : n - first;
    const batch_feed *const b = &r->feed;
    batch_place *to;
    fattn_status s = batch_feed_open(&r->feed, &to);
    if (s) return s;
    to->cursor = BATCH_NONE;
    for (int64_t row = 0; row < size; ++row) /* the last batch repeats its first sequence */
        put_sequence(r, to, row, r->task->test, held_out(r, first + (row < rows ? row : 0), n));
    if (!r->logits) return add_loss(r, to, rows, e);
    s = send_batch(r, 0);
    if (s) return s;
    fattn_tape_reset(r->tape);
    fattn_tensor view;
    s = fattn_tape_value(r->tape, model_logits(r->model, r->tape, &b->ids), &view);
    if (!s) s = device_read(r->ctx, &view, r->logits);
    if (s) return s;
    add_rows(r->logits, to->targets, rows * r->task->context, r->task->vocab, model_columns(model_get_config(r->model)),
             e);
    return FATTN_OK;
}

fattn_status trainer_evaluate(trainer *r, int64_t count, evaluation *out) {
    enum { LOSS, RIGHT, TARGETS, SUMS };
    const int64_t n = count < r->task->held_out ? count : r->task->held_out, size = ranks_of(r);
    const int64_t batches = (n + r->config.batch - 1) / r->config.batch;
    double *const sums = calloc((size_t)(batches * SUMS) + 1, sizeof *sums);
    if (!sums) return fattn_ctx_fail(r->ctx, FATTN_E_NOMEM, "no memory for %lld batches", (long long)batches);
    fattn_tape *tape;
    fattn_status s = trainer_lend_tape(r, &tape);
    for (int64_t b = rank_of(r) * batches / size; !s && b < (rank_of(r) + 1) * batches / size; ++b) {
        evaluation e = {0};
        s = evaluate_batch(r, b * r->config.batch, n, &e);
        sums[b * SUMS + LOSS] = e.loss;
        sums[b * SUMS + RIGHT] = e.right;
        sums[b * SUMS + TARGETS] = (double)e.targets;
    }
    if (!s && r->config.rank) s = rank_share(r->config.rank, sums, batches * SUMS);
    double total[SUMS] = {0};
    for (int64_t i = 0; i < batches * SUMS; ++i) total[i % SUMS] += sums[i];
    free(sums);
    if (!s) *out = (evaluation){total[LOSS] / total[TARGETS], total[RIGHT] / total[TARGETS], (int64_t)total[TARGETS]};
    return s;
}
