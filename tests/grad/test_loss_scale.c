/* Loss scaling: the dynamic rule against its model, skipped steps, backward from a seed, scales that change no bit,
   gradients that F16 rounds to 0, contracts; with AdamW and with SGD. */
#include "suite.h"
#include "tape_ops.h"

#include <float.h>
#include <math.h>
#include <string.h>

#include "core/tensor/numeric.h"

static void set_up(void) { open_context(2); }
TestSuite(loss_scale, .init = set_up, .fini = close_context);

#define MUST(call) cr_assert_eq(call, FATTN_OK, "%s", fattn_ctx_error(ctx))

/* ---- either optimizer ---- */

enum { ADAMW, SGD, RULES };

typedef struct optimizer {
    fattn_adamw *adamw;
    fattn_sgd *sgd;
} optimizer;

/* With everything that an option can switch on. scale NULL: none. */
static fattn_status create(int rule, const fattn_loss_scale_options *scale, float clip, fattn_param *const *params,
                           int n, optimizer *out) {
    *out = (optimizer){NULL, NULL};
    if (rule == SGD) {
        const fattn_sgd_options o = {.struct_size = sizeof o,
                                     .momentum = 0.9f,
                                     .weight_decay = 0.1f,
                                     .nesterov = 1,
                                     .max_grad_norm = clip,
                                     .loss_scale = scale};
        return fattn_sgd_create(ctx, &o, params, n, &out->sgd);
    }
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    o.max_grad_norm = clip;
    o.loss_scale = scale;
    return fattn_adamw_create(ctx, &o, params, n, &out->adamw);
}
static void destroy(const optimizer *o) {
    fattn_adamw_destroy(o->adamw);
    fattn_sgd_destroy(o->sgd);
}
static fattn_status step(const optimizer *o) { return o->sgd ? fattn_sgd_step(o->sgd) : fattn_adamw_step(o->adamw); }
static double norm_of(const optimizer *o) {
    double norm;
    MUST(o->sgd ? fattn_sgd_grad_norm(o->sgd, &norm) : fattn_adamw_grad_norm(o->adamw, &norm));
    return norm;
}
static fattn_tensor scale_of(const optimizer *o) {
    fattn_tensor scale;
    MUST(o->sgd ? fattn_sgd_loss_scale(o->sgd, &scale) : fattn_adamw_loss_scale(o->adamw, &scale));
    cr_assert(scale.ndim == 0 && scale.dtype == FATTN_F32 && scale.device == FATTN_CPU);
    return scale;
}
static fattn_status get_state(const optimizer *o, fattn_loss_scale_state *s) {
    return o->sgd ? fattn_sgd_get_loss_scale(o->sgd, s) : fattn_adamw_get_loss_scale(o->adamw, s);
}
static fattn_status set_state(const optimizer *o, const fattn_loss_scale_state *s) {
    return o->sgd ? fattn_sgd_set_loss_scale(o->sgd, s) : fattn_adamw_set_loss_scale(o->adamw, s);
}
static fattn_loss_scale_state state_of(const optimizer *o) {
    fattn_loss_scale_state s = {.struct_size = sizeof s};
    MUST(get_state(o, &s));
    return s;
}
static fattn_loss_scale_options defaults(void) {
    fattn_loss_scale_options o = {.struct_size = sizeof o};
    fattn_loss_scale_defaults(&o);
    return o;
}
static fattn_loss_scale_options fixed(float scale) {
    return (fattn_loss_scale_options){
        .struct_size = sizeof(fattn_loss_scale_options), .initial = scale, .minimum = scale, .maximum = scale};
}

/* ---- parameters ---- */

/* Lengths around the chunks (16384) and blocks (256) of the implementation. */
enum { PARAMS = 5, FROZEN = 3 };
static const int64_t lengths[PARAMS] = {1, 16385, 0, 7, 257};

typedef struct model {
    fattn_param p[PARAMS];
    fattn_param *list[PARAMS];
} model;

static void model_new(model *m, fattn_dtype dtype, fattn_dtype grad_dtype) {
    for (uint32_t i = 0; i < PARAMS; ++i) {
        fattn_param *const p = m->list[i] = &m->p[i];
        *p = (fattn_param){.name = "p", .flags = i == FROZEN ? FATTN_PARAM_FROZEN : i == 0 ? FATTN_PARAM_NO_DECAY : 0};
        MUST(fattn_tensor_alloc(ctx, dtype, 1, &lengths[i], &p->value));
        MUST(fattn_tensor_alloc(ctx, grad_dtype, 1, &lengths[i], &p->grad));
        MUST(fattn_tensor_normal(ctx, &p->value, 0, 1, (fattn_rng){.seed = 5, .stream = i}));
        MUST(fattn_tensor_normal(ctx, &p->grad, 0, 0, (fattn_rng){0}));
    }
}
static void model_free(model *m) {
    for (int i = 0; i < PARAMS; ++i) {
        fattn_tensor_free(ctx, &m->p[i].value);
        fattn_tensor_free(ctx, &m->p[i].grad);
    }
}
static double get(const fattn_tensor *t, int64_t i) { return fattni_load(t->data, t->dtype, i); }

