/* GPT-2 (Radford et al. 2019) as PyTorch and llm.c have it. All biases, LayerNorm with eps 1e-5, GELU's tanh form:

       x = wte[ids] + wpe[positions]
       for each block:  x += c_proj attention(q, k, v) + b,  q,k,v = c_attn ln_1(x) + b
                        x += c_proj gelu(c_fc ln_2(x) + b) + b
       logits = ln_f(x) wte^T */
#include "cli/base/device.h"
#include "cli/train/model_parts.h"
#include "cli/random/mt19937.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

enum block_param {
    LN_1,
    LN_1_BIAS,
    ATTN,
    ATTN_BIAS,
    ATTN_PROJ,
    ATTN_PROJ_BIAS,
    LN_2,
    LN_2_BIAS,
    FC,
    FC_BIAS,
    FC_PROJ,
    FC_PROJ_BIAS,
    BLOCK_PARAMS
};
enum { WTE, WPE, FIRST_BLOCK, AFTER_BLOCKS = 2 };
static const float NORM_EPS = 1e-5f;

static int count(const model_config *c) { return FIRST_BLOCK + c->layers * BLOCK_PARAMS + AFTER_BLOCKS; }

static param_shape named(param_shape s, const char *format, int block) {
    snprintf(s.name, sizeof s.name, format, block);
    return s;
}

static param_shape shape(const model_config *c, int index) {
    static const char *const names[BLOCK_PARAMS] = {
        "h.%d.ln_1.weight",        "h.%d.ln_1.bias",        "h.%d.attn.c_attn.weight", "h.%d.attn.c_attn.bias",
        "h.%d.attn.c_proj.weight", "h.%d.attn.c_proj.bias", "h.%d.ln_2.weight",        "h.%d.ln_2.bias",
        "h.%d.mlp.c_fc.weight",    "h.%d.mlp.c_fc.bias",    "h.%d.mlp.c_proj.weight",  "h.%d.mlp.c_proj.bias"};
    const int64_t C = c->channels, hidden = c->mlp_ratio * C;
    const int last = count(c) - AFTER_BLOCKS, block = (index - FIRST_BLOCK) / BLOCK_PARAMS;
    /* Products of floats, as PyTorch's script computes them. */
    const double std = 0.02f, residual = 0.02f * (1 / sqrtf(2.0f * (float)c->layers));
    if (index == WTE) return named((param_shape){2, {model_columns(c), C}, 0, std, ""}, "wte.weight", 0);
    if (index == WPE) return named((param_shape){2, {c->positions, C}, 0, std, ""}, "wpe.weight", 0);
    if (index >= last)
        return named((param_shape){1, {C}, index == last, 0, ""}, index == last ? "ln_f.weight" : "ln_f.bias", 0);
    param_shape s = {1, {C}, 0, 0, ""};
    const enum block_param which = (enum block_param)((index - FIRST_BLOCK) % BLOCK_PARAMS);
    switch (which) {
    case LN_1:
    case LN_2: s.mean = 1; break;
    case ATTN: s = (param_shape){2, {3 * C, C}, 0, std, ""}; break;
    case ATTN_BIAS: s.size[0] = 3 * C; break;
    case ATTN_PROJ: s = (param_shape){2, {C, C}, 0, residual, ""}; break;
    case FC: s = (param_shape){2, {hidden, C}, 0, std, ""}; break;
    case FC_BIAS: s.size[0] = hidden; break;
    case FC_PROJ: s = (param_shape){2, {C, hidden}, 0, residual, ""}; break;
    default: break; /* biases of C elements */
    }
    return named(s, names[which], block);
}

/* One generator, and parameters in PyTorch's order. Rows of wte that are no tokens are 0. */
static fattn_status init(model *m) {
    const model_config *c = &m->config;
    mt19937 *g = malloc(sizeof *g);
    fattn_status status = g ? FATTN_OK : fattn_ctx_fail(m->ctx, FATTN_E_NOMEM, "no memory for a random generator");
    if (g) mt19937_seed(g, (uint32_t)c->seed);
    for (int i = 0; !status && i < m->n_params; ++i) {
        const param_shape s = shape(c, i);
        if (s.std <= 0) continue;
        const int64_t all = s.size[0] * s.size[1], drawn = i == WTE ? c->vocab * c->channels : all;
        float *x = calloc((size_t)all, sizeof *x);
        if (!x) status = fattn_ctx_fail(m->ctx, FATTN_E_NOMEM, "no memory for %lld numbers", (long long)all);
        if (x) mt19937_normal(g, x, drawn, (float)s.std);
        if (x) status = device_write(m->ctx, &m->params[i].value, x);
        free(x);
    }
    free(g);
    return status;
}

