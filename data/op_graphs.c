/* From a case's attribute "op" to calls of the tape. */
#include "op_graphs.h"

#include "core/base/internal.h"
#include "core/tensor/numeric.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* Collects attributes until one is absent. */
typedef struct builder {
    op_case *c;
    fattn_tape *t;
    fattn_var in[OP_INPUTS], out[OP_OUTPUTS];
    fattn_status status;
} builder;

static double number(builder *b, const char *attr) {
    double x = 0;
    if (b->status == FATTN_OK) b->status = fattn_fixture_get_f64(b->c->file, b->c->path, attr, &x);
    return x;
}
static int whole(builder *b, const char *attr) { return (int)number(b, attr); }

static void linear(builder *b) { b->out[0] = fattn_op_linear(b->t, b->in[0], b->in[1], b->in[2]); }
static void matmul(builder *b) {
    const int a = whole(b, "trans_a"), bt = whole(b, "trans_b");
    b->out[0] = fattn_op_matmul(b->t, b->in[0], b->in[1], a, bt);
}
static void add(builder *b) { b->out[0] = fattn_op_add(b->t, b->in[0], b->in[1]); }
static void mul(builder *b) { b->out[0] = fattn_op_mul(b->t, b->in[0], b->in[1]); }
static void gelu(builder *b) { b->out[0] = fattn_op_gelu(b->t, b->in[0]); }
static void silu(builder *b) { b->out[0] = fattn_op_silu(b->t, b->in[0]); }
static void layernorm(builder *b) {
    b->out[0] = fattn_op_layernorm(b->t, b->in[0], b->in[1], b->in[2], (float)number(b, "eps"));
}
static void rmsnorm(builder *b) { b->out[0] = fattn_op_rmsnorm(b->t, b->in[0], b->in[1], (float)number(b, "eps")); }
static void embedding(builder *b) { b->out[0] = fattn_op_embedding(b->t, b->in[0], b->in[1]); }
static void rope(builder *b) {
    const float base = (float)number(b, "base");
    b->out[0] = fattn_op_rope(b->t, b->in[0], base, (int64_t)number(b, "position"));
}
static void heads(builder *b) {
    const int first = whole(b, "first"), n = whole(b, "n"), head_dim = whole(b, "head_dim");
    b->out[0] = fattn_op_heads(b->t, b->in[0], first, n, head_dim);
}
static void merge(builder *b) { b->out[0] = fattn_op_merge(b->t, b->in[0]); }
static void cast(builder *b) { b->out[0] = fattn_op_cast(b->t, b->in[0], (fattn_dtype)whole(b, "to")); }
static void cross_entropy(builder *b) {
    b->out[0] = fattn_op_cross_entropy(b->t, b->in[0], b->in[1], whole(b, "ignore"));
}
static void linear_cross_entropy(builder *b) {
    b->out[0] = fattn_op_linear_cross_entropy(b->t, b->in[0], b->in[1], b->in[2], whole(b, "ignore"));
}

static fattn_attention_params params(builder *b) {
    fattn_attention_params p = {.struct_size = sizeof p};
    if (b->status == FATTN_OK) b->status = fattn_fixture_params(b->c->file, b->c->name, &p);
    return p;
}

static void attention(builder *b) {
    const fattn_attention_params p = params(b);
    b->out[0] = fattn_op_attention(b->t, b->in[0], b->in[1], b->in[2], &p);
}

static void attention_ex(builder *b) {
    const fattn_var *const in = b->in;
    const fattn_attention_params p = params(b);
    const fattn_attention_vars x = {.struct_size = sizeof x,
                                    .q = in[0],
                                    .k = in[1],
                                    .v = in[2],
                                    .bias = in[3],
                                    .alibi = in[4],
                                    .sink = in[5],
                                    .seqlens_q = in[6],
                                    .seqlens_k = in[7],
                                    .cu_seqlens_q = in[8],
                                    .cu_seqlens_k = in[9]};
    b->out[0] = fattn_op_attention_ex(b->t, &x, &p, &b->out[1]);
}

