#include "cli/sample/generate.h"

#include "cli/base/device.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct generator {
    fattn_ctx *ctx;
    model *m;
    fattn_tape *tape;   /* of passes over several tokens */
    fattn_tape *one;    /* of passes over one: with a graph its memory stays as it was recorded */
    fattn_graph *graph; /* of such a pass; NULL: not yet, or on the CPU */
    bool warm;          /* such a pass has run */
    fattn_tensor after; /* the logits that the graph computes */
    model_cache *cache; /* of the window's first tokens; those beyond are not computed yet */
    fattn_tensor ids;   /* I32 [context], on the device */
    int32_t *window;    /* [context] */
    int64_t n, context; /* symbols in the window */
    int64_t count;      /* symbols since the beginning */
    float *logits;      /* [columns], after all of the window */
    int32_t *scratch;   /* [vocab] */
};

fattn_status generator_create(fattn_ctx *ctx, model *m, fattn_tape *t, generator **out) {
    const model_config *const c = model_get_config(m);
    *out = NULL;
    generator *const g = calloc(1, sizeof *g);
    if (!g) return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for a generator");
    *g = (generator){.ctx = ctx, .m = m, .tape = t, .context = c->context};
    g->window = malloc((size_t)c->context * sizeof *g->window);
    g->logits = malloc((size_t)model_columns(c) * sizeof *g->logits);
    g->scratch = malloc((size_t)c->vocab * sizeof *g->scratch);
    fattn_status s = FATTN_OK;
    if (!g->window || !g->logits || !g->scratch)
        s = fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for a window of %lld tokens and %lld logits",
                           (long long)c->context, (long long)model_columns(c));
    if (!s) s = fattn_tape_create(ctx, &g->one);
    if (!s) s = fattn_tensor_alloc(ctx, FATTN_I32, 1, &c->context, &g->ids);
    if (!s) s = model_cache_create(m, &g->cache);
    if (s)
        generator_destroy(g);
    else
        *out = g;
    return s;
}

void generator_destroy(generator *g) {
    if (!g) return;
    fattn_graph_destroy(g->ctx, g->graph);
    fattn_tape_destroy(g->one);
    model_cache_destroy(g->cache);
    fattn_tensor_free(g->ctx, &g->ids);
    free(g->window);
    free(g->logits);
    free(g->scratch);
    free(g);
}

static fattn_status run(generator *g, fattn_tape *t, const fattn_tensor *ids, fattn_tensor *logits) {
    fattn_tape_reset(t);
    return model_next_logits(g->m, t, ids, g->cache, logits);
}

/* Records a pass over one token. */
static fattn_status record(generator *g, const fattn_tensor *ids) {
    fattn_tape_reset(g->one); /* its memory becomes one block before the recording, which may not allocate */
    const fattn_status s = fattn_graph_begin(g->ctx);
    if (s) return s;
    return device_end_recording(g->ctx, model_next_logits(g->m, g->one, ids, g->cache, &g->after), &g->graph);
}

/* A token behind others. On a GPU the first time as it is, which loads kernels and sizes the tape's memory, then as a
   graph. */
static fattn_status run_one(generator *g, const fattn_tensor *ids, fattn_tensor *logits) {
    const bool graphs = fattn_ctx_device(g->ctx) == FATTN_CUDA && g->warm, recorded = g->graph;
    fattn_status s = FATTN_OK;
    if (!graphs) {
        s = run(g, g->one, ids, logits);
        g->warm = !s;
        return s;
    }
    if (recorded)
        s = model_cache_count_launch(g->cache);
    else
        s = record(g, ids);
    *logits = g->after;
    return s ? s : fattn_graph_launch(g->ctx, g->graph);
}

static bool all_finite(const float *x, int64_t n) {
    int bad = 0;
    for (int64_t i = 0; i < n; ++i) bad |= !(fabsf(x[i]) < INFINITY);
    return !bad;
}

/* Computes the symbols of the window that the cache lacks, and the logits after them. */
static fattn_status compute(generator *g) {
    const int64_t done = model_cache_tokens(g->cache), vocab = model_get_config(g->m)->vocab;
    const fattn_tensor row = fattn_tensor_slice(&g->ids, 0, 0, g->n - done);
    const int64_t shape[2] = {1, g->n - done};
    fattn_tensor logits;
    if (done == g->n) return FATTN_OK;
    fattn_status s = device_write_i32(g->ctx, &row, g->window + done);
    if (s) return s;
    const fattn_tensor ids = fattn_tensor_view(row.data, FATTN_I32, (fattn_device)row.device, row.device_id, 2, shape);
    s = done > 0 && done + 1 == g->n ? run_one(g, &ids, &logits) : run(g, g->tape, &ids, &logits);
    if (!s) s = device_read(g->ctx, &logits, g->logits);
    const bool right = s || all_finite(g->logits, vocab);
    for (int64_t i = 0; !right && !s && i < vocab; ++i)
        if (!isfinite(g->logits[i]))
            s = fattn_ctx_fail(g->ctx, FATTN_E_MISMATCH, "after %lld tokens the logit of token %lld is %g",
                               (long long)g->count, (long long)i, (double)g->logits[i]);
    if (s) model_cache_clear(g->cache);
    return s;
}

fattn_status generator_begin(generator *g, const int32_t *symbols, int64_t n) {
    const int64_t vocab = model_get_config(g->m)->vocab;
    if (n < 1) return fattn_ctx_fail(g->ctx, FATTN_E_ARG, "a prompt of %lld tokens: one is needed", (long long)n);
    for (int64_t i = 0; i < n; ++i)
        if (symbols[i] < 0 || symbols[i] >= vocab)
            return fattn_ctx_fail(g->ctx, FATTN_E_ARG, "token %lld of the prompt is %d, the model has 0..%lld",
                                  (long long)i, symbols[i], (long long)vocab - 1);
    model_cache_clear(g->cache);
    g->count = n;
    g->n = n < g->context ? n : g->context;
    memcpy(g->window, symbols + n - g->n, (size_t)g->n * sizeof *symbols);
    return compute(g);
}

fattn_status generator_logits(generator *g, const float **logits) {
    const fattn_status s = compute(g);
    *logits = s ? NULL : g->logits;
    return s;
}

void generator_append(generator *g, int32_t symbol) {
    if (g->n == g->context) {
        const int64_t kept = g->context / 2 > 1 ? g->context / 2 - 1 : 0; /* with the new one half of the context */
        memmove(g->window, g->window + g->n - kept, (size_t)kept * sizeof *g->window);
        g->n = kept;
        model_cache_clear(g->cache);
    }
    g->window[g->n++] = symbol;
    g->count += 1;
}

fattn_status generator_next(generator *g, const sample_options *o, int32_t *symbol) {
    const float *logits;
    const fattn_status s = generator_logits(g, &logits);
    if (s) return s;
    *symbol = (int32_t)sample_choose(logits, model_get_config(g->m)->vocab, o, g->count, g->scratch);
    generator_append(g, *symbol);
    return FATTN_OK;
}
