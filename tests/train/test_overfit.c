/* Training from start to end: a small character model memorises 64 characters; the bits depend on the seed
   only; steps after the first allocate nothing; a first step that runs out of memory at any allocation leaks
   nothing. */
#include "failing_alloc.h"

#include <criterion/criterion.h>
#include <fattn/fattn.h>

#include <math.h>
#include <string.h>

static const char text[] = "It is a truth universally acknowledged, that a single man in pos";

enum { S = 64, H = 2, D = 16, C = H * D, LAYERS = 2, VOCABULARY = 128, PER_LAYER = 6 };
enum { TENSORS = 2 + PER_LAYER * LAYERS };

typedef struct trainer {
    failing_alloc memory;
    fattn_ctx *ctx;
    fattn_tape *tape;
    fattn_adamw *opt;
    fattn_param params[TENSORS];
    int32_t ids[S], next[S];
    int32_t algorithm;
    int made; /* params that have memory */
} trainer;

/* Table [V,C], gain [C]; per layer: gain, qkv [3C,C], out [C,C], gain, up [4C,C], down [C,4C]. */
static fattn_status make_params(trainer *r, uint64_t seed) {
    static const int64_t shapes[PER_LAYER][2] = {{C}, {3 * C, C}, {C, C}, {C}, {4 * C, C}, {C, 4 * C}};
    for (int i = 0; i < TENSORS; ++i) {
        const int64_t outer[2][2] = {{VOCABULARY, C}, {C}};
        const int64_t *shape = i < 2 ? outer[i] : shapes[(i - 2) % PER_LAYER];
        const int ndim = shape[1] ? 2 : 1;
        fattn_param *p = &r->params[i];
        *p = (fattn_param){.name = "p", .flags = ndim == 1 ? FATTN_PARAM_NO_DECAY : 0};
        r->made = i + 1;
        fattn_status s = fattn_tensor_alloc(r->ctx, FATTN_F32, ndim, shape, &p->value);
        if (!s) s = fattn_tensor_alloc(r->ctx, FATTN_F32, ndim, shape, &p->grad);
        if (s) return s;
        const fattn_rng rng = {.seed = seed, .stream = (uint32_t)i};
        const double mean = ndim == 1, deviation = ndim == 1 ? 0 : 0.08;
        s = fattn_tensor_normal(r->ctx, &p->value, mean, deviation, rng);
        if (!s) s = fattn_tensor_normal(r->ctx, &p->grad, 0, 0, rng);
        if (s) return s;
    }
    return FATTN_OK;
}

/* The set-up of a user before the first step, without the context. */
static fattn_status prepare(trainer *r, uint64_t seed) {
    fattn_status s = make_params(r, seed);
    if (!s) s = fattn_tape_create(r->ctx, &r->tape);
    fattn_param *list[TENSORS];
    for (int i = 0; i < TENSORS; ++i) list[i] = &r->params[i];
    fattn_adamw_options o = {.struct_size = sizeof o};
    fattn_adamw_defaults(&o);
    o.max_grad_norm = 1;
    if (!s) s = fattn_adamw_create(r->ctx, &o, list, TENSORS, &r->opt);
    if (!s) s = fattn_adamw_set_lr(r->opt, 5e-3f);
    for (int i = 0; i < S; ++i) r->ids[i] = text[i], r->next[i] = text[(i + 1) % S];
    return s;
}
static void free_all(trainer *r) {
    fattn_adamw_destroy(r->opt);
    fattn_tape_destroy(r->tape);
    r->opt = NULL, r->tape = NULL;
    for (int i = 0; i < r->made; ++i) {
        fattn_tensor_free(r->ctx, &r->params[i].value);
        fattn_tensor_free(r->ctx, &r->params[i].grad);
    }
    r->made = 0;
    cr_assert_eq(fattn_ctx_mem(r->ctx).live, 0, "%zu bytes leaked", fattn_ctx_mem(r->ctx).live);
    cr_assert_eq(r->memory.live, 1);
}
static void start(trainer *r, int threads, uint64_t seed) {
    memset(r, 0, sizeof *r);
    r->memory.left = -1;
    r->ctx = failing_context(&r->memory, threads);
    cr_assert_eq(prepare(r, seed), FATTN_OK, "%s", fattn_ctx_error(r->ctx));
}
static void stop(trainer *r) {
    free_all(r);
    fattn_ctx_destroy(r->ctx);
}

static fattn_var layer(trainer *r, fattn_var x, fattn_param *p) {
    fattn_tape *t = r->tape;
    const fattn_attention_params ap = {.struct_size = sizeof ap, .flags = FATTN_CAUSAL, .algorithm = r->algorithm};
    const fattn_var none = {0};
    fattn_var h = fattn_op_rmsnorm(t, x, fattn_use(t, &p[0]), 1e-5f);
    h = fattn_op_linear(t, h, fattn_use(t, &p[1]), none);
    const fattn_var q = fattn_op_rope(t, fattn_op_heads(t, h, 0, H, D), 1e4f, 0);
    const fattn_var k = fattn_op_rope(t, fattn_op_heads(t, h, H, H, D), 1e4f, 0);
    const fattn_var v = fattn_op_heads(t, h, 2 * H, H, D);
    h = fattn_op_merge(t, fattn_op_attention(t, q, k, v, &ap));
    x = fattn_op_add(t, x, fattn_op_linear(t, h, fattn_use(t, &p[2]), none));
    h = fattn_op_rmsnorm(t, x, fattn_use(t, &p[3]), 1e-5f);
    h = fattn_op_silu(t, fattn_op_linear(t, h, fattn_use(t, &p[4]), none));
    return fattn_op_add(t, x, fattn_op_linear(t, h, fattn_use(t, &p[5]), none));
}