/* x + attention(norm x), then x + mlp(norm x), as in Llama but without the gate: RMSNorm, rotary positions,
   SiLU. Inputs: gain, wqkv, wo, gain, wup, wdown. */
static fattn_var rotary_block(builder *b, fattn_var x, const fattn_var *w) {
    fattn_tape *const t = b->t;
    const fattn_var none = {0};
    const fattn_attention_params p = params(b);
    const int H = whole(b, "heads"), D = whole(b, "head_dim");
    const float eps = (float)number(b, "eps"), base = (float)number(b, "base");
    fattn_var h = fattn_op_linear(t, fattn_op_rmsnorm(t, x, w[0], eps), w[1], none);
    const fattn_var q = fattn_op_rope(t, fattn_op_heads(t, h, 0, H, D), base, 0);
    const fattn_var k = fattn_op_rope(t, fattn_op_heads(t, h, H, H, D), base, 0);
    const fattn_var v = fattn_op_heads(t, h, 2 * H, H, D);
    h = fattn_op_merge(t, fattn_op_attention(t, q, k, v, &p));
    x = fattn_op_add(t, x, fattn_op_linear(t, h, w[2], none));
    h = fattn_op_linear(t, fattn_op_rmsnorm(t, x, w[3], eps), w[4], none);
    return fattn_op_add(t, x, fattn_op_linear(t, fattn_op_silu(t, h), w[5], none));
}

static void block_rotary(builder *b) { b->out[0] = rotary_block(b, b->in[0], b->in + 1); }

/* As in GPT-2: LayerNorm and biases, GELU. Inputs: x, gain, bias, wqkv, bqkv, wo, gain, bias, wup,
   bup, wdown. */
static void block_gpt(builder *b) {
    fattn_tape *const t = b->t;
    const fattn_var *const in = b->in, none = {0};
    const fattn_attention_params p = params(b);
    const int H = whole(b, "heads"), D = whole(b, "head_dim");
    const float eps = (float)number(b, "eps");
    fattn_var x = in[0];
    fattn_var h = fattn_op_linear(t, fattn_op_layernorm(t, x, in[1], in[2], eps), in[3], in[4]);
    const fattn_var q = fattn_op_heads(t, h, 0, H, D), k = fattn_op_heads(t, h, H, H, D);
    const fattn_var v = fattn_op_heads(t, h, 2 * H, H, D);
    h = fattn_op_merge(t, fattn_op_attention(t, q, k, v, &p));
    x = fattn_op_add(t, x, fattn_op_linear(t, h, in[5], none));
    h = fattn_op_linear(t, fattn_op_layernorm(t, x, in[6], in[7], eps), in[8], in[9]);
    b->out[0] = fattn_op_add(t, x, fattn_op_linear(t, fattn_op_gelu(t, h), in[10], none));
}

/* A language model of one rotary block with a tied embedding. Inputs: ids, targets, embedding, the block's
   six, gain. */
static void model(builder *b) {
    fattn_tape *const t = b->t;
    const fattn_var *const in = b->in;
    fattn_var x = fattn_op_embedding(t, in[2], in[0]);
    x = rotary_block(b, x, in + 3);
    x = fattn_op_rmsnorm(t, x, in[9], (float)number(b, "eps"));
    b->out[0] = fattn_op_linear_cross_entropy(t, x, in[2], in[1], whole(b, "ignore"));
}

/* Bit i of integers: input i is I32; of constants: it has no gradient. */
static const struct {
    const char *op;
    void (*build)(builder *b);
    unsigned integers, constants;
} graphs[] = {
    {"linear", linear, 0, 0},
    {"matmul", matmul, 0, 0},
    {"add", add, 0, 0},
    {"mul", mul, 0, 0},
    {"gelu", gelu, 0, 0},
    {"silu", silu, 0, 0},
    {"layernorm", layernorm, 0, 0},
    {"rmsnorm", rmsnorm, 0, 0},
    {"embedding", embedding, 1u << 1, 0},
    {"rope", rope, 0, 0},
    {"heads", heads, 0, 0},
    {"merge", merge, 0, 0},
    {"attention", attention, 0, 0},
    {"attention_ex", attention_ex, 0xfu << 6, 1u << 4},
    {"cast", cast, 0, 0},
    {"cross_entropy", cross_entropy, 1u << 1, 0},
    {"linear_cross_entropy", linear_cross_entropy, 1u << 2, 0},
    {"block_rotary", block_rotary, 0, 0},
    {"block_gpt", block_gpt, 0, 0},
    {"model", model, 3u, 0},
};
enum { GRAPHS = sizeof graphs / sizeof *graphs };

