/* Text from a trained model, one byte at a time. */
#ifndef FATTNI_CLI_TRAIN_SAMPLE_H
#define FATTNI_CLI_TRAIN_SAMPLE_H

#include "cli/train/model.h"

typedef struct sample_options {
    double temperature; /* divides the logits; 0 = always the most likely symbol */
    int64_t top_k;      /* choose among the k most likely; 0 = among all */
    uint64_t seed;
} sample_options;

/* One of 0..n-1 with probability softmax(logits/temperature) over the top_k; `number` is the index of the
   draw for a seed. */
int64_t sample_choose(const float *logits, int64_t n, const sample_options *o, int64_t number);

/* Continues symbols[0..n_prompt-1], n_prompt >= 1, up to symbols[n-1]; each symbol depends on as many before
   it as the model's context has. Resets the tape. */
fattn_status sample_symbols(fattn_ctx *ctx, model *m, fattn_tape *t, const sample_options *o, int32_t *symbols,
                            int64_t n_prompt, int64_t n);

#endif
