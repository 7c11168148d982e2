#include "cli/train/model.h"

#include "cli/base/device.h"
#include "cli/train/model_parts.h"
#include "cli/train/op_shift.h"
#include "cli/random/random.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* ---- the architecture of this program ---- */

/* Embedding and shift come before the blocks, the last gain after them. Parameters of a block, in order: */
enum block_param { ATTN_NORM, QKV, ATTN_OUT, MLP_NORM, MLP_UP, MLP_DOWN, BLOCK_PARAMS };
enum { EMBEDDING, SHIFT, FIRST_BLOCK };
static const float NORM_EPS = 1e-5f, ROPE_BASE = 1e4f;

static int count(const model_config *c) { return FIRST_BLOCK + c->layers * BLOCK_PARAMS + 1; }

static param_shape block_shape(const model_config *c, enum block_param p) {
    const int64_t C = c->channels, head_dim = C / c->heads, hidden = c->mlp_ratio * C;
    const double std = 1 / sqrt((double)C), residual = std / sqrt(2.0 * c->layers);
    switch (p) {
    case QKV: return (param_shape){2, {C + 2 * c->kv_heads * head_dim, C}, 0, std, ""};
    case ATTN_OUT: return (param_shape){2, {C, C}, 0, residual, ""};
    case MLP_UP: return (param_shape){2, {hidden, C}, 0, std, ""};
    case MLP_DOWN: return (param_shape){2, {C, hidden}, 0, residual, ""};
    default: return (param_shape){1, {C}, 1, 0, ""};
    }
}

static param_shape shape(const model_config *c, int index) {
    static const char *const names[BLOCK_PARAMS] = {"attn_norm", "qkv", "attn_out", "mlp_norm", "mlp_up", "mlp_down"};
    const int64_t C = c->channels;
    const int block = (index - FIRST_BLOCK) / BLOCK_PARAMS, which = (index - FIRST_BLOCK) % BLOCK_PARAMS;
    if (index == EMBEDDING) return (param_shape){2, {c->vocab, C}, 0, 0.02, "embedding"};
    if (index == SHIFT) return (param_shape){2, {C, C}, 0, 1 / sqrt((double)C), "shift"};
    if (index == count(c) - 1) return (param_shape){1, {C}, 1, 0, "norm"};
    param_shape s = block_shape(c, (enum block_param)which);
    snprintf(s.name, sizeof s.name, "block%d.%s", block, names[which]);
    return s;
}

/* Philox: each parameter from its own stream. */
static fattn_status init(model *m) {
    fattn_status status = FATTN_OK;
    for (int i = 0; !status && i < m->n_params; ++i) {
        const param_shape s = shape(&m->config, i);
        const fattn_rng rng = {.seed = m->config.seed, .stream = RANDOM_INIT + (uint32_t)i};
        if (s.std > 0) status = fattn_tensor_normal(m->ctx, &m->params[i].value, 0, s.std, rng);
    }
    return status;
}

/* x [B,S,C] -> x + attention(norm(x)); p: the parameters of the block. */
static fattn_var attend(const model *m, fattn_tape *t, fattn_param *p, fattn_var x, const model_pass *pass, int layer) {
    const model_config *c = &m->config;
    const fattn_var none = {0};
    const int H = c->heads, G = c->kv_heads, D = (int)(c->channels / H);
    const fattn_var qkv = fattn_op_norm_linear(t, x, fattn_use(t, &p[ATTN_NORM]), none, NORM_EPS, fattn_use(t, &p[QKV]),
                                               none, FATTN_NORM_RMS); /* [B,S,(H+2G)D] */
    const fattn_var q = fattn_op_heads(t, qkv, 0, H, D), k = fattn_op_heads(t, qkv, H, G, D);
    const fattn_var v = fattn_op_heads(t, qkv, H + G, G, D);
    const fattn_var o = fattn_op_merge(t, model_attend(m, t, q, k, v, ROPE_BASE, pass, layer)); /* [B,S,C] */
    return fattn_op_linear_residual(t, o, fattn_use(t, &p[ATTN_OUT]), none, x);
}

static fattn_var mlp(fattn_tape *t, fattn_param *p, fattn_var x) {
    const fattn_var none = {0};
    const fattn_var up = fattn_op_norm_linear(t, x, fattn_use(t, &p[MLP_NORM]), none, NORM_EPS,
                                              fattn_use(t, &p[MLP_UP]), none, FATTN_NORM_RMS | FATTN_LINEAR_GELU);
    return fattn_op_linear_residual(t, up, fattn_use(t, &p[MLP_DOWN]), none, x);
}

