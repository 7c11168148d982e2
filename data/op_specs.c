/* The cases of ops.h5 and block.h5: inputs from Philox, results from the tape in fp64, gradients and
   central differences. */
#include "generator.h"
#include "op_graphs.h"

#include "core/tensor/philox.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

/* An input: normal numbers, or with below > 0 integers in [0, below), every third -1 if masked. */
typedef struct input {
    int ndim;
    int64_t shape[FATTN_MAX_DIMS];
    int32_t below;
    bool masked, absent;
} input;

typedef struct op_spec {
    const char *name, *op, *note;
    input in[OP_INPUTS]; /* ends with the first of ndim 0 that is not absent */
    struct {
        const char *name;
        double value;
    } attributes[6];
    const fattn_attention_params *params; /* NULL: the op takes none */
    double size;                          /* of the inputs; 0 = 1 */
    bool rounds;                          /* output is a step function: no differences */
} op_spec;

#define X(...)                                                                                                         \
    {                                                                                                                  \
        .ndim = sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t), .shape = { __VA_ARGS__ }                           \
    }
#define IDS(limit, ...)                                                                                                \
    { .ndim = sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t), .shape = {__VA_ARGS__}, .below = limit }
#define TARGETS(limit, ...)                                                                                            \
    {                                                                                                                  \
        .ndim = sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t), .shape = {__VA_ARGS__}, .below = limit,            \
        .masked = true                                                                                                 \
    }
#define ABSENT                                                                                                         \
    { .absent = true }

static const fattn_attention_params causal = {.struct_size = sizeof causal, .flags = FATTN_CAUSAL};
static const fattn_attention_params standard = {.struct_size = sizeof standard,
                                                .flags = FATTN_CAUSAL,
                                                .algorithm = FATTN_ALGO_STANDARD,
                                                .softcap = 2,
                                                .dropout_p = 0.2f,
                                                .rng = {.seed = 12}};
static const fattn_attention_params padded = {.struct_size = sizeof padded, .flags = FATTN_CAUSAL_TOP_LEFT};

static const op_spec op_specs[] = {
    {"linear", "linear", "x w^T", {X(5, 4), X(3, 4)}},
    {"linear_bias", "linear", "x w^T + b, leading dimensions", {X(2, 3, 4), X(5, 4), X(5)}},
    {"linear_wide", "linear", "more than a block of each", {X(33, 20), X(35, 20), X(35)}},
    {"matmul", "matmul", "a b", {X(5, 4), X(4, 3)}, {{"trans_a", 0}, {"trans_b", 0}}},
    {"matmul_ta", "matmul", "a^T b", {X(4, 5), X(4, 3)}, {{"trans_a", 1}, {"trans_b", 0}}},
    {"matmul_tb", "matmul", "a b^T", {X(5, 4), X(3, 4)}, {{"trans_a", 0}, {"trans_b", 1}}},
    {"matmul_batched",
     "matmul",
     "a^T b^T, two leading dimensions",
     {X(2, 3, 4, 5), X(2, 3, 2, 4)},
     {{"trans_a", 1}, {"trans_b", 1}}},
    {"add", "add", "the same shape", {X(3, 4), X(3, 4)}},
    {"add_row", "add", "a row for every row", {X(2, 3, 4), X(4)}},
    {"add_inner", "add", "broadcast in the middle", {X(2, 3, 4), X(2, 1, 4)}},
    {"mul", "mul", "the same shape", {X(3, 4), X(3, 4)}},
    {"mul_row", "mul", "a row for every row", {X(2, 3, 4), X(4)}},
    {"mul_inner", "mul", "broadcast in the middle", {X(2, 3, 4), X(2, 1, 4)}},
    {"gelu", "gelu", "tanh form", {X(4, 9)}},
    {"gelu_far", "gelu", "where it is x or 0", {X(4, 9)}, .size = 6},
    {"silu", "silu", "x sigmoid(x)", {X(4, 9)}},
    {"silu_far", "silu", "where it is x or 0", {X(4, 9)}, .size = 12},
    {"layernorm", "layernorm", "over the last dimension", {X(2, 3, 7), X(7), X(7)}, {{"eps", 1e-5f}}},
    {"layernorm_plain", "layernorm", "without bias", {X(5, 7), X(7)}, {{"eps", 1e-5f}}},
    {"rmsnorm", "rmsnorm", "over the last dimension", {X(2, 3, 7), X(7)}, {{"eps", 1e-5f}}},
    {"rmsnorm_small", "rmsnorm", "where eps weighs", {X(5, 7), X(7)}, {{"eps", 0.5f}}},
    {"embedding", "embedding", "ids that repeat", {X(5, 3), IDS(5, 2, 7)}},
    {"rope", "rope", "from position 0", {X(2, 2, 5, 6)}, {{"base", 10000}, {"position", 0}}},
    {"rope_later", "rope", "from position 100", {X(1, 2, 3, 4)}, {{"base", 500}, {"position", 100}}},
    {"heads", "heads", "heads 1 and 2 of four", {X(2, 3, 12)}, {{"first", 1}, {"n", 2}, {"head_dim", 3}}},
    {"merge", "merge", "[B,H,S,D] to [B,S,H*D]", {X(2, 3, 4, 5)}},
    {"attention",
     "attention",
     "causal, two query heads for a key head",
     {X(2, 4, 5, 3), X(2, 2, 6, 3), X(2, 2, 6, 4)},
     .params = &causal},
    {"attention_ex",
     "attention_ex",
     "bias, slopes, sink, cap, dropout; the gradient of L",
     {X(2, 2, 5, 3), X(2, 2, 6, 3), X(2, 2, 6, 4), X(1, 2, 5, 6), X(2), X(2)},
     .params = &standard},
    {"attention_padded",
     "attention_ex",
     "lengths; rows past the end are zero on a tape",
     {X(3, 2, 5, 3), X(3, 2, 6, 3), X(3, 2, 6, 3), ABSENT, ABSENT, ABSENT, IDS(6, 3), IDS(7, 3)},
     .params = &padded},
    {"cast_f16", "cast", "rounded to nearest even", {X(4, 9)}, {{"to", FATTN_F16}}, .rounds = true},
    {"cast_bf16", "cast", "rounded to nearest even", {X(4, 9)}, {{"to", FATTN_BF16}}, .rounds = true},
    {"cross_entropy", "cross_entropy", "mean over the rows", {X(2, 5, 7), IDS(7, 2, 5)}, {{"ignore", -1}}},
    {"cross_entropy_ignore",
     "cross_entropy",
     "a third of the rows left out",
     {X(9, 7), TARGETS(7, 9)},
     {{"ignore", -1}}},
    {"cross_entropy_nothing", "cross_entropy", "all rows left out: 0", {X(4, 3), IDS(1, 4)}, {{"ignore", 0}}},
    {"linear_cross_entropy",
     "linear_cross_entropy",
     "logits never whole",
     {X(2, 5, 4), X(7, 4), TARGETS(7, 2, 5)},
     {{"ignore", -1}}},
};