/* Normal numbers, the same for every dtype but for their rounding to F16, times scale, a power of two. */
static void set_gradients(model *m, int64_t t, double scale) {
    for (uint32_t i = 0; i < PARAMS; ++i) {
        const fattn_tensor *const g = &m->p[i].grad;
        MUST(fattn_tensor_normal(ctx, g, 0, 0.1, (fattn_rng){.seed = 100 + (uint64_t)t, .stream = i}));
        for (int64_t e = 0; e < lengths[i]; ++e) {
            double cell;
            fattni_store(&cell, FATTN_F16, 0, get(g, e));
            const double x = fattni_load(&cell, FATTN_F16, 0);
            fattni_store(g->data, g->dtype, e, (fabs(x) < 0x1p-9 ? 0x1p-9 : x) * scale);
        }
    }
}
static bool same_bits(const fattn_tensor *a, const fattn_tensor *b) {
    const size_t bytes = (size_t)fattn_tensor_numel(a) * fattn_dtype_size((fattn_dtype)a->dtype);
    return a->dtype == b->dtype && (!bytes || memcmp(a->data, b->data, bytes) == 0);
}

/* The tensor `which` (1..) of params[i]; false: there is none. */
static bool moment(const optimizer *o, int i, int which, fattn_tensor *view) {
    if (i == FROZEN) return false;
    const fattn_status s =
        o->sgd ? which > FATTN_SGD_MASTER ? FATTN_E_STATE : fattn_sgd_state(o->sgd, i, (fattn_sgd_tensor)which, view)
               : fattn_adamw_state(o->adamw, i, (fattn_adam_state)which, view);
    return s == FATTN_OK;
}
/* Values, masters, moments and AdamW's step count. */
static bool same_state(const model *a, const optimizer *x, const model *b, const optimizer *y) {
    bool same = true;
    for (int i = 0; i < PARAMS; ++i) {
        same = same && same_bits(&a->p[i].value, &b->p[i].value);
        for (int which = 1; which <= 3; ++which) {
            fattn_tensor u, v;
            const bool here = moment(x, i, which, &u), there = moment(y, i, which, &v);
            same = same && here == there && (!here || same_bits(&u, &v));
        }
    }
    int64_t s = 0, t = 0;
    if (x->adamw) MUST(fattn_adamw_get_step(x->adamw, &s));
    if (y->adamw) MUST(fattn_adamw_get_step(y->adamw, &t));
    return same && s == t;
}

/* ---- the rule ---- */

/* As PyTorch documents its GradScaler, with bounds. */
typedef struct scaler {
    double scale;
    int64_t finite, skipped;
} scaler;
static void scaler_update(scaler *s, const fattn_loss_scale_options *o, bool finite) {
    if (!finite) {
        s->scale = fmax(s->scale * 0.5, (double)o->minimum);
        s->finite = 0;
        s->skipped += 1;
    } else if (++s->finite == o->interval) {
        s->scale = fmin(s->scale * 2, (double)o->maximum);
        s->finite = 0;
    }
}

Test(loss_scale, follows_the_dynamic_rule) {
    enum { STEPS = 200 };
    const fattn_loss_scale_options o = {
        .struct_size = sizeof o, .initial = 32, .minimum = 3, .maximum = 200, .interval = 3};
    for (int rule = 0; rule < RULES; ++rule) {
        const int64_t one = 1;
        fattn_param p = {.name = "p"}, *list[] = {&p};
        optimizer a;
        scaler want = {.scale = (double)o.initial};
        int least = 0, most = 0;
        MUST(fattn_tensor_alloc(ctx, FATTN_F16, 1, &one, &p.value));
        MUST(fattn_tensor_alloc(ctx, FATTN_F16, 1, &one, &p.grad));
        MUST(fattn_tensor_normal(ctx, &p.value, 1, 0, (fattn_rng){0}));
        MUST(create(rule, &o, 0, list, 1, &a));
        const fattn_tensor scale = scale_of(&a);
        for (int t = 0; t < STEPS; ++t) {
            /* Runs of both kinds, of 1 to 40 steps. */
            const bool finite = t < 80 ? t % 40 < 25 : t * 7 % 5 != 0;
            fattni_store(p.grad.data, FATTN_F16, 0, finite ? 0.25 : t % 2 ? (double)INFINITY : (double)NAN);
            MUST(step(&a));
            scaler_update(&want, &o, finite);
            const fattn_loss_scale_state got = state_of(&a);
            cr_assert_eq((double)got.scale, want.scale, "step %d: %g, not %g", t, (double)got.scale, want.scale);
            cr_assert(got.finite_steps == want.finite && got.skipped_steps == want.skipped && got.interval == 3);
            cr_assert_eq(get(&scale, 0), want.scale, "the tensor is the scale");
            least += got.scale == o.minimum, most += got.scale == o.maximum;
        }
        cr_assert(least > 0 && most > 0, "both bounds are reached: %d, %d", least, most);
        destroy(&a);
        fattn_tensor_free(ctx, &p.value);
        fattn_tensor_free(ctx, &p.grad);
    }
}

