/* AdamW against the published rule implemented for one number; clipping, decay, frozen parameters, masters,
   resuming, threads. */
#include "suite.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "core/tensor/numeric.h"

static void set_up(void) { open_context(2); }
TestSuite(adamw, .init = set_up, .fini = close_context);

/* Lengths around the chunks (16384) and blocks (256) of the implementation. */
enum { PARAMS = 6 };
static const int64_t lengths[PARAMS] = {1, 16384, 0, 40001, 255, 700};

typedef struct model {
    fattn_param p[PARAMS];
    fattn_param *list[PARAMS];
} model;

static void model_new(model *m, fattn_ctx *c, fattn_dtype dtype, fattn_dtype grad_dtype) {
    for (uint32_t i = 0; i < PARAMS; ++i) {
        fattn_param *p = &m->p[i];
        *p = (fattn_param){.name = "p"};
        m->list[i] = p;
        cr_assert_eq(fattn_tensor_alloc(c, dtype, 1, &lengths[i], &p->value), FATTN_OK);
        cr_assert_eq(fattn_tensor_alloc(c, grad_dtype, 1, &lengths[i], &p->grad), FATTN_OK);
        cr_assert_eq(fattn_tensor_normal(c, &p->value, 0, 1, (fattn_rng){.seed = 5, .stream = i}), FATTN_OK);
    }
    m->p[1].flags = FATTN_PARAM_NO_DECAY;
    m->p[4].flags = FATTN_PARAM_FROZEN;
}
static void model_free(model *m, fattn_ctx *c) {
    for (int i = 0; i < PARAMS; ++i) {
        fattn_tensor_free(c, &m->p[i].value);
        fattn_tensor_free(c, &m->p[i].grad);
    }
}
static void set_gradients(model *m, fattn_ctx *c, int64_t step) {
    for (uint32_t i = 0; i < PARAMS; ++i)
        cr_assert_eq(fattn_tensor_normal(c, &m->p[i].grad, 0, 0.1 * (double)(i + 1),
                                         (fattn_rng){.seed = 100 + (uint64_t)step, .stream = i}),
                     FATTN_OK);
}
static double get(const fattn_tensor *t, int64_t i) { return fattni_load(t->data, t->dtype, i); }

/* One number through Algorithm 2 of Loshchilov and Hutter, in double. */
typedef struct number {
    double p, m, v;
} number;
static void reference(number *x, double g, const fattn_adamw_options *o, double lr, int64_t t, bool decay) {
    const double b1 = (double)o->beta1, b2 = (double)o->beta2;
    if (decay) x->p -= lr * (double)o->weight_decay * x->p;
    x->m = b1 * x->m + (1 - b1) * g;
    x->v = b2 * x->v + (1 - b2) * g * g;
    const double m_hat = x->m / (1 - pow(b1, (double)t)), v_hat = x->v / (1 - pow(b2, (double)t));
    x->p -= lr * m_hat / (sqrt(v_hat) + (double)o->eps);
}

