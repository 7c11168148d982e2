/* 16-bit parameters without masters, rounded to nearest and stochastically: each update against that of F32 parameters
   rounded by the specification, threads, skipped steps, resuming, memory, contracts; small updates that are lost, and
   that add up; with AdamW and with SGD. */
#include "suite.h"

#include <math.h>
#include <string.h>

#include "core/tensor/stochastic_rounding.h"

static void set_up(void) { open_context(2); }
TestSuite(no_masters, .init = set_up, .fini = close_context);

#define MUST(call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(ctx))

enum {
    MASTERS = 0,
    NEAREST = FATTN_OPTIM_NO_MASTERS,
    FOLLOWS = FATTN_OPTIM_STOCHASTIC_ROUNDING, /* values follow masters */
    STOCHASTIC = NEAREST | FOLLOWS
};
static const uint64_t SEED = 0x123456789abcdef1;

/* ---- either optimizer ---- */

enum { ADAMW, SGD, RULES };

typedef struct optimizer {
    fattn_adamw *adamw;
    fattn_sgd *sgd;
} optimizer;

static void create(fattn_ctx *c, int rule, uint32_t flags, uint64_t seed, fattn_param *const *params, int n,
                   optimizer *out) {
    *out = (optimizer){NULL, NULL};
    if (rule == SGD) {
        const fattn_sgd_options o = {.struct_size = sizeof o,
                                     .momentum = 0.9f,
                                     .weight_decay = 0.1f,
                                     .nesterov = 1,
                                     .max_grad_norm = 5,
                                     .flags = flags,
                                     .seed = seed};
        MUST(fattn_sgd_create(c, &o, params, n, &out->sgd));
        cr_assert(fattn_sgd_flags(out->sgd) == flags && fattn_sgd_seed(out->sgd) == seed);
        return;
    }
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    o.max_grad_norm = 5;
    o.flags = flags;
    o.seed = seed;
    MUST(fattn_adamw_create(c, &o, params, n, &out->adamw));
    cr_assert(fattn_adamw_flags(out->adamw) == flags && fattn_adamw_seed(out->adamw) == seed);
}
static void destroy(const optimizer *o) {
    fattn_adamw_destroy(o->adamw);
    fattn_sgd_destroy(o->sgd);
}
static void step(const optimizer *o) { MUST(o->sgd ? fattn_sgd_step(o->sgd) : fattn_adamw_step(o->adamw)); }
static void set_lr(const optimizer *o, float lr) {
    MUST(o->sgd ? fattn_sgd_set_lr(o->sgd, lr) : fattn_adamw_set_lr(o->adamw, lr));
}
static int64_t steps_of(const optimizer *o) {
    int64_t t = -1;
    MUST(o->sgd ? fattn_sgd_get_step(o->sgd, &t) : fattn_adamw_get_step(o->adamw, &t));
    return t;
}
static void set_steps(const optimizer *o, int64_t t) {
    MUST(o->sgd ? fattn_sgd_set_step(o->sgd, t) : fattn_adamw_set_step(o->adamw, t));
}
/* Moment `which` (1..) of params[i]; false: there is none. */
static bool moment(const optimizer *o, int i, int which, fattn_tensor *view) {
    if (o->sgd) return which == 1 && fattn_sgd_state(o->sgd, i, FATTN_SGD_MOMENTUM, view) == FATTN_OK;
    return which <= 2 && fattn_adamw_state(o->adamw, i, (fattn_adam_state)which, view) == FATTN_OK;
}

/* ---- parameters ---- */

/* Lengths around the chunks (16384), blocks (256) and words (4) of the implementation. */
enum { PARAMS = 7, FROZEN = 2, PLAIN = 4, WIDE = 6 };
static const int64_t lengths[PARAMS] = {1, 16385, 9, 0, 32768, 703, 5};

typedef struct model {
    fattn_param p[PARAMS];
    fattn_param *list[PARAMS];
} model;