Test(loss_scale, defaults_are_the_documented_ones) {
    fattn_loss_scale_options o = defaults();
    cr_assert(o.initial == 65536 && o.minimum == 1 && o.maximum == 0x1p24f && o.interval == 2000);
    o = (fattn_loss_scale_options){.struct_size = offsetof(fattn_loss_scale_options, minimum), .minimum = 7};
    fattn_loss_scale_defaults(&o);
    cr_assert(o.initial == 65536 && o.minimum == 7 && o.interval == 0, "no more than the caller knows");
    fattn_loss_scale_defaults(NULL);
    for (int rule = 0; rule < RULES; ++rule) { /* from the start: double after exactly 2000 steps */
        optimizer a;
        o = defaults();
        MUST(create(rule, &o, 0, NULL, 0, &a));
        scale_of(&a);
        for (int t = 0; t < 1999; ++t) MUST(step(&a));
        cr_assert(state_of(&a).scale == 0x1p16f && state_of(&a).finite_steps == 1999);
        MUST(step(&a));
        cr_assert(state_of(&a).scale == 0x1p17f && state_of(&a).finite_steps == 0);
        destroy(&a);
    }
}

/* ---- steps ---- */

static const struct {
    fattn_dtype value, grad;
} types[] = {{FATTN_F64, FATTN_F64},   {FATTN_F64, FATTN_F32}, {FATTN_F32, FATTN_F32}, {FATTN_BF16, FATTN_F32},
             {FATTN_BF16, FATTN_BF16}, {FATTN_F16, FATTN_F32}, {FATTN_F16, FATTN_F16}};
enum { TYPES = sizeof types / sizeof *types };

/* A gradient that overflows anywhere: nothing changes but the gradients, which become 0, and the scale. The steps after
   it are those of a run without it, since nothing else is remembered. */
Test(loss_scale, an_overflow_skips_exactly) {
    const fattn_loss_scale_options o = {
        .struct_size = sizeof o, .initial = 16, .minimum = 1, .maximum = 64, .interval = 100};
    static const struct {
        int param;
        int64_t at;
    } where[] = {{0, 0}, {1, 16384}, {4, 256}};
    for (int n = 0; n < RULES * TYPES * 3; ++n) {
        const int rule = n % RULES, type = n / RULES % TYPES, place = n / RULES / TYPES;
        model struck, calm;
        optimizer a, b;
        model_new(&struck, types[type].value, types[type].grad);
        model_new(&calm, types[type].value, types[type].grad);
        MUST(create(rule, &o, 1, struck.list, PARAMS, &a));
        MUST(create(rule, &o, 1, calm.list, PARAMS, &b));
        scale_of(&a), scale_of(&b);
        set_gradients(&struck, 0, 16), set_gradients(&calm, 0, 16);
        MUST(step(&a));
        MUST(step(&b));
        cr_assert(same_state(&struck, &a, &calm, &b));
        set_gradients(&struck, 1, 16);
        const fattn_tensor *const g = &struck.p[where[place].param].grad;
        fattni_store(g->data, g->dtype, where[place].at, n % 2 ? (double)NAN : -(double)INFINITY);
        MUST(step(&a));
        cr_assert(!isfinite(norm_of(&a)));
        cr_assert(same_state(&struck, &a, &calm, &b), "%s, rule %d", fattn_dtype_name(types[type].value), rule);
        cr_assert(state_of(&a).scale == 8 && state_of(&a).skipped_steps == 1 && state_of(&a).finite_steps == 0);
        for (int i = 0; i < PARAMS; ++i)
            for (int64_t e = 0; e < lengths[i] && i != FROZEN; ++e) cr_assert_eq(get(&struck.p[i].grad, e), 0);
        set_gradients(&struck, 2, 8), set_gradients(&calm, 2, 16);
        MUST(step(&a));
        MUST(step(&b));
        cr_assert(same_state(&struck, &a, &calm, &b), "the scale alone differs");
        cr_assert_eq(norm_of(&a), norm_of(&b));
        destroy(&a), destroy(&b);
        model_free(&struck), model_free(&calm);
    }
}