/* Every element of every param over several steps with a changing rate. limit 0: no clipping. */
static void against_reference(fattn_dtype dtype, fattn_dtype grad_dtype, float limit, double rtol) {
    enum { STEPS = 6 };
    model m;
    model_new(&m, ctx, dtype, grad_dtype);
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    o.weight_decay = 0.1f;
    o.max_grad_norm = limit;
    fattn_adamw *a;
    cr_assert_eq(fattn_adamw_create(ctx, &o, m.list, PARAMS, &a), FATTN_OK);
    number *want[PARAMS];
    for (int i = 0; i < PARAMS; ++i) {
        want[i] = calloc((size_t)lengths[i] + 1, sizeof *want[i]);
        for (int64_t e = 0; e < lengths[i]; ++e) want[i][e].p = get(&m.p[i].value, e);
    }
    for (int64_t t = 1; t <= STEPS; ++t) {
        const float lr = 0.01f / (float)t;
        double squares = 0, norm;
        fattn_tensor view;
        set_gradients(&m, ctx, t);
        for (int i = 0; i < PARAMS; ++i)
            for (int64_t e = 0; e < lengths[i] && i != 4; ++e) squares += get(&m.p[i].grad, e) * get(&m.p[i].grad, e);
        const double factor = limit > 0 && sqrt(squares) > (double)limit ? (double)limit / sqrt(squares) : 1;
        cr_assert(limit > 0 ? factor < 0.5 : factor == 1, "the test is to clip");
        for (int i = 0; i < PARAMS; ++i)
            for (int64_t e = 0; e < lengths[i] && i != 4; ++e)
                reference(&want[i][e], factor * get(&m.p[i].grad, e), &o, (double)lr, t, i != 1);
        const double before = get(&m.p[3].value, 40000);
        cr_assert_eq(fattn_adamw_set_lr(a, lr), FATTN_OK);
        cr_assert_eq(fattn_adamw_step(a), FATTN_OK, "%s", fattn_ctx_error(ctx));
        cr_assert_eq(fattn_adamw_grad_norm(a, &norm), FATTN_OK);
        cr_assert_eq(fattn_adamw_norm_view(a, &view), FATTN_OK);
        cr_assert(view.ndim == 0 && view.dtype == FATTN_F64 && *(const double *)view.data == norm);
        cr_assert_float_eq(norm, sqrt(squares), 1e-12 * norm);
        for (int i = 0; i < PARAMS; ++i)
            for (int64_t e = 0; e < lengths[i]; ++e) {
                const double got = get(&m.p[i].value, e);
                cr_assert_float_eq(got, want[i][e].p, rtol * (1 + fabs(got)), "%s step %ld: %g, not %g",
                                   fattn_dtype_name(dtype), (long)t, got, want[i][e].p);
                if (i != 4)
                    cr_assert_eq(get(&m.p[i].grad, e), 0);
                else
                    cr_assert_neq(get(&m.p[i].grad, e), 0, "a frozen param is left alone");
            }
        const double moved = fabs(get(&m.p[3].value, 40000) - before);
        if (t == 1) cr_assert_gt(moved, 0.005); /* the first step is about lr */
    }
    int64_t steps;
    cr_assert_eq(fattn_adamw_get_step(a, &steps), FATTN_OK);
    cr_assert_eq(steps, STEPS);
    for (int i = 0; i < PARAMS; ++i) free(want[i]);
    fattn_adamw_destroy(a);
    model_free(&m, ctx);
}

/* Bounds. F64: rounding. F32: per step the parameter is rounded twice (2^-24 of |p|), and the
   update of at most 3 lr = 0.03 carries about ten roundings: 6 * (2 * 6e-8 |p| + 0.03 * 10 * 6e-8).
 */
Test(adamw, f64_follows_the_rule) { against_reference(FATTN_F64, FATTN_F64, 0, 1e-14); }
Test(adamw, f32_follows_the_rule) { against_reference(FATTN_F32, FATTN_F32, 0, 8e-7); }
Test(adamw, f64_clips) { against_reference(FATTN_F64, FATTN_F64, 20, 1e-14); }
Test(adamw, f32_clips) { against_reference(FATTN_F32, FATTN_F32, 20, 8e-7); }
/* The float32 gradient of an F64 parameter is exact in double. */
Test(adamw, f64_takes_f32_gradients) { against_reference(FATTN_F64, FATTN_F32, 0, 1e-14); }