/* The last one is F32 in every model. */
static void model_new(model *m, fattn_ctx *c, fattn_dtype dtype, fattn_dtype grad_dtype) {
    for (uint32_t i = 0; i < PARAMS; ++i) {
        fattn_param *const p = m->list[i] = &m->p[i];
        *p = (fattn_param){.name = "p",
                           .flags = i == FROZEN  ? FATTN_PARAM_FROZEN
                                    : i == PLAIN ? FATTN_PARAM_NO_DECAY
                                                 : 0};
        MUST(fattn_tensor_alloc(c, i == WIDE ? FATTN_F32 : dtype, 1, &lengths[i], &p->value));
        MUST(fattn_tensor_alloc(c, i == WIDE ? FATTN_F32 : grad_dtype, 1, &lengths[i], &p->grad));
        /* F16: with subnormal numbers. */
        const double scale = i == 5 && dtype == FATTN_F16 ? 0x1p-15 : 1;
        MUST(fattn_tensor_normal(c, &p->value, 0, scale, (fattn_rng){.seed = 5, .stream = i}));
    }
}
static void model_free(model *m, fattn_ctx *c) {
    for (int i = 0; i < PARAMS; ++i) {
        fattn_tensor_free(c, &m->p[i].value);
        fattn_tensor_free(c, &m->p[i].grad);
    }
}
static void set_gradients(model *m, fattn_ctx *c, int64_t t) {
    for (uint32_t i = 0; i < PARAMS; ++i)
        MUST(fattn_tensor_normal(c, &m->p[i].grad, 0, 0.1, (fattn_rng){.seed = 100 + (uint64_t)t, .stream = i}));
}
static double get(const fattn_tensor *t, int64_t i) { return fattni_load(t->data, t->dtype, i); }
static bool same_bits(const fattn_tensor *a, const fattn_tensor *b) {
    const size_t bytes = (size_t)fattn_tensor_numel(a) * fattn_dtype_size((fattn_dtype)a->dtype);
    return a->dtype == b->dtype && (!bytes || memcmp(a->data, b->data, bytes) == 0);
}
static bool same_model(const model *a, const model *b) {
    for (int i = 0; i < PARAMS; ++i)
        if (!same_bits(&a->p[i].value, &b->p[i].value)) return false;
    return true;
}
static void run(model *m, fattn_ctx *c, const optimizer *o, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        set_gradients(m, c, t);
        set_lr(o, 1e-3f / (float)(t + 1));
        step(o);
    }
}

/* ---- updates ---- */

typedef struct kind {
    fattn_dtype value, grad;
} kind;
static const kind kinds[] = {
    {FATTN_BF16, FATTN_F32}, {FATTN_BF16, FATTN_BF16}, {FATTN_F16, FATTN_F32}, {FATTN_F16, FATTN_F16}};
enum { KINDS = sizeof kinds / sizeof *kinds };

/* An F32 parameter that begins a step with the 16-bit number, or with FOLLOWS only the first step, with the same
   moments and gradients, ends as the number before its rounding. That is done here, with the random bits that the
   header describes: bit for bit, and so are the moments. Clipping, decay and rates are in it. */
static void against_f32(int rule, const kind *k, uint32_t flags) {
    model narrow, wide;
    optimizer a, b;
    const uint64_t seed = flags & FOLLOWS ? SEED : 0;
    int moved = 0;
    model_new(&narrow, ctx, k->value, k->grad);
    model_new(&wide, ctx, FATTN_F32, FATTN_F32);
    create(ctx, rule, flags, seed, narrow.list, PARAMS, &a);
    create(ctx, rule, MASTERS, 0, wide.list, PARAMS, &b);
    for (int64_t t = 1; t <= 4; ++t) {
        set_lr(&a, 2e-3f / (float)t), set_lr(&b, 2e-3f / (float)t);
        set_gradients(&narrow, ctx, t);
        for (int i = 0; i < PARAMS; ++i) {
            if (t == 1 || flags != FOLLOWS) MUST(fattn_tensor_copy(ctx, &wide.p[i].value, &narrow.p[i].value));
            MUST(fattn_tensor_copy(ctx, &wide.p[i].grad, &narrow.p[i].grad));
        }
        step(&a), step(&b);
        cr_assert(steps_of(&a) == t && steps_of(&b) == t);
        for (int i = 0; i < PARAMS; ++i) {
            fattn_tensor u, v;
            for (int which = 1; which <= 2; ++which) {
                const bool has = moment(&a, i, which, &u);
                cr_assert_eq(has, moment(&b, i, which, &v));
                cr_assert(!has || same_bits(&u, &v), "moments of params[%d]", i);
            }
            for (int64_t e = 0; e < lengths[i]; ++e) {
                const float x = (float)get(&wide.p[i].value, e);
                const fattn_tensor *const value = &narrow.p[i].value;
                uint16_t want = k->value == FATTN_F16 ? fattni_float_to_f16(x) : fattni_float_to_bf16(x);
                const uint16_t close = want;
                if (flags & FOLLOWS && i != FROZEN)
                    want = fattni_half_stochastic((int32_t)k->value, x, fattni_rounding_word(seed, t, i, e));
                moved += i != WIDE && want != close;
                if (i == WIDE)
                    cr_assert_eq(get(value, e), (double)x, "F32 parameters are as always");
                else
                    cr_assert_eq(((const uint16_t *)value->data)[e], want, "%s, rule %d, step %d: params[%d][%d]",
                                 fattn_dtype_name(k->value), rule, (int)t, i, (int)e);
            }
        }
    }
    cr_assert(flags & FOLLOWS ? moved > 1000 : moved == 0);
    destroy(&a), destroy(&b);
    model_free(&narrow, ctx), model_free(&wide, ctx);
}

