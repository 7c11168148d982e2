/* Random tokens: for measurements of models of any size. */
#include "cli/base/cli.h"
#include "cli/random/random.h"
#include "cli/tasks/task.h"

#include <stdlib.h>

enum { HELD_OUT = 64 };

typedef struct tokens {
    task base;
    uint64_t seed;
} tokens;

static void make_sequence(const tokens *t, draws d, int32_t *ids, int32_t *targets) {
    const int64_t n = t->base.context;
    for (int64_t i = 0; i <= n; ++i) {
        const int32_t token = (int32_t)draw_below(&d, (uint32_t)t->base.vocab);
        if (i < n) ids[i] = token;
        if (i > 0) targets[i - 1] = token;
    }
}

static void train(task *base, int64_t index, int32_t *ids, int32_t *targets) {
    const tokens *t = (const tokens *)base;
    make_sequence(t, draws_at(t->seed, RANDOM_TRAIN, (uint64_t)index), ids, targets);
}

static void test(task *base, int64_t index, int32_t *ids, int32_t *targets) {
    const tokens *t = (const tokens *)base;
    make_sequence(t, draws_at(t->seed, RANDOM_TEST, (uint64_t)index), ids, targets);
}

static void close_tokens(task *base) { free(base); }

task *tokens_open(uint64_t seed, int64_t context, int64_t vocab) {
    tokens *t = calloc(1, sizeof *t);
    if (!t) {
        cli_fail(CLI_FAILURE, "no memory");
        return NULL;
    }
    *t = (tokens){.base = {.vocab = vocab,
                           .context = context,
                           .held_out = HELD_OUT,
                           .train = train,
                           .test = test,
                           .close = close_tokens},
                  .seed = seed};
    return &t->base;
}
