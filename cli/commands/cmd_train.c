/* fattn train: a small transformer learns a task; progress, log, checkpoints, a plot, a summary. */
#include "cli/base/cli.h"
#include "cli/base/device.h"
#include "cli/commands/gpt2_run.h"
#include "cli/commands/model_text.h"
#include "cli/llmc/hellaswag.h"
#include "cli/train/durable.h"
#include "cli/output/json.h"
#include "cli/train/ngram.h"
#include "cli/output/plot.h"
#include "cli/output/progress.h"
#include "cli/train/train_options.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

typedef struct session {
    train_options o;
    checkpoint *from;
    fattn_ctx *ctx;
    task *task;
    tokenizer tokens;   /* of shards; n 0: none */
    hellaswag examples; /* n 0: none */
    int64_t asked_step; /* after which they were asked last */
    trainer r;
    json log;
    output plot;
    bool drawn; /* the plot is written */
    progress bar;
    int64_t first_step;       /* of this part of the run */
    durable_lock lock;        /* of the folder of checkpoints */
    bool same_folder;         /* whether that folder is the one that the run was resumed from */
    int64_t keep;             /* checkpoints there up to this step belong to this run; -1 = none */
    int64_t saved_step;       /* of the last checkpoint, -1 = none */
    double origin;            /* monotonic clock minus elapsed */
    evaluation last;          /* the latest on held-out data */
    bool reached;             /* the target */
    char why[DEVICE_MESSAGE]; /* the context's log */
    int64_t warm_step;        /* speed is measured from here on: after allocations and loading of kernels */
    double warm_elapsed;
} session;

static const char *const task_names[] = {"recall", "text", "tokens", "shards"};
enum { WARM_STEPS = 5 };

static bool wants_checkpoints(const session *s) { return strcmp(s->o.checkpoint, "-") != 0; }

/* ---- log ---- */

static void log_start(session *s) {
    json_begin(&s->log);
    json_text(&s->log, "event", s->from ? "resume" : "start");
    json_int(&s->log, "step", s->r.step);
    for (const cli_option *p = train_table; p->name; ++p) {
        const char *field = (const char *)&s->o + p->offset;
        if (p->type == CLI_INT) json_int(&s->log, p->name, *(const int64_t *)field);
        if (p->type == CLI_REAL) json_real(&s->log, p->name, *(const double *)field);
        if (p->type == CLI_TEXT && *(char *const *)field) json_text(&s->log, p->name, *(char *const *)field);
    }
    json_text(&s->log, "task", task_names[s->o.task]);
    json_int(&s->log, "parameters", model_size(s->r.model));
    json_end(&s->log);
}

static double tokens_per_second(const session *s) {
    const double tokens = (double)((s->r.step - s->first_step) * trainer_sequences(&s->r) * s->o.context);
    const double time = s->r.elapsed - (s->bar.started - s->origin);
    return time > 0 ? tokens / time : 0;
}

static void log_step(session *s) {
    const trainer *r = &s->r;
    json_begin(&s->log);
    json_text(&s->log, "event", "step");
    json_int(&s->log, "step", r->step);
    json_real(&s->log, "loss", r->history.loss[r->step - 1]);
    json_real(&s->log, "grad_norm", r->grad_norm);
    json_real(&s->log, "lr", r->lr);
    if (trainer_is_scaled(r)) {
        json_real(&s->log, "loss_scale", (double)r->scaling.scale);
        json_int(&s->log, "skipped_steps", r->scaling.skipped_steps);
    }
    json_real(&s->log, "elapsed", r->elapsed);
    json_real(&s->log, "tokens_per_second", tokens_per_second(s));
    json_int(&s->log, "peak_bytes", (int64_t)fattn_ctx_mem(s->ctx).peak);
    json_end(&s->log);
}

