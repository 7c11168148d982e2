/* Training on the device: runs against the CPU's, with AdamW and SGD, with a loss scale, captured in a graph, and gone
   on with from a checkpoint. */
#define _XOPEN_SOURCE 700 /* mkstemp */
#include "pair.h"

#include <cuda_runtime_api.h>
#include <fattn/checkpoint.h>
#include <fattn/optim.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { V = 13, C = 16, H = 2, B = 3, S = 8, PARAMS = 4, STEPS = 12 };

typedef struct run {
    fattn_ctx *ctx;
    fattn_param p[PARAMS];
    fattn_param *list[PARAMS];
    fattn_tensor ids, targets, number; /* number: of the step, which selects the dropout mask */
    fattn_tape *tape;
    fattn_adamw *adamw;
    fattn_tensor scale; /* adamw's: 1 but for F16 */
} run;

static void set_number(run *r, int32_t step) {
    const fattn_tensor here = fattn_tensor_view(&step, FATTN_I32, FATTN_CPU, 0, 0, NULL);
    MUST(r->ctx, fattn_tensor_copy(r->ctx, &r->number, &here));
}

enum { STOCHASTIC = FATTN_OPTIM_NO_MASTERS | FATTN_OPTIM_STOCHASTIC_ROUNDING };
static const uint64_t SEED = UINT64_C(0x123456789abcdef1); /* of stochastic rounding */

/* F16 has a loss scale that begins with 2^24, which is too large, and doubles after three steps. flags: AdamW's. */
static void run_start_with(run *r, fattn_ctx *ctx, fattn_dtype dtype, uint32_t flags) {
    static const int64_t shapes[PARAMS][2] = {{V, C}, {3 * C, C}, {C, C}, {C, 0}};
    const int64_t tokens[2] = {B, S};
    int32_t host[2][B * S];
    *r = (run){.ctx = ctx};
    for (int i = 0; i < PARAMS; ++i) {
        const int ndim = shapes[i][1] ? 2 : 1;
        const double std = ndim == 2 ? 0.3 : 0;
        const fattn_dtype wide = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
        r->list[i] = &r->p[i];
        r->p[i].flags = ndim == 1 ? FATTN_PARAM_NO_DECAY : 0;
        MUST(ctx, fattn_tensor_alloc(ctx, dtype, ndim, shapes[i], &r->p[i].value));
        MUST(ctx, fattn_tensor_alloc(ctx, wide, ndim, shapes[i], &r->p[i].grad));
        MUST(ctx,
             fattn_tensor_normal(ctx, &r->p[i].value, ndim == 1, std, (fattn_rng){.seed = 3, .stream = (uint32_t)i}));
        MUST(ctx, fattn_tensor_normal(ctx, &r->p[i].grad, 0, 0, (fattn_rng){0}));
    }
    for (int i = 0; i < B * S; ++i) host[0][i] = 5 * i % V, host[1][i] = i % 7 == 3 ? -1 : (5 * i + 5) % V;
    fattn_tensor *const to[] = {&r->ids, &r->targets};
    for (int i = 0; i < 2; ++i) {
        const fattn_tensor here = fattn_tensor_view(host[i], FATTN_I32, FATTN_CPU, 0, 2, tokens);
        MUST(ctx, fattn_tensor_alloc(ctx, FATTN_I32, 2, tokens, to[i]));
        MUST(ctx, fattn_tensor_copy(ctx, to[i], &here));
    }
    MUST(ctx, fattn_tensor_alloc(ctx, FATTN_I32, 0, NULL, &r->number));
    set_number(r, 0);
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    o.max_grad_norm = 0.5f;
    const fattn_loss_scale_options scale = {
        .struct_size = sizeof scale, .initial = 0x1p24f, .minimum = 1, .maximum = 0x1p24f, .interval = 3};
    if (dtype == FATTN_F16) o.loss_scale = &scale;
    o.flags = flags;
    o.seed = flags & FATTN_OPTIM_STOCHASTIC_ROUNDING ? SEED : 0;
    MUST(ctx, fattn_tape_create(ctx, &r->tape));
    MUST(ctx, fattn_adamw_create(ctx, &o, r->list, PARAMS, &r->adamw));
    MUST(ctx, fattn_adamw_loss_scale(r->adamw, &r->scale));
}

static void run_start(run *r, fattn_ctx *ctx, fattn_dtype dtype) { run_start_with(r, ctx, dtype, 0); }

/* Gradients are stored, over numbers that nobody wants. */
static void set_one_pass(run *r) {
    for (int i = 0; i < PARAMS; ++i) {
        r->p[i].flags |= FATTN_PARAM_ONE_PASS;
        MUST(r->ctx, fattn_tensor_normal(r->ctx, &r->p[i].grad, 0, 1e4, (fattn_rng){.seed = 9}));
    }
}

/* The input of the loss, and the embedding's variable. */
static fattn_var hidden(run *r, fattn_var *embedding) {
    const fattn_attention_params p = {.struct_size = sizeof p,
                                      .flags = FATTN_CAUSAL,
                                      .algorithm = FATTN_ALGO_STANDARD,
                                      .dropout_p = 0.1f,
                                      .rng = {.seed = 9}};
    fattn_tape *const t = r->tape;
    const fattn_var none = {0};
    *embedding = fattn_use(t, &r->p[0]);
    const fattn_var x = fattn_op_embedding(t, *embedding, fattn_input(t, &r->ids));
    const fattn_var h = fattn_op_rmsnorm(t, x, fattn_use(t, &r->p[3]), 1e-5f);
    const fattn_var qkv = fattn_op_linear(t, h, fattn_use(t, &r->p[1]), none);
    const fattn_var q = fattn_op_rope(t, fattn_op_heads(t, qkv, 0, H, C / H), 1e4f, 0);
    const fattn_var k = fattn_op_rope(t, fattn_op_heads(t, qkv, H, H, C / H), 1e4f, 0);
    const fattn_var v = fattn_op_heads(t, qkv, 2 * H, H, C / H);
    const fattn_attention_vars in = {
        .struct_size = sizeof in, .q = q, .k = k, .v = v, .rng_step = fattn_input(t, &r->number)};
    const fattn_var a = fattn_op_merge(t, fattn_op_attention_ex(t, &in, &p, NULL));
    return fattn_op_linear_residual(t, a, fattn_use(t, &r->p[2]), none, x);
}

