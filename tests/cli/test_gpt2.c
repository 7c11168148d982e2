/* GPT-2 of `fattn train`: random numbers, initialisation, padding of the table, schedules, accumulated gradients. What
   it computes is held against fp64 in tests/train/test_gpt2_parity.py. */
#include <criterion/criterion.h>

#include "cli/random/mt19937.h"
#include "tests/cli/symbols.h"
#include "cli/train/trainer.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- the generator ---- */

/* torch.manual_seed(137), five of torch.randint, then normal_ of 8 and of 16 numbers with a draw after each: the values
   that PyTorch prints. */
Test(mt19937, draws_and_normals_are_torchs) {
    static const uint32_t first[] = {4053805790u, 2173880614u, 380293709u, 1237255315u, 2986595568u};
    static const float few[] = {0.7947664260864258f,  1.4369317293167114f,  -0.2292192131280899f, 0.47556325793266296f,
                                -0.6334410905838013f, -0.5791953802108765f, -0.0925704762339592f, -0.8659197092056274f};
    static const float block[] = {
        -1.2813878059387207f,  -2.646395683288574f,   -0.06569503247737885f, 0.2180829495191574f,
        -0.46536165475845337f, -0.33108410239219666f, 2.5485482215881348f,   0.10425379872322083f,
        0.8460659980773926f,   0.9462448358535767f,   -0.2913765013217926f,  0.34313806891441345f,
        -1.1186704635620117f,  -0.18305328488349915f, -2.3153159618377686f,  0.3961987793445587f};
    mt19937 g;
    float x[16];
    mt19937_seed(&g, 137);
    for (int i = 0; i < 5; ++i) cr_assert_eq(mt19937_draw(&g), first[i], "%d", i);
    /* PyTorch's vectorized sine and logarithm differ from this machine's by an ulp or two. */
    mt19937_normal(&g, x, 8, 1);
    for (int i = 0; i < 8; ++i) cr_assert_float_eq(x[i], few[i], 4e-7f, "%d: %.9g", i, (double)x[i]);
    cr_assert_eq(mt19937_draw(&g), 2186503452u);
    mt19937_normal(&g, x, 16, 1);
    for (int i = 0; i < 16; ++i) cr_assert_float_eq(x[i], block[i], 8e-7f, "%d: %.9g", i, (double)x[i]);
    cr_assert_eq(mt19937_draw(&g), 2756748748u);
}

/* 20 = 16 + 4: the last 16 are drawn once more, the first 4 stay. */
Test(mt19937, the_last_block_is_drawn_again) {
    mt19937 g, h;
    float x[20], y[16], discarded[16];
    mt19937_seed(&g, 3), mt19937_seed(&h, 3);
    mt19937_normal(&g, x, 20, 0.5f);
    mt19937_normal(&h, discarded, 16, 0.5f);
    cr_assert_eq(memcmp(x, discarded, 4 * sizeof *x), 0);
    for (int i = 0; i < 4; ++i) mt19937_draw(&h);
    mt19937_normal(&h, y, 16, 0.5f);
    cr_assert_eq(memcmp(x + 4, y, sizeof y), 0);
    cr_assert_eq(mt19937_draw(&g), mt19937_draw(&h));
}

Test(mt19937, shuffle_is_a_permutation_of_the_draws) {
    enum { N = 1000 };
    mt19937 g, h;
    int32_t x[N], y[N];
    mt19937_seed(&g, 42), mt19937_seed(&h, 42);
    for (int i = 0; i < N; ++i) x[i] = y[i] = i;
    mt19937_shuffle(&g, x, N);
    for (int i = N - 1; i > 0; --i) {
        const uint32_t j = mt19937_draw(&h) % (uint32_t)(i + 1);
        const int32_t t = y[i];
        y[i] = y[j], y[j] = t;
    }
    cr_assert_eq(memcmp(x, y, sizeof x), 0);
    bool seen[N] = {false};
    for (int i = 0; i < N; ++i) seen[x[i]] = true;
    for (int i = 0; i < N; ++i) cr_assert(seen[i]);
}

