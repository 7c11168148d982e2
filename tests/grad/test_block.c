/* A whole transformer, from the embedding to the loss, against finite differences; and the training
   step of the README. */
#include "failing_alloc.h"

#include <criterion/criterion.h>
#include <fattn/fattn.h>

#include <math.h>
#include <stdio.h>

typedef struct variant {
    const char *name;
    int heads, heads_kv, head_dim, layers;
    bool layernorm, gelu, biased, tied;
    fattn_attention_params p;
} variant;

enum { BATCH = 2, ROWS = 5, WORDS = 7, WIDEN = 2, MOST_INPUTS = 64 };

/* Returns the inputs in the order of `shapes` below. */
typedef struct cursor {
    const fattn_var *in;
    int at;
} cursor;
static fattn_var next(cursor *c) { return c->in[c->at++]; }

static fattn_var norm(fattn_tape *t, const variant *m, cursor *c, fattn_var x) {
    const fattn_var gain = next(c);
    if (!m->layernorm) return fattn_op_rmsnorm(t, x, gain, 1e-5f);
    return fattn_op_layernorm(t, x, gain, m->biased ? next(c) : (fattn_var){0}, 1e-5f);
}
static fattn_var linear(fattn_tape *t, const variant *m, cursor *c, fattn_var x) {
    const fattn_var w = next(c);
    return fattn_op_linear(t, x, w, m->biased ? next(c) : (fattn_var){0});
}

static fattn_var block(fattn_tape *t, const variant *m, cursor *c, fattn_var x) {
    const int H = m->heads, K = m->heads_kv, D = m->head_dim;
    fattn_var h = linear(t, m, c, norm(t, m, c, x));
    const fattn_var q = fattn_op_rope(t, fattn_op_heads(t, h, 0, H, D), 1e2f, 3);
    const fattn_var k = fattn_op_rope(t, fattn_op_heads(t, h, H, K, D), 1e2f, 3);
    const fattn_var v = fattn_op_heads(t, h, H + K, K, D);
    h = fattn_op_merge(t, fattn_op_attention(t, q, k, v, &m->p));
    x = fattn_op_add(t, x, linear(t, m, c, h));
    h = linear(t, m, c, norm(t, m, c, x));
    h = m->gelu ? fattn_op_gelu(t, h) : fattn_op_silu(t, h);
    return fattn_op_add(t, x, linear(t, m, c, h));
}

/* in: ids, targets, table, then the inputs per layer and at the end as listed in `shapes`. */
static fattn_var model(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    const variant *m = user;
    cursor c = {in, 3};
    fattn_var x = fattn_op_embedding(t, in[2], in[0]);
    for (int l = 0; l < m->layers; ++l) x = block(t, m, &c, x);
    x = norm(t, m, &c, x);
    const fattn_var head = m->tied ? in[2] : next(&c);
    cr_assert_eq(c.at, n_in);
    if (m->tied) return fattn_op_linear_cross_entropy(t, x, head, in[1], -1);
    return fattn_op_cross_entropy(t, fattn_op_linear(t, x, head, (fattn_var){0}), in[1], -1);
}

typedef struct shapes {
    int64_t at[MOST_INPUTS][2];
    int n;
} shapes;
static void matrix(shapes *s, const variant *m, int64_t rows, int64_t columns) {
    s->at[s->n][0] = rows, s->at[s->n++][1] = columns;
    if (columns && m->biased) s->at[s->n++][0] = rows;
}
static shapes shapes_of(const variant *m) {
    shapes s = {.at = {{BATCH, ROWS}, {BATCH, ROWS}}, .n = 2};
    const int64_t C = (int64_t)m->heads * m->head_dim;
    const int64_t qkv = (int64_t)(m->heads + 2 * m->heads_kv) * m->head_dim;
    s.at[s.n][0] = WORDS, s.at[s.n++][1] = C;
    for (int l = 0; l <= m->layers; ++l) {
        for (int half = 0; half < (l < m->layers ? 2 : 1); ++half) {
            s.at[s.n++][0] = C; /* gain */
            if (m->layernorm && m->biased) s.at[s.n++][0] = C;
            if (l == m->layers) break;
            matrix(&s, m, half ? WIDEN * C : qkv, C);
            matrix(&s, m, C, half ? WIDEN * C : C);
        }
    }
    if (!m->tied) s.at[s.n][0] = WORDS, s.at[s.n++][1] = C;
    return s;
}