static fattn_var forward(run *r) {
    fattn_var E;
    const fattn_var y = hidden(r, &E);
    return fattn_op_linear_cross_entropy(r->tape, y, E, fattn_input(r->tape, &r->targets), -1);
}

static double largest_logit(const pair *p, run *r, int step) {
    fattn_tensor logits;
    fattn_var E;
    double most = 0;
    fattn_tape_reset(r->tape);
    set_number(r, step);
    const fattn_var y = hidden(r, &E);
    MUST(r->ctx, fattn_tape_value(r->tape, fattn_op_linear(r->tape, y, E, (fattn_var){0}), &logits));
    fattn_tensor here = to_host(p, &logits);
    for (int64_t n = 0; n < fattn_tensor_numel(&here); ++n) most = fmax(most, fabs(((double *)here.data)[n]));
    fattn_tensor_free(p->cpu, &here);
    return most;
}

/* Returns the loss. */
static double train_step(run *r, int step) {
    double loss;
    fattn_tape_reset(r->tape);
    MUST(r->ctx, fattn_adamw_set_lr(r->adamw, 0.01f * (float)(step + 1)));
    set_number(r, step);
    const fattn_var l = forward(r);
    MUST(r->ctx, fattn_tape_backward_from(r->tape, l, &r->scale));
    MUST(r->ctx, fattn_adamw_step(r->adamw));
    MUST(r->ctx, fattn_tape_item(r->tape, l, &loss));
    return loss;
}

static fattn_loss_scale_state scaling_of(const run *r) {
    fattn_loss_scale_state s = {.struct_size = sizeof s};
    MUST(r->ctx, fattn_adamw_get_loss_scale(r->adamw, &s));
    return s;
}
static bool same_scaling(const run *a, const run *b) {
    const fattn_loss_scale_state x = scaling_of(a), y = scaling_of(b);
    return x.scale == y.scale && x.finite_steps == y.finite_steps && x.skipped_steps == y.skipped_steps;
}

static void run_end(run *r) {
    fattn_adamw_destroy(r->adamw);
    fattn_tape_destroy(r->tape);
    for (int i = 0; i < PARAMS; ++i) {
        fattn_tensor_free(r->ctx, &r->p[i].value);
        fattn_tensor_free(r->ctx, &r->p[i].grad);
    }
    fattn_tensor_free(r->ctx, &r->ids);
    fattn_tensor_free(r->ctx, &r->targets);
    fattn_tensor_free(r->ctx, &r->number);
}

/* Largest difference of the parameters. */
static double distance(const pair *p, const run *a, const run *b) {
    double most = 0;
    for (int i = 0; i < PARAMS; ++i) {
        fattn_tensor x = to_host(p, &a->p[i].value), y = to_host(p, &b->p[i].value);
        for (int64_t n = 0; n < fattn_tensor_numel(&x); ++n)
            most = fmax(most, fabs(((double *)x.data)[n] - ((double *)y.data)[n]));
        fattn_tensor_free(p->cpu, &x);
        fattn_tensor_free(p->cpu, &y);
    }
    return most;
}

/* Loss curves of CPU and GPU; after the first step and its reset nothing is allocated. AdamW divides by the root of
   v: where a gradient is nearly 0, its sign decides, so F32 may drift by a few steps of lr. */
static void follow_the_cpu(const pair *p, fattn_dtype dtype, double bound, bool one_pass) {
    run gpu, cpu;
    size_t allocs = 0;
    run_start(&gpu, p->gpu, dtype);
    run_start(&cpu, p->cpu, dtype);
    if (one_pass) set_one_pass(&gpu);
    for (int step = 0; step < STEPS; ++step) {
        const double got = train_step(&gpu, step), want = train_step(&cpu, step);
        cr_assert(fabs(got - want) <= bound * want, "%s, step %d: %.9g on the GPU, %.9g", fattn_dtype_name(dtype), step,
                  got, want);
        if (step == 1) allocs = fattn_ctx_mem(p->gpu).allocs;
        if (step > 1) cr_assert_eq(fattn_ctx_mem(p->gpu).allocs, allocs, "step %d allocated", step);
    }
    double norms[2];
    int64_t steps;
    MUST(p->gpu, fattn_adamw_grad_norm(gpu.adamw, &norms[0]));
    MUST(p->cpu, fattn_adamw_grad_norm(cpu.adamw, &norms[1]));
    MUST(p->gpu, fattn_adamw_get_step(gpu.adamw, &steps));
    cr_assert_eq(steps, STEPS);
    cr_assert(fabs(norms[0] - norms[1]) <= 10 * bound * norms[1]);
    cr_assert_leq(distance(p, &gpu, &cpu), 10 * bound);
    run_end(&gpu);
    run_end(&cpu);
}

Test(cuda_training, training) {
    pair p = pair_or_skip(0);
    for (int one_pass = 0; one_pass < 2; ++one_pass) {
        follow_the_cpu(&p, FATTN_F64, 1e-9, one_pass);
        follow_the_cpu(&p, FATTN_F32, 2e-4, one_pass);
    }
    pair_free(&p);
}