Test(adamw, masters_keep_updates_below_16_bit_precision) {
    const fattn_dtype types[] = {FATTN_BF16, FATTN_F16};
    for (int n = 0; n < 2; ++n) {
        model half, full;
        model_new(&half, ctx, types[n], n ? FATTN_F32 : types[n]);
        model_new(&full, ctx, FATTN_F32, FATTN_F32);
        for (int i = 0; i < PARAMS; ++i)
            cr_assert_eq(fattn_tensor_copy(ctx, &full.p[i].value, &half.p[i].value), FATTN_OK);
        fattn_adamw *a, *b;
        cr_assert_eq(fattn_adamw_create(ctx, NULL, half.list, PARAMS, &a), FATTN_OK);
        cr_assert_eq(fattn_adamw_create(ctx, NULL, full.list, PARAMS, &b), FATTN_OK);
        cr_assert_eq(fattn_adamw_set_lr(a, 1e-5f), FATTN_OK); /* far below a bf16 step of 1 */
        cr_assert_eq(fattn_adamw_set_lr(b, 1e-5f), FATTN_OK);
        for (int t = 0; t < 20; ++t) {
            set_gradients(&half, ctx, t);
            for (int i = 0; i < PARAMS; ++i)
                cr_assert_eq(fattn_tensor_copy(ctx, &full.p[i].grad, &half.p[i].grad), FATTN_OK);
            cr_assert_eq(fattn_adamw_step(a), FATTN_OK);
            cr_assert_eq(fattn_adamw_step(b), FATTN_OK);
        }
        for (int i = 0; i < PARAMS; ++i) {
            if (i == 4) continue;
            fattn_tensor master;
            cr_assert_eq(fattn_adamw_state(a, i, FATTN_ADAM_MASTER, &master), FATTN_OK);
            for (int64_t e = 0; e < lengths[i]; ++e) {
                double cell; /* storage for any dtype */
                const double want = get(&full.p[i].value, e);
                cr_assert_eq(get(&master, e), want, "bit for bit the float32 run");
                fattni_store(&cell, (int32_t)types[n], 0, want);
                cr_assert_eq(get(&half.p[i].value, e), fattni_load(&cell, (int32_t)types[n], 0));
            }
        }
        fattn_adamw_destroy(a);
        fattn_adamw_destroy(b);
        model_free(&half, ctx);
        model_free(&full, ctx);
    }
}

static void steps(model *m, fattn_ctx *c, fattn_adamw *a, int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
        set_gradients(m, c, t);
        cr_assert_eq(fattn_adamw_step(a), FATTN_OK);
    }
}
static void same_bits(const fattn_tensor *a, const fattn_tensor *b) {
    const size_t bytes = (size_t)fattn_tensor_numel(a) * fattn_dtype_size((fattn_dtype)a->dtype);
    if (bytes) cr_assert_arr_eq(a->data, b->data, bytes);
}

Test(adamw, resumes_bitwise) {
    const fattn_dtype types[] = {FATTN_F32, FATTN_F64, FATTN_BF16};
    for (int n = 0; n < 3; ++n) {
        model whole, halves;
        model_new(&whole, ctx, types[n], types[n]);
        model_new(&halves, ctx, types[n], types[n]);
        fattn_adamw_options o = {.struct_size = sizeof o};
        fattn_adamw_defaults(&o);
        o.max_grad_norm = 10;
        fattn_adamw *a, *first, *second;
        cr_assert_eq(fattn_adamw_create(ctx, &o, whole.list, PARAMS, &a), FATTN_OK);
        cr_assert_eq(fattn_adamw_create(ctx, &o, halves.list, PARAMS, &first), FATTN_OK);
        steps(&whole, ctx, a, 0, 7);
        steps(&halves, ctx, first, 0, 4);
        cr_assert_eq(fattn_adamw_create(ctx, &o, halves.list, PARAMS, &second), FATTN_OK);
        for (int i = 0; i < PARAMS; ++i)
            for (int s = FATTN_ADAM_M; s <= FATTN_ADAM_MASTER && i != 4; ++s) {
                if (s == FATTN_ADAM_MASTER && types[n] != FATTN_BF16) continue;
                fattn_tensor from, to;
                cr_assert_eq(fattn_adamw_state(first, i, (fattn_adam_state)s, &from), FATTN_OK);
                cr_assert_eq(fattn_adamw_state(second, i, (fattn_adam_state)s, &to), FATTN_OK);
                cr_assert_eq(fattn_tensor_copy(ctx, &to, &from), FATTN_OK);
            }
        int64_t t;
        cr_assert_eq(fattn_adamw_get_step(first, &t), FATTN_OK);
        cr_assert_eq(t, 4);
        cr_assert_eq(fattn_adamw_set_step(second, t), FATTN_OK);
        fattn_adamw_destroy(first);
        steps(&halves, ctx, second, 4, 7);
        for (int i = 0; i < PARAMS; ++i) same_bits(&whole.p[i].value, &halves.p[i].value);
        fattn_adamw_destroy(a);
        fattn_adamw_destroy(second);
        model_free(&whole, ctx);
        model_free(&halves, ctx);
    }
}

