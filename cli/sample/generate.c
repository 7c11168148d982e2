#include "cli/sample/generate.h"

#include "cli/base/device.h"
#include "cli/random/random.h"

#include <fattn/sample.h>

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct generator {
    fattn_ctx *ctx;
    model *m;
    fattn_tape *tape;    /* of passes over several tokens */
    fattn_tape *one;     /* of passes over one: with a graph its memory stays as it was recorded */
    fattn_graph *graph;  /* of such a pass; NULL: not yet, or on the CPU */
    bool warm;           /* such a pass has run */
    model_cache *cache;  /* of the window's first tokens; those beyond are not computed yet */
    fattn_tensor ids;    /* I32 [context], on the device: what a pass over several takes */
    fattn_tensor next;   /* I32 [1]: what a pass over one takes, and a choice writes */
    fattn_tensor drawn;  /* I32 [1]: the number of the next choice */
    fattn_tensor chosen; /* I32 [context] */
    fattn_tensor row;    /* F32 [1,vocab]: logits of a pass over several */
    fattn_tensor of_one; /* logits that a pass over one computes */
    fattn_tensor after;  /* [1,vocab]: the last pass's: one of both */
    int32_t *window;     /* [context] */
    int64_t n, context;  /* symbols in the window */
    int64_t count;       /* symbols since the beginning */
    int64_t next_is;     /* the symbol in `next`, and the number in `drawn`; below 0: not known */
    int64_t drawn_is;
    float *logits; /* [vocab], of `after` */
};

fattn_status generator_create(fattn_ctx *ctx, model *m, fattn_tape *t, generator **out) {
    const model_config *const c = model_get_config(m);
    const int64_t one = 1, row[2] = {1, c->vocab};
    *out = NULL;
    generator *const g = calloc(1, sizeof *g);
    if (!g) return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for a generator");
    *g = (generator){.ctx = ctx, .m = m, .tape = t, .context = c->context, .next_is = -1, .drawn_is = -1};
    g->window = malloc((size_t)c->context * sizeof *g->window);
    g->logits = malloc((size_t)c->vocab * sizeof *g->logits);
    fattn_status s = FATTN_OK;
    if (!g->window || !g->logits)
        s = fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for a window of %lld tokens and %lld logits",
                           (long long)c->context, (long long)c->vocab);
    if (!s) s = fattn_tape_create(ctx, &g->one);
    if (!s) s = fattn_tensor_alloc(ctx, FATTN_I32, 1, &c->context, &g->ids);
    if (!s) s = fattn_tensor_alloc(ctx, FATTN_I32, 1, &one, &g->next);
    if (!s) s = fattn_tensor_alloc(ctx, FATTN_I32, 1, &one, &g->drawn);
    if (!s) s = fattn_tensor_alloc(ctx, FATTN_I32, 1, &c->context, &g->chosen);
    if (!s) s = fattn_tensor_alloc(ctx, FATTN_F32, 2, row, &g->row);
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
    fattn_tensor_free(g->ctx, &g->next);
    fattn_tensor_free(g->ctx, &g->drawn);
    fattn_tensor_free(g->ctx, &g->chosen);
    fattn_tensor_free(g->ctx, &g->row);
    free(g->window);
    free(g->logits);
    free(g);
}

/* ---- passes ---- */

static fattn_tensor as_ids(const fattn_tensor *t) {
    const int64_t shape[2] = {1, t->shape[0]};
    return fattn_tensor_view(t->data, FATTN_I32, (fattn_device)t->device, t->device_id, 2, shape);
}

/* [1,vocab] of [1,1,columns] */
static fattn_tensor as_row(const generator *g, const fattn_tensor *logits) {
    fattn_tensor t = fattn_tensor_slice(logits, 2, 0, model_get_config(g->m)->vocab);
    t.ndim = 2, t.shape[1] = t.shape[2], t.stride[1] = t.stride[2];
    return t;
}

static fattn_status pass_over(generator *g, fattn_tape *t, const fattn_tensor *ids, fattn_tensor *logits) {
    const fattn_tensor row = as_ids(ids);
    fattn_tape_reset(t);
    return model_next_logits(g->m, t, &row, g->cache, logits);
}

/* Records a pass over one token. */
static fattn_status record(generator *g) {
    const fattn_tensor row = as_ids(&g->next);
    fattn_tape_reset(g->one); /* its memory becomes one block before the recording, which may not allocate */
    const fattn_status s = fattn_graph_begin(g->ctx);
    if (s) return s;
    return device_end_recording(g->ctx, model_next_logits(g->m, g->one, &row, g->cache, &g->of_one), &g->graph);
}

/* Over the token in `next`. On a GPU the first time as it is, which loads kernels and sizes the tape's memory, then as
   a graph. */
static fattn_status pass_over_one(generator *g) {
    const bool graphs = fattn_ctx_device(g->ctx) == FATTN_CUDA && g->warm, recorded = g->graph;
    fattn_status s;
    if (!graphs) {
        s = pass_over(g, g->one, &g->next, &g->of_one);
        g->warm = !s;
    } else {
        s = recorded ? model_cache_count_launch(g->cache) : record(g);
        if (!s) s = fattn_graph_launch(g->ctx, g->graph);
    }
    if (!s) g->after = as_row(g, &g->of_one);
    return s;
}