/* All candidates compute the same product; timing them does not change gradients that are added to. */
Test(cuda_training, training_with_tuned_products) {
    pair p = pair_or_skip(FATTN_CTX_TUNE);
    follow_the_cpu(&p, FATTN_F64, 1e-9, true);
    follow_the_cpu(&p, FATTN_F32, 2e-4, false);
    pair_free(&p);
}

/* 16 bits with F32 masters follow F32: both learn, and their losses differ by at most a few roundings of weights,
   activations and gradients, 2^-9 in BF16, 2^-12 in F16, plus two of a logit, since a loss is the difference of a logit
   and a weighted mean of logits. Steps that are skipped are left out. */
static void follow_f32(const pair *p, fattn_dtype dtype, double unit) {
    run narrow, wide;
    double first = 0, last = 0;
    run_start(&narrow, p->gpu, dtype);
    run_start(&wide, p->gpu, FATTN_F32);
    for (int step = 0; step < STEPS;) {
        const int64_t skipped = scaling_of(&narrow).skipped_steps;
        const double got = train_step(&narrow, step);
        cr_assert_leq(scaling_of(&narrow).skipped_steps, 20);
        if (scaling_of(&narrow).skipped_steps > skipped) continue;
        const double rounding = unit * largest_logit(p, &wide, step), want = train_step(&wide, step);
        cr_assert(fabs(got - want) <= 25.6 * unit * want + 2 * rounding,
                  "step %d: %.6g in %s, %.6g; a logit's rounding is %.3g", step, got, fattn_dtype_name(dtype), want,
                  rounding);
        if (step == 0) first = got;
        last = got;
        step += 1;
    }
    cr_assert_lt(last, 0.8 * first);
    run_end(&narrow);
    run_end(&wide);
}

Test(cuda_training, training_in_16_bits) {
    pair p = pair_or_skip(0);
    follow_f32(&p, FATTN_BF16, 0x1p-9);
    follow_f32(&p, FATTN_F16, 0x1p-12);
    pair_free(&p);
}

/* Two runs on deterministic contexts end with the same bits. */
Test(cuda_training, deterministic) {
    pair p = pair_or_skip(FATTN_CTX_DETERMINISTIC);
    run a, b;
    run_start(&a, p.gpu, FATTN_F32);
    run_start(&b, p.gpu, FATTN_F32);
    for (int step = 0; step < STEPS; ++step) cr_assert_eq(train_step(&a, step), train_step(&b, step));
    cr_assert_eq(distance(&p, &a, &b), 0);
    run_end(&a);
    run_end(&b);
    pair_free(&p);
}

/* A step is captured on its second run; replays, each with its own learning rate and dropout mask, give bitwise the
   weights of eager steps. With a loss scale each replay has the scale of that time, which overflows at first and
   doubles later; with stochastic rounding the random bits of its step. */
static void replay(fattn_dtype dtype, int replays, uint32_t flags) {
    pair p = pair_or_skip(FATTN_CTX_DETERMINISTIC);
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t step;
    run eager, replayed;
    cr_assert_eq(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), cudaSuccess);
    MUST(p.gpu, fattn_ctx_set_stream(p.gpu, stream));
    run_start_with(&eager, p.gpu, dtype, flags);
    run_start_with(&replayed, p.gpu, dtype, flags);
    if (dtype == FATTN_BF16) set_one_pass(&eager), set_one_pass(&replayed);
    cr_assert_eq(train_step(&eager, 0), train_step(&replayed, 0));
    float least = scaling_of(&replayed).scale, last = least;
    bool grew = false;

    fattn_tape_reset(replayed.tape);
    cr_assert_eq(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), cudaSuccess);
    const fattn_var loss = forward(&replayed);
    MUST(p.gpu, fattn_tape_backward_from(replayed.tape, loss, &replayed.scale));
    MUST(p.gpu, fattn_adamw_step(replayed.adamw));
    cr_assert_eq(cudaStreamEndCapture(stream, &graph), cudaSuccess);
    cr_assert_eq(cudaGraphInstantiate(&step, graph, 0), cudaSuccess);
    for (int n = 0; n < replays; ++n) {
        const float lr = 0.01f * (float)(n + 1);
        double got, want;
        MUST(p.gpu, fattn_adamw_set_lr(replayed.adamw, lr));
        set_number(&replayed, n + 1);
        cr_assert_eq(cudaGraphLaunch(step, stream), cudaSuccess);
        MUST(p.gpu, fattn_tape_item(replayed.tape, loss, &got));

        fattn_tape_reset(eager.tape);
        set_number(&eager, n + 1);
        const fattn_var l = forward(&eager);
        MUST(p.gpu, fattn_adamw_set_lr(eager.adamw, lr));
        MUST(p.gpu, fattn_tape_backward_from(eager.tape, l, &eager.scale));
        MUST(p.gpu, fattn_adamw_step(eager.adamw));
        MUST(p.gpu, fattn_tape_item(eager.tape, l, &want));
        cr_assert_eq(got, want, "replay %d: loss %.9g, eager %.9g", n, got, want);
        cr_assert(same_scaling(&eager, &replayed), "replay %d", n);
        const float scale = scaling_of(&replayed).scale;
        grew = grew || scale > last;
        least = fminf(least, scale), last = scale;
    }
    if (dtype == FATTN_F16) cr_assert(least < 0x1p24f && grew, "the scale has fallen and risen");
    int64_t steps;
    MUST(p.gpu, fattn_adamw_get_step(replayed.adamw, &steps));
    cr_assert_eq(steps, 1 + replays - scaling_of(&replayed).skipped_steps);
    cr_assert_eq(distance(&p, &eager, &replayed), 0);
    cudaGraphExecDestroy(step);
    cudaGraphDestroy(graph);
    run_end(&eager);
    run_end(&replayed);
    pair_free(&p);
    cudaStreamDestroy(stream);
}