/* ---- the model ---- */

enum { VOCAB = 130, ROWS = 256, CONTEXT = 12, POSITIONS = 16, BATCH = 4, CHANNELS = 32, LAYERS = 2 };

static const model_config tiny = {.arch = ARCH_GPT2,
                                  .vocab = VOCAB,
                                  .context = CONTEXT,
                                  .positions = POSITIONS,
                                  .channels = CHANNELS,
                                  .layers = LAYERS,
                                  .heads = 4,
                                  .kv_heads = 4,
                                  .mlp_ratio = 4,
                                  .seed = 42};

static void sequence(task *t, int64_t index, int32_t *ids, int32_t *targets) {
    for (int64_t i = 0; i < t->context; ++i) {
        ids[i] = (int32_t)((index * 31 + i * i) % VOCAB);
        targets[i] = (int32_t)((index * 31 + (i + 1) * (i + 1)) % VOCAB);
    }
}
static task data = {.vocab = VOCAB, .context = CONTEXT, .held_out = 8, .train = sequence, .test = sequence};

static fattn_ctx *ctx;
static void begin(void) { cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK); }
static void end(void) {
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
}
TestSuite(gpt2, .init = begin, .fini = end);

static trainer start(int64_t batch, int64_t passes) {
    const trainer_config c = {
        .batch = batch, .passes = passes, .steps = 100, .lr = 1e-2, .weight_decay = 0.1, .beta2 = 0.95};
    trainer r;
    cr_assert_eq(trainer_create(&r, ctx, &data, &tiny, &c), FATTN_OK, "%s", fattn_ctx_error(ctx));
    return r;
}

static void steps(trainer *r, int n) {
    for (int i = 0; i < n; ++i) cr_assert_eq(trainer_step(r), FATTN_OK, "%s", fattn_ctx_error(ctx));
}

static fattn_param *param(const trainer *r, const char *name) {
    int n;
    fattn_param *const *p = model_params(r->model, &n);
    for (int i = 0; i < n; ++i)
        if (strcmp(p[i]->name, name) == 0) return p[i];
    cr_assert(false, "no parameter %s", name);
    return NULL;
}

static void expect_normals(mt19937 *g, const fattn_tensor *t, int64_t n, float std) {
    float *x = malloc((size_t)n * sizeof *x);
    mt19937_normal(g, x, n, std);
    cr_assert_eq(memcmp(x, t->data, (size_t)n * sizeof *x), 0);
    free(x);
}

/* wte without its padding, wpe, then block by block; the projections to the residual stream are smaller. */
Test(gpt2, starts_as_llm_c_and_pytorch_do) {
    trainer r = start(BATCH, 1);
    mt19937 g;
    mt19937_seed(&g, 42);
    const float small = 0.02f * (1 / sqrtf(2 * LAYERS));
    const float *const wte = param(&r, "wte.weight")->value.data;
    expect_normals(&g, &param(&r, "wte.weight")->value, VOCAB * CHANNELS, 0.02f);
    for (int64_t i = VOCAB * CHANNELS; i < ROWS * CHANNELS; ++i) cr_assert_eq(wte[i], 0.0f);
    expect_normals(&g, &param(&r, "wpe.weight")->value, POSITIONS * CHANNELS, 0.02f);
    for (int layer = 0; layer < LAYERS; ++layer) {
        static const struct {
            const char *name;
            int64_t n;
        } order[] = {{"attn.c_attn.weight", 3 * CHANNELS * CHANNELS},
                     {"attn.c_proj.weight", CHANNELS * CHANNELS},
                     {"mlp.c_fc.weight", 4 * CHANNELS * CHANNELS},
                     {"mlp.c_proj.weight", 4 * CHANNELS * CHANNELS}};
        for (int i = 0; i < 4; ++i) {
            char name[64];
            snprintf(name, sizeof name, "h.%d.%s", layer, order[i].name);
            expect_normals(&g, &param(&r, name)->value, order[i].n, i % 2 ? small : 0.02f);
        }
    }
    const float *const gain = param(&r, "h.1.ln_2.weight")->value.data, *const bias =
                                                                            param(&r, "ln_f.bias")->value.data;
    for (int i = 0; i < CHANNELS; ++i) cr_assert(gain[i] == 1 && bias[i] == 0);
    cr_assert_eq(model_size(r.model), ROWS * CHANNELS + POSITIONS * CHANNELS +
                                          LAYERS * (12 * CHANNELS * CHANNELS + 13 * CHANNELS) + 2 * CHANNELS);
    trainer_destroy(&r);
}

