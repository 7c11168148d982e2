/* fattn eval: a GPT-2 from files of llm.c: loss on token shards, HellaSwag, a sample. */
#include "cli/base/cli.h"
#include "cli/base/device.h"
#include "cli/commands/gpt2_run.h"
#include "cli/commands/model_text.h"
#include "cli/llmc/hellaswag.h"
#include "cli/output/json.h"
#include "cli/output/progress.h"

#include <math.h>
#include <stddef.h>
#include <stdio.h>

typedef struct eval_options {
    const char *val, *hellaswag, *tokenizer, *prompt, *json;
    int64_t sequences, examples, sample, top_k, seed, context, batch, threads;
    double temperature, top_p;
    int device, dtype;
} eval_options;

static const double ANY = 9e15;
#define FIELD(name) offsetof(eval_options, name)
static const cli_option table[] = {
    {"val", CLI_TEXT, FIELD(val), "PATTERN", 0, 0, NULL, "token files whose loss is computed"},
    {"sequences", CLI_INT, FIELD(sequences), "N", 1, ANY, NULL, "of these files at most"},
    {"hellaswag", CLI_TEXT, FIELD(hellaswag), "FILE", 0, 0, NULL, "examples in llm.c's format"},
    {"examples", CLI_INT, FIELD(examples), "N", 1, ANY, NULL, "of HellaSwag at most"},
    {"tokenizer", CLI_TEXT, FIELD(tokenizer), "FILE", 0, 0, NULL, "of the sample, llm.c's"},
    {"sample", CLI_INT, FIELD(sample), "N", 0, 1 << 20, NULL, "tokens to write"},
    {"prompt", CLI_TEXT, FIELD(prompt), "TEXT", 0, 0, NULL, "text that the sample continues; none: a new document"},
    {"temperature", CLI_REAL, FIELD(temperature), "T", 0, 100, NULL, "of the sample; 0 = greedy"},
    {"top-k", CLI_INT, FIELD(top_k), "K", 0, ANY, NULL, "choose among the K likeliest tokens; 0 = all"},
    {"top-p", CLI_REAL, FIELD(top_p), "P", 1e-6, 1, NULL,
     "of these among the likeliest whose probabilities sum to P; 1 = all"},
    {"seed", CLI_INT, FIELD(seed), "N", 0, ANY, NULL, "of the sample"},
    {"context", CLI_INT, FIELD(context), "N", 0, 1 << 20, NULL, "tokens of a sequence; 0 = the model's positions"},
    {"batch", CLI_INT, FIELD(batch), "N", 1, 65536, NULL, "sequences at a time"},
    {"device", CLI_CHOICE, FIELD(device), "D", 0, 0, "cpu|cuda", "where to compute"},
    {"dtype", CLI_CHOICE, FIELD(dtype), "T", 0, 0, "f32|bf16|f16", "of weights and activations"},
    {"threads", CLI_INT, FIELD(threads), "N", 0, 1024, NULL, "0 = one per processor"},
    {"json", CLI_TEXT, FIELD(json), "FILE", 0, 0, NULL, "results as a JSON line; - = standard output"},
    {NULL}};
static const eval_options defaults = {
    .sequences = 80, .examples = 1 << 20, .temperature = 1, .top_p = 1, .seed = 1, .batch = 4};

typedef struct evaluating {
    eval_options o;
    gpt2_start start;
    tokenizer tokens;
    fattn_ctx *ctx;
    task *task;
    trainer r;
    evaluation of_val;
    int64_t right, examples; /* of HellaSwag */
    json log;
    char why[DEVICE_MESSAGE];
} evaluating;

/* Whether --json is none of the files that are read. */
static bool spares_inputs(const evaluating *e) {
    const eval_options *const o = &e->o;
    named_output to = {"json", o->json};
    return output_spares(&to, e->start.model) && output_spares(&to, o->hellaswag) && output_spares(&to, o->tokenizer) &&
           (!o->val || shards_each(e->task, output_spares, &to));
}