Test(cuda_training, graph) {
    replay(FATTN_F32, 5, 0);
    replay(FATTN_F16, 30, 0);
    replay(FATTN_BF16, 5, STOCHASTIC);
    replay(FATTN_F16, 30, STOCHASTIC);
}

/* x, in the host's memory, as dtype on the device. */
static fattn_tensor uploaded(const pair *p, fattn_dtype dtype, int ndim, const int64_t *shape, const double *x) {
    const fattn_tensor here = fattn_tensor_view((void *)(uintptr_t)x, FATTN_F64, FATTN_CPU, 0, ndim, shape);
    fattn_tensor t;
    MUST(p->gpu, fattn_tensor_alloc(p->gpu, dtype, ndim, shape, &t));
    MUST(p->gpu, fattn_tensor_copy(p->gpu, &t, &here));
    return t;
}

/* As tests/grad/test_adamw.c: v stays finite, steps are of lr each, the norm does not overflow; odd
   lengths, and those that are read in packs. */
Test(cuda_training, adamw_takes_any_finite_gradient) {
    static const struct {
        fattn_dtype value, grad;
        double largest;
    } of[] = {{FATTN_F64, FATTN_F64, 1e308},  {FATTN_F64, FATTN_F32, 3e38},  {FATTN_F32, FATTN_F32, 3e38},
              {FATTN_BF16, FATTN_BF16, 3e38}, {FATTN_BF16, FATTN_F32, 3e38}, {FATTN_F16, FATTN_F32, 3e38},
              {FATTN_F16, FATTN_F16, 65504}};
    pair p = pair_or_skip(0);
    for (int n = 0; n < 2 * 7; ++n) {
        const int64_t count = n % 2 ? 8 : 5;
        const double x = of[n / 2].largest, ones[8] = {1, 1, 1, 1, 1, 1, 1, 1};
        const double g[8] = {x, -x, 1, 0, 1e-3, 0, 0, 0};
        fattn_param w = {.name = "w", .value = uploaded(&p, of[n / 2].value, 1, &count, ones)};
        MUST(p.gpu, fattn_tensor_alloc(p.gpu, of[n / 2].grad, 1, &count, &w.grad));
        fattn_adamw_options o = {.struct_size = sizeof o};
        fattn_adamw_defaults(&o);
        o.weight_decay = 0;
        fattn_adamw *a;
        MUST(p.gpu, fattn_adamw_create(p.gpu, &o, (fattn_param *[]){&w}, 1, &a));
        MUST(p.gpu, fattn_adamw_set_lr(a, 0.125f));
        const fattn_tensor from = fattn_tensor_view((void *)(uintptr_t)g, FATTN_F64, FATTN_CPU, 0, 1, &count);
        for (int t = 1; t <= 3; ++t) {
            MUST(p.gpu, fattn_tensor_copy(p.gpu, &w.grad, &from));
            MUST(p.gpu, fattn_adamw_step(a));
        }
        double norm;
        MUST(p.gpu, fattn_adamw_grad_norm(a, &norm));
        cr_assert_float_eq(norm / x, sqrt(2), 4e-3, "%d: %g", n, norm); /* x in 16 bits */
        fattn_tensor m, v;
        MUST(p.gpu, fattn_adamw_state(a, 0, FATTN_ADAM_M, &m));
        MUST(p.gpu, fattn_adamw_state(a, 0, FATTN_ADAM_V, &v));
        fattn_tensor got[3] = {to_host(&p, &w.value), to_host(&p, &m), to_host(&p, &v)};
        const double want[5] = {0.625, 1.375, 0.625, 1, 0.625};
        for (int e = 0; e < 5; ++e) {
            cr_assert(isfinite(((double *)got[1].data)[e]) && isfinite(((double *)got[2].data)[e]), "%d [%d]", n, e);
            cr_assert_float_eq(((double *)got[0].data)[e], want[e], 1e-2, "%d [%d]: %g", n, e,
                               ((double *)got[0].data)[e]);
        }
        cr_assert_eq(fattn_adamw_set_step(a, INT64_MAX), FATTN_E_ARG);
        cr_assert(strstr(fattn_ctx_error(p.gpu), "9223372036854775807"));
        for (int i = 0; i < 3; ++i) fattn_tensor_free(p.cpu, &got[i]);
        fattn_adamw_destroy(a);
        fattn_tensor_free(p.gpu, &w.value);
        fattn_tensor_free(p.gpu, &w.grad);
    }
    pair_free(&p);
}

/* SGD on both devices, in every dtype: F32 and F64 values to some roundings of four steps, 16-bit values to one of
   theirs. Odd lengths, and those of several chunks. */
