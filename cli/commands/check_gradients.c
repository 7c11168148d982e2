/* Gradient checks of the fused op, of a transformer block and of a model, through the public tape. */
#include "cli/commands/check.h"
#include "cli/base/device.h"
#include "cli/output/progress.h"

#include <fattn/check.h>

#include <stdio.h>

enum { INPUTS_MAX = 10 };

/* One struct for attention and block cases: a block has Hq heads of width D. */
typedef struct grad_case {
    const char *name;
    int64_t B, Hq, Hkv, Sq, Sk, D, Dv;
    uint32_t flags;
    int64_t sample; /* coordinates per input; 0 = all */
    bool lse;       /* the output is L, not O */
    int algorithm;  /* set for each run */
} grad_case;

static const grad_case attention_cases[] = {
    {"plain", 2, 2, 2, 7, 7, 4, 4},
    {"causal", 2, 2, 2, 7, 7, 4, 4, FATTN_CAUSAL},
    {"gqa", 1, 4, 2, 6, 6, 4, 4, FATTN_CAUSAL},
    {"mqa", 1, 4, 1, 6, 6, 4, 4},
    {"fewer_rows", 1, 2, 2, 4, 9, 4, 4, FATTN_CAUSAL},
    {"more_rows", 1, 2, 2, 9, 4, 4, 4, FATTN_CAUSAL},
    {"top_left", 1, 2, 2, 4, 9, 4, 4, FATTN_CAUSAL_TOP_LEFT},
    {"value_dim", 1, 2, 2, 6, 6, 5, 3, FATTN_CAUSAL},
    {"one_key", 1, 2, 2, 5, 1, 4, 4},
    {"one_row", 1, 2, 2, 1, 5, 4, 4},
    {"head_dim_1", 1, 2, 2, 6, 6, 1, 1},
    {"lse", 1, 2, 2, 6, 6, 4, 4, FATTN_CAUSAL, 0, true},
    {"tiles", 1, 2, 1, 131, 131, 64, 64, FATTN_CAUSAL, 24},
    {"tiles_ragged", 1, 1, 1, 67, 193, 33, 65, 0, 24},
};

static fattn_var attention(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)n_in;
    const grad_case *c = user;
    const fattn_attention_params p = {.struct_size = sizeof p, .flags = c->flags, .algorithm = c->algorithm};
    const fattn_attention_vars x = {.struct_size = sizeof x, .q = in[0], .k = in[1], .v = in[2]};
    fattn_var lse;
    const fattn_var o = fattn_op_attention_ex(t, &x, &p, c->lse ? &lse : NULL);
    return c->lse ? lse : o;
}

/* in: x [B,S,C], gain [C], W_qkv [(Hq+2Hkv)D,C], W_o [C,C], gain [C], W_up [2C,C], W_down [C,2C].
 */
static fattn_var block(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    (void)n_in;
    const grad_case *c = user;
    const fattn_attention_params p = {.struct_size = sizeof p, .flags = c->flags, .algorithm = c->algorithm};
    const fattn_var none = {0};
    const int hq = (int)c->Hq, hkv = (int)c->Hkv, d = (int)c->D;
    fattn_var h = fattn_op_rmsnorm(t, in[0], in[1], 1e-5f);
    const fattn_var qkv = fattn_op_linear(t, h, in[2], none);
    const fattn_var q = fattn_op_rope(t, fattn_op_heads(t, qkv, 0, hq, d), 1e4f, 0);
    const fattn_var k = fattn_op_rope(t, fattn_op_heads(t, qkv, hq, hkv, d), 1e4f, 0);
    const fattn_var v = fattn_op_heads(t, qkv, hq + hkv, hkv, d);
    const fattn_var a = fattn_op_merge(t, fattn_op_attention(t, q, k, v, &p));
    const fattn_var x = fattn_op_add(t, in[0], fattn_op_linear(t, a, in[3], none));
    h = fattn_op_rmsnorm(t, x, in[4], 1e-5f);
    h = fattn_op_gelu(t, fattn_op_linear(t, h, in[5], none));
    return fattn_op_add(t, x, fattn_op_linear(t, h, in[6], none));
}

/* in: table [V,C], ids [B,S], then a block's weights, targets [B,S]: loss with a tied embedding. */
static fattn_var model(fattn_tape *t, const fattn_var *in, int n_in, void *user) {
    fattn_var x[7] = {fattn_op_embedding(t, in[0], in[1])};
    for (int i = 1; i < 7; ++i) x[i] = in[i + 1];
    return fattn_op_linear_cross_entropy(t, block(t, x, 7, user), in[0], in[n_in - 1], -1);
}

/* ---- running one ---- */

typedef struct inputs {
    fattn_tensor at[INPUTS_MAX];
    int n;
    fattn_status status; /* first failure */
} inputs;