Test(adamw, threads_and_instruction_sets_do_not_matter) {
    model one, many;
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    o.max_grad_norm = 1;
    for (int threads = 1; threads <= 8; ++threads) {
        const fattn_ctx_options with = {
            .struct_size = sizeof with, .cpu_threads = threads, .arch_cap = 1 + threads % 3};
        fattn_ctx *c;
        cr_assert_eq(fattn_ctx_create(&with, &c), FATTN_OK);
        model *m = threads == 1 ? &one : &many;
        model_new(m, threads == 1 ? ctx : c, FATTN_F32, FATTN_F32);
        fattn_adamw *a;
        cr_assert_eq(fattn_adamw_create(c, &o, m->list, PARAMS, &a), FATTN_OK);
        steps(m, c, a, 0, 3);
        fattn_adamw_destroy(a);
        if (threads > 1) {
            for (int i = 0; i < PARAMS; ++i) same_bits(&one.p[i].value, &many.p[i].value);
            model_free(&many, c);
        }
        fattn_ctx_destroy(c);
    }
    model_free(&one, ctx);
}

Test(adamw, a_step_with_non_finite_gradients_is_skipped) {
    model m, untouched;
    model_new(&m, ctx, FATTN_F32, FATTN_F32);
    model_new(&untouched, ctx, FATTN_F32, FATTN_F32);
    fattn_adamw *a;
    cr_assert_eq(fattn_adamw_create(ctx, NULL, m.list, PARAMS, &a), FATTN_OK);
    const float poison[] = {NAN, INFINITY};
    for (int n = 0; n < 2; ++n) {
        double norm;
        int64_t t;
        fattn_tensor v;
        set_gradients(&m, ctx, 1);
        ((float *)m.p[3].grad.data)[33333] = poison[n];
        cr_assert_eq(fattn_adamw_step(a), FATTN_OK);
        cr_assert_eq(fattn_adamw_grad_norm(a, &norm), FATTN_OK);
        cr_assert(!isfinite(norm));
        cr_assert_eq(fattn_adamw_get_step(a, &t), FATTN_OK);
        cr_assert_eq(t, 0);
        cr_assert_eq(fattn_adamw_state(a, 3, FATTN_ADAM_V, &v), FATTN_OK);
        cr_assert_eq(get(&v, 33333), 0);
        cr_assert_eq(get(&m.p[3].grad, 33333), 0);
        for (int i = 0; i < PARAMS; ++i) same_bits(&m.p[i].value, &untouched.p[i].value);
    }
    steps(&m, ctx, a, 0, 1);
    cr_assert_neq(get(&m.p[0].value, 0), get(&untouched.p[0].value, 0));
    fattn_adamw_destroy(a);
    model_free(&m, ctx);
    model_free(&untouched, ctx);
}

