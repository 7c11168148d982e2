/* fattn train: a small transformer learns a task; progress, log, checkpoints, a plot, a summary. */
#include "cli/base/cli.h"
#include "cli/base/device.h"
#include "cli/commands/train_session.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

bool wants_checkpoints(const session *s) { return strcmp(s->o.checkpoint, "-") != 0; }

/* ---- the loop ---- */

/* With a state that the ranks divide all take part, else rank 0 alone. */
static int save(session *s) {
    if (!wants_checkpoints(s) || s->saved_step == s->r.step) return CLI_OK;
    if ((rank_leads(s->rank) && !durable_hold(&s->lock, s->o.checkpoint)) ||
        !checkpoint_save(s->o.checkpoint, train_table, &s->o, train_not_stored, &s->r))
        return CLI_FAILURE;
    s->saved_step = s->r.step;
    return CLI_OK;
}

/* HellaSwag; a run that is interrupted meanwhile ends without it. */
static int ask_examples(session *s) {
    int64_t right, done;
    fattn_tape *tape;
    fattn_status status = trainer_lend_tape(&s->r, &tape);
    if (!status)
        status = hellaswag_count(&s->examples, s->rank->ctx, s->r.model, tape, s->o.examples, s->o.batch,
                                 cli_interrupted, &right, &done);
    if (status) return rank_failed(s->rank, status, "HellaSwag");
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
    if (status) return rank_failed(s->rank, status, "evaluation");
    report_evaluation(s, "eval");
    if (!isfinite(s->last.loss))
        return cli_fail(CLI_FAILURE, "the loss on held-out data after step %lld is %g: lower --lr?",
                        (long long)s->r.step, s->last.loss);
    const bool asks = s->examples.n > 0 && s->r.step > s->first_step && s->r.step > s->asked_step;
    const int code = asks ? ask_examples(s) : CLI_OK;
    if (code) return code;
    s->reached = s->o.target > 0 && s->last.right >= s->o.target;
    return CLI_OK;
}

/* Logs the history's last step, once. */
static void tell_step(session *s) {
    if (!rank_leads(s->rank) || s->told_step == s->r.history.steps) return;
    s->told_step = s->r.history.steps;
    report_step(s);
}

/* Completes the history, whose last step a graph brings with the next one. */
static int settle(session *s) {
    const fattn_status status = trainer_settle(&s->r);
    if (status) return rank_failed(s->rank, status, "training");
    tell_step(s);
    return CLI_OK;
}

static int take_step(session *s) {
    trainer *const r = &s->r;
    const fattn_status status = trainer_step(r);
    if (status) return rank_failed(s->rank, status, "training");
    tell_step(s);
    if (s->graphs && *trainer_why_no_graph(r)) {
        s->graphs = false;
        report_no_graph(s);
    }
    const bool warm = r->step > s->first_step + WARM_STEPS;
    const bool is_due = r->step % s->o.eval_every == 0 || r->step % s->o.checkpoint_every == 0 || trainer_used(r) >= 1;
    const int code = !warm || is_due ? settle(s) : CLI_OK;
    if (!warm) s->warm_step = r->step, s->warm_elapsed = r->elapsed;
    return code;
}

static void end_bar(void *bar) { progress_end(bar); }

/* Until the budget is used, the target is reached, or a signal interrupts: after the same step on all ranks. */
static int learn(session *s) {
    trainer *r = &s->r;
    const bool leads = rank_leads(s->rank);
    int code = CLI_OK, saved = CLI_OK;
    if (r->history.evals == 0) code = evaluate(s, s->o.eval_sequences);
    while (!code && trainer_used(r) < 1 && !s->reached && !trainer_interrupted(r)) {
        code = take_step(s);
        if (code) return code;
        if (r->step % s->o.eval_every == 0) code = evaluate(s, s->o.eval_sequences);
        if (!code && r->step % s->o.checkpoint_every == 0) code = saved = save(s);
        if (json_failed(&s->log)) code = CLI_FAILURE; /* json_close reports it */
        if (!code && leads) report_progress(s);
    }
    const int settled = settle(s);
    if (leads) progress_end(&s->bar);
    if (settled) return settled;
    /* save prints its error message; where all ranks take part, none does after a failure of one */
    if (!saved && (!code || (!s->o.zero && r->step > s->first_step))) saved = save(s);
    return code ? code : saved;
}