static void check(const variant *base) {
    failing_alloc memory = {.left = -1}; /* fresh memory is NaN */
    fattn_ctx *ctx = failing_context(&memory, 1);
    variant m = *base;
    m.p.struct_size = sizeof m.p;
    const shapes s = shapes_of(&m);
    fattn_tensor in[MOST_INPUTS];
    for (int i = 0; i < s.n; ++i) {
        const int ndim = s.at[i][1] ? 2 : 1;
        cr_assert_eq(fattn_tensor_alloc(ctx, i < 2 ? FATTN_I32 : FATTN_F64, ndim, s.at[i], &in[i]), FATTN_OK);
        for (int32_t e = 0; e < BATCH * ROWS && i < 2; ++e) /* every fourth target is ignored */
            ((int32_t *)in[i].data)[e] = i && e % 4 == 3 ? -1 : (5 * e + 3 * i) % WORDS;
        const fattn_rng rng = {.seed = 21, .stream = (uint32_t)i};
        if (i >= 2) cr_assert_eq(fattn_tensor_normal(ctx, &in[i], ndim == 1, 0.5, rng), FATTN_OK);
    }
    fattn_report r = {.struct_size = sizeof r};
    const fattn_status status = fattn_gradcheck(ctx, model, &m, in, s.n, NULL, &r);
    cr_assert_eq(status, FATTN_OK, "%s: %s", m.name, fattn_ctx_error(ctx));
    cr_assert_gt(r.checked, 300);
    for (int i = 0; i < s.n; ++i) fattn_tensor_free(ctx, &in[i]);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
}

Test(block, llama_like) {
    check(&(variant){"one layer", 2, 1, 4, 1, .tied = true, .p = {.flags = FATTN_CAUSAL}});
    check(&(variant){"two layers", 2, 2, 2, 2, .p = {.flags = FATTN_CAUSAL}});
}
Test(block, gpt_like) {
    check(&(variant){"flash", 2, 2, 4, 1, .layernorm = true, .gelu = true, .biased = true, .tied = true,
                     .p = {.flags = FATTN_CAUSAL}});
    check(&(variant){"stored", 3, 1, 2, 1, .layernorm = true, .gelu = true, .biased = true,
                     .p = {.algorithm = FATTN_ALGO_STANDARD, .dropout_p = 0.25f, .softcap = 3}});
}

/* ---- the training step of the README ---- */

enum { H = 4, D = 16, C = H * D, VOCABULARY = 32, B = 2, S = 24 };
struct model {
    fattn_param emb, g1, wqkv, wo, g2, wup, wdn, gf;
};

static fattn_var forward(fattn_tape *t, struct model *m, const fattn_tensor *ids, const fattn_tensor *next_ids) {
    const fattn_attention_params ap = {.struct_size = sizeof ap, .flags = FATTN_CAUSAL};
    const fattn_var none = {0}, E = fattn_use(t, &m->emb);
    fattn_var x = fattn_op_embedding(t, E, fattn_input(t, ids)); /* [B,S,C] */
    fattn_var h = fattn_op_rmsnorm(t, x, fattn_use(t, &m->g1), 1e-5f);
    fattn_var p = fattn_op_linear(t, h, fattn_use(t, &m->wqkv), none);      /* [B,S,3C] */
    fattn_var q = fattn_op_rope(t, fattn_op_heads(t, p, 0, H, D), 1e4f, 0); /* [B,H,S,D] */
    fattn_var k = fattn_op_rope(t, fattn_op_heads(t, p, H, H, D), 1e4f, 0);
    fattn_var v = fattn_op_heads(t, p, 2 * H, H, D);                      /* a view */
    fattn_var a = fattn_op_merge(t, fattn_op_attention(t, q, k, v, &ap)); /* keeps O, L */
    x = fattn_op_linear_residual(t, a, fattn_use(t, &m->wo), none, x);
    h = fattn_op_rmsnorm(t, x, fattn_use(t, &m->g2), 1e-5f);
    h = fattn_op_silu(t, fattn_op_linear(t, h, fattn_use(t, &m->wup), none));
    x = fattn_op_linear_residual(t, h, fattn_use(t, &m->wdn), none, x);
    h = fattn_op_rmsnorm(t, x, fattn_use(t, &m->gf), 1e-5f);
    return fattn_op_cross_entropy(t, fattn_op_linear(t, h, E, none), fattn_input(t, next_ids), -1);
}