Test(cuda_training, sgd) {
    static const fattn_dtype types[] = {FATTN_F64, FATTN_F32, FATTN_BF16, FATTN_F16};
    static const double unit[] = {0x1p-50, 0x1p-20, 0x1p-7, 0x1p-10};
    static const fattn_sgd_options rules[] = {
        {.struct_size = sizeof rules[0]},
        {.struct_size = sizeof rules[0], .momentum = 0.9f, .weight_decay = 0.1f},
        {.struct_size = sizeof rules[0], .momentum = 0.9f, .nesterov = 1, .max_grad_norm = 3}};
    static const int64_t lengths[2] = {33001, 7};
    pair p = pair_or_skip(0);
    for (int n = 0; n < 4 * 3; ++n) {
        fattn_param params[2][2] = {{{.name = "a"}, {.name = "b", .flags = FATTN_PARAM_NO_DECAY}}};
        fattn_ctx *const on[2] = {p.gpu, p.cpu};
        fattn_sgd *s[2];
        double norms[2];
        params[0][1].flags |= n % 2 ? FATTN_PARAM_ONE_PASS : 0;
        memcpy(params[1], params[0], sizeof params[0]);
        for (int k = 0; k < 2; ++k) {
            for (uint32_t i = 0; i < 2; ++i) {
                fattn_param *const q = &params[k][i];
                MUST(on[k], fattn_tensor_alloc(on[k], types[n % 4], 1, &lengths[i], &q->value));
                MUST(on[k], fattn_tensor_alloc(on[k], n % 4 ? FATTN_F32 : FATTN_F64, 1, &lengths[i], &q->grad));
            }
        }
        for (uint32_t i = 0; i < 2; ++i) {
            const fattn_rng rng = {.seed = 4, .stream = i};
            MUST(p.cpu, fattn_tensor_normal(p.cpu, &params[1][i].value, 0, 1, rng));
            MUST(p.gpu, fattn_tensor_copy(p.gpu, &params[0][i].value, &params[1][i].value));
        }
        for (int k = 0; k < 2; ++k)
            MUST(on[k],
                 fattn_sgd_create(on[k], &rules[n / 4], (fattn_param *[]){&params[k][0], &params[k][1]}, 2, &s[k]));
        for (uint32_t t = 0; t < 4; ++t) {
            for (uint32_t i = 0; i < 2; ++i) {
                const fattn_rng rng = {.seed = 5 + t, .stream = i};
                MUST(p.cpu, fattn_tensor_normal(p.cpu, &params[1][i].grad, 0, 1, rng));
                MUST(p.gpu, fattn_tensor_copy(p.gpu, &params[0][i].grad, &params[1][i].grad));
            }
            for (int k = 0; k < 2; ++k) {
                MUST(on[k], fattn_sgd_set_lr(s[k], 0.1f));
                MUST(on[k], fattn_sgd_step(s[k]));
                MUST(on[k], fattn_sgd_grad_norm(s[k], &norms[k]));
            }
            cr_assert_float_eq(norms[0], norms[1], 1e-12 * norms[1]);
        }
        for (int i = 0; i < 2; ++i) {
            fattn_tensor got = to_host(&p, &params[0][i].value), want = to_host(&p, &params[1][i].value);
            fattn_tensor left = to_host(&p, &params[0][i].grad);
            for (int64_t e = 0; e < lengths[i]; ++e) {
                const double x = ((double *)got.data)[e], y = ((double *)want.data)[e];
                cr_assert(fabs(x - y) <= unit[n % 4] * (1 + fabs(y)), "%d: %g, not %g", n, x, y);
                cr_assert_eq(((double *)left.data)[e] != 0, i == 1 && n % 2);
            }
            fattn_tensor_free(p.cpu, &got);
            fattn_tensor_free(p.cpu, &want);
            fattn_tensor_free(p.cpu, &left);
        }
        for (int k = 0; k < 2; ++k) {
            fattn_sgd_destroy(s[k]);
            for (int i = 0; i < 2; ++i) {
                fattn_tensor_free(on[k], &params[k][i].value);
                fattn_tensor_free(on[k], &params[k][i].grad);
            }
        }
    }
    pair_free(&p);
}

/* Without masters on both devices, whose random bits are the same. Each step begins with the CPU's values. What is
   rounded, numbers up to 4, differs by e = 2^-21, some roundings of F32. It is then rounded differently with a
   probability of e / h, where the distance h of neighbours is 2^-8 |x| or more (F16: 2^-11); the mean of 1 / |x| over
   normal numbers of 2^-16 and more is below 10. So of n numbers 10 n 2^-13 (F16: 2^-10) may differ, by h; with other
   random bits thousands would. Odd lengths, and those of several chunks. */
