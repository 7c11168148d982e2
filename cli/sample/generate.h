/* Tokens from a model, one after another, each computed from those before by a cache of keys and values: one pass over
   the prompt, then one row per token, whose cost depends on the tokens before by attention alone. On a GPU that row is
   a graph, recorded once.

   A model has seen `context` positions. When the window is full, it begins again with its last context / 2 tokens, as
   if they began a sequence: one more pass over that many for every context / 2 tokens. A window that slides by one
   token would move every position, so that no key could be kept. A token thus depends on the context / 2 to context
   tokens before it, or on all of them while they are fewer. */
#ifndef FATTNI_CLI_SAMPLE_GENERATE_H
#define FATTNI_CLI_SAMPLE_GENERATE_H

#include "cli/train/model.h"

/* Applied in this order (fattn/sample.h). */
typedef struct sample_options {
    double temperature; /* divides the logits; 0 = always the most likely symbol */
    int64_t top_k;      /* choose among the k most likely; 0 = among all */
    double top_p;       /* of these among the likeliest whose probabilities first sum to it; 0 or 1 = among all */
    uint64_t seed;
} sample_options;

typedef struct generator generator;
/* Borrows ctx, m and t, and resets t with every pass over several tokens. ctx gets the error messages. */
fattn_status generator_create(fattn_ctx *ctx, model *m, fattn_tape *t, generator **out);
void generator_destroy(generator *g); /* NULL is allowed */
/* Begins with these symbols, n >= 1, of which the last `context` count; the logits of the next one are computed. ARG: a
   symbol is not in the vocabulary. */
fattn_status generator_begin(generator *g, const int32_t *symbols, int64_t n);
/* After generator_begin: the logits [vocab] of the next symbol, on the host, valid until the next call. MISMATCH: one
   is not finite. */
fattn_status generator_logits(generator *g, const float **logits);
/* Adds a symbol. It is computed when the next logits are asked for. */
void generator_append(generator *g, int32_t symbol);
/* Chooses the next n symbols, the number of those before each being its draw's, and adds them. On a GPU the host waits
   once for all of them. MISMATCH as above, when symbols[] may have been written. */
fattn_status generator_next(generator *g, const sample_options *o, int64_t n, int32_t *symbols);

#endif
