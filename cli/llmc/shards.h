/* Shards: files of tokens of one text, and the order in which llm.c's loader reads them.

   A sample is batch * context tokens that follow one another, and the one after them. Samples do not overlap, and a
   shard's last tokens that make no whole sample are never read. */
#ifndef FATTNI_CLI_LLMC_SHARDS_H
#define FATTNI_CLI_LLMC_SHARDS_H

#include "cli/output/files.h"
#include "cli/random/mt19937.h"
#include "cli/tasks/task.h"

#include <stddef.h>

typedef struct shard_file {
    char *path;
    int64_t tokens;
    int token_bytes; /* 2 or 4 */
} shard_file;

typedef struct shards {
    shard_file *at; /* in the order of glob(3): by name */
    int64_t n, tokens, samples;
    int64_t sample_tokens;
} shards;

/* The files of a glob pattern, each with a valid header, as many bytes as that says, and at least one sample. False
   after an error message. */
bool shards_open(shards *s, const char *pattern, int64_t batch, int64_t context);
void shards_close(shards *s);
static inline int64_t shards_samples(const shards *s, int64_t i) { return (s->at[i].tokens - 1) / s->sample_tokens; }

/* Tokens first..first+n-1 of shard i, each below vocab. False with an error message in `error`. */
bool shards_read(const shards *s, int64_t i, int64_t first, int64_t n, int64_t vocab, int32_t *to, char *error,
                 size_t size);

/* llm.c's loader. Shuffled: each epoch permutes the list of shards as it stands, and each shard that is opened gets a
   new permutation of its samples, all by one generator of seed 42 + rank 0. Else everything is read in order. */
typedef struct loader {
    const shards *files;
    bool shuffled;
    mt19937 random;
    int32_t *shard_order, *sample_order;
    int64_t shard, sample; /* place in these orders: of the sample that comes next, or the end of a shard */
    int64_t taken;         /* samples so far */
} loader;

/* files must outlive it. False after an error message. */
bool loader_open(loader *l, const shards *files, bool shuffled);
void loader_close(loader *l);
/* Moves on, or starts again, until n samples are taken; the next one is number n. */
void loader_go(loader *l, int64_t n);
/* What llm.c stores of a shuffled loader. */
typedef struct loader_state {
    int64_t shard, sample, shards, samples; /* the place; the lengths of the orders */
    const int32_t *shard_order, *sample_order;
    mt19937 random;
} loader_state;
loader_state loader_save(const loader *l); /* its orders are l's */
/* Finds the number of samples after which the loader is in this state, from its start on, and goes there. False with an
   error message in `error`: other files, another size of a sample, or a state that this loader does not reach. */
bool loader_find(loader *l, const loader_state *s, char *error, size_t size);

/* Takes a sample: its shard, and its number there. */
void loader_take(loader *l, int64_t *shard, int64_t *sample);

/* A task over shards: a batch of `batch` sequences is a sample, training is shuffled, held-out samples are in order.
   NULL after an error message. */
task *shards_task(const char *train, const char *val, int64_t batch, int64_t context, int64_t vocab);
loader *shards_loader(task *t);       /* of training, in any place */
int64_t shards_tokens(const task *t); /* of the training files */
int64_t shards_batch(const task *t);
bool shards_each(const task *t, file_visit *f, void *arg); /* of both series; false when f has ended it */

#endif
