/* What can be learned: a vocabulary and two endless or finite rows of numbered token sequences, one
   to train on and one held out. A sequence is a pure function of the task and its number. */
#ifndef FATTNI_CLI_TRAIN_TASK_H
#define FATTNI_CLI_TRAIN_TASK_H

#include "cli/train/corpus.h"

enum { TASK_IGNORE = -1 }; /* a target that no loss counts */

typedef struct task task;
struct task {
    int64_t vocab, context; /* symbols; tokens of a sequence */
    int64_t held_out;       /* held-out sequences: 0..held_out-1 */
    uint64_t fingerprint;   /* of the data: a resumed run must find the same */
    /* Writes context ids in 0..vocab-1 and for each the token that follows, or TASK_IGNORE. */
    void (*train)(task *t, int64_t index, int32_t *ids, int32_t *targets);
    void (*test)(task *t, int64_t index, int32_t *ids, int32_t *targets);
    void (*close)(task *t);
};

/* Multi-query associative recall (Arora et al. 2023): context/4 key-value pairs, then every key
   once more in another order, each followed by its value. Only the token after a queried key
   counts. Training and held-out sequences come from different Philox streams of the seed. NULL
   after a sentence: context is no multiple of 4, or no memory. */
task *recall_open(uint64_t seed, int64_t context);

/* Uniform random tokens, each sequence from its own place in the Philox streams: for measurements of
   models of any size. NULL after a sentence. */
task *tokens_open(uint64_t seed, int64_t context, int64_t vocab);

/* Bytes of a text (corpus.h says how it is read and split). An epoch visits all windows of the
   training text once, in a Philox order and from an offset of its own; held-out windows lie side by
   side and cover the held-out text. NULL after a sentence: the path cannot be read, or the text is
   too short. */
task *text_open(const char *path, uint64_t seed, int64_t context);
const corpus *text_corpus(const task *t); /* of a task that text_open made */

#endif
