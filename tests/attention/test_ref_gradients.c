/* The backward reference against central differences of the forward reference, every coordinate. */
#include "attention.h"
#include "core/attention/ref.h"

#include <criterion/criterion.h>
#include <float.h>
#include <math.h>
#include <stdio.h>

static const double relative = 1e-6, absolute = 1e-8;

/* sum dO O + sum dL L: the outputs contracted with a random cotangent. A row without keys has L = -inf for
   all inputs. */
static double contract(const attention *a) {
    const fattn_tensor *const o = &a->t[T_O], *const lse = &a->t[T_LSE];
    int64_t at[FATTN_MAX_DIMS] = {0};
    double sum = 0;
    for (int64_t n = 0; n < fattn_tensor_numel(o); ++n) {
        attention_index(o, n, at);
        if (attention_in_use(a, T_O, at)) sum += attention_get(o, at) * attention_get(&a->t[T_D_O], at);
    }
    for (int64_t n = 0; a->present[T_D_LSE] && n < fattn_tensor_numel(lse); ++n) {
        attention_index(lse, n, at);
        const double L = attention_get(lse, at);
        if (attention_in_use(a, T_LSE, at) && isfinite(L)) sum += L * attention_get(&a->t[T_D_LSE], at);
    }
    return sum;
}

static double loss(attention *a, const fattni_problem *p) {
    attention_reset(a); /* a merge starts from the other keys' result */
    cr_assert_eq(fattni_fwd_ref(a->ctx, p), FATTN_OK);
    return contract(a);
}

static double difference(attention *a, const fattni_problem *p, enum tensor_id id, const int64_t *at) {
    const fattn_tensor *const t = &a->t[id];
    const double x = attention_get(t, at), h = cbrt(DBL_EPSILON) * fmax(1, fabs(x));
    const double above = x + h, below = x - h; /* the stored values: the quotient uses these */
    attention_set(t, at, above);
    const double up = loss(a, p);
    attention_set(t, at, below);
    const double down = loss(a, p);
    attention_set(t, at, x);
    return (up - down) / (above - below);
}

static int64_t check_input(attention *a, const attention *got, const fattni_problem *p, enum tensor_id id,
                           enum tensor_id gradient, uint32_t add) {
    if (!a->present[gradient]) return 0;
    attention_reset(a);
    const fattn_tensor *const t = &a->t[id], *const d = &got->t[gradient];
    int64_t at[FATTN_MAX_DIMS] = {0}, checked = 0;
    for (int64_t n = 0; n < fattn_tensor_numel(t); ++n) {
        attention_index(t, n, at);
        const bool moves = attention_in_use(a, id, at) && isfinite(attention_get(t, at));
        if (!moves && gradient != T_D_BIAS) continue;
        attention_reset(a);
        const double start = a->c.flags & add ? attention_get(&a->t[gradient], at) : 0;
        const double want = moves ? difference(a, p, id, at) : 0;
        const double have = attention_get(d, at) - start;
        const double error = fabs(have - want);
        cr_assert(error <= (moves ? absolute + relative * fabs(want) : 0),
                  "%s: %s at [%lld,%lld,%lld,%lld] is %.12g, the difference quotient %.12g", a->c.name,
                  attention_names[gradient], (long long)at[0], (long long)at[1], (long long)at[2], (long long)at[3],
                  have, want);
        checked += 1;
    }
    return checked;
}

/* Returns the number of coordinates. */
static int64_t check(fattn_ctx *ctx, const attention_case *c) {
    attention *const a = attention_new(ctx, c), *const got = attention_new(ctx, c);
    attention_run(got, REFERENCE);
    fattni_problem p;
    cr_assert_eq(fattni_problem_init(ctx, &a->params, &a->io, FATTNI_FWD, true, &p), FATTN_OK, "%s: %s", c->name,
                 fattn_ctx_error(ctx));
    int64_t checked = check_input(a, got, &p, T_Q, T_DQ, FATTN_ACC_DQ);
    checked += check_input(a, got, &p, T_K, T_DK, FATTN_ACC_DK);
    checked += check_input(a, got, &p, T_V, T_DV, FATTN_ACC_DV);
    checked += check_input(a, got, &p, T_BIAS, T_D_BIAS, FATTN_ACC_DBIAS);
    checked += check_input(a, got, &p, T_SINK, T_D_SINK, FATTN_ACC_DSINK);
    attention_free(a);
    attention_free(got);
    return checked;
}

Test(ref_gradients, every_feature) {
    fattn_ctx *const ctx = attention_context(1);
    int64_t checked = 0;
    for (int n = 0; n < attention_feature_count; ++n) checked += check(ctx, &attention_features[n]);
    cr_log_info("%lld coordinates", (long long)checked);
    cr_assert_geq(checked, 10000);
    fattn_ctx_destroy(ctx);
}

Test(ref_gradients, mixed_features) {
    fattn_ctx *const ctx = attention_context(1);
    char name[16];
    for (int n = 0; n < 150; ++n) {
        attention_case c = attention_mix(n);
        snprintf(name, sizeof name, "mix %d", n);
        c.name = name;
        check(ctx, &c);
    }
    fattn_ctx_destroy(ctx);
}