/* Multiplying by a power of two changes no bit where nothing leaves the range, so steps with such a scale are those
   without one: values, moments and norms, with and without clipping, while the scale doubles. Nothing is allocated. */
Test(loss_scale, powers_of_two_change_no_bit) {
    const fattn_loss_scale_options growing = {
        .struct_size = sizeof growing, .initial = 0x1p-3f, .minimum = 0x1p-3f, .maximum = 8, .interval = 2};
    for (int n = 0; n < RULES * TYPES * 2; ++n) {
        const int rule = n % RULES, type = n / RULES % TYPES;
        const float clip = n / RULES / TYPES ? 2.5f : 0; /* the norm is about 13 */
        model with, without;
        optimizer a, b;
        model_new(&with, types[type].value, types[type].grad);
        model_new(&without, types[type].value, types[type].grad);
        MUST(create(rule, &growing, clip, with.list, PARAMS, &a));
        MUST(create(rule, NULL, clip, without.list, PARAMS, &b));
        const fattn_tensor scale = scale_of(&a);
        const size_t allocs = fattn_ctx_mem(ctx).allocs;
        for (int64_t t = 0; t < 14; ++t) {
            cr_assert_eq(get(&scale, 0), fmin(ldexp(1, (int)(t / 2) - 3), 8));
            set_gradients(&with, t, get(&scale, 0));
            set_gradients(&without, t, 1);
            MUST(step(&a));
            MUST(step(&b));
            cr_assert(norm_of(&a) == norm_of(&b) && norm_of(&a) > 5, "%g, not %g", norm_of(&a), norm_of(&b));
            cr_assert(same_state(&with, &a, &without, &b), "%s, rule %d, step %d", fattn_dtype_name(types[type].value),
                      rule, (int)t);
        }
        cr_assert_eq(fattn_ctx_mem(ctx).allocs, allocs);
        cr_assert(state_of(&b).scale == 1 && state_of(&b).interval == 0 && state_of(&b).skipped_steps == 0);
        destroy(&a), destroy(&b);
        model_free(&with), model_free(&without);
    }
}

/* Scales at the ends of their range, and one that is no power of two: an F32 gradient is rounded once when it is
   multiplied, once with the factor, which is rounded, too: each 2^-24, of a step of lr g. */
Test(loss_scale, any_scale_of_the_range) {
    static const float scales[] = {0x1p-126f, 0x1p126f, 1000};
    for (int n = 0; n < 3; ++n) {
        const fattn_loss_scale_options o = fixed(scales[n]);
        const int64_t three = 3;
        fattn_param p = {.name = "p"}, *list[] = {&p};
        fattn_sgd *s;
        fattn_tensor scale;
        const fattn_sgd_options plain = {.struct_size = sizeof plain, .loss_scale = &o};
        MUST(fattn_tensor_alloc(ctx, FATTN_F32, 1, &three, &p.value));
        MUST(fattn_tensor_alloc(ctx, FATTN_F32, 1, &three, &p.grad));
        MUST(fattn_tensor_normal(ctx, &p.value, 0, 0, (fattn_rng){0}));
        MUST(fattn_sgd_create(ctx, &plain, list, 1, &s));
        MUST(fattn_sgd_loss_scale(s, &scale));
        MUST(fattn_sgd_set_lr(s, 1));
        const float g[] = {1, -1.7f, 1.9f};
        for (int e = 0; e < 3; ++e) ((float *)p.grad.data)[e] = g[e] * scales[n];
        MUST(fattn_sgd_step(s));
        const double unit = n < 2 ? 0 : 0x1.01p-23;
        for (int e = 0; e < 3; ++e)
            cr_assert_float_eq(get(&p.value, e), -(double)g[e], unit * fabs((double)g[e]), "%g: %g", (double)scales[n],
                               get(&p.value, e));
        fattn_sgd_destroy(s);
        fattn_tensor_free(ctx, &p.value);
        fattn_tensor_free(ctx, &p.grad);
    }
}

/* AdamW bounds what its moments see by 1e19 (F64: 1e154), after the scale has been divided out: v stays finite, and a
   first step is lr. */
