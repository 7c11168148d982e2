/* Keys and values of the tokens before, and attention to them. The op's forward writes to the cache, so that it is for
   graphs without backward alone. */
#include "cli/base/device.h"
#include "cli/train/model_parts.h"

#include <fattn/kv_cache.h>

#include <stdlib.h>
#include <string.h>

fattn_status model_cache_create(model *m, model_cache **out) {
    const model_config *const c = &m->config;
    const int64_t kv[4] = {1, c->kv_heads, c->context, c->channels / c->heads}, row[3] = {1, 1, c->channels}, one = 1;
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
    if (!s) s = fattn_tensor_alloc(m->ctx, FATTN_I32, 1, &one, &cache->length);
    if (!s) s = fattn_tensor_alloc(m->ctx, FATTN_I32, 1, &one, &cache->after);
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
    fattn_tensor_free(cache->ctx, &cache->length);
    fattn_tensor_free(cache->ctx, &cache->after);
    free(cache->kv);
    free(cache);
}

void model_cache_clear(model_cache *cache) { cache->n = 0; }
int64_t model_cache_tokens(const model_cache *cache) { return cache->n; }

static fattn_status check_room(const model_cache *cache, int64_t S) {
    const int64_t context = cache->kv[0].k.shape[2];
    if (S <= context - cache->n) return FATTN_OK;
    return fattn_ctx_fail(cache->ctx, FATTN_E_SHAPE, "%lld tokens after %lld: the context has %lld", (long long)S,
                          (long long)cache->n, (long long)context);
}

fattn_status model_cache_open(model_cache *cache, int64_t S) {
    const int32_t none = 0;
    fattn_status s = check_room(cache, S);
    if (s || cache->n > 0) return s;
    s = device_write_i32(cache->ctx, &cache->length, &none);
    return s ? s : fattn_tensor_normal(cache->ctx, &cache->before, 0, 0, (fattn_rng){0});
}

fattn_status model_cache_add(model_cache *cache, int64_t S) {
    const fattn_status s = fattn_tensor_copy(cache->ctx, &cache->length, &cache->after);
    if (!s) cache->n += S;
    return s;
}

fattn_status model_cache_count_launch(model_cache *cache) {
    const fattn_status s = check_room(cache, 1);
    if (!s) cache->n += 1;
    return s;
}

fattn_tensor model_positions(const model *m, const model_pass *pass, int64_t S) {
    const int64_t first = pass->cache ? pass->cache->n : 0;
    return pass->cache && S == 1 ? pass->cache->length : fattn_tensor_slice(&m->positions, 0, first, first + S);
}

/* ---- attention to a cache ---- */

enum { Q, K, V, INPUTS };
enum { O, LSE, Q_TURNED, OUTPUTS };

typedef struct attribute {
    fattn_attention_params params;
    model_kv cache; /* [1,G,context,D] */
    fattn_tensor length, after;
    float rope_base;
} attribute;

/* Over all of the cache: nothing depends on how many keys are there. */
static fattn_attention_io io_of(const fattn_op_call *c) {
    const attribute *const a = c->attr;
    return (fattn_attention_io){.struct_size = sizeof(fattn_attention_io),
                                .q = a->rope_base > 0 ? &c->out[Q_TURNED] : &c->in[Q],
                                .k = &a->cache.k,
                                .v = &a->cache.v,
                                .o = &c->out[O],
                                .lse = &c->out[LSE],
                                .seqlens_k = &a->after,
                                .saved = c->saved,
                                .saved_bytes = c->saved_bytes,
                                .workspace = c->workspace,
                                .workspace_bytes = c->fwd_workspace};
}

