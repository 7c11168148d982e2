/* A run that stops and goes on: 400 steps at once, and 200 + 200 through a checkpoint in a file, end in the same bits.
   A gated network learns a function of 8 numbers with SGD, a cosine schedule and dropout. Batches, dropout masks and
   learning rates are functions of the step, so that parameters, the optimizer's state and the step are all of a run.

   example_checkpoint_resume [FILE]    FILE: resume.h5 in this folder by default; it is removed at the end */
#include <fattn/checkpoint.h>
#include <fattn/fattn.h>

#include <stdbool.h>
#include <stdio.h>

enum { BATCH = 64, IN = 8, HIDDEN = 16, STEPS = 400, PARAMS = 2 };

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        const fattn_status status = (call);                                                                            \
        if (status) return status;                                                                                     \
    } while (0)

typedef struct run {
    fattn_ctx *ctx;
    fattn_tape *tape;
    fattn_sgd *sgd;
    fattn_param gate_up, down; /* [2*HIDDEN,IN] [1,HIDDEN] */
    fattn_param *params[PARAMS];
    fattn_tensor x, noise, step_number; /* [BATCH,IN] [BATCH,1] I32 scalar */
    int64_t step;
    double loss;
} run;

static fattn_status make_param(run *r, fattn_param *p, const char *name, int64_t rows, int64_t columns, uint32_t seed) {
    const int64_t shape[] = {rows, columns};
    p->name = name;
    TRY(fattn_tensor_alloc(r->ctx, FATTN_F32, 2, shape, &p->value));
    TRY(fattn_tensor_alloc(r->ctx, FATTN_F32, 2, shape, &p->grad));
    TRY(fattn_tensor_normal(r->ctx, &p->value, 0, 0.3, (fattn_rng){.seed = seed}));
    return fattn_tensor_normal(r->ctx, &p->grad, 0, 0, (fattn_rng){0}); /* zeros */
}

static fattn_status open_run(run *r, fattn_ctx *ctx, uint32_t seed) {
    const fattn_sgd_options options = {.struct_size = sizeof options, .momentum = 0.9f, .nesterov = 1};
    *r = (run){.ctx = ctx, .params = {&r->gate_up, &r->down}};
    TRY(fattn_tape_create(ctx, &r->tape));
    TRY(make_param(r, &r->gate_up, "gate_up", 2 * HIDDEN, IN, seed));
    TRY(make_param(r, &r->down, "down", 1, HIDDEN, seed + 1));
    TRY(fattn_tensor_alloc(ctx, FATTN_F32, 2, (const int64_t[]){BATCH, IN}, &r->x));
    TRY(fattn_tensor_alloc(ctx, FATTN_F32, 2, (const int64_t[]){BATCH, 1}, &r->noise));
    TRY(fattn_tensor_alloc(ctx, FATTN_I32, 0, NULL, &r->step_number));
    return fattn_sgd_create(ctx, &options, r->params, PARAMS, &r->sgd);
}

static void close_run(run *r) {
    if (!r->ctx) return;
    fattn_sgd_destroy(r->sgd);
    fattn_tape_destroy(r->tape);
    for (int i = 0; i < PARAMS; ++i) {
        fattn_tensor_free(r->ctx, &r->params[i]->value);
        fattn_tensor_free(r->ctx, &r->params[i]->grad);
    }
    fattn_tensor_free(r->ctx, &r->x);
    fattn_tensor_free(r->ctx, &r->noise);
    fattn_tensor_free(r->ctx, &r->step_number);
}

/* Mean of (f(x) - y)^2, y = tanh of the sum of x, and a little noise. */
static fattn_var loss_of(run *r) {
    fattn_tape *const t = r->tape;
    const fattn_var none = {0}, x = fattn_input(t, &r->x);
    const fattn_var h = fattn_op_linear(t, x, fattn_use(t, &r->gate_up), none); /* [BATCH,2*HIDDEN] */
    fattn_var a = fattn_op_swiglu(t, fattn_op_slice(t, h, 1, 0, HIDDEN), fattn_op_slice(t, h, 1, HIDDEN, 2 * HIDDEN));
    a = fattn_op_dropout(t, a, 0.1f, (fattn_rng){.seed = 5}, fattn_input(t, &r->step_number));
    const fattn_var f = fattn_op_linear(t, a, fattn_use(t, &r->down), none); /* [BATCH,1] */
    const fattn_var y = fattn_op_tanh(t, fattn_op_sum(t, x, (const int[]){1}, 1, 1));
    const fattn_var wanted = fattn_op_add(t, y, fattn_input(t, &r->noise));
    const fattn_var error = fattn_op_add(t, f, fattn_op_scale(t, wanted, -1));
    return fattn_op_mean(t, fattn_op_mul(t, error, error), NULL, 0, 0);
}