Test(loss_scale, huge_gradients_stay_bounded) {
    const fattn_loss_scale_options o = fixed(1024);
    for (int wide = 0; wide < 2; ++wide) {
        const fattn_dtype dtype = wide ? FATTN_F64 : FATTN_F32;
        const int64_t two = 2;
        const double huge = wide ? 1e156 : 1e21; /* 100 times the bound */
        fattn_param p = {.name = "p"}, *list[] = {&p};
        fattn_tensor v, scale;
        fattn_adamw *a;
        fattn_adamw_options options = {.struct_size = sizeof options};
        fattn_adamw_defaults(&options);
        options.loss_scale = &o;
        MUST(fattn_tensor_alloc(ctx, dtype, 1, &two, &p.value));
        MUST(fattn_tensor_alloc(ctx, dtype, 1, &two, &p.grad));
        MUST(fattn_tensor_normal(ctx, &p.value, 0, 0, (fattn_rng){0}));
        MUST(fattn_adamw_create(ctx, &options, list, 1, &a));
        MUST(fattn_adamw_loss_scale(a, &scale));
        MUST(fattn_adamw_set_lr(a, 0.125f));
        for (int e = 0; e < 2; ++e) fattni_store(p.grad.data, dtype, e, (e ? -huge : huge) * 1024);
        MUST(fattn_adamw_step(a));
        MUST(fattn_adamw_state(a, 0, FATTN_ADAM_V, &v));
        for (int e = 0; e < 2; ++e) {
            cr_assert_float_eq(get(&v, e) / (wide ? 1e305 : 1e35), 1, 1e-4, "v is %g", get(&v, e));
            cr_assert_float_eq(get(&p.value, e), e ? 0.125 : -0.125, 1e-6);
        }
        fattn_adamw_destroy(a);
        fattn_tensor_free(ctx, &p.value);
        fattn_tensor_free(ctx, &p.grad);
    }
}

/* ---- backward from a seed ---- */

enum { N = 6 };

static fattn_param param(fattn_dtype dtype, fattn_dtype grad, uint32_t stream) {
    const int64_t n = N;
    fattn_param p = {.name = "w"};
    MUST(fattn_tensor_alloc(ctx, dtype, 1, &n, &p.value));
    MUST(fattn_tensor_alloc(ctx, grad, 1, &n, &p.grad));
    MUST(fattn_tensor_normal(ctx, &p.value, 0, 1, (fattn_rng){.seed = 8, .stream = stream}));
    MUST(fattn_tensor_normal(ctx, &p.grad, 0, 0, (fattn_rng){0}));
    return p;
}
static void param_free(fattn_param *p) {
    fattn_tensor_free(ctx, &p->value);
    fattn_tensor_free(ctx, &p->grad);
}
/* sum of gelu(w)^2 */
static fattn_var graph(fattn_tape *t, fattn_param *w) {
    fattn_tape_reset(t);
    const fattn_var h = fattn_op_gelu(t, fattn_use(t, w));
    return fattn_op_sum(t, fattn_op_mul(t, h, h), NULL, 0, 0);
}

Test(loss_scale, backward_begins_with_the_seed) {
    static const fattn_dtype seeds[] = {FATTN_F64, FATTN_F32, FATTN_F16, FATTN_BF16};
    MUST(fattn_tape_create(ctx, &tape));
    for (int n = 0; n < 2 * 4; ++n) {
        const fattn_dtype dtype = n % 2 ? FATTN_F32 : FATTN_F64;
        fattn_param w = param(dtype, dtype, 0), one = param(dtype, dtype, 0);
        double cell = 0;
        fattni_store(&cell, (int32_t)seeds[n / 2], 0, 128);
        const fattn_tensor seed =
            fattn_tensor_view(&cell, seeds[n / 2], FATTN_CPU, 0, 2, (const int64_t[]){1, 1}); /* of any shape */
        MUST(fattn_tape_backward(tape, graph(tape, &one)));
        for (int k = 0; k < 2; ++k) MUST(fattn_tape_backward_from(tape, graph(tape, &w), &seed));
        for (int e = 0; e < N; ++e) cr_assert_eq(get(&w.grad, e), 256 * get(&one.grad, e), "added twice");
        param_free(&w), param_free(&one);
    }
    /* A parameter that is itself the scalar, and a seed that its dtype cannot hold. */
    const float large = 65536;
    const fattn_tensor seed = fattn_tensor_view((void *)(uintptr_t)&large, FATTN_F32, FATTN_CPU, 0, 0, NULL);
    fattn_param w = param(FATTN_F16, FATTN_F32, 1);
    fattn_param first = {
        .name = "first", .value = fattn_tensor_slice(&w.value, 0, 0, 1), .grad = fattn_tensor_slice(&w.grad, 0, 0, 1)};
    fattn_tape_reset(tape);
    MUST(fattn_tape_backward_from(tape, fattn_use(tape, &first), &seed));
    cr_assert_eq(get(&w.grad, 0), 65536, "an F32 gradient holds it");
    MUST(fattn_tape_backward_from(tape, graph(tape, &w), &seed));
    cr_assert_not(isfinite(get(&w.grad, 0)), "that of an F16 loss does not");
    param_free(&w);
    fattn_tape_destroy(tape);
}

