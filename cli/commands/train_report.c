/* What `fattn train` says, on rank 0 alone: the log, the progress, the header and the summaries. */
#include "cli/base/cli.h"
#include "cli/commands/model_text.h"
#include "cli/commands/train_session.h"
#include "cli/tasks/ngram.h"

#include <math.h>
#include <stdio.h>

static const char *const task_names[] = {"recall", "text", "tokens", "shards"};

/* ---- log ---- */

void report_start(session *s) {
    json_begin(&s->log);
    json_text(&s->log, "event", s->setup->from ? "resume" : "start");
    json_int(&s->log, "step", s->r.step);
    for (const cli_option *p = train_table; p->name; ++p) {
        const char *field = (const char *)&s->o + p->offset;
        if (p->type == CLI_INT) json_int(&s->log, p->name, *(const int64_t *)field);
        if (p->type == CLI_REAL) json_real(&s->log, p->name, *(const double *)field);
        if (p->type == CLI_TEXT && *(char *const *)field) json_text(&s->log, p->name, *(char *const *)field);
    }
    json_text(&s->log, "task", task_names[s->o.task]);
    json_bool(&s->log, "tf32", s->o.tf32);
    json_bool(&s->log, "fp8", s->o.fp8);
    json_bool(&s->log, "fp8_renew", s->o.fp8_renew);
    json_bool(&s->log, "fp8_int8", s->o.fp8_int8);
    json_text(&s->log, "rounding", train_roundings[s->o.rounding]);
    json_bool(&s->log, "graph", s->graphs);
    json_int(&s->log, "parameters", model_size(s->r.model));
    json_end(&s->log);
}

static double tokens_per_second(const session *s) {
    const double tokens = (double)((s->r.step - s->first_step) * trainer_sequences(&s->r) * s->o.context);
    const double time = s->r.elapsed - (s->bar.started - s->r.origin);
    return time > 0 ? tokens / time : 0;
}

void report_step(session *s) {
    const trainer *r = &s->r;
    json_begin(&s->log);
    json_text(&s->log, "event", "step");
    json_int(&s->log, "step", r->history.steps);
    json_real(&s->log, "loss", r->history.loss[r->history.steps - 1]);
    json_real(&s->log, "grad_norm", r->grad_norm);
    json_real(&s->log, "lr", r->lr);
    if (trainer_is_scaled(r)) {
        json_real(&s->log, "loss_scale", (double)r->scaling.scale);
        json_int(&s->log, "skipped_steps", r->scaling.skipped_steps);
    }
    json_real(&s->log, "elapsed", r->elapsed);
    json_real(&s->log, "tokens_per_second", tokens_per_second(s));
    json_int(&s->log, "peak_bytes", (int64_t)fattn_ctx_mem(s->rank->ctx).peak);
    json_end(&s->log);
}

void report_no_graph(session *s) {
    const char *const why = trainer_why_no_graph(&s->r);
    progress_note(&s->bar, "steps run op by op, not as CUDA graphs: %s", why);
    json_begin(&s->log);
    json_text(&s->log, "event", "no_graph");
    json_int(&s->log, "step", s->r.step);
    json_text(&s->log, "why", why);
    json_end(&s->log);
}

void report_evaluation(session *s, const char *event) {
    json_begin(&s->log);
    json_text(&s->log, "event", event);
    json_int(&s->log, "step", s->r.step);
    json_real(&s->log, "val_loss", s->last.loss);
    json_real(&s->log, "val_accuracy", s->last.right);
    json_int(&s->log, "val_targets", s->last.targets);
    json_real(&s->log, "elapsed", s->r.elapsed);
    json_end(&s->log);
}

/* ---- progress ---- */