static void log_evaluation(session *s, const char *event) {
    json_begin(&s->log);
    json_text(&s->log, "event", event);
    json_int(&s->log, "step", s->r.step);
    json_real(&s->log, "val_loss", s->last.loss);
    json_real(&s->log, "val_accuracy", s->last.right);
    json_int(&s->log, "val_targets", s->last.targets);
    json_real(&s->log, "elapsed", s->r.elapsed);
    json_end(&s->log);
}

/* ---- the loop ---- */

static void show_progress(session *s) {
    const trainer *r = &s->r;
    const double used = trainer_used(r);
    const bool over = used >= 1 || s->reached;
    s->bar.total = over ? r->step : (int64_t)((double)r->step / fmax(used, 1e-6) + 0.5);
    if (s->bar.total <= r->step && !over) s->bar.total = r->step + 1;
    if (!progress_due(&s->bar, r->step)) return;
    char rate[32], memory[32], right[32] = "", scale[64] = "";
    if (s->o.task == TASK_RECALL) snprintf(right, sizeof right, " right %.1f%%", 100 * s->last.right);
    if (trainer_is_scaled(r))
        snprintf(scale, sizeof scale, " scale %g skipped %lld", (double)r->scaling.scale,
                 (long long)r->scaling.skipped_steps);
    progress_update(&s->bar, r->step, "loss %.3f val %.3f%s |g| %.2g lr %.2g%s %s tok/s mem %s",
                    r->history.loss[r->step - 1], s->last.loss, right, r->grad_norm, r->lr, scale,
                    text_of_count(tokens_per_second(s), rate),
                    text_of_bytes((double)fattn_ctx_mem(s->ctx).peak, memory));
}

static int save(session *s) {
    if (!wants_checkpoints(s) || s->saved_step == s->r.step) return CLI_OK;
    if (!durable_hold(&s->lock, s->o.checkpoint) ||
        !checkpoint_save(s->o.checkpoint, train_table, &s->o, train_not_stored, &s->r))
        return CLI_FAILURE;
    s->saved_step = s->r.step;
    return CLI_OK;
}

/* HellaSwag; a run that is interrupted meanwhile ends without it. */
static int ask_examples(session *s) {
    int64_t right, done;
    const fattn_status status = hellaswag_count(&s->examples, s->ctx, s->r.model, s->r.tape, s->o.examples, s->o.batch,
                                                cli_interrupted, &right, &done);
    if (status) return cli_status(s->ctx, status, "HellaSwag");
    if (cli_interrupted()) return CLI_OK;
    s->asked_step = s->r.step;
    progress_note(&s->bar, "HellaSwag after step %lld: %lld of %lld right, %.4f", (long long)s->r.step,
                  (long long)right, (long long)done, (double)right / (double)done);
    json_begin(&s->log);
    json_text(&s->log, "event", "hellaswag");
    json_int(&s->log, "step", s->r.step);
    json_int(&s->log, "right", right);
    json_int(&s->log, "examples", done);
    json_end(&s->log);
    return CLI_OK;
}

static int evaluate(session *s, int64_t sequences) {
    fattn_status status = trainer_evaluate(&s->r, sequences, &s->last);
    if (!status) status = trainer_note(&s->r, &s->last);
    if (status) return cli_status(s->ctx, status, "evaluation");
    log_evaluation(s, "eval");
    const bool asks = s->examples.n > 0 && s->r.step > s->first_step && s->r.step > s->asked_step;
    const int code = asks ? ask_examples(s) : CLI_OK;
    if (code) return code;
    s->reached = s->o.target > 0 && s->last.right >= s->o.target;
    return CLI_OK;
}