static void add_normal(check_run *run, inputs *in, double std, int ndim, const int64_t *shape) {
    if (in->status != FATTN_OK) return;
    fattn_tensor *t = &in->at[in->n++];
    in->status = fattn_tensor_alloc(run->ctx, run->dtype, ndim, shape, t);
    if (in->status == FATTN_OK)
        in->status = fattn_tensor_normal(run->ctx, t, 0, std, (fattn_rng){.seed = 7, .stream = (uint32_t)in->n});
}

/* [B,S] of symbols below `vocab`; every fifth is -1 where `holes`. */
static void add_symbols(check_run *run, inputs *in, const grad_case *c, int vocab, bool holes) {
    enum { SYMBOLS_MAX = 64 };
    int32_t symbols[SYMBOLS_MAX];
    if (in->status != FATTN_OK) return;
    fattn_tensor *t = &in->at[in->n++];
    for (int32_t i = 0; i < c->B * c->Sq; ++i) symbols[i] = holes && i % 5 == 4 ? -1 : (7 * i + in->n) % vocab;
    in->status = fattn_tensor_alloc(run->ctx, FATTN_I32, 2, (int64_t[]){c->B, c->Sq}, t);
    if (in->status == FATTN_OK) in->status = device_write_i32(run->ctx, t, symbols);
}

static void add_weights(check_run *run, inputs *in, const grad_case *c) {
    const int64_t C = c->Hq * c->D, qkv = (c->Hq + 2 * c->Hkv) * c->D;
    add_normal(run, in, 1, 1, (int64_t[]){C});
    add_normal(run, in, 0.4, 2, (int64_t[]){qkv, C});
    add_normal(run, in, 0.4, 2, (int64_t[]){C, C});
    add_normal(run, in, 1, 1, (int64_t[]){C});
    add_normal(run, in, 0.4, 2, (int64_t[]){2 * C, C});
    add_normal(run, in, 0.4, 2, (int64_t[]){C, 2 * C});
}

static void check(check_run *run, check_result *r, fattn_graph_fn graph, grad_case *c, inputs *in) {
    const fattn_gradcheck_options o = {.struct_size = sizeof o, .max_coords = c->sample, .seed = 11};
    const double begin = seconds_now();
    for (int w = 0; w < CHECK_WAYS; ++w) {
        check_way *way = &r->way[w];
        fattn_report report = {.struct_size = sizeof report};
        c->algorithm = check_algorithm(w);
        fattn_status s = in->status;
        if (s == FATTN_OK) s = fattn_gradcheck(run->ctx, graph, c, in->at, in->n, &o, &report);
        way->state = s == FATTN_OK ? CHECK_OK : s == FATTN_E_UNSUPPORTED ? CHECK_SKIPPED : CHECK_FAILED;
        way->checked = report.checked;
        way->worst = check_worst(&report, run->dtype == FATTN_F64 ? 1e-2 : 1);
        snprintf(way->message, sizeof way->message, "%s", fattn_ctx_error(run->ctx));
    }
    r->seconds = seconds_now() - begin;
    for (int i = 0; i < in->n; ++i) fattn_tensor_free(run->ctx, &in->at[i]);
    check_end(run, r);
}

static void check_attention(check_run *run, grad_case c) {
    char name[64];
    snprintf(name, sizeof name, "attention/%s", c.name);
    if (!check_begin(run, name)) return;
    check_result r = {.name = name};
    check_sizes(&r, c.B, c.Hq, c.Hkv, c.Sq, c.Sk, c.D, c.Dv);
    inputs in = {0};
    add_normal(run, &in, 1, 4, (int64_t[]){c.B, c.Hq, c.Sq, c.D});
    add_normal(run, &in, 1, 4, (int64_t[]){c.B, c.Hkv, c.Sk, c.D});
    add_normal(run, &in, 1, 4, (int64_t[]){c.B, c.Hkv, c.Sk, c.Dv});
    check(run, &r, attention, &c, &in);
}

static void check_block(check_run *run, bool whole) {
    enum { VOCAB = 11 };
    grad_case c = {"block", 2, 2, 1, 5, 5, 4, 4, FATTN_CAUSAL};
    const char *name = whole ? "model" : "block";
    if (!check_begin(run, name)) return;
    check_result r = {.name = name};
    snprintf(r.what, sizeof r.what, "%s",
             whole ? "embedding, block, tied cross entropy" : "norm, rope, attention, norm, MLP");
    const int64_t C = c.Hq * c.D;
    inputs in = {0};
    if (whole) {
        add_normal(run, &in, 1, 2, (int64_t[]){VOCAB, C});
        add_symbols(run, &in, &c, VOCAB, false);
    } else {
        add_normal(run, &in, 1, 3, (int64_t[]){c.B, c.Sq, C});
    }
    add_weights(run, &in, &c);
    if (whole) add_symbols(run, &in, &c, VOCAB, true);
    check(run, &r, whole ? model : block, &c, &in);
}

void check_gradients(check_run *run) {
    for (size_t i = 0; i < sizeof attention_cases / sizeof *attention_cases; ++i)
        check_attention(run, attention_cases[i]);
    check_block(run, false);
    check_block(run, true);
}