Test(no_masters, updates_are_those_of_f32_rounded) {
    for (int rule = 0; rule < RULES; ++rule)
        for (int k = 0; k < KINDS; ++k) {
            against_f32(rule, &kinds[k], NEAREST);
            against_f32(rule, &kinds[k], STOCHASTIC), against_f32(rule, &kinds[k], FOLLOWS);
        }
}

Test(no_masters, threads_do_not_matter) {
    for (int rule = 0; rule < RULES; ++rule) {
        model one, many;
        optimizer a;
        model_new(&one, ctx, FATTN_BF16, FATTN_F32);
        create(ctx, rule, STOCHASTIC, SEED, one.list, PARAMS, &a);
        run(&one, ctx, &a, 0, 3);
        destroy(&a);
        for (int threads = 1; threads <= 8; ++threads) {
            failing_alloc blocks = {.left = -1};
            fattn_ctx *const c = failing_context(&blocks, threads);
            model_new(&many, c, FATTN_BF16, FATTN_F32);
            create(c, rule, STOCHASTIC, SEED, many.list, PARAMS, &a);
            run(&many, c, &a, 0, 3);
            cr_assert(same_model(&one, &many), "%d threads", threads);
            destroy(&a);
            model_free(&many, c);
            fattn_ctx_destroy(c);
        }
        model_free(&one, ctx);
    }
}

/* Another seed, and only another one, gives other bits. */
Test(no_masters, the_seed_decides) {
    model m[3];
    for (int n = 0; n < 3; ++n) {
        optimizer a;
        model_new(&m[n], ctx, FATTN_BF16, FATTN_F32);
        create(ctx, ADAMW, STOCHASTIC, n == 2 ? SEED ^ (UINT64_C(1) << 40) : SEED, m[n].list, PARAMS, &a);
        run(&m[n], ctx, &a, 0, 2);
        destroy(&a);
    }
    cr_assert(same_model(&m[0], &m[1]));
    cr_assert_not(same_model(&m[0], &m[2]));
    for (int n = 0; n < 3; ++n) model_free(&m[n], ctx);
}

/* A skipped step changes nothing, and takes no random bits: what follows is as without it. */
Test(no_masters, a_skipped_step_takes_no_bits) {
    for (int rule = 0; rule < RULES; ++rule) {
        model struck, calm;
        optimizer a, b;
        model_new(&struck, ctx, FATTN_F16, FATTN_F16), model_new(&calm, ctx, FATTN_F16, FATTN_F16);
        create(ctx, rule, STOCHASTIC, SEED, struck.list, PARAMS, &a);
        create(ctx, rule, STOCHASTIC, SEED, calm.list, PARAMS, &b);
        run(&struck, ctx, &a, 0, 2), run(&calm, ctx, &b, 0, 2);
        set_gradients(&struck, ctx, 9);
        fattni_store(struck.p[1].grad.data, FATTN_F16, 16384, (double)INFINITY);
        step(&a);
        cr_assert(same_model(&struck, &calm) && steps_of(&a) == 2);
        run(&struck, ctx, &a, 2, 4), run(&calm, ctx, &b, 2, 4);
        cr_assert(same_model(&struck, &calm) && steps_of(&a) == 4);
        destroy(&a), destroy(&b);
        model_free(&struck, ctx), model_free(&calm, ctx);
    }
}