/* Also of a step that is skipped. */
Test(adamw, gradients_of_one_pass_stay) {
    static const fattn_dtype dtypes[][2] = {{FATTN_F64, FATTN_F64},
                                            {FATTN_F64, FATTN_F32},
                                            {FATTN_F32, FATTN_F32},
                                            {FATTN_BF16, FATTN_F32},
                                            {FATTN_F16, FATTN_F16}};
    for (size_t k = 0; k < sizeof dtypes / sizeof *dtypes; ++k) {
        model zeroed, kept;
        fattn_adamw *a, *b;
        model_new(&zeroed, ctx, dtypes[k][0], dtypes[k][1]);
        model_new(&kept, ctx, dtypes[k][0], dtypes[k][1]);
        for (int i = 0; i < PARAMS; ++i) kept.p[i].flags |= FATTN_PARAM_ONE_PASS;
        cr_assert_eq(fattn_adamw_create(ctx, NULL, zeroed.list, PARAMS, &a), FATTN_OK);
        cr_assert_eq(fattn_adamw_create(ctx, NULL, kept.list, PARAMS, &b), FATTN_OK);
        for (int step = 0; step < 3; ++step) {
            set_gradients(&zeroed, ctx, step), set_gradients(&kept, ctx, step);
            if (step == 1) fattni_store(zeroed.p[3].grad.data, zeroed.p[3].grad.dtype, 7, NAN);
            if (step == 1) fattni_store(kept.p[3].grad.data, kept.p[3].grad.dtype, 7, NAN);
            cr_assert_eq(fattn_adamw_step(b), FATTN_OK);
            for (int i = 0; i < PARAMS; ++i) same_bits(&kept.p[i].grad, &zeroed.p[i].grad);
            cr_assert_eq(fattn_adamw_step(a), FATTN_OK);
            for (int i = 0; i < PARAMS; ++i) same_bits(&kept.p[i].value, &zeroed.p[i].value);
            for (int64_t e = 0; e < lengths[3]; ++e) cr_assert_eq(get(&zeroed.p[3].grad, e), 0);
        }
        fattn_adamw_destroy(a);
        fattn_adamw_destroy(b);
        model_free(&zeroed, ctx);
        model_free(&kept, ctx);
    }
}

Test(adamw, defaults_fill_what_the_caller_knows) {
    fattn_adamw_options o;
    memset(&o, 0x7f, sizeof o);
    o.struct_size = offsetof(fattn_adamw_options, eps);
    const float untouched = o.eps;
    fattn_adamw_defaults(&o);
    cr_assert_eq(o.struct_size, offsetof(fattn_adamw_options, eps));
    cr_assert(o.beta1 == 0.9f && o.beta2 == 0.999f && o.eps == untouched);
    o.struct_size = sizeof o;
    fattn_adamw_defaults(&o);
    cr_assert(o.eps == 1e-8f && o.weight_decay == 0.01f && o.max_grad_norm == 0);
    o.struct_size = 0;
    fattn_adamw_defaults(&o);
    cr_assert_eq(o.struct_size, 0);
    fattn_adamw_defaults(NULL);
}

static void rejected(fattn_adamw_options o, fattn_status want) {
    fattn_adamw *a = (fattn_adamw *)&o;
    cr_assert_eq(fattn_adamw_create(ctx, &o, NULL, 0, &a), want, "%s", fattn_ctx_error(ctx));
    cr_assert_null(a);
}

Test(adamw, bad_options_are_rejected) {
    fattn_adamw_options good = {.struct_size = sizeof good}, o;
    fattn_adamw_defaults(&good);
    o = good, o.struct_size = 0, rejected(o, FATTN_E_ABI);
    o = good, o.beta1 = 1, rejected(o, FATTN_E_ARG);
    o = good, o.beta2 = -0.1f, rejected(o, FATTN_E_ARG);
    o = good, o.eps = 0, rejected(o, FATTN_E_ARG);
    o = good, o.weight_decay = NAN, rejected(o, FATTN_E_ARG);
    o = good, o.max_grad_norm = -1, rejected(o, FATTN_E_ARG);
    fattn_adamw *none;
    cr_assert_eq(fattn_adamw_create(ctx, &good, NULL, 0, &none), FATTN_OK, "no params: a no-op");
    cr_assert_eq(fattn_adamw_step(none), FATTN_OK);
    fattn_adamw_destroy(none);
    fattn_adamw_destroy(NULL);
}