/* The scale of the moment when the pass runs, for all passes until the step. */
Test(loss_scale, accumulated_gradients_have_one_scale) {
    const fattn_loss_scale_options o = {
        .struct_size = sizeof o, .initial = 4, .minimum = 1, .maximum = 64, .interval = 1};
    MUST(fattn_tape_create(ctx, &tape));
    for (int rule = 0; rule < RULES; ++rule) {
        fattn_param w = param(FATTN_F32, FATTN_F32, 0), x = param(FATTN_F32, FATTN_F32, 0), unused[2];
        unused[0] = unused[1] = param(FATTN_F32, FATTN_F32, 3); /* in no graph: its gradient stays 0 */
        optimizer a, b;
        MUST(create(rule, &o, 0, (fattn_param *[]){&w, &unused[0]}, 2, &a));
        MUST(create(rule, NULL, 0, (fattn_param *[]){&x}, 1, &b));
        const fattn_tensor scale = scale_of(&a);
        for (int t = 0; t < 6; ++t) {
            cr_assert_eq(get(&scale, 0), fmin(4 << t, 64));
            for (int k = 0; k < 3; ++k) {
                MUST(fattn_tape_backward_from(tape, graph(tape, &w), &scale));
                MUST(fattn_tape_backward(tape, graph(tape, &x)));
            }
            MUST(step(&a));
            MUST(step(&b));
            cr_assert_eq(norm_of(&a), norm_of(&b));
            cr_assert(same_bits(&w.value, &x.value), "step %d", t);
        }
        destroy(&a), destroy(&b);
        param_free(&w), param_free(&x), param_free(&unused[0]);
    }
    fattn_tape_destroy(tape);
}

/* loss = sum of 2^-30 w x: the gradient of w x is 2^-30, which F16 rounds to 0. With the scale 2^15 the gradients of w
   are those of F32, and so is the step. */
Test(loss_scale, gradients_below_f16_survive) {
    const fattn_loss_scale_options o = fixed(0x1p15f);
    const double tiny = 0x1p-15;
    enum { SCALED, PLAIN, WIDE, KINDS };
    float before[N], after[KINDS][N];
    MUST(fattn_tape_create(ctx, &tape));
    for (int n = 0; n < KINDS; ++n) {
        const fattn_dtype dtype = n == WIDE ? FATTN_F32 : FATTN_F16;
        const fattn_sgd_options options = {.struct_size = sizeof options, .loss_scale = n == SCALED ? &o : NULL};
        fattn_param w = param(dtype, FATTN_F32, 0), x = param(dtype, FATTN_F32, 0);
        fattn_sgd *s;
        fattn_tensor scale, result = w.value;
        for (int e = 0; e < N; ++e) {
            before[e] = (float)(e + 1) / 4;
            fattni_store(w.value.data, dtype, e, (double)before[e]);
            fattni_store(x.value.data, dtype, e, e + 1);
        }
        MUST(fattn_sgd_create(ctx, &options, (fattn_param *[]){&w}, 1, &s));
        MUST(fattn_sgd_loss_scale(s, &scale));
        MUST(fattn_sgd_set_lr(s, 0x1p20f));
        fattn_tape_reset(tape);
        const fattn_var y = fattn_op_mul(tape, fattn_use(tape, &w), fattn_input(tape, &x.value));
        const fattn_var z = fattn_op_scale(tape, fattn_op_scale(tape, y, tiny), tiny);
        MUST(fattn_tape_backward_from(tape, fattn_op_sum(tape, fattn_op_cast(tape, z, FATTN_F32), NULL, 0, 0), &scale));
        for (int e = 0; e < N; ++e)
            cr_assert_eq(get(&w.grad, e), n == PLAIN ? 0 : (e + 1) * tiny * tiny * get(&scale, 0), "%d [%d]: %g", n, e,
                         get(&w.grad, e));
        MUST(fattn_sgd_step(s));
        if (n != WIDE) MUST(fattn_sgd_state(s, 0, FATTN_SGD_MASTER, &result));
        memcpy(after[n], result.data, sizeof after[n]);
        fattn_sgd_destroy(s);
        param_free(&w);
        param_free(&x);
    }
    for (int e = 0; e < N; ++e) {
        cr_assert_eq(after[PLAIN][e], before[e]);
        cr_assert(after[SCALED][e] == after[WIDE][e] && after[WIDE][e] != before[e], "%g", (double)after[WIDE][e]);
    }
    fattn_tape_destroy(tape);
}

