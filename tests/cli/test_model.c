/* The GPT of `fattn train`: initialisation, causality, agreement of its two losses, overfitting; the trainer's
   learning rate and memory; sampling of symbols. */
#include <criterion/criterion.h>

#include "tests/cli/symbols.h"
#include "cli/train/trainer.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { VOCAB = 17, CONTEXT = 16, BATCH = 4 };

static model_config small(void) {
    return (model_config){.vocab = VOCAB,
                          .context = CONTEXT,
                          .channels = 32,
                          .layers = 2,
                          .heads = 4,
                          .kv_heads = 2,
                          .mlp_ratio = 2,
                          .seed = 3};
}

/* A task of BATCH fixed sequences of random symbols; the last target of each is ignored. */
static void fixed_sequence(task *t, int64_t index, int32_t *ids, int32_t *targets) {
    uint32_t state = (uint32_t)(index % BATCH + 1) * 2654435769u;
    for (int64_t i = 0; i < t->context; ++i) {
        ids[i] = (int32_t)((state >> 16) % VOCAB);
        state = state * 1664525u + 1013904223u;
        targets[i] = i + 1 < t->context ? (int32_t)((state >> 16) % VOCAB) : TASK_IGNORE;
    }
}

static task fixed = {
    .vocab = VOCAB, .context = CONTEXT, .held_out = BATCH, .train = fixed_sequence, .test = fixed_sequence};
static const trainer_config schedule = {
    .batch = BATCH, .steps = 150, .warmup = 10, .lr = 1e-2, .weight_decay = 0.01, .clip = 1};

static fattn_ctx *ctx;
static trainer r;
static void begin(void) {
    const model_config config = small();
    cr_assert_eq(fattn_ctx_create(NULL, &ctx), FATTN_OK);
    cr_assert_eq(trainer_create(&r, ctx, &fixed, &config, &schedule), FATTN_OK, "%s", fattn_ctx_error(ctx));
}
static void end(void) {
    trainer_destroy(&r);
    cr_assert_eq(fattn_ctx_mem(ctx).live, 0);
    fattn_ctx_destroy(ctx);
}
TestSuite(model, .init = begin, .fini = end);

static void step(int times) {
    for (int i = 0; i < times; ++i) cr_assert_eq(trainer_step(&r), FATTN_OK, "%s", fattn_ctx_error(ctx));
}
static double evaluate(void) {
    evaluation e;
    cr_assert_eq(trainer_evaluate(&r, BATCH, &e), FATTN_OK, "%s", fattn_ctx_error(ctx));
    cr_assert_eq(e.targets, BATCH * (CONTEXT - 1));
    return e.loss;
}

/* Logits of standard deviation d = 0.02 sqrt(32): E log sum exp = log V + d^2/2 for many of them. The
   mean over 60 targets has deviation d/sqrt(60) = 0.015: five of them. */
Test(model, starts_close_to_the_logarithm_of_the_vocabulary) {
    cr_assert_float_eq(evaluate(), log(VOCAB) + 0.0064, 0.075);
    cr_assert_eq(model_size(r.model), VOCAB * 32 + 32 * 32 + 2 * (2 * 32 + 64 * 32 + 32 * 32 + 2 * 64 * 32) + 32);
}

/* linear_cross_entropy in training, logits in evaluation: the same loss up to float rounding. */
Test(model, both_heads_agree) {
    const double before = evaluate();
    step(1);
    cr_assert_float_eq(r.history.loss[0], before, 1e-5 * before);
}

Test(model, overfits_64_tokens) {
    step(150);
    evaluation e;
    cr_assert_eq(trainer_evaluate(&r, BATCH, &e), FATTN_OK);
    cr_assert_lt(e.loss, 0.05);
    cr_assert_eq(e.right, 1);
    /* and reproduces them with greedy sampling from the first symbol */
    int32_t ids[CONTEXT], targets[CONTEXT], said[CONTEXT];
    for (int64_t s = 0; s < BATCH; ++s) {
        fixed_sequence(&fixed, s, ids, targets);
        memcpy(said, ids, 4 * sizeof *ids);
        const sample_options greedy = {.temperature = 0};
        cr_assert_eq(generate_symbols(ctx, r.model, r.tape, &greedy, said, 4, CONTEXT), FATTN_OK);
        cr_assert_eq(memcmp(said, ids, sizeof ids), 0);
    }
}

/* A later symbol changes no earlier logit, and does change its own. */
Test(model, sees_no_future) {
    int32_t ids[CONTEXT], targets[CONTEXT];
    fixed_sequence(&fixed, 0, ids, targets);
    const int64_t shape[] = {1, CONTEXT};
    const fattn_tensor x = fattn_tensor_view(ids, FATTN_I32, FATTN_CPU, 0, 2, shape);
    float before[CONTEXT * VOCAB];
    fattn_tensor logits;
    cr_assert_eq(fattn_tape_value(r.tape, model_logits(r.model, r.tape, &x), &logits), FATTN_OK);
    memcpy(before, logits.data, sizeof before);
    enum { AT = 9 };
    ids[AT] = (ids[AT] + 1) % VOCAB;
    fattn_tape_reset(r.tape);
    cr_assert_eq(fattn_tape_value(r.tape, model_logits(r.model, r.tape, &x), &logits), FATTN_OK);
    cr_assert_eq(memcmp(before, logits.data, AT * VOCAB * sizeof *before), 0);
    cr_assert_neq(memcmp(before + AT * VOCAB, (float *)logits.data + AT * VOCAB, VOCAB * sizeof *before), 0);
}

Test(model, memory_stays_after_the_first_steps) {
    step(2);
    evaluate();
    step(1);
    const fattn_mem before = fattn_ctx_mem(ctx);
    step(5);
    evaluate();
    const fattn_mem after = fattn_ctx_mem(ctx);
    cr_assert_eq(after.live, before.live);
    cr_assert_eq(after.allocs, before.allocs);
}

Test(model, learning_rate_warms_up_and_falls_to_a_tenth) {
    double lr;
    cr_assert(trainer_lr(&r, &lr) == FATTN_OK && fabs(lr - 1e-2 / 11) < 1e-12);
    r.step = 75;
    cr_assert(trainer_lr(&r, &lr) == FATTN_OK && fabs(lr - 1e-2 * 0.55) < 1e-12);
    r.step = 150;
    cr_assert(trainer_lr(&r, &lr) == FATTN_OK && fabs(lr - 1e-3) < 1e-12);
    r.step = 10;
    r.config.seconds = 100;
    r.elapsed = 50; /* the larger share is used */
    cr_assert_float_eq(trainer_used(&r), 0.5, 1e-12);
    cr_assert(trainer_lr(&r, &lr) == FATTN_OK && fabs(lr - 1e-2 * 0.55) < 1e-12);
}

Test(model, a_loss_that_is_not_finite_stops_the_run) {
    int n;
    fattn_param *const *params = model_params(r.model, &n);
    float *const x = params[n - 1]->value.data;
    const float old = x[0];
    x[0] = NAN;
    cr_assert_eq(trainer_step(&r), FATTN_E_MISMATCH);
    cr_assert(strstr(fattn_ctx_error(ctx), "loss of step 1"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(r.step, 0);
    x[0] = old;
}