static fattn_status train_step(fattn_ctx *ctx, fattn_tape *t, fattn_adamw *opt, struct model *m,
                               const fattn_tensor *ids, const fattn_tensor *next_ids, double *loss) {
    fattn_tape_reset(t); /* frees nothing: the arena is reused */
    const fattn_var l = forward(t, m, ids, next_ids);
    fattn_status s = fattn_tape_backward(t, l);
    if (!s) s = fattn_adamw_step(opt);
    if (!s) s = fattn_tape_item(t, l, loss);
    if (s) fprintf(stderr, "%s: %s\n", fattn_status_name(s), fattn_ctx_error(ctx));
    return s;
}

Test(block, the_step_of_the_readme_learns) {
    fattn_ctx *ctx;
    fattn_tape *tape;
    fattn_adamw *opt;
    struct model m = {0};
    const int64_t sizes[8][2] = {{VOCABULARY, C}, {C}, {3 * C, C}, {C, C}, {C}, {4 * C, C}, {C, 4 * C}, {C}};
    fattn_param *const list[8] = {&m.emb, &m.g1, &m.wqkv, &m.wo, &m.g2, &m.wup, &m.wdn, &m.gf};
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(fattn_tape_create(ctx, &tape), FATTN_OK);
    for (uint32_t i = 0; i < 8; ++i) {
        const int ndim = sizes[i][1] ? 2 : 1;
        fattn_param *p = list[i];
        cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, ndim, sizes[i], &p->value), FATTN_OK);
        cr_assert_eq(fattn_tensor_alloc(ctx, FATTN_F32, ndim, sizes[i], &p->grad), FATTN_OK);
        cr_assert_eq(
            fattn_tensor_normal(ctx, &p->value, ndim == 1, ndim == 1 ? 0 : 0.05, (fattn_rng){.seed = 1, .stream = i}),
            FATTN_OK);
        cr_assert_eq(fattn_tensor_normal(ctx, &p->grad, 0, 0, (fattn_rng){0}), FATTN_OK);
    }
    cr_assert_eq(fattn_adamw_create(ctx, NULL, list, 8, &opt), FATTN_OK);
    int32_t text[B][S + 1];
    for (int b = 0; b < B; ++b)
        for (int i = 0; i <= S; ++i) text[b][i] = (i * i + 11 * b) % VOCABULARY;
    fattn_tensor ids = fattn_tensor_view(text, FATTN_I32, FATTN_CPU, 0, 2, (int64_t[]){B, S});
    ids.stride[0] = S + 1;
    fattn_tensor following = ids;
    following.data = &text[0][1];
    double first = 0, last = 0;
    for (int step = 0; step < 30; ++step)
        cr_assert_eq(train_step(ctx, tape, opt, &m, &ids, &following, step ? &last : &first), FATTN_OK);
    cr_assert_float_eq(first, log(VOCABULARY), 0.5);
    cr_assert_lt(last, 0.7 * first);
    fattn_adamw_destroy(opt);
    fattn_tape_destroy(tape);
    for (int i = 0; i < 8; ++i) {
        fattn_tensor_free(ctx, &list[i]->value);
        fattn_tensor_free(ctx, &list[i]->grad);
    }
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
}