/* Until the budget is used, the target is reached, or a signal interrupts. */
static int learn(session *s) {
    trainer *r = &s->r;
    int code = CLI_OK, saved = CLI_OK;
    if (r->history.evals == 0) code = evaluate(s, s->o.eval_sequences);
    while (!code && trainer_used(r) < 1 && !s->reached && !cli_interrupted()) {
        const fattn_status status = trainer_step(r);
        r->elapsed = seconds_now() - s->origin;
        if (status) return cli_status(s->ctx, status, "training");
        if (r->step <= s->first_step + WARM_STEPS) s->warm_step = r->step, s->warm_elapsed = r->elapsed;
        log_step(s);
        if (r->step % s->o.eval_every == 0) code = evaluate(s, s->o.eval_sequences);
        if (!code && r->step % s->o.checkpoint_every == 0) code = saved = save(s);
        if (json_failed(&s->log)) code = CLI_FAILURE; /* json_close reports it */
        if (!code) show_progress(s);
    }
    progress_end(&s->bar);
    if (!saved) saved = save(s); /* save prints its error message */
    return code ? code : saved;
}

/* ---- the summary ---- */

/* Means over bins of equal size, so that long runs stay readable: x, y have room for `bins`. */
static int64_t smooth(const double *loss, int64_t steps, int64_t bins, double *x, double *y) {
    const int64_t size = (steps + bins - 1) / bins;
    int64_t n = 0;
    for (int64_t begin = 0; begin < steps; begin += size, ++n) {
        const int64_t end = begin + size < steps ? begin + size : steps;
        double sum = 0;
        for (int64_t i = begin; i < end; ++i) sum += loss[i];
        x[n] = 0.5 * (double)(begin + 1 + end);
        y[n] = sum / (double)(end - begin);
    }
    return n;
}

static bool draw(session *s, const plot_level *levels, int n_levels) {
    enum { BINS = 300 };
    double x[BINS], y[BINS];
    const history *h = &s->r.history;
    const int64_t n = smooth(h->loss, h->steps, BINS, x, y);
    const plot_series series[] = {
        {.name = "training", .x = x, .y = y, .n = n, .style = PLOT_LINE, .color = 0},
        {.name = "held out", .x = h->eval_step, .y = h->eval_loss, .n = h->evals, .style = PLOT_MARKED, .color = 1}};
    static const char *const titles[] = {"Associative recall", "Text model", "Random tokens", "Token shards"};
    char subtitle[160], size[32];
    snprintf(subtitle, sizeof subtitle, "%lld layers, %lld channels, %s parameters, context %lld",
             (long long)s->o.layers, (long long)s->o.channels, text_of_count((double)model_size(s->r.model), size),
             (long long)s->o.context);
    const plot p = {.title = titles[s->o.task],
                    .subtitle = subtitle,
                    .x = {.label = "step"},
                    .y = {.label = "loss, nats per token"},
                    .series = series,
                    .n_series = 2,
                    .levels = levels,
                    .n_levels = n_levels};
    return s->drawn = plot_write(&p, &s->plot);
}

static int summarize_recall(session *s) {
    char queries[32];
    const double pairs = (double)(s->o.context / 4);
    printf("recall: %.2f %% of %s answers right on unseen sequences (guessing among the "
           "values in sight: %.1f %%), loss %.4f\n",
           100 * s->last.right, text_of_count((double)s->last.targets, queries), 100 / pairs, s->last.loss);
    const plot_level levels[] = {{"no idea", log((double)s->task->vocab)}, {"values in sight", log(pairs)}};
    if (s->o.plot && !draw(s, levels, 2)) return CLI_FAILURE;
    if (s->o.target <= 0 || s->last.right >= s->o.target) return CLI_OK;
    return cli_fail(CLI_FAILURE, "%.2f %% of the answers are right, not %.2f %%: more --steps?", 100 * s->last.right,
                    100 * s->o.target);
}

static int print_sample(session *s) {
    const sample_options options = {
        .temperature = s->o.temperature, .top_k = s->o.top_k, .top_p = s->o.top_p, .seed = (uint64_t)s->o.seed};
    printf("sample (temperature %.2g):\n", s->o.temperature);
    const int code = text_sample(s->ctx, s->r.model, s->r.tape, s->o.task == TASK_SHARDS ? &s->tokens : NULL, &options,
                                 s->o.prompt ? s->o.prompt : "", s->o.sample);
    fputs("\n\n", stdout);
    return code;
}