/* --- sum out*d_out, as an op: L = -inf of a row without keys is left out ------------------- */

static int64_t offset_of(const fattn_tensor *t, int64_t n) {
    int64_t offset = 0;
    for (int d = t->ndim - 1; d >= 0; --d) {
        offset += n % t->shape[d] * t->stride[d];
        n /= t->shape[d];
    }
    return offset;
}

static double element(const fattn_tensor *t, int64_t n) { return fattni_load(t->data, t->dtype, offset_of(t, n)); }

static fattn_status contract_infer(fattn_op_call *c) {
    c->out[0].dtype = FATTN_F64;
    return FATTN_OK;
}

/* On a GPU the sum is not used. */
static fattn_status contract_forward(fattn_op_call *c) {
    if (fattn_ctx_device(c->ctx) != FATTN_CPU) return fattn_tensor_normal(c->ctx, &c->out[0], 0, 0, (fattn_rng){0});
    double sum = 0;
    for (int i = 0; i < c->n_in; i += 2)
        for (int64_t n = 0; n < fattn_tensor_numel(&c->in[i]); ++n) {
            const double y = element(&c->in[i], n);
            if (isfinite(y)) sum += y * element(&c->in[i + 1], n);
        }
    *(double *)c->out[0].data = sum;
    return FATTN_OK;
}

static fattn_status contract_backward(fattn_op_call *c) {
    for (int i = 0; i < c->n_in; i += 2)
        if (c->d_in[i].data)
            FATTNI_TRY((c->d_in_fresh[i] ? fattn_tensor_copy : fattn_tensor_add)(c->ctx, &c->d_in[i], &c->in[i + 1]));
    return FATTN_OK;
}

static const fattn_op_def contract = {.struct_size = sizeof contract,
                                      .n_out = 1,
                                      .name = "contract",
                                      .infer = contract_infer,
                                      .forward = contract_forward,
                                      .backward = contract_backward};

/* --- cases ------------------------------------------------------------------------------------ */

static fattn_status zero(fattn_ctx *ctx, const fattn_tensor *t) {
    return fattn_tensor_normal(ctx, t, 0, 0, (fattn_rng){0});
}

/* A tensor of the file, copied to the tape's device. */
static fattn_status get(op_case *c, const char *path, fattn_dtype as, fattn_tensor *out) {
    fattn_tensor here;
    FATTNI_TRY(fattn_fixture_get(c->file, path, as, c->on == c->ctx ? out : &here));
    if (c->on == c->ctx) return FATTN_OK;
    fattn_status s = fattn_tensor_alloc(c->on, as, here.ndim, here.shape, out);
    if (s == FATTN_OK) s = fattn_tensor_copy(c->on, out, &here);
    fattn_tensor_free(c->ctx, &here);
    return s;
}

static fattn_status find_graph(op_case *c) {
    char op[32];
    FATTNI_TRY(fattn_fixture_get_text(c->file, c->path, "op", op, sizeof op));
    for (c->graph = 0; c->graph < GRAPHS; ++c->graph)
        if (strcmp(graphs[c->graph].op, op) == 0) return FATTN_OK;
    return fattn_ctx_fail(c->ctx, FATTN_E_IO, "%s: op %s is not known", c->path, op);
}

