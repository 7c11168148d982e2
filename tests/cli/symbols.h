/* Symbols from a model, for tests that look at all of them at the end. */
#ifndef TESTS_CLI_SYMBOLS_H
#define TESTS_CLI_SYMBOLS_H

#include "cli/sample/generate.h"

/* Continues symbols[0..n_prompt-1], n_prompt >= 1, up to symbols[n-1]. */
static inline fattn_status generate_symbols(fattn_ctx *ctx, model *m, fattn_tape *t, const sample_options *o,
                                            int32_t *symbols, int64_t n_prompt, int64_t n) {
    generator *g;
    fattn_status s = generator_create(ctx, m, t, &g);
    if (!s) s = generator_begin(g, symbols, n_prompt);
    if (!s) s = generator_next(g, o, n - n_prompt, symbols + n_prompt);
    generator_destroy(g);
    return s;
}

#endif
