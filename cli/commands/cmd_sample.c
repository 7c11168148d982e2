/* fattn sample: text from a checkpoint of fattn train. */
#include "cli/base/cli.h"
#include "cli/base/device.h"
#include "cli/commands/gpt2_run.h"
#include "cli/commands/model_text.h"
#include "cli/output/files.h"
#include "cli/output/progress.h"

#include <errno.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct sampling_options {
    const char *checkpoint, *prompt, *prompt_file, *tokenizer;
    int64_t tokens, top_k, seed, threads;
    double temperature, top_p;
    int device, dtype;
} sampling_options;

static const double ANY = 9e15;
#define FIELD(name) offsetof(sampling_options, name)
static const cli_option table[] = {
    {"checkpoint", CLI_TEXT, FIELD(checkpoint), "DIR", 0, 0, NULL,
     "of fattn train: its folder, of which the newest is taken, or a file"},
    {"prompt", CLI_TEXT, FIELD(prompt), "TEXT", 0, 0, NULL, "text that is continued; none: a new text begins"},
    {"prompt-file", CLI_TEXT, FIELD(prompt_file), "FILE", 0, 0, NULL, "the same from a file; - = standard input"},
    {"tokens", CLI_INT, FIELD(tokens), "N", 0, ANY, NULL, "tokens to write after it; bytes of --task text"},
    {"temperature", CLI_REAL, FIELD(temperature), "T", 0, 100, NULL,
     "divides the logits; 0 = always the likeliest token"},
    {"top-k", CLI_INT, FIELD(top_k), "K", 0, ANY, NULL, "choose among the K likeliest tokens; 0 = all"},
    {"top-p", CLI_REAL, FIELD(top_p), "P", 1e-6, 1, NULL,
     "of these among the likeliest whose probabilities sum to P; 1 = all"},
    {"seed", CLI_INT, FIELD(seed), "N", 0, ANY, NULL, "the same seed, the same text"},
    {"tokenizer", CLI_TEXT, FIELD(tokenizer), "FILE", 0, 0, NULL,
     "llm.c's, of a run on shards; the run's own unless given"},
    {"device", CLI_CHOICE, FIELD(device), "D", 0, 0, "cpu|cuda", "where to compute"},
    {"dtype", CLI_CHOICE, FIELD(dtype), "T", 0, 0, "f32|bf16|f16",
     "of weights and activations, whatever the run's was"},
    {"threads", CLI_INT, FIELD(threads), "N", 0, 1024, NULL, "0 = one per processor"},
    {NULL}};
static const sampling_options defaults = {.tokens = 400, .temperature = 0.8, .top_p = 1, .seed = 1};

typedef struct sampling {
    sampling_options o;
    train_options run;
    checkpoint *from;
    fattn_ctx *ctx;
    tokenizer tokens; /* n 0: a symbol is a byte */
    model *model;
    fattn_tape *tape;
    generator *generator;
    char *text; /* the prompt, text_bytes of it */
    int64_t text_bytes;
    token_list prompt;
    char why[DEVICE_MESSAGE];
} sampling;

/* ---- the prompt ---- */

enum { LARGEST_PROMPT = 1 << 26 };

static int read_stream(sampling *s, FILE *file, const char *name) {
    int64_t room = 0;
    size_t n = 1;
    while (n > 0) {
        if (s->text_bytes == room) {
            room = 2 * room + 4096;
            char *const larger = realloc(s->text, (size_t)room);
            if (!larger) return cli_fail(CLI_FAILURE, "no memory for a prompt of %lld bytes", (long long)room);
            s->text = larger;
        }
        n = fread(s->text + s->text_bytes, 1, (size_t)(room - s->text_bytes), file);
        s->text_bytes += (int64_t)n;
        if (s->text_bytes > LARGEST_PROMPT)
            return cli_fail(CLI_FAILURE, "%s: a prompt may have %d bytes at most", name, LARGEST_PROMPT);
    }
    if (ferror(file)) return cli_fail(CLI_FAILURE, "cannot read %s: %s", name, strerror(errno));
    if (s->text_bytes == 0) return cli_fail(CLI_FAILURE, "%s is empty: a prompt has at least 1 byte", name);
    return CLI_OK;
}

static int read_prompt(sampling *s) {
    const sampling_options *const o = &s->o;
    if (o->prompt && o->prompt_file) return cli_fail(CLI_USAGE, "--prompt and --prompt-file: only one of them");
    if (o->prompt_file && strcmp(o->prompt_file, "-") == 0) return read_stream(s, stdin, "standard input");
    if (o->prompt_file) {
        FILE *const file = input_open(o->prompt_file);
        if (!file) return CLI_FAILURE;
        const int code = read_stream(s, file, o->prompt_file);
        fclose(file);
        return code;
    }
    if (!o->prompt) return CLI_OK;
    s->text = strdup(o->prompt);
    if (!s->text) return cli_fail(CLI_FAILURE, "no memory for a prompt");
    s->text_bytes = (int64_t)strlen(s->text);
    return CLI_OK;
}

/* ---- the model ---- */