static int set_up(evaluating *e, const char *path) {
    eval_options *const o = &e->o;
    if (o->sample > 0 && !o->tokenizer) return cli_fail(CLI_USAGE, "--sample needs the tokens' text: --tokenizer FILE");
    if (!o->val && !o->hellaswag && o->sample == 0)
        return cli_fail(CLI_USAGE, "nothing to do: --val, --hellaswag or --sample");
    if (!gpt2_start_open(&e->start, path)) return CLI_FAILURE;
    const llmc_model *const m = &e->start.sizes;
    if (o->context == 0) o->context = m->positions;
    if (o->context > m->positions)
        return cli_fail(CLI_USAGE, "--context %lld: the model has %lld positions", (long long)o->context,
                        (long long)m->positions);
    if (o->tokenizer && !tokenizer_read(&e->tokens, o->tokenizer)) return CLI_FAILURE;
    if (o->tokenizer && e->tokens.n != m->vocab)
        return cli_fail(CLI_FAILURE, "%s has %lld tokens, the model %lld", o->tokenizer, (long long)e->tokens.n,
                        (long long)m->vocab);
    e->task =
        o->val ? shards_task(o->val, o->val, o->batch, o->context, m->vocab) : tokens_open(0, o->context, m->vocab);
    if (!e->task) return CLI_FAILURE;
    if (!spares_inputs(e)) return CLI_USAGE;
    if (!json_open(&e->log, o->json, false)) return CLI_FAILURE;
    const int code = device_open(o->device, 0, o->threads, e->why, &e->ctx);
    if (code) return code;
    const model_config shape = {.arch = ARCH_GPT2,
                                .vocab = m->vocab,
                                .context = o->context,
                                .positions = m->positions,
                                .channels = m->channels,
                                .layers = (int)m->layers,
                                .heads = (int)m->heads,
                                .kv_heads = (int)m->heads,
                                .mlp_ratio = 4,
                                .dtype = train_dtype(o->dtype)};
    const trainer_config config = {.batch = o->batch, .steps = 1, .lr = 1};
    const fattn_status s = trainer_create(&e->r, e->ctx, e->task, &shape, &config);
    if (s) return cli_status(e->ctx, s, "model");
    e->start.state[0] = 0;
    return gpt2_start_load(&e->start, &e->r, false) ? CLI_OK : CLI_FAILURE;
}

static int print_loss(evaluating *e) {
    evaluation *const v = &e->of_val;
    char tokens[32];
    const fattn_status s = trainer_evaluate(&e->r, e->o.sequences, v);
    if (s) return cli_status(e->ctx, s, "evaluation");
    if (!isfinite(v->loss))
        return cli_fail(CLI_FAILURE, "%s: the loss of %lld tokens is %g%s", e->o.val, (long long)v->targets, v->loss,
                        train_dtype(e->o.dtype) == FATTN_F16 ? ": a dtype of more range than f16?" : "");
    printf("loss: %.6f nats per token (%s tokens)\n", v->loss, text_of_count((double)v->targets, tokens));
    return CLI_OK;
}

static int print_hellaswag(evaluating *e) {
    hellaswag h;
    if (!hellaswag_open(&h, e->o.hellaswag, e->o.context, e->start.sizes.vocab)) return CLI_FAILURE;
    const fattn_status s =
        hellaswag_count(&h, e->ctx, e->r.model, e->r.tape, e->o.examples, e->o.batch, NULL, &e->right, &e->examples);
    hellaswag_close(&h);
    if (s) return cli_status(e->ctx, s, "HellaSwag");
    printf("HellaSwag: %lld of %lld right, %.4f (chance: 0.25)\n", (long long)e->right, (long long)e->examples,
           (double)e->right / (double)e->examples);
    return CLI_OK;
}

static int print_sample(evaluating *e) {
    const eval_options *const o = &e->o;
    const sample_options options = {
        .temperature = o->temperature, .top_k = o->top_k, .top_p = o->top_p, .seed = (uint64_t)o->seed};
    const int code =
        text_sample(e->ctx, e->r.model, e->r.tape, &e->tokens, &options, o->prompt ? o->prompt : "", o->sample);
    putchar('\n');
    return code;
}

static void report(evaluating *e) {
    json_begin(&e->log);
    json_text(&e->log, "event", "eval");
    if (e->o.val) {
        json_real(&e->log, "val_loss", e->of_val.loss);
        json_int(&e->log, "val_targets", e->of_val.targets);
    }
    if (e->o.hellaswag) {
        json_int(&e->log, "hellaswag_right", e->right);
        json_int(&e->log, "hellaswag_examples", e->examples);
    }
    json_end(&e->log);
}

static int run(const void *options, int n_operands, char *const *operands) {
    evaluating e = {.o = *(const eval_options *)options};
    if (n_operands != 1) return cli_fail(CLI_USAGE, "one operand is needed: MODEL");
    int code = set_up(&e, operands[0]);
    if (!code && e.o.val) code = print_loss(&e);
    if (!code && e.o.hellaswag) code = print_hellaswag(&e);
    if (!code && e.o.sample > 0) code = print_sample(&e);
    if (!code) report(&e);
    if (!json_close(&e.log) && !code) code = CLI_FAILURE;
    trainer_destroy(&e.r);
    if (e.task) e.task->close(e.task);
    tokenizer_free(&e.tokens);
    fattn_ctx_destroy(e.ctx);
    return code;
}

const cli_command cmd_eval = {
    .name = "eval",
    .operands = "MODEL",
    .summary = "Evaluate a GPT-2: loss on token files, HellaSwag, a sample",
    .details = "MODEL: llm.c's model file, or the folder of a run of llm.c (its newest model). Of a\n"
               "checkpoint of fattn train, fattn convert makes such a file.",
    .options = table,
    .defaults = &defaults,
    .size = sizeof defaults,
    .run = run,
};
