/* A task: a vocabulary and two finite or infinite series of numbered token sequences, one to train on and
   one held out. A sequence is a pure function of the task and its number. */
#ifndef FATTNI_CLI_TASKS_TASK_H
#define FATTNI_CLI_TASKS_TASK_H

#include "cli/tasks/corpus.h"

#include <stdbool.h>

enum { TASK_IGNORE = -1 }; /* a target that the loss ignores */

typedef struct task task;
struct task {
    int64_t vocab, context; /* symbols; tokens of a sequence */
    int64_t held_out;       /* held-out sequences: 0..held_out-1 */
    uint64_t fingerprint;   /* of the data: must be the same when a run is resumed */
    bool in_order;          /* an evaluation takes the first held-out sequences, not evenly spaced ones */
    char error[512];        /* what train or test could not read; empty: nothing */
    /* Writes context ids in 0..vocab-1 and for each the token that follows, or TASK_IGNORE. */
    void (*train)(task *t, int64_t index, int32_t *ids, int32_t *targets);
    void (*test)(task *t, int64_t index, int32_t *ids, int32_t *targets);
    void (*close)(task *t);
};

/* Multi-query associative recall (Arora et al. 2023): context/4 key-value pairs, then every key
   once more in another order, each followed by its value. Only the token after a queried key is in the
   loss. Training and held-out sequences come from different Philox streams of the seed. NULL after an error
   message: context is not a multiple of 4, or no memory. */
task *recall_open(uint64_t seed, int64_t context);

/* Uniform random tokens, each sequence from its own position in the Philox streams: for measurements of
   models of any size. NULL after an error message. */
task *tokens_open(uint64_t seed, int64_t context, int64_t vocab);

/* Bytes of a text (read and split as described in corpus.h). An epoch visits all windows of the training
   text once, in a random order and from a random offset; held-out windows are adjacent and cover the
   held-out text. NULL after an error message: the path cannot be read, or the text is too short. */
task *text_open(const char *path, uint64_t seed, int64_t context);
const corpus *text_corpus(const task *t); /* of a task that text_open made */

#endif