static fattn_status pass_over_several(generator *g, int64_t done) {
    const fattn_tensor ids = fattn_tensor_slice(&g->ids, 0, 0, g->n - done);
    fattn_tensor logits;
    fattn_status s = device_write_i32(g->ctx, &ids, g->window + done);
    if (!s) s = pass_over(g, g->tape, &ids, &logits);
    if (s) return s;
    logits = as_row(g, &logits);
    g->after = g->row; /* which no reset of the tape takes away */
    return fattn_tensor_copy(g->ctx, &g->row, &logits);
}

/* The last token of the window into `next`. */
static fattn_status put_next(generator *g) {
    const int32_t symbol = g->window[g->n - 1];
    if (g->next_is == symbol) return FATTN_OK;
    const fattn_status s = device_write_i32(g->ctx, &g->next, &symbol);
    g->next_is = s ? -1 : symbol;
    return s;
}

/* Computes the tokens of the window that the cache lacks, and the logits after them. */
static fattn_status compute(generator *g) {
    const int64_t done = model_cache_tokens(g->cache);
    fattn_status s = FATTN_OK;
    if (done == g->n) return FATTN_OK;
    if (done > 0 && done + 1 == g->n) {
        s = put_next(g);
        if (!s) s = pass_over_one(g);
    } else {
        s = pass_over_several(g, done);
    }
    if (s) model_cache_clear(g->cache);
    return s;
}

/* The logits after all of the window to the host. */
static fattn_status read_logits(generator *g) {
    const int64_t vocab = model_get_config(g->m)->vocab;
    fattn_status s = compute(g);
    if (!s) s = device_read(g->ctx, &g->after, g->logits);
    for (int64_t i = 0; !s && i < vocab; ++i)
        if (!isfinite(g->logits[i]))
            s = fattn_ctx_fail(g->ctx, FATTN_E_MISMATCH, "after %lld tokens the logit of token %lld is %g",
                               (long long)g->count, (long long)i, (double)g->logits[i]);
    if (s) model_cache_clear(g->cache);
    return s;
}

/* ---- tokens ---- */

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
    return read_logits(g);
}

fattn_status generator_logits(generator *g, const float **logits) {
    const fattn_status s = read_logits(g);
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

/* Chooses a token by `after` into `next`, and as number i of `chosen`. */
static fattn_status choose(generator *g, const sample_options *o, int64_t i) {
    const int64_t vocab = model_get_config(g->m)->vocab;
    const int32_t number = (int32_t)((g->count + i) & INT32_MAX);
    const fattn_tensor place = fattn_tensor_slice(&g->chosen, 0, i, i + 1);
    const fattn_sample_io io = {.struct_size = sizeof io,
                                .top_k = o->top_k < vocab ? (int32_t)o->top_k : 0,
                                .temperature = o->temperature,
                                .top_p = o->top_p,
                                .rng = {.seed = o->seed, .stream = RANDOM_SAMPLE},
                                .logits = &g->after,
                                .draws = &g->drawn,
                                .draws_after = &g->drawn,
                                .tokens = &g->next};
    fattn_status s = FATTN_OK;
    if (g->drawn_is != number) s = device_write_i32(g->ctx, &g->drawn, &number);
    g->next_is = g->drawn_is = -1;
    if (!s) s = fattn_sample(g->ctx, &io);
    if (!s) s = fattn_tensor_copy(g->ctx, &place, &g->next);
    if (!s) g->drawn_is = (int64_t)number + 1;
    return s;
}

/* The next n tokens, of which all but the last fit into the window: each is computed before the host has seen it. */
static fattn_status choose_some(generator *g, const sample_options *o, int64_t n, int32_t *symbols) {
    const fattn_tensor chosen = fattn_tensor_slice(&g->chosen, 0, 0, n);
    const fattn_tensor host = fattn_tensor_view(symbols, FATTN_I32, FATTN_CPU, 0, 1, &n);
    int64_t known = 0;
    fattn_status s = compute(g);
    for (int64_t i = 0; !s && i < n; ++i) {
        if (i > 0) s = pass_over_one(g);
        if (!s) s = choose(g, o, i);
    }
    if (!s) s = fattn_tensor_copy(g->ctx, &host, &chosen);
    if (s) {
        model_cache_clear(g->cache);
        return s;
    }
    while (known < n && symbols[known] >= 0) generator_append(g, symbols[known++]);
    if (known == n) {
        g->next_is = symbols[n - 1];
        return FATTN_OK;
    }
    model_cache_clear(g->cache); /* none can be chosen: once more, to say why */
    s = read_logits(g);
    return s ? s
             : fattn_ctx_fail(g->ctx, FATTN_E_MISMATCH, "after %lld tokens a logit was not finite",
                              (long long)g->count);
}

fattn_status generator_next(generator *g, const sample_options *o, int64_t n, int32_t *symbols) {
    for (int64_t done = 0, some; done < n; done += some) {
        const int64_t room = g->context - g->n + 1;
        some = n - done < room ? n - done : room;
        if (some > g->context) some = g->context;
        const fattn_status s = choose_some(g, o, some, symbols + done);
        if (s) return s;
    }
    return FATTN_OK;
}