static fattn_status infer(fattn_op_call *c) {
    const attribute *const a = c->attr;
    const int64_t *const q = c->in[Q].shape, as_BSHD[] = {q[1] * q[2] * q[3], q[3], q[1] * q[3], 1};
    fattn_tensor *const o = &c->out[O], *const lse = &c->out[LSE], *const turned = &c->out[Q_TURNED];
    if (q[0] != 1)
        return fattn_ctx_fail(c->ctx, FATTN_E_SHAPE, "cached attention: %lld sequences, the cache has 1",
                              (long long)q[0]);
    o->ndim = 4;
    o->dtype = c->in[Q].dtype;
    memcpy(o->shape, q, 4 * sizeof *q);
    memcpy(o->stride, as_BSHD, sizeof as_BSHD);
    *turned = *o;
    if (a->rope_base == 0) turned->shape[1] = 0, memset(turned->stride, 0, sizeof turned->stride);
    lse->ndim = 3;
    lse->dtype = c->in[Q].dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
    memcpy(lse->shape, q, 3 * sizeof *q);
    memcpy(lse->stride, (int64_t[]){q[1] * q[2], q[2], 1}, 3 * sizeof *q);
    fattn_op_call planned = *c;
    fattn_tensor out[OUTPUTS] = {*o, *lse, *turned};
    for (int n = 0; n < OUTPUTS; ++n) out[n].data = a->cache.k.data; /* a plan depends on alignment alone */
    planned.out = out;
    fattn_attention_io io = io_of(&planned);
    fattn_attention_plan plan = {.struct_size = sizeof plan};
    const fattn_status s = fattn_attention_query(c->ctx, &a->params, &io, &plan);
    c->fwd_workspace = plan.fwd_workspace;
    c->saved_bytes = plan.saved_bytes;
    return s;
}

static fattn_status forward(fattn_op_call *c) {
    const attribute *const a = c->attr;
    const bool turns = a->rope_base > 0;
    const fattn_kv_append_io append = {.struct_size = sizeof append,
                                       .rope_base = a->rope_base,
                                       .k = &c->in[K],
                                       .v = &c->in[V],
                                       .k_cache = &a->cache.k,
                                       .v_cache = &a->cache.v,
                                       .lengths = &a->length,
                                       .lengths_after = &a->after,
                                       .q = turns ? &c->in[Q] : NULL,
                                       .q_rotated = turns ? &c->out[Q_TURNED] : NULL};
    const fattn_attention_io io = io_of(c);
    const fattn_status s = fattn_kv_append(c->ctx, &append);
    return s ? s : fattn_attention_fwd(c->ctx, &a->params, &io);
}

static const fattn_op_def cached_attention = {
    .struct_size = sizeof cached_attention,
    .attr_size = sizeof(attribute),
    .n_out = OUTPUTS,
    .name = "cached attention",
    .infer = infer,
    .forward = forward,
};

fattn_var model_attend(const model *m, fattn_tape *t, fattn_var q, fattn_var k, fattn_var v, float rope_base,
                       const model_pass *pass, int layer) {
    const model_config *const c = &m->config;
    const model_cache *const cache = pass->cache;
    const bool fp8 = pass->training && c->fp8;
    const bool exact_delta = pass->training && !fp8 && c->algorithm != FATTN_ALGO_STANDARD;
    const fattn_attention_params params = {
        .struct_size = sizeof params,
        .flags = FATTN_CAUSAL | (exact_delta ? FATTN_EXACT_DELTA : 0) | (fp8 ? FATTN_FP8 : 0) |
                 (fp8 && c->fp8_renew ? FATTN_FP8_RENEW : 0) | (fp8 && c->fp8_int8 ? FATTN_FP8_INT8 : 0),
        .algorithm = c->algorithm,
        .dropout_p = pass->training ? c->dropout : 0,
        .rng = {.seed = c->seed, .stream = (uint32_t)layer},
    };
    if (cache) {
        const attribute a = {.params = params,
                             .cache = cache->kv[layer],
                             .length = cache->length,
                             .after = cache->after,
                             .rope_base = rope_base};
        return fattn_op_custom(t, &cached_attention, (fattn_var[]){q, k, v}, INPUTS, &a);
    }
    if (rope_base > 0) q = fattn_op_rope(t, q, rope_base, 0), k = fattn_op_rope(t, k, rope_base, 0);
    fattn_attention_vars vars = {.struct_size = sizeof vars, .q = q, .k = k, .v = v};
    if (params.dropout_p > 0 && pass->step) vars.rng_step = fattn_input(t, pass->step);
    return fattn_op_attention_ex(t, &vars, &params, NULL);
}
