#include "cli/train/model.h"

#include "cli/train/op_shift.h"
#include "cli/train/random.h"

#include <math.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

/* Embedding and shift come before the blocks, the last gain after them. Parameters of a block, in order: */
enum block_param { ATTN_NORM, QKV, ATTN_OUT, MLP_NORM, MLP_UP, MLP_DOWN, BLOCK_PARAMS };
enum { EMBEDDING, SHIFT, FIRST_BLOCK, NAME_BYTES = 32 };
static const float NORM_EPS = 1e-5f, ROPE_BASE = 1e4f;

struct model {
    fattn_ctx *ctx;
    model_config config;
    int n_params;
    fattn_param *params; /* n_params of them, embedding first */
    fattn_param **list;  /* their addresses */
    char (*names)[NAME_BYTES];
};

typedef struct shape {
    int ndim;
    int64_t size[2];
    double std;
} shape; /* std 0: a gain, all ones */

static shape block_shape(const model_config *c, enum block_param p) {
    const int64_t C = c->channels, head_dim = C / c->heads, hidden = c->mlp_ratio * C;
    const double std = 1 / sqrt((double)C), residual = std / sqrt(2.0 * c->layers);
    switch (p) {
    case QKV: return (shape){2, {C + 2 * c->kv_heads * head_dim, C}, std};
    case ATTN_OUT: return (shape){2, {C, C}, residual};
    case MLP_UP: return (shape){2, {hidden, C}, std};
    case MLP_DOWN: return (shape){2, {C, hidden}, residual};
    default: return (shape){1, {C}, 0};
    }
}

static fattn_status fill(fattn_ctx *ctx, const fattn_tensor *t, double mean, double std, uint64_t seed, int index) {
    const fattn_rng rng = {.seed = seed, .stream = RANDOM_INIT + (uint32_t)index};
    return fattn_tensor_normal(ctx, t, mean, std, rng);
}

static fattn_status create_param(model *m, int index, shape s) {
    fattn_param *p = &m->params[index];
    p->name = m->names[index];
    p->flags = s.std > 0 ? 0 : FATTN_PARAM_NO_DECAY;
    const fattn_dtype dtype = m->config.dtype ? (fattn_dtype)m->config.dtype : FATTN_F32;
    fattn_status status = fattn_tensor_alloc(m->ctx, dtype, s.ndim, s.size, &p->value);
    if (!status) status = fattn_tensor_alloc(m->ctx, FATTN_F32, s.ndim, s.size, &p->grad);
    if (!status) status = fill(m->ctx, &p->value, s.std > 0 ? 0 : 1, s.std, m->config.seed, index);
    if (!status) status = fill(m->ctx, &p->grad, 0, 0, 0, 0);
    return status;
}

fattn_status model_create(fattn_ctx *ctx, const model_config *config, model **out) {
    static const char *const names[BLOCK_PARAMS] = {"attn_norm", "qkv", "attn_out", "mlp_norm", "mlp_up", "mlp_down"};
    *out = NULL;
    const int n = FIRST_BLOCK + config->layers * BLOCK_PARAMS + 1;
    model *m = calloc(1, sizeof *m);
    if (!m) return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for a model");
    *m = (model){.ctx = ctx, .config = *config, .n_params = n};
    m->params = calloc((size_t)n, sizeof *m->params);
    m->list = calloc((size_t)n, sizeof *m->list);
    m->names = calloc((size_t)n, sizeof *m->names);
    fattn_status status = FATTN_OK;
    if (!m->params || !m->list || !m->names)
        status = fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for %d parameters", n);
    for (int i = 0; !status && i < n; ++i) {
        const int block = (i - FIRST_BLOCK) / BLOCK_PARAMS, which = (i - FIRST_BLOCK) % BLOCK_PARAMS;
        shape s = {2, {config->vocab, config->channels}, 0.02};
        m->list[i] = &m->params[i];
        if (i == EMBEDDING) {
            snprintf(m->names[i], NAME_BYTES, "embedding");
        } else if (i == SHIFT) {
            snprintf(m->names[i], NAME_BYTES, "shift");
            s = (shape){2, {config->channels, config->channels}, 1 / sqrt((double)config->channels)};
        } else if (i == n - 1) {
            snprintf(m->names[i], NAME_BYTES, "norm");
            s = block_shape(config, ATTN_NORM);
        } else {
            snprintf(m->names[i], NAME_BYTES, "block%d.%s", block, names[which]);
            s = block_shape(config, (enum block_param)which);
        }
        status = create_param(m, i, s);
    }
    if (status) {
        model_destroy(m);
        return status;
    }
    *out = m;
    return FATTN_OK;
}

void model_destroy(model *m) {
    if (!m) return;
    for (int i = 0; m->params && i < m->n_params; ++i) {
        fattn_tensor_free(m->ctx, &m->params[i].value);
        fattn_tensor_free(m->ctx, &m->params[i].grad);
    }
    free(m->params);
    free(m->list);
    free(m->names);
    free(m);
}