static int summarize_text(session *s) {
    const corpus *c = text_corpus(s->task);
    double loss[NGRAM_ORDERS];
    char bytes[32];
    if (!ngram_losses(c->train.symbols, c->train.n, c->held_out.symbols, c->held_out.n, TEXT_SYMBOLS, loss))
        return cli_fail(CLI_FAILURE, "no memory for the n-gram baselines");
    printf("\nheld out, nats per byte (%s bytes):\n  this model  %.3f\n", text_of_count((double)s->last.targets, bytes),
           s->last.loss);
    plot_level levels[NGRAM_ORDERS];
    char names[NGRAM_ORDERS][20];
    json_begin(&s->log);
    json_text(&s->log, "event", "ngrams");
    for (int i = 0; i < NGRAM_ORDERS; ++i) {
        snprintf(names[i], sizeof names[i], "%d-gram", i + 1);
        levels[i] = (plot_level){names[i], loss[i]};
        printf("  %-10s  %.3f%s\n", names[i], loss[i], s->last.loss < loss[i] ? "  beaten" : "");
        json_real(&s->log, names[i], loss[i]);
    }
    json_end(&s->log);
    putchar('\n');
    const int code = s->o.sample > 0 ? print_sample(s) : CLI_OK;
    if (s->o.plot && !draw(s, levels, NGRAM_ORDERS)) return CLI_FAILURE;
    return code;
}

/* Speed after the first steps. Operations: 6 per parameter and token, plus those of causal attention,
   forward and backward (7 products, each over half of the N x N matrix). */
static int summarize_speed(session *s) {
    char rate[32], memory[32];
    const train_options *o = &s->o;
    const double tokens = (double)((s->r.step - s->warm_step) * trainer_sequences(&s->r) * o->context);
    const double time = s->r.elapsed - s->warm_elapsed, speed = time > 0 ? tokens / time : 0;
    const double work = 6.0 * (double)model_size(s->r.model) + 7.0 * (double)(o->layers * o->context * o->channels);
    printf("tokens: %s per second, %.1f TFLOP/s, peak memory %s\n", text_of_count(speed, rate), 1e-12 * work * speed,
           text_of_bytes((double)fattn_ctx_mem(s->ctx).peak, memory));
    json_begin(&s->log);
    json_text(&s->log, "event", "speed");
    json_real(&s->log, "tokens_per_second", speed);
    json_real(&s->log, "flops", work * speed);
    json_int(&s->log, "peak_bytes", (int64_t)fattn_ctx_mem(s->ctx).peak);
    json_end(&s->log);
    const plot_level levels[] = {{"no idea", log((double)s->task->vocab)}};
    return s->o.plot && !draw(s, levels, 1) ? CLI_FAILURE : CLI_OK;
}

static int summarize_shards(session *s) {
    char targets[32];
    printf("held out, nats per token (%s tokens): %.4f\n", text_of_count((double)s->last.targets, targets),
           s->last.loss);
    const int code = summarize_speed(s);
    return code || s->o.sample == 0 ? code : print_sample(s);
}

/* The final evaluation, the summary of the task, the files written. The evaluation takes all held-out data; of shards,
   which may be huge, as much as the others. */
static int summarize(session *s) {
    char tokens[32], time[32];
    int code = evaluate(s, s->task->in_order ? s->o.eval_sequences : s->task->held_out);
    if (code) return code;
    log_evaluation(s, "end");
    printf("%lld steps, %s tokens, %s\n", (long long)s->r.step,
           text_of_count((double)(s->r.cursor * s->o.context), tokens), text_of_seconds(s->r.elapsed, time));
    if (trainer_is_scaled(&s->r))
        printf("loss scale %g, %lld steps skipped\n", (double)s->r.scaling.scale,
               (long long)s->r.scaling.skipped_steps);
    static int (*const summaries[])(session *) = {summarize_recall, summarize_text, summarize_speed, summarize_shards};
    code = summaries[s->o.task](s);
    if (wants_checkpoints(s)) printf("checkpoint: %s/, step %lld\n", s->o.checkpoint, (long long)s->saved_step);
    if (s->drawn && !output_is_stdout(s->o.plot)) printf("loss curve: %s\n", s->o.plot);
    if (s->o.json && !json_failed(&s->log) && !output_is_stdout(s->o.json)) printf("log: %s\n", s->o.json);
    return code;
}

