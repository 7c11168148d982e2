/* The task over shards. Sequence number i is row i % batch of sample number i / batch. */
#include "cli/base/cli.h"
#include "cli/llmc/shards.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Samples of some files, the last one read kept. */
typedef struct series {
    shards files;
    loader order;
    int64_t number;  /* of the sample in `tokens`; -1: none */
    int32_t *tokens; /* [batch * context + 1] */
} series;

typedef struct shards_task_data {
    task base;
    int64_t batch;
    series train, val;
} shards_task_data;

static bool series_open(series *s, const char *pattern, int64_t batch, int64_t context, bool shuffled) {
    s->number = -1;
    if (!shards_open(&s->files, pattern, batch, context) || !loader_open(&s->order, &s->files, shuffled)) return false;
    s->tokens = malloc((size_t)(s->files.sample_tokens + 1) * sizeof *s->tokens);
    if (s->tokens) return true;
    cli_fail(CLI_FAILURE, "no memory for %lld tokens", (long long)s->files.sample_tokens);
    return false;
}

static void series_close(series *s) {
    free(s->tokens);
    loader_close(&s->order);
    shards_close(&s->files);
}

/* Zeros after a failure, which the task's error says. */
static void sequence(shards_task_data *t, series *s, int64_t index, int32_t *ids, int32_t *targets) {
    const int64_t sample = index / t->batch, n = t->base.context, first = index % t->batch * n;
    memset(ids, 0, (size_t)n * sizeof *ids);
    memset(targets, 0, (size_t)n * sizeof *targets);
    if (t->base.error[0]) return;
    if (s->number != sample) {
        int64_t shard, number;
        loader_go(&s->order, sample);
        loader_take(&s->order, &shard, &number);
        s->number = sample;
        if (!shards_read(&s->files, shard, number * s->files.sample_tokens, s->files.sample_tokens + 1, t->base.vocab,
                         s->tokens, t->base.error, sizeof t->base.error))
            return;
    }
    memcpy(ids, s->tokens + first, (size_t)n * sizeof *ids);
    memcpy(targets, s->tokens + first + 1, (size_t)n * sizeof *targets);
}

static void train(task *base, int64_t index, int32_t *ids, int32_t *targets) {
    shards_task_data *t = (shards_task_data *)base;
    sequence(t, &t->train, index, ids, targets);
}

static void test(task *base, int64_t index, int32_t *ids, int32_t *targets) {
    shards_task_data *t = (shards_task_data *)base;
    sequence(t, &t->val, index, ids, targets);
}

static void close_task(task *base) {
    shards_task_data *t = (shards_task_data *)base;
    series_close(&t->train);
    series_close(&t->val);
    free(t);
}

/* FNV-1a of how many tokens each file has. Names may change, and reading all tokens would take long. */
static uint64_t fingerprint_of(const shards *s) {
    uint64_t hash = 0xcbf29ce484222325ull;
    for (int64_t i = 0; i < s->n; ++i)
        for (int bit = 0; bit < 32; bit += 8)
            hash = (hash ^ ((uint64_t)s->at[i].tokens >> bit & 255)) * 0x100000001b3ull;
    return hash;
}

task *shards_task(const char *train_pattern, const char *val_pattern, int64_t batch, int64_t context, int64_t vocab) {
    shards_task_data *t = calloc(1, sizeof *t);
    if (!t) {
        cli_fail(CLI_FAILURE, "no memory");
        return NULL;
    }
    if (!series_open(&t->train, train_pattern, batch, context, true) ||
        !series_open(&t->val, val_pattern, batch, context, false)) {
        close_task(&t->base);
        return NULL;
    }
    t->batch = batch;
    t->base = (task){.vocab = vocab,
                     .context = context,
                     .held_out = t->val.files.samples * batch,
                     .fingerprint = fingerprint_of(&t->train.files),
                     .in_order = true,
                     .train = train,
                     .test = test,
                     .close = close_task};
    return &t->base;
}

loader *shards_loader(task *t) { return &((shards_task_data *)t)->train.order; }
int64_t shards_tokens(const task *t) { return ((const shards_task_data *)t)->train.files.tokens; }
int64_t shards_batch(const task *t) { return ((const shards_task_data *)t)->batch; }

bool shards_each(const task *t, file_visit *f, void *arg) {
    const shards *const train = &((const shards_task_data *)t)->train.files;
    const shards *const val = &((const shards_task_data *)t)->val.files;
    bool ok = true;
    for (int64_t i = 0; ok && i < train->n; ++i) ok = f(arg, train->at[i].path);
    for (int64_t i = 0; ok && i < val->n; ++i) ok = f(arg, val->at[i].path);
    return ok;
}