Test(adamw, calls_out_of_order_are_rejected) {
    model m;
    model_new(&m, ctx, FATTN_F32, FATTN_F32);
    fattn_adamw *a;
    double norm;
    int64_t t;
    fattn_tensor view;
    fattn_param *const twice[] = {&m.p[0], &m.p[1], &m.p[0]};
    cr_assert_eq(fattn_adamw_create(ctx, NULL, twice, 3, &a), FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(ctx), "params[2]"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_adamw_create(ctx, NULL, NULL, 3, &a), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_create(NULL, NULL, twice, 3, &a), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_create(ctx, NULL, (fattn_param *[]){NULL}, 1, &a), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_create(ctx, NULL, m.list, PARAMS, &a), FATTN_OK);
    cr_assert_eq(fattn_adamw_grad_norm(a, &norm), FATTN_E_STATE);
    cr_assert_eq(fattn_adamw_norm_view(a, &view), FATTN_OK);
    cr_assert_eq(*(const double *)view.data, 0);
    cr_assert_eq(fattn_adamw_norm_view(NULL, &view), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_norm_view(a, NULL), FATTN_E_ARG);
    cr_assert(strstr(fattn_ctx_error(ctx), "adamw_norm_view: view is NULL"), "%s", fattn_ctx_error(ctx));
    cr_assert_eq(fattn_adamw_set_lr(a, NAN), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_set_lr(a, -1), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_set_step(a, -1), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_get_step(a, NULL), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_get_step(NULL, &t), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_state(a, PARAMS, FATTN_ADAM_M, &view), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_state(a, -1, FATTN_ADAM_M, &view), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_state(a, 0, (fattn_adam_state)9, &view), FATTN_E_ARG);
    cr_assert_eq(fattn_adamw_state(a, 0, FATTN_ADAM_MASTER, &view), FATTN_E_STATE);
    cr_assert_eq(fattn_adamw_state(a, 4, FATTN_ADAM_M, &view), FATTN_E_STATE);

    set_gradients(&m, ctx, 1);
    const double before = get(&m.p[0].value, 0), gradient = get(&m.p[0].grad, 0);
    m.p[4].flags = 0; /* no longer frozen */
    cr_assert_eq(fattn_adamw_step(a), FATTN_E_STATE);
    m.p[4].flags = FATTN_PARAM_FROZEN;
    m.p[5].value.shape[0] = m.p[5].grad.shape[0] = 1; /* shrunk */
    cr_assert_eq(fattn_adamw_step(a), FATTN_E_STATE);
    m.p[5].value.shape[0] = m.p[5].grad.shape[0] = lengths[5];
    cr_assert(get(&m.p[0].value, 0) == before && get(&m.p[0].grad, 0) == gradient);
    m.p[0].flags = FATTN_PARAM_FROZEN; /* freezing later is allowed */
    double squares = 0;
    for (int i = 1; i < PARAMS; ++i)
        for (int64_t e = 0; e < lengths[i] && i != 4; ++e) squares += get(&m.p[i].grad, e) * get(&m.p[i].grad, e);
    ((float *)m.p[0].grad.data)[0] = (float)gradient * 1e4f; /* and out of the norm */
    cr_assert_eq(fattn_adamw_step(a), FATTN_OK);
    cr_assert_eq(fattn_adamw_grad_norm(a, &norm), FATTN_OK);
    cr_assert_float_eq(norm, sqrt(squares), 1e-12 * norm);
    cr_assert_eq(get(&m.p[0].value, 0), before);
    cr_assert_eq(get(&m.p[0].grad, 0), (double)((float)gradient * 1e4f));
    fattn_adamw_destroy(a);
    model_free(&m, ctx);
}