Test(cuda_training, no_masters) {
    static const uint32_t flags[] = {FATTN_OPTIM_NO_MASTERS, STOCHASTIC, FATTN_OPTIM_STOCHASTIC_ROUNDING};
    static const int64_t lengths[2] = {33001, 7};
    enum { T = 4 };
    pair p = pair_or_skip(0);
    for (int n = 0; n < 2 * 2 * 3; ++n) {
        const fattn_dtype dtype = n % 2 ? FATTN_F16 : FATTN_BF16;
        const bool is_sgd = n / 2 % 2;
        const uint64_t seed = n / 4 ? SEED : 0;
        fattn_ctx *const on[2] = {p.gpu, p.cpu};
        fattn_param w[2][2];
        fattn_adamw *adamw[2] = {NULL};
        fattn_sgd *sgd[2] = {NULL};
        int64_t different = 0;
        fattn_adamw_options a = {.struct_size = sizeof a};
        fattn_adamw_defaults(&a);
        a.flags = flags[n / 4], a.seed = seed;
        const fattn_sgd_options s = {
            .struct_size = sizeof s, .momentum = 0.9f, .weight_decay = 0.1f, .flags = flags[n / 4], .seed = seed};
        for (int k = 0; k < 2; ++k) {
            for (uint32_t i = 0; i < 2; ++i) {
                w[k][i] = (fattn_param){.name = "w", .flags = i ? FATTN_PARAM_NO_DECAY : 0};
                MUST(on[k], fattn_tensor_alloc(on[k], dtype, 1, &lengths[i], &w[k][i].value));
                MUST(on[k], fattn_tensor_alloc(on[k], FATTN_F32, 1, &lengths[i], &w[k][i].grad));
                MUST(on[k], fattn_tensor_normal(on[k], &w[k][i].value, 0, 1, (fattn_rng){.seed = 4, .stream = i}));
            }
            fattn_param *const list[] = {&w[k][0], &w[k][1]};
            MUST(on[k], is_sgd ? fattn_sgd_create(on[k], &s, list, 2, &sgd[k])
                               : fattn_adamw_create(on[k], &a, list, 2, &adamw[k]));
        }
        for (uint32_t t = 0; t < T; ++t) {
            for (uint32_t i = 0; i < 2; ++i) {
                const fattn_rng rng = {.seed = 5 + t, .stream = i};
                MUST(p.cpu, fattn_tensor_normal(p.cpu, &w[1][i].grad, 0, 1, rng));
                MUST(p.gpu, fattn_tensor_copy(p.gpu, &w[0][i].grad, &w[1][i].grad));
                MUST(p.gpu, fattn_tensor_copy(p.gpu, &w[0][i].value, &w[1][i].value));
            }
            for (int k = 0; k < 2; ++k) {
                MUST(on[k], is_sgd ? fattn_sgd_set_lr(sgd[k], 1e-2f) : fattn_adamw_set_lr(adamw[k], 1e-2f));
                MUST(on[k], is_sgd ? fattn_sgd_step(sgd[k]) : fattn_adamw_step(adamw[k]));
            }
            for (int i = 0; i < 2; ++i) {
                fattn_tensor got = to_host(&p, &w[0][i].value), want = to_host(&p, &w[1][i].value);
                for (int64_t e = 0; e < lengths[i]; ++e) {
                    const double x = ((double *)got.data)[e], y = ((double *)want.data)[e];
                    cr_assert(fabs(x - y) <= (n % 2 ? 0x1p-10 : 0x1p-7) * fabs(y) + 0x1p-20, "%d: %g, not %g", n, x, y);
                    different += x != y;
                }
                fattn_tensor_free(p.cpu, &got);
                fattn_tensor_free(p.cpu, &want);
            }
        }
        cr_assert_leq((double)different, 10 * T * 33008 * (n % 2 ? 0x1p-10 : 0x1p-13), "%d: %ld differ", n,
                      (long)different);
        for (int k = 0; k < 2; ++k) {
            fattn_adamw_destroy(adamw[k]);
            fattn_sgd_destroy(sgd[k]);
            for (int i = 0; i < 2; ++i) {
                fattn_tensor_free(on[k], &w[k][i].value);
                fattn_tensor_free(on[k], &w[k][i].grad);
            }
        }
    }
    pair_free(&p);
}

/* A run on one device goes on on the other: values, masters, moments and the loss scale arrive bitwise. */
Test(cuda_training, checkpoints_are_the_same_on_both) {
    static const struct {
        fattn_dtype dtype;
        uint32_t flags;
    } kinds[] = {{FATTN_F64, 0}, {FATTN_F32, 0},           {FATTN_BF16, 0},
                 {FATTN_F16, 0}, {FATTN_BF16, STOCHASTIC}, {FATTN_F16, STOCHASTIC}};
    char name[] = "/tmp/fattn-cuda-checkpoint-XXXXXX";
    pair p = pair_or_skip(0);
    const int file = mkstemp(name);
    cr_assert_geq(file, 0);
    for (size_t n = 0; n < sizeof kinds / sizeof *kinds; ++n) {
        const bool is_scaled = kinds[n].dtype == FATTN_F16;
        run from, to;
        run_start_with(&from, p.gpu, kinds[n].dtype, kinds[n].flags);
        run_start_with(&to, p.cpu, kinds[n].dtype, kinds[n].flags);
        for (int step = 0; step < (is_scaled ? 12 : 2); ++step) train_step(&from, step);
        fattn_checkpoint c = {
            .struct_size = sizeof c, .n = PARAMS, .params = from.list, .adamw = from.adamw, .step = 2};
        static const char *const names[PARAMS] = {"embedding", "qkv", "out", "norm"};
        for (int i = 0; i < PARAMS; ++i) from.p[i].name = to.p[i].name = names[i];
        MUST(p.gpu, fattn_checkpoint_save(p.gpu, name, &c));
        c.params = to.list, c.adamw = to.adamw, c.step = 0;
        MUST(p.cpu, fattn_checkpoint_load(p.cpu, name, &c));
        cr_assert_eq(c.step, 2);
        cr_assert_eq(distance(&p, &from, &to), 0);
        cr_assert(same_scaling(&from, &to) && (!is_scaled || scaling_of(&to).scale < 0x1p24f));
        fattn_tensor m, v;
        MUST(p.gpu, fattn_adamw_state(from.adamw, 1, FATTN_ADAM_M, &m));
        MUST(p.cpu, fattn_adamw_state(to.adamw, 1, FATTN_ADAM_M, &v));
        fattn_tensor got = to_host(&p, &v), want = to_host(&p, &m);
        cr_assert(memcmp(got.data, want.data, (size_t)fattn_tensor_numel(&got) * sizeof(double)) == 0);
        fattn_tensor_free(p.cpu, &got);
        fattn_tensor_free(p.cpu, &want);
        MUST(p.cpu, fattn_checkpoint_save(p.cpu, name, &c)); /* and back */
        c.params = from.list, c.adamw = from.adamw;
        MUST(p.gpu, fattn_checkpoint_load(p.gpu, name, &c));
        cr_assert_eq(distance(&p, &from, &to), 0);
        run_end(&from);
        run_end(&to);
    }
    close(file);
    unlink(name);
    pair_free(&p);
}

/* An id and a target out of range, which the host cannot check: NaN, not a crash. */
Test(cuda_training, wrong_ids) {
    pair p = pair_or_skip(0);
    run r;
    double loss;
    run_start(&r, p.gpu, FATTN_F32);
    int32_t bad[B * S] = {V};
    const fattn_tensor here = fattn_tensor_view(bad, FATTN_I32, FATTN_CPU, 0, 2, r.ids.shape);
    MUST(p.gpu, fattn_tensor_copy(p.gpu, &r.ids, &here));
    MUST(p.gpu, fattn_tape_item(r.tape, forward(&r), &loss));
    cr_assert(isnan(loss));
    run_end(&r);
    pair_free(&p);
}

