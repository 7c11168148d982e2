/* Learning rates as functions of the step. */
#include "core/base/internal.h"

#include <fattn/optim.h>

#include <math.h>

/* Of s from 0 to n - 1; 1 from n on, and where n is 0. */
static double share(int64_t s, int64_t n) { return s < n ? (double)s / (double)n : 1; }

static bool is_rate(float x) { return x >= 0 && isfinite(x); }

static fattn_status check(fattn_ctx *ctx, const fattn_schedule *s, int64_t step) {
    if (s->kind < FATTN_SCHEDULE_CONSTANT || s->kind > FATTN_SCHEDULE_WSD)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "schedule: unknown kind %d", s->kind);
    if (!is_rate(s->lr) || !is_rate(s->min_lr) || s->min_lr > s->lr)
        return fattn_ctx_fail(ctx, FATTN_E_ARG, "schedule: lr %g and min_lr %g are not finite with 0 <= min_lr <= lr",
                              (double)s->lr, (double)s->min_lr);
    if (s->warmup < 0 || s->steps < 0 || step < 0 || (s->kind != FATTN_SCHEDULE_CONSTANT && s->warmup > s->steps))
        return fattn_ctx_fail(
            ctx, FATTN_E_ARG,
            "schedule: step %lld, warmup %lld, steps %lld: negative, or the warm-up exceeds the steps", (long long)step,
            (long long)s->warmup, (long long)s->steps);
    return FATTN_OK;
}

fattn_status fattn_schedule_lr(fattn_ctx *ctx, const fattn_schedule *schedule, int64_t step, float *lr) {
    if (!ctx) return FATTN_E_ARG;
    if (!schedule || !lr) return fattn_ctx_fail(ctx, FATTN_E_ARG, "schedule_lr: schedule or lr is NULL");
    fattn_schedule s = {0};
    FATTNI_TRY(fattni_take_struct(ctx, "fattn_schedule", schedule, &s, sizeof s));
    FATTNI_TRY(check(ctx, &s, step));
    const double most = (double)s.lr, least = (double)s.min_lr, pi = 3.14159265358979323846;
    const double r = share(step - s.warmup, s.steps - s.warmup);
    const int64_t decay = s.steps / 5 * 4 + s.steps % 5 * 4 / 5; /* floor(0.8 N) */
    double rate = most;
    if (step < s.warmup)
        rate = most * ((double)step + 1) / (double)s.warmup;
    else if (s.kind == FATTN_SCHEDULE_COSINE)
        rate = least + 0.5 * (1 + cos(pi * r)) * (most - least);
    else if (s.kind == FATTN_SCHEDULE_LINEAR)
        rate = least + (1 - r) * (most - least);
    else if (s.kind == FATTN_SCHEDULE_WSD && step >= decay)
        rate = least + (1 - sqrt(share(step - decay, s.steps - decay))) * (most - least);
    *lr = (float)rate;
    return FATTN_OK;
}
