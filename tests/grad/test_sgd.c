/* SGD against the published rule implemented for one number; decay, clipping, frozen parameters, masters, resuming.
   Schedules of learning rates. */
#include "suite.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor/numeric.h"

static void set_up(void) { open_context(2); }
TestSuite(sgd, .init = set_up, .fini = close_context);
TestSuite(schedule, .init = set_up, .fini = close_context);

#define MUST(call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(ctx))

/* Lengths around the chunks (16384) and blocks (256) of the implementation; 1 does not decay, 4 is frozen. */
enum { PARAMS = 6, FROZEN = 4, PLAIN = 1 };
static const int64_t lengths[PARAMS] = {1, 16384, 0, 20001, 255, 700};

typedef struct model {
    fattn_param p[PARAMS];
    fattn_param *list[PARAMS];
} model;

static void model_new(model *m, fattn_dtype dtype, fattn_dtype grad_dtype) {
    for (uint32_t i = 0; i < PARAMS; ++i) {
        fattn_param *p = m->list[i] = &m->p[i];
        *p = (fattn_param){.name = "p"};
        MUST(fattn_tensor_alloc(ctx, dtype, 1, &lengths[i], &p->value));
        MUST(fattn_tensor_alloc(ctx, grad_dtype, 1, &lengths[i], &p->grad));
        MUST(fattn_tensor_normal(ctx, &p->value, 0, 1, (fattn_rng){.seed = 5, .stream = i}));
    }
    m->p[PLAIN].flags = FATTN_PARAM_NO_DECAY;
    m->p[FROZEN].flags = FATTN_PARAM_FROZEN;
}
static void model_free(model *m) {
    for (int i = 0; i < PARAMS; ++i) {
        fattn_tensor_free(ctx, &m->p[i].value);
        fattn_tensor_free(ctx, &m->p[i].grad);
    }
}
static void set_gradients(model *m, int64_t step) {
    for (uint32_t i = 0; i < PARAMS; ++i)
        MUST(fattn_tensor_normal(ctx, &m->p[i].grad, 0, 0.1 * (double)(i + 1),
                                 (fattn_rng){.seed = 100 + (uint64_t)step, .stream = i}));
}
static double get(const fattn_tensor *t, int64_t i) { return fattni_load(t->data, t->dtype, i); }

/* One number, in double. */
typedef struct number {
    double p, u;
} number;
static void reference(number *x, double g, const fattn_sgd_options *o, double lr, bool decays) {
    if (decays) g += (double)o->weight_decay * x->p;
    x->u = (double)o->momentum * x->u + g;
    x->p -= lr * (o->nesterov ? g + (double)o->momentum * x->u : x->u);
}

/* Every element over several steps with a changing rate. F64: rounding. F32: per step the parameter is rounded twice,
   2^-24 of |p|, and the update, at most 10 lr |u| = 2, carries about six roundings. */
static void against_reference(fattn_dtype dtype, fattn_dtype grad_dtype, fattn_sgd_options o) {
    enum { STEPS = 6 };
    const double rtol = dtype == FATTN_F64 ? 1e-14 : STEPS * (2 + 2 * 6) * 0x1p-24;
    model m;
    fattn_sgd *s;
    number *want[PARAMS];
    o.struct_size = sizeof o;
    model_new(&m, dtype, grad_dtype);
    MUST(fattn_sgd_create(ctx, &o, m.list, PARAMS, &s));
    for (int i = 0; i < PARAMS; ++i) {
        want[i] = calloc((size_t)lengths[i] + 1, sizeof *want[i]);
        for (int64_t e = 0; e < lengths[i]; ++e) want[i][e].p = get(&m.p[i].value, e);
    }
    for (int64_t t = 1; t <= STEPS; ++t) {
        const float lr = 0.1f / (float)t;
        double squares = 0, norm;
        fattn_tensor view;
        set_gradients(&m, t);
        for (int i = 0; i < PARAMS; ++i)
            for (int64_t e = 0; e < lengths[i] && i != FROZEN; ++e)
                squares += get(&m.p[i].grad, e) * get(&m.p[i].grad, e);
        const double limit = (double)o.max_grad_norm;
        const double factor = limit > 0 && sqrt(squares) > limit ? limit / sqrt(squares) : 1;
        cr_assert(limit > 0 ? factor < 0.5 : factor == 1, "the test is to clip");
        for (int i = 0; i < PARAMS; ++i)
            for (int64_t e = 0; e < lengths[i] && i != FROZEN; ++e)
                reference(&want[i][e], factor * get(&m.p[i].grad, e), &o, (double)lr, i != PLAIN);
        MUST(fattn_sgd_set_lr(s, lr));
        MUST(fattn_sgd_step(s));
        MUST(fattn_sgd_grad_norm(s, &norm));
        MUST(fattn_sgd_norm_view(s, &view));
        cr_assert(view.ndim == 0 && view.dtype == FATTN_F64 && *(const double *)view.data == norm);
        cr_assert_float_eq(norm, sqrt(squares), 1e-12 * norm);
        for (int i = 0; i < PARAMS; ++i)
            for (int64_t e = 0; e < lengths[i]; ++e) {
                const double got = get(&m.p[i].value, e);
                cr_assert_float_eq(got, want[i][e].p, rtol * (1 + fabs(got)), "%s step %ld: %.9g, not %.9g",
                                   fattn_dtype_name(dtype), (long)t, got, want[i][e].p);
                cr_assert((get(&m.p[i].grad, e) == 0) == (i != FROZEN), "a frozen param is left alone");
            }
    }
    for (int i = 0; i < PARAMS; ++i) free(want[i]);
    fattn_sgd_destroy(s);
    model_free(&m);
}

