/* A character model, one transformer layer, trained on a few lines; then it continues a text. */
#include <fattn/fattn.h>
#include <stdio.h>

enum { H = 4, D = 16, C = H * D, V = 128, B = 4, T = 32, STEPS = 300 };
enum { EMB, G1, WQKV, WO, G2, WUP, WDN, GF, PARAMS };
static float values[PARAMS][4 * C * C], gradients[PARAMS][4 * C * C];
static fattn_param p[PARAMS];

static const char text[] = "Tyger Tyger, burning bright,\nIn the forests of the night;\nWhat immortal hand or eye,\n"
                           "Could frame thy fearful symmetry?\n\nIn what distant deeps or skies,\n"
                           "Burnt the fire of thine eyes?\nOn what wings dare he aspire?\n"
                           "What the hand, dare seize the fire?\n";

/* ids [..,T] to features [..,T,C]; *table is the embedding, which also makes the logits. */
static fattn_var forward(fattn_tape *t, const fattn_tensor *ids, fattn_var *table) {
    const fattn_attention_params causal = {.struct_size = sizeof causal, .flags = FATTN_CAUSAL};
    const fattn_var none = {0};
    fattn_var w[PARAMS];
    fattn_tape_reset(t);
    for (int i = 0; i < PARAMS; ++i) w[i] = fattn_use(t, &p[i]);
    *table = w[EMB];
    fattn_var x = fattn_op_embedding(t, w[EMB], fattn_input(t, ids));
    fattn_var h = fattn_op_linear(t, fattn_op_rmsnorm(t, x, w[G1], 1e-5f), w[WQKV], none);
    fattn_var q = fattn_op_rope(t, fattn_op_heads(t, h, 0, H, D), 1e4f, 0);
    fattn_var k = fattn_op_rope(t, fattn_op_heads(t, h, H, H, D), 1e4f, 0);
    h = fattn_op_attention(t, q, k, fattn_op_heads(t, h, 2 * H, H, D), &causal);
    x = fattn_op_add(t, x, fattn_op_linear(t, fattn_op_merge(t, h), w[WO], none));
    h = fattn_op_linear(t, fattn_op_rmsnorm(t, x, w[G2], 1e-5f), w[WUP], none);
    x = fattn_op_add(t, x, fattn_op_linear(t, fattn_op_silu(t, h), w[WDN], none));
    return fattn_op_rmsnorm(t, x, w[GF], 1e-5f);
}

static fattn_status train(fattn_tape *t, fattn_adamw *opt, int step, double *loss) {
    int32_t ids[B][T], next[B][T];
    for (int b = 0; b < B; ++b)
        for (int i = 0, at = (step * B + b) * 37 % (int)(sizeof text - 1 - T); i < T; ++i)
            ids[b][i] = text[at + i], next[b][i] = text[at + i + 1];
    const int64_t shape[] = {B, T};
    const fattn_tensor x = fattn_tensor_view(ids, FATTN_I32, FATTN_CPU, 0, 2, shape);
    const fattn_tensor y = fattn_tensor_view(next, FATTN_I32, FATTN_CPU, 0, 2, shape);
    fattn_var table;
    const fattn_var h = forward(t, &x, &table);
    const fattn_var l = fattn_op_linear_cross_entropy(t, h, table, fattn_input(t, &y), -1);
    fattn_status s = fattn_tape_backward(t, l);
    if (!s) s = fattn_adamw_step(opt);
    return s ? s : fattn_tape_item(t, l, loss);
}

/* The most likely character after a window of T; with a temperature above 0 a random one. */
static fattn_status predict(fattn_ctx *ctx, fattn_tape *t, int32_t *window, int32_t *next) {
    const fattn_tensor x = fattn_tensor_view(window, FATTN_I32, FATTN_CPU, 0, 2, (int64_t[]){1, T});
    const fattn_tensor to = fattn_tensor_view(next, FATTN_I32, FATTN_CPU, 0, 1, (int64_t[]){1});
    fattn_var table;
    fattn_tensor logits;
    const fattn_var h = forward(t, &x, &table);
    const fattn_status s = fattn_tape_value(t, fattn_op_linear(t, h, table, (fattn_var){0}), &logits);
    if (s) return s;
    float *const row = (float *)logits.data + (T - 1) * V;
    const fattn_tensor last = fattn_tensor_view(row, FATTN_F32, FATTN_CPU, 0, 2, (int64_t[]){1, V});
    const fattn_sample_io io = {.struct_size = sizeof io, .temperature = 0, .logits = &last, .tokens = &to};
    return fattn_sample(ctx, &io);
}

int main(void) {
    static const int64_t sizes[PARAMS][2] = {{V, C}, {C}, {3 * C, C}, {C, C}, {C}, {4 * C, C}, {C, 4 * C}, {C}};
    fattn_param *list[PARAMS];
    fattn_ctx *ctx;
    fattn_tape *tape = NULL;
    fattn_adamw *opt = NULL;
    double loss = 0;
    if (fattn_ctx_create(NULL, &ctx)) return 1;
    fattn_status s = fattn_tape_create(ctx, &tape);
    for (uint32_t i = 0; i < PARAMS && !s; ++i) {
        const int ndim = sizes[i][1] ? 2 : 1; /* matrices are random, gains are 1 */
        list[i] = &p[i];
        p[i].value = fattn_tensor_view(values[i], FATTN_F32, FATTN_CPU, 0, ndim, sizes[i]);
        p[i].grad = fattn_tensor_view(gradients[i], FATTN_F32, FATTN_CPU, 0, ndim, sizes[i]);
        s = fattn_tensor_normal(ctx, &p[i].value, ndim == 1, ndim == 1 ? 0 : 0.08, (fattn_rng){1, i, 0});
    }
    if (!s) s = fattn_adamw_create(ctx, NULL, list, PARAMS, &opt);
    if (!s) s = fattn_adamw_set_lr(opt, 3e-3f);
    for (int step = 0; step < STEPS && !s; ++step) {
        s = train(tape, opt, step, &loss);
        if (step % 50 == 49) printf("step %3d  loss %.3f\n", step + 1, loss);
    }
    int32_t ids[T + 160];
    for (int i = 0; i < T; ++i) ids[i] = text[i];
    for (int i = T; i < T + 160 && !s; ++i) s = predict(ctx, tape, ids + i - T, &ids[i]);
    for (int i = 0; i < T + 160 && !s; ++i) putchar(ids[i]);
    putchar('\n');
    if (s) fprintf(stderr, "%s: %s\n", fattn_status_name(s), fattn_ctx_error(ctx));
    fattn_adamw_destroy(opt);
    fattn_tape_destroy(tape);
    fattn_ctx_destroy(ctx);
    return s != FATTN_OK || loss > 0.5;
}
