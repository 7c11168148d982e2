#include "cli/base/cli.h"
#include "cli/random/random.h"
#include "cli/tasks/task.h"

#include <stdlib.h>
#include <string.h>

typedef struct text_task {
    task base;
    corpus text;
    uint64_t seed;
    int64_t windows; /* of an epoch */
} text_task;

/* A random permutation of 0..n-1 that depends on seed and epoch, without a table: a Feistel network over the
   next even power of two, repeated until the result is below n. */
static int64_t shuffled(uint64_t seed, int64_t epoch, int64_t i, int64_t n) {
    enum { ROUNDS = 4 };
    int half = 1;
    while (n > (int64_t)1 << 2 * half) ++half;
    const uint32_t mask = (1u << half) - 1;
    uint64_t x = (uint64_t)i;
    do {
        uint32_t left = (uint32_t)(x >> half), right = (uint32_t)x & mask;
        for (uint32_t round = 0; round < ROUNDS; ++round) {
            const fattni_block counter = {
                {right, (uint32_t)epoch, (uint32_t)(epoch >> 32) << 8 | (round + 1), RANDOM_ORDER}};
            const uint32_t next = left ^ (fattni_philox(seed, counter).w[0] & mask);
            left = right;
            right = next;
        }
        x = (uint64_t)left << half | right;
    } while (x >= (uint64_t)n);
    return (int64_t)x;
}

/* Tokens begin..begin+context of t; past its end they are 0, and the loss ignores them. */
static void copy_window(const text_buffer *t, int64_t begin, int64_t context, int32_t *ids, int32_t *targets) {
    for (int64_t i = 0; i < context; ++i) {
        const int64_t at = begin + i;
        ids[i] = at < t->n ? t->symbols[at] : 0;
        targets[i] = at + 1 < t->n ? t->symbols[at + 1] : TASK_IGNORE;
    }
}

static void train(task *base, int64_t index, int32_t *ids, int32_t *targets) {
    const text_task *t = (const text_task *)base;
    const int64_t epoch = index / t->windows;
    draws d = draws_at(t->seed, RANDOM_TRAIN, (uint64_t)epoch);
    const int64_t offset = draw_below(&d, (uint32_t)base->context);
    const int64_t window = shuffled(t->seed, epoch, index % t->windows, t->windows);
    copy_window(&t->text.train, offset + window * base->context, base->context, ids, targets);
}

static void test(task *base, int64_t index, int32_t *ids, int32_t *targets) {
    const text_task *t = (const text_task *)base;
    copy_window(&t->text.held_out, index * base->context, base->context, ids, targets);
}

static void close_text(task *base) {
    text_task *t = (text_task *)base;
    corpus_free(&t->text);
    free(t);
}

task *text_open(const char *path, uint64_t seed, int64_t context) {
    text_task *t = calloc(1, sizeof *t);
    if (!t) {
        cli_fail(CLI_FAILURE, "no memory");
        return NULL;
    }
    if (!corpus_read(&t->text, path)) goto failed;
    const int64_t n = t->text.train.n, held_out = t->text.held_out.n;
    const int64_t needed = corpus_needed(2 * context);
    if (n + held_out < needed) {
        cli_fail(CLI_FAILURE,
                 "%s is too short: it has %lld bytes; --context %lld needs %lld, of which about a "
                 "tenth is held out",
                 path, (long long)(n + held_out), (long long)context, (long long)needed);
        goto failed;
    }
    t->base = (task){.vocab = TEXT_SYMBOLS,
                     .context = context,
                     .held_out = (held_out - 1 + context - 1) / context,
                     .fingerprint = t->text.fingerprint,
                     .train = train,
                     .test = test,
                     .close = close_text};
    t->seed = seed;
    t->windows = (n - context) / context; /* the last one fits at any offset */
    return &t->base;
failed:
    close_text(&t->base);
    return NULL;
}

const corpus *text_corpus(const task *t) { return &((const text_task *)t)->text; }