enum { B = 2, T = 6, C = 8, H = 2, D = 4, F = 12, VOCABULARY = 11 };
#define BLOCK_ATTRIBUTES                                                                                               \
    {"heads", H}, {"head_dim", D}, { "eps", 1e-5f }
static const op_spec block_specs[] = {
    {"block_rotary",
     "block_rotary",
     "RMSNorm, rotated positions, SiLU",
     {X(B, T, C), X(C), X(3 * C, C), X(C, C), X(C), X(F, C), X(C, F)},
     {BLOCK_ATTRIBUTES, {"base", 10000}},
     .params = &causal,
     .size = 0.5},
    {"block_gpt",
     "block_gpt",
     "LayerNorm and biases, GELU",
     {X(B, T, C), X(C), X(C), X(3 * C, C), X(3 * C), X(C, C), X(C), X(C), X(F, C), X(F), X(C, F)},
     {BLOCK_ATTRIBUTES},
     .params = &causal,
     .size = 0.5},
    {"model",
     "model",
     "a language model; its embedding is its head",
     {IDS(VOCABULARY, B, T), TARGETS(VOCABULARY, B, T), X(VOCABULARY, C), X(C), X(3 * C, C), X(C, C), X(C), X(F, C),
      X(C, F), X(C)},
     {BLOCK_ATTRIBUTES, {"base", 10000}, {"ignore", -1}},
     .params = &causal,
     .size = 0.5},
};

/* --- from a spec to a case -------------------------------------------------------------------- */

static int input_count(const op_spec *s) {
    int n = 0;
    while (n < OP_INPUTS && (s->in[n].ndim > 0 || s->in[n].absent)) ++n;
    return n;
}

static fattn_status put_integers(writer *w, const char *path, const input *in) {
    fattn_tensor t = {0};
    FATTNI_TRY(fattn_tensor_alloc(w->ctx, FATTN_I32, in->ndim, in->shape, &t));
    int32_t *const x = t.data;
    const uint32_t stream = w->stream++;
    for (int64_t n = 0; n < fattn_tensor_numel(&t); ++n) {
        const fattni_block random = fattni_philox(w->seed, (fattni_block){{(uint32_t)n, 0, 0, stream}});
        x[n] = in->masked && n % 3 == 1 ? -1 : (int32_t)(random.w[0] % (uint32_t)in->below);
    }
    const fattn_status status = fattn_fixture_put(w->file, path, &t);
    fattn_tensor_free(w->ctx, &t);
    return status;
}