static fattn_status train(run *r, int64_t until) {
    const fattn_schedule schedule = {.struct_size = sizeof schedule,
                                     .kind = FATTN_SCHEDULE_COSINE,
                                     .warmup = 20,
                                     .steps = STEPS,
                                     .lr = 0.1f,
                                     .min_lr = 0.001f};
    for (; r->step < until; ++r->step) {
        float lr;
        int32_t number = (int32_t)r->step;
        const fattn_tensor host = fattn_tensor_view(&number, FATTN_I32, FATTN_CPU, 0, 0, NULL);
        const uint32_t batch = (uint32_t)r->step;
        TRY(fattn_tensor_normal(r->ctx, &r->x, 0, 0.5, (fattn_rng){.seed = 1, .stream = batch}));
        TRY(fattn_tensor_normal(r->ctx, &r->noise, 0, 0.01, (fattn_rng){.seed = 2, .stream = batch}));
        TRY(fattn_tensor_copy(r->ctx, &r->step_number, &host));
        fattn_tape_reset(r->tape);
        const fattn_var loss = loss_of(r);
        TRY(fattn_tape_backward(r->tape, loss));
        TRY(fattn_schedule_lr(r->ctx, &schedule, r->step, &lr));
        TRY(fattn_sgd_set_lr(r->sgd, lr));
        TRY(fattn_sgd_step(r->sgd));
        TRY(fattn_tape_item(r->tape, loss, &r->loss));
    }
    return FATTN_OK;
}

static fattn_checkpoint checkpoint_of(run *r) {
    return (fattn_checkpoint){
        .struct_size = sizeof(fattn_checkpoint), .n = PARAMS, .params = r->params, .sgd = r->sgd, .step = r->step};
}

static fattn_status compare(fattn_ctx *ctx, const char *file, run *whole, run *first, run *second, bool *same) {
    TRY(open_run(whole, ctx, 10));
    TRY(open_run(first, ctx, 10));
    TRY(open_run(second, ctx, 20)); /* other numbers, until the file is loaded */
    TRY(train(whole, STEPS));
    TRY(train(first, STEPS / 2));
    fattn_checkpoint saved = checkpoint_of(first), loaded = checkpoint_of(second);
    TRY(fattn_checkpoint_save(ctx, file, &saved));
    TRY(fattn_checkpoint_load(ctx, file, &loaded));
    second->step = loaded.step;
    TRY(train(second, STEPS));
    *same = whole->loss == second->loss;
    for (int i = 0; i < PARAMS; ++i)
        for (int64_t e = 0; e < fattn_tensor_numel(&whole->params[i]->value); ++e)
            *same = *same && ((const float *)whole->params[i]->value.data)[e] ==
                                 ((const float *)second->params[i]->value.data)[e];
    return FATTN_OK;
}

int main(int argc, char **argv) {
    const char *const file = argc > 1 ? argv[1] : "resume.h5";
    run whole = {0}, first = {0}, second = {0};
    fattn_ctx *ctx;
    bool same = false;
    if (fattn_ctx_create(NULL, &ctx)) return 1;
    const fattn_status s = compare(ctx, file, &whole, &first, &second, &same);
    if (s) fprintf(stderr, "%s: %s\n", fattn_status_name(s), fattn_ctx_error(ctx));
    printf("loss after %d steps %.6f, through a checkpoint %.6f: %s\n", STEPS, whole.loss, second.loss,
           same ? "the same bits" : "DIFFERENT");
    close_run(&whole), close_run(&first), close_run(&second);
    fattn_ctx_destroy(ctx);
    remove(file);
    return s || !same || whole.loss > 0.25; /* zeros have 0.52 */
}