/* Loss scales on both devices, in every dtype and with both optimizers: the same rule, and an overflow changes nothing
   but gradients and scale. With powers of two a step on the device is bitwise that without a scale. */
Test(cuda_training, loss_scale) {
    static const fattn_dtype types[] = {FATTN_F64, FATTN_F32, FATTN_BF16, FATTN_F16};
    static const int64_t length = 33001;
    enum { SCALED, ON_CPU, PLAIN, RUNS };
    const fattn_loss_scale_options scale = {
        .struct_size = sizeof scale, .initial = 8, .minimum = 2, .maximum = 32, .interval = 2};
    pair p = pair_or_skip(0);
    for (int n = 0; n < 2 * 2 * 4; ++n) {
        const fattn_dtype dtype = types[n % 4], wide = dtype == FATTN_F64 ? FATTN_F64 : FATTN_F32;
        const bool is_sgd = n / 4 % 2;
        const fattn_dtype grad = n / 8 ? dtype : wide;
        fattn_param w[RUNS];
        fattn_adamw *adamw[RUNS] = {NULL};
        fattn_sgd *sgd[RUNS] = {NULL};
        for (int k = 0; k < RUNS; ++k) {
            fattn_ctx *const on = k == ON_CPU ? p.cpu : p.gpu;
            const fattn_loss_scale_options *const option = k == PLAIN ? NULL : &scale;
            const fattn_sgd_options s = {
                .struct_size = sizeof s, .momentum = 0.9f, .max_grad_norm = 3, .loss_scale = option};
            fattn_adamw_options a = {.struct_size = sizeof a};
            fattn_tensor view;
            fattn_adamw_defaults(&a);
            a.max_grad_norm = 3, a.loss_scale = option;
            w[k] = (fattn_param){.name = "w"};
            MUST(on, fattn_tensor_alloc(on, dtype, 1, &length, &w[k].value));
            MUST(on, fattn_tensor_alloc(on, grad, 1, &length, &w[k].grad));
            MUST(on, fattn_tensor_normal(on, &w[k].value, 0, 1, (fattn_rng){.seed = 4}));
            if (is_sgd)
                MUST(on, fattn_sgd_create(on, &s, (fattn_param *[]){&w[k]}, 1, &sgd[k]));
            else
                MUST(on, fattn_adamw_create(on, &a, (fattn_param *[]){&w[k]}, 1, &adamw[k]));
            MUST(on, is_sgd ? fattn_sgd_loss_scale(sgd[k], &view) : fattn_adamw_loss_scale(adamw[k], &view));
            cr_assert(view.device == (int32_t)fattn_ctx_device(on) && view.dtype == FATTN_F32 && view.ndim == 0);
        }
        for (int t = 0; t < 12; ++t) {
            const bool overflows = t % 5 == 2 || t == 3;
            fattn_loss_scale_state state[RUNS];
            double norm[RUNS];
            for (int k = 0; k < RUNS; ++k) {
                fattn_ctx *const on = k == ON_CPU ? p.cpu : p.gpu;
                state[k] = (fattn_loss_scale_state){.struct_size = sizeof state[k]};
                MUST(on, is_sgd ? fattn_sgd_get_loss_scale(sgd[k], &state[k])
                                : fattn_adamw_get_loss_scale(adamw[k], &state[k]));
                if (k == PLAIN && overflows) continue;
                const double size = (double)state[k].scale; /* of numbers that are normal in F16 */
                MUST(on,
                     fattn_tensor_normal(on, &w[k].grad, 2 * size, 0.25 * size, (fattn_rng){.seed = 50 + (uint64_t)t}));
                const fattn_tensor last = fattn_tensor_slice(&w[k].grad, 0, length - 1, length);
                const double infinite = INFINITY;
                const fattn_tensor from =
                    fattn_tensor_view((void *)(uintptr_t)&infinite, FATTN_F64, FATTN_CPU, 0, 1, (const int64_t[]){1});
                if (overflows) MUST(on, fattn_tensor_copy(on, &last, &from));
                MUST(on, is_sgd ? fattn_sgd_step(sgd[k]) : fattn_adamw_step(adamw[k]));
                MUST(on, is_sgd ? fattn_sgd_grad_norm(sgd[k], &norm[k]) : fattn_adamw_grad_norm(adamw[k], &norm[k]));
            }
            cr_assert(state[SCALED].scale == state[ON_CPU].scale &&
                      state[SCALED].finite_steps == state[ON_CPU].finite_steps &&
                      state[SCALED].skipped_steps == state[ON_CPU].skipped_steps && state[PLAIN].scale == 1);
            cr_assert_eq((bool)isfinite(norm[SCALED]), !overflows);
            if (!overflows) cr_assert_eq(norm[SCALED], norm[PLAIN], "%g, not %g", norm[SCALED], norm[PLAIN]);
            fattn_tensor got = to_host(&p, &w[SCALED].value), want = to_host(&p, &w[PLAIN].value);
            fattn_tensor left = to_host(&p, &w[SCALED].grad);
            for (int64_t e = 0; e < length; ++e) {
                const double x = ((double *)got.data)[e], y = ((double *)want.data)[e];
                cr_assert(x == y, "%d, step %d [%ld]: %.9g, not %.9g", n, t, (long)e, x, y);
                cr_assert_eq(((double *)left.data)[e], 0);
            }
            fattn_tensor_free(p.cpu, &got);
            fattn_tensor_free(p.cpu, &want);
            fattn_tensor_free(p.cpu, &left);
        }
        for (int k = 0; k < RUNS; ++k) {
            fattn_ctx *const on = k == ON_CPU ? p.cpu : p.gpu;
            fattn_adamw_destroy(adamw[k]);
            fattn_sgd_destroy(sgd[k]);
            fattn_tensor_free(on, &w[k].value);
            fattn_tensor_free(on, &w[k].grad);
        }
    }
    pair_free(&p);
}