static fattn_status load(op_case *c) {
    char path[128];
    FATTNI_TRY(find_graph(c));
    for (int i = 0; i < OP_INPUTS; ++i) {
        fattn_param *const p = &c->in[i];
        const bool integer = graphs[c->graph].integers >> i & 1;
        const bool constant = integer || (graphs[c->graph].constants >> i & 1);
        snprintf(path, sizeof path, "%s/in%d", c->path, i);
        if (!fattn_fixture_has(c->file, path)) continue;
        FATTNI_TRY(get(c, path, integer ? FATTN_I32 : c->dtype, &p->value));
        if (constant) continue;
        FATTNI_TRY(fattn_tensor_alloc(c->on, c->dtype, p->value.ndim, p->value.shape, &p->grad));
    }
    for (int i = 0; i < OP_OUTPUTS; ++i) {
        snprintf(path, sizeof path, "%s/d_out%d", c->path, i);
        if (fattn_fixture_has(c->file, path)) FATTNI_TRY(get(c, path, FATTN_F64, &c->d_out[i]));
    }
    return fattn_tape_create(c->on, &c->tape);
}

fattn_status op_case_load(fattn_ctx *ctx, fattn_fixture *file, const char *name, fattn_dtype dtype, op_case *out) {
    return op_case_load_on(ctx, ctx, file, name, dtype, out);
}

fattn_status op_case_load_on(fattn_ctx *ctx, fattn_ctx *on, fattn_fixture *file, const char *name, fattn_dtype dtype,
                             op_case *out) {
    *out = (op_case){.ctx = ctx, .on = on, .file = file, .name = name, .dtype = dtype};
    snprintf(out->path, sizeof out->path, "/cases/%s", name);
    const fattn_status status = load(out);
    if (status != FATTN_OK) op_case_free(out);
    return status;
}

static fattn_status take_output(op_case *c, fattn_var v, int i) {
    fattn_tensor y;
    FATTNI_TRY(fattn_tape_value(c->tape, v, &y));
    if (c->out[i].dtype == 0) FATTNI_TRY(fattn_tensor_alloc(c->ctx, FATTN_F64, y.ndim, y.shape, &c->out[i]));
    return fattn_tensor_copy(c->on, &c->out[i], &y);
}

fattn_status op_case_run(op_case *c, bool gradients) {
    builder b = {.c = c, .t = c->tape};
    fattn_var pairs[2 * OP_OUTPUTS] = {{0}};
    fattn_tape_reset(c->tape);
    for (int i = 0; i < OP_INPUTS; ++i) {
        fattn_param *const p = &c->in[i];
        if (p->value.dtype == 0) continue;
        p->flags = gradients ? 0 : FATTN_PARAM_FROZEN;
        if (p->grad.dtype) FATTNI_TRY(zero(c->on, &p->grad));
        b.in[i] = p->grad.dtype ? fattn_use(c->tape, p) : fattn_input(c->tape, &p->value);
    }
    graphs[c->graph].build(&b);
    if (b.status != FATTN_OK) return b.status;
    FATTNI_TRY(fattn_tape_status(c->tape));
    for (c->n_out = 0; c->n_out < OP_OUTPUTS && b.out[c->n_out].id; ++c->n_out) {
        pairs[2 * c->n_out] = b.out[c->n_out];
        if (gradients) pairs[2 * c->n_out + 1] = fattn_input(c->tape, &c->d_out[c->n_out]);
        FATTNI_TRY(take_output(c, b.out[c->n_out], c->n_out));
    }
    if (!gradients) return FATTN_OK;
    return fattn_tape_backward(c->tape, fattn_op_custom(c->tape, &contract, pairs, 2 * c->n_out, NULL));
}

void op_case_free(op_case *c) {
    fattn_tape_destroy(c->tape);
    for (int i = 0; i < OP_INPUTS; ++i) {
        fattn_tensor_free(c->on, &c->in[i].value);
        fattn_tensor_free(c->on, &c->in[i].grad);
    }
    for (int i = 0; i < OP_OUTPUTS; ++i) {
        fattn_tensor_free(c->ctx, &c->out[i]);
        fattn_tensor_free(c->on, &c->d_out[i]);
    }
    *c = (op_case){0};
}