/* Moments and the step count are the whole state. */
Test(no_masters, resumes_bitwise) {
    for (int rule = 0; rule < RULES; ++rule) {
        model whole, halves;
        optimizer a, first, second;
        model_new(&whole, ctx, FATTN_BF16, FATTN_F32), model_new(&halves, ctx, FATTN_BF16, FATTN_F32);
        create(ctx, rule, STOCHASTIC, SEED, whole.list, PARAMS, &a);
        create(ctx, rule, STOCHASTIC, SEED, halves.list, PARAMS, &first);
        run(&whole, ctx, &a, 0, 6), run(&halves, ctx, &first, 0, 3);
        create(ctx, rule, STOCHASTIC, SEED, halves.list, PARAMS, &second);
        for (int i = 0; i < PARAMS; ++i)
            for (int which = 1; which <= 2; ++which) {
                fattn_tensor from, to;
                if (!moment(&first, i, which, &from)) continue;
                cr_assert(moment(&second, i, which, &to));
                MUST(fattn_tensor_copy(ctx, &to, &from));
            }
        set_steps(&second, steps_of(&first));
        run(&halves, ctx, &second, 3, 6);
        cr_assert(same_model(&whole, &halves), "rule %d", rule);
        destroy(&a), destroy(&first), destroy(&second);
        model_free(&whole, ctx), model_free(&halves, ctx);
    }
}

/* ---- small updates ---- */

/* 4096 parameters of 1, T updates of 2^-12 each, a 16th of the distance to the BF16 below: to nearest none moves.
   Stochastically all are independent, and each rounding has a standard deviation of at most 2^-9 (half a distance), so
   the mean is within 5 sqrt(T / 4096) 2^-9 of 1 - T 2^-12. */
Test(no_masters, small_updates_are_lost_to_nearest_and_add_up_otherwise) {
    enum { N = 4096, T = 256 };
    static const uint32_t flags[] = {NEAREST, STOCHASTIC};
    for (int n = 0; n < 2; ++n) {
        const int64_t count = N;
        fattn_param p = {.name = "p"}, *list[] = {&p};
        const fattn_sgd_options o = {.struct_size = sizeof o, .flags = flags[n], .seed = n ? SEED : 0};
        fattn_sgd *s;
        double mean = 0;
        MUST(fattn_tensor_alloc(ctx, FATTN_BF16, 1, &count, &p.value));
        MUST(fattn_tensor_alloc(ctx, FATTN_BF16, 1, &count, &p.grad));
        MUST(fattn_tensor_normal(ctx, &p.value, 1, 0, (fattn_rng){0}));
        MUST(fattn_sgd_create(ctx, &o, list, 1, &s));
        MUST(fattn_sgd_set_lr(s, 0x1p-12f));
        for (int t = 0; t < T; ++t) {
            MUST(fattn_tensor_normal(ctx, &p.grad, 1, 0, (fattn_rng){0}));
            MUST(fattn_sgd_step(s));
        }
        for (int64_t e = 0; e < N; ++e) mean += get(&p.value, e) / N;
        if (flags[n] == NEAREST)
            cr_assert_eq(mean, 1);
        else
            cr_assert_leq(fabs(mean - (1 - T * 0x1p-12)), 5 * sqrt((double)T / N) * 0x1p-9, "%.9g", mean);
        fattn_sgd_destroy(s);
        fattn_tensor_free(ctx, &p.value);
        fattn_tensor_free(ctx, &p.grad);
    }
}

/* A linear layer learns another one's outputs, mean (x W - x T)^2, by AdamW at a rate whose updates are below half of
   the distance between its numbers, on the same data in every run. */