/* The stream of residuals, and the norm of it that the next products take: computed together with the sum, of which
   backward makes use, or, `late`, in generation, together with the product. */
typedef struct stream {
    fattn_tape *tape;
    bool late;
    fattn_var x, normed; /* normed: not when late */
    fattn_param *norm;   /* gain and bias */
} stream;

/* x += linear(y). */
static void add_linear(stream *s, fattn_var y, fattn_param *p, fattn_param *norm) {
    fattn_tape *const t = s->tape;
    const fattn_var w = fattn_use(t, &p[0]), bias = fattn_use(t, &p[1]);
    s->norm = norm;
    if (s->late)
        s->x = fattn_op_linear_residual(t, y, w, bias, s->x);
    else
        s->x = fattn_op_linear_norm(t, y, w, bias, s->x, fattn_use(t, &norm[0]), fattn_use(t, &norm[1]), NORM_EPS,
                                    &s->normed);
}

/* linear(norm(x)); flags: FATTN_LINEAR_GELU or 0. */
static fattn_var linear_of_norm(const stream *s, fattn_param *p, uint32_t flags) {
    fattn_tape *const t = s->tape;
    const fattn_var w = fattn_use(t, &p[0]), bias = fattn_use(t, &p[1]);
    if (!s->late) return flags ? fattn_op_linear_gelu(t, s->normed, w, bias) : fattn_op_linear(t, s->normed, w, bias);
    return fattn_op_norm_linear(t, s->x, fattn_use(t, &s->norm[0]), fattn_use(t, &s->norm[1]), NORM_EPS, w, bias,
                                flags);
}

static fattn_var norm_of(const stream *s) {
    return fattn_op_layernorm(s->tape, s->x, fattn_use(s->tape, &s->norm[0]), fattn_use(s->tape, &s->norm[1]),
                              NORM_EPS);
}

static fattn_var trunk(model *m, fattn_tape *t, const fattn_tensor *ids, fattn_var embedding, const model_pass *pass) {
    const model_config *c = &m->config;
    const int H = c->heads, D = (int)(c->channels / H);
    const fattn_tensor positions = model_positions(m, pass, ids->shape[1]);
    const fattn_var at = fattn_op_embedding(t, fattn_use(t, &m->params[WPE]), fattn_input(t, &positions)); /* [S,C] */
    fattn_param *const blocks = &m->params[FIRST_BLOCK]; /* of no blocks: ln_f */
    stream s = {.tape = t, .late = pass->cache, .norm = &blocks[LN_1]};
    s.x = fattn_op_add(t, fattn_op_embedding(t, embedding, fattn_input(t, ids)), at); /* [B,S,C] */
    if (!s.late) s.normed = norm_of(&s);
    for (int layer = 0; layer < c->layers; ++layer) {
        fattn_param *const p = &blocks[layer * BLOCK_PARAMS];
        const fattn_var qkv = linear_of_norm(&s, &p[ATTN], 0); /* [B,S,3C] */
        const fattn_var q = fattn_op_heads(t, qkv, 0, H, D), k = fattn_op_heads(t, qkv, H, H, D);
        const fattn_var o = model_attend(m, t, q, k, fattn_op_heads(t, qkv, 2 * H, H, D), 0, pass, layer);
        add_linear(&s, fattn_op_merge(t, o), &p[ATTN_PROJ], &p[LN_2]);
        add_linear(&s, linear_of_norm(&s, &p[FC], FATTN_LINEAR_GELU), &p[FC_PROJ],
                   &p[BLOCK_PARAMS + LN_1]); /* the next block's, or ln_f */
    }
    return s.late ? norm_of(&s) : s.normed;
}

const model_arch model_gpt2 = {count, FIRST_BLOCK, shape, init, trunk};