/* The final evaluation takes all held-out data; of shards, which may be huge, as much as the others. */
static int summarize(session *s) {
    const int code = evaluate(s, s->task->in_order ? s->o.eval_sequences : s->task->held_out);
    if (code || !rank_leads(s->rank)) return code;
    report_evaluation(s, "end");
    return report_summary(s);
}

/* ---- setting up ---- */

static bool same_folder(const char *a, const char *b) {
    struct stat x, y;
    return stat(a, &x) == 0 && stat(b, &y) == 0 && x.st_dev == y.st_dev && x.st_ino == y.st_ino;
}

/* Locks the folder for this run. It must have no checkpoints of another run, nor of this run after the step
   that it resumes from. */
static int claim_folder(session *s) {
    char names[CHECKPOINT_NAMES];
    const checkpoint *const from = s->setup->from;
    const char *folder = s->o.checkpoint;
    s->keep = -1;
    if (!wants_checkpoints(s)) return CLI_OK;
    if (!durable_hold(&s->lock, folder)) return CLI_FAILURE;
    s->same_folder = from && same_folder(s->setup->home, folder);
    if (s->same_folder) { /* a damaged checkpoint after the step has been reported, and need not be kept */
        const int64_t newest = checkpoint_newest(from);
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

/* Whether an output is none of the files that are read. */
static bool spares_inputs(const session *s, named_output to) {
    const train_options *const o = &s->o;
    const train_setup *const setup = s->setup;
    return output_spares(&to, o->tokenizer) && output_spares(&to, o->hellaswag) &&
           output_spares(&to, setup->start.model) && output_spares(&to, setup->start.state) &&
           (o->task != TASK_TEXT || corpus_each(o->text, output_spares, &to)) &&
           (o->task != TASK_SHARDS || shards_each(s->task, output_spares, &to)) &&
           (!setup->from ||
            (output_spares(&to, checkpoint_path(setup->from)) && checkpoint_each(setup->home, output_spares, &to)));
}

/* Rank 0's files. */
static int open_outputs(session *s) {
    const train_options *const o = &s->o;
    if (!spares_inputs(s, (named_output){"json", o->json}) || !spares_inputs(s, (named_output){"plot", o->plot}))
        return CLI_USAGE;
    const int code = claim_folder(s);
    if (code) return code;
    if (!output_open(&s->plot, o->plot, OUTPUT_LATER)) return CLI_FAILURE;
    const json_cut cut = o->overwrite ? JSON_CUT_ANY : o->same_log && s->same_folder ? JSON_CUT_OWN : JSON_CUT_NONE;
    const bool logs = s->setup->from ? json_resume(&s->log, o->json, s->r.step, s->r.history.loss, cut)
                                     : json_open(&s->log, o->json, false);
    if (!logs) return CLI_FAILURE;
    /* After this nothing can fail before the first step. */
    const bool clear = wants_checkpoints(s) && o->overwrite;
    return !clear || checkpoint_remove_after(o->checkpoint, s->keep) ? CLI_OK : CLI_FAILURE;
}

/* FNV-1a of the options that are numbers, except those that ranks may have of their own. */
static int64_t hash_of(const train_options *o) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (const cli_option *p = train_table; p->name; ++p) {
        const bool counts = p->type == CLI_INT || p->type == CLI_REAL;
        const unsigned char *const bytes = (const unsigned char *)o + p->offset;
        for (size_t i = 0; counts && strcmp(p->name, "threads") != 0 && i < sizeof(int64_t); ++i)
            hash = (hash ^ bytes[i]) * 0x100000001b3ull;
    }
    return (int64_t)(hash >> 1);
}

/* That the ranks train the same: processes may have been started with other options, or see other files. */
static int agree(const session *s) {
    const train_options *const o = &s->o;
    const trainer *const r = &s->r;
    static const char *const names[] = {"the number of parameters",
                                        "the step",
                                        "the fingerprint of the data",
                                        "the dtype (0 f32, 1 bf16)",
                                        "--zero",
                                        "--rounding (0 masters, 1 stochastic, 2 nearest, 3 stochastic-masters)",
                                        "--deterministic",
                                        "--batch",
                                        "--steps",
                                        "a hash of all options",
                                        "the task",
                                        "the folder"};
    const int64_t values[] = {model_size(r->model),
                              r->step,
                              (int64_t)s->task->fingerprint,
                              o->dtype,
                              o->zero,
                              o->rounding,
                              o->deterministic,
                              o->batch,
                              o->steps,
                              hash_of(o),
                              o->task,
                              wants_checkpoints(s)};
    _Static_assert(sizeof values / sizeof *values == sizeof names / sizeof *names, "a name for each value");
    const fattn_status status = rank_agree(s->rank, names, values, sizeof values / sizeof *values);
    return status ? rank_failed(s->rank, status, "ranks") : CLI_OK;
}

/* One rank's model and data. */
static int set_up_rank(session *s) {
    train_options *const o = &s->o;
    const train_setup *const setup = s->setup;
    s->task = open_task(o);
    if (!s->task) return CLI_FAILURE;
    if (o->hellaswag && rank_leads(s->rank) && !hellaswag_open(&s->examples, o->hellaswag, o->context, o->vocab))
        return CLI_FAILURE;
    const model_config shape = train_model_config(o, s->task->vocab);
    trainer_config config = train_trainer_config(o);
    config.rank = s->rank;
    const fattn_status status = trainer_create(&s->r, s->rank->ctx, s->task, &shape, &config);
    if (status) return rank_failed(s->rank, status, "model");
    const int64_t counted = trainer_counted_batch(s->task, &shape);
    char largest[32] = "no batch";
    if (counted > 0) snprintf(largest, sizeof largest, "--batch %lld", (long long)counted);
    if (o->target > 0 && o->batch > counted)
        return cli_fail(CLI_USAGE,
                        "--target: of batches of %lld x %lld tokens with %lld symbols right answers are not counted; "
                        "%s would be counted, --target 0 needs none",
                        (long long)o->batch, (long long)o->context, (long long)s->task->vocab, largest);
    if (setup->from && !checkpoint_restore(setup->from, &s->r)) return CLI_FAILURE;
    if (o->init && !gpt2_start_load(&setup->start, &s->r, o->task == TASK_SHARDS)) return CLI_FAILURE;
    const history *h = &s->r.history;
    if (h->evals > 0) s->last = (evaluation){.loss = h->eval_loss[h->evals - 1], .right = h->eval_right[h->evals - 1]};
    /* Before the ranks compare what each has read: a run that saves there meanwhile is the reason if that differs. */
    if (setup->from && rank_leads(s->rank) && wants_checkpoints(s) && same_folder(setup->home, o->checkpoint) &&
        !durable_hold(&s->lock, o->checkpoint))
        return CLI_FAILURE;
    const int code = agree(s);
    return code || !rank_leads(s->rank) ? code : open_outputs(s);
}

static int run_rank(rank *k, void *arg) {
    const train_setup *const setup = arg;
    session s = {.o = setup->o, .setup = setup, .rank = k, .saved_step = -1};
    int code = set_up_rank(&s);
    if (!code) {
        s.first_step = s.told_step = s.r.step;
        s.graphs = !*trainer_why_no_graph(&s.r);
        s.r.origin = seconds_now() - s.r.elapsed;
        if (rank_leads(k)) report_header(&s);
        report_start(&s);
        cli_catch_interrupts();
        if (rank_leads(k)) {
            progress_begin(&s.bar, stderr, "step", s.r.step, s.r.step + 1);
            cli_before_messages(end_bar, &s.bar);
        }
        code = learn(&s);
        if (rank_leads(k)) {
            cli_before_messages(NULL, NULL);
            progress_end(&s.bar);
        }
        if (!code && trainer_interrupted(&s.r)) {
            code = CLI_INTERRUPTED;
            if (rank_leads(k) && s.o.plot && s.r.step > 0 && !report_plot(&s, NULL, 0)) code = CLI_FAILURE;
            cli_fail(code, "interrupted after step %lld%s%s", (long long)s.r.step,
                     wants_checkpoints(&s) ? "; continue with --resume " : "",
                     wants_checkpoints(&s) ? s.o.checkpoint : "");
        } else if (!code) {
            if (rank_leads(k)) cli_release_interrupts(); /* nothing is left to be saved */
            code = summarize(&s);
        }
    }
    if (!json_close(&s.log) && !code) code = CLI_FAILURE;
    output_close(&s.plot);
    durable_release(&s.lock);
    rank_leaves(k, code);
    trainer_destroy(&s.r);
    if (s.task) s.task->close(s.task);
    hellaswag_close(&s.examples);
    return code;
}

/* The checkpoint to resume from, and the complete options. */
static int set_up(train_setup *s) {
    train_options *const o = &s->o;
    if (o->resume) {
        s->from = checkpoint_open(o->resume);
        if (!s->from) return CLI_FAILURE;
        snprintf(s->home, sizeof s->home, "%s", checkpoint_path(s->from));
        char *slash = strrchr(s->home, '/');
        if (slash)
            slash[slash == s->home] = 0; /* "/" stays */
        else
            snprintf(s->home, sizeof s->home, ".");
        if (!o->checkpoint) o->checkpoint = s->home; /* the folder may have been moved */
    }
    if (o->init && o->resume) return cli_fail(CLI_USAGE, "--init is for a new run, --resume goes on with one");
    if (o->init && !gpt2_start_open(&s->start, o->init)) return CLI_FAILURE;
    int code = o->init ? gpt2_start_options(&s->start, o->init, o) : CLI_OK;
    if (!code && !o->resume) code = open_tokenizer(o, &s->tokens);
    if (!code) code = train_options_complete(o, s->from);
    return code ? code : open_tokenizer(o, &s->tokens);
}

static ranks_device device_of(const train_options *o) {
    const trainer_config config = train_trainer_config(o);
    return (ranks_device){.device = o->device,
                          .flags = (o->deterministic ? FATTN_CTX_DETERMINISTIC : FATTN_CTX_TUNE) |
                                   (o->tf32 ? FATTN_CTX_TF32 : 0u),
                          .threads = o->threads,
                          .own_gpus = o->gpus > 0,
                          .sums = trainer_sums(&config, (int)o->ranks)};
}

static int run(const void *options, int n_operands, char *const *operands) {
    (void)n_operands, (void)operands;
    train_setup setup = {.o = *(const train_options *)options};
    rank_group group = {0};
    int code = train_options_place(&setup.o);
    if (!code) code = ranks_begin(&group, setup.o.ranks, setup.o.time_limit);
    if (!code) {
        setup.o.ranks = group.size;
        code = set_up(&setup);
    }
    if (!code) {
        const ranks_device device = device_of(&setup.o);
        code = ranks_open(&group, &device);
    }
    if (!code) code = ranks_run(&group, run_rank, &setup);
    code = ranks_end(&group, code);
    tokenizer_free(&setup.tokens);
    checkpoint_close(setup.from);
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
