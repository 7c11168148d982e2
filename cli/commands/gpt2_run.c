#include "cli/commands/gpt2_run.h"

#include <stdio.h>
#include <string.h>
#include <sys/stat.h>

bool gpt2_start_open(gpt2_start *s, const char *path) {
    struct stat status;
    *s = (gpt2_start){.state = ""};
    if (stat(path, &status) == 0 && S_ISDIR(status.st_mode)) {
        char names[CHECKPOINT_NAMES];
        if (checkpoint_after(path, -1, names) > 0) {
            cli_fail(CLI_FAILURE,
                     "%s has checkpoints of fattn train, not files of llm.c: fattn convert %s model.bin makes one",
                     path, path);
            return false;
        }
        if (!llmc_run_find(path, s->model, s->state)) {
            cli_fail(CLI_FAILURE, "%s has no finished checkpoint of llm.c: no file DONE_00000000 or of another step",
                     path);
            return false;
        }
    } else if ((size_t)snprintf(s->model, sizeof s->model, "%s", path) >= sizeof s->model) {
        cli_fail(CLI_FAILURE, "a path has %zu bytes, %zu are possible", strlen(path), sizeof s->model - 1);
        return false;
    }
    return llmc_model_sizes(s->model, &s->sizes);
}

int gpt2_start_options(const gpt2_start *s, const char *path, train_options *o) {
    const struct {
        const char *name;
        int64_t *option;
        int64_t size;
    } sizes[] = {{"layers", &o->layers, s->sizes.layers},
                 {"channels", &o->channels, s->sizes.channels},
                 {"heads", &o->heads, s->sizes.heads},
                 {"kv-heads", &o->kv_heads, s->sizes.heads},
                 {"positions", &o->positions, s->sizes.positions},
                 {"vocab", &o->vocab, s->sizes.vocab}};
    const bool own_vocab = o->task == TASK_RECALL || o->task == TASK_TEXT; /* then reading the file compares it */
    for (size_t i = 0; i < sizeof sizes / sizeof *sizes - own_vocab; ++i) {
        if (*sizes[i].option == -1) *sizes[i].option = sizes[i].size;
        if (*sizes[i].option != sizes[i].size)
            return cli_fail(CLI_USAGE, "--%s %lld: the model in %s has %lld", sizes[i].name,
                            (long long)*sizes[i].option, path, (long long)sizes[i].size);
    }
    if (o->arch == ARCH_SHIFT) return cli_fail(CLI_USAGE, "--arch fattn: the model in %s is a GPT-2", path);
    o->arch = ARCH_GPT2;
    /* The default, 1024, may be more than the model has. */
    if (o->context == -1 && o->preset == -1 && o->positions < 1024) o->context = o->positions;
    return CLI_OK;
}

bool gpt2_start_load(const gpt2_start *s, trainer *r, bool has_shards) {
    return llmc_model_read(s->model, r) &&
           (!s->state[0] || llmc_state_read(s->state, r, has_shards ? shards_loader(r->task) : NULL));
}

int open_tokenizer(train_options *o, tokenizer *t) {
    if (!o->tokenizer || t->n > 0) return CLI_OK;
    if (!tokenizer_read(t, o->tokenizer)) return CLI_FAILURE;
    if (o->vocab == -1) o->vocab = t->n;
    if (o->vocab == t->n) return CLI_OK;
    return cli_fail(CLI_USAGE, "--vocab %lld: %s has %lld tokens", (long long)o->vocab, o->tokenizer, (long long)t->n);
}

task *open_task(train_options *o) {
    const uint64_t seed = (uint64_t)o->seed;
    task *t = NULL;
    switch (o->task) {
    case TASK_RECALL: return recall_open(seed, o->context);
    case TASK_TEXT: return text_open(o->text, seed, o->context);
    case TASK_TOKENS: return tokens_open(seed, o->context, o->vocab);
    case TASK_SHARDS: t = shards_task(o->data, o->val, o->batch, o->context, o->vocab); break;
    default: break;
    }
    if (t && o->steps == 0 && o->seconds == 0) {
        const int64_t steps = shards_tokens(t) / o->total_batch;
        o->steps = steps > 0 ? steps : 1;
    }
    return t;
}