static const fattn_sgd_options rules[] = {{.momentum = 0},
                                          {.momentum = 0.9f},
                                          {.momentum = 0.9f, .nesterov = 1},
                                          {.momentum = 0.5f, .weight_decay = 0.1f},
                                          {.weight_decay = 0.1f, .max_grad_norm = 20},
                                          {.momentum = 0.9f, .nesterov = 1, .weight_decay = 0.1f, .max_grad_norm = 20}};
enum { RULES = sizeof rules / sizeof *rules };

Test(sgd, follows_the_rule) {
    for (int n = 0; n < RULES; ++n) {
        against_reference(FATTN_F64, FATTN_F64, rules[n]);
        against_reference(FATTN_F64, FATTN_F32, rules[n]);
        against_reference(FATTN_F32, FATTN_F32, rules[n]);
    }
}

static void steps(model *m, fattn_sgd *s, int from, int to) {
    for (int t = from; t < to; ++t) {
        set_gradients(m, t);
        MUST(fattn_sgd_set_lr(s, 0.05f / (float)(t + 1)));
        MUST(fattn_sgd_step(s));
    }
}

/* 16-bit values follow F32 masters, which move as F32 values do. */
Test(sgd, masters) {
    static const fattn_dtype types[] = {FATTN_BF16, FATTN_F16};
    for (int n = 0; n < 2 * RULES; ++n) {
        fattn_sgd_options o = rules[n / 2];
        o.struct_size = sizeof o;
        model narrow, wide;
        fattn_sgd *a, *b;
        model_new(&narrow, types[n % 2], FATTN_F32);
        model_new(&wide, FATTN_F32, FATTN_F32);
        for (int i = 0; i < PARAMS; ++i) MUST(fattn_tensor_copy(ctx, &wide.p[i].value, &narrow.p[i].value));
        MUST(fattn_sgd_create(ctx, &o, narrow.list, PARAMS, &a));
        MUST(fattn_sgd_create(ctx, &o, wide.list, PARAMS, &b));
        steps(&narrow, a, 0, 4);
        steps(&wide, b, 0, 4);
        for (int i = 0; i < PARAMS; ++i) {
            fattn_tensor master;
            if (i == FROZEN) continue;
            MUST(fattn_sgd_state(a, i, FATTN_SGD_MASTER, &master));
            cr_assert(!lengths[i] || memcmp(master.data, wide.p[i].value.data, (size_t)lengths[i] * 4) == 0);
            for (int64_t e = 0; e < lengths[i]; ++e) {
                double cell;
                fattni_store(&cell, (int32_t)types[n % 2], 0, get(&master, e));
                cr_assert_eq(get(&narrow.p[i].value, e), fattni_load(&cell, (int32_t)types[n % 2], 0));
            }
        }
        fattn_sgd_destroy(a);
        fattn_sgd_destroy(b);
        model_free(&narrow);
        model_free(&wide);
    }
}