static int read_tokenizer(sampling *s) {
    const train_options *const run = &s->run;
    const char *const path = s->o.tokenizer ? s->o.tokenizer : run->tokenizer;
    if (run->task == TASK_RECALL || run->task == TASK_TOKENS)
        return cli_fail(CLI_FAILURE, "%s was trained on %s, which have no text: --task text or shards has some",
                        checkpoint_path(s->from),
                        run->task == TASK_RECALL ? "key-value pairs (--task recall)" : "random tokens (--task tokens)");
    if (run->task == TASK_TEXT && s->o.tokenizer)
        return cli_fail(CLI_USAGE, "--tokenizer %s: the tokens of %s are bytes (--task text)", path,
                        checkpoint_path(s->from));
    if (run->task == TASK_TEXT) return CLI_OK;
    if (!path)
        return cli_fail(CLI_USAGE, "%s was trained on tokens without a tokenizer: --tokenizer FILE names one",
                        checkpoint_path(s->from));
    if (!tokenizer_read(&s->tokens, path)) return CLI_FAILURE;
    if (s->tokens.n == run->vocab) return CLI_OK;
    return cli_fail(CLI_FAILURE, "%s has %lld tokens, the model %lld", path, (long long)s->tokens.n,
                    (long long)run->vocab);
}

static int set_up(sampling *s) {
    const sampling_options *const o = &s->o;
    if (!o->checkpoint) return cli_fail(CLI_USAGE, "no model given: --checkpoint DIR, the folder of a fattn train");
    int code = read_prompt(s);
    if (code) return code;
    s->from = checkpoint_open(o->checkpoint);
    if (!s->from) return CLI_FAILURE;
    s->run = train_unset;
    s->run.dtype = o->dtype;
    code = train_options_complete(&s->run, s->from);
    if (!code) code = read_tokenizer(s);
    const char *const text = s->text ? s->text : s->tokens.n > 0 ? "" : "\n";
    if (!code && !text_prompt(s->tokens.n > 0 ? &s->tokens : NULL, text,
                              s->text ? s->text_bytes : (int64_t)strlen(text), &s->prompt))
        code = CLI_FAILURE;
    if (!code) code = device_open(o->device, 0, o->threads, s->why, &s->ctx);
    if (code) return code;
    model_config shape = train_model_config(&s->run, s->tokens.n > 0 ? s->tokens.n : TEXT_SYMBOLS);
    shape.frozen = true;
    fattn_status status = model_create(s->ctx, &shape, &s->model);
    if (!status) status = fattn_tape_create(s->ctx, &s->tape);
    if (!status) status = generator_create(s->ctx, s->model, s->tape, &s->generator);
    if (status) return cli_status(s->ctx, status, "model");
    return checkpoint_read_model(s->from, s->ctx, s->model) ? CLI_OK : CLI_FAILURE;
}

/* ---- the text ---- */

static const char *rate_of(int64_t tokens, double seconds, char *buffer) {
    return text_of_count(seconds > 0 ? (double)tokens / seconds : 0, buffer);
}

static int write_text(sampling *s) {
    const sampling_options *const o = &s->o;
    const sample_options options = {
        .temperature = o->temperature, .top_k = o->top_k, .top_p = o->top_p, .seed = (uint64_t)o->seed};
    const int64_t context = s->run.context, n = s->prompt.n < context ? s->prompt.n : context;
    if (n < s->prompt.n)
        fprintf(stderr, "fattn sample: the prompt has %lld tokens, of which the last %lld, the context, count\n",
                (long long)s->prompt.n, (long long)n);
    text_output to = {0};
    int64_t written = 0;
    const double begin = seconds_now();
    fattn_status status = text_begin(s->generator, &s->prompt);
    const double begun = seconds_now();
    bool ok = !status && (!s->text || text_put(&to, (const unsigned char *)s->text, s->text_bytes));
    if (ok)
        status = text_continue(s->generator, s->tokens.n > 0 ? &s->tokens : NULL, &options, o->tokens, &to, &written);
    const double end = seconds_now();
    if (ok) putchar('\n');
    if (status) return cli_status(s->ctx, status, "sample");
    if (!ok || written < o->tokens || !cli_flush()) return CLI_FAILURE; /* cli_main says why */
    char prefill[32], rate[32];
    fprintf(stderr, "prompt: %lld tokens, %s per second; text: %lld tokens, %s per second\n", (long long)n,
            rate_of(n, begun - begin, prefill), (long long)written, rate_of(written, end - begun, rate));
    return CLI_OK;
}

static int run(const void *options, int n_operands, char *const *operands) {
    (void)n_operands, (void)operands;
    sampling s = {.o = *(const sampling_options *)options};
    int code = set_up(&s);
    if (!code) code = write_text(&s);
    generator_destroy(s.generator);
    fattn_tape_destroy(s.tape);
    model_destroy(s.model);
    tokenizer_free(&s.tokens);
    free(s.prompt.token);
    free(s.text);
    fattn_ctx_destroy(s.ctx);
    checkpoint_close(s.from);
    return code;
}

const cli_command cmd_sample = {
    .name = "sample",
    .summary = "Write text with a checkpoint of fattn train",
    .details = "The prompt and what follows it go to standard output, each character as soon as it\n"
               "is whole, with a line end behind the last one; the numbers of tokens and tokens per\n"
               "second to standard error. Temperature, top-k and top-p apply in this order.\n"
               "\n"
               "A token depends on the tokens before it, as many as the model's context has. When\n"
               "these are all in use, the model goes on with the last half of the context alone, so\n"
               "that it sees between half of the context and all of it. That differs from a window\n"
               "that moves by one token: every token would then have to be computed anew for each\n"
               "one that is written. Of a prompt longer than the context only the end counts.",
    .options = table,
    .defaults = &defaults,
    .size = sizeof defaults,
    .run = run,
};