/* ---- contracts ---- */

static void rejected(fattn_loss_scale_options o, fattn_status want, const char *words) {
    for (int rule = 0; rule < RULES; ++rule) {
        optimizer a;
        cr_assert_eq(create(rule, &o, 0, NULL, 0, &a), want, "%s", fattn_ctx_error(ctx));
        cr_assert(!a.adamw && !a.sgd);
        cr_assert(strstr(fattn_ctx_error(ctx), words), "\"%s\" lacks \"%s\"", fattn_ctx_error(ctx), words);
    }
}

Test(loss_scale, bad_options_are_rejected) {
    const fattn_loss_scale_options good = defaults();
    fattn_loss_scale_options o;
    o = good, o.struct_size = 0, rejected(o, FATTN_E_ABI, "fattn_loss_scale_options: struct_size is 0");
    o = good, o.initial = 0, rejected(o, FATTN_E_ARG, "initial 0 in minimum 1 to maximum 1.67772e+07");
    o = good, o.initial = NAN, rejected(o, FATTN_E_ARG, "initial nan");
    o = good, o.initial = 0x1p25f, rejected(o, FATTN_E_ARG, "initial 3.35544e+07");
    o = good, o.minimum = 0, rejected(o, FATTN_E_ARG, "minimum 0");
    o = good, o.minimum = -1, rejected(o, FATTN_E_ARG, "minimum -1");
    o = good, o.minimum = 0x1p-127f, rejected(o, FATTN_E_ARG, "minimum 5.87747e-39");
    o = good, o.minimum = NAN, rejected(o, FATTN_E_ARG, "minimum nan");
    o = good, o.maximum = INFINITY, rejected(o, FATTN_E_ARG, "maximum inf");
    o = good, o.maximum = 0x1p127f, rejected(o, FATTN_E_ARG, "maximum 1.70141e+38");
    o = good, o.interval = -5, rejected(o, FATTN_E_ARG, "interval -5");
}

static void state_rejected(const optimizer *a, fattn_loss_scale_state s, fattn_status want, const char *words) {
    const fattn_loss_scale_state before = state_of(a);
    cr_assert_eq(set_state(a, &s), want, "%s", words);
    cr_assert(strstr(fattn_ctx_error(ctx), words), "\"%s\" lacks \"%s\"", fattn_ctx_error(ctx), words);
    const fattn_loss_scale_state after = state_of(a);
    cr_assert(memcmp(&before, &after, sizeof after) == 0);
}

Test(loss_scale, states_are_checked) {
    const fattn_loss_scale_options o = {
        .struct_size = sizeof o, .initial = 16, .minimum = 2, .maximum = 64, .interval = 10};
    for (int rule = 0; rule < RULES; ++rule) {
        optimizer a, b;
        MUST(create(rule, &o, 0, NULL, 0, &a));
        MUST(create(rule, NULL, 0, NULL, 0, &b));
        fattn_loss_scale_state s = state_of(&a);
        cr_assert(s.scale == 16 && s.finite_steps == 0 && s.skipped_steps == 0 && s.interval == 10);
        s.scale = 48, s.finite_steps = 9, s.skipped_steps = INT64_C(1) << 53, s.interval = 77;
        MUST(set_state(&a, &s));
        fattn_loss_scale_state now = state_of(&a);
        cr_assert(now.scale == 48 && now.finite_steps == 9 && now.skipped_steps == INT64_C(1) << 53);
        cr_assert_eq(now.interval, 10, "the options'");
        now.scale = 1, state_rejected(&a, now, FATTN_E_ARG, "scale 1 in 2 to 64");
        now.scale = 65, state_rejected(&a, now, FATTN_E_ARG, "scale 65 in");
        now.scale = NAN, state_rejected(&a, now, FATTN_E_ARG, "scale nan");
        now = s, now.finite_steps = 10, state_rejected(&a, now, FATTN_E_ARG, "finite_steps 10 in 0..9");
        now = s, now.finite_steps = -1, state_rejected(&a, now, FATTN_E_ARG, "finite_steps -1");
        now = s, now.skipped_steps = -2, state_rejected(&a, now, FATTN_E_ARG, "skipped_steps -2");
        now = s, now.skipped_steps += 1, state_rejected(&a, now, FATTN_E_ARG, "skipped_steps 9007199254740993");
        now = s, now.struct_size = 4, state_rejected(&a, now, FATTN_E_ABI, "struct_size is 4");
        now = s, now.struct_size = 8;
        cr_assert_eq(get_state(&a, &now), FATTN_E_ABI);
        cr_assert(strstr(fattn_ctx_error(ctx), "struct_size is 8, not 32"), "%s", fattn_ctx_error(ctx));
        state_rejected(&b, s, FATTN_E_ARG, "scale 48 in 1 to 1"); /* without loss scaling it is 1 */
        cr_assert_eq(get_state(&a, NULL), FATTN_E_ARG);
        cr_assert_eq(set_state(&a, NULL), FATTN_E_ARG);
        cr_assert_eq(rule == SGD ? fattn_sgd_loss_scale(a.sgd, NULL) : fattn_adamw_loss_scale(a.adamw, NULL),
                     FATTN_E_ARG);
        destroy(&a), destroy(&b);
    }
    fattn_loss_scale_state s = {.struct_size = sizeof s};
    fattn_tensor view;
    cr_assert_eq(fattn_adamw_get_loss_scale(NULL, &s), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_set_loss_scale(NULL, &s), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_loss_scale(NULL, &view), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_get_loss_scale(NULL, &s), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_set_loss_scale(NULL, &s), FATTN_E_ARG);
    cr_assert_eq(fattn_sgd_loss_scale(NULL, &view), FATTN_E_ARG);
}