Test(sgd, resumes_bitwise) {
    static const fattn_dtype types[] = {FATTN_F32, FATTN_F64, FATTN_BF16};
    for (int n = 0; n < 3; ++n) {
        const fattn_sgd_options o = {.struct_size = sizeof o, .momentum = 0.9f, .nesterov = 1, .max_grad_norm = 10};
        model whole, halves;
        fattn_sgd *a, *first, *second;
        model_new(&whole, types[n], types[n]);
        model_new(&halves, types[n], types[n]);
        MUST(fattn_sgd_create(ctx, &o, whole.list, PARAMS, &a));
        MUST(fattn_sgd_create(ctx, &o, halves.list, PARAMS, &first));
        steps(&whole, a, 0, 7);
        steps(&halves, first, 0, 4);
        MUST(fattn_sgd_create(ctx, &o, halves.list, PARAMS, &second));
        for (int i = 0; i < PARAMS; ++i)
            for (int s = FATTN_SGD_MOMENTUM; s <= FATTN_SGD_MASTER && i != FROZEN; ++s) {
                if (s == FATTN_SGD_MASTER && types[n] != FATTN_BF16) continue;
                fattn_tensor from, to;
                MUST(fattn_sgd_state(first, i, (fattn_sgd_tensor)s, &from));
                MUST(fattn_sgd_state(second, i, (fattn_sgd_tensor)s, &to));
                MUST(fattn_tensor_copy(ctx, &to, &from));
            }
        fattn_sgd_destroy(first);
        steps(&halves, second, 4, 7);
        for (int i = 0; i < PARAMS; ++i)
            if (lengths[i])
                cr_assert_arr_eq(whole.p[i].value.data, halves.p[i].value.data,
                                 (size_t)lengths[i] * fattn_dtype_size(types[n]));
        fattn_sgd_destroy(a);
        fattn_sgd_destroy(second);
        model_free(&whole);
        model_free(&halves);
    }
}

Test(sgd, a_step_with_non_finite_gradients_is_skipped) {
    const fattn_sgd_options o = {.struct_size = sizeof o, .momentum = 0.9f, .weight_decay = 0.1f};
    model m;
    fattn_sgd *s;
    fattn_tensor u;
    double norm;
    model_new(&m, FATTN_F32, FATTN_F32);
    MUST(fattn_sgd_create(ctx, &o, m.list, PARAMS, &s));
    steps(&m, s, 0, 1);
    MUST(fattn_sgd_state(s, 0, FATTN_SGD_MOMENTUM, &u));
    const double before = get(&m.p[0].value, 0), moving = get(&u, 0);
    set_gradients(&m, 1);
    ((float *)m.p[5].grad.data)[7] = INFINITY;
    MUST(fattn_sgd_step(s));
    MUST(fattn_sgd_grad_norm(s, &norm));
    cr_assert(isinf(norm) && get(&m.p[0].value, 0) == before && get(&u, 0) == moving);
    cr_assert(get(&m.p[0].grad, 0) == 0 && get(&m.p[5].grad, 7) == 0);
    fattn_sgd_destroy(s);
    model_free(&m);
}

Test(sgd, gradients_of_one_pass_stay) {
    const fattn_sgd_options o = {.struct_size = sizeof o, .momentum = 0.9f};
    model m;
    fattn_sgd *s;
    model_new(&m, FATTN_F32, FATTN_F32);
    for (int i = 0; i < PARAMS; i += 2) m.p[i].flags |= FATTN_PARAM_ONE_PASS;
    MUST(fattn_sgd_create(ctx, &o, m.list, PARAMS, &s));
    set_gradients(&m, 1);
    const double before = get(&m.p[0].value, 0), kept = get(&m.p[0].grad, 0);
    MUST(fattn_sgd_step(s));
    cr_assert(get(&m.p[0].value, 0) != before && get(&m.p[0].grad, 0) == kept && kept != 0);
    cr_assert_eq(get(&m.p[1].grad, 16383), 0);
    fattn_sgd_destroy(s);
    model_free(&m);
}

static void rejected(fattn_sgd_options o, fattn_status want, const char *words) {
    fattn_sgd *s = (fattn_sgd *)&o;
    cr_assert_eq(fattn_sgd_create(ctx, &o, NULL, 0, &s), want);
    cr_assert(strstr(fattn_ctx_error(ctx), words), "%s", fattn_ctx_error(ctx));
    cr_assert_null(s);
}