Test(adamw, every_allocation_may_fail) {
    model m;
    model_new(&m, ctx, FATTN_BF16, FATTN_F32);
    const size_t before = fattn_ctx_mem(ctx).live;
    fattn_adamw *a;
    long n = 0;
    for (;; ++n) {
        memory.left = n;
        const fattn_status s = fattn_adamw_create(ctx, NULL, m.list, PARAMS, &a);
        if (s == FATTN_OK) break;
        cr_assert_eq(s, FATTN_E_NOMEM);
        cr_assert_null(a);
        cr_assert_eq(fattn_ctx_mem(ctx).live, before, "allocation %ld", n);
    }
    cr_assert_gt(n, 8);
    memory.left = 0; /* a step needs none */
    set_gradients(&m, ctx, 1);
    cr_assert_eq(fattn_adamw_step(a), FATTN_OK);
    memory.left = -1;
    fattn_adamw_destroy(a);
    model_free(&m, ctx);
}

/* One param of four elements: the result of a step with arbitrary finite gradients. */
typedef struct four {
    fattn_param p;
    fattn_adamw *a;
} four;

static void four_new(four *f, fattn_dtype dtype, fattn_dtype grad_dtype, float limit) {
    const int64_t n = 4;
    f->p = (fattn_param){.name = "p"};
    cr_assert_eq(fattn_tensor_alloc(ctx, dtype, 1, &n, &f->p.value), FATTN_OK);
    cr_assert_eq(fattn_tensor_alloc(ctx, grad_dtype, 1, &n, &f->p.grad), FATTN_OK);
    cr_assert_eq(fattn_tensor_normal(ctx, &f->p.value, 1, 0, (fattn_rng){.seed = 1}), FATTN_OK);
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    o.weight_decay = 0;
    o.max_grad_norm = limit;
    cr_assert_eq(fattn_adamw_create(ctx, &o, (fattn_param *[]){&f->p}, 1, &f->a), FATTN_OK);
    cr_assert_eq(fattn_adamw_set_lr(f->a, 0.125f), FATTN_OK);
}
static void four_step(four *f, const double g[4]) {
    for (int64_t e = 0; e < 4; ++e) fattni_store(f->p.grad.data, f->p.grad.dtype, e, g[e]);
    cr_assert_eq(fattn_adamw_step(f->a), FATTN_OK, "%s", fattn_ctx_error(ctx));
}
static void four_free(four *f) {
    fattn_adamw_destroy(f->a);
    fattn_tensor_free(ctx, &f->p.value);
    fattn_tensor_free(ctx, &f->p.grad);
}

/* value's dtype, gradient's, and a finite number near its end */
static const struct pairing {
    fattn_dtype value, grad;
    double largest;
} pairings[] = {
    {FATTN_F64, FATTN_F64, 1e308},  {FATTN_F64, FATTN_F32, 3e38},  {FATTN_F32, FATTN_F32, 3e38},
    {FATTN_BF16, FATTN_BF16, 3e38}, {FATTN_BF16, FATTN_F32, 3e38}, {FATTN_F16, FATTN_F32, 3e38},
    {FATTN_F16, FATTN_F16, 65504},
};
enum { PAIRINGS = sizeof pairings / sizeof *pairings };

