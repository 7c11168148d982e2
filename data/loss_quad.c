/* sum dO O + sum dL L in IEEE binary128, and its central differences. */
#include "generator.h"

#include "core/attention/ref.h"

#ifdef __clang__
typedef __float128 quad;
#else
__extension__ typedef _Float128 quad;
#endif

/* In glibc's libm, under names that are not part of ISO C11. */
quad expf128(quad), logf128(quad), log1pf128(quad), tanhf128(quad), fabsf128(quad);

/* The step that the reference adds to one element that it reads, and the sum of its results. The generator has
   one thread. */
static struct {
    const double *at;
    quad by, loss;
    const attention_case *of;
} run;

static int64_t index_of(const fattni_array *a, int64_t b, int64_t h, int64_t i, int64_t j) {
    return b * a->s[0] + h * a->s[1] + i * a->s[2] + j * a->s[3];
}

static quad moved(const fattni_array *a, int64_t b, int64_t h, int64_t i, int64_t j) {
    const double *const x = (const double *)a->p + index_of(a, b, h, i, j);
    return x == run.at ? (quad)*x + run.by : (quad)*x;
}

/* O and its gradient, L and its, are row-major of one shape; an infinite L is a constant. */
static void add_to_loss(const fattni_array *a, int64_t n, quad x) {
    const fattn_tensor *const t = run.of->t;
    const double *const weights = t[a->p == t[O].data ? D_O : D_LSE].data;
    if (weights && x - x == 0) run.loss += (quad)weights[n] * x;
}

#define GET(a, b, h, i, j) moved(a, b, h, i, j)
#define PUT(a, b, h, i, j, x) add_to_loss(a, index_of(a, b, h, i, j), x)
#define REAL quad
#define FN(name) name##_quad
#define MATH(name) name##f128
fattn_status fwd_ref_quad(fattn_ctx *ctx, const fattni_problem *p);
#include "fwd/ref/fwd_ref.c"

fattn_status quad_quotient(attention_case *c, const double *at, double step, double *out) {
    quad loss[2];
    fattni_problem p;
    FATTNI_TRY(fattni_problem_init(c->w->ctx, &c->params, &c->io, FATTNI_FWD, true, &p));
    for (int n = 0; n < 2; ++n) {
        run.at = at;
        run.by = n == 0 ? step : -step;
        run.loss = 0;
        run.of = c;
        FATTNI_TRY(fwd_ref_quad(c->w->ctx, &p));
        loss[n] = run.loss;
    }
    *out = (double)((loss[0] - loss[1]) / (2 * (quad)step));
    return FATTN_OK;
}