Test(gpt2, matrices_decay_gains_and_biases_do_not) {
    trainer r = start(BATCH, 1);
    int n;
    fattn_param *const *p = model_params(r.model, &n);
    for (int i = 0; i < n; ++i)
        cr_assert_eq((p[i]->flags & FATTN_PARAM_NO_DECAY) != 0, p[i]->value.ndim == 1, "%s", p[i]->name);
    trainer_destroy(&r);
}

/* The rows beyond the vocabulary and their moments are exactly 0 after steps with weight decay. */
Test(gpt2, the_padding_stays_zero) {
    trainer r = start(BATCH, 1);
    steps(&r, 10);
    fattn_tensor t[3] = {param(&r, "wte.weight")->value};
    cr_assert_eq(fattn_adamw_state(r.adamw, 0, FATTN_ADAM_M, &t[1]), FATTN_OK);
    cr_assert_eq(fattn_adamw_state(r.adamw, 0, FATTN_ADAM_V, &t[2]), FATTN_OK);
    for (int k = 0; k < 3; ++k) {
        const float *const x = t[k].data;
        for (int64_t i = VOCAB * CHANNELS; i < ROWS * CHANNELS; ++i)
            cr_assert_eq(x[i], 0.0f, "%d: %lld", k, (long long)i);
    }
    trainer_destroy(&r);
}

/* The loss of the head, of the logits' first VOCAB columns, and of each row alone. */
Test(gpt2, three_ways_to_a_loss_agree) {
    trainer r = start(BATCH, 1);
    steps(&r, 5);
    evaluation e;
    cr_assert_eq(trainer_evaluate(&r, BATCH, &e), FATTN_OK);
    double rows[BATCH], mean = 0, loss;
    fattn_tape_reset(r.tape);
    cr_assert_eq(fattn_tape_item(r.tape, model_test_loss(r.model, r.tape, &r.feed.ids, &r.feed.targets), &loss),
                 FATTN_OK);
    fattn_tape_reset(r.tape);
    cr_assert_eq(model_row_losses(r.model, r.tape, &r.feed.ids, &r.feed.targets, rows), FATTN_OK);
    for (int i = 0; i < BATCH; ++i) mean += rows[i] / BATCH;
    cr_assert_neq(rows[0], rows[1]);
    cr_assert_float_eq(loss, e.loss, 2e-6 * loss); /* sums of F32 in other orders */
    cr_assert_float_eq(mean, e.loss, 2e-6 * loss);
    int32_t symbols[CONTEXT] = {1};
    const sample_options options = {.temperature = 100, .seed = 1};
    cr_assert_eq(generate_symbols(ctx, r.model, r.tape, &options, symbols, 1, CONTEXT), FATTN_OK);
    for (int i = 0; i < CONTEXT; ++i) cr_assert(symbols[i] >= 0 && symbols[i] < VOCAB);
    trainer_destroy(&r);
}

/* Two passes of two sequences are one of four: the same loss, gradient norm and update, but for roundings: each of 10
   steps moves a parameter by less than lr = 1e-2, relative errors of the gradient are a few 2^-24 and AdamW divides by
   its size; parameters whose gradient is 0 but for rounding, the keys' biases, are left out. */