/* A scale that no backward pass can have is an error message, not 65536 times smaller steps; an optimizer without one
   does not ask. */
Test(loss_scale, a_scale_that_nobody_asked_for) {
    static const char *const words[] = {"adamw_step", "sgd_step"};
    const fattn_loss_scale_options o = defaults();
    for (int rule = 0; rule < RULES; ++rule) {
        model m, untouched;
        optimizer a, b;
        model_new(&m, FATTN_F16, FATTN_F32);
        model_new(&untouched, FATTN_F16, FATTN_F32);
        MUST(create(rule, &o, 0, m.list, PARAMS, &a));
        MUST(create(rule, NULL, 0, untouched.list, PARAMS, &b));
        set_gradients(&m, 0, 1);
        state_of(&a); /* reading the number does not put it into a backward pass */
        cr_assert_eq(step(&a), FATTN_E_STATE);
        cr_assert(strstr(fattn_ctx_error(ctx), words[rule]) && strstr(fattn_ctx_error(ctx), "_loss_scale, whose"), "%s",
                  fattn_ctx_error(ctx));
        cr_assert(same_state(&m, &a, &untouched, &b) && get(&m.p[0].grad, 0) != 0, "nothing has changed");
        MUST(step(&b));
        scale_of(&a);
        MUST(step(&a));
        destroy(&a), destroy(&b);
        model_free(&m), model_free(&untouched);
    }
}

Test(loss_scale, bad_seeds_are_rejected) {
    float two[2] = {1, 2};
    int32_t one = 1;
    const int64_t pair[] = {2};
    const struct {
        fattn_tensor seed;
        fattn_status want;
        const char *words;
    } bad[] = {{fattn_tensor_view(two, FATTN_F32, FATTN_CPU, 0, 1, pair), FATTN_E_SHAPE, "the seed is [2]"},
               {fattn_tensor_view(&one, FATTN_I32, FATTN_CPU, 0, 0, NULL), FATTN_E_DTYPE, "the seed is i32"},
               {fattn_tensor_view(two, FATTN_F32, FATTN_CUDA, 0, 0, NULL), FATTN_E_DEVICE, "the seed"},
               {fattn_tensor_view(NULL, FATTN_F32, FATTN_CPU, 0, 0, NULL), FATTN_E_ARG, "the seed"}};
    fattn_param w = param(FATTN_F32, FATTN_F32, 0);
    MUST(fattn_tape_create(ctx, &tape));
    for (int n = 0; n < 5; ++n) {
        const fattn_var y = graph(tape, &w);
        cr_assert_eq(fattn_tape_backward_from(tape, y, n < 4 ? &bad[n].seed : NULL), n < 4 ? bad[n].want : FATTN_E_ARG,
                     "%d: %s", n, fattn_ctx_error(ctx));
        cr_assert(strstr(fattn_ctx_error(ctx), n < 4 ? bad[n].words : "seed is NULL"), "%s", fattn_ctx_error(ctx));
        for (int e = 0; e < N; ++e) cr_assert_eq(get(&w.grad, e), 0);
    }
    const fattn_tensor good = fattn_tensor_view(two, FATTN_F32, FATTN_CPU, 0, 0, NULL);
    cr_assert_eq(fattn_tape_backward_from(NULL, (fattn_var){1}, &good), FATTN_E_ARG);
    MUST(fattn_tape_backward_from(tape, graph(tape, &w), &good));
    fattn_tape_destroy(tape);
    param_free(&w);
}