Test(sgd, bad_calls_are_rejected) {
    const fattn_sgd_options good = {.struct_size = sizeof good};
    fattn_sgd_options o;
    o = good, o.struct_size = 0, rejected(o, FATTN_E_ABI, "fattn_sgd_options");
    o = good, o.momentum = 1, rejected(o, FATTN_E_ARG, "momentum 1 in [0,1)");
    o = good, o.momentum = -0.1f, rejected(o, FATTN_E_ARG, "momentum -0.1");
    o = good, o.weight_decay = NAN, rejected(o, FATTN_E_ARG, "weight_decay nan");
    o = good, o.max_grad_norm = -1, rejected(o, FATTN_E_ARG, "max_grad_norm -1");
    o = good, o.nesterov = 1, rejected(o, FATTN_E_ARG, "momentum > 0 for nesterov 1");
    model m;
    fattn_sgd *s;
    fattn_tensor view;
    double norm;
    model_new(&m, FATTN_F32, FATTN_F32);
    cr_assert_eq(fattn_sgd_create(NULL, NULL, m.list, PARAMS, &s), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_create(ctx, NULL, NULL, 3, &s), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_create(ctx, NULL, m.list, PARAMS, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_create(ctx, NULL, (fattn_param *[]){m.list[0], m.list[0]}, 2, &s), FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(ctx), "sgd: params[0] and params[1]"), "%s", fattn_ctx_error(ctx));
    MUST(fattn_sgd_create(ctx, NULL, m.list, PARAMS, &s)); /* all zero: no momentum */
    cr_assert_eq(fattn_sgd_grad_norm(s, &norm), FATTN_E_STATE);
    cr_assert_eq(fattn_sgd_set_lr(s, NAN), FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(ctx), "sgd: learning rate nan"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_sgd_set_lr(NULL, 1), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_step(NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_grad_norm(NULL, &norm), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_norm_view(NULL, &view), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_norm_view(s, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_state(NULL, 0, FATTN_SGD_MOMENTUM, &view), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_state(s, PARAMS, FATTN_SGD_MOMENTUM, &view), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_state(s, 0, FATTN_SGD_MOMENTUM, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_state(s, 0, (fattn_sgd_tensor)9, &view), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_state(s, 0, FATTN_SGD_MOMENTUM, &view), FATTN_E_STATE);
    cr_assert(strstr(fattn_ctx_error(ctx), "no momentum"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_sgd_state(s, 0, FATTN_SGD_MASTER, &view), FATTN_E_STATE);
    cr_assert_eq(fattn_sgd_state(s, FROZEN, FATTN_SGD_MASTER, &view), FATTN_E_STATE);
    m.p[FROZEN].flags = 0; /* no longer frozen */
    cr_assert_eq(fattn_sgd_step(s), FATTN_E_STATE);
    cr_assert(strstr(fattn_ctx_error(ctx), "sgd: params[4]"), "%s", fattn_ctx_error(ctx));
    fattn_sgd_destroy(s);
    fattn_sgd_destroy(NULL);
    model_free(&m);
}

Test(sgd, every_allocation_may_fail) {
    const fattn_sgd_options o = {.struct_size = sizeof o, .momentum = 0.9f};
    model m;
    fattn_sgd *s;
    long n = 0;
    model_new(&m, FATTN_BF16, FATTN_F32);
    const size_t before = fattn_ctx_mem(ctx).live;
    for (;; ++n) {
        memory.left = n;
        const fattn_status status = fattn_sgd_create(ctx, &o, m.list, PARAMS, &s);
        if (status == FATTN_OK) break;
        cr_assert_eq(status, FATTN_E_NOMEM);
        cr_assert_null(s);
        cr_assert_eq(fattn_ctx_mem(ctx).live, before, "allocation %ld", n);
    }
    cr_assert_gt(n, 8);
    memory.left = 0; /* a step needs none */
    set_gradients(&m, 1);
    MUST(fattn_sgd_step(s));
    memory.left = -1;
    fattn_sgd_destroy(s);
    model_free(&m);
}

/* ---- schedules ---- */

static double rate(fattn_schedule s, int64_t step) {
    float lr = -1;
    s.struct_size = sizeof s;
    MUST(fattn_schedule_lr(ctx, &s, step, &lr));
    return (double)lr;
}

/* By the formulas in double: one rounding to F32, half a unit of numbers below 1, and those of double. */
Test(schedule, values) {
    const float lr = 0.6f, min_lr = 0.05f;
    const double most = (double)lr, least = (double)min_lr, pi = acos(-1);
    static const int64_t warmups[] = {0, 1, 10, 100}, totals[] = {100, 103, 1000};
    for (int n = 0; n < 12; ++n)
        for (int kind = FATTN_SCHEDULE_CONSTANT; kind <= FATTN_SCHEDULE_WSD; ++kind) {
            const int64_t u = warmups[n % 4], N = totals[n / 4];
            const fattn_schedule s = {.kind = kind, .warmup = u, .steps = N, .lr = lr, .min_lr = min_lr};
            for (int64_t step = 0; step < N + 3; ++step) {
                const double r = step < N ? (double)(step - u) / (double)(N - u) : 1;
                const double start = floor(0.8 * (double)N);
                const double part = step < N ? ((double)step - start) / ((double)N - start) : 1;
                double want = most;
                if (step < u)
                    want = most * (double)(step + 1) / (double)u;
                else if (kind == FATTN_SCHEDULE_COSINE)
                    want = least + (1 + cos(pi * r)) / 2 * (most - least);
                else if (kind == FATTN_SCHEDULE_LINEAR)
                    want = least + (1 - r) * (most - least);
                else if (kind == FATTN_SCHEDULE_WSD && part >= 0)
                    want = least + (1 - sqrt(part)) * (most - least);
                cr_assert_float_eq(rate(s, step), want, 0x1.001p-25, "kind %d, warmup %ld of %ld, step %ld: %g", kind,
                                   (long)u, (long)N, (long)step, rate(s, step));
            }
            cr_assert_eq(rate(s, INT64_MAX), kind == FATTN_SCHEDULE_CONSTANT ? most : least);
        }
}

Test(schedule, begin_and_end) {
    const fattn_schedule s = {.kind = FATTN_SCHEDULE_COSINE, .warmup = 10, .steps = 100, .lr = 1};
    cr_assert_eq(rate(s, 0), (double)0.1f);
    cr_assert_eq(rate(s, 9), 1);
    cr_assert_eq(rate(s, 10), 1);
    cr_assert_eq(rate(s, 100), 0);
    const fattn_schedule nothing = {.kind = FATTN_SCHEDULE_LINEAR, .lr = 1};
    cr_assert_eq(rate(nothing, 0), 0, "a run of no steps has ended");
    const fattn_schedule always = {.kind = FATTN_SCHEDULE_CONSTANT, .warmup = 4, .lr = 1};
    cr_assert(rate(always, 0) == 0.25 && rate(always, 4) == 1);
    const fattn_schedule far = {.kind = FATTN_SCHEDULE_WSD, .steps = INT64_MAX, .lr = 1};
    cr_assert(rate(far, INT64_MAX / 10 * 7) == 1 && rate(far, INT64_MAX / 10 * 9) < 0.5);
}

static void schedule_fails(fattn_schedule s, int64_t step, fattn_status want, const char *words) {
    float lr = 7;
    cr_assert_eq(fattn_schedule_lr(ctx, &s, step, &lr), want, "%s", words);
    cr_assert(strstr(fattn_ctx_error(ctx), words), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(lr, 7, "nothing is written");
}

Test(schedule, errors) {
    const fattn_schedule good = {
        .struct_size = sizeof good, .kind = FATTN_SCHEDULE_COSINE, .warmup = 3, .steps = 9, .lr = 1, .min_lr = 0.1f};
    fattn_schedule s;
    float lr;
    s = good, s.struct_size = 0, schedule_fails(s, 0, FATTN_E_ABI, "fattn_schedule");
    s = good, s.kind = 0, schedule_fails(s, 0, FATTN_E_ARG, "unknown kind 0");
    s = good, s.kind = 5, schedule_fails(s, 0, FATTN_E_ARG, "unknown kind 5");
    s = good, s.lr = INFINITY, schedule_fails(s, 0, FATTN_E_ARG, "lr inf");
    s = good, s.min_lr = -1, schedule_fails(s, 0, FATTN_E_ARG, "min_lr -1");
    s = good, s.min_lr = 2, schedule_fails(s, 0, FATTN_E_ARG, "lr 1 and min_lr 2");
    s = good, s.warmup = -1, schedule_fails(s, 0, FATTN_E_ARG, "warmup -1");
    s = good, s.warmup = 10, schedule_fails(s, 0, FATTN_E_ARG, "warmup 10, steps 9");
    s = good, s.steps = -4, schedule_fails(s, 0, FATTN_E_ARG, "steps -4");
    schedule_fails(good, -1, FATTN_E_ARG, "step -1");
    cr_assert_eq(fattn_schedule_lr(NULL, &good, 0, &lr), FATTN_E_ARG);
    cr_assert_eq(fattn_schedule_lr(ctx, NULL, 0, &lr), FATTN_E_ARG);
    cr_assert_eq(fattn_schedule_lr(ctx, &good, 0, NULL), FATTN_E_ARG);
}