/* Contracts that only a device has: a seed on the host, and steps whose scale nobody has. */
Test(cuda_training, seeds_are_on_the_device) {
    pair p = pair_or_skip(0);
    run r;
    float one = 1;
    const fattn_tensor here = fattn_tensor_view(&one, FATTN_F32, FATTN_CPU, 0, 0, NULL);
    run_start(&r, p.gpu, FATTN_F16);
    cr_assert_eq(fattn_tape_backward_from(r.tape, forward(&r), &here), FATTN_E_DEVICE);
    cr_assert(strstr(fattn_ctx_error(p.gpu), "the seed"), "%s", fattn_ctx_error(p.gpu));
    fattn_loss_scale_options o = {.struct_size = sizeof o};
    fattn_loss_scale_defaults(&o);
    const fattn_sgd_options scaled = {.struct_size = sizeof scaled, .loss_scale = &o};
    fattn_sgd *s;
    MUST(p.gpu, fattn_sgd_create(p.gpu, &scaled, r.list, PARAMS, &s));
    cr_assert_eq(fattn_sgd_step(s), FATTN_E_STATE);
    fattn_sgd_destroy(s);
    run_end(&r);
    pair_free(&p);
}

/* 65536 rows: the mean's gradients of a row, probabilities over 2^16, have two bits in F16. Against F64 on the CPU,
   with the scale 2^16. Logits up to 4 are rounded by 2^-11 of themselves, which changes their probabilities by up to
   2^-9; G, dx and their products are rounded by 2^-11 each. Four times the largest. */
Test(cuda_training, f16_losses_of_many_rows) {
    enum { ROWS = 1 << 16, CLASSES = 64, K = 16 };
    static const int64_t shapes[2][2] = {{ROWS, K}, {CLASSES, K}}, rows = ROWS;
    static const float scale = 65536;
    pair p = pair_or_skip(0);
    fattn_ctx *const on[2] = {p.gpu, p.cpu};
    int32_t *const host = malloc(ROWS * sizeof *host);
    fattn_param w[2][2];
    for (int i = 0; i < ROWS; ++i) host[i] = i % 11 == 5 ? -1 : i * 7 % CLASSES;
    const fattn_tensor targets = fattn_tensor_view(host, FATTN_I32, FATTN_CPU, 0, 1, &rows);
    const fattn_tensor seed = fattn_tensor_view((void *)(uintptr_t)&scale, FATTN_F32, FATTN_CPU, 0, 0, NULL);
    for (int k = 0; k < 2; ++k) {
        fattn_tape *t;
        fattn_tensor to, from;
        for (uint32_t i = 0; i < 2; ++i) {
            const fattn_dtype dtype = k ? FATTN_F64 : FATTN_F16;
            w[k][i] = (fattn_param){.name = "w"};
            MUST(on[k], fattn_tensor_alloc(on[k], dtype, 2, shapes[i], &w[k][i].value));
            MUST(on[k], fattn_tensor_alloc(on[k], i ? k ? FATTN_F64 : FATTN_F32 : dtype, 2, shapes[i], &w[k][i].grad));
            MUST(on[k], fattn_tensor_normal(on[k], &w[k][i].grad, 0, 0, (fattn_rng){0}));
            if (k == 0) /* the CPU's are copies of these, rounded */
                MUST(p.gpu, fattn_tensor_normal(p.gpu, &w[0][i].value, 0, 0.5, (fattn_rng){.seed = 6, .stream = i}));
            else
                MUST(p.gpu, fattn_tensor_copy(p.gpu, &w[1][i].value, &w[0][i].value));
        }
        MUST(on[k], fattn_tensor_alloc(on[k], FATTN_I32, 1, &rows, &to));
        MUST(on[k], fattn_tensor_copy(on[k], &to, &targets));
        MUST(on[k], fattn_tensor_alloc(on[k], FATTN_F32, 0, NULL, &from));
        MUST(on[k], fattn_tensor_copy(on[k], &from, &seed));
        MUST(on[k], fattn_tape_create(on[k], &t));
        const fattn_var loss =
            fattn_op_linear_cross_entropy(t, fattn_use(t, &w[k][0]), fattn_use(t, &w[k][1]), fattn_input(t, &to), -1);
        MUST(on[k], fattn_tape_backward_from(t, loss, &from));
        fattn_tape_destroy(t);
        fattn_tensor_free(on[k], &to);
        fattn_tensor_free(on[k], &from);
    }
    for (int i = 0; i < 2; ++i) {
        fattn_tensor got = to_host(&p, &w[0][i].grad), want = to_host(&p, &w[1][i].grad);
        double error = 0, size = 0;
        for (int64_t e = 0; e < fattn_tensor_numel(&got); ++e) {
            const double x = ((double *)got.data)[e], y = ((double *)want.data)[e];
            error += (x - y) * (x - y), size += y * y;
        }
        cr_assert(size > 0 && sqrt(error / size) <= 0x1p-7, "%d: %g of %g", i, sqrt(error), sqrt(size));
        fattn_tensor_free(p.cpu, &got);
        fattn_tensor_free(p.cpu, &want);
        for (int k = 0; k < 2; ++k) {
            fattn_tensor_free(on[k], &w[k][i].value);
            fattn_tensor_free(on[k], &w[k][i].grad);
        }
    }
    free(host);
    pair_free(&p);
}