/* ---- setting up ---- */

static void print_header(const session *s) {
    char size[32], train[32], held_out[32];
    const train_options *o = &s->o;
    printf("model: %s%lld layers, %lld channels, %lld heads (%lld for keys and values), "
           "context %lld, %s parameters\n",
           o->arch == ARCH_GPT2 ? "GPT-2, " : "", (long long)o->layers, (long long)o->channels, (long long)o->heads,
           (long long)o->kv_heads, (long long)o->context, text_of_count((double)model_size(s->r.model), size));
    if (o->task == TASK_TEXT)
        printf("text: %s, %s bytes to train on, %s held out\n", o->text,
               text_of_count((double)text_corpus(s->task)->train.n, train),
               text_of_count((double)text_corpus(s->task)->held_out.n, held_out));
    else if (o->task == TASK_SHARDS)
        printf("shards: %s, %s tokens; %lld tokens a step, %lld steps\n", o->data,
               text_of_count((double)shards_tokens(s->task), train), (long long)(trainer_sequences(&s->r) * o->context),
               (long long)o->steps);
    else if (o->task == TASK_TOKENS)
        printf("task: random tokens out of %lld\n", (long long)s->task->vocab);
    else
        printf("task: %lld key-value pairs, then every key once more; %lld symbols\n", (long long)o->context / 4,
               (long long)s->task->vocab);
    if (o->init) printf("begun with %s, after step %lld\n", o->init, (long long)s->r.step);
    if (s->from) printf("resumed from %s, after step %lld\n", checkpoint_path(s->from), (long long)s->r.step);
    fflush(stdout);
}