static fattn_status step(trainer *r, double *loss) {
    fattn_tape *t = r->tape;
    const int64_t shape[] = {1, S};
    const fattn_tensor ids = fattn_tensor_view(r->ids, FATTN_I32, FATTN_CPU, 0, 2, shape);
    const fattn_tensor next = fattn_tensor_view(r->next, FATTN_I32, FATTN_CPU, 0, 2, shape);
    fattn_tape_reset(t);
    const fattn_var table = fattn_use(t, &r->params[0]);
    fattn_var x = fattn_op_embedding(t, table, fattn_input(t, &ids));
    for (int l = 0; l < LAYERS; ++l) x = layer(r, x, &r->params[2 + l * PER_LAYER]);
    x = fattn_op_rmsnorm(t, x, fattn_use(t, &r->params[1]), 1e-5f);
    x = fattn_op_linear_cross_entropy(t, x, table, fattn_input(t, &next), -1);
    fattn_status s = fattn_tape_backward(t, x);
    if (!s) s = fattn_adamw_step(r->opt);
    return s ? s : fattn_tape_item(t, x, loss);
}
static double steps(trainer *r, int count) {
    double loss = NAN;
    for (int i = 0; i < count; ++i) cr_assert_eq(step(r, &loss), FATTN_OK, "step %d: %s", i, fattn_ctx_error(r->ctx));
    return loss;
}

Test(overfit, a_small_model_memorises_64_characters) {
    trainer r;
    start(&r, 1, 1);
    const double first = steps(&r, 1);
    cr_assert_float_eq(first, log(VOCABULARY), 0.5, "%g", first);
    cr_assert_lt(steps(&r, 150), 0.05);
    stop(&r);
}

static void same_weights(const trainer *a, const trainer *b) {
    for (int i = 0; i < TENSORS; ++i)
        cr_assert_arr_eq(a->params[i].value.data, b->params[i].value.data,
                         (size_t)fattn_tensor_numel(&a->params[i].value) * sizeof(float), "parameter %d", i);
}

Test(overfit, bits_depend_on_the_seed_only) {
    enum { STEPS = 12 };
    for (int32_t algorithm = FATTN_ALGO_AUTO; algorithm <= FATTN_ALGO_STANDARD; ++algorithm) {
        trainer one, other;
        start(&one, 1, 7);
        one.algorithm = algorithm;
        const double loss = steps(&one, STEPS);
        for (int threads = 1; threads <= 3; ++threads) {
            start(&other, threads, 7);
            other.algorithm = algorithm;
            cr_assert_eq(steps(&other, STEPS), loss, "%d threads", threads);
            same_weights(&one, &other);
            stop(&other);
        }
        start(&other, 1, 8);
        other.algorithm = algorithm;
        cr_assert_neq(steps(&other, STEPS), loss);
        stop(&other);
        stop(&one);
    }
}

/* Flash attention and stored P: the same mathematics. One step, because later ones divide rounding
   errors of tiny gradients by those gradients; a loss of 5 and a norm, each a float sum of some
   hundred terms: 1e-5. */
Test(overfit, algorithms_agree) {
    trainer flash, stored;
    double norm[2];
    start(&flash, 1, 3);
    start(&stored, 1, 3);
    stored.algorithm = FATTN_ALGO_STANDARD;
    const double a = steps(&flash, 1), b = steps(&stored, 1);
    cr_assert_float_eq(a, b, 1e-5 * a, "%.9g, %.9g", a, b);
    cr_assert_eq(fattn_adamw_grad_norm(flash.opt, &norm[0]), FATTN_OK);
    cr_assert_eq(fattn_adamw_grad_norm(stored.opt, &norm[1]), FATTN_OK);
    cr_assert_float_eq(norm[0], norm[1], 1e-5 * norm[0], "%.9g, %.9g", norm[0], norm[1]);
    stop(&flash);
    stop(&stored);
}

Test(overfit, later_steps_allocate_nothing) {
    for (int32_t algorithm = FATTN_ALGO_AUTO; algorithm <= FATTN_ALGO_STANDARD; ++algorithm) {
        trainer r;
        start(&r, 2, 1);
        r.algorithm = algorithm;
        steps(&r, 1);
        const size_t peak = fattn_ctx_mem(r.ctx).peak;
        fattn_tape_reset(r.tape); /* consolidates the arena into one block */
        const fattn_mem before = fattn_ctx_mem(r.ctx);
        r.memory.left = 0;
        steps(&r, 5);
        cr_assert_eq(fattn_ctx_mem(r.ctx).allocs, before.allocs);
        cr_assert_eq(fattn_ctx_mem(r.ctx).live, before.live);
        cr_assert_leq(fattn_ctx_mem(r.ctx).peak, peak);
        r.memory.left = -1;
        stop(&r);
    }
}

Test(overfit, every_allocation_of_the_first_step_may_fail) {
    trainer r = {.memory = {.left = -1}};
    r.ctx = failing_context(&r.memory, 1);
    long n = 0;
    for (;; ++n) {
        double loss = NAN;
        r.memory.left = n;
        fattn_status s = prepare(&r, 1);
        const bool prepared = s == FATTN_OK;
        if (prepared) s = step(&r, &loss);
        r.memory.left = -1;
        if (s == FATTN_OK) break;
        cr_assert_eq(s, FATTN_E_NOMEM, "allocation %ld: %s", n, fattn_ctx_error(r.ctx));
        cr_assert(strstr(fattn_ctx_error(r.ctx), "no memory"), "%s", fattn_ctx_error(r.ctx));
        if (prepared && n % 5 == 0) cr_assert_eq(step(&r, &loss), FATTN_OK, "the next step works");
        free_all(&r);
    }
    cr_assert_gt(n, 2 * TENSORS + 20);
    stop(&r);
}