Test(adamw, no_finite_gradient_makes_v_infinite) {
    for (int n = 0; n < PAIRINGS; ++n) {
        four f;
        fattn_tensor m, v;
        const double x = pairings[n].largest;
        four_new(&f, pairings[n].value, pairings[n].grad, 0);
        cr_assert_eq(fattn_adamw_state(f.a, 0, FATTN_ADAM_M, &m), FATTN_OK);
        cr_assert_eq(fattn_adamw_state(f.a, 0, FATTN_ADAM_V, &v), FATTN_OK);
        for (int t = 1; t <= 3; ++t) { /* three: v is at its largest beside its correction */
            four_step(&f, (double[]){x, -x, 1, 0});
            for (int64_t e = 0; e < 3; ++e) {
                cr_assert(isfinite(get(&m, e)) && isfinite(get(&v, e)) && get(&v, e) > 0, "%d: m %g, v %g", n,
                          get(&m, e), get(&v, e));
                /* the same gradient again and again: steps of lr each, whatever its size */
                const double want = e == 1 ? 1 + 0.125 * t : 1 - 0.125 * t;
                cr_assert_float_eq(get(&f.p.value, e), want, 1e-2, "%d [%d]: %g, not %g", n, (int)e, get(&f.p.value, e),
                                   want);
            }
            cr_assert_eq(get(&f.p.value, 3), 1);
        }
        four_free(&f);
    }
}

/* 4 gradients of x have the norm 2 x; F64 cannot hold twice the largest. */
Test(adamw, the_norm_of_finite_gradients_does_not_overflow) {
    for (int n = 0; n < PAIRINGS; ++n)
        for (int clips = 0; clips < 2; ++clips) {
            four f;
            const double x = pairings[n].largest / (pairings[n].grad == FATTN_F64 ? 4 : 1);
            double norm, cell;
            fattni_store(&cell, (int32_t)pairings[n].grad, 0, x);
            const double rounded = fattni_load(&cell, (int32_t)pairings[n].grad, 0);
            four_new(&f, pairings[n].value, pairings[n].grad, clips ? 2 : 0);
            four_step(&f, (double[]){x, -x, x, -x});
            cr_assert_eq(fattn_adamw_grad_norm(f.a, &norm), FATTN_OK);
            cr_assert_float_eq(norm / rounded, 2, 1e-12, "%d: norm %g of 4 x %g", n, norm, x);
            int64_t t;
            cr_assert_eq(fattn_adamw_get_step(f.a, &t), FATTN_OK);
            cr_assert_eq(t, 1);
            fattn_tensor m;
            cr_assert_eq(fattn_adamw_state(f.a, 0, FATTN_ADAM_M, &m), FATTN_OK);
            if (clips) cr_assert_float_eq(get(&m, 0), 0.1, 1e-6, "%d: m %g", n, get(&m, 0));
            four_free(&f);
        }
}

Test(adamw, step_counts_are_bounded) {
    const int64_t most = INT64_C(1) << 53;
    four f;
    int64_t t;
    four_new(&f, FATTN_F32, FATTN_F32, 0);
    cr_assert_eq(fattn_adamw_set_step(f.a, 7), FATTN_OK);
    const int64_t rejected[] = {INT64_MAX, INT64_MAX - 1, most + 1, -1, INT64_MIN};
    for (int n = 0; n < 5; ++n) {
        char text[32];
        snprintf(text, sizeof text, "%lld", (long long)rejected[n]);
        cr_assert_eq(fattn_adamw_set_step(f.a, rejected[n]), FATTN_E_ARG, "%s", text);
        cr_assert(strstr(fattn_ctx_error(ctx), text), "%s", fattn_ctx_error(ctx));
        cr_assert(strstr(fattn_ctx_error(ctx), "9007199254740992"), "%s", fattn_ctx_error(ctx));
        cr_assert_eq(fattn_adamw_get_step(f.a, &t), FATTN_OK);
        cr_assert_eq(t, 7);
    }
    cr_assert_eq(fattn_adamw_set_step(f.a, most), FATTN_OK);
    four_step(&f, (double[]){1, 1, 1, 1});
    cr_assert_eq(fattn_adamw_get_step(f.a, &t), FATTN_OK);
    cr_assert_eq(t, most + 1, "going on is fine");
    cr_assert(isfinite(get(&f.p.value, 0)) && get(&f.p.value, 0) < 1);
    four_free(&f);
}
