/* Keys and values of the tokens before, and attention to them. The op's forward writes to the cache, so that it is for
   graphs without backward alone. */
#include "cli/train/model_parts.h"

#include <stdlib.h>
#include <string.h>

fattn_status model_cache_create(model *m, model_cache **out) {
    const model_config *const c = &m->config;
    const int64_t kv[4] = {1, c->kv_heads, c->context, c->channels / c->heads}, row[3] = {1, 1, c->channels};
    const fattn_dtype dtype = (fattn_dtype)m->params[0].value.dtype;
    *out = NULL;
    model_cache *const cache = calloc(1, sizeof *cache);
    if (cache) *cache = (model_cache){.ctx = m->ctx, .layers = c->layers};
    if (cache) cache->kv = calloc((size_t)c->layers, sizeof *cache->kv);
    fattn_status s = FATTN_OK;
    if (!cache || !cache->kv)
        s = fattn_ctx_fail(m->ctx, FATTN_E_NOMEM, "no memory for a cache of %d layers", c->layers);
    for (int layer = 0; !s && layer < c->layers; ++layer) {
        s = fattn_tensor_alloc(m->ctx, dtype, 4, kv, &cache->kv[layer].k);
        if (!s) s = fattn_tensor_alloc(m->ctx, dtype, 4, kv, &cache->kv[layer].v);
    }
    if (!s) s = fattn_tensor_alloc(m->ctx, dtype, 3, row, &cache->before);
    if (s)
        model_cache_destroy(cache);
    else
        *out = cache;
    return s;
}

void model_cache_destroy(model_cache *cache) {
    if (!cache) return;
    for (int layer = 0; cache->kv && layer < cache->layers; ++layer) {
        fattn_tensor_free(cache->ctx, &cache->kv[layer].k);
        fattn_tensor_free(cache->ctx, &cache->kv[layer].v);
    }
    fattn_tensor_free(cache->ctx, &cache->before);
    free(cache->kv);
    free(cache);
}

void model_cache_clear(model_cache *cache) { cache->n = 0; }
int64_t model_cache_tokens(const model_cache *cache) { return cache->n; }

/* ---- attention to a cache ---- */

enum { Q, K, V, INPUTS };
enum { O, LSE, OUTPUTS };

typedef struct attribute {
    fattn_attention_params params;
    model_kv cache; /* [1,G,context,D], of which n keys are there */
    int64_t n;
} attribute;

/* Of the call over the first `keys` keys. */
static fattn_status plan_for(const fattn_op_call *c, int64_t keys, fattn_attention_plan *plan) {
    const attribute *const a = c->attr;
    const fattn_tensor k = fattn_tensor_slice(&a->cache.k, 2, 0, keys), v = fattn_tensor_slice(&a->cache.v, 2, 0, keys);
    fattn_tensor o = c->out[O], lse = c->out[LSE];
    o.data = lse.data = a->cache.k.data; /* a plan depends on alignment alone */
    const fattn_attention_io io = {.struct_size = sizeof io, .q = &c->in[Q], .k = &k, .v = &v, .o = &o, .lse = &lse};
    *plan = (fattn_attention_plan){.struct_size = sizeof *plan};
    return fattn_attention_query(c->ctx, &a->params, &io, plan);
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* Memory is asked for a full cache, too: then it does not grow from token to token. */
static fattn_status infer(fattn_op_call *c) {
    const attribute *const a = c->attr;
    const int64_t *const q = c->in[Q].shape, *const k = c->in[K].shape, context = a->cache.k.shape[2];
    if (q[0] != 1 || a->n + k[2] > context)
        return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE,
                              "cached attention: %lld sequences of %lld tokens after %lld, the cache has 1 of %lld",
                              (long long)q[0], (long long)k[2], (long long)a->n, (long long)context);
    c->out[O].ndim = 4;
    c->out[O].dtype = c->in[Q].dtype;
    memcpy(c->out[O].shape, q, 4 * sizeof *q);
    memcpy(c->out[O].stride, (int64_t[]){q[1] * q[2] * q[3], q[3], q[1] * q[3], 1}, 4 * sizeof *q); /* as [1,S,H,D] */
    c->out[LSE].ndim = 3;
    c->out[LSE].dtype = c->in[Q].dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    memcpy(c->out[LSE].shape, q, 3 * sizeof *q);
    memcpy(c->out[LSE].stride, (int64_t[]){q[1] * q[2], q[2], 1}, 3 * sizeof *q);
    fattn_attention_plan now, full;
    fattn_status s = plan_for(c, a->n + k[2], &now);
    if (!s) s = plan_for(c, context, &full);
    if (s) return s;
    c->fwd_workspace = larger(now.fwd_workspace, full.fwd_workspace);
    c->saved_bytes = larger(now.saved_bytes, full.saved_bytes);
    return FATTN_OK;
}

/* Appends rows [1,G,S,D] to those before `n`; the result is all of them. */
static fattn_status append(fattn_ctx *ctx, const fattn_tensor *cache, int64_t n, const fattn_tensor *rows,
                           fattn_tensor *all) {
    const int64_t end = n + rows->shape[2];
    const fattn_tensor to = fattn_tensor_slice(cache, 2, n, end);
    *all = fattn_tensor_slice(cache, 2, 0, end);
    return fattn_tensor_copy(ctx, &to, rows);
}

static fattn_status forward(fattn_op_call *c) {
    const attribute *const a = c->attr;
    fattn_tensor k, v;
    fattn_status s = append(c->ctx, &a->cache.k, a->n, &c->in[K], &k);
    if (!s) s = append(c->ctx, &a->cache.v, a->n, &c->in[V], &v);
    if (s) return s;
    const fattn_attention_io io = {.struct_size = sizeof io,
                                   .q = &c->in[Q],
                                   .k = &k,
                                   .v = &v,
                                   .o = &c->out[O],
                                   .lse = &c->out[LSE],
                                   .saved = c->saved,
                                   .saved_bytes = c->saved_bytes,
                                   .workspace = c->workspace,
                                   .workspace_bytes = c->fwd_workspace};
    return fattn_attention_fwd(c->ctx, &a->params, &io);
}

static const fattn_op_def cached_attention = {
    .struct_size = sizeof cached_attention,
    .attr_size = sizeof(attribute),
    .n_out = OUTPUTS,
    .name = "cached attention",
    .infer = infer,
    .forward = forward,
};

fattn_var model_attend(const model *m, fattn_tape *t, fattn_var q, fattn_var k, fattn_var v, const model_pass *pass,
                       int layer) {
    const model_config *const c = &m->config;
    const bool fp8 = pass->training && c->fp8;
    const bool exact_delta = pass->training && !fp8 && c->algorithm != FATTN_ALGO_STANDARD;
    const fattn_attention_params params = {
        .struct_size = sizeof params,
        .flags = FATTN_CAUSAL | (exact_delta ? FATTN_EXACT_DELTA : 0) | (fp8 ? FATTN_FP8 : 0),
        .algorithm = c->algorithm,
        .dropout_p = pass->training ? c->dropout : 0,
        .rng = {.seed = c->seed, .stream = (uint32_t)(pass->step * c->layers + layer)},
    };
    if (!pass->cache) return fattn_op_attention(t, q, k, v, &params);
    const attribute a = {.params = params, .cache = pass->cache->kv[layer], .n = pass->cache->n};
    return fattn_op_custom(t, &cached_attention, (fattn_var[]){q, k, v}, INPUTS, &a);
}