static double learn(fattn_dtype dtype, uint32_t flags, double *first) {
    enum { ROWS = 64, IN = 32, OUT = 32, STEPS = 400 };
    const int64_t x_shape[] = {ROWS, IN}, w_shape[] = {OUT, IN}, y_shape[] = {ROWS, OUT};
    fattn_param w = {.name = "w"}, *list[] = {&w};
    fattn_tensor x, truth, y;
    fattn_tape *t;
    fattn_adamw *a;
    double loss = 0;
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    o.weight_decay = 0;
    o.flags = flags;
    o.seed = flags == STOCHASTIC ? SEED : 0;
    MUST(fattn_tape_create(ctx, &t));
    MUST(fattn_tensor_alloc(ctx, FATTN_F32, 2, x_shape, &x));
    MUST(fattn_tensor_alloc(ctx, FATTN_F32, 2, w_shape, &truth));
    MUST(fattn_tensor_alloc(ctx, FATTN_F32, 2, y_shape, &y));
    MUST(fattn_tensor_alloc(ctx, dtype, 2, w_shape, &w.value));
    MUST(fattn_tensor_alloc(ctx, FATTN_F32, 2, w_shape, &w.grad));
    MUST(fattn_tensor_normal(ctx, &x, 0, 1, (fattn_rng){.seed = 1}));
    MUST(fattn_tensor_normal(ctx, &w.value, 1, 0, (fattn_rng){0}));
    MUST(fattn_tensor_normal(ctx, &truth, 1.03, 0.01, (fattn_rng){.seed = 2}));
    MUST(fattn_tensor_normal(ctx, &w.grad, 0, 0, (fattn_rng){0}));
    MUST(fattn_adamw_create(ctx, &o, list, 1, &a));
    for (int step = 0; step < STEPS; ++step) {
        const fattn_var none = {0};
        fattn_tape_reset(t);
        fattn_var W = fattn_use(t, &w);
        if (dtype != FATTN_F32) W = fattn_op_cast(t, W, FATTN_F32);
        const fattn_var in = fattn_input(t, &x), d = fattn_op_add(t, W, fattn_op_scale(t, fattn_input(t, &truth), -1));
        const fattn_var e = fattn_op_linear(t, in, d, none);
        const fattn_var mean = fattn_op_mean(t, fattn_op_mul(t, e, e), NULL, 0, 0);
        MUST(fattn_tape_backward(t, mean));
        MUST(fattn_adamw_set_lr(a, 3e-4f));
        MUST(fattn_adamw_step(a));
        if (step == 0 || step == STEPS - 1) MUST(fattn_tape_item(t, mean, step ? &loss : first));
    }
    fattn_adamw_destroy(a);
    fattn_tape_destroy(t);
    fattn_tensor_free(ctx, &x), fattn_tensor_free(ctx, &truth), fattn_tensor_free(ctx, &y);
    fattn_tensor_free(ctx, &w.value), fattn_tensor_free(ctx, &w.grad);
    return loss;
}

/* To nearest nothing moves: 3e-4 is below 2^-8, half of the distance h above 1. Stochastically a weight is pulled to
   the truth by a = 3e-4 a step, and diffuses by a h / 2: it ends at a distance of exponential distribution with mean
   h / 2, so that the loss is about 32 inputs times 2 (h / 2)^2 = 1e-3; twice that is allowed. */
Test(no_masters, a_training_at_a_small_rate) {
    double first;
    const double f32 = learn(FATTN_F32, MASTERS, &first), masters = learn(FATTN_BF16, MASTERS, &first);
    const double nearest = learn(FATTN_BF16, NEAREST, &first), stochastic = learn(FATTN_BF16, STOCHASTIC, &first);
    cr_assert(first > 0.02 && nearest == first, "%g, %g", first, nearest);
    cr_assert(f32 < 1e-3 && masters < 1e-3 && stochastic < 2e-3, "%g %g %g", f32, masters, stochastic);
}

/* ---- memory and contracts ---- */

Test(no_masters, four_bytes_less_per_parameter) {
    for (int rule = 0; rule < RULES; ++rule) {
        model m;
        optimizer a;
        size_t live[2];
        model_new(&m, ctx, FATTN_BF16, FATTN_F32);
        const size_t before = fattn_ctx_mem(ctx).live;
        for (int n = 0; n < 2; ++n) {
            create(ctx, rule, n ? NEAREST : MASTERS, 0, m.list, PARAMS, &a);
            live[n] = fattn_ctx_mem(ctx).live - before;
            destroy(&a);
        }
        size_t halves = 0;
        for (int i = 0; i < WIDE; ++i) halves += i == FROZEN ? 0 : (size_t)lengths[i];
        const size_t saved = live[0] - live[1];
        cr_assert(saved >= 4 * halves && saved < 4 * halves + PARAMS * 256, "%zu", saved); /* alignment */
        model_free(&m, ctx);
    }
}