static fattn_var trunk(model *m, fattn_tape *t, const fattn_tensor *ids, fattn_var embedding, const model_pass *pass) {
    const model_config *c = &m->config;
    const fattn_var none = {0};
    fattn_var x = fattn_op_embedding(t, embedding, fattn_input(t, ids));
    const fattn_var shifted = op_shift(t, x, pass->cache ? &pass->cache->before : NULL);
    x = fattn_op_linear_residual(t, shifted, fattn_use(t, &m->params[SHIFT]), none, x);
    for (int layer = 0; layer < c->layers; ++layer) {
        fattn_param *p = &m->params[FIRST_BLOCK + layer * BLOCK_PARAMS];
        x = attend(m, t, p, x, pass, layer);
        x = mlp(t, p, x);
    }
    return fattn_op_rmsnorm(t, x, fattn_use(t, &m->params[m->n_params - 1]), NORM_EPS);
}

static const model_arch model_shift = {count, FIRST_BLOCK, shape, init, trunk};

/* ---- parameters ---- */

int64_t model_columns(const model_config *c) {
    enum { MULTIPLE = 128 };
    return c->arch == ARCH_GPT2 ? (c->vocab + MULTIPLE - 1) / MULTIPLE * MULTIPLE : c->vocab;
}

/* Parameters begin at multiples of this, as allocated memory does. Without a gap between them: GPT-2's sizes are
   multiples of it, but for biases of 1600 channels in 16 bits. */
enum { PARAM_ALIGN = 256 };

static fattn_dtype dtype_of(const model *m) { return m->config.dtype ? (fattn_dtype)m->config.dtype : FATTN_F32; }

/* The bytes of a parameter in this dtype, and what is free behind it. */
static int64_t bytes_of(const model *m, int index, fattn_dtype dtype) {
    const param_shape s = m->arch->shape(&m->config, index);
    int64_t bytes = (int64_t)fattn_dtype_size(dtype);
    for (int d = 0; d < s.ndim; ++d) bytes *= s.size[d];
    return (bytes + PARAM_ALIGN - 1) / PARAM_ALIGN * PARAM_ALIGN;
}

static fattn_status create_block(model *m, fattn_dtype dtype, fattn_tensor *out) {
    int64_t bytes = 0;
    for (int i = 0; i < m->n_params; ++i) bytes += bytes_of(m, i, dtype);
    return fattn_tensor_alloc(m->ctx, FATTN_U8, 1, &bytes, out);
}

/* The tensor of a parameter at an offset of a block, which moves on. */
static fattn_tensor place(const model *m, int index, fattn_dtype dtype, const fattn_tensor *block, int64_t *offset) {
    const param_shape s = m->arch->shape(&m->config, index);
    char *const data = (char *)block->data + *offset;
    *offset += bytes_of(m, index, dtype);
    return fattn_tensor_view(data, dtype, (fattn_device)block->device, block->device_id, s.ndim, s.size);
}

/* at: its offsets in the blocks. */
static fattn_status create_param(model *m, int index, int64_t at[2]) {
    fattn_param *p = &m->params[index];
    const param_shape s = m->arch->shape(&m->config, index);
    snprintf(m->names[index], MODEL_NAME_BYTES, "%s", s.name);
    m->list[index] = p;
    p->name = m->names[index];
    p->flags = (s.std > 0 ? 0 : FATTN_PARAM_NO_DECAY) | (m->config.frozen ? FATTN_PARAM_FROZEN : 0);
    p->value = place(m, index, dtype_of(m), &m->values, &at[0]);
    const fattn_status status = fattn_tensor_normal(m->ctx, &p->value, s.mean, 0, (fattn_rng){0});
    if (status || m->config.frozen) return status;
    p->grad = place(m, index, FATTN_F32, &m->grads, &at[1]);
    return fattn_tensor_normal(m->ctx, &p->grad, 0, 0, (fattn_rng){0});
}

static fattn_status create_params(model *m) {
    int64_t at[2] = {0, 0};
    fattn_status status = create_block(m, dtype_of(m), &m->values);
    if (!status && !m->config.frozen) status = create_block(m, FATTN_F32, &m->grads);
    for (int i = 0; !status && i < m->n_params; ++i) status = create_param(m, i, at);
    return status;
}

static fattn_status create_positions(model *m) {
    const int64_t n = m->config.positions;
    int32_t *numbers = malloc((size_t)n * sizeof *numbers);
    if (!numbers) return fattn_ctx_fail(m->ctx, FATTN_E_NOMEM, "no memory for %lld positions", (long long)n);
    for (int64_t i = 0; i < n; ++i) numbers[i] = (int32_t)i;
    fattn_status status = fattn_tensor_alloc(m->ctx, FATTN_I32, 1, &n, &m->positions);
    if (!status) status = device_write_i32(m->ctx, &m->positions, numbers);
    free(numbers);
    return status;
}