Test(gpt2, accumulated_gradients) {
    trainer one = start(4, 1), two = start(2, 2);
    steps(&one, 3), steps(&two, 3);
    cr_assert_eq(one.cursor, two.cursor);
    cr_assert_eq(trainer_sequences(&one), trainer_sequences(&two));
    for (int i = 0; i < 3; ++i) cr_assert_float_eq(one.history.loss[i], two.history.loss[i], 4e-6);
    cr_assert_float_eq(one.grad_norm, two.grad_norm, 1e-4 * one.grad_norm);
    const float *const a = param(&one, "h.0.mlp.c_fc.weight")->value.data;
    const float *const b = param(&two, "h.0.mlp.c_fc.weight")->value.data;
    double apart = 0;
    for (int i = 0; i < 4 * CHANNELS * CHANNELS; ++i) apart += fabs((double)a[i] - (double)b[i]);
    cr_assert_lt(apart / (4 * CHANNELS * CHANNELS), 1e-5);
    trainer_destroy(&one), trainer_destroy(&two);
}

/* ---- schedules ---- */

static double lr_of(int schedule, int64_t warmup, double final_lr, int64_t step) {
    trainer r = {.config = {.schedule = schedule, .warmup = warmup, .final_lr = final_lr, .steps = 100, .lr = 2},
                 .step = step};
    double lr = -1;
    cr_assert_eq(fattn_ctx_create(NULL, &r.ctx), FATTN_OK);
    cr_assert_eq(trainer_lr(&r, &lr), FATTN_OK, "%s", fattn_ctx_error(r.ctx));
    fattn_ctx_destroy(r.ctx);
    return lr;
}

/* The library's rates are F32: the last rounding of numbers up to 2, and that of the least, 0.2. */
#define ROUNDING (0x1p-24 + 0x1p-27)
Test(schedules, are_llm_cs) {
    const double pi = acos(-1);
    for (int64_t s = 0; s < 10; ++s) { /* the warm-up of all but constant */
        cr_assert_float_eq(lr_of(SCHEDULE_COSINE, 10, 0.1, s), 0.2 * (double)(s + 1), ROUNDING);
        cr_assert_float_eq(lr_of(SCHEDULE_LINEAR, 10, 0.1, s), 0.2 * (double)(s + 1), ROUNDING);
        cr_assert_float_eq(lr_of(SCHEDULE_WSD, 10, 0.1, s), 0.2 * (double)(s + 1), ROUNDING);
        cr_assert_eq(lr_of(SCHEDULE_CONSTANT, 10, 0.1, s), 2);
    }
    for (int64_t s = 10; s <= 120; ++s) { /* beyond the last step the last rate stays */
        const double r = s < 100 ? (double)(s - 10) / 90 : 1, d = s < 80 ? 0 : s < 100 ? (double)(s - 80) / 20 : 1;
        cr_assert_float_eq(lr_of(SCHEDULE_COSINE, 10, 0.1, s), 0.2 + 0.5 * (1 + cos(pi * r)) * 1.8, ROUNDING);
        cr_assert_float_eq(lr_of(SCHEDULE_LINEAR, 10, 0.1, s), 2 - r * 1.8, ROUNDING);
        cr_assert_float_eq(lr_of(SCHEDULE_WSD, 10, 0.1, s), s < 80 ? 2 : 0.2 + (1 - sqrt(d)) * 1.8, ROUNDING);
        cr_assert_eq(lr_of(SCHEDULE_CONSTANT, 10, 0.1, s), 2);
    }
    cr_assert_eq(lr_of(SCHEDULE_COSINE, 0, 1, 50), 2); /* llm.c's defaults: no change */
    cr_assert_float_eq(lr_of(SCHEDULE_COSINE, 400, 0.1, 99), 0.5, ROUNDING, "a run that ends in its warm-up");
}