static void fails(int rule, uint32_t flags, uint64_t seed, const char *words) {
    fattn_adamw_options a = {.struct_size = sizeof a};
    fattn_adamw_defaults(&a);
    a.flags = flags, a.seed = seed;
    const fattn_sgd_options s = {.struct_size = sizeof s, .flags = flags, .seed = seed};
    fattn_adamw *adamw = (fattn_adamw *)&a;
    fattn_sgd *sgd = (fattn_sgd *)&a;
    cr_assert_eq(rule == SGD ? fattn_sgd_create(ctx, &s, NULL, 0, &sgd) : fattn_adamw_create(ctx, &a, NULL, 0, &adamw),
                 FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(ctx), words), "%s", fattn_ctx_error(ctx));
    cr_assert(strstr(fattn_ctx_error(ctx), rule == SGD ? "sgd: " : "adamw: "), "%s", fattn_ctx_error(ctx));
    cr_assert(rule == SGD ? !sgd : !adamw);
}

Test(no_masters, bad_options) {
    for (int rule = 0; rule < RULES; ++rule) {
        fails(rule, 4, 0, "unknown flags 0x4");
        fails(rule, STOCHASTIC | 1u << 31, 0, "unknown flags 0x80000003");
        fails(rule, NEAREST, 7, "seed 7 has no use: flags 0x1 lack");
        fails(rule, 0, UINT64_MAX, "seed 18446744073709551615 has no use");
    }
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw *a;
    fattn_adamw_defaults(&o);
    o.reserved = 3;
    cr_assert_eq(fattn_adamw_create(ctx, &o, NULL, 0, &a), FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(ctx), "adamw: reserved is 3, not 0"), "%s", fattn_ctx_error(ctx));
    o.reserved = 0, o.flags = 4, o.struct_size = offsetof(fattn_adamw_options, flags);
    MUST(fattn_adamw_create(ctx, &o, NULL, 0, &a)); /* of a program from before there were flags */
    cr_assert_eq(fattn_adamw_flags(a), 0);
    fattn_adamw_destroy(a);
    cr_assert(fattn_adamw_flags(NULL) == 0 && fattn_adamw_seed(NULL) == 0);
    cr_assert(fattn_sgd_flags(NULL) == 0 && fattn_sgd_seed(NULL) == 0);
}

Test(no_masters, bad_calls) {
    static const char *const words[RULES] = {"adamw_state: params[0] is bf16, with FATTN_OPTIM_NO_MASTERS",
                                             "sgd_state: params[0] is bf16, with FATTN_OPTIM_NO_MASTERS"};
    for (int rule = 0; rule < RULES; ++rule) {
        model m;
        optimizer a;
        fattn_tensor view = {.ndim = -7};
        model_new(&m, ctx, FATTN_BF16, FATTN_F32);
        create(ctx, rule, STOCHASTIC, SEED, m.list, PARAMS, &a);
        cr_assert_eq(a.sgd ? fattn_sgd_state(a.sgd, 0, FATTN_SGD_MASTER, &view)
                           : fattn_adamw_state(a.adamw, 0, FATTN_ADAM_MASTER, &view),
                     FATTN_E_STATE);
        cr_assert(strstr(fattn_ctx_error(ctx), words[rule]), "%s", fattn_ctx_error(ctx));
        cr_assert_eq(view.ndim, -7);
        destroy(&a);
        model_free(&m, ctx);
    }
    fattn_sgd *s;
    int64_t t = 5;
    MUST(fattn_sgd_create(ctx, NULL, NULL, 0, &s));
    cr_assert_eq(fattn_sgd_get_step(NULL, &t), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_get_step(s, NULL), FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(ctx), "sgd_get_step: t is NULL"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_sgd_set_step(NULL, 1), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_set_step(s, -1), FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(ctx), "sgd_set_step: -1 is not in 0..9007199254740992"), "%s",
              fattn_ctx_error(ctx));
    cr_assert_eq(fattn_sgd_set_step(s, (INT64_C(1) << 53) + 1), FATTN_E_ARG);
    MUST(fattn_sgd_set_step(s, 3));
    MUST(fattn_sgd_step(s));
    MUST(fattn_sgd_get_step(s, &t));
    cr_assert_eq(t, 4);
    fattn_sgd_destroy(s);
}
