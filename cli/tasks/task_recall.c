#include "cli/base/cli.h"
#include "cli/random/random.h"
#include "cli/tasks/task.h"

#include <stdlib.h>

enum { HELD_OUT = 4096 };

typedef struct recall {
    task base;
    uint64_t seed;
    uint32_t pairs;
    int32_t *keys; /* scratch: a permutation of the 2 * pairs keys, whose first pairs are in use */
    int32_t *order, *values;
} recall;

static void shuffle_first(draws *d, int32_t *items, uint32_t n, uint32_t first) {
    for (uint32_t i = 0; i < first; ++i) {
        const uint32_t j = i + draw_below(d, n - i);
        const int32_t swap = items[i];
        items[i] = items[j];
        items[j] = swap;
    }
}

/* Keys are 0..2n-1, values 2n..4n-1, for n pairs: half of the keys appear, values may repeat. */
static void make_sequence(recall *r, draws d, int32_t *ids, int32_t *targets) {
    const uint32_t n = r->pairs;
    for (uint32_t i = 0; i < 2 * n; ++i) r->keys[i] = (int32_t)i;
    for (uint32_t i = 0; i < n; ++i) r->order[i] = (int32_t)i;
    shuffle_first(&d, r->keys, 2 * n, n);
    shuffle_first(&d, r->order, n, n);
    for (uint32_t i = 0; i < n; ++i) {
        r->values[i] = (int32_t)(2 * n + draw_below(&d, 2 * n));
        ids[2 * i] = r->keys[i];
        ids[2 * i + 1] = r->values[i];
        targets[2 * i] = targets[2 * i + 1] = TASK_IGNORE;
    }
    ids += 2 * n;
    targets += 2 * n;
    for (uint32_t i = 0; i < n; ++i) {
        ids[2 * i] = r->keys[r->order[i]];
        ids[2 * i + 1] = targets[2 * i] = r->values[r->order[i]];
        targets[2 * i + 1] = TASK_IGNORE;
    }
}

static void train(task *t, int64_t index, int32_t *ids, int32_t *targets) {
    recall *r = (recall *)t;
    make_sequence(r, draws_at(r->seed, RANDOM_TRAIN, (uint64_t)index), ids, targets);
}

static void test(task *t, int64_t index, int32_t *ids, int32_t *targets) {
    recall *r = (recall *)t;
    make_sequence(r, draws_at(r->seed, RANDOM_TEST, (uint64_t)index), ids, targets);
}

static void close_recall(task *t) {
    recall *r = (recall *)t;
    free(r->keys);
    free(r);
}

task *recall_open(uint64_t seed, int64_t context) {
    if (context < 8 || context % 4 != 0) {
        cli_fail(CLI_USAGE, "--context %lld: recall needs a multiple of 4, at least 8", (long long)context);
        return NULL;
    }
    const size_t pairs = (size_t)context / 4;
    recall *r = calloc(1, sizeof *r);
    int32_t *scratch = malloc(4 * pairs * sizeof *scratch);
    if (!r || !scratch) {
        free(r);
        free(scratch);
        cli_fail(CLI_FAILURE, "no memory for sequences of %lld tokens", (long long)context);
        return NULL;
    }
    *r = (recall){
        .base = {.vocab = context,
                 .context = context,
                 .held_out = HELD_OUT,
                 .train = train,
                 .test = test,
                 .close = close_recall},
        .seed = seed,
        .pairs = (uint32_t)pairs,
        .keys = scratch,
        .order = scratch + 2 * pairs,
        .values = scratch + 3 * pairs,
    };
    return &r->base;
}