static fattn_status put_normal(writer *w, const char *path, int ndim, const int64_t *shape, double size,
                               fattn_dtype exact) {
    fattn_tensor t = {0};
    fattn_status status = draw(w, exact, ndim, shape, &t);
    for (int64_t n = 0; status == FATTN_OK && n < fattn_tensor_numel(&t); ++n) ((double *)t.data)[n] *= size;
    if (status == FATTN_OK) status = put_f32(w, path, &t);
    fattn_tensor_free(w->ctx, &t);
    return status;
}

static fattn_status put_inputs(writer *w, const op_spec *s) {
    char path[128];
    for (int i = 0; i < input_count(s); ++i) {
        const input *const in = &s->in[i];
        snprintf(path, sizeof path, "/cases/%s/in%d", s->name, i);
        if (in->absent) continue;
        const double size = s->size > 0 ? s->size : 1;
        FATTNI_TRY(in->below > 0 ? put_integers(w, path, in)
                                 : put_normal(w, path, in->ndim, in->shape, size, FATTN_F32));
    }
    return FATTN_OK;
}

static fattn_status put_attributes(writer *w, const op_spec *s) {
    char path[128];
    snprintf(path, sizeof path, "/cases/%s", s->name);
    FATTNI_TRY(fattn_fixture_put_text(w->file, path, "op", s->op));
    FATTNI_TRY(fattn_fixture_put_text(w->file, path, "note", s->note));
    for (int n = 0; n < 6 && s->attributes[n].name; ++n)
        FATTNI_TRY(fattn_fixture_put_f64(w->file, path, s->attributes[n].name, s->attributes[n].value));
    return s->params ? fattn_fixture_put_params(w->file, s->name, s->params) : FATTN_OK;
}

/* A first run gives the outputs, whose shapes the upstream gradients have. */
static fattn_status put_upstream(writer *w, const op_spec *s) {
    char path[128];
    op_case c;
    FATTNI_TRY(op_case_load(w->ctx, w->file, s->name, FATTN_F64, &c));
    fattn_status status = op_case_run(&c, false);
    for (int i = 0; i < c.n_out && status == FATTN_OK; ++i) {
        snprintf(path, sizeof path, "/cases/%s/d_out%d", s->name, i);
        /* Exact in 16 bits, as the output of a cast is. */
        const fattn_dtype exact = s->rounds ? (fattn_dtype)s->attributes[0].value : FATTN_F32;
        status = put_normal(w, path, c.out[i].ndim, c.out[i].shape, 1, exact);
    }
    op_case_free(&c);
    return status;
}

/* sum d_out*out without infinities (L of rows without keys). */
static fattn_status loss(void *user, double *out) {
    op_case *const c = user;
    FATTNI_TRY(op_case_run(c, false));
    double sum = 0;
    for (int i = 0; i < c->n_out; ++i) {
        const double *const y = c->out[i].data, *const d = c->d_out[i].data;
        for (int64_t n = 0; n < fattn_tensor_numel(&c->out[i]); ++n)
            if (isfinite(y[n])) sum += y[n] * d[n];
    }
    *out = sum;
    return FATTN_OK;
}

static fattn_status put_results(writer *w, const op_spec *s, op_case *c) {
    char path[128], name[16];
    FATTNI_TRY(op_case_run(c, true));
    for (int i = 0; i < c->n_out; ++i) {
        snprintf(path, sizeof path, "/cases/%s/out%d", s->name, i);
        FATTNI_TRY(fattn_fixture_put(w->file, path, &c->out[i]));
    }
    for (int i = 0; i < OP_INPUTS; ++i) {
        if (c->in[i].grad.dtype == 0) continue;
        snprintf(path, sizeof path, "/cases/%s/d_in%d", s->name, i);
        FATTNI_TRY(fattn_fixture_put(w->file, path, &c->in[i].grad));
    }
    for (int i = 0; i < OP_INPUTS && !s->rounds; ++i) { /* these runs clear the gradients */
        if (c->in[i].grad.dtype == 0) continue;
        snprintf(name, sizeof name, "in%d", i);
        const difference d = {s->name, name, c->in[i].value, c->in[i].grad, loss, c};
        FATTNI_TRY(put_differences(w, &d));
    }
    return FATTN_OK;
}

static fattn_status put_op(writer *w, const op_spec *s) {
    FATTNI_TRY(put_attributes(w, s));
    FATTNI_TRY(put_inputs(w, s));
    FATTNI_TRY(put_upstream(w, s));
    op_case c;
    FATTNI_TRY(op_case_load(w->ctx, w->file, s->name, FATTN_F64, &c));
    const fattn_status status = put_results(w, s, &c);
    op_case_free(&c);
    return status;
}

fattn_status put_ops(writer *w) {
    for (size_t n = 0; n < sizeof op_specs / sizeof *op_specs; ++n) FATTNI_TRY(put_op(w, &op_specs[n]));
    return FATTN_OK;
}

fattn_status put_blocks(writer *w) {
    for (size_t n = 0; n < sizeof block_specs / sizeof *block_specs; ++n) FATTNI_TRY(put_op(w, &block_specs[n]));
    return FATTN_OK;
}
