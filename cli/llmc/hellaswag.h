/* HellaSwag (Zellers et al. 2019) in llm.c's format: contexts with four endings each. The answer is the ending whose
   tokens have the least mean loss after the context. */
#ifndef FATTNI_CLI_LLMC_HELLASWAG_H
#define FATTNI_CLI_LLMC_HELLASWAG_H

#include "cli/train/model.h"

#include <stdbool.h>

enum { HELLASWAG_ENDINGS = 4 };

typedef struct hellaswag_example {
    int64_t at;                         /* of the context's tokens, in words */
    int64_t ending[HELLASWAG_ENDINGS];  /* where each begins */
    int64_t lengths[HELLASWAG_ENDINGS]; /* tokens of each, at least 1 */
    int64_t context;                    /* tokens, at least 1 */
    int label;
} hellaswag_example;

typedef struct hellaswag {
    uint16_t *words;
    hellaswag_example *example;
    int64_t n;
} hellaswag;

/* Checks the whole file: each example must fit a model of this context and vocabulary. False after an error message
   with the offset and what is expected. */
bool hellaswag_open(hellaswag *h, const char *path, int64_t context, int64_t vocab);
void hellaswag_close(hellaswag *h);

/* How many of the first `count` examples (all, if there are less) the model answers right, with `rows` sequences at a
   time, at least 4. Resets the tape. stop: asked between batches, NULL: never; then *done is what was asked so far.
   MISMATCH: a loss is not finite. */
fattn_status hellaswag_count(const hellaswag *h, fattn_ctx *ctx, model *m, fattn_tape *t, int64_t count, int64_t rows,
                             bool (*stop)(void), int64_t *right, int64_t *done);

#endif