static bool same_folder(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Locks the folder for this run. It must have no checkpoints of another run, nor of this run after the step
   that it resumes from. `home` is the folder of the checkpoint that the run resumes from. */
static int claim_folder(session *s, const char *home) {
    char names[CHECKPOINT_NAMES];
    const char *folder = s->o.checkpoint;
    s->keep = -1;
    if (!wants_checkpoints(s)) return CLI_OK;
    if (!durable_hold(&s->lock, folder)) return CLI_FAILURE;
    s->same_folder = s->from && same_folder(home, folder);
    if (s->same_folder) { /* a damaged checkpoint after the step has been reported, and need not be kept */
        const int64_t newest = checkpoint_newest(s->from);
        s->keep = newest > s->r.step ? newest : s->r.step;
    }
    if (s->o.overwrite || checkpoint_after(folder, s->keep, names) == 0) return CLI_OK;
    if (s->same_folder)
        return cli_fail(CLI_FAILURE,
                        "%s has checkpoints after step %lld: %s; resume from the newest with "
                        "--resume %s, remove them with --overwrite, or name another folder with "
                        "--checkpoint",
                        folder, (long long)s->keep, names, folder);
    return cli_fail(CLI_FAILURE,
                    "%s has the checkpoints of another run: %s; resume that with --resume %s, remove "
                    "them with --overwrite, or name another folder with --checkpoint",
                    folder, names, folder);
}

static int set_up(session *s, char *folder, size_t size) {
    train_options *o = &s->o;
    if (o->resume) {
        s->from = checkpoint_open(o->resume);
        if (!s->from) return CLI_FAILURE;
        snprintf(folder, size, "%s", checkpoint_path(s->from));
        char *slash = strrchr(folder, '/');
        if (slash)
            slash[slash == folder] = 0; /* "/" stays */
        else
            snprintf(folder, size, ".");
        if (!o->checkpoint) o->checkpoint = folder; /* the folder may have been moved */
    }
    gpt2_start start;
    if (o->init && o->resume) return cli_fail(CLI_USAGE, "--init is for a new run, --resume goes on with one");
    if (o->init && !gpt2_start_open(&start, o->init)) return CLI_FAILURE;
    int code = o->init ? gpt2_start_options(&start, o->init, o) : CLI_OK;
    if (!code && !o->resume) code = open_tokenizer(o, &s->tokens);
    if (!code) code = train_options_complete(o, s->from);
    if (!code) code = open_tokenizer(o, &s->tokens);
    if (code) return code;
    code = device_open(o->device, o->deterministic ? FATTN_CTX_DETERMINISTIC : FATTN_CTX_TUNE, o->threads, s->why,
                       &s->ctx);
    if (code) return code;
    s->task = open_task(o);
    if (!s->task) return CLI_FAILURE;
    if (o->hellaswag && !hellaswag_open(&s->examples, o->hellaswag, o->context, o->vocab)) return CLI_FAILURE;
    const model_config shape = train_model_config(o, s->task->vocab);
    const trainer_config config = train_trainer_config(o);
    const fattn_status status = trainer_create(&s->r, s->ctx, s->task, &shape, &config);
    if (status) return cli_status(s->ctx, status, "model");
    if (s->from && !checkpoint_restore(s->from, &s->r)) return CLI_FAILURE;
    if (o->init && !gpt2_start_load(&start, &s->r, o->task == TASK_SHARDS)) return CLI_FAILURE;
    const history *h = &s->r.history;
    if (h->evals > 0) s->last = (evaluation){.loss = h->eval_loss[h->evals - 1], .right = h->eval_right[h->evals - 1]};
    code = claim_folder(s, folder);
    if (code) return code;
    if (!output_open(&s->plot, o->plot, OUTPUT_LATER)) return CLI_FAILURE;
    const bool logs = s->from
                          ? json_resume(&s->log, o->json, s->r.step, o->overwrite || (o->same_log && s->same_folder))
                          : json_open(&s->log, o->json, false);
    if (!logs) return CLI_FAILURE;
    /* After this nothing can fail before the first step. */
    const bool clear = wants_checkpoints(s) && o->overwrite;
    return !clear || checkpoint_remove_after(o->checkpoint, s->keep) ? CLI_OK : CLI_FAILURE;
}

static int run(const void *options, int n_operands, char *const *operands) {
    (void)n_operands, (void)operands;
    session s = {.o = *(const train_options *)options, .saved_step = -1};
    char folder[4096];
    int code = set_up(&s, folder, sizeof folder);
    if (!code) {
        s.first_step = s.r.step;
        s.origin = seconds_now() - s.r.elapsed;
        print_header(&s);
        log_start(&s);
        cli_catch_interrupts();
        progress_begin(&s.bar, stderr, "step", s.r.step, s.r.step + 1);
        code = learn(&s);
        if (!code && cli_interrupted()) {
            code = CLI_INTERRUPTED;
            if (s.o.plot && s.r.step > 0 && !draw(&s, NULL, 0)) code = CLI_FAILURE;
            cli_fail(code, "interrupted after step %lld%s%s", (long long)s.r.step,
                     wants_checkpoints(&s) ? "; continue with --resume " : "",
                     wants_checkpoints(&s) ? s.o.checkpoint : "");
        } else if (!code) {
            code = summarize(&s);
        }
    }
    if (!json_close(&s.log) && !code) code = CLI_FAILURE;
    output_close(&s.plot);
    durable_release(&s.lock);
    trainer_destroy(&s.r);
    if (s.task) s.task->close(s.task);
    tokenizer_free(&s.tokens);
    hellaswag_close(&s.examples);
    fattn_ctx_destroy(s.ctx);
    checkpoint_close(s.from);
    return code;
}

const cli_command cmd_train = {
    .name = "train",
    .summary = "Train a transformer, GPT-2 for one, on text, token files or associative recall",
    .details = train_details,
    .options = train_table,
    .defaults = &train_unset,
    .size = sizeof train_unset,
    .run = run,
};