void report_progress(session *s) {
    const trainer *r = &s->r;
    const double used = trainer_used(r);
    const bool over = used >= 1 || s->reached;
    s->bar.total = over ? r->step : (int64_t)((double)r->step / fmax(used, 1e-6) + 0.5);
    if (s->bar.total <= r->step && !over) s->bar.total = r->step + 1;
    const int64_t step = r->history.steps; /* the last one whose results are there */
    if (!progress_due(&s->bar, step)) return;
    char rate[32], memory[32], right[32] = "", scale[64] = "";
    if (s->o.task == TASK_RECALL && !isnan(s->last.right))
        snprintf(right, sizeof right, " right %.1f%%", 100 * s->last.right);
    if (trainer_is_scaled(r))
        snprintf(scale, sizeof scale, " scale %g skipped %lld", (double)r->scaling.scale,
                 (long long)r->scaling.skipped_steps);
    progress_update(&s->bar, step, "loss %.3f val %.3f%s |g| %.2g lr %.2g%s %s tok/s mem %s", r->history.loss[step - 1],
                    s->last.loss, right, r->grad_norm, r->lr, scale, text_of_count(tokens_per_second(s), rate),
                    text_of_bytes((double)fattn_ctx_mem(s->rank->ctx).peak, memory));
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

bool report_plot(session *s, const plot_level *levels, int n_levels) {
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
    text_of_count((double)s->last.targets, queries);
    if (isnan(s->last.right))
        printf("recall: loss %.4f of %s answers on unseen sequences\n", s->last.loss, queries);
    else
        printf("recall: %.2f %% of %s answers right on unseen sequences (guessing among the "
               "values in sight: %.1f %%), loss %.4f\n",
               100 * s->last.right, queries, 100 / pairs, s->last.loss);
    const plot_level levels[] = {{"no idea", log((double)s->task->vocab)}, {"values in sight", log(pairs)}};
    if (s->o.plot && !report_plot(s, levels, 2)) return CLI_FAILURE;
    if (s->o.target <= 0 || s->last.right >= s->o.target) return CLI_OK;
    return cli_fail(CLI_FAILURE, "%.2f %% of the answers are right, not %.2f %%: more --steps?", 100 * s->last.right,
                    100 * s->o.target);
}

static int print_sample(session *s) {
    fattn_tape *tape;
    const fattn_status status = trainer_lend_tape(&s->r, &tape);
    if (status) return rank_failed(s->rank, status, "sample");
    const sample_options options = {
        .temperature = s->o.temperature, .top_k = s->o.top_k, .top_p = s->o.top_p, .seed = (uint64_t)s->o.seed};
    printf("sample (temperature %.2g):\n", s->o.temperature);
    const int code = text_sample(s->rank->ctx, s->r.model, tape, s->o.task == TASK_SHARDS ? &s->setup->tokens : NULL,
                                 &options, s->o.prompt ? s->o.prompt : "", s->o.sample);
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
    if (s->o.plot && !report_plot(s, levels, NGRAM_ORDERS)) return CLI_FAILURE;
    return code;
}

/* Speed after the first steps. Operations: 6 per parameter and token, plus those of causal attention,
   forward and backward (7 products, each over half of the N x N matrix). */
static int summarize_speed(session *s) {
    char rate[32], memory[32];
    const train_options *o = &s->o;
    const double tokens = (double)((s->r.step - s->warm_step) * trainer_sequences(&s->r) * o->context);
    const double time = s->r.elapsed - s->warm_elapsed, speed = time > 0 && tokens > 0 ? tokens / time : NAN;
    const double work = 6.0 * (double)model_size(s->r.model) + 7.0 * (double)(o->layers * o->context * o->channels);
    text_of_bytes((double)fattn_ctx_mem(s->rank->ctx).peak, memory);
    if (isnan(speed))
        printf("tokens: no speed before step %d, peak memory %s\n", WARM_STEPS + 1, memory);
    else
        printf("tokens: %s per second, %.1f TFLOP/s, peak memory %s\n", text_of_count(speed, rate),
               1e-12 * work * speed, memory);
    json_begin(&s->log);
    json_text(&s->log, "event", "speed");
    json_real(&s->log, "tokens_per_second", speed);
    json_real(&s->log, "flops", work * speed);
    json_int(&s->log, "peak_bytes", (int64_t)fattn_ctx_mem(s->rank->ctx).peak);
    json_end(&s->log);
    const plot_level levels[] = {{"no idea", log((double)s->task->vocab)}};
    return s->o.plot && !report_plot(s, levels, 1) ? CLI_FAILURE : CLI_OK;
}

static int summarize_shards(session *s) {
    char targets[32];
    printf("held out, nats per token (%s tokens): %.4f\n", text_of_count((double)s->last.targets, targets),
           s->last.loss);
    const int code = summarize_speed(s);
    return code || s->o.sample == 0 ? code : print_sample(s);
}

int report_summary(session *s) {
    char tokens[32], time[32];
    printf("%lld steps, %s tokens, %s\n", (long long)s->r.step,
           text_of_count((double)(s->r.cursor * s->o.context), tokens), text_of_seconds(s->r.elapsed, time));
    if (trainer_is_scaled(&s->r))
        printf("loss scale %g, %lld steps skipped\n", (double)s->r.scaling.scale,
               (long long)s->r.scaling.skipped_steps);
    static int (*const summaries[])(session *) = {summarize_recall, summarize_text, summarize_speed, summarize_shards};
    const int code = summaries[s->o.task](s);
    if (wants_checkpoints(s)) printf("checkpoint: %s/, step %lld\n", s->o.checkpoint, (long long)s->saved_step);
    if (s->drawn && !output_is_stdout(s->plot.path)) printf("loss curve: %s\n", s->o.plot);
    if (s->o.json && !json_failed(&s->log) && !output_is_stdout(s->log.to.path)) printf("log: %s\n", s->o.json);
    return code;
}

/* ---- the header ---- */

void report_header(const session *s) {
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
        printf("shards: %s, %s tokens; %lld tokens a step, %g %s\n", o->data,
               text_of_count((double)shards_tokens(s->task), train), (long long)(trainer_sequences(&s->r) * o->context),
               o->steps > 0 ? (double)o->steps : o->seconds, o->steps > 0 ? "steps" : "seconds");
    else if (o->task == TASK_TOKENS)
        printf("task: random tokens out of %lld\n", (long long)s->task->vocab);
    else
        printf("task: %lld key-value pairs, then every key once more; %lld symbols\n", (long long)o->context / 4,
               (long long)s->task->vocab);
    if (s->rank->size > 1)
        printf("ranks: %d %s, each with %lld of a step's %lld passes of %lld sequences%s\n", s->rank->size,
               s->rank->is_process ? "processes" : "threads", (long long)s->r.own_passes, (long long)s->r.config.passes,
               (long long)o->batch, o->zero ? "; they divide AdamW's state" : "");
    if (o->rounding != ROUNDING_MASTERS)
        printf("weights: %s F32 masters, rounded %s\n", o->rounding == ROUNDING_STOCHASTIC_MASTERS ? "with" : "without",
               o->rounding == ROUNDING_NEAREST ? "to nearest" : "stochastically");
    if (s->graphs)
        printf("steps: %s CUDA graph, after the first one\n", s->r.config.passes > 1 ? "each pass one" : "each one");
    else if (o->device == ON_CUDA)
        printf("steps: op by op (%s)\n", o->no_graph ? "--no-graph" : trainer_why_no_graph(&s->r));
    if (o->tf32 && o->device == ON_CUDA) printf("products: of operands rounded to TF32\n");
    if (o->fp8)
        printf("attention: on 8-bit copies in training (FATTN_FP8%s)%s\n", o->fp8_int8 ? ", FATTN_FP8_INT8" : "",
               o->fp8_renew ? ", again without them for backward (FATTN_FP8_RENEW)" : "");
    if (o->init) printf("begun with %s, after step %lld\n", o->init, (long long)s->r.step);
    if (s->setup->from)
        printf("resumed from %s, after step %lld\n", checkpoint_path(s->setup->from), (long long)s->r.step);
    cli_flush();
}