const model_config *model_get_config(const model *m) { return &m->config; }

fattn_param *const *model_params(const model *m, int *count) {
    *count = m->n_params;
    return m->list;
}

int64_t model_size(const model *m) {
    int64_t size = 0;
    for (int i = 0; i < m->n_params; ++i) size += fattn_tensor_numel(&m->params[i].value);
    return size;
}

/* x [B,S,C] -> x + attention(norm(x)); p: the parameters of the block. */
static fattn_var attend(const model_config *c, fattn_tape *t, fattn_param *p, fattn_var x,
                        const fattn_attention_params *params) {
    const fattn_var none = {0};
    const int H = c->heads, G = c->kv_heads, D = (int)(c->channels / H);
    const fattn_var h = fattn_op_rmsnorm(t, x, fattn_use(t, &p[ATTN_NORM]), NORM_EPS);
    const fattn_var qkv = fattn_op_linear(t, h, fattn_use(t, &p[QKV]), none); /* [B,S,(H+2G)D] */
    const fattn_var q = fattn_op_rope(t, fattn_op_heads(t, qkv, 0, H, D), ROPE_BASE, 0);
    const fattn_var k = fattn_op_rope(t, fattn_op_heads(t, qkv, H, G, D), ROPE_BASE, 0);
    const fattn_var v = fattn_op_heads(t, qkv, H + G, G, D);
    const fattn_var o = fattn_op_merge(t, fattn_op_attention(t, q, k, v, params)); /* [B,S,C] */
    return fattn_op_add(t, x, fattn_op_linear(t, o, fattn_use(t, &p[ATTN_OUT]), none));
}

static fattn_var mlp(fattn_tape *t, fattn_param *p, fattn_var x) {
    const fattn_var none = {0};
    const fattn_var h = fattn_op_rmsnorm(t, x, fattn_use(t, &p[MLP_NORM]), NORM_EPS);
    const fattn_var up = fattn_op_gelu(t, fattn_op_linear(t, h, fattn_use(t, &p[MLP_UP]), none));
    return fattn_op_add(t, x, fattn_op_linear(t, up, fattn_use(t, &p[MLP_DOWN]), none));
}

/* norm(x) after the last block, [B,S,C], and the embedding's variable on this tape. In training attention drops weights
   and, with an o in 16 bits, keeps what backward needs for an exact delta; STANDARD has no such thing. */
static fattn_var trunk(model *m, fattn_tape *t, const fattn_tensor *ids, bool training, int64_t step,
                       fattn_var *embedding) {
    const model_config *c = &m->config;
    const bool exact_delta = training && c->algorithm != FATTN_ALGO_STANDARD;
    const fattn_var none = {0};
    *embedding = fattn_use(t, &m->params[EMBEDDING]);
    fattn_var x = fattn_op_embedding(t, *embedding, fattn_input(t, ids));
    x = fattn_op_add(t, x, fattn_op_linear(t, op_shift(t, x), fattn_use(t, &m->params[SHIFT]), none));
    for (int layer = 0; layer < c->layers; ++layer) {
        fattn_param *p = &m->params[FIRST_BLOCK + layer * BLOCK_PARAMS];
        const fattn_attention_params params = {
            .struct_size = sizeof params,
            .flags = FATTN_CAUSAL | (exact_delta ? FATTN_EXACT_DELTA : 0),
            .algorithm = c->algorithm,
            .dropout_p = training ? c->dropout : 0,
            .rng = {.seed = c->seed, .stream = (uint32_t)(step * c->layers + layer)},
        };
        x = attend(c, t, p, x, &params);
        x = mlp(t, p, x);
    }
    return fattn_op_rmsnorm(t, x, fattn_use(t, &m->params[m->n_params - 1]), NORM_EPS);
}

fattn_var model_loss(model *m, fattn_tape *t, const fattn_tensor *ids, const fattn_tensor *targets, int64_t step) {
    fattn_var embedding;
    const fattn_var x = trunk(m, t, ids, true, step, &embedding);
    return fattn_op_linear_cross_entropy(t, x, embedding, fattn_input(t, targets), -1);
}

fattn_var model_test_loss(model *m, fattn_tape *t, const fattn_tensor *ids, const fattn_tensor *targets) {
    fattn_var embedding;
    const fattn_var x = trunk(m, t, ids, false, 0, &embedding);
    return fattn_op_linear_cross_entropy(t, x, embedding, fattn_input(t, targets), -1);
}

fattn_var model_logits(model *m, fattn_tape *t, const fattn_tensor *ids) {
    fattn_var embedding;
    const fattn_var x = trunk(m, t, ids, false, 0, &embedding);
    return fattn_op_linear(t, x, embedding, (fattn_var){0});
}