fattn_status model_create(fattn_ctx *ctx, const model_config *config, model **out) {
    *out = NULL;
    model *m = calloc(1, sizeof *m);
    if (!m) return fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for a model");
    *m = (model){.ctx = ctx, .config = *config, .arch = config->arch == ARCH_GPT2 ? &model_gpt2 : &model_shift};
    if (m->config.positions == 0) m->config.positions = config->context;
    const int n = m->n_params = m->arch->count(config);
    m->params = calloc((size_t)n, sizeof *m->params);
    m->list = calloc((size_t)n, sizeof *m->list);
    m->names = calloc((size_t)n, sizeof *m->names);
    fattn_status status = FATTN_OK;
    if (!m->params || !m->list || !m->names)
        status = fattn_ctx_fail(ctx, FATTN_E_NOMEM, "no memory for %d parameters", n);
    if (!status) status = create_params(m);
    if (!status && config->arch == ARCH_GPT2) status = create_positions(m);
    if (!status) status = m->arch->init(m);
    if (status) {
        model_destroy(m);
        return status;
    }
    *out = m;
    return FATTN_OK;
}

void model_destroy(model *m) {
    if (!m) return;
    fattn_tensor_free(m->ctx, &m->values);
    fattn_tensor_free(m->ctx, &m->grads);
    fattn_tensor_free(m->ctx, &m->positions);
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

int model_late(const model *m) { return m->arch->late; }

int64_t model_size(const model *m) {
    int64_t size = 0;
    for (int i = 0; i < m->n_params; ++i) size += fattn_tensor_numel(&m->params[i].value);
    return size;
}

/* ---- graphs ---- */

static const model_pass plain = {0};

/* The loss of hidden [..,C] and targets [..], over the symbols of the table's rows. */
static fattn_var head_loss(const model *m, fattn_tape *t, fattn_var hidden, fattn_var embedding,
                           const fattn_tensor *targets) {
    const fattn_var y = fattn_input(t, targets);
    if (model_columns(&m->config) == m->config.vocab) return fattn_op_linear_cross_entropy(t, hidden, embedding, y, -1);
    return fattn_op_linear_cross_entropy_padded(t, hidden, embedding, y, -1, m->config.vocab);
}

fattn_var model_loss(model *m, fattn_tape *t, const fattn_tensor *ids, const fattn_tensor *targets,
                     const fattn_tensor *step) {
    const fattn_var embedding = fattn_use(t, &m->params[EMBEDDING]);
    return head_loss(m, t, m->arch->trunk(m, t, ids, embedding, &(model_pass){.training = true, .step = step}),
                     embedding, targets);
}

fattn_var model_test_loss(model *m, fattn_tape *t, const fattn_tensor *ids, const fattn_tensor *targets) {
    const fattn_var embedding = fattn_use(t, &m->params[EMBEDDING]);
    return head_loss(m, t, m->arch->trunk(m, t, ids, embedding, &plain), embedding, targets);
}

fattn_status model_row_losses(model *m, fattn_tape *t, const fattn_tensor *ids, const fattn_tensor *targets,
                              double *losses) {
    const fattn_var embedding = fattn_use(t, &m->params[EMBEDDING]);
    fattn_tensor hidden;
    fattn_status status = fattn_tape_value(t, m->arch->trunk(m, t, ids, embedding, &plain), &hidden);
    for (int64_t row = 0; !status && row < ids->shape[0]; ++row) {
        const fattn_tensor h = fattn_tensor_slice(&hidden, 0, row, row + 1);
        const fattn_tensor y = fattn_tensor_slice(targets, 0, row, row + 1);
        status = fattn_tape_item(t, head_loss(m, t, fattn_input(t, &h), embedding, &y), &losses[row]);
    }
    return status;
}

fattn_var model_logits(model *m, fattn_tape *t, const fattn_tensor *ids) {
    const fattn_var embedding = fattn_use(t, &m->params[EMBEDDING]);
    return fattn_op_linear(t, m->arch->trunk(m, t, ids, embedding, &plain), embedding, (fattn_var){0});
}

fattn_status model_next_logits(model *m, fattn_tape *t, const fattn_tensor *ids, model_cache *cache,
                               fattn_tensor *logits) {
    const int64_t S = ids->shape[1];
    const model_pass pass = {.cache = cache};
    fattn_status status = model_cache_open(cache, S);
    if (status) return status;
    const fattn_var embedding = fattn_use(t, &m->params[EMBEDDING]);
    const fattn_var hidden = m->arch->trunk(m, t, ids, embedding, &pass);
    const fattn_var last = fattn_op_slice(t, hidden, 1, S - 1, S);
    status = fattn_tape_value(t, fattn_op_linear(t, last, embedding, (fattn_var){0}), logits);
    return status ? status : model_cache_add(cache, S);
}
